"""What the pipelines of diffusers do on a simulated process, phase by phase, in the order and with the names of their
own code: components come and go, names hold tensors, phases are read.

Read in StableDiffusionPipeline, StableDiffusionXLPipeline and FluxPipeline of diffusers 0.33, ZImagePipeline,
Flux2Pipeline and Flux2KleinPipeline of 0.42. Tensors of prompts, latents and images are followed by the names that hold
them; what a scheduler's step makes in passing is three tensors of the latents' size.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem import _core
from vaemem.pipelines import programs
from vaemem.pipelines.asked import PLACES, PipelineQuestion
from vaemem.pipelines.components import CLIP_TOKENS, CLIPS, VAE_STRIDE, Made, vae_counts
from vaemem.pipelines.storage import BITSANDBYTES
from vaemem.prediction.benchmark import Names
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.planned import Phase
from vaemem.prediction.process import ROUNDED_UP, LoadedVAE, Moment, SimulatedProcess, Tensor, moments
from vaemem.prediction.runtimes import architecture

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

    def __init__(self, asked: PipelineQuestion, process: SimulatedProcess):
        self.asked, self.process, self.names = asked, process, Names(process)
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
        if part.component in _core.models():
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
            self.calls.append((role, self.process._last))
        return self.process._as_tensor(f"output of {role}", left, (), part.dtype)

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
        self.calls.append(("vae", self.process._last))
        self._work["sent"] += self.calls[-1][1][0].sent
        return result

    def _upcast(self, vae: LoadedVAE, dtype: str, first: str | None = None) -> None:
        """Converts the weights of a VAE that is upcast for its call."""
        if self.parts["vae"].upcast:
            self.process.convert(vae, dtype, first)

    # ---- tensors, phases ----

    def tensor(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        size = math.prod(shape) * programs.DTYPE_BYTES[dtype]
        address = self.process.hold(name, size)
        return Tensor(self.process, name, shape, dtype, [address] if address else ())

    def name(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """A tensor that the name of the same name holds."""
        self.names[name] = self.tensor(name, shape, dtype)

    def made(self, what: Mapping[str, Made], **counts: int) -> dict[str, Tensor]:
        """What a `Pipeline` says is made, where there are so many images, tokens and image tokens."""
        dtype = self.asked.dtype
        return {
            name: self.tensor(name, (elements, *(counts[one] for one in of)), dtype if own == "run" else own)
            for name, (elements, of, own) in what.items()
        }

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
            tensors, process._core.peak(reading)[0] or "", **stretch.work,
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


# ---- what each pipeline does ----


def play_pipeline(question: PipelineQuestion, workspace: Any = None) -> PipelineRun:
    """A fresh process, as `Asked.start` makes it, runs the pipeline where there is room."""
    run = PipelineRun(question, question.start(workspace))
    _play(run)
    return run


def _play(run: PipelineRun) -> None:
    """All phases."""
    pipeline = run.asked.pipeline
    stay = [role for role in run.parts if role not in run.moved]
    early = [role for role, part in run.parts.items() if part.place != PLACES[0]]
    if stay or early:
        with run.phase("load"):
            for role in early:  # by from_pretrained, before anything is said about offloading
                run.load(role, quantises=bool(run.parts[role].source))
            for role in early:
                if role not in stay:
                    run.unload(role)
            for role in stay:
                if role not in early:
                    run.load(role)
    encoders = [role for role in pipeline.encoders if role in run.parts]
    with run.phase("encode prompt", *encoders[:1]):
        _encode_prompt(run, encoders)
    if run.asked.image:
        with run.phase("encode image", "vae"):
            _encode_image(run)
    with run.phase("denoise", pipeline.denoiser):
        _denoise(run)
    with run.phase("decode", "vae"):
        _decode(run)


def _encode_prompt(run: PipelineRun, encoders: list[str]) -> None:
    asked, names, pipeline = run.asked, run.names, run.asked.pipeline
    dtype = asked.dtype
    calls, encodes, tokens = pipeline.lengths(asked.tokens)
    prompts = ["prompt_embeds", *["negative_prompt_embeds"] * (pipeline.guides and asked.guidance)]
    listed = []  # SDXL's code joins these; they stay until its function returns

    def pool(name: str) -> None:
        run.name(name.replace("prompt", "pooled_prompt"), (asked.batch, pipeline.pooled), dtype)

    for name in prompts:
        encoded = []
        for role in encoders:
            # FLUX's CLIP has its own number of tokens; its pooled output alone is kept.
            own = CLIP_TOKENS if run.parts[role].component in CLIPS else encodes
            for _ in range(calls):
                given = run.made(pipeline.asks, n=1, t=own)
                encoded.append(run.call(role, n=1, t=own))
                run.process.drop(*given.values())
            if run.parts[role].component == "clip-l-flux":  # which gives the pooled output alone
                pool(name)
                run.process.drop(encoded.pop())
        # Joined where several encoders give one, or repeated for each image.
        run.name(name, (asked.batch, tokens, pipeline.width), dtype)
        if len(encoders) > 1 < len(encoded):
            listed += encoded
        else:
            run.process.drop(*encoded)
    # SDXL's pooled outputs are a part of what was encoded until here, where they are repeated.
    if pipeline.pooled and "pooled_prompt_embeds" not in names.held:
        for name in prompts:
            pool(name)
    run.process.drop(*listed)
    if len(prompts) > 1:
        names["prompt_embeds"] = run.tensor("prompt_embeds, both", (2, *names["prompt_embeds"].shape), dtype)
        if pipeline.pooled:
            run.name("add_text_embeds", (2 * asked.batch, pipeline.pooled), dtype)


def _encode_image(run: PipelineRun) -> None:
    """As the image-to-image pipelines do: the image on the device, its latents, and noise beside them."""
    asked, names, dtype = run.asked, run.names, run.parts["vae"].dtype
    run.name("init_image", (asked.batch, 3, asked.height, asked.width), dtype)
    names["init_latents"] = run.encode(names["init_image"])
    run.name("noise", names["init_latents"].shape, dtype)


def _denoise(run: PipelineRun) -> None:
    asked, names, process, pipeline = run.asked, run.names, run.process, run.asked.pipeline
    dtype = asked.dtype
    kept = dtype if pipeline.latents == "run" else pipeline.latents
    height, width = asked.height // VAE_STRIDE, asked.width // VAE_STRIDE
    *_, tokens = pipeline.lengths(asked.tokens)
    images = asked.batch * (2 if pipeline.guides and asked.guidance else 1)
    channels = _core.models()[run.parts["vae"].component]["latent_channels"]
    latent = (asked.batch, channels, height, width)
    run.name("timesteps", (asked.steps,), "float32")
    run.name("latents", latent, kept)
    counts = {"n": images, "t": tokens, "p": height // 2 * (width // 2)}
    names.held.update(run.made(pipeline.conditions, **counts))
    for _ in run.steps(asked.steps):
        if pipeline.keeps_input:
            names.delete("latent_model_input")
        if images > asked.batch or kept != dtype:
            run.name("latent_model_input", (images, *latent[1:]), dtype)
        passed = run.made(pipeline.passes, **counts)
        names["noise_pred"] = run.call(pipeline.denoiser, n=images, h=height, w=width, t=tokens)
        process.drop(*passed.values())
        if images > asked.batch:  # uncond + scale * (text - uncond), both parts of what the denoiser gave
            names.delete("noise_pred_uncond, noise_pred_text")
            names.held["noise_pred_uncond, noise_pred_text"] = names.held.pop("noise_pred")
            difference = run.tensor("noise_pred_text - noise_pred_uncond", latent, dtype)
            scaled = run.tensor("guidance_scale * ...", latent, dtype)
            process.drop(difference)
            run.name("noise_pred", latent, dtype)
            process.drop(scaled)
        elif kept != dtype:  # stacked in that dtype, and negated
            names["model_out_list"] = names.held.pop("noise_pred")
            stacked = run.tensor("noise_pred", latent, kept)
            names["noise_pred"] = run.tensor("- noise_pred", latent, kept)
            process.drop(stacked)
        steps = [run.tensor("scheduler.step", latent, "float32") for _ in range(2)]
        if pipeline.keeps_input:
            names.held["latent_model_input"] = names.held.pop("latents")
        run.name("latents", latent, kept)
        process.drop(*steps)


def _decode(run: PipelineRun) -> None:
    asked, names, part = run.asked, run.names, run.parts["vae"]
    kept = "latents" if asked.pipeline.rescales else "latents / scaling_factor"
    names.held.update(run.made(asked.pipeline.rescalers))
    names[kept] = run.tensor("latents / scaling_factor", names["latents"].shape, part.dtype)
    names["image"] = run.decode(names[kept])
    if not asked.pipeline.rescales:
        names.delete(kept)
    dtype = "float32" if part.upcast else part.dtype
    image = asked.batch, 3, asked.height, asked.width
    steps = [] if "vae" in asked.on_cpu else ["image * 0.5", "image * 0.5 + 0.5", "image, clamped"]
    if "safety_checker" in run.parts:  # it is shown the finished picture, made small
        for name in steps:
            names["shown"] = run.tensor(name, image, dtype)
        names.delete("shown")
        run.name("clip_input", (asked.batch, 3, 224, 224), dtype)
        names["checked"] = run.call("safety_checker", n=asked.batch)
    for name in steps:
        names["image"] = run.tensor(name, image, dtype)
