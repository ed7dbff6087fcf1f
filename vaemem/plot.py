"""Figures of memory: needs matplotlib (``pip install 'vaemem[plot]'``), opens no window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ._fit import Fit, Formula
from ._table import ELEMENT_BYTES, MIB, SCHEMA, Row, Table, need

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that people with a colour-vision deficiency tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "float64": "^"}
_LINES = {"float32": "-", "float16": "--", "bfloat16": ":", "float64": "-."}
_GREY, _LIGHT = "#6E6E6E", "#D0D0D0"


def memory_vs_pixels(table: Table, fit: Fit | None = None, target: str = "allocated_bytes") -> Figure:
    """Memory against the number of pixels: one panel an operation, one colour a model.

    Parameters
    ----------
    table : Table
        Rows without the target or a size are left out. Measured rows are dots, estimated and predicted ones
        crosses a little larger, so that a measurement that agrees with its estimate is a dot on a cross.
    fit : Fit, optional
        Drawn as lines over the sizes of the table, one for each dtype that the formula was fitted to.
    target : str
        The column in bytes to draw.

    Returns
    -------
    matplotlib.figure.Figure
        ``figure.savefig("memory.png")`` writes it; a notebook with ``%matplotlib inline`` shows it.

    Raises
    ------
    ValueError
        The target is no column in bytes, differs from the fit's, or no row holds it.
    """
    sized = [column.name for column in SCHEMA if column.kind == "bytes"]
    if target not in sized:
        raise ValueError(f"target: want one of {', '.join(sized)}, got {target!r}")
    if fit is not None and fit.target != target:
        raise ValueError(f"fit: want one of {target}, got one of {fit.target}")
    rows = [row for row in table if None not in (row[target], row["height"], row["width"])]
    if not rows:
        raise ValueError(f"table: want rows with height, width and {target}, got none")
    ops = _distinct(row["op"] for row in rows)
    series = _distinct((row["model"], row["runtime"]) for row in rows)
    figure = _figure(5.2 * len(ops) + 0.6, 4.8)
    panels = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    for axes, op in zip(panels, ops, strict=True):
        here = [row for row in rows if row["op"] == op]
        for i, (model, runtime) in enumerate(series):
            mine = [row for row in here if (row["model"], row["runtime"]) == (model, runtime)]
            name = model if len({r for _, r in series}) == 1 else f"{model} ({runtime})"
            # Models that coincide stay visible: the first is drawn largest, under the others.
            style = {"color": _COLOURS[i % len(_COLOURS)], "zorder": 3 + i}
            excess = min(3, len(series) - 1 - i)
            _points(axes, mine, target, name, excess, style)
            for formula in fit or ():
                if mine and (formula.op, formula.model, formula.runtime) == (op, model, runtime):
                    _line(axes, formula, name, max(map(_pixels, here)), excess, style)
        axes.set(title=str(op), xlabel="megapixels")
        axes.set_xlim(left=0)
        _tidy(axes)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    # One unit for all panels: the axis is in bytes, its labels are not.
    top = max(row[target] for row in rows)
    scale, unit = (2**30, "GiB") if top >= 4 * 2**30 else (MIB, "MiB")
    ticker = need("matplotlib.ticker", "plot")
    step = 2.0 ** np.ceil(np.log2(max(top / scale, 1e-9) / 10))
    panels[0].yaxis.set_major_locator(ticker.MultipleLocator(step * scale))
    panels[0].yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / scale:g}"))
    panels[0].set_ylabel(f"{target.removesuffix('_bytes')}, {unit}")
    panels[0].set_ylim(bottom=0)
    if fit is not None:
        figure.supxlabel("T = 128 · H · W · element size, one full-size activation", fontsize=8, color=_GREY)
    return figure


def timeline(run: Any) -> Figure:
    """Bytes live in each pass of a run, in order, the peak marked.

    Parameters
    ----------
    run : object
        What `VAE.estimate` returns or `VAE.last_run` holds: `timeline`, `weights_bytes`, `peak_pass`.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        The run has no passes.
    """
    if not run.timeline:
        raise ValueError("run: want one with a timeline, got none")
    names = [name for name, _ in run.timeline]
    live = np.array([size for _, size in run.timeline], dtype=np.float64) / MIB
    weights = np.minimum(run.weights_bytes / MIB, live)
    peak = int(live.argmax())
    figure = _figure(9, 1.2 + 0.19 * len(names))
    axes = figure.subplots()
    y = np.arange(len(names))
    axes.barh(y, weights, height=0.8, color=_LIGHT)
    colours = [_COLOURS[0]] * len(names)
    colours[peak] = _COLOURS[1]
    axes.barh(y, live - weights, left=weights, height=0.8, color=colours)
    text = f"peak {live[peak]:,.1f} MiB"  # beside the bar; the axis leaves room for it
    axes.text(live[peak] * 1.01, peak, text, va="center", fontsize=8, color=_COLOURS[1], fontweight="bold")
    axes.set_yticks(y, names, fontsize=7)
    axes.set(xlabel="bytes live, MiB", ylim=(len(names) - 0.4, -0.6), xlim=(0, live[peak] * 1.22))
    _tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    patch = need("matplotlib.patches", "plot").Patch
    axes.legend(
        handles=[
            patch(color=_LIGHT, label="weights"),
            patch(color=_COLOURS[0], label="activations, scratch, output"),
            patch(color=_COLOURS[1], label="the same, at the peak"),
        ],
        frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1),
    )  # fmt: skip
    return figure


def _figure(width: float, height: float) -> Figure:
    # A bare Figure: no pyplot, so no window, no global state, and any thread may draw.
    figure: Figure = need("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained", dpi=144)
    return figure


def _points(axes: Axes, rows: list[Row], target: str, name: str, excess: int, style: dict[str, Any]) -> None:
    for dtype, source in _distinct((row["dtype"], row["source"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["source"]) == (dtype, source)]
        is_measured = source in ("measured", None)
        axes.plot(
            [_pixels(row) / 1e6 for row in mine], [row[target] for row in mine], linestyle="none", clip_on=False,
            marker=_MARKERS.get(dtype, "v") if is_measured else "x", markersize=(5 if is_measured else 9) + 3 * excess,
            markeredgewidth=0 if is_measured else 1.5, label=f"{name} {dtype}, {source}", **style,
        )  # fmt: skip


def _line(axes: Axes, formula: Formula, name: str, pixels: int, excess: int, style: dict[str, Any]) -> None:
    x = np.array([0, pixels])
    label: str | None = f"{name}: {formula.a / 128:.2f} T {formula.b / MIB:+.1f} MiB"
    for dtype in _distinct(row.dtype for row in formula.rows):
        y = formula.a * x * ELEMENT_BYTES[dtype] + formula.b
        axes.plot(x / 1e6, y, _LINES[dtype], linewidth=1.2 + 1.8 * excess, label=label, **style)
        label = None  # one line of the legend a formula


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _pixels(row: Row) -> int:
    return int(row["height"] * row["width"])


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
