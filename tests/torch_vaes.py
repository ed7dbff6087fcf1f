"""diffusers' autoencoders, from the names that an architecture has here."""

from __future__ import annotations

import inspect

import diffusers
import torch
from diffusers.models.autoencoders import vae as blocks
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from vaemem.engine.configs import config_of

RELEASE = int(diffusers.__version__.split(".")[1])  # 42 for 0.42.1, or the older release's


class OneFrame(nn.Module):
    """An autoencoder of videos, as one of images: each is a video of one frame. Moments and images lose that axis."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.vae = vae

    def state_dict(self):
        return self.vae.state_dict()

    def encode(self, x):
        moments = self.vae.encode(x[:, :, None]).latent_dist.parameters[:, :, 0]
        return AutoencoderKLOutput(DiagonalGaussianDistribution(moments))

    def decode(self, z):
        return blocks.DecoderOutput(self.vae.decode(z[:, :, None]).sample[:, :, 0])


def of_config(config: dict, dtype: torch.dtype = torch.float32, device: str = "meta") -> nn.Module:
    """An instance of the class that a config names."""
    cls = getattr(diffusers, config["_class_name"])
    taken = inspect.signature(cls.__init__).parameters
    with torch.device(device):
        return cls(**{key: value for key, value in config.items() if key in taken}).eval().to(dtype)


class Tiny(nn.Module):
    """diffusers' AutoencoderTiny, with TAEF2's branch before the blocks of the smallest level, as taesd.py of
    madebyollin/taesd has it: x + conv(relu(norm(conv(x))))."""

    def __init__(self, config: dict):
        super().__init__()
        settings = {key: value for key, value in config.items() if key != "use_midblock_gn"}
        self.vae = diffusers.AutoencoderTiny(**settings)
        blocks = config["num_encoder_blocks"][-1]
        encoder, decoder = self.vae.encoder.layers, self.vae.decoder.layers
        for block in (*encoder[-1 - blocks : -1], *decoder[2 : 2 + blocks]) if config.get("use_midblock_gn") else ():
            c = block.conv[0].in_channels
            block.pool = nn.Sequential(
                nn.Conv2d(c, 4 * c, 1, bias=False),
                nn.GroupNorm(4, 4 * c),
                nn.ReLU(inplace=True),
                nn.Conv2d(4 * c, c, 1, bias=False),
            )
            block.register_forward_pre_hook(lambda block, args: (args[0] + block.pool(args[0]),))

    def state_dict(self):
        return self.vae.state_dict()

    def load_state_dict(self, state):
        return self.vae.load_state_dict(state)

    def encode(self, x):
        return self.vae.encode(x)

    def decode(self, z):
        return self.vae.decode(z)


def tile(vae: nn.Module, side: int, scale: int) -> None:
    """Has diffusers' module decode in tiles of so many pixels, a quarter of which are shared."""
    if isinstance(vae, OneFrame):
        vae.vae.enable_tiling(side, side, side * 3 // 4, side * 3 // 4)
        vae.vae.spatial_compression_ratio = scale
        return
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = side, side // scale


def diffusers_vae(arch: dict, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    if arch.get("family") == "tiny":
        with torch.device(device):
            return Tiny(config_of(arch)).eval().to(dtype)
    if arch.get("family") in ("wan", "ltx"):
        return OneFrame(of_config(config_of(arch), dtype, device))
    if arch.get("family") == "hunyuan_image":
        return of_config(config_of(arch), dtype, device)
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
    kind = "AutoencoderKLFlux2" if "patch_size" in arch else "AutoencoderKL"
    with torch.device(device):
        vae = getattr(diffusers, kind)(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            **{key: arch[key] for key in keys if key in arch},
        )
    return vae.eval().to(dtype)
