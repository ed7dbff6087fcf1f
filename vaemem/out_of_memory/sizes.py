"""Sizes of images in pixels, the commonest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

Size = tuple[int, int]
Areas = Sequence[tuple[float, float]]  # (from, to) in pixels

# Sizes that people make, the commonest first; either side may be the longer one.
MADE_SIZES = (
    (1024, 1024), (512, 512), (768, 768), (832, 1216), (896, 1152), (768, 1344), (640, 1536), (512, 768), (2048, 2048),
    (1536, 1536), (1280, 1280), (1024, 1536), (1080, 1920), (1088, 1920), (720, 1280), (768, 1024), (640, 640),
    (576, 1024), (1152, 2048), (1664, 2432), (1792, 2304), (1536, 2688), (1152, 1152), (1440, 1440), (1792, 1792),
    (1440, 2560), (1920, 1920), (1536, 2048), (1024, 2048), (896, 896), (960, 960), (384, 384), (448, 448), (256, 256),
    (576, 576), (704, 704), (832, 832), (512, 1024), (640, 960), (1216, 1216), (1344, 1344), (1408, 1408),
    (1600, 1600), (1664, 1664), (2304, 2304), (2560, 2560), (3072, 3072), (2160, 3840), (4096, 4096),
    (1328, 1328), (928, 1664), (1104, 1472), (1056, 1584),  # Qwen-Image's
)  # fmt: skip
# Sizes of videos, the commonest first: Wan's own, and smaller ones.
VIDEO_SIZES = (
    (480, 832), (720, 1280), (704, 1280), (544, 960), (512, 512), (640, 640), (480, 480), (576, 1024), (480, 640),
    (512, 768), (768, 768), (960, 960), (320, 576), (624, 624),
)  # fmt: skip
TOLD = -5  # rank of a size that the text names: more common than any other
COMMON = 25  # of these sizes are much commoner than the others
RATIOS = (1, 5 / 4, 4 / 3, 3 / 2, 16 / 10, 16 / 9, 2, 21 / 9)
WIDEST = 2.4  # largest ratio of two sides
LARGEST_AREA = 1 << 24  # pixels: few images are larger
_NEARLY = 0.002  # of an area: tensors with padding grow a little slower
_PARTS = 64, 8  # pixels: usual sides are multiples of the first, all sides of the second


def rank_of(size: Size) -> int:
    """Rate how rare a size is: from 0 for the commonest to 4."""
    low, high = sorted(size)
    if (low, high) in MADE_SIZES:
        return int((low, high) not in MADE_SIZES[:COMMON])
    if not (low % _PARTS[0] or high % _PARTS[0]):
        return 2
    return 3 if any(abs(high - ratio * low) <= _PARTS[1] for ratio in RATIOS) else 4


def list_sizes(rank: int, areas: Areas) -> Iterator[Size]:
    """Yield sizes of a rank with an area in one of the ranges, the longer side last."""
    listed = MADE_SIZES[:COMMON], MADE_SIZES[COMMON:]
    found: Iterable[Size]
    if rank < len(listed):
        found = (one for one in listed[rank] if any(low <= one[0] * one[1] <= high for low, high in areas))
    else:
        part = _PARTS[rank > len(listed)]
        found = itertools.chain.from_iterable(_divided(part, low, high) for low, high in areas)
    return (one for one in dict.fromkeys(found) if rank_of(one) == rank)


def _divided(part: int, low: float, high: float) -> Iterator[Size]:
    """Yield pairs of multiples of `part` with a product in a range."""
    for short in range(part * max(int(math.sqrt(low / WIDEST) / part), 1), int(math.sqrt(high)) + 1, part):
        first = max(math.ceil(low / short / part) * part, short)
        for long in range(first, int(min(high / short, WIDEST * short)) + 1, part):
            yield short, long


def widen(least: float, most: float, largest: int = LARGEST_AREA) -> tuple[float, float]:
    """Return a range of areas for a tensor that grows a little slower than the area."""
    return least * (1 - _NEARLY), min(most * (1 + _NEARLY), largest)
