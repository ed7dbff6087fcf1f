"""Statements about memory, checked against the rows of a table."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, distinct, grouped, listed, mib, render
from vaemem.prediction.gpus import find_gpu
from vaemem.tables.estimators import in_tiles_untold, pixels, series_of
from vaemem.tables.table import Row, Table, in_tiles, seed_table

HOLDS, MIXED, FAILS, UNKNOWN = "holds", "holds only by mixing unlike rows", "contradicted", "not judged"


class Finding(NamedTuple):
    """What the rows say of a claim: HOLDS, MIXED, FAILS or UNKNOWN, and the figures that say so. how: what they rest
    on, where it is not rows."""

    verdict: str
    found: str
    how: str = ""


class Claim(NamedTuple):
    """A statement with its figures, and how to check it.

    Attributes
    ----------
    source : str
        Who states it, and where.
    says : str
        The statement.
    check : callable
        `Rows` -> Finding. Everything in its sentence is computed from the rows; or None -> Finding, where a statement
        is judged by what there is to count, predict or run (vaemem/published/guide.py).
    of : mapping, optional
        Columns and values, as `Table.filter` takes them: which rows of `seed_table` the statement was made from. It is
        judged where a table has runs of all their kinds, and by these alone. None: by every row of PyTorch's.
    """

    source: str
    says: str
    check: Callable[[Any], Finding]
    of: Mapping[str, object] | None = None


class Rows:
    """The rows that claims are checked against: PyTorch's, with what was allocated and reserved."""

    def __init__(self, table: Table) -> None:
        usable = operator.itemgetter("model", "op", "height", "width", "allocated_bytes", "reserved_bytes")
        mine = table.filter(lambda row: all(usable(row)) and row["runtime"] != "vaemem", dtype=[*ELEMENT_BYTES])
        self._rows = [(row, in_tiles_untold(row)) for row in mine]

    def judge(self, claim: Claim) -> Finding:
        """What the rows of the claim's kinds say of it."""
        if claim.of is None:
            return claim.check(self)
        wanted = distinct(map(_kind, _benchmark().filter(**claim.of)))
        mine = [row for row, _ in self._rows if _kind(row) in wanted]
        had = [*map(_kind, mine)]
        if missing := [kind for kind in wanted if kind not in had]:
            named, batch, source, runtime, card = missing[0]
            more = f", nor of {len(missing) - 1} others of its {len(wanted)} kinds" if missing[1:] else ""
            return Finding(UNKNOWN, f"no rows of {named}, batch {batch}, {source} in {runtime} on {card}{more}")
        return claim.check(Rows(Table(mine)))

    def of(self, whole_image: bool | None = None, **equals: object) -> list[Row]:
        """The rows with these values; `whole_image` False: only those that ran in tiles against their op's name."""
        mine = [row for row, tiled in self._rows if whole_image in (None, not tiled)]
        return [row for row in mine if all(row[name] == value for name, value in equals.items())]


class Checked(tuple[tuple[Claim, Finding], ...]):
    """Claims with what the rows say of them. Printing it shows them all."""

    __slots__ = ()

    def contradictions(self) -> Checked:
        """Those that the rows contradict, or bear out only where unlike rows are mixed."""
        return Checked(pair for pair in self if pair[1].verdict in (FAILS, MIXED))

    def grid(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells."""
        lines = [[claim.source, claim.says, finding.verdict, finding.found] for claim, finding in self]
        return ["where", "it says", "verdict", "the rows say"], lines

    def __str__(self) -> str:
        return render(*self.grid())

    __repr__ = __str__


def check(table: Table, claims: Iterable[Claim] | None = None) -> Checked:
    """Check statements against a table.

    Parameters
    ----------
    table : Table, pandas.DataFrame or iterable of mappings
        Rows of vaemem's own engine, and rows without allocated or reserved bytes, are not looked at.
    claims : iterable of Claim, optional
        By default `PUBLISHED`, what the published benchmark report says. It is about PyTorch's runs on an RTX 4090, so
        other runs do not judge it: where runs of a kind are missing that a statement was made from, its verdict is
        "not judged", and says of which.

    Examples
    --------
    >>> checked = check(seed_table())
    >>> len(checked), len(checked.contradictions())
    (24, 20)
    """
    rows, chosen = Rows(Table(table)), PUBLISHED if claims is None else listed(claims, Claim)
    for claim in chosen:
        if not isinstance(claim, Claim):
            raise ValueError(f"claims: want each a Claim, got {claim!r}")
    return Checked((claim, rows.judge(claim)) for claim in chosen)


# ---- figures ----


def ratio(row: Row) -> float:
    """Reserved over allocated bytes."""
    return float(row["reserved_bytes"] / row["allocated_bytes"])


def constant(row: Row, target: str = "reserved_bytes") -> float:
    """The implied constant, reserved bytes / (H*W*e), of a row whose dtype has a known width."""
    return float(row[target] / (pixels(row) * ELEMENT_BYTES[row["dtype"]]))


@functools.cache
def _card(device: str | None) -> str | None:
    """One name of a GPU, however the row spells it."""
    try:
        return find_gpu(device).name if device else None
    except ValueError:
        return device


def _kind(row: Row) -> tuple[object, ...]:
    """What was run, how and on what."""
    op_in_tiles = in_tiles(row) and not in_tiles_untold(row)
    named = f"{case(row)} in tiles of {row['tile'] or 'a side that is not said'}" if op_in_tiles else case(row)
    return named, row["batch"], row["source"], row["runtime"], _card(row["device"])


_benchmark = functools.cache(seed_table)


def case(row: Row) -> str:
    """A row by name: `sdxl decode 512x512 float16`."""
    return f"{row['model']} {row['op']} {row['height']}x{row['width']} {row['dtype']}"


def span(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """`1.04 to 1.96`, or `1.04` where both ends read the same."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the sorted values comes before, as the published report takes it."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def growth(rows: Sequence[Row]) -> dict[tuple[Any, ...], tuple[Row, Row]]:
    """The smallest and the largest row of each series of one model, op, dtype, runtime, device, batch and group."""
    series = grouped(rows, series_of)
    ends = {key: (min(mine, key=pixels), max(mine, key=pixels)) for key, mine in series.items()}
    return {key: (first, last) for key, (first, last) in ends.items() if pixels(last) > pixels(first)}


def pairs(rows: Sequence[Row], model: str, other: str) -> list[tuple[Row, Row]]:
    """Rows of two models that are alike in everything else, in their order."""
    key = operator.itemgetter(
        "op", "height", "width", "dtype", "tile", "tile_overlap", "batch", "device", "source", "group"
    )
    mine = {key(row): row for row in rows if row["model"] == model}
    return [(mine[key(row)], row) for row in rows if row["model"] == other and key(row) in mine]


# ---- kinds of claims ----

# A mean stands for its rows where each kind of them, taken alone, has a mean within this share of it.
_ALIKE = 0.05
_NO_WHOLE_IMAGES = Finding(UNKNOWN, "no rows of whole images")


def _judged(found: str, is_stated: bool, is_alike: bool = True) -> Finding:
    """is_stated: the rows have the figure; is_alike: each kind of them does, taken alone."""
    return Finding((HOLDS if is_alike else MIXED) if is_stated else FAILS, found)


def _mean_ratio(stated: float, names: tuple[str, ...], rows: Rows) -> Finding:
    """The mean of reserved / allocated, and of each kind of rows alone."""
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
    return _judged(found, f"{mean:.2f}" == f"{stated:.2f}", is_alike)


def _reserves_between(low: float, high: float, rows: Rows) -> Finding:
    ratios = [ratio(row) for row in rows.of()]
    inside = sum(low <= value <= high for value in ratios)
    found = f"mean {statistics.mean(ratios):.2f}, {span(ratios)}; {inside} of {len(ratios)} rows lie in"
    return _judged(f"{found} {low:g} to {high:g}", inside == len(ratios))


def _scaling(stated_pixels: float, stated: float, rows: Rows) -> Finding:
    """Allocated bytes of the first and the last row by size, and of the ends of each series alone."""
    first, *_, last = sorted(rows.of(), key=lambda row: row["height"])  # rows of a size stay in their order
    alike = [b["allocated_bytes"] / a["allocated_bytes"] for a, b in growth(rows.of(whole_image=True)).values()]
    if not alike:
        return Finding(UNKNOWN, "no rows of whole images at two sizes in one series")
    grown, whole = pixels(last) / pixels(first), last["allocated_bytes"] / first["allocated_bytes"]
    is_stated = f"{whole:.1f}" == f"{stated:.1f}" and f"{grown:.1f}" == f"{stated_pixels:.1f}"
    is_alike = any(abs(value - stated) < 0.1 for value in alike)  # both figures have one decimal
    found = f"{span(alike)} where {grown:g} times the pixels are compared within one dtype and series"
    if not is_alike:
        mixed = f"{stated:g} is {case(last)} over {case(first)}" if is_stated else f"{whole:.1f} from first to last row"
        found += f"; {mixed}"
    return _judged(found, is_stated, is_alike)


def _middle(share: float, stated: float, rows: Rows) -> Finding:
    """A percentile of the implied constants of decoding."""

    def middle(some: Iterable[Row]) -> float:
        return percentile([constant(row) for row in some], share)

    mine = rows.of()
    value, widths = middle(mine), sorted(grouped(mine, lambda row: ELEMENT_BYTES[row["dtype"]]).items())
    alone = ", ".join(f"{middle(some):.0f} of {len(some)} rows of {e} bytes an element" for e, some in widths)
    found = f"{value:.0f} of {len(mine)} rows; {alone}"
    once = {(row["model"], row["height"], row["width"], row["dtype"]): row for row in mine}
    if len(once) != len(mine):
        found += f"; {middle(once.values()):.0f} of {len(once)} when each model, size and dtype counts once"
    return _judged(found, round(value) == stated, all(abs(middle(some) / value - 1) <= _ALIKE for _, some in widths))


def _covers(stated: float, rows: Rows) -> Finding:
    """Whether stated*H*W*e is enough for every whole-image row, and what it asks too much."""
    mine = sorted(rows.of(whole_image=True), key=constant, reverse=True)
    if not mine:
        return _NO_WHOLE_IMAGES
    short = [row for row in mine if constant(row) > stated]
    found = f"the largest of {len(mine)} rows needs {constant(mine[0]):.0f}; "
    if short:
        named = ", ".join(f"{case(row)} needs {constant(row):.0f}" for row in short[:3])
        found += f"too little for {len(short)}: {named}{', ...' if len(short) > 3 else ''}; "
    over = min(mine, key=constant)
    return _judged(f"{found}asks up to {100 * (stated / constant(over) - 1):.0f}% too much ({case(over)})", not short)


def _uses_more(model: str, other: str, stated: float, rows: Rows) -> Finding:
    """`other` reserves `stated` percent more than `model`."""
    at = pairs(rows.of(), model, other)
    if not at:
        return Finding(UNKNOWN, f"no rows of {model} and {other} of one series")
    more = [100 * (b["reserved_bytes"] / a["reserved_bytes"] - 1) for a, b in at]
    groups = ["" if b["group"] is None else f" group {b['group']}" for _, b in at]
    found = ", ".join(f"{d:+.1f}% in {b['dtype']}{of}" for d, (_, b), of in zip(more, at, groups, strict=True))
    allocated = max(abs(b["allocated_bytes"] / a["allocated_bytes"] - 1) for a, b in at)
    found += f"; allocated differs by {100 * allocated:.1f}%"
    return _judged(found, round(more[0]) == stated, all(round(d) == stated for d in more))


def _models_apart(rows: Rows) -> Finding:
    """Whether models need constants that differ more than those of the dtypes of one model."""
    kinds = grouped(rows.of(whole_image=True), operator.itemgetter("model", "dtype"))
    if not kinds:
        return _NO_WHOLE_IMAGES
    most = {kind: max(map(constant, some)) for kind, some in kinds.items()}

    def apart(alike_in: int) -> float:
        """By how much kinds differ that have the model (0) or the dtype (1) in common."""
        groups = grouped(most, operator.itemgetter(alike_in)).values()
        return max(max(most[kind] for kind in some) / min(most[kind] for kind in some) for some in groups) - 1

    found = (
        f"largest constants differ by up to {100 * apart(1):.0f}% between models of one dtype, "
        f"by up to {100 * apart(0):.0f}% between dtypes of one model"
    )
    return _judged(found, apart(1) > apart(0))


def _encode_needs(rows: Rows) -> Finding:
    key, form = operator.itemgetter("model", "height", "width", "dtype"), "{:.0f}".format
    mine = rows.of(op="encode", whole_image=True)
    if not mine:
        return _NO_WHOLE_IMAGES
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
    return _judged(found, any(same), all(same))


@functools.cache
def parameters(model: str) -> int:
    """Numbers in the weights of a model that vaemem has tables for."""
    core = _core.Model(_core.models()[model])
    return sum(math.prod(shape) for _, shape in core.tensors)


# ---- the published benchmark report ----

_RATIOS = {
    ("flux", "encode"): 1.15, ("flux", "decode"): 1.80,
    ("sd15", "encode"): 1.31, ("sd15", "decode"): 1.55, ("sd15", "decode_tiled"): 1.57,
    ("sdxl", "encode"): 1.31, ("sdxl", "decode"): 1.56, ("sdxl", "decode_tiled"): 1.61,
}  # fmt: skip
_DECODE = {"op": "decode"}
# Where it says what, of which rows, and the kind of claim with its figures.
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
