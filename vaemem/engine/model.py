"""A VAE as an object: how it is made, saved and closed, and what does its runs. `vae` adds what is asked of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from vaemem import _core
from vaemem._common import latent_factor
from vaemem._core import Model as Core
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._types import Dtype, DtypeName, Precision
from vaemem.engine import weights
from vaemem.engine.arguments import Poll
from vaemem.engine.arrays import Arrays, DeviceTile
from vaemem.engine.configs import Arch, known_arch, read_config, sample_size_of
from vaemem.engine.device import Device, open_device
from vaemem.engine.limits import Plans, taken
from vaemem.engine.records import Run, make_run

if TYPE_CHECKING:
    from typing import Self


# Activations overflow in some models' halves; GroupNorm takes any factor out again, so a power of two costs nothing but
# the smallest numbers' last bits.
UNIT_STEP = 2.0**-4
LEAST_UNIT = 2.0**-12


class Runner:
    """A model where it lives, and what one run leaves for the next."""

    def __init__(self, core: Core, device: Device | None, scale: float = 1.0) -> None:
        self.core, self.device, self.arch, self.factor = core, device, core.arch, latent_factor(core.arch)
        self.dtype, self.precision = core.dtype, (device or core).precision
        self._scale = scale  # power of two by which activations are kept multiplied, against float16's overflow
        self._weights_bytes, self._arena_bytes = core.reserved_bytes, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Runner:
        core = self._on_the_cpu()
        return Runner(weights.copy(core, dtype=self.dtype, precision=self.precision), None, self._scale)

    def __reduce__(self) -> Any:
        core, where = self._on_the_cpu(), dict(dtype=self.dtype, precision=self.precision)
        return _unpickled, (core.arch, core.parts, list(weights.kept(core)), where, self._scale)

    def _on_the_cpu(self) -> Core:
        if self.device:
            raise ArgumentTypeError("VAE", "a VAE on the cpu to copy or to pickle", f"one on cuda:{self.device.number}")
        return self.core

    @property
    def held_bytes(self) -> int:
        """What weights and arena take now; a run that failed has given the arena back."""
        return self._weights_bytes + min(self._arena_bytes, self.core.reserved_bytes - self._weights_bytes)

    def trim(self) -> None:
        self.core.trim()
        self._arena_bytes = 0

    def run(
        self, arrays: Arrays | DeviceTile, poll: Poll, limit: int, retries: bool, cache_bytes: int | None, **how: Any
    ) -> tuple[Any, Run]:
        """The result and what it took. Run again where memory ran out, with the next smaller plan if it `retries`, and
        where float16 overflowed, with activations kept smaller.

        cache_bytes: a larger arena is not kept for the next run. how: other arguments of the core's run.
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
                limit = taken(failed) - 1
                notes.append(f"out of memory: run again within {limit} bytes, {smaller['work']:.2f} times the work")
                continue
            if not record["overflow"]:
                break
            if self.dtype != "float16" or self._scale <= LEAST_UNIT:
                so = " even so" if self._scale < 1 else ""
                notes.append(f"{self.dtype}: not finite{so}: the input or the weights are not, or are too large for it")
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


def _unpickled(arch: Arch, parts: str, tensors: Any, where: dict[str, str], scale: float) -> Runner:
    return Runner(weights.make(arch, parts, tensors, **where), None, scale)


class Model:
    """The part of `vaemem.VAE` that runs nothing: making one, its weights, its attributes, its end."""

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
    ) -> Self:
        """Loads a safetensors or GGUF file, a diffusers directory, or tensors that are in memory.

        Parameters
        ----------
        path : path, mapping or module
            A safetensors, GGUF or PyTorch file (``.pth``, of which nothing is run) in diffusers, LDM/SD checkpoint,
            BFL, Wan or TAESD layout (detected), float32, float16, bfloat16 or float8, and in GGUF any type that the
            ``gguf`` package decodes (Q8_0, Q4_0, Q4_K...), which becomes float32; or a directory of diffusers' (a
            VAE's, or a pipeline's, in which ``vae`` is meant), whose ``config.json`` is then the architecture; or a
            repository on the Hub, ``"stabilityai/sdxl-vae"``, that was downloaded: its folder in the Hub's local cache
            is read. Or a state dict, of NumPy arrays or of torch tensors wherever they lie, by the same names. Tensors
            may lie under ``ema``, ``state_dict``, ``model`` or ``vae``, in files too; averages (``ema``) come first.
            Or a module with such a ``state_dict()``, whose ``config``, if it has one, is then the architecture.
            Tensors are copied. Weights that `save` wrote to a directory hold their config: that one decides, and a
            warning says how ``config.json`` differs.
        model : str, optional
            A known one, as the attribute `model` lists them: wins over what the file says, and must fit its tensors.
            Needed only if ``scaled=True`` follows and the file holds a VAE alone: SD1.5, SDXL and Playground have the
            same tensors, and so have FLUX and SD3. A whole checkpoint tells which one it is.
        config : path or mapping, optional
            An AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLWan or AutoencoderTiny
            ``config.json`` for any other architecture; wins likewise.
        parts : {"all", "encoder", "decoder"}
            Reads only that half; the file need not hold the other, whose tensors are not looked at.
        device : str
            ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype : {"float32", "float16", "bfloat16"}
            The type of weights and activations; sums and statistics are float32. Arrays in host memory are float32 or
            bytes all the same, those that are given and those that come back. Weights that are not of this type are
            rounded to it, which the attribute `rounded` and the VAE's repr tell.
        precision : {"highest", "high", "medium"}
            How products of float32 are made, as ``torch.set_float32_matmul_precision`` says: "highest": float32.
            "high": a CPU with fast products of bfloat16 may take three of these for one, of each factor's leading bits
            and the next ones (16 bits together); "medium": one. With both a GPU, which wants compute capability 8.0
            then, may round factors to TF32 (10 bits). Where a CPU has no such products all are "highest".
        autotune : bool
            On a GPU: time cuDNN's engines in the first run of a size, instead of taking the heuristics' first.
        convolution : {"auto", "cudnn", "own"}
            On a GPU: whose convolution. Our own (float16 and bfloat16) computes a pass in one kernel, without
            stripes and with less memory; cuDNN still computes passes that none of its tiles fits. "auto" is our own
            on GPUs of compute capability 9.0 (H100, H200), where it was measured to be faster, and cuDNN elsewhere,
            in float32 and with autotune.

        Raises
        ------
        ValueError
            A bad argument; a file that is damaged, none of these (of one from before PyTorch 1.6 it says how to convert
            it), or of no VAE; a tensor that is missing, extra, misshapen, cut, of another dtype or without plain
            numbers (on "meta", sparse, masked), by its name. Whatever is raised, nothing stays allocated.
        OSError
            The file cannot be read. FileNotFoundError: no such file, or a directory without weights or config.
        ImportError
            Quantised tensors, and no ``gguf`` package: ``pip install 'vaemem[gguf]'``.
        MemoryError
            No room for the weights.
        RuntimeError
            No driver, no cuDNN, or a GPU that refused.

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
        core, config = weights.read(path, model, config, parts, **where)
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
    ) -> Self:
        """Weights of the real shapes: PyTorch's default initialisation, random norm affines.

        The same seed, 0 or more, gives the same tensors whatever the parts. With ``config=`` the architecture is the
        config's. What else there is to say goes for `load` too.

        Examples
        --------
        >>> VAE.random("sdxl", parts="decoder").parameters
        49490199
        """
        gpu, where = open_device(device, dtype, precision, autotune, convolution)
        arch = known_arch(model) if config is None else read_config(config)
        core = _core.Model(arch, parts, **where)
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
        """A new VAE with the weights of this one, which must be on the CPU and, for another dtype, must have rounded
        none. Arguments are `load`'s; dtype and, for float32, precision are this one's where the call names none.

        >>> one = VAE.random("sdxl", parts="decoder")
        >>> two = one.copy()    # device="cuda", dtype="bfloat16" where there is a GPU
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
        """Copies of the weights as float32 arrays, by diffusers' names, of a VAE on the CPU: the numbers that it keeps.
        Of a VAE of videos, which is run for one frame, the slices that a frame does not meet are not kept, and zero.

        >>> VAE.load(vae.state_dict()).parameters == vae.parameters
        True
        """
        core = self._on_the_cpu("state_dict")
        return {name: core.get_tensor(name) for name, _ in core.tensors}

    def save(self, path: str | os.PathLike[str], layout: str = "diffusers") -> None:
        """Writes the weights as safetensors, each tensor in the type in which it is kept: the VAE's dtype, biases and
        norms float32. Loaded from that file in the same dtype, the VAE is this one, bit for bit.

        >>> vae.copy(dtype="bfloat16").save("half.safetensors")  # about half of the file

        Parameters
        ----------
        path : path
            A ``.safetensors`` file; for ``"diffusers"`` also a directory, made where there is none, which gets a
            ``config.json`` too. A file without one does not tell norm_num_groups or the scaling. Weights in a directory
            hold that config as well, and `load` takes theirs. So a save that is killed leaves the old VAE or the new
            one, never a mixture. One save at a time writes to a directory; others wait for it.
        layout : {"diffusers", "ldm", "bfl"}
            ``"ldm"`` wants both quant convs, ``"bfl"`` none and the middle attention.

        Raises
        ------
        ValueError
            A layout that is unknown or cannot hold the model, a path of the wrong kind, a VAE of videos, which is not
            kept whole, or a VAE on a GPU, whose weights are in another form.
        OSError
            The file cannot be written. Whatever was there before is as it was. Only if the weights of a directory have
            taken their place and ``config.json`` cannot, the old ``config.json`` stays: `load` warns of it.
        """
        weights.save(self._on_the_cpu("save"), path, layout=layout, sample_size=self.sample_size)

    # ---- its end ----

    def close(self) -> None:
        """Gives weights and arena back to the system; results stay their owners'. A run of another thread's goes on to
        its end first. Whatever else is asked of a VAE that is closed is a ValueError; closing it again is none.

        >>> one = vae.copy()
        >>> one.close()
        >>> one.closed
        True
        """
        self._open = None

    @property
    def closed(self) -> bool:
        return self._open is None

    def __enter__(self) -> Self:
        _ = self._runner  # raises where it is closed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ---- what it is ----

    @property
    def device(self) -> str:
        return "cpu" if self._device is None else f"cuda:{self._device.number}"

    @property
    def dtype(self) -> DtypeName:
        return self._runner.dtype

    @property
    def precision(self) -> Precision:
        return self._runner.precision

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
        """What a GPU has lost to this VAE beside `reserved_bytes`: our kernels, cuDNN's handle and kernels, and CUDA
        graphs, each by what was free before and after it was loaded, first run or captured; so whatever others took in
        these moments is in it too. The context itself was there before. 0 on the CPU."""
        return max(self._device.backend.unaccounted, 0) if self._device else 0

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""
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
        """The core model, whose weights can be read; ValueError for `wish` where they are on a GPU, in another form."""
        if self._device:
            raise ArgumentError(wish, "a VAE on the cpu", f"one on {self.device}, whose weights are {self.dtype}")
        return self._core
