"""VAEs of ComfyUI that code a video in chunks, so that recorders follow each chunk as a call of its own.

Such a VAE's encoder and decoder get a list, in which they leave tensors for the next chunk. A recorder knows a call's
outputs and no changes of lists. So a chunk's call gets what earlier chunks left, and returns what it leaves.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def follow_chunks(vae: torch.nn.Module) -> None:
    """Let a VAE's encoder and decoder return what they leave for the next chunk."""
    for coder in vae.children():
        if "feat_cache" in inspect.signature(coder.forward).parameters:
            coder.__class__ = _by_chunks(type(coder))


def _by_chunks(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class whose calls are those of another, and whose forward returns what it leaves.

    A layer frees what it left as soon as it leaves more. Here tensors of one element stand for what earlier chunks
    left, and the tensors themselves are freed before the call.
    """

    class Chunk(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: Any, feat_cache: Any = None, feat_idx: Any = None, **given: Any) -> Any:
            if feat_cache is None:
                return super().__call__(x, "", None, **given)[0]
            one = x.new_empty(1)
            left = [one.expand(known.shape) if isinstance(known, torch.Tensor) else known for known in feat_cache]
            frames = " ".join(str(known.shape[2] if isinstance(known, torch.Tensor) else known) for known in left)
            feat_cache[:] = [None] * len(feat_cache)
            out, feat_cache[:] = super().__call__(x, frames, left, **given)
            return out

        def forward(self, x: Any, frames: str, left: Any, **given: Any) -> Any:
            """frames: those of the tensors that earlier chunks left. They tell calls of other code apart."""
            kept = None if left is None else [*left]
            return kind.forward(self, x, feat_cache=kept, feat_idx=[0], **given), kept

    Chunk.__name__ = kind.__name__
    return Chunk
