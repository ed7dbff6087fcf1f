"""A call of a simulated process, read step by step: what it holds, and how much at which moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import MIB
from vaemem.prediction.gpus import Gpu
from vaemem.prediction.workspace import torch_release

ROUNDED_UP = "[rounded up by the allocator]"  # to 512 bytes, and remainders of blocks that are too small to split off
# PyTorch takes cuBLASLt's workspace again in each call up to the first release, keeps it up to the second, and later
# uses cuBLAS's.
_LAST_EACH, _LAST_KEPT = (2, 8), (2, 11)


def blas_settings(gpu: Gpu, torch_version: str) -> dict[str, Any]:
    """Bytes of cuBLAS's and cuBLASLt's workspaces and how PyTorch keeps the latter (CublasHandlePool.cpp,
    CUDABlas.cpp)."""
    release = torch_release(torch_version)
    use = "each" if release <= _LAST_EACH else "kept" if release <= _LAST_KEPT else "shared"
    cublas = 32 * MIB if gpu.sm == 90 else 2 * 4 * MIB + 8 * 16 * 1024
    return {"cublas_bytes": cublas, "cublaslt_bytes": MIB, "cublaslt_use": use}


class Moment(NamedTuple):
    """A point of a call: who acted, and the bytes that the process had allocated and reserved at its height."""

    name: str
    allocated: int
    reserved: int


class PeakTensor(NamedTuple):
    """Something that was allocated at the peak."""

    name: str
    bytes: int


def moments(trace: _core.Trace, allocated: Any, reserved: Any, caller: str = "") -> Iterator[Moment]:
    """A call's steps, each with the most bytes that were allocated and reserved in it; `caller` stands before each
    name."""
    owner: dict[int, str] = {}
    for i, (op, id_, _, name) in enumerate(trace.steps):
        if op == "take":
            owner[id_] = name
        shown = f"free {caller}{owner[id_]}" if op == "give" else caller + name
        yield Moment(shown, int(allocated[i]), int(reserved[i]))
