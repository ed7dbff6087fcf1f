"""Tools that the benchmarks share: workers that take turns, the machine's own clock and ceilings, results as CSV.

Environment:
  VAEMEM_RESULTS  the folder of the CSV files, benchmarks/results by default
  VAEMEM_ROWS     a file; each row is appended to it as a line of JSON as soon as it is measured
  VAEMEM_COMMIT   the measured commit, if there is no git
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS = Path(os.environ.get("VAEMEM_RESULTS") or HERE / "results")
# For _kernels.peak: about a tenth of a second with AVX-512. Tests, which read no rates, ask for fewer.
PEAK_ROUNDS = int(os.environ.get("VAEMEM_PEAK_ROUNDS") or 50_000_000)


# Arguments that several benchmarks have. Each gives its own default.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "size": {"type": int, "help": "pixels a side of the square"},
    "rounds": {"type": int, "help": "runs of each, in turns"},
    "threads": {"type": int},
    "case_seconds": {"type": float, "help": "rounds end then, once there are three"},
    "device": {"choices": ["cuda", "cpu"]},
    "small": {"action": "store_true", "help": "a small case, to try the script"},
}


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Make the parser of a benchmark with these of `ARGUMENTS`. doc: the benchmark's docstring"""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **ARGUMENTS[name])
    return parser


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
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(measure) -> None:
    """A worker's side: measure() -> dict, once for every line of stdin."""
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def rss(field: str = "VmRSS:") -> int:
    """Bytes; the resident size of this process now."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) * 1024


def peak_rss() -> int:
    """Bytes; the largest resident size since the process began, or since `reset_peak_rss`."""
    return rss("VmHWM:")


def settled_rss() -> int:
    """The resident size once garbage is collected and malloc has given back what it keeps of freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss()


def reset_peak_rss() -> None:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def _cpuinfo(field: str) -> str:
    with open("/proc/cpuinfo") as f:
        return next((line.partition(":")[2].strip() for line in f if line.startswith(field)), "")


def cpu() -> str:
    """The name that the processor has for itself; virtual machines may hide part of it."""
    return _cpuinfo("model name") or platform.machine()


def features() -> list[str]:
    """List the processor's features that make kernels differ."""
    names = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "asimd", "bf16")
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return [name for name in names if name in flags]


def where() -> dict[str, str]:
    """Return the columns that describe the machine and the source."""
    return {"cpu": cpu(), "features": f"{platform.machine()} {' '.join(features())}", "commit": commit()}


def commit() -> str:
    """The last one of the working tree."""
    if os.environ.get("VAEMEM_COMMIT"):
        return os.environ["VAEMEM_COMMIT"]
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
        return done.stdout.strip() or "unknown"
    return "unknown"


_appended: Counter[str] = Counter()  # rows of each table that write_csv has appended to VAEMEM_ROWS


def append_row(table: str, row: dict) -> None:
    """Appends a line of JSON to the file VAEMEM_ROWS, if it is set."""
    if os.environ.get("VAEMEM_ROWS"):
        with open(os.environ["VAEMEM_ROWS"], "a") as file:
            file.write(json.dumps({"table": table} | row) + "\n")


def write_csv(name: str, rows: list[dict], quiet: bool = False) -> None:
    for row in rows[_appended[name] :]:
        append_row(name, row)
    _appended[name] = len(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / name
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if not quiet:
        print(f"wrote {os.path.relpath(path)}")


class Machine:
    """A GPU that PyTorch sees, or the CPU: its clock, what is taken of its memory, its ceilings.

    Parameters
    ----------
    device : str
        "cuda" or "cpu".
    small : bool
        Ceilings from small arrays: quick, and too low.
    """

    def __init__(self, device: str, small: bool = False):
        import torch

        self.torch, self.device, self.small = torch, torch.device(device), small
        self.gpu = self.device.type == "cuda"
        self.name = torch.cuda.get_device_name(self.device) if self.gpu else "cpu"
        self._ceilings: dict[str, float] = {}

    @property
    def label(self) -> str:
        """The name, fit for a file's."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower())

    def wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Gives back what PyTorch keeps for later."""
        gc.collect()
        if self.gpu:
            self.torch.cuda.empty_cache()

    def time(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds on the device, and until `run` returned. If both are equal, the host may be the limit."""
        self.wait()
        if not self.gpu:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start,) * 2
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, host

    def memory(self, run: Callable[[], Any]) -> dict[str, int | None]:
        """Return the memory of a run above the level before it: the peaks of PyTorch's allocator (allocated, reserved),
        and the device's loss afterwards, with the result and PyTorch's cache still held. None on the CPU."""
        if not self.gpu:
            run()
            return dict.fromkeys(("allocated", "reserved", "device"))
        cuda = self.torch.cuda
        self.clear()
        cuda.reset_peak_memory_stats(self.device)
        self.wait()
        before = cuda.memory_allocated(self.device), cuda.memory_reserved(self.device)
        free = cuda.mem_get_info(self.device)[0]
        result = run()
        self.wait()
        taken = {
            "allocated": cuda.max_memory_allocated(self.device) - before[0],
            "reserved": cuda.max_memory_reserved(self.device) - before[1],
            "device": free - cuda.mem_get_info(self.device)[0],
        }
        del result
        return taken

    @contextlib.contextmanager
    def tf32(self, on: bool) -> Iterator[None]:
        """Whether PyTorch's float32 products may be TF32."""
        cudnn, matmul = self.torch.backends.cudnn, self.torch.backends.cuda.matmul
        before = cudnn.allow_tf32, matmul.allow_tf32
        cudnn.allow_tf32 = matmul.allow_tf32 = on
        try:
            yield
        finally:
            cudnn.allow_tf32, matmul.allow_tf32 = before

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """A second, of a large matrix product of random numbers: the arithmetic's ceiling."""
        n = 512 if self.small or not self.gpu else 8192
        return self._ceiling(f"{dtype} {tf32}", lambda: self._product(n, dtype, tf32))

    def bandwidth(self) -> float:
        """Bytes read and written a second, of a large copy."""
        n = 1 << 22 if self.small or not self.gpu else 1 << 30
        return self._ceiling("copy", lambda: self._copy(n))

    def _ceiling(self, name: str, measure: Callable[[], float]) -> float:
        if name not in self._ceilings:
            self._ceilings[name] = measure()
        return self._ceilings[name]

    def _product(self, n: int, dtype: str, tf32: bool) -> float:
        like = {"device": self.device, "dtype": getattr(self.torch, dtype)}
        a, b = self.torch.randn(n, n, **like), self.torch.randn(n, n, **like)
        with self.tf32(tf32):
            return 2 * n**3 / self._median(lambda: a @ b)

    def _copy(self, n: int) -> float:
        a = self.torch.ones(n, dtype=self.torch.uint8, device=self.device)
        b = self.torch.empty_like(a)
        return 2 * n / self._median(lambda: b.copy_(a))

    def _median(self, run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        return median([self.time(run)[0] for _ in range(9)])
