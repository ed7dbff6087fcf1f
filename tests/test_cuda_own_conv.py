"""Our convolution kernels, run by the emulator (tests/emulator), beside float64.

With e and u of cuda_kernels.py (E, UNIT), K = taps * channels, p = w * f(x) and sums over taps and channels:

- f is rounded to the type, errors of random signs:                                   4 * u * sqrt(sum p^2)
- f in float, its exp and reciprocal a few ulp each, the exponent's own times |t|:    32 * e * sum |p|
- a bfloat16's SiLU, whose tanh is off by 2^-11 of itself:                            2^-12 * sum |w t|
- sums of K products, errors of random signs:                                         4 * sqrt(K) * e * sum |p|
- the sums begin with bias:                                                           4 * sqrt(K) * e * |bias|
- add:                                                                                4 * e * |add|
- the result is rounded to the type:                                                  |y| * u
- a half below 2^-14 is rounded to 2^-25, of f and of y:                              2^-25 * (4 * sqrt(sum w^2) + 1)

A tap, a channel or a pixel that is wrong is off by about sqrt(sum p^2 / K), some tens of times that for halves.
"""

import itertools

import cuda_driver
import ml_dtypes
import numpy as np
import pytest
from cases import CONVS, small
from cuda_kernels import (
    BF16_NCHW,
    F16_NCHW,
    F32_NCHW,
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
    conv_kernel,
    conv_tiles,
    header,
    in_blocks,
    number,
    round_up,
    untouched,
)

FLAT = (4, 256, 1)  # of 1x1 filters alone
WGMMA = [(16, 128, 1, 8), (16, 96, 1, 8)]  # conv_wgmma.cu's, which measure 8 rows at a time
TILES = [
    (16, 128, 1), (8, 128, 1), (16, 64, 1), (8, 256, 1), FLAT, (4, 64, 1), (16, 16, 1), (8, 128, 2), (4, 64, 2), *WGMMA,
]  # fmt: skip
every_dtype = pytest.mark.parametrize("dtype", ["f16", "bf16"])
every_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: "{}x{}_{}".format(*t))
kernels = built("conv", "conv_wgmma")


def outs(tile, least):
    """At least so many channels: those of conv_wgmma.cu's kernels fit their blocks of filters."""
    fit = (n for n in itertools.count(least) if len(tile) == 3 or header().conv_filters(round_up(n)) == tile[1])
    return next(fit)


class Case:
    """Random numbers for one pass, and what they should give."""

    def __init__(
        self, dtype, h, w, in_c, out, *, k=3, stride=1, up=False, norm=False, silu=False, add=False, stats=False,
        multiply=1.0, bias_scale=1.0, format=ROWS, clamp_from=None, seed=0, pixels=False, tiny=False,
        out_scale=1.0, out_shift=0.0,
    ):  # fmt: skip
        rng = np.random.default_rng([seed, h, w, in_c, out, k])
        self.dtype, self.type, self.k, self.stride, self.up = dtype, TYPES[dtype], 2 if up else k, stride, up
        self.silu, self.multiply, self.bias_scale, self.stats = silu, multiply, bias_scale, stats
        self.format, self.out, self.clamp_from = format, out, out if clamp_from is None else clamp_from
        self.out_scale, self.out_shift = out_scale, out_shift
        self.tiny, self.pad = tiny, self.k // 2 if stride == 1 or tiny else 0  # as cases.py has it
        self.y_h, self.y_w = ((n * 2 if up else (n + stride - 1) // stride) for n in (h, w))
        in_p, out_p = round_up(in_c), round_up(out)
        taps, phases = self.k**2, 4 if up else 1
        self.x = np.zeros((h, w, in_p), self.type)
        self.x[..., :in_c] = rng.standard_normal((h, w, in_c))
        self.w = np.zeros((phases, out_p, self.k, self.k, in_p), self.type)
        self.w[:, :out, ..., :in_c] = rng.standard_normal((phases, out, self.k, self.k, in_c)) * (taps * in_c) ** -0.5
        self.bias = np.zeros(out_p, np.float32)
        self.bias[:out] = 0 if tiny else rng.standard_normal(out)
        self.add = np.zeros((self.y_h, self.y_w, out_p), self.type) if add else None
        if add:
            self.add[..., :out] = rng.standard_normal((self.y_h, self.y_w, out))
        self.scale = self.shift = self.factor = self.w_scale = None
        if norm:
            self.scale, self.shift = np.zeros((2, in_p), np.float32)
            self.scale[:in_c], self.shift[:in_c] = rng.uniform(0.5, 2, in_c), rng.standard_normal(in_c)
        if pixels:
            self.factor = rng.uniform(0.2, 2, (h, w)).astype(np.float32)

    def packed(self, blocked):
        """Filters as a kernel reads them."""
        return in_blocks(self.w) if blocked else self.w

    def sum_over(self, f, w):
        """Of taps and channels, (y_h, y_w, out). f: x's pixels; w: (phases, out, k, k, c)."""
        h, wide, _ = f.shape
        pad = self.pad
        f = np.pad(f, ((pad, 2), (pad, 2), (0, 0)))
        y = np.zeros((self.y_h, self.y_w, w.shape[1]))
        step = 2 if self.up else 1
        for phase, a, b in itertools.product(range(w.shape[0]), range(self.k), range(self.k)):
            py, px = divmod(phase, 2)
            rows, columns = (h, wide) if self.up else (self.y_h, self.y_w)
            s = self.stride
            part = f[py + a :, px + b :][: (rows - 1) * s + 1 : s, : (columns - 1) * s + 1 : s]
            y[py::step, px::step] += part @ w[phase, :, a, b].T
        return y

    def loaded(self):
        """x with its norm; and f(x) but for `multiply`."""
        t = self.x.astype(np.float64)
        if self.factor is not None:
            t *= self.factor.astype(np.float64)[..., None]
        if self.scale is not None:
            t = t * self.scale.astype(np.float64) + self.shift
        return t, np.maximum(t, 0) if self.tiny and self.silu else t / (1 + np.exp(-t)) if self.silu else t

    def exact(self):
        """y before it is rounded, and the tolerance of the module's docstring without that rounding."""
        t, f = self.loaded()
        f = f * self.multiply
        w = self.w.astype(np.float64)
        y = self.sum_over(f, w) + self.bias.astype(np.float64) * self.bias_scale
        size, terms = self.sum_over(np.abs(f), np.abs(w)), self.k**2 * self.x.shape[2]
        tolerance = (32 + 4 * terms**0.5) * E * size + 4 * terms**0.5 * E * abs(self.bias_scale * self.bias)
        if self.scale is not None or self.multiply != 1:
            tolerance += 4 * UNIT[self.dtype] * np.sqrt(self.sum_over(f**2, w**2))
            tolerance += 4 * 2.0**-25 * np.sqrt(self.sum_over(np.ones_like(f), w**2)) if self.dtype == "f16" else 0
        if self.silu:
            tolerance += SILU[self.dtype] * self.sum_over(np.abs(t) * self.multiply, np.abs(w))
        if self.add is not None:
            y = y + self.add.astype(np.float64)
            tolerance = tolerance + 4 * E * np.abs(self.add.astype(np.float64))
        return np.maximum(y, 0) if self.tiny else y, tolerance

    def args(self, **more):
        """All but the pointers and pitches."""
        h, w, in_c = self.x.shape
        return ConvArgs(
            x_h=h, x_w=w, in_c=in_c, y_h=self.y_h, y_w=self.y_w, y_c=self.out, k=self.k, stride=self.stride, up=self.up,
            pad_y=self.pad, pad_x=self.pad, act=self.silu * (1 + self.tiny), relu=self.tiny, format=self.format,
            clamp=(self.clamp_from, -30, 20), out_scale=self.out_scale, out_shift=self.out_shift,
            multiply=self.multiply, bias_scale=self.bias_scale, **more,
        )  # fmt: skip


class Result:
    def __init__(self, y, parts, flags):
        self.y, self.parts, self.flags = y, parts, flags


class Conv:
    def __init__(self, kernels):
        self.kernels = kernels

    def __call__(
        self, case, tile, *, wider=0, in_place=False, add_is_y=False, grid=None, seed=1, slab=None, rings=(0, 0, 0),
        blocked=None,
    ):  # fmt: skip
        """wider: how many more elements a pixel's pitch has than channels. slab: the first row of tiles and how many,
        of which alone there are results. rings: rows of x's, y's and add's. What lies around x, y and the sums is
        checked."""
        if len(tile) > 3 and cuda_driver.driver() and cuda_driver.driver().target != "sm_90":
            pytest.skip("the kernel is for compute capability 9.0")
        memory, (h, w, in_c), out = Memory(), case.x.shape, round_up(case.out)
        high = tile[0] * (2 if case.up else 1)
        first, rows = slab or (0, -(-case.y_h // high))
        made = range(first * high, min((first + rows) * high, case.y_h))
        if case.up:
            read = range(max(made[0] // 2 - 1, 0), min(made[-1] // 2 + 2, h))
        else:
            top = made[0] * case.stride - case.pad
            read = range(max(top, 0), min(made[-1] * case.stride - case.pad + case.k, h))
        of_x, of_y, of_add = (
            InRing(used, ring or of)
            for used, ring, of in zip((read, made, made), rings, (h, case.y_h, case.y_h), strict=True)
        )
        x_pitch, n = in_c + wider, of_y.rows * case.y_w
        # Between pixels and behind the last lie NaNs, that reading them may show; around the filters too.
        x = memory.full((of_x.rows * w + 8, x_pitch), case.type, np.nan)
        x[: of_x.rows * w, :in_c] = of_x.hold(case.x).reshape(-1, in_c)
        before = x.copy()
        # conv_wgmma.cu takes filters in blocks alone, the others take both.
        blocked = (seed % 2 == 0 or len(tile) > 3) if blocked is None else blocked
        weights = memory.copy(case.packed(blocked), around=Memory.NAN)
        y_shape = {ROWS: (n, x_pitch if in_place else out + 2 * wider)}.get(
            case.format, (case.y_h, case.y_w, case.out) if case.format == U8_NHWC else (case.out, case.y_h, case.y_w)
        )
        y_type = [case.type, np.float32, np.uint8, np.float16, ml_dtypes.bfloat16][case.format]
        y = x if in_place else memory.empty(y_shape, y_type)
        add, add_pitch = None, 0
        if case.add is not None:
            add, add_pitch = (y, y_shape[1]) if add_is_y else (None, out + 3 * wider)
            of_add = of_y if add_is_y else of_add
            if add is None:
                add = memory.full((of_add.rows * case.y_w, add_pitch), case.type, np.nan)
            add[: of_add.rows * case.y_w, :out] = of_add.hold(case.add).reshape(-1, out)
        given = ("scale", "shift", "factor", "bias", "w_scale")
        vectors = {v: None if getattr(case, v) is None else memory.copy(getattr(case, v), Memory.NAN) for v in given}
        vectors |= {"bias": None} if case.tiny else {}
        flags = memory.full(1, np.uint32, 0)
        args = case.args(
            x=x, w=weights, y=y, add=add, **vectors, flags=flags, x_pitch=x_pitch, add_pitch=add_pitch,
            y_pitch=y_shape[1] if case.format == ROWS else 0, blocked=blocked, fp8=case.w_scale is not None,
        )  # fmt: skip
        args.lead = seed % min(args.k**2 + 1, 8)  # less than the ring
        t = conv_tiles()[tile]
        parts = None
        if case.stats:
            parts = memory.empty((header().conv_parts(args, t), 16 + 2 * out), np.float32)
            args.stats = parts.ctypes.data
        row_items = header().conv_items(args, t) // -(-case.y_h // high)
        args.first_item, args.items = first * row_items, rows * row_items
        args.x_ring, args.y_ring, args.add_ring = (
            of.args if ring else Ring() for of, ring in zip((of_x, of_y, of_add), rings, strict=True)
        )
        grid = grid or min(2, args.items)  # most often fewer blocks than items
        self.kernels.launch(conv_kernel(case.dtype, tile, args.fp8), (grid,), (t.threads,), args, t.shared, seed)

        memory.check()
        if case.format == ROWS:
            result = y[:n, :out].reshape(-1, case.y_w, out)[of_y.at]
            if in_place:
                y[:n, :out] = before[:n, :out]
            else:
                assert untouched(y[:n, out:])
        else:
            result = y.copy() if case.format == U8_NHWC else np.moveaxis(y, 0, 2).copy()
        assert x.tobytes() == before.tobytes()
        if case.stats:
            assert untouched(parts[:, 1:16])
        return Result(result, parts, int(flags[0]))


@pytest.fixture(scope="module")
def conv(kernels):
    return Conv(kernels)


def check(case, got, tile=None):
    want, tolerance = case.exact()
    close(got.y, want, tolerance + UNIT[case.dtype] * np.abs(want) + (2.0**-25 if case.dtype == "f16" else 0))
    assert got.flags == 0
    if case.stats:
        check_stats(case, got, tile)


def check_stats(case, got, tile):
    """The sums are those of the numbers that were stored. A mean is off by some e of the largest number, and deviations
    by that with their own sum's error."""
    h, w = (case.y_h, case.y_w) if not case.up else (case.y_h // 2, case.y_w // 2)
    y, out, step = got.y.astype(np.float64), round_up(case.out), 2 if case.up else 1
    part, high = 0, conv_tiles()[tile].part_rows
    for row, column, phase in itertools.product(range(0, h, high), range(0, w, 16), range(4 if case.up else 1)):
        v = y[phase // 2 :: step, phase % 2 :: step][row : row + high, column : column + 16].reshape(-1, out)
        n, top = len(v), np.abs(v).max(0)
        mean, m2 = v.mean(0), ((v - v.mean(0)) ** 2).sum(0)
        assert got.parts[part, 0] == n
        assert (np.abs(got.parts[part, 16 : 16 + out] - mean) <= 16 * E * top).all()
        error = np.abs(got.parts[part, 16 + out :] - m2)
        assert (error <= 32 * E * (m2 + np.sqrt(n * m2) * top + n * E * top**2)).all()
        part += 1
    assert part == len(got.parts)


# ---- numbers ----

SIZES = [(1, 1), (3, 5), (8, 16), (9, 17), (17, 33)]


def test_all_tiles_are_here():
    assert list(conv_tiles()) == TILES


def variants(tile):
    """(k, up) that passes ask of a kernel."""
    return [(3, False)] if tile[2] == 2 else [(1, False)] if tile == FLAT else [(3, False), (1, False), (3, True)]


CASES = [(tile, k, up, size) for tile in TILES for k, up in variants(tile) for size in SIZES]


@pytest.mark.one_in(8)
@every_dtype
@pytest.mark.parametrize("tile,k,up,size", CASES, ids=lambda v: str(v).replace(" ", ""))
def test_numbers(conv, dtype, tile, k, up, size):
    """Run every kernel, filter and size. Channels and fused operations change from case to case."""
    turn = CASES.index((tile, k, up, size)) * 2 + (dtype == "bf16")
    large = size == (17, 33)
    case = Case(
        dtype, *size, [16, 72, 160, 64, 48][turn % 5 if not large else 4],
        outs(tile, [16, 130, 40, 3, 128][turn // 2 % 5]),
        k=k, up=up, stride=tile[2], norm=turn % 4 != 3, silu=turn % 4 in (0, 1), add=turn % 3 != 0,
        stats=turn % 8 < 5, multiply=[1, 0.25, 0.3][turn % 3], bias_scale=[1, 0.25, 2][turn % 3], seed=turn,
    )  # fmt: skip
    got = conv(case, tile, wider=[0, 16, 8][turn % 3], add_is_y=turn % 2 == 1, seed=turn + 1)
    check(case, got, tile)


@every_dtype
@pytest.mark.parametrize("tile", [(4, 64, 1), (8, 256, 1), (4, 64, 2), *WGMMA], ids=str)
def test_rings(conv, dtype, tile):
    """A slab whose input, output and residual lie in rings, each wrapped round elsewhere, gives the bits that the
    whole pass gives there."""
    rows, _, stride = tile[:3]
    for up in (False, True)[: 1 + (stride == 1)]:
        each = rows * (2 if up else 1)
        case = Case(
            dtype, 5 * rows * stride - 1, 5, 16, outs(tile, 24), stride=stride, up=up, norm=True, add=True, stats=True
        )
        whole = conv(case, tile)
        check(case, whole, tile)
        got = conv(case, tile, slab=(2, 2), rings=(2 * rows * stride + 3, 3 * each - 1, 2 * each + 1))
        assert (got.y == whole.y[2 * each : 4 * each]).all()
        made = slice(*(n * len(whole.parts) // 5 for n in (2, 4)))
        assert (got.parts[made] == whole.parts[made]).all()
        got.parts[made] = Memory.FILL
        assert len(np.unique(got.parts[:, 0])) == 2  # the rest was left alone


@pytest.mark.each_value
@every_dtype
@pytest.mark.parametrize("shape", small(CONVS), ids=str)
def test_shapes(conv, dtype, shape):
    """By the tile that would be chosen for it."""
    norm = shape.groups > 0
    case = Case(
        dtype, shape.h, shape.w, shape.in_c, shape.out_c, k=shape.k, stride=shape.stride, up=shape.up, norm=norm,
        silu=norm, add=bool(shape.add), stats=True, tiny=shape.tiny,
    )  # fmt: skip
    for blocked in (True, False):
        chosen = header().conv_choose(number(dtype), case.args(blocked=blocked), False, SM_90, 132)
        got = conv(case, chosen.name, add_is_y=shape.add == "in place", blocked=blocked)
        check(case, got, chosen.name)


@every_dtype
@pytest.mark.parametrize("tile", [t for t in TILES if t not in WGMMA], ids=lambda t: "{}x{}_{}".format(*t))
def test_filters_in_blocks_give_the_same_bits(conv, dtype, tile):
    """Filters of more than two blocks, of 128 outputs and of 96."""
    case = Case(dtype, 3, 3, 80, 528, k=1 if tile == FLAT else 3, stride=tile[2], norm=True)
    runs = [conv(case, tile, blocked=blocked) for blocked in (False, True)]
    assert runs[0].y.tobytes() == runs[1].y.tobytes()


@pytest.mark.one_in(3)
@every_dtype
@every_tile
@pytest.mark.parametrize("in_c,out", [(80, 144), (320, 16)])
def test_fused(conv, dtype, tile, in_c, out):
    """Everything at once, over two tiles each way and more chunks than buffers."""
    k = 1 if tile == FLAT else 3
    h, w = (tile[0] + 1) * tile[2], 17 * tile[2]
    case = Case(dtype, h, w, in_c, outs(tile, out), k=k, stride=tile[2], norm=True, silu=True, add=True, stats=True)
    check(case, conv(case, tile, wider=16, add_is_y=True, grid=3), tile)


@pytest.mark.one_in(6)
@every_dtype
@every_tile
@pytest.mark.parametrize("in_c", [96, 144])
def test_factors_of_pixels(conv, dtype, tile, in_c):
    """A norm of one pixel, over a chunk of 64 channels and a part of one or two whole ones and a block."""
    for k, up in variants(tile):
        h, w = (tile[0] + 1) * tile[2], 17 * tile[2]
        case = Case(
            dtype, h, w, in_c, outs(tile, 48), k=k, up=up, stride=tile[2], norm=True, pixels=True, silu=in_c == 96,
            seed=in_c,
        )  # fmt: skip
        check(case, conv(case, tile, wider=16, grid=3), tile)


@every_dtype
@every_tile
def test_nothing_fused(conv, dtype, tile):
    """The sum alone, of numbers that make it exact: not a bit is off."""
    k = 1 if tile == FLAT else 3
    case = Case(dtype, 2 * tile[0] * tile[2], 16, 48, outs(tile, 32), k=k, stride=tile[2], stats=True)
    rng = np.random.default_rng(5)
    case.x[...], case.w[...] = (rng.integers(-1, 2, a.shape) for a in (case.x, case.w))
    case.bias[...] = rng.integers(-8, 9, case.bias.shape)
    got = conv(case, tile)
    assert (got.y == case.exact()[0].astype(case.type)).all()
    check_stats(case, got, tile)


@every_dtype
@pytest.mark.parametrize("tile", [t for t in TILES if t[2] == 1 and t != FLAT], ids=str)
def test_up_is_nearest_then_3x3(conv, dtype, tile):
    """With filters folded as weights_cuda.c does it, of integers, so that folding is exact."""
    case = Case(dtype, 5, 18, 32, outs(tile, 16), up=True)
    rng = np.random.default_rng(3)
    w = rng.integers(-2, 3, (case.w.shape[1], 3, 3, 32))
    groups = [[[0], [1, 2]], [[0, 1], [2]]]  # [parity][tap]: which of three taps fall on it
    for phase, a, b in itertools.product(range(4), range(2), range(2)):
        rows, columns = groups[phase // 2][a], groups[phase % 2][b]
        case.w[phase, :, a, b] = w[:, rows][:, :, columns].sum((1, 2))
    case.x[...] = rng.integers(-2, 3, case.x.shape)
    x = np.pad(case.x.astype(np.float64).repeat(2, 0).repeat(2, 1), ((1, 1), (1, 1), (0, 0)))
    want = case.bias.astype(np.float64)
    want = want + sum(x[a : a + 10, b : b + 36] @ w[:, a, b].T for a in range(3) for b in range(3))
    close(conv(case, tile).y, want, UNIT[dtype] * np.abs(want) + 4 * E * (np.abs(want) + 8))


@pytest.mark.one_in(18)
@every_dtype
@pytest.mark.parametrize(
    "in_c,out,tile",
    [
        (512, 256, (8, 256, 1)),
        (272, 144, (8, 256, 1)),
        (512, 256, (4, 256, 1)),
        (272, 144, (4, 256, 1)),
        (256, 128, (16, 128, 1)),
        (256, 128, WGMMA[0]),
        (256, 96, WGMMA[1]),
        (160, 80, (8, 128, 1)),
        (128, 64, (16, 64, 1)),
        (64, 64, (4, 64, 1)),
        (48, 16, (16, 16, 1)),
    ],
)
@pytest.mark.parametrize("multiply", [1, 0.25])
def test_in_place(conv, dtype, in_c, out, tile, multiply):
    """The shortcut that narrows, into its input's own pixels."""
    case = Case(dtype, 9, 19, in_c, out, k=1, multiply=multiply)
    check(case, conv(case, tile, in_place=True, grid=4))
    check(case, conv(case, tile, in_place=True, wider=16))


NARROW = (16, 16, 1)  # the tile that knows the user's pixels


@every_dtype
@pytest.mark.parametrize("format", [F32_NCHW, F16_NCHW, BF16_NCHW, U8_NHWC])
@pytest.mark.parametrize("out,k", [(3, 3), (40, 3), (8, 1)])
def test_pixels(conv, dtype, format, out, k):
    scale, shift = (2, -1) if out == 8 else (1, 0)
    case = Case(
        dtype, 17, 18, 80, out, k=k, norm=True, silu=True, format=format, clamp_from=out // 2, add=out == 40,
        out_scale=scale, out_shift=shift,
    )  # fmt: skip
    case.bias[:out] += np.where(np.arange(out) % 3 == 0, 40, -1)  # beyond 20 where clamped
    case.bias[out // 2] = -100
    got = conv(case, NARROW, wider=16, add_is_y=False)
    want, tolerance = case.exact()
    want, tolerance = want[..., :out] * scale + shift, tolerance[..., :out] * scale + 2 * E * (abs(want[..., :out]) + 1)
    want[..., out // 2 :] = np.clip(want[..., out // 2 :], -30, 20)
    if format == U8_NHWC:
        want, tolerance = np.clip((want + 1) * 127.5, 0, 255), tolerance * 127.5 + 0.5 + 1e-4
        assert ((got.y > 0) & (got.y < 255)).any()
    else:
        unit = {F32_NCHW: E, F16_NCHW: UNIT["f16"], BF16_NCHW: UNIT["bf16"]}[format]
        tolerance = tolerance + unit * np.abs(want) + 2.0**-25
    close(got.y, want, tolerance)
    assert got.flags == 0


# ---- sums ----


@every_dtype
@every_tile
@pytest.mark.parametrize("mean", [30, 1000])
def test_sums_about_a_mean(conv, dtype, tile, mean):
    """Squares would lose what deviations keep."""
    case = Case(dtype, 9, 19, 32, outs(tile, 48), k=1 if tile == FLAT else 3, stride=tile[2], stats=True)
    case.bias += mean
    check(case, conv(case, tile), tile)


@pytest.mark.one_in(24)
@every_dtype
@every_tile
def test_same_bits(conv, dtype, tile):
    """Whoever comes first, and however many blocks there are."""
    case = Case(
        dtype, 2 * tile[0], 17, 144, outs(tile, 40), k=1 if tile == FLAT else 3, stride=tile[2],
        norm=True, silu=True, add=True, stats=True,
    )  # fmt: skip
    grids = enumerate([1, 2, 3, 5, 99])
    runs = [conv(case, tile, seed=seed + 1, grid=grid, add_is_y=seed % 2 == 0) for seed, grid in grids]
    assert len({run.y.tobytes() + run.parts.tobytes() for run in runs}) == 1


# ---- NaN and Inf ----


@pytest.mark.one_in(16)
@every_dtype
@every_tile
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("norm", [False, True])
def test_bad_pixel_spoils_what_sees_it(conv, dtype, tile, value, norm):
    k = 1 if tile == FLAT else 3
    case = Case(dtype, 20, 20, 32, outs(tile, 16), k=k, stride=tile[2], norm=norm, silu=norm)
    clean = conv(case, tile)
    case.x[7, 16, 20] = value
    got = conv(case, tile)
    pad = k // 2 if tile[2] == 1 else 0
    rows, columns = (np.arange(n) * tile[2] - pad for n in (case.y_h, case.y_w))
    sees = ((rows <= 7) & (7 < rows + k))[:, None] & ((columns <= 16) & (16 < columns + k))
    assert sees.any() and clean.flags == 0 and got.flags == 1
    assert not np.isfinite(got.y[sees].astype(np.float32)).any()
    assert got.y[~sees].tobytes() == clean.y[~sees].tobytes()


@every_dtype
@pytest.mark.parametrize("tile,format", [*((t, ROWS) for t in TILES), (NARROW, F32_NCHW), (NARROW, U8_NHWC)], ids=str)
def test_flags(conv, dtype, tile, format):
    """One NaN, in the last pixel's residual, is seen; and in a byte it is 0."""
    case = Case(dtype, 3, 18, 16, outs(tile, 16), k=1, add=True, format=format, stats=format == ROWS)
    if tile[2] == 2:
        case = Case(dtype, 6, 36, 16, 16, k=3, stride=2, add=True, format=format, stats=format == ROWS)
    assert conv(case, tile).flags == 0
    case.add[2, 17, 5] = np.nan
    got = conv(case, tile)
    assert got.flags == 1
    assert got.y[2, 17, 5] == 0 if format == U8_NHWC else np.isnan(got.y[2, 17, 5].astype(np.float32))
    if format == ROWS:
        assert np.isnan(got.parts[-1, 16 + 5]) and np.isfinite(np.delete(got.parts[-1, 16:32], 5)).all()


def test_overflow(conv):
    """A sum beyond half's range is infinite, and says so."""
    case = Case("f16", 4, 4, 16, 16)
    case.bias[3] = 65520
    got = conv(case, (4, 64, 1))
    assert got.flags == 1
    assert np.isinf(got.y[..., 3]).any() and np.isfinite(np.delete(got.y, 3, 2)).all()
