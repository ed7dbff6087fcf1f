"""Builds the emulator: kernels for ctypes, and stand-ins for libcuda.so.1 and libcudnn.so.9.

    python tests/emulator/build.py

Kernels want g++ only; the stand-in driver wants <cuda.h> too. What was built is kept in build/emulator, under a hash of
all that it was made from, for every process that wants the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA = HERE.parents[1] / "kernels" / "cuda"
KEPT = HERE.parents[1] / "build" / "emulator"
FLAGS = ["-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]
# With the processor's own fused multiply-add, since nvcc too contracts a * b + c.
CXX_FLAGS = ["-std=c++17", "-march=native", "-ffp-contract=fast", "-fno-gnu-unique", *FLAGS]
KERNEL_FLAGS = [*CXX_FLAGS, "-Wno-unknown-pragmas", "-DVM_EMULATED", "-iquote", str(CUDA), "-iquote", str(HERE)]
ENTRY = (
    "static vm_entry_of<decltype(vm_args_of({0})), {0}> vm_entry_{0}"
    ' __attribute__((section(".data.vm_entries")))("{0}", {1});\n'
)


def compiler(name: str) -> str:
    found = shutil.which(os.environ.get({"gcc": "CC", "g++": "CXX"}[name]) or name)
    if not found:
        raise FileNotFoundError(f"the emulator wants {name}")
    return found


def has(feature: str) -> bool:
    """Whether Linux names it among this processor's."""
    info = Path("/proc/cpuinfo")
    return info.exists() and feature in info.read_text().split()


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(str(c) for c in command)}\n{done.stderr}")
    return done.stdout


def toolkits() -> list[Path]:
    """Where CUDA may lie: CUDA_HOME, the path, /usr/local/cuda, or the nvidia-* wheels."""
    found = shutil.which("nvcc")
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), found and Path(found).resolve().parents[1]]
    wheels = [wheel for path in sys.path if path for wheel in sorted(Path(path).glob("nvidia/*"))]
    return [Path(root) for root in [*roots, "/usr/local/cuda"] if root] + wheels


def cuda_include() -> Path | None:
    """The folder of <cuda.h>."""
    return next((root / "include" for root in toolkits() if (root / "include" / "cuda.h").is_file()), None)


def nvcc() -> Path:
    found = next((root / "bin" / "nvcc" for root in toolkits() if (root / "bin" / "nvcc").is_file()), None)
    if not found:
        raise FileNotFoundError("nvcc is wanted: put it on the path or set CUDA_HOME")
    return found


@functools.cache
def state() -> bytes:
    """A hash of the sources, of the compiler and of the processor that all here is built for."""
    sources = [path for folder in (HERE, CUDA, CUDA.parent) for path in sorted(folder.glob("*.*")) if path.is_file()]
    predefined = run(compiler("g++"), *CXX_FLAGS, "-E", "-dM", "-x", "c++", os.devnull)
    return hashlib.sha256(b"".join([*(path.read_bytes() for path in sources), predefined.encode()])).digest()


def kept(name: str, make: Callable[[Path], None], *made_from: object) -> Path:
    """The file that make(path) makes from these; one that any process has made from the same is taken."""
    parts = [p.read_bytes() if isinstance(p, Path) and p.is_file() else str(p).encode() for p in made_from]
    folder = KEPT / hashlib.sha256(b"\0".join([state(), *parts])).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            with tempfile.TemporaryDirectory(dir=folder) as new:
                make(Path(new) / name)
                os.replace(Path(new) / name, folder / name)
    return folder / name


def compile_kernels(source: Path) -> Path:
    """The object of one .cu file, with an entry for each of its kernels."""

    def make(object_: Path) -> None:
        expanded = object_.with_suffix(".ii")
        run(compiler("g++"), *KERNEL_FLAGS, "-E", "-include", HERE / "block.h", "-o", expanded, "-x", "c++", source)
        found = re.findall(r"\bextern\s+\"C\"\s+vm_kernel(_of_pairs)?\s+(\w+)\s*\(", expanded.read_text())
        with expanded.open("a") as file:
            file.writelines(ENTRY.format(name, "true" if pairs else "false") for pairs, name in found)
        run(compiler("g++"), *KERNEL_FLAGS, "-c", "-o", object_, expanded)
        sections = set(re.findall(r"\s(\.bss\S*)\s", run("objdump", "-h", object_)))
        run("objcopy", *(f"--rename-section={name}=vm_shared" for name in sections), object_)

    return kept(f"{source.stem}.o", make, source)


def link(name: str, kernels: Sequence[Path], *more: object) -> Path:
    """A shared library of .cu files, what runs them, and more."""

    def make(library: Path) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_kernels, kernels))
        own = [
            "-Wl,-Bsymbolic",
            "-DVM_EMULATED",
            "-iquote",
            HERE,
            "-iquote",
            CUDA,
            HERE / "block.cc",
            HERE / "tensor.cc",
        ]
        run(compiler("g++"), *CXX_FLAGS, "-shared", "-o", library, *own, *more, *objects, "-pthread")

    return kept(name, make, *kernels, *more)


class Kernels:
    """Kernels of .cu files, run on the CPU.

    >>> k = Kernels([CUDA / "load.cu"])
    >>> k.launch("vm_load_f16", (blocks,), (256,), args, shared=0)   # args: a ctypes.Structure

    A fault (a barrier not reached by all, a wrong address, ...) is raised as RuntimeError. seed gives another order of
    threads and of asynchronous copies.
    """

    def __init__(self, sources: Sequence[Path]):
        self.library = ctypes.CDLL(str(link("libkernels.so", sources)))
        self.library.emulator_error.restype = self.library.emulator_map.restype = ctypes.c_char_p

    def map(self, dtype: str, first: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int]):
        """A vm_tensor_map of numbers of 2 bytes; strides in bytes."""
        out = (ctypes.c_uint64 * 16)()
        sizes = (ctypes.c_uint64 * 3)(*dims), (ctypes.c_uint64 * 2)(*strides), (ctypes.c_uint32 * 3)(*box)
        if refused := self.library.emulator_map(out, ctypes.c_void_p(first), *sizes):
            raise RuntimeError(f"expected {refused.decode()}")
        return out

    def launch(self, kernel, grid, block, args: ctypes.Structure, shared: int = 0, seed: int = 1) -> None:
        sizes = [(ctypes.c_uint32 * 3)(*(*size, 1, 1)[:3]) for size in (grid, block)]
        self.library.emulator_seed(seed)
        shared_bytes, args_bytes = ctypes.c_size_t(shared), ctypes.c_size_t(ctypes.sizeof(args))
        if self.library.emulator_launch(kernel.encode(), *sizes, shared_bytes, ctypes.byref(args), args_bytes):
            raise RuntimeError(self.library.emulator_error().decode())


def build(kernels: Sequence[Path] | None = None) -> tuple[Path, Path]:
    """The stand-ins for libcuda.so.1 with kernels (all of ours), and for libcudnn.so.9.

    libcuda has no soname, so that nobody who asks the loader for a libcuda.so.1 is given it by accident.
    """
    include = cuda_include()
    if include is None:
        raise FileNotFoundError("the stand-in driver wants <cuda.h>: set CUDA_HOME")
    driver = [HERE / name for name in ("stream.cc", "libcuda.cc", "libcuda_work.cc")]
    kernels = sorted(CUDA.glob("*.cu")) if kernels is None else kernels
    libcuda = link("libcuda.so.1", kernels, "-isystem", include, *driver)

    def make(libcudnn: Path) -> None:
        own = ["-std=gnu11", "-march=native", *FLAGS, "-isystem", include, "-shared", f"-Wl,-soname,{libcudnn.name}"]
        run(compiler("gcc"), *own, "-o", libcudnn, HERE / "libcudnn.c", "-lm", "-ldl", "-pthread")

    return libcuda, kept("libcudnn.so.9", make, include)


if __name__ == "__main__":
    for built in build():
        print(built)
