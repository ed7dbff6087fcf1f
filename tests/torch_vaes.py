"""diffusers' AutoencoderKL, from the names that an architecture has here."""

from __future__ import annotations

import diffusers
import torch
from diffusers.models.autoencoders import vae as blocks
from torch import nn


class AutoencoderKLFlux2(diffusers.AutoencoderKL):
    """What diffusers' class of that name, which 0.33 has not, adds: another decoder and a BatchNorm. Its methods are
    AutoencoderKL's, statement by statement (diffusers' main branch in August 2026)."""

    def __init__(self, decoder_block_out_channels=None, batch_norm_eps=1e-4, patch_size=(2, 2), **settings):
        super().__init__(**settings)
        if decoder_block_out_channels:
            self.decoder = blocks.Decoder(
                in_channels=settings["latent_channels"],
                out_channels=settings["out_channels"],
                up_block_types=settings["up_block_types"],
                block_out_channels=decoder_block_out_channels,
                layers_per_block=settings["layers_per_block"],
                norm_num_groups=settings["norm_num_groups"],
            )
        channels = patch_size[0] * patch_size[1] * settings["latent_channels"]
        self.bn = nn.BatchNorm2d(channels, eps=batch_norm_eps, affine=False)


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
        "decoder_block_out_channels",
        "patch_size",
        "batch_norm_eps",
    )
    flux2 = getattr(diffusers, "AutoencoderKLFlux2", AutoencoderKLFlux2)
    with torch.device(device):
        vae = (flux2 if "patch_size" in arch else diffusers.AutoencoderKL)(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            **{key: arch[key] for key in keys if key in arch},
        )
    return vae.eval().to(dtype)
