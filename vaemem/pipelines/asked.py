"""What is asked of a pipeline's prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vaemem._common import DTYPES, Message, Named, choose, flag, whole
from vaemem._core import OutOfMemoryError
from vaemem.engine.limits import parse_size
from vaemem.pipelines.components import PIPELINES, Pipeline
from vaemem.pipelines.diffusers import PipelineCall, play_pipeline
from vaemem.pipelines.parts import parts_of
from vaemem.pipelines.pipeline_run import OFFLOADS, Part, PipelineRun
from vaemem.pipelines.storage import FOUR_BITS
from vaemem.prediction.question import MOST_SIDE, Asked
from vaemem.prediction.values import Card, Software

MOST_TOKENS = 1 << 13  # of a prompt: diffusers' encoders take 77 or 512 at a time
VAE_WAYS = ("whole", "tiled", "sliced", "vaemem")


@dataclass(frozen=True)
class PipelineQuestion(Asked):
    """What `predict_pipeline` is asked of diffusers: which pipeline makes what, of which parts, which of them come and
    go (`offload`) and which stay on the CPU."""

    name: str
    call: PipelineCall
    parts: tuple[Part, ...]
    offload: str = "none"
    on_cpu: tuple[str, ...] = ()

    @property
    def pipeline(self) -> Pipeline:
        return PIPELINES[self.name]

    @property
    def dtype(self) -> str:
        """What its denoiser computes in."""
        return next(part.dtype for part in self.parts if part.role == self.pipeline.denoiser)

    @property
    def resident(self) -> tuple[str, ...]:
        """Roles that offloading leaves on the device: what is no part of the sequence, and what is in LLM.int8(), which
        diffusers 0.33 does not move."""
        return tuple(
            part.role
            for part in self.parts
            if part.role in self.pipeline.optional or (self.offload == "model" and part.has(["int8"]))
        )

    def run_with(self, offload: Any, vae: str, vae_memory_limit: int | str | None = None) -> PipelineQuestion:
        """The same with these arguments of `predict_pipeline`; ValueError names the one that cannot be."""
        on_cpu: tuple[str, ...] = ()
        if isinstance(offload, Mapping):
            for role, place in offload.items():
                choose("offload", role, self.pipeline.parts)
                choose(f"offload[{role!r}]", place, ("cpu", "cuda"))
            on_cpu, offload = tuple(role for role, place in offload.items() if place == "cpu"), "none"
        choose("offload", offload, OFFLOADS)
        choose("vae", vae, VAE_WAYS)
        if (vae == "vaemem") != (vae_memory_limit is not None):
            got = f" and with that alone, got {vae_memory_limit!r} with {vae!r}"
            raise ValueError(Message("vae_memory_limit: want it with ", Named("vae", "vaemem"), got))
        limit = parse_size("vae_memory_limit", vae_memory_limit) if vae_memory_limit is not None else 0
        for part in self.parts:
            if offload == "sequential" and part.has(FOUR_BITS):
                raise ValueError(
                    f"offload: want none or model with components[{part.role!r}] in bitsandbytes' four bits, got"
                    " 'sequential', from which accelerate does not bring them back"
                )
        held = next(part.nbytes for part in self.parts if part.role == "vae")
        if vae == "vaemem" and limit <= held:
            raise ValueError(
                f"vae_memory_limit: want more than the VAE's weights, which count in it and are {held} bytes, got"
                f" {vae_memory_limit!r}"
            )
        call = replace(self.call, vae=vae, memory_limit=limit)
        return replace(self, call=call, offload=offload, on_cpu=on_cpu)

    def play(
        self, workspace: Any = None, has_other_plans: bool = True, **device: Any
    ) -> tuple[PipelineRun, OutOfMemoryError | None]:
        """A fresh process, as `start` makes it, runs the pipeline as far as its allocator lets it."""
        process = self.start(workspace, **device)
        process.has_other_plans = has_other_plans
        parts = {part.role: part for part in self.parts}
        run = PipelineRun(process, parts, self.offload, self.call.vae == "vaemem", self.on_cpu, self.resident)
        try:
            play_pipeline(run, self.pipeline, self.call)
        except OutOfMemoryError as full:
            return run, full
        return run, None


def ask_pipeline(
    pipeline: str, height: int, width: int, batch: int, card: Card, software: Software, *,
    prompt_tokens: int | None, guidance: bool, dtype: str | None, components: Mapping[str, Any] | None, image: bool,
    steps: int | None,
) -> PipelineQuestion:  # fmt: skip
    """Arguments of `predict_pipeline` as a question, nothing offloaded and the VAE whole; ValueError names the one that
    cannot be answered."""
    choose("pipeline", pipeline, PIPELINES)
    known = PIPELINES[pipeline]
    dtype = known.dtype if dtype is None else dtype
    choose("dtype", dtype, DTYPES)
    height, width = whole("height", height), whole("width", width)
    for name, value in (("height", height), ("width", width)):
        if value % known.stride or value > MOST_SIDE:
            raise ValueError(f"{name}: want a multiple of {known.stride} up to {MOST_SIDE} for {pipeline}, got {value}")
    tokens = known.tokens if prompt_tokens is None else whole("prompt_tokens", prompt_tokens, most=MOST_TOKENS)
    steps = known.steps if steps is None else whole("steps", steps)
    call = PipelineCall(
        height, width, whole("batch", batch), tokens, flag("guidance", guidance), steps, "whole", 0,
        flag("image", image),
    )  # fmt: skip
    return PipelineQuestion(card, software, pipeline, call, parts_of(known, dtype, components or {}))
