"""The parts that all predictions share: how much memory a run takes, and whether it fits the card."""

from __future__ import annotations

import functools
import math
import operator
import os
from typing import Any

from vaemem._render import Bar, Block, Bullets, Columns, Facts, Sheet, Shown, Sizer, in_gb, in_mib
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.held_tensors import Moment
from vaemem.prediction.phases import OF_WEIGHTS, Phase, Result, weights_and_workspaces
from vaemem.prediction.process import PeakTensor, SimulatedProcess
from vaemem.prediction.request import Card, ModuleRequest, VAERequest, refusing_too_large
from vaemem.prediction.verdict import Verdict, judge_played
from vaemem.prediction.verdict_bounds import Plays

SHOWN_TENSORS = 8  # of a peak


def alias(path: str) -> Any:
    """Return an attribute that reads another one, such as ``"judged.fits"``."""
    return property(operator.attrgetter(path))


def largest_tensor(phase: Phase) -> PeakTensor | None:
    """Return the largest tensor at a phase's peak that is not a weight."""
    return next((one for one in phase.peak_tensors if not one.name.startswith(OF_WEIGHTS)), None)


class Answer(Shown):
    """The answer to a request: the result of a play, and whether it fits the card. Sizes in bytes.

    Attributes
    ----------
    request : Request
        The predicted run. An answer is copied and pickled as its request.
    result, here : Result
        The results of a play on a card with room for everything, and on this card.
    judged : Verdict
    kind : str
        The value of ``"answer"`` in `to_dict`.
    """

    kind: str
    request: Any
    judged: Verdict
    title: str
    card: Card = alias("request.card")
    assumed_card: str = alias("card.assumed")
    available: int = alias("judged.available")
    coarse: bool = alias("judged.coarse")
    verdict: str = alias("judged.word")
    fits: bool = alias("judged.fits")
    tight_because: str = alias("judged.tight_because")
    spare: int = alias("judged.spare")
    least_band: tuple[int, int] = alias("judged.least_band")
    notes: tuple[str, ...] = ()
    model_note: str = ""  # names the model that the VAE or the modules belong to, if it is another one
    _outside = "vaemem"  # names memory of the card that is not PyTorch's

    def __reduce__(self) -> Any:
        return type(self), (self.request,)

    @functools.cached_property
    def result(self) -> Result:
        raise NotImplementedError

    @functools.cached_property
    def here(self) -> Result:
        raise NotImplementedError

    def summarize(self, size: Sizer) -> str:
        """Return the verdict in a sentence with its numbers. size: formats bytes.

        Examples
        --------
        >>> predict("sdxl", "decode", 512, 512, gpu="RTX 4090").summarize("{:.0f} B".format)
        'fits: it takes ... B that the card gives, at most ...'
        """
        return self.judged.summarize(size)

    @property
    def summary(self) -> str:
        return self.summarize(in_gb)

    @property
    def _parts(self) -> dict[str, int]:
        """Bytes of each part of the card at the peak; on this card if the run succeeds there."""
        phase, card = (self.result if self.judged.took is None else self.here).fullest, self.card
        size, available = card.gpu.reported_memory, self.available
        parts = {
            "weights": phase.weights, "tensors": phase.activations, "workspaces": phase.workspace,
            "cached": phase.cached, **({self._outside: phase.outside} if phase.outside else {}),
            "CUDA context": size - available - card.taken if available else min(card.gpu.context, size),
            "others": card.used + card.held, "Windows": card.kept[0],
        }  # fmt: skip
        return parts | {"spare": max(size - sum(parts.values()), 0)}

    # ---- for programs ----

    def _data(self) -> dict[str, Any]:
        card, judged, full = self.card, self.judged, self.judged.out_of_memory_at
        return {
            "answer": self.kind, "asked": self._asked_data(), "model_note": self.model_note,
            "verdict": self.verdict, "fits": self.fits,
            "coarse": self.coarse, "summary": self.summary,
            "card": {
                "name": card.gpu.name, "assumed": self.assumed_card, "memory_bytes": card.gpu.total_memory,
                "reported_bytes": card.gpu.reported_memory, "used_bytes": card.used, "available_bytes": self.available,
                "context_bytes": card.gpu.context, "context_most_bytes": card.gpu.context_most,
            },
            "peak_bytes": judged.most, "band_bytes": judged.band, "upper_bytes": judged.upper,
            "on_card_bytes": judged.took, "least_bytes": judged.least, "least_band_bytes": judged.least_band,
            "spare_bytes": self.spare,
            "out_of_memory_at": full and {"phase": full[0], "tensor": full[1].name, "bytes": full[1].bytes},
            "parts_bytes": self._parts, "phases": self._lines(), "notes": list(self.notes),
        } | self._more_data()  # fmt: skip

    def _asked_data(self) -> dict[str, Any]:
        raise NotImplementedError

    def _more_data(self) -> dict[str, Any]:
        return {}

    def _lines(self) -> list[dict[str, Any]]:
        """Return one dict for each phase: sizes in bytes, the largest tensor at its peak, whether it succeeds."""
        lines = []
        for phase in self.result.phases:
            line: dict[str, Any] = {"phase": phase.name, "total_bytes": phase.total, "fits": phase.fits}
            names = "allocated reserved weights activations workspace cached outside sent"
            line |= {f"{name}_bytes": getattr(phase, name) for name in names.split()}
            line |= {"flops": phase.flops, "host_flops": phase.host_flops}
            name, size = largest_tensor(phase) or (None, None)
            lines.append(line | {"largest_tensor": name, "largest_tensor_bytes": size})
        return lines

    # ---- for people ----

    def _sheet(self, size: Sizer) -> Sheet:
        summary, gpu = self.summarize(size), self.card.gpu
        sentences = (f"{clause[0].upper()}{clause[1:]}." for clause in summary.split("; "))
        headline = " ".join([*sentences, *self._costs(size), *[self.assumed_card] * bool(self.assumed_card)])
        bar = Bar(self._parts, gpu.reported_memory, size)
        facts = [*self.facts(size), *self._facts(size)]
        return Sheet(headline, [bar, Facts(facts), *self._blocks(size)], self.verdict)

    def facts(self, size: Sizer) -> list[tuple[str, str]]:
        """Return the run, its model and its card as (label, text). size: formats bytes.

        Examples
        --------
        >>> predict("sdxl", "decode", 512, 512, gpu="RTX 4090").facts("{:.0f} B".format)[0][0]
        'run'
        """
        card, parts = self.card, self._parts
        more = card.gpu.context_most - card.gpu.context  # assumed, not measured on this machine
        context = f"the CUDA context{f' (up to {size(card.gpu.context_most)})' if more else ''}"
        taken = {context: parts["CUDA context"], "others": card.used + card.held, "Windows": card.kept[0]}
        less = ", ".join(f"{size(part)} for {what}" for what, part in taken.items() if part)
        at = f"{card.gpu.name}: {size(card.gpu.reported_memory)}, less {less}"
        return [("run", self._run_text), ("model", self.model_note), ("card", at)]

    @property
    def _run_text(self) -> str:
        return self.title

    def _costs(self, size: Sizer) -> list[str]:
        """Say what the run takes besides the card's memory."""
        return []

    def _facts(self, size: Sizer) -> list[tuple[str, str]]:
        return []

    def _blocks(self, size: Sizer) -> list[Block]:
        return []

    def _peak_fact(self, size: Sizer) -> tuple[str, str]:
        """Return the parts of the peak."""
        phase, room = self.result.fullest, "" if self.judged.took == self.judged.most else " if there were room"
        parts = {
            "weights": phase.weights, "tensors": phase.activations, "workspaces": phase.workspace,
            "PyTorch's cache": phase.cached, self._outside: phase.outside,
        }  # fmt: skip
        held = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part)
        return "peak", f"{size(phase.total)}{room}: {held}"


class ModulePrediction(Answer):
    """A predicted call of a module, which `vaemem.pytorch.predict_peak` returns. Attributes as in `Prediction`, and:

    Attributes
    ----------
    unmodelled : dict
        Operators and other things with uncounted memory, and how often each ran; in `repr` too.
    """

    kind = "module"
    upper_share = math.nan
    upper_basis = "nothing: no module's measurements are known"
    least_reserved: int = alias("judged.least")
    peak_tensors: tuple[PeakTensor, ...] = alias("result.fullest.peak_tensors")

    def __init__(self, request: VAERequest | ModuleRequest, covers: str = "", besides: str = ""):
        """covers, besides: as in `Verdict`."""
        self.request, self._process = request, request.start()
        self.protocol, process = request.software.protocol, self._process
        with refusing_too_large(request.size):
            self.allocated, self.reserved, self.peak_allocated, self.peak_reserved = request.play(process)
        self.gpu, self.total_memory = process.gpu.name, process.gpu.total_memory
        self.reported_memory, self.used = process.gpu.reported_memory, request.card.used
        self.torch_version = process.torch_version
        self.cudnn_version: str | None = getattr(process.workspace, "cudnn_version", None)
        self.workspace_source, available, most = process.workspace_source, process.available, process.most_reserved
        here, full = request.play_on_card(process)
        self.out_of_memory_at, self.substitutions, self._here = full, (*request.supposed, *here.substitutions), here
        self.title = f"a module on {self.gpu}"
        plays = Plays(
            request, process, [(self.peak_reserved - self.reserved, 0)], (0, most if full else min(most, available)),
            (self.protocol, USUAL_PROTOCOL, "cold"),
        )  # fmt: skip
        refused = full and ("", full)
        self.judged = judge_played(plays, here, most, here.most_reserved, refused, covers=covers, besides=besides)

    @property
    def unmodelled(self) -> dict[str, int]:
        return dict(self.request.unmodelled)

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
        """Write the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        process = self.request.start(history=True)
        self.request.play(process)
        process.save_snapshot(path)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._process.timeline())

    def _counters(self, size: Sizer) -> str:
        """Return the values of PyTorch's counters, and their range."""
        least, most = map(size, self.band)
        band = f" ({least} to {most})" if least != most else ""
        return f"allocated {size(self.allocated)}, reserved {size(self.reserved)}{band}, at most {size(self.upper)}"

    @property
    def _described(self) -> str:
        """For `repr`: whether it fits, the predicted numbers, and the substitutions."""
        replaced = f"; substituted: {', '.join(self.substitutions)}" if self.substitutions else ""
        return f"{self.summary}; {self._counters(in_mib)}{replaced}"

    def _asked_data(self) -> dict[str, Any]:
        return {"allocator": self.request.software.allocator}

    def _more_data(self) -> dict[str, Any]:
        return self._counters_data() | {"unmodelled": self.unmodelled}

    def _counters_data(self) -> dict[str, Any]:
        return {
            "above_baseline": {
                "allocated_bytes": self.allocated, "reserved_bytes": self.reserved, "band_bytes": self.band,
                "upper_bytes": self.upper,
            },
            "peak_allocated_bytes": self.peak_allocated, "peak_reserved_bytes": self.peak_reserved,
            "peak_tensors": [one._asdict() for one in self.peak_tensors],
            "software": {
                "torch": self.torch_version, "cudnn": self.cudnn_version, "protocol": self.protocol,
                "workspace_source": self.workspace_source, "substitutions": list(self.substitutions),
            },
        }  # fmt: skip

    def _facts(self, size: Sizer) -> list[tuple[str, str]]:
        counters = f"{self._counters(size)}, above weights and input"
        return [self._peak_fact(size), ("PyTorch", f"{counters} ({self.protocol} process)")]

    def _blocks(self, size: Sizer) -> list[Block]:
        missing = [f"Not counted: {what} ({count} times)." for what, count in self.unmodelled.items()]
        return [Bullets(missing), self._tensors(size), *self._sources()]

    def _tensors(self, size: Sizer) -> Columns:
        """Return the largest tensors at the peak."""
        rows = [(size(one.bytes), one.name) for one in self.peak_tensors[:SHOWN_TENSORS]]
        return Columns(("size", "at the peak"), rows, detail=True)

    def _sources(self) -> list[Block]:
        told = [f"Substituted for missing data: {', '.join(self.substitutions)}."] if self.substitutions else []
        return [Bullets([*told, f"Workspaces: {self.workspace_source}."], detail=True)]

    def __repr__(self) -> str:
        baseline = in_gb(self.peak_allocated - self.allocated)
        cudnn = f", cuDNN {self.cudnn_version}" if self.cudnn_version else ""
        protocol = "" if self.protocol == USUAL_PROTOCOL else f", {self.protocol}"
        missing = ", ".join(f"{what} ({count})" for what, count in self.unmodelled.items())
        return (
            f"<ModulePrediction ({self.gpu}, torch {self.torch_version}{cudnn}{protocol}): above {baseline} of weights"
            f" and inputs {self._described}{f'; not counted: {missing}' if missing else ''}>"
        )
