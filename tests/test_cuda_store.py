"""store (kernels/cuda/cuda.h), run by the emulator (tests/emulator), beside float64.

With e and u of cuda_kernels.py (E, UNIT):

- bias * bias_scale and two sums:           3 * e * (|raw| + |bias * bias_scale| + |add|) + u * |y|
- a part's sums are compared with the stored numbers. d: the largest distance from the mean, n: pixels. A thread's mean
  is rounded once, and at most 7 merges of lanes round it again: s = 8 * e * |mean|. Sums have n terms, of random signs
  and with a factor of 4 of room, about a number that is at most 2 d away.
        mean: s + 4 * sqrt(n) * e * 2 d        M2: 4 * sqrt(n) * e * n * (2 d)^2 + n * s * (2 d + s)

A sum of squares about zero, a pixel too many or a lane not merged is off by far more.
"""

import numpy as np
import pytest
from cuda_kernels import (
    BLOCK,
    FORMATS,
    LANES,
    LEAST,
    THREADS,
    TYPES,
    UNIT,
    E,
    InRing,
    Memory,
    StoreArgs,
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

kernels = built("store", "norm")


class Store:
    """One launch. What store has no business with was left alone."""

    def __init__(self, kernels):
        self.kernels = kernels

    def __call__(
        self, dtype, raw, bias, y_shape, *, row0=0, rows=None, add=None, in_place=False, pitch=None, add_pitch=None,
        format_="rows", part_pixels=64, stats=True, seed=1, rings=None, **more,
    ):  # fmt: skip
        """The rows' numbers (rows, w, c), the parts, and whether no flag was raised. rings: of y and add."""
        memory, t = Memory(), TYPES[dtype]
        h, w, c = y_shape
        padded, rows, planes = round_up(c), rows or h, format_ in TYPES
        parts, pitch, add_pitch = -(-rows * w // part_pixels), pitch or padded, add_pitch or padded
        ring, add_ring = (InRing(range(row0, row0 + rows), n) for n in rings or (h, h))
        if rings:
            more |= {"y_ring": ring.args, "add_ring": (ring if in_place else add_ring).args}
        shape = (c, h, w) if planes else (ring.rows, w, pitch if format_ == "rows" else c)
        y = memory.empty(shape, t if format_ == "rows" else TYPES.get(format_, np.uint8))
        raw, bias = memory.copy(raw), None if bias is None else memory.copy(np.pad(bias, (0, padded - c)))
        flags, sums = memory.copy(np.array([4], np.uint32)), memory.empty((parts, BLOCK + 2 * padded), np.float32)
        args = StoreArgs(
            raw=raw, bias=bias, y=y, flags=flags, stats=sums if stats else None, y_h=h, y_w=w, y_c=c, y_pitch=pitch,
            row0=row0, rows=rows, channels=padded, part_pixels=part_pixels, format=FORMATS[format_],
            **{"clamp": (c, -30, 20), "bias_scale": 1, "out_scale": 1, **more},
        )  # fmt: skip
        if add is not None:
            held = y if in_place else memory.empty((add_ring.rows, w, add_pitch), t)
            held[:, :, :padded] = (ring if in_place else add_ring).hold(add)
            args.add, args.add_pitch = held.ctypes.data, pitch if in_place else add_pitch
        by_rows = y.swapaxes(0, 1) if planes else y  # (h, ...)
        others = np.delete(np.arange(len(by_rows)), ring.at)
        before = by_rows[others].tobytes(), raw.tobytes()
        self.kernels.launch(f"vm_store_{dtype}", (parts, -(-padded // 8 // LANES)), (THREADS,), args, seed=seed)
        memory.check()
        assert (by_rows[others].tobytes(), raw.tobytes()) == before
        assert untouched(sums[:, 1:BLOCK] if stats else sums) and flags[0] in (4, 5)
        out = by_rows[ring.at]
        if format_ == "rows":
            assert untouched(out[:, :, padded:])
            out = out[:, :, :padded]
        return out.swapaxes(1, 2) if planes else out, sums, flags[0] == 4


@pytest.fixture(scope="module")
def store(kernels):
    return Store(kernels)


def unfold(raw, rows, w):
    """(rows, w, channels) of raw [rows / 2 + 1][w / 2 + 1][4][channels], as cuda.h says for up."""
    r, q = np.arange(rows)[:, None], np.arange(w)[None, :]
    return raw[r // 2 + r % 2, q // 2 + q % 2, 2 * (r % 2) + q % 2]


def check_parts(sums, stored, part_pixels):
    """stored: (rows, w, padded) numbers as they lie in y."""
    pixels = stored.reshape(-1, stored.shape[2]).astype(np.float64)
    padded = pixels.shape[1]
    for part, i in zip(sums.astype(np.float64), range(0, len(pixels), part_pixels), strict=True):
        own = pixels[i : i + part_pixels]
        n, mean = len(own), own.mean(0)
        far, rounded = 2 * np.abs(own - mean).max(0), 8 * E * np.abs(mean)
        m2_far = 4 * np.sqrt(n) * E * n * far**2 + n * rounded * (far + rounded)
        assert part[0] == n
        close(part[BLOCK : BLOCK + padded], mean, rounded + 4 * np.sqrt(n) * E * far + 1e-30)
        close(part[BLOCK + padded :], ((own - mean) ** 2).sum(0), m2_far + 1e-30)


def random_store(store, rng, dtype, y_shape, *, row0=0, rows=None, up=0, add=False, bias_scale=1.0, mean=0.0, **more):
    """Launches with random numbers; (want, tolerance) of the sums, and what came."""
    t, (h, w, c) = TYPES[dtype], y_shape
    padded, rows = round_up(c), rows or h
    raw = numbers(rng, (rows // 2 + 1, w // 2 + 1, 4, padded) if up else (rows, w, padded), t, 1, mean)
    raw[..., c:] = 0
    bias = numbers(rng, c, np.float32)
    added = numbers(rng, (h, w, padded), t, 2) * np.array(np.arange(padded) < c, t) if add else None
    got = store(dtype, raw, bias, y_shape, row0=row0, rows=rows, add=added, up=up, bias_scale=bias_scale, **more)
    flat = (unfold(raw, rows, w) if up else raw).astype(np.float64)
    terms = [flat, np.pad(bias.astype(np.float64) * bias_scale, (0, padded - c))]
    terms += [added[row0 : row0 + rows].astype(np.float64)] if add else []
    want = terms[0] + sum(terms[1:])
    return want, 3 * E * sum(np.abs(term) for term in terms), got


#        y: h, w, c       how
STORES = {
    "plain": ((6, 7, 48), {}),
    "stripe": ((9, 5, 80), {"row0": 2, "rows": 3, "bias_scale": 0.125}),
    "last stripe": ((9, 5, 144), {"row0": 5, "rows": 4, "add": True}),
    "few channels": ((5, 6, 3), {"add": True}),
    "wider pitch": ((4, 9, 32), {"pitch": 80, "add": True, "add_pitch": 48}),
    "in place": ((7, 9, 96), {"add": True, "in_place": True}),
    "in place, wider": ((5, 3, 128), {"pitch": 256, "add": True, "in_place": True, "row0": 1, "rows": 3}),
    "parts": ((11, 13, 16), {"part_pixels": 50}),
    "large parts": ((31, 29, 64), {"part_pixels": 700, "add": True}),
    "parts of one": ((2, 3, 48), {"part_pixels": 1}),
    "up": ((12, 10, 48), {"up": 1, "row0": 4, "rows": 6, "add": True}),
    "up, whole": ((14, 18, 16), {"up": 1, "part_pixels": 40}),
    "up, narrow": ((40, 2, 16), {"up": 1}),
    "one pixel": ((1, 1, 16), {}),
    "many channels": ((2, 5, 1040), {"part_pixels": 7}),
    "q, k and v": ((1, 9, 1536), {}),
}


@every_type
@pytest.mark.parametrize("case", STORES)
def test_store(store, dtype, case):
    y_shape, how = STORES[case]
    for stats in (True, False):
        rng = np.random.default_rng(len(case))
        want, tolerance, (y, sums, finite) = random_store(store, rng, dtype, y_shape, stats=stats, **how)
        close(y, want, tolerance + np.abs(want) * UNIT[dtype] + LEAST[dtype])
        assert finite
        if stats:
            check_parts(sums, y, how.get("part_pixels", 64))


@every_type
@pytest.mark.parametrize("how", [{}, {"add": True}, {"add": True, "in_place": True}, {"add": True, "up": 1}], ids=str)
def test_store_into_a_ring(store, dtype, how):
    """Rows 6 to 9 of y lie in places 1 to 4, or 6, 0, 1 and 2; those of the residual elsewhere."""
    for rings in ((5, 6), (7, 4)):
        rng = np.random.default_rng(rings)
        stripe = {"row0": 6, "rows": 4, "pitch": 64, "rings": rings, "part_pixels": 11}
        want, tolerance, (y, sums, _) = random_store(store, rng, dtype, (12, 6, 48), **stripe, **how)
        close(y, want, tolerance + np.abs(want) * UNIT[dtype] + LEAST[dtype])
        check_parts(sums, y, 11)


@every_type
@pytest.mark.parametrize("seed", range(6))
def test_store_of_any_size(store, dtype, seed):
    rng = np.random.default_rng(seed)
    h, w, c = (int(n) for n in rng.integers((1, 1, 1), (20, 20, 200)))
    row0 = int(rng.integers(0, h))
    how = {"row0": row0, "rows": int(rng.integers(1, h - row0 + 1)), "part_pixels": int(rng.integers(1, 90))}
    want, tolerance, (y, sums, _) = random_store(store, rng, dtype, (h, w, c), add=seed % 2 == 1, seed=seed + 1, **how)
    close(y, want, tolerance + np.abs(want) * UNIT[dtype] + LEAST[dtype])
    check_parts(sums, y, how["part_pixels"])


@every_type
@every_format
@pytest.mark.parametrize("c", [3, 8, 19])
def test_store_of_pixels(store, dtype, format_, c):
    for how in ({}, {"row0": 2, "rows": 4, "up": 1}, {"row0": 1, "rows": 2, "add": True}):
        first = c // 2 if format_ != "u8" else c
        how = {"clamp": (first, -30, 20), **how}
        spread = 20 if format_ != "u8" else 0.6  # so that some are clamped
        want, tolerance, (y, _, finite) = random_store(
            store, np.random.default_rng(c), dtype, (6, 8, c), format_=format_, stats=False, mean=spread - 1, **how
        )
        want, tolerance = want[..., :c], tolerance[..., :c]
        want[..., first:] = np.clip(want[..., first:], -30, 20)
        assert finite
        if format_ == "u8":
            assert (y == 255).any() and (y < 255).any()
            close(y, np.clip((want + 1) * 127.5, 0, 255), 0.5 + 127.5 * (tolerance + 2 * E))
        else:
            close(y, want, tolerance + np.abs(want) * UNIT[format_] + LEAST[format_])


def test_store_rounds_bytes_to_even(store):
    raw = np.zeros((1, 257, 16), np.float32)
    raw[0, :, 0] = np.arange(-1, 256) / 127.5 - 1 + 0.5 / 127.5
    bias = np.zeros(1, np.float32)
    y, _, _ = store("f32", raw, bias, (1, 257, 1), format_="u8", stats=False)
    v = (raw[0, :, 0] + np.float32(1)) * np.float32(127.5)
    np.testing.assert_array_equal(y[0, :, 0], np.clip(np.rint(v), 0, 255))
    assert (v % 1 == 0.5).sum() > 50


@every_type
def test_store_of_a_large_mean(store, dtype):
    """1000 +- 1: a sum of squares about zero would be off by up to 1000^2 e = 6 %. Of the 128 lanes with 8 pixels each
    the means differ by 1 / sqrt(8) and are rounded by 1000 e, which moves M2 by at most 2 * 0.4 * 6e-5 of itself."""
    rng = np.random.default_rng(5)
    _, _, (y, sums, _) = random_store(store, rng, dtype, (32, 32, 16), part_pixels=1000, mean=1000)
    pixels = y.reshape(-1, 16).astype(np.float64)[:1000]
    assert pixels.var(0).max() > 0.5
    np.testing.assert_allclose(sums[0, BLOCK : BLOCK + 16], pixels.mean(0), rtol=1e-6)
    np.testing.assert_allclose(sums[0, BLOCK + 16 :], pixels.var(0) * 1000, rtol=5e-5)


@every_type
def test_store_of_an_outlier_first(store, dtype):
    """The number that others are compared with is the worst there is."""
    raw = numbers(np.random.default_rng(6), (20, 20, 16), TYPES[dtype])
    raw[0, :13] = 1000
    y, sums, _ = store(dtype, raw, np.zeros(16, np.float32), (20, 20, 16), part_pixels=200)
    pixels = y.reshape(-1, 16).astype(np.float64)[:200]
    np.testing.assert_allclose(sums[0, BLOCK + 16 :], ((pixels - pixels.mean(0)) ** 2).sum(0), rtol=1e-5)


@every_type
def test_store_is_repeatable(store, dtype):
    """Whatever order the threads come in."""
    seen = set()
    for seed in range(1, 6):
        rng = np.random.default_rng(7)
        _, _, (y, sums, _) = random_store(store, rng, dtype, (10, 9, 48), add=True, seed=seed, part_pixels=33)
        seen.add((y.tobytes(), sums.tobytes()))
    assert len(seen) == 1


@every_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_store_says_what_is_not_finite(store, dtype, bad):
    raw, bias = np.ones((5, 7, 48), TYPES[dtype]), np.zeros(40, np.float32)
    raw[3, 4, 17] = bad
    y, sums, finite = store(dtype, raw, bias, (5, 7, 40), part_pixels=20)
    assert not finite and not np.isfinite(y.astype(np.float32)[3, 4, 17])
    np.testing.assert_array_equal(y[3, 4, 17].astype(np.float32), bad)
    assert np.isfinite(y.astype(np.float32)).sum() == y.size - 1
    assert np.isnan(sums[1, BLOCK + 48 + 17]) and np.isfinite(sums[:, BLOCK:]).sum() == 2 * 96 - 2
    for format_ in ("f32", "f16", "bf16", "u8"):
        y, _, finite = store(dtype, raw, bias, (5, 7, 40), format_=format_, stats=False)
        want = bad if format_ != "u8" else 255 if bad > 0 else 0
        np.testing.assert_array_equal(y[3, 4, 17].astype(np.float32), want)
        assert not finite
    y, _, finite = store(dtype, raw, bias, (5, 7, 40), format_="f32", stats=False, clamp=(10, -30, 20))
    np.testing.assert_array_equal(y[3, 4, 17], bad if np.isnan(bad) else np.clip(bad, -30, 20))
    assert finite != np.isnan(bad)


@pytest.mark.parametrize("dtype,large", [("f16", 40000), ("bf16", 3e38), ("f32", 3e38)])
def test_store_says_what_is_too_large(store, dtype, large):
    raw = np.full((2, 3, 16), large, TYPES[dtype])
    bias = np.zeros(16, np.float32)
    assert store(dtype, raw, bias, (2, 3, 16))[2]
    y, _, finite = store(dtype, raw, bias, (2, 3, 16), add=raw.copy())
    assert not finite and np.isposinf(y.astype(np.float32)).all()


@every_type
def test_store_with_relu_and_without_a_bias(store, dtype):
    rng, t, shape = np.random.default_rng(4), TYPES[dtype], (5, 7, 40)
    raw, add = (numbers(rng, (5, 7, 48), t) for _ in range(2))
    raw[..., 40:], add[..., 40:] = 0, 0
    y, sums, finite = store(dtype, raw, None, shape, add=add, relu=1, part_pixels=20)
    want = np.maximum(raw.astype(np.float64) + add.astype(np.float64), 0)
    close(y, want, want * (UNIT[dtype] + E) + LEAST[dtype])
    check_parts(sums, y, 20)
    assert finite


@every_type
@every_format
def test_store_scales_the_users_pixels(store, dtype, format_):
    raw = numbers(np.random.default_rng(5), (5, 7, 16), TYPES[dtype])
    exact = raw[..., :3].astype(np.float64) * 2 - 1
    y, _, _ = store(
        dtype, raw, np.zeros(3, np.float32), (5, 7, 3), format_=format_, stats=False, out_scale=2, out_shift=-1
    )
    if format_ == "u8":
        assert np.abs(y.astype(np.float64) - np.clip((exact + 1) * 127.5, 0, 255)).max() <= 0.5 + 1e-3
    else:
        close(y, exact, 4 * E * (np.abs(exact) + 1) + UNIT[format_] * np.abs(exact) + LEAST[format_])


def test_store_beyond_2_to_the_32(store):
    t, pitch, w = TYPES["f16"], 1 << 22, 1040
    y, raw = far(w, pitch, t), Memory().copy(numbers(np.random.default_rng(2), (w, 16), t))
    y[:, :16] = 1
    memory = Memory()
    bias, flags = memory.copy(np.zeros(16, np.float32)), memory.copy(np.zeros(1, np.uint32))
    args = StoreArgs(
        raw=raw, bias=bias, add=y, y=y, flags=flags, y_h=1, y_w=w, y_c=16, y_pitch=pitch, add_pitch=pitch, rows=1,
        channels=16, part_pixels=300, clamp=(16, 0, 0), out_scale=1,
    )  # fmt: skip
    store.kernels.launch("vm_store_f16", (4,), (THREADS,), args)
    np.testing.assert_array_equal(y[:, :16], (raw.astype(np.float32) + 1).astype(t))


def test_store_then_merge_is_group_norm(kernels, store):
    """From rows to scale and shift, over two stripes, beside the statistics of the whole tensor."""
    rng, shape, gamma = np.random.default_rng(3), (13, 11, 64), np.ones(64, np.float32)
    runs = [random_store(store, rng, "f32", shape, row0=r, rows=n, mean=3)[2] for r, n in ((0, 8), (8, 5))]
    sums = np.concatenate([sums for _, sums, _ in runs])
    groups = np.concatenate([y for y, _, _ in runs]).astype(np.float64).reshape(-1, 8, 8)
    scale, shift = run_merge(kernels, sums, gamma, 0 * gamma, 8, 1e-6)
    want = 1 / np.sqrt(groups.var((0, 2)) + 1e-6)
    np.testing.assert_allclose(scale, np.repeat(want, 8), rtol=1e-6)
    np.testing.assert_allclose(shift, np.repeat(-groups.mean((0, 2)) * want, 8), rtol=1e-6)
