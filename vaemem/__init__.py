"""Run the SD1.5, SDXL and FLUX VAEs in a memory known to the byte, and know what they take elsewhere."""

import os as _os
import pkgutil as _pkgutil

# In the folder of an unbuilt source tree this package hides the installed one: its core is used then.
__path__ = _pkgutil.extend_path(__path__, __name__)

from vaemem import _core
from vaemem._core import OutOfMemoryError
from vaemem._device import DeviceArray
from vaemem._estimators import ESTIMATORS, Estimator, compare
from vaemem._fit import fit
from vaemem._formula import formula
from vaemem._predict import Prediction, predict
from vaemem._process import SimulatedProcess
from vaemem._replay import Replay, replay
from vaemem._report import report
from vaemem._snapshot import CachingAllocator
from vaemem._sweep import sweep
from vaemem._table import Table
from vaemem.vae import VAE, Encoded, Run, backends

__version__ = "0.1.0"
__all__ = [
    "ESTIMATORS",
    "VAE",
    "CachingAllocator",
    "DeviceArray",
    "Encoded",
    "Estimator",
    "OutOfMemoryError",
    "Prediction",
    "Replay",
    "Run",
    "SimulatedProcess",
    "Table",
    "backends",
    "compare",
    "fit",
    "formula",
    "predict",
    "replay",
    "report",
    "sweep",
]

_core.disable(_os.environ.get("VAEMEM_DISABLE", ""))
