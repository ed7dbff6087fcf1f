"""What every prediction says: what a run takes, and whether it fits the card."""

from __future__ import annotations

import functools
import html
import operator
import os
from typing import Any

from vaemem._common import MIB, Printed
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.gpus import CONTEXT
from vaemem.prediction.planned import Phase, Result, weights_and_workspaces
from vaemem.prediction.plays import Plays
from vaemem.prediction.process import Moment, PeakTensor, SimulatedProcess
from vaemem.prediction.request import Card, ModuleRequest, VAERequest
from vaemem.prediction.verdict import Verdict, bar, judge_played


def alias(path: str) -> Any:
    """An attribute that reads another one, such as ``"judged.fits"``."""
    return property(operator.attrgetter(path))


class Answer(Printed):
    """The answer to a request: what a play says, and whether it fits the card. Sizes in bytes.

    Attributes
    ----------
    request : Request
        What is predicted. An answer is copied and pickled as its request.
    result, here : Result
        What a play says where there is room, and on this card.
    judged : Verdict
    takes : str
        MiB that the run takes on this card, from the least to the most if the answer is coarse.
    """

    request: Any
    judged: Verdict
    title: str
    card: Card = alias("request.card")
    assumed_card: str = alias("card.assumed")
    available: int = alias("judged.available")
    coarse: bool = alias("judged.coarse")
    verdict: str = alias("judged.word")
    fits: bool = alias("judged.fits")
    takes: str = alias("judged.takes")
    tight_because: str = alias("judged.tight_because")
    spare: int = alias("judged.spare")
    least_band: tuple[int, int] = alias("judged.least_band")

    def __reduce__(self) -> Any:
        return type(self), (self.request,)

    @functools.cached_property
    def result(self) -> Result:
        raise NotImplementedError

    @functools.cached_property
    def here(self) -> Result:
        raise NotImplementedError

    @property
    def summary(self) -> str:
        return self.judged.summary

    @property
    def _answer(self) -> str:
        """The summary as a sentence."""
        return f"{self.summary[0].upper()}{self.summary[1:]}."

    @property
    def _parts(self) -> dict[str, int]:
        """Bytes of what the card holds at the peak; on this card if the run goes through there."""
        phase, card = (self.result if self.judged.took is None else self.here).fullest, self.card
        size, available = card.gpu.reported_memory, self.available
        parts = {
            "weights": phase.weights, "tensors": phase.activations, "workspaces": phase.workspace,
            "cached": phase.cached, **({"vaemem": phase.outside} if phase.outside else {}),
            "CUDA context": size - available - card.taken if available else min(CONTEXT, size),
            "others": card.used + card.held, "Windows": card.kept[0],
        }  # fmt: skip
        return parts | {"spare": max(size - sum(parts.values()), 0)}

    def _repr_html_(self) -> str:
        """The verdict, and the fullest phase beside the card's size."""
        assumed = f"<p>{html.escape(self.assumed_card)}</p>" if self.assumed_card else ""
        said = f"<b>{html.escape(self.title)}</b>: {html.escape(self.summary)}"
        return f"<div>{assumed}{said}{bar(self._parts, self.card.gpu.reported_memory)}{self._html_below()}</div>"

    def _html_below(self) -> str:
        return ""


class SimulatedAnswer(Answer):
    """What a prediction reads off the process that it played: a run of one phase."""

    upper_share = 0.9989
    upper_basis = (
        "3568 of 3572 answers of profiles that were left out in turn, a version or a card (benchmarks/left_out.py: SDXL"
        " and FLUX, float16 and float32, whole images one at a time); 98 of 98 rows of the seed table"
    )

    least_reserved: int = alias("judged.least")
    peak_tensors: tuple[PeakTensor, ...] = alias("result.fullest.peak_tensors")

    def __init__(self, request: VAERequest | ModuleRequest, covers: str = "", besides: str = ""):
        """covers, besides: words of the `Verdict`."""
        self.request, self._process = request, request.start()
        self.protocol, process = request.software.protocol, self._process
        self.allocated, self.reserved, self.peak_allocated, self.peak_reserved = request.play(process)
        self.gpu, self.total_memory = process.gpu.name, process.gpu.total_memory
        self.reported_memory, self.used = process.gpu.reported_memory, request.card.used
        self.torch_version = process.torch_version
        self.cudnn_version: str | None = getattr(process.workspace, "cudnn_version", None)
        self.workspace_source, available, most = process.workspace_source, process.available, process.most_reserved
        # With room for all of it nothing is ever refused, and all goes as it did.
        here, full = (process, None) if most <= available else request.repeat(process, available)
        self.out_of_memory_at, self.substitutions, self._here = full, here.substitutions, here
        plays = Plays(
            request, process, [(self.peak_reserved - self.reserved, 0)], (0, most if full else min(most, available)),
            (self.protocol, USUAL_PROTOCOL, "cold"),
        )  # fmt: skip
        refused = full and ("", full)
        self.judged = judge_played(plays, here, most, here.most_reserved, refused, covers=covers, besides=besides)

    @functools.cached_property
    def result(self) -> Result:
        return self._result(self._process)

    @functools.cached_property
    def here(self) -> Result:
        return self.result if self._here is self._process else self._result(self._here)

    def _result(self, process: SimulatedProcess) -> Result:
        tensors, allocated = process.peak_tensors(), process.peak_allocated
        weights, workspaces = weights_and_workspaces(tensors)
        phase = Phase(
            "run", allocated, process.most_reserved, weights, workspaces, allocated - weights - workspaces,
            peak_tensors=tuple(tensors), fits=not self.out_of_memory_at,
        )  # fmt: skip
        return Result((phase,), self.judged.out_of_memory_at)

    @property
    def on_card(self) -> int | None:
        return None if self.out_of_memory_at else self._here.readings[-1].peak_reserved

    @property
    def band(self) -> tuple[int, int]:
        baseline, (least, most) = self.peak_reserved - self.reserved, self.judged.band
        return least - baseline, most - baseline

    @property
    def upper(self) -> int:
        return self.judged.upper - (self.peak_reserved - self.reserved)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        process = self.request.start(history=True)
        self.request.play(process)
        process.save_snapshot(path)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._process.timeline())

    @property
    def _numbers(self) -> str:
        """What is predicted, and how sure it is."""
        least, most = (f"{size / MIB:.2f}" for size in self.band)
        band = f" ({least} to {most})" if least != most else ""
        return (
            f"allocated {self.allocated / MIB:.2f} MiB, reserved {self.reserved / MIB:.2f} MiB{band},"
            f" upper {self.upper / MIB:.0f} MiB"
        )

    @property
    def _said(self) -> str:
        """For `repr`: whether it fits, what is predicted, and what was substituted."""
        stood_in = f"; substituted: {', '.join(self.substitutions)}" if self.substitutions else ""
        return f"{self.summary}; {self._numbers}{stood_in}"

    def _shared_data(self) -> dict[str, Any]:
        names = (
            "verdict fits coarse summary available spare on_card allocated reserved peak_allocated peak_reserved band"
            " upper least_band total_memory used gpu torch_version cudnn_version protocol substitutions"
            " workspace_source"
        )
        full, tensors = self.out_of_memory_at, self.peak_tensors
        return {name: getattr(self, name) for name in names.split()} | {
            "out_of_memory_at": full and full._asdict(),
            "peak_tensors": [one._asdict() for one in tensors],
            "parts": self._parts,
        }

    @property
    def _place(self) -> str:
        cudnn = f", cuDNN {self.cudnn_version}" if self.cudnn_version else ""
        return f"{self.gpu}, torch {self.torch_version}{cudnn}"
