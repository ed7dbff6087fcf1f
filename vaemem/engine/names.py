"""What people call models: the one register of all commands and runtimes, vaemem/data/models.json."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

from vaemem._common import letters, shipped


class Called(NamedTuple):
    """What a name stands for.

    vae: the known VAE that the model has; "" where it has none
    pipeline: the recorded pipeline whose modules it has; "" for none
    of: whose VAE and modules they are, where that is another model
    why: why there is no answer for the model
    """

    vae: str = ""
    pipeline: str = ""
    of: str = ""
    why: str = ""


@functools.cache
def _register() -> tuple[dict[str, Called], dict[str, Called]]:
    """By whole names, and by the beginnings of others, each in `letters`."""
    whole: dict[str, Called] = {}
    beginnings: dict[str, Called] = {}
    for entry in json.loads(shipped("models.json"))["models"]:
        called = Called(**{key: value for key, value in entry.items() if key != "names"})
        for name in entry["names"]:
            kept = beginnings if name.endswith("*") else whole
            kept |= dict.fromkeys(map(letters, (name.rstrip("*"), _last(name.rstrip("*")))), called)
    return whole, beginnings


def _last(name: str) -> str:
    """A repository's name without its owner."""
    return name.rpartition("/")[2]


def find_called(name: Any) -> Called | None:
    """What a name stands for; None for a name that is not in the register. The same repository of another owner is
    taken for a copy."""
    if not isinstance(name, str):
        return None
    whole, beginnings = _register()
    written, last = letters(name), letters(_last(name))
    if found := whole.get(written):
        return found
    copied = whole.get(last) or next((beginnings[one] for one in beginnings if last.startswith(one)), None)
    return copied and copied._replace(of=copied.of or _last(name))


def whole_names(kind: str) -> dict[str, str]:
    """{name in `letters`: the VAE, or the pipeline} of every whole name that has one."""
    return {name: getattr(called, kind) for name, called in _register()[0].items() if getattr(called, kind)}


def shared_note(name: Any, what: str = "VAE") -> str:
    """Whose VAE, or what else, answers for a name; nothing where it is the model's own."""
    called = find_called(name)
    return f"{name} has {called.of}'s {what}, which this is about" if called and called.of else ""
