"""Single passes on the CPU: checked, then timed beside oneDNN through PyTorch and the machine's own peak.

    python benchmarks/passes.py [--threads 2] [--rounds 9] [--backend avx512] [--small]

The cases are those of tests/cases.py: the models' own, or with --small those of the tests, to see that it runs. Each
is first compared with float64. A convolution is a pass as the engine runs it: GroupNorm and SiLU on load, bias on
store, the next norm's sums; its peer is torch.nn.functional.conv2d alone (channels_last, float32, no norm, no SiLU) on
the same shape, and attention's is scaled_dot_product_attention. The peak is multiply-adds on registers by the same
instruction set on the same threads, just before each pass. Bytes are those of input, output, residual and weights,
each once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import commit, cpu, median, write_csv
from torch.nn import functional as F

from vaemem import _core

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from cases import ATTENTIONS, CONVS, Attention, Conv, models, on, small


def peer_of(case: Conv | Attention) -> tuple[Callable[[], Any], int]:
    """What PyTorch does on the same shape, and its FLOPs."""
    if isinstance(case, Attention):
        q, k, v = torch.randn(3, 1, 1, case.n, case.c)
        return lambda: F.scaled_dot_product_attention(q, k, v), case.flops
    last = torch.channels_last
    x = torch.randn(1, case.in_c, case.h, case.w).contiguous(memory_format=last)
    weight = torch.randn(case.out_c, case.in_c, case.k, case.k).contiguous(memory_format=last)

    def convolve() -> torch.Tensor:
        source = F.interpolate(x, scale_factor=2.0, mode="nearest") if case.up else x
        return F.conv2d(source, weight, stride=case.stride, padding=case.k // 2)

    return convolve, case.flops * 9 // 4 if case.up else case.flops


def measure(case: Conv | Attention, args: argparse.Namespace) -> dict:
    run = on(case, args.backend, args.threads, sample=1 if args.small else 17)
    run.run()
    run.check()
    peer, peer_flops = peer_of(case)
    ours, shares, theirs = [], [], []
    for _ in range(args.rounds + 1):
        peak = _core.kernel_peak(args.backend, args.threads, 10_000_000)
        ours.append(run.run())
        shares.append(case.flops / ours[-1] / peak)
        start = time.perf_counter()
        peer()
        theirs.append(time.perf_counter() - start)
    ours, shares, theirs = ours[1:], shares[1:], theirs[1:]  # the first round warms up
    shape = asdict(case)
    del shape["model"]
    return {
        **shape,
        "threads": args.threads,
        "backend": args.backend,
        "microseconds": round(median(ours) * 1e6),
        "gflops": round(case.flops / median(ours) / 1e9, 1),
        "gbytes_per_second": round(case.bytes_moved / median(ours) / 1e9, 2),
        "share_of_peak": round(median(shares), 3),
        "torch_gflops": round(peer_flops / median(theirs) / 1e9, 1),
        "time_ratio_to_torch": round(median([a / b for a, b in zip(ours, theirs, strict=True)]), 3),
        "cpu": cpu(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default=next(name for name, usable in _core.backends() if usable))
    parser.add_argument("--small", action="store_true", help="the tests' shapes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for operation, table in (("conv", CONVS), ("attention", ATTENTIONS)):
        rows = []
        for case in (small if args.small else models)(table):
            rows.append(measure(case, args))
            r = rows[-1]
            print(
                f"{case}: {r['microseconds']} us, {r['gflops']} GFLOP/s, {r['gbytes_per_second']} GB/s, "
                f"{100 * r['share_of_peak']:.0f}% of the FMA peak; time {r['time_ratio_to_torch']:.2f} of torch's",
                flush=True,
            )
        write_csv(f"{operation}_{args.backend}{'_small' if args.small else ''}.csv", rows)


if __name__ == "__main__":
    main()
