"""diffusers' AutoencoderKL: its own class, or the same in plain PyTorch if diffusers cannot be imported.

Modules, their names and their order are those of diffusers 0.42, so state dicts fit as they are. The operators that run
are the same in the same order, and every tensor lives as long as there: each local name below is one of diffusers'. A
division by one, or a name that is not used again, looks superfluous, but takes memory in diffusers too.
tests/test_benchmarks_gpu.py compares numbers and lifetimes of both.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from vaemem.pytorch.measuring import vae_builder

__all__ = ["AutoencoderKL", "diffusers_class", "origin", "peer", "with_weights"]


class Config(dict):
    __getattr__ = dict.__getitem__


class Resnet(nn.Module):
    def __init__(self, c: int, out: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, c, 1e-6), nn.Conv2d(c, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out, 1e-6), nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(c, out, 1) if c != out else None

    def forward(self, x):
        h = self.norm1(x)
        h = F.silu(h)
        h = self.conv1(h)
        h = self.norm2(h)
        h = F.silu(h)
        h = self.conv2(h)
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        out = (x + h) / 1.0
        return out


class Attention(nn.Module):
    def __init__(self, c: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, c, 1e-6)
        self.to_q, self.to_k, self.to_v = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c)
        self.to_out = nn.ModuleList([nn.Linear(c, c)])

    def forward(self, x):
        n, c, height, width = x.shape
        h = x.view(n, c, height * width).transpose(1, 2)
        h = self.group_norm(h.transpose(1, 2)).transpose(1, 2)
        q, normed = self.to_q(h), h  # held to the end
        k, v = self.to_k(normed), self.to_v(normed)
        q, k, v = (t.view(n, -1, 1, c).transpose(1, 2) for t in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v)
        h = h.transpose(1, 2).reshape(n, -1, c)
        h = self.to_out[0](h)
        h = h.transpose(-1, -2).reshape(n, c, height, width)
        h = h + x
        h = h / 1.0
        return h


class Up(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        if x.shape[0] >= 64 or x.numel() * 2 > 2**31:  # as diffusers goes round two bugs of PyTorch
            x = x.contiguous()
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x)


class Down(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=2)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1), mode="constant", value=0)
        return self.conv(x)


class Level(nn.Module):
    """Resnets, then what changes the size: `sizer` is "upsamplers", "downsamplers" or, at the last, nothing."""

    def __init__(self, c: int, out: int, resnets: int, groups: int, sizer: str):
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(out if i else c, out, groups) for i in range(resnets))
        if sizer:
            self.add_module(sizer, nn.ModuleList([Up(out) if sizer == "upsamplers" else Down(out)]))

    def forward(self, h):
        for part in self.children():
            for module in part:
                h = module(h)
        return h


class Mid(nn.Module):
    def __init__(self, c: int, groups: int, attention: bool):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(c, groups)] if attention else [])
        self.resnets = nn.ModuleList([Resnet(c, c, groups), Resnet(c, c, groups)])

    def forward(self, h):
        h = self.resnets[0](h)
        for attention in self.attentions:
            h = attention(h)
        h = self.resnets[1](h)
        return h


class Encoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        widths, groups = arch["block_out_channels"], arch["norm_num_groups"]
        self.conv_in = nn.Conv2d(arch["in_channels"], widths[0], 3, padding=1)
        last = len(widths) - 1
        self.down_blocks = nn.ModuleList(
            Level(widths[max(i - 1, 0)], c, arch["layers_per_block"], groups, "downsamplers" if i < last else "")
            for i, c in enumerate(widths)
        )
        self.mid_block = Mid(widths[-1], groups, arch["mid_block_add_attention"])
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], 1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 2 * arch["latent_channels"], 3, padding=1)

    def forward(self, h):
        h = self.conv_in(h)
        for level in self.down_blocks:
            h = level(h)
        h = self.mid_block(h)
        h = self.conv_norm_out(h)
        h = F.silu(h)
        h = self.conv_out(h)
        return h


class Decoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        widths, groups = arch["block_out_channels"][::-1], arch["norm_num_groups"]
        self.conv_in = nn.Conv2d(arch["latent_channels"], widths[0], 3, padding=1)
        last = len(widths) - 1
        self.up_blocks = nn.ModuleList(
            Level(widths[max(i - 1, 0)], c, arch["layers_per_block"] + 1, groups, "upsamplers" if i < last else "")
            for i, c in enumerate(widths)
        )
        self.mid_block = Mid(widths[0], groups, arch["mid_block_add_attention"])
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], 1e-6)
        self.conv_out = nn.Conv2d(widths[-1], arch["out_channels"], 3, padding=1)

    def forward(self, h):
        h = self.conv_in(h)
        h = self.mid_block(h)
        for level in self.up_blocks:
            h = level(h)
        h = self.conv_norm_out(h)
        h = F.silu(h)
        h = self.conv_out(h)
        return h


class Gaussian:
    def __init__(self, moments):
        self.parameters = moments
        self.mean, self.logvar = torch.chunk(moments, 2, dim=1)
        self.logvar = torch.clamp(self.logvar, -30.0, 20.0)
        self.std = torch.exp(0.5 * self.logvar)
        self.var = torch.exp(self.logvar)

    def sample(self):
        noise = torch.randn(self.mean.shape, device=self.mean.device, dtype=self.mean.dtype)
        x = self.mean + self.std * noise
        return x


class AutoencoderKL(nn.Module):
    """diffusers' class in plain PyTorch, from a vaemem architecture (``VAE.arch``); without tiles and slices."""

    use_tiling = False

    def __init__(self, arch: dict):
        super().__init__()
        self.config = Config(arch)
        self.encoder, self.decoder = Encoder(arch), Decoder(arch)
        moments, latents = 2 * arch["latent_channels"], arch["latent_channels"]
        self.quant_conv = nn.Conv2d(moments, moments, 1) if arch["use_quant_conv"] else None
        self.post_quant_conv = nn.Conv2d(latents, latents, 1) if arch["use_post_quant_conv"] else None

    def moments(self, x):
        enc = self.encoder(x)
        if self.quant_conv is not None:
            enc = self.quant_conv(enc)
        return enc

    def encode(self, x):
        h = self.moments(x)
        posterior = Gaussian(h)
        return SimpleNamespace(latent_dist=posterior)

    def image(self, z):
        if self.post_quant_conv is not None:
            z = self.post_quant_conv(z)
        dec = self.decoder(z)
        return dec

    def decode(self, z, return_dict: bool = True):
        if self.use_tiling:
            raise NotImplementedError("tiles: this stands in for diffusers without them")
        decoded = self.image(z)
        return SimpleNamespace(sample=decoded) if return_dict else (decoded,)


def with_weights(vae, make=AutoencoderKL):
    """Returns make(vae.arch) in eval mode with copies of the tensors of a vaemem.VAE on the CPU."""
    with torch.device("meta"):
        module = make(vae.arch).eval()
    tensors = {name: torch.from_numpy(vae._core.get_tensor(name)).view(shape) for name, shape in vae._core.tensors}
    module.load_state_dict(tensors, assign=True)
    return module


@functools.cache
def diffusers_class():
    """Returns diffusers' AutoencoderKL, or None after a line that says why it cannot be imported."""
    try:
        from diffusers import AutoencoderKL
    except Exception as error:  # an incompatible package can make the import raise anything
        print(f"diffusers: {type(error).__name__}: {error}; benchmarks/torch_vae.py stands in", flush=True)
        return None
    return AutoencoderKL


def origin() -> str:
    """Names the code that `peer` returns."""
    return f"diffusers {sys.modules['diffusers'].__version__}" if diffusers_class() else "benchmarks/torch_vae.py"


def peer(vae):
    """Returns diffusers' module with the weights of a vaemem.VAE, with methods `image` and `moments`."""
    if diffusers_class() is None:
        return with_weights(vae)
    module = with_weights(vae, lambda arch: vae_builder(arch, "a benchmark")())
    module.image = lambda z: module.decode(z, return_dict=False)[0]
    module.moments = lambda x: module.encode(x).latent_dist.parameters
    return module
