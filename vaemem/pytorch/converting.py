"""Find a pipeline's modules and the arguments of its call, and convert modules to another dtype."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return {role: module} of a pipeline's components."""
    return {role: part for role, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """List a module's parameters and buffers, and plain tensors that its submodules hold: weight_norm leaves some."""
    plain = [x for m in module.modules() for x in vars(m).values() if isinstance(x, torch.Tensor)]
    return [*module.parameters(), *module.buffers(), *plain]


def arguments_of(pipe: Any) -> dict[str, Any]:
    """Return {name: default} of the arguments of a pipeline's call. A modular pipeline's blocks name them."""
    if blocks := getattr(pipe, "blocks", None):
        return {one.name: one.default for one in blocks.inputs if one.name}
    return {name: one.default for name, one in inspect.signature(type(pipe).__call__).parameters.items()}


def convert(module: Any, dtype: torch.dtype) -> Any:
    """Convert a module to a dtype, as PyTorch does.

    The method ``to`` of diffusers' models (0.42) logs a warning at every conversion: some modules should stay in
    float32. It names none for autoencoders.
    """
    return torch.nn.Module.to(module, dtype=dtype)
