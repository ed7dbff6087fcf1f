"""Play a pipeline of diffusers on a simulated process: load and unload components, allocate and free tensors, and read
the counters at the end of each phase. The pipeline's text (vaemem/pipelines/pipeline_text.py) has its steps."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vaemem import _core
from vaemem._errors import ArgumentError
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.components import CLIP_TOKENS, CLIPS, is_vae, vae_counts
from vaemem.pipelines.pipeline_parts import PLACES, Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.pipelines.pipeline_text import PipelineText, load_text, phase_of
from vaemem.pipelines.quantising import BITSANDBYTES, SCHEMES
from vaemem.pipelines.storage import Stored
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.held_tensors import LoadedVAE, Moment, Tensor, arch_key, moments
from vaemem.prediction.offloaded_weights import pass_vae
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.request import refusing_too_large
from vaemem.prediction.runtimes import LAST_PARTLY_UPCAST, architecture


class PipelineRun:
    """A pipeline's run by a process. With the offload ``"model"`` (``enable_model_cpu_offload``) each component
    loads whole for its call, and unloads when the next is called. With ``"sequential"``
    (``enable_sequential_cpu_offload``) each submodule's weights are loaded for its call, and unloaded after it."""

    def __init__(self, request: PipelineRequest, process: SimulatedProcess):
        self.request, self.process = request, process
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
        self._phase = ""  # the one that runs
        self._converted: dict[str, str] = {}  # types of components that the pipeline converted
        self._more: dict[int, list[int]] = {}  # by a handle, others that are freed with it

    def play(self) -> None:
        """Load the pipeline, and play its calls."""
        self._load_components()
        left = dict[str, list[int]]()
        for number, request in enumerate(self.request.calls):
            if number:
                self._return()
            self.request = request
            self.process.reset_peak()
            play_text(load_text(request.text), request.variables, self, left)
            self._end_phase()

    def _return(self) -> None:
        """End a call: ``maybe_free_model_hooks`` unloads everything."""
        for role in [*self._loaded] if self.request.offload == "model" else ():
            if role in self.moved:
                self.unload(role)

    # ---- components ----

    def _load_components(self) -> None:
        """Play ``from_pretrained``, then ``to("cuda")`` or an offload. If everything starts on the CPU and is
        offloaded, there is no phase load: components move to the device when they are called."""
        stay = [role for role in self.parts if role not in self.moved]
        early = [role for role, part in self.parts.items() if part.place != PLACES[0]]  # by from_pretrained
        # If pipe.to moves everything, a component that is cast on the card comes with the others.
        early = [role for role in early if role not in stay or not self.parts[role].is_cast_on_card]
        if early or stay:
            for role in early:
                self.load(role, quantises=bool(self.parts[role].source))
            for role in early:
                if role not in stay:
                    self._cast(role)
                    self.unload(role)
            late = [role for role in stay if role not in early]
            late = late if self.request.pipeline.is_modular else sorted(late)  # the order of pipe.to
            for role in late:
                self.load(role, quantises=self.parts[role].is_cast_on_card)
            for role in late:
                self._cast(role)
            self._phase = "load"
            self._end_phase()

    def load(self, role: str, quantises: bool = False) -> None:
        """Play ``component.to("cuda")``; or ``from_pretrained`` with bitsandbytes. Such a load sends each matrix in
        half precision, and quantises it on the device."""
        part, process, name = self.parts[role], self.process, f"weights of {role}"
        self._loaded[role] = []
        if role in self.request.on_cpu or (role == "vae" and self.request.vae == "vaemem"):
            return
        if is_vae(part.component):
            dtype = self._converted.get(role, part.dtype)
            is_partly = dtype != part.dtype and self._is_partly_upcast and not self.request.encodes
            first = part.dtype if is_partly else None
            vae = process.load(part.component, dtype, "diffusers", first=first)
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

    def call(self, role: str, method: str, given: int, kept: int, **sizes: int) -> Sequence[int]:
        """Call a component; return its outputs. given: the last tensor that was taken. A missing text encoder has no
        outputs: prompts come encoded. CLIP encodes a longer prompt in several calls. A module that was recorded with
        more outputs than the pipeline's text knows frees them with the last one; with fewer, some are not there."""
        self._begin_phase(phase_of(role, method), role)
        if role not in self.parts:
            return ()
        component = self.parts[role].component
        wanted = ("n", "f", "h", "w") if is_vae(component) else recorded_modules.load_program(component).variables
        if missing := [name for name in wanted if name not in sizes]:
            raise ArgumentError("text", f"{', '.join(wanted)} in a call of {role}", f"a line without {missing[0]}")
        picture, sizes = sizes.get("picture", 0), {name: sizes[name] for name in wanted}
        if is_vae(component):
            is_decode = method == "decode"
            outputs = self._decode(given, **sizes) if is_decode else self._encode(given, picture, **sizes)
            self.process.release(outputs[kept:])  # a pipeline may keep a posterior's mean alone
            return self._keep(outputs[:kept], kept)
        if role.startswith("text_encoder") and component.rpartition("/")[2] in CLIPS:
            calls, section = -(-sizes["t"] // CLIP_TOKENS), sizes | {"t": min(sizes["t"], CLIP_TOKENS)}
            found = [self._keep(self._call(role, **section), kept) for _ in range(calls)]
            for handle, *more in zip(*found, strict=True):
                self._more[handle] = [*self._more.pop(handle, ()), *more]
            return found[0]
        return self._keep(self._call(role, **sizes), kept)

    def enter(self, role: str, method: str) -> None:
        """Bring a component whose method calls its children."""
        self._begin_phase(phase_of(role, method), role)
        self.bring(role)

    def _keep(self, outputs: Sequence[int], kept: int) -> Sequence[int]:
        """Return `kept` outputs of a call. The last one also holds further outputs; 0 stands for a missing one."""
        if not outputs:
            return ()
        if not kept:
            self.process.release(outputs)
        elif more := [*outputs[kept:]]:
            self._more[outputs[kept - 1]] = more
        return [*outputs[:kept], *[0] * (kept - len(outputs))]

    def _call(self, role: str, **sizes: int) -> Sequence[int]:
        """Call a recorded module."""
        self.bring(role)
        part, process = self.parts[role], self.process
        if role in self.request.on_cpu:
            process.count(host_flops=part.trace(find_gpu(recorded_modules.ANY_GPU), "none", False, **sizes).flops)
            return ()
        offload = (self.request.group or self.request.offload) if role in self.moved else "none"
        later = bool(self.request.group) and any(one == role for one, _ in self.calls)
        trace = part.trace(process.gpu, offload, later, process.cudnn_attention, **sizes)
        left = process.call(trace)
        process.count(flops=trace.flops, sent=part.passed if offload == "sequential" else trace.sent)
        self.calls.append((role, process.last_call))
        return [left[id_] for id_ in sorted(left)]

    # ---- the VAE ----

    def convert(self, role: str, dtype: str) -> None:
        """Convert the VAE's weights. With model offload the weights are converted on the CPU, before the component's
        call loads them."""
        if role != "vae" or not is_vae(self.parts[role].component):
            raise ArgumentError("text", "conversions of a VAE with a config only", f"one of the {role}")
        request, part = self.request, self.parts[role]
        dtype = dtype if dtype == "float32" else part.dtype
        self._converted[role] = dtype
        skips = role in request.on_cpu or request.vae == "vaemem"
        if skips or (request.offload == "model" and role in self.moved and role not in self._loaded):
            return
        vae = self._vae()
        self.process.convert(vae, dtype)
        if dtype == "float32" and self._is_partly_upcast and self._phase == "denoise":
            self.process.convert(vae, dtype, part.dtype)

    @property
    def _is_partly_upcast(self) -> bool:
        return self.process.diffusers_release <= LAST_PARTLY_UPCAST

    def _encode(self, given: int, picture: int, n: int, f: int, h: int, w: int) -> Sequence[int]:
        """Play ``vae.encode(image)``. picture: whether the image has a picture's strides"""
        vae, dtype = self._vae(), self.request.pipeline.vae_dtype or self.request.dtype
        if self.request.pipeline.inputs > 1 and vae.dtype != dtype:
            advice = "the pipeline gives its VAE an image of this type"
            raise ArgumentError("components['vae']", dtype, vae.dtype, advice)
        images = self.request.batch if self.request.first else n  # all that the call before made
        shape = images, 3, *([f] * (f > 1)), h, w
        image = Tensor(self.process, "image", shape, vae.dtype, [given], picture=bool(picture))
        self._count_vae("encode", images, (f - 1) // 4 + 1, h, w)
        return self._call_vae(self.process.encode, vae, image).storages or ()

    def _decode(self, given: int, n: int, f: int, h: int, w: int) -> Sequence[int]:
        """Play ``vae.decode(latents)``, or vaemem's decoder. That allocates its own memory: its whole limit counts. The
        image becomes a tensor."""
        request, process, part = self.request, self.process, self.parts["vae"]
        self._count_vae("decode", request.batch, request.latent_frames, request.height, request.width)
        if "vae" in request.on_cpu:
            return ()
        if request.vae == "vaemem":
            shape = request.batch, 3, request.height, request.width
            return [self.take("image", math.prod(shape) * recorded_modules.DTYPE_BYTES[part.dtype])]
        vae = self._vae()
        shape = (n, vae.latent_channels, *([f] if request.pipeline.frames or f > 1 else []), h, w)
        latents = Tensor(process, "latents", shape, vae.first or vae.dtype, [given])
        return self._call_vae(process.decode, vae, latents).storages or ()

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

    def _count_vae(self, op: str, images: int, frames: int, height: int, width: int) -> None:
        """Count the work of the VAE's call, by any decoder, and the memory that vaemem allocates for it. frames: of
        latents"""
        request, part = self.request, self.parts["vae"]
        dtype = "float32" if part.upcast and request.vae != "vaemem" else part.dtype
        flops, attended, moved = vae_counts(
            part.component, op, dtype, height, width, batch=images, tile=request.tile,
            release=self.process.diffusers_release, frames=frames,
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

    # ---- tensors, phases ----

    def take(self, name: str, size: int) -> int:
        return self.process.hold(name, size)

    def free(self, handle: int) -> None:
        if handle:
            self.process.release([handle, *self._more.pop(handle, ())])

    def multiply(self, lt: bool) -> None:
        trace = _core.Trace()
        trace.blas("matrix product", lt)
        self.process.call(trace)

    def stand_for(self, steps: int) -> None:
        self.process.count_times(steps)

    def _begin_phase(self, name: str, role: str) -> None:
        """Begin a phase once its first component is on the device; any earlier component to unload is then gone. The
        first phase has begun with the call. No name: it belongs to the phase before."""
        if name and name != self._phase:
            if begun := bool(self._phase):
                self._end_phase()
            self.bring(role)
            if begun:
                self.process.reset_peak()
            self._phase = name

    def _end_phase(self) -> None:
        """Read the counters. The second phase of a name is numbered."""
        self._names[self._phase] += 1
        number = self._names[self._phase]
        self.sizes.append({"height": self.request.height, "width": self.request.width})
        self.process.read(name=f"{self._phase} {number}" if number > 1 else self._phase)
        self._phase = ""

    @property
    def names(self) -> dict[str, str]:
        """Names of peak tensors to replace: the process names a VAE's weights by the model."""
        return {f"weights of {part.component}": f"weights of {role}" for role, part in self.parts.items()}

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


def play_text(text: PipelineText, at: Mapping[str, int], run: PipelineRun, left: dict[str, list[int]]) -> None:
    """Play a text with these variables. A handle is of a tensor, 0 for one that is not there. left: tensors by name
    that earlier calls left. One is freed as soon as another of its name is there; new ones that stay are added."""
    given, earlier = 0, {name: [*handles] for name, handles in left.items()}
    left.clear()
    for actions, steps in text.actions(at):
        run.stand_for(steps)
        for kind, words, size, sizes, name in actions:
            live = left.setdefault(name, [])
            if kind == "take":
                given = run.take(name, size)
                live.append(given)
                for old in earlier.pop(name, ()):
                    run.free(old)
            elif kind == "free":
                place = int(words[0])
                if not -len(live) <= place < len(live):
                    raise ArgumentError("text", f"more than {place} tensors of that name", f"free {place} | {name}")
                run.free(live.pop(place))
            elif kind == "call":
                role, method, kept = words
                live += run.call(role, method, given, int(kept), **sizes) or [0] * int(kept)
            elif kind in ("convert", "enter"):
                (run.convert if kind == "convert" else run.enter)(*words)
            else:
                run.multiply(words[0] == "lt")
    run.stand_for(1)
    left.update(earlier)
