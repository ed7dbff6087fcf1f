"""Measure a diffusers pipeline on this machine, phase by phase, next to the result of `vaemem.predict_pipeline`.

The counters are read when a pipeline calls the component that begins a phase (`_Phases.watching`). Work before that
call belongs to the phase before, which ends there. If accelerate moves that component to the device whole, its own hook
does so first, as in `vaemem.pipelines.diffusers_run`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vaemem._common import MIB, __version__, whole
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._render import Bullets, Columns, Facts, Sheet, Shown, Sizer
from vaemem.pipelines.by_diffusers import PipelinePrediction
from vaemem.pipelines.components import PIPELINES, Pipeline, count_seen, scale_edited, weights_of
from vaemem.pipelines.pipeline_arguments import PipelineArguments
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest, image_sides, resolve_pipeline
from vaemem.prediction.gpus import context_of
from vaemem.prediction.phases import Phase
from vaemem.prediction.request import Card, Software, find_card, usual_tile
from vaemem.prediction.runtimes import LAST_DIFFUSERS, architecture, diffusers_release
from vaemem.pytorch.converting import convert, modules_of
from vaemem.pytorch.measuring import CpuMeter, CudaMeter, cudnn_version, find_device, what_ran
from vaemem.tables.table import Table

# Arguments of a pipeline's call that do not change the prediction, or only what the denoiser's first call shows.
_HARMLESS = {
    "output_type", "negative_prompt", "guidance_scale", "max_sequence_length", "generator", "image", "strength",
    "mask_image", "max_area", "use_resolution_binning", "num_frames",
}  # fmt: skip
# Attention processors that use PyTorch's own attention, as in the recorded modules.
_PROCESSORS = {
    "AttnProcessor2_0", "FluxAttnProcessor2_0", "FluxAttnProcessor", "JointAttnProcessor2_0",
    "ZSingleStreamAttnProcessor", "QwenDoubleStreamAttnProcessor2_0", "Flux2AttnProcessor",
    "Flux2ParallelSelfAttnProcessor", "WanAttnProcessor",
}  # fmt: skip
_COUNTERS = ("allocated", "reserved")


class MeasuredPhase(NamedTuple):
    """Memory and time of a pipeline's phase.

    name: load, encode prompt, encode image, denoise, decode
    allocated, reserved: peaks of PyTorch's counters in bytes; on a CPU None, and the process's resident size
    seconds: until the device has done its work, with transfers to it
    fits: False if it ran out of memory; the other fields then hold what was measured until then

    >>> MeasuredPhase("decode", 3 << 30, 4 << 30, 1.5).fits
    True
    """

    name: str
    allocated: int | None
    reserved: int
    seconds: float
    fits: bool = True


class Seen(NamedTuple):
    """Facts that the denoiser's first call shows: images, numbers in a latent, tokens in a prompt."""

    images: int
    numbers: int
    tokens: int


class MeasuredPipeline(Shown):
    """Result of `measure_pipeline`. Printing it shows one line per phase.

    Attributes
    ----------
    title : str
        What ran, and where.
    phases : tuple of MeasuredPhase
        In order: load (if a function made the pipeline), encode prompt, encode image (if there is one), denoise,
        decode; up to a phase that ran out of memory.
    predicted : dict of str to Phase
        The phases as `vaemem.predict_pipeline` predicts them for this card. Empty if nothing is predicted; `notes` says
        why.
    out_of_memory_at : tuple of (str, str) or None
        The phase, and PyTorch's message.
    asked : dict
        What ran: pipeline (its class), model (vaemem's name for it, otherwise its class), height, width, batch, steps,
        tokens, dtype, offload, vae, device.
    versions : str
        ``"torch 2.9.1+cu128, cudnn 9.10.2, ..."``
    notes : tuple of str
        Remarks on the measurement and the prediction.

    Examples
    --------
    >>> from vaemem.pytorch import MeasuredPhase, MeasuredPipeline
    >>> asked = {"pipeline": "FluxPipeline", "height": 1024, "width": 1024, "device": "NVIDIA L40S"}
    >>> phases = [MeasuredPhase("decode", 3 << 30, 4 << 30, 1.5)]
    >>> table = Table(MeasuredPipeline(asked, phases, {}, None, "torch 2.9.1", []).rows())
    >>> [(row["source"], row["phase"], row["reserved_bytes"], row["seconds"]) for row in table]
    [('measured', 'decode', 4294967296, 1.5), ('measured', 'whole', 4294967296, 1.5)]
    """

    def __init__(
        self, asked: Mapping[str, Any], phases: Sequence[MeasuredPhase], predicted: Mapping[str, Phase],
        out_of_memory: str | None, versions: str, notes: Sequence[str],
    ):  # fmt: skip
        self.asked, self.phases, self.predicted, self.versions = dict(asked), tuple(phases), dict(predicted), versions
        self.out_of_memory_at = (phases[-1].name, out_of_memory) if out_of_memory is not None else None
        self.notes = tuple(notes)
        shown = {name: value for name, value in self.asked.items() if value is not None and name != "model"}
        size = f"{shown.pop('pipeline', 'A pipeline')} {shown.pop('height')}x{shown.pop('width')}"
        size += f" ({shown.pop('device')})"
        self.title = ", ".join([size, *(f"{name} {value}" for name, value in shown.items())])

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of a `vaemem.Table`: one per phase that succeeded. If all did, add one for the whole, with the
        largest bytes and the sum of seconds."""
        asked, done = self.asked, [phase for phase in self.phases if phase.fits]
        run = {name: asked.get(name) for name in ("height", "width", "batch", "tokens", "dtype", "device")} | {
            "model": asked.get("model") or asked.get("pipeline"), "op": "pipeline", "runtime": "diffusers",
            "way": f"offload {asked.get('offload')}, VAE {asked.get('vae')}", "source": "measured",
            "versions": f"{self.versions}, steps {asked.get('steps')}",
        }  # fmt: skip
        if self.phases and not self.out_of_memory_at:
            allocated = [phase.allocated for phase in done if phase.allocated is not None]
            most = max(allocated, default=None), max(phase.reserved for phase in done)
            done.append(MeasuredPhase("whole", *most, sum(phase.seconds for phase in done)))
        return [
            run | {"phase": phase.name, "allocated_bytes": phase.allocated, "reserved_bytes": phase.reserved}
            | {"seconds": round(phase.seconds, 6)}
            for phase in done
        ]  # fmt: skip

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Return `rows` as the CSV of a `vaemem.Table`, for `vaemem.fit`, `compare` and `report`.

        Examples
        --------
        >>> from vaemem.pytorch import MeasuredPipeline
        >>> MeasuredPipeline({"height": 64, "width": 64, "device": "cpu"}, [], {}, None, "torch 2.9.1", []).to_csv()
        'model,op,phase,height,width,batch,...'
        """
        return Table(self.rows()).to_csv(path)

    def _lines(self) -> list[dict[str, Any]]:
        """Return a dict per phase: bytes measured and predicted, error in percent of measured, seconds, what ran."""
        rows = []
        for phase in self.phases:
            row: dict[str, Any] = {"phase": phase.name}
            for name in _COUNTERS:
                measured, predicted = getattr(phase, name), getattr(self.predicted.get(phase.name), name, None)
                has_error = measured and predicted is not None and phase.fits
                row |= {f"{name}_bytes": measured, f"predicted_{name}_bytes": predicted}
                row[f"{name}_error_percent"] = round(100 * (predicted / measured - 1), 3) if has_error else None
            row |= {"seconds": round(phase.seconds, 6), "fits": phase.fits}
            rows.append(row | self.asked | {"versions": self.versions})
        return rows

    def _data(self) -> dict[str, Any]:
        full = self.out_of_memory_at
        return {
            "answer": "measurement", "asked": self.asked, "summary": self._headline, "phases": self._lines(),
            "out_of_memory_at": full and {"phase": full[0], "message": full[1]},
            "software": {"versions": self.versions}, "notes": list(self.notes),
        }  # fmt: skip

    @property
    def _headline(self) -> str:
        return f"Out of memory in {': '.join(self.out_of_memory_at)}" if self.out_of_memory_at else "It went through."

    def _sheet(self, size: Sizer) -> Sheet:
        columns, rows = {"phase": [phase.name for phase in self.phases]}, self._lines()
        for name in _COUNTERS:
            for key, title in (
                (f"{name}_bytes", name),
                (f"predicted_{name}_bytes", f"{name} predicted"),
                (f"{name}_error_percent", f"{name} error %"),
            ):
                write = "{:+.1f}".format if key.endswith("percent") else size
                if any(row[key] is not None for row in rows):
                    columns[title] = ["" if row[key] is None else write(row[key]) for row in rows]
        columns["seconds"] = [f"{phase.seconds:.2f}" for phase in self.phases]
        columns["outcome"] = ["goes through" if phase.fits else "out of memory" for phase in self.phases]
        facts = Facts([("run", self.title), ("software", self.versions)])
        table = Columns(list(columns), list(zip(*columns.values(), strict=True)))
        return Sheet(self._headline, [facts, table, Bullets(self.notes)])


# ---- borders between phases ----


@contextlib.contextmanager
def _before(module: Any, method: str, act: Callable[..., None]) -> Iterator[None]:
    """Call `act` before each call of an object's method, with the call's keywords."""
    call, own = getattr(module, method), module.__dict__.get(method)

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        act(**kwargs)
        return call(*args, **kwargs)

    setattr(module, method, watched)
    try:
        yield
    finally:
        if module.__dict__.get(method) is watched:  # accelerate deletes a `to` when it removes its hooks
            delattr(module, method) if own is None else setattr(module, method, own)


def _is_moved_whole(module: Any) -> bool:
    """Return whether ``enable_model_cpu_offload`` moves it to the device for its call."""
    return type(getattr(module, "_hf_hook", None)).__name__ == "CpuOffload"


class _Phases:
    """Reads a meter when a phase ends and the next begins; each begins once."""

    def __init__(self, meter: CudaMeter | CpuMeter):
        self.meter, self.done = meter, list[MeasuredPhase]()
        self.seen: Seen | None = None
        self._names: list[str] = []
        self._since = 0.0

    def begin(self, name: str, module: Any = None) -> None:
        """End the phase before, and begin this one once the module that it calls first is on the device."""
        if name in self._names:
            return
        self.end()
        self._names.append(name)
        self._since = time.perf_counter()
        self.meter.reset()
        if _is_moved_whole(module):
            module._hf_hook.pre_forward(module)
            self.meter.wait()
            self.meter.reset()

    def end(self, fits: bool = True) -> None:
        """Read the meter and record the phase, if one has begun."""
        if len(self._names) > len(self.done):
            peaks = self.meter.after()
            self.done.append(MeasuredPhase(self._names[-1], *peaks, time.perf_counter() - self._since, fits))

    @contextlib.contextmanager
    def watching(self, pipe: Any) -> Iterator[None]:
        """Let the pipeline's calls begin its phases."""
        vae, denoiser = pipe.vae, _denoiser(pipe)

        def encode_prompt(module: Any, _: Any) -> None:
            self.begin("encode prompt", module)

        def denoise(module: Any, args: Any, kwargs: Any) -> None:
            self.begin("denoise", module)
            if self.seen is None:
                with contextlib.suppress(IndexError, KeyError, TypeError):  # another way to call a denoiser
                    latents = args[0] if args else kwargs["hidden_states"]
                    prompts = args[2] if len(args) > 2 else kwargs["encoder_hidden_states"]
                    self.seen = Seen(len(latents), latents[0].numel(), len(prompts[0]))

        def convert(dtype: Any = None, **_: Any) -> None:
            # A conversion before the VAE's call. A VAE offloaded whole is converted on the CPU, before its phase.
            if dtype is not None and not _is_moved_whole(vae):
                self.begin("decode" if "denoise" in self._names else "encode image")

        with contextlib.ExitStack() as stack:
            for role, module in modules_of(pipe).items():
                if role.startswith("text_encoder"):
                    stack.callback(module.register_forward_pre_hook(encode_prompt).remove)
                elif role == "controlnet":
                    stack.callback(module.register_forward_pre_hook(lambda m, _: self.begin("denoise", m)).remove)
            stack.callback(denoiser.register_forward_pre_hook(denoise, with_kwargs=True).remove)
            stack.enter_context(_before(vae, "encode", lambda **_: self.begin("encode image", vae)))
            stack.enter_context(_before(vae, "decode", lambda **_: self.begin("decode", vae)))
            stack.enter_context(_before(vae, "to", convert))
            yield


# ---- the pipeline ----


def _denoiser(pipe: Any) -> Any:
    return pipe.components.get("unet") or pipe.components.get("transformer")


def _dtype(module: Any) -> str:
    return str(module.dtype).removeprefix("torch.")


def _tensors(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _group_settings(module: Any) -> dict[str, Any] | None:
    """Return the arguments of the module's ``enable_group_offload``, or None."""
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    hooks = (registry.get_hook("group_offloading") for registry in registries if registry is not None)
    if (hook := next((one for one in hooks if one is not None), None)) is None:
        return None
    used, same = hook.config, ("num_blocks_per_group", "offload_to_disk_path", "low_cpu_mem_usage", "record_stream")
    settings = {"offload_type": used.offload_type.value, "use_stream": used.stream is not None}
    return settings | {name: getattr(used, name) for name in same}


def _groups(pipe: Any) -> dict[str, Any] | None:
    """Return the arguments of the pipeline's ``enable_group_offload``, or None. ValueError if components differ."""
    found = {role: _group_settings(module) for role, module in modules_of(pipe).items()}
    settings = [one for one in found.values() if one]
    if any(one != settings[0] for one in settings):
        raise ValueError("components are offloaded in groups of different kinds")
    return settings[0] | {"exclude_modules": [role for role in found if not found[role]]} if settings else None


def _place(module: Any, device: Any) -> str:
    """Return how a component gets to the device: "none" if it stays there."""
    if _is_moved_whole(module):
        return "model"
    if settings := _group_settings(module):
        blocks = settings["num_blocks_per_group"]
        return f"{settings['offload_type']}{f' {blocks}' * bool(blocks)}{' stream' * settings['use_stream']}"
    places = {tensor.device for tensor in _tensors(module)}
    if torch.device("meta") in places:  # accelerate's place for weights that it loads for their calls
        return "sequential"
    return "none" if places == {device} else f"on {' and '.join(sorted(map(str, places)))}"


def _offload(pipe: Any, device: Any) -> str:
    excluded = pipe._exclude_from_cpu_offload
    places = {_place(module, device) for role, module in modules_of(pipe).items() if role not in excluded}
    return " and ".join(sorted(places))


def _vae_way(vae: Any, batch: int) -> str:
    """Return how the VAE runs: "whole", "tiled", "sliced", "tiled and sliced". diffusers slices only batches."""
    ways = {"tiled": getattr(vae, "use_tiling", False), "sliced": getattr(vae, "use_slicing", False) and batch > 1}
    return " and ".join(name for name, is_on in ways.items() if is_on) or "whole"


@contextlib.contextmanager
def _restoring(pipe: Any) -> Iterator[None]:
    """Run the pipeline in this block. On an error give its VAE the old dtype, and free offloaded components."""
    dtype = pipe.vae.dtype
    try:
        yield
    except BaseException:
        if pipe.vae.dtype != dtype:
            convert(pipe.vae, dtype)
        pipe.maybe_free_model_hooks()
        raise


# ---- the prediction ----


def _list_unpredictable(pipe: Any, call: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a pipeline that a prediction does not cover."""
    yield from (f"the call's argument {name}" for name in call if name not in _HARMLESS)
    if torch.backends.cudnn.benchmark:
        yield "torch.backends.cudnn.benchmark"
    if not (torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()):
        yield "attention without PyTorch's own kernels"
    for role, module in modules_of(pipe).items():
        processors = {type(one).__name__ for one in getattr(module, "attn_processors", {}).values()}
        if type(module).__module__.partition(".")[0] not in ("diffusers", "transformers"):
            yield f"{role}, which is a {type(module).__module__}.{type(module).__name__}"
        elif any(part._compiled_call_impl is not None for part in module.modules()):
            yield f"{role}, which is compiled"
        elif not all(weight.is_contiguous() for weight in module.parameters()):
            yield f"{role} in channels_last"
        elif not processors <= _PROCESSORS:
            yield f"{role}'s {', '.join(sorted(processors - _PROCESSORS))}"


def _has_weights(module: Any, part: Part) -> bool:
    """Return whether a module has the recorded tensors of a component, under any names."""
    stored = Counter((weight.shape, weight.bytes) for weight in part.weights)
    tied = getattr(module, "_tied_weights_keys", None) or ()
    apart = [weight for name, weight in module.named_parameters() if name in tied and weight.is_meta]
    found = Counter((tuple(tensor.shape), tensor.nbytes) for tensor in _tensors(module))
    # Sequential offload puts tied weights on the device "meta" one by one.
    return stored in (found, found - Counter((tuple(tensor.shape), tensor.nbytes) for tensor in apart))


def _request(
    pipe: Any, seen: Seen, card: Card, software: Software, call: Mapping[str, Any], **facts: Any
) -> PipelineRequest:
    """Make the request to `vaemem.predict_pipeline` for this pipeline; a ValueError says why there is none. call: the
    arguments of the pipeline's call"""
    modules, class_name = modules_of(pipe), type(pipe).__name__.replace("Img2Img", "")
    unlike: list[tuple[int, str]] = []  # of each pipeline with that class: how many parts differ, and in what
    for name, kind in PIPELINES.items():
        if kind.class_name not in (class_name, type(pipe).__name__) or kind.guides == pipe.config.get("is_distilled"):
            continue
        known = {**kind.parts, **kind.optional}
        if others := modules.keys() - known:
            raise ValueError(f"{name}, as vaemem knows it, has no {', '.join(sorted(others))}")
        components = {role: _dtype(modules[role]) if role in modules else None for role in known}
        if kind.parts["vae"] == "sdxl" and components["vae"] == "float16" and pipe.vae.config.force_upcast:
            del components["vae"]  # the default for SDXL
        facts["image"] = facts["image"] and not kind.encodes and class_name != type(pipe).__name__
        given = PipelineArguments(
            name, prompt_tokens=seen.tokens - kind.joined - _count_seen(kind, facts), components=components,
            guidance=_is_guided(kind, seen, call, facts["batch"]), dtype=_dtype(_denoiser(pipe)), **facts,
        )  # fmt: skip
        request = resolve_pipeline(given, card, software)
        images = facts["batch"] * (2 if kind.guides and request.guidance and not kind.apart else 1)
        known = architecture(kind.parts["vae"])["latent_channels"]
        channels = pipe.vae.config.get("latent_channels", known)  # Qwen-Image's VAE has another name for them
        numbers = kind.inputs * channels * (facts["height"] // kind.factor) * (facts["width"] // kind.factor)
        numbers *= request.latent_frames
        if other := [part for part in request.parts if not _has_weights(modules[part.role], part)]:
            unlike.append((len(other), f"{other[0].role} has other weights than {other[0].component}"))
        elif (seen.images, seen.numbers) != (images, numbers):
            got, wanted = f"{seen.images} latents of {seen.numbers} numbers", f"{images} of {numbers}"
            unlike.append((0, f"the denoiser is called with {got}, and {name}'s with {wanted}"))
        else:
            return request
    raise ValueError(min(unlike)[1] if unlike else f"vaemem does not know the pipeline {type(pipe).__name__}")


def _count_seen(kind: Pipeline, facts: Mapping[str, Any]) -> int:
    """Count the tokens of the denoiser's prompt that are an image's, if the text encoder gets it."""
    return count_seen(*scale_edited(facts["height"], facts["width"])) if kind.sees else 0


def _is_guided(kind: Pipeline, seen: Seen, call: Mapping[str, Any], batch: int) -> bool:
    """Return whether the pipeline's call has guidance."""
    if not kind.apart:
        return seen.images == 2 * batch
    return call.get("negative_prompt") is not None if kind.unguided else call.get("guidance_scale", math.inf) > 1


def _tiles_of(vae: Any) -> tuple[int, float]:
    """Return the side of a VAE's tiles and the part that they share; zeros if height and width differ."""
    if hasattr(vae, "tile_overlap_factor"):
        return vae.tile_sample_min_size, vae.tile_overlap_factor
    sides = {vae.tile_sample_min_height, vae.tile_sample_min_width}
    strides = {vae.tile_sample_stride_height, vae.tile_sample_stride_width}
    return (max(sides), 1 - max(strides) / max(sides)) if len(sides) == len(strides) == 1 else (0, 0.0)


def _find_release(class_name: str) -> tuple[str | None, list[str]]:
    """Return the installed release of diffusers to predict for; if it is unknown, None and a note."""
    version = sys.modules["diffusers"].__version__
    try:
        diffusers_release(version, class_name)
    except ValueError:
        return None, [f"The prediction follows diffusers 0.{LAST_DIFFUSERS}; this is {version}."]
    return version, []


def _predict_phases(
    pipe: Any, seen: Seen | None, call: Mapping[str, Any], place: Any, used: int, facts: Mapping[str, Any]
) -> tuple[dict[str, Phase], list[str]]:
    """Predict each phase on this card with its present load, and return notes; a ValueError says why it cannot."""
    if place.type != "cuda":
        raise ValueError("it ran on a CPU, where reserved is the process's resident size and allocated is unknown")
    if seen is None:
        raise ValueError("the call of the denoiser, which shows what runs, was not seen")
    if unknown := list(_list_unpredictable(pipe, call)):
        raise ValueError(f"nothing is known of {'; '.join(unknown)}")
    release, notes = _find_release(type(pipe).__name__)
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native"
    software = Software(
        torch_version=torch.__version__, cudnn_version=cudnn_version(), allocator=conf,
        allow_tf32=torch.backends.cudnn.allow_tf32, diffusers_version=release,
    )  # fmt: skip
    about, system = torch.cuda.get_device_properties(place), "windows" if sys.platform == "win32" else "linux"
    card, sizes = find_card(about.name, about.total_memory, used, system), ("height", "width", "batch", "steps")
    asked = {name: facts[name] for name in sizes} | {"frames": call.get("num_frames")}
    request = _request(pipe, seen, card, software, call, image="image" in call, **asked)
    tile = usual_tile(request.part("vae").component)
    if facts["vae"].startswith("tiled") and _tiles_of(pipe.vae) != (tile, 0.25):
        raise ValueError(f"its tiles do not have {tile} pixels a side with an overlap of a quarter")
    prediction = PipelinePrediction(request.run_with(_groups(pipe) or facts["offload"], facts["vae"]))
    notes += prediction.notes
    if prediction.out_of_memory_at:
        where, lacking = prediction.out_of_memory_at
        notes.append(f"Predicted to run out of memory in {where}, at {lacking.name} of {lacking.bytes / MIB:.0f} MiB.")
    phases = {phase.name: phase for phase in prediction.here.phases}
    if pipe.config.get("force_zeros_for_empty_prompt") and call.get("negative_prompt") is None and request.guidance:
        phases.pop("encode prompt", None)
        notes.append("Encode prompt is not predicted without a negative_prompt; negative_prompt='' is encoded too.")
    return phases, notes


# ---- the measurement ----


def measure_pipeline(
    pipe: Any, height: int, width: int, batch: int = 1, *, prompt: str | None = "a photo of a cat",
    steps: int | None = None, device: Any = None, **call: Any,
) -> MeasuredPipeline:  # fmt: skip
    """Measure a diffusers pipeline with the counters that `vaemem.predict_pipeline` predicts, phase by phase.

    Parameters
    ----------
    pipe : diffusers.DiffusionPipeline, or a function without arguments that makes one
        Ready to run: on the device or offloaded, its VAE whole, tiled or sliced. It stays so. A function is measured
        too, as the phase load. The prediction is for the first run of a process.
    height, width : int
        Size of the image in pixels.
    batch : int
        Images of the prompt.
    prompt : str, optional
        None if the call has embeddings instead.
    steps : int, optional
        How often the denoiser runs; by default the pipeline's usual number.
    device : torch.device or str, optional
        The device to measure; by default the pipeline's, and for a function the GPU if PyTorch has one, otherwise the
        CPU.
    **call
        Other arguments of the pipeline's call, such as ``guidance_scale=0.0`` or an image-to-image pipeline's
        ``image=``.

    Returns
    -------
    MeasuredPipeline
        The measurement; if memory ran out, with the phases until then.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be used, by name, before anything runs; or the pipeline's own error.
    OSError
        The peak resident size of a CPU run cannot be reset.

    Notes
    -----
    docs/PIPELINES.md says where phases begin and when they are predicted. If an error or Ctrl-C stops the pipeline, its
    offloaded components are freed and its VAE gets its dtype back.

    Examples
    --------
    >>> from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    >>> blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    >>> unet = UNet2DConditionModel(block_out_channels=(32, 64), cross_attention_dim=8, **blocks)
    >>> parts = AutoencoderKL(), None, None, unet, DDIMScheduler(clip_sample=False, steps_offset=1)
    >>> pipe = StableDiffusionPipeline(*parts, None, None, requires_safety_checker=False)
    >>> pipe.set_progress_bar_config(disable=True)
    >>> embeds = dict.fromkeys(["prompt_embeds", "negative_prompt_embeds"], torch.zeros(1, 8, 8))
    >>> measured = measure_pipeline(pipe, 64, 64, prompt=None, steps=1, **embeds)
    >>> [phase.name for phase in measured.phases], measured.notes
    (['denoise', 'decode'], (...Nothing is predicted, because it ran on a CPU, ...)
    """
    (height, width), batch = image_sides(height, width), whole("batch", batch)
    steps = None if steps is None else whole("steps", steps)
    is_made = hasattr(pipe, "components")
    if not is_made and not callable(pipe):
        wanted = "a pipeline of diffusers or a function that makes one"
        raise ArgumentTypeError("pipe", wanted, type(pipe).__name__)
    place = find_device(pipe._execution_device if is_made and device is None else device)
    facts: dict[str, Any] = dict.fromkeys(("pipeline", "model", "height", "width", "batch", "steps", "tokens"))
    facts |= dict.fromkeys(("dtype", "offload", "vae"))
    facts |= {"height": height, "width": width, "batch": batch, "steps": steps}
    facts["device"] = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    notes, predicted, full = list[str](), dict[str, Phase](), None
    with contextlib.ExitStack() as stack:
        if place.type == "cuda":
            torch.cuda.init()  # needed before peaks can be reset
            stack.enter_context(torch.cuda.device(place))  # empty_cache and others act on the current device
        meter = CudaMeter(torch.cuda, place) if place.type == "cuda" else CpuMeter()
        meter.clear()
        phases, (used, outside) = _Phases(meter), _measure_others(place)
        try:
            if is_made:
                own = [tensor for module in modules_of(pipe).values() for tensor in _tensors(module)]
                outside -= sum(tensor.nbytes for tensor in own if tensor.device == place)
            else:
                phases.begin("load")
                pipe = pipe()
                phases.end()
            facts |= _describe(pipe, place, facts)
            with _restoring(pipe), phases.watching(pipe):
                pipe(prompt=prompt, **_sizes(pipe, facts), **call)
                phases.end()
        except torch.cuda.OutOfMemoryError as error:
            full = str(error)
            phases.end(fits=False)
    facts["tokens"] = phases.seen and phases.seen.tokens
    if outside > MIB:
        held = f"{outside / MIB:.0f} MiB were allocated outside the pipeline before it ran"
        notes.append(f"{held}; the measurement includes them.")
    try:
        predicted, more = _predict_phases(pipe, phases.seen, call, place, used, facts)
        notes += more
    except ValueError as error:
        notes.append(f"Nothing is predicted, because {error}.")
    return MeasuredPipeline(facts, phases.done, predicted, full, _versions(place), notes)


def _measure_others(place: Any) -> tuple[int, int]:
    """Return two sizes: what other processes use on the card, and what this process has requested from PyTorch."""
    if place.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(place)
    requested = torch.cuda.memory_stats(place)["requested_bytes.all.current"]
    context = context_of(torch.cuda.get_device_name(place), total)
    return max(total - free - torch.cuda.memory_reserved(place) - context, 0), requested


def _describe(pipe: Any, place: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a pipeline; ValueError if it cannot be measured, or not on this device."""
    if getattr(pipe, "vae", None) is None or _denoiser(pipe) is None:
        raise ArgumentError("pipe", "a pipeline with a VAE and a UNet or a transformer", type(pipe).__name__)
    if find_device(pipe._execution_device) != place:
        raise ArgumentError("device", f"the pipeline's, which is {pipe._execution_device}", str(place))
    steps, model, of_class = facts["steps"], type(pipe).__name__, type(pipe).__name__.replace("Img2Img", "")
    shapes = Counter(tuple(tensor.shape) for tensor in _tensors(_denoiser(pipe)))
    for name, kind in PIPELINES.items():
        if kind.class_name in (of_class, type(pipe).__name__):
            image_sides(facts["height"], facts["width"], kind.stride, f" for {of_class}")
            known = Counter(weight.shape for weight in weights_of(kind.parts[kind.denoiser]))
            if shapes == known and model == type(pipe).__name__:  # of models with equal shapes, the first one
                model = name
    if steps is None:
        steps = inspect.signature(pipe.__call__).parameters["num_inference_steps"].default
    return {
        "pipeline": type(pipe).__name__, "model": model, "steps": steps, "dtype": _dtype(_denoiser(pipe)),
        "offload": _offload(pipe, place), "vae": _vae_way(pipe.vae, facts["batch"]),
    }  # fmt: skip


def _sizes(pipe: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the call. Not every pipeline that begins with an image takes its size."""
    names = {"height": "height", "width": "width", "num_images_per_prompt": "batch", "num_inference_steps": "steps"}
    known = inspect.signature(pipe.__call__).parameters
    return {name: facts[value] for name, value in names.items() if name in known}


def _versions(place: Any) -> str:
    others = [name for name in ("transformers", "accelerate") if name in sys.modules]
    versions = [f"{name} {sys.modules[name].__version__}" for name in others]
    return ", ".join([what_ran(place, "diffusers"), *versions, f"vaemem {__version__}"])
