"""What is asked of a pipeline's prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vaemem._core import OutOfMemoryError
from vaemem.pipelines.components import Pipeline
from vaemem.pipelines.diffusers import Call, run_pipeline
from vaemem.pipelines.run import Part, Run
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.predict import CONTEXT
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
    def available(self) -> int:
        """Bytes that the card has for the process beside a CUDA context and what others hold."""
        return self.gpu.available(CONTEXT, self.used)

    def play(
        self, allocator: CachingAllocator | None = None, workspace: Any = None
    ) -> tuple[Run, OutOfMemoryError | None]:
        """A fresh process runs the pipeline, as far as its allocator lets it."""
        process = SimulatedProcess(
            self.gpu, self.cudnn_version, self.torch_version, allocator=allocator, workspace=workspace
        )
        run = Run(
            process,
            {part.role: part for part in self.parts},
            self.offload,
            self.call.vae == "vaemem",
            self.on_cpu,
            self.pipeline.optional,
        )
        try:
            run_pipeline(run, self.pipeline, self.call)
        except OutOfMemoryError as full:
            return run, full
        return run, None
