"""An answer in phases, for any program and any way to predict it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from vaemem._common import as_csv
from vaemem._render import Actions, Block, Bullets, Columns, Sizer, in_gb
from vaemem._saving import write
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.prediction.answer import Answer, alias, largest_tensor
from vaemem.prediction.phases import Phase, Result
from vaemem.prediction.predict_vae import Advice
from vaemem.prediction.process import PeakTensor, SimulatedProcess
from vaemem.prediction.request import PAGE, Request
from vaemem.prediction.seconds import machine_of
from vaemem.prediction.verdict import FITS, judge_played
from vaemem.prediction.verdict_bounds import Plays

UNCOMPARED = "nobody compared this pipeline with a run"
_PARTS = ("weights", "activations", "workspace", "cached", "outside")  # their sum is a phase's total
_OUTCOMES = {True: "goes through", False: "runs out", None: "not reached"}


def as_far_as(phases: Sequence[Phase], full: tuple[str, PeakTensor] | None) -> Result:
    """Mark the phases: phases go through until memory runs out in one of them; later phases are not reached."""
    done = next((i for i, phase in enumerate(phases) if full and phase.name == full[0]), len(phases))
    outcomes = [*[True] * done, False, *[None] * len(phases)]  # one or more per phase
    reached = (phase._replace(fits=fits) for phase, fits in zip(phases, outcomes, strict=False))
    return Result(tuple(reached), full)


def read_phases(process: SimulatedProcess, names: Mapping[str, str]) -> tuple[Phase, ...]:
    """Read all phases of a process. names: as of `Phase.read`."""
    return tuple(Phase.read(process, number, names) for number in range(len(process.readings)))


class PhasedAnswer(Answer):
    """Phases of a predicted pipeline, common to all runtimes. Printing it shows one line per phase."""

    kind = "pipeline"
    host: int
    _run_row: dict[str, Any]  # values common to all rows of a table
    _sizes: Sequence[dict[str, int]] = ()  # of each phase's image, if they differ
    phases: tuple[Phase, ...] = alias("result.phases")
    out_of_memory_at: tuple[str, PeakTensor] | None = alias("result.out_of_memory_at")
    on_card: int | None = alias("judged.took")
    peak: int = alias("result.fullest.total")
    bottleneck: str = alias("result.fullest.name")
    least: int = alias("judged.least")
    band: tuple[int, int] = alias("judged.band")
    upper: int = alias("judged.upper")

    def _judge(
        self, process: SimulatedProcess, names: Mapping[str, str], inexact: Collection[str] = (), **words: Any
    ) -> SimulatedProcess:  # fmt: skip
        """Judge the phases that a process with room played, and play them on the card. Set `result`, `here` and
        `judged`. Return the process on the card.

        names: as of `Phase.read`
        inexact: names of weights whose bytes are not exact
        words: fields of `Verdict`
        """
        request: Request = self.request
        here, lacking = request.play_on_card(process)
        phases = read_phases(process, names)
        played = phases if here is process else read_phases(here, names)
        full = lacking and (phases[len(played)].name, lacking)
        if over := next((phase for phase in played if phase.outside and phase.total > process.available), None):
            full = over.name, PeakTensor("vaemem's memory limit", over.outside)
        self.result, self.here = as_far_as(phases, full), Result(played, full)
        exact = [
            (phase.outside, phase.weights - sum(size for name, size in phase.peak_tensors if name in inexact))
            for phase in phases
        ]
        # A phase needs at least its tensors without workspaces.
        low = max(phase.allocated - phase.workspace for phase in phases)
        plays = Plays(request, process, exact, (low, -(-self.peak // PAGE) * PAGE))
        took = self.here.fullest.total if played else 0
        self.judged = judge_played(plays, here, self.peak, took, full, **words)
        return here

    # ---- files ----

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of a `vaemem.Table`: one per phase, and one for the whole, which reserves as much as the fullest
        phase. Rows of diffusers have seconds if the card's speed is known. Seconds count all steps and weights sent
        over PCIe 3.0 x16, but no loading from a disk.

        Examples
        --------
        >>> table = Table(predict_pipeline("sd15", 512, 512, gpu="T4").rows())
        >>> [(row["phase"], row["reserved_bytes"] >> 20) for row in table[-2:]]
        [('decode', 3238), ('whole', 3238)]
        >>> print(fit(Table([*table, *predict_pipeline("sd15", 768, 768, gpu="T4").rows()]).filter(phase="decode")))
        sd15 pipeline decode: allocated_bytes = ...
        """
        rows: list[dict[str, Any]] = [
            {
                "phase": phase.name, "allocated_bytes": phase.allocated, "reserved_bytes": phase.total,
                "weights_bytes": phase.weights, "activations_bytes": phase.activations,
                "scratch_bytes": phase.workspace, **size,
            }
            for phase, size in zip(self.phases, self._sizes or [{}] * len(self.phases), strict=True)
        ]  # fmt: skip
        most = max(phase.allocated for phase in self.phases)
        rows.append({"phase": "whole", "allocated_bytes": most, "reserved_bytes": self.peak})
        lasts = self._seconds()
        return [self._run_row | row | lasts.get(row["phase"], {}) for row in rows]

    def _seconds(self) -> dict[str, dict[str, float]]:
        """Return the columns of time for each phase and the whole, if it is known."""
        return {}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write one line per phase as CSV to a file, or return it as text.

        Examples
        --------
        >>> predict_pipeline("sd15", 512, 512, gpu="T4").to_csv().splitlines()[0]
        'phase,total_bytes,fits,...'
        """
        return write(path, as_csv(self._lines()))

    def _more_data(self) -> dict[str, Any]:
        return {"bottleneck": self.bottleneck, "host_bytes": self.host}

    # ---- for people ----

    def _facts(self, size: Sizer) -> list[tuple[str, str]]:
        least, most = self.band
        label, text = self._peak_fact(size)
        sure = f" ({size(least)} to {size(most)})" if least != most else ""
        return [(label, f"in {self.bottleneck}{sure}, {text}")]

    def _costs(self, size: Sizer) -> list[str]:
        return [f"The host's memory keeps {size(self.host)} of weights."] * bool(self.host)

    def _grid(self, size: Sizer) -> Columns:
        """Make one row per phase; leave out a column if no phase has a value for it."""
        cells: dict[str, list[str]] = {
            "phase": [phase.name for phase in self.phases],
            "outcome": [_OUTCOMES[phase.fits] for phase in self.phases],
            "on the card": [size(phase.total) for phase in self.phases],
        }
        for name in _PARTS:
            if any(getattr(phase, name) for phase in self.phases):
                cells[name] = [size(getattr(phase, name)) for phase in self.phases]
        largest = [largest_tensor(phase) for phase in self.phases]
        if any(largest):
            cells["largest tensor"] = [f"{one.name}, {size(one.bytes)}" if one else "" for one in largest]
        return Columns(list(cells), list(zip(*cells.values(), strict=True)))

    def _blocks(self, size: Sizer) -> list[Block]:
        tried = [(one.describe(size), one.command) for one in self.would_fit]
        if self.verdict != FITS and (plan := self._plan()):
            tried.append(("more ways, and how long each takes:", plan))
        return [
            self._grid(size), *[Actions("What would fit, with everything else unchanged:", tried)] * bool(tried),
            Bullets(self.notes, detail=True),
        ]  # fmt: skip

    @property
    def would_fit(self) -> tuple[Advice, ...]:
        """Other settings with which it goes through; none if it fits."""
        return ()

    def _plan(self) -> str:
        """Return the command that plans such a run; "" if there is none."""
        return ""

    def __repr__(self) -> str:
        shown = "; ".join(
            f"{phase.name} {in_gb(phase.total)} ({in_gb(phase.weights)} of weights)" for phase in self.phases
        )
        return f"<{type(self).__name__} {self.title}: {self.summary}; {shown}>"


class PlayedAnswer(PhasedAnswer):
    """Phases of a pipeline of known parts, which a simulated process of PyTorch played."""

    request: PipelineRequest
    pipeline: str = alias("request.name")
    work: Callable[..., dict[str, float]] = alias("request.work")

    @property
    def parts(self) -> dict[str, Part]:
        return {part.role: part for part in self.request.parts}

    def _seconds(self) -> dict[str, dict[str, float]]:
        if self.coarse:
            return {}
        machine, whole = machine_of(self.card.gpu, dtype=self.request.dtype), Counter[str]()
        works: dict[str, Any] = {phase.name: self.work(phase, machine) for phase in self.phases if phase.name != "load"}
        for work in works.values():
            whole.update(work)  # adds counts, also fractions
        took = {name: machine.seconds(work) for name, work in {**works, "whole": whole}.items()}
        return {
            name: {"seconds": one.likely, "seconds_low": one.low, "seconds_high": one.high}
            for name, one in took.items()
        }
