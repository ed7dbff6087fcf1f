"""What the tests of conv_cudnn.c share: it by ctypes, in processes of their own, since a process has one cuDNN, and it
may crash."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.managers import BaseManager
from pathlib import Path

import ml_dtypes
import numpy as np
from cuda_kernels import Memory
from emulator import build

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STATUS = ("OK", "EINVAL", "ENOMEM", "EOVERFLOW", "ECANCELLED", "EDEVICE")
MIB = 1 << 20


Extents = ctypes.c_int64 * 3


class Key(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("tf32", "nhwc", "transposed")),
        ("dims", ctypes.c_int),
        *((name, ctypes.c_int64) for name in "n c k groups".split()),
        *((name, Extents) for name in "size filter stride padding dilation output_padding".split()),
        ("limit", ctypes.c_size_t),
    ]

    def __init__(self, dtype, tf32, h, w, c, k, r, stride, limit):
        extents = [(1, h, w), (1, r, r), (1, stride, stride), (0, 0, 0), (1, 1, 1), (0, 0, 0)]
        super().__init__(dtype, tf32, True, False, 2, 1, c, k, 1, *(Extents(*each) for each in extents), limit)


def key(dtype="float32", h=6, w=7, c=16, k=32, r=3, stride=1, limit=MIB, tf32=False):
    return list(DTYPES).index(dtype), tf32, h, w, c, k, r, stride, limit


class Convs:
    """conv_cudnn.c by ctypes, in the process where this is made. A failure raises RuntimeError("EDEVICE: ...")."""

    def __init__(self, library: str, cudnn: str | None, device_json: str | None = None, no_driver: str | None = None):
        if no_driver:
            with contextlib.suppress(OSError):
                ctypes.CDLL("libcuda.so.1")
            ctypes.CDLL(no_driver)
            quiet = os.open(os.devnull, os.O_WRONLY)  # cuDNN says what the stand-in driver lacks
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        self.library = ctypes.CDLL(library)
        for name in ("vm_error", "vm_cudnn_convs_name"):
            getattr(self.library, name).restype = ctypes.c_char_p
        self.device_json = device_json and device_json.encode()
        self.cudnn = cudnn and cudnn.encode()
        self.convs = ctypes.c_void_p()

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"{STATUS[status]}: {self.library.vm_error().decode()}")

    def open(self) -> None:
        self._check(self.library.vm_cudnn_convs_new(self.cudnn, self.device_json, ctypes.byref(self.convs)))

    def close(self) -> None:
        self.library.vm_cudnn_convs_free(self.convs)
        self.convs = ctypes.c_void_p()

    def version(self) -> int:
        return self.library.vm_cudnn_convs_version(self.convs)

    def count(self) -> int:
        return self.library.vm_cudnn_convs_count(self.convs)

    def bytes(self, key) -> int:
        out = ctypes.c_size_t()
        self._check(self.library.vm_cudnn_convs_bytes(self.convs, ctypes.byref(Key(*key)), ctypes.byref(out)))
        return out.value

    def bytes_at_once(self, keys, threads: int = 4) -> bool:
        """Whether threads that set off together, each for all keys, are told the same."""
        together = threading.Barrier(threads)

        def plan_all(_):
            together.wait()
            return [self.bytes(key) for key in keys]

        with ThreadPoolExecutor(threads) as pool:
            told = list(pool.map(plan_all, range(threads)))
        return all(each == told[0] for each in told)

    def name(self, key) -> str | None:
        name = self.library.vm_cudnn_convs_name(self.convs, ctypes.byref(Key(*key)))
        return name.decode() if name else None

    def _memory(self, key, x, w, workspace):
        """Memory, and in it x, w, y and the workspace."""
        of, memory = Key(*key), Memory()
        y_shape = *((n - of.filter[1]) // of.stride[1] + 1 for n in of.size[1:]), of.k
        arrays = memory.copy(x), memory.copy(w), memory.empty(y_shape, x.dtype), memory.empty(workspace, np.uint8)
        return memory, arrays, [ctypes.c_void_p(a.ctypes.data) if a.size else None for a in arrays]

    def run(self, key, x, w, workspace=None):
        """y of x [h][w][c] and w [k][r][r][c]; workspace: bytes, by default as many as are wanted."""
        memory, arrays, at = self._memory(key, x, w, self.bytes(key) if workspace is None else workspace)
        self._check(self.library.vm_cudnn_convs_run(self.convs, ctypes.byref(Key(*key)), None, *at))
        memory.check()
        assert [a.tobytes() for a in arrays[:2]] == [x.tobytes(), w.tobytes()], "wrote into an input"
        used = arrays[3] != Memory.FILL
        assert workspace is not None or used.all(), "the stand-in did not use the workspace that it asked for"
        return arrays[2].copy()

    def tune(self, key, x, w, times):
        """Candidates are said to take `times`; how many were tried."""
        tried = []

        @ctypes.CFUNCTYPE(
            ctypes.c_double, ctypes.c_void_p, ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        )
        def timer(_, run, job):
            tried.append(run(job))
            return -1.0 if tried[-1] else times[len(tried) - 1]

        memory, _, at = self._memory(key, x, w, key[-1])
        of = ctypes.byref(Key(*key))
        self._check(self.library.vm_cudnn_convs_tune(self.convs, of, None, *at, timer, None))
        memory.check()
        return len(tried)

    # of the stand-in

    def _stand_in(self):
        return ctypes.CDLL("libcudnn.so.9", mode=os.RTLD_NOLOAD)

    def calls(self) -> int:
        return self._stand_in().emulator_cudnn_calls()

    def live(self) -> int:
        return self._stand_in().emulator_cudnn_live()

    def fail_at(self, nth: int, status: int = 4000) -> None:
        self._stand_in().emulator_cudnn_fail_at(ctypes.c_size_t(nth), status)

    def with_faults(self, key, x, w):
        """Opens, plans, runs and closes with each call failing in turn: what was said, or made."""
        self.close()
        results = []
        for nth in itertools.count(1):
            start = self.calls()
            self.fail_at(nth)
            try:
                self.open()
                results.append(self.run(key, x, w))
            except RuntimeError as error:
                results.append(str(error))
            self.close()
            assert self.live() == 0, f"call {nth} leaks"
            if self.calls() - start < nth:
                self.fail_at(0)
                self.open()
                return results


def compile_cudnn(folder: Path, *flags: str, source: Path | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "libcudnn.so.9"
    own = ["-std=gnu11", "-march=native", *build.FLAGS, "-shared", "-Wl,-soname,libcudnn.so.9", *flags]
    build.run(build.compiler("gcc"), *own, "-o", out, source or build.HERE / "libcudnn.c", "-lm", "-ldl", "-pthread")
    return str(out)


class Process(BaseManager):
    """A process in which Convs are made."""


Process.register("Convs", Convs)


@contextlib.contextmanager
def process():
    one = Process(ctx=multiprocessing.get_context("spawn"))
    one.start()
    try:
        yield one
    finally:
        one.shutdown()
