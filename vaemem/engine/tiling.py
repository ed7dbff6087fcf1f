"""Tiles as diffusers cuts and blends them. They are not exact, and here because people compare with them."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from operator import add
from typing import Any

import numpy as np

from vaemem._common import choose
from vaemem.engine.arguments import Progress, as_int, polling
from vaemem.engine.run import Run, make_run

__all__ = ["Tiling", "cut", "refuse"]

LOGVAR = -30, 20  # to which diffusers' DiagonalGaussianDistribution clamps log-variances, and kernels.h a whole run's


@dataclass(frozen=True)
class Tiling:
    """Overlapping tiles, each run alone and blended with its neighbours: diffusers' `tiled_decode` and `tiled_encode`.

    The result is not that of the whole image: GroupNorm and attention see one tile at a time, which leaves seams and
    shifts of colour. Tiles are offered because people compare with them.

    Attributes
    ----------
    sample_size : int, optional
        Side of a tile in pixels, a multiple of 8. None: the config's, `VAE.sample_size`.
    overlap : float
        The part of its side that a tile shares with the next: from 0 to less than 1, in whole latents.
    blend : {"linear", "cosine"}
        The share of the newer tile in pixel i of n shared ones: t = i / n, as diffusers has it, or
        (1 - cos(pi t)) / 2, which begins and ends level.
    """

    sample_size: int | None = None
    overlap: float = 0.25
    blend: str = "linear"

    def __post_init__(self) -> None:
        if self.sample_size is not None and as_int("sample_size", self.sample_size) < 1:
            raise ValueError(f"sample_size: want a positive number of pixels, or None, got {self.sample_size}")
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, Real):
            raise TypeError(f"overlap: want a number from 0 to less than 1, got {self.overlap!r}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap: want a number from 0 to less than 1, got {self.overlap}")
        choose("blend", self.blend, ("linear", "cosine"))

    def ramp(self, n: int) -> np.ndarray:
        """The shares of the older and of the newer tile in n pixels, (2, n)."""
        t = np.arange(n) / n
        if self.blend == "cosine":
            t = (1 - np.cos(np.pi * t)) / 2
        return np.array([1 - t, t], np.float32)


def refuse(tiling: Tiling | None, name: str) -> None:
    """For arrays in a GPU's memory."""
    if tiling is not None:
        raise ValueError(f"tiling: want {name} in host memory, got it in a GPU's: copy it, or leave tiling out")


def cut(
    vae: Any, tiling: Tiling, op: str, height: int, width: int, batch: int, pixels: str, limit: int
) -> _Tiles | None:
    """The tiles of an image. None where an ordinary run is to be done: where it fits into one tile, and for sizes that
    are none, which that refuses."""
    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: want a vaemem.Tiling or None, got {type(tiling).__name__}")
    if limit:
        raise ValueError("memory_limit: want no limit with tiling (a limit is exact and tiles are not), got both")
    size, factor = tiling.sample_size or vae.sample_size, vae._factor
    if size is None:
        raise ValueError("sample_size: want one, such as Tiling(sample_size=512): no config tells it")
    if (size := as_int("sample_size", size)) < 1 or size % factor:
        raise ValueError(f"sample_size: want a positive multiple of {factor}, got {size}")
    side = size // factor
    shared = round(side * tiling.overlap)
    if abs(side * tiling.overlap - shared) > 1e-9 * side or shared == side:
        raise ValueError(
            f"overlap: want whole latents, a multiple of 1/{side} for sample_size {size}, got {tiling.overlap}"
        )
    if max(height, width) <= size or min(height, width, batch) < 1 or height % factor or width % factor:
        return None
    return _Tiles(vae, tiling, op, batch, pixels, side, shared, height // factor, width // factor)


@dataclass
class _Tiles:
    """Those of one call. Lengths are in latents: `side` a tile's, `shared` what it has in common with the next one,
    `height` and `width` the image's."""

    vae: Any
    tiling: Tiling
    op: str
    batch: int
    pixels: str  # the image's: float or uint8
    side: int
    shared: int
    height: int
    width: int

    def __post_init__(self) -> None:
        step, factor, arch = self.side - self.shared, self.vae._factor, self.vae.arch
        self.rows, self.cols = range(0, self.height, step), range(0, self.width, step)
        self.count = len(self.rows) * len(self.cols)
        decodes, as_bytes = self.op == "decode", self.pixels == "uint8"
        self.bytes_in, self.bytes_out = as_bytes and not decodes, as_bytes and decodes
        # numbers a side of a latent, and channels: of what goes in, of what comes out
        self.ends = [(1, arch["latent_channels"]), (factor, arch["out_channels"])]
        if not decodes:
            self.ends = [(factor, arch["in_channels"]), (1, 2 * arch["latent_channels"])]

    def sizes(self, starts: range, length: int) -> Counter[int]:
        """How many tiles have each size along a side, the largest first: the last ones end where the image does."""
        whole = max(0, (length - self.side) // starts.step + 1)
        sizes = Counter({self.side: whole} if whole else {})
        sizes.update(length - at for at in starts[whole:])
        return sizes

    def buffers(self) -> list[tuple[tuple[int, ...], type]]:
        """Shape and type of what is held while tiles run: the result, a tile going in, one coming out, and what the
        next ones blend with: the lower borders of a row of tiles and the right border of one, turned to lie alike."""
        (a, channels_in), (b, channels) = self.ends
        n, height, width, border = self.batch, self.height * b, self.width * b, self.shared * b
        h, w = min(self.side, self.height), min(self.side, self.width)
        return [
            ((n, height, width, channels), np.uint8) if self.bytes_out else ((n, channels, height, width), np.float32),
            ((n * channels_in * h * w * a * a,), np.uint8 if self.bytes_in else np.float32),
            ((n * channels * h * w * b * b,), np.float32),
            ((n, channels, border if len(self.rows) > 1 else 0, len(self.cols) * w * b), np.float32),
            ((n, channels, border if len(self.cols) > 1 else 0, h * b), np.float32),
        ]

    def estimate(self) -> Run:
        """What `run` will report."""
        tiles, factor = None, self.vae._factor
        sizes = self.sizes(self.rows, self.height).items(), self.sizes(self.cols, self.width).items()
        for (h, down), (w, across) in product(*sizes):
            size = h * factor, w * factor, self.batch
            plan = self.vae._plan(self.op, *size, "uint8" if self.bytes_in else "float", True)
            tile = make_run(self.op, *size, self.vae._core.plan(**plan, own_output=False), None)
            tiles = _joined(tiles, tile, down * across)
        assert tiles is not None
        held = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.buffers()]
        if sum(held) > sys.maxsize:
            raise OverflowError(f"height, width: want an image whose bytes can be addressed, got {sum(held)} of them")
        return self.report(tiles, held, None)

    def report(self, tiles: Run, held: list[int], seconds: float | None) -> Run:
        """The run of all tiles, from theirs joined and the bytes of the buffers. Beside a GPU these are in the host's
        memory and not counted, as an ordinary run's arrays are not."""
        output, *scratch = [0] if self.vae._device else held
        beside, factor = output + sum(scratch), self.vae._factor
        return replace(
            tiles,
            height=self.height * factor,
            width=self.width * factor,
            scratch_bytes=tiles.scratch_bytes + sum(scratch),
            output_bytes=tiles.output_bytes + output,
            reserved_bytes=tiles.reserved_bytes + beside,
            timeline=tuple((name, live + beside) for name, live in tiles.timeline),
            seconds=seconds,
            notes=(f"{self.count} tiles of {self.side * factor}x{self.side * factor}", *tiles.notes),
        )

    def run(self, data: np.ndarray, scaled: bool, progress: Progress, out: np.ndarray | None) -> np.ndarray:
        """Each tile is run, blended with the one above, then with the one to the left, and written."""
        start, vae, tiles, count, seen = time.perf_counter(), self.vae, None, 0, 0
        alone = object.__new__(type(vae))  # with the settings of now, whoever changes them meanwhile
        vars(alone).update(vars(vae))
        (shape, dtype), *others = self.buffers()
        result = np.empty(shape, dtype) if out is None else out
        held: list[np.ndarray] = [np.empty(*other) for other in others]
        given, made, lower, right = held
        (a, _), (b, channels), step = *self.ends, self.rows.step
        unit, pixels = self.batch * vae._factor, "uint8" if self.bytes_in else "float"
        done, total = 0, unit * len(self.cols) * sum(min(self.side, self.height - y) for y in self.rows)
        shares = functools.cache(lambda n: self.tiling.ramp(n)[:, :, None])
        into = result.transpose(0, 3, 1, 2) if self.bytes_out else result

        def show(rows: int, of: int) -> None:
            nonlocal seen
            seen = max(seen, done + unit * h * rows // of)  # where float16 overflows a tile begins again
            poll(seen, total)  # type: ignore[misc]

        with polling(progress, self.op, says=lambda: f"{self.op}, tile {count} of {self.count}") as poll:
            for y, x in product(self.rows, self.cols):
                h, w, count = min(self.side, self.height - y), min(self.side, self.width - x), count + 1
                ys, xs = slice(y * a, (y + h) * a), slice(x * a, (x + w) * a)
                piece = data[:, ys, xs] if self.bytes_in else data[:, :, ys, xs]
                source = given[: piece.size].reshape(piece.shape)
                source[...] = piece
                tile = made[: self.batch * channels * h * w * b * b].reshape(self.batch, channels, h * b, w * b)
                size = h * vae._factor, w * vae._factor
                alone._run(self.op, source, *size, pixels, scaled, poll and show, tile, 0, unclamped=True)
                tiles, done = _joined(tiles, alone.last_run), done + unit * h
                column = self.cols.index(x) * min(self.side, self.width) * b
                down = lower[..., column : column + w * b], tile, y, self.height
                across = right[..., : h * b], tile.mT, x, self.width
                for border, new, at, length in (down, across):
                    n = min(self.shared, length - at) * b if at else 0
                    border[:, :, :n] *= shares(n)[0]
                    new[:, :, :n] *= shares(n)[1]
                    new[:, :, :n] += border[:, :, :n]
                for border, new, at, length in (down, across):
                    n = max(0, min(self.shared, length - at - step)) * b
                    border[:, :, :n] = new[:, :, step * b : step * b + n]
                kept = tile[:, :, : step * b, : step * b]
                if self.op == "encode":
                    logvar = kept[:, channels // 2 :]
                    np.clip(logvar, *LOGVAR, out=logvar)
                if self.bytes_out:  # as the core rounds: NaN is 0
                    kept += 1
                    kept *= 127.5
                    np.rint(np.clip(np.fmax(kept, 0, out=kept), 0, 255, out=kept), out=kept)
                into[:, :, y * b : (y + step) * b, x * b : (x + step) * b] = kept
        assert tiles is not None
        vae._scale = alone._scale
        bytes_held = [0 if out is not None else result.nbytes, *(array.nbytes for array in held)]
        vae.last_run = self.report(tiles, bytes_held, time.perf_counter() - start)
        return result


def _joined(tiles: Run | None, tile: Run, times: int = 1) -> Run:
    """The run of the largest, with the work of all."""
    flops = [f * times for f in tile.flops]
    if tiles is None:
        return replace(tile, flops=tuple(flops))
    return replace(
        tile if tile.peak_bytes > tiles.peak_bytes else tiles,
        reserved_bytes=max(tiles.reserved_bytes, tile.reserved_bytes),
        flops=tuple(map(add, tiles.flops, flops)),
        pass_seconds=tuple(map(add, tiles.pass_seconds, tile.pass_seconds)),
        notes=tuple(dict.fromkeys(tiles.notes + tile.notes)),
    )
