"""ComfyUI's decoder of Wan 2.1's VAE for one frame, written after comfy/ldm/wan/vae.py (dcbf1c1): what holds a
tensor there holds it here."""

from __future__ import annotations

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


class Decoder(nn.Module):
    def __init__(self, arch: dict):
        super().__init__()
        *_, deepest = width = arch["block_out_channels"]
        self.conv1 = CausalConv(arch["latent_channels"], deepest, 3)
        self.middle = nn.Sequential(Residual(deepest, deepest), Attention(deepest), Residual(deepest, deepest))
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
    """Its encoder's parameters are not here."""

    def __init__(self, arch: dict):
        super().__init__()
        z = arch["latent_channels"]
        self.conv1, self.conv2, self.decoder = CausalConv(2 * z, 2 * z, 1), CausalConv(z, z, 1), Decoder(arch)

    def decode(self, z):
        x = self.conv2(z)
        out = self.decoder(x[:, :, :1])
        return torch.cat(out, 2)

    def decode_from_host(self, latents):
        samples = from_host(latents, image=False)
        self.decode(samples)
