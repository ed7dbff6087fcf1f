"""A pipeline of diffusers on a simulated process: components come and go, tensors are taken and freed, and the counters
are read in each phase. vaemem/pipelines/phases.py says what each pipeline does."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vaemem.pipelines import programs
from vaemem.pipelines.components import VAE_STRIDE, vae_counts
from vaemem.pipelines.phases import PHASES, Variables
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.pipelines.storage import BITSANDBYTES
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.planned import Phase
from vaemem.prediction.process import ROUNDED_UP, LoadedVAE, Moment, SimulatedProcess, Tensor, moments
from vaemem.prediction.runtimes import architecture, shipped_models

PLAYED_STEPS = 2  # of the denoiser; the cache and the sizes are the same from the second one on


class Stretch(NamedTuple):
    """What is known of a phase besides what the counters say.

    rounded: bytes that the allocator rounded a component's weights up by; work: by the names of `Phase`
    """

    name: str
    outside: int
    rounded: dict[str, int]
    work: dict[str, Any]


class PipelineRun:
    """The run of a pipeline, as it was asked for, by a process. With the offload ``"model"``
    (``enable_model_cpu_offload``) each component comes as a whole when it is called, and goes when the next one is;
    with ``"sequential"`` (``enable_sequential_cpu_offload``) each submodule's weights come and go with its call."""

    def __init__(self, asked: PipelineRequest, process: SimulatedProcess):
        self.asked, self.process, self.v = asked, process, Variables(process)
        self.parts = {part.role: part for part in asked.parts}  # in the order of ``model_cpu_offload_seq``
        resident = asked.resident
        self.moved = [role for role in self.parts if asked.offload != "none" and role not in resident]  # by offloading
        self.stretches: list[Stretch] = []  # by phase
        self.calls: list[tuple[str, Any]] = []  # roles, and what the process keeps of their calls
        self._loaded: dict[str, list[int] | LoadedVAE] = {}  # addresses, none of what PyTorch's memory does not have
        self._rounded: dict[str, int] = {}  # bytes that the allocator rounded a component's weights up by
        self._work: Counter[str] = Counter()  # of this phase so far, by the names of `Phase`
        self._outside = 0

    # ---- components ----

    def load(self, role: str, quantises: bool = False) -> None:
        """``component.to("cuda")``; or ``from_pretrained`` with bitsandbytes, which quantises each matrix on the device
        once it has come there in half precision."""
        part, process, name = self.parts[role], self.process, f"weights of {role}"
        self._loaded[role], before = [], process.allocated
        if role in self.asked.on_cpu or (role == "vae" and self.asked.vae == "vaemem"):
            return
        if part.component in shipped_models():
            # With model offload a VAE is upcast where it lies, on the CPU, before its call brings it.
            is_upcast = part.upcast and self.asked.offload == "model"
            first = part.dtype if is_upcast and not self.asked.image else None
            vae = process.load(part.component, "float32" if is_upcast else part.dtype, "diffusers", first=first)
            self._work["sent"] += vae.nbytes
            self._loaded[role], self._rounded[role] = vae, process.allocated - before - vae.nbytes
            return
        held = [] if quantises else process.hold_all(name, part.pieces)
        self._work["sent"] += 0 if quantises else part.nbytes
        for weight in part.weights if quantises else ():
            sent, whole = weight.bytes, []
            if weight.type in BITSANDBYTES:
                sent = part.unquantised_bytes(weight)
                whole = [process.hold(f"{weight.name} of {role}, not quantised yet", sent)]
            held += process.hold_all(name, weight.pieces)
            process.release(whole)
            self._work["sent"] += sent
        self._loaded[role], self._rounded[role] = held, process.allocated - before - part.nbytes

    def unload(self, role: str) -> None:
        held = self._loaded.pop(role)
        self.process.release(held.storages or () if isinstance(held, LoadedVAE) else filter(None, held))
        self.process.empty_cache()

    def bring(self, role: str) -> None:
        """What happens before a component is called: accelerate's hook sends away the one before it of those that have
        hooks."""
        if self.asked.offload != "model" or role not in self.moved:
            return
        for other in self.moved[: self.moved.index(role)][-1:]:
            if other in self._loaded:
                self.unload(other)
        if role not in self._loaded:
            self.load(role)

    def call(self, role: str, **sizes: int) -> Tensor:
        """Calls a recorded module; what it leaves. `sizes` may have more than its variables."""
        self.bring(role)
        part, on_cpu = self.parts[role], role in self.asked.on_cpu
        sends = self.asked.offload == "sequential" and role in self.moved
        trace = part.trace(find_gpu(programs.ANY_GPU) if on_cpu else self.process.gpu, sends, **sizes)
        self._work["host_flops" if on_cpu else "flops"] += trace.flops
        self._work["sent"] += sends * part.nbytes
        left = {} if on_cpu else self.process.call(trace)
        if not on_cpu:
            self.calls.append((role, self.process.last_call))
        return Tensor(self.process, f"output of {role}", (), part.dtype, left.values())

    # ---- the VAE ----

    def encode(self, image: Tensor) -> Tensor:
        """``vae.encode(image).latent_dist.sample()``, scaled."""
        part, process = self.parts["vae"], self.process
        vae, x = self._vae(), image
        if part.upcast:
            x = process.elementwise(image, "image", "float32")
        self._upcast(vae, "float32")
        posterior = self._call_vae(process.encode, vae, x, self._count_vae("encode"))
        latents = process.sample(posterior)
        scaled = process.elementwise(latents, "latents", part.dtype)
        process.drop(posterior, latents, None if x is image else x)
        self._upcast(vae, part.dtype)
        return scaled

    def decode(self, latents: Tensor) -> Tensor:
        """``vae.decode(latents).sample``; or the same by vaemem, whose memory is not PyTorch's: the whole limit counts
        while it runs, and the image comes as a tensor."""
        asked, dtype = self.asked, self.parts["vae"].dtype
        tile = self._count_vae("decode")
        if "vae" in asked.on_cpu:
            return Tensor(self.process, "image", (), dtype, ())
        if asked.vae == "vaemem":
            self._outside = asked.vae_limit
            return self.tensor("image", (asked.batch, 3, asked.height, asked.width), latents.dtype)
        vae = self._vae()
        if vae.dtype != "float32":
            self._upcast(vae, "float32")
            self._upcast(vae, "float32", first=dtype)
        image = self._call_vae(self.process.decode, vae, latents, tile)
        self._upcast(vae, dtype)
        return image

    def _vae(self) -> LoadedVAE:
        """On the device; with sequential offload one whose weights come for their calls."""
        part = self.parts["vae"]
        if self.asked.offload == "sequential":
            return LoadedVAE(self.process, architecture(part.component), "diffusers", part.dtype, (), sends=True)
        self.bring("vae")
        vae = self._loaded["vae"]
        assert isinstance(vae, LoadedVAE)
        return vae

    def _count_vae(self, op: str) -> int:
        """Counts the work of the VAE's call. Returns the side of its tiles in pixels, 0 where there are none."""
        asked, part = self.asked, self.parts["vae"]
        tile = asked.tile
        dtype = "float32" if part.upcast and asked.vae != "vaemem" else part.dtype
        counts = vae_counts(part.component, op, dtype, asked.height, asked.width, asked.batch, tile)
        names = ("host_flops",) if "vae" in asked.on_cpu else ("flops", "attended", "moved")
        self._work.update(dict(zip(names, counts, strict=False)))
        return tile

    def _call_vae(self, method: Callable[..., Tensor], vae: LoadedVAE, x: Tensor, tile: int) -> Tensor:
        result = method(vae, x, tile=tile, slicing=self.asked.vae == "sliced")
        self.calls.append(("vae", self.process.last_call))
        self._work["sent"] += self.calls[-1][1][0].sent
        return result

    def _upcast(self, vae: LoadedVAE, dtype: str, first: str | None = None) -> None:
        """Converts the weights of a VAE that is upcast for its call."""
        if self.parts["vae"].upcast:
            self.process.convert(vae, dtype, first)

    # ---- tensors, phases ----

    @functools.cached_property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(batch, channels, height, width) of the latents."""
        asked, channels = self.asked, shipped_models()[self.parts["vae"].component]["latent_channels"]
        return asked.batch, channels, asked.height // VAE_STRIDE, asked.width // VAE_STRIDE

    def tensor(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        """A new tensor, in the denoiser's dtype by default."""
        dtype = dtype or self.asked.dtype
        size = math.prod(shape) * programs.DTYPE_BYTES[dtype]
        address = self.process.hold(name, size)
        return Tensor(self.process, name, shape, dtype, [address] if address else ())

    def drop(self, *tensors: Tensor) -> None:
        self.process.drop(*tensors)

    @contextlib.contextmanager
    def phase(self, name: str, first: str | None = None) -> Iterator[None]:
        """Reads the counters around a phase, which begins when the component that it calls `first` is there: the one
        before has then gone, where it goes."""
        work: Any = self._work
        work.clear()
        if first:
            self.bring(first)
        process = self.process
        process.reset_peak()
        self._outside = 0
        yield
        process.read(self._outside)
        self.stretches.append(Stretch(name, self._outside, dict(self._rounded), dict(work)))

    def phases_on(self, process: SimulatedProcess) -> tuple[Phase, ...]:
        """The phases that a process went through: this run's, or one that repeats it on another device."""
        read = enumerate(process.readings)
        return tuple(self._phase(stretch, process, i) for stretch, (i, _) in zip(self.stretches, read, strict=False))

    def _phase(self, stretch: Stretch, process: SimulatedProcess, reading: int) -> Phase:
        # The process names a VAE's weights after the model.
        roles = {f"weights of {part.component}": f"weights of {role}" for role, part in self.parts.items()}
        tensors = tuple(one._replace(name=roles.get(one.name, one.name)) for one in process.peak_tensors(reading))
        held = dict(tensors)
        rounded = sum(size for role, size in stretch.rounded.items() if f"weights of {role}" in held)
        weights = sum(size for what, size in tensors if what.startswith("weights of "))
        weights += min(rounded, held.get(ROUNDED_UP, 0))
        workspace = sum(size for what, size in tensors if what.endswith("[workspace]"))
        _, _, allocated, reserved = process.readings[reading]
        return Phase(
            stretch.name, allocated, reserved, weights, workspace, allocated - weights - workspace, stretch.outside,
            tensors, process.peak_step(reading), **stretch.work,
        )  # fmt: skip

    def steps(self, count: int) -> Iterator[int]:
        """Plays the first steps of a loop, and counts the others' work as that of the last one played."""
        played = min(count, PLAYED_STEPS)
        for step in range(played):
            before = self._work.copy()
            yield step
        for name, amount in self._work.items():
            self._work[name] += (count - played) * (amount - before[name])

    def timeline(self) -> Iterator[Moment]:
        """Every call step by step; names begin with the role."""
        for role, (trace, allocated, reserved) in self.calls:
            yield from moments(trace, allocated, reserved, f"{role}.")


def play_pipeline(question: PipelineRequest, workspace: Any = None) -> PipelineRun:
    """A fresh process, as `Request.start` makes it, runs the pipeline where there is room."""
    run = PipelineRun(question, question.start(workspace))
    PHASES[question.pipeline.class_name](run)
    return run
