"""A request for a prediction: which job, on which card, with which software."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from vaemem import _core
from vaemem._common import DTYPES, MIB, OPS, TILED_OPS, choose, flag, frames_factor, latent_factor, listed, meant
from vaemem._errors import ArgumentError, ArgumentOverflowError, Named
from vaemem._types import Program
from vaemem.engine.configs import SAMPLE_SIZES, config_of, named_sample_size, sample_size_of
from vaemem.engine.limits import parse_size
from vaemem.engine.names import shared_note
from vaemem.prediction.benchmark import PROTOCOLS, USUAL_PROTOCOL, benchmark
from vaemem.prediction.caching_allocator import BACKENDS, CachingAllocator, parse_conf
from vaemem.prediction.default_dtypes import BFLOAT16_SM, OVERFLOWING, held_by, is_fixed, usual_dtypes
from vaemem.prediction.gpus import Gpu, find_gpu, known_gpu, present_gpu, sold
from vaemem.prediction.process import PeakTensor, Reading, SimulatedProcess
from vaemem.prediction.profiles import version_number
from vaemem.prediction.recording_files import find_component, is_recorded_component
from vaemem.prediction.runtimes import (
    DEFAULT_TORCH,
    PROGRAM_NAMES,
    RUNTIMES,
    WANS,
    architecture,
    code_of,
    diffusers_release,
    packing,
)
from vaemem.prediction.seconds import Machine, cards_of, vae_machine, vae_work
from vaemem.prediction.vae_job import OVERLAP, TINY_OVERLAP, Job
from vaemem.prediction.workspace import Workspace, cudnn_of_torch, torch_for, torch_release

# The last PyTorch with a GroupNorm on CUDA that needs NCHW. 2.15's wheel has the kernel for NHWC (pytorch#191945).
LAST_COPYING_NORM = (2, 14)
# Bytes of a card that the operating system keeps from a process, besides the context and other users: the least and
# the most. On Windows NVML calls them free and CUDA does not (ollama logs the difference as "OS VRAM overhead": 125 to
# 846 MiB on cards of 6 to 24 GB; ollama#10569, logs in READMEs). Messages with nothing free agree: PyTorch could not
# reach 0.78 to 0.94 GiB, the context included (black-forest-labs/flux#70, ComfyUI-SUPIR#102).
# Windows 10 before 2020 kept 15% and more (ollama#9167); that is not covered.
KEPT = {"linux": (0, 0), "windows": (125 * MIB, 850 * MIB)}
USUAL_GPU = "RTX 4090"  # if no card is named and none is present
# (MiB, pixels): the side of a tile on a card with more than that memory. The defaults of ComfyUI's nodes and Forge, and
# the recommendations of A1111's Tiled VAE.
TILED_SIDES = {
    **{(code, op): ((0, 512),) for code in ("comfyui", "forge") for op in TILED_OPS if op not in OPS},
    ("a1111", "encode_tiled"): ((16000, 3072), (12000, 2048), (8000, 1536), (0, 960)),
    ("a1111", "decode_tiled"): ((30000, 2048), (16000, 1536), (12000, 1024), (8000, 768), (0, 512)),
}


@dataclass(frozen=True)
class Card:
    """A GPU, with its name, compute capability, multiprocessors and memory, and the bytes that others hold of its
    memory. kept: the least and the most bytes that the operating system also keeps. held: bytes of other models that
    the program keeps on the card. assumed: a sentence that says which card stands for an unnamed card; "" if the card
    was named or is this machine's."""

    gpu: Gpu
    used: int = 0
    kept: tuple[int, int] = (0, 0)
    held: int = 0
    assumed: str = ""

    @property
    def taken(self) -> int:
        """Bytes that others hold, that the program keeps, and that the operating system keeps at least."""
        return self.used + self.held + self.kept[0]

    @property
    def kept_more(self) -> int:
        """How much more of the card the operating system and the CUDA context may keep."""
        return self.kept[1] - self.kept[0] + self.gpu.context_most - self.gpu.context

    @property
    def is_windows(self) -> bool:
        """Whether the operating system is Windows, which keeps a part of the card."""
        return self.kept[1] > 0

    def available(self) -> int:
        """Return the bytes that a process can have after its context, other users and `kept`."""
        return self.gpu.available(self.taken)


def find_card(gpu: Any, memory: int | str | None = None, used: int | str = 0, os: str = "linux") -> Card:
    """Find the card for the arguments `gpu`, `memory`, `used` and `os` of `vaemem.predict`."""
    system = meant("os", os, KEPT)
    if isinstance(used, str) and re.fullmatch(r"\s*(\d{1,5}(\.\d*)?|\.\d+)\s*", used) and float(used):
        raise ArgumentError("used", f"bytes, or a unit such as '{used.strip()} GB'", repr(used))
    card, assumed = _unnamed(memory) if gpu is None else (find_gpu(gpu, memory), "")
    return Card(card, parse_size("used", used, least=0), KEPT[system], assumed=assumed)


def _unnamed(memory: int | str | None) -> tuple[Gpu, str]:
    """Choose a card if none is named, and say why: one with that memory, this machine's, or a usual one."""
    if memory is not None:
        size = sold(memory)
        cards = cards_of(size)
        # On older cards PyTorch writes out the scores of bfloat16's attention, so they represent few others.
        card = next((card for card in cards if card.sm >= BFLOAT16_SM), cards[0])
        if not 0.95 * size < card.total_memory < 1.05 * size:  # no listed card has that memory
            card = find_gpu(card.name, size)
        return card, f"No card is named: {card.name} stands for any with {size / (1 << 30):.4g} GB."
    if present := present_gpu():
        return present, ""
    card = find_gpu(USUAL_GPU)
    return card, f"No card is named, and none is present: {card.name} stands for yours."


@dataclass(frozen=True)
class Software:
    """The software on the card, from the arguments of `vaemem.predict`: the program, PyTorch, cuDNN, the allocator, the
    switches, the protocol of the process, and diffusers. ValueError names an impossible argument."""

    runtime: Program = "diffusers"
    torch_version: str | None = None
    cudnn_version: str | None = None
    protocol: str = USUAL_PROTOCOL
    channels_last: bool = False
    allow_tf32: bool = True
    allocator: str = "native"
    diffusers_version: str | None = None

    def __post_init__(self) -> None:
        diffusers_release(self.diffusers_version)  # refuses an unknown one
        choose("protocol", self.protocol, PROTOCOLS)
        for name in ("channels_last", "allow_tf32"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        if not isinstance(self.allocator, str):
            raise ArgumentError("allocator", "text such as 'cudaMallocAsync'", repr(self.allocator))
        settings = _allocator_settings(self.allocator)
        if not settings.keys() - {"backend"}:  # a backend without other settings goes by its name
            object.__setattr__(self, "allocator", settings.get("backend", "native"))
        version = DEFAULT_TORCH if self.torch_version is None else self.torch_version
        if self.channels_last and torch_release(version) > LAST_COPYING_NORM:
            wanted = f"None with {version}, whose GroupNorm has a kernel for it that is not modelled"
            last = ".".join(map(str, LAST_COPYING_NORM))
            raise ArgumentError("channels_last", wanted, "True", f"use it with PyTorch up to {last}")

    @property
    def has_version(self) -> bool:
        """Whether a version of PyTorch or cuDNN was named."""
        return self.torch_version is not None or self.cudnn_version is not None

    @property
    def release(self) -> int:
        """The release of diffusers: 36 for 0.36."""
        return diffusers_release(self.diffusers_version)

    @property
    def program(self) -> str:
        """The program, and the release if it is diffusers."""
        return f"diffusers 0.{self.release}" if self.runtime == "diffusers" else self.runtime

    @property
    def unusual(self) -> tuple[str, ...]:
        """The unusual settings, in words."""
        given = {
            self.protocol: self.protocol != USUAL_PROTOCOL,
            "channels_last": self.channels_last,
            "allow_tf32=False": not self.allow_tf32,
            self.allocator: self.allocator != "native",
        }
        return tuple(name for name, is_unusual in given.items() if is_unusual)


@functools.lru_cache(maxsize=64)
def _allocator_settings(allocator: str) -> dict[str, Any]:
    """Return the arguments of `CachingAllocator` for the argument `allocator`."""
    try:
        settings = parse_conf(f"backend:{allocator}" if allocator in BACKENDS else allocator)
        if "garbage_collection_threshold" in settings:
            raise ArgumentError(
                "", "", "a garbage_collection_threshold works only with set_per_process_memory_fraction"
            )
        CachingAllocator(**settings, history=False)
    except ValueError as error:
        wanted = "native, cudaMallocAsync or a PYTORCH_CUDA_ALLOC_CONF such as 'expandable_segments:True'"
        raise ArgumentError("allocator", wanted, repr(allocator), str(error)) from None
    return settings


PAGE = 2 * MIB  # of the driver's memory


@dataclass(frozen=True)
class Request:
    """The part that all requests share: a card, the software on it, and an optional object that answers for the
    convolutions' workspaces in place of `vaemem.prediction.workspace.Workspace`. safe: whether a tight run counts as
    not fitting."""

    card: Card
    software: Software
    workspace: Any = field(default=None, kw_only=True)
    safe: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.workspace is not None and not self.software.allow_tf32 and getattr(self.workspace, "tf32", True):
            raise ArgumentError("allow_tf32", "True with your own workspace, which ignores it", "False")

    def start(self, workspace: Any = None, **device: Any) -> SimulatedProcess:
        """Start a fresh process, with another workspace if one is given. `device` has `total_memory` and `history` as
        `CachingAllocator` takes them."""
        software, workspace = self.software, self.workspace if workspace is None else workspace
        if workspace is None and software.runtime == "comfyui" and _turns_miopen_off(self.card.gpu):
            workspace = Workspace(self.card.gpu, software.cudnn_version, tf32=software.allow_tf32, enabled=False)
        allocator = CachingAllocator(**{"history": False, **_allocator_settings(software.allocator), **device})
        return SimulatedProcess(
            self.card.gpu, software.cudnn_version, software.torch_version, allocator=allocator, workspace=workspace,
            allow_tf32=software.allow_tf32, used=self.card.taken, diffusers_version=software.diffusers_version,
        )  # fmt: skip

    def play_on(self, capacity: int, process: SimulatedProcess) -> tuple[SimulatedProcess, PeakTensor | None]:
        """Play the script of a process on a device of `capacity` bytes, as far as that has memory. Return a process
        with the new play, and the request that failed, if any."""
        other = self.start(process.workspace, total_memory=max(capacity, PAGE))
        return other, other.play_of(process)

    def play_on_card(self, process: SimulatedProcess) -> tuple[SimulatedProcess, PeakTensor | None]:
        """Play the script of a process that had room on the card, as `play_on` does. If the card has as much room, no
        request is ever refused, so it is the same process."""
        available = process.available
        return (process, None) if process.most_reserved <= available else self.play_on(available, process)


# The architectures on which ComfyUI leaves MIOpen on (AMD_RDNA2_AND_OLDER_ARCH in comfy/model_management.py), and
# gfx1032: builds of PyTorch without kernels for it run it as gfx1030, with HSA_OVERRIDE_GFX_VERSION.
_MIOPEN_STAYS_ON = {
    "gfx1030", "gfx1031", "gfx1035", "gfx1010", "gfx1011", "gfx1012", "gfx906", "gfx900", "gfx803", "gfx1032",
}  # fmt: skip


def _turns_miopen_off(gpu: Gpu) -> bool:
    """Return whether ComfyUI sets ``torch.backends.cudnn.enabled = False``: on AMD's newer cards, since October 2025
    (Comfy-Org/ComfyUI#10302, #10437), unless COMFYUI_ENABLE_MIOPEN is 1."""
    return gpu.architecture != "" and gpu.architecture not in _MIOPEN_STAYS_ON


def _called_by_comfyui(gpu: Gpu, software: Software) -> Workspace | None:
    """Return the workspace if ComfyUI calls cuDNN itself, as 2.8 does, otherwise None. ComfyUI does so because PyTorch
    2.9 and 2.10 keep 3D convolutions in half precision from cuDNN (comfy/ops.py, NVIDIA_MEMORY_CONV_BUG_WORKAROUND)."""
    version = torch_for(gpu, software.torch_version)
    if gpu.maker != "NVIDIA":
        return None
    cudnn = software.cudnn_version or cudnn_of_torch(version)
    if torch_release(version) not in ((2, 9), (2, 10)) or not 91002 <= version_number(cudnn) < 91500:
        return None
    return Workspace(gpu, cudnn, "2.8.0", software.allow_tf32)


@contextlib.contextmanager
def refusing_too_large(size: str) -> Iterator[None]:
    """Play a run on a process without a memory limit; ArgumentOverflowError if it has more bytes than the core counts.

    Examples
    --------
    >>> from vaemem.prediction.request import refusing_too_large
    >>> with refusing_too_large("64x64"):
    ...     image = vaemem.SimulatedProcess("RTX 4090").tensor((1, 4, 8, 8), "float16")
    """
    try:
        yield
    except (OverflowError, _core.OutOfMemoryError) as error:
        what = "a run that can be played"
        raise ArgumentOverflowError("height, width, batch", what, size, "use a smaller one") from error


@dataclass(frozen=True)
class VAERequest(Request):
    """A VAE's run, for `vaemem.predict`. assumed: the types that were chosen if no type was named, and why. taken: the
    model that owns the VAE, if that is not the named model. fixed: whether the weights are the SDXL weights that do not
    overflow in float16. calibrate: rows that were measured on the card."""

    job: Job
    unmodelled: ClassVar[Mapping[str, int]] = {}
    supposed: ClassVar[tuple[str, ...]] = ()
    taken: str = field(default="", kw_only=True)
    assumed: str = field(default="", kw_only=True)
    fixed: bool = field(default=False, kw_only=True)
    calibrate: Sequence[Mapping[str, Any]] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("height", "width"):
            if (value := getattr(self.job, name)) % self.unit:
                raise ArgumentError(name, f"a multiple of {self.unit}", str(value))

    @property
    def unit(self) -> int:
        """Image pixels a side of one pixel of the latents that the code takes and returns."""
        return latent_factor(self.job.arch) * packing(self.code, self.job.arch)

    @property
    def turns_black(self) -> bool:
        """Whether the run overflows and so makes black pictures."""
        return self.job.arch["name"] in OVERFLOWING and self.job.dtype == "float16" and not self.fixed

    @property
    def code(self) -> str:
        """The code that runs the VAE: one of `RUNTIMES`."""
        return code_of(self.software.runtime, self.job.arch["name"])

    def start(self, workspace: Any = None, **device: Any) -> SimulatedProcess:
        if workspace is self.workspace is None and self.code == "comfyui" and self.job.arch.get("family") == "wan":
            workspace = _called_by_comfyui(self.card.gpu, self.software)
        return super().start(workspace, **device)

    @property
    def size(self) -> str:
        """The size in words."""
        frames = f" with {self.job.frames} frames" if self.job.frames > 1 else ""
        return f"{self.job.height}x{self.job.width}{frames}, a batch of {self.job.batch}"

    def at(self, height: int, width: int) -> VAERequest:
        """Return the same request at another size."""
        return replace(self, job=replace(self.job, height=height, width=width))

    @property
    def settings(self) -> tuple[str, ...]:
        """The unusual settings and the tiles, in words."""
        job = self.job
        if not job.tile:
            return self.software.unusual
        where = "in tiles" if max(job.height, job.width) > job.tile else "whole, in one tile"
        shared = () if job.tile_overlap == usual_overlap(job.arch) else (f"{job.tile_overlap:g} of which overlaps",)
        return f"{where} of {job.tile}", *shared, *self.software.unusual

    @property
    def trace(self) -> _core.Trace:
        """The model's call."""
        job, gpu = self.job, self.card.gpu
        return _core.Trace.vae(
            job.arch, self.code, job.op.removesuffix("_tiled"), job.dtype, job.height, job.width, job.batch,
            job.tile or 0, job.slicing, gpu.sm, gpu.multiprocessors, channels_last=self.software.channels_last,
            tile_overlap=job.tile_overlap, release=self.software.release,
        )  # fmt: skip

    @property
    def work(self) -> dict[str, float]:
        """The work that takes time in the call, for `machine`."""
        trace = self.trace
        return vae_work(trace.flops, trace.attended, trace.moved)

    @property
    def machine(self) -> Machine:
        """The card's speed, from measured runs: on this card if there are any, otherwise on others."""
        gpu, runs = self.card.gpu, list[tuple[str, Mapping[str, float], float]]()
        for row in self.calibrate:
            tile = row.get("tile")
            of = resolve_vae(VAEArguments(
                row["model"], f"{row['op'].removesuffix('_tiled')}_tiled" if tile else row["op"], row["height"],
                row["width"], row.get("dtype"), row.get("batch") or 1, row.get("runtime") or "diffusers", gpu,
                tile=tile, tile_overlap=row.get("tile_overlap"),
            ))  # fmt: skip
            runs.append((of.job.dtype, of.work, row["seconds"]))
        return vae_machine(gpu, self.job.dtype, runs)

    def play(self, process: SimulatedProcess, protocol: str | None = None) -> Reading:
        """Load the model in a fresh process and run it by the software's protocol, or by another one."""
        job, software = self.job, self.software
        vae = process.load(job.arch, job.weights_dtype, self.code, channels_last=software.channels_last)
        *_, measured = benchmark(process, vae, job, PROTOCOLS[protocol or software.protocol])
        return measured


@dataclass(frozen=True)
class ModuleRequest(Request):
    """A module's call, for `vaemem.pytorch.predict_peak`: the call's trace, and the (name, bytes) of tensors that exist
    before the call.
    unmodelled: how often each operator without counted memory ran. supposed: other substitutes for missing data."""

    trace: _core.Trace
    held: Sequence[tuple[str, int]]
    size = "a module's call"
    unmodelled: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    supposed: tuple[str, ...] = field(default=(), kw_only=True)

    def play(self, process: SimulatedProcess, protocol: str | None = None) -> Reading:
        """Call the module in a fresh process as often as the software's protocol, or another one, says."""
        for name, size in self.held:
            process.hold(name, size)
        warmups, runs, emptied = PROTOCOLS[protocol or self.software.protocol]
        for i in range(warmups + runs):
            if emptied or i == warmups:
                process.empty_cache()
                process.reset_peak()
            left = process.call(self.trace)
            measured = process.read()
            process.release(left.values())
        return measured


@dataclass(frozen=True)
class VAEArguments:
    """The arguments of `vaemem.predict`, as documented there."""

    model: Any
    op: Any
    height: int
    width: int
    dtype: Any = None
    batch: int = 1
    runtime: Any = "diffusers"
    gpu: Any = None
    cudnn_version: str | None = None
    torch_version: str | None = None
    weights_dtype: Any = None
    tile: int | None = None
    slicing: bool = False
    tile_overlap: float | None = None
    memory: int | str | None = None
    used: int | str = 0
    workspace: Any = None
    protocol: str = USUAL_PROTOCOL
    channels_last: bool = False
    allow_tf32: bool = True
    cudnn_benchmark: bool = False
    allocator: str = "native"
    safe: bool = False
    os: str = "linux"
    calibrate: Any = None
    diffusers_version: str | None = None
    frames: int = 1


def resolve_vae(given: VAEArguments) -> VAERequest:
    """Resolve names, and fill in the defaults that follow from other arguments. ValueError names an argument without
    an answer."""
    op = meant("op", given.op, TILED_OPS)
    if flag("cudnn_benchmark", given.cudnn_benchmark):
        why = "PyTorch then times all of cuDNN's plans, and only the card tells the fastest; use vaemem.pytorch.measure"
        raise ArgumentError("cudnn_benchmark", "False", "True", why)
    arch, slicing = architecture(given.model), flag("slicing", given.slicing)
    runtime = meant("runtime", given.runtime, PROGRAM_NAMES)
    name, code = arch["name"], code_of(runtime, arch["name"])
    if slicing and code != "diffusers":
        raise ArgumentError("slicing", "", f"cannot be used with {runtime}", "use runtime='diffusers'")
    if given.diffusers_version is not None and code != "diffusers":
        raise ArgumentError("diffusers_version", f"None with {runtime}", repr(given.diffusers_version))
    release = diffusers_release(given.diffusers_version, config_of(arch)["_class_name"])
    overlap = _resolve_overlap(given, arch, op, code, runtime)
    software = Software(
        runtime, given.torch_version, given.cudnn_version, given.protocol, given.channels_last, given.allow_tf32,
        given.allocator, given.diffusers_version,
    )  # fmt: skip
    card = find_card(given.gpu, given.memory, given.used, given.os)
    tile = given.tile
    if op.endswith("_tiled") and tile is None:
        sides = TILED_SIDES.get((code, op), ())
        room = card.gpu.total_memory // MIB
        tile = next((side for least, side in sides if room > least), None) or usual_tile(given.model)
    card = replace(card, held=held_by(runtime, name)[1])
    usual = usual_dtypes(runtime, name, card.gpu.sm, is_fixed(given.model), release)
    assumed, kept = (usual.why, usual.weights_dtype) if given.dtype is None else ("", given.dtype)
    dtype = meant("dtype", usual.dtype if given.dtype is None else given.dtype, DTYPES)
    weights_dtype = meant("weights_dtype", kept if given.weights_dtype is None else given.weights_dtype, DTYPES)
    upcast = bool(assumed) and usual.upcast and weights_dtype != dtype
    job = Job(
        arch, op, given.height, given.width, dtype, weights_dtype, given.batch, tile, overlap, slicing, given.frames,
        upcast,
    )  # fmt: skip
    _check_frames(job, code)
    if RUNTIMES[code].host and weights_dtype != dtype:
        wanted = f"the run's dtype {dtype} with {runtime}, which keeps its weights in it"
        raise ArgumentError("weights_dtype", wanted, repr(weights_dtype))
    rows = () if given.calibrate is None else _measured_on(card.gpu, given.calibrate)
    request = VAERequest(
        card, software, job, workspace=given.workspace, assumed=assumed, fixed=is_fixed(given.model),
        safe=flag("safe", given.safe), calibrate=rows, taken=shared_note(given.model),
    )  # fmt: skip
    if rows:
        _ = request.machine  # refuses impossible rows
    return request


def _check_frames(job: Job, code: str) -> None:
    if job.frames == 1:
        return
    if job.arch["name"] not in WANS or code != "diffusers":
        known = f"1, because of VAEs alone only {' and '.join(WANS)} are known for videos, in diffusers"
        raise ArgumentError("frames", known, str(job.frames), "ask for the whole pipeline or workflow")
    if (job.frames - 1) % frames_factor(job.arch):
        wanted = f"1 more than a multiple of {frames_factor(job.arch)}"
        raise ArgumentError("frames", wanted, str(job.frames))


def _resolve_overlap(given: VAEArguments, arch: Mapping[str, Any], op: str, code: str, runtime: str) -> float:
    if given.tile_overlap is None:
        return usual_overlap(arch)
    if not op.endswith("_tiled") or code != "diffusers":
        raise ArgumentError("tile_overlap", "a tiled op of the diffusers runtime", f"{op} of {runtime}")
    return given.tile_overlap


def _is_of(device: str | None, gpu: Gpu) -> bool:
    """Return whether a row's device, if it names one, is that card."""
    card = known_gpu(device or gpu)
    return card is not None and card.key == gpu.key


def _measured_on(gpu: Gpu, calibrate: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the rows that PyTorch measured on that card, and that have seconds."""
    rows = listed(calibrate, (Mapping, str))
    for row in rows:
        if not isinstance(row, Mapping) or not {"model", "op", "height", "width"} <= {*row}:
            such = "rows of a table that have model, op, height, width and seconds"
            raise ArgumentError("calibrate", f"one or more {such}", repr(row))
    timed = [row for row in rows if row.get("seconds") and row.get("runtime") != "vaemem"]
    found = [row for row in timed if row.get("source") in (None, "measured") and _is_of(row.get("device"), gpu)]
    if not found:
        wanted = f"runs of PyTorch that were measured on {gpu.name}, with their seconds"
        raise ArgumentError("calibrate", wanted, f"none in {len(rows)} rows")
    return tuple(found)


def usual_overlap(arch: Mapping[str, Any]) -> float:
    """Return the part of its side that a tile of diffusers' class shares with the next by default."""
    return TINY_OVERLAP if arch.get("family") == "tiny" else OVERLAP


def usual_tile(model: Any) -> int:
    """Return the side in pixels of the tiles that diffusers' ``enable_tiling`` cuts: the config's sample_size; 0 for a
    VAE without a known config."""
    if isinstance(model, str) and is_recorded_component(model):
        data, role = find_component(model)
        if role not in data["vaes"]:
            return 0
        model = data["vaes"][role]
    is_named = isinstance(model, str) and (model in SAMPLE_SIZES or not os.path.exists(model))
    size = named_sample_size(model) if is_named else sample_size_of(model, "")
    if size is None:
        raise ArgumentError("tile", "a size", "None, and the config has no sample_size", ("pass ", Named("tile", 512)))
    return size
