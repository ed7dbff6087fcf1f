"""The seed table played again: the processes of the published benchmark, predicted and measured.

The benchmark (torch 2.7.1, RTX 4090) had two scripts, each one process: BFL's AutoEncoder in float16, float32 and
bfloat16; then diffusers' AutoencoderKL, SD1.5 and SDXL, each as float16, float16 meant to be upcast at run time, and
float32. In each, size by size: encode, decode, tiled decode from 1024 on. What the scripts did matters to the byte:

- ``_ = vae.decode(...)`` within ``for _ in range(n)``: a warm-up result goes when the next iteration starts.
- The upcast group's encode raises in its first warm-up run (a float16 image meets float32 weights) and leaves the
  weights in float32: that group is float32 weights, converted one by one, with latents converted within each run.
- Tiling stays on after a tiled decode, so diffusers' encode from 1536 on runs tiled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from vaemem._common import MIB, grouped, shipped
from vaemem._render import Columns
from vaemem.prediction.benchmark import BENCHMARK_TILE, benchmark
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.predict_vae import Prediction, predict
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.profiles import Catalogue, Profile, profile_files, shipped_catalogue
from vaemem.prediction.vae_job import Job
from vaemem.prediction.workspace import Workspace
from vaemem.tables.table import seed_table

GPU, TORCH, CUDNN = "RTX 4090", "2.7.1+cu128", "9.7.1"
NEAREST = "9.8.0"  # the nearest version that answers without a device
SIZES = (512, 768, 1024, 1536, 2048)
IDENTITY = ("model", "op", "height", "width", "dtype", "group")
Key = tuple[str, str, int, int, str, int]
Measured = tuple[Key, tuple[float, float]]
EQUAL_MIB = 0.0101  # the table has two decimals
_GROUPS = (("float16", "float16", 1), ("float16", "float32", 2), ("float32", "float32", 3))
# Loops over the sizes, by script: model, runtime, the types that it is loaded in and run in, and the table's group.
_SCRIPTS = (
    [("flux", "bfl", dtype, dtype, 1) for dtype in ("float16", "float32", "bfloat16")],
    [(name, "diffusers", *group) for name in ("sd15", "sdxl") for group in _GROUPS],
)


class Replayed(NamedTuple):
    """A row of the table, measured and predicted; sizes in MiB."""

    key: Key
    measured: tuple[float, float]
    predicted: tuple[float, float]


# ---- the benchmark's processes ----


def _mean(runs: Sequence[Any]) -> tuple[float, float]:
    return tuple(sum(run[i] for run in runs) / len(runs) / MIB for i in (0, 1))


def _play_group(
    p: SimulatedProcess, name: str, runtime: str, loaded: str, dtype: str, group: int
) -> dict[Key, tuple[float, float]]:
    """Play one loop over the sizes, of a model that is loaded in one dtype and run in the same or in another."""
    rows: dict[Key, tuple[float, float]] = {}
    vae = p.load(name, loaded, runtime)
    tile = 0

    def job(op: str, side: int, tile: int) -> Job:
        tiled: Any = f"{op}_tiled" if tile else op
        runs: Any = dtype
        return Job(vae.arch, tiled, side, side, runs, runs, tile=tile or None)

    for side in SIZES:
        key = (side, side, dtype, group)
        if loaded != dtype:
            image = p.tensor((1, 3, side, side), loaded)
            p.convert(vae, dtype)  # and the convolution raises
            p.drop(image)
        else:
            rows[(name, "encode", *key)] = _mean(benchmark(p, vae, job("encode", side, tile)))
        for tile in (0, BENCHMARK_TILE) if side >= 1024 and runtime == "diffusers" else (0,):
            one = job("decode", side, tile)
            runs = benchmark(p, vae, one, input_dtype=loaded)
            rows[(name, one.op, *key)] = _mean(runs)
    p.drop(vae)
    p.empty_cache()
    return rows


def play(workspace: Any) -> dict[Key, tuple[float, float]]:
    """Play both scripts: {(model, op, height, width, dtype, group): (allocated, reserved) in MiB}."""
    rows: dict[Key, tuple[float, float]] = {}
    for loops in _SCRIPTS:
        process = SimulatedProcess(GPU, torch_version=TORCH, workspace=workspace)
        for loop in loops:
            rows |= _play_group(process, *loop)
    return rows


# ---- the table ----


def read_table() -> list[Measured]:
    """Return the identity of each row of the seed table, with the MiB that it allocated and reserved."""
    return [
        (tuple(row[name] for name in IDENTITY), (row["allocated_bytes"] / MIB, row["reserved_bytes"] / MIB))
        for row in seed_table()
    ]


def replay_rows(table: Iterable[Measured], workspace: Any = None) -> list[Replayed]:
    """Predict each row. Workspaces are those given, or those inferred from the table."""
    played = play(workspace or profile_workspace(CUDNN))
    return [Replayed(key, measured, played[key]) for key, measured in table]


# ---- the rows one by one ----


def asked_of(key: Key) -> dict[str, Any]:
    """Return the arguments of `vaemem.predict` for one row of the table alone, with the tiles that it had."""
    name, op, height, width, dtype, group = key
    if name != "flux" and op == "encode" and height >= 1536:
        op = "encode_tiled"
    tile = BENCHMARK_TILE if op.endswith("_tiled") else None
    weights = "float16" if group == 2 else dtype
    runtime = "bfl" if name == "flux" else "diffusers"
    asked = {"model": name, "op": op, "height": height, "width": width, "dtype": dtype, "weights_dtype": weights}
    return asked | {"gpu": GPU, "runtime": runtime, "tile": tile}


def predict_row(key: Key, **versions: Any) -> Prediction:
    """Predict a row of the table alone, in a fresh process."""
    return predict(**asked_of(key), **versions)


def covered(table: Iterable[Measured], **versions: Any) -> int:
    """Count the rows that reserved at most `Prediction.upper`, each predicted alone with these versions."""
    return sum(predict_row(key, **versions).upper >= (reserved - EQUAL_MIB) * MIB for key, (_, reserved) in table)


# ---- other sources of workspaces ----


def profile_workspace(version: str, data: dict[str, Any] | None = None) -> Workspace:
    """Return workspaces by the profile of one cuDNN version, or by `data` in its place."""
    if data is None:
        return Workspace(GPU, version, TORCH)
    files = dict.fromkeys(profile_files()) | {_inferred_file(): Profile(data)}
    return Workspace(GPU, version, TORCH, catalogue=Catalogue(files))


def _inferred_file() -> str:
    """Return the file of the profile that was inferred from the table."""
    profile = shipped_catalogue().nearest(find_gpu(GPU), CUDNN)
    assert profile is not None and profile.how == "inferred"
    return profile.file


def inferred() -> dict[str, Any]:
    """Return the profile that was inferred from the table, as in its file."""
    data: dict[str, Any] = json.loads(shipped("profiles", _inferred_file()))
    return data


def leave_one_out(table: Iterable[Measured]) -> list[Replayed]:
    """Predict each row without the rules that only rows of its size show."""
    data, rows = inferred(), list[Replayed]()
    for side, mine in sorted(grouped(table, lambda row: row[0][2]).items()):
        kept = [rule for rule in data["rules"] if set(rule["seen"]) != {side}]
        rows += replay_rows(mine, profile_workspace(CUDNN, data | {"rules": kept}))
    return rows


# ---- printing ----

_LINE = (
    "{}: of {rows} rows allocated equal on {allocated_equal} (worst {allocated_worst:+.2%}), reserved equal on"
    " {reserved_equal}, within 1% on {reserved_within_1_percent} (median {reserved_median:.2%}, worst"
    " {reserved_worst:+.2%})"
)


def agreement(rows: Sequence[Replayed]) -> dict[str, float]:
    """Count the rows that agree, and measure the errors of the others."""
    off = [[abs(r.predicted[i] - r.measured[i]) for r in rows] for i in (0, 1)]
    relative = [[r.predicted[i] / r.measured[i] - 1 for r in rows] for i in (0, 1)]
    return {
        "rows": len(rows),
        "allocated_equal": sum(x <= EQUAL_MIB for x in off[0]),
        "reserved_equal": sum(x <= EQUAL_MIB for x in off[1]),
        "reserved_within_1_percent": sum(abs(x) <= 0.01 for x in relative[1]),
        "allocated_worst": max(relative[0], key=abs, default=0.0),
        "reserved_worst": max(relative[1], key=abs, default=0.0),
        "reserved_median": median(map(abs, relative[1])) if rows else 0.0,
    }


def beside(rows: Iterable[Replayed]) -> str:
    """Show the rows: measured, predicted and error in MiB, or ``=`` if they agree to the table's two decimals."""
    lines = []
    for (name, op, height, width, dtype, group), measured, predicted in rows:
        cells = [name, op, f"{height}x{width}", dtype, str(group)]
        for want, got in zip(measured, predicted, strict=True):
            cells += [f"{want:.2f}", f"{got:.2f}", "=" if abs(got - want) <= EQUAL_MIB else f"{got - want:+.2f}"]
        lines.append(cells)
    found = [name for column in ("allocated", "reserved") for name in (column, "predicted", "error")]
    return Columns(("model", "op", "size", "dtype", "group", *found), lines).text()


def judge_table() -> str:
    """Show every row with its prediction, and how many rows agree by each source of workspaces."""
    table = read_table()
    rows, recorded = replay_rows(table), replay_rows(table, profile_workspace(NEAREST))
    title = f"cuDNN {NEAREST}'s workspaces, recorded, nothing inferred"
    left_out = "inferred rules, each size predicted without the rules that only it shows"
    parts = [
        f"Workspaces by the {len(inferred()['rules'])} rules that were inferred from this table (cuDNN {CUDNN}):",
        beside(rows),
        f"{title}:",
        beside(recorded),
    ]
    sources = {"inferred rules": rows, left_out: leave_one_out(table), title: recorded}
    lines = [_LINE.format(name, **agreement(found)) for name, found in sources.items()]
    told, untold = covered(table, torch_version=TORCH), covered(table)
    lines.append(
        f"`upper` of each row predicted alone covers {told} of {len(table)}, and {untold} if no version is given"
    )
    return "\n\n".join([*parts, "\n".join(lines)])
