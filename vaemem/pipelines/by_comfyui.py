"""ComfyUI: its workflows' answers, and the ways of running them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from vaemem import _core
from vaemem._common import MOST_BATCH, __version__, meant, whole
from vaemem._errors import ArgumentError
from vaemem._render import Block, Bullets, Columns, Sizer
from vaemem.pipelines import programs
from vaemem.pipelines.comfyui_run import (
    CLIP,
    COMFYUI_OPTIONS,
    DYNAMIC,
    FALLBACK_TILE,
    WORKFLOWS,
    ComfyUIRun,
    describe_decisions,
    plays_of,
)
from vaemem.pipelines.components import VAE_STRIDE, weights_of
from vaemem.pipelines.phased import PlayedAnswer, as_far_as
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest, image_sides, is_tile
from vaemem.pipelines.storage import stored
from vaemem.pipelines.ways import PipelinePlan, runs_out
from vaemem.prediction.planned import Result, Way
from vaemem.prediction.runtimes import architecture, shipped_models
from vaemem.prediction.usual import BFLOAT16_SM, usual_dtypes
from vaemem.prediction.verdict import judge_played

NAMES = WORKFLOWS
UNUSED = "flash", "cache_limit", "types", "vae_memory_limit", "diffusers_version", "frames", "lora"
_SLOW_HALF = re.compile(r"\b16[356]0|\bT(500|550|600|1000|1200|2000)|MX[45]50|CMP 30HX")  # it computes in float32 there


class ComfyUIPrediction(PlayedAnswer):
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


def predict(given: PipelineArguments) -> ComfyUIPrediction:
    """Answer `vaemem.predict_pipeline`."""
    return ComfyUIPrediction(_resolve(given, given.offload, given.vae))


def plan(given: PlanArguments) -> PipelinePlan:
    """Answer `vaemem.plan_pipeline`: with each option of the program, and with either node for the decode."""
    machine = given.machine()
    found = []
    for option, vae in itertools.product(COMFYUI_OPTIONS, ("whole", "tiled")):
        p = ComfyUIPrediction(_resolve(given, option, vae))
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
    return given.plan(f"{given.height}x{given.width}", given.software.program, found, machine)


def _resolve(given: PipelineArguments, offload: Any, vae: Any) -> PipelineRequest:
    """Resolve names and defaults of a workflow. ValueError names the argument that has no answer."""
    name, known = given.pipeline, given.known
    if given.image:
        raise ArgumentError(
            "image", "False with runtime='comfyui': its workflow begins with an empty latent", str(given.image)
        )
    if offload == "--disable-dynamic-vram":  # newer versions then have the classic manager
        offload = COMFYUI_OPTIONS[0]
    if isinstance(offload, str) and re.search("aimdo|dynamic", offload):
        raise ArgumentError("offload", ", ".join(map(repr, COMFYUI_OPTIONS)), repr(offload), DYNAMIC)
    offload = meant("offload", offload, COMFYUI_OPTIONS)
    how, _, side = str(vae).partition(" ")
    if how == "tiled" and side and not is_tile(side, 2 * VAE_STRIDE):
        raise ArgumentError("vae", "the side of a tile in pixels, a multiple of 16 as in 'tiled 512'", repr(vae))
    vae = f"tiled {side or FALLBACK_TILE}" if how == "tiled" else meant("vae", vae, ("whole", "tiled"))
    gpu, work = given.card.gpu, WORKFLOWS[name]
    if gpu.maker != "NVIDIA" or gpu.sm < work.least_sm or _SLOW_HALF.search(gpu.name):
        least = f"an NVIDIA card of compute capability {work.least_sm / 10:.1f} or more but no GTX 16"
        needed = f"{least}, with {name} and runtime='comfyui'"
        raise ArgumentError("gpu", needed, repr(gpu.name), "ComfyUI chooses other types and sizes there")
    height, width = image_sides(given.height, given.width, known.stride, f" for {name}", known.most_side)
    half = gpu.sm >= BFLOAT16_SM
    asked = work.tokens if given.prompt_tokens is None else given.prompt_tokens
    tokens = max(whole("prompt_tokens", asked), work.least_tokens)
    types = {CLIP: work.encoder_dtype, known.denoiser: given.dtype or work.dtypes[0 if half else 1],
             "vae": usual_dtypes("comfyui", known.parts["vae"], gpu.sm, False).dtype}  # fmt: skip
    for role, type in (given.components or {}).items():
        if role != "vae":
            raise ArgumentError("components", "a type for 'vae' only, with runtime='comfyui'", repr(role))
        types[role] = meant("components['vae']", type, ("float16", "bfloat16", "float32"))
    modules = {CLIP: work.encoder, known.denoiser: work.denoiser, "vae": known.parts["vae"]}
    parts = tuple(_part(role, component, types[role]) for role, component in modules.items())
    if 0 < known.most_batch < whole("batch", given.batch):
        raise ArgumentError(
            "batch", f"at most {known.most_batch} with {name}: larger batches were not recorded", str(given.batch)
        )
    guides = given.guidance is None or given.guides  # its workflows have a negative prompt
    guidance, batch = guides and known.guides, whole("batch", given.batch, most=MOST_BATCH)
    return PipelineRequest(
        given.card, given.software, name, height, width, batch, tokens, guidance, given.step_count, False, parts,
        offload=offload, vae=vae, safe=given.safe, model_note=given.model_note,
    )  # fmt: skip


def _part(role: str, component: str, dtype: str) -> Part:
    """Store a model's weights in a type."""
    weights: Iterable[Sequence[Any]]
    if component in shipped_models():
        weights = _core.Trace.parameters(architecture(component), "comfyui")
    else:
        weights = weights_of(component)
        meant("dtype", dtype, programs.load_program(component).dtypes)
    return Part(role, component, dtype, tuple(stored(weights, dtype, "all", dtype)))
