"""What MLX takes to decode on Apple Silicon, as far as its sources say.

Weights, the tensors of each convolution and the work space that MLX's Metal backend makes for it are known: they are
sizes in mlx/backend/metal/conv.cpp (read at 029bf18, of 2024, and at 846d176, of August 2026, which differ for none of
these convolutions from 512x512 up), and so are the scores of the attention, for which MLX has no fused kernel with one
head of 512 (scaled_dot_product_attention.cpp). Not known: how many tensors of a lazily evaluated graph live at once,
what a command buffer keeps until it is done, what a transformer takes while it runs, and how long anything lasts. So a
peak here is the least, with MLX's graph evaluated block by block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from vaemem import _core
from vaemem._common import DTYPES, ELEMENT_BYTES, choose, whole
from vaemem.engine.weights import PARTS
from vaemem.prediction.planned import PlannedPhase, Way

LOWERINGS = ("mlx", "im2col")
# Winograd's F(6x6, 3x3): 64 numbers for each tile of 6 x 6 outputs.
WINOGRAD_TILE, WINOGRAD_NUMBERS = 6, 64


class Conv(NamedTuple):
    """A convolution of the decoder: name, height, width, channels in and out, kernel, and numbers held beside it."""

    name: str
    height: int
    width: int
    c: int
    k: int
    r: int
    held: int


def is_winograd(conv: Conv) -> bool:
    """Whether MLX runs it so: 3x3 of whole blocks of 32 channels, 256 in and out together, 4096 pixels or more.

    In October 2024 512 channels were enough of themselves, and with 256 the input had to have 2^18 numbers.
    """
    blocks = conv.c % 32 == 0 and conv.k % 32 == 0
    return conv.r == 3 and blocks and conv.c + conv.k >= 256 and conv.height * conv.width >= 4096


def workspace(conv: Conv, dtype: str, lowering: str = "mlx") -> int:
    """Bytes that a convolution takes beside its input and output.

    Parameters
    ----------
    conv : Conv
    dtype : str
    lowering : {"mlx", "im2col"}
        What MLX runs, Winograd or an implicit product that takes nothing; or a buffer of all columns, as explicit
        products of other convolutions take in MLX.

    Examples
    --------
    >>> full = Conv("a 3x3 of 128 channels", 1536, 2304, 128, 128, 3, 0)
    >>> [round(workspace(full, dtype, "im2col") / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [7.6, 15.2]
    >>> [round(workspace(full, dtype) / 2**30, 1) for dtype in ("bfloat16", "float32")]
    [3.8, 7.7]
    """
    choose("lowering", lowering, LOWERINGS)
    element = ELEMENT_BYTES[dtype]
    if lowering == "im2col":
        return element * conv.height * conv.width * conv.r * conv.r * conv.c
    if not is_winograd(conv):
        return 0
    rows, columns = (-(-side // WINOGRAD_TILE) for side in (conv.height, conv.width))
    padded = (WINOGRAD_TILE * rows + 2) * (WINOGRAD_TILE * columns + 2) * conv.c
    turned = WINOGRAD_NUMBERS * (rows * columns * (conv.c + conv.k) + conv.c * conv.k)
    return element * (padded + turned)


def convs(model: str, height: int, width: int) -> Iterator[Conv]:
    """The decoder's convolutions in their order, each with the numbers that its block holds beside it."""
    choose("model", model, _core.models())
    arch = _core.models()[model]
    blocks = tuple(arch["block_out_channels"])
    scale = 1 << (len(blocks) - 1)
    for name, side in (("height", height), ("width", width)):
        if whole(name, side, scale) % scale:
            raise ValueError(f"{name}: want a multiple of {scale}, got {side}")
    h, w, before = height // scale, width // scale, blocks[-1]

    def resnet(name: str, c: int, k: int) -> Iterator[Conv]:
        yield Conv(f"{name}.conv1", h, w, c, k, 3, h * w * c)  # the block's input waits for its end
        yield Conv(f"{name}.conv2", h, w, k, k, 3, h * w * c)
        if c != k:
            yield Conv(f"{name}.conv_shortcut", h, w, c, k, 1, h * w * k)

    yield Conv("decoder.conv_in", h, w, arch["latent_channels"], before, 3, 0)
    for i in range(2):
        yield from resnet(f"decoder.mid_block.resnets.{i}", before, before)
    for i, channels in enumerate(blocks[::-1]):
        for j in range(arch["layers_per_block"] + 1):
            yield from resnet(f"decoder.up_blocks.{i}.resnets.{j}", before, channels)
            before = channels
        if i < len(blocks) - 1:
            h, w = 2 * h, 2 * w
            yield Conv(f"decoder.up_blocks.{i}.upsamplers.0", h, w, channels, channels, 3, 0)
    yield Conv("decoder.conv_out", h, w, before, arch["out_channels"], 3, 0)


class Decode(NamedTuple):
    """The least that a decode takes beside weights: bytes of its work space and in all, and at which convolution."""

    at: str
    workspace: int
    total: int


def decode(model: str, height: int, width: int, dtype: str = "bfloat16", lowering: str = "mlx") -> Decode:
    """The least that MLX takes to decode one image, weights left out.

    Parameters
    ----------
    model : str
        A VAE that `vaemem.predict` knows.
    height, width : int
        Of the image, in pixels.
    dtype : {"bfloat16", "float16", "float32"}
        Of latents and weights: where one of them is float32, MLX promotes what it computes to float32.
    lowering : {"mlx", "im2col"}

    Returns
    -------
    Decode

    Examples
    --------
    >>> most = decode("flux", 1536, 2304)
    >>> most.at, round(most.workspace / 2**30, 1), round(most.total / 2**30, 1)
    ('decoder.up_blocks.2.upsamplers.0', 7.7, 11.1)
    """
    choose("dtype", dtype, DTYPES)
    element, best = ELEMENT_BYTES[dtype], _attention(model, height, width, dtype)
    for conv in convs(model, height, width):
        own = workspace(conv, dtype, lowering)
        total = own + element * (conv.height * conv.width * (conv.c + conv.k) + conv.held)
        best = max(best, Decode(conv.name, own, total), key=lambda one: one.total)
    return best


def _attention(model: str, height: int, width: int, dtype: str) -> Decode:
    """Scores of every pixel with every other, beside queries, keys, values and the block's input."""
    arch, element = _core.models()[model], ELEMENT_BYTES[dtype]
    if not arch["mid_block_add_attention"]:
        return Decode("", 0, 0)
    blocks = arch["block_out_channels"]
    pixels = (height * width) >> (2 * (len(blocks) - 1))
    scores = element * pixels * pixels
    return Decode("decoder.mid_block.attentions.0", scores, scores + 4 * element * pixels * blocks[-1])


# ---- ways of running it ----

# Of the memory: what Metal recommends on a Mac of 16 GB (10922 MiB in llama.cpp's logs); of 64 GB it is three quarters.
WORKING_SET = (2, 3)
NOTES = (
    "MLX: sizes of weights, and of the tensors and work space of the decode's largest step, as its sources make them: "
    "the least, with the graph evaluated block by block.",
    "Not known for MLX: what the denoiser and the text encoder take while they run, what a lazily evaluated graph "
    "or a command buffer keeps, what was cached before, and how long it takes.",
    "A buffer of all columns (im2col), 9 C_in H W numbers, is what MLX makes for none of these convolutions.",
)


def vae_bytes(model: str, parts: str, dtype: str) -> int:
    """Of a VAE's weights, or of one half's.

    Examples
    --------
    >>> [round(vae_bytes("flux", parts, "bfloat16") / 2**20) for parts in ("all", "decoder")]
    [160, 95]
    """
    choose("parts", parts, PARTS)
    tensors = _core.Model(_core.models()[model], parts).tensors
    return ELEMENT_BYTES[dtype] * sum(math.prod(shape) for _, shape in tensors)


def ways(
    model: str, height: int, width: int, denoiser: int = 0, cache_limit: int | None = None, tile: int = 512
) -> list[Way]:
    """Ways of decoding with MLX: with the whole VAE or its decoder, the denoiser's weights kept or unloaded before.

    Parameters
    ----------
    model : str
        A VAE.
    height, width : int
    denoiser : int
        Bytes of its weights.
    cache_limit : int, optional
        Bytes that MLX's allocator may keep of what was given back (``mx.set_cache_limit``): added whole, the most that
        it can be. None: as much as its memory limit leaves, which is not counted.
    tile : int
        Pixels of a tile's side.
    """

    vaes = {(parts, dtype): vae_bytes(model, parts, dtype) for parts in ("decoder", "all") for dtype in DTYPES}

    def way(parts: str = "decoder", dtype: str = "bfloat16", kept: bool = False, lowering: str = "mlx",
            tiled: bool = False) -> Way:  # fmt: skip
        sides = (min(tile, height), min(tile, width)) if tiled else (height, width)
        most, vae, cached = decode(model, *sides, dtype, lowering), vaes[parts, dtype], cache_limit or 0
        phases = (
            PlannedPhase("denoise", denoiser + vae, cached, {}),
            PlannedPhase("decode", vae + (denoiser if kept else 0), most.total + cached, {}),
        )
        name = [
            "decoder only" if parts == "decoder" else "whole VAE",
            f"denoiser {'kept' if kept else 'unloaded'}",
            dtype,
            *([f"tiles of {tile}"] if tiled else []),
            *(["im2col"] if lowering == "im2col" else []),
        ]
        settings = {"parts": parts, "dtype": dtype, "unload": not kept, "tile": tile if tiled else None}
        changes = "tiles are blended where they overlap" if tiled else ""
        return Way(", ".join(name), settings | {"cache_limit": cache_limit}, phases, changes=changes, notes=NOTES)

    return [
        way("all", kept=True),
        way(kept=True),
        way("all"),
        way(),
        way(dtype="float32"),
        way(lowering="im2col"),
        way(dtype="float32", lowering="im2col"),
        way(tiled=True),
    ]
