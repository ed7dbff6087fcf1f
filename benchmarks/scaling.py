"""Decodes on the CPU with more and more threads: measured, or modelled for threads that this machine lacks.

    python benchmarks/scaling.py [--threads 16 8 4 2 1] [--size 512] [--dtypes float32 bfloat16] [--rounds 3]
    python benchmarks/scaling.py --model [--threads 4 8 16 64] [--size 1024] [--dtypes float32] [--limits 0 1.2]
        [--passes]

Measured: each row is the median of `rounds` runs after one warm-up. One thread comes last because it takes longest.
PyTorch runs the same module with the same weights (torch_vae.py) if it is installed. Rows go to scaling_<cpu>.csv in
benchmarks/results as they are measured.

Modelled: scaling.c runs the core's own plan and schedule on a clock for each thread. It times the first tasks of each
pass on one thread, and a batch without work on real threads. So the figures hold for physical cores that do not slow
each other down. Each row also has the bytes per second of the stored tensors, each read or written once, to compare
with a copy in memory. limits: in T besides the weights; 0: none. Rows go to scaling_model_<size>.csv.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import median, parser_of, where, write_csv

import vaemem

ROOT = Path(__file__).resolve().parents[1]
KERNELS = {"sse avx2 avx512 avx512bf16 amx": "x86_64", "neon": "aarch64"}  # as in setup.py, with its flags
AVX512 = (*(f"-mavx512{x}" for x in ("f", "vl", "bw", "dq")), "-mfma", "-mprefer-vector-width=512")
FLAGS = {
    "neon": ("-fno-schedule-insns",),
    "sse": ("-fno-tree-ter",),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, "-mamx-tile", "-mamx-bf16"),
}
COMPILE = ("gcc", "-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
INCLUDED = ("pool.c", "flow.c", "run.c")  # by scaling.c

Decode = Callable[[np.ndarray, int], object]  # takes latents and a number of threads


# ---- the model ----


@dataclass
class Run:
    """A modelled run: its threads, its plan's work and bytes besides the weights, and its chains."""

    threads: int
    work: float
    plan_bytes: int
    chains: list[Chain]

    def total(self, what: str) -> float:
        return sum(getattr(chain, what) for chain in self.chains)


@dataclass
class Chain:
    """Passes that run together, by the name of the first: seconds elapsed, of all tasks, and of the caller alone."""

    name: str
    batches: int
    tasks: int
    elapsed: float
    busy: float
    alone: float
    bytes: float


def build(folder: str) -> str:
    """Compiles scaling.c with the core and all kernels of this machine. Returns: the program."""
    (sets,) = [names for names, machine in KERNELS.items() if machine == platform.machine().lower()]
    sources = [
        *ROOT.glob("csrc/*.c"),
        *ROOT.glob("csrc/engine/*.c"),
        *ROOT.glob("kernels/*.c"),
        *ROOT.glob("kernels/ref/*.c"),
    ]
    sources = [path for path in sources if path.name not in INCLUDED]
    jobs = [(path, ()) for path in sources]
    jobs += [(path, FLAGS[name]) for name in sets.split() for path in ROOT.glob(f"kernels/{name}/*.c")]

    def compile_one(job: tuple[Path, tuple[str, ...]]) -> str:
        path, more = job
        target = f"{folder}/{path.parent.name}_{path.stem}.o"
        machine = "-DVM_HAVE_NEON" if sets == "neon" else "-DVM_HAVE_X86"
        subprocess.run([*COMPILE, machine, *more, "-c", path, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, jobs))
    program = f"{folder}/scaling"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([*COMPILE, source, *objects, "-o", program, "-lm", "-lpthread"], check=True)
    return program


def asked(program: str, *words: object) -> str:
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True).stdout


def batch_cost(program: str) -> tuple[float, float]:
    """Returns: seconds of a batch without work, and for each thread that it wakes. Here threads share cores, so a real
    machine wakes them sooner."""
    two, many = (float(asked(program, "pool", threads)) for threads in (2, 16))
    return two, (many - two) / 14


def modelled(program: str, size: int, dtype: str, limit: float, threads: list[int]) -> list[Run]:
    """Runs with one thread, then with each of `threads`. limit: in T, besides the weights; 0: none."""
    t = 128 * size * size * (4 if dtype == "float32" else 2)
    runs: list[Run] = []
    for line in asked(program, "run", size, dtype, limit * t, *batch_cost(program), 1, *threads).splitlines():
        words = line.split()
        if len(words) == 3:
            runs.append(Run(int(words[0]), float(words[1]), int(words[2]), []))
        else:
            name, _, batches, tasks, *numbers = words
            runs[-1].chains.append(Chain(name, int(batches), int(tasks), *map(float, numbers)))
    return runs


def shown(run: Run, share: float) -> str:
    rate = run.total("bytes") / run.total("elapsed") / 1e9
    return f"  {run.threads:3d} threads: {share:.2f}; work {run.work:.2f}, {run.plan_bytes >> 20} MiB, {rate:.1f} GB/s"


def shown_chain(chain: Chain, share: float) -> str:
    return f"      {chain.name:46s} {share:.2f} of {chain.busy:.3f} s, {chain.batches} batches, {chain.tasks} tasks"


def model(args: argparse.Namespace) -> None:
    """Prints, for each limit, the efficiency: what one thread takes, divided by threads times what they take."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        program = build(folder)
        print(f"modelled, per physical core; two threads copy {float(asked(program, 'copy')) / 1e9:.1f} GB/s in memory")
        for dtype, limit in itertools.product(args.dtypes, args.limits):
            one, *runs = modelled(program, args.size, dtype, limit, sorted(args.threads))
            print(f"\ndecode {args.size}x{args.size} {dtype}, {f'within {limit} T' if limit else 'no limit'}")
            for run in runs:
                # of the same run's tasks, so that slower minutes of the machine do not count
                whole = run.total("busy") / run.threads / run.total("elapsed") * one.work / run.work
                shares = {chain.name: chain.busy / run.threads / chain.elapsed for chain in run.chains}
                print(shown(run, whole), flush=True)
                if args.passes:
                    print(*(shown_chain(chain, shares[chain.name]) for chain in run.chains), sep="\n")
                about = {"dtype": dtype, "size": args.size, "limit": limit, "threads": run.threads, "work": run.work}
                lines += [
                    {"pass": name, **about, "efficiency": round(share, 3), "plan_mib": run.plan_bytes >> 20, **where()}
                    for name, share in {"all": whole, **shares}.items()
                ]
    write_csv(f"scaling_model_{args.size}.csv", lines)


# ---- measured ----


def ours(dtype: str) -> Decode:
    vae = vaemem.VAE.random("sdxl", parts="decoder", dtype=dtype)

    def run(z: np.ndarray, threads: int) -> object:
        vae.threads = threads
        return vae.decode(z)

    return run


def torch_decode(dtype: str) -> Decode | None:
    """Returns PyTorch's decode, or None without PyTorch."""
    try:
        import torch
        import torch_vae
    except ImportError:
        return None
    module = torch_vae.with_weights(vaemem.VAE.random("sdxl")).to(getattr(torch, dtype))

    def run(z: np.ndarray, threads: int) -> object:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return module.image(torch.from_numpy(z).to(getattr(torch, dtype)))

    return run


def seconds_of(run: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of `rounds` runs after a warm-up."""
    run()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken)


def measure(args: argparse.Namespace) -> None:
    here = len(os.sched_getaffinity(0))
    z = np.random.default_rng(0).standard_normal((1, 4, args.size // 8, args.size // 8), dtype=np.float32)
    lines: list[dict] = []
    name = f"scaling_{''.join(c if c.isalnum() else '_' for c in where()['cpu'].lower())}.csv"
    for dtype in args.dtypes:
        runners = {"vaemem": ours(dtype), "torch": torch_decode(dtype)}
        for threads in [n for n in args.threads if n <= here]:
            for who, run in runners.items():
                if run is None:
                    continue
                seconds = seconds_of(lambda run=run, n=threads: run(z, n), args.rounds)
                row = {"contestant": who, "dtype": dtype, "size": args.size, "threads": threads}
                lines.append(row | {"seconds": round(seconds, 4), **where()})
                print(f"{who} {dtype} {args.size}x{args.size}, {threads} threads: {seconds:.3f} s", flush=True)
                write_csv(name, lines, quiet=True)


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--model", action="store_true", help="model threads that this machine lacks")
    parser.add_argument("--threads", nargs="+", type=int)
    parser.add_argument("--size", type=int, help="pixels of the decoded square")
    parser.add_argument("--dtypes", nargs="+")
    parser.add_argument("--limits", nargs="+", type=float, default=[0.0, 1.2])
    parser.add_argument("--passes", action="store_true", help="print the passes of a modelled run, too")
    args = parser.parse_args(argv)
    usual = ([4, 8, 16, 64], 1024, ["float32"]) if args.model else ([16, 8, 4, 2, 1], 512, ["float32", "bfloat16"])
    args.threads, args.size, args.dtypes = args.threads or usual[0], args.size or usual[1], args.dtypes or usual[2]
    if args.model:
        model(args)
    else:
        measure(args)


if __name__ == "__main__":
    main()
