"""The semantics of megasoftmax in plain torch: the specification, and the fallback of every op.

    z = scale * scores + bias
        with a softcap:  z = softcap * tanh(scale * scores / softcap) + bias
    p = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  m = max(z, sink)

and exactly 0 for excluded entries, in float32, or float64 for float64 scores. `softmax_forward` and
`softmax_backward` have the signatures of the ops and are pure, without autograd. `autograd.softmax`
makes one differentiable function of any such pair.

On a CPU, memory that is touched for the first time costs ten times what a pass over it costs
(measured at 32 MiB), so each function makes as few buffers as it can and changes them in place.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasoftmax.reference.dropout import drop_, kept_of_scores
from megasoftmax.tracing import refuses_out


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of logits, sums and log-sum-exp: float32, or float64 for float64 scores."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def excluded_by_window(
    queries: int,
    keys: int,
    causal: bool,
    left: int,
    right: int,
    device: torch.device,
    diagonal: int | None = None,
) -> Tensor | None:
    """Bool [queries, keys], True = excluded by causality or window; None when neither limits.

    Query i stands at key i + diagonal: bottom-right aligned, at i + keys - queries, by default.
    """
    if causal:
        right = 0
    if left < 0 and right < 0:
        return None
    first = keys - queries if diagonal is None else diagonal
    position = torch.arange(first, first + queries, device=device).unsqueeze(-1)
    distance = torch.arange(keys, device=device) - position
    if left < 0:
        return distance > right
    if right < 0:
        return distance < -left
    return (distance > right).logical_or_(distance < -left)


def excluded_by_ranges(first: Tensor | None, end: Tensor | None, keys: int) -> Tensor | None:
    """Bool [..., keys], True = before `first` or from `end` on; None when both limits are None.

    first, end: integers [...].
    """
    if first is None and end is None:
        return None
    given = first if end is None else end
    assert given is not None
    key = torch.arange(keys, device=given.device)
    parts = (
        None if first is None else key < first.unsqueeze(-1),
        None if end is None else key >= end.unsqueeze(-1),
    )
    return union(*parts)


def union(*parts: Tensor | None) -> Tensor | None:
    """The union of masks: True where any mask is True; None where all masks are None."""
    found = None
    for part in parts:
        if part is not None:
            found = part if found is None else found | part
    return found


def _excluded_entries(given: Any) -> Tensor | None:
    """Bool, broadcastable to the scores, True = excluded by mask, causality, window or range."""
    scores, window = given.scores, (given.causal, given.window_left, given.window_right)
    queries, keys = scores.shape[-2] if scores.dim() > 1 else 1, scores.shape[-1]
    return union(
        given.mask,
        excluded_by_window(queries, keys, *window, scores.device),
        excluded_by_ranges(given.first, given.end, keys),
    )


def keeps_scores(options: Any) -> bool:
    """Whether the backward pass of these options reads scores, not probabilities."""
    return options.dropout > 0 or bool(options.softcap)


def is_linear(options: Any) -> bool:
    """Whether logits are the scores times the scale, plus the bias."""
    return not options.softcap


def without_sink(given: Any) -> Any:
    """Arguments with a sink of -inf, which adds nothing and makes 0 of a row of -inf."""
    return given._replace(sink=None, sink_value=-torch.inf)


def of_heads(given: Any, heads: slice) -> Any:
    """Arguments with the sink of some heads."""
    has_many = given.sink is not None and given.sink.numel() != 1
    return given._replace(sink=given.sink[heads]) if has_many else given


def logit_beside(given: Any, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The sink as a tensor that broadcasts to [..., heads, queries]; None without a sink.

    A sink of +inf becomes NaN: it makes the row NaN, as +inf among the scores would.
    """
    if given.sink is not None:
        logit = given.sink.to(dtype).reshape((-1, 1) if given.sink.numel() != 1 else ())
    elif given.sink_value is not None:
        logit = torch.full((), given.sink_value, dtype=dtype, device=device)
    else:
        return None
    return logit.masked_fill(logit == torch.inf, torch.nan)


def softmax_forward(
    scores: Tensor,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    first: Tensor | None,
    end: Tensor | None,
    sink: Tensor | None,
    sink_value: float | None,
    dtype: torch.dtype,
    return_lse: bool,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp.

    Args:
        scores: floating, [..., heads, queries, keys]; any rank from 1 on.
        scale: factor of the scores.
        softcap: above 0, softcap * tanh(scale * scores / softcap) takes the place of the scaled
            scores; 0: none.
        mask: bool, broadcastable to scores, True = excluded; or None.
        bias: floating, broadcastable to scores, added to the scaled scores; or None.
        causal: query i sees keys up to i + keys - queries.
        window_left: query i sees keys from i + keys - queries - window_left on; -1 = from 0 on.
        window_right: and up to i + keys - queries + window_right; -1 = up to the last.
        first: int32, broadcastable to [..., heads, queries]: each query sees keys from there on; or
            None, from 0 on. What lies outside of [0, keys] is cut.
        end: likewise: each query sees keys before it; or None, up to the last.
        sink: [heads] or one element, a logit that joins the denominator; or None.
        sink_value: the sink as a number; at most one of sink and sink_value is given.
        dtype: of the probabilities.
        return_lse: False saves the work of the log-sum-exp.
        dropout: the probability to drop an entry: it becomes 0, and what is kept is multiplied by
            `dropout.factor`, before it is rounded to `dtype`.
        seed: int64, one element, which decides what is dropped; may be None where dropout is 0.

    Returns:
        Probabilities, contiguous, of the shape of scores, in `dtype`. Log-sum-exp, natural, sink
        included, [..., heads, queries], float32 (float64 for float64 scores), or (0,).

        Excluded entries are 0. A row without a visible entry is 0 where mask, bias, causality, a
        window, first, end or a sink is given, else NaN; its log-sum-exp is the sink or -inf. A
        visible NaN or +inf makes the visible part of a row NaN.
    """
    given = ForwardArguments(
        *(scores, scale, softcap, mask, bias, causal, window_left, window_right, first, end),
        *(sink, sink_value, dtype, return_lse, dropout, seed),
    )
    compute = accumulation_dtype(scores.dtype)
    if softcap > 0:
        scores, scale = _tanh_of_scores(scores, scale, softcap), softcap
    # Without a bias, differences of scores are scaled, so no product overflows.
    before, after = scale, 1.0
    if bias is None and scale != 0:
        before, after = (1.0, scale) if scale > 0 else (-1.0, -scale)
    excluded = _excluded_entries(given)
    # CPUs have other code for the ends of arrays: float64 hides that its last bit may differ.
    row_dtype = torch.float64 if scores.is_cpu else compute
    logit = logit_beside(given, row_dtype, scores.device)
    can_be_empty = excluded is not None or bias is not None or logit is not None
    z = scores.contiguous()
    is_copied = can_be_empty or before != 1 or after != 1 or z.dtype != compute
    if is_copied:
        z = z * before if z.dtype == compute else z.to(compute).mul_(before)
    if bias is not None:
        z.add_(bias)
    highest = None
    if excluded is not None:
        highest = upper_limits(excluded, compute)
        exclude_(z, highest)

    if is_copied or return_lse:
        largest = largest_of_rows(z, -torch.inf)
        empty = largest == -torch.inf
    if after != 1:
        z.sub_(largest.unsqueeze(-1)).mul_(after)
    # On a CPU torch reads a row several times before it writes it, so the result can overwrite it.
    in_place = is_copied and z.is_cpu and not refuses_out(z)
    probabilities = torch.softmax(z, -1, out=z) if in_place else z.softmax(-1)

    if return_lse or logit is not None:
        # The largest probability is 1 / sum exp(z - max z).
        lse = after * largest.to(row_dtype) - largest_of_rows(probabilities, 1).to(row_dtype).log_()
        lse.masked_fill_(empty, -torch.inf)
    if logit is not None:
        probabilities.mul_(torch.sigmoid(lse - logit).to(compute).unsqueeze(-1))
        lse = torch.logaddexp(lse, logit)
        empty &= logit >= -torch.inf  # not for NaN

    # Excluded entries are 0 already, except in rows of NaN.
    if can_be_empty:
        probabilities.masked_fill_(empty.unsqueeze(-1), 0)
    if highest is not None:
        clear_(probabilities, keep=highest)
    if dropout > 0:
        assert seed is not None
        drop_(probabilities, kept_of_scores(seed, dropout, scores), dropout)
    lse = lse.to(compute) if return_lse else z.new_empty(0)
    probabilities = probabilities.to(dtype)
    if torch.compiler.is_compiling():  # torch 2.11 loses gradients of tensors changed in place
        probabilities, lse = probabilities.clone(), lse.clone()
    return probabilities, lse


def softmax_backward(
    gradient: Tensor,
    probabilities: Tensor,
    lse_gradient: Tensor | None,
    lse: Tensor | None,
    scale: float,
    bias: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    first: Tensor | None,
    end: Tensor | None,
    sink: Tensor | None,
    sink_value: float | None,
    dtype: torch.dtype,
    bias_gradient: bool,
    sink_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, from those of probabilities g and log-sum-exp h.

        D = sum(g * p) - h,  dz = p * (g - D),  dscores = scale * dz,
        dbias = dz summed over what was broadcast,  dsink = -exp(sink - lse) * D

    Where p is exactly 0 nothing enters D and dz is exactly 0, whatever g holds there.

    Args:
        gradient: of the probabilities, with their shape and dtype, any strides.
        probabilities: what `softmax_forward` returned.
        lse_gradient: of the log-sum-exp, or None.
        lse: what `softmax_forward` returned; needed for the gradient of the sink only.
        scale: as in `softmax_forward`.
        bias: read for its shape and dtype only.
        causal, window_left, window_right, first, end: as in `softmax_forward`. Entries that they
            exclude have probability 0, so nothing depends on them here. Kernels skip such entries.
        sink, sink_value: as in `softmax_forward`.
        dtype: of the scores and of their gradient.
        bias_gradient, sink_gradient: whether these are asked for.

    Returns:
        The gradients of the scores, contiguous; of the bias, in its shape and dtype; and of the
        sink for each row, float32 (float64 for float64 scores), [..., heads, queries]. (0,) for
        what is not asked for.
    """
    given = BackwardArguments(
        *(gradient, probabilities, lse_gradient, lse, scale, bias, causal, window_left),
        *(window_right, first, end, sink, sink_value, dtype, bias_gradient, sink_gradient),
    )
    compute = accumulation_dtype(dtype)
    p = probabilities.to(compute)
    g = torch.ops.aten.threshold_backward(gradient, probabilities, 0).to(compute)  # as clear_
    return _backward_(g, p, scale, given)


def _backward_(
    dz: Tensor, p: Tensor, slope: Tensor | float, given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`softmax_backward`, computed in place in dz, which holds g where p is not 0, else 0.

    slope: the derivative of z by the scores.
    """
    d = dz.mul_(p).sum(-1)
    if given.lse_gradient is not None:
        d -= given.lse_gradient
    dz.addcmul_(p, d.unsqueeze(-1), value=-1)
    clear_(dz, keep=p)  # d may be NaN

    d_scores = dz * slope if given.bias_gradient else dz.mul_(slope)
    d_bias, d_rows = dz.new_empty(0), dz.new_empty(0)
    if given.bias_gradient:
        d_bias = dz.sum_to_size(given.bias.shape).to(given.bias.dtype)
    if given.sink_gradient:
        d_rows = gradient_beside(given, given.lse, d)
    return d_scores.to(given.dtype).contiguous(), d_bias, d_rows


def softmax_dropout_backward(
    gradient: Tensor,
    scores: Tensor,
    lse_gradient: Tensor | None,
    lse: Tensor,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    first: Tensor | None,
    end: Tensor | None,
    sink: Tensor | None,
    sink_value: float | None,
    dtype: torch.dtype,
    bias_gradient: bool,
    sink_gradient: bool,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `softmax_forward` with dropout or a softcap, from those of its results, g and h.

        p = exp(z - lse),  dp = g / kept probability, 0 where dropped,
        D = sum(dp * p) - h,  dz = p * (dp - D),  dscores = scale * dz * (1 - t^2),
        dbias = dz summed over what was broadcast,  dsink = -exp(sink - lse) * D

    where t = tanh(scale * scores / softcap), or 0 without a softcap.

    Where p is exactly 0 nothing enters D and dz is exactly 0, whatever g holds there.

    Args:
        gradient: of the probabilities, with their shape and dtype, any strides.
        lse_gradient: of the log-sum-exp, or None.
        lse: what `softmax_forward` returned.
        dtype: of the scores and of their gradient.
        bias_gradient, sink_gradient: whether these are asked for.
        The others: as in `softmax_forward`.

    Returns:
        The gradients that `softmax_backward` returns.
    """
    given = DropoutBackwardArguments(
        *(gradient, scores, lse_gradient, lse, scale, softcap, mask, bias, causal, window_left),
        *(window_right, first, end, sink, sink_value, dtype, bias_gradient, sink_gradient),
        *(dropout, seed),
    )
    p = probabilities_again(given, lse, in_place=True)
    g = gradient.to(p.dtype, copy=True, memory_format=torch.contiguous_format)
    if dropout > 0:
        assert seed is not None
        drop_(g, kept_of_scores(seed, dropout, scores), dropout)
    clear_(g, keep=p)
    return _backward_(g, p, slope_of_scores(scores, given), given)


def probabilities_again(given: Any, lse: Tensor, *, in_place: bool = False) -> Tensor:
    """What `softmax_forward` computes without dropout, not rounded, from its log-sum-exp.

    Args:
        given: its arguments, or those of `softmax_dropout_backward`.
        lse: what it returned.
        in_place: makes one buffer, and is not differentiable.
    """
    excluded = _excluded_entries(given)
    has_sink = given.sink is not None or given.sink_value is not None
    if excluded is not None or given.bias is not None or has_sink:
        empty = (lse == -torch.inf).unsqueeze(-1)
        excluded = empty if excluded is None else excluded | empty
    if given.softcap > 0:
        z = _tanh_of_scores(given.scores, given.scale, given.softcap) * given.softcap
    else:
        z = given.scores.to(lse.dtype) * given.scale
    if in_place:
        z = z if given.bias is None else z.add_(given.bias)
        z.sub_(lse.unsqueeze(-1))
        z = z if excluded is None else z.masked_fill_(excluded, -torch.inf)
        return z.exp_()
    z = z if given.bias is None else (z + given.bias).to(lse.dtype)
    z = z - lse.unsqueeze(-1)
    z = z if excluded is None else z.masked_fill(excluded, -torch.inf)
    return z.exp()


def _tanh_of_scores(scores: Tensor, scale: float, softcap: float) -> Tensor:
    """t, of which softcap * t + bias are the logits; in the accumulation type, a new tensor."""
    return torch.tanh(scores.to(accumulation_dtype(scores.dtype)) * (scale / softcap))


def slope_of_scores(scores: Tensor, given: Any) -> Tensor | float:
    """The derivative of the logits by the scores, scale * (1 - t^2); 0 for a score of NaN."""
    if is_linear(given):
        return given.scale
    t = _tanh_of_scores(scores, given.scale, given.softcap)
    return (given.scale * (1 - t * t)).nan_to_num(0.0)


def curvature_of_scores(scores: Tensor, given: Any) -> Tensor:
    """The second derivative of the logits by the scores, with a softcap; 0 likewise."""
    t = _tanh_of_scores(scores, given.scale, given.softcap)
    slope = given.scale * (1 - t * t)
    return (-2 * (given.scale / given.softcap) * t * slope).nan_to_num(0.0)


def softmax_columns_forward(
    scores: Tensor, scale: float, dtype: torch.dtype, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """`softmax_forward` over the middle dimension, without mask, bias, window and sink.

    Args:
        scores: floating, [outer, length, inner].
        scale, dtype, return_lse: as in `softmax_forward`.

    Returns:
        Probabilities, contiguous, [outer, length, inner], in `dtype`. Log-sum-exp [outer, inner],
        float32 (float64 for float64 scores), or (0,).
    """
    options = {"scale": scale, "dtype": dtype, "return_lse": return_lse}
    probabilities, lse = softmax_forward(*plain(ForwardArguments, scores=scores.mT, **options))
    return probabilities.mT.contiguous(), lse


def softmax_columns_backward(
    gradient: Tensor,
    probabilities: Tensor,
    lse_gradient: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """`softmax_backward` over the middle dimension.

    Args:
        gradient, probabilities: [outer, length, inner].
        lse_gradient: [outer, inner], or None.
        scale, dtype: as in `softmax_backward`.

    Returns:
        The gradient of the scores, contiguous, in `dtype`.
    """
    given = {"gradient": gradient.mT, "probabilities": probabilities.mT, "scale": scale}
    d_scores, _, _ = softmax_backward(
        *plain(BackwardArguments, **given, lse_gradient=lse_gradient, dtype=dtype)
    )
    return d_scores.mT.contiguous()


def softmax_double_backward(
    given: Any,
    scores_cotangent: Tensor | None,
    bias_cotangent: Tensor | None,
    sink_cotangent: Tensor | None,
    *,
    dim: int = -1,
) -> Any:
    """Gradients of `softmax_backward`, itself differentiable as often as wanted.

    With v the cotangent of dz, s that of a row's dsink, and e = sum(v * p) + exp(sink - lse) * s:

        dg = p * (v - e),  dp = v * (g - D) - g * e,  dh = e,  dlse = exp(sink - lse) * D * s

    Args:
        given: a record of what it was given, see `arguments_of`.
        scores_cotangent, bias_cotangent, sink_cotangent: of what `softmax_backward` returned.
        dim: over which the probabilities sum to 1.

    Returns:
        The gradients of its arguments. lse has none without a gradient of the sink.
    """
    compute = accumulation_dtype(given.dtype)
    p = given.probabilities.to(compute)
    visible = p != 0
    v = torch.zeros_like(p)
    if scores_cotangent is not None:
        v = v + given.scale * scores_cotangent.to(compute)
    if bias_cotangent is not None and given.bias_gradient:
        v = v + bias_cotangent.to(compute)
    v = torch.where(visible, v, 0)
    g = torch.where(visible, given.gradient.to(compute), 0)
    d = (g * p).sum(dim)
    if given.lse_gradient is not None:
        d = d - given.lse_gradient
    e = (v * p).sum(dim)
    d_lse = d_sink = None
    if sink_cotangent is not None and given.sink_gradient:
        weight = _share_beside(given, given.lse) * sink_cotangent
        e = e + weight
        d_lse = weight * d
        d_sink = None if given.sink is None else -sum_over_rows(d_lse, given.sink)
    d, e_of_all = d.unsqueeze(dim), e.unsqueeze(dim)
    d_gradient = torch.where(visible, p * (v - e_of_all), 0)
    d_probabilities = torch.where(visible, v * (g - d) - g * e_of_all, 0)
    return BackwardArguments(
        gradient=d_gradient.to(given.gradient.dtype),
        probabilities=d_probabilities.to(given.probabilities.dtype),
        lse_gradient=None if given.lse_gradient is None else e,
        lse=d_lse,
        sink=d_sink,
    )


def softmax_tangents(
    tangents: Any,
    probabilities: Tensor,
    lse: Tensor,
    given: Any,
    dim: int = -1,
) -> tuple[Tensor, Tensor]:
    """Tangents of what `softmax_forward` returns, themselves differentiable as often as wanted.

        dz = scale * dscores + dbias,  dlse = sum(p * dz) + exp(sink - lse) * dsink,
        dp = p * (dz - dlse)

    Args:
        tangents: a record of those of the arguments, see `arguments_of`.
        probabilities, lse: what `softmax_forward` returned.
        given: a record of what it was given, of which scale and sink count.
        dim: over which the probabilities sum to 1.

    Returns:
        The tangents of the probabilities, in their dtype and 0 where they are exactly 0, and of the
        log-sum-exp.
    """
    p = probabilities.to(lse.dtype)
    dz = torch.zeros_like(p)
    if tangents.scores is not None:
        dz = dz + given.scale * tangents.scores.to(lse.dtype)
    if tangents.bias is not None:
        dz = dz + tangents.bias.to(lse.dtype)
    dz = torch.where(p == 0, 0, dz)
    d_lse = (p * dz).sum(dim)
    if tangents.sink is not None:
        d_sink = tangents.sink.to(lse.dtype)
        d_sink = d_sink.reshape((-1, 1) if d_sink.numel() != 1 else ())
        d_lse = d_lse + _share_beside(given, lse) * d_sink
    dp = torch.where(p == 0, 0, p * (dz - d_lse.unsqueeze(dim)))
    return dp.to(probabilities.dtype), d_lse


def sum_over_rows(rows: Tensor, sink: Tensor) -> Tensor:
    """The sum of the rows [..., heads, queries] that share a sink, in its shape and dtype."""
    if sink.numel() == 1:
        return rows.sum().reshape(sink.shape).to(sink.dtype)
    others = [dim for dim in range(rows.dim()) if dim != rows.dim() - 2]
    return rows.sum(others).to(sink.dtype)


def largest_of_rows(z: Tensor, of_nothing: float) -> Tensor:
    """The maximum over the last dimension; `of_nothing` where that has no elements."""
    return z.amax(-1) if z.shape[-1] > 0 else z.new_full(z.shape[:-1], of_nothing)


def upper_limits(excluded: Tensor, dtype: torch.dtype) -> Tensor:
    """-inf where excluded, else inf."""
    return excluded.to(dtype).sub_(0.5).mul_(-torch.inf)


def exclude_(z: Tensor, limits: Tensor) -> None:
    """Sets logits to -inf, NaN too, where their `upper_limits` are -inf.

    This has no branch per entry, as masked_fill_ has.
    """
    clear_(z, keep=limits)
    z.clamp_max_(limits)


def clear_(values: Tensor, keep: Tensor) -> None:
    """Sets values to 0, NaN too, where `keep` is not positive.

    This takes one pass, by the kernel of relu's gradient.
    """
    if refuses_out(values):
        values.copy_(torch.ops.aten.threshold_backward(values, keep, 0))
    else:
        torch.ops.aten.threshold_backward.grad_input(values, keep, 0, grad_input=values)


def _share_beside(given: Any, lse: Tensor) -> Tensor:
    """exp(sink - lse) of each row: the probability that goes to the sink; 0 for a sink of -inf."""
    weight, is_none = _weight_beside(given, lse)
    return weight.masked_fill(is_none, 0)


def gradient_beside(given: Any, lse: Tensor, d: Tensor) -> Tensor:
    """-d times the sink's share of each row; 0 for a sink of -inf, in a row of NaN too."""
    weight, is_none = _weight_beside(given, lse)
    return (-weight * d).masked_fill(is_none, 0)


def _weight_beside(given: Any, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    assert lse is not None, "the gradient of the sink needs the log-sum-exp"
    logit = logit_beside(given, lse.dtype, lse.device)
    assert logit is not None
    return torch.exp(logit - lse), logit == -torch.inf


def tensors_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a function that are tensors, or None."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(each.name for each in parameters if each.annotation in (Tensor, Tensor | None))


def arguments_of(function: Callable[..., Any]) -> Any:
    """A named tuple with a field for each parameter of a function, None by default.

    A field holds the value of the parameter, its dimension under vmap, or its gradient.
    """
    names = inspect.signature(function).parameters
    return namedtuple(f"{function.__name__}_arguments", names, defaults=[None] * len(names))


_WHERE_NOT_GIVEN = {
    "scale": 1.0,
    "softcap": 0.0,
    "causal": False,
    "window_left": -1,
    "window_right": -1,
    "return_lse": False,
    "relative": False,
    "block": 1,
    "dropout": 0.0,
    "tf32": False,
    "bias_gradient": False,
    "sink_gradient": False,
    "deterministic": False,
}


def as_record(record: Any, given: Any, **others: Any) -> Any:
    """Another record with the fields of a given one that both have, and others."""
    shared = {name: getattr(given, name) for name in record._fields if name in given._fields}
    return record(**(shared | others))


def plain(record: Any, **given: Any) -> Any:
    """Arguments of a function, in a record of `arguments_of`, without the options not given."""
    return record(**({name: _WHERE_NOT_GIVEN.get(name) for name in record._fields} | given))


ForwardArguments = arguments_of(softmax_forward)
BackwardArguments = arguments_of(softmax_backward)
DropoutBackwardArguments = arguments_of(softmax_dropout_backward)

# Tensors that broadcast to the scores, and how many of the last dimensions they lack.
BESIDE_SCORES = {"mask": 0, "bias": 0, "first": 1, "end": 1, "sink": 2}
