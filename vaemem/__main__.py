# PYTHON_ARGCOMPLETE_OK
"""The command line, `python -m vaemem COMMAND` or `vaemem COMMAND`: its flags are in cli/flags.py."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from vaemem._common import Message, Named, need
from vaemem.cli import commands


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
        value = "" if part.value in (None, True, False) else f" {shlex.quote(str(part.value))}"
        return options[part.name][-1] + value

    text = "".join(map(option, getattr(message, "parts", [message])))
    name, colon, rest = text.partition(":")
    return (options.get(name) or [name])[-1] + colon + rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 2 for bad input (a sentence on stderr, no traceback), 130 for Ctrl-C."""
    # Nothing here gives NumPy's threads work, and they spin while they wait. It is read when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    completes = "_ARGCOMPLETE" in os.environ  # the shell asks what could come next
    parser = commands.parser(every=completes)
    if completes:
        need("argcomplete", "completion").autocomplete(parser)
    args, status = parser.parse_args(argv), 0
    try:
        status = args.run(args) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush when Python ends
    except (ValueError, OSError, ImportError, OverflowError, MemoryError, RuntimeError) as error:
        print(f"vaemem {args.command}: {_said(error, args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"vaemem {args.command}: stopped", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
