"""ComfyUI's classic memory management: which models leave the card, and how much of a model is loaded.

ComfyUI uses this manager with ``--disable-dynamic-vram``, ``--novram`` and ``--highvram``. The rules were read in
ComfyUI 0.33.0: comfy/model_management.py, model_patcher.py, sampler_helpers.py, model_base.py and sd.py, on an NVIDIA
card.
tests/comfyui_decisions_0.33.0.txt has ComfyUI's decisions on 260 random cards, and a test compares these rules with the
decisions. Patches (LoRA), hooks, and requests for several models at once are not modelled.

Before a node runs a model, the node loads the model with an estimate of the memory that its call needs. The manager
frees the estimated memory and room for the model's weights, plus a tenth of the weights. Then the manager loads as many
layers as the rest of the card takes, the largest first. A layer that has no room is sent for each of its calls, on two
streams in turn. The manager keeps room for the largest layer and the next two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vaemem._common import ELEMENT_BYTES, MIB

SOURCE = "ComfyUI 0.33.0 (783545f)"  # from a copy of its repository, yzkee/ComfyUI
STREAMS = 2  # on which it sends layers for their calls, in turn
# Bytes that it keeps for calls and for other programs (minimum_inference_memory, EXTRA_RESERVED_VRAM).
INFERENCE, RESERVED = 0.8 * 2**30, 400 * MIB
RESERVED_ON_WINDOWS, MORE_ON_LARGE, LARGE = 600 * MIB, 100 * MIB, 15 * 1024 * MIB
ROOM = 1.1  # it frees this many times the weights that it loads
NORMAL, NO_VRAM = "normal", "novram"  # as --lowvram, too, the manager does the same as without an option
HIGH_VRAM = "highvram"  # models load whole, and a denoiser stays on the card from its loader's node on


class Layer(NamedTuple):
    """A module without submodules, or with submodules that have no weights.

    casts: whether the layer's weights can be sent for each of its calls; otherwise the layer's own code moves them
    copied: bytes of the layer's weights in the dtype of the call, if they are converted for the call
    """

    bytes: int
    name: str
    casts: bool = True
    copied: int = 0

    @property
    def order(self) -> tuple[int, int, str]:
        """Key by which layers are sorted: the largest first; of equally large layers the last by name."""
        return self.bytes + self.copied, self.bytes, self.name


class ManagedModel:
    """A model as the manager knows it.

    Attributes
    ----------
    name : str
    layers : list of Layer
        In the order in which they are loaded.
    nbytes : int
        Bytes of all weights of the model. Some weights may be in no layer; they come with the whole model only.
    loaded : int
        Bytes that the manager counts as on the card.
    is_partial : bool
        Whether the last load left a layer out.
    there : set of str
        Layers that the manager counts as on the card. The bytes of these layers may differ from `loaded`: a layer stays
        if a later load does not choose it.
    """

    def __init__(self, name: str, layers: Iterable[Layer], rest: int = 0, references: int = 0, stays: bool = False):
        """references: more Python references to it than to other models; of equals the fewest leave first. stays:
        whether its weights are on the card from the beginning, and stay there if the manager unloads it."""
        self.name, self.references, self.stays = name, references, stays
        self.layers = sorted(layers, key=lambda layer: layer.order, reverse=True)
        self.nbytes = rest + sum(layer.bytes for layer in self.layers)
        self.loaded, self.is_partial, self.is_whole = 0, False, False
        self.there: set[str] = set()
        self._buffer: float = 0  # room for layers that are sent

    @property
    def held(self) -> set[str]:
        """Layers with weights on the card, and "" if the weights in no layer are there."""
        if self.stays:
            return {*(layer.name for layer in self.layers), ""}
        return {*self.there, *[""] * self.is_whole}

    @property
    def sent(self) -> list[Layer]:
        """Layers that are sent for each call."""
        return [layer for layer in self.layers if layer.name not in self.there]

    def load(self, more: float) -> None:
        """Load up to `more` further bytes of layers, or unload some if that is negative (partially_load)."""
        if more < 0:
            self._unload_some(-more)
            return
        if self.loaded and not self.is_partial:
            return
        limit, loaded = self.loaded + more, 0
        is_whole, self.is_partial, self._buffer = limit > self.nbytes, False, 0
        for i, layer in enumerate(self.layers):
            later = self.layers[i + 1 : i + 1 + STREAMS]
            buffer = max(self._buffer, layer.bytes + layer.copied + sum(one.bytes for one in later))
            if is_whole or loaded + layer.bytes + buffer < limit:
                loaded += layer.bytes
                self.there.add(layer.name)
            else:
                self.is_partial |= layer.casts
                self._buffer = buffer
        self.is_whole |= is_whole
        self.loaded = self.nbytes if is_whole else loaded

    def unload(self, wanted: float | None = None) -> bool:
        """Free `wanted` bytes, the smallest layers first, or all. Return whether the model left the card."""
        if wanted is not None and wanted < self.loaded and self._unload_some(wanted) >= wanted:
            return False
        self.there.clear()
        self.loaded, self.is_partial, self.is_whole, self._buffer = 0, False, False, 0
        return True

    def _unload_some(self, wanted: float) -> int:
        """Unload the smallest layers until `wanted` bytes are free, and room for the layers that are then sent. Return
        the bytes of the unloaded layers (partially_unload)."""
        freed, before = 0, self._buffer
        share = min(before / (STREAMS + 1), self.layers[-1].bytes if self.layers else 0)
        later = [share] * STREAMS
        for layer in reversed(self.layers):
            if wanted + self._buffer - before < freed:
                break
            if layer.name in self.there:
                self.there.remove(layer.name)
                freed += layer.bytes
                self._buffer = max(self._buffer, layer.bytes + layer.copied + sum(later))
                later = [*later[1:], layer.bytes]
        self.is_partial = True
        self.loaded -= freed
        return freed


class Manager:
    """The card's models, the last requested first."""

    def __init__(
        self, free: Callable[[], int], reserved: float = RESERVED, state: str = NORMAL, smart: bool = True,
        freed: Callable[[bool], None] = lambda left: None,
    ):  # fmt: skip
        """free: returns the card's free bytes, PyTorch's cache included. smart: False as with
        ``--disable-smart-memory``, which removes models whole. freed: is called after `free`, with whether a model
        left. With ``--highvram`` it is only called if one left."""
        self.models: list[ManagedModel] = []
        self._free, self._reserved, self._state, self._smart, self._freed = free, reserved, state, smart, freed

    @property
    def least_free(self) -> float:
        """Bytes that the manager keeps free for any call."""
        return INFERENCE + self._reserved

    def load(
        self, model: ManagedModel, needed: float = 0, least: float | None = None, whole: bool = False
    ) -> list[ManagedModel]:
        """Load a model for a call (``load_models_gpu``). Return the models that leave.

        needed: bytes that its call may need, by its own estimate
        least: bytes without which the call fails, by the same estimate
        whole: load all layers whatever the room
        """
        extra = max(self.least_free, needed + self._reserved)
        least = extra if least is None else max(self.least_free, least + self._reserved)
        if model in self.models:
            self.models.remove(model)
        left = self.free((model.nbytes - model.loaded) * ROOM + extra)
        if self._free() < least:
            left += self.free(least)
        model.load(self._room(model, least, whole))
        self.models.insert(0, model)
        return left

    def _room(self, model: ManagedModel, least: float, whole: bool) -> float:
        """Return the bytes of further weights that the model may load; negative if it must unload some."""
        if self._state == NO_VRAM:
            return 0.1
        if whole or self._state == HIGH_VRAM:
            return 1e32
        free = self._free() + model.loaded
        return max(0, free - least) - model.loaded or 0.1

    def free(self, wanted: float) -> list[ManagedModel]:
        """Unload models until `wanted` bytes are free: first those with most bytes in the host, then those with fewest
        references, then the smallest. Return the models that left the card (``free_memory``)."""
        order = sorted(
            (model.loaded - model.nbytes, model.references, model.nbytes, i) for i, model in enumerate(self.models)
        )
        gone = list[ManagedModel]()
        for *_, i in order:
            free = self._free()
            if self._smart and free > wanted:
                break
            if self.models[i].unload(wanted - free if self._smart else None):
                gone.append(self.models[i])
        self.models = [model for model in self.models if model not in gone]
        if gone or self._state != HIGH_VRAM:
            self._freed(bool(gone))
        return gone


# ---- its estimates ----


def estimate_denoiser(usage: float, area: int, dtype: str) -> float:
    """Estimate a denoiser's bytes (BaseModel.memory_required). usage: its class's memory_usage_factor. area: images
    times the sides of the latents, and their frames. dtype: in which it computes.

    Examples
    --------
    >>> estimate_denoiser(0.8, 2 * 128 * 128, "float16") / 2**20
    524.288
    """
    return area * ELEMENT_BYTES[dtype] * 0.01 * usage * (1024 * 1024)
