"""InvokeAI's VAEs, computed by vaemem, for the nodes of `vaemem.nodes`. Nothing here imports InvokeAI.

A ``loaded`` is what InvokeAI's ``context.models.load`` returns. These of its names are used: ``model``,
``model_in_ram``, ``model_on_device`` and ``compute_device``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vaemem._errors import ArgumentError
from vaemem.engine.arguments import Poll
from vaemem.engine.vae import VAE
from vaemem.pytorch.free_memory import free_cache
from vaemem.pytorch.places import ANYWHERE, Place

if TYPE_CHECKING:
    from PIL.Image import Image

# diffusers' classes, and the authors' class of FLUX.1's.
_CLASSES = ("AutoencoderKL", "AutoencoderTiny", "AutoEncoder")


def recognise(loaded: Any) -> Any:
    """Return InvokeAI's module; ArgumentError if vaemem does not compute the same."""
    if (name := type(loaded.model).__name__) not in _CLASSES:
        wanted, advice = f"one of {', '.join(_CLASSES)}", "use InvokeAI's own node for this one"
        raise ArgumentError("vae", wanted, name, advice)
    return loaded.model


@contextmanager
def _opened(loaded: Any, op: str, place: Place) -> Iterator[tuple[VAE, dict[str, Any]]]:
    """Copy one half of the weights into a VAE of vaemem's; yield it with arguments of its runs.

    On a card InvokeAI makes room for the limit besides its own weights. On the CPU nothing is moved.
    """
    dtype: Any = str(next(recognise(loaded).parameters()).dtype).removeprefix("torch.")
    device = place.device_for(loaded.compute_device, dtype)
    parts = "decoder" if op == "decode" else "encoder"
    if device == "cpu":
        with loaded.model_in_ram() as module:
            ours = VAE.load(module, parts=parts, dtype="float32")
    else:
        with loaded.model_on_device(working_mem_bytes=place.limit or None) as (_, module):
            ours = VAE.load(module, parts=parts, dtype=dtype, device=device)
        free_cache()
    with ours:
        yield ours, {"scaled": True, "memory_limit": place.limit_on(device)}


def decode_whole(
    loaded: Any, latents: torch.Tensor, seamless_axes: Sequence[str], poll: Poll, place: Place = ANYWHERE
) -> Image:
    """Decode the first of some latents whole and exactly, within a limit. latents: (N, C, h, w)."""
    if seamless_axes:
        raise ArgumentError("vae", "one without seamless axes", ", ".join(seamless_axes), "use InvokeAI's own node")
    z = latents[:1].detach().to("cpu", torch.float32).contiguous()
    with _opened(loaded, "decode", place) as (ours, how):
        images = cast("list[Image]", ours.decode(z.numpy(), output_type="pil", progress=poll, **how))
        return images[0]


def encode_whole(loaded: Any, image: Image, poll: Poll, place: Place = ANYWHERE) -> torch.Tensor:
    """Encode an image whole and exactly, within a limit. Return the distribution's mode, (1, C, h, w) in the VAE's
    type.

    As in InvokeAI, sides are scaled down to multiples of 8 pixels.
    """
    from PIL.Image import Resampling

    width, height = (side - side % 8 for side in image.size)
    scaled = image.convert("RGB").resize((width, height), Resampling.LANCZOS)
    with _opened(loaded, "encode", place) as (ours, how):
        latents = np.ascontiguousarray(ours.encode(scaled, progress=poll, **how).mode())
    return torch.from_numpy(latents).to(next(loaded.model.parameters()).dtype)
