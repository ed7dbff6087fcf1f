"""The VAE as a notebook sees it: load, encode, decode, and what a run takes."""

from __future__ import annotations

import warnings
from dataclasses import replace
from threading import Event
from typing import Any

from vaemem import _core
from vaemem._common import choose, flag, need
from vaemem._errors import ArgumentError, Named
from vaemem._types import Op
from vaemem.engine import images
from vaemem.engine.arguments import OutputType, Progress, as_int, check_mask, default_threads, pixels_of, polling
from vaemem.engine.arrays import Arrays, DeviceArrays, HostArrays, request_of
from vaemem.engine.device import Device
from vaemem.engine.latents import Normalised, Scaling, held_by_pipelines
from vaemem.engine.limits import Limit, Plans, check_aspect, parse_size, resolve
from vaemem.engine.model import Model
from vaemem.engine.records import Encoded, Run, make_run
from vaemem.engine.tiling import Tiling, advising_tiles, cut


class VAE(Model):
    """An AutoencoderKL, or FLUX.2's, with its weights, run by our own kernels. Make one with `load` or `random`.

    Its memory goes back to the system when the last reference to it dies, with `close`, or at the end of a ``with``:

    >>> with VAE.random("sdxl", parts="decoder") as sdxl:
    ...     sdxl.decode(np.zeros((1, 4, 8, 8))).shape
    (1, 3, 64, 64)
    >>> sdxl
    <VAE sdxl: closed>

    Two threads that call one VAE wait for each other; two VAEs run side by side. `estimate` waits for nobody. A
    progress callback or signal handler may call `estimate` and `save`, but nothing else of the VAE that it interrupts,
    nor may the child of a fork during another thread's run: RuntimeError.

    ``copy.deepcopy`` and pickle take a VAE on the CPU whole: its weights, and what was set on it.

    Attributes
    ----------
    model : str
        ``"sd15"``, ``"sdxl"``, ``"flux"``, ``"sd3"``, ``"zimage"``, ``"cogview4"``, ``"playground-v2.5"``,
        ``"flux2"``, ``"flux2-small"``, ``"sd"`` (SD1.5's and SDXL's tensors, which of the two unknown) or ``"custom"``.
    arch : dict
        The architecture, with diffusers' names.
    device, dtype, precision : str
        Where it lives, the type of its numbers, and how its products are computed, as `load` takes them.
    rounded : tuple of str
        Names of the weights that `dtype` could not give exactly and that were rounded, by diffusers' names; without any
        the VAE is what its file says. Of a VAE on the CPU.
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
        """Latents to images.

        Parameters
        ----------
        z : array of real numbers, shape (N, C, h, w)
            C latent channels; the image is 8h by 8w. In host memory of any type and strides. In a GPU's memory (any
            library with DLPack) contiguous float32, float16 or bfloat16. Not copied, unless host memory's go to a GPU.
        scaled : bool
            z is as a pipeline holds it: z / scaling + shift is decoded. Where the config has latents_mean and
            latents_std (Playground) z * std / scaling + mean. For FLUX.2 z is packed, (N, 4C, h / 2, w / 2) with the
            2x2 pixels of a channel side by side, and z * std + mean of its BatchNorm is unpacked and decoded. These two
            want z in host memory, and make a copy of it there.
        output_type : {"float", "uint8", "pil"}
        progress : bool or callable
            True shows a tqdm bar; a callable gets (rows done, rows to do). What it raises ends the run.
        out : ndarray, optional
            Written and returned; must have the result's shape and dtype, be contiguous, aligned and apart from z. After
            an error, an interrupt too, what it holds is undefined: some of it may have been written.
        memory_limit : int or str, optional
            Of `Run.peak_bytes` and `Run.reserved_bytes`, weights and output included: bytes, ``"512 MiB"``, ``"2 GB"``
            (decimal), or ``"auto"``: the bytes that the VAE holds and those that are free when the run begins (the
            least of MemAvailable and what the cgroups leave, or the GPU's), less an eighth of the latter, at most 1
            GiB, for others. None: the attribute `memory_limit`. `Run.work` says what a limit costs. On the CPU the
            result has the same bits under every limit, and on a GPU with ``convolution="own"``; with cuDNN the last
            ones may change.
        tiling : Tiling, optional
            In tiles, as diffusers does it: not exact, as a limit is, and no limit beside it. On a GPU the call waits
            for the run.
        size : (int, int), optional
            Height and width of the images: so much of the 8h by 8w ones, from the top left, as `Encoded.size` says of
            images that were padded. The result is a view then.
        cancel : threading.Event, optional
            Once it is set, by whichever thread, the run ends at the next step with `vaemem.Cancelled`. On a GPU the
            call waits for the run then.

        Returns
        -------
        ndarray or list
            "float": float32 (N, 3, H, W), nominally in [-1, 1], never clamped. "uint8": (N, H, W, 3), clamped and
            rounded. Its memory is the caller's. "pil": N of Pillow's images, made of "uint8"; z in host memory only.
            For z in a GPU's memory: an array of z's library (a `DeviceArray` where that is none we know) and, for
            "float", of z's dtype. The work is put on the stream where torch or CuPy put theirs and may still be under
            way.

        Raises
        ------
        ValueError, TypeError, MemoryError, KeyboardInterrupt
            The VAE stays usable and what the run took is given back. A limit below the smallest plan: ValueError with
            the attribute ``smallest`` (bytes).
        vaemem.Cancelled
            `cancel` was set. The VAE stays usable here too.
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
        >>> vae.decode(latents, output_type="uint8", size=(125, 126)).shape, vae.last_run.notes
        ((1, 125, 126, 3), ('cropped from 128x128 to 125x126',))
        >>> button = threading.Event()
        >>> button.set()  # by another thread, at any time
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
        """Images to a distribution over latents.

        Parameters
        ----------
        x : array, shape (N, 3, H, W) or, if uint8, (N, H, W, 3)
            Real numbers nominally in [-1, 1], or bytes, which become v / 127.5 - 1. H and W are multiples of 8.
            Or one of Pillow's images or an image file's path, or a list of N of them, which become bytes: RGB, without
            alpha, and a file turned as its EXIF says. All of a batch have one size. Of several frames one is taken, and
            16 bits a channel become 8; `Run.notes` says what was left out. In host memory, numbers from 0 to more than
            2 are refused: they are no image in [-1, 1].
        scaled : bool
            `Encoded.sample` and `Encoded.mode` give (latent - shift) * scaling, as pipelines pass them on; by channel,
            and for FLUX.2 packed, where `decode` takes them so, and then x must be in host memory.
        progress, tiling, memory_limit, cancel
            As for `decode`. Of tiles the moments are blended, and clamped then.
        pad : {"reflect", "edge"}, optional
            Sizes that are no multiples of 8 are padded to the next ones, at the bottom and on the right, which
            `Run.notes` then says. None refuses them. Arrays in host memory only.

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
        padded, done = images.pad(x, pad, self._runner.factor)
        arrays = self._arrays("encode", padded, "", None, latents)
        arrays.notes = (*notes, *done)
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
    ) -> Run:
        """What a run will take, to the byte, before it.

        Parameters
        ----------
        op : {"encode", "decode"}
        height, width : int
            The image's size, in pixels.
        batch : int
        output_type : {"float", "uint8", "pil"}
            What decode gives, "pil" counted as "uint8"; ``out=`` would take its bytes away (but not those of a staged
            one's place on a GPU).
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
            Equal to what `last_run` will say, but for the seconds and what it notes of padding and cropping.
        """
        limit = self._limit(memory_limit)
        request = self._request(op, height, width, batch, output_type, staged)
        tiles = cut(self._runner, tiling, self.sample_size, request, limit)
        if tiles:
            return tiles.estimate()
        with advising_tiles(self._runner, self.sample_size, request, limit):
            return make_run(request, Plans(self._core, request).within(limit))

    def tradeoff(
        self, op: Op, height: int, width: int, batch: int = 1, output_type: OutputType = "float", staged: bool = True
    ) -> tuple[Run, ...]:
        """Estimates of every plan worth choosing, from the fastest to the smallest: each takes less memory and more
        work than the one before. Arguments are `estimate`'s. `vaemem.tradeoff` gives them as a table."""
        request = self._request(op, height, width, batch, output_type, staged)
        return tuple(make_run(request, record) for record in Plans(self._core, request).curve())

    def smallest(
        self, op: Op, height: int, width: int, batch: int = 1, output_type: OutputType = "float", staged: bool = True
    ) -> int:
        """The smallest `memory_limit`, in bytes, that will do. Arguments are `estimate`'s."""
        return Plans(self._core, self._request(op, height, width, batch, output_type, staged)).smallest()[0]

    def largest(
        self,
        op: Op,
        memory_limit: Limit = None,
        aspect: float = 1.0,
        batch: int = 1,
        output_type: OutputType = "float",
        staged: bool = True,
    ) -> tuple[int, int]:
        """(height, width) of the largest image that a limit allows, by bisection and up to 4 latent pixels further.

        What `smallest` says does not always grow with the size: now and then an image beyond that fits too, or one
        below it does not.

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
            raise ArgumentError("memory_limit", "a limit, here or as the VAE's attribute", "None")
        side = self._runner.factor
        plans = Plans(self._core, self._request(op, side, side, batch, output_type, staged))
        found = plans.largest(limit, check_aspect(aspect), further=4)
        if found is None:
            raise plans.refusal(limit)
        return found

    def trim(self) -> None:
        """Gives the arena, kept between runs, back to the system."""
        self._runner.trim()

    # ---- inside ----

    def _limit(self, memory_limit: Limit) -> int:
        given = self.memory_limit if memory_limit is None else memory_limit
        return resolve(given, self._runner.held_bytes, self._device)

    def _latents(self, array: Any) -> Scaling | Normalised:
        """How pipelines hold latents; array: what a run is given."""
        latents = held_by_pipelines(self.arch, self._core.get_tensor)
        if isinstance(latents, Normalised) and self._device and Device.holds(array):
            wanted = f"arrays in host memory for {self.model}, whose latents are normalised channel by channel"
            raise ArgumentError("scaled", wanted, "one in a GPU's", "normalise there and leave scaled out")
        if isinstance(latents, Scaling) and self.arch["scaling_factor"] is None:
            unknown = "the weights do not tell the scaling factor (sd15 and sdxl have the same tensors)"
            raise ArgumentError("scaled", "", unknown, ("load with ", Named("model"), " or ", Named("config")))
        return latents

    def _threads(self) -> dict[str, int]:
        """An argument of the core's plan and run."""
        return {"threads": 1 if self._device else as_int("threads", self.threads)}

    def _request(
        self, op: Op, height: int, width: int, batch: int, output_type: OutputType, staged: bool
    ) -> dict[str, Any]:
        height, width, batch = (as_int(n, v) for n, v in (("height", height), ("width", width), ("batch", batch)))
        floats = self.dtype if self._device and not staged else None
        return request_of(op, height, width, batch, pixels_of(output_type), floats) | self._threads()

    def _arrays(self, op: str, array: Any, pixels: str, out: Any, latents: Scaling | Normalised | None) -> Arrays:
        if self._device and Device.holds(array):
            made: Arrays = DeviceArrays(self.arch, op, array, pixels, out, self._device)
        else:
            made = HostArrays(self.arch, op, array, pixels, out, self._device)
        made.request |= self._threads() | {"scaled": isinstance(latents, Scaling)}
        return made

    def _run(
        self, arrays: Arrays, progress: Progress, tiling: Tiling | None, memory_limit: Limit, cancel: Event | None
    ) -> Any:
        limit, runner, op = self._limit(memory_limit), self._runner, arrays.request["op"]
        choose("on_out_of_memory", self.on_out_of_memory, ("retry", "raise"))
        cache = None if self.cache_limit is None else parse_size("cache_limit", self.cache_limit, least=0)
        tiles = cut(runner, tiling, self.sample_size, arrays.request, limit)
        retries = self.on_out_of_memory == "retry"
        advising = advising_tiles(runner, self.sample_size, arrays.request, limit)
        with advising, polling(progress, op, cancel, tiles.says if tiles else None) as poll:
            result, run = (tiles or runner).run(arrays, poll, limit, retries, cache, replay=self.graphs)
        self.last_run = replace(run, notes=arrays.notes + run.notes)
        if not run.finite:
            warnings.warn(f"{op}: the result is not finite", RuntimeWarning, stacklevel=3)
        return result
