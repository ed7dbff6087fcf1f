"""What is asked of a pipeline's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vaemem._core import OutOfMemoryError
from vaemem.pipelines.components import Pipeline
from vaemem.pipelines.diffusers import Call, run_pipeline
from vaemem.pipelines.run import Part, Run
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.snapshot import CachingAllocator


@dataclass(frozen=True)
class PipelineQuestion:
    """The arguments of `predict_pipeline`, checked."""

    pipeline: Pipeline
    name: str
    call: Call
    parts: tuple[Part, ...]
    offload: str
    on_cpu: tuple[str, ...]
    gpu: Gpu
    cudnn_version: str | None
    torch_version: str | None
    used: int

    @property
    def resident(self) -> tuple[str, ...]:
        """Roles that offloading leaves on the device: what is no part of the sequence, and what is in LLM.int8(), which
        diffusers 0.33 does not move."""
        return tuple(
            part.role
            for part in self.parts
            if part.role in self.pipeline.optional or (self.offload == "model" and part.has(["int8"]))
        )

    def play(
        self, allocator: CachingAllocator | None = None, workspace: Any = None, has_other_plans: bool = True
    ) -> tuple[Run, OutOfMemoryError | None]:
        """A fresh process runs the pipeline, as far as its allocator lets it."""
        process = SimulatedProcess(
            self.gpu, self.cudnn_version, self.torch_version, allocator=allocator, workspace=workspace,
            used=self.used,
        )  # fmt: skip
        process.has_other_plans = has_other_plans
        run = Run(
            process,
            {part.role: part for part in self.parts},
            self.offload,
            self.call.vae == "vaemem",
            self.on_cpu,
            self.resident,
        )
        try:
            run_pipeline(run, self.pipeline, self.call)
        except OutOfMemoryError as full:
            return run, full
        return run, None
