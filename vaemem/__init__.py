"""Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in memory known to the byte, and predict their memory elsewhere."""

import importlib as _importlib
import os as _os
import pkgutil as _pkgutil
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# In the folder of an unbuilt source tree this package hides the installed one: its core is used then.
__path__ = _pkgutil.extend_path(__path__, __name__)

from vaemem._common import __version__ as __version__

if _TYPE_CHECKING:
    from vaemem import plot as plot
    from vaemem._core import OutOfMemoryError
    from vaemem._errors import (
        ArgumentError,
        ArgumentOverflowError,
        ArgumentTypeError,
        FileError,
        MissingPackageError,
        NoFileError,
    )
    from vaemem.datasets.encoder import Decoder, Encoder
    from vaemem.engine.arguments import Cancelled
    from vaemem.engine.device import DeviceArray, backends
    from vaemem.engine.records import Encoded, Run
    from vaemem.engine.tiling import Tiling
    from vaemem.engine.vae import VAE
    from vaemem.out_of_memory.explanation import explain
    from vaemem.pipelines.by_diffusers import PipelinePrediction
    from vaemem.pipelines.plan_pipeline import plan_pipeline
    from vaemem.pipelines.predict_pipeline import predict_pipeline
    from vaemem.pipelines.ways import PipelinePlan
    from vaemem.prediction.bound import bound
    from vaemem.prediction.caching_allocator import CachingAllocator
    from vaemem.prediction.formula import formula
    from vaemem.prediction.predict_vae import Prediction, largest_batch, predict, predict_largest
    from vaemem.prediction.process import SimulatedProcess
    from vaemem.prediction.replay import Replay, replay
    from vaemem.reports.report import report
    from vaemem.tables.estimators import ESTIMATORS, Estimator, compare
    from vaemem.tables.fit import fit
    from vaemem.tables.sweep import estimate_sweep, measure_sweep, predict_sweep, tradeoff
    from vaemem.tables.table import Table, seed_table

# Each name is imported on first use, and NumPy with the first name that needs it. So a program loads only its own
# parts.
_NAMES = {
    "_core": "OutOfMemoryError",
    "_errors": "ArgumentError ArgumentOverflowError ArgumentTypeError FileError MissingPackageError NoFileError",
    "datasets.encoder": "Decoder Encoder",
    "engine.arguments": "Cancelled",
    "engine.device": "DeviceArray backends",
    "engine.records": "Encoded Run",
    "engine.tiling": "Tiling",
    "engine.vae": "VAE",
    "out_of_memory.explanation": "explain",
    "pipelines.by_diffusers": "PipelinePrediction",
    "pipelines.plan_pipeline": "plan_pipeline",
    "pipelines.predict_pipeline": "predict_pipeline",
    "pipelines.ways": "PipelinePlan",
    "plot": "plot",
    "prediction.bound": "bound",
    "prediction.formula": "formula",
    "prediction.predict_vae": "Prediction largest_batch predict predict_largest",
    "prediction.process": "SimulatedProcess",
    "prediction.replay": "Replay replay",
    "prediction.caching_allocator": "CachingAllocator",
    "reports.report": "report",
    "tables.estimators": "ESTIMATORS Estimator compare",
    "tables.fit": "fit",
    "tables.sweep": "estimate_sweep measure_sweep predict_sweep tradeoff",
    "tables.table": "Table seed_table",
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
_PLACES |= {name: f"{__name__}.{name}" for name in ("_core", "engine", "prediction", "tables")}  # modules

__all__ = [
    "ESTIMATORS", "VAE", "ArgumentError", "ArgumentOverflowError", "ArgumentTypeError", "CachingAllocator",
    "Cancelled", "Decoder", "DeviceArray", "Encoded", "Encoder", "Estimator", "FileError", "MissingPackageError",
    "NoFileError", "OutOfMemoryError", "PipelinePlan", "PipelinePrediction", "Prediction", "Replay", "Run",
    "SimulatedProcess", "Table", "Tiling", "backends", "bound", "compare", "estimate_sweep", "explain", "fit",
    "formula", "largest_batch", "measure_sweep", "plan_pipeline", "predict", "predict_largest", "predict_pipeline",
    "predict_sweep", "replay", "report", "seed_table", "tradeoff",
]  # fmt: skip


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_PLACES[name])
    found = globals()[name] = module if _PLACES[name] == f"{__name__}.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})


if _os.environ.get("VAEMEM_DISABLE"):
    from vaemem.engine.device import read_disabled as _read_disabled

    _read_disabled()
