"""Measured rows as lines of the scoreboard's rows.csv (docs/ESTIMATORS.md)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from vaemem._errors import ArgumentError
from vaemem.tables.table import Row

CONTRIBUTED = (
    *("source", "runtime", "model", "op", "phase", "height", "width", "batch", "frames", "tokens", "steps", "dtype"),
    *("components", "tile", "tile_overlap", "way", "device", "versions", "settings", "counter", "bytes", "doubtful"),
    "note",
)


def contribution(rows: Iterable[Row]) -> str:
    """Write measured rows as lines of benchmarks/measurements/rows.csv, one for each of PyTorch's counters.

    A VAE's counters are above the level before the run, a pipeline's are the process's. The column `source` is left
    for the address of the issue.

    Raises
    ------
    ValueError
        A row that was not measured on a GPU: a process's resident size is not scored.

    Examples
    --------
    >>> row = {"runtime": "diffusers", "model": "sdxl", "op": "decode", "height": 64, "width": 64, "source": "measured",
    ...        "device": "NVIDIA L40S", "allocated_bytes": 9, "reserved_bytes": 11}
    >>> print(contribution([row]).splitlines()[1])
    ,diffusers,sdxl,decode,,64,64,,,,,,,,,,NVIDIA L40S,,,allocated above,9,,
    """
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(CONTRIBUTED)
    for row in rows:
        if row.get("source") != "measured" or row.get("device") in (None, "cpu"):
            raise ArgumentError("contribute", "a run measured on a GPU", str(row.get("device")))
        cells = {name: row.get(name) for name in CONTRIBUTED}
        above = "" if row["op"] == "pipeline" else " above"
        for counter in ("allocated", "reserved"):
            if value := row.get(f"{counter}_bytes"):
                cells |= {"source": "", "counter": counter + above, "bytes": value}
                cells["phase"] = "" if row.get("phase") == "whole" else row.get("phase")
                lines.writerow("" if cell is None else cell for cell in cells.values())
    return text.getvalue()
