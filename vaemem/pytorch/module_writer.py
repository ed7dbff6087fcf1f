"""Write a module's call as text for vaemem/pipelines/recorded_modules.py: a tree of calls, and sizes as polynomials."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, cast

import torch
from torch.utils.flop_counter import flop_registry

from vaemem._common import setting
from vaemem.prediction.gpus import find_gpu
from vaemem.pytorch.contents import ContentsRecorder
from vaemem.pytorch.eager import AttentionCall
from vaemem.pytorch.equal_layers import is_plain
from vaemem.pytorch.fitting import PolynomialFit
from vaemem.pytorch.recorder import Recording, leaves_of, map_leaves

# An event's words that are the same everywhere.
_FIXED = {"take": 2, "give": 2, "blas": 2, "conv": 3, "convolution": 5, "attention": 6}


class ModuleCall(list[Any]):
    """Events in order: tuples, and calls of submodules with their names."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name


class Script:
    """Takes a recording's events in place of `vaemem._core.Trace`."""

    def __init__(self) -> None:
        self.calls = [ModuleCall("")]
        self.taken = 0
        self.flops = 0  # of the operator that runs

    def _add(self, *event: Any) -> int:
        self.calls[-1].append(event)
        return self.taken

    def take(self, size: int, name: str) -> int:
        self.taken += 1
        return self._add("take", name.partition(" [")[2].rstrip("]"), size)

    def give(self, number: int) -> None:
        self._add("give", self.taken - number + 1)

    def blas(self, name: str, lt: bool = False) -> None:
        self._add("blas", "l" if lt else "b", self.flops)

    def conv(self, question: tuple[Any, ...], name: str) -> None:
        dtype, n, c, h, w, k, r, stride, padding, layout, dilation, groups, output_padding, *depth = question
        uneven = any(len({*extent[-2:]}) > 1 for extent in (r, stride, padding))
        mixes = bool(depth) and (r[0], stride[0], padding[0]) != (1, 1, 0)
        if not (uneven or set(dilation) != {1} or groups > 1 or output_padding is not None or mixes):
            self._add("conv", dtype, layout, n, c, h, w, k, r[-1], stride[-1], padding[-1], *depth)
            return
        none = (1,) * (not depth)  # the extent of a depth that is not there
        extents = [(*none, *(depth or ()), h, w), *((*none, *extent) for extent in (r, stride))]
        extents += [((0,) * (not depth) + tuple(padding)), (*none, *dilation)]
        extents += [(0,) * (not depth) + tuple(output_padding or (0,) * len(r))]
        is_deep, is_transposed = int(bool(depth)), int(output_padding is not None)
        self._add("convolution", dtype, layout, is_deep, is_transposed, n, c, k, groups, *itertools.chain(*extents))

    def attention(self, call: AttentionCall) -> int:
        self.taken += 1
        dtype, *heads, mask, causal, grouped = call
        if not all(strides[-1] == 1 or shape[-1] == 1 for shape, strides in heads):
            raise ValueError("attention: expected the elements of a head side by side")
        kind = None if mask is None else mask[2]
        by_token = "".join(name for name, (_, strides) in zip("qkv", heads, strict=True) if strides[1] < strides[2])
        q, k, v = (shape for shape, _ in heads)
        sizes = q[0], q[1], k[1], q[2], k[2], q[3], v[3]
        return self._add("attention", dtype, kind, causal, grouped, by_token, *sizes, *(mask or ())[:2])


@dataclass(frozen=True)
class _Place:
    """A tensor in a storage that a layer allocates. number: the storage's, counted from the layer's first one"""

    number: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def tensor_in(self, storages: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return a tensor there. storages: tensors of bytes"""
        return storages[self.number].view(self.dtype).as_strided(self.shape, self.strides, self.offset)


def _place_of(x: torch.Tensor, numbers: Mapping[int, int]) -> _Place:
    storage = x.untyped_storage()
    return _Place(numbers[storage._cdata], storage.nbytes(), x.dtype, x.shape, x.stride(), int(x.storage_offset()))


class _Layer(NamedTuple):
    """A layer's call.

    taken: how many storages it allocates
    left: numbers of the storages that live when it returns
    output: the returned object, with a `_Place` instead of each tensor
    dead: numbers, in the script, of storages that live when it returns and are not returned. If one lives when the next
        layer is called, the layer keeps memory, and the call is not repeated
    """

    events: ModuleCall
    taken: int
    left: Sequence[int]
    output: Any
    dead: Set[int]


class ScriptRecorder(ContentsRecorder):
    """Records a `Script`."""

    def __init__(self, root: str) -> None:
        recording = Recording()
        self.script = Script()
        recording.trace = cast(Any, self.script)
        self._root, self._layers = root, dict[Any, _Layer]()
        super().__init__(recording, find_gpu("RTX 4090"))

    def enter(self, name: str) -> None:
        self.sweep()  # so that frees before the call come before weights that are sent for it
        outer = self.path[-1] if self.path else ""
        super().enter(name)
        own = outer in ("", self._root) or name.startswith(f"{outer}.")
        short = name.removeprefix(f"{outer}.") if own else f"/{name}"
        call = ModuleCall("" if name == self._root else short)
        self.script.calls[-1].append(call)
        self.script.calls.append(call)

    def leave(self) -> None:
        super().leave()
        self.script.calls.pop()

    def repeat(self, key: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a layer; or do what an equal call of another one did."""
        if self.script.calls[-1]:
            return run(*args, **kwargs)  # not through a module's call of its own
        before = {number for _, number in self._alive.values()}
        known = self._layers.get(key)
        if known and not before & known.dead:
            return self._write_again(known)
        begin = self.script.taken
        out = run(*args, **kwargs)
        left = {number: address for address, (_, number) in self._alive.items()}
        own = {address: number - begin for number, address in left.items() if number > begin}
        made = [x for x in leaves_of(out) if isinstance(x, torch.Tensor)]
        is_own = all(x.untyped_storage()._cdata in own and self.contents(x) is None for x in made)
        if key not in self._layers and is_plain(out) and is_own and before <= {*left}:
            output = map_leaves(lambda x: _place_of(x, own) if isinstance(x, torch.Tensor) else x, out)
            outputs = {one.number for one in leaves_of(output) if isinstance(one, _Place)}
            dead = {begin + number for number in own.values() if number not in outputs}
            call, count = self.script.calls[-1], self.script.taken - begin
            self._layers[key] = _Layer(call, count, sorted(own.values()), output, dead)
        return out

    def _write_again(self, layer: _Layer) -> Any:
        """Write what a layer did; return outputs like its own. Its other storages die here."""
        begin, made = self.script.taken, dict[int, torch.Tensor]()
        self.script.calls[-1].extend(layer.events)
        self.script.taken += layer.taken
        sizes = {one.number: one.size for one in leaves_of(layer.output) if isinstance(one, _Place)}
        with setting(self, _silent=True):
            for number in layer.left:
                whole = torch.empty(sizes.get(number, 1), dtype=torch.uint8, device="cuda")
                self.bind(whole, begin + number)
                if number in sizes:
                    made[number] = whole
            return map_leaves(lambda x: x.tensor_in(made) if isinstance(x, _Place) else x, layer.output)

    def attend(self, call: AttentionCall, kernel: str) -> int:
        if kernel not in ("flash", "efficient"):  # all memory of these two is counted
            raise ValueError(f"{self.name()}: expected a fused kernel, got {kernel}")
        return self.script.attention(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count = flop_registry.get(func.overloadpacket, int)
        products = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)
        if func.overloadpacket in products:
            self.script.flops = count(*args, **(kwargs or {}), out_val=None)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Writer:
    """Makes one text of equal calls at several sizes."""

    def __init__(self, fit: PolynomialFit, dtype: str):
        self.fit, self.dtype = fit, dtype
        self.modules: dict[str, int] = {}
        self.convs: list[Any] = []
        self.attentions: list[Any] = []

    def write(self, calls: Sequence[ModuleCall]) -> int:
        """The index of what these calls, of one module at several sizes, do."""
        lengths = {len(call) for call in calls}
        if len(lengths) > 1:
            raise ValueError(f"{calls[0].name}: takes other steps at other sizes ({sorted(lengths)})")
        words = []
        for events in zip(*calls, strict=True):
            if isinstance(events[0], ModuleCall):
                same = all(isinstance(e, ModuleCall) and e.name == events[0].name for e in events)
                self._same(same, calls[0], events)
                words.append(f"{events[0].name}={self.write(events)}")
            else:
                words.append(self._word(calls[0], events))
        return self.modules.setdefault(" ".join(words), len(self.modules))

    def _same(self, same: bool, call: ModuleCall, events: Sequence[Any]) -> None:
        if not same:
            raise ValueError(f"{call.name}: takes other steps at other sizes: {[str(e)[:80] for e in events]}")

    def _word(self, call: ModuleCall, events: Sequence[tuple[Any, ...]]) -> str:
        kind, *_ = events[0]
        fixed = _FIXED[kind]
        self._same(all(e[:fixed] == events[0][:fixed] for e in events), call, events)
        indices = [self.fit.index(values) for values in zip(*(e[fixed:] for e in events), strict=True)]
        if kind == "take":
            return f"+{indices[0]}" + (f":{events[0][1]}".replace(" ", "_") if events[0][1] else "")
        if kind == "give":
            return f"-{events[0][1]}"
        if kind == "blas":
            return f"{events[0][1]}{indices[0]}"
        own = "run" if events[0][1] == self.dtype else events[0][1]
        if kind in ("conv", "convolution"):  # the layout is last
            return f"c{_intern(self.convs, [own, *indices, *events[0][3:fixed], events[0][2]])}"
        _, _, boolean, causal, grouped, by_token = events[0][:6]
        mask = None if boolean is None else [*indices[7:], boolean]
        return f"a{_intern(self.attentions, [own, *indices[:7], mask, causal, grouped, by_token])}"


def _intern(table: list[Any], row: list[Any]) -> int:
    if row not in table:
        table.append(row)
    return table.index(row)


def weights_text(module: torch.nn.Module, dtype: torch.dtype, kept: Container[int] = ()) -> list[str]:
    """Return a module's tensors, one text a distinct submodule, as recorded_modules.py reads them.

    dtype: the module's own; its tensors of another one have it in any case
    kept: ids of parameters that are float32 in float16 only
    """
    nodes: dict[str, int] = {}
    seen: set[int] = set()

    def write(part: torch.nn.Module) -> int:
        words = [f"{name}={write(child)}" for name, child in part.named_children()]
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    is_single = held is part._parameters and tensor.dtype is torch.float32
                    own = "single" if is_single else str(tensor.dtype).removeprefix("torch.")
                    own = "kept" if id(tensor) in kept else own
                    kind = "run" if tensor.dtype is dtype else own
                    words.append(f"{name}:{kind}:{','.join(map(str, tensor.shape))}")
        return nodes.setdefault(" ".join(words), len(nodes))

    write(module)
    return list(nodes)


def structure_of(call: ModuleCall) -> Any:
    """Return what has to be the same at every size."""
    return call.name, *(structure_of(one) if isinstance(one, ModuleCall) else one[: _FIXED[one[0]]] for one in call)


def settle(steps: Sequence[Any]) -> list[Any]:
    """Return a trace's steps without names, with frees that follow each other in the order of their numbers."""
    groups = itertools.groupby((step[:3] for step in steps), lambda step: step[0] == "give")
    return [step for are_gives, group in groups for step in (sorted(group) if are_gives else group)]


def versions_of(packages: Sequence[str] = ("diffusers", "transformers", "torch")) -> str:
    """Name the releases of packages that a recording ran."""
    return ", ".join(f"{one} {version(one)}" for one in packages)
