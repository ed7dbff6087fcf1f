"""Memory and FLOPs of each component of a pipeline in stable-diffusion.cpp: compute buffers to the byte, weights.

The graphs follow ggml_extend.hpp, common.hpp, vae.hpp, llm.hpp, clip.hpp, t5.hpp, z_image.hpp, flux.hpp, unet.hpp and
rope.hpp of the commit in SDCPP_COMMIT. Activations are float32 for all types of weights; convolution weights are
float16, and so are im2col's copies for them. Heights and widths are the latent's. A series of operations that overwrite
one tensor is one node here, and views that affect no placement are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from vaemem._common import choose, whole
from vaemem._errors import ArgumentError
from vaemem.engine.file_tensors import BLOCKS
from vaemem.sdcpp.ggml import ALIGNMENTS, F16, F32, GGML_COMMIT, I32, Node, flash_attn_ext, mul_mat, nodes_of, reserve

SDCPP_COMMIT = "0752cc9d3a8ddee25b72ca65d061a28310d97c02"  # of 2026-02-26
SDCPP_VERSION = f"stable-diffusion.cpp {SDCPP_COMMIT[:7]} with ggml {GGML_COMMIT[:7]}"
_TYPES = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 q6_K q5_K q4_K q3_K q2_K"
GGML_TYPES = {name: BLOCKS[name.upper()] for name in _TYPES.split()}  # (elements, bytes) of a block
EMBEDDING_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # sd.cpp converts other token tables to f32
FLASH_DEPTHS = (40, 64, 72, 80, 96, 112, 128, 256)  # of a head, with flash attention in ggml-cuda
# In elements. CUDA pads the last row of a quantised weight to a multiple, and every row that is multiplied with it.
ROW_PADDING = 512
MMQ_BYTES = 128 * 144  # of a tile of factors, behind the last row
LATENT_CHANNELS = {"sd15": 4, "sdxl": 4, "sd3": 16, "flux": 16}  # by VAE
DEFAULT_TILE = 32  # latent pixels, with --vae-tiling
ENCODE_TILE = 1.30539  # factor of a tile's side when sd.cpp encodes


class Graph(NamedTuple):
    """Memory and work of one graph of stable-diffusion.cpp.

    Attributes
    ----------
    buffer : int
        Bytes of the compute buffer; the log prints them in MiB, which it calls MB.
    pool : int
        Bytes that ggml-cuda allocates in addition for the largest product, and rounds up to 2 MiB. With a float16
        weight or im2col copy, the pool holds results and other factors as float16. With a quantised weight, the pool
        holds other factors as q8_1. The numbers are for GPUs with fast float16 and, for quantised weights, tensor cores
        of Turing or later. 0 on a CPU.
    weights : int
        Bytes of the weights' buffer, as the log prints it.
    flops : int
        FLOPs of matrix products and convolutions; a multiplication and an addition count as two.
    runs : int
        How often a component runs its graph: once per tile.
    moved : int
        Bytes of tensors that its operations read and write, without weights.
    """

    buffer: int
    pool: int
    weights: int
    flops: int
    runs: int = 1
    moved: int = 0


class Builder:
    """Builds one model's graph.

    weights: bytes of the weights' buffer so far
    inputs: a one and a zero, which every graph of sd.cpp has
    """

    def __init__(
        self, weight_type: str = "f16", conv_direct: bool = False, flash: bool = False, conv_scale: bool = False,
        backend: str = "cuda",
    ) -> None:  # fmt: skip
        choose("weight_type", weight_type, GGML_TYPES)
        choose("backend", backend, ALIGNMENTS)
        self.weight_type, self.backend = weight_type, backend
        self.conv_direct, self.flash, self.conv_scale = conv_direct, flash, conv_scale
        self.weights = 0
        self.inputs = [Node("", (1,)), Node("", (1,))]

    def measure(self, result: Node) -> Graph:
        """Return memory and work of the graph that ends in `result`."""
        nodes = nodes_of(result)
        pool = max(node.scratch for node in nodes) if self.backend == "cuda" else 0
        flops, moved = (sum(getattr(node, count) for node in nodes) for count in ("flops", "moved"))
        return Graph(reserve(result, self.inputs, self.backend), pool, self.weights, flops, moved=moved)

    def input(self, *ne: int, element: int = F32, made: bool = False) -> Node:
        """Add an input. Data of the caller is used in place on the CPU and copied into the buffer elsewhere. Data that
        sd.cpp makes for the graph, such as positions (`made`), always lies in the buffer."""
        return Node("", ne, element=element, placed=self.backend == "cpu" and not made)

    def weight(self, *ne: int, kind: str = "f32") -> str:
        """Count a weight with ne[0] columns and return its type: float32 if a row is not made of whole blocks."""
        kind = "f32" if ne[0] % GGML_TYPES[kind][0] else kind
        block, size = GGML_TYPES[kind]
        padding = -ne[0] % ROW_PADDING if block > 1 and self.backend == "cuda" else 0
        size *= (math.prod(ne) + padding) // block
        self.weights += size + -size % ALIGNMENTS[self.backend]
        return kind

    # ---- layers ----

    def scale(self, x: Node, is_scaled: bool = True) -> Node:
        return x.dense().apply("scale") if is_scaled else x

    def linear(self, x: Node, n: int, bias: bool = True, *, f32: bool = False, scaled: bool = False) -> Node:
        """Multiply with a weight of n rows. scaled: scale factors down before the product and up after it."""
        kind = self.weight(x.ne[0], n, kind="f32" if f32 else self.weight_type)
        x, ne = self.scale(x, scaled), (n, *x.ne[1:])
        product = Node("mul_mat", ne, (x,), flops=2 * x.ne[0] * math.prod(ne), scratch=_scratch(kind, x, n))
        product = self.scale(product, scaled)
        if bias:
            self.weight(n)
            product = product.write("add")
        return product

    def mlp(self, x: Node, inner: int, n: int, f32: bool = False) -> Node:
        return self.linear(self.linear(x, inner, f32=f32).write("unary"), n, f32=f32)

    def conv(self, x: Node, n: int, side: int = 3, stride: int = 1, padding: int | None = None) -> Node:
        """Convolve x: (W, H, C). padding: zeros; by default enough to keep the size."""
        w, h, c, _ = x.ne
        padding = side // 2 if padding is None else padding
        w, h = ((length + 2 * padding - side) // stride + 1 for length in (w, h))
        taps = side * side * c
        self.weight(side, side, c, n, kind="f16")
        self.weight(n)
        x, flops = self.scale(x, self.conv_scale), 2 * taps * w * h * n
        if self.conv_direct:
            x = Node("conv_2d", (w, h, n), (x,), flops=flops)
        else:
            x = Node("im2col", (taps, w, h), (x,), element=F16)
            x = Node("mul_mat", (w * h, n), (x,), flops=flops, scratch=F16 * w * h * n)
            x = x.reshape(w, h, 1, n).permute(0, 1, 3, 2).cont()
        return self.scale(x, self.conv_scale).write("add")

    def norm_conv(self, x: Node, n: int) -> Node:
        """Apply GroupNorm, SiLU and a 3x3 convolution."""
        return self.conv(self.group_norm(x).write("unary"), n)

    def upsample(self, x: Node) -> Node:
        """Upsample (W, H, C) to (2 W, 2 H, C), nearest, and apply a 3x3 convolution."""
        return self.conv(x.make("upscale", 2 * x.ne[0], 2 * x.ne[1], x.ne[2]), x.ne[2])

    def norm(self, x: Node, kind: str = "norm", axis: int = 0) -> Node:
        """Normalise, with a weight and a bias for each channel of one dimension."""
        for _ in range(2):
            self.weight(x.ne[axis])
        return x.apply(kind).write("mul")

    def group_norm(self, x: Node) -> Node:
        return self.norm(x, "group_norm", 2)

    def rms_norm(self, x: Node) -> Node:
        self.weight(x.ne[0])
        return x.apply("rms_norm").write("mul")

    def resnet(self, x: Node, n: int, emb: Node | None = None) -> Node:
        """Apply a residual block. emb: embedding of the time, for every channel."""
        h = self.norm_conv(x, n)
        if emb:
            h = h.apply("add", self.linear(emb.apply("unary"), n))
        h = self.norm_conv(h, n)
        return h.apply("add", x if x.ne[2] == n else self.conv(x, n, 1))

    def gated(self, x: Node, inner: int, *, scaled: bool = False) -> Node:
        """Apply a feed-forward layer with a gate."""
        gate, up = (self.linear(x, inner, bias=False) for _ in range(2))
        return self.linear(gate.apply("unary").apply("mul", up), x.ne[0], bias=False, scaled=scaled)

    def embedding(self, ids: Node, n: int, rows: int) -> Node:
        """Look up ids (tokens, N) in a table with `rows` rows -> (n, tokens, N)."""
        self.weight(n, rows, kind=self.weight_type if self.weight_type in EMBEDDING_TYPES else "f32")
        return Node("get_rows", (n, ids.ne[0] * ids.ne[1]), (ids.reshape(-1),)).reshape(n, *ids.ne[:2])

    def attend(self, q: Node, k: Node, v: Node, *mask: Node, scaled: bool = False) -> Node:
        """Attend: q, k (depth, L, heads), v (depth, heads, L) -> (depth * heads, L). Keys may have fewer heads.

        Flash attention takes keys and values as float16, padded to a multiple of 256, and masks the padding. A device
        without flash attention for this depth stores all scores.
        """
        (depth, queries, heads, _), keys = q.ne, k.ne[1]
        if self.flash and (self.backend == "cpu" or depth in FLASH_DEPTHS):
            more = -keys % 256
            v = v.permute(0, 2, 1, 3).dense().view(*k.ne)
            k, v = (self.scale(x.pad(0, more) if more else x, scaled).half() for x in (k, v))
            if more:
                shown, hidden = (self.inputs[0].apply("scale").make("repeat", n, queries) for n in (keys, more))
                mask = (shown.concat(hidden, 0).half(),)
            out = self.scale(flash_attn_ext(q, k, v, *mask), scaled)
        else:
            scores = mul_mat(k, q).write("soft_max", *mask)
            out = mul_mat(v.permute(1, 2, 0, 3).dense(), scores).permute(0, 2, 1, 3)
        return out.dense().reshape(depth * heads, queries)

    def attention(self, q: Node, k: Node, v: Node, heads: int, *mask: Node) -> Node:
        """Attend with tensors of shape (heads * depth, L)."""
        q, k, v = (x.reshape(-1, heads, x.ne[1]) for x in (q, k, v))
        q, k = (x.permute(0, 2, 1, 3).dense() for x in (q, k))
        return self.attend(q, k, v, *mask)


def _scratch(kind: str, x: Node, n: int) -> int:
    """Return the scratch bytes of a product of x with a weight of n rows."""
    if kind == "f32":
        return 0
    rows = math.prod(x.ne[1:])
    if GGML_TYPES[kind][0] == 1:
        return F16 * rows * (x.ne[0] + n)
    return rows * (x.ne[0] + -x.ne[0] % ROW_PADDING) * 36 // 32 + MMQ_BYTES


# ---- shared by models ----


def _tokens_of(x: Node) -> Node:
    """Copy (W, H, C) to (C, W * H)."""
    return x.permute(1, 2, 0, 3).cont().reshape(x.ne[2], -1)


def _image_of(x: Node, w: int, h: int) -> Node:
    """Copy (C, W * H) to (W, H, C)."""
    return x.permute(1, 0, 2, 3).cont().reshape(w, h, x.ne[0])


def _part(x: Node, axis: int, length: int) -> Node:
    """Copy a part of a dimension; return the tensor itself for a dimension of 1."""
    return x if x.ne[axis] == 1 else x.view(*x.ne[:axis], length, *x.ne[axis + 1 :]).cont()


# ---- the VAE: AutoencoderKL with 128 to 512 channels; SD 1.5's and SDXL's have another 1x1 convolution ----


def _middle(b: Builder, x: Node) -> Node:
    """Apply attention between two residual blocks; its one head has all channels."""
    w, h, n, _ = x.ne
    x = b.resnet(x, n)
    normed = b.group_norm(x)
    q, k, v = (_tokens_of(b.conv(normed, n, 1)) for _ in range(3))
    out = _image_of(b.attention(q, k, v, 1), w, h)
    return b.resnet(b.conv(out, n, 1).apply("add", x), n)


def vae_decoder(b: Builder, height: int, width: int, model: str) -> Node:
    """Build the decoder. height, width: the latent's."""
    channels = LATENT_CHANNELS[model]
    x = b.input(width, height, channels)
    x = b.conv(x, channels, 1) if model in ("sd15", "sdxl") else x
    x = _middle(b, b.conv(x, 512))
    for level, n in enumerate((512, 512, 256, 128)):
        x = b.upsample(x) if level else x
        for _ in range(3):
            x = b.resnet(x, n)
    return b.norm_conv(x, 3)


def vae_encoder(b: Builder, height: int, width: int, model: str) -> Node:
    """Build the encoder. The weights include the decoder's, which sd.cpp loads too."""
    vae_decoder(b, height, width, model)
    channels = 2 * LATENT_CHANNELS[model]
    x = b.conv(b.input(8 * width, 8 * height, 3), 128)
    for level, n in enumerate((128, 256, 512, 512)):
        x = b.conv(x.pad(1, 1), x.ne[2], stride=2, padding=0) if level else x
        for _ in range(2):
            x = b.resnet(x, n)
    x = b.norm_conv(_middle(b, x), channels)
    return b.conv(x, channels, 1) if model in ("sd15", "sdxl") else x


# ---- text encoders ----


def qwen3(b: Builder, tokens: int) -> Node:
    """Build Qwen3-4B. Z-Image uses the output of the last but one of its 36 layers."""
    hidden, depth = 2560, 128
    positions, mask = b.input(tokens, element=I32, made=True), b.input(tokens, tokens, made=True)

    def rotate_heads(x: Node) -> Node:
        return b.rms_norm(x).apply("rope", positions).permute(0, 2, 1, 3).cont()

    def block(x: Node) -> Node:
        h = b.rms_norm(x)
        q, k, v = (b.linear(h, heads * depth, bias=False).reshape(depth, heads, tokens) for heads in (32, 8, 8))
        h = b.attend(rotate_heads(q), rotate_heads(k), v, mask)
        x = b.linear(h, hidden, bias=False).write("add", x)
        return b.gated(b.rms_norm(x), 9728).write("add", x)

    x = b.embedding(b.input(tokens, element=I32), hidden, 151936)
    for _ in range(35):
        x = block(x)
    b.rms_norm(block(x))  # not computed, but its weights are loaded
    return x


def clip(b: Builder, tokens: int, hidden: int, heads: int, layers: int, is_projected: bool) -> Node:
    """Build the text model of CLIP or OpenCLIP. is_projected: whether it projects the pooled output."""
    x = b.embedding(b.input(tokens, element=I32), hidden, 49408).apply("add")
    mask = b.input(tokens, tokens, made=True)
    b.weight(hidden, tokens)  # of positions
    for _ in range(layers):
        h = b.norm(x)
        q, k, v = (b.linear(h, hidden) for _ in range(3))
        x = x.apply("add", b.linear(b.attention(q, k, v, heads, mask), hidden))
        x = x.apply("add", b.mlp(b.norm(x), 4 * hidden, hidden))
    if is_projected:
        b.weight(hidden, hidden)
    return b.norm(x)


def t5(b: Builder, tokens: int) -> Node:
    """Build T5-XXL's encoder."""
    hidden, heads = 4096, 64
    x = b.embedding(b.input(tokens, element=I32), hidden, 32128)
    distances = b.input(tokens, tokens, element=I32, made=True)
    bias = b.embedding(distances, heads, 32).permute(2, 0, 1, 3).cont()
    for _ in range(24):
        h = b.rms_norm(x)
        q, k, v = (b.linear(h, hidden, bias=False) for _ in range(3))
        x = b.linear(b.attention(q, k, v, heads, bias), hidden, bias=False).write("add", x)
        x = b.gated(b.rms_norm(x), 10240, scaled=True).write("add", x)
    return b.rms_norm(x)


# ---- diffusion models ----


def _time(b: Builder, n: int) -> Node:
    """Embed the time."""
    return b.scale(b.input(1)).make("timestep_embedding", n)


def _modulate(x: Node, scale: Node) -> Node:
    return x.apply("add", x.apply("mul", scale.reshape(scale.ne[0])))


def _rotate(x: Node, positions: Node) -> Node:
    """Rotate x (depth, heads, L) by positions (2, 2, depth / 2, L), one matrix each -> (depth, L, heads)."""
    depth, heads, length, _ = x.ne
    x = x.permute(0, 2, 1, 3).cont().reshape(2, depth // 2, length, heads).permute(3, 0, 1, 2).cont()
    positions = positions.permute(3, 0, 1, 2).cont()
    one, other = (x.make("repeat", 2, *x.ne[:3]).apply("mul", positions) for _ in range(2))
    return one.write("add", other).reshape(depth, length, heads)


def _patches(x: Node) -> Node:
    """Cut (W, H, C) into patches (4 C, W / 2 * H / 2); pad odd sides."""
    odd = x.ne[0] % 2, x.ne[1] % 2
    x = x.pad(*odd) if any(odd) else x
    w, _, c, _ = x.ne
    x = x.reshape(2, w // 2, 2, -1).permute(0, 2, 1, 3).cont().reshape(4, -1, c)
    return x.permute(1, 2, 0, 3).cont().reshape(4 * c, -1)


def _unpatched(x: Node, width: int, height: int) -> Node:
    """Invert `_patches`, but keep the padding."""
    w, h, c = -(-width // 2), -(-height // 2), x.ne[0] // 4
    x = x.reshape(4, c, -1).permute(0, 2, 1, 3).cont()
    return x.reshape(2, 2, w, h * c).permute(0, 2, 1, 3).cont().reshape(2 * w, 2 * h, c)


def z_image(b: Builder, height: int, width: int, tokens: int) -> Node:
    """Build Z-Image or Z-Image Turbo."""
    hidden, depth = 3840, 128
    time = b.mlp(_time(b, 256), 1024, 256, f32=True)

    def attend(x: Node, positions: Node) -> Node:
        qkv = b.linear(x, 3 * hidden, bias=False).reshape(depth, -1, x.ne[1])
        q, k, v = (qkv.view(depth, hidden // depth, x.ne[1]) for _ in range(3))
        q, k = (_rotate(b.rms_norm(part), positions) for part in (q, k))
        return b.linear(b.attend(q, k, v, scaled=True), hidden, bias=False)

    def block(x: Node, positions: Node, is_timed: bool = True) -> Node:
        """Apply attention and feed-forward. With a time, scale before and gate after each."""
        mods = b.linear(time, 4 * hidden) if is_timed else None
        for is_attention in (True, False):
            h = b.rms_norm(x)
            h = _modulate(h, _part(mods, 0, hidden)) if mods else h
            h = b.rms_norm(attend(h, positions) if is_attention else b.gated(h, 10240, scaled=True))
            h = h.apply("mul", _part(mods, 0, hidden).apply("unary")) if mods else h
            x = h.apply("add", x)
        return x

    def pad_tokens(x: Node) -> Node:
        """Append learnt tokens up to a multiple of 32."""
        b.weight(hidden)
        more = -x.ne[1] % 32
        return x.concat(Node("repeat", (hidden, more)), 1) if more else x

    patches = _patches(b.input(width, height, 16))
    text, image = (pad_tokens(b.linear(x, hidden)) for x in (b.rms_norm(b.input(2560, tokens)), patches))
    positions = b.input(2, 2, depth // 2, text.ne[1] + image.ne[1], made=True)
    text_positions, image_positions = (_part(positions, 3, x.ne[1]) for x in (text, image))
    for _ in range(2):
        text, image = block(text, text_positions, is_timed=False), block(image, image_positions)
    x = text.concat(image, 1)
    for _ in range(30):
        x = block(x, positions)
    x = b.linear(_modulate(x.apply("norm"), b.linear(time.apply("unary"), hidden)), 64, f32=True)
    x = _part(_part(x, 1, patches.ne[1]), 1, patches.ne[1])
    return b.scale(_part(_part(_unpatched(x, width, height), 1, height), 0, width))


def flux(b: Builder, height: int, width: int, tokens: int, is_guided: bool) -> Node:
    """Build FLUX.1 dev, with a guidance input, or schnell, without one."""
    hidden, depth, inner = 3072, 128, 12288
    image = b.linear(_patches(b.input(width, height, 16)), hidden)
    positions = b.input(2, 2, depth // 2, tokens + image.ne[1], made=True)
    scalars = [_time(b, 256) for _ in range(1 + is_guided)]
    vec, *others = (b.mlp(x, hidden, hidden) for x in (*scalars, b.input(768)))
    for other in others:
        vec = vec.apply("add", other)

    def mods_of(count: int) -> Node:
        """Return a shift, scale or gate: one of `count` views of one tensor."""
        x = b.linear(vec.apply("unary"), count * hidden)
        return x.reshape(hidden, count).permute(0, 2, 1, 3).cont().view(hidden)

    def modulate(x: Node, mods: Node) -> Node:
        return _modulate(x.apply("norm"), mods).apply("add", mods)

    def heads(x: Node) -> tuple[Node, Node, Node]:
        """Take queries, keys and values from the beginning of x."""
        q, k, v = (_part(x, 0, hidden).reshape(depth, -1, x.ne[1]) for _ in range(3))
        return b.rms_norm(q), b.rms_norm(k), v

    def attend(q: Node, k: Node, v: Node) -> Node:
        return b.attend(_rotate(q, positions), _rotate(k, positions), v)

    streams = [b.linear(b.input(4096, tokens), hidden), image]  # tokens of the text and of the image
    for _ in range(19):
        mods = [mods_of(6) for _ in streams]
        qkvs = [heads(b.linear(modulate(x, mod), 3 * hidden)) for x, mod in zip(streams, mods, strict=True)]
        both = attend(*(text.concat(image, 2) for text, image in zip(*qkvs, strict=True)))
        for i, (x, mod) in enumerate(zip(streams, mods, strict=True)):
            x = x.apply("add", b.linear(both.view(hidden, x.ne[1]), hidden).apply("mul", mod))
            streams[i] = x.apply("add", b.mlp(modulate(x, mod), inner, hidden).apply("mul", mod))
    x = streams[0].concat(streams[1], 1)
    for _ in range(38):
        mod = mods_of(3)
        wide = b.linear(modulate(x, mod), 3 * hidden + inner)
        fed = wide.view(inner, x.ne[1]).dense().write("unary")
        x = x.apply("add", b.linear(attend(*heads(wide)).concat(fed, 0), hidden).apply("mul", mod))
    last = b.linear(vec.apply("unary"), 2 * hidden)
    shift, scale = (_part(last, 0, hidden) for _ in range(2))
    x = _modulate(x.view(hidden, image.ne[1]).apply("norm"), scale).apply("add", shift)
    return _unpatched(b.linear(x, 64), width, height)


def unet(
    b: Builder, height: int, width: int, tokens: int, levels: tuple[int, ...], depths: tuple[int, ...], is_xl: bool
) -> Node:
    """Build SD 1.5's UNet, or SDXL's, which has labels as an input and projects tokens instead of pixels.

    levels: widths in units of 320 channels. depths: transformers in a block of each level.
    """
    context = b.input(2048 if is_xl else 768, tokens)
    emb = b.mlp(_time(b, 320), 1280, 1280)
    if is_xl:
        emb = emb.apply("add", b.mlp(b.input(2816), 1280, 1280))

    def transformer(x: Node, heads: int) -> Node:
        n = x.ne[0]
        for is_cross in (False, True):
            h = b.norm(x)
            source = context if is_cross else h
            q, k, v = (b.linear(x, n, bias=False) for x in (h, source, source))
            x = b.linear(b.attention(q, k, v, heads), n).apply("add", x)
        value, gate = [b.linear(b.norm(x), 8 * n).view(4 * n, x.ne[1])] * 2
        return b.linear(value.apply("mul", gate.cont().write("unary")), n).apply("add", x)

    def attend(x: Node, depth: int) -> Node:
        """Apply a stack of transformers to an image."""
        w, h, c, _ = x.ne
        y = b.group_norm(x)
        y = b.linear(_tokens_of(y), c) if is_xl else _tokens_of(b.conv(y, c, 1))
        for _ in range(depth):
            y = transformer(y, c // 64 if is_xl else 8)
        y = _image_of(b.linear(y, c), w, h) if is_xl else b.conv(_image_of(y, w, h), c, 1)
        return y.apply("add", x)

    def block(x: Node, level: int) -> Node:
        x = b.resnet(x, 320 * levels[level], emb)
        return attend(x, depths[level]) if depths[level] else x

    skips = [b.conv(b.input(width, height, 4), 320)]
    for level in range(len(levels)):
        if level:
            skips.append(b.conv(skips[-1], skips[-1].ne[2], stride=2))
        for _ in range(2):
            skips.append(block(skips[-1], level))
    x = b.resnet(skips[-1], skips[-1].ne[2], emb)
    x = b.resnet(attend(x, max(1, depths[-1])), x.ne[2], emb)
    for level in reversed(range(len(levels))):
        for _ in range(3):
            x = block(x.concat(skips.pop(), 2), level)
        x = b.upsample(x) if level else x
    return b.norm_conv(x, 4)


# ---- components ----


class Component(NamedTuple):
    """A component of a pipeline.

    build: (Builder, height and width of a latent if it has an image, tokens or the VAE's model) -> the result
    stride: the image's sides in pixels are multiples of this; 0 for a text encoder, which has no image
    tokens: sd.cpp pads a short prompt to this; None if it does not pad
    """

    build: Callable[..., Node]
    stride: int = 8
    tokens: int | None = None


COMPONENTS = {
    "vae-decoder": Component(vae_decoder),
    "vae-encoder": Component(vae_encoder),
    "zimage": Component(z_image),
    "flux-dev": Component(functools.partial(flux, is_guided=True), 8, 256),
    "flux-schnell": Component(functools.partial(flux, is_guided=False), 8, 256),
    "unet-sd15": Component(functools.partial(unet, levels=(1, 2, 4, 4), depths=(1, 1, 1, 0), is_xl=False), 64, 77),
    "unet-sdxl": Component(functools.partial(unet, levels=(1, 2, 4), depths=(0, 2, 10), is_xl=True), 64, 77),
    "qwen3-4b": Component(qwen3, 0),
    "clip-l": Component(functools.partial(clip, hidden=768, heads=12, layers=12, is_projected=False), 0, 77),
    "clip-g": Component(functools.partial(clip, hidden=1280, heads=20, layers=32, is_projected=True), 0, 77),
    "t5-xxl": Component(t5, 0, 256),
}


def tile_count(side: int, tile: int, overlap: float = 0.5) -> int:
    """Return the number of tiles along a side, both in latent pixels. Tiles overlap by that share of a tile; one more
    is added if they then overlap by less than half."""
    if side <= tile:
        return 1
    shared = int(tile * overlap)
    step = tile - shared
    count = (side - shared) // step
    beyond = ((count + 1) * step + shared) % side
    if beyond != step and beyond <= count * (tile // 2 - shared):
        count += 1
    count = max(count, 2)
    shared = (tile * count - side) // (count - 1)
    return 1 + math.ceil((side - tile) / (tile - shared))


@functools.lru_cache(maxsize=1024)
def graph(
    component: str, height: int = 1024, width: int = 1024, *, tokens: int | None = None, model: str = "flux",
    weight_type: str = "f16", conv_direct: bool = False, flash: bool = False, conv_scale: bool = False,
    tile: int | None = None, backend: str = "cuda",
) -> Graph:  # fmt: skip
    """Simulate the graph of one component in stable-diffusion.cpp: buffer, pool, weights, FLOPs.

    Parameters
    ----------
    component : str
        One of COMPONENTS.
    height, width : int
        Size of the image, multiples of 8 (of 64 for UNets). Text encoders ignore it.
    tokens : int, optional
        Tokens of the prompt with its template; required for Z-Image and Qwen3. By default the length that sd.cpp pads
        short prompts to: 77 for CLIP (which takes no more at once) and the UNets, 256 for FLUX and its T5.
    model : "sd15", "sdxl", "sd3" or "flux"
        Model of the VAE; Z-Image's is FLUX's.
    weight_type : str
        ``--type``: ggml's name of the type of all matrices that may have one, such as ``"q8_0"``. Weights and pool
        depend on it. Convolutions are float16; a matrix with rows of no whole blocks is float32.
    conv_direct : bool
        ``--vae-conv-direct`` or, for UNets, ``--diffusion-conv-direct``: convolutions without im2col.
    flash : bool
        ``--diffusion-fa`` or, for the VAE on a CPU, ``--fa``. CUDA has none for heads as deep as the VAE's, and sd.cpp
        uses none in text encoders.
    conv_scale : bool
        Scale the VAE's convolutions, as sd.cpp does for the VAE in an SDXL checkpoint.
    tile : int, optional
        For a VAE: side of a tile in latent pixels; DEFAULT_TILE for ``--vae-tiling``. Encoding uses tiles 1.3 times as
        large. None: the whole image.
    backend : "cuda" or "cpu"
        A GPU's buffer also holds the inputs, and aligns tensors to 128 bytes instead of 32.

    Raises
    ------
    ValueError
        The component, type or backend is unknown, or the component cannot have this size.

    Notes
    -----
    Simulates sd.cpp's commit SDCPP_COMMIT with ggml's GGML_COMMIT; tests compare the buffers with theirs, to the byte.
    A GPU holds more: the CUDA context, cuBLAS' workspace, weights of components that are still loaded, and buffers that
    were not freed. sd.cpp makes the images of a batch one by one and runs guidance as a second pass, so no buffer
    depends on either.

    Examples
    --------
    >>> graph("zimage", tokens=20, weight_type="q8_0", flash=True)
    Graph(buffer=579391872, pool=..., weights=6544989312, flops=..., runs=1, moved=...)
    """
    choose("component", component, COMPONENTS)
    build, stride, padded = COMPONENTS[component]
    is_vae = component.startswith("vae")
    if stride:  # as Python's integers: the cache would return NumPy's
        height, width = whole("height", height, stride), whole("width", width, stride)
    for name, side in (("height", height), ("width", width)):
        if stride and side % stride:
            raise ArgumentError(name, f"a multiple of {stride} for {component}", str(side))
    builder = Builder(weight_type, conv_direct, flash and stride > 0, conv_scale and is_vae, backend)
    sides = tiles = [height // 8, width // 8] if stride else []
    told: Any = model
    if is_vae:
        choose("model", model, LATENT_CHANNELS)
    elif tile is not None:
        raise ArgumentError("tile", f"None for {component}", repr(tile), "sd.cpp cuts only the VAE's images into tiles")
    else:
        told = whole(f"tokens of {component}", padded if tokens is None else tokens)
    if component.startswith("clip") and told != padded:
        raise ArgumentError(f"tokens of {component}", str(padded), str(told), "longer prompts go through it in parts")
    if tile is not None:
        tile = int(whole("tile", tile, 4) * (ENCODE_TILE if component == "vae-encoder" else 1))
        tiles = [max(min(tile, side), 4) for side in sides]
    return builder.measure(build(builder, *tiles, told))._replace(runs=math.prod(map(tile_count, sides, tiles)))


def compute_buffer(component: str, height: int = 1024, width: int = 1024, **options: Any) -> int:
    """Return the bytes of the compute buffer of a component, as stable-diffusion.cpp's log prints it.

    Parameters
    ----------
    component, height, width, **options
        As in `graph`.

    Examples
    --------
    >>> compute_buffer("vae-decoder", 1024, 1024) / 2**20
    6657.0...
    >>> compute_buffer("vae-decoder", 1024, 1024, conv_direct=True, tile=DEFAULT_TILE) / 2**20
    176.0...
    """
    return graph(component, height, width, **options).buffer
