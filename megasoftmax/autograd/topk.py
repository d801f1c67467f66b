"""Autograd and vmap of softmax + top-k, by any implementation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import (
    Implementation,
    Rules,
    batch_aligned,
    batch_first,
    differentiable,
    has_no_room,
    one_by_one,
    plain_torch_only,
    why_only_without_kernels,
)
from megasoftmax.reference.softmax import (
    accumulation_dtype,
    curvature_of_scores,
    is_linear,
    slope_of_scores,
)
from megasoftmax.reference.topk import (
    BESIDE_LOGITS,
    BackwardArguments,
    ForwardArguments,
    scale_of,
    softmax_topk_backward,
    softmax_topk_double_backward,
    softmax_topk_forward,
)

REFERENCE = Implementation(softmax_topk_forward, softmax_topk_backward)

_COUNT, _BACKWARD_COUNT = len(ForwardArguments._fields), len(BackwardArguments._fields)
_BACKWARD_TENSORS = (*BackwardArguments._fields[:6], "mask", "bias", "row_scale")
# Tensors of the forward that choose entries, and have no gradient.
_CHOOSING = ("row_top_k", "row_top_p", "row_min_p", "selection_bias")


def save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps for `gradients` what it needs. `inputs` begin as `softmax_topk_forward`'s."""
    given = ForwardArguments(*inputs[:_COUNT])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, given.logits, given.mask, given.bias, given.row_scale)
    ctx.given = given._replace(
        logits=None, mask=None, bias=None, row_scale=None, **dict.fromkeys(_CHOOSING)
    )


def gradients(
    implementation: Implementation,
    ctx: Any,
    gradient: Tensor | None,
    _: None,
    statistics_gradient: Tensor | None,
) -> Any:
    """The gradients of the arguments of `softmax_topk_forward`.

    Of the statistics the log-sum-exp has one; the two that it consists of are constants.
    """
    given = ctx.given
    if given.candidates:
        raise NotImplementedError("candidates: expected False where a gradient is needed, got True")
    values, indices, statistics, logits, mask, bias, row_scale = ctx.saved_tensors
    if gradient is None:
        gradient = values.new_zeros(()).expand(values.shape)
    elif gradient.dim() > 4:  # kernels see at most 4 dimensions; leading ones must merge
        gradient = gradient.contiguous()
    lse_gradient = None if statistics_gradient is None else statistics_gradient[2]

    def found(of_bias: bool, dtype: torch.dtype) -> Tensor:
        return implementation.backward(
            *(gradient, values, indices, lse_gradient, logits, statistics),
            *given[2:4],  # how logits are scaled
            *(mask, bias, given.renormalize, of_bias, dtype, row_scale, given.sigmoid),
        )

    needs = ForwardArguments(*ctx.needs_input_grad[:_COUNT])
    if not needs.bias:
        return ForwardArguments(logits=found(False, logits.dtype) if needs.logits else None)
    of_z = found(True, statistics.dtype)
    d_logits = None
    if needs.logits and is_linear(given):
        d_logits = (of_z * scale_of(given._replace(row_scale=row_scale))).to(logits.dtype)
    elif needs.logits:
        d_logits = found(False, logits.dtype)
    return ForwardArguments(logits=d_logits, bias=of_z.sum_to_size(bias.shape).to(bias.dtype))


def save_for_double_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keeps for `double_gradients` what it needs. `inputs` begin as `softmax_topk_backward`'s."""
    given = BackwardArguments(*inputs[:_BACKWARD_COUNT])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(getattr(given, name) for name in _BACKWARD_TENSORS))
    ctx.given = given._replace(**dict.fromkeys(_BACKWARD_TENSORS))


def double_gradients(implementation: Implementation, ctx: Any, cotangent: Tensor | None) -> Any:
    """The gradients of the arguments of `softmax_topk_backward`."""
    if cotangent is None:
        return BackwardArguments()
    tensors = dict(zip(_BACKWARD_TENSORS, ctx.saved_tensors, strict=True))
    given = ctx.given._replace(**tensors)
    compute, bias = accumulation_dtype(given.logits.dtype), given.bias
    scaled = given._replace(scale=scale_of(given))
    slope = slope_of_scores(given.logits, scaled)
    of_z = cotangent.to(compute) * (1.0 if given.of_bias else slope)
    found = softmax_topk_double_backward(of_z, given)
    constant, d_logits = torch.zeros_like(found.lse), found.z * slope
    if not (is_linear(given) or given.of_bias):
        dz = softmax_topk_backward(*given._replace(of_bias=True, dtype=compute))
        curvature = curvature_of_scores(given.logits, scaled)
        d_logits = d_logits + cotangent.to(compute) * dz * curvature
    return BackwardArguments(
        gradient=found.gradient.to(given.gradient.dtype),
        probabilities=found.probabilities.to(given.probabilities.dtype),
        lse_gradient=found.lse_gradient,
        logits=d_logits.to(given.logits.dtype),
        statistics=torch.stack([constant, constant, found.lse]).to(given.statistics.dtype),
        bias=None if bias is None else found.z.sum_to_size(bias.shape).to(bias.dtype),
    )


def _beside(given: Any, dims: Any, rank: int) -> dict[str, Any]:
    """What broadcasts to the batched logits of that rank, by name."""
    return {
        name: batch_aligned(getattr(given, name), getattr(dims, name), rank - missing)
        for name, missing in BESIDE_LOGITS.items()
        if name in given._fields
    }


def batch_forward(
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    info: Any,
    in_dims: tuple[Any, ...],
    *args: Any,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
    """`forward` under vmap: batches become the first dimension of the logits."""
    given, dims = ForwardArguments(*args), ForwardArguments(*in_dims)
    # Kernels take one selection bias for all rows.
    if has_no_room(given.logits, dims.logits) or dims.selection_bias is not None:
        return one_by_one(forward, info.batch_size, in_dims, args), (0, 0, 0)
    logits = batch_first(given.logits, dims.logits, info.batch_size)
    return forward(*given._replace(logits=logits, **_beside(given, dims, logits.dim()))), (0, 0, 1)


def batch_backward(
    backward: Callable[..., Tensor], info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[Tensor, int]:
    """`backward` under vmap."""
    given, dims = BackwardArguments(*args), BackwardArguments(*in_dims)
    if has_no_room(given.logits, dims.logits):

        def example(*inputs: Any) -> tuple[Tensor]:
            return (backward(*inputs),)

        return one_by_one(example, info.batch_size, in_dims, args)[0], 0
    first = {
        name: batch_first(getattr(given, name), getattr(dims, name), info.batch_size)
        for name in given._fields[:6]
    }
    first["statistics"] = first["statistics"].movedim(0, 1)
    beside = _beside(given, dims, first["logits"].dim())
    return backward(*given._replace(**first, **beside)), 0


FORWARD = Rules(ForwardArguments._fields, save_for_gradients, gradients, batch_forward)
BACKWARD = Rules(
    BackwardArguments._fields, save_for_double_gradients, double_gradients, batch_backward
)
_IN_FORWARD_MODE = why_only_without_kernels("softmax_topk")

call, call_backward = differentiable(
    "SoftmaxTopk",
    FORWARD,
    plain_torch_only(REFERENCE, _IN_FORWARD_MODE),
    BACKWARD,
    _IN_FORWARD_MODE,
)
