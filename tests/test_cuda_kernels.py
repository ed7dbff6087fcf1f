"""load, blend, merge and pixel_norm (kernels/cuda/cuda.h), run by the emulator (tests/emulator), beside float64.

With e and u of cuda_kernels.py (E, UNIT):

- load: t = v * scale + shift is rounded once; e^-t has the relative error of its argument, |t| * e for the product with
  log2(e) and as much for log2(e) itself; exp2, 1 + it, its reciprocal and two products: at most 8 e more. SiLU's slope
  is at most 1.1.                    |y| * ((2 |t| + 8) * e + u) + 1.1 * e * |t| * multiply
  With factors v * factor is rounded before:                                     1.1 * e * |t - shift| * multiply
  A bfloat16's SiLU is h + h tanh h with tanh off by 2^-11 of itself, h = t / 2:          2^-12 * |t| * multiply
- blend has two shares, two products and a sum, twice: 10 e of numbers below 100; and u of what is stored.
- merge is done in double and rounded once:       e * |scale|, e * |shift| + 1e-12
- pixel_norm sums c squares, each with at most c / 8 + 11 roundings; the root halves their error, and is rounded as the
  quotient is:                                    (c / 16 + 8) * e * factor, and e * |scale|

A padding forgotten, a pixel beside the right one or a part left out is off by far more.
"""

import numpy as np
import pytest
from cuda_kernels import (
    BLOCK,
    FORMATS,
    LEAST,
    SILU,
    THREADS,
    TYPES,
    UNIT,
    BlendArgs,
    E,
    InRing,
    LoadArgs,
    Memory,
    PixelNormArgs,
    built,
    close,
    every_format,
    every_type,
    far,
    numbers,
    round_up,
    run_merge,
    untouched,
)

kernels = built("load", "norm", "pixel_norm", "blend")


# ---- load ----


def to_pixels(x, format_):
    """(h, w, c) float64 to what the user has."""
    if format_ == "u8":
        return np.clip(np.rint((x / 3 + 1) * 127.5), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(x.transpose(2, 0, 1)).astype(TYPES[format_])


def of_pixels(pixels, format_):
    """And what those are, exactly."""
    pixels64 = pixels.astype(np.float64)
    return (2 * pixels64 - 255) / 255 if format_ == "u8" else pixels64.transpose(1, 2, 0)


class Load:
    """One launch: x in memory, what surrounds it NaN; out, whose guards were kept."""

    def __init__(self, kernels):
        self.kernels = kernels

    def __call__(
        self, dtype, x, top, left, rows, width, channels, *, format_="rows", pitch=None, grid=1, seed=1, ring=0, **more
    ):
        memory, t = Memory(), TYPES[dtype]
        h, w, c = x.shape if format_ in ("rows", "u8") else (*x.shape[1:], x.shape[0])
        scale, shift, factor = (more.pop(name, None) for name in ("scale", "shift", "factor"))
        if format_ == "rows":
            held = np.full((h, w, pitch or round_up(c)), np.nan, t)
            held[:, :, :c] = x
            x = held
        if ring:
            of_x = InRing(range(max(top, 0), min(top + rows, h)), ring)
            x, more["x_ring"] = of_x.hold(x), of_x.args
        x = memory.copy(x)
        if scale is not None:  # padded as vm_merge leaves them
            scale, shift = (memory.copy(np.pad(v, (0, round_up(c) - c))) for v in (scale, shift))
        if factor is not None:  # of the rows that are wanted, and NaN around them
            first = min(max(top, 0), h)
            factor = memory.copy(factor[first : max(min(top + rows, h), first)], around=Memory.NAN)
            more["first_factor"] = first * w
        before, out = x.tobytes(), memory.empty((rows, width, channels), t)
        args = LoadArgs(
            x=x, out=out, scale=scale, shift=shift, factor=factor, x_plane=h * w, x_h=h, x_w=w, x_c=c,
            x_pitch=pitch or round_up(c), x_row=w, top=top, left=left, rows=rows, width=width, channels=channels,
            format=FORMATS[format_], **{"in_scale": 1, "multiply": 1, **more},
        )  # fmt: skip
        self.kernels.launch(f"vm_load_{dtype}", (grid,), (THREADS,), args, seed=seed)
        memory.check()
        assert x.tobytes() == before
        return out


@pytest.fixture(scope="module")
def load(kernels):
    return Load(kernels)


def exact_load(
    dtype, x, top, left, rows, width, channels, *, scale=None, shift=None, factor=None, act=0, in_scale=1, in_shift=0,
    multiply=1,
):  # fmt: skip
    """x: (h, w, c) float64. What load should give, and how far off it may be."""
    if scale is None:
        scale, shift = np.float64(np.float32(in_scale)), np.float64(np.float32(in_shift))
    t = x * scale if factor is None else x * scale * factor[..., None]
    early = 0 if factor is None else 1.1 * E * np.abs(t) * multiply
    t = t + shift
    y = [t, t / (1 + np.exp(-t)), np.maximum(t, 0), 3 * np.tanh(t / 3)][act] * multiply
    tolerance = (
        np.abs(y) * ((2 * np.abs(t) + 8) * E + UNIT[dtype]) + 1.1 * E * np.abs(t) * multiply + LEAST[dtype] + early
    )
    tolerance += [0, SILU[dtype] * np.abs(t), 0, 36 * E][act] * multiply  # the bound is made of numbers up to 6
    out = np.zeros((2, rows, width, channels))
    for r in range(max(0, -top), min(rows, x.shape[0] - top)):
        for q in range(max(0, -left), min(width, x.shape[1] - left)):
            out[:, r, q, : x.shape[2]] = y[top + r, left + q], tolerance[top + r, left + q]
    return out


#        x: h, w, c       top, left, rows, width, channels
LOADS = {
    "3x3": ((5, 7, 48), (-1, -1, 7, 9, 48)),
    "middle": ((9, 5, 16), (3, -1, 4, 7, 16)),
    "stride 2": ((6, 8, 80), (0, 0, 7, 9, 80)),  # one row and one column beyond the image, none before it
    "bottom": ((6, 8, 144), (4, -1, 4, 10, 144)),
    "inside": ((6, 8, 32), (2, 3, 3, 4, 32)),
    "far outside": ((2, 3, 16), (-4, -5, 9, 12, 16)),
    "nothing": ((2, 3, 16), (5, 1, 2, 2, 16)),
    "one pixel": ((1, 1, 16), (0, 0, 1, 1, 16)),
    "one column": ((37, 1, 16), (-1, 0, 39, 1, 16)),
    "odd channels": ((4, 5, 20), (-1, -1, 6, 7, 32)),
    "few channels": ((4, 5, 3), (-1, -1, 6, 7, 16)),
    "more channels": ((4, 5, 16), (-1, -1, 6, 7, 48)),
    "many channels": ((2, 3, 1040), (-1, -1, 4, 5, 1040)),
}


@every_type
@pytest.mark.parametrize("case", LOADS)
def test_load(load, dtype, case):
    shape, geometry = LOADS[case]
    rng = np.random.default_rng(len(case))
    x = numbers(rng, shape, TYPES[dtype], 3)
    scale, shift = (numbers(rng, shape[2], np.float32) for _ in range(2))
    norm, silu = {"scale": scale, "shift": shift}, {"act": 1, "multiply": 0.25}
    of_pixels = {"factor": np.exp(numbers(rng, shape[:2], np.float32))}
    others = [{"act": act} for act in (2, 3)]  # ReLU, and within 3
    for more in ({}, norm, norm | silu, norm | of_pixels, norm | of_pixels | silu, norm | others[0], *others):
        want, tolerance = exact_load(dtype, x.astype(np.float64), *geometry, **more)
        for grid, pitch in ((1, None), (3, round_up(shape[2]) + 16), (70, None)):
            close(load(dtype, x, *geometry, grid=grid, pitch=pitch, **more), want, tolerance)


@every_type
def test_load_from_a_ring(load, dtype):
    """Rows from the top of the image, from its middle and from beyond its end."""
    rng, shape = np.random.default_rng(4), (12, 5, 48)
    x, more = numbers(rng, shape, TYPES[dtype], 3), {"factor": np.exp(numbers(rng, shape[:2], np.float32)), "act": 1}
    more |= {name: numbers(rng, 48, np.float32) for name in ("scale", "shift")}
    for top, ring in ((-1, 4), (5, 5), (5, 7), (9, 4)):
        want, tolerance = exact_load(dtype, x.astype(np.float64), top, -1, 5, 7, 48, **more)
        close(load(dtype, x, top, -1, 5, 7, 48, ring=ring, grid=2, **more), want, tolerance)


@every_type
@pytest.mark.parametrize("seed", range(6))
def test_load_of_any_size(load, dtype, seed):
    rng = np.random.default_rng(seed)
    h, w = rng.integers(1, 30, 2)
    c = int(rng.integers(1, 200))
    geometry = (*rng.integers(-3, 3, 2), *rng.integers(1, 34, 2), round_up(c))
    x = numbers(rng, (h, w, c), TYPES[dtype], 4)
    more = {"scale": numbers(rng, c, np.float32), "shift": numbers(rng, c, np.float32), "act": seed % 2}
    want, tolerance = exact_load(dtype, x.astype(np.float64), *(int(n) for n in geometry), **more)
    close(load(dtype, x, *geometry, grid=int(rng.integers(1, 9)), seed=seed + 1, **more), want, tolerance)


@every_type
@every_format
@pytest.mark.parametrize("c", [3, 4, 16, 19])
def test_load_of_pixels(load, dtype, format_, c):
    x = to_pixels(np.random.default_rng(c).standard_normal((7, 9, c)), format_)
    geometry, more = (-1, -1, 9, 11, round_up(c)), {"in_scale": 1 / 0.3611, "in_shift": 0.1159, "multiply": 0.5}
    exact = of_pixels(x, format_)
    for how in ({}, more):
        want, tolerance = exact_load(dtype, exact, *geometry, **how)
        scale = how.get("in_scale", 1) * how.get("multiply", 1)
        inside = np.pad(np.abs(exact), ((1, 1), (1, 1), (0, round_up(c) - c)))
        tolerance += 2 * E * scale * inside if format_ == "u8" else 0  # 1 / 255, and the product with it
        close(load(dtype, x, *geometry, format_=format_, grid=2, **how), want, tolerance)


@every_type
def test_load_keeps_what_is_not_finite(load, dtype):
    x = np.ones((3, 5, 16), TYPES[dtype])
    x[0, 0, 0], x[1, 2, 3], x[2, 4, 15], x[1, 1, 1] = np.nan, np.inf, -np.inf, -100
    one = {"scale": np.ones(16, np.float32), "shift": np.zeros(16, np.float32)}
    plain = load(dtype, x, -1, -1, 5, 7, 16, **one).astype(np.float32)
    assert np.isnan(plain[1, 1, 0]) and plain[2, 3, 3] == np.inf and plain[3, 5, 15] == -np.inf
    assert np.isfinite(plain).sum() == plain.size - 3
    silu = load(dtype, x, -1, -1, 5, 7, 16, act=1, **one).astype(np.float32)
    assert np.isnan(silu[1, 1, 0]) and silu[2, 3, 3] == np.inf and np.isnan(silu[3, 5, 15])  # -Inf / Inf
    assert np.isfinite(silu).sum() == silu.size - 3 and abs(silu[2, 2, 1]) <= 100 * SILU[dtype] + 1e-30


def test_load_beyond_2_to_the_32(load):
    """Few pixels, far apart."""
    t, pitch, width = TYPES["f16"], 1 << 22, 1040
    x = far(width, pitch, t)
    x[:, :16] = numbers(np.random.default_rng(1), (width, 16), t)
    out = Memory().empty((1, width, 16), t)
    args = LoadArgs(
        x=x,
        out=out,
        x_h=1,
        x_w=width,
        x_c=16,
        x_pitch=pitch,
        x_row=width,
        rows=1,
        width=width,
        channels=16,
        in_scale=1,
        multiply=1,
    )
    load.kernels.launch("vm_load_f16", (3,), (THREADS,), args)
    np.testing.assert_array_equal(out[0], x[:, :16])


# ---- blend ----


@every_format
@pytest.mark.parametrize("seed", range(8))
def test_blend(kernels, format_, seed):
    """A tile of any size, at any place: what becomes of it, and what it leaves for the next ones."""
    rng = np.random.default_rng(seed)
    step, border = (int(n) for n in rng.integers(1, 14, 2))
    h, w = (int(n) for n in rng.integers(1, step + border + 1, 2))
    down, across = min(border, h) * (seed % 3 > 0), min(border, w) * (seed % 4 > 0)
    top, left, more, wider, beside, under = (int(n) for n in rng.integers(0, 7, 6))
    patch = 1 + seed % 3 // 2
    sizes = dict(batch=2, y_c=3, h=h, w=w, step=step, down=down, across=across, border=border, lower_w=w + more)
    sizes |= dict(
        right_h=h + wider, top=top, left=left, y_h=top + min(h, step) + under, y_w=left + min(w, step) + beside
    )
    memory = Memory()
    tile, lower, right = (
        memory.copy(20 * rng.standard_normal((2, 3, *sides)).astype(np.float32))
        for sides in ((h, w), (border, w + more), (border, h + wider))
    )
    want, want_lower, want_right = tile.astype(np.float64), lower.copy(), right.copy()
    for whole, older, n in ((want, lower[..., :w], down), (want.mT, right[..., :h], across)):
        t = np.arange(n)[:, None] // patch * patch / max(n, 1)
        t = (1 - np.cos(np.pi * t)) / 2 if seed % 2 else t
        whole[..., :n, :] = older[..., :n, :] * (1 - t) + whole[..., :n, :] * t
    want_lower[..., : max(h - step, 0), :w] = want[..., step:, :]
    want_right[..., : max(w - step, 0), :h] = want.mT[..., step:, :]

    as_bytes, t = format_ == "u8", np.uint8 if format_ == "u8" else TYPES[format_]
    shape = (sizes["y_h"], sizes["y_w"])
    y = memory.empty((2, *shape, 3) if as_bytes else (2, 3, *shape), t)
    args = BlendArgs(
        tile=tile,
        lower=lower,
        right=right,
        y=y,
        format=FORMATS[format_],
        cosine=seed % 2,
        patch=patch,
        clamp=(2, -30, 20),
        **sizes,
    )
    kernels.launch("vm_blend", (1 + seed % 3,), (THREADS,), args, seed=seed)
    memory.check()
    close(lower, want_lower, np.abs(want_lower) * UNIT["f32"] + 1e-5)
    close(right, want_right, np.abs(want_right) * UNIT["f32"] + 1e-5)
    kept, image = want[..., :step, :step], np.moveaxis(y, 3, 1) if as_bytes else y
    kept[:, 2] = np.clip(kept[:, 2], -30, 20)
    inside = slice(top, top + kept.shape[2]), slice(left, left + kept.shape[3])
    got, outside = image[(..., *inside)].astype(np.float64), np.ones(shape, bool)
    if as_bytes:
        assert np.abs(got - np.clip((kept + 1) * 127.5, 0, 255)).max() <= 0.5 + 1e-2
    else:
        close(got, kept, np.abs(kept) * UNIT[format_] + 1e-5)
    outside[inside] = False
    assert untouched(image[..., outside])


# ---- merge ----


def random_parts(rng, c, parts, mean=0.0):
    padded = round_up(c)
    sums = np.full((parts, BLOCK + 2 * padded), np.nan, np.float32)
    sums[:, 0] = rng.integers(1, 700, parts)
    sums[:, BLOCK : BLOCK + c] = numbers(rng, (parts, c), np.float32, 1, mean)
    sums[:, BLOCK + padded : BLOCK + padded + c] = rng.random((parts, c)) * sums[:, :1]
    return sums


@pytest.mark.parametrize(
    "c,groups,parts",
    [(128, 32, 100), (512, 32, 67), (96, 32, 1), (32, 32, 700), (24, 3, 40), (40, 1, 31), (512, 1, 9), (20, 5, 300)],
)
@pytest.mark.parametrize("mean", [0, 1000])
def test_merge(kernels, c, groups, parts, mean):
    rng = np.random.default_rng(c + parts)
    sums = random_parts(rng, c, parts, mean)
    gamma, beta = numbers(rng, c, np.float32), numbers(rng, c, np.float32)
    n = sums[:, 0].astype(np.longdouble)[:, None, None]
    means, m2 = (
        sums[:, first : first + c].astype(np.longdouble).reshape(parts, groups, -1)
        for first in (BLOCK, BLOCK + round_up(c))
    )
    count = n.sum() * (c // groups)
    centre = (n * means).sum((0, 2)) / count
    variance = (m2 + n * (means - centre[:, None]) ** 2).sum((0, 2)) / count
    eps = np.float32(1e-6)
    r = np.repeat(1 / np.sqrt(variance + eps), c // groups)
    want_scale, want_shift = r * gamma, beta - np.repeat(centre, c // groups) * r * gamma
    scale, shift = run_merge(kernels, sums, gamma, beta, groups, eps)
    close(scale, want_scale, 1.01 * E * np.abs(want_scale))
    close(shift, want_shift, 1.01 * E * np.abs(want_shift) + 1e-12 * (1 + mean))
    again = run_merge(kernels, sums, gamma, beta, groups, eps, seed=3)
    assert (scale.tobytes(), shift.tobytes()) == tuple(v.tobytes() for v in again)


def test_merge_of_one_constant(kernels):
    """No variance: eps alone."""
    sums = random_parts(np.random.default_rng(1), 32, 50)
    sums[:, BLOCK : BLOCK + 32], sums[:, BLOCK + 32 :] = 7, 0
    scale, shift = run_merge(kernels, sums, np.ones(32, np.float32), np.zeros(32, np.float32), 8, 0.25)
    np.testing.assert_array_equal((scale, shift), (np.full(32, 2), np.full(32, -14)))


def test_merge_keeps_nan_to_its_group(kernels):
    sums = random_parts(np.random.default_rng(2), 32, 50)
    sums[31, BLOCK + 9] = np.nan
    scale, shift = run_merge(kernels, sums, np.ones(32, np.float32), np.zeros(32, np.float32), 4, 1e-6)
    want = np.arange(32) // 8 == 1
    np.testing.assert_array_equal(np.isnan(scale), want)
    np.testing.assert_array_equal(np.isnan(shift), want)


# ---- pixel_norm ----


def run_pixel_norm(kernels, dtype, x, gamma, least, *, under=0, wider=0, grid=1, seed=1, first=0):
    """x: (pixels, c). (factor, scale); what lies around x's channels is NaN. first: where in a ring x begins."""
    memory, (pixels, c) = Memory(), x.shape
    held = memory.full((pixels, round_up(c) + wider), TYPES[dtype], np.nan, around=Memory.NAN)
    held[:, :c] = np.roll(x, first, axis=0)
    gamma = None if gamma is None else memory.copy(gamma, around=Memory.NAN)
    before = held.tobytes()
    factor, scale, shift = (memory.empty(n, np.float32) for n in (pixels, round_up(c), round_up(c)))
    args = PixelNormArgs(
        x=held, gamma=gamma, factor=factor, scale=scale, shift=shift, pixels=pixels, c=c, x_pitch=held.shape[1],
        least=least, under=under, first=first, ring_pixels=pixels if first else 0,
    )  # fmt: skip
    kernels.launch(f"vm_pixel_norm_{dtype}", (grid,), (THREADS,), args, seed=seed)
    memory.check()
    assert held.tobytes() == before and (scale[c:] == 0).all() and (shift == 0).all()
    return factor, scale[:c]


@every_type
@pytest.mark.parametrize("c", [3, 8, 16, 20, 64, 72, 96, 192, 384, 1040])
@pytest.mark.parametrize("pixels,grid", [(1, 1), (33, 1), (257, 3), (100, 70)])
def test_pixel_norm(kernels, dtype, c, pixels, grid):
    rng = np.random.default_rng(c + pixels)
    sizes = 10.0 ** rng.integers(-4, 3, (pixels, 1))
    x = (rng.standard_normal((pixels, c)) * sizes).astype(TYPES[dtype])
    x[::7] = 0
    gamma, least = numbers(rng, c, np.float32), np.float32(0.01)
    want = 1 / np.maximum(np.linalg.norm(x.astype(np.float64), axis=1), least)
    root = np.sqrt(c) * gamma.astype(np.float64)
    factor, scale = run_pixel_norm(kernels, dtype, x, gamma, least, wider=pixels % 2 * 16, grid=grid)
    close(factor, want, (c / 16 + 8) * E * want)
    close(scale, root, 1.01 * E * np.abs(root))
    assert (factor[::7] == 1 / least).all()
    by_mean, ones = run_pixel_norm(kernels, dtype, x, None, np.float32(0), under=np.float32(c * 1e-4), grid=grid)
    wanted = 1 / np.sqrt((x.astype(np.float64) ** 2).sum(1) + c * 1e-4)
    close(by_mean, wanted, (c / 16 + 8) * E * wanted)
    close(ones, np.full(c, np.sqrt(c)), 1.01 * E * np.sqrt(c))
    for how in ({"seed": 3}, {"first": pixels // 3}):
        again = run_pixel_norm(kernels, dtype, x, gamma, least, grid=grid + 1, **how)
        assert (factor.tobytes(), scale.tobytes()) == tuple(v.tobytes() for v in again)


@every_type
def test_pixel_norm_keeps_nan_to_its_pixel(kernels, dtype):
    x = np.full((70, 24), 2, TYPES[dtype])
    x[5, 23], x[40, 0] = np.nan, np.inf
    factor, _ = run_pixel_norm(kernels, dtype, x, np.ones(24, np.float32), 1e-12)
    assert np.isnan(factor[5]) and factor[40] == 0  # Inf / Inf is NaN on load
    assert np.isfinite(factor).sum() == 69 and len({v for v in factor.tolist() if v > 0}) == 1
