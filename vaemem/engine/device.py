"""Devices that models run on: instruction sets of the CPU, and GPUs. Arrays enter and leave GPUs uncopied (DLPack)."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vaemem import _core
from vaemem._common import DTYPES, PRECISIONS, __version__, choose, distinct, flag, meant, mib, number_in
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._numpy import ml_dtypes, np
from vaemem._types import Dtype, DtypeName, Precision
from vaemem.engine.cudnn_path import find_cudnn


def _import_cuda() -> Any:
    """Import the GPU backend: the one built with the package, otherwise that of the wheel vaemem-cuda."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("vaemem._cuda")
    with contextlib.suppress(ImportError):
        if importlib.import_module("vaemem_cuda").__version__ == __version__:
            return importlib.import_module("vaemem_cuda._cuda")
    return None


if TYPE_CHECKING:
    from vaemem import _cuda
else:
    _cuda = _import_cuda()

CONVOLUTIONS = ("auto", "cudnn", "own")
ATTENTION_CHANNELS = 512  # the most of attention on a GPU: VM_ATTENTION_CHANNELS in kernels/cuda/cuda.h
CUDA = 2  # DLPack's number for CUDA memory
LEGACY_STREAM = 1  # CUDA's name for stream 0


# ---- the CPU's instruction sets ----

VARIABLE = "VAEMEM_DISABLE"
WGMMA = "wgmma"  # the GPU kernels for compute capability 9.0, which VAEMEM_DISABLE may name too
_disabled = ""  # value of the variable when vaemem was imported


def read_disabled() -> None:
    """Disable the instruction sets and GPU kernels that VAEMEM_DISABLE names. Warn of names that are unknown here."""
    global _disabled
    _disabled = os.environ.get(VARIABLE, "")
    lists = [_core.backends(dtype, precision) for dtype in DTYPES for precision in PRECISIONS[:-1]]  # fp8 is for GPUs
    known = distinct(name for names in lists for name, _ in names if name != "ref")
    named = distinct(filter(None, _disabled.split(",")))
    for name in named:
        if name not in (*known, WGMMA):
            what = (
                f"expected names of {', '.join(known)}, separated by commas" if known else "there is nothing to disable"
            )
            warnings.warn(f"{VARIABLE}: {what}, got {name!r}, which changes nothing", stacklevel=3)
    _core.disable(",".join(name for name in named if name in known))


def _warn_of_change(stacklevel: int) -> None:
    """Warn if the variable has changed since the import."""
    now = os.environ.get(VARIABLE, "")
    if now != _disabled:
        warnings.warn(
            f"{VARIABLE}: the value {_disabled!r} from the import of vaemem still holds; the new value {now!r} has "
            "no effect: set it before the import, in a new process",
            stacklevel=stacklevel + 1,
        )


# ---- backends ----


def _gpus(dtype: str, precision: str) -> list[dict[str, Any]]:
    """Return a row of `backends` for each GPU, or one row that says why there is none."""
    least = 90 if precision == "fp8" else 80 if dtype == "bfloat16" or precision != "highest" else 75
    row, why = {"name": "cuda", "device": "cuda", "usable": False, "chosen": False}, "CUDA: the driver sees no GPU"
    if _cuda is None:
        build = f"install the wheel of vaemem-cuda {__version__}, or with nvcc run VAEMEM_CUDA=1 pip install ."
        what_to_do = build if sys.platform == "linux" else "it exists only for Linux"
        return [row | {"why": f"the GPU backend is not installed: {what_to_do}"}]
    try:
        found = _cuda.devices(os.environ.get("VAEMEM_LIBCUDA"))
    except RuntimeError as error:
        found, why = [], str(error)
    rows = []
    for i, gpu in enumerate(found):
        major, minor = gpu["capability"]
        usable = major * 10 + minor == least if precision == "fp8" else major * 10 + minor >= least
        later = "" if precision == "fp8" else " or later"
        too_old = f"{gpu['name']} has compute capability {major}.{minor}: expected {least / 10}{later}"
        about = {"name": gpu["name"], "device": f"cuda:{i}", "usable": usable, "why": "" if usable else too_old}
        rows.append(row | about)
    return rows or [row | {"why": why}]


def backends(dtype: Dtype = "float32", precision: Precision = "highest") -> list[dict[str, Any]]:
    """List the kernels of this build: the CPU's, best first, then GPUs.

    Parameters
    ----------
    dtype, precision : str
        As in `VAE.load`. Type and precision decide which kernels are best.

    Returns
    -------
    list of dict
        ``name``, ``device``, ``usable``, ``chosen`` (used for such runs on the CPU), ``why`` (a sentence if not
        usable).

    Examples
    --------
    >>> [row["usable"] for row in backends() if row["name"] == "ref"]  # plain C
    [True]
    >>> sum(row["chosen"] for row in backends(dtype="bfloat16"))  # the best usable one
    1
    """
    _warn_of_change(stacklevel=2)
    dtype, precision = _check_numbers(dtype, precision)
    rows: list[dict[str, Any]] = []
    for name, usable in [] if precision == "fp8" else _core.backends(dtype, precision):
        chosen = usable and not any(row["chosen"] for row in rows)
        why = "this processor or its system lacks it, or VAEMEM_DISABLE named it at the import"
        rows.append({"name": name, "device": "cpu", "usable": usable, "chosen": chosen, "why": "" if usable else why})
    return rows + _gpus(dtype, precision)


# ---- arrays ----


class DeviceArray:
    """Array in a GPU's memory, for any library that speaks DLPack: ``torch.from_dlpack(array)`` copies nothing.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"uint8"``.
    device : str

    Examples
    --------
    >>> vae = VAE.random("sdxl", device="cuda", dtype="bfloat16")  # doctest: +SKIP
    >>> image = vae.decode(latents)  # doctest: +SKIP
    >>> image.numpy().shape  # doctest: +SKIP
    (1, 3, 512, 512)
    """

    def __init__(self, device: Device, address: int, shape: tuple[int, ...], dtype: str, owner: Any):
        self.shape, self.dtype, self.device = shape, dtype, f"cuda:{device.number}"
        self._device, self._address, self._owner = device, address, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._device.number

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, **other: Any) -> Any:
        """Return a capsule. The array's contents are ready for work that is enqueued on `stream` from now on."""
        if other.get("dl_device") not in (None, self.__dlpack_device__()) or other.get("copy"):
            raise BufferError("DLPack: expected the array where it is and as it is, got a request for a copy")
        if stream != -1:
            self._device.backend.order(LEGACY_STREAM if stream in (None, 0) else int(stream))
        return _cuda.lend(self._address, self.shape, self.dtype, self._device.number, self)

    def numpy(self) -> np.ndarray:
        """Copy the array to host memory (bfloat16 as ml_dtypes.bfloat16)."""
        out = np.empty(self.shape, ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        self._device.backend.read(self._address, out.view(np.uint8).reshape(-1))
        return out

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"DeviceArray on {self.device}: NumPy cannot read it there; .numpy() copies it")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"DeviceArray on {self.device}: take it to a library first, as torch.from_dlpack(array)")

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {self.shape} on {self.device}>"


def itemsize(dtype: str) -> int:
    """Return the bytes of one number."""
    return {"uint8": 1, "float32": 4}.get(dtype, 2)


def library_of(array: Any) -> str:
    """Return the package that defines an array's type: ``"torch"``, ``"cupy"``."""
    return type(array).__module__.partition(".")[0]


# ---- open devices ----


class Device:
    """A GPU with one type of numbers, opened for one VAE."""

    def __init__(
        self,
        number: int,
        dtype: DtypeName,
        precision: Precision = "highest",
        autotune: bool = False,
        convolution: str = "auto",
    ) -> None:
        if _cuda is None:
            raise RuntimeError(_gpus(dtype, precision)[0]["why"])
        if convolution == "own" and dtype == "float32":
            raise ArgumentError("convolution", "auto or cudnn with dtype float32", "own")
        if convolution == "cudnn" and precision == "fp8":
            raise ArgumentError("convolution", "auto or own with precision fp8", "cudnn")
        self.number, self.dtype, self.precision = number, dtype, precision
        libcuda = os.environ.get("VAEMEM_LIBCUDA")
        tf32, fp8 = precision in ("high", "medium"), precision == "fp8"
        wgmma = WGMMA not in _disabled.split(",")
        self.backend = _cuda.Backend(number, dtype, tf32, autotune, libcuda, find_cudnn(), convolution, wgmma, fp8)

    def held(self, size: int) -> int:
        """Return the bytes that a block of `size` bytes takes from the GPU."""
        return -(-size // self.backend.granularity) * self.backend.granularity

    def room(self) -> int:
        """Return the bytes that a run may allocate on top of this VAE's memory.

        The room is the free memory, less a reserve: an eighth, at most 1 GiB, or more if graphs still to be captured
        need it.
        """
        free = self.backend.memory()[0]
        return max(free - max(min(free // 8, 1 << 30), self.backend.to_come), 0)

    def in_torch(self) -> str:
        """Return a sentence on the memory that PyTorch's cache could give back; empty if the cache holds none."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return ""
        stats = torch.cuda.memory_stats(self.number)
        used, split = stats["active_bytes.all.current"], stats["inactive_split_bytes.all.current"]
        size = stats["reserved_bytes.all.current"] - used - split
        return f". PyTorch's cache would give back {mib(size)} MiB of it: torch.cuda.empty_cache()" if size else ""

    @staticmethod
    def holds(array: Any) -> bool:
        """Return whether `array` lies in a GPU's memory."""
        where = getattr(array, "__dlpack_device__", None)
        return where is not None and not isinstance(array, np.ndarray) and int(where()[0]) == CUDA

    def stream_of(self, array: Any) -> tuple[int, bool]:
        """Return the stream that array's library uses now, and True; our own stream and False if we do not know the
        library."""
        library = library_of(array)
        if library == "torch":
            return sys.modules["torch"].cuda.current_stream(self.number).cuda_stream or LEGACY_STREAM, True
        if library == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.number):
                return cupy.cuda.get_current_stream().ptr or LEGACY_STREAM, True
        return self.backend.stream, False

    def borrow(self, array: Any, name: str, stream: int) -> SimpleNamespace:
        """Borrow `array`, ready for work on `stream`: shape, dtype, address, end, and the owner that keeps it alive.
        ValueError or TypeError if a run cannot take it."""
        kind, number = array.__dlpack_device__()
        if (int(kind), int(number)) != (CUDA, self.number):
            raise ArgumentError(name, f"an array on cuda:{self.number}", f"one on device {(int(kind), number)}")
        given = SimpleNamespace(**_cuda.borrow(array.__dlpack__(stream=stream)))
        if given.dtype is None:
            raise ArgumentTypeError(name, "float32, float16, bfloat16 or uint8", "another dtype")
        if not given.contiguous:
            raise ArgumentError(name, f"a contiguous array of shape {given.shape}")
        given.end = given.address + math.prod(given.shape) * itemsize(given.dtype)
        return given

    def empty_like(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a new array from the allocator of array's library; None if we do not know the library."""
        library = library_of(array)
        if library == "torch":
            torch = sys.modules["torch"]
            return torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
        if library == "cupy" and dtype != "bfloat16":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.number):
                return cupy.empty(shape, dtype)
        return None

    def as_library(self, array: DeviceArray, like: Any) -> Any:
        """Return the same memory as an array of like's library, if we know how."""
        if library_of(like) in ("jax", "jaxlib"):
            return importlib.import_module("jax.dlpack").from_dlpack(array)
        return array


def _check_numbers(dtype: Any, precision: Any) -> tuple[DtypeName, Precision]:
    """Return the checked dtype and precision."""
    dtype = meant("dtype", dtype, DTYPES)
    choose("precision", precision, PRECISIONS)
    if dtype != "float32" and precision not in ("highest", "fp8"):
        raise ArgumentError("precision", f"highest or fp8 with dtype {dtype} (others are float32's)", repr(precision))
    if dtype == "float32" and precision == "fp8":
        raise ArgumentError("precision", "highest, high or medium with dtype float32", "'fp8'", "add dtype='bfloat16'")
    return dtype, precision


def open_device(
    device: Any, dtype: Any, precision: Any, autotune: bool, convolution: str
) -> tuple[Device | None, dict[str, Any]]:
    """Open the GPU that `device` names, or None for the CPU. Return the device and the core's arguments for a model
    there.

    Arguments are as in `VAE.load`. Warn the caller's caller if VAEMEM_DISABLE has changed since the import.
    """
    _warn_of_change(stacklevel=3)
    name = str(device)
    kind, colon, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (colon and not (number_in(number) is not None and len(number) <= 4))):
        raise ArgumentError("device", "cpu, cuda or cuda:N", repr(name[:80]))
    autotune = flag("autotune", autotune)
    dtype, precision = _check_numbers(dtype, precision)
    choose("convolution", convolution, CONVOLUTIONS)
    if name == "cpu":
        if precision == "fp8":
            wanted = "highest on the CPU (fp8 needs a GPU of compute capability 9.0: H100, H200)"
            raise ArgumentError("precision", wanted, "'fp8'")
        return None, {"dtype": dtype, "precision": precision}
    gpu = Device(int(number or 0), dtype, precision, autotune, convolution)
    return gpu, {"backend": gpu.backend.capsule}
