"""Passes as cases: one table an operation. Tests take the small and odd shapes, benchmarks the models' own.

A case makes random operands, runs them on a backend of the core, and compares what came with float64. eps = 2^-24 is
half a float32 step; the tolerances stand beside the comparisons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from engine import from_rows, pack, pad16, to_rows, up16

from vaemem import _kernels

EPS = 2.0**-24
# How models keep numbers on a CPU: dtype and precision. Half a step of what is kept, and of factors that are made one
# bfloat16 or two, relative to a number just above a power of two.
NUMBERS = [
    ("float32", "highest"),
    ("float32", "high"),
    ("float32", "medium"),
    ("float16", "highest"),
    ("bfloat16", "highest"),
]
STEP = {"float32": EPS, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FACTOR = {0: 0.0, 1: 2.0**-8, 3: 2.0**-16}
SIGMOID = {"bfloat16": 2.0**-12, "float16": 2.0**-18}  # AVX-512 computes it so near on load (kernels/avx512/activate.h)


def pairs_of(backend: str, dtype: str, precision: str) -> int:
    """Products of bfloat16 that make one of numbers there; 0: floats are multiplied."""
    if backend not in ("ref", "amx", "avx512bf16") or (dtype, precision) == ("float32", "highest"):
        return 0
    return 3 if precision == "high" or dtype == "float16" else 1


def as_kept(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to dtype, as the core's kernels take it: bfloat16 as uint16."""
    if dtype == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).view(np.uint16)
    return x.astype(dtype)


def as_float(x: np.ndarray) -> np.ndarray:
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float32)


GUARD = 32  # floats on either side of every output that must keep their value


def guarded(n: int, dtype: type = np.float32) -> tuple[np.ndarray, Callable[[], None]]:
    """An output of n numbers between guards, and a check that the guards were kept."""
    whole = np.full(n + 2 * GUARD, 12345, dtype)

    def check() -> None:
        assert (whole[:GUARD] == 12345).all() and (whole[-GUARD:] == 12345).all()

    return whole[GUARD:-GUARD], check


@dataclass(frozen=True)
class Conv:
    """A norm and SiLU on load where there are groups (-1: the norm of a pixel), nearest 2x where `up`, then the
    convolution and `add`."""

    in_c: int
    out_c: int
    h: int  # of the input
    w: int
    k: int = 3
    stride: int = 1
    up: bool = False
    groups: int = 0
    add: str = ""  # "apart", or "in place": the residual lies where y is written
    model: bool = False  # one of the models' own
    tiny: bool = False  # without a bias, ReLU for SiLU and on store too, and zeros on all sides of x

    def __str__(self) -> str:
        name = f"{self.in_c}-{self.out_c} {self.k}x{self.k} of {self.h}x{self.w}"
        name += (
            " after 2x" * self.up + f" stride {self.stride}" * (self.stride > 1) + self.norm + " with ReLU" * self.tiny
        )
        return name + f" add {self.add}" * bool(self.add)

    @property
    def norm(self) -> str:
        return {0: "", -1: " norm of a pixel"}.get(self.groups, " norm")

    @property
    def y(self) -> tuple[int, int, int]:
        step = 2 if self.up else 1
        return self.out_c, self.h * step // self.stride, self.w * step // self.stride

    @property
    def pad(self) -> int:
        """Zeros above x and before it."""
        return self.k // 2 if self.stride == 1 or self.tiny else 0

    @property
    def pairs_by_winograd(self) -> bool:
        """Whether pairs take Winograd's way, except on AMX (the rule of kernels/cpu.c)."""
        pixels = int(np.prod(self.y[1:]))
        return self.k == 3 and self.stride == 1 and self.in_c % 32 == 0 and (self.up or pixels >= 1024)

    @property
    def flops(self) -> int:
        """Of direct sums. After 2x, folded, there are 4 products for an output and input channel, of PyTorch's 9."""
        return 2 * self.in_c * int(np.prod(self.y)) * (4 if self.up else self.k**2)

    @property
    def bytes_moved(self) -> int:
        """x, y, residual and weights, each once."""
        weights = self.in_c * self.out_c * self.k**2
        return 4 * (self.in_c * self.h * self.w + int(np.prod(self.y)) * (2 if self.add else 1) + weights)


@dataclass(frozen=True)
class Attention:
    """One head over h x w pixels; the result takes the queries' place."""

    c: int
    h: int
    w: int
    model: bool = False

    def __str__(self) -> str:
        return f"attention {self.c} of {self.h}x{self.w}"

    @property
    def n(self) -> int:
        return self.h * self.w

    @property
    def flops(self) -> int:
        return 4 * self.n**2 * self.c

    @property
    def bytes_moved(self) -> int:
        return 4 * 4 * self.n * self.c


CONVS = [
    Conv(32, 32, 9, 70, groups=8, add="apart"),
    Conv(48, 16, 5, 131, groups=8),
    Conv(24, 40, 7, 13, groups=8),
    Conv(40, 3, 6, 10, groups=8),
    Conv(3, 32, 12, 9),
    Conv(64, 32, 11, 17, k=1),
    Conv(96, 96, 3, 5, k=1, groups=8, add="in place"),
    Conv(32, 48, 14, 22, stride=2),
    Conv(24, 24, 9, 67, up=True),
    Conv(32, 16, 1, 1, up=True),
    Conv(160, 32, 2, 3, groups=8, add="in place"),
    # by Winograd on CPUs, from 1024 pixels and 16 channels on: odd sizes cut tiles short, 160 channels take two runs
    Conv(32, 48, 66, 78, stride=2),
    Conv(160, 40, 66, 266, stride=2),
    Conv(48, 24, 18, 230, stride=2, tiny=True),
    Conv(16, 16, 32, 33),
    Conv(24, 40, 33, 37, groups=8),
    Conv(32, 48, 33, 37, groups=8, add="apart"),
    Conv(64, 24, 9, 67, up=True),
    Conv(64, 40, 16, 131, groups=8),
    Conv(160, 32, 40, 26, groups=8, add="in place"),
    Conv(40, 64, 1, 1025),
    Conv(40, 3, 33, 32, groups=8),
    Conv(96, 96, 3, 70, groups=-1, add="in place"),
    Conv(24, 40, 7, 13, groups=-1),
    Conv(72, 3, 40, 131, groups=-1),
    Conv(96, 48, 5, 67, k=1, groups=-1),
    Conv(64, 64, 33, 37, add="in place", tiny=True),
    Conv(48, 40, 14, 22, stride=2, tiny=True),
    Conv(24, 24, 9, 67, up=True, tiny=True),
    Conv(64, 24, 7, 5, k=1, groups=4, add="apart", tiny=True),
    # of a decode to 512x512, and what only an encode has
    Conv(128, 128, 512, 512, groups=32, model=True),
    Conv(256, 256, 256, 256, groups=32, model=True),
    Conv(256, 128, 512, 512, groups=32, model=True),
    Conv(512, 512, 128, 128, groups=32, model=True),
    Conv(512, 512, 64, 64, groups=32, add="in place", model=True),
    Conv(16, 512, 64, 64, model=True),
    Conv(128, 3, 512, 512, groups=32, model=True),
    Conv(96, 96, 512, 512, groups=-1, add="in place", model=True),
    Conv(384, 384, 64, 64, groups=-1, model=True),
    Conv(256, 256, 256, 256, up=True, model=True),
    Conv(512, 512, 128, 128, up=True, model=True),
    Conv(256, 128, 512, 512, k=1, model=True),
    Conv(512, 1536, 64, 64, k=1, groups=32, model=True),
    Conv(128, 128, 512, 512, stride=2, model=True),
]
ATTENTIONS = [
    *(Attention(c, 1, n) for n in (1, 15, 64, 65, 200) for c in (16, 64, 80, 512)),
    Attention(32, 3, 5),
    Attention(24, 9, 17),
    Attention(64, 2, 300),
    Attention(16, 40, 8),
    Attention(48, 13, 13),
    Attention(16, 35, 45),  # more blocks of queries to a task, an odd number of them
    Attention(512, 64, 64, model=True),
]


def small(table: list) -> list:
    return [case for case in table if not case.model]


def models(table: list) -> list:
    return [case for case in table if case.model]


def conv64(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, case: Conv) -> np.ndarray:
    """The convolution in float64."""
    stride, up = case.stride, case.up
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    if up:
        x = x.repeat(2, 1).repeat(2, 2)
    k = weight.shape[2]
    sides = (case.pad, k // 2 if stride == 1 else 1)
    x = np.pad(x, ((0, 0), sides, sides))
    h, w = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
    y = np.zeros((weight.shape[0], h, w))
    for dy in range(k):
        for dx in range(k):
            seen = x[:, dy : dy + stride * h : stride, dx : dx + stride * w : stride][:, :h, :w]
            y += np.tensordot(weight[:, :, dy, dx], seen, 1)
    return y + bias[:, None, None]


def winograd_spread(x: np.ndarray, weight: np.ndarray, case: Conv) -> np.ndarray:
    """Winograd's way to the convolution as kernels/winograd.c takes it for pairs, with each product squared and then
    added: the root of it."""
    into, of, out = (
        ([[1, -1, 0], [0, 1, 0], [0, -1, 1]], [[1, 0, 0], [1, 1, 1], [0, 0, 1]], [[1, 1, 0], [0, 1, 1]])
        if case.up
        else (
            [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
            [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
            [[1, 1, 1, 0], [0, 1, -1, -1]],
        )
    )
    side, step, (c, h, w) = len(into), 1 if case.up else 2, x.shape
    down, across = h if case.up else (h + 1) // 2, w if case.up else (w + 1) // 2
    padded = np.zeros((c, step * down + side - step, step * across + side - step))
    padded[:, 1 : h + 1, 1 : w + 1] = x
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))[:, ::step, ::step]
    v = np.einsum("ra,cyxab,sb->rscyx", into, tiles, into, optimize=True)
    u = np.einsum("ra,ocab,sb->rsoc", of, weight.astype(np.float64), of, optimize=True)
    m = np.array([[np.tensordot(u[r, s] ** 2, v[r, s] ** 2, 1) for s in range(side)] for r in range(side)])
    squares = np.abs(out)
    y = np.einsum("pr,rsoyx,qs->oypxq", squares, m, squares, optimize=True)
    return np.sqrt(y.reshape(len(weight), 2 * down, 2 * across)[:, : case.y[1], : case.y[2]])


class ConvRun:
    """A case with operands, on a backend of the core; `sample`: only every so many channels are compared;
    `by_task`: each task transforms the weights."""

    def __init__(
        self,
        case: Conv,
        backend: str,
        threads: int,
        sample: int = 1,
        dtype: str = "float32",
        precision: str = "highest",
        by_task: bool = False,
    ):
        r = np.random.default_rng(case.in_c + case.out_c)
        self.case, self.sample, self.dtype = case, sample, dtype
        self.pairs = pairs_of(backend, dtype, precision)
        self.sigmoid = SIGMOID.get(dtype, 0.0) * (backend in ("avx512", "avx512bf16", "amx"))
        self.rounds = case.pairs_by_winograd and self.pairs == 1 and backend != "amx"

        def kept(x: np.ndarray) -> np.ndarray:
            return as_float(as_kept(x.astype(np.float32), dtype))

        self.x = kept(r.standard_normal((case.in_c, case.h, case.w)) * 2 + 1)
        scale = np.sqrt(case.in_c * case.k**2)
        self.weight = kept(r.standard_normal((case.out_c, case.in_c, case.k, case.k)) / scale)
        self.bias = r.standard_normal(case.out_c).astype(np.float32) * (not case.tiny)
        self.gamma, self.beta = r.standard_normal((2, case.in_c)).astype(np.float32)
        self.add = kept(r.standard_normal(case.y)) if case.add else None
        shapes = (case.in_c, case.h, case.w, *case.y)
        scratch, sums = _kernels.needs(
            backend, threads, "conv", shapes, (case.k, case.stride, case.up, case.pad), dtype, precision, by_task
        )
        rows = as_kept(np.zeros(0), dtype).dtype.type
        outputs = guarded(up16(case.out_c) * case.y[1] * case.y[2], rows), guarded(sums), guarded(scratch)
        (self.y, self.stats, own), self.kept = zip(*outputs, strict=True)
        own[:] = np.nan  # scratch holds nothing
        self.add_rows = None if self.add is None else as_kept(to_rows(self.add), dtype)
        residual = self.y if case.add == "in place" else self.add_rows
        sums_of_x = self.left_by_the_producer() if case.groups > 0 else None
        self.call = (
            backend, threads, "conv", shapes,
            (case.k, case.stride, case.up, bool(case.groups) * (1 + case.tiny), case.groups, 1e-6, case.pad, case.tiny),
            (as_kept(to_rows(self.x), dtype), self.y, residual, pack(self.weight, dtype),
             None if case.tiny else pad16(self.bias), pad16(self.gamma), pad16(self.beta), sums_of_x, self.stats, own),
            dtype, precision, by_task,
        )  # fmt: skip

    def left_by_the_producer(self) -> np.ndarray:
        """The sums of x in two parts, of the upper rows and the rest."""
        parts, middle = [], (self.case.h + 1) // 2
        for part in (self.x[:, :middle], self.x[:, middle:]):
            p = part.reshape(self.case.in_c, -1).astype(np.float64)
            if p.shape[1]:
                m2 = ((p - p.mean(1, keepdims=True)) ** 2).sum(1)
                parts += [np.full(16, p.shape[1], np.float32), pad16(p.mean(1)), pad16(m2)]
        return np.concatenate(parts)

    def run(self) -> float:
        """Seconds."""
        if self.case.add == "in place" and self.add_rows is not None:
            self.y[:] = self.add_rows.ravel()
        return _kernels.run_pass(*self.call)

    def loaded(self) -> np.ndarray:
        """x as the convolution sees it, in float64."""
        x = self.x.astype(np.float64)
        if not self.case.groups:
            return x
        if self.case.groups < 0:
            length = np.maximum(np.linalg.norm(x, axis=0), 1e-6)
            g = x / length * np.sqrt(self.case.in_c) * self.gamma[:, None, None]
            return g / (1 + np.exp(-g))
        g = x.reshape(self.case.groups, -1)
        g = ((g - g.mean(1, keepdims=True)) / np.sqrt(g.var(1, keepdims=True) + 1e-6)).reshape(x.shape)
        g = g * self.gamma[:, None, None] + self.beta[:, None, None]
        return np.maximum(g, 0) if self.case.tiny else g / (1 + np.exp(-g))

    def check(self) -> tuple[np.ndarray, np.ndarray]:
        """What came, and what float64 gives, which it is close to."""
        for kept in self.kept:
            kept()
        case, some = self.case, slice(None, None, self.sample)
        y = as_float(self.y)
        got = from_rows(y, *case.y)
        loaded, weight, bias = self.loaded(), self.weight[some], self.bias[some]
        add = 0 if self.add is None else self.add[some].astype(np.float64)
        want = conv64(loaded, weight, bias, case) + add
        want = np.maximum(want, 0) if case.tiny else want
        # sums of runs of 128 or so products, or of tiles of 32 on AMX; the loaded value itself carries a few eps from
        # normalise and SiLU; Winograd's sums of up to 24 inputs and products, of factors up to (3/2)^3, add some more
        size = conv64(np.abs(loaded), np.abs(weight), np.abs(bias), case) + np.abs(add)
        # A factor that is rounded to bfloat16 is off by up to half a step, independently of the others: by 0.42 of
        # that in root mean square, two factors by 0.6, and a sum by as much of the root of its squared terms. Seven
        # times that is out of reach, and less than one term that is missing.
        # After 2x up to four taps read one rounded pixel, so their errors are equal and add up to twice those of four
        # pixels. By Winograd's way the rounded factors are the transformed numbers.
        if self.rounds:
            spread = winograd_spread(loaded, weight, case)
        else:
            spread = np.sqrt(conv64(loaded**2, weight.astype(np.float64) ** 2, 0 * bias, case))
        factors = (8.4 if case.up and not self.rounds else 4.2) * FACTOR[self.pairs] * spread
        stored = STEP[self.dtype] * (np.abs(want) + factors) + (2.0**-25 if self.dtype == "float16" else 0)
        assert (np.abs(got[some] - want) <= (40 * EPS + self.sigmoid) * size + 1e-6 + factors + stored).all()
        lanes = y.reshape(case.y[1], -1, case.y[2], 16).transpose(1, 3, 0, 2).reshape(-1, *case.y[1:])
        assert (lanes[case.out_c :] == 0).all(), "channels beyond the last must stay zero"
        self.check_stats(got)
        return got[some], want

    def check_stats(self, got: np.ndarray) -> None:
        """The parts merge to the mean and variance of what was stored."""
        out, wide = self.case.out_c, up16(self.case.out_c)
        parts = self.stats.reshape(-1, 16 + 2 * wide).astype(np.float64)
        count, means, m2s = parts[:, 0], parts[:, 16 : 16 + out], parts[:, 16 + wide :][:, :out]
        flat = got.reshape(out, -1).astype(np.float64)
        assert count.sum() == flat.shape[1]
        mean = (count[:, None] * means).sum(0) / count.sum()
        m2 = (m2s + count[:, None] * (means - mean) ** 2).sum(0)
        assert np.allclose(mean, flat.mean(1), rtol=1e-5, atol=1e-5)
        assert np.allclose(m2, ((flat - flat.mean(1, keepdims=True)) ** 2).sum(1), rtol=1e-4, atol=1e-5)

    @property
    def result(self) -> bytes:
        return self.y.tobytes() + self.stats.tobytes()


class AttentionRun:
    """A case with operands, on a backend of the core; `sample`: only every so many queries are compared."""

    def __init__(
        self,
        case: Attention,
        backend: str,
        threads: int,
        sample: int = 1,
        dtype: str = "float32",
        precision: str = "highest",
    ):
        self.case, self.sample, self.dtype, self.pairs = case, sample, dtype, pairs_of(backend, dtype, precision)
        r = np.random.default_rng(case.c)
        qkv = r.standard_normal((3, case.c, case.h, case.w)) * 2
        self.qkv = as_float(as_kept(qkv.astype(np.float32), dtype))
        self.rows = as_kept(np.concatenate([to_rows(t) for t in self.qkv], axis=1), dtype)
        shapes = (3 * up16(case.c), case.h, case.w, case.c, case.h, case.w)
        scratch, _ = _kernels.needs(backend, threads, "attention", shapes, (1, 1, False, 0), dtype, precision)
        (self.x, own), self.kept = zip(guarded(self.rows.size, self.rows.dtype.type), guarded(scratch), strict=True)
        own[:] = np.nan
        unused = np.zeros(up16(case.c) * case.n, self.rows.dtype)
        how = (1, 1, False, 0, 0, 0.0, 0, False)
        self.call = (backend, threads, "attention", shapes, how, (self.x, unused, *[None] * 7, own))
        self.call += (dtype, precision)

    def run(self) -> float:
        """Seconds."""
        self.x[:] = self.rows.ravel()
        return _kernels.run_pass(*self.call)

    def check(self) -> tuple[np.ndarray, np.ndarray]:
        """What came, and what float64 gives, which it is close to."""
        for kept in self.kept:
            kept()
        c, h, w = self.case.c, self.case.h, self.case.w
        q, k, v = (t.reshape(c, -1).astype(np.float64) for t in self.qkv)
        s = q[:, :: self.sample].T @ k / np.sqrt(c)
        p = np.exp(s - s.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        got = as_float(self.x).reshape(h, 3, -1, w, 16)
        out = got[:, 0].transpose(1, 3, 0, 2).reshape(-1, h * w)[:c].T[:: self.sample]
        # a score is a sum of c products with errors of random signs, which e^x turns into that share of a weight, above
        # and below the fraction; then sums over n keys, and rescaling from run to run (64 keys or more)
        score = (np.sqrt(c) + 2) * EPS * np.abs(s).max(1, keepdims=True)
        sums = 4 * (np.sqrt(self.case.n) + self.case.n / 64 + 4) * EPS
        # As for a convolution, factors that are rounded to bfloat16 are off independently: q and k in a score, whose
        # squared terms' root is spread, then a weight and v.
        factor = 3 * FACTOR[self.pairs]
        spread = np.sqrt((q[:, :: self.sample].T ** 2) @ k**2 / c)
        rounded = 2 * factor * np.sqrt((p**2 * (1 + spread**2)) @ v.T**2) + 2 * factor * np.abs(p @ v.T) * spread.max(
            1, keepdims=True
        )
        stored = STEP[self.dtype] * (np.abs(p @ v.T) + rounded) + 2.0**-25
        assert (np.abs(out - p @ v.T) <= p @ np.abs(v.T) * (2 * score + sums) + rounded + stored).all()
        rows = as_float(self.rows).reshape(got.shape)
        assert np.array_equal(got[:, 1:], rows[:, 1:]), "keys and values were written"
        return out, p @ v.T

    @property
    def result(self) -> bytes:
        return self.x.tobytes()


def on(
    case: Conv | Attention, backend: str, threads: int, sample: int = 1, *numbers: str, by_task: bool = False
) -> Any:
    """numbers: dtype and precision; float32 at the highest without."""
    if isinstance(case, Conv):
        return ConvRun(case, backend, threads, sample, *numbers, by_task=by_task)
    return AttentionRun(case, backend, threads, sample, *numbers)
