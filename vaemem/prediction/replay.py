"""A recorded history of the CUDA caching allocator, replayed on the simulated allocator."""

from __future__ import annotations

import contextlib
import itertools
import os
from bisect import bisect
from collections.abc import Iterator
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MIB, choose, whole
from vaemem._errors import ArgumentError
from vaemem._render import Bullets, Columns, Sheet, Shown, Sizer, in_mib
from vaemem.prediction.caching_allocator import (
    INTERVALS,
    CachingAllocator,
    check_snapshot,
    load_snapshot,
    parse_conf,
    want,
)

_ACTIONS = (
    "segment_alloc", "segment_free", "segment_map", "segment_unmap", "alloc", "free_requested", "free_completed",
)  # fmt: skip
_Event = tuple[str, int, int, int]  # one of these actions, and its address, size and stream


class _Block(NamedTuple):
    address: int
    size: int
    requested: int
    pending: bool


class _Segment(NamedTuple):
    address: int
    size: int
    stream: int
    small: bool
    blocks: list[_Block]
    expandable: bool = False
    private: bool = False


def _number(item: dict[str, Any], key: str, what: str, default: int | None = None) -> int:
    """Read an address, a stream or a size. PyTorch's allocator refuses sizes of 2^60 and more."""
    value: Any = item.get(key, default)
    bits = 60 if key.endswith("size") else 62
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << bits
    want(good, f"{what} with {key!r} as an integer from 0 to 2^{bits}", value)
    return int(value)


def _read_trace(trace: Any) -> list[_Event]:
    """Read the events that changed memory."""
    want(isinstance(trace, list), "lists in 'device_traces'", trace)
    events = []
    for entry in trace:
        want(isinstance(entry, dict), "dicts in a trace", entry)
        action = entry.get("action")
        if action in _ACTIONS:  # not snapshot, oom, user_defined: no memory moves
            what = f"an entry {action!r}"
            address, size = _number(entry, "addr", what), _number(entry, "size", what)
            events.append((action, address, size, _number(entry, "stream", what, 0)))
    return events


def _read_segments(segments: list[Any], device: int) -> list[_Segment]:
    """Read the device's segments at the end."""
    result = []
    seen: set[int] = set()
    for segment in segments:
        want(isinstance(segment, dict), "dicts in 'segments'", segment)
        if segment.get("device", 0) != device:
            continue
        pool = segment.get("segment_pool_id", (0, 0))
        want(isinstance(pool, tuple | list) and len(pool) == 2, "a pair under 'segment_pool_id'", pool)
        address, size = (_number(segment, key, "a segment") for key in ("address", "total_size"))
        stream, small = _number(segment, "stream", "a segment", 0), segment.get("segment_type") == "small"
        expandable, private = bool(segment.get("is_expandable", False)), tuple(pool) != (0, 0)
        found = _Segment(address, size, stream, small, [], expandable, private)
        blocks = segment.get("blocks")
        want(isinstance(blocks, list), "a list of 'blocks'", blocks)
        # A pickle can name one list many times in a few bytes. Reading it again each time would take quadratic memory.
        want(not blocks or id(blocks) not in seen, "a list of 'blocks' for each segment", "one list for two of them")
        seen.add(id(blocks))
        for block in blocks:
            want(isinstance(block, dict), "dicts in 'blocks'", block)
            size = _number(block, "size", "a block")
            if block.get("state") != "inactive":
                requested = _number(block, "requested_size", "a block", size)
                found.blocks.append(_Block(address, size, requested, block.get("state") != "active_allocated"))
            address += size
        result.append(found)
    return result


# ---- replay ----


class Replay(Shown):
    """A recorded history, compared with the simulated allocator's answers to the same requests. It prints MiB.

    Attributes
    ----------
    device, events : int
        The device, and the number of entries in its trace that moved memory.
    whole : bool
        The trace begins with an empty allocator and misses nothing.
    why_not : list of str
        The missing parts if the trace is not whole. The replay of such a trace starts with the blocks from before the
        trace, rebuilt from the snapshot's end.
    recorded_reserved, simulated_reserved : int
        Bytes reserved at the end.
    recorded_reserved_peak, simulated_reserved_peak : int
        The most bytes reserved over the trace.
    recorded_segments, simulated_segments : int
        Segments at the end (mapped stretches if segments are expandable).
    recorded_allocated, simulated_allocated : int
        Bytes in live blocks at the end.
    first_difference : str or None
        The first event at which the record and the simulated allocator differ.
    imposed_releases : int
        Segments freed because the record frees them: a limit or a threshold freed some cached segments, not all.
    allocator : CachingAllocator
        The simulated allocator after the last event.

    Examples
    --------
    >>> predict("sdxl", "decode", 512, 512, "float16").save_snapshot("history.pickle")
    >>> print(replay("history.pickle"))
    The simulated allocator does as recorded, in 2966 events of device 0.
    <BLANKLINE>
                      recorded   simulated
    reserved          1268 MiB    1268 MiB
    reserved, peak    1268 MiB    1268 MiB
    allocated       172.94 MiB  172.94 MiB
    segments                27          27
    """

    def __init__(self, device: int, events: int, why_not: list[str], final: list[_Segment], player: _Player):
        """final: the record's segments at its end; player: the player after all events."""
        self.device, self.events, self.whole, self.why_not = device, events, not why_not, why_not
        self.recorded_reserved = sum(segment.size for segment in final)
        self.recorded_reserved_peak = player.recorded_peak
        self.recorded_segments = len(final)
        self.recorded_allocated = sum(b.size for segment in final for b in segment.blocks if not b.pending)
        self.allocator = allocator = player.allocator
        self.simulated_reserved = allocator.memory_reserved()
        self.simulated_reserved_peak = allocator.max_memory_reserved()
        self.simulated_segments = sum(first for first, *_ in allocator._blocks())
        self.simulated_allocated = allocator.memory_allocated()
        self.first_difference, self.imposed_releases = player.difference, player.imposed

    @property
    def same(self) -> bool:
        """Reserved bytes (end and peak), segments and allocated bytes agree, and no event differed."""
        return self.first_difference is None and self._side("recorded") == self._side("simulated")

    def _side(self, name: str) -> dict[str, int]:
        counters = ("reserved_bytes", "reserved_peak_bytes", "allocated_bytes", "segments")
        return {counter: getattr(self, f"{name}_{counter.removesuffix('_bytes')}") for counter in counters}

    def _data(self) -> dict[str, Any]:
        names = ("same", "device", "events", "whole", "why_not", "first_difference", "imposed_releases")
        sides = {name: self._side(name) for name in ("recorded", "simulated")}
        return {"answer": "replay"} | {name: getattr(self, name) for name in names} | sides

    def _sheet(self, size: Sizer) -> Sheet:
        how = "does as recorded" if self.same else "does not do as recorded"
        pairs = zip(self._side("recorded").items(), self._side("simulated").values(), strict=True)
        rows = [
            (name.removesuffix("_bytes").replace("_", ", "), *map(str if name == "segments" else in_mib, (one, other)))
            for (name, one), other in pairs
        ]
        notes = [f"The first difference: {self.first_difference}."] * bool(self.first_difference)
        notes += [f"Segments given back as recorded: {self.imposed_releases}."] * bool(self.imposed_releases)
        notes += [f"The history is not whole: {reason}." for reason in self.why_not]
        headline = f"The simulated allocator {how}, in {self.events} events of device {self.device}."
        return Sheet(headline, [Columns(("", "recorded", "simulated"), rows), Bullets(notes)])


def replay(
    snapshot: dict[str, Any] | str | os.PathLike[str],
    device: int | None = None,
    addresses: str = "recorded",
    **settings: Any,
) -> Replay:
    """Feed the requests of a recorded history to the simulated allocator, and compare the two.

    The record gives the requests, the frees, and the moments at which cached segments went back to the device.
    The simulation decides which block serves a request, when it is split or merged, and when a new segment is taken.

    Parameters
    ----------
    snapshot : dict or path
        From ``torch.cuda.memory._snapshot()``, or its pickle (see `load_snapshot`).
    device : int, optional
        Needed if more than one device has a trace.
    addresses : {"recorded", "model"}
        The place of new segments: the record's, so that every address can be compared, or the model's, as in a
        prediction. With "model" the cache is emptied whenever the record gives any segment back.
    **settings
        Arguments of `CachingAllocator` that replace the snapshot's settings.

    Raises
    ------
    ValueError
        The argument is not a snapshot, or it holds no trace.

    Examples
    --------
    >>> predict("flux", "encode", 512, 512).save_snapshot("history.pickle")
    >>> found = replay("history.pickle")
    >>> found.whole, found.same
    (True, True)
    """
    choose("addresses", addresses, ("recorded", "model"))
    snapshot = check_snapshot(snapshot) if isinstance(snapshot, dict) else load_snapshot(snapshot)
    traces = snapshot["device_traces"]
    with_trace = [i for i, trace in enumerate(traces) if trace]
    shown = f"[{', '.join(map(str, with_trace[:8]))}{', ...' if len(with_trace) > 8 else ''}]"
    if not with_trace:
        raise ArgumentError("snapshot", "a trace", "none", "torch.cuda.memory._record_memory_history was not on")
    if device is None and len(with_trace) == 1:
        device = with_trace[0]
    device = device if device is None else whole("device", device, 0)
    if device not in with_trace:
        raise ArgumentError("device", f"one of {shown}, which have a trace", repr(device))
    events = _read_trace(traces[device])
    final = _read_segments(snapshot["segments"], device)
    allocator = CachingAllocator(**{**_recorded_settings(snapshot), **_room(events), **settings})
    start, holes = _find_start(events, final, allocator)
    if any(segment.private for segment in final):
        holes.append("segments of private pools (CUDA graphs), which are not modelled")
    player = _Player(allocator, start, addresses == "recorded")
    for index, event in enumerate(events):
        player.step(index, *event)
    player.finish(len(events))
    return Replay(device, len(events), holes, final, player)


def _recorded_settings(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of CachingAllocator. The collection threshold depends on a limit that no snapshot names, so
    the record gives the segments that it freed."""
    recorded = snapshot.get("allocator_settings") or {}
    want(isinstance(recorded, dict), "a dict under 'allocator_settings'", recorded)
    result: dict[str, Any] = {"expandable_segments": recorded.get("expandable_segments") is True}
    split = recorded.get("max_split_size", -1)
    if isinstance(split, int) and not isinstance(split, bool) and 0 < split < 1 << 60:
        result["max_split_size_mb"] = split // MIB
    conf, rounding = recorded.get("PYTORCH_CUDA_ALLOC_CONF", ""), "max_non_split_rounding_mb"
    if isinstance(conf, str) and rounding in conf:
        result[rounding] = parse_conf(conf).get(rounding)
    divisions = recorded.get("roundup_power2_divisions", {})
    if isinstance(divisions, dict) and len(divisions) == INTERVALS:
        for value in divisions.values():
            is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 32
            want(is_count, "divisions from 0 to 2^32", value)
        result["roundup_power2_divisions"] = list(divisions.values())
    return result


def _room(events: list[_Event]) -> dict[str, int]:
    """Return how many addresses an expandable segment may have without reaching the next one.

    PyTorch reserves 1 1/8 of the device's memory, which no snapshot names. Small pools are mapped 2 MiB at a time,
    large ones 20 MiB or more.
    """
    base: dict[tuple[int, bool], int] = {}
    for action, address, size, stream in events:
        if action == "segment_map":
            base.setdefault((stream, size == 2 * MIB), address)
    at = sorted(set(base.values()))
    gaps = [above - below for below, above in itertools.pairwise(at)]
    return {"reservation": min(1 << 40, *gaps)} if gaps else {}


def _find_start(
    events: list[_Event], final: list[_Segment], allocator: CachingAllocator
) -> tuple[list[_Segment], list[str]]:
    """Find the allocator's state before the first event, and the gaps in the history.

    Undo the events from last to first, to get from the final state to the state before: a segment or block that an
    event frees was there, and one that it allocates was not. Between live blocks a segment is free, because free
    neighbours are always merged.
    """
    segments = {one.address: one._replace(blocks=[]) for one in final if not one.expandable}
    live = {b.address: b for segment in final for b in segment.blocks}
    following = dict.fromkeys(live, "stands")  # the next event of the block at an address
    first: dict[int, int] = {}  # the event that is the first about a block
    mapped = -sum(one.size for one in final if one.expandable)  # bytes by the record, less the final ones
    lost_frees = lost_allocs = lost_segments = 0
    for index, (action, address, size, stream) in reversed([*enumerate(events)]):
        if action == "segment_alloc":
            lost_segments += segments.pop(address, None) is None
        elif action == "segment_free":
            lost_segments += address in segments
            segments[address] = _Segment(address, size, stream, size == 2 * MIB, [])
        elif action in ("segment_map", "segment_unmap"):
            mapped += size if action == "segment_map" else -size
        else:
            after, following[address], first[address] = following.get(address), action, index
            lost_frees += action != "free_completed" and after == "alloc"
            lost_allocs += action == "free_completed" and after not in (None, "alloc")
            if action == "alloc":
                live.pop(address, None)
            else:
                live[address] = _Block(address, 0, size, action == "free_completed")
    blocks = [b._replace(size=_size_shown(b, first, allocator)) if b.address in first else b for b in live.values()]
    start = [segments[address] for address in sorted(segments)]
    unplaced = _place_blocks(start, sorted(blocks), allocator)
    older = f"segments ({sum(s.size for s in start) / MIB:.0f} MiB) are older than the trace"
    holes = [
        (abs(mapped), "bytes of expandable segments were mapped before the trace began; they are not rebuilt"),
        (len(start), older),
        (len(live), "blocks are older than the trace"),
        (unplaced, "of them lie in no segment that could be rebuilt"),
        (lost_frees, "blocks are allocated in place of blocks that the trace does not free"),
        (lost_allocs, "blocks are freed, or live at the end, that the trace does not allocate"),
        (lost_segments, "segments were allocated but neither freed nor there at the end, or the other way round"),
    ]
    return start, [f"{count} {what}" for count, what in holes if count]


def _size_shown(b: _Block, first: dict[int, int], allocator: CachingAllocator) -> int:
    """Return the size of a block older than the trace if a neighbour allocated in its lifetime shows its end, or 0.

    In the large pool a block may keep a tail of up to 1 MiB. The next block begins right after it.
    """
    end = b.address + allocator.rounded_size(b.requested)
    if end - b.address <= MIB:
        return end - b.address
    neighbours = range(end, end + MIB + 512, 512)
    return next((at - b.address for at in neighbours if at in first and first[at] < first[b.address]), 0)


def _place_blocks(segments: list[_Segment], blocks: list[_Block], allocator: CachingAllocator) -> int:
    """Put each block into its segment, both by address. Return the number of blocks without a segment."""
    unplaced, starts = 0, [segment.address for segment in segments]
    for i, b in enumerate(blocks):
        at = bisect(starts, b.address) - 1
        end = starts[at] + segments[at].size if at >= 0 else 0
        limit = min([end, *(after.address for after in blocks[i + 1 : i + 2])])
        size = b.size
        if not size:
            # It is freed in the trace and nothing shows its end. A free block after it would be larger than 1 MiB.
            size = allocator.rounded_size(b.requested)
            if limit - b.address - size <= MIB:
                size = limit - b.address
        if b.address < end and b.address + size <= limit:
            segments[at].blocks.append(_Block(b.address, size, min(b.requested, size), b.pending))
        else:
            unplaced += 1
    return unplaced


class _Player:
    """Steps through a record and the simulated allocator together."""

    def __init__(self, allocator: CachingAllocator, start: list[_Segment], placed: bool) -> None:
        self.allocator = allocator
        self.placed = placed
        self.difference: str | None = None
        self.imposed = 0
        self.address: dict[int, int] = {}  # recorded -> simulated, of live blocks
        self.given_back: list[tuple[str, int]] = []  # a run of recorded segment_free and segment_unmap
        self.taken: list[int] = []  # recorded segment_alloc and segment_map that the next alloc explains
        for s in start:
            with self.noting("before the trace"):
                allocator._restore(s.address, s.size, s.stream, s.small, s.blocks)
                self.address.update((b.address, b.address) for b in s.blocks)
        allocator.reset_peak_stats()
        self.recorded = self.recorded_peak = sum(s.size for s in start)

    def differ(self, text: str) -> None:
        self.difference = self.difference or text

    def compare_reserved(self, when: str, before: str = "") -> None:
        reserved = self.allocator.memory_reserved()
        if reserved != self.recorded:
            recorded = f"{self.recorded} bytes are reserved in the record"
            self.differ(f"{when} {recorded}, {reserved}{before} in the simulation")

    @contextlib.contextmanager
    def noting(self, where: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self.differ(f"{where}: {error}")

    def step(self, index: int, action: str, address: int, size: int, stream: int) -> None:
        if action in ("segment_free", "segment_unmap"):
            self.given_back.append((action, address))
            self.recorded -= size
            return
        if self.given_back:
            self.give_back(index)
        if action in ("segment_alloc", "segment_map"):
            self.taken.append(address)
            self.recorded += size
            self.recorded_peak = max(self.recorded_peak, self.recorded)
        elif action == "alloc":
            self.take(index, address, size, stream)
        elif address in self.address:
            done = action == "free_completed"
            with self.noting(f"event {index} ({action})"):
                self.allocator.free(self.address.pop(address) if done else self.address[address], pending=not done)

    def take(self, index: int, address: int, size: int, stream: int) -> None:
        what, before = f"event {index} (alloc of {size} bytes)", self.allocator.memory_reserved()
        if self.placed:
            self.allocator._place(self.taken[0] if self.taken else 0)
        try:
            got = self.allocator.malloc(size, stream)
        except _core.OutOfMemoryError as error:
            self.differ(f"event {index}: {size} bytes were served, the simulation has none left: {error}")
            return
        finally:
            self.taken.clear()
        self.allocator._place(0)
        if old := self.address.get(address):  # a free that the record lost
            with self.noting(what):
                self.allocator.free(old)
        self.address[address] = got
        self.compare_reserved(f"{what}:", f" (before it: {before})")
        if self.placed and got != address:
            self.differ(f"{what}: at {address:#x} in the record, {got:#x} in the simulation")

    def give_back(self, index: int) -> None:
        """Free segments. The record does not say why they went: empty the cache if all could, otherwise follow it."""
        run, self.given_back = self.given_back, []
        self.taken.clear()  # the freed pages include those mapped for a request that then failed
        frees = {address for action, address in run if action == "segment_free"}
        if not self.placed or len(frees) < len(run):
            self.allocator.empty_cache()
        else:
            known = 0
            for address in frees:
                with contextlib.suppress(ValueError):  # it is not whole here
                    self.allocator._release(address)
                    known += 1
            if known < len(frees):
                self.differ(
                    f"event {index}: the record gives back {len(frees)} segments, {known} of them are whole here"
                )
            if self.allocator._has_whole_segment():
                self.imposed += known
        self.compare_reserved(f"event {index}: after giving segments back")

    def finish(self, index: int) -> None:
        if self.given_back:
            self.give_back(index)
        if self.taken:
            self.differ(f"event {index}: the record takes a segment that serves no request")
