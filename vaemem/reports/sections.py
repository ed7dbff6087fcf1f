"""The sections of the report: each writes what the rows hold, every figure computed from them."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from vaemem import _core, plot
from vaemem._common import ELEMENT_BYTES, distinct, grouped, mib
from vaemem.prediction.gpus import find_gpu
from vaemem.published.claims import (
    FAILS,
    HOLDS,
    MIXED,
    UNKNOWN,
    Checked,
    case,
    constant,
    growth,
    pairs,
    parameters,
    percentile,
    ratio,
    span,
)
from vaemem.reports.document import Document
from vaemem.tables.estimators import SHIPPED, Comparison, pixels, with_tiles
from vaemem.tables.fit import fit
from vaemem.tables.table import Row, Table


class Facts:
    """The rows with what every section asks of them."""

    def __init__(self, table: Table) -> None:
        rows = with_tiles(table.filter(lambda row: row["height"] and row["width"] and row["op"] and row["model"]))
        self.rows: list[Row] = [row for row, _ in rows]
        names = ("runtime", "device", "batch", "source")
        self._varying = {
            model: [name for name in names if len({row[name] for row in same}) > 1]
            for model, same in grouped(self.rows, lambda row: row["model"]).items()
        }
        self.tiled = [row for row, tiled in rows if tiled]
        self.whole = [row for row, tiled in rows if not tiled]
        self.both = [row for row in self.rows if row["allocated_bytes"] and row["reserved_bytes"]]
        has_reserved = any(row["reserved_bytes"] for row in self.rows)
        self.target = "reserved_bytes" if has_reserved else "allocated_bytes"
        self.word = self.target.removesuffix("_bytes")
        # Rows that an implied constant means something for: whole images, a dtype of known width.
        self.sized = [
            row
            for row in self.whole
            if row[self.target] and row["dtype"] in ELEMENT_BYTES and not row["op"].endswith("_tiled")
        ]

    def label(self, row: Row) -> str:
        """A row's model, and what tells it from other rows of that model: runtime, device, batch, source."""
        varying = [str(row[name]) for name in self._varying[row["model"]]]
        return f"{row['model']} ({', '.join(varying)})" if varying else str(row["model"])

    def groups(self, rows: Iterable[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
        """Rows by label and columns, in their order."""
        return grouped(rows, lambda row: (self.label(row), *(str(row[name]) for name in names)))


# ---- sections ----


def summary(document: Document, facts: Facts, checked: Checked) -> None:
    """What the rows are, the most that they take, and the faults in them or in what was written about them."""
    document.heading("Summary")
    names = {name: distinct(str(row[name]) for row in facts.rows if row[name]) for name in ("model", "op", "dtype")}
    small, large = min(facts.rows, key=pixels), max(facts.rows, key=pixels)
    sizes = " to ".join(distinct(f"{row['height']}x{row['width']}" for row in (small, large)))
    items = [f"{_count(len(facts.rows), 'row')}: {'; '.join(', '.join(some) for some in names.values())}; {sizes}."]
    for op, rows in grouped((r for r in facts.rows if r[facts.target]), lambda row: row["op"]).items():
        top = max(rows, key=lambda row: row[facts.target])
        items.append(f"The most that {op} takes: {mib(top[facts.target])} MiB {facts.word}, {case(top)}.")
    if facts.tiled:
        items.append(f"{_count(len(facts.tiled), 'row')} ran in tiles although the op does not say so.")
    if wrong := len(checked.contradictions()):
        told = sum(finding.verdict != UNKNOWN for _, finding in checked)
        items.append(
            f"{wrong} of {_count(told, 'published statement')} that these rows can judge are contradicted or hold for "
            "mixtures only."
        )
    document.items(items)


def system(document: Document, facts: Facts) -> None:
    """What ran the rows, the models, and the rows that ran in tiles."""
    document.heading("System")
    items = []
    for device in distinct(row["device"] for row in facts.rows):
        mine = [row for row in facts.rows if row["device"] == device]
        text = f"Device: {device or 'not said'} ({_count(len(mine), 'row')})"
        try:
            total = find_gpu(device).total_memory if device else 0
        except ValueError:
            total = 0  # no GPU that vaemem has the properties of
        top = max((row for row in mine if row[facts.target]), key=lambda row: row[facts.target], default=None)
        if total and top:
            text += (
                f", {total / 2**30:.1f} GiB; the largest row ({case(top)}) takes "
                f"{100 * top[facts.target] / total:.0f}% of it"
            )
        items.append(text)
    for name, what in (("source", "Rows"), ("runtime", "Runtime"), ("versions", "Versions")):
        counts = {
            value: sum(row[name] == value for row in facts.rows) for value in distinct(r[name] for r in facts.rows)
        }
        items += (
            [f"{what}: " + ", ".join(f"{value} ({n})" for value, n in counts.items() if value)] if any(counts) else []
        )
    for model in distinct(row["model"] for row in facts.rows):
        if model in _core.models():
            bytes_of = {row["dtype"]: ELEMENT_BYTES.get(row["dtype"]) for row in facts.rows if row["model"] == model}
            widths = sorted({e for e in bytes_of.values() if e})
            sizes = ", ".join(f"{mib(parameters(model) * e)} MiB in {e}-byte weights" for e in widths)
            items.append(f"{model}: {parameters(model):,} parameters{', ' if sizes else ''}{sizes}")
    document.items(items)
    if facts.tiled:
        document.text(
            f"**{_count(len(facts.tiled), 'row')} ran in tiles although the op does not say so**: allocated bytes "
            "do not grow with the pixels. They stay in the tables and the mean ratios, marked, and are "
            "left out of everything else."
        )
        lines, alike = [], facts.groups(facts.whole, "op", "dtype")
        for key, tiled in facts.groups(facts.tiled, "op", "dtype").items():
            top, whole = max(tiled, key=pixels), max(alike.get(key, ()), key=pixels, default=None)
            text = f"{case(top)}: {mib(top['allocated_bytes'])} MiB allocated"
            lines.append(text + (f", {case(whole)}: {mib(whole['allocated_bytes'])} MiB" if whole else ""))
        document.items(lines)


def tables(document: Document, facts: Facts) -> None:
    """The rows, one table for each model and op."""
    document.heading("Memory and time by model and op")
    marked = [id(row) for row in facts.tiled]
    groups = facts.groups(facts.rows, "op")
    for model in distinct(key[0] for key in groups):
        document.heading(model, 3)
        for (_, op), rows in ((key, rows) for key, rows in groups.items() if key[0] == model):
            document.heading(op, 4)
            lines = [
                (
                    f"{row['height']}x{row['width']}", row["dtype"], row["group"],
                    _known(row["allocated_bytes"], mib), _known(row["reserved_bytes"], mib),
                    f"{ratio(row):.2f}" if row["allocated_bytes"] and row["reserved_bytes"] else "",
                    _known(row["seconds"], "{:.3f}".format),
                    "ran in tiles" if id(row) in marked else "",
                )
                for row in rows
            ]  # fmt: skip
            document.table(
                ("size", "dtype", "group", "allocated MiB", "reserved MiB", "ratio", "seconds", "note"), lines
            )


def ratios(document: Document, facts: Facts) -> None:
    """Reserved over allocated."""
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
        kinds = facts.groups(rows, "dtype")
        shown = [("all", rows), *((key[1], mine) for key, mine in kinds.items() if len(kinds) > 1)]
        for dtype, mine in shown:
            values = [ratio(row) for row in mine]
            figures = (statistics.mean(values), min(values), max(values))
            lines.append((model, op, dtype, len(mine), *(f"{value:.2f}" for value in figures)))
    document.table(("model", "op", "dtype", "rows", "mean", "lowest", "highest"), lines)


def scaling(document: Document, facts: Facts) -> None:
    """Smallest with largest, within one dtype and series."""
    ends = growth([row for row in facts.whole if row["allocated_bytes"]])
    if not ends:
        return
    document.heading("Scaling with the pixels")
    full = {key: (a, b) for key, (a, b) in ends.items() if not a["op"].endswith("_tiled")}
    powers = [
        math.log(b["allocated_bytes"] / a["allocated_bytes"]) / math.log(pixels(b) / pixels(a))
        for a, b in full.values()
    ]
    if powers:
        document.text(
            f"Whole images: allocated bytes grow as the pixels to the power {span(powers, '{:.3f}'.format)}, compared "
            f"within one dtype and series ({len(powers)} of them), smallest with largest."
        )
    lines = [
        (
            facts.label(a), a["op"], a["dtype"], a["group"], f"{a['height']}x{a['width']}",
            f"{b['height']}x{b['width']}", f"{pixels(b) / pixels(a):.1f}",
            f"{b['allocated_bytes'] / a['allocated_bytes']:.2f}",
            f"{b['reserved_bytes'] / a['reserved_bytes']:.2f}" if a["reserved_bytes"] and b["reserved_bytes"] else "",
        )
        for a, b in ends.values()
    ]  # fmt: skip
    document.table(
        ("model", "op", "dtype", "group", "from", "to", "pixels, times", "allocated, times", "reserved, times"), lines
    )


def constants(document: Document, facts: Facts, plots: bool) -> None:
    """What one constant would have to be."""
    if not facts.sized:
        return
    target = facts.target
    document.heading("Implied constants")
    document.text(
        f"The k that `k * H * W * e` would need to equal the row's {facts.word} bytes (H, W in pixels, e the bytes of "
        "an element): what estimators with one constant have to cover."
    )
    lines = []
    for op in distinct(row["op"] for row in facts.sized):
        mine = [row for row in facts.sized if row["op"] == op]
        dtypes = distinct(row["dtype"] for row in mine)
        for dtype in ("all", *dtypes) if len(dtypes) > 1 else dtypes:
            values = [constant(row, target) for row in mine if dtype in ("all", row["dtype"])]
            figures = (min(values), percentile(values, 0.5), percentile(values, 0.95), max(values))
            lines.append((op, dtype, len(values), *(f"{value:.0f}" for value in figures)))
    document.table(("op", "dtype", "rows", "lowest", "median", "95th percentile", "largest"), lines)
    if plots:
        figure = plot.implied_constants(Table(facts.sized), SHIPPED, target)
        document.figure("constants", "Implied constants against pixels", figure)
    document.table(
        ("model", "op", "size", "dtype", "group", "constant", f"{facts.word} MiB"),
        [
            (
                facts.label(row), row["op"], f"{row['height']}x{row['width']}", row["dtype"], row["group"],
                f"{constant(row, target):.0f}", mib(row[target]),
            )
            for row in facts.sized
        ],
    )  # fmt: skip


def estimates(document: Document, comparison: Comparison | None, plots: bool) -> None:
    """The shipped estimators beside the rows."""
    if comparison is None or not comparison.rows:
        return
    document.heading("Estimators beside the rows")
    document.text(
        f"Estimate / {comparison.target.removesuffix('_bytes')} - 1 in percent: the median, and in brackets the "
        "lowest and the highest. Empty: the estimator does not apply."
    )
    document.table(*comparison.grid())
    if plots and any(group.lowest > -1 for group in comparison.groups):
        document.figure("estimators", "Estimate over the rows' bytes", plot.estimator_errors(comparison))
    document.items(f"`{e.name}`: {e.formula}. {e.source}." for e in comparison.estimators)


def formulas(document: Document, facts: Facts) -> None:
    """Lines through the rows, with their errors."""
    groups = facts.groups(facts.sized, "op", "dtype")
    fitted = {key: Table(rows) for key, rows in groups.items() if len({pixels(row) for row in rows}) > 1}
    if not fitted:
        return
    has_scipy = importlib.util.find_spec("scipy") is not None
    document.heading("Formulas")
    document.text(
        f"{facts.word.capitalize()} bytes = a H W e + b by least squares with standard errors, T = 128 H W e; errors "
        "are the worst of the rows, too little to too much. "
        + (
            "Safe: the lowest line that no row lies above (quantile 1)."
            if has_scipy
            else "The safe line needs SciPy, which is not installed here: `pip install 'vaemem[fit]'`."
        )
    )
    lines = []
    for key, rows in fitted.items():
        (line,) = fit(rows, facts.target)
        cells = [
            *key, line.n, f"{line.a:.2f}", _known(line.a_error, "{:.2f}".format),
            f"{line.a / 128:.3f}", mib(line.b), _known(line.b_error, mib),
            f"{_percent(-line.max_under)}..{_percent(line.max_over)}",
        ]  # fmt: skip
        if has_scipy:
            (safe,) = fit(rows, facts.target, quantile=1)
            cells += [f"{safe.a:.2f}", mib(safe.b), _percent(safe.max_over)]
        lines.append(cells)
    header = ["model", "op", "dtype", "rows", "a", "± a", "a in T", "b MiB", "± b", "error"]
    document.table(header + (["safe a", "safe b MiB", "at most too much"] if has_scipy else []), lines)


def models(document: Document, facts: Facts) -> None:
    """Every two models on the cases that they share."""
    names = distinct(row["model"] for row in facts.both)
    whole = [row for row in facts.both if not any(row is tiled for tiled in facts.tiled)]
    found = {(a, b): pairs(whole, a, b) for a, b in itertools.combinations(names, 2)}
    found = {key: same for key, same in found.items() if same}
    if not found:
        return
    document.heading("Models compared")
    for (model, other), same in found.items():
        document.heading(f"{model} and {other}", 3)
        more = {name: [_more(a, b, name) for a, b in same] for name in ("allocated_bytes", "reserved_bytes")}
        alike = sum(abs(value) < 0.005 for value in more["reserved_bytes"])
        a, b = max(same, key=lambda pair: abs(_more(pair[0], pair[1], "reserved_bytes")))
        document.text(
            f"In {_count(len(same), 'case')} with the same op, size, dtype and group, {other} allocates "
            f"{span(more['allocated_bytes'], _percent)} more than {model} and reserves "
            f"{span(more['reserved_bytes'], _percent)} more; the same within half a percent "
            f"in {alike} of {len(same)}. The widest: {case(b)}, "
            f"{mib(b['reserved_bytes'])} MiB beside {mib(a['reserved_bytes'])}."
        )
        document.table(
            ("op", "size", "dtype", "group", f"{model} reserved MiB", f"{other} reserved MiB", "more", "allocated"),
            [
                (
                    a["op"], f"{a['height']}x{a['width']}", a["dtype"], a["group"], mib(a["reserved_bytes"]),
                    mib(b["reserved_bytes"]), _percent(_more(a, b, "reserved_bytes")),
                    _percent(_more(a, b, "allocated_bytes")),
                )
                for a, b in same
            ],
        )  # fmt: skip


def advice(document: Document, facts: Facts, comparison: Comparison | None) -> None:
    """What to reserve."""
    items = []
    for op in distinct(row["op"] for row in facts.sized):
        mine = [row for row in facts.sized if row["op"] == op]
        widths = sorted({ELEMENT_BYTES[row["dtype"]] for row in mine})
        for e in widths:
            rows = [row for row in mine if ELEMENT_BYTES[row["dtype"]] == e]
            items.append(f"{op} in {' or '.join(distinct(r['dtype'] for r in rows))}: {_enough(rows, facts.target)}.")
        if len(widths) > 1:
            items.append(f"{op} with one constant for every dtype: {_enough(mine, facts.target)}.")
        items += _nearest(op, comparison)
    for (model, op, dtype), rows in facts.groups((r for r in facts.whole if r[facts.target]), "op", "dtype").items():
        if op.endswith("_tiled"):
            sizes, top = [row[facts.target] for row in rows], max(rows, key=lambda row: row[facts.target])
            items.append(
                f"{model} {op} in {dtype}: {mib(top[facts.target])} MiB are enough at every size that was run "
                f"({_count(len(rows), 'row')}, {100 * (max(sizes) / min(sizes) - 1):.0f}% apart over "
                f"{max(map(pixels, rows)) / min(map(pixels, rows)):.1f} times the pixels)."
            )
    if facts.both:
        ratios = [ratio(row) for row in facts.both]
        items.append(
            f"Reserved from allocated: multiply by {math.ceil(100 * max(ratios)) / 100:.2f} to be safe; the mean, "
            f"{statistics.mean(ratios):.2f}, is too little for {sum(r > statistics.mean(ratios) for r in ratios)} of "
            f"{len(ratios)} rows."
        )
    if facts.tiled:
        items.append(f"Run again without tiles: {', '.join(case(row) for row in facts.tiled)}.")
    if items:
        document.heading("Recommendations")
        document.items(items)


def claims(document: Document, checked: Checked) -> None:
    """The statements checked."""
    if not len(checked):
        return
    document.heading("Published statements, checked")
    counts = {verdict: sum(finding.verdict == verdict for _, finding in checked) for verdict in (HOLDS, MIXED, FAILS)}
    told = sum(counts.values())
    document.text(
        f"Of {_count(len(checked), 'statement')} these rows can tell about {told}: {counts[HOLDS]} hold, "
        f"{counts[MIXED]} hold only where unlike rows are mixed, {counts[FAILS]} are contradicted. A published "
        "statement is judged by measured rows of the models, ops, sizes, dtypes, batch, runtimes and card that it was "
        "made from, where there is one of each such kind, and by no others."
    )
    contradictions = checked.contradictions()
    if len(contradictions):
        document.heading("Contradicted, or true only of a mixture", 3)
        document.table(*contradictions.grid())
    holding = Checked(pair for pair in checked if pair[1].verdict == HOLDS)
    if len(holding):
        document.heading("Borne out", 3)
        document.table(*holding.grid())
    untold = Checked(pair for pair in checked if pair[1].verdict == UNKNOWN)
    if len(untold):
        document.heading("Not judged", 3)
        document.table(*untold.grid())


# ---- words ----


def _enough(rows: Sequence[Row], target: str) -> str:
    least = math.ceil(max(constant(row, target) for row in rows))
    over = max(rows, key=lambda row: least / constant(row, target))
    return (
        f"reserve {least} H W e bytes, enough for all {len(rows)} rows and at most "
        f"{100 * (least / constant(over, target) - 1):.0f}% too much ({case(over)})"
    )


def _nearest(op: str, comparison: Comparison | None) -> list[str]:
    """The estimators of PyTorch that are never too little for an op, nearest first."""
    if comparison is None:
        return []
    names = {estimator.name for estimator in comparison.estimators if estimator.runtime == "PyTorch"}
    mine = [row for row in comparison.rows if row.row["op"] == op and row.estimator in names]
    errors = {name: [row.error for row in rows] for name, rows in grouped(mine, lambda r: r.estimator).items()}
    most = max(map(len, errors.values()), default=0)
    safe = {name: e for name, e in errors.items() if len(e) == most and min(e) >= 0}
    if not safe:
        return [f"{op}: no estimator here is enough for all {most} rows."] if errors else []
    return [
        f"{op}: enough for all {most} rows are "
        + ", ".join(
            f"`{name}` (median {_percent(statistics.median(e))}, at most {_percent(max(e))})"
            for name, e in sorted(safe.items(), key=lambda pair: statistics.median(pair[1]))
        )
        + "."
    ]


def _more(a: Row, b: Row, name: str) -> float:
    return float(b[name] / a[name] - 1)


def _percent(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}%"


def _known(value: float | None, form: Callable[[float], str]) -> str:
    """In that form; nothing where the value is not known."""
    return "" if value is None else form(value)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
