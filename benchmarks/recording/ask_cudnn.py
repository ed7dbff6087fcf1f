"""Asks an installed cuDNN, 9.8 or later, for the workspaces of convolutions on a GPU that need not be there.

    from ask_cudnn import Cudnn
    Cudnn().conv(find_gpu("RTX 4090").device_json, Conv("float16", 1, 128, 512, 512, 128, 3))["bytes"]

cuDNN aborts without libcublasLt, and 9.8 and 9.10 crash for compute capability 10.0. So it runs in a process of its
own, and after a crash the next question starts another.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vaemem.prediction.profiles import Conv

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "ask_cudnn"
PRINTED = BUILT / "printed.txt"  # by cuDNN: 9.28 complains about each entry point that a stand-in driver lacks
ASKER = [ROOT / name for name in ("benchmarks/recording/ask_cudnn.c", "kernels/cudnn/cudnn_api.c", "kernels/status.c")]
HEADERS = [ROOT / name for name in ("kernels/cudnn/cudnn_api.h", "kernels/cudnn/conv.h", "kernels/kernels.h")]
DTYPES = ("float32", "float16", "bfloat16")  # vm_dtype
Extents = ctypes.c_int64 * 3


class VAERequest(ctypes.Structure):
    """vm_conv of kernels/cudnn/conv.h."""

    _fields_ = [
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("tf32", "nhwc", "transposed")),
        ("dims", ctypes.c_int),
        *((name, ctypes.c_int64) for name in ("n", "c", "k", "groups")),
        *((name, Extents) for name in ("size", "filter", "stride", "padding", "dilation", "output_padding")),
    ]

    @classmethod
    def of(cls, conv: Conv, tf32: bool) -> VAERequest:
        def extents(value: Any, none: int) -> Any:
            along = conv.along(value)
            return Extents(*(none,) * (3 - len(along)), *along)

        return cls(
            DTYPES.index(conv.dtype), tf32, conv.layout == "nhwc", conv.output_padding is not None, len(conv.size),
            conv.n, conv.c, conv.k, conv.groups, extents(conv.size, 1), extents(conv.r, 1), extents(conv.stride, 1),
            extents(conv.padding, 0), extents(conv.dilation, 1), extents(conv.output_padding or 0, 0),
        )  # fmt: skip


class Plan(ctypes.Structure):
    """vm_conv_plan of ask_cudnn.c."""

    _fields_ = [
        ("found", ctypes.c_bool),
        *((name, ctypes.c_int64) for name in ("bytes", "least")),
        *((name, ctypes.c_int) for name in ("rank", "untried")),
        ("fallback", ctypes.c_bool),
        ("engine", ctypes.c_char * 256),
    ]


def build(name: str, sources: list[Path], *flags: str) -> Path:
    """Compile a shared library into build/, if it is older than its sources."""
    library = BUILT / name
    if not library.exists() or library.stat().st_mtime < max(path.stat().st_mtime for path in [*sources, *HEADERS]):
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            new = os.path.join(folder, name)
            command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", *flags]
            subprocess.run([*command, "-o", new, *sources, "-lpthread", "-ldl"], check=True)
            os.replace(new, library)
    return library


def build_no_driver() -> Path:
    """Compile the library that stands in for libcuda.so.1 on a machine without a driver."""
    return build("libcuda.so.1", [ROOT / "benchmarks" / "recording" / "no_driver.c"], "-Wl,-soname,libcuda.so.1")


class Cudnn:
    """An installed cuDNN in a process of its own.

    Parameters
    ----------
    path : str, optional
        libcudnn.so.9 or its folder; by default the one that the loader finds.

    Attributes
    ----------
    version : str
        Such as ``"9.28.0"``.

    Raises
    ------
    OSError
        There is no cuDNN, or it is older than 9.8, or it finds no libcublasLt.
    """

    def __init__(self, path: str | None = None):
        self._path = os.path.join(path, "libcudnn.so.9") if path and os.path.isdir(path) else path
        self._process: ProcessPoolExecutor | None = None
        self.version: str = self._call(_version)

    def conv(self, device_json: str, conv: Conv, tf32: bool = True, every: bool = False) -> dict[str, Any] | None:
        """Return the plan that PyTorch would run, with its workspace in ``bytes``, or None if cuDNN has no engine.

        Parameters
        ----------
        device_json : str
            cuDNN's device properties (`vaemem.prediction.gpus.Gpu.device_json`).
        conv : Conv
        tf32 : bool
            ``torch.backends.cudnn.allow_tf32``.
        every : bool
            Whether ``least`` counts the plans that PyTorch tries next.

        Raises
        ------
        RuntimeError
            cuDNN refuses the question, or crashes.
        """
        return self._call(_conv, device_json, tuple(conv), tf32, every)

    def _call(self, function: Any, *arguments: Any) -> Any:
        if self._process is None:
            self._process = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            return self._process.submit(function, self._path, *arguments).result()
        except BrokenProcessPool:
            self._process = None
            raise RuntimeError(f"cuDNN ended its process ({PRINTED} has its last words)") from None


# ---- in the process of its own ----


@functools.cache
def _open(path: str | None) -> tuple[ctypes.CDLL, ctypes.c_void_p, int]:
    asker, no_driver = build("ask_cudnn.so", ASKER), build_no_driver()
    with open(PRINTED, "wb") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        ctypes.CDLL(str(no_driver))
    library = ctypes.CDLL(str(asker))
    library.vm_error.restype = ctypes.c_char_p
    cudnn, version = ctypes.c_void_p(), ctypes.c_size_t()
    if library.vm_ask_open(path and path.encode(), ctypes.byref(cudnn), ctypes.byref(version)):
        raise OSError(library.vm_error().decode())
    return library, cudnn, version.value


def _version(path: str | None) -> str:
    version = _open(path)[2]
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _conv(path: str | None, device_json: str, conv: tuple[Any, ...], tf32: bool, every: bool) -> dict[str, Any] | None:
    library, cudnn, _ = _open(path)
    question, plan = VAERequest.of(Conv(*conv), tf32), Plan()
    if library.vm_ask_conv(cudnn, device_json.encode(), ctypes.byref(question), every, ctypes.byref(plan)):
        raise RuntimeError(library.vm_error().decode())
    names = ("bytes", "least", "engine", "rank", "untried", "fallback")
    return {name: getattr(plan, name) for name in names} | {"engine": plan.engine.decode()} if plan.found else None
