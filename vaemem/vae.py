"""The VAE as a notebook sees it: load, encode, decode, and what a run takes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vaemem import _core, _weights

__all__ = ["VAE", "Encoded", "Run", "backends"]

Progress = bool | Callable[[int, int], object] | None


@dataclass(frozen=True, repr=False)
class Run:
    """What one run takes, or took: bytes by category when their sum is largest.

    Attributes
    ----------
    op : str
        ``"encode"`` or ``"decode"``.
    height, width, batch : int
        Of the images, in pixels.
    weights_bytes, activations_bytes, scratch_bytes, workspace_bytes, output_bytes : int
        In use at the peak. Scratch is each pass's own, GroupNorm's sums and the plan; workspace is cuDNN's; output is 0
        where the caller gave ``out=``.
    reserved_bytes : int
        Held from the system: weights, the whole arena and the output. Larger than the peak only where an earlier,
        larger run's arena was kept, or where the plan has holes.
    passes : tuple of str
        Names of the passes, in order.
    timeline : tuple of (str, int)
        Pass and bytes in use while it runs, weights and output included.
    peak_pass : str
        The pass that makes the peak.
    flops : tuple of float
        Of each pass (a multiply-add is two).
    pass_seconds : tuple of float
        Of each pass; zeros in an estimate.
    seconds : float or None
        Of the whole call; None in an estimate.
    backend : str
        The kernels used, such as ``"avx512"``.
    threads : int
    """

    op: str
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

    @property
    def peak_bytes(self) -> int:
        """Bytes in use when they were most."""
        return (
            self.weights_bytes
            + self.activations_bytes
            + self.scratch_bytes
            + self.workspace_bytes
            + self.output_bytes
        )

    def __repr__(self) -> str:
        size = f"{self.op} {self.height}x{self.width}" + (f" batch {self.batch}" if self.batch > 1 else "")
        parts = ", ".join(
            f"{name} {value / 2**20:.1f}"
            for name, value in (
                ("weights", self.weights_bytes),
                ("activations", self.activations_bytes),
                ("scratch", self.scratch_bytes),
                ("workspace", self.workspace_bytes),
                ("output", self.output_bytes),
            )
            if value or name != "workspace"
        )
        took = "" if self.seconds is None else f", {self.seconds:.2f} s"
        return (
            f"<Run {size}: peak {self.peak_bytes / 2**20:.1f} MiB ({parts}) at {self.peak_pass}{took}, {self.backend}>"
        )


def _make_run(op: str, height: int, width: int, batch: int, record: Mapping[str, Any], seconds: float | None) -> Run:
    steps = record["steps"]
    live = [sum(step["live"].values()) for step in steps]
    return Run(
        op,
        height,
        width,
        batch,
        **{f"{name}_bytes": value for name, value in record["peak"].items()},
        reserved_bytes=record["reserved"],
        passes=tuple(step["name"] for step in steps),
        timeline=tuple((step["name"], n) for step, n in zip(steps, live, strict=True)),
        peak_pass=steps[live.index(max(live))]["name"],
        flops=tuple(step["flops"] for step in steps),
        pass_seconds=tuple(step["seconds"] for step in steps),
        seconds=seconds,
        backend=record["backend"],
        threads=record["threads"],
    )


class Encoded:
    """A diagonal Gaussian over latents.

    Attributes
    ----------
    mean, logvar : ndarray of float32, shape (N, C, H/8, W/8)
        Raw, never scaled; logvar is clamped to [-30, 20] as diffusers does. Both are views of one array.
    """

    def __init__(self, moments: np.ndarray, scaling: float, shift: float) -> None:
        channels = moments.shape[1] // 2
        self.mean = moments[:, :channels]
        self.logvar = moments[:, channels:]
        self._scaling, self._shift = np.float32(scaling), np.float32(shift)

    def _scale(self, latents: np.ndarray) -> np.ndarray:
        if self._shift == 0 and self._scaling == 1:
            return latents
        return (latents - self._shift) * self._scaling

    def mode(self) -> np.ndarray:
        """The mean: (mean - shift) * scaling if encoded with ``scaled=True``, as pipelines pass it on."""
        return self._scale(self.mean.copy())

    def sample(self, generator: np.random.Generator | int | None = None) -> np.ndarray:
        """One draw, mean + exp(logvar / 2) * noise, scaled as `mode` is.

        Parameters
        ----------
        generator : numpy.random.Generator, int or None
            Where the noise comes from; an integer seeds a new one.
        """
        noise = np.random.default_rng(generator).standard_normal(self.mean.shape, dtype=np.float32)
        return self._scale(self.mean + np.exp(np.float32(0.5) * self.logvar) * noise)

    def __repr__(self) -> str:
        return f"<Encoded {self.mean.shape}>"


class VAE:
    """An AutoencoderKL with its weights, run by our own kernels. Make one with `load` or `random`.

    Two threads that call one VAE wait for each other; two VAEs run side by side.

    Attributes
    ----------
    model : str
        ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd"`` (SD1.5's and SDXL's tensors, which of the two unknown) or
        ``"custom"``.
    arch : dict
        The architecture, with diffusers' names.
    threads : int
        Used by runs; from VAEMEM_THREADS, else the processors this process may use. The result does not depend on it.
    last_run : Run or None
        What the last encode or decode that succeeded took.
    """

    def __init__(self, core: _core.Model) -> None:
        self._core = core
        self.arch: dict[str, Any] = core.arch
        self.model: str = self.arch["name"]
        self.threads = _default_threads()
        self.last_run: Run | None = None

    # ---- making one ----

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> VAE:
        """Loads a safetensors file, or a diffusers directory.

        Parameters
        ----------
        path : path
            diffusers, LDM/SD checkpoint or BFL layout (detected); float32, float16 or bfloat16.
        model : str, optional
            ``"sd15"``, ``"sdxl"`` or ``"flux"``. Needed only where ``scaled=True`` will be, for SD1.5 and SDXL, whose
            tensors are the same.
        config : path or mapping, optional
            An AutoencoderKL ``config.json`` for any other architecture.
        parts : {"all", "encoder", "decoder"}
            Reads only that half.
        device : {"cpu"}
        dtype : {"float32"}
            Of the arithmetic; weights are converted to it.

        Raises
        ------
        ValueError, FileNotFoundError, MemoryError
            What was wanted and what came; nothing stays allocated.
        """
        _check_device(device, dtype)
        return cls(_weights.load(path, model=model, config=config, parts=parts))

    @classmethod
    def random(
        cls,
        model: str = "sdxl",
        seed: int = 0,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: str = "cpu",
        dtype: str = "float32",
    ) -> VAE:
        """Weights of the real shapes: PyTorch's default initialisation, random norm affines.

        The same seed gives the same tensors whatever the parts. With ``config=`` the architecture is the config's.
        """
        _check_device(device, dtype)
        if config is None:
            known = _core.models()
            if model not in known:
                raise ValueError(f"model: want one of {', '.join(known)}, got {model!r}")
            arch = known[model]
        else:
            arch = _weights.read_config(config)
        core = _core.Model(arch, parts)
        _weights.random_tensors(core, seed)
        return cls(core)

    def save(self, path: str | os.PathLike[str], layout: str = "diffusers") -> None:
        """Writes the weights as float32 safetensors.

        Parameters
        ----------
        path : path
            A ``.safetensors`` file; for ``"diffusers"`` also a directory, which gets a ``config.json`` too.
        layout : {"diffusers", "ldm", "bfl"}
            Refused where it cannot hold the model.
        """
        _weights.save(self._core, path, layout=layout)

    # ---- running ----

    def decode(
        self,
        z: np.ndarray,
        scaled: bool = False,
        output_type: str = "float",
        progress: Progress = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Latents to images.

        Parameters
        ----------
        z : array of real numbers, shape (N, C, h, w)
            C latent channels; the image is 8h by 8w. Anything but contiguous native float32 is copied to it first.
        scaled : bool
            z is as a pipeline holds it: z / scaling + shift is decoded.
        output_type : {"float", "uint8"}
        progress : bool or callable
            True shows a tqdm bar; a callable gets (rows done, rows to do).
        out : ndarray, optional
            Written and returned; must have the result's shape and dtype and be contiguous.

        Returns
        -------
        ndarray
            "float": float32 (N, 3, H, W), nominally in [-1, 1], never clamped. "uint8": (N, H, W, 3), clamped and
            rounded. Its memory is the caller's.

        Raises
        ------
        ValueError, TypeError, MemoryError, KeyboardInterrupt
            The VAE stays usable and what the run took is given back.
        """
        pixels = _pixels(output_type)
        data = _as_float(z, "z", "(N, C, h, w)")
        latents = self.arch["latent_channels"]
        if data.ndim != 4 or data.shape[1] != latents:
            raise ValueError(f"z: want shape (N, {latents}, h, w) for {self.model}, got {data.shape}")
        if out is not None:
            _check_out(out, self._image_shape(data.shape, pixels), np.uint8 if pixels == "uint8" else np.float32)
        factor = self._factor
        return self._run("decode", data, data.shape[2] * factor, data.shape[3] * factor, pixels, scaled, progress, out)

    def encode(self, x: np.ndarray, scaled: bool = False, progress: Progress = None) -> Encoded:
        """Images to a distribution over latents.

        Parameters
        ----------
        x : array, shape (N, 3, H, W) or, if uint8, (N, H, W, 3)
            Real numbers nominally in [-1, 1], or bytes, which become v / 127.5 - 1. H and W are multiples of 8.
        scaled : bool
            `Encoded.sample` and `Encoded.mode` give (latent - shift) * scaling, as pipelines pass them on.
        progress : bool or callable
            As for `decode`.

        Returns
        -------
        Encoded
        """
        channels = self.arch["in_channels"]
        array = np.asarray(x)
        if array.dtype == np.uint8:
            data, pixels = np.ascontiguousarray(array), "uint8"
            if data.ndim != 4 or data.shape[3] != channels:
                raise ValueError(f"x: want shape (N, H, W, {channels}) for uint8, got {data.shape}")
            height, width = data.shape[1:3]
        else:
            data, pixels = _as_float(array, "x", f"(N, {channels}, H, W)"), "float"
            if data.ndim != 4 or data.shape[1] != channels:
                raise ValueError(f"x: want shape (N, {channels}, H, W), got {data.shape}")
            height, width = data.shape[2:]
        if scaled and self.arch["scaling_factor"] is None:
            raise ValueError(
                "scaled: the weights do not tell the scaling factor (sd15 and sdxl have the same tensors); "
                "load with model= or config="
            )
        moments = self._run("encode", data, height, width, pixels, False, progress, None)
        scaling, shift = (self.arch["scaling_factor"], self.arch["shift_factor"]) if scaled else (1.0, 0.0)
        return Encoded(moments, scaling, shift)

    def estimate(self, op: str, height: int, width: int, batch: int = 1, output_type: str = "float") -> Run:
        """What a run will take, to the byte, before it.

        Parameters
        ----------
        op : {"encode", "decode"}
        height, width : int
            Of the image, in pixels.
        batch : int
        output_type : {"float", "uint8"}
            Of decode's output; ``out=`` would take its bytes away.

        Returns
        -------
        Run
            Equal to what `last_run` will say, but for the seconds.
        """
        height, width, batch = (_as_int(n, v) for n, v in (("height", height), ("width", width), ("batch", batch)))
        record = self._core.plan(op, height, width, batch, pixels=_pixels(output_type), threads=self._thread_count())
        return _make_run(op, height, width, batch, record, None)

    def trim(self) -> None:
        """Gives the arena, kept between runs, back to the system."""
        self._core.trim()

    @property
    def parts(self) -> str:
        """``"all"``, ``"encoder"`` or ``"decoder"``."""
        return self._core.parts

    @property
    def reserved_bytes(self) -> int:
        """Held from the system now: weights, the arena, and outputs that are still referenced."""
        return self._core.reserved_bytes

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""
        return sum(math.prod(shape) for _, shape in self._core.tensors)

    def __repr__(self) -> str:
        held = f"{self.reserved_bytes / 2**20:.0f} MiB held"
        return f"<VAE {self.model}: {self.parameters:,} parameters, parts={self.parts}, {held}>"

    # ---- inside ----

    @property
    def _factor(self) -> int:
        return 2 ** (len(self.arch["block_out_channels"]) - 1)

    def _image_shape(self, latent: tuple[int, ...], pixels: str) -> tuple[int, ...]:
        n, h, w, c = latent[0], latent[2] * self._factor, latent[3] * self._factor, self.arch["out_channels"]
        return (n, h, w, c) if pixels == "uint8" else (n, c, h, w)

    def _thread_count(self) -> int:
        return _as_int("threads", self.threads)

    def _run(
        self,
        op: str,
        data: np.ndarray,
        height: int,
        width: int,
        pixels: str,
        scaled: bool,
        progress: Progress,
        out: np.ndarray | None,
    ) -> np.ndarray:
        with _polling(progress, op) as poll:
            start = time.perf_counter()
            result, record = self._core.run(
                op, data, out=out, pixels=pixels, threads=self._thread_count(), scaled=bool(scaled), poll=poll
            )
            seconds = time.perf_counter() - start
        self.last_run = _make_run(op, height, width, data.shape[0], record, seconds)
        return result


def backends() -> list[dict[str, Any]]:
    """The kernels this build has, best first.

    Returns
    -------
    list of dict
        ``name``, ``usable``, ``chosen`` (what runs use) and ``why`` (a sentence where not usable).
    """
    rows: list[dict[str, Any]] = []
    for name, usable in _core.backends():
        chosen = usable and not any(row["chosen"] for row in rows)
        why = "" if usable else "this processor or its system lacks it, or it is named in VAEMEM_DISABLE"
        rows.append({"name": name, "device": "cpu", "usable": usable, "chosen": chosen, "why": why})
    return rows


# ---- arguments ----


def _check_device(device: str, dtype: str) -> None:
    if device != "cpu":
        raise ValueError(f"device: want cpu, got {device!r}")
    if dtype != "float32":
        raise ValueError(f"dtype: want float32, got {dtype!r}")


def _default_threads() -> int:
    text = os.environ.get("VAEMEM_THREADS")
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise ValueError(f"VAEMEM_THREADS: want a number from 1 to 1024, got {text!r}")
    return int(text)


def _as_int(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name}: want an integer, got {value!r}") from None


def _as_float(value: Any, name: str, shape: str) -> np.ndarray:
    """Contiguous native float32; anything else that is real numbers is copied to it."""
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name}: want an array of real numbers of shape {shape}, got dtype {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.float32)


def _check_out(out: Any, shape: tuple[int, ...], dtype: type) -> None:
    want = f"a writable contiguous {np.dtype(dtype).name} array of shape {shape}"
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out: want {want}, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        kind = "" if out.flags.c_contiguous else "non-contiguous "
        kind += "" if out.flags.writeable else "read-only "
        raise ValueError(f"out: want {want}, got {kind}{out.dtype} {out.shape}")


def _pixels(output_type: str) -> str:
    if output_type not in ("float", "uint8"):
        raise ValueError(f"output_type: want float or uint8, got {output_type!r}")
    return output_type


@contextlib.contextmanager
def _polling(progress: Progress, op: str) -> Iterator[Callable[[int, int], object] | None]:
    if callable(progress):
        yield progress
        return
    if not progress:
        yield None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install 'vaemem[progress]'") from None
    with tqdm(total=0, desc=op, unit="row") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
