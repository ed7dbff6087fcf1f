"""Count the work and bytes of every plan that a memory limit can pick on a GPU. Nothing runs.

    python benchmarks/gpu_plans.py --model sdxl --sizes 1024 2048

The GPU is tests/emulator with --multiprocessors multiprocessors. So the workspaces come from its substitute for cuDNN.
T is one activation of 128 channels at full size. Bytes leave out the weights; arrays are on the GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from emulator import build

import vaemem


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--multiprocessors", type=int, default=132)
    args = parser.parse_args()
    libcuda, libcudnn = build.build()
    os.environ |= {"VAEMEM_LIBCUDA": str(libcuda), "VAEMEM_CUDNN": str(libcudnn)}
    os.environ["VAEMEM_EMULATED_MULTIPROCESSORS"] = str(args.multiprocessors)
    os.environ["VAEMEM_EMULATED_GRANULARITY"] = str(2 << 20)  # as real ones have it
    print("| run | convolution | T: work of each plan |\n|---|---|---|")
    for op in ("decode", "encode"):
        for size in args.sizes:
            for convolution in ("cudnn", "own"):
                vae = vaemem.VAE.random(
                    args.model, device="cuda", dtype="bfloat16", parts=f"{op}r", convolution=convolution
                )
                tensor = 128 * size * size * 2
                plans = [
                    f"{(run.reserved_bytes - vae.reserved_bytes) / tensor:.2f}: {run.work:.2f}"
                    for run in vae.tradeoff(op, size, size, staged=False)
                ]
                print(f"| {op} {size}x{size} | {convolution} | {', '.join(plans)} |")
                vae.close()


if __name__ == "__main__":
    main()
