"""stable-diffusion.cpp: pipelines' answers, and the ways of running them (`vaemem.sdcpp.running`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vaemem._common import whole
from vaemem._render import Sizer
from vaemem.pipelines.phased_answer import PhasedAnswer, as_far_as
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.ways import PipelinePlan, outcome
from vaemem.prediction.phases import Way
from vaemem.prediction.verdict import describe_spilling, judge_phases
from vaemem.sdcpp import running
from vaemem.sdcpp.graphs import SDCPP_VERSION

NAMES = running.MODELS
UNUSED = (
    "image", "cache_limit", "dtype", "vae_memory_limit", "cudnn_version", "torch_version", "diffusers_version",
    "frames", "lora",
)  # fmt: skip


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
        The same way with direct convolution in the VAE if no argument chooses the convolution; otherwise `way` itself.
        `phases` are for `way`, by im2col. A card is tight if it has room for direct convolution only.

    Examples
    --------
    >>> p = predict_pipeline("zimage-turbo", 1024, 1024, runtime="sd.cpp", offload="cond_only", gpu="RTX 3060")
    >>> p.verdict, p.on_card >> 20, p.phases[2].total >> 20, p.phases[3].total >> 20
    ('tight', 10420, 8794, 13505)
    """

    request: PipelineArguments

    def __init__(self, request: PipelineArguments):
        q, card = request, request.card
        words = running.words_of(q.pipeline, q.offload, q.vae)
        direct = running.with_direct(q.pipeline, q.offload, words)
        ways = _ways(q, [words, direct] if direct != words else [words])
        self.request, self.way, self.direct, self.model_note = q, ways[0], ways[-1], q.model_note
        way = self.way
        self._asked = {
            "height": q.height, "width": q.width, "batch": q.batch, "tokens": q.prompt_tokens,
            "device": card.gpu.name, "versions": SDCPP_VERSION, "way": way.name, "runtime": "sd.cpp",
        }  # fmt: skip
        self._run_row = {**self._asked, "model": q.pipeline, "op": "pipeline", "source": "predicted"}
        self.title = f"{q.pipeline} {q.height}x{q.width} by sd.cpp ({card.gpu.name}), {way.name}"
        self.host, self.notes = way.host, way.notes
        self.judged = judge_phases(
            way.phases, card.available(), self.direct.phases, kept_more=card.kept_more,
            windows=describe_spilling(card.gpu, card.is_windows), safe=q.safe,
            no_room="it goes through only with direct convolution",
        )  # fmt: skip
        self.result = self.here = as_far_as(way.phases, self.judged.out_of_memory_at)

    def summarize(self, size: Sizer) -> str:
        summary = super().summarize(size)
        if self.direct is self.way:
            return summary
        im2col, direct = (size(way.phases[-1].total) for way in (self.way, self.direct))
        return f"{summary}; its decode takes {im2col} by im2col and {direct} with --vae-conv-direct"

    def _asked_data(self) -> dict[str, Any]:
        return {"pipeline": self.request.pipeline, **self._asked}


def _ways(given: PipelineArguments, words: Iterable[tuple[str, ...]]) -> list[Way]:
    """Make the ways for some words."""
    q = given
    tokens = None if q.prompt_tokens is None else whole("prompt_tokens", q.prompt_tokens)
    return running.sdcpp_ways(
        q.pipeline, q.height, q.width, q.batch, q.step_count, q.guides and q.known.guides, tokens, q.components or {},
        words,
    )  # fmt: skip


def predict(given: PipelineArguments) -> GraphPrediction:
    """Answer `vaemem.predict_pipeline`."""
    return GraphPrediction(given)


def plan(given: PlanArguments) -> PipelinePlan:
    """Answer `vaemem.plan_pipeline`. If nothing fits, smaller weights are tried too."""
    room, machine, kinds, card = given.room, given.machine("sd.cpp"), given.types, given.card
    ways = _ways(given, [words for kind in kinds or [None] for words in running.planned_words(given.flash, kind)])
    if kinds is None and not any(outcome(way, room, None).fits for way in ways):
        ways += _ways(given, running.planned_words(given.flash, running.SMALLER_TYPE))
    keeps: dict[str, Any] = {"kept_more": card.kept_more, "windows": card.is_windows}
    verdicts = [judge_phases(way.phases, card.available(), **keeps) for way in ways]
    ways = [way._replace(unsure=one.tight_because) for way, one in zip(ways, verdicts, strict=True)]
    return given.plan(f"{given.height}x{given.width}", "sd.cpp", ways, machine)
