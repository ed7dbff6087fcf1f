"""The report on a table of memory: tables, ratios, scaling, constants, models compared and advice.

Each section is one function, which computes every figure from the rows."""

from __future__ import annotations

import collections
import contextlib
import html
import importlib.util
import itertools
import math
import operator
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vaemem import _core, plot
from vaemem._common import ELEMENT_BYTES, distinct, grouped, mib, png
from vaemem._errors import ArgumentError
from vaemem._saving import write
from vaemem.prediction.gpus import find_gpu
from vaemem.reports.document import Document
from vaemem.reports.row_statistics import case, constant, growth, pairs, parameters, percentile, ratio, span
from vaemem.tables.estimators import SHIPPED, Comparison, compare, in_tiles_untold, pixels
from vaemem.tables.fit import FittedLine, fit
from vaemem.tables.table import Row, Table, as_ran, differing, in_tiles, in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COUNTERS = ("allocated_bytes", "reserved_bytes")
_TILES = {"tile": "tile", "tile_overlap": "overlap"}  # columns, and their headings


class Report:
    """A report, as Markdown and as HTML.

    Attributes
    ----------
    markdown, html : str
        The report. The Markdown refers to its figures as PNG files in its own folder, the HTML holds them.
    figures : dict of str to matplotlib.figure.Figure
    comparison : Comparison or None
        The shipped estimators compared with the rows; None if no row can be compared.
    """

    def __init__(self, document: Document, comparison: Comparison | None) -> None:
        self.markdown, self.html = document.markdown(), document.html()
        self.figures: dict[str, Figure] = document.figures
        self.comparison = comparison

    def save(self, path: str | os.PathLike[str], html: bool | str | os.PathLike[str] = True) -> list[Path]:
        """Write the report.

        Parameters
        ----------
        path : path
            The Markdown file, or a folder for ``report.md``; made if needed. Figures go to the same folder.
        html : bool or path
            Whether to write the HTML next to it, or where to write it.

        Returns
        -------
        list of pathlib.Path
            The files that were written.
        """
        file = Path(path)
        file = file if file.suffix == ".md" else file / "report.md"
        figures = {file.parent / f"{name}.png": png(figure) for name, figure in self.figures.items()}
        written = {file: self.markdown.encode(), **figures}
        if html:
            written[file.with_suffix(".html") if html is True else Path(html)] = self.html.encode()
        for target, content in written.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target, content)
        return list(written)

    def _repr_html_(self) -> str:
        """Show the report in a frame of its own, so that its style stays out of the notebook."""
        page = html.escape(self.html)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40rem; border: 1px solid #ddd"></iframe>'

    def __str__(self) -> str:
        return self.markdown


def report(
    table: Table, path: str | os.PathLike[str] | None = None, html: bool | str | os.PathLike[str] = True, *,
    estimators: Any = None, plots: bool = True, title: str = "Memory of VAEs",
) -> Report:  # fmt: skip
    """Report on a table: its rows, ratios, scaling, constants, formulas and advice.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Measured, estimated or predicted rows alike.
    path : path, optional
        Where to write the Markdown: a file ``*.md``, or a folder for ``report.md``. Figures go to the same folder.
    html : bool or path
        With a `path`: whether to write one self-contained HTML file next to the Markdown, or where to write it.
    estimators : optional
        Estimators for `vaemem.compare`; by default all shipped ones.
    plots : bool
        Whether to draw figures, which needs matplotlib (``pip install 'vaemem[plot]'``).
    title : str

    Raises
    ------
    ValueError
        The table has no rows with a model, an op and a size; bad estimators.
    ImportError
        `plots` without matplotlib.
    OSError
        The files cannot be written.

    Notes
    -----
    The report computes every figure from the rows. The report lists the rows that ran in tiles under the name of a
    whole op, as their column `tile` shows. Scaling, constants and fits leave these rows out.

    Examples
    --------
    >>> [path.name for path in report(seed_table(), plots=False).save("out")]
    ['report.md', 'report.html']
    """
    every = Table(table)
    table, pipelines = every.filter(lambda row: row["op"] != "pipeline"), every.filter(op="pipeline")
    facts = _Facts(table)
    if not facts.rows and not len(pipelines):
        raise ArgumentError("table", "rows with model, op, height and width", f"none in {len(every)} rows")
    comparable = Table(row for row in facts.held if row["dtype"])
    try:
        comparison = compare(comparable, estimators, facts.target) if len(comparable) else None
    except ValueError:
        if estimators is not None:
            raise
        comparison = None  # no shipped estimator applies to these rows
    document = Document(title)
    if facts.rows:
        _of_vaes(document, facts, comparable, comparison, plots)
    if len(pipelines):
        _pipelines(document, pipelines)
    made = Report(document, comparison)
    if path is not None:
        made.save(path, html)
    return made


def _of_vaes(document: Document, facts: _Facts, comparable: Table, comparison: Comparison | None, plots: bool) -> None:
    """Write the sections about rows of VAEs."""
    _summary(document, facts)
    _advice(document, facts, comparison)
    _system(document, facts)
    _tables(document, facts)
    if plots and comparison is not None:
        document.figure("memory", "Memory against pixels", plot.memory_vs_pixels(comparable, target=facts.target))
    _ratios(document, facts)
    _scaling(document, facts)
    _constants(document, facts, plots)
    _estimates(document, comparison, plots)
    _formulas(document, facts)
    _models(document, facts)


def _pipelines(document: Document, table: Table) -> None:
    """Write what each phase of a pipeline needs of the card, how it grows, and a published equation's error."""
    document.heading("Whole pipelines")
    document.text("MiB that each phase needs of the card, without a CUDA context. The whole needs the largest of them.")
    key = ("model", "device", "way", "frames", "height", "width", "batch", "tokens")
    for (model, device, way, frames), mine in grouped(table, operator.itemgetter(*key[:4])).items():
        document.heading(f"{model} on {device}, {way}{f', {frames} frames' if frames else ''}", 3)
        runs = grouped(mine, operator.itemgetter(*key[4:])).values()
        phases = distinct(row["phase"] for row in mine)
        lines = []
        for rows in runs:
            held = {row["phase"]: _known(row["reserved_bytes"], mib) for row in rows}
            shown = (rows[0][name] for name in ("batch", "tokens", "dtype"))
            lines.append((_size(rows[0]), *shown, *map(held.get, phases)))
        document.table(("size", "batch", "tokens", "dtype", *phases), lines)
        with contextlib.suppress(ValueError):  # one size alone
            fitted = fit(Table(mine), "reserved_bytes")
            grows = [(f.phase, f.batch, f.tokens, f"{f.a:.1f}", mib(f.b), _span(f)) for f in fitted]
            document.text("Fits a H W e + b by least squares, with the largest errors over the rows:")
            document.table(("phase", "batch", "tokens", "a", "b MiB", "error"), grows)
    with contextlib.suppress(ValueError):  # which is about none of them
        said = compare(Table(row for row in table if row["reserved_bytes"]), "sd15-equation")
        document.text("A published equation for the whole of Stable Diffusion 1.5, compared with these rows:")
        document.table(*said.grid(rows=True))


class _Facts:
    """The rows, grouped as the sections need them."""

    def __init__(self, table: Table) -> None:
        self.rows = [*table.filter(lambda row: row["height"] and row["width"] and row["op"] and row["model"])]
        self.tiled = [row for row in self.rows if in_tiles_untold(row)]
        self.whole = [row for row in self.rows if not in_tiles_untold(row)]
        self.both = [row for row in self.rows if all(row[name] for name in _COUNTERS)]
        has_reserved = any(row["reserved_bytes"] for row in self.rows)
        self.target = "reserved_bytes" if has_reserved else "allocated_bytes"
        self.word = self.target.removesuffix("_bytes")
        self.held = [row for row in self.rows if row[self.target]]
        # Rows with a meaningful implied constant: whole images in a dtype of known width.
        images = [as_ran(row) for row in self.rows if row[self.target] and not in_tiles(row)]
        self.sized = [row for row in images if row["dtype"] in ELEMENT_BYTES]
        names = ("runtime", "device", "batch", "source", *_TILES)
        self._varying = {model: differing(same, names) for model, same in _by("model", self.rows).items()}

    def label(self, row: Row) -> str:
        """Name a row's model, and how the row differs from others of it: runtime, device, batch, source, tiles."""
        varying = in_words(row, self._varying[row["model"]])
        return f"{row['model']} ({', '.join(varying)})" if varying else str(row["model"])

    def groups(self, rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
        """Group rows by label and columns, in their order."""
        return grouped(rows, lambda row: (self.label(row), *(str(row[name]) for name in names)))

    def top(self, rows: Iterable[Row]) -> Row:
        """Return the row that takes the most."""
        return max(rows, key=operator.itemgetter(self.target))


def _summary(document: Document, facts: _Facts) -> None:
    document.heading("Summary")
    names = (distinct(str(row[name]) for row in facts.rows if row[name]) for name in ("model", "op", "dtype"))
    sizes = " to ".join(distinct(_size(end(facts.rows, key=pixels)) for end in (min, max)))
    items = [f"{_count(len(facts.rows), 'row')}: {'; '.join(map(', '.join, names))}; {sizes}."]
    for op, rows in _by("op", facts.held).items():
        top = facts.top(rows)
        items.append(f"The most that {op} takes: {mib(top[facts.target])} MiB {facts.word}, {case(top)}.")
    if facts.tiled:
        items.append(f"{_count(len(facts.tiled), 'row')} ran in tiles although the op does not say so.")
    document.items(items)


def _system(document: Document, facts: _Facts) -> None:
    document.heading("System")
    items = []
    for device, mine in _by("device", facts.rows).items():
        text = f"Device: {device or 'not said'} ({_count(len(mine), 'row')})"
        with contextlib.suppress(ValueError):  # no GPU that vaemem has the properties of
            total, held = find_gpu(device).total_memory if device else 0, [row for row in mine if row[facts.target]]
            if total and held:
                top = facts.top(held)
                share = f"{100 * top[facts.target] / total:.0f}%"
                text += f", {total / 2**30:.1f} GiB; the largest row ({case(top)}) takes {share} of it"
        items.append(text)
    for name, what in (("source", "Rows"), ("runtime", "Runtime"), ("versions", "Versions")):
        counts = collections.Counter(row[name] for row in facts.rows)
        if any(counts):
            items.append(f"{what}: " + ", ".join(f"{value} ({n})" for value, n in counts.items() if value))
    for model, mine in _by("model", facts.rows).items():
        if model in _core.models():
            widths = sorted({ELEMENT_BYTES[row["dtype"]] for row in mine if row["dtype"] in ELEMENT_BYTES})
            sizes = [f", {mib(parameters(model) * e)} MiB in {e}-byte weights" for e in widths]
            items.append(f"{model}: {parameters(model):,} parameters{''.join(sizes)}")
    document.items(items)
    if facts.tiled:
        document.text(
            f"**{_count(len(facts.tiled), 'row')} ran in tiles although the op does not say so**. They stay in the"
            " tables and the mean ratios, marked, and are left out of everything else."
        )
        lines, alike = [], facts.groups(facts.whole, "op", "dtype")
        for key, tiled in facts.groups(facts.tiled, "op", "dtype").items():
            ends = [max(rows, key=pixels) for rows in (tiled, alike.get(key)) if rows]
            said = [f"{case(row)}: {mib(row['allocated_bytes'])} MiB" for row in ends]
            lines.append(", ".join([f"{said[0]} allocated", *said[1:]]))
        document.items(lines)


def _tables(document: Document, facts: _Facts) -> None:
    document.heading("Memory and time by model and op")
    cut = [name for name in _TILES if any(row[name] for row in facts.rows)]
    sizes = ("allocated MiB", "reserved MiB", "ratio", "seconds")
    header = ("size", "dtype", "group", *sizes, *(_TILES[name] for name in cut), "note")
    for model, mine in grouped(facts.rows, facts.label).items():
        document.heading(model, 3)
        for op, rows in _by("op", mine).items():
            document.heading(op, 4)
            lines = []
            for row in rows:
                held = (_known(row[name], mib) for name in _COUNTERS)
                times = f"{ratio(row):.2f}" if all(row[name] for name in _COUNTERS) else ""
                tiles = (_known(row[name], "{:g}".format) for name in cut)
                note = "ran in tiles" if in_tiles_untold(row) else ""
                seconds = _known(row["seconds"], "{:.3f}".format)
                lines.append((*_case(row), *held, times, seconds, *tiles, note))
            document.table(header, lines)


def _ratios(document: Document, facts: _Facts) -> None:
    if not facts.both:
        return
    document.heading("Reserved over allocated")
    ratios = [ratio(row) for row in facts.both]
    low, high = min(facts.both, key=ratio), max(facts.both, key=ratio)
    document.text(
        f"On average {statistics.mean(ratios):.2f} over {_count(len(ratios), 'row')}, from {ratio(low):.2f} "
        f"({case(low)}) to {ratio(high):.2f} ({case(high)}); at least 2 in "
        f"{sum(value >= 2 for value in ratios)} of them."
    )
    lines = []
    for (model, op), rows in facts.groups(facts.both, "op").items():
        kinds = grouped(rows, lambda row: str(row["dtype"]))
        for dtype, mine in [("all", rows), *(kinds.items() if len(kinds) > 1 else ())]:
            values = [ratio(row) for row in mine]
            figures = (statistics.mean(values), min(values), max(values))
            lines.append((model, op, dtype, len(mine), *map("{:.2f}".format, figures)))
    document.table(("model", "op", "dtype", "rows", "mean", "lowest", "highest"), lines)


def _scaling(document: Document, facts: _Facts) -> None:
    ends = growth([row for row in facts.whole if row["allocated_bytes"]]).values()
    if not ends:
        return
    document.heading("Scaling with the pixels")
    whole = [(a, b) for a, b in ends if not in_tiles(a)]
    powers = [math.log(_times(a, b, "allocated_bytes")) / math.log(pixels(b) / pixels(a)) for a, b in whole]
    if powers:
        document.text(
            f"Whole images: allocated bytes grow as the pixels to the power {span(powers, '{:.3f}'.format)}, "
            f"compared within one dtype and series ({len(powers)} of them), smallest with largest."
        )
    header = ("model", "op", "dtype", "group", "from", "to", "pixels, times", "allocated, times", "reserved, times")
    lines = []
    for a, b in ends:
        grown = (f"{_times(a, b, name):.2f}" if a[name] and b[name] else "" for name in _COUNTERS)
        sizes = _size(a), _size(b), f"{pixels(b) / pixels(a):.1f}"
        lines.append((facts.label(a), a["op"], a["dtype"], a["group"], *sizes, *grown))
    document.table(header, lines)


def _constants(document: Document, facts: _Facts, plots: bool) -> None:
    if not facts.sized:
        return
    target = facts.target
    document.heading("Implied constants")
    document.text(
        f"The k that `k * H * W * e` would need to equal the row's {facts.word} bytes (H, W in pixels, e the bytes of "
        "an element): what estimators with one constant have to cover."
    )
    lines = []
    for op, mine in _by("op", facts.sized).items():
        kinds = _by("dtype", mine)
        for dtype, rows in [*([("all", mine)] if len(kinds) > 1 else ()), *kinds.items()]:
            values = [constant(row, target) for row in rows]
            middle, most = percentile(values, 0.5), percentile(values, 0.95)
            figures = (min(values), middle, most, max(values))
            lines.append((op, dtype, len(values), *map("{:.0f}".format, figures)))
    document.table(("op", "dtype", "rows", "lowest", "median", "95th percentile", "largest"), lines)
    if plots:
        figure = plot.implied_constants(Table(facts.sized), SHIPPED, target)
        document.figure("constants", "Implied constants against pixels", figure)
    document.table(
        ("model", "op", "size", "dtype", "group", "constant", f"{facts.word} MiB"),
        [(facts.label(r), r["op"], *_case(r), f"{constant(r, target):.0f}", mib(r[target])) for r in facts.sized],
    )


def _estimates(document: Document, comparison: Comparison | None, plots: bool) -> None:
    if comparison is None or not comparison.rows:
        return
    document.heading("Estimators compared with the rows")
    document.text(
        f"Estimate / {comparison.target.removesuffix('_bytes')} - 1 in percent: the median, and in brackets the "
        "lowest and the highest. Empty: the estimator does not apply."
    )
    document.table(*comparison.grid())
    if plots and any(group.lowest > -1 for group in comparison.groups):
        document.figure("estimators", "Estimate over the rows' bytes", plot.estimator_errors(comparison))
    document.items(f"`{e.name}`: {e.formula}. {e.source}." for e in comparison.estimators)


def _formulas(document: Document, facts: _Facts) -> None:
    groups = facts.groups(facts.sized, "op", "dtype")
    fitted = {key: Table(rows) for key, rows in groups.items() if len(set(map(pixels, rows))) > 1}
    if not fitted:
        return
    has_scipy = importlib.util.find_spec("scipy") is not None
    safe_line = "The safe line needs SciPy, which is not installed here: `pip install 'vaemem[fit]'`."
    if has_scipy:
        safe_line = "Safe: the lowest line that no row lies above (quantile 1)."
    document.heading("Formulas")
    document.text(
        f"{facts.word.capitalize()} bytes = a H W e + b by least squares with standard errors, T = 128 H W e; errors "
        f"are the worst of the rows, too little to too much. {safe_line}"
    )
    header = ["model", "op", "dtype", "rows", "a", "± a", "a in T", "b MiB", "± b", "error"]
    header += ["safe a", "safe b MiB", "at most too much"] if has_scipy else []
    lines = []
    for key, rows in fitted.items():
        (line,) = fit(rows, facts.target)
        a = f"{line.a:.2f}", _known(line.a_error, "{:.2f}".format), f"{line.a / 128:.3f}"
        cells = [*key, line.n, *a, mib(line.b), _known(line.b_error, mib), _span(line)]
        if has_scipy:
            (safe,) = fit(rows, facts.target, quantile=1)
            cells += [f"{safe.a:.2f}", mib(safe.b), _percent(safe.max_over)]
        lines.append(cells)
    document.table(header, lines)


def _span(line: FittedLine) -> str:
    """Format a line's errors, too little to too much."""
    return f"{_percent(-line.max_under)}..{_percent(line.max_over)}"


def _models(document: Document, facts: _Facts) -> None:
    whole = [row for row in facts.whole if all(row[name] for name in _COUNTERS)]
    two = itertools.combinations(distinct(row["model"] for row in facts.both), 2)
    found = [(a, b, same) for a, b in two if (same := pairs(whole, a, b))]
    if found:
        document.heading("Models compared")
    for model, other, same in found:
        document.heading(f"{model} and {other}", 3)
        allocated, reserved = ([_times(a, b, name) - 1 for a, b in same] for name in _COUNTERS)
        alike = sum(abs(value) < 0.005 for value in reserved)
        a, b = same[max(range(len(same)), key=lambda i: abs(reserved[i]))]
        more_allocated, more_reserved = (span(values, _percent) for values in (allocated, reserved))
        document.text(
            f"In {_count(len(same), 'case')} with the same op, size, dtype and group, {other} allocates"
            f" {more_allocated} more than {model} and reserves {more_reserved} more; the same within half a percent in"
            f" {alike} of {len(same)}. The widest: {case(b)}, {mib(b['reserved_bytes'])} MiB, compared with"
            f" {mib(a['reserved_bytes'])}."
        )
        lines = []
        for (a, b), *more in zip(same, reserved, allocated, strict=True):
            lines.append((a["op"], *_case(a), *(mib(row["reserved_bytes"]) for row in (a, b)), *map(_percent, more)))
        sizes = f"{model} reserved MiB", f"{other} reserved MiB"
        document.table(("op", "size", "dtype", "group", *sizes, "more", "allocated"), lines)


def _advice(document: Document, facts: _Facts, comparison: Comparison | None) -> None:
    items = []
    for op, mine in _by("op", facts.sized).items():
        widths = grouped(mine, lambda row: ELEMENT_BYTES[row["dtype"]])
        for _, rows in sorted(widths.items()):
            items.append(f"{op} in {' or '.join(_by('dtype', rows))}: {_enough(rows, facts.target)}.")
        if len(widths) > 1:
            items.append(f"{op} with one constant for every dtype: {_enough(mine, facts.target)}.")
        items += _nearest(op, comparison)
    tiled = [row for row in facts.whole if row[facts.target] and in_tiles(row)]
    for (model, op, dtype), rows in facts.groups(tiled, "op", "dtype").items():
        sizes, areas = [row[facts.target] for row in rows], [*map(pixels, rows)]
        items.append(
            f"{model} {op} in {dtype}: {mib(max(sizes))} MiB are enough at every size that was run "
            f"({_count(len(rows), 'row')}, {100 * (max(sizes) / min(sizes) - 1):.0f}% apart over "
            f"{max(areas) / min(areas):.1f} times the pixels)."
        )
    if facts.both:
        ratios = [ratio(row) for row in facts.both]
        mean = statistics.mean(ratios)
        items.append(
            f"Reserved from allocated: multiply by {math.ceil(100 * max(ratios)) / 100:.2f} to be safe; the mean, "
            f"{mean:.2f}, is too little for {sum(value > mean for value in ratios)} of {len(ratios)} rows."
        )
    if facts.tiled:
        items.append(f"Run again without tiles: {', '.join(map(case, facts.tiled))}.")
    if items:
        document.heading("Recommendations")
        document.items(items)


def _by(name: str, rows: Iterable[Row]) -> dict[Any, list[Row]]:
    """Group rows by a column, in their order."""
    return grouped(rows, operator.itemgetter(name))


def _size(row: Row) -> str:
    return f"{row['height']}x{row['width']}"


def _case(row: Row) -> tuple[str, str, Any]:
    """Return the first cells of a row in most tables: size, dtype, group."""
    return _size(row), row["dtype"], row["group"]


def _times(a: Row, b: Row, name: str) -> float:
    return float(b[name] / a[name])


def _enough(rows: Sequence[Row], target: str) -> str:
    least = math.ceil(max(constant(row, target) for row in rows))
    over = max(rows, key=lambda row: least / constant(row, target))
    return (
        f"reserve {least} H W e bytes, enough for all {len(rows)} rows and at most "
        f"{100 * (least / constant(over, target) - 1):.0f}% too much ({case(over)})"
    )


def _nearest(op: str, comparison: Comparison | None) -> list[str]:
    """List the estimators of PyTorch that are never too little for an op, nearest first."""
    if comparison is None:
        return []
    names = {estimator.name for estimator in comparison.estimators if estimator.runtime == "PyTorch"}
    mine = [row for row in comparison.rows if as_ran(row.row)["op"] == op and row.estimator in names]
    errors = {name: [row.error for row in rows] for name, rows in grouped(mine, lambda r: r.estimator).items()}
    most = max(map(len, errors.values()), default=0)
    safe = {name: e for name, e in errors.items() if len(e) == most and min(e) >= 0}
    if not safe:
        return [f"{op}: no estimator here is enough for all {most} rows."] if errors else []
    said = [
        f"`{name}` (median {_percent(statistics.median(e))}, at most {_percent(max(e))})"
        for name, e in sorted(safe.items(), key=lambda pair: statistics.median(pair[1]))
    ]
    return [f"{op}: enough for all {most} rows are {', '.join(said)}."]


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}%"


def _known(value: float | None, form: Callable[[float], str]) -> str:
    """Format the value; return an empty text if it is unknown."""
    return "" if value is None else form(value)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
