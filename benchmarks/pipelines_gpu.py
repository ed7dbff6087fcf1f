"""Measure whole pipelines of diffusers on a GPU; compare the measurements with predictions later, without one.

    python benchmarks/pipelines_gpu.py [--cases sdxl:1024x1024 ...] [--jobs 5]
    python benchmarks/pipelines_gpu.py --compare benchmarks/results/pipelines_nvidia_h200.csv

Weights are random and of full size, and nothing is downloaded. Each case is a process of its own. Several run at once,
as far as the memory of card and host allows. The first call is measured phase by phase, the second as a whole. Writes
pipelines_<gpu>.csv, and with --traces FOLDER each case's allocations and frees. --list shows the cases. --device cpu
--small shows that the script runs.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from common import RESULTS, append_row, commit, parser_of

STEPS, MIB = 2, 1 << 20
KEPT = Path(__file__).parent / "results"
COLUMNS = (
    "case", "pipeline", "height", "width", "batch", "offload", "vae", "kind", "components", "lora", "frames", "steps",
    "dtype", "tokens", "call", "phase", "allocated", "reserved", "seconds", "fits", "pinned", "gpu", "gpu_memory",
    "versions", "commit",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run. `gpu` and `host` are about the most GB that it takes of both; `kind` is "text", "image" or "hires"."""

    pipeline: str
    height: int
    width: int
    batch: int = 1
    offload: str = "none"
    vae: str = "whole"
    kind: str = "text"
    components: dict[str, str] = field(default_factory=dict)
    lora: int = 0
    frames: int | None = None
    gpu: float = 8
    host: float = 10

    @property
    def name(self) -> str:
        words = [self.pipeline, f"{self.height}x{self.width}"]
        words += [f"batch {self.batch}"] * (self.batch > 1) + [f"lora {self.lora}"] * bool(self.lora)
        words += [word for word in (self.offload, self.vae, self.kind) if word not in ("none", "whole", "text")]
        return ":".join([*words, *(f"{role} {kind}" for role, kind in self.components.items())])


CASES = [
    Case("flux", 1024, 1024, offload="leaf_level stream", gpu=6, host=85),
    Case("sd15", 512, 512),
    Case("sdxl", 1024, 1024, gpu=14, host=8),
    Case("sd15", 512, 512, offload="leaf_level stream", gpu=4),
    Case("sdxl", 1024, 1024, offload="model", gpu=14, host=12),
    Case("sd3", 1024, 1024, gpu=26, host=20),
    Case("sd15", 512, 512, offload="model"),
    Case("sd15", 512, 512, offload="sequential"),
    Case("sd15", 512, 512, offload="leaf_level"),
    Case("sd15", 512, 512, offload="block_level 1"),
    Case("sd15", 512, 512, offload="block_level 1 stream"),
    Case("sd15", 512, 512, batch=4, vae="sliced"),
    Case("sd15", 768, 768, vae="tiled"),
    Case("sd15", 512, 512, kind="image"),
    Case("sd15", 512, 512, kind="hires"),
    Case("sd15", 512, 512, lora=16),
    Case("sdxl", 1024, 1024, batch=4, offload="model", gpu=36, host=12),
    Case("sdxl", 1024, 1024, offload="leaf_level stream", gpu=14, host=20),
    Case("sdxl", 1024, 1024, offload="sequential", gpu=14, host=12),
    Case("sdxl", 1024, 1024, vae="tiled", offload="model", gpu=12, host=12),
    Case("sdxl", 1024, 1024, kind="image", offload="model", gpu=14, host=12),
    Case("sdxl", 768, 768, kind="hires", gpu=40, host=10),
    Case("sdxl", 1024, 1024, components={"vae": "float16"}, gpu=12, host=10),
    Case("sdxl", 1024, 1024, batch=8, components={"vae": "float16"}, gpu=60, host=10),  # a batch of 2^31 elements
    Case("sd3", 1024, 1024, offload="model", gpu=16, host=20),
    Case("sd3", 1024, 1024, offload="leaf_level stream", gpu=8, host=45),
    Case("qwen-image", 1024, 1024, offload="model", gpu=45, host=64),
    Case("flux", 1024, 1024, offload="model", gpu=28, host=38),
    Case("sdxl", 1024, 1024, offload="leaf_level stream", components={"vae": "float16"}, gpu=8, host=20),
    Case("sd15-controlnet", 512, 512, offload="model", gpu=6, host=8),
    Case("flux", 1024, 1024, gpu=40, host=38),
    Case("flux", 1024, 1024, offload="sequential", gpu=6, host=40),
    Case("flux", 1024, 1024, offload="model", components={"transformer": "fp8"}, gpu=20, host=50),
    Case("zimage-turbo", 1024, 1024, gpu=26, host=25),
    Case("flux2-klein", 1024, 1024, offload="model", gpu=16, host=20),
    Case("sd35-medium", 1024, 1024, offload="model", components={"transformer": "nf4"}, gpu=14, host=24),
    Case("sd35-medium", 1024, 1024, offload="model", components={"transformer": "int8"}, gpu=14, host=24),
    Case("sd35-medium", 1024, 1024, offload="model", components={"transformer": "int8wo"}, gpu=14, host=24),
    Case("sd35-medium", 1024, 1024, offload="model", components={"transformer": "qint8"}, gpu=14, host=24),
    Case("pixart-sigma", 1024, 1024, gpu=18, host=13),
    Case("wan-1.3b", 480, 832, frames=17, offload="model", gpu=20, host=18),
]  # fmt: skip


# ---- one case, in its own process ----


def quantised(module: Any, kind: str, torch: Any) -> Any:
    """Load a module as a user does who names a quantisation, from a folder in the memory."""
    import diffusers

    settings = {
        "nf4": lambda: diffusers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=module.dtype),
        "int8": lambda: diffusers.BitsAndBytesConfig(load_in_8bit=True),
        "int8wo": lambda: diffusers.TorchAoConfig(resolve_name("torchao.quantization:Int8WeightOnlyConfig")()),
        "qint8": lambda: diffusers.QuantoConfig(weights_dtype="int8"),
    }[kind]()  # fmt: skip
    shared = Path("/dev/shm") if Path("/dev/shm").exists() else None
    ranges = {name: list(value) for name, value in module.config.items() if isinstance(value, range)}
    module.register_to_config(**ranges)  # a file of JSON holds none
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        module.save_pretrained(folder)
        made = type(module).from_pretrained(folder, quantization_config=settings, torch_dtype=module.dtype)
    return made.eval()


def make(case: Case, device: str, torch: Any) -> Any:
    """Return the pipeline of a case, ready to be called."""
    import diffusers

    from vaemem.pipelines.components import PIPELINES
    from vaemem.pytorch import loading

    usual = PIPELINES[case.pipeline].dtype
    pipe = loading.random_pipeline(case.pipeline, "float32" if device == "cpu" else usual)
    pipe.set_progress_bar_config(disable=True)
    for role, kind in case.components.items():
        module = getattr(pipe, role)
        if kind == "fp8":
            module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=module.dtype)
        elif role == "vae":
            module.to(getattr(torch, kind))
            module.register_to_config(force_upcast=False)
        else:
            setattr(pipe, role, quantised(module, kind, torch))
            del module
            gc.collect()
    if case.vae != "whole":
        pipe.vae.enable_tiling() if case.vae == "tiled" else pipe.vae.enable_slicing()
    if case.kind == "image":
        pipe = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
        pipe.set_progress_bar_config(disable=True)
    kind, *words = case.offload.split()
    if case.offload == "none":
        pipe.to(device)
    elif kind in ("model", "sequential"):
        getattr(pipe, f"enable_{kind}_cpu_offload")(device=device)
    else:
        blocks = {"num_blocks_per_group": int(words[0])} if kind == "block_level" else {}
        pipe.enable_group_offload(
            torch.device(device), torch.device("cpu"), offload_type=kind, use_stream="stream" in words, **blocks
        )
    if case.lora:
        import peft

        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        pipe.unet.add_adapter(peft.LoraConfig(r=case.lora, lora_alpha=case.lora, target_modules=targets))
    return pipe


def call_of(case: Case) -> dict[str, Any]:
    """Return the arguments of a pipeline's call besides its sizes and steps."""
    from PIL import Image

    from vaemem.pipelines.components import PIPELINES

    call: dict[str, Any] = {"negative_prompt": ""} if PIPELINES[case.pipeline].guides else {"guidance_scale": 0.0}
    if not PIPELINES[case.pipeline].guides and case.pipeline.startswith(("flux", "qwen")):
        call = {}
    if case.kind == "image":
        call |= {"image": Image.new("RGB", (case.width, case.height)), "strength": 1.0}
    if "controlnet" in case.pipeline:
        call["image"] = Image.new("RGB", (case.width, case.height))
    if case.frames:
        call["num_frames"] = case.frames
    return call


def hires(pipe: Any, case: Case) -> None:
    """Make an image, and from it one of twice its sides."""
    import diffusers

    second = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    second.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": STEPS, "negative_prompt": ""}
    image = pipe("word", height=case.height, width=case.width, **call).images[0]
    second("word", image=image.resize((2 * case.width, 2 * case.height)), strength=1.0, **call)


class Trace:
    """What PyTorch's allocator does, as arrays. Without a path nothing is kept."""

    def __init__(self, path: Path | None):
        import torch

        self.memory, self.path, self.marks = torch.cuda.memory, path, dict[str, int]()
        if path:
            self.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=4_000_000)

    def mark(self, name: str) -> None:
        """Note how many events there are by now."""
        if self.path:
            self.marks[name] = sum(map(len, self.memory._snapshot()["device_traces"]))

    def save(self) -> None:
        import numpy as np

        if not self.path:
            return
        events = self.memory._snapshot()["device_traces"][0]
        actions = sorted({event["action"] for event in events})
        columns = "addr", "size", "stream", "time_us"
        rows = [(actions.index(one["action"]), *(one.get(name, 0) for name in columns)) for one in events]
        np.savez_compressed(self.path, events=np.array(rows, np.int64), actions=actions, marks=json.dumps(self.marks))


class Peaks:
    """PyTorch's counters on a GPU; on a CPU they stay empty."""

    def __init__(self, device: str):
        import torch

        self.cuda = torch.cuda if device == "cuda" else None

    def of(self, run: Callable[[], Any]) -> dict[str, Any]:
        """Run and return the peaks, and the seconds."""
        if self.cuda:
            self.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        run()
        if self.cuda:
            self.cuda.synchronize()
        row: dict[str, Any] = {"phase": "whole", "seconds": round(time.monotonic() - start, 3)}
        if self.cuda:
            row |= {"allocated": self.cuda.max_memory_allocated(), "reserved": self.cuda.max_memory_reserved()}
        return row

    def card(self) -> dict[str, Any]:
        """Return the card, and the most that was pinned on the host."""
        if not self.cuda:
            return {"gpu": "cpu"}
        about, host = self.cuda.get_device_properties(0), self.cuda.host_memory_stats()
        return {"gpu": about.name, "gpu_memory": about.total_memory, "pinned": host.get("allocated_bytes.peak")}


def run_case(case: Case, device: str, traces: Path | None) -> list[dict[str, Any]]:
    """Measure a case; return its rows."""
    import torch

    from vaemem import pytorch
    from vaemem.pipelines.components import PIPELINES

    peaks, rows, began = Peaks(device), list[dict[str, Any]](), time.monotonic()
    trace = Trace(traces / f"{case.name.replace(':', '+').replace(' ', '_')}.npz" if traces else None)
    versions, tokens, made = "", None, list[Any]()

    def load() -> Any:
        made.append(make(case, device, torch))
        return made[0]

    if case.kind == "hires":
        load()
        for name in ("first", "second"):
            rows.append({"call": name} | peaks.of(lambda: hires(made[0], case)))
            trace.mark(name)
        versions = pytorch.measuring.what_ran(torch.device(device), "diffusers")
    else:
        call = call_of(case)
        measured = pytorch.measure_pipeline(
            load, case.height, case.width, case.batch, prompt="word", steps=STEPS, device=device, **call
        )
        print(measured, flush=True)
        versions, tokens = measured.versions, measured.asked["tokens"]
        counted = ("allocated", "reserved", "fits")
        for phase in measured.phases:
            row = {"call": "first", "phase": phase.name, "seconds": round(phase.seconds, 3)}
            rows.append(row | {name: getattr(phase, name) for name in counted})
        trace.mark("first")
        if not measured.out_of_memory_at:
            sizes = {"height": case.height, "width": case.width, "num_images_per_prompt": case.batch}
            known = inspect.signature(made[0].__call__).parameters
            call |= {name: value for name, value in sizes.items() if name in known} | {"num_inference_steps": STEPS}
            rows.append({"call": "second"} | peaks.of(lambda: made[0](prompt="word", **call)))
            trace.mark("second")
    trace.save()
    about = {"case": case.name, **dataclasses.asdict(case), "steps": STEPS, "dtype": PIPELINES[case.pipeline].dtype}
    about |= {"components": json.dumps(case.components) if case.components else "", "tokens": tokens}
    about |= {"versions": versions, "commit": commit(), **peaks.card()}
    del about["host"]
    print(f"-- {case.name}: {time.monotonic() - began:.0f} s", flush=True)
    return [dict.fromkeys(COLUMNS) | {name: (about | row).get(name) for name in COLUMNS} for row in rows]


# ---- all cases ----


class Budget:
    """Begins cases in their order as soon as card and host have room for them."""

    def __init__(self, jobs: int, gpu: float, host: float):
        self.left = {"jobs": jobs, "gpu": gpu, "host": host}
        self.changed = threading.Condition()

    def _take(self, case: Case, sign: int) -> None:
        for name, amount in (("jobs", 1), ("gpu", case.gpu), ("host", case.host)):
            self.left[name] += sign * amount

    def next(self, waiting: list[Case]) -> Case:
        with self.changed:
            while True:
                for case in waiting:
                    if self.left["jobs"] and case.gpu <= self.left["gpu"] and case.host <= self.left["host"]:
                        waiting.remove(case)
                        self._take(case, -1)
                        return case
                self.changed.wait()

    def done(self, case: Case) -> None:
        with self.changed:
            self._take(case, 1)
            self.changed.notify_all()


def run_all(cases: list[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    budget, rows, threads = Budget(args.jobs, args.gpu_memory, args.host_memory), list[dict[str, Any]](), []
    waiting, end = list(cases), time.monotonic() + args.seconds

    def work(case: Case) -> None:
        words = [sys.executable, __file__, "--case", case.name, "--device", args.device]
        words += ["--traces", args.traces] * bool(args.traces) + ["--small"] * args.small
        env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.jobs))}
        try:
            left = min(args.case_seconds, end - time.monotonic())
            ran = subprocess.run(words, capture_output=True, text=True, timeout=max(left, 1), env=env)
            said = ran.stdout + ran.stderr[-3000:] * bool(ran.returncode)
            for line in ran.stdout.splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    rows.append(row)
                    append_row(table_of(row), row)
        except subprocess.TimeoutExpired:
            said = "stopped after its time"
        finally:
            budget.done(case)
        print(f"-- {case.name}\n{said}", flush=True)

    while waiting and time.monotonic() < end:
        case = budget.next(waiting)
        threads.append(threading.Thread(target=work, args=(case,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for case in waiting:
        print(f"-- {case.name}: not begun: no time is left")
    return rows


def table_of(row: dict[str, Any]) -> str:
    return f"pipelines_{''.join(c if c.isalnum() else '_' for c in str(row['gpu']).lower())}.csv"


# ---- predictions ----


def prediction(row: Mapping[str, Any]) -> Any:
    """Predict a row's run on its card."""
    import vaemem
    from vaemem.pipelines.components import PIPELINES

    kind, number = PIPELINES[row["pipeline"]], {name: int(row[name]) for name in ("height", "width", "batch", "steps")}
    height, width = number.pop("height"), number.pop("width")
    more: dict[str, Any] = {"components": json.loads(row["components"])} if row["components"] else {}
    more |= {name: int(row[name]) for name in ("lora", "frames") if row[name] and int(row[name])}
    if row["kind"] == "hires":
        more["image"], height, width = (height, width), 2 * height, 2 * width
    elif row["kind"] == "image":
        more["image"] = True
    tokens = int(row["tokens"] or 0) - kind.joined
    if tokens > 0 and kind.tokens is not None and not row["pipeline"].startswith("zimage"):  # it shows those it keeps
        more["prompt_tokens"] = tokens
    torch, cudnn = (row["versions"].partition(f"{name} ")[2].partition(",")[0] for name in ("torch", "cudnn"))
    return vaemem.predict_pipeline(
        row["pipeline"], height, width, dtype=row["dtype"], offload=row["offload"], vae=row["vae"], torch_version=torch,
        cudnn_version=cudnn, gpu=row["gpu"], memory=int(row["gpu_memory"]), **number, **more,
    )  # fmt: skip


def compared(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each measured phase of the first calls, and each whole second one, next to its prediction."""
    made: dict[str, Any] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["case"] not in made:
                made[row["case"]] = prediction(row)
            phases = [phase for phase in made[row["case"]].phases if row["phase"] in (phase.name, "whole")]
            if phases and row["allocated"]:
                pair = {"case": row["case"], "call": row["call"], "phase": row["phase"]}
                for name in ("allocated", "reserved"):
                    pair[name] = int(row[name]), max(getattr(phase, name) for phase in phases)
                yield pair


def show(path: Path) -> None:
    """Print the comparison: MiB measured, and by how much the prediction is higher."""
    case = ""
    for pair in compared(path):
        if pair["case"] != case:
            case = pair["case"]
            print(case)
        texts = [
            f"{m / MIB:9.1f} {(p - m) / MIB:+8.1f} ({p / m - 1:+.2%})" for m, p in (pair["allocated"], pair["reserved"])
        ]
        print(f"  {pair['call']:6s} {pair['phase']:13s} allocated {texts[0]:32s} reserved {texts[1]}")


def main() -> int:
    parser = parser_of(__doc__, device="cuda", small=False)
    parser.add_argument("--cases", nargs="*", help="their names; by default all")
    parser.add_argument("--missing", action="store_true", help="only cases without rows in benchmarks/results")
    parser.add_argument("--jobs", type=int, default=5, help="cases that run at once")
    parser.add_argument("--seconds", type=float, default=3600, help="no case begins after these; all are stopped")
    parser.add_argument("--case-seconds", type=float, default=150)
    parser.add_argument("--gpu-memory", type=float, default=76, help="GB of the card that all cases may take")
    parser.add_argument("--host-memory", type=float, default=120, help="GB of the host that all cases may take")
    parser.add_argument("--traces", help="a folder for each case's allocations and frees")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="show measurements next to predictions")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compare:
        show(args.compare)
        return 0
    if args.list:
        print(*(case.name for case in CASES), sep="\n")
        return 0
    if args.traces:
        Path(args.traces).mkdir(parents=True, exist_ok=True)
    if args.case:
        case = next(case for case in CASES if case.name == args.case)
        if args.small:
            case = dataclasses.replace(case, height=64, width=64)
        for row in run_case(case, args.device, Path(args.traces) if args.traces else None):
            print(json.dumps(row), flush=True)
        return 0
    chosen = [case for case in CASES if not args.cases or case.name in args.cases]
    if args.missing:
        known = {row["case"] for file in KEPT.glob("pipelines_*.csv") for row in csv.DictReader(file.open(newline=""))}
        chosen = [case for case in chosen if case.name not in known]
    rows = run_all(chosen, args)
    if rows:
        RESULTS.mkdir(parents=True, exist_ok=True)
        with open(RESULTS / table_of(rows[0]), "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        print(f"wrote {RESULTS / table_of(rows[0])}")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
