"""Calls of PyTorch's functions whose way under fake tensors is not the way on a GPU, and those that are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vaemem._common import setting
from vaemem.pytorch.native_transformer import encoder_layer, multi_head_attention
from vaemem.pytorch.recorder import NO_COMPILER, NO_CONTENTS, Recorder, aten

__all__ = ["Eager", "as_on_a_gpu", "check_module"]

_REFUSED = {
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"), NO_CONTENTS),
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


class Eager(TorchFunctionMode):
    """Calls whose way under fake tensors is not the way on a GPU."""

    def __init__(self, recorder: Recorder):
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
                return encoder_layer(self._multi_head_attention, *args, **kwargs)
        if func is torch.nn.functional.linear:
            with setting(self._recorder, adds_in_place=True):  # its bias
                return func(*args, **kwargs)
        if func.__name__ in _REFUSED:
            raise ValueError(f"{self._recorder.name()}: {_REFUSED[func.__name__]}")
        return func(*args, **kwargs)

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        with self:
            return multi_head_attention(self._recorder.kernel, *args, **kwargs)

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
def as_on_a_gpu(recorder: Recorder) -> Iterator[None]:
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
        setting(torch, clear_autocast_cache=clear_autocast_cache),
        setting(torch.overrides, has_torch_function=_never),
        setting(torch.nn.functional, **functional),
        setting(torch.cuda.amp.common, amp_definitely_not_available=_never),
        setting(torch.cuda, is_bf16_supported=lambda *_: True),
    ):
        yield


def check_module(module: torch.nn.Module, call: Any) -> None:
    """Refuses a call that is not modelled, before it runs."""
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
        raise ValueError(f"{compiled[0]}: {NO_COMPILER}")


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
                raise ValueError(f"an index of bools: {NO_CONTENTS}")
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
