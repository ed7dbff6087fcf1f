"""A peak as an equation of the image's size, the batch and the prompt: one line per phase. The largest line counts.

A line is exact if every tensor at the phase's peak is a polynomial at every size that was played. Otherwise it is the
lowest line above the sizes that were played, raised a little for the other sizes of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from typing import Any, NamedTuple

from vaemem._common import MIB, distinct, grouped, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Columns
from vaemem.prediction.closed import PlayedPeak, solve_in_fractions
from vaemem.prediction.writing import Polynomial, write_equation, write_function, write_sum

GRID_SIDES = range(256, 2049, 64)  # pixels
RATIO = 4  # the longer side by the shorter one
BATCHES = range(1, 5)
MOST_PIXELS = 1 << 23  # in a batch: 2^31 elements with 256 channels, the most channels at full size
SMALL = 3 << 16  # pixels in a batch; below, workspaces jump from size to size
COUNTERS = "reserved", "allocated"
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


# Symbols of `SYMBOLS` as numbers: a function of a point, and how many pixels one unit has.
FACTORS: dict[str, tuple[Callable[..., Any], int]] = {
    "N": (lambda height, width, batch, tokens, tile: batch, 1),
    "t": (lambda height, width, batch, tokens, tile: tokens, 1),
    "MP": (lambda height, width, batch, tokens, tile: height * width, MIB),
    "(H+W)": (lambda height, width, batch, tokens, tile: height + width, 1),
    "tile": (lambda height, width, batch, tokens, tile: np.minimum(height, tile) * np.minimum(width, tile), MIB),
}
# Powers of a bound. `SQUARES` adds a workspace for one image and attention's scores; `SCORES` adds the scores of an
# image with its prompt.
BOUND = "N*MP", "N*tile", "N", "N*t", ""
SQUARES = *BOUND, "MP", "N*MP*MP"
SCORES = *SQUARES, "N*t*MP", "N*t*t"
POWERS = *SCORES, "t", "N*(H+W)"


@dataclass(frozen=True)
class Grid:
    """The sizes that an equation or a bound is made for.

    Attributes
    ----------
    tokens : int
        Tokens of the longest prompt; 0 if they make no difference.
    tile : int
        Side of the VAE's tiles; 0 without tiles.
    sides, batches : sequence of int
        Heights and widths in pixels, and batches.
    ratio : int
        Largest ratio of the longer side to the shorter one.
    """

    tokens: int = 0
    tile: int = 0
    sides: Sequence[int] = GRID_SIDES
    batches: Sequence[int] = BATCHES
    ratio: int = RATIO

    def __iter__(self) -> Iterator[Point]:
        """Yield every size with the longest prompt."""
        for batch, height, width in product(self.batches, self.sides, self.sides):
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
        spans = {"height": self.sides, "width": self.sides, "batch": self.batches}
        spans |= {"tokens": range(1, self.tokens + 1)} if self.tokens else {}
        for name, span in spans.items():
            if not span[0] <= (value := getattr(point, name)) <= span[-1]:
                return ArgumentError(name.replace("tokens", "prompt_tokens"), f"{span[0]} to {span[-1]}", str(value))
        if max(height, width) > self.ratio * min(height, width):
            return ArgumentError("height, width", f"sides up to {self.ratio}:1", f"{height}x{width}")
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


class PhaseLine(NamedTuple):
    """The peak of one phase.

    Attributes
    ----------
    phase : str
    kind : str
        ``"exact"``: the sum of the tensors at the peak, each a polynomial, and the most that the allocator adds.
        ``"bound"``: a line above every size that was played.
    law : dict of str to (float or Fraction)
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
    law: Polynomial
    excess: float
    median: float
    where: str
    terms: Mapping[str, Polynomial]

    def mebibytes(self, point: Point) -> float:
        return float(sum(float(value) * _value(power, point) for power, value in self.law.items()))

    def equation(self) -> str:
        """Return the law in MiB: ``2434 N*MP + 2108``."""
        return write_sum(self.law)


@dataclass(frozen=True, repr=False)
class Equation:
    """The bytes of a peak: the largest of its lines.

    Attributes
    ----------
    name : str
        ``"reserved"`` or ``"allocated"``.
    lines : tuple of PhaseLine
        One per phase; several if a phase peaks in places that grow differently.
    grid : Grid
        The sizes that it holds for.
    excess, median : float
        Largest and median excess of the largest line over the peak of all phases, at the sizes that were played.
    """

    name: str
    lines: tuple[PhaseLine, ...]
    grid: Grid
    excess: float
    median: float

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
        """Write a Python function of that name, which returns the same bytes as `predict`. Its arguments are height,
        width, batch and, if it makes a difference, prompt_tokens."""
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
                "equation_mib": line.equation(), "law_mib": _floats(line.law),
                "terms_mib": {name: _floats(law) for name, law in line.terms.items()},
            }
            for line in self.lines
        ]  # fmt: skip
        return {"excess": self.excess, "median": self.median, "lines": lines}


HEADER = "phase", "counter", "MiB", "kind", "excess", "median"


def solve(name: str, grid: Grid, played: Mapping[Point, Mapping[str, PlayedPeak]]) -> Equation:
    """Solve for the equation of a counter from the phases' peaks at the sizes that were played.

    Reserved memory stays for the next phase. Therefore a phase's line of `reserved` holds at the sizes at which the
    phase needs more than all phases before it.
    """
    lines, most = list[PhaseLine](), dict.fromkeys(played, 0)
    for phase in next(iter(played.values())):
        sizes = {point: getattr(peaks[phase], name) for point, peaks in played.items()}
        mine = [point for point, size in sizes.items() if size > most[point] or name == "allocated"]
        if mine:
            lines += _Sizes(phase, name, mine, [played[point][phase] for point in mine]).lines()
        most = {point: max(size, most[point]) for point, size in sizes.items()}
    return Equation(name, tuple(lines), grid, *_excess(lines, [*most], np.array([*most.values()]) / MIB))


def _excess(lines: Sequence[PhaseLine], points: Sequence[Point], sizes: np.ndarray) -> tuple[float, float]:
    """Return the largest and the median excess of the largest line over the sizes."""
    above = np.array([max(line.mebibytes(point) for line in lines) for point in points]) / sizes - 1
    return float(above.max()), float(np.median(above[_usual(points)]))


def _uncovered(lines: Sequence[PhaseLine]) -> list[PhaseLine]:
    """Leave out the lines of a phase that are above another one nowhere: the largest decides, so they say nothing."""

    def covers(a: PhaseLine, b: PhaseLine) -> bool:
        return all(a.law.get(power, 0) >= b.law.get(power, 0) for power in {*a.law, *b.law})

    kept = list[PhaseLine]()
    for line in lines:
        if not any(covers(other, line) for other in kept):
            kept = [*(other for other in kept if not covers(line, other)), line]
    return kept


def _usual(points: Sequence[Point]) -> np.ndarray:
    """Mark all sizes but the smallest, which are played more densely; mark all if there are no larger ones."""
    large = np.array([point.batch * point.height * point.width > SMALL for point in points])
    return large if large.any() else ~large


class _Sizes:
    """MiB of a phase at the points that were played, to solve for its line."""

    def __init__(
        self, phase: str, counter: str, points: Sequence[Point], peaks: Sequence[PlayedPeak], alone: bool = False
    ):
        """alone: the sizes are of one image, so the powers have no N."""
        self.phase, self.counter, self.points, self.peaks, self.alone = phase, counter, points, peaks, alone
        self.sizes = np.array([getattr(peak, counter) for peak in peaks], dtype=float) / MIB
        columns = Point(*np.array(points, dtype=float).T)
        ones = np.ones(len(points))
        found = {power: ones * _value(power, columns) for power in self._powers(POWERS)}
        is_known = {name: len({getattr(point, name) for point in points}) > 1 for name in ("tokens", "tile")}
        is_known["tile"] = points[0].tile > 0
        self.columns = {
            power: column for power, column in found.items()
            if (is_known["tokens"] or "t" not in power.split("*")) and (is_known["tile"] or "tile" not in power)
        }  # fmt: skip

    def _powers(self, powers: Sequence[str]) -> Sequence[str]:
        if not self.alone:
            return powers
        return distinct("*".join(name for name in power.split("*") if name != "N") for power in powers)

    def _some(self, name: str, some: Iterable[tuple[Point, PlayedPeak]], alone: bool = False) -> _Sizes:
        points, peaks = map(list, zip(*some, strict=True))
        return _Sizes(f"{self.phase}, {name}", self.counter, points, peaks, alone)

    def _by_batch(self) -> list[_Sizes]:
        """Split off the sizes of one image if it never peaks as batches do. A line for both would be too high for
        batches: they take less per image."""
        parts = grouped(zip(self.points, self.peaks, strict=True), lambda one: one[0].batch == 1)
        keys = [{peak.key for _, peak in some} for some in parts.values()]
        if len(keys) < 2 or not keys[0].isdisjoint(keys[1]):
            return [self]
        return [self._some("N=1" if alone else "N>1", some, alone) for alone, some in parts.items()]

    def lines(self) -> list[PhaseLine]:
        """Return one line, or one for each place of the peak if that is closer and one line is too high."""
        lines = [part.line() for part in self._by_batch()]
        places = grouped(zip(self.points, self.peaks, strict=True), lambda one: one[1].where)
        if max(line.excess for line in lines) <= TOO_HIGH or len(places) == 1:
            return lines
        parts = [self._some(where.rpartition(" [")[2].rstrip("]"), some) for where, some in places.items()]
        split = _uncovered([part.line() for place in parts for part in place._by_batch()])
        return min(lines, split, key=lambda lines: _excess(lines, self.points, self.sizes)[0])

    def line(self) -> PhaseLine:
        where = max(grouped(self.peaks, lambda peak: peak.where).items(), key=lambda item: len(item[1]))[0]
        law, terms = (self._exact() if self.counter == "allocated" else None) or (None, {})
        kind = "exact" if law else "bound"
        law = law or min(map(self._bound, (BOUND, SQUARES, SCORES)), key=self._too_high)
        line = PhaseLine(self.phase, kind, law, 0.0, 0.0, where, terms)
        excess, median = _excess([line], self.points, self.sizes)
        return line._replace(excess=excess, median=median)

    def _too_high(self, law: Polynomial) -> float:
        """Return the largest excess of a law, at least `TOO_HIGH`: all laws below it are equally good."""
        return max(TOO_HIGH, float((self._values(law) / self.sizes).max()) - 1)

    def _values(self, law: Polynomial) -> np.ndarray:
        values = np.zeros(len(self.sizes))
        for power, value in law.items():
            values += float(value) * self.columns[power]
        return values

    def _bound(self, powers: Sequence[str]) -> dict[str, float]:
        """Return the lowest line above the sizes. Its coefficients are rounded up to the digits that are shown."""
        if np.ptp(self.sizes) == 0:
            return {"": float(self.sizes[0])}
        powers = [power for power in self._powers(powers) if power in self.columns]
        usual = _usual(self.points)
        columns = np.stack([self.columns[power] for power in powers], 1)
        found = least_above(columns, self.sizes, usual / usual.sum())
        law = {power: _rounded_up(value * RAISED) for power, value in zip(powers, found, strict=True)}
        kept = self._large(law)
        lacking = sum(float(self.columns[power].max()) * value for power, value in law.items() if power not in kept)
        return self._large(kept | {"": _rounded_up(law[""] + lacking)})

    def _exact(self) -> tuple[Polynomial, Mapping[str, Polynomial]] | None:
        """Return the sum of the tensors at the peak with the most that the allocator adds, and each tensor's law.
        Return None if the tensors differ from size to size, or if one of them is no polynomial."""
        tensors = self.peaks[-1].tensors
        if not tensors or any(peak.key != self.peaks[-1].key for peak in self.peaks):
            return None
        terms = dict[str, Polynomial]()
        for name in sorted(tensors, key=lambda name: (-tensors[name], name)):
            law = self._tensor(np.array([peak.tensors[name] for peak in self.peaks], dtype=float))
            if law is None:
                return None
            terms[name] = law
        total = self._large(
            {power: sum((law.get(power, Fraction(0)) for law in terms.values()), Fraction(0)) for power in self.columns}
        )
        added = float((self.sizes - self._values(total)).max())
        return total | {"": Fraction(math.ceil(total.get("", 0) + added) + SPARE)}, terms

    def _large(self, law: Mapping[str, Any]) -> dict[str, Any]:
        """Drop the powers that add less than 0.1 MiB everywhere."""
        return {power: one for power, one in law.items() if abs(one) * self.columns[power].max() >= 0.1}

    def _tensor(self, sizes: np.ndarray) -> dict[str, Fraction] | None:
        """Return the polynomial with the fewest powers that gives a tensor's bytes at every point, if there is one."""
        for powers in (some for count in (1, 2, 3) for some in combinations(self.columns, count)):
            units = [math.prod(FACTORS[name][1] for name in power.split("*") if name) for power in powers]
            matrix = np.stack([self.columns[power] * unit for power, unit in zip(powers, units, strict=True)], 1)
            found = solve_in_fractions(matrix, sizes)
            if np.abs(matrix @ np.array([float(one) for one in found]) - sizes).max() < 1:
                return {p: one * unit / MIB for p, one, unit in zip(powers, found, units, strict=True) if one}
        return None


def least_above(columns: np.ndarray, sizes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the coefficients of the columns, none below 0, of the lowest sum above all sizes.

    Lowest means the smallest sum of the weighted relative excesses and the largest one. The simplex method solves the
    dual program, which has few rows.
    """
    shares = columns / sizes[:, None]
    scale = np.maximum(shares.max(0), np.finfo(float).tiny)
    shares = shares / scale
    count, width = shares.shape
    cost = np.append(weights @ shares, 1)  # of each coefficient, and of the largest excess
    at_least, at_most = np.hstack([shares, np.zeros((count, 1))]), np.hstack([-shares, np.ones((count, 1))])
    table = np.hstack([at_least.T, at_most.T, np.eye(width + 1), cost[:, None]])
    gain = np.concatenate([np.ones(count), np.zeros(count + width + 2)])
    for _ in range(100 * width):
        enters = int(gain[:-1].argmax())
        if gain[enters] <= 1e-10:
            break
        column = table[:, enters]
        room = np.divide(table[:, -1], column, out=np.full(width + 1, math.inf), where=column > 1e-11)
        leaves = int(room.argmin())
        table[leaves] /= column[leaves]
        others = np.arange(width + 1) != leaves
        table[others] -= np.outer(table[others, enters], table[leaves])
        gain = gain - gain[enters] * table[leaves]
    found = np.maximum(-gain[2 * count : 2 * count + width], 0) / scale
    law: np.ndarray = found / (columns @ found / sizes).min()
    return law


def _value(power: str, point: Any) -> Any:
    """Return a power at a point, or at columns of points."""
    factors = [FACTORS[name] for name in power.split("*") if name]
    return math.prod((value(*point) / unit for value, unit in factors), start=1.0)


def _rounded_up(value: float) -> float:
    """Round up to the digits that are shown."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) + 1 - DIGITS)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.{DIGITS + 2}g}")


def _floats(law: Polynomial) -> dict[str, float]:
    return {power or "1": float(value) for power, value in law.items()}
