"""The seed table's 98 times compared with predicted ones, and the two constants of a VAE's seconds.

A run takes FLOPs / (share * peak), its attention's FLOPs `ratio` times as long, and bytes / the memory's rate. The
share and the ratio minimise the squares of relative errors over the rows. Peak and memory rate are the card's
(`vaemem.prediction.seconds`). Further fits leave out a model, a size or an operation, and predict it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from published.replay import GPU, IDENTITY, Key, asked_of
from vaemem._common import distinct, grouped
from vaemem._render import Columns
from vaemem.prediction.request import VAEArguments, resolve_vae
from vaemem.prediction.seconds import Seconds, memory_rate, peak
from vaemem.tables.table import seed_table

LEFT_OUT = {"model": 0, "size": 2, "operation": 1}  # the position in a row's key


class TimedRow(NamedTuple):
    """A row of the table, measured and predicted.

    flops, attended, moved: seconds of its FLOPs and its attention's at the card's peak, and of its bytes at its
    memory rate.
    """

    key: Key
    measured: float
    predicted: Seconds
    flops: float
    attended: float
    moved: float


def timed_rows() -> tuple[TimedRow, ...]:
    """Return all rows of the seed table."""
    rows = []
    for row in seed_table():
        request = resolve_vae(VAEArguments(**asked_of(key := tuple(row[name] for name in IDENTITY))))
        most, trace = peak(GPU, request.job.dtype), request.trace
        parts = (trace.flops / most, trace.attended / most, trace.moved / memory_rate(GPU).value)
        rows.append(TimedRow(key, row["seconds"], request.machine.seconds(request.work), *parts))
    return tuple(rows)


def fit_shares(rows: Iterable[TimedRow]) -> tuple[float, float]:
    """Fit the share of the peak, and how many times as long an attention's FLOPs take."""
    rows = list(rows)
    measured = np.array([row.measured for row in rows])
    parts = np.array([(row.flops - row.attended, row.attended) for row in rows])
    left = 1 - np.array([row.moved for row in rows]) / measured
    (plain, attended), *_ = np.linalg.lstsq(parts / measured[:, None], left)
    return 1 / float(plain), float(attended / plain)


def errors_of(rows: Iterable[TimedRow], share: float, ratio: float) -> list[float]:
    """Return the relative errors with these constants."""
    took = [(row, (row.flops + (ratio - 1) * row.attended) / share + row.moved) for row in rows]
    return [seconds / row.measured - 1 for row, seconds in took]


def left_out_errors(rows: Sequence[TimedRow], by: str) -> list[float]:
    """Return the error of each row, with constants fitted without its model, its size or its operation."""
    at, found = LEFT_OUT[by], dict[Key, float]()
    for value in distinct(row.key[at] for row in rows):
        mine = [row for row in rows if row.key[at] == value]
        errors = errors_of(mine, *fit_shares(row for row in rows if row.key[at] != value))
        found |= {row.key: error for row, error in zip(mine, errors, strict=True)}
    return [found[row.key] for row in rows]


def _summed(errors: Sequence[float]) -> tuple[str, str]:
    """Format the mean size of the errors, and the worst error."""
    return f"{fmean(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"


def judge_seconds() -> str:
    """Show the errors by model, operation and type, with the constants that were fitted."""
    rows = timed_rows()
    share, ratio = fit_shares(rows)
    ours = [row.predicted.likely / row.measured - 1 for row in rows]
    columns = {"as predicted": ours, **{f"{by} left out": left_out_errors(rows, by) for by in LEFT_OUT}}
    names = grouped(range(len(rows)), lambda i: " ".join((rows[i].key[0], rows[i].key[1], rows[i].key[4])))
    lines = [
        [name, str(len(which)), *(", ".join(_summed([errors[i] for i in which])) for errors in columns.values())]
        for name, which in [*names.items(), ("all", range(len(rows)))]
    ]
    held = sum(row.predicted.low <= row.measured <= row.predicted.high for row in rows)
    mean, worst = _summed(ours)
    off = f"Predicted seconds are off by {mean} in the mean, and by {worst} at the worst"
    title = (
        f"{len(rows)} times of the seed table on {GPU}: convolutions and products at {share:.1%} of the peak, an"
        f" attention's FLOPs {ratio:.2f} times as long, bytes at {memory_rate(GPU)}"
    )
    notes = (
        f"{held} of {len(rows)} times lie in the predicted band, which is as wide as these rows lie apart.",
        "The two constants were fitted to these rows: the first column says how well so few of them can do. The others"
        " say what is predicted where they are fitted without a model, a size or an operation. sd15 and sdxl are one"
        " architecture, so without one of them the other still is there. Times have three decimals, which is 3% of the"
        " shortest.",
    )
    table = Columns(("", "rows", *columns), lines).text()
    answer = f"{off}, over {len(rows)} measured runs."
    return "\n".join([answer, title, "the mean of errors, and the worst:", table, "", *notes])
