"""A pipeline that was recorded on the user's machine: the steps of its process in order, and the prediction from
them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vaemem import _core
from vaemem._common import __version__
from vaemem.pipelines.phased_answer import UNCOMPARED, PhasedAnswer
from vaemem.prediction.request import Request


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
        component of an unknown kind belongs to the phase denoise.
    peak, bottleneck, fits, summary, spare, on_card, out_of_memory_at, available, least, band, upper
        As in `PipelinePrediction`.
    verdict : str
        ``"tight"`` or ``"does not fit"``, because nobody compared this pipeline with a run.
    notes : tuple of str
        The recording's suppositions, and operators whose memory is not counted.

    Examples
    --------
    >>> p = vaemem.pytorch.predict_pipeline("...", "a cat", height=1024, width=1024, gpu="RTX 4060")  # doctest: +SKIP
    """

    request: RecordedRequest

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
