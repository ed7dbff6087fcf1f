"""One of PyTorch's peaks in closed form: its tensors, and how each grows with the image. Several sizes show it."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, MIB, distinct, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import VAERequest
from vaemem.prediction.writing import Polynomial, write_equation, write_function, write_number, write_sum

ROUNDING = 512  # bytes: the allocator's granule; a tensor follows its law within it
FINEST = 1 << 13  # denominator of exact coefficients: (64 pixels)^2 per latent pixel, times two
STEP, LAST = 64, 4096  # a derivation plays squares of 64, 128, ... 4096 pixels a side
# cuDNN may alternate between constants from size to size. If no law holds within ROUNDING, a law within ALTERNATION
# bytes counts.
ALTERNATION = 4 * MIB
HELD_OUT = ((360, 640), (720, 1280), (832, 1216), (1000, 1000), (1080, 1920), (1216, 832), (1544, 520), (2160, 3840))

ZERO = Fraction(0)
_POWERS = "HW", "(H+W)", "HW*HW", ""  # symbols of `SYMBOLS`
Law = tuple[Fraction, ...]  # bytes by each of `_POWERS`


class PlayedPeak(NamedTuple):
    """A peak that was played: bytes, the step that makes it, and {name: bytes} of its tensors before rounding. The
    tensors are empty if the peak has other parts, too."""

    reserved: int
    allocated: int
    where: str
    tensors: Mapping[str, int]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """The step and the names of the living tensors; two peaks with the same key are the same peak."""
        return self.where, frozenset(self.tensors)


class Term(NamedTuple):
    """One tensor of the peak. Its bytes are coefficient*H*W*e + edge*(H+W)*e + square*(H*W)^2*e + constant."""

    name: str
    coefficient: Fraction  # of H*W*e; 128 is one full-size activation, T
    constant: Fraction  # bytes
    where: str  # the module that made it
    edge: Fraction = ZERO  # of (H+W)*e: padding
    square: Fraction = ZERO  # of (H*W)^2*e: attention's scores


@dataclass(frozen=True, repr=False)
class ClosedForm(Typeset):
    """``allocated = a * H*W*e + b``, with H and W in pixels and e the bytes of one element. `terms` may add more.

    Attributes
    ----------
    terms : tuple of Term
        The tensors that live at the peak and did not live before the run, largest first.
    where : str
        The step that makes the peak.
    lowest, highest : int
        The form holds for every square that was played (multiples of 64) from lowest^2 to highest^2 pixels.
    below, above : str or None
        The peak at the next square; None beyond 64 and 4096 pixels, which are not played.
    within : int
        Largest difference in bytes between a tensor and its term: 512, or 4 MiB if cuDNN alternates between constants
        from size to size.
    unsplit : tuple of int
        Fewest and most bytes to add to `predict`, at the sizes that were played: blocks that the allocator does not
        split (up to 1 MiB per tensor), and what `within` allows. Below 0 if remainders go to converted weights.
    checked : tuple of (int, int)
        Held-out sizes that peak at the same step; `unsplit` covers them.
    elsewhere : tuple of (int, int)
        Held-out sizes in the range that peak at another step.
    workspace_source : str
        Source of the convolutions' workspaces.
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
        """The exact coefficient of H*W*e."""
        return self._sum("coefficient")

    @property
    def t(self) -> Fraction:
        """`a` in full-size activations: T = 128*H*W*e."""
        return self.a / 128

    @property
    def b(self) -> Fraction:
        """Constant bytes, before each tensor is rounded up to 512."""
        return self._sum("constant")

    def predict(self, height: int, width: int) -> int:
        """Return the bytes allocated above the baseline, each tensor rounded up to 512. The allocator adds `unsplit`.

        Raises
        ------
        ValueError
            A size below 1, or H*W outside of the form's range.
        """
        height, width = whole("height", height), whole("width", width)
        if not self.lowest**2 <= height * width <= self.highest**2:
            wanted = f"{self.lowest}^2 to {self.highest}^2, the form's range"
            raise ArgumentError("height * width", wanted, f"{height}x{width}")
        return sum(_up(_value(_law(term, self.element_bytes), height, width)) for term in self.terms)

    def python(self) -> str:
        """Write a Python function of height and width that returns the same bytes as `predict`."""
        function = re.sub(r"\W+", "_", f"{self.name}_allocated_bytes")
        low, high = self.lowest, self.highest
        lines = [
            f"if not {low}**2 <= height * width <= {high}**2:",
            f'    raise ValueError(f"height * width: expected {low}^2 to {high}^2, got {{height}}x{{width}}")',
            "pixels, total = height * width, 0",
        ]
        for term in self.terms:
            law = _law(term, self.element_bytes)
            divisor = math.lcm(*(value.denominator for value in law))
            size = write_sum({power: value * divisor for power, value in zip(_POWERS, law, strict=True)}, "python")
            lines.append(f"total += -(-({size}) // {ROUNDING * divisor}) * {ROUNDING}  # {term.name}")
        summary = f"{self.equation}; the allocator adds {self.unsplit[0]} to {self.unsplit[1]}."
        name = f"{'_' * function[0].isdigit()}{function}"
        return write_function(name, "height, width", summary, [*lines, "return total"])

    def latex(self) -> str:
        """Write the form as the body of a LaTeX equation."""
        return write_equation(f"allocated, {self.name}", write_sum(self._total, "latex"))

    def _data(self) -> dict[str, Any]:
        """Strings such as ``a_exact`` have the exact fractions."""
        terms = [
            {name: float(value) if isinstance(value, Fraction) else value for name, value in term._asdict().items()}
            | {"coefficient_exact": str(term.coefficient)}
            for term in self.terms
        ]
        return {"answer": "closed form"} | vars(self) | {
            "element_bytes": self.element_bytes, "a": float(self.a), "a_exact": str(self.a), "t": float(self.t),
            "b": float(self.b), "terms": terms,
        }  # fmt: skip

    def _sum(self, column: str) -> Fraction:
        return sum((getattr(term, column) for term in self.terms), ZERO)

    @property
    def _total(self) -> Polynomial:
        """The sum of all terms."""
        columns = ("coefficient", "HW*e"), ("edge", "(H+W)*e"), ("square", "HW*HW*e"), ("constant", "")
        return {power: self._sum(column) for column, power in columns}

    @property
    def equation(self) -> str:
        """Bytes: ``1216 H*W*e + 2107904``."""
        return write_sum(self._total)

    def _sheet(self, size: Sizer) -> Sheet:
        facts = [f"a is {write_number(self.t)} T (T = 128*H*W*e, e = {self.element_bytes})", f"peak at {self.where}"]
        facts += [f"holds from {self.lowest}x{self.lowest} to {self.highest}x{self.highest}"]
        facts += [f"{side}: {peak}" for side, peak in (("below", self.below), ("above", self.above)) if peak]
        why = "unsplit blocks" + ("; a workspace that alternates" if self.within > ROUNDING else "")
        facts += [f"each tensor is rounded up to {ROUNDING} B"]
        facts += [f"the allocator adds {self.unsplit[0]} to {self.unsplit[1]} B ({why})"]
        facts += ["held-out sizes: " + (", ".join(f"{h}x{w}" for h, w in self.checked) or "none")]
        facts += [f"{h}x{w} peaks elsewhere" for h, w in self.elsewhere]
        facts += [f"convolutions' workspaces: {self.workspace_source}"]
        has_more = any(t.edge or t.square for t in self.terms)
        header = ("tensor at the peak", "T", "of H*W*e", "bytes", *["and"] * has_more)
        rows = [
            (
                t.name,
                *map(write_number, (t.coefficient / 128, t.coefficient, t.constant)),
                *[write_sum({"(H+W)*e": t.edge, "HW*HW*e": t.square}) if t.edge or t.square else ""] * has_more,
            )
            for t in self.terms
        ]
        equation = f"{self.name}: allocated_bytes = {self.equation}"
        return Sheet(equation, [Bullets(facts), Columns(header, rows)])


# ---- the derivation ----


def play_peak(request: VAERequest, process: SimulatedProcess) -> PlayedPeak:
    """Play a run in a fresh process and return its peak above weights and input. A peak outside of the model's call has
    no tensors."""
    measured = request.play(process)
    where, tensors = process.peak_above_baseline() or ("outside of the model's call", {})
    return PlayedPeak(measured.reserved, measured.allocated, where, tensors)


def name_of(q: VAERequest) -> str:
    """Name a request without its size."""
    job = q.job
    name = f"{job.arch['name']} {job.op} {job.dtype} {q.software.runtime}"
    name += "" if job.weights_dtype == job.dtype else f" from {job.weights_dtype}"
    name += f" batch {job.batch}" if job.batch > 1 else ""
    return " ".join([name, *q.settings])


def derive(request: VAERequest) -> ClosedForm:
    """Derive the closed form of a request's peak. ValueError if the peak has none."""
    process = request.start()
    anchor = play_peak(request, process)
    q = replace(request, workspace=process.workspace)  # the others reuse its lookups
    job, height, width = q.job, q.job.height, q.job.width
    if not anchor.tensors:
        raise ArgumentError("formula", "a size whose peak lies within the model's call", f"{height}x{width}")

    def look(height: int, width: int) -> PlayedPeak | None:
        try:
            other = q.at(height, width)
            return play_peak(other, other.start())
        except ValueError:  # PyTorch would refuse the size
            return None

    # All squares, because a peak may give way to another one and come back.
    peaks = {side: look(side, side) for side in range(STEP, LAST + 1, STEP)}
    same = {side: peak for side, peak in peaks.items() if peak and peak.key == anchor.key}
    if not same:
        wanted = f"squares of {STEP} to {LAST} pixels a side that peak as {height}x{width} does"
        raise ArgumentError("formula", wanted, "none")
    centre = min(same, key=lambda side: abs(side * side - height * width))
    within, laws, run = _laws([*anchor.tensors], same, centre)
    if len(run) < 3:
        wanted = f"3 squares or more that peak as {height}x{width} does, to solve for its tensors' growth"
        raise ArgumentError("formula", wanted, str(len(run)))

    def unsplit(size: tuple[int, int], peak: PlayedPeak | None) -> int | None:
        """Return the bytes that the allocator added at a size; None if the tensors do not follow the laws."""
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
    """Solve for the laws of a peak's tensors at the squares around `centre`.

    Return the bytes within which the laws hold, each law with its squares, and the squares at which all laws hold.
    """
    alike = _around(centre, peaks)
    for within in (ROUNDING, ALTERNATION):
        laws = {name: _solve({side: peaks[side].tensors[name] for side in alike}, centre, within) for name in names}
        run = [side for side in alike if all(side in extent for _, extent in laws.values())]
        if len(run) >= 3:
            break
    return within, laws, run


def _around(centre: int, sides: Container[int]) -> list[int]:
    """Return the unbroken run of `sides` around one of them."""
    run = [centre]
    for step in (-STEP, STEP):
        side = centre + step
        while side in sides:
            run.append(side)
            side += step
    return sorted(run)


def _solve(sizes: Mapping[int, int], centre: int, within: int = ROUNDING) -> tuple[Law, list[int]]:
    """Return the law of one tensor, {side: bytes}, that holds for the most squares around `centre`, and these squares.

    A law goes through the centre and meets the other squares within `within` bytes, because cuDNN rounds an index up to
    its own tiles. It ends at the size at which cuDNN's heuristic chooses another plan. Simple laws come first, and the
    first law that is exact everywhere wins. If no law meets more squares than it was made from, return only the centre.
    """
    others = sorted((side for side in sizes if side != centre), key=lambda side: -abs(side - centre))
    best: tuple[tuple[int, int], Law, list[int]] = (0, 0), (ZERO, ZERO, ZERO, Fraction(sizes[centre])), [centre]
    for columns in ((0, 3), (0, 1, 3), (0, 2, 3)):  # H*W; with padding's H+W; with attention's (H*W)^2
        for side in others[: len(others) + 2 - len(columns)]:
            law = _through({s: sizes[s] for s in [centre, side, *others[-1:]][: len(columns)]}, columns)
            off = {s: abs(_value(law, s, s) - size) for s, size in sizes.items()}
            extent = _around(centre, {s for s in off if off[s] <= within})
            score = len(extent), sum(off[s] == 0 for s in extent)
            if len(extent) > len(columns) and score > best[0]:  # any law meets the points it was made from
                best = score, law, extent
            if score[1] == len(sizes):
                return law, extent
    return best[1:]


def _through(sizes: Mapping[int, int], columns: Sequence[int]) -> Law:
    """Return the law, 0 outside of `columns`, through {side: bytes} of as many squares as columns."""
    powers = np.array([[_powers(side, side)[c] for c in columns] for side in sizes], dtype=float)
    law = dict(zip(columns, solve_in_fractions(powers, np.array([*sizes.values()], dtype=float)), strict=True))
    return tuple(law.get(c, ZERO) for c in range(4))


def solve_in_fractions(powers: np.ndarray, sizes: np.ndarray) -> list[Fraction]:
    """Return the coefficient of each column of powers from a tensor's sizes. The columns are scaled first, because the
    powers of a size differ by orders of magnitude."""
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
