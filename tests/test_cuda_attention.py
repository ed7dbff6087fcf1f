"""Our attention kernels, run by the emulator (tests/emulator), beside float64.

With e and u of cuda_kernels.py (E, UNIT), and w = softmax @ |v|, which is what a relative error of the probabilities
can move:

- a probability is rounded to the type, but not in the sum that it is divided by:     w * u
- a score is a sum of c products, off by sqrt(c) * e * sum|q k| * scale where rounding errors have random signs; exp
  makes of that a relative error, once above and once below the fraction:             w * 2 * score
- sums over n keys, exp2, and the rescaling from tile to tile (64 keys or more):      w * (sqrt(n) + n / 64 + 4) * e
- a half below 2^-14 is rounded to 2^-25; probabilities are kept times 2^14:          n * 2^-39 * max|v|
- the result is rounded to the type:                                                  |y| * u

What rests on random signs has a factor of 4 of room. A key left out or a rescaling forgotten is off by far more.
"""

from typing import NamedTuple

import numpy as np
import pytest
from cases import ATTENTIONS, small
from cuda_kernels import (
    SM_75,
    SM_86,
    SM_90,
    TYPES,
    UNIT,
    AttentionArgs,
    E,
    Memory,
    attention_launch,
    built,
    close,
    emulated,
    round_up,
    untouched,
)


class Device(NamedTuple):
    """A GPU's bytes of shared memory for a block, and whether it runs attention_wgmma.cu's kernels."""

    shared: int
    wgmma: bool = False


CASES = [("f32", SM_75), ("f16", SM_75), ("f16", SM_86), ("f16", SM_90), ("bf16", SM_86), ("bf16", SM_90)]
CASES = [(dtype, Device(shared)) for dtype, shared in CASES] + [
    (dtype, Device(SM_90, True)) for dtype in ("f16", "bf16")
]
every_kernel = pytest.mark.parametrize(
    "dtype,device", CASES, ids=[f"{dtype}-{'pairs' if device.wgmma else device.shared}" for dtype, device in CASES]
)
kernels = built("attention", "attention_wgmma")


class Attention:
    def __init__(self, kernels):
        self.kernels = kernels

    def __call__(self, qkv, dtype, device, *, in_place=False, pitch=None, y_pitch=None, scale=None, seed=1):
        """qkv: (n, 3, c) numbers of the type. (n, c) back; what lies around x's and y's numbers is checked."""
        memory, (n, _, c) = Memory(), qkv.shape
        pitch = pitch or 3 * c
        y_pitch = pitch if in_place else y_pitch or c
        # Between pixels and behind the last lie NaNs, that reading them may show; as many rows as a pair of blocks has.
        x = memory.full((n + 128, pitch), TYPES[dtype], np.nan)
        x[:n, : 3 * c] = qkv.reshape(n, 3 * c)
        before = x.copy()
        y = x if in_place else memory.empty((n + 128, y_pitch), TYPES[dtype])
        scale = c**-0.5 if scale is None else scale
        args = AttentionArgs(x=x, y=y, n=n, channels=c, pitch=pitch, y_pitch=y_pitch, scale=scale)
        launch = attention_launch(self.kernels, dtype, *device, args)
        self.kernels.launch(*launch, seed=seed)
        memory.check()
        out = y[:n, :c].copy()
        if in_place:
            y[:n, :c] = before[:n, :c]
        else:
            assert untouched(y[:n, c:]) and untouched(y[n:])
        assert x.tobytes() == before.tobytes()
        return out


@pytest.fixture(scope="module")
def attention(kernels):
    return Attention(kernels)


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
    score = 4 * (np.sqrt(c) + 2) * E * size
    sums = 4 * (np.sqrt(n) + n / 64 + 4) * E
    small = n * 2.0**-39 * np.abs(v).max() if dtype == "f16" else 0
    return y, w * (UNIT[dtype] + 2 * score + sums) + UNIT[dtype] * np.abs(y) + small


def check(got, qkv, dtype, scale=None):
    close(got, *exact(qkv, dtype, scale))


def random(n, c, dtype, seed=0):
    return np.random.default_rng(seed + 1000 * n + c).standard_normal((n, 3, c)).astype(TYPES[dtype])


# ---- shapes ----


@pytest.mark.one_in(12)
@every_kernel
@pytest.mark.parametrize("case", small(ATTENTIONS), ids=str)
def test_shapes(attention, dtype, device, case):
    qkv = random(case.n, round_up(case.c), dtype)
    check(attention(qkv, dtype, device, in_place=case.n % 2 == 1), qkv, dtype)


@every_kernel
def test_pitches_wider_than_the_channels(attention, dtype, device):
    qkv = random(70, 48, dtype)
    check(attention(qkv, dtype, device, pitch=3 * 48 + 16, y_pitch=48 + 32), qkv, dtype)
    check(attention(qkv, dtype, device, in_place=True, pitch=3 * 48 + 16), qkv, dtype)


@every_kernel
def test_order_of_threads_and_copies(attention, dtype, device):
    """The same bits, whoever comes first."""
    qkv = random(130, 80, dtype)
    runs = {attention(qkv, dtype, device, in_place=seed % 2 == 0, seed=seed).tobytes() for seed in range(1, 7)}
    assert len(runs) == 1


@emulated
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_pairs_of_blocks_in_any_order(attention, dtype):
    """Their rings go round several times; an odd number of blocks has queries."""
    qkv = random(300, 512, dtype)
    runs = [attention(qkv, dtype, Device(SM_90, True), seed=seed) for seed in range(1, 7)]
    check(runs[0], qkv, dtype)
    assert len({run.tobytes() for run in runs}) == 1


def test_f32_relative_error(attention):
    """1e-5 over some thousand keys. Only the keys matter, so there are few channels."""
    qkv = random(2048, 16, "f32")
    got, (want, _) = attention(qkv, "f32", Device(SM_75)), exact(qkv, "f32")
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


# ---- the online softmax ----


@pytest.mark.one_in(3)
@every_kernel
@pytest.mark.parametrize("order", ["rising", "falling", "rising by row"])
def test_moving_maximum(attention, dtype, device, order):
    """Scores from -40 to 40 along the keys: a sum that is not rescaled, or twice, is off by whole factors."""
    n, c = 300, 64
    qkv = random(n, c, dtype).astype(np.float32)
    way = np.linspace(-5, 5, n)
    qkv[:, 1, 0] = way if order != "falling" else -way
    qkv[:, 0, 0] = 64.0 if order != "rising by row" else np.linspace(-64, 64, n)
    qkv = qkv.astype(TYPES[dtype])
    check(attention(qkv, dtype, device), qkv, dtype)


@pytest.mark.one_in(3)
@every_kernel
@pytest.mark.parametrize("place", [0, 127, 128, 199])
def test_one_key_dominates(attention, dtype, device, place):
    n, c = 200, 80
    qkv = random(n, c, dtype)
    qkv[:, 0, 0], qkv[place, 1, 0] = 16, 64
    got = attention(qkv, dtype, device)
    check(got, qkv, dtype)
    np.testing.assert_allclose(got.astype(float), np.tile(qkv[place, 2].astype(float), (n, 1)), rtol=1e-4, atol=1e-6)


@pytest.mark.one_in(9)
@every_kernel
def test_many_small_probabilities(attention, dtype, device):
    """Two thousand keys at exp(-15) beside one at 1: together they weigh 0.06 per cent, and hold all of channel 1. As
    plain halves each would be 5.13 steps of 2^-24, rounded to 5."""
    n, c = 2048, 16
    qkv = np.zeros((n, 3, c), np.float32)
    qkv[:64, 0, 0], qkv[0, 1, 0] = 8, 7.5  # the other queries weigh all keys alike
    qkv[1:, 2, 1] = 1 + np.linspace(0, 0.1, n - 1)
    qkv = qkv.astype(TYPES[dtype])
    got = attention(qkv, dtype, device)
    check(got, qkv, dtype)


@every_kernel
def test_large_scores(attention, dtype, device):
    """Scores of some thousands: exp of them as they are would overflow, and so would half."""
    qkv = (random(140, 64, dtype).astype(np.float32) * 24).astype(TYPES[dtype])
    check(attention(qkv, dtype, device), qkv, dtype)


@every_kernel
def test_equal_scores_give_the_mean(attention, dtype, device):
    qkv = random(200, 32, dtype)
    qkv[:, 0] = 0
    check(attention(qkv, dtype, device), qkv, dtype)


# ---- NaN and Inf ----


@every_kernel
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 37, 69])
def test_bad_query_spoils_its_row_alone(attention, dtype, device, value, row):
    qkv = random(70, 80, dtype)
    clean = attention(qkv, dtype, device)
    qkv[row, 0, 5] = value
    got = attention(qkv, dtype, device)
    assert np.isnan(got[row].astype(np.float32)).all()
    others = np.arange(70) != row
    assert got[others].tobytes() == clean[others].tobytes()


@every_kernel
@pytest.mark.parametrize("key", [0, 66, 139])
def test_bad_key_spoils_all(attention, dtype, device, key):
    qkv = random(140, 80, dtype)
    qkv[key, 1, 7] = np.nan
    assert np.isnan(attention(qkv, dtype, device).astype(np.float32)).all()


@every_kernel
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_value_spoils_its_channel(attention, dtype, device, value):
    qkv = random(140, 80, dtype)
    clean = attention(qkv, dtype, device)
    qkv[100, 2, 33] = value
    got = attention(qkv, dtype, device).astype(np.float32)
    assert not np.isfinite(got[:, 33]).any()
    others = np.arange(80) != 33
    assert (got[:, others] == clean[:, others].astype(np.float32)).all()


@every_kernel
def test_infinite_keys(attention, dtype, device):
    """A query that sees them at +Inf becomes NaN; for one that sees them at -Inf, a whole tile of them first, they
    weigh nothing."""
    n, c = 300, 64
    qkv = random(n, c, dtype)
    up = np.arange(n) % 3 == 0
    qkv[:, 0, 0] = np.where(up, 1, -1)
    qkv[:150, 1, 0] = np.inf
    got = attention(qkv, dtype, device)
    assert np.isnan(got[up].astype(np.float32)).all()
    q, rest = qkv[:, 0], qkv[150:]
    want = np.concatenate([q[:, None], np.resize(rest[:, 1:], (n, 2, c))], 1)  # the 150 others, twice: the same softmax
    expected, tolerance = exact(want, dtype)
    assert (np.abs(got.astype(np.float64) - expected)[~up] <= tolerance[~up]).all()


@every_kernel
def test_nothing_to_weigh(attention, dtype, device):
    """All scores -Inf: no probabilities, so NaN, and not a silent zero."""
    qkv = np.abs(random(70, 32, dtype))
    qkv[:, 1, 0] = -np.inf
    qkv[:, 0, 0] = 1
    assert np.isnan(attention(qkv, dtype, device).astype(np.float32)).all()
