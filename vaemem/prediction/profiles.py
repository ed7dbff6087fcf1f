"""Recorded answers of cuDNN, one file for a compute capability and a cuDNN version.

Most GPUs of one capability get the same answers; where they do not, the file names those that it is for (``sm75-t4``).

A file holds formulas, and for each convolution and dtype a decision tree that picks one: cuDNN's instant heuristic is
a decision tree itself. A formula is ``[tensors, index, tile, per_tile, constant]`` and means, in bytes,

    tensors
    + 128 * (index * oh * ow // 128 + 1)    where index is not 0
    + per_tile * ceil(P / tile)             where tile is not 0
    + constant

with `tensors` a sum such as ``i+o+f`` or ``i+f+3o``: input, output and filter, each rounded up to 16 bytes (``I``,
``O``, ``F``: with the channels padded to 16 bytes), and P the output pixels of the batch. A tree is a formula's number,
or ``[feature, limit, tree up to it, tree beyond it]`` where the feature is ``P``, ``h``, ``w`` (of the input) or ``m``,
the pixels that P lacks to a multiple of 128. A file may also hold rules that go before its trees, and name the file
that answers what it does not.
"""

import functools
import json
import re
from importlib import resources
from typing import Any, NamedTuple

from vaemem._common import ELEMENT_BYTES, shipped
from vaemem.prediction.gpus import Gpu

_FILE = re.compile(r"sm(\d+)((?:-\w+)*)_cudnn(\d+\.\d+\.\d+)\.json")


class Conv(NamedTuple):
    """A forward convolution as PyTorch gives it to cuDNN: square filter, one group, no dilation, bias added outside."""

    dtype: str
    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    stride: int = 1
    padding: int = 1
    layout: str = "nchw"

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        extra = 2 * self.padding - self.r
        return (self.h + extra) // self.stride + 1, (self.w + extra) // self.stride + 1


def version_number(version: str) -> int:
    """10000 * major + 100 * minor + patch of ``"9.10.2"``; a fourth part is left out. ValueError for no version."""
    parts = version.split(".")
    if not 2 <= len(parts) <= 4 or not all(part.isdigit() for part in parts):
        raise ValueError(f"cudnn_version: want one such as '9.10.2', got {version!r}")
    numbers = [int(part) for part in parts] + [0]
    return 10000 * numbers[0] + 100 * numbers[1] + numbers[2]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def sizes(conv: Conv) -> dict[str, int]:
    """What formulas and trees speak of, for one convolution."""
    dtype, n, c, h, w, k, r = conv[:7]
    size = ELEMENT_BYTES[dtype]
    oh, ow = conv.out
    pixels = n * oh * ow
    wide_c, wide_k = _up(c * size, 16), _up(k * size, 16)
    return {
        "i": _up(n * c * h * w * size, 16),
        "o": _up(pixels * k * size, 16),
        "f": _up(k * c * r * r * size, 16),
        "I": n * h * w * wide_c,
        "O": pixels * wide_k,
        "F": wide_k * wide_c // size * r * r,
        "P": pixels,
        "Q": oh * ow,
        "h": h,
        "w": w,
        "m": -pixels % 128,
    }


@functools.cache
def _terms(tensors: str) -> tuple[tuple[int, str], ...]:
    """``"i+f+3o"`` as ((1, "i"), (1, "f"), (3, "o"))."""
    return tuple((int(term[:-1] or 1), term[-1]) for term in tensors.split("+") if term)


def formula_bytes(formula: list[Any], s: dict[str, int]) -> int:
    """A formula's value for the `sizes` of one convolution."""
    tensors, index, tile, per_tile, constant = formula
    total = constant
    for times, name in _terms(tensors):
        total += times * s[name]
    if index:
        total += 128 * (index * s["Q"] // 128 + 1)
    if tile:
        total += per_tile * -(-s["P"] // tile)
    return total


class Profile:
    """One profile file.

    Attributes
    ----------
    file : str
        Its name in ``vaemem/data/profiles``.
    version : str
        cuDNN's version.
    how : str
        ``"asked"``, ``"measured"`` or ``"inferred"``.
    recorded : dict
        How it was made and checked, as the file says.
    """

    def __init__(self, data: dict[str, Any], file: str = ""):
        self.file = file
        other = data.get("otherwise")
        self._otherwise = _load(other) if other else None
        self.capability: str = data["capability"]
        self.version: str = data["cudnn"]
        self.recorded: dict[str, Any] = data["recorded"]
        self.how: str = self.recorded["how"]
        self._rules: list[dict[str, Any]] = data.get("rules", [])
        self._formulas: list[Any] = data.get("formulas", [])
        self._trees: dict[str, Any] = data.get("convolutions", {})
        self._source = f"profile: compute capability {self.capability}, cuDNN {self.version}, {self.how}"

    def conv(self, conv: Conv) -> tuple[int, str] | None:
        """(bytes, source) of a convolution of NCHW tensors, TF32 allowed; None where none of its kind was recorded."""
        s = sizes(conv)
        for rule in self._rules:
            if _applies(rule, conv):
                return formula_bytes(rule["formula"], s), f"{self._source} ({rule['name']})"
        tree = self._trees.get(f"{conv.c},{conv.k},{conv.r},{conv.stride},{conv.padding}/{conv.dtype}")
        if isinstance(tree, str):
            tree = self._trees[tree]
        if tree is None:
            answer = self._otherwise.conv(conv) if self._otherwise else None
            return answer and (answer[0], f"{answer[1]}, in place of {self.version}")
        while isinstance(tree, list):
            feature, limit, up_to, beyond = tree
            tree = up_to if s[feature] <= limit else beyond
        formula = self._formulas[tree]
        return None if formula is None else (formula_bytes(formula, s), self._source)


def _applies(rule: dict[str, Any], conv: Conv) -> bool:
    if conv.dtype not in rule["dtypes"] or (conv.r, conv.stride) != (rule["r"], rule["stride"]):
        return False
    if "channels" in rule and [conv.c, conv.k] not in rule["channels"]:
        return False
    low, high = rule["pixels"]
    return low <= conv.h * conv.w <= high


@functools.cache
def _load(name: str) -> Profile:
    data = json.loads(shipped("profiles", name))
    if "same_as" in data:  # another version that gave the same answers
        name = data["same_as"]
        data = json.loads(shipped("profiles", name)) | data
    return Profile(data, name)


@functools.cache
def profile_files() -> dict[str, tuple[int, list[str], int]]:
    """Shipped profiles: {file: (capability such as 89, keys of its GPUs or none for all, version number)}."""
    found = {}
    for entry in (resources.files("vaemem") / "data" / "profiles").iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            found[entry.name] = int(match[1]), match[2].split("-")[1:], version_number(match[3])
    return found


def nearest_profile(gpu: Gpu, version: str | None) -> Profile | None:
    """The profile for GPUs like this one whose cuDNN is nearest to `version` (None: the newest); None where none is."""
    have = {
        number: name
        for name, (sm, keys, number) in profile_files().items()
        if sm == gpu.sm and (not keys or gpu.key in keys)
    }
    if not have:
        return None
    wanted = max(have) if version is None else version_number(version)
    return _load(have[min(have, key=lambda number: (abs(number - wanted), -number))])
