"""What a request may take, if other workspaces, plans or protocols are the true ones: the bounds of a verdict."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

from vaemem import _core
from vaemem._common import distinct
from vaemem.prediction.benchmark import PROTOCOLS
from vaemem.prediction.process import SimulatedProcess, Workspaces
from vaemem.prediction.request import ModuleRequest, Request, VAERequest


def bound_of(reserved: int, exact: int = 0) -> int:
    """The most bytes that a process takes if it is predicted to reserve `reserved` bytes: a 16th more, and 20 MiB. The
    `exact` bytes among them, such as weights, get no 16th. csrc/predict/judge.h says where the margin comes from."""
    return _core.judge_bound(reserved, exact)


class Plays:
    """The processes that played a request, and what they would reserve with other workspaces.

    Parameters
    ----------
    request : Request
    process : SimulatedProcess
        One that played it on a card with room.
    others : sequence of (int, int)
        For each phase the bytes on the card that its reading leaves out, and the bytes of its reading that are exact.
    search : tuple of (int, int)
        Bytes with which the request does not go through, and bytes with which it does: its least lies between them.
    protocols : sequence of str
        The protocols that the bounds hold for, the request's own first. The last reading of each counts, above its
        baseline. Without them each reading is a phase, and counts as it stands.
    """

    def __init__(
        self, request: Request, process: SimulatedProcess, others: Sequence[tuple[int, int]], search: tuple[int, int],
        protocols: Sequence[str] = (),
    ):  # fmt: skip
        self.request, self.process, self.others, self.search = request, process, others, search
        self.protocols = tuple(dict.fromkeys(protocols)) or ("",)
        self._above = bool(protocols)
        self._played = {self.protocols[0]: process}
        self._every = not request.software.has_version
        self._workspaces: dict[bool, list[Workspaces]] = {}

    def least(self, has_other_plans: bool) -> int:
        """The least memory with which the request goes through. has_other_plans: whether cuDNN is taken to have plans
        without workspace if that is not known."""
        return self.process.least(*self.search, has_other_plans)

    def totals(self) -> Iterator[int]:
        """What the request takes as it was played; then what it takes with each set of workspaces that may be the true
        one."""
        beside = [size for size, _ in self.others]
        for row in self.rows(self.protocols[0], self._alternatives(False)):
            yield max(map(operator.add, row, beside))
        if self._native:
            yield from self._native.totals()

    def bounds(self) -> Iterator[int]:
        """The most that the request takes by each protocol, with any workspaces that may be the true ones: those of
        every cuDNN unless a version was named."""
        every, near = self._alternatives(self._every), self._alternatives(False)
        yield self._bound(self.rows(self.protocols[0], distinct([*every, *near])))
        for protocol in self.protocols[1:]:
            yield self._bound(self.rows(protocol, every))
        if self._native:
            yield from self._native.bounds()

    def first_bounds(self) -> Iterator[int]:
        """Lower ones that are soon known: as it was played, and with the largest workspaces."""
        for protocol in self.protocols:
            yield self._bound(self.rows(protocol))
        if self._above:  # for a pipeline this takes longer than it saves
            largest = sorted(self._alternatives(self._every), key=sum)[-1:]
            yield self._bound(self.rows(self.protocols[0], largest))

    def _bound(self, rows: Sequence[Sequence[int]]) -> int:
        most = map(max, zip(*rows, strict=True))  # by phase
        return max(
            beside + bound_of(reserved, exact) for reserved, (beside, exact) in zip(most, self.others, strict=True)
        )

    def _alternatives(self, every: bool) -> list[Workspaces]:
        if every not in self._workspaces:
            self._workspaces[every] = self.process.alternatives(every)
        return self._workspaces[every]

    def rows(self, protocol: str, workspaces: Sequence[Workspaces] = ()) -> list[Sequence[int]]:
        """Bytes reserved by phase: as a process of this protocol was played, and with each of these workspaces."""
        process, phases = self._play(protocol) if self._above else (self.process, slice(None))
        own = [one.reserved if self._above else one.peak_reserved for one in process.readings]
        return [row[phases] for row in (own, *process.reserved_with(workspaces, self._above))]

    def _play(self, protocol: str) -> tuple[SimulatedProcess, slice]:
        """A process that played the same call by a protocol, and which of its readings is the protocol's."""
        if protocol == "cold":
            for other, process in self._played.items():
                if len(process.readings) > PROTOCOLS[other].runs or not PROTOCOLS[other].warmups:
                    return process, slice(1)
        if protocol not in self._played:
            assert isinstance(self.request, VAERequest | ModuleRequest)
            self._played[protocol] = self.request.start(self.process.workspace)
            self.request.play(self._played[protocol], protocol)
        return self._played[protocol], slice(-1, None)

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
        return Plays(native, process, self.others, self.search, self.protocols)
