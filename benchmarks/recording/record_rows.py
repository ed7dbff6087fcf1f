"""Record pipelines from their rows, the files vaemem/data/pipelines/*.json; and list the facts of all of them.

    python benchmarks/recording/record_rows.py [NAME ...]

A row has a pipeline's class, its components' configs, and the arguments of its call. Its own code runs at several
sizes, without weights (vaemem/pytorch/pipeline_files.py). The recording lies next to the row. Rows without one name
modules of vaemem/data/components.json (record_modules.py), and have texts (record_pipelines.py).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from vaemem.pipelines.components import Pipeline, pipeline_of
from vaemem.pipelines.recorded_modules import Recorded
from vaemem.prediction.recording_files import PIPELINE_FOLDER, SUFFIX

DATA = Path(__file__).parents[2] / "vaemem" / "data"
FOLDER, FACTS = DATA / "pipelines", DATA / "generated" / "pipelines.json"


def kept_facts(kind: Pipeline) -> dict[str, Any]:
    """Return a pipeline's facts that are not the usual ones."""
    return {fact: value for fact, value in kind._asdict().items() if value != Pipeline._field_defaults.get(fact, ...)}


def facts_of(path: Path) -> dict[str, Any]:
    """Return a pipeline's facts that are not the usual ones. path: of its row"""
    recording, row = path.with_suffix(SUFFIX), json.loads(path.read_text("utf-8"))
    if recording.exists():
        kind = pipeline_of(f"{PIPELINE_FOLDER}{recording.name}", json.loads(recording.read_text("utf-8")))
    else:
        known, optional = (
            {role: one for role, one in row.get(key, {}).items() if isinstance(one, str)}
            for key in ("components", "optional")
        )
        told = {fact: row[fact] for fact in Pipeline._fields if fact in row and fact != "optional"}
        kind = Pipeline(f"{row['class']} of {row['repository']}", known, optional=optional, **told)
    return kept_facts(kind)


def write_recording(path: Path, contents: dict[str, Any]) -> None:
    """Write a recording's file, and print its numbers of lines, parameters and buffers."""
    path.write_text(json.dumps(contents, indent=1, default=list) + "\n", "utf-8")
    sizes = {role: Recorded(role, data).weights for role, data in contents["modules"].items()}
    shown = (f"{role} {sum(math.prod(w.shape) for w in of) / 1e9:.3f}e9" for role, of in sizes.items())
    print(f"{path.stem}: {contents['text'].count(chr(10))} lines; parameters and buffers: {', '.join(shown)}")


def write_facts(path: Path, facts: dict[str, dict[str, Any]]) -> None:
    """Write the facts of all pipelines or workflows, a line each."""
    lines = (f" {json.dumps(name)}: {json.dumps(one)}" for name, one in facts.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of rows; without any, only list the facts")
    for name in parser.parse_args().names:
        from vaemem.pytorch.pipeline_files import record_row  # it needs the list of facts

        row = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
        write_recording(FOLDER / f"{name}{SUFFIX}", record_row(row, progress=True))
    rows = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    listed = [name for name in json.loads(FACTS.read_text("utf-8")) if name in rows]  # new ones come last
    write_facts(FACTS, {name: facts_of(rows[name]) for name in {**dict.fromkeys(listed), **rows}})


if __name__ == "__main__":
    main()
