"""Pipelines as text: the steps of a pipeline's own code around its components' calls, recorded once with PyTorch.

vaemem/pytorch/text_writer.py writes texts, and data/pipelines has the texts of known pipelines. A line is a word, its
arguments, and, after a bar, a name:

    case 1 g = 1; 1 u = 0           a case was recorded. A run needs one case with equations that all hold; another
                                    equation is 1 n != 1 or 1 s > 3
    when 1 g = 1                    the lines up to the next "when" apply if this holds; without equations, always
    take 2048 n t e | embeds        allocate bytes for a tensor
    free 0 | embeds                 free the oldest tensor of this name; 1 is the next one, and -1 is the newest
    free 0 3 | embeds               do so three times
    call unet forward n=2 n | 1     call a component's method with these sizes. One output stays; its name is the role
    call vae encode n=1; f=1; h=8 h; w=8 w; picture=1 | 4
                                    the image has a picture's strides, those of (N, H, W, C)
    enter vae decode                prepare a component for a method of its own, which calls its children
    repeat 1 n                      repeat the lines up to "done" for each image, step or clip. Repeats do not nest
    convert vae float32             convert a component's weights to a type
    blas                            multiply matrices outside of components, by cuBLAS; or "blas lt", by cuBLASLt
    steps 1 s                       the scheduler has s steps. The first step begins without a line of its own
    step                            the second step begins; another "step" begins the third
    each                            a step begins that stands for all further ones
    last                            the last step begins, if it differs
    change                          the first step begins that calls another denoiser. Then "step", "each" and "last"
                                    have the same meaning for the steps after it
    changes 1 1 2                   with one or two steps, one step precedes the change; with three, two do
    end                             the steps are over

A size is a polynomial: ``"1280 n h w + 640"``. Its variables are

    n, t, s         images, tokens of the prompt, steps
    m               tokens with padding to a multiple of 512
    h, w, f, p      sides of the latents, their frames, and patches of 2 x 2 in one of them
    y, x, q, k      sides and patches of the latents of an image that goes in, as the pipeline scales it, and its tokens
                    for a text encoder
    l, a            clips of a video, which its VAE decodes one by one, and latents of its sound
    e, v            bytes of an element of the denoiser and of the VAE
    g, u, c, i      1 or 0: whether it guides, whether the VAE is converted to float32 for its calls, whether there is a
                    safety checker, whether it begins with an image
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vaemem._common import shipped
from vaemem._errors import ArgumentError, inside
from vaemem.prediction.recording_files import find_component, is_recorded_component

VARIABLES = "n h w f l a p y x q k t m s e v g u c i".split()
_PHASES = {  # of roles with these words
    "text_encoder": "encode prompt", "connectors": "encode prompt", "image_encoder": "encode image",
    "vocoder": "decode",
}  # fmt: skip
_MOST = 1 << 17  # lines
_MOST_KEPT = 16  # sizes, with what a text does at each


class _Polynomial(NamedTuple):
    """A sum of products of variables."""

    terms: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def read(cls, text: str) -> _Polynomial:
        """Read ``"1280 n h w + 640"``; ValueError for anything else."""
        terms = list[tuple[int, tuple[str, ...]]]()
        for term in text.split(" + "):
            factor, *names = term.split() or [""]
            if unknown := [name for name in names if name not in VARIABLES]:
                raise ValueError(f"expected variables among {' '.join(VARIABLES)}, got {unknown[0]!r}")
            terms.append((int(factor), tuple(names)))
        return cls(tuple(terms))

    def value(self, at: Mapping[str, int]) -> int:
        """Return its value with these variables."""
        return sum(factor * math.prod([at[name] for name in names]) for factor, names in self.terms)


class _Line(NamedTuple):
    """A line of a text: its word, the words after it, the polynomials of its size and of a call's sizes, its name, and
    the lines that it repeats."""

    kind: str
    words: tuple[str, ...] = ()
    size: _Polynomial = _Polynomial(())
    sizes: tuple[tuple[str, _Polynomial], ...] = ()
    name: str = ""
    block: tuple[_Line, ...] = ()


class _Action(NamedTuple):
    """A line with numbers in place of polynomials."""

    kind: str
    words: tuple[str, ...]
    size: int
    sizes: Mapping[str, int]
    name: str


_Equation = tuple[_Polynomial, str, _Polynomial]  # two sides, and the sign between them
COMPARISONS = {" != ": operator.ne, " > ": operator.gt, " = ": operator.eq}


class PipelineText:
    """A pipeline's text.

    cases: equations for each recorded case; for every run that the text knows, all equations of one case hold
    lines: in order, each with its conditions
    changes: how many steps precede a change of the denoiser, with 1, 2, 3, ... steps
    """

    def __init__(self, text: str):
        self.cases, self.lines = list[tuple[_Equation, ...]](), list[tuple[tuple[_Equation, ...], _Line]]()
        self.changes = list[int]()
        when = tuple[_Equation, ...]()
        self._worked_out = dict[tuple[tuple[str, int], ...], list[tuple[list[_Action], int]]]()
        repeated: list[tuple[tuple[_Equation, ...], _Line]] | None = None  # what precedes a repeat that has not ended
        for at, line in enumerate(text.splitlines(), 1):
            word, _, rest = line.partition(" ")
            given, _, name = rest.partition(" | ")
            with inside(f"line {at}", caught=(ValueError,)):
                if at > _MOST:
                    raise ValueError(f"expected at most {_MOST} lines")
                if word in ("case", "when"):
                    equations = tuple(map(_read_equation, filter(None, given.split("; "))))
                    self.cases += [equations] * (word == "case")
                    when = when if word == "case" else equations
                elif word == "changes":
                    self.changes = [*map(int, given.split())]
                    if min(self.changes, default=0) < 1:
                        raise ValueError("expected a step before each change")
                elif word == "steps":
                    self.lines.append((when, _Line("steps", size=_Polynomial.read(given))))
                elif word == "repeat" and repeated is None:
                    times, repeated, self.lines = _Polynomial.read(given), self.lines, []
                elif word == "done" and repeated is not None:
                    block = tuple(one for _, one in self.lines)
                    self.lines, repeated = [*repeated, (when, _Line("repeat", size=times, block=block))], None
                elif word and word != "#":
                    self.lines += ((when, one) for one in _read_line(word, given, name))
        if repeated is not None:
            raise ArgumentError("text", "done after every repeat", "the end")

    def played(self, at: Mapping[str, int]) -> Iterator[tuple[Sequence[_Line], int]]:
        """Yield the lines of each part, and how many steps the part stands for. The first part ends with the first
        step; the last part follows all steps. ValueError if nothing was recorded with these variables."""
        if not any(_hold(case, at) for case in self.cases):
            got = ", ".join(f"{name} = {value}" for name, value in at.items())
            raise ArgumentError("pipeline", "a case that was recorded", got)
        names, parts, known, count = [""], [list[_Line]()], dict[tuple[_Equation, ...], bool](), 1
        for when, line in self.lines:
            if when not in known:
                known[when] = _hold(when, at)
            if not known[when]:
                continue
            if line.kind == "steps":
                count = line.size.value(at)
            elif line.kind == "part":
                names.append(line.name)
                parts.append([])
            else:
                times = line.size.value(at) if line.kind == "repeat" else 1
                if times < 0:
                    longer = "a longer video: what a shorter one does was not recorded"
                    raise ArgumentError("frames", longer, f"{at['f']} of latents")
                if times * len(line.block) > _MOST:
                    raise OverflowError(f"expected at most {_MOST} lines")
                parts[-1] += line.block * times if line.kind == "repeat" else (line,)
        end = parts.pop() if names[-1] == "end" else []
        change = names.index("change") if "change" in names else len(parts)
        before = steps_before_change(self.changes, at["s"], count)
        yield from _steps_of(names[:change], parts[:change], before)
        yield from _steps_of(names[change:], parts[change:], count - before)
        yield end, 1

    def actions(self, at: Mapping[str, int]) -> list[tuple[list[_Action], int]]:
        """Return what `played` yields, with numbers in place of polynomials. If further steps allocate and free the
        same memory as the second step, the second step stands for them too."""
        key = tuple(at.items())
        if key not in self._worked_out:
            parts = [([_act(line, at) for line in lines], steps) for lines, steps in self.played(at)]
            if len(parts) > 3 and parts[2][1] > 1 and _do_the_same(*(actions for actions, _ in parts[:3])):
                parts[1:3] = [(parts[1][0], parts[1][1] + parts[2][1])]
            while len(self._worked_out) >= _MOST_KEPT:
                self._worked_out.pop(next(iter(self._worked_out)), None)
            self._worked_out[key] = parts
        return self._worked_out[key]


def _steps_of(
    names: Sequence[str], parts: Sequence[Sequence[_Line]], count: int
) -> Iterator[tuple[Sequence[_Line], int]]:
    """Yield the parts of a number of steps, and how many of them each part stands for."""
    has_last = "last" in names and count > 1
    count, known = count - has_last, len(parts) - ("last" in names)
    for number, part in enumerate(parts[: min(count, known)], 1):
        yield part, count - number + 1 if number == known > 1 else 1
    if has_last:
        yield parts[-1], 1


def _act(line: _Line, at: Mapping[str, int]) -> _Action:
    sizes = {name: size.value(at) for name, size in line.sizes}
    return _Action(line.kind, line.words, line.size.value(at), sizes, line.name)


def _do_the_same(before: Sequence[_Action], one: Sequence[_Action], other: Sequence[_Action]) -> bool:
    """Tell whether two steps do the same with tensors of other names, and leave tensors of the same names and sizes."""
    if [action[:4] for action in one] != [action[:4] for action in other]:
        return False
    live = dict[str, list[int]]()
    states = list[dict[str, list[int]]]()
    for part in (before, one, other):
        for action in part:
            there = live.setdefault(action.name, [])
            if action.kind == "free":
                if not -len(there) <= int(action.words[0]) < len(there):
                    return False
                there.pop(int(action.words[0]))
            elif action.kind in ("take", "call"):
                there += [action.size] * (int(action.words[2]) if action.kind == "call" else 1)
        states.append({name: [*sizes] for name, sizes in live.items() if sizes})
    return states[1] == states[2]


def _hold(equations: Iterable[_Equation], at: Mapping[str, int]) -> bool:
    return all(COMPARISONS[sign](left.value(at), right.value(at)) for left, sign, right in equations)


def _read_equation(text: str) -> _Equation:
    sign = next((sign for sign in COMPARISONS if sign in text), " = ")
    left, _, right = text.partition(sign)
    return _Polynomial.read(left), sign, _Polynomial.read(right)


def _read_line(word: str, given: str, name: str) -> Iterator[_Line]:
    if word in ("step", "each", "last", "change", "end"):
        yield _Line("part", name=word)
    elif word == "take":
        yield _Line(word, size=_Polynomial.read(given), name=name)
    elif word == "free":
        place, count = map(int, [*given.split(), "1"][:2])
        yield from [_Line(word, (str(place),), name=name)] * min(count, _MOST)
    elif word == "call":
        role, method, sizes = [*given.split(" ", 2), ""][:3]
        pairs = [pair.split("=", 1) for pair in filter(None, sizes.split("; "))]
        read = tuple((variable, _Polynomial.read(size)) for variable, size in pairs)
        yield _Line(word, (role, method, str(int(name))), sizes=read, name=role)
    elif word in ("convert", "enter"):
        role, told = given.split()
        yield _Line(word, (role, told))
    elif word == "blas":
        yield _Line(word, (given,))
    else:
        raise ValueError(f"expected a known word, got {word!r}")


def video_variables(frames: int, frame_factor: int, clip: Sequence[int], sound: Sequence[int]) -> dict[str, int]:
    """Return the variables f, l and a of a video with this number of frames. An image has 1 frame.

    frame_factor: frames of a clip
    clip: frames besides those of clips; frames of latents of a clip, and besides those of clips
    sound: latents of sound for a number of frames
    """
    clips = (frames - clip[0]) // frame_factor
    return {"f": clip[1] * clips + clip[2], "l": clips, "a": round(frames * sound[0] / sound[1])}


def steps_before_change(changes: Sequence[int], steps: int, count: int) -> int:
    """Return how many of the scheduler's steps precede a change of the denoiser; all if there is none.

    changes: this number for 1, 2, 3, ... steps of the call; a call of more has the same share
    count: of the scheduler's steps
    """
    known = [changes[steps - 1] if steps <= len(changes) else changes[-1] * steps // len(changes)] if changes else []
    return min([*known, count])


def phase_of(role: str, method: str) -> str:
    """Return the phase that a component's call belongs to; "" for the one that runs, as for a VAE's children."""
    if role == "safety_checker":
        return ""
    if "vae" in role or "vqvae" in role:
        return {"encode": "encode image", "decode": "decode", "forward": "decode"}.get(method, "")
    return next((phase for part, phase in _PHASES.items() if part in role), "denoise")


@functools.cache
def load_text(name: str) -> PipelineText:
    """Return a pipeline's text by the name of its file, or of a recording's component."""
    if is_recorded_component(name):
        data, _ = find_component(name)
        with inside("pipeline", path=name.rpartition(":")[0]):
            return PipelineText(data["text"])
    return PipelineText(shipped("pipelines", f"{name}.txt"))
