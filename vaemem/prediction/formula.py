"""PyTorch's peak as an equation of the image's size, the batch and the prompt, derived from plays at 260 to 330 sizes.
For a VAE, closed_form.py adds one peak in closed form."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vaemem._arguments import shared
from vaemem._errors import ArgumentError
from vaemem._render import Bullets, Columns, Sheet, Sizer, Typeset, in_gb
from vaemem._types import Dtype, Program, TiledOp
from vaemem.prediction.closed_form import ClosedForm, PlayedPeak, derive, name_of, play_peak
from vaemem.prediction.peak_equations import HEADER, RAISED, Equation, Grid, Point
from vaemem.prediction.request import VAEArguments, VAERequest, resolve_vae


class Formula(Typeset):
    """PyTorch's peak over a grid of sizes, batches and prompts: one line per phase for allocated and for reserved
    memory. The largest line is the answer.

    Attributes
    ----------
    name : str
        The VAE's run or the pipeline.
    grid : Grid
        The sizes that the formula holds for.
    reserved : Equation
        Reserved memory: for a VAE without the weights and the input, as in `Prediction.reserved`; for a pipeline with
        everything but a CUDA context.
    allocated : Equation
        Allocated memory, with the same exclusions as `reserved`.
    played : int
        Number of sizes that were played.
    left_out : tuple of Point
        Sizes that PyTorch refuses.
    closed : ClosedForm
        The memory allocated at the size of the arguments, tensor by tensor, and at all sizes that peak at the same
        step. ValueError if there is no such form: for a pipeline; for a tiled op, because its peak depends on how H and
        W fall into tiles; for a peak outside of the model's call; and if too few sizes share the peak to solve for its
        tensors.

    Examples
    --------
    >>> f = formula("sdxl", "encode", "float16")
    >>> predict("sdxl", "encode", 768, 1024, "float16").reserved <= f.predict(768, 1024)
    True
    >>> print(f.allocated)
    phase   counter   ...
    encode  allocated  1536 N*MP + 6  exact ...
    >>> f.closed.t, f.closed.predict(832, 1216)
    (Fraction(6, 1), 1554285056)
    """

    assumed_card: str = ""

    def __init__(
        self, name: str, grid: Grid, at: Point, play: Callable[[Point], Mapping[str, PlayedPeak]],
        request: VAERequest | None = None,
    ):  # fmt: skip
        """at: the size that the text answers first. play: returns the peak of each phase at a point. request: a VAE's
        run at that size."""
        self.name, self.grid, self._at, self._play, self._request = name, grid, at, play, request

    @functools.cached_property
    def _peaks(self) -> dict[Point, Mapping[str, PlayedPeak]]:
        peaks = dict[Point, Mapping[str, PlayedPeak]]()
        for point in self.grid.played():
            with contextlib.suppress(ValueError, OverflowError):  # PyTorch refuses the size, or it is too large to play
                peaks[point] = self._play(point)
        if not peaks:
            raise ArgumentError("formula", "", f"{self.name} runs at none of {self.grid}")
        return peaks

    @functools.cached_property
    def reserved(self) -> Equation:
        return Equation("reserved", self.grid, self._peaks)

    @functools.cached_property
    def allocated(self) -> Equation:
        return Equation("allocated", self.grid, self._peaks)

    @property
    def _equations(self) -> tuple[Equation, Equation]:
        return self.reserved, self.allocated

    @property
    def played(self) -> int:
        return len(self._peaks)

    @property
    def left_out(self) -> tuple[Point, ...]:
        return tuple(point for point in self.grid.played() if point not in self._peaks)

    @functools.cached_property
    def closed(self) -> ClosedForm:
        if self._request is None:
            raise ArgumentError("closed", "the formula of a VAE's run", f"the one of {self.name}")
        if self._request.job.is_tiled:
            why = "a tiled peak depends on how H and W fall into tiles"
            raise ArgumentError("closed", "'encode' or 'decode'", "a tiled op", why)
        return derive(self._request)

    def predict(self, height: int, width: int, batch: int = 1, prompt_tokens: int | None = None) -> int:
        """Return the bytes reserved at most. Sizes are in pixels; by default the prompt is the longest.

        Raises
        ------
        ValueError
            A size, a batch or a prompt outside of the grid.
        """
        return self.reserved.predict(height, width, batch, prompt_tokens)

    def python(self) -> str:
        """Write a Python module with two functions of height, width, batch and prompt_tokens. The functions return the
        bytes reserved and allocated, as `predict` does."""
        functions = [one.python(f"{self.name}_{one.name}_bytes") for one in self._equations]
        return "\n\n".join(["import math\n", *functions])

    def latex(self) -> str:
        """Write both equations as the body of a LaTeX environment, for N images of H by W pixels and t tokens."""
        return " \\\\\n".join(one.latex() for one in self._equations)

    def _data(self) -> dict[str, Any]:
        return {
            "answer": "formula", "name": self.name, "grid": str(self.grid), "played": self.played,
            "summary": self._headline(in_gb), "left_out": [point._asdict() for point in self.left_out],
            **{one.name: one.data() for one in self._equations},
        }  # fmt: skip

    def _headline(self, size: Sizer) -> str:
        """Answer for the size of the arguments, or for the largest square."""
        at = self._at
        try:
            at = self.grid.check(*at[:3], at.tokens or None)
        except ValueError:
            at = self.grid.check(2048, 2048, 1, None)
        tokens = f", {at.tokens} tokens" * bool(at.tokens)
        sizes = [f"{size(one.predict(*at[:3], at.tokens or None))} {one.name}" for one in self._equations]
        answer = f"At {at.width}x{at.height}, batch {at.batch}{tokens}: at most {', '.join(sizes)}"
        without = "besides the weights, the input and" if self._request else "everything that the card must hold except"
        return f"{answer}; {without} a CUDA context. {self.assumed_card}".rstrip()

    def _sheet(self, size: Sizer) -> Sheet:
        letters = ["N images", "MP = H*W / 2^20", *["t tokens"] * bool(self.grid.tokens)]
        letters += [f"tile = MP of H and W up to {self.grid.tile}"] * bool(self.grid.tile)
        above = [f"{one.name} by at most {one.excess:.1%}, median {one.median:.1%}" for one in self._equations]
        title = f"{self.name}: the largest line, with {', '.join(letters)}."
        notes = [
            f"The largest line is above the peak: {'; '.join(above)}.",
            f"Sizes: {self.grid}; {self.played} of them were played.",
            "exact: the tensors at the peak, each a polynomial at these sizes, and the most that the allocator adds.",
            "reserved: memory stays for the next phase, so a phase's line counts only if the phase needs more.",
            f"bound: above every size that was played, raised by {RAISED - 1:.1%}; few other sizes lie above.",
            *[f"PyTorch refuses {len(self.left_out)} more sizes. They are left out."] * bool(self.left_out),
        ]
        lines = [cells for one in self._equations for cells in one.cells()]
        sheet = Sheet(self._headline(size), [Columns(HEADER, lines, title=title), Bullets(notes)])
        if self._request is None:
            return sheet
        try:
            closed = self.closed._sheet(size)
        except ValueError as error:
            closed = Sheet(f"No closed form of one peak's tensors: {error}.")
        details = (replace(block, detail=True) for block in closed.blocks)
        return replace(sheet, blocks=[*sheet.blocks, Bullets([closed.headline]), *details])


@shared
def formula(
    model: Any, op: TiledOp | None = None, dtype: Dtype | None = None, runtime: Program = "diffusers",
    gpu: str | None = None, *, height: int = 1024, width: int = 1024, **settings: Any,
) -> Formula:  # fmt: skip
    """Write PyTorch's memory as an equation of the image's size, the batch and the prompt. Each phase has one line for
    reserved memory and one for allocated memory.

    On first use the formula plays 260 to 330 sizes, in up to three seconds: H and W in multiples of 64 from 256 to 2048
    pixels, up to 4:1, and 1 to 4 images. The formula is not fitted to measurements. A line is exact if the tensors at
    the peak are polynomials of the size. Otherwise the line is the lowest one above the sizes that were played.

    Parameters
    ----------
    model of a VAE : shared
        Or a prediction of `vaemem.predict_pipeline`, without other arguments, for the whole pipeline's formula.
    op of a VAE : shared
    dtype, runtime of a VAE : shared
    gpu : shared
    height, width : int
        The size that the text answers first. `Formula.closed` is the form of its peak.
    **settings
        The other arguments of `predict`: ``batch`` (of `closed`), ``weights_dtype``, ``cudnn_version``,
        ``torch_version``, ``tile``, ``slicing``, ``memory``, ``workspace``, ``protocol``, ``channels_last``,
        ``allow_tf32``, ``allocator``.

    Returns
    -------
    Formula

    Raises
    ------
    ValueError
        As `predict` does.

    Examples
    --------
    >>> p = predict_pipeline("sd15", 512, 512, gpu="T4")
    >>> found = formula(p)
    >>> found.predict(512, 512) >= p.peak, [line.phase for line in found.reserved.lines]
    (True, ['load', 'encode prompt', 'denoise', 'decode, N=1', 'decode, N>1'])
    """
    if op is None and isinstance(known := getattr(model, "formula", None), Formula):
        return known
    if op is None and isinstance(model, str):
        advice = f"the formula of a whole pipeline is predict_pipeline({model!r}, ...).formula"
        raise ArgumentError("op", "'encode' or 'decode' of the VAE", f"None with {model!r}", advice)
    if op is None:
        known = "a VAE's name with an op, or what predict_pipeline returns for diffusers"
        raise ArgumentError("model", known, type(model).__name__)
    given = VAEArguments(model, op, height, width, dtype=dtype, runtime=runtime, gpu=gpu, **settings)
    request = resolve_vae(given)
    job, workspace = request.job, request.start().workspace  # the sizes share its lookups

    def play(point: Point) -> dict[str, PlayedPeak]:
        at = replace(job, height=point.height, width=point.width, batch=point.batch)
        other = replace(request, job=at, workspace=workspace)
        return {job.op: play_peak(other, other.start())}

    name = name_of(replace(request, job=replace(job, batch=1)))
    found = Formula(name, Grid(tile=job.tile or 0), Point(job.height, job.width, job.batch), play, request)
    found.assumed_card = request.card.assumed
    return found
