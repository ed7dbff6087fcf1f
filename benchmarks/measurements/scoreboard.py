"""Estimators of GPU memory, and their scores on published measurements.

An estimator gets a row's size, model, type and card, and answers the rows that it knows.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import vaemem
from measurements.vocabulary import Measurement
from vaemem._common import TILED_OPS
from vaemem.prediction.gpus import find_gpu
from vaemem.sdcpp.graphs import graph
from vaemem.tables.estimators import ESTIMATORS

GIB = 1 << 30
CARDS = (6, 8, 10, 12, 16, 24, 32, 48, 80)  # GiB: cards as they are sold
MARGIN = 3 << 30  # diffusers 0.42.1: AutoOffloadStrategy(memory_reserve_margin="3GB")


class UnansweredError(ValueError):
    """Why vaemem has no answer to a row."""


class Answer(NamedTuple):
    """What an estimator says: bytes, and the most that it expects, if it says so."""

    bytes: float
    bound: float | None = None


Scored = tuple[Measurement, Answer | None]


class Estimator(NamedTuple):
    """name, where it comes from, and Measurement -> Answer, or None if it has none."""

    name: str
    source: str
    answer: Callable[[Measurement], Answer | None]


# ---- vaemem ----


def _known(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value not in (None, "")}


def _is_old_attention(row: Measurement) -> bool:
    return row.has("attention plain") or row.has("attention sliced")


def _vae(row: Measurement, careful: bool) -> Answer:
    """Ask `vaemem.predict`. The plain question has no versions and no allocator."""
    runtime = {"invokeai": "diffusers", "sdnext": "diffusers", "forge": "comfyui", "ldm": "bfl"}.get(
        row.runtime, row.runtime
    )
    said = _known(dtype=row.dtype, batch=row.batch, gpu=row.device, frames=row.frames, runtime=runtime, tile=row.tile)
    said |= {"op": row.op, "height": row.height, "width": row.width}
    if careful:
        said |= _known(torch_version=row.version("torch"), cudnn_version=row.version("cudnn"))
        said |= _known(diffusers_version=_release(row), tile_overlap=row.tile_overlap)
        said |= {"allocator": "cudaMallocAsync"} if row.has("allocator async") else {}
        said |= {"protocol": "cold"} if row.has("cold") else {}
    made = vaemem.predict(row.model, **said)
    above, rest = row.counter.endswith(" above"), 0
    if row.has("pipeline resident"):
        rest = _weights(row.model, "float16") - _vae_weights(
            row.model, "float16"
        )  # --no-half-vae changes the VAE alone
    reserved = row.counter.startswith("reserved")
    if above:
        value = made.reserved if reserved else made.allocated
    else:
        value = (
            (made.on_card if row.device and made.on_card else made.peak_reserved) if reserved else made.peak_allocated
        )
    bound = made.upper + (0 if above else made.peak_reserved - made.reserved)
    return Answer(value + rest, bound + rest if reserved else None)


def _release(row: Measurement) -> str | None:
    version = row.version("diffusers")
    return version if version and int(version.split(".")[1]) >= 33 else None


def _pipeline(row: Measurement, careful: bool) -> Answer:
    """Ask `vaemem.predict_pipeline`."""
    if row.runtime != "diffusers":
        raise UnansweredError("a pipeline of another program than diffusers")
    if _is_old_attention(row):
        raise UnansweredError("attention with a matrix of all scores")
    if row.offload in ("group", "unknown"):
        raise UnansweredError("how components are offloaded is not said")
    said = _known(batch=row.batch, dtype=row.dtype, gpu=row.device, frames=row.frames)
    said |= {"height": row.height, "width": row.width, "offload": row.offload, "vae": row.vae}
    said["components"] = dict(row.stored)
    said |= {"image": True} if row.op == "image to image" else {}
    if careful:
        said |= _known(torch_version=row.version("torch"), cudnn_version=row.version("cudnn"), prompt_tokens=row.tokens)
        said |= _known(diffusers_version=_release(row))
        said["components"] |= {"safety_checker": row.dtype or "float16"} if row.has("safety_checker") else {}
        said["components"] |= {"vae": row.dtype} if row.has("half vae") else {}
        said |= {"guidance": False} if row.has("no guidance") else {}
    said["components"] = {role: None if kind == "none" else kind for role, kind in said["components"].items()}
    made = vaemem.predict_pipeline(row.model, **said)
    phases = [phase for phase in made.phases if not row.phase or phase.name == row.phase]
    if not phases:
        raise UnansweredError("a phase that vaemem counts with another")
    if row.counter == "allocated":
        return Answer(max(phase.allocated for phase in phases))
    if row.counter == "driver":  # nvidia-smi counts the context too
        if not row.device:
            raise UnansweredError("the driver's count on a card that is not named")
        return Answer(made.peak + find_gpu(row.device).total_memory - made.available)
    if row.phase:
        return Answer(max(phase.reserved for phase in phases))
    return Answer(made.on_card if row.device and made.on_card else made.peak, made.upper)


SD_CPP = {
    "sd15": "unet-sd15",
    "sdxl": "unet-sdxl",
    "flux": "flux-dev",
    "flux-schnell": "flux-schnell",
    "zimage": "zimage",
}


def _sd_cpp(row: Measurement) -> Answer:
    """Simulate the graph of stable-diffusion.cpp."""
    if row.op in TILED_OPS:
        component = "vae-encoder" if row.op.startswith("encode") else "vae-decoder"
    else:
        component = row.model if row.op == "text" else SD_CPP.get(row.model, row.model)
    said: dict[str, Any] = {
        "flash": row.has("flash"),
        "conv_direct": row.has("direct"),
        "conv_scale": row.has("scaled"),
    }
    said |= {"model": row.model} if component.startswith("vae") else {}
    said |= {"tile": row.tile // 8} if row.tile else {}
    said |= {"tokens": 77} if component in ("qwen3-4b", "zimage") else {}
    if row.op == "weights":
        kind = row.components.rpartition(" ")[2].lower() or {"float32": "f32"}.get(row.dtype, "f16")
        return Answer(graph(component, 512, 512, weight_type=kind, **said).weights)
    return Answer(graph(component, row.height or 0, row.width or 0, **said).buffer)


def _ask(row: Measurement, careful: bool) -> Answer:
    """Ask vaemem about a row. ValueError if there is no question, or it refuses."""
    if row.runtime == "sd.cpp":
        return _sd_cpp(row)
    if row.counter not in ("allocated", "reserved", "allocated above", "reserved above", "driver"):
        raise UnansweredError("a counter that is not PyTorch's")
    if any(map(row.has, ("parallel", "gradients", "compiled", "own tiles", "other code"))):
        raise UnansweredError("torch.compile, LoRAs, caches, several cards or gradients")
    if row.op in TILED_OPS:
        if row.counter == "driver":
            raise UnansweredError("the driver's count of a VAE's run")
        return _vae(row, careful)
    if row.op not in ("pipeline", "image to image"):
        raise UnansweredError("a denoiser or a text encoder alone")
    return _pipeline(row, careful)


def ask(row: Measurement, careful: bool) -> Answer | None:
    """Ask vaemem about a row; None if it has no answer."""
    try:
        return _ask(row, careful)
    except (ValueError, OverflowError):
        return None


def why_not(row: Measurement) -> str:
    """Return why vaemem has no answer to a row."""
    try:
        _ask(row, True)
    except UnansweredError as why:
        return str(why)
    except (ValueError, OverflowError):
        pass
    return "a model or a setting that vaemem does not know"


# ---- others ----


@functools.cache
def _vae_weights(model: str, dtype: Any) -> int:
    return vaemem.predict(model, "decode", 64, 64, dtype).weights_bytes


@functools.cache
def _weights(model: str, dtype: str, roles: str = "all") -> int:
    """Return the bytes of a pipeline's weights: of all roles, or of the largest one."""
    made = vaemem.predict_pipeline(model, 512, 512, **_known(dtype=dtype))
    sizes = [part.bytes for part in made.phases[0].peak_tensors if part.name.startswith("weights of ")]
    return sum(sizes) if roles == "all" else max(sizes)


def _is_whole(row: Measurement) -> bool:
    """Tell whether it is a whole run of a pipeline by PyTorch."""
    return row.op in ("pipeline", "image to image") and not row.phase and row.runtime not in ("sd.cpp", "mflux")


def _of_weights(row: Measurement) -> Answer | None:
    """Apply the rule of hf-mem and of accelerate estimate-memory: the weights alone."""
    if not _is_whole(row) or row.stored:
        return None
    try:
        return Answer(_weights(row.model, row.dtype))
    except ValueError:
        return None


def _of_margin(row: Measurement) -> Answer | None:
    """Apply the rule of diffusers' AutoOffloadStrategy: the weights on the card, and 3 GB."""
    if not _is_whole(row) or row.offload not in ("none", "model") or row.stored:
        return None
    try:
        return Answer(_weights(row.model, row.dtype, "all" if row.offload == "none" else "largest") + MARGIN)
    except ValueError:
        return None


def _of_constant(name: str, row: Measurement) -> Answer | None:
    """A program's formula for a VAE's working memory, and the weights that the row counts."""
    if row.op not in TILED_OPS or row.runtime in ("sd.cpp", "mflux") or not row.height:
        return None
    cells = {
        name: getattr(row, name)
        for name in ("model", "op", "height", "width", "batch", "dtype", "tile", "tile_overlap")
    }
    estimate = ESTIMATORS[name](cells) if row.dtype else None
    if estimate is None:
        return None
    rest = 0
    if not row.counter.endswith(" above"):
        rest = _weights(row.model, "float16") if row.has("pipeline resident") else _vae_weights(row.model, row.dtype)
    return Answer(estimate + rest)


def _shipped(name: str) -> str:
    return ESTIMATORS[name].source.partition(" (")[0]


BOARD = (
    Estimator(
        "vaemem, all that is known", "with the row's versions and settings", functools.partial(ask, careful=True)
    ),
    Estimator("vaemem, the plain question", "model, op, size, type and card", functools.partial(ask, careful=False)),
    Estimator("ComfyUI's formula", _shipped("comfyui"), functools.partial(_of_constant, "comfyui")),
    Estimator("InvokeAI's formula", _shipped("invokeai"), functools.partial(_of_constant, "invokeai")),
    Estimator("weights alone", "the rule of hf-mem and accelerate estimate-memory", _of_weights),
    Estimator("weights and 3 GB", "diffusers 0.42.1, AutoOffloadStrategy's margin", _of_margin),
)


# ---- scores ----


class Score(NamedTuple):
    """How an estimator did. Errors are shares of the measured value; verdicts count rows."""

    name: str
    source: str
    asked: int
    answered: int
    median: float
    p95: float
    worst: float
    worst_row: Measurement | None
    too_small: int  # rows for which it says of a card that it suffices, and it does not
    too_large: int
    within: int  # rows within its bound
    bounded: int
    above: float  # median share by which the bound lies above the measured value
    vaemem: float  # its median error on the rows that this estimator answers, too


def wrong_cards(measured: float, estimate: float) -> tuple[bool, bool]:
    """Tell whether an estimate calls a card enough that is not, and whether it refuses one that is."""
    cards = [size * GIB for size in CARDS]
    return any(estimate <= card < measured for card in cards), any(measured <= card < estimate for card in cards)


def errors_of(rows: Sequence[Scored]) -> list[float]:
    """Return the answers' errors, as shares of the measured values; the least first."""
    return sorted(abs(answer.bytes / row.bytes - 1) for row, answer in rows if answer)


def most_of(errors: Sequence[float]) -> float:
    """Return the error that 19 of 20 do not exceed."""
    return errors[int(0.95 * (len(errors) - 1))]


def score(of: Estimator, rows: Sequence[Scored], own: Sequence[Scored]) -> Score:
    """Score an estimator's answers to rows, next to vaemem's own."""
    pairs = [(row, answer) for row, answer in rows if answer]
    errors = sorted(((abs(answer.bytes / row.bytes - 1), row) for row, answer in pairs), key=lambda pair: pair[0])
    shares = [error for error, _ in errors]
    verdicts = [wrong_cards(row.bytes, answer.bytes) for row, answer in pairs]
    bounds = [answer.bound / row.bytes for row, answer in pairs if answer.bound]
    both = errors_of([mine for mine, (_, answer) in zip(own, rows, strict=True) if answer])
    return Score(
        of.name, of.source, len(rows), len(pairs), statistics.median(shares), most_of(shares),
        shares[-1], errors[-1][1], sum(small for small, _ in verdicts), sum(large for _, large in verdicts),
        sum(bound >= 1 for bound in bounds), len(bounds), statistics.median(bounds) - 1 if bounds else 0.0,
        statistics.median(both) if both else 0.0,
    )  # fmt: skip
