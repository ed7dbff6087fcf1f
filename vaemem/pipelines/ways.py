"""Every way of running a pipeline that makes sense, whether each fits a card, how long it takes, and which to take."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._common import MIB, as_csv, distinct, html_table, need, real, render, write
from vaemem.pipelines.seconds import REPEATS_DIFFER, Machine, Seconds
from vaemem.prediction.planned import Way

if TYPE_CHECKING:
    import pandas


class Room(NamedTuple):
    """What there is.

    Attributes
    ----------
    card, host : int or None
        Bytes; None where nothing is known of it, and all fits.
    seconds : float or None
        How long it may take.
    """

    card: int | None
    host: int | None = None
    seconds: float | None = None


class Outcome(NamedTuple):
    """How one way does in the room that there is.

    Attributes
    ----------
    way : Way
    seconds : Seconds or None
        Those of the whole run; None where no card was named and nothing measured.
    phase_seconds : dict of str to Seconds
    fails_in : str or None
        The phase in which the card's memory runs out, ``"host"`` where the host's does, ``"time"`` where it likely
        takes too long.
    short : float
        How many bytes there are too few for the whole run, or seconds too many.
    """

    way: Way
    seconds: Seconds | None
    phase_seconds: Mapping[str, Seconds]
    fails_in: str | None
    short: float

    @property
    def fits(self) -> bool:
        return self.fails_in is None

    @property
    def verdict(self) -> str:
        """In words."""
        if self.fails_in is None:
            return "may fit" if self.way.unsure else "fits"
        if self.fails_in == "time":
            return f"takes {self.short:.0f} s too long"
        if self.fails_in == "host":
            return f"lacks {self.short / MIB:.0f} MiB of the host's"
        return f"runs out in {self.fails_in}, lacks {self.short / MIB:.0f} MiB"


def outcome(way: Way, room: Room, machine: Machine | None) -> Outcome:
    """How a way does in a room. Where several phases do not fit, it ends in the first of them."""
    took = machine.seconds(way.work) if machine else None
    each = {phase.name: machine.seconds(phase.work) for phase in way.phases} if machine else {}
    over = [phase.name for phase in way.phases if room.card is not None and phase.total > room.card]
    out = way.out
    if over and not way.played:
        out = over[0], way.peak.total - (room.card or 0)
    if out:
        return Outcome(way, took, each, *out)
    if room.host is not None and way.host > room.host:
        return Outcome(way, took, each, "host", way.host - room.host)
    if took and room.seconds is not None and took.likely > room.seconds:
        return Outcome(way, took, each, "time", took.likely - room.seconds)
    return Outcome(way, took, each, None, 0)


class Written:
    """What can be printed, and written to files: a subclass says its rows, its data for JSON and its text."""

    def rows(self) -> list[dict[str, Any]]:
        """One dict a line of the table.

        Examples
        --------
        >>> plan_pipeline("sd15", 1536, 1536, memory="16 GB", runtime="mlx").rows()[0]["fits"]
        True
        """
        raise NotImplementedError

    def _data(self) -> dict[str, Any]:
        raise NotImplementedError

    def _text(self, markdown: bool = False) -> str:
        raise NotImplementedError

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """The rows as CSV, to a file or as text.

        Examples
        --------
        >>> predict_pipeline("sd15", 512, 512, gpu="T4").to_csv().splitlines()[0]
        'phase,total_bytes,weights_bytes,...'
        """
        return write(path, as_csv(self.rows()))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """What was asked, the rows and what follows from them as JSON, to a file or as text.

        Examples
        --------
        >>> import json
        >>> plan = plan_pipeline("sd15", 1536, 1536, memory="16 GB", runtime="mlx")
        >>> json.loads(plan.to_json())["recommended"]
        'whole VAE, denoiser kept, bfloat16'
        """
        return write(path, json.dumps(self._data(), indent=1, ensure_ascii=False) + "\n")

    def to_markdown(self) -> str:
        """What `print` shows, as Markdown.

        Examples
        --------
        >>> print(predict_pipeline("sd15", 512, 512, gpu="T4").to_markdown())
        sd15 512x512...
        """
        return self._text(markdown=True)

    def __str__(self) -> str:
        return self._text()


class PipelinePlan(Written):
    """What `vaemem.plan_pipeline` gives. Printing it shows every way and the recommendation.

    Attributes
    ----------
    title : str
        What was asked.
    room : Room
    outcomes : tuple of Outcome
        In the order in which ways are tried, from the plainest.
    machine : Machine or None
        The rates behind the seconds.
    notes : tuple of str
        What was taken for granted.

    Examples
    --------
    >>> plan = plan_pipeline("sd15", 1536, 1536, memory="16 GB", runtime="mlx")
    >>> plan.recommended.way.name
    'whole VAE, denoiser kept, bfloat16'
    >>> plan["decoder only, denoiser unloaded, float32"].verdict
    'runs out in decode, lacks ... MiB'
    >>> print(plan)
    sd15 1536x1536 by mlx...
    """

    def __init__(
        self, title: str, room: Room, outcomes: Sequence[Outcome], machine: Machine | None, notes: Iterable[str]
    ) -> None:
        self.title, self.room, self.machine = title, room, machine
        self.outcomes, self.notes = tuple(outcomes), tuple(notes)

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, name: str) -> Outcome:
        """The outcome of the way of that name; ValueError for another."""
        found = {outcome.way.name: outcome for outcome in self.outcomes}
        if name not in found:
            raise ValueError(f"way: want one of {'; '.join(found)}, got {name!r}")
        return found[name]

    @property
    def recommended(self) -> Outcome | None:
        """The best way that fits: one that leaves the picture as it is before others, one that surely fits before those
        that may, then the fastest, and of those that are as fast (within 2%, as runs of one way differ), or where no
        time is known, the first: the plainest."""
        fitting = [one for one in self.outcomes if one.fits]
        alike = [one for one in fitting if not one.way.changes] or fitting
        alike = [one for one in alike if not one.way.unsure] or alike
        fastest = min((one.seconds.likely for one in alike if one.seconds), default=0.0)

        def is_as_fast(one: Outcome) -> bool:
            return one.seconds is None or one.seconds.likely <= (1 + REPEATS_DIFFER) * fastest

        return next(filter(is_as_fast, alike), None)

    @property
    def reason(self) -> str:
        """Why that one."""
        best, plainest = self.recommended, self.outcomes[0]
        if best is None:
            # One that has memory enough, and time or the host's memory too little, comes nearer than one that has not.
            order = {"time": 0, "host": 1}
            nearest = min(self.outcomes, key=lambda one: (order.get(one.fails_in or "", 2), one.short))
            return f"Nothing fits. {nearest.way.name} comes nearest: it {nearest.verdict}."
        kind = bool(best.way.changes), bool(best.way.unsure)
        alike = [one for one in self.outcomes if one.fits and (bool(one.way.changes), bool(one.way.unsure)) == kind]
        is_fastest = best.seconds and len(alike) > 1
        what = "It is the fastest" if is_fastest else "It is the plainest" if len(alike) > 1 else "It is the only one"
        fit, fits = ("may fit",) * 2 if best.way.unsure else ("fit", "fits")
        among = f" of the {len(alike)} that {fit}" if len(alike) > 1 else f" that {fits}"
        picture = f", though {best.way.changes}" if best.way.changes else " and leave the picture as it is"
        if len(alike) == 1 and not best.way.changes:
            picture = " and leaves the picture as it is"
        why = "" if best is plainest else f" {plainest.way.name} {plainest.verdict}."
        unsure = f" It may fit: {best.way.unsure}." if best.way.unsure else ""
        return f"Take {best.way.name}. {what}{among}{picture}.{unsure}{why}{self._faster(best)}"

    def _faster(self, best: Outcome) -> str:
        """The fastest way that changes the picture, where it saves a tenth of the time or more."""
        changed = [one for one in self.outcomes if one.fits and one.way.changes and one.seconds]
        other = min(changed, key=lambda one: one.seconds.likely if one.seconds else 0.0, default=None)
        if best.way.changes or not (other and other.seconds and best.seconds):
            return ""
        if other.seconds.likely > 0.9 * best.seconds.likely:
            return ""
        return f" {other.way.name} would take {other.seconds}: {other.way.changes}."

    # ---- files and data frames ----

    def rows(self) -> list[dict[str, Any]]:
        """One dict a way: bytes by phase, seconds with their band, the verdict.

        Examples
        --------
        >>> plan_pipeline("sd15", 1536, 1536, memory="16 GB", runtime="mlx").rows()[0]["way"]
        'whole VAE, denoiser kept, bfloat16'
        """
        best = self.recommended
        rows = []
        for one in self.outcomes:
            row: dict[str, Any] = {
                "way": one.way.name,
                "fits": one.fits,
                "unsure": one.way.unsure,
                "fails_in": one.fails_in,
                "short": one.short,
            }
            for name in self._phases():
                phase = next((phase for phase in one.way.phases if phase.name == name), None)
                key = name.replace(" ", "_")
                row[f"{key}_bytes"] = phase.total if phase else None
                row[f"{key}_weights_bytes"] = phase.weights if phase else None
                row[f"{key}_seconds"] = one.phase_seconds[name].likely if name in one.phase_seconds else None
            took = one.seconds
            row |= {
                "peak_bytes": one.way.peak.total,
                "host_bytes": one.way.host,
                "seconds": took.likely if took else None,
                "seconds_low": took.low if took else None,
                "seconds_high": took.high if took else None,
                "verdict": one.verdict,
                "changes": one.way.changes,
                "recommended": one is best,
            }
            rows.append(row)
        return rows

    def _data(self) -> dict[str, Any]:
        best = self.recommended
        return {
            "title": self.title,
            "card_bytes": self.room.card,
            "host_bytes": self.room.host,
            "ways": self.rows(),
            "recommended": best.way.name if best else None,
            "reason": self.reason,
            "rates": {name: str(rate) for name, rate in self.machine.rates.items()} if self.machine else {},
            "notes": list(self.notes),
        }

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas.DataFrame. Needs pandas (``pip install 'vaemem[table]'``).

        Examples
        --------
        >>> plan = plan_pipeline("sd15", 1536, 1536, memory="16 GB", runtime="mlx")
        >>> int(plan.to_pandas()["recommended"].sum())
        1
        """
        frame: pandas.DataFrame = need("pandas", "to_pandas").DataFrame(self.rows())
        return frame

    # ---- for people ----

    def _phases(self) -> list[str]:
        return distinct(phase.name for one in self.outcomes for phase in one.way.phases)

    def _grid(self) -> tuple[list[str], list[list[str]]]:
        names = self._phases()
        has_time = any(one.seconds for one in self.outcomes)
        header = ["way", *(f"{name} MiB" for name in names), "host MiB", *(["seconds"] * has_time), "outcome"]
        lines = []
        for one in self.outcomes:
            totals = {phase.name: phase.total for phase in one.way.phases}
            sizes = [f"{totals[name] / MIB:.0f}" if name in totals else "" for name in names]
            took = [str(one.seconds) if one.seconds else ""] * has_time
            lines.append([one.way.name, *sizes, f"{one.way.host / MIB:.0f}", *took, one.verdict])
        return header, lines

    def _text(self, markdown: bool = False) -> str:
        card = "" if self.room.card is None else f", {self.room.card / MIB:.0f} MiB of it for the run"
        parts = [f"{self.title}{card}", render(*self._grid(), markdown=markdown)]
        parts.append(self.reason)
        used = {name for one in self.outcomes for name, amount in one.way.work.items() if amount}
        if self.machine:
            parts += [f"{name}: {rate}" for name, rate in self.machine.rates.items() if name in used]
        if any(one.fits and one.way.peak.total > (self.room.card or one.way.peak.total) for one in self.outcomes):
            parts.append(
                "A way that fits although it takes more where there is room: PyTorch gives cached memory back."
            )
        parts += self.notes
        return ("\n\n" if markdown else "\n").join(parts)

    def __repr__(self) -> str:
        return self._text()

    def _repr_html_(self) -> str:
        header, lines = self._grid()
        best = self.recommended
        bold = next((line for one, line in zip(self.outcomes, lines, strict=True) if one is best), None)
        return f"<p>{html.escape(self.title)}</p>{html_table(header, lines, bold)}<p>{html.escape(self.reason)}</p>"


def planned(
    title: str,
    ways: Sequence[Way],
    room: Room,
    machine: Machine | None,
    measured: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> PipelinePlan:
    """A plan of given ways.

    Parameters
    ----------
    measured : dict of str to float, optional
        Seconds by a way's name, which the machine is calibrated with.

    Raises
    ------
    ValueError
        Seconds of a way that is none of these, or none that can be.
    """
    by_name = {way.name: way for way in ways}
    if measured:
        if not isinstance(measured, Mapping):
            raise ValueError(f"calibrate: want {{way: seconds}}, got {measured!r}")
        unknown = [name for name in measured if name not in by_name]
        if unknown:
            raise ValueError(f"calibrate: want ways out of {'; '.join(by_name)}, got {'; '.join(map(repr, unknown))}")
        for name, seconds in measured.items():
            if not 0 < real(seconds) < math.inf:
                raise ValueError(f"calibrate[{name!r}]: want more than 0 seconds, got {seconds!r}")
        assert machine is not None
        machine = machine.calibrated([(by_name[name].work, seconds) for name, seconds in measured.items()])
    notes = distinct([*notes, *(note for way in ways for note in way.notes)])
    return PipelinePlan(title, room, [outcome(way, room, machine) for way in ways], machine, notes)
