"""Whether a run fits a card, in numbers and in words, whoever's code it is."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vaemem import _core
from vaemem._common import MIB, Answer


def bound_of(reserved: int, sure: int = 0) -> int:
    """The most bytes that a process takes whose prediction is `reserved` bytes: a 16th more, and 20 MiB. Of these bytes
    so many are `sure`, and take no more: weights. What was there when the peaks were reset is not in either.
    csrc/predict/judge.h says where the margin comes from."""
    return _core.judge_bound(reserved, sure)


# NVIDIA's page 5490, "System Memory Fallback for Stable Diffusion".
SPILLS = (
    ". On Windows the driver (since 536.40) moves memory to the host's instead, and the run becomes many times slower,"
    " unless its CUDA - Sysmem Fallback Policy is Prefer No Sysmem Fallback"
)
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


@dataclass(frozen=True)
class CardUse:
    """How a run uses a card: the numbers that decide the verdict, and the words that explain it. Sizes in bytes.

    Attributes
    ----------
    available : int
        What the card gives, besides a CUDA context and what others use.
    took : int or None
        The most that the run takes on this card; None if it runs out of memory there.
    most : int
        The most that it takes where there is room.
    unsure : int
        How much less than `available` the card may give, because the operating system keeps more.
    guesses : bool
        Whether it goes through only with plans of cuDNN's that are not known.
    untried : str
        What the run rests on and nobody has tried.
    safe : bool
        Whether a tight run counts as one that does not fit.
    has_version : bool
        Whether a version of PyTorch or cuDNN was named.
    coarse : bool
        Whether the card's kind alone is known.
    covers, besides, between : str
        Words: which part of the question the answer covers; which other models the program keeps on the card; what
        the range of a coarse answer is between.
    """

    available: int
    took: int | None
    most: int
    unsure: int = 0
    guesses: bool = False
    untried: str = ""
    safe: bool = False
    has_version: bool = True
    coarse: bool = False
    covers: str = ""
    besides: str = ""
    between: str = ""


# Why a run is tight, by the core's names.
GUESSES, NO_ROOM, MARGINAL, UNTRIED = "guesses", "no room", "marginal", "untried"


def judge(use: CardUse, may_take: Callable[[int], bool]) -> tuple[str, str]:
    """Returns the verdict, whoever's code runs, and why a run is tight (csrc/predict/judge.h).

    may_take: whether the run may take so many bytes by its upper bound. It is called last, because it may take long.
    """
    fits, untried = use.took is not None, bool(use.untried)
    return _core.judge(fits, use.guesses, untried, max(use.available, 0), use.unsure, use.most, may_take)


def needed(least_band: tuple[int, int]) -> str:
    """The least that would do, in words."""
    least, sure = (f"{size / MIB:.0f} MiB" for size in least_band)
    return f"it needs at least {least}" + (f" ({sure} if cuDNN's next plans want as much)" if sure != least else "")


class CardAnswer(Answer):
    """An answer that says whether something fits a card. Sizes in bytes.

    Attributes
    ----------
    available : int
        What the card gives, beside a CUDA context and what others use.
    on_card : int or None
        What it takes on this card; None where it does not go through.
    least_band : tuple of int
        The least `available` with which it goes through, and the least where cuDNN's next plans, which are not known,
        want what the first plan wants.
    assumed_card : str
        Which card stands for yours if none was named and none is present, in a sentence; "" otherwise.
    """

    assumed_card: str = ""
    available: int
    on_card: int | None
    coarse: bool = False
    _use: CardUse

    if TYPE_CHECKING:

        @property
        def least_band(self) -> tuple[int, int]: ...
        @property
        def _range(self) -> tuple[int, int]: ...  # the least and the most that it takes on this card
        @property
        def _bound(self) -> int: ...  # what it takes at most by `upper`
        @property
        def _runs_out(self) -> str: ...  # where the memory runs out, in words

    @functools.cached_property
    def _judged(self) -> tuple[str, str]:
        return judge(self._use, self._may_take)

    @property
    def verdict(self) -> str:
        return self._judged[0]

    def _may_take(self, size: int) -> bool:
        """Whether `_bound` is so many bytes or more."""
        return self._bound >= size

    @property
    def fits(self) -> bool:
        # What goes through fits, unless it has to fit safely: then the verdict has to be known.
        return self._use.took is not None and (not self._use.safe or self.verdict == FITS)

    @property
    def spare(self) -> int:
        if self._use.took is None:
            return self.available - self.least_band[0]
        return max(self.available - (self._range[1] if self._use.coarse else self._use.took), 0)

    @property
    def takes(self) -> str:
        """MiB that it takes on this card, of a coarse answer from the least to the most."""
        took = self._use.took or 0
        least, most = (f"{size / MIB:.0f}" for size in (self._range if self._use.coarse else (took, took)))
        return least if least == most else f"{least} to {most}"

    @functools.cached_property
    def tight_because(self) -> str:
        use, why = self._use, self._judged[1]
        if why == GUESSES:
            return (
                "it goes through only if cuDNN's next plans take no workspace, which is not known of this version;"
                f" {needed(self.least_band)}"
            )
        if why == NO_ROOM:
            return (
                f"it would take {use.most / MIB:.0f} MiB where there is room, and goes through because PyTorch gives"
                f" cached memory back; {needed(self.least_band)}"
            )
        if why == MARGINAL and self._bound > self.available:
            reason = "" if use.has_version else ", since no version of PyTorch or cuDNN was named"
            reason = f", {use.between}" if use.between else reason
            return f"by `upper` it may take {self._bound / MIB:.0f} MiB{reason}"
        if why == MARGINAL:
            return f"Windows may keep {use.unsure / MIB:.0f} MiB more of the card"
        return use.untried if why == UNTRIED else ""

    @property
    def summary(self) -> str:
        use = self._use
        told = use.covers + (", as far as can be told of such a card" if use.coarse else "")
        room, spare = f"{self.available / MIB:.0f} MiB", f"{abs(self.spare) / MIB:.0f} MiB"
        if use.took is None:
            lacking = f"{needed(self.least_band)}, and the card gives {room}{use.besides}: {spare} are lacking"
            return f"does not fit{told}: {lacking}; {self._runs_out}{SPILLS if use.unsure else ''}"
        took = f"it takes {self.takes} of the {room} that the card gives{use.besides}"
        if self.tight_because:
            return f"tight{told}: {took}; {self.tight_because}"
        return f"fits{told}: {took}, at most {self._bound / MIB:.0f} by `upper`; {spare} to spare"


# Of what a card holds; people with a colour-vision deficiency tell them apart (Okabe and Ito).
COLOURS = {
    "weights": "#0072B2", "tensors": "#D55E00", "workspaces": "#E69F00", "cached": "#CC79A7", "vaemem": "#009E73",
    "CUDA context": "#56B4E9", "others": "#6E6E6E", "Windows": "#999999", "spare": "#E4E4E4",
}  # fmt: skip


def bar(parts: Mapping[str, int], size: int) -> str:
    """A bar of parts in bytes, as HTML for a notebook; a line marks a card's size where they go beyond it."""
    whole, left, cells, names = max(size, sum(parts.values()), 1), 0, [], []
    for name, part in parts.items():
        if part <= 0:
            continue
        colour = COLOURS.get(name, "#000000")
        shown = f"{html.escape(name)} {part / MIB:.0f} MiB"
        cells.append(
            f'<div title="{shown}" style="position:absolute;left:{100 * left / whole:.2f}%;top:0;bottom:0;'
            f'width:{100 * part / whole:.2f}%;background:{colour}"></div>'
        )
        names.append(f'<span style="white-space:nowrap"><span style="color:{colour}">&#9632;</span> {shown}</span>')
        left += part
    edge = f'<div title="the card, {size / MIB:.0f} MiB" style="position:absolute;left:{100 * size / whole:.2f}%;'
    edge += 'top:-4px;bottom:-4px;border-left:2px solid #000"></div>'
    box = "position:relative;height:1.4em;max-width:48em;background:#f4f4f4;margin:6px 0"
    edge = edge if left > size else ""
    return f'<div style="{box}">{"".join(cells)}{edge}</div><div>{" ".join(names)}</div>'
