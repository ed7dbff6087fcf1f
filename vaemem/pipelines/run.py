"""One run of a pipeline on a simulated process: its components come and go, its names hold tensors, its phases are read.

diffusers.py says what each pipeline does in these terms.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES
from vaemem.pipelines import programs
from vaemem.pipelines.storage import GGML, SPELT, Stored
from vaemem.prediction.benchmark import Names
from vaemem.prediction.process import LoadedVAE, Moment, PeakTensor, SimulatedProcess, Tensor
from vaemem.prediction.profiles import Conv


@dataclass(frozen=True)
class Part:
    """A component as it is run.

    Attributes
    ----------
    role : str
        ``"unet"``, ``"vae"`` ...
    component : str
        What plays it: a recorded module, or a VAE's name.
    dtype : str
        What it computes in.
    weights : tuple of Stored
        As they are stored; of a VAE in `dtype`.
    """

    role: str
    component: str
    dtype: str
    weights: tuple[Stored, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(weight.bytes for weight in self.weights)

    def _by_module(self, made: Mapping[str, int]) -> dict[str, list[tuple[str, int]]]:
        found: dict[str, list[tuple[str, int]]] = {}
        for name, size in made.items():
            module, _, own = name.rpartition(".")
            found.setdefault(module, []).append((own, size))
        return found

    @functools.cached_property
    def sent(self) -> dict[str, list[tuple[str, int]]]:
        """What a submodule's call has on the device where each is sent for its own call."""
        return self._by_module({w.name: w.bytes for w in self.weights})

    @functools.cached_property
    def unpacked(self) -> dict[str, list[tuple[str, int]]]:
        """What a submodule's call has on the device in the dtype that it computes in, of weights stored smaller."""
        smaller = (*GGML, "nf4", "nf4 double", "fp8")
        size = ELEMENT_BYTES[self.dtype]
        return self._by_module(
            {
                f"{w.name}, unpacked": math.prod(w.shape) * size
                for w in self.weights
                if SPELT.get(w.type, w.type) in smaller
            }
        )


class Phase(NamedTuple):
    """What a pipeline takes in one of its phases. Sizes in bytes.

    name: load, encode prompt, denoise, decode
    allocated, reserved: as PyTorch's counters stand at their height
    weights: of components on the device at that height
    workspace: of convolutions and products, at that height
    activations: the rest of allocated: tensors, inputs, what the allocator rounds up
    outside: on the device, but not by PyTorch's allocator
    peak_tensors: (name, bytes) of what is allocated at that height, largest first
    flops: of all its calls
    sent: bytes of weights that go to the device for it
    fits: whether it goes through on the card; None where an earlier phase does not
    """

    name: str
    allocated: int
    reserved: int
    weights: int
    workspace: int
    activations: int
    outside: int
    peak_tensors: tuple[PeakTensor, ...]
    flops: int
    sent: int
    fits: bool | None = True

    @property
    def total(self) -> int:
        """What the card gives for it besides the CUDA context."""
        return self.reserved + self.outside


OFFLOADS = ("none", "model", "sequential")
PLAYED_STEPS = 2  # of the denoiser; the cache and the sizes are the same from the second one on


class Run:
    """A pipeline's call.

    Parameters
    ----------
    process : SimulatedProcess
    parts : dict
        {role: Part} in the order of ``model_cpu_offload_seq``.
    offload : str
        ``"none"``: all components stay on the device. ``"model"``: ``enable_model_cpu_offload``, each comes as a whole
        when it is called, and goes when the next one is. ``"sequential"``: ``enable_sequential_cpu_offload``, each
        submodule's weights come and go with its call.
    """

    def __init__(self, process: SimulatedProcess, parts: Mapping[str, Part], offload: str = "none"):
        self.process, self.parts, self.offload = process, dict(parts), offload
        self.names = Names(process)
        self.phases: list[Phase] = []
        self.moments: list[Moment] = []
        self.outside = 0  # bytes now on the device that PyTorch does not know of
        self._loaded: dict[str, list[int] | LoadedVAE] = {}
        self._flops = self._sent = self._most_outside = 0

    # ---- components ----

    def load(self, role: str) -> None:
        """``component.to("cuda")``."""
        part = self.parts[role]
        self._sent += part.nbytes
        if part.component in _core.models():
            self._loaded[role] = self.process.load(part.component, part.dtype, "diffusers")
        else:
            self._loaded[role] = [self.process.hold(f"weights of {role}", weight.bytes) for weight in part.weights]

    def unload(self, role: str) -> None:
        held = self._loaded.pop(role)
        if isinstance(held, LoadedVAE):
            self.process.drop(held)
        else:
            self.process.release(address for address in held if address)
        self.process.empty_cache()

    def bring(self, role: str) -> None:
        """What happens before a component is called."""
        if self.offload != "model" or role in self._loaded:
            return
        for other in list(self._loaded):  # accelerate's hook sends the one away that came before
            self.unload(other)
        self.load(role)

    def call(self, role: str, **sizes: int) -> Tensor:
        """Calls a recorded module; what it leaves.

        `sizes` may have more than its variables.
        """
        self.bring(role)
        part = self.parts[role]
        module = programs.load(part.component)
        wanted = {name: sizes[name] for name in module.variables}
        passing = dict(part.unpacked)
        if self.offload == "sequential":
            for name, weights in part.sent.items():
                passing[name] = weights + passing.get(name, [])
            self._sent += part.nbytes
        self._flops += module.flops(part.dtype, **wanted)
        left = self.process.call(_trace(part.component, part.dtype, self.process.gpu.name, _frozen(passing), **wanted))
        self._note(role)
        return Tensor(f"output of {role}", (), part.dtype, {a: self.process._live[a][1] for a in left.values()})

    def vae(self, role: str = "vae") -> LoadedVAE:
        """The VAE, on the device."""
        self.bring(role)
        held = self._loaded[role]
        assert isinstance(held, LoadedVAE)
        return held

    def decoded(self, latents: Tensor, tile: int = 0, slicing: bool = False) -> Tensor:
        """``vae.decode(latents).sample``."""
        vae = self.vae()
        out = self.process.decode(vae, latents, tile=tile, slicing=slicing)
        self._flops += vae_flops(self.process, vae)
        self._note("vae")
        return out

    def _note(self, role: str) -> None:
        self.moments += [moment._replace(name=f"{role}.{moment.name}") for moment in self.process.timeline()]

    # ---- tensors ----

    def tensor(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        size = math.prod(shape) * programs.DTYPE_BYTES[dtype]
        address = self.process.hold(name, size)
        return Tensor(name, shape, dtype, {address: size} if address else {})

    def passing(self, *tensors: Tensor) -> None:
        """What an expression makes and lets go at once."""
        self.process.drop(*tensors)

    # ---- phases ----

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.process.reset_peak()
        self._flops = self._sent = 0
        self._most_outside = self.outside
        yield
        process, tensors = self.process, tuple(self.process.peak_tensors())
        weights = sum(size for what, size in tensors if what.startswith("weights of "))
        workspace = sum(size for what, size in tensors if what.endswith("[workspace]"))
        self.phases.append(
            Phase(
                name, process.peak_allocated, process.peak_reserved, weights, workspace,
                process.peak_allocated - weights - workspace, self._most_outside, tensors, self._flops, self._sent,
            )
        )  # fmt: skip

    def steps(self, count: int) -> Iterator[int]:
        """Plays the first steps of a loop, and counts the others' work as that of the last one played."""
        played = min(count, PLAYED_STEPS)
        before = self._flops, self._sent
        for step in range(played):
            before = self._flops, self._sent
            yield step
        self._flops += (count - played) * (self._flops - before[0])
        self._sent += (count - played) * (self._sent - before[1])


def _frozen(passing: Mapping[str, Sequence[tuple[str, int]]]) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    return tuple((name, tuple(held)) for name, held in passing.items())


@functools.lru_cache(maxsize=64)
def _trace(component: str, dtype: str, gpu: str, passing: tuple[tuple[str, tuple[tuple[str, int], ...]], ...],
           **sizes: int) -> _core.Trace:  # fmt: skip
    from vaemem.prediction.gpus import find_gpu

    return programs.load(component).trace(dtype, find_gpu(gpu), dict(passing), **sizes)


def vae_flops(process: SimulatedProcess, vae: LoadedVAE) -> int:
    """FLOPs of the VAE's last call: its convolutions, and its attention."""
    assert process._last is not None
    trace = process._last[0]
    total = 0
    for op, index, _, _ in trace.steps:
        if op == "conv":
            total += programs.conv_flops(Conv(*trace.convs[index]))
    return total
