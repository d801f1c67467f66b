"""Attention by the CPU kernels of torch's scaled_dot_product_attention ("SDPA").

They leave the log-sum-exp of each row, and their backward pass is an op. Both show where our rules
may differ, so that the reference computes instead:
* A log-sum-exp of NaN, where a tensor is added: it may come from an excluded score, for -inf is
  added to it, and NaN remains NaN. Causality by itself puts -inf in the place of scores.
* A log-sum-exp that is not finite, in 16 bits: a visible NaN or +inf may leave the output finite.
* A log-sum-exp of exactly 0, where no tensor is added: the row may be all -inf, or have fewer than
  16 keys and a NaN, for which these kernels return 0, and not NaN.
* A gradient of the query that is not finite: gradients of scores are p (dp - D). For p = 0 that is
  NaN in these kernels if dp or D is not finite. It should be 0.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import is_differentiated
from megasoftmax.reference.attention import BackwardArguments, attention_backward
from megasoftmax.reference.softmax import (
    accumulation_dtype,
    excluded_by_ranges,
    excluded_by_window,
    plain,
    union,
)
from megasoftmax.tracing import is_of_many_gradients, is_traced

_HALVES = (torch.float16, torch.bfloat16)
_FORWARD = torch._scaled_dot_product_flash_attention_for_cpu  # quicker than the op of that name
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def added_to_scores(
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: tuple[int, int],
    first: Tensor | None,
    end: Tensor | None,
) -> Tensor | None:
    """The bias, and -inf for what is excluded, [b or 1, h or 1, m, n]; None where neither is given.

    Args:
        query, key: [b, h, m, d], [b, hk, n, d].
        bias: [b or 1, h or 1, m or 1, n or 1], not differentiated.
        mask, causal, first, end: as in `attention_forward`.
        window: (left, right).
    """
    queries, keys = query.shape[2], key.shape[2]
    excluded = union(
        mask,
        excluded_by_window(queries, keys, causal, *window, query.device),
        excluded_by_ranges(first, end, keys),
    )
    dtype = accumulation_dtype(query.dtype)
    if bias is not None:
        added = bias.detach().to(dtype)
        if excluded is not None:
            added = torch.where(excluded, -torch.inf, added)
    elif excluded is not None:
        zeros = torch.zeros(excluded.shape, dtype=dtype, device=excluded.device)
        added = zeros.masked_fill_(excluded, -torch.inf)
    else:
        return None
    return added[(None,) * (4 - added.dim())].expand(-1, -1, queries, keys)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor | None:
    """The output of `attention_forward`, differentiable; None where the reference must compute.

    Args:
        query, key, value: as in `attention_forward`, without sizes of 0; dv = d.
        added: from `added_to_scores`.
        causal: with as many queries as keys.
        scale: factor of the products.
    """
    outer, heads, row, column = query.stride()
    if not (
        column == key.stride()[3] == value.stride()[3] == 1
        and min(outer, heads, row) >= query.shape[3]
    ):
        # The output gets the strides of the query, and its rows must not overlap.
        query, key, value = query.contiguous(), _with_dense_rows(key), _with_dense_rows(value)
    options = added, causal, scale
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    try:
        if needs_gradient and torch.is_grad_enabled():
            return _apply(query, key, value, options)
        return _forward(None, query, key, value, options)
    except _RulesDifferError:
        return None


class _RulesDifferError(Exception):
    """The reference must compute. Raised, because a second result of a function costs each call."""


def _with_dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: tuple[Tensor | None, bool, float],
    ) -> Tensor:
        """The output, in memory [b, m, h, d]; nothing is kept where ctx is None."""
        added, causal, scale = options
        output, lse = _FORWARD(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
        if (added is not None or query.dtype in _HALVES) and not math.isfinite(lse.sum().item()):
            raise _RulesDifferError
        if added is None and lse.count_nonzero().item() < lse.numel():
            raise _RulesDifferError
        _, heads, queries, dim = shape = output.shape
        strides = (queries * heads * dim, dim, heads * dim, 1)
        if output.stride() != strides:  # it lies as the query does
            # Not a view: autograd lets no output that is a view be changed in place.
            output = output.new_empty_strided(shape, strides).copy_(output)
        if ctx is not None:
            ctx.save_for_backward(query, key, value, added, output, lse)
            ctx.parameters = causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        query, key, value, added, output, lse = ctx.saved_tensors
        causal, scale = ctx.parameters
        if not (is_differentiated() or is_traced() or is_of_many_gradients(d_output)):
            found = _BACKWARD(
                *(d_output, query, key, value, output, lse, 0.0, causal),
                attn_mask=added,
                scale=scale,
            )
            if math.isfinite(found[0].sum(dtype=lse.dtype).item()):
                return *found, None
        tensors = {"d_output": d_output, "query": query, "key": key, "value": value, "bias": added}
        results = {"output": output, "statistics": lse}
        d_query, d_key, d_value, _, _ = attention_backward(
            *plain(BackwardArguments, **tensors, **results, scale=scale, causal=causal)
        )
        return d_query, d_key, d_value, None


_forward = _Attention.forward
# Function.apply without what it does for transforms of functions, which take the reference.
_apply = super(torch.autograd.Function, _Attention).apply
