"""Pieces found, by playing every point of a domain.

They are the leaves of a regression tree: the domain is cut in two, at a number of pixels, images or tokens, where that
brings the upper bound nearest to the peaks, until the bounds are narrow or there are `MOST_PIECES`. So they are
disjoint, and complete. Where the tensors of the peak that most points of a piece have are polynomials, their sum is the
piece's, exactly; else it is the polynomial that leaves the fewest points more than 10% below its upper bound, and then
the one whose largest relative error is the least.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from vaemem._common import distinct, grouped
from vaemem.prediction.pieces import COMPUTED, POWERS, QUANTITIES, Domain, Form, Piece, PlayedPeak, Point, Polynomial
from vaemem.prediction.process import ROUNDED_UP

MOST_PIECES = 12
MOST_POINTS = 50_000  # of a domain: minutes
OTHERS = 10  # for every so many points of a domain, one is played between its steps, and one with other tokens
NARROW = 1.04  # upper over lower bound of a piece that is not cut any more
EXACT = 1.03  # and of one that keeps the law of its tensors even where another polynomial is nearer
FINE = 0.005  # a polynomial is good enough where the upper bound over the lower one is this more than 1, or less
EXCESS = 1.1  # the upper bound is to be no more than so many times the peak, at most points
FAR = 2  # what it costs beside where a point's bound is further above
CUTS = 16  # places at which a cut is tried, of each quantity
ROUNDING = 512  # bytes: the allocator's granule; a tensor that is off its law by no more follows it
FINEST = 1 << 13  # denominators of exact coefficients: 64 pixels a latent's, squared, and two more
LAWSON = 12  # rounds of reweighting
PAYS = 0.75  # a further power is taken where it leaves so much of the distance between the bounds
CANCELS = 5  # times its value that a polynomial's terms may add up to without their signs; beyond, it is no guide
SUPPORT = 6  # points for each power of a polynomial that has more than two
# The powers that say where to cut: nearly every peak is near a polynomial of these.
USUAL = ("", "batch*H*W", "batch", "batch*tokens", "batch*h*w", "batch*(H*W)^2", "batch*tokens*H*W")


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
    cost: float  # of how much the upper bound is above the peaks, in all
    spread: float  # the upper bound over the lower one


class _Points:
    """What was played: peaks, the quantities and powers of their points, and the laws of their tensors."""

    def __init__(self, peaks: Mapping[Point, PlayedPeak]):
        self.points, self.seen = [*peaks], [*peaks.values()]
        self.bytes = np.array([one.bytes for one in self.seen], dtype=float)
        columns, shape = np.array(self.points, dtype=float).T, self.bytes.shape
        self.powers = {name: np.broadcast_to(at(*columns), shape).astype(float) for name, at in COMPUTED.items()}
        alike = grouped(range(len(self.seen)), lambda i: self.seen[i].key).values()
        common = sorted(alike, key=len, reverse=True)[:MOST_PIECES]
        self.laws = [law for mine in common if (law := self._law(np.array(mine)))]

    def _law(self, mine: np.ndarray) -> _Law | None:
        """Of a peak's tensors, from the points that have it; None where one of them is no polynomial."""
        peak, terms = self.seen[mine[-1]], list[tuple[str, Polynomial]]()
        for name in sorted(peak.tensors, key=lambda name: (-peak.tensors[name], name)):
            law = self._exact(np.array([self.seen[i].tensors[name] for i in mine], dtype=float), mine)
            if law is None:
                return None
            terms.append((name, law))
        if not terms:
            return None
        values = sum(float(value) * self.powers[power] for _, law in terms for power, value in law.items())
        added = math.floor((self.bytes - values)[mine].min())  # by the allocator, everywhere
        return _Law(peak, (*terms, (ROUNDED_UP, {"": Fraction(added)})), values + added)

    def leaf(self, mine: np.ndarray, within: dict[str, tuple[float, float]]) -> _Leaf:
        """By a law that follows all of the points, or by the usual powers and least squares: quick, and good enough to
        say where to cut."""
        _, value = self._solved(USUAL[: _most(mine)], mine)
        ratio, law = self.bytes[mine] / np.where(value, value, self.bytes[mine].max()), None
        for one in self.laws:
            exact = self.bytes[mine] / one.values[mine]
            if exact.min() > 0 and _spread(exact) < min(EXACT, _spread(ratio) if law else math.inf):
                ratio, law = exact, one
        above = ratio.max() / ratio
        return _Leaf(mine, within, law, float(np.log(above).sum()) + FAR * _far(ratio), _spread(ratio))

    def cut(self, leaf: _Leaf) -> list[_Leaf]:
        """The two halves whose bounds are the narrowest in all; the leaf itself where it cannot be cut."""
        best = [leaf]
        for name in QUANTITIES:
            values = self.powers[name]
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
        """A leaf with its law, or with the polynomial that is the nearest."""
        mine, law = leaf.mine, leaf.law
        most = Counter(self.seen[i].where for i in mine).most_common(1)[0][0]
        at = law.of if law else next(self.seen[i] for i in mine[::-1] if self.seen[i].where == most)
        polynomial: Polynomial
        if law:
            total = {power: sum(one.get(power, 0) for _, one in law.terms) for power in POWERS}
            polynomial = {power: value for power, value in total.items() if value}
            ratio = self.bytes[mine] / law.values[mine]
        else:
            polynomial, values = self._nearest(mine)
            ratio = self.bytes[mine] / values
        return Piece(
            leaf.within, polynomial, float(ratio.min()) * (1 - 1e-12), float(ratio.max()) * (1 + 1e-12), at.where,
            law.terms if law else (), at.largest, len(mine),
        )  # fmt: skip

    def _matrix(self, powers: Sequence[str], mine: np.ndarray) -> np.ndarray:
        return np.stack([self.powers[power][mine] for power in powers], 1)

    def _solved(self, powers: Sequence[str], mine: np.ndarray, weight: Any = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients of these powers by least squares of the relative error, and the values; 0 where the terms cancel
        too much, or add up to less than nothing."""
        matrix, y = self._matrix(powers, mine), self.bytes[mine]
        law = _least_squares(matrix / y[:, None], np.ones(len(y)), np.sqrt(weight))
        value = matrix @ law
        return law, np.where(np.abs(matrix) @ np.abs(law) <= CANCELS * value, value, 0)

    def _nearest(self, mine: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        """The polynomial of few powers whose upper bound is too far above the fewest points, and whose largest relative
        error is about the least, by Lawson's weights; and its values."""
        y = self.bytes[mine]

        def closest(powers: Sequence[str]) -> tuple[float, dict[str, float], np.ndarray]:
            """How far off the one of these powers is, its coefficients, and its values."""
            weight, tries = np.full(len(mine), 1 / len(mine)), []
            for _ in range(LAWSON):
                found, value = self._solved(powers, mine, weight)
                off = _off(y / value) if value.all() else math.inf
                tries.append((off, dict(zip(powers, found.tolist(), strict=True)), value))
                weight = weight * (np.abs(value / y - 1) + 1e-12)
                weight /= weight.sum()
            return min(tries, key=by_off)

        by_off = operator.itemgetter(0)
        known, most = self._known(mine), _most(mine)
        usual = [power for power in USUAL if power in known][:most]
        best = min(closest([""]), closest(usual[:2]), key=by_off)
        while best[0] > FINE and len(best[1]) < most:
            others = (closest([*best[1], one]) for one in known if one not in best[1])
            further = min(others, key=by_off, default=best)
            if further[0] > PAYS * best[0]:
                break
            best = further
        if best[0] > EXCESS - 1:  # several powers may be near where none alone is
            best = min(best, closest(usual), key=by_off)
        ratio = y / best[2]
        middle = math.sqrt(ratio.max() * ratio.min())
        return {power: value * middle for power, value in best[1].items()}, best[2] * middle

    def _known(self, mine: np.ndarray) -> list[str]:
        """The powers that can be told from a constant, or from the batch, at these points: those of H and W where there
        are several sizes, those of the tokens where there are several numbers of these."""
        spread = {power: np.ptp(values[mine]) for power, values in self.powers.items()}
        fixed = [one for one, name in (("H", "H*W"), ("tokens", "tokens")) if not spread[name]]
        return ["", *(power for power in POWERS if spread[power] and not any(one in power for one in fixed))]

    def _exact(self, sizes: np.ndarray, mine: np.ndarray) -> dict[str, Fraction] | None:
        """The law of one tensor: the first that is exact at each of its points, else within the allocator's granule, as
        an index of cuDNN's is that is rounded up to its own tiles; None where none is that near."""
        near, known = None, {*self._known(mine)}
        for powers in _TRIED:
            if len(mine) <= len(powers) + 1 or not known.issuperset(powers):
                continue
            matrix = self._matrix(powers, mine)
            rounded = in_fractions(matrix, sizes)
            off = np.abs(matrix @ np.array([float(one) for one in rounded]) - sizes).max()
            law = {power: one for power, one in zip(powers, rounded, strict=True) if one}
            if off < 1:
                return law
            near = near or (law if off <= ROUNDING else None)
        return near


def fit_pieces(name: str, domain: Domain, peaks: Mapping[Point, PlayedPeak]) -> Form:
    """The form of a peak that was played at the points of a domain, or at those of them that can be run."""
    played = _Points(peaks)
    leaves = _grown(played)
    pieces = [played.piece(leaf) for leaf in leaves]
    excess = np.concatenate([
        [piece.value(played.points[i]) * piece.high / played.seen[i].bytes - 1 for i in leaf.mine]
        for leaf, piece in zip(leaves, pieces, strict=True)
    ])  # fmt: skip
    pieces.sort(key=lambda piece: [piece.within.get(name, (-math.inf, 0)) for name in QUANTITIES])
    within = float(np.mean(excess <= EXCESS - 1))
    return Form(name, tuple(pieces), domain, within, float(excess.max()), float(np.median(excess)))


def _grown(played: _Points) -> list[_Leaf]:
    """The leaves: the one whose cut gains the most is cut, and so on."""
    leaves = [played.leaf(np.arange(len(played.points)), {})]
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
    return leaves


def _cost(leaves: Sequence[_Leaf]) -> float:
    return sum(leaf.cost for leaf in leaves)


def _spread(ratio: np.ndarray) -> float:
    return float(ratio.max() / ratio.min())


def _far(ratio: np.ndarray) -> int:
    """At how many points the upper bound is too far above, where the peaks are so many times a polynomial."""
    return int(np.count_nonzero(ratio.max() > EXCESS * ratio))


def _off(ratio: np.ndarray) -> float:
    """How far a polynomial is off: the distance between the bounds, and what a point costs that is too far below."""
    return _spread(ratio) - 1 + FAR * _far(ratio) / len(ratio)


def _most(mine: np.ndarray) -> int:
    """How many powers a polynomial may have."""
    return max(len(mine) // SUPPORT, 2)


# The powers of a tensor: nearly all are of the first few.
_TRIED = (
    ("",), ("batch*H*W",), ("batch",), ("", "batch*H*W"), ("", "tokens"), ("batch*tokens",), ("", "H*W"),
    ("batch*(H*W)^2",), ("batch*h*w",), ("", "batch*h*w"), ("batch", "batch*H*W"),
    ("batch*tokens", "batch*H*W"), ("", "batch*H*W", "batch*(H+W)"),
    ("batch", "batch*H*W", "batch*(H+W)"), ("", "batch", "batch*H*W"), ("", "batch*H*W", "batch*(H*W)^2"),
    ("", "tokens", "H*W"), ("", "batch*H*W", "tokens", "H*W"), ("", "batch*tokens", "batch*H*W", "tokens", "H*W"),
    ("", "batch*tokens", "batch*H*W", "batch*tokens^2", "batch*tokens*H*W", "batch*(H*W)^2"),
)  # fmt: skip


def _least_squares(columns: np.ndarray, y: np.ndarray, weights: Any = 1.0) -> np.ndarray:
    """The factor of each column. Columns are scaled first, for the powers of a size lie far apart."""
    size = np.abs(columns).max(0)
    size[size == 0] = 1
    return np.linalg.lstsq(columns / size * np.reshape(weights, (-1, 1)), y * weights, rcond=None)[0] / size


def in_fractions(powers: np.ndarray, sizes: np.ndarray) -> list[Fraction]:
    """What a tensor's sizes at some points are made of: the factor of each power, a column."""
    return [Fraction(round(value * FINEST), FINEST) for value in _least_squares(powers, sizes).tolist()]


def largest_of(tensors: Mapping[str, int]) -> str:
    """The largest tensor beside weights; "" where there is none."""
    beside = [name for name in tensors if not name.startswith("weights of ")]
    return max(beside, key=tensors.__getitem__, default="")


def fit_domain(
    domain: Domain, play: Callable[[Point], Mapping[str, PlayedPeak]], poll: Callable[[int, int], object] | None = None
) -> tuple[dict[str, Form], list[Point]]:
    """{name: form} of all that `play` gives over a domain, each bounded between its steps too; and the points that
    cannot be played. No form where no point can be."""
    grid = list(islice(domain, MOST_POINTS + 1))
    if len(grid) > MOST_POINTS:
        raise ValueError(f"domain: want at most {MOST_POINTS} points, got more: {domain}; take larger steps")
    count = len(grid) // OTHERS + 1
    between = {*domain.between(count)}
    every = distinct([*grid, *domain.beside(count), *between])
    played, left_out = dict[Point, Mapping[str, PlayedPeak]](), list[Point]()
    for done, point in enumerate(every, 1):
        try:
            played[point] = play(point)
        except (ValueError, OverflowError):  # a size that the program refuses, or that is more than can be played
            left_out.append(point)
            continue
        if poll:
            poll(done, len(every))
    within, off = ([point for point in played if (point in between) == is_off] for is_off in (False, True))
    forms = dict[str, Form]()
    for name in played[within[0]] if within else ():
        form = fit_pieces(name, domain, {point: played[point][name] for point in within})
        forms[name] = form.widened({point: played[point][name] for point in off})
    return forms, [point for point in left_out if point not in between]
