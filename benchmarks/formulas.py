"""How near the formulas of whole pipelines and of VAEs are to the predictions that they stand for.

Each is derived over the domain that is usual (every point of it is played), then asked at sizes between the domain's,
and with other lengths of prompts, which were not played. Prints a line each, and writes a CSV.

    python benchmarks/formulas.py --cards T4 "RTX 4060" "RTX 4090" --csv benchmarks/results/formulas.csv
"""

from __future__ import annotations

import argparse
import random
import time

from common import write_csv

import vaemem
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.pipeline_request import OFFLOADS

VAES = [("sd15", "encode"), ("sd15", "decode"), ("sdxl", "encode"), ("sdxl", "decode"), ("sdxl", "decode_tiled")]


def between(formula, stride, count, rng):
    """Points of the domain that were not played."""
    domain = formula.domain
    while count:
        height, width = (rng.randrange(domain.least, domain.most + 1, stride) for _ in range(2))
        if max(height, width) <= domain.ratio * min(height, width):
            count -= 1
            several = domain.prompt_tokens
            tokens = rng.randint(several[0], several[-1]) if len(several) > 1 else 0
            yield height, width, rng.choice(domain.batches), tokens


def judged(what, formula, stride, ask, count):
    began, rng = time.process_time(), random.Random(1)  # a formula has played others, of seed 0
    reserved = formula.reserved
    seconds = time.process_time() - began
    above, off = 0, []
    for point in between(formula, stride, count, rng):
        size = ask(*point)
        above += size > formula.upper(*point)
        off.append(abs(formula.predict(*point) / size - 1))
    off.sort()
    row = {
        **what, "points": sum(piece.points for piece in reserved.pieces), "cpu_seconds": round(seconds, 1),
        "pieces": len(reserved.pieces), "upper_within_10_percent": round(reserved.within, 4),
        "upper_worst": round(reserved.worst, 4), "upper_median": round(reserved.median, 4),
        "allocated_pieces": len(formula.allocated.pieces), "allocated_worst": round(formula.allocated.worst, 4),
        "between": count, "between_above_upper": above, "between_off_median": round(off[len(off) // 2], 4),
        "between_off_worst": round(off[-1], 4),
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cards", nargs="+", default=["T4", "RTX 3060", "RTX 4060", "RTX 4090", "A100 80GB", "H100"])
    parser.add_argument("--pipelines", nargs="*", default=list(PIPELINES), choices=PIPELINES)
    parser.add_argument("--offloads", nargs="+", default=OFFLOADS, choices=OFFLOADS)
    parser.add_argument("--step", type=int, default=64, help="pixels from side to side")
    parser.add_argument("--between", type=int, default=200, help="points beside, which were not played")
    parser.add_argument("--csv")
    args = parser.parse_args()
    rows = []
    for card in args.cards:
        for name in args.pipelines:
            for offload in args.offloads:
                asked = {"gpu": card, "offload": offload}
                try:
                    p = vaemem.predict_pipeline(name, 512, 512, **asked)
                except ValueError as error:  # a card without kernels for what was recorded
                    print(f"{name} on {card}: {error}", flush=True)
                    continue

                def ask(height, width, batch, tokens, name=name, asked=asked):
                    return vaemem.predict_pipeline(name, height, width, batch, tokens or None, **asked).peak

                stride, what = PIPELINES[name].stride, {"of": name, "card": card, "offload": offload}
                rows.append(judged(what, p.formula.over(step=args.step), stride, ask, args.between))
        for model, op in VAES:

            def ask(height, width, batch, tokens, model=model, op=op, card=card):
                return vaemem.predict(model, op, height, width, batch=batch, gpu=card).reserved

            what = {"of": f"{model} {op}", "card": card, "offload": ""}
            found = vaemem.formula(model, op, gpu=card).over(step=args.step)
            rows.append(judged(what, found, 8, ask, args.between))
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
