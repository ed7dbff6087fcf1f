"""Which VAE's run raises a message of PyTorch's: sizes are solved for, then played and compared with its figures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, MIB
from vaemem.out_of_memory.messages import Said
from vaemem.out_of_memory.refusals import (
    AGREES,
    LEAST_LOWERED,
    LOWERED,
    PLAYED,
    SHARP,
    Refusable,
    Refusals,
    storages_of,
)
from vaemem.out_of_memory.sizes import Areas, Size, sizes_of
from vaemem.prediction.gpus import CONTEXT, Gpu
from vaemem.prediction.predict import Prediction
from vaemem.prediction.process import parameter_bytes
from vaemem.prediction.request import Card, VAEArguments, VAERequest, resolve_vae
from vaemem.prediction.runtimes import architecture, code_of

# VAEs whose tensors differ: SD1.5's are SDXL's and Playground's, FLUX.1's SD3's, Z-Image's and CogView4's.
ALIKE = {"sdxl": "SD1.5, SDXL", "flux": "FLUX.1, SD3, Z-Image", "flux2": "FLUX.2", "qwen-image": "Qwen-Image"}
VIDEO_TILE = 256  # pixels a side: of ComfyUI's tiles for VAEs of videos
TELLING = 64 * MIB  # a request of less is many runs'
LISTED, RARE = [(0, 1)], [(2,), (3,), (4,)]  # ranks of sizes that are looked at together
MOST_PLAYS = 1500  # of all runs: seconds
ROUNDED = 10**8  # bytes: what others held is told in so many
REFERENCE = 1024  # pixels a side of the run whose tensors others' areas follow from
_LARGEST = 1 << 26  # pixels: no image has more
NEARLY = 0.002  # of an area: tensors with padding grow a little less than it
MOST_CHANNELS = 512  # of a convolution, for each pixel of the image


class Match(NamedTuple):
    """A run that asks for what the message names.

    Attributes
    ----------
    models : str
        VAEs that ask for it: their tensors are alike.
    op, height, width, dtype, runtime : str or int
        The run; of a tile, where the message is about one.
    tensor : str
        The module that asks, and for what.
    bytes : int
        As the tensor is.
    beside : int or None
        Bytes that PyTorch had allocated beside the run's own tensors: weights, the VAE's too, and other models.
    played : bool
        Whether the run, played on such a card with so much beside it, runs out at that very tensor.
    agrees : bool
        Whether PyTorch then has as much reserved but unallocated as the message says, to the digits that it prints.
    """

    models: str
    op: str
    height: int
    width: int
    dtype: str
    runtime: str
    tensor: str
    bytes: int
    beside: int | None
    played: bool
    agrees: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As `Explanation.to_dict` has it, with `beside` as ``beside_bytes``.

        Examples
        --------
        >>> from vaemem.out_of_memory.runs import Match
        >>> Match("sdxl", "decode", 64, 64, "float16", "diffusers", "conv_in", 9, 5, True).to_dict()["beside_bytes"]
        5
        """
        return {"beside_bytes" if name == "beside" else name: value for name, value in self._asdict().items()}

    def __str__(self) -> str:
        held = "" if self.beside is None else f"; beside its tensors PyTorch held {self.beside / MIB:.0f} MiB"
        return (
            f"{self.models} {self.op} {self.height}x{self.width} {self.dtype} by {self.runtime}: {self.tensor},"
            f" {self.bytes / MIB:.0f} MiB{held}"
        )


class Found(NamedTuple):
    """A match with the request that plays it; fit: how well it agrees, from 0; rare: how unusual such a run is."""

    match: Match
    request: VAERequest
    fit: int
    rare: int


class _Kind(NamedTuple):
    """Runs of all sizes."""

    model: str
    op: str
    runtime: str
    dtype: str
    card: Gpu

    def request_at(self, height: int, width: int, allocator: str) -> VAERequest:
        settings: dict[str, Any] = {"runtime": self.runtime, "gpu": self.card, "allocator": allocator}
        request = resolve_vae(VAEArguments(self.model, self.op, height, width, **settings))
        if ELEMENT_BYTES[request.job.dtype] == ELEMENT_BYTES[self.dtype]:
            return request
        # It was told to take another type.
        return resolve_vae(VAEArguments(self.model, self.op, height, width, dtype=self.dtype, **settings))


def find_runs(
    said: Said, models: Sequence[str], ops: Sequence[str], runtimes: Sequence[str], cards: Sequence[Gpu]
) -> list[Found]:
    """Runs that may have raised the message, the likeliest first.

    Sizes are gone through from the commonest to the rarest, each on every card, as far as some run agrees with all
    figures.
    """
    found: list[Found] = []
    plays = MOST_PLAYS
    ranks = LISTED + RARE if said.bytes["requested"] >= TELLING and not said.is_tile else LISTED
    for some, card in itertools.product(ranks, cards):
        kinds = [_Kind(*one, card) for one in itertools.product(models, ops, runtimes, ("float16", "float32"))]
        for rank, kind in itertools.product(some, sorted(kinds, key=_rarity)):
            for height, width in _sizes(said, kind, rank) if plays > 0 else ():
                if plays > 0:
                    with contextlib.suppress(ValueError):  # a run that cannot be
                        run, played = _tried(said, kind, height, width, rank)
                        plays -= played
                        found += run
        if any(one.fit >= AGREES or not said.tells for one in found):
            break
    return _sorted(found)


def _rarity(kind: _Kind) -> int:
    """How rare such a run is: encodes, types that a program takes only if it is told to, other programs."""
    given = VAEArguments(kind.model, kind.op, REFERENCE, REFERENCE, runtime=kind.runtime, gpu=kind.card)
    usual = resolve_vae(given).job.dtype
    is_other_type = ELEMENT_BYTES[usual] != ELEMENT_BYTES[kind.dtype]
    return 2 * is_other_type + (kind.op == "encode") + (kind.runtime not in ("diffusers", "comfyui"))


# ---- sizes ----


def _sizes(said: Said, kind: _Kind, rank: int) -> Iterable[Size]:
    """Sizes of that rank at which some storage may be as large as the message says; of a run in tiles, its tiles."""
    return (_tiles(kind) if rank == 0 else []) if said.is_tile else sizes_of(rank, _areas(kind, said))


def _tiles(kind: _Kind) -> list[Size]:
    """The sizes of the tiles that a program cuts unless it is told others; none where it cuts none."""
    try:
        op = f"{kind.op}_tiled"
        given = VAEArguments(kind.model, op, REFERENCE, REFERENCE, runtime=kind.runtime, gpu=kind.card)
        job = resolve_vae(given).job
    except ValueError:
        return []
    side = job.tile or REFERENCE
    if kind.runtime not in ("comfyui", "forge"):
        return [(side, side)]
    if "temperal_downsample" in job.arch or job.arch.get("family") == "wan":
        return [(VIDEO_TILE, VIDEO_TILE)]
    return [(side, side), (side // 2, side * 2), (side * 2, side // 2)]  # whose mean is the image


@functools.lru_cache(maxsize=1024)
def _growths(model: str, op: str, runtime: str, dtype: str, sm: int) -> tuple[tuple[int, float], ...]:
    """Of each storage its bytes in the reference run, and the power of the area that they grow with; none where that
    program does not run the model."""
    arch, code = architecture(model), code_of(runtime, model)
    try:
        small, large = (
            storages_of(_core.Trace.vae(arch, code, op, dtype, side, side, sm=sm))
            for side in (REFERENCE, 2 * REFERENCE)
        )
    except ValueError:
        return ()
    pairs = {(one.bytes, other.bytes) for one, other in zip(small, large, strict=False) if one.name == other.name}
    return tuple((low, math.log(high / low, 4)) for low, high in sorted(pairs) if 0 < low < high)


def _areas(kind: _Kind, said: Said) -> Areas:
    """Areas of images at which some storage is as large as the message says."""
    low, high = said.range
    found: list[tuple[float, float]] = []
    for size, power in _growths(*kind[:4], kind.card.sm):
        least, most = (REFERENCE**2 * (bound / size) ** (1 / power) for bound in (low, high))
        if least <= _LARGEST:
            found.append((least * (1 - NEARLY), min(most * (1 + NEARLY), _LARGEST)))
    merged: list[tuple[float, float]] = []
    for least, most in sorted(found):
        if merged and least <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(most, merged[-1][1])
        else:
            merged.append((least, most))
    return merged


# ---- one run ----


def _tried(said: Said, kind: _Kind, height: int, width: int, rank: int) -> tuple[list[Found], int]:
    """A run, where one of its steps may have been refused; and how often it was played."""
    if not _may_be(said, kind, height, width, rank):
        return [], 0
    request = kind.request_at(height, width, "native" if said.is_native else "cudaMallocAsync")
    refusals = Refusals(request)
    fits = refusals.fits(said, _weights(kind.model, kind.dtype) // 2)  # of which so much at least was there
    best = [_found(said, kind, request, *max(fits.items(), key=lambda one: one[1]), rank)] if fits else []
    return best, refusals.plays


def _may_be(said: Said, kind: _Kind, height: int, width: int, rank: int) -> bool:
    """Whether a run has a step that may have been refused."""
    if rank in LISTED[0] and (said.is_lowered or height * width >= LEAST_LOWERED // MOST_CHANNELS):
        return True
    code, card = code_of(kind.runtime, kind.model), kind.card
    trace = _core.Trace.vae(
        architecture(kind.model), code, kind.op, kind.dtype, height, width, sm=card.sm,
        multiprocessors=card.multiprocessors,
    )  # fmt: skip
    size, within = said.bytes["requested"], said.within["requested"]
    return bool(trace.wants(max(size - within, 0), size + within, said.is_native, said.spare))


def _found(said: Said, kind: _Kind, request: VAERequest, refused: Refusable, fit: int, rank: int) -> Found:
    """The match, and the request on a card where the run has as much room as it had."""
    job, figures, beside = request.job, said.bytes, None
    if "allocated" in figures:
        others = max(figures["allocated"] - refused.before, 0)
        beside = figures["allocated"] - refused.before + _weights(kind.model, kind.dtype)
        room = sum(figures.get(name, 0) for name in ("allocated", "cached", "free")) - others
        request = replace(request, card=Card(kind.card, max(kind.card.reported_memory - CONTEXT - room, 0)))
    types = kind.dtype if kind.dtype == "float32" else "float16 or bfloat16"
    match = Match(
        ALIKE.get(kind.model, kind.model), kind.op, job.height, job.width, types, kind.runtime, refused.tensor,
        refused.bytes, beside, fit >= PLAYED and not refused.tensor.endswith(LOWERED), fit >= AGREES,
    )  # fmt: skip
    is_sharp = said.within.get("cached", SHARP) < SHARP
    return Found(match, request, min(fit, PLAYED) if rank > 1 and not is_sharp else fit, rank + _rarity(kind))


def _sorted(runs: Iterable[Found]) -> list[Found]:
    """Each run once, with all models whose tensors fit as well; the likeliest first."""
    found: dict[tuple[Any, ...], Found] = {}
    names: dict[tuple[Any, ...], dict[str, None]] = {}
    for one in sorted(runs, key=lambda one: (-one.fit, one.rare)):
        match = one.match
        run = match.op, match.height, match.width, match.dtype, match.runtime
        first = found.setdefault(run, one)
        if (one.fit, match.tensor) == (first.fit, first.match.tensor):
            names.setdefault(run, {})[match.models] = None
    return [one._replace(match=one.match._replace(models="; ".join(names[run]))) for run, one in found.items()]


@functools.cache
def _weights(model: str, dtype: str) -> int:
    """Bytes of a VAE's weights."""
    return sum(parameter_bytes(tuple(sorted(architecture(model).items())), "diffusers", dtype)[0])


def rounded(request: VAERequest) -> Prediction:
    """What is predicted where others hold a round figure, which a command can be given."""
    card = request.card
    return Prediction(replace(request, card=replace(card, used=-(-card.used // ROUNDED) * ROUNDED)))
