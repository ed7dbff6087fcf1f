"""Recorded answers of cuDNN, one file for a compute capability and a cuDNN version.

Most GPUs of one capability get the same answers. If they do not, the file names the GPUs it is limited to
(``sm75-t4``).

A file holds formulas, and for each convolution and kind of question a decision tree that picks one: cuDNN's instant
heuristic is a decision tree itself. A kind is a dtype (``float32 strict`` if TF32 is not allowed), followed by
``nhwc`` for channels_last tensors. A formula is ``[tensors, index, tile, per_tile, constant]`` and means, in bytes,

    tensors
    + 128 * (index * oh * ow // 128 + 1)    if index is not 0
    + per_tile * ceil(p / tile)             if tile is not 0
    + constant

Here `tensors` is a sum such as ``i+o+f`` or ``i+f+3o``: input, output and filter, each rounded up to 16 bytes (``I``,
``O``, ``F``: with the channels padded to 16 bytes). P is the number of output pixels of the batch.

A key such as ``128,64,3,1,1/float16`` names channels of input and output, filter, stride, padding and kind. Three
dimensions add the frames of filter and input. A profile's tree is a text such as ``P400 h15 0 1 2``. A number means a
formula. ``P400`` takes the next tree for a P up to 400, and the tree after that for a larger P. The variables are
``P``, ``Q`` (P of one image), ``h``, ``w`` (of the input), ``n`` (the batch) and ``m`` (the pixels that P lacks to a
multiple of 128). A key in place of a tree means that key's tree.

If input or output has more than 2^31 elements, cuDNN works on a part of the batch at a time. ``i``, ``o``, ``I``, ``O``
and ``p`` (output pixels) then describe the largest such part. A single image of 2^31 or more takes no workspace.

A file may also hold rules that precede its trees, and name the file that answers the rest. An inferred profile answers
for its own version only. ``rules.json`` holds rules for versions that were never recorded, and for what only a card
shows. `Catalogue` lists all of them; ``csrc/predict/workspace/catalogue.c`` decides which one answers for a card.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import shipped
from vaemem._errors import ArgumentError
from vaemem.prediction.gpus import Gpu, find_gpu

_FILE = re.compile(r"sm(\d+)((?:-\w+)*)_cudnn(\d+\.\d+\.\d+)\.json")

Extents = int | tuple[int, ...]  # one for all dimensions, or one for each


class Conv(NamedTuple):
    """A convolution as PyTorch passes it to cuDNN; PyTorch adds the bias separately.

    Extents are an int, or a tuple with one for each dimension. A convolution with one dimension has two here, and a
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
        The output padding of a transposed convolution, which may be 0; None for others.
    depth : int
        The input's depth if the convolution has three dimensions, otherwise 0.
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
        """Whether profiles hold its kind: two dimensions, square, one group, no dilation."""
        return self[10:] == (1, 1, None, 0) and all(isinstance(extent, int) for extent in self[6:9])

    @property
    def size(self) -> tuple[int, ...]:
        """(depth), height and width of the input."""
        return (self.depth, self.h, self.w) if self.depth else (self.h, self.w)

    def along(self, extents: Extents) -> tuple[int, ...]:
        """Return an extent for every dimension."""
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
        """The numbers of elements of input, output and filter."""
        filters = self.c * self.k // self.groups * math.prod(self.along(self.r))
        return self.n * self.c * math.prod(self.size), self.n * self.k * math.prod(self.out), filters


def version_number(version: str) -> int:
    """Return 10000 * major + 100 * minor + patch of ``"9.10.2"``; ignore a fourth part. ValueError for anything but a
    version of cuDNN 8 or 9. Only the heuristics of 9 were recorded; they stand for those of 8."""
    number = _version_number(version) if isinstance(version, str) else None
    if number is None:
        raise ArgumentError("cudnn_version", "a version of cuDNN 8 or 9 such as '9.10.2'", repr(version))
    return number


def number_of(version: str | None) -> int:
    """Return the core's number of a version; 0 if there is none."""
    return 0 if version is None else version_number(version)


@functools.lru_cache(maxsize=256)
def _version_number(version: str) -> int | None:
    match = re.fullmatch(r"([89])\.(\d{1,2})(?:\.(\d{1,2})(?:\.\d+)?)?", version)
    return 10000 * int(match[1]) + 100 * int(match[2]) + int(match[3] or 0) if match else None


def sizes(conv: Conv) -> dict[str, int]:
    """Return the variables of formulas and trees, for one convolution."""
    return dict(zip("iofIOFPQhwnmp", _core.conv_sizes(conv), strict=True))


def formula_bytes(formula: list[Any], s: Mapping[str, int]) -> int:
    """Evaluate a formula for the `sizes` of one convolution."""
    return _core.formula_bytes(formula, tuple(s.values()))


class Profile:
    """One profile file.

    Attributes
    ----------
    file : str
        The file in ``vaemem/data/profiles`` that holds its answers.
    version : str
        cuDNN's version.
    how : str
        ``"asked"``, ``"measured"`` or ``"inferred"``.
    recorded : dict
        How the file was made and checked, in the file's words.
    cards : list of str
        Keys of the GPUs that the profile is limited to; empty means the whole compute capability.
    facts : dict
        The file's content without answers.
    core : _core.Profile
        The answers. A file with ``same_as`` shares the other file's answers.
    """

    def __init__(self, data: dict[str, Any], file: str = "", cards: Sequence[str] = (), core: Any = None):
        self.file, self.cards = file, list(cards)
        self.facts = {key: value for key, value in data.items() if key not in ("convolutions", "formulas")}
        other = data.get("otherwise")
        self._otherwise = load_profile(other) if other else None
        self.capability: str = data["capability"]
        self.sm = int(self.capability.replace(".", ""))
        self.version: str = data["cudnn"]
        self.recorded: dict[str, Any] = data["recorded"]
        self.how: str = self.recorded["how"]
        self._rules: list[dict[str, Any]] = data.get("rules", [])
        trees: dict[str, str] = data.get("convolutions", {})
        self.core: _core.Profile = core or _core.Profile(
            self.sm >= 80, self._otherwise.core if self._otherwise else None, data.get("formulas", []), self._rules,
            {key: trees.get(tree, tree) for key, tree in trees.items()},
        )  # fmt: skip
        self._source = f"profile: compute capability {self.capability}, cuDNN {self.version}, {self.how}"

    def conv(self, conv: Conv, tf32: bool = True) -> tuple[int, str] | None:
        """Return (bytes, source) of a convolution; None if no convolution of its kind was recorded."""
        found = self.core.conv(conv, tf32)
        return found and (found[0], self.source(*found[1:]))

    def source(self, steps: int, rule: int) -> str:
        """Name the source of an answer: this profile or, `steps` further, the profile that it names as otherwise. rule:
        the rule's number; -1 for a tree; -2 if one image has 2^31 elements or more."""
        if steps and self._otherwise:
            return f"{self._otherwise.source(steps - 1, rule)}, in place of {self.version}"
        if rule < -1:
            return f"{self._source}: none for an image of 2^31 elements or more"
        return self._source if rule < 0 else f"{self._source} ({self._rules[rule]['name']})"


@functools.cache
def load_profile(name: str) -> Profile:
    """Load a shipped profile, by the name of its file."""
    data: dict[str, Any] = json.loads(shipped("profiles", name))
    cards = profile_files()[name][1]
    if "same_as" not in data:
        return Profile(data, name, cards)
    like = load_profile(data["same_as"])
    return Profile(like.facts | data, like.file, cards, like.core)


@functools.cache
def profile_files() -> dict[str, tuple[int, list[str], int]]:
    """List shipped profiles: {file: (capability such as 89, keys of its GPUs or none for all, version number)}."""
    found = {}
    for entry in (resources.files("vaemem") / "data" / "profiles").iterdir():
        match = _FILE.fullmatch(entry.name)
        if match:
            found[entry.name] = int(match[1]), match[2].split("-")[1:], version_number(match[3])
    return dict(sorted(found.items()))


def card_of(gpu: Gpu) -> tuple[str, int, int]:
    """Return a card as the core takes it."""
    return gpu.key, gpu.sm, gpu.multiprocessors


def card_rule(rule: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, int, int, tuple[int, ...], str]:
    """Return a rule of ``rules.json`` or of a card, as the core takes it."""
    other, since, before = (version_number(rule[name]) if name in rule else 0 for name in ("as", "since", "before"))
    return rule, other, since, before, tuple(rule.get("capabilities", ())), rule["standing"]


# A card of each compute capability. An unrecorded card may have the workspaces of any of them.
ONE_OF_EACH = ("V100", "T4", "A100", "RTX 3090", "RTX 4090", "H100", "B200", "RTX 5090")


class Catalogue:
    """Profiles, and the rules that come before them: by default everything that ships.

    Parameters
    ----------
    files : iterable of str, or dict, optional
        Names of profile files. A dict may give a `Profile` for a name, or None for the shipped profile.
    rules : iterable of dict, optional
        Rules such as those of ``rules.json``.

    Attributes
    ----------
    rules : list of dict
    core : _core.Catalogue
        The C object that chooses among profiles and rules.
    profile : function
        Returns the `Profile` that has a number in the core.
    """

    def __init__(
        self, files: Iterable[str] | Mapping[str, Profile | None] | None = None,
        rules: Iterable[Mapping[str, Any]] | None = None,
    ):  # fmt: skip
        names = tuple(profile_files() if files is None else files)
        given = {name: one for name, one in files.items() if one} if isinstance(files, Mapping) else {}
        self.rules = list(json.loads(shipped("profiles", "rules.json"))["rules"] if rules is None else rules)
        recorded = []
        for name in names:
            sm, keys, number = _about(given[name]) if name in given else profile_files()[name]
            recorded.append((sm, number, tuple(card_of(find_gpu(key)) for key in keys)))

        def load(number: int) -> Profile:
            return given.get(names[number]) or load_profile(names[number])

        def for_core(number: int) -> tuple[_core.Profile, bool]:
            """Return the core's part of a profile, and whether it was inferred."""
            return load(number).core, load(number).how == "inferred"

        self.profile = load  # by the core's number
        self.core = _core.Catalogue(
            tuple(recorded), tuple(map(card_rule, self.rules)), tuple(card_of(find_gpu(name)) for name in ONE_OF_EACH),
            for_core,
        )  # fmt: skip

    def nearest(self, gpu: Gpu, version: str | None) -> Profile | None:
        """Return the profile for GPUs like this one with the nearest cuDNN to `version` (None: the newest) that may
        answer for it, or None. An inferred profile may answer for its own version only."""
        number = self.core.nearest(card_of(gpu), number_of(version))
        return None if number < 0 else self.profile(number)


def _about(profile: Profile) -> tuple[int, list[str], int]:
    return profile.sm, profile.cards, version_number(profile.version)


@functools.cache
def shipped_catalogue() -> Catalogue:
    """Return all profiles and rules that ship."""
    return Catalogue()
