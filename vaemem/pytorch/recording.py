"""Records what a module's call takes from the CUDA caching allocator.

The module runs under fake tensors that say they are on a GPU: no weights, no activations, no GPU, no CUDA build of
PyTorch. Storages are followed from the operator that makes them to the death of their last reference, so the Python
frames of the module decide how long tensors live, as they do in a real run. What CUDA operators take besides their
outputs is added from a table.

Where fake tensors would choose otherwise than a GPU: ``scaled_dot_product_attention`` is modelled whole (the kernel by
PyTorch's conditions and switches), and so are the fast paths of ``nn.MultiheadAttention`` and
``nn.TransformerEncoderLayer``; the bias of a linear layer over a transposed input is added in place; elementwise
operators get the strides that eager ones give. What would be wrong is refused: gradients, recurrent layers, nested
tensors, compiled modules, sizes that depend on the tensors' contents.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from vaemem import _core
from vaemem.prediction.attention import KERNELS, Call, Heads, choose_kernel
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.eager import eager_strides
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.native_transformer import encoder_layer, multi_head_attention
from vaemem.prediction.predict import ModulePrediction

__all__ = ["Recording", "predict_peak", "record"]

aten = torch.ops.aten
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BLAS = (
    aten.mm.default, aten.bmm.default, aten.bmm.out, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.dot.default,
)  # fmt: skip
# Operators besides the pointwise ones that take nothing but their outputs.
_PLAIN_NAMES = """
    empty empty_like empty_strided new_empty zeros zeros_like ones ones_like full full_like new_zeros new_ones
    new_full arange clone _to_copy copy_ cat stack constant_pad_nd upsample_nearest2d embedding index_select
    gather _softmax _log_softmax native_layer_norm _unsafe_view repeat roll tril triu lift_fresh scalar_tensor
    randn rand randn_like rand_like native_dropout fill_ zero_ avg_pool2d glu index fill linspace flip eye
    rms_norm _fused_rms_norm masked_fill masked_fill_
"""
_PLAIN = {getattr(aten, name) for name in _PLAIN_NAMES.split() if hasattr(aten, name)}


class Recording:
    """What `record` returns.

    Attributes
    ----------
    trace : vaemem._core.Trace
        The call: storages, convolutions, matrix products.
    weights : list of (str, int)
        Parameters and buffers, name and bytes, in the order in which ``Module.to`` moves them; shared ones once.
    inputs : list of (str, int)
        Storages of the tensors that were passed in.
    output : object
        The call's result, of fake tensors.
    unmodelled : dict
        Operators that may take more than their outputs, with how often they ran: their temporaries are not in the
        trace.

    Examples
    --------
    >>> recording = record(torch.nn.Linear(8, 8).eval(), torch.empty(4, 8))
    >>> recording.inputs, recording.unmodelled
    ([('input 0', 128)], {})
    """

    def __init__(self) -> None:
        self.trace = _core.Trace()
        self.weights: list[tuple[str, int]] = []
        self.inputs: list[tuple[str, int]] = []
        self.output: Any = None
        self.unmodelled: dict[str, int] = {}


class _Recorder(TorchDispatchMode):
    """Follows storages through the operators that run."""

    def __init__(self, recording: Recording, gpu: Gpu):
        super().__init__()
        self._recording, self._trace = recording, recording.trace
        self._gpu = gpu.sm, gpu.properties["multiProcessorCount"]
        self.path: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int | None]] = {}  # by address of the storage; id None: not ours
        self.leaves: set[int] = set()  # ids of tensors that stand for parameters which require gradients
        self.casts: dict[int, torch.Tensor] = {}  # what autocast made of them; it keeps them to its region's end
        self.adds_in_place = False
        self.caches_casts = False  # within a region of autocast, and its cache is on
        self._silent = False

    # ---- storages ----

    def adopt(self, tensor: torch.Tensor) -> bool:
        """A storage that is there before the call; whether it is a new one."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._alive
        self._alive[storage._cdata] = (StorageWeakRef(storage), None)
        return new

    def sweep(self) -> None:
        """Gives back what died since the last operator."""
        dead = [key for key, (reference, _) in self._alive.items() if reference.expired()]
        for key in dead:
            number = self._alive.pop(key)[1]
            if number is not None:
                self._trace.give(number)

    def bind(self, tensor: torch.Tensor, number: int | None = None) -> None:
        """A storage that an operator made, taken now unless it has its number."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if tensor.device.type != "cuda" or (known is not None and not known[0].expired()):
            return
        if number is None:
            number = self._trace.take(storage.nbytes(), self.name())
        self._alive[storage._cdata] = (StorageWeakRef(storage), number)

    def name(self, what: str = "") -> str:
        return (self.path[-1] if self.path else "call") + (f" [{what}]" if what else "")

    def borrow(self, count: int, what: str) -> int:
        return self._trace.take(count, self.name(what))

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.namespace == "aten":  # operators made of others are still whole
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self.sweep()
        if torch.is_grad_enabled() and any(id(x) in self.leaves for x in tree_flatten(args)[0]):
            raise ValueError(f"{self.name()}: {_NO_GRADIENTS}")
        if func is aten._to_copy.default and self._is_autocast(args[0], kwargs.get("dtype")):
            if id(args[0]) not in self.casts:
                self.casts[id(args[0])] = func(*args, **kwargs)
                self.bind(self.casts[id(args[0])])
            return self.casts[id(args[0])]
        if self.adds_in_place and func is aten.add.Tensor:
            func = aten.add_.Tensor
        if func is aten.convolution.default:
            return self._convolution(*args)
        if func is aten._safe_softmax.default:
            return self._safe_softmax(*args)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise ValueError(
                f"{self.name()}: {_NO_CONTENTS}; {func} asks for it (.item() and `if` on a tensor do)"
            ) from None
        if torch.Tag.pointwise in func.tags and not func._schema.is_mutable and func.overloadpacket not in _PLAIN:
            out = self._as_eager(func, args, out)
        elif func is aten.view.default:
            out = self._view_as_eager(args[0], out)
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self.bind(tensor)
        if func is aten.native_group_norm.default:
            self._group_norm(*args)
        elif func in (aten.addmm.default, aten._addmm_activation.default):
            bias, _, b = args[:3]
            fused = bias.dim() == 1 and bias.is_contiguous() and min(b.shape) > 1 and kwargs.get("beta", 1) == 1
            self._trace.blas(self.name("workspace"), fused)
        elif func in _BLAS:
            self._trace.blas(self.name())
        elif not self._plain(func):
            self._miss(str(func))
        return out

    def _miss(self, what: str) -> None:
        self._recording.unmodelled[what] = self._recording.unmodelled.get(what, 0) + 1

    def _is_autocast(self, x: Any, dtype: Any) -> bool:
        """Whether a cast is one that autocast makes of a weight and keeps (cached_cast in autocast_mode.cpp)."""
        return (
            self.caches_casts
            and not torch.is_autocast_enabled("cuda")  # off beneath it; on where the module itself asks for a cast
            and id(x) in self.leaves
            and x.dtype is torch.float32
            and dtype is torch.get_autocast_dtype("cuda")
        )

    def _as_eager(self, func: Any, args: Any, out: Any) -> Any:
        """The output of a pointwise operator, laid out as eager ones do. Fake tensors have formulas of their own,
        which give a batch of one another stride, and later operators take that for another memory format."""
        if not isinstance(out, torch.Tensor):
            return out
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        shapes = [(tuple(x.shape), x.stride()) for x in tensors]
        if func._overloadname == "Tensor":  # a Python number is a tensor without dimensions there
            shapes += [((), ()) for x in args[:2] if isinstance(x, bool | int | float | complex)]
        stride = eager_strides(tuple(out.shape), shapes)
        if stride == out.stride() or not tensors:
            return out
        self._silent = True
        out = torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device)
        self._silent = False
        return out

    def _view_as_eager(self, x: Any, out: Any) -> Any:
        """A view with the strides that eager ones have, which again differ where a dimension has size 1."""
        with no_dispatch(), torch._C.DisableTorchFunction():
            stride = torch.empty_strided(x.shape, x.stride(), device="meta").view(out.shape).stride()
        if stride == out.stride():
            return out
        self._silent = True
        out = aten.as_strided.default(x, out.shape, stride, x.storage_offset())
        self._silent = False
        return out

    @staticmethod
    def _plain(func: Any) -> bool:
        return (
            func.is_view
            or func.overloadpacket in _PLAIN
            or torch.Tag.pointwise in func.tags
            or func.namespace == "prim"
            or (func._schema.name.endswith("_") and torch.Tag.inplace_view in func.tags)
        )

    def _convolution(
        self, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
        output_padding: Any, groups: int,
    ) -> Any:  # fmt: skip
        """Input made dense, output, filter made dense in channels-last, workspace. One dimension is two with a height
        of 1 there, of an input made dense before."""
        size, copies = x.element_size(), []
        self._silent = True
        lines = x.dim() == 3
        if lines and not x.is_contiguous():
            x = torch.empty_like(x, memory_format=torch.contiguous_format)
            copies.append(self.borrow(x.numel() * size, "contiguous"))
        out = aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        if lines:
            x, weight, out = (tensor.unsqueeze(2) for tensor in (x, weight, out))
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
            output_padding = (0, *output_padding)
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        nhwc = last in (suggest_memory_format(x), suggest_memory_format(weight))
        wanted = last if nhwc else torch.contiguous_format
        if nhwc != (last == suggest_memory_format(out)):  # a build without cuDNN chose
            out = torch.empty_like(out, memory_format=wanted)
        result = out.squeeze(2) if lines else out
        self._silent = False
        if not x.is_contiguous(memory_format=wanted):
            copies.append(self.borrow(x.numel() * size, "contiguous"))
        self.bind(out)
        if not weight.is_contiguous(memory_format=wanted):
            copies.append(self.borrow(weight.numel() * size, "filter"))
        if x.dtype in _DTYPES:
            n, c, *depth, h, w = x.shape
            self._trace.conv(
                _DTYPES[x.dtype], n, c, h, w, out.shape[1], tuple(weight.shape[2:]), tuple(stride), tuple(padding),
                nhwc, self.name("workspace"), tuple(dilation), groups, tuple(output_padding) if transposed else None,
                *depth,
            )  # fmt: skip
        else:
            self._miss(f"aten.convolution in {x.dtype}")
        for number in reversed(copies):
            self._trace.give(number)
        return result

    def _group_norm(self, x: Any, weight: Any, bias: Any, n: int, c: int, pixels: int, groups: int, eps: float) -> None:
        """Mean and rstd are outputs and followed as such; the fused parameters come and go."""
        if pixels > 1 and weight is not None:
            fused = [self.borrow(4 * n * c, "statistics") for _ in range(2)]
            for number in fused:
                self._trace.give(number)

    def _safe_softmax(self, x: Any, dim: int, dtype: Any = None) -> Any:
        """A softmax that gives 0 to rows of -inf alone: one operator for a mode, five for the allocator."""
        with self:
            out = aten._softmax.default(x if dtype is None else x.to(dtype), dim, False)
            least = x.new_full((), float("-inf"))
            masked = x == least
            rows = masked.new_empty([1 if i == dim % x.dim() else n for i, n in enumerate(x.shape)])
            return torch.where(rows, out.new_zeros(()), out)

    def made(self, like: Any, shape: Sequence[int], what: str) -> Any:
        """A tensor that no operator is seen to make."""
        self._silent = True
        out = like.new_empty(shape)
        self._silent = False
        self.bind(out, self.borrow(out.numel() * out.element_size(), what))
        return out

    def kernel(self, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, grouped: bool = False) -> str:
        """Which kernel scaled_dot_product_attention takes."""
        if q.dtype not in _DTYPES:
            raise ValueError(f"scaled_dot_product_attention: want float32, float16 or bfloat16, got {q.dtype}")
        queries, keys, values = (Heads(tuple(x.shape), x.stride()) for x in (q, k, v))
        call = Call(_DTYPES[q.dtype], queries, keys, values, mask is not None, causal, grouped)
        return choose_kernel(call, self._gpu[0], _enabled_kernels())

    def attention(
        self, q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
    ) -> Any:
        """scaled_dot_product_attention."""
        kernel = self.kernel(q, k, v, mask, causal, grouped)
        self.sweep()
        if mask is not None and mask.dtype is torch.bool:
            mask = self.made(q, mask.shape, "mask")
        if kernel == "math":
            # C++ adds the mask in place for plain tensors, and not for those of a subclass such as fake ones.
            with _setting(self, adds_in_place=True):
                return torch._scaled_dot_product_attention_math(
                    q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped
                )[0]
        if dropout:
            self._miss("scaled_dot_product_attention with dropout")
        copies = []
        if mask is not None and kernel == "efficient" and mask.shape[-1] % 8:
            row = mask.shape[-1] + -mask.shape[-1] % 8
            copies.append(self.borrow(mask.numel() // mask.shape[-1] * row * q.element_size(), "mask, padded"))
        batch, heads, queries, _ = q.shape
        if kernel == "cudnn":
            self._miss("the workspace of cuDNN's attention")
            number = None
        else:
            number = self._trace.attention(
                _DTYPES[q.dtype], batch, heads, queries, k.shape[-2], v.shape[-1], kernel, *self._gpu,
                self.name("attention"),
            )  # fmt: skip
        self._silent = True
        out = q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
        self._silent = False
        self.bind(out, number)
        for number in reversed(copies):
            self._trace.give(number)
        return out


_NO_CONTENTS = (
    "want a call whose course and sizes do not depend on what its tensors hold, which is not there to be looked at"
)
_NO_GRADIENTS = (
    "want a call without gradients, got a backward pass or torch.enable_grad(): what autograd keeps is not modelled"
)
_NO_COMPILER = (
    "want it as it was before torch.compile, got it compiled: compiled code fuses operators and plans memory by itself,"
    " which is not modelled"
)
_REFUSED = {
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"), _NO_CONTENTS),
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        "want a module without GRU, LSTM and RNN layers: what cuDNN takes for them is not modelled",
    ),
    **dict.fromkeys(
        ("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_tensor_list"),
        "want a module without nested tensors, whose sizes depend on what a mask holds; give a TransformerEncoder"
        " enable_nested_tensor=False, or no src_key_padding_mask",
    ),
}


def _enabled_kernels() -> list[str]:
    """Those of scaled_dot_product_attention that are switched on, in PyTorch's order (``torch.nn.attention.
    sdpa_kernel``, ``torch.backends.cuda.enable_flash_sdp`` and their like)."""
    backend = torch.nn.attention.SDPBackend
    names = {
        backend.FLASH_ATTENTION: "flash", backend.EFFICIENT_ATTENTION: "efficient", backend.CUDNN_ATTENTION: "cudnn",
        backend.MATH: "math",
    }  # fmt: skip
    switches = torch.backends.cuda
    on = dict(
        zip(
            KERNELS,
            (
                switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.cudnn_sdp_enabled(),
                switches.math_sdp_enabled(),
            ),
            strict=True,
        )
    )  # fmt: skip
    order = [names[backend(number)] for number in torch._C._get_sdp_priority_order() if backend(number) in names]
    return [name for name in order if on[name]]


class _Eager(TorchFunctionMode):
    """Calls whose way under fake tensors is not the way on a GPU."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._recorder.caches_casts = torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()
        # The bindings of contiguous() and of indexing ask for a CUDA build; the operators below them do not.
        if func is torch.Tensor.contiguous:
            layout = kwargs.get("memory_format", args[1] if len(args) > 1 else torch.contiguous_format)
            return aten.contiguous.default(args[0], memory_format=layout)
        if func is torch.Tensor.__getitem__:
            return _indexed(*args)
        if func is torch.Tensor.__setitem__:
            return _set_indexed(*args)
        if func is torch.nn.functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is torch._native_multi_head_attention:
            return self._multi_head_attention(*args, **kwargs)
        if func is torch._transformer_encoder_layer_fwd:
            with self:
                return encoder_layer(torch, self._multi_head_attention, *args, **kwargs)
        if func is torch.nn.functional.linear:
            with _setting(self._recorder, adds_in_place=True):  # its bias
                return func(*args, **kwargs)
        if func.__name__ in _REFUSED:
            raise ValueError(f"{self._recorder.name()}: {_REFUSED[func.__name__]}")
        return func(*args, **kwargs)

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with self:
            return multi_head_attention(torch, self._recorder.kernel, *args, **kwargs)

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if torch.is_autocast_enabled("cuda"):
            low = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(low), key.to(low), value.to(low)
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        return self._recorder.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _never(*_: Any) -> bool:
    return False


@contextlib.contextmanager
def _setting(place: Any, **values: Any) -> Iterator[None]:
    """Attributes that have other values for a while."""
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


@contextlib.contextmanager
def _as_on_a_gpu(recorder: _Recorder) -> Iterator[None]:
    """What PyTorch's Python code asks before it goes one way or the other, answered as on a GPU with plain tensors: no
    tensor and no mode overrides its functions, and there is a device for autocast, whose casts the recorder keeps."""
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        recorder.casts.clear()
        clear()

    functional = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
    )
    with (
        _setting(torch, clear_autocast_cache=clear_autocast_cache),
        _setting(torch.overrides, has_torch_function=_never),
        _setting(torch.nn.functional, **functional),
        _setting(torch.cuda.amp.common, amp_definitely_not_available=_never),
        _setting(torch.cuda, is_bf16_supported=lambda *_: True),
    ):
        yield


def _check(module: torch.nn.Module, call: Any) -> None:
    """Refuses what is not modelled before it runs."""
    if module.training:
        raise ValueError(
            "module: want it in eval mode, module.eval(), got it in training mode: training keeps what the backward"
            " pass needs, which is not modelled"
        )
    compiled = [
        name or "module" for name, m in module.named_modules() if hasattr(m, "_orig_mod") or m._compiled_call_impl
    ]
    if hasattr(call, "_torchdynamo_orig_callable"):
        compiled.append("call")
    if compiled:
        raise ValueError(f"{compiled[0]}: {_NO_COMPILER}")


def _view(x: Any, key: Any, sets: bool = False) -> tuple[Any, list[Any]]:
    """x seen through the integers, slices, None and Ellipsis of an index, and the tensors in it by dimension of the
    view."""
    keys = list(key) if isinstance(key, tuple) else [key]
    consumed = [
        k.dim() if isinstance(k, torch.Tensor) and k.dtype is torch.bool else int(k is not None and k is not Ellipsis)
        for k in keys
    ]
    skipped = x.dim() - sum(consumed)
    dim, tensors = 0, {}
    for k, count in zip(keys, consumed, strict=True):
        if k is Ellipsis:
            dim += skipped
        elif k is None:
            x, dim = aten.unsqueeze.default(x, dim), dim + 1
        elif isinstance(k, slice):
            if k != slice(None):
                x = aten.slice.Tensor(x, dim, k.start, k.stop, 1 if k.step is None else k.step)
            dim += 1
        elif isinstance(k, int) and not isinstance(k, bool):
            x = aten.select.int(x, dim, k)
        else:
            if isinstance(k, torch.Tensor) and k.dtype in (torch.bool, torch.uint8) and not sets:
                raise ValueError(f"an index of bools: {_NO_CONTENTS}")
            tensors[dim] = k if isinstance(k, torch.Tensor) else torch.tensor(k, device=x.device)
            dim += max(count, 1)
    return x, [tensors.get(i) for i in range(max(tensors) + 1)] if tensors else []


def _indexed(x: Any, key: Any) -> Any:
    x, tensors = _view(x, key)
    return aten.index.Tensor(x, tensors) if tensors else x


def _set_indexed(x: Any, key: Any, value: Any) -> None:
    x, tensors = _view(x, key, sets=True)
    if tensors:
        value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
        aten.index_put_.default(x, tensors, value)
    elif isinstance(value, torch.Tensor):
        aten.copy_.default(x, value)
    else:
        aten.fill_.Scalar(x, value)


@contextlib.contextmanager
def _path(recorder: _Recorder, names: Mapping[int, str]) -> Iterator[None]:
    """Keeps the name of the module that runs."""
    root = next(iter(names.values()), "")

    def enter(module: torch.nn.Module, args: Any) -> None:
        recorder.path.append(names.get(id(module), root) or type(module).__name__)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder.path.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(
    module: torch.nn.Module,
    *args: Any,
    gpu: str = "RTX 4090",
    call: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None,
    **kwargs: Any,
) -> Recording:
    """Runs a module under fake tensors and records what a CUDA run would take from the caching allocator.

    Parameters
    ----------
    module : torch.nn.Module
        In eval mode, on any device; ``torch.device("meta")`` does. Neither it nor its parameters are changed.
    *args, **kwargs
        What the module is called with. Of tensors, shape, strides and dtype count; they may be meta tensors.
    gpu : str
        Decides between attention kernels, beside the switches of PyTorch (``torch.nn.attention.sdpa_kernel``) as they
        stand around this call or within the module.
    call : callable, optional
        ``call(module, *args, **kwargs)`` in place of ``module(*args, **kwargs)``: ``lambda vae, z:
        vae.decode(z).sample``.
    autocast : torch.dtype, optional
        Runs it all under ``torch.autocast("cuda", autocast)``, where the casts of weights live until its end. Regions
        of the module's own count too.

    Raises
    ------
    ValueError
        What is not modelled and would be wrong, each with its reason: a module in training mode, a backward pass,
        ``torch.enable_grad``, a compiled module; GRU, LSTM and RNN layers; nested tensors; a course or sizes that
        depend on what tensors hold; attention in another dtype than float32, float16 and bfloat16, or by none of the
        kernels that are switched on.

    Notes
    -----
    Recorded without gradients. Sizes of storages that the module changes in place later (``resize_``) are not followed.

    Meanwhile a few of PyTorch's own questions, such as ``torch.overrides.has_torch_function``, are answered as on a
    GPU, in other threads too.

    Examples
    --------
    >>> recording = record(torch.nn.Conv2d(3, 8, 3).eval(), torch.empty(1, 3, 64, 64))
    >>> recording.weights, tuple(recording.output.shape)
    ([('weight', 864), ('bias', 32)], (1, 8, 62, 62))
    """
    _check(module, call)
    recording = Recording()
    names = {id(m): name for name, m in module.named_modules()}
    recorder = _Recorder(recording, find_gpu(gpu))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        """The same tensor on the GPU, once."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in fakes:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
            fakes[id(tensor)] = made
            if tensor.requires_grad and tensor.is_leaf and not tensor._is_view():
                recorder.leaves.add(id(made))
        return fakes[id(tensor)]

    with mode, torch.no_grad():
        state = {}
        for name, tensor in _in_order_of_to(module):
            state[name] = fake(tensor)
            if recorder.adopt(state[name]):
                recording.weights.append((name, state[name].untyped_storage().nbytes()))
        args, kwargs = tree_map(fake, (args, kwargs))
        for i, tensor in enumerate(tree_flatten((args, kwargs))[0]):
            if isinstance(tensor, torch.Tensor) and recorder.adopt(tensor):
                recording.inputs.append((f"input {i}", tensor.untyped_storage().nbytes()))
        with (
            _reparametrize_module(module, state),
            _path(recorder, names),
            _as_on_a_gpu(recorder),
            recorder,
            _Eager(recorder),
        ):
            region = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
            # A compiled function would run as it was written: its compiler gives way to such modes as the recorder's.
            compiles = "torch._dynamo" in sys.modules
            stance = torch.compiler.set_stance("fail_on_recompile") if compiles else contextlib.nullcontext()
            try:
                with region, stance:
                    recording.output = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
            except RuntimeError as error:
                reasons = {"does not require grad": _NO_GRADIENTS, "torch.compile stance": _NO_COMPILER}
                for text, reason in reasons.items():
                    if text in str(error):
                        raise ValueError(f"call: {reason}") from error
                raise
        del args, kwargs
        recorder.sweep()
    return recording


def _in_order_of_to(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers as Module.to goes through them: submodules first."""
    for name, child in module.named_children():
        yield from _in_order_of_to(child, f"{prefix}{name}.")
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None:
                yield prefix + name, tensor


def predict_peak(
    module: torch.nn.Module, *args: Any, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, used: int | str = 0, protocol: str = USUAL_PROTOCOL,
    call: Callable[..., Any] | None = None, autocast: torch.dtype | None = None, **kwargs: Any,
) -> ModulePrediction:  # fmt: skip
    """What ``torch.cuda``'s memory counters would say of a module's call: a fresh process, by default two warm-up runs,
    one measured.

    Parameters
    ----------
    module, *args, call, autocast, **kwargs
        As `record` takes them.
    gpu : str
        ``"RTX 4090"``, ``"H200"``, ``"sm_89"`` ...
    cudnn_version, torch_version : str, optional
        2.7.1+cu128 and the cuDNN that this build brings by default. The module's own Python code is that of the
        installed versions.
    used : int or str
        What others hold of the card, in bytes or as ``"1.5 GB"``: see `Prediction.fits`.
    protocol : str
        What the process has done when the counters are read, as `vaemem.predict` takes it: ``"cold"``, ``"warm"``,
        ``"repeated"`` or ``"kept"``. What a run returns is dropped before the next one, so that ``"repeated"`` differs
        from ``"warm"`` by one more run.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(4096, 4096, dtype=torch.float16).eval()
    ...     x = torch.empty(2048, 4096, dtype=torch.float16)
    >>> predict_peak(layer, x).allocated >> 20
    17
    """
    settings = {"gpu": gpu, "cudnn_version": cudnn_version, "torch_version": torch_version}
    recording = record(module, *args, gpu=gpu, call=call, autocast=autocast, **kwargs)
    return ModulePrediction(
        recording.trace, recording.weights, recording.inputs, recording.unmodelled, settings, used, protocol
    )
