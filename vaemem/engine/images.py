"""Convert images: Pillow images and files to arrays, arrays to Pillow, and any size by padding and cropping."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from typing import Any

from vaemem._common import choose, distinct, need, reading
from vaemem._errors import ArgumentError, ArgumentTypeError, FileError
from vaemem._numpy import np
from vaemem.engine.arguments import as_int, check_mask

Notes = tuple[str, ...]

PADS = ("reflect", "edge")  # NumPy's names
ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
BYTES = ("RGB", "RGBX", "L", "1", "P", "CMYK", "YCbCr", "LAB", "HSV", *ALPHA)  # Pillow's modes of 8 bits a channel


def read_images(x: Any) -> tuple[Any, Notes]:
    """Return images as uint8 (N, H, W, 3), and notes of what was lost.

    x: a Pillow image, an image file, the bytes of one, or a sequence of them. A sequence of arrays becomes one array;
    anything else is returned as it is. ValueError for images of different sizes in a sequence, or for masked values.
    """
    check_mask("x", x)
    if not x if isinstance(x, (list, tuple)) else not is_image(x):
        return x, ()
    items, notes = list(x) if isinstance(x, (list, tuple)) else [x], list[str]()
    if any(is_image(item) for item in items):
        items = [read_image(item, notes) for item in items]
    sizes = distinct(np.shape(item) for item in items)
    if len(sizes) > 1:
        one, other = (f"{s[0]}x{s[1]}" if s[2:] == (3,) else str(s) for s in sizes[:2])
        raise ArgumentError("x", "images of one size in a batch", f"{one} and {other}", "encode them one by one")
    return np.stack(items), tuple(distinct(notes))


def is_image(item: Any) -> bool:
    """Return whether `read_image` takes it: a Pillow image, a path, or the bytes of a file."""
    pillow = sys.modules.get("PIL.Image")
    return isinstance(item, (str, bytes, os.PathLike)) or (pillow is not None and isinstance(item, pillow.Image))


def read_image(item: Any, notes: list[str], turn: bool = True) -> np.ndarray:
    """Return an image as uint8 (H, W, 3), and add notes of what was lost. turn: rotate a file as its EXIF data says."""
    if isinstance(item, (str, bytes, os.PathLike)):
        pillow, ops = need("PIL.Image", "reading an image file"), need("PIL.ImageOps", "reading an image file")
        path, source = ("", io.BytesIO(item)) if isinstance(item, bytes) else (item, item)
        try:
            with reading("x", "an image file", path), pillow.open(source) as file:
                is_deep = _note_losses(file, notes)
                item = ops.exif_transpose(file) if turn else file
                item.load()
        except FileError as error:
            if not path and isinstance(error.__cause__, pillow.UnidentifiedImageError):  # its text has an address
                raise ArgumentError("x", "an image file", "bytes of another kind") from None
            raise
    elif is_image(item):
        is_deep = _note_losses(item, notes)
    else:
        raise ArgumentTypeError("x", "images and files of them, or arrays", f"{type(item).__name__} among images")
    if item.mode in ALPHA or "transparency" in item.info:
        notes.append("the image's alpha was dropped")
    if item.mode in BYTES:
        return np.asarray(item.convert("RGB"))
    if not is_deep:
        wanted, advice = "an image of 8 or 16 bits a channel", "make it an array in [-1, 1]"
        raise ArgumentError("x", wanted, f"mode {item.mode}", advice)
    grey = (np.asarray(item).astype(np.uint32) + 128) // 257  # the nearest of 255
    return np.stack([grey.astype(np.uint8)] * 3, axis=-1)


def _note_losses(image: Any, notes: list[str]) -> bool:
    """Return whether an image has 16 bits a channel, and add notes of what will be lost. Call it before the pixels are
    read: Pillow itself reduces colours to 8 bits."""
    if (frames := getattr(image, "n_frames", 1)) > 1:
        notes.append(f"used only frame {image.tell() + 1} of the image's {frames}")
    stored = " ".join(str(tile[3]) for tile in getattr(image, "tile", ()))  # the decoder's raw mode
    if is_deep := image.mode.startswith("I;16") or ";16" in stored:
        notes.append("the image's 16 bits a channel were reduced to 8")
    return is_deep


def check_range(x: np.ndarray) -> None:
    """Raise ValueError if a float array holds values of bytes or of 16-bit numbers: all would count as white."""
    if x.dtype == np.uint8 or not x.size or not x.min() >= 0 or not (most := x.max()) > 2:
        return
    top = 255 if most <= 255 else 65535
    wanted, got = "numbers from -1 to 1, or bytes (uint8, N, H, W, 3)", f"numbers from {x.min():g} to {most:g}"
    raise ArgumentError("x", wanted, got, f"if white is {top}, x / {top / 2} - 1")


def pad(x: Any, how: str | None, factor: int) -> tuple[Any, Notes]:
    """Pad images, and videos, (N, C, ..., H, W) or uint8 (N, ..., H, W, C), below and right to multiples of `factor`.

    how: "reflect", "edge" or None. Images that fit, and anything without an image's shape, are returned unchanged.
    """
    if how is None:
        return x, ()
    choose("pad", how, PADS)
    array = np.asarray(x)
    if array.ndim not in (4, 5) or 0 in array.shape:
        return x, ()
    height, width = image_size(array)
    more = -height % factor, -width % factor
    if not any(more):
        return x, ()
    sides = [(0, n) for n in more]
    widths = [*sides, (0, 0)] if array.dtype == np.uint8 else sides
    widths = [(0, 0)] * (array.ndim - len(widths)) + widths
    done = f"padded from {height}x{width} to {height + more[0]}x{width + more[1]} ({how})"
    return np.pad(array, widths, mode=how), (done,)  # type: ignore[call-overload]


def whole_frames(x: Any, each: int) -> tuple[Any, Notes]:
    """Return a video (N, C, F, H, W) or uint8 (N, F, H, W, C) without the last frames that fill no latent frame: F
    becomes 1 more than a multiple of `each`. diffusers drops them for Wan too. Anything else is returned unchanged."""
    shape = np.shape(x)
    if len(shape) != 5:
        return x, ()
    x = x if hasattr(x, "dtype") else np.asarray(x)
    axis = 1 if str(x.dtype).endswith("uint8") else 2  # also PyTorch's type
    if shape[4 if axis == 1 else 1] > 4:  # no channels: the run refuses the shape as it is
        return x, ()
    if shape[axis] < 1 or not (dropped := (shape[axis] - 1) % each):
        return x, ()
    kept = shape[axis] - dropped
    index = (slice(None),) * axis + (slice(kept),)
    return x[index], (f"used the first {kept} of {shape[axis]} frames: the others fill no latent frame",)


def image_size(array: Any) -> tuple[int, int]:
    """Return (height, width) of images in an array, or in anything that NumPy makes an array of."""
    array = np.asarray(array)
    return tuple(array.shape[-3:-1] if array.dtype == np.uint8 else array.shape[-2:])


def crop(size: Any, request: Mapping[str, Any]) -> tuple[tuple[Any, ...], Notes]:
    """Return the index that takes the top left `size`, (height, width), out of a decode's images, and a note. Both are
    empty if nothing is cut off. request: arguments of the core's plan. Raise TypeError or ValueError for a bad size."""
    if size is None:
        return (), ()
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise ArgumentTypeError("size", "(height, width) or None", repr(size))
    whole = request["height"], request["width"]
    height, width = (as_int("size", side) for side in size)
    if not (0 < height <= whole[0] and 0 < width <= whole[1]):
        raise ArgumentError("size", f"1x1 to {whole[0]}x{whole[1]}, what these latents give", f"{height}x{width}")
    if (height, width) == whole:
        return (), ()
    last = (slice(None),) if request["pixels"] == "uint8" else ()
    return (..., slice(height), slice(width), *last), (f"cropped from {whole[0]}x{whole[1]} to {height}x{width}",)


def to_pillow(pictures: np.ndarray) -> list[Any]:
    """Return Pillow images of uint8 (N, H, W, 3), or a list of images for each video (N, F, H, W, 3)."""
    pillow = need("PIL.Image", "output_type='pil'")
    if pictures.ndim == 5:
        return [to_pillow(video) for video in pictures]
    return [pillow.fromarray(np.ascontiguousarray(picture)) for picture in pictures]
