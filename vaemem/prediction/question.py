"""What is asked of a prediction: which model does what, at which size, run by whom, on which GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vaemem._common import DTYPES, TILED_OPS, choose, latent_factor, whole
from vaemem.prediction.benchmark import Reading, benchmark
from vaemem.prediction.process import SimulatedProcess, architecture, usual_runtime
from vaemem.prediction.snapshot import CachingAllocator

DEFAULT_TILE = 512  # pixels: the side of a tile where nobody says, diffusers' default for these models


@dataclass(frozen=True)
class Question:
    """The arguments of `vaemem.predict`, checked, with the defaults that follow from others filled in."""

    arch: Mapping[str, Any]
    op: str
    height: int
    width: int
    dtype: str
    batch: int
    runtime: str
    gpu: str
    cudnn_version: str | None
    torch_version: str | None
    weights_dtype: str
    tile: int | None
    slicing: bool
    workspace: Any

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


def ask(
    model: str | Mapping[str, Any], op: str, height: int, width: int, dtype: str = "float16", batch: int = 1,
    runtime: str | None = None, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, weights_dtype: str | None = None, tile: int | None = None, slicing: bool = False,
    workspace: Any = None,
) -> Question:  # fmt: skip
    """The question that the arguments of `vaemem.predict` put; ValueError names the one that cannot be answered."""
    choose("op", op, TILED_OPS)
    choose("dtype", dtype, DTYPES)
    tiled = op.endswith("_tiled")
    if tile is not None and not tiled:
        raise ValueError(f"tile: want it with a tiled op, got {tile!r} with {op}")
    arch = architecture(model)
    if runtime is None:
        runtime = "diffusers" if tiled or slicing else usual_runtime(arch)
    tile = (tile or DEFAULT_TILE) if tiled else None
    for name, value in (("height", height), ("width", width), ("batch", batch), ("tile", tile)):
        if value is not None:
            whole(name, value)
    factor = latent_factor(arch)
    for name, value in (("height", height), ("width", width)):
        if value % factor:
            raise ValueError(f"{name}: want a multiple of {factor}, got {value}")
    return Question(
        arch, op, height, width, dtype, batch, runtime, gpu, cudnn_version, torch_version, weights_dtype or dtype,
        tile, bool(slicing), workspace,
    )  # fmt: skip
