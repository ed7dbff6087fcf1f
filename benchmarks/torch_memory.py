"""What real PyTorch takes for diffusers' VAEs, beside what vaemem says that it takes.

    python benchmarks/torch_memory.py [--sizes 832x1216 720x1280] [--models sd15 sdxl flux]
        [--dtypes float16 bfloat16 float32] [--ops encode decode] [--runs 5] [--profile] [--snapshots FOLDER]

Sizes are height x width. Each case is measured in a process of its own, since what is reserved depends on what a
process did before: two warm-up runs, then the mean of five, as `vaemem.pytorch.measure` does it. Without diffusers the
same module in plain PyTorch (torch_vae.py) stands in, and the column `versions` says so. The prediction is that
of the same runs with the GPU, PyTorch and cuDNN that were measured (`vaemem.predict` says the first of them). Writes
benchmarks/results/torch_memory_<gpu>.csv; with --profile also torch_workspaces_<gpu>.csv, the scratch that cuDNN took
for each convolution. On the CPU only the growth of the process and the seconds are measured, and nothing is predicted.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import commit, write_csv

from vaemem.prediction.benchmark import Protocol, benchmark
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.workspace import Workspace
from vaemem.pytorch import measure

MIB = 2**20
ASKED = ("model", "op", "height", "width", "dtype", "runtime", "device")


def size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return int(height), int(width)


def measured(case: dict) -> tuple[dict | None, str]:
    """The row of a case, from a process of its own; or None and the last line of what went wrong."""
    done = subprocess.run([sys.executable, __file__, "--worker", json.dumps(case)], capture_output=True, text=True)
    if done.returncode:
        return None, done.stderr.strip().rpartition("\n")[2] or f"ended with status {done.returncode}"
    return json.loads(done.stdout.strip().rpartition("\n")[2]), ""


def work(case: dict) -> None:
    """The worker's side."""
    model, note = case["model"], ""
    if importlib.util.find_spec("diffusers") is None:
        from torch_vae import AutoencoderKL

        model, note = AutoencoderKL(architecture(model)), ", module benchmarks/torch_vae.py"
    table = measure(
        model, case["op"], [(case["height"], case["width"])], [case["dtype"]], device=case["device"],
        warmups=case["warmups"], runs=case["runs"], snapshot=case["snapshot"], profile=case["profile"],
    )  # fmt: skip
    row = table[0]
    print(json.dumps(row | {"model": case["model"], "versions": row["versions"] + note}))


def versions(row: dict) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in row["versions"].split(", "))


def predicted(model: str, row: dict, warmups: int, runs: int) -> dict:
    """What the same runs take in a simulated process, and the errors; or why there is no prediction."""
    have = versions(row)
    tiled = row["op"].endswith("_tiled")
    try:
        process = SimulatedProcess(row["device"], have["cudnn"], have["torch"])
        vae = process.load(model, row["dtype"], row["runtime"])
        said = benchmark(
            process, vae, row["op"].removesuffix("_tiled"), row["height"], row["width"], tile=512 if tiled else 0,
            protocol=Protocol(warmups, runs),
        )  # fmt: skip
    except ValueError as error:  # a GPU, PyTorch or cuDNN that is not known
        return {"workspace_source": f"no prediction: {error}"}
    out: dict = {"workspace_source": process.workspace_source}
    for what in ("allocated", "reserved"):
        value = round(sum(getattr(run, what) for run in said) / runs)
        out[f"predicted_{what}_bytes"] = value
        out[f"{what}_error_percent"] = f"{100 * (value / row[f'{what}_bytes'] - 1):.3f}"
    return out


def result(case: dict, row: dict | None, failure: str, said: dict) -> dict:
    """A line of the CSV; a run that did not fit has its message and no figures."""
    row = row or dict.fromkeys(("allocated_bytes", "reserved_bytes", "seconds"), None) | case | {"runtime": "diffusers"}
    return {
        **{name: row[name] for name in ASKED},
        "measured_allocated_bytes": row["allocated_bytes"],
        "predicted_allocated_bytes": said.get("predicted_allocated_bytes"),
        "allocated_error_percent": said.get("allocated_error_percent"),
        "measured_reserved_bytes": row["reserved_bytes"],
        "predicted_reserved_bytes": said.get("predicted_reserved_bytes"),
        "reserved_error_percent": said.get("reserved_error_percent"),
        "seconds": row["seconds"],
        "workspace_source": said.get("workspace_source"),
        "versions": row.get("versions"),
        "failure": failure,
        "commit": commit(),
    }


def shown(line: dict) -> str:
    head = f"{line['model']:5} {line['op']:13} {line['height']}x{line['width']} {line['dtype']:9}"
    if line["failure"]:
        return f"{head} {line['failure']}"
    parts = []
    for what in ("allocated", "reserved"):
        value, guess = line[f"measured_{what}_bytes"], line[f"predicted_{what}_bytes"]
        if value is not None:
            beside = "" if guess is None else f" (predicted {guess / MIB:.2f}, {line[f'{what}_error_percent']}%)"
            parts.append(f"{what} {value / MIB:.2f}{beside}")
    return f"{head} {', '.join(parts)} MiB, {line['seconds']:.3f} s"


def workspaces(files: list[Path]) -> list[dict]:
    """Each convolution once, and what vaemem says of it."""
    found: dict[tuple, dict] = {}
    for file in files:
        with open(file, newline="") as opened:
            for row in csv.DictReader(opened):
                text = {"dtype": row["dtype"], "layout": row["layout"]}
                question = text | {key: int(row[key]) for key in (*"nchwkr", "stride", "padding")}
                try:
                    said, source = Workspace(row["gpu"], row["cudnn"]).conv(**question)
                except ValueError as error:
                    said, source = None, f"no prediction: {error}"
                found[tuple(question.values())] = row | {"predicted_bytes": said, "source": source}
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", type=size, default=[(832, 1216), (720, 1280)], metavar="HxW")
    parser.add_argument("--models", nargs="+", default=["sd15", "sdxl", "flux"])
    parser.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16", "float32"])
    parser.add_argument("--ops", nargs="+", default=["encode", "decode"])
    parser.add_argument("--device", help="the GPU where there is one, else the CPU")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="also write the convolutions' workspaces")
    parser.add_argument("--snapshots", help="folder for each case's allocator history (.pickle); slows the runs down")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(json.loads(arguments.worker))
    if arguments.snapshots:
        Path(arguments.snapshots).mkdir(parents=True, exist_ok=True)
    cases = [
        {"model": model, "op": op, "height": height, "width": width, "dtype": dtype}
        for model in arguments.models
        for dtype in arguments.dtypes
        for height, width in arguments.sizes
        for op in arguments.ops
    ]
    lines, profiles, name = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases):
            profile = Path(folder) / f"{i}.csv" if arguments.profile else None
            label = "_".join(map(str, case.values()))
            snapshot = str(Path(arguments.snapshots) / f"{label}.pickle") if arguments.snapshots else None
            case |= {
                "device": arguments.device, "warmups": arguments.warmups, "runs": arguments.runs,
                "snapshot": snapshot, "profile": profile and str(profile),
            }  # fmt: skip
            row, failure = measured(case)
            said: dict = {}
            if row is not None:
                name = row["device"]
                if name != "cpu":
                    said = predicted(case["model"], row, arguments.warmups, arguments.runs)
                if profile:
                    profiles.append(profile)
            lines.append(result(case, row, failure, said))
            print(shown(lines[-1]), flush=True)
            label = "".join(c if c.isalnum() else "_" for c in name.lower())
            if name:  # as it comes: the rest may take long
                write_csv(f"torch_memory_{label}.csv", lines, quiet=True)
        if not name:
            sys.exit("nothing could be measured")
        write_csv(f"torch_memory_{label}.csv", lines)
        if profiles:
            rows = workspaces(profiles)
            write_csv(f"torch_workspaces_{label}.csv", rows)
            same = sum(int(row["workspace_bytes"]) == row["predicted_bytes"] for row in rows)
            print(f"workspaces of {len(rows)} convolutions: {same} as predicted")


if __name__ == "__main__":
    main()
