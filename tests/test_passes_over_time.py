"""Passes over several frames, one by one, against float64: within guards, and the same with tasks of any kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cases import EPS, FACTOR, NUMBERS, SIGMOID, STEP, as_float, as_kept, guarded, pairs_of
from engine import from_rows, pack, pad16, to_rows, up16

from vaemem import _core

pytestmark = pytest.mark.core

_kernels = pytest.importorskip("vaemem._kernels")

SAME, HALVED, DOUBLED = range(3)
WAYS = [
    (backend, *numbers)
    for numbers in NUMBERS
    for backend, usable in _core.backends(*numbers)
    if usable and (numbers[1] == "highest" or pairs_of(backend, *numbers))
]
PIXEL, RMS = -1, -2
# (in, out, frames, height, width, side of the filter, time, norm, add, turned, skipped slices). Winograd from 1024
# pixels on; channels that fill no block; a single frame, and one more than pairs of frames.
CASES = [
    (16, 16, 5, 9, 24, 3, SAME, True, False, False, 0),
    (32, 20, 4, 8, 33, 3, SAME, True, True, True, 0),
    (40, 33, 3, 5, 7, 3, SAME, True, True, False, 0),
    (32, 32, 1, 3, 4, 3, SAME, False, False, True, 0),
    (16, 48, 19, 2, 70, 3, SAME, False, False, False, 0),
    (24, 24, 6, 3, 5, 1, DOUBLED, False, False, False, 0),
    (16, 16, 1, 2, 70, 1, DOUBLED, False, False, True, 0),
    (33, 33, 7, 3, 5, 1, HALVED, False, False, False, 0),
    (32, 32, 9, 4, 66, 1, HALVED, False, False, True, 0),
    (17, 32, 1, 40, 40, 3, SAME, True, True, False, 2),
    # and frames that are later, whether frames stay as they are at the ends, and whether pictures are mirrored
    (16, 16, 5, 9, 24, 3, SAME, RMS, True, False, 0, 1, True, True),
    (32, 20, 4, 8, 33, 3, SAME, RMS, True, True, 0, 1, True, True),
    (40, 33, 3, 5, 7, 3, SAME, RMS, False, False, 0, 0, True, True),
    (32, 32, 1, 3, 4, 3, SAME, False, False, True, 0, 1, True, True),
    (16, 48, 19, 2, 70, 3, SAME, False, False, False, 0, 1, True, False),
    (24, 32, 2, 40, 40, 3, SAME, RMS, True, False, 0, 0, True, False),
    (24, 40, 3, 2, 2, 3, SAME, RMS, True, False, 0, 1, True, True),
]


def over_time(x, weight, bias, time: int, ahead: int = 0, held: bool = False, mirrored: bool = False) -> np.ndarray:
    """The convolution of (c, frames, h, w) by (out, c, slices, k, k), in float64."""
    k, slices = weight.shape[-1], weight.shape[2]
    first, count = x[:, :1], x.shape[1]
    if time == DOUBLED and count == 1:
        return first
    if time == DOUBLED:
        x = x[:, 1:]
    x = np.pad(x, ((0, 0), (slices - 1 - ahead, ahead), (0, 0), (0, 0)), mode="edge" if held else "constant")
    x = np.pad(x, ((0, 0), (0, 0), (k // 2, k // 2), (k // 2, k // 2)), mode="reflect" if mirrored else "constant")
    frames, h, w = x.shape[1] - slices + 1, x.shape[2] - k + 1, x.shape[3] - k + 1
    y = np.zeros((weight.shape[0], frames, h, w))
    for dt, dy, dx in itertools.product(range(slices), range(k), range(k)):
        y += np.tensordot(weight[:, :, dt, dy, dx], x[:, dt : dt + frames, dy : dy + h, dx : dx + w], 1)
    y += bias[:, None, None, None]
    if time == SAME:
        return y
    if time == HALVED:
        return np.concatenate([first, y[:, 2::2]], 1)
    later = y.reshape(2, -1, frames, h, w).transpose(1, 2, 0, 3, 4).reshape(-1, 2 * frames, h, w)
    return np.concatenate([first, later], 1)


def rows_of(x: np.ndarray) -> np.ndarray:
    c, frames, h, w = x.shape
    return to_rows(np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(c, h, frames * w))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_pass(case, way):
    (in_c, out_c, frames, h, w, k, time, norm, adds, turned, skipped, *ends), (backend, dtype, precision) = case, way
    norm = PIXEL if norm is True else norm
    r = np.random.default_rng(in_c)
    pairs = pairs_of(backend, dtype, precision)

    def kept(x):
        return as_float(as_kept(x.astype(np.float32), dtype))

    slices = 1 if skipped else 3
    y_frames = {SAME: frames, HALVED: (frames - 1) // 2 + 1, DOUBLED: 2 * frames - 1}[time]
    made = 2 * out_c if time == DOUBLED else out_c
    x = kept(r.standard_normal((in_c, frames, h, w)) + 0.5)
    weight = kept(r.standard_normal((made, in_c, slices + skipped, k, k)) / np.sqrt(in_c * slices * k * k))
    bias, gamma = r.standard_normal(made).astype(np.float32), r.standard_normal(in_c).astype(np.float32)
    add = kept(r.standard_normal((out_c, y_frames, h, w))) if adds else None
    shapes, stored = (in_c, h, w, out_c, h, w), "float32" if dtype == "float32" else dtype
    scratch, _ = _kernels.needs(
        backend, 3, "conv", shapes, (k, 1, False, k // 2), dtype, precision, True, (frames, y_frames, slices, time)
    )
    more, _ = _kernels.needs(
        backend, 3, "conv", shapes, (k, 1, False, k // 2), dtype, precision, False, (frames, y_frames, slices, time)
    )
    halves = np.split(weight, 2) if time == DOUBLED else [weight]
    packed = np.concatenate(
        [np.stack([pack(half[:, :, s], stored) for s in range(half.shape[2])], 1) for half in halves]
    )
    lanes = np.concatenate([pad16(half) for half in (np.split(bias, 2) if time == DOUBLED else [bias])])
    results = []
    for threads, by_task in ((1, False), (3, True)):
        rows = as_kept(np.zeros(0), dtype).dtype.type
        (y, check), (own, check_own) = guarded(up16(out_c) * h * y_frames * w, rows), guarded(max(scratch, more))
        own[:] = np.nan
        _kernels.run_pass(
            backend, threads, "conv", shapes, (k, 1, False, int(norm != 0), norm, 1e-6, k // 2, False),
            (as_kept(rows_of(x), dtype), y, None if add is None else as_kept(rows_of(add), dtype), packed, lanes,
             pad16(gamma), pad16(0 * gamma), None, None, own),
            dtype, precision, by_task, (frames, y_frames, slices, skipped, time, turned, *(ends or (0, 0, 0))),
        )  # fmt: skip
        check(), check_own()
        results.append(y.tobytes())
    assert results[0] == results[1], "threads, or transforming weights by task, changed the result"
    loaded = x.astype(np.float64)
    if norm:
        g = loaded / np.maximum(np.linalg.norm(loaded, axis=0), 1e-6) * np.sqrt(in_c) * gamma[:, None, None, None]
        g = loaded / np.sqrt((loaded**2).mean(0) + 1e-6) if norm == RMS else g
        loaded = g / (1 + np.exp(-g))
    used = weight[:, :, skipped:].astype(np.float64)
    used = used.swapaxes(3, 4) if turned else used  # rows are the picture's columns
    residual = 0 if add is None else add.astype(np.float64)
    want = over_time(loaded, used, bias, time, *ends) + residual
    size = over_time(np.abs(loaded), np.abs(used), np.abs(bias), time, *ends) + np.abs(residual)
    # As in cases.py, roundings are those of sums, of factors in bfloat16, and of the stored result. Winograd's way
    # rounds factors after a transform, which adds up to nine numbers.
    sigmoid = SIGMOID.get(dtype, 0.0) * (backend in ("avx512", "avx512bf16", "amx"))
    spread = np.sqrt(over_time(loaded**2, used**2, 0 * bias, time, *ends))
    by_winograd = pairs == 1 and backend != "amx" and k == 3
    factors = (12.6 if by_winograd else 4.2) * FACTOR[pairs] * spread
    rounded = STEP[dtype] * (np.abs(want) + factors) + (2.0**-25 if dtype == "float16" else 0)
    got = from_rows(as_float(y), out_c, h, y_frames * w).reshape(out_c, h, y_frames, w).transpose(0, 2, 1, 3)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= (40 * EPS + sigmoid) * size + 1e-6 + factors + rounded).all()
    zeros = as_float(y).reshape(h, -1, y_frames * w, 16).transpose(1, 3, 0, 2).reshape(up16(out_c), -1)[out_c:]
    assert (zeros == 0).all(), "channels beyond the last must stay zero"
