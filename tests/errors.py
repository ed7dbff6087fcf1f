"""Errors, warnings and a command's complaints by their subjects and values, so that another sentence breaks no test.

An error of ours has attributes. Every other message begins with its subject and a colon: that head is its argument,
such as "decode" of "decode: the result is not finite". `names` are values that a message contains, such as a size, a
path or another library's function. tests/test_rooms.py refuses words of a sentence there."""

import contextlib

import pytest

from vaemem import ArgumentError


def is_about(message, argument=None, names=()):
    """Compare the head of a message, and look for these values in it."""
    text = str(message)
    return text.startswith(f"{argument}: " if argument else "") and all(str(name) in text for name in names)


@contextlib.contextmanager
def refused(argument=None, got=None, place=None, kind=ArgumentError, names=(), **more):
    """Expect an error with these attributes, compared as text. names: values that its message contains somewhere."""
    with pytest.raises(kind) as caught:
        yield caught
    given = {"argument": argument, "got": got, "place": place, **more}
    expected = {name: str(value) for name, value in given.items() if value is not None}
    head = None if hasattr(caught.value, "argument") else expected.pop("argument", None)
    assert {name: str(getattr(caught.value, name)) for name in expected} == expected
    assert is_about(caught.value, head, names), (str(caught.value), head, names)
    del caught  # the error's traceback holds this frame: together they would outlive the test's objects


@contextlib.contextmanager
def warned(argument=None, names=(), kind=RuntimeWarning):
    """Expect a warning with this head and these values."""
    with pytest.warns(kind) as caught:
        yield caught
    told = [str(one.message) for one in caught if issubclass(one.category, kind)]
    assert any(is_about(text, argument, names) for text in told), (told, argument, names)


def complains(text, command, argument=None, names=()):
    """Compare the line in which a command says why it ended: its name, then its argument, and these values."""
    told = [line for line in text.splitlines() if line.startswith(f"vaemem {command}: ")]
    return any(is_about(line, ": ".join(filter(None, (f"vaemem {command}", argument))), names) for line in told)
