"""Which kernel PyTorch's scaled_dot_product_attention runs on a GPU, and what it takes there, without torch.

After native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h: the first kernel of PyTorch's order that is enabled
and has nothing against the call. Gradients, nested tensors and dropout are none of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES
from vaemem.prediction.gpus import Gpu


class Heads(NamedTuple):
    """Queries, keys or values: (N, heads, length, depth)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the elements of one head lie side by side."""
        return self.strides[-1] == 1 or self.shape[-1] == 1


class Mask(NamedTuple):
    """An attention's mask: its elements in all, those of one row (a query's keys), and whether they are boolean."""

    elements: int
    row: int
    boolean: bool = False


class Call(NamedTuple):
    """A call of scaled_dot_product_attention. dtype as ``"float16"``; grouped: enable_gqa."""

    dtype: str
    queries: Heads
    keys: Heads
    values: Heads
    mask: Mask | None = None
    causal: bool = False
    grouped: bool = False

    @property
    def tensors(self) -> tuple[Heads, Heads, Heads]:
        return self.queries, self.keys, self.values


def _against_any(call: Call, grouped: bool) -> str:
    """Why no fused kernel takes a call, or "". grouped: whether the kernel knows heads of queries that share keys."""
    tensors = call.tensors
    if any(len(x.shape) != 4 for x in tensors):
        return "wants 4 dimensions"
    if len({x.shape[0] for x in tensors}) > 1:
        return "wants one size of batch"
    heads = [x.shape[1] for x in tensors]
    shares = grouped and call.grouped and heads[1] == heads[2] and heads[0] % heads[1] == 0
    if len(set(heads)) > 1 and not shares:
        return "wants as many heads of keys and values as of queries"
    if min(x.shape[2] for x in tensors) == 0:
        return "wants sequences of 1 or more"
    return ""


def _against_flash(call: Call, sm: int) -> str:
    depths = {x.shape[-1] for x in call.tensors}
    if call.dtype == "float32" or sm < 80:
        return "wants half precision and compute capability 8.0"
    if call.mask:
        return "takes no mask"
    if len(depths) > 1 or max(depths) > 256:
        return "wants heads of one depth, 256 at most"
    if call.causal and call.queries.shape[-2] != call.keys.shape[-2]:
        return "wants as many queries as keys with is_causal"
    if not all(x.is_dense for x in call.tensors):
        return "wants the elements of a head side by side"
    return _against_any(call, grouped=True)


def _against_efficient(call: Call, sm: int) -> str:
    half = call.dtype != "float32"
    if call.dtype == "bfloat16" and sm < 80:
        return "wants compute capability 8.0 for bfloat16"
    unit = (8 if half else 4) if sm >= 80 else 8 if half and sm >= 70 else 1
    q, k, v = (x.shape[-1] for x in call.tensors)
    if q != k or q % unit or v % unit or not q or not v:
        return f"wants heads of queries and keys of one depth, a multiple of {unit}, and of values too"
    if any(x.strides[-1] != 1 for x in call.tensors):
        return "wants the elements of a head side by side"
    return _against_any(call, grouped=False)


def _against_cudnn(call: Call, sm: int) -> str:
    depths = [x.shape[-1] for x in call.tensors]
    if call.dtype == "float32" or sm < 80:
        return "wants half precision and compute capability 8.0"
    if any(depth % 8 for depth in depths) or max(depths) > 128:
        return "wants heads of a multiple of 8 channels, 128 at most"
    if call.keys.shape[-2] == 1:
        return "wants more than one key"
    if not all(x.is_dense for x in call.tensors):
        return "wants the elements of a head side by side"
    return _against_any(call, grouped=True)


KERNELS: dict[str, Callable[[Call, int], str]] = {
    "flash": _against_flash,
    "efficient": _against_efficient,
    "cudnn": _against_cudnn,
    "math": lambda call, sm: "",
}


FUSED = ("flash", "efficient")  # kernels of which `attend` counts all that they take


def choose_kernel(call: Call, sm: int, enabled: Sequence[str]) -> str:
    """The first of the `enabled` kernels that takes a call on a card of compute capability `sm` (89 for 8.9).

    Raises
    ------
    ValueError
        None does: PyTorch would raise.
    """
    against = []
    for name in enabled:
        why = KERNELS[name](call, sm)
        if not why:
            return name
        against.append(f"{name} {why}")
    raise ValueError(
        "scaled_dot_product_attention: want an enabled kernel that takes this call, got"
        f" {'; '.join(against) or 'none'}: PyTorch would raise"
    )


def attend(trace: _core.Trace, call: Call, kernel: str, gpu: Gpu, name: str) -> int | None:
    """Adds what a fused kernel takes to a trace, and returns the id of the output: None for cuDNN's, of which nothing
    is counted. While the kernel runs there is also a copy of the mask as numbers, where it is boolean, and one with
    rows padded to a multiple of 8, where the kernel wants that."""
    copies, mask, size = [], call.mask, ELEMENT_BYTES[call.dtype]
    if mask and mask.boolean:
        copies.append(trace.take(mask.elements * size, f"{name} [mask]"))
    if mask and kernel == "efficient" and mask.row % 8:
        padded = mask.elements // mask.row * (mask.row + -mask.row % 8)
        copies.append(trace.take(padded * size, f"{name} [mask, padded]"))
    batch, heads, queries, _ = call.queries.shape
    keys, depth = call.keys.shape[-2], call.values.shape[-1]
    number = None
    if kernel != "cudnn":
        number = trace.attention(
            call.dtype, batch, heads, queries, keys, depth, kernel, gpu.sm, gpu.multiprocessors, f"{name} [attention]"
        )
    for copy in reversed(copies):
        trace.give(copy)
    return number
