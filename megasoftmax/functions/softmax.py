"""Softmax of attention scores."""

import inspect
import math
from typing import Any, Literal, Never, cast, overload

import torch
from torch import Tensor

from megasoftmax import arguments, autograd, checks, dispatch, host, ops
from megasoftmax.arguments import Ranges, Window
from megasoftmax.dispatch import Reason
from megasoftmax.functions.calls import (
    bound_arguments,
    call_op,
    cast_for_kernels,
    dtype_of_probabilities,
    int32_bounds,
    runs_as_op,
    runs_fused,
    seed_of_call,
    tensor_and_number,
)
from megasoftmax.functions.traced import traced_softmax


@overload
def softmax(
    scores: Tensor,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    dim: int = ...,
    fused: bool | None = ...,
) -> Tensor: ...


@overload
def softmax(
    scores: Tensor,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    dim: int = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def softmax(
    scores: Tensor,
    *unnamed: Never,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    dim: int = -1,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax of attention scores, fused on NVIDIA GPUs.

        z = scale * scores + bias
        p = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  m = max(z, sink)

    computed in float32 (float64 for float64 scores), whatever the types of the tensors. Exact: the
    same rules hold on GPU and CPU, fused or not. Below, a row is the slice that sums to 1: along
    the last dimension, unless `dim` says otherwise.

    * An excluded entry (by mask, causal, window or visible: their union) has probability exactly 0
      and gradient exactly 0, whatever scores, bias and incoming gradient hold there.
    * A row with nothing left has probabilities 0, gradients 0 and a log-sum-exp of -inf where
      mask, bias, causal, window or visible is given, and with a sink a log-sum-exp of the sink. The
      plain softmax of a row of -inf is NaN.
    * A NaN or +inf that is not excluded makes every entry of its row that is not excluded NaN.

    Differentiable with respect to scores, bias and sink, twice too; incoming gradients are not
    modified. The same call gives the same bits on the same device, gradients included. Forward mode
    (torch.func.jvp) is supported, but not over reverse mode (torch.func.hessian).

    DTensors stay split along the dimensions before queries and keys, see
    `megasoftmax.distributed.sharding`. Under torch.vmap each example drops what it would drop
    alone.

    Args:
        scores: [..., heads, queries, keys], float16, bfloat16, float32 or float64; any rank from 1
            on, any strides.
        scale: factor of the scores, finite; never rounded to their type. A number, a numpy scalar
            or a tensor without dimensions on a CPU.
        mask: bool, True = excluded, broadcastable to scores, any strides; not materialised.
        bias: floating, broadcastable to scores, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        causal: exclude keys after the query: query i sees key j where j <= i + keys - queries.
        window: (left, right), each from -1 on: query i sees key j where
            i + keys - queries - left <= j <= i + keys - queries + right; -1 = no limit on that
            side. A window of W tokens that ends at the query is (W - 1, 0).
        visible: (first, end): a query sees keys first <= j < end. Each is None, no limit, or int32
            (int64 is converted), broadcastable to [..., heads, queries], any strides; see
            `megasoftmax.ranges`. What lies outside of [0, keys] is cut, and a range with
            end <= first is empty. Kernels do not compute what is not visible.
        sink: a logit that joins the denominator but has no column: floating [heads], or one
            element, or a number. 0 gives the off-by-one softmax. A sink of -inf is the same as no
            sink, and has gradient 0.
        dropout: from 0 to 1, the probability that an entry becomes 0. What is kept is divided by
            the probability to be kept. 15 bits decide an entry, so both are exact for the nearest
            multiple of 2^-15. The log-sum-exp is the one without dropout. For the backward pass
            scores and log-sum-exp are kept in place of the probabilities, and no mask.
        seed: int64, one element, on the device of the scores. It and the place of an entry,
            (batch * heads + head, query, key), decide whether the entry is dropped: fused or not,
            forward and backward, and in `attention` too. None: torch's generator draws one on that
            device. Without dropout it has no effect.
        dtype: of the probabilities; by default what torch.softmax would return: the type of the
            scores, but float32 for 16-bit scores under torch.autocast on a GPU.
        return_lse: also return the log-sum-exp.
        dim: over which the probabilities sum to 1; from -rank to rank - 1. If it is not the last,
            causal, window, visible and dropout may not be given, because they count queries and
            keys, and a sink is one for all rows. Without mask, bias and sink, scores and incoming
            gradients that are not contiguous are copied; with one of them, the probabilities are.
        fused: None runs fused where it can, True raises where it cannot (see `why_not_fused`),
            False runs plain torch.

    Returns:
        The probabilities, contiguous, of the shape of scores. With return_lse also the natural
        log of the denominator, sink included, [..., heads, queries], or the shape of scores
        without `dim`, float32 (float64 for float64 scores).

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.
        NotImplementedError: a forward-mode derivative of a gradient.

    Source:
        Online normalisation: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Sinks: Xiao et al., https://arxiv.org/abs/2309.17453; off-by-one: Miller, "Attention is off
        by one", https://www.evanmiller.org/attention-is-off-by-one.html.
    """
    if unnamed or others:
        raise checks.misnamed("softmax", 1, unnamed, others)
    if is_compiling := torch.compiler.is_compiling():
        if (
            (bias is None and window is None and visible is None and sink is None)
            and type(dropout) in (int, float)
            and dropout == 0
            and seed is None
            and return_lse is False
            and dim == -1
            and (fused is None or fused is True)
        ):
            traced = traced_softmax(scores, mask, scale, causal, dtype)
            if traced is not None:
                return traced
    elif host.calls is not None:
        served = host.calls.softmax(
            scores,
            scale,
            mask,
            bias,
            causal,
            window,
            visible,
            sink,
            dropout,
            seed,
            dtype,
            return_lse,
            dim,
            fused,
        )
        if served is not None:
            return cast(Tensor, served)
    scale = arguments.as_number("scale", scale)
    if type(dim) is not int:
        dim = checks.as_integer(dim)
    if window is not None:
        window = arguments.checked_window("window", window)
    arguments.check_softmax(
        *(scores, scale, mask, bias, causal, window, sink, dtype, dim, fused, visible, dropout),
        *(seed, return_lse),
    )
    is_last = dim in (-1, scores.dim() - 1)
    if (  # the shortest way for the most frequent call on a CPU
        mask is None
        and bias is None
        and window is None
        and visible is None
        and sink is None
        and not (causal or dropout or return_lse or fused)
        and is_last
        and not is_compiling
        and dispatch.is_plain_on_cpu(scores)
        and scale == 1
        and (dtype is None or dtype == scores.dtype)
    ):
        return autograd.torch_softmax.softmax(scores)
    if is_last:
        probabilities, lse = _softmax_over_last(
            *(scores, scale, mask, bias, causal, window, visible, sink, dropout, seed),
            *(dtype, return_lse, fused),
        )
    else:
        probabilities, lse = _softmax_over_earlier(
            scores, scale, mask, bias, sink, dtype, return_lse, dim % scores.dim(), fused
        )
    return (probabilities, lse) if return_lse else probabilities


def softmax_backward(
    gradient: Tensor,
    probabilities: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    visible: Ranges | None = None,
) -> Tensor:
    """The gradient of the scores of `softmax`, for code with an autograd function of its own.

    It needs no mask: what was excluded has probability 0, and gets gradient 0. Not differentiable.

    Args:
        gradient: of the probabilities, in their shape, type and on their device, any strides. It
            is not modified.
        probabilities: what `softmax` returned, in the type of the scores.
        scale: what `softmax` was given.
        causal: what `softmax` was given, or False; kernels then do without what it excludes.
        visible: the same, or None.

    Returns:
        The gradient, contiguous, in the shape and type of the probabilities.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
    """
    scale = arguments.as_number("scale", scale)
    try:
        arguments.check_softmax(
            probabilities, scale, None, None, causal, None, None, None, -1, None, visible
        )
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"scores": "probabilities"}) from None
    arguments.check_gradient(gradient, probabilities)
    first, end = int32_bounds(visible, probabilities.shape[-1])
    reasons_against = dispatch.reasons_against_fused_softmax
    is_fused = runs_fused(
        None, reasons_against, probabilities, scale, None, None, causal, None, None, (first, end)
    )
    implementation = ops.softmax.IMPLEMENTATION if is_fused else autograd.softmax.REFERENCE
    d_scores, _, _ = implementation.backward(
        gradient.detach() if gradient.dim() <= 4 else gradient.detach().contiguous(),
        probabilities.detach(),
        None,
        None,
        scale,
        None,
        causal,
        -1,
        -1,
        first,
        end,
        None,
        None,
        probabilities.dtype,
        False,
        False,
    )
    return d_scores


def _softmax_over_last(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    visible: Ranges | None,
    sink: Tensor | float | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype | None,
    return_lse: bool,
    fused: bool | None,
) -> tuple[Tensor, Tensor]:
    function = autograd.dropout if dropout > 0 else autograd.softmax
    kernels = ops.softmax.WITH_DROPOUT if dropout > 0 else ops.softmax.IMPLEMENTATION
    implementation = function.REFERENCE
    reasons_against = dispatch.reasons_against_fused_softmax
    first, end = int32_bounds(visible, scores.shape[-1])
    if runs_fused(
        *(fused, reasons_against, scores, scale, mask, bias, causal, window, dtype), (first, end)
    ):
        implementation = kernels
        bias, sink = cast_for_kernels(scores, bias, sink)
    elif runs_as_op("scores", scores):
        implementation = kernels

    left, right = (-1, -1) if window is None else window
    sink_tensor, sink_value = tensor_and_number(sink)
    needs_gradient = torch.is_grad_enabled() and (
        scores.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink_tensor is not None and sink_tensor.requires_grad)
    )
    return call_op(
        function.call,
        implementation,
        needs_gradient,
        scores,
        scale,
        mask,
        bias,
        causal,
        left,
        right,
        first,
        end,
        sink_tensor,
        sink_value,
        dtype_of_probabilities(scores, dtype),
        return_lse or (needs_gradient and (sink_tensor is not None or dropout > 0)),
        dropout,
        seed_of_call(dropout, seed, scores),
    )


def _softmax_over_earlier(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | float | None,
    dtype: torch.dtype | None,
    return_lse: bool,
    dim: int,
    fused: bool | None,
) -> tuple[Tensor, Tensor]:
    """Over a dimension, counted from 0, before the last."""
    reasons_against = dispatch.reasons_against_fused_columns
    if _has_columns_alone(scores, mask, bias, sink, dim) and runs_fused(
        fused, reasons_against, scores, scale, dtype
    ):
        return _softmax_of_columns(scores, scale, dtype, return_lse, dim)
    probabilities, lse = _softmax_over_last(
        scores.movedim(dim, -1),
        scale,
        _moved_to_last(mask, dim, scores.dim()),
        _moved_to_last(bias, dim, scores.dim()),
        False,
        None,
        None,
        sink,
        0.0,
        None,
        dtype,
        return_lse,
        fused,
    )
    return probabilities.movedim(-1, dim).contiguous(), lse


def _moved_to_last(tensor: Tensor | None, dim: int, rank: int) -> Tensor | None:
    """A view of what broadcasts to `rank` dimensions, with `dim` of them last."""
    if tensor is None:
        return None
    return tensor[(None,) * (rank - tensor.dim())].movedim(dim, -1)


def _has_columns_alone(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | float | None, dim: int
) -> bool:
    """Whether there is nothing but scores, and something follows `dim`: else columns are rows."""
    if mask is not None or bias is not None or sink is not None:
        return False
    return any(size != 1 for size in scores.shape[dim + 1 :])


def _softmax_of_columns(
    scores: Tensor, scale: float, dtype: torch.dtype | None, return_lse: bool, dim: int
) -> tuple[Tensor, Tensor]:
    """Fused, where `_has_columns_alone`."""
    before, after = scores.shape[:dim], scores.shape[dim + 1 :]
    probabilities, lse = call_op(
        autograd.softmax.call,
        ops.columns.IMPLEMENTATION,
        torch.is_grad_enabled() and scores.requires_grad,
        scores.reshape(math.prod(before), scores.shape[dim], math.prod(after)),
        scale,
        None,
        None,
        False,
        -1,
        -1,
        None,
        None,
        None,
        None,
        dtype_of_probabilities(scores, dtype),
        return_lse,
        0.0,
        None,
    )
    return probabilities.view(scores.shape), lse.view(before + after) if return_lse else lse


_SIGNATURE = inspect.signature(softmax)


def softmax_reasons(*args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    given = bound_arguments("softmax", _SIGNATURE, args, kwargs)
    given["scale"] = arguments.as_number("scale", given["scale"])
    given["dim"] = checks.as_integer(given["dim"])
    given["window"] = arguments.checked_window("window", given["window"])
    arguments.check_softmax(**given)
    unneeded = "fused", "dropout", "seed", "return_lse"
    sink, dim, *_ = (given.pop(name) for name in ("sink", "dim", *unneeded))
    scores, mask, bias = given["scores"], given["mask"], given["bias"]
    rank = scores.dim()
    if _has_columns_alone(scores, mask, bias, sink, dim % rank):
        return dispatch.reasons_against_fused_columns(scores, given["scale"], given["dtype"])
    given["scores"] = scores.movedim(dim, -1)
    given["mask"] = _moved_to_last(mask, dim, rank)
    given["bias"] = _moved_to_last(bias, dim, rank)
    return dispatch.reasons_against_fused_softmax(**given)
