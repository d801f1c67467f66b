"""Softmax of attention scores."""

import math
from typing import Any, Literal, Never, Unpack, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax import arguments, autograd, checks, dispatch, host, ops
from megasoftmax.autograd.function import Implementation
from megasoftmax.dispatch import Reason
from megasoftmax.functions.calls import (
    Call,
    call_op,
    cast_for_kernels,
    dtype_of_probabilities,
    int32_bounds,
    runs_as_op,
    seed_of_call,
)
from megasoftmax.options import (
    Ranges,
    SoftmaxKeywords,
    SoftmaxOptions,
    Window,
    as_number,
    check_seed,
    checked_window,
    read_options,
    sink_operands,
)
from megasoftmax.reference.softmax import BackwardArguments, keeps_scores


@overload
def softmax(
    scores: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[SoftmaxKeywords]
) -> Tensor: ...


@overload
def softmax(
    scores: Tensor, *, return_lse: Literal[True], **options: Unpack[SoftmaxKeywords]
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def softmax(
    scores: Tensor,
    *unnamed: Never,
    scale: float = 1.0,
    softcap: float | None = None,
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
            with a softcap:  z = softcap * tanh(scale * scores / softcap) + bias
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
        softcap: a number from 0 on; None or 0 for none. It bounds the scaled scores: an infinite
            score counts as +-softcap and has gradient 0, and NaN stays NaN. For the backward pass
            scores and log-sum-exp are kept in place of the probabilities.
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
            and softcap is None
            and type(dropout) in (int, float)
            and dropout == 0
            and seed is None
            and return_lse is False
            and dim == -1
            and (fused is None or fused is True)
        ):
            traced = _traced_softmax(scores, mask, scale, causal, dtype)
            if traced is not None:
                return traced
    elif host.calls is not None:
        served = host.calls.softmax(
            scores,
            scale,
            softcap,
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
    scale, dropout = as_number("scale", scale), as_number("dropout", dropout)
    softcap = as_number("softcap", softcap)
    if type(dim) is not int:
        dim = checks.as_integer(dim)
    if (  # the shortest way for the most frequent call on a CPU
        not is_compiling
        and softcap is None
        and mask is None
        and bias is None
        and window is None
        and visible is None
        and sink is None
        and causal is False
        and return_lse is False
        and (fused is None or fused is False)
        and isinstance(dropout, (float, int))
        and dropout == 0
        and dropout is not False
        and isinstance(scale, (float, int))
        and scale == 1
        and scale is not True
        and type(dim) is int
        and isinstance(scores, Tensor)
        and dim in (-1, scores.dim() - 1)
        and dispatch.is_plain_scores(scores)
        and (dtype is None or dtype is scores.dtype)
    ):
        if seed is not None:
            check_seed(seed, "scores", scores)
        return autograd.torch_softmax.softmax(scores)
    if window is not None:
        window = checked_window("window", window)
    options = SoftmaxOptions(
        *(scale, softcap, mask, bias, causal, window, visible, sink, dropout, seed, dtype),
        *(return_lse, dim, fused),
    )
    options.check(scores)
    probabilities, lse = SoftmaxCall(scores, options).run()
    return (probabilities, lse) if return_lse else probabilities


def _traced_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """`softmax` of these alone in compiled code, as one op; None where that is not certain.

    What torch.compile reads while it traces it guards at each call of what it compiled. The way
    that checks and decides everything has more than 300 guards, and this one 85. The level of
    forward mode is read in place, because a function that asks for it would add 5 guards.
    """
    if (
        type(scores) is Tensor
        and not scores.requires_grad
        and dispatch.runs_fused_traced(scores.device, scores.dtype, dtype)
        and forward_ad._current_level < 0
        and (causal is False or causal is True)
        and 1 + causal <= scores.dim() <= 4
        and 0 < scores.numel() < 2**30  # far below the limits of all sizes
        and type(scale) is float
        and 1e-30 < scale < 1e30  # far within theirs
        and (mask is None or _masks(mask, scores))
    ):
        return ops.softmax.forward_alone(scores, scale, mask, causal, dtype or scores.dtype)
    return None


def _masks(mask: Tensor, scores: Tensor) -> bool:
    """Whether it is certainly a mask of these scores, without many guards."""
    if not (
        type(mask) is Tensor
        and mask.dtype == torch.bool
        and mask.device == scores.device
        and mask.dim() <= scores.dim()
    ):
        return False
    for dim in range(-mask.dim(), 0):
        if mask.size(dim) != 1 and mask.size(dim) != scores.size(dim):
            return False
    return True


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
        scale: what `softmax` was given, without a softcap.
        causal: what `softmax` was given, or False; kernels then do without what it excludes.
        visible: the same, or None.

    Returns:
        The gradient, contiguous, in the shape and type of the probabilities.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
    """
    try:
        options = SoftmaxOptions(as_number("scale", scale), causal=causal, visible=visible)
        options.check(probabilities)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"scores": "probabilities"}) from None
    arguments.check_gradient(gradient, probabilities)
    first = end = None
    if visible is not None:
        first, end = int32_bounds(visible, probabilities.shape[-1])
    is_fused = SoftmaxCall(probabilities, options).runs_fused()
    implementation = ops.softmax.IMPLEMENTATION if is_fused else autograd.softmax.REFERENCE
    given = BackwardArguments(
        gradient.detach() if gradient.dim() <= 4 else gradient.detach().contiguous(),
        probabilities.detach(),
        scale=options.scale,
        causal=causal,
        window_left=-1,
        window_right=-1,
        first=first,
        end=end,
        dtype=probabilities.dtype,
        bias_gradient=False,
        sink_gradient=False,
    )
    d_scores, _, _ = implementation.backward(*given)
    return d_scores


class SoftmaxCall(Call):
    """A call of `softmax`. An earlier dimension is moved last, unless kernels take it in place."""

    __slots__ = ()

    options: SoftmaxOptions

    def __init__(self, scores: Tensor, options: SoftmaxOptions) -> None:
        self.tensor = scores
        self.options = options

    def reasons(self) -> tuple[Reason, ...]:
        scores, options = self.tensor, self.options
        if options.dim in (-1, scores.dim() - 1):
            return dispatch.reasons_against_fused_softmax(scores, options)
        if self._is_of_columns():
            return dispatch.reasons_against_fused_columns(scores, options)
        return self._of_rows().reasons()

    def run(self) -> tuple[Tensor, Tensor]:
        """Probabilities and log-sum-exp."""
        scores, dim = self.tensor, self.options.dim
        if dim in (-1, scores.dim() - 1):
            return self._run_rows()
        if self._is_of_columns() and self.runs_fused():
            return self._run_columns()
        probabilities, lse = self._of_rows()._run_rows()
        return probabilities.movedim(-1, dim).contiguous(), lse

    def _is_of_columns(self) -> bool:
        """Whether there is nothing but scores, and something follows `dim`: else they are rows."""
        options = self.options
        if options.mask is not None or options.bias is not None or options.sink is not None:
            return False
        if options.softcap:
            return False
        shape = self.tensor.shape
        return shape[options.dim % len(shape) + 1 :].numel() != 1

    def _of_rows(self) -> "SoftmaxCall":
        """The same over the last dimension."""
        scores, options = self.tensor, self.options
        rank, dim = scores.dim(), options.dim % scores.dim()
        mask = _moved_to_last(options.mask, dim, rank)
        bias = _moved_to_last(options.bias, dim, rank)
        return SoftmaxCall(scores.movedim(dim, -1), options._replace(mask=mask, bias=bias, dim=-1))

    def _run_rows(self) -> tuple[Tensor, Tensor]:
        is_kept = keeps_scores(self.options)
        function = autograd.dropout if is_kept else autograd.softmax
        kernels = ops.softmax.FROM_SCORES if is_kept else ops.softmax.IMPLEMENTATION
        is_fused = self.runs_fused()
        if is_fused or runs_as_op("scores", self.tensor):
            return self._call(function, kernels, self.tensor, is_fused)
        return self._call(function, function.REFERENCE, self.tensor, False)

    def _run_columns(self) -> tuple[Tensor, Tensor]:
        shape, dim = self.tensor.shape, self.options.dim % self.tensor.dim()
        before, after = shape[:dim], shape[dim + 1 :]
        scores = self.tensor.reshape(math.prod(before), shape[dim], math.prod(after))
        probabilities, lse = self._call(autograd.softmax, ops.columns.IMPLEMENTATION, scores, True)
        if self.options.return_lse:
            lse = lse.view(before + after)
        return probabilities.view(shape), lse

    def _call(
        self, function: Any, implementation: Implementation, scores: Tensor, is_fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Calls an implementation with the arguments of `softmax_forward`.

        Args:
            function: the module of autograd.
            implementation: who computes.
            scores: in the shape that it takes.
            is_fused: whether it is kernels.
        """
        options = self.options
        bias, dropout = options.bias, options.dropout
        if is_fused:
            bias = cast_for_kernels(bias, scores)
        left, right = (-1, -1) if options.window is None else options.window
        first = end = sink_tensor = sink_value = None
        if options.visible is not None:
            first, end = int32_bounds(options.visible, scores.shape[-1])
        if options.sink is not None:
            sink_tensor, sink_value = sink_operands(options.sink, is_fused)
        needs_gradient = torch.is_grad_enabled() and (
            scores.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sink_tensor is not None and sink_tensor.requires_grad)
        )
        needs_lse = needs_gradient and (sink_tensor is not None or keeps_scores(options))
        result: tuple[Tensor, Tensor] = call_op(
            *(function.call, implementation, needs_gradient, scores, options.scale),
            *(options.softcap or 0.0, options.mask, bias, options.causal, left, right, first, end),
            *(sink_tensor, sink_value, dtype_of_probabilities(scores, options.dtype)),
            *(options.return_lse or needs_lse, dropout),
            None if dropout == 0 else seed_of_call(options.seed, scores),
        )
        return result


def _moved_to_last(tensor: Tensor | None, dim: int, rank: int) -> Tensor | None:
    """A view of what broadcasts to `rank` dimensions, with `dim` of them last."""
    if tensor is None:
        return None
    return tensor[(None,) * (rank - tensor.dim())].movedim(dim, -1)


def softmax_reasons(scores: Tensor, *unnamed: Any, **given: Any) -> tuple[Reason, ...]:
    options = read_options(SoftmaxOptions, "softmax", 1, unnamed, given)
    options.check(scores)
    return SoftmaxCall(scores, options).reasons()


softmax_reasons.__qualname__ = "softmax"  # in the error of a call without scores
