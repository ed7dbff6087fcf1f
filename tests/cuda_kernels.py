"""What the tests of load, store and merge share: the kernels' arguments, memory with guards, and tolerances.

Inputs are numbers of the kernel's own type, so the errors are the kernel's. E is a rounding in float, UNIT the one to
the type that is stored; a half below 2^-14 is rounded by LEAST, and float's own subnormals may be flushed.
"""

import ctypes
import mmap
from ctypes import c_float, c_int32, c_uint32, c_void_p

import ml_dtypes
import numpy as np
import pytest
from emulator import build

E = 2.0**-24
TYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"f32": E, "f16": 2.0**-11, "bf16": 2.0**-8, "u8": 0}
LEAST = {"f32": 1e-36, "f16": 2.0**-25, "bf16": 1e-36, "u8": 0}
FORMATS = {"rows": 0, "f32": 1, "u8": 2, "f16": 3, "bf16": 4}  # vm_format
BLOCK, THREADS, LANES = 16, 256, 64
every_type = pytest.mark.parametrize("dtype", TYPES)
every_format = pytest.mark.parametrize("format_", [f for f in FORMATS if f != "rows"])


class LoadArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "scale", "shift")),
        *((name, c_uint32) for name in ("x_h", "x_w", "x_c", "x_pitch")),
        *((name, c_int32) for name in ("top", "left")),
        *((name, c_uint32) for name in ("rows", "width", "channels", "format", "silu")),
        *((name, c_float) for name in ("in_scale", "in_shift", "multiply")),
    )


class StoreArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("raw", "bias", "add", "y", "stats", "flags")),
        *((name, c_uint32) for name in ("y_h", "y_w", "y_c", "y_pitch", "add_pitch")),
        *((name, c_uint32) for name in ("row0", "rows", "channels", "part_pixels", "up", "format", "clamp_from")),
        ("bias_scale", c_float),
    )


class MergeArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("stats", "gamma", "beta", "scale", "shift")),
        *((name, c_uint32) for name in ("parts", "c", "groups")),
        ("eps", c_float),
    )


def build_kernels(folder, *names):
    try:
        return build.Kernels(folder, [build.CUDA / f"{name}.cu" for name in names])
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


class Memory:
    """Arrays at 64-byte boundaries between guards."""

    FILL, GUARD = 0xA5, 256

    def __init__(self):
        self.guards = []

    def empty(self, shape, dtype):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        whole = np.full(size + 2 * self.GUARD + 64, self.FILL, np.uint8)
        first = self.GUARD + -(whole.ctypes.data + self.GUARD) % 64
        self.guards += [whole[:first], whole[first + size :]]
        return whole[first : first + size].view(dtype).reshape(shape)

    def copy(self, array):
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def check(self):
        assert all((guard == self.FILL).all() for guard in self.guards)


def untouched(array):
    return (np.ascontiguousarray(array).view(np.uint8) == Memory.FILL).all()


def round_up(n):
    return -(-n // BLOCK) * BLOCK


def numbers(rng, shape, dtype, scale=1.0, mean=0.0):
    return (rng.standard_normal(shape) * scale + mean).astype(dtype)


def close(got, want, tolerance):
    """NaN is not close to anything."""
    error = np.abs(got.astype(np.float64) - want)
    far = ~(error <= tolerance)
    assert not far.any(), (
        f"{far.sum()} of {far.size}, error / tolerance {np.nanmax(error / np.maximum(tolerance, 1e-300))}"
    )


def far(pixels, pitch, dtype):
    """An array that is mostly never touched, so that it takes no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which mmap names since 3.13
    try:
        pages = mmap.mmap(-1, pixels * pitch * dtype.itemsize, flags=flags)
    except OSError as refused:
        pytest.skip(f"no address space for it: {refused}")
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(pixels, pitch)


def run_merge(kernels, sums, gamma, beta, groups, eps, seed=1):
    memory, c = Memory(), len(gamma)
    sums, gamma, beta = (memory.copy(v) for v in (sums, gamma, beta))
    scale, shift = (memory.empty(round_up(c), np.float32) for _ in range(2))
    pointers = [v.ctypes.data for v in (sums, gamma, beta, scale, shift)]
    args = MergeArgs(*pointers, parts=len(sums), c=c, groups=groups, eps=eps)
    kernels.launch("vm_merge", (groups,), (THREADS,), args, seed=seed)
    memory.check()
    assert (scale[c:] == 0).all() and (shift[c:] == 0).all()
    return scale[:c], shift[:c]
