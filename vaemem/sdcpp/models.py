"""The models that stable-diffusion.cpp runs, as graphs: the VAE, text encoders and diffusion models.

After vae.hpp, llm.hpp, clip.hpp, t5.hpp, z_image.hpp, flux.hpp, unet.hpp and rope.hpp of the commit that SDCPP_COMMIT
names (vaemem/sdcpp/layers.py).
"""

from __future__ import annotations

from typing import ClassVar

from vaemem.sdcpp.ggml import I32, Node
from vaemem.sdcpp.layers import Builder

LATENT_CHANNELS = {"sd15": 4, "sdxl": 4, "sd3": 16, "flux": 16}  # of the VAEs


def tokens_of(x: Node) -> Node:
    """(W, H, C) as (C, W * H), copied."""
    w, h, c, _ = x.ne
    return x.permute(1, 2, 0, 3).cont().reshape(c, w * h)


def image_of(x: Node, w: int, h: int) -> Node:
    """(C, W * H) as (W, H, C), copied."""
    return x.permute(1, 0, 2, 3).cont().reshape(w, h, x.ne[0])


def _part(x: Node, axis: int, length: int) -> Node:
    """A copy of some of a dimension; of a dimension of 1, the tensor itself."""
    ne = list(x.ne)
    ne[axis] = length
    return x if x.ne[axis] == 1 else x.view(*ne).cont()


def _modulate(x: Node, scale: Node) -> Node:
    return x.apply("add", x.apply("mul", scale.reshape(scale.ne[0], 1, scale.ne[1])))


class Component(Builder):
    """A component of a pipeline.

    Attributes
    ----------
    STRIDE : int
        Pixels that an image's sides are multiples of; 0 for a text encoder, which has no image.
    TOKENS : int or None
        That sd.cpp pads a short prompt to; None where it takes a prompt as long as it is.
    """

    STRIDE: ClassVar[int] = 8
    TOKENS: ClassVar[int | None] = None


# ---- the VAE ----


class VaeDecoder(Component):
    """AutoencoderKL of 128 to 512 channels."""

    LEVELS = (128, 256, 512, 512)

    def spatial_attention(self, x: Node) -> Node:
        """One head as deep as there are channels."""
        w, h, c, _ = x.ne
        normed = self.group_norm(x)
        q, k, v = (tokens_of(self.conv(normed, c, 1)) for _ in range(3))
        out = image_of(self.attention(q, k, v, 1, flash=self.flash), w, h)
        return self.conv(out, c, 1).apply("add", x)

    def middle(self, x: Node) -> Node:
        return self.resnet(self.spatial_attention(self.resnet(x, x.ne[2])), x.ne[2])

    def build(self, height: int, width: int, model: str) -> Node:
        """height, width: of the latent. The VAEs of SD 1.5 and SDXL have a 1x1 convolution more."""
        channels = LATENT_CHANNELS[model]
        x = self.input(width, height, channels)
        x = self.conv(x, channels, 1) if model in ("sd15", "sdxl") else x
        x = self.middle(self.conv(x, self.LEVELS[-1]))
        for level in reversed(range(len(self.LEVELS))):
            for _ in range(3):
                x = self.resnet(x, self.LEVELS[level])
            if level:
                x = self.upsample(x)
        return self.norm_conv(x, 3)


class VaeEncoder(VaeDecoder):
    """Who encodes holds the decoder's weights, too."""

    def build(self, height: int, width: int, model: str) -> Node:
        super().build(height, width, model)
        channels = 2 * LATENT_CHANNELS[model]
        x = self.conv(self.input(8 * width, 8 * height, 3), self.LEVELS[0])
        for level, n in enumerate(self.LEVELS):
            for _ in range(2):
                x = self.resnet(x, n)
            if level + 1 < len(self.LEVELS):
                x = self.conv(x.pad(1, 1), n, stride=2, padding=0)
        x = self.norm_conv(self.middle(x), channels)
        return self.conv(x, channels, 1) if model in ("sd15", "sdxl") else x


# ---- text encoders ----


class Qwen3(Component):
    """Qwen3-4B, of which Z-Image takes what the last but one of its 36 layers gives."""

    STRIDE = 0
    HIDDEN, HEADS, KEY_HEADS, DEPTH, INNER = 2560, 32, 8, 128, 9728

    def block(self, x: Node, positions: Node, mask: Node) -> Node:
        tokens = x.ne[1]

        def heads(x: Node, count: int) -> Node:
            return self.linear(x, count * self.DEPTH, bias=False).reshape(self.DEPTH, count, tokens)

        def turned(x: Node) -> Node:
            x = self.rms_norm(x).apply("rope", positions)
            return x.permute(0, 2, 1, 3).cont().reshape(self.DEPTH, tokens, x.ne[1])

        h = self.rms_norm(x)
        q, k, v = heads(h, self.HEADS), heads(h, self.KEY_HEADS), heads(h, self.KEY_HEADS)
        h = self.attend(turned(q), turned(k), v, mask)
        x = self.linear(h, self.HIDDEN, bias=False).write("add", x)
        return self.gated(self.rms_norm(x), self.INNER).write("add", x)

    def build(self, tokens: int) -> Node:
        ids, positions = self.input(tokens, element=I32), self.made(tokens, element=I32)
        mask = self.made(tokens, tokens)
        layers = [self.embedding(ids, self.HIDDEN, 151936)]
        for _ in range(36):
            layers.append(self.block(layers[-1], positions, mask))
        self.weight(self.HIDDEN)  # of the last norm, which is not used
        return layers[35]


class ClipL(Component):
    """CLIP's text model of ViT-L/14."""

    STRIDE, TOKENS = 0, 77
    HIDDEN, HEADS, LAYERS, PROJECTED = 768, 12, 12, False

    def layer(self, x: Node, mask: Node) -> Node:
        n = self.HIDDEN
        h = self.norm(x)
        h = self.attention(self.linear(h, n), self.linear(h, n), self.linear(h, n), self.HEADS, mask)
        x = x.apply("add", self.linear(h, n))
        h = self.linear(self.norm(x), 4 * n).write("unary")
        return x.apply("add", self.linear(h, n))

    def build(self, tokens: int) -> Node:
        ids, mask = self.input(tokens, element=I32), self.made(tokens, tokens)
        x = self.embedding(ids, self.HIDDEN, 49408).apply("add")
        self.weight(self.HIDDEN, tokens)  # of positions
        for _ in range(self.LAYERS):
            x = self.layer(x, mask)
        if self.PROJECTED:
            self.weight(self.HIDDEN, self.HIDDEN)  # for the pooled output
        return self.norm(x)


class ClipG(ClipL):
    """OpenCLIP's of ViT-bigG/14, which has a projection."""

    HIDDEN, HEADS, LAYERS, PROJECTED = 1280, 20, 32, True


class T5(Component):
    """T5-XXL's encoder."""

    STRIDE, TOKENS = 0, 256
    HIDDEN, HEADS, INNER = 4096, 64, 10240

    def block(self, x: Node, bias: Node) -> Node:
        h = self.rms_norm(x, written=False)
        q, k, v = (self.linear(h, self.HIDDEN, bias=False) for _ in range(3))
        h = self.attention(q, k.write("scale"), v, self.HEADS, bias)
        x = self.linear(h, self.HIDDEN, bias=False).write("add", x)
        return self.gated(self.rms_norm(x, written=False), self.INNER, scaled=True).write("add", x)

    def build(self, tokens: int) -> Node:
        x = self.embedding(self.input(tokens, element=I32), self.HIDDEN, 32128)
        distances = self.made(tokens, tokens, element=I32)
        bias = self.embedding(distances, self.HEADS, 32).permute(2, 0, 1, 3).cont()
        for _ in range(24):
            x = self.block(x, bias)
        return self.rms_norm(x, written=False)


# ---- diffusion models ----


class Denoiser(Component):
    """What diffusion models share: embedded times, patches, rotated heads."""

    def time(self, n: int) -> Node:
        return Node("timestep_embedding", (n,), (self.scale(self.input(1)),))

    def mlp(self, x: Node, inner: int, n: int, f32: bool = False) -> Node:
        x = self.linear(x, inner, f32=f32).write("unary")
        return self.linear(x, n, f32=f32)

    def rotate(self, x: Node, positions: Node) -> Node:
        """x: (depth, heads, L, N); positions: (2, 2, depth / 2, L), a matrix each; gives (depth, L, heads * N)."""
        depth, heads, length, batch = x.ne
        x = x.permute(0, 2, 1, 3).cont().reshape(2, depth // 2, length, heads * batch)
        x = x.permute(3, 0, 1, 2).cont()
        p = positions.permute(3, 0, 1, 2).cont()

        def half() -> Node:
            wide = x.view(*x.ne[:3]).reshape(1, *x.ne[:3]).make("repeat", 2, *x.ne[:3])
            return wide.apply("mul", p.view(*p.ne[:3]))

        return half().write("add", half()).reshape(depth, length, heads * batch)

    def rotated_attention(self, q: Node, k: Node, v: Node, positions: Node, scaled: bool = False) -> Node:
        """Each (depth, heads, L, N)."""
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        return self.attend(q, k, v, flash=self.flash, scaled=scaled)

    def patches(self, x: Node, channels_first: bool) -> Node:
        """(W, H, C) as (4 C, W / 2 * H / 2), odd sides padded."""
        odd = (x.ne[0] % 2, x.ne[1] % 2)
        x = x.pad(*odd) if any(odd) else x
        w, h, c, _ = x.ne
        x = x.reshape(2, w // 2, 2, -1).permute(0, 2, 1, 3).cont().reshape(4, w // 2 * (h // 2), c)
        x = x.permute(*((0, 2, 1, 3) if channels_first else (1, 2, 0, 3))).cont()
        return x.reshape(4 * c, w // 2 * (h // 2))

    def unpatched(self, x: Node, width: int, height: int, channels_first: bool) -> Node:
        """The other way, padding left on."""
        w, h, c = -(-width // 2), -(-height // 2), x.ne[0] // 4
        if channels_first:
            x = x.reshape(4, c, w * h).permute(0, 2, 1, 3).cont()
        else:
            x = x.reshape(c, 4, w * h).permute(2, 0, 1, 3).cont()
        return x.reshape(2, 2, w, h * c).permute(0, 2, 1, 3).cont().reshape(2 * w, 2 * h, c)


class ZImage(Denoiser):
    """Z-Image and Z-Image Turbo."""

    HIDDEN, HEADS, DEPTH, INNER, MULTIPLE = 3840, 30, 128, 10240, 32

    def attend_to(self, x: Node, positions: Node) -> Node:
        qkv = self.linear(x, 3 * self.HIDDEN, bias=False).reshape(self.DEPTH, 3 * self.HEADS, x.ne[1])
        q, k, v = (qkv.view(self.DEPTH, self.HEADS, x.ne[1]) for _ in range(3))
        x = self.rotated_attention(self.rms_norm(q), self.rms_norm(k), v, positions, scaled=True)
        return self.linear(x, self.HIDDEN, bias=False)

    def block(self, x: Node, positions: Node, time: Node | None = None) -> Node:
        """Attention and feed-forward, scaled before and gated after where there is a time."""
        mods = None if time is None else self.linear(time, 4 * self.HIDDEN)
        for is_attention in (True, False):
            h = self.rms_norm(x)
            if mods is not None:
                h = _modulate(h, _part(mods, 0, self.HIDDEN))
            fed = (
                self.attend_to(h, positions) if is_attention else self.gated(h, self.INNER, written=False, scaled=True)
            )
            h = self.rms_norm(fed)
            if mods is not None:
                h = h.apply("mul", _part(mods, 0, self.HIDDEN).apply("unary"))
            x = h.apply("add", x)
        return x

    def padded(self, x: Node) -> Node:
        """With as many learnt tokens as it takes to a multiple of 32."""
        self.weight(self.HIDDEN)
        more = -x.ne[1] % self.MULTIPLE
        return x.concat(Node("repeat", (self.HIDDEN, more)), 1) if more else x

    def build(self, height: int, width: int, tokens: int) -> Node:
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


class FluxSchnell(Denoiser):
    """FLUX.1 schnell."""

    TOKENS = 256
    HIDDEN, HEADS, DEPTH, INNER, GUIDED = 3072, 24, 128, 12288, False

    def mods(self, vec: Node, count: int) -> list[Node]:
        x = self.linear(vec.apply("unary"), count * self.HIDDEN)
        x = x.reshape(self.HIDDEN, count).permute(0, 2, 1, 3).cont()
        return [x.view(self.HIDDEN) for _ in range(count)]

    def modulated(self, x: Node, shift: Node, scale: Node) -> Node:
        shift = shift.reshape(self.HIDDEN, 1)
        return _modulate(x.apply("norm"), scale).apply("add", shift)

    def heads(self, parts: list[Node]) -> tuple[Node, Node, Node]:
        q, k, v = (x.reshape(self.DEPTH, self.HEADS, x.ne[1]) for x in parts)
        return self.rms_norm(q, written=False), self.rms_norm(k, written=False), v

    def double(self, streams: list[Node], vec: Node, positions: Node) -> list[Node]:
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

    def single(self, x: Node, vec: Node, positions: Node) -> Node:
        shift, scale, gate = self.mods(vec, 3)
        wide = self.linear(self.modulated(x, shift, scale), 3 * self.HIDDEN + self.INNER)
        qkv = self.heads([wide.view(self.HIDDEN, x.ne[1]).cont() for _ in range(3)])
        attended = self.rotated_attention(*qkv, positions)
        inner = wide.view(self.INNER, x.ne[1]).dense().write("unary")
        h = self.linear(attended.concat(inner, 0), self.HIDDEN)
        return x.apply("add", h.apply("mul", gate))

    def build(self, height: int, width: int, tokens: int) -> Node:
        """height, width: of the latent."""
        x, context, pooled = self.input(width, height, 16), self.input(4096, tokens), self.input(768)
        image = self.linear(self.patches(x, True), self.HIDDEN)
        positions = self.made(2, 2, self.DEPTH // 2, tokens + image.ne[1])
        vec = self.mlp(self.time(256), self.HIDDEN, self.HIDDEN)
        if self.GUIDED:
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


class FluxDev(FluxSchnell):
    """FLUX.1 dev, which is told a guidance."""

    GUIDED = True


class Unet15(Denoiser):
    """SD1.5's UNet. DEPTHS: transformers of a level's block."""

    STRIDE, TOKENS, CHANNELS, TEXT_CHANNELS, IS_XL = 64, 77, 320, 768, False
    LEVELS: ClassVar[tuple[int, ...]] = (1, 2, 4, 4)
    DEPTHS: ClassVar[tuple[int, ...]] = (1, 1, 1, 0)

    def cross(self, x: Node, context: Node, heads: int) -> Node:
        n = x.ne[0]
        q, k, v = (self.linear(source, n, bias=False) for source in (x, context, context))
        return self.linear(self.attention(q, k, v, heads, flash=self.flash), n)

    def transformer(self, x: Node, context: Node, heads: int) -> Node:
        n = x.ne[0]
        h = self.norm(x)
        x = self.cross(h, h, heads).apply("add", x)
        x = self.cross(self.norm(x), context, heads).apply("add", x)
        wide = self.linear(self.norm(x), 8 * n)
        value, gate = (wide.view(4 * n, x.ne[1]) for _ in range(2))
        h = value.apply("mul", gate.cont().write("unary"))
        return self.linear(h, n).apply("add", x)

    def attend_to(self, x: Node, context: Node, depth: int) -> Node:
        """A stack of transformers on an image."""
        w, h, c, _ = x.ne
        heads = c // 64 if self.IS_XL else 8
        y = self.group_norm(x)
        y = self.linear(tokens_of(y), c) if self.IS_XL else tokens_of(self.conv(y, c, 1))
        for _ in range(depth):
            y = self.transformer(y, context, heads)
        y = image_of(self.linear(y, c), w, h) if self.IS_XL else self.conv(image_of(y, w, h), c, 1)
        return y.apply("add", x)

    def build(self, height: int, width: int, tokens: int) -> Node:
        """height, width: of the latent."""
        levels, depths = self.LEVELS, self.DEPTHS
        x, context = self.input(width, height, 4), self.input(self.TEXT_CHANNELS, tokens)
        emb = self.mlp(self.time(self.CHANNELS), 1280, 1280)
        if self.IS_XL:
            emb = emb.apply("add", self.mlp(self.input(2816), 1280, 1280))

        def block(x: Node, level: int) -> Node:
            x = self.resnet(x, self.CHANNELS * levels[level], emb)
            return self.attend_to(x, context, depths[level]) if depths[level] else x

        skips = [self.conv(x, self.CHANNELS)]
        for level in range(len(levels)):
            if level:
                skips.append(self.conv(skips[-1], skips[-1].ne[2], stride=2))
            for _ in range(2):
                skips.append(block(skips[-1], level))
        x = self.resnet(skips[-1], skips[-1].ne[2], emb)
        x = self.resnet(self.attend_to(x, context, max(1, depths[-1])), x.ne[2], emb)
        for level in reversed(range(len(levels))):
            for _ in range(3):
                x = block(x.concat(skips.pop(), 2), level)
            if level:
                x = self.upsample(x)
        return self.norm_conv(x, 4)


class UnetXl(Unet15):
    """SDXL's UNet, which is told labels and projects tokens instead of pixels."""

    IS_XL, TEXT_CHANNELS, LEVELS, DEPTHS = True, 2048, (1, 2, 4), (0, 2, 10)
