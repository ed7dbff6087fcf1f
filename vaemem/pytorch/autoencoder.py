"""diffusers' autoencoders, computed by vaemem: `vaemem.pytorch.AutoencoderKL` and its siblings.

Each drop-in is diffusers' own class with parameters on the device "meta". Names, shapes, dtypes and config exist,
because pipelines read dtypes of single layers; numbers do not, and a layer that is called raises. Two methods are
overridden; each takes a batch and returns one. Slices, outputs and distributions are diffusers'.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from vaemem._common import frames_factor, latent_factor, need
from vaemem._errors import ArgumentError, ArgumentTypeError
from vaemem._types import DtypeName, Precision
from vaemem.engine import weights
from vaemem.engine.arguments import Progress
from vaemem.engine.configs import config_of
from vaemem.engine.device import open_device
from vaemem.engine.limits import Limit
from vaemem.engine.records import Run
from vaemem.engine.tiling import Tiling
from vaemem.engine.vae import VAE
from vaemem.pytorch.converting import convert

if TYPE_CHECKING:
    from typing import Self

need("diffusers", "vaemem.pytorch.AutoencoderKL")
import diffusers
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from diffusers.models.autoencoders.vae import DecoderOutput

_FRAMES = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21")
_NEWER = ("AutoencoderKLFlux2", "AutoencoderKLLTX2Video", *_FRAMES)  # older versions of diffusers lack these classes
__all__ = ["AutoencoderKL", "AutoencoderKLWan", "AutoencoderTiny", *_NEWER]

TORCH_DTYPES: dict[torch.dtype, DtypeName] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_COPIED = (  # settings that `from_module` copies
    "use_slicing", "use_tiling", "tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor",
    "tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width",
)  # fmt: skip
SETTINGS = ("threads", "memory_limit", "cache_limit", "on_out_of_memory")  # of a VAE's runs on the CPU


class HeldWeight(torch.Tensor):
    """Parameter on the device "meta": name, shape and dtype of numbers that the engine holds.

    Given such a tensor and one with numbers, PyTorch may return uninitialised memory, as convolutions do. So every
    function that gets both kinds is refused. A function of only these tensors returns such a tensor again.
    """

    label: str  # its name in errors

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, label: str = "a weight") -> Self:
        weight: Self = torch.Tensor._make_subclass(cls, data, requires_grad)
        weight.label, weight._is_param = label, True  # as nn.Parameter marks subclasses of Tensor
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            label: Any = next((t.label for t in given if isinstance(t, cls) and t.is_meta), None)
            if label and not all(t.is_meta for t in given):
                raise RuntimeError(
                    f"{label}: expected encode() or decode() of the whole VAE, or its state_dict(), got "
                    f"{func.__name__}() of this weight alone: its numbers are vaemem's, and PyTorch has none"
                )

            def like(one: torch.Tensor) -> torch.Tensor:
                return cls(one, label=label) if type(one) is torch.Tensor and one.is_meta else one

            result = func(*args, **(kwargs or {}))
            return tree_map_only(torch.Tensor, like, result) if label else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied: Self = memo.setdefault(id(self), type(self)(self.clone(), self.requires_grad, self.label))
        return copied


def _refuse_load(module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Refuse to load weights. This is a hook of every module: PyTorch calls it for a load of any module around it."""
    if any(name.startswith(prefix) for name in state):
        raise TypeError("the VAE: its weights cannot be changed; make another one, with from_module or VAE.load")


def _refuse_state(module: torch.nn.Module, *rest: Any) -> None:
    """Refuse a submodule's `state_dict`. This is a hook of every module; the VAE's own `state_dict` calls no hooks."""
    raise RuntimeError(
        f"{type(module).__name__}: expected state_dict() of the whole VAE, got that of a part of it: its numbers are "
        "vaemem's, and PyTorch has none to give"
    )


class _DropIn(diffusers.ModelMixin):  # type: ignore[misc]
    """Base of the drop-ins, before diffusers' class in the order of inheritance."""

    theirs: ClassVar[Any]  # diffusers' class

    def __init__(
        self, vae: VAE, config: Any = None, torch_dtype: torch.dtype | None = None, memory_limit: Limit = None
    ) -> None:
        if vae.device != "cpu":
            raise ArgumentError("vae", "a VAE on the cpu", repr(vae), f".to({vae.device!r}) takes it there")
        config = dict(config_of(vae.arch, vae.sample_size) if config is None else config)
        if config.get("scaling_factor", 0) is None:
            raise ArgumentError("config", "a scaling_factor", "", "load with model='sd15', model='sdxl' or config=")
        keys = inspect.signature(self.theirs.__init__).parameters  # a config may have more
        with torch.device("meta"):
            super().__init__(**{key: value for key, value in config.items() if key in keys or key[:1] == "_"})
        for prefix, module in self.named_modules():
            module.register_load_state_dict_pre_hook(_refuse_load)
            module.register_state_dict_pre_hook(_refuse_state)
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, HeldWeight(parameter, label=f"{prefix}.{name}"))
        # A saved pipeline names this module: it is diffusers', so that diffusers can load it with these weights.
        self.__module__ = self.theirs.__module__
        self.vae, self._engine_vae = vae, vae
        self._place = torch.empty(0)  # on the module's device, in its dtype
        self.memory_limit: Limit = memory_limit
        self.progress: Progress = False
        self.cancel: Event | None = None
        convert(self.eval(), torch_dtype or getattr(torch, vae.dtype))

    # ---- making one ----

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None, memory_limit: Limit = None, precision: Precision = "highest",
        subfolder: str | None = None, **kwargs: Any,
    ) -> Self:  # fmt: skip
        """Load a directory: a VAE's, or a pipeline's with a ``vae``. vaemem reads it if there are no other keywords.

        For the Hub's names, and with other keywords of diffusers', diffusers loads and `from_module` copies.
        `precision` is `VAE.load`'s, here and below. `torch_dtype` is `dtype` before diffusers 0.40."""
        dtype = dtype or torch_dtype or torch.float32
        path = os.path.join(pretrained_model_name_or_path, subfolder or "")
        if os.path.isdir(path) and not any(value is not None for value in kwargs.values()):
            where = open_device("cpu", "float32", precision, False, "auto")[1]
            core, config = weights.read(path, videos=None, **where)
            return cls(VAE(core, None, config), config, dtype, memory_limit)
        if subfolder is not None:
            kwargs["subfolder"] = subfolder
        module = cls.theirs.from_pretrained(pretrained_model_name_or_path, torch_dtype=dtype, **kwargs)
        return cls.from_module(module, memory_limit=memory_limit, precision=precision)

    @classmethod
    def from_single_file(
        cls, path: str | os.PathLike[str], *, model: str | None = None, config: Any = None,
        torch_dtype: torch.dtype | None = None, memory_limit: Limit = None, precision: Precision = "highest",
    ) -> Self:  # fmt: skip
        """Load a safetensors or GGUF file in any layout of `VAE.load`. SD1.5's and SDXL's files are alike: `model`
        (``"sd15"`` or ``"sdxl"``) or `config` says which it is."""
        return cls(VAE.load(path, model, config, precision=precision), None, torch_dtype, memory_limit)

    @classmethod
    def from_module(
        cls, module: Any, *, torch_dtype: torch.dtype | None = None, memory_limit: Limit = None,
        precision: Precision = "highest",
    ) -> Self:  # fmt: skip
        """Copy an instance of diffusers' class, such as a pipeline's VAE: its weights, config, dtype and device."""
        if not isinstance(module, cls.theirs):
            raise ArgumentTypeError("module", f"diffusers' {cls.theirs.__name__}", type(module).__name__)
        config = {**module.config, "_class_name": cls.theirs.__name__}
        vae = VAE.load(module, config=config, precision=precision)
        copied = cls(vae, module.config, torch_dtype or module.dtype, memory_limit)
        for name in _COPIED:
            if hasattr(module, name):  # tiles of videos have other settings; old versions of diffusers have none
                setattr(copied, name, getattr(module, name))
        copied.to(module.device)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy, pickle and torch.save: without anything that serves only this one's runs."""
        return self.__dict__ | {"_engine_vae": self.vae, "progress": False, "cancel": None}

    # ---- device and dtype ----

    @property
    def device(self) -> torch.device:
        """Device of its inputs and outputs."""
        return self._place.device

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move or convert: ``to()``, ``half()``, ``cuda()`` and the like end here."""
        place = fn(self._place)
        if place.dtype not in TORCH_DTYPES:
            raise ArgumentError("dtype", "float32, float16 or bfloat16", str(place.dtype))
        if place.device.type not in ("cpu", "cuda"):
            raise ArgumentError("device", "cpu or cuda", str(place.device))
        before = self._place
        self._set_place(place)
        if place.device != before.device:
            try:
                self._engine()
            except BaseException:
                self._set_place(before)
                raise
        return self

    def _set_place(self, place: torch.Tensor) -> None:
        self._place = place
        super()._apply(  # buffers of FLUX.2 have numbers
            lambda tensor: tensor.to(
                device="meta" if tensor.is_meta else place.device,
                dtype=place.dtype if tensor.is_floating_point() else None,
            )
        )

    def _engine(self) -> VAE:
        """Return the VAE that computes at the module's place. A copy is made only when it is needed: a pipeline may
        convert the module to another dtype and back."""
        place = "cpu" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
        wanted = place, TORCH_DTYPES[self.dtype]
        if (self._engine_vae.device, self._engine_vae.dtype) != wanted:
            self._engine_vae = self.vae  # frees the old copy before the new one is made
            if (self.vae.device, self.vae.dtype) != wanted:
                self._engine_vae = self.vae.copy(*wanted)
        for name in SETTINGS if place == "cpu" else ():
            setattr(self._engine_vae, name, getattr(self.vae, name))
        return self._engine_vae

    # ---- running ----

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        moments: torch.Tensor = self._run("encode", x)
        return moments

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        image = self._run("decode", z)
        return DecoderOutput(sample=image) if return_dict else (image,)

    def _tiling(self, op: str) -> Tiling | None:
        """Return the tiles that enable_tiling set."""
        raise NotImplementedError

    @torch.compiler.disable
    def _run(self, op: str, x: torch.Tensor) -> torch.Tensor:
        name = "x" if op == "encode" else "z"
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentTypeError(name, "a tensor of floating-point numbers", str(got))
        outside = isinstance(x, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(x)
        if outside or torch.jit.is_tracing() or get_proxy_mode():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                f"{name}: expected a tensor with numbers, got one that PyTorch traces, exports or transforms: vaemem "
                "computes outside of PyTorch, and a trace would keep this result as a constant: trace diffusers' own"
            )
        if (x.requires_grad and torch.is_grad_enabled()) or unpack_dual(x).tangent is not None:
            wanted, came = "a tensor that needs no gradient", "one with requires_grad=True or a tangent"
            advice = f"vaemem computes none; {op} under torch.no_grad() or give {name}.detach()"
            raise ArgumentError(name, wanted, came, advice)
        factor = latent_factor(self.vae.arch)
        if op == "encode" and any(side % factor for side in x.shape[-2:]):
            wanted = f"a height and a width that are multiples of {factor}"
            advice = "pad the image first, as torch.nn.functional.pad does"
            raise ArgumentError("x", wanted, str(tuple(x.shape)), advice)
        if x.device != self.device:
            raise ArgumentError(name, f"a tensor on {self.device}, where the module is", f"one on {x.device}")
        how: dict[str, Any] = dict(memory_limit=self.memory_limit, progress=self.progress, cancel=self.cancel)
        how["tiling"] = self._tiling(op)
        if how["tiling"] and x.ndim == 5:
            how["tiling"] = None
            warnings.warn(
                f"{op}: vaemem's tiles are for images, and this video is not cut: set memory_limit", stacklevel=4
            )
        engine, x = self._engine(), x.detach()
        is_on_host = self.device.type == "cpu"
        given: Any = (x.to("cpu", torch.float32) if is_on_host else x.to(self.dtype)).contiguous()
        given = given.numpy() if is_on_host else given
        result = engine.decode(given, **how) if op == "decode" else engine.encode(given, **how).moments
        return torch.as_tensor(result).to(self.device, self.dtype)

    @property
    def last_run(self) -> Run | None:
        """Record of the last encode or decode."""
        return self._engine_vae.last_run

    # ---- weights ----

    def state_dict(
        self, *, destination: dict[str, torch.Tensor] | None = None, prefix: str = "", **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Copy the weights to the CPU in the module's dtype. A module around this one passes its `destination`."""
        state = {} if destination is None else destination
        state |= {prefix + name: torch.from_numpy(t).to(self.dtype) for name, t in self.vae.state_dict().items()}
        return state


class AutoencoderKL(_DropIn, diffusers.AutoencoderKL):  # type: ignore[misc]
    """Drop-in for diffusers' AutoencoderKL, for inference: ``pipe.vae = AutoencoderKL.from_module(pipe.vae)``.

    Tensors go in and come out as in diffusers, on the CPU or a GPU, and runs compute in the module's dtype. The weights
    lie in a `vaemem.VAE` on the CPU. If the module is on a GPU or has another dtype, its first run there makes a copy.
    Inputs may have any floating dtype.

    Parameters
    ----------
    vae : VAE
        On the CPU; half a VAE is enough for runs of that half. Its `VAE.precision` applies to float32 everywhere. If
        its weights were rounded (`VAE.rounded`), only its own dtype can run.
    config : mapping, optional
        As for diffusers' class. None: `vae`'s.
    torch_dtype : torch.dtype, optional
        float32, float16 or bfloat16, as for ``.to(dtype)``. None: `vae`'s.
    memory_limit : int or str, optional
        As in `VAE.decode`, for every run: ``"900 MiB"``, ``"auto"``. Also an attribute.

    Attributes
    ----------
    vae : VAE
        The one on the CPU. Its settings (`VAE.threads` and others) apply to a copy on the CPU too.
    last_run : Run or None
        Record of the last encode or decode.
    progress, cancel
        As in `VAE.decode`, for every run.

    Raises
    ------
    ValueError
        A gradient would be needed, and there are none; a tensor is on another device; or a dtype is none of these.
    RuntimeError
        A call of a submodule or weight with numbers: only the whole VAE computes. `state_dict` of a submodule. A trace
        or export (``torch.jit.trace``), which would keep a result as a constant. `torch.compile` runs it uncompiled.
    TypeError
        `load_state_dict` of the VAE, of a submodule, or of a module around it with weights for the VAE.

    Notes
    -----
    `enable_tiling` works as in diffusers, tile by tile. A run in tiles is not exact; a run with a `memory_limit` is
    exact, and allows no tiles. If float16 overflows, a run is repeated with smaller activations, so SDXL's VAE needs no
    upcast: ``pipe.vae.register_to_config(force_upcast=False)`` avoids it. Attention processors, adapters and other
    changes of the module's layers have no effect. ``copy.deepcopy``, pickle and ``torch.save`` include the weights, but
    not `progress` and `cancel`. diffusers' ``from_pipe`` keeps only a VAE of its own class: ``from_pipe(pipe,
    vae=pipe.vae)``.

    Examples
    --------
    >>> import torch, vaemem
    >>> from vaemem.pytorch import AutoencoderKL
    >>> vae = AutoencoderKL(vaemem.VAE.random("sdxl"), memory_limit="600 MiB")
    >>> with torch.no_grad():
    ...     latents = vae.encode(torch.zeros(1, 3, 64, 64)).latent_dist.mode()
    ...     vae.decode(latents).sample.shape
    torch.Size([1, 3, 64, 64])
    >>> vae.last_run.peak_bytes <= 600 << 20, vae.config.scaling_factor
    (True, 0.13025)
    >>> AutoencoderKL(vaemem.VAE.random("sdxl", dtype="bfloat16")).dtype
    torch.bfloat16
    >>> vae.save_pretrained("model")
    >>> AutoencoderKL.from_pretrained("model").config.scaling_factor
    0.13025
    >>> vae.vae.save("model.safetensors", layout="ldm")
    >>> AutoencoderKL.from_single_file("model.safetensors", model="sdxl").config.scaling_factor
    0.13025
    >>> import diffusers
    >>> small = AutoencoderKL.from_module(diffusers.AutoencoderKL())  # such as a pipeline's
    >>> small.state_dict()["decoder.conv_in.bias"].shape
    torch.Size([64])
    >>> small.load_state_dict(small.state_dict())
    Traceback (most recent call last):
    TypeError: the VAE: its weights cannot be changed; make another one, with from_module or VAE.load
    """

    theirs = diffusers.AutoencoderKL

    def _tiling(self, op: str) -> Tiling | None:
        latent = self.tile_latent_min_size * latent_factor(self.vae.arch)
        side = self.tile_sample_min_size if op == "encode" else latent
        return Tiling(side, self.tile_overlap_factor) if self.use_tiling else None


class _Flux2(_DropIn):
    """Base of the drop-in for FLUX.2's VAE. Pipelines normalise latents by the statistics in its `bn`."""

    _tiling = AutoencoderKL._tiling

    def __init__(self, vae: VAE, *args: Any, **kwargs: Any) -> None:
        super().__init__(vae, *args, **kwargs)
        state = vae.state_dict()
        for name in ("mean", "var"):
            setattr(self.bn, f"running_{name}", torch.from_numpy(state[f"bn.running_{name}"]).to(self.dtype))
        self.bn.num_batches_tracked = torch.tensor(0)

    def state_dict(self, *, prefix: str = "", **kwargs: Any) -> dict[str, torch.Tensor]:
        """Copy the weights, as `AutoencoderKL` does."""
        state = super().state_dict(prefix=prefix, **kwargs)
        state[f"{prefix}bn.num_batches_tracked"] = self.bn.num_batches_tracked.clone()
        return state


class AutoencoderTiny(_DropIn, diffusers.AutoencoderTiny):  # type: ignore[misc]
    """Drop-in for diffusers' AutoencoderTiny (TAESD, TAESDXL, TAESD3, TAEF1), as `AutoencoderKL`.

    Tiles of this class are refused (ValueError); a `memory_limit` needs none. TAEF2 is refused too: it has norms, which
    diffusers' class lacks. `vaemem.VAE` runs it.

    Examples
    --------
    >>> import diffusers, torch
    >>> from vaemem.pytorch import AutoencoderTiny
    >>> vae = AutoencoderTiny.from_module(diffusers.AutoencoderTiny())  # such as a pipeline's
    >>> with torch.no_grad():
    ...     vae.decode(vae.encode(torch.zeros(1, 3, 64, 96)).latents).sample.shape
    torch.Size([1, 3, 64, 96])
    >>> vae.save_pretrained("taesd")
    >>> AutoencoderTiny.from_pretrained("taesd").config.latent_channels
    4
    >>> file = "taesd/diffusion_pytorch_model.safetensors"
    >>> AutoencoderTiny.from_single_file(file, torch_dtype=torch.bfloat16).state_dict()["decoder.layers.0.bias"].dtype
    torch.bfloat16
    """

    theirs = diffusers.AutoencoderTiny

    def __init__(self, vae: VAE, config: Any = None, *args: Any, **kwargs: Any) -> None:
        if vae.arch.get("family") == "tiny" and vae.arch["norm_num_groups"]:
            raise ArgumentError("vae", "a VAE that diffusers' AutoencoderTiny can be", f"{vae.model}, which has norms")
        super().__init__(vae, config, *args, **kwargs)

    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        latents = self._encode(x)
        return AutoencoderTinyOutput(latents=latents) if return_dict else (latents,)

    def decode(self, x: torch.Tensor, generator: Any = None, return_dict: bool = True) -> Any:
        return self._decode(x, return_dict)

    def _tiling(self, op: str) -> Tiling | None:
        if self.use_tiling:
            raise ArgumentError("enable_tiling", "", "tiles of AutoencoderTiny are others", "set memory_limit")
        return None


class _Frames(_DropIn):
    """Base of the drop-ins for VAEs of videos: (N, C, F, h, w). For Qwen-Image's classes F is 1."""

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        frames, one = self._frames("x", x)
        moments = super()._encode(frames)
        return moments[:, :, None] if one else moments

    def _decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        frames, one = self._frames("z", z)
        (video,) = super()._decode(frames, return_dict=False)
        video = video[:, :, None] if one else video
        return DecoderOutput(sample=video) if return_dict else (video,)

    def _frames(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return what the engine runs, and whether it is one frame, as an image."""
        if not isinstance(x, torch.Tensor):
            return x, False  # `_run` refuses it
        if x.ndim == 5 and x.shape[2] == 1:
            return x[:, :, 0], True
        if self.vae.arch.get("videos"):
            if x.ndim != 5:
                raise ArgumentError(name, "a video, (N, C, F, h, w)", str(tuple(x.shape)))
            return x, False
        advice = "vaemem runs this VAE only for images; diffusers' own class runs it for videos"
        raise ArgumentError(name, "one frame, (N, C, 1, h, w)", str(tuple(x.shape)), advice)

    def _tiling(self, op: str) -> Tiling | None:
        if not getattr(self, "use_tiling", False):
            return None
        height, step = self.tile_sample_min_height, self.tile_sample_stride_height
        if (height, step) != (self.tile_sample_min_width, self.tile_sample_stride_width):
            got = f"{height} x {self.tile_sample_min_width} pixels every {step} x {self.tile_sample_stride_width}"
            raise ArgumentError("enable_tiling", "square tiles, as far apart either way", got)
        return Tiling(height, 1 - step / height)

    def state_dict(self, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Copy the weights, as `AutoencoderKL` does. Refuse if only the slices that one frame uses are kept."""
        if self.vae.arch.get("videos"):
            return super().state_dict(**kwargs)
        raise RuntimeError(
            f"state_dict: expected the weights of a module of diffusers', got {type(self).__name__} of vaemem, which "
            "keeps only the parts of filters that one frame uses"
        )


class AutoencoderKLWan(_Frames, diffusers.AutoencoderKLWan):  # type: ignore[misc]
    """Drop-in for diffusers' AutoencoderKLWan (Wan 2.1 and 2.2): ``pipe.vae = AutoencoderKLWan.from_module(pipe.vae)``.

    The class decodes and encodes videos (N, C, F, h, w), within a `memory_limit` too. If the config's
    ``temperal_downsample`` is not Wan's, the class runs only images, F = 1; more frames raise ValueError. Tiles are for
    images. The rest is as in `AutoencoderKL`. `AutoencoderKLLTX2Video` is a drop-in for the VAEs of LTX-2 and LTX-2.3,
    if diffusers has it. `AutoencoderKLQwenImage` and `AutoencoderKLQwenImage21` are drop-ins for diffusers' classes of
    these names, if diffusers has them: for images, without a `state_dict`.

    Examples
    --------
    >>> import diffusers, torch
    >>> from vaemem.pytorch import AutoencoderKLWan
    >>> small = diffusers.AutoencoderKLWan(base_dim=16, num_res_blocks=1)  # such as a pipeline's
    >>> vae = AutoencoderKLWan.from_module(small, memory_limit="40 MiB")
    >>> with torch.no_grad():
    ...     vae.decode(torch.zeros(1, 16, 3, 8, 12)).sample.shape
    torch.Size([1, 3, 9, 64, 96])
    >>> small.save_pretrained("wan")
    >>> AutoencoderKLWan.from_pretrained("wan").config.base_dim
    16
    >>> vae.state_dict()["decoder.conv_out.weight"].shape
    torch.Size([3, 16, 3, 3, 3])
    >>> file = "wan/diffusion_pytorch_model.safetensors"
    >>> AutoencoderKLWan.from_single_file(file, config="wan", torch_dtype=torch.bfloat16).dtype
    torch.bfloat16
    """

    theirs = diffusers.AutoencoderKLWan


class _Ltx2(_Frames):
    """Base of the drop-in for the video VAE of LTX-2. Pipelines normalise latents by its `latents_mean` and
    `latents_std`."""

    def __init__(self, vae: VAE, *args: Any, **kwargs: Any) -> None:
        super().__init__(vae, *args, **kwargs)
        state = vae.state_dict()
        for name in ("latents_mean", "latents_std"):
            setattr(self, name, torch.from_numpy(state[name]).to(self.dtype))

    def _encode(self, x: torch.Tensor, causal: bool | None = None) -> torch.Tensor:
        self._check_causal("encoder", causal)
        later = frames_factor(self.vae.arch)
        if isinstance(x, torch.Tensor) and x.ndim == 5 and (x.shape[2] - 1) % later:
            raise ArgumentError("x", f"1 frame more than a multiple of {later}, as in diffusers", str(x.shape[2]))
        return super()._encode(x)

    def _decode(  # type: ignore[override]
        self, z: torch.Tensor, temb: Any = None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:  # fmt: skip
        self._check_causal("decoder", causal)
        return super()._decode(z, return_dict)

    def _check_causal(self, half: str, causal: bool | None) -> None:
        own = self.vae.arch[f"{half}_causal"]
        if causal and not own:
            raise ArgumentError("causal", f"None or False, as the config's {half}_causal", "True")


_BASES = {"AutoencoderKLFlux2": _Flux2, "AutoencoderKLLTX2Video": _Ltx2} | dict.fromkeys(_FRAMES, _Frames)
for _name in _NEWER:
    if _class := getattr(diffusers, _name, None):
        _like = "" if _name == "AutoencoderKLFlux2" else "Wan"
        _doc = f"""Drop-in for diffusers' {_name}: see `AutoencoderKL{_like}`."""
        _base = _BASES[_name]
        globals()[_name] = type(_name, (_base, _class), {"theirs": _class, "__doc__": _doc, "__module__": __name__})


def find_drop_in(pipe: Any) -> Any:
    """Return the drop-in for the class of a pipeline's VAE. If there is none, a TypeError names the classes."""
    vae = getattr(pipe, "vae", None)
    found = [globals()[name] for name in __all__ if name in globals()]
    for one in found:
        if isinstance(vae, one.theirs):
            return one
    wanted = f"a pipeline whose vae is one of {', '.join(one.theirs.__name__ for one in found)}"
    raise ArgumentTypeError("pipe", wanted, type(pipe if vae is None else vae).__name__)
