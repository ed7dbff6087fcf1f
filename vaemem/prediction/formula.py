"""PyTorch's peak as a formula, derived by playing it: over a domain, in pieces with bounds (`Formula`); and the tensors
of one peak of a VAE in closed form, and how each grows with the image (`ClosedForm`)."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._arguments import shared
from vaemem._common import ELEMENT_BYTES, MIB, Answer, distinct, render, typeset, whole
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.prediction.cutting import ROUNDING, fit_domain, largest_of
from vaemem.prediction.pieces import Domain, Form, PlayedPeak, Point
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.question import Question, ask

if TYPE_CHECKING:
    from typing import Self

STEP, LAST = 64, 4096  # the squares that a derivation looks at: 64, 128, ... 4096 pixels a side
# cuDNN may alternate between some constants from size to size: where no law holds within ROUNDING, one within so many
# bytes is taken.
ALTERNATION = 4 * MIB
HELD_OUT = ((360, 640), (720, 1280), (832, 1216), (1000, 1000), (1080, 1920), (1216, 832), (1544, 520), (2160, 3840))

ZERO = Fraction(0)
Law = tuple[Fraction, ...]  # bytes by H*W, H+W, (H*W)^2 and 1


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
        header, cells = self._grid()
        indented = [(f"  {name}", *others) for name, *others in (header, *cells)]
        lines = [f"{self.name}: allocated_bytes = {self.equation}", *(f"  {line}" for line in self._facts())]
        return "\n".join([*lines, render(indented[0], indented[1:])])

    __repr__ = __str__

    def _repr_latex_(self) -> str:
        return typeset([self.latex()])

    def _repr_markdown_(self) -> str:
        facts = "\n".join(f"- {line}" for line in self._facts())
        grid = render(*self._grid(), markdown=True)
        return f"{self._repr_latex_()}\n\n" + f"{facts}\n\n{grid}".replace("*", r"\*")


class Formula(Answer):
    """PyTorch's peak over a domain of sizes, batches and prompts: what is allocated, and what is reserved.

    Attributes
    ----------
    name : str
        What it is of.
    domain : Domain
        The points that are played, when the first of the following is asked for.
    reserved : Form
        Of a VAE as `Prediction.reserved`, above the weights and the input; of a whole pipeline all that the card must
        have beside a CUDA context.
    allocated : Form
        The same of what is allocated.
    phases : dict of str to Form
        Of a pipeline: what is allocated at the height of each phase.
    left_out : tuple of Point
        Those that PyTorch refuses, or that are more than can be played.

    Examples
    --------
    >>> f = formula("sdxl", "decode", "float16").over(least=512, most=1024, batches=(1,), step=128)
    >>> f.lower(768, 1024) <= predict("sdxl", "decode", 768, 1024, "float16").reserved <= f.upper(768, 1024)
    True
    >>> print(f.allocated)
    Allocated: ...
    where        allocated, MiB...
    everywhere  2432.1 N*MP + ...
    """

    _progress: Progress = None

    _beside = "all that the card must have beside a CUDA context"

    def __init__(self, name: str, domain: Domain, at: Point, play: Callable[[Point], Mapping[str, PlayedPeak]]):
        """at: where it is answered first. play: what is seen at a point, the whole as "reserved" and "allocated" and
        the phases by their names."""
        self.name, self.domain, self._at, self._play = name, domain, at, play

    @functools.cached_property
    def _played(self) -> tuple[dict[str, Form], tuple[Point, ...]]:
        with polling(self._progress, "formula", bar_format=BAR) as poll:
            forms, left_out = fit_domain(self.domain, self._play, poll)
        if not forms:
            raise ValueError(f"domain: want a size that {self.name} can run, got {self.domain}")
        return forms, tuple(left_out)

    @property
    def reserved(self) -> Form:
        return self._played[0]["reserved"]

    @property
    def allocated(self) -> Form:
        return self._played[0]["allocated"]

    @property
    def phases(self) -> dict[str, Form]:
        return {name: form for name, form in self._played[0].items() if name not in ("reserved", "allocated")}

    @property
    def left_out(self) -> tuple[Point, ...]:
        return self._played[1]

    def over(self, progress: Progress = None, **changes: Any) -> Self:
        """The same over another domain, or with a bar.

        Parameters
        ----------
        progress : bool or callable, optional
            True shows a bar (tqdm); a callable gets (points done, points to do).
        **changes
            What `Domain` has: ``least``, ``most``, ``step`` in pixels, ``ratio``, ``batches``, ``tokens``.

        Raises
        ------
        TypeError
            Another name.
        ValueError
            A domain that cannot be, or has more than 50,000 points (when it is played).

        Examples
        --------
        >>> formula("sdxl", "decode", "float16").over(most=512, batches=(1, 2)).predict(512, 512) >> 20
        1078
        """
        known = [one.name for one in fields(Domain) if one.name != "tile"]
        if others := changes.keys() - set(known):
            raise TypeError(f"over: want {', '.join(known)} or progress, got {', '.join(sorted(others))}")
        found = copy.copy(self)
        found.__dict__.pop("_played", None)
        found.domain, found._progress = replace(self.domain, **changes), progress
        return found

    def predict(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes reserved. Sizes in pixels; tokens of the prompt, by default as many as the domain has at most.

        Raises
        ------
        ValueError
            What lies outside of the domain.
        """
        return self.reserved.predict(height, width, batch, tokens)

    def upper(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes: nothing that was played reserves more, as `Form.upper` says."""
        return self.reserved.upper(height, width, batch, tokens)

    def lower(self, height: int, width: int, batch: int = 1, tokens: int | None = None) -> int:
        """Bytes: nothing that was played reserves less, as `Form.lower` says."""
        return self.reserved.lower(height, width, batch, tokens)

    def python(self) -> str:
        """Two Python functions of height, width, batch and tokens, of reserved and of allocated bytes, that give the
        least, the likely and the most."""
        name = re.sub(r"\W+", "_", self.name)
        name = f"{'_' * name[0].isdigit()}{name}"
        return "\n\n".join(form.python(f"{name}_{form.name}_bytes") for form in (self.reserved, self.allocated))

    def latex(self) -> str:
        """Both as the body of a LaTeX environment of equations; N images of H by W pixels, a prompt of t tokens."""
        return " \\\\\n".join(form.latex() for form in (self.reserved, self.allocated))

    def _data(self) -> dict[str, Any]:
        forms = {name: form.data() for name, form in self._played[0].items()}
        return {"name": self.name, "domain": str(self.domain), "forms": forms, "left_out": self.left_out}

    def _answer(self) -> str:
        """The size that was asked for, or the largest square of the domain."""
        at = self._at
        try:
            at = self.domain.check(*at[:3], at.tokens or None)
        except ValueError:
            side = self.domain.most
            at = Point(side, side, self.domain.batches[0], self.domain.tokens[-1])
        tokens = f", {at.tokens} tokens" * (len(self.domain.tokens) > 1)
        sizes = []
        for form in (self.reserved, self.allocated):
            likely, low, high = (f(*at[:4]) / MIB for f in (form.predict, form.lower, form.upper))
            sizes.append(f"{likely:.0f} MiB {form.name} ({low:.0f} to {high:.0f})")
        return f"At {at.width}x{at.height}, batch {at.batch}{tokens}: {', '.join(sizes)}; {self._beside}."

    def _text(self, markdown: bool = False) -> str:
        letters = ["N images", "MP = H*W / 1024^2"]
        letters += ["t tokens"] * (len(self.domain.tokens) > 1)
        letters += [f"mp = the same with sides up to {self.domain.tile}"] * bool(self.domain.tile)
        lines = [self._answer(), f"{self.name}: {', '.join(letters)}, for {self.domain}."]
        if self.left_out:
            lines += [
                f"Left out are {len(self.left_out)} points, which PyTorch refuses or which are too large to play."
            ]
        lines += [form.text(markdown) for form in (self.reserved, self.allocated)]
        if self.phases:
            grids = {name: form.grid() for name, form in self.phases.items()}
            header = ("phase", "where", "allocated, MiB", *next(iter(grids.values()))[0][2:])
            rows = [(name, *row) for name, (_, rows) in grids.items() for row in rows]
            lines += ["Allocated at the height of each phase:", render(header, rows, markdown)]
        text = ("\n\n" if markdown else "\n").join(lines)
        return text.replace("*", r"\*") if markdown else text

    __repr__ = Answer.__str__

    def _repr_latex_(self) -> str:
        return typeset([self.reserved.latex(), self.allocated.latex()])

    def _repr_markdown_(self) -> str:
        answer, _, rest = self._text(markdown=True).partition("\n\n")
        return f"{answer}\n\n{self._repr_latex_()}\n\n{rest}"


class VAEFormula(Formula):
    """What `vaemem.formula` returns for a VAE; attributes as `Formula` has them, and:

    Attributes
    ----------
    closed : ClosedForm
        What is allocated at the size that was asked for, tensor by tensor, where its peak rules. ValueError where there
        is no such form: of a tiled op, whose peak depends on how H and W fall into tiles; of a peak outside of the
        model's call, or one that too few sizes share to solve for its tensors.

    Examples
    --------
    >>> found = formula("sdxl", "encode", "float16").closed
    >>> found.t, found.predict(832, 1216)
    (Fraction(6, 1), 1554285056)
    """

    _beside = "beside the weights and the input, and a CUDA context"

    def __init__(self, question: Question):
        self._question, job = question, question.job
        workspace = question.start().workspace  # what it has looked up need not be looked up again
        batches = (1, 2, 3, 4) if job.batch == 1 else (job.batch,)
        play = functools.partial(_play, replace(question, workspace=workspace))
        at = Point(job.height, job.width, job.batch)
        super().__init__(_name(question), Domain(batches=batches, tile=job.tile or 0), at, play)

    @functools.cached_property
    def closed(self) -> ClosedForm:
        if self._question.job.is_tiled:
            raise ValueError("closed: want 'encode' or 'decode': a tiled peak depends on how H and W fall into tiles")
        return derive(self._question)

    def _text(self, markdown: bool = False) -> str:
        try:
            closed = self.closed._repr_markdown_() if markdown else str(self.closed)
        except ValueError as error:
            closed = f"No closed form of one peak's tensors: {error}."
        return f"{super()._text(markdown)}\n\n{closed}"


@shared
def formula(
    model: Any, op: str | None = None, dtype: str | None = None, runtime: str = "diffusers", gpu: str = "RTX 4090",
    *, height: int = 1024, width: int = 1024, **settings: Any,
) -> Formula | Any:  # fmt: skip
    """PyTorch's memory as a function of the image's size, the batch and the prompt, in pieces: what is reserved, and
    what is allocated, with a bound below and above each.

    Derived, not fitted to measurements: every point of a domain is played, when the formula is first used. That is
    sides of 256 to 2048 pixels in steps of 64, up to 4:1, and batches of 1 to 4: thousands of points, which take some
    seconds, a pipeline's half a minute; `Formula.over` takes fewer, or others. Where the tensors of a peak are
    polynomials of the size, they are solved for exactly.

    Parameters
    ----------
    model of a VAE : shared
        Or, alone, what `vaemem.predict_pipeline` returned: the formula is of the whole pipeline then.
    op of a VAE : shared
    dtype, runtime of a VAE : shared
    gpu : shared
    height, width : int
        The size whose peak `VAEFormula.closed` is of.
    **settings
        What else `predict` takes: ``batch`` (the domain's only one then), ``weights_dtype``, ``cudnn_version``,
        ``torch_version``, ``tile``, ``slicing``, ``memory``, ``workspace``, ``protocol``, ``channels_last``,
        ``allow_tf32``, ``allocator``.

    Returns
    -------
    VAEFormula, or Formula for a pipeline

    Raises
    ------
    ValueError
        What `predict` raises.

    Examples
    --------
    >>> p = predict_pipeline("sd15", 512, 512, gpu="T4")
    >>> found = formula(p).over(least=512, most=768, batches=(1, 2))
    >>> found.upper(512, 512) >= p.peak, found.phases["decode"].pieces[0].is_exact
    (True, True)
    """
    if op is None and isinstance(getattr(model, "formula", None), Formula):
        return model.formula
    if op is None:
        name = model if isinstance(model, str) else type(model).__name__
        raise ValueError(
            f"op: want 'encode' or 'decode' of the VAE, got None with {name!r}; the formula of a whole pipeline is"
            f" predict_pipeline({name!r}, ...).formula"
        )
    return VAEFormula(ask(model, op, height, width, dtype=dtype, runtime=runtime, gpu=gpu, **settings))


def _play(question: Question, point: Point) -> dict[str, PlayedPeak]:
    """What a VAE's run takes above its weights and its input."""
    job = replace(question.job, height=point.height, width=point.width, batch=point.batch)
    other = replace(question, job=job)
    process = other.start()
    measured = other.play(process)
    where, tensors = process.peak_above_baseline() or ("outside of the model's call", {})
    largest = largest_of(tensors)
    return {
        "reserved": PlayedPeak(measured.reserved, where, {}, largest),
        "allocated": PlayedPeak(measured.allocated, where, tensors, largest),
    }


# ---- the derivation ----


class Peak(NamedTuple):
    """Bytes allocated at a peak, the step that makes it, and {name: requested bytes} of what lives then."""

    allocated: int
    where: str
    tensors: dict[str, int]

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        return self.where, frozenset(self.tensors)


def _peak(question: Question, process: SimulatedProcess) -> Peak | None:
    """The peak of a fresh process's run; None where it lies outside of the model's call."""
    measured = question.play(process)
    peak = process.peak_above_baseline()
    return peak and Peak(measured.allocated, *peak)


def _name(q: Question) -> str:
    """What is asked, without the size."""
    job = q.job
    name = f"{job.arch['name']} {job.op} {job.dtype} {q.software.runtime}"
    name += "" if job.weights_dtype == job.dtype else f" from {job.weights_dtype}"
    name += f" batch {job.batch}" if job.batch > 1 else ""
    return " ".join([name, *q.settings])


def derive(question: Question) -> ClosedForm:
    """The closed form of the peak that answers a question; ValueError where it has none, as `formula` says."""
    process = question.start()
    peak = _peak(question, process)
    q = replace(question, workspace=process.workspace)  # what this one has looked up need not be looked up again
    job = q.job

    def look(height: int, width: int) -> Peak | None:
        try:
            other = q.at(height, width)
            return _peak(other, other.start())
        except ValueError:  # PyTorch would refuse the size
            return None

    labels = {
        "name": _name(q), "model": job.arch["name"], "op": job.op, "dtype": job.dtype, "runtime": q.software.runtime,
        "gpu": process.gpu.name, "batch": job.batch, "workspace_source": process.workspace_source,
    }  # fmt: skip
    return close(labels, look, peak, job.height, job.width, range(STEP, LAST + 1, STEP))


def close(
    labels: Mapping[str, Any], look: Callable[[int, int], Peak | None], anchor: Peak | None, height: int, width: int,
    sides: Sequence[int],
) -> ClosedForm:  # fmt: skip
    """The closed form of the peak `anchor` at height x width, from what `look` finds at the squares of `sides`, which
    are a `STEP` apart; it is labelled with the first fields of `ClosedForm`, down to workspace_source."""
    if anchor is None:
        raise ValueError(f"formula: want a size whose peak lies within the model's call, got {height}x{width}")
    # All of them: a peak may rule, give way to another, and rule again.
    peaks = {side: look(side, side) for side in sides}
    same = {side: peak for side, peak in peaks.items() if peak and peak.key == anchor.key}
    if not same:
        raise ValueError(
            f"formula: want squares of {sides[0]} to {sides[-1]} pixels a side that peak as {height}x{width} does, got"
            " none"
        )
    centre = min(same, key=lambda side: abs(side * side - height * width))
    alike = _around(centre, same)
    for within in (ROUNDING, ALTERNATION):
        laws = {n: _solve({side: same[side].tensors[n] for side in alike}, centre, within) for n in anchor.tensors}
        run = [side for side in alike if all(side in extent for _, extent in laws.values())]
        if len(run) >= 3:
            break
    else:
        raise ValueError(
            f"formula: want 3 squares or more that peak as {height}x{width} does, from which its tensors' growth can be"
            f" solved for, got {len(run)}"
        )

    def unsplit(size: tuple[int, int], peak: Peak | None) -> int | None:
        """What the allocator added at a size; None where the tensors are not what the laws say."""
        if peak is None or peak.key != anchor.key:
            return None
        sizes = {name: _value(law, *size) for name, (law, _) in laws.items()}
        if any(abs(sizes[name] - size) > within for name, size in peak.tensors.items()):
            return None
        return peak.allocated - sum(map(_up, sizes.values()))

    def beyond(side: int) -> str | None:
        if side not in peaks:
            return None
        peak = peaks[side]
        found = peak.where if peak else "no peak within the model's call"
        return f"at {side}x{side} {'the same tensors in other sizes' if side in same else found}"

    e = ELEMENT_BYTES[labels["dtype"]]
    squares: dict[tuple[int, int], Peak | None] = {(side, side): same[side] for side in run}
    held_out = {
        (h, w): look(h, w)
        for h, w in distinct([(height, width), *HELD_OUT])
        if run[0] ** 2 <= h * w <= run[-1] ** 2 and (h, w) not in squares
    }
    added = {size: unsplit(size, peak) for size, peak in (squares | held_out).items()}
    known = [count for count in added.values() if count is not None]
    return ClosedForm(
        **labels,
        where=anchor.where,
        terms=tuple(
            Term(name, law[0] / e, law[3], name.partition(" [")[0], law[1] / e, law[2] / e)
            for name, (law, _) in sorted(laws.items(), key=lambda item: -_value(item[1][0], height, width))
        ),
        lowest=run[0],
        highest=run[-1],
        below=beyond(run[0] - STEP),
        above=beyond(run[-1] + STEP),
        within=within,
        unsplit=(min(known), max(known)),
        checked=tuple(size for size in held_out if added[size] is not None),
        elsewhere=tuple(size for size in held_out if added[size] is None),
    )


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

    A law goes through the centre exactly and meets the others within so many bytes (an index of cuDNN's is rounded up
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
    """The law, 0 outside of `columns`, that goes through {side: bytes} of as many squares (Gauss-Jordan, exact)."""
    rows = [[*(Fraction(_powers(side, side)[c]) for c in columns), Fraction(size)] for side, size in sizes.items()]
    for i in range(len(rows)):
        pivot = next(j for j in range(i, len(rows)) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(len(rows)):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    law = dict(zip(columns, rows, strict=True))
    return tuple(law[c][-1] if c in law else ZERO for c in range(4))


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
