"""Find a pipeline's modules, and convert them to another dtype."""

from __future__ import annotations

from typing import Any

import torch


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Return {role: module} of a pipeline's components."""
    return {role: part for role, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def convert(module: Any, dtype: torch.dtype) -> Any:
    """Convert a module to a dtype, as PyTorch does.

    The method ``to`` of diffusers' models (0.42) logs a warning at every conversion: some modules should stay in
    float32. It names none for autoencoders.
    """
    return torch.nn.Module.to(module, dtype=dtype)
