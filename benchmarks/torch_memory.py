"""Measures real PyTorch's memory for diffusers' VAEs and compares it with the prediction.

    python benchmarks/torch_memory.py [--cases sdxl:decode:1024x1024:bfloat16 ...] [--protocols cold warm]
        [--grid] [--engine] [--seconds N] [--profile] [--snapshots FOLDER]

Each case and protocol is measured in a fresh process, because earlier runs change reserved memory. The processes
are forks of this one, which has imported PyTorch and not touched the GPU, so each costs seconds. `cold` is the first
run of the process; `warm` is the mean of five runs after two warm-ups, as `vaemem.pytorch.measure` and the seed table
have it. Without diffusers the same module in plain PyTorch (torch_vae.py) stands in, and the column `versions` says so.
The prediction is for the same runs on the GPU, PyTorch and cuDNN that were measured. Rows go to torch_memory_<gpu>.csv
in benchmarks/results as they are measured; with --profile cuDNN's scratch for each convolution goes to
torch_workspaces_<gpu>.csv. --grid has the seed table's runs, tiled ones too, the largest and smallest first. --engine
runs each case with our own engine next to PyTorch. On the CPU only the growth of the process and the seconds are
measured, and nothing is predicted.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch_vae
from common import commit, write_csv

from vaemem.engine.vae import VAE
from vaemem.prediction.benchmark import SEED_TABLE, Protocol, benchmark
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.vae_job import Job
from vaemem.prediction.workspace import Workspace
from vaemem.pytorch import measure
from vaemem.tables.table import as_ran, seed_table

MIB = 2**20
ASKED = ("model", "op", "height", "width", "dtype", "protocol", "runtime", "device")
FORK = multiprocessing.get_context("fork")


PROTOCOLS = {"cold": Protocol(0, 1, True), "warm": SEED_TABLE}
# The most valuable first: a session with a GPU may end anywhere.
CASES = [
    f"{model}:{op}:{size}x{size}:{dtype}"
    for dtype in ("bfloat16", "float32")
    for op, size in (("decode", 1024), ("encode", 1024), ("decode", 2048))
    for model in ("sdxl", "flux")
]


def grid() -> list[dict]:
    """List the seed table's runs once each: first one size of all, then the others."""
    rows = {tuple(row[name] for name in ("model", "op", "height", "width", "dtype")): row for row in seed_table()}
    sizes = (1024, 2048, 512, 1536, 768)
    found = [
        {name: row[name] for name in ("model", "op", "height", "width", "dtype")}
        for row in rows.values()
        if row["op"] == as_ran(row)["op"] and row["height"] in sizes
    ]
    return sorted(found, key=lambda case: (sizes.index(case["height"]), case["dtype"] != "float16"))


def case_of(text: str) -> dict:
    model, op, size, dtype = text.rsplit(":", 3)
    height, _, width = size.partition("x")
    return {"model": model, "op": op, "height": int(height), "width": int(width), "dtype": dtype}


def measured(case: dict) -> tuple[dict | None, str]:
    """Returns the row of a case from a forked process; or None and what went wrong."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, args=(case, sender))
    process.start()
    sender.close()
    try:
        row, failure = receiver.recv()
    except EOFError:
        row, failure = None, ""
    process.join()
    return row, failure if row or failure else f"ended with status {process.exitcode}"


def work(case: dict, sender: Connection) -> None:
    """The child's side: sends (row, "") or (None, failure)."""
    try:
        sender.send((measured_here(case), ""))
    except Exception as error:
        sender.send((None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))


def measured_here(case: dict) -> dict:
    model, note, (warmups, runs, _) = case["model"], "", PROTOCOLS[case["protocol"]]
    if torch_vae.diffusers_class() is None:
        model, note = torch_vae.AutoencoderKL(architecture(model)), ", module benchmarks/torch_vae.py"
    table = measure(
        model, case["op"], [(case["height"], case["width"])], [case["dtype"]], device=case["device"],
        warmups=warmups, runs=runs, snapshot=case["snapshot"], profile=case["profile"],
    )  # fmt: skip
    row = table[0] | (engine(case) if case["engine"] else {})
    return row | {"model": case["model"], "protocol": case["protocol"], "versions": row["versions"] + note}


def engine(case: dict) -> dict:
    """Run the case with our own engine, in its default plan: bytes besides weights, and seconds of the second run."""
    op = case["op"].removesuffix("_tiled")
    place = "cuda" if case["device"] != "cpu" and torch.cuda.is_available() else "cpu"
    vae = VAE.random(case["model"], parts=f"{op}r", device=place, dtype=case["dtype"])
    height, width, factor = case["height"], case["width"], 8 if op == "decode" else 1
    channels = vae.arch["latent_channels"] if op == "decode" else 3
    x = np.zeros((1, channels, height // factor, width // factor), np.float32)
    for _ in range(2):
        (vae.decode if op == "decode" else vae.encode)(x)
    run = vae.last_run
    return {"engine_bytes": run.reserved_bytes - run.weights_bytes, "engine_seconds": sum(run.pass_seconds)}


def versions(row: dict) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in row["versions"].split(", "))


def predicted(model: str, row: dict, protocol: tuple[int, int, bool]) -> dict:
    """Predict the same runs, and compute the errors; or say why there is no prediction."""
    have = versions(row)
    tiled = row["op"].endswith("_tiled")
    try:
        process = SimulatedProcess(row["device"], have["cudnn"], have["torch"])
        vae = process.load(model, row["dtype"], row["runtime"])
        job = Job(vae.arch, row["op"], row["height"], row["width"], vae.dtype, vae.dtype, tile=512 if tiled else None)
        said = benchmark(process, vae, job, protocol)
    except ValueError as error:  # a GPU, PyTorch or cuDNN that is not known
        return {"workspace_source": f"no prediction: {error}"}
    out: dict = {"workspace_source": process.workspace_source}
    for what in ("allocated", "reserved"):
        value = round(sum(getattr(run, what) for run in said) / len(said))
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
        "engine_bytes": row.get("engine_bytes"),
        "engine_seconds": row.get("engine_seconds"),
        "workspace_source": said.get("workspace_source"),
        "versions": row.get("versions"),
        "failure": failure,
        "commit": commit(),
    }


def shown(line: dict) -> str:
    head = f"{line['model']:5} {line['op']:7} {line['height']}x{line['width']} {line['dtype']:9} {line['protocol']}"
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
    """List each convolution once, with vaemem's answer."""
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=case_of, default=[case_of(text) for text in CASES],
                        metavar="MODEL:OP:HxW:DTYPE")  # fmt: skip
    parser.add_argument("--protocols", nargs="+", choices=list(PROTOCOLS), default=list(PROTOCOLS))
    parser.add_argument("--grid", action="store_true", help="the seed table's runs instead of --cases")
    parser.add_argument("--engine", action="store_true", help="also run our own engine")
    parser.add_argument("--seconds", type=float, default=1e9, help="no case begins after these")
    parser.add_argument("--device", help="the GPU if there is one, otherwise the CPU")
    parser.add_argument("--profile", action="store_true", help="also write the convolutions' workspaces")
    parser.add_argument("--snapshots", help="folder for each case's allocator history (.pickle); slows the runs down")
    arguments = parser.parse_args(argv)
    # PyTorch then counts GPUs without starting CUDA, which a fork could not use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch_vae.diffusers_class()  # imported once, for all forks
    if arguments.snapshots:
        Path(arguments.snapshots).mkdir(parents=True, exist_ok=True)
    of_grid = grid() if arguments.grid else arguments.cases
    cases = [case | {"protocol": name} for case in of_grid for name in arguments.protocols]
    begun = time.monotonic()
    lines, profiles, name = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases):
            if time.monotonic() - begun > arguments.seconds:
                print(f"{len(cases) - i} cases not begun: no time is left")
                break
            profile = Path(folder) / f"{i}.csv" if arguments.profile and case["protocol"] == "warm" else None
            label = "_".join(map(str, case.values()))
            snapshot = str(Path(arguments.snapshots) / f"{label}.pickle") if arguments.snapshots else None
            case |= {"device": arguments.device, "engine": arguments.engine}
            asked = {"snapshot": snapshot, "profile": profile and str(profile)}
            row, failure = measured(case | asked)
            said: dict = {}
            if row is not None:
                name = row["device"]
                if name != "cpu":
                    said = predicted(case["model"], row, PROTOCOLS[case["protocol"]])
                if profile:
                    profiles.append(profile)
            lines.append(result(case, row, failure, said))
            print(shown(lines[-1]), flush=True)
            label = "".join(c if c.isalnum() else "_" for c in name.lower())
            if name:  # as it comes: the rest may take long
                write_csv(f"torch_memory_{label}.csv", lines, quiet=True)
            if profiles:
                write_csv(f"torch_workspaces_{label}.csv", workspaces(profiles), quiet=True)
        if not name:
            sys.exit("nothing could be measured")
        if profiles:
            rows = workspaces(profiles)
            same = sum(int(row["workspace_bytes"]) == row["predicted_bytes"] for row in rows)
            print(f"workspaces of {len(rows)} convolutions: {same} as predicted")


if __name__ == "__main__":
    main()
