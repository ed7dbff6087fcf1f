"""Ways of running a pipeline with diffusers: offloading, how its VAE decodes, and types of the largest weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, MIB
from vaemem.pipelines.asked import PipelineQuestion
from vaemem.pipelines.components import CLIPS, PIPELINES, Pipeline
from vaemem.pipelines.diffusers import PipelineCall
from vaemem.pipelines.parts import parts_of
from vaemem.pipelines.pipeline_run import Part, Phase
from vaemem.pipelines.predict_pipeline import PipelinePrediction
from vaemem.pipelines.seconds import Machine
from vaemem.pipelines.storage import FOUR_BITS
from vaemem.prediction.planned import PlannedPhase, Way
from vaemem.prediction.question import usual_tile

# What vaemem's decode takes on a GPU beside its weights, in T = 128 * height * width * bytes of a number: 3.03 to 3.19
# are planned from 256x256 to 4096x4096 (docs/CUDA.md).
VAE_LIMIT = 3.2
SEQUENTIAL = (
    "Sequential offload: what accelerate's hooks take at each submodule, beside moving its weights, is not counted."
)
SMALLER = ("Q8_0", "nf4")  # GGUF's and bitsandbytes'


def ways(
    question: PipelineQuestion, components: Mapping[str, Any], machine: Machine | None,
    types: Sequence[str | None] | None,
) -> list[Way]:  # fmt: skip
    """All of them, the plainest first.

    Parameters
    ----------
    question : PipelineQuestion
        Nothing offloaded, with the `components` that `predict_pipeline` takes.
    machine : Machine or None
        Decides whether a text encoder computes or reads its weights for longer.
    types : sequence of str or None, optional
        For the weights of the denoiser and of text encoders as large, one after the other; None stands for what they
        are run in. By default that, and smaller ones where the denoiser takes more than half of the card.
    """
    found: list[_Asked] = []
    kinds: list[str | None] = [None] if types is None else list(types)
    pipeline, call = question.pipeline, question.call
    has_tiles = max(call.height, call.width) > usual_tile(pipeline.parts["vae"])
    for kind in kinds:
        large = {} if kind is None else {role: kind for role in _large(pipeline) if role not in components}
        given = {**components, **large}
        stored = replace(question, parts=parts_of(pipeline, question.dtype, given)) if large else question
        for place, offload in _offloads(pipeline, given):
            for vae in _vae_ways(offload, call, has_tiles):
                settings = {"offload": offload, "vae": vae, **({"components": given} if given else {})}
                limit = None
                if vae == "vaemem":
                    limit = settings["vae_memory_limit"] = _limit(found[0].prediction.parts["vae"], call)
                prediction = PipelinePrediction(stored.run_with(offload, vae, limit))
                found.append(_Asked(place, settings, kind, prediction))
        if types is None and len(kinds) == 1 and _is_large(found[0].prediction):
            kinds += SMALLER
    return [_way(one, machine) for one in found]


def _is_large(p: PipelinePrediction) -> bool:
    """Whether the denoiser's weights alone take more than half of the card."""
    return 2 * p.parts[PIPELINES[p.pipeline].denoiser].nbytes > p.available


def _offloads(pipeline: Pipeline, components: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names, and what `predict_pipeline` calls them, of those that it does not refuse."""
    return [
        ("no offload", "none"),
        ("model offload", "model"),
        *([] if any(given in FOUR_BITS for given in components.values()) else [("sequential offload", "sequential")]),
        ("text encoders on CPU", dict.fromkeys(pipeline.encoders, "cpu")),
    ]


class _Asked(NamedTuple):
    place: str
    settings: Mapping[str, Any]
    kind: str | None
    prediction: PipelinePrediction

    @property
    def name(self) -> str:
        limit = self.settings.get("vae_memory_limit")
        vae = f"VAE by vaemem in {limit}" if limit else f"VAE {self.settings['vae']}"
        return f"{self.place}, {vae}" + (f", {self.kind}" if self.kind else "")

    @property
    def changes(self) -> str:
        """What is another in the picture; "" for nothing."""
        said = ["tiles are blended where they overlap"] if self.settings["vae"] == "tiled" else []
        return " and ".join([*said, f"weights in {self.kind} are rounded"] if self.kind else said)


def _limit(vae: Part, call: PipelineCall) -> str:
    """Under which vaemem decodes on a GPU, an image at a time, in whole MiB."""
    full = 128 * call.height * call.width * ELEMENT_BYTES[vae.dtype]
    return f"{int((vae.nbytes + VAE_LIMIT * full) // MIB) + 1} MiB"


def _large(pipeline: Pipeline) -> list[str]:
    """Roles whose weights are worth a smaller type: the denoiser, and text encoders that are no CLIP."""
    return [pipeline.denoiser, *(role for role in pipeline.encoders if pipeline.parts[role] not in CLIPS)]


def _vae_ways(offload: Any, call: PipelineCall, has_tiles: bool) -> list[str]:
    """How the VAE can run. vaemem only decodes, and accelerate's hooks are PyTorch's modules' alone."""
    ways = ["whole", *(["sliced"] if call.batch > 1 else []), *(["tiled"] if has_tiles else [])]
    return ways if call.image or offload == "sequential" else [*ways, "vaemem"]


def _way(asked: _Asked, machine: Machine | None) -> Way:
    p = asked.prediction
    phases = []
    for phase in p.phases:
        work = {} if phase.name == "load" else _work(p, phase, machine)  # once for many pictures
        phases.append(PlannedPhase(phase.name, phase.weights, phase.total - phase.weights, work))
    notes = (*p.notes, *([SEQUENTIAL] if asked.settings["offload"] == "sequential" else []))
    out = (p.out_of_memory_at[0], max(p.least - p.available, 1)) if p.out_of_memory_at else None
    unsure = "cuDNN's next plans decide, and their workspaces are not known" if p.outcome == "may fit" else ""
    return Way(asked.name, asked.settings, tuple(phases), p.host, asked.changes, notes, out, True, unsure)


def _work(p: PipelinePrediction, phase: Phase, machine: Machine | None) -> dict[str, float]:
    """What a phase does. A short prompt may be encoded in less time than the card needs to read the encoders' weights:
    reading them is then the work."""
    known = PIPELINES[p.pipeline]
    kinds = {"encode image": "vae", "denoise": known.denoiser, "decode": "vae"}
    work = {kinds.get(phase.name, "transformer"): float(phase.flops)}
    if machine and phase.flops and phase.name == "encode prompt":
        read = {"memory": float(sum(p.parts[role].nbytes for role in known.encoders if role in p.parts))}
        work = max(work, read, key=lambda one: machine.seconds(one).likely)
    work |= {"link": float(phase.sent), "cpu": float(phase.host_flops)}
    return {name: amount for name, amount in work.items() if amount}
