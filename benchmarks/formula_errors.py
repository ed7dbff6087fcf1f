"""Compare the formulas of whole pipelines and of VAEs with the predictions that they stand for.

Each formula plays its sizes. Then the benchmark plays other sizes of the grid, with prompts of other lengths, and sizes
between those of the grid. It prints a line for each formula, and writes a CSV. `--bound` compares the formulas of
`vaemem.bound` with predictions of other sizes and of batches instead.

    python benchmarks/formula_errors.py --cards T4 "RTX 4060" "RTX 4090" --csv formulas.csv
    python benchmarks/formula_errors.py --bound
"""

from __future__ import annotations

import argparse
import random
import time

from common import write_csv

import vaemem
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.offload_kinds import OFFLOADS
from vaemem.prediction.peak_equations import GRID_SIDES

VAES = [("sd15", "encode"), ("sd15", "decode"), ("sdxl", "encode"), ("sdxl", "decode"), ("sdxl", "decode_tiled")]

GPU = "RTX 4090"
# (model, dtype, weights_dtype, runtime) of the runs of each application
RUNS = {
    "comfyui": [(m, d, d, "comfyui") for m in ("sdxl", "flux") for d in ("float32", "float16", "bfloat16")],
    "invokeai": [
        ("sdxl", "float16", "float16", "diffusers"), ("sdxl", "float32", "float32", "diffusers"),
        ("sdxl", "float32", "float16", "diffusers"),
        *(("flux", d, d, code) for d in ("float32", "float16", "bfloat16") for code in ("bfl", "diffusers")),
    ],
}  # fmt: skip


def between(grid, stride, count, rng):
    """Sizes within the grid's ends, multiples of the stride."""
    while count:
        height, width = (rng.randrange(GRID_SIDES[0], GRID_SIDES[-1] + 1, stride) for _ in range(2))
        try:
            point = grid.check(height, width, rng.randint(1, 4), None)
        except ValueError:
            continue
        count -= 1
        yield point


def compare(formula, points, rng):
    """(how many of the points lie above the formula, by how much at most), reserved and allocated."""
    found = {"reserved": [0.0], "allocated": [0.0]}
    for point in points:
        if point.tokens:
            point = point._replace(tokens=rng.randint(1, point.tokens))
        try:
            peaks = formula._play(point).values()
        except (ValueError, OverflowError):
            continue
        for name, shares in found.items():
            bound = getattr(formula, name).predict(*point[:3], point.tokens or None)
            shares.append(max(getattr(peak, name) for peak in peaks) / bound - 1)
    return {name: (sum(share > 0 for share in shares), round(max(shares), 4)) for name, shares in found.items()}


def judge(what, formula, stride, count):
    rng = random.Random(1)
    began = time.process_time()
    reserved, allocated = formula.reserved, formula.allocated
    row = {
        **what, "played": formula.played, "cpu_seconds": round(time.process_time() - began, 1),
        "reserved_lines": len(reserved.lines), "reserved_worst": round(reserved.excess, 4),
        "reserved_median": round(reserved.median, 4), "allocated_lines": len(allocated.lines),
        "allocated_exact": sum(line.kind == "exact" for line in allocated.lines),
        "allocated_worst": round(allocated.excess, 4),
    }  # fmt: skip
    whole = [*formula.grid]
    samples = {
        "grid": rng.sample(whole, min(count, len(whole))),
        "between": [*between(formula.grid, stride, count, rng)],
    }
    for name, points in samples.items():
        for counter, (above, most) in compare(formula, points, rng).items():
            row |= {f"{name}_{counter}_above": above, f"{name}_{counter}_above_by": most}
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def upper(run, op, height, width, batch=1):
    model, dtype, weights, runtime = run
    return vaemem.predict(model, op, height, width, dtype, batch, runtime, GPU, weights_dtype=weights).upper


def compare_bounds():
    """Compare the formulas of `vaemem.bound` with predictions of other sizes and of batches."""
    for application, runs in RUNS.items():
        began = time.process_time()
        found = vaemem.bound(application, gpu=GPU)
        print(f"{application}: {time.process_time() - began:.1f} s of CPU time")
        rng, shares = random.Random(1), []
        for height, width in [(rng.randrange(256, 2049, 8), rng.randrange(256, 2049, 8)) for _ in range(150)]:
            for run, op in ((run, op) for run in runs for op in ("encode", "decode")):
                line = found.find(run[0], op, run[1])
                shares.append((upper(run, op, height, width) / line.bytes(height, width) - 1, op, height, width, run))
        count, (share, *where) = sum(one[0] > 0 for one in shares), max(shares)
        print(f"{count} of {len(shares)} predictions of other sizes are above, at most {share:+.2%}: {where}")
        if application == "comfyui":
            batches = [
                upper(run, op, side, side, batch) / (batch * found.find(run[0], op, run[1]).bytes(side, side))
                for run in runs[:2] for op in ("encode", "decode") for side in (512, 640, 768, 1024) for batch in (2, 4)
            ]  # fmt: skip
            print(f"{len(batches)} batches: {min(batches):.2f} to {max(batches):.2f} of the formula times the batch")
    both = vaemem.bound(
        "comfyui", "sdxl", "float16", gpu=[GPU, "RTX 3060"], torch_version="2.9.1", sides=range(512, 2049, 256)
    )
    print(both)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", nargs="+", default=["T4", "RTX 3060", "RTX 4060", "RTX 4090", "A100 80GB", "H100"])
    parser.add_argument("--pipelines", nargs="*", default=list(PIPELINES), choices=PIPELINES)
    parser.add_argument("--offloads", nargs="+", default=OFFLOADS, choices=OFFLOADS)
    parser.add_argument("--count", type=int, default=200, help="other sizes, in the grid and between")
    parser.add_argument("--csv")
    parser.add_argument("--bound", action="store_true", help="compare the formulas of vaemem.bound instead")
    args = parser.parse_args()
    if args.bound:
        return compare_bounds()
    rows = []
    for card in args.cards:
        for name in args.pipelines:
            for offload in args.offloads:
                try:
                    p = vaemem.predict_pipeline(name, 512, 512, gpu=card, offload=offload)
                except ValueError as error:  # a card without kernels for what was recorded
                    print(f"{name} on {card}: {error}", flush=True)
                    continue
                what = {"of": name, "card": card, "offload": offload}
                rows.append(judge(what, p.formula, PIPELINES[name].stride, args.count))
        for model, op in VAES:
            what = {"of": f"{model} {op}", "card": card, "offload": ""}
            rows.append(judge(what, vaemem.formula(model, op, gpu=card), 8, args.count))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
