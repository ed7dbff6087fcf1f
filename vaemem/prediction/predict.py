"""What PyTorch's memory counters would say of a VAE's run on a GPU, without PyTorch and without the GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from vaemem import _core
from vaemem.prediction.process import (
    MIB,
    RUNTIME_OF,
    LoadedVAE,
    Moment,
    PeakTensor,
    SimulatedProcess,
    Tensor,
    _choose,
    architecture,
)
from vaemem.prediction.profiles import ELEMENT
from vaemem.prediction.snapshot import CachingAllocator

OPS = ("encode", "decode", "encode_tiled", "decode_tiled")
DEFAULT_TILE = 512


class Measured(NamedTuple):
    """What a benchmark reads off the counters for one run, in bytes: above the baseline, and as they stand."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class _Names:
    """The local names of a Python function: binding one anew drops what it held, afterwards."""

    def __init__(self, process: SimulatedProcess):
        self._process = process
        self._held: dict[str, Tensor] = {}

    def bind(self, name: str, value: Tensor) -> Tensor:
        old = self._held.get(name)
        self._held[name] = value
        self._process.drop(old)
        return value

    def delete(self, *names: str) -> None:
        for name in names:
            self._process.drop(self._held.pop(name, None))

    def close(self) -> None:
        self.delete(*self._held)


def benchmark(
    process: SimulatedProcess,
    vae: LoadedVAE,
    op: str,
    height: int,
    width: int,
    batch: int = 1,
    *,
    dtype: str | None = None,
    input_dtype: str | None = None,
    tile: int = 0,
    slicing: bool = False,
    warmups: int = 2,
    runs: int = 5,
) -> list[Measured]:
    """Plays the benchmark that the seed table was made with: warm-up runs, then measured ones, each after an emptied
    cache.

    Parameters
    ----------
    process, vae
        Where, and what.
    op : str
        ``"encode"`` (with sampling and scaling, as pipelines do) or ``"decode"``.
    height, width, batch : int
        Of the image.
    dtype, input_dtype : str, optional
        Of the run and of the input; the weights' by default. Where they differ, weights and input are converted within
        each run, and the weights back after it.
    tile : int
        Side of a tile in pixels where tiling is on, 0 where it is off.
    slicing : bool
        One image of the batch after the other.
    warmups, runs : int
        How many.

    Returns
    -------
    list of Measured
        One of each measured run. The first still holds what the warm-up runs left bound.
    """
    _choose("op", op, ("encode", "decode"))
    weights_dtype = vae.dtype
    dtype = dtype or weights_dtype
    input_dtype = input_dtype or weights_dtype
    upcast = dtype != input_dtype
    names = _Names(process)
    image = (batch, vae.arch["in_channels"], height, width)
    latent = (batch, vae.arch["latent_channels"], height // vae.factor, width // vae.factor)
    names.bind("input", process.tensor(image if op == "encode" else latent, input_dtype))

    def convert(x: str, to: str) -> str:
        """The name of the input in the run's dtype."""
        if not upcast:
            return x
        process.convert(vae, dtype)
        names.bind(to, process.elementwise(names._held[x], "input", dtype))
        return to

    def call(measured: bool) -> str:
        """Returns the name that the result is bound to."""
        x = convert("input", "input32")
        if op == "encode" and vae.runtime == "diffusers":
            names.bind("dist", process.encode(vae, names._held[x], tile=tile, slicing=slicing))
            result = names.bind("result", process.sample(names._held["dist"]))
            if measured:
                names.bind("result", process.elementwise(result, "latents"))
        elif op == "encode":
            names.bind("result", process.encode(vae, names._held[x]))
        elif vae.runtime == "diffusers":
            scaled = names.bind("scaled", process.elementwise(names._held[x], "latents [scaled]"))
            names.bind("result", process.decode(vae, scaled, tile=tile, slicing=slicing))
        else:
            names.bind("result", process.decode(vae, names._held[x]))
        return "result"

    for _ in range(warmups):
        names.delete("result")
        call(measured=False)
        process.convert(vae, weights_dtype)
        process.empty_cache()
    names.delete("result")
    measurements = []
    for _ in range(runs):
        process.empty_cache()
        process.reset_peak()
        allocated, reserved = process.allocated, process.reserved
        call(measured=True)
        peaks = process.peak_allocated, process.peak_reserved
        measurements.append(Measured(peaks[0] - allocated, peaks[1] - reserved, *peaks))
        process.convert(vae, weights_dtype)
        names.delete("result", "dist", "scaled")
    names.close()
    return measurements


class _Peaks:
    """What a prediction reads off the process that it played."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    workspace_source: str
    _process: SimulatedProcess

    def _read(self, process: SimulatedProcess, measured: Measured) -> None:
        self._process = process
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
        ``allocated`` as a closed form in the image's H and W at this size's peak.
    model, op, height, width, batch, dtype, runtime, gpu, torch_version, cudnn_version, weights_dtype, tile, slicing
        What was asked.
    """

    def __init__(self, question: dict[str, Any], measured: Measured, process: SimulatedProcess):
        self._question = question
        self.model: str = question["model"]["name"]
        self.op: str = question["op"]
        self.height: int = question["height"]
        self.width: int = question["width"]
        self.batch: int = question["batch"]
        self.dtype: str = question["dtype"]
        self.runtime: str = question["runtime"]
        self.weights_dtype: str = question["weights_dtype"]
        self.tile: int | None = question["tile"]
        self.slicing: bool = question["slicing"]
        self._read(process, measured)

    @property
    def formula(self) -> str:
        from vaemem.prediction.formula import closed_form

        return closed_form(self)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Writes the simulated history as a pickle that ``torch.cuda._memory_viz`` and pytorch.org/memory_viz read."""
        _play(self._question, CachingAllocator(history=True))[1].save_snapshot(path)

    def __repr__(self) -> str:
        return (
            f"<Prediction {self.model} {self.op} {self.height}x{self.width} {self.dtype} ({self.runtime}, {self.gpu}): "
            f"allocated {self.allocated / MIB:.2f} MiB, reserved {self.reserved / MIB:.2f} MiB>"
        )


def _play(question: Mapping[str, Any], allocator: CachingAllocator | None = None) -> tuple[Measured, SimulatedProcess]:
    process = SimulatedProcess(
        question["gpu"],
        question["cudnn_version"],
        question["torch_version"],
        allocator=allocator,
        workspace=question["workspace"],
    )
    vae = process.load(question["model"], question["weights_dtype"], question["runtime"])
    measured = benchmark(
        process, vae, question["op"].removesuffix("_tiled"), question["height"], question["width"], question["batch"],
        dtype=question["dtype"], input_dtype=question["weights_dtype"], tile=question["tile"] or 0,
        slicing=question["slicing"], runs=1,
    )  # fmt: skip
    return measured[-1], process


def predict(
    model: str | Mapping[str, Any],
    op: str,
    height: int,
    width: int,
    dtype: str = "float16",
    batch: int = 1,
    runtime: str | None = None,
    gpu: str = "RTX 4090",
    cudnn_version: str | None = None,
    torch_version: str | None = None,
    weights_dtype: str | None = None,
    tile: int | None = None,
    slicing: bool = False,
    *,
    workspace: Any = None,
) -> Prediction:
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
        ``"diffusers"`` (AutoencoderKL) or ``"bfl"`` (AutoEncoder of the flux repository); by default bfl for flux
        where the op is not tiled, else diffusers.
    gpu : str
        ``"RTX 4090"``, ``"A100 80GB"`` ...
    cudnn_version, torch_version : str, optional
        2.7.1 and the cuDNN that its wheels bring by default.
    weights_dtype : str, optional
        Of the weights between runs; where it is not `dtype`, weights and input are converted within the run.
    tile : int, optional
        Side of a tile in pixels for the tiled ops, 512 by default. Tiles overlap by a quarter, diffusers' default.
    slicing : bool
        One image of the batch after the other (diffusers' ``enable_slicing``).
    workspace : object, optional
        What answers for the convolutions' workspaces in place of `vaemem.prediction.workspace.Workspace`.

    Returns
    -------
    Prediction

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
    _choose("op", op, OPS)
    _choose("dtype", dtype, ELEMENT)
    tiled = op.endswith("_tiled")
    if tile is not None and not tiled:
        raise ValueError(f"tile: want it with a tiled op, got {tile!r} with {op}")
    arch = architecture(model)
    if runtime is None:
        runtime = "diffusers" if tiled or slicing else RUNTIME_OF.get(arch["name"], "diffusers")
    for name, value in (
        ("height", height),
        ("width", width),
        ("batch", batch),
        ("tile", tile if tiled and tile else 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: want an integer of 1 or more, got {value!r}")
    factor = 2 ** (len(arch["block_out_channels"]) - 1)
    for name, value in (("height", height), ("width", width)):
        if value % factor:
            raise ValueError(f"{name}: want a multiple of {factor}, got {value}")
    question = {
        "model": arch,
        "op": op,
        "height": height,
        "width": width,
        "dtype": dtype,
        "batch": batch,
        "runtime": runtime,
        "gpu": gpu,
        "cudnn_version": cudnn_version,
        "torch_version": torch_version,
        "weights_dtype": weights_dtype or dtype,
        "tile": (tile or DEFAULT_TILE) if tiled else None,
        "slicing": bool(slicing),
        "workspace": workspace,
    }
    measured, process = _play(question)
    return Prediction(question, measured, process)


class ModulePrediction(_Peaks):
    """What `vaemem.pytorch.predict_peak` returns. Sizes in bytes; attributes as in `Prediction`, and:

    Attributes
    ----------
    unmodelled : dict
        Operators whose temporaries are not counted, with how often they ran.
    """

    def __init__(
        self,
        trace: _core.Trace,
        weights: list[tuple[str, int]],
        inputs: list[tuple[str, int]],
        unmodelled: Mapping[str, int],
        settings: Mapping[str, Any],
    ):
        self._call = trace, [("weights", size) for _, size in weights] + inputs
        self._settings = dict(settings)
        self.unmodelled = dict(unmodelled)
        process = SimulatedProcess(**self._settings)
        self._read(process, self._play(process))

    def _play(self, process: SimulatedProcess, warmups: int = 2) -> Measured:
        trace, held = self._call
        for name, size in held:
            process.hold(name, size)
        for _ in range(warmups + 1):
            process.empty_cache()
            process.reset_peak()
            allocated, reserved = process.allocated, process.reserved
            left = process.call(trace)
            peaks = process.peak_allocated, process.peak_reserved
            process.release(left.values())
        return Measured(peaks[0] - allocated, peaks[1] - reserved, *peaks)

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
