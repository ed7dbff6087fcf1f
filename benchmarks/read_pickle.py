"""Compares `_core.read_pickle` with Python's two readers, whose `find_class` refuses every name: time and memory for
snapshots of about 100 MB, and what small hostile pickles do to each reader.

Each reading is a process of its own, with at most 6 GiB of addresses (Linux).

    python benchmarks/read_pickle.py
"""

from __future__ import annotations

import io
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vaemem import _core

HOSTILE = {
    "memo index of 2^27": b"\x80\x02]r\0\0\0\x08.",
    "memo index of 2^32 - 1": b"\x80\x02]r\xff\xff\xff\xff.",
    "deep tuple as key": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
}


class Refusing:
    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"expected plain data, got {module}.{name}")


class InC(Refusing, pickle.Unpickler):
    pass


class InPython(Refusing, pickle._Unpickler):
    pass


READERS = {
    "core": _core.read_pickle,
    "pickle.Unpickler": lambda data: InC(io.BytesIO(data)).load(),
    "pickle._Unpickler": lambda data: InPython(io.BytesIO(data)).load(),
}


def write_snapshot(path: Path, kind: str) -> None:
    """A history as `torch.cuda.memory._dump_snapshot` writes it. Entries share their frames as Python's stacks do, have
    frames of their own as stacks in C++ do, or have none."""
    rng = random.Random(1)
    shared = [{"name": f"function_{i}", "filename": f"torch/module_{i % 40}.py", "line": i} for i in range(800)]
    trace = []
    for i in range({"no frames": 2_440_000, "shared frames": 530_000, "own frames": 240_000}[kind]):
        address, size = 140 * 10**12 + 512 * rng.randrange(1 << 34), rng.randrange(1 << 30)
        action = "free_completed" if i % 2 else "alloc"
        entry: dict[str, Any] = {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 17 * i}
        if kind == "shared frames":
            entry["frames"] = [rng.choice(shared) for _ in range(30)]
        elif kind == "own frames":
            names = [f"void at::native::thing<{rng.randrange(100_000)}>" for _ in range(8)]
            entry["frames"] = [{"name": name, "filename": "??", "line": 0} for name in names]
        trace.append(entry)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}, protocol=4))


def peak_mib() -> int:
    """Return the peak of this process. getrusage's figure begins with that of the process that started it."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def read(reader: str, path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = path.read_bytes()
    before, start = peak_mib(), time.process_time()
    try:
        value, told = READERS[reader](data), "read"  # the value lives on until all is said
    except Exception as error:
        value, told = None, repr(error)[:90]
    print(f"{told}: {time.process_time() - start:.2f} s, {peak_mib() - before} MiB", flush=True)
    del value


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        for name in ("no frames", "shared frames", "own frames", *HOSTILE):
            if name in HOSTILE:
                path.write_bytes(HOSTILE[name])
            else:
                write_snapshot(path, name)
            print(f"{name}, {path.stat().st_size} bytes")
            for reader in READERS:
                command = [sys.executable, __file__, reader, str(path)]
                done = subprocess.run(command, capture_output=True, text=True)
                print(f"  {reader:18}{done.stdout.strip() or f'the process ended with {done.returncode}'}")


if __name__ == "__main__":
    if sys.argv[1:]:
        read(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
