"""The caches that trainers read: names of files, keys, types, scaling, and how a trainer brings images to size.

Sources, in 2026: kohya-ss/sd-scripts 48d368fa (library/strategy_*.py, train_util.py, model_util.py, utils.py);
kohya-ss/musubi-tuner 30c658c4 (src/musubi_tuner/dataset, *_cache_latents.py); ostris/ai-toolkit 27a03a91
(toolkit/dataloader_mixins.py, buckets.py, data_loader.py, models/base_model.py); bghira/SimpleTuner bc8e6ab7
(simpletuner/helpers/caching/vae.py, multiaspect/image.py, image_manipulation/training_sample.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vaemem._common import choose, distinct, need, saved
from vaemem._errors import ArgumentError
from vaemem.datasets.buckets import Placed, Sides, bucket_sizes, covering, nearest
from vaemem.engine.file_tensors import FILE_NAMES, FLOATS, safetensors_start

Latents = Sequence[np.ndarray]  # (C, h, w); with a mirrored image's


@dataclass(frozen=True)
class Cache:
    """How a trainer keeps the latents of one architecture.

    models: names of its VAE. sample: "mean", or the usual seed. step: the usual one. bucket: from an image's size, the
    side, the step and the limits of sides, the size to which it is scaled, and its bucket. filters: Pillow's, for
    smaller and for larger images. turns: as EXIF data say. files: path and bytes of each file of an image. flips:
    whether mirrored latents have a place. folders: whether images in two folders may have one stem. limits: whether the
    user sets the limits of sides.
    """

    trainer: str
    name: str
    models: tuple[str, ...]
    scaled: bool
    sample: int | str
    step: int
    bucket: Callable[[Sides, int, int, Sides | None], tuple[Sides, Sides]]
    filters: tuple[str, str]
    turns: bool
    files: Callable[[Cache, str, Placed, Latents], dict[str, bytes]]
    flips: bool = False
    folders: bool = True
    limits: bool = False
    about: Any = None


def find_cache(text: str, model: str) -> Cache:
    """Return the cache of a trainer, ``"musubi"``, or of one of its architectures, ``"musubi:zi"``. model: of the VAE,
    which decides if it can."""
    trainer, _, name = text.partition(":")
    choose("trainer", trainer, distinct(cache.trainer for cache in CACHES))
    own = {cache.name: cache for cache in CACHES if cache.trainer == trainer}
    if name:
        choose("trainer", name, own)
        return own[name]
    fitting = [cache for cache in own.values() if model in cache.models]
    if len(fitting) != 1:
        among = " or ".join(f"{trainer}:{one.name}" for one in fitting or own.values())
        raise ArgumentError("trainer", among, repr(text), f"the VAE is {model}")
    return fitting[0]


def stem_of(name: str) -> str:
    """Return a name without its suffix."""
    return posixpath.splitext(name)[0]


def _safetensors(tensors: dict[str, np.ndarray], about: dict[str, str]) -> bytes:
    kinds = {name: FILE_NAMES[array.dtype.name] for name, array in tensors.items()}
    entries = ((name, kinds[name], array.shape) for name, array in tensors.items())
    parts = (np.ascontiguousarray(array).view(FLOATS[kinds[name]][0]).tobytes() for name, array in tensors.items())
    return b"".join([safetensors_start(entries, about), *parts])


# ---- kohya: a file next to the image ----


def _kohya_bucket(size: Sides, side: int, step: int, sides: Sides | None) -> tuple[Sides, Sides]:
    least, most = sides or (max(256 // step, 1) * step, -(-max(1024, side) // step) * step)
    bucket = nearest(size, bucket_sizes(side, step, least, most))
    return covering(size, bucket), bucket


def _kohya_crop(size: Sides, bucket: Sides) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of the image inside its bucket, if it were scaled to fit."""
    aspect = size[0] / size[1]
    is_wider = bucket[0] / bucket[1] > aspect
    width, height = (bucket[1] * aspect, bucket[1]) if is_wider else (bucket[0], bucket[0] / aspect)
    left, top = (bucket[0] - width) // 2, (bucket[1] - height) // 2
    return left, top, left + width, top + height


def _kohya_files(cache: Cache, name: str, placed: Placed, latents: Latents) -> dict[str, bytes]:
    height, width = latents[0].shape[-2:]
    end = f"_{height}x{width}" if cache.about else ""
    arrays = {f"latents{end}": latents[0].astype(np.float32), f"original_size{end}": np.array(placed.size)}
    arrays[f"crop_ltrb{end}"] = np.array(_kohya_crop(placed.size, placed.bucket))
    if latents[1:]:
        arrays[f"latents_flipped{end}"] = latents[1].astype(np.float32)
    path = f"{stem_of(name)}_{placed.size[0]:04d}x{placed.size[1]:04d}_{cache.name}.npz"
    return {path: saved(np.savez, **arrays)}


def _kohya(name: str, models: str, scaled: bool, sample: int | str = 0, sized: bool = True) -> Cache:
    how: Any = dict(bucket=_kohya_bucket, filters=("BOX", "LANCZOS"), turns=False, files=_kohya_files)
    return Cache("kohya", name, tuple(models.split()), scaled, sample, 64, **how, flips=True, limits=True, about=sized)


# ---- musubi-tuner: a flat folder ----


def _musubi_bucket(size: Sides, side: int, step: int, sides: Sides | None) -> tuple[Sides, Sides]:
    widths = range(max(side // 2 // step, 1) * step, side + step, step)
    found = {(width, side * side // width // step * step) for width in widths}
    bucket = nearest(size, sorted(found | {(height, width) for width, height in found}))
    return covering(size, bucket), bucket


def _musubi_files(cache: Cache, name: str, placed: Placed, latents: Latents) -> dict[str, bytes]:
    architecture, frames, has_frames_axis = cache.about
    (latent,), (width, height) = latents, placed.size
    key = f"latents_{frames}{latent.shape[1]}x{latent.shape[2]}_{latent.dtype.name}"
    about = {"architecture": architecture, "width": str(width), "height": str(height), "format_version": "1.0.1"}
    path = f"{posixpath.basename(stem_of(name))}_{width:04d}x{height:04d}_{cache.name}.safetensors"
    return {path: _safetensors({key: latent[:, None] if has_frames_axis else latent}, about)}


def _musubi(name: str, models: str, scaled: bool, architecture: str, frames: str = "1x", axis: bool = False) -> Cache:
    how: Any = dict(bucket=_musubi_bucket, filters=("BOX", "LANCZOS"), turns=False, files=_musubi_files)
    about = architecture, frames, axis
    return Cache("musubi", name, tuple(models.split()), scaled, "mean", 16, **how, folders=False, about=about)


# ---- ai-toolkit: a folder next to the images ----


def _toolkit_bucket(size: Sides, side: int, step: int, sides: Sides | None) -> tuple[Sides, Sides]:
    area, most = size[0] * size[1], side * side
    target = min(area, most)
    width, height = (n * (target / area) ** 0.5 / step for n in size)
    rounded = ((a(width) * step, b(height) * step) for a in (math.floor, math.ceil) for b in (math.floor, math.ceil))
    fitting = [one for one in rounded if min(one) > 0 and one[0] * one[1] <= most]
    least = (max(1, math.floor(width)) * step, max(1, math.floor(height)) * step)
    bucket = min(fitting or [least], key=lambda one: abs(one[0] * one[1] - target))
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    return (math.ceil(size[0] * scale), math.ceil(size[1] * scale)), bucket


def _toolkit_files(cache: Cache, name: str, placed: Placed, latents: Latents) -> dict[str, bytes]:
    folder, file = posixpath.split(name)
    info = {"filename": file, "scale_to_width": placed.scaled[0], "scale_to_height": placed.scaled[1]}
    info |= {"crop_x": placed.crop[0], "crop_y": placed.crop[1]}
    info |= {"crop_width": placed.bucket[0], "crop_height": placed.bucket[1]}
    info |= {"latent_space_version": cache.name, "latent_version": 1}
    digest = hashlib.md5(json.dumps(info, sort_keys=True).encode(), usedforsecurity=False).digest()
    end = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    about = {key: value if isinstance(value, str) else json.dumps(value) for key, value in info.items()}
    path = posixpath.join(folder, "_latent_cache", f"{stem_of(file)}_{end}.safetensors")
    return {path: _safetensors({"latent": latents[0]}, about)}


def _toolkit(name: str, models: str) -> Cache:
    how: Any = dict(bucket=_toolkit_bucket, filters=("BICUBIC", "BICUBIC"), turns=True)
    return Cache("ai-toolkit", name, tuple(models.split()), True, 0, 64, **how, files=_toolkit_files)


# ---- SimpleTuner: a folder of its own, by hashes of names; images cropped to squares ----


def _square_bucket(size: Sides, side: int, step: int, sides: Sides | None) -> tuple[Sides, Sides]:
    if side % step:
        raise ArgumentError("buckets", f"a multiple of {step} for simpletuner", str(side))
    aspect = size[0] / size[1]
    return ((int(side * aspect), side) if aspect >= 1 else (side, int(side / aspect))), (side, side)


def _simpletuner_files(cache: Cache, name: str, placed: Placed, latents: Latents) -> dict[str, bytes]:
    torch = need("torch", "a cache for SimpleTuner")
    folder, file = posixpath.split(name)
    tensor = torch.from_numpy(latents[0].astype(np.float32)).to(getattr(torch, latents[0].dtype.name))
    path = posixpath.join(folder, hashlib.sha256(stem_of(file).encode()).hexdigest() + ".pt")
    return {path: saved(lambda f: torch.save(tensor, f))}


def _simpletuner(name: str) -> Cache:
    how: Any = dict(bucket=_square_bucket, filters=("LANCZOS", "LANCZOS"), turns=True)
    return Cache("simpletuner", name, (name,), True, 0, 64, **how, files=_simpletuner_files)


CACHES = (
    _kohya("sd", "sd15", scaled=False, sized=False),
    _kohya("sdxl", "sdxl", scaled=False, sized=False),
    _kohya("sd3", "sd3", scaled=False),
    _kohya("flux", "flux", scaled=True),
    _kohya("lumina", "flux", scaled=True),
    _kohya("anima", "qwen-image", scaled=True, sample="mean"),
    _kohya("hi", "hunyuanimage-2.1", scaled=False),
    _musubi("zi", "zimage flux", False, "z_image"),
    _musubi("qi", "qwen-image", True, "qwen_image", axis=True),
    _musubi("kr2", "qwen-image", True, "krea2", axis=True),
    _musubi("wan", "qwen-image", True, "wan", axis=True),
    _musubi("f2d", "flux2", True, "flux_2_dev", frames=""),
    _musubi("f2k4b", "flux2 flux2-small", True, "flux_2_klein_4b", frames=""),
    _musubi("f2k9b", "flux2 flux2-small", True, "flux_2_klein_9b", frames=""),
    _toolkit("sd1", "sd15"),
    _toolkit("sdxl", "sdxl"),
    _toolkit("sd3", "sd3"),
    _toolkit("flux1", "flux"),
    _toolkit("zimage", "zimage"),
    *map(_simpletuner, ("sd15", "sdxl", "sd3", "flux", "zimage")),
)
