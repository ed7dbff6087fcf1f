"""Measure a VAE's run in PyTorch: the memory counters of CUDA, or the growth of the process on a CPU.

The order of calls, and the Python names that hold tensors, are those of the benchmark behind the seed table: the names
decide which tensors are still allocated when a run begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import inspect
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from vaemem._common import DTYPES, TILED_OPS, as_csv, choose, chosen, latent_factor, need, setting, whole
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._saving import write
from vaemem._types import Dtype, Program, TiledOp
from vaemem.engine.configs import config_of, read_config
from vaemem.prediction.benchmark import BENCHMARK_TILE
from vaemem.prediction.predict_vae import predict
from vaemem.prediction.profiles import Conv
from vaemem.prediction.runtimes import architecture
from vaemem.prediction.vae_job import OVERLAP, TINY_OVERLAP
from vaemem.pytorch.converting import convert
from vaemem.pytorch.recording import record
from vaemem.tables.sweep import image_sizes
from vaemem.tables.table import Row, Table

OUT_OF_MEMORY = torch.OutOfMemoryError
LARGE_ERROR = 0.02  # a share of the predicted value, beyond which a measurement contradicts it
PROFILE_COLUMNS = ("gpu", "torch", "cudnn", *Conv._fields, "workspace_bytes")


class Measurement(NamedTuple):
    """The figures of one run: bytes above the level before it (None: not measured), and seconds."""

    allocated: int | None
    reserved: int
    seconds: float


class CudaMeter:
    """The counters of PyTorch's caching allocator; `cuda` is ``torch.cuda``."""

    def __init__(self, cuda: Any, device: Any):
        self._cuda, self._device = cuda, device

    def clear(self) -> None:
        """Empty the cache and reset the peaks."""
        gc.collect()
        self._cuda.empty_cache()
        self.reset()

    def reset(self) -> None:
        """Reset the peaks."""
        self._cuda.reset_peak_memory_stats(self._device)

    def wait(self) -> None:
        """Wait until the device has done its work."""
        self._cuda.synchronize(self._device)

    def before(self) -> tuple[int, int]:
        """Return (allocated, reserved) in bytes."""
        self.wait()
        return self._cuda.memory_allocated(self._device), self._cuda.memory_reserved(self._device)

    def after(self) -> tuple[int | None, int]:
        """Return the peaks of both since the reset."""
        self.wait()
        return self._cuda.max_memory_allocated(self._device), self._cuda.max_memory_reserved(self._device)


class CpuMeter:
    """The resident size of this process, with CudaMeter's methods. malloc's bytes in use are unknown.

    OSError unless the system is Linux and lets a process reset its peak resident size.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("measure: expected Linux, whose /proc tells the peak resident size of a CPU run")
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; other libraries keep little
        self.reset()

    def clear(self) -> None:
        gc.collect()
        if self._trim:
            self._trim(0)  # otherwise a run reuses pages of the run before

    def wait(self) -> None:
        pass

    def reset(self) -> None:
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets VmHWM
        except OSError as error:
            raise OSError(
                f"measure: expected a system that lets a process reset its peak resident size: {error}"
            ) from None

    def before(self) -> tuple[int, int]:
        self.reset()
        return 0, _status("VmRSS:")

    def after(self) -> tuple[int | None, int]:
        return None, _status("VmHWM:")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) * 1024


def _call(vae: Any, op: str, x: Any, scaling: float | None, names: dict[str, Any], measured: bool) -> Any:
    """Run once; the caller binds the result.

    diffusers' encode is sampled, except for AutoencoderTiny's latents, and scaled if measured; its decode gets unscaled
    latents. BFL's modules scale latents themselves, so their `scaling` is None. `names` keeps what the script binds
    until the next run binds its own: these tensors are part of the measurement.
    """
    if scaling is None:
        return getattr(vae, op)(x)
    if op == "encode":
        encoded = vae.encode(x)
        names["dist"] = encoded.latent_dist if hasattr(encoded, "latent_dist") else encoded.latents
        latents = names["dist"].sample() if hasattr(encoded, "latent_dist") else names["dist"]
        return scaling * latents if measured else latents
    names["scaled"] = x / scaling
    return vae.decode(names["scaled"], return_dict=False)[0]


def _measurements(
    vae: Any, op: str, x: Any, meter: CudaMeter | CpuMeter, warmups: int, runs: int, scaling: float | None
) -> list[Measurement]:
    names: dict[str, Any] = {}
    for _ in range(warmups):
        names.pop("result", None)
        names["result"] = _call(vae, op, x, scaling, names, measured=False)
        meter.clear()
    names.pop("result", None)
    measurements = []
    for _ in range(runs):
        meter.clear()
        before = meter.before()
        start = time.perf_counter()
        names["result"] = _call(vae, op, x, scaling, names, measured=True)
        meter.wait()
        seconds = time.perf_counter() - start
        allocated, reserved = meter.after()
        above = None if allocated is None else allocated - before[0]
        measurements.append(Measurement(above, max(0, reserved - before[1]), seconds))
        names.clear()
    return measurements


class _Subject(NamedTuple):
    """A module to measure, and the form of its inputs."""

    vae: Any
    model: str
    channels: dict[str, int]  # of its inputs, by op
    factor: int
    scaling: float | None  # None for BFL's, which scales within
    overlap: float = OVERLAP


def measure(
    model: Any, op: TiledOp, sizes: int | Sequence[int | tuple[int, int]],
    dtypes: Dtype | Sequence[Dtype] = ("float16",), *,
    runtime: Program = "diffusers", device: Any = None, warmups: int = 2, runs: int = 5, tile: int | None = None,
    batch: int = 1, snapshot: str | os.PathLike[str] | None = None, profile: str | os.PathLike[str] | None = None,
) -> Table:  # fmt: skip
    """Measure a VAE's memory and time in PyTorch, as the seed table was measured.

    Parameters
    ----------
    model : str or torch.nn.Module
        A name or a config.json of an image autoencoder, as in `vaemem.predict`: diffusers' module with random weights,
        which affect neither memory nor time. Or a module of `runtime`; it is put in eval mode, converted and moved to
        `device`, and stays so. Video autoencoders, Qwen-Image's and Wan's, are refused.
    op : str
        ``"encode"`` (sampled and scaled, as in pipelines), ``"decode"``, ``"encode_tiled"`` or ``"decode_tiled"``.
    sizes : int or sequence of int and (int, int)
        Sizes of the image in pixels, multiples of 8: an int is a square, a pair is (height, width).
    dtypes : str or sequence of str
        Types of weights and run: ``"float16"``, ``"bfloat16"``, ``"float32"``.
    runtime : str
        The program of the module: ``"diffusers"``, or ``"bfl"`` (AutoEncoder of the flux repository; only as a module).
    device : torch.device or str, optional
        By default the GPU if PyTorch has one, otherwise the CPU.
    warmups, runs : int
        Number of runs that are not measured, and of runs to average.
    tile : int, optional
        Side of a tile in pixels for the tiled ops, 512 by default; tiles overlap by a quarter, an AutoencoderTiny's by
        an eighth.
    batch : int
        Images in one run.
    snapshot : path, optional
        File for the allocator's history from before the model is loaded, for `vaemem.replay` and
        pytorch.org/memory_viz. Recording slows the runs down. CUDA only.
    profile : path, optional
        CSV file for the workspace that cuDNN uses for each convolution of these runs, in bytes as requested from the
        allocator. CUDA only.

    Returns
    -------
    Table
        One row per dtype and size, source "measured". On CUDA `allocated_bytes` and `reserved_bytes` are the peaks
        minus the level just before the run. On the CPU `reserved_bytes` is the growth of the resident size, and
        `allocated_bytes` is unknown.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be used, by name, before anything is measured.
    ImportError
        There is no PyTorch, or no diffusers for a model's name.
    OSError
        The peak resident size of a CPU run cannot be reset.
    torch.OutOfMemoryError
        A run does not fit.

    Notes
    -----
    Before each run garbage is collected, the cache emptied and the peaks reset. `reserved_bytes` depends on earlier
    work of the process; `vaemem.predict` by default predicts one size and dtype in a fresh process.

    Examples
    --------
    >>> from diffusers import AutoencoderKL
    >>> (row,) = measure(AutoencoderKL(), "decode", 64, "float32", device="cpu", warmups=0, runs=1)
    >>> row["source"], row["runtime"], row["reserved_bytes"] > 0
    ('measured', 'diffusers', True)
    """
    choose("op", op, TILED_OPS)
    choose("runtime", runtime, ("diffusers", "bfl"))
    pairs, wanted = image_sizes(sizes), chosen("dtypes", dtypes, DTYPES)
    tiled, op_run = op.endswith("_tiled"), op.removesuffix("_tiled")
    if tile is not None and not tiled:
        raise ArgumentError("tile", f"None with {op}", repr(tile))
    if tiled and runtime == "bfl":
        raise ArgumentError("op", "encode or decode with runtime bfl, which has no tiles", repr(op))
    tile = whole("tile", BENCHMARK_TILE if tile is None else tile)
    warmups, runs, batch = whole("warmups", warmups, 0), whole("runs", runs), whole("batch", batch)
    place = find_device(device)
    for name, path in (("snapshot", snapshot), ("profile", profile)):
        if path is not None and place.type != "cuda":
            raise ArgumentError(name, "a CUDA device to record", str(place))
    make = _find_maker(model, runtime)
    rows: list[Row] = []
    workspaces: dict[Conv, int] = {}
    with contextlib.ExitStack() as stack:
        if place.type == "cuda":
            stack.enter_context(torch.cuda.device(place))  # empty_cache and others act on the current device
            if snapshot is not None:
                stack.enter_context(_record_history(snapshot))
        meter = CudaMeter(torch.cuda, place) if place.type == "cuda" else CpuMeter()
        for dtype in wanted:
            subject = make()
            _check_sizes(subject, pairs, tile if tiled else None)
            vae = convert(subject.vae.eval(), getattr(torch, dtype)).to(place)
            known = {
                "model": subject.model, "op": op, "batch": batch, "dtype": dtype, "runtime": runtime,
                "source": "measured",
                "tile": tile if tiled else None, "tile_overlap": subject.overlap if tiled else None,
                "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
                "weights_bytes": sum(p.numel() * p.element_size() for p in vae.parameters()),
                "versions": what_ran(place, runtime),
            }  # fmt: skip
            with setting(vae, **_tiling(runtime, tile if tiled else 0, subject)):
                for height, width in pairs:
                    by = subject.factor if op_run == "decode" else 1
                    shape = batch, subject.channels[op_run], height // by, width // by
                    x = (torch.randn(shape) * 0.5).to(device=place, dtype=getattr(torch, dtype))
                    with torch.inference_mode():
                        done = _measurements(vae, op_run, x, meter, warmups, runs, subject.scaling)
                        if profile is not None:
                            new = [conv for conv in _convolutions(vae, op_run, x) if conv not in workspaces]
                            workspaces |= {conv: _measure_workspace(conv, place) for conv in new}
                    rows.append(known | {"height": height, "width": width} | _average(done))
                    del x
            del subject, vae
            meter.clear()
    if profile is not None:
        _write_profile(profile, place, workspaces)
    return Table(rows)


def against_prediction(row: Row) -> str:
    """Compare a row that `measure` made on a GPU with `vaemem.predict`, in words; "" on a CPU. If they differ by more
    than 2%, say in which part of the memory, and which module the prediction has at its peak."""
    if row["device"] == "cpu":
        return ""
    torch_version, cudnn = (part.split()[1] for part in row["versions"].split(", ")[:2])
    try:
        made = predict(
            row["model"], row["op"], row["height"], row["width"], row["dtype"], row["batch"], gpu=row["device"],
            torch_version=torch_version, cudnn_version=cudnn, tile=row["tile"],
        )  # fmt: skip
    except ValueError as unknown:
        return f"not predicted: {unknown}"
    found = {name: row[f"{name}_bytes"] / getattr(made, name) - 1 for name in ("allocated", "reserved")}
    shares = ", ".join(f"{name} {100 * share:+.1f}%" for name, share in found.items())
    said = f"{row['op']} {row['height']}x{row['width']} {row['dtype']}: measured next to predicted, {shares}"
    if max(map(abs, found.values())) <= LARGE_ERROR:
        return said
    tensors = abs(found["allocated"]) > LARGE_ERROR
    what = "tensors differ" if tensors else "tensors agree; cuDNN's workspaces or the allocator's segments differ"
    largest = made.peak_tensors[0]
    at = f"the prediction's largest at its peak: {largest.name}, {largest.bytes >> 20} MiB"
    segments = f"{row['reserved_bytes'] - row['allocated_bytes'] >> 20} MiB beyond tensors, predicted "
    return f"{said}; {what} ({at}; {segments}{made.reserved - made.allocated >> 20} MiB)"


def _average(done: Sequence[Measurement]) -> dict[str, Any]:
    allocated = [m.allocated for m in done if m.allocated is not None]
    return {
        "allocated_bytes": round(statistics.fmean(allocated)) if allocated else None,
        "reserved_bytes": round(statistics.fmean(m.reserved for m in done)),
        "seconds": statistics.fmean(m.seconds for m in done),
    }


# ---- the request ----


def find_device(device: Any) -> Any:
    """Return the torch.device to measure on, with its number; by default the GPU, or the CPU if there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    if place.type not in ("cuda", "cpu"):
        raise ArgumentError("device", "a CUDA device or the CPU", repr(device))
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            "device", "a device that is there", repr(device), f"PyTorch {torch.__version__} finds no GPU"
        )
    if place.type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if place.index is None else place


def _find_maker(model: Any, runtime: str) -> Callable[[], _Subject]:
    """Return a function that makes the module, on the CPU for a model's name. The returned function is called once per
    dtype."""
    if isinstance(model, torch.nn.Module):
        subject = _describe(model, runtime)
        return lambda: subject
    if not isinstance(model, str | os.PathLike):
        raise ArgumentTypeError("model", "a name, a config.json or a torch.nn.Module", type(model).__name__)
    if runtime != "diffusers":
        raise ArgumentError("model", f"a module with runtime {runtime}, of which no package is known", repr(model))
    arch = architecture(os.fspath(model))
    if arch.get("family") == "wan":
        raise ArgumentError("model", "an autoencoder of images", f"{model!r}, which diffusers runs as one of videos")
    build = vae_builder(arch, f"measure of {model!r} and not of a module")
    return lambda: _describe(build(), runtime)._replace(model=arch["name"])


def vae_builder(arch: dict[str, Any], what: str) -> Callable[[], Any]:
    """Return a function that makes diffusers' module of an architecture, with random weights. An unknown scaling factor
    becomes 1.0, which affects neither memory nor time. ImportError if diffusers lacks the class; `what` needs it."""
    config, diffusers = config_of(arch), need("diffusers", what)
    name = config.pop("_class_name")
    build = getattr(diffusers, name, None)
    if build is None:
        raise ImportError(f"{what} needs a diffusers that has {name}, got {diffusers.__version__}")
    known = inspect.signature(build).parameters
    if "force_upcast" not in known:  # as for FLUX.2
        config.pop("force_upcast", None)
    if others := [key for key in config if key not in known]:
        wanted = f"{what} needs a diffusers whose {name} has {', '.join(others)}"
        raise ImportError(f"{wanted}, got {diffusers.__version__}")
    if "scaling_factor" in config:
        config["scaling_factor"] = config["scaling_factor"] or 1.0
    return functools.partial(build, **config)


def _describe(vae: Any, runtime: str) -> _Subject:
    try:
        if runtime == "bfl":
            channels = {"encode": vae.encoder.conv_in.in_channels, "decode": vae.decoder.conv_in.in_channels}
            return _Subject(vae, "custom", channels, 2 ** (vae.encoder.num_resolutions - 1), None)
        config = {"_class_name": type(vae).__name__, **vae.config}
        channels = {"encode": config["in_channels"], "decode": config["latent_channels"]}
        factor, scaling = latent_factor(config), config.get("scaling_factor")
    except (AttributeError, KeyError) as error:
        wanted = "AutoencoderKL" if runtime == "diffusers" else "AutoEncoder"
        raise ArgumentTypeError("model", f"{runtime}'s {wanted}", type(vae).__name__, str(error)) from None
    name = "custom"  # vaemem may not run this architecture
    with contextlib.suppress(ValueError):
        name = read_config(config)["name"]
    overlap = TINY_OVERLAP if config["_class_name"] == "AutoencoderTiny" else OVERLAP
    return _Subject(vae, name, channels, factor, scaling or 1.0, overlap)


def _check_sizes(subject: _Subject, pairs: Sequence[tuple[int, int]], tile: int | None) -> None:
    for height, width in pairs:
        if height % subject.factor or width % subject.factor:
            raise ArgumentError("sizes", f"multiples of {subject.factor}", f"{height}x{width}")
    if tile is not None and tile % subject.factor:
        raise ArgumentError("tile", f"a multiple of {subject.factor}", str(tile))


def _tiling(runtime: str, tile: int, subject: _Subject) -> dict[str, Any]:
    """Return the module's attributes for tiles with a side in pixels; for 0, without tiles."""
    if runtime != "diffusers" or not tile:
        return {"use_tiling": False} if runtime == "diffusers" else {}
    sizes = {"tile_sample_min_size": tile, "tile_latent_min_size": tile // subject.factor}
    return {"use_tiling": True, "tile_overlap_factor": subject.overlap} | sizes


def what_ran(device: Any, runtime: str) -> str:
    """Describe the software for a table's `versions`, with settings that change the memory if they are not defaults."""
    parts = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        parts += [f"cudnn {cudnn_version()}", f"cuda {torch.version.cuda}", f"driver {driver_version()}"]
        settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        if settings:
            parts.append(f"allocator {settings.replace(',', ';')}")
        if torch.backends.cudnn.benchmark:
            parts.append("cudnn.benchmark on")
        if not torch.backends.cudnn.allow_tf32:
            parts.append("cudnn.allow_tf32 off")
    else:
        parts.append(f"threads {torch.get_num_threads()}")
    if runtime in sys.modules:  # bfl's code has no version
        parts.append(f"{runtime} {sys.modules[runtime].__version__}")
    return ", ".join([*parts, f"python {platform.python_version()}"])


def cudnn_version() -> str:
    """Return the version of PyTorch's cuDNN, such as ``"9.7.1"``; ``"none"`` without one."""
    number = torch.backends.cudnn.version()
    if number is None:
        return "none"
    thousand = 10000 if number >= 90000 else 1000  # cuDNN 9 has wider numbers
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module, such as ``"535.104.05"``; ``"unknown"`` if it is not readable."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read())
        if found:
            return found[0]
    return "unknown"


# ---- snapshots and profiles ----


@contextlib.contextmanager
def _record_history(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the allocator's events, and write them to a file if the block succeeds."""
    memory = torch.cuda.memory
    memory._record_memory_history("all", stacks="python", max_entries=sys.maxsize)
    try:
        yield
        memory._dump_snapshot(os.fspath(path))
    finally:
        memory._record_memory_history(None)


def _convolutions(vae: Any, op: str, x: Any) -> list[Conv]:
    """List the convolutions of a run, each once."""
    found = [Conv(*conv) for conv in record(vae, x, call=lambda vae, x: getattr(vae, op)(x)).trace.convs]
    for conv in found:
        if not conv.is_plain:
            raise ArgumentError("profile", "square convolutions of one group without dilation", str(conv))
    return list(dict.fromkeys(found))


def _measure_workspace(conv: Conv, device: Any) -> int:
    """Return the bytes that one convolution requests from the allocator in addition to its output."""
    layout = torch.channels_last if conv.layout == "nhwc" else torch.contiguous_format
    like = {"dtype": getattr(torch, conv.dtype), "device": device, "memory_format": layout}
    x = torch.empty((conv.n, conv.c, conv.h, conv.w), **like)
    filters: tuple[Any, ...] = (conv.k, conv.c, conv.r, conv.r)  # square ones
    weight = torch.empty(filters, **like)
    workspace = 0
    for _ in range(2):  # the first run may try plans that fail
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        out = torch.nn.functional.conv2d(x, weight, stride=conv.stride, padding=conv.padding)
        torch.cuda.synchronize(device)
        peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        workspace = peak - before - out.numel() * out.element_size()
        del out
    return workspace


def _write_profile(path: str | os.PathLike[str], device: Any, workspaces: dict[Conv, int]) -> None:
    about = torch.cuda.get_device_name(device), torch.__version__, cudnn_version()
    lines = ((*about, *conv, count) for conv, count in workspaces.items())
    write(path, as_csv([dict(zip(PROFILE_COLUMNS, line, strict=True)) for line in lines], PROFILE_COLUMNS))
