"""What a request may take, if other workspaces, plans or protocols are the true ones: the bounds of a verdict."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vaemem import _core
from vaemem.prediction.benchmark import PROTOCOLS
from vaemem.prediction.process import SimulatedProcess, Workspaces
from vaemem.prediction.request import ModuleRequest, Request, VAERequest


def bound_of(reserved: int, exact: int = 0) -> int:
    """The most bytes that a process takes if it is predicted to reserve `reserved` bytes: a 16th more, and 20 MiB. The
    `exact` bytes among them, such as weights, get no 16th. csrc/predict/judge.h says where the margin comes from."""
    return _core.judge_bound(reserved, exact)


class Takes(NamedTuple):
    """What a run takes, in bytes: as it was played; the least and the most with any workspaces that may be the true
    ones; and the bound of all of them."""

    own: int
    least: int
    most: int
    bound: int


class Plays:
    """The processes that played a request, and what they would take with other workspaces.

    Parameters
    ----------
    request : Request
    process : SimulatedProcess
        One that played it on a card with room.
    phases : sequence of (int, int)
        For each phase the bytes on the card that its reading leaves out, and the bytes of its reading that are exact.
    search : tuple of (int, int)
        Bytes with which the request does not go through, and bytes with which it does: its least lies between them.
    protocols : sequence of str
        The protocols that the bounds hold for, the request's own first. The last reading of each counts, above its
        baseline. Without them each reading is a phase, and counts as it stands.
    """

    def __init__(
        self, request: Request, process: SimulatedProcess, phases: Sequence[tuple[int, int]], search: tuple[int, int],
        protocols: Sequence[str] = (),
    ):  # fmt: skip
        self.request, self.process, self.phases, self.search = request, process, tuple(phases), search
        self.protocols = tuple(dict.fromkeys(protocols)) or ("",)
        self._above = bool(protocols)
        self._played = {self.protocols[0]: process}

    def least(self, has_other_plans: bool) -> int:
        """The least memory with which the request goes through. has_other_plans: whether cuDNN is taken to have plans
        without workspace if that is not known."""
        return self.process.least(*self.search, has_other_plans)

    @functools.cached_property
    def takes(self) -> Takes:
        """What the request takes by its own protocol. The bound is of every cuDNN unless a version was named."""
        known = set(self._likely)
        rows = [*self._likely, *(row for row in self._every if row not in known)]
        mine = self._take(self.protocols[0], rows, len(self._likely))
        if not self._native:
            return mine
        native = self._native.takes
        return Takes(
            mine.own, min(mine.least, native.least), max(mine.most, native.most), max(mine.bound, native.bound)
        )

    @functools.cached_property
    def bound(self) -> int:
        """The most that the request takes by any of the protocols."""
        bounds = [self._take(protocol, self._every).bound for protocol in self.protocols[1:]]
        return max(self.takes.bound, *bounds, self._native.bound if self._native else 0)

    def low_bounds(self) -> Iterator[int]:
        """Bytes that `bound` is at least, which are soon known: as it was played, and with the largest workspaces."""
        for protocol in self.protocols:
            yield self._take(protocol).bound
        yield self._take(self.protocols[0], sorted(self._every, key=sum)[-1:]).bound

    @functools.cached_property
    def _likely(self) -> list[Workspaces]:
        """Workspaces that may be the true ones with the cuDNN that is predicted."""
        return self.process.alternatives(False)

    @functools.cached_property
    def _every(self) -> list[Workspaces]:
        """Those of every cuDNN, unless a version was named."""
        return self._likely if self.request.software.has_version else self.process.alternatives(True)

    def _take(self, protocol: str, rows: Sequence[Workspaces] = (), likely: int = 0) -> Takes:
        process, first = self._play(protocol) if self._above else (self.process, 0)
        return Takes(*process.takes(self.phases, first, self._above, rows, likely))

    def _play(self, protocol: str) -> tuple[SimulatedProcess, int]:
        """A process that played the same call by a protocol, and the number of the reading that is the protocol's."""
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
        """The same with PyTorch's own allocator, if the driver's pool wastes as much as that does, which is not
        known."""
        request = self.request
        if not isinstance(request, VAERequest) or request.software.allocator != "cudaMallocAsync":
            return None
        software = replace(request.software, allocator="native")
        native = replace(request, software=software, workspace=self.process.workspace)
        process = native.start()
        native.play(process)
        return Plays(native, process, self.phases, self.search, self.protocols)
