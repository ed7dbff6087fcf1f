"""diffusers' AutoencoderKL, from the names that an architecture has here."""

from __future__ import annotations

import diffusers
import torch


def diffusers_vae(arch: dict, dtype: torch.dtype, device: str = "meta") -> diffusers.AutoencoderKL:
    levels = len(arch["block_out_channels"])
    keys = (
        "in_channels",
        "out_channels",
        "latent_channels",
        "block_out_channels",
        "layers_per_block",
        "norm_num_groups",
        "use_quant_conv",
        "use_post_quant_conv",
        "mid_block_add_attention",
    )
    with torch.device(device):
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            **{key: arch[key] for key in keys},
        )
    return vae.eval().to(dtype)
