"""The fast paths of nn.MultiheadAttention and nn.TransformerEncoderLayer, as C++ has them, in Python.

Two operators without a version for fake tensors, written so that tensors live as long as in the C++ functions:
native_multi_head_attention_cuda (native/transformers/cuda/attention.cu, with attention.cpp's functions),
masked_softmax_cuda (native/cuda/SoftMax.cu) and transformer_encoder_layer_forward
(native/transformers/transformer.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

__all__ = ["encoder_layer", "multi_head_attention"]

PERSISTENT = 1024  # elements of a row, and a quarter of its bytes, that the one-pass masked softmax takes at most


def multi_head_attention(
    kernel: Callable[..., str], query: Any, key: Any, value: Any, embed_dim: int, heads: int, qkv_weight: Any,
    qkv_bias: Any, proj_weight: Any, proj_bias: Any, mask: Any = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """torch._native_multi_head_attention; `kernel` says which one scaled_dot_product_attention takes for q, k, v."""
    batch, depth = query.shape[0], embed_dim // heads

    def split(x: Any) -> Any:
        return x.view(batch, -1, heads, depth).transpose(1, 2)

    if query is key and key is value and depth % 8 == 0 and not need_weights and mask is None:
        q = split(query)
        if kernel(q, q, q) in ("flash", "efficient", "cudnn"):
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


def _project(query: Any, key: Any, value: Any, embed_dim: int, weight: Any) -> Any:
    """qkv_projection: (N, length, 3 embed_dim)."""
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
    if row <= PERSISTENT and row * scores.element_size() <= 4 * PERSISTENT and mask.is_contiguous():
        return out
    if mask_type == 1 and mask.dim() == 2:
        mask = mask.view(mask.shape[0], 1, 1, mask.shape[1]).expand(scores.shape)
    return torch.softmax(scores.masked_fill(mask, float("-inf")), -1)


def encoder_layer(
    attend: Callable[..., tuple[Any, Any]], src: Any, embed_dim: int, heads: int, qkv_weight: Any, qkv_bias: Any,
    proj_weight: Any, proj_bias: Any, use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Any,
    norm_bias_1: Any, norm_weight_2: Any, norm_bias_2: Any, ffn_weight_1: Any, ffn_bias_1: Any, ffn_weight_2: Any,
    ffn_bias_2: Any, mask: Any = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """torch._transformer_encoder_layer_fwd; `attend` is multi_head_attention without its first argument."""
    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)

    def norm(x: Any, parameters: tuple[Any, Any]) -> Any:
        return layer_norm(x, (embed_dim,), *parameters, eps)

    x = norm(src, first) if norm_first else src
    x = attend(
        x, x, x, embed_dim, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type
    )[0]  # fmt: skip
    x.add_(src)
    if not norm_first:
        x = norm(x, first)
    before = x
    if norm_first:
        x = norm(x, second)
    hidden = torch._addmm_activation(ffn_bias_1, x.flatten(0, 1), ffn_weight_1.t(), use_gelu=use_gelu)
    x = torch.addmm(ffn_bias_2, hidden, ffn_weight_2.t()).view(src.shape)
    del hidden
    x.add_(before)
    if not norm_first:
        x = norm(x, second)
    return x
