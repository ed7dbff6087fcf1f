"""Compare whole decodes and encodes on the CPU with PyTorch's and OpenVINO's: in turns, in one run.

    python benchmarks/decode.py [--model sdxl] [--op decode encode] [--size 512 1024] [--dtype float32 bfloat16 float16]
        [--precision highest high medium] [--contestants vaemem vaemem-avx2 torch torch-tuned torch-avx2 openvino]
        [--rounds 5] [--threads 2] [--check 128] [--small] [--bars]

Each op, size and dtype is a contest with a CSV of its own. Every contestant is a process of its own. It loads, runs
once at a small size (--check) for its accuracy, runs once at the full size to warm up, and then waits. In each round
they run one after another, so that other load on the machine affects all of them. Figures are medians. Contestants:

- vaemem: ours on the best kernels of this machine. vaemem-NAME: held to NAME by VAEMEM_DISABLE, as in vaemem-avx512bf16
  (AMD's), vaemem-avx512 (without products of bfloat16), vaemem-avx2, vaemem-ref (plain C). A contestant with the same
  kernels as an earlier one is left out.
- torch: diffusers' AutoencoderKL in the same dtype, channels_last. torch-tuned: with a malloc told to keep its memory
  and use huge pages. torch-avx2: held to AVX2.
- torch-default, torch-reduce-overhead, torch-max-autotune: the same by torch.compile in that mode, of fixed shapes,
  without inductor's caches.
- openvino: the same module by openvino.convert_model, in the same dtype if it supports that here; its row names the
  dtype.

--precision is of float32 products, ours and PyTorch's (set_float32_matmul_precision, and the same for convolutions):
all run at the first precision that you name, vaemem and torch at the others too, and OpenVINO at "highest". All have
the same random weights and the same float32 input. For --model qwen-image PyTorch makes the weights of diffusers'
AutoencoderKLWan, which has Qwen-Image's tensors and runs them as 3D. --model taesd runs diffusers' AutoencoderTiny.
A peer that is not installed (pip install '.[bench]') is left out, with a message.

Errors compare the small run with PyTorch's in float64: the largest |y - reference|, and the relative RMS, |y -
reference| / |reference|. `first` is that run's seconds, compilation included. With --check equal to --size there is
only one compilation. Resident sizes: `base` before the model is loaded, `peak` during warm runs; `planned` is our own
estimate, weights included. Processor seconds are those of all threads, which a busy machine disturbs less. The peak
in FLOP/s is that of the unit that the kernels use, measured after each run. At the end the results are compared with
the project's targets (BARS). --bars measures nothing and compares all existing results.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Worker, median, parser_of, peak_rss, reset_peak_rss, serve, settled_rss, write_csv
from memory import ARCHITECTURE, SMALL

MIB = 2**20
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
COMPILED = ("default", "reduce-overhead", "max-autotune")  # modes of torch.compile
PEERS = {  # name: (who, environment)
    "torch": ("torch", {}),
    "torch-tuned": ("torch", TUNED),
    "torch-avx2": ("torch", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
    **{f"torch-{mode}": (f"torch {mode}", {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}) for mode in COMPILED},
    "openvino": ("openvino", {"CI": "true"}),  # else its import wants to send usage statistics
}
CLASSES = {"sdxl": "AutoencoderKL", "qwen-image": "AutoencoderKLWan", "taesd": "AutoencoderTiny"}  # diffusers'
DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Case:
    op: str
    size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.size}x{self.size} {self.dtype}"


@dataclass(frozen=True)
class Bar:
    """At most so much of another's time; `amx`: set for machines that have it."""

    case: Case
    ours: str
    other: str
    at_most: float
    amx: bool = True


BF16_PEERS = {"torch": 0.45, "torch-tuned": 0.65, "openvino": 0.60}
BARS = [
    *(Bar(Case("decode", 512, "bfloat16"), "vaemem", *bar) for bar in BF16_PEERS.items()),
    Bar(Case("encode", 512, "bfloat16"), "vaemem", "torch", 0.45),
    *(Bar(Case("decode", 1024, "bfloat16"), "vaemem", *bar) for bar in BF16_PEERS.items()),
    Bar(Case("decode", 512, "float32"), "vaemem high", "vaemem", 0.55),
    Bar(Case("decode", 512, "float32"), "vaemem", "torch", 0.36, amx=False),
    Bar(Case("decode", 512, "float32"), "vaemem", "openvino", 0.45, amx=False),
]


# ---- the contestants, each in a process of its own: what, base, run(x) -> y, more() after a run ----


def inputs(op: str, size: int, model: str = "sdxl") -> np.ndarray:
    rng = np.random.default_rng(0)
    if op == "decode":
        channels = 16 if model == "qwen-image" else 4
        return rng.standard_normal((1, channels, size // 8, size // 8), dtype=np.float32)
    return rng.uniform(-1, 1, (1, 3, size, size)).astype(np.float32)


class Ours:
    def __init__(self, args: dict):
        import vaemem
        from vaemem import _kernels

        self.args, self.base, self.kernel_peak = args, settled_rss(), _kernels.peak
        self.numbers = {"dtype": args["dtype"], "precision": args["precision"]}
        self.backend = next(row["name"] for row in vaemem.backends(**self.numbers) if row["chosen"])
        self.what = f"vaemem {vaemem.__version__} {self.backend}"
        self.vae = vaemem.VAE.load(args["folder"], **self.numbers)
        self.vae.threads = args["threads"]

    def run(self, x: np.ndarray) -> np.ndarray:
        return self.vae.decode(x) if self.args["op"] == "decode" else self.vae.encode(x).moments

    def more(self) -> dict:
        args, run = self.args, self.vae.last_run
        return {
            "flops": sum(run.flops),
            "planned": self.vae.estimate(args["op"], args["size"], args["size"]).peak_bytes,
            "peak": self.kernel_peak(self.backend, args["threads"], common.PEAK_ROUNDS, *self.numbers.values()),
        }


def write_weights(folder: str, model: str, small: bool) -> None:
    """In diffusers' layout."""
    if model != "qwen-image":
        import vaemem

        sizes = {f"{half}_block_out_channels": [16] * 4 for half in ("encoder", "decoder")} if small else {}
        tiny = {"_class_name": CLASSES[model]} | sizes
        config = architecture({"small": small}) if model == "sdxl" else tiny
        vaemem.VAE.random(config=config).save(folder)
        return
    import diffusers
    import torch

    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(base_dim=16 if small else 96).save_pretrained(folder)  # Qwen-Image's, under that name


def architecture(args: dict) -> dict:
    return SMALL if args["small"] else ARCHITECTURE


class Torch:
    def __init__(self, args: dict, mode: str | None = None):
        import diffusers
        import torch

        self.torch, self.op, self.base = torch, args["op"], settled_rss()
        torch.set_num_threads(args["threads"])
        torch.set_float32_matmul_precision(args["precision"])
        kinds = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
        torch.backends.mkldnn.conv.fp32_precision = kinds[args["precision"]]
        self.flat = args["model"] != "qwen-image"
        kind = getattr(diffusers, CLASSES[args["model"]])
        self.vae = (
            kind.from_pretrained(args["folder"], low_cpu_mem_usage=False).eval().to(getattr(torch, args["dtype"]))
        )
        self.what = f"torch {torch.__version__} diffusers {diffusers.__version__}"
        if self.flat:
            self.vae = self.vae.to(memory_format=torch.channels_last)
            self.what += " channels_last"
        if mode:
            self.forward = torch.compile(self.forward, mode=mode, dynamic=False)
            self.what += f" compiled {mode}"

    def forward(self, x: Any) -> Any:
        x = x if self.flat else x[:, :, None]  # one frame
        if self.op == "decode":
            y = self.vae.decode(x).sample
        else:
            encoded = self.vae.encode(x)
            y = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.parameters
        return y if self.flat else y[:, :, 0]

    def run(self, x: np.ndarray) -> np.ndarray:
        torch = self.torch
        with torch.inference_mode():
            y = self.forward(torch.from_numpy(x).to(self.vae.dtype, memory_format=torch.channels_last))
            return y.to(torch.promote_types(y.dtype, torch.float32)).numpy()

    def more(self) -> dict:
        return {}


class OpenVINO:
    """OpenVINO with the file that `convert` left, so that its process needs no PyTorch."""

    def __init__(self, args: dict):
        import openvino

        self.core, self.path, self.base = openvino.Core(), converted(args), settled_rss()
        self.settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": args["threads"],
            "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[args["dtype"]],
        }
        self.compiled: dict[tuple[int, ...], Any] = {}
        self.run(inputs(args["op"], args["check"], args["model"]))
        (compiled,) = self.compiled.values()
        self.what = f"openvino {openvino.__version__} {compiled.get_property('INFERENCE_PRECISION_HINT').to_string()}"

    def run(self, x: np.ndarray) -> np.ndarray:
        if x.shape not in self.compiled:
            model = self.core.read_model(self.path)
            model.reshape(list(x.shape))
            self.compiled = {x.shape: self.core.compile_model(model, "CPU", self.settings)}
        return self.compiled[x.shape](x)[0]

    def more(self) -> dict:
        return {}


def converted(args: dict) -> Path:
    return Path(args["folder"], f"openvino_{args['op']}.xml")


def convert(args: dict) -> dict:
    """Writes OpenVINO's file, of any height and width."""
    import openvino
    import torch

    vae = Torch(args)
    for module in vae.vae.modules():
        if getattr(module, "mode", None) == "nearest-exact":  # unknown to OpenVINO; of twice the size the same
            module.mode = "nearest"

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vae = vae.vae

        def forward(self, x):
            return vae.forward(x)

    warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # of checks, which hold at any size
    model = openvino.convert_model(Module(), example_input=torch.from_numpy(inputs(args["op"], 64, args["model"])))
    openvino.save_model(model, converted(args), compress_to_fp16=False)
    return {}


WHO = {"ours": Ours, "torch": Torch, "openvino": OpenVINO}
WHO |= {f"torch {mode}": partial(Torch, mode=mode) for mode in COMPILED}


def answers(args: dict) -> Iterator[dict]:
    """A worker's: a greeting, and its small result in a file; then a whole run each time."""
    try:
        if args["who"] == "convert":
            yield convert(args)
            return
        contestant = WHO[args["who"]](args)
    except ImportError as error:
        yield {"skipped": f"{error}; pip install '.[bench]' has it"}
        return
    start = time.perf_counter()
    np.save(args["save"], contestant.run(inputs(args["op"], args["check"], args["model"])))
    first = round(time.perf_counter() - start, 3)
    yield {"what": contestant.what, "backend": getattr(contestant, "backend", None), "first": first}
    data = inputs(args["op"], args["size"], args["model"])
    settled_rss()  # what loading left in malloc is no part of a run
    while True:
        reset_peak_rss()
        start, work = time.perf_counter(), time.process_time()
        contestant.run(data)
        seconds, work = time.perf_counter() - start, time.process_time() - work
        yield {"seconds": seconds, "processor": work, "rss": peak_rss(), "base": contestant.base} | contestant.more()


# ---- the contest ----


def held_to(name: str, dtype: str, precision: str) -> dict[str, str] | None:
    """The environment in which ours computes with these kernels at best, or None where there are none of that name."""
    from vaemem import _core

    names = [backend for backend, _ in _core.backends(dtype, precision)]
    return {"VAEMEM_DISABLE": ",".join(names[: names.index(name)])} if name in names else None


def entries(args: argparse.Namespace, case: Case) -> Iterator[tuple[str, str, str, dict[str, str] | None]]:
    """Label, precision, who and environment of everybody, in the order of turns."""
    named = args.precision if case.dtype == "float32" else PRECISIONS[:1]
    for name in args.contestants:
        for precision in named if name in ("vaemem", "torch") else PRECISIONS[:1] if name == "openvino" else named[:1]:
            label = name if precision == "highest" else f"{name} {precision}"
            ours, _, kernels = name.partition("-")
            if ours != "vaemem":
                yield label, precision, *PEERS[name]
            else:
                yield label, precision, "ours", held_to(kernels, case.dtype, precision) if kernels else {}


@dataclass
class Entry:
    """One of a contest: its process, what that greeted with, and its errors beside the reference."""

    label: str
    precision: str
    greeting: dict
    worker: Worker
    errors: tuple[float, float] | None

    @property
    def seconds(self) -> list[float]:
        return [result["seconds"] for result in self.worker.results]


def errors_of(y: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """The largest, and the root mean square relative to what is wanted, in float64."""
    return float(abs(y - want).max()), float(np.linalg.norm(y - want) / np.linalg.norm(want))


class Contest:
    """Everybody who runs a case, by label; who cannot is left out, and why is printed."""

    def __init__(self, case: Case, args: argparse.Namespace, folder: str):
        self.case, self.folder, self.rounds = case, folder, args.rounds
        self.task = {
            "op": case.op, "size": case.size, "dtype": case.dtype, "precision": "highest", "threads": args.threads,
            "check": args.check, "model": args.model, "folder": folder,
        }  # fmt: skip
        self.entered: dict[str, Entry] = {}
        print(f"\n{case}, {args.threads} threads", flush=True)
        self.reference = Path(folder, "reference.npy")
        self.no_reference = self.prepare("torch", dtype="float64", save=str(self.reference))
        if self.no_reference:
            print(f"  errors are not measured: {self.no_reference}")
        self.unconverted = self.prepare("convert", dtype="float32") if "openvino" in args.contestants else ""
        for entry in entries(args, case):
            why = self.enter(*entry)
            if why:
                print(f"  {entry[0]} is left out: {why}", flush=True)

    def prepare(self, who: str, **more: Any) -> str:
        """Why it could not be done, or nothing."""
        worker = Worker(who, __file__, self.task | {"who": who} | more, PEERS["openvino"][1])
        skipped = worker.ask().get("skipped", "")
        worker.close()
        return skipped

    def enter(self, label: str, precision: str, who: str, env: dict[str, str] | None) -> str:
        """Loads one and lets it run once, before the next one starts. Why it does not take part, or nothing."""
        if env is None:
            return f"there are no such kernels for {self.case.dtype} {precision} in this build"
        if who == "openvino" and self.unconverted:
            return self.unconverted
        result = Path(self.folder, f"{label}.npy")
        worker = Worker(label, __file__, self.task | {"who": who, "precision": precision, "save": str(result)}, env)
        greeting = worker.ask()
        why = greeting.get("skipped") or self.known(label, precision, greeting.get("backend"))
        if why:
            worker.close()
            return why
        errors = None if self.no_reference else errors_of(np.load(result).astype(np.float64), np.load(self.reference))
        self.entered[label] = Entry(label, precision, greeting, worker, errors)
        print(f"  ready: {label} ({worker.ask()['seconds']:.2f} s)", flush=True)
        worker.results.clear()
        return ""

    def known(self, label: str, precision: str, kernels: str | None) -> str:
        """Why a VAE of ours with these kernels is nothing new, or nothing."""
        for other in self.entered.values():
            if kernels and (other.precision, other.greeting["backend"]) == (precision, kernels):
                return f"{other.label} computes with the same kernels, {kernels}"
        held = label.split()[0].partition("-")[2]
        no = kernels and held not in ("", kernels)
        return f"no run can be held to it here, it would compute with {kernels}" if no else ""

    def run(self) -> dict[str, Entry]:
        for i in range(self.rounds):
            taken = {label: round(entry.worker.ask()["seconds"], 2) for label, entry in self.entered.items()}
            print(f"  round {i + 1}: {taken}", flush=True)
        for entry in self.entered.values():
            entry.worker.close()
        return self.entered


def ratio(ours: Entry, other: Entry) -> float:
    """The median of each round's."""
    return median([a / b for a, b in zip(ours.seconds, other.seconds, strict=True)])


def ratio_to(name: str) -> str:
    """The column's name."""
    return f"ratio_to_{name.replace('-', '_')}"


def row(case: Case, args: argparse.Namespace, entry: Entry, others: dict[str, Entry]) -> dict:
    """A line of the CSV."""
    results, seconds = entry.worker.results, median(entry.seconds)

    def figure(key: str, choose: Callable[[list], float], unit: float, digits: int | None = None) -> float | None:
        values = [r[key] for r in results if key in r]
        return round(choose(values) / unit, digits) if values else None

    flops = results[0].get("flops")
    share = flops and median([r["flops"] / r["seconds"] / r["peak"] for r in results])
    line = {
        "contestant": entry.label,
        "model": args.model,
        "op": case.op,
        "height": case.size,
        "width": case.size,
        "dtype": case.dtype,
        "precision": entry.precision,
        "threads": args.threads,
        "seconds": round(seconds, 3),
        "fastest": round(min(entry.seconds), 3),
        "slowest": round(max(entry.seconds), 3),
        "first": entry.greeting["first"],
        "processor_seconds": figure("processor", median, 1, 3),
        "runs": len(results),
    }
    for name in ("vaemem", *PEERS):
        line[ratio_to(name)] = round(ratio(entry, others[name]), 3) if name in others else None
    return line | {
        "gflops": flops and round(flops / seconds / 1e9, 1),
        "peak_gflops": figure("peak", median, 1e9, 1),
        "share_of_peak": share and round(share, 3),
        "base_rss_mib": figure("base", max, MIB),
        "peak_rss_mib": figure("rss", max, MIB),
        "planned_mib": figure("planned", max, MIB),
        "max_error": entry.errors and f"{entry.errors[0]:.3e}",
        "rms_error": entry.errors and f"{entry.errors[1]:.3e}",
        "versions": entry.greeting["what"],
        **common.where(),
    }


def shown(line: dict) -> str:
    parts = [f"  {line['contestant']:22s} {line['seconds']:8.2f} s"]
    parts += [
        f"{line[f'ratio_to_{peer}']:5.2f} of {peer}" for peer in ("torch", "openvino") if line[f"ratio_to_{peer}"]
    ]
    parts += [f"{line['processor_seconds']:.2f} processor s"] * bool(line["processor_seconds"])
    parts += [f"{line['peak_rss_mib']:5d} MiB" + f" ({line['planned_mib']} planned)" * bool(line["planned_mib"])]
    parts += [f"error {line['rms_error']} (max {line['max_error']})"] * bool(line["rms_error"])
    if line["share_of_peak"]:
        parts += [f"{100 * line['share_of_peak']:.0f}% of {line['peak_gflops']:.0f} GFLOP/s"]
    return "  ".join(parts)


# ---- the bars ----


def file_of(case: Case, small: bool = False, model: str = "sdxl") -> str:
    return f"{f'{model}_' * (model != 'sdxl')}{case.op}_{case.size}_{case.dtype}{'_small' * small}_cpu.csv"


def verdict(bar: Bar, rows: dict[str, dict[str, str]]) -> str:
    """kept or missed, with the ratio, or why it is not known. rows are those of the bar's contest, by contestant."""
    for label in (bar.ours, bar.other):
        if label not in rows:
            return f"not measured: {label} is not in {file_of(bar.case)}"
    ours = rows[bar.ours]
    measured = float(ours[ratio_to(bar.other)])
    if bar.amx and "amx_bf16" not in ours["features"].split():
        return f"not measured: this machine has no AMX ({measured:.3f} without)"
    return f"{measured:.3f} {'kept' if measured <= bar.at_most else 'missed'}"


def bars(cases: Iterable[Case]) -> str:
    """A line for each, from the results that there are."""
    lines = []
    for bar in BARS:
        if bar.case in cases:
            path, rows = common.RESULTS / file_of(bar.case), {}
            if path.exists():
                with open(path, newline="") as file:
                    rows = {row["contestant"]: row for row in csv.DictReader(file)}
            said = verdict(bar, rows)
            lines.append(f"  {bar.case}: {bar.ours} at most {bar.at_most:.2f} of {bar.other}: {said}")
    return "\n".join(lines)


def contestant(name: str) -> str:
    if name in PEERS or name.partition("-")[0] == "vaemem":
        return name
    raise argparse.ArgumentTypeError(f"expected vaemem, vaemem-KERNELS, {', '.join(PEERS)}, got {name!r}")


def main() -> None:
    parser = parser_of(__doc__, rounds=5, threads=2, small=False)
    parser.add_argument("--model", default="sdxl", choices=list(CLASSES))
    parser.add_argument("--op", default=["decode"], nargs="+", choices=["decode", "encode"])
    parser.add_argument("--size", default=[512], nargs="+", type=int)
    parser.add_argument("--dtype", default=["float32"], nargs="+", choices=DTYPES)
    parser.add_argument("--precision", default=["highest"], nargs="+", choices=PRECISIONS)
    names = ["vaemem", "torch", "torch-tuned", "openvino"]
    parser.add_argument("--contestants", default=names, nargs="+", type=contestant)
    parser.add_argument("--check", type=int, default=128, help="the size at which errors are measured")
    parser.add_argument("--bars", action="store_true", help="measure nothing, compare what there is with the bars")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve(partial(next, answers(args.worker)))
    if args.bars:
        return print(bars([bar.case for bar in BARS]))

    cases = list(itertools.starmap(Case, itertools.product(args.op, args.size, args.dtype)))
    with tempfile.TemporaryDirectory() as folder:
        write_weights(folder, args.model, args.small)
        for case in cases:
            found = Contest(case, args, folder).run()
            rows = [row(case, args, entry, found) for entry in found.values()]
            print(f"{case}, {args.threads} threads, medians of {args.rounds} rounds", *map(shown, rows), sep="\n")
            if rows:
                write_csv(file_of(case, args.small, args.model), rows)
    said = "" if args.small or args.model != "sdxl" else bars(cases)
    if said:
        print(f"\nbars:\n{said}")


if __name__ == "__main__":
    main()
