"""Find the VAE run that raises a message of PyTorch's: solve for sizes, play runs and compare the figures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES
from vaemem.out_of_memory.candidates import AGREES, PLAYED, Found, Match
from vaemem.out_of_memory.messages import LARGE_REQUEST, OomMessage
from vaemem.out_of_memory.refusals import LEAST_LOWERED, LOWERED, SHARP, Calls, Refusable, Refusals, list_steps
from vaemem.out_of_memory.scope import ALIKE, Scope
from vaemem.out_of_memory.sizes import LARGEST_AREA, TOLD, Areas, Size, list_sizes, widen
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.held_tensors import arch_key
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import Card, VAEArguments, VAERequest, resolve_vae
from vaemem.prediction.runtimes import architecture, code_of, parameter_bytes

# Releases of PyTorch that keep 3D convolutions in half precision from cuDNN (why_own in csrc/predict/workspace).
# So they allocate other memory for the VAEs of videos. None is the default release.
TORCH_RELEASES = None, "2.9.1"
VIDEO_TILE = 256  # pixels a side, of ComfyUI's tiles for video VAEs
LISTED, RARE = [(0, 1)], [(2,), (3,), (4,)]  # ranks of sizes that are searched together
MOST_PLAYS = 1500  # of all runs: seconds
REFERENCE = 1024  # pixels a side of a run from whose tensors other areas follow
MOST_CHANNELS = 512  # of a convolution, for each pixel of the image


class _RunKind(NamedTuple):
    """A run of any size."""

    model: str
    op: str
    runtime: str
    dtype: str
    card: Gpu
    torch: str | None = None

    def request_at(self, height: int, width: int, allocator: str) -> VAERequest:
        """Return the request for this run at a size, in pixels."""
        settings: dict[str, Any] = {"runtime": self.runtime, "gpu": self.card, "allocator": allocator}
        settings["torch_version"] = self.torch
        request = resolve_vae(VAEArguments(self.model, self.op, height, width, **settings))
        if ELEMENT_BYTES[request.job.dtype] == ELEMENT_BYTES[self.dtype]:
            return request
        # The user chose another dtype.
        return resolve_vae(VAEArguments(self.model, self.op, height, width, dtype=self.dtype, **settings))


def find_vae_runs(message: OomMessage, scope: Scope) -> list[Found]:
    """List runs that may have raised the message, the likeliest first.

    Common sizes are searched before rare ones, on every card, until a run agrees with all figures. If a run of a size
    that the text names fits, others are not searched.
    """
    found: list[Found] = []
    plays, told = MOST_PLAYS, scope.clues.sizes
    ranks = LISTED + RARE if message.bytes["requested"] >= LARGE_REQUEST and not message.is_tile else LISTED
    ranks = [(TOLD,)] * bool(told and not message.is_tile) + ranks
    for some, card in itertools.product(ranks, scope.cards):
        runs = itertools.product(scope.models, scope.ops, scope.runtimes, ("float16", "float32"))
        kinds = [_RunKind(*one, card) for one in runs]
        of_video = [kind for kind in kinds if _is_of_video(kind)]
        kinds += [kind._replace(torch=release) for kind in of_video for release in TORCH_RELEASES[1:]]
        for rank, kind in itertools.product(some, sorted(kinds, key=_rarity)):
            for height, width in (told if rank == TOLD else _sizes(message, kind, rank)) if plays > 0 else ():
                if plays > 0:
                    with contextlib.suppress(ValueError):  # an impossible run
                        run, played = _try_run(message, kind, height, width, rank)
                        plays -= played
                        found += run
        if any(one.fit >= AGREES or one.rare < 0 or not message.tells for one in found):
            break
    return _rank_runs(found)


def _is_of_video(kind: _RunKind) -> bool:
    """Return whether a run has convolutions that other releases of PyTorch run with their own code."""
    is_half = kind.dtype != "float32" and kind.runtime == "diffusers"
    return is_half and architecture(kind.model).get("family") == "wan"


def _rarity(kind: _RunKind) -> int:
    """Rate how rare a run is: encodes, dtypes that are not a program's default, less common programs."""
    given = VAEArguments(kind.model, kind.op, REFERENCE, REFERENCE, runtime=kind.runtime, gpu=kind.card)
    usual = resolve_vae(given).job.dtype
    is_other_type = ELEMENT_BYTES[usual] != ELEMENT_BYTES[kind.dtype]
    is_rare = (kind.op == "encode") + (kind.runtime not in ("diffusers", "comfyui")) + (kind.torch is not None)
    return 2 * is_other_type + is_rare


# ---- sizes ----


def _sizes(message: OomMessage, kind: _RunKind, rank: int) -> Iterable[Size]:
    """List sizes of a rank with some storage of the message's size; for a run in tiles, its tiles."""
    return (_tiles(kind) if rank == 0 else []) if message.is_tile else list_sizes(rank, _areas(kind, message))


def _tiles(kind: _RunKind) -> list[Size]:
    """List the sizes of a program's default tiles; none if it cuts none."""
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
    return [(side, side), (side // 2, side * 2), (side * 2, side // 2)]  # the mean of the three is the image


@functools.lru_cache(maxsize=1024)
def _growths(model: str, op: str, runtime: str, dtype: str, sm: int) -> tuple[tuple[int, float], ...]:
    """Return (bytes in the reference run, power of the area by which they grow) of each storage; empty if the program
    does not run the model."""
    arch, code = architecture(model), code_of(runtime, model)
    try:
        small, large = (
            list_steps(_core.Trace.vae(arch, code, op, dtype, side, side, sm=sm)) for side in (REFERENCE, 2 * REFERENCE)
        )
    except ValueError:
        return ()
    pairs = {(one.bytes, other.bytes) for one, other in zip(small, large, strict=False) if one.name == other.name}
    return tuple((low, math.log(high / low, 4)) for low, high in sorted(pairs) if 0 < low < high)


def _areas(kind: _RunKind, message: OomMessage) -> Areas:
    """Return ranges of image areas with some storage of the message's size."""
    low, high = message.range
    found: list[tuple[float, float]] = []
    for size, power in _growths(*kind[:4], kind.card.sm):
        least, most = (REFERENCE**2 * (bound / size) ** (1 / power) for bound in (low, high))
        if least <= LARGEST_AREA:
            found.append(widen(least, most))
    merged: list[tuple[float, float]] = []
    for least, most in sorted(found):
        if merged and least <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(most, merged[-1][1])
        else:
            merged.append((least, most))
    return merged


# ---- one run ----


def _try_run(message: OomMessage, kind: _RunKind, height: int, width: int, rank: int) -> tuple[list[Found], int]:
    """Return a run if one of its steps may have been refused, and how often it was played."""
    if not _may_match(message, kind, height, width, rank):
        return [], 0
    request = kind.request_at(height, width, "native" if message.is_native else "cudaMallocAsync")
    refusals = Refusals(request, functools.partial(_play, request), is_own=kind.torch is not None)
    fits = refusals.fits(message, _weights(kind.model, kind.dtype) // 2)  # at least half of the weights were loaded
    best = [_make_found(message, kind, request, *max(fits.items(), key=lambda one: one[1]), rank)] if fits else []
    return best, refusals.plays


def _play(request: VAERequest, process: SimulatedProcess, protocol: str | None) -> Calls:
    request.play(process, protocol)
    assert process.last_call is not None
    return [process.last_call[:2]]


def _may_match(message: OomMessage, kind: _RunKind, height: int, width: int, rank: int) -> bool:
    """Return whether a run has a step that may have been refused."""
    may_lower = message.may_lower or kind.torch is not None or height * width >= LEAST_LOWERED // MOST_CHANNELS
    if rank in (TOLD, *LISTED[0]) and may_lower:
        return True
    code, card = code_of(kind.runtime, kind.model), kind.card
    trace = _core.Trace.vae(
        architecture(kind.model), code, kind.op, kind.dtype, height, width, sm=card.sm,
        multiprocessors=card.multiprocessors,
    )  # fmt: skip
    size, within = message.bytes["requested"], message.within["requested"]
    return bool(trace.wants(max(size - within, 0), size + within, message.is_native, message.spare))


def _make_found(
    message: OomMessage, kind: _RunKind, request: VAERequest, refused: Refusable, fit: int, rank: int
) -> Found:
    """Make the match, and the request on a card with the room that the run had."""
    job, figures, beside = request.job, message.bytes, None
    if "allocated" in figures:
        others = max(figures["allocated"] - refused.before, 0)
        beside = figures["allocated"] - refused.before + _weights(kind.model, kind.dtype)
        room = sum(figures.get(name, 0) for name in ("allocated", "cached", "free")) - others
        request = replace(request, card=Card(kind.card, kind.card.available(room)))
    types = kind.dtype if kind.dtype == "float32" else "float16 or bfloat16"
    match = Match(
        ALIKE.get(kind.model, kind.model), kind.op, job.height, job.width, types,
        f"{kind.runtime} with PyTorch {kind.torch}" if kind.torch else kind.runtime, refused.tensor,
        refused.bytes, beside, fit >= PLAYED and not refused.tensor.endswith(LOWERED), fit >= AGREES,
    )  # fmt: skip
    is_sharp = message.within.get("cached", SHARP) < SHARP
    return Found(match, request, min(fit, PLAYED) if rank > 1 and not is_sharp else fit, rank + _rarity(kind))


def _rank_runs(runs: Iterable[Found]) -> list[Found]:
    """Return each run once, with all models that fit as well; the likeliest first."""
    found: dict[tuple[Any, ...], Found] = {}
    names: dict[tuple[Any, ...], dict[str, None]] = {}
    for one in sorted(runs, key=lambda one: one.order):
        match = one.match
        run = match.op, match.height, match.width, match.dtype, match.runtime
        first = found.setdefault(run, one)
        if (one.fit, match.tensor) == (first.fit, first.match.tensor):
            names.setdefault(run, {})[match.models] = None
    return [one._replace(match=one.match._replace(models="; ".join(names[run]))) for run, one in found.items()]


@functools.cache
def _weights(model: str, dtype: str) -> int:
    """Return the bytes of a VAE's weights."""
    return sum(parameter_bytes(arch_key(architecture(model)), "diffusers", dtype).values())
