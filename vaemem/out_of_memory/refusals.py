"""What a VAE's run is refused where there is so much room, and how well that agrees with a message."""

from __future__ import annotations

from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MIB
from vaemem.out_of_memory.messages import SEGMENT_STEP, Said
from vaemem.prediction.profiles import Conv
from vaemem.prediction.request import VAERequest
from vaemem.prediction.workspace import im2col_bytes

PLAYED, AGREES, ALONE = 1, 2, 3  # fits: refused there; with what the message says; and nothing else on the card
STEPS = 4  # towards what was allocated, of which the room follows
SHARP = MIB  # a figure that is known to less tells runs of rare sizes apart
LOWERED = "[im2col]"  # a convolution's input, copied once for each element of its filter
LEAST_LOWERED = 1 << 31  # elements, of input or output, from which cuDNN before 9.3 takes no convolution


class Storage(NamedTuple):
    """What a step takes, or of a convolution would take; elements: where it is lowered, those of its larger side."""

    name: str
    bytes: int
    elements: int = 0


def storages_of(trace: _core.Trace) -> list[Storage]:
    """What each step of a call takes; 0 bytes where it takes none."""
    return [
        _lowered(trace.convs[number], name) if op == "conv" else Storage(name, size if op == "take" else 0)
        for op, number, size, name in trace.steps
    ]


def _lowered(question: Any, name: str) -> Storage:
    """The columns of a convolution's input; no bytes where it needs none."""
    conv = Conv(*question)
    return Storage(f"{name.removesuffix(' [workspace]')} {LOWERED}", im2col_bytes(conv), max(conv.elements[:2]))


class Refusable(NamedTuple):
    """A step of a run that may have been refused; before: bytes allocated then."""

    tensor: str
    bytes: int
    before: int


class Refusal(NamedTuple):
    """What a run was refused, and what it had then."""

    tensor: str
    bytes: int
    allocated: int
    cached: int
    free: int


class Refusals:
    """A run that is played with more or less room, each room once."""

    def __init__(self, request: VAERequest):
        self._request, self._process = request, request.start()
        self._known: dict[int, Refusal | None] = {}
        request.play(self._process, "cold")

    @property
    def plays(self) -> int:
        return len(self._known) + 1

    def requests(self, said: Said) -> list[Refusable]:
        """The steps that may have been refused: what was allocated before them fitted."""
        assert self._process.last_call is not None
        trace, heights, _ = self._process.last_call
        low, high = said.range
        now, most, found = 0, 0, dict[Refusable, None]()
        for (op, *_), storage, height in zip(trace.steps, storages_of(trace), heights.tolist(), strict=True):
            is_asked = op != "conv" or said.is_lowered or storage.elements >= LEAST_LOWERED
            if is_asked and low < storage.bytes <= high and most <= now + max(said.spare, storage.bytes):
                found[Refusable(storage.name, storage.bytes, now)] = None
            if op != "conv":
                now = height  # a convolution's has its workspace, which it has given back
                most = max(most, now)
        return list(found)

    def at(self, room: int) -> Refusal | None:
        """What is refused where there is so much room; None where the run goes through."""
        room = max(room // SEGMENT_STEP * SEGMENT_STEP, SEGMENT_STEP)
        if room not in self._known:
            process = self._request.start(self._process.workspace, total_memory=room)
            self._known[room] = None
            try:
                self._request.play(process)
            except _core.OutOfMemoryError as full:
                cached = full.reserved - full.allocated
                refusal = Refusal(process.frames[full.tag], full.requested, full.allocated, cached, full.free)
                self._known[room] = refusal
        return self._known[room]

    def fits(self, said: Said, least: int) -> dict[Refusable, int]:
        """How well each request's refusal agrees with the message: `ALONE`, `AGREES`, `PLAYED` or 0. least: bytes of
        the run's that may not have been on the card, at the most."""
        figures, within = said.bytes, said.within
        allocated = figures.get("allocated")
        fits = {
            one: PLAYED * one.tensor.endswith(LOWERED)  # which no simulated library takes: it cannot be told apart
            for one in self.requests(said)
            if allocated is None or allocated >= one.before - within["allocated"] - least
        }
        if allocated is None or "free" not in figures:
            return fits
        cached, unsure = figures.get("cached", 0), within.get("cached", 0) + within["free"]
        for more in (0, *((unsure, -unsure) if unsure > SHARP else ()), -cached):
            for request in fits:
                if not request.tensor.endswith(LOWERED):
                    fits[request] = max(fits[request], self._fit(said, request, cached + figures["free"] + more))
            best = max(fits.values(), default=0)
            if best > PLAYED or (best and more):
                break
        return fits

    def _fit(self, said: Said, request: Refusable, spare: int) -> int:
        """The same of one request, where so much was cached and free."""
        figures, within, best = said.bytes, said.within, 0
        before, (low, high) = request.before, said.range
        for _ in range(STEPS):
            full = self.at(before + spare)
            if full is None or full.tensor != request.tensor or not low < full.bytes <= high:
                break
            agrees = said.tells and abs(full.cached - figures["cached"]) <= within["cached"]
            is_alone = abs(full.allocated - figures["allocated"]) <= within["allocated"]
            best = max(best, PLAYED + agrees * (1 + is_alone))
            if before == full.allocated:
                break
            before = full.allocated
        return best
