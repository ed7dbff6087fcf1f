"""Free memory on a card, and errors that say that it ran out."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vaemem._errors import ArgumentError

_TEXTS = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")  # CUDA's and its libraries', and the CPU's


def find_free(device: Any) -> int:
    """Return the bytes that this process can still allocate on a device: free memory, and PyTorch's unused blocks.
    ValueError for a device that does not report its memory, such as the CPU."""
    backend: Any = getattr(torch, torch.device(device).type, None)
    if not all(hasattr(backend, name) for name in ("mem_get_info", "memory_reserved", "memory_allocated")):
        raise ArgumentError("device", "one that reports its free memory, such as 'cuda'", repr(str(device)))
    unused = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0] + unused)


@contextmanager
def no_spilling(device: Any) -> Iterator[None]:
    """On Windows, limit PyTorch to the memory that the driver counts as free and to what PyTorch already holds.

    Beyond the free memory the driver never refuses: it goes on in the host's memory, many times slower. At a limit of
    its own PyTorch frees its cache and tries again, and then raises `torch.OutOfMemoryError`, as elsewhere.
    """
    place = torch.device(device)
    if sys.platform != "win32" or place.type != "cuda":
        yield
        return
    cuda, index = torch.cuda, place.index
    before = getattr(cuda, "get_per_process_memory_fraction", lambda index: 1.0)(index)  # not before PyTorch 2.8
    free, total = cuda.mem_get_info(index)
    cuda.set_per_process_memory_fraction(min(before, (free + cuda.memory_reserved(index)) / total), index)
    try:
        yield
    finally:
        cuda.set_per_process_memory_fraction(before, index)


def count_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out. Not all of CUDA's libraries raise PyTorch's own class."""
    kinds = torch.OutOfMemoryError, MemoryError
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and any(one in str(error) for one in _TEXTS))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def release(error: BaseException) -> None:
    """Free the tensors of the calls that an error ended, and the memory that PyTorch's cache holds."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__, before = None, error.__cause__ or error.__context__
        if before is None:
            break
        error = before
    free_cache()


def free_cache() -> None:
    """Free the memory that PyTorch holds on cards and does not use, so that other libraries can allocate it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
