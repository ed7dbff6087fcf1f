"""A note on MLX's VAE decode ("VAE Memory Spike Analysis" of a Z-Image port in Swift), claim by claim.

MLX runs on Apple's GPUs alone. So a claim is judged by the sizes that MLX's sources fix (`vaemem.pipelines.by_mlx`),
by a count, or by what MLX documents. The note is about Z-Image, which has FLUX.1's VAE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from published.claims import FAILS, HOLDS, UNKNOWN, Checked, Claim, Finding, judged
from vaemem.engine.vae import VAE
from vaemem.pipelines.by_mlx import TILE, MetalConv, decode, vae_bytes, weights_bytes, workspace

MODEL, HEIGHT, WIDTH, GIB = "flux", 1536, 2304, 1 << 30
COUNTED, DOCUMENTED, NOWHERE = "counted", "documented", "nothing here judges it"
STATED = {"bfloat16": 7.6, "float32": 15.2}  # GiB of columns
_FULL = MetalConv("a 3x3 of 128 channels", HEIGHT, WIDTH, 128, 128, 3)


def judge_claims() -> Checked:
    """Judge every claim of the note."""
    return Checked((claim, claim.check()) for claim in NOTE)


def judge_note() -> str:
    """Show every claim of the note with its verdict."""
    about = f"Sizes are the least that MLX needs to decode {HEIGHT}x{WIDTH}, with each operation done before the next."
    return judge_claims().text(about)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


@functools.cache
def _least(dtype: str = "bfloat16", height: int = HEIGHT, width: int = WIDTH) -> Any:
    return decode(MODEL, height, width, dtype, in_flight=0)


@functools.cache
def _weights() -> tuple[int, int]:
    """Return the bytes of Z-Image-Turbo's denoiser and of the VAE's decoder."""
    return weights_bytes("transformer", "zimage-transformer", "bfloat16"), vae_bytes(MODEL, "decoder", "bfloat16")


def _columns() -> Finding:
    sizes = {dtype: workspace(_FULL, dtype, "im2col") / GIB for dtype in STATED}
    found = ", ".join(f"{size:.1f} GiB in {dtype}" for dtype, size in sizes.items())
    return judged({dtype: round(size, 1) for dtype, size in sizes.items()} == STATED, COUNTED, f"columns of {found}")


def _lowering() -> Finding:
    columns, own = (workspace(_FULL, "bfloat16", lowering) for lowering in ("im2col", "mlx"))
    found = (
        f"MLX's Metal backend runs this convolution by Winograd's F(6x6, 3x3), whose transformed tiles are"
        f" {_gib(own)} rather than {_gib(columns)}"
    )
    return judged(own == columns, DOCUMENTED, found)


def _last_stages() -> Finding:
    most = _least()
    found = f"the peak of {_gib(most.total)} lies at {most.at}, and {_gib(most.workspace)} of it are workspace"
    return judged("upsamplers" in most.at and 2 * most.workspace > most.total, COUNTED, found)


def _half() -> Finding:
    half, full = (_least(dtype).total for dtype in STATED)
    return judged(2 * half == full, COUNTED, f"a decode takes {_gib(half)} in bfloat16, {_gib(full)} in float32")


def _promotion() -> Finding:
    half, full = (_least(dtype).total for dtype in STATED)
    found = f"MLX promotes bfloat16 with a float32 array to float32. All of a decode in it takes {_gib(full)}, not"
    return judged(full > half, DOCUMENTED, f"{found} {_gib(half)}")


def _barriers() -> Finding:
    ahead, least = decode(MODEL, HEIGHT, WIDTH).total, _least().total
    found = (
        f"MLX encodes up to ten command buffers ahead of the GPU, which makes {_gib(ahead)} with mflux's operations;"
        f" with a barrier after each operation it is {_gib(least)}"
    )
    return judged(least < ahead, COUNTED, found)


def _decoder_only() -> Finding:
    whole, part = (vae_bytes(MODEL, parts, "bfloat16") / (1 << 20) for parts in ("all", "decoder"))
    return judged(part < whole, COUNTED, f"weights of {part:.0f} rather than {whole:.0f} MiB, which stay")


def _unloaded() -> Finding:
    denoiser, decoder = _weights()
    away = decoder + _least().total
    found = f"the decode needs {_gib(away)} rather than {_gib(away + denoiser)}"
    return judged(denoiser > 0, COUNTED, found)


def _driver() -> Finding:
    denoiser, decoder = _weights()
    phases = {"load": denoiser + decoder, "denoise": denoiser + decoder, "decode": decoder + _least().total}
    found = ", ".join(f"{name} {_gib(size)}" for name, size in phases.items())
    return judged(phases["decode"] == max(phases.values()), COUNTED, f"with the transformer unloaded: {found}")


def _tiles() -> Finding:
    tiled, whole = (_weights()[1] + _least(**sides).total for sides in ({"height": TILE, "width": TILE}, {}))
    streamed = VAE.random(MODEL, parts="decoder", dtype="bfloat16").smallest("decode", HEIGHT, WIDTH)
    found = (
        f"tiles of {TILE} need {_gib(tiled)} at every size, the whole image {_gib(whole)}. But tiles are not the only"
        f" way: vaemem streams the whole image under a memory limit, with the same bits, in {_gib(streamed)} on a CPU"
    )
    return judged(streamed >= tiled, COUNTED, found)


def _cache() -> Finding:
    found = "mx.set_cache_limit bounds the freed buffers that MLX keeps (allocator.cpp), and nothing else"
    return Finding(HOLDS, found, DOCUMENTED)


def _upsample() -> Finding:
    found = "MLX's own nn.Upsample broadcasts and reshapes for nearest with a whole factor (nn/layers/upsample.py)"
    return Finding(FAILS, found, DOCUMENTED)


def _unjudged(why: str) -> Callable[[], Finding]:
    return lambda: Finding(UNKNOWN, why, NOWHERE)


_STATED: tuple[tuple[str, str, Callable[[], Finding]], ...] = (
    ("sizing", "a 3x3 of 128 channels at 1536x2304 takes 7.6 GiB of columns in bf16, 15.2 in float32", _columns),
    ("why", "convolutions are lowered to im2col and a product", _lowering),
    ("why", "the peak is the workspace of convolutions in the last upsampling stages", _last_stages),
    ("mitigation 1", "bf16 halves feature maps and workspaces", _half),
    ("mitigations 2, 3", "float32 scalars or weights promote a bf16 decode", _promotion),
    ("mitigation 4", "eval barriers in blocks reduce the overlap of convolutions", _barriers),
    ("mitigation 5", "Upsample in mode nearest wastes less than broadcast and reshape", _upsample),
    ("mitigation 6", "only the decoder's weights: less resident memory", _decoder_only),
    ("mitigation 6", "the decode remains the main driver of the peak", _driver),
    ("remaining", "tiles are the only approach with a predictable ceiling", _tiles),
    ("remaining", "unloading the transformer before the decode lowers the baseline", _unloaded),
    ("remaining", "loading that streams weights lowers the peak of loading",
     _unjudged("it is about that program's own mapping of weights, which is not here")),
    ("checks", "constant sizes avoid churn of the transformer's cache",
     _unjudged("it is about that program's own cache, which is not here")),
    ("checks", "a cache limit keeps MLX's caches from growing between runs", _cache),
)  # fmt: skip
NOTE = tuple(Claim(f"the note on MLX, {where}", says, check) for where, says, check in _STATED)
