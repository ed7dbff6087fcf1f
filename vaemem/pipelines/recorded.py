"""A pipeline that was recorded on the user's machine: what its process does in order, and the prediction from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vaemem import _core
from vaemem._common import __version__
from vaemem._errors import ArgumentError
from vaemem.pipelines.phased import UNCOMPARED, PhasedAnswer
from vaemem.prediction.answer import alias
from vaemem.prediction.request import Request


class ScriptWriter:
    """Writes a script like a `Trace`, but with phases. Any of them may empty the cache and free.

    Attributes
    ----------
    script : vaemem._core.Script
        Whole after `end`.
    """

    def __init__(self) -> None:
        self.script = _core.Script()
        self._left: list[dict[int, int]] = []  # by each call, {id: handle}
        self.stream = 0  # PyTorch's current one, by number
        self._phase, self._times = "", Counter[str]()
        self._trace, self._used = _core.Trace(), False
        self._taken: list[tuple[int, int]] = []  # for each storage its call's number, and its id there

    # ---- writing ----

    def take(self, size: int, name: str) -> int:
        """Allocate on the current stream; return the storage's number."""
        return self._number(self._trace.take(size, name, self.stream))

    def give(self, number: int) -> None:
        """Free a storage."""
        call, local = self._taken[number]
        if call == len(self._left):
            self._trace.give(local)
            return
        self._cut()
        self.script.give([self._left[call].pop(local)])

    def blas(self, name: str, lt: bool = False) -> None:
        """Allocate the workspace of matrix products, if there is none yet."""
        self._compute()
        self._trace.blas(name, lt)

    def conv(self, question: tuple[Any, ...], name: str) -> None:
        """Run a convolution with its workspace."""
        self._compute()
        self._trace.conv(question, name)

    def attend(self, call: tuple[Any, ...], kernel: str, sm: int, multiprocessors: int, name: str) -> int:
        """Run an attention; return its output's number."""
        self._compute()
        return self._number(self._trace.attend(call, kernel, sm, multiprocessors, name))

    def empty_cache(self) -> None:
        """Empty the cache."""
        self._cut()
        self.script.empty_cache()

    def begin(self, phase: str) -> None:
        """Begin a phase. The second one of that name is "denoise 2"."""
        self._cut()
        self._times[phase] += 1
        self._phase = phase if self._times[phase] == 1 else f"{phase} {self._times[phase]}"
        self.script.reset_peak()

    def end(self) -> None:
        """End the phase, if one has begun."""
        self._cut()
        if self._phase:
            self.script.read(self._phase)
        self._phase = ""

    def _compute(self) -> None:
        """Note an operator that may have a workspace."""
        if self.stream:
            wanted = "only copies on a stream of its own"
            raise ArgumentError("prepare", wanted, "products", "the workspaces of streams are not predicted")
        self._used = True

    def _number(self, local: int) -> int:
        self._used = True
        self._taken.append((len(self._left), local))
        return len(self._taken) - 1

    def _cut(self) -> None:
        if self._used:
            self._left.append(self.script.call(self._trace))
            self._trace, self._used = _core.Trace(), False


@dataclass(frozen=True)
class RecordedRequest(Request):
    """A recorded pipeline on a card.

    script: what the pipeline does with the memory
    title: the pipeline and its call
    notes: the recording's guesses, and memory that it does not count
    """

    script: _core.Script
    title: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)


class RecordedPrediction(PhasedAnswer):
    """Prediction of a pipeline that was recorded on this machine, as `vaemem.pytorch.predict_pipeline` returns it.
    Sizes are in bytes.

    Attributes
    ----------
    phases : tuple of Phase
        In the order of the run: load (if something is loaded first), encode prompt, encode image, denoise, decode. A
        component of another kind belongs to denoise.
    peak, bottleneck, fits, summary, spare, on_card, out_of_memory_at, available, least, band, upper
        As in `PipelinePrediction`.
    verdict : str
        ``"tight"`` or ``"does not fit"``, because nobody compared this pipeline with a run.
    notes : tuple of str
        What the recording supposed, and operators without counted memory.

    Examples
    --------
    >>> p = vaemem.pytorch.predict_pipeline("...", "a cat", height=1024, width=1024, gpu="RTX 4060")  # doctest: +SKIP
    """

    request: RecordedRequest
    least: int = alias("judged.least")

    def __init__(self, request: RecordedRequest):
        self.request, self.title, self.host = request, f"{request.title} ({request.card.gpu.name})", 0
        process = self._process = request.start()
        process.play(request.script)
        cudnn = getattr(process.workspace, "cudnn_version", None)
        self._run_row = {
            "model": request.title, "op": "pipeline", "runtime": "diffusers", "device": request.card.gpu.name,
            "source": "predicted", "versions": f"torch {process.torch_version}, cudnn {cudnn}, vaemem {__version__}",
        }  # fmt: skip
        here = self._judge(process, {}, untried=UNCOMPARED)
        used = (process if self.judged.out_of_memory_at else here).substitutions
        self.notes = (*used, *request.notes)

    def _asked_data(self) -> dict[str, Any]:
        return {"pipeline": self.request.title, "runtime": "diffusers"}
