"""Records the components of pipelines for vaemem/data/modules, as vaemem/pipelines/recorded_modules.py replays them.

    python benchmarks/recording/record_modules.py [NAME ...]      # without names: all

Each module runs under fake tensors at several sizes. Submodules and events must be the same at each size; only their
bytes may differ. A polynomial with as few terms as possible gives an event's bytes exactly at all of these sizes. Other
sizes, which the fit has not seen, check the polynomial.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from modules import MODULES, Module, make

from vaemem._common import grouped
from vaemem.pipelines.recorded_modules import Recorded
from vaemem.prediction.gpus import find_gpu
from vaemem.pytorch.fitting import PolynomialFit, evaluate
from vaemem.pytorch.module_writer import ScriptRecorder, Writer, settle, versions_of, weights_text
from vaemem.pytorch.recorder import NEGLIGIBLE, Recorder, Recording
from vaemem.pytorch.recording import record_by

OUT = Path(__file__).parents[2] / "vaemem" / "data" / "modules"


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


# ---- files ----


def weights(module: Module) -> list[str]:
    """The module's tensors, one text a distinct submodule, as recorded_modules.py reads them."""
    dtype, other = module.dtypes[0], module.dtypes[min(1, len(module.dtypes) - 1)]
    built, again = make(module, dtype), make(module, other)
    pairs = zip(built.parameters(), again.parameters(), strict=True)
    kept = {id(one) for one, two in pairs if one.dtype is not dtype and two.dtype is other}
    return weights_text(built, dtype, kept)


def call_of(module: Module, dtype: torch.dtype, values: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    fit = PolynomialFit(module.monomials, values)
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


def record(name: str, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Record a module: return the contents of its file in data/modules."""
    module, packages = MODULES[name], ("diffusers", "transformers", "torch")
    data: dict[str, Any] = {
        "about": module.about, "source": versions_of(packages),
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


def check(name: str, data: Mapping[str, Any]) -> None:
    """The replay takes the same steps as a recording at sizes that were not used for the fit."""
    gpu, module = find_gpu("RTX 4090"), MODULES[name]
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
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks/recording/modules.py; all by default")
    for name in parser.parse_args().names or MODULES:
        (OUT / f"{name}.json").write_text(layout(record(name)) + "\n", "utf-8")


if __name__ == "__main__":
    main()
