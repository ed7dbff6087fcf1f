"""ggml's graphs, and the size of the buffer in which its allocator places a graph: to the byte, without ggml.

After ggml.c and ggml-alloc.c of the commit in GGML_COMMIT. A graph consists of tensors with the operations below, named
as in ggml. Weights have a buffer of their own and are no tensors here. `reserve` follows ggml_gallocr_reserve: it goes
through nodes in the order of ggml_build_forward_expand and frees each after its last use. An element-wise result
overwrites a source of the same layout that nothing else needs. The rest is placed by best fit.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence

from vaemem._errors import ArgumentError

GGML_COMMIT = "a8db410a252c8c8f2d120c6f2e7133ebe032f35d"  # of 2026-01-30
ALIGNMENTS = {"cpu": 32, "cuda": 128}  # bytes, of a tensor's address, by backend
F16, F32, I32 = 2, 4, 4  # bytes of an element
# Operations with a result that may overwrite a source: ggml_op_can_inplace.
INPLACE = frozenset({"add", "sub", "mul", "div", "scale", "unary", "rope", "rms_norm", "soft_max"})


class Node:
    """Result of one operation of a graph.

    op: "" for an input
    ne: elements by dimension, innermost first, as ggml writes shapes
    nb: bytes from one element to the next, by dimension
    sources: tensors it is computed from, in ggml's order, without weights
    owner: the tensor whose memory a view uses; None for a tensor with memory of its own
    flops: of a product; a multiplication and an addition count as two
    scratch: bytes outside the buffer while it is computed on CUDA
    placed: whether it lies outside the graph's buffer, as inputs do on the CPU
    """

    def __init__(
        self, op: str, ne: Sequence[int], sources: tuple[Node, ...] = (), *, element: int = F32,
        nb: tuple[int, ...] | None = None, owner: Node | None = None, flops: int = 0, scratch: int = 0,
        placed: bool = False,
    ) -> None:  # fmt: skip
        self.op, self.ne, self.sources, self.element = op, (*ne, 1, 1, 1)[:4], sources, element
        self.nb = nb or self._dense()
        self.owner, self.flops, self.scratch, self.placed = owner, flops, scratch, placed

    def _dense(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate((self.element, *self.ne[:3]), operator.mul))

    @property
    def bytes(self) -> int:
        """Bytes of its elements without gaps."""
        return self.element * math.prod(self.ne)

    @property
    def moved(self) -> int:
        """Bytes that the operation reads and writes; 0 for a view."""
        computes = self.op not in ("", "view", "reshape", "permute")
        return computes * (self.bytes + sum(source.bytes for source in self.sources))

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie without gaps in order."""
        return all(have == want for have, want, n in zip(self.nb, self._dense(), self.ne, strict=True) if n > 1)

    # ---- views ----

    def _view(self, op: str, ne: Sequence[int], nb: tuple[int, ...] | None = None, *others: Node) -> Node:
        return Node(op, ne, (self, *others), element=self.element, nb=nb, owner=self.owner or self)

    def view(self, *ne: int) -> Node:
        """Return a part of size `ne` with the strides of the whole."""
        return self._view("view", ne, self.nb)

    def reshape(self, *ne: int) -> Node:
        """Return the same elements in another shape; one -1 follows from the others."""
        if -1 in ne:
            ne = tuple(math.prod(self.ne) // -math.prod(ne) if n == -1 else n for n in ne)
        if math.prod(ne) != math.prod(self.ne) or not self.is_dense:
            raise ArgumentError("reshape", f"{math.prod(self.ne)} elements side by side", f"{self.ne} as {ne}")
        return self._view("reshape", ne)

    def permute(self, *axes: int) -> Node:
        """Make dimension i dimension axes[i], as ggml_permute does."""
        order = [axes.index(axis) for axis in range(4)]
        return self._view("permute", [self.ne[i] for i in order], tuple(self.nb[i] for i in order))

    def write(self, op: str, *others: Node) -> Node:
        """Apply an operation that overwrites this tensor: ggml's _inplace."""
        return self._view(op, self.ne, self.nb, *others)

    # ---- results with memory of their own ----

    def apply(self, op: str, *others: Node) -> Node:
        """Apply an operation; the result has this tensor's shape."""
        return Node(op, self.ne, (self, *others), element=self.element)

    def make(self, op: str, *ne: int) -> Node:
        """Apply an operation; the result has the shape `ne`."""
        return Node(op, ne, (self,), element=self.element)

    def cont(self) -> Node:
        """Return a copy without gaps."""
        return self.apply("cont")

    def dense(self) -> Node:
        """Return itself, or a copy without gaps if it has any."""
        return self if self.is_dense else self.cont()

    def half(self) -> Node:
        """Return a copy as float16."""
        return Node("cpy", self.ne, (self,), element=F16)

    def concat(self, other: Node, axis: int) -> Node:
        """Append another tensor along one axis."""
        ne = list(self.ne)
        ne[axis] += other.ne[axis]
        return Node("concat", ne, (self, other))

    def pad(self, first: int, second: int) -> Node:
        """Append zeros to the first two dimensions."""
        return self.make("pad", self.ne[0] + first, self.ne[1] + second, *self.ne[2:])


def mul_mat(a: Node, b: Node) -> Node:
    """Multiply rows of a with rows of b, both ne[0] long; b may have several matrices for each of a."""
    ne = (a.ne[1], *b.ne[1:])
    return Node("mul_mat", ne, (a, b), flops=2 * a.ne[0] * math.prod(ne))


def flash_attn_ext(queries: Node, keys: Node, values: Node, *mask: Node) -> Node:
    """Attend: (depth, L, heads, N) each -> (depth, heads, L, N)."""
    depth, length, heads, n = queries.ne
    flops = 2 * (depth + values.ne[0]) * length * keys.ne[1] * heads * n
    return Node("flash_attn_ext", (values.ne[0], heads, length, n), (queries, keys, values, *mask), flops=flops)


def nodes_of(result: Node) -> list[Node]:
    """List all nodes that a result depends on, in ggml's order: sources first, from left to right."""
    order: dict[Node, None] = {}
    pending = [result]
    while pending:
        source = next((source for source in pending[-1].sources if source not in order), None)
        if source is None:
            order[pending.pop()] = None
        else:
            pending.append(source)
    return list(order)


def reserve(result: Node, inputs: Sequence[Node] = (), backend: str = "cuda") -> int:
    """Return the bytes of the buffer in which ggml places a graph.

    inputs: placed even if the graph does not read them. backend: "cuda" or "cpu", for the alignment. A backend that
    limits the size of one buffer (Vulkan; not these two) may need more, because ggml then splits it.

    Examples
    --------
    >>> x = Node("", (1000,))
    >>> reserve(x.apply("scale").apply("norm"))  # scale overwrites x, norm cannot: twice 4000 bytes, aligned
    8192
    """
    order = nodes_of(result)
    children = Counter(source for node in order for source in node.sources)
    views = Counter(node.owner for node in order if node.owner)
    where: dict[Node, tuple[int, int]] = {}  # (start, end) of each node that is placed now
    alignment, size = ALIGNMENTS[backend], 0

    def place(node: Node) -> None:
        """Place a node in the smallest gap that fits (the last of equal ones), or behind all placed nodes."""
        nonlocal size
        wanted = node.bytes + -node.bytes % alignment
        placed = sorted(where.values())
        starts = [0, *(end for _, end in placed)]
        gaps = [(end - start, -start) for start, (end, _) in zip(starts, placed, strict=False) if end - start >= wanted]
        start = -min(gaps)[1] if gaps else starts[-1]
        where[node] = start, start + wanted
        size = max(size, start + wanted)

    def can_overwrite(node: Node, source: Node) -> bool:
        """Whether a result takes over the place of a source. A view has no place to give."""
        is_free = source in where and children[source] == 1 and not views[source]
        return is_free and node.op in INPLACE and (source.ne, source.nb) == (node.ne, node.nb)

    for leaf in dict.fromkeys((*order, *inputs)):
        if not leaf.op and not leaf.placed:
            place(leaf)
    for node in order:
        if node.op and not node.owner:
            source = next((source for source in node.sources if can_overwrite(node, source)), None)
            if source:
                where[node] = where.pop(source)
            else:
                place(node)
        for source in node.sources:
            children[source] -= 1
            if children[source] or views[source]:
                continue
            owner = source.owner or source
            views[owner] -= bool(source.owner)
            if not children[owner] and not views[owner]:
                where.pop(owner, None)
    return size
