"""Layers of bitsandbytes, torchao and optimum-quanto, and of GGUF files in diffusers: their stored tensors, and the
temporary tensors of a call. The rules follow the libraries' sources. Tests run all layers that a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from vaemem._common import ELEMENT_BYTES

NF4_BLOCK, NESTED_BLOCK = 64, 256  # numbers that share a scale; scales that share theirs
NF4_CODE, NESTED_CODE, OFFSET = 4 * 16, 4 * 256, 4  # float32: the values of 4 bits, of 8 bits, and a mean
GROUP = 128  # numbers of a row that share a scale in four bits of torchao and quanto


class _Working(NamedTuple):
    """A tensor that a layer's call takes.

    Attributes
    ----------
    name : str
        ``"{}"`` stands for the weight's own name.
    bytes, row_bytes : int
        Fixed bytes, and bytes for each row of the input.
    lives : int
        Number of later tensors of this list after which the tensor is freed. 0: it is freed at the end of the call.
    """

    name: str
    bytes: int
    row_bytes: int = 0
    lives: int = 0


class _LinearLayer(NamedTuple):
    """A layer of `rows` outputs and `columns` inputs, which computes in `dtype`."""

    rows: int
    columns: int
    dtype: str
    has_bias: bool

    @property
    def numbers(self) -> int:
        return self.rows * self.columns

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return ELEMENT_BYTES[self.dtype]

    def unpacked(self, lives: int = 0) -> _Working:
        """The weight in the type that the layer computes in."""
        return _Working("weight, unpacked", self.element * self.numbers, lives=lives)

    def product(self) -> tuple[_Working, ...]:
        """The product, if the bias is added to it in a second tensor."""
        return (_Working("product", 0, self.element * self.rows),) if self.has_bias else ()

    def unpacked_for_product(self) -> tuple[_Working, ...]:
        """Both: the unpacked weight is given back once the product is there."""
        product = self.product()
        return self.unpacked(lives=len(product)), *product


class _Scheme(NamedTuple):
    """How a library stores a matrix and multiplies by it.

    about: the library and its class
    pieces: bytes of its tensors for (rows, columns), in the order in which quantising makes them
    working: the tensors of a call
    config, settings: the class of its settings in diffusers and transformers, and the arguments; {dtype} is PyTorch's
    columns, both: what the columns, or both sides, must be a multiple of; other matrices are not quantised
    sm: least compute capability of the GPU
    is_sent: whether accelerate's sequential offload can move its tensors
    quantising: bytes that quantising on the card holds for each number of a matrix, besides it; None if not measured
    """

    about: str
    pieces: Callable[[int, int], tuple[int, ...]]
    working: Callable[[_LinearLayer], tuple[_Working, ...]]
    config: str
    settings: str
    columns: int = 1
    both: int = 1
    sm: int = 0
    is_sent: bool = True
    quantising: int | None = None


def _nf4(rows: int, columns: int) -> tuple[int, ...]:
    numbers = rows * columns
    return 4 * -(-numbers // NF4_BLOCK), -(-numbers // 2), NF4_CODE


def _nf4_double(rows: int, columns: int) -> tuple[int, ...]:
    scales = -(-rows * columns // NF4_BLOCK)
    return -(-rows * columns // 2), NF4_CODE, OFFSET, scales, 4 * -(-scales // NESTED_BLOCK), NESTED_CODE


def _int8_rows(rows: int, columns: int) -> tuple[int, ...]:
    return rows * columns, 4 * rows, rows


def _quanto(rows: int, columns: int) -> tuple[int, ...]:
    return rows * columns, 2 * rows, 2, 2  # with the scales of activations, which are not used


def _int8wo(layer: _LinearLayer) -> tuple[_Working, ...]:
    row = layer.element * layer.rows
    return layer.unpacked(lives=1), _Working("product", 0, row), _Working("scale", row)


def _int8dq(layer: _LinearLayer) -> tuple[_Working, ...]:
    """Rows are quantised in float32, step by step; the product is in int32, and scaled twice in float32."""
    inputs, outputs = 4 * layer.columns, 4 * layer.rows
    quantising = [_Working(name, 0, inputs, lives=1) for name in ("scaled", "rounded", "shifted", "clamped")]
    return (
        _Working("input's scale", 0, 4), _Working("input's zero point", 0, 1), _Working("reciprocal", 0, 4, lives=1),
        *quantising, _Working("input in int8", 0, layer.columns),
        _Working("weight, contiguous", layer.numbers, lives=1),
        _Working("product in int32", 0, outputs, lives=1), _Working("product in float32", 0, outputs, lives=1),
        _Working("product", 0, layer.element * layer.rows), _Working("product, scaled", 0, outputs),
    )  # fmt: skip


def _float8wo(layer: _LinearLayer) -> tuple[_Working, ...]:
    single = 4 * layer.numbers
    converted = _Working("weight in float32", single, lives=2), _Working("weight, scaled", single, lives=1)
    return *converted, *layer.unpacked_for_product()


def _float8dq(layer: _LinearLayer) -> tuple[_Working, ...]:
    row = 4 * layer.columns
    return (
        _Working("input's scale", 4), _Working("input in float32", 0, row, lives=3),
        _Working("input, scaled", 0, row, lives=2), _Working("input, clamped", 0, row, lives=1),
        _Working("input in float8", 0, layer.columns),
    )  # fmt: skip


def _qfloat8(layer: _LinearLayer) -> tuple[_Working, ...]:
    """quanto's own kernel, which its user compiles with nvcc, unpacks nothing."""
    whole = layer.unpacked()
    return whole._replace(name="weight, converted", lives=1), *layer.unpacked_for_product()


def _int8(layer: _LinearLayer) -> tuple[_Working, ...]:
    """Inputs are quantised from float16, after a search for outliers. The outliers' columns, which are multiplied in
    float16 in addition, are few and depend on the values: they are not counted. The product's own kernel writes
    float16."""
    half = layer.dtype == "float16"
    return (
        *[_Working("input in float16", 0, 2 * layer.columns, lives=5)] * (not half),
        _Working("input's scale", 0, 4), _Working("input in int8", 0, layer.columns),
        _Working("magnitudes", 0, 2 * layer.columns, lives=1), _Working("outliers", 0, layer.columns, lives=1),
        _Working("whether there are outliers", 1, lives=1), _Working("product in int32", 0, 4 * layer.rows),
        *[_Working("product in float16", 0, 2 * layer.rows)] * (not half),
    )  # fmt: skip


def _nf4_unpacked(layer: _LinearLayer) -> tuple[_Working, ...]:
    """Calls with few rows may have a kernel that unpacks nothing: always for up to 4, never for more than 1536."""
    return (layer.unpacked(),)


def _nf4_double_unpacked(layer: _LinearLayer) -> tuple[_Working, ...]:
    scales = 4 * -(-layer.numbers // NF4_BLOCK)
    return _Working("scales, unpacked", scales), _Working("scales and mean", scales), layer.unpacked()


_FOUR = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{dtype}'
SCHEMES = {
    "int8": _Scheme(
        "LLM.int8() of bitsandbytes", lambda rows, columns: (4 * rows, rows * columns), _int8, "BitsAndBytesConfig",
        "load_in_8bit=True",
    ),
    "nf4": _Scheme(
        "bitsandbytes, a scale for 64 numbers", _nf4, _nf4_unpacked, "BitsAndBytesConfig", _FOUR, is_sent=False,
    ),
    "nf4 double": _Scheme(
        "bitsandbytes, with scales in 8 bits", _nf4_double, _nf4_double_unpacked, "BitsAndBytesConfig",
        _FOUR + ", bnb_4bit_use_double_quant=True", is_sent=False,
    ),
    "int8wo": _Scheme(
        "torchao's Int8WeightOnlyConfig", _int8_rows, _int8wo, "TorchAoConfig", "Int8WeightOnlyConfig()",
        quantising=8,
    ),
    "int8dq": _Scheme(
        "torchao's Int8DynamicActivationInt8WeightConfig", _int8_rows, _int8dq, "TorchAoConfig",
        "Int8DynamicActivationInt8WeightConfig()", quantising=8,
    ),
    "int4wo": _Scheme(
        "torchao's Int4WeightOnlyConfig", lambda rows, columns: (
            rows * columns // 2, 2 * rows * columns // GROUP, 2 * rows * columns // GROUP
        ), _LinearLayer.product, "TorchAoConfig", "Int4WeightOnlyConfig()", columns=GROUP, sm=80,
    ),
    "float8wo": _Scheme(
        "torchao's Float8WeightOnlyConfig", lambda rows, columns: (rows * columns, 4 * rows), _float8wo,
        "TorchAoConfig", "Float8WeightOnlyConfig()", quantising=13,
    ),
    "float8dq": _Scheme(
        "torchao's Float8DynamicActivationFloat8WeightConfig", lambda rows, columns: (rows * columns, 4), _float8dq,
        "TorchAoConfig", "Float8DynamicActivationFloat8WeightConfig()", both=16, sm=89,
        quantising=13,
    ),
    "qint8": _Scheme(
        "optimum-quanto", _quanto, _LinearLayer.unpacked_for_product, "QuantoConfig", 'weights_dtype="int8"',
        is_sent=False, quantising=4,
    ),
    "qfloat8": _Scheme(
        "optimum-quanto", _quanto, _qfloat8, "QuantoConfig", 'weights_dtype="float8"', is_sent=False, quantising=4,
    ),
    "qint4": _Scheme(
        "optimum-quanto, by tinygemm", lambda rows, columns: (
            rows * columns // 2, 4 * rows * columns // GROUP, 2, 2
        ), _LinearLayer.product, "QuantoConfig", 'weights_dtype="int4"', columns=GROUP, sm=80, is_sent=False,
        quantising=6,
    ),
}  # fmt: skip
BITSANDBYTES, TORCHAO, QUANTO = (
    tuple(name for name, scheme in SCHEMES.items() if scheme.config == f"{library}Config")
    for library in ("BitsAndBytes", "TorchAo", "Quanto")
)
SIXTEEN_BITS = (*TORCHAO, *QUANTO)  # they compute in 16 bits
# Names of kernels and compilers that are not predicted.
FOREIGN = {
    "svdquant": "SVDQuant uses Nunchaku's own kernels, and their memory is not known",
    "nunchaku": "the memory of Nunchaku's own kernels is not known",
    "sdnq": "SDNQ compiles its own kernels, and their memory is not known",
    "torch.compile": "predict the module without torch.compile; the memory of compiled modules is not known",
}


# How diffusers unpacks a weight of a GGUF file (quantizers/gguf/utils.py, 0.42.1): the tensors that it makes, each as
# its bytes for 256 numbers and, after a colon, `_Working.lives`. The last one has the unpacked numbers. Tables of a few
# numbers, such as the shifts, are left out. tests/test_quantising.py compares this with the functions themselves.
GGUF_NUMBERS = 256
UNPACKING = {
    "BF16": "1024:1 1024",
    "Q8_0": "512",
    "Q4_0": "256:3 256:1 256:1 256:1 512",
    "Q4_1": "256:1 256:2 512:1 512",
    "Q5_0": "128:6 32:1 32:2 32:1 32:2 32:1 32:1 1024:3 256:3 1024:1 256:6 256:5 256:1 256:1 256:1 256:1 512",
    "Q5_1": "128:6 32:1 32:2 32:1 32:2 32:1 32:1 1024:3 256:3 1024:1 256:5 256:4 256:1 256:2 512:1 512",
    "Q2_K": "16:1 32:6 16:1 32:4 256:1 256:2 512:1 512",
    "Q3_K": "16:18 16:17 16:3 16:1 16:1 16:2 16:1 16:11 32:10 256:2 256:3 256:7 256:1 256:5 256:3 256:1 256:1 256:1"
    " 512",
    "Q4_K": "4:5 4:3 4:1 4:1 4:1 8:12 4:5 4:3 4:1 4:1 4:1 8:6 16:5 16:4 256:1 256:2 512:1 512",
    "Q5_K": "4:5 4:3 4:1 4:1 4:1 8:16 4:5 4:3 4:1 4:1 4:1 8:10 16:9 16:8 256:2 256:2 256:5 256:4 256:1 256:2 512:1 512",
    "Q6_K": "32:9 256:1 256:7 256:1 256:5 256:1 256:1 256:1 256:1 512",
    "IQ4_NL": "256:2 256:1 2048:1 1024:1 1024",
    "IQ4_XS": "8:2 16:2 8:10 16:9 16:1 16:1 16:6 16:5 256:2 256:1 2048:1 1024:1 1024",
}

# Types whose weights accelerate's sequential offload cannot move. It makes GGUF's anew, without their type (1.15.0).
UNSENT = (*(name for name, scheme in SCHEMES.items() if not scheme.is_sent), *UNPACKING)


def _unpack_gguf(type: str, layer: _LinearLayer) -> tuple[_Working, ...]:
    """The numbers are unpacked in float16 or float32, and then converted if the layer computes in another dtype."""
    *steps, numbers = ([*map(int, one.split(":"))] for one in UNPACKING[type].split())
    if layer.dtype != {2: "float16", 4: "float32"}[numbers[0] // GGUF_NUMBERS]:
        steps.append([*numbers, 1])
    made = (_Working("weight, unpacking", size * layer.numbers // GGUF_NUMBERS, lives=lives) for size, lives in steps)
    return *made, layer.unpacked()


def layer_working(type: str, shape: tuple[int, ...], dtype: str, has_bias: bool) -> tuple[_Working, ...]:
    """List what a layer's call takes if its weight is stored in a type. Float8 is unpacked to the dtype of the call."""
    if type in SCHEMES or type in UNPACKING:
        # A convolution adds its bias in place.
        layer = _LinearLayer(shape[0], math.prod(shape[1:]), dtype, has_bias and len(shape) == 2)
        return SCHEMES[type].working(layer) if type in SCHEMES else _unpack_gguf(type, layer)
    return (_Working("{}, unpacked", math.prod(shape) * ELEMENT_BYTES[dtype]),)
