"""LoRAs of diffusers: peft's low-rank pairs for layers, from a rank or from a file's header."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vaemem._common import choose, flag, listed, number_in, whole
from vaemem._errors import ArgumentError, inside
from vaemem.engine.weights import tensor_types
from vaemem.pipelines.recorded_modules import Weight

LORAS_SINCE = 42  # the release of diffusers in which loading was read: 0.42
LORA_SETTINGS = ("file", "rank", "target_modules", "fused")
# Layers that diffusers' training scripts choose (train_dreambooth_lora_*.py of SDXL, FLUX.1, SD 3, FLUX.2, Qwen-Image
# and Z-Image), by the beginning of a pipeline's name. Others get the attention's, as most scripts choose.
_ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
_JOINT = tuple(f"attn.{name}" for name in (*_ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out"))
_FLUX = (*_JOINT, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_TARGETS = {"sd3": _JOINT, "flux2": (*_ATTENTION, "to_qkv_mlp_proj", "attn.to_out"), "flux": _FLUX, "chroma": _FLUX}
_UP, _DOWN = r"lora_B|lora_up|lora\.up", r"lora_A|lora_down|lora\.down"
_HALF = re.compile(rf"(?P<layer>.+?)\.(?:(?P<down>{_DOWN})|(?P<up>{_UP}))(?:\.\w+)?\.weight")
# Kohya's prefixes of roles; diffusers' are the roles.
_KOHYA = {"lora_unet_": ("unet", "transformer"), "lora_te1_": ("text_encoder",), "lora_te_": ("text_encoder",),
          "lora_te2_": ("text_encoder_2",)}  # fmt: skip
# The names of Wan's authors for diffusers' layers.
_AUTHORS = {"attn1.to_out.0": "self_attn.o", "attn2.to_out.0": "cross_attn.o", "attn1.to_": "self_attn.",
            "attn2.to_": "cross_attn.", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}  # fmt: skip


class Pair(NamedTuple):
    """A low-rank pair.

    module, shape: the layer, and its weight's shape
    rank: of the pair
    fused: whether the pair is merged into the layer's weight; a merged pair takes no part in calls, but stays in memory
    """

    module: str
    shape: tuple[int, ...]
    rank: int
    fused: bool

    @property
    def weights(self) -> tuple[Weight, Weight]:
        rows, columns, *kernel = self.shape
        first, second = (self.rank, columns, *kernel), (rows, self.rank, *(1 for _ in kernel))
        return Weight(f"{self.module}.lora_A.weight", first), Weight(f"{self.module}.lora_B.weight", second)

    @property
    def companion(self) -> tuple[str, int, int, int]:
        """As `Recorded.trace` takes it."""
        rows, columns, *_ = self.shape
        return self.module, self.rank, rows, columns


@dataclass(frozen=True)
class Lora:
    """One LoRA: ``pipe.load_lora_weights(...)``, and with `fused` ``pipe.fuse_lora()`` too.

    rank, target_modules: of a LoRA without a file, in the denoiser; the layers have these names, or names that end so
    ranks: of a file's layers, by the layer's name in the file
    usual: layers of a LoRA of a rank without target_modules
    """

    file: str | None = None
    rank: int = 0
    target_modules: tuple[str, ...] = ()
    fused: bool = False
    ranks: tuple[tuple[str, int], ...] = ()
    usual: tuple[str, ...] = _ATTENTION

    @classmethod
    def read(cls, given: Any) -> Lora:
        """Read one item of the argument `lora`: a rank, a file, ``"16 fused"``, or a dict of these."""
        if not isinstance(given, Mapping):
            text, _, last = str(given).rpartition(" ")
            fused = last == "fused" and not os.path.exists(str(given))
            what: Any = text if fused else given
            rank = what if isinstance(what, int) else number_in(str(what))
            given = {"file": what} if rank is None else {"rank": rank}
            given |= {"fused": fused}
        for name in given:
            choose("lora", name, LORA_SETTINGS)
        file, fused = given.get("file"), flag("lora['fused']", given.get("fused", False))
        if (file is None) == (given.get("rank") is None):
            raise ArgumentError("lora", "a rank or a file", repr(given))
        if file is not None and (not isinstance(file, str | os.PathLike) or not os.fspath(file)):
            forms = "a file, a rank such as 16, or one of these with ' fused' after it"
            raise ArgumentError("lora", forms, repr(file))
        targets = tuple(listed(given.get("target_modules") or (), str))
        if file is None:
            return cls(rank=whole("lora['rank']", given["rank"]), target_modules=targets, fused=fused)
        if targets:
            raise ArgumentError("lora['target_modules']", "None with a file, which names its layers", repr(targets))
        with inside("lora", path=str(file), caught=(ValueError,)):
            return cls(str(file), fused=fused, ranks=tuple(_ranks(tensor_types(file))))

    def __str__(self) -> str:
        what = self.file or f"rank {self.rank}"
        return f"{what}{' in ' + ', '.join(self.target_modules) if self.target_modules else ''}{' fused' * self.fused}"

    def pairs(self, role: str, weights: Sequence[Weight], is_denoiser: bool) -> list[Pair]:
        """List the pairs for a component's layers. is_denoiser: a LoRA of a rank has layers only there."""
        layers = {one.module: one.shape for one in weights if one.name.endswith(".weight") and len(one.shape) in (2, 4)}
        if self.file:
            named = {alias: module for module in layers for alias in _aliases(role, module)}
            ranks = [(named[name], rank) for name, rank in self.ranks if name in named]
            return [Pair(module, layers[module], rank, self.fused) for module, rank in ranks]
        targets = self.target_modules or self.usual
        found = [module for module in layers if any(f".{module}".endswith(f".{target}") for target in targets)]
        return [Pair(module, layers[module], self.rank, self.fused) for module in found] if is_denoiser else []


def _aliases(role: str, module: str) -> list[str]:
    """List a layer's names in files: diffusers', with and without transformers' ``text_model``; kohya's; and for a
    transformer ComfyUI's, and Wan's authors'."""
    found = []
    for name in dict.fromkeys((module, module.removeprefix("text_model."), f"text_model.{module}")):
        found.append(f"{role}.{name}")
        found += [prefix + name.replace(".", "_") for prefix, roles in _KOHYA.items() if role in roles]
    if role == "transformer":
        theirs = functools.reduce(lambda name, pair: name.replace(*pair), _AUTHORS.items(), module)
        found += [f"{prefix}{name}" for name in (module, theirs) for prefix in ("diffusion_model.", "")]
    return found


def _ranks(tensors: Sequence[tuple[str, tuple[int, ...], str, int]]) -> list[tuple[str, int]]:
    """List a file's layers and their ranks."""
    found = dict[str, int]()
    for name, shape, *_ in tensors:
        half = _HALF.fullmatch(name)
        if half and len(shape) < 2:
            raise ArgumentError("path", "matrices", f"{name!r} of shape {shape}")
        if half and half["up"]:
            found[half["layer"]] = shape[1]
        elif not half and not name.endswith(".alpha"):
            raise ArgumentError("path", "pairs lora_A and lora_B, or lora_down and lora_up", repr(name))
    return list(found.items())


def read_loras(name: str, given: Any, are_loaded: bool) -> tuple[Lora, ...]:
    """Read the argument `lora` of a pipeline: one LoRA, or several. are_loaded: whether its class has
    ``load_lora_weights``"""
    if given is None:
        return ()
    if not are_loaded:
        raise ArgumentError("lora", f"None with {name}: its pipeline has no load_lora_weights", repr(given))
    usual = next((layers for start, layers in _TARGETS.items() if name.startswith(start)), _ATTENTION)
    given = given if isinstance(given, list | tuple) else [given]
    return tuple(replace(Lora.read(one), usual=usual) for one in given)


def pairs_of(loras: Sequence[Lora], denoiser: str, components: Mapping[str, Sequence[Weight]]) -> dict[str, list[Pair]]:
    """List the pairs of each component, the first LoRA's first. components: weights by role"""
    found = dict[str, list[Pair]]()
    for lora in loras:
        here = {role: lora.pairs(role, weights, role == denoiser) for role, weights in components.items()}
        count = sum(map(len, here.values()))
        if not count or count < len(lora.ranks):
            known = {alias for role, pairs in here.items() for pair in pairs for alias in _aliases(role, pair.module)}
            unknown = next((name for name, _ in lora.ranks if name not in known), ", ".join(lora.target_modules))
            raise ArgumentError("lora", "layers of the pipeline, named as in diffusers", repr(unknown))
        for role, pairs in here.items():
            found.setdefault(role, []).extend(pairs)
    return found
