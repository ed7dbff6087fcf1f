"""Count the work and bytes of every plan that a memory limit can pick on a GPU. Nothing runs.

    python benchmarks/gpu_plans.py --model sdxl --sizes 1024 2048
    python benchmarks/gpu_plans.py --model qwen-image --ops decode --sizes 480x832 720x1280 --frames 81

The GPU is tests/emulator with --multiprocessors multiprocessors. So the workspaces come from its substitute for cuDNN.
Bytes leave out the weights; arrays are on the GPU. The unit of images is T, one activation of 128 channels at full
size. That of videos is a GiB; bytes leave out the video too, which is uint8.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from emulator import build

import vaemem


def plans_of(vae: vaemem.VAE, op: str, height: int, width: int, frames: int) -> str:
    """Return the bytes and the work of each plan, as text."""
    how = {"frames": frames, "staged": False, "output_type": "uint8" if frames > 1 and op == "decode" else "float"}
    unit = 2**30 if frames > 1 else 128 * height * width * 2
    return ", ".join(
        f"{(run.reserved_bytes - vae.reserved_bytes - (run.output_bytes if frames > 1 else 0)) / unit:.2f}: "
        f"{run.work:.2f}"
        for run in vae.tradeoff(op, height, width, **how)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--ops", nargs="+", default=["decode", "encode"])
    parser.add_argument("--sizes", nargs="+", default=["1024", "2048"])
    parser.add_argument("--frames", type=int, default=1)
    parser.add_argument("--multiprocessors", type=int, default=132)
    args = parser.parse_args()
    libcuda, libcudnn = build.build()
    os.environ |= {"VAEMEM_LIBCUDA": str(libcuda), "VAEMEM_CUDNN": str(libcudnn)}
    os.environ["VAEMEM_EMULATED_MULTIPROCESSORS"] = str(args.multiprocessors)
    os.environ["VAEMEM_EMULATED_GRANULARITY"] = str(2 << 20)  # as real ones have it
    unit = "GiB" if args.frames > 1 else "T"
    print(f"| run | convolution | {unit}: work of each plan |\n|---|---|---|")
    for op in args.ops:
        for size in args.sizes:
            height, width = (int(side) for side in (size if "x" in size else f"{size}x{size}").split("x"))
            for convolution in ("cudnn", "own"):
                vae = vaemem.VAE.random(
                    args.model, device="cuda", dtype="bfloat16", parts=f"{op}r", convolution=convolution,
                    videos=args.frames > 1 or None,
                )  # fmt: skip
                plans = plans_of(vae, op, height, width, args.frames)
                print(f"| {op} {height}x{width} | {convolution} | {plans} |")
                vae.close()


if __name__ == "__main__":
    main()
