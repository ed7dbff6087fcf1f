"""NumPy and ml_dtypes, imported when one of their names is first used. Predictions use neither package, and importing
NumPy takes longer than most predictions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["ml_dtypes", "np"]

if TYPE_CHECKING:
    import ml_dtypes
    import numpy as np
else:

    class _Later:
        """A module that is imported when one of its names is first used."""

        def __init__(self, module: str):
            self._module = module

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # such as copy's questions about an object
                raise AttributeError(name)
            found = self.__dict__[name] = getattr(importlib.import_module(self._module), name)
            return found

    ml_dtypes, np = _Later("ml_dtypes"), _Later("numpy")
