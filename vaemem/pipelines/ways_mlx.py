"""Predict MLX's memory for decoding on Apple Silicon, as far as its sources show it.

Weights, the tensors of each convolution and the work space that MLX's Metal backend makes for it are known: they are
sizes in mlx/backend/metal/conv.cpp (read at 029bf18, of 2024, and at 846d176, of August 2026; both agree for these
convolutions from 512x512 up). The scores of the attention are known too, because MLX has no fused kernel with one head
of 512 (scaled_dot_product_attention.cpp). Some facts are unknown: how many tensors of a lazily evaluated graph live at
once, the memory of unfinished command buffers and of a running transformer, and all times. So a peak here is the least,
with MLX's graph evaluated block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from vaemem import _core
from vaemem._common import DTYPES, ELEMENT_BYTES, choose, meant
from vaemem.engine.weights import PARTS
from vaemem.prediction.planned import Phase, Way

# Winograd's F(6x6, 3x3): 64 numbers for each tile of 6 x 6 outputs.
WINOGRAD_TILE, WINOGRAD_NUMBERS = 6, 64


class MetalConv(NamedTuple):
    """A convolution of the decoder: name, height, width, channels in and out, kernel, and numbers held meanwhile."""

    name: str
    height: int
    width: int
    c: int
    k: int
    r: int
    held: int


def workspace(conv: MetalConv, dtype: str, lowering: str = "mlx") -> int:
    """Compute a convolution's bytes in addition to its input and output.

    Parameters
    ----------
    conv : MetalConv
    dtype : str
    lowering : {"mlx", "im2col"}
        ``"mlx"`` is the method that MLX chooses: Winograd, or an implicit product, which needs no buffer. ``"im2col"``
        is a buffer of all columns, as MLX uses for other convolutions. MLX chooses Winograd for 3x3 convolutions with
        channels in multiples of 32, at least 256 channels in and out together, and at least 4096 pixels. In October
        2024, 512 channels together were enough at any size; with 256 the input needed 2^18 numbers.

    Examples
    --------
    >>> full = MetalConv("a 3x3 of 128 channels", 1536, 2304, 128, 128, 3, 0)
    >>> [round(workspace(full, dtype, "im2col") / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [7.6, 15.2]
    >>> [round(workspace(full, dtype) / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [3.8, 7.7]
    """
    choose("lowering", lowering, ("mlx", "im2col"))
    element = ELEMENT_BYTES[dtype]
    if lowering == "im2col":
        return element * conv.height * conv.width * conv.r * conv.r * conv.c
    is_large = conv.c + conv.k >= 256 and conv.height * conv.width >= 4096
    if conv.r != 3 or conv.c % 32 or conv.k % 32 or not is_large:
        return 0
    rows, columns = (-(-side // WINOGRAD_TILE) for side in (conv.height, conv.width))
    padded = (WINOGRAD_TILE * rows + 2) * (WINOGRAD_TILE * columns + 2) * conv.c
    turned = WINOGRAD_NUMBERS * (rows * columns * (conv.c + conv.k) + conv.c * conv.k)
    return element * (padded + turned)


def convs(model: str, height: int, width: int) -> Iterator[MetalConv]:
    """List the decoder's convolutions in order, each with the numbers that its block holds in addition."""
    choose("model", model, _core.models())
    trace = _core.Trace.vae(_core.models()[model], "diffusers", "decode", "bfloat16", height, width)
    held = 0
    for op, index, _, name in trace.steps:
        name = name.removesuffix(" [workspace]").removesuffix(".conv")
        if op == "conv" and name.startswith("decoder."):
            _, _, c, h, w, k, r = trace.convs[index][:7]
            assert isinstance(r, int)
            if not name.endswith(".conv2"):  # conv2 keeps the numbers that wait for the end of the block, as conv1 does
                held = h * w * {"conv1": c, "conv_shortcut": k}.get(name.rpartition(".")[2], 0)
            yield MetalConv(name, h, w, c, k, r, held)


class _LeastDecode(NamedTuple):
    """The least memory of a decode without weights: bytes of work space and in all, and the convolution."""

    at: str
    workspace: int
    total: int


def decode(model: str, height: int, width: int, dtype: str = "bfloat16", lowering: str = "mlx") -> _LeastDecode:
    """Compute the least memory for MLX to decode one image, without weights.

    Parameters
    ----------
    model : str
        A VAE that `vaemem.predict` knows.
    height, width : int
        The image's size, in pixels.
    dtype : {"bfloat16", "float16", "float32"}
        The type of latents and weights. If one of them is float32, MLX promotes its computation to float32.
    lowering : {"mlx", "im2col"}

    Returns
    -------
    _LeastDecode

    Examples
    --------
    >>> most = decode("flux", 1536, 2304)
    >>> most.at, round(most.workspace / 2**30, 1), round(most.total / 2**30, 1)
    ('decoder.up_blocks.2.upsamplers.0', 7.7, 11.1)
    """
    dtype = meant("dtype", dtype, DTYPES)
    element, found = ELEMENT_BYTES[dtype], []
    for conv in convs(model, height, width):
        own = workspace(conv, dtype, lowering)
        total = own + element * (conv.height * conv.width * (conv.c + conv.k) + conv.held)
        found.append(_LeastDecode(conv.name, own, total))
    arch = _core.models()[model]
    if arch["mid_block_add_attention"]:
        # Scores of every pixel with every other, plus queries, keys, values and the block's input.
        blocks = arch.get("decoder_block_out_channels", arch["block_out_channels"])
        pixels = (height * width) >> (2 * (len(blocks) - 1))
        scores = element * pixels * pixels
        total = scores + 4 * element * pixels * blocks[-1]
        found.insert(0, _LeastDecode("decoder.mid_block.attentions.0", scores, total))
    return max(found, key=lambda one: one.total)


# ---- ways of running it ----

# The share of the memory that Metal recommends on a Mac of 16 GB (10922 MiB in llama.cpp's logs). With 64 GB it is
# three quarters.
WORKING_SET = (2, 3)
MLX_NOTES = (
    "MLX: sizes of weights, and of the tensors and work space of the decode's largest step, as its sources make them: "
    "the least, with the graph evaluated block by block.",
    "Not known for MLX: the memory of the denoiser and the text encoder while they run, of a lazily evaluated graph, "
    "of command buffers and of earlier caches; and all times, loading included. The text encoder's weights are not "
    "counted.",
    "A buffer of all columns (im2col), 9 C_in H W numbers, is what MLX makes for none of these convolutions.",
)


# Weights of the VAE or its decoder, dtype, whether the denoiser's are kept, tiles, convolutions; the plainest first.
WAYS = (
    ("all", "bfloat16", True, False, "mlx"), ("decoder", "bfloat16", True, False, "mlx"),
    ("all", "bfloat16", False, False, "mlx"), ("decoder", "bfloat16", False, False, "mlx"),
    ("decoder", "float32", False, False, "mlx"), ("decoder", "bfloat16", False, False, "im2col"),
    ("decoder", "float32", False, False, "im2col"), ("decoder", "bfloat16", False, True, "mlx"),
)  # fmt: skip
TILE = 512  # pixels of a tile's side


def vae_bytes(model: str, parts: str, dtype: str) -> int:
    """Compute the bytes of a VAE's weights, or of one half's.

    Examples
    --------
    >>> [round(vae_bytes("flux", parts, "bfloat16") / 2**20) for parts in ("all", "decoder")]
    [160, 95]
    """
    choose("parts", parts, PARTS)
    tensors = _core.Model(_core.models()[model], parts).tensors
    return ELEMENT_BYTES[dtype] * sum(math.prod(shape) for _, shape in tensors)


def mlx_ways(model: str, height: int, width: int, denoiser: int, cache_limit: int | None) -> list[Way]:
    """List ways of decoding with MLX: the whole VAE or its decoder, and the denoiser's weights (bytes) kept or unloaded
    before. The limit of the allocator's cache (``mx.set_cache_limit``) is added whole, as an upper bound. None: the
    cache may fill the memory limit, and is not counted."""
    made, cached = [], cache_limit or 0
    for parts, dtype, kept, tiled, lowering in WAYS:
        sides = (min(TILE, height), min(TILE, width)) if tiled else (height, width)
        most, vae = decode(model, *sides, dtype, lowering).total, vae_bytes(model, parts, dtype)
        words = ["decoder only" if parts == "decoder" else "whole VAE", f"denoiser {'kept' if kept else 'unloaded'}"]
        name = ", ".join([*words, dtype, *[f"tiles of {TILE}"] * tiled, *[lowering] * (lowering == "im2col")])
        settings = {"parts": parts, "dtype": dtype, "unload": not kept, "tile": TILE if tiled else None}
        phases = (
            Phase.planned("load", denoiser + vae, 0, {"disk": float(denoiser + vae)}),
            Phase.planned("denoise", denoiser + vae, cached, {}),
            Phase.planned("decode", vae + denoiser * kept, most + cached, {}),
        )
        changes = "tiles are blended where they overlap" if tiled else ""
        made.append(Way(name, settings | {"cache_limit": cache_limit}, phases, changes=changes, notes=MLX_NOTES))
    return made
