"""The tensors of one of PyTorch's peaks in closed form, and how each grows with the image, derived by playing them."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from vaemem._common import ELEMENT_BYTES, MIB, distinct, render, typeset, whole
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import VAERequest

ROUNDING = 512  # bytes: the allocator's granule; a tensor that is off its law by no more follows it
FINEST = 1 << 13  # denominators of exact coefficients: 64 pixels a latent's, squared, and two more
STEP, LAST = 64, 4096  # the squares that a derivation looks at: 64, 128, ... 4096 pixels a side
# cuDNN may alternate between some constants from size to size: where no law holds within ROUNDING, one within so many
# bytes is taken.
ALTERNATION = 4 * MIB
HELD_OUT = ((360, 640), (720, 1280), (832, 1216), (1000, 1000), (1080, 1920), (1216, 832), (1544, 520), (2160, 3840))

ZERO = Fraction(0)
Law = tuple[Fraction, ...]  # bytes by H*W, H+W, (H*W)^2 and 1


class PlayedPeak(NamedTuple):
    """A peak that was played: bytes, the step that makes it, and {name: bytes} of its tensors, as they were asked for;
    none if it is not made of these alone."""

    reserved: int
    allocated: int
    where: str
    tensors: Mapping[str, int]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """What two peaks are the same by: the step, and whose tensors are alive."""
        return self.where, frozenset(self.tensors)


class Term(NamedTuple):
    """One tensor of the peak; its bytes: coefficient*H*W*e + edge*(H+W)*e + square*(H*W)^2*e + constant."""

    name: str
    coefficient: Fraction  # of H*W*e; 128 is one full-size activation, T
    constant: Fraction  # bytes
    where: str  # the module that made it
    edge: Fraction = ZERO  # of (H+W)*e: padding
    square: Fraction = ZERO  # of (H*W)^2*e: attention's scores


@dataclass(frozen=True, repr=False)
class ClosedForm:
    """``allocated = a * H*W*e + b`` (and what `terms` add), H and W in pixels, e the bytes of one element of dtype.

    Attributes
    ----------
    terms : tuple of Term
        The tensors alive at the peak and not before the run, largest first.
    where : str
        The step that makes the peak.
    lowest, highest : int
        The peak rules for every square from lowest^2 to highest^2 pixels that was looked at (multiples of 64).
    below, above : str or None
        What rules at the next square; None where nothing was looked at (64 and 4096 pixels are the limits).
    within : int
        Bytes that each tensor keeps to its term within: 512, or 4 MiB where no such law was found (cuDNN may alternate
        between some constants from size to size).
    unsplit : tuple of int
        Least and most bytes that are to be added to `predict` at the sizes looked at: blocks that the allocator does
        not split, as large as 1 MiB a tensor, and what `within` allows; below 0 where remainders go with converted
        weights.
    checked : tuple of (int, int)
        Sizes held out of the derivation that peak at the same place; `unsplit` covers them.
    elsewhere : tuple of (int, int)
        Held-out sizes in the range whose peak lies elsewhere.
    workspace_source : str
        Who said how much scratch the convolutions take.
    """

    name: str
    model: str
    op: str
    dtype: str
    runtime: str
    gpu: str
    batch: int
    workspace_source: str
    where: str
    terms: tuple[Term, ...]
    lowest: int
    highest: int
    below: str | None
    above: str | None
    within: int
    unsplit: tuple[int, int]
    checked: tuple[tuple[int, int], ...]
    elsewhere: tuple[tuple[int, int], ...]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def a(self) -> Fraction:
        """The factor of H*W*e, exact."""
        return self._sum("coefficient")

    @property
    def t(self) -> Fraction:
        """`a` in full-size activations, T = 128*H*W*e."""
        return self.a / 128

    @property
    def b(self) -> Fraction:
        """Bytes, before each tensor is rounded up to 512."""
        return self._sum("constant")

    def predict(self, height: int, width: int) -> int:
        """Bytes allocated above the baseline, each tensor rounded up to 512; the allocator adds `unsplit`.

        Raises
        ------
        ValueError
            A size below 1, or H*W out of the range where this peak rules.
        """
        height, width = whole("height", height), whole("width", width)
        if not self.lowest**2 <= height * width <= self.highest**2:
            raise ValueError(
                f"height * width: want {self.lowest}^2 to {self.highest}^2, where this peak rules, got {height}x{width}"
            )
        return sum(_up(_value(_law(term, self.element_bytes), height, width)) for term in self.terms)

    def python(self) -> str:
        """A Python function of height and width that gives what `predict` gives."""
        function = re.sub(r"\W+", "_", f"{self.name}_allocated_bytes")
        low, high = self.lowest, self.highest
        lines = [
            f"def {'_' * function[0].isdigit()}{function}(height, width):",
            f'    """{self.equation}; the allocator adds {self.unsplit[0]} to {self.unsplit[1]}."""',
            f"    if not {low}**2 <= height * width <= {high}**2:",
            f'        raise ValueError(f"height * width: want {low}^2 to {high}^2, got {{height}}x{{width}}")',
            "    pixels = height * width",
            *(["    edges = height + width"] if self._sum("edge") else []),
            "    total = 0",
        ]
        for term in self.terms:
            law = _law(term, self.element_bytes)
            divisor = math.lcm(*(value.denominator for value in law))
            names = ("pixels", "edges", "pixels**2", "")
            parts = [f"{v * divisor}{f' * {n}' if n else ''}" for v, n in zip(law, names, strict=True) if v]
            lines.append(f"    total += -(-({' + '.join(parts)}) // {ROUNDING * divisor}) * {ROUNDING}  # {term.name}")
        return "\n".join([*lines, "    return total\n"])

    def latex(self) -> str:
        """The formula as a LaTeX equation body."""
        name = self.name.replace("_", r"\_")
        total = self._total(_latex, (r"\,H W e", r"\,(H + W) e", r"\,(H W)^2 e"))
        return rf"M_{{\text{{allocated, {name}}}}} &= {total}"

    def json(self) -> str:
        """All of it as a JSON object; what is exact stands as a fraction in a string too."""
        said = vars(self) | {
            "element_bytes": self.element_bytes, "a": self.a, "a_exact": str(self.a), "t": self.t, "b": self.b,
            "terms": [term._asdict() | {"coefficient_exact": str(term.coefficient)} for term in self.terms],
        }  # fmt: skip
        return json.dumps(said, default=float, ensure_ascii=False, indent=1)

    def _sum(self, column: str) -> Fraction:
        return sum((getattr(term, column) for term in self.terms), ZERO)

    @property
    def equation(self) -> str:
        """Bytes in a line: ``1216 * H*W*e + 2107904``."""
        return self._total(_number, (" * H*W*e", " * (H+W)*e", " * (H*W)^2*e"))

    def _total(self, number: Callable[[Fraction], str], powers: Sequence[str]) -> str:
        """All terms in one sum, by powers that are written so."""
        factors = self.a, self._sum("edge"), self._sum("square")
        parts = [number(a) + power for a, power in zip(factors, powers, strict=True) if a or power is powers[0]]
        return f"{' + '.join(parts)} {'-' if self.b < 0 else '+'} {number(abs(self.b))}"

    def _facts(self) -> list[str]:
        """Lines under the equation."""
        facts = [f"a is {_number(self.t)} T (T = 128*H*W*e, e = {self.element_bytes})", f"peak at {self.where}"]
        facts += [f"rules from {self.lowest}x{self.lowest} to {self.highest}x{self.highest}"]
        facts += [f"{side}: {what}" for side, what in (("below", self.below), ("above", self.above)) if what]
        why = "unsplit blocks" + ("; a workspace that alternates" if self.within > ROUNDING else "")
        added = [f"the allocator adds {self.unsplit[0]} to {self.unsplit[1]} B ({why})"]
        added += ["held-out sizes: " + (", ".join(f"{h}x{w}" for h, w in self.checked) or "none")]
        added += [f"not {h}x{w}, which peaks elsewhere" for h, w in self.elsewhere]
        return [
            "; ".join(facts),
            "; ".join([f"each tensor rounded up to {ROUNDING} B", *added]),
            f"convolutions' workspaces: {self.workspace_source}",
        ]

    def _grid(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and cells: a line a tensor."""
        header: tuple[str, ...] = ("tensor at the peak", "T", "of H*W*e", "bytes", "and")
        cells: list[tuple[str, ...]] = [
            (t.name, _number(t.coefficient / 128), _number(t.coefficient), _number(t.constant),
             " + ".join(f"{_number(v)} {x}e" for v, x in ((t.edge, "(H+W)"), (t.square, "(H*W)^2")) if v))
            for t in self.terms
        ]  # fmt: skip
        if not any(row[-1] for row in cells):
            header, cells = header[:-1], [row[:-1] for row in cells]
        return header, cells

    def __str__(self) -> str:
        facts = "\n".join([*self._facts(), render(*self._grid())])
        return f"{self.name}: allocated_bytes = {self.equation}\n{textwrap.indent(facts, '  ')}"

    __repr__ = __str__

    def _repr_latex_(self) -> str:
        return typeset([self.latex()])

    def _repr_markdown_(self) -> str:
        facts = "\n".join(f"- {line}" for line in self._facts())
        grid = render(*self._grid(), markdown=True)
        return f"{self._repr_latex_()}\n\n" + f"{facts}\n\n{grid}".replace("*", r"\*")


# ---- the derivation ----


def play_peak(request: VAERequest, process: SimulatedProcess) -> PlayedPeak:
    """What the run of a fresh process takes above its weights and its input. A peak outside of the model's call has no
    tensors."""
    measured = request.play(process)
    where, tensors = process.peak_above_baseline() or ("outside of the model's call", {})
    return PlayedPeak(measured.reserved, measured.allocated, where, tensors)


def name_of(q: VAERequest) -> str:
    """What is asked, without the size."""
    job = q.job
    name = f"{job.arch['name']} {job.op} {job.dtype} {q.software.runtime}"
    name += "" if job.weights_dtype == job.dtype else f" from {job.weights_dtype}"
    name += f" batch {job.batch}" if job.batch > 1 else ""
    return " ".join([name, *q.settings])


def derive(request: VAERequest) -> ClosedForm:
    """The closed form of the peak that answers a request; ValueError where it has none, as `formula` says."""
    process = request.start()
    anchor = play_peak(request, process)
    q = replace(request, workspace=process.workspace)  # what this one has looked up need not be looked up again
    job, height, width = q.job, q.job.height, q.job.width
    if not anchor.tensors:
        raise ValueError(f"formula: want a size whose peak lies within the model's call, got {height}x{width}")

    def look(height: int, width: int) -> PlayedPeak | None:
        try:
            other = q.at(height, width)
            return play_peak(other, other.start())
        except ValueError:  # PyTorch would refuse the size
            return None

    # All of them: a peak may rule, give way to another, and rule again.
    peaks = {side: look(side, side) for side in range(STEP, LAST + 1, STEP)}
    same = {side: peak for side, peak in peaks.items() if peak and peak.key == anchor.key}
    if not same:
        raise ValueError(
            f"formula: want squares of {STEP} to {LAST} pixels a side that peak as {height}x{width} does, got none"
        )
    centre = min(same, key=lambda side: abs(side * side - height * width))
    within, laws, run = _laws([*anchor.tensors], same, centre)
    if len(run) < 3:
        raise ValueError(
            f"formula: want 3 squares or more that peak as {height}x{width} does, from which its tensors' growth can be"
            f" solved for, got {len(run)}"
        )

    def unsplit(size: tuple[int, int], peak: PlayedPeak | None) -> int | None:
        """What the allocator added at a size; None where the tensors are not what the laws say."""
        if peak is None or peak.key != anchor.key:
            return None
        sizes = {name: _value(law, *size) for name, (law, _) in laws.items()}
        if any(abs(sizes[name] - found) > within for name, found in peak.tensors.items()):
            return None
        return peak.allocated - sum(map(_up, sizes.values()))

    def beyond(side: int) -> str | None:
        if side not in peaks:
            return None
        peak = peaks[side]
        found = peak.where if peak and peak.tensors else "no peak within the model's call"
        return f"at {side}x{side} {'the same tensors in other sizes' if side in same else found}"

    squares: dict[tuple[int, int], PlayedPeak | None] = {(side, side): same[side] for side in run}
    held_out = {
        (h, w): look(h, w)
        for h, w in distinct([(height, width), *HELD_OUT])
        if run[0] ** 2 <= h * w <= run[-1] ** 2 and (h, w) not in squares
    }
    added = {size: unsplit(size, peak) for size, peak in (squares | held_out).items()}
    known = [count for count in added.values() if count is not None]
    e = ELEMENT_BYTES[job.dtype]
    terms = [
        Term(name, law[0] / e, law[3], name.partition(" [")[0], law[1] / e, law[2] / e)
        for name, (law, _) in sorted(laws.items(), key=lambda item: -_value(item[1][0], height, width))
    ]
    return ClosedForm(
        name=name_of(q), model=job.arch["name"], op=job.op, dtype=job.dtype, runtime=q.software.runtime,
        gpu=process.gpu.name, batch=job.batch, workspace_source=process.workspace_source, where=anchor.where,
        terms=tuple(terms), lowest=run[0], highest=run[-1], below=beyond(run[0] - STEP), above=beyond(run[-1] + STEP),
        within=within, unsplit=(min(known), max(known)),
        checked=tuple(size for size in held_out if added[size] is not None),
        elsewhere=tuple(size for size in held_out if added[size] is None),
    )  # fmt: skip


def _laws(
    names: Sequence[str], peaks: Mapping[int, PlayedPeak], centre: int
) -> tuple[int, dict[str, tuple[Law, list[int]]], list[int]]:
    """The laws of a peak's tensors at the squares around one of them, each with its squares: within how many bytes they
    hold, the laws, and the squares at which all of them do."""
    alike = _around(centre, peaks)
    for within in (ROUNDING, ALTERNATION):
        laws = {name: _solve({side: peaks[side].tensors[name] for side in alike}, centre, within) for name in names}
        run = [side for side in alike if all(side in extent for _, extent in laws.values())]
        if len(run) >= 3:
            break
    return within, laws, run


def _around(centre: int, sides: Container[int]) -> list[int]:
    """The unbroken run of `sides` around one of them."""
    run = [centre]
    for step in (-STEP, STEP):
        side = centre + step
        while side in sides:
            run.append(side)
            side += step
    return sorted(run)


def _solve(sizes: Mapping[int, int], centre: int, within: int = ROUNDING) -> tuple[Law, list[int]]:
    """The law of one tensor, {side: bytes}, that holds for the most squares around `centre`, and those squares.

    A law goes through the centre and meets the others within so many bytes (an index of cuDNN's is rounded up
    to its own tiles); it may break off where cuDNN's heuristic changes its mind. The first that is exact everywhere is
    taken, simpler ones first. Only the centre where no law holds for a square more than it was made from.
    """
    others = sorted((side for side in sizes if side != centre), key=lambda side: -abs(side - centre))
    best: tuple[tuple[int, int], Law, list[int]] = (0, 0), (ZERO, ZERO, ZERO, Fraction(sizes[centre])), [centre]
    for columns in ((0, 3), (0, 1, 3), (0, 2, 3)):  # H*W; with padding's H+W; with attention's (H*W)^2
        for side in others[: len(others) + 2 - len(columns)]:
            law = _through({s: sizes[s] for s in [centre, side, *others[-1:]][: len(columns)]}, columns)
            off = {s: abs(_value(law, s, s) - size) for s, size in sizes.items()}
            extent = _around(centre, {s for s in off if off[s] <= within})
            score = len(extent), sum(off[s] == 0 for s in extent)
            if len(extent) > len(columns) and score > best[0]:  # any law meets its own points
                best = score, law, extent
            if score[1] == len(sizes):
                return law, extent
    return best[1:]


def _through(sizes: Mapping[int, int], columns: Sequence[int]) -> Law:
    """The law, 0 outside of `columns`, that goes through {side: bytes} of as many squares."""
    powers = np.array([[_powers(side, side)[c] for c in columns] for side in sizes], dtype=float)
    law = dict(zip(columns, in_fractions(powers, np.array([*sizes.values()], dtype=float)), strict=True))
    return tuple(law.get(c, ZERO) for c in range(4))


def in_fractions(powers: np.ndarray, sizes: np.ndarray) -> list[Fraction]:
    """What a tensor's sizes at some points are made of: the factor of each power, a column. Columns are scaled first,
    because the powers of a size lie far apart."""
    scale = np.abs(powers).max(0)
    found = np.linalg.lstsq(powers / scale, sizes, rcond=None)[0] / scale
    return [Fraction(round(value * FINEST), FINEST) for value in found.tolist()]


def _powers(height: int, width: int) -> tuple[int, int, int, int]:
    return height * width, height + width, (height * width) ** 2, 1


def _law(term: Term, e: int) -> Law:
    return term.coefficient * e, term.edge * e, term.square * e, term.constant


def _value(law: Law, height: int, width: int) -> Fraction:
    return sum((a * x for a, x in zip(law, _powers(height, width), strict=True)), ZERO)


def _up(size: Fraction) -> int:
    return math.ceil(size / ROUNDING) * ROUNDING


def _number(value: Fraction) -> str:
    """Exact where it takes few digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.7g}"


def _latex(value: Fraction) -> str:
    text = f"{float(value):,.6g}" if value.denominator > 1 else f"{value.numerator:,}"
    return text.replace(",", r"\,")
