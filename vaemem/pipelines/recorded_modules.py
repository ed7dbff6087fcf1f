"""Modules recorded once with PyTorch, and replayed at any size without it.

benchmarks/recording/record_modules.py runs a module under fake tensors at several sizes (`vaemem.pytorch.record`). It
writes what it takes and gives back as a tree of module calls, equal calls once, with every size as a polynomial in the
call's variables. Convolutions and attentions stay questions: their workspaces, and which kernel runs, are decided at
replay.

A file of data/modules holds, for dtypes and the cases in which a call takes the same steps (``"float16; 1 n = 1"``):
`sizes`, the polynomials (``"1280 n h w + 640"``); `convs` and `attentions`, their arguments as indices into `sizes`;
a convolution of each frame has the number of frames as one more;
an attention's last one says which of queries, keys and values lie token by token in memory, all heads of one before the
next (``"qkv"``); and `modules`, one text a distinct module call, the outermost last, of words:

    +3:statistics   take sizes[3] bytes, under the module's name and [statistics]
    -5              give back what was taken five takes ago
    c2  a0          a convolution; an attention, whose output counts as a take
    b7  l7          a product by cuBLAS, by cuBLASLt, of sizes[7] FLOPs
    conv1=12        the submodule conv1 is called, which does what modules[12] says; =12 the module itself, and
                    /conv1=12 one that belongs to another module, by its whole name

`weights` are written in the same way: ``weight:run:320,4,3,3`` a tensor with dtype and shape ("run" is the module's
own dtype, "kept" the same, except float32 if it is float16, "single" a parameter in float32 in any case), ``conv1=12``
a submodule.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import ELEMENT_BYTES, choose, distinct, shipped
from vaemem._errors import ArgumentError, inside
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.offloaded_weights import Passing
from vaemem.prediction.recording_files import find_component, is_recorded_component

ANY_GPU = "H100 PCIe"  # FLOPs are the same on all
# Up to this release of diffusers, these modules have another recording, with diffusers 0.33.0 and transformers 4.57.6.
_OLDER, LAST_OLDER = "older/", 34
_WITH_OLDER = (
    "clip-l", "clip-l-flux", "clip-l-sdxl", "flux-schnell-transformer", "flux-transformer", "openclip-g", "t5-xxl",
)  # fmt: skip
DTYPE_BYTES = {**ELEMENT_BYTES, "int64": 8, "bool": 1}
_OF_WEIGHTS = {*DTYPE_BYTES, "run", "kept", "single"}


class Weight(NamedTuple):
    """A parameter or buffer. dtype: its own; "run" if it has the module's; "kept" if transformers keeps it in float32
    in a module of float16; or "single" if it is a parameter that diffusers keeps in float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "run"

    @property
    def module(self) -> str:
        """The submodule it belongs to; "" for the outermost."""
        return self.name.rpartition(".")[0]

    def type_in(self, dtype: str) -> str:
        """Return its type if the module is loaded in `dtype`."""
        kept = "float32" if dtype == "float16" else dtype
        return {"run": dtype, "kept": kept, "single": "float32"}.get(self.dtype, self.dtype)

    def nbytes(self, dtype: str) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.type_in(dtype)]


class Recorded:
    """A module's file: what its call takes, by the dtypes in which it was recorded and the variables that sizes follow
    from, and its weights in the order in which ``Module.to`` moves them."""

    def __init__(self, name: str, data: Mapping[str, Any]):
        self.name, self.about, self.source = name, str(data["about"]), str(data["source"])
        self.variables = tuple(data["variables"])
        self.dtypes = tuple(distinct(dtype for key in data["calls"] for dtype in key.split(";")[0].split()))
        self.weights = tuple(_weights(data["weights"], len(data["weights"]) - 1, ""))
        self._program = _core.Program("\n".join(_lines(name, data)))

    def trace(
        self, dtype: str, gpu: Gpu, passing: Iterable[Passing] = (),
        companions: Sequence[tuple[str, int, int, int]] = (), cudnn: int = 0, **sizes: int,
    ) -> _core.Trace:  # fmt: skip
        """Trace a call's memory on a GPU, with a value for each of `variables`. ValueError if it was not recorded.

        passing: tensors that are there only during some submodules' calls; those of one module in their order
        companions: (layer, rank, rows, columns of its weight) of the layers' low-rank pairs
        cudnn: as `cudnn_attention` gives it
        """
        if set(sizes) != set(self.variables):
            raise ArgumentError(self.name, ", ".join(self.variables), ", ".join(sizes))
        choose("dtype", dtype, self.dtypes)
        through = sorted(passing, key=operator.attrgetter("module"))
        given = tuple(sizes[name] for name in self.variables)
        return self._program.trace(dtype, given, gpu.sm, gpu.multiprocessors, cudnn, through, companions)


def _lines(name: str, data: Mapping[str, Any]) -> Iterator[str]:
    """A file as csrc/predict/modules/program.h reads it."""
    yield f"name {name}"
    yield f"variables {' '.join(data['variables'])}"
    for key, (of, by, to) in data["derived"].items():
        yield f"derived {key} {by} {to} {of}"
    for key, call in data["calls"].items():
        yield f"call {key}"
        yield from (f"size {size}" for size in call["sizes"])
        for *asked, layout in call["convs"]:
            kind = {9: "conv", 10: "conv3"}.get(len(asked), "convolution")
            sizes, flags = (asked[:-2], asked[-2:]) if kind == "convolution" else (asked, [])
            yield " ".join(map(str, [kind, *sizes, int(layout == "nhwc"), *flags]))
        for *asked, mask, causal, grouped, by_token in call["attentions"]:
            elements, row, boolean = mask or (0, 0, False)
            flags = map(int, (causal, grouped, bool(mask), boolean, *(name in by_token for name in "qkv")))
            yield " ".join(map(str, ["attention", *asked, elements, row, *flags]))
        yield from (f"module {module}" for module in call["modules"])


def _weights(nodes: list[str], index: int, prefix: str) -> Iterable[Weight]:
    for word in nodes[index].split():
        name, is_child, child = word.partition("=")
        if is_child:
            yield from _weights(nodes, int(child), f"{prefix}{name}.")
        else:
            name, dtype, shape = word.split(":")
            if dtype not in _OF_WEIGHTS:
                raise ArgumentError(prefix + name, f"a dtype, one of {', '.join(sorted(_OF_WEIGHTS))}", repr(dtype))
            yield Weight(prefix + name, tuple(map(int, shape.split(","))) if shape else (), dtype)


@functools.cache
def recorded(folder: str = "") -> tuple[str, ...]:
    """List the names of the recorded modules, or of those in a folder: ``"older"``."""
    files = resources.files("vaemem.data").joinpath("modules", *filter(None, [folder])).iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


@functools.cache
def load_program(name: str) -> Recorded:
    """Return a recorded module; ValueError for another. ``"older/..."`` is one of `older`."""
    if is_recorded_component(name):
        data, role = find_component(name)
        with inside("pipeline", path=name.rpartition(":")[0], caught=(ValueError, TypeError)):
            return Recorded(role, data["modules"][role])
    folder, _, component = name.rpartition("/")
    choose("component", component, recorded(folder))
    return Recorded(component, json.loads(shipped("modules", f"{name}.json")))


def older(name: str, release: int) -> str:
    """Return the name of a module's recording for a release of diffusers, 34 for 0.34."""
    return f"{_OLDER}{name}" if release <= LAST_OLDER and name in _WITH_OLDER else name
