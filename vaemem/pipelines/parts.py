"""A pipeline's parts: the weights of each component in the type that was asked for, or as a file has them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from vaemem import _core
from vaemem._common import DTYPES, choose
from vaemem.engine.weights import tensor_types
from vaemem.pipelines.components import Pipeline
from vaemem.pipelines.pipeline_run import Part, weights_of
from vaemem.pipelines.storage import BITSANDBYTES, GGML, TYPES, stored

WEIGHT_TYPES = [name for name in TYPES if name not in ("float64", "int64", "bool")]  # which are tables' and masks'


def parts_of(pipeline: Pipeline, dtype: str, components: Mapping[str, Any]) -> tuple[Part, ...]:
    if not isinstance(components, Mapping):
        raise ValueError(f"components: want {{role: type or file}}, got {components!r}")
    known = {**pipeline.parts, **pipeline.optional}
    for role in components:
        choose("components", role, known)
    parts = []
    for role, component in known.items():
        given = components.get(role, None if role in pipeline.optional else dtype)
        if given is not None:
            parts.append(_part(role, component, dtype, given, upcast=component == "sdxl" and role not in components))
        elif role not in (*pipeline.encoders, *pipeline.optional):
            raise ValueError(f"components: want a type or a file for {role}, got None")
    return tuple(parts)


def _part(role: str, component: str, dtype: str, given: Any, upcast: bool) -> Part:
    if given in DTYPES:
        return _typed(role, component, given, given, "all", upcast and given == "float16")
    if component in _core.models():
        choose(f"components[{role!r}]", given, DTYPES)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and os.path.exists(given)):
        try:
            return Part(role, component, dtype, tuple(stored(weights_of(component), None, tensor_types(given))))
        except ValueError as error:
            raise ValueError(f"components[{role!r}]: {given}: {error}") from None
    choose(f"components[{role!r}]", given, WEIGHT_TYPES)
    return _typed(role, component, dtype, given, _usual_rule(role, given))


@functools.lru_cache(maxsize=32)
def _typed(role: str, component: str, dtype: str, given: str, rule: str, upcast: bool = False) -> Part:
    """What is stored in a type is the same for every size and card."""
    return Part(role, component, dtype, tuple(stored(weights_of(component), given, rule, dtype)), upcast)


def _usual_rule(role: str, kind: str) -> str:
    """Whose rule says which tensors a type is for, where no file does."""
    if kind in BITSANDBYTES:
        return "bitsandbytes"
    if kind in GGML:
        return "llama.cpp" if role.startswith("text_encoder") else "comfyui-gguf"
    return "layerwise" if kind == "fp8" else "all"
