"""Find the run of a whole pipeline that raises a message: solve for sizes and frames, and play it as `fits` does."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from vaemem.out_of_memory.candidates import AGREES, PLAYED, Found, Match
from vaemem.out_of_memory.messages import LARGE_REQUEST, OomMessage
from vaemem.out_of_memory.refusals import Calls, Refusals
from vaemem.out_of_memory.scope import Scope
from vaemem.out_of_memory.sizes import MADE_SIZES, TOLD, VIDEO_SIZES, Areas, Size, list_sizes, widen
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.diffusers_run import PipelineRun, play_pipeline
from vaemem.pipelines.pipeline_arguments import PipelineArguments
from vaemem.pipelines.pipeline_request import PipelineRequest, resolve_pipeline
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import USUAL_GPU, Card, Software

_WAYS = "none", "model"  # of offloading: the two that people use most
_REFERENCE = (1024, 1024), (1024, 2048)  # two sizes, from whose tensors other areas follow
_CLIPS = 20, 10  # of two videos, from whose tensors other frames follow
_FEW = 100  # frames: usual videos are shorter, and others are searched only if their model is named
_SOLVED = 2  # sizes of a video for which unusual frames are searched, unless the text names its model or size
_USUAL = 8  # sizes of the named model that are played, whatever tensors they have
_MOST_POINTS = 16  # sizes of a pipeline that are played
_MOST = 257  # frames of a video that is searched
_MOST_AREA = 1 << 23  # pixels of an image that is searched


def request_for(
    name: str, size: Size, frames: int = 1, offload: str = "none", card: Card | None = None
) -> PipelineRequest:
    """Return the request for a pipeline with its defaults; ValueError for an impossible size."""
    known, (height, width) = PIPELINES[name], size
    given = PipelineArguments(name, height, width, frames=frames if known.frames else None)
    return resolve_pipeline(given, card or Card(find_gpu(USUAL_GPU)), Software()).run_with(offload, "whole")


def find_pipeline_runs(message: OomMessage, scope: Scope, names: Sequence[str]) -> list[Found]:
    """List runs of some pipelines that may have raised the message."""
    found: list[Found] = []
    for name in names:
        known = PIPELINES[name]
        for rank, size, frames in _points(message, name, scope):
            for offload in _WAYS:
                with contextlib.suppress(ValueError):  # an impossible run
                    request = request_for(name, size, frames, offload, Card(scope.cards[0]))
                    found += _try_run(message, request, rank + (offload != _WAYS[0]) + (known.since > 0))
    return found


def find_lacking_room(name: str, card: Card) -> PipelineRequest | None:
    """Return the request of a pipeline whose weights do not all fit on a card, otherwise None."""
    known = PIPELINES[name]
    side = 1024 if name != "sd15" else 512
    size = VIDEO_SIZES[0] if known.frames else (side, side)
    request = request_for(name, size, known.frames or 1, card=card)
    return request if sum(part.nbytes for part in request.parts) > card.available() else None


# ---- sizes and frames ----


def _points(message: OomMessage, name: str, scope: Scope) -> Iterator[tuple[int, Size, int]]:
    """Yield (rank, size, frames) of runs with a tensor of the message's size, the commonest first."""
    clues, gpu, is_named = scope.clues, scope.cards[0], scope.is_named
    if not PIPELINES[name].frames:
        yield from ((TOLD, size, 1) for size in clues.sizes)
        if not clues.sizes or not is_named:
            areas = _areas(name, gpu, message)
            ranks = range(5) if is_named and message.bytes["requested"] >= LARGE_REQUEST else range(2)
            sizes = [(0, size) for size in MADE_SIZES[: _USUAL * is_named]]  # played in any case: the VAE's calls too
            others = ((rank, size) for rank in ranks for size in list_sizes(rank, areas))
            sizes += itertools.islice(others, _MOST_POINTS)
            yield from ((rank, size, 1) for rank, size in dict.fromkeys(sizes))
        return
    stride = PIPELINES[name].stride
    has_few_lengths = PIPELINES[name].frame_factor > 1  # if all lengths are possible, one fits every message
    usual = [size for size in VIDEO_SIZES if not (size[0] % stride or size[1] % stride)]  # others are rounded to these
    for rank, size in enumerate(clues.sizes or usual):
        is_likely = has_few_lengths and (clues.sizes or rank < _SOLVED)
        is_searched = not clues.frames and (is_named or is_likely)
        solved = _solve_frames(name, size, gpu, message) if is_searched else []
        solved = [frames for frames in solved if is_named or frames <= _FEW]
        usual_frames = PIPELINES[name].frames
        for frames in dict.fromkeys((clues.frames or usual_frames, *solved)):
            unusual = (rank > 1) + (frames != usual_frames) + (frames > _FEW)
            yield (TOLD if clues.sizes else unusual), size, frames


@functools.lru_cache(maxsize=512)
def _tensors(name: str, size: Size, frames: int, sm: int) -> dict[tuple[str, str, int], int]:
    """Return the bytes of the tensors in the calls of a run with unlimited memory, by role, module and number; of a
    video only the largest of each module."""
    run = play_pipeline(request_for(name, size, frames, _WAYS[1], Card(find_gpu(f"sm_{sm}"))))
    found: dict[tuple[str, str, int], int] = {}
    is_video = bool(PIPELINES[name].frames)
    for role, trace in {(role, trace) for role, (trace, *_) in run.calls if role != "vae" or is_video}:
        numbers = Counter[str]()
        for op, _, taken, module in trace.steps:
            if op == "take":
                numbers[module] += not is_video
                key = role, module, numbers[module]
                found[key] = max(found.get(key, 0), taken)
    return found


def _areas(name: str, gpu: Gpu, message: OomMessage) -> Areas:
    """Return ranges of image areas in which a pipeline has a tensor of the message's size."""
    with contextlib.suppress(ValueError):
        (low, high), base = message.range, _REFERENCE[0][0] * _REFERENCE[0][1]
        found = set[tuple[float, float]]()
        small, large = (_tensors(name, size, 1, gpu.sm) for size in _REFERENCE)
        for at, grows in {(at, large.get(key, at) - at) for key, at in small.items()}:
            if grows > 0 and at:
                power = 1 if grows < 2 * at else 2  # scores grow with the square
                least, most = (
                    base * (1 + (bound - at) / grows if power == 1 else (bound / at) ** 0.5) for bound in (low, high)
                )
                if 0 < least < _MOST_AREA:
                    found.add(widen(least, most, _MOST_AREA))
        return sorted(found)
    return []


def _two_videos(name: str) -> list[int]:
    """Return the frames of two videos, from whose tensors those of other frames follow."""
    known = PIPELINES[name]
    least, most = known.frame_range
    return [min(least + clips * known.frame_factor, most or _MOST) for clips in _CLIPS]


def _solve_frames(name: str, size: Size, gpu: Gpu, message: OomMessage) -> list[int]:
    """Return the numbers of frames with which a video has a tensor of the message's size."""
    two = _two_videos(name)
    many, few = (_tensors(name, size, frames, gpu.sm) for frames in two)
    found, stride = set[int](), PIPELINES[name].frame_factor
    for high, low in {(high, few.get(key, high)) for key, high in many.items()}:
        each = (high - low) / (two[0] - two[1])
        if each > 0:
            least, most = (two[0] + (bound - high) / each for bound in message.range)
            first = -(-max(int(least), 1) // stride) * stride + PIPELINES[name].clip[0]
            found |= {*range(first, min(int(most), _MOST) + 1, stride)}
    return sorted(found)[:3]


# ---- one run ----


def _play(roles: list[str], request: PipelineRequest, process: SimulatedProcess, protocol: str | None) -> Calls:
    """Play a pipeline. Return its calls, and add the role of each to `roles`."""
    run = PipelineRun(request, process)
    run.play()
    own = [(role, call) for role, call in run.calls if role != "vae" or request.pipeline.frames]
    roles += [role for role, _ in own]
    return [(trace, allocated) for _, (trace, allocated, _) in own]


def _try_run(message: OomMessage, request: PipelineRequest, rare: int) -> list[Found]:
    """Return a run if one of its steps may have been refused, played with the room that the message leaves it."""
    roles: list[str] = []
    refusals = Refusals(request, functools.partial(_play, roles, request), has_convs=False)
    full = refusals.at(message.room or request.card.available())
    if full and (fit := full.fit(message)):
        phase = refusals.phase_of(full)
        return [Found(_match(request, phase, full.tensor, full.bytes, fit), request, fit, rare)]
    fits = {} if message.is_small else refusals.fits(message, 0)
    if not fits:
        return []
    refused, fit = max(fits.items(), key=lambda one: one[1])
    role = roles[refused.call]
    phase = "decode" if role == "vae" else "denoise" if role in request.pipeline.denoisers else "encode prompt"
    match = _match(request, phase, refused.tensor, refused.bytes, fit)
    return [Found(match, request, fit, rare)]


def _match(request: PipelineRequest, phase: str, tensor: str, size: int, fit: int) -> Match:
    return Match(
        request.name, phase.rstrip(" 0123456789"), request.height, request.width, request.dtype, "diffusers",
        tensor, size, None, fit >= PLAYED, fit >= AGREES, request.frames, request.offload,
    )  # fmt: skip
