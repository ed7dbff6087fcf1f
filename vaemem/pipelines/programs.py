"""The programs that run pipelines, and the names that the file of each program defines."""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from vaemem._common import meant
from vaemem._errors import ArgumentError, Named
from vaemem.engine.names import shared_note
from vaemem.pipelines.components import known_pipeline
from vaemem.pipelines.pipeline_arguments import PipelineArguments, PlanArguments
from vaemem.pipelines.ways import PipelinePlan
from vaemem.prediction.recording_files import is_recording

if TYPE_CHECKING:
    from vaemem.pipelines.by_comfyui import ComfyUIPrediction
    from vaemem.pipelines.by_diffusers import PipelinePrediction
    from vaemem.pipelines.by_sdcpp import GraphPrediction

    PipelineAnswer: TypeAlias = PipelinePrediction | GraphPrediction | ComfyUIPrediction

PlannedRuntime = Literal["diffusers", "sd.cpp", "mlx", "comfyui"]
PLANNED_RUNTIMES: tuple[PlannedRuntime, ...] = get_args(PlannedRuntime)
PredictedRuntime = Literal["diffusers", "sd.cpp", "comfyui"]
PREDICTED_RUNTIMES: tuple[PredictedRuntime, ...] = get_args(PredictedRuntime)
_Arguments = TypeVar("_Arguments", bound=PipelineArguments)


class PipelineProgram(Protocol):
    """A program that runs pipelines; the program's file in this folder defines these names.

    Attributes
    ----------
    NAMES : collection of str
        The pipelines that the program runs.
    UNUSED : collection of str
        Arguments of `predict_pipeline` and `plan_pipeline` that the program does not use.
    """

    NAMES: Collection[str]
    UNUSED: Collection[str]

    def predict(self, given: PipelineArguments) -> PipelineAnswer:
        """Answer `vaemem.predict_pipeline`. mlx cannot, because nobody modelled its denoisers."""

    def plan(self, given: PlanArguments) -> PipelinePlan:
        """Answer `vaemem.plan_pipeline`."""


_FILES = {"diffusers": "by_diffusers", "sd.cpp": "by_sdcpp", "comfyui": "by_comfyui", "mlx": "by_mlx"}


def read_arguments(given: _Arguments, runtimes: Collection[str]) -> tuple[PipelineProgram, _Arguments]:
    """Find the program that the arguments name, and check the arguments that all programs share. ValueError names an
    argument that this program does not use."""
    note = shared_note(given.pipeline, "pipeline")
    runtime = meant("runtime", given.runtime, runtimes)
    program: Any = importlib.import_module(f"vaemem.pipelines.{_FILES[runtime]}")
    name = known_pipeline("pipeline", given.pipeline, program.NAMES)
    if name not in program.NAMES and not is_recording(name):
        advice = (Named("runtime", "diffusers"), " predicts it")
        raise ArgumentError("pipeline", f"one of {', '.join(program.NAMES)} with {runtime}", repr(name), advice)
    given = given.checked()
    for argument in program.UNUSED:
        value = getattr(given, argument, None)
        if value not in (None, {}, getattr(type(given), argument, None)):  # the class has the default
            wanted = ("no value with ", Named("runtime", runtime), ", which does not use it")
            raise ArgumentError(argument, wanted, repr(value))
    return program, replace(given, pipeline=name, runtime=runtime, model_note=note)
