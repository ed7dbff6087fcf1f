"""A peak as an equation of the image's size, the batch and the prompt: one line per phase. The largest line counts.

A line is exact if every tensor at the phase's peak is a polynomial at every size that was played. Otherwise the line is
the lowest one above the played sizes, raised a little for the other sizes of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

from vaemem._common import MIB, distinct, grouped, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Columns
from vaemem.prediction.closed_form import PlayedPeak
from vaemem.prediction.laws import (
    Law,
    least_above,
    solve_law,
    symbols_at,
    value_of,
    write_equation,
    write_function,
    write_sum,
)

GRID_SIDES = range(256, 2049, 64)  # pixels
RATIO = 4  # the longer side by the shorter one
BATCHES = range(1, 5)
MOST_PIXELS = 1 << 23  # in a batch: 2^31 elements with 256 channels, the most channels at full size
SMALL = 3 << 16  # pixels in a batch; below, workspaces jump from size to size
RAISED = 1.03  # factor of a bound above the sizes that were played: of the sizes between, some took 2.5% more
SPARE = 2  # MiB that blocks may leave unused at sizes that were not played
TOO_HIGH = 0.4  # excess of a line; above it, try attention's scores or several lines per phase
DIGITS = 4  # of a bound's coefficients


class Point(NamedTuple):
    """A size of the image, a batch, the prompt's tokens (0 if they make no difference) and the side of the VAE's tiles
    (0 without tiles)."""

    height: int
    width: int
    batch: int = 1
    tokens: int = 0
    tile: int = 0


# Powers of a bound. `SQUARES` adds a workspace for one image and attention's scores; `SCORES` adds the scores of an
# image with its prompt.
BOUND = "N*MP", "N*tile", "N", "N*t", ""
SQUARES = *BOUND, "MP", "N*MP*MP"
SCORES = *SQUARES, "N*t*MP", "N*t*t"
POWERS = *SCORES, "t", "N*(H+W)"


@dataclass(frozen=True)
class Grid:
    """The sizes that an equation is made for.

    Attributes
    ----------
    tokens : int
        Tokens of the longest prompt; 0 if they make no difference.
    tile : int
        Side of the VAE's tiles; 0 without tiles.
    batches : range
        Numbers of images.
    """

    tokens: int = 0
    tile: int = 0
    batches: range = BATCHES

    def __iter__(self) -> Iterator[Point]:
        """Yield every size with the longest prompt."""
        for batch, height, width in product(self.batches, GRID_SIDES, GRID_SIDES):
            if self._refusal(point := Point(height, width, batch, self.tokens, self.tile)) is None:
                yield point

    def played(self) -> Iterator[Point]:
        """Yield the sizes that a formula plays: squares, every fourth side and the smallest, and squares with shorter
        prompts. A shorter prompt has one token more than a multiple of 32, because some models pad to it."""
        shorter = (1, self.tokens // 2 + 1, self.tokens - 31) if self.tokens else ()
        for point in self:
            height, width, batch = point[:3]
            is_coarse = height % 256 == width % 256 == 0
            if height == width or batch * height * width <= SMALL or (is_coarse and batch != 3):
                yield point
            if shorter and height == width and batch != 3:
                yield point._replace(tokens=shorter[(height // GRID_SIDES.step + batch) % 3])

    def check(self, height: Any, width: Any, batch: Any, prompt_tokens: Any) -> Point:
        """Return the point of these arguments. ValueError names the argument outside of the grid."""
        tokens = self.tokens if prompt_tokens is None else whole("prompt_tokens", prompt_tokens)
        point = Point(whole("height", height), whole("width", width), whole("batch", batch), tokens, self.tile)
        if refusal := self._refusal(point):
            raise refusal
        return point if self.tokens else point._replace(tokens=0)

    def _refusal(self, point: Point) -> ArgumentError | None:
        height, width, batch = point[:3]
        spans = {"height": GRID_SIDES, "width": GRID_SIDES, "batch": self.batches}
        spans |= {"tokens": range(1, self.tokens + 1)} if self.tokens else {}
        for name, span in spans.items():
            if not span[0] <= (value := getattr(point, name)) <= span[-1]:
                return ArgumentError(name.replace("tokens", "prompt_tokens"), f"{span[0]} to {span[-1]}", str(value))
        if max(height, width) > RATIO * min(height, width):
            return ArgumentError("height, width", f"sides up to {RATIO}:1", f"{height}x{width}")
        if batch * height * width >= MOST_PIXELS:
            wanted = f"less than {MOST_PIXELS >> 20} * 2^20 pixels in all"
            return ArgumentError("batch", wanted, f"{batch} of {height}x{width}")
        return None

    def __str__(self) -> str:
        tokens = f", prompts of 1 to {self.tokens} tokens" * bool(self.tokens)
        tiles = f", tiles of {self.tile}" * bool(self.tile)
        sides = f"multiples of {GRID_SIDES.step} pixels from {GRID_SIDES[0]} to {GRID_SIDES[-1]} up to {RATIO}:1"
        batches = f"{self.batches[0]} to {self.batches[-1]} images with N*MP below {MOST_PIXELS >> 20}"
        return f"{sides}, {batches}{tokens}{tiles}"


class _PhaseLine(NamedTuple):
    """The peak of one phase.

    Attributes
    ----------
    phase : str
    kind : str
        ``"exact"``: the sum of the tensors at the peak, each a polynomial, and the most that the allocator adds.
        ``"bound"``: a line above every size that was played.
    law : dict of str to float
        MiB by power: ``"N*MP"``, ``"N"``, ``""`` ...
    excess, median : float
        Largest and median excess over the sizes that were played, as a share of the peak.
    where : str
        The step that makes the peak at most of these sizes.
    terms : dict of str to dict
        The law of each tensor if the line is exact.
    """

    phase: str
    kind: str
    law: Mapping[str, float]
    excess: float
    median: float
    where: str
    terms: Mapping[str, Law]

    def mebibytes(self, point: Point) -> float:
        return float(value_of(self.law, symbols_at(*point)))

    def equation(self) -> str:
        """Return the law in MiB: ``2434 N*MP + 2108``."""
        return write_sum(self.law)


class Equation:
    """The bytes of a peak: the largest of the equation's lines.

    Attributes
    ----------
    name : str
        ``"reserved"`` or ``"allocated"``.
    lines : tuple of _PhaseLine
        One line per phase, or several if a phase peaks in places that grow differently.
    grid : Grid
        The sizes that the equation holds for.
    excess, median : float
        Largest and median excess of the largest line over the peak of all phases, at the sizes that were played.
    """

    def __init__(self, name: str, grid: Grid, played: Mapping[Point, Mapping[str, PlayedPeak]]):
        """Solve for the lines from the phases' peaks at the sizes that were played.

        Reserved memory stays for the next phase. Therefore a phase's line of `reserved` holds at the sizes at which the
        phase needs more than all phases before it.
        """
        lines, most = list[_PhaseLine](), dict.fromkeys(played, 0)
        for phase in next(iter(played.values())):
            peaks = {point: one[phase] for point, one in played.items()}
            sizes = {point: getattr(peak, name) for point, peak in peaks.items()}
            mine = [(point, peaks[point]) for point in sizes if sizes[point] > most[point] or name == "allocated"]
            lines += _Sizes(phase, name, mine).lines() if mine else []
            most = {point: max(size, most[point]) for point, size in sizes.items()}
        self.name, self.grid, self.lines = name, grid, tuple(lines)
        at = symbols_at(*np.array([*most], dtype=float).T)
        self.excess, self.median = _excess(lines, at, np.array([*most.values()]) / MIB)

    def predict(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Return bytes. By default the prompt is the longest. ValueError outside of the grid's ends."""
        point = self.grid.check(height, width, batch, prompt_tokens)
        return math.ceil(MIB * max(line.mebibytes(point) for line in self.lines))

    def cells(self) -> list[tuple[str, ...]]:
        return [
            (line.phase, self.name, line.equation(), line.kind, f"{line.excess:.1%}", f"{line.median:.1%}")
            for line in self.lines
        ]

    def __str__(self) -> str:
        return Columns(HEADER, self.cells()).text()

    __repr__ = __str__

    def python(self, function: str) -> str:
        """Write a Python function of that name, which returns the same bytes as `predict`. The function's arguments are
        height, width, batch and, if it makes a difference, prompt_tokens."""
        tokens, side = self.grid.tokens, self.grid.tile
        uses = {name for line in self.lines for power in line.law for name in power.split("*")}
        lines = [
            "megapixels = height * width / 2**20",
            *[f"tile_megapixels = min(height, {side}) * min(width, {side}) / 2**20"] * ("tile" in uses),
            "return math.ceil(2**20 * max([",
            *(f"    {write_sum(line.law, 'python')},  # {line.phase}, {line.kind}" for line in self.lines),
            "]))",
        ]
        arguments = f"height, width, batch=1{f', prompt_tokens={tokens}' * bool(tokens)}"
        return write_function(function, arguments, f"Return the bytes {self.name}, for {self.grid}.", lines)

    def latex(self) -> str:
        """Write the body of a LaTeX equation in MiB, with N images, P = H W / 2^20 and a prompt of t tokens."""
        cases = r" \\ ".join(
            rf"{write_sum(line.law, 'latex')} & \text{{{line.phase.replace('_', ' ')}}}" for line in self.lines
        )
        return write_equation(self.name, rf"\max\begin{{cases}} {cases} \end{{cases}}")

    def data(self) -> dict[str, Any]:
        """Return the equation for JSON."""
        lines = [
            {name: getattr(line, name) for name in ("phase", "kind", "excess", "median", "where")} | {
                "equation_mib": line.equation(), "law_mib": _named(line.law),
                "terms_mib": {name: _named(law) for name, law in line.terms.items()},
            }
            for line in self.lines
        ]  # fmt: skip
        return {"excess": self.excess, "median": self.median, "lines": lines}


HEADER = "phase", "counter", "MiB", "kind", "excess", "median"


def _excess(lines: Sequence[_PhaseLine], at: Mapping[str, Any], sizes: np.ndarray) -> tuple[float, float]:
    """Return the largest and the median excess of the largest line over the sizes."""
    above = np.max([value_of(line.law, at) for line in lines], 0) / sizes - 1
    return float(above.max()), float(np.median(above[_usual(at)]))


def _uncovered(lines: Sequence[_PhaseLine]) -> list[_PhaseLine]:
    """Leave out the lines of a phase that are above another one nowhere: the largest decides, so they say nothing."""

    def covers(a: _PhaseLine, b: _PhaseLine) -> bool:
        return all(a.law.get(power, 0) >= b.law.get(power, 0) for power in {*a.law, *b.law})

    kept = list[_PhaseLine]()
    for line in lines:
        if not any(covers(other, line) for other in kept):
            kept = [*(other for other in kept if not covers(line, other)), line]
    return kept


def _usual(at: Mapping[str, Any]) -> np.ndarray:
    """Mark all sizes but the smallest, which are played more densely; mark all if there are no larger ones."""
    large: np.ndarray = at["N"] * at["HW"] > SMALL
    return large if large.any() else ~large


class _Sizes:
    """MiB of a phase at the points that were played, to solve for its line."""

    def __init__(self, phase: str, counter: str, played: Sequence[tuple[Point, PlayedPeak]], alone: bool = False):
        """alone: the sizes are of one image, so the powers have no N."""
        self.phase, self.counter, self.played, self.alone = phase, counter, played, alone
        self.peaks = [peak for _, peak in played]
        self.sizes = np.array([getattr(peak, counter) for peak in self.peaks], dtype=float) / MIB
        self.at = symbols_at(*np.array([point for point, _ in played], dtype=float).T)
        self.differs = {"t": np.ptp(self.at["t"]) > 0, "tile": self.at["tile"].any()}
        self.columns = {power: value_of({power: 1.0}, self.at) for power in self._powers(POWERS)}

    def _powers(self, powers: Sequence[str]) -> list[str]:
        """Return the powers that make a difference at these sizes."""
        split = [power.split("*") for power in powers]
        named = ["*".join(name for name in names if name != "N" or not self.alone) for names in split]
        return distinct(power for power in named if all(self.differs.get(name, True) for name in power.split("*")))

    def _some(self, name: str, some: Sequence[tuple[Point, PlayedPeak]], alone: bool = False) -> _Sizes:
        return _Sizes(f"{self.phase}, {name}", self.counter, some, alone)

    def _by_batch(self) -> list[_Sizes]:
        """Split off the sizes of one image if it never peaks as batches do. A line for both would be too high for
        batches: they take less per image."""
        parts = grouped(self.played, lambda one: one[0].batch == 1)
        keys = [{peak.key for _, peak in some} for some in parts.values()]
        if len(keys) < 2 or not keys[0].isdisjoint(keys[1]):
            return [self]
        return [self._some("N=1" if alone else "N>1", some, alone) for alone, some in parts.items()]

    def lines(self) -> list[_PhaseLine]:
        """Return one line, or one for each place of the peak if that is closer and one line is too high."""
        lines = [part.line() for part in self._by_batch()]
        places = grouped(self.played, lambda one: one[1].where)
        if max(line.excess for line in lines) <= TOO_HIGH or len(places) == 1:
            return lines
        parts = [self._some(where.rpartition(" [")[2].rstrip("]"), some) for where, some in places.items()]
        split = _uncovered([part.line() for place in parts for part in place._by_batch()])
        return min(lines, split, key=lambda lines: _excess(lines, self.at, self.sizes)[0])

    def line(self) -> _PhaseLine:
        where = max(grouped(self.peaks, lambda peak: peak.where).items(), key=lambda item: len(item[1]))[0]
        terms = self._tensors() if self.counter == "allocated" else {}
        law = self._sum(terms) if terms else min(map(self._bound, (BOUND, SQUARES, SCORES)), key=self._too_high)
        line = _PhaseLine(self.phase, "exact" if terms else "bound", law, 0.0, 0.0, where, terms)
        excess, median = _excess([line], self.at, self.sizes)
        return line._replace(excess=excess, median=median)

    def _too_high(self, law: Law) -> float:
        """Return the largest excess of a law, at least `TOO_HIGH`: all laws below it are equally good."""
        return max(TOO_HIGH, float((value_of(law, self.at) / self.sizes).max()) - 1)

    def _bound(self, powers: Sequence[str]) -> dict[str, float]:
        """Return the lowest line above the sizes. The line's coefficients are rounded up to the digits that are
        shown."""
        if np.ptp(self.sizes) == 0:
            return {"": float(self.sizes[0])}
        usual = _usual(self.at)
        found = least_above(self._powers(powers), self.at, self.sizes, usual / usual.sum())
        law = {power: _rounded_up(value * RAISED) for power, value in found.items()}
        kept = self._large(law)
        lacking = sum(float(self.columns[power].max()) * value for power, value in law.items() if power not in kept)
        return self._large(kept | {"": _rounded_up(law[""] + lacking)})

    def _large(self, law: dict[str, float]) -> dict[str, float]:
        """Drop the powers that add less than 0.1 MiB everywhere."""
        return {power: one for power, one in law.items() if abs(one) * self.columns[power].max() >= 0.1}

    def _tensors(self) -> dict[str, Law]:
        """Return the law of each tensor at the peak, in MiB. Return none if the tensors differ from size to size, or if
        one of them is no polynomial."""
        tensors, terms = self.peaks[-1].tensors, dict[str, Law]()
        if any(peak.key != self.peaks[-1].key for peak in self.peaks):
            return {}
        for name in sorted(tensors, key=lambda name: (-tensors[name], name)):
            law = self._tensor(np.array([peak.tensors[name] for peak in self.peaks], dtype=float))
            if law is None:
                return {}
            terms[name] = law
        return terms

    def _tensor(self, sizes: np.ndarray) -> Law | None:
        """Return the polynomial with the fewest powers that gives a tensor's bytes at every point, if there is one."""
        in_pixels = self.at | {"MP": self.at["HW"], "tile": self.at["cut"]}
        for powers in (some for count in (1, 2, 3) for some in combinations(self.columns, count)):
            law = solve_law(powers, in_pixels, sizes)
            if np.abs(value_of(law, in_pixels) - sizes).max() < 1:
                units = {power: float(MIB) ** (power.count("MP") + power.count("tile") - 1) for power in law}
                return {power: one * units[power] for power, one in law.items() if one}
        return None

    def _sum(self, terms: Mapping[str, Law]) -> dict[str, float]:
        """Return the sum of tensors, with the most that the allocator adds."""
        laws = [*terms.values()]
        total = self._large({power: sum(law.get(power, 0.0) for law in laws) for power in self.columns})
        added = float((self.sizes - value_of(total, self.at)).max())
        return total | {"": float(math.ceil(total.get("", 0) + added) + SPARE)}


def _rounded_up(value: float) -> float:
    """Round up to the digits that are shown."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - DIGITS)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.{DIGITS + 2}g}")


def _named(law: Law) -> dict[str, float]:
    return {power or "1": number for power, number in law.items()}
