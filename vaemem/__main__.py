# PYTHON_ARGCOMPLETE_OK
"""The command line, `python -m vaemem COMMAND` or `vaemem COMMAND`: its flags are in cli/flags.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from vaemem._common import Message, Named
from vaemem.cli import completion
from vaemem.cli.parsing import make_parser


def _said(error: BaseException, args: argparse.Namespace) -> str:
    """What an error says, with a command's flags in the place of the arguments that it names; of a file that cannot be
    opened, the argument that it is."""
    message = error.args[0] if error.args else ""
    options = {one.dest: one.option_strings for one in args.parser._actions}
    if isinstance(error, OSError) and error.errno and error.filename:
        name = next((name for name, value in vars(args).items() if value == error.filename), "file")
        said = str(error.strerror)
        message = f"{name}: want a file that can be opened, got {error.filename}: {said[:1].lower()}{said[1:]}"
    elif not isinstance(message, Message):
        message = str(error)

    def option(part: object) -> str:
        if not isinstance(part, Named) or not options.get(part.name):
            return str(part)
        value = "" if part.value in (None, True, False) else f" {shlex.quote(part.typed or str(part.value))}"
        return f"{options[part.name][-1]}{value}"

    text = "".join(map(option, getattr(message, "parts", [message])))
    name, colon, rest = text.partition(":")
    return f"{(options.get(name) or [name])[-1]}{colon}{rest}"


class _Output:
    """Standard output that goes on when nobody reads it any more, so that the command still has its exit status."""

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _do(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())  # also for what Python writes when it ends
            return None

    def write(self, text: str) -> int:
        self._do(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self._file.flush)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for bad input (a sentence on stderr, no traceback), 130 for Ctrl-C."""
    # Nothing here gives NumPy's threads work, and they spin while they wait. It is read when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if completion.is_asked():
        completion.answer(make_parser)
    args, status = make_parser().parse_args(argv), 0
    if sys.stdout is None:
        print(f"vaemem {args.command}: standard output is closed: open it or redirect it to a file", file=sys.stderr)
        return 2
    try:
        with contextlib.redirect_stdout(_Output(sys.stdout)):
            status = args.run(args) or 0
            sys.stdout.flush()
    except BrokenPipeError:  # a pipe other than standard output
        pass
    except (ValueError, OSError, ImportError, OverflowError, MemoryError, RuntimeError) as error:
        print(f"vaemem {args.command}: {_said(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vaemem {args.command}: stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
