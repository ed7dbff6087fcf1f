"""Types of arguments that several functions share, for type checkers. At run time more spellings work."""

from __future__ import annotations

from typing import Any, Literal, Protocol

Op = Literal["encode", "decode"]
TiledOp = Literal["encode", "decode", "encode_tiled", "decode_tiled"]  # what PyTorch's runtimes do
DtypeName = Literal["float32", "float16", "bfloat16"]
DtypeSpelt = Literal["fp32", "f32", "fp16", "f16", "half", "bf16"]
# torch.set_float32_matmul_precision has the first three, for products of float32. Only GPUs have fp8.
Precision = Literal["highest", "high", "medium", "fp8"]
Program = Literal["diffusers", "bfl", "comfyui", "a1111", "forge", "invokeai", "a1111-medvram"]


class NumberType(Protocol):
    """A type of numbers of another library: ``torch.float16`` or ``numpy.dtype("float16")``."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


Dtype = DtypeName | DtypeSpelt | NumberType | type[Any]  # a class: numpy.float16
