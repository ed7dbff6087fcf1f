"""diffusers: its pipelines' answers, and the ways of running them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vaemem._common import ELEMENT_BYTES, MIB, __version__
from vaemem._script import write_script
from vaemem.pipelines.components import CLIP_TOKENS, PIPELINES, is_vae
from vaemem.pipelines.diffusers_run import play_pipeline
from vaemem.pipelines.offload_kinds import GROUPS_SINCE, OFFLOADS, GroupOffload
from vaemem.pipelines.phased_answer import UNCOMPARED, PlayedAnswer, read_phases
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.pipeline_parts import PLACES, parts_of
from vaemem.pipelines.pipeline_request import SMALLER, PipelineRequest, resolve_pipeline, smaller_roles
from vaemem.pipelines.quantising import BITSANDBYTES, SCHEMES, UNPACKING, UNSENT
from vaemem.pipelines.recipe import diffusers_steps, hires_steps
from vaemem.pipelines.ways import PipelinePlan, runs_out
from vaemem.prediction.closed_form import PlayedPeak
from vaemem.prediction.default_dtypes import FIXED, OVERFLOWING
from vaemem.prediction.formula import Formula
from vaemem.prediction.gpus import known_gpu
from vaemem.prediction.held_tensors import Moment
from vaemem.prediction.peak_equations import BATCHES, Grid, Point
from vaemem.prediction.phases import Way
from vaemem.prediction.predict_vae import SMALL_TILE, Advice
from vaemem.prediction.process import ROUNDED_UP
from vaemem.prediction.recording_files import is_recording
from vaemem.prediction.request import usual_tile
from vaemem.prediction.runtimes import WANS, architecture
from vaemem.prediction.seconds import Machine
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS

NAMES = PIPELINES
UNUSED = "flash", "cache_limit"
_TRIED = ("NVIDIA H100", "NVIDIA H200")
BY_VAEMEM = "vaemem's code has run on one kind of GPU only, an H100 and an H200"
# GPU memory of vaemem's decode without its weights, in units of T = 128 * height * width * bytes per number. Plans need
# 3.03 to 3.19 from 256x256 to 4096x4096 (docs/CUDA.md).
VAE_LIMIT = 3.2
SEQUENTIAL = "Sequential offload: transfers of weights are counted; the overhead of accelerate's hooks is not."
GROUPS = "Group offload without streams: weights go to the card and back, and both count; nothing overlaps."
_STREAM = "leaf_level stream"
WITH_LORA = (
    "With a LoRA, group offload and smaller types of weights are not tried, although diffusers has them: nobody"
    " compared their memory."
)


def _play_phases(request: PipelineRequest, workspace: Any, point: Point) -> dict[str, PlayedPeak]:
    """Return the memory of each phase at a point."""
    at = replace(request, height=point.height, width=point.width, batch=point.batch)
    run = play_pipeline(replace(at, tokens=point.tokens or at.tokens), workspace)
    seen = {}
    for one in read_phases(run.process, run.names):
        tensors = {name: size for name, size in one.peak_tensors if name != ROUNDED_UP}
        seen[one.name] = PlayedPeak(one.total, one.allocated, one.where, tensors)
    return seen


class PipelinePrediction(PlayedAnswer):
    """Prediction for diffusers, as `predict_pipeline` returns it. Sizes are in bytes.

    Attributes
    ----------
    title : str
        The pipeline and its settings.
    phases : tuple of Phase
        In order: load (if something is loaded first), encode prompt, encode image (if there is one), denoise, decode.
    peak : int
        The most memory of the card that the process holds at once: PyTorch's reserved memory plus vaemem's. The peak
        assumes a card large enough for PyTorch to reserve freely.
    bottleneck : str
        The phase with this peak.
    fits : bool
        Whether the verdict is "fits" or "tight"; with ``safe=True`` whether it is "fits".
    verdict : str
        ``"fits"``, if even `upper` fits; ``"tight"``; or ``"does not fit"``. A tight run goes through, but `upper` does
        not fit; or the run depends on PyTorch's release of cached memory, on unknown next plans of a cuDNN before 9.8,
        or on vaemem's decoder on a card other than an H100 or H200, where the decoder never ran.
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
        workspace. If the next plans are unknown, the band ends at the least `available` with the first plan's
        workspaces.
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
            "way": f"offload {q.offload}, VAE {q.vae}{more}", "source": "predicted",
            "frames": q.frames if q.pipeline.frames else None,
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
            covers=f", at {q.size} in place of {q.made_of}" if q.made_of else "",
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
        known = f"sides of {q.pipeline.class_name} are multiples of {q.pipeline.stride}"
        if q.pipeline.frames:
            known = f"frames of {q.pipeline.class_name} are {q.pipeline.frame_factor} n + {q.pipeline.clip[0]}"
        yield f"{q.size} is predicted in place of {q.made_of}: known {known}"
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


def predict(given: PipelineArguments) -> PipelinePrediction:
    """Answer `vaemem.predict_pipeline`."""
    request = resolve_pipeline(given, given.card, given.software)
    return PipelinePrediction(request.run_with(given.offload, given.vae, given.vae_memory_limit))


def plan(given: PlanArguments) -> PipelinePlan:
    """Answer `vaemem.plan_pipeline`."""
    machine, request = given.machine(), resolve_pipeline(given, given.card, given.software)
    ways = _ways(request, given.components or {}, machine, given.types)
    found = given.plan(f"{request.size} {request.after}".strip(), given.software.program, ways, machine)
    found.left_out = WITH_LORA if request.loras else ""
    return found


def _ways(
    request: PipelineRequest, components: Mapping[str, Any], machine: Machine | None,
    types: Sequence[str | None] | None,
) -> list[Way]:  # fmt: skip
    """List all ways of a request that offloads nothing, the plainest first. The machine decides whether a text encoder
    spends longer on computing or on reading its weights. By default, also try smaller types if the denoiser takes more
    than half of the card."""
    q, pipeline, release = request, request.pipeline, request.software.release
    if types is None:
        is_large = 2 * q.part(pipeline.denoiser).nbytes > q.card.available()
        types = (None, *SMALLER) if is_large and not q.loras else (None,)
    by_block: dict[str, Any] = {"offload_type": "block_level", "num_blocks_per_group": 1}
    offloads: dict[str, Any] = {
        "no offload": "none",
        "model offload": "model",
        "group offload by block": "block_level 1" if q.groups_vae else by_block | {"exclude_modules": ["vae"]},
        "group offload by leaf": "leaf_level",
        "streamed group offload": _STREAM,
        "sequential offload": "sequential",
        "text encoders on CPU": {part.role: "cpu" for part in q.parts if part.role in pipeline.encoders},
    }
    is_known = is_vae(q.part("vae").component)
    by_torch = ["whole", *["sliced"] * (is_known and q.batch > 1), *q.tilings]
    by_torch += ["whole in float16"] * q.part("vae").upcast
    full = 128 * q.height * q.width * ELEMENT_BYTES[q.part("vae").dtype]
    limit = f"{int((q.part('vae').nbytes + VAE_LIMIT * full) // MIB) + 1} MiB"  # vaemem decodes images one by one
    found = []
    for kind in types:
        roles = [role for role in smaller_roles(pipeline, kind) if role not in components] if kind else []
        if kind and not roles:
            continue
        given = {**components, **dict.fromkeys(roles, kind)}
        stored = q if kind is None else replace(q, parts=parts_of(pipeline, q.dtype, given, release, q.loras))
        for place, offload in offloads.items():
            if not offload or (pipeline.is_modular and offload != "none"):  # no text encoder, or no method for it
                continue
            is_group = GroupOffload.read(offload) is not None
            is_hooked = is_group or offload == "sequential"
            unmoved = SCHEMES if is_group else UNSENT if is_hooked else ()
            is_left_out = is_group and (kind or q.loras or release < GROUPS_SINCE)
            if is_left_out or any(part.has(unmoved) for part in stored.parts):
                continue
            # vaemem only decodes, and hooks on submodules work with PyTorch's modules only.
            by_vaemem = is_known and not (q.encodes or pipeline.frames or is_hooked)
            for vae in [*by_torch, *["vaemem"] * by_vaemem]:
                is_fixed = vae.endswith(" in float16")
                held = {**given, "vae": "float16"} if is_fixed else given
                if offload == _STREAM and q.part("vae").upcast and not is_fixed:
                    continue  # diffusers' decode fails
                settings: dict[str, Any] = {"offload": offload, "vae": vae.removesuffix(" in float16")}
                settings |= {"dtype": q.dtype} | ({"components": held} if held else {})
                how, changes = f"VAE {vae}", ["tiles are blended where they overlap"] * vae.startswith("tiled")
                changes += [f"{FIXED} decodes it a little differently"] * is_fixed
                if vae == "vaemem":
                    how, settings["vae_memory_limit"] = f"VAE by vaemem in {limit}", limit
                if kind:
                    how, changes = f"{how}, {kind}", [*changes, f"weights in {kind} are rounded"]
                run = replace(stored, parts=parts_of(pipeline, q.dtype, held, release, q.loras)) if is_fixed else stored
                p = PipelinePrediction(run.run_with(offload, settings["vae"], settings.get("vae_memory_limit")))
                way = _way(p, f"{place}, {how}", settings, " and ".join(changes), machine)
                steps = diffusers_steps(pipeline, **settings, release=release, loras=q.loras)
                steps += hires_steps(q.first, q.height, q.width, offload) if q.first else []
                found.append(way._replace(code=write_script(steps), rounds=kind is not None))
    return found


def _way(p: PipelinePrediction, name: str, settings: Mapping[str, Any], changes: str, machine: Machine | None) -> Way:
    read = {"disk": float(sum(part.file_bytes for part in p.parts.values()))}
    works = (read if phase.name == "load" else p.work(phase, machine) for phase in p.phases)
    phases = tuple(phase._replace(work=work) for phase, work in zip(p.phases, works, strict=True))
    group = p.request.group
    notes = (
        *p.notes,
        *[SEQUENTIAL] * (settings["offload"] == "sequential"),
        *[GROUPS] * (group is not None and not group.use_stream),
    )
    return Way(name, settings, phases, p.host, changes, notes, runs_out(p.judged), True, p.tight_because)
