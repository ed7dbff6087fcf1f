"""The statements of a published benchmark report, checked against its own table (`vaemem.seed_table`)."""

from __future__ import annotations

import functools
import operator
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, distinct, grouped, mib
from vaemem._render import Columns
from vaemem.reports.row_statistics import case, constant, growth, pairs, parameters, percentile, ratio, span
from vaemem.tables.estimators import in_tiles_untold, pixels
from vaemem.tables.table import Row, Table, seed_table

HOLDS, MIXED, FAILS = "holds", "holds only by mixing unlike rows", "contradicted"
UNKNOWN = "cannot be judged here"


class Finding(NamedTuple):
    """The verdict on a claim (HOLDS, MIXED, FAILS or UNKNOWN), the figures that lead to it, and their origin."""

    verdict: str
    found: str
    how: str = ""


def judged(holds: bool, how: str, found: str) -> Finding:
    """Return the verdict on a claim that is not about rows."""
    return Finding(HOLDS if holds else FAILS, found, how)


class Claim(NamedTuple):
    """A statement with its figures, and how to check it.

    Attributes
    ----------
    source : str
        Who states it, and where.
    says : str
        The statement.
    check : callable
        Takes `Rows` and returns a Finding, if the claim is about rows of the table. Otherwise it takes nothing.
    of : mapping
        The rows that the claim is about: columns and values for `Table.filter`.
    """

    source: str
    says: str
    check: Callable[..., Finding]
    of: Mapping[str, object] = {}


class Rows:
    """The rows that a claim is checked against."""

    def __init__(self, table: Table) -> None:
        self._rows = [(row, in_tiles_untold(row)) for row in table]

    def of(self, whole_image: bool | None = None, **equals: object) -> list[Row]:
        """Return the rows with these values. With `whole_image` False, return rows in tiles whose op hides it."""
        mine = [row for row, tiled in self._rows if whole_image in (None, not tiled)]
        return [row for row in mine if all(row[name] == value for name, value in equals.items())]


class Checked(tuple[tuple[Claim, Finding], ...]):
    """Claims, each with its finding."""

    __slots__ = ()

    def contradictions(self) -> Checked:
        """Return the claims that fail, or hold only for a mixture of unlike rows."""
        return Checked(pair for pair in self if pair[1].verdict in (FAILS, MIXED))

    def text(self, about: str) -> str:
        """Return the counts of verdicts, what the claims are about, and every claim with its verdict."""
        count = Counter(finding.verdict for _, finding in self)
        hold, fail, unknown = count[HOLDS], count[FAILS] + count[MIXED], count[UNKNOWN]
        parts = [f"Of {len(self)} claims {hold} hold, {fail} do not, and {unknown} cannot be judged here.\n{about}"]
        for number, (claim, finding) in enumerate(self, 1):
            told = f"{finding.how}: {finding.found}" if finding.how else finding.found
            shown = textwrap.indent(textwrap.fill(told, 112), " " * 4)
            parts.append(f"{number}. {claim.says} ({claim.source})\n    {finding.verdict}\n{shown}")
        return "\n\n".join(parts)

    def grid(self) -> str:
        """Return one line for each claim."""
        lines = [[claim.source, claim.says, finding.verdict, finding.found] for claim, finding in self]
        return Columns(["where", "it says", "verdict", "the rows say"], lines).text()


def check(table: Table) -> Checked:
    """Check the report's statements against a table."""
    chosen = ((claim, Rows(table.filter(**claim.of))) for claim in PUBLISHED)
    return Checked((claim, claim.check(rows)) for claim, rows in chosen)


def judge_report() -> str:
    """Check the report against its own table."""
    checked = check(seed_table())
    count = Counter(finding.verdict for _, finding in checked)
    counts = (
        f"{count[HOLDS]} hold, {count[MIXED]} hold only for a mixture of unlike rows, {count[FAILS]} are contradicted"
    )
    return f"Of {len(checked)} statements {counts}.\n{checked.grid()}"


# ---- kinds of claims ----

# A mean stands for its rows if the mean of each kind of them lies within this share of it.
_ALIKE = 0.05


def _judge_rows(found: str, is_stated: bool, is_alike: bool = True) -> Finding:
    """Give the verdict. is_stated: the rows give the figure. is_alike: each kind of row gives it alone."""
    return Finding((HOLDS if is_alike else MIXED) if is_stated else FAILS, found)


def _mean_ratio(stated: float, names: tuple[str, ...], rows: Rows) -> Finding:
    """Judge the mean of reserved / allocated, of all rows and of each kind alone."""
    mine, tiled = rows.of(), rows.of(whole_image=False)
    groups = grouped(mine, lambda row: " ".join(row[name] for name in names))
    kinds = {kind: statistics.mean(map(ratio, some)) for kind, some in groups.items()}
    mean = statistics.mean(map(ratio, mine))
    found = f"mean {mean:.2f} of {len(mine)} rows from {span([*map(ratio, mine)])}"
    if len(kinds) > 1:
        ends = min(kinds, key=kinds.__getitem__), max(kinds, key=kinds.__getitem__)
        found += "; " + ", ".join(f"{kind} alone {kinds[kind]:.2f}" for kind in ends)
    if 0 < len(tiled) < len(mine):
        kinds["tiled"] = statistics.mean(map(ratio, tiled))
        kinds["whole"] = statistics.mean(map(ratio, rows.of(whole_image=True)))
        found += f"; {len(tiled)} of the rows ran in tiles (mean {kinds['tiled']:.2f}, the others {kinds['whole']:.2f})"
    is_alike = all(abs(value / mean - 1) <= _ALIKE for value in kinds.values())
    return _judge_rows(found, f"{mean:.2f}" == f"{stated:.2f}", is_alike)


def _reserves_between(low: float, high: float, rows: Rows) -> Finding:
    ratios = [ratio(row) for row in rows.of()]
    inside = sum(low <= value <= high for value in ratios)
    found = f"mean {statistics.mean(ratios):.2f}, {span(ratios)}; {inside} of {len(ratios)} rows lie in"
    return _judge_rows(f"{found} {low:g} to {high:g}", inside == len(ratios))


def _scaling(stated_pixels: float, stated: float, rows: Rows) -> Finding:
    """Compare the smallest with the largest row: of all rows, and within each series."""
    first, *_, last = sorted(rows.of(), key=lambda row: row["height"])  # rows of a size stay in their order
    alike = [b["allocated_bytes"] / a["allocated_bytes"] for a, b in growth(rows.of(whole_image=True)).values()]
    grown, whole = pixels(last) / pixels(first), last["allocated_bytes"] / first["allocated_bytes"]
    is_stated = f"{whole:.1f}" == f"{stated:.1f}" and f"{grown:.1f}" == f"{stated_pixels:.1f}"
    is_alike = any(abs(value - stated) < 0.1 for value in alike)  # both figures have one decimal
    found = f"{span(alike)} where {grown:g} times the pixels are compared within one dtype and series"
    if not is_alike:
        mixed = f"{stated:g} is {case(last)} over {case(first)}" if is_stated else f"{whole:.1f} from first to last row"
        found += f"; {mixed}"
    return _judge_rows(found, is_stated, is_alike)


def _middle(share: float, stated: float, rows: Rows) -> Finding:
    """Judge a percentile of the implied constants of decoding."""

    def middle(some: Iterable[Row]) -> float:
        return percentile([constant(row) for row in some], share)

    mine = rows.of()
    value, widths = middle(mine), sorted(grouped(mine, lambda row: ELEMENT_BYTES[row["dtype"]]).items())
    alone = ", ".join(f"{middle(some):.0f} of {len(some)} rows of {e} bytes an element" for e, some in widths)
    found = f"{value:.0f} of {len(mine)} rows; {alone}"
    once = {(row["model"], row["height"], row["width"], row["dtype"]): row for row in mine}
    if len(once) != len(mine):
        found += f"; {middle(once.values()):.0f} of {len(once)} when each model, size and dtype counts once"
    return _judge_rows(
        found, round(value) == stated, all(abs(middle(some) / value - 1) <= _ALIKE for _, some in widths)
    )


def _covers(stated: float, rows: Rows) -> Finding:
    """Judge whether stated*H*W*e is enough for every whole image, and how far it is too much."""
    mine = sorted(rows.of(whole_image=True), key=constant, reverse=True)
    short = [row for row in mine if constant(row) > stated]
    found = f"the largest of {len(mine)} rows needs {constant(mine[0]):.0f}; "
    if short:
        named = ", ".join(f"{case(row)} needs {constant(row):.0f}" for row in short[:3])
        found += f"too little for {len(short)}: {named}{', ...' if len(short) > 3 else ''}; "
    over = min(mine, key=constant)
    return _judge_rows(
        f"{found}asks up to {100 * (stated / constant(over) - 1):.0f}% too much ({case(over)})", not short
    )


def _uses_more(model: str, other: str, stated: float, rows: Rows) -> Finding:
    """Judge whether `other` reserves `stated` percent more than `model`."""
    at = pairs(rows.of(), model, other)
    more = [100 * (b["reserved_bytes"] / a["reserved_bytes"] - 1) for a, b in at]
    groups = ["" if b["group"] is None else f" group {b['group']}" for _, b in at]
    found = ", ".join(f"{d:+.1f}% in {b['dtype']}{of}" for d, (_, b), of in zip(more, at, groups, strict=True))
    allocated = max(abs(b["allocated_bytes"] / a["allocated_bytes"] - 1) for a, b in at)
    found += f"; allocated differs by {100 * allocated:.1f}%"
    return _judge_rows(found, round(more[0]) == stated, all(round(d) == stated for d in more))


def _models_apart(rows: Rows) -> Finding:
    """Judge whether constants differ more between models than between dtypes of one model."""
    kinds = grouped(rows.of(whole_image=True), operator.itemgetter("model", "dtype"))
    most = {kind: max(map(constant, some)) for kind, some in kinds.items()}

    def apart(alike_in: int) -> float:
        """Return the largest difference between kinds of one model (0) or of one dtype (1)."""
        groups = grouped(most, operator.itemgetter(alike_in)).values()
        return max(max(most[kind] for kind in some) / min(most[kind] for kind in some) for some in groups) - 1

    found = (
        f"largest constants differ by up to {100 * apart(1):.0f}% between models of one dtype, "
        f"by up to {100 * apart(0):.0f}% between dtypes of one model"
    )
    return _judge_rows(found, apart(1) > apart(0))


def _encode_needs(rows: Rows) -> Finding:
    key, form = operator.itemgetter("model", "height", "width", "dtype"), "{:.0f}".format
    mine = rows.of(op="encode", whole_image=True)
    decode = {key(row): row["reserved_bytes"] for row in rows.of(op="decode", whole_image=True)}
    parts = [100 * (row["reserved_bytes"] / decode[key(row)]) for row in mine if key(row) in decode]
    constants = [constant(row) for row in mine]
    found = f"constants of {span(constants, form)}, enough for all: {max(constants):.0f}"
    return Finding(HOLDS, found + (f"; {span(parts, form)}% of decoding the same size" if parts else ""))


def _whole_images(rows: Rows) -> Finding:
    mine, tiled = rows.of(), rows.of(whole_image=False)
    if not tiled:
        return Finding(HOLDS, f"allocated grows with the pixels in all {len(mine)} rows")
    models, sides = (distinct(str(row[name]) for row in tiled) for name in ("model", "height"))
    most = max(tiled, key=pixels)
    found = (
        f"{len(tiled)} of {len(mine)} rows ran in tiles ({', '.join(models)} at {' and '.join(sides)} pixels a side)"
    )
    found += f": {case(most)} allocates {mib(most['allocated_bytes'])} MiB"
    if whole := rows.of(whole_image=True, model=most["model"], dtype=most["dtype"]):
        top = max(whole, key=pixels)
        found += f", {case(top)} {mib(top['allocated_bytes'])}"
    return Finding(FAILS, found)


def _model_size(model: str, stated_mib: float, rows: Rows) -> Finding:
    count = parameters(model)
    sizes = {e: mib(count * e) for e in sorted({ELEMENT_BYTES[row["dtype"]] for row in rows.of()})}
    found = f"{count:,} parameters: " + ", ".join(f"{size} MiB at {e} bytes each" for e, size in sizes.items())
    same = [size == f"{stated_mib:.2f}" for size in sizes.values()]
    return _judge_rows(found, any(same), all(same))


# ---- the published benchmark report ----

_RATIOS = {
    ("flux", "encode"): 1.15, ("flux", "decode"): 1.80,
    ("sd15", "encode"): 1.31, ("sd15", "decode"): 1.55, ("sd15", "decode_tiled"): 1.57,
    ("sdxl", "encode"): 1.31, ("sdxl", "decode"): 1.56, ("sdxl", "decode_tiled"): 1.61,
}  # fmt: skip
_DECODE = {"op": "decode"}
# Section, statement, the rows that it is about, the function that judges it and its figures.
_STATED: tuple[tuple[Any, ...], ...] = (
    *(
        ("summary", f"{model}: the model takes {size} MiB", {"model": model}, _model_size, model, size)
        for model, size in {"flux": 159.87, "sd15": 159.56, "sdxl": 159.56}.items()
    ),
    ("summary", "the encode rows are runs of whole images", {"op": "encode"}, _whole_images),
    ("finding 1", "reserved is 1.49 times allocated on average", {}, _mean_ratio, 1.49, ("op", "dtype")),
    *(
        ("finding 1", f"{model} {op}: reserved is {stated:.2f} times allocated", {"model": model, "op": op},
         _mean_ratio, stated, ("dtype",))
        for (model, op), stated in _RATIOS.items()
    ),
    *(
        ("finding 2", f"{model}: 16.0 times the pixels take {stated} times the memory", {"model": model} | _DECODE,
         _scaling, 16.0, stated)
        for model, stated in {"flux": 15.9, "sd15": 25.2, "sdxl": 25.2}.items()
    ),
    *(
        ("finding 4", f"decoding at {side}x{side}, sdxl uses {stated}% more memory than sd15",
         {"model": ("sd15", "sdxl"), "height": side} | _DECODE, _uses_more, "sd15", "sdxl", stated)
        for side, stated in {1024: 1, 512: 7}.items()
    ),
    ("recommendation 1", "the median constant is 1532", _DECODE, _middle, 0.5, 1532),
    ("recommendation 1", "the 95th percentile is 2136", _DECODE, _middle, 0.95, 2136),
    ("recommendation 1", "2136 in place of 2200 is a constant with a safety margin for decoding",
     _DECODE, _covers, 2136),
    ("recommendation 2", "the model decides the decoding constant, flux apart from the others", _DECODE, _models_apart),
    ("recommendation 3", "encoding needs working memory too (no constant is given)",
     {"op": ("encode", "decode")}, _encode_needs),
    ("recommendation 4", "PyTorch reserves about 2 to 3 times what it allocates", {}, _reserves_between, 2, 3),
)  # fmt: skip
PUBLISHED: tuple[Claim, ...] = tuple(
    Claim(f"VAE VRAM benchmark report, {where}", says, functools.partial(check, *figures), of)
    for where, says, of, check, *figures in _STATED
)
