"""Record what a module's call allocates from the CUDA caching allocator.

The module runs under fake tensors that claim to be on a GPU: without weights, activations, a GPU or a CUDA build of
PyTorch. Each storage is followed from the operator that makes it until its last reference dies. The module's Python
frames decide how long tensors live, as in a real run. A table adds the memory of CUDA operators beyond their outputs.

Some paths differ between fake tensors and a GPU. ``scaled_dot_product_attention`` is modelled whole (PyTorch's
conditions and switches choose the kernel), and so are the fast paths of ``nn.MultiheadAttention`` and
``nn.TransformerEncoderLayer``. The bias of a linear layer over a transposed input is added in place. Elementwise
operators get the strides of eager mode. Cases that would be wrong are refused: gradients, recurrent layers, nested
tensors, compiled modules, sizes that depend on the contents of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from vaemem._arguments import shared
from vaemem._common import setting
from vaemem._errors import ArgumentError
from vaemem.prediction.answer import ModulePrediction
from vaemem.prediction.benchmark import USUAL_PROTOCOL
from vaemem.prediction.gpus import find_gpu
from vaemem.prediction.request import ModuleRequest, Software, find_card
from vaemem.prediction.workspace import cudnn_attention, torch_for
from vaemem.pytorch.recorder import NO_COMPILER, NO_CONTENTS, NO_GRADIENTS, Recorder, Recording, aten

_REFUSED = {
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"), NO_CONTENTS),
    **dict.fromkeys(
        ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        "expected a module without GRU, LSTM and RNN layers: cuDNN's memory for them is not modelled",
    ),
    **dict.fromkeys(
        ("_nested_tensor_from_mask", "_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_tensor_list"),
        "expected a module without nested tensors: their sizes depend on a mask's values; give a TransformerEncoder"
        " enable_nested_tensor=False, or no src_key_padding_mask",
    ),
}
MASKS = torch.bool, torch.uint8  # dtypes of an index that says which elements
_REASONS = {"does not require grad": NO_GRADIENTS, "torch.compile stance": NO_COMPILER}  # by PyTorch's messages


def _is_a_matrix(x: torch.Tensor) -> bool:
    """Return whether all dimensions but the last are one dimension in memory."""
    sides = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    return all(stride == after * size for (_, stride), (size, after) in itertools.pairwise(sides))


class Eager(TorchFunctionMode):
    """Replaces calls that behave differently under fake tensors and on a GPU."""

    def __init__(self, recorder: Recorder, refused: Mapping[str, str] = _REFUSED):
        super().__init__()
        self._recorder, self._refused = recorder, refused
        # The bindings of contiguous(), copy_(), ~ and indexing need a CUDA build; the operators below them do not.
        self._replacements: dict[Any, Callable[..., Any]] = {
            torch.Tensor.contiguous: aten.contiguous.default,
            torch.Tensor.copy_: aten.copy_.default,
            torch.Tensor.__invert__: aten.bitwise_not.default,
            torch.Tensor.__getitem__: self._get_item,
            torch.Tensor.__setitem__: self._set_item,
            scaled_dot_product_attention: recorder.attention,
            torch._native_multi_head_attention: self._multi_head_attention,
            torch._transformer_encoder_layer_fwd: self._encoder_layer,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._recorder.caches_casts = torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()
        if func in self._replacements:
            with self:
                return self._replacements[func](*args, **kwargs)
        if func.__name__ in self._refused:
            raise ArgumentError(self._recorder.name(), "", self._refused[func.__name__])
        if func is linear:
            with setting(self._recorder, adds_in_place=True):  # its bias
                return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Copy an input that is no matrix in memory, if the weight could have a gradient: PyTorch then makes one
        product of it instead of a batch of them (should_fold in LinearAlgebra.cpp). Casts have no gradient."""
        if id(weight) in self._recorder.leaves and not self._recorder.caches_casts and not _is_a_matrix(x):
            out = linear(aten.clone.default(x, memory_format=torch.contiguous_format), weight)
            return out if bias is None else out.add_(bias)
        return linear(x, weight, bias)

    def number(self, _: Any) -> int:
        """Return the number in a tensor that is an index. Any number gives the same view."""
        return 0

    def places(self, _: Any) -> Sequence[Any]:
        """Return the places of what a mask selects, by dimension."""
        raise ArgumentError("an index of bools", "", NO_CONTENTS)

    def _get_item(self, x: Any, key: Any) -> Any:
        x, tensors = _view(x, key, self.number)
        found = list[Any]()
        for one in tensors:
            found += [one] if one is None or one.dtype not in MASKS else self.places(one)
        return aten.index.Tensor(x, found) if tensors else x

    def _set_item(self, x: Any, key: Any, value: Any) -> None:
        x, tensors = _view(x, key, self.number)
        if tensors:
            value = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
            aten.index_put_.default(x, tensors, value)
        elif isinstance(value, torch.Tensor):
            aten.copy_.default(x, value)
        else:
            aten.fill_.Scalar(x, value)

    # The fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer: two operators that fake tensors lack,
    # written so that tensors live as long as in C++. Sources: native_multi_head_attention_cuda (native/transformers/
    # cuda/attention.cu, with attention.cpp's functions), masked_softmax_cuda (native/cuda/SoftMax.cu) and
    # transformer_encoder_layer_forward (native/transformers/transformer.cpp).

    def _multi_head_attention(
        self, query: Any, key: Any, value: Any, embed_dim: int, heads: int, qkv_weight: Any, qkv_bias: Any,
        proj_weight: Any, proj_bias: Any, mask: Any = None, need_weights: bool = True,
        average_attn_weights: bool = True, mask_type: int | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        batch, depth = query.shape[0], embed_dim // heads

        def split(x: Any) -> Any:
            return x.view(batch, -1, heads, depth).transpose(1, 2)

        if query is key and key is value and depth % 8 == 0 and not need_weights and mask is None:
            q = split(query)
            if self._recorder.kernel(q, q, q)[1] in ("flash", "efficient", "cudnn"):
                x = linear(query, qkv_weight, qkv_bias)
                y = scaled_dot_product_attention(*map(split, x.chunk(3, -1)))
                return linear(y.transpose(1, 2).reshape(batch, -1, embed_dim), proj_weight, proj_bias), None
        qkv = _project(query, key, value, embed_dim, qkv_weight)
        packed = qkv.new_empty(3, batch, heads, query.shape[1], depth)
        del qkv
        q, k, v = (packed[i].flatten(0, 1) for i in range(3))
        weights: Any = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, query.shape[1], -1)
        if mask is not None:
            weights = _masked_softmax(weights, mask.to(torch.bool), mask_type)
        torch.bmm(weights.flatten(0, 1), v, out=q)
        if not need_weights:
            weights = None
        context = q.view(batch, heads, -1, depth).permute(0, 2, 1, 3).contiguous()
        out = linear(context.view(-1, embed_dim), proj_weight, proj_bias).view(batch, -1, embed_dim)
        del context
        if need_weights and average_attn_weights:
            weights = weights.sum(1)
            weights /= heads
        return out, weights

    def _encoder_layer(
        self, src: Any, embed_dim: int, heads: int, qkv_weight: Any, qkv_bias: Any, proj_weight: Any, proj_bias: Any,
        use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any, norm_bias_1: Any, norm_weight_2: Any,
        norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any, ffn_bias_2: Any, mask: Any = None,
        mask_type: int | None = None,
    ) -> Any:  # fmt: skip
        norm = functools.partial(layer_norm, normalized_shape=(embed_dim,), eps=eps)
        norm_1 = functools.partial(norm, weight=norm_weight_1, bias=norm_bias_1)
        norm_2 = functools.partial(norm, weight=norm_weight_2, bias=norm_bias_2)
        x = norm_1(src) if norm_first else src
        x = self._multi_head_attention(
            x, x, x, embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
        )[0]  # fmt: skip
        x.add_(src)
        before = x = x if norm_first else norm_1(x)
        if norm_first:
            x = norm_2(x)
        hidden = torch._addmm_activation(ffn_bias_1, x.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
        x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(src.shape)
        del hidden
        x.add_(before)
        return x if norm_first else norm_2(x)


_PERSISTENT = 1024  # limit of the one-pass masked softmax: elements of a row, and a quarter of its bytes


def _project(query: Any, key: Any, value: Any, embed_dim: int, weight: Any) -> Any:
    """Project queries, keys and values as qkv_projection does -> (N, length, 3 embed_dim)."""
    if query is key and key is value:
        return torch.matmul(query, weight.t())
    sizes = [embed_dim, 2 * embed_dim] if key is value else [embed_dim] * 3
    parts = [torch.matmul(x, w.t()) for x, w in zip((query, key, value), weight.split(sizes), strict=False)]
    return torch.cat(parts, 2)


def _masked_softmax(scores: Any, mask: Any, mask_type: int | None) -> Any:
    out = torch.empty_like(scores)
    row = scores.shape[-1]
    if mask_type == 0 and mask.dim() == 2:
        mask = mask.expand(scores.shape)
    if row <= _PERSISTENT and row * scores.element_size() <= 4 * _PERSISTENT and mask.is_contiguous():
        return out
    if mask_type == 1 and mask.dim() == 2:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1]).expand(scores.shape)
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1)


def _false(*_: Any) -> bool:
    return False


@contextlib.contextmanager
def imitating_gpu(recorder: Recorder) -> Iterator[None]:
    """Answer the questions of PyTorch's Python code as on a GPU with plain tensors: no tensor and no mode overrides its
    functions, and there is a device for autocast. The recorder keeps autocast's copies."""
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        recorder.casts.clear()
        clear()

    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    with (
        setting(torch, clear_autocast_cache=clear_autocast_cache),
        setting(torch.overrides, has_torch_function=_false),
        setting(torch.nn.functional, **dict.fromkeys(names, _false)),
        setting(torch.cuda.amp.common, amp_definitely_not_available=_false),
        setting(torch.cuda, is_bf16_supported=lambda *_: True),
    ):
        yield


def check_module(module: torch.nn.Module, call: Any) -> None:
    """Refuse a call that is not modelled, before it runs."""
    if module.training:
        advice = "training keeps tensors for the backward pass, which are not modelled"
        raise ArgumentError("module", "a module in eval mode, module.eval()", "one in training mode", advice)
    check_compiled(module, call)


def check_compiled(module: torch.nn.Module, call: Any = None) -> None:
    """Refuse a compiled module or call."""
    for name, m in module.named_modules():
        if hasattr(m, "_orig_mod") or m._compiled_call_impl:
            raise ArgumentError(name or "module", "", NO_COMPILER)
    if hasattr(call, "_torchdynamo_orig_callable"):
        raise ArgumentError("call", "", NO_COMPILER)


def _view(x: Any, key: Any, number: Callable[[Any], int]) -> tuple[Any, list[Any]]:
    """Apply the integers, slices, None and Ellipsis of an index to x. Return the view, and the tensors of the index by
    dimension of the view. number: what a tensor without dimensions stands for."""
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
        elif isinstance(k, torch.Tensor) and not k.dim() and k.dtype not in MASKS:
            x = aten.select.int(x, dim, number(k))
        else:
            tensors[dim] = k if isinstance(k, torch.Tensor) else torch.tensor(k, device=x.device)
            dim += max(count, 1)
    return x, [tensors.get(i) for i in range(max(tensors) + 1)] if tensors else []


# ---- recordings ----


def record(
    module: torch.nn.Module, *args: Any, gpu: str = "RTX 4090", call: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None, **kwargs: Any,
) -> Recording:  # fmt: skip
    """Run a module under fake tensors and record what a CUDA run would allocate from the caching allocator.

    Parameters
    ----------
    module : torch.nn.Module
        In eval mode, on any device; ``torch.device("meta")`` works. Neither it nor its parameters are changed.
    *args, **kwargs
        Arguments of the module. Only shape, strides and dtype of tensors count; meta tensors work.
    gpu : str
        Decides between attention kernels, together with PyTorch's switches (``torch.nn.attention.sdpa_kernel``) around
        this call or inside the module.
    call : callable, optional
        ``call(module, *args, **kwargs)`` instead of ``module(*args, **kwargs)``: ``lambda vae, z:
        vae.decode(z).sample``.
    autocast : torch.dtype, optional
        Run under ``torch.autocast("cuda", autocast)``, which keeps casts of weights until it ends. The module's own
        regions are followed too.

    Raises
    ------
    ValueError
        The module does something that is not modelled, which the message names: training mode, a backward pass,
        ``torch.enable_grad``, compiled code; GRU, LSTM and RNN layers; nested tensors; a path or sizes that depend on
        the contents of tensors; attention in a dtype other than float32, float16 and bfloat16, or with every kernel
        disabled.

    Notes
    -----
    Recording happens without gradients. If the module resizes storages in place (``resize_``), that is not followed.

    During the recording a few functions of PyTorch, such as ``torch.overrides.has_torch_function``, answer as on a GPU,
    also in other threads.

    Examples
    --------
    >>> recording = record(torch.nn.Conv2d(3, 8, 3).eval(), torch.empty(1, 3, 64, 64))
    >>> recording.weights, tuple(recording.output.shape)
    ([('weight', 864), ('bias', 32)], (1, 8, 62, 62))
    """
    return record_by(Recorder(Recording(), find_gpu(gpu)), module, args, kwargs, call, autocast)


def record_by(
    recorder: Recorder, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    call: Callable[..., Any] | None = None, autocast: torch.dtype | None = None, python: type[Eager] = Eager,
) -> Recording:  # fmt: skip
    """Record as `record` does, with a given recorder. python: the mode that replaces Python's calls"""
    check_module(module, call)
    recording = recorder.recording
    names = {id(m): name for name, m in module.named_modules()}

    def enter(m: torch.nn.Module, args: Any) -> None:
        recorder.enter(names.get(id(m)) or type(m).__name__)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: Any) -> Any:
        """Return the tensor's counterpart on the GPU, or on the host if it stays there; one for each tensor."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in fakes:
            device = "cpu" if vars(tensor).get("on_host") else "cuda"
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if (known := vars(tensor).get("contents")) is not None:
                made.__dict__["contents"] = known
            fakes[id(tensor)] = made
            if tensor.requires_grad and tensor.is_leaf and not tensor._is_view():
                recorder.leaves.add(id(made))
        return fakes[id(tensor)]

    with mode, torch.no_grad():
        state = {}
        for name, tensor in _walk_like_to(module):
            state[name] = fake(tensor)
            if recorder.adopt(state[name]):
                recording.weights.append((name, state[name].untyped_storage().nbytes()))
        args, kwargs = tree_map(fake, (args, kwargs))
        for i, tensor in enumerate(tree_flatten((args, kwargs))[0]):
            if isinstance(tensor, torch.Tensor) and recorder.adopt(tensor):
                recording.inputs.append((f"input {i}", tensor.untyped_storage().nbytes()))
        with (
            _reparametrize_module(module, state),
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(lambda *_: recorder.leave(), always_call=True),
            imitating_gpu(recorder),
            recorder,
            python(recorder),
        ):
            region = torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext()
            # The recorder's modes disable the compiler, so a compiled function would run uncompiled: refuse it.
            compiles = "torch._dynamo" in sys.modules
            stance = torch.compiler.set_stance("fail_on_recompile") if compiles else contextlib.nullcontext()
            try:
                with region, stance:
                    recording.output = module(*args, **kwargs) if call is None else call(module, *args, **kwargs)
            except RuntimeError as error:
                for text, reason in _REASONS.items():
                    if text in str(error):
                        raise ArgumentError("call", "", reason) from error
                raise
        del args, kwargs
        recorder.sweep()
    return recording


def _walk_like_to(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers in the order of Module.to: submodules first."""
    for name, child in module.named_children():
        yield from _walk_like_to(child, f"{prefix}{name}.")
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is not None:
                yield prefix + name, tensor


@shared
def predict_peak(
    module: torch.nn.Module, *args: Any, gpu: str = "RTX 4090", cudnn_version: str | None = None,
    torch_version: str | None = None, used: int | str = 0, protocol: str = USUAL_PROTOCOL,
    call: Callable[..., Any] | None = None, autocast: torch.dtype | None = None, **kwargs: Any,
) -> ModulePrediction:  # fmt: skip
    """Predict ``torch.cuda``'s memory counters for a module's call: in a fresh process, by default after two warm-up
    runs and a measured one.

    Parameters
    ----------
    module, *args, call, autocast, **kwargs
        As for `record`.
    gpu : shared
    cudnn_version, torch_version : str, optional
        By default 2.7.1+cu128 and the cuDNN of that build. The module's own Python code is that of the installed
        versions.
    used : shared
        See `Prediction.fits`.
    protocol : str
        Work of the process before the counters are read, as in `vaemem.predict`: ``"cold"``, ``"warm"``,
        ``"repeated"`` or ``"kept"``. A run's result is dropped before the next run, so ``"repeated"`` is ``"warm"``
        plus one more run.

    Notes
    -----
    The prediction is for a call under ``torch.no_grad()``. If gradients are enabled around this call and a parameter
    or an input requires them, the real call keeps more; `substitutions` says so.

    Examples
    --------
    >>> with torch.device("meta"):
    ...     layer = torch.nn.Linear(4096, 4096, dtype=torch.float16).eval()
    ...     x = torch.empty(2048, 4096, dtype=torch.float16)
    >>> predict_peak(layer, x).allocated >> 20
    17
    """
    software = Software(torch_version=torch_version, cudnn_version=cudnn_version, protocol=protocol)
    card = find_card(gpu, used=used)
    cudnn = cudnn_attention(card.gpu, torch_for(card.gpu, torch_version), cudnn_version)
    recording = record_by(Recorder(Recording(), card.gpu, cudnn), module, args, kwargs, call, autocast)
    held = [("weights", size) for _, size in recording.weights] + recording.inputs
    given = [*module.parameters(), *tree_flatten((args, kwargs))[0]]
    with_gradients = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in given)
    more = ("torch.no_grad() for a call with gradients, which would keep more",) if with_gradients else ()
    asked = ModuleRequest(card, software, recording.trace, held, unmodelled=recording.unmodelled, supposed=more)
    return ModulePrediction(asked)
