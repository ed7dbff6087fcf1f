"""Decodes in every type and precision, compared with PyTorch's decode in float64: PSNR, SSIM and relative RMS error.

    python benchmarks/type_errors.py [--size 64] [--models sdxl flux qwen-image]

Weights are random in the real layouts and widths (PyTorch's default initialisation, random norms). All types load the
same float32 weights. float32 and float16 run on this CPU, and "high" and "medium" are those of its kernels (the column
`ran_on`). bfloat16 and fp8 run vaemem's own GPU kernels on the emulator of the tests (tests/emulator), which models the
short sums of e4m3.

PSNR and SSIM have the range of the float64 output, since random weights make no pictures. SSIM has windows of 8x8
pixels. Rows go to type_errors.csv in benchmarks/results.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import parser_of, write_csv
from decode import errors_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from emulator import build

import vaemem

WINDOW = 8
MODELS = ("sdxl", "flux", "qwen-image")
WAYS: list[dict[str, str]] = [
    {"dtype": "float32"},
    {"dtype": "float32", "precision": "high"},
    {"dtype": "float32", "precision": "medium"},
    {"dtype": "float16"},
    {"dtype": "bfloat16", "device": "cuda"},
    {"dtype": "bfloat16", "device": "cuda", "precision": "fp8"},
]


def save_random(model: str, folder: str) -> None:
    """Save a VAE with random weights in diffusers' layout."""
    vaemem.VAE.random(model, parts="all", videos=model == "qwen-image").save(folder)


def exact(model: str, folder: str, z: np.ndarray) -> np.ndarray:
    """Decode in float64 with diffusers. A model of videos makes one frame."""
    import diffusers
    import torch

    is_video = model == "qwen-image"
    kind = diffusers.AutoencoderKLQwenImage if is_video else diffusers.AutoencoderKL
    with torch.inference_mode():
        peer, of = kind.from_pretrained(folder).eval().double(), torch.from_numpy(z).double()
        return peer.decode(of[:, :, None]).sample[:, :, 0].numpy() if is_video else peer.decode(of).sample.numpy()


def means(x: np.ndarray) -> np.ndarray:
    """Average every window of each channel."""
    windows = np.lib.stride_tricks.sliding_window_view(x, (WINDOW, WINDOW), (-2, -1))
    return windows.mean((-2, -1))


def ssim(y: np.ndarray, want: np.ndarray, span: float) -> float:
    a, b = means(y), means(want)
    of_y, of_want, both = means(y * y) - a * a, means(want * want) - b * b, means(y * want) - a * b
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    return float(((2 * a * b + c1) * (2 * both + c2) / ((a * a + b * b + c1) * (of_y + of_want + c2))).mean())


def compare(y: np.ndarray, want: np.ndarray) -> dict[str, str]:
    y = y.astype(np.float64)
    relative, span = errors_of(y, want)[1], float(want.max() - want.min())
    psnr = 10 * math.log10(span**2 / max(float(((y - want) ** 2).mean()), 1e-300))
    return {"psnr_db": f"{psnr:.1f}", "ssim": f"{ssim(y, want, span):.6f}", "relative_rms": f"{relative:.2e}"}


def main() -> None:
    parser = parser_of(__doc__, size=64)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--csv", default="type_errors.csv")
    args = parser.parse_args()
    libcuda, libcudnn = build.build()
    os.environ |= {"VAEMEM_LIBCUDA": str(libcuda), "VAEMEM_CUDNN": str(libcudnn)}
    rows: list[dict[str, Any]] = []
    for model in args.models:
        channels, side = 4 if model == "sdxl" else 16, args.size // 8
        z = np.random.default_rng(0).standard_normal((1, channels, side, side), dtype=np.float32)
        with tempfile.TemporaryDirectory() as folder:
            save_random(model, folder)
            want, vae = exact(model, folder, z), vaemem.VAE.load(folder, videos=False)
        for way in WAYS:
            there = vae.copy(**way)
            chosen = next((row["name"] for row in vaemem.backends(way["dtype"], way.get("precision", "highest"))
                           if row["chosen"]), "")  # fmt: skip
            numbers = compare(there.decode(z), want)
            ran_on = "emulator of 9.0" if "device" in way else f"CPU, {chosen}"
            name = {"model": model, "size": args.size, "dtype": way["dtype"]}
            rows.append(name | {"precision": way.get("precision", "highest")} | numbers | {"ran_on": ran_on})
            print(*rows[-1].values(), sep="  ", flush=True)
            there.close()
            write_csv(args.csv, rows, quiet=True)


if __name__ == "__main__":
    main()
