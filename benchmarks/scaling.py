"""Times a decode on the CPU with more and more threads.

    python benchmarks/scaling.py [--threads 16 8 4 2 1] [--size 512] [--dtypes float32 bfloat16] [--rounds 3]

Each row is the median of `rounds` runs after one warm-up. One thread comes last because it takes longest. PyTorch runs
the same module with the same weights (torch_vae.py) if it is installed. Rows go to scaling_<cpu>.csv in
benchmarks/results as they are measured.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
from common import median, where, write_csv

import vaemem

Decode = Callable[[np.ndarray, int], object]  # takes latents and a number of threads


def ours(dtype: str) -> Decode:
    vae = vaemem.VAE.random("sdxl", parts="decoder", dtype=dtype)

    def run(z: np.ndarray, threads: int) -> object:
        vae.threads = threads
        return vae.decode(z)

    return run


def torch_decode(dtype: str) -> Decode | None:
    """Returns PyTorch's decode, or None without PyTorch."""
    try:
        import torch
        import torch_vae
    except ImportError:
        return None
    module = torch_vae.with_weights(vaemem.VAE.random("sdxl")).to(getattr(torch, dtype))

    def run(z: np.ndarray, threads: int) -> object:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return module.image(torch.from_numpy(z).to(getattr(torch, dtype)))

    return run


def seconds_of(run: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of `rounds` runs after a warm-up."""
    run()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[16, 8, 4, 2, 1])
    parser.add_argument("--size", type=int, default=512, help="pixels of the decoded square")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    here = len(os.sched_getaffinity(0))
    z = np.random.default_rng(0).standard_normal((1, 4, args.size // 8, args.size // 8), dtype=np.float32)
    lines: list[dict] = []
    name = f"scaling_{''.join(c if c.isalnum() else '_' for c in where()['cpu'].lower())}.csv"
    for dtype in args.dtypes:
        runners = {"vaemem": ours(dtype), "torch": torch_decode(dtype)}
        for threads in [n for n in args.threads if n <= here]:
            for who, run in runners.items():
                if run is None:
                    continue
                seconds = seconds_of(lambda run=run, n=threads: run(z, n), args.rounds)
                row = {"contestant": who, "dtype": dtype, "size": args.size, "threads": threads}
                lines.append(row | {"seconds": round(seconds, 4), **where()})
                print(f"{who} {dtype} {args.size}x{args.size}, {threads} threads: {seconds:.3f} s", flush=True)
                write_csv(name, lines, quiet=True)


if __name__ == "__main__":
    main()
