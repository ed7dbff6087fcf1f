"""Moves: passes that take channels and pixels to other places, against the reshapes that define them."""

from __future__ import annotations

import numpy as np
import pytest
from cases import STEP, as_float, as_kept, guarded
from engine import from_rows, to_rows, up16

from vaemem import _core, _kernels

pytestmark = pytest.mark.core

ORDERS = ("channel row column", "channel column row", "row column channel")
KINDS = [("float32", "highest"), ("float32", "high"), ("float16", "highest"), ("bfloat16", "highest")]


def gather(x: np.ndarray, order: str, frames: int, n: int) -> np.ndarray:
    """(c, n h, n w) -> (n n frames c, h, w): the numbers of n x n pixels, in their order."""
    c, h, w = x.shape
    x = np.stack([*[np.zeros_like(x)] * (frames - 1), x], 1)  # the frame that there is comes last
    cells = x.reshape(c, frames, h // n, n, w // n, n)
    axes = {ORDERS[0]: (0, 1, 3, 5, 2, 4), ORDERS[1]: (0, 1, 5, 3, 2, 4), ORDERS[2]: (3, 5, 0, 1, 2, 4)}[order]
    return cells.transpose(axes).reshape(-1, h // n, w // n)


def spread(x: np.ndarray, order: str, frames: int, n: int) -> np.ndarray:
    """(n n frames c, h, w) -> (c, n h, n w): the way back, of the last frame."""
    all_c, h, w = x.shape
    c = all_c // (n * n) // frames
    if order == ORDERS[2]:
        return x.reshape(n, n, c, h, w).transpose(2, 3, 0, 4, 1).reshape(c, n * h, n * w)
    cells = x.reshape(c, frames, n, n, h, w)[:, -1]
    axes = (0, 3, 1, 4, 2) if order == ORDERS[0] else (0, 3, 2, 4, 1)
    return cells.transpose(axes).reshape(c, n * h, n * w)


def moved(x: np.ndarray, way: str, channels: int, order: str, frames: int, n: int = 2) -> np.ndarray:
    """Move x (c, h, w) to `channels` channels. "up": to more pixels, and channels are repeated one by one ("in turn":
    all of them, then all again). "down": to fewer pixels, by means. "same": to as many pixels ("fills": with copies of
    the last channel)."""
    if way == "in turn":
        made = spread(x, order, frames, n)
        return np.tile(made, (channels // len(made), 1, 1))
    if way == "fills":
        return np.concatenate([x, np.repeat(x[-1:], channels - len(x), 0)])
    if way == "up":
        return spread(np.repeat(x, channels * n * n * frames // len(x), 0), order, frames, n)
    if way == "same" and channels > len(x):
        return np.repeat(x, channels // len(x), 0)
    x = gather(x, order, frames, n) if way == "down" else x
    return x.reshape(channels, -1, *x.shape[1:]).mean(1)


CASES = [
    *[("up", 32, 16, 5, 7, order, frames) for order, frames in zip(ORDERS, (2, 1, 1), strict=True)],
    *[("down", 16, 32, 6, 10, order, frames) for order, frames in zip(ORDERS, (2, 1, 1), strict=True)],
    ("up", 12, 3, 4, 70, ORDERS[1], 1),  # patches of an image, wider than a tile
    ("down", 3, 12, 8, 132, ORDERS[1], 1),
    ("up", 64, 64, 3, 3, ORDERS[2], 1),
    ("down", 48, 24, 4, 4, ORDERS[0], 2),
    ("same", 8, 40, 3, 65, ORDERS[0], 1),
    ("same", 40, 8, 1, 1, ORDERS[0], 1),
    ("same", 20, 20, 2, 3, ORDERS[0], 1),
    ("up", 48, 3, 3, 35, ORDERS[1], 1, 4),  # patches of 4x4 pixels
    ("down", 3, 48, 8, 132, ORDERS[1], 1, 4),
    ("in turn", 32, 16, 3, 5, ORDERS[0], 1),
    ("in turn", 48, 24, 2, 3, ORDERS[0], 2),
    ("fills", 17, 32, 2, 3, ORDERS[0], 1),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype, precision", KINDS)
@pytest.mark.parametrize("add", [None, "beside", "in place"])
def test_a_move(case, dtype, precision, add):
    """The bits are the same on every set of instructions, the sums' for every number of threads."""
    way, in_c, out_c, h, w, order, frames, n = *case, *[2] * (8 - len(case))
    up, down = way in ("up", "in turn"), way == "down"
    r = np.random.default_rng(in_c + h)
    size = (n * h, n * w) if up else (h // n, w // n) if down else (h, w)
    x = as_float(as_kept(r.standard_normal((in_c, h, w)).astype(np.float32), dtype))
    more = as_float(as_kept(r.standard_normal((out_c, *size)).astype(np.float32), dtype))
    shapes = (in_c, h, w, out_c, *size)
    how = (2, 2, False) if down else (1, 1, up)
    kind = f"move{ORDERS.index(order)}{frames}{n if up or down else 1}{int(way == 'in turn')}"
    results, sums_of = set(), {}
    for backend in [name for name, usable in _core.backends(dtype, precision) if usable]:
        for threads in (1, 3):
            scratch, sums = _kernels.needs(backend, threads, kind, shapes, (*how, 0), dtype, precision)
            rows = as_kept(np.zeros(0), dtype).dtype.type
            outputs = guarded(up16(out_c) * size[0] * size[1], rows), guarded(sums), guarded(scratch)
            (y, stats, own), kept = zip(*outputs, strict=True)
            own[:] = np.nan
            add_rows = None if add is None else as_kept(to_rows(more), dtype)
            if add == "in place":
                y[:] = add_rows.ravel()
            arrays = (as_kept(to_rows(x), dtype), y, y if add == "in place" else add_rows, *[None] * 5, stats, own)
            _kernels.run_pass(backend, threads, kind, shapes, (*how, 0, 0, 0.0, 0, False), arrays, dtype, precision)
            for guard in kept:
                guard()
            results.add(y.tobytes())
            assert sums_of.setdefault(backend, stats.tobytes()) == stats.tobytes()
    assert len(results) == 1
    got = from_rows(as_float(y), out_c, *size)
    want = moved(x.astype(np.float64), way, out_c, order, frames, n) + (0 if add is None else more)
    # up to 12 terms are added in float, then the sum is rounded to what is kept
    share = moved(np.abs(x.astype(np.float64)), way, out_c, order, frames, n) + np.abs(more)
    assert (np.abs(got - want) <= 12 * 2.0**-24 * share + STEP[dtype] * np.abs(want)).all()
    lanes = as_float(y).reshape(size[0], -1, size[1], 16).transpose(1, 3, 0, 2).reshape(-1, *size)
    assert (lanes[out_c:] == 0).all(), "channels beyond the last must stay zero"
    count, means = stats[0], stats[16 : 16 + out_c]
    assert count == size[0] * size[1]
    assert np.allclose(means, got.reshape(out_c, -1).mean(1), rtol=1e-5, atol=1e-5)


def test_a_move_passes_nan_on_and_nothing_else():
    x = np.ones((8, 2, 4), np.float32)
    x[3, 1, 2] = np.nan
    want = moved(x, "down", 4, ORDERS[0], 1)
    y, stats, own = np.zeros((1, 1, 2, 16), np.float32), None, np.zeros(1 << 14, np.float32)
    shapes = (8, 2, 4, 4, 1, 2)
    arrays = (to_rows(x), y, *[None] * 6, stats, own)
    _kernels.run_pass("ref", 1, "move0120", shapes, (2, 2, False, 0, 0, 0.0, 0, False), arrays)
    assert np.array_equal(from_rows(y, 4, 1, 2), want, equal_nan=True) and np.isnan(want).sum() == 1
