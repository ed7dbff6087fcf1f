"""Instruction sets of the CPU that runs shall not use: VAEMEM_DISABLE, read once, when vaemem is imported."""

from __future__ import annotations

import os
import warnings

from vaemem import _core
from vaemem._common import DTYPES, PRECISIONS, distinct

VARIABLE = "VAEMEM_DISABLE"
_read = ""


def read_disabled() -> None:
    """Takes the sets away that are named. Of names that mean nothing here whoever imports vaemem is warned."""
    global _read
    _read = os.environ.get(VARIABLE, "")
    lists = [_core.backends(dtype, precision) for dtype in DTYPES for precision in PRECISIONS]
    known = distinct(name for names in lists for name, _ in names if name != "ref")
    named = distinct(filter(None, _read.split(",")))
    for name in named:
        if name not in known:
            what = f"want names of {', '.join(known)}, separated by commas" if known else "there is nothing to disable"
            warnings.warn(f"{VARIABLE}: {what}, got {name!r}, which changes nothing", stacklevel=3)
    _core.disable(",".join(name for name in named if name in known))


def warn_of_change(stacklevel: int) -> None:
    """Warns where the variable is no longer what was read."""
    now = os.environ.get(VARIABLE, "")
    if now != _read:
        warnings.warn(
            f"{VARIABLE}: it was {_read!r} when vaemem was imported, and that holds; it is {now!r} now, which changes "
            "nothing: set it before the import, in a new process",
            stacklevel=stacklevel + 1,
        )
