"""Play a workflow of ComfyUI: which weights are on the card, and the memory of each phase.

A workflow makes a picture or a video from text: loaders, CLIPTextEncode for the prompts, KSampler with Euler's steps,
VAEDecode. A workflow's recording (data/workflows) has the steps of ComfyUI's own code. At the start all models are in
the host's memory. Latents between the nodes are in the host's memory.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem._core import OutOfMemoryError
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.comfyui_classic import (
    HIGH_VRAM,
    LARGE,
    MORE_ON_LARGE,
    NO_VRAM,
    NORMAL,
    RESERVED,
    RESERVED_ON_WINDOWS,
    SOURCE,
    STREAMS,
    Layer,
    ManagedModel,
    Manager,
    estimate_denoiser,
)
from vaemem.pipelines.comfyui_dynamic import ENOUGH, PAGE_BYTES, least_free, page_nodes, stage_weights
from vaemem.pipelines.components import Pipeline, is_vae, vae_counts
from vaemem.pipelines.diffusers_run import PipelineRun, play_text
from vaemem.pipelines.pipeline_parts import Part
from vaemem.pipelines.pipeline_request import PipelineRequest
from vaemem.pipelines.pipeline_text import load_text
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.held_tensors import LoadedVAE
from vaemem.prediction.offloaded_weights import BY_DIFFUSERS, Passing
from vaemem.prediction.phases import Phase
from vaemem.prediction.process import PeakTensor
from vaemem.prediction.recording_files import component_of
from vaemem.prediction.request import PAGE
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.verdict_bounds import Plays

ENCODERS = "text_encoder"  # the role of all text encoders together, which are one model for ComfyUI
# Options of the program; none: without an option, which has the dynamic manager.
DYNAMIC, CLASSIC, NO = "none", "--disable-dynamic-vram", "--novram"
WHOLE = f"{CLASSIC} --disable-smart-memory"  # models leave whole; how it changes the dynamic manager is not known
HIGH = "--highvram"
COMFYUI_OPTIONS = (DYNAMIC, CLASSIC, NO, WHOLE, HIGH)
_STATES = {NO: NO_VRAM, HIGH: HIGH_VRAM}
USUAL_TILE = 512  # pixels of a tile's side by default
_FALLBACK = 64, 256  # after a decode ran out of memory: latents of a tile's side; pixels for a VAE of videos, or more
_TILE_FRAMES, _LEAST_FRAMES = 64, 2  # of a video in VAEDecodeTiled's tiles; of their latents
_PLAYED_STEPS = 3  # of a denoiser by the dynamic manager; further steps send as much as the last one
# The class of these layers is not in comfy/ops.py. Their own code moves their weights.
_PLAIN = re.compile(
    r"\.(query|key)_norm\.scale$|^t5xxl\..*layer_norm\.weight$|(_layernorm|\.model\.norm|self_attn\.[qk]_norm)\.weight$"
    r"|\.gamma$"
)
# Buffers whose modules are no layers, because they have no parameters. Buffers that no state dict has.
_TABLES = re.compile(r"^(model_sampling|noise_augmentor)\b")
_NOT_SAVED = re.compile(r"^noise_augmentor\.data_(mean|std)$|\.inv_freq$")


class WorkflowRequest(PipelineRequest):
    """A run of a workflow of ComfyUI."""

    @property
    def pipeline(self) -> Pipeline:
        return WORKFLOWS[self.name]

    @property
    def text(self) -> str:
        return component_of(self.pipeline.recording, "text")

    def estimate(self, role: str) -> float:
        """Return ComfyUI's estimate of a call besides weights, with one prompt; 0 for text encoders."""
        v = self.variables
        if role == "vae":
            return self._estimate_decode(*(self.tile_latents if self.tile else (max(v["h"], v["w"]), v["f"])))
        if role == ENCODERS:
            return 0
        area = self.batch * v["f"] * v["h"] * v["w"]
        return estimate_denoiser(self.pipeline.usage, area, self.part(role).dtype)

    def _estimate_decode(self, side: int, frames: int) -> float:
        """Return ComfyUI's estimate of a decode, or of its tiles. side, frames: most latents of each"""
        v, width = self.variables, recorded_modules.DTYPE_BYTES[self.part("vae").dtype]
        f = min(v["f"], frames)
        b, c = next((b, c) for least, b, c in reversed(self.pipeline.decodes) if f >= least)
        return float((b * f + c) * min(v["h"], side) * min(v["w"], side) * width)

    @property
    def tile_latents(self) -> tuple[int, int]:
        """Latents of a side of VAEDecodeTiled's tiles, and frames of them."""
        known = self.pipeline
        return self.tile // known.factor, max(_TILE_FRAMES // known.frame_factor, _LEAST_FRAMES)

    @property
    def fallback_pixels(self) -> int:
        """Pixels of the side of such tiles."""
        return self.fallback[0] * self.pipeline.factor

    @property
    def fallback(self) -> tuple[int, int]:
        """Latents of a side of tiles after a whole decode ran out of memory, and frames of them. Tiles of a VAE of
        videos are as large as the estimate of the whole decode permits, up to 80% of the card: first as long, then as
        wide."""
        v, component = self.variables, self.part("vae").component
        latents, pixels = _FALLBACK
        if is_vae(component) and architecture(component).get("family") != "wan":
            return latents, v["f"]
        side, frames, most = pixels // self.pipeline.factor, v["f"], max(v["h"], v["w"])
        budget = min(self._estimate_decode(most, frames), 0.8 * self.card.gpu.total_memory)
        while frames > _LEAST_FRAMES and self._estimate_decode(side, frames) > budget:
            frames = -(-frames // 2)
        while 2 * side <= most and self._estimate_decode(2 * side, frames) <= budget:
            side *= 2
        return side, frames


class _Sent(NamedTuple):
    """A phase's weights on the card. Sizes in bytes.

    there: {role: (bytes of its weights on the card, bytes of all)}
    left: roles of the models that left, or left in part
    outside: pages and buffers of the dynamic manager, which are not PyTorch's
    needed: pages and buffers that the dynamic manager cannot do without
    first, more: weights that the first step sends, and each further one
    """

    there: Mapping[str, tuple[int, int]] = {}
    left: Sequence[str] = ()
    outside: int = 0
    needed: int = 0
    first: int = 0
    more: int = 0


def layers_of(weights: Sequence[tuple[str, int]], copied: int = 0) -> tuple[list[Layer], int]:
    """Return a model's layers as the manager finds them, and the bytes in no layer. weights: (name, bytes). copied: how
    many times as many bytes a layer's weights have in the dtype of its call, if they are converted for it."""
    owned: dict[str, int] = {}
    converted: dict[str, int] = {}
    plain = plain_layers(name for name, _ in weights)
    for name, size in weights:
        if _NOT_SAVED.search(name):
            continue
        owner, _, own = name.rpartition(".")
        owned[owner] = owned.get(owner, 0) + size
        if own in ("weight", "bias"):
            converted[owner] = converted.get(owner, 0) + size
    outer = {owner[:at] for owner in owned for at in _dots(owner)} | {""}
    names = [owner for owner in owned if owner not in outer and not _TABLES.match(owner)]
    layers = [
        Layer(owned[name], name, name not in plain, copied * converted.get(name, 0) * (name not in plain))
        for name in names
    ]
    return layers, sum(owned.values()) - sum(layer.bytes for layer in layers)


def plain_layers(names: Iterator[str]) -> set[str]:
    """Name the layers whose class is not in comfy/ops.py."""
    return {name.rpartition(".")[0] for name in names if _PLAIN.search(name)}


def _dots(owner: str) -> Iterator[int]:
    yield from (match.start() for match in re.finditer(r"\.", owner))


class ComfyUIRun(PipelineRun):
    """A workflow, with the manager's decisions for a card of `available` bytes. The run ends if memory runs out."""

    request: WorkflowRequest

    def __init__(
        self, request: WorkflowRequest, available: int, workspace: Any = None, again: ComfyUIRun | None = None,
        tiled: bool = False,
    ):  # fmt: skip
        """again: a run on that card, to play with room for everything. tiled: as of the attribute"""
        device = {} if again else {"total_memory": max(available, PAGE)}
        super().__init__(request, request.start(workspace, **device))
        self.moved, self.available, self.has_room = [], available, again is not None
        self.tiled: bool = again.tiled if again else tiled  # whether tiles follow a whole decode that has no room
        self.full: tuple[str, PeakTensor] | None = None
        self.sent: dict[str, _Sent] = {}  # by phase
        self._now, self._role, self._returned = "", "", 0
        placing = _Dynamic if request.offload == DYNAMIC else _Classic
        self._weights: _Dynamic | _Classic = placing(self)
        try:
            self.process.reset_peak()
            play_text(load_text(request.text), request.variables, self, {})
            self._end_phase()
        except OutOfMemoryError as error:
            self.full = self._now, PeakTensor(self.process.frames[error.tag], error.requested)
        self._weights.finish()

    @classmethod
    def on_card(cls, request: WorkflowRequest, available: int, workspace: Any = None) -> ComfyUIRun:
        """Play a workflow on a card. If a whole decode runs out of memory, ComfyUI decodes in tiles."""
        run = cls(request, available, workspace)
        tiles = run.full and run._role == "vae" and request.vae == "whole" and not request.pipeline.owns_tiles
        return cls(request, available, workspace, tiled=True) if tiles else run

    # ---- what the text does ----

    def bring(self, role: str) -> None:
        """Let the manager load a model, unless it did so last."""
        if role != self._role:
            self._role = role
            self._weights.load(role)

    def _begin_phase(self, name: str, role: str) -> None:
        self._now = name or self._now
        if (role, self._now) == (ENCODERS, self._phase):
            self._weights.begin_node(role)
        super()._begin_phase(name, role)

    def _end_phase(self) -> None:
        """End a node: it gives back the buffers of its streams, and empties PyTorch's cache."""
        number = self._names[self._phase] + 1
        self._weights.end_phase(f"{self._phase} {number}" if number > 1 else self._phase)
        super()._end_phase()
        self.process.empty_cache()

    def _call(self, role: str, **sizes: int) -> Sequence[int]:
        """Call a recorded module. A recorded VAE decodes whole or in tiles, as in `_decode`."""
        if role != "vae" or self._now != "decode" or not self._has_tiles:
            return self._play_recorded(role, **sizes)
        side, frames = self._tile_latents
        most = {"n": 1, "f": frames, "h": side, "w": side}
        tile = {name: min(sizes[name], most[name]) for name in most}
        return self._play_recorded(role, math.prod(-(-sizes[name] // tile[name]) for name in most), **sizes | tile)

    @property
    def _has_tiles(self) -> bool:
        return self.tiled or self.request.vae != "whole"

    @property
    def _tile_latents(self) -> tuple[int, int]:
        return self.request.tile_latents if self.request.tile else self.request.fallback

    def _play_recorded(self, role: str, times: int = 1, **sizes: int) -> Sequence[int]:
        """Play a call, which counts as some of them, one after the other."""
        self.bring(role)
        part, process = self.parts[role], self.process
        passing = self._weights.passing(role, sizes)
        # Text encoders convert each weight for its call anyway: the recording has the copies.
        working = part.passing_copies() if role != ENCODERS else []
        recording = recorded_modules.load_program(part.component)
        trace = recording.trace(part.dtype, process.gpu, [*passing, *working], (), **sizes)
        left = process.call(trace)
        process.count(flops=times * trace.flops, sent=times * sum(one.bytes for one in passing))
        return [left[id_] for id_ in sorted(left)]

    def _encode(self, given: int, picture: int, n: int, f: int, h: int, w: int) -> Sequence[int]:
        """Play VAEEncode. given: the picture on the card, which the trace has, too, with its strides."""
        part, process = self.parts["vae"], self.process
        self.free(given)
        self._returned = given
        self.bring("vae")
        vae = LoadedVAE(process, architecture(part.component), "comfyui", part.dtype, self._weights.held("vae"))
        flops, attended, moved = vae_counts(part.component, "encode", part.dtype, h, w, batch=n, frames=f)
        process.count(flops=flops, attended=attended, moved=moved)
        frames = [f] if self.request.pipeline.frames else []
        process.drop(process.encode(vae, process.tensor((n, 3, *frames, h, w), vae.dtype, "image", host=True)))
        return ()

    def _decode(self, given: int, n: int, f: int, h: int, w: int) -> Sequence[int]:
        """Play VAEDecode or VAEDecodeTiled. given: the latents on the card, which the trace of a decode has, too."""
        q, part, process = self.request, self.parts["vae"], self.process
        self.free(given)
        self._returned = given
        self.bring("vae")
        vae = LoadedVAE(process, architecture(part.component), "comfyui", part.dtype, self._weights.held("vae"))
        largest = self._weights.largest_sent("vae")
        passing = process.hold("weights of vae", largest) if largest else 0
        if self._has_tiles:
            side, frames = self._tile_latents
            self._decode_part(vae, n, min(f, frames), h, w, side * q.pipeline.factor)
        else:
            batch = max(1, int(self._weights.free() / q.estimate("vae")))
            for first in range(0, n, batch):
                self._decode_part(vae, min(batch, n - first), f, h, w, 0)
        if passing:
            process.release([passing])
        return ()

    def _decode_part(self, vae: LoadedVAE, n: int, f: int, h: int, w: int, tile: int) -> None:
        part, process, factor = self.parts["vae"], self.process, self.request.pipeline.factor
        flops, attended, moved = vae_counts(
            part.component, "decode", part.dtype, h * factor, w * factor, batch=n, tile=tile, frames=f
        )
        process.count(flops=flops, attended=attended, moved=moved)
        frames = [f] if self.request.pipeline.frames else []
        latents = process.tensor((n, vae.latent_channels, *frames, h, w), vae.dtype, "latents", host=True)
        process.drop(process.decode(vae, latents, tile=tile))

    def free(self, handle: int) -> None:
        if handle != self._returned:
            super().free(handle)

    # ---- answers ----

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights."""
        return sum(part.nbytes for part in self.request.parts)

    def phases(self) -> tuple[Phase, ...]:
        found = []
        for number in range(len(self.process.readings)):
            phase = Phase.read(self.process, number, self.names)
            sent = self.sent.get(phase.name, _Sent())
            more = sent.first + (self.request.steps - 1 if phase.kind == "denoise" else 0) * sent.more
            found.append(phase._replace(outside=sent.outside, sent=phase.sent + more))
        return tuple(found)


class _Dynamic:
    """Weights under the dynamic manager. The manager's pages are not PyTorch's memory, but a model's small weights
    are."""

    def __init__(self, run: ComfyUIRun):
        self.run = run
        self.staged = {part.role: stage_part(part) for part in run.request.parts}
        self._forced: dict[str, int] = {}  # bytes of small weights, by role
        self._nodes: list[tuple[str, str, int]] = []  # phase, role, and PyTorch's bytes besides small weights
        self._roles: list[str] = []  # of the phase

    def load(self, role: str) -> None:
        """Stage a model: its small weights come to the card."""
        self._roles.append(role)
        if role not in self._forced:
            layers = self.staged[role].places
            small = [w.bytes for w in self.run.parts[role].weights if not _is_in(w.name, layers)]
            self.run.process.hold_all(f"weights of {role}", small)
            self._forced[role] = self.staged[role].forced

    def begin_node(self, role: str) -> None:
        """Begin another node with the model of the last one, as for the second prompt."""
        self._roles.append(role)

    def passing(self, role: str, sizes: Mapping[str, int]) -> Sequence[Passing]:
        return ()

    def held(self, role: str) -> Sequence[int]:
        return ()

    def largest_sent(self, role: str) -> int:
        return 0

    def free(self) -> int:
        """Return the bytes that calls can have: pages leave for them."""
        return self.run.available - self.run.process.allocated

    def end_phase(self, name: str) -> None:
        held = max(0, self.run.process.peak_allocated - sum(self._forced.values()))
        self._nodes += ((name, role, held) for role in self._roles)
        self._roles = []

    def finish(self) -> None:
        """Place the pages of all nodes."""
        run, nodes, needed = self.run, list[Any](), list[int]()
        free = ENOUGH if run.has_room else max(run.available, 0)
        capacity = ENOUGH if run.has_room else run.request.card.gpu.total_memory
        for name, role, held in self._nodes:
            staged = self.staged[role]
            calls = [((), held), *((layers, held) for layers in self._together(staged.called))]
            steps = min(run.request.steps, _PLAYED_STEPS) if name.startswith("denoise") else 1
            nodes.append((role, steps, calls))
            needed.append(least_free(staged, steps, calls) - staged.forced - held)
        before: Mapping[str, int] = {}
        placed = page_nodes(self.staged, nodes, capacity, free)
        for (name, role, _), (_, steps, _), least, paged in zip(self._nodes, nodes, needed, placed, strict=False):
            if paged.failure:
                run.full, run._role = run.full or (name, PeakTensor("buffers of weights", sum(paged.buffers))), role
            run.sent[name] = self._add(run.sent.get(name, _Sent()), paged, steps, least, before)
            before = paged.pages

    def _add(self, earlier: _Sent, paged: Any, steps: int, least: int, before: Mapping[str, int]) -> _Sent:
        """Add a node to those of its phase before. before: pages before it"""
        sizes = {role: staged.nbytes for role, staged in self.staged.items()}
        there = {role: (min(n * PAGE_BYTES, sizes[role]), sizes[role]) for role, n in paged.pages.items() if n}
        left = [role for role, n in before.items() if paged.pages.get(role, 0) < n and role not in earlier.left]
        outside = sum(paged.pages.values()) * PAGE_BYTES + sum(paged.buffers)
        return _Sent(
            there, [*earlier.left, *left], max(outside, earlier.outside), max(least, earlier.needed),
            earlier.first + paged.first, max(earlier.more, paged.last * (steps > 1)),
        )  # fmt: skip

    def _together(self, layers: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield layers that are sent together: those of a block, if ComfyUI sends the next block in advance."""
        blocks = self.run.request.pipeline.blocks
        for block, group in itertools.groupby(layers, lambda name: _block_of(name, blocks)):
            found = tuple(group)
            yield from [found] if block else ((layer,) for layer in found)


class _Classic:
    """Weights under the classic manager: by the manager's estimates, layers are on the card, or sent for each call."""

    def __init__(self, run: ComfyUIRun):
        request = run.request
        self.run = run
        self.models: dict[str, ManagedModel] = {}
        self._sizes: dict[str, dict[str, list[int]]] = {}  # bytes of each layer's tensors, by role; "" is the rest
        self._held: dict[str, dict[str, list[int]]] = {}  # their handles
        for part in request.parts:
            weights = [(weight.name, weight.bytes) for weight in part.weights]
            # The manager knows that text encoders compute in float32.
            layers, rest = layers_of(weights, 2 if part.role == ENCODERS else 0)
            names = {layer.name for layer in layers}
            sizes = self._sizes[part.role] = {}
            for name, size in weights:
                owner = name.rpartition(".")[0]
                sizes.setdefault(owner if owner in names else "", []).append(size)
            stays = request.offload == HIGH and part.role in request.pipeline.denoisers
            self.models[part.role] = ManagedModel(part.role, layers, rest, stays=stays)
            self._held[part.role] = {}
        windows = RESERVED_ON_WINDOWS + MORE_ON_LARGE * (request.card.gpu.total_memory > LARGE)
        reserved = windows if request.card.is_windows else RESERVED
        state, smart = _STATES.get(request.offload, NORMAL), request.offload != WHOLE
        self.manager = Manager(self.free, reserved, state, smart, self._empty)
        self._layers_sent = 0  # so far, on streams in turn
        self._left: list[str] = []

    def free(self) -> int:
        """Return the card's free bytes: get_free_memory, after the weights have moved."""
        process = self.run.process
        for role, model in self.models.items():
            held, chosen = self._held[role], model.held
            for name in [name for name in held if name not in chosen]:
                process.release(held.pop(name))
            for name in [layer.name for layer in model.layers] + [""]:
                if name in chosen and name not in held and name in self._sizes[role]:
                    held[name] = process.hold_all(f"weights of {role}", self._sizes[role][name])
                    process.count(sent=sum(self._sizes[role][name]))
        return self.run.available - process.allocated

    def _empty(self, left: bool) -> None:
        """Play the end of free_memory: PyTorch's cache goes if models left, or if it is a quarter of the free bytes."""
        free = self.free()
        if left or self.run.process.reserved - self.run.process.allocated > 0.25 * free:
            self.run.process.empty_cache()

    def load(self, role: str) -> None:
        """Load a model, with the estimate of its call."""
        one = self.run.request.estimate(role)
        both = one if role == "vae" else 2 * one
        gone = self.manager.load(self.models[role], both, one if role not in ("vae", ENCODERS) else None)
        self.free()
        self._left += (model.name for model in gone)

    def begin_node(self, role: str) -> None:
        """The second request for a model changes nothing."""

    def passing(self, role: str, sizes: Mapping[str, int]) -> Sequence[Passing]:
        """List the weights that come for a call of a model, on streams in turn."""
        sent = self.models[role].sent
        spans = {number: (layer.name, layer.name) for number, layer in enumerate(sent) if layer.casts}
        numbers = dict[str, int]()
        order = self.run.parts[role].order_of_calls(spans, self.run.process.gpu, sizes) if spans else ()
        for number in order:
            numbers[sent[number].name] = 1 + self._layers_sent % STREAMS
            self._layers_sent += 1
        return [
            Passing(layer.name, layer.name, "weight", size, BY_DIFFUSERS, stream=numbers.get(layer.name, 0))
            for layer in sent
            for size in self._sizes[role][layer.name]
        ]

    def held(self, role: str) -> Sequence[int]:
        return [handle for handles in self._held[role].values() for handle in handles]

    def largest_sent(self, role: str) -> int:
        return max((layer.bytes for layer in self.models[role].sent), default=0)

    def end_phase(self, name: str) -> None:
        there = {model.name: (model.loaded, model.nbytes) for model in self.manager.models}
        self.run.sent[name], self._left = _Sent(there, self._left), []

    def finish(self) -> None:
        """The manager has placed everything."""


def _block_of(name: str, blocks: str) -> str:
    """Return the block that a layer belongs to: "a.blocks.7" of "a.blocks.7.norm"; "" if it belongs to none."""
    within = name.removeprefix(blocks)
    return blocks + within.partition(".")[0] if blocks and within != name else ""


def _is_in(name: str, layers: Mapping[str, Any]) -> bool:
    owner, _, own = name.rpartition(".")
    return owner in layers and own in ("weight", "bias")


def stage_part(part: Part) -> Any:
    return stage_weights(
        [(weight.name, weight.shape, weight.bytes // math.prod(weight.shape)) for weight in part.weights],
        4 if part.role == ENCODERS else 0, plain=plain_layers(weight.name for weight in part.weights),
    )  # fmt: skip


class _Plays(Plays):
    """Bounds of a workflow. On a smaller card the classic manager decides otherwise, so `least` plays the workflow
    again. The dynamic manager needs the bytes that `phases` name."""

    request: WorkflowRequest

    def least(self, has_other_plans: bool) -> int:
        if self.request.offload == DYNAMIC:
            return self.takes.own
        low, high = (size // PAGE for size in self.search)
        while low + 1 < high:
            middle = (low + high) // 2
            fails = ComfyUIRun.on_card(self.request, middle * PAGE, self.process.workspace).full
            low, high = (middle, high) if fails else (low, middle)
        return high * PAGE


def plays_of(run: ComfyUIRun, has_room: bool) -> Plays:
    """Return the bounds of a run with room for everything. has_room: whether the card has enough."""
    phases, most = run.phases(), max(phase.total for phase in run.phases())
    low, high = (0, max(run.available, most)) if has_room else (run.available, 2 * most + 4 * run.nbytes)
    exact = [(run.sent[phase.name].needed, phase.weights) for phase in phases]
    return _Plays(run.request, run.process, exact, (low, -(-high // PAGE) * PAGE))


def describe_decisions(run: ComfyUIRun) -> Iterator[str]:
    """List omissions, and what the manager's decisions change."""
    manager = "dynamic" if run.request.offload == DYNAMIC else "classic"
    yield f"{SOURCE} with its {manager} memory management, recorded and read, and not run on a GPU"
    yield "it starts with no model on the card, and with more free memory on the host than on the card"
    yield "PyTorch's flash attention was played; workspaces of cuDNN's, which ComfyUI uses next, are unknown"
    yield from run.request.pipeline.notes
    if run.request.offload == HIGH:
        yield "the loader of the denoiser runs before the prompts are encoded; the denoiser stays on the card"
    if manager == "classic" and run._weights.largest_sent("vae"):
        yield "vae: of its layers that come for their calls, the largest counts during the whole decode"
