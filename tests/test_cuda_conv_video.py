"""The kernels of 3x3x3 convolutions of videos, run by the emulator (tests/emulator) and compared with float64.

Tolerances are those of test_cuda_own_conv.py's docstring, with K = 27 * channels.
"""

from __future__ import annotations

import itertools

import cuda_driver
import numpy as np
import pytest
from cuda_kernels import (
    F32_NCHW,
    H200,
    ROWS,
    SILU,
    SM_90,
    TYPES,
    U8_NHWC,
    UNIT,
    ConvArgs,
    E,
    InRing,
    Memory,
    Ring,
    built,
    close,
    conv_tiles,
    header,
    in_blocks,
    number,
    round_up,
    untouched,
)

TILES = [(16, 128, 1, 8), (16, 96, 1, 8), (16, 16, 1)]
every_dtype = pytest.mark.parametrize("dtype", ["f16", "bf16"])
every_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: "{}x{}_{}".format(*t))
kernels = built("conv", "conv_wgmma")


class Case:
    """Random numbers for one pass over a video [rows][frames][columns][channels], and what they should give."""

    def __init__(
        self, dtype, size, in_c, out, *, norm=False, silu=False, add=False, held=False, mirrored=False, ahead=False,
        multiply=1.0, bias_scale=1.0, format=ROWS,
    ):  # fmt: skip
        rng = np.random.default_rng([*size, in_c, out])
        self.dtype, self.type, self.out, self.silu, self.format = dtype, TYPES[dtype], out, silu, format
        self.held, self.mirrored, self.ahead = held, mirrored, ahead
        self.multiply, self.bias_scale = multiply, bias_scale
        in_p, out_p = round_up(in_c), round_up(out)
        self.x, self.y_shape = np.zeros((*size, in_p), self.type), (*size, out_p)
        self.x[..., :in_c] = rng.standard_normal((*size, in_c))
        # [out][frames][columns][rows][channels]: the rows are channels of a filter
        self.w = np.zeros((out_p, 3, 3, 3, in_p), self.type)
        self.w[:out, ..., :in_c] = rng.standard_normal((out, 3, 3, 3, in_c)) * (27 * in_c) ** -0.5
        self.bias = np.zeros(out_p, np.float32)
        self.bias[:out] = rng.standard_normal(out)
        self.add = self.scale = self.shift = self.factor = None
        if add:
            self.add = np.zeros(self.y_shape, self.type)
            self.add[..., :out] = rng.standard_normal((*size, out))
        if norm:
            self.scale, self.shift = np.zeros((2, in_p), np.float32)
            self.scale[:in_c], self.shift[:in_c] = rng.uniform(0.5, 2, in_c), rng.standard_normal(in_c)
            self.factor = rng.uniform(0.2, 2, size).astype(np.float32)

    def sum_over(self, f, w):
        """Of taps and channels."""
        before = 1 if self.ahead else 2
        mode = "reflect" if self.mirrored else "constant"
        f = np.pad(f, ((0, 0), (before, 2 - before), (0, 0), (0, 0)), "edge" if self.held else "constant")
        f = np.pad(f, ((1, 1), (0, 0), (1, 1), (0, 0)), mode)
        rows, frames, columns, _ = self.y_shape
        return sum(
            f[r : r + rows, t : t + frames, c : c + columns] @ w[:, t, c, r].T
            for t, c, r in itertools.product(range(3), repeat=3)
        )

    def exact(self):
        """y before it is rounded, and the tolerance without that rounding."""
        t = self.x.astype(np.float64)
        if self.factor is not None:
            t = t * self.factor.astype(np.float64)[..., None] * self.scale.astype(np.float64) + self.shift
        f = (t / (1 + np.exp(-t)) if self.silu else t) * self.multiply
        w, bias = self.w.astype(np.float64), self.bias.astype(np.float64) * self.bias_scale
        y, terms = self.sum_over(f, w) + bias, 27 * self.x.shape[-1]
        tolerance = (32 + 4 * terms**0.5) * E * self.sum_over(np.abs(f), np.abs(w)) + 4 * terms**0.5 * E * np.abs(bias)
        if self.scale is not None or self.multiply != 1:
            tolerance += 4 * UNIT[self.dtype] * np.sqrt(self.sum_over(f**2, w**2))
            tolerance += 4 * 2.0**-25 * np.sqrt(self.sum_over(np.ones_like(f), w**2)) if self.dtype == "f16" else 0
        if self.silu:
            tolerance += SILU[self.dtype] * self.sum_over(np.abs(t) * self.multiply, np.abs(w))
        if self.add is not None:
            y = y + self.add.astype(np.float64)
            tolerance = tolerance + 4 * E * np.abs(self.add.astype(np.float64))
        return y, tolerance

    def args(self, **more):
        rows, frames, columns, channels = self.x.shape
        return ConvArgs(
            x_h=frames, x_w=columns, in_c=3 * channels, x_c=channels, x_rows=rows, y_h=frames, y_w=columns,
            y_c=self.out, k=3, stride=1, pad_y=1 if self.ahead else 2, pad_x=1, act=self.silu, blocked=True,
            held=self.held, mirrored=self.mirrored, format=self.format, clamp=(self.out, 0, 0), out_scale=1,
            multiply=self.multiply, bias_scale=self.bias_scale, **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def conv(kernels):
    """Runs a case by a tile. made: the rows of y to compute. rings: rows of those of x, y and the residual; 0: none."""

    def run(case, tile, *, made=None, rings=(0, 0, 0), wider=0, grid=3, seed=1):
        if len(tile) > 3 and cuda_driver.driver() and cuda_driver.driver().target != "sm_90":
            pytest.skip("the kernel is for compute capability 9.0")
        memory, (h, frames, columns, in_c), out_p = Memory(), case.x.shape, case.y_shape[-1]
        made = made or range(h)
        read = range(max(made[0] - 1, 0), min(made[-1] + 2, h))
        of_x, of_y, of_add = (
            InRing(used, ring or h) for used, ring in zip((read, made, made), rings, strict=True)
        )  # fmt: skip
        x = memory.full((of_x.rows, frames, columns, in_c + wider), case.type, np.nan, around=Memory.NAN)
        x[..., :in_c] = of_x.hold(case.x)
        add = None
        if case.add is not None:
            add = memory.full((of_add.rows, frames, columns, out_p + 2 * wider), case.type, np.nan)
            add[..., :out_p] = of_add.hold(case.add)
        whole = (case.out, frames, columns, h)  # of a picture whose columns are rows here
        y = {
            ROWS: lambda: memory.empty((of_y.rows, frames, columns, out_p + wider), case.type),
            F32_NCHW: lambda: memory.empty(whole, np.float32),
            U8_NHWC: lambda: memory.empty((*whole[1:], case.out), np.uint8),
        }[case.format]()
        flags = memory.full(1, np.uint32, 0)
        given = ("scale", "shift", "factor", "bias")
        vectors = {v: None if getattr(case, v) is None else memory.copy(getattr(case, v), Memory.NAN) for v in given}
        blocks = in_blocks(case.w.reshape(1, out_p, 3, 3, 3 * in_c))
        args = case.args(
            x=x, w=memory.copy(blocks, around=Memory.NAN), y=y, add=add, **vectors, flags=flags, x_pitch=in_c + wider,
            y_pitch=out_p + wider, add_pitch=out_p + 2 * wider, y_plane=frames * columns * h, row_step=1,
            column_step=h, frame_step=h * columns,
        )  # fmt: skip
        args.x_ring, args.y_ring, args.add_ring = (
            of.args if ring else Ring() for of, ring in zip((of_x, of_y, of_add), rings, strict=True)
        )
        args.lead = seed % 9  # at most the ring
        t = conv_tiles()[tile]
        each = header().conv_items(args, t)
        args.first_item, args.items = made[0] * each, len(made) * each
        name = f"wgmma_{tile[1]}" if len(tile) > 3 else "16x16_1"
        kernels.launch(f"vm_conv_{case.dtype}_{name}_video", (grid,), (t.threads,), args, t.shared, seed)
        memory.check()
        if case.format != ROWS:
            return (np.moveaxis(y, 0, 3) if case.format == F32_NCHW else y).transpose(2, 0, 1, 3), int(flags[0])
        assert untouched(y[..., out_p:])
        return y[..., :out_p][of_y.at], int(flags[0])

    return run


def check(case, got):
    want, tolerance = case.exact()
    y, flags = got
    close(y, want, tolerance + UNIT[case.dtype] * np.abs(want) + (2.0**-25 if case.dtype == "f16" else 0))
    assert flags == 0


def outs(tile, *which):
    """Of these numbers of channels, those whose filters are in blocks of the tile's."""
    return [n for n in which if len(tile) == 3 or header().conv_filters(round_up(n)) == tile[1]]


BORDERS = [(False, False, False), (True, False, True), (True, True, True), (False, True, False)]


@pytest.mark.each_value
@every_dtype
@every_tile
@pytest.mark.parametrize("size", [(1, 1, 1), (2, 9, 17), (3, 17, 18), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_numbers(conv, dtype, tile, size, borders):
    """Sizes about a tile's, and channels about a chunk's: of 16 in a row a chunk has three rows."""
    turn = BORDERS.index(borders) + size[1]
    held, mirrored, ahead = borders
    if mirrored and (size[0] < 2 or size[2] < 2):
        pytest.skip("a mirror needs two rows and columns")
    for i, in_c in enumerate((16, 32, 48, 96)):
        channels = outs(tile, 16, 96, 97, 112, 128, 192)
        case = Case(
            dtype, size, in_c, channels[(turn + i) % len(channels)], norm=i % 2 == 0, silu=i % 4 == 0,
            add=(turn + i) % 3 > 0, held=held, mirrored=mirrored, ahead=ahead, multiply=[1, 0.25, 0.3][i % 3],
            bias_scale=[1, 0.5][i % 2],
        )  # fmt: skip
        check(case, conv(case, tile, wider=[0, 16][i % 2], seed=turn + i + 1))


@every_dtype
@every_tile
def test_nothing_fused(conv, dtype, tile):
    """The sum alone, of numbers that make it exact: not a bit is off."""
    case = Case(dtype, (2, 9, 17), 48, outs(tile, 32, 112)[0])
    rng = np.random.default_rng(5)
    case.x[...], case.w[...] = (rng.integers(-1, 2, a.shape) for a in (case.x, case.w))
    case.bias[...] = rng.integers(-8, 9, case.bias.shape)
    assert (conv(case, tile)[0] == case.exact()[0].astype(case.type)).all()


@every_dtype
@every_tile
@pytest.mark.parametrize("mirrored", [False, True])
def test_rings(conv, dtype, tile, mirrored):
    """Rows that are computed in parts, in rings, have the same bits as the whole."""
    case = Case(dtype, (7, 3, 18), 32, outs(tile, 24, 120)[0], norm=True, add=True, mirrored=mirrored)
    whole = conv(case, tile)
    check(case, whole)
    for made in (range(0, 2), range(2, 5), range(5, 7)):
        got = conv(case, tile, made=made, rings=(6, 4, 5), seed=3)
        assert got[0].tobytes() == whole[0][made.start : made.stop].tobytes() and got[1] == 0


@every_dtype
@pytest.mark.parametrize("format", [F32_NCHW, U8_NHWC])
@pytest.mark.parametrize("out", [3, 40])
def test_the_users_video(conv, dtype, format, out):
    """A picture's columns are rows here."""
    case = Case(dtype, (4, 3, 18), 48, out, norm=True, silu=True, format=format)
    case.bias *= 0.1
    got, flags = conv(case, TILES[2])
    want, tolerance = (a[..., :out] for a in case.exact())
    if format == U8_NHWC:
        want, tolerance = np.clip((want + 1) * 127.5, 0, 255), tolerance * 127.5 + 0.5 + 1e-4
    close(got, want, tolerance + E * np.abs(want))
    assert flags == 0


@every_dtype
@every_tile
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_pixel_spoils_what_sees_it(conv, dtype, tile, value):
    case = Case(dtype, (4, 5, 9), 32, outs(tile, 16, 112)[0], norm=True, silu=True)
    clean, _ = conv(case, tile)
    case.x[1, 2, 4, 20] = value
    got, flags = conv(case, tile)
    sees = np.zeros(got.shape[:3], bool)
    sees[0:3, 2:5, 3:6] = True
    assert flags == 1 and not np.isfinite(got[sees].astype(np.float32)).any()
    assert got[~sees].tobytes() == clean[~sees].tobytes()


@every_dtype
@every_tile
def test_same_bits(conv, dtype, tile):
    """Whoever comes first, and however many blocks there are."""
    case = Case(dtype, (3, 17, 17), 48, outs(tile, 16, 112)[0], norm=True, silu=True, add=True)
    grids = enumerate([1, 2, 5, 99])
    assert len({conv(case, tile, seed=seed + 1, grid=grid)[0].tobytes() for seed, grid in grids}) == 1


@every_dtype
def test_every_pass_has_a_tile(dtype):
    """cuDNN cannot read filters in blocks. Those of 96 and 192 outputs are multiplied without padding."""
    for out, in_c, format in itertools.product((3, 16, 96, 128, 384, 1024), (16, 96, 1024), (ROWS, F32_NCHW, U8_NHWC)):
        case = Case(dtype, (1, 2, 2), 16, out, format=format)
        args = case.args(x_pitch=in_c)
        args.in_c, args.x_c = 3 * in_c, in_c
        tile = header().conv_choose(number(dtype), args, False, SM_90, H200)
        assert tile.name in TILES and (format == ROWS or tile.outs == 16)
    for out, want in ((96, 96), (192, 96), (128, 128), (256, 128), (384, 128), (512, 128), (1024, 128)):
        args = Case(dtype, (64, 61, 128), 16, out).args()
        args.in_c, args.x_c = 3 * out, out
        assert header().conv_choose(number(dtype), args, False, SM_90, H200).outs == want
