"""What is asked of a prediction: which model does what, at which size, run by whom, on which GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vaemem import _core
from vaemem._common import DTYPES, MIB, TILED_OPS, choose, flag, latent_factor, whole
from vaemem.engine.layouts import sample_size_of
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL, Reading, benchmark
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.process import SimulatedProcess
from vaemem.prediction.runtimes import DEFAULT_TORCH, RUNTIMES, architecture, usual_runtime
from vaemem.prediction.snapshot import BACKENDS, CachingAllocator, parse_conf
from vaemem.prediction.workspace import torch_release

LARGEST = 1 << 20  # pixels a side
MOST = {"height": LARGEST, "width": LARGEST, "tile": LARGEST, "batch": 1 << 16}  # as the core has them
COMFYUI_TILE = 512  # pixels: of ComfyUI's tiled nodes
# What A1111's Tiled VAE recommends, and so has set, for a card of more MiB than so many.
TILED_VAE = {
    "encode_tiled": ((16000, 3072), (12000, 2048), (8000, 1536), (0, 960)),
    "decode_tiled": ((30000, 2048), (16000, 1536), (12000, 1024), (8000, 768), (0, 512)),
}

# PyTorch whose GroupNorm on CUDA wants NCHW. The kernel for NHWC (pytorch#191945) is in 2.15's wheel, not in 2.14's.
LAST_COPYING_NORM = (2, 14)


@dataclass
class Question:
    """The arguments of `vaemem.predict`, checked, with the defaults that follow from others filled in: ValueError names
    the one that cannot be answered."""

    arch: Any  # given as a model's name or config
    op: str
    height: int
    width: int
    dtype: str = "float16"
    batch: int = 1
    runtime: Any = None
    gpu: Any = "RTX 4090"  # given as a name
    cudnn_version: str | None = None
    torch_version: str | None = None
    weights_dtype: Any = None
    tile: int | None = None
    slicing: bool = False
    workspace: Any = None
    memory: int | str | None = None
    used: int | str = 0
    protocol: str = USUAL_PROTOCOL
    channels_last: bool = False
    allow_tf32: bool = True
    cudnn_benchmark: bool = False
    allocator: str = "native"

    def __post_init__(self) -> None:
        choose("op", self.op, TILED_OPS)
        choose("dtype", self.dtype, DTYPES)
        choose("protocol", self.protocol, PROTOCOLS)
        tiled = self.op.endswith("_tiled")
        if self.tile is not None and not tiled:
            raise ValueError(f"tile: want it with a tiled op, got {self.tile!r} with {self.op}")
        self._check_switches()
        model, self.arch = self.arch, architecture(self.arch)
        if self.runtime is None:
            self.runtime = "diffusers" if tiled or self.slicing else usual_runtime(self.arch)
        if tiled and self.tile is None:
            self.tile = self._usual_tile(model)
        choose("runtime", self.runtime, RUNTIMES)
        self.weights_dtype = self.dtype if self.weights_dtype is None else self.weights_dtype
        choose("weights_dtype", self.weights_dtype, DTYPES)
        if RUNTIMES[self.runtime].host and self.weights_dtype != self.dtype:
            raise ValueError(
                f"weights_dtype: want the run's dtype {self.dtype} with {self.runtime}, which keeps its weights in it, "
                f"got {self.weights_dtype!r}"
            )
        for name, most in MOST.items():
            if name != "tile" or tiled:
                setattr(self, name, whole(name, getattr(self, name), most=most))
        self.gpu, self.memory = find_gpu(self.gpu, self.memory), None
        factor = latent_factor(self.arch)
        for name, value in (("height", self.height), ("width", self.width)):
            if value % factor:
                raise ValueError(f"{name}: want a multiple of {factor}, got {value}")

    def _check_switches(self) -> None:
        for name in ("slicing", "channels_last", "allow_tf32", "cudnn_benchmark"):
            setattr(self, name, flag(name, getattr(self, name)))
        if self.cudnn_benchmark:
            raise ValueError(
                "cudnn_benchmark: want False, got True: PyTorch then times all of cuDNN's plans and keeps to the"
                " fastest, which only the card can tell; vaemem.pytorch.measure reads there what it takes"
            )
        if self.workspace is not None and not self.allow_tf32 and getattr(self.workspace, "tf32", True):
            raise ValueError("allow_tf32: want True with a workspace of your own, which answers by itself, got False")
        self._read_allocator()
        version = DEFAULT_TORCH if self.torch_version is None else self.torch_version
        if self.channels_last and torch_release(version) > LAST_COPYING_NORM:
            raise ValueError(
                f"channels_last: want it with PyTorch up to {'.'.join(map(str, LAST_COPYING_NORM))}, got {version},"
                " whose GroupNorm has a kernel for it that is not modelled"
            )

    @property
    def settings(self) -> tuple[str, ...]:
        """What is not as usual, in words."""
        unusual = {
            f"in tiles of {self.tile}": self.tile and max(self.height, self.width) > self.tile,
            f"whole, in one tile of {self.tile}": self.tile and max(self.height, self.width) <= self.tile,
            self.protocol: self.protocol != USUAL_PROTOCOL,
            "channels_last": self.channels_last,
            "allow_tf32=False": not self.allow_tf32,
            self.allocator: self.allocator != "native",
        }
        return tuple(name for name, given in unusual.items() if given)

    def _usual_tile(self, model: Any) -> int:
        """The side of a tile where none is given."""
        if self.runtime == "comfyui":
            return COMFYUI_TILE
        if self.runtime == "a1111":
            memory = find_gpu(self.gpu, self.memory).total_memory // MIB
            return next(side for least, side in TILED_VAE[self.op] if memory > least)
        return usual_tile(model)

    def _read_allocator(self) -> None:
        """Its settings; a backend without others goes by its name."""
        if not isinstance(self.allocator, str):
            raise ValueError(f"allocator: want text such as 'cudaMallocAsync', got {self.allocator!r}")
        conf = f"backend:{self.allocator}" if self.allocator in BACKENDS else self.allocator
        try:
            self._allocator = parse_conf(conf)
            if "garbage_collection_threshold" in self._allocator:
                raise ValueError("a garbage_collection_threshold works with set_per_process_memory_fraction alone")
            self.new_allocator()
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"allocator: want native, cudaMallocAsync or what PYTORCH_CUDA_ALLOC_CONF says, such as"
                f" 'expandable_segments:True', got {self.allocator!r} ({error})"
            ) from None
        if not self._allocator.keys() - {"backend"}:
            self.allocator = self._allocator.get("backend", "native")

    def new_allocator(self, total_memory: int | None = None, history: bool = False) -> CachingAllocator:
        """A fresh allocator as the question has it."""
        return CachingAllocator(**self._allocator, total_memory=total_memory, history=history)

    def start(self, workspace: Any = None, **device: Any) -> SimulatedProcess:
        """A fresh process on a `new_allocator`; with another workspace than the question's, where one is given."""
        return SimulatedProcess(
            self.gpu, self.cudnn_version, self.torch_version, allocator=self.new_allocator(**device),
            workspace=self.workspace if workspace is None else workspace, allow_tf32=self.allow_tf32, used=self.used,
        )  # fmt: skip

    def play(self, process: SimulatedProcess, protocol: str | None = None) -> Reading:
        """A fresh process loads the model and runs what the question's protocol, or another one, says."""
        vae = process.load(self.arch, self.weights_dtype, self.runtime, channels_last=self.channels_last)
        *_, measured = benchmark(
            process, vae, self.op.removesuffix("_tiled"), self.height, self.width, self.batch, dtype=self.dtype,
            input_dtype=self.weights_dtype, tile=self.tile or 0, slicing=self.slicing,
            protocol=PROTOCOLS[protocol or self.protocol],
        )  # fmt: skip
        return measured


def usual_tile(model: Any) -> int:
    """The side in pixels of the tiles that diffusers' ``enable_tiling`` cuts: the config's sample_size."""
    named = isinstance(model, str) and model in _core.models()
    size = sample_size_of(None, model) if named else sample_size_of(model, "")
    if size is None:
        raise ValueError("tile: want one, such as tile=512: the config's sample_size tells none")
    return size
