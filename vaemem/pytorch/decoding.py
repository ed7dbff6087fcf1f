"""Decode a pipeline's latents even if PyTorch's decode does not fit: the denoising before it is not lost."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from vaemem._common import frames_factor, latent_factor
from vaemem._errors import ArgumentError
from vaemem.engine.configs import is_of_videos, read_config
from vaemem.engine.limits import available_memory
from vaemem.engine.vae import VAE
from vaemem.prediction.gpus import context_of
from vaemem.prediction.predict_vae import predict
from vaemem.pytorch.converting import convert
from vaemem.pytorch.free_memory import find_free, first_line, free_cache, is_out_of_memory, no_spilling, release
from vaemem.pytorch.measuring import cudnn_version

_SIDE = 16  # of the latents that a first decode on the CPU times


class SafeDecode:
    """The result of `safe_decode`: it stands in for the VAE's ``decode``.

    Attributes
    ----------
    latents : torch.Tensor or None
        The latents of the last call, on the CPU.
    notes : tuple of str
        What happened in the last call; empty if PyTorch decoded.

    Examples
    --------
    >>> import diffusers, torch
    >>> pipe = diffusers.DiffusionPipeline()
    >>> pipe.vae = diffusers.AutoencoderKL()
    >>> safe = safe_decode(pipe)
    >>> with torch.no_grad():
    ...     pipe.vae.decode(torch.zeros(1, 4, 8, 8)).sample.shape
    torch.Size([1, 3, 8, 8])
    >>> safe.latents.shape, safe.notes
    (torch.Size([1, 4, 8, 8]), ())
    >>> safe.undo()
    """

    def __init__(self, vae: Any, drop_in: Any):
        self.latents: torch.Tensor | None = None
        self.notes: tuple[str, ...] = ()
        self._vae, self._drop_in = weakref.ref(vae), drop_in
        self._before = vars(vae).get("decode")
        vae.decode = self

    def undo(self) -> None:
        """Stop guarding the VAE. Guards of other calls of `safe_decode` stay; they may be undone in any order."""
        vae: Any = self._vae()
        above = vars(vae).get("decode") if vae is not None else None
        if above is self:
            del vae.decode
            if self._before is not None:
                vae.decode = self._before
        while isinstance(above, SafeDecode):
            if above._before is self:
                above._before = self._before
            above = above._before

    def __reduce__(self) -> Any:
        """Copy and pickle it as the guard of its VAE's copy, without latents."""
        return _guard, (self._vae(), self._drop_in)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vae: Any = self._vae()
        key = next((name for name in ("z", "x") if name in kwargs), "z")
        z = args[0] if args else kwargs.get(key)
        theirs = self._before or type(vae).decode.__get__(vae)
        is_video = isinstance(z, torch.Tensor) and z.ndim == 5 and z.shape[2] != 1
        if not isinstance(z, torch.Tensor) or (is_video and not is_of_videos(_config(vae, self._drop_in.theirs))):
            return theirs(*args, **kwargs)
        self.latents, self.notes = z.detach().to("cpu"), ()

        def decode(by: Callable[..., Any], latents: torch.Tensor) -> Any:
            return by(latents, *args[1:], **kwargs) if args else by(**kwargs | {key: latents})

        def run() -> tuple[Any, str]:
            _load(vae)
            if why := explain_misfit(vae, z):
                free_cache()
                return None, why
            with no_spilling(z.device):
                return decode(theirs, z), ""

        result, why = attempt(run)
        if not why:
            return result
        ours = _copy(vae, self._drop_in)
        if describe_card(z.device):
            self._warn(f"{why}. vaemem decodes on {z.device} in the free memory")
            try:
                return decode(ours.to(z.device).decode, z.detach())
            except (ImportError, MemoryError, RuntimeError, ValueError) as error:
                why = f"vaemem cannot decode on {z.device}: {first_line(error)}"
                release(error)
            ours.to("cpu")
        latents = self.latents
        took = estimate_seconds(ours, latents)
        self._warn(f"{why}. vaemem decodes on the CPU{f', which takes about {took:.0f} s' if took else ''}")
        return tree_map_only(torch.Tensor, lambda one: one.to(z.device), decode(ours.decode, latents))

    def _warn(self, note: str) -> None:
        self.notes += (note,)
        warnings.warn(note, RuntimeWarning, stacklevel=3)


def _guard(vae: Any, drop_in: Any) -> SafeDecode:
    """Return the guard of a VAE; make one if it has none."""
    guard = vars(vae).get("decode")
    return guard if isinstance(guard, SafeDecode) else SafeDecode(vae, drop_in)


def attempt(call: Callable[[], tuple[Any, str]]) -> tuple[Any, str]:
    """Return a call's result; if memory runs out, None and why. Nothing keeps the tensors of the failed call."""
    try:
        return call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        why = f"PyTorch's decode ran out of memory: {first_line(error)}"
        release(error)
    return None, why


def _load(vae: Any) -> None:
    """Let accelerate's hook move an offloaded VAE to the card, and the component before it away."""
    hook = getattr(vae, "_hf_hook", None)
    if hook is not None:
        hook.pre_forward(vae)


def _config(vae: Any, kind: Any) -> dict[str, Any]:
    return {**vae.config, "_class_name": kind.__name__}


def _copy(vae: Any, drop_in: Any) -> Any:
    """Return vaemem's copy of a VAE, on the CPU. The copy decodes whole images and videos within the free memory."""
    source = vae
    if any(weight.is_meta for weight in vae.parameters()):  # accelerate keeps the weights elsewhere
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        source = convert(drop_in.theirs.from_config(vae.config), vae.dtype)
        source.load_state_dict(get_state_dict_offloaded_model(vae))
    engine = VAE.load(source, config=_config(vae, drop_in.theirs))
    limit = None if available_memory() is None else "auto"
    ours = drop_in(engine, vae.config, vae.dtype, memory_limit=limit)
    ours.use_slicing = getattr(vae, "use_slicing", False)
    return ours


def describe_card(device: torch.device) -> dict[str, Any] | None:
    """Return arguments of `vaemem.predict` for a card, with its free bytes as ``free``; None without a card."""
    if device.type != "cuda":
        return None
    return {
        "gpu": torch.cuda.get_device_name(device), "memory": torch.cuda.mem_get_info(device)[1],
        "free": find_free(device), "torch_version": torch.__version__, "cudnn_version": cudnn_version(),
    }  # fmt: skip


def explain_misfit(vae: Any, z: torch.Tensor) -> str:
    """Say why PyTorch's decode of these latents does not fit the card now; "" if it may fit, or nothing is predicted.

    The prediction leaves out what Windows keeps of a card: the driver does not count it as free.
    """
    card = describe_card(z.device)
    if card is None:
        return ""
    config = _config(vae, type(vae))
    tiled = getattr(vae, "use_tiling", False)
    held = sum(weight.nbytes for weight in vae.parameters() if weight.device == z.device)
    used = max(card["memory"] - card.pop("free") - context_of(card["gpu"], card["memory"]) - held, 0)
    try:
        arch = read_config(config)
        factor, later = latent_factor(arch), z.shape[2] - 1 if z.ndim == 5 else 0
        answer = predict(
            config, "decode_tiled" if tiled else "decode", z.shape[-2] * factor, z.shape[-1] * factor,
            vae.dtype, len(z), slicing=getattr(vae, "use_slicing", False), used=used,
            tile=vae.tile_sample_min_size if tiled else None, protocol="cold",
            frames=later * frames_factor(arch) + 1, **card,
        )  # fmt: skip
    except (AttributeError, ValueError):  # an unknown card, version or model: PyTorch tries
        return ""
    return "" if answer.fits else f"PyTorch's decode {answer.summary}"


def estimate_seconds(ours: Any, z: torch.Tensor) -> float | None:
    """Estimate the seconds of a decode on the CPU: time a small one, and count both FLOPs. None if z is small."""
    arch, small = ours.vae.arch, z[..., :_SIDE, :_SIDE]
    frames = z.shape[2] if z.ndim == 5 else 1
    small = small[:, :, :2] if frames > 1 else small
    if z.shape[-1] * z.shape[-2] * frames < 4 * _SIDE * _SIDE:
        return None
    factor, start = latent_factor(arch), time.perf_counter()
    with torch.no_grad():
        ours.decode(small[:1])
    took = time.perf_counter() - start
    height, width = z.shape[-2] * factor, z.shape[-1] * factor
    shown = (frames - 1) * frames_factor(arch) + 1
    whole = ours.vae.estimate("decode", height, width, memory_limit=ours.memory_limit, frames=shown)
    return float(took * len(z) * sum(whole.flops) / sum(ours.last_run.flops))


def safe_decode(pipe: Any) -> SafeDecode:
    """Let a pipeline of diffusers decode even if PyTorch's decode does not fit, so that a denoising is never lost.

    Each later ``pipe.vae.decode`` first predicts whether PyTorch's decode fits the free memory of the card. If it fits,
    or nothing is known, PyTorch decodes. Otherwise, or if PyTorch runs out of memory, vaemem decodes with a warning: on
    the card within the free memory, or on the CPU. Other errors pass through. On Windows the decode is limited to the
    free memory, because the driver would go on in the host's.

    Parameters
    ----------
    pipe : diffusers.DiffusionPipeline
        Its ``vae`` is one of the classes that have a drop-in, such as AutoencoderKL. Call `safe_decode` after
        `vaemem.pytorch.apply`. A new ``pipe.vae`` needs a new call.

    Returns
    -------
    SafeDecode
        The guard, which keeps the latents of the last decode. The result's `undo` sets the VAE's own ``decode`` back. A
        second call makes a second guard, and each has its own `undo`. A copied or unpickled VAE has a guard of its own.

    Raises
    ------
    ValueError, TypeError
        The pipeline has no VAE, or one of another class, or vaemem's.

    Notes
    -----
    vaemem decodes whole images, and videos of Wan and LTX-2. vaemem's float32 numbers differ from PyTorch's by at most
    1e-4, and other dtypes by their own rounding. If tiling is on, PyTorch's tiles would change the picture; vaemem's
    picture is then the one without tiles. Other videos are left to PyTorch. No GPU has run this: tests fake the card.

    Examples
    --------
    >>> from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    >>> pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), AutoencoderKL(), *[None] * 5)
    >>> safe = safe_decode(pipe)  # then pipe(...) as usual
    >>> safe.undo()
    """
    from vaemem.pytorch.autoencoder import find_drop_in

    drop_in, vae = find_drop_in(pipe), pipe.vae
    if isinstance(vae, drop_in):
        raise ArgumentError("pipe", "a VAE of diffusers'", "vaemem's, which decodes within its memory_limit")
    return SafeDecode(vae, drop_in)
