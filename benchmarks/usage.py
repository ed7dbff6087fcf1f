"""Count which of the models that people run have a known pipeline here, by ComfyUI's own counts of template uses.

    python benchmarks/usage.py

usage.csv has the counts of October 2026: open models by the names of the templates. A model is known if
`vaemem.predict_pipeline` takes its name, or asks which of its sizes is meant.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from vaemem._errors import ArgumentError
from vaemem._render import Columns
from vaemem.engine.names import find_called
from vaemem.pipelines.by_comfyui import NAMES
from vaemem.pipelines.components import known_pipeline

USAGE = Path(__file__).with_name("usage.csv")
SHOWN = 15  # of the models that are missing


class Use(NamedTuple):
    """A model's share of all uses; its pipeline by diffusers and by ComfyUI, "" if that is not known."""

    model: str
    share: float
    diffusers: str
    comfyui: str


def pipeline_of_model(model: str) -> str:
    """Return the pipeline of a model, or the sizes to choose from; "" if it has none here."""
    try:
        return known_pipeline("pipeline", model)
    except ArgumentError:
        called = find_called(model)
        return called.needs if called else ""


def read_uses() -> list[Use]:
    """Read usage.csv, the most used model first."""
    with USAGE.open(encoding="utf-8", newline="") as file:
        rows = [(row["model"], int(row["uses"])) for row in csv.DictReader(file)]
    whole, uses = sum(count for _, count in rows), []
    for model, count in sorted(rows, key=lambda row: -row[1]):
        name = pipeline_of_model(model)
        is_known = any(one in NAMES for one in name.split())  # one of its sizes, if it has several
        uses.append(Use(model, count / whole, name, name if is_known else ""))
    return uses


def known_share(uses: list[Use], program: str) -> float:
    """Return the share of uses whose pipeline is known by a program: ``"diffusers"`` or ``"comfyui"``."""
    return sum(use.share for use in uses if getattr(use, program))


def main() -> None:
    uses = read_uses()
    shares = " and ".join(f"{100 * known_share(uses, name):.1f}% by {name}" for name in ("diffusers", "comfyui"))
    print(f"Of all uses, {shares} have a known pipeline.\n")
    for name in ("diffusers", "comfyui"):
        missing = [use for use in uses if not getattr(use, name)][:SHOWN]
        rows = [(use.model, f"{100 * use.share:.1f}%") for use in missing]
        print(Columns(("model", "share"), rows, title=f"Not known by {name}, most used first:").text(), end="\n\n")


if __name__ == "__main__":
    main()
