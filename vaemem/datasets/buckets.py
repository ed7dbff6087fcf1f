"""Bring images to the sizes of buckets: scale and crop, or scale and pad.

Sizes are (width, height) here, as in Pillow and in the trainers' sources.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vaemem._common import need
from vaemem._errors import ArgumentError

Sides = tuple[int, int]
MOST_SCALED = 1 << 27  # of a scaled image before its crop: 384 MiB


class Placed(NamedTuple):
    """How an image comes into its bucket. The image is scaled from `size` to `scaled`, loses the left and top pixels of
    `crop`, and is cut or padded to the size of the bucket."""

    size: Sides
    scaled: Sides
    crop: Sides
    bucket: Sides

    @property
    def inner(self) -> Sides:
        """Height and width of the picture in its bucket, without padding."""
        (width, height), (most_wide, most_high) = self.scaled, self.bucket
        return min(height, most_high), min(width, most_wide)


@functools.cache
def bucket_sizes(side: int, step: int, least: int, most: int) -> tuple[Sides, ...]:
    """List sizes of at most ``side * side`` pixels, as kohya's ``make_bucket_resolutions`` does. Sides are multiples of
    `step`, from `least` to `most`."""
    square = side // step * step
    found = {(square, square)}
    for width in range(least, most + 1, step):
        height = min(most, side * side // width // step * step)
        if height >= least:
            found |= {(width, height), (height, width)}
    return tuple(sorted(found))


def nearest(size: Sides, among: Sequence[Sides]) -> Sides:
    """Return the first of the sizes with the nearest aspect."""
    aspect = size[0] / size[1]
    return size if size in among else min(among, key=lambda one: abs(one[0] / one[1] - aspect))


def own_bucket(size: Sides, step: int, pad: bool) -> Sides:
    """Round an image's size to multiples of `step`: up if it is padded, down if it is cut."""
    width, height = (-(-n // step) * step if pad else n // step * step for n in size)
    if not (width and height):
        raise ArgumentError("image", f"at least {step}x{step} pixels", f"{size[0]}x{size[1]}")
    return width, height


def aspect_bucket(size: Sides, side: int, step: int, sides: Sides | None = None) -> Sides:
    """Return the bucket with the nearest aspect. sides: limits of its sides, by default half of `side` and twice it."""
    least, most = sides or (max(step, -(-side // 2 // step) * step), 2 * side // step * step)
    return nearest(size, bucket_sizes(side, step, least, most))


def covering(size: Sides, bucket: Sides) -> Sides:
    """Return the size of an image that is scaled until it covers a bucket."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    return int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)


def contained(size: Sides, bucket: Sides) -> Sides:
    """Return the size of an image that is scaled until it touches a bucket from inside."""
    scale = min(bucket[0] / size[0], bucket[1] / size[1])
    width, height = (max(1, min(most, int(n * scale + 0.5))) for n, most in zip(size, bucket, strict=True))
    return width, height


def place(size: Sides, scaled: Sides, bucket: Sides) -> Placed:
    """Place a scaled image in a bucket: cut it to its middle. A smaller image stays at the left top."""
    left, top = (max(0, n - most) // 2 for n, most in zip(scaled, bucket, strict=True))
    return Placed(size, scaled, (left, top), bucket)


def fit_picture(picture: np.ndarray, to: Placed, pad: str | None, smaller: str, larger: str) -> np.ndarray:
    """Scale uint8 (H, W, 3) and cut or pad it. pad: as in NumPy. smaller, larger: Pillow's filters to scale with.
    ArgumentError for an image so thin that it covers its bucket only with more than MOST_SCALED."""
    if to.scaled != to.size:
        if math.prod(to.scaled) > MOST_SCALED:
            wanted, got = f"at most {MOST_SCALED} pixels after scaling", f"{to.scaled[0]}x{to.scaled[1]}"
            raise ArgumentError("image", wanted, got)
        pillow = need("PIL.Image", "scaling images")
        kind = smaller if to.scaled[0] <= to.size[0] and to.scaled[1] <= to.size[1] else larger
        picture = np.asarray(pillow.fromarray(picture).resize(to.scaled, pillow.Resampling[kind]))
    (left, top), (width, height) = to.crop, to.bucket
    picture = picture[top : top + height, left : left + width]
    if pad and picture.shape[:2] != (height, width):
        more = [(0, height - picture.shape[0]), (0, width - picture.shape[1]), (0, 0)]
        picture = np.pad(picture, more, mode=pad)  # type: ignore[call-overload]
    return np.ascontiguousarray(picture)
