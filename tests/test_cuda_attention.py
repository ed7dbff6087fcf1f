"""Our attention kernels, run by the emulator (tests/emulator), beside float64.

Inputs are numbers of the kernel's own type, so the errors are the kernel's. With u = 2^-11 (half), 2^-8 (bfloat16)
or 0 (float) for one rounding to the type, e = 2^-24 for one in float, and w = softmax @ |v|, which is what a relative
error of the probabilities can move:

- a probability is rounded to the type, but not in the sum that it is divided by:     w * u
- a score is a sum of c products, off by sqrt(c) * e * sum|q k| * scale where rounding errors have random signs; exp
  makes of that a relative error, once above and once below the fraction:             w * 2 * score
- sums over n keys, exp2, and the rescaling from tile to tile (64 keys or more):      w * (sqrt(n) + n / 64 + 4) * e
- a half below 2^-14 is rounded to 2^-25; probabilities are kept times 2^14:          n * 2^-39 * max|v|
- the result is rounded to the type:                                                  |y| * u

What rests on random signs has a factor of 4 of room. A key left out or a rescaling forgotten is off by far more.
"""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from emulator import build

TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
UNIT = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8}
EPS = 2.0**-24
SM_75, SM_86, SM_90 = 64 << 10, 99 << 10, 227 << 10  # what a block may have of shared memory there
CASES = [("f32", SM_75), ("f16", SM_75), ("f16", SM_86), ("f16", SM_90), ("bf16", SM_86), ("bf16", SM_90)]
every_kernel = pytest.mark.parametrize("dtype,largest", CASES)
GUARD = 64  # elements on either side of every output
GUARD_VALUE = 77.0


class Args(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("n", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("pitch", ctypes.c_uint32),
        ("y_pitch", ctypes.c_uint32),
        ("scale", ctypes.c_float),
    )


class Shape(ctypes.Structure):
    _fields_ = (("queries", ctypes.c_uint32), ("keys", ctypes.c_uint32), ("ring", ctypes.c_uint32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attention")


@pytest.fixture(scope="module")
def kernels(folder):
    try:
        return build.Kernels(folder, [build.CUDA / "attention.cu"])
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def header(folder):
    """cuda.h's functions, as the host has them."""
    source, library = folder / "header.c", folder / "libheader.so"
    source.write_text(
        '#include "cuda.h"\n'
        "vm_attention_shape choose(int t, size_t most) { return vm_attention_choose((vm_dtype)t, most); }\n"
        "size_t args_bytes(void) { return sizeof(vm_attention_args); }\n"
        "uint32_t shared(int t, vm_attention_shape s, uint32_t c) { return vm_attention_shared((vm_dtype)t, s, c); }\n"
    )
    try:
        gcc = build.compiler("gcc")
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    warn = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    build.run(gcc, *warn, "-shared", "-fPIC", "-I", build.CUDA, source, "-o", library)
    h = ctypes.CDLL(str(library))
    h.choose.restype, h.choose.argtypes = Shape, (ctypes.c_int, ctypes.c_size_t)
    h.shared.restype, h.shared.argtypes = ctypes.c_uint32, (ctypes.c_int, Shape, ctypes.c_uint32)
    h.args_bytes.restype = ctypes.c_size_t
    return h


def dtype_number(dtype):
    return list(TYPES).index(dtype)  # the order of vm_dtype


def aligned(shape, dtype, value):
    """An array between guards, 64-byte aligned, and a check that the guards were kept."""
    n = int(np.prod(shape))
    item = np.dtype(TYPES[dtype]).itemsize
    whole = np.full(n + 2 * GUARD + 64 // item, GUARD_VALUE, TYPES[dtype])
    first = GUARD + -(whole.ctypes.data + GUARD * item) % 64 // item
    whole[first : first + n] = value

    def check():
        assert (whole[:first] == GUARD_VALUE).all() and (whole[first + n :] == GUARD_VALUE).all()

    return whole[first : first + n].reshape(shape), check


class Attention:
    def __init__(self, kernels, header):
        self.kernels, self.header = kernels, header

    def __call__(self, qkv, dtype, largest, *, in_place=False, pitch=None, y_pitch=None, scale=None, seed=1):
        """qkv: (n, 3, c) numbers of the type. (n, c) back; what lies around x's and y's numbers is checked."""
        n, _, c = qkv.shape
        pitch = pitch or 3 * c
        y_pitch = pitch if in_place else y_pitch or c
        # Between pixels and behind the last lie NaNs, that reading them may show; as many rows as a block has.
        x, x_kept = aligned((n + 64, pitch), dtype, np.nan)
        x[:n, : 3 * c] = qkv.reshape(n, 3 * c)
        before = x.copy()
        y, y_kept = (x, x_kept) if in_place else aligned((n + 64, y_pitch), dtype, GUARD_VALUE)
        number, shape = dtype_number(dtype), self.header.choose(dtype_number(dtype), largest)
        shared = self.header.shared(number, shape, c)
        assert 0 < shared <= largest
        args = Args(x.ctypes.data, y.ctypes.data, n, c, pitch, y_pitch, c**-0.5 if scale is None else scale)
        grid = (-(-n // shape.queries),)
        name = f"vm_attention_{dtype}_{shape.queries}x{shape.keys}"
        self.kernels.launch(name, grid, (256,), args, shared=shared, seed=seed)
        x_kept()
        y_kept()
        out = y[:n, :c].copy()
        y[:n, :c] = before[:n, :c] if in_place else GUARD_VALUE
        if not in_place:
            assert (y == GUARD_VALUE).all()
        assert x.tobytes() == before.tobytes()
        return out


@pytest.fixture(scope="module")
def attention(kernels, header):
    return Attention(kernels, header)


def exact(qkv, dtype, scale=None):
    """The result in float64, and the tolerance of the module's docstring."""
    q, k, v = np.moveaxis(qkv.astype(np.float64), 1, 0)
    n, c = q.shape
    scale = np.float64(np.float32(c**-0.5 if scale is None else scale))
    s = q @ k.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    y, w = p @ v, p @ np.abs(v)
    size = (np.abs(q) @ np.abs(k).T * scale).max(1, keepdims=True)
    score = 4 * (np.sqrt(c) + 2) * EPS * size
    sums = 4 * (np.sqrt(n) + n / 64 + 4) * EPS
    small = n * 2.0**-39 * np.abs(v).max() if dtype == "f16" else 0
    return y, w * (UNIT[dtype] + 2 * score + sums) + UNIT[dtype] * np.abs(y) + small


def check(got, qkv, dtype, scale=None):
    want, tolerance = exact(qkv, dtype, scale)
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= tolerance).all(), (error / tolerance).max()  # a NaN is not <=


def random(n, c, dtype, seed=0):
    return np.random.default_rng(seed + 1000 * n + c).standard_normal((n, 3, c)).astype(TYPES[dtype])


# ---- shapes ----


def test_arguments_as_c_has_them(header):
    assert header.args_bytes() == ctypes.sizeof(Args)


@pytest.mark.parametrize(
    "dtype,largest,queries,keys",
    [
        ("f32", SM_75, 64, 64),
        ("f32", SM_90, 64, 64),
        ("f16", SM_75, 32, 64),
        ("f16", SM_86, 64, 64),
        ("f16", 163 << 10, 64, 128),
        ("bf16", SM_75, 0, 0),
        ("bf16", SM_86, 64, 64),
        ("bf16", SM_90, 64, 128),
        ("f32", 48 << 10, 0, 0),
        ("f16", 48 << 10, 0, 0),
    ],
)
def test_choice(header, dtype, largest, queries, keys):
    shape = header.choose(dtype_number(dtype), largest)
    assert (shape.queries, shape.keys) == (queries, keys)


@every_kernel
@pytest.mark.parametrize("n", [1, 15, 64, 65, 200])
@pytest.mark.parametrize("c", [16, 64, 80, 512])
@pytest.mark.parametrize("in_place", [False, True])
def test_shapes(attention, dtype, largest, n, c, in_place):
    qkv = random(n, c, dtype)
    check(attention(qkv, dtype, largest, in_place=in_place), qkv, dtype)


@every_kernel
def test_pitches_wider_than_the_channels(attention, dtype, largest):
    qkv = random(70, 48, dtype)
    check(attention(qkv, dtype, largest, pitch=3 * 48 + 16, y_pitch=48 + 32), qkv, dtype)
    check(attention(qkv, dtype, largest, in_place=True, pitch=3 * 48 + 16), qkv, dtype)


@every_kernel
def test_order_of_threads_and_copies(attention, dtype, largest):
    """The same bits, whoever comes first."""
    qkv = random(130, 80, dtype)
    runs = {attention(qkv, dtype, largest, in_place=seed % 2 == 0, seed=seed).tobytes() for seed in range(1, 7)}
    assert len(runs) == 1


def test_f32_relative_error(attention):
    """1e-5 over some thousand keys. Only the keys matter, so there are few channels."""
    qkv = random(2048, 16, "f32")
    got, (want, _) = attention(qkv, "f32", SM_75), exact(qkv, "f32")
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


# ---- the online softmax ----


@every_kernel
@pytest.mark.parametrize("order", ["rising", "falling", "rising by row"])
def test_moving_maximum(attention, dtype, largest, order):
    """Scores from -40 to 40 along the keys: a sum that is not rescaled, or twice, is off by whole factors."""
    n, c = 300, 64
    qkv = random(n, c, dtype).astype(np.float32)
    way = np.linspace(-5, 5, n)
    qkv[:, 1, 0] = way if order != "falling" else -way
    qkv[:, 0, 0] = 64.0 if order != "rising by row" else np.linspace(-64, 64, n)
    qkv = qkv.astype(TYPES[dtype])
    check(attention(qkv, dtype, largest), qkv, dtype)


@every_kernel
@pytest.mark.parametrize("place", [0, 127, 128, 199])
def test_one_key_dominates(attention, dtype, largest, place):
    n, c = 200, 80
    qkv = random(n, c, dtype)
    qkv[:, 0, 0], qkv[place, 1, 0] = 16, 64
    got = attention(qkv, dtype, largest)
    check(got, qkv, dtype)
    np.testing.assert_allclose(got.astype(float), np.tile(qkv[place, 2].astype(float), (n, 1)), rtol=1e-4, atol=1e-6)


@every_kernel
def test_many_small_probabilities(attention, dtype, largest):
    """Two thousand keys at exp(-15) beside one at 1: together they weigh 0.06 per cent, and hold all of channel 1. As
    plain halves each would be 5.13 steps of 2^-24, rounded to 5."""
    n, c = 2048, 16
    qkv = np.zeros((n, 3, c), np.float32)
    qkv[:64, 0, 0], qkv[0, 1, 0] = 8, 7.5  # the other queries weigh all keys alike
    qkv[1:, 2, 1] = 1 + np.linspace(0, 0.1, n - 1)
    qkv = qkv.astype(TYPES[dtype])
    got = attention(qkv, dtype, largest)
    check(got, qkv, dtype)


@every_kernel
def test_large_scores(attention, dtype, largest):
    """Scores of some thousands: exp of them as they are would overflow, and so would half."""
    qkv = (random(140, 64, dtype).astype(np.float32) * 24).astype(TYPES[dtype])
    check(attention(qkv, dtype, largest), qkv, dtype)


@every_kernel
def test_equal_scores_give_the_mean(attention, dtype, largest):
    qkv = random(200, 32, dtype)
    qkv[:, 0] = 0
    check(attention(qkv, dtype, largest), qkv, dtype)


# ---- NaN and Inf ----


@every_kernel
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 37, 69])
def test_bad_query_spoils_its_row_alone(attention, dtype, largest, value, row):
    qkv = random(70, 80, dtype)
    clean = attention(qkv, dtype, largest)
    qkv[row, 0, 5] = value
    got = attention(qkv, dtype, largest)
    assert np.isnan(got[row].astype(np.float32)).all()
    others = np.arange(70) != row
    assert got[others].tobytes() == clean[others].tobytes()


@every_kernel
@pytest.mark.parametrize("key", [0, 66, 139])
def test_bad_key_spoils_all(attention, dtype, largest, key):
    qkv = random(140, 80, dtype)
    qkv[key, 1, 7] = np.nan
    assert np.isnan(attention(qkv, dtype, largest).astype(np.float32)).all()


@every_kernel
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_value_spoils_its_channel(attention, dtype, largest, value):
    qkv = random(140, 80, dtype)
    clean = attention(qkv, dtype, largest)
    qkv[100, 2, 33] = value
    got = attention(qkv, dtype, largest).astype(np.float32)
    assert not np.isfinite(got[:, 33]).any()
    others = np.arange(80) != 33
    assert (got[:, others] == clean[:, others].astype(np.float32)).all()


@every_kernel
def test_infinite_keys(attention, dtype, largest):
    """A query that sees them at +Inf becomes NaN; for one that sees them at -Inf, a whole tile of them first, they
    weigh nothing."""
    n, c = 300, 64
    qkv = random(n, c, dtype)
    up = np.arange(n) % 3 == 0
    qkv[:, 0, 0] = np.where(up, 1, -1)
    qkv[:150, 1, 0] = np.inf
    got = attention(qkv, dtype, largest)
    assert np.isnan(got[up].astype(np.float32)).all()
    q, rest = qkv[:, 0], qkv[150:]
    want = np.concatenate([q[:, None], np.resize(rest[:, 1:], (n, 2, c))], 1)  # the 150 others, twice: the same softmax
    expected, tolerance = exact(want, dtype)
    assert (np.abs(got.astype(np.float64) - expected)[~up] <= tolerance[~up]).all()


@every_kernel
def test_nothing_to_weigh(attention, dtype, largest):
    """All scores -Inf: no probabilities, so NaN, and not a silent zero."""
    qkv = np.abs(random(70, 32, dtype))
    qkv[:, 1, 0] = -np.inf
    qkv[:, 0, 0] = 1
    assert np.isnan(attention(qkv, dtype, largest).astype(np.float32)).all()
