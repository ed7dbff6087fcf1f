"""Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in memory known to the byte, and know what they take elsewhere."""

import importlib as _importlib
import pkgutil as _pkgutil
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# In the folder of an unbuilt source tree this package hides the installed one: its core is used then.
__path__ = _pkgutil.extend_path(__path__, __name__)

from vaemem._common import __version__ as __version__
from vaemem._core import OutOfMemoryError
from vaemem.engine.arguments import Cancelled
from vaemem.engine.device import DeviceArray, backends
from vaemem.engine.device import read_disabled as _read_disabled
from vaemem.engine.records import Encoded, Run
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE
from vaemem.prediction.formula import formula
from vaemem.prediction.predict import Prediction, predict, predict_largest
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.replay import Replay, replay
from vaemem.prediction.snapshot import CachingAllocator
from vaemem.tables.sweep import sweep, tradeoff
from vaemem.tables.table import Table, seed_table

if _TYPE_CHECKING:
    from vaemem import plot as plot
    from vaemem.out_of_memory import explain
    from vaemem.pipelines.plan import plan_pipeline
    from vaemem.pipelines.predict_pipeline import PipelinePrediction, predict_pipeline
    from vaemem.pipelines.ways import PipelinePlan
    from vaemem.prediction.bound import bound
    from vaemem.reports.report import report
    from vaemem.tables.estimators import ESTIMATORS, Estimator, compare
    from vaemem.tables.fit import fit

# Imported when they are asked for: half of the import's time would be theirs.
_LATER = {
    "ESTIMATORS": "vaemem.tables.estimators",
    "Estimator": "vaemem.tables.estimators",
    "PipelinePlan": "vaemem.pipelines.ways",
    "PipelinePrediction": "vaemem.pipelines.predict_pipeline",
    "bound": "vaemem.prediction.bound",
    "explain": "vaemem.out_of_memory",
    "compare": "vaemem.tables.estimators",
    "fit": "vaemem.tables.fit",
    "plan_pipeline": "vaemem.pipelines.plan",
    "plot": "vaemem.plot",
    "predict_pipeline": "vaemem.pipelines.predict_pipeline",
    "report": "vaemem.reports.report",
}

__all__ = [
    "ESTIMATORS",
    "VAE",
    "CachingAllocator",
    "Cancelled",
    "DeviceArray",
    "Encoded",
    "Estimator",
    "OutOfMemoryError",
    "PipelinePlan",
    "PipelinePrediction",
    "Prediction",
    "Replay",
    "Run",
    "SimulatedProcess",
    "Table",
    "Tiling",
    "backends",
    "bound",
    "compare",
    "explain",
    "fit",
    "formula",
    "plan_pipeline",
    "predict",
    "predict_largest",
    "predict_pipeline",
    "replay",
    "report",
    "seed_table",
    "sweep",
    "tradeoff",
]


def __getattr__(name: str) -> _Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _importlib.import_module(_LATER[name])
    found = globals()[name] = module if _LATER[name] == f"{__name__}.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


_read_disabled()
