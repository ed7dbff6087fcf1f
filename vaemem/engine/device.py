"""GPUs: opened by name, and how arrays come to them and leave them without a copy (DLPack)."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from vaemem.engine.cudnn_path import find_cudnn

try:
    from vaemem import _cuda
except ImportError:  # built without nvcc
    _cuda = None  # type: ignore[assignment]

CONVOLUTIONS = ("cudnn", "own")
CUDA = 2  # DLPack's number for CUDA memory
LEGACY_STREAM = 1  # CUDA's own name for stream 0


def parse_device(device: Any) -> int | None:
    """None for the CPU, else the number of a GPU: of ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a torch.device."""
    name = str(device)
    kind, colon, number = name.partition(":")
    if name == "cpu":
        return None
    if kind != "cuda" or (colon and not (number.isdecimal() and len(number) <= 4)):
        raise ValueError(f"device: want cpu, cuda or cuda:N, got {name[:80]!r}")
    return int(number or 0)


def gpu_rows(dtype: str = "float32", precision: str = "highest") -> list[dict[str, Any]]:
    """A row of `vaemem.backends` for each GPU, or one that says why there is none."""
    least = 80 if dtype == "bfloat16" or precision != "highest" else 75
    row = {"name": "cuda", "device": "cuda", "usable": False, "chosen": False}
    if _cuda is None:
        what_to_do = "put nvcc on the path (or set CUDA_HOME), then VAEMEM_CUDA=1 pip install ."
        if sys.platform != "linux":
            what_to_do = "it runs on GPUs on Linux alone"
        return [row | {"why": f"vaemem was built without CUDA: {what_to_do}"}]
    try:
        found = _cuda.devices(os.environ.get("VAEMEM_LIBCUDA"))
    except RuntimeError as error:
        return [row | {"why": str(error)}]
    if not found:
        return [row | {"why": "CUDA: the driver sees no GPU"}]
    rows = []
    for i, gpu in enumerate(found):
        major, minor = gpu["capability"]
        old = major * 10 + minor < least
        want = f"want {least / 10} or later"
        why = f"{gpu['name']} has compute capability {major}.{minor}: {want}" if old else ""
        rows.append(row | {"name": gpu["name"], "device": f"cuda:{i}", "usable": not old, "why": why})
    return rows


class DeviceArray:
    """An array in a GPU's memory, for any library that speaks DLPack: ``torch.from_dlpack(array)`` copies nothing.

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
        """A capsule whose contents are ready for whatever is enqueued on `stream` from now on."""
        if other.get("dl_device") not in (None, self.__dlpack_device__()) or other.get("copy"):
            raise BufferError("DLPack: want the array where it is and as it is, a copy was asked for")
        if stream != -1:
            self._device.backend.order(LEGACY_STREAM if stream in (None, 0) else int(stream))  # type: ignore[arg-type]
        return _cuda.lend(self._address, self.shape, self.dtype, self._device.number, self)

    def numpy(self) -> np.ndarray:
        """A copy in host memory (bfloat16 as ml_dtypes')."""
        out = np.empty(self.shape, ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)
        self._device.backend.read(self._address, out.view(np.uint8).reshape(-1))
        return out

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"DeviceArray on {self.device}: NumPy cannot read it there; .numpy() copies it")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"DeviceArray on {self.device}: take it to a library first, as torch.from_dlpack(array)")

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype} {self.shape} on {self.device}>"


def library_of(array: Any) -> str:
    """The package that an array's type is from: ``"torch"``, ``"cupy"``."""
    return type(array).__module__.partition(".")[0]


class Borrowed(NamedTuple):
    """A user's array in a GPU's memory, which `owner` keeps there: from `address` to `end`."""

    shape: tuple[int, ...]
    dtype: str
    address: int
    end: int
    owner: Any


class Device:
    """A GPU with one type of numbers, opened for one VAE."""

    def __init__(
        self,
        number: int,
        dtype: str,
        precision: str = "highest",
        autotune: bool = False,
        convolution: str = "cudnn",
    ) -> None:
        if _cuda is None:
            raise RuntimeError(gpu_rows()[0]["why"])
        if convolution == "own" and dtype == "float32":
            raise ValueError("convolution: our own is for float16 and bfloat16, got dtype float32")
        self.number, self.dtype, self.precision = number, dtype, precision
        libcuda = os.environ.get("VAEMEM_LIBCUDA")
        tf32, own = precision != "highest", convolution == "own"
        self.backend = _cuda.Backend(number, dtype, tf32, autotune, libcuda, find_cudnn(), own)

    @staticmethod
    def holds(array: Any) -> bool:
        """Whether array lies in a GPU's memory."""
        where = getattr(array, "__dlpack_device__", None)
        return where is not None and not isinstance(array, np.ndarray) and int(where()[0]) == CUDA

    def stream_of(self, array: Any) -> tuple[int, bool]:
        """The stream on which array's library puts its work now, and True; our own stream and False where we do not
        know the library."""
        library = library_of(array)
        if library == "torch":
            return sys.modules["torch"].cuda.current_stream(self.number).cuda_stream or LEGACY_STREAM, True
        if library == "cupy":
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(self.number):
                return cupy.cuda.get_current_stream().ptr or LEGACY_STREAM, True
        return self.backend.stream, False

    def borrow(self, array: Any, name: str, stream: int) -> Borrowed:
        """array, ready for work on `stream`; ValueError or TypeError where a run cannot take it."""
        kind, number = array.__dlpack_device__()
        if (int(kind), int(number)) != (CUDA, self.number):
            raise ValueError(f"{name}: want an array on cuda:{self.number}, got one on device {(int(kind), number)}")
        fields = _cuda.borrow(array.__dlpack__(stream=stream))
        shape, dtype, address = fields["shape"], fields["dtype"], fields["address"]
        if dtype is None:
            raise TypeError(f"{name}: want float32, float16, bfloat16 or uint8, got another dtype")
        if not fields["contiguous"]:
            raise ValueError(f"{name}: want a contiguous array of shape {shape}")
        end = address + math.prod(shape) * {"uint8": 1, "float32": 4}.get(dtype, 2)
        return Borrowed(shape, dtype, address, end, fields["owner"])

    def empty_like(self, array: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array of array's library, from that library's own allocator; None where we do not know it."""
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
        """The same memory as an array of like's library, where we know how."""
        if library_of(like) in ("jax", "jaxlib"):
            return importlib.import_module("jax.dlpack").from_dlpack(array)
        return array
