"""What the benchmarks share: workers that take turns, the machine's own peak, results as CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


class Worker:
    """A process with its own environment that does one thing each time it is asked, and says how long it took."""

    def __init__(self, name: str, script: str, args: dict, env: dict[str, str]) -> None:
        self.name = name
        self.results: list[dict] = []
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker", json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def ask(self) -> dict:
        """One measurement; the first answer, after warming up, is a greeting and not counted."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the worker died with status {self.process.wait()}")
        self.results.append(json.loads(line))
        return self.results[-1]

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(measure) -> None:
    """A worker's side: measure() -> dict, once for every line of stdin."""
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def peak_rss() -> int:
    """Bytes; of this process since it began."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM:")) * 1024


def median(values: list[float]) -> float:
    return statistics.median(values)


def cpu() -> str:
    with open("/proc/cpuinfo") as f:
        flags = next((set(line.split(":")[1].split()) for line in f if line.startswith("flags")), set())
    return platform.machine() + " " + " ".join(n for n in ("avx2", "avx512f", "avx512_fp16", "amx_bf16") if n in flags)


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS)
    return done.stdout.strip() or "unknown"


def write_csv(name: str, rows: list[dict]) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / name
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {os.path.relpath(path)}")
