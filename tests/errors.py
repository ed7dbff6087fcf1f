"""Errors by their attributes, so that another wording breaks no test."""

import contextlib

import pytest

from vaemem import ArgumentError


@contextlib.contextmanager
def refused(argument=None, got=None, place=None, kind=ArgumentError, names=(), **more):
    """Expect an error with these attributes, compared as text. names: texts that its message contains somewhere."""
    with pytest.raises(kind) as caught:
        yield caught
    given = {"argument": argument, "got": got, "place": place, **more}
    expected = {name: str(value) for name, value in given.items() if value is not None}
    assert {name: str(getattr(caught.value, name)) for name in expected} == expected
    assert [name for name in names if str(name) not in str(caught.value)] == []
    del caught  # the error's traceback holds this frame: together they would outlive the test's objects
