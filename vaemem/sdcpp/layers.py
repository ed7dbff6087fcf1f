"""The layers that stable-diffusion.cpp makes its graphs of.

After ggml_extend.hpp and common.hpp of the commit that SDCPP_COMMIT names. Activations are float32 whatever
the weights are; convolutions' weights are float16, and so is what im2col copies for them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vaemem._common import choose
from vaemem.engine.file_tensors import BLOCKS
from vaemem.sdcpp.ggml import ALIGNMENTS, F16, F32, GGML_COMMIT, Node, flash_attn_ext, mul_mat, nodes_of, reserve

SDCPP_COMMIT = "0752cc9d3a8ddee25b72ca65d061a28310d97c02"  # of 2026-02-26
SDCPP_VERSION = f"stable-diffusion.cpp {SDCPP_COMMIT[:7]} with ggml {GGML_COMMIT[:7]}"
_TYPES = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 q6_K q5_K q4_K q3_K q2_K"
GGML_TYPES = {name: BLOCKS[name.upper()] for name in _TYPES.split()}  # ggml's: elements of a block, and its bytes
EMBEDDING_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")  # that sd.cpp looks tokens up in; others become f32
FLASH_DEPTHS = (40, 64, 72, 80, 96, 112, 128, 256)  # of a head: what ggml-cuda has flash attention for
# Elements: CUDA pads the last row of a quantised weight to a multiple, and every row that is multiplied with it.
ROW_PADDING = 512
MMQ_BYTES = 128 * 144  # of a tile of factors, beyond the last row


class Graph(NamedTuple):
    """What one graph of stable-diffusion.cpp takes.

    Attributes
    ----------
    buffer : int
        Bytes of the compute buffer, as the log prints it, in MiB that it calls MB.
    pool : int
        Bytes that ggml-cuda takes beside it for the largest product, and rounds up to 2 MiB: results and other factors
        as float16 where a weight or im2col's copy is float16; other factors as q8_1 where a weight is quantised. Of
        GPUs with fast float16 and, for quantised weights, Turing's tensor cores or later ones. 0 on a CPU.
    weights : int
        Bytes of the buffer that holds them, as the log prints it.
    flops : int
        Those of matrix products and convolutions, two for each multiplication and addition.
    runs : int
        How often a component runs its graph: once a tile.
    """

    buffer: int
    pool: int
    weights: int
    flops: int
    runs: int = 1


class Builder:
    """One model's graph while it is made: options, inputs, and its weights counted on the way.

    Attributes
    ----------
    weights : int
        Bytes of the buffer that holds the weights, so far.
    inputs : list of Node
        That every graph of sd.cpp holds: a one and a zero.
    """

    def __init__(
        self, weight_type: str = "f16", *, conv_direct: bool = False, flash: bool = False, conv_scale: bool = False,
        backend: str = "cuda",
    ) -> None:  # fmt: skip
        choose("weight_type", weight_type, GGML_TYPES)
        choose("backend", backend, ALIGNMENTS)
        self.weight_type, self.backend = weight_type, backend
        self.conv_direct, self.flash, self.conv_scale = conv_direct, flash, conv_scale
        self.weights = 0
        self.one, zero = Node("", (1,)), Node("", (1,))
        self.inputs = [self.one, zero]

    def taken(self, result: Node) -> Graph:
        """What the graph that ends in `result` takes."""
        nodes = nodes_of(result)
        return Graph(
            buffer=reserve(result, self.inputs, self.backend),
            pool=max(node.scratch for node in nodes) if self.backend == "cuda" else 0,
            weights=self.weights,
            flops=sum(node.flops for node in nodes),
        )

    def input(self, *ne: int, element: int = F32) -> Node:
        """What a caller hands in. The CPU reads it where it is; elsewhere it is copied into the buffer."""
        return Node("", ne, element=element, placed=self.backend == "cpu")

    def made(self, *ne: int, element: int = F32) -> Node:
        """An input that sd.cpp makes for a graph, such as positions; it lies in the buffer everywhere."""
        return Node("", ne, element=element)

    def weight(self, *ne: int, kind: str = "f32") -> str:
        """Count a weight of ne[0] columns, and say its type; of no whole blocks a row, it is float32."""
        kind = "f32" if ne[0] % GGML_TYPES[kind][0] else kind
        block, size = GGML_TYPES[kind]
        elements = math.prod(ne)
        if block > 1 and self.backend == "cuda":
            elements += -ne[0] % ROW_PADDING
        alignment = ALIGNMENTS[self.backend]
        self.weights += -(elements // block * size // -alignment) * alignment
        return kind

    # ---- layers ----

    def scale(self, x: Node) -> Node:
        return x.dense().apply("scale")

    def linear(self, x: Node, n: int, bias: bool = True, *, f32: bool = False, scaled: bool = False) -> Node:
        """scaled: the product of numbers made smaller, and larger again after it."""
        kind = self.weight(x.ne[0], n, kind="f32" if f32 else self.weight_type)
        x = self.scale(x) if scaled else x
        x = x.times(n, _scratch(kind, x, n))
        x = self.scale(x) if scaled else x
        if bias:
            self.weight(n)
            x = x.write("add")
        return x

    def conv(self, x: Node, n: int, side: int = 3, stride: int = 1, padding: int | None = None) -> Node:
        """x: (W, H, C). Zero padding as wide as it takes to keep the size, unless given."""
        w, h, c, _ = x.ne
        padding = side // 2 if padding is None else padding
        w, h = ((length + 2 * padding - side) // stride + 1 for length in (w, h))
        taps = side * side * c
        self.weight(side, side, c, n, kind="f16")
        self.weight(n)
        x = self.scale(x) if self.conv_scale else x
        flops = 2 * taps * w * h * n
        if self.conv_direct:
            x = Node("conv_2d", (w, h, n), (x,), flops=flops)
        else:
            x = Node("im2col", (taps, w, h), (x,), element=F16).reshape(taps, w * h)
            x = Node("mul_mat", (w * h, n), (x,), flops=flops, scratch=F16 * w * h * n)
            x = x.reshape(w, h, 1, n).permute(0, 1, 3, 2).cont()
        x = self.scale(x) if self.conv_scale else x
        return x.write("add")

    def norm_conv(self, x: Node, n: int) -> Node:
        """GroupNorm, SiLU and a 3x3 convolution."""
        return self.conv(self.group_norm(x).write("unary"), n)

    def upsample(self, x: Node) -> Node:
        """(W, H, C) as (2 W, 2 H, C), nearest, and a 3x3 convolution."""
        w, h, c, _ = x.ne
        return self.conv(x.make("upscale", 2 * w, 2 * h, c), c)

    def norm(self, x: Node, size: int | None = None, kind: str = "norm") -> Node:
        """A normalisation with a weight and a bias for each of `size` channels (of the innermost dimension)."""
        for _ in range(2):
            self.weight(size or x.ne[0])
        return x.apply(kind).write("mul").write("add")

    def group_norm(self, x: Node) -> Node:
        return self.norm(x, x.ne[2], "group_norm")

    def rms_norm(self, x: Node, *, written: bool = True) -> Node:
        """written: the product with the weight is written over the normalised tensor."""
        self.weight(x.ne[0])
        x = x.apply("rms_norm")
        return x.write("mul") if written else x.apply("mul")

    def resnet(self, x: Node, n: int, emb: Node | None = None) -> Node:
        """emb: what is known of the time, for every channel."""
        h = self.norm_conv(x, n)
        if emb is not None:
            h = h.apply("add", self.linear(emb.apply("unary"), n).reshape(1, 1, n))
        h = self.norm_conv(h, n)
        return h.apply("add", x if x.ne[2] == n else self.conv(x, n, 1))

    def gated(self, x: Node, inner: int, *, written: bool = True, scaled: bool = False) -> Node:
        """A feed-forward layer with a gate. written: the gate and its product are written over one tensor."""
        gate = self.linear(x, inner, bias=False)
        gate = gate.write("unary") if written else gate.apply("unary")
        up = self.linear(x, inner, bias=False)
        h = gate.write("mul", up) if written else gate.apply("mul", up)
        return self.linear(h, x.ne[0], bias=False, scaled=scaled)

    def embedding(self, ids: Node, n: int, rows: int) -> Node:
        """Looked up in a table of rows; ids: (tokens, N); gives (n, tokens, N)."""
        self.weight(n, rows, kind=self.weight_type if self.weight_type in EMBEDDING_TYPES else "f32")
        count = ids.ne[0] * ids.ne[1]
        return Node("get_rows", (n, count), (ids.reshape(count),)).reshape(n, *ids.ne[:2])

    def full(self, *ne: int) -> Node:
        """A tensor of one number."""
        return self.one.apply("scale").make("repeat", *ne)

    def attend(
        self, q: Node, k: Node, v: Node, mask: Node | None = None, *, flash: bool = False, scaled: bool = False
    ) -> Node:
        """q, k: (depth, L, heads), v: (depth, heads, L); gives (depth * heads, L). Keys may have fewer heads.

        Flash attention takes keys and values as float16, of a length that is a multiple of 256, and masks the rest.
        Where the device has none for heads of that depth, scores are stored whole.
        """
        depth, (_, queries, heads, _), (_, keys, key_heads, _) = v.ne[0], q.ne, k.ne
        if flash and (self.backend == "cpu" or depth in FLASH_DEPTHS):
            v = v.permute(0, 2, 1, 3).dense().reshape(depth, keys, key_heads)
            out = self._flash(q, k, v, mask, scaled).view(depth, heads, queries)
        else:
            v = v.permute(1, 2, 0, 3).dense().reshape(keys, depth, key_heads)
            scores = mul_mat(k, q).write("scale")
            if mask is not None:
                scores = scores.write("add", mask)
            out = mul_mat(v, scores.write("soft_max")).permute(0, 2, 1, 3)
        return out.dense().reshape(depth * heads, queries)

    def _flash(self, q: Node, k: Node, v: Node, mask: Node | None, scaled: bool) -> Node:
        """Each (depth, L, heads); gives (depth, heads, L)."""
        queries, keys = q.ne[1], k.ne[1]
        more = -keys % 256

        def prepared(x: Node) -> Node:
            x = x.pad(0, more) if more else x
            return (self.scale(x) if scaled else x).half()

        k, v = prepared(k), prepared(v)
        if mask is not None:
            mask = mask.transpose().half()
        elif more:
            mask = self.full(keys, queries).concat(self.full(more, queries), 0).half()
        out = flash_attn_ext(q, k, v, mask)
        return self.scale(out) if scaled else out

    def attention(
        self, q: Node, k: Node, v: Node, heads: int, mask: Node | None = None, *, flash: bool = False
    ) -> Node:
        """Each (heads * depth, L)."""
        depth = q.ne[0] // heads

        def split(x: Node) -> Node:
            return x.reshape(depth, heads, x.ne[1])

        q, k = (split(x).permute(0, 2, 1, 3).dense().reshape(depth, x.ne[1], heads) for x in (q, k))
        return self.attend(q, k, split(v), mask, flash=flash)


def _scratch(kind: str, x: Node, n: int) -> int:
    """The scratch of a product of x with a weight of n rows."""
    if kind == "f32":
        return 0
    rows = math.prod(x.ne[1:])
    if GGML_TYPES[kind][0] == 1:
        return F16 * rows * (x.ne[0] + n)
    return rows * -(x.ne[0] // -ROW_PADDING) * ROW_PADDING * 36 // 32 + MMQ_BYTES
