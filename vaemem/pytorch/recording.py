"""Records what a module's call takes from the CUDA caching allocator.

The module runs under fake tensors that say they are on a GPU: no weights, no activations, no GPU, no CUDA build of
PyTorch. Storages are followed from the operator that makes them to the death of their last reference, so the Python
frames of the module decide how long tensors live, as they do in a real run. What CUDA operators take besides their
outputs is added from a table.

Where fake tensors would choose otherwise than a GPU: ``scaled_dot_product_attention`` is modelled whole (flash,
memory-efficient or math, by PyTorch's conditions); the bias of a linear layer over a transposed input is added in
place; elementwise operators get the strides that eager ones give.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from vaemem import _core
from vaemem.prediction.eager import eager_strides
from vaemem.prediction.gpus import Gpu, find_gpu
from vaemem.prediction.predict import ModulePrediction

__all__ = ["Recording", "predict_peak", "record"]

aten = torch.ops.aten
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BLAS = (aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default, aten.dot.default)
# Operators besides the pointwise ones that take nothing but their outputs.
_PLAIN_NAMES = """
    empty empty_like empty_strided new_empty zeros zeros_like ones ones_like full full_like new_zeros new_ones
    new_full arange clone _to_copy copy_ cat stack constant_pad_nd upsample_nearest2d embedding index_select
    gather _softmax _log_softmax native_layer_norm _unsafe_view repeat roll tril triu lift_fresh scalar_tensor
    randn rand randn_like rand_like native_dropout fill_ zero_ avg_pool2d glu index fill linspace flip eye
    rms_norm _fused_rms_norm
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
    >>> recording = record(torch.nn.Linear(8, 8), torch.empty(4, 8))
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
        self.in_linear = False
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
        self.sweep()
        if self.in_linear and func is aten.add.Tensor:
            func = aten.add_.Tensor  # a real linear layer adds its bias in place
        if func is aten.convolution.default:
            return self._convolution(*args)
        out = func(*args, **kwargs)
        if torch.Tag.pointwise in func.tags and not func._schema.is_mutable and func.overloadpacket not in _PLAIN:
            out = self._as_eager(func, args, out)
        elif func is aten.view.default:
            out = self._view_as_eager(args[0], out)
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                self.bind(tensor)
        if func is aten.native_group_norm.default:
            self._group_norm(*args)
        elif func is aten.addmm.default:
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
        """Input made dense, output, filter made dense in channels-last, workspace."""
        self._silent = True
        out = aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
        nhwc = out.dim() == 4 and torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
        if nhwc != (torch.channels_last == suggest_memory_format(out)):  # a build without cuDNN chose
            out = torch.empty_like(out, memory_format=torch.channels_last if nhwc else torch.contiguous_format)
        self._silent = False
        wanted = torch.channels_last if nhwc else torch.contiguous_format
        size = x.element_size()
        copies = [] if x.is_contiguous(memory_format=wanted) else [self.borrow(x.numel() * size, "contiguous")]
        self.bind(out)
        if not weight.is_contiguous(memory_format=wanted):
            copies.append(self.borrow(weight.numel() * size, "filter"))
        k, _, r, s = weight.shape if weight.dim() == 4 else (0, 0, 0, 1)
        simple = (
            r == s and len({*stride}) == len({*padding}) == 1 and {*dilation} == {1} and not transposed and groups == 1
        )
        if simple and x.dtype in _DTYPES:
            n, c, h, w = x.shape
            self._trace.conv(_DTYPES[x.dtype], n, c, h, w, k, r, stride[0], padding[0], nhwc, self.name("workspace"))
        else:
            self._miss("aten.convolution (not square, unevenly strided or padded, dilated, grouped or transposed)")
        for number in reversed(copies):
            self._trace.give(number)
        return out

    def _group_norm(self, x: Any, weight: Any, bias: Any, n: int, c: int, pixels: int, groups: int, eps: float) -> None:
        """Mean and rstd are outputs and followed as such; the fused parameters come and go."""
        if pixels > 1 and weight is not None:
            fused = [self.borrow(4 * n * c, "statistics") for _ in range(2)]
            for number in fused:
                self._trace.give(number)

    def attention(self, q: Any, k: Any, v: Any, mask: Any, gqa: bool) -> Any:
        """scaled_dot_product_attention: (N, heads, L, E) laid out as (N, L, heads, E)."""
        self.sweep()
        *batch, queries, _ = q.shape
        heads = batch.pop() if batch else 1
        copies = []
        if mask is not None:
            size = mask.numel() * q.element_size()
            if mask.dtype is torch.bool:
                copies.append(self.borrow(size, "mask"))
            if mask.shape[-1] % 8:
                copies.append(
                    self.borrow(size // mask.shape[-1] * (mask.shape[-1] + -mask.shape[-1] % 8), "mask, padded")
                )
        if gqa and k.shape[-3] != q.shape[-3]:
            copies += [
                self.borrow(t.numel() // t.shape[-3] * heads * t.element_size(), "repeated heads") for t in (k, v)
            ]
        number = self._trace.attention(
            _DTYPES[q.dtype], math.prod(batch), heads, queries, k.shape[-2], v.shape[-1], mask is not None, *self._gpu,
            self.name("attention"),
        )  # fmt: skip
        self._silent = True
        shape = (*batch, queries, heads, v.shape[-1]) if len(q.shape) > 3 else (*q.shape[:-1], v.shape[-1])
        out = q.new_empty(shape)
        out = out.transpose(-3, -2) if len(q.shape) > 3 else out
        self._silent = False
        self.bind(out, number)
        for number in reversed(copies):
            self._trace.give(number)
        return out


class _Eager(TorchFunctionMode):
    """Calls whose way under fake tensors is not the way on a GPU."""

    def __init__(self, recorder: _Recorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        if func is torch.nn.functional.linear:
            outer, self._recorder.in_linear = self._recorder.in_linear, True
            try:
                return func(*args, **kwargs)
            finally:
                self._recorder.in_linear = outer
        return func(*args, **kwargs)

    def _attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if query.dtype not in _DTYPES:
            raise ValueError(f"scaled_dot_product_attention: want float32, float16 or bfloat16, got {query.dtype}")
        return self._recorder.attention(query, key, value, attn_mask, enable_gqa)


def _view(x: Any, key: Any) -> tuple[Any, list[Any]]:
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
            tensors[dim] = k if isinstance(k, torch.Tensor) else torch.tensor(k, device=x.device)
            dim += max(count, 1)
    return x, [tensors.get(i) for i in range(max(tensors) + 1)] if tensors else []


def _indexed(x: Any, key: Any) -> Any:
    x, tensors = _view(x, key)
    return aten.index.Tensor(x, tensors) if tensors else x


def _set_indexed(x: Any, key: Any, value: Any) -> None:
    x, tensors = _view(x, key)
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
    **kwargs: Any,
) -> Recording:
    """Runs a module under fake tensors and records what a CUDA run would take from the caching allocator.

    Parameters
    ----------
    module : torch.nn.Module
        On any device; ``torch.device("meta")`` does. Neither it nor its parameters are changed. Its mode (``eval()``)
        counts.
    *args, **kwargs
        What the module is called with. Of tensors, shape, strides and dtype count; they may be meta tensors.
    gpu : str
        Decides between attention kernels.
    call : callable, optional
        ``call(module, *args, **kwargs)`` in place of ``module(*args, **kwargs)``: ``lambda vae, z:
        vae.decode(z).sample``.

    Raises
    ------
    ValueError
        Where attention runs in a dtype that is not modelled.
    torch._subclasses.fake_tensor.DataDependentOutputException
        Where what the module does depends on its tensors' contents.

    Notes
    -----
    Recorded without gradients. Sizes of storages that the module changes in place later (``resize_``) are not followed.

    Examples
    --------
    >>> recording = record(torch.nn.Conv2d(3, 8, 3), torch.empty(1, 3, 64, 64))
    >>> recording.weights, tuple(recording.output.shape)
    ([('weight', 864), ('bias', 32)], (1, 8, 62, 62))
    """
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
            fakes[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
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
        with _reparametrize_module(module, state), _path(recorder, names), recorder, _Eager(recorder):
            recording.output = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
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
    torch_version: str | None = None, used: int | str = 0, call: Callable[..., Any] | None = None, **kwargs: Any,
) -> ModulePrediction:  # fmt: skip
    """What ``torch.cuda``'s memory counters would say of a module's call: a fresh process, two warm-up runs, one
    measured.

    Parameters
    ----------
    module, *args, call, **kwargs
        As `record` takes them.
    gpu : str
        ``"RTX 4090"``, ``"H200"``, ``"sm_89"`` ...
    cudnn_version, torch_version : str, optional
        2.7.1+cu128 and the cuDNN that this build brings by default. The module's own Python code is that of the
        installed versions.
    used : int or str
        What others hold of the card, in bytes or as ``"1.5 GB"``: see `Prediction.fits`.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(4096, 4096, dtype=torch.float16)
    ...     x = torch.empty(2048, 4096, dtype=torch.float16)
    >>> predict_peak(layer, x).allocated >> 20
    17
    """
    settings = {"gpu": gpu, "cudnn_version": cudnn_version, "torch_version": torch_version}
    recording = record(module, *args, gpu=gpu, call=call, **kwargs)
    return ModulePrediction(recording.trace, recording.weights, recording.inputs, recording.unmodelled, settings, used)
