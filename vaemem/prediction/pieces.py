"""A peak as a function of the image's size, the batch and the prompt: pieces, each a polynomial with a bound below and
above it, found by playing every point of a domain.

The pieces are the leaves of a regression tree: the domain is cut in two, at a number of pixels, images or tokens, where
that narrows the bounds the most, until they are narrow or there are `MOST_PIECES`. So they are disjoint, and complete.
Where the tensors of the peak that most points of a piece have are polynomials, their sum is the piece's, exactly; else
it is the polynomial whose largest relative error is the least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from vaemem._common import render, whole
from vaemem.prediction.moments import ROUNDED_UP

MOST_PIECES = 12
NARROW = 1.04  # upper over lower bound of a piece that is not cut any more
EXACT = 1.03  # and of one that keeps the law of its tensors, though another polynomial were nearer
FINE = 1.005  # and of one whose polynomial is good enough
EXCESS = 1.1  # what the upper bound may be of the peak, at most points
FAR = 2  # what a point costs beside whose bound is further above
COARSER = 4
CUTS = 16  # places at which a cut is tried, of each quantity
ROUNDING = 512  # bytes: the allocator's granule; a tensor that is off its law by no more follows it
FINEST = 1 << 13  # denominators of exact coefficients: 64 pixels a latent's, squared, and two more
LAWSON = 12  # rounds of reweighting
PAYS = 0.75  # a further power is taken where it leaves so much of the distance between the bounds
# What the domain is cut by, and the powers that polynomials are of: how Python and LaTeX write them.
_TILE = "min(height, tile) * min(width, tile)"
QUANTITIES = {
    "batch": ("batch", "N"), "tokens": ("tokens", "t"), "H*W": ("height * width", "H W"),
    "batch*H*W": ("batch * height * width", "N H W"), "batch*h*w": (f"batch * {_TILE}", "N h w"),
    # Above 0 where 128 channels of half precision are no whole number of the allocator's pages of 2 MiB.
    "batch*H*W % 8192": ("batch * height * width % 8192", r"N H W \bmod 8192"),
}  # fmt: skip
POWERS = {
    "": ("1", ""),
    "batch*H*W": ("batch * height * width", "N H W"),
    "batch": ("batch", "N"),
    "batch*tokens": ("batch * tokens", "N t"),
    "tokens": ("tokens", "t"),
    "batch*(H+W)": ("batch * (height + width)", "N (H + W)"),
    "H*W": ("height * width", "H W"),
    "batch*(H*W)^2": ("batch * (height * width) ** 2", "N (H W)^2"),
    "batch*h*w": (f"batch * {_TILE}", "N h w"),
}
Coefficient = float | Fraction
Polynomial = Mapping[str, Coefficient]  # bytes by power


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


@dataclass(frozen=True)
class Domain:
    """The points that are played: sides in steps of so many pixels, shapes up to a ratio, batches, tokens; of a VAE in
    tiles the side of these. Of several numbers of tokens all but the most are played at every fourth side."""

    least: int = 256
    most: int = 2048
    batches: tuple[int, ...] = (1, 2, 3, 4)
    tokens: tuple[int, ...] = (0,)
    step: int = 64
    ratio: int = 4
    tile: int = 0

    def __post_init__(self) -> None:
        for name in ("least", "most", "step", "ratio"):
            whole(name, getattr(self, name))
        for name, least in (("batches", 1), ("tokens", 0)):
            values = tuple(sorted({whole(name, one, least=least) for one in getattr(self, name)}))
            if not values:
                raise ValueError(f"{name}: want one number or more, got none")
            object.__setattr__(self, name, values)
        if self.most < self.least:
            raise ValueError(f"most: want at least the least side {self.least}, got {self.most}")

    def __iter__(self) -> Iterator[Point]:
        for tokens in self.tokens:
            sides = range(self.least, self.most + 1, self.step * (1 if tokens == self.tokens[-1] else COARSER))
            for batch in self.batches:
                for height in sides:
                    for width in sides:
                        if max(height, width) <= self.ratio * min(height, width):
                            yield Point(height, width, batch, tokens, self.tile)

    def check(self, height: Any, width: Any, batch: Any, tokens: Any) -> Point:
        """A point of it, on its grid or between; ValueError names what lies outside."""
        tokens = self.tokens[-1] if tokens is None else tokens
        point = Point(
            whole("height", height), whole("width", width), whole("batch", batch), whole("tokens", tokens, least=0),
            self.tile,
        )  # fmt: skip
        for name, value, known in (("batch", point.batch, self.batches), ("tokens", point.tokens, self.tokens)):
            if known == (0,):  # they make no difference
                continue
            if not min(known) <= value <= max(known):
                raise ValueError(f"{name}: want {min(known)} to {max(known)}, which the formula is of, got {value}")
        for name, side in (("height", point.height), ("width", point.width)):
            if not self.least <= side <= self.most:
                raise ValueError(f"{name}: want {self.least} to {self.most}, which the formula is of, got {side}")
        if max(point[:2]) > self.ratio * min(point[:2]):
            shape = f"{point.height}x{point.width}"
            raise ValueError(
                f"height, width: want sides of 1:{self.ratio} at most, which the formula is of, got {shape}"
            )
        return point if len(self.tokens) > 1 else point._replace(tokens=0)

    def __str__(self) -> str:
        batch = f"{self.batches[0]} to {self.batches[-1]}" if len(self.batches) > 1 else str(self.batches[0])
        tokens = f", prompts of {self.tokens[0]} to {self.tokens[-1]} tokens" if len(self.tokens) > 1 else ""
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
        return all(low < _power(name, *point) <= high for name, (low, high) in self.within.items())

    def value(self, point: Point) -> float:
        """Bytes, before the bounds' factors."""
        return float(_at(self.law, point))

    def condition(self) -> str:
        """In words: ``H*W <= 1310720 and batch > 1``; "everywhere" where the domain is not cut."""
        return " and ".join(_conditions(self.within, lambda name: name)) or "everywhere"

    def equation(self) -> str:
        """Bytes in a line: ``2434.125 * batch*H*W + 1179664``."""
        return _sum(self.law, lambda power: f" * {power}")


def _conditions(within: Mapping[str, tuple[float, float]], written: Callable[[str], str]) -> list[str]:
    """What a piece's points are to meet, with the quantities written so."""
    parts = []
    for name, (low, high) in within.items():
        parts += [f"{written(name)} > {low:.0f}"] if low > -math.inf else []
        parts += [f"{written(name)} <= {high:.0f}"] if high < math.inf else []
    return parts


def _sum(law: Polynomial, times: Callable[[str], str]) -> str:
    """A polynomial in one line, the constant last."""
    text = ""
    for power in sorted(law, key=lambda power: (not power, list(POWERS).index(power))):
        value = law[power]
        sign = ("-" if value < 0 else "") if not text else f" {'-' if value < 0 else '+'} "
        size = abs(float(value))
        text += f"{sign}{f'{size:.0f}' if size >= 1e6 else f'{size:.9g}'}{times(power) if power else ''}"
    return text or "0"


def _power(name: str, height: Any, width: Any, batch: Any, tokens: Any, tile: Any) -> Any:
    pixels, cut = height * width, np.minimum(height, tile) * np.minimum(width, tile)
    return {
        "": 1, "batch*H*W": batch * pixels, "batch": batch, "batch*tokens": batch * tokens, "tokens": tokens,
        "batch*(H+W)": batch * (height + width), "H*W": pixels, "batch*(H*W)^2": batch * pixels * pixels,
        "batch*h*w": batch * cut, "batch*H*W % 8192": batch * pixels % 8192,
    }[name]  # fmt: skip


def _at(law: Polynomial, point: Point) -> Coefficient:
    return sum((value * _power(name, *point) for name, value in law.items()), Fraction(0))


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
    """

    name: str
    pieces: tuple[Piece, ...]
    domain: Domain
    within: float
    worst: float
    median: float

    def piece(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> Piece:
        """The piece that a point lies in; ValueError outside of the domain."""
        return self._find(self.domain.check(height, width, batch, tokens))

    def _find(self, point: Point) -> Piece:
        return next(piece for piece in self.pieces if piece.holds(point))

    def predict(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes. Sizes in pixels, whole numbers within the domain; tokens of the prompt, by default the most."""
        point = self.domain.check(height, width, batch, tokens)
        return round(self._find(point).value(point))

    def upper(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes: no peak of the domain's points is above it. Between them it is that of the next larger sides, which
        is no guarantee: what is reserved does not always grow with the size."""
        return self._bounds(height, width, batch, tokens)[1]

    def lower(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes: no peak of the domain's points is below it. Between them it is that of the next smaller sides, which
        is no guarantee."""
        return self._bounds(height, width, batch, tokens)[0]

    def _bounds(self, height: int, width: int, batch: int, tokens: int | None) -> tuple[int, int]:
        point, step = self.domain.check(height, width, batch, tokens), self.domain.step
        less = point._replace(height=point.height // step * step, width=point.width // step * step)
        more = point._replace(height=-(-point.height // step) * step, width=-(-point.width // step) * step)
        low, high = self._find(less), self._find(more)
        return math.floor(low.value(less) * low.low), math.ceil(high.value(more) * high.high)

    # ---- for people ----

    @property
    def errors(self) -> str:
        """How wide the bounds are."""
        return (
            f"the upper bound is at most 10% above at {self.within:.1%} of the points, {self.median:.1%} above in the"
            f" middle and {self.worst:.1%} at most"
        )

    def grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and cells: a line a piece."""
        header: tuple[str, ...] = ("where", f"{self.name}, bytes", "of it", "the peak is at", "its largest tensor")
        cells: list[tuple[str, ...]] = []
        for piece in self.pieces:
            exact = " (exact)" if piece.is_exact else ""
            bounds = f"{piece.low - 1:+.1%} to {piece.high - 1:+.1%}".replace("-0.0%", "+0.0%")
            cells.append((piece.condition(), piece.equation() + exact, bounds, piece.where, piece.largest))
        return header, cells

    def __str__(self) -> str:
        return f"{self.name}, bytes: {self.errors}\n{render(*self.grid())}"

    __repr__ = __str__

    def python(self, function: str) -> str:
        """A Python function of that name, of height, width, batch and tokens: (least, likely, most) bytes."""
        tile = f", tile={self.domain.tile}" * bool(self.domain.tile)
        lines = [
            f"def {function}(height, width, batch=1, tokens={self.domain.tokens[-1]}{tile}):",
            f'    """{self.name}, bytes: (least, likely, most). {self.domain}.',
            "    The domain is not checked, and between its steps nothing is bounded.",
            '    """',
        ]
        for piece in self.pieces:
            tests = _conditions(piece.within, lambda name: QUANTITIES[name][0])
            powers = {power: f" * {written}" for power, (written, _) in POWERS.items()}
            likely = " + ".join(f"{float(value)!r}{powers[name] if name else ''}" for name, value in piece.law.items())
            indent = "    " + "    " * bool(tests)
            lines += [f"    if {' and '.join(tests)}:  # {piece.where}"] if tests else []
            lines += [f"{indent}likely = {likely}"]
            lines += [f"{indent}return likely * {piece.low!r}, likely, likely * {piece.high!r}"]
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """The formula as cases, a LaTeX equation body; N images, t tokens."""
        rows = []
        for piece in self.pieces:
            condition = r",\ ".join(_conditions(piece.within, lambda name: QUANTITIES[name][1])).replace("<=", r"\le")
            equation = _sum(piece.law, lambda power: r"\," + POWERS[power][1])
            rows.append(f"{equation} & {condition}".rstrip("& "))
        name = self.name.replace("_", r"\_")
        body = rows[0] if len(rows) == 1 else r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}"
        return rf"M_{{\text{{{name}}}}} &= {body}"

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "within_10_percent": self.within, "worst": self.worst, "median": self.median,
            "pieces": [
                piece._asdict() | {
                    "within": piece.condition(),
                    "law": {power or "1": float(value) for power, value in piece.law.items()},
                    "terms": {name: {p or "1": float(v) for p, v in law.items()} for name, law in piece.terms},
                }
                for piece in self.pieces
            ],
        }  # fmt: skip


# ---- the derivation ----


class _Law(NamedTuple):
    """One of the peaks, the polynomials of its tensors, and their sums at all points, where they rule and elsewhere."""

    of: PlayedPeak
    terms: tuple[tuple[str, Polynomial], ...]
    values: np.ndarray


class _Leaf(NamedTuple):
    """Some of the points, and how wide the bounds are of a polynomial through them."""

    mine: np.ndarray  # indices
    within: dict[str, tuple[float, float]]
    law: _Law | None  # one that follows all of them
    cost: float  # by how much the upper bound is above the peaks, in all
    spread: float  # the upper bound over the lower one


class _Points:
    """What was played: peaks, the quantities and powers of their points, and the laws of their tensors."""

    def __init__(self, points: Sequence[Point], seen: Sequence[PlayedPeak]):
        columns = np.array(points, dtype=float).T
        self.points, self.seen = points, seen
        self.bytes = np.array([one.bytes for one in seen], dtype=float)
        shape = self.bytes.shape
        every = {*POWERS, *QUANTITIES}
        self.powers = {power: np.broadcast_to(_power(power, *columns), shape).astype(float) for power in every}
        self.quantities = {name: self.powers[name] for name in QUANTITIES}
        keys: dict[tuple[str, frozenset[str]], list[int]] = {}
        for i, one in enumerate(seen):
            keys.setdefault((one.where, frozenset(one.tensors)), []).append(i)
        common = sorted(keys.items(), key=lambda item: -len(item[1]))[:MOST_PIECES]
        self.laws = [law for (_, names), mine in common if (law := self._law(names, np.array(mine)))]

    def _law(self, names: frozenset[str], mine: np.ndarray) -> _Law | None:
        """Of a peak's tensors, from the points that have it; None where one of them is no polynomial."""
        terms: list[tuple[str, Polynomial]] = []
        for name in sorted(names, key=lambda name: (-self.seen[mine[-1]].tensors[name], name)):
            law = _exact(np.array([self.seen[i].tensors[name] for i in mine], dtype=float), mine, self.powers)
            if law is None:
                return None
            terms.append((name, law))
        if not terms:
            return None
        values = sum(self._values(law) for _, law in terms)
        added = math.floor((self.bytes - values)[mine].min())  # by the allocator, everywhere
        return _Law(self.seen[mine[-1]], (*terms, (ROUNDED_UP, {"": Fraction(added)})), values + added)

    def _values(self, law: Polynomial) -> Any:
        return sum(float(value) * self.powers[power] for power, value in law.items())

    def leaf(self, mine: np.ndarray, within: dict[str, tuple[float, float]]) -> _Leaf:
        """By a law that follows all of the points, or by the powers that nearly every peak is of and least squares:
        quick, and good enough to say where to cut."""
        fitted = (
            self.bytes[mine] / _solved(["", "batch*H*W", "batch*tokens", "batch*h*w"], mine, self.powers, self.bytes)[1]
        )
        ratio, law = fitted, None
        for one in self.laws:
            exact = self.bytes[mine] / one.values[mine]
            if exact.min() > 0 and _spread(exact) < min(EXACT, _spread(ratio) if law else math.inf):
                ratio, law = exact, one
        above = ratio.max() / ratio
        cost = np.log(above) + FAR * (above > EXCESS)
        return _Leaf(mine, within, law, float(cost.sum()), _spread(ratio))

    def cut(self, leaf: _Leaf) -> list[_Leaf]:
        """The two halves whose bounds are the narrowest in all; the leaf itself where it cannot be cut."""
        best = [leaf]
        for name, values in self.quantities.items():
            known, (low, high) = np.unique(values[leaf.mine]), leaf.within.get(name, (-math.inf, math.inf))
            first, last = 0, len(known) - 2  # the last of those on the lower side, by index
            while first <= last:  # from all over to around the best so far, until each is tried
                tried = np.unique(np.linspace(first, last, CUTS).astype(int))
                found = {}
                for i in tried:
                    is_low, at = values[leaf.mine] <= known[i], float((known[i] + known[i + 1]) // 2)
                    found[i] = [
                        self.leaf(leaf.mine[is_low], {**leaf.within, name: (low, at)}),
                        self.leaf(leaf.mine[~is_low], {**leaf.within, name: (at, high)}),
                    ]
                nearest = min(found, key=lambda i: _cost(found[i]))
                best = min(best, found[nearest], key=_cost)
                if len(tried) == last - first + 1:
                    break
                around = (last - first) // (CUTS - 1) + 1
                first, last = max(first, nearest - around), min(last, nearest + around)
        return best

    def piece(self, leaf: _Leaf) -> Piece:
        """A leaf with its law, or with the polynomial of the least error."""
        mine, law = leaf.mine, leaf.law
        most = Counter(self.seen[i].where for i in mine).most_common(1)[0][0]
        at = law.of if law else next(self.seen[i] for i in mine[::-1] if self.seen[i].where == most)
        polynomial: Polynomial
        if law:
            total: Counter[str] = Counter()
            for _, one in law.terms:
                total.update(one)
            polynomial = {power: total[power] for power in POWERS if total[power]}
            ratio = self.bytes[mine] / law.values[mine]
        else:
            polynomial, values = _minimax(mine, self.powers, self.bytes)
            ratio = self.bytes[mine] / values
        return Piece(
            leaf.within, polynomial, float(ratio.min()) * (1 - 1e-12), float(ratio.max()) * (1 + 1e-12), at.where,
            law.terms if law else (), at.largest, len(mine),
        )  # fmt: skip


def fit_pieces(name: str, domain: Domain, points: Sequence[Point], seen: Sequence[PlayedPeak]) -> Form:
    """The form of a peak that was played at the points of a domain, or at those of them that can be run."""
    played = _Points(points, seen)
    leaves = [played.leaf(np.arange(len(points)), {})]
    cuts: dict[int, list[_Leaf]] = {}  # of each leaf, by its first point
    while len(leaves) < MOST_PIECES:
        for leaf in leaves:
            if leaf.mine[0] not in cuts and leaf.spread > NARROW:
                cuts[leaf.mine[0]] = played.cut(leaf)
        gains = [leaf.cost - _cost(cuts.get(leaf.mine[0], [leaf])) for leaf in leaves]
        if max(gains) <= 0:
            break
        leaf = leaves.pop(int(np.argmax(gains)))
        leaves += cuts.pop(leaf.mine[0])
    pieces = [played.piece(leaf) for leaf in leaves]
    excess = np.concatenate([
        [piece.value(points[i]) * piece.high / seen[i].bytes - 1 for i in leaf.mine]
        for leaf, piece in zip(leaves, pieces, strict=True)
    ])  # fmt: skip
    pieces.sort(key=lambda piece: [piece.within.get(name, (-math.inf, 0)) for name in QUANTITIES])
    within = float(np.mean(excess <= EXCESS - 1))
    return Form(name, tuple(pieces), domain, within, float(excess.max()), float(np.median(excess)))


def _cost(leaves: Sequence[_Leaf]) -> float:
    return sum(leaf.cost for leaf in leaves)


def _spread(ratio: np.ndarray) -> float:
    return float(ratio.max() / ratio.min())


def _solved(
    chosen: Sequence[str], mine: np.ndarray, powers: Mapping[str, np.ndarray], y: np.ndarray, weight: Any = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of these powers by least squares of the relative error, and the values."""
    matrix = np.stack([powers[power][mine] for power in chosen], 1)
    scaled = matrix / y[mine, None]
    size = np.abs(scaled).max(0)
    size[size == 0] = 1
    weights = np.sqrt(np.broadcast_to(weight, y[mine].shape))
    found, *_ = np.linalg.lstsq(scaled / size * weights[:, None], weights, rcond=None)
    value = matrix @ (found / size)
    return found / size, np.where(value > 0, value, y[mine].max())


def _minimax(mine: np.ndarray, powers: Mapping[str, np.ndarray], y: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """The polynomial of few powers whose largest relative error is about the least, by Lawson's weights, and its
    values."""

    def closest(chosen: Sequence[str]) -> tuple[float, np.ndarray, np.ndarray]:
        weight, best = np.full(len(mine), 1 / len(mine)), None
        for _ in range(LAWSON):
            law, value = _solved(chosen, mine, powers, y, weight)
            spread = _spread(y[mine] / value)
            if best is None or spread < best[0]:
                best = spread, law, value
            weight = weight * (np.abs(value / y[mine] - 1) + 1e-12)
            weight /= weight.sum()
        assert best is not None
        return best

    chosen = ["", "batch*H*W"]
    best = closest(chosen)
    while best[0] > FINE:
        others = {power: closest([*chosen, power]) for power in POWERS if power not in chosen}
        power = min(others, key=lambda power: others[power][0])
        if others[power][0] - 1 > PAYS * (best[0] - 1):
            break
        chosen, best = [*chosen, power], others[power]
    ratio = y[mine] / best[2]
    middle = math.sqrt(ratio.max() * ratio.min())
    return dict(zip(chosen, (best[1] * middle).tolist(), strict=True)), best[2] * middle


# The powers of a tensor: nearly all are of the first few.
_TRIED = (
    ("",), ("batch*H*W",), ("batch",), ("", "batch*H*W"), ("", "tokens"), ("batch*tokens",), ("", "H*W"),
    ("batch*(H*W)^2",), ("batch*h*w",), ("", "batch*h*w"), ("batch", "batch*H*W"),
    ("batch*tokens", "batch*H*W"), ("", "batch*H*W", "batch*(H+W)"),
    ("batch", "batch*H*W", "batch*(H+W)"), ("", "batch", "batch*H*W"), ("", "batch*H*W", "batch*(H*W)^2"),
)  # fmt: skip


def _exact(sizes: np.ndarray, mine: np.ndarray, powers: Mapping[str, np.ndarray]) -> dict[str, Fraction] | None:
    """The law of one tensor: the first that is exact at each of its points, else within the allocator's granule, as an
    index of cuDNN's is that is rounded up to its own tiles; None where none is that near."""
    near = None
    for chosen in _TRIED:
        if len(mine) <= len(chosen) + 1:
            continue
        matrix = np.stack([powers[power][mine] for power in chosen], 1)
        size = np.abs(matrix).max(0)
        size[size == 0] = 1
        found, *_ = np.linalg.lstsq(matrix / size, sizes, rcond=None)
        rounded = [Fraction(round(float(value) * FINEST), FINEST) for value in found / size]
        off = np.abs(matrix @ np.array([float(one) for one in rounded]) - sizes).max()
        law = {power: one for power, one in zip(chosen, rounded, strict=True) if one}
        if off < 1:
            return law
        near = near or (law if off <= ROUNDING else None)
    return near


def largest_of(tensors: Mapping[str, int]) -> str:
    """The largest tensor beside weights; "" where there is none."""
    beside = [name for name in tensors if not name.startswith("weights of ")]
    return max(beside, key=tensors.__getitem__, default="")


def play_domain(
    domain: Domain, play: Callable[[Point], Mapping[str, PlayedPeak]], poll: Callable[[int, int], object] | None = None
) -> tuple[list[Point], dict[str, list[PlayedPeak]], list[Point]]:
    """Every point of a domain played: those that can be, {name: its peaks there}, and those that cannot."""
    points, left_out, found = list[Point](), list[Point](), dict[str, list[PlayedPeak]]()
    every = list(domain)
    for done, point in enumerate(every, 1):
        try:
            seen = play(point)
        except (ValueError, OverflowError):  # a size that the program refuses, or that is more than can be played
            left_out.append(point)
            continue
        points.append(point)
        for name, one in seen.items():
            found.setdefault(name, []).append(one)
        if poll:
            poll(done, len(every))
    return points, found, left_out
