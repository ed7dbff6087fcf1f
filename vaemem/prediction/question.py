"""What is asked of a prediction: which model does what, at which size, run by whom, on which GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vaemem._common import DTYPES, MIB, TILED_OPS, choose, latent_factor, whole
from vaemem.prediction.benchmark import Reading, benchmark
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.process import RUNTIMES, SimulatedProcess, architecture, usual_runtime
from vaemem.prediction.snapshot import CachingAllocator

DEFAULT_TILE = 512  # pixels: the side of a tile where nobody says, diffusers' and ComfyUI's default for these models
# What A1111's Tiled VAE recommends, and so has set, for a card of more MiB than so many.
TILED_VAE = {
    "encode_tiled": ((16000, 3072), (12000, 2048), (8000, 1536), (0, 960)),
    "decode_tiled": ((30000, 2048), (16000, 1536), (12000, 1024), (8000, 768), (0, 512)),
}


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
    gpu: str = "RTX 4090"
    cudnn_version: str | None = None
    torch_version: str | None = None
    weights_dtype: Any = None
    tile: int | None = None
    slicing: bool = False
    workspace: Any = None

    def __post_init__(self) -> None:
        choose("op", self.op, TILED_OPS)
        choose("dtype", self.dtype, DTYPES)
        tiled = self.op.endswith("_tiled")
        if self.tile is not None and not tiled:
            raise ValueError(f"tile: want it with a tiled op, got {self.tile!r} with {self.op}")
        self.arch = architecture(self.arch)
        if self.runtime is None:
            self.runtime = "diffusers" if tiled or self.slicing else usual_runtime(self.arch)
        if tiled and self.tile is None:
            memory = find_gpu(self.gpu).total_memory // MIB
            recommended = TILED_VAE[self.op] if self.runtime == "a1111" else ((0, DEFAULT_TILE),)
            self.tile = next(side for least, side in recommended if memory > least)
        choose("runtime", self.runtime, RUNTIMES)
        self.weights_dtype, self.slicing = self.weights_dtype or self.dtype, bool(self.slicing)
        if RUNTIMES[self.runtime].host and self.weights_dtype != self.dtype:
            raise ValueError(
                f"weights_dtype: want the run's dtype {self.dtype} with {self.runtime}, which keeps its weights in it, "
                f"got {self.weights_dtype!r}"
            )
        for name in ("height", "width", "batch", "tile") if tiled else ("height", "width", "batch"):
            whole(name, getattr(self, name))
        factor = latent_factor(self.arch)
        for name, value in (("height", self.height), ("width", self.width)):
            if value % factor:
                raise ValueError(f"{name}: want a multiple of {factor}, got {value}")

    def play(self, allocator: CachingAllocator | None = None) -> tuple[Reading, SimulatedProcess]:
        """A fresh process loads the model and runs the benchmark once, after its warm-up runs."""
        process = SimulatedProcess(
            self.gpu, self.cudnn_version, self.torch_version, allocator=allocator, workspace=self.workspace
        )
        vae = process.load(self.arch, self.weights_dtype, self.runtime)
        (measured,) = benchmark(
            process, vae, self.op.removesuffix("_tiled"), self.height, self.width, self.batch, dtype=self.dtype,
            input_dtype=self.weights_dtype, tile=self.tile or 0, slicing=self.slicing, runs=1,
        )  # fmt: skip
        return measured, process
