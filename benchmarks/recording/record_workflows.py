"""Record ComfyUI's workflows from their rows, the files vaemem/data/workflows/*.json; and list the facts of all.

    COMFYUI=path python benchmarks/recording/record_workflows.py [NAME ...]

The recordings lie next to the rows; vaemem/data/generated/workflows.json lists the facts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from comfyui_code import version
from comfyui_workflow import FOLDER, Workflow, read_row
from record_rows import kept_facts, write_facts, write_recording

from vaemem.pipelines.components import pipeline_of
from vaemem.prediction.recording_files import SUFFIX, WORKFLOW_FOLDER

FACTS = FOLDER.with_name("generated") / "workflows.json"
MOST_FRAMES = 64  # of latents, for which the estimate of a decode is listed


def decode_estimates(workflow: Workflow) -> Iterator[tuple[int, float, float]]:
    """Yield (a, b, c): from a frames of latents on, a decode's estimate is (b frames + c) numbers for each square."""
    vae, kind = workflow.decoder, workflow.latent_format

    def numbers(frames: int) -> float:
        sides = (frames, 8, 8) if vae.latent_dim == 3 else (8, 8)
        return vae.memory_used_decode((1, kind.latent_channels, *sides), vae.vae_dtype) / 64 / vae.vae_dtype.itemsize

    first = 1
    while first <= MOST_FRAMES:
        b = numbers(first + 1) - numbers(first)
        if not math.isclose(numbers(first + 2) - numbers(first + 1), b, abs_tol=1e-6):
            b = 0.0  # the next frame begins another line
        c = numbers(first) - b * first
        yield first, b, c
        while first <= MOST_FRAMES and math.isclose(numbers(first), b * first + c):
            first += 1


def open_row(name: str) -> tuple[dict[str, Any], Workflow]:
    """Return a workflow's row, with what its own classes tell, and the workflow."""
    row = read_row(name)
    workflow = Workflow(row)
    row |= {"mixed": True, "versions": f"{version()}, torch {torch.__version__}"}
    vae = workflow.decoder
    row |= {"decodes": [*decode_estimates(workflow)], "usage": workflow.usage, "owns_tiles": vae.handles_tiling}
    return row | ({"unguided": {"negative_prompt": ""}} if row["guides"] else {}), workflow


def record(name: str) -> dict[str, Any]:
    """Record a workflow. Return the contents of its file."""
    from vaemem.pytorch.pipeline_files import record_row  # it needs the list of facts

    row, workflow = open_row(name)
    return record_row(row, progress=True, pipe=workflow)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of rows; without any, only list the facts")
    for name in parser.parse_args().names:
        write_recording(FOLDER / f"{name}{SUFFIX}", record(name))
    facts = {
        path.stem: kept_facts(pipeline_of(f"{WORKFLOW_FOLDER}{path.name}", json.loads(path.read_text("utf-8"))))
        for path in sorted(FOLDER.glob(f"*{SUFFIX}"))
    }
    write_facts(FACTS, facts)


if __name__ == "__main__":
    main()
