"""Records: the memory of a run, and the result of an encode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._numpy import np
from vaemem._types import Op

CATEGORIES = ("weights", "activations", "scratch", "workspace", "output")  # of memory, as the core names them


@dataclass(frozen=True, repr=False)
class Run:
    """The memory that one run needs or used: bytes by category at the peak.

    Attributes
    ----------
    op : str
        ``"encode"`` or ``"decode"``.
    height, width, batch : int
        Size of the images in pixels, and their number.
    frames : int
        Of each video; 1 for images.
    weights_bytes, activations_bytes, scratch_bytes, workspace_bytes, output_bytes : int
        In use at the peak. Scratch is temporary memory of a pass, GroupNorm's sums and the plan. Workspace is cuDNN's.
        Output is 0 if the caller gave ``out=``; on a GPU, NumPy's output needs memory there all the same.
    reserved_bytes : int
        Held from the system: weights, the whole arena and the output. On a GPU each is rounded up to its granularity.
        It exceeds the peak by that rounding, by holes in the plan, and by the larger arena of an earlier run.
    passes : tuple of str
        Names of the passes, in order.
    timeline : tuple of (str, int)
        For each pass the bytes in use while it runs, weights and output included.
    peak_pass : str
        The pass with the peak.
    flops : tuple of float
        FLOPs of each pass; a multiply-add counts as two.
    pass_seconds : tuple of float
        Seconds of each pass. Zeros in an estimate, with CUDA graphs, or if the call did not wait for the GPU.
    seconds : float or None
        Seconds of the whole call; None in an estimate.
    backend : str
        The kernels used, such as ``"avx512"`` or ``"cuda:0 bfloat16"``.
    threads : int
    notes : tuple of str
        Events of the run: float16 overflowed and was run again, or memory ran out and a smaller plan was used.
    work : float
        FLOPs relative to a run without a limit. Passes with tasks that transform their own weights count 10% more. On a
        GPU, passes that run in steps count 1.05 times, and more if their steps leave multiprocessors idle.
    values : tuple of (str, str)
        For each pass whether its result is ``"stored"`` (whole) or ``"streamed"`` (a few rows at a time).
    finite : bool
        Whether no NaN or infinity appeared. Only runs that the call waits for, with numbers stored as float16 or as
        bytes, are checked.

    Examples
    --------
    >>> run = vae.estimate("decode", 64, 64)
    >>> run.output_bytes, run.passes[0]
    (49152, 'post_quant_conv')
    >>> max(size for _, size in run.timeline) == run.peak_bytes
    True
    """

    op: Op
    height: int
    width: int
    batch: int
    weights_bytes: int
    activations_bytes: int
    scratch_bytes: int
    workspace_bytes: int
    output_bytes: int
    reserved_bytes: int
    passes: tuple[str, ...]
    timeline: tuple[tuple[str, int], ...]
    peak_pass: str
    flops: tuple[float, ...]
    pass_seconds: tuple[float, ...]
    seconds: float | None
    backend: str
    threads: int
    notes: tuple[str, ...] = ()
    work: float = 1.0
    values: tuple[tuple[str, str], ...] = ()
    finite: bool = True
    frames: int = 1

    @property
    def peak_bytes(self) -> int:
        """Bytes in use at the peak."""
        return sum(getattr(self, f"{name}_bytes") for name in CATEGORIES)

    def __repr__(self) -> str:
        size = f"{self.op} {self.height}x{self.width}" + (f" of {self.frames} frames" if self.frames > 1 else "")
        size += f" batch {self.batch}" if self.batch > 1 else ""
        sizes = {name: getattr(self, f"{name}_bytes") / 2**20 for name in CATEGORIES}
        parts = ", ".join(f"{name} {mib:.1f}" for name, mib in sizes.items() if mib or name != "workspace")
        seconds = "" if self.seconds is None else f", {self.seconds:.2f} s"
        used = f", {self.work:.2f} times the work{seconds}" if self.work > 1 else seconds
        peak = f"peak {self.peak_bytes / 2**20:.1f} MiB ({parts}) at {self.peak_pass}"
        return f"<Run {size}: {peak}{used}, {self.backend}>"


def make_run(
    request: Mapping[str, Any], record: Mapping[str, Any], seconds: float | None = None, notes: tuple[str, ...] = ()
) -> Run:
    """Make a Run from arguments of the core's plan and the core's record of it."""
    steps = record["steps"]
    live = [sum(step["live"].values()) for step in steps]
    return Run(
        **{name: request[name] for name in ("op", "height", "width", "batch")},
        **{name: record[name] for name in ("backend", "threads", "work")},
        **{f"{name}_bytes": value for name, value in record["peak"].items()},
        reserved_bytes=record["reserved"],
        passes=tuple(step["name"] for step in steps),
        timeline=tuple((step["name"], n) for step, n in zip(steps, live, strict=True)),
        peak_pass=steps[live.index(max(live))]["name"],
        flops=tuple(step["flops"] for step in steps),
        pass_seconds=tuple(step["seconds"] for step in steps),
        seconds=seconds,
        notes=notes,
        values=tuple((step["name"], "streamed" if step["streamed"] else "stored") for step in steps),
        finite=not record["overflow"],
        frames=request.get("frames", 1),
    )


class Encoded:
    """A diagonal Gaussian over latents.

    Attributes
    ----------
    moments : array of shape (N, 2C, H/8, W/8)
        Means, then log-variances: float32 in host memory, or on the GPU of the image with its library and dtype. A
        `DeviceArray` has no mean or logvar until another library takes it. An AutoencoderTiny returns means alone,
        (N, C, H/8, W/8).
    mean, logvar : array of shape (N, C, H/8, W/8)
        Raw, never scaled, as views of moments. logvar is clamped to [-30, 20] as in diffusers. An AutoencoderTiny's
        logvar has no channels, and its samples are the mean.
    size : (int, int) or None
        Height and width of the images before padding, for `VAE.decode`. None: unknown.

    Examples
    --------
    >>> encoded = vae.encode(np.zeros((1, 3, 64, 64)))
    >>> encoded.mean.shape
    (1, 4, 8, 8)
    >>> bool((encoded.sample(noise=0 * encoded.mean) == encoded.mode()).all())
    True
    """

    def __init__(
        self,
        moments: Any,
        held: Callable[[Any], Any] | None = None,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
    ) -> None:
        """held: scales the latents of `mode` and `sample`. channels: of the latents; None: half of moments'."""
        self.moments, self.size = moments, size
        self._held = held
        self._channels = moments.shape[1] // 2 if channels is None else channels

    @property
    def mean(self) -> Any:
        """Means (N, C, H/8, W/8), a view of moments."""
        return self.moments[:, : self._channels]

    @property
    def logvar(self) -> Any:
        """Log-variances (N, C, H/8, W/8), a view of moments."""
        return self.moments[:, self._channels :]

    def mode(self) -> Any:
        """Return the mean; scaled for pipelines after an encode with ``scaled=True``, see `VAE.encode`."""
        return self._as_held(self.mean + 0)

    def sample(self, generator: np.random.Generator | int | None = None, noise: Any = None) -> Any:
        """Draw one sample, mean + exp(logvar / 2) * noise, scaled as in `mode`.

        Parameters
        ----------
        generator : numpy.random.Generator, int or None
            Source of the noise; an integer seeds a new one. For moments in host memory only.
        noise : array of mean's shape, optional
            Standard normal numbers, in an array of the moments' library.
        """
        if self.moments.shape[1] == self._channels:  # no variance
            return self.mode()
        if noise is None:
            if not isinstance(self.moments, np.ndarray):
                wanted = "standard normal numbers for moments on a GPU, such as torch.randn_like(mean)"
                raise ArgumentTypeError("noise", wanted, "None")
            try:
                if isinstance(generator, bool):
                    raise TypeError
                source = np.random.default_rng(generator)
            except (TypeError, ValueError) as error:
                wanted = "a numpy.random.Generator, a seed of 0 or more, or None"
                kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
                raise kind("generator", wanted, repr(generator)[:80]) from None
            noise = source.standard_normal(self.mean.shape, dtype=np.float32)
        half = self.logvar * 0.5
        deviation = np.exp(half) if isinstance(half, np.ndarray) else math.e**half  # every library has powers
        return self._as_held(self.mean + deviation * noise)

    def _as_held(self, latents: Any) -> Any:
        return self._held(latents) if self._held else latents

    def __repr__(self) -> str:
        return f"<Encoded {tuple(self.moments.shape)}>"
