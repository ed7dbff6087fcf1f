# PYTHON_ARGCOMPLETE_OK
"""The command line, `python -m vaemem COMMAND` or `vaemem COMMAND`: its flags are in cli/flags.py."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # main imports all others, so that Ctrl-C meanwhile ends the command in its way
    import argparse

# Kept are the colours of answers (_render.py), lines, tabs, and tqdm's carriage returns at either end of a text.
_CONTROL = re.compile(r"(\x1b\[(?:1;\d\d|22;39)m|\A\r|\r\Z)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _describe(error: BaseException, args: argparse.Namespace) -> str:
    """Describe an error with a command's flags in the place of the arguments that it names."""
    from vaemem._errors import ArgumentError, FileError

    if isinstance(error, OSError) and error.errno and error.filename:
        name = next((name for name, value in vars(args).items() if value == error.filename), "file")
        reason = str(error.strerror)
        got = f"{reason[:1].lower()}{reason[1:]}"
        error = FileError(name, "a file that can be opened", got, path=str(error.filename))
    flags = {one.dest: one.option_strings[-1] for one in args.parser._actions if one.option_strings}
    if isinstance(error, ArgumentError):
        return error.message(flags)
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


class _Output:
    """Standard output, or standard error. Writing goes on when nobody reads any more, so that the command keeps its
    exit status. A terminal gets no control characters, because names of files could hold them. Files and pipes get the
    text unchanged."""

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
        shown = text
        if self._file.isatty():
            shown = _CONTROL.sub(lambda found: found[1] or f"\\x{ord(found[0]):02x}", text)
        self.draw(shown)
        return len(text)

    def draw(self, text: str) -> None:
        """Write a text of ours, with its control characters. Escape what the encoding lacks."""
        encoding = self._file.encoding or "utf-8"
        self._do(self._file.write, text.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        self._do(self._file.flush)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for bad input (a sentence on stderr, no traceback), 130 for Ctrl-C."""
    # Nothing here gives NumPy's threads work, and they spin while they wait. It is read when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    name = "vaemem"
    with contextlib.ExitStack() as stack:
        for redirect, file in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if file is not None:
                stack.enter_context(redirect(_Output(file)))
        try:
            from vaemem.cli import completion
            from vaemem.cli.parsing import make_parser

            if completion.is_asked():
                completion.answer(make_parser)
            args = make_parser().parse_args(argv)
            name = f"vaemem {args.command}"
            return _run(args)
        except KeyboardInterrupt:
            print(f"{name}: stopped", file=sys.stderr)
            return 130


def _run(args: argparse.Namespace) -> int:
    """Run the command of parsed arguments."""
    if sys.stdout is None:
        print(f"vaemem {args.command}: standard output is closed: open it or redirect it to a file", file=sys.stderr)
        return 2
    status = 0
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # a pipe other than standard output
        pass
    except (ValueError, OSError, ImportError, OverflowError, MemoryError, RuntimeError) as error:
        print(f"vaemem {args.command}: {_describe(error, args)}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
