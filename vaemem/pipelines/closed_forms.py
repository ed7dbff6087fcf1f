"""What a pipeline takes in each phase, in closed form."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from vaemem._common import render, typeset
from vaemem.pipelines.asked import PipelineQuestion
from vaemem.pipelines.pipeline_run import Phase
from vaemem.prediction.formula import STEP, ClosedForm, Peak, close
from vaemem.prediction.moments import ROUNDED_UP
from vaemem.prediction.process import SimulatedProcess

DERIVED_SIDES = range(STEP, 2049, STEP)  # pixels: of the squares that a derivation looks at


class PipelineFormula(dict[str, "ClosedForm | str"]):
    """{phase: its `ClosedForm`, or why it has none}: bytes allocated at the phase's height, weights included.

    The whole takes the largest of them, and the CUDA context and what the allocator keeps beside it.

    Examples
    --------
    >>> found = formula(predict_pipeline("sd15", 512, 512, gpu="T4"))
    >>> print(found)
    phase          allocated bytes, H and W in pixels, e bytes an element
    ...
    >>> found["denoise"].predict(512, 768) >> 20
    2237
    """

    def predict(self, height: int, width: int) -> int:
        """The most of any phase; ValueError out of the range where its peak rules, or where one has no closed form."""
        for name, form in self.items():
            if isinstance(form, str):
                raise ValueError(f"{name}: {form}")
        return max(form.predict(height, width) for form in self.values() if isinstance(form, ClosedForm))

    def _grid(self, markdown: bool = False) -> str:
        header = ("phase", "allocated bytes, H and W in pixels, e bytes an element", "square sides")
        rows = [
            (name, form.equation, f"{form.lowest} to {form.highest}")
            if isinstance(form, ClosedForm)
            else (name, form, "")
            for name, form in self.items()
        ]
        return render(header, rows, markdown)

    def __str__(self) -> str:
        return self._grid()

    __repr__ = __str__

    def _repr_latex_(self) -> str:
        return typeset(form.latex() for form in self.values() if isinstance(form, ClosedForm))

    def _repr_markdown_(self) -> str:
        has_forms = any(isinstance(form, ClosedForm) for form in self.values())
        grid = self._grid(markdown=True).replace("*", r"\*")
        return f"{self._repr_latex_()}\n\n{grid}" if has_forms else grid


def derive_pipeline(question: PipelineQuestion, phases: Sequence[Phase], process: SimulatedProcess) -> PipelineFormula:
    """The closed forms of a prediction's phases, from runs of the same at the squares of `DERIVED_SIDES`."""
    q = question
    played: dict[tuple[int, int], list[Phase]] = {}

    def look(index: int, height: int, width: int) -> Peak | None:
        if (height, width) not in played:
            call = replace(q.call, height=height, width=width)
            try:
                played[height, width] = replace(q, call=call).play(workspace=process.workspace)[0].phases
            except ValueError:  # a size that the pipeline does not make
                played[height, width] = []
        phases = played[height, width]
        return _peak(phases[index]) if phases else None

    found = PipelineFormula()
    for index, phase in enumerate(phases):
        labels = {
            "name": f"{q.name} {phase.name}", "model": q.name, "op": phase.name, "dtype": q.dtype,
            "runtime": "diffusers", "gpu": process.gpu.name, "batch": q.call.batch,
            "workspace_source": process.workspace_source,
        }  # fmt: skip
        try:
            look_at = functools.partial(look, index)
            found[phase.name] = close(labels, look_at, _peak(phase), q.call.height, q.call.width, DERIVED_SIDES)
        except ValueError as error:
            found[phase.name] = str(error)
    return found


def _peak(phase: Phase) -> Peak:
    return Peak(phase.allocated, phase.where, {name: size for name, size in phase.peak_tensors if name != ROUNDED_UP})
