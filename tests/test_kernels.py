"""Every operation of every instruction set, and whole passes, beside float64.

Tolerances. eps = 2^-24 is half a float32 step. A sum of n products in sequence is off by at most
(n + 2) * eps * sum|terms| (Higham, Accuracy and Stability, 3.1); random signs make it about sqrt(n), so the bounds
below hold with room and still catch one wrong or missing term, which is of the size of a term and not of its rounding.
"""

import numpy as np
import pytest
from cases import ATTENTIONS, CONVS, EPS, FACTOR, NUMBERS, STEP, as_float, as_kept, guarded, on, pairs_of, small
from engine import BACKENDS

from vaemem import _core, _kernels

pytestmark = pytest.mark.core

every_backend = pytest.mark.parametrize("backend", BACKENDS)


def rng(seed=0):
    return np.random.default_rng(seed)


# ---- gemm ----

MAX_PIXELS = {"avx512": 14, "avx2": 6, "sse": 6, "neon": 6, "ref": 4}
GEMM = [
    (backend, pixels, blocks, batches, depth, way)
    for backend in BACKENDS
    for pixels in (1, 2, 3, 4, 5, 6, 8, 13, 14)
    if pixels <= MAX_PIXELS[backend]
    for blocks in (1, 2)
    for batches, depth, way in ((9, 16, "near"), (1, 3, "near"), (4, 16, "stride 2"), (1, 1, "near"))
]


@pytest.mark.parametrize("backend,pixels,blocks,batches,depth,way", GEMM)
def test_gemm(backend, pixels, blocks, batches, depth, way):
    r = rng(pixels * 100 + blocks * 10 + depth)
    x_pixel = {"near": 16, "stride 2": 32}[way]
    run = 1024  # floats between batches
    x = r.standard_normal(batches * run).astype(np.float32)
    offsets = (r.permutation(batches) * run).astype(np.intp)
    w_block = batches * depth * 16 + 16
    w = r.standard_normal(2 * w_block).astype(np.float32)
    bias, add = r.standard_normal(32).astype(np.float32), r.standard_normal(2 * 20 * 16).astype(np.float32)
    want = np.zeros((blocks, pixels, 16))
    size = np.zeros_like(want)
    for o in range(blocks):
        for p in range(pixels):
            for b in range(batches):
                for k in range(depth):
                    at = o * w_block + (b * depth + k) * 16
                    term = np.float64(x[offsets[b] + p * x_pixel + k]) * w[at : at + 16].astype(np.float64)
                    want[o, p] += term
                    size[o, p] += abs(term)
            want[o, p] += bias[o * 16 : o * 16 + 16].astype(np.float64) + add[(o * 20 + p) * 16 : (o * 20 + p + 1) * 16]
    y, check = guarded(2 * 20 * 16)
    y[:] = 777
    _kernels.gemm(backend, y, x, offsets, w, bias, add, (pixels, blocks, depth, x_pixel, w_block, 16, 320, 16, 320))
    check()
    got = y.reshape(2, 20, 16)
    bound = (batches * depth + 4) * EPS * (size + np.abs(want) + 4)
    assert (np.abs(got[:blocks, :pixels] - want) <= bound).all()
    assert (got[blocks:] == 777).all() and (got[:blocks, pixels:] == 777).all()
    again = add.copy()  # add may be y itself
    _kernels.gemm(
        backend, again, x, offsets, w, bias, again, (pixels, blocks, depth, x_pixel, w_block, 16, 320, 16, 320)
    )
    assert np.array_equal(again.reshape(2, 20, 16)[:blocks, :pixels], got[:blocks, :pixels])


@every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gemm_passes_nonfinite_on(backend, bad):
    x, w, y = np.ones(64, np.float32), np.ones(256, np.float32), np.zeros(64, np.float32)
    x[16] = bad  # the second pixel
    _kernels.gemm(backend, y, x, np.zeros(1, np.intp), w, None, None, (3, 1, 16, 16, 0, 0, 0, 16, 0))
    y = y.reshape(4, 16)
    assert (y[0] == 16).all() and (y[2] == 16).all() and not np.isfinite(y[1]).any()


# ---- load ----

NONE, SILU, RELU, BOUND = range(4)  # vm_act


def activated(act, t):
    """In float64."""
    with np.errstate(over="ignore"):
        return [t, t / (1 + np.exp(-t)), np.maximum(t, 0), 3 * np.tanh(t / 3)][act]


@every_backend
@pytest.mark.parametrize("pixels", [1, 2, 7, 64])
def test_load(backend, pixels):
    r = rng(pixels)
    x = (r.standard_normal((pixels, 16)) * 20).astype(np.float32)
    x.flat[:6] = [0, -0.0, 90, -90, 1e-30, 300]
    scale, shift = r.standard_normal((2, 16)).astype(np.float32)
    for act in range(4):
        for affine in (False, True):
            y, check = guarded(pixels * 16)
            _kernels.load(backend, y, None, x.ravel(), scale if affine else None, shift if affine else None, act)
            check()
            t = x.astype(np.float64)
            # the affine is one or two roundings of numbers up to |x * scale| + |shift|; SiLU's slope is at most 1.1
            slack = 3 * EPS * (np.abs(t * scale) + np.abs(shift)) if affine else 0
            t = t * scale + shift if affine else t
            want = activated(act, t)
            # e^x is good to 2 eps of itself, 1 + and / add one each; below e^-87 results are under 1e-36; the bound is
            # made of numbers up to 6
            size = 6 if act == BOUND else np.abs(want)
            assert (np.abs(y.reshape(pixels, 16) - want) <= 1.1 * slack + 6 * EPS * size + 1e-35).all()


@every_backend
@pytest.mark.parametrize("pixels", [1, 2, 7, 64])
def test_load_with_a_factor_for_each_pixel(backend, pixels):
    r = rng(pixels)
    x, factor = r.standard_normal((pixels, 16)).astype(np.float32), r.uniform(0, 3, pixels).astype(np.float32)
    scale, shift = r.standard_normal((2, 16)).astype(np.float32)
    for kind in ("float32", "float16", "bfloat16"):
        rows = as_kept(x, kind)
        y, check = guarded(pixels * 16)
        _kernels.load(backend, y, None, rows.ravel(), scale, shift, False, factor)
        check()
        t = as_float(rows).reshape(pixels, 16).astype(np.float64) * factor[:, None] * scale
        assert (np.abs(y.reshape(pixels, 16) - (t + shift)) <= 3 * EPS * (np.abs(t) + np.abs(shift))).all()


@every_backend
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_squares_are_added(backend, kind):
    x = as_kept((rng(5).standard_normal((7, 16)) * 30).astype(np.float32), kind)
    sums, check = guarded(7 * 16)
    sums[:] = before = np.arange(7 * 16, dtype=np.float32)
    _kernels.squares(backend, sums, x.ravel())
    check()
    want = before + as_float(x).ravel().astype(np.float64) ** 2
    assert (np.abs(sums - want) <= 2 * EPS * want).all()
    x.flat[3], x.flat[20] = (0x7FC0, 0x7F80) if kind == "bfloat16" else (np.nan, np.inf)
    _kernels.squares(backend, sums, x.ravel())
    assert np.isnan(sums[3]) and sums[20] == np.inf and np.isfinite(np.delete(sums, [3, 20])).all()


@every_backend
def test_load_in_place_and_nonfinite(backend):
    x = rng().standard_normal(160).astype(np.float32)
    y = np.empty_like(x)
    _kernels.load(backend, y, None, x, None, None, True)
    _kernels.load(backend, x, None, x, None, None, True)
    assert np.array_equal(x, y)
    x[3], x[50] = np.nan, np.inf
    _kernels.load(backend, y, None, x, None, None, True)
    assert np.isnan(y[3]) and y[50] == np.inf and np.isfinite(np.delete(y, [3, 50])).all()


# ---- rows of halves ----

HALVES = ["float16", "bfloat16"]
every_half = pytest.mark.parametrize("dtype", HALVES)


def all_halves(dtype):
    """Every number of 16 bits, as kernels take it and as float32, without NaN of float16 that are not quiet."""
    bits = np.arange(65536, dtype=np.uint16)
    rows = bits.view(np.float16) if dtype == "float16" else bits
    return rows, as_float(rows)


@every_backend
@every_half
def test_every_half_is_loaded_exactly(backend, dtype):
    rows, want = all_halves(dtype)
    y, check = guarded(65536)
    _kernels.load(backend, y, None, rows, None, None, False)
    check()
    assert np.array_equal(y, want, equal_nan=True)


@every_backend
@every_half
def test_store_rounds_as_numpy_does(backend, dtype):
    """Every number of 16 bits, what lies in the middle of two and beside that, what is too large, and NaN."""
    exact = all_halves(dtype)[1]
    exact = np.sort(exact[np.isfinite(exact)]).astype(np.float64)
    middle = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    least = np.float32(2.0**-149)
    near = [middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, -np.float32(np.inf)), exact]
    odd = [np.inf, -np.inf, np.nan, 65519.9, 65520, -65520, 3.4e38, -3.4e38, least, -least, 0, -0.0]
    x = np.concatenate([*near, odd]).astype(np.float32)
    x = np.pad(x, (0, -len(x) % 16))
    with np.errstate(over="ignore"):
        want = as_kept(x, dtype)
    y = np.empty_like(want)
    assert _kernels.store(backend, y, x, 1.0, None) is False
    nan = np.isnan(x)
    assert np.array_equal(y.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
    assert np.isnan(as_float(y)[nan]).all()


@every_backend
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_store_adds_and_says_whether_all_is_finite(backend, dtype):
    x, residual = (rng(i).standard_normal(23 * 16).astype(np.float32) for i in range(2))
    add = as_kept(residual, dtype)
    y, check = guarded(x.size, add.dtype.type)
    assert _kernels.store(backend, y, x, 0.25, add) is True
    check()
    want = x.astype(np.float64) / 4 + as_float(add)
    assert (np.abs(as_float(y) - want) <= (STEP[dtype] + 2 * EPS) * (np.abs(x) + np.abs(as_float(add)))).all()
    _kernels.store(backend, add, x, 0.25, add)  # add may be y
    assert np.array_equal(add, y)
    kept, spoilt = np.maximum(as_float(y), 0), x.copy()
    spoilt[5] = np.nan
    assert _kernels.store(backend, y, spoilt, 0.25, as_kept(residual, dtype), True) is False
    assert np.isnan(as_float(y)[5]) and np.array_equal(np.delete(as_float(y), 5), np.delete(kept, 5))
    for bad in (np.nan, np.inf, -np.inf):
        x[77] = bad
        assert _kernels.store(backend, y, x, 0.25, None) is False
        assert not np.isfinite(as_float(y)[77]) and np.isfinite(np.delete(as_float(y), 77)).all()


@every_backend
@every_half
def test_stats_of_halves_are_those_of_their_numbers(backend, dtype):
    x = as_kept((rng().standard_normal((5, 7 * 16)) * 3 + 1).astype(np.float32), dtype)
    mean, m2, mean32, m232 = np.empty((4, 16), np.float32)
    _kernels.stats(backend, mean, m2, x, 5, 7 * 16, 7)
    _kernels.stats(backend, mean32, m232, as_float(x), 5, 7 * 16, 7)
    assert np.array_equal(mean, mean32) and np.array_equal(m2, m232)


PAIRS = [name for name, usable in _core.backends("bfloat16") if usable and pairs_of(name, "bfloat16", "highest")]


@pytest.mark.parametrize("backend", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("pixels", [1, 9])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", ["copied", "scaled", "silu", "scaled silu", "scaled pixels", "scaled silu pixels",
                                 "relu", "scaled relu", "bound", "scaled bound"])  # fmt: skip
def test_load_pairs(backend, dtype, pixels, split, how):
    """Rounded to bfloat16, in half of each pixel's 32 places; and what that leaves, rounded again."""
    x = (rng().standard_normal(pixels * 16) * 8).astype(np.float32)
    x[:12] = 0, -0.0, 90, -90, 2.0**-14, -60, 300, -300, 1, -1, 88.5, -88.5
    x = as_kept(x, dtype)
    scale, shift = rng(1).standard_normal((2, 16)).astype(np.float32)
    (y, check), (rest, check_rest) = guarded(pixels * 32, np.uint16), guarded(pixels * 32, np.uint16)
    affine = (scale, shift) if "scaled" in how else (None, None)
    factor = rng(2).uniform(0, 2, pixels).astype(np.float32) if "pixels" in how else None
    act = next((n for n, name in enumerate(("", "silu", "relu", "bound")) if n and name in how), NONE)
    _kernels.load(backend, y, rest if split else None, x, *affine, act, factor)
    check(), check_rest()
    assert (y.reshape(pixels, 32)[:, 16:] == 12345).all()
    t = as_float(x).astype(np.float64).reshape(pixels, 16)
    t = t if factor is None else t * factor[:, None]
    slack = 0.0
    if "scaled" in how:  # one or two roundings of numbers up to |x * scale| + |shift|; SiLU's slope is at most 1.1
        slack = 3.3 * EPS * (np.abs(t * scale) + np.abs(shift))
        t = t * scale + shift
    want = activated(act, t)
    high = as_float(y).reshape(pixels, 32)[:, :16]
    # half a step of what is kept, and SiLU within 2^-12 of itself, or 2^-20 where the rest is wanted, but for what is
    # under 1e-36: there e^x overflows, and below 2^-126 bfloat16 may be zero
    of_silu = (2.0**-20 if split else 2.0**-12) if act == SILU else 0
    slack += 6 * 2.0**-20 if act == BOUND else 0
    assert (np.abs(high - want) <= (STEP["bfloat16"] + of_silu) * np.abs(want) + slack + 1e-36).all()
    if split:
        low = as_float(rest).reshape(pixels, 32)[:, :16]
        assert (np.abs(high + low - want) <= (FACTOR[3] + of_silu) * np.abs(want) + slack + 1e-36).all()


@pytest.mark.parametrize("backend", PAIRS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_load_pairs_passes_nonfinite_on(backend, split, silu):
    x = rng().standard_normal(48).astype(np.float32)
    x[[3, 20, 40]] = np.nan, np.inf, -np.inf
    y, rest = np.empty(96, np.uint16), np.empty(96, np.uint16)
    _kernels.load(backend, y, rest if split else None, x, None, None, silu)
    high = as_float(y).reshape(3, 32)[:, :16].ravel()
    assert np.isnan(high[3]) and high[20] == np.inf and not np.isfinite(high[40])
    assert np.isfinite(np.delete(high, [3, 20, 40])).all()


# ---- stats, softmax, rescale ----


@every_backend
@pytest.mark.parametrize("rows,pixels,offset", [(1, 1, 0), (1, 3, 0), (5, 7, 100.0), (20, 64, -1000.0)])
def test_stats(backend, rows, pixels, offset):
    row = pixels * 16 + 48
    x = (rng(rows).standard_normal(rows * row) + offset).astype(np.float32)
    (mean, check_mean), (m2, check_m2) = guarded(16), guarded(16)
    _kernels.stats(backend, mean, m2, x, rows, row, pixels)
    check_mean(), check_m2()
    inside = x.reshape(rows, row)[:, : pixels * 16].reshape(-1, 16).astype(np.float64)
    n = len(inside)
    off = (n + 1) * EPS * np.abs(inside).mean(0)  # of the mean
    assert (np.abs(mean - inside.mean(0)) <= off + 1e-30).all()
    want = ((inside - inside.mean(0)) ** 2).sum(0)
    # deviations are taken from the rounded mean: n * off^2 more, and each difference and sum rounds
    assert (np.abs(m2 - want) <= n * off**2 + 2 * (n + 3) * EPS * want + n * (EPS * abs(offset)) ** 2 + 1e-30).all()


@every_backend
def test_softmax_in_steps(backend):
    s = (rng().standard_normal((300, 16)) * 30).astype(np.float32)
    top, total, keep = np.full(16, -np.inf, np.float32), np.zeros(16, np.float32), np.zeros(16, np.float32)
    weights = np.zeros((0, 16))
    for piece in np.split(s, [1, 20, 21, 200]):
        p = piece.ravel().copy()
        _kernels.softmax(backend, p, 0.125, top, total, keep)
        weights = np.concatenate([weights * keep, p.reshape(-1, 16)])
    t = s.astype(np.float64) * 0.125
    want = np.exp(t - t.max(0))
    # each weight is e^(rounded difference): |score| * eps, then 2 eps per exponential, at most 6 of them in a row
    assert (np.abs(weights - want) <= (2 * np.abs(t).max() + 12) * EPS * want + 1e-35).all()
    assert np.allclose(total, want.sum(0), rtol=400 * EPS)
    assert np.array_equal(top, (s * np.float32(0.125)).max(0))


@every_backend
def test_softmax_keeps_nan(backend):
    s = np.zeros((4, 16), np.float32)
    s[2, 5] = np.nan
    top, total, keep = np.full(16, -np.inf, np.float32), np.zeros(16, np.float32), np.zeros(16, np.float32)
    _kernels.softmax(backend, s.reshape(-1), 1.0, top, total, keep)
    assert np.isnan(total[5]) and np.isfinite(np.delete(total, 5)).all()


@every_backend
def test_rescale(backend):
    x, keep = rng().standard_normal((9, 16)).astype(np.float32), rng(1).standard_normal(16).astype(np.float32)
    want = x * keep
    _kernels.rescale(backend, x.reshape(-1), keep)
    assert np.array_equal(x, want)


@every_backend
def test_transpose(backend):
    bits = rng().integers(0, 2**32, (16, 16), np.uint32)  # any bits, NaNs too: numbers are moved, not read
    y, check = guarded(256)
    _kernels.transpose(backend, y, bits.view(np.float32).reshape(-1))
    check()
    assert np.array_equal(y.view(np.uint32).reshape(16, 16), bits.T)


# ---- whole passes ----


# Who multiplies floats computes float32 at any precision as the highest.
WAYS = [
    (backend, *numbers)
    for numbers in NUMBERS
    for backend, usable in _core.backends(*numbers)
    if usable and (numbers[1] == "highest" or pairs_of(backend, *numbers))
]


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("case", small(CONVS + ATTENTIONS), ids=str)
def test_pass(case, way):
    backend, *numbers = way
    results = []
    for threads, by_task in ((1, False), (3, True)):
        run = on(case, backend, threads, 1, *numbers, by_task=by_task)
        run.run()
        run.check()
        results.append(run.result)
    assert results[0] == results[1], "threads, or transforming weights by task, changed the result"
