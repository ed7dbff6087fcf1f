"""The parser of the command line: each command gets its flags from the table when it runs, and its help from its
documentation.

A flag that is an argument of its command's function has the argument's description, its kind by the annotation, and its
default: without the flag, the function gets nothing.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import itertools
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Container, Mapping
from typing import Any, NoReturn

import vaemem
from vaemem._arguments import described
from vaemem._common import choose, letters
from vaemem._errors import ArgumentError
from vaemem._saving import check_writable
from vaemem.cli.commands import COMMANDS, Action, load_table
from vaemem.cli.completion import offer
from vaemem.cli.flags import FLAGS, WORDS, FlagSettings, Later, count

# A flag's settings, by its argument's annotation.
_KINDS: dict[str, FlagSettings] = {
    "int": {"type": count},
    "int | Sequence[int]": {"type": count},
    "float": {"type": float},
    "bool": {"action": "store_true"},
    "int | str": {"metavar": "SIZE"},
    "Limit": {"metavar": "SIZE"},
}

_VAEMEM = "Run the VAEs of SD1.5, SDXL, SD3, FLUX and others in a memory known to the byte."
_GROUPS = {
    "Predict a run's memory": "fits plan largest formula explain bound record",
    "Run": "decode encode info estimate tradeoff measure backends demo comfyui invokeai",
    "Make and read tables": "sweep fit compare report",
}
_SWEEP = "vaemem sweep predicted --models sdxl --gpu T4"
_RENAMED = {"predict": "fits", "pipeline": "fits"}  # commands, in this release
_EXAMPLES = """vaemem fits sdxl decode 1024 --gpu "RTX 4060"
vaemem plan sdxl 1024 --gpu "RTX 4060"
vaemem decode z.npy --weights ae.safetensors -o picture.png"""


class _Parser(argparse.ArgumentParser):
    """Refuse bad input in one line, which names the nearest flag if a flag is unknown. text: the description, an empty
    line, and examples."""

    add_flags: Callable[[], None] | None = None  # adds a command's flags when they are needed

    def __init__(self, prog: str, text: str, **settings: Any) -> None:
        about, _, examples = text.rpartition("\n\n")
        examples = f"example{'s' * (chr(10) in examples)}:\n{textwrap.indent(examples, '  ')}"
        super().__init__(prog, None, about, examples, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.commands: dict[str, _Parser] = {}

    def complete(self) -> None:
        """Add the flags, once."""
        add, self.add_flags = self.add_flags, None
        if add:
            add()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.complete()
        known, words = self._option_string_actions, sys.argv[1:] if args is None else args
        for word in itertools.takewhile(lambda word: word != "--" and (word[:1] == "-" or not self._subparsers), words):
            name = word.partition("=")[0]
            if name[:2] == "--" and " " not in name and not any(flag.startswith(name) for flag in known):
                near = difflib.get_close_matches(name, known, 1, 0)[0]
                self.error(f"there is no {name}; the nearest flag is {near}")
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"expected nothing more, got {' '.join(others)}")
        return found, others

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        """Return the choice that a text means, in any spelling."""
        value = super()._get_value(action, text)
        if action.choices is None or action.nargs == argparse.PARSER or not isinstance(value, str):
            return value
        return {letters(choice): choice for choice in action.choices}.get(letters(value), value)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.nargs == argparse.PARSER and value in _RENAMED:
            self.error(f"{value} is now {_RENAMED[value]}, with the same words")
        if action.choices is not None:
            try:
                choose("/".join(action.option_strings) or action.dest, value, action.choices)
            except ValueError as error:
                raise argparse.ArgumentError(None, str(error)) from None


def _listed(commands: Mapping[str, str]) -> str:
    """List commands with the first line of their texts."""
    return "\n".join(f"  {name:<10} {text.partition(chr(10))[0]}" for name, text in commands.items())


def _branch(parser: _Parser) -> Any:
    """Give a parser commands; without one it prints its help."""
    parser.set_defaults(run=lambda args: parser.print_help())
    parser.usage = f"{parser.prog} COMMAND ...\n       {parser.prog} COMMAND --help"
    return parser.add_subparsers(dest="command", prog=parser.prog, help=argparse.SUPPRESS)


def make_parser(at_once: Container[str] = ()) -> _Parser:
    """Make the command line from the tables above. at_once: commands that get their flags now, by name or last word."""
    texts = {name: inspect.getdoc(run) or "" for name, (run, *_) in COMMANDS.items()}
    kinds = {name.partition(" ")[2]: text for name, text in texts.items() if " " in name}
    texts["sweep"] = f"Measure, estimate or predict memory and time at many sizes.\n\n{_listed(kinds)}\n\n{_SWEEP}"
    groups = [f"{title}:\n{_listed({name: texts[name] for name in names.split()})}" for title, names in _GROUPS.items()]
    made = _Parser("vaemem", "\n\n".join([_VAEMEM, *groups, _EXAMPLES]))
    made.add_argument("--version", action="version", version=f"vaemem {vaemem.__version__}")
    commands = _branch(made)
    sweeps = _branch(commands.add_parser("sweep", text=texts["sweep"]))
    for name, (run, function, flags) in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        sub = made.commands[name] = (sweeps if group else commands).add_parser(word, text=texts[name])
        sub.set_defaults(command=name)
        sub.add_flags = functools.partial(_add_all, sub, run, function, flags)
        if name in at_once or word in at_once:
            sub.complete()
    return made


def _add_all(sub: _Parser, run: Action, names: str, flags: str) -> None:
    """Add a command's flags: those of one function or more, and after each | those of a group with a title."""
    known, texts = dict[str, inspect.Parameter](), dict[str, str]()
    for function in map(pkgutil.resolve_name, names.split()[::-1]):
        known |= inspect.signature(function).parameters
        texts |= described(function)
    sub.set_defaults(run=functools.partial(_run, run, known), parser=sub)
    first, *groups = flags.split(" | ")
    for title, words in [("", first), *(group.split(": ") for group in groups)]:
        where = sub.add_argument_group(f"for {title}") if title else sub
        for flag in words.split():
            _add(sub, where, flag, known, texts)


def _once(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a repeated flag's pairs, with each key once."""
    made = dict[str, Any]()
    for key, value in pairs:
        if key in made:
            raise ArgumentError(name, f"{key} once", f"{made[key]} and {value}")
        made[key] = value
    return made


def _run(run: Action, known: Mapping[str, inspect.Parameter], args: argparse.Namespace) -> int | None:
    given = {name: value for name, value in vars(args).items() if name in known}
    given |= {name: _once(name, given[name]) for name in ("components", "calibrate") if type(given.get(name)) is list}
    if isinstance(given.get("calibrate"), str):
        given["calibrate"] = load_table(given["calibrate"])
    if getattr(args, "csv", None):
        check_writable(args.csv)
    return run(args, given)


def _add(sub: _Parser, where: Any, flag: str, known: Mapping[str, inspect.Parameter], texts: Mapping[str, str]) -> None:
    """Adds a flag to a command, with the description, the kind and the default of the function's argument."""
    settings = {key: value() if isinstance(value, Later) else value for key, value in FLAGS.get(flag, {}).items()}
    name = settings.pop("dest", flag)
    argument = known.get(name)
    text = settings.pop("help", "") or texts.get(name, "")
    default = settings.get("default", argument and argument.default)
    if isinstance(default, str | float | int) and not isinstance(default, bool):
        text += f" Default: {default}."
    if argument:
        kind = _KINDS.get(argument.annotation.removesuffix(" | None"), {})
        settings = {"default": argparse.SUPPRESS, **kind, **settings}
    if settings.get("nargs") and settings.get("choices"):  # which argparse would write four times
        settings["metavar"], text = name.upper(), f"{text} Any of {', '.join(settings['choices'])}."
    names = settings.pop("option", name if flag in WORDS else "--" + name.replace("_", "-")).split()
    if names[0].startswith("-"):
        settings["dest"] = name
    text = text.replace("%", "%%")
    said = next((one.option_strings[-1] for one in sub._actions if one.option_strings and one.help == text), None)
    offer(where.add_argument(*names, help=f"See {said}." if said else text, **settings), sub.prog.rpartition(" ")[2])
