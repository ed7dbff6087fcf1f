"""The GPUs that predictions can be made for, without one: their device properties and their names."""

import difflib
import functools
import json
import re
from typing import Any, NamedTuple

from vaemem._common import shipped


class Gpu(NamedTuple):
    """A GPU as CUDA describes it.

    Attributes
    ----------
    name : str
        CUDA's device name, such as ``"NVIDIA GeForce RTX 4090"``.
    capability : str
        Compute capability, such as ``"8.9"``.
    total_memory : int
        Bytes, as CUDA reports them where `source` says so.
    properties : dict
        Device properties under the keys of cuDNN's device descriptor.
    source : str
        Where the figures of this GPU come from.
    """

    name: str
    capability: str
    total_memory: int
    properties: dict[str, Any]
    source: str

    @property
    def key(self) -> str:
        """The name without makers, brands and punctuation: ``"4090"``."""
        return _key(self.name)

    @property
    def sm(self) -> int:
        """Compute capability as a whole number: 89 for 8.9."""
        return int(self.capability.replace(".", ""))

    @property
    def device_json(self) -> str:
        """The device description that cuDNN reads."""
        return json.dumps(self.properties)


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())


@functools.cache
def _table() -> tuple[dict[str, Gpu], dict[str, str]]:
    """GPUs by device name, and device names by the key of each name they are known by."""
    data = json.loads(shipped("gpus.json"))
    gpus: dict[str, Gpu] = {}
    keys: dict[str, str] = {}
    for entry in data["gpus"]:
        capability = entry["compute_capability"]
        properties = data["every_gpu"] | data["compute_capability"][capability] | entry
        source = properties["source"]
        for key in ("source", "aliases", "compute_capability"):
            properties.pop(key)
        name = entry["deviceName"]
        gpus[name] = Gpu(name, capability, entry["totalGlobalMem"], properties, source)
        for known in [name, *entry["aliases"]]:
            keys[_key(known)] = name
    return gpus, keys


def gpu_names() -> list[str]:
    """Device names of the GPUs whose properties are shipped."""
    return list(_table()[0])


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Parameters
    ----------
    name : str
        CUDA's device name, or the part of it that tells it apart: ``"RTX 4090"``, ``"4090"``, ``"a100-80gb"``.

    Raises
    ------
    ValueError
        Where no shipped GPU goes by that name; the nearest names are given, and all of them.

    Examples
    --------
    >>> find_gpu("rtx 4090").capability
    '8.9'
    """
    if not isinstance(name, str):
        raise TypeError(f"gpu: want a name such as 'RTX 4090', got {type(name).__name__}")
    gpus, keys = _table()
    key = _key(name)
    if key in keys:
        return gpus[keys[key]]
    near = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    hint = f" (did you mean {', '.join(dict.fromkeys(keys[k] for k in near))}?)" if near else ""
    raise ValueError(f"gpu: want one of {', '.join(gpus)}; got {name!r}{hint}")
