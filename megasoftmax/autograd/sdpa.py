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

They have no gradient of what is added to the scores. For a bias with a gradient, matrix products
and torch's softmax compute the call, and the weights P are kept for the backward pass. Then an
output or a gradient of the query that is not finite shows where the rules may differ.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import is_differentiated
from megasoftmax.reference.attention import (
    BackwardArguments,
    attention_backward,
    full_precision,
)
from megasoftmax.reference.softmax import (
    accumulation_dtype,
    plain,
)
from megasoftmax.tracing import is_of_many_gradients, is_traced

_HALVES = (torch.float16, torch.bfloat16)
_FORWARD = torch._scaled_dot_product_flash_attention_for_cpu  # quicker than the op of that name
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def added_to_scores(query: Tensor, bias: Tensor | None, excluded: Tensor | None) -> Tensor | None:
    """The bias, and -inf for what is excluded, [b or 1, h or 1, m or 1, n or 1], or fewer of these
    dimensions, as float32, or float64 of float64 queries; None where neither is given.
    """
    dtype = accumulation_dtype(query.dtype)
    if bias is not None:
        added = bias.detach().to(dtype)
        return added if excluded is None else torch.where(excluded, -torch.inf, added)
    if excluded is None:
        return None
    zeros = torch.zeros(excluded.shape, dtype=dtype, device=excluded.device)
    return zeros.masked_fill_(excluded, -torch.inf)


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
    if added is not None:
        added = added[(None,) * (4 - added.dim())].expand(-1, -1, query.shape[2], key.shape[2])
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
        options = {"scale": scale, "causal": causal}
        return *_by_reference(d_output, ctx.saved_tensors, **options)[:3], None


def _by_reference(d_output: Tensor, saved: Iterable[Any], **options: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and, if options ask for it, of the bias."""
    names = "query", "key", "value", "bias", "output", "statistics"  # the last are not read
    tensors = dict(zip(names, saved, strict=True))
    given = plain(BackwardArguments, d_output=d_output, **tensors, **options)
    return attention_backward(*given)[:4]


_forward = _Attention.forward
# Function.apply without what it does for transforms of functions, which take the reference.
_apply = super(torch.autograd.Function, _Attention).apply


# With a gradient of the bias

_BLOCK = 2**18  # logits, 1 MiB, which a cache holds while products and softmax pass over them


def attention_keeping_weights(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor | None, scale: float
) -> Tensor | None:
    """`attention` with a gradient of the bias.

    Args:
        query, key, value, scale: as in `attention`.
        bias: [b or 1, h or 1, m, n].
        excluded: bool, [b or 1, h or 1, m or 1, n or 1], or None.
    """
    try:
        output: Tensor = _apply_keeping(query, key, value, bias, excluded, scale)
    except _RulesDifferError:
        return None
    return output


class _KeepingWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        excluded: Tensor | None,
        scale: float,
    ) -> Tensor:
        """The output, in memory [b, m, h, d]."""
        batches, heads, queries, dim = shape = query.shape
        added = added_to_scores(query, bias, excluded)
        assert added is not None
        q, k, v = (_of_heads(each.to(added.dtype), heads) for each in (query, key, value))
        output = q.new_empty_strided(shape, (queries * heads * dim, dim, heads * dim, 1))
        weights = q.new_empty(batches, heads, queries, key.shape[2])
        added = added.expand_as(weights)
        with full_precision("cpu"):
            for part in _parts(weights):
                weights[part] = added[part]
                p = _matrices(weights, part)
                p.baddbmm_(_matrices(q, part), _matrices(k, part).mT, alpha=scale)
                torch.softmax(p, -1, out=p)
                of_part = output[part]
                of_part.copy_(torch.bmm(p, _matrices(v, part)).view(of_part.shape))
        if not math.isfinite(output.sum().item()):
            if excluded is None:
                raise _RulesDifferError
            empty = excluded.all(-1, keepdim=True)
            weights.masked_fill_(empty, 0)
            if not math.isfinite(output.masked_fill_(empty, 0).sum().item()):
                raise _RulesDifferError
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, bias, output, weights, excluded)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> Any:
        *saved, excluded = ctx.saved_tensors
        if not (is_differentiated() or is_traced() or is_of_many_gradients(d_output)):
            *inputs, _, weights = saved
            dtype = weights.dtype
            d_bias = inputs[3].new_zeros(inputs[3].shape, dtype=dtype)
            heads = weights.shape[1]
            q, k, v, g_of_all = (
                _of_heads(each.to(dtype), heads) for each in (*inputs[:3], d_output)
            )
            d_query, d_key, d_value = (each.new_empty(each.shape) for each in (q, k, v))
            with full_precision("cpu"):
                for part in _parts(weights):
                    p, g = _matrices(weights, part), _matrices(g_of_all, part)
                    dz = torch.bmm(g, _matrices(v, part).mT)
                    torch._softmax_backward_data(dz, p, -1, dtype, grad_input=dz)
                    shared = [  # batches or heads that share a bias have one
                        each if size > 1 else slice(None)
                        for each, size in zip(part, d_bias.shape[:2], strict=True)
                    ]
                    sum_of_part = d_bias[tuple(shared)]
                    sum_of_part += dz.view_as(weights[part]).sum_to_size(sum_of_part.shape)
                    torch.bmm(dz, _matrices(k, part), out=_matrices(d_query, part))
                    torch.bmm(dz.mT, _matrices(q, part), out=_matrices(d_key, part))
                    torch.bmm(p.mT, g, out=_matrices(d_value, part))
            if math.isfinite(d_query.sum().item()):
                d_query *= ctx.scale
                d_key *= ctx.scale
                if (key_heads := inputs[1].shape[1]) < heads:
                    d_key, d_value = (
                        each.unflatten(1, (key_heads, -1)).sum(2) for each in (d_key, d_value)
                    )
                pairs = zip((d_query, d_key, d_value, d_bias), inputs, strict=True)
                return *(found.to(each.dtype) for found, each in pairs), None, None
        options = {"mask": excluded, "scale": ctx.scale, "bias_gradient": True}
        return *_by_reference(d_output, saved, **options), None, None


def _of_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values, repeated for the query heads that share them."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)


def _parts(weights: Tensor) -> Iterator[tuple[slice, slice]]:
    """The batches and heads of each block: whole batches, or heads of one batch."""
    batches, heads, queries, keys = weights.shape
    of_heads = min(heads, max(1, _BLOCK // (queries * keys)))
    of_batches = max(1, _BLOCK // (heads * queries * keys))
    for batch in range(0, batches, of_batches):
        for head in range(0, heads, of_heads):
            yield slice(batch, batch + of_batches), slice(head, head + of_heads)


def _matrices(tensor: Tensor, part: tuple[slice, slice]) -> Tensor:
    """[b, h, x, y] of these batches and heads, as [b h, x, y]; a view if it is contiguous."""
    return tensor[part].flatten(0, 1)


_apply_keeping = super(torch.autograd.Function, _KeepingWeights).apply
