"""Answers of predictions, frozen as JSON: what a rewrite still has to say, to the byte.

    python tests/frozen.py write FILE [--count 3000] [--seed 0] [--jobs 2]
    python tests/frozen.py check FILE [--jobs 2]
    python tests/frozen.py renew FILE [--jobs 2]

A line of FILE is a question and its answer. `check` asks the file's questions again, the last one first, so that an
answer that depends on those before it shows. It counts three kinds of differences apart: names of tensors, timelines,
and the rest, which are numbers and verdicts (`kind_of`). `renew` puts the new answers into the file. No cuDNN, driver
or GPU is found, and no torch: the answers are the same on every machine.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import warnings
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from frozen_questions import questions

import vaemem

# ---- answers ----


def read(thing, names):
    return {name: getattr(thing, name) for name in names.split()}


def refusal(error):
    """What a refusal is about. Its words may change."""
    kinds = (ValueError, MemoryError, TypeError, OverflowError, RuntimeError)
    kind = next(one for one in (*kinds, type(error)) if isinstance(error, one))
    return f"{kind.__name__}: {str(error).partition(':')[0] if kind is ValueError else ''}"


def verdict(p):
    return read(p, "verdict fits coarse") | {"why": p.judged.why}


def digest(moments):
    """How many moments a timeline has, and sums of their numbers and of their names."""
    parts = [one[1:] for one in moments], [one[0] for one in moments]
    return [len(moments), *(zlib.crc32(repr(part).encode()) for part in parts)]


def of_predict(call, workspace=None, **asked):
    constant = SimpleNamespace(conv=lambda *question: (workspace, "a constant"))
    p = vaemem.predict(**asked, workspace=None if workspace is None else constant)
    said = {"verdict": verdict(p)}  # first, as it asks for less than `upper`
    if call == "closed_form":
        numbers = re.findall(r"\d[\d.]*", p.formula.partition("\n\n")[0].partition(";")[0].rpartition("bytes")[2])
        return said | {"formula": [float(one) for one in numbers if float(one)]}
    if call == "would_fit":  # without what our own engine takes on this CPU
        return said | {"would_fit": [one.command for one in p.would_fit if "vaemem on the CPU" not in one.what]}
    if p.verdict == "fits":  # else `to_dict` tries what would fit, which takes long
        said["parts"] = p.to_dict()["parts_bytes"]
    return said | {
        "readings": read(p, "allocated reserved peak_allocated peak_reserved on_card out_of_memory_at weights_bytes"),
        **read(p, "least_band band upper upper_share"), "least": p.least_reserved,
        "room": read(p, "available spare total_memory used"),
        "asked": read(p, "model op batch dtype weights_dtype runtime tile tile_overlap protocol gpu"),
        "software": read(p, "torch_version cudnn_version allocator"),
        "peak_tensors": [len(p.peak_tensors), *p.peak_tensors[:5]], "timeline": digest(p.timeline),
        "seconds": p.seconds and read(p.seconds, "low likely high"),
    }  # fmt: skip


def of_predict_largest(call, **asked):
    return {"readings": vaemem.predict_largest(**asked)}


def of_predict_pipeline(call, **asked):
    p = vaemem.predict_pipeline(**asked)
    counts = "allocated reserved weights workspace activations outside flops sent fits host_flops attended moved where"
    phases = {one.name: [*read(one, counts).values(), *one.peak_tensors[:3]] for one in p.phases}
    return {
        "verdict": verdict(p),
        "readings": read(p, "peak bottleneck on_card out_of_memory_at host") | phases,
        "room": read(p, "available spare"), **read(p, "least_band band upper"),
        "timeline": digest(getattr(p, "timeline", ())),
        "seconds": {row["phase"]: [row[name] for name in row if name.startswith("seconds")] for row in p.rows()},
    }  # fmt: skip


def of_plan_pipeline(call, **asked):
    plan = vaemem.plan_pipeline(**asked)
    ways, best = {one.way.name: one for one in plan.outcomes}, plan.recommended
    readings = {
        name: [*read(one, "verdict fails_in short").values(), one.way.host]
        + [[phase.name, phase.total, phase.weights, phase.fits] for phase in one.way.phases]
        for name, one in ways.items()
    }
    seconds = {name: one.seconds and [*read(one.seconds, "low likely high").values()] for name, one in ways.items()}
    return {
        "verdict": best and best.way.name,
        "readings": readings,
        "room": plan.room,
        "seconds": seconds,
    }


def of_process(call, steps, settings, conf="", **asked):
    """Plays steps, each [what its result is called, method, arguments, options]; "$x" stands for what x is. A step that
    fails says so, and the next one follows. The counters are read after each."""
    allocator = vaemem.CachingAllocator.from_conf(conf, **settings)
    process, found, after = vaemem.SimulatedProcess(allocator=allocator, **asked), {}, []

    def meant(argument):
        if isinstance(argument, list):
            return [meant(one) for one in argument]
        return found[argument[1:]] if isinstance(argument, str) and argument.startswith("$") else argument

    for name, method, arguments, options in steps:
        said = []
        try:
            found[name] = getattr(process, method)(*meant(arguments), **options)
        except Exception as error:
            said = [refusal(error)]
        after.append([*read(process, "allocated reserved peak_allocated peak_reserved").values(), *said])
    above, tensors = process.peak_above_baseline(), process.peak_tensors()
    kept = settings["history"] and "cudaMallocAsync" not in conf
    return {
        "readings": after, "room": read(process, "available most_reserved guessed_plans"),
        "peak_tensors": [len(tensors), *tensors[:5]], "above": above and [above[0], sorted(above[1].items())[:5]],
        "timeline": digest(process.timeline()), **read(process, "torch_version"),
        "snapshot": kept and zlib.crc32(json.dumps(allocator.snapshot(process.frames)).encode()),
    }  # fmt: skip


def answer(question):
    """What the public function says to a question. An exception is an answer too."""
    found = globals().get(f"of_{question['call']}", of_predict)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            said = found(**question)
        except Exception as error:
            said = {"refusal": refusal(error)}
    return plain(said | ({"warnings": len(warned)} if warned else {}))


def plain(value):
    """As JSON has it. Floats keep six digits, but whole ones all."""
    if isinstance(value, float):
        return "nan" if value != value else int(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


# ---- files ----


def alone():
    """Hides what a machine may have: a file that is named and missing is not looked for elsewhere."""
    os.environ.update(VAEMEM_CUDNN="/no/libcudnn.so.9", VAEMEM_LIBCUDA="/no/libcuda.so.1", CUDA_VISIBLE_DEVICES="")
    sys.modules.update(dict.fromkeys(("torch", "diffusers", "transformers")))  # None: cannot be imported


def answers(asked, jobs):
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=alone) as pool:
        yield from pool.map(answer, asked, chunksize=8)


def load(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def write(path, asked, jobs):
    """Writes a line for each question, and says how many there are of each call."""
    lines, counts = [], Counter()
    for question, said in zip(asked, answers(asked, jobs), strict=True):
        counts[f"{question['call']}{', refused' * ('refusal' in said)}"] += 1
        line = {"question": question, "answer": said}
        lines.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
    Path(path).write_text("".join(lines), "utf-8")
    print(f"{len(lines)} answers:", "; ".join(f"{call}: {count}" for call, count in sorted(counts.items())))


def differences(then, now, key=""):
    """(key, then, now) of each value that differs."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in {**then, **now}:
            yield from differences(then.get(name, "no such key"), now.get(name, "no such key"), f"{key}.{name}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (old, new) in enumerate(zip(then, now, strict=True)):
            yield from differences(old, new, f"{key}[{i}]")
    elif json.dumps(then) != json.dumps(now):  # True is not 1 here
        yield key.lstrip("."), then, now


def kind_of(key, then, now):
    """A timeline is frozen as its length, a sum of its numbers and a sum of its names. Elsewhere a name is a text."""
    if key.startswith("timeline"):
        return "names" if key.endswith("[2]") else "timelines"
    has_name = {type(then), type(now)} == {str} or key.startswith("readings.out_of_memory_at")
    return "names" if has_name and not key.startswith(("verdict", "refusal", "asked", "software")) else "numbers"


def check(path, jobs):
    """Prints what differs; whether anything does."""
    lines, different, kinds = load(path)[::-1], 0, Counter()
    for line, now in zip(lines, answers([line["question"] for line in lines], jobs), strict=True):
        found = [*differences(line["answer"], now)]
        different += bool(found)
        kinds.update({kind_of(*one) for one in found})
        for key, *both in found:
            print(json.dumps(line["question"]), key, "then {}, now {}".format(*map(json.dumps, both)), sep="\n  ")
    apart = "; ".join(f"in {kind}: {count}" for kind, count in sorted(kinds.items()))
    print(f"{different} of {len(lines)} answers differ", apart, sep=", " if apart else "")
    return different > 0


def main():
    parser = argparse.ArgumentParser(description="Freezes answers of predictions, and compares them.")
    parser.add_argument("verb", choices=("write", "check", "renew"))
    parser.add_argument("file")
    for name, usual in (("count", 3000), ("seed", 0), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    verb, path, *given, jobs = vars(parser.parse_args()).values()
    if verb == "check":
        return check(path, jobs)
    write(path, questions(*given) if verb == "write" else [line["question"] for line in load(path)], jobs)


if __name__ == "__main__":
    sys.exit(main())
