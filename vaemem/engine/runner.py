"""What does a run: it is planned, and begun again where memory runs out or float16 overflows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from vaemem import _core
from vaemem._common import latent_factor
from vaemem.engine import weights
from vaemem.engine.arguments import Poll
from vaemem.engine.arrays import Arrays
from vaemem.engine.device import Device
from vaemem.engine.layouts import Arch
from vaemem.engine.limits import Plans, taken
from vaemem.engine.records import Run, make_run

# Activations overflow in some models' halves; GroupNorm takes any factor out again, so a power of two costs nothing but
# the smallest numbers' last bits.
UNIT_STEP = 2.0**-4
LEAST_UNIT = 2.0**-12


@dataclass(frozen=True)
class Settings:
    """A VAE's attributes as they were when a call began: who changes them during a run changes the next one."""

    resources: dict[str, int]  # the core's arguments: threads, on a CPU
    graphs: bool
    retries: bool  # where memory runs out, with the next smaller plan
    cache_bytes: int | None  # a larger arena is not kept for the next run


class Runner:
    """A model where it lives, and what one run leaves for the next."""

    def __init__(self, core: _core.Model, device: Device | None, scale: float = 1.0) -> None:
        self.core, self.device, self.arch, self.factor = core, device, core.arch, latent_factor(core.arch)
        self.dtype = core.dtype
        self.precision = device.precision if device else core.precision
        self._scale = scale  # power of two by which activations are kept multiplied, against float16's overflow
        self._weights_bytes, self._arena_bytes = core.reserved_bytes, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        core = self._on_the_cpu()
        return Runner(weights.copy(core, dtype=self.dtype, precision=self.precision), None, self._scale)

    def __reduce__(self) -> Any:
        core = self._on_the_cpu()
        return _unpickled, (core.arch, core.parts, dict(weights.kept(core)), self.dtype, self.precision, self._scale)

    def _on_the_cpu(self) -> _core.Model:
        if self.device:
            raise TypeError(f"VAE: want one on the cpu to copy or to pickle, got one on cuda:{self.device.number}")
        return self.core

    @property
    def held_bytes(self) -> int:
        """What weights and arena take now; a run that failed has given the arena back."""
        return self._weights_bytes + min(self._arena_bytes, self.core.reserved_bytes - self._weights_bytes)

    def trim(self) -> None:
        self.core.trim()
        self._arena_bytes = 0

    def run(self, arrays: Arrays, settings: Settings, poll: Poll, limit: int = 0, **how: Any) -> tuple[Any, Run]:
        """The result and what it took. Where float16 overflowed, run again with activations kept smaller.

        how: other arguments of the core's run.
        """
        start, request, notes = time.perf_counter(), arrays.request | settings.resources, list[str]()
        plans, wait = Plans(self.core, request), arrays.waits or poll is not None
        how |= dict(settings.resources, replay=settings.graphs, poll=poll, wait=wait)
        while True:
            how["scale"] = self._scale
            result, record = self._run_in_memory(arrays, plans, limit, settings.retries, notes, how)
            if not record["overflow"]:
                break
            if self.dtype != "float16" or self._scale <= LEAST_UNIT:
                so = " even so" if self._scale < 1 else ""
                notes.append(f"{self.dtype}: not finite{so}: the input or the weights are not, or are too large for it")
                self._scale = 1.0
                break
            self._scale *= UNIT_STEP
            notes.append(f"float16 overflowed: run again with activations multiplied by 1/{round(1 / self._scale)}")
        self._arena_bytes = record["arena"]
        if settings.cache_bytes is not None and self._arena_bytes > settings.cache_bytes:
            self.trim()
        return result, make_run(request, record, time.perf_counter() - start if wait else None, tuple(notes))

    def _run_in_memory(
        self, arrays: Arrays, plans: Plans, limit: int, retries: bool, notes: list[str], how: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Where memory ran out, run again with the next smaller plan."""
        while True:
            try:
                return arrays.run(self.core, memory_limit=limit, **how)
            except ValueError as error:
                if hasattr(error, "smallest"):
                    raise plans.refusal(limit) from None
                raise
            except MemoryError as error:
                failed = plans.within(limit)
                smaller = plans.smaller(failed) if retries else None
                if not smaller:
                    raise (plans.out_of_memory(error, failed, self.device) if self.device else error) from None
                limit = taken(failed) - 1
                notes.append(f"out of memory: run again within {limit} bytes, {smaller['work']:.2f} times the work")


def _unpickled(
    arch: Arch, parts: str, tensors: dict[str, np.ndarray], dtype: str, precision: str, scale: float
) -> Runner:
    return Runner(weights.make(arch, parts, tensors.items(), dtype=dtype, precision=precision), None, scale)
