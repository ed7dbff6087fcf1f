"""Encode and decode a photograph with a trained tiny autoencoder: PSNR against PyTorch's result and the photograph.

    python benchmarks/photograph.py taef2_encoder.pth taef2_decoder.pth photo.jpg [--crop LEFT TOP WIDTH HEIGHT]
        [--save back.png] [--dtype float32]

The files come from TAESD's authors (github.com/madebyollin/taesd), for any of their models that VAE.load knows. In
PyTorch it is diffusers' AutoencoderTiny with TAEF2's norms, in float32. PSNR against the photograph clamps images to
[-1, 1]. PSNR between our result and PyTorch's clamps nothing. The photograph is cut to whole latents.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vaemem
from vaemem.engine import images

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from torch_vaes import Tiny

from vaemem.engine.configs import config_of


def psnr(a: np.ndarray, b: np.ndarray) -> str:
    error = np.mean((a.astype(np.float64) - b) ** 2)
    return f"{10 * np.log10(2**2 / error):.2f} dB"


def pytorchs(halves: list[vaemem.VAE]) -> Tiny:
    made = Tiny(config_of(halves[0].arch)).eval()
    state = {name: torch.from_numpy(tensor) for vae in halves for name, tensor in vae.state_dict().items()}
    made.load_state_dict(state)
    return made


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("encoder", "decoder", "photo"):
        parser.add_argument(name)
    parser.add_argument("--crop", type=int, nargs=4, metavar=("LEFT", "TOP", "WIDTH", "HEIGHT"))
    parser.add_argument("--save", help="where the decoded image goes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    photo, _ = images.read_images(args.photo)
    left, top, width, height = args.crop or (0, 0, *photo.shape[2:0:-1])
    photo = photo[:, top : top + height // 8 * 8, left : left + width // 8 * 8]
    halves = [vaemem.VAE.load(getattr(args, part), parts=part) for part in ("encoder", "decoder")]
    encoder, decoder = (vae.copy(dtype=args.dtype) for vae in halves)
    latents = encoder.encode(photo).mode()
    ours = decoder.decode(latents)
    x, theirs = photo.transpose(0, 3, 1, 2) / np.float32(127.5) - 1, pytorchs(halves)
    latents_there = theirs.encode(torch.from_numpy(x)).latents
    back = theirs.decode(latents_there).sample.numpy()
    print(f"{encoder.model}, {photo.shape[1]}x{photo.shape[2]}, ours in {args.dtype}, PyTorch's in float32, PSNR of")
    print(f"ours and the photograph: {psnr(ours.clip(-1, 1), x)}")
    print(f"PyTorch's and the photograph: {psnr(back.clip(-1, 1), x)}")
    print(f"ours and PyTorch's: {psnr(ours, back)}")
    print(f"latents, ours and PyTorch's: {psnr(latents, latents_there.numpy())}")
    if args.save:
        Image.fromarray(decoder.decode(latents, output_type="uint8")[0]).save(args.save)


if __name__ == "__main__":
    main()
