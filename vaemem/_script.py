"""Python scripts as lists of steps, which `write_script` writes and a program can also run without any text in between.

A text from outside, such as a file's name, is a value of a step, and is written as a literal, never into a comment or a
name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from vaemem._common import distinct

LINE = 100  # of a script's lines
_LIBRARIES = ("diffusers", "torch", "transformers")  # scripts import them whole if a name begins with one


class Identifier(NamedTuple):
    """A name in a script: "pipe.unet", "torch.float16". module: where its first word is imported from, if it is."""

    text: str
    module: str = ""


class Call(NamedTuple):
    """A call in a script, with its arguments: literals, names, other calls, and lists and dicts of these."""

    does: Identifier
    given: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A line of a script. value: a call or a literal. target: the variable or attribute that gets the value, if any
    does. note: a comment, in this package's own words, which is a line of its own if there is no value."""

    value: Any = None
    target: str = ""
    note: str = ""


def call(does: str | Identifier, *given: Any, **named: Any) -> Step:
    """Return the step that makes a call."""
    return Step(Call(does if isinstance(does, Identifier) else Identifier(does), given, named))


def _write(value: Any, indent: str = "", used: int = 0, whole: bool = False) -> str:
    """Write a value. indent: of its line. used: columns that the line has before it. whole: keep it on one line."""
    if isinstance(value, Identifier):
        return value.text
    if isinstance(value, str):
        return json.dumps(value) if value.isascii() else repr(value)
    if isinstance(value, Call):
        begin, end = f"{value.does.text}(", ")"
        items = [*(("", one) for one in value.given), *((f"{name}=", one) for name, one in value.named.items())]
    elif isinstance(value, Mapping):
        begin, end, items = "{", "}", [(f"{_write(name)}: ", one) for name, one in value.items()]
    elif isinstance(value, list | tuple):
        begin, end = "[]" if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
        items = [("", one) for one in value]
    else:
        return repr(int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value)
    line = ", ".join(word + _write(one, whole=True) for word, one in items)
    if whole or not items or used + len(begin + line + end) <= LINE:
        return f"{begin}{line}{end}"
    inner = f"{indent}    "
    if len(inner + line) <= LINE and not isinstance(value, Mapping):
        return f"{begin}\n{inner}{line}\n{indent}{end}"
    lines = [f"{inner}{word}{_write(one, inner, len(inner + word))},\n" for word, one in items]
    return f"{begin}\n{''.join(lines)}{indent}{end}"


def _write_step(step: Step) -> str:
    target = f"{step.target} = " if step.target else ""
    note = f"# {step.note}" if step.note else ""
    if step.value is None:
        return note
    return "  ".join(filter(None, [target + _write(step.value, used=len(target)), note]))


def _names(value: Any) -> Iterable[Identifier]:
    """Yield the names in a value."""
    if isinstance(value, Identifier):
        yield value
    elif isinstance(value, Call):
        yield from _names([value.does, *value.given, *value.named.values()])
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _names(one)


def write_steps(steps: Iterable[Step]) -> str:
    """Write steps without their imports."""
    return "\n".join(map(_write_step, steps))


def write_script(steps: Sequence[Step]) -> str:
    """Write steps as a script, with the imports that they need.

    Examples
    --------
    >>> steps = [call("pipe.unet.to", Identifier("torch.float16")), call("pipe.load_lora_weights", "a'\\nb")]
    >>> print(write_script(steps))
    import torch
    <BLANKLINE>
    pipe.unet.to(torch.float16)
    pipe.load_lora_weights("a'\\nb")
    """
    names = [name for step in steps for name in _names(step.value)]
    roots = {name.text.partition(".")[0] for name in names if not name.module}
    imports = [f"import {library}" for library in _LIBRARIES if library in roots]
    for module in distinct(["diffusers", *(name.module for name in names if name.module)]):
        if known := sorted({name.text.partition(".")[0] for name in names if name.module == module}):
            imports.append(f"from {module} import {', '.join(known)}")
    return "\n".join([*imports, *[""] * bool(imports), write_steps(steps)])
