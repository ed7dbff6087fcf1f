"""What PyTorch's memory counters would say of a VAE's run on a GPU, without PyTorch and without the GPU.

A prediction is a question (question.py), which a simulated process answers (process.py) by playing the benchmark
(benchmark.py): the counters' peaks of its last run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vaemem import _core
from vaemem._common import MIB
from vaemem.prediction.benchmark import Counters, Reading
from vaemem.prediction.formula import derive
from vaemem.prediction.process import Moment, PeakTensor, SimulatedProcess
from vaemem.prediction.question import Question
from vaemem.prediction.snapshot import CachingAllocator


class _Peaks:
    """What a prediction reads off the process that it played."""

    def _read(self, process: SimulatedProcess, measured: Reading) -> None:
        self._measured, self._process = measured, process
        self.allocated, self.reserved, self.peak_allocated, self.peak_reserved = measured
        self.gpu, self.torch_version = process.gpu.name, process.torch_version
        self.cudnn_version: str | None = getattr(process.workspace, "cudnn_version", None)
        self.workspace_source = process.workspace_source

    @property
    def peak_tensors(self) -> tuple[PeakTensor, ...]:
        return tuple(self._process.peak_tensors())

    @property
    def timeline(self) -> tuple[Moment, ...]:
        return tuple(self._process.timeline())


class Prediction(_Peaks):
    """What `predict` returns. Sizes in bytes.

    Attributes
    ----------
    allocated, reserved : int
        Above the baseline, as the seed table counts: ``max_memory_allocated() - memory_allocated()`` before the run,
        likewise reserved; weights and input are in the baseline.
    peak_allocated, peak_reserved : int
        As ``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()`` report them.
    peak_tensors : tuple of PeakTensor
        ``(name, bytes)`` of what was allocated at the peak, weights and input included, largest first.
    workspace_source : str
        Who said how much scratch the convolutions take: a profile, an installed cuDNN, or a rule.
    timeline : tuple of Moment
        ``(name, allocated, reserved)`` step by step through the model's call; bytes as the counters stand.
    formula : str
        ``allocated`` as a closed form in the image's H and W at this size's peak, or why there is none.
    model, op, height, width, batch, dtype, runtime, gpu, torch_version, cudnn_version, weights_dtype, tile, slicing
        What was asked.
    """

    def __init__(self, question: Question, measured: Reading, process: SimulatedProcess):
        self._question = q = question
        self.model: str = q.arch["name"]
        self.op, self.height, self.width, self.batch, self.dtype = q.op, q.height, q.width, q.batch, q.dtype
        self.runtime, self.weights_dtype, self.tile, self.slicing = q.runtime, q.weights_dtype, q.tile, q.slicing
        self._read(process, measured)

    @property
    def formula(self) -> str:
        try:
            if self.tile:
                raise ValueError("a tiled peak depends on how H and W fall into tiles")
            return str(derive(self._question, self._measured, self._process))
        except ValueError as error:
            return f"none: {self.allocated} bytes at this size; {error}"

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        self._question.play(CachingAllocator(history=True))[1].save_snapshot(path)

    def __repr__(self) -> str:
        return (
            f"<Prediction {self.model} {self.op} {self.height}x{self.width} {self.dtype} ({self.runtime}, {self.gpu}): "
            f"allocated {self.allocated / MIB:.2f} MiB, reserved {self.reserved / MIB:.2f} MiB>"
        )


def predict(
    model: str | Mapping[str, Any], op: str, height: int, width: int, dtype: str = "float16", batch: int = 1,
    runtime: str | None = None, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, weights_dtype: str | None = None, tile: int | None = None, slicing: bool = False,
    *, workspace: Any = None,
) -> Prediction:  # fmt: skip
    """The memory that PyTorch takes for a VAE's run: a fresh process, the model loaded, two warm-up runs, one measured.

    Parameters
    ----------
    model : str or dict
        ``"sd15"``, ``"sdxl"``, ``"flux"``, or the config of another AutoencoderKL (a dict, or a path).
    op : str
        ``"encode"``, ``"decode"``, ``"encode_tiled"`` or ``"decode_tiled"``.
    height, width : int
        Of the image in pixels, multiples of 8.
    dtype : str
        Of the run: ``"float16"``, ``"bfloat16"`` or ``"float32"`` (TF32 allowed, PyTorch's default).
    batch : int
        Images.
    runtime : str, optional
        Whose code runs the VAE: ``"diffusers"`` (AutoencoderKL), ``"bfl"`` (AutoEncoder of the flux repository),
        ``"ldm"`` (CompVis' AutoencoderKL), ``"comfyui"`` (its class VAE) or ``"a1111"`` (CompVis' as A1111 changes it);
        by default bfl for flux where the op is not tiled, else diffusers. docs/PREDICTION.md says how each was checked.
    gpu : str
        ``"RTX 4090"``, ``"A100 80GB"`` ...
    cudnn_version, torch_version : str, optional
        2.7.1 and the cuDNN that its wheels bring by default.
    weights_dtype : str, optional
        Of the weights between runs; where it is not `dtype`, weights and input are converted within the run.
    tile : int, optional
        Side of a tile in pixels for the tiled ops of diffusers, comfyui and a1111: 512 by default, or a1111's for the
        card. Tiles overlap by a quarter, diffusers' default; ComfyUI's by 64 pixels, at most a quarter, in three
        passes; those of A1111's Tiled VAE are padded on every side, by 11 latents or 32 pixels.
    slicing : bool
        One image of the batch after the other (diffusers' ``enable_slicing``).
    workspace : object, optional
        What answers for the convolutions' workspaces in place of `vaemem.prediction.workspace.Workspace`.

    Raises
    ------
    ValueError
        A model, op, dtype, GPU or version that is unknown; a size that the model cannot take; a convolution that the
        GPU has no engine for.

    Notes
    -----
    docs/PREDICTION.md tells how it works, what it does not know, and its errors.

    Examples
    --------
    >>> predict("sdxl", "decode", 1024, 1024, dtype="float16", gpu="RTX 4090").allocated / 2**20
    2434.224609375
    """
    question = Question(
        model, op, height, width, dtype, batch, runtime, gpu, cudnn_version, torch_version, weights_dtype, tile,
        slicing, workspace,
    )  # fmt: skip
    measured, process = question.play()
    return Prediction(question, measured, process)


class ModulePrediction(_Peaks):
    """What `vaemem.pytorch.predict_peak` returns. Sizes in bytes; attributes as in `Prediction`, and:

    Attributes
    ----------
    unmodelled : dict
        Operators whose temporaries are not counted, with how often they ran.
    """

    def __init__(
        self, trace: _core.Trace, weights: list[tuple[str, int]], inputs: list[tuple[str, int]],
        unmodelled: Mapping[str, int], settings: Mapping[str, Any],
    ):  # fmt: skip
        self._call = trace, [("weights", size) for _, size in weights] + inputs
        self._settings = dict(settings)
        self.unmodelled = dict(unmodelled)
        process = SimulatedProcess(**self._settings)
        self._read(process, self._play(process))

    def _play(self, process: SimulatedProcess, warmups: int = 2) -> Reading:
        trace, held = self._call
        for name, size in held:
            process.hold(name, size)
        for _ in range(warmups + 1):
            counters = Counters(process)
            left = process.call(trace)
            measured = counters.read()
            process.release(left.values())
        return measured

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        process = SimulatedProcess(**self._settings, allocator=CachingAllocator(history=True))
        self._play(process)
        process.save_snapshot(path)

    def __repr__(self) -> str:
        baseline = self.peak_allocated - self.allocated
        return (
            f"<ModulePrediction on {self.gpu}: allocated {self.allocated / MIB:.2f} MiB, "
            f"reserved {self.reserved / MIB:.2f} MiB above {baseline / MIB:.2f} MiB of weights and inputs>"
        )
