"""Set on a pipeline of diffusers what a way of `vaemem.plan_pipeline` says.

The lines of the way's own script (`vaemem.pipelines.recipe`) run on the pipeline, so the code that a plan shows is what
happens here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem.pipelines.recipe import placing_code, vae_code
from vaemem.pipelines.ways import Outcome, PipelinePlan
from vaemem.prediction.planned import Way
from vaemem.prediction.usual import FIXED
from vaemem.pytorch.measuring import find_device

_SETTINGS = ("offload", "vae", "components", "vae_memory_limit")
_TILES = ("use_tiling", "use_slicing", "tile_sample_min_size", "tile_latent_min_size")
_OFFLOADS = {
    "none": "every component is on {}",
    "model": "each component is on {} for its call",
    "sequential": "the weights of each submodule are on {} for its call",
}


class Applied:
    """The result of `apply`. Printing it shows its words.

    Attributes
    ----------
    steps : tuple of str
        What was set, in words.
    code : str
        The same in Python, for a pipeline named ``pipe``.

    Examples
    --------
    >>> from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    >>> pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), AutoencoderKL(), *[None] * 5)
    >>> done = apply({"vae": "sliced"}, pipe, device="cpu")
    >>> print(done.code)
    pipe.vae.enable_slicing()
    pipe.to("cpu")
    >>> done.undo()
    """

    def __init__(self, pipe: Any, steps: tuple[str, ...], code: str, before: _State):
        self.steps, self.code, self._pipe, self._before = steps, code, pipe, before

    def __str__(self) -> str:
        return "; ".join(self.steps)

    def undo(self) -> None:
        """Set everything back: the VAE and its settings, the hooks, and the devices of the components."""
        self._before.restore(self._pipe)


class _State:
    """What `apply` may change of a pipeline."""

    def __init__(self, pipe: Any):
        self.vae, self.tiles = pipe.vae, {name: getattr(pipe.vae, name, None) for name in _TILES}
        self.parts = _modules(pipe)
        self.places: dict[str, Any] = {role: part.device for role, part in self.parts.items()}
        hooks = [type(part._hf_hook).__name__ for part in self.parts.values() if hasattr(part, "_hf_hook")]
        self.offload = "" if not hooks else "model" if "CpuOffload" in hooks else "sequential"
        self.device = getattr(pipe, "_offload_device", None)

    def restore(self, pipe: Any) -> None:
        pipe.remove_all_hooks()
        pipe.vae = self.vae
        for name, value in self.tiles.items():
            if value is not None:
                setattr(pipe.vae, name, value)
        if self.offload:
            getattr(pipe, f"enable_{self.offload}_cpu_offload")(device=self.device)
            return
        for role, part in self.parts.items():
            if part.device != self.places[role]:  # quantised weights may refuse to move
                part.to(self.places[role])


def _modules(pipe: Any) -> dict[str, torch.nn.Module]:
    return {role: part for role, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _arguments_of(way: Any) -> Mapping[str, Any]:
    """Return the arguments of `vaemem.predict_pipeline` that a way stands for."""
    if isinstance(way, PipelinePlan):
        if way.recommended is None:
            raise ArgumentError("way", "a plan with a way that fits", "one in which none does")
        way = way.recommended
    way = way.way if isinstance(way, Outcome) else way
    settings = way.settings if isinstance(way, Way) else way
    if not isinstance(settings, Mapping):
        raise ArgumentTypeError("way", "a plan, one of its ways, or a way's settings", type(way).__name__)
    if other := settings.keys() - set(_SETTINGS):
        raise ArgumentError("way", f"a way of diffusers, with {', '.join(_SETTINGS)}", ", ".join(sorted(other)))
    return settings


def _check_types(pipe: Any, types: Mapping[str, Any]) -> None:
    """Refuse types in which the pipeline is not loaded: a loaded pipeline cannot change them."""
    for role, kind in types.items():
        part = getattr(pipe, role, None)
        loaded = str(getattr(part, "dtype", None)).removeprefix("torch.")
        loaded = "int8" if getattr(part, "is_loaded_in_8bit", False) else loaded
        loaded = "nf4" if getattr(part, "is_loaded_in_4bit", False) else loaded
        if str(kind).partition(" ")[0] != loaded:
            raise ArgumentError(
                "pipe", f"a pipeline whose {role} is loaded in {kind}", loaded, "the way's code loads it so"
            )
    if types.get("vae") == "float16" and getattr(pipe.vae.config, "force_upcast", False):
        raise ArgumentError(
            "pipe", f"a VAE that stays in float16, such as {FIXED}", "one whose config says force_upcast"
        )


def apply(way: Any, pipe: Any, *, device: Any = None) -> Applied:
    """Set on a loaded pipeline of diffusers what a way of running it says: offloading, and how the VAE runs.

    Parameters
    ----------
    way : PipelinePlan, Outcome, Way or mapping
        A plan for diffusers (then its recommended way), one of its outcomes or ways, or arguments of
        `vaemem.predict_pipeline`: ``offload``, ``vae``, ``vae_memory_limit`` and ``components``.
    pipe : diffusers.DiffusionPipeline
        Components must be loaded in the way's types. It is changed in place.
    device : torch.device or str, optional
        Where it runs; by default the GPU if PyTorch has one, otherwise the CPU.

    Returns
    -------
    Applied
        What was set, in words and as code. Its `undo` sets everything back.

    Raises
    ------
    ValueError, TypeError
        A way of another program, or a pipeline that is loaded in other types. Nothing is changed then.

    Examples
    --------
    >>> from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    >>> pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), AutoencoderKL(), *[None] * 5)
    >>> done = apply({"offload": "none", "vae": "tiled 256"}, pipe, device="cpu")
    >>> print(done)
    the VAE runs in tiles of 256 pixels; every component is on cpu
    >>> done.undo()
    >>> pipe.vae.use_tiling
    False
    """
    settings, place = _arguments_of(way), find_device(device)
    if not hasattr(pipe, "components") or getattr(pipe, "vae", None) is None:
        raise ArgumentTypeError("pipe", "a pipeline of diffusers with a VAE", type(pipe).__name__)
    offload, vae = settings.get("offload", "none"), str(settings.get("vae", "whole"))
    types, limit = dict(settings.get("components") or {}), settings.get("vae_memory_limit")
    _check_types(pipe, types)
    where, roles = str(place), list(_modules(pipe))
    lines = [*vae_code(vae, limit), *placing_code(offload, roles, where)]
    how, _, side = vae.partition(" ")
    steps = [{
        "tiled": f"the VAE runs in tiles of {side} pixels" if side else "the VAE runs in its config's tiles",
        "sliced": "the VAE runs a batch image by image", "vaemem": f"vaemem decodes within {limit}",
    }.get(how, "the VAE runs whole")]  # fmt: skip
    if isinstance(offload, Mapping):
        on_cpu = [role for role, at in offload.items() if at == "cpu"]
        steps.append(f"{' and '.join(on_cpu)} stay on the CPU, and the others are on {where}")
    else:
        steps.append(_OFFLOADS[offload].format(where))
    before = _State(pipe)
    try:
        pipe.remove_all_hooks()
        pipe.vae.use_tiling = pipe.vae.use_slicing = False
        exec("\n".join(lines), {"pipe": pipe})
    except BaseException:
        before.restore(pipe)
        raise
    return Applied(pipe, tuple(steps), "\n".join(lines), before)
