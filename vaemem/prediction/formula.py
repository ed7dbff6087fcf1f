"""PyTorch's peak as a formula of the image's size, the batch and the prompt, derived by playing a domain: in pieces
with bounds, and of a VAE one peak in closed form too (closed.py)."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, overload

from vaemem._arguments import shared
from vaemem._common import MIB, Printed, typeset
from vaemem._types import Dtype, Program, TiledOp
from vaemem.engine.arguments import BAR, Progress, polling
from vaemem.prediction.closed import ClosedForm, derive, name_of, played_peaks
from vaemem.prediction.cutting import fit_domain
from vaemem.prediction.pieces import Domain, Form, PlayedPeak, Point, numbered
from vaemem.prediction.request import VAEArguments, VAERequest, resolve_vae

if TYPE_CHECKING:
    from typing import Self


class Formula(Printed):
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
    assumed_card: str = ""

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
            What `Domain` has: ``least``, ``most``, ``step`` in pixels, ``ratio``, ``batches``, ``prompt_tokens``.

        Raises
        ------
        TypeError
            Another name.
        ValueError
            A domain that cannot be, or has more than 50,000 points (when it is played).

        Examples
        --------
        >>> formula("sdxl", "decode", "float16").over(most=512, batches=(1, 2)).predict(512, 512) >> 20
        1102
        """
        known = [one.name for one in fields(Domain) if one.name != "tile"]
        if others := changes.keys() - set(known):
            raise TypeError(f"over: want {', '.join(known)} or progress, got {', '.join(sorted(others))}")
        found = copy.copy(self)
        found.__dict__.pop("_played", None)
        found.domain, found._progress = replace(self.domain, **changes), progress
        return found

    def predict(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes reserved. Sizes in pixels; tokens of the prompt, by default as many as the domain has at most.

        Raises
        ------
        ValueError
            What lies outside of the domain.
        """
        return self.reserved.predict(height, width, batch, prompt_tokens)

    def upper(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes: nothing that was played reserves more, as `Form.upper` says."""
        return self.reserved.upper(height, width, batch, prompt_tokens)

    def lower(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Bytes: nothing that was played reserves less, as `Form.lower` says."""
        return self.reserved.lower(height, width, batch, prompt_tokens)

    def python(self) -> str:
        """Two Python functions of height, width, batch and prompt_tokens, of reserved and of allocated bytes, that give
        the least, the likely and the most."""
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
            at = Point(side, side, self.domain.batches[0], self.domain.prompt_tokens[-1])
        tokens = f", {at.tokens} tokens" * (len(self.domain.prompt_tokens) > 1)
        sizes = []
        for form in (self.reserved, self.allocated):
            likely, low, high = (f(*at[:4]) / MIB for f in (form.predict, form.lower, form.upper))
            sizes.append(f"{likely:.0f} MiB {form.name} ({low:.0f} to {high:.0f})")
        answer = f"At {at.width}x{at.height}, batch {at.batch}{tokens}: {', '.join(sizes)}; {self._beside}."
        return f"{self.assumed_card} {answer}".lstrip()

    def _text(self, markdown: bool = False) -> str:
        letters = ["N images", "MP = H*W / 1024^2"]
        letters += ["t tokens"] * (len(self.domain.prompt_tokens) > 1)
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
            lines += ["Allocated at the height of each phase:", numbered(header, rows, markdown)]
        text = ("\n\n" if markdown else "\n").join(lines)
        return text.replace("*", r"\*") if markdown else text

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

    def __init__(self, request: VAERequest):
        self._request, job, self.assumed_card = request, request.job, request.card.assumed
        workspace = request.start().workspace  # what it has looked up need not be looked up again
        batches = (1, 2, 3, 4) if job.batch == 1 else (job.batch,)

        def play_at(point: Point) -> dict[str, PlayedPeak]:
            at = replace(job, height=point.height, width=point.width, batch=point.batch)
            other = replace(request, job=at, workspace=workspace)
            return played_peaks(other, other.start())

        at = Point(job.height, job.width, job.batch)
        super().__init__(name_of(request), Domain(batches=batches, tile=job.tile or 0), at, play_at)

    @functools.cached_property
    def closed(self) -> ClosedForm:
        if self._request.job.is_tiled:
            raise ValueError("closed: want 'encode' or 'decode': a tiled peak depends on how H and W fall into tiles")
        return derive(self._request)

    def _text(self, markdown: bool = False) -> str:
        try:
            closed = self.closed._repr_markdown_() if markdown else str(self.closed)
        except ValueError as error:
            closed = f"No closed form of one peak's tensors: {error}."
        return f"{super()._text(markdown)}\n\n{closed}"


@overload
def formula(model: Any, op: None = None) -> Formula: ...


@overload
def formula(
    model: Any, op: TiledOp, dtype: Dtype | None = None, runtime: Program = "diffusers", gpu: str | None = None,
    *, height: int = 1024, width: int = 1024, **settings: Any,
) -> VAEFormula: ...  # fmt: skip


@shared
def formula(
    model: Any, op: TiledOp | None = None, dtype: Dtype | None = None, runtime: Program = "diffusers",
    gpu: str | None = None, *, height: int = 1024, width: int = 1024, **settings: Any,
) -> Formula:  # fmt: skip
    """PyTorch's memory as a function of the image's size, the batch and the prompt, in pieces: what is reserved, and
    what is allocated, with a bound below and above each.

    Derived, not fitted to measurements: every point of a domain is played, when the formula is first used. That is
    sides of 256 to 2048 pixels in steps of 64, up to 4:1, and batches of 1 to 4: thousands of points, which take some
    seconds, a pipeline's up to one and a half minutes; `Formula.over` takes fewer, or others. Where the tensors of a
    peak are polynomials of the size, they are solved for exactly.

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
    given = VAEArguments(model, op, height, width, dtype=dtype, runtime=runtime, gpu=gpu, **settings)
    return VAEFormula(resolve_vae(given))
