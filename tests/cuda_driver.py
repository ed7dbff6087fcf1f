"""The twin of emulator.build.Kernels for a GPU: kernels launched by name through the CUDA driver, by ctypes.

Arrays lie in pinned host memory. Where addresses are unified, which they are on every 64-bit system, kernels use the
host's pointers to it as they are, so the tests hand the same arrays to a GPU and to the emulator. It is slow memory for
a GPU, which these tests do not mind.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import numpy as np
import pytest
from emulator import build

sys.path.insert(0, str(build.CUDA))
import fatbins

MAJOR, MINOR, MOST_SHARED, UNIFIED, MULTIPROCESSORS = 75, 76, 97, 41, 16  # CUdevice_attribute
DYNAMIC_SHARED, SHARED_CARVEOUT = 8, 9  # CUfunction_attribute
FLOAT16, BFLOAT16, SWIZZLE_128B, L2_256B = 6, 9, 3, 3  # of a tensor map: CUtensorMapDataType, _swizzle, _L2promotion


class Driver:
    """libcuda.so.1 with device 0's context, which stays this thread's."""

    def __init__(self, path: str = "libcuda.so.1"):
        self.library = ctypes.CDLL(path)
        self.call("cuInit", c_uint(0))
        self.device = self.new("cuDeviceGet", c_int(0), kind=c_int)
        self.call("cuCtxPushCurrent_v2", self.new("cuDevicePrimaryCtxRetain", self.device))
        if not self.attribute(UNIFIED):
            pytest.fail("a GPU with unified addresses is wanted, and this one has none")

    def call(self, name: str, *args) -> None:
        if code := getattr(self.library, name)(*args):
            why = c_char_p()
            self.library.cuGetErrorString(c_int(code), byref(why))
            raise RuntimeError(f"{name}: {why.value.decode() if why.value else 'unknown'} ({code})")

    def new(self, name: str, *args, kind=c_void_p):
        out = kind()
        self.call(name, byref(out), *args)
        return out

    def attribute(self, which: int) -> int:
        return self.new("cuDeviceGetAttribute", c_int(which), self.device, kind=c_int).value

    @property
    def target(self) -> str:
        """Of nvcc, such as "sm_90"."""
        return f"sm_{10 * self.attribute(MAJOR) + self.attribute(MINOR)}"

    def empty(self, size: int) -> np.ndarray:
        """Bytes that the GPU reads and writes where they are."""
        return np.asarray(Pinned(self, size))


class Pinned:
    """A block of pinned memory, given back with the last array that lies in it."""

    def __init__(self, driver: Driver, size: int):
        self.address = None
        self.driver = driver
        self.address = driver.new("cuMemHostAlloc", c_size_t(size), c_uint(0))
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address.value, False),
        }

    def __del__(self):
        if self.address:
            self.driver.library.cuMemFreeHost(self.address)  # refused where a fault has ended the context


class Kernels:
    """As emulator.build.Kernels. A fault ends the process's context: every launch after it fails with the same words.

    Parameters
    ----------
    driver : Driver
    images : list of bytes
        What cuModuleLoadData takes.
    """

    def __init__(self, driver: Driver, images: list[bytes]):
        self.driver = driver
        self.modules = [driver.new("cuModuleLoadData", image) for image in images]

    def function(self, name: str) -> c_void_p:
        for module in self.modules:
            found = c_void_p()
            if not self.driver.library.cuModuleGetFunction(byref(found), module, name.encode()):
                return found
        raise RuntimeError(f"no kernel is called {name}")

    def map(self, dtype: str, first: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]):
        """A vm_tensor_map of numbers of 2 bytes; strides in bytes. Zeros outside, rows swizzled."""
        room = (c_uint64 * 24)()
        at = -(ctypes.addressof(room) // 8) % 8  # the driver wants it at a multiple of 64 bytes
        out = (c_uint64 * 16).from_buffer(room, 8 * at)
        sizes = (c_uint64 * 3)(*dims), (c_uint64 * 2)(*strides), (c_uint * 3)(*box), (c_uint * 3)(1, 1, 1)
        kind = c_int({"f16": FLOAT16, "bf16": BFLOAT16}[dtype])
        options = (c_int(option) for option in (0, SWIZZLE_128B, L2_256B, 0))
        self.driver.call("cuTensorMapEncodeTiled", out, kind, c_uint(3), c_void_p(first), *sizes, *options)
        return out

    def enqueue(self, kernel, grid, block, args: ctypes.Structure, shared: int = 0) -> None:
        function, most = self.function(kernel), self.driver.attribute(MOST_SHARED)
        if shared > most:
            pytest.skip(f"{kernel} needs {shared} bytes of shared memory here, and this GPU has {most}")
        sizes = [c_uint(size) for three in (grid, block) for size in (*three, 1, 1)[:3]]
        self.driver.call("cuFuncSetAttribute", function, c_int(DYNAMIC_SHARED), c_int(shared))
        self.driver.call("cuFuncSetAttribute", function, c_int(SHARED_CARVEOUT), c_int(100))  # all that there is
        params = (c_void_p * 1)(ctypes.addressof(args))
        self.driver.call("cuLaunchKernel", function, *sizes, c_uint(shared), None, params, None)

    def launch(self, kernel, grid, block, args: ctypes.Structure, shared: int = 0, seed: int = 1) -> None:
        """Waits until it has run. seed: a GPU has its own order of threads."""
        try:
            self.enqueue(kernel, grid, block, args, shared)
            self.driver.call("cuCtxSynchronize")
        except RuntimeError as error:
            raise RuntimeError(f"{kernel}: {error}") from None


@functools.cache
def driver() -> Driver | None:
    """Where VAEMEM_TEST_GPU=1 asks for a GPU, its driver (VAEMEM_LIBCUDA names another); None: kernels are emulated."""
    if os.environ.get("VAEMEM_TEST_GPU") != "1":
        return None
    return Driver(os.environ.get("VAEMEM_LIBCUDA") or "libcuda.so.1")


def image(source: Path, folder: Path) -> bytes:
    """The machine code of a .cu file: what setup.py has compiled of it, or nvcc's."""
    if source.parent != build.CUDA:
        target = folder / f"{source.stem}.fatbin"
        arch = driver().target.removeprefix("sm_") + "a" * (driver().target == "sm_90")  # as fatbins.py
        flags = ["-std=c++17", "-O3", "-fatbin", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-I", build.CUDA]
        build.run(build.nvcc(), *flags, "-o", target, source)
        return target.read_bytes()
    folder = fatbins.find()
    if folder is None:
        pytest.fail(f"{source.name}: found no machine code of these sources: run setup.py build_ext --inplace first")
    return (Path(folder) / f"{source.stem}.fatbin").read_bytes()


def load(sources: list[Path], folder: Path) -> Kernels:
    return Kernels(driver(), [image(source, folder) for source in sources])
