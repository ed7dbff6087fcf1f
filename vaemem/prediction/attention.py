"""Which kernel PyTorch's scaled_dot_product_attention runs on a GPU, and what it takes there, without torch.

The rules stand in csrc/predict/torch_sdpa.c; the recorder asks them of the calls that it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vaemem import _core
from vaemem.prediction.gpus import Gpu


class Heads(NamedTuple):
    """Queries, keys or values: (N, heads, length, depth)."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Mask(NamedTuple):
    """An attention's mask: its elements in all, those of one row (a query's keys), and whether they are boolean."""

    elements: int
    row: int
    boolean: bool = False


class AttentionCall(NamedTuple):
    """A call of scaled_dot_product_attention. dtype as ``"float16"``; grouped: enable_gqa."""

    dtype: str
    queries: Heads
    keys: Heads
    values: Heads
    mask: Mask | None = None
    causal: bool = False
    grouped: bool = False


FUSED = ("flash", "efficient")  # kernels of which `attend` counts all that they take


def choose_kernel(call: AttentionCall, sm: int, enabled: Sequence[str]) -> str:
    """The first of the `enabled` kernels that takes a call on a card of compute capability `sm` (89 for 8.9).

    Raises
    ------
    ValueError
        None does: PyTorch would raise.
    """
    return _core.Trace.choose_kernel(call, sm, tuple(enabled))


def attend(trace: _core.Trace, call: AttentionCall, kernel: str, gpu: Gpu, name: str) -> int | None:
    """Adds what a fused kernel takes to a trace, and returns the id of the output: None for cuDNN's, of which nothing
    is counted. While the kernel runs there is also a copy of the mask as numbers, where it is boolean, and one with
    rows padded to a multiple of 8, where the kernel wants that."""
    return trace.attend(call, kernel, gpu.sm, gpu.multiprocessors, name)
