"""Tiles as diffusers cuts and blends them. Tiles are not exact; they are here for comparison."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from numbers import Real
from operator import add
from typing import Any

from vaemem._common import MOST_SIDE, choose, distinct, mib
from vaemem._errors import ArgumentError, ArgumentOverflowError, ArgumentTypeError, Named
from vaemem.engine.arguments import Poll, as_int
from vaemem.engine.arrays import Arrays, ends_of
from vaemem.engine.device import itemsize
from vaemem.engine.model import Runner
from vaemem.engine.records import Run, make_run

ADVISED_SIDES = (1024, 512, 256)  # of tiles in advice, in pixels


@dataclass(frozen=True)
class Tiling:
    """Overlapping tiles, each run alone and blended with its neighbours: diffusers' `tiled_decode` and `tiled_encode`.

    The result differs from that of the whole image: GroupNorm and attention see one tile at a time, which leaves seams
    and shifts colours. Tiles are offered for comparison.

    Attributes
    ----------
    sample_size : int, optional
        Side of a tile in pixels, a multiple of 8. None: `VAE.sample_size`, from the config.
    overlap : float
        The part of a tile's side that the next tile shares: from 0 to less than 1, in whole latents.
    blend : {"linear", "cosine"}
        Weight of the newer tile in pixel i of n shared ones: t = i / n, as in diffusers, or the smoother
        (1 - cos(pi t)) / 2.

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
        if self.sample_size is not None:
            object.__setattr__(self, "sample_size", as_int("sample_size", self.sample_size))
            if self.sample_size < 1:
                raise ArgumentError("sample_size", "a positive number of pixels, or None", str(self.sample_size))
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, Real):
            raise ArgumentTypeError("overlap", "a number from 0 to less than 1", repr(self.overlap))
        if not 0 <= self.overlap < 1:
            raise ArgumentError("overlap", "a number from 0 to less than 1", str(self.overlap))
        choose("blend", self.blend, ("linear", "cosine"))

    def __repr__(self) -> str:
        given = ((one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default)
        return f"Tiling({', '.join(f'{name}={value!r}' for name, value in given)})"


def tiles_of_video(tiling: Tiling) -> ArgumentError:
    """Make the error for tiles of a video."""
    return ArgumentError("tiling", "None for videos", repr(tiling), ("use ", Named("memory_limit"), ": it is exact"))


def cut(
    runner: Runner, tiling: Tiling | None, sample_size: int | None, request: Mapping[str, Any], limit: int
) -> _Tiles | None:
    """Return the tiles for an image, or None for an ordinary run: without a tiling, for an image that fits into one
    tile, and for a bad size, which the ordinary run refuses. request: arguments of the core's plan. sample_size: the
    config's. TypeError or ValueError for a tiling that cannot be used."""
    if tiling is None:
        return None
    if not isinstance(tiling, Tiling):
        raise ArgumentTypeError("tiling", "a vaemem.Tiling or None", type(tiling).__name__)
    if request["frames"] > 1:
        raise tiles_of_video(tiling)
    if limit:
        exact = "a limit is exact and tiles are not"
        raise ArgumentError("memory_limit", ("no limit with ", Named("tiling"), f" ({exact})"), "both")
    size, factor = tiling.sample_size or sample_size, runner.factor
    if size is None:
        raise ArgumentError("sample_size", "a number such as Tiling(sample_size=512)", "None, and no config tells it")
    if (size := as_int("sample_size", size)) < 1 or size % factor:
        raise ArgumentError("tiling", f"a sample_size that is a positive multiple of {factor}", str(size))
    side = size // factor
    shared = round(side * tiling.overlap)
    if abs(side * tiling.overlap - shared) > 1e-9 * side or shared == side:
        wanted = f"whole latents, a multiple of 1/{side} for sample_size {size}"
        raise ArgumentError("overlap", wanted, str(tiling.overlap))
    height, width = request["height"], request["width"]
    is_whole = not (height % factor or width % factor)
    if not (is_whole and min(height, width, request["batch"]) >= 1 and size < max(height, width) <= MOST_SIDE):
        return None
    return _Tiles(runner, tiling, request, side, shared)


@contextlib.contextmanager
def advise_tiles(runner: Runner, sample_size: int | None, request: Mapping[str, Any], limit: int) -> Iterator[None]:
    """Add to the refusal of a limit which tiles would fit within it, if any. Arguments are `cut`'s."""
    try:
        yield
    except ArgumentError as error:
        if hasattr(error, "smallest"):
            for side in distinct([sample_size or ADVISED_SIDES[0], *ADVISED_SIDES]):
                tiling = Tiling(side)
                with contextlib.suppress(ValueError):  # this model allows no such side
                    tiles = cut(runner, tiling, None, request, 0)
                    run = tiles and tiles.estimate()
                    if run and (needed := max(run.peak_bytes, run.reserved_bytes)) <= limit:
                        takes = f" without a limit takes {mib(needed)} MiB, but is not exact"
                        error.advice = (Named("tiling", tiling, str(side)), takes)
                        break
        raise


class _Tiles:
    """The tiles of one call. Lengths are in latent pixels: `side` of a tile, `shared` with the next one, `height` and
    `width` of the image. request: of the whole image."""

    def __init__(self, runner: Runner, tiling: Tiling, request: Mapping[str, Any], side: int, shared: int) -> None:
        self.runner, self.tiling, self.request, self.side, self.shared = runner, tiling, request, side, shared
        self.op, self.batch, self.factor, self.step = request["op"], request["batch"], runner.factor, side - shared
        self.height, self.width = request["height"] // self.factor, request["width"] // self.factor
        self.rows, self.cols = range(0, self.height, self.step), range(0, self.width, self.step)
        self.begun, self.count = 0, len(self.rows) * len(self.cols)
        self.ends = ends_of(runner.arch, self.op)

    def sizes(self, starts: range, length: int) -> Counter[int]:
        """Return {size: number of tiles} along a side of the image; the largest size first."""
        whole = max(0, (length - self.side) // starts.step + 1)
        sizes = Counter({self.side: whole} if whole else {})
        sizes.update(length - at for at in starts[whole:])
        return sizes

    def tile_request(self, h: int, w: int) -> dict[str, Any]:
        """Return arguments of the core's plan for a tile; its result is float32."""
        result = {"pixels" if self.op == "decode" else "latents": "float"}
        return {**self.request, **result, "height": h * self.factor, "width": w * self.factor, "own_output": False}

    def output_bytes(self) -> int:
        """Return the bytes of the result."""
        scale, channels = self.ends[1]
        floats = self.request.get("latents", "float32") if self.op == "encode" else self.request["pixels"]
        size = itemsize("float32" if floats == "float" else floats)
        return int(self.batch * channels * self.height * self.width * scale * scale * size)

    def floats(self) -> list[int]:
        """Return the numbers of float32 that scratch memory holds while tiles run: a tile's result; the lower borders
        of a row of tiles, to blend with the next row; the right border of a tile, to blend with the next tile."""
        scale, channels = self.ends[1]
        h, w = min(self.side, self.height), min(self.side, self.width)
        lower = self.shared * len(self.cols) * w if len(self.rows) > 1 else 0
        right = self.shared * h if len(self.cols) > 1 else 0
        return [self.batch * channels * scale * scale * length for length in (h * w, lower, right)]

    def scratch_bytes(self) -> int:
        """Return the bytes of scratch memory."""
        return sum(self.floats()) * itemsize("float32")

    def estimate(self) -> Run:
        """Return the record that `run` will make."""
        tiles = None
        sizes = self.sizes(self.rows, self.height).items(), self.sizes(self.cols, self.width).items()
        for (h, down), (w, across) in product(*sizes):
            request = self.tile_request(h, w)
            tiles = _join(tiles, make_run(request, self.runner.core.plan(**request)), down * across)
        assert tiles is not None
        if (held := self.output_bytes() + self.scratch_bytes()) > sys.maxsize:
            raise ArgumentOverflowError("batch", "images whose bytes can be addressed", f"{held} of them")
        return self.report(tiles, self.request.get("own_output", True), None)

    def report(self, tiles: Run, own_output: bool, seconds: float | None) -> Run:
        """Make the record of the whole run from the joined records of its tiles. With a GPU, host memory is not
        counted, as in an ordinary run."""
        output, scratch = (self.output_bytes() if own_output else 0), self.scratch_bytes()
        device, held = self.runner.device, output + scratch
        if device:
            if self.request.get("host_arrays", True):
                output = scratch = 0
            held = device.held(output) + device.held(scratch)
        return replace(
            tiles,
            height=self.height * self.factor,
            width=self.width * self.factor,
            output_bytes=tiles.output_bytes + output,
            scratch_bytes=tiles.scratch_bytes + scratch,
            reserved_bytes=tiles.reserved_bytes + held,
            timeline=tuple((name, live + output + scratch) for name, live in tiles.timeline),
            seconds=seconds,
            notes=(f"{self.count} tiles of {self.side * self.factor}x{self.side * self.factor}", *tiles.notes),
        )

    def label(self) -> str:
        """Return the title of the progress bar."""
        return f"{self.op}, tile {self.begun} of {self.count}"

    def run(self, arrays: Arrays, poll: Poll, *settings: Any, **how: Any) -> tuple[Any, Run]:
        """Run each tile, blend it with the one above and the one to the left, and write it. settings, how: as in
        `Runner.run`."""
        start, tiles, seen = time.perf_counter(), None, 0
        core, (scale, _), size = self.runner.core, self.ends[0], itemsize("float32")
        unit = self.batch * self.factor
        done, total = 0, unit * len(self.cols) * sum(min(self.side, self.height - y) for y in self.rows)

        def report_rows(rows: int, of: int) -> None:
            nonlocal seen
            seen = max(seen, done + unit * h * rows // of)  # a tile restarts if float16 overflows
            poll(seen, total)  # type: ignore[misc]

        try:
            image, tile = self.open(arrays)
            result_floats, below, _ = self.floats()
            lower, right = tile + result_floats * size, tile + (result_floats + below) * size
            for y, x in product(self.rows, self.cols):
                h, w = min(self.side, self.height - y), min(self.side, self.width - x)
                self.begun += 1
                part = slice(y * scale, (y + h) * scale), slice(x * scale, (x + w) * scale)
                one = arrays.tile(self.tile_request(h, w), *part)
                _, used = self.runner.run(one, poll and report_rows, *settings, **how, unclamped=True)
                tiles, done = _join(tiles, used), done + unit * h
                fields = self.blending(y, x, h, w)
                own = lower + fields["lower_w"] // len(self.cols) * self.cols.index(x) * size  # of this column
                core.blend(arrays.stream, self.op, arrays.dtype, tile=tile, lower=own, right=right, y=image, **fields)
            assert tiles is not None
            record = self.report(tiles, arrays.request["own_output"], time.perf_counter() - start)
            return arrays.tiled(), record
        finally:
            arrays.close_tiles()

    def open(self, arrays: Arrays) -> tuple[int, int]:
        """Allocate the result and scratch memory, and return their addresses."""
        floats = sum(self.floats())
        with contextlib.suppress(MemoryError):
            return arrays.open_tiles(self.runner.core, floats)
        arrays.close_tiles()
        self.runner.trim()  # an earlier run may have left its arena
        try:
            return arrays.open_tiles(self.runner.core, floats)
        except MemoryError as error:
            output, scratch = mib(self.output_bytes()), mib(self.scratch_bytes())
            what = f"{self.op} of {self.request['height']}x{self.request['width']} in tiles"
            holds = f"This {what} holds {output} MiB of output and {scratch} MiB to blend with"
            device = self.runner.device
            raise MemoryError(f"{error}. {holds}{device.in_torch() if device else ''}") from None

    def blending(self, y: int, x: int, h: int, w: int) -> dict[str, int]:
        """Return how to blend a tile: fields of kernels.h's vm_blend_args."""
        b, channels = self.ends[1]
        across = min(self.side, self.width)
        latents = dict(
            h=h, w=w, step=self.step, border=self.shared, lower_w=len(self.cols) * across,
            right_h=min(self.side, self.height), y_h=self.height, y_w=self.width, top=y, left=x,
            down=min(self.shared, h) if y else 0, across=min(self.shared, w) if x else 0,
        )  # fmt: skip
        return {name: length * b for name, length in latents.items()} | dict(
            batch=self.batch, y_c=channels, cosine=self.tiling.blend == "cosine",
        )  # fmt: skip


def _join(tiles: Run | None, tile: Run, times: int = 1) -> Run:
    """Join the record of tiles so far with `times` tiles like `tile`. Bytes are those of the largest peak; FLOPs and
    seconds add up."""
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
