"""Where the CUDA tests run: a GPU where there is one, else the stand-ins of tests/emulator, where the CPU does all that
our host code and kernels ask for. One process has one driver, so that is decided once.

Tolerances of whole runs. float32 without TF32: 1e-5 of the norm, the project's bar. Halves: 1.1 times PyTorch's own
error in the same type, the project's bar; where torch is not compared, one rounding of size u = 2^-9 (bfloat16) or
2^-12 (float16) for each of about 30 passes, added as random numbers are, is 6 u: 12 u leaves room for weights, which
are rounded too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import struct
from collections.abc import Iterable

import numpy as np
import pytest
from engine import error, small_vae

from vaemem.engine import device

try:
    from vaemem import _cuda
except ImportError:
    _cuda = None

U = {"float32": 1e-6, "float16": 2.0**-12, "bfloat16": 2.0**-9}
LIMIT = {"float32": 1e-5, "float16": 12 * U["float16"], "bfloat16": 12 * U["bfloat16"]}
LIMIT |= {f"{dtype} own": LIMIT[dtype] for dtype in ("float16", "bfloat16")}  # our own convolution
every_dtype = pytest.mark.parametrize("dtype", LIMIT)
GPU_WANTED = os.environ.get("VAEMEM_TEST_GPU") == "1"  # make gpu ONLY=test


@functools.cache
def _find() -> tuple[str, dict[str, str]]:
    """ "gpu" or "emulator"; skips where neither can be had."""
    if _cuda is None:
        pytest.skip("the GPU backend is not installed")
    try:
        if _cuda.devices():
            return "gpu", {}
    except RuntimeError as error:
        if GPU_WANTED:
            pytest.fail(f"make gpu ONLY=test: {error}")
    from emulator import build

    try:
        libcuda, libcudnn = build.build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return "emulator", {"VAEMEM_LIBCUDA": str(libcuda), "VAEMEM_CUDNN": str(libcudnn)}


def go(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: the device "cuda" is the GPU, or the emulator."""
    for name, value in _find()[1].items():
        monkeypatch.setenv(name, value)


def machine_code(data: bytes) -> list[set[tuple[int, int]]]:
    """Each fat binary in data: {(kind, architecture)}, kind 1 PTX, 2 machine code."""
    magic = (0xBA55ED50).to_bytes(4, "little")
    at, binaries = data.find(magic), []
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        entry, end, found = at + header, at + header + size, set()
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            found.add((kind, *struct.unpack_from("<I", data, entry + 28)))
            entry += entry_header + entry_size
        binaries.append(found)
        at = data.find(magic, end)
    return binaries


def place() -> str:
    return _find()[0]


def kind_of(dtype):
    """What VAE.load takes for "float16 own" and the like."""
    dtype, _, own = dtype.partition(" ")
    return {"device": "cuda", "dtype": dtype, "convolution": own or "cudnn"}


def on_gpu(name="sd", dtype="float32"):
    return small_vae(name, **kind_of(dtype))


def pair(name="sd", dtype="float32"):
    """The same VAE on the CPU and there."""
    return small_vae(name), on_gpu(name, dtype)


class Emulator:
    """The stand-in driver, for what only it can do: faults and counts."""

    def __init__(self):
        self.driver = ctypes.CDLL(os.environ["VAEMEM_LIBCUDA"])
        for name in ("emulator_calls", "emulator_launches", "emulator_peak"):
            getattr(self.driver, name).restype = ctypes.c_size_t

    @functools.cached_property
    def inside(self) -> Array:
        """To be entered: the device's context."""
        return Array(np.zeros(1, np.float32))

    def live(self) -> tuple[int, ...]:
        """Device bytes, blocks, pinned blocks, streams, events, graphs, executable graphs, modules, context users."""
        counts = (ctypes.c_size_t * 9)()
        self.driver.emulator_live(counts)
        return tuple(counts)

    def settled(self) -> tuple[int, ...]:
        """`live`, once nothing is left of earlier tests that only the garbage collector frees."""
        gc.collect()
        return self.live()

    def calls(self) -> int:
        """Of the driver, by anyone."""
        return self.driver.emulator_calls()

    def launches(self) -> int:
        """Of our kernels."""
        return self.driver.emulator_launches()

    def peak(self) -> int:
        """The most device bytes since the last question."""
        return self.driver.emulator_peak()

    def stream(self) -> int:
        """A new stream, as a library's own would be."""
        made = ctypes.c_uint64()
        with self.inside:
            assert not self.driver.cuStreamCreate(ctypes.byref(made), 1)
        return made.value

    def synchronize(self, stream: int) -> None:
        with self.inside:
            assert not self.driver.cuStreamSynchronize(ctypes.c_uint64(stream))

    @contextlib.contextmanager
    def capturing(self, stream: int):
        graph = ctypes.c_void_p()
        with self.inside:
            assert not self.driver.cuStreamBeginCapture_v2(ctypes.c_uint64(stream), 2)
        try:
            yield
        finally:
            with self.inside:
                self.driver.cuStreamEndCapture(ctypes.c_uint64(stream), ctypes.byref(graph))

    @contextlib.contextmanager
    def failing(self, nth: int, code: int = 719, sticky: bool = False):
        """The nth call of the driver fails; yields a function that says whether it has come to that."""
        start = self.driver.emulator_calls()
        self.driver.emulator_fail_at(ctypes.c_size_t(nth), code, int(sticky))
        try:
            yield lambda: self.driver.emulator_calls() - start >= nth
        finally:
            self.driver.emulator_fail_at(ctypes.c_size_t(0), 0, 0)

    def fail_calls(self, vae, z: np.ndarray, want: np.ndarray, limit: float, calls: Iterable[int]) -> int:
        """Let a decode of z fail at each of these calls of the driver. It raises with CUDA's words, or makes up for it,
        and the next one gives `want`. Ends at a call that a decode no longer comes to, and returns its number."""
        vae.decode(z)
        for nth in calls:
            with self.failing(nth) as came:
                try:
                    vae.decode(z)
                except (RuntimeError, MemoryError) as fault:
                    assert "CUDA" in str(fault), fault
                else:
                    if not came():
                        return nth
            assert error(vae.decode(z), want.astype(np.float64)) <= limit, nth
        raise AssertionError("a decode has more calls than were tried")


def emulator() -> Emulator:
    if place() != "emulator":
        pytest.skip("faults and counts are the emulator's")
    return Emulator()


class Array:
    """An array in device memory that speaks DLPack and belongs to no library we know."""

    def __init__(self, values: np.ndarray, dtype: str | None = None, device: int = 0):
        self.values = np.ascontiguousarray(values)
        self.dtype = dtype or self.values.dtype.name
        self.shape, self.device = self.values.shape, device
        self.driver = ctypes.CDLL(os.environ.get("VAEMEM_LIBCUDA") or "libcuda.so.1")
        self.address = ctypes.c_uint64()
        with self:
            assert not self.driver.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(self.values.nbytes))
            data = self.values.ctypes.data_as(ctypes.c_void_p)
            assert not self.driver.cuMemcpyHtoDAsync_v2(self.address, data, ctypes.c_size_t(self.values.nbytes), None)
            assert not self.driver.cuStreamSynchronize(None)

    def __enter__(self):
        self.context, device = ctypes.c_void_p(), ctypes.c_int()
        assert not self.driver.cuDeviceGet(ctypes.byref(device), 0)
        assert not self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), device)
        assert not self.driver.cuCtxPushCurrent_v2(self.context)
        return self

    def __exit__(self, *_):
        left = ctypes.c_void_p()  # the context stays retained: this array lies in it
        assert not self.driver.cuCtxPopCurrent_v2(ctypes.byref(left))

    def numpy(self) -> np.ndarray:
        out = np.empty_like(self.values)
        with self:
            data = out.ctypes.data_as(ctypes.c_void_p)
            assert not self.driver.cuMemcpyDtoHAsync_v2(data, self.address, ctypes.c_size_t(out.nbytes), None)
            assert not self.driver.cuStreamSynchronize(None)
        return out

    def __dlpack_device__(self):
        return device.CUDA, self.device

    def __dlpack__(self, stream=None):
        return _cuda.lend(self.address.value, self.shape, self.dtype, self.device, self)

    def __del__(self):
        if getattr(self, "address", None) and self.address.value:
            with self:
                self.driver.cuCtxSynchronize()
                self.driver.cuMemFree_v2(self.address)
