"""`plan_pipeline`: every sensible way to run a pipeline on a card or in a given amount of memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from vaemem._arguments import shared
from vaemem._common import DTYPES, ELEMENT_BYTES, MIB, choose, flag, listed, meant, real, whole
from vaemem._errors import ArgumentError, Named
from vaemem._script import write_script
from vaemem._types import Dtype
from vaemem.engine.limits import available_memory, parse_size
from vaemem.engine.names import shared_note
from vaemem.engine.weights import told_bytes
from vaemem.pipelines import ways_mlx
from vaemem.pipelines.comfyui_run import COMFYUI_OPTIONS, resolve_workflow
from vaemem.pipelines.components import PIPELINES, is_vae, known_pipeline, refuse, weights_of
from vaemem.pipelines.group_offload import GROUPS_SINCE, GroupOffload
from vaemem.pipelines.pipeline_parts import parts_of
from vaemem.pipelines.pipeline_request import (
    SMALLER,
    PipelineArguments,
    PipelineRequest,
    begins_with,
    resolve_pipeline,
    smaller_roles,
)
from vaemem.pipelines.predict_pipeline import ComfyUIPrediction, PipelinePrediction, pipelines_of
from vaemem.pipelines.quantising import SCHEMES, UNSENT
from vaemem.pipelines.recipe import diffusers_steps, hires_steps
from vaemem.pipelines.ways import PipelinePlan, Room, outcome, runs_out
from vaemem.prediction.gpus import Gpu, sold
from vaemem.prediction.planned import Way
from vaemem.prediction.request import Card, Software, find_card
from vaemem.prediction.seconds import Machine, machine_of
from vaemem.prediction.usual import FIXED
from vaemem.prediction.verdict import judge_phases

PlannedRuntime = Literal["diffusers", "sd.cpp", "mlx", "comfyui"]
PLANNED_RUNTIMES = get_args(PlannedRuntime)
# GPU memory of vaemem's decode without its weights, in units of T = 128 * height * width * bytes per number. Plans need
# 3.03 to 3.19 from 256x256 to 4096x4096 (docs/CUDA.md).
VAE_LIMIT = 3.2
SEQUENTIAL = "Sequential offload: transfers of weights are counted; the overhead of accelerate's hooks is not."
GROUPS = "Group offload without streams: weights go to the card and back, and both count; nothing overlaps."
STREAM = "leaf_level stream"
# If the host's memory is neither given nor known: a usual machine, and the part that everything else on it takes.
USUAL_HOST, FOR_OTHERS = "32 GB", 2 << 30
HERE, USUAL = "{} free in this machine", f"{{}} in an assumed machine of {USUAL_HOST}"
WITH_LORA = (
    "With a LoRA, group offload and smaller types of weights are not tried, although diffusers has them: nobody"
    " compared their memory."
)


@shared
def plan_pipeline(
    pipeline: str, height: int, width: int, batch: int = 1, *, memory: int | str | None = None,
    host_memory: int | str | None = None, gpu: str | Gpu | None = None, runtime: PlannedRuntime = "diffusers",
    prompt_tokens: int | None = None, guidance: bool | None = None, image: bool | tuple[int, int] = False,
    steps: int | None = None, dtype: Dtype | None = None, components: Mapping[str, Any] | None = None, lora: Any = None,
    types: str | Sequence[str | None] | None = None, used: int | str = 0,
    calibrate: Mapping[str, float] | None = None, time_limit: float | None = None, flash: bool = False,
    cache_limit: int | str | None = None, link: str = "PCIe 3.0 x16", cpu: str = "AVX2", cores: int | None = None,
    cudnn_version: str | None = None, torch_version: str | None = None, safe: bool = True,
    os: str = "linux", diffusers_version: str | None = None, frames: int | None = None,
) -> PipelinePlan:  # fmt: skip
    """List the sensible ways to run a pipeline: whether each fits, where it runs out, how long it takes.

    Parameters
    ----------
    pipeline : shared
    height, width, batch : int
        The images' size in pixels, and their number.
    memory : int or str, optional
        The card's memory, as cards are sold (``"12 GB"``), if its name does not tell it or no card is named.
    host_memory : int or str, optional
        Host memory for weights that are not on the card. By default, if the question is about this machine, its free
        memory: if no card and no memory is named, and the machine has a card. Otherwise 30 GB of a
        machine of 32 GB are assumed, as the first lines say.
    gpu : str or Gpu, optional
        The card. By default this machine's card if no `memory` is given. Otherwise a card of that memory or an RTX 4090
        stands for it, as the first line says. Seconds then need measurements in `calibrate`.
    runtime : {"diffusers", "sd.cpp", "mlx"}
        sd.cpp is stable-diffusion.cpp with CUDA (`vaemem.sdcpp.running`). Its `components` are ggml types such as
        ``"Q8_0"`` (the default of FLUX and Z-Image), sizes such as ``"6.8 GiB"``, or files. With mlx, `memory` is the
        Mac's, and Metal is assumed to get two thirds. An mlx plan is for mflux. It covers all weights and the decode
        (`vaemem.pipelines.ways_mlx`), without other activations and seconds.
    prompt_tokens, guidance, image, steps : shared
    dtype of a pipeline : shared
    components, lora : shared
    cudnn_version, torch_version, diffusers_version, frames : shared
    types : str or sequence of str or None, optional
        Types to try for the largest components' weights; None stands for their own type, the default. By default
        diffusers also tries ``"Q8_0"``, for the denoiser alone, and ``"nf4"`` if the denoiser takes more than half of
        the card. sd.cpp also tries ``"Q4_K"`` if nothing else fits.
    used, os : shared
    calibrate : dict of str to float, optional
        Seconds measured on this machine, by names of ways. They adjust the machine's rates, and with them the seconds
        of all other ways.
    time_limit : float, optional
        A way that takes more seconds does not count as fitting.
    flash : bool
        Whether stable-diffusion.cpp runs with ``--diffusion-fa``.
    cache_limit : int or str, optional
        Freed memory that MLX's allocator may keep, by ``--mlx-cache-limit-gb``.
    link : str
        The link between host and card, such as ``"PCIe 4.0 x16"``, by its name in `vaemem.prediction.seconds`.
    cpu : str
        The host CPU's instruction set: ``"SSE4.2"``, ``"AVX"``, ``"AVX2"`` or ``"no AVX2"``.
    cores : int, optional
        Cores of the host's CPU.
    safe : bool
        Whether to recommend a way that fits before a tight one (`Outcome.verdict`). This is the default.

    Returns
    -------
    PipelinePlan
        Printing it shows everything; ``.recommended`` and ``.reason`` name the best way.

    Raises
    ------
    ValueError
        An argument that `predict_pipeline` refuses, or an unknown way in `calibrate`.

    Notes
    -----
    docs/PIPELINES.md explains the seconds.

    Examples
    --------
    >>> plan = plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060", memory="4 GB", safe=False)
    >>> plan["no offload, VAE whole"].summary
    'runs out in decode, ... short'
    >>> plan.recommended.way.name
    'model offload, VAE whole'
    >>> print(plan.recommended.seconds)
    32 s (20 to 53)
    """
    taken = tuple(filter(None, [shared_note(pipeline, "pipeline")]))
    runtime = meant("runtime", runtime, PLANNED_RUNTIMES)
    pipeline = known_pipeline("pipeline", pipeline, pipelines_of(runtime))
    image, flash, safe = begins_with(image), flag("flash", flash), flag("safe", safe)
    guidance = PIPELINES[pipeline].guides_in(runtime) if guidance is None else flag("guidance", guidance)
    refuse(
        runtime, lora=lora, prompt_tokens=prompt_tokens, steps=steps, dtype=dtype, cudnn_version=cudnn_version,
        torch_version=torch_version, diffusers_version=diffusers_version, gpu=gpu, host_memory=host_memory,
        calibrate=calibrate or None,
        time_limit=time_limit, types=types, flash=flash, cache_limit=cache_limit, image=image, frames=frames,
    )  # fmt: skip
    known, batch = PIPELINES[pipeline], whole("batch", batch)
    height, width = whole("height", height), whole("width", width)
    title = f"{pipeline} {height}x{width}{f', {batch} images' if batch > 1 else ''} by {runtime}"
    components = components or {}
    if runtime == "mlx":
        if memory is None:
            raise ArgumentError("memory", "the memory of the Mac, such as '16 GB'", "None")
        if pipeline not in ways_mlx.MFLUX:
            advice = (Named("runtime", "diffusers"), " predicts it")
            raise ArgumentError("pipeline", f"one of {', '.join(ways_mlx.MFLUX)} with mflux", repr(pipeline), advice)
        share, of = ways_mlx.WORKING_SET
        limit = None if cache_limit is None else parse_size("cache_limit", cache_limit, least=0)
        for role in components:
            choose("components", role, (*known.encoders, known.denoiser))
        sizes = {
            role: weights_bytes(role, known.parts[role], components.get(role, known.dtype))
            for role in (*known.encoders, known.denoiser)
        }
        denoiser = sizes.pop(known.denoiser)
        ways = ways_mlx.mlx_ways(known.parts["vae"], height, width, sum(sizes.values()), denoiser, limit)
        return PipelinePlan(f"{title} on a Mac of {memory}", ways, Room(sold(memory) * share // of), safe=safe)
    from vaemem.sdcpp import running  # half of this module's import

    asked, dtype = dtype, meant("dtype", known.dtype if dtype is None else dtype, DTYPES)
    card = find_card(gpu, memory, used, os)
    available = card.available()
    host, of_host = _host_memory(host_memory, gpu is None and memory is None and not card.assumed)
    room = Room(available, host, time_limit, of_host)
    steps = known.steps if steps is None else whole("steps", steps)
    if time_limit is not None and not real(time_limit) > 0:
        raise ArgumentError("time_limit", "more than 0 seconds", repr(time_limit))
    named = None if card.assumed else card.gpu
    program = "diffusers" if runtime == "comfyui" else runtime  # both run PyTorch
    likely = machine_of(named, card.gpu.total_memory, dtype, program, link, cpu, cores)
    is_known = named is not None and not card.gpu.coarse  # whether its speed is known
    machine = likely if is_known or calibrate else None
    kinds = None if types is None else listed(types, str)
    if kinds == []:
        raise ArgumentError("types", "at least one type, or None", "none")
    if runtime == "sd.cpp":
        made = pipeline, height, width, batch, steps, guidance and known.guides, prompt_tokens, components
        make = functools.partial(running.sdcpp_ways, *made)
        ways = make([words for kind in kinds or [None] for words in running.planned_words(flash, kind)])
        if kinds is None and not any(outcome(way, room, None).fits for way in ways):
            ways += make(running.planned_words(flash, running.SMALLER_TYPE))
        keeps: dict[str, Any] = {"kept_more": card.kept_more, "windows": card.is_windows}
        verdicts = [judge_phases(way.phases, available, **keeps) for way in ways]
        ways = [way._replace(unsure=one.tight_because) for way, one in zip(ways, verdicts, strict=True)]
    else:
        software = Software(runtime, torch_version, cudnn_version, diffusers_version=diffusers_version)
        title = title.replace("by diffusers", f"by {software.program}")
        given = PipelineArguments(
            pipeline, height, width, batch, prompt_tokens, guidance, asked, components, image, steps, lora=lora,
            frames=frames,
        )  # fmt: skip
    if runtime == "comfyui":
        ways = comfyui_ways(given, card, software, machine)
    elif runtime == "diffusers":
        request = resolve_pipeline(given, card, software)
        title = title.replace(f"{height}x{width}", f"{request.size} {request.after}".strip())
        ways = diffusers_ways(request, components, machine, kinds)
    title = f"{title}, {steps} steps, on {card.gpu.name}"
    plan = PipelinePlan(title, ways, room, machine, calibrate, taken, safe, card.assumed)
    plan.left_out = WITH_LORA if runtime == "diffusers" and request.loras else ""
    return plan


def _host_memory(given: int | str | None, is_here: bool) -> tuple[int, str]:
    """Return the host's memory for weights, and words for its source. is_here: whether this machine is meant."""
    if given is not None:
        return parse_size("host_memory", given), ""
    free = available_memory() if is_here else None
    return (sold(USUAL_HOST) - FOR_OTHERS, USUAL) if free is None else (free, HERE)


def weights_bytes(role: str, component: str, given: Any) -> int:
    """Return the bytes of a component's weights.

    Parameters
    ----------
    role, component : str
        Such as ``"unet"``, played by ``"sd15-unet"``.
    given : str or path
        A size as a program prints it (``"6.8 GiB"``), a file with a header that lists its tensors, or a dtype.

    Examples
    --------
    >>> weights_bytes("unet", "sd15-unet", "float16"), weights_bytes("unet", "sd15-unet", "1.6 GiB")
    (1719041928, 1717986918)
    """
    told = told_bytes(role, given)
    if told is not None:
        return told
    dtype = meant(f"components[{role!r}]", given, DTYPES)
    return sum(weight.nbytes(dtype) for weight in weights_of(component))


def diffusers_ways(
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
        "streamed group offload": STREAM,
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
                if offload == STREAM and q.part("vae").upcast and not is_fixed:
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


def comfyui_ways(
    given: PipelineArguments, card: Card, software: Software, machine: Machine | None
) -> list[Way]:  # fmt: skip
    """List the ways of a workflow: with each option of the program, and with either node for the decode."""
    found = []
    for option, vae in itertools.product(COMFYUI_OPTIONS, ("whole", "tiled")):
        p = ComfyUIPrediction(resolve_workflow(given, card, software, option, vae))
        phases = tuple(phase._replace(work=p.work(phase, machine)) for phase in p.phases)
        words, given_words = ("no option", "") if option == "none" else (option, f" {option}")
        node = "VAE Decode (Tiled)" if vae == "tiled" else "VAE Decode"
        changes = "tiles are blended where they overlap" if vae == "tiled" or p.tiled else ""
        code = f"python main.py{given_words}  # with the node {node}"
        settings = {"offload": option, "vae": vae}
        found.append(
            Way(f"{words}, {node}", settings, phases, p.host, changes, p.notes, runs_out(p.judged), True,
                p.tight_because, code)
        )  # fmt: skip
    return found
