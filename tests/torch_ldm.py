"""VAEs that live as CompVis' AutoencoderKL does, and as ComfyUI's, Forge's, A1111's and Black Forest Labs' do.

No package index has these, so each function below stands for the one that its comment names, with the same order of
names bound and dropped. They compute the same as the originals but for A1111's and ComfyUI's choices by free memory.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F


def swish(x):  # CompVis/stable-diffusion, ldm/modules/diffusionmodules/model.py: nonlinearity
    return x * torch.sigmoid(x)


class Resnet(nn.Module):  # the same file: ResnetBlock
    def __init__(self, c: int, out: int, groups: int, activation):
        super().__init__()
        self.activation = activation
        self.norm1, self.conv1 = nn.GroupNorm(groups, c, 1e-6), nn.Conv2d(c, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, out, 1e-6), nn.Conv2d(out, out, 3, padding=1)
        if c != out:
            self.nin_shortcut = nn.Conv2d(c, out, 1)

    def forward(self, x):
        h = x
        for norm, conv in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            h = norm(h)
            h = self.activation(h)
            h = conv(h)
        if hasattr(self, "nin_shortcut"):
            x = self.nin_shortcut(x)
        return x + h


class Attention(nn.Module):  # the same file: AttnBlock
    def __init__(self, c: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, c, 1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))


class SlicedAttention(Attention):  # A1111, modules/sd_hijack_optimizations.py: cross_attention_attnblock_forward
    steps = 1  # there by free memory

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        n, c, height, width = q.shape
        q, k = q.reshape(n, c, -1).permute(0, 2, 1), k.reshape(n, c, -1)
        h = torch.zeros_like(k)
        part = q.shape[1] // self.steps
        for i in range(0, q.shape[1], part):
            scores = torch.bmm(q[:, i : i + part], k)
            scores = scores * c**-0.5
            scores = F.softmax(scores, dim=2, dtype=q.dtype).permute(0, 2, 1)
            h[:, :, i : i + part] = torch.bmm(v.reshape(n, c, -1), scores)
            del scores
        out = self.proj_out(h.reshape(n, c, height, width))
        del h
        out += x
        return out


def pytorch_attention(q, k, v):  # ComfyUI and Forge, comfy/ldm/modules/diffusionmodules/model.py
    shape = n, c, _, _ = q.shape
    q, k, v = (t.view(n, 1, c, -1).transpose(2, 3).contiguous() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v)
    return out.transpose(2, 3).reshape(shape)


class ComfyAttention(Attention):  # the same file: AttnBlock
    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        h = pytorch_attention(q, k, v)
        h = self.proj_out(h)
        return x + h


class BflAttention(Attention):  # black-forest-labs/flux, src/flux/modules/autoencoder.py: AttnBlock
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


class Resample(nn.Module):  # CompVis: Downsample and Upsample
    def __init__(self, c: int, down: bool):
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(c, c, 3, stride=2) if down else nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x)


class Runtime:
    """Whose blocks there are, and what the two halves do with their results."""

    def __init__(self, resnet, last, attention, lists: bool = False, rolls: bool = False):
        self.resnet, self.last, self.attention, self.lists, self.rolls = resnet, last, attention, lists, rolls


RUNTIMES = {
    # Their ResnetBlock has nn.SiLU(inplace=True). Forge's Encoder and Decoder end with CompVis' nonlinearity.
    "comfyui": Runtime(lambda x: F.silu(x, inplace=True), F.silu, ComfyAttention, rolls=True),
    "forge": Runtime(lambda x: F.silu(x, inplace=True), swish, ComfyAttention),
    "bfl": Runtime(F.silu, F.silu, BflAttention, lists=True),
    "a1111": Runtime(F.silu, F.silu, SlicedAttention, lists=True),  # modules/sd_hijack.py: nonlinearity = silu
}


def _level(c: int, out: int, blocks: int, groups: int, runtime: Runtime) -> nn.Module:
    level = nn.Module()
    level.block = nn.ModuleList(Resnet(out if j else c, out, groups, runtime.resnet) for j in range(blocks))
    return level


class Half(nn.Module):
    def middle(self, c: int, arch: dict, runtime: Runtime) -> None:
        groups = arch["norm_num_groups"]
        self.mid = nn.Module()
        self.mid.block_1 = Resnet(c, c, groups, runtime.resnet)
        self.mid.attn_1 = runtime.attention(c, groups) if arch["mid_block_add_attention"] else nn.Identity()
        self.mid.block_2 = Resnet(c, c, groups, runtime.resnet)

    def end(self, c: int, out: int, groups: int) -> None:
        self.norm_out, self.conv_out = nn.GroupNorm(groups, c, 1e-6), nn.Conv2d(c, out, 3, padding=1)


class Encoder(Half):  # CompVis: Encoder, which lists what it makes; ComfyUI's and Forge's do not
    def __init__(self, arch: dict, runtime: Runtime):
        super().__init__()
        self.last, self.lists, self.rolls = runtime.last, runtime.lists, runtime.rolls
        widths, groups = arch["block_out_channels"], arch["norm_num_groups"]
        c = widths[0]
        self.conv_in = nn.Conv2d(arch["in_channels"], c, 3, padding=1)
        self.down = nn.ModuleList()
        for i, out in enumerate(widths):
            level = _level(c, out, arch["layers_per_block"], groups, runtime)
            if i + 1 < len(widths):
                level.downsample = Resample(out, down=True)
            self.down.append(level)
            c = out
        self.middle(c, arch, runtime)
        self.end(c, 2 * arch["latent_channels"], groups)

    def forward(self, x):
        h = self.conv_in(x)
        kept = [h] if self.lists else None
        for level in self.down:
            for block in [*level.block, *([level.downsample] if hasattr(level, "downsample") else [])]:
                h = block(h)
                if self.lists:
                    kept.append(h)
        part = h if self.rolls else None  # ComfyUI: h1, one part of a video, from all of which h is joined
        h = self.mid.block_1(h)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h)
        h = self.norm_out(h)
        h = self.last(h)
        h = self.conv_out(h)
        del part
        return h


class Decoder(Half):  # CompVis: Decoder
    def __init__(self, arch: dict, runtime: Runtime):
        super().__init__()
        self.last, self.rolls = runtime.last, runtime.rolls
        widths = arch.get("decoder_block_out_channels", arch["block_out_channels"])
        groups, c = arch["norm_num_groups"], widths[-1]
        self.conv_in = nn.Conv2d(arch["latent_channels"], c, 3, padding=1)
        self.middle(c, arch, runtime)
        levels = []
        for i, out in reversed(list(enumerate(widths))):
            level = _level(c, out, arch["layers_per_block"] + 1, groups, runtime)
            if i:
                level.upsample = Resample(out, down=False)
            levels.insert(0, level)  # numbered by size
            c = out
        self.up = nn.ModuleList(levels)
        self.end(c, arch["out_channels"], groups)

    def forward(self, z):
        h = self.conv_in(z)
        h = self.mid.block_1(h)
        h = self.mid.attn_1(h)
        h = self.mid.block_2(h)
        parts = [h] if self.rolls else None  # ComfyUI: h, the parts of a video, which h1 goes through
        for level in reversed(self.up):
            for block in level.block:
                h = block(h)
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        h = self.norm_out(h)
        h = self.last(h)
        h = self.conv_out(h)
        del parts
        return h


class Gaussian:  # CompVis, ldm/modules/distributions/distributions.py: DiagonalGaussianDistribution
    def __init__(self, parameters):
        self.parameters = parameters
        self.mean, self.logvar = torch.chunk(parameters, 2, dim=1)
        self.logvar = torch.clamp(self.logvar, -30.0, 20.0)
        self.std = torch.exp(0.5 * self.logvar)
        self.var = torch.exp(self.logvar)

    def sample(self):
        return self.mean + self.std * torch.randn_like(self.mean)


class AutoencoderKL(nn.Module):  # CompVis, ldm/models/autoencoder.py
    def __init__(self, arch: dict, runtime: str):
        super().__init__()
        self.encoder, self.decoder = Encoder(arch, RUNTIMES[runtime]), Decoder(arch, RUNTIMES[runtime])
        channels = arch["latent_channels"]
        if arch["use_quant_conv"]:
            self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        if arch["use_post_quant_conv"]:
            self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    def encode(self, x):
        h = self.encoder(x)
        moments = self.quant_conv(h)
        posterior = Gaussian(moments)
        return posterior

    def decode(self, z):
        z = self.post_quant_conv(z)
        return self.decoder(z)


class ComfyModel(AutoencoderKL):  # ComfyUI, comfy/ldm/models/autoencoder.py: AutoencodingEngine and its heirs
    def __init__(self, arch: dict, runtime: str):
        super().__init__(arch, runtime)
        self.draws = runtime == "forge"
        if "patch_size" in arch:
            self.bn = nn.BatchNorm2d(4 * arch["latent_channels"], affine=False)

    def regularization(self, z):
        posterior = Gaussian(z)
        z = posterior.sample() if self.draws else posterior.mean
        return z, None

    def encode(self, x):
        z = self.encoder(x)
        if hasattr(self, "quant_conv"):
            z = self.quant_conv(z)
        z, _ = self.regularization(z)
        if hasattr(self, "bn"):
            n, c, h, w = z.shape
            z = z.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h // 2, w // 2)
            z = F.batch_norm(z, self.bn.running_mean, self.bn.running_var)
        return z

    def decode(self, z):
        # A tile has no name where it is passed, so the call itself holds none of it; some evaluators of frames do.
        z = z.pop() if isinstance(z, list) else z
        if hasattr(self, "bn"):
            deviation = torch.sqrt(self.bn.running_var.view(1, -1, 1, 1) + 1e-4)
            z = z * deviation + self.bn.running_mean.view(1, -1, 1, 1)
            n, c, h, w = z.shape
            z = z.reshape(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
        dec = self.post_quant_conv(z) if hasattr(self, "post_quant_conv") else z
        dec = self.decoder(dec)
        return dec


class BflModel(nn.Module):  # black-forest-labs/flux: AutoEncoder, whose `reg` is DiagonalGaussian
    def __init__(self, arch: dict, runtime: str):
        super().__init__()
        self.encoder, self.decoder = Encoder(arch, RUNTIMES[runtime]), Decoder(arch, RUNTIMES[runtime])
        self.scale, self.shift = arch["scaling_factor"], arch["shift_factor"]

    def reg(self, moments):
        mean, logvar = torch.chunk(moments, 2, dim=1)
        std = torch.exp(0.5 * logvar)
        return mean + std * torch.randn_like(mean)

    def encode(self, x):
        z = self.reg(self.encoder(x))
        z = self.scale * (z - self.shift)
        return z

    def decode(self, z):
        z = z / self.scale + self.shift
        return self.decoder(z)


def from_host(x, image: bool):
    """``.to(device)`` of what lies on the host: images as (N, H, W, C), seen as (N, C, H, W)."""
    order = torch.channels_last if image else torch.contiguous_format
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=order)


class ComfyVae(nn.Module):  # ComfyUI, comfy/sd.py: VAE. What it gives goes to the host, and so nothing is returned.
    def __init__(self, arch: dict, runtime: str):
        super().__init__()
        self.first_stage_model = ComfyModel(arch, runtime)

    def decode(self, latents):
        samples = from_host(latents, image=False)
        self.first_stage_model.decode(samples)

    def encode(self, image):
        pixels = from_host(image, image=True)
        self.first_stage_model.encode(pixels)

    def decode_tiled(self, latents, tile: int, overlap: int):
        for x, y in ((tile // 2, tile * 2), (tile * 2, tile // 2), (tile, tile)):
            tiled_scale(latents, lambda a: self.first_stage_model.decode([from_host(a, image=False)]), x, y, overlap)

    def encode_tiled(self, image, tile: int, overlap: int):
        for x, y in ((tile, tile), (tile * 2, tile // 2), (tile // 2, tile * 2)):
            tiled_scale(image, lambda a: self.first_stage_model.encode(from_host(a, image=True)), x, y, overlap)


def tiled_scale(samples, function, tile_x: int, tile_y: int, overlap: int):  # ComfyUI, comfy/utils.py
    for sample in samples.split(1):
        corners = [
            range(0, side - overlap, tile - overlap) if side > tile else [0]
            for side, tile in zip(sample.shape[2:], (tile_y, tile_x), strict=True)
        ]
        for y, x in itertools.product(*corners):
            function(sample[:, :, y : y + tile_y, x : x + tile_x]).float()


def ldm_vae(arch: dict, runtime: str, dtype: torch.dtype) -> nn.Module:
    models = {"bfl": BflModel, "a1111": AutoencoderKL, "comfyui": ComfyVae, "forge": ComfyVae}
    with torch.device("meta"):
        return models[runtime](arch, runtime).eval().to(dtype)


# ---- A1111's extension Tiled VAE: multidiffusion-upscaler-for-automatic1111, scripts/tilevae.py, fast mode ----


def var_mean(tile, groups: int):  # get_var_mean, without the look for infinities
    return [torch.empty(len(tile) * groups, dtype=tile.dtype, device=tile.device) for _ in range(2)]


def custom_group_norm(x, groups: int, var, mean, layer):
    seen = x.contiguous().view(1, len(x) * groups, -1, *x.shape[2:])
    out = F.batch_norm(seen, mean.to(x), var.to(x), weight=None, bias=None, training=False, momentum=0, eps=1e-6)
    out = out.view(x.shape)
    out *= layer.weight.view(1, -1, 1, 1)
    out += layer.bias.view(1, -1, 1, 1)
    return out


def attention_of_tile(net, h):  # tile_utils/attn.py: cross_attention_attnblock_forward
    q, k, v = net.q(h), net.k(h), net.v(h)
    n, c, height, width = q.shape
    q, k = q.reshape(n, c, -1).permute(0, 2, 1), k.reshape(n, c, -1)
    h = torch.zeros_like(k)
    scores = torch.bmm(q, k)
    scores = scores * c**-0.5
    scores = F.softmax(scores, dim=2, dtype=q.dtype).permute(0, 2, 1)
    h[:, :, :] = torch.bmm(v.reshape(n, c, -1), scores)
    del scores
    out = net.proj_out(h.reshape(n, c, height, width))
    del h
    return out


def _resnet_tasks(net):
    store = net.nin_shortcut if hasattr(net, "nin_shortcut") else (lambda x: x)
    silu = ["silu", lambda x: F.silu(x, inplace=True)]
    convs = [["norm", net.norm1], silu, ["conv", net.conv1], ["norm", net.norm2], silu, ["conv", net.conv2]]
    return [["store", store], *convs, ["add", None]]


def _middle_tasks(mid):
    attn = mid.attn_1
    middle = [
        ["store", lambda x: x],
        ["norm", attn.norm],
        ["attn", lambda x: attention_of_tile(attn, x)],
        ["add", None],
    ]
    return [*_resnet_tasks(mid.block_1), *middle, *_resnet_tasks(mid.block_2)]


def task_queue(net, decodes: bool):  # build_task_queue
    tasks = [["conv", net.conv_in], *(_middle_tasks(net.mid) if decodes else [])]
    for level in reversed(net.up) if decodes else net.down:
        for block in level.block:
            tasks += _resnet_tasks(block)
        resample = getattr(level, "upsample" if decodes else "downsample", None)
        tasks += [["resample", resample]] if resample else []
    tasks += [] if decodes else _middle_tasks(net.mid)
    return [*tasks, ["norm", net.norm_out], ["silu", lambda x: F.silu(x, inplace=True)], ["conv", net.conv_out]]


def estimate_group_norm(z, tasks, groups: int):
    tile = z
    last = max(i for i, task in enumerate(tasks) if task[0] == "norm")
    for i, task in enumerate(tasks[: last + 1]):
        if task[0] == "norm":
            var, mean = var_mean(tile, groups)
            tasks[i] = ["apply", lambda x, v=var, m=mean, layer=task[1]: custom_group_norm(x, groups, v, m, layer)]
            if i < last:
                tile = tasks[i][1](tile)
        elif task[0] == "store":
            following = next(j for j in range(i, len(tasks)) if tasks[j][0] == "add")
            tasks[following][1] = task[1](tile)
        elif task[0] == "add":
            tile += task[1]
            task[1] = None
        else:
            tile = task[1](tile)


def corners(side: int, most: int, pad: int):  # split_tiles and get_best_tile_size, along one side
    count = max(-(-(side - 2 * pad) // most), 1)
    even = -(-(side - 2 * pad) // count)
    divider = 32
    while divider >= 2 and even % divider:
        rounded = even - even % divider + divider
        if rounded <= most:
            even = rounded
            break
        divider //= 2
    return [(i * even, min((i + 1) * even + 2 * pad, side)) for i in range(count)]


def vae_tile_forward(net, z, most: int, factor: int, groups: int, decodes: bool):  # VAEHook
    pad = 11 if decodes else 32
    n, _, height, width = z.shape
    if max(height, width) <= 2 * pad + most:
        return net(z)
    tasks = task_queue(net, decodes)
    small = F.interpolate(z, scale_factor=most / max(height, width), mode="nearest-exact")
    small = (small - 0.0) / 1.0 * 1.0 + 0.0
    estimate_group_norm(small, tasks, groups)
    del small
    result = None
    for (top, bottom), (left, right) in itertools.product(corners(height, most, pad), corners(width, most, pad)):
        shape = n, z.shape[1], bottom - top, right - left
        order = torch.channels_last if z.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        tile = torch.empty(shape, dtype=z.dtype, device=z.device, memory_format=order)  # from the host, strides kept
        queue = [list(task) for task in tasks]
        while queue:
            task = queue.pop(0)
            if task[0] == "store":
                res = task[1](tile)
                next(later for later in queue if later[0] == "add")[1] = res
            elif task[0] == "add":
                tile += task[1]
                task[1] = None
            else:
                tile = task[1](tile)
        if result is None:
            size = (height * factor, width * factor) if decodes else (height // factor, width // factor)
            result = torch.zeros(n, tile.shape[1], *size, device=z.device)
        del tile
    return result.to(z.dtype)


class TiledVae(nn.Module):
    def __init__(self, arch: dict, dtype: torch.dtype):
        super().__init__()
        self.vae, self.factor = ldm_vae(arch, "a1111", dtype), 2 ** (len(arch["block_out_channels"]) - 1)
        self.groups = arch["norm_num_groups"]

    def encode(self, x, tile: int):
        h = vae_tile_forward(self.vae.encoder, x, tile, self.factor, self.groups, decodes=False)
        moments = self.vae.quant_conv(h)
        posterior = Gaussian(moments)
        return posterior

    def decode(self, z, tile: int):
        z = self.vae.post_quant_conv(z)
        return vae_tile_forward(self.vae.decoder, z, tile // self.factor, self.factor, self.groups, decodes=True)
