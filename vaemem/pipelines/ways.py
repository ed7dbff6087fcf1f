"""The sensible ways to run a pipeline: whether each fits a card, how long it takes, and which is best."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vaemem._common import as_csv, distinct, need, real
from vaemem._errors import ArgumentError
from vaemem._render import Bullets, Code, Columns, Facts, Sheet, Shown, Sizer, in_gb, share
from vaemem._saving import write
from vaemem.prediction.phases import Way
from vaemem.prediction.seconds import REPEATS_DIFFER, Machine, Seconds
from vaemem.prediction.verdict import DOES_NOT_FIT, FITS, TIGHT, Verdict, judge_phases

if TYPE_CHECKING:
    import pandas

NEXT = 3  # ways shown next to the recommended one
WORTH = 0.1  # part of a way's time that another way must save to be named


class Room(NamedTuple):
    """The available memory and time.

    Attributes
    ----------
    card, host : int or None
        Bytes; None if unknown, so that everything fits.
    seconds : float or None
        The time limit.
    of_host : str
        Words for `host` if it was not given: ``"{} free in this machine"``.
    """

    card: int | None
    host: int | None = None
    seconds: float | None = None
    of_host: str = ""


class Outcome(NamedTuple):
    """The result of one way in a room.

    Attributes
    ----------
    way : Way
    seconds : Seconds or None
        Seconds of the whole run; None if no card was named and nothing was measured.
    phase_seconds : dict of str to Seconds
    fails_in : str or None
        The phase in which the card's memory runs out, ``"host"`` if the host's memory runs out, ``"time"`` if the run
        likely takes too long.
    short : float
        Missing bytes for the whole run, or seconds over the limit.
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
        """Return ``"fits"``, ``"tight"`` or ``"does not fit"``."""
        return DOES_NOT_FIT if self.fails_in else TIGHT if self.way.unsure else FITS

    @property
    def summary(self) -> str:
        """Put the outcome into words, with the missing amount."""
        return self.summarize(in_gb)

    def summarize(self, size: Sizer) -> str:
        """Return `summary` with sizes written by `size`."""
        lacks = f"{size(self.short)} short"
        # Whether even its lowest seconds exceed the room's.
        is_surely_late = self.seconds is not None and self.seconds.low > self.seconds.likely - self.short
        words = {
            None: f"tight: {re.split('[,;]', self.way.unsure)[0]}" if self.way.unsure else "fits",
            "time": f"{'' if is_surely_late else 'likely '}takes {self.short:.0f} s too long",
            "host": f"host memory is {lacks}",
        }
        return words.get(self.fails_in, f"runs out in {self.fails_in}, {lacks}")


def runs_out(verdict: Verdict) -> tuple[str, int] | None:
    """Return the phase in which memory runs out, and how many bytes the card lacks for the whole run."""
    full = verdict.out_of_memory_at
    return full and (full[0], max(-verdict.spare, 1))


def outcome(way: Way, room: Room, machine: Machine | None) -> Outcome:
    """Judge a way in a room; judge a way that was not played by its phases."""
    out = way.out
    if not way.played and room.card is not None:
        out = runs_out(judge_phases(way.phases, room.card))
    took = machine.seconds(way.work) if machine else None
    each = {phase.name: machine.seconds(phase.work) for phase in way.phases} if machine else {}
    host, seconds = (math.inf if there is None else there for there in room[1:3])
    fails: list[tuple[str | None, float]] = [out] if out else []
    fails += [("host", way.host - host)] if way.host > host else []
    fails += [("time", took.likely - seconds)] if took and took.likely > seconds else []
    return Outcome(way, took, each, *[*fails, (None, 0)][0])


def _quickest(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first of the fastest outcomes; if no time is known, the first of all."""
    fastest = min((one.seconds.likely for one in outcomes if one.seconds), default=0.0)

    def is_as_fast(one: Outcome) -> bool:
        return one.seconds is None or one.seconds.likely <= (1 + REPEATS_DIFFER) * fastest

    return next(filter(is_as_fast, outcomes), None)


class PipelinePlan(Shown):
    """The answer of `vaemem.plan_pipeline`. Printing it shows every way and the recommendation.

    Attributes
    ----------
    title : str
        The request.
    room : Room
    outcomes : tuple of Outcome
        In the order of the ways, the plainest first.
    machine : Machine or None
        The rates behind the seconds.
    safe : bool
        Whether a way that fits is recommended before a tight one.
    measured : dict of str to float
        Measured seconds, by names of ways.
    notes : tuple of str
        The assumptions.
    assumed_card : str
        A sentence that names the card that stands for yours, if none was named and none is present; "" otherwise.
    left_out : str
        A sentence on ways that are not tried, and why; "" otherwise.

    Examples
    --------
    >>> plan = plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx")
    >>> plan.recommended.way.name
    '--low-ram'
    >>> plan["mflux without options"].summary
    'runs out in denoise, ... short'
    >>> print(plan)
    Take --low-ram. ...
    """

    def __init__(
        self, title: str, ways: Sequence[Way], room: Room, machine: Machine | None = None,
        measured: Mapping[str, float] | None = None, notes: Sequence[str] = (), safe: bool = True,
        assumed_card: str = "",
    ):  # fmt: skip
        """Plan some ways. `measured` holds seconds by a way's name and calibrates the machine. Raise ValueError for an
        unknown way or impossible seconds."""
        if measured and machine:
            machine = machine.calibrated(_runs(ways, measured))
        self.title, self.room, self.machine, self.safe = title, room, machine, safe
        self.assumed_card, self.left_out = assumed_card, ""
        self.measured, self._model_note = dict(measured or {}), " ".join(notes)
        self.outcomes = tuple(outcome(way, room, machine) for way in ways)
        self.notes = tuple(distinct([*notes, *(note for way in ways for note in way.notes)]))

    def __len__(self) -> int:
        return len(self.outcomes)

    def __getitem__(self, name: str) -> Outcome:
        """Return the outcome of the way of that name; ValueError for an unknown name."""
        found = {outcome.way.name: outcome for outcome in self.outcomes}
        if name not in found:
            raise ArgumentError("way", f"one of {'; '.join(found)}", repr(name))
        return found[name]

    @property
    def recommended(self) -> Outcome | None:
        """Return the best way that goes through. With `safe`, prefer ways that fit to tight ways. Then prefer ways that
        leave the picture unchanged, then the fastest. If time bands overlap, prefer the ways that were measured. Among
        equally fast ways (within 2%, as runs of one way differ), or if no time is known, take the first and
        plainest."""
        peers = self._peers
        return _quickest([one for one in peers if one.way.name in self.measured] or peers)

    @property
    def _peers(self) -> list[Outcome]:
        """List the fastest candidate for the recommendation, and the candidates that may be as fast."""
        fastest = min(self._alike, key=lambda one: one.seconds.likely if one.seconds else 0.0, default=None)
        return [one for one in self._alike if not (fastest and self.is_faster(fastest, one))]

    def is_faster(self, one: Outcome, other: Outcome) -> bool:
        """Say whether a way is surely faster than another, by more than runs of one way differ. Work that both share
        cancels out: the highest time of this way's extra work must be below the lowest of the other's extra work.

        Examples
        --------
        >>> plan = plan_pipeline("sd15", 1024, 1024, gpu="RTX 3060")
        >>> plan.is_faster(plan["no offload, VAE whole"], plan["sequential offload, VAE whole"])
        True
        """
        if self.machine is None or one.seconds is None or other.seconds is None:
            return False
        names = {**one.way.work, **other.way.work}
        more, less = (
            self.machine.seconds({name: max(a.get(name, 0) - b.get(name, 0), 0) for name in names})
            for a, b in ((one.way.work, other.way.work), (other.way.work, one.way.work))
        )
        return more.high < less.low and (1 + REPEATS_DIFFER) * one.seconds.likely < other.seconds.likely

    @property
    def _alike(self) -> list[Outcome]:
        """List the candidates for the recommendation."""
        through = [one for one in self.outcomes if one.fits]
        through = [one for one in through if self.safe and one.verdict == FITS] or through
        return [one for one in through if not one.way.changes] or through

    @property
    def reason(self) -> str:
        """Say which way to take and why, and why not others."""
        return " ".join([self._headline(in_gb), *self._why_not(in_gb)])

    @property
    def alternative(self) -> Outcome | None:
        """Return the fastest way that fits if a slightly different decode is fine: the VAE in tiles, or a VAE that
        stays in float16. The alternative saves at least a tenth of the recommended way's time. None if there is no such
        way."""
        best = self.recommended
        others = [one for one in self.outcomes if one.verdict == FITS and one.way.changes and not one.way.rounds]
        other = _quickest(others)
        if best is None or best.way.changes or best.seconds is None or other is None or other.seconds is None:
            return None
        return other if other.seconds.likely <= (1 - WORTH) * best.seconds.likely else None

    def _cost(self, one: Outcome, size: Sizer) -> str:
        """Say what a way costs: time, and the host's memory."""
        took = f" It takes {one.seconds}." if one.seconds else ""
        host = f" The host's memory keeps {self._held(one, size)}." if one.way.host else ""
        return took + host

    def _held(self, one: Outcome, size: Sizer) -> str:
        """Say which part of the host's memory a way takes."""
        return f"{size(one.way.host)} of weights{self._of_host(size)}"

    def _of_host(self, size: Sizer) -> str:
        """Say how much memory the host has for weights."""
        return "" if self.room.host is None else f", of {(self.room.of_host or '{}').format(size(self.room.host))}"

    def _headline(self, size: Sizer) -> str:
        """Say what to do, why, and what is faster if the decode may differ a little."""
        best = self.recommended
        if best is None:
            nearest = self._ranked[0]
            host = self._of_host(size) if nearest.fails_in == "host" else ""
            return f"Nothing fits. {nearest.way.name} comes nearest: {nearest.summarize(size)}{host}."
        alone, peers = len(self._alike) == 1, [one.way.name for one in self._peers if one is not best]
        through = "fit" if best.verdict == FITS else "go through"
        if alone:
            through = "fits" if best.verdict == FITS else "goes through"
        kept = f" and leave{'s' * alone} the picture as it is"
        picture = f", though {best.way.changes}" if best.way.changes else kept
        which = f"the {len(self._alike)} that {through}{picture}"
        if alone:
            which = f"It is the only one that {through}{picture}"
        elif best.seconds and peers:
            others = f"'{peers[0]}'" if len(peers) == 1 else f"{len(peers)} others"
            slower = "; the rest are slower" if len(peers) + 1 < len(self._alike) else ""
            which = f"Of {which}, this way and {others} are about as fast{slower}"
        else:
            which = f"It is the {'fastest' if best.seconds else 'plainest'} of {which}"
        tight = f" It is tight: {best.way.unsure}." if best.way.unsure else ""
        said = f"Take {best.way.name}. {which}.{self._cost(best, size)}{self._of_measured(best)}{tight}"
        if other := self.alternative:
            sure = "" if self.is_faster(other, best) else ", which may be no faster"
            said += f" If a slightly different decode is fine, take {other.way.name}: it takes {other.seconds}{sure}"
            if other.way.host != best.way.host:
                said += f" and keeps {size(other.way.host)} on the host"
            said += f"; {other.way.changes}."
        return said

    def _why_not(self, size: Sizer) -> list[str]:
        """Say why not to take the plainest way, which ways would be faster, and which were not tried."""
        best, plainest = self.recommended, self.outcomes[0]
        said = [self.left_out] * bool(self.left_out)
        if best is None:
            return said
        plain = best is plainest or plainest.fits
        return [*([] if plain else [f"{plainest.way.name}: {plainest.summarize(size)}."]), *self._faster(best), *said]

    @property
    def _ranked(self) -> list[Outcome]:
        """Sort all ways: the recommended one, `alternative`, ways that fit, tight ones (each with those that change the
        picture last), and ways that fail: first those that take too long, then without host memory, then without the
        card's."""
        order, best, beside = {None: 0, "time": 1, "host": 2}, self.recommended, self.alternative

        def rank(one: Outcome) -> tuple[Any, ...]:
            last = one.short if one.fails_in else one.seconds.likely if one.seconds else 0.0
            first = [one is not best, one is not beside]
            return *first, order.get(one.fails_in, 3), one.verdict != FITS, bool(one.way.changes), last

        return sorted(self.outcomes, key=rank)

    def _of_measured(self, best: Outcome) -> str:
        """If some ways were measured, say whether this one was; otherwise name the fastest measured way."""
        measured = [one for one in self.outcomes if one.way.name in self.measured]
        if not measured:
            return ""
        if best in measured:
            return " It was measured."
        quickest = min(measured, key=lambda one: self.measured[one.way.name])
        took = f"{quickest.way.name}, in {self.measured[quickest.way.name]:.0f} s"
        return f" It was not measured; the fastest measured way is {took}."

    def _faster(self, best: Outcome) -> Iterator[str]:
        """Yield the fastest tight way and the fastest way that changes the picture, if the best way is neither. Each
        such way must save at least a tenth of the time of the ways to take. Without seconds, yield the plainest tight
        way."""
        beside = self.alternative
        tight = [one for one in self.outcomes if one.verdict == TIGHT and not one.way.changes]
        changed = [one for one in self.outcomes if one.verdict == FITS and one.way.changes]
        for others, is_apart in ((tight, best.verdict == FITS), (changed, not best.way.changes)):
            other = _quickest(others) if is_apart else None
            if other is None:
                continue
            if best.seconds is None or other.seconds is None:
                is_worth, took = others is tight, ""
            else:
                least = beside.seconds if beside and beside.seconds and others is changed else best.seconds
                is_worth, sure = other.seconds.likely <= (1 - WORTH) * least.likely, self.is_faster(other, best)
                took = f" would take {other.seconds}{'' if sure else ', which may be no faster'}, and"
            why = f"is tight: {other.way.unsure}" if others is tight else f"changes the picture: {other.way.changes}"
            if is_worth:
                yield f"{other.way.name}{took} {why}."

    # ---- files and data frames ----

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per way: bytes by phase, seconds with their band, the verdict.

        Examples
        --------
        >>> plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx").rows()[0]["way"]
        'mflux without options'
        """
        best, rows = self.recommended, []
        for one in self.outcomes:
            way, took, phases = one.way, one.seconds, {phase.name: phase for phase in one.way.phases}
            row: dict[str, Any] = {"way": way.name, "fits": one.fits, "unsure": way.unsure, "fails_in": one.fails_in}
            row["short"] = one.short
            for name in self._phases():
                phase, lasts, key = phases.get(name), one.phase_seconds.get(name), name.replace(" ", "_")
                row[f"{key}_bytes"] = phase and phase.total
                row[f"{key}_weights_bytes"] = phase and phase.weights
                row[f"{key}_seconds"] = lasts and lasts.likely
            row |= {"peak_bytes": way.peak.total, "host_bytes": way.host, "seconds": took and took.likely}
            row |= {"seconds_low": took and took.low, "seconds_high": took and took.high, "verdict": one.verdict}
            row |= {"summary": one.summary, "changes": way.changes, "recommended": one is best}
            rows.append(row)
        return rows

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the rows as CSV to a file, or return them as text.

        Examples
        --------
        >>> plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx").to_csv().splitlines()[0]
        'way,fits,...'
        """
        return write(path, as_csv(self.rows()))

    def _data(self) -> dict[str, Any]:
        best = self.recommended
        rates = {name: str(rate) for name, rate in self.machine.rates.items()} if self.machine else {}
        return {
            "answer": "plan", "asked": {"title": self.title}, "verdict": best.verdict if best else DOES_NOT_FIT,
            "recommended": best.way.name if best else None, "code": best.way.code if best else "",
            "summary": self._headline(in_gb), "reason": self.reason,
            "alternative": self.alternative.way.name if self.alternative else None,
            "card": {"assumed": self.assumed_card, "available_bytes": self.room.card},
            "host": {"available_bytes": self.room.host, "source": self._of_host(in_gb).removeprefix(", of ")},
            "ways": self.rows(),
            "rates": rates, "notes": list(self.notes),
        }  # fmt: skip

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas.DataFrame. Needs pandas (``pip install 'vaemem[table]'``).

        Examples
        --------
        >>> plan = plan_pipeline("zimage-turbo", 1536, 1536, memory="24 GB", runtime="mlx")
        >>> int(plan.to_pandas()["recommended"].sum())
        1
        """
        return need("pandas", "to_pandas").DataFrame(self.rows())

    # ---- for people ----

    def _phases(self) -> list[str]:
        return distinct(phase.name for one in self.outcomes for phase in one.way.phases)

    def _rows(self, outcomes: Sequence[Outcome], size: Sizer, phases: bool) -> Columns:
        """Lay out one row per way, with or without its phases."""
        lines = []
        for one in outcomes:
            totals = {phase.name: phase.total for phase in one.way.phases}
            sizes = [size(totals[name]) if name in totals else "" for name in self._phases()] if phases else []
            peak, host = size(one.way.peak.total), size(one.way.host)
            lines.append([one.way.name, one.summarize(size), str(one.seconds or ""), peak, host, *sizes])
        header = ["way", "outcome", "seconds", "peak", "host", *(self._phases() if phases else [])]
        if not any(one.seconds for one in outcomes):
            header, lines = [*header[:2], *header[3:]], [[*line[:2], *line[3:]] for line in lines]
        title = f"All {len(lines)} ways, in the order in which they are tried:" if phases else ""
        best = next((i for i, one in enumerate(outcomes) if one is self.recommended), None)
        return Columns(header, lines, best, title, detail=phases)

    def _sheet(self, size: Sizer) -> Sheet:
        best, room = self.recommended, self.room
        headline = " ".join(filter(None, [self._headline(size), self.assumed_card]))
        facts = [("for", self.title), ("model", self._model_note)]
        if best:
            took = str(best.seconds) if best.seconds else ""
            held = share(best.way.peak.total, room.card, size) if room.card else size(best.way.peak.total)
            host = self._held(best, size) if best.way.host else ""
            facts += [("card", f"{held}, at the peak in {best.way.peak.name}"), ("host", host), ("time", took)]
        code = [Code(best.way.code)] if best and best.way.code else []
        shown = self._rows(self._ranked[: 1 + NEXT], size, phases=False)
        return Sheet(headline, [
            Facts(facts), *code, shown, Bullets([*self._assumptions(), *self._why_not(size)]),
            self._rows(self.outcomes, size, phases=True), Facts(self._rates(), detail=True),
            Bullets([*self._loading(size), *self.notes], detail=True),
        ])  # fmt: skip

    def _assumptions(self) -> list[str]:
        """State the assumptions in one sentence."""
        seconds = "seconds follow from the card's rates and from others' measurements" if self.machine else ""
        safely = "a way that fits is preferred to one that is tight" if self.safe else ""
        told = "; ".join(filter(None, [seconds, safely]))
        return [f"Assumed: {told}. --all (all=True) shows every way and every assumption."] if told else []

    def _rates(self) -> list[tuple[str, str]]:
        if not self.machine:
            return []
        works = [phase.work for one in self.outcomes for phase in one.way.phases]
        used = {name for work in works for name, amount in work.items() if amount}
        return [(name, str(rate)) for name, rate in self.machine.rates.items() if name in used]

    def _loading(self, size: Sizer) -> Iterator[str]:
        """Say how long the first way loads from a disk."""
        works = (phase.work for one in self.outcomes for phase in one.way.phases)
        read = next((work for work in works if "disk" in work), None)
        if self.machine and read:
            took = self.machine.seconds(read)
            yield f"Loading reads {size(read['disk'])} of weights once, {took}; the seconds above leave it out."


def _runs(ways: Sequence[Way], measured: Any) -> list[tuple[Mapping[str, float], float]]:
    """List (work, seconds) of the measured ways."""
    if not isinstance(measured, Mapping):
        raise ArgumentError("calibrate", "{way: seconds}", repr(measured))
    work = {way.name: way.work for way in ways}
    unknown = [name for name in measured if name not in work]
    if unknown:
        raise ArgumentError("calibrate", f"ways out of {'; '.join(work)}", "; ".join(map(repr, unknown)))
    for name, seconds in measured.items():
        if not 0 < real(seconds) < math.inf:
            raise ArgumentError(f"calibrate[{name!r}]", "more than 0 seconds", repr(seconds))
    return [(work[name], seconds) for name, seconds in measured.items()]
