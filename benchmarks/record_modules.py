"""Records the components of pipelines for vaemem/data/modules, as vaemem/pipelines/programs.py replays them.

    python benchmarks/record_modules.py [NAME ...]                              # without names: all
    COMFYUI=path python benchmarks/record_modules.py comfyui/sdxl-unet ...      # of benchmarks/comfyui_modules.py

Each module runs under fake tensors at several sizes. Its calls must be the same at all of them, submodule by submodule
and event by event, but for the sizes; each size is then fitted as a polynomial with the fewest terms that is exact at
all of them, and checked at sizes that the fit has not seen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_code import version as comfyui_version
from modules import MODULES, Module, make
from torch.utils.flop_counter import flop_registry

from vaemem._common import grouped
from vaemem.pipelines.programs import Recorded
from vaemem.prediction.eager import AttentionCall
from vaemem.prediction.gpus import find_gpu
from vaemem.pytorch.recorder import Recorder, Recording
from vaemem.pytorch.recording import record_by

OUT = Path(__file__).parent.parent / "vaemem" / "data" / "modules"
FOLDER = "comfyui/"
MOST_TERMS = 3
# Operators whose temporary memory may be ignored. `any` of a whole tensor takes 1 KiB and frees it at once.
# comfy-kitchen's kernel for CUDA allocates nothing but its outputs.
NEGLIGIBLE = {"aten.any.default", "comfy_kitchen.apply_rope.default"}

# ---- what happens, as a tree of module calls ----


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
        if uneven or set(dilation) != {1} or groups > 1 or output_padding or mixes:
            raise ValueError(f"{name}: expected a plain convolution with a square filter, of one frame if it has depth")
        self._add("conv", dtype, layout, n, c, h, w, k, r[-1], stride[-1], padding[-1], *depth)

    def attention(self, call: AttentionCall) -> int:
        self.taken += 1
        q, k, v = call[1:4]
        if not all(x.strides[-1] == 1 or x.shape[-1] == 1 for x in (q, k, v)):
            raise ValueError("attention: expected the elements of a head side by side")
        mask = (call.mask.elements, call.mask.row) if call.mask else ()
        kind = None if call.mask is None else call.mask.boolean
        by_token = "".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x.strides[1] < x.strides[2])
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        return self._add("attention", call.dtype, kind, call.causal, call.grouped, by_token, *sizes, *mask)


class ScriptRecorder(Recorder):
    """Records a `Script`."""

    def __init__(self, root: str) -> None:
        recording = Recording()
        recording.trace = self.script = Script()
        self._root = root
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

    def attend(self, call: AttentionCall, kernel: str) -> int:
        if kernel not in ("flash", "efficient"):  # of which all that they take is counted
            raise ValueError(f"{self.name()}: expected a fused kernel, got {kernel}")
        return self.script.attention(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count = flop_registry.get(func.overloadpacket)
        products = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)
        if func.overloadpacket in products:
            self.script.flops = count(*args, **(kwargs or {}), out_val=None)
        return super().__torch_dispatch__(func, types, args, kwargs)


def record_at(
    module: Module, sizes: Mapping[str, int], dtype: torch.dtype, recorder: Recorder | None = None
) -> Recording:
    """The module's call, recorded by a `ScriptRecorder` where none is given."""
    built = make(module, dtype)
    with torch.device("meta"):
        args, kwargs = module.call(sizes, dtype)
        args = (*(module.tables(sizes) if module.tables else ()), *args)
    recording = record_by(recorder or ScriptRecorder(type(built).__name__), built, args, kwargs, module.run)
    if unmodelled := recording.unmodelled.keys() - NEGLIGIBLE:
        raise ValueError(f"not modelled: {sorted(unmodelled)}")
    return recording


# ---- sizes as polynomials ----


def evaluate(polynomial: str, values: Mapping[str, int]) -> int:
    """'640 n h w + 5' with these values."""
    terms = [term.split() for term in polynomial.split(" + ")]
    return sum(math.prod([int(factor), *(values[name] for name in names)]) for factor, *names in terms)


class Fit:
    """Finds polynomials for values at several sizes."""

    def __init__(self, monomials: Sequence[str], values: Sequence[Mapping[str, int]]):
        self.monomials = monomials
        self.columns = np.array([[evaluate(f"1 {m}", point) for m in monomials] for point in values], dtype=float)
        self.values = values
        self.sizes: dict[tuple[int, ...], int] = {}
        self.polynomials: list[str] = []

    def index(self, wanted: tuple[int, ...]) -> int:
        """Return the index of the polynomial that has these values."""
        if wanted not in self.sizes:
            self.sizes[wanted] = len(self.polynomials)
            self.polynomials.append(self._polynomial(wanted))
        return self.sizes[wanted]

    def _polynomial(self, wanted: tuple[int, ...]) -> str:
        if len(set(wanted)) == 1:
            return str(wanted[0])
        y = np.array(wanted, dtype=float)
        for terms in range(1, MOST_TERMS + 1):
            for chosen in itertools.combinations(range(len(self.monomials)), terms):
                part = self.columns[:, chosen]
                factors, _, rank, _ = np.linalg.lstsq(part[: terms + 1], y[: terms + 1], rcond=None)
                whole = [round(factor) for factor in factors]
                if rank < terms or 0 in whole or not np.allclose(part @ whole, y, rtol=1e-9):
                    continue
                text = " + ".join(f"{f} {self.monomials[i]}".strip() for f, i in zip(whole, chosen, strict=True))
                if all(evaluate(text, p) == value for p, value in zip(self.values, wanted, strict=True)):
                    return text
        raise ValueError(f"no polynomial of {MOST_TERMS} terms has the values {wanted}")


class Writer:
    """Makes one text of equal calls at several sizes."""

    def __init__(self, fit: Fit, dtype: str):
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
        fixed = {"take": 2, "give": 2, "blas": 2, "conv": 3, "attention": 6}[kind]
        self._same(all(e[:fixed] == events[0][:fixed] for e in events), call, events)
        indices = [self.fit.index(values) for values in zip(*(e[fixed:] for e in events), strict=True)]
        if kind == "take":
            return f"+{indices[0]}" + (f":{events[0][1]}".replace(" ", "_") if events[0][1] else "")
        if kind == "give":
            return f"-{events[0][1]}"
        if kind == "blas":
            return f"{events[0][1]}{indices[0]}"
        own = "run" if events[0][1] == self.dtype else events[0][1]
        if kind == "conv":
            return f"c{_intern(self.convs, [own, *indices, events[0][2]])}"
        _, _, boolean, causal, grouped, by_token = events[0][:6]
        mask = None if boolean is None else [*indices[7:], boolean]
        return f"a{_intern(self.attentions, [own, *indices[:7], mask, causal, grouped, by_token])}"


def _intern(table: list[Any], row: list[Any]) -> int:
    if row not in table:
        table.append(row)
    return table.index(row)


# ---- files ----


def weights(module: Module) -> list[str]:
    """The module's tensors, one text a distinct submodule, as programs.py reads them."""
    dtype, other = module.dtypes[0], module.dtypes[min(1, len(module.dtypes) - 1)]
    built, again = make(module, dtype), make(module, other)
    pairs = zip(built.parameters(), again.parameters(), strict=True)
    kept = {id(one) for one, two in pairs if one.dtype is not dtype and two.dtype is other}
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

    write(built)
    return list(nodes)


def call_of(module: Module, dtype: torch.dtype, values: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    fit = Fit(module.monomials, values)
    writer = Writer(fit, str(dtype).removeprefix("torch."))
    sizes = [{name: point[name] for name in module.points[0]} for point in values]
    writer.write([record_at(module, point, dtype).trace.calls[0] for point in sizes])
    lists = {"convs": writer.convs, "attentions": writer.attentions, "modules": list(writer.modules)}
    return {"sizes": fit.polynomials, **lists}


def case_of(module: Module, values: Mapping[str, int]) -> str:
    """Return the equations that hold. Add the negation of each false one if no other has its left side."""
    held = [case for case in module.cases if len({evaluate(side, values) for side in case.split(" = ")}) == 1]
    known = {case.split(" = ")[0] for case in held}
    others = [case.replace(" = ", " != ") for case in module.cases if case.split(" = ")[0] not in known]
    return "".join(f"; {case}" for case in (*held, *others))


def find_module(name: str) -> Module:
    """Return a module by its name; ComfyUI's are after its folder's name."""
    if not name.startswith(FOLDER):
        return MODULES[name]
    from comfyui_modules import COMFYUI_MODULES

    return COMFYUI_MODULES[name.removeprefix(FOLDER)]


def record(name: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Record a module: return the contents of its file in data/modules."""
    module, is_comfyui = find_module(name), name.startswith(FOLDER)
    packages = ("torch",) if is_comfyui else ("diffusers", "transformers", "torch")
    sources = [comfyui_version()] if is_comfyui else []
    data: dict[str, Any] = {
        "about": module.about, "source": ", ".join([*sources, *(f"{one} {version(one)}" for one in packages)]),
        "variables": list(module.points[0]), "derived": module.derived,
        "weights": weights(module), "calls": {},
    }  # fmt: skip
    points = [{**sizes} for sizes in module.points]
    for point, (key, (of, by, to)) in itertools.product(points, module.derived.items()):
        point[key] = to * -(-evaluate(of, point) // by)
    cases = grouped(points, lambda values: case_of(module, values))
    for (case, values), dtype in itertools.product(cases.items(), module.dtypes):
        key, call = str(dtype).removeprefix("torch."), call_of(module, dtype, values)
        same = next((other for other, found in data["calls"].items() if found == call and other.endswith(case)), "")
        data["calls"].pop(same, None)
        data["calls"][f"{same.removesuffix(case)} {key}".strip() + case] = call
        say(f"{name} {key}{case}: {len(call['sizes'])} sizes, {len(call['modules'])} distinct calls")
    check(name, data)
    return data


def settle(steps: Sequence[Any]) -> list[Any]:
    """Return a trace's steps without names, with frees that follow each other in the order of their numbers."""
    groups = itertools.groupby((step[:3] for step in steps), lambda step: step[0] == "give")
    return [step for are_gives, group in groups for step in (sorted(group) if are_gives else group)]


def check(name: str, data: Mapping[str, Any]) -> None:
    """The replay takes the same steps as a recording at sizes that were not used for the fit."""
    gpu, module = find_gpu("RTX 4090"), find_module(name)
    for dtype, sizes in itertools.product(module.dtypes, module.checks):
        replayed = Recorded(name, data).trace(str(dtype).removeprefix("torch."), gpu, **sizes).steps
        steps = record_at(module, sizes, dtype, Recorder(Recording(), gpu)).trace.steps
        if settle(replayed) != settle(steps):
            raise ValueError(f"{name}: takes other steps than the fit says at {sizes} in {dtype}")


def layout(value: Any, indent: str = "") -> str:
    """JSON with a line for each text or row of a list."""
    inner = indent + " "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {layout(each, inner)}" for key, each in value.items()]
    elif isinstance(value, list) and len(json.dumps(value)) > 100:
        rows = [json.dumps(each) for each in value]
    else:
        return json.dumps(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(inner + row for row in rows) + "\n" + indent + end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks/modules.py; all by default")
    for name in parser.parse_args().names or MODULES:
        (OUT / f"{name}.json").write_text(layout(record(name)) + "\n", "utf-8")


if __name__ == "__main__":
    main()
