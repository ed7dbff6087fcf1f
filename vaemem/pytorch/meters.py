"""Who reads the memory of a device while real PyTorch runs: CUDA's counters, or the resident size of the process."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any


class CudaMeter:
    """The counters of PyTorch's caching allocator; `cuda` is ``torch.cuda``."""

    def __init__(self, cuda: Any, device: Any):
        self._cuda, self._device = cuda, device
        self._baseline = 0, 0

    def clear(self) -> None:
        """Gives the cache back, and resets the peaks."""
        gc.collect()
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)

    def before(self) -> None:
        """Notes the baseline."""
        self.wait()
        self._baseline = self._cuda.memory_allocated(self._device), self._cuda.memory_reserved(self._device)

    def wait(self) -> None:
        """Returns when the device has done its work."""
        self._cuda.synchronize(self._device)

    def after(self) -> tuple[int | None, int]:
        """(allocated, reserved) in bytes: peaks since `clear`, above the baseline."""
        self.wait()
        allocated, reserved = self._baseline
        return (
            self._cuda.max_memory_allocated(self._device) - allocated,
            self._cuda.max_memory_reserved(self._device) - reserved,
        )


class CpuMeter:
    """The resident size of this process, with CudaMeter's methods. What malloc has in use is not known, so allocated
    is None.

    OSError where the system is not Linux, or does not let a process reset its peak resident size.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("measure: want Linux, whose /proc tells the peak resident size of a CPU run")
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; others keep little
        self._baseline = 0
        self.before()

    def clear(self) -> None:
        gc.collect()
        if self._trim:
            self._trim(0)  # or the run would find the pages of the one before

    def before(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # VmHWM starts again from here
        except OSError as error:
            raise OSError(f"measure: want a system that lets a process reset its peak resident size: {error}") from None
        self._baseline = _status("VmRSS:")

    def wait(self) -> None:
        pass

    def after(self) -> tuple[int | None, int]:
        return None, max(0, _status("VmHWM:") - self._baseline)


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024
