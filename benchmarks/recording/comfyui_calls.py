"""Let ComfyUI's models make calls that recorders follow: those of a module's forward.

Some VAEs code a video in chunks. Their encoder and decoder get a list, in which they leave tensors for the next chunk.
A recorder knows a call's outputs and no changes of lists. So a chunk's call gets the tensors that earlier chunks left,
and returns its own. Some denoisers keep keys and values of the prompt from a run's first step. The first step's call
returns these tensors, and later calls get them. The sampler frees them at its end.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from vaemem._common import setting

ENOUGH = 1 << 60  # bytes of free memory: what a denoiser keeps lies on the card


def call_by_forward(kind: Any, method: str) -> None:
    """Let a method call the module's forward, which recorders follow, and forward run the method's code."""
    if getattr(kind, method).__name__ == method:
        kind.forward = getattr(kind, method)
        setattr(kind, method, lambda self, *args, **kwargs: self.forward(*args, **kwargs))


def call_by_forward_too(kind: Any, method: str) -> None:
    """Let a method of a module that has it call the module's forward with the method's name, too."""
    if getattr(getattr(kind, method, None), "__name__", "") == method:
        run, forward = getattr(kind, method), kind.forward

        def choose(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
            return run(self, *args, **kwargs) if first is method else forward(self, first, *args, **kwargs)

        kind.forward = choose
        setattr(kind, method, lambda self, *args, **kwargs: self.forward(method, *args, **kwargs))


def let_read(file: Any, numbers: Sequence[float]) -> None:
    """Let `float` in a file return these numbers in turn for tensors on the card."""
    turns = itertools.cycle(numbers)
    file.float = lambda x: next(turns) if isinstance(x, torch.Tensor) and x.is_cuda else float(x)


def follow_chunks(vae: torch.nn.Module) -> None:
    """Let a VAE's encoder and decoder return what they leave for the next chunk. Wan's VAEs lengthen their latents, and
    those of 2.2 the video, chunk by chunk; here the chunks are joined once (`_join`)."""
    kinds: dict[str, dict[str, Any]] = {
        "comfy.ldm.wan.vae": {"encode": _encode_wan},
        "comfy.ldm.wan.vae2_2": {"decode": _decode_wan22},
    }
    if own := kinds.get(type(vae).__module__):
        vae.__class__ = type(type(vae).__name__, (type(vae),), own)
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
            if isinstance(feat_cache, str):  # a recorder's call, with forward's own arguments
                return super().__call__(x, feat_cache, feat_idx, **given)
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


def _join(first: Any, calls: Iterable[Callable[[], Any]]) -> tuple[Any, Any]:
    """Do what `out = torch.cat([out, chunk], 2)` after each call does. Return `out` and the last chunk.

    Copies of the chunks stand for `out`, which has as many bytes. So each call does the same.
    """
    out, chunk = [first], None
    for call in calls:
        if chunk is not None:
            out.append(chunk.clone())
        chunk = call()  # None if the chunk is too short for a frame of latents
    return (torch.cat([*out, chunk], 2) if chunk is not None else first), chunk


def _encode_wan(self: Any, x: Any) -> Any:
    """Do what comfy.ldm.wan.vae's encode does."""
    count = (x.shape[2] - 1) // 4 * 2
    left = [None] * (resolve_name("comfy.ldm.wan.vae:count_cache_layers")(self.encoder) if count else 0) or None

    def encode(i: int) -> Any:
        return self.encoder(x[:, :, 1 + 2 * i : 3 + 2 * i], feat_cache=left, feat_idx=[0], final=i == count - 1)

    first = self.encoder(x[:, :, :1], feat_cache=left, feat_idx=[0])
    out, _chunk = _join(first, (functools.partial(encode, i) for i in range(count)))
    return self.conv1(out).chunk(2, dim=1)[0]


def _decode_wan22(self: Any, z: Any) -> Any:
    """Do what comfy.ldm.wan.vae2_2's decode does."""
    left, x = [None] * resolve_name("comfy.ldm.wan.vae2_2:count_conv3d")(self.decoder), self.conv2(z)

    def decode(i: int, **given: bool) -> Any:
        return self.decoder(x[:, :, i : i + 1], left, [0], **given)

    out, _chunk = _join(decode(0, first_chunk=True), (functools.partial(decode, i) for i in range(1, x.shape[2])))
    return resolve_name("comfy.ldm.wan.vae2_2:unpatchify")(out, patch_size=2)


def follow_tiles(vae: torch.nn.Module) -> None:
    """Let a VAE that decodes tiles by itself decode two of them, which stand for all."""
    if hasattr(vae, "split_tiles"):
        vae.__class__ = _by_tiles(type(vae))


def _by_tiles(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class of VAEs whose pictures have as many tiles as it takes, of which the first and another one are
    decoded. The other one finds the tails of a row above, of its own row, and of its left neighbour."""

    class Tiled(kind):  # type: ignore[misc, valid-type]
        def tiled_decode(self, z: Any) -> Any:
            side, ratio, overlap = self.tile_size // self.vae_ratio, self.vae_ratio, self.tile_overlap_min
            height, width = (ratio * size for size in z.shape[-2:])
            part = z[..., :1, :1].expand(*z.shape[:-2], side, side)
            tile = self._decode_pixels(part)
            canvas = tile.new_empty(*tile.shape[:-2], height, width)
            above, _own = (tile.new_empty(*tile.shape[:-2], overlap, width) for _ in range(2))
            left = tile[..., :, -overlap:].clone()
            tile = self._decode_pixels(part)
            tile = self.blend(above[..., :1].expand(*above.shape[:-1], self.tile_size), tile, overlap, dim=-2)
            tile = self.blend(left, tile, overlap, dim=-1)
            return canvas

    Tiled.__name__ = kind.__name__
    return Tiled


def follow_prefix(model: torch.nn.Module) -> None:
    """Let a denoiser return the tensors that it keeps. Calls of the class run `forward` (comfyui_workflow.py)."""
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
