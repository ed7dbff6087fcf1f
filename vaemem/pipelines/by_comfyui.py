"""ComfyUI: its workflows' answers, and the ways of running them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vaemem import _core
from vaemem._common import MOST_BATCH, __version__, choose, meant, whole
from vaemem._errors import ArgumentError
from vaemem._render import Block, Bullets, Columns, Sizer
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.comfyui_classic import SOURCE
from vaemem.pipelines.comfyui_run import (
    COMFYUI_OPTIONS,
    DYNAMIC,
    USUAL_TILE,
    ComfyUIRun,
    WorkflowRequest,
    describe_decisions,
    plays_of,
)
from vaemem.pipelines.components import VAE_STRIDE, is_vae, weights_of
from vaemem.pipelines.offload_kinds import is_tile
from vaemem.pipelines.phased_answer import PlayedAnswer, as_far_as
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import find_frames, image_sides
from vaemem.pipelines.storage import stored
from vaemem.pipelines.ways import PipelinePlan, runs_out
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.default_dtypes import BFLOAT16_SM, usual_dtypes
from vaemem.prediction.phases import Result, Way
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.verdict import judge_played

NAMES = WORKFLOWS
UNUSED = "flash", "cache_limit", "types", "vae_memory_limit", "diffusers_version", "lora", "dtype"
_SLOW_HALF = re.compile(r"\b16[356]0|\bT(500|550|600|1000|1200|2000)|MX[45]50|CMP 30HX")  # it computes in float32 there
_LEAST_SM = 70


class ComfyUIPrediction(PlayedAnswer):
    """Prediction for ComfyUI, as `predict_pipeline` returns it. Sizes are in bytes.

    Attributes
    ----------
    title, phases, peak, bottleneck, fits, verdict, summary, spare, on_card, out_of_memory_at, available, band, upper
        As in `PipelinePrediction`. The run is always on this card, because the manager's decisions depend on the card.
    least : int
        The least `available` with which the workflow goes through. On smaller cards the managers decide otherwise, so
        the search plays their decisions: those of the dynamic manager node by node, in steps of 16 MiB; those of the
        classic manager in pages of 2 MiB.
    placed : dict of str to dict
        For each phase the models that the manager keeps on the card: {role: (bytes on the card, bytes of all)}.
    left : dict of str to list of str
        For each phase the roles of the models that leave the card, or leave it in part.
    paged : dict of str to (int, int)
        For each phase the bytes of weights that the first step of the dynamic manager sends, and each further one.
    estimates : dict of str to (int, int)
        For each phase ComfyUI's estimate for the call, with both prompts; and the bytes that the call allocates besides
        weights. The dynamic manager loads nothing by the estimates. ComfyUI has none for most text encoders.
    tiled : bool
        Whether the whole decode runs out of memory, so that ComfyUI decodes in tiles.
    host : int
        Bytes of weights in the host's memory: all of them, at the start.
    notes : tuple of str
        Known omissions, and substitutes for missing data.

    Examples
    --------
    >>> p = predict_pipeline("zimage-turbo", 1024, 1024, gpu="RTX 4060", runtime="comfyui")
    >>> p.verdict, p.placed["denoise"]["transformer"], p.paged["denoise"]
    ('fits', (..., 12309821472), (..., ...))
    """

    request: WorkflowRequest
    _outside = "pages of weights"

    def __init__(self, request: WorkflowRequest):
        self.request, self.model_note = request, request.model_note
        q, card = request, request.card
        batch = f", {q.batch} images" if q.batch > 1 else ""
        option = "" if q.offload == DYNAMIC else f", {q.offload}"
        self.title = f"{q.name} {q.size}{batch} by {SOURCE} ({card.gpu.name}, VAE {q.vae}{option})"
        here = ComfyUIRun.on_card(request, card.available())
        run = ComfyUIRun(request, card.available(), here.process.workspace, here)
        process, phases, played = run.process, run.phases(), here.phases()
        self._process, self._cudnn = process, getattr(process.workspace, "cudnn_version", None)
        self._run_row = {
            "model": q.name, "op": "pipeline", "height": q.height, "width": q.width, "batch": q.batch,
            "frames": q.frames if q.pipeline.frames else None, "tokens": q.tokens, "dtype": q.dtype,
            "runtime": "comfyui", "device": card.gpu.name,
            "way": f"VAE {q.vae}{option}", "source": "predicted",
            "versions": f"torch {process.torch_version}, {SOURCE}, vaemem {__version__}",
        }  # fmt: skip
        self.placed = {name: {**one.there} for name, one in here.sent.items()}
        self.left = {name: [*one.left] for name, one in here.sent.items()}
        self.paged = {name: (one.first, one.more) for name, one in here.sent.items()}
        self.tiled = here.tiled
        guesses = {"denoise": (1 + q.guided) * q.estimate(q.pipeline.denoiser), "decode": q.estimate("vae")}
        self.estimates = {one.name: (int(guesses.get(one.kind, 0)), one.allocated - one.weights) for one in phases}
        self.host = run.nbytes
        is_dynamic = q.offload == DYNAMIC  # then weights fill the card, and leave it for tensors
        shown = (*played, *phases[len(played) :]) if is_dynamic else phases
        self.result, self.here = as_far_as(shown, here.full), Result(played, here.full)
        self.notes = (*here.process.substitutions, *describe_decisions(here))
        plays = plays_of(run, not here.full)
        most = plays.takes.own if is_dynamic else self.peak
        took = most if is_dynamic else self.here.fullest.total if played else 0
        words = {"verb": "needs"} if is_dynamic else {}
        self.judged = judge_played(plays, here.process, most, took, here.full, **words)

    def _asked_data(self) -> dict[str, Any]:
        q = self.request
        names = "height width batch tokens dtype guidance steps offload vae"
        run = {name: getattr(q, name) for name in (*names.split(), *["frames"] * bool(q.pipeline.frames))}
        return {"pipeline": q.name, "runtime": "comfyui", **run}

    def _more_data(self) -> dict[str, Any]:
        phases = [
            {
                "phase": name, "estimate_bytes": self.estimates[name][0], "allocated_bytes": self.estimates[name][1],
                "left": left, "first_step_bytes": self.paged[name][0], "step_bytes": self.paged[name][1],
                "models": [
                    {"role": role, "loaded_bytes": loaded, "bytes": size}
                    for role, (loaded, size) in self.placed[name].items()
                ],
            }
            for name, left in self.left.items()
        ]  # fmt: skip
        return super()._more_data() | {"comfyui": {"phases": phases, "tiled": self.tiled}}

    def _costs(self, size: Sizer) -> list[str]:
        """Say if the decode is in tiles, and what the dynamic manager sends: a run that fits may be slow."""
        sent = max((more for _, more in self.paged.values()), default=0)
        slower = f"Of the denoiser's weights {size(sent)} have no room on the card: each step sends them."
        tiles = f"The whole decode has no room, so ComfyUI decodes in tiles of {self.request.fallback_pixels} pixels."
        return [*[tiles] * self.tiled, *super()._costs(size), *[slower] * bool(sent)]

    def _blocks(self, size: Sizer) -> list[Block]:
        rows = []
        for name, models in self.placed.items():
            there = (
                role if loaded == whole else f"{role} ({size(loaded)} of {size(whole)})"
                for role, (loaded, whole) in models.items()
            )
            guess, took = self.estimates[name]
            estimate, (first, more) = size(guess) if guess else "none", self.paged[name]
            steps = [size(more) if name.startswith("denoise") else ""]
            sent = [size(first), *steps] if self.request.offload == DYNAMIC else []
            rows.append([name, estimate, size(took), *sent, ", ".join(self.left[name]), ", ".join(there)])
        paged = ["sent first", "sent per step"] if self.request.offload == DYNAMIC else []
        header = ["phase", "estimate", "needed", *paged, "leaves", "models on the card"]
        title = "ComfyUI's estimate of each phase besides weights, and where weights are:"
        return [self._grid(size), Columns(header, rows, title=title), Bullets(self.notes, detail=True)]


def predict(given: PipelineArguments) -> ComfyUIPrediction:
    """Answer `vaemem.predict_pipeline`."""
    return ComfyUIPrediction(_resolve(given, given.offload, given.vae))


def plan(given: PlanArguments) -> PipelinePlan:
    """Answer `vaemem.plan_pipeline`: with each option of the program, and with either node for the decode."""
    machine = given.machine()
    found = []
    nodes = ("whole",) if given.known.owns_tiles else ("whole", "tiled")
    for option, vae in itertools.product(COMFYUI_OPTIONS, nodes):
        p = ComfyUIPrediction(_resolve(given, option, vae))
        phases = tuple(phase._replace(work=p.work(phase, machine)) for phase in p.phases)
        words, given_words = ("no option", "") if option == DYNAMIC else (option, f" {option}")
        node = "VAE Decode (Tiled)" if vae == "tiled" else "VAE Decode"
        changes = "tiles are blended where they overlap" if vae == "tiled" or p.tiled else ""
        code = f"python main.py{given_words}  # with the node {node}"
        settings = {"offload": option, "vae": vae}
        found.append(
            Way(f"{words}, {node}", settings, phases, p.host, changes, p.notes, runs_out(p.judged), True,
                p.tight_because, code)
        )  # fmt: skip
    return given.plan(p.request.size, given.software.program, found, machine)


def _resolve(given: PipelineArguments, offload: Any, vae: Any) -> WorkflowRequest:
    """Resolve names and defaults of a workflow. ValueError names the argument that has no answer."""
    name, known = given.pipeline, given.known
    if given.image:
        raise ArgumentError(
            "image", "False with runtime='comfyui': its workflow begins with an empty latent", str(given.image)
        )
    offload = meant("offload", offload, COMFYUI_OPTIONS, {"aimdo": DYNAMIC, "dynamic": DYNAMIC, "comfyaimdo": DYNAMIC})
    how, _, side = str(vae).partition(" ")
    if how == "tiled" and side and not is_tile(side, 2 * VAE_STRIDE):
        raise ArgumentError("vae", "the side of a tile in pixels, a multiple of 16 as in 'tiled 512'", repr(vae))
    vae = f"tiled {side or USUAL_TILE}" if how == "tiled" else meant("vae", vae, ("whole", "tiled"))
    if vae != "whole" and known.owns_tiles:
        raise ArgumentError("vae", f"whole with {name}, whose VAE makes tiles by itself", repr(vae))
    gpu = given.card.gpu
    least_sm = BFLOAT16_SM if known.dtype == "bfloat16" else _LEAST_SM
    if gpu.maker != "NVIDIA" or gpu.sm < least_sm or _SLOW_HALF.search(gpu.name):
        least = f"an NVIDIA card of compute capability {least_sm / 10:.1f} or more but no GTX 16"
        needed = f"{least}, with {name} and runtime='comfyui'"
        raise ArgumentError("gpu", needed, repr(gpu.name), "ComfyUI chooses other types and sizes there")
    height, width = image_sides(given.height, given.width, known.stride, f" for {name}", known.most_side)
    asked = known.tokens if given.prompt_tokens is None else given.prompt_tokens
    if not known.has_words and given.prompt_tokens is not None:
        raise ArgumentError("prompt_tokens", f"None with {name}, which pads every prompt", str(given.prompt_tokens))
    for role in given.components or {}:
        choose("components", role, [role for role in known.parts if role != "vae"])
    batch = whole("batch", given.batch, most=MOST_BATCH)
    if 0 < known.most_batch < batch:
        raise ArgumentError(
            "batch", f"at most {known.most_batch} with {name}: larger batches were not recorded", str(given.batch)
        )
    types = given.components or {}
    parts = tuple(_part(role, component, types.get(role), gpu.sm) for role, component in known.parts.items())
    guidance = (known.guides if given.guidance is None else given.guidance) and known.guides
    software = replace(given.software, allocator="cudaMallocAsync")
    return WorkflowRequest(
        given.card, software, name, height, width, batch, whole("prompt_tokens", asked), guidance, given.step_count,
        False, parts, offload=offload, vae=vae, safe=given.safe, model_note=given.model_note,
        frames=find_frames(given, known),
    )  # fmt: skip


def vae_dtype(component: str, sm: int) -> str:
    """Return the type in which ComfyUI runs a VAE on a card of that compute capability."""
    return usual_dtypes("comfyui", component, sm, False).dtype


def _part(role: str, component: str, given: Any, sm: int) -> Part:
    """Store a model's weights in the type of its files, or in float8, as "Load Diffusion Model" can cast them; and a
    VAE's in the one that ComfyUI chooses for the card."""
    if is_vae(component):
        weights: Iterable[Sequence[Any]] = _core.Trace.parameters(architecture(component), "comfyui")
        dtype = vae_dtype(component, sm)
        return Part(role, component, dtype, tuple(stored(weights, dtype, "all", dtype)))
    dtype = recorded_modules.load_program(component).dtypes[0]
    type = dtype if given is None else meant(f"components[{role!r}]", given, (dtype, "fp8"))
    return Part(role, component, dtype, tuple(stored(weights_of(component), type, "all", dtype)))
