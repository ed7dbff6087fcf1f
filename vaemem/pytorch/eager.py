"""A recorder's model of eager PyTorch: the layout of tensors, and a call of its attention. csrc/predict/trace/sdpa.c
chooses the attention's kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Heads = tuple[tuple[int, ...], tuple[int, ...]]  # shape (N, heads, length, depth) and strides of queries, keys, values
# An attention's mask: its elements; the elements of one row, which are a query's keys; whether they are boolean, and
# whether the elements of a row are apart in memory.
Mask = tuple[int, int, bool, bool]
# A call of scaled_dot_product_attention, as `vaemem._core.Trace` takes it: the dtype, such as "float16"; queries, keys
# and values; the mask; is_causal and enable_gqa.
AttentionCall = tuple[str, Heads, Heads, Heads, Mask | None, bool, bool]


def _dense(shape: tuple[int, ...], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, dimensions by `order`, fastest first."""
    strides, size = [0] * len(shape), 1
    for dim in order:
        strides[dim] = size
        size *= shape[dim]
    return tuple(strides)


def _is(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(size == 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))


def eager_strides(
    shape: tuple[int, ...], operands: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
) -> tuple[int, ...]:
    """Return the strides that an eager pointwise operator gives its output of a shape (TensorIterator.cpp). operands:
    shapes and strides of its inputs, in order."""
    if all(size == shape for size, _ in operands):
        for dims in (range(len(shape))[::-1], (1, 3, 2, 0)):  # contiguous, and channels_last of four dimensions
            dense = _dense(shape, dims) if len(shape) == len(dims) else ()
            if dense and all(_is(shape, strides, dense) for _, strides in operands):
                return dense
        first = operands[0][1]
        ordered = sorted(range(len(shape)), key=lambda dim: (first[dim], shape[dim] > 1))
        if _is(shape, first, _dense(shape, ordered)) and all(strides == first for _, strides in operands):
            return first
    table = []  # by operand: strides of the output's dimensions, 0 if broadcast
    for size, strides in operands:
        lead = len(shape) - len(size)
        table.append(
            [0] * lead + [0 if a == 1 != b else c for a, b, c in zip(size, shape[lead:], strides, strict=True)]
        )

    def slower(a: int, b: int) -> int:
        """Return 1 if dimension a has a larger stride than b, -1 if a smaller one; 0 if no operand tells."""
        for strides in table:
            if strides[a] and strides[b]:
                if strides[a] != strides[b]:
                    return 1 if strides[a] > strides[b] else -1
                if shape[a] > shape[b]:
                    return 1
        return 0

    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):  # an insertion sort that passes over pairs without an answer
        here = i
        for there in range(i - 1, -1, -1):
            answer = slower(order[there], order[here])
            if answer > 0:
                order[there], order[here] = order[here], order[there]
                here = there
            elif answer < 0:
                break
    return _dense(shape, order)
