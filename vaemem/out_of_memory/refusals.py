"""Play a run with limited room, and compare the refused request with a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MIB
from vaemem.out_of_memory.candidates import AGREES, PLAYED
from vaemem.out_of_memory.messages import SEGMENT_STEP, OomMessage
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.profiles import Conv
from vaemem.prediction.request import Request

STEPS = 4  # iterations to find the room that gives the allocated bytes
SHARP = MIB  # a figure with a smaller error tells runs of rare sizes apart
LOWERED = "[im2col]"  # a copy of a convolution's input for each element of its filter
LEAST_LOWERED = 1 << 31  # elements of input or output; cuDNN before 9.3 refuses larger convolutions


class Storage(NamedTuple):
    """Allocation of a step, or of a lowered convolution. elements: of the larger side, if it is lowered."""

    name: str
    bytes: int
    elements: int = 0


def list_steps(trace: _core.Trace, is_own: bool = False, has_convs: bool = True) -> list[Storage]:
    """List the allocation of each step of a call; 0 bytes for none. is_own: whether PyTorch keeps convolutions of
    videos in half precision from cuDNN, and allocates their columns itself. has_convs: whether columns count."""
    return [
        _lowered(trace.convs[number], name, is_own)
        if op == "conv" and has_convs
        else Storage(name, size if op == "take" else 0)
        for op, number, size, name in trace.steps
    ]


def _lowered(fields: Any, name: str, is_own: bool) -> Storage:
    """Return the columns of a convolution's input; 0 bytes if it needs none."""
    conv = Conv(*fields)
    if is_own and conv.depth and conv.dtype != "float32":
        return Storage(name, _core.im2col_bytes(conv), LEAST_LOWERED)
    return Storage(f"{name.removesuffix(' [workspace]')} {LOWERED}", _core.im2col_bytes(conv), max(conv.elements[:2]))


class Refusable(NamedTuple):
    """A step of a run that may have been refused. before: bytes allocated before it. call: the number of its call."""

    tensor: str
    bytes: int
    before: int
    call: int = 0


class Refusal(NamedTuple):
    """A refused step of a run, the allocator's bytes then, and the number of phases before it."""

    tensor: str
    bytes: int
    allocated: int
    cached: int
    phase: int

    def fit(self, message: OomMessage) -> int:
        """Rate how well it agrees with a message: 0 if its size differs, `PLAYED`, `AGREES`; one more if nothing else
        was on the card."""
        figures, within, (low, high) = message.bytes, message.within, message.range
        if not low < self.bytes <= high:
            return 0
        if not message.tells or abs(self.cached - figures["cached"]) > within["cached"]:
            return PLAYED
        return AGREES + int(abs(self.allocated - figures["allocated"]) <= within["allocated"])


Calls = Sequence[tuple[_core.Trace, Any]]  # each with the most bytes that the process has at each step


class Refusals:
    """Plays a run with different room; each room once.

    play: plays the request on a process by a protocol, and returns its calls. is_own, has_convs: as in `list_steps`
    """

    def __init__(
        self, request: Request, play: Callable[[SimulatedProcess, str | None], Calls], is_own: bool = False,
        has_convs: bool = True,
    ):  # fmt: skip
        self._request, self._play, self._process = request, play, request.start()
        self._is_own, self._has_convs = is_own, has_convs
        self._known: dict[int, Refusal | None] = {}
        self._calls = play(self._process, "cold")

    @property
    def plays(self) -> int:
        """Number of plays so far."""
        return len(self._known) + 1

    def requests(self, message: OomMessage) -> list[Refusable]:
        """List steps that may have been refused: everything before them fitted."""
        low, high = message.range
        most, found = 0, dict[Refusable, None]()
        for number, (trace, heights) in enumerate(self._calls):
            now = 0
            if not (self._has_convs or trace.wants(low, high, False, 1 << 62)):
                most = max([most, *heights.tolist()])
                continue
            steps = list_steps(trace, self._is_own, self._has_convs)
            for (op, *_), storage, height in zip(trace.steps, steps, heights.tolist(), strict=True):
                may_fail = op != "conv" or message.may_lower or storage.elements >= LEAST_LOWERED
                if may_fail and low < storage.bytes <= high and most <= now + max(message.spare, storage.bytes):
                    found[Refusable(storage.name, storage.bytes, now, number)] = None
                if op != "conv":
                    now = height  # for a convolution it includes the workspace, which is free again
                    most = max(most, now)
        return list(found)

    def phase_of(self, refusal: Refusal) -> str:
        """Return the name of the phase in which a refusal is; "" if the run has no phases."""
        is_known = refusal.phase < len(self._process.readings)
        return str(self._process.counted(refusal.phase)["name"]) if is_known else ""

    def at(self, room: int) -> Refusal | None:
        """Return the refusal with this room in bytes; None if the run fits."""
        room = max(room // SEGMENT_STEP * SEGMENT_STEP, SEGMENT_STEP)
        if room not in self._known:
            process = self._request.start(self._process.workspace, total_memory=room)
            self._known[room] = None
            try:
                self._play(process, None)
            except _core.OutOfMemoryError as full:
                cached = full.reserved - full.allocated
                name, phase = process.frames[full.tag], len(process.readings)
                self._known[room] = Refusal(name, full.requested, full.allocated, cached, phase)
        return self._known[room]

    def fits(self, message: OomMessage, unloaded: int) -> dict[Refusable, int]:
        """Rate each request, as `Refusal.fit`. unloaded: bytes of the run's weights that may be missing on the card."""
        figures, within = message.bytes, message.within
        allocated = figures.get("allocated")
        fits = {
            one: PLAYED * one.tensor.endswith(LOWERED)  # no simulated library has these: they look alike
            for one in self.requests(message)
            if allocated is None or allocated >= one.before - within["allocated"] - unloaded
        }
        if allocated is None or "free" not in figures:
            return fits
        cached, unsure = figures.get("cached", 0), within.get("cached", 0) + within["free"]
        for more in (0, *((unsure, -unsure) if unsure > SHARP else ()), -cached):
            for request in fits:
                if not request.tensor.endswith(LOWERED):
                    fits[request] = max(fits[request], self._fit(message, request, cached + figures["free"] + more))
            best = max(fits.values(), default=0)
            if best > PLAYED or (best and more):
                break
        return fits

    def _fit(self, message: OomMessage, request: Refusable, spare: int) -> int:
        """Rate one request with `spare` bytes cached and free."""
        before, best = request.before, 0
        for _ in range(STEPS):
            full = self.at(before + spare)
            if full is None or full.tensor != request.tensor or not (fit := full.fit(message)):
                break
            best = max(best, fit)
            if before == full.allocated:
                break
            before = full.allocated
        return best
