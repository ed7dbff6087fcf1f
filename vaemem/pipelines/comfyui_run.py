"""Play a workflow of ComfyUI: its manager's decisions, and the memory of each phase on the card.

The workflow has ComfyUI's nodes for a picture from text: a loader, CLIPTextEncode for the prompts, KSampler with
Euler's steps, VAEDecode. Models are those of a start: in the host's memory. ComfyUI's own modules were recorded
(data/modules/comfyui); the rest is written after comfy/samplers.py and comfy/k_diffusion/sampling.py. Latents between
the nodes are in the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem._core import OutOfMemoryError
from vaemem.pipelines import programs
from vaemem.pipelines.comfyui import (
    CLASSIC,
    LARGE,
    MORE_ON_LARGE,
    NO_VRAM,
    NORMAL,
    RESERVED,
    RESERVED_ON_WINDOWS,
    STREAMED,
    USAGE,
    Layer,
    ManagedModel,
    Manager,
    Release,
    estimate_denoiser,
    estimate_vae,
)
from vaemem.pipelines.components import CLIP_TOKENS, PIPELINES, VAE_STRIDE, vae_counts
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.prediction.held import LoadedVAE, Tensor, Variables
from vaemem.prediction.passing import BY_DIFFUSERS, Passing
from vaemem.prediction.planned import Phase
from vaemem.prediction.plays import Plays
from vaemem.prediction.process import PeakTensor
from vaemem.prediction.request import PAGE
from vaemem.prediction.runtimes import architecture, shipped_models
from vaemem.prediction.usual import BFLOAT16_SM

CLIP = "text_encoder"  # the role of all text encoders together, which are one model for the manager
FALLBACK_TILE = 512  # pixels of a tile's side by default, and after AutoencoderKL's decode ran out of memory
LOW, NO, WHOLE = "--lowvram", "--novram", "--disable-smart-memory"
COMFYUI_OPTIONS = ("none", LOW, NO, WHOLE)  # none: without an option
LEAST_SM = 70
PLAYED_STEPS = 2  # of the denoiser; the cache and the sizes are the same from the second one on
_QWEN_TEMPLATE = 34  # tokens of the template before the part that is kept
DYNAMIC = (
    "the dynamic manager of newer versions (comfy-aimdo) moves weights page by page on a GPU, which nobody modelled"
)


def _count_sections(tokens: int) -> int:
    """Count the sections of a prompt for CLIP, the last one with padding."""
    return -(-tokens // CLIP_TOKENS)


class _Workflow(NamedTuple):
    """The models of a workflow.

    kind: the denoiser's class in comfy/supported_models.py
    encoder, denoiser: recorded modules
    dtypes: of the denoiser, on cards with bfloat16 and without
    tokens, least_tokens: of a prompt by default, and at least; the least is 0 if the encoder takes sections of 77
    template: tokens of the encoder besides the prompt's: how many are cut from its output, and how many stay
    joins: whether both prompts can run in one call of the denoiser. If not, they have different lengths
    encoder_dtype: in which the text encoder's weights are stored
    vae: the VAE's class
    fallback: pixels of a tile's side after a whole decode ran out of memory
    least_sm: of a card
    release: the release of ComfyUI whose code and manager are played
    least_joined: fewest tokens of the joined prompt in the denoiser; ComfyUI pads a shorter one to so many
    packed: side of the squares of the VAE's latents that are one latent of the denoiser
    """

    kind: str
    encoder: str
    denoiser: str
    dtypes: tuple[str, str]
    tokens: int = CLIP_TOKENS
    least_tokens: int = 0
    template: tuple[int, int] = (0, 0)
    joins: bool = True
    encoder_dtype: str = "float16"
    vae: str = "AutoencoderKL"
    fallback: int = FALLBACK_TILE
    least_sm: int = LEAST_SM
    release: Release = CLASSIC
    least_joined: int = 0
    packed: int = 1


_FLUX = _Workflow(
    "Flux", "comfyui/flux-clip", "comfyui/flux-transformer", ("bfloat16", "float16"), tokens=256, least_tokens=256,
)  # fmt: skip
WORKFLOWS = {
    "sd15": _Workflow("SD15", "comfyui/sd15-clip", "comfyui/sd15-unet", ("float16", "float16")),
    "sdxl": _Workflow("SDXL", "comfyui/sdxl-clip", "comfyui/sdxl-unet", ("float16", "float16")),
    "flux": _FLUX,
    "flux-schnell": _FLUX._replace(denoiser="comfyui/flux-schnell-transformer"),
    "qwen-image": _Workflow(
        "QwenImage", "comfyui/qwen-image-clip", "comfyui/qwen-image-transformer", ("bfloat16", "bfloat16"),
        least_tokens=1, template=(_QWEN_TEMPLATE, PIPELINES["qwen-image"].joined), joins=False,
        encoder_dtype="bfloat16", vae="WanVAE", fallback=256, least_sm=BFLOAT16_SM,
    ),
    "flux2": _Workflow(
        "Flux2", "comfyui/flux2-clip", "comfyui/flux2-transformer", ("bfloat16", "bfloat16"), tokens=128,
        least_tokens=1, encoder_dtype="bfloat16", vae="Flux2", fallback=1024, least_sm=BFLOAT16_SM, release=STREAMED,
        least_joined=512, packed=2,
    ),
    **dict.fromkeys(("zimage", "zimage-turbo"), _Workflow(
        "ZImage", "comfyui/zimage-clip", "comfyui/zimage-transformer", ("bfloat16", "bfloat16"), least_tokens=1,
        template=(0, 8), joins=False, encoder_dtype="bfloat16", least_sm=BFLOAT16_SM, release=STREAMED,
    )),
}  # fmt: skip
# The class of these layers is not in comfy/ops.py. Their own code moves their weights.
_PLAIN = re.compile(
    r"\.(query|key)_norm\.scale$|^t5xxl\..*layer_norm\.weight$|(_layernorm|\.model\.norm|self_attn\.[qk]_norm)\.weight$"
    r"|\.gamma$"
)
_EMBEDDINGS = ".token_embedding", ".shared", ".embed_tokens"
# Buffers whose modules are no layers, because they have no parameters. Buffers that no state dict has.
_TABLES = re.compile(r"^(model_sampling|noise_augmentor)\b")
_NOT_SAVED = re.compile(r"^noise_augmentor\.data_(mean|std)$")


def layers_of(weights: Sequence[tuple[str, int]], copied: int = 0) -> tuple[list[Layer], int]:
    """Return a model's layers as the manager finds them, and the bytes in no layer. weights: (name, bytes). copied: how
    many times as many bytes a layer's weights have in the dtype of its call, if they are converted for it."""
    owned: dict[str, int] = {}
    converted: dict[str, int] = {}
    plain = {name.rpartition(".")[0] for name, _ in weights if _PLAIN.search(name)}
    for name, size in weights:
        if _NOT_SAVED.match(name):
            continue
        owner, _, own = name.rpartition(".")
        owned[owner] = owned.get(owner, 0) + size
        converted[owner] = converted.get(owner, 0) + copied * size * (own in ("weight", "bias"))
    outer = {owner[:end] for owner in owned for end in _ends(owner)}
    found = [
        Layer(size, owner, owner not in plain, converted[owner] * (owner not in plain))
        for owner, size in owned.items()
        if owner and owner not in outer and not _TABLES.match(owner)
    ]
    return found, sum(owned.values()) - sum(layer.bytes for layer in found)


def _ends(owner: str) -> Iterator[int]:
    """Yield the ends of the names of the modules around a module; that of the outermost is 0."""
    yield from (match.start() for match in re.finditer(r"\.", owner))


class ComfyUIRun:
    """A workflow, with the manager's decisions for a card of `available` bytes. It ends where memory runs out."""

    def __init__(
        self, request: PipelineRequest, available: int, workspace: Any = None, again: ComfyUIRun | None = None
    ):
        """again: a run on that card, to play with room for everything."""
        self.request, self.available = request, available
        device = {} if again else {"total_memory": max(available, PAGE)}
        self.process = request.start(workspace, **device)
        self.models: dict[str, ManagedModel] = {}
        self._sizes: dict[str, dict[str, list[int]]] = {}  # bytes of each layer's tensors, by role; "" is the rest
        self._held: dict[str, dict[str, list[int]]] = {}  # their addresses on the card
        for part in request.parts:
            weights = [(weight.name, weight.bytes) for weight in part.weights]
            # From 0.8.0 on the manager knows that text encoders compute in float32.
            copied = 2 if part.role == CLIP and self._work.release.streams else 0
            layers, rest = layers_of(weights, copied)
            names = {layer.name for layer in layers}
            sizes = self._sizes[part.role] = {}
            for name, size in weights:
                owner = name.rpartition(".")[0]
                sizes.setdefault(owner if owner in names else "", []).append(size)
            self.models[part.role], self._held[part.role] = (
                ManagedModel(part.role, layers, rest, 0, self._work.release),
                {},
            )
        windows = RESERVED_ON_WINDOWS + MORE_ON_LARGE * (request.card.gpu.total_memory > LARGE)
        reserved = windows if request.card.is_windows else RESERVED
        state, smart = NO_VRAM if request.offload == NO else NORMAL, request.offload != WHOLE
        self.manager = Manager(self.free, reserved, state, smart, self._empty, self._work.release)
        self._layers_sent = 0  # so far, on streams in turn
        self.estimates: dict[str, float] = {}  # by phase
        self.left: dict[str, list[str]] = {}  # roles of the models that leave, by phase
        self.placed: dict[str, dict[str, tuple[int, int]]] = {}  # bytes counted and of all, by phase and role
        self.tiled: bool = bool(again and again.tiled)  # whether the decode runs out of memory, and runs again in tiles
        self.clip_on_cpu = False  # whether text encoders compute on the CPU for want of room; played as on the card
        self.batched = True  # whether both prompts run in one call of the denoiser
        self.full: tuple[str, PeakTensor] | None = None
        try:
            for phase in (self._encode, self._denoise, self._decode):
                phase()
        except OutOfMemoryError as error:
            self.full = self._phase, PeakTensor(self.process.frames[error.tag], error.requested)

    # ---- the card ----

    def free(self) -> int:
        """Return the card's free bytes: get_free_memory, after the weights have moved."""
        for role, model in self.models.items():
            held, chosen = self._held[role], {*model.there, *[""] * model.is_whole}
            for name in [name for name in held if name not in chosen]:
                self.process.release(held.pop(name))
            for name in [layer.name for layer in model.layers] + [""]:
                if name in chosen and name not in held and name in self._sizes[role]:
                    held[name] = self.process.hold_all(f"weights of {role}", self._sizes[role][name])
                    self.process.count(sent=sum(self._sizes[role][name]))
        return self.available - self.process.allocated

    def _empty(self, left: bool) -> None:
        """Play the end of free_memory: PyTorch's cache goes if models left, or if it is a quarter of the free bytes."""
        free = self.free()
        if left or self.process.reserved - self.process.allocated > 0.25 * free:
            self.process.empty_cache()

    def _load(self, phase: str, role: str, estimate: float = 0, least: float | None = None) -> None:
        """Load the model of a phase, which begins then: any models that leave have left."""
        self._phase, self.estimates[phase] = phase, estimate
        gone = self.manager.load(self.models[role], estimate, least)
        self.free()
        self.left.setdefault(phase, []).extend(model.name for model in gone)
        self.placed[phase] = {model.name: (model.loaded, model.nbytes) for model in self.manager.models}
        self.process.reset_peak()

    @property
    def _work(self) -> _Workflow:
        return WORKFLOWS[self.request.name]

    def _tensor(self, name: str, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        return self.process.tensor(shape, dtype, name)

    def _call(self, role: str, **sizes: int) -> Tensor:
        """Call a model; layers that are not on the card come for their calls."""
        part, model, process = self.request.part(role), self.models[role], self.process
        sent, turns = model.sent, self._work.release.streams
        numbers = self._streams_of(part, sent, sizes) if turns else {}
        # Text encoders convert each weight for its call, wherever it is: the recording has the copies. With streams the
        # weight itself comes first.
        passing = [
            Passing(layer.name, layer.name, "weight", size, BY_DIFFUSERS, stream=numbers.get(layer.name, 0))
            for layer in (sent if role != CLIP or turns else ())
            for size in self._sizes[role][layer.name][:: 1 if turns else -1]  # without streams the bias comes first
        ]
        recording = programs.load_program(part.component)
        trace = recording.trace(part.dtype, process.gpu, passing, (), **sizes)
        left = process.call(trace)
        process.count(flops=trace.flops, sent=sum(layer.bytes for layer in sent))
        return Tensor(process, f"output of {role}", (), part.dtype, left.values())

    def _streams_of(self, part: Part, sent: Sequence[Layer], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the stream on which each layer comes: they take turns in the order of their calls."""
        spans = {number: (layer.name, layer.name) for number, layer in enumerate(sent) if layer.casts}
        found = dict[str, int]()
        for number in part.order_of_calls(spans, self.process.gpu, sizes) if spans else ():
            found[sent[number].name] = 1 + self._layers_sent % self._work.release.streams
            self._layers_sent += 1
        return found

    # ---- the nodes ----

    def _encode(self) -> None:
        """Play CLIPTextEncode for each prompt. Its result goes to the host, or is there."""
        q, work = self.request, self._work
        sizes = {"t": q.tokens + sum(work.template)} if work.least_tokens else {"n": _count_sections(q.tokens)}
        prompts = 2 if q.guidance else 1
        if q.offload in (LOW, NO):  # they run on the CPU
            part = q.part(CLIP)
            flops = programs.load_program(part.component).trace(part.dtype, self.process.gpu, (), (), **sizes).flops
            self._phase, self.estimates["encode prompt"] = "encode prompt", 0
            self.placed["encode prompt"], self.left["encode prompt"] = {}, []
            self.process.count(host_flops=prompts * flops)
        else:
            self._load("encode prompt", CLIP)
            away = any(layer.name.endswith(_EMBEDDINGS) for layer in self.models[CLIP].sent)
            self.clip_on_cpu = away and work.release is CLASSIC
            for _ in range(prompts):  # the second request for the model changes nothing
                self.process.drop(self._call(CLIP, **sizes))
        self.process.read(name="encode prompt")

    def _denoise(self) -> None:
        """Play KSampler: Euler's steps, with latents in float32. A name keeps the noise that they begin with."""
        q, run = self.request, self.process
        usage, (n, *latent) = USAGE[self._work.kind], self.latent_shape
        one, both = (estimate_denoiser(usage, (count, *latent), q.dtype) for count in (n, 2 * n))
        self._load("denoise", q.pipeline.denoiser, both, one)
        v = Variables(run)
        v.noise, v.latent_image = (self._tensor(name, (n, *latent)) for name in ("noise", "latent_image"))
        v.sigmas = self._tensor("sigmas", (q.steps + 1,))
        v.x = v.scaled_noise = self._tensor("x", (n, *latent))
        v.s_in = self._tensor("s_in", (n,))
        for step in range(min(q.steps, PLAYED_STEPS)):
            run.count_times(q.steps - step if step == PLAYED_STEPS - 1 else 1)
            v.denoised = self._predict(n, latent, both)
            difference = self._tensor("x - denoised", (n, *latent))
            v.d = self._tensor("d", (n, *latent))
            run.drop(difference)
            v.dt = self._tensor("dt", (1,))
            moved = self._tensor("d * dt", (n, *latent))
            v.x = self._tensor("x", (n, *latent))
            run.drop(moved)
        run.count_times(1)
        v.delete(*v)
        run.read(name="denoise")

    def _predict(self, n: int, latent: Sequence[int], both: float) -> Tensor:
        """Play sampling_function: both prompts in one call if one and a half times the estimate is free, otherwise one
        after the other. The prompts' embeddings stay in the host's memory until the model casts them."""
        q, work, run, v = self.request, self._work, self.process, Variables(self.process)
        prompts, shape = (2 if q.guidance else 1), (n, *latent)
        v.timestep = self._tensor("timestep", (n,))
        for i in range(2):
            setattr(v, f"out_conds_{i}", self._tensor("out_conds", shape))
            ones = self._tensor("ones", shape)
            setattr(v, f"out_counts_{i}", self._tensor("out_counts", shape))
            run.drop(ones)
        for i in range(prompts):
            ones = self._tensor("mask", shape)
            setattr(v, f"mult_{i}", self._tensor("mult", shape))
            run.drop(ones)
        self.batched = prompts == 1 or (work.joins and both * 1.5 < self.free())
        calls = 1 if self.batched else prompts
        tokens = CLIP_TOKENS * _count_sections(q.tokens)
        tokens = max(q.tokens + work.template[1], work.least_joined) if work.least_tokens else tokens
        for call in range(calls):
            v.delete("input_x", *[f"mult_{call - 1}"] * call)
            m = prompts // calls * n
            v.input_x = self._tensor("input_x", (m, *latent))
            v.timestep_ = self._tensor("timestep, joined", (m,))
            v.output = self._call(q.pipeline.denoiser, n=m, h=latent[1], w=latent[2], t=tokens)
            for _ in range(prompts // calls):
                run.drop(self._tensor("output * mult", shape))
        v.delete("input_x", "timestep_", "output", *(f"mult_{i}" for i in range(prompts)))
        v.difference = self._tensor("cond_pred - uncond_pred", shape)
        v.scaled = self._tensor("(cond_pred - uncond_pred) * cond_scale", shape)
        v.delete("difference")
        result = self._tensor("cfg_result", shape)
        v.delete(*v)
        return result

    def _decode(self) -> None:
        """Play VAEDecode or VAEDecodeTiled. If a whole decode runs out of memory, it decodes in tiles."""
        q, part = self.request, self.request.part("vae")
        estimate = estimate_vae("decode", self.latent_shape, part.dtype, self._work.vae)
        self._load("decode", "vae", estimate)
        largest = max((layer.bytes for layer in self.models["vae"].sent), default=0)
        passing = self.process.hold("weights of vae", largest) if largest else 0
        weights = [address for held in self._held["vae"].values() for address in held]
        vae = LoadedVAE(self.process, architecture(part.component), "comfyui", part.dtype, weights)
        vae.older = self._work.release is CLASSIC
        if q.vae == "whole" and not self.tiled:
            batch = max(1, int(self.free() / estimate))
            try:
                for first in range(0, q.batch, batch):
                    self._decode_part(vae, min(batch, q.batch - first), 0)
            except OutOfMemoryError:
                self.tiled = True
        if self.tiled or q.vae != "whole":
            self._decode_part(vae, q.batch, q.tile or self._work.fallback)
        if passing:
            self.process.release([passing])
        self.process.read(name="decode")

    def _decode_part(self, vae: LoadedVAE, images: int, tile: int) -> None:
        q, part, shape = self.request, self.request.part("vae"), (images, *self.latent_shape[1:])
        flops, attended, moved = vae_counts(
            part.component, "decode", part.dtype, q.height, q.width, batch=images, tile=tile
        )
        self.process.count(flops=flops, attended=attended, moved=moved)
        latents = self.process.tensor(shape, vae.dtype, "latents", host=True)
        self.process.drop(self.process.decode(vae, latents, tile=tile))

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """(images, channels, height, width) of the latents."""
        q, channels = self.request, shipped_models()[self.request.part("vae").component]["latent_channels"]
        side, stride = self._work.packed, VAE_STRIDE * self._work.packed
        return q.batch, channels * side * side, q.height // stride, q.width // stride

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return sum(part.nbytes for part in self.request.parts)

    def phases(self) -> tuple[Phase, ...]:
        part = self.request.part("vae")
        names = {f"weights of {part.component}": "weights of vae"}
        return tuple(Phase.read(self.process, number, names) for number in range(len(self.process.readings)))


class _Plays(Plays):
    """Bounds of a workflow. On a smaller card the manager decides otherwise, so `least` plays it again."""

    request: PipelineRequest

    def least(self, has_other_plans: bool) -> int:
        low, high = (size // PAGE for size in self.search)
        while low + 1 < high:
            middle = (low + high) // 2
            fails = ComfyUIRun(self.request, middle * PAGE, self.process.workspace).full
            low, high = (middle, high) if fails else (low, middle)
        return high * PAGE


def plays_of(run: ComfyUIRun, has_room: bool) -> Plays:
    """Return the bounds of a run with room for everything. has_room: whether the card has enough."""
    phases, most = run.phases(), max(phase.total for phase in run.phases())
    low, high = (0, max(run.available, most)) if has_room else (run.available, 2 * most + 4 * run.nbytes)
    exact = [(0, phase.weights) for phase in phases]
    return _Plays(run.request, run.process, exact, (low, -(-high // PAGE) * PAGE))


def describe_decisions(run: ComfyUIRun) -> Iterator[str]:
    """List omissions, and what the manager's decisions change."""
    work = WORKFLOWS[run.request.name]
    source = f"{work.release.name} ({work.release.commit})"
    yield f"{source} with its classic memory management, read and not run on a GPU"
    yield "it starts with no model on the card, and with more free memory on the host than on the card"
    if run.request.offload in (LOW, NO):
        yield f"text encoders run on the CPU with {run.request.offload}"
    yield "PyTorch's flash attention was played; ComfyUI prefers cuDNN's, whose workspaces are unknown"
    if not run.batched:
        free = "one and a half times ComfyUI's estimate is not free"
        why = free if work.joins else "prompts usually differ in length; both are predicted with prompt_tokens"
        yield f"the denoiser runs once for each prompt, because {why}"
    if run.tiled:
        yield f"the whole decode runs out of memory, so ComfyUI decodes in tiles of {work.fallback} pixels"
    if run.models["vae"].sent:
        yield "vae: of its layers that come for their calls, the largest counts during the whole decode"
    if run.clip_on_cpu:
        yield "text encoders: ComfyUI computes on the CPU, because the embedding of tokens has no room on the card"
