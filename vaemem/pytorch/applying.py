"""Set on a pipeline of diffusers what a way of `vaemem.plan_pipeline` says.

The steps of the way's own script (`vaemem.pipelines.recipe`) run on the pipeline, so the code that a plan shows is what
happens here. The steps are calls and values: no text is run.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from vaemem._common import DTYPES, choose, meant
from vaemem._errors import ArgumentError, ArgumentTypeError, inside
from vaemem._script import Call, Identifier, Step, write_script
from vaemem.pipelines.components import PIPELINES
from vaemem.pipelines.offload_kinds import GroupOffload, check_way
from vaemem.pipelines.recipe import casting_steps, describe_stay, placing_steps, roles_on_cpu, vae_steps
from vaemem.pipelines.ways import Outcome, PipelinePlan
from vaemem.prediction.default_dtypes import FIXED
from vaemem.prediction.phases import Way
from vaemem.pytorch.converting import convert, modules_of
from vaemem.pytorch.free_memory import first_line, is_out_of_memory, no_spilling, release
from vaemem.pytorch.measuring import find_device

_CASTING_HOOKS = ("layerwise_casting", "peft_autocast_disable")
_GROUP_HOOKS = ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading")
_SETTINGS = {"offload": "none", "vae": "whole", "components": None, "vae_memory_limit": None, "dtype": None}
_ROLES = {role for kind in PIPELINES.values() for role in kind.parts}
_TILES = (
    "use_tiling", "use_slicing", "tile_sample_min_size", "tile_latent_min_size", "tile_sample_min_height",
    "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width",
)  # fmt: skip
_OFFLOADS = {
    "none": "every component is on {}",
    "model": "each component is on {} for its call",
    "sequential": "the weights of each submodule are on {} for its call",
}


class Applied:
    """The result of `apply`. Printing it shows its words. Call it as you would call the pipeline.

    Attributes
    ----------
    steps : tuple of str
        What is set, in words.
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

    steps: tuple[str, ...] = ()
    code: str = ""

    def __init__(self, pipe: Any, place: torch.device, ways: list[Outcome]):
        self._pipe, self._place, self._ways, self._before = pipe, place, ways, _State(pipe)

    def __str__(self) -> str:
        return "; ".join(self.steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pipeline. With ``on_out_of_memory="next"``, run it again in the next way if memory runs out."""
        given = kwargs.get("generator")
        generators = given if isinstance(given, list) else [given] if given is not None else []
        states = [one.get_state() for one in generators]
        while True:
            try:
                with no_spilling(self._place):
                    return self._pipe(*args, **kwargs)
            except Exception as error:
                lack = self._leave(error)
            self._go_on(lack)
            for one, state in zip(generators, states, strict=True):
                one.set_state(state)

    def _set(self, settings: Mapping[str, Any]) -> None:
        """Set a way. If that fails, set everything back."""
        try:
            self._before.reset(self._pipe)
            self._pipe.vae.use_tiling = self._pipe.vae.use_slicing = False
            steps, self.steps = _describe(settings, self._pipe, str(self._place))
            self.code = write_script(steps)
            for role in _cast_by(settings, self._pipe):
                self._before.keep_weights(role)
            if settings["vae"] == "vaemem":  # its copy decodes: the original needs no room on the card
                self._pipe.vae.to("cpu")
            with no_spilling(self._place):
                for step in steps:
                    _run(step, self._pipe)
        except BaseException as error:
            if not (self._ways and is_out_of_memory(error)):
                self.undo()
            raise

    def _go_on(self, lack: Exception) -> None:
        """Set the next way that can be set. If no way can run, raise the error that memory ran out."""
        while self._ways:
            one = self._ways.pop(0)
            try:
                self._set(_arguments_of(one, self._pipe))
            except Exception as error:
                if not is_out_of_memory(error):
                    why = f"{one.way.name} cannot be set, so it is skipped: {first_line(error)}"
                    warnings.warn(why, RuntimeWarning, stacklevel=3)
                release(error)
            else:
                warnings.warn(f"Memory ran out. Going on with {one.way.name}: {self}", RuntimeWarning, stacklevel=3)
                return
        raise lack

    def _leave(self, error: Exception) -> Exception:
        """If memory ran out and there is another way, free what the failed way holds; otherwise raise its error."""
        if not (self._ways and is_out_of_memory(error)):
            raise error
        release(error)
        return error

    def undo(self) -> None:
        """Set everything back: the VAE and its settings, the hooks, the weights that were cast to float8, and the
        devices of the components."""
        self._before.restore(self._pipe)
        self.steps, self.code = (), ""


class _State:
    """What `apply` may change of a pipeline."""

    def __init__(self, pipe: Any):
        self.vae, self.tiles = pipe.vae, {name: getattr(pipe.vae, name, None) for name in _TILES}
        self.parts, self.dtype = modules_of(pipe), pipe.vae.dtype
        self.places: dict[str, Any] = {role: part.device for role, part in self.parts.items()}
        hooks = [type(part._hf_hook).__name__ for part in self.parts.values() if hasattr(part, "_hf_hook")]
        self.offload = "" if not hooks else "model" if "CpuOffload" in hooks else "sequential"
        self.device = getattr(pipe, "_offload_device", None)
        self.groups = {role: config for role, part in self.parts.items() if (config := _group_config(part))}
        self.weights: dict[str, dict[str, torch.Tensor]] = {}  # of components that are cast, on the host

    def keep_weights(self, role: str) -> None:
        """Keep a component's weights, which lose digits in float8. Weights on the host are not copied."""
        self.weights[role] = {name: one.data.cpu() for name, one in self.parts[role].named_parameters()}

    def reset(self, pipe: Any) -> None:
        """Undo all changes of the pipeline except the components' places. A decode that failed may leave the VAE in
        another dtype."""
        pipe.remove_all_hooks()
        for part in modules_of(pipe).values():
            _remove_groups(part)
        for role, kept in self.weights.items():
            _remove_casting(self.parts[role])
            for name, one in self.parts[role].named_parameters():
                one.data = kept[name].to(one.device)
        self.weights.clear()
        pipe.vae = self.vae
        if self.vae.dtype != self.dtype:
            convert(self.vae, self.dtype)
        for name, value in self.tiles.items():
            if value is not None:
                setattr(pipe.vae, name, value)

    def restore(self, pipe: Any) -> None:
        self.reset(pipe)
        if self.groups:
            from diffusers.hooks.group_offloading import _apply_group_offloading

            for role, config in self.groups.items():
                _apply_group_offloading(self.parts[role], config)
        if self.offload:
            getattr(pipe, f"enable_{self.offload}_cpu_offload")(device=self.device)
            return
        for role, part in self.parts.items():
            if role not in self.groups and part.device != self.places[role]:  # quantised weights may refuse to move
                part.to(self.places[role])


def _is_cast(part: Any) -> bool:
    """Tell whether diffusers' layerwise casting stores a component in a smaller type."""
    modules = part.modules() if isinstance(part, torch.nn.Module) else ()
    registries = (getattr(module, "_diffusers_hook", None) for module in modules)
    return any(registry and registry.get_hook(_CASTING_HOOKS[0]) for registry in registries)


def _remove_casting(part: torch.nn.Module) -> None:
    """Remove the hooks of layerwise casting. The weights stay in float8."""
    for module in part.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if registry and (hook := registry.get_hook(_CASTING_HOOKS[0])):
            hook.deinitalize_hook = lambda module: module  # diffusers' own raises, because it keeps no weights
            for name in _CASTING_HOOKS:
                registry.remove_hook(name, recurse=False)


def _cast_by(settings: Mapping[str, Any], pipe: Any) -> list[str]:
    """List the components that a way stores in float8, and that are not yet."""
    return [
        role for role, kind in settings["components"].items() if kind == "fp8" and not _is_cast(getattr(pipe, role))
    ]


def _group_config(part: torch.nn.Module) -> Any:
    """Return how diffusers' hooks offload a component in groups, or None."""
    registries = (getattr(module, "_diffusers_hook", None) for module in part.modules())
    hooks = (registry.get_hook(_GROUP_HOOKS[0]) for registry in registries if registry)
    return next((hook.config for hook in hooks if hook), None)


def _remove_groups(part: torch.nn.Module) -> None:
    """Remove the hooks of group offloading. The weights stay where they are."""
    if _group_config(part):
        from diffusers.hooks import HookRegistry

        registry = HookRegistry.check_if_exists_or_initialize(part)
        for name in _GROUP_HOOKS:
            registry.remove_hook(name, recurse=True)


def _arguments_of(way: Any, pipe: Any) -> Mapping[str, Any]:
    """Return the arguments of `vaemem.predict_pipeline` that a way stands for, checked, with their defaults."""
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
    offload, vae, components, limit, dtype = map({**_SETTINGS, **settings}.get, _SETTINGS)
    with inside("way"):
        known, _, vae, _ = check_way(modules_of(pipe), offload, vae, limit)
        if not isinstance(components or {}, Mapping):
            raise ArgumentError("components", "{role: type}", repr(components))
        dtype = None if dtype is None else meant("dtype", dtype, DTYPES)
    offload = offload if isinstance(offload, Mapping) else known
    return dict(zip(_SETTINGS, (offload, vae, components or {}, limit, dtype), strict=True))


def _check_types(pipe: Any, settings: Mapping[str, Any]) -> None:
    """Refuse types in which the pipeline is not loaded: a loaded pipeline can only be cast to float8."""
    components, dtype = settings["components"], settings["dtype"]
    types = {**({} if dtype is None else dict.fromkeys(modules_of(pipe).keys() & _ROLES, dtype)), **components}
    for role, kind in types.items():
        part = getattr(pipe, role, None)
        loaded = str(getattr(part, "dtype", None)).removeprefix("torch.")
        loaded = "int8" if getattr(part, "is_loaded_in_8bit", False) else loaded
        loaded = "nf4" if getattr(part, "is_loaded_in_4bit", False) else loaded
        loaded = "fp8" if _is_cast(part) else loaded
        if kind == "fp8" and role != "vae" and loaded in DTYPES:  # it can be cast, if it is in the way's dtype
            kind = dtype or loaded
        if str(None if kind == "none" else kind).partition(" ")[0] != loaded:
            raise ArgumentError(
                "pipe", f"a pipeline whose {role} is loaded in {kind}", loaded, "the way's code loads it so"
            )
    if components.get("vae") == "float16" and getattr(pipe.vae.config, "force_upcast", False):
        raise ArgumentError(
            "pipe", f"a VAE that stays in float16, such as {FIXED}", "one whose config says force_upcast"
        )


def _value(value: Any, pipe: Any) -> Any:
    """Return the object that a value of a step stands for. The value's names are the recipe's own."""
    if isinstance(value, Identifier):
        first, *rest = value.text.split(".")
        own = {"pipe": pipe, "torch": torch}
        root = getattr(importlib.import_module(value.module), first) if value.module else own[first]
        return functools.reduce(getattr, rest, root)
    if isinstance(value, Call):
        named = {name: _value(one, pipe) for name, one in value.named.items()}
        return _value(value.does, pipe)(*(_value(one, pipe) for one in value.given), **named)
    return tuple(_value(one, pipe) for one in value) if isinstance(value, tuple) else value


def _run(step: Step, pipe: Any) -> None:
    """Make a step's call, and set the attribute that gets its value."""
    value = _value(step.value, pipe)
    if step.target:
        owner, _, name = step.target.rpartition(".")
        setattr(_value(Identifier(owner), pipe), name, value)


def _describe(settings: Mapping[str, Any], pipe: Any, where: str) -> tuple[list[Step], tuple[str, ...]]:
    """Return the steps that set a way, and words for them."""
    from vaemem.pytorch.autoencoder import find_drop_in

    offload, vae = settings["offload"], settings["vae"]
    limit = settings["vae_memory_limit"]
    how, _, side = vae.partition(" ")
    steps = [{
        "tiled": f"the VAE runs in tiles of {side} pixels" if side else "the VAE runs in its config's tiles",
        "sliced": "the VAE runs a batch image by image", "vaemem": f"vaemem decodes within {limit}",
    }.get(how, "the VAE runs whole")]  # fmt: skip
    group = GroupOffload.read(offload)
    if group:
        excluded = f", but {' and '.join(group.exclude_modules)} stay there" if group.exclude_modules else ""
        early = ", and come during the call before" * group.use_stream
        steps.append(f"the weights of groups ({group.offload_type}) are on {where} for their calls{early}{excluded}")
    elif on_cpu := roles_on_cpu(offload):
        steps.append(f"{describe_stay(on_cpu)}, and the others are on {where}")
    else:
        steps.append(_OFFLOADS["none" if isinstance(offload, Mapping) else offload].format(where))
    class_name = find_drop_in(pipe).__name__ if how == "vaemem" else ""
    cast = _cast_by(settings, pipe)
    steps += [f"{role} is stored in float8, and each layer is converted for its call" for role in cast]
    types = {role: str(getattr(pipe, role).dtype).removeprefix("torch.") for role in cast}
    made = [step for role in cast for step in casting_steps(role, types[role])]
    made += [*vae_steps(vae, limit, class_name), *placing_steps(offload, modules_of(pipe), where)]
    return made, tuple(steps)


def _list_next(plan: PipelinePlan, pipe: Any) -> Iterator[Outcome]:
    """Yield the ways to go on with: each fits, leaves the picture as it is, and takes less of the card than the way
    before. The fastest comes first. Text encoders on the CPU need another call, so these ways are left out."""
    last = plan.recommended
    others = sorted(plan.outcomes, key=lambda one: one.seconds.likely if one.seconds else 0.0)
    for one in others if last else ():
        if one.way.changes or not one.fits or roles_on_cpu(one.way.settings["offload"]):
            continue
        if last and one.way.peak.total < last.way.peak.total:
            with suppress(ArgumentError):
                _check_types(pipe, _arguments_of(one, pipe))
                yield one
                last = one


def apply(way: Any, pipe: Any, *, device: Any = None, on_out_of_memory: str = "raise") -> Applied:
    """Set on a loaded pipeline of diffusers what a way of running it says: offloading, and how the VAE runs.

    Parameters
    ----------
    way : PipelinePlan, Outcome, Way or mapping
        A plan for diffusers (then its recommended way), one of its outcomes or ways, or arguments of
        `vaemem.predict_pipeline`: ``offload``, ``vae``, ``vae_memory_limit``, ``components`` and ``dtype``.
    pipe : diffusers.DiffusionPipeline
        Components must be loaded in the way's types: its `dtype`, or their own in `components`. ``"fp8"`` casts a
        loaded component to float8; `Applied.undo` brings its weights back, which are kept in the host's memory. The
        pipeline is changed in place.
    device : torch.device or str, optional
        Where the pipeline runs; by default the GPU if PyTorch has one, otherwise the CPU.
    on_out_of_memory : {"raise", "next"}
        What to do if memory runs out while the way is set, or in a call of the result. ``"next"`` needs a plan. The
        call goes on, with a warning, to the fastest way that takes less of the card and leaves the picture as it is. A
        way that cannot be set is skipped with a warning. Generators start again from the same state. Other errors are
        raised.

    Returns
    -------
    Applied
        What was set, in words and as code. Its `undo` sets everything back. A call of it runs the pipeline. On Windows
        both stay within the memory that the driver counts as free: they run out of memory where the driver would go on
        in the host's, many times slower.

    Raises
    ------
    ValueError, TypeError
        A way of another program, a setting with an unknown value, or a pipeline that is loaded in other types. Nothing
        is changed then.

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
    if not hasattr(pipe, "components") or getattr(pipe, "vae", None) is None:
        raise ArgumentTypeError("pipe", "a pipeline of diffusers with a VAE", type(pipe).__name__)
    settings, place = _arguments_of(way, pipe), find_device(device)
    choose("on_out_of_memory", on_out_of_memory, ("raise", "next"))
    goes_on = on_out_of_memory == "next"
    if goes_on and not isinstance(way, PipelinePlan):
        raise ArgumentTypeError("way", "a plan, which has a next way", type(way).__name__)
    _check_types(pipe, settings)
    done = Applied(pipe, place, [*_list_next(way, pipe)] if goes_on else [])
    try:
        done._set(settings)
    except Exception as error:
        lack = done._leave(error)
    else:
        return done
    done._go_on(lack)
    return done
