"""ComfyUI's Wan 2.1 VAE for one frame, written after comfy/ldm/wan/vae.py (dcbf1c1) and tiled_scale_multidim of
comfy/utils.py: what holds a tensor there holds it here."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_ldm import from_host


class CausalConv(nn.Conv3d):
    """Of one frame: the filters' last slice, and no padding in time."""

    def forward(self, x):
        height = self.kernel_size[1] // 2
        return F.conv3d(x, self.weight[:, :, -x.shape[2] :], self.bias, padding=(0, height, height))


class Norm(nn.Module):
    def __init__(self, width: int, dims: int):
        super().__init__()
        self.scale, self.gamma = width**0.5, nn.Parameter(torch.ones(width, *(1,) * dims))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma.to(x) + 0


class Residual(nn.Module):
    def __init__(self, c: int, k: int):
        super().__init__()
        self.residual = nn.Sequential(
            Norm(c, 3), nn.SiLU(), CausalConv(c, k, 3), Norm(k, 3), nn.SiLU(), nn.Dropout(0), CausalConv(k, k, 3)
        )
        self.shortcut = CausalConv(c, k, 1) if c != k else nn.Identity()

    def forward(self, x):
        before = x
        for layer in self.residual:
            x = layer(x)
        return x + self.shortcut(before)


def attend(q, k, v):
    shape = q.shape
    q, k, v = (t.view(shape[0], 1, shape[1], -1).transpose(2, 3).contiguous() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(2, 3).reshape(shape)


class Attention(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.norm, self.to_qkv, self.proj = Norm(c, 2), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        before = x
        x = self.norm(x.transpose(1, 2).flatten(0, 1))
        q, k, v = self.to_qkv(x).chunk(3, dim=1)
        x = attend(q, k, v)
        x = self.proj(x)
        return x.unflatten(0, (-1, 1)).transpose(1, 2) + before


class Upsample(nn.Module):
    def __init__(self, c: int, over_time: bool):
        super().__init__()
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest-exact"), nn.Conv2d(c, c // 2, 3, padding=1)
        )
        if over_time:
            self.time_conv = nn.Conv3d(c, 2 * c, (3, 1, 1))

    def forward(self, x):
        x = x.transpose(1, 2).flatten(0, 1)
        x = self.resample(x)
        return x.unflatten(0, (-1, 1)).transpose(1, 2)


class Downsample(nn.Module):
    def __init__(self, c: int, over_time: bool):
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(c, c, 3, stride=2))
        if over_time:
            self.time_conv = nn.Conv3d(c, c, (3, 1, 1))

    def forward(self, x):
        x = x.transpose(1, 2).flatten(0, 1)
        x = self.resample(x)
        return x.unflatten(0, (-1, 1)).transpose(1, 2)


def middle(c: int) -> nn.Sequential:
    return nn.Sequential(Residual(c, c), Attention(c), Residual(c, c))


class Encoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        width = arch["block_out_channels"]
        self.conv1, c, blocks = CausalConv(arch["in_channels"], width[0], 3), width[0], []
        for level in range(len(width)):
            for _ in range(arch["layers_per_block"]):
                blocks.append(Residual(c, width[level]))
                c = width[level]
            if level + 1 < len(width):
                blocks.append(Downsample(c, level > 0))
        self.downsamples, self.middle = nn.Sequential(*blocks), middle(c)
        self.head = nn.Sequential(Norm(c, 3), nn.SiLU(), CausalConv(c, 2 * arch["latent_channels"], 3))

    def forward(self, x):
        x = self.conv1(x)
        for layer in (*self.downsamples, *self.middle, *self.head):
            x = layer(x)
        return x


class Decoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        *_, deepest = width = arch["block_out_channels"]
        self.conv1 = CausalConv(arch["latent_channels"], deepest, 3)
        self.middle = middle(deepest)
        blocks, c = [], deepest
        for level in reversed(range(len(width))):
            for _ in range(arch["layers_per_block"] + 1):
                blocks.append(Residual(c, width[level]))
                c = width[level]
            if level:
                blocks.append(Upsample(c, level > 1))
                c //= 2
        self.upsamples = nn.Sequential(*blocks)
        self.head = nn.Sequential(Norm(c, 3), nn.SiLU(), CausalConv(c, arch["out_channels"], 3))

    def forward(self, x):
        x = self.conv1(x)
        for layer in self.middle:
            x = layer(x)
        chunks = []
        self.go_on(0, [x], chunks)
        return chunks

    def go_on(self, i, borrowed, chunks):
        """The next block and all that follow, of an input that no caller holds but the first."""
        x = borrowed.pop()
        if i < len(self.upsamples):
            x = self.upsamples[i](x)
            borrowed.append(x)
            del x
            self.go_on(i + 1, borrowed, chunks)
            return
        for layer in self.head:
            x = layer(x)
        chunks.append(x)


class Model(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        z, self.factor = arch["latent_channels"], 2 ** (len(arch["block_out_channels"]) - 1)
        self.encoder, self.conv1, self.conv2 = Encoder(arch), CausalConv(2 * z, 2 * z, 1), CausalConv(z, z, 1)
        self.decoder = Decoder(arch)

    def encode(self, x):
        out = self.encoder(x[:, :, :1])
        mean, _ = self.conv1(out).chunk(2, dim=1)
        return mean

    def decode(self, z):
        x = self.conv2(z)
        out = self.decoder(x[:, :, :1])
        return torch.cat(out, 2)

    def from_host(self, op: str, x):
        """Whole: latents, or an image, whose one frame has the strides of its channels."""
        on_device = of_host(op, x)
        getattr(self, op)(on_device)

    def tiles_from_host(self, op: str, x, tile: int):
        unit = self.factor if op == "decode" else 1
        side, overlap = tile // unit, min(64, tile // 4) // unit
        for one in x.split(1):
            corners = [range(0, s - overlap, side - overlap) if s > side else [0] for s in one.shape[3:]]
            for i, j in itertools.product(*corners):
                getattr(self, op)(of_host(op, one[..., i : i + side, j : j + side])).float()


def of_host(op: str, x):
    """``.to(device)`` of latents, or of ``image * 2 - 1``, which lies as (H, W, C)."""
    if op == "decode":
        return from_host(x, image=False)
    _, c, _, h, w = x.shape  # a batch would be frames; its stride is the channels' number
    return torch.empty_strided(x.shape, (c, 1, h * w * c, w * c, c), dtype=x.dtype, device=x.device)
