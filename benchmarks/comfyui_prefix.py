"""Denoisers of ComfyUI that keep keys and values of the prompt from a run's first step, so that recorders follow them.

A recorder knows a call's arguments and outputs, and no attributes of a module. So the first step's call returns what
the denoiser keeps, and further steps' calls get it. The sampler's end frees it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from vaemem._common import setting

ENOUGH = 1 << 60  # bytes of free memory: what is kept lies on the card


def follow_prefix(model: torch.nn.Module) -> None:
    """Let a denoiser return what it keeps. The calls of its class run its forward (comfyui_workflow.py)."""
    if hasattr(model.diffusion_model, "reset_prefix_cache"):
        model.__class__ = _with_prefix(type(model))


def _with_prefix(kind: Any) -> type[torch.nn.Module]:
    class Prefix(kind):  # type: ignore[misc]
        kept: Any = None

        @property
        def current_patcher(self) -> Any:
            return kind.current_patcher.fget(self)

        @current_patcher.setter
        def current_patcher(self, patcher: Any) -> None:
            """Begin a run, or end it."""
            self.kept = None
            kind.current_patcher.fset(self, patcher)

        def apply_model(self, *args: Any, **given: Any) -> Any:
            if self.kept is not None:
                return self.forward(*args, kept=self.kept, **given)
            out, self.kept = self.forward(*args, **given)
            return out

        def forward(
            self, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
            transformer_options: Any = None, kept: Any = None, **given: Any,
        ) -> Any:  # fmt: skip
            inner = self.diffusion_model
            inner.current_patcher = SimpleNamespace(get_free_memory=lambda device: ENOUGH)
            inner.prefix_cache, inner.prefix_cache_enabled = _cache_of(kept, x.device) if kept else None, True
            with setting(torch, equal=_compare):
                out = kind.forward(self, x, t, c_concat, c_crossattn, control, transformer_options, **given)
            cache, inner.prefix_cache, inner.current_patcher = inner.prefix_cache, None, None
            if kept:
                return out
            (slot,) = cache.slots
            return out, [slot["key"], *slot["blocks"].values()]

    Prefix.__name__ = kind.__name__
    return Prefix


def _cache_of(kept: Any, device: Any) -> Any:
    from comfy.ldm.wan.model_animate2 import PoseBranchCache

    cache, (key, *blocks) = PoseBranchCache(store_device=device), kept
    numbered = dict(enumerate(blocks))
    cache.slots = [{"key": key, "blocks": numbered, "params": dict.fromkeys(numbered), "shape": None, "pinned": []}]
    return cache


def _compare(one: Any, other: Any) -> bool:
    """Take the memory that torch.equal takes on a card (Equal.cpp). A run's prompt stays the same."""
    torch.eq(one, other).all()
    return True
