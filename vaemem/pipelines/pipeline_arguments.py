"""The arguments of `predict_pipeline` and of `plan_pipeline`, each in one list that all programs read."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from vaemem._common import DTYPES, flag, listed, meant, real, whole
from vaemem._errors import ArgumentError, inside
from vaemem.engine.limits import available_memory, parse_size
from vaemem.pipelines.components import PIPELINES, Pipeline
from vaemem.pipelines.ways import PipelinePlan, Room
from vaemem.prediction.gpus import sold
from vaemem.prediction.phases import Way
from vaemem.prediction.request import Card, Software, find_card
from vaemem.prediction.seconds import Machine, machine_of

# If the host's memory is neither given nor known: a usual machine, and the part that everything else on it takes.
USUAL_HOST, FOR_OTHERS = "32 GB", 2 << 30
HERE, USUAL = "{} free in this machine", f"{{}} in an assumed machine of {USUAL_HOST}"


@dataclass(frozen=True)
class PipelineArguments:
    """The arguments of `vaemem.predict_pipeline`, as documented there.

    model_note: names the model whose pipeline stands for the given one's
    """

    pipeline: Any
    height: Any
    width: Any
    batch: Any = 1
    prompt_tokens: int | None = None
    guidance: bool | None = None
    dtype: Any = None
    components: Mapping[str, Any] | None = None
    lora: Any = None
    offload: Any = "none"
    vae: Any = "whole"
    vae_memory_limit: int | str | None = None
    image: Any = False
    steps: int | None = None
    gpu: Any = None
    memory: int | str | None = None
    used: int | str = 0
    cudnn_version: str | None = None
    torch_version: str | None = None
    runtime: Any = "diffusers"
    safe: bool = False
    os: str = "linux"
    diffusers_version: str | None = None
    frames: int | None = None
    model_note: str = ""

    def checked(self) -> Self:
        """Return a copy with the arguments that mean the same in all programs. ValueError names an impossible one."""
        given = {} if self.components is None else self.components
        if not isinstance(given, Mapping):
            raise ArgumentError("components", "{role: type or file}", repr(given))
        return replace(
            self, image=check_image(self.image), height=whole("height", self.height), width=whole("width", self.width),
            batch=whole("batch", self.batch), safe=flag("safe", self.safe), components=given,
            guidance=None if self.guidance is None else flag("guidance", self.guidance),
            steps=None if self.steps is None else whole("steps", self.steps),
        )  # fmt: skip

    @property
    def known(self) -> Pipeline:
        """The facts of the pipeline, or of ComfyUI's workflow, once it has its own name."""
        if self.runtime != "comfyui":
            return PIPELINES[self.pipeline]
        from vaemem.pipelines.workflows import WORKFLOWS  # the page fetches their facts only then

        return WORKFLOWS[self.pipeline]

    @functools.cached_property
    def card(self) -> Card:
        return find_card(self.gpu, self.memory, self.used, self.os)

    @property
    def software(self) -> Software:
        return Software(
            self.runtime, self.torch_version, self.cudnn_version, diffusers_version=self.diffusers_version
        )  # fmt: skip

    @property
    def guides(self) -> bool:
        """Whether the pipeline guides; by default as its own call does."""
        return not self.known.unguided if self.guidance is None else self.guidance

    @property
    def step_count(self) -> int:
        """How often the denoiser runs."""
        return self.known.steps if self.steps is None else self.steps


def check_image(image: Any) -> bool | tuple[int, int]:
    """Check the argument `image` of `vaemem.predict_pipeline`: whether there is one, or the size of its own image."""
    if not isinstance(image, tuple | list) or len(image) != 2:
        if not isinstance(image, bool):
            raise ArgumentError("image", "True, False, or (height, width) of the image to make first", repr(image))
        return image
    with inside("image"):
        return whole("height", image[0]), whole("width", image[1])


@dataclass(frozen=True)
class PlanArguments(PipelineArguments):
    """The arguments of `vaemem.plan_pipeline`, as documented there. Once they are checked, types is a list or None, and
    host_memory has bytes or None."""

    host_memory: Any = None
    types: Any = None
    calibrate: Mapping[str, float] | None = None
    time_limit: float | None = None
    flash: bool = False
    cache_limit: int | str | None = None
    link: str = "PCIe 3.0 x16"
    cpu: str = "AVX2"
    cores: int | None = None
    safe: bool = True

    def checked(self) -> Self:
        kinds = None if self.types is None else listed(self.types, str)
        if kinds == [] or not all(isinstance(kind, str | None) for kind in kinds or ()):
            raise ArgumentError("types", "at least one name of a type, or None", repr(self.types) if kinds else "none")
        if self.time_limit is not None and not real(self.time_limit) > 0:
            raise ArgumentError("time_limit", "more than 0 seconds", repr(self.time_limit))
        host = None if self.host_memory is None else parse_size("host_memory", self.host_memory)
        return replace(super().checked(), flash=flag("flash", self.flash), types=kinds, host_memory=host)

    @functools.cached_property
    def room(self) -> Room:
        """The memory and the time that a way may take."""
        if self.host_memory is not None:
            return Room(self.card.available(), self.host_memory, self.time_limit)
        is_here = self.gpu is None and self.memory is None and not self.card.assumed
        free = available_memory() if is_here else None
        host, source = (sold(USUAL_HOST) - FOR_OTHERS, USUAL) if free is None else (free, HERE)
        return Room(self.card.available(), host, self.time_limit, source)

    def machine(self, kernels: str = "diffusers") -> Machine | None:
        """Return the rates of the card and its host; None if nothing tells them. kernels: whose, ``"diffusers"`` for
        PyTorch's or ``"sd.cpp"``."""
        card = self.card
        named = None if card.assumed else card.gpu
        dtype = meant("dtype", self.known.dtype if self.dtype is None else self.dtype, DTYPES)
        likely = machine_of(named, card.gpu.total_memory, dtype, kernels, self.link, self.cpu, self.cores)
        is_known = named is not None and not card.gpu.coarse  # whether its speed is known
        return likely if is_known or self.calibrate else None

    def plan(self, size: str, program: str, ways: Sequence[Way], machine: Machine | None) -> PipelinePlan:
        """Judge the ways of running the pipeline. size, program: in words."""
        images, card = f", {self.batch} images" if self.batch > 1 else "", self.card
        title = f"{self.pipeline} {size}{images} by {program}, {self.step_count} steps, on {card.gpu.name}"
        return PipelinePlan(
            title, ways, self.room, machine, self.calibrate, [self.model_note] * bool(self.model_note), self.safe,
            card.assumed,
        )  # fmt: skip
