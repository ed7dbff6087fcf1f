"""Measure a fresh process from a weights file to a PNG, compared with PyTorch and diffusers.

    python benchmarks/cold_start.py [--size 512] [--rounds 3] [--threads 2]

SD 1.5's VAE with random weights, in diffusers' layout, float32. Each process starts Python, imports its libraries,
loads the file, decodes one latent and writes a PNG. Processes take turns. A first turn, not counted, fills the file
cache and compiles the libraries' Python.

Seconds: from the start of the process to its end, and its processor seconds. Memory: its peak resident size. The
figures are medians.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import median, parser_of

import vaemem

OURS = """
import numpy, vaemem
vae = vaemem.VAE.load("vae", parts="decoder")
vae.decode(numpy.load("latents.npy"), output_type="pil")[0].save("ours.png")
"""
PEER = """
import numpy, torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
vae = AutoencoderKL.from_pretrained("vae")
with torch.inference_mode():
    image = vae.decode(torch.from_numpy(numpy.load("latents.npy"))).sample
VaeImageProcessor().postprocess(image)[0].save("peer.png")
"""
CONFIG = {
    "_class_name": "AutoencoderKL",
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 4,
}


def write_inputs(folder: Path, size: int) -> None:
    """Write the folder of a model, and latents for an image of this size."""
    (folder / "vae").mkdir()
    with vaemem.VAE.random("sd15") as vae:
        vae.save(folder / "vae" / "diffusion_pytorch_model.safetensors")
    (folder / "vae" / "config.json").write_text(json.dumps(CONFIG))
    side = size // 8
    np.save(folder / "latents.npy", np.random.default_rng(0).standard_normal((1, 4, side, side), np.float32))


def run(script: str, folder: Path, threads: int) -> tuple[float, float, float]:
    """Run a script in a fresh process. Return its seconds, its processor seconds, and MiB resident at its peak."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "VAEMEM_THREADS": str(threads)}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", script], cwd=folder, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"a script failed with status {status}")
    process.returncode = 0
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = parser_of(__doc__, size=512, rounds=3, threads=2)
    args = parser.parse_args()
    scripts = {"vaemem": OURS, "PyTorch and diffusers": PEER}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in scripts}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args.size)
        for turn in range(args.rounds + 1):
            for who, script in scripts.items():
                measured = run(script, folder, args.threads)
                if turn:
                    found[who].append(measured)
    print("| | seconds | processor s | peak RSS |\n|---|---|---|---|")
    for who, rows in found.items():
        seconds, processor, mib = (median([*column]) for column in zip(*rows, strict=True))
        print(f"| {who} | {seconds:.1f} | {processor:.1f} | {mib:.0f} MiB |")


if __name__ == "__main__":
    main()
