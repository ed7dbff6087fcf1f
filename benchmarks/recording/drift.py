"""Run pipelines and workflows with the programs that are installed, and report what their recordings say otherwise.

    python benchmarks/recording/drift.py [NAME ...]       # of vaemem/data/pipelines; all by default
    COMFYUI=path python benchmarks/recording/drift.py comfyui/NAME ...  # of vaemem/data/workflows; "comfyui/" for all

Each runs at a few sizes that were not fitted. It exits with 1 if anything differs, or does not run. Then record the row
again (record_rows.py, record_workflows.py, record_pipelines.py), and read what changes in answers. Of pipelines with
texts, what they themselves do is compared; record_modules.py records what their components do.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from record_rows import FOLDER

from vaemem.pipelines.components import PIPELINES
from vaemem.prediction.recording_files import SUFFIX

WORKFLOWS, COMFYUI = FOLDER.parent / "workflows", "comfyui/"


def drift_of(name: str) -> list[str]:
    """Return in words what a recording says otherwise than the code that is installed."""
    from vaemem.pytorch.pipeline_files import find_drift  # it needs the list of facts

    folder, own = (WORKFLOWS if name.startswith(COMFYUI) else FOLDER), name.removeprefix(COMFYUI)
    if folder is FOLDER and not (folder / f"{own}{SUFFIX}").exists():
        return _drift_of_texts(own)
    contents: dict[str, Any] = json.loads((folder / f"{own}{SUFFIX}").read_text("utf-8"))
    if folder is FOLDER:
        return find_drift(json.loads((folder / f"{own}.json").read_text("utf-8")), contents)
    from record_workflows import open_row  # it imports ComfyUI

    row, workflow = open_row(own)
    return find_drift(row, contents, workflow)


def _drift_of_texts(name: str) -> list[str]:
    from record_pipelines import check

    found = []
    for is_begun in (False, True)[: 1 + PIPELINES[name].begins]:
        try:
            check(name, is_begun)
        except ValueError as error:
            found.append(f"{'with an image: ' * is_begun}{error}")
    return found


def names(asked: list[str]) -> list[str]:
    """Return the names of recordings. Without any: all of the packaged pipelines."""
    if asked == [COMFYUI]:
        return sorted(f"{COMFYUI}{path.stem}" for path in WORKFLOWS.glob(f"*{SUFFIX}"))
    return asked or sorted(PIPELINES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    drifted = False
    for name in names(parser.parse_args().names):
        try:
            found = drift_of(name)
        except Exception as error:
            found = [f"does not run: {type(error).__name__}: {error}"]
        drifted |= bool(found)
        print(f"{name}: {'differs' if found else 'as recorded'}", flush=True)
        for line in found:
            print(f"  {line}", flush=True)
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
