"""Watch the operators that a module calls under fake tensors: the memory of each, and when its storages die."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from vaemem import _core
from vaemem._common import setting
from vaemem._errors import ArgumentError
from vaemem.prediction.gpus import Gpu
from vaemem.pytorch.eager import AttentionCall, eager_strides

aten = torch.ops.aten
_EXPIRED: Any = torch.UntypedStorage._expired
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_BLAS = {getattr(aten, name).default for name in ("mm", "bmm", "baddbmm", "addmv", "mv", "dot")} | {aten.bmm.out}
# Operators, in addition to pointwise ones, that allocate only their outputs.
_PLAIN_NAMES = """
    empty empty_like empty_strided new_empty zeros zeros_like ones ones_like full full_like new_zeros new_ones
    new_full arange clone _to_copy copy_ cat stack constant_pad_nd upsample_nearest2d _upsample_nearest_exact2d
    embedding index_select gather _softmax _log_softmax native_layer_norm _unsafe_view repeat roll tril triu triu_
    lift_fresh scalar_tensor randn rand randn_like rand_like native_dropout fill_ zero_ avg_pool2d glu index fill
    linspace flip eye rms_norm _fused_rms_norm masked_fill masked_fill_ scatter_ upsample_bilinear2d replication_pad1d
    floor_divide
"""
_PLAIN = {getattr(aten, name) for name in _PLAIN_NAMES.split() if hasattr(aten, name)}


def _is_plain(func: Any) -> bool:
    own = func.is_view or func.namespace == "prim" or func.overloadpacket in _PLAIN or torch.Tag.pointwise in func.tags
    return own or (func._schema.name.endswith("_") and torch.Tag.inplace_view in func.tags)


# They copy an input that is not dense. The copy is counted if its rows are dense, as those of a video's frames.
_UPSAMPLES = {aten.upsample_nearest2d, aten._upsample_nearest_exact2d, aten.upsample_bilinear2d}


# A sum over a dimension allocates only its output if one block of threads computes each element. It does so for fewer
# than 256 numbers a thread; 4 threads share an element, or a warp of 32 along a dense dimension (setReduceConfig in
# Reduce.cuh: 512 threads, for 32 elements each of up to 4 outputs).
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.any, aten.all}
_NORM = aten.linalg_vector_norm
_BLOCK_SUMS, _FEWEST, _WARP = 256, 4, 32


def _sums_in_a_block(func: Any, out: Any, x: Any, *more: Any) -> bool:
    if func.overloadpacket not in _REDUCTIONS | {_NORM} or not out.numel():
        return False
    dims = (more[1:] if func.overloadpacket is _NORM else more) or (None,)  # the norm's order comes first
    summed = [dims[0]] if isinstance(dims[0], int) else dims[0] or range(x.dim())
    together = min((x.stride(i) for i in summed), default=1) == 1
    return bool(x.numel() // out.numel() < _BLOCK_SUMS * (_WARP if together else _FEWEST))


class Recording:
    """Result of `record`.

    Attributes
    ----------
    trace : vaemem._core.Trace
        The call: storages, convolutions, matrix products.
    weights : list of (str, int)
        Name and bytes of parameters and buffers, in the order in which ``Module.to`` moves them; shared ones once.
    inputs : list of (str, int)
        Storages of the input tensors.
    output : object
        The call's result, of fake tensors.
    unmodelled : dict
        {operator: number of calls} of operators that may allocate more than their outputs; the trace lacks the rest.

    Examples
    --------
    >>> from vaemem.pytorch import record
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


# Operators whose temporary memory may be ignored. `any` and `all` of a whole tensor take 1 KiB and free it at once.
# `cumsum` takes some if it sums a whole tensor (ScanKernels.cpp), as of a prompt's mask; so does `nonzero` besides its
# output, and `count_nonzero` a byte for each of a sampler's first latents. `tril_` works in place. comfy-kitchen's
# kernels of positions allocate nothing but their outputs on an NVIDIA card.
NEGLIGIBLE = {
    "aten.all.default", "aten.any.default", "aten.cumsum.default", "aten.nonzero.default", "aten.tril_.default",
    "aten.count_nonzero.default",
    *(
        f"comfy_kitchen.{name}{one}{place}.default"
        for name in ("apply_rope", "apply_rope_split_half", "rms_rope", "rms_rope_split_half")
        for one in ("", "1")
        for place in ("", "_")
    ),
}  # fmt: skip


def leaves_of(x: Any) -> list[Any]:
    """List what an operator's arguments or results hold. torch.utils._pytree takes several times as long."""
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (tuple, list)):
        return [x]
    return [leaf for one in x for leaf in leaves_of(one)]


def map_leaves(f: Callable[[Any], Any], x: Any) -> Any:
    """Return an operator's arguments or results with `f` of what they hold."""
    if type(x) in (tuple, list):
        return type(x)([map_leaves(f, one) for one in x])
    return {key: map_leaves(f, one) for key, one in x.items()} if type(x) is dict else f(x)


class Recorder(TorchDispatchMode):
    """Follows storages through the operators that run."""

    def __init__(self, recording: Recording, gpu: Gpu, cudnn: int = 0):
        """cudnn: as `cudnn_attention` gives it"""
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self._trace = recording, recording.trace
        self._gpu, self._cudnn = gpu, cudnn
        self.path: list[str] = []
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by storage address: allocations of the call
        self._kept: dict[int, StorageWeakRef] = {}  # by storage address: allocated before the call; keeps the address
        self.leaves: set[int] = set()  # ids of tensors for parameters that require gradients
        self.casts: dict[int, torch.Tensor] = {}  # autocast's copies of them, which it keeps until its region ends
        self.adds_in_place = False
        self.caches_casts = False  # inside a region of autocast with its cache on
        self._silent = False  # the recorder itself runs operators

    # ---- storages ----

    def adopt(self, tensor: torch.Tensor) -> bool:
        """Note a storage from before the call; return whether it is new."""
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._kept
        self._kept[storage._cdata] = StorageWeakRef(storage)
        return new

    def sweep(self) -> None:
        """Record that storages are freed which died since the last operator."""
        # As reference.expired(), for hundreds of storages at each operator.
        for key in [key for key, (reference, _) in self._alive.items() if _EXPIRED(reference.cdata)]:
            self._trace.give(self._alive.pop(key)[1])

    def bind(self, tensor: torch.Tensor, number: int | None = None) -> None:
        """Record an operator's new storage: allocate it, unless it already has a `number` in the trace."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if tensor.device.type == "cuda" and storage._cdata not in self._kept and (not known or known[0].expired()):
            number = self._trace.take(storage.nbytes(), self.name()) if number is None else number
            self._alive[storage._cdata] = (StorageWeakRef(storage), number)

    def number_of(self, address: int) -> int:
        """Return the number in the trace of a storage that lives, by its address; -1 if it is older."""
        return self._alive[address][1] if address in self._alive else -1

    def enter(self, name: str) -> None:
        """Begin a module's call."""
        self.path.append(name)

    def leave(self) -> None:
        """End a module's call."""
        self.path.pop()

    def name(self, what: str = "") -> str:
        """Return the current module, with `what` in brackets."""
        return (self.path[-1] if self.path else "call") + (f" [{what}]" if what else "")

    def borrow(self, count: int, what: str) -> int:
        """Record an allocation of `count` bytes; return its number in the trace."""
        return self._trace.take(count, self.name(what))

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.namespace == "aten":  # composite operators arrive whole
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE.name):
                with self:  # decompose as C++ does; func.decompose may use Python's version
                    return func._op_dk(_COMPOSITE, *args, **kwargs)
        self.sweep()
        if torch.is_grad_enabled() and any(id(x) in self.leaves for x in leaves_of(args)):
            raise ArgumentError(self.name(), "", NO_GRADIENTS)
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
            is_resized = func is aten.upsample_bilinear2d.default and args[0].is_cuda
            out = self._resized(*args) if is_resized else func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            out = self.by_contents(func, args, kwargs)
        if torch.Tag.pointwise in func.tags and not func._schema.is_mutable and func.overloadpacket not in _PLAIN:
            out = self._as_eager(func, args, out)
        elif func is aten.view.default:
            out = self._view_as_eager(args[0], out)
        tensors = [x for x in leaves_of(out) if isinstance(x, torch.Tensor)]
        for tensor in tensors:
            self.bind(tensor)
        if tensors and not any(tensor.is_cuda for tensor in tensors):
            return out  # on the host
        if func is aten.native_group_norm.default:
            _, weight, _, n, c, pixels, *_ = args
            if pixels > 1 and weight is not None:  # mean and rstd are outputs; fused parameters are temporary
                for number in [self.borrow(4 * n * c, "statistics") for _ in range(2)]:
                    self._trace.give(number)
        elif func in (aten.addmm.default, aten._addmm_activation.default):
            bias, _, b = args[:3]
            fused = bias.dim() == 1 and bias.is_contiguous() and min(b.shape) > 1 and kwargs.get("beta", 1) == 1
            self._trace.blas(self.name("workspace"), fused)
        elif func in _BLAS:
            self._trace.blas(self.name())
        elif func.overloadpacket in _UPSAMPLES and not args[0].is_contiguous() and args[0].stride(-1) == 1:
            self._trace.give(self.borrow(args[0].numel() * args[0].element_size(), "contiguous"))
        elif not _is_plain(func) and not _sums_in_a_block(func, out, *args):
            self._count_unmodelled(str(func))
        return out

    def _resized(self, x: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        """Return the output of a bilinear resize, whose decomposition for fake tensors wants CUDA."""
        form = torch._prims_common.suggest_memory_format(x)
        with setting(self, _silent=True):
            return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=form)

    def by_contents(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that needs its arguments' contents. Here there are none."""
        asks = f"{func} reads a value (.item() and `if` on a tensor do)"
        raise ArgumentError(self.name(), "", NO_CONTENTS, asks) from None

    def _count_unmodelled(self, what: str) -> None:
        self.recording.unmodelled[what] = self.recording.unmodelled.get(what, 0) + 1

    def _is_autocast(self, x: Any, dtype: Any) -> bool:
        """Return whether autocast casts a weight here and keeps the result (cached_cast in autocast_mode.cpp)."""
        return (
            self.caches_casts
            and not torch.is_autocast_enabled("cuda")  # off below autocast; on if the module itself casts
            and id(x) in self.leaves
            and x.dtype is torch.float32
            and dtype is torch.get_autocast_dtype("cuda")
        )

    def _as_eager(self, func: Any, args: Any, out: Any) -> Any:
        """Return a pointwise operator's output with the strides of eager mode. Fake tensors have other formulas: a
        batch of one gets another stride, and later operators take that for another memory format."""
        if not isinstance(out, torch.Tensor):
            return out
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        shapes = [(tuple(x.shape), x.stride()) for x in tensors]
        if func._overloadname == "Tensor":  # in this overload a Python number is a tensor without dimensions
            shapes += [((), ()) for x in args[:2] if isinstance(x, bool | int | float | complex)]
        stride = eager_strides(tuple(out.shape), shapes)
        if stride == out.stride() or not tensors:
            return out
        with setting(self, _silent=True):
            return torch.empty_strided(out.shape, stride, dtype=out.dtype, device=out.device)

    def _view_as_eager(self, x: Any, out: Any) -> Any:
        """Return a view with the strides of eager mode, which differ for a dimension of size 1."""
        with no_dispatch(), torch._C.DisableTorchFunction():
            stride = torch.empty_strided(x.shape, x.stride(), device="meta").view(out.shape).stride()
        if stride == out.stride():
            return out
        with setting(self, _silent=True):
            return aten.as_strided.default(x, out.shape, stride, x.storage_offset())

    def _convolution(
        self, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
        output_padding: Any, groups: int,
    ) -> Any:  # fmt: skip
        """Record a dense copy of the input, output, a dense channels-last copy of the filter, workspace. A 1D
        convolution is a 2D one with a height of 1; its input is made dense first."""
        size, copies, lines = x.element_size(), [], x.dim() == 3
        with setting(self, _silent=True):
            if lines and not x.is_contiguous():
                x = torch.empty_like(x, memory_format=torch.contiguous_format)
                copies.append(self.borrow(x.numel() * size, "contiguous"))
            how = stride, padding, dilation, transposed, output_padding, groups
            out = aten.convolution.default(x, weight, bias, *how)
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
        if not x.is_contiguous(memory_format=wanted):
            copies.append(self.borrow(x.numel() * size, "contiguous"))
        self.bind(out)
        if not weight.is_contiguous(memory_format=wanted):
            copies.append(self.borrow(weight.numel() * size, "filter"))
        if x.dtype in _DTYPES:
            n, c, *depth, h, w = x.shape
            conv = (
                _DTYPES[x.dtype], n, c, h, w, out.shape[1], tuple(weight.shape[2:]), tuple(stride), tuple(padding),
                "nhwc" if nhwc else "nchw", tuple(dilation), groups, tuple(output_padding) if transposed else None,
                *depth,
            )  # fmt: skip
            self._trace.conv(conv, self.name("workspace"))
        else:
            self._count_unmodelled(f"aten.convolution in {x.dtype}")
        for number in reversed(copies):
            self._trace.give(number)
        return result

    def _safe_softmax(self, x: Any, dim: int, dtype: Any = None) -> Any:
        """Record a softmax that gives 0 for rows of only -inf: one operator for a mode, five for the allocator."""
        with self:
            out = aten._softmax.default(x if dtype is None else x.to(dtype), dim, False)
            least = x.new_full((), float("-inf"))
            masked = x == least
            rows = masked.new_empty([1 if i == dim % x.dim() else n for i, n in enumerate(x.shape)])
            return torch.where(rows, out.new_zeros(()), out)

    def kernel(
        self, q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, grouped: bool = False
    ) -> tuple[AttentionCall, str]:
        """Return a call of scaled_dot_product_attention and the kernel that runs it."""
        if q.dtype not in _DTYPES:
            raise ArgumentError("scaled_dot_product_attention", "float32, float16 or bfloat16", str(q.dtype))
        queries, keys, values = ((tuple(x.shape), x.stride()) for x in (q, k, v))
        size = None
        if mask is not None:
            size = mask.numel(), mask.shape[-1], mask.dtype is torch.bool, mask.stride(-1) != 1
        call = _DTYPES[q.dtype], queries, keys, values, size, causal, grouped
        return call, _core.Trace.choose_kernel(call, self._gpu.sm, self._cudnn, _enabled_kernels(self._cudnn > 0))

    def attend(self, call: AttentionCall, kernel: str) -> int:
        """Record a kernel's allocations; return the number of its output in the trace."""
        return self._trace.attend(call, kernel, self._gpu.sm, self._gpu.multiprocessors, self.name())

    def attention(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Any = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        """Record scaled_dot_product_attention."""
        q, k, v, mask = query, key, value, attn_mask
        if torch.is_autocast_enabled("cuda"):
            low = torch.get_autocast_dtype("cuda")
            q, k, v, mask = (x.to(low) if x is not None and x.is_floating_point() else x for x in (q, k, v, mask))
        call, kernel = self.kernel(q, k, v, mask, is_causal, enable_gqa)
        self.sweep()
        if kernel == "math":
            if mask is not None and mask.dtype is torch.bool:
                with setting(self, _silent=True):
                    mask = q.new_empty(mask.shape)
                self.bind(mask, self.borrow(mask.numel() * mask.element_size(), "mask"))
            # C++ adds the mask in place for plain tensors, but not for subclasses such as fake tensors.
            with setting(self, adds_in_place=True):
                return torch._scaled_dot_product_attention_math(
                    q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )[0]
        if dropout_p:
            self._count_unmodelled("scaled_dot_product_attention with dropout")
        if kernel == "cudnn" and self._gpu.sm != 90:
            self._count_unmodelled("the workspace of cuDNN's attention")
        number = self.attend(call, kernel)
        batch, heads, queries, _ = q.shape
        with setting(self, _silent=True):
            out = q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
        self.bind(out, number)
        return out


NO_CONTENTS = "expected a call whose steps and sizes do not depend on its tensors' values, because they have none here"
NO_GRADIENTS = (
    "expected a call without gradients, got a backward pass or torch.enable_grad(): autograd's memory is not modelled"
)
NO_COMPILER = (
    "expected a call before torch.compile, got a compiled one: compiled code fuses operators and plans memory by"
    " itself, which is not modelled"
)


def _enabled_kernels(cudnn_first: bool) -> tuple[str, ...]:
    """List the kernels of scaled_dot_product_attention that are enabled, in PyTorch's order (``torch.nn.attention.
    sdpa_kernel``, ``torch.backends.cuda.enable_flash_sdp`` and others). cudnn_first: whether cuDNN's precedes them if
    nobody has set an order."""
    backend, switches = torch.nn.attention.SDPBackend, torch.backends.cuda
    known = {
        backend.FLASH_ATTENTION: ("flash", switches.flash_sdp_enabled()),
        backend.EFFICIENT_ATTENTION: ("efficient", switches.mem_efficient_sdp_enabled()),
        backend.CUDNN_ATTENTION: ("cudnn", switches.cudnn_sdp_enabled()),
        backend.MATH: ("math", switches.math_sdp_enabled()),
    }
    order = torch._C._get_sdp_priority_order()
    if cudnn_first and order == _USUAL_ORDER:
        order = sorted(order, key=lambda one: backend(one) != backend.CUDNN_ATTENTION)
    return tuple(name for name, is_on in (known.get(backend(one), ("", False)) for one in order) if is_on)


_USUAL_ORDER = torch._C._get_sdp_priority_order()
