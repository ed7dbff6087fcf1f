"""Write a pipeline's text from recordings at several sizes (`vaemem.pipelines.pipeline_text` has the format).

Recordings that do the same become one case. They may differ in sizes, in the number of steps, and in how often they do
the same for each image, step or clip. Which variables tell the cases apart is found here.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vaemem._errors import ArgumentError
from vaemem.pipelines.pipeline_text import COMPARISONS, PipelineText, phase_of, steps_before_change
from vaemem.pytorch.fitting import PolynomialFit, products
from vaemem.pytorch.text_recorder import Event

Values = Mapping[str, int]  # of the text's variables
_Shapes = Sequence[tuple[str, tuple[int, ...]]]
# The role, method and shapes of a call, and the text's variables -> the component's variables
VariablesOf = Callable[[str, str, _Shapes, Values], Values]
_Equation = tuple[str, str, int]  # a variable, a sign, and a number
_Key = tuple[str, tuple[str, ...]]  # what has to be the same at every size: an event's kind and words
_PLACES = ["", "h w", "t", "h", "w", "s", "m", "f", "f h w", "p", "y x", "q", "y", "x", "k", "g", "l h w", "a", "p p"]
_TELLING = "g i u c e v n s".split()  # variables that the code may decide by, the likeliest first
_COUNTS = "n f s".split()  # "more than one" tells more of them than "seven"
_MANY_STEPS = 5  # of these, some do the same
_LOOPED = "n s l".split()  # numbers of repetitions: for each image, step or clip
_MORE = 0, -1, -2  # repetitions besides one for each: the first ones may differ
_FIRST, _STEP, _END = "first", "step", "end"  # parts of a recording, as of `_split`
_LEAST_LOOPED = 3  # fewer repetitions may be there by accident
_PARTS = ["", "change", "step", "each", "last", "end"]  # the names of parts, as of `_name_steps`


class _Place(NamedTuple):
    """A place of equal events in a row: a part, the event before, one of the equal ones, and the event after."""

    part: str
    before: _Key | None
    event: _Key
    after: _Key | None


class Loop(NamedTuple):
    """What happens for each image, step or clip. more: how often it happens besides"""

    of: str
    more: int
    block: tuple[_Key, ...]

    @property
    def times(self) -> str:
        return f"1 {self.of} + {self.more}".removesuffix(" + 0")

    def count(self, at: Values) -> int:
        return at[self.of] + self.more


def _split(events: Sequence[Event]) -> list[list[Event]]:
    """Split a recording at the ends of steps. What follows the last one is the last part."""
    parts: list[list[Event]] = [[]]
    for event in events:
        if event.kind == "step":
            parts.append([])
        else:
            parts[-1].append(event)
    return parts if len(parts) > 1 else [*parts, []]


def count_before_change(events: Sequence[Event]) -> tuple[int, int]:
    """Count the steps before the first one that calls other denoisers than the first step, which are all if there is
    none; and all steps."""
    *steps, _ = _split(events)
    words = ([event.words for event in step if event.kind == "call"] for step in steps)
    roles = [[role for role, method, _ in calls if phase_of(role, method) == "denoise"] for calls in words]
    return next((number for number, called in enumerate(roles) if called != roles[0]), len(steps)), len(steps)


def _name_steps(parts: Sequence[list[Event]], before: int) -> tuple[list[list[Event]], list[str]]:
    """Return a recording's parts, in which steps that do the same are there once, and their names: "" for the first;
    step; each, for all further ones but a last one that differs; last; change, and then the same; end. before: steps
    before a change of the denoiser"""
    *steps, end = parts
    named, names = _name_like_ones(steps[:before])
    if before < len(steps):
        after, names_after = _name_like_ones(steps[before:])
        named, names = [*named, *after], [*names, "change", *names_after[1:]]
    return [*named, end], [*names, "end"]


def _name_like_ones(parts: Sequence[list[Event]]) -> tuple[list[list[Event]], list[str]]:
    """Do what `_name_steps` does for steps without a change, and without an end."""
    first, *steps = parts
    differing = list[list[Event]]()
    for i, step in enumerate(steps[:-1]):
        differing.append(step)
        if all(other == step for other in steps[i + 1 : -1]):
            break
    names = ["step"] * len(differing)
    if names:
        names[-1] = "each"
    if steps and (not differing or steps[-1] != differing[-1]):
        differing.append(steps[-1])
        names.append("last")
    return [first, *differing], ["", *names]


def _key(event: Event) -> _Key:
    return event.kind, event.words


def _fold(
    part: str, events: Sequence[Event], values: Values, known: Mapping[Loop, int], rows: Mapping[_Place, Loop]
) -> list[_Key | Loop]:
    """Find what happens for each image, step or clip. known: loops, and how often each was found. rows: loops of equal
    events"""
    folded, at, lengths = list[_Key | Loop](), 0, _rows_of(part, events)
    while at < len(events):
        there = (loop for loop in _loops_at(events, at, values) if loop in known)
        loop = max(there, key=lambda one: known[one], default=None)
        if loop is None and at in lengths:
            place, length = lengths[at]
            row = rows.get(place)
            loop = row if row and _LEAST_LOOPED <= row.count(values) <= length // len(row.block) else None
        folded.append(loop or _key(events[at]))
        at += loop.count(values) * len(loop.block) if loop else 1
    return folded


def _find_loops(recorded: Sequence[tuple[Values, Sequence[Event]]]) -> dict[Loop, int]:
    """Find what happens for each image, step or clip, with two numbers of them if there are two. With one it may be an
    accident. Return loops, and how often each was found."""
    found = dict[Loop, list[int]]()
    for at, events in recorded:
        for part in _split(events):
            for loop in {loop for place in range(len(part)) for loop in _loops_at(part, place, at)}:
                found.setdefault(loop, []).append(at[loop.of])

    def is_confirmed(loop: Loop) -> bool:
        values = {at[loop.of] for at, _ in recorded}
        is_only = sum(value + loop.more >= _LEAST_LOOPED for value in values) == 1
        return is_only or len({*found[loop]}) > 1

    return {loop: len(places) for loop, places in found.items() if is_confirmed(loop)}


def _loops_at(events: Sequence[Event], at: int, values: Values) -> Iterator[Loop]:
    """Yield loops of blocks that happen once for each image, step or clip from a place on, or some times less.
    `_find_rows` has those of equal events."""
    for length in range(2, (len(events) - at) // _LEAST_LOOPED + 1):
        is_later = at > 0 and events[at - 1] == events[at + length - 1]  # the same loop began one event before
        if is_later or events[at] != events[at + length]:
            continue
        block, times = events[at : at + length], 1
        if len({*block}) == 1:
            continue
        while events[at + times * length : at + (times + 1) * length] == block:
            times += 1
        if times >= _LEAST_LOOPED:
            found = ((of, times - values[of]) for of in _LOOPED)
            yield from (Loop(of, more, tuple(map(_key, block))) for of, more in found if more in _MORE)


def _rows_of(part: str, events: Sequence[Event]) -> dict[int, tuple[_Place, int]]:
    """Return the places and the lengths of equal events in a row, by their beginnings."""
    found, at, before = dict[int, tuple[_Place, int]](), 0, None
    for event, same in itertools.groupby(events):
        length = len([*same])
        after = next(map(_key, events[at + length : at + length + 1]), None)
        found[at] = _Place(part, before, _key(event), after), length
        at, before = at + length, _key(event)
    return found


def _find_rows(recorded: Sequence[tuple[Values, Sequence[Event]]]) -> dict[_Place, Loop]:
    """Find where equal events happen once, or several times, for each image, step or clip, in all recordings. A text
    encoder that keeps seven tensors also does so with another number of images. Equal events may follow such a loop."""
    seen = dict[_Place, list[tuple[Values, int]]]()
    for at, events in recorded:
        parts = _split(events)
        for name, part in zip((_FIRST, *[_STEP] * (len(parts) - 2), _END), parts, strict=True):
            for place, length in _rows_of(name, part).values():
                seen.setdefault(place, []).append((at, length))
    found = {place: [_loop_of_row(place, lengths, of) for of in _LOOPED] for place, lengths in seen.items()}
    return {place: next(filter(None, loops)) for place, loops in found.items() if any(loops)}


def _loop_of_row(place: _Place, lengths: Sequence[tuple[Values, int]], of: str) -> Loop | None:
    """Return the loop of equal events, if their number is a multiple of a variable, and a constant."""
    pairs = sorted({(at[of], length) for at, length in lengths if at[of] >= _LEAST_LOOPED})
    if not pairs or pairs[0][0] == pairs[-1][0]:
        return None
    (low, least), (high, most) = pairs[0], pairs[-1]
    each = (most - least) // (high - low)
    rest = least - each * low
    if each < 1 or any(length != each * value + rest for value, length in pairs):
        return None
    more = min(0, rest // each)
    return Loop(of, more, (place.event,) * each) if more in _MORE else None


def _align(folded: Sequence[_Key | Loop], events: Sequence[Event], values: Values) -> list[list[Event | None]] | None:
    """Return the events of each item's lines, None for one that does not happen; or None if the events are others."""
    found, at = list[list[Event | None]](), 0
    for item in folded:
        block, times = (item.block, item.count(values)) if isinstance(item, Loop) else ((item,), 1)
        piece = [*events[at : at + times * len(block)]]
        first = piece[: len(block)]
        if [*map(_key, piece)] != [*block] * times or piece != first * times:
            return None
        found.append([*first] or [None] * len(block))
        at += len(piece)
    return found if at == len(events) else None


def _nothing(folded: Sequence[_Key | Loop]) -> list[list[Event | None]]:
    """Return what `_align` does for a part that does not happen."""
    return [[None] * len(item.block) if isinstance(item, Loop) else [None] for item in folded]


class _Case:
    """Recordings that do the same."""

    def __init__(
        self, at: Values, parts: Sequence[list[Event]], before: int, loops: Mapping[Loop, int],
        rows: Mapping[_Place, Loop],
    ):  # fmt: skip
        named, self.names = _name_steps(parts, before)
        kinds = _FIRST, *[_STEP] * (len(named) - 2), _END
        self.folded = [_fold(kind, part, at, loops, rows) for kind, part in zip(kinds, named, strict=True)]
        self.points, self.steps = list[Values](), list[int]()
        self.events = list[list[list[Event | None]]]()  # by point, item and line

    def _numbers(self, steps: int, before: int) -> list[int] | None:
        """Return the number of the part that each step does, and of the end. None if the case has too few steps."""
        end = len(self.names) - 1
        change = self.names.index("change") if "change" in self.names else end
        numbers = list[int]()
        for begin, to, count in ((0, change, before), (change, end, steps - before)):
            names = self.names[begin:to]
            last = [to - 1] if "last" in names and count > 1 else []
            each = to - 1 - ("last" in names)
            count -= len(last)
            if begin + count > each + 1 and "each" not in names:
                return None
            numbers += [*(min(begin + number, each) for number in range(count)), *last]
        return [*numbers, end]

    def join(self, at: Values, parts: Sequence[list[Event]], before: int) -> bool:
        """Add a recording, if it does the same."""
        aligned: list[Any] = [None] * len(self.folded)
        numbers = self._numbers(len(parts) - 1, before)
        if numbers is None:
            return False
        for number, events in zip(numbers, parts, strict=True):
            found = _align(self.folded[number], events, at)
            if found is None or aligned[number] not in (None, found):
                return False
            aligned[number] = found
        flat = list[list[Event | None]]()
        for found, folded, name in zip(aligned, self.folded, self.names, strict=True):
            flat += [[Event("part", (name,))]] * bool(name)
            flat += _nothing(folded) if found is None else found
        self.points.append(at)
        self.events.append(flat)
        self.steps.append(len(parts) - 1)
        return True

    def items(self) -> Iterator[tuple[tuple[int, ...], _Key | Loop]]:
        """Yield (place, item), with the place of the item's part among all parts. All parts but the first begin with an
        item that names them."""
        changes = number = 0
        for folded, name in zip(self.folded, self.names, strict=True):
            changes = 2 if name == "end" else changes + (name == "change")
            number = number + 1 if name == "step" else 0
            place = changes, _PARTS.index(name), number
            yield from ((place, key) for key in ([("part", (name,))] if name else []))
            yield from ((place, key) for key in folded)


class _Item:
    """Something that some cases do: a line, or a loop of lines."""

    def __init__(self, key: _Key | Loop):
        self.key = key
        self.at = dict[int, int]()  # by the number of a case, its place there


def _merge(cases: Sequence[_Case]) -> Iterator[_Item]:
    """Yield the cases' items, in which the same one of several cases is there once, part by part."""
    items = [[*case.items()] for case in cases]
    for part in sorted({part for each in items for part, _ in each}):
        merged = list[_Item]()
        for number, each in enumerate(items):
            places = [place for place, (label, _) in enumerate(each) if label == part]
            together = list[_Item]()
            known, keys = [item.key for item in merged], [each[place][1] for place in places]
            for how, first, last, begin, end in difflib.SequenceMatcher(
                None, known, keys, autojunk=False
            ).get_opcodes():
                together += merged[first:last]
                if how != "equal":
                    together += map(_Item, keys[begin:end])
                for item, place in zip(together[len(together) - (end - begin) :], places[begin:end], strict=True):
                    item.at[number] = place
            merged = together
        yield from merged


class _Text:
    """Cases as one list of lines, in which sizes are polynomials."""

    def __init__(self, cases: Sequence[_Case], variables_of: VariablesOf):
        self.cases, self.variables_of = cases, variables_of
        self._fits = dict[tuple[bool, tuple[tuple[int, int], ...]], PolynomialFit]()
        self._groups = dict[frozenset[int], list[tuple[frozenset[int], str]]]()
        self._is_decoded = False  # the VAE's type explains sizes from here on, if the denoiser's does too

    def steps(self) -> Iterator[str]:
        """Yield lines with the number of steps, by cases if it does not follow from one polynomial."""
        everyone = frozenset(range(len(self.cases)))
        try:
            yield self._steps(everyone)
        except ArgumentError:
            for number in sorted(everyone):
                yield f"when {self._apart(frozenset([number]))[0][1]}"
                yield self._steps(frozenset([number]))
            yield "when"

    def _steps(self, numbers: frozenset[int]) -> str:
        cases = [self.cases[number] for number in sorted(numbers)]
        fit = PolynomialFit(["s", ""], [at for case in cases for at in case.points])
        return f"steps {fit.find(tuple(count for case in cases for count in case.steps))}"

    def lines(self) -> Iterator[str]:
        """Yield its lines. Those after "when" apply if equations hold."""
        among = ""
        for item in _merge(self.cases):
            for numbers, now in self._together(item):
                if now != among:
                    yield f"when {now}".strip()
                among = now
                yield from self._item(item, numbers)

    def _together(self, item: _Item) -> Iterator[tuple[frozenset[int], str]]:
        """Yield the numbers of an item's cases with their equations: together if their sizes have one polynomial."""
        for numbers, equations in self._apart(frozenset(item.at)):
            try:
                [*self._item(item, numbers)]
                yield numbers, equations
            except ArgumentError:
                if len(numbers) == 1:
                    raise
                yield from (self._apart(frozenset([number]))[0] for number in sorted(numbers))

    def _apart(self, numbers: frozenset[int]) -> list[tuple[frozenset[int], str]]:
        """Split cases into the fewest groups that equations tell from all other cases."""
        if numbers not in self._groups:
            self._groups[numbers] = self._split(numbers)
        return self._groups[numbers]

    def _split(self, numbers: frozenset[int]) -> list[tuple[frozenset[int], str]]:
        """Try all cases together; then cases that share an equation; then each case alone."""
        points = [at for number in numbers for at in self.cases[number].points]
        tried = [numbers, *(self._cases_with(numbers, one) for one in _equations(points, points, _TELLING))]
        for chosen in sorted(filter(None, tried), key=len, reverse=True):
            own = [at for number in chosen for at in self.cases[number].points]
            others = [at for number, case in enumerate(self.cases) if number not in chosen for at in case.points]
            with contextlib.suppress(ArgumentError):
                rest = numbers - chosen
                return [(chosen, equations_of(own, others)), *(self._apart(rest) if rest else ())]
        raise ArgumentError("points", "steps that differ by a variable", f"others at {dict(points[0])}")

    def _cases_with(self, numbers: frozenset[int], one: _Equation) -> frozenset[int]:
        return frozenset(number for number in numbers if all(_holds(one, at) for at in self.cases[number].points))

    def _item(self, item: _Item, numbers: Iterable[int]) -> Iterator[str]:
        """Yield the lines of an item in some cases."""
        points = [(number, i) for number in sorted(numbers) for i in range(len(self.cases[number].points))]
        events = [self.cases[number].events[i][item.at[number]] for number, i in points]
        lines = [[*zip(points, line, strict=True)] for line in zip(*events, strict=True)]
        if isinstance(item.key, Loop):
            yield f"repeat {item.key.times}"
            yield from map(self._line, lines)
            yield "done"
        elif item.key[0] != "part":
            yield self._line(lines[0])
        else:
            yield item.key[1][0]

    def _line(self, events: Sequence[tuple[tuple[int, int], Event | None]]) -> str:
        there, known = tuple(point for point, event in events if event), [event for _, event in events if event]
        kind, words, *_ = known[0]
        if kind == "take":
            return f"take {self._find(there, [event.size for event in known])} | {words[0]}"
        if kind == "free":
            return f"free {words[1]} | {words[0]}"
        if kind != "call":
            return " ".join(filter(None, [kind, *words]))
        role, method, kept = words
        at = [self.cases[number].points[i] for number, i in there]
        found = [self.variables_of(role, method, one.shapes, point) for one, point in zip(known, at, strict=True)]
        sizes = {each: self._find(there, [one[each] for one in found]) for each in found[0]}
        self._is_decoded |= method == "decode"
        given = "; ".join(f"{each}={size}" for each, size in sizes.items())
        return f"call {role} {method} {given} | {kept}"

    def _find(self, there: tuple[tuple[int, int], ...], sizes: Sequence[int]) -> str:
        key = self._is_decoded, there
        if key not in self._fits:
            types = ["", "v", "e"] if self._is_decoded else ["", "e", "v"]
            points = [self.cases[number].points[i] for number, i in there]
            self._fits[key] = PolynomialFit(products(["", "n"], _PLACES, types), points)
        return self._fits[key].find(tuple(sizes))


def write_text(
    recorded: Sequence[tuple[Values, Sequence[Event]]], variables_of: VariablesOf, changes: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the lines of a text. ValueError if steps differ and no variable tells why, or sizes fit no polynomial.

    recorded: what the pipeline does with each of several values of the variables
    changes: as of `PipelineText`
    """
    cases, loops, rows = list[_Case](), _find_loops(recorded), _find_rows(recorded)
    # What repeats shows with many steps, and with many images.
    for at, events in sorted(recorded, key=lambda one: (one[0]["s"] < _MANY_STEPS, -one[0]["n"])):
        parts = _split(events)
        before = steps_before_change(changes, at["s"], len(parts) - 1)
        if not any(case.join(at, parts, before) for case in cases):
            cases.append(_Case(at, parts, before, loops, rows))
            cases[-1].join(at, parts, before)
    for case in cases:
        others = [at for one in cases if one is not case for at in one.points]
        yield f"case {equations_of(case.points, others)}".strip()
    if changes:
        yield f"changes {' '.join(map(str, changes))}"
    text = _Text(cases, variables_of)
    for line, same in itertools.groupby(itertools.chain(text.steps(), text.lines())):
        count = len([*same])
        joined = line.startswith("free ") and count > 1
        yield from [line.replace(" |", f" {count} |", 1)] if joined else [line] * count


def _holds(equation: _Equation, at: Values) -> bool:
    name, sign, value = equation
    return bool(COMPARISONS[sign](at[name], value))


def _equations(own: Sequence[Values], others: Sequence[Values], telling: Sequence[str]) -> Iterator[_Equation]:
    """Yield equations that hold at one of these points at least, the plainest first: g = 1, s > 3, n != 1, n = 7."""
    values = {name: sorted({at[name] for at in (*own, *others)}) for name in telling}
    values |= {name: [value for value in found if not value] for name, found in values.items() if " + " in name}
    # A number of steps among many is where a recording happens to be, and tells nothing.
    values |= {name: [value for value in found if value < _MANY_STEPS] for name, found in values.items() if name == "s"}
    plain = [(name, value) for name in telling for value in values[name] if value <= 1 or name not in _COUNTS]
    yield from ((name, " = ", value) for name, value in plain)
    yield from (("s", " > ", value) for value in values.get("s", ())[1:])
    yield from ((name, " != ", value) for name in telling for value in values[name])
    yield from ((name, " = ", value) for name in telling for value in values[name] if (name, value) not in plain)


def equations_of(own: Sequence[Values], others: Sequence[Values], telling: Sequence[str] = _TELLING) -> str:
    """Find few equations of variables that hold at all of one's own points, and that tell them from the others.
    Raise ValueError if no equations do. telling: the variables"""
    known = [one for one in _equations(own, others, telling) if all(_holds(one, at) for at in own)]
    left, chosen = [*others], list[_Equation]()
    while left:
        best = max(known, key=lambda one: sum(not _holds(one, at) for at in left), default=None)
        kept = [at for at in left if best and _holds(best, at)]
        if best is None or len(kept) == len(left):
            raise ArgumentError("points", "steps that differ by a variable", f"others at {dict(own[0])}")
        left = kept
        chosen.append(best)
    return "; ".join(f"1 {name}{sign}{value}" for name, sign, value in sorted(chosen, key=known.index))


def check_text(text: PipelineText, at: Values, events: Sequence[Event], variables_of: VariablesOf) -> None:
    """Raise ValueError if a text does something else with these values of the variables than a recording."""
    played = [line for part, _ in text.played(at) for line in part]
    parts = _split(events)
    named, _ = _name_steps(parts, steps_before_change(text.changes, at["s"], len(parts) - 1))
    done = [event for part in named for event in part]
    for line, event in itertools.zip_longest(played, done):
        says, does, sizes = None, None, dict[str, int]()
        if line is not None:
            sizes = {name: size.value(at) for name, size in line.sizes}
            says = line.kind, line.name, line.words, line.size.value(at), sizes
        if event is not None:
            kind, words, size, shapes = event
            name, more = (words[0], words[1:]) if kind in ("take", "free") else ("", words)
            role = words[0] if kind == "call" else name
            asked = variables_of(words[0], words[1], shapes, at) if kind == "call" else {}
            told = {name: asked[name] for name in asked if line is None or name in sizes or name == "picture"}
            does = kind, role, more, size, told
        if says != does:
            raise ArgumentError("text", f"{does}, as recorded at {dict(at)}", str(says))
