"""The names that people give to models: the register for all commands and runtimes, vaemem/data/models.json."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

from vaemem._common import letters, shipped


class Called(NamedTuple):
    """Meaning of a name.

    vae: the known VAE of the model; "" if it has none
    pipeline: the recorded pipeline with the model's modules; "" if there is none
    of: the model that its VAE and modules belong to, if that is another one
    vae_of: the same if only the VAE is another model's
    needs: the names that a pipeline needs if this one means several
    why: why there is no answer for the model; with a pipeline, why there is none for its VAE alone
    """

    vae: str = ""
    pipeline: str = ""
    of: str = ""
    vae_of: str = ""
    needs: str = ""
    why: str = ""


@functools.cache
def _register() -> tuple[dict[str, Called], dict[str, Called]]:
    """Return meanings by whole names, and by beginnings of names, each in `letters`."""
    whole: dict[str, Called] = {}
    beginnings: dict[str, Called] = {}
    for entry in json.loads(shipped("models.json"))["models"]:
        called = Called(**{key: value for key, value in entry.items() if key != "names"})
        for name in entry["names"]:
            kept = beginnings if name.endswith("*") else whole
            kept |= dict.fromkeys(map(letters, (name.rstrip("*"), _last(name.rstrip("*")))), called)
    return whole, beginnings


def _last(name: str) -> str:
    """Return a repository's name without its owner."""
    return name.rpartition("/")[2]


def find_called(name: Any) -> Called | None:
    """Return the meaning of a name, or None. A repository of the same name from another owner counts as a copy."""
    if not isinstance(name, str):
        return None
    whole, beginnings = _register()
    written, last = letters(name), letters(_last(name))
    if found := whole.get(written):
        return found
    copied = whole.get(last) or next((beginnings[one] for one in beginnings if last.startswith(one)), None)
    return copied and copied._replace(of=copied.of or _last(name))


def whole_names(kind: str) -> dict[str, str]:
    """Return {name in `letters`: VAE or pipeline} for all full names that have one; beginnings of names are left out.
    kind: "vae" or "pipeline"."""
    return {name: getattr(called, kind) for name, called in _register()[0].items() if getattr(called, kind)}


def shared_note(name: Any, what: str = "VAE") -> str:
    """Return a sentence that says if another model's VAE, or `what`, answers for a name; otherwise empty."""
    called = find_called(name)
    of = called and (called.of or (called.vae_of if what == "VAE" else ""))
    return f"{name} has {of}'s {what}, and the answer is for that one" if of else ""
