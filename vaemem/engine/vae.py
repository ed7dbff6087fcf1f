"""The VAE as a notebook sees it: load, encode, decode, and what a run takes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from vaemem import _core
from vaemem._common import choose
from vaemem.engine import weights
from vaemem.engine.arguments import Progress, as_int, default_threads, open_device, pixels_of, polling
from vaemem.engine.arrays import DeviceArrays, HostArrays, request_of
from vaemem.engine.device import Device, gpu_rows
from vaemem.engine.layouts import sample_size_of
from vaemem.engine.limits import Limit, Plans, check_aspect, parse_size, resolve
from vaemem.engine.records import Encoded, Run, make_run
from vaemem.engine.runner import Runner, Settings
from vaemem.engine.tiling import Tiling, cut

__all__ = ["VAE", "Encoded", "Progress", "Run", "backends"]


class VAE:
    """An AutoencoderKL with its weights, run by our own kernels. Make one with `load` or `random`.

    Two threads that call one VAE wait for each other; two VAEs run side by side. `estimate` waits for nobody. A
    progress callback or signal handler may call `estimate` and `save`, but nothing else of the VAE that it interrupts,
    nor may the child of a fork during another thread's run: RuntimeError.

    Attributes
    ----------
    model : str
        ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd"`` (SD1.5's and SDXL's tensors, which of the two unknown) or
        ``"custom"``.
    arch : dict
        The architecture, with diffusers' names.
    device, dtype : str
        Where it lives, and the type of its numbers.
    threads : int
        Used by runs on the CPU; from VAEMEM_THREADS, else the processors this process may use. The result does not
        depend on it.
    memory_limit : int, str or None
        What a run may take where the call does not say: bytes, ``"512 MiB"``, ``"2 GB"`` or ``"auto"``; None: no limit,
        and then the least memory that costs no extra work. See `decode`.
    cache_limit : int, str or None
        An arena larger than that is given back after each run. None: it is kept for the next.
    on_out_of_memory : {"retry", "raise"}
        When memory runs out during a run: run again with the next smaller plan, which `Run.notes` then says,
        or raise MemoryError at once.
    graphs : bool
        On a GPU: keep each run as a CUDA graph and replay it for the same sizes and arrays.
    sample_size : int or None
        The side of a `Tiling`'s tiles where it names none: the config's, as diffusers takes it.
    last_run : Run or None
        What the last encode or decode that succeeded took.

    Examples
    --------
    >>> picture = vae.decode(np.zeros((1, 4, 16, 16)))  # of a VAE with small random weights
    >>> picture.shape
    (1, 3, 128, 128)
    >>> vae.last_run.peak_bytes == vae.estimate("decode", 128, 128).peak_bytes
    True
    >>> fastest, *_, smallest = vae.tradeoff("decode", 256, 256)
    >>> smallest.peak_bytes <= vae.smallest("decode", 256, 256) < fastest.peak_bytes
    True
    >>> height, width = vae.largest("decode", "32 MiB", aspect=16 / 9)
    >>> vae.estimate("decode", height, width, memory_limit="32 MiB").peak_bytes <= 32 << 20
    True
    >>> vae.trim()
    >>> vae.save("vae.safetensors", layout="ldm")
    """

    def __init__(self, core: _core.Model, device: Device | None = None, config: Any = None) -> None:
        self._core, self._device, self._runner = core, device, Runner(core, device)
        self.memory_limit: Limit = None
        self.cache_limit: Limit = None
        self.on_out_of_memory = "retry"
        self.graphs = False
        self.arch = self._runner.arch
        self.model: str = self.arch["name"]
        self.threads = default_threads()
        self.sample_size = sample_size_of(config, self.model)
        self.last_run: Run | None = None

    # ---- making one ----

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: Any = "cpu",
        dtype: str = "float32",
        tf32: bool = False,
        autotune: bool = False,
        convolution: str = "cudnn",
    ) -> VAE:
        """Loads a safetensors file, or a diffusers directory.

        Parameters
        ----------
        path : path
            A safetensors file in diffusers, LDM/SD checkpoint or BFL layout (detected), float32, float16 or
            bfloat16; or a diffusers directory, whose ``config.json`` is then the architecture.
        model : str, optional
            ``"sd15"``, ``"sdxl"`` or ``"flux"``: wins over what the file says, and must fit its tensors. Needed only
            where ``scaled=True`` will be, for SD1.5 and SDXL, whose tensors are the same.
        config : path or mapping, optional
            An AutoencoderKL ``config.json`` for any other architecture; wins likewise.
        parts : {"all", "encoder", "decoder"}
            Reads only that half; the file need not hold the other, whose tensors are not looked at.
        device : str
            ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype : {"float32", "float16", "bfloat16"}
            Of weights, activations and products; sums and statistics are float32. The CPU has float32 only.
        tf32 : bool
            float32 on a GPU: whether products may round their factors to TF32 (10 bits).
        autotune : bool
            On a GPU: time cuDNN's engines in the first run of a size, instead of taking the heuristics' first.
        convolution : {"cudnn", "own"}
            On a GPU, float16 and bfloat16: whose. Our own takes a pass in one kernel, with no stripes and less memory;
            cuDNN is still asked where that has no tile.

        Raises
        ------
        ValueError
            A bad argument; a file that is damaged or no safetensors file; a tensor that is missing, extra, misshapen,
            cut or of another dtype, by its name in the file. Whatever is raised, nothing stays allocated.
        OSError
            The file cannot be read. FileNotFoundError: no such file, or a directory without weights or config.
        MemoryError
            No room for the weights.
        RuntimeError
            No driver, no cuDNN, or a GPU that refused.

        Examples
        --------
        >>> vae.save("model")
        >>> VAE.load("model", parts="decoder")
        <VAE custom: ... parameters, parts=decoder, ... MiB held>
        """
        gpu = open_device(device, dtype, tf32, autotune, convolution)
        core = weights.load(path, model, config, parts, gpu.backend.capsule if gpu else None)
        return cls(core, gpu, path if config is None and model is None and os.path.isdir(path) else config)

    @classmethod
    def random(
        cls,
        model: str = "sdxl",
        seed: int = 0,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: Any = "cpu",
        dtype: str = "float32",
        tf32: bool = False,
        autotune: bool = False,
        convolution: str = "cudnn",
    ) -> VAE:
        """Weights of the real shapes: PyTorch's default initialisation, random norm affines.

        The same seed, 0 or more, gives the same tensors whatever the parts. With ``config=`` the architecture is the
        config's. What else there is to say goes for `load` too.

        Examples
        --------
        >>> VAE.random("sdxl", parts="decoder").parameters
        49490199
        """
        gpu = open_device(device, dtype, tf32, autotune, convolution)
        if config is None:
            choose("model", model, _core.models())
            arch = _core.models()[model]
        else:
            arch = weights.read_config(config)
        core = _core.Model(arch, parts, gpu.backend.capsule if gpu else None)
        weights.random_tensors(core, seed)
        return cls(core, gpu, config)

    def save(self, path: str | os.PathLike[str], layout: str = "diffusers") -> None:
        """Writes the weights as float32 safetensors.

        Parameters
        ----------
        path : path
            A ``.safetensors`` file; for ``"diffusers"`` also a directory, made where there is none, which gets a
            ``config.json`` too. A file without one does not tell norm_num_groups or the scaling.
        layout : {"diffusers", "ldm", "bfl"}
            ``"ldm"`` wants both quant convs, ``"bfl"`` none and the middle attention.

        Raises
        ------
        ValueError
            A layout that is unknown or cannot hold the model, a path of the wrong kind, or a model on a GPU, whose copy
            is rounded.
        OSError
            The file cannot be written. Whatever was there before is as it was.
        """
        if self._device:
            raise ValueError(f"save: want a VAE on the cpu, got one on {self.device}, whose weights are {self.dtype}")
        weights.save(self._core, path, layout=layout, sample_size=self.sample_size)

    # ---- running ----

    def decode(
        self,
        z: Any,
        scaled: bool = False,
        output_type: str = "float",
        progress: Progress = None,
        out: Any = None,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
    ) -> Any:
        """Latents to images.

        Parameters
        ----------
        z : array of real numbers, shape (N, C, h, w)
            C latent channels; the image is 8h by 8w. In host memory anything but contiguous native float32 is copied to
            it first. In a GPU's memory (any library with DLPack) contiguous float32, float16 or bfloat16, not copied.
        scaled : bool
            z is as a pipeline holds it: z / scaling + shift is decoded.
        output_type : {"float", "uint8"}
        progress : bool or callable
            True shows tqdm's bar (in a notebook without ipywidgets as text); a callable gets (rows done, rows to do).
        out : ndarray, optional
            Written and returned; must have the result's shape and dtype, be contiguous and not overlap z. After an
            error, an interrupt too, what it holds is undefined: some of it may have been written.
        memory_limit : int or str, optional
            Of `Run.peak_bytes`, weights and output included: bytes, ``"512 MiB"``, ``"2 GB"`` (decimal), or ``"auto"``:
            what the VAE holds and what is free when the run begins (the least of MemAvailable and what the cgroups
            leave, or what is free on the GPU), less an eighth of that, at most 1 GiB, for others. None: the attribute
            `memory_limit`. On the CPU the result has the same bits under every limit, and `Run.work` says what a limit
            costs; on a GPU a limit means smaller stripes, which may change the last bits and take longer.
        tiling : Tiling, optional
            In tiles, as diffusers does it: not exact, as a limit is. z in host memory only, and no limit beside it.

        Returns
        -------
        ndarray
            "float": float32 (N, 3, H, W), nominally in [-1, 1], never clamped. "uint8": (N, H, W, 3), clamped and
            rounded. Its memory is the caller's.
            For z in a GPU's memory: an array of z's library (a `DeviceArray` where that is none we know) and, for
            "float", of z's dtype. The work is put on the stream where torch or CuPy put theirs and may still be under
            way.

        Raises
        ------
        ValueError, TypeError, MemoryError, KeyboardInterrupt
            The VAE stays usable and what the run took is given back. A limit below the smallest plan: ValueError with
            the attribute ``smallest`` (bytes).
        RuntimeError
            The GPU refused.

        Examples
        --------
        >>> latents = np.random.default_rng(0).standard_normal((1, 4, 16, 16))
        >>> picture = vae.decode(latents, output_type="uint8")
        >>> picture.shape, picture.dtype
        ((1, 128, 128, 3), dtype('uint8'))
        >>> limit = vae.smallest("decode", 128, 128, output_type="uint8")
        >>> bool((vae.decode(latents, output_type="uint8", memory_limit=limit) == picture).all())
        True
        """
        return self._run("decode", z, pixels_of(output_type), out, scaled, progress, tiling, memory_limit)

    def encode(
        self,
        x: Any,
        scaled: bool = False,
        progress: Progress = None,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
    ) -> Encoded:
        """Images to a distribution over latents.

        Parameters
        ----------
        x : array, shape (N, 3, H, W) or, if uint8, (N, H, W, 3)
            Real numbers nominally in [-1, 1], or bytes, which become v / 127.5 - 1. H and W are multiples of 8.
        scaled : bool
            `Encoded.sample` and `Encoded.mode` give (latent - shift) * scaling, as pipelines pass them on.
        progress, tiling, memory_limit
            As for `decode`. Of tiles the moments are blended, and clamped then.

        Returns
        -------
        Encoded

        Examples
        --------
        >>> photograph = np.zeros((1, 64, 96, 3), np.uint8)
        >>> vae.encode(photograph, scaled=True).sample(0).shape
        (1, 4, 8, 12)
        """
        moments = self._run("encode", x, "", None, scaled, progress, tiling, memory_limit)
        scaling, shift = (self.arch["scaling_factor"], self.arch["shift_factor"]) if scaled else (1.0, 0.0)
        return Encoded(moments, scaling, shift)

    def estimate(
        self,
        op: str,
        height: int,
        width: int,
        batch: int = 1,
        output_type: str = "float",
        staged: bool = True,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
    ) -> Run:
        """What a run will take, to the byte, before it.

        Parameters
        ----------
        op : {"encode", "decode"}
        height, width : int
            Of the image, in pixels.
        batch : int
        output_type : {"float", "uint8"}
            Of decode's output; ``out=`` would take its bytes away (but not those of a staged one's place on a GPU).
        staged : bool
            On a GPU: the arrays are in host memory and pass through the GPU's. False: they are in the GPU's, latents
            and floats in `dtype`.
        tiling : Tiling, optional
            As for `decode`: one tile's run, the result, and as scratch the tile itself and what it blends with.
        memory_limit : int or str, optional
            As for `decode`.

        Returns
        -------
        Run
            Equal to what `last_run` will say, but for the seconds.
        """
        limit = self._limit(memory_limit)
        request = self._request(op, height, width, batch, output_type, staged)
        tiles = cut(self._runner, tiling, self.sample_size, request, limit)
        return tiles.estimate() if tiles else make_run(request, Plans(self._core, request).within(limit))

    def tradeoff(
        self, op: str, height: int, width: int, batch: int = 1, output_type: str = "float", staged: bool = True
    ) -> tuple[Run, ...]:
        """Estimates of every plan worth choosing, from the fastest to the smallest: each takes less memory and more
        work than the one before; on a GPU the same work in smaller stripes. Arguments are `estimate`'s.
        `vaemem.tradeoff` gives them as a table."""
        request = self._request(op, height, width, batch, output_type, staged)
        return tuple(make_run(request, record) for record in Plans(self._core, request).curve())

    def smallest(
        self, op: str, height: int, width: int, batch: int = 1, output_type: str = "float", staged: bool = True
    ) -> int:
        """The smallest `memory_limit`, in bytes, that will do. Arguments are `estimate`'s."""
        return Plans(self._core, self._request(op, height, width, batch, output_type, staged)).smallest()[0]

    def largest(
        self,
        op: str,
        memory_limit: Limit = None,
        aspect: float = 1.0,
        batch: int = 1,
        output_type: str = "float",
        staged: bool = True,
    ) -> tuple[int, int]:
        """(height, width) of the largest image that a limit allows.

        Parameters
        ----------
        op : {"encode", "decode"}
        memory_limit : int or str, optional
            As for `decode`.
        aspect : float
            Width over height, as nearly as latents of whole pixels can have it.
        batch, output_type, staged
            As for `estimate`.

        Raises
        ------
        ValueError
            No size fits, or there is no limit.
        """
        if not (limit := self._limit(memory_limit)):
            raise ValueError("memory_limit: want one, here or as the VAE's attribute, got None")
        side = self._runner.factor
        plans = Plans(self._core, self._request(op, side, side, batch, output_type, staged))
        found = plans.largest(limit, check_aspect(aspect))
        if found is None:
            raise plans.refusal(limit)
        return found

    def trim(self) -> None:
        """Gives the arena, kept between runs, back to the system."""
        self._runner.trim()

    @property
    def device(self) -> str:
        return "cpu" if self._device is None else f"cuda:{self._device.number}"

    @property
    def dtype(self) -> str:
        return "float32" if self._device is None else self._device.dtype

    def __reduce__(self) -> Any:
        raise TypeError("VAE: cannot be pickled or copied: load it again where it is wanted")

    @property
    def parts(self) -> str:
        """``"all"``, ``"encoder"`` or ``"decoder"``."""
        return self._core.parts

    @property
    def reserved_bytes(self) -> int:
        """Held from the system now: weights, the arena, and outputs that are still referenced."""
        return self._core.reserved_bytes

    @property
    def unaccounted_bytes(self) -> int:
        """What a GPU has lost since this VAE was opened beside `reserved_bytes`: kernels, cuDNN's handle, and whatever
        else was taken there meanwhile, by anyone. The context itself was there before. 0 on the CPU."""
        if not self._device:
            return 0
        return self._device.backend.free_at_open - self._device.backend.memory()[0] - self.reserved_bytes

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""
        return sum(math.prod(shape) for _, shape in self._core.tensors)

    def __repr__(self) -> str:
        held = f"{self.reserved_bytes / 2**20:.0f} MiB held"
        where = f"{self.device} {self.dtype}, " if self._device else ""
        return f"<VAE {self.model}: {self.parameters:,} parameters, parts={self.parts}, {where}{held}>"

    # ---- inside ----

    def _limit(self, memory_limit: Limit) -> int:
        given = self.memory_limit if memory_limit is None else memory_limit
        return resolve(given, self._runner.held_bytes, self._device)

    def _resources(self) -> dict[str, int]:
        """Arguments of the core's plan and run: what they may use."""
        return {} if self._device else {"threads": as_int("threads", self.threads)}

    def _request(
        self, op: str, height: int, width: int, batch: int, output_type: str, staged: bool = True
    ) -> dict[str, Any]:
        height, width, batch = (as_int(n, v) for n, v in (("height", height), ("width", width), ("batch", batch)))
        floats = self.dtype if self._device and not staged else None
        return request_of(op, height, width, batch, pixels_of(output_type), floats) | self._resources()

    def _run(
        self,
        op: str,
        array: Any,
        pixels: str,
        out: Any,
        scaled: bool,
        progress: Progress,
        tiling: Tiling | None,
        memory_limit: Limit,
    ) -> Any:
        arrays: Any
        if self._device and Device.holds(array):
            arrays = DeviceArrays(self.arch, op, array, pixels, out, self._device)
        else:
            arrays = HostArrays(self.arch, op, array, pixels, out)
        limit = self._limit(memory_limit)
        choose("on_out_of_memory", self.on_out_of_memory, ("retry", "raise"))
        cache = None if self.cache_limit is None else parse_size("cache_limit", self.cache_limit, least=0)
        settings = Settings(self._resources(), self.graphs, self.on_out_of_memory == "retry", cache)
        if tiles := cut(self._runner, tiling, self.sample_size, arrays.request | settings.resources, limit):
            result, self.last_run = tiles.run(arrays, settings, progress, bool(scaled))
            return result
        with polling(progress, op) as poll:
            result, self.last_run = self._runner.run(arrays, settings, poll, limit, scaled=bool(scaled))
        return result


def backends() -> list[dict[str, Any]]:
    """The kernels this build has, the CPU's best first, then GPUs.

    Returns
    -------
    list of dict
        ``name``, ``device``, ``usable``, ``chosen`` (what runs on the CPU use), ``why`` (a sentence where not usable).

    Examples
    --------
    >>> [row["usable"] for row in backends() if row["name"] == "ref"]  # plain C
    [True]
    """
    rows: list[dict[str, Any]] = []
    for name, usable in _core.backends():
        chosen = usable and not any(row["chosen"] for row in rows)
        why = "" if usable else "this processor or its system lacks it, or it is named in VAEMEM_DISABLE"
        rows.append({"name": name, "device": "cpu", "usable": usable, "chosen": chosen, "why": why})
    return rows + gpu_rows()
