"""How far runs in half precision are from float32: ours and PyTorch's, on several weights.

    python benchmarks/half_errors.py [--dtype bfloat16] [--size 256]

Prints the relative RMS error of a decode and of an encode. Both programs are compared with our run in float32, which is
off by about 1e-6 itself.
Weights are random (SDXL twice, FLUX.1, TAESD) and hand-made. Both programs load the same file of float32.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
from decode import DTYPES, errors_of, inputs

import vaemem
from vaemem._handmade import handmade, picture

WEIGHTS = {
    "SDXL": lambda: vaemem.VAE.random("sdxl", seed=0),
    "SDXL, other weights": lambda: vaemem.VAE.random("sdxl", seed=1),
    "FLUX.1": lambda: vaemem.VAE.random("flux", seed=0),
    "TAESD": lambda: vaemem.VAE.random("taesd", seed=0),
    "hand-made": lambda: handmade("sdxl"),
}


def operands(name: str, vae: vaemem.VAE, size: int) -> dict[str, np.ndarray]:
    """Noise, or what hand-made weights are made for."""
    if name == "hand-made":
        pixels = (picture(size).astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]
        return {"decode": np.ascontiguousarray(ours(vae, "encode", pixels)[:, :4]), "encode": pixels}
    return {
        "decode": inputs("decode", size, "qwen-image" if name == "FLUX.1" else "sdxl"),  # 16 or 4 channels
        "encode": inputs("encode", size),
    }


def ours(vae: vaemem.VAE, op: str, x: np.ndarray) -> np.ndarray:
    if op == "decode":
        return vae.decode(x)
    encoded = vae.encode(x)
    return encoded.moments if hasattr(encoded, "moments") else encoded


def theirs(model: Any, op: str, x: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        pixels = torch.from_numpy(x).to(model.dtype)
        if op == "decode":
            return model.decode(pixels).sample.float().numpy()
        encoded = model.encode(pixels)
        y = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.parameters
        return y.float().numpy()


def main() -> None:
    import diffusers
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--size", type=int, default=256)
    args = parser.parse_args()
    for name, make in WEIGHTS.items():
        exact = make()
        with tempfile.TemporaryDirectory() as folder:
            exact.save(folder)
            half = vaemem.VAE.load(folder, dtype=args.dtype)
            kind = diffusers.AutoencoderTiny if name == "TAESD" else diffusers.AutoencoderKL
            peer = kind.from_pretrained(folder).eval().to(getattr(torch, args.dtype))
        for op, x in operands(name, exact, args.size).items():
            want = ours(exact, op, x).astype(np.float64)
            ratios = [errors_of(y, want)[1] for y in (ours(half, op, x), theirs(peer, op, x))]
            print(f"{name}, {op}: {ratios[0]:.2e}, PyTorch {ratios[1]:.2e}", flush=True)


if __name__ == "__main__":
    main()
