"""Layers of bitsandbytes, torchao and optimum-quanto: their stored tensors, and the temporary tensors of a call. They
follow the libraries' sources. Tests run all layers that a CPU can run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

NF4_BLOCK, NESTED_BLOCK = 64, 256  # numbers that share a scale; scales that share theirs
NF4_CODE, NESTED_CODE, OFFSET = 4 * 16, 4 * 256, 4  # float32: the values of 4 bits, of 8 bits, and a mean
GROUP = 128  # numbers of a row that share a scale in four bits of torchao and quanto


class Working(NamedTuple):
    """A tensor that a layer's call takes.

    Attributes
    ----------
    name : str
        ``"{}"`` stands for the weight's own name.
    bytes, row_bytes : int
        Fixed, and for each row of the input.
    lives : int
        Number of later tensors of this list; once they are there, it is given back. 0: at the end of the call.
    """

    name: str
    bytes: int
    row_bytes: int = 0
    lives: int = 0


class LinearLayer(NamedTuple):
    """A layer of `rows` outputs and `columns` inputs, which computes in a type of `element` bytes."""

    rows: int
    columns: int
    element: int
    has_bias: bool

    @property
    def numbers(self) -> int:
        return self.rows * self.columns

    def unpacked(self, lives: int = 0) -> Working:
        """The weight in the type that the layer computes in."""
        return Working("weight, unpacked", self.element * self.numbers, lives=lives)

    def product(self) -> tuple[Working, ...]:
        """The product, if the bias is added to it in a second tensor."""
        return (Working("product", 0, self.element * self.rows),) if self.has_bias else ()

    def unpacked_for_product(self) -> tuple[Working, ...]:
        """Both: the unpacked weight is given back once the product is there."""
        product = self.product()
        return self.unpacked(lives=len(product)), *product


class Scheme(NamedTuple):
    """How a library stores a matrix and multiplies by it.

    about: the library and its class
    pieces: bytes of its tensors for (rows, columns), in the order in which quantising makes them
    working: the tensors of a call
    config, settings: the class of its settings in diffusers and transformers, and the arguments; {dtype} is PyTorch's
    columns, both: what the columns, or both sides, must be a multiple of; other matrices are not quantised
    sm: least compute capability of the GPU
    is_sent: whether accelerate's sequential offload can move its tensors
    """

    about: str
    pieces: Callable[[int, int], tuple[int, ...]]
    working: Callable[[LinearLayer], tuple[Working, ...]]
    config: str
    settings: str
    columns: int = 1
    both: int = 1
    sm: int = 0
    is_sent: bool = True


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


def _int8wo(layer: LinearLayer) -> tuple[Working, ...]:
    row = layer.element * layer.rows
    return layer.unpacked(lives=1), Working("product", 0, row), Working("scale", row)


def _int8dq(layer: LinearLayer) -> tuple[Working, ...]:
    """Rows are quantised in float32, step by step; the product is in int32, and scaled twice in float32."""
    inputs, outputs = 4 * layer.columns, 4 * layer.rows
    quantising = [Working(name, 0, inputs, lives=1) for name in ("scaled", "rounded", "shifted", "clamped")]
    return (
        Working("input's scale", 0, 4), Working("input's zero point", 0, 1), Working("reciprocal", 0, 4, lives=1),
        *quantising, Working("input in int8", 0, layer.columns), Working("weight, contiguous", layer.numbers, lives=1),
        Working("product in int32", 0, outputs, lives=1), Working("product in float32", 0, outputs, lives=1),
        Working("product", 0, layer.element * layer.rows), Working("product, scaled", 0, outputs),
    )  # fmt: skip


def _float8wo(layer: LinearLayer) -> tuple[Working, ...]:
    single = 4 * layer.numbers
    converted = Working("weight in float32", single, lives=2), Working("weight, scaled", single, lives=1)
    return *converted, *layer.unpacked_for_product()


def _float8dq(layer: LinearLayer) -> tuple[Working, ...]:
    row = 4 * layer.columns
    return (
        Working("input's scale", 4), Working("input in float32", 0, row, lives=3),
        Working("input, scaled", 0, row, lives=2), Working("input, clamped", 0, row, lives=1),
        Working("input in float8", 0, layer.columns),
    )  # fmt: skip


def _qfloat8(layer: LinearLayer) -> tuple[Working, ...]:
    """quanto's own kernel, which its user compiles with nvcc, unpacks nothing."""
    whole = layer.unpacked()
    return whole._replace(name="weight, converted", lives=1), *layer.unpacked_for_product()


def _unpacked(layer: LinearLayer) -> tuple[Working, ...]:
    return (layer.unpacked(),)


_FOUR = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{dtype}'
SCHEMES = {
    # LLM.int8()'s copies of activations depend on their values, and are not counted.
    "int8": Scheme(
        "LLM.int8() of bitsandbytes", lambda rows, columns: (4 * rows, rows * columns), lambda layer: (),
        "BitsAndBytesConfig", "load_in_8bit=True",
    ),
    "nf4": Scheme("bitsandbytes, a scale for 64 numbers", _nf4, _unpacked, "BitsAndBytesConfig", _FOUR, is_sent=False),
    "nf4 double": Scheme(
        "bitsandbytes, with scales in 8 bits", _nf4_double, _unpacked, "BitsAndBytesConfig",
        _FOUR + ", bnb_4bit_use_double_quant=True", is_sent=False,
    ),
    "int8wo": Scheme(
        "torchao's Int8WeightOnlyConfig", _int8_rows, _int8wo, "TorchAoConfig", "Int8WeightOnlyConfig()",
    ),
    "int8dq": Scheme(
        "torchao's Int8DynamicActivationInt8WeightConfig", _int8_rows, _int8dq, "TorchAoConfig",
        "Int8DynamicActivationInt8WeightConfig()",
    ),
    "int4wo": Scheme(
        "torchao's Int4WeightOnlyConfig", lambda rows, columns: (
            rows * columns // 2, 2 * rows * columns // GROUP, 2 * rows * columns // GROUP
        ), LinearLayer.product, "TorchAoConfig", "Int4WeightOnlyConfig()", columns=GROUP, sm=80,
    ),
    "float8wo": Scheme(
        "torchao's Float8WeightOnlyConfig", lambda rows, columns: (rows * columns, 4 * rows), _float8wo,
        "TorchAoConfig", "Float8WeightOnlyConfig()",
    ),
    "float8dq": Scheme(
        "torchao's Float8DynamicActivationFloat8WeightConfig", lambda rows, columns: (rows * columns, 4), _float8dq,
        "TorchAoConfig", "Float8DynamicActivationFloat8WeightConfig()", both=16, sm=89,
    ),
    "qint8": Scheme(
        "optimum-quanto", _quanto, LinearLayer.unpacked_for_product, "QuantoConfig", 'weights_dtype="int8"',
        is_sent=False,
    ),
    "qfloat8": Scheme("optimum-quanto", _quanto, _qfloat8, "QuantoConfig", 'weights_dtype="float8"', is_sent=False),
    "qint4": Scheme(
        "optimum-quanto, by tinygemm", lambda rows, columns: (
            rows * columns // 2, 4 * rows * columns // GROUP, 2, 2
        ), LinearLayer.product, "QuantoConfig", 'weights_dtype="int4"', columns=GROUP, sm=80, is_sent=False,
    ),
}  # fmt: skip
BITSANDBYTES = tuple(name for name, scheme in SCHEMES.items() if scheme.config == "BitsAndBytesConfig")
# torchao's and quanto's, which compute in 16 bits.
SIXTEEN_BITS = tuple(name for name in SCHEMES if name not in BITSANDBYTES)
UNSENT = tuple(name for name, scheme in SCHEMES.items() if not scheme.is_sent)
# Names of kernels and compilers that are not predicted.
FOREIGN = {
    "svdquant": "SVDQuant uses Nunchaku's own kernels, and their memory is not known",
    "nunchaku": "the memory of Nunchaku's own kernels is not known",
    "sdnq": "SDNQ compiles its own kernels, and their memory is not known",
    "torch.compile": "predict the module without torch.compile; the memory of compiled modules is not known",
}


def layer_working(type: str, shape: tuple[int, ...], element: int, has_bias: bool) -> tuple[Working, ...]:
    """List what a layer's call takes if its weight is stored in a type. ggml's types and float8 are unpacked."""
    if type in SCHEMES:
        rows, columns = shape
        return SCHEMES[type].working(LinearLayer(rows, columns, element, has_bias))
    return (Working("{}, unpacked", math.prod(shape) * element),)
