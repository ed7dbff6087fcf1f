"""Record pipelines from their rows, the files vaemem/data/pipelines/*.json; and list the facts of all of them.

    python benchmarks/record_rows.py [NAME ...]

A row has a pipeline's class, its components' configs, and the arguments of its call. Its own code runs at several
sizes, without weights (vaemem/pytorch/pipeline_files.py). The recording lies next to the row.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from vaemem.pipelines.programs import Recorded
from vaemem.prediction.recordings import SUFFIX
from vaemem.pytorch.pipeline_files import record_row

DATA = Path(__file__).parent.parent / "vaemem" / "data"
FACTS = "about row notes roles".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of rows; without any, only list the facts")
    folder = DATA / "pipelines"
    for name in parser.parse_args().names:
        row = json.loads((folder / f"{name}.json").read_text("utf-8"))
        contents = record_row(row, progress=True)
        (folder / f"{name}{SUFFIX}").write_text(json.dumps(contents, indent=1, default=list) + "\n", "utf-8")
        sizes = {role: Recorded(role, data).weights for role, data in contents["modules"].items()}
        shown = (f"{role} {sum(math.prod(w.shape) for w in of) / 1e9:.3f}e9" for role, of in sizes.items())
        print(f"{name}: {contents['text'].count(chr(10))} lines; parameters and buffers: {', '.join(shown)}")
    facts = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        data = json.loads(path.read_text("utf-8"))
        facts[path.stem] = {fact: data[fact] for fact in FACTS}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(fact)}" for name, fact in facts.items())
    (DATA / "pipelines.json").write_text(f"{{\n{lines}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
