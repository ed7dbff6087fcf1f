"""On what and with what a simulated process runs: a card and the software on it, each one value."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from vaemem._common import choose, flag
from vaemem.engine.limits import parse_size
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL
from vaemem.prediction.gpus import CONTEXT, Gpu, find_gpu
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import DEFAULT_TORCH
from vaemem.prediction.snapshot import BACKENDS, CachingAllocator, parse_conf
from vaemem.prediction.workspace import torch_release

# PyTorch whose GroupNorm on CUDA wants NCHW. The kernel for NHWC (pytorch#191945) is in 2.15's wheel, not in 2.14's.
LAST_COPYING_NORM = (2, 14)


@dataclass(frozen=True)
class Card:
    """A GPU, with its name, compute capability, multiprocessors and memory, and the bytes that others hold of it."""

    gpu: Gpu
    used: int = 0

    def available(self, context: int = CONTEXT) -> int:
        """Bytes that a process can have, beside its context of so many and what others hold."""
        return self.gpu.available(context, self.used)


def find_card(gpu: Any, memory: int | str | None = None, used: int | str = 0) -> Card:
    """The card that the arguments `gpu`, `memory` and `used` of `vaemem.predict` mean."""
    return Card(find_gpu(gpu, memory), parse_size("used", used, least=0))


@dataclass(frozen=True)
class Software:
    """What runs on the card, as `vaemem.predict` is told of it: whose code, which PyTorch and cuDNN, its allocator and
    its switches, and what the process has done when its counters are read. ValueError names what cannot be."""

    runtime: str = "diffusers"
    torch_version: str | None = None
    cudnn_version: str | None = None
    protocol: str = USUAL_PROTOCOL
    channels_last: bool = False
    allow_tf32: bool = True
    allocator: str = "native"

    def __post_init__(self) -> None:
        choose("protocol", self.protocol, PROTOCOLS)
        for name in ("channels_last", "allow_tf32"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if not isinstance(self.allocator, str):
            raise ValueError(f"allocator: want text such as 'cudaMallocAsync', got {self.allocator!r}")
        settings = _allocator_settings(self.allocator)
        if not settings.keys() - {"backend"}:  # a backend without other settings goes by its name
            object.__setattr__(self, "allocator", settings.get("backend", "native"))
        version = DEFAULT_TORCH if self.torch_version is None else self.torch_version
        if self.channels_last and torch_release(version) > LAST_COPYING_NORM:
            raise ValueError(
                f"channels_last: want it with PyTorch up to {'.'.join(map(str, LAST_COPYING_NORM))}, got {version},"
                " whose GroupNorm has a kernel for it that is not modelled"
            )

    @property
    def has_version(self) -> bool:
        """Whether it was said which PyTorch or which cuDNN."""
        return self.torch_version is not None or self.cudnn_version is not None

    @property
    def unusual(self) -> tuple[str, ...]:
        """The settings that are not as usual, in words."""
        given = {
            self.protocol: self.protocol != USUAL_PROTOCOL,
            "channels_last": self.channels_last,
            "allow_tf32=False": not self.allow_tf32,
            self.allocator: self.allocator != "native",
        }
        return tuple(name for name, is_unusual in given.items() if is_unusual)

    def start(self, card: Card, workspace: Any = None, **device: Any) -> SimulatedProcess:
        """A fresh process on a card. `device` has `total_memory` and `history` as `CachingAllocator` takes them."""
        allocator = CachingAllocator(**{"history": False, **_allocator_settings(self.allocator), **device})
        return SimulatedProcess(
            card.gpu, self.cudnn_version, self.torch_version, allocator=allocator, workspace=workspace,
            allow_tf32=self.allow_tf32, used=card.used,
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _allocator_settings(allocator: str) -> dict[str, Any]:
    """What `CachingAllocator` is told of the argument `allocator`."""
    try:
        settings = parse_conf(f"backend:{allocator}" if allocator in BACKENDS else allocator)
        if "garbage_collection_threshold" in settings:
            raise ValueError("a garbage_collection_threshold works with set_per_process_memory_fraction alone")
        CachingAllocator(**settings, history=False)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"allocator: want native, cudaMallocAsync or what PYTORCH_CUDA_ALLOC_CONF says, such as"
            f" 'expandable_segments:True', got {allocator!r} ({error})"
        ) from None
    return settings
