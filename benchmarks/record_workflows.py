"""Record ComfyUI's workflows from their rows, the files vaemem/data/workflows/*.json.

COMFYUI=path python benchmarks/record_workflows.py NAME ...
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from comfyui_code import version
from comfyui_workflow import FOLDER, Workflow, read_row

from vaemem.pipelines.programs import Recorded
from vaemem.prediction.recordings import SUFFIX
from vaemem.pytorch.pipeline_files import record_row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of rows")
    for name in parser.parse_args().names:
        row = read_row(name) | {"mixed": True, "versions": f"{version()}, torch {torch.__version__}"}
        if row["guides"]:
            row["unguided"] = {"negative_prompt": ""}
        contents = record_row(row, progress=True, pipe=Workflow(row))
        (FOLDER / f"{name}{SUFFIX}").write_text(json.dumps(contents, indent=1, default=list) + "\n", "utf-8")
        sizes = {role: Recorded(role, data).weights for role, data in contents["modules"].items()}
        shown = (f"{role} {sum(math.prod(w.shape) for w in of) / 1e9:.3f}e9" for role, of in sizes.items())
        print(f"{name}: {contents['text'].count(chr(10))} lines; parameters and buffers: {', '.join(shown)}")


if __name__ == "__main__":
    main()
