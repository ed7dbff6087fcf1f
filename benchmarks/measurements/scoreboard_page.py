"""The scoreboard in words, tables and a figure: what docs/ESTIMATORS.md shows."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from measurements.scoreboard import CARDS, Score, Scored, errors_of, most_of, why_not
from measurements.vocabulary import HERE, Measurement
from vaemem._common import TILED_OPS

BEGIN, END = "<!-- generated from here -->", "<!-- to here -->"
LARGE = 0.05  # an error that gets a cause
# The figure: pixels, and the ratios at its ends.
WIDTH, LEFT, RIGHT, ROW, LEAST, MOST = 770, 200, 20, 56, 1 / 4, 4.0


def percent(share: float) -> str:
    """Format a share: two digits, and no more decimals than it needs."""
    value = 100 * share
    return f"{value:.0f}%" if value >= 10 else f"{value:.1f}%" if value >= 1 else f"{value:.2f}%"


def causes() -> list[dict[str, str]]:
    """Read causes.csv: why vaemem's answers to some rows are wrong."""
    with open(HERE / "causes.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cause_of(row: Measurement, known: Sequence[dict[str, str]]) -> str:
    """Return why the answer to a row is wrong; "" if nobody knows."""
    words = f"{row.source} {row.model} {row.dtype} {row.components} {row.settings} {row.way} {row.device} {row.counter}"
    for cause in known:
        if all(word in words for word in cause["words"].split("; ")):
            return cause["cause"]
    return ""


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in cells)


def score_table(scores: Sequence[Score]) -> str:
    head = ("estimator", "answers", "median error", "vaemem's on the same rows", "19 of 20 within", "worst",
            "says it fits, and it does not", "says it does not, and it fits")  # fmt: skip
    return table(head, [
        (f"**{s.name}**" if i == 0 else s.name, f"{s.answered} of {s.asked}", percent(s.median),
         percent(s.vaemem) if i > 1 else "", percent(s.p95), percent(s.worst), s.too_small, s.too_large)
        for i, s in enumerate(scores)
    ])  # fmt: skip


def kind_of(row: Measurement) -> str:
    if row.runtime == "sd.cpp":
        return "stable-diffusion.cpp"
    return "a VAE in PyTorch" if row.op in TILED_OPS else "a pipeline"


def kind_table(answers: Mapping[str, Sequence[Scored]]) -> str:
    """Make the table of the estimators' median errors for each kind of run, with the number of answers."""
    kinds = {kind_of(row): None for row, _ in next(iter(answers.values()))}

    def shown(rows: Sequence[Scored], kind: str) -> str:
        errors = errors_of([pair for pair in rows if kind_of(pair[0]) == kind])
        return f"{percent(statistics.median(errors))} of {len(errors)}" if errors else ""

    return table(("", *answers), [(kind, *(shown(rows, kind) for rows in answers.values())) for kind in sorted(kinds)])


def reasons_table(rows: Sequence[Scored]) -> str:
    """Make the table of why vaemem has no answer."""
    reasons = Counter(why_not(row) for row, answer in rows if not answer)
    return table(("why there is no answer", "rows"), reasons.most_common())


def summary(rows: Sequence[Scored]) -> tuple[object, ...]:
    """Count rows and vaemem's answers, with the answers' median error, 19 of 20, and worst."""
    errors = errors_of(rows)
    if not errors:
        return (len(rows), 0, "", "", "")
    shown = (statistics.median(errors), most_of(errors), errors[-1])
    return (len(rows), len(errors), *map(percent, shown))


def grouped(rows: Sequence[Scored], name: str) -> list[tuple[object, ...]]:
    """Sum up rows by a column, the most frequent value first."""
    groups: dict[str, list[Scored]] = {}
    for pair in rows:
        groups.setdefault(getattr(pair[0], name), []).append(pair)
    return [(key, *summary(of)) for key, of in sorted(groups.items(), key=lambda item: -len(item[1]))]


def counter_table(rows: Sequence[Scored]) -> str:
    """Make the table of vaemem's errors by the counter that was read, without counters that have no answer."""
    lines = [line for line in grouped(rows, "counter") if line[2]]
    return table(("counter", "rows", "answers", "median error", "19 of 20 within", "worst"), lines)


def of_sources(rows: Sequence[Scored]) -> str:
    """Make a CSV of vaemem's errors by source."""
    head = ("source", "rows", "answered", "median_error", "19_of_20_within", "worst")
    return "".join(",".join(map(str, line)) + "\n" for line in (head, *grouped(rows, "source")))


def of_errors(rows: Sequence[Scored]) -> str:
    """Make the table of vaemem's large errors by their causes."""
    known = causes()
    groups: dict[tuple[str, str], list[float]] = {}
    for row, answer in rows:
        error = answer.bytes / row.bytes - 1 if answer else 0.0
        if abs(error) > LARGE:
            groups.setdefault((cause_of(row, known) or "not known", row.source), []).append(error)
    lines = [
        (source, len(errors), f"{100 * min(errors):+.0f}% to {100 * max(errors):+.0f}%", cause)
        for (cause, source), errors in sorted(groups.items(), key=lambda item: -max(map(abs, item[1])))
    ]
    return table(("source", "rows", "errors", "cause"), lines)


def of_each_source(rows: Sequence[Scored]) -> float:
    """Return the median of the sources' median errors: a source with many rows counts once."""
    sources: dict[str, list[Scored]] = {}
    for pair in rows:
        sources.setdefault(pair[0].source, []).append(pair)
    return statistics.median(statistics.median(errors) for errors in map(errors_of, sources.values()) if errors)


def text(
    unseen: Sequence[Score], every: Sequence[Score], answers: Mapping[str, Sequence[Scored]], rows: Sequence[Scored],
    counts: dict[str, int],
) -> str:  # fmt: skip
    """Write the part of the document with numbers. unseen, answers: on rows that vaemem has not learned from.
    every, rows: on all rows; rows are vaemem's."""
    own, taught, mine = unseen[0], every[0], next(iter(answers.values()))
    worst = own.worst_row
    assert worst is not None
    return f"""\
**On measurements that vaemem has never seen, vaemem's median error is {percent(own.median)}. 19 of 20 answers are
within {percent(own.p95)}, and the worst answer is off by {percent(own.worst)}.** vaemem answers {own.answered} of
{own.asked} questions, and gives no number for the others. If each source counts once, the median error is
{percent(of_each_source(mine))}. The worst answer is for {worst.model}, {worst.op.replace("_", " ")},
{worst.height}x{worst.width}, by {worst.source}.

The table has the median error of each estimator, and the number of its answers:

{kind_table(answers)}

![Each dot is a measurement: what an estimator says, divided by what was measured](images/scoreboard.svg)

Each estimate also says whether the run fits cards with {", ".join(map(str, CARDS[:-1]))} and
{CARDS[-1]} GiB. An estimator is wrong if the size of a card lies between the estimate and the measured value.

{score_table(unseen)}

vaemem also gives an upper bound, `upper`. {own.within} of {own.bounded} measured values of reserved memory are below
`upper`. In the median, `upper` is {percent(own.above)} above the measured value.

## Where vaemem is wrong, and why

The table has all errors above {percent(LARGE)} on {counts["scored"]} rows, including the rows that vaemem has learned
from:

{of_errors(rows)}

## Which questions it does not answer

{reasons_table(mine)}

## By counter

{counter_table(mine)}

## With the rows that vaemem has learned from

On all rows, the median error of vaemem's {taught.answered} answers is {percent(taught.median)}. 19 of 20 answers are
within {percent(taught.p95)}, and the worst answer is off by {percent(taught.worst)}.

## The estimators

{table(("estimator", "input or source"), [(s.name, s.source) for s in unseen])}

There are {counts["all"]} rows of {counts["sources"]} sources by {counts["publishers"]} publishers.
{counts["doubtful"]} doubtful rows are not scored. `benchmarks/results/scoreboard.csv` has the errors by source.
"""


def figure(answers: Sequence[tuple[str, Sequence[Scored]]]) -> str:
    """Draw each estimator's answers as dots: the estimate divided by the measured value, on a logarithmic scale."""
    height = ROW * len(answers) + 70

    def x_of(ratio: float) -> float:
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{x_of(0.5):.0f}" y="18" text-anchor="middle" fill="#b00">says too little: out of memory</text>',
        f'<text x="{x_of(2):.0f}" y="18" text-anchor="middle" fill="#666">says too much</text>',
    ]
    for ratio, label in ((1 / 4, "a quarter"), (1 / 2, "half"), (1, "exact"), (2, "twice"), (4, "4 times")):
        x, colour = x_of(ratio), "#222" if ratio == 1 else "#ccc"
        anchor = "start" if ratio == LEAST else "end" if ratio == MOST else "middle"
        out.append(f'<line x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{height - 34}" stroke="{colour}"/>')
        out.append(f'<text x="{x:.1f}" y="{height - 16}" text-anchor="{anchor}">{label}</text>')
    for place, (name, rows) in enumerate(answers):
        middle, jitter = 26 + ROW * (place + 0.5), random.Random(place)
        colour = "#06c" if place < 2 else "#c60"
        out.append(f'<text x="{LEFT - 10}" y="{middle + 4:.0f}" text-anchor="end">{escape(name)}</text>')
        for row, answer in rows:
            if answer:
                y = middle + ROW * 0.36 * (2 * jitter.random() - 1)
                x = x_of(answer.bytes / row.bytes)
                out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}" fill-opacity="0.35"/>')
    return "\n".join([*out, "</svg>", ""])
