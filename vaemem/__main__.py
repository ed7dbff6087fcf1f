# PYTHON_ARGCOMPLETE_OK
"""The command line, `python -m vaemem COMMAND` or `vaemem COMMAND`: its flags are in cli/flags.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from vaemem._errors import ArgumentError, FileError
from vaemem.cli import completion
from vaemem.cli.parsing import make_parser


def _describe(error: BaseException, args: argparse.Namespace) -> str:
    """Describe an error with a command's flags in the place of the arguments that it names."""
    if isinstance(error, OSError) and error.errno and error.filename:
        name = next((name for name, value in vars(args).items() if value == error.filename), "file")
        reason = str(error.strerror)
        got = f"{reason[:1].lower()}{reason[1:]}"
        error = FileError(name, "a file that can be opened", got, path=str(error.filename))
    flags = {one.dest: one.option_strings[-1] for one in args.parser._actions if one.option_strings}
    return error.message(flags) if isinstance(error, ArgumentError) else str(error)


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
        print(f"vaemem {args.command}: {_describe(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vaemem {args.command}: stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
