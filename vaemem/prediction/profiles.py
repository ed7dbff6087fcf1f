"""Recorded answers of cuDNN, one file for a compute capability and a cuDNN version.

Most GPUs of one capability get the same answers; where they do not, the file names those that it is for (``sm75-t4``).

A file holds formulas, and for each convolution and kind of question a decision tree that picks one: cuDNN's instant
heuristic is a decision tree itself. A kind is a dtype (``float32 strict`` where TF32 is not allowed), with ``nhwc``
behind it for channels_last tensors. A formula is ``[tensors, index, tile, per_tile, constant]`` and means, in bytes,

    tensors
    + 128 * (index * oh * ow // 128 + 1)    where index is not 0
    + per_tile * ceil(p / tile)             where tile is not 0
    + constant

with `tensors` a sum such as ``i+o+f`` or ``i+f+3o``: input, output and filter, each rounded up to 16 bytes (``I``,
``O``, ``F``: with the channels padded to 16 bytes), and P the output pixels of the batch.

A key such as ``128,64,3,1,1/float16`` names channels of input and output, filter, stride, padding and kind. Three
dimensions add the frames of filter and input. Its tree is a text such as ``P400 h15 0 1 2``: a number is a formula's,
and ``P400`` takes the tree behind it for a P up to 400, and the one behind that beyond. It speaks of ``P``, ``Q`` (P of
one image), ``h``, ``w`` (of the input), ``n`` (the batch) and ``m``, the pixels that P lacks to a multiple of 128. In
place of a tree stands the key that has the same one.

If input or output has more than 2^31 elements, cuDNN works on a part of the batch at a time: ``i``, ``o``, ``I``, ``O``
and ``p``, the output pixels, are of the largest part up to that. A single image of 2^31 or more takes no workspace.

A file may also hold rules that go before its trees, and name the file that answers what it does not. An inferred
profile answers for its own version alone. ``older.json`` holds rules for versions that were never asked.
"""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import shipped
from vaemem.prediction.gpus import Gpu, find_gpu

_FILE = re.compile(r"sm(\d+)((?:-\w+)*)_cudnn(\d+\.\d+\.\d+)\.json")

Extents = int | tuple[int, ...]  # the same along every dimension, or one for each


class Conv(NamedTuple):
    """A convolution as PyTorch gives it to cuDNN; the bias is added outside of it.

    Extents are an int, or a tuple with one for each dimension. A convolution of one dimension is one of two with a
    height of 1. A one-sided padding is a padded input with `padding` 0.

    Attributes
    ----------
    dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``, of input, filter and output.
    n, c, h, w : int
        Input: batch, channels, height and width, before `padding`.
    k : int
        Channels of the output.
    r : int or tuple of int
        The filters' height and width.
    stride, padding, dilation, groups
        As ``torch.nn.Conv2d`` takes them.
    layout : str
        ``"nchw"``, or ``"nhwc"`` for channels_last tensors.
    output_padding : int or tuple of int, optional
        That of a transposed convolution, which may be 0; None for others.
    depth : int
        The input's, of a convolution with three dimensions; else 0.
    """

    dtype: str
    n: int
    c: int
    h: int
    w: int
    k: int
    r: Extents
    stride: Extents = 1
    padding: Extents = 1
    layout: str = "nchw"
    dilation: Extents = 1
    groups: int = 1
    output_padding: Extents | None = None
    depth: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it is of the kind that profiles hold: two dimensions, square, one group, no dilation."""
        return self[10:] == (1, 1, None, 0) and all(isinstance(extent, int) for extent in self[6:9])

    @property
    def size(self) -> tuple[int, ...]:
        """(depth), height and width of the input."""
        return (self.depth, self.h, self.w) if self.depth else (self.h, self.w)

    def along(self, extents: Extents) -> tuple[int, ...]:
        """An extent for every dimension."""
        return extents if isinstance(extents, tuple) else (extents,) * len(self.size)

    @property
    def out(self) -> tuple[int, ...]:
        """(depth), height and width of the output."""
        sides = zip(*map(self.along, (self.size, self.r, self.stride, self.padding, self.dilation)), strict=True)
        if self.output_padding is None:
            return tuple((n + 2 * p - d * (r - 1) - 1) // s + 1 for n, r, s, p, d in sides)
        more = self.along(self.output_padding)
        return tuple((n - 1) * s - 2 * p + d * (r - 1) + 1 + m for (n, r, s, p, d), m in zip(sides, more, strict=True))

    @property
    def elements(self) -> tuple[int, int, int]:
        """How many input, output and filter have."""
        filters = self.c * self.k // self.groups * math.prod(self.along(self.r))
        return self.n * self.c * math.prod(self.size), self.n * self.k * math.prod(self.out), filters


def version_number(version: str) -> int:
    """10000 * major + 100 * minor + patch of ``"9.10.2"``; a fourth part is left out. ValueError for no version of
    cuDNN 9, the only one whose heuristics were recorded."""
    number = _version_number(version) if isinstance(version, str) else None
    if number is None:
        raise ValueError(f"cudnn_version: want one of cuDNN 9 such as '9.10.2', got {version!r}")
    return number


@functools.lru_cache(maxsize=256)
def _version_number(version: str) -> int | None:
    match = re.fullmatch(r"9\.(\d{1,2})(?:\.(\d{1,2})(?:\.\d+)?)?", version)
    return 90000 + 100 * int(match[1]) + int(match[2] or 0) if match else None


def sizes(conv: Conv) -> dict[str, int]:
    """What formulas and trees speak of, for one convolution."""
    return dict(zip("iofIOFPQhwnmp", _core.conv_sizes(conv), strict=True))


def formula_bytes(formula: list[Any], s: Mapping[str, int]) -> int:
    """A formula's value for the `sizes` of one convolution."""
    return _core.formula_bytes(formula, tuple(s.values()))


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
    cards : list of str
        Keys of the GPUs that alone it is for; none where it is for all of its capability.
    """

    def __init__(self, data: dict[str, Any], file: str = "", cards: Sequence[str] = ()):
        self.file, self.cards = file, list(cards)
        other = data.get("otherwise")
        self._otherwise = _load(other) if other else None
        self.capability: str = data["capability"]
        self.sm = int(self.capability.replace(".", ""))
        self.version: str = data["cudnn"]
        self.recorded: dict[str, Any] = data["recorded"]
        self.how: str = self.recorded["how"]
        self._rules: list[dict[str, Any]] = data.get("rules", [])
        trees: dict[str, str] = data.get("convolutions", {})
        self.core: _core.Profile = _core.Profile(
            self.sm >= 80, self._otherwise.core if self._otherwise else None, data.get("formulas", []), self._rules,
            {key: trees.get(tree, tree) for key, tree in trees.items()},
        )  # fmt: skip
        self._source = f"profile: compute capability {self.capability}, cuDNN {self.version}, {self.how}"

    def conv(self, conv: Conv, tf32: bool = True) -> tuple[int, str] | None:
        """(bytes, source) of a convolution; None where none of its kind was recorded."""
        found = self.core.conv(conv, tf32)
        return found and (found[0], self.source(*found[1:]))

    def source(self, steps: int, rule: int) -> str:
        """Says who answered: this profile or, so many steps away, the one that it names as otherwise; by a rule, by a
        tree (-1), or because one image has 2^31 elements or more (-2)."""
        if steps and self._otherwise:
            return f"{self._otherwise.source(steps - 1, rule)}, in place of {self.version}"
        if rule < -1:
            return f"{self._source}: none for an image of 2^31 elements or more"
        return self._source if rule < 0 else f"{self._source} ({self._rules[rule]['name']})"


@functools.cache
def _load(name: str) -> Profile:
    data: dict[str, Any] = json.loads(shipped("profiles", name))
    file = data.get("same_as", name)
    if file != name:  # another version that gave the same answers
        data = json.loads(shipped("profiles", file)) | data
    return Profile(data, file, profile_files()[name][1])


@functools.cache
def profile_files() -> dict[str, tuple[int, list[str], int]]:
    """Shipped profiles: {file: (capability such as 89, keys of its GPUs or none for all, version number)}."""
    found = {}
    for entry in (resources.files("vaemem") / "data" / "profiles").iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            found[entry.name] = int(match[1]), match[2].split("-")[1:], version_number(match[3])
    return found


def _recorded(sm: int, key: str, multiprocessors: int) -> dict[int, str]:
    """{version number: file} of the profiles for one kind of GPU."""
    have: dict[int, tuple[int, str]] = {}
    for name, (capability, keys, number) in profile_files().items():
        if capability != sm:
            continue
        others = [] if key in keys else keys  # cards that alone the file is for, where this one is none of them
        far = min((1 + abs(find_gpu(other).multiprocessors - multiprocessors) for other in others), default=0)
        have[number] = min(have.get(number, (far, name)), (far, name))
    return {number: name for number, (_, name) in have.items()}


def profiles_near(gpu: Gpu, version: str | None) -> tuple[Profile, ...]:
    """The profiles for GPUs like this one, asked and inferred, the nearest cuDNN to `version` first (None: the newest).

    Where a version's answers differ among the GPUs of a capability and this one was not asked about, it is the profile
    of the card with the nearest number of multiprocessors.
    """
    return _near(gpu.sm, gpu.key, gpu.multiprocessors, version)


@functools.lru_cache(maxsize=256)
def _near(sm: int, key: str, multiprocessors: int, version: str | None) -> tuple[Profile, ...]:
    have = _recorded(sm, key, multiprocessors)
    wanted = max(have, default=0) if version is None else version_number(version)
    return tuple(_load(have[number]) for number in sorted(have, key=lambda number: (abs(number - wanted), -number)))


def nearest_profile(gpu: Gpu, version: str | None) -> Profile | None:
    """The first of `profiles_near` that may answer for the version, which an inferred profile may for its own version
    alone; None where there is no such profile."""
    for profile in profiles_near(gpu, version):
        if profile.how != "inferred" or (version and version_number(profile.version) == version_number(version)):
            return profile
    return None


@functools.lru_cache(maxsize=256)
def relatives(sm: int, version: str | None) -> tuple[Profile, ...]:
    """Every asked profile whose answers may be those of a version (None: any) on GPUs of a compute capability (89 for
    8.9); of those that are alike one.

    A version between two that were asked there answers as some version did on cards of that compute capability. Beyond
    the oldest and the newest of them answers change as they did from card to card, so every profile of the family
    counts: compute capability 8.0 and later, which have TF32, or 7.x. (benchmarks/left_out.py tries the rule.)
    """
    family = [_load(name) for name, (other, *_) in profile_files().items() if (other < 80) == (sm < 80)]
    family = [profile for profile in family if profile.how != "inferred"]
    own = [profile for profile in family if profile.sm == sm]
    asked = [version_number(profile.version) for profile in own]
    is_between = version and asked and min(asked) <= version_number(version) <= max(asked)
    return tuple({profile.file: profile for profile in (own if is_between else family)}.values())


@functools.cache
def _older() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = json.loads(shipped("profiles", "older.json"))["rules"]
    return rules


def older_rules(gpu: Gpu, version: str | None, standing: str) -> list[dict[str, Any]]:
    """The rules of ``older.json`` for a GPU and a cuDNN version (None: any), of one standing: "taken" or "possible"."""
    return [
        rule
        for rule in _older()
        if rule["standing"] == standing
        and gpu.sm in rule["capabilities"]
        and (version is None or version_number(version) < version_number(rule["before"]))
    ]
