"""Measure single passes on the CPU: their share of the machine's peak, in a whole run and by themselves.

    python benchmarks/passes.py [--op decode encode] [--size 512] [--dtype float32] [--precision highest] [--threads 2]
        [--rounds 9] [--backend avx512] [--small]

With --op and no word after it, only single passes run.

Whole runs of SDXL (passes_*.csv) list each pass with its FLOPs, its seconds (medians of the rounds) and its share of a
peak. The peak is that of the unit that computes the products: FMA, or the unit for pairs of bfloat16. It is measured on
registers, on the same threads, just after each run.

Single passes (conv_*.csv, attention_*.csv) are the models' cases in tests/cases.py; --small takes the tests' small
cases instead, as a trial. Each is first compared with float64. Then it is timed in turns with oneDNN through PyTorch in
the same dtype. A convolution runs as in the engine: GroupNorm and SiLU on load, bias on store, the next norm's sums.
Its peer is only torch.nn.functional.conv2d (channels_last, no norm, no SiLU) on the same shape. The peer of attention
is scaled_dot_product_attention. Bytes count input, output, residual and weights once each. Errors are differences from
float64; rms_error is relative.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import PEAK_ROUNDS, median, parser_of, where, write_csv
from decode import DTYPES, PRECISIONS, architecture, errors_of, inputs

import vaemem
from vaemem import _core, _kernels
from vaemem.engine.arrays import HostArrays

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases import ATTENTIONS, CONVS, Attention, Conv, models, on, small

PAUSE = 0.05  # seconds until OpenMP's threads, which spin for a while after PyTorch's work, have left the cores to us

# ---- whole runs ----


def whole(args: argparse.Namespace, op: str) -> list[dict]:
    vae = vaemem.VAE.random(config=architecture(vars(args)), dtype=args.dtype, precision=args.precision)
    x = inputs(op, args.size)
    runs, peaks = [], []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        arrays = HostArrays(vae.arch, op, x, "float", None)
        arrays.request["threads"] = args.threads
        _, record = arrays.run(vae._core, True, backend=args.backend)
        runs.append((time.perf_counter() - start, record["steps"]))
        peaks.append(_kernels.peak(args.backend, args.threads, PEAK_ROUNDS, args.dtype, args.precision))
    runs, peaks = runs[1:], peaks[1:]  # the first round warms up
    rows = []
    for i, step in enumerate(runs[0][1]):
        seconds, flops = [steps[i]["seconds"] for _, steps in runs], step["flops"]
        rates = [flops / s if s else 0.0 for s in seconds]  # a clock may tick too slowly for a small pass
        rows.append(
            {
                "pass": step["name"],
                "op": op,
                "height": args.size,
                "width": args.size,
                "dtype": args.dtype,
                "precision": args.precision,
                "threads": args.threads,
                "backend": args.backend,
                "microseconds": round(median(seconds) * 1e6),
                "share_of_run": round(median([took / run for took, (run, _) in zip(seconds, runs, strict=True)]), 4),
                "gflops": round(median(rates) / 1e9, 1),
                "peak_gflops": round(median(peaks) / 1e9, 1),
                "share_of_peak": round(median([a / b for a, b in zip(rates, peaks, strict=True)]), 3),
                **where(),
            }
        )
    return rows


# ---- single passes ----


def peer_of(case: Conv | Attention, dtype: str) -> tuple[Callable[[], Any], int]:
    """What PyTorch does on the same shape, and its FLOPs."""
    import torch
    from torch.nn import functional as F

    kind = getattr(torch, dtype)
    if isinstance(case, Attention):
        q, k, v = torch.randn(3, 1, 1, case.n, case.c, dtype=kind)
        return lambda: F.scaled_dot_product_attention(q, k, v), case.flops
    last = torch.channels_last
    x = torch.randn(1, case.in_c, case.h, case.w, dtype=kind).contiguous(memory_format=last)
    weight = torch.randn(case.out_c, case.in_c, case.k, case.k, dtype=kind).contiguous(memory_format=last)

    def convolve() -> Any:
        source = F.interpolate(x, scale_factor=2.0, mode="nearest") if case.up else x
        return F.conv2d(source, weight, stride=case.stride, padding=case.k // 2)

    return convolve, case.flops * 9 // 4 if case.up else case.flops


def measure(case: Conv | Attention, args: argparse.Namespace) -> dict:
    sample = 1 if args.small else 17
    run = on(case, args.backend, args.threads, sample, args.dtype, args.precision)
    run.run()
    largest, rms = errors_of(*run.check())
    peer, peer_flops = peer_of(case, args.dtype)
    ours, shares, theirs = [], [], []
    for _ in range(args.rounds + 1):
        time.sleep(PAUSE)
        ours.append(run.run())
        peak = _kernels.peak(args.backend, args.threads, PEAK_ROUNDS, args.dtype, args.precision)
        shares.append(case.flops / ours[-1] / peak)
        start = time.perf_counter()
        peer()
        theirs.append(time.perf_counter() - start)
    ours, shares, theirs = ours[1:], shares[1:], theirs[1:]  # the first round warms up
    shape = asdict(case)
    del shape["model"]
    return {
        **shape,
        "max_error": f"{largest:.2e}",
        "rms_error": f"{rms:.2e}",
        "dtype": args.dtype,
        "precision": args.precision,
        "threads": args.threads,
        "backend": args.backend,
        "microseconds": round(median(ours) * 1e6),
        "gflops": round(case.flops / median(ours) / 1e9, 1),
        "gbytes_per_second": round(case.bytes_moved * (1 if args.dtype == "float32" else 0.5) / median(ours) / 1e9, 2),
        "share_of_peak": round(median(shares), 3),
        "torch_gflops": round(peer_flops / median(theirs) / 1e9, 1),
        "time_ratio_to_torch": round(median([a / b for a, b in zip(ours, theirs, strict=True)]), 3),
        **where(),
    }


def single(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    for operation, table in (("conv", CONVS), ("attention", ATTENTIONS)):
        rows = []
        for case in (small if args.small else models)(table):
            rows.append(measure(case, args))
            r = rows[-1]
            print(
                f"{case}: {r['microseconds']} us, {r['gflops']} GFLOP/s, {r['gbytes_per_second']} GB/s, "
                f"{100 * r['share_of_peak']:.0f}% of the peak; time {r['time_ratio_to_torch']:.2f} of torch's; "
                f"error {r['rms_error']} (max {r['max_error']})",
                flush=True,
            )
        write_csv(f"{operation}_{args.suffix}.csv", rows)


def main() -> None:
    parser = parser_of(__doc__, size=512, rounds=9, threads=2, small=False)
    parser.add_argument("--op", default=["decode", "encode"], nargs="*", choices=["decode", "encode"])
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--precision", default="highest", choices=PRECISIONS)
    parser.add_argument("--backend", help="instead of the best that there is")
    args = parser.parse_args()
    usable = [name for name, can in _core.backends(args.dtype, args.precision) if can]
    args.backend = args.backend or usable[0]
    if args.backend not in usable:
        parser.error(f"--backend: expected one of {', '.join(usable)}, got {args.backend!r}")
    kept = args.dtype if args.precision == "highest" else f"{args.dtype}_{args.precision}"
    args.suffix = f"{kept}_{args.backend}{'_small' * args.small}"
    for op in args.op:
        rows = whole(args, op)
        print(f"{op} {args.size}x{args.size} {kept}, {args.backend}, of {rows[0]['peak_gflops']} GFLOP/s")
        for r in sorted(rows, key=lambda r: -r["share_of_run"]):
            shares = f"{100 * r['share_of_run']:5.1f}% of the run  {100 * r['share_of_peak']:5.0f}% of the peak"
            print(f"  {r['pass']:46s} {r['microseconds']:9d} us  {r['gflops']:8.1f} GFLOP/s  {shares}")
        write_csv(f"passes_{op}_{args.size}_{args.suffix}.csv", rows)
    single(args)


if __name__ == "__main__":
    main()
