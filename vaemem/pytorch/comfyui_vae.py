"""ComfyUI's VAEs, computed by vaemem, for the nodes of `vaemem.nodes`. Nothing here imports ComfyUI.

A ``vae`` is an object of ComfyUI's class VAE (``comfy/sd.py``), and a ``manager`` is its module
``comfy.model_management``. Both are arguments. These of the VAE's names are used: ``first_stage_model``, ``patcher``,
``device``, ``output_device``, ``vae_dtype``, ``latent_dim``, ``disable_offload``, ``memory_used_encode``,
``memory_used_decode``, ``process_input``, ``process_output``, ``vae_encode_crop_pixels``, ``decode``, and the names of
its tiled decodes.
"""

from __future__ import annotations

import copy
import io
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from vaemem import _core
from vaemem._common import frames_factor, latent_factor, need
from vaemem._errors import ArgumentError
from vaemem._render import in_gb
from vaemem.engine import weights
from vaemem.engine.arguments import Poll
from vaemem.engine.configs import Arch
from vaemem.engine.device import ATTENTION_CHANNELS
from vaemem.engine.vae import VAE
from vaemem.pipelines.by_comfyui import vae_dtype
from vaemem.pipelines.components import is_vae, weights_of
from vaemem.pipelines.predict_pipeline import predict_pipeline
from vaemem.pipelines.recorded_modules import load_program
from vaemem.pipelines.workflows import WORKFLOWS
from vaemem.prediction.gpus import context_of, find_gpu
from vaemem.prediction.predict_vae import Prediction, predict
from vaemem.prediction.request import KEPT
from vaemem.pytorch.decoding import attempt, describe_card
from vaemem.pytorch.free_memory import count_bytes, first_line, free_cache, no_spilling, release
from vaemem.pytorch.places import ANYWHERE, Place

_LTX = "VideoVAE"
# ComfyUI's autoencoders that compute the same as vaemem. Others may have the same tensors, and compute something else.
_CLASSES = ("AutoencoderKL", "AutoencodingEngine", "WanVAE", "TAESD", _LTX)
_TILED = ("decode_tiled_", "decode_tiled_1d", "decode_tiled_3d")  # what ComfyUI's decode calls if memory runs out


class Safe(NamedTuple):
    """Pictures of `decode_safely`, and why and where vaemem decoded them; no notes if ComfyUI decoded them."""

    pixels: torch.Tensor
    notes: tuple[str, ...]


# ---- the VAE ----


def recognise(vae: Any) -> Arch:
    """Return the architecture of a loaded VAE; ArgumentError if vaemem has none such."""
    module = getattr(vae, "first_stage_model", None)
    if module is None:
        raise ArgumentError("vae", "a VAE with weights", "none", "load a checkpoint with a VAE, or a VAE's file")
    name, why = type(module).__name__, ""
    try:
        if name in _CLASSES:
            arch = weights.arch_of(module.state_dict())
            if name != _LTX or _computes_ltx(module, arch):
                return arch
            why = " (with other settings than LTX-2's)"
    except ValueError as error:
        why = f" ({first_line(error)})"
    wanted = f"a VAE: one of {', '.join(_CLASSES)} that vaemem knows"
    raise ArgumentError("vae", wanted, f"{name}{why}", "use ComfyUI's own node for this one")


def _computes_ltx(module: Any, arch: Arch) -> bool:
    """Return whether ComfyUI's VAE of LTX has the settings of an architecture that its tensors do not tell."""
    mode = module.config.get("spatial_padding_mode")  # without one the decoder mirrors, and the encoder does not
    own = (module.decoder.causal, mode in (None, "reflect"), mode == "reflect")
    known = (arch["decoder_causal"], arch["decoder_reflects"], arch["encoder_reflects"])
    return not module.timestep_conditioning and own == known


def _is_ltx(arch: Arch) -> bool:
    return arch.get("family") == "ltx"


def _is_packed(arch: Arch) -> bool:
    """Return whether ComfyUI's latents are packed and normalised, as FLUX.2's pipelines hold them."""
    return "patch_size" in arch


def _is_normalised(arch: Arch) -> bool:
    """Return whether ComfyUI's latents are those of pipelines, and its VAE undoes that."""
    return _is_packed(arch) or _is_ltx(arch)


def _scaling(vae: Any) -> tuple[float, float]:
    """Return the scale and the shift between ComfyUI's latents and those of the network; TAESD's wrapper has them."""
    module = vae.first_stage_model
    return float(getattr(module, "vae_scale", 1.0)), float(getattr(module, "vae_shift", 0.0))


def _name_type(dtype: Any) -> Any:
    return str(dtype).removeprefix("torch.")


def choose_device(vae: Any, arch: Arch, place: Place = ANYWHERE) -> str:
    """Return where vaemem runs this VAE: "cpu", or a card such as "cuda:0"."""
    widths = arch["block_out_channels"][-1:] + arch.get("decoder_block_out_channels", ())[-1:]
    if arch["mid_block_add_attention"] and max(widths) > ATTENTION_CHANNELS:  # Wan 2.2's
        if place.device == "gpu":
            raise ArgumentError("device", f"'cpu' or 'auto' for {arch['name']}, whose attention is too wide", "'gpu'")
        return "cpu"
    return place.device_for(vae.device, _name_type(vae.vae_dtype))


def _dtype_on(vae: Any, device: str) -> Any:
    """Return the type of numbers: ComfyUI's on a card, and float32 on the CPU."""
    return "float32" if device == "cpu" else _name_type(vae.vae_dtype)


def _open(vae: Any, op: str, device: str, is_video: bool = False) -> VAE:
    """Copy one half of the VAE's weights into vaemem's."""
    tensors, parts = vae.first_stage_model.state_dict(), "decoder" if op == "decode" else "encoder"
    return VAE.load(tensors, parts=parts, device=device, dtype=_dtype_on(vae, device), videos=is_video or None)


def _make_room(vae: Any, op: str, shape: Any, limit: int, manager: Any) -> None:
    """Let ComfyUI unload other models from the card: for a limit, or as much as for its own run."""
    needed = limit or getattr(vae, f"memory_used_{op}")(shape, vae.vae_dtype) + count_bytes(vae.first_stage_model)
    manager.free_memory(needed, vae.device)
    free_cache()


# ---- running ----


def _frames_of(latents: torch.Tensor, arch: Arch) -> int:
    """Return how many frames latents have. ArgumentError unless they are images' or a video's of a VAE of videos."""
    frames = latents.shape[2] if latents.ndim == 5 else 1
    if latents.ndim not in (4, 5) or (frames > 1 and frames_factor(arch) == 1):
        wanted, advice = "latents of images, or of videos of Wan or LTX-2", "use ComfyUI's VAE Decode for others"
        raise ArgumentError("latents", wanted, f"the shape {tuple(latents.shape)}", advice)
    return int(frames)


def decode_whole(vae: Any, latents: torch.Tensor, manager: Any, poll: Poll, place: Place = ANYWHERE) -> torch.Tensor:
    """Decode latents whole and exactly, within a limit. Return pictures as ComfyUI has them: (N, H, W, 3), 0 to 1.
    The frames of videos are pictures, one video after the other."""
    arch = recognise(vae)
    is_video = _frames_of(latents, arch) > 1 or _is_ltx(arch)
    device, (scale, shift) = choose_device(vae, arch, place), _scaling(vae)
    z = (latents if is_video or latents.ndim == 4 else latents[:, :, 0]).detach().to("cpu", torch.float32).contiguous()
    z = z if (scale, shift) == (1, 0) else (z - shift) * scale
    if device != "cpu":
        _make_room(vae, "decode", latents.shape, place.limit, manager)
    with _open(vae, "decode", device, is_video) as ours:
        how: Any = {"scaled": _is_normalised(arch), "progress": poll, "memory_limit": place.limit_on(device)}
        pixels = torch.from_numpy(ours.decode(z.numpy(), **how))
    for picture in pixels.split(1):  # one after the other, because process_output copies
        picture.copy_(vae.process_output(picture))
    pixels = pixels.to(vae.output_device).movedim(1, -1)
    return pixels.flatten(0, 1) if pixels.ndim == 5 else pixels


def encode_whole(vae: Any, pixels: torch.Tensor, manager: Any, poll: Poll, place: Place = ANYWHERE) -> torch.Tensor:
    """Encode pictures whole and exactly, within a limit. Return latents as ComfyUI's VAE does: the distribution's mode.

    As in ComfyUI, sides are cropped to multiples of the VAE's factor, and a VAE of videos takes several pictures for
    one video.
    """
    arch = recognise(vae)
    has_frames = vae.latent_dim == 3
    is_video = has_frames and len(pixels) > 1
    if is_video and (frames_factor(arch) == 1 or getattr(vae, "not_video", False)):
        advice = "encode one after the other, or use ComfyUI's VAE Encode"
        raise ArgumentError("pixels", "one picture", str(len(pixels)), advice)
    cropped = vae.vae_encode_crop_pixels(pixels[..., :3]).movedim(-1, 1)
    x = vae.process_input(cropped.to("cpu", torch.float32))
    x = (x.movedim(0, 1).unsqueeze(0) if is_video else x).contiguous()
    device = choose_device(vae, arch, place)
    if device != "cpu":
        shape = (1, x.shape[1], 1, *x.shape[2:]) if has_frames and not is_video else x.shape
        _make_room(vae, "encode", shape, place.limit, manager)
    with _open(vae, "encode", device, is_video) as ours:
        how: Any = {"scaled": _is_normalised(arch), "progress": poll, "memory_limit": place.limit_on(device)}
        latents = torch.from_numpy(np.ascontiguousarray(ours.encode(x.numpy(), **how).mode()))
    scale, shift = _scaling(vae)
    latents = latents if (scale, shift) == (1, 0) else latents / scale + shift
    return (latents.unsqueeze(2) if has_frames and not is_video else latents).to(vae.output_device)


# ---- ComfyUI's own decode, and vaemem's if it does not fit ----


class _Tiles(MemoryError):
    """ComfyUI's decode ran out of memory and would go on in tiles."""


def _whole(vae: Any) -> Any:
    """Return a VAE whose decode raises if it would go on in tiles. The copy shares everything else with the first
    VAE."""
    whole = copy.copy(vae)

    def refuse(*samples: Any, **tiles: Any) -> None:
        raise _Tiles("ComfyUI would decode in tiles")

    for name in _TILED:
        if not callable(getattr(vae, name, None)):
            raise ArgumentError("vae", f"a VAE of ComfyUI with {name}", type(vae).__name__, "use VAE Decode (vaemem)")
        setattr(whole, name, refuse)
    return whole


def _explain_misfit(vae: Any, whole: Any, arch: Arch, latents: torch.Tensor, manager: Any) -> str:
    """Say why ComfyUI's decode does not fit the card, after it has unloaded other models; "" if it may fit.

    If the decode is predicted, `whole` gets the prediction as its estimate of memory: by this ComfyUI makes room, and
    chooses how many images run at once. The prediction leaves out what Windows keeps of a card: the driver does not
    count it as free.
    """
    if describe_card(vae.device) is None or _frames_of(latents, arch) > 1 or _is_ltx(arch):
        return ""  # nothing is predicted for ComfyUI's videos
    packed = 2 if _is_packed(arch) else 1
    height, width = (side * packed * latent_factor(arch) for side in latents.shape[-2:])
    try:
        needed = predict_decode(vae, arch, height, width).upper
        manager.load_models_gpu([vae.patcher], memory_required=needed, force_full_load=vae.disable_offload)
        held = sum(one.nbytes for one in vae.first_stage_model.parameters() if one.device == vae.device)
        card: Any = describe_card(vae.device)
        used = max(card["memory"] - card["free"] - context_of(card["gpu"], card["memory"]) - held, 0)
        answer = predict_decode(vae, arch, height, width, used=used, os="linux")
    except ValueError:  # an unknown card or version, or an older WanVAE: ComfyUI tries
        return ""
    whole.memory_used_decode = lambda shape, dtype: needed
    return "" if answer.fits else f"ComfyUI's decode {answer.summary}"


def _system() -> str:
    return "windows" if sys.platform == "win32" else "linux"


def _card_of(vae: Any, gpu: str) -> dict[str, Any]:
    """Return the arguments of a prediction that name ComfyUI's card, or another one."""
    system = {"os": _system()}
    if gpu:
        return system | {"gpu": gpu}
    card = describe_card(vae.device)
    if card is None:
        raise ArgumentError("gpu", "a card such as 'RTX 4060'", "none", "ComfyUI runs the VAE on the CPU, so name one")
    del card["free"]
    return system | card


def _refuse_older(vae: Any) -> None:
    """Refuse a WanVAE that caches the inputs of its convolutions even for one image. In older versions, the padding in
    time is a tuple."""
    padding = getattr(getattr(getattr(vae, "first_stage_model", None), "conv2", None), "_padding", None)
    if isinstance(padding, tuple):
        advice = "update ComfyUI; an older one needs about three times as much memory"
        raise ArgumentError("vae", "a WanVAE since ComfyUI's pull request 13014", "an older one", advice)


def predict_decode(vae: Any, arch: Arch, height: int, width: int, gpu: str = "", **how: Any) -> Prediction:
    """Predict ComfyUI's decode of one picture, on ComfyUI's card or on another one."""
    _refuse_older(vae)
    how = _card_of(vae, gpu) | how
    if not gpu:
        how["allocator"] = torch.cuda.get_allocator_backend()
    # On the CPU ComfyUI has other types than on a card.
    dtype = _name_type(vae.vae_dtype) if describe_card(vae.device) else None
    return predict(arch, "decode", height, width, dtype, runtime="comfyui", protocol="cold", **how)


def decode_safely(vae: Any, latents: torch.Tensor, manager: Any, poll: Poll) -> Safe:
    """Decode by ComfyUI. If that does not fit, or runs out of memory, decode by vaemem, and never in tiles.

    vaemem decodes on the card within the free memory, or otherwise on the CPU.
    """
    arch = recognise(vae)
    _frames_of(latents, arch)  # refuses other latents now, not after ComfyUI's run
    whole, notes = _whole(vae), list[str]()

    def run() -> tuple[Any, str]:
        why = _explain_misfit(vae, whole, arch, latents, manager)
        with no_spilling(vae.device):
            return (None, why) if why else (whole.decode(latents), "")

    pixels, why = attempt(run)
    if not why:
        return Safe(pixels.flatten(0, 1) if pixels.ndim == 5 else pixels, ())
    if (device := choose_device(vae, arch)) != "cpu":
        notes.append(f"{why}. vaemem decodes on {device} in the free memory")
        try:
            return Safe(decode_whole(vae, latents, manager, poll, Place("gpu")), tuple(notes))
        except (ImportError, MemoryError, ValueError) as error:
            why = f"vaemem cannot decode on {device}: {first_line(error)}"
            release(error)
    notes.append(f"{why}. vaemem decodes on the CPU")
    return Safe(decode_whole(vae, latents, manager, poll, Place("cpu")), tuple(notes))


# ---- before a run ----


class CardEstimate(NamedTuple):
    """A prediction for a node. nbytes: the most on the card besides the CUDA context. picture: (1, H, W, 3), 0 to 1."""

    text: str
    nbytes: int
    picture: torch.Tensor


def estimate(
    vae: Any, height: int, width: int, gpu: str = "", model: Any = None, manager: Any = None, batch: int = 1
) -> CardEstimate:
    """Predict on a card, without running anything: with a model that `predict_pipeline` knows the whole workflow, and
    otherwise the decode of a picture. With another model, add ComfyUI's own estimate for the sampler.

    On ComfyUI's own card, the memory of other programs counts; models of ComfyUI do not, because it can unload them.
    ComfyUI splits a batch for its decode, so that counts one picture.
    """
    arch, used = recognise(vae), 0
    if not gpu and vae.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(vae.device)
        card: Any = describe_card(vae.device)
        context = context_of(card["gpu"], card["memory"])
        windows = KEPT[_system()][0]  # the driver does not count it as free
        used = max(total - free - torch.cuda.memory_reserved(vae.device) - context - windows, 0)
    if model is not None and (workflow := _workflow_of(vae, arch, model)):
        given: Any = {**workflow, "height": height, "width": width, "batch": batch, "used": used, **_card_of(vae, gpu)}
        whole = predict_pipeline(runtime="comfyui", **given)
        return CardEstimate(whole.to_text(), whole.upper, _draw(whole, whole.available))
    answer = predict_decode(vae, arch, height, width, gpu, used=used)
    text, nbytes = answer.to_text(), answer.peak_reserved - answer.reserved + answer.upper
    phases: list[Any] = [phase._replace(name="VAE decode") for phase in answer.result.phases]
    if model is not None:
        factor = latent_factor(arch) * (2 if _is_packed(arch) else 1)
        frames = [1] if vae.latent_dim == 3 else []
        # The prompt and the negative prompt in one call.
        shape = [2 * batch, model.model.latent_format.latent_channels, *frames, height // factor, width // factor]
        sampler = _estimate_sampler(model, shape, manager, answer.available)
        phases.insert(0, sampler)
        text, nbytes = f"{text}\n\n{sampler.text}", max(nbytes, sampler.weights + sampler.activations)
    return CardEstimate(text, nbytes, _draw(SimpleNamespace(phases=phases), answer.available))


def _workflow_of(vae: Any, arch: Arch, model: Any) -> dict[str, Any]:
    """Return arguments of `predict_pipeline` for the workflow that has both models in these types, or nothing."""
    held = model.model.diffusion_model.state_dict()
    shapes = {f"diffusion_model.{name}": tuple(one.shape) for name, one in held.items()}
    decoder = tuple(_core.Trace.parameters(dict(arch), "diffusers"))
    card = describe_card(vae.device)
    sm = find_gpu(card["gpu"], card["memory"]).sm if card else 0
    # Models of several workflows are taken for the one that is given no image.
    for name, kind in sorted(WORKFLOWS.items(), key=lambda item: item[1].encodes):
        recorded, known_vae = load_program(kind.parts[kind.denoiser]), kind.parts["vae"]
        known = {one.name: one.shape for one in recorded.weights if one.name.startswith("diffusion_model.")}
        if shapes != known or not is_vae(known_vae) or decoder != weights_of(known_vae):
            continue
        types = _name_type(model.model.get_dtype()), _name_type(vae.vae_dtype)
        is_cast = model.model.manual_cast_dtype is not None
        # On the CPU ComfyUI has other types than on a card.
        if not card or (types == (recorded.dtypes[0], vae_dtype(known_vae, sm)) and not is_cast):
            return {"pipeline": name}
    return {}


def _estimate_sampler(model: Any, shape: list[int], manager: Any, available: int) -> Any:
    """Return a phase for `plot.pipeline`, and in words how much of the model ComfyUI loads."""
    weights, called = int(model.model_size()), int(model.memory_required(shape))
    kept = int(max(manager.minimum_inference_memory(), called + manager.extra_reserved_memory()))
    room = max(available - kept, 0)
    rest = "" if weights <= room else f"; ComfyUI sends the other {in_gb(weights - room)} for each step"
    text = (
        f"Sampler: {in_gb(min(weights, room))} of the model's {in_gb(weights)} fit next to the {in_gb(kept)} that "
        f"ComfyUI keeps free for a call, by its own estimate{rest}."
    )
    empty = dict.fromkeys(("workspace", "cached", "outside"), 0)
    return SimpleNamespace(name="sampler", weights=weights, activations=kept, text=text, **empty)


def _draw(run: Any, available: int) -> torch.Tensor:
    """Draw the phases of a run and the card's memory."""
    from vaemem import plot

    file = io.BytesIO()
    plot.pipeline(run, available).savefig(file, format="png", dpi=150, bbox_inches="tight")
    pixels = np.asarray(need("PIL.Image", "the picture").open(file).convert("RGB"), np.float32)
    return torch.from_numpy(pixels / 255)[None]
