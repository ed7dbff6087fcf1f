"""A pipeline's components as they are stored and run: their types, their weights, and the traces of their calls."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vaemem import _core
from vaemem._common import DTYPES, ELEMENT_BYTES, SPELT_DTYPES, choose, distinct, letters, meant
from vaemem._errors import ArgumentError, inside
from vaemem.engine.configs import config_of
from vaemem.engine.weights import tensor_types
from vaemem.pipelines import recorded_modules
from vaemem.pipelines.components import (
    PIPELINES,
    Pipeline,
    is_vae,
    weights_of,
)
from vaemem.pipelines.lora import Lora, Pair, pairs_of
from vaemem.pipelines.offload_kinds import GroupOffload
from vaemem.pipelines.quantising import (
    BITSANDBYTES,
    FOREIGN,
    SCHEMES,
    SIXTEEN_BITS,
    UNPACKING,
    layer_working,
)
from vaemem.pipelines.storage import GGML, MIXTURES, RULES, SPELT, Stored, loaded, rule_of, stored
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.offloaded_weights import (
    BY_ACCELERATE,
    BY_DIFFUSERS,
    BY_NONE,
    VAE_BLOCKS,
    Group,
    Passing,
    block_groups,
    leaf_groups,
    pass_groups,
    tie,
)
from vaemem.prediction.phases import OF_WEIGHTS
from vaemem.prediction.recording_files import find_component, is_recorded_component
from vaemem.prediction.runtimes import architecture

WEIGHT_TYPES = (*DTYPES, "fp8", *SCHEMES, *RULES["diffusers-gguf"].types)
SPELT_TYPES = SPELT_DTYPES | {letters(spelt): name for spelt, name in SPELT.items()}
KEPT_TRACES = 12  # of each component: a plan has as many
ROLES = tuple(distinct(role for one in PIPELINES.values() for role in (*one.parts, *one.optional)))
_NOT_FROM_A_FILE = ("pixart-sigma-transformer",)  # its class has no from_single_file
UNPACKED = {  # text encoders that transformers loads from GGUF files, and unpacks, with their classes
    "t5-": "T5EncoderModel", "umt5-": "UMT5EncoderModel", "qwen3-4b-flux2": "Qwen3ForCausalLM",
    "qwen3-8b-flux2": "Qwen3ForCausalLM", "qwen3-": "Qwen3Model",
}  # fmt: skip
UNMIXED = ("qwen-image-transformer",)  # denoisers that ComfyUI-GGUF's convert.py does not know
UNPACKS = "transformers unpacks its GGUF file when it loads it"
PACKED = "its file is taken to pack the matrices that ComfyUI-GGUF packs of FLUX.1; give the file to be exact"
UNSAVED = "rope."  # Wan's tables of positions, which are not persistent
# Places of weights after from_pretrained, before offloading: the CPU (device_map="cpu"); the card, until they are
# offloaded; or the card for good.
PLACES = ("on cpu", "on cuda", "kept on cuda")
SPOKEN = re.compile(
    rf"(?P<type>.+?)(?P<direct> directly)?(?: from (?P<source>\S+))?(?: (?P<place>{'|'.join(PLACES)}))?", re.I
)


@dataclass(frozen=True)
class Part:
    """A component of a pipeline, with its type, weights and place in a run.

    Attributes
    ----------
    role : str
        ``"unet"``, ``"vae"`` ...
    component : str
        A recorded module, or a VAE's name.
    dtype : str
        The type in which the component computes.
    weights : tuple of Stored
        The weights as they are stored; for a VAE in `dtype`.
    upcast : bool
        Whether a VAE is converted to float32 for its call, and back.
    place : str
        Where the component is loaded: one of `PLACES`.
    source : str
        The dtype of the component's file, if the weights are quantised or cast after the file is read; otherwise "".
    pairs : tuple of Pair
        LoRAs' low-rank pairs for the component's layers. `weights` includes the pairs' weights.
    note : str
        A remark on the component's weights for the reader of an answer.
    """

    role: str
    component: str
    dtype: str
    weights: tuple[Stored, ...]
    upcast: bool = False
    place: str = PLACES[0]
    source: str = ""
    pairs: tuple[Pair, ...] = ()
    note: str = ""

    def __reduce__(self) -> Any:
        """Copy and pickle it without its traces, which are made again."""
        return Part, tuple(getattr(self, one.name) for one in fields(self))

    @functools.cached_property
    def _passed_groups(self) -> dict[Any, tuple[Passing, ...]]:
        return {}

    @functools.cached_property
    def _traces(self) -> dict[Any, _core.Trace]:
        return {}

    def trace(
        self, gpu: Gpu, offload: str | GroupOffload, later: bool = False, cudnn: int = 0, **sizes: int
    ) -> _core.Trace:
        """Trace a call's memory on a GPU, with the weights that offloading sends for its submodules. later: whether it
        is not the first call. cudnn: as `cudnn_attention` gives it. `sizes` may have more than its variables. The last
        traces are kept, because making one takes longer than playing it."""
        recording, kept = recorded_modules.load_program(self.component), self._traces
        offload = "none" if offload == "model" else offload  # the same during a call
        wanted = {name: sizes[name] for name in recording.variables}
        key = (gpu.name, gpu.sm, gpu.multiprocessors, cudnn, offload, later, *wanted.items())
        trace = kept.get(key)
        if trace is None:
            working = self.passing_copies()
            companions = [pair.companion for pair in self.pairs if not pair.fused]
            order = self._order(offload, gpu, wanted) if later else ()
            sent = self.sent_by(offload, later, order)
            trace = recording.trace(self.dtype, gpu, [*sent, *working], companions, cudnn, **wanted)
            for oldest in list(kept)[: len(kept) + 1 - KEPT_TRACES]:
                kept.pop(oldest, None)
            kept[key] = trace
        return trace

    def passing_copies(self) -> list[Passing]:
        """List the tensors that layers' calls take because weights are stored in another type than they compute in."""
        return [
            Passing(at, at, name, size, BY_NONE, *rows)
            for at, made in self.working.items()
            for name, size, *rows in made
        ]

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(weight.bytes for weight in self.weights)

    @functools.cached_property
    def file_bytes(self) -> int:
        """Bytes read from its file."""
        return sum(weight.nbytes(self.source) for weight in weights_of(self.component)) if self.source else self.nbytes

    @property
    def is_cast_on_card(self) -> bool:
        """Whether the component comes to the card whole, and a library casts or quantises it there."""
        return bool(self.source) and self.place != PLACES[0] and not self.has(BITSANDBYTES)

    def sent_bytes(self, weight: Stored) -> int:
        """Bytes sent to the device if a library quantises there: a matrix in float16 for int8 (Int8Params.cuda),
        otherwise in the dtype of loading; other weights as they are stored."""
        if weight.type not in (*SCHEMES, "fp8"):
            return weight.bytes
        return math.prod(weight.shape) * ELEMENT_BYTES["float16" if weight.type == "int8" else self.dtype]

    @functools.cached_property
    def pieces(self) -> list[int]:
        """List the bytes of the tensors that hold its weights, in order."""
        return [size for weight in self.weights for size in weight.pieces]

    @functools.cached_property
    def _types(self) -> set[str]:
        return {weight.type for weight in self.weights}

    def has(self, types: Collection[str]) -> bool:
        """Tell whether any of its weights is stored in one of these types."""
        return not self._types.isdisjoint(types)

    def _by_module(self, made: Mapping[str, Sequence[tuple[Any, ...]]]) -> dict[str, list[tuple[Any, ...]]]:
        """Group the tensors of each weight, (name, bytes, ...), by submodule. A file may put the model's name before a
        submodule's. If its tensors have other names, the largest of them represents the whole call, under ""."""
        added = (weight for pair in self.pairs for weight in pair.weights)
        modules = {weight.module for weight in (*weights_of(self.component), *added)}
        found: dict[str, list[tuple[Any, ...]]] = {}
        for name, tensors in made.items():
            module, _, own = name.rpartition(".")
            module = module if module in modules else module.partition(".")[2]
            if module in modules:
                found.setdefault(module, []).extend((called.format(own), *sizes) for called, *sizes in tensors)
            elif tensors[0][1] > sum(size for _, size, *_ in found.get("", ())):
                found[""] = [(tensors[0][0].format(name), *tensors[0][1:])]
        return found

    @functools.cached_property
    def sent(self) -> dict[str, list[tuple[Any, ...]]]:
        """{submodule: [(name, bytes)]} of the weights that sequential offload has on the device during its call."""
        return tie(self._by_module({w.name: [("{}", w.bytes)] for w in self.weights if w not in self.left}))

    @functools.cached_property
    def left(self) -> tuple[Stored, ...]:
        """The weights that sequential offload leaves on the device: buffers. If the module itself has a parameter, only
        those stay that its state dict leaves out; otherwise all stay."""
        buffers = _buffers_of(self.component)
        if any("." not in weight.name for weight in weights_of(self.component)):
            buffers = frozenset(name for name in buffers if name.startswith(UNSAVED))
        return tuple(weight for weight in self.weights if weight.name in buffers)

    @property
    def passed(self) -> int:
        """Bytes that sequential offload sends for a call."""
        return self.nbytes - sum(weight.bytes for weight in self.left)

    def sent_by(self, offload: str | GroupOffload, later: bool = False, order: Sequence[int] = ()) -> Sequence[Passing]:
        """List the weights that offloading sends for its submodules' calls, in its first call or a later one. order:
        of its groups' calls, if they are prefetched."""
        if isinstance(offload, GroupOffload):
            blocks, stream = offload.num_blocks_per_group or 0, self.stream_of(offload)
            key = blocks, stream, later and not offload.offload_to_disk_path, tuple(order)
            if key not in self._passed_groups:
                self._passed_groups[key] = pass_groups(self.groups(offload), self._sizes, key[2], stream, order)
            return self._passed_groups[key]
        by = self.sent.items() if offload == "sequential" else ()
        return [Passing(at, at, name, size, BY_ACCELERATE) for at, sent in by for name, size in sent]

    def groups(self, offload: GroupOffload) -> tuple[Group, ...]:
        """Return the component's weights in the groups in which group offloading moves them."""
        return _groups_of(self.component, offload.num_blocks_per_group or 0)

    def stream_of(self, offload: GroupOffload) -> int:
        """Return the stream on which its groups come: each component has one of its own."""
        roles = find_component(self.component)[0]["roles"] if is_recorded_component(self.component) else ROLES
        return 1 + roles.index(self.role) if offload.use_stream else 0

    def _order(self, offload: str | GroupOffload, gpu: Gpu, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the numbers of the groups in the order of their modules' calls, if a later call prefetches them."""
        if not isinstance(offload, GroupOffload) or not offload.use_stream:
            return ()
        spans = {
            number: (group.begins, group.ends) for number, group in enumerate(self.groups(offload)) if group.begins
        }
        return self.order_of_calls(spans, gpu, sizes)

    def order_of_calls(
        self, spans: Mapping[int, tuple[str, str]], gpu: Gpu, sizes: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Return numbers in the order in which their submodules are called. spans: of each number the submodule whose
        call begins it and the one whose call ends it."""
        numbered = [Passing(begins, ends, str(number), 1, BY_DIFFUSERS) for number, (begins, ends) in spans.items()]
        trace = recorded_modules.load_program(self.component).trace(self.dtype, gpu, numbered, (), **sizes)
        taken = (name for op, _, _, name in trace.steps if op == "take" and name.startswith(OF_WEIGHTS))
        return tuple(int(name.rpartition("[")[2].removesuffix("]")) for name in taken)

    def host_bytes(self, offload: GroupOffload | None) -> int:
        """Bytes of its weights in the host's memory. PyTorch rounds pinned ones up to powers of two."""
        if offload is None or not offload.pins:
            return self.nbytes
        return sum(
            self._sizes[name] if group.is_rest else 1 << (self._sizes[name] - 1).bit_length()
            for group in self.groups(offload)
            for name in group.names
        )

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of its weights by their names in diffusers. A file may put the model's name before them."""
        known = {weight.name for weight in weights_of(self.component)}
        named = {w.name if w.name in known else w.name.partition(".")[2]: w.bytes for w in self.weights}
        if missing := known - named.keys():
            got = f"a file without {min(missing)}"
            raise ArgumentError(f"components[{self.role!r}]", "tensors named as in diffusers for group offloading", got)
        return named

    @functools.cached_property
    def working(self) -> dict[str, list[tuple[Any, ...]]]:
        """{submodule: [(name, bytes, row_bytes, row_flops, lives)]}, as of `Passing`: the tensors that a call takes
        because weights are stored in another type than that of the computation."""
        dtypes = {weight.name: weight.type_in(self.dtype) for weight in weights_of(self.component)}
        found = dict[str, list[tuple[Any, ...]]]()
        for name, shape, type in self._packed():
            has_bias = name.removesuffix("weight") + "bias" in dtypes
            found[name] = [
                (one.name, one.bytes, one.row_bytes, 2 * math.prod(shape) if one.row_bytes else 0, one.lives)
                for one in layer_working(type, shape, dtypes.get(name, self.dtype), has_bias)
            ]
        return self._by_module({name: tensors for name, tensors in found.items() if tensors})

    def _packed(self) -> list[tuple[str, tuple[int, ...], str]]:
        """List the weights that are stored in another type than that of the computation: name, shape, and type. A GGUF
        file may have other names, and join layers. Then a layer has the type of a tensor of its shape, or else the one
        that most of the file's bytes have."""
        packed = [(w.name, w.shape, w.type) for w in self.weights if w.type in (*UNPACKING, *SCHEMES, "fp8")]
        known = {weight.name for weight in weights_of(self.component)}
        if any(name in known or name.partition(".")[2] in known for name, *_ in packed) or not packed:
            return packed
        bytes_of = Counter[str]()
        for weight in self.weights:
            bytes_of[weight.type] += weight.bytes * (weight.type in UNPACKING)
        by_shape, usual = {shape: type for _, shape, type in packed}, max(bytes_of, key=bytes_of.__getitem__)
        layers = stored(weights_of(self.component), "Q8_0", "diffusers-gguf")
        return [(w.name, w.shape, by_shape.get(w.shape, usual)) for w in layers if w.type == "Q8_0"]


@functools.cache
def _buffers_of(component: str) -> frozenset[str]:
    """Name the buffers among a component's weights. Recordings do not tell those of the run's dtype from parameters:
    PatchEmbed's and Chroma's tables are some."""
    tables, parameters = ("pos_embed.pos_embed", "mod_proj"), ("run", "kept", "single")
    found = weights_of(component)
    return frozenset(w.name for w in found if w.dtype not in parameters or w.name.endswith(tables))


@functools.cache
def _groups_of(component: str, blocks: int) -> tuple[Group, ...]:
    """Group a component's weights by leaves, or by blocks if a group has some."""
    names = [weight.name for weight in weights_of(component)]
    buffers = _buffers_of(component)
    within = VAE_BLOCKS if has_blocks(component) else ()
    return tuple(block_groups(names, blocks, within, buffers) if blocks else leaf_groups(names, buffers))


def has_blocks(component: str) -> bool:
    """Tell whether it is a VAE with a class that names its blocks."""
    named = ("AutoencoderKL", "AutoencoderKLWan")
    return is_vae(component) and config_of(architecture(component))["_class_name"] in named


def _with_pairs(part: Part, pairs: Sequence[Pair]) -> Part:
    """Add low-rank pairs to a component, each after its layer's weights and in their type."""
    kinds = {weight.name.removesuffix(".weight"): weight.type for weight in part.weights}
    added = dict[str, list[Stored]]()
    for pair in pairs:
        if (kind := SPELT.get(kinds.get(pair.module, ""), kinds.get(pair.module, ""))) not in DTYPES:
            why = "nobody compared LoRAs with quantised or cast weights"
            wanted = f"{', '.join(DTYPES)} with a LoRA"
            raise ArgumentError(f"components[{part.role!r}]", wanted, kind or "other names of tensors", why)
        added.setdefault(pair.module, []).extend(stored(pair.weights, kind, "all", kind))
    last = {weight.name.rpartition(".")[0]: i for i, weight in enumerate(part.weights)}
    after = {last[module]: more for module, more in added.items()}
    weights = [one for i, weight in enumerate(part.weights) for one in (weight, *after.get(i, ()))]
    return replace(part, weights=tuple(weights), pairs=tuple(pairs))


@functools.lru_cache(maxsize=32)
def _typed(
    role: str, component: str, dtype: str, given: str, rule: str, upcast: bool, place: str, source: str
) -> Part:  # fmt: skip
    """Store the weights in a type: the same for every size and card."""
    held = tuple(stored(weights_of(component), given, rule, dtype))
    note = PACKED if rule == "diffusers-gguf" else ""
    return Part(role, component, dtype, held, upcast, place, source, note=note)


def is_from_a_file(component: str) -> bool:
    """Tell whether diffusers can load a denoiser from a single file, as a GGUF file is."""
    if is_recorded_component(component):
        return bool(find_component(component)[0]["row"]["packs"])
    return component not in _NOT_FROM_A_FILE


def _check_gguf(what: str, role: str, component: str, type: str, got: str) -> None:
    """Refuse a type of GGUF's that diffusers or transformers cannot load this component from."""
    if type not in (*GGML, *MIXTURES):
        return
    if role.startswith("text_encoder"):
        if not component.rpartition("/")[2].startswith(tuple(UNPACKED)):
            raise ArgumentError(what, "another type", got, "transformers cannot load this encoder from a GGUF file")
    elif not is_from_a_file(component):
        raise ArgumentError(what, "another type", got, "diffusers cannot load this transformer from a GGUF file")
    elif type in MIXTURES and component in UNMIXED:
        why = "the tool with a known mixture does not make its files"
        raise ArgumentError(what, "the file itself, or one type such as 'Q4_K'", got, why)
    elif type in GGML and type not in UNPACKING:
        raise ArgumentError(what, f"{', '.join(RULES['diffusers-gguf'].types)}: diffusers unpacks no other", got)


def _check_direct(what: str, given: str, place: str, source: str, direct: str) -> None:
    """Check how torchao or quanto is called: by a config on the CPU, or its own function, there or on the card."""
    if direct and given not in SIXTEEN_BITS:
        raise ArgumentError(what, f"'directly' after {', '.join(SIXTEEN_BITS)}", f"it after {given!r}")
    if given in SIXTEEN_BITS and place != PLACES[0]:
        if not source:
            wanted = f"'{given} from bfloat16 {place}', which is quantised there, or {given} without a place"
            raise ArgumentError(what, wanted, f"'{given}{direct} {place}'")
        if SCHEMES[given].quantising is None:
            why = "nobody measured the memory of quantising on the card"
            raise ArgumentError(what, f"{given} without a place", f"'{given}{direct} from {source} {place}'", why)


def _part(role: str, component: str, dtype: str, given: Any, upcast: bool, release: int) -> Part:
    """Return a component's weights in a type, or as in a file, with their place of loading and their source."""
    is_module, place, source, direct, what = not is_vae(component), "", "", "", f"components[{role!r}]"
    if isinstance(given, str) and not os.path.exists(given) and (spoken := SPOKEN.fullmatch(given)):
        given, direct, source, place = (part or "" for part in spoken.group("type", "direct", "source", "place"))
    place, name = place.lower(), str(given)
    is_file = isinstance(given, os.PathLike) or name.endswith((".safetensors", ".gguf")) or os.path.exists(name)
    if is_file and given not in DTYPES and is_module:
        with inside(what, path=str(given), caught=(ValueError,)):
            held = stored(weights_of(component), None, tensor_types(given))
        for weight in held:
            _check_gguf(what, role, component, weight.type, repr(name))
        if role.startswith("text_encoder") and any(weight.type in GGML for weight in held):
            return replace(_typed(role, component, dtype, dtype, "all", upcast, place or PLACES[0], ""), note=UNPACKS)
        for weight in held:
            if weight.type in GGML and len(weight.shape) > 2:
                packs = f"{name!r}, which packs {weight.name}"
                raise ArgumentError(what, "a file that packs matrices only", packs, "diffusers unpacks linear layers")
        return Part(role, component, dtype, tuple(loaded(held, weights_of(component), dtype)), place=place or PLACES[0])
    if why := FOREIGN.get(name.lower()):
        raise ArgumentError(what, "", f"{why}, got {name!r}")
    packed = next((type for type in (*GGML, *MIXTURES) if letters(type) == letters(str(given))), "")
    if is_module and packed:
        _check_gguf(what, role, component, packed, repr(given))
        if role.startswith("text_encoder"):
            return replace(_typed(role, component, dtype, dtype, "all", upcast, place or PLACES[0], ""), note=UNPACKS)
    given = meant(what, given, WEIGHT_TYPES if is_module else DTYPES, SPELT_TYPES)
    # from_pretrained quantises with bitsandbytes on the card; people short of memory load quantised files to the CPU.
    place = place or PLACES[bool(source) and given in BITSANDBYTES]
    if source and given not in (*SCHEMES, "fp8"):
        raise ArgumentError(what, f"'from {source}' after fp8, {', '.join(SCHEMES)}", f"it after {given!r}")
    if given in SIXTEEN_BITS and dtype == "float32":
        raise ArgumentError(what, f"a computation in 16 bits with {given}", "one in float32")
    _check_direct(what, given, place, source, direct)
    source = meant(what, source, DTYPES) if source else ""
    is_direct = bool(direct) or (given in SIXTEEN_BITS and place != PLACES[0])
    if given == "qint4" and is_direct and any(len(weight.shape) == 4 for weight in weights_of(component)):
        got = f"{component}, which has convolutions"
        raise ArgumentError(what, "qint8, or qint4 by a config", got, "nobody compared quanto's convolutions in int4")
    if given in DTYPES:  # it computes in its stored type
        dtype, upcast = given, upcast and given == "float16"
    # Without a file, this runtime's rule chooses the tensors for a type.
    return _typed(role, component, dtype, given, rule_of(given, release, is_direct), upcast, place, source)


def parts_of(
    pipeline: Pipeline, dtype: str, components: Mapping[str, Any], release: int, loras: Sequence[Lora] = ()
) -> tuple[Part, ...]:  # fmt: skip
    """Make a pipeline's parts. `components` is the argument of `predict_pipeline`. release: diffusers', 42 for 0.42."""
    if not isinstance(components, Mapping):
        raise ArgumentError("components", "{role: type or file}", repr(components))
    known = {**pipeline.parts, **pipeline.optional}
    for role in components:
        choose("components", role, known)
    parts = []
    for role, component in known.items():
        usual = (role == "vae" and pipeline.vae_dtype) or dtype
        given = components.get(role, None if role in pipeline.optional else usual)
        if given not in (None, "none"):
            upcast = role == "vae" and pipeline.upcasts and role not in components
            parts.append(_part(role, recorded_modules.older(component, release), dtype, given, upcast, release))
        elif role not in (*pipeline.encoders, *pipeline.optional):
            raise ArgumentError("components", f"a type or a file for {role}", "None")
    named = {part.role: weights_of(part.component) for part in parts if not is_vae(part.component)}
    pairs = pairs_of(loras, pipeline.denoiser, named)
    return tuple(_with_pairs(part, pairs[part.role]) if pairs.get(part.role) else part for part in parts)
