"""A peak of PyTorch in closed form: its tensors, and how each tensor grows with the image. Plays at several sizes show
the growth."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, MIB, whole
from vaemem._errors import ArgumentError
from vaemem._numpy import np
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset
from vaemem.prediction.laws import (
    solve_law,
    symbols_at,
    value_of,
    write_equation,
    write_function,
    write_number,
    write_sum,
)
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import VAERequest

ROUNDING = 512  # bytes: the allocator's granule; a tensor follows its law within it
STEP, LAST = 64, 4096  # a derivation plays squares of 64, 128, ... 4096 pixels a side
# cuDNN may alternate between constants from size to size. If no law holds within ROUNDING, a law within ALTERNATION
# bytes counts.
ALTERNATION = 4 * MIB
HELD_OUT = ((360, 640), (720, 1280), (832, 1216), (1000, 1000), (1080, 1920), (1216, 832), (1544, 520), (2160, 3840))

# A tensor's bytes grow with H*W alone, with padding's H+W too, or with attention's (H*W)^2 too.
GROWTHS = ("HW", ""), ("HW", "(H+W)", ""), ("HW", "HW*HW", "")


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


class _Term(NamedTuple):
    name: str
    coefficient: Fraction  # 128 is one full-size activation, T
    constant: Fraction
    where: str
    edge: Fraction  # padding
    square: Fraction  # attention's scores

    def law(self, e: int) -> dict[str, Fraction]:
        """Return the tensor's bytes."""
        return {"HW": self.coefficient * e, "(H+W)": self.edge * e, "HW*HW": self.square * e, "": self.constant}


@dataclass(frozen=True, repr=False)
class ClosedForm(Typeset):
    """``allocated = a * H*W*e + b``, with H and W in pixels and e the bytes of one element. `terms` may add more.

    Attributes
    ----------
    terms : tuple
        The tensors that live at the peak and did not live before the run, largest first. Each tensor has a `name`,
        `where` (the module that made it), and numbers of bytes: `coefficient` times H*W*e, `edge` times (H+W)*e,
        `square` times (H*W)^2*e, and `constant`.
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
    terms: tuple[_Term, ...]
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
        return self._total["HW*e"]

    @property
    def t(self) -> Fraction:
        """`a` in full-size activations: T = 128*H*W*e."""
        return self.a / 128

    @property
    def b(self) -> Fraction:
        """Constant bytes, before each tensor is rounded up to 512."""
        return self._total[""]

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
        at = symbols_at(height, width)
        return sum(_up(value_of(term.law(self.element_bytes), at)) for term in self.terms)

    def python(self) -> str:
        """Write a Python function of height and width that returns the same bytes as `predict`."""
        low, high = self.lowest, self.highest
        lines = [
            f"if not {low}**2 <= height * width <= {high}**2:",
            f'    raise ValueError(f"height * width: expected {low}^2 to {high}^2, got {{height}}x{{width}}")',
            "pixels, total = height * width, 0",
        ]
        for term in self.terms:
            law = term.law(self.element_bytes)
            divisor = math.lcm(*(value.denominator for value in law.values()))
            size = write_sum({power: value * divisor for power, value in law.items()}, "python")
            lines.append(f"total += -(-({size}) // {ROUNDING * divisor}) * {ROUNDING}  # {term.name}")
        summary = f"{self.equation}; the allocator adds {self.unsplit[0]} to {self.unsplit[1]}."
        return write_function(f"{self.name}_allocated_bytes", "height, width", summary, [*lines, "return total"])

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

    @property
    def _total(self) -> dict[str, Fraction]:
        columns = {"HW*e": "coefficient", "(H+W)*e": "edge", "HW*HW*e": "square", "": "constant"}
        return {
            power: sum((getattr(term, column) for term in self.terms), Fraction(0)) for power, column in columns.items()
        }

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
    """Derive the closed form of a request's peak. Raise ValueError if the peak has no closed form."""
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
    peaks = {(side, side): look(side, side) for side in range(STEP, LAST + 1, STEP)}
    same = {side: peak for (side, _), peak in peaks.items() if peak and peak.key == anchor.key}
    if not same:
        wanted = f"squares of {STEP} to {LAST} pixels a side that peak as {height}x{width} does"
        raise ArgumentError("formula", wanted, "none")
    centre = min(same, key=lambda side: abs(side * side - height * width))
    alike = _around(centre, same)
    tensors = {name: {side: same[side].tensors[name] for side in alike} for name in anchor.tensors}
    for within in (ROUNDING, ALTERNATION):
        solved = {name: _solve(sizes, centre, within) for name, sizes in tensors.items()}
        run = [side for side in alike if all(side in extent for _, extent in solved.values())]
        if len(run) >= 3:
            break
    else:
        wanted = f"3 squares or more that peak as {height}x{width} does, to solve for its tensors' growth"
        raise ArgumentError("formula", wanted, str(len(run)))

    def unsplit(size: tuple[int, int]) -> int | None:
        """Return the bytes that the allocator added at a size; None if the tensors do not follow the laws."""
        peak = peaks[size]
        if peak is None or peak.key != anchor.key:
            return None
        sizes = {name: value_of(law, symbols_at(*size)) for name, (law, _) in solved.items()}
        if any(abs(sizes[name] - found) > within for name, found in peak.tensors.items()):
            return None
        return peak.allocated - sum(map(_up, sizes.values()))

    def beyond(side: int) -> str | None:
        if (side, side) not in peaks:
            return None
        peak = peaks[side, side]
        found = peak.where if peak and peak.tensors else "no peak within the model's call"
        return f"at {side}x{side} {'the same tensors in other sizes' if side in same else found}"

    low, high = run[0], run[-1]
    sizes = [size for size in [(height, width), *HELD_OUT] if low**2 <= math.prod(size) <= high**2]
    held_out = {size: look(*size) for size in sizes if size not in peaks}
    peaks |= held_out
    added = {size: unsplit(size) for size in [*zip(run, run, strict=True), *held_out]}
    known = [count for count in added.values() if count is not None]
    e, at, terms = ELEMENT_BYTES[job.dtype], symbols_at(height, width), []
    for name, (law, _) in sorted(solved.items(), key=lambda item: -value_of(item[1][0], at)):
        coefficient, edge, square, constant = (Fraction(law.get(power, 0)) for power in ("HW", "(H+W)", "HW*HW", ""))
        terms.append(_Term(name, coefficient / e, constant, name.partition(" [")[0], edge / e, square / e))
    return ClosedForm(
        name=name_of(q), model=job.arch["name"], op=job.op, dtype=job.dtype, runtime=q.software.runtime,
        gpu=process.gpu.name, batch=job.batch, workspace_source=process.workspace_source, where=anchor.where,
        terms=tuple(terms), lowest=low, highest=high, below=beyond(low - STEP), above=beyond(high + STEP),
        within=within, unsplit=(min(known), max(known)),
        checked=tuple(size for size in held_out if added[size] is not None),
        elsewhere=tuple(size for size in held_out if added[size] is None),
    )  # fmt: skip


def _around(centre: int, sides: Container[int]) -> list[int]:
    """Return the unbroken run of `sides` around one of them."""
    run = [centre]
    for step in (-STEP, STEP):
        side = centre + step
        while side in sides:
            run.append(side)
            side += step
    return sorted(run)


def _solve(sizes: Mapping[int, int], centre: int, within: int = ROUNDING) -> tuple[dict[str, float], list[int]]:
    """Return the law of one tensor, {side: bytes}, that holds for the most squares around `centre`, and these squares.

    A law goes through the centre and meets the other squares within `within` bytes, because cuDNN rounds an index up to
    its own tiles. The range ends at the size at which cuDNN's heuristic chooses another plan. Simple laws come first,
    and the first law that is exact everywhere wins. If no law meets more squares than it was made from, return only the
    centre.
    """
    others = sorted((side for side in sizes if side != centre), key=lambda side: -abs(side - centre))
    sides, found = np.array([*sizes.items()], dtype=float).T
    best = (0, 0), {"": float(sizes[centre])}, [centre]
    for powers in GROWTHS:
        for side in others[: len(others) + 2 - len(powers)]:
            met = np.array([centre, side, *others[-1:]][: len(powers)], dtype=float)
            law = solve_law(powers, symbols_at(met, met), np.array([sizes[one] for one in met], dtype=float))
            off = np.abs(value_of(law, symbols_at(sides, sides)) - found)
            extent = _around(centre, {*sides[off <= within]})
            score = len(extent), len({*sides[off == 0]}.intersection(extent))
            if len(extent) > len(met) and score > best[0]:  # any law meets the points it was made from
                best = score, law, extent
            if score[1] == len(sizes):
                return law, extent
    return best[1:]


def _up(size: float | Fraction) -> int:
    return math.ceil(size / ROUNDING) * ROUNDING
