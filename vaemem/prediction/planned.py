"""One way of running a pipeline, and what each of its phases takes, whoever's code runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class PlannedPhase(NamedTuple):
    """What one phase of a way takes.

    Attributes
    ----------
    name : str
        load, encode prompt, denoise, decode.
    weights : int
        Bytes of components that are on the card at the phase's height.
    added : int
        Bytes beside these: tensors, workspaces, what an allocator keeps.
    work : dict of str to float
        What it does, for `vaemem.prediction.seconds.Machine`; of load, the bytes of all weights, as ``"disk"``.
    """

    name: str
    weights: int
    added: int
    work: Mapping[str, float]

    @property
    def total(self) -> int:
        """Bytes on the card."""
        return self.weights + self.added


class Way(NamedTuple):
    """One way of running a pipeline.

    Attributes
    ----------
    name : str
    settings : dict
        How it is asked for: arguments of `predict_pipeline`; or options of stable-diffusion.cpp, which its `offload`
        takes.
    phases : tuple of PlannedPhase
    host : int
        Bytes of the host's memory for weights and buffers that are not on the card.
    changes : str
        What it changes of the picture; "" for nothing.
    notes : tuple of str
        What was taken for granted.
    out : tuple of (str, int), optional
        The phase in which memory runs out, and the bytes that the card lacks for the whole run, where that was played:
        PyTorch gives cached memory back before it gives up. Else a phase fits where its total does.
    played : bool
        Whether `out` is what decides.
    unsure : str
        What it rests on that the way fits, and is not known; "" for nothing.
    """

    name: str
    settings: Mapping[str, Any]
    phases: tuple[PlannedPhase, ...]
    host: int = 0
    changes: str = ""
    notes: tuple[str, ...] = ()
    out: tuple[str, int] | None = None
    played: bool = False
    unsure: str = ""

    @property
    def work(self) -> dict[str, float]:
        """The work of all its phases but load, which comes once for many pictures."""
        total: dict[str, float] = {}
        for phase in (one for one in self.phases if one.name != "load"):
            for name, amount in phase.work.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @property
    def peak(self) -> PlannedPhase:
        """The phase that takes most, the first of equals."""
        return max(self.phases, key=lambda phase: phase.total)
