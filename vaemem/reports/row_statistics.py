"""Figures of a table's rows that several sections of a report need."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, grouped
from vaemem.tables.estimators import pixels, series_of
from vaemem.tables.table import Row


def ratio(row: Row) -> float:
    """Return reserved over allocated bytes."""
    return float(row["reserved_bytes"] / row["allocated_bytes"])


def constant(row: Row, target: str = "reserved_bytes") -> float:
    """Return the implied constant, the row's bytes / (H*W*e). The row's dtype has a known width."""
    return float(row[target] / (pixels(row) * ELEMENT_BYTES[row["dtype"]]))


def case(row: Row) -> str:
    """Name a row: `sdxl decode 512x512 float16`."""
    return f"{row['model']} {row['op']} {row['height']}x{row['width']} {row['dtype']}"


def span(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Show the range of the values: `1.04 to 1.96`, or `1.04` if both ends read the same."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at this share of the sorted values: 0.5 gives the upper one of two middle values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def growth(rows: Sequence[Row]) -> dict[tuple[Any, ...], tuple[Row, Row]]:
    """Return the smallest and the largest row of each series. Rows of a series differ only in size."""
    series = grouped(rows, series_of)
    ends = {key: (min(mine, key=pixels), max(mine, key=pixels)) for key, mine in series.items()}
    return {key: (first, last) for key, (first, last) in ends.items() if pixels(last) > pixels(first)}


def pairs(rows: Sequence[Row], model: str, other: str) -> list[tuple[Row, Row]]:
    """Pair the rows of two models that are alike in everything else, in their order."""
    key = operator.itemgetter(
        "op", "height", "width", "dtype", "tile", "tile_overlap", "batch", "device", "source", "group"
    )
    mine = {key(row): row for row in rows if row["model"] == model}
    return [(mine[key(row)], row) for row in rows if row["model"] == other and key(row) in mine]


@functools.cache
def parameters(model: str) -> int:
    """Count the numbers in the weights of a model that vaemem has tables for."""
    core = _core.Model(_core.models()[model])
    return sum(math.prod(shape) for _, shape in core.tensors)
