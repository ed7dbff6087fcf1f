"""A pipeline's phase, the result of a play by phase, and one way of running the pipeline, for any program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vaemem.prediction.process import ROUNDED_UP, PeakTensor, SimulatedProcess

OF_WEIGHTS = "weights of "  # names of weights begin with it


def weights_and_workspaces(tensors: Iterable[PeakTensor]) -> tuple[int, int]:
    """Sum the bytes of weights and of workspaces at a peak."""
    found = [*tensors]
    weights = sum(size for name, size in found if name.startswith(OF_WEIGHTS))
    return weights, sum(size for name, size in found if name.endswith("[workspace]"))


class Phase(NamedTuple):
    """The memory and work of one phase of a pipeline. Sizes in bytes.

    name: load, encode prompt, encode image, denoise, decode; the second of a name ends in 2
    allocated, reserved: the peaks of PyTorch's counters
    weights: of components on the device at the peak, as the allocator rounded them up at loading
    workspace: of convolutions and products, at the peak
    activations: the rest of allocated: tensors, inputs, and the allocator's rounding of these
    outside: on the device, but not from PyTorch's allocator
    peak_tensors: (name, bytes) of everything allocated at the peak, largest first
    where: the step of a call that makes the peak; "" outside of calls
    flops, host_flops: of all its calls on the device, and on the host
    attended, moved: for the VAE's calls on the device, the FLOPs of its attention, and the bytes that move
    sent: bytes of weights that go to the device for it
    fits: whether it succeeds on the card; None if an earlier phase fails
    work: the work in a plan and with stable-diffusion.cpp, for `vaemem.prediction.seconds.Machine`. For load, the bytes
        of all weights, as "disk". Empty in a prediction of diffusers, which has its own `work`
    """

    name: str
    allocated: int
    reserved: int
    weights: int
    workspace: int = 0
    activations: int = 0
    outside: int = 0
    peak_tensors: tuple[PeakTensor, ...] = ()
    where: str = ""
    flops: int = 0
    sent: int = 0
    fits: bool | None = True
    host_flops: int = 0
    attended: int = 0
    moved: int = 0
    work: Mapping[str, float] = {}

    @classmethod
    def read(cls, process: SimulatedProcess, number: int, names: Mapping[str, str]) -> Phase:
        """Make a phase from the process's reading with this index. names: replace the names of its peak tensors."""
        _, _, allocated, reserved = process.readings[number]
        where, tensors, rounded = process.peak(number)
        weights, workspace = weights_and_workspaces(tensors)
        more = sum(size for name, size in rounded.items() if name.startswith(OF_WEIGHTS))
        weights += min(more, dict(tensors).get(ROUNDED_UP, 0))
        return cls(
            allocated=allocated, reserved=reserved, weights=weights, workspace=workspace,
            activations=allocated - weights - workspace, where=where, **process.counted(number),
            peak_tensors=tuple(one._replace(name=names.get(one.name, one.name)) for one in tensors),
        )  # fmt: skip

    @classmethod
    def planned(cls, name: str, weights: int, added: int, work: Mapping[str, float]) -> Phase:
        """Make a phase that always has its weights and `added` more bytes on the card, and does this work."""
        counts = {kind: int(amount) for kind, amount in work.items()}
        sent, moved, _ = (counts.pop(kind, 0) for kind in ("link", "memory", "disk"))
        on_cpu = sum(count for kind, count in counts.items() if kind.startswith("cpu"))
        size, flops = weights + added, sum(counts.values()) - on_cpu
        return cls(
            name, size, size, weights, activations=added, flops=flops, sent=sent, host_flops=on_cpu, moved=moved,
            work=work,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self[:-1])  # the work is a dict

    @property
    def kind(self) -> str:
        """Its name without a number."""
        return self.name.rstrip("0123456789 ")

    @property
    def cached(self) -> int:
        """Bytes that PyTorch's allocator reserves beyond the allocated bytes, each at its peak."""
        return self.reserved - self.allocated

    @property
    def total(self) -> int:
        """Bytes that the phase takes of the card, without the CUDA context."""
        return self.reserved + self.outside

    @property
    def added(self) -> int:
        """Bytes of `total` besides the weights."""
        return self.total - self.weights


@dataclass(frozen=True)
class Result:
    """The result of a play: the phases; and the phase and the request at which memory runs out on the card, if it does.
    A play with room also has the phase and the request."""

    phases: tuple[Phase, ...]
    out_of_memory_at: tuple[str, PeakTensor] | None = None

    @property
    def fullest(self) -> Phase:
        """The phase that takes most, the first of equals."""
        return max(self.phases, key=lambda phase: phase.total)


class Way(NamedTuple):
    """One way of running a pipeline.

    Attributes
    ----------
    name : str
    settings : dict
        How to request the way: arguments of `predict_pipeline`; or options of stable-diffusion.cpp, for the argument
        `offload`.
    phases : tuple of Phase
    host : int
        Bytes of the host's memory for weights and buffers that are not on the card.
    changes : str
        How the way changes the picture; "" if the picture stays the same.
    rounds : bool
        Whether smaller weights change the picture, and not only another decode.
    notes : tuple of str
        Assumptions.
    out : tuple of (str, int), optional
        The phase in which memory runs out, and the bytes that the card lacks for the whole run.
    played : bool
        Whether `out` comes from a verdict on the card. Otherwise the plan judges the phases.
    unsure : str
        Why the way is tight; "" if it is not.
    code : str
        Python for diffusers, or the options of stable-diffusion.cpp, that run the way; "" for MLX.
    """

    name: str
    settings: Mapping[str, Any]
    phases: tuple[Phase, ...]
    host: int = 0
    changes: str = ""
    notes: tuple[str, ...] = ()
    out: tuple[str, int] | None = None
    played: bool = False
    unsure: str = ""
    code: str = ""
    rounds: bool = False

    @property
    def work(self) -> dict[str, float]:
        """The work of all its phases except load, which happens once for many pictures."""
        total: dict[str, float] = {}
        for phase in (one for one in self.phases if one.name != "load"):
            for name, amount in phase.work.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    @property
    def peak(self) -> Phase:
        """The phase that takes most, the first of equals."""
        return Result(self.phases).fullest
