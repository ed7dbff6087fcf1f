"""Predict a pipeline's GPU memory in every phase, without PyTorch and without the GPU."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, overload

from vaemem._arguments import shared
from vaemem._common import __version__, flag, meant, whole
from vaemem._render import Block, Bullets, Columns, Sizer
from vaemem._types import Dtype
from vaemem.engine.names import shared_note
from vaemem.pipelines.comfyui_run import WORKFLOWS, ComfyUIRun, describe_decisions, plays_of, resolve_workflow
from vaemem.pipelines.components import CLIP_TOKENS, PIPELINES, known_pipeline, refuse
from vaemem.pipelines.phased import UNCOMPARED, PhasedAnswer, as_far_as, read_phases
from vaemem.pipelines.pipeline_parts import PLACES, Part, parts_of
from vaemem.pipelines.pipeline_request import (
    OFFLOADS,
    SMALLER,
    PipelineArguments,
    PipelineRequest,
    begins_with,
    resolve_pipeline,
    smaller_roles,
)
from vaemem.pipelines.pipeline_run import play_pipeline
from vaemem.pipelines.quantising import BITSANDBYTES, SCHEMES, UNPACKING
from vaemem.pipelines.ways_mlx import MFLUX
from vaemem.prediction.answer import alias
from vaemem.prediction.closed import PlayedPeak
from vaemem.prediction.formula import Formula
from vaemem.prediction.gpus import known_gpu
from vaemem.prediction.held import Moment
from vaemem.prediction.lines import BATCHES, Grid, Point
from vaemem.prediction.planned import Phase, Result, Way
from vaemem.prediction.predict import SMALL_TILE, Advice
from vaemem.prediction.process import ROUNDED_UP
from vaemem.prediction.recordings import is_recording
from vaemem.prediction.request import Card, Software, find_card, usual_tile
from vaemem.prediction.runtimes import WANS, architecture
from vaemem.prediction.seconds import Machine, machine_of, peak, vae_work
from vaemem.prediction.usual import FIXED, OVERFLOWING
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS, describe_spilling, judge_phases, judge_played

PredictedRuntime = Literal["diffusers", "sd.cpp", "comfyui"]
PREDICTED_RUNTIMES: tuple[PredictedRuntime, ...] = get_args(PredictedRuntime)
_TRIED = ("NVIDIA H100", "NVIDIA H200")
BY_VAEMEM = "vaemem's code has run on one kind of GPU only, an H100 and an H200"


def _play_phases(request: PipelineRequest, workspace: Any, point: Point) -> dict[str, PlayedPeak]:
    """Return the memory of each phase at a point."""
    at = replace(request, height=point.height, width=point.width, batch=point.batch)
    run = play_pipeline(replace(at, tokens=point.tokens or at.tokens), workspace)
    seen = {}
    for one in read_phases(run.process, run.names):
        tensors = {name: size for name, size in one.peak_tensors if name != ROUNDED_UP}
        seen[one.name] = PlayedPeak(one.total, one.allocated, one.where, tensors)
    return seen


class _Played(PhasedAnswer):
    """Phases of a pipeline that a simulated process of PyTorch played."""

    request: PipelineRequest
    pipeline: str = alias("request.name")
    least: int = alias("judged.least")

    @property
    def parts(self) -> dict[str, Part]:
        return {part.role: part for part in self.request.parts}

    def work(self, phase: Phase, machine: Machine | None = None) -> dict[str, float]:
        """Return a phase's work after loading, for `vaemem.prediction.seconds.Machine`. If a short prompt is encoded in
        less time than it takes to read the encoders' weights, reading them is the work. A VAE converted to float32
        counts as the FLOPs that take the same time in the pipeline's type, because the rate is for that type.

        Examples
        --------
        >>> p = predict_pipeline("sd15", 512, 512, gpu="T4", offload="model")
        >>> [sorted(p.work(phase)) for phase in p.phases[-2:]]
        [['link', 'unet'], ['link', 'memory', 'vae']]
        """
        q = self.request
        vae = q.part("vae")
        work = {q.pipeline.denoiser if phase.kind == "denoise" else "transformer": float(phase.flops)}
        if phase.kind in ("encode image", "decode"):
            is_slower = vae.upcast and q.vae != "vaemem"
            slower = peak(q.card.gpu, vae.dtype) / peak(q.card.gpu, "float32") if is_slower else 1
            work = vae_work(slower * phase.flops, slower * phase.attended, phase.moved)
        if machine and phase.flops and phase.kind == "encode prompt":
            read = {"memory": float(sum(part.nbytes for part in q.parts if part.role in q.pipeline.encoders))}
            work = max(work, read, key=lambda one: machine.seconds(one).likely)
        work |= {"link": float(phase.sent), "cpu": float(phase.host_flops)}
        if (
            q.group and phase.name != "load"
        ):  # its groups come from the disk, or go back to the host unless it has copies
            back = 1 if q.group.use_stream else 2
            work |= {"disk": work["link"]} if q.group.offload_to_disk_path else {"link": back * work["link"]}
        if q.group and q.group.use_stream and machine:  # weights come while the card computes: the longer counts
            moved: dict[str, float] = {name: work.pop(name) for name in ("link", "disk") if name in work}
            work = max(work, moved, key=lambda one: machine.seconds(one).likely)
        return {name: amount for name, amount in work.items() if amount}

    def _seconds(self) -> dict[str, dict[str, float]]:
        if self.coarse:
            return {}
        machine, whole = machine_of(self.card.gpu, dtype=self.request.dtype), Counter[str]()
        works: dict[str, Any] = {phase.name: self.work(phase, machine) for phase in self.phases if phase.name != "load"}
        for work in works.values():
            whole.update(work)  # adds counts, also fractions
        took = {name: machine.seconds(work) for name, work in {**works, "whole": whole}.items()}
        return {
            name: {"seconds": one.likely, "seconds_low": one.low, "seconds_high": one.high}
            for name, one in took.items()
        }


class PipelinePrediction(_Played):
    """Prediction for diffusers, as `predict_pipeline` returns it. Sizes are in bytes.

    Attributes
    ----------
    title : str
        The pipeline and its settings.
    phases : tuple of Phase
        In order: load (if something is loaded first), encode prompt, encode image (if there is one), denoise, decode.
    peak : int
        The most memory of the card that the process holds at once: PyTorch's reserved memory plus vaemem's. It assumes
        a card large enough for PyTorch to reserve freely.
    bottleneck : str
        The phase with this peak.
    fits : bool
        Whether the verdict is "fits" or "tight"; with ``safe=True`` whether it is "fits".
    verdict : str
        ``"fits"``, even by `upper`; ``"tight"``; or ``"does not fit"``. A tight run goes through, but not by `upper`;
        or it depends on PyTorch's release of cached memory, on unknown next plans of a cuDNN before 9.8, or on
        vaemem's decoder on a card other than an H100 or H200, where it never ran.
    summary : str
        The verdict with its figures and its reason, in one sentence.
    spare : int
        The rest of `available` on this card. A negative value is the shortage of a run that does not go through.
    on_card : int or None
        The `peak` on this card, no more than `available`. None if the run does not go through.
    out_of_memory_at : tuple of (str, PeakTensor) or None
        The phase, and the tensor that cannot be allocated.
    available : int
        The card's memory without a CUDA context and without the memory that others use.
    least, least_band : int, tuple of int
        The least `available` with which the run goes through, in pages of 2 MiB, if cuDNN's next plans need no
        workspace. If the next plans are unknown, the band ends at the least with the first plan's workspaces.
    band : tuple of int
        Least and most of `peak`, as `Prediction.band` has them for `reserved`.
    upper : int
        An upper bound of the process's memory on the card: the most of `band`, or of any version if none was given.
        Earlier runs add 20 MiB and a 16th of everything but weights. Weights in int8 add the 16th too, inferred from
        one published run that took 1.8% more than predicted.
    host : int
        Bytes of weights that the host keeps.
    timeline : tuple of Moment
        ``(name, allocated, reserved)`` step by step through every call; names begin with the role.
    notes : tuple of str
        Known omissions, and substitutes for missing data.

    Examples
    --------
    >>> p = predict_pipeline("sd15", 768, 768, gpu="RTX 3060", offload="model")
    >>> p.bottleneck, p.fits, p.host >> 20
    ('decode', True, 2033)
    >>> p.phases[-1].peak_tensors[0]
    PeakTensor(name='decoder.up_blocks.2.upsamplers.0.conv [workspace]', bytes=605159440)
    """

    def __init__(self, request: PipelineRequest):
        self.request, self.model_note = request, request.model_note
        q = request
        batch = f", {q.batch} images" if q.batch > 1 else ""
        on_cpu = f", {' and '.join(q.on_cpu)} on the CPU" if q.on_cpu else ""
        frames = f", {q.frames} frames" if q.pipeline.frames else ""
        more = on_cpu + f", {q.after}" * bool(q.first) + "".join(f", LoRA {lora}" for lora in q.loras)
        where = self._where = f"{q.card.gpu.name}, offload {q.offload}, VAE {q.vae}{more}"
        self.title = f"{q.name} {q.size}{batch} by {q.software.program} ({where})"
        self._run = play_pipeline(request)
        process, moved = self._run.process, (*q.on_cpu, *self._run.moved)
        self._process = process
        cudnn = self._cudnn = getattr(process.workspace, "cudnn_version", None)
        ran = f"torch {process.torch_version}{f', cudnn {cudnn}' if cudnn else ''}"
        self._run_row = {
            "model": q.name, "op": "pipeline", "height": q.height, "width": q.width, "batch": q.batch,
            "tokens": q.tokens, "dtype": q.dtype, "runtime": "diffusers", "device": q.card.gpu.name,
            "way": f"offload {q.offload}, VAE {q.vae}{frames}{more}", "source": "predicted",
            "versions": f"{ran}, {q.software.program}, vaemem {__version__}",
        }  # fmt: skip
        on_disk = q.group and q.group.offload_to_disk_path
        self.host = sum(part.host_bytes(q.group) for part in q.parts if part.role in moved and not on_disk)
        self._sizes = self._run.sizes
        # LLM.int8()'s memory is not known to the byte. Hugging Face's published run with it (docs/PIPELINES.md)
        # reserved 2.0% more than predicted after loading the weights, and 1.8% more at its peak.
        inexact = {f"weights of {part.role}" for part in q.parts if part.has(["int8"])}
        by_vaemem = q.vae == "vaemem" and not q.card.gpu.name.startswith(_TRIED)
        here = self._judge(
            process, self._run.names, inexact,
            untried=UNCOMPARED if is_recording(q.name) else BY_VAEMEM if by_vaemem else "",
            covers=f", at {q.size} as diffusers runs {q.made_of}" if q.made_of else "",
        )  # fmt: skip
        self.notes = (*(process if self.judged.out_of_memory_at else here).substitutions, *_notes(q))

    @functools.cached_property
    def would_fit(self) -> tuple[Advice, ...]:
        q, found = self.request, list[Advice]()
        if self.verdict == FITS:
            return ()
        for run, offload, vae, words in _others(q):
            with contextlib.suppress(ValueError):
                other = PipelinePrediction(run.run_with(offload, vae))
                if other.verdict != DOES_NOT_FIT:
                    typed = "".join(f", {one.replace('=', ' in ')}" for one in words)
                    command = [*(one for word in words for one in ("--component", word)), "--offload", offload]
                    shown = shlex.join([*command, "--vae", vae])
                    needed = other.judged.here[1]
                    what = f"offload {offload}, VAE {vae}{typed}"
                    found.append(Advice(what, other.verdict, needed, self.available, shown))
        return tuple(found)

    def _plan(self) -> str:
        """Write the command that plans this run; "" if it has settings that this does not write."""
        q, card = self.request, self.request.card
        if q.image or q.first or q.loras or q.software.has_version or known_gpu(card.gpu.name) != card.gpu:
            return ""
        given = {
            "batch": q.batch if q.batch > 1 else None, "used": card.used or None,
            "os": "windows" if card.is_windows else None, "frames": q.frames if q.pipeline.frames else None,
        }  # fmt: skip
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        return shlex.join(["vaemem", "plan", q.name, f"{q.height}x{q.width}", "--gpu", card.gpu.name, *words])

    def _asked_data(self) -> dict[str, Any]:
        q = self.request
        names = "height width batch tokens dtype guidance steps image offload vae"
        types = {part.role: part.dtype for part in q.parts}
        run = {name: getattr(q, name) for name in (*names.split(), *["frames"] * bool(q.pipeline.frames))}
        run["image"] = list(q.first) if q.first else q.image
        run |= {"on_cpu": list(q.on_cpu), "components": types, "lora": [str(lora) for lora in q.loras]}
        return {"pipeline": q.name, "runtime": "diffusers", **run}

    def _more_data(self) -> dict[str, Any]:
        versions = {"torch": self._process.torch_version, "cudnn": self._cudnn}
        versions["diffusers"] = f"0.{self.request.software.release}"
        return super()._more_data() | {"software": versions, "would_fit": [one.to_dict() for one in self.would_fit]}

    @functools.cached_property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._run.timeline())

    @functools.cached_property
    def formula(self) -> Formula:
        """Return the memory of this pipeline on this card, with this offload, as an equation of the size, the batch and
        the prompt (`vaemem.formula`)."""
        q = self.request
        tokens = max(q.tokens, q.pipeline.most_tokens) if q.pipeline.most_tokens > CLIP_TOKENS else 0
        play = functools.partial(_play_phases, q, self._process.workspace)
        at = Point(q.height, q.width, q.batch, q.tokens if tokens else 0)
        batches = range(1, (q.pipeline.most_images(q.guidance) or BATCHES[-1]) + 1)
        found = Formula(f"{q.name}, {self._where}", Grid(tokens, q.tile, batches=batches), at, play)
        found.assumed_card = self.assumed_card
        return found


def _others(q: PipelineRequest) -> Iterator[tuple[PipelineRequest, str, str, list[str]]]:
    """Yield other ways to run a request: the request, how it is offloaded, how its VAE runs, and types of components.
    Groups come on a stream if they can. The smaller types are a plan's."""
    offloads = ("none",) if q.pipeline.is_modular else OFFLOADS  # it has no method for others
    for offload, vae in itertools.product(offloads, ("whole", *q.tilings)):
        if (offload, vae) != (q.offload, q.vae):
            yield q, offload, vae, []
    for offload in () if q.pipeline.is_modular else ("leaf_level", "leaf_level stream"):
        if offload != q.offload:
            yield q, offload, "whole", []
    for kind in SMALLER:
        large = [part.role for part in q.parts if not part.has({*SCHEMES, *UNPACKING, "fp8"})]
        roles = [role for role in smaller_roles(q.pipeline, kind) if role in large]
        with contextlib.suppress(ValueError):
            made = parts_of(q.pipeline, q.dtype, dict.fromkeys(roles, kind), q.software.release, q.loras)
            by_role = {part.role: part for part in made if part.role in roles}
            run = replace(q, parts=tuple(by_role.get(part.role, part) for part in q.parts))
            for offload in ("none", "model")[: len(offloads)] if roles else ():
                yield run, offload, "whole", [f"{role}={kind}" for role in roles]


def _notes(q: PipelineRequest) -> Iterator[str]:
    """List the uncounted memory of the parts, and settings that run differently than asked."""
    yield from q.pipeline.notes
    if q.made_of:
        known = f"multiples of {q.pipeline.stride}"
        if q.pipeline.frames:
            known = f"{q.pipeline.frame_factor} n + {q.pipeline.clip[0]} frames"
        yield f"{q.made_of}: {q.pipeline.class_name} makes {q.size} of it, {known}"
    if q.pipeline.sized and (q.height, q.width) != (1024, 1024):
        yield f"{q.pipeline.class_name} makes about 1024x1024 pixels of it unless its call has {q.pipeline.sized}"
    if 0 < q.pipeline.longest < q.tokens:
        most = q.pipeline.longest
        yield f"{q.pipeline.class_name} refuses more than {most} tokens; give longer prompts as prompt_embeds"
    if q.group and q.group.use_stream:
        if q.group.num_blocks_per_group:
            yield "with use_stream diffusers takes one block per group, whatever num_blocks_per_group says"
    if q.uncut:
        smaller = f"; give 'tiled {SMALL_TILE}' for smaller ones" if max(q.height, q.width) > SMALL_TILE else ""
        yield f"vae: tiles of {q.tile} pixels do not cut this image, so its decode is whole{smaller}"
    if q.group and q.group.record_stream:
        yield "record_stream: while there is room, PyTorch reserves more than here, for weights that wait for the GPU"
        yield "record_stream: before memory runs out, PyTorch waits for them; so the run needs about as much as here"
    if q.group and q.group.pins:
        yield "the host's copies are pinned: PyTorch rounds them up to powers of two; not those outside blocks"
    for part in q.parts:
        if part.pairs:
            size = sum(weight.bytes for weight in part.weights if ".lora_" in weight.name)
            layers = {pair.module for pair in part.pairs}  # here, because Brython reads no braces within braces
            yield f"{part.role}: LoRAs for {len(layers)} layers, {size} bytes"
        if q.group and part.role not in q.resident and len(part.groups(q.group)) == 1:
            yield f"{part.role}: comes whole for its call; its class has no list of blocks for block_level"
        if part.is_cast_on_card:
            yield f"{part.role}: comes to the card whole; if it is cast or quantised before it comes, load takes less"
        kind = next((one for one in BITSANDBYTES if part.has([one])), "")
        if kind == "int8":
            yield f"{part.role}: LLM.int8()'s copies of columns with outliers are not counted"
        if kind == "int8" and q.offload == "model" and part.role not in q.resident:
            older = "with transformers before 5 or bitsandbytes before 0.48, int8 stays on the card"
            yield f"{part.role}: {older}; give 'int8 kept on cuda' for that"
        if kind and q.offload != "none" and part.place == PLACES[0]:
            yield f"{part.role}: loaded with device_map='cpu'; without it, give '{kind} on cuda'"
        if part.has(["qfloat8"]):
            yield f"{part.role}: quanto's own kernels, compiled by nvcc, unpack nothing; the copies here are the most"
        if part.has(["int4wo"]):
            yield f"{part.role}: torchao's int4 kernels (mslk) were read, not run"
        if kind.startswith("nf4"):
            yield f"{part.role}: calls with few rows may unpack no weights (bitsandbytes 0.50); here all layers do"
        if part.note:
            yield f"{part.role}: {part.note}"
        if part.role == "vae" and q.tile not in (0, usual_tile(part.component)):
            side, stride = q.tile, 3 * q.tile // 4
            code = f"set vae.tile_sample_min_size = {side} and tile_latent_min_size to an eighth"
            if architecture(part.component)["name"] in ("qwen-image", *WANS):
                code = f"call vae.enable_tiling({side}, {side}, {stride}, {stride})"
            yield f"vae: for these tiles {code}"
        is_converted = part.upcast or q.vae == "vaemem" or not q.pipeline.upcasts
        if part.component in OVERFLOWING and part.dtype == "float16" and not is_converted:
            yield f"vae: {FIXED} in float16; SDXL's own VAE overflows there and gives black pictures"
        if part.role == "vae" and q.vae == "vaemem":
            upcast = ", where diffusers converts to float32" if part.upcast else ""
            yield f"vae: vaemem decodes in {part.dtype}{upcast}; {BY_VAEMEM}"


class GraphPrediction(PhasedAnswer):
    """Prediction for stable-diffusion.cpp, as `predict_pipeline` returns it. Each model is a graph with one buffer.

    Attributes
    ----------
    title, phases, peak, bottleneck, fits, verdict, summary, spare, on_card, out_of_memory_at, available, host, notes
        As in `PipelinePrediction`. A phase's `activations` are the graph's buffer and
        ggml-cuda's memory for its largest product; allocated and reserved are the same.
    way : Way
        The settings of the run, under their name in `vaemem.plan_pipeline`.
    direct : Way
        The same with direct convolution in the VAE if no argument chooses the convolution; otherwise `way` itself.
        `phases` are for `way`, by im2col. A card is tight if it has room for direct convolution only.

    Examples
    --------
    >>> p = predict_pipeline("zimage-turbo", 1024, 1024, runtime="sd.cpp", offload="cond_only", gpu="RTX 3060")
    >>> p.verdict, p.on_card >> 20, p.phases[2].total >> 20, p.phases[3].total >> 20
    ('tight', 10420, 8794, 13505)
    """

    card: Card = alias("_card")

    def __init__(
        self, request: Mapping[str, Any], way: Way, available: int, card: Card, safe: bool = False,
        direct: Way | None = None, model_note: str = "",
    ):  # fmt: skip
        """Predict the run. request: values common to the rows of all ways."""
        self.request, self.way, self.direct, self.model_note = request, way, direct or way, model_note
        self._run_row = {**request, "op": "pipeline", "way": way.name, "runtime": "sd.cpp", "source": "predicted"}
        self.title = (
            f"{request['model']} {request['height']}x{request['width']} by sd.cpp ({card.gpu.name}), {way.name}"
        )
        self.host, self.notes, self._card = way.host, way.notes, card
        no_room = "it goes through only with direct convolution"
        self.judged = judge_phases(
            way.phases, available, self.direct.phases, kept_more=card.kept_more,
            windows=describe_spilling(card.gpu, card.is_windows), safe=safe, no_room=no_room,
        )  # fmt: skip
        self.result = as_far_as(way.phases, self.judged.out_of_memory_at)
        self.here = self.result

    def __reduce__(self) -> Any:
        given = self.request, self.way, self.available, self.card, self.judged.safe, self.direct
        return GraphPrediction, (*given, self.model_note)

    def summarize(self, size: Sizer) -> str:
        summary = super().summarize(size)
        if self.direct is self.way:
            return summary
        im2col, direct = (size(way.phases[-1].total) for way in (self.way, self.direct))
        return f"{summary}; its decode takes {im2col} by im2col and {direct} with --vae-conv-direct"

    def _asked_data(self) -> dict[str, Any]:
        run = {"pipeline" if name == "model" else name: value for name, value in self.request.items()}
        return run | {"runtime": "sd.cpp", "way": self.way.name}


class ComfyUIPrediction(_Played):
    """Prediction for ComfyUI, as `predict_pipeline` returns it. Sizes are in bytes.

    Attributes
    ----------
    title, phases, peak, bottleneck, fits, verdict, summary, spare, on_card, out_of_memory_at, available, band, upper
        As in `PipelinePrediction`. The run is always on this card, because the manager's decisions depend on it.
    least : int
        The least `available` with which the workflow goes through, in pages of 2 MiB. With less the manager decides
        otherwise, and that is played.
    placed : dict of str to dict
        For each phase the models that the manager keeps on the card: {role: (bytes counted as loaded, bytes of all)}.
    left : dict of str to list of str
        For each phase the roles of the models that leave the card.
    estimates : dict of str to (int, int)
        For each phase ComfyUI's estimate for the call, and the bytes that the call allocates besides weights. ComfyUI
        has no estimate for prompts. It keeps 0.8 GiB free for any call.
    batched : bool
        Whether the denoiser's calls have both prompts. Otherwise they come one after the other.
    tiled : bool
        Whether the whole decode runs out of memory, so that ComfyUI decodes in tiles.
    host : int
        Bytes of weights in the host's memory: all of them, at the start.
    notes : tuple of str
        Known omissions, and substitutes for missing data.

    Examples
    --------
    >>> p = predict_pipeline("sdxl", 1024, 1024, gpu="RTX 2060", runtime="comfyui")
    >>> p.placed["denoise"]["unet"], p.left["denoise"], p.batched
    ((4652184320, 5134967368), ['text_encoder'], True)
    """

    def __init__(self, request: PipelineRequest):
        self.request, self.model_note = request, request.model_note
        q, card = request, request.card
        batch = f", {q.batch} images" if q.batch > 1 else ""
        option, program = "" if q.offload == "none" else f", {q.offload}", WORKFLOWS[q.name].release.name
        self.title = f"{q.name} {q.height}x{q.width}{batch} by {program} ({card.gpu.name}, VAE {q.vae}{option})"
        here = ComfyUIRun(request, card.available())
        run = ComfyUIRun(request, card.available(), here.process.workspace, here)
        process, phases, played = run.process, run.phases(), here.phases()
        self._process, self._cudnn = process, getattr(process.workspace, "cudnn_version", None)
        self._run_row = {
            "model": q.name, "op": "pipeline", "height": q.height, "width": q.width, "batch": q.batch,
            "tokens": q.tokens, "dtype": q.dtype, "runtime": "comfyui", "device": card.gpu.name,
            "way": f"VAE {q.vae}{option}", "source": "predicted",
            "versions": f"torch {process.torch_version}, {program}, vaemem {__version__}",
        }  # fmt: skip
        self.placed, self.left, self.batched, self.tiled = run.placed, run.left, run.batched, run.tiled
        self.estimates = {one.name: (int(run.estimates[one.name]), one.allocated - one.weights) for one in phases}
        self.host = run.nbytes
        self.result, self.here = as_far_as(phases, here.full), Result(played, here.full)
        self.notes = (*here.process.substitutions, *describe_decisions(run))
        took = self.here.fullest.total if played else 0
        self.judged = judge_played(plays_of(run, not here.full), here.process, self.peak, took, here.full)

    def _asked_data(self) -> dict[str, Any]:
        q = self.request
        names = "height width batch tokens dtype guidance steps offload vae"
        return {"pipeline": q.name, "runtime": "comfyui", **{name: getattr(q, name) for name in names.split()}}

    def _more_data(self) -> dict[str, Any]:
        phases = [
            {
                "phase": name, "estimate_bytes": guess, "allocated_bytes": took, "left": self.left[name],
                "models": [
                    {"role": role, "loaded_bytes": loaded, "bytes": size}
                    for role, (loaded, size) in self.placed[name].items()
                ],
            }
            for name, (guess, took) in self.estimates.items()
        ]  # fmt: skip
        decisions = {"phases": phases, "tiled": self.tiled, "batched": self.batched}
        return super()._more_data() | {"comfyui": decisions}

    def _blocks(self, size: Sizer) -> list[Block]:
        rows = []
        for name, models in self.placed.items():
            there = (
                role if loaded == whole else f"{role} ({size(loaded)} of {size(whole)})"
                for role, (loaded, whole) in models.items()
            )
            guess, took = self.estimates[name]
            estimate = size(guess) if guess else "none"
            rows.append([name, estimate, size(took), ", ".join(self.left[name]), ", ".join(there)])
        header = ["phase", "estimate", "needed", "leaves", "models on the card"]
        title = "ComfyUI's estimate of each phase besides weights, and its decisions about models:"
        return [self._grid(size), Columns(header, rows, title=title), Bullets(self.notes, detail=True)]


def pipelines_of(runtime: str) -> Iterable[str]:
    """Return the names of a runtime's pipelines."""
    if runtime == "sd.cpp":
        from vaemem.sdcpp import running  # a third of this module's import

        return running.MODELS
    return {"comfyui": WORKFLOWS, "mlx": MFLUX}.get(runtime, PIPELINES)


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, components: Mapping[str, Any] | None = None,
    lora: Any = None, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    vae_memory_limit: int | str | None = None, image: bool | tuple[int, int] = False, steps: int | None = None,
    gpu: str | None = None, memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, runtime: Literal["diffusers"] = "diffusers", safe: bool = False,
    os: str = "linux", diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePrediction: ...  # fmt: skip


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, *, runtime: Literal["sd.cpp"], components: Mapping[str, Any] | None = None,
    offload: str | Mapping[str, Any] = "none", vae: str = "whole", steps: int | None = None, gpu: str | None = None,
    memory: int | str | None = None, used: int | str = 0, safe: bool = False, os: str = "linux",
) -> GraphPrediction: ...  # fmt: skip


@overload
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, runtime: Literal["comfyui"],
    components: Mapping[str, Any] | None = None,
    offload: str = "none", vae: str = "whole", steps: int | None = None, gpu: str | None = None,
    memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, safe: bool = False, os: str = "linux",
) -> ComfyUIPrediction: ...  # fmt: skip


@shared
def predict_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None,
    guidance: bool | None = None, dtype: Dtype | None = None, *, components: Mapping[str, Any] | None = None,
    lora: Any = None, offload: str | Mapping[str, Any] = "none", vae: str = "whole",
    vae_memory_limit: int | str | None = None, image: bool | tuple[int, int] = False, steps: int | None = None,
    gpu: str | None = None, memory: int | str | None = None, used: int | str = 0, cudnn_version: str | None = None,
    torch_version: str | None = None, runtime: PredictedRuntime = "diffusers", safe: bool = False, os: str = "linux",
    diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePrediction | GraphPrediction | ComfyUIPrediction:  # fmt: skip
    """Predict a pipeline's GPU memory in each phase: weights, activations, workspaces, and whether it fits.

    Parameters
    ----------
    pipeline : shared
    height, width : int
        The image's size in pixels: multiples of 8, and of 16 for Z-Image. With FLUX, FLUX.2 and Wan, diffusers rounds
        sizes down to multiples of 16 (Wan 2.2's 5B: 32). The prediction is then for the smaller size, and the answer
        says so.
    batch : int
        Images of one prompt.
    prompt_tokens, guidance : shared
    dtype of a pipeline : shared
    components, lora : shared
    offload : str or dict
        The kind of offloading: ``"none"``, ``"model"`` (``enable_model_cpu_offload``) or ``"sequential"``
        (``enable_sequential_cpu_offload``); or a place for some components, such as ``{"text_encoder_2": "cpu"}``. The
        others run on the GPU. ``"block_level"``, ``"block_level 4"`` and ``"leaf_level"`` are group offloading
        (``enable_group_offload``) with one or four blocks per group, or by leaves. ``"leaf_level stream"`` and
        ``"block_level 1 stream"`` also have ``use_stream=True``. A dict of the method's own arguments says more:
        ``{"offload_type": "leaf_level", "exclude_modules": ["vae"]}``.
    vae : str
        How the VAE runs: ``"whole"``, ``"tiled"``, ``"tiled 512"`` with the side of the tiles in pixels, ``"sliced"``,
        ``"tiled and sliced"``, or ``"vaemem"``: by this package, within `vae_memory_limit`.
    vae_memory_limit : int or str, optional
        A limit for vaemem's decoder, weights included: bytes, or ``"1 GB"``.
    image, steps : shared
    gpu, memory, used, cudnn_version, torch_version, safe, os, diffusers_version, frames : shared
    runtime : {"diffusers", "sd.cpp", "comfyui"}
        The program that runs it. For stable-diffusion.cpp, `offload` is ``"none"``, ``"cond_only"``,
        ``"--clip-on-cpu"``, ``"--offload-to-cpu"`` or ``"freed after use"``. `vae` is ``"whole"``, ``"direct"``,
        ``"tiled"``, ``"direct tiled"`` or ``"on CPU tiled"``. `components` are types of ggml, sizes (``"6.8 GiB"``) or
        files. `dtype`, `image`, `vae_memory_limit` and versions do not apply. `offload` may also be a whole way of
        `plan_pipeline`: its name, such as ``"cond_only, VAE direct, tiled"``; its settings, which are options of the
        program, such as ``{"--offload-to-cpu": True, "--diffusion-fa": True}``; or the same as typed words,
        ``"--offload-to-cpu --diffusion-fa"``. These choose the VAE's convolution. Otherwise, without ``"direct"``, the
        answer covers both: by im2col, as without ``--vae-conv-direct``, and directly.

        For ComfyUI, `offload` is ``"none"``, or the option ``"--lowvram"``, ``"--novram"`` or
        ``"--disable-smart-memory"``; its manager decides the rest. `vae` is ``"whole"``, which falls back to tiles, or
        ``"tiled"``, also with a side. `components` may have a type for ``"vae"``. sd15, sdxl, flux, flux-schnell and
        qwen-image are known.

    Returns
    -------
    PipelinePrediction, GraphPrediction for sd.cpp, or ComfyUIPrediction

    Raises
    ------
    ValueError
        An unknown or impossible value; a component that was not recorded, or not in a dtype.

    Notes
    -----
    docs/PIPELINES.md explains how it works, and lists the unknowns.

    Examples
    --------
    >>> p = predict_pipeline("sd15", 512, 512, gpu="T4")
    >>> [(phase.name, phase.allocated >> 20) for phase in p.phases]
    [('load', 2056), ('encode prompt', 2058), ('denoise', 2196), ('decode', 2675)]
    >>> p.fits, p.bottleneck
    (True, 'decode')
    """
    model_note = shared_note(pipeline, "pipeline")
    runtime = meant("runtime", runtime, PREDICTED_RUNTIMES)
    pipeline = known_pipeline("pipeline", pipeline, pipelines_of(runtime))
    kind, image = PIPELINES[pipeline], begins_with(image)
    guidance = kind.guides_in(runtime) if guidance is None else flag("guidance", guidance)
    steps = kind.steps if steps is None else whole("steps", steps)
    if runtime == "sd.cpp":
        from vaemem.sdcpp import graphs, running  # a third of this module's import

        refuse(
            runtime, lora=lora, dtype=dtype, image=image, vae_memory_limit=vae_memory_limit, frames=frames,
            cudnn_version=cudnn_version, torch_version=torch_version, diffusers_version=diffusers_version,
        )  # fmt: skip
        card = find_card(gpu, memory, used, os)
        height, width, batch = whole("height", height), whole("width", width), whole("batch", batch)
        prompt_tokens = None if prompt_tokens is None else whole("prompt_tokens", prompt_tokens)
        made = pipeline, height, width, batch, steps, guidance and kind.guides, prompt_tokens, components or {}
        words = running.words_of(pipeline, offload, vae)
        direct = running.with_direct(pipeline, offload, words)
        ways = running.sdcpp_ways(*made, [words, direct] if direct != words else [words])
        run = {
            "model": pipeline, "height": height, "width": width, "batch": batch, "tokens": prompt_tokens,
            "device": card.gpu.name, "versions": graphs.SDCPP_VERSION,
        }  # fmt: skip
        return GraphPrediction(run, ways[0], card.available(), card, flag("safe", safe), ways[-1], model_note)
    given = PipelineArguments(
        pipeline, height, width, batch, prompt_tokens, guidance, dtype, components, image, steps, flag("safe", safe),
        frames, lora,
    )  # fmt: skip
    if runtime == "comfyui":
        refuse(
            runtime, lora=lora, vae_memory_limit=vae_memory_limit, diffusers_version=diffusers_version, frames=frames
        )
        software = Software(runtime, torch_version, cudnn_version)
        request = resolve_workflow(given, find_card(gpu, memory, used, os), software, offload, vae)
        return ComfyUIPrediction(replace(request, model_note=model_note))
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version, diffusers_version=diffusers_version)
    request = replace(resolve_pipeline(given, find_card(gpu, memory, used, os), software), model_note=model_note)
    return PipelinePrediction(request.run_with(offload, vae, vae_memory_limit))
