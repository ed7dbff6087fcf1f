"""Bound the memory of a request over other workspaces, plans and protocols: the bounds of a verdict."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vaemem.prediction.benchmark import PROTOCOLS
from vaemem.prediction.process import SimulatedProcess, Workspaces
from vaemem.prediction.request import ModuleRequest, Request, VAERequest


class Takes(NamedTuple):
    """The memory of a run, in bytes: as played; the least and the most over every plausible set of workspaces; and the
    upper bound."""

    own: int
    least: int
    most: int
    bound: int


class Plays:
    """The processes that played a request, and the memory that they would take with other workspaces.

    Parameters
    ----------
    request : Request
    process : SimulatedProcess
        A process that played the request on a card with room.
    phases : sequence of (int, int)
        For each phase the bytes on the card that its reading leaves out, and the bytes of its reading that are exact.
    search : tuple of (int, int)
        Bytes with which the request fails, and bytes with which it succeeds. The least sufficient bytes lie between
        these two.
    protocols : sequence of str
        The protocols that the bounds hold for, the request's own first. The last reading of each protocol counts, above
        the reading's baseline. Without protocols each reading is a phase, and counts in full.
    """

    def __init__(
        self, request: Request, process: SimulatedProcess, phases: Sequence[tuple[int, int]], search: tuple[int, int],
        protocols: Sequence[str] = (),
    ):  # fmt: skip
        self.request, self.process, self.phases, self.search = request, process, tuple(phases), search
        self.protocols = tuple(dict.fromkeys(protocols)) or ("",)
        self._above = bool(protocols)
        self._played, self._least = {self.protocols[0]: process}, dict[bool, int]()

    def least(self, has_other_plans: bool) -> int:
        """Find the least memory with which the request succeeds. has_other_plans: whether to assume that cuDNN has
        plans without workspace if that is unknown."""
        assumed = has_other_plans or self.process.knows_plans
        if assumed not in self._least:
            self._least[assumed] = self.process.least(*self.search, assumed)
        return self._least[assumed]

    @functools.cached_property
    def takes(self) -> Takes:
        """Return the request's memory by its own protocol. The bound covers every cuDNN unless a version was named, and
        other protocols if the same process played them."""
        known = set(self._likely)
        rows = [*self._likely, *(row for row in self._every if row not in known)]
        process, first = self._play(self.protocols[0])
        also = [number for other, number in map(self._play, self.protocols[1:]) if other is process]
        mine = self._take(process, first, rows, len(self._likely), also)
        if not self._native:
            return mine
        native = self._native.takes
        return Takes(
            mine.own, min(mine.least, native.least), max(mine.most, native.most), max(mine.bound, native.bound)
        )

    @functools.cached_property
    def bound(self) -> int:
        """The most that the request takes by any protocol."""
        others = [one for one in map(self._play, self.protocols[1:]) if one[0] is not self.process]
        bounds = [self._take(process, first, self._every).bound for process, first in others]
        return max(self.takes.bound, *bounds, self._native.bound if self._native else 0)

    def low_bounds(self) -> Iterator[int]:
        """Yield lower bounds of `bound` that are quick to compute: as each protocol played."""
        for protocol in self.protocols:
            yield self._take(*self._play(protocol)).bound

    @functools.cached_property
    def _likely(self) -> list[Workspaces]:
        """Return the plausible sets of workspaces for the predicted cuDNN."""
        return self.process.alternatives(False)

    @functools.cached_property
    def _every(self) -> list[Workspaces]:
        """Plausible sets of workspaces for every cuDNN, unless a version was named."""
        return self._likely if self.request.software.has_version else self.process.alternatives(True)

    def _take(
        self, process: SimulatedProcess, first: int, rows: Sequence[Workspaces] = (), likely: int = 0,
        also: Sequence[int] = (),
    ) -> Takes:  # fmt: skip
        """Return `takes` for a process's readings from number `first` on. also: more readings, for the bound alone."""
        bounds = dict.fromkeys(also, self.phases[0])
        return Takes(*process.takes(self.phases, first, self._above, rows, likely, bounds))

    def _play(self, protocol: str) -> tuple[SimulatedProcess, int]:
        """Return a process that played the same call by a protocol, and the number of the protocol's reading."""
        if not self._above:
            return self.process, 0
        if protocol == "cold":
            for other, process in self._played.items():
                if len(process.readings) > PROTOCOLS[other].runs or not PROTOCOLS[other].warmups:
                    return process, 0
        if protocol not in self._played:
            assert isinstance(self.request, VAERequest | ModuleRequest)
            self._played[protocol] = self.request.start(self.process.workspace)
            self.request.play(self._played[protocol], protocol)
        process = self._played[protocol]
        return process, len(process.readings) - 1

    @functools.cached_property
    def _native(self) -> Plays | None:
        """The same plays with PyTorch's own allocator. Nobody knows whether the driver's pool wastes as much as that
        allocator."""
        request = self.request
        if not isinstance(request, VAERequest) or request.software.allocator != "cudaMallocAsync":
            return None
        software = replace(request.software, allocator="native")
        native = replace(request, software=software, workspace=self.process.workspace)
        process = native.start()
        native.play(process)
        return Plays(native, process, self.phases, self.search, self.protocols)
