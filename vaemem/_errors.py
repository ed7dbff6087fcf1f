"""The errors that vaemem raises. Each error is also a standard exception, so code that catches the standard exception
catches the error too.

Exception
├── ValueError
│   └── ArgumentError           an argument has a value that cannot be used
│       ├── ArgumentTypeError   ... or a type (also a TypeError)
│       ├── ArgumentOverflowError  ... or a size too large to compute with (also an OverflowError)
│       └── FileError           a file that an argument names cannot be used
│           └── NoFileError     ... or is not there (also a FileNotFoundError)
├── ImportError
│   └── MissingPackageError     an optional package is not installed
├── MemoryError
│   └── OutOfMemoryError        the simulated GPU is full (defined in C, by csrc/python/py_allocator.c)
└── Cancelled                   a run was ended by its `cancel` event (defined by engine/arguments.py)
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias


class Named(NamedTuple):
    """An argument that a message advises: ``pad='reflect'``, or ``pad=`` if the value is left open. typed: the value in
    the words of the command line, if they differ."""

    name: str
    value: Any = None
    typed: str | None = None

    def spell(self, flags: Mapping[str, str]) -> str:
        """Spell it as Python does, or as the command line does if it has a flag of that name."""
        if self.name not in flags:
            return f"{self.name}={'' if self.value is None else repr(self.value)}"
        value = "" if self.value in (None, True, False) else f" {shlex.quote(self.typed or str(self.value))}"
        return flags[self.name] + value


Words: TypeAlias = "str | tuple[str | Named, ...]"


class ArgumentError(ValueError):
    """An argument has a value that cannot be used. The message is made from the attributes.

    Attributes
    ----------
    argument : str
        The name of the argument.
    wanted : str or tuple
        The values that can be used, in words. A tuple holds the names of other arguments as objects.
    got : str or tuple
        The value that came, as the message shows it. If `wanted` is empty, the whole problem in words.
    advice : str or tuple
        What to do, such as the nearest name. May be empty.
    place : str
        The part of the argument that is wrong, such as ``"row 3"`` or a config's key. Empty for the whole argument.

    Examples
    --------
    >>> try:
    ...     predict("sdxl", "decode", 1001, 1024)
    ... except vaemem.ArgumentError as error:
    ...     print(error.argument, "|", error.wanted, "|", error.got)
    height | a multiple of 8 | 1001
    """

    path = ""  # a FileError's

    def __init__(
        self, argument: str = "", wanted: Words = "", got: Words = "", advice: Words = "", place: str = ""
    ) -> None:
        super().__init__(argument, wanted, got, advice, place)
        self.argument, self.wanted, self.got, self.advice, self.place = argument, wanted, got, advice, place

    def message(self, flags: Mapping[str, str]) -> str:
        """Make the message. flags: {name of an argument: its flag on the command line}."""
        wanted, got, advice = (
            words if isinstance(words, str) else "".join(w if isinstance(w, str) else w.spell(flags) for w in words)
            for words in (self.wanted, self.got, self.advice)
        )
        problem = ", got ".join(filter(None, (wanted and f"expected {wanted}", got)))
        what = "; ".join(filter(None, (problem, advice)))
        name, _, key = self.argument.partition("[")  # of "components['unet']"
        key = key.strip("']")
        named = f"{flags[name]} {key}".strip() if name in flags else self.argument
        return ": ".join(filter(None, (named, self.path, self.place, what)))

    def __str__(self) -> str:
        return self.message({})


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a type that cannot be used.

    Examples
    --------
    >>> try:
    ...     predict("sdxl", "decode", 1024, 1024, gpu=4090)
    ... except vaemem.ArgumentTypeError as error:
    ...     print(error)
    gpu: expected a name such as 'RTX 4090', got int
    """


class ArgumentOverflowError(ArgumentError, OverflowError):
    """An argument has a size that is too large to compute with: its number of bytes does not fit into 64 bits.

    Examples
    --------
    >>> try:
    ...     vae.estimate("decode", 1024, 1024, batch=2**50)
    ... except vaemem.ArgumentOverflowError as error:
    ...     print(error.argument, "|", error.wanted)
    batch | a run whose bytes can be addressed
    """


class FileError(ArgumentError):
    """A file that an argument names cannot be used: its content or its path is wrong.

    Attributes
    ----------
    path : str
        The path of the file. `place` is a place in the file, such as ``"line 3"``.

    Examples
    --------
    >>> try:
    ...     VAE.load("notes.txt")
    ... except vaemem.FileError as error:
    ...     print(error.argument, error.path)
    path notes.txt
    """

    def __init__(self, *parts: Any, path: str | os.PathLike[str] = "", **others: Any) -> None:
        super().__init__(*parts, **others)
        self.path = os.fspath(path)


class NoFileError(FileError, FileNotFoundError):
    """A file that an argument names is not there.

    Examples
    --------
    >>> try:
    ...     VAE.load("missing.safetensors")
    ... except vaemem.NoFileError as error:
    ...     print(error.got)
    no such file
    """


class MissingPackageError(ImportError):
    """An optional package is not installed.

    Attributes
    ----------
    packages : sequence of str
        The names of the packages.
    install : str
        The command that installs them.

    Examples
    --------
    >>> error = vaemem.MissingPackageError("fit", ["scipy"], "pip install 'vaemem[fit]'", "No module named 'scipy'")
    >>> print(error)
    fit needs scipy: pip install 'vaemem[fit]' (No module named 'scipy')
    """

    def __init__(self, what: str, packages: Sequence[str], install: str, why: str) -> None:
        super().__init__(what, packages, install, why)
        self.packages, self.install = packages, install

    def __str__(self) -> str:
        what, packages, install, why = self.args
        return f"{what} needs {', '.join(packages)}: {install} ({why})"


@contextlib.contextmanager
def inside(
    argument: str, place: str = "", path: str | os.PathLike[str] = "", caught: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise what the block refuses as the fault of `argument`: the argument that was refused becomes a place in it.
    path: the file that `argument` names. caught: other errors, whose text becomes the problem."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ArgumentError, *caught)):
            raise
        inner = error if isinstance(error, ArgumentError) else ArgumentError("", "", str(error))
        names = (place, "" if inner.path else inner.argument, inner.place)
        parts = argument, inner.wanted, inner.got, inner.advice, ": ".join(filter(None, names))
        if file := inner.path or path:
            kind = NoFileError if isinstance(error, FileNotFoundError) else FileError
            raise kind(*parts, path=file) from None
        raise type(inner)(*parts) from None
