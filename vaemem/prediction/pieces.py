"""A peak as a function of the image's size, the batch and the prompt: pieces, each a polynomial with a bound below and
above it. cutting.py finds them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from vaemem._common import MIB, distinct, listed, render, whole

GRAIN = 8  # pixels: what the sides of these are multiples of
COARSER = 4


class Power(NamedTuple):
    """A quantity as Python, LaTeX and a table in MiB write it. unit: what the table multiplies a coefficient by, beside
    1/MiB."""

    python: str
    latex: str
    short: str = ""
    unit: int = 1


# What polynomials are of. h and w are the sides of a tile, t the tokens of attention between an image and its prompt.
_TILE = "min(height, tile) * min(width, tile)"
POWERS = {
    "": Power("1", ""),
    "batch*H*W": Power("batch * height * width", "N H W", "N*MP", MIB),
    "batch": Power("batch", "N", "N"),
    "batch*tokens": Power("batch * tokens", "N t", "N*t"),
    "tokens": Power("tokens", "t", "t"),
    "batch*(H+W)": Power("batch * (height + width)", "N (H + W)", "N*(H+W)"),  # padding
    "H*W": Power("height * width", "H W", "MP", MIB),
    "batch*(H*W)^2": Power("batch * (height * width) ** 2", "N (H W)^2", "N*MP^2", MIB**2),
    "batch*h*w": Power(f"batch * {_TILE}", "N h w", "N*mp", MIB),
    "batch*tokens*H*W": Power("batch * tokens * height * width", "N t H W", "N*t*MP", MIB),
    "batch*tokens^2": Power("batch * tokens**2", "N t^2", "N*t^2"),
}
# What the domain is cut by. The last is above 0 where 128 channels of half precision are no whole number of the
# allocator's pages of 2 MiB.
QUANTITIES = {name: POWERS[name] for name in ("batch", "tokens", "H*W", "batch*H*W", "batch*h*w", "batch*(H+W)")}
QUANTITIES |= {"batch*H*W % 8192": Power("batch * height * width % 8192", r"N H W \bmod 8192")}
# Each is computed by the very Python that it is written in, of numbers or of columns of them.
COMPUTED: dict[str, Callable[..., Any]] = {
    name: eval(f"lambda height, width, batch, tokens, tile: {power.python}", {"min": np.minimum})
    for name, power in {**POWERS, **QUANTITIES}.items()
}
Polynomial = Mapping[str, float | Fraction]  # bytes by power


class Point(NamedTuple):
    """Where a peak is looked at: pixels, images in a batch, tokens of the prompt; and the side of the VAE's tiles, 0
    where it has none."""

    height: int
    width: int
    batch: int = 1
    tokens: int = 0
    tile: int = 0


class PlayedPeak(NamedTuple):
    """A peak that was played: its bytes, the step that makes it, {name: bytes} of the tensors that it is made of, as
    they were asked for, none where it is not made of these alone; and the largest of those alive then."""

    bytes: int
    where: str
    tensors: Mapping[str, int]
    largest: str = ""

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """What two peaks are the same by: the step, and whose tensors are alive."""
        return self.where, frozenset(self.tensors)


@dataclass(frozen=True)
class Domain:
    """The points that are played: sides from the least in steps of so many pixels and the greatest one, shapes up to a
    ratio, batches, tokens of the prompt; of a VAE in tiles the side of these. Of several numbers of tokens all but the
    most are played at every fourth side, and others at some."""

    least: int = 256
    most: int = 2048
    batches: tuple[int, ...] = (1, 2, 3, 4)
    prompt_tokens: tuple[int, ...] = (0,)
    step: int = 64
    ratio: int = 4
    tile: int = 0

    def __post_init__(self) -> None:
        for name in ("least", "most", "step", "ratio"):
            whole(name, getattr(self, name))
        for name, least in (("batches", 1), ("prompt_tokens", 0)):
            values = tuple(sorted({whole(name, one, least=least) for one in listed(getattr(self, name), ())}))
            if not values:
                raise ValueError(f"{name}: want one number or more, got none")
            object.__setattr__(self, name, values)
        if self.most < self.least:
            raise ValueError(f"most: want at least the least side {self.least}, got {self.most}")

    def __iter__(self) -> Iterator[Point]:
        for tokens in self.prompt_tokens:
            sides = self._sides(1 if tokens == self.prompt_tokens[-1] else COARSER)
            for batch, height, width in product(self.batches, sides, sides):
                if self._shaped(point := Point(height, width, batch, tokens, self.tile)):
                    yield point

    def _sides(self, steps: int = 1) -> list[int]:
        """So many steps apart, and the greatest one."""
        return [*range(self.least, self.most, self.step * steps), self.most]

    def between(self, count: int) -> list[Point]:
        """So many points that lie between the steps, at random but always the same; none where nothing does."""
        fine = range(-(-self.least // GRAIN) * GRAIN, self.most + 1, GRAIN)
        return list(islice((point for point in self._drawn(fine, count) if not self.is_step(point)), count))

    def beside(self, count: int) -> list[Point]:
        """So many points that lie at the steps, with any number of tokens; none where this makes no difference."""
        return list(islice(self._drawn(self._sides(), count * (len(self.prompt_tokens) > 1)), count))

    def _drawn(self, sides: Sequence[int], count: int) -> Iterator[Point]:
        rng = random.Random(0)
        tokens = range(self.prompt_tokens[0], self.prompt_tokens[-1] + 1)
        for _ in range(8 * count * bool(sides)):
            height, width = rng.choices(sides, k=2)
            point = Point(height, width, rng.choice(self.batches), rng.choice(tokens), self.tile)
            if self._shaped(point):
                yield point

    def is_step(self, point: Point) -> bool:
        """Whether a point's sides are steps."""
        return self.around(point)[0] == point

    def around(self, point: Point) -> tuple[Point, Point]:
        """The same with the next smaller and with the next larger sides that are played."""
        (top, bottom), (left, right) = map(self._sides_around, point[:2])
        return point._replace(height=top, width=left), point._replace(height=bottom, width=right)

    def _sides_around(self, side: int) -> tuple[int, int]:
        less = side if side == self.most else side - (side - self.least) % self.step
        return less, side if side == less else min(less + self.step, self.most)

    def _shaped(self, point: Point) -> bool:
        return max(point[:2]) <= self.ratio * min(point[:2])

    def check(self, height: Any, width: Any, batch: Any, prompt_tokens: Any) -> Point:
        """A point of it, on its grid or between; ValueError names what lies outside."""
        tokens = self.prompt_tokens[-1] if prompt_tokens is None else whole("prompt_tokens", prompt_tokens, least=0)
        point = Point(whole("height", height), whole("width", width), whole("batch", batch), tokens, self.tile)
        sides = self.least, self.most
        spans = {"batch": self.batches, "prompt_tokens": self.prompt_tokens, "height": sides, "width": sides}
        for name, span in spans.items():
            value, low, high = tokens if name == "prompt_tokens" else getattr(point, name), span[0], span[-1]
            if high and not low <= value <= high:  # tokens of 0 alone make no difference
                raise ValueError(f"{name}: want {low} to {high}, which the formula is of, got {value}")
        if not self._shaped(point):
            shape = f"{point.height}x{point.width}"
            raise ValueError(
                f"height, width: want sides of 1:{self.ratio} at most, which the formula is of, got {shape}"
            )
        return point if len(self.prompt_tokens) > 1 else point._replace(tokens=0)

    def __str__(self) -> str:
        batch = f"{self.batches[0]} to {self.batches[-1]}" if len(self.batches) > 1 else str(self.batches[0])
        fewest, *_, most = (*self.prompt_tokens, self.prompt_tokens[-1])
        tokens = f", prompts of {fewest} to {most} tokens" * (fewest < most)
        return (
            f"H and W {self.least} to {self.most} in steps of {self.step} up to 1:{self.ratio}, batches of"
            f" {batch}{tokens}{f', h and w up to {self.tile}' * bool(self.tile)}"
        )


class Piece(NamedTuple):
    """A part of the domain, and the peak there.

    Attributes
    ----------
    within : dict of str to (float, float)
        What lies above the first number and is no more than the second: ``"H*W"`` in pixels, ``"batch"``,
        ``"batch*H*W"``, ``"tokens"``.
    law : dict of str to (float or Fraction)
        Bytes by power; fractions where they are exact.
    low, high : float
        The peak is at least and at most so many times the polynomial, at each of the points that were played.
    where : str
        What makes the peak, at most points of the piece: the step, of a pipeline after its phase.
    terms : tuple of (str, dict)
        The tensors that are alive then, and the law of each, where all of them are exact: they add up to the law.
    largest : str
        The largest of them.
    points : int
        How many were played.
    """

    within: Mapping[str, tuple[float, float]]
    law: Polynomial
    low: float
    high: float
    where: str
    terms: tuple[tuple[str, Polynomial], ...]
    largest: str
    points: int

    @property
    def is_exact(self) -> bool:
        """Whether the law is that of the tensors, which the allocator adds to."""
        return bool(self.terms)

    def holds(self, point: Point) -> bool:
        return all(low < COMPUTED[name](*point) <= high for name, (low, high) in self.within.items())

    def value(self, point: Point) -> float:
        """Bytes, before the bounds' factors."""
        return float(sum(value * COMPUTED[name](*point) for name, value in self.law.items()))

    def condition(self, written: Callable[[str], str] = str) -> str:
        """In words: ``H*W <= 1310720 and batch > 1``; "everywhere" where the domain is not cut."""
        return " and ".join(_conditions(self.within, written)) or "everywhere"

    @property
    def makes(self) -> str:
        """What makes the peak, and the largest tensor where that is another."""
        return self.where if not self.largest or self.where.endswith(self.largest) else f"{self.where}; {self.largest}"

    def equation(self) -> str:
        """Bytes in a line: ``2434.125 * batch*H*W + 1179664``."""
        return _sum(self.law, lambda power: f" * {power}")


def _conditions(within: Mapping[str, tuple[float, float]], written: Callable[[str], str]) -> list[str]:
    """What a piece's points are to meet, with the quantities written so."""
    parts = []
    for name, (low, high) in within.items():
        above, below = f"{low:.0f} < " * (low > -math.inf), f" <= {high:.0f}" * (high < math.inf)
        parts += [f"{above}{written(name)}{below}" if below else f"{written(name)} > {low:.0f}"]
    return parts


def _lettered(name: str) -> str:
    """As a table in MiB writes a quantity."""
    return name.replace("batch", "N").replace("tokens", "t")


def numbered(header: Sequence[str], cells: Iterable[Sequence[str]], markdown: bool = False) -> str:
    """A table whose last column, where the peak is, has numbers that the lines below explain."""
    peaks = distinct(line[-1] for line in cells)
    rows = [(*line[:-1], str(peaks.index(line[-1]) + 1)) for line in cells]
    notes = [f"Peak {number} is at {peak}." for number, peak in enumerate(peaks, 1)]
    return ("\n\n" if markdown else "\n").join([render((*header[:-1], "peak"), rows, markdown), *notes])


def _sum(law: Polynomial, times: Callable[[str], str], number: Callable[[float], str] = lambda v: f"{v:.9g}") -> str:
    """A polynomial in one line, the constant last."""
    text = ""
    for power in sorted(law, key=lambda power: (not power, list(POWERS).index(power))):
        value = float(law[power])
        sign = ("-" if value < 0 else "") if not text else f" {'-' if value < 0 else '+'} "
        size = abs(value)
        text += f"{sign}{f'{size:.0f}' if size >= 1e6 else number(size)}{times(power) if power else ''}"
    return text or "0"


class Between(NamedTuple):
    """How many points were played between the steps of a domain, and what the bounds are multiplied by there so that
    they hold at each of these."""

    points: int = 0
    below: float = 1.0
    above: float = 1.0


@dataclass(frozen=True, repr=False)
class Form:
    """Bytes of a peak over a domain, in pieces.

    Attributes
    ----------
    name : str
    pieces : tuple of Piece
        Disjoint and complete.
    domain : Domain
    within : float
        The share of the points that were played at which `upper` is at most 10% above the peak.
    worst, median : float
        By how much `upper` is above the peak at most, and in the middle; shares of the peak.
    between : Between
        How much wider the bounds are between the domain's steps.
    """

    name: str
    pieces: tuple[Piece, ...]
    domain: Domain
    within: float
    worst: float
    median: float
    between: Between = field(default_factory=Between)

    def piece(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> Piece:
        """The piece that a point lies in; ValueError outside of the domain."""
        return self._find(self.domain.check(height, width, batch, prompt_tokens))

    def _find(self, point: Point) -> Piece:
        return next(piece for piece in self.pieces if piece.holds(point))

    def predict(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes. Sizes in pixels, whole numbers within the domain; tokens of the prompt, by default the most."""
        point = self.domain.check(height, width, batch, prompt_tokens)
        return round(self._find(point).value(point))

    def upper(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes: no peak of the points that were played is above it. Between the domain's steps it is that of the next
        larger sides, times what `between` says: many such points were played too, but not all."""
        return math.ceil(self._bounds(self.domain.check(height, width, batch, prompt_tokens))[1])

    def lower(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes: no peak of the points that were played is below it. Between the domain's steps it is that of the next
        smaller sides, times what `between` says."""
        return math.floor(self._bounds(self.domain.check(height, width, batch, prompt_tokens))[0])

    def _bounds(self, point: Point) -> tuple[float, float]:
        less, more = self.domain.around(point)
        low, high = self._find(less), self._find(more)
        _, below, above = Between() if self.domain.is_step(point) else self.between
        return low.value(less) * low.low * below, high.value(more) * high.high * above

    def widened(self, peaks: Mapping[Point, PlayedPeak]) -> Form:
        """The same whose bounds hold at these points too, which lie between the domain's steps."""
        bounds = [(one.bytes, *self._bounds(point)) for point, one in peaks.items()]
        below = min([1.0, *(size / low for size, low, _ in bounds)])
        above = max([1.0, *(size / high for size, _, high in bounds)])
        return replace(self, between=Between(len(bounds), below, above))

    # ---- for people ----

    @property
    def errors(self) -> str:
        """How wide the bounds are."""
        count, below, above = self.between
        factors = (("upper", above - 1, "higher"), ("lower", 1 - below, "lower"))
        wider = " and ".join(f"the {name} is {off:.1%} {where}" for name, off, where in factors if off >= 0.0005)
        between = f"; between the steps, where {count} were played too, {wider or 'the bounds are the same'}"
        return (
            f"the upper bound is {self.median:.1%} above the peak in the middle, at most 10% at {self.within:.1%} of"
            f" the sizes and at most {self.worst:.1%}{between * bool(count)}"
        )

    def grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and cells: a line a piece."""
        header: tuple[str, ...] = ("where", f"{self.name}, MiB", "bounds", "made from", "peak at; largest tensor")
        cells: list[tuple[str, ...]] = []
        for piece in self.pieces:
            bounds = f"{piece.low - 1:+.1%} to {piece.high - 1:+.1%}".replace("-0.0%", "+0.0%")
            made = "tensors" if piece.is_exact else "fit"
            cells.append((piece.condition(_lettered), self._in_mib(piece.law), bounds, made, piece.makes))
        return header, cells

    def _in_mib(self, law: Polynomial) -> str:
        """A polynomial for people, without what adds less than 0.1 MiB anywhere in the domain."""
        side, batch, tokens = self.domain.most, self.domain.batches[-1], self.domain.prompt_tokens[-1]
        most = Point(side, side, batch, tokens, self.domain.tile)
        scaled = {
            power: float(value) * POWERS[power].unit / MIB for power, value in law.items()
            if abs(value) * COMPUTED[power](*most) >= 0.1 * MIB
        }  # fmt: skip
        return _sum(scaled, lambda power: f" {POWERS[power].short}", lambda v: f"{v:.1f}" if v >= 1000 else f"{v:.4g}")

    def text(self, markdown: bool = False) -> str:
        """How wide the bounds are, and a line a piece."""
        header, cells = self.grid()
        errors, peaks = f"{self.name.capitalize()}: {self.errors}.", {line[-1] for line in cells}
        if len(peaks) == 1:  # said once
            errors += f" Its peak is at {peaks.pop()}."
            table = render(header[:-1], [line[:-1] for line in cells], markdown)
        else:
            table = numbered(header, cells, markdown)
        return ("\n\n" if markdown else "\n").join([errors, table])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def python(self, function: str) -> str:
        """A Python function of that name, of height, width, batch and, where it matters, prompt_tokens: (least, likely,
        most) bytes, as `lower`, `predict` and `upper` give them; ValueError outside of the domain."""
        domain, (_, below, above) = self.domain, self.between
        fewest, *_, most = (*domain.prompt_tokens, domain.prompt_tokens[-1])
        names = [f"batch={domain.batches[0]}", *[f"prompt_tokens={most}"] * (fewest < most)]
        inside = [
            f"{domain.least} <= min(height, width)",
            f"max(height, width) <= min({domain.most}, {domain.ratio} * min(height, width))",
            f"{domain.batches[0]} <= batch <= {domain.batches[-1]}",
            *[f"{fewest} <= prompt_tokens <= {most}"] * (fewest < most),
        ]
        lines = [
            f"def {function}(height, width, {', '.join(names)}):",
            f'    """{self.name}, bytes: (least, likely, most).',
            "",
            f"    {domain}.",
            '    """',
            f"    if not ({' and '.join(inside)}):",
            f"        raise ValueError(f'want {domain}; got {{height}}x{{width}}, batch {{batch}}')",
            *([f"    tile = {domain.tile}"] if domain.tile else []),
            *["    tokens = prompt_tokens"] * (fewest < most),
            "",
            "    def around(side):  # the next sides that were played",
            f"        less = side if side == {domain.most} else side - (side - {domain.least}) % {domain.step}",
            f"        return less, side if side == less else min(less + {domain.step}, {domain.most})",
            "",
            "    def peak(height, width):",
        ]
        for piece in self.pieces:
            tests = _conditions(piece.within, lambda name: QUANTITIES[name].python)
            likely = " + ".join(
                f"{float(value)!r}{f' * {POWERS[name].python}' if name else ''}" for name, value in piece.law.items()
            )
            indent = "        " + "    " * bool(tests)
            lines += [f"        if {' and '.join(tests)}:  # {piece.where}"] if tests else []
            lines += [f"{indent}likely = {likely or '0.0'}"]
            lines += [f"{indent}return likely * {piece.low!r}, likely, likely * {piece.high!r}"]
        lines += [
            "",
            "    (top, bottom), (left, right) = around(height), around(width)",
            f"    below, above = (1.0, 1.0) if (top, left) == (height, width) else ({below!r}, {above!r})",
            "    return peak(top, left)[0] * below, peak(height, width)[1], peak(bottom, right)[2] * above",
        ]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """The formula as cases, a LaTeX equation body; N images, t tokens."""
        rows = []
        for piece in self.pieces:
            condition = r",\ ".join(_conditions(piece.within, lambda name: QUANTITIES[name].latex)).replace(
                "<=", r"\le"
            )
            equation = _sum(piece.law, lambda power: r"\," + POWERS[power].latex)
            rows.append(f"{equation} & {condition}".rstrip("& "))
        name = self.name.replace("_", r"\_")
        body = rows[0] if len(rows) == 1 else r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"
        return rf"M_{{\text{{{name}}}}} &= {body}"

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "within_10_percent": self.within, "worst": self.worst, "median": self.median,
            "between": self.between._asdict(),
            "pieces": [
                piece._asdict() | {
                    "within": piece.condition(),
                    "law": {power or "1": float(value) for power, value in piece.law.items()},
                    "terms": {name: {p or "1": float(v) for p, v in law.items()} for name, law in piece.terms},
                }
                for piece in self.pieces
            ],
        }  # fmt: skip
