"""A simulated PyTorch process, without a GPU: everything that it loads, runs and drops, and the memory that its
allocator holds meanwhile."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from vaemem import _core
from vaemem._common import DTYPES, ELEMENT_BYTES, meant, whole, wholes
from vaemem._core import OutOfMemoryError
from vaemem._errors import ArgumentError
from vaemem.prediction.caching_allocator import CachingAllocator
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.held_tensors import LoadedVAE, Moment, Tensor, arch_key, moments, storages_of
from vaemem.prediction.runtimes import (
    RUNTIMES,
    WANS,
    architecture,
    converted_bytes,
    diffusers_release,
    parameter_bytes,
    parameters_of,
)
from vaemem.prediction.workspace import (
    Workspace,
    answers_of,
    blas_settings,
    cudnn_attention,
    torch_for,
    torch_substitution,
)

Workspaces = tuple[int, ...]  # bytes of each of a process's convolutions
PhaseBytes = tuple[int, int]  # of a phase: bytes that its reading leaves out, and bytes of its reading that are exact
ReadingBytes = Mapping[int, PhaseBytes]  # by the index of a reading
_COUNTS, _MOST = ("flops", "attended", "moved", "sent", "host_flops", "outside"), (1 << 64) - 1  # of a phase; of each
ROUNDED_UP = "[rounded up by the allocator]"  # to 512 bytes, and remainders of blocks that are too small to split off


class Reading(NamedTuple):
    """The counters of a run, in bytes, above the baseline and absolute. The baseline is the bytes held when the peaks
    were reset."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class PeakTensor(NamedTuple):
    """A tensor or workspace that was allocated at the peak."""

    name: str
    bytes: int


@functools.lru_cache(maxsize=256)
def _vae_trace(arch: tuple[tuple[str, Any], ...], **call: Any) -> _core.Trace:
    return _core.Trace.vae(dict(arch), **call)


class SimulatedProcess:
    """A script of a PyTorch process with VAEs, played on a simulated allocator.

    ``reserved`` depends on everything that happened before, so a process is played from its start.

    Parameters
    ----------
    gpu : str or Gpu
        A name for `vaemem.prediction.gpus.find_gpu`: ``"RTX 4090"``.
    cudnn_version, torch_version : str, optional
        PyTorch 2.7.1+cu128 by default (cu126 on Volta), and the cuDNN that the build brings. A version without
        ``+cu128`` means PyPI's build.
    allocator : CachingAllocator, optional
        An allocator with its own settings (``CachingAllocator.from_conf``, a device's memory). By default the device's
        memory is unlimited. If a convolution cannot get its workspace, PyTorch uses cuDNN's next plan from then on.
        That plan is assumed to need no workspace, because from 9.8 on one of cuDNN's plans needs none.
    workspace : object, optional
        Answers ``conv(dtype, n, c, h, w, k, r, stride, padding, layout) -> (bytes, source)`` in place of `Workspace`.
        Convolutions of other kinds have four more arguments, as in `Workspace.conv`.
    allow_tf32 : bool
        ``torch.backends.cudnn.allow_tf32``, on by default as in PyTorch. A given `workspace` ignores it.
    used : int or str
        Memory of the card that others hold, in bytes or as ``"1.5 GB"``.
    diffusers_version : str, optional
        The release of diffusers that runs VAEs, ``"0.33.0"`` to ``"0.42.1"``, by default 0.42.

    Attributes
    ----------
    available : int
        Bytes that the process's allocator can have: the allocator's ``total_memory``; if that is unlimited, the card's
        memory less a CUDA context and `used`. The runtime a1111 cuts its attention by the free part of them.

    Examples
    --------
    >>> p = SimulatedProcess("RTX 4090", allocator=CachingAllocator(total_memory=24 << 30))
    >>> other = p.hold("another model", 2 << 30)
    >>> model = p.load("sdxl", "float32")
    >>> p.convert(model, "float16")
    >>> image = p.tensor((1, 3, 1024, 1024), "float16")
    >>> posterior = p.encode(model, image)
    >>> latents = p.elementwise(p.sample(posterior))
    >>> p.drop(posterior); p.empty_cache(); p.reset_peak()
    >>> decoded = p.decode(model, latents)
    >>> p.peak_above_baseline()[0], p.peak_tensors()[0]
    ('decoder.up_blocks.2.upsamplers.0.conv [workspace]', PeakTensor(name='another model', bytes=2147483648))
    >>> max(moment.allocated for moment in p.timeline()) == p.peak_allocated
    True
    >>> p.release([other])
    >>> p.save_snapshot("history.pickle")
    """

    def __init__(
        self, gpu: str | Gpu = "RTX 4090", cudnn_version: str | None = None, torch_version: str | None = None, *,
        allocator: CachingAllocator | None = None, workspace: Any = None, allow_tf32: bool = True,
        used: int | str = 0, diffusers_version: str | None = None,
    ):  # fmt: skip
        self.gpu = find_gpu(gpu)
        self.torch_version = torch_for(self.gpu, torch_version)
        self.diffusers_release = diffusers_release(diffusers_version)
        if workspace is None:
            workspace = Workspace(self.gpu, cudnn_version, self.torch_version, allow_tf32)
        elif not hasattr(workspace, "conv"):
            raise ArgumentError("workspace", "an object whose conv(...) answers, as Workspace's", repr(workspace))
        self.workspace = workspace
        self.cudnn_attention = cudnn_attention(self.gpu, self.torch_version, getattr(workspace, "cudnn_version", None))
        self.allocator = CachingAllocator(history=False) if allocator is None else allocator
        room = self.gpu.available(used)
        self.available: int = self.allocator._settings()["total_memory"] or room
        self._script, self._blas = _core.Script(), blas_settings(self.gpu, self.torch_version)
        self._play = _core.Play(self._script, self.allocator, max(self.available, 0), **self._blas)
        self._play.note_heights(True)
        self._writes = True  # whether the script is its own
        self.sources = Counter[str]()  # how many workspaces each source gave
        self.last_call: tuple[_core.Trace, Any, Any] | None = None

    # ---- state ----

    @property
    def allocated(self) -> int:
        """Bytes, as ``torch.cuda.memory_allocated``."""
        return self.allocator.memory_allocated()

    @property
    def reserved(self) -> int:
        """Bytes, as ``torch.cuda.memory_reserved``."""
        return self.allocator.memory_reserved()

    @property
    def peak_allocated(self) -> int:
        """Bytes, as ``torch.cuda.max_memory_allocated``."""
        return self.allocator.max_memory_allocated()

    @property
    def peak_reserved(self) -> int:
        """Bytes, as ``torch.cuda.max_memory_reserved``."""
        return self.allocator.max_memory_reserved()

    @property
    def most_reserved(self) -> int:
        """Bytes: the peak since the process began, regardless of resets."""
        return self._play.most_reserved

    @property
    def readings(self) -> list[Reading]:
        """The readings of `read` so far."""
        return [
            Reading(allocated - base_allocated, reserved - base_reserved, allocated, reserved)
            for _, base_allocated, base_reserved, allocated, reserved in self._play.readings
        ]

    @property
    def guessed_plans(self) -> bool:
        """Whether a convolution could not get its workspace, and cuDNN is not known to have a plan without one."""
        return bool(self._play.refused) and not self.knows_plans

    @property
    def knows_plans(self) -> bool:
        """Whether cuDNN is known to have a plan without workspace for each convolution."""
        return getattr(self.workspace, "has_plan_without", False)

    @property
    def workspace_source(self) -> str:
        """The sources of the convolutions' workspace sizes, the most frequent first."""
        return "; ".join(source for source, _ in self.sources.most_common())

    @property
    def substitutions(self) -> tuple[str, ...]:
        """Substitutes for the requested PyTorch, cuDNN and GPU (a given `workspace` names its own), and for workspaces
        that the card could not give."""
        smaller, pooled = self._play.refused, self.allocator._settings()["driver_pool"]
        fallback = f"0 bytes for cuDNN's next plan if a workspace does not fit ({smaller} of the convolutions)"
        pool = "a pool of the driver's that wastes nothing"
        said, older = getattr(self.workspace, "substitutions", ()), torch_substitution(self.torch_version)
        return (*[older] * bool(older), *said, *([fallback] if smaller else []), *([pool] if pooled else []))

    # ---- actions ----

    def load(
        self, model: str | Mapping[str, Any], dtype: str = "float16", runtime: str = "diffusers", *,
        channels_last: bool = False, first: str | None = None,
    ) -> LoadedVAE:  # fmt: skip
        """Move a VAE's weights to the device, parameter by parameter.

        Parameters
        ----------
        model : str or dict
            A name that `vaemem.predict` takes, or a config.
        dtype : str
        runtime : str
            One of `RUNTIMES`.
        channels_last : bool
            Whether to call ``vae.to(memory_format=torch.channels_last)`` next, which copies the filters one by one.
        first : str, optional
            The dtype of a decode's first blocks, if they were converted before, as in `convert`.
        """
        arch = architecture(model)
        runtime, dtype = meant("runtime", runtime, RUNTIMES), meant("dtype", dtype, DTYPES)
        key, name = arch_key(arch), f"weights of {arch['name']}"
        first = None if first is None else meant("first", first, DTYPES)
        sizes = parameter_bytes(key, runtime, dtype, first)
        placed = self._hold(name, [*sizes.values()], None if first else "weights")
        if channels_last:  # only filters, with four dimensions, have a memory format
            self._replace(placed, [sizes[one] * (len(shape) == 4) for one, shape, _ in parameters_of(key, runtime)])
        first = None if first == dtype else first
        return LoadedVAE(self, arch, runtime, dtype, placed, first=first, channels_last=channels_last)

    def convert(self, vae: LoadedVAE, dtype: str, first: str | None = None) -> None:
        """Call ``vae.to(dtype)``: copy each parameter of another dtype, then drop the old one.

        Parameters
        ----------
        vae : LoadedVAE
        dtype : str
        first : str, optional
            Another dtype for the first blocks of a decode, as with ``upcast_vae`` before diffusers 0.36:
            post_quant_conv, decoder.conv_in and decoder.mid_block.
        """
        dtype = meant("dtype", dtype, DTYPES)
        first = dtype if first is None else meant("first", first, DTYPES)
        if (storages := storages_of("vae", vae, LoadedVAE)) is None:
            raise ArgumentError("vae", "a VAE that is there", "one that was dropped")
        old, new = (vae.dtype, vae.first or vae.dtype), (dtype, first)
        if old != new and vae.passing is None:
            self._replace(storages, converted_bytes(vae.key, vae.runtime, old, new))
        vae.dtype, vae.first = dtype, None if first == dtype else first

    def tensor(self, shape: Sequence[int], dtype: str, name: str = "input", *, host: bool = False) -> Tensor:
        """Make a new tensor, such as an input moved to the device. With `host` it is in the host's memory; the runtime
        comfyui takes its inputs from there."""
        dtype, shape = meant("dtype", dtype, DTYPES), tuple(whole("shape", side) for side in shape)
        if not shape:
            raise ArgumentError("shape", "sizes of 1 or more", "()")
        return Tensor(self, name, shape, dtype, ()) if host else self._take(name, shape, dtype)

    def hold(self, name: str, size: int) -> int:
        """Allocate `size` bytes for good under a name. Return a handle for `release` (0 for 0 bytes)."""
        return self._hold(name, [whole("size", size, 0)])[0]

    def hold_all(self, name: str, sizes: Sequence[int]) -> list[int]:
        """Allocate each of these sizes in bytes under one name, as `hold` does. Return the handles.

        Examples
        --------
        >>> len(vaemem.SimulatedProcess("RTX 4090").hold_all("prompt", [512, 1024]))
        2
        """
        return self._hold(name, wholes("sizes", sizes))

    def elementwise(self, x: Tensor, name: str = "scaled", dtype: str | None = None) -> Tensor:
        """Make a new tensor of x's shape: ``x * 0.5``, or ``x.to(dtype)`` with another dtype."""
        storages_of("x", x, Tensor)
        return self._take(name, x.shape, dtype or x.dtype)

    def encode(
        self, vae: LoadedVAE, image: Tensor, *, tile: int = 0, tile_overlap: float = 0.25, slicing: bool = False
    ) -> Tensor:
        """Call the model's ``encode``. The call returns latents for bfl and comfyui, and the posterior for other
        runtimes (see `sample`).

        Parameters
        ----------
        vae : LoadedVAE
        image : Tensor
            (N, in_channels, H, W), of the weights' dtype; H and W multiples of the factor.
        tile : int
            Side of a tile in pixels if tiling is on, 0 if it is off.
        tile_overlap : float
            The part of a side that diffusers' tiles share with the next; it is fixed for other runtimes.
        slicing : bool
            Whether the images of the batch run one after the other.
        """
        return self._call_vae(vae, "encode", image, tile, tile_overlap, slicing)

    def decode(
        self, vae: LoadedVAE, latents: Tensor, *, tile: int = 0, tile_overlap: float = 0.25, slicing: bool = False
    ) -> Tensor:
        """Call the model's ``decode``; return the image. Parameters as in `encode`; latents (N, latent_channels, H/8,
        W/8), or (..., H/16, W/16) for Wan 2.2. Latents of a video have frames before the height, and make 4 frames of
        each latent frame but the first."""
        return self._call_vae(vae, "decode", latents, tile, tile_overlap, slicing)

    def sample(self, posterior: Tensor, name: str = "latents") -> Tensor:
        """Call ``posterior.sample()``: mean + std * noise."""
        storages_of("posterior", posterior, Tensor)
        noise = self._take(f"{name} [noise]", posterior.shape, posterior.dtype)
        product = self._take(f"{name} [std * noise]", posterior.shape, posterior.dtype)
        latents = self._take(name, posterior.shape, posterior.dtype)
        self.drop(product, noise)
        return latents

    def call(self, trace: _core.Trace) -> dict[int, int]:
        """Play a trace, such as one that `vaemem.pytorch.record` made.

        Returns
        -------
        dict
            {id: handle} of the storages that it leaves. Pass the handles to `release` to free them.

        Raises
        ------
        vaemem.OutOfMemoryError
            The simulated device is full. The call's memory is freed.

        Examples
        --------
        >>> import torch
        >>> from vaemem.pytorch import record
        >>> p = SimulatedProcess("RTX 4090")
        >>> linear = torch.nn.Linear(4096, 4096, dtype=torch.float16).eval()
        >>> left = p.call(record(linear, torch.empty(64, 4096).half()).trace)
        >>> p.peak_allocated, len(left)  # the output and the product's workspace
        (1572864, 1)
        >>> p.release(left.values())
        """
        wanted, following, sources = answers_of(self.workspace, trace)
        self.sources.update(sources)
        self._check_writes()
        left = self._play.call(trace, wanted, following)
        self.last_call = (trace, *self._play.heights)
        return left

    def release(self, storages: Iterable[int]) -> None:
        """Free storages by the handles that `hold` and `call` returned."""
        self._writer.give(wholes("storages", storages))
        self._play.follow()

    def drop(self, *things: Tensor | LoadedVAE | None) -> None:
        """Free tensors or models, as if their last name went out of scope. Ignore None.

        Raises
        ------
        ValueError
            One was dropped before.
        """
        for thing in things:
            if thing is None:
                continue
            if (storages := storages_of("drop", thing, Tensor, LoadedVAE)) is None:
                raise ArgumentError("drop", "", f"{thing!r} was dropped before")
            self.release(storages)
            thing.storages = None

    def empty_cache(self) -> None:
        """Call ``torch.cuda.empty_cache()``."""
        self._writer.empty_cache()
        self._play.follow()

    def reset_peak(self) -> None:
        """Call ``torch.cuda.reset_peak_memory_stats()``."""
        self._writer.reset_peak()
        self._play.follow()

    def count(
        self, *, flops: int = 0, attended: int = 0, moved: int = 0, sent: int = 0, host_flops: int = 0, outside: int = 0
    ) -> None:  # fmt: skip
        """Add work to the current phase. `read` ends the phase.

        Parameters
        ----------
        flops, host_flops : int
            FLOPs on the device, and on the host.
        attended : int
            FLOPs of fused attentions, included in `flops`.
        moved : int
            Bytes that are read and written in the device's memory.
        sent : int
            Bytes of weights that go to the device.
        outside : int
            Bytes of the device that the program holds outside PyTorch until the phase ends; the maximum counts.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> p.count(flops=5, outside=64)
        >>> reading = p.read(name="decode")
        >>> p.counted(0)
        {'name': 'decode', 'flops': 5, 'attended': 0, 'moved': 0, 'sent': 0, 'host_flops': 0, 'outside': 64}
        """
        given = zip(_COUNTS, (flops, attended, moved, sent, host_flops, outside), strict=True)
        self._writer.count(*(whole(name, count, 0, _MOST) for name, count in given))

    def count_times(self, times: int) -> None:
        """Make `count` multiply work by `times` from now on: one played step stands for all steps of a loop.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> p.count_times(20); p.count(flops=5); p.count_times(1); p.count(flops=1)
        >>> reading = p.read(name="denoise")
        >>> p.counted(0)["flops"]
        101
        """
        self._writer.times(whole("times", times, most=_MOST))

    def read(self, outside: int = 0, name: str = "") -> Reading:
        """End a phase: read the counters since the last `reset_peak`, and the work since the last reading. Add the
        result to `readings`.

        Parameters
        ----------
        outside : int
            As in `count`.
        name : str
            The phase's name.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> model, latents = p.load("sd15", "float16"), p.tensor((1, 4, 64, 64), "float16")
        >>> p.reset_peak()
        >>> image = p.decode(model, latents)
        >>> p.read().reserved >> 20
        1088
        """
        self.count(outside=outside)
        self._writer.read(name)
        self._play.follow()
        return self.readings[-1]

    def counted(self, number: int) -> dict[str, Any]:
        """Return the name of a phase, by its reading's index, and its counts, by the parameter names of `count`.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> reading = p.read(name="load")
        >>> p.counted(0)["name"]
        'load'
        """
        number = whole("number", number, 0, len(self.readings) - 1)
        return dict(zip(("name", *_COUNTS), self._script.phases[number], strict=True))

    # ---- whole scripts ----

    def play(self, script: _core.Script) -> None:
        """Play a script in this new process.

        Examples
        --------
        >>> script = vaemem._core.Script()
        >>> held = script.take("weights", [3 << 30])
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> p.play(script)
        >>> p.allocated >> 30
        3
        """
        self._check_new("script")
        self._script, self._play = script, _core.Play(script, self.allocator, max(self.available, 0), **self._blas)
        wanted, following, sources = answers_of(self.workspace, script)
        self.sources.update(sources)
        self._play.answer(wanted, following)
        self._play.run()

    def play_of(self, process: SimulatedProcess) -> PeakTensor | None:
        """Play everything that another process did in this new one, as far as its device has memory. cuDNN's next plans
        and A1111's attention depend on the free memory here. Return the request that failed, if any. The script stays
        the other's: this process does nothing more.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> left = p.hold("weights", 3 << 30)
        >>> small = vaemem.SimulatedProcess(allocator=vaemem.CachingAllocator(total_memory=2 << 30))
        >>> small.play_of(p)
        PeakTensor(name='weights', bytes=3221225472)
        """
        self._check_new("process")
        self._script, self.sources, self._writes = process._script, process.sources, False
        self._play = process._play.elsewhere(self.allocator, self.available)
        try:
            self._play.run()
        except OutOfMemoryError as full:
            return PeakTensor(self.frames[full.tag], full.requested)
        return None

    def least(self, low: int, high: int, has_other_plans: bool = True) -> int:
        """Find the least memory of a device, in bytes (whole pages of 2 MiB), on which the whole process succeeds.

        Parameters
        ----------
        low, high : int
            Bytes that are too few, and bytes that are enough as far as is known. The search is between them.
        has_other_plans : bool
            Whether to assume that cuDNN has plans without workspace if that is unknown.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> left = p.hold("weights", 3 << 30)
        >>> p.least(0, p.most_reserved) >> 20
        3072
        """
        low, high = whole("low", low, 0), whole("high", high, 0)
        return self._play.least(not (has_other_plans or self.knows_plans), low, high)

    # ---- history ----

    @property
    def frames(self) -> list[str]:
        """Names by tag; the allocator's history and its errors refer to tags."""
        return self._script.names

    def peak(self, reading: int | None = None) -> tuple[str, list[PeakTensor], dict[str, int]]:
        """Return the peak since `reset_peak`, or of a reading by its index: the step of a call that makes it (""
        outside of calls), `peak_tensors`, and the bytes that the allocator gave each name beyond its requests until the
        phase ended. These bytes leave out calls and conversions.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090")
        >>> left = p.hold("weights", (1 << 20) + 1)
        >>> step, tensors, rounded = p.peak()
        >>> tensors[0], rounded
        (PeakTensor(name='weights', bytes=1048577), {'weights': 511})
        """
        number, most = -1, self.peak_allocated
        if reading is not None:
            number = whole("reading", reading, 0, len(self.readings) - 1)
            most = self.readings[number].peak_allocated
        step, live = self._play.peak(number)
        found = sorted(((name, size) for name, size, _ in live), key=lambda tensor: -tensor[1])
        rounded = most - sum(size for _, size in found)
        tensors = [PeakTensor(name, size) for name, size in (*found, (ROUNDED_UP, rounded)) if size]
        return step or "", tensors, {name: more for name, _, more in live}

    def peak_tensors(self, reading: int | None = None) -> list[PeakTensor]:
        """Return the tensors at the peak since `reset_peak`, or at a reading's peak by its index, largest first. Equal
        names are summed. The bytes that the allocator gave beyond the requests come last, so the sum is the peak of
        allocated memory.

        If a workspace is refused later in the call that made the peak, its substitute counts instead.
        """
        return self.peak(reading)[1]

    def peak_above_baseline(self) -> tuple[str, dict[str, int]] | None:
        """Return the step that makes the peak, and {name: bytes} allocated since `reset_peak` and still live then.

        Return None if the peak lies outside of the calls.
        """
        step, tensors = self._play.peak()
        if step is None:
            return None
        found = Counter({name: size for name, size, _ in tensors})
        found.subtract({name: size for name, size, _ in self._play.baseline()})
        return step, {name: size for name, size in found.items() if size}

    def timeline(self) -> list[Moment]:
        """Return the last call, step by step; a freed storage has the name under which it was allocated."""
        return [] if self.last_call is None else list(moments(*self.last_call))

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the allocator's history as PyTorch's ``_dump_snapshot`` does; ValueError if it keeps none."""
        if not self.allocator._settings()["history"]:
            raise ArgumentError("save_snapshot", "a process whose allocator is native and made with history=True")
        self.allocator.save_snapshot(path, self.frames)

    def alternatives(self, every: bool = False) -> list[Workspaces]:
        """Return every other plausible set of workspaces: bytes of each convolution so far, as in
        `vaemem.prediction.workspace.Workspace.alternatives`. Your own `workspace` may know none.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090", torch_version="2.7.1+cu128")
        >>> image = p.decode(p.load("sd15", "float16"), p.tensor((1, 4, 64, 64), "float16"))
        >>> reading = p.read()
        >>> others = p.alternatives(every=True)
        >>> len(others) > 5
        True
        """
        known = getattr(self.workspace, "alternatives", None)
        return known(every, self._script) if known else []

    def takes(
        self, phases: Sequence[PhaseBytes], first: int = 0, above: bool = False, others: Sequence[Workspaces] = (),
        likely: int | None = None, bounds: ReadingBytes = MappingProxyType({}),
    ) -> tuple[int, int, int, int]:  # fmt: skip
        """Return the bytes that a run takes in the phases of the readings from number `first` on: as played, the least
        and the most over the first `likely` of the other workspaces (by default all), and the bound.

        phases: the `PhaseBytes` of each phase. above: whether only bytes beyond each reading's baseline count. others:
        as returned by `alternatives`. bounds: by the indices of other readings, their `PhaseBytes`; they count for the
        bound alone.

        Examples
        --------
        >>> p = vaemem.SimulatedProcess("RTX 4090", torch_version="2.7.1+cu128")
        >>> image = p.decode(p.load("sd15", "float16"), p.tensor((1, 4, 64, 64), "float16"))
        >>> reading = p.read()
        >>> own, least, most, bound = p.takes([(0, 0)], others=p.alternatives(every=True))
        >>> least <= own == reading.peak_reserved <= most < bound
        True
        """
        first, likely = whole("first", first, 0), len(others) if likely is None else whole("likely", likely, 0)
        given = [(first + i, *one, False) for i, one in enumerate(phases)]
        given += [(number, *one, True) for number, one in bounds.items()]
        return self._play.takes(tuple(given), above, tuple(others), likely)

    def _call_vae(self, vae: LoadedVAE, op: str, x: Tensor, tile: int, tile_overlap: float, slicing: bool) -> Tensor:
        encodes, tile = op == "encode", whole("tile", tile, 0)
        model, given = storages_of("vae", vae, LoadedVAE), storages_of("image" if encodes else "latents", x, Tensor)
        if model is None or given is None:
            raise ArgumentError(op, "a model and an input that were not dropped")
        arch = vae.arch
        channels = arch["in_channels"] if encodes else vae.latent_channels
        is_video = len(x.shape) == 5 and arch["name"] in WANS
        if (len(x.shape) != 4 and not is_video) or x.shape[1] != channels:
            raise ArgumentError(op, f"a tensor (N, {channels}, height, width)", str(x.shape))
        first = vae.dtype if encodes or not vae.first else vae.first
        if x.dtype != first:
            raise ArgumentError(op, f"the weights' dtype {first}", str(x.dtype))
        runtime = RUNTIMES[vae.runtime]
        if bool(x.storages) == runtime.host:
            place = "the host (tensor(..., host=True))" if runtime.host else "the device"
            raise ArgumentError(op, f"an input on {place} with the runtime {vae.runtime}", repr(x))
        batch, _, *frames, h, w = x.shape
        height, width = (h, w) if encodes else (h * vae.factor, w * vae.factor)
        if encodes:
            frames = [(count - 1) // 4 + 1 for count in frames]
            result = (batch, vae.latent_channels, *frames, h // vae.factor, w // vae.factor)
        else:
            result = (batch, arch["out_channels"], *(4 * (count - 1) + 1 for count in frames), height, width)
        # cudaMemGetInfo's free bytes plus the allocator's unused bytes, as A1111's get_available_vram adds them.
        free = max(self.available - self.allocated, 0) if runtime.looks_at_memory else 0
        passing = vae.passing(vae.dtype, first) if vae.passing else ()
        trace = _vae_trace(
            vae.key, runtime=vae.runtime, op=op, dtype=vae.dtype, height=height, width=width, batch=batch,
            tile=tile, slicing=slicing, sm=self.gpu.sm, multiprocessors=self.gpu.multiprocessors, free_bytes=free,
            channels_last=vae.channels_last, first=first, passing=passing, tile_overlap=tile_overlap,
            release=self.diffusers_release, frames=math.prod(frames), picture=x.picture,
        )  # fmt: skip
        return self._as_tensor(f"{op} of {arch['name']}", self.call(trace), result, vae.dtype)

    def _as_tensor(self, name: str, left: Mapping[int, int], shape: Sequence[int], dtype: str) -> Tensor:
        """Return the storages that `call` left, as one tensor."""
        return Tensor(self, name, shape, dtype, left.values())

    def _check_new(self, argument: str) -> None:
        if self._script.events or not self._writes:
            raise ArgumentError(argument, "a new process to play it", "one that did something before")

    def _check_writes(self) -> None:
        if not self._writes:
            raise ArgumentError("process", "one with a script of its own", "one that played another's (play_of)")

    @property
    def _writer(self) -> _core.Script:
        self._check_writes()
        return self._script

    def _hold(self, name: str, sizes: Sequence[int], stamp: str | None = None) -> list[int]:
        placed = self._writer.take(name, sizes, stamp)
        self._play.follow()
        return placed

    def _replace(self, storages: list[int], sizes: Sequence[int]) -> None:
        """Copy weights one by one; drop each old one. If memory runs out, those that were copied stay copied."""
        old = list(storages)
        storages[:] = self._writer.replace("weights", storages, sizes)
        try:
            self._play.follow()
        except MemoryError:
            pairs = zip(storages, old, strict=True)
            storages[:] = [new if self._script.bytes_of(new) else before for new, before in pairs]
            raise

    def _take(self, name: str, shape: Sequence[int], dtype: str) -> Tensor:
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        return Tensor(self, name, shape, dtype, [self.hold(name, size)])
