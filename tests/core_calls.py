"""Writes the calls that predictions make of the C core as text, with what each returns: tests/answers_32bit.c makes the
same calls without Python.

    python tests/core_calls.py CALLS RETURNS [--count 300]

It asks frozen questions about VAEs, processes and pipelines. Those in frozen_answers.jsonl come first, and have to get
the frozen answers. Each line of CALLS is a call, and the same line of RETURNS is what it returns. An answer is
made of these: if a program gets the same from each, the answer holds there too. answers_32bit.c describes the lines.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import frozen
import numpy as np
from frozen_questions import questions

from vaemem import _core
from vaemem.prediction.verdict import Verdict

CALLS = ("predict", "process", "predict_pipeline")
WORD = 1 << 64
DTYPES = ("float32", "float16", "bfloat16")


class Log:
    """The two files, and the numbers of what was made so far."""

    def __init__(self, calls: str, returns: str):
        self._files = [open(path, "w", encoding="utf-8") for path in (calls, returns)]
        self._made: dict[str, dict[int, int]] = {}  # numbers by kind and id
        self._kept: list[Any] = []  # so that no id comes twice
        self.traces: dict[int, tuple[Any, ...]] = {}  # how each was made
        self.verdicts: list[Verdict] = []  # of this question

    def line(self, fields: Iterable[Any], returned: str = "") -> None:
        name, *others = map(str, fields)
        for file, text in zip(self._files, ("\t".join((name, *others)), f"{name}:{returned}"), strict=True):
            file.write(text + "\n")

    def add(self, kind: str, thing: Any) -> None:
        made = self._made.setdefault(kind, {})
        made[id(thing)] = len(made)
        self._kept.append(thing)

    def number(self, kind: str, thing: Any) -> int:
        found = self._made[kind].get(id(thing))
        return stop(f"expected a {kind} of this question, got {thing!r}") if found is None else found

    def begin(self, question: Any) -> None:
        self._made |= {"trace": {}, "script": {}, "play": {}, "row": {}}
        self.verdicts.clear()
        self.line(["question", question["call"]], question["call"])

    def trace(self, trace: Any) -> int:
        """The number of a trace, which is described when a question first needs it."""
        if id(trace) not in self._made["trace"]:
            counts = len(trace.convs), trace.flops, trace.attended, trace.moved, trace.sent
            self.line(self.traces[id(trace)], listed("trace", counts))
            self.add("trace", trace)
        return self.number("trace", trace)

    def of(self, thing: Any) -> tuple[str, int]:
        """Kind and number of a trace, a script or a workspace."""
        kind = {Script: "script", Workspace: "workspace"}.get(type(thing), "trace")
        return kind, self.trace(thing) if kind == "trace" else self.number(kind, thing)

    def keep_trace(self, trace: Any, *made: Any) -> Any:
        self._kept.append(trace)
        self.traces[id(trace)] = made
        return trace

    def close(self) -> None:
        for file in self._files:
            file.close()


log: Log


def stop(why: str) -> NoReturn:
    """Frozen answers take every other exception for a refusal."""
    raise SystemExit(f"core_calls.py: {why}")


def words(numbers: Iterable[int]) -> str:
    return " ".join(str(int(one) % WORD) for one in numbers)


def listed(what: str, numbers: Iterable[int]) -> str:
    """As answers_32bit.c prints them."""
    return what + "".join(f" {int(one) % WORD}" for one in numbers)


def bare(thing: Any) -> Any:
    """The core's own object."""
    return thing._bare if isinstance(thing, StandIn) else thing


class StandIn:
    """Stands in for an object of the core. Attributes, and methods that change nothing, are read without a line."""

    _bare: Any
    _unwritten = ""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._bare, name)
        if callable(value) and name not in self._unwritten.split():
            stop(f"expected to write calls of {type(self).__name__}.{name} too")
        return value


# ---- workspaces ----


def of_formula(formula: list[Any] | None) -> str:
    if formula is None:
        return ""
    times = dict.fromkeys("iofIOF", 0)
    for often, tensor in re.findall(r"(\d*)([iofIOF])", formula[0]):
        times[tensor] += int(often or 1)
    return words((*times.values(), *formula[1:]))


RULE = {"dtypes", "r", "stride", "pixels", "channels", "formula", "winograd"}
# What a line of a rule leaves out: words for readers, and versions and cards, which `of_card_rule` adds.
TOLD = {"name", "from", "seen", "as", "since", "before", "standing", "capabilities"}


def of_rule(rule: dict[str, Any]) -> str:
    if unknown := set(rule) - RULE - TOLD:
        stop(f"expected a rule of {sorted(RULE)}, got {sorted(unknown)} too")
    dtypes = sum(1 << DTYPES.index(one) for one in rule["dtypes"])
    least, most = rule.get("pixels", (1, (1 << 63) - 1))
    formula = of_formula(rule["formula"]) if "formula" in rule else words([0] * 10)
    channels = itertools.chain(*rule.get("channels", ()))
    asked = words((dtypes, rule.get("r", 0), rule.get("stride", 0), least, most))
    return " ".join(filter(None, (asked, formula, words((rule.get("winograd", False),)), words(channels))))


class Profile(StandIn):
    _unwritten = "conv"

    def __init__(self, strict: bool, otherwise: Profile | None, formulas: Any, rules: Any, trees: Any):
        self._bare = _core.Profile(strict, bare(otherwise), formulas, rules, trees)
        other = -1 if otherwise is None else log.number("profile", otherwise)
        parts = [[of_formula(one)] for one in formulas], [[of_rule(one)] for one in rules]
        log.line(["profile", int(strict), other, *itertools.chain(*map(counted, parts), *trees.items())])
        log.add("profile", self)


def of_card(card: tuple[str, int, int]) -> list[str]:
    return [card[0], words(card[1:])]


def of_card_rule(given: tuple[dict[str, Any], int, int, tuple[int, ...], bool]) -> list[str]:
    rule, other, since, before, capabilities, standing = given
    number = ("taken", "possible", "measured").index(standing)
    return [of_rule(rule), words((other, since, before, number, *capabilities))]


def counted(parts: Iterable[list[str]]) -> list[Any]:
    parts = list(parts)
    return [len(parts), *itertools.chain(*parts)]


class Catalogue(StandIn):
    _unwritten = "near nearest relatives"

    def __init__(self, recorded: Any, rules: Any, samples: Any, load: Callable[[int], tuple[Profile, bool]]):
        self._load = load
        self._bare = _core.Catalogue(recorded, rules, samples, self._write_load)
        profiles = [
            [words((sm, version, len(cards))), *itertools.chain(*map(of_card, cards))]
            for sm, version, cards in recorded
        ]
        parts = profiles, map(of_card_rule, rules), map(of_card, samples)
        log.line(["catalogue", *itertools.chain(*map(counted, parts))])

    def _write_load(self, number: int) -> tuple[Any, bool]:
        profile, inferred = self._load(number)
        log.line(["load", words((number, log.number("profile", profile), inferred))])
        return bare(profile), inferred


class Workspace(StandIn):
    _unwritten = "known sources"

    def __init__(self, catalogue: Catalogue, card: Any, rules: Any, *given: Any):
        *numbers, guess = given
        self._bare = _core.Workspace(bare(catalogue), card, rules, *given)
        log.line(["workspace", *of_card(card), words(numbers), guess, *counted(map(of_card_rule, rules))])
        log.add("workspace", self)

    def answers(self, of: Any) -> Any:
        asked = log.of(of)
        found = self._bare.answers(bare(of))
        workspaces, following, sources = found
        line = ["answers", log.number("workspace", self), *asked]
        log.line(line, listed("", sources) + listed(" bytes", workspaces) + listed(" next", following))
        Play.answered = workspaces, following
        return found

    def rows(self, every: bool, of: Any) -> Any:
        asked = log.of(of)
        found = self._bare.rows(every, bare(of))
        line = ["rows", log.number("workspace", self), int(every), *asked]
        log.line(line, "".join(listed(" row", row) for row in found))
        for row in found:
            log.add("row", row)
        return found


# ---- traces ----


def flat(tuples: Any, width: int) -> list[Any]:
    """Their number, and their items; absent ones are 0."""
    return [len(tuples), *map(_plain, itertools.chain(*((*one, *[0] * (width - len(one))) for one in tuples)))]


def _plain(item: Any) -> Any:
    return int(item) if isinstance(item, bool) else item


class Trace:
    """Stands in for the core's type, not for its objects."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_core.Trace, name)

    def vae(
        self, arch: dict[str, Any], runtime: str, op: str, dtype: str, height: int, width: int, batch: int = 1,
        tile: int = 0, slicing: bool = False, sm: int = 89, multiprocessors: int = 128, free_bytes: int = 0,
        channels_last: bool = False, first: str | None = None, passing: Any = (), tile_overlap: float = 0.25,
        release: int = 42, frames: int = 1, picture: bool = False,
    ) -> Any:  # fmt: skip
        options = locals()
        del options["self"]
        models = _core.models().values()
        model = next((one["name"] for one in models if one | {"name": ""} == arch | {"name": ""}), "")
        numbers = (
            height, width, batch, tile, slicing, channels_last, release, sm, multiprocessors, free_bytes, frames,
            picture,
        )  # fmt: skip
        overlap, through = f"{tile_overlap:.17g}", flat(passing, 10)
        made = "vae", model, arch["name"], runtime, op, dtype, first or dtype, overlap, words(numbers), *through
        try:
            return log.keep_trace(_core.Trace.vae(**options), *made)
        except (ValueError, OverflowError) as error:
            log.line(made, f"error: {error}")
            raise


class Program(StandIn):
    def __init__(self, text: str):
        self._bare = _core.Program(text)
        log.line(["program", text.replace("\n", "\t")])
        log.add("program", self)

    def trace(
        self, dtype: str, sizes: tuple[int, ...], sm: int, multiprocessors: int, cudnn: int, passing: Any,
        companions: Any,
    ) -> Any:  # fmt: skip
        made = dtype, words(sizes), words((sm, multiprocessors, cudnn)), *flat(passing, 10), *flat(companions, 4)
        trace = self._bare.trace(dtype, sizes, sm, multiprocessors, cudnn, passing, companions)
        return log.keep_trace(trace, "module", log.number("program", self), *made)


# ---- scripts and plays ----


def curve(column: Any) -> str:
    """Of a column its length, its most and a sum in which the order counts."""
    of = np.asarray(column.tolist(), np.uint64)
    sums = of * (np.arange(len(of), dtype=np.uint64) * np.uint64(2) + np.uint64(1))
    return listed("", (len(of), max(of, default=0), sums.sum(dtype=np.uint64)))


def do(line: Iterable[Any], call: Callable[[], Any], said: Callable[[Any], str], names: Any = None) -> Any:
    """Make a call, and write its result or its error. said: formats the result, None after a failure."""
    result, failed = None, ""
    try:
        result = call()
        return result
    except _core.OutOfMemoryError as full:
        figures = "requested wanted total free allowed allocated reserved"
        failed = listed(f" full {names()[full.tag]}", [getattr(full, name) for name in figures.split()])
        raise
    except (ValueError, OverflowError) as error:
        failed = f" error: {error}"
        raise
    finally:
        log.line(line, said(result) + failed)


def left_by(found: Any) -> str:
    return "".join(f" {number}:{handle}" for number, handle in (found or {}).items())


class Script(StandIn):
    _unwritten = "bytes_of"

    def __init__(self) -> None:
        self._bare = _core.Script()
        log.line(["script"])
        log.add("script", self)

    @property
    def number(self) -> int:
        return log.number("script", self)

    def _do(self, line: list[Any], call: Callable[[], Any], said: Callable[[Any], str] = lambda _: "") -> Any:
        return do(line, call, lambda found: said(found) + listed(" events", (self._bare.events,)))

    def take(self, name: str, sizes: Iterable[int], stamp: str | None = None) -> list[int]:
        sizes = list(sizes)
        line = ["take", self.number, stamp or name, name, words(sizes)]
        return self._do(line, lambda: self._bare.take(name, sizes, stamp), lambda found: listed("", found or ()))

    def replace(self, stamp: str, storages: list[int], sizes: Iterable[int]) -> list[int]:
        sizes = list(sizes)
        line = ["replace", self.number, stamp, words(storages), words(sizes)]
        return self._do(line, lambda: self._bare.replace(stamp, storages, sizes), lambda new: listed("", new or ()))

    def give(self, storages: Iterable[int]) -> None:
        storages = list(storages)
        self._do(["give", self.number, words(storages)], lambda: self._bare.give(storages))

    def empty_cache(self) -> None:
        self._do(["empty", self.number], self._bare.empty_cache)

    def reset_peak(self) -> None:
        self._do(["reset", self.number], self._bare.reset_peak)

    def count(self, *work: int) -> None:
        self._do(["count", self.number, words(work)], lambda: self._bare.count(*work))

    def times(self, times: int) -> None:
        self._do(["times", self.number, times], lambda: self._bare.times(times))

    def read(self, name: str) -> None:
        def said(_: Any) -> str:
            name, *work = self._bare.phases[-1]
            return listed(f" {name}", work)

        self._do(["read", self.number, name], lambda: self._bare.read(name), said)


def of_allocator(allocator: Any) -> list[str]:
    of = allocator._settings()
    names = "total_memory allowed_memory max_split_size max_non_split_rounding reservation expandable_segments"
    numbers = [of[name] for name in f"{names} driver_pool history".split()]
    return [words((*numbers, *of["divisions"])), f"{of['gc_threshold']:.17g}"]


class Play(StandIn):
    _unwritten = "note_heights"
    answered: tuple[Any, Any] = (None, None)  # what Workspace.answers returned last

    def __init__(
        self, script: Script, allocator: Any, memory: int, cublas_bytes: int, cublaslt_bytes: int, cublaslt_use: str
    ):
        use = ("each", "kept", "shared").index(cublaslt_use)
        line = ["play", script.number, *of_allocator(allocator), words((memory, cublas_bytes, cublaslt_bytes, use))]
        bare = _core.Play(script._bare, allocator, memory, cublas_bytes, cublaslt_bytes, cublaslt_use)
        self._begin(bare, script, allocator, line)

    def _begin(self, bare: Any, script: Script, allocator: Any, line: list[Any]) -> None:
        self._bare, self._script, self._allocator = bare, script, allocator
        log.line(line)
        log.add("play", self)

    def elsewhere(self, allocator: Any, memory: int) -> Play:
        other = object.__new__(Play)
        line = ["elsewhere", self.number, *of_allocator(allocator), memory]
        other._begin(self._bare.elsewhere(allocator, memory), self._script, allocator, line)
        return other

    @property
    def number(self) -> int:
        return log.number("play", self)

    def _state(self) -> str:
        a = self._allocator
        counters = a.memory_allocated(), a.memory_reserved(), a.max_memory_allocated(), a.max_memory_reserved()
        state = listed(" state", (*counters, self._bare.most_reserved, self._bare.refused, len(self._bare.readings)))
        return state + "".join(listed(" reading", (*span, *four)) for span, *four in self._bare.readings[-1:])

    def _do(self, line: list[Any], call: Callable[[], Any], said: Callable[[Any], str] = lambda _: "") -> Any:
        return do(line, call, lambda found: said(found) + self._state(), lambda: self._script.names)

    def run(self) -> None:
        self._do(["run", self.number], self._bare.run)

    def follow(self) -> None:
        self._do(["follow", self.number], self._bare.follow)

    def call(self, trace: Any, workspaces: Any, following: Any) -> Any:
        line = ["call", self.number, log.trace(trace)]
        if (workspaces, following) != self.answered:
            line += [words(workspaces), words(following)]

        def said(found: Any) -> str:
            if found is None:
                return ""
            allocated, reserved = map(curve, self._bare.heights)
            return f"{left_by(found)} allocated{allocated} reserved{reserved}"

        return self._do(line, lambda: self._bare.call(trace, workspaces, following), said)

    def least(self, first_only: bool, low: int, high: int) -> int:
        found: int = self._bare.least(first_only, low, high)
        log.line(["least", self.number, words((first_only, low, high))], f" {found}")
        return found

    def takes(self, phases: Any, above: bool, rows: Any, likely: int) -> Any:
        found = self._bare.takes(phases, above, rows, likely)
        numbers = words((above, likely)), words(itertools.chain(*phases))
        line = ["takes", self.number, *numbers, words(log.number("row", row) for row in rows)]
        log.line(line, listed("", found))
        return found

    def peak(self, reading: int = -1) -> Any:
        step, tensors = self._bare.peak(reading)
        live = "".join(listed(f" {name}", sizes) for name, *sizes in tensors)
        log.line(["peak", self.number, reading % WORD], f" {step or '-'}{live}")
        return step, tensors

    def baseline(self) -> Any:
        tensors = self._bare.baseline()
        log.line(["baseline", self.number], "".join(listed(f" {name}", sizes) for name, *sizes in tensors))
        return tensors


# ---- the verdict ----


def write_verdict(v: Verdict) -> None:
    """What it follows from, and what it says."""
    numbers = v.took is not None, v.guesses, bool(v.untried), max(v.available, 0), v.kept_more, v.most, v.upper
    log.line(["verdict", words(numbers)], f" {v.word}, {v.why}")


class Core:
    """Stands in for vaemem._core: calls of these names are written, the others are not."""

    Profile, Catalogue, Workspace, Program, Script, Play = Profile, Catalogue, Workspace, Program, Script, Play
    Trace = Trace()

    def __getattr__(self, name: str) -> Any:
        return getattr(_core, name)


def stand_in() -> None:
    """Every module of the package calls the core through `Core` from now on, and the log has every verdict."""
    for name in ("prediction.predict_vae", "pipelines.by_diffusers", "pipelines.by_comfyui", "pipelines.by_sdcpp"):
        importlib.import_module(f"vaemem.{name}")
    core = Core()
    for name, module in [*sys.modules.items()]:
        if name.startswith("vaemem.") and getattr(module, "_core", None) is _core:
            module._core = core  # type: ignore[attr-defined]
    make = Verdict.__init__

    def make_and_keep(self: Verdict, *given: Any, **more: Any) -> None:
        make(self, *given, **more)
        log.verdicts.append(self)

    Verdict.__init__ = make_and_keep  # type: ignore[method-assign]


def choose(count: int) -> list[dict[str, Any]]:
    """The first questions, each with its answer if that is in frozen_answers.jsonl."""
    lines = frozen.load(Path(__file__).with_name("frozen_answers.jsonl"))
    known = [line["question"] for line in lines]
    lines += [{"question": one} for one in questions(3000, 0) if one not in known]
    return [line for line in lines if line["question"]["call"] in CALLS][:count]


def main() -> int:
    global log
    parser = argparse.ArgumentParser(description="Writes the calls that predictions make of the C core.")
    parser.add_argument("calls")
    parser.add_argument("returns")
    parser.add_argument("--count", type=int, default=300)
    calls, returns, count = vars(parser.parse_args()).values()
    log = Log(calls, returns)
    frozen.alone()
    stand_in()
    different = 0
    for line in choose(count):
        log.begin(line["question"])
        now = frozen.answer(line["question"])
        for verdict in log.verdicts:
            if "upper" in vars(verdict):  # it was read
                write_verdict(verdict)
        for found in frozen.differences(line.get("answer", now), now):
            different += 1
            print(line["question"], *found, sep="\n  ")
    log.close()
    return different > 0


if __name__ == "__main__":
    sys.exit(main())
