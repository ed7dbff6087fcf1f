"""Finds or compiles the machine code of this folder's .cu files: one fat binary each.

They lie in a folder <hash of the sources>-<compute capabilities>, in build/fatbins or where VAEMEM_FATBINS says. The
hash decides whether they are up to date, so a folder that was made on another machine is taken as it is. setup.py and
tests/cuda_driver.py use this.
"""

from __future__ import annotations

import glob
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FLAGS = ["-std=c++17", "-O3", "-Wno-deprecated-gpu-targets", "-Xfatbin", "-compress-all", "--threads=0"]
PTX = 90  # later GPUs compile this when they load it


def sources() -> list[str]:
    return sorted(glob.glob(os.path.join(HERE, "*.cu")))


def digest() -> str:
    """Returns a hash of everything that the machine code is made from, except nvcc itself."""
    made = hashlib.sha256(repr((FLAGS, PTX)).encode())
    for path in [*sources(), *sorted(glob.glob(os.path.join(HERE, "*.h"))), os.path.join(HERE, "..", "kernels.h")]:
        made.update(os.path.basename(path).encode() + b"\0")
        with open(path, "rb") as file:
            made.update(file.read())
    return made.hexdigest()[:16]


def places() -> list[str]:
    """Returns the folders that may hold folders of machine code."""
    return [path for path in (os.environ.get("VAEMEM_FATBINS"), os.path.join(ROOT, "build", "fatbins")) if path]


def find(archs: Sequence[str] = ()) -> str | None:
    """Returns the folder of up-to-date machine code, for any GPU unless `archs` are given; or None."""
    name = f"{digest()}-{'-'.join(archs) or '*'}"
    for place in places():
        for folder in sorted(glob.glob(os.path.join(glob.escape(place), name))):
            names = [os.path.basename(source)[:-3] + ".fatbin" for source in sources()]
            if all(os.path.exists(os.path.join(folder, one)) for one in names):
                return os.path.abspath(folder)
    return None


def compile_all(nvcc: str, archs: Sequence[str], in_parallel: Callable[[Callable, list], list]) -> str:
    """Returns the folder of machine code for these GPUs and PTX, compiled if none is up to date.

    Raises CalledProcessError if nvcc fails.
    """
    found = find(archs)
    if found:
        return found
    # 90a: what Hopper has and later GPUs have not (wgmma)
    names = [f"{a}a" if a == "90" else a for a in archs]
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    targets.append(f"-gencode=arch=compute_{PTX},code=compute_{PTX}")
    folder = os.path.join(places()[-1], f"{digest()}-{'-'.join(archs)}")
    os.makedirs(folder, exist_ok=True)

    def compile_one(source: str) -> None:
        target = os.path.join(folder, os.path.basename(source)[:-3] + ".fatbin")
        new = f"{target}.{os.getpid()}"  # renamed when complete: an interrupted build leaves nothing that looks done
        subprocess.run([nvcc, "-fatbin", *FLAGS, *targets, "-o", new, source], check=True)
        os.replace(new, target)

    in_parallel(compile_one, sources())
    return folder
