"""Convert modules to another dtype."""

from __future__ import annotations

from typing import Any

import torch


def convert(module: Any, dtype: torch.dtype) -> Any:
    """Convert a module to a dtype, as PyTorch does.

    The method ``to`` of diffusers' models (0.42) logs a warning at every conversion: some modules should stay in
    float32. It names none for autoencoders.
    """
    return torch.nn.Module.to(module, dtype=dtype)
