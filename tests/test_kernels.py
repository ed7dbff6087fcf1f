"""Every operation of every instruction set, and whole passes, beside float64.

Tolerances. eps = 2^-24 is half a float32 step. A sum of n products in sequence is off by at most
(n + 2) * eps * sum|terms| (Higham, Accuracy and Stability, 3.1); random signs make it about sqrt(n), so the bounds
below hold with room and still catch one wrong or missing term, which is of the size of a term and not of its rounding.
"""

import numpy as np
import pytest
from engine import BACKENDS, from_rows, pack, pad16, to_rows, up16

from vaemem import _core

EPS = 2.0**-24
GUARD = 32  # floats on either side of every output that must keep their value
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def rng(seed=0):
    return np.random.default_rng(seed)


def guarded(n):
    """An output of n floats between guards, and a check that the guards were kept."""
    whole = np.full(n + 2 * GUARD, 12345.0, np.float32)
    inner = whole[GUARD:-GUARD]

    def check():
        assert (whole[:GUARD] == 12345).all() and (whole[-GUARD:] == 12345).all()

    return inner, check


# ---- gemm ----

MAX_PIXELS = {"avx512": 14, "avx2": 6, "ref": 4}
GEMM = [
    (pixels, blocks, batches, depth, way)
    for pixels in (1, 2, 3, 4, 5, 6, 8, 13, 14)
    for blocks in (1, 2)
    for batches, depth, way in ((9, 16, "near"), (1, 3, "near"), (4, 16, "stride 2"), (2, 7, "across"), (1, 1, "near"))
]


@every_backend
@pytest.mark.parametrize("pixels,blocks,batches,depth,way", GEMM)
def test_gemm(backend, pixels, blocks, batches, depth, way):
    if pixels > MAX_PIXELS[backend]:
        pytest.skip(f"{backend} takes {MAX_PIXELS[backend]} pixels at most")
    r = rng(pixels * 100 + blocks * 10 + depth)
    x_pixel, x_step = {"near": (16, 1), "stride 2": (32, 1), "across": (1, 16)}[way]
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
                    term = np.float64(x[offsets[b] + p * x_pixel + k * x_step]) * w[at : at + 16].astype(np.float64)
                    want[o, p] += term
                    size[o, p] += abs(term)
            want[o, p] += bias[o * 16 : o * 16 + 16].astype(np.float64) + add[(o * 20 + p) * 16 : (o * 20 + p + 1) * 16]
    y, check = guarded(2 * 20 * 16)
    y[:] = 777
    _core.kernel_gemm(
        backend, y, x, offsets, w, bias, add, (pixels, blocks, depth, x_pixel, x_step, w_block, 16, 320, 16, 320)
    )
    check()
    got = y.reshape(2, 20, 16)
    bound = (batches * depth + 4) * EPS * (size + np.abs(want) + 4)
    assert (np.abs(got[:blocks, :pixels] - want) <= bound).all()
    assert (got[blocks:] == 777).all() and (got[:blocks, pixels:] == 777).all()
    again = add.copy()  # add may be y itself
    _core.kernel_gemm(
        backend, again, x, offsets, w, bias, again, (pixels, blocks, depth, x_pixel, x_step, w_block, 16, 320, 16, 320)
    )
    assert np.array_equal(again.reshape(2, 20, 16)[:blocks, :pixels], got[:blocks, :pixels])


@every_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gemm_passes_nonfinite_on(backend, bad):
    x, w, y = np.ones(64, np.float32), np.ones(256, np.float32), np.zeros(64, np.float32)
    x[16] = bad  # the second pixel
    _core.kernel_gemm(backend, y, x, np.zeros(1, np.intp), w, None, None, (3, 1, 16, 16, 1, 0, 0, 0, 16, 0))
    y = y.reshape(4, 16)
    assert (y[0] == 16).all() and (y[2] == 16).all() and not np.isfinite(y[1]).any()


# ---- load ----


@every_backend
@pytest.mark.parametrize("pixels", [1, 2, 7, 64])
def test_load(backend, pixels):
    r = rng(pixels)
    x = (r.standard_normal((pixels, 16)) * 20).astype(np.float32)
    x.flat[:6] = [0, -0.0, 90, -90, 1e-30, 300]
    scale, shift = r.standard_normal((2, 16)).astype(np.float32)
    for silu in (False, True):
        for affine in (False, True):
            y, check = guarded(pixels * 16)
            _core.kernel_load(backend, y, x.ravel(), scale if affine else None, shift if affine else None, silu)
            check()
            t = x.astype(np.float64)
            # the affine is one or two roundings of numbers up to |x * scale| + |shift|; SiLU's slope is at most 1.1
            slack = 3 * EPS * (np.abs(t * scale) + np.abs(shift)) if affine else 0
            t = t * scale + shift if affine else t
            with np.errstate(over="ignore"):
                want = t / (1 + np.exp(-t)) if silu else t
            # e^x is good to 2 eps of itself, 1 + and / add one each; below e^-87 results are under 1e-36
            assert (np.abs(y.reshape(pixels, 16) - want) <= 1.1 * slack + 6 * EPS * np.abs(want) + 1e-35).all()


@every_backend
def test_load_in_place_and_nonfinite(backend):
    x = rng().standard_normal(160).astype(np.float32)
    y = np.empty_like(x)
    _core.kernel_load(backend, y, x, None, None, True)
    _core.kernel_load(backend, x, x, None, None, True)
    assert np.array_equal(x, y)
    x[3], x[50] = np.nan, np.inf
    _core.kernel_load(backend, y, x, None, None, True)
    assert np.isnan(y[3]) and y[50] == np.inf and np.isfinite(np.delete(y, [3, 50])).all()


# ---- stats, softmax, rescale ----


@every_backend
@pytest.mark.parametrize("rows,pixels,offset", [(1, 1, 0), (1, 3, 0), (5, 7, 100.0), (20, 64, -1000.0)])
def test_stats(backend, rows, pixels, offset):
    row = pixels * 16 + 48
    x = (rng(rows).standard_normal(rows * row) + offset).astype(np.float32)
    (mean, check_mean), (m2, check_m2) = guarded(16), guarded(16)
    _core.kernel_stats(backend, mean, m2, x, rows, row, pixels)
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
        _core.kernel_softmax(backend, p, 0.125, top, total, keep)
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
    _core.kernel_softmax(backend, s.reshape(-1), 1.0, top, total, keep)
    assert np.isnan(total[5]) and np.isfinite(np.delete(total, 5)).all()


@every_backend
def test_rescale(backend):
    x, keep = rng().standard_normal((9, 16)).astype(np.float32), rng(1).standard_normal(16).astype(np.float32)
    want = x * keep
    _core.kernel_rescale(backend, x.reshape(-1), keep)
    assert np.array_equal(x, want)


# ---- whole passes ----


def conv64(x, weight, bias, stride, up):
    """The convolution in float64: pad 1 for a 3x3 with stride 1, (0, 1, 0, 1) with stride 2."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if up:
        x = x.repeat(2, 1).repeat(2, 2)
    k = weight.shape[2]
    pad = ((0, 0), (0, 1), (0, 1)) if stride == 2 else ((0, 0), (k // 2, k // 2), (k // 2, k // 2))
    x = np.pad(x, pad)
    h, w = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
    y = np.zeros((weight.shape[0], h, w))
    for dy in range(k):
        for dx in range(k):
            y += np.tensordot(
                weight[:, :, dy, dx], x[:, dy : dy + stride * h : stride, dx : dx + stride * w : stride][:, :h, :w], 1
            )
    return y + bias[:, None, None]


# in, out, k, stride, up, norm groups (0: none), add, height, width
PASSES = [
    (32, 32, 3, 1, False, 8, True, 9, 70),
    (48, 16, 3, 1, False, 8, False, 5, 131),
    (24, 40, 3, 1, False, 8, False, 7, 13),
    (40, 3, 3, 1, False, 8, False, 6, 10),
    (3, 32, 3, 1, False, 0, False, 12, 9),
    (64, 32, 1, 1, False, 0, False, 11, 17),
    (96, 96, 1, 1, False, 8, True, 3, 5),
    (32, 48, 3, 2, False, 0, False, 14, 22),
    (24, 24, 3, 1, True, 0, False, 9, 67),
    (32, 16, 3, 1, True, 0, False, 1, 1),
    (160, 32, 3, 1, False, 8, False, 2, 3),
    # from 1024 pixels and 32 channels on by Winograd: odd sizes leave half tiles, 160 channels take two runs
    (32, 48, 3, 1, False, 8, True, 33, 37),
    (64, 40, 3, 1, False, 8, False, 16, 131),
    (160, 32, 3, 1, False, 8, True, 40, 26),
    (40, 64, 3, 1, False, 0, False, 1, 1025),
]


@every_backend
@pytest.mark.parametrize("case", PASSES, ids=str)
def test_conv_pass(backend, case):
    xc, yc, k, stride, up, groups, with_add, h, w = case
    r = rng(xc + yc)
    x = (r.standard_normal((xc, h, w)) * 2 + 1).astype(np.float32)
    weight = (r.standard_normal((yc, xc, k, k)) / np.sqrt(xc * k * k)).astype(np.float32)
    bias, (gamma, beta) = r.standard_normal(yc).astype(np.float32), r.standard_normal((2, xc)).astype(np.float32)
    yh, yw = (2 * h, 2 * w) if up else (h // stride, w // stride)
    add = r.standard_normal((yc, yh, yw)).astype(np.float32) if with_add else None

    loaded = x.astype(np.float64)
    if groups:
        g = loaded.reshape(groups, -1)
        loaded = ((g - g.mean(1, keepdims=True)) / np.sqrt(g.var(1, keepdims=True) + 1e-6)).reshape(x.shape)
        loaded = loaded * gamma[:, None, None] + beta[:, None, None]
        loaded = loaded / (1 + np.exp(-loaded))
    want = conv64(loaded, weight, bias, stride, up) + (0 if add is None else add)

    # the sums that x's producer would have left: two parts, of the upper rows and the rest
    parts = []
    for part in (x[:, : (h + 1) // 2], x[:, (h + 1) // 2 :]):
        p = part.reshape(xc, -1).astype(np.float64)
        if p.shape[1]:
            m2 = ((p - p.mean(1, keepdims=True)) ** 2).sum(1)
            parts.append(np.concatenate([np.full(16, p.shape[1]), pad16(p.mean(1)), pad16(m2)]).astype(np.float32))
    shapes = (xc, h, w, yc, yh, yw)
    results = []
    for threads in (1, 3):
        scratch, sums = _core.kernel_needs(backend, threads, "conv", shapes, (k, stride, up))
        (y, check_y), (stats, check_stats), (own, check_own) = (
            guarded(up16(yc) * yh * yw),
            guarded(sums),
            guarded(scratch),
        )
        own[:] = np.nan  # scratch holds nothing
        _core.kernel_pass(
            backend, threads, "conv", shapes, (k, stride, up, groups > 0, groups, 1e-6),
            (to_rows(x), y, None if add is None else to_rows(add), pack(weight), pad16(bias),
             pad16(gamma), pad16(beta), np.concatenate(parts) if groups else None, stats, own),
        )  # fmt: skip
        check_y(), check_stats(), check_own()
        results.append((y.copy(), stats.copy()))
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True)), "threads changed the result"
    y, stats = results[0]
    got = from_rows(y, yc, yh, yw)
    # sums of runs of 128 or so products; the loaded value itself carries a few eps from normalise and SiLU; Winograd's
    # sums and differences of up to 16 inputs and outputs add some more
    size = conv64(np.abs(loaded), np.abs(weight), np.abs(bias), stride, up) + (0 if add is None else np.abs(add))
    assert (np.abs(got - want) <= 40 * EPS * size + 1e-6).all()
    lanes = y.reshape(yh, -1, yw, 16).transpose(1, 3, 0, 2).reshape(-1, yh, yw)
    assert (lanes[yc:] == 0).all(), "channels beyond the last must stay zero"

    # the parts merge to the mean and variance of what was stored
    parts = stats.reshape(-1, 16 + 2 * up16(yc)).astype(np.float64)
    count, means, m2s = parts[:, 0], parts[:, 16 : 16 + yc], parts[:, 16 + up16(yc) :][:, :yc]
    assert count.sum() == yh * yw
    mean = (count[:, None] * means).sum(0) / count.sum()
    m2 = (m2s + count[:, None] * (means - mean) ** 2).sum(0)
    flat = got.reshape(yc, -1).astype(np.float64)
    assert np.allclose(mean, flat.mean(1), rtol=1e-5, atol=1e-5)
    assert np.allclose(m2, ((flat - flat.mean(1, keepdims=True)) ** 2).sum(1), rtol=1e-4, atol=1e-5)


@every_backend
@pytest.mark.parametrize("c,h,w", [(16, 1, 1), (32, 3, 5), (24, 9, 17), (64, 2, 300), (16, 40, 8), (48, 13, 13)])
def test_attention_pass(backend, c, h, w):
    r = rng(c)
    q, k, v = (r.standard_normal((3, c, h, w)) * 2).astype(np.float32)
    rows = np.concatenate([to_rows(t) for t in (q, k, v)], axis=1)
    results = []
    for threads in (1, 3):
        x, check_x = guarded(rows.size)
        x[:] = rows.ravel()
        shapes = (3 * up16(c), h, w, c, h, w)
        scratch, _ = _core.kernel_needs(backend, threads, "attention", shapes, (1, 1, False))
        own, check_own = guarded(scratch)
        own[:] = np.nan
        unused = np.zeros(up16(c) * h * w, np.float32)
        arrays = (x, unused, *[None] * 7, own)
        _core.kernel_pass(backend, threads, "attention", shapes, (1, 1, False, False, 0, 0.0), arrays)
        check_x(), check_own()
        results.append(x.copy())
    assert np.array_equal(*results), "threads changed the result"
    q, k, v = (t.reshape(c, -1).astype(np.float64) for t in (q, k, v))
    s = q.T @ k / np.sqrt(c)
    p = np.exp(s - s.max(1, keepdims=True))
    want = (p / p.sum(1, keepdims=True)) @ v.T
    got = results[0].reshape(h, 3, -1, w, 16)
    out = got[:, 0].transpose(1, 3, 0, 2).reshape(-1, h * w)[:c].T
    # a score is off by about sqrt(c) eps of its terms, which e^x turns into that share of a weight
    assert np.abs(out - want).max() <= (20 + np.abs(s).max()) * 4 * EPS * np.abs(v).max()
    assert np.array_equal(got[:, 1:], rows.reshape(h, 3, -1, w, 16)[:, 1:]), "keys and values were written"
