"""Modules recorded once with PyTorch, and replayed at any size without it.

benchmarks/record_modules.py runs a module under fake tensors at several sizes (`vaemem.pytorch.record`), and writes
what it takes and gives back as a tree of module calls, equal calls once, with every size as a polynomial in the call's
variables. Convolutions and attentions stay questions: their workspaces, and which kernel runs, are decided at replay.

A file of data/modules holds, for dtypes and the cases in which a call takes the same steps (``"float16; 1 n = 1"``):
`sizes`, the polynomials (``"1280 n h w + 640"``); `convs` and `attentions`, their arguments as indices into `sizes`;
and `modules`, one text a distinct module call, the outermost last, of words:

    +3:statistics   take sizes[3] bytes, under the module's name and [statistics]
    -5              give back what was taken five takes ago
    c2  a0          a convolution; an attention, whose output counts as a take
    b7  l7          a product by cuBLAS, by cuBLASLt, of sizes[7] FLOPs
    conv1=12        the submodule conv1 is called, which does what modules[12] says; =12 the module itself, and
                    /conv1=12 one that belongs to another module, by its whole name

`weights` are written in the same way: ``weight:run:320,4,3,3`` a tensor with dtype and shape ("run" is the module's
own dtype), ``conv1=12`` a submodule.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, choose, distinct, grouped, shipped
from vaemem.prediction.attention import FUSED, Call, Heads, Mask, attend, choose_kernel
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.profiles import Conv

Passing = Mapping[str, Iterable[tuple[str, int]]]
DTYPE_BYTES = {**ELEMENT_BYTES, "int64": 8, "bool": 1}


class Weight(NamedTuple):
    """A parameter or buffer. dtype: its own, or "run" where it has the module's."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "run"

    @property
    def module(self) -> str:
        """Whose it is; "" for the outermost."""
        return self.name.rpartition(".")[0]

    def nbytes(self, dtype: str) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[dtype if self.dtype == "run" else self.dtype]


def parse(polynomial: str) -> list[tuple[int, list[str]]]:
    """[(factor, variables)]: ``"640 n h w + 5"`` is [(640, ["n", "h", "w"]), (5, [])]."""
    terms = [term.split() for term in polynomial.split(" + ")]
    return [(int(factor), variables) for factor, *variables in terms]


def evaluate(polynomial: list[tuple[int, list[str]]], values: Mapping[str, int]) -> int:
    return sum(factor * math.prod(values[name] for name in variables) for factor, variables in polynomial)


def holds(case: str, values: Mapping[str, int]) -> bool:
    """Whether an equation of two polynomials is true (``"1 n = 1"``), or an inequality (``"1 n != 1"``)."""
    left, sign, right = re.split(" (!?=) ", case)
    return (evaluate(parse(left), values) == evaluate(parse(right), values)) == (sign == "=")


class Recorded:
    """A module's file: its weights, and what its call takes by dtype.

    Attributes
    ----------
    name, about, source : str
    variables : tuple of str
        What a call's sizes follow from.
    weights : tuple of Weight
        In the order in which ``Module.to`` moves them.
    """

    def __init__(self, name: str, data: Mapping[str, Any]):
        self.name, self.about, self.source = name, str(data["about"]), str(data["source"])
        self.variables = tuple(data["variables"])
        self._derived = {key: (parse(of), by, to) for key, (of, by, to) in data["derived"].items()}
        self._calls = [_Call(key, call) for key, call in data["calls"].items()]
        self.weights = tuple(_weights(data["weights"], len(data["weights"]) - 1, ""))

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(distinct(dtype for call in self._calls for dtype in call.dtypes))

    def values(self, **sizes: int) -> dict[str, int]:
        """The variables with those that follow from them: each ``to * ceil(polynomial / by)``."""
        if set(sizes) != set(self.variables):
            raise ValueError(f"{self.name}: want {', '.join(self.variables)}, got {', '.join(sizes)}")
        values = dict(sizes)
        for name, (of, by, to) in self._derived.items():
            values[name] = to * -(-evaluate(of, values) // by)
        return values

    def call(self, dtype: str, values: Mapping[str, int]) -> _Call:
        """What was recorded for a dtype in the case that the values make."""
        choose("dtype", dtype, self.dtypes)
        calls = [call for call in self._calls if dtype in call.dtypes]
        for call in calls:
            if all(holds(case, values) for case in call.cases):
                return call
        cases = grouped(
            distinct(case for call in calls for case in call.cases), lambda case: re.split(" !?= ", case)[0]
        )
        unmet = [each for each in cases.values() if not any(holds(case, values) for case in each)] or cases.values()
        wanted = ", and ".join(" or ".join(re.sub(r"\b1 (?=[a-z])", "", case) for case in each) for each in unmet)
        got = ", ".join(f"{name} = {values[name]}" for name in self.variables)
        raise ValueError(f"{self.name}: want a case that was recorded, {wanted}, got {got}")

    def trace(
        self, dtype: str, gpu: Gpu, passing: Passing | None = None, sent: Passing | None = None, **sizes: int
    ) -> _core.Trace:
        """What a call takes on a GPU.

        Parameters
        ----------
        dtype : str
            Of the run.
        gpu : Gpu
            Which kernel an attention takes.
        passing : dict, optional
            {module: [(name, bytes)]}: what is on the device while that submodule is called and no longer, such as
            unpacked weights.
        sent : dict, optional
            The same of weights that accelerate's hooks send for the call, and empty the cache after each.
        **sizes
            A value for each of `variables`.

        Raises
        ------
        ValueError
            A dtype, variables or a case of sizes that was not recorded, or attention that no recorded kernel computes
            on that GPU.
        """
        values = self.values(**sizes)
        call, trace = self.call(dtype, values), _core.Trace()
        numbers = [evaluate(size, values) for size in call.sizes]
        ids: list[int | None] = []  # of what was taken, in order

        def play(index: int, module: str | None, shown: str) -> None:
            """What modules[index] says: a call of `module`, "" for the outermost and None for what calls that."""
            held = []
            for of in (sent, passing):
                for what, size in of.get(module, ()) if of and module is not None else ():
                    held.append(trace.take(size, f"weights of {shown} [{what}]"))
                    if of is sent:
                        trace.empty_cache()
            for word in call.modules[index]:
                kind, rest = word[0], word[1:]
                child, is_child, number = word.partition("=")
                if is_child:
                    path = f"{module}.{child}" if module and child[:1] != "/" else child.removeprefix("/")
                    play(int(number), path, path or shown)
                elif kind == "+":
                    size, _, what = rest.partition(":")
                    ids.append(trace.take(numbers[int(size)], f"{shown} [{what}]" if what else shown))
                elif kind == "-":
                    given = ids[-int(rest)]
                    if given is not None:
                        trace.give(given)
                elif kind == "c":
                    conv = call.conv(int(rest), numbers, dtype)
                    trace.conv(*conv[:9], conv.layout == "nhwc", f"{shown} [workspace]")
                elif kind == "a":
                    ids.append(_attend(trace, call.attention(int(rest), numbers, dtype), gpu, shown))
                else:
                    trace.blas(f"{shown} [workspace]" if kind == "l" else shown, kind == "l")
            for id_ in reversed(held):
                trace.give(id_)

        play(len(call.modules) - 1, None, self.name)
        return trace

    def flops(self, dtype: str, **sizes: int) -> int:
        """FLOPs of a call's products, convolutions and attentions; a multiplication and an addition count as two."""
        values = self.values(**sizes)
        call = self.call(dtype, values)
        numbers = [evaluate(size, values) for size in call.sizes]

        @functools.cache
        def of(index: int) -> int:
            total = 0
            for word in call.modules[index]:
                _, is_child, child = word.partition("=")
                if is_child:
                    total += of(int(child))
                elif word[0] in "bl":
                    total += numbers[int(word[1:])]
                elif word[0] == "c":
                    total += _conv_flops(call.conv(int(word[1:]), numbers, dtype))
                elif word[0] == "a":
                    total += _attention_flops(call.attention(int(word[1:]), numbers, dtype))
            return total

        return of(len(call.modules) - 1)


class _Call:
    """What a call takes in some dtypes, where all of some equations hold."""

    def __init__(self, key: str, data: Mapping[str, Any]):
        dtypes, *cases = key.split("; ")
        self.dtypes, self.cases = dtypes.split(), cases
        self.sizes = [parse(size) for size in data["sizes"]]
        self.modules = [text.split() for text in data["modules"]]
        self._convs, self._attentions = data["convs"], data["attentions"]

    def conv(self, index: int, numbers: list[int], dtype: str) -> Conv:
        own, *where, layout = self._convs[index]
        n, c, h, w, k, r, stride, padding = (numbers[i] for i in where)
        return Conv(dtype if own == "run" else own, n, c, h, w, k, r, stride, padding, layout)

    def attention(self, index: int, numbers: list[int], dtype: str) -> Call:
        own, *where, mask, causal, grouped = self._attentions[index]
        n, heads, shared, queries, keys, depth, values = (numbers[i] for i in where)
        q, k, v = (_dense(n, *of) for of in ((heads, queries, depth), (shared, keys, depth), (shared, keys, values)))
        rows = Mask(numbers[mask[0]], numbers[mask[1]], mask[2]) if mask else None
        return Call(dtype if own == "run" else own, q, k, v, rows, causal, grouped)


def _dense(*shape: int) -> Heads:
    return Heads(shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))))


def _conv_flops(conv: Conv) -> int:
    return int(2 * conv.n * conv.c * conv.k * math.prod(conv.along(conv.r)) * math.prod(conv.out))


def _attention_flops(call: Call) -> int:
    n, heads, queries, depth = call.queries.shape
    _, _, keys, values = call.values.shape
    return int(2 * n * heads * queries * keys * (depth + values))


def _attend(trace: _core.Trace, call: Call, gpu: Gpu, name: str) -> int | None:
    kernel = choose_kernel(call, gpu.sm, (*FUSED, "math"))
    if kernel == "math":
        raise ValueError(
            f"{name}: want attention by one of PyTorch's fused kernels, the only ones that were recorded, got"
            f" {call.dtype} on {gpu.name}, where PyTorch writes out all scores"
        )
    return attend(trace, call, kernel, gpu, name)


def _weights(nodes: list[str], index: int, prefix: str) -> Iterable[Weight]:
    for word in nodes[index].split():
        name, is_child, child = word.partition("=")
        if is_child:
            yield from _weights(nodes, int(child), f"{prefix}{name}.")
        else:
            name, dtype, shape = word.split(":")
            yield Weight(prefix + name, tuple(map(int, shape.split(","))) if shape else (), dtype)


@functools.cache
def recorded() -> tuple[str, ...]:
    """Names of the modules that were recorded."""
    folder = resources.files("vaemem.data") / "modules"
    return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))


@functools.cache
def load(name: str) -> Recorded:
    """A recorded module; ValueError for another."""
    choose("component", name, recorded())
    return Recorded(name, json.loads(shipped("modules", f"{name}.json")))
