"""Real PyTorch VAEs to record: diffusers' from a config, and one that lives as the flux repository's does."""

from __future__ import annotations

import diffusers
import torch
from diffusers.models.autoencoders import vae as blocks
from torch import nn
from torch.nn import functional as F


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


# What follows computes BFL's AutoEncoder and holds tensors as long as that does: each name below stands for one there.


class Resnet(nn.Module):
    def __init__(self, c: int, out: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, c, 1e-6), nn.Conv2d(c, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out, 1e-6), nn.Conv2d(out, out, 3, padding=1)
        if c != out:
            self.nin_shortcut = nn.Conv2d(c, out, 1)

    def forward(self, x):
        h = x
        for norm, conv in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            h = norm(h)
            h = F.silu(h)
            h = conv(h)
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return x + h


class Attention(nn.Module):
    def __init__(self, c: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, c, 1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def attend(self, h):
        h = self.norm(h)
        q, k, v = self.q(h), self.k(h), self.v(h)
        n, c, height, width = q.shape
        q = q.permute(0, 2, 3, 1).reshape(n, 1, -1, c).contiguous()
        k = k.permute(0, 2, 3, 1).reshape(n, 1, -1, c).contiguous()
        v = v.permute(0, 2, 3, 1).reshape(n, 1, -1, c).contiguous()
        h = F.scaled_dot_product_attention(q, k, v)
        return h.reshape(n, height, width, c).permute(0, 3, 1, 2)

    def forward(self, x):
        return x + self.proj_out(self.attend(x))


class Down(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=2)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return self.conv(x)


class Up(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2.0)
        return self.conv(x)


def _middle(c: int, groups: int) -> nn.Module:
    mid = nn.Module()
    mid.block_1, mid.attn_1, mid.block_2 = Resnet(c, c, groups), Attention(c, groups), Resnet(c, c, groups)
    return mid


class Encoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        widths, groups = arch["block_out_channels"], arch["norm_num_groups"]
        c = widths[0]
        self.conv_in = nn.Conv2d(arch["in_channels"], c, 3, padding=1)
        self.down = nn.ModuleList()
        for i, out in enumerate(widths):
            level = nn.Module()
            level.block = nn.ModuleList(
                Resnet(c if j == 0 else out, out, groups) for j in range(arch["layers_per_block"])
            )
            if i + 1 < len(widths):
                level.downsample = Down(out)
            self.down.append(level)
            c = out
        self.mid = _middle(c, groups)
        self.norm_out, self.conv_out = (
            nn.GroupNorm(groups, c, 1e-6),
            nn.Conv2d(c, 2 * arch["latent_channels"], 3, padding=1),
        )

    def forward(self, x):
        kept = [self.conv_in(x)]
        for level in self.down:
            for block in level.block:
                kept.append(block(kept[-1]))
            if hasattr(level, "downsample"):
                kept.append(level.downsample(kept[-1]))
        h = kept[-1]
        h = self.mid.block_1(h)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h)
        h = self.norm_out(h)
        h = F.silu(h)
        h = self.conv_out(h)
        return h


class Decoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        widths, groups = arch["block_out_channels"], arch["norm_num_groups"]
        c = widths[-1]
        self.conv_in = nn.Conv2d(arch["latent_channels"], c, 3, padding=1)
        self.mid = _middle(c, groups)
        levels = []
        for i, out in reversed(list(enumerate(widths))):
            level = nn.Module()
            level.block = nn.ModuleList(
                Resnet(c if j == 0 else out, out, groups) for j in range(arch["layers_per_block"] + 1)
            )
            if i:
                level.upsample = Up(out)
            levels.insert(0, level)  # numbered by size
            c = out
        self.up = nn.ModuleList(levels)
        self.norm_out, self.conv_out = nn.GroupNorm(groups, c, 1e-6), nn.Conv2d(c, arch["out_channels"], 3, padding=1)

    def forward(self, z):
        h = self.conv_in(z)
        h = self.mid.block_1(h)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h)
        for level in reversed(self.up):
            for block in level.block:
                h = block(h)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        h = self.norm_out(h)
        h = F.silu(h)
        h = self.conv_out(h)
        return h


class Gaussian(nn.Module):
    def forward(self, moments):
        mean, logvar = torch.chunk(moments, 2, dim=1)
        std = torch.exp(0.5 * logvar)
        return mean + std * torch.randn_like(mean)


class AutoEncoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        self.encoder, self.decoder, self.reg = Encoder(arch), Decoder(arch), Gaussian()
        self.scale, self.shift = arch["scaling_factor"], arch["shift_factor"]

    def encode(self, x):
        z = self.reg(self.encoder(x))
        z = self.scale * (z - self.shift)
        return z

    def decode(self, z):
        z = z / self.scale + self.shift
        return self.decoder(z)


def bfl_vae(arch: dict, dtype: torch.dtype) -> AutoEncoder:
    with torch.device("meta"):
        return AutoEncoder(arch).eval().to(dtype)
