"""The part of a VAE that `vae` builds on: make, save and close one; and the Runner that runs it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vaemem import _core
from vaemem._common import latent_factor
from vaemem._core import Model as Core
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._numpy import np
from vaemem.engine import weights
from vaemem.engine.arguments import Poll
from vaemem.engine.arrays import Arrays, DeviceTile
from vaemem.engine.configs import Arch, known_arch, read_config, sample_size_of
from vaemem.engine.device import Device, open_device
from vaemem.engine.limits import Plans, needed_bytes
from vaemem.engine.records import Run, make_run

if TYPE_CHECKING:  # names of Literals too: jedi cannot complete a property that returns one at run time
    from typing import Self

    from vaemem._types import Dtype, DtypeName, Precision


# In some models float16 activations overflow. GroupNorm cancels any factor, so a power of two costs only the last bits
# of the smallest numbers.
UNIT_STEP = 2.0**-4
LEAST_UNIT = 2.0**-12


class Runner:
    """A model on its device, and the memory and settings that one run leaves for the next."""

    def __init__(self, core: Core, device: Device | None, scale: float = 1.0) -> None:
        self.core, self.device, self.arch, self.factor = core, device, core.arch, latent_factor(core.arch)
        self.dtype, self.precision = core.dtype, (device or core).precision
        if device and self.precision == "fp8" and not device.backend.fp8_weights:
            wanted = "highest, or fp8 with a VAE for images whose 3x3 convolutions follow norms"
            raise ArgumentError("precision", wanted, "fp8 with a VAE that has no such convolution")
        self._scale = scale  # power of two that multiplies activations, so that float16 does not overflow
        self._weights_bytes, self._arena_bytes = core.reserved_bytes, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        core = self._on_the_cpu()
        return Runner(weights.copy(core, dtype=self.dtype, precision=self.precision), None, self._scale)

    def __reduce__(self) -> Any:
        core, where = self._on_the_cpu(), dict(dtype=self.dtype, precision=self.precision)
        return _unpickle, (core.arch, core.parts, list(weights.kept(core)), where, self._scale)

    def _on_the_cpu(self) -> Core:
        if self.device:
            raise ArgumentTypeError("VAE", "a VAE on the cpu to copy or to pickle", f"one on cuda:{self.device.number}")
        return self.core

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and arena; 0 for the arena if a failed run freed it."""
        return self._weights_bytes + min(self._arena_bytes, self.core.reserved_bytes - self._weights_bytes)

    def trim(self) -> None:
        """Free the arena."""
        self.core.trim()
        self._arena_bytes = 0

    def forget(self) -> None:
        """Make the next run start as the first one did: without an arena, and without a factor against overflow."""
        self.trim()
        self._scale = 1.0

    def run(
        self, arrays: Arrays | DeviceTile, poll: Poll, limit: int, retries: bool, cache_bytes: int | None, **how: Any
    ) -> tuple[Any, Run]:
        """Return the result and its record.

        Run again if memory ran out and `retries`, with the next smaller plan; and if float16 overflowed, with smaller
        activations. cache_bytes: free an arena larger than this after the run. how: other arguments of the core's run.
        """
        start, plans, notes = time.perf_counter(), Plans(self.core, arrays.request), list[str]()
        how |= dict(poll=poll, wait=arrays.waits or poll is not None)
        while True:
            try:
                result, record = arrays.run(self.core, memory_limit=limit, scale=self._scale, **how)
            except ValueError as error:
                if hasattr(error, "smallest"):
                    raise plans.refusal(limit) from None
                raise
            except MemoryError as error:
                failed = plans.within(limit)
                smaller = plans.smaller(failed) if retries else None
                if not smaller:
                    raise (plans.out_of_memory(error, failed, self.device) if self.device else error) from None
                limit = needed_bytes(failed) - 1
                notes.append(f"out of memory: run again within {limit} bytes, {smaller['work']:.2f} times the work")
                continue
            if not record["overflow"]:
                break
            if self.dtype != "float16" or self._scale <= LEAST_UNIT:
                what = f"{self.dtype}: not finite{' even so' if self._scale < 1 else ''}"
                notes.append(f"{what}: the input or the weights are not, or are too large for it")
                self._scale = 1.0
                break
            self._scale *= UNIT_STEP
            notes.append(f"float16 overflowed: run again with activations multiplied by 1/{round(1 / self._scale)}")
        self._arena_bytes = record["arena"]
        if cache_bytes is not None and self._arena_bytes > cache_bytes:
            self.trim()
        return result, make_run(
            arrays.request, record, time.perf_counter() - start if how["wait"] else None, tuple(notes)
        )


def _unpickle(arch: Arch, parts: str, tensors: Any, where: dict[str, str], scale: float) -> Runner:
    return Runner(weights.make(arch, parts, tensors, **where), None, scale)


class Model:
    """Base of `vaemem.VAE` that runs nothing: it makes, saves and closes one, and has its attributes."""

    def __init__(self, core: Core, device: Device | None = None, config: Any = None) -> None:
        self._open: Runner | None = Runner(core, device)
        self.arch = self._runner.arch
        self.model: str = self.arch["name"]
        self.sample_size = sample_size_of(config, self.model)
        self.rounded = () if device else tuple(core.rounded())

    # ---- making one ----

    @classmethod
    def load(
        cls,
        path: Any,
        model: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: Any = "cpu",
        dtype: Dtype = "float32",
        precision: Precision = "highest",
        autotune: bool = False,
        convolution: str = "auto",
        videos: bool | None = None,
    ) -> Self:
        """Load a safetensors, GGUF or PyTorch file, a diffusers directory, or tensors in memory.

        Parameters
        ----------
        path : path, mapping or module
            * A file: safetensors, GGUF or PyTorch (``.pth``; its pickle runs no code). Its layout is detected:
              diffusers, LDM/SD checkpoint, BFL, Wan, LTX-2 or TAESD. Tensors are float32, float16, bfloat16 or float8.
              GGUF may have any type that the ``gguf`` package decodes (Q8_0, Q4_0, Q4_K...); it becomes float32.
            * A diffusers directory, of a VAE or of a pipeline with a ``vae``. Its ``config.json`` is the architecture.
            * A downloaded repository of the Hub, ``"stabilityai/sdxl-vae"``, in the Hub's local cache.
            * A state dict with the same names, of NumPy arrays or of torch tensors on any device.
            * A module with such a ``state_dict()``. Its ``config``, if it has one, is the architecture.

            Tensors may be nested under ``ema``, ``state_dict``, ``model`` or ``vae``, in files too; averages (``ema``)
            come first. Tensors are copied. Weights that `save` wrote to a directory contain their config. If
            ``config.json`` differs from that config, the weights' config decides, and a warning says how the two
            differ.
        model : str, optional
            A known model, as listed for the attribute `model`. A named model overrides the file and must fit the file's
            tensors. The name is needed only for ``scaled=True`` with a file that holds a VAE alone: SD1.5, SDXL and
            Playground have the same tensors, and so have FLUX and SD3. A whole checkpoint tells its model.
        config : path or mapping, optional
            The ``config.json`` of an AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan,
            AutoencoderKLLTX2Video or AutoencoderTiny, for any other architecture. A config overrides the file too.
        parts : {"all", "encoder", "decoder"}
            Which half to read. The file may lack the other half; its tensors are ignored.
        device : str
            ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype : {"float32", "float16", "bfloat16"}
            Type of weights and activations; sums and statistics are float32. Arrays in host memory are float32 or bytes
            with every dtype. Weights of another type are rounded; the attribute `rounded` and the VAE's repr say so.
            Weights beyond its range are refused.
        precision : {"highest", "high", "medium", "fp8"}
            How products are computed. "high" and "medium" are for float32, as in
            ``torch.set_float32_matmul_precision``. "highest": in the type itself, float32 in float32.
            "high": a CPU with fast bfloat16 products may use three of them, on the leading 16 bits of each factor.
            "medium": it may use one. A GPU may round factors to TF32 (10 bits) with both; it must have compute
            capability 8.0. A CPU without such products always uses "highest".
            "fp8": for bfloat16 and float16 on a GPU of compute capability 9.0, and for images. The 3x3 convolutions of
            residual blocks multiply numbers of 8 bits (e4m3); everything else is as with "highest". The results have
            about nine times the error of bfloat16 (docs/CUDA.md). No GPU has run it.
        autotune : bool
            On a GPU: time cuDNN's engines in the first run of a size, instead of using the first that its heuristics
            suggest.
        convolution : {"auto", "cudnn", "own"}
            On a GPU: which convolution runs. Our own (float16 and bfloat16) computes a pass in one kernel, without
            stripes and with less memory; cuDNN still computes passes that fit none of our tiles. "auto" means our own
            on GPUs of compute capability 9.0 (H100, H200), because it measured faster there. "auto" means cuDNN on
            other GPUs, in float32 and with autotune.
        videos : bool, optional
            Run videos too: keep the filters of all frames (three times the weights of images alone), for the VAEs of
            Wan. None: for a config of the class AutoencoderKLWan. Tensors alone do not tell Wan 2.1's from
            Qwen-Image's: pass True. LTX-2's VAEs always run videos. On a GPU cuDNN computes them, and an image is then
            a video of one frame; Wan 2.2's are refused there.

        Raises
        ------
        ValueError
            A bad argument; a file that is damaged, of another kind or of no VAE (one from before PyTorch 1.6: the error
            says how to convert it); a tensor that is missing, extra, misshapen, cut, of another dtype or without
            numbers (on "meta", sparse, masked); a weight beyond the range of `dtype`. After any error nothing stays
            allocated.
        OSError
            The file cannot be read. FileNotFoundError: there is no such file, or no weights or config in a directory.
        ImportError
            Quantised tensors without the ``gguf`` package: ``pip install 'vaemem[gguf]'``.
        MemoryError
            The weights do not fit into memory.
        RuntimeError
            There is no driver or no cuDNN, or the GPU reported an error.

        Examples
        --------
        >>> vae.save("model")
        >>> VAE.load("model", parts="decoder")
        <VAE custom: ... parameters, parts=decoder, ... MiB held>
        >>> half = VAE.load("model", dtype="bfloat16")
        >>> half
        <VAE custom: ... parameters, parts=all, cpu bfloat16, ... tensors rounded, ... MiB held>
        >>> "decoder.conv_in.weight" in half.rounded, "decoder.conv_in.bias" in half.rounded
        (True, False)
        >>> VAE.load("model", precision="high").precision
        'high'
        """
        gpu, where = open_device(device, dtype, precision, autotune, convolution)
        core, config = weights.read(path, model, config, parts, videos, **where)
        return cls(core, gpu, config)

    @classmethod
    def random(
        cls,
        model: str = "sdxl",
        seed: int = 0,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        parts: str = "all",
        device: Any = "cpu",
        dtype: Dtype = "float32",
        precision: Precision = "highest",
        autotune: bool = False,
        convolution: str = "auto",
        videos: bool | None = None,
    ) -> Self:
        """Make a VAE with random weights of the real shapes: PyTorch's default initialisation, random norm affines.

        The same seed, 0 or more, gives the same tensors for all parts. ``config=`` replaces the model's architecture.
        The other arguments and errors are those of `load`.

        Examples
        --------
        >>> VAE.random("sdxl", parts="decoder").parameters
        49490199
        """
        gpu, where = open_device(device, dtype, precision, autotune, convolution)
        arch = known_arch(model) if config is None else read_config(config)
        core = _core.Model(weights.with_videos(arch, videos, config), parts, **where)
        weights.random_tensors(core, seed)
        return cls(core, gpu, config)

    def copy(
        self,
        device: Any = "cpu",
        dtype: Dtype | None = None,
        precision: Precision | None = None,
        autotune: bool = False,
        convolution: str = "auto",
    ) -> Self:
        """Make a new VAE with the weights of this one.

        This one must be on the CPU and, for another dtype, must not have rounded any weights. Arguments are `load`'s;
        dtype and, for float32, precision default to this VAE's.

        >>> one = VAE.random("sdxl", parts="decoder")
        >>> two = one.copy()    # or device="cuda", dtype="bfloat16" on a GPU
        >>> one.close(), two.parameters
        (None, 49490199)
        """
        source = self._on_the_cpu("copy")
        dtype = self.dtype if dtype is None else dtype
        if self.rounded and dtype != self.dtype:
            got = f"weights that rounded {len(self.rounded)} tensors, such as {self.rounded[0]}"
            raise ArgumentError("copy", f"weights that {self.dtype} gives exactly", got, f"load it in {dtype}")
        if precision is None:
            precision = self.precision if dtype == "float32" else "highest"
        gpu, where = open_device(device, dtype, precision, autotune, convolution)
        made = type(self)(weights.copy(source, **where), gpu)
        made.sample_size, made.rounded = self.sample_size, self.rounded or made.rounded
        return made

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copy the weights of a VAE on the CPU as float32 arrays, by diffusers' names.

        A video VAE that was loaded for images keeps only the slices of its filters that one frame uses; others are
        zero.

        >>> VAE.load(vae.state_dict()).parameters == vae.parameters
        True
        """
        core = self._on_the_cpu("state_dict")
        return {name: core.get_tensor(name) for name, _ in core.tensors}

    def save(self, path: str | os.PathLike[str], layout: str = "diffusers") -> None:
        """Write the weights as safetensors, each tensor in its stored type: the VAE's dtype; float32 for biases and
        norms. Loading the file with the same dtype gives this VAE again, bit for bit.

        >>> vae.copy(dtype="bfloat16").save("half.safetensors")  # about half of the file

        Parameters
        ----------
        path : path
            A ``.safetensors`` file. For ``"diffusers"`` also a directory, created if needed, with a ``config.json``. A
            single file does not hold norm_num_groups or the scaling. Weights in a directory also contain the config,
            and `load` uses that one: a save that is killed leaves the old VAE or the new one, never a mixture. One save
            at a time writes to a directory; others wait.
        layout : {"diffusers", "ldm", "bfl"}
            ``"ldm"`` needs both quant convs; ``"bfl"`` needs the middle attention and no quant convs.

        Raises
        ------
        ValueError
            The layout is unknown or cannot hold the model; the path is of the wrong kind; the VAE is of videos, and is
            not kept whole; or it is on a GPU, where weights have another form.
        OSError
            The file cannot be written. Its earlier contents are unchanged. One exception: new weights of a directory
            are in place but ``config.json`` cannot be replaced. Then the old ``config.json`` stays and `load` warns.
        """
        weights.save(self._on_the_cpu("save"), path, layout=layout, sample_size=self.sample_size)

    # ---- closing ----

    def close(self) -> None:
        """Free weights and arena; results stay with their owners. Wait for a run in another thread to end.

        A closed VAE raises ValueError for anything but another close.

        >>> one = vae.copy()
        >>> one.close()
        >>> one.closed
        True
        """
        self._open = None

    @property
    def closed(self) -> bool:
        """Whether the VAE was closed."""
        return self._open is None

    def __enter__(self) -> Self:
        _ = self._runner  # raises if the VAE is closed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- properties ----

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:N"``."""
        return "cpu" if self._device is None else f"cuda:{self._device.number}"

    @property
    def dtype(self) -> DtypeName:
        """Type of weights and activations."""
        return self._runner.dtype

    @property
    def precision(self) -> Precision:
        """How float32 products are computed, as in `load`."""
        return self._runner.precision

    @property
    def parts(self) -> str:
        """``"all"``, ``"encoder"`` or ``"decoder"``."""
        return self._core.parts

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the system now: weights, the arena, and outputs that are still referenced."""
        return self._core.reserved_bytes

    @property
    def unaccounted_bytes(self) -> int:
        """Bytes that this VAE took from a GPU in addition to `reserved_bytes`: kernels, cuDNN's handle, CUDA graphs.

        Each is the difference in free memory around its load, first run or capture, so allocations by other programs at
        these moments count too. The context is not included. 0 on the CPU."""
        return max(self._device.backend.unaccounted, 0) if self._device else 0

    @property
    def parameters(self) -> int:
        """Number of numbers in the weights."""
        return sum(math.prod(shape) for _, shape in self._core.tensors)

    def __repr__(self) -> str:
        if self.closed:
            return f"<VAE {self.model}: closed>"
        held = f"{self.reserved_bytes / 2**20:.0f} MiB held"
        numbers = [self.device, self.dtype, self.precision][: 2 if self.precision == "highest" else 3]
        where = "" if numbers == ["cpu", "float32"] else f"{' '.join(numbers)}, "
        where += f"{len(self.rounded)} tensors rounded, " if self.rounded else ""
        return f"<VAE {self.model}: {self.parameters:,} parameters, parts={self.parts}, {where}{held}>"

    # ---- inside ----

    @property
    def _runner(self) -> Runner:
        if self._open is None:
            raise ArgumentError("VAE", "an open one", "one that was closed", "load it again")
        return self._open

    @property
    def _core(self) -> Core:
        return self._runner.core

    @property
    def _device(self) -> Device | None:
        return self._runner.device

    def _on_the_cpu(self, wish: str) -> Core:
        """Return the core model, which has readable weights on the CPU; ValueError on a GPU. wish: for the message."""
        if self._device:
            raise ArgumentError(wish, "a VAE on the cpu", f"one on {self.device}, whose weights are {self.dtype}")
        return self._core
