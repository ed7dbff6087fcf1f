"""What a prediction says: sizes, how sure they are, and whether the run fits a card."""

from __future__ import annotations

import functools
import html
import os
from collections.abc import Iterator, Sequence
from typing import Any

from vaemem._common import MIB
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL
from vaemem.prediction.gpus import CONTEXT
from vaemem.prediction.process import Moment, PeakTensor, SimulatedProcess
from vaemem.prediction.request import ModuleRequest, VAERequest
from vaemem.prediction.verdict import CardAnswer, CardUse, bar, bound_of


class SimulatedAnswer(CardAnswer):
    """What a prediction reads off the process that it played."""

    upper_share = 0.9989
    upper_basis = (
        "3568 of 3572 answers of profiles that were left out in turn, a version or a card (benchmarks/left_out.py: SDXL"
        " and FLUX, float16 and float32, whole images one at a time); 98 of 98 rows of the seed table"
    )

    _covers = _besides = ""  # words of `CardUse`

    def __init__(self, question: VAERequest | ModuleRequest):
        self._request, self._process = question, question.start()
        self.protocol, process = question.software.protocol, self._process
        self.allocated, self.reserved, self.peak_allocated, self.peak_reserved = question.play(process)
        self._plays = {self.protocol: process}
        self.gpu, self.total_memory = process.gpu.name, process.gpu.total_memory
        self.reported_memory, self.used = process.gpu.reported_memory, question.card.used
        self.assumed_card = question.card.assumed
        self.coarse = bool(process.gpu.coarse)
        self.torch_version = process.torch_version
        self.cudnn_version: str | None = getattr(process.workspace, "cudnn_version", None)
        self.workspace_source, self.available = process.workspace_source, process.available
        self._has_room = process.most_reserved <= self.available  # then nothing is ever refused and all goes as it did
        process, full = (process, None) if self._has_room else question.repeat(process, self.available)
        self.out_of_memory_at, self.on_card = full, None if full else process.readings[-1].peak_reserved
        self.substitutions = process.substitutions
        self._here = process
        self._use = CardUse(
            self.available, None if full else process.most_reserved, self._process.most_reserved, question.card.unsure,
            process.guessed_plans, safe=question.safe, has_version=question.software.has_version, coarse=self.coarse,
            covers=self._covers, besides=self._besides, between=getattr(process.workspace, "between", ""),
        )  # fmt: skip

    def _played(self, protocol: str) -> tuple[SimulatedProcess, int]:
        """A process that played the same call by a protocol, and which of its readings is the protocol's."""
        if protocol == "cold":
            for other, process in self._plays.items():
                if len(process.readings) > PROTOCOLS[other].runs or not PROTOCOLS[other].warmups:
                    return process, 0
        if protocol not in self._plays:
            self._plays[protocol] = self._request.start(self._process.workspace)
            self._request.play(self._plays[protocol], protocol)
        return self._plays[protocol], -1

    def _readings(self, protocol: str, workspaces: Sequence[tuple[int, ...]] = ()) -> list[int]:
        """The bytes that a process of this protocol reserved above the baseline; then those that it would have reserved
        with each of these workspaces of its convolutions."""
        process, reading = self._played(protocol)
        return [process.readings[reading].reserved, *(row[reading] for row in process.reserved_with(workspaces))]

    @functools.cached_property
    def least_reserved(self) -> int:
        return self._least(True)

    @functools.cached_property
    def least_band(self) -> tuple[int, int]:
        return self.least_reserved, self._least(False)

    def _least(self, has_other_plans: bool) -> int:
        most = self._process.most_reserved
        return self._process.least(0, most if self.out_of_memory_at else min(most, self.available), has_other_plans)

    def _possible(self, every: bool, *protocols: str) -> Iterator[int]:
        """Reserved bytes by each of these protocols, also with each of the other workspaces that may be the true ones.
        every: those of every cuDNN."""
        others = self._process.alternatives(every)
        for protocol in protocols:
            yield from self._readings(protocol, others)

    @functools.cached_property
    def band(self) -> tuple[int, int]:
        sizes = list(self._possible(False, self.protocol))
        return min(sizes), max(sizes)

    @functools.cached_property
    def upper(self) -> int:
        # Of every cuDNN first, for most of the band's are among them, and what is alike is then played once.
        return bound_of(max(*self._possible(not self._use.has_version, *self._bounding), *self.band))

    @property
    def _bounding(self) -> tuple[str, ...]:
        """The protocols that `upper` holds for."""
        return tuple(dict.fromkeys((USUAL_PROTOCOL, "cold", self.protocol)))

    def _may_take(self, size: int) -> bool:
        # What this workspace takes, or the largest of the others, mostly says it before all of them are asked.
        least = size - (self.peak_reserved - self.reserved)
        if any(bound_of(*self._readings(protocol)) >= least for protocol in self._bounding):
            return True
        largest = sorted(self._process.alternatives(not self._use.has_version), key=sum)[-1:]
        return bound_of(max(self._readings(self.protocol, largest))) >= least or self._bound >= size

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        process = self._request.start(history=True)
        self._request.play(process)
        process.save_snapshot(path)

    @property
    def peak_tensors(self) -> tuple[PeakTensor, ...]:
        return tuple(self._process.peak_tensors())

    @property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._process.timeline())

    @property
    def _range(self) -> tuple[int, int]:
        least, most = (size - self.reserved + self._here.most_reserved for size in self.band)
        return least, most

    @property
    def _bound(self) -> int:
        return self.peak_reserved - self.reserved + self.upper

    @property
    def _runs_out(self) -> str:
        name, size = self.out_of_memory_at or ("", 0)
        return f"it runs out at {name}, which asks for {size / MIB:.0f} MiB"

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

    def _held(self, is_here: bool) -> dict[str, int]:
        """What the process holds at the peak, in bytes that add up to what it takes at most: here on this card, or on a
        card with room."""
        process = self._here if is_here else self._process
        tensors, allocated = process.peak_tensors(), process.peak_allocated
        weights = sum(size for name, size in tensors if name.startswith("weights of "))
        workspaces = sum(size for name, size in tensors if name.endswith("[workspace]"))
        return {
            "weights": weights, "tensors": allocated - weights - workspaces, "workspaces": workspaces,
            "cached": process.most_reserved - allocated,
        }  # fmt: skip

    @property
    def _parts(self) -> dict[str, int]:
        """Bytes of what the card holds at the peak; on this card if the run goes through there."""
        context, kept = min(CONTEXT, self.reported_memory), self._request.card.kept[0]
        others = {"CUDA context": context, "others": self.used + self._request.card.held, "Windows": kept}
        parts = self._held(self.on_card is not None) | others
        return parts | {"spare": max(self.reported_memory - sum(parts.values()), 0)}

    @property
    def _title(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        title = f"<b>{html.escape(self._title)}</b>: {html.escape(self.summary)}"
        assumed = f"<p>{html.escape(self.assumed_card)}</p>" if self.assumed_card else ""
        return f"<div>{assumed}{title}{bar(self._parts, self.reported_memory)}</div>"

    @property
    def _place(self) -> str:
        cudnn = f", cuDNN {self.cudnn_version}" if self.cudnn_version else ""
        return f"{self.gpu}, torch {self.torch_version}{cudnn}"
