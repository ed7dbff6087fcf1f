"""Read the figures of an out-of-memory message."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vaemem._common import MIB
from vaemem._errors import ArgumentError
from vaemem.out_of_memory.message_kinds import MESSAGE_KINDS, POOL, SEGMENT, SIZE, TENSOR, Kind

SEGMENT_STEP = 2 * MIB  # the native allocator requests multiples of this
SLACK = 64 * MIB  # for workspaces of products and the allocator's rounding
LARGE_REQUEST = 64 * MIB  # many runs make smaller requests
MOST_SMALL = 20 * MIB  # the native allocator requests this for any tensor of 1 to 10 MiB; many runs request less
LOOK_AHEAD = 1.05  # ggml's pool requests this much more than a product's copy
_UNITS = {"b": 1, "k": 1 << 10, "m": MIB, "g": 1 << 30, "t": 1 << 40}  # by first letter
# Patterns of the figures in PyTorch's messages.
_FIGURES = {
    "requested": (rf"Tried to allocate {SIZE}", rf"Requested ?: ?{SIZE}"),
    "total": (
        rf"total capaci?ty of {SIZE}", rf"{SIZE} total capacity", rf"Device limit ?: ?{SIZE}", rf"max allowed: {SIZE}",
    ),
    "free": (rf"of which {SIZE} is free", rf"{SIZE} free;", rf"Free \(according to CUDA\) ?: ?{SIZE}"),
    "allocated": (
        rf"{SIZE} is allocated by PyTorch", rf"{SIZE} already allocated", rf"Currently allocated ?: ?{SIZE}",
        rf"MPS allocated: {SIZE}",
    ),
    "cached": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} (?:reserved in total by PyTorch|cached\))",),
    "process": (rf"this process has {SIZE} memory in use",),
}  # fmt: skip
BEGINS = re.compile(r"MPS backend out|Tried to allocate|Currently allocated|Could not allocate tensor", re.I)
_TILED = re.compile(r"tiled_|retrying with tiled|tiled vae|vae\w{0,40}tiled", re.I)


@dataclass(frozen=True)
class OomMessage:
    """A message, and its kind.

    bytes: its figures by name
    within: the largest error of each figure, which is printed with two decimals
    is_tile: whether a run in tiles raised it
    """

    kind: Kind
    bytes: dict[str, int]
    within: dict[str, int]
    is_tile: bool

    @property
    def maker(self) -> str:
        """The maker of the card."""
        return self.kind.maker

    @property
    def is_native(self) -> bool:
        """Whether it is the native allocator's, which requests segments."""
        return self.kind.size == SEGMENT

    @property
    def is_exact(self) -> bool:
        """Whether its size is one tensor's, to the byte or to the printed digits."""
        return self.kind.size == TENSOR

    @property
    def is_small(self) -> bool:
        """Whether many runs make such a request."""
        return self.bytes["requested"] <= MOST_SMALL

    @property
    def tells(self) -> bool:
        """Whether its figures identify the run: allocated, cached and free at the refusal."""
        return {"allocated", "cached", "free"} <= self.bytes.keys()

    @property
    def room(self) -> int | None:
        """Bytes that the process could have: allocated, cached and free. None if the message does not say it."""
        return sum(self.bytes[name] for name in ("allocated", "cached", "free")) if self.tells else None

    @property
    def range(self) -> tuple[int, int]:
        """The tensor has more bytes than the first number and at most the second, because segments are rounded up."""
        size, within = self.bytes["requested"], self.within["requested"]
        return max(size - within - (SEGMENT_STEP if self.is_native else 1), 0), size + within

    @property
    def spare(self) -> int:
        """Most bytes that were cached or free at the refusal, with slack for memory that a trace leaves out."""
        names = "cached", "free"
        known = sum(self.bytes.get(name, 0) + self.within.get(name, 0) for name in names)
        return known + SLACK if self.tells else 0

    @property
    def may_lower(self) -> bool:
        """Whether the card's library may copy a convolution's input for each filter element, as MIOpen does."""
        return self.maker == "AMD" and self.is_native


def read_message(text: str) -> OomMessage:
    """Read the first message in a text without line breaks; ValueError if it has none."""
    for kind in MESSAGE_KINDS:
        if found := re.search(kind.pattern, text, re.I):
            break
    else:
        raise ArgumentError("error", "an out-of-memory message of PyTorch's or ggml's", repr(text[:200]))
    begins = [one.start() for one in BEGINS.finditer(text)]
    figures = text[begins[0] : begins[1] if len(begins) > 1 else None] if begins else ""
    if "MPS" in figures[:3].upper():
        figures = text[begins[0] : begins[2] if len(begins) > 2 else None]
    read = {name: _bytes(size) for name, patterns in _FIGURES.items() if (size := _first(patterns, figures))}
    if found.groups() and "requested" not in read:
        read["requested"] = _bytes(found[found.lastindex or 1])
    figures_bytes, within = ({name: one[i] for name, one in read.items()} for i in (0, 1))
    if "reserved" in figures_bytes:
        figures_bytes["cached"] = max(figures_bytes.pop("reserved") - figures_bytes.get("allocated", 0), 0)
        within["cached"] = within.pop("reserved") + within.get("allocated", 0)
    if kind.size == POOL:
        figures_bytes["requested"] = round(figures_bytes["requested"] / LOOK_AHEAD)
    # Text before the figures belongs to their run; text behind them too, unless another message follows.
    is_tile = bool(_TILED.search(text if len(begins) == 1 else text[: begins[0]] if begins else text))
    return OomMessage(kind, figures_bytes, within, is_tile)


def _first(patterns: tuple[str, ...], text: str) -> str:
    """Return the group of the first pattern that matches; "" if none does."""
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text, re.I))), "")


def _bytes(text: str) -> tuple[int, int]:
    """Return a size and its largest error."""
    number, unit = re.split(r" ?(?=[A-Za-z]|$)", text.replace(",", "."), maxsplit=1)
    size = _UNITS[(unit or "b")[0].lower()]
    value = float(number) * size
    return round(value), 0 if size == 1 else size // (200 if "." in number else 2) + 1
