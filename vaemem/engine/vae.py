"""The VAE as a notebook uses it: load, encode, decode, and estimate a run."""

from __future__ import annotations

import warnings
from dataclasses import replace
from threading import Event
from typing import Any

from vaemem import _core
from vaemem._common import choose, flag, frames_factor, need
from vaemem._errors import ArgumentError, Named
from vaemem._types import Op
from vaemem.engine import images
from vaemem.engine.arguments import OutputType, Progress, as_int, check_mask, default_threads, pixels_of, polling
from vaemem.engine.arrays import Arrays, DeviceArrays, HostArrays, images_only, request_of
from vaemem.engine.device import Device
from vaemem.engine.latents import Normalised, Scaling, held_by_pipelines
from vaemem.engine.limits import Limit, Plans, check_aspect, parse_size, resolve
from vaemem.engine.model import Model
from vaemem.engine.records import Encoded, Run, make_run
from vaemem.engine.tiling import Tiling, advise_tiles, cut, tiles_of_video


class VAE(Model):
    """An AutoencoderKL, or FLUX.2's, with its weights, run by our own kernels. Make one with `load` or `random`.

    The VAE's memory goes back to the system when the last reference dies, with `close`, or at the end of a ``with``:

    >>> with VAE.random("sdxl", parts="decoder") as sdxl:
    ...     sdxl.decode(np.zeros((1, 4, 8, 8))).shape
    (1, 3, 64, 64)
    >>> sdxl
    <VAE sdxl: closed>

    Two threads that call one VAE wait for each other; two VAEs run in parallel. `estimate` never waits. A progress
    callback or signal handler may call `estimate` and `save` of the VAE that it interrupts. Any other call raises
    RuntimeError, also in the child of a fork during another thread's run.

    ``copy.deepcopy`` and pickle copy a VAE on the CPU whole: its weights and its settings.

    Attributes
    ----------
    model : str
        ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd3"``, ``"zimage"``, ``"cogview4"``, ``"playground-v2.5"``,
        ``"flux2"``, ``"flux2-small"``, ``"sd"`` (tensors of SD1.5 or SDXL, unknown which) or ``"custom"``.
    arch : dict
        The architecture, with diffusers' names.
    device, dtype, precision : str
        Where the VAE runs, the type of its numbers, and how it computes products, as in `load`.
    rounded : tuple of str
        Names of the weights that `dtype` cannot represent exactly, by diffusers' names. If there are none, the weights
        are exactly the file's. Known for a VAE on the CPU.
    threads : int
        Threads of runs on the CPU: VAEMEM_THREADS, or by default the processors that this process may use. The result
        does not depend on the number.
    memory_limit : int, str or None
        Limit for runs if the call sets none: bytes, ``"512 MiB"``, ``"2 GB"`` or ``"auto"``. None means no limit: the
        least memory that costs no extra work. See `decode`.
    cache_limit : int, str or None
        Free a larger arena after each run. None: always keep the arena for the next run.
    on_out_of_memory : {"retry", "raise"}
        If memory runs out: run again with the next smaller plan, which `Run.notes` reports, or raise MemoryError at
        once.
    graphs : bool
        On a GPU: keep each run as a CUDA graph and replay it for the same sizes and arrays.
    sample_size : int or None
        Default side of a `Tiling`'s tiles: the config's, as in diffusers.
    last_run : Run or None
        Record of the last encode or decode that succeeded.

    Examples
    --------
    >>> picture = vae.decode(np.zeros((1, 4, 16, 16)))  # vae: small, with random weights
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
        super().__init__(core, device, config)
        self.memory_limit: Limit = None
        self.cache_limit: Limit = None
        self.on_out_of_memory = "retry"
        self.graphs = False
        self.threads = default_threads()
        self.last_run: Run | None = None

    # ---- running ----

    def decode(
        self,
        z: Any,
        scaled: bool = False,
        output_type: OutputType = "float",
        progress: Progress = None,
        out: Any = None,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
        size: tuple[int, int] | None = None,
        cancel: Event | None = None,
    ) -> Any:
        """Decode latents to images.

        Parameters
        ----------
        z : array of real numbers, shape (N, C, h, w), or (N, C, F, h, w) for videos
            C latent channels; the image is 8h by 8w for most models (docs/MODEL.md). F latent frames become
            4 (F - 1) + 1 frames, with LTX-2's VAEs 8 (F - 1) + 1 (`load` with ``videos``). In host memory, any type
            and strides. In a GPU's memory (any library with DLPack), contiguous float32, float16 or bfloat16. Only
            host memory for a GPU is copied.
        scaled : bool
            z is scaled as in a pipeline: decode z / scaling + shift. With latents_mean and latents_std in the config
            (Playground), decode z * std / scaling + mean. For FLUX.2, z is packed, (N, 4C, h / 2, w / 2), with the 2x2
            pixels of a channel next to each other: unpack and decode z * std + mean of its BatchNorm. The last two
            need z in host memory and copy it.
        output_type : {"float", "uint8", "pil"}
        progress : bool or callable
            True shows a tqdm bar; a callable gets (rows done, rows to do). An exception from it ends the run.
        out : ndarray, optional
            Array for the result: its shape and dtype, contiguous, aligned, and apart from z. After an error or an
            interrupt its contents are undefined.
        memory_limit : int or str, optional
            Limit for `Run.peak_bytes` and `Run.reserved_bytes`, weights and output included: bytes, ``"512 MiB"``,
            ``"2 GB"`` (decimal), or ``"auto"``. "auto" is the memory that the VAE holds, plus the memory that is free
            when the run begins, less a reserve for others: an eighth of the free memory, at most 1 GiB. On a CPU, free
            memory is the least of MemAvailable and of the cgroups' limits. None: the attribute `memory_limit`.
            `Run.work` is the cost of a limit. The result has the same bits under every limit, on a CPU and on a GPU
            with ``convolution="own"``; with cuDNN the last bits may change.
        tiling : Tiling, optional
            Decode in tiles, as diffusers does. Tiles are not exact, and cannot be combined with a limit. On a GPU the
            call waits for the run.
        size : (int, int), optional
            Height and width to crop the images to, from the top left, as in `Encoded.size` after padding. The result
            is then a view.
        cancel : threading.Event, optional
            Once any thread sets it, the run ends at the next step with `vaemem.Cancelled`. On a GPU the call then
            waits for the run.
        Returns
        -------
        ndarray or list
            "float": float32 (N, 3, H, W), nominally in [-1, 1], never clamped. "uint8": (N, H, W, 3), clamped and
            rounded. "pil": N Pillow images made from "uint8"; for z in host memory. Of videos (N, 3, F, H, W) and
            (N, F, H, W, 3), and "pil" N lists of images. The caller owns the memory. For z
            in a GPU's memory: an array of z's library (a `DeviceArray` if we do not know it), for "float" with z's
            dtype. The work runs on the current stream of torch or CuPy and may still be under way.

        Raises
        ------
        ValueError, TypeError, MemoryError, KeyboardInterrupt
            The VAE stays usable and the run's memory is freed. A limit below the smallest plan is a ValueError with the
            attribute ``smallest`` (bytes).
        vaemem.Cancelled
            `cancel` was set. The VAE stays usable.
        RuntimeError
            The GPU reported an error.

        Examples
        --------
        >>> latents = np.random.default_rng(0).standard_normal((1, 4, 16, 16))
        >>> picture = vae.decode(latents, output_type="uint8")
        >>> picture.shape, picture.dtype
        ((1, 128, 128, 3), dtype('uint8'))
        >>> limit = vae.smallest("decode", 128, 128, output_type="uint8")
        >>> bool((vae.decode(latents, output_type="uint8", memory_limit=limit) == picture).all())
        True
        >>> vae.decode(latents, output_type="uint8", size=(125, 126)).shape, vae.last_run.notes
        ((1, 125, 126, 3), ('cropped from 128x128 to 125x126',))
        >>> button = threading.Event()
        >>> button.set()  # from another thread, at any time
        >>> try:
        ...     vae.decode(latents, cancel=button)
        ... except vaemem.Cancelled:
        ...     print("pressed")
        pressed
        """
        if output_type == "pil":
            need("PIL.Image", "output_type='pil'")
            channels = self.arch["out_channels"]
            cannot = {"z in a GPU's memory": Device.holds(z), "out=": out is not None}
            for why, wrong in (cannot | {f"images of {channels} channels": channels != 3}).items():
                if wrong:
                    raise ArgumentError("output_type", f"float or uint8 for {why}", "'pil'")
        check_mask("z", z)
        latents = self._latents(z) if flag("scaled", scaled) else None
        z = latents.raw(z) if isinstance(latents, Normalised) else z
        arrays = self._arrays("decode", z, pixels_of(output_type), out, latents)
        index, arrays.notes = images.crop(size, arrays.request)
        result = self._run(arrays, progress, tiling, memory_limit, cancel)
        result = result[index] if index else result
        return images.to_pillow(result) if output_type == "pil" else result

    def encode(
        self,
        x: Any,
        scaled: bool = False,
        progress: Progress = None,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
        pad: str | None = None,
        cancel: Event | None = None,
    ) -> Encoded:
        """Encode images to a distribution over latents.

        Parameters
        ----------
        x : array, shape (N, 3, H, W) or, if uint8, (N, H, W, 3); of videos (N, 3, F, H, W) or (N, F, H, W, 3)
            Real numbers nominally in [-1, 1], or bytes v, which become v / 127.5 - 1. H and W are multiples of 8 (of
            32 for LTX-2's VAEs). The last frames of a video that fill no latent frame are dropped, with a note. Or a
            Pillow image, an image file (its path or its bytes), or a list of N of them in one size: they become RGB
            bytes, without alpha, rotated as EXIF says. Only one of several frames is used, and 16 bits a channel become
            8; `Run.notes` reports what was lost. Arrays in host memory with numbers from 0 to more than 2 are refused.
        scaled : bool
            `Encoded.sample` and `Encoded.mode` return (latent - shift) * scaling, as pipelines hold it; normalised or
            packed as `decode` takes it, with x in host memory.
        progress, tiling, memory_limit, cancel
            As for `decode`. With tiles, the moments are blended and then clamped.
        pad : {"reflect", "edge"}, optional
            Pad sizes that are no multiples of 8 at the bottom and right; `Run.notes` reports it. None refuses them. For
            arrays in host memory only.

        Returns
        -------
        Encoded

        Examples
        --------
        >>> photo = np.zeros((1, 61, 50, 3), np.uint8)  # or "photo.jpg", or a Pillow image
        >>> encoded = vae.encode(photo, pad="reflect")
        >>> encoded.sample(0).shape, vae.last_run.notes
        ((1, 4, 8, 7), ('padded from 61x50 to 64x56 (reflect)',))
        >>> vae.decode(encoded.mode(), size=encoded.size, output_type="uint8").shape
        (1, 61, 50, 3)
        """
        x, notes = images.read_images(x)
        if pad is not None and self._device and Device.holds(x):
            raise ArgumentError("pad", "an array in host memory", "one in a GPU's", "pad it there, or copy it")
        latents = self._latents(x) if flag("scaled", scaled) else None
        x, dropped = images.whole_frames(x, frames_factor(self.arch) if self.arch.get("videos") else 1)
        padded, done = images.pad(x, pad, self._runner.factor)
        arrays = self._arrays("encode", padded, "", None, latents)
        arrays.notes = (*notes, *dropped, *done)
        if isinstance(arrays, HostArrays):
            images.check_range(arrays.data)
        moments = self._run(arrays, progress, tiling, memory_limit, cancel)
        size = images.image_size(x) if done else (arrays.request["height"], arrays.request["width"])
        return Encoded(moments, latents.held if latents else None, size, self.arch["latent_channels"])

    def estimate(
        self,
        op: Op,
        height: int,
        width: int,
        batch: int = 1,
        output_type: OutputType = "float",
        staged: bool = True,
        tiling: Tiling | None = None,
        memory_limit: Limit = None,
        frames: int = 1,
    ) -> Run:
        """Estimate a run before it, to the byte.

        Parameters
        ----------
        op : {"encode", "decode"}
        height, width : int
            The image's size, in pixels.
        batch : int
        output_type : {"float", "uint8", "pil"}
            Result of a decode; "pil" counts as "uint8". With ``out=`` a run needs no output bytes, except for a staged
            run's copy on a GPU.
        staged : bool
            On a GPU: True if the arrays are in host memory and are copied to the GPU's and back. False if they are in
            the GPU's, with latents and floats in `dtype`.
        tiling : Tiling, optional
            As for `decode`. Counts one tile's run, the result, and as scratch the tile and the borders to blend with.
        memory_limit : int or str, optional
            As for `decode`.
        frames : int
            Of each video, 1 more than a multiple of 4, or of 8 for LTX-2; 1 for images.

        Returns
        -------
        Run
            Equal to the later `last_run`, except for seconds and notes of padding and cropping.
        """
        limit = self._limit(memory_limit)
        request = self._request(op, height, width, batch, output_type, staged, frames)
        tiles = cut(self._runner, tiling, self.sample_size, request, limit)
        if tiles:
            return tiles.estimate()
        with advise_tiles(self._runner, self.sample_size, request, limit):
            return make_run(request, Plans(self._core, request).within(limit))

    def tradeoff(
        self, op: Op, height: int, width: int, batch: int = 1, output_type: OutputType = "float", staged: bool = True,
        frames: int = 1,
    ) -> tuple[Run, ...]:  # fmt: skip
        """Estimate every plan worth choosing, from the fastest to the smallest. Each plan needs less memory and more
        work than the one before. Arguments are `estimate`'s. `vaemem.tradeoff` returns them as a table."""
        request = self._request(op, height, width, batch, output_type, staged, frames)
        return tuple(make_run(request, record) for record in Plans(self._core, request).curve())

    def smallest(
        self, op: Op, height: int, width: int, batch: int = 1, output_type: OutputType = "float", staged: bool = True,
        frames: int = 1,
    ) -> int:  # fmt: skip
        """Return the smallest `memory_limit`, in bytes, that will do. Arguments are `estimate`'s."""
        return Plans(self._core, self._request(op, height, width, batch, output_type, staged, frames)).smallest()[0]

    def largest(
        self,
        op: Op,
        memory_limit: Limit = None,
        aspect: float = 1.0,
        batch: int = 1,
        output_type: OutputType = "float",
        staged: bool = True,
        frames: int = 1,
    ) -> tuple[int, int]:
        """Return (height, width) of the largest image within a limit, by bisection, and by trying larger images until
        none of the next 4, in steps of one latent pixel, fits.

        `smallest` is not quite monotone in the size: sometimes a still larger image fits too, or a smaller one does
        not.

        Parameters
        ----------
        op : {"encode", "decode"}
        memory_limit : int or str, optional
            As for `decode`.
        aspect : float
            Width over height, as close as whole latent pixels allow.
        batch, output_type, staged, frames
            As for `estimate`.

        Raises
        ------
        ValueError
            No size fits, or there is no limit.
        """
        limit, side = self._required_limit(memory_limit), self._runner.factor
        plans = Plans(self._core, self._request(op, side, side, batch, output_type, staged, frames))
        found = plans.largest(limit, check_aspect(aspect), further=4)
        if found is None:
            raise plans.refusal(limit)
        return found

    def largest_batch(
        self,
        op: Op,
        height: int,
        width: int,
        memory_limit: Limit = None,
        output_type: OutputType = "float",
        staged: bool = True,
        frames: int = 1,
    ) -> int:
        """Return the largest batch within a limit, at most 65,536 images, by bisection. Arguments are `estimate`'s.

        A batch runs image by image, and no larger batch needs less memory. On a CPU, or with arrays in a GPU's memory,
        each image adds its result to `smallest`, and nothing more. With arrays in host memory, a GPU holds two images'
        arrays at most, so all batches of two or more need the same memory.

        Raises
        ------
        ValueError
            Not even one image fits, or there is no limit.

        Examples
        --------
        >>> images = vae.largest_batch("encode", 256, 256, "32 MiB")
        >>> vae.smallest("encode", 256, 256, images) <= 32 << 20 < vae.smallest("encode", 256, 256, images + 1)
        True
        """
        limit = self._required_limit(memory_limit)
        plans = Plans(self._core, self._request(op, height, width, 1, output_type, staged, frames))
        if not (found := plans.largest_batch(limit)):
            raise plans.refusal(limit)
        return found

    def largest_frames(
        self,
        op: Op,
        height: int,
        width: int,
        memory_limit: Limit = None,
        batch: int = 1,
        output_type: OutputType = "float",
    ) -> int:
        """Return the largest number of frames within a limit, 1 more than a multiple of 4 (LTX-2: of 8), by bisection.
        Arguments are `estimate`'s.

        Raises
        ------
        ValueError
            Not even one frame fits, there is no limit, or the VAE was loaded for images.

        Examples
        --------
        >>> wan = VAE.random("qwen-image", parts="decoder", dtype="bfloat16", videos=True)
        >>> frames = wan.largest_frames("decode", 480, 832, "1.3 GB")
        >>> frames, wan.smallest("decode", 480, 832, frames=frames) <= 1.3e9
        (..., True)
        """
        if not self.arch.get("videos"):
            raise images_only("frames", "a search for more")
        limit = self._required_limit(memory_limit)
        plans = Plans(self._core, self._request(op, height, width, batch, output_type, True))
        if not (found := plans.longest(limit, frames_factor(self.arch))):
            raise plans.refusal(limit)
        return found

    def trim(self) -> None:
        """Free the arena that is kept between runs, and forget the factor by which float16 avoids overflow."""
        self._runner.forget()

    # ---- inside ----

    def _limit(self, memory_limit: Limit) -> int:
        given = self.memory_limit if memory_limit is None else memory_limit
        return resolve(given, self._runner.held_bytes, self._device)

    def _required_limit(self, memory_limit: Limit) -> int:
        """Return a limit in bytes; ValueError if there is none."""
        if not (limit := self._limit(memory_limit)):
            raise ArgumentError("memory_limit", "a limit, here or as the VAE's attribute", "None")
        return limit

    def _latents(self, array: Any) -> Scaling | Normalised:
        """Return how pipelines hold latents. array: input of a run; ValueError if a GPU's cannot be scaled."""
        latents = held_by_pipelines(self.arch, self._core.get_tensor)
        if isinstance(latents, Normalised) and self._device and Device.holds(array):
            wanted = f"arrays in host memory for {self.model}, whose latents are normalised channel by channel"
            raise ArgumentError("scaled", wanted, "one in a GPU's", "normalise there and leave scaled out")
        if isinstance(latents, Scaling) and self.arch["scaling_factor"] is None:
            unknown = "the weights do not tell the scaling factor (sd15 and sdxl have the same tensors)"
            raise ArgumentError("scaled", "", unknown, ("load with ", Named("model"), " or ", Named("config")))
        return latents

    def _threads(self) -> dict[str, int]:
        """Return the threads as an argument of the core's plan and run."""
        return {"threads": 1 if self._device else as_int("threads", self.threads)}

    def _request(
        self, op: Op, height: int, width: int, batch: int, output_type: OutputType, staged: bool, frames: int = 1
    ) -> dict[str, Any]:
        given = {"height": height, "width": width, "batch": batch, "frames": frames}
        height, width, batch, frames = (as_int(name, value) for name, value in given.items())
        if frames < 1:
            raise ArgumentError("frames", "a positive number", str(frames))
        if frames > 1 and not self.arch.get("videos"):
            raise images_only("frames", str(frames))
        floats = self.dtype if self._device and not staged else None
        return request_of(op, height, width, batch, pixels_of(output_type), floats, frames) | self._threads()

    def _arrays(self, op: str, array: Any, pixels: str, out: Any, latents: Scaling | Normalised | None) -> Arrays:
        if self._device and Device.holds(array):
            arrays: Arrays = DeviceArrays(self.arch, op, array, pixels, out, self._device)
        else:
            arrays = HostArrays(self.arch, op, array, pixels, out, self._device)
        arrays.request |= self._threads() | {"scaled": isinstance(latents, Scaling)}
        return arrays

    def _run(
        self, arrays: Arrays, progress: Progress, tiling: Tiling | None, memory_limit: Limit, cancel: Event | None
    ) -> Any:
        limit, runner, op = self._limit(memory_limit), self._runner, arrays.request["op"]
        if tiling is not None and len(arrays.shape) == 5:
            raise tiles_of_video(tiling)
        choose("on_out_of_memory", self.on_out_of_memory, ("retry", "raise"))
        cache = None if self.cache_limit is None else parse_size("cache_limit", self.cache_limit, least=0)
        tiles = cut(runner, tiling, self.sample_size, arrays.request, limit)
        retries = self.on_out_of_memory == "retry"
        advising = advise_tiles(runner, self.sample_size, arrays.request, limit)
        with advising, polling(progress, op, cancel, tiles.label if tiles else None) as poll:
            result, run = (tiles or runner).run(arrays, poll, limit, retries, cache, replay=self.graphs)
        self.last_run = replace(run, notes=arrays.notes + run.notes)
        if not run.finite:
            warnings.warn(f"{op}: the result is not finite", RuntimeWarning, stacklevel=3)
        return result
