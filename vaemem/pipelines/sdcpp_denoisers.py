"""The graphs of stable-diffusion.cpp's diffusion models: after z_image.hpp, flux.hpp, unet.hpp and rope.hpp (see
prediction/sdcpp.py)."""

from __future__ import annotations

from typing import Any

from vaemem.prediction.ggml import Tensor
from vaemem.prediction.sdcpp import Runner, image_of, tokens_of


def _part(x: Tensor, axis: int, length: int) -> Tensor:
    """A copy of some of a dimension; of a dimension of 1, the tensor itself."""
    ne = list(x.ne)
    ne[axis] = length
    return x if x.ne[axis] == 1 else x.view(*ne).cont()


class Denoiser(Runner):
    """What diffusion models share: embedded times, patches, rotated heads."""

    def time(self, n: int) -> Tensor:
        return Tensor("timestep_embedding", (n,), (self.scale(self.input(1)),))

    def mlp(self, x: Tensor, inner: int, n: int, f32: bool = False) -> Tensor:
        x = self.linear(x, inner, f32=f32).write("unary")
        return self.linear(x, n, f32=f32)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: (depth, heads, L, N); positions: (2, 2, depth / 2, L), a matrix each; gives (depth, L, heads * N)."""
        depth, heads, length, batch = x.ne
        x = x.permute(0, 2, 1, 3).cont().reshape(2, depth // 2, length, heads * batch)
        x = x.permute(3, 0, 1, 2).cont()
        p = positions.permute(3, 0, 1, 2).cont()

        def half() -> Tensor:
            wide = x.view(*x.ne[:3]).reshape(1, *x.ne[:3]).repeat(2, *x.ne[:3])
            return wide.apply("mul", p.view(*p.ne[:3]))

        return half().write("add", half()).reshape(depth, length, heads * batch)

    def rotated_attention(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scaled: bool = False) -> Tensor:
        """Each (depth, heads, L, N)."""
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        return self.attend(q, k, v, flash=self.flash, scaled=scaled)

    def patches(self, x: Tensor, channels_first: bool) -> Tensor:
        """(W, H, C) as (4 C, W / 2 * H / 2), odd sides padded."""
        odd = (x.ne[0] % 2, x.ne[1] % 2)
        x = x.pad(*odd) if any(odd) else x
        w, h, c, _ = x.ne
        x = x.reshape(2, w // 2, 2, -1).permute(0, 2, 1, 3).cont().reshape(4, w // 2 * (h // 2), c)
        x = x.permute(*((0, 2, 1, 3) if channels_first else (1, 2, 0, 3))).cont()
        return x.reshape(4 * c, w // 2 * (h // 2))

    def unpatched(self, x: Tensor, width: int, height: int, channels_first: bool) -> Tensor:
        """The other way, padding left on."""
        w, h, c = -(-width // 2), -(-height // 2), x.ne[0] // 4
        if channels_first:
            x = x.reshape(4, c, w * h).permute(0, 2, 1, 3).cont()
        else:
            x = x.reshape(c, 4, w * h).permute(2, 0, 1, 3).cont()
        return x.reshape(2, 2, w, h * c).permute(0, 2, 1, 3).cont().reshape(2 * w, 2 * h, c)


def _modulate(x: Tensor, scale: Tensor) -> Tensor:
    return x.apply("add", x.apply("mul", scale.reshape(scale.ne[0], 1, scale.ne[1])))


class ZImage(Denoiser):
    """Z-Image and Z-Image Turbo."""

    HIDDEN, HEADS, DEPTH, INNER, MULTIPLE = 3840, 30, 128, 10240, 32

    def attend_to(self, x: Tensor, positions: Tensor) -> Tensor:
        qkv = self.linear(x, 3 * self.HIDDEN, bias=False).reshape(self.DEPTH, 3 * self.HEADS, x.ne[1])
        q, k, v = (qkv.view(self.DEPTH, self.HEADS, x.ne[1]) for _ in range(3))
        x = self.rotated_attention(self.rms_norm(q), self.rms_norm(k), v, positions, scaled=True)
        return self.linear(x, self.HIDDEN, bias=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate = self.linear(x, self.INNER, bias=False).apply("unary")
        x = gate.apply("mul", self.linear(x, self.INNER, bias=False))
        return self.linear(x, self.HIDDEN, bias=False, scaled=True)

    def block(self, x: Tensor, positions: Tensor, time: Tensor | None = None) -> Tensor:
        """Attention and feed-forward, scaled before and gated after where there is a time."""
        mods = None if time is None else self.linear(time, 4 * self.HIDDEN)
        for part in (lambda h: self.attend_to(h, positions), self.feed_forward):
            h = self.rms_norm(x)
            if mods is not None:
                h = _modulate(h, _part(mods, 0, self.HIDDEN))
            h = self.rms_norm(part(h))
            if mods is not None:
                h = h.apply("mul", _part(mods, 0, self.HIDDEN).apply("unary"))
            x = h.apply("add", x)
        return x

    def padded(self, x: Tensor) -> Tensor:
        """With as many learnt tokens as it takes to a multiple of 32."""
        self.weight(self.HIDDEN)
        more = -x.ne[1] % self.MULTIPLE
        return x.concat(Tensor("repeat", (self.HIDDEN, more)), 1) if more else x

    def build(self, height: int, width: int, tokens: int) -> Tensor:
        """height, width: of the latent."""
        x, context = self.input(width, height, 16), self.input(2560, tokens)
        image_tokens = -(-height // 2) * -(-width // 2)
        padded = [-(-n // self.MULTIPLE) * self.MULTIPLE for n in (tokens, image_tokens)]
        positions = self.made(2, 2, self.DEPTH // 2, sum(padded))
        time = self.mlp(self.time(256), 1024, 256, f32=True)
        text = self.padded(self.linear(self.rms_norm(context), self.HIDDEN))
        image = self.padded(self.linear(self.patches(x, False), self.HIDDEN))
        text_positions, image_positions = (_part(positions, 3, n) for n in padded)
        for _ in range(2):
            text = self.block(text, text_positions)
        for _ in range(2):
            image = self.block(image, image_positions, time)
        both = text.concat(image, 1)
        for _ in range(30):
            both = self.block(both, positions, time)
        scale = self.linear(time.apply("unary"), self.HIDDEN)
        both = self.linear(_modulate(both.apply("norm"), scale), 64, f32=True)
        image = _part(_part(both, 1, image_tokens), 1, image_tokens)
        image = self.unpatched(image, width, height, False)
        return self.scale(_part(_part(image, 1, height), 0, width))


class Flux(Denoiser):
    """FLUX.1: dev, which is told a guidance, or schnell."""

    HIDDEN, HEADS, DEPTH, INNER = 3072, 24, 128, 12288

    def __init__(self, *args: Any, guidance: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guidance = guidance

    def mods(self, vec: Tensor, count: int) -> list[Tensor]:
        x = self.linear(vec.apply("unary"), count * self.HIDDEN)
        x = x.reshape(self.HIDDEN, count).permute(0, 2, 1, 3).cont()
        return [x.view(self.HIDDEN) for _ in range(count)]

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        shift = shift.reshape(self.HIDDEN, 1)
        return _modulate(x.apply("norm"), scale).apply("add", shift)

    def head_norm(self, x: Tensor) -> Tensor:
        self.weight(self.DEPTH)
        return x.apply("rms_norm").apply("mul")

    def heads(self, parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.reshape(self.DEPTH, self.HEADS, x.ne[1]) for x in parts)
        return self.head_norm(q), self.head_norm(k), v

    def double(self, streams: list[Tensor], vec: Tensor, positions: Tensor) -> list[Tensor]:
        """streams: the text's and the image's tokens."""
        mods = [self.mods(vec, 6) for _ in streams]
        qkvs = []
        for x, (shift, scale, *_) in zip(streams, mods, strict=True):
            qkv = self.linear(self.modulated(x, shift, scale), 3 * self.HIDDEN)
            qkvs.append(self.heads([_part(qkv, 0, self.HIDDEN) for _ in range(3)]))
        q, k, v = (text.concat(image, 2) for text, image in zip(*qkvs, strict=True))
        both = self.rotated_attention(q, k, v, positions)
        results = []
        for x, (_, _, gate, shift, scale, last_gate) in zip(streams, mods, strict=True):
            h = self.linear(both.view(self.HIDDEN, x.ne[1]), self.HIDDEN)
            x = x.apply("add", h.apply("mul", gate))
            h = self.mlp(self.modulated(x, shift, scale), self.INNER, self.HIDDEN)
            results.append(x.apply("add", h.apply("mul", last_gate)))
        return results

    def single(self, x: Tensor, vec: Tensor, positions: Tensor) -> Tensor:
        shift, scale, gate = self.mods(vec, 3)
        wide = self.linear(self.modulated(x, shift, scale), 3 * self.HIDDEN + self.INNER)
        attended = self.rotated_attention(
            *self.heads([wide.view(self.HIDDEN, x.ne[1]).cont() for _ in range(3)]), positions
        )
        inner = wide.view(self.INNER, x.ne[1]).dense().write("unary")
        h = self.linear(attended.concat(inner, 0), self.HIDDEN)
        return x.apply("add", h.apply("mul", gate))

    def build(self, height: int, width: int, tokens: int) -> Tensor:
        """height, width: of the latent."""
        x, context, pooled = self.input(width, height, 16), self.input(4096, tokens), self.input(768)
        image = self.linear(self.patches(x, True), self.HIDDEN)
        positions = self.made(2, 2, self.DEPTH // 2, tokens + image.ne[1])
        vec = self.mlp(self.time(256), self.HIDDEN, self.HIDDEN)
        if self.guidance:
            vec = vec.apply("add", self.mlp(self.time(256), self.HIDDEN, self.HIDDEN))
        vec = vec.apply("add", self.mlp(pooled, self.HIDDEN, self.HIDDEN))
        streams = [self.linear(context, self.HIDDEN), image]
        for _ in range(19):
            streams = self.double(streams, vec, positions)
        both = streams[0].concat(streams[1], 1)
        for _ in range(38):
            both = self.single(both, vec, positions)
        last = self.linear(vec.apply("unary"), 2 * self.HIDDEN)
        shift, scale = (_part(last, 0, self.HIDDEN) for _ in range(2))
        image = self.linear(self.modulated(both.view(self.HIDDEN, image.ne[1]), shift, scale), 64)
        return self.unpatched(image, width, height, True)


class Unet(Denoiser):
    """SD1.5's UNet, or SDXL's, which is told labels and projects tokens instead of pixels."""

    CHANNELS = 320

    def __init__(self, *args: Any, is_xl: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_xl = is_xl

    def resnet(self, x: Tensor, emb: Tensor, n: int) -> Tensor:
        h = self.norm_conv(x, n)
        h = h.apply("add", self.linear(emb.apply("unary"), n).reshape(1, 1, n))
        h = self.norm_conv(h, n)
        return h.apply("add", x if x.ne[2] == n else self.conv(x, n, 1))

    def cross(self, x: Tensor, context: Tensor, heads: int) -> Tensor:
        n = x.ne[0]
        q, k, v = (self.linear(source, n, bias=False) for source in (x, context, context))
        return self.linear(self.attention(q, k, v, heads, flash=self.flash), n)

    def transformer(self, x: Tensor, context: Tensor, heads: int) -> Tensor:
        n = x.ne[0]
        h = self.norm(x)
        x = self.cross(h, h, heads).apply("add", x)
        x = self.cross(self.norm(x), context, heads).apply("add", x)
        wide = self.linear(self.norm(x), 8 * n)
        value, gate = (wide.view(4 * n, x.ne[1]) for _ in range(2))
        h = value.apply("mul", gate.cont().write("unary"))
        return self.linear(h, n).apply("add", x)

    def attend_to(self, x: Tensor, context: Tensor, depth: int) -> Tensor:
        """A stack of transformers on an image."""
        w, h, c, _ = x.ne
        heads = c // 64 if self.is_xl else 8
        y = self.group_norm(x)
        y = self.linear(tokens_of(y), c) if self.is_xl else tokens_of(self.conv(y, c, 1))
        for _ in range(depth):
            y = self.transformer(y, context, heads)
        y = image_of(self.linear(y, c), w, h) if self.is_xl else self.conv(image_of(y, w, h), c, 1)
        return y.apply("add", x)

    def build(self, height: int, width: int, tokens: int) -> Tensor:
        """height, width: of the latent."""
        levels = (1, 2, 4) if self.is_xl else (1, 2, 4, 4)
        depths = (0, 2, 10) if self.is_xl else (1, 1, 1, 0)  # transformers of a level's block
        x, context = self.input(width, height, 4), self.input(2048 if self.is_xl else 768, tokens)
        emb = self.mlp(self.time(self.CHANNELS), 1280, 1280)
        if self.is_xl:
            emb = emb.apply("add", self.mlp(self.input(2816), 1280, 1280))

        def block(x: Tensor, level: int) -> Tensor:
            x = self.resnet(x, emb, self.CHANNELS * levels[level])
            return self.attend_to(x, context, depths[level]) if depths[level] else x

        skips = [self.conv(x, self.CHANNELS)]
        for level in range(len(levels)):
            if level:
                skips.append(self.conv(skips[-1], skips[-1].ne[2], stride=2))
            for _ in range(2):
                skips.append(block(skips[-1], level))
        x = skips[-1]
        x = self.attend_to(self.resnet(x, emb, x.ne[2]), context, max(1, depths[-1]))
        x = self.resnet(x, emb, x.ne[2])
        for level in reversed(range(len(levels))):
            for _ in range(3):
                x = block(x.concat(skips.pop(), 2), level)
            if level:
                x = self.upsample(x)
        return self.norm_conv(x, 4)
