"""Decide whether a run fits a card, in numbers and in words, for any program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vaemem import _core
from vaemem._render import Sizer, in_gb, share
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.phases import Phase
from vaemem.prediction.process import PeakTensor, SimulatedProcess
from vaemem.prediction.verdict_bounds import Plays, Takes

# NVIDIA's page 5490, "System Memory Fallback for Stable Diffusion". The driver's memory then never ends before the
# host's, so PyTorch, which frees its cache only after a refusal (CUDACachingAllocator.cpp), keeps it. The cards'
# own memory has 272 GB/s (RTX 4060) to 1792 GB/s (RTX 5090), their links 16 (PCIe 4.0 x8) to 63 GB/s (5.0 x16).
_SLOWER = "10 to 30 times slower (PCIe)"
SPILLS = (
    f"Windows drivers since 536.40 use the host's memory, {_SLOWER}, unless their CUDA - Sysmem Fallback Policy"
    " is Prefer No Sysmem Fallback"
)
SPILLS_ELSEWHERE = f"the driver may use the host's memory, {_SLOWER}"  # of other makers' cards on Windows
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


# Why a run is tight, by the core's names.
GUESSES, NO_ROOM, MARGINAL, UNTRIED = "guesses", "no room", "marginal", "untried"


@dataclass(frozen=True)
class Verdict:
    """Whether a run of any program fits a card, and the numbers behind it. Sizes in bytes.

    Attributes
    ----------
    available : int
        Bytes that the card gives, after a context and other users.
    most : int
        The most that the run takes on a card with room for everything.
    took : int or None
        The most that the run takes on this card; None if it runs out of memory there.
    out_of_memory_at : tuple of (str, PeakTensor) or None
        The phase and the request that fails. The phase's name is empty if the run has only one.
    plays : Plays, optional
        The processes that give the bounds. By default nothing is unknown: the run takes `most`.
    least_most : int, optional
        The most that the run takes on the more economical of two ways, if nobody said which way it goes.
    kept_more : int
        How much less than `available` the card may give, because the CUDA context or the operating system keeps more.
    windows : str
        On Windows, a sentence on the driver's use of the host's memory; "" on other systems.
    guesses : bool
        Whether the run succeeds only with unknown plans of cuDNN.
    untried : str
        The assumption behind the run that nobody has tried.
    safe : bool
        Whether a tight run counts as one that does not fit.
    has_version : bool
        Whether a version of PyTorch or cuDNN was named.
    coarse : bool
        Whether only the card's kind is known.
    covers, besides, between, no_room, verb : str
        Words: the part of the request that the answer covers; other models that the program keeps on the card; the
        ends of a coarse answer's range; how a run succeeds that takes more on a card with room; "needs" if the run
        uses more of the card than it has to.
    word, why : str
        The verdict, and why it is tight. csrc/predict/judge.c decides both.
    least, least_band, band, upper : int, tuple of int
        Computed when first read, because each plays the run again.
    spare : int
        Bytes left of `available`; below 0, bytes that the card lacks.
    """

    available: int
    most: int
    took: int | None
    out_of_memory_at: tuple[str, PeakTensor] | None = None
    plays: Plays | None = None
    least_most: int | None = None
    kept_more: int = 0
    windows: str = ""
    guesses: bool = False
    untried: str = ""
    safe: bool = False
    has_version: bool = True
    coarse: bool = False
    covers: str = ""
    besides: str = ""
    between: str = ""
    no_room: str = ""
    verb: str = "takes"

    @functools.cached_property
    def _judged(self) -> tuple[str, str]:
        goes = self.took is not None, self.guesses, bool(self.untried)
        sizes = max(self.available, 0), self.kept_more, self.most
        # The bound is slow to find. Less than all of it often decides.
        for rough in itertools.chain((0,), self.plays.low_bounds() if self.plays else ()):
            word, why = _core.judge(*goes, *sizes, rough, True)
            if word:
                return word, why
        return _core.judge(*goes, *sizes, self.upper)

    @property
    def word(self) -> str:
        """``"fits"``, ``"tight"`` or ``"does not fit"`` (csrc/predict/judge.h)."""
        return self._judged[0]

    @property
    def why(self) -> str:
        """Why the run is tight: one of the core's names."""
        return self._judged[1]

    @property
    def fits(self) -> bool:
        # A run that succeeds fits. If it has to fit safely, the verdict decides.
        return self.took is not None and (not self.safe or self.word == FITS)

    @functools.cached_property
    def least(self) -> int:
        """The least `available` with which the run succeeds."""
        return self.plays.least(True) if self.plays else self.band[0]

    @functools.cached_property
    def least_band(self) -> tuple[int, int]:
        """`least`, and the least if cuDNN's unknown next plans need as much as the first plan."""
        return self.least, self.plays.least(False) if self.plays else self.least

    @functools.cached_property
    def _takes(self) -> Takes:
        least = self.most if self.least_most is None else self.least_most
        return self.plays.takes if self.plays else Takes(self.most, least, self.most, self.most)

    @property
    def band(self) -> tuple[int, int]:
        """The least and the most that it takes with room, over every plausible set of workspaces."""
        return self._takes.least, self._takes.most

    @functools.cached_property
    def upper(self) -> int:
        """The most that the run takes, with a margin for everything that is not played."""
        return self.plays.bound if self.plays else self.most

    @property
    def here(self) -> tuple[int, int]:
        """The least and the most that the run takes on this card. The two differ if the answer is coarse."""
        took = self.took or 0
        if not self.coarse:
            return took, took
        more, (least, most) = took - self._takes.own, self.band
        return least + more, most + more

    @property
    def spare(self) -> int:
        return self.available - self.least if self.took is None else max(self.available - self.here[1], 0)

    @property
    def tight_because(self) -> str:
        """Why the run is tight, in words; "" if it is not."""
        return self.explain(in_gb)

    def takes(self, size: Sizer) -> str:
        """Return the run's memory on this card as a share of the available memory, in words."""
        least, most = self.here
        return (
            f"{self.verb} {f'{size(least)} to ' if least != most else ''}{share(most, self.available, size, 'of the')}"
        )

    def needs(self, size: Sizer) -> str:
        """Return the least memory with which the run succeeds, in words."""
        least, other = map(size, self.least_band)
        return f"needs at least {least}" + (f" ({other} if cuDNN's next plans need as much)" if other != least else "")

    def explain(self, size: Sizer) -> str:
        """Explain why the run is tight. size: formats bytes."""
        why = self.why
        if why == GUESSES:
            guess = "it goes through only if cuDNN's next plans need no workspace, which is unknown for this version"
            return f"{guess}; it {self.needs(size)}"
        if why == NO_ROOM:
            freed = f"it goes through because PyTorch frees its cache; with more room it would take {size(self.most)}"
            if self.windows:
                spilled = f"PyTorch's cache grows to {size(self.most)}, and {size(self.most - self.available)} of that"
                freed = f"{spilled} goes to the host's memory, because PyTorch frees its cache only after a refusal"
            return self.no_room or f"{freed}; it {self.needs(size)}"
        if why == MARGINAL and self.upper > self.available:
            reason = "" if self.has_version else ", because no version of PyTorch or cuDNN was named"
            return f"it may take up to {size(self.upper)}{f', {self.between}' if self.between else reason}"
        if why == MARGINAL:
            keeper = "Windows and the CUDA context" if self.windows else "the CUDA context"
            most = f"it may take up to {size(self.upper)}, and " if self.upper > self.most else ""
            return f"{most}{keeper} may keep {size(self.kept_more)} more of the card"
        return self.untried if why == UNTRIED else ""

    def summarize(self, size: Sizer) -> str:
        """Return the verdict in a sentence with its numbers. size: a function that formats bytes."""
        if not self.windows:
            return self._summarize(size)
        first, last = (size(max(self.available - more, 0)) for more in (self.kept_more, 0))
        return f"{self._summarize(size)}; spilling begins between {first} and {last}: from there on {self.windows}"

    def _summarize(self, size: Sizer) -> str:
        told = self.covers + (", from rough data on such a card" if self.coarse else "")
        if self.took is None:
            phase, (name, request) = self.out_of_memory_at or ("", ("", 0))
            there = f"{f'in {phase} ' if phase else ''}at {name}, which tries to allocate {size(request)}"
            short = f", {size(-self.spare)} short" if self.spare < 0 else ""  # on a larger card the run can need more
            needs = f"it {self.needs(size)}, and the card gives {size(self.available)}{self.besides}{short}"
            return f"{self.word}{told}: {needs}; it runs out {there}"
        runs = self.takes(size)
        if self.windows and self.why == NO_ROOM:
            runs = f"could run with {runs.partition(' ')[2]}"
        took = f"it {runs} that the card gives{self.besides}"
        if because := self.explain(size):
            return f"{self.word}{told}: {took}; {because}"
        return f"{self.word}{told}: {took}, at most {size(self.upper)}; {size(self.spare)} to spare"


def describe_spilling(gpu: Gpu, is_windows: bool) -> str:
    """Return the field `windows` of a verdict for a card."""
    return (SPILLS if gpu.name.startswith(("NVIDIA", "sm_")) else SPILLS_ELSEWHERE) if is_windows else ""


def judge_played(
    plays: Plays, here: SimulatedProcess, most: int, took: int, full: tuple[str, PeakTensor] | None, **words: Any
) -> Verdict:  # fmt: skip
    """Judge a request that processes played.

    here: the process on the card
    most, took: bytes that the request takes with room for everything, and on the card
    full: the phase and the request that fails on the card, if one does
    words: fields of `Verdict`
    """
    request, process = plays.request, plays.process
    return Verdict(
        process.available, most, None if full else took, full, plays, kept_more=request.card.kept_more,
        windows=describe_spilling(process.gpu, request.card.is_windows),
        guesses=here.guessed_plans, safe=request.safe, has_version=request.software.has_version,
        coarse=bool(process.gpu.coarse), between=getattr(process.workspace, "between", ""), **words,
    )  # fmt: skip


def judge_phases(
    phases: Sequence[Phase], available: int, sparing: Sequence[Phase] = (), **more: Any
) -> Verdict:  # fmt: skip
    """Judge phases with exact sizes, such as graphs with one buffer each.

    sparing: the phases of the more economical of two ways, if nobody said which way the run goes
    more: further fields of `Verdict`
    """
    most, least = (max(phase.total for phase in one) for one in (phases, sparing or phases))
    full = next((phase for phase in sparing or phases if phase.total > available), None)
    buffer = full and PeakTensor(f"compute buffer of {full.name}", full.activations)
    lacking = full and (full.name, buffer if buffer and buffer.bytes else PeakTensor("weights", full.weights))
    took = most if most <= available else least
    return Verdict(available, most, None if full else took, lacking, least_most=least, **more)
