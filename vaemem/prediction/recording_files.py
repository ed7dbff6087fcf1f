"""Recorded pipelines: files that end with .vaemem. data/pipelines has some; people record others on their machine
(`vaemem.pytorch.record_pipeline`).

A file is JSON: a row of facts (`Pipeline`), the pipeline's text, a program for each module, and a config for each VAE.
Nobody knows who wrote it: reading checks everything that is used.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from vaemem._common import DTYPES, shipped
from vaemem._errors import ArgumentError, inside

SUFFIX = ".vaemem"
PIPELINE_FOLDER, WORKFLOW_FOLDER = "vaemem/data/pipelines:", "vaemem/data/workflows:"
PACKAGED = PIPELINE_FOLDER, WORKFLOW_FOLDER  # begin the paths of recordings in the package
FILE_FORMAT = 2
_MOST_BYTES = 1 << 28
_MOST_NODES, _MOST_WEIGHTS = 1 << 16, 1 << 17
_ROLE = re.compile(r"[A-Za-z_]\w{0,63}")
_COUNT: Callable[[Any], bool] = lambda value: type(value) is int and 0 <= value < 1 << 20  # noqa: E731


def _are_counts(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(map(_COUNT, value))


_ROW: Mapping[str, Callable[[Any], bool]] = {
    "dtype": lambda value: value in DTYPES,
    "vae_dtype": lambda value: value in ("", *DTYPES),
    "tokens": _COUNT, "steps": lambda value: _COUNT(value) and value > 0, "frames": _COUNT,
    "most_batch": _COUNT, "longest": _COUNT,
    "factor": lambda value: _COUNT(value) and value > 0, "unit": lambda value: _COUNT(value) and value > 0,
    "frame_factor": lambda value: _COUNT(value) and value > 0,
    **dict.fromkeys("has_words guides unguided encodes packs converts loras".split(), lambda v: isinstance(v, bool)),
    "aside": lambda value: isinstance(value, list) and all(isinstance(role, str) for role in value),
    "clip": lambda value: _are_counts(value, 3) and min(value) > 0,
    "sound": lambda value: _are_counts(value, 2) and value[1] > 0,
    "frame_range": lambda value: _are_counts(value, 2) and 0 < value[0] and value[1] in (0, max(value)),
    "workflow": lambda value: isinstance(value, str) and value.isidentifier(),
    "usage": lambda value: isinstance(value, int | float) and 0 <= value < 1 << 20,
    "blocks": lambda value: isinstance(value, str) and len(value) < 256,
    "decodes": lambda value: isinstance(value, list) and all(isinstance(one, list) for one in value),
    "owns_tiles": lambda value: isinstance(value, bool),
}  # fmt: skip
OPTIONAL_FACTS = "clip sound frame_range workflow usage blocks decodes owns_tiles".split()  # that a row may lack


def is_recording(name: Any) -> bool:
    """Tell whether a pipeline's name is the path of a recording."""
    return isinstance(name, str | os.PathLike) and os.fspath(name).endswith(SUFFIX)


def component_of(path: str, role: str) -> str:
    """Return the name of a recording's component, or of its "text". It has a digest of the file: caches by names know
    nothing of a file that was recorded again. path: a shipped one's begins as `PACKAGED`"""
    digest = "" if path.startswith(PACKAGED) else read_recording(path)["digest"]
    return f"{path}:{role}@{digest}"


def is_recorded_component(name: str) -> bool:
    """Tell whether a component's name is that of a recording's."""
    return f"{SUFFIX}:" in name


def find_component(name: str) -> tuple[Mapping[str, Any], str]:
    """Return the contents of a component's recording, and its role. ValueError if the file was recorded again."""
    path, _, rest = name.rpartition(":")
    role, _, digest = rest.rpartition("@")
    if path.startswith(PACKAGED):
        return _read_shipped(path), role
    data = read_recording(path)
    if data["digest"] != digest:
        with inside("pipeline", path=path):
            raise ArgumentError("", "the file of the first answer", "one that was recorded again", "ask anew")
    return data, role


def read_recording(path: str) -> Mapping[str, Any]:
    """Return the contents of a recording. OSError if it cannot be read; ValueError, which names the file, if it is
    wrong."""
    with inside("pipeline", path=path, caught=(OSError,)):
        stat = os.stat(path)
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _read_shipped(path: str) -> Mapping[str, Any]:
    folder, _, name = path.partition(":")
    data: Mapping[str, Any] = json.loads(shipped(folder.rpartition("/")[2], name))
    return data


@functools.lru_cache(maxsize=16)
def _read(path: str, stamp: int, size: int) -> Mapping[str, Any]:
    import zlib  # the page has no such module, and reads no user's file

    with inside("pipeline", path=path, caught=(ValueError, OSError, RecursionError)):
        if size > _MOST_BYTES:
            raise ArgumentError("", f"at most {_MOST_BYTES >> 20} MiB", f"{size >> 20}")
        with open(path, "rb") as file:
            contents = file.read()
        data = json.loads(contents.decode("utf-8"))
        _check(data)
        return {**data, "digest": f"{zlib.crc32(contents):08x}"}


def _want(what: str, value: Any, is_right: bool) -> None:
    if not is_right:
        raise ArgumentError(what, "a value as vaemem writes it", repr(value)[:60])


def _check(data: Any) -> None:
    """Raise ValueError for contents that nothing may rely on."""
    _want("file", data, isinstance(data, dict))
    _want("format", data.get("format"), data.get("format") == FILE_FORMAT)
    for name in ("about", "source", "text"):
        _want(name, data.get(name), isinstance(data.get(name), str))
    _want("about", data["about"], len(data["about"]) < 256 and bool(data["about"].split()))
    for name in ("row", "modules", "vaes"):
        _want(name, data.get(name), isinstance(data.get(name), dict))
    _want("row", data["row"], set(data["row"]) | {*OPTIONAL_FACTS} == set(_ROW))
    for name, value in data["row"].items():
        _want(f"row: {name}", value, bool(_ROW[name](value)))
    notes = data.get("notes")
    _want("notes", notes, isinstance(notes, list) and all(isinstance(note, str) for note in notes))
    roles = data.get("roles")
    _want("roles", roles, isinstance(roles, list) and all(isinstance(role, str) for role in roles))
    known = {*data["modules"], *data["vaes"]}
    _want("roles", roles, sorted(roles) == sorted(known) and bool(data["modules"]) and all(map(_ROLE.fullmatch, roles)))
    _want("vaes", [*data["vaes"]], {*data["vaes"]} <= {"vae"} <= {*roles})
    others = [role for role in data["modules"] if role != "vae" and not role.startswith("text_encoder")]
    _want("modules", [*data["modules"]], bool(others))
    for role, config in data["vaes"].items():
        _want(f"vaes: {role}", config, isinstance(config, dict))
    for role, module in data["modules"].items():
        with inside(role):
            _check_module(module)


def _check_module(module: Any) -> None:
    _want("module", module, isinstance(module, dict))
    for name, kind in {"about": str, "source": str, "variables": list, "derived": dict, "calls": dict}.items():
        _want(name, module.get(name), isinstance(module.get(name), kind))
    _want("variables", module["variables"], all(isinstance(one, str) for one in module["variables"]))
    for follows in module["derived"].values():
        _want("derived", follows, isinstance(follows, list) and [*map(type, follows)] == [str, int, int])
    for call in module["calls"].values():
        _want("calls", call, isinstance(call, dict))
        for name in ("sizes", "modules", "convs", "attentions"):
            _want(name, call.get(name), isinstance(call.get(name), list))
        _want("calls", call, all(isinstance(one, str) for one in (*call["sizes"], *call["modules"])))
        _want("calls", call, all(isinstance(one, list) for one in (*call["convs"], *call["attentions"])))
    _check_weights(module.get("weights"))


def _check_weights(nodes: Any) -> None:
    """Check the tree of weights: a node has only children before it, and there are not too many in all."""
    _want("weights", nodes, isinstance(nodes, list) and 0 < len(nodes) <= _MOST_NODES)
    counts = list[int]()
    for node in nodes:
        _want("weights", node, isinstance(node, str))
        count = 0
        for word in node.split():
            name, is_child, child = word.partition("=")
            if is_child:
                _want("weights", word, child.isdecimal() and int(child) < len(counts))
                count += counts[int(child)]
            else:
                parts = name.split(":")
                _want("weights", word, len(parts) == 3)
                count += 1
        _want("weights", node, count <= _MOST_WEIGHTS)
        counts.append(count)
