"""A pipeline's run on a simulated process: its components come and go, its names hold tensors, its phases are read.

diffusers.py says what each pipeline does in these terms.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, Message, Named
from vaemem.pipelines import programs
from vaemem.pipelines.components import VAE_STRIDE
from vaemem.pipelines.storage import BITSANDBYTES, FOUR_BITS, GGML, SPELT, Stored
from vaemem.prediction.benchmark import Names
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.moments import Moment, PeakTensor, moments
from vaemem.prediction.process import LoadedVAE, SimulatedProcess, Tensor
from vaemem.prediction.question import usual_tile
from vaemem.prediction.runtimes import architecture


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
    upcast : bool
        Whether a VAE is converted to float32 for its call, and back.
    """

    role: str
    component: str
    dtype: str
    weights: tuple[Stored, ...]
    upcast: bool = False

    def __reduce__(self) -> Any:
        """Copied and pickled without its traces, which are made again."""
        return Part, tuple(getattr(self, one.name) for one in fields(self))

    @functools.cached_property
    def _traces(self) -> dict[Any, _core.Trace]:
        return {}

    def trace(self, gpu: Gpu, sends: bool, **sizes: int) -> _core.Trace:
        """What a call takes on a GPU, with the weights that sequential offload `sends` for it. The last ones are kept,
        because it takes longer to make one than to play it."""
        asked, kept = (gpu.name, gpu.sm, gpu.multiprocessors, sends, *sizes.items()), self._traces
        trace = kept.get(asked)
        if trace is None:
            trace = self.recording.trace(self.dtype, gpu, self.unpacked, self.sent if sends else None, **sizes)
            for oldest in list(kept)[: len(kept) + 1 - KEPT_TRACES]:
                kept.pop(oldest, None)
            kept[asked] = trace
        return trace

    @property
    def recording(self) -> programs.Recorded:
        return programs.load_program(self.component)

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(weight.bytes for weight in self.weights)

    @functools.cached_property
    def pieces(self) -> list[int]:
        """Bytes of the tensors that hold its weights, in order."""
        return [size for weight in self.weights for size in weight.pieces]

    @functools.cached_property
    def _types(self) -> set[str]:
        return {weight.type for weight in self.weights}

    def has(self, types: Collection[str]) -> bool:
        """Whether any of its weights is stored in one of these types."""
        return not self._types.isdisjoint(types)

    def _by_module(self, made: Mapping[str, int]) -> dict[str, list[tuple[str, int]]]:
        """{submodule: [(name, bytes)]} of named tensors. Where a file's tensors have other names than the submodules,
        the largest of them stands for the whole call, under ""."""
        modules = {weight.module for weight in weights_of(self.component)}
        found: dict[str, list[tuple[str, int]]] = {}
        for name, size in made.items():
            module, _, own = name.rpartition(".")
            if module in modules:
                found.setdefault(module, []).append((own, size))
            elif size > sum(other for _, other in found.get("", ())):
                found[""] = [(name, size)]
        return found

    @functools.cached_property
    def sent(self) -> dict[str, list[tuple[str, int]]]:
        """{submodule: [(name, bytes)]} of the weights that sequential offload has on the device during its call."""
        return self._by_module({w.name: w.bytes for w in self.weights})

    @functools.cached_property
    def unpacked(self) -> dict[str, list[tuple[str, int]]]:
        """{submodule: [(name, bytes)]} of its weights in the dtype that it computes in, unpacked for its call from a
        smaller type."""
        smaller = (*GGML, *FOUR_BITS, "fp8")
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

    name: load, encode prompt, encode image, denoise, decode
    allocated, reserved: as PyTorch's counters stand at their height
    weights: of components on the device at that height
    workspace: of convolutions and products, at that height
    activations: the rest of allocated: tensors, inputs, what the allocator rounds up
    outside: on the device, but not by PyTorch's allocator
    peak_tensors: (name, bytes) of what is allocated at that height, largest first
    where: the step of a call that makes it; "" outside of calls
    flops, host_flops: of all its calls on the device, and on the host
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
    where: str
    flops: int
    sent: int
    fits: bool | None = True
    host_flops: int = 0

    @property
    def cached(self) -> int:
        """What PyTorch's allocator has reserved beyond what is allocated, each at its height."""
        return self.reserved - self.allocated

    @property
    def total(self) -> int:
        """What the card gives for it besides the CUDA context."""
        return self.reserved + self.outside


# What diffusers' upcast_vae converts back to half precision.
FIRST = ("post_quant_conv.", "decoder.conv_in.", "decoder.mid_block.")
OFFLOADS = ("none", "model", "sequential")
KEPT_TRACES = 4  # of each component
PLAYED_STEPS = 2  # of the denoiser; the cache and the sizes are the same from the second one on


@functools.cache
def weights_of(component: str) -> tuple[programs.Weight, ...]:
    """A component's weights, in the order in which ``Module.to`` moves them."""
    if component not in _core.models():
        return programs.load_program(component).weights
    return tuple(programs.Weight(*one) for one in _core.Trace.parameters(architecture(component), "diffusers"))


@functools.lru_cache(maxsize=64)
def _converted(component: str, first: str, rest: str) -> tuple[int, ...]:
    """Bytes of a VAE's weights with the first blocks and the others in these dtypes."""
    return tuple(w.nbytes(first if w.name.startswith(FIRST) else rest) for w in weights_of(component))


@functools.lru_cache(maxsize=256)
def vae_flops(model: str, op: str, height: int, width: int, batch: int = 1, tile: int = 0) -> int:
    """FLOPs of a VAE's convolutions, products and attentions, tiles included; sizes in pixels of the image."""
    arch = architecture(model)
    return _core.Trace.vae(arch, "diffusers", op, "float16", height, width, batch, tile).flops


class PipelineRun:
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
    own_vae : bool
        Whether vaemem runs the VAE, in memory of its own.
    on_cpu, resident : collection of str
        Roles whose components stay on the host, and run there; and those that are loaded first and never offloaded.
    """

    def __init__(
        self, process: SimulatedProcess, parts: Mapping[str, Part], offload: str = "none", own_vae: bool = False,
        on_cpu: Collection[str] = (), resident: Collection[str] = (),
    ):  # fmt: skip
        self.process, self.parts, self.offload, self._own_vae = process, dict(parts), offload, own_vae
        self.on_cpu, self.resident = on_cpu, resident
        self.names = Names(process)
        self.phases: list[Phase] = []
        self._calls: list[tuple[str, Any]] = []  # roles, and what the process keeps of their calls
        self._loaded: dict[str, list[int] | LoadedVAE] = {}
        self._work: Counter[str] = Counter()  # of this phase so far: flops, host_flops, and bytes sent to the device
        self._outside = 0

    # ---- components ----

    def load(self, role: str, quantises: bool = False) -> None:
        """``component.to("cuda")``; or ``from_pretrained`` with bitsandbytes, which quantises each matrix on the device
        once it has come there in half precision."""
        part = self.parts[role]
        if role in self.on_cpu or (role == "vae" and self._own_vae):
            self._loaded[role] = []
            return
        if part.component in _core.models():
            self._work["sent"] += part.nbytes
            self._loaded[role] = self.process.load(part.component, part.dtype, "diffusers")
            return
        if not quantises:
            self._loaded[role] = self.process.hold_all(f"weights of {role}", part.pieces)
            self._work["sent"] += part.nbytes
            return
        self._loaded[role] = held = []
        for weight in part.weights:
            sent, whole = weight.bytes, []
            if weight.type in BITSANDBYTES:
                sent = math.prod(weight.shape) * ELEMENT_BYTES["float16" if weight.type == "int8" else part.dtype]
                whole = [self.process.hold(f"{weight.name} of {role}, not quantised yet", sent)]
            held += self.process.hold_all(f"weights of {role}", weight.pieces)
            self.process.release(whole)
            self._work["sent"] += sent

    def unload(self, role: str) -> None:
        held = self._loaded.pop(role)
        if isinstance(held, LoadedVAE):
            self.process.drop(held)
        else:
            self.process.release(filter(None, held))
        self.process.empty_cache()

    def bring(self, role: str) -> None:
        """What happens before a component is called: accelerate's hook sends away the one before it of those that have
        hooks."""
        if self.offload != "model" or role in self.resident:
            return
        hooked = [other for other in self.parts if other not in self.resident]
        for other in hooked[: hooked.index(role)][-1:]:
            if other in self._loaded:
                self.unload(other)
        if role not in self._loaded:
            self.load(role)

    def call(self, role: str, **sizes: int) -> Tensor:
        """Calls a recorded module; what it leaves.

        `sizes` may have more than its variables.
        """
        self.bring(role)
        part = self.parts[role]
        wanted = {name: sizes[name] for name in part.recording.variables}
        sends = self.offload == "sequential" and role not in self.resident
        gpu = find_gpu(programs.ANY_GPU) if role in self.on_cpu else self.process.gpu
        trace = part.trace(gpu, sends, **wanted)
        if self._count(role, trace.flops):
            return Tensor(f"output of {role}", (), part.dtype, {})
        if sends:
            self._work["sent"] += part.nbytes
        left = self.process.call(trace)
        self._note(role)
        return self.process._as_tensor(f"output of {role}", left, (), part.dtype)

    def _count(self, role: str, flops: int) -> bool:
        """Counts the FLOPs of a component's call, and returns whether the host computes it."""
        on_cpu = role in self.on_cpu
        self._work["host_flops" if on_cpu else "flops"] += flops
        return on_cpu

    def encode(self, image: Tensor, how: str = "whole") -> Tensor:
        """``vae.encode(image).latent_dist.sample()``, scaled; `how` as in `decode`."""
        part, process = self.parts["vae"], self.process
        if self._own_vae or "vae" in self.on_cpu:
            got = "image: want it with PyTorch's VAE on the device, got that on the CPU or "
            raise ValueError(Message(got, Named("vae", "vaemem")))
        tile = self._count_vae("encode", image.shape, how)
        vae = self._vae()
        if part.upcast:
            image = process.elementwise(image, "image", "float32")
            self._convert(vae, "float32", "float32")
        posterior = self._call_vae(process.encode, vae, image, tile, how)
        latents = process.sample(posterior)
        scaled = process.elementwise(latents, "latents", part.dtype)
        process.drop(posterior, latents, *[image] * part.upcast)
        if part.upcast:
            self._convert(vae, part.dtype, part.dtype)
        return scaled

    def decode(self, latents: Tensor, how: str = "whole", memory_limit: int = 0) -> Tensor:
        """``vae.decode(latents).sample``, or the same by vaemem on the device within a memory limit.

        how: ``"whole"``, ``"tiled"`` (``enable_tiling``), ``"sliced"`` (``enable_slicing``) or ``"vaemem"``.
        """
        part = self.parts["vae"]
        tile = self._count_vae("decode", latents.shape, how)
        if "vae" in self.on_cpu:
            return Tensor("image", (), part.dtype, {})
        if how == "vaemem":
            return self._decode_outside(latents, memory_limit)
        vae = self._vae()
        if part.upcast:  # all of it to float32, then the first blocks back
            self._convert(vae, "float32", "float32")
            self._convert(vae, part.dtype, "float32")
        image = self._call_vae(self.process.decode, vae, latents, tile, how)
        if part.upcast:
            self._convert(vae, part.dtype, part.dtype)
        return image

    def _count_vae(self, op: str, shape: Sequence[int], how: str) -> int:
        """Counts the FLOPs of the VAE's call. Returns the side of its tiles in pixels, 0 where there are none."""
        model = self.parts["vae"].component
        batch, _, height, width = shape
        scale, tile = 1 if op == "encode" else VAE_STRIDE, usual_tile(model) if how == "tiled" else 0
        self._count("vae", vae_flops(model, op, scale * height, scale * width, batch, tile))
        return tile

    def _vae(self) -> LoadedVAE:
        """On the device; with sequential offload one whose weights come for their calls."""
        part = self.parts["vae"]
        if self.offload == "sequential":
            return LoadedVAE(architecture(part.component), "diffusers", part.dtype, {}, sends=True)
        self.bring("vae")
        vae = self._loaded["vae"]
        assert isinstance(vae, LoadedVAE)
        return vae

    def _call_vae(self, method: Callable[..., Tensor], vae: LoadedVAE, x: Tensor, tile: int, how: str) -> Tensor:
        result = method(vae, x, tile=tile, slicing=how == "sliced")
        self._note("vae")
        trace, *_ = self._calls[-1][1]
        self._work["sent"] += trace.sent
        return result

    def _convert(self, vae: LoadedVAE, first: str, rest: str) -> None:
        """The weights of the first blocks and the others to these dtypes: each one whose size changes is copied."""
        wanted = _converted(self.parts["vae"].component, first, rest)
        held = zip((vae.storages or {}).items(), wanted, strict=not vae.sends)
        self.process._copy(vae, {address: to for (address, size), to in held if size != to})
        vae.first, vae.dtype = first, rest

    def _decode_outside(self, latents: Tensor, memory_limit: int) -> Tensor:
        """vaemem's own memory is not PyTorch's: the whole limit counts while it runs; the image comes as a tensor."""
        batch, _, height, width = latents.shape
        image = self.tensor("image", (batch, 3, VAE_STRIDE * height, VAE_STRIDE * width), latents.dtype)
        self._outside = memory_limit
        return image

    def _note(self, role: str) -> None:
        self._calls.append((role, self.process._last))

    def timeline(self) -> Iterator[Moment]:
        """Every call step by step; names begin with the role."""
        for role, (trace, allocated, reserved) in self._calls:
            yield from moments(trace, allocated, reserved, f"{role}.")

    # ---- tensors ----

    def tensor(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        size = math.prod(shape) * programs.DTYPE_BYTES[dtype]
        address = self.process.hold(name, size)
        return Tensor(name, shape, dtype, {address: size} if address else {})

    # ---- phases ----

    @contextlib.contextmanager
    def phase(self, name: str, first: str | None = None) -> Iterator[None]:
        """Reads the counters around a phase, which begins when the component that it calls `first` is there: the one
        before has then gone, where it goes."""
        self._work.clear()
        if first:
            self.bring(first)
        self.process.reset_peak()
        self._outside = 0
        yield
        process, tensors = self.process, self._peak_tensors()
        weights = sum(size for what, size in tensors if what.startswith("weights of "))
        workspace = sum(size for what, size in tensors if what.endswith("[workspace]"))
        step = process.peak_above_baseline()
        self.phases.append(
            Phase(
                name, process.peak_allocated, process.peak_reserved, weights, workspace,
                process.peak_allocated - weights - workspace, self._outside, tensors, step[0] if step else "",
                self._work["flops"], self._work["sent"], host_flops=self._work["host_flops"],
            )
        )  # fmt: skip

    def _peak_tensors(self) -> tuple[PeakTensor, ...]:
        """The process's peak tensors, with weights under their component's role; the process names a VAE's after the
        model."""
        names = {f"weights of {part.component}": f"weights of {role}" for role, part in self.parts.items()}
        return tuple(
            tensor._replace(name=names.get(tensor.name, tensor.name)) for tensor in self.process.peak_tensors()
        )

    def steps(self, count: int) -> Iterator[int]:
        """Plays the first steps of a loop, and counts the others' work as that of the last one played."""
        played = min(count, PLAYED_STEPS)
        for step in range(played):
            before = self._work.copy()
            yield step
        for name, amount in self._work.items():
            self._work[name] += (count - played) * (amount - before[name])
