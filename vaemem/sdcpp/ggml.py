"""ggml's graphs, and the one buffer that its allocator lays them out in before a run: to the byte, without ggml.

After ggml.c and ggml-alloc.c of the commit that GGML_COMMIT names. A graph is made of tensors with the operations
below, named as in ggml; weights lie in a buffer of their own and are no tensors here. `reserve` then does what
ggml_gallocr_reserve does: nodes in the order of ggml_build_forward_expand, each freed after its last use, an
element-wise one written over a source of the same layout that nobody else wants, the rest by best fit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

GGML_COMMIT = "a8db410a252c8c8f2d120c6f2e7133ebe032f35d"  # of 2026-01-30
ALIGNMENTS = {"cpu": 32, "cuda": 128}  # of a tensor's place, by backend
F16, F32, I32 = 2, 4, 4  # bytes of an element
# Operations whose result may take the place of a source: ggml_op_can_inplace.
INPLACE = frozenset({"add", "sub", "mul", "div", "scale", "unary", "rope", "rms_norm", "soft_max"})
_ENDLESS = 1 << 62  # bytes of the last free block

Strides = tuple[int, int, int, int]


def _four(shape: Sequence[int]) -> Strides:
    a, b, c, d = (*shape, 1, 1, 1, 1)[:4]
    return a, b, c, d


class Node:
    """What one operation of a graph gives.

    Attributes
    ----------
    op : str
        "" for an input.
    ne : tuple of 4 int
        Elements, innermost dimension first, as ggml writes shapes.
    nb : tuple of 4 int
        Bytes from one element to the next, a dimension each.
    sources : tuple of Node
        What it is computed from, in ggml's order, without weights.
    owner : Node or None
        Whose memory a view lies in; None for a tensor that has memory of its own.
    flops : int
        Those of a product: two for each multiplication and addition.
    scratch : int
        Bytes beside the buffer while it is computed on CUDA.
    placed : bool
        Whether it lies outside the graph's buffer, as inputs do where the CPU computes.
    """

    __slots__ = ("element", "flops", "nb", "ne", "op", "owner", "placed", "scratch", "sources")

    def __init__(
        self, op: str, ne: Sequence[int], sources: tuple[Node, ...] = (), *, element: int = F32,
        nb: Strides | None = None, owner: Node | None = None, flops: int = 0, scratch: int = 0, placed: bool = False,
    ) -> None:  # fmt: skip
        self.op, self.ne, self.sources, self.element = op, _four(ne), sources, element
        self.nb = nb or self._dense()
        self.owner, self.flops, self.scratch, self.placed = owner, flops, scratch, placed

    def _dense(self) -> Strides:
        a, b, c, _ = self.ne
        return self.element, self.element * a, self.element * a * b, self.element * a * b * c

    @property
    def bytes(self) -> int:
        """What its elements take side by side."""
        return self.element * math.prod(self.ne)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie side by side."""
        return all(have == want for have, want, n in zip(self.nb, self._dense(), self.ne, strict=True) if n > 1)

    # ---- views ----

    def _view(self, op: str, ne: Sequence[int], nb: Strides | None = None, *others: Node) -> Node:
        return Node(op, ne, (self, *others), element=self.element, nb=nb, owner=self.owner or self)

    def view(self, *ne: int) -> Node:
        """A part, as wide as `ne` says, with the strides of the whole."""
        return self._view("view", ne, self.nb)

    def reshape(self, *ne: int) -> Node:
        """The same elements as another shape; one -1 follows from the others."""
        if -1 in ne:
            ne = tuple(math.prod(self.ne) // -math.prod(ne) if n == -1 else n for n in ne)
        if math.prod(ne) != math.prod(self.ne) or not self.is_dense:
            raise ValueError(f"reshape: want {math.prod(self.ne)} elements side by side, got {self.ne} as {ne}")
        return self._view("reshape", ne)

    def permute(self, *axes: int) -> Node:
        """Dimension i becomes dimension axes[i], as ggml_permute has it."""
        ne, nb = [0] * 4, [0] * 4
        for i, axis in enumerate(axes):
            ne[axis], nb[axis] = self.ne[i], self.nb[i]
        return self._view("permute", ne, _four(nb))

    def transpose(self) -> Node:
        return self.permute(1, 0, 2, 3)

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

    def pad(self, *more: int) -> Node:
        return self.make("pad", *(n + p for n, p in zip(self.ne, _four((*more, 0, 0, 0)), strict=True)))

    def times(self, n: int, scratch: int = 0) -> Node:
        """The product with a weight of n rows: ggml_mul_mat(weight, self)."""
        ne = (n, *self.ne[1:])
        return Node("mul_mat", ne, (self,), flops=2 * self.ne[0] * math.prod(ne), scratch=scratch)


def mul_mat(a: Node, b: Node) -> Node:
    """Rows of a times rows of b, both as long as ne[0]; b may have several matrices for one of a."""
    ne = (a.ne[1], *b.ne[1:])
    return Node("mul_mat", ne, (a, b), flops=2 * a.ne[0] * math.prod(ne))


def flash_attn_ext(queries: Node, keys: Node, values: Node, mask: Node | None = None) -> Node:
    """(depth, L, heads, N) each; gives (depth, heads, L, N)."""
    depth, length, heads, n = queries.ne
    sources = (queries, keys, values) if mask is None else (queries, keys, values, mask)
    flops = 2 * (depth + values.ne[0]) * length * keys.ne[1] * heads * n
    return Node("flash_attn_ext", (values.ne[0], heads, length, n), sources, flops=flops)


def nodes_of(result: Node) -> list[Node]:
    """All that a result is computed from, in the order in which ggml computes it: sources first, from the left."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(result, False)]
    while pending:
        tensor, is_done = pending.pop()
        if is_done:
            order.append(tensor)
        elif tensor not in seen:
            seen.add(tensor)
            pending.append((tensor, True))
            pending.extend((source, False) for source in reversed(tensor.sources))
    return order


class _Places:
    """Free blocks of one growing buffer, sorted: ggml_dyn_tallocr with a single chunk."""

    def __init__(self, alignment: int) -> None:
        self.alignment, self.size = alignment, 0
        self.free: list[tuple[int, int]] = [(0, _ENDLESS)]

    def take(self, size: int) -> int:
        size = -(-size // self.alignment) * self.alignment
        fitting = [(block[1], -i) for i, block in enumerate(self.free[:-1]) if block[1] >= size]
        best = -min(fitting)[1] if fitting else len(self.free) - 1  # of equal blocks the last
        offset, room = self.free[best]
        self.free[best : best + 1] = [(offset + size, room - size)] if room > size else []
        self.size = max(self.size, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        size = -(-size // self.alignment) * self.alignment
        i = bisect.bisect(self.free, (offset, 0))
        if i < len(self.free) and offset + size == self.free[i][0]:
            size += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == offset:
            i -= 1
            offset, before = self.free.pop(i)
            size += before
        self.free.insert(i, (offset, size))


def reserve(result: Node, inputs: Sequence[Node] = (), backend: str = "cuda") -> int:
    """The bytes of the buffer in which ggml lays out a graph.

    Parameters
    ----------
    result : Node
        What the graph computes.
    inputs : sequence of Node
        That the graph holds whether it reads them or not.
    backend : "cuda" or "cpu"
        For the alignment.

    Notes
    -----
    Where a backend limits the size of one buffer (Vulkan does, CUDA and the CPU do not), ggml splits it, and the
    sum may be larger.

    Examples
    --------
    >>> x = Node("", (1000,))
    >>> reserve(x.apply("scale").apply("norm"))  # scale is written over x, norm cannot be: twice 4000 bytes, aligned
    8192
    """
    order = nodes_of(result)
    leaves = [t for t in (*order, *(t for t in inputs if t not in order)) if not t.op]
    children = dict.fromkeys((*order, *leaves), 0)
    views = dict(children)
    for node in order:
        if node.owner:
            views[node.owner] += 1
        for source in node.sources:
            children[source] += 1
    places = _Places(ALIGNMENTS[backend])
    where: dict[Node, int] = {leaf: places.take(leaf.bytes) for leaf in leaves if not leaf.placed}

    def reusable(node: Node, source: Node) -> bool:
        """A source that is a view never is: only what has a place can hand it on."""
        same = (source.ne, source.nb, source.element) == (node.ne, node.nb, node.element)
        return same and source in where and children[source] == 1 and not views[source]

    for node in order:
        if not node.op:
            continue
        if not node.owner:
            heirs = (s for s in node.sources if node.op in INPLACE and reusable(node, s))
            heir = next(heirs, None)
            where[node] = places.take(node.bytes) if heir is None else where.pop(heir)
        for source in node.sources:
            children[source] -= 1
            if children[source] or views[source]:
                continue
            owner = source.owner or source
            views[owner] -= bool(source.owner)
            if not children[owner] and not views[owner] and owner in where:
                places.give(where.pop(owner), owner.bytes)
    return places.size
