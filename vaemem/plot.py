"""Draw figures of memory with matplotlib (``pip install 'vaemem[plot]'``). No window opens."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vaemem._common import ELEMENT_BYTES, MIB, choose, distinct, grouped, need, png, whole
from vaemem._errors import ArgumentError
from vaemem.prediction.predict_vae import Prediction
from vaemem.tables.estimators import Comparison, pixels
from vaemem.tables.fit import KEY, Fit, FittedLine
from vaemem.tables.table import BYTE_COLUMNS, Row, Table, differing, in_tiles, in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart with a colour-vision deficiency (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = {"float32": "o", "float16": "s", "bfloat16": "D", "float64": "^"}
_CROSSES = {"float32": "x", "float16": "+", "bfloat16": "1", "float64": "2"}
# Columns that have one value in all rows of a colour.
_COLOURED = tuple(name for name in KEY if name not in ("op", "dtype"))
_SHIPPED_LINES = ("--", ":", "-.")
_DASH = 5.0  # in line widths
_GREY, _LIGHT = "#6E6E6E", "#D0D0D0"

__all__ = [
    "estimator_errors", "implied_constants", "memory_vs_pixels", "pipeline", "tile_peaks", "timeline", "tradeoff",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def memory_vs_pixels(table: Table, fit: Fit | None = None, target: str = "allocated_bytes") -> Figure:
    """Plot memory against the number of pixels: a panel per operation, a colour per model, runtime, card, batch and
    tile, a marker per dtype.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Rows without the target or a size are left out. Measured rows are dots. Estimated and predicted rows are
        slightly larger crosses, so a measurement that agrees with its estimate is a dot on a cross. Dots of rows that
        ran in tiles are hollow.
    fit : Fit, optional
        Draw it as lines over the sizes of the table, one for each dtype of the fit. With several models the lines are
        dashed, and the dashes of two equal lines fill each other's gaps.
    target : str
        The column in bytes to plot.

    Returns
    -------
    matplotlib.figure.Figure
        ``figure.savefig("memory.png")`` writes it; a notebook shows it as the last value of a cell.

    Raises
    ------
    ValueError
        The target is not a column in bytes, differs from the fit's, or no row has it.

    Examples
    --------
    >>> rows = seed_table().filter(op="decode", dtype="float16")
    >>> plot.memory_vs_pixels(rows, fit(rows)).savefig("memory.png")
    """
    table = Table(table)
    choose("target", target, BYTE_COLUMNS)
    if fit is not None and fit.target != target:
        raise ArgumentError("fit", f"a fit of {target}", f"one of {fit.target}")
    rows = [row for row in table if None not in (row[target], row["height"], row["width"])]
    if not rows:
        raise ArgumentError("table", f"rows with height, width and {target}", "none")
    name_of, colours = _series(rows)
    figure, panels = _panels(rows, 4.8)
    for op, (axes, here) in panels.items():
        lines = grouped(here, lambda pair: name_of(pair[0]))
        for i, (name, colour) in enumerate(colours.items()):
            mine = lines.get(name, [])
            # Equal models stay visible: the first is drawn largest, under the others.
            excess, style = 3 * min(3, len(colours) - 1 - i), {"color": colour, "zorder": 3 + i}
            for (dtype, source), some in grouped(mine, lambda pair: (pair[0]["dtype"], pair[0]["source"])).items():
                is_run = source in ("measured", None)
                marker, size = (_MARKERS.get(dtype, "v"), 5) if is_run else (_CROSSES.get(dtype, "|"), 9)
                values = [row[target] for row, _ in some]
                _dots(axes, some, values, marker, size + excess, f"{name} {dtype}, {source}", style)
            for formula in fit or ():
                if mine and formula.op == op and _is_of(formula, mine[0][0]):
                    dashes = "-" if len(colours) == 1 else (_DASH * i, (_DASH, _DASH * (len(colours) - 1)))
                    _line(axes, formula, name, max(pixels(row) for row, _ in here), style | {"linestyle": dashes})
    # One unit for all panels: the axis is in bytes, its labels are in MiB or GiB.
    top = max(row[target] for row in rows)
    scale, unit = (2**30, "GiB") if top >= 4 * 2**30 else (MIB, "MiB")
    vertical = _finish_panels(figure, panels, f"{target.removesuffix('_bytes')}, {unit}")
    ticker = need("matplotlib.ticker", "plot")
    step = 2.0 ** np.ceil(np.log2(max(top / scale, 1e-9) / 10))
    vertical.set_major_locator(ticker.MultipleLocator(step * scale))
    vertical.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / scale:g}"))
    if fit is not None:
        figure.supxlabel("T = 128 · H · W · element size, one full-size activation", fontsize=8, color=_GREY)
    return figure


def timeline(run: Any) -> Figure:
    """Plot the bytes in use in each pass of a run, in order, with the peak marked.

    Parameters
    ----------
    run : object
        From `VAE.estimate` or `VAE.last_run`: it has `timeline`, `weights_bytes`, `peak_pass`.

    Raises
    ------
    ValueError
        The run has no passes.

    Examples
    --------
    >>> plot.timeline(vae.estimate("decode", 512, 512)).savefig("timeline.png")
    """
    _expect("run", run, "peak_pass", "what VAE.estimate gives or VAE.last_run holds")
    if not run.timeline:
        raise ArgumentError("run", "a run with a timeline", "none")
    names, sizes = zip(*run.timeline, strict=True)
    live = np.array(sizes, dtype=np.float64) / MIB
    weights = np.minimum(run.weights_bytes / MIB, live)
    peak = int(live.argmax())
    axes = _figure(9, 1.2 + 0.19 * len(names)).subplots()
    y = np.arange(len(names))
    axes.barh(y, weights, height=0.8, color=_LIGHT)
    colours = [_COLOURS[0]] * len(names)
    colours[peak] = _COLOURS[1]
    axes.barh(y, live - weights, left=weights, height=0.8, color=colours)
    text = f"peak {live[peak]:,.1f} MiB"  # next to the bar; the axis leaves space for it
    axes.text(live[peak] * 1.01, peak, text, va="center", fontsize=8, color=_COLOURS[1], fontweight="bold")
    axes.set_yticks(y, names, fontsize=7)
    axes.set(xlabel="bytes live, MiB", ylim=(len(names) - 0.4, -0.6), xlim=(0, live[peak] * 1.22))
    axes.tick_params(axis="y", length=0)
    patch = need("matplotlib.patches", "plot").Patch
    meanings = {_LIGHT: "weights", _COLOURS[0]: "activations, scratch, output", _COLOURS[1]: "the same, at the peak"}
    handles = [patch(color=colour, label=meaning) for colour, meaning in meanings.items()]
    return _finish(axes, "x", handles=handles, ncols=3)


def tradeoff(table: Table, points: Mapping[str, tuple[float, float]] | None = None) -> Figure:
    """Plot bytes against work, relative to the fastest plan: a step per plan, a colour per model, operation and size.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        From `vaemem.tradeoff`, or several of them added.
    points : dict of name to (bytes, work), optional
        Further points, such as another runtime's; bytes include weights.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        No row has work, allocated_bytes and weights_bytes.

    Examples
    --------
    >>> plot.tradeoff(tradeoff(vae, "decode", 256, 256), {"another": (40 << 20, 1.5)}).savefig("tradeoff.png")
    """
    table = Table(table)
    rows = [row for row in table if None not in (row["work"], row["allocated_bytes"], row["weights_bytes"])]
    if not rows:
        raise ArgumentError("table", "rows with work, allocated_bytes and weights_bytes", "none")
    axes = _figure(7.2, 4.4).subplots()
    curves = grouped(rows, operator.itemgetter("model", "op", "height", "width"))
    for i, ((model, op, height, width), mine) in enumerate(curves.items()):
        mine.sort(key=lambda row: row["work"])
        mebibytes = [(row["allocated_bytes"] + row["weights_bytes"]) / MIB for row in mine]
        axes.step(
            mebibytes, [row["work"] for row in mine], where="pre", marker="o", markersize=4, linewidth=1.4,
            color=_COLOURS[i % len(_COLOURS)], label=f"{model} {op} {height}x{width}",
        )  # fmt: skip
    for name, (size, work) in (points or {}).items():
        axes.plot(size / MIB, work, "D", color=_GREY, markersize=6)
        axes.annotate(name, (size / MIB, work), (6, 4), textcoords="offset points", fontsize=8, color=_GREY)
    axes.set(xlabel="peak, MiB, weights included", ylabel="work, of an unlimited run")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return _finish(axes, ncols=2)


def implied_constants(table: Table, shipped: Mapping[str, Mapping[str, float]] | None = None,
                      target: str = "reserved_bytes") -> Figure:  # fmt: skip
    """Plot the constant k that k*H*W*e would need against the number of pixels: a panel per operation.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Rows without the target, a size or a dtype of known width are left out. Dots of rows that ran in tiles are
        hollow.
    shipped : dict of op to dict of name to constant, optional
        Lines across the operation's panel.
    target : str
        The column in bytes to plot.

    Raises
    ------
    ValueError
        The target is not a column in bytes, or no row has it.

    Examples
    --------
    >>> plot.implied_constants(seed_table(), {"decode": {"ComfyUI": 2178}}).savefig("constants.png")
    """
    table = Table(table)
    choose("target", target, BYTE_COLUMNS)
    rows = [r for r in table if None not in (r[target], r["height"], r["width"]) and r["dtype"] in ELEMENT_BYTES]
    if not rows:
        raise ArgumentError("table", f"rows with height, width, dtype and {target}", "none")
    name_of, colours = _series(rows)
    names = list(colours)
    figure, panels = _panels(rows, 4.4)
    for op, (axes, here) in panels.items():
        series = grouped(here, lambda pair: (name_of(pair[0]), pair[0]["dtype"]))
        for i, ((name, dtype), mine) in enumerate(series.items()):
            constants = [row[target] / (pixels(row) * ELEMENT_BYTES[dtype]) for row, _ in mine]
            excess = 3 * min(3, len(names) - 1 - names.index(name))  # models that coincide stay visible
            style = {"color": colours[name], "zorder": 3 + i}
            _dots(axes, mine, constants, _MARKERS.get(dtype, "v"), 5 + excess, f"{name} {dtype}", style)
        for i, (name, value) in enumerate((shipped or {}).get(op, {}).items()):
            dashes = _SHIPPED_LINES[i % 3]  # named in the legend, because two lines may be close
            axes.axhline(value, color=_GREY, linewidth=1, label=f"{name}, {value:g}", linestyle=dashes)
    _finish_panels(figure, panels, f"{target.removesuffix('_bytes')} / (H·W·e)")
    return figure


def estimator_errors(comparison: Comparison) -> Figure:
    """Plot estimate / measured for each model, op, dtype and tile: a dot at the median, a bar from lowest to highest.

    Parameters
    ----------
    comparison : Comparison
        From `vaemem.compare`.

    Raises
    ------
    ValueError
        No estimator applies to any row.

    Examples
    --------
    >>> plot.estimator_errors(compare(seed_table(), ["comfyui", "invokeai"])).savefig("errors.png")
    """
    _expect("comparison", comparison, "groups", "what vaemem.compare gives")
    groups = [group for group in comparison.groups if group.model is not None and group.lowest > -1]
    if not groups:
        raise ArgumentError("comparison", "an estimator that applies to a row", "none")
    keys = distinct(group[1:6] for group in groups)  # model, op, dtype and tiles
    estimators = grouped(groups, lambda group: group.estimator)
    axes = _figure(9, 1.4 + 0.34 * len(keys)).subplots()
    for i, (name, mine) in enumerate(estimators.items()):
        y = [keys.index(g[1:6]) + (i - (len(estimators) - 1) / 2) * 0.8 / len(estimators) for g in mine]
        low, median, high = ([1 + value for value in column] for column in
                             zip(*((g.lowest, g.median, g.highest) for g in mine), strict=True))  # fmt: skip
        colour = _COLOURS[i % len(_COLOURS)]
        axes.hlines(y, low, high, color=colour, linewidth=2)
        axes.plot(median, y, "o", color=colour, markersize=4, label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticker = need("matplotlib.ticker", "plot")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    kinds = [dict(zip(("model", "op", "dtype", "tile", "tile_overlap"), key, strict=True)) for key in keys]
    shown = ["model", "op", "dtype", *differing(kinds, ("tile", "tile_overlap"))]
    axes.set_yticks(range(len(keys)), [" ".join(in_words(kind, shown)) for kind in kinds], fontsize=8)
    axes.set(xlabel=f"estimate / {comparison.target.removesuffix('_bytes')}", ylim=(len(keys) - 0.4, -0.6))
    return _finish(axes, "x", ncols=3)


def tile_peaks(predictions: Iterable[Prediction], target: Literal["allocated", "reserved"] = "reserved") -> Figure:
    """Plot the peaks of predicted runs in tiles against the tile's side: a panel per model, a colour per overlap.

    Parameters
    ----------
    predictions : iterable of Prediction
        From `vaemem.predict`. Runs without tiles are lines across their model's panel.
    target : {"allocated", "reserved"}
        The attribute to plot, in bytes above the weights and the input.

    Raises
    ------
    ValueError
        No run is in tiles, or the target is unknown.

    Examples
    --------
    >>> made = [predict("sd15", "decode_tiled", 768, 768, "float16", tile=side) for side in (256, 512)]
    >>> plot.tile_peaks([*made, predict("sd15", "decode", 768, 768, "float16")]).savefig("tiles.png")
    """
    choose("target", target, ("allocated", "reserved"))
    models = grouped(predictions, lambda p: p.model)
    parts = sorted({p.tile_overlap or 0.0 for made in models.values() for p in made if p.tile})
    if not parts:
        raise ArgumentError("predictions", "some of a tiled op", "none")
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure = _figure(2.7 * columns + 0.6, 2.0 * rows + 0.8)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, (model, made) in zip(panels, models.items(), strict=False):
        for i, part in enumerate(parts):
            mine = [p for p in made if p.tile and part == (p.tile_overlap or 0.0)]
            points = sorted((p.tile, getattr(p, target) / MIB) for p in mine)
            # Equal lines stay visible: the first is drawn widest, under the others.
            style = {"linewidth": 1.2 + 2.2 * (len(parts) - 1 - i), "color": _COLOURS[i % len(_COLOURS)]}
            axes.plot(*zip(*points, strict=True), label=f"overlap {part:g}", **style)
        for p in (p for p in made if not p.tile):
            axes.axhline(getattr(p, target) / MIB, color=_GREY, linestyle="--", label="whole")
        axes.set_title(model, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#E5E5E5", linewidth=0.8)
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    panels[0].set_ylim(bottom=0)
    figure.supxlabel("side of a tile, pixels", fontsize=9)
    figure.supylabel(f"{target}, MiB", fontsize=9)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


# Parts of a pipeline's phase, from the bottom up: attribute, meaning, colour. A plan's phase has two parts.
_PHASE_PARTS = (
    ("weights", "weights", _LIGHT),
    ("activations", "tensors", _COLOURS[0]),
    ("workspace", "workspaces", _COLOURS[4]),
    ("cached", "kept by the allocator", _COLOURS[5]),
    ("outside", "outside of PyTorch", _COLOURS[3]),
)
_PLANNED_PARTS = (_PHASE_PARTS[0], ("added", "besides the weights", _COLOURS[0]))


def pipeline(run: Any, available: int | None = None) -> Figure:
    """Plot a pipeline's phases side by side: resident bytes, added bytes, and the card's memory.

    Parameters
    ----------
    run : PipelinePrediction, or Outcome of a PipelinePlan
        It has `phases`, or a `way` with them.
    available : int, optional
        Bytes of the card, drawn as a line; by default those of a prediction.

    Raises
    ------
    ValueError
        There are no phases.

    Examples
    --------
    >>> plan = plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx")
    >>> plot.pipeline(plan.recommended, plan.room.card).savefig("pipeline.png")
    """
    way = getattr(run, "way", run)
    _expect("run", way, "phases", "a prediction, or one outcome of a plan, such as plan.recommended")
    for phase in way.phases:
        _expect("run", phase, "weights", "the phases of a prediction or of a plan")
    phases = way.phases
    if not phases:
        raise ArgumentError("run", "a run with phases", "none")
    available = getattr(run, "available", None) if available is None else whole("available", available, 0)
    axes = _figure(1.6 + 1.3 * len(phases), 4.2).subplots()
    bottom = np.zeros(len(phases))
    for name, meaning, colour in _PLANNED_PARTS if hasattr(way, "played") else _PHASE_PARTS:
        sizes = np.array([getattr(phase, name) for phase in phases], dtype=np.float64) / MIB
        if sizes.any():
            axes.bar(range(len(phases)), sizes, 0.62, bottom, color=colour, label=meaning)
            bottom += sizes
    top = max(bottom.max(), (available or 0) / MIB)
    for i, total in enumerate(bottom):
        is_over = available is not None and total * MIB > available
        style: dict[str, Any] = {"color": _COLOURS[1], "fontweight": "bold"} if is_over else {"color": "black"}
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(i, total + 0.01 * top, f"{total:,.0f}", ha="center", va="bottom", fontsize=8, bbox=behind, **style)
    if available is not None:
        axes.axhline(available / MIB, color=_COLOURS[1], linewidth=1.4, linestyle="--", label="the card's memory")
    axes.set_xticks(range(len(phases)), [phase.name for phase in phases])
    axes.set(ylabel="MiB", ylim=(0, 1.1 * top))
    return _finish(axes, ncols=2)


def _expect(argument: str, value: Any, attribute: str, wanted: str) -> None:
    if not hasattr(value, attribute):
        raise ArgumentError(argument, wanted, type(value).__name__)


def _figure(width: float, height: float) -> Figure:
    # A bare Figure without pyplot: no window and no global state, so any thread may draw.
    figure: Figure = need("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained", dpi=144)
    figure._repr_mimebundle_ = functools.partial(_make_bundle, figure)  # type: ignore[attr-defined]
    return figure


def _make_bundle(figure: Figure, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a PNG for a notebook, with or without ``%matplotlib inline``: 80 pixels of the page per inch."""
    size = {"width": round(80 * figure.get_figwidth())}
    return {"image/png": png(figure), "text/plain": repr(figure)}, {"image/png": size}


def _panels(rows: Sequence[Row], height: float) -> tuple[Figure, dict[Any, tuple[Axes, list[tuple[Row, bool]]]]]:
    """Make a panel per operation, over the pixels, with one vertical axis. Return each panel with its rows, and whether
    each row ran in tiles."""
    ops = grouped(((row, in_tiles(row)) for row in rows), lambda pair: pair[0]["op"])
    figure = _figure(5.2 * len(ops) + 0.6, height)
    panels = figure.subplots(1, len(ops), sharey=True, squeeze=False)[0]
    for axes, op in zip(panels, ops, strict=True):
        axes.set(title=str(op), xlabel="megapixels")
    return figure, dict(zip(ops, zip(panels, ops.values(), strict=True), strict=True))


def _series(rows: Sequence[Row]) -> tuple[Callable[[Row], str], dict[str, Any]]:
    """Return a function that names rows by their differences besides operation, size, dtype and source; and the colour
    of each name."""
    columns = [name for name in differing(rows, _COLOURED) if name != "model"]

    def name_of(row: Row) -> str:
        words = in_words(row, columns)
        return f"{row['model']} ({', '.join(words)})" if words else str(row["model"])

    names = distinct(map(name_of, rows))
    colours: Sequence[Any] = _COLOURS
    if len(names) > len(_COLOURS):  # no colour twice
        colours = need("matplotlib", "plot").colormaps["turbo"](np.linspace(0, 1, len(names)))
    return name_of, dict(zip(names, colours, strict=False))


def _is_of(formula: FittedLine, row: Row) -> bool:
    """Return whether a formula was fitted to rows of this row's colour. It leaves open columns that differ in them."""
    return all(getattr(formula, name) in (None, row[name]) for name in _COLOURED)


def _dots(
    axes: Axes, rows: Sequence[tuple[Row, bool]], values: Sequence[float], marker: str, size: float, name: str,
    style: dict[str, Any],
) -> None:  # fmt: skip
    """Plot values over their rows' pixels; hollow for rows that ran in tiles."""
    is_cross = marker in (*_CROSSES.values(), "|")
    for hollow in sorted({tiled for _, tiled in rows}):
        axes.plot(
            [pixels(row) / 1e6 for row, tiled in rows if tiled == hollow],
            [value for value, (_, tiled) in zip(values, rows, strict=True) if tiled == hollow],
            linestyle="none", clip_on=False, marker=marker, markersize=size, label=name,
            fillstyle="none" if hollow else "full", markeredgewidth=1.5 if hollow or is_cross else 0, **style,
        )  # fmt: skip
        name = "_"  # one legend entry per series


def _line(axes: Axes, formula: FittedLine, name: str, pixels: int, style: dict[str, Any]) -> None:
    x = np.array([0, pixels])
    label = f"{name}: {formula.a / 128:.2f} T {formula.b / MIB:+.1f} MiB"
    axes.plot([], [], linewidth=1.6, color=style["color"], label=label)  # one solid legend entry per formula
    for dtype in distinct(row.dtype for row in formula.rows):
        y = formula.a * x * ELEMENT_BYTES[dtype] + formula.b
        axes.plot(x / 1e6, y, linewidth=1.6, **style)


def _finish_panels(figure: Figure, panels: Mapping[Any, tuple[Axes, Any]], label: str) -> Any:
    """Start axes at 0, put legends below their panels and enlarge the figure for them. Return the vertical axis."""
    lines = []
    for axes, _ in panels.values():
        axes.set_xlim(left=0)
        if any(line.get_fillstyle() == "none" for line in axes.lines):
            axes.plot([], [], "o", fillstyle="none", color=_GREY, label="hollow: in tiles")
        lines.append(-(-len(axes.get_legend_handles_labels()[0]) // 2))
        _finish(axes, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.13))
    figure.set_figheight(figure.get_figheight() + 0.19 * max(lines))
    (first, _), *_ = panels.values()
    first.set_ylabel(label)
    first.set_ylim(bottom=0)
    return first.yaxis


def _finish(axes: Axes, grid: Literal["both", "x"] = "both", **legend: Any) -> Figure:
    """Add a legend above the axes, or where `legend` says."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    style = {"fontsize": 8, "columnspacing": 1, "handlelength": 1.6, "handletextpad": 0.5}
    axes.legend(frameon=False, **{"loc": "lower left", "bbox_to_anchor": (0, 1)} | style | legend)
    return axes.figure  # type: ignore[return-value]
