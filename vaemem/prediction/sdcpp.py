"""The layers that stable-diffusion.cpp makes its graphs of, and those of its VAE.

After ggml_extend.hpp, common.hpp and vae.hpp of the commit that SDCPP_COMMIT names. Activations are float32 whatever
the weights are; convolutions' weights are float16, and so is what im2col copies for them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from vaemem._common import OPS, choose, whole
from vaemem.engine.stored import BLOCKS
from vaemem.prediction.ggml import ALIGNMENT, F16, F32, Tensor, flash_attn_ext, mul_mat, nodes_of, reserve

SDCPP_COMMIT = "0752cc9d3a8ddee25b72ca65d061a28310d97c02"  # of 2026-02-26
_TYPES = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 q6_K q5_K q4_K q3_K q2_K"
TYPES = {name: BLOCKS[name.upper()] for name in _TYPES.split()}  # ggml's: elements of a block, and its bytes
EMBEDDING_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # that sd.cpp looks tokens up in; others become f32
FLASH_DEPTHS = (40, 64, 72, 80, 96, 112, 128, 256)  # of a head: what ggml-cuda has flash attention for
# Elements: CUDA pads the last row of a quantised weight to a multiple, and every row that is multiplied with it.
ROW_PADDING = 512
MMQ_BYTES = 128 * 144  # of a tile of factors, beyond the last row
LATENT_CHANNELS = {"sd15": 4, "sdxl": 4, "sd3": 16, "flux": 16}
ENCODE_TILE = 1.30539  # what sd.cpp multiplies a tile's side by when it encodes
TILE_OVERLAP = 0.5  # of a tile's side, by default


class Graph(NamedTuple):
    """What one graph of stable-diffusion.cpp takes.

    Attributes
    ----------
    buffer : int
        Bytes of the compute buffer, as the log prints it, in MiB that it calls MB.
    pool : int
        Bytes that ggml-cuda takes beside it for the largest product, and rounds up to 2 MiB: results and other factors
        as float16 where a weight or im2col's copy is float16; other factors as q8_1 where a weight is quantised. Of
        GPUs with fast float16 and, for quantised weights, Turing's tensor cores or later ones. 0 on a CPU.
    weights : int
        Bytes of the buffer that holds them, as the log prints it.
    flops : int
        Of matrix products and convolutions, two for each multiplication and addition.
    runs : int
        How often a component runs its graph: once a tile.
    """

    buffer: int
    pool: int
    weights: int
    flops: int
    runs: int = 1


class Runner:
    """One model's graph while it is made: options, inputs, and its weights counted on the way.

    Attributes
    ----------
    weights : int
        Bytes of the buffer that holds the weights, so far.
    inputs : list of Tensor
        That every graph of sd.cpp holds: a one and a zero.
    """

    def __init__(
        self,
        weight_type: str = "f16",
        *,
        conv_direct: bool = False,
        flash: bool = False,
        conv_scale: bool = False,
        backend: str = "cuda",
    ) -> None:
        choose("weight_type", weight_type, TYPES)
        choose("backend", backend, ALIGNMENT)
        self.weight_type, self.backend = weight_type, backend
        self.conv_direct, self.flash, self.conv_scale = conv_direct, flash, conv_scale
        self.weights = 0
        self.one, zero = Tensor("", (1,)), Tensor("", (1,))
        self.inputs = [self.one, zero]

    def taken(self, result: Tensor) -> Graph:
        """What the graph that ends in `result` takes."""
        nodes = nodes_of(result)
        return Graph(
            buffer=reserve(result, self.inputs, self.backend),
            pool=max(node.scratch for node in nodes) if self.backend == "cuda" else 0,
            weights=self.weights,
            flops=sum(node.flops for node in nodes),
        )

    def input(self, *ne: int, element: int = F32) -> Tensor:
        """What a caller hands in. The CPU reads it where it is; elsewhere it is copied into the buffer."""
        return Tensor("", ne, element=element, placed=self.backend == "cpu")

    def made(self, *ne: int, element: int = F32) -> Tensor:
        """An input that sd.cpp makes for a graph, such as positions; it lies in the buffer everywhere."""
        return Tensor("", ne, element=element)

    def weight(self, *ne: int, kind: str = "f32") -> str:
        """Count a weight of ne[0] columns, and say its type; of no whole blocks a row, it is float32."""
        kind = "f32" if ne[0] % TYPES[kind][0] else kind
        block, size = TYPES[kind]
        elements = math.prod(ne)
        if block > 1 and self.backend == "cuda":
            elements += -ne[0] % ROW_PADDING
        alignment = ALIGNMENT[self.backend]
        self.weights += -(elements // block * size // -alignment) * alignment
        return kind

    # ---- layers ----

    def scale(self, x: Tensor) -> Tensor:
        return x.dense().apply("scale")

    def linear(self, x: Tensor, n: int, bias: bool = True, *, f32: bool = False, scaled: bool = False) -> Tensor:
        """scaled: the product of numbers made smaller, and larger again after it."""
        kind = self.weight(x.ne[0], n, kind="f32" if f32 else self.weight_type)
        x = self.scale(x) if scaled else x
        x = x.times(n, _scratch(kind, x, n))
        x = self.scale(x) if scaled else x
        if bias:
            self.weight(n)
            x = x.write("add")
        return x

    def conv(self, x: Tensor, n: int, side: int = 3, stride: int = 1, padding: int | None = None) -> Tensor:
        """x: (W, H, C). Zero padding as wide as it takes to keep the size, unless given."""
        w, h, c, _ = x.ne
        padding = side // 2 if padding is None else padding
        w, h = ((length + 2 * padding - side) // stride + 1 for length in (w, h))
        taps = side * side * c
        self.weight(side, side, c, n, kind="f16")
        self.weight(n)
        x = self.scale(x) if self.conv_scale else x
        flops = 2 * taps * w * h * n
        if self.conv_direct:
            x = Tensor("conv_2d", (w, h, n), (x,), flops=flops)
        else:
            x = Tensor("im2col", (taps, w, h), (x,), element=F16).reshape(taps, w * h)
            x = Tensor("mul_mat", (w * h, n), (x,), flops=flops, scratch=F16 * w * h * n)
            x = x.reshape(w, h, 1, n).permute(0, 1, 3, 2).cont()
        x = self.scale(x) if self.conv_scale else x
        return x.write("add")

    def norm_conv(self, x: Tensor, n: int) -> Tensor:
        """GroupNorm, SiLU and a 3x3 convolution."""
        return self.conv(self.group_norm(x).write("unary"), n)

    def upsample(self, x: Tensor) -> Tensor:
        """(W, H, C) as (2 W, 2 H, C), nearest, and a 3x3 convolution."""
        w, h, c, _ = x.ne
        return self.conv(x.make("upscale", 2 * w, 2 * h, c), c)

    def norm(self, x: Tensor, size: int | None = None, kind: str = "norm", bias: bool = True) -> Tensor:
        """A normalisation with a weight, and a bias, for each of `size` channels (of the innermost dimension)."""
        size = size or x.ne[0]
        self.weight(size)
        x = x.apply(kind).write("mul")
        if bias:
            self.weight(size)
            x = x.write("add")
        return x

    def group_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, x.ne[2], "group_norm")

    def rms_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, kind="rms_norm", bias=False)

    def embedding(self, ids: Tensor, n: int, rows: int) -> Tensor:
        """Looked up in a table of rows; ids: (tokens, N); gives (n, tokens, N)."""
        self.weight(n, rows, kind=self.weight_type if self.weight_type in EMBEDDING_TYPES else "f32")
        count = ids.ne[0] * ids.ne[1]
        return Tensor("get_rows", (n, count), (ids.reshape(count),)).reshape(n, *ids.ne[:2])

    def full(self, *ne: int) -> Tensor:
        """A tensor of one number."""
        return self.one.apply("scale").repeat(*ne)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, flash: bool = False, scaled: bool = False
    ) -> Tensor:
        """q, k: (depth, L, heads), v: (depth, heads, L); gives (depth * heads, L). Keys may have fewer heads.

        Flash attention takes keys and values as float16, of a length that is a multiple of 256, and masks the rest.
        Where the device has none for heads of that depth, scores are stored whole.
        """
        depth, (_, queries, heads, _), (_, keys, key_heads, _) = v.ne[0], q.ne, k.ne
        if flash and (self.backend == "cpu" or depth in FLASH_DEPTHS):
            v = v.permute(0, 2, 1, 3).dense().reshape(depth, keys, key_heads)
            out = self._flash(q, k, v, mask, scaled).view(depth, heads, queries)
        else:
            v = v.permute(1, 2, 0, 3).dense().reshape(keys, depth, key_heads)
            scores = mul_mat(k, q).write("scale")
            if mask is not None:
                scores = scores.write("add", mask)
            out = mul_mat(v, scores.write("soft_max")).permute(0, 2, 1, 3)
        return out.dense().reshape(depth * heads, queries)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaled: bool) -> Tensor:
        """Each (depth, L, heads); gives (depth, heads, L)."""
        queries, keys = q.ne[1], k.ne[1]
        more = -keys % 256

        def prepared(x: Tensor) -> Tensor:
            x = x.pad(0, more) if more else x
            return (self.scale(x) if scaled else x).half()

        k, v = prepared(k), prepared(v)
        if mask is not None:
            mask = mask.transpose().half()
        elif more:
            mask = self.full(keys, queries).concat(self.full(more, queries), 0).half()
        out = flash_attn_ext(q, k, v, mask)
        return self.scale(out) if scaled else out

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, *, flash: bool = False
    ) -> Tensor:
        """Each (heads * depth, L)."""
        depth = q.ne[0] // heads

        def split(x: Tensor) -> Tensor:
            return x.reshape(depth, heads, x.ne[1])

        q, k = (split(x).permute(0, 2, 1, 3).dense().reshape(depth, x.ne[1], heads) for x in (q, k))
        return self.attend(q, k, split(v), mask, flash=flash)


def tokens_of(x: Tensor) -> Tensor:
    """(W, H, C) as (C, W * H), copied."""
    w, h, c, _ = x.ne
    return x.permute(1, 2, 0, 3).cont().reshape(c, w * h)


def image_of(x: Tensor, w: int, h: int) -> Tensor:
    """(C, W * H) as (W, H, C), copied."""
    return x.permute(1, 0, 2, 3).cont().reshape(w, h, x.ne[0])


def _scratch(kind: str, x: Tensor, n: int) -> int:
    """Of a product of x with a weight of n rows."""
    if kind == "f32":
        return 0
    rows = math.prod(x.ne[1:])
    if TYPES[kind][0] == 1:
        return F16 * rows * (x.ne[0] + n)
    return rows * -(x.ne[0] // -ROW_PADDING) * ROW_PADDING * 36 // 32 + MMQ_BYTES


# ---- the VAE ----


class Autoencoder(Runner):
    """AutoencoderKL of 128 to 512 channels."""

    LEVELS = (128, 256, 512, 512)

    def resnet(self, x: Tensor, n: int) -> Tensor:
        h = self.norm_conv(self.norm_conv(x, n), n)
        if x.ne[2] != n:
            x = self.conv(x, n, 1)
        return h.apply("add", x)

    def spatial_attention(self, x: Tensor) -> Tensor:
        """One head as deep as there are channels."""
        w, h, c, _ = x.ne
        normed = self.group_norm(x)

        q, k, v = (tokens_of(self.conv(normed, c, 1)) for _ in range(3))
        out = image_of(self.attention(q, k, v, 1, flash=self.flash), w, h)
        return self.conv(out, c, 1).apply("add", x)

    def middle(self, x: Tensor) -> Tensor:
        return self.resnet(self.spatial_attention(self.resnet(x, x.ne[2])), x.ne[2])

    def decoder(self, x: Tensor) -> Tensor:
        x = self.middle(self.conv(x, self.LEVELS[-1]))
        for level in reversed(range(len(self.LEVELS))):
            for _ in range(3):
                x = self.resnet(x, self.LEVELS[level])
            if level:
                x = self.upsample(x)
        return self.norm_conv(x, 3)

    def encoder(self, x: Tensor, latents: int) -> Tensor:
        x = self.conv(x, self.LEVELS[0])
        for level, n in enumerate(self.LEVELS):
            for _ in range(2):
                x = self.resnet(x, n)
            if level + 1 < len(self.LEVELS):
                x = self.conv(x.pad(1, 1), n, stride=2, padding=0)
        return self.norm_conv(self.middle(x), 2 * latents)

    def build(self, op: str, height: int, width: int, channels: int, quant: bool) -> Tensor:
        """height, width: of the latent; quant: with SD's 1x1 convolutions. Who encodes holds the decoder, too."""
        x = self.input(width, height, channels)
        result = self.decoder(self.conv(x, channels, 1) if quant else x)
        if op == "encode":
            result = self.encoder(self.input(8 * width, 8 * height, 3), channels)
            result = self.conv(result, 2 * channels, 1) if quant else result
        return result


def tile_side(op: str, tile: int, side: int) -> int:
    """Latent pixels of a tile's side, of an image with `side` of them."""
    tile = int(tile * ENCODE_TILE) if op == "encode" else tile
    return max(min(tile, side), 4)


def tile_count(side: int, tile: int, overlap: float = TILE_OVERLAP) -> int:
    """How many tiles lie along a side, both in latent pixels: as many as fit when they overlap by that share of a tile,
    and one more where they then still overlap by less than half."""
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
def vae_graph(
    op: str,
    height: int,
    width: int,
    model: str = "flux",
    *,
    tile: int | None = None,
    conv_direct: bool = False,
    flash: bool = False,
    conv_scale: bool = False,
    backend: str = "cuda",
) -> Graph:
    """The graph of stable-diffusion.cpp's VAE: what it takes.

    Parameters
    ----------
    op : "decode" or "encode"
    height, width : int
        Of the image, multiples of 8.
    model : "sd15", "sdxl", "sd3" or "flux"
        Z-Image's VAE is FLUX's.
    tile : int, optional
        Latent pixels of a tile's side, 32 by sd.cpp's default; None: the whole image.
    conv_direct : bool
        ``--vae-conv-direct``: convolutions without im2col.
    flash : bool
        ``--fa``. CUDA has no flash attention for one head of 512, so nothing changes there.
    conv_scale : bool
        Inputs of convolutions scaled down and outputs up, which sd.cpp does with the VAE in an SDXL checkpoint.
    backend : "cuda" or "cpu"

    Examples
    --------
    >>> vae_graph("decode", 1024, 1024, "sdxl").buffer / 2**20  # as its log says, 6656.25 MB
    6656.25...
    """
    choose("op", op, OPS)
    choose("model", model, LATENT_CHANNELS)
    tiles = []  # along each side, and how long
    for name, side in (("height", height), ("width", width)):
        if whole(name, side, 8) % 8:
            raise ValueError(f"{name}: want a multiple of 8, got {side}")
        length = side // 8 if tile is None else tile_side(op, whole("tile", tile, 4), side // 8)
        tiles.append((tile_count(side // 8, length), length))
    (rows, h), (columns, w) = tiles
    runner = Autoencoder(conv_direct=conv_direct, flash=flash, conv_scale=conv_scale, backend=backend)
    taken = runner.taken(runner.build(op, h, w, LATENT_CHANNELS[model], quant=model in ("sd15", "sdxl")))
    return taken._replace(runs=rows * columns)
