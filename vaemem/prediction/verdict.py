"""Whether a run fits a card, in numbers and in words, whoever's code it is."""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vaemem._common import MIB, Answer

# NVIDIA's page 5490, "System Memory Fallback for Stable Diffusion".
SPILLS = (
    ". On Windows the driver (since 536.40) moves memory to the host's instead, and the run becomes many times slower,"
    " unless its CUDA - Sysmem Fallback Policy is Prefer No Sysmem Fallback"
)
FITS, TIGHT, DOES_NOT_FIT = "fits", "tight", "does not fit"


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
    _most: int  # what it takes where there is room
    _guesses: bool = False  # whether it goes through only with plans of cuDNN's that are not known
    _unsure: int = 0  # bytes that the operating system may keep of the card beside
    _untried: str = ""  # what nobody has tried and the run rests on, in words
    _has_version: bool = True  # whether it is about a version that was named
    coarse: bool = False
    _of: str = ""  # what the answer is of, where that is less than may be thought, in words
    _beside: str = ""  # other models that the program keeps on the card, in words
    _between: str = ""  # what the range of a coarse answer is between
    _safe: bool = False  # whether what is tight counts as not fitting

    if TYPE_CHECKING:

        @property
        def least_band(self) -> tuple[int, int]: ...
        @property
        def _took(self) -> int: ...  # what the process takes on this card at most, in all its runs
        @property
        def _range(self) -> tuple[int, int]: ...  # the least and the most that it takes there
        @property
        def _bound(self) -> int: ...  # what it takes at most by `upper`
        @property
        def _runs_out(self) -> str: ...  # where the memory runs out, in words

    @functools.cached_property
    def verdict(self) -> str:
        if self.on_card is None:
            return DOES_NOT_FIT
        return TIGHT if self._is_tight else FITS

    @property
    def _is_tight(self) -> bool:
        """Whether a run that goes through is tight. `tight_because` says why, for which it has to know more."""
        if self._guesses or self._untried or self._most > self.available:
            return True
        return self._may_take(self.available - self._unsure + 1)

    def _may_take(self, size: int) -> bool:
        """Whether `_bound` is so many bytes or more."""
        return self._bound >= size

    @property
    def fits(self) -> bool:
        return self.on_card is not None and (not self._safe or self.verdict == FITS)

    @property
    def spare(self) -> int:
        if self.on_card is None:
            return self.available - self.least_band[0]
        return max(self.available - (self._range[1] if self.coarse else self._took), 0)

    @property
    def _takes(self) -> str:
        """MiB that it takes on this card, of a coarse answer from the least to the most."""
        least, most = (f"{size / MIB:.0f}" for size in (self._range if self.coarse else (self._took, self._took)))
        return least if least == most else f"{least} to {most}"

    @functools.cached_property
    def tight_because(self) -> str:
        if self.verdict != TIGHT:
            return ""
        if self._guesses:
            return (
                "it goes through only if cuDNN's next plans take no workspace, which is not known of this version;"
                f" {needed(self.least_band)}"
            )
        if self._most > self.available:
            return (
                f"it would take {self._most / MIB:.0f} MiB where there is room, and goes through because PyTorch gives"
                f" cached memory back; {needed(self.least_band)}"
            )
        if self._bound > self.available:
            why = "" if self._has_version else ", since no version of PyTorch or cuDNN was named"
            why = f", {self._between}" if self._between else why
            return f"by `upper` it may take {self._bound / MIB:.0f} MiB{why}"
        if self._bound > self.available - self._unsure:
            return f"Windows may keep {self._unsure / MIB:.0f} MiB more of the card"
        return self._untried

    @property
    def summary(self) -> str:
        told = self._of + (", as far as can be told of such a card" if self.coarse else "")
        room, spare = f"{self.available / MIB:.0f} MiB", f"{abs(self.spare) / MIB:.0f} MiB"
        if self.on_card is None:
            lacking = f"{needed(self.least_band)}, and the card gives {room}{self._beside}: {spare} are lacking"
            return f"does not fit{told}: {lacking}; {self._runs_out}{SPILLS if self._unsure else ''}"
        took = f"it takes {self._takes} of the {room} that the card gives{self._beside}"
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
