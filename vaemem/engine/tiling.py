"""Tiles as diffusers cuts and blends them. They are not exact, and here because people compare with them."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from numbers import Real
from operator import add
from typing import Any

import numpy as np

from vaemem._common import choose
from vaemem.engine.arguments import Poll, as_int
from vaemem.engine.arrays import HostArrays, ends_of
from vaemem.engine.model import Runner
from vaemem.engine.records import Run, make_run

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
        The share of the newer tile in pixel i of n shared ones: t = i / n, as in diffusers, or
        (1 - cos(pi t)) / 2, which begins and ends level.

    Examples
    --------
    >>> vae.decode(np.zeros((1, 4, 16, 24)), tiling=Tiling(64)).shape
    (1, 3, 128, 192)
    >>> vae.last_run.notes
    ('12 tiles of 64x64',)
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
        """The shares of the older and of the newer tile in n pixels, (2, n).

        Examples
        --------
        >>> Tiling(64).ramp(4)
        array([[1.  , 0.75, 0.5 , 0.25],
               [0.  , 0.25, 0.5 , 0.75]], dtype=float32)
        """
        t = np.arange(n) / n
        if self.blend == "cosine":
            t = (1 - np.cos(np.pi * t)) / 2
        return np.array([1 - t, t], np.float32)


def cut(
    runner: Runner, tiling: Tiling | None, sample_size: int | None, request: Mapping[str, Any], limit: int
) -> _Tiles | None:
    """The tiles of the image that arguments of the core's plan ask for; sample_size: the config's. None where an
    ordinary run is to be done: without a tiling, where the image fits into one tile, and for sizes that are none, which
    that refuses."""
    if tiling is None:
        return None
    if not request.get("host_arrays", True):
        raise ValueError("tiling: want arrays in host memory, got them in a GPU's: copy them, or leave tiling out")
    if not isinstance(tiling, Tiling):
        raise TypeError(f"tiling: want a vaemem.Tiling or None, got {type(tiling).__name__}")
    if limit:
        raise ValueError("memory_limit: want no limit with tiling (a limit is exact and tiles are not), got both")
    size, factor = tiling.sample_size or sample_size, runner.factor
    if size is None:
        raise ValueError("sample_size: want one, such as Tiling(sample_size=512): no config tells it")
    if (size := as_int("sample_size", size)) < 1 or size % factor:
        raise ValueError(f"sample_size: want a positive multiple of {factor}, got {size}")
    side = size // factor
    shared = round(side * tiling.overlap)
    if abs(side * tiling.overlap - shared) > 1e-9 * side or shared == side:
        wanted = f"overlap: want whole latents, a multiple of 1/{side} for sample_size {size}"
        raise ValueError(f"{wanted}, got {tiling.overlap}")
    height, width = request["height"], request["width"]
    if max(height, width) <= size or min(height, width, request["batch"]) < 1 or height % factor or width % factor:
        return None
    return _Tiles(runner, tiling, request, side, shared)


class _Tiles:
    """The tiles of one call. Lengths are in latent pixels: `side` is a tile's, `shared` what a tile has in common with
    the next one, `height` and `width` are the image's. request: the whole image's."""

    def __init__(self, runner: Runner, tiling: Tiling, request: Mapping[str, Any], side: int, shared: int) -> None:
        self.runner, self.tiling, self.request, self.side, self.shared = runner, tiling, request, side, shared
        self.op, self.batch, self.factor, self.step = request["op"], request["batch"], runner.factor, side - shared
        self.height, self.width = request["height"] // self.factor, request["width"] // self.factor
        self.rows, self.cols = range(0, self.height, self.step), range(0, self.width, self.step)
        self.begun, self.count = 0, len(self.rows) * len(self.cols)
        decodes, as_bytes = self.op == "decode", request["pixels"] == "uint8"
        self.bytes_in, self.bytes_out = as_bytes and not decodes, as_bytes and decodes
        self.ends = ends_of(runner.arch, self.op)

    def sizes(self, starts: range, length: int) -> Counter[int]:
        """How many tiles have each size along a side, the largest first: the last ones end where the image does."""
        whole = max(0, (length - self.side) // starts.step + 1)
        sizes = Counter({self.side: whole} if whole else {})
        sizes.update(length - at for at in starts[whole:])
        return sizes

    def buffers(self) -> list[tuple[tuple[int, ...], type]]:
        """Shapes and types of the arrays held while tiles run: the result; a tile as it goes in; a tile as it comes
        out; the lower borders of a row of tiles, with which the next row is blended; and the right border of one tile,
        with which the next is blended, transposed so that both borders are blended by the same lines."""
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
        tiles = None
        sizes = self.sizes(self.rows, self.height).items(), self.sizes(self.cols, self.width).items()
        for (h, down), (w, across) in product(*sizes):
            size = dict(height=h * self.factor, width=w * self.factor, pixels="uint8" if self.bytes_in else "float")
            request = {**self.request, **size, "own_output": False}
            tiles = _joined(tiles, make_run(request, self.runner.core.plan(**request)), down * across)
        assert tiles is not None
        held = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.buffers()]
        if sum(held) > sys.maxsize:
            raise OverflowError(f"height, width: want an image whose bytes can be addressed, got {sum(held)} of them")
        return self.report(tiles, held, None)

    def report(self, tiles: Run, held: list[int], seconds: float | None) -> Run:
        """The run of all tiles, from theirs joined and the bytes of the buffers. Beside a GPU these are in the host's
        memory and not counted, as an ordinary run's arrays are not."""
        output, *scratch = [0] if self.runner.device else held
        beside = output + sum(scratch)
        return replace(
            tiles,
            height=self.height * self.factor,
            width=self.width * self.factor,
            scratch_bytes=tiles.scratch_bytes + sum(scratch),
            output_bytes=tiles.output_bytes + output,
            reserved_bytes=tiles.reserved_bytes + beside,
            timeline=tuple((name, live + beside) for name, live in tiles.timeline),
            seconds=seconds,
            notes=(f"{self.count} tiles of {self.side * self.factor}x{self.side * self.factor}", *tiles.notes),
        )

    def says(self) -> str:
        return f"{self.op}, tile {self.begun} of {self.count}"

    def run(self, arrays: Any, poll: Poll, *settings: Any, **how: Any) -> tuple[np.ndarray, Run]:
        """Each tile is run, blended with the one above, then with the one to the left, and written. arrays: in host
        memory; settings, how: as `Runner.run` takes them."""
        start, tiles, seen = time.perf_counter(), None, 0
        data, out, ((shape, dtype), *others) = arrays.data, arrays.out, self.buffers()
        result = np.empty(shape, dtype) if out is None else out
        held: list[np.ndarray] = [np.empty(*other) for other in others]
        given, made, lower, right = held
        (a, _), (b, channels), step = *self.ends, self.step
        unit = self.batch * self.factor
        done, total = 0, unit * len(self.cols) * sum(min(self.side, self.height - y) for y in self.rows)
        shares = functools.cache(lambda n: self.tiling.ramp(n)[:, :, None])
        into = result.transpose(0, 3, 1, 2) if self.bytes_out else result

        def show(rows: int, of: int) -> None:
            nonlocal seen
            seen = max(seen, done + unit * h * rows // of)  # where float16 overflows a tile begins again
            poll(seen, total)  # type: ignore[misc]

        for y, x in product(self.rows, self.cols):
            h, w = min(self.side, self.height - y), min(self.side, self.width - x)
            self.begun += 1
            ys, xs = slice(y * a, (y + h) * a), slice(x * a, (x + w) * a)
            piece = data[:, ys, xs] if self.bytes_in else data[:, :, ys, xs]
            source = given[: piece.size].reshape(piece.shape)
            source[...] = piece
            tile = made[: self.batch * channels * h * w * b * b].reshape(self.batch, channels, h * b, w * b)
            one = HostArrays(self.runner.arch, self.op, source, "float", tile, becomes_bytes=self.bytes_out)
            one.request |= {name: self.request[name] for name in ("threads", "scaled")}
            _, took = self.runner.run(one, poll and show, *settings, **how, unclamped=True)
            tiles, done = _joined(tiles, took), done + unit * h
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
            if self.bytes_out:  # rounded here, since the core had no blended borders; its rule: NaN becomes 0
                kept += 1
                kept *= 127.5
                np.rint(np.clip(np.fmax(kept, 0, out=kept), 0, 255, out=kept), out=kept)
            into[:, :, y * b : (y + step) * b, x * b : (x + step) * b] = kept
        assert tiles is not None
        bytes_held = [0 if out is not None else result.nbytes, *(array.nbytes for array in held)]
        return result, self.report(tiles, bytes_held, time.perf_counter() - start)


def _joined(tiles: Run | None, tile: Run, times: int = 1) -> Run:
    """The run of the tiles so far and of `times` more that are like `tile`: the bytes are those of the one with the
    largest peak, FLOPs and seconds are added up."""
    flops = [f * times for f in tile.flops]
    if tiles is None:
        return replace(tile, flops=tuple(flops))
    return replace(
        tile if tile.peak_bytes > tiles.peak_bytes else tiles,
        reserved_bytes=max(tiles.reserved_bytes, tile.reserved_bytes),
        flops=tuple(map(add, tiles.flops, flops)),
        pass_seconds=tuple(map(add, tiles.pass_seconds, tile.pass_seconds)),
        notes=tuple(dict.fromkeys(tiles.notes + tile.notes)),
        finite=tiles.finite and tile.finite,
    )
