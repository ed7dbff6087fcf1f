"""The work of a VAE in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vaemem._common import DTYPES, MOST_BATCH, MOST_SIDE, TILED_OPS, choose, real, whole
from vaemem._errors import ArgumentError
from vaemem._types import DtypeName, TiledOp

OVERLAP, TINY_OVERLAP = 0.25, 0.125  # diffusers' tile_overlap_factor, the part of its side that a tile shares
MOST = {"height": MOST_SIDE, "width": MOST_SIDE, "tile": MOST_SIDE, "batch": MOST_BATCH, "frames": MOST_SIDE}


@dataclass(frozen=True)
class Job:
    """The work of a VAE: the model, the operation, the size, the types and the tiles. ValueError names an impossible
    argument."""

    arch: Mapping[str, Any]
    op: TiledOp
    height: int
    width: int
    dtype: DtypeName
    weights_dtype: DtypeName
    batch: int = 1
    tile: int | None = None
    tile_overlap: float = OVERLAP
    slicing: bool = False
    frames: int = 1  # of a video
    upcast: bool = False  # by upcast_vae before diffusers 0.36: a decode's first blocks stay in the weights' type

    def __post_init__(self) -> None:
        for name, known in (("op", TILED_OPS), ("dtype", DTYPES), ("weights_dtype", DTYPES)):
            choose(name, getattr(self, name), known)
        if self.tile is not None and not self.is_tiled:
            raise ArgumentError("tile", f"None with {self.op}", repr(self.tile))
        if not 0 <= real(self.tile_overlap) < 1:
            raise ArgumentError("tile_overlap", "a number from 0 to less than 1", repr(self.tile_overlap))
        object.__setattr__(self, "tile_overlap", real(self.tile_overlap))
        for name, most in MOST.items():
            if name != "tile" or self.is_tiled:
                object.__setattr__(self, name, whole(name, getattr(self, name), most=most))

    @property
    def is_tiled(self) -> bool:
        return self.op.endswith("_tiled")
