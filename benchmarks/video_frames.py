"""Estimate the cost of more frames of a video: the figures of docs/DESIGN.md's "More frames, on paper".

    python benchmarks/video_frames.py [--frames 21] [--sizes 480x832 720x1280]

FLOPs, and the inputs' two earlier frames that each causal convolution keeps, are counted from the calls of diffusers'
AutoencoderKLWan on PyTorch's device "meta"; its peak is vaemem.pytorch.predict_peak's. Float32, no GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

import vaemem
from vaemem.pytorch import predict_peak

GIB = 2**30


def counted(vae: Any, z: torch.Tensor) -> dict[str, float]:
    flops, kept = {"3D": 0, "2D": 0}, {}

    def seen(name: str, module: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        kernel = module.kernel_size
        flops["3D" if len(kernel) == 3 else "2D"] += 2 * y.numel() * module.in_channels * torch.Size(kernel).numel()
        if len(kernel) == 3 and kernel[0] > 1:
            kept[name] = max(kept.get(name, 0), 2 * x[:, :, 0].numel() * x.element_size())

    for name, module in vae.named_modules():
        if isinstance(module, WanCausalConv3d | torch.nn.Conv2d):
            module.register_forward_hook(lambda module, args, y, name=name: seen(name, module, args[0], y))
    video = vae.decode(z).sample
    bytes_of = {"rings_gib": sum(kept.values()) / GIB, "video_gib": video.nbytes / GIB}
    return {f"tflop_{kind}": n / 1e12 for kind, n in flops.items()} | {"convolutions": len(kept)} | bytes_of


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=21, help="latent ones")
    parser.add_argument("--sizes", nargs="+", default=["480x832", "720x1280"])
    args = parser.parse_args()
    for size in args.sizes:
        height, width = map(int, size.split("x"))
        with torch.device("meta"):
            vae = diffusers.AutoencoderKLWan().eval()
            z = torch.empty(1, 16, args.frames, height // 8, width // 8)
        peak = predict_peak(vae, z, gpu="H100", call=lambda vae, z: vae.decode(z).sample)
        figures = counted(vae, z) | {"allocated_gib": peak.allocated / GIB, "reserved_gib": peak.reserved / GIB}
        one = vaemem.VAE.random("qwen-image", parts="decoder")
        one.threads = 2
        run = one.estimate("decode", height, width)
        figures |= {"one_frame_tflop": sum(run.flops) / 1e12}
        figures |= {"one_frame_mib": (run.peak_bytes - run.weights_bytes) / 2**20}
        figures |= {"decoder_mib": sum(p.nbytes for p in vae.decoder.parameters()) / 2**20}
        print(size, ", ".join(f"{name} {value:.4g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
