"""ggml's graphs, and the one buffer that its allocator lays them out in before a run: to the byte, without ggml.

After ggml.c and ggml-alloc.c of the commit that GGML_COMMIT names. A graph is made of tensors with the operations
below, named as in ggml; weights lie in a buffer of their own and are no tensors here. `reserve` then does what
ggml_gallocr_reserve does: nodes in the order of ggml_build_forward_expand, each freed after its last use, an
element-wise one written over a source of the same layout that nobody else wants, the rest by best fit.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence

from vaemem._errors import ArgumentError

GGML_COMMIT = "a8db410a252c8c8f2d120c6f2e7133ebe032f35d"  # of 2026-01-30
ALIGNMENTS = {"cpu": 32, "cuda": 128}  # of a tensor's place, by backend
F16, F32, I32 = 2, 4, 4  # bytes of an element
# Operations whose result may take the place of a source: ggml_op_can_inplace.
INPLACE = frozenset({"add", "sub", "mul", "div", "scale", "unary", "rope", "rms_norm", "soft_max"})


class Node:
    """What one operation of a graph gives.

    op: "" for an input
    ne: elements, innermost dimension first, as ggml writes shapes
    nb: bytes from one element to the next, a dimension each
    sources: what it is computed from, in ggml's order, without weights
    owner: whose memory a view lies in; None for a tensor that has memory of its own
    flops: those of a product, two for each multiplication and addition
    scratch: bytes beside the buffer while it is computed on CUDA
    placed: whether it lies outside the graph's buffer, as inputs do where the CPU computes
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
        """What its elements take side by side."""
        return self.element * math.prod(self.ne)

    @property
    def moved(self) -> int:
        """What the operation reads and writes; a view does neither."""
        computes = self.op not in ("", "view", "reshape", "permute")
        return computes * (self.bytes + sum(source.bytes for source in self.sources))

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie side by side."""
        return all(have == want for have, want, n in zip(self.nb, self._dense(), self.ne, strict=True) if n > 1)

    # ---- views ----

    def _view(self, op: str, ne: Sequence[int], nb: tuple[int, ...] | None = None, *others: Node) -> Node:
        return Node(op, ne, (self, *others), element=self.element, nb=nb, owner=self.owner or self)

    def view(self, *ne: int) -> Node:
        """A part, as wide as `ne` says, with the strides of the whole."""
        return self._view("view", ne, self.nb)

    def reshape(self, *ne: int) -> Node:
        """The same elements as another shape; one -1 follows from the others."""
        if -1 in ne:
            ne = tuple(math.prod(self.ne) // -math.prod(ne) if n == -1 else n for n in ne)
        if math.prod(ne) != math.prod(self.ne) or not self.is_dense:
            raise ArgumentError("reshape", f"{math.prod(self.ne)} elements side by side", f"{self.ne} as {ne}")
        return self._view("reshape", ne)

    def permute(self, *axes: int) -> Node:
        """Dimension i becomes dimension axes[i], as in ggml_permute."""
        order = [axes.index(axis) for axis in range(4)]
        return self._view("permute", [self.ne[i] for i in order], tuple(self.nb[i] for i in order))

    def write(self, op: str, *others: Node) -> Node:
        """An operation whose result is written over this tensor: ggml's _inplace."""
        return self._view(op, self.ne, self.nb, *others)

    # ---- with memory of their own ----

    def apply(self, op: str, *others: Node) -> Node:
        """An operation whose result has this tensor's shape."""
        return Node(op, self.ne, (self, *others), element=self.element)

    def make(self, op: str, *ne: int) -> Node:
        """An operation whose result has another shape."""
        return Node(op, ne, (self,), element=self.element)

    def cont(self) -> Node:
        return self.apply("cont")

    def dense(self) -> Node:
        """Itself, or a copy whose elements lie side by side."""
        return self if self.is_dense else self.cont()

    def half(self) -> Node:
        """A copy as float16."""
        return Node("cpy", self.ne, (self,), element=F16)

    def concat(self, other: Node, axis: int) -> Node:
        ne = list(self.ne)
        ne[axis] += other.ne[axis]
        return Node("concat", ne, (self, other))

    def pad(self, first: int, second: int) -> Node:
        """With so many zeros behind each of its first two dimensions."""
        return self.make("pad", self.ne[0] + first, self.ne[1] + second, *self.ne[2:])


def mul_mat(a: Node, b: Node) -> Node:
    """Rows of a times rows of b, both as long as ne[0]; b may have several matrices for one of a."""
    ne = (a.ne[1], *b.ne[1:])
    return Node("mul_mat", ne, (a, b), flops=2 * a.ne[0] * math.prod(ne))


def flash_attn_ext(queries: Node, keys: Node, values: Node, *mask: Node) -> Node:
    """(depth, L, heads, N) each; gives (depth, heads, L, N)."""
    depth, length, heads, n = queries.ne
    flops = 2 * (depth + values.ne[0]) * length * keys.ne[1] * heads * n
    return Node("flash_attn_ext", (values.ne[0], heads, length, n), (queries, keys, values, *mask), flops=flops)


def nodes_of(result: Node) -> list[Node]:
    """All that a result is computed from, in the order in which ggml computes it: sources first, from the left."""
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
    """The bytes of the buffer in which ggml lays out a graph.

    `inputs` are held whether the graph reads them or not; the backend decides the alignment, "cuda" or "cpu". Where it
    limits the size of one buffer (Vulkan does, these do not), ggml splits it, and the sum may be larger.

    Examples
    --------
    >>> x = Node("", (1000,))
    >>> reserve(x.apply("scale").apply("norm"))  # scale is written over x, norm cannot be: twice 4000 bytes, aligned
    8192
    """
    order = nodes_of(result)
    children = Counter(source for node in order for source in node.sources)
    views = Counter(node.owner for node in order if node.owner)
    where: dict[Node, tuple[int, int]] = {}  # what has a place now, and from where to where
    alignment, size = ALIGNMENTS[backend], 0

    def place(node: Node) -> None:
        """In the smallest gap that is large enough, of equal ones the last; else behind all that has a place."""
        nonlocal size
        wanted = node.bytes + -node.bytes % alignment
        taken = sorted(where.values())
        starts = [0, *(end for _, end in taken)]
        gaps = [(end - start, -start) for start, (end, _) in zip(starts, taken, strict=False) if end - start >= wanted]
        start = -min(gaps)[1] if gaps else starts[-1]
        where[node] = start, start + wanted
        size = max(size, start + wanted)

    def is_heir(node: Node, source: Node) -> bool:
        """Whether a result takes a source's place. Of a view it never does: only what has a place can hand it on."""
        is_free = source in where and children[source] == 1 and not views[source]
        return is_free and node.op in INPLACE and (source.ne, source.nb) == (node.ne, node.nb)

    for leaf in dict.fromkeys((*order, *inputs)):
        if not leaf.op and not leaf.placed:
            place(leaf)
    for node in order:
        if node.op and not node.owner:
            heir = next((source for source in node.sources if is_heir(node, source)), None)
            if heir:
                where[node] = where.pop(heir)
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
