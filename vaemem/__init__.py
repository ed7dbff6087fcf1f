"""Run the SD1.5, SDXL and FLUX VAEs in a memory known to the byte, and know what they take elsewhere."""

import os as _os
import pkgutil as _pkgutil

# In the folder of an unbuilt source tree this package hides the installed one: its core is used then.
__path__ = _pkgutil.extend_path(__path__, __name__)

from vaemem import _core
from vaemem._common import __version__ as __version__
from vaemem._core import OutOfMemoryError
from vaemem.engine.device import DeviceArray
from vaemem.prediction.formula import formula
from vaemem.prediction.predict import Prediction, predict, predict_largest
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.replay import Replay, replay
from vaemem.prediction.snapshot import CachingAllocator
from vaemem.reports.report import report
from vaemem.tables.estimators import ESTIMATORS, Estimator, compare
from vaemem.tables.fit import fit
from vaemem.tables.sweep import sweep, tradeoff
from vaemem.tables.table import Table, seed_table
from vaemem.vae import VAE, Cancelled, Encoded, Run, Tiling, backends

__all__ = [
    "ESTIMATORS",
    "VAE",
    "CachingAllocator",
    "Cancelled",
    "DeviceArray",
    "Encoded",
    "Estimator",
    "OutOfMemoryError",
    "Prediction",
    "Replay",
    "Run",
    "SimulatedProcess",
    "Table",
    "Tiling",
    "backends",
    "compare",
    "fit",
    "formula",
    "predict",
    "predict_largest",
    "replay",
    "report",
    "seed_table",
    "sweep",
    "tradeoff",
]

_core.disable(_os.environ.get("VAEMEM_DISABLE", ""))
