"""Play a pipeline of diffusers on a simulated process: load and unload components, allocate and free tensors, and read
the counters at the end of each phase. vaemem/pipelines/phases.py has the steps of each pipeline."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vaemem._errors import ArgumentError
from vaemem.pipelines import programs
from vaemem.pipelines.components import is_vae, vae_counts
from vaemem.pipelines.phases import PHASES
from vaemem.pipelines.pipeline_parts import PLACES, Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.pipelines.quantising import BITSANDBYTES, SCHEMES
from vaemem.pipelines.steps import PLAYED_STEPS
from vaemem.pipelines.storage import Stored
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.held import LoadedVAE, Moment, Tensor, Variables, arch_key, moments
from vaemem.prediction.passing import pass_vae
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import refusing_too_large
from vaemem.prediction.runtimes import LAST_PARTLY_UPCAST, architecture


class PipelineRun:
    """A pipeline's run by a process. With the offload ``"model"`` (``enable_model_cpu_offload``) each component
    loads whole for its call, and unloads when the next is called. With ``"sequential"``
    (``enable_sequential_cpu_offload``) each submodule's weights are loaded for its call, and unloaded after it."""

    def __init__(self, request: PipelineRequest, process: SimulatedProcess):
        self.request, self.process, self.v = request, process, Variables(process)
        self.parts = {part.role: part for part in request.parts}  # in the order of ``model_cpu_offload_seq``
        resident = request.resident
        self.moved = [
            role for role in self.parts if request.offload != "none" and role not in resident
        ]  # by offloading
        self.calls: list[tuple[str, Any]] = []  # roles, and the process's record of their calls
        self._loaded: dict[str, list[int] | LoadedVAE] = {}  # handles; no entry if it is not in PyTorch's memory
        for role in self.moved if request.offload == "sequential" else ():
            process.hold_all(f"weights of {role}", [size for one in self.parts[role].left for size in one.pieces])
        self._names = Counter[str]()  # of phases, and how many had each
        self.sizes: list[dict[str, int]] = []  # of the image that each phase makes

    def play(self) -> None:
        """Load the pipeline, and play its calls."""
        self._load_components()
        for number, request in enumerate(self.request.calls):
            if number:
                self._return()
            self.request = request
            PHASES[request.pipeline.class_name](self)

    def _return(self) -> None:
        """End a call: the image becomes a picture in the host's memory, ``maybe_free_model_hooks`` unloads everything,
        and variables go. The scheduler keeps its timesteps."""
        self.v.delete("image")
        for role in [*self._loaded] if self.request.offload == "model" else ():
            if role in self.moved:
                self.unload(role)
        self.v.delete(*(name for name in self.v if name != "timesteps"))

    # ---- components ----

    def _load_components(self) -> None:
        """Play ``from_pretrained``, then ``to("cuda")`` or an offload. If everything starts on the CPU and is
        offloaded, there is no such phase: components move to the device when they are called."""
        stay = [role for role in self.parts if role not in self.moved]
        early = [role for role, part in self.parts.items() if part.place != PLACES[0]]  # by from_pretrained
        # If pipe.to moves everything, a component that is cast on the card comes with the others.
        early = [role for role in early if role not in stay or not self.parts[role].is_cast_on_card]
        if early or stay:
            with self.phase("load"):
                for role in early:
                    self.load(role, quantises=bool(self.parts[role].source))
                for role in early:
                    if role not in stay:
                        self._cast(role)
                        self.unload(role)
                late = [role for role in stay if role not in early]
                for role in late:
                    self.load(role, quantises=self.parts[role].is_cast_on_card)
                for role in late:
                    self._cast(role)

    def load(self, role: str, quantises: bool = False) -> None:
        """Play ``component.to("cuda")``; or ``from_pretrained`` with bitsandbytes. It sends each matrix in half
        precision, and quantises it on the device."""
        part, process, name = self.parts[role], self.process, f"weights of {role}"
        self._loaded[role] = []
        if role in self.request.on_cpu or (role == "vae" and self.request.vae == "vaemem"):
            return
        if is_vae(part.component):
            # With model offload a VAE is upcast on the CPU, before its call loads it.
            is_upcast = part.upcast and self.request.offload == "model"
            first = part.dtype if is_upcast and self._is_partly_upcast and not self.request.encodes else None
            vae = process.load(part.component, "float32" if is_upcast else part.dtype, "diffusers", first=first)
            self._loaded[role] = vae
            process.count(sent=vae.nbytes)
        elif not quantises:
            self._loaded[role] = process.hold_all(name, part.pieces)
            process.count(sent=part.nbytes)
        else:
            sizes = [part.sent_bytes(weight) for weight in part.weights]
            process.count(sent=sum(sizes))
            if part.is_cast_on_card:
                self._loaded[role] = process.hold_all(f"weights of {role}, not cast yet", sizes)
            else:
                held = (self._quantise(part, *pair) for pair in zip(part.weights, sizes, strict=True))
                self._loaded[role] = [handle for one in held for handle in one]

    def _quantise(self, part: Part, weight: Stored, size: int) -> list[int]:
        """Send a weight of a size to the device. If it is a matrix, bitsandbytes quantises it there."""
        whole = list[int]()
        if weight.type in BITSANDBYTES:
            whole = [self.process.hold(f"{weight.name} of {part.role}, not quantised yet", size)]
        held = self.process.hold_all(f"weights of {part.role}", weight.pieces)
        self.process.release(whole)
        return held

    def _cast(self, role: str) -> None:
        """Cast or quantise a component on the card, weight by weight, if it came there whole."""
        part, process, held = self.parts[role], self.process, self._loaded[role]
        if not part.is_cast_on_card or not held:
            return
        assert isinstance(held, list)
        self._loaded[role] = made = list[int]()
        for weight, whole in zip(part.weights, held, strict=True):
            if weight.type not in (*SCHEMES, "fp8"):
                made.append(whole)
                continue
            scheme = SCHEMES.get(weight.type)
            if scheme and scheme.quantising:
                size = scheme.quantising * math.prod(weight.shape)
                process.release([process.hold(f"{weight.name} of {role}, quantising", size)])
            made += process.hold_all(f"weights of {role}", weight.pieces)
            process.release([whole])

    def unload(self, role: str) -> None:
        held = self._loaded.pop(role)
        self.process.release(held.storages or () if isinstance(held, LoadedVAE) else filter(None, held))
        if not self.request.group:  # accelerate's hooks empty the cache
            self.process.empty_cache()

    def bring(self, role: str) -> None:
        """Prepare a component's call: accelerate's hook unloads the previous component in the sequence."""
        if self.request.offload != "model" or role not in self.moved:
            return
        if role not in self.request.pipeline.aside:
            chain = [other for other in self.moved if other not in self.request.pipeline.aside]
            for other in chain[: chain.index(role)][-1:]:
                if other in self._loaded:
                    self.unload(other)
        if role not in self._loaded:
            self.load(role)

    def call(self, role: str, **sizes: int) -> Tensor:
        """Call a recorded module, and return its output. `sizes` may have more than its variables."""
        self.bring(role)
        part, process = self.parts[role], self.process
        if role in self.request.on_cpu:
            process.count(host_flops=part.trace(find_gpu(programs.ANY_GPU), "none", False, **sizes).flops)
            return Tensor(process, f"output of {role}", (), part.dtype, ())
        offload = (self.request.group or self.request.offload) if role in self.moved else "none"
        later = bool(self.request.group) and any(one == role for one, _ in self.calls)
        trace = part.trace(process.gpu, offload, later, process.cudnn_attention, **sizes)
        left = process.call(trace)
        process.count(flops=trace.flops, sent=part.passed if offload == "sequential" else trace.sent)
        self.calls.append((role, process.last_call))
        return Tensor(process, f"output of {role}", (), part.dtype, left.values())

    # ---- the VAE ----

    def encode(self, image: Tensor) -> Tensor:
        """Play ``vae.encode(image).latent_dist.sample()``, scaled."""
        part, process = self.parts["vae"], self.process
        vae, x = self._vae(), image
        if part.upcast:
            x = process.elementwise(image, "image", "float32")
        elif x.dtype != vae.dtype:
            advice = "the pipeline gives its VAE an image of this type"
            raise ArgumentError("components['vae']", x.dtype, vae.dtype, advice)
        self._convert(vae, "float32")
        self._count_vae("encode", image.shape)
        posterior = self._call_vae(process.encode, vae, x)
        latents = process.sample(posterior)
        scaled = process.elementwise(latents, "latents", part.dtype)
        process.drop(posterior, latents, None if x is image else x)
        self._convert(vae, part.dtype)
        return scaled

    def upcast(self) -> str:
        """Play ``upcast_vae``. Return the type of the latents that the VAE decodes."""
        request, part = self.request, self.parts["vae"]
        if not part.upcast or "vae" in request.on_cpu or request.vae == "vaemem":
            return part.dtype
        vae = self._vae()
        if vae.dtype != "float32":
            self._convert(vae, "float32")
            if self._is_partly_upcast:
                self._convert(vae, "float32", first=part.dtype)
        return vae.first or vae.dtype

    @property
    def _is_partly_upcast(self) -> bool:
        return self.process.diffusers_release <= LAST_PARTLY_UPCAST

    def decode(self, latents: Tensor) -> Tensor:
        """Play ``vae.decode(latents).sample``, or vaemem's decoder. Its memory is not PyTorch's: the whole limit counts
        while it runs, and the image becomes a tensor."""
        request, dtype = self.request, self.parts["vae"].dtype
        self._count_vae("decode")
        if "vae" in request.on_cpu:
            return Tensor(self.process, "image", (), dtype, ())
        if request.vae == "vaemem":
            return self.tensor("image", (request.batch, 3, request.height, request.width), latents.dtype)
        vae = self._vae()
        image = self._call_vae(self.process.decode, vae, latents)
        self._convert(vae, dtype)
        return image

    def _vae(self) -> LoadedVAE:
        """Return the VAE on the device; if offloading loads its weights for their calls, without them."""
        part, group = self.parts["vae"], self.request.group
        if (group or self.request.offload == "sequential") and "vae" not in self._loaded:
            arch = architecture(part.component)
            stream = part.stream_of(group) if group else 0
            groups = part.groups(group) if group else None
            passing = functools.partial(pass_vae, arch_key(arch), groups=groups, stream=stream)
            self._loaded["vae"] = LoadedVAE(self.process, arch, "diffusers", part.dtype, (), passing=passing)
        self.bring("vae")
        vae = self._loaded["vae"]
        assert isinstance(vae, LoadedVAE)
        return vae

    def _count_vae(self, op: str, shape: Sequence[int] = ()) -> None:
        """Count the work of the VAE's call, by any decoder, and the memory that vaemem allocates for it. shape: the
        images', or the picture's"""
        request, part = self.request, self.parts["vae"]
        images, _, height, width = shape or (request.batch, 3, request.height, request.width)
        dtype = "float32" if part.upcast and request.vae != "vaemem" else part.dtype
        flops, attended, moved = vae_counts(
            part.component, op, dtype, height, width, batch=images, tile=request.tile,
            release=self.process.diffusers_release, frames=request.latent_frames,
        )  # fmt: skip
        if "vae" in request.on_cpu:
            self.process.count(host_flops=flops)
        else:
            self.process.count(flops=flops, attended=attended, moved=moved, outside=request.vae_limit)

    def _call_vae(self, method: Callable[..., Tensor], vae: LoadedVAE, x: Tensor) -> Tensor:
        result = method(vae, x, tile=self.request.tile, slicing=self.request.vae.endswith("sliced"))
        self.calls.append(("vae", self.process.last_call))
        self.process.count(sent=self.calls[-1][1][0].sent)
        return result

    def _convert(self, vae: LoadedVAE, dtype: str, first: str | None = None) -> None:
        """Convert the weights of a VAE that is upcast for its call."""
        if self.parts["vae"].upcast:
            self.process.convert(vae, dtype, first)

    # ---- tensors, phases ----

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(batch, channels, height, width) of the latents; a video's frames come before the height."""
        request, channels = self.request, architecture(self.parts["vae"].component)["latent_channels"]
        factor, frames = request.pipeline.factor, [request.latent_frames] if request.pipeline.frames else []
        return request.batch, channels, *frames, request.height // factor, request.width // factor

    def tensor(self, name: str, shape: Sequence[int], dtype: str | None = None) -> Tensor:
        """Create a tensor, in the denoiser's dtype by default."""
        dtype = dtype or self.request.dtype
        size = math.prod(shape) * programs.DTYPE_BYTES[dtype]
        handle = self.process.hold(name, size)
        return Tensor(self.process, name, shape, dtype, [handle] if handle else ())

    def drop(self, *tensors: Tensor) -> None:
        self.process.drop(*tensors)

    @contextlib.contextmanager
    def phase(self, name: str, first: str | None = None) -> Iterator[None]:
        """Begin a phase once its `first` component is on the device; any earlier component to unload is then gone.
        Read the counters at the end. The second phase of a name is numbered."""
        if first:
            self.bring(first)
        self.process.reset_peak()
        yield
        self._names[name] += 1
        self.sizes.append({"height": self.request.height, "width": self.request.width})
        self.process.read(name=f"{name} {self._names[name]}" if self._names[name] > 1 else name)

    @property
    def names(self) -> dict[str, str]:
        """Names of peak tensors to replace: the process names a VAE's weights by the model."""
        return {f"weights of {part.component}": f"weights of {role}" for role, part in self.parts.items()}

    def steps(self, count: int) -> Iterator[int]:
        """Play the first steps of a loop. The last one played represents all later steps."""
        played = min(count, PLAYED_STEPS)
        for step in range(played):
            self.process.count_times(count - step if step == played - 1 else 1)
            yield step
        self.process.count_times(1)

    def timeline(self) -> Iterator[Moment]:
        """List every call step by step; names begin with the role."""
        for role, (trace, allocated, reserved) in self.calls:
            yield from moments(trace, allocated, reserved, f"{role}.")


def play_pipeline(request: PipelineRequest, workspace: Any = None) -> PipelineRun:
    """Run the pipeline, with room for it, on a fresh process as `Request.start` makes it."""
    run = PipelineRun(request, request.start(workspace))
    with refusing_too_large(f"{request.size}, a batch of {request.batch}"):
        run.play()
    return run
