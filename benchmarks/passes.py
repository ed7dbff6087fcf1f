"""Convolution passes against the machine's own peak, measured in the same breath, and against oneDNN through PyTorch.

    python benchmarks/conv.py [--threads 2] [--rounds 9] [--backend avx512]

A row is a pass as the engine runs it: GroupNorm and SiLU on load, bias on store, the next norm's sums. The peak is
multiply-adds on registers by the same instruction set on the same threads, just before each pass. The peer is
torch.nn.functional.conv2d alone (channels_last, float32, no norm, no SiLU) on the same shape.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from common import commit, cpu, median, write_csv

from vaemem import _core

# in, out, height, width of x, kernel, upsample
CASES = [
    (128, 128, 512, 512, 3, False),
    (256, 256, 256, 256, 3, False),
    (256, 128, 512, 512, 3, False),
    (512, 512, 128, 128, 3, False),
    (512, 512, 64, 64, 3, False),
    (256, 256, 256, 256, 3, True),
    (512, 512, 128, 128, 3, True),
    (256, 128, 512, 512, 1, False),
]


def measure(case: tuple, backend: str, threads: int, rounds: int) -> dict:
    xc, yc, h, w, k, up = case
    yh, yw = (2 * h, 2 * w) if up else (h, w)
    shapes = (xc, h, w, yc, yh, yw)
    scratch, sums = _core.kernel_needs(backend, threads, "conv", shapes, (k, 1, up))
    rng = np.random.default_rng(0)

    def noise(n: int) -> np.ndarray:
        return rng.standard_normal(n, dtype=np.float32)

    norm = not up and k == 3
    arrays = (
        noise(xc * h * w),
        np.zeros(yc * yh * yw, np.float32),
        None,
        noise(xc * yc * k * k) * np.float32(0.01),
        noise(yc),
        noise(xc),
        noise(xc),
        np.ones(16 + 2 * xc, np.float32) if norm else None,
        np.zeros(sums, np.float32),
        np.zeros(scratch, np.float32),
    )
    x = torch.randn(1, xc, h, w).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(yc, xc, k, k).contiguous(memory_format=torch.channels_last)
    flops = 2 * xc * yc * yh * yw * (4 if up else k * k)
    peer_flops = 2 * xc * yc * yh * yw * k * k
    ours, shares, peer = [], [], []
    for _ in range(rounds + 1):
        peak = _core.kernel_peak(backend, threads, 10_000_000)
        seconds = _core.kernel_pass(backend, threads, "conv", shapes, (k, 1, up, norm, 32 if norm else 0, 1e-6), arrays)
        ours.append(seconds)
        shares.append(flops / seconds / peak)
        start = time.perf_counter()
        source = torch.nn.functional.interpolate(x, scale_factor=2.0, mode="nearest") if up else x
        torch.nn.functional.conv2d(source, weight, padding=k // 2)
        peer.append(time.perf_counter() - start)
    ratio = median([a / b for a, b in zip(ours[1:], peer[1:], strict=True)])  # the first round warms up
    return {
        "in": xc,
        "out": yc,
        "height": h,
        "width": w,
        "kernel": k,
        "upsample": int(up),
        "threads": threads,
        "backend": backend,
        "gflops": round(flops / median(ours[1:]) / 1e9, 1),
        "share_of_peak": round(median(shares[1:]), 3),
        "torch_gflops": round(peer_flops / median(peer[1:]) / 1e9, 1),
        "time_ratio_to_torch": round(ratio, 3),
        "cpu": cpu(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default=next(name for name, usable in _core.backends() if usable))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case in CASES:
        rows.append(measure(case, args.backend, args.threads, args.rounds))
        r = rows[-1]
        kind = f"{r['kernel']}x{r['kernel']}{' after 2x' if r['upsample'] else ''}"
        print(
            f"{r['in']:4d} -> {r['out']:3d} {kind:12s} {r['height']}x{r['width']}: {r['gflops']:6.1f} GFLOP/s, "
            f"{100 * r['share_of_peak']:.0f}% of the FMA peak; time {r['time_ratio_to_torch']:.2f} of torch's",
            flush=True,
        )
    write_csv(f"conv_{args.backend}.csv", rows)


if __name__ == "__main__":
    main()
