"""Measure the CPU time of predictions, in one thread: medians over sizes that are new to the process.

    python benchmarks/prediction_seconds.py [--sizes N] [--beside PATH] [--bound]
    python benchmarks/prediction_seconds.py --commands [BEGINNING] [--beside PATH]

The package is this checkout's, if its core is built in place; otherwise the installed one. `--beside` names another
checkout, built in place. Both then answer each question in turns, in processes of their own, and the table compares
them. Plans take longer, so they run at fewer sizes; the table says how many. Time is the process's own CPU time, so
that other processes disturb it less. `--commands` times whole commands, each as a process from start to end: CPU
seconds, then elapsed seconds. BEGINNING selects the commands that begin with it. Python's compiled files exist already.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3
COMMANDS = """
fits sdxl decode 1024 --gpu "RTX 4060"
fits sdxl decode 2048 --gpu "RTX 4060"
fits sdxl decode 4096 --gpu T4
fits sdxl encode 2048 --gpu "RTX 4060"
fits flux decode 2048 --gpu "RTX 3060"
fits sd15 decode 2048 --gpu "GTX 1080"
largest sdxl decode --gpu "RTX 4060"
largest flux decode --gpu T4
fits sdxl decode 1024 --gpu "RTX 4060"
fits sdxl 1024 --gpu T4
pipeline flux 1024 --gpu "RTX 4090"
plan sdxl 1024 --gpu "RTX 4060"
plan flux 1024 --gpu "RTX 4060"
plan zimage 1024 --gpu T4
explain "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 7.75 GiB."
"""
SHARES = {"predict": 1, "predict_pipeline": 1, "plan_pipeline": 10}  # of the sizes, each is asked a part


def questions() -> dict[str, Callable[[int, int], Any]]:
    import vaemem

    return {
        "predict": lambda h, w: vaemem.predict("sdxl", "decode", h, w, "float16", gpu="RTX 4090"),
        "predict_pipeline": lambda h, w: vaemem.predict_pipeline("sdxl", h, w, gpu="RTX 4090"),
        "plan_pipeline": lambda h, w: vaemem.plan_pipeline("sdxl", h, w, gpu="RTX 4060"),
    }


def sizes(count: int) -> Iterator[tuple[int, int]]:
    """Around a megapixel, each once: what is remembered of a size is of no use to the next."""
    return ((1024 + 8 * (i % 40 - 20), 1024 + 8 * (i // 40 * 3 + i % 7 - 10)) for i in range(count))


def time_here(name: str, count: int, first: int) -> list[float]:
    """Milliseconds of CPU time for each of `count` sizes, from the `first` on; one other size goes before them."""
    if name == "bound":
        from vaemem.prediction.bound import bound

        before = time.process_time()
        bound("comfyui", gpu="RTX 4060")
        return [1e3 * (time.process_time() - before)]
    ask, taken = questions()[name], []
    ask(512, 512)
    for height, width in list(sizes(first + count))[first:]:
        before = time.process_time()
        ask(height, width)
        taken.append(1e3 * (time.process_time() - before))
    return taken


def time_in(checkout: Path, name: str, count: int, first: int) -> list[float]:
    """Measure the same in a process of its own, with the package of a checkout."""
    env = os.environ | {"PYTHONPATH": str(checkout)}
    asked = [str(part) for part in (name, count, first)]
    done = subprocess.run(
        [sys.executable, __file__, "--here", *asked], env=env, capture_output=True, text=True, cwd=checkout
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return list(json.loads(done.stdout))


def time_command(checkout: Path, command: str, compiled: str) -> tuple[float, float]:
    """CPU seconds and elapsed ones. compiled: the folder of Python's compiled files, which a first run fills."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1", "PYTHONPYCACHEPREFIX": compiled}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "vaemem", *shlex.split(command)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    elapsed, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{checkout}: {command}: {done.stderr.strip()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def print_commands(checkouts: list[Path], beginning: str) -> None:
    print(f"{'seconds: CPU, elapsed':44}" + "".join(f"{commit(checkout):>16}" for checkout in checkouts))
    with tempfile.TemporaryDirectory() as compiled:
        for command in filter(lambda line: line and line.startswith(beginning), COMMANDS.split("\n")):
            taken: list[list[tuple[float, float]]] = [[] for _ in checkouts]
            for _ in range(1 + ROUNDS):
                for times, checkout in zip(taken, checkouts, strict=True):
                    times.append(time_command(checkout, command, compiled))
            each = [map(median, zip(*times[1:], strict=True)) for times in taken]
            print(f"{command[:43]:44}" + "".join("{:10.2f}{:6.2f}".format(*seconds) for seconds in each), flush=True)


def commit(checkout: Path) -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=checkout)
    return done.stdout.strip() or checkout.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, default=200, help="of predict and predict_pipeline; a tenth of plans")
    parser.add_argument("--beside", type=Path, metavar="PATH", help="another checkout, built in place")
    parser.add_argument("--bound", action="store_true", help="also bound('comfyui') on one card, asked once")
    parser.add_argument("--commands", nargs="?", const="", metavar="BEGINNING", help="whole commands instead")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        name, count, first = args.here
        print(json.dumps(time_here(name, int(count), int(first))))
        return
    checkouts = [ROOT, *([args.beside.resolve()] if args.beside else [])]
    if args.commands is not None:
        print_commands(checkouts, args.commands)
        return
    print(f"{'CPU ms, medians':20}{'sizes':>6}" + "".join(f"{commit(checkout):>12}" for checkout in checkouts))
    asked = {name: max(args.sizes // share, 1) for name, share in SHARES.items()} | ({"bound": 1} if args.bound else {})
    for name, count in asked.items():
        rounds = min(ROUNDS, count)
        taken: list[list[float]] = [[] for _ in checkouts]
        for turn in range(rounds):
            first, last = (count * i // rounds for i in (turn, turn + 1))
            for times, checkout in zip(taken, checkouts, strict=True):
                times += time_in(checkout, name, last - first, first)
        row = "".join(f"{median(times):12.2f}" for times in taken)
        print(f"{name:20}{count:6}{row}" + (f"   {median(taken[0]) / median(taken[1]):.2f}" if args.beside else ""))


if __name__ == "__main__":
    main()
