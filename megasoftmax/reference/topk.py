"""Softmax + top-k in plain torch: the specification, and the fallback of the ops of that name.

    z = scale * logits + bias,  p = exp(z - max z) / sum exp(z - max z),  the K largest of p
        with a softcap:  z = softcap * tanh(scale * logits / softcap) + bias

`softmax_topk_forward` and `softmax_topk_backward` have the signatures of the ops and are pure,
without autograd. `autograd.topk` makes one differentiable function of any such pair.

What is selected follows from comparisons alone. Without a bias raw logits are compared (negated for
a negative scale), because products with the scale could round to the same number. With a bias z is
compared, as a fused multiply-add rounds it. GPU and CPU cannot differ in this arithmetic. With a
softcap z is compared too. There they can differ in the last bits of tanh.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax.reference.softmax import (
    accumulation_dtype,
    arguments_of,
    is_linear,
    slope_of_scores,
)
from megasoftmax.tracing import is_traced


def softmax_topk_forward(
    logits: Tensor,
    k: int,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    bias: Tensor | None,
    renormalize: bool,
    dtype: torch.dtype,
    candidates: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The K largest probabilities of each row, and where they are.

    Args:
        logits: floating, [..., V]; any rank from 1 on.
        k: from 0 to V.
        scale: factor of the logits.
        softcap: above 0, softcap * tanh(scale * logits / softcap) takes the place of the scaled
            logits; 0: none.
        mask: bool, broadcastable to logits, True = excluded; or None.
        bias: floating, broadcastable to logits, added to the scaled logits; or None.
        renormalize: divide by the sum over the K entries instead of all V.
        dtype: of the values; with `candidates` float32, or float64 for float64 logits.
        candidates: return the K largest z in place of probabilities.

    Returns:
        Values [..., K] in `dtype`, indices int64 [..., K], statistics [3, ...], float32 (float64
        for float64 logits); all contiguous.

        Larger z first, lower index first among equals. NaN comes before +inf, -0 equals 0, and an
        excluded entry is a z of -inf.

        The statistics of a row, over all of V: the largest y, of z = factor * y as `comparable` has
        them; log sum exp(z - factor * y); and the log-sum-exp. y is not rounded, so that
        exp(z - factor * y - log sum) is exact for offsets of any size. A row with a visible NaN or
        +inf has NaN for all three, and NaN for its probabilities, but 0 where an excluded entry was
        selected. A row of -inf throughout has -inf for all three, and probabilities 0 where mask or
        bias is given, else NaN.
    """
    compute = accumulation_dtype(logits.dtype)
    y, factor = comparable(
        ForwardArguments(logits, k, scale, softcap, mask, bias, renormalize, dtype, candidates)
    )
    indices = select(y, k)
    selected = y.gather(-1, indices)
    if k > 0:
        largest = selected[..., 0]
    else:
        largest = y.amax(-1) if y.shape[-1] > 0 else y.new_full(y.shape[:-1], -torch.inf)
    empty = largest == -torch.inf

    below = y - largest.unsqueeze(-1)
    total = (below if factor == 1 else below * factor).exp_().sum(-1)
    log_total = total.double().log()
    lse = largest.double() * rounded(factor, compute, logits.device) + log_total
    statistics = torch.stack([largest, log_total, lse])
    statistics = statistics.masked_fill(empty, -torch.inf)
    statistics = statistics.masked_fill(largest.isnan() | (largest == torch.inf), torch.nan)

    if candidates:
        values = selected * factor
    else:
        values = torch.exp((selected - largest.unsqueeze(-1)) * factor)
        values = values / (values.sum(-1) if renormalize else total).unsqueeze(-1)
        if mask is not None or bias is not None:
            values = values.masked_fill(empty.unsqueeze(-1), 0)
        if mask is not None:
            values = values.masked_fill(mask.expand(logits.shape).gather(-1, indices), 0)
    values, statistics = values.to(dtype).contiguous(), statistics.to(compute)
    if torch.compiler.is_compiling():  # torch 2.11 loses gradients, see softmax_forward
        values, statistics = values.clone(), statistics.clone()
    return values, indices, statistics


def softmax_topk_backward(
    gradient: Tensor,
    probabilities: Tensor,
    indices: Tensor,
    lse_gradient: Tensor | None,
    logits: Tensor,
    statistics: Tensor,
    scale: float,
    softcap: float,
    mask: Tensor | None,
    bias: Tensor | None,
    renormalize: bool,
    of_bias: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits, or of z, from those of probabilities g and log-sum-exp h.

    With P the K probabilities, i their indices and p_j = exp(z_j - max - log sum) those of all V:

        dz_j = p_j (h - sum(g P)) + sum over k with j = i_k of g_k p_j

    and, renormalised:

        dz_j = p_j h              + sum over k with j = i_k of P_k (g_k - sum(g P))

    Where P_k is exactly 0, g_k counts as 0, whatever it is; where p_j is, dz_j is exactly 0. p is
    computed from the logits, in float32; P is taken as it was returned, in its own type. The
    gradient of the logits is that of z times `slope_of_scores`.

    Args:
        gradient: of the probabilities, with their shape and dtype, any strides.
        probabilities, indices: what `softmax_topk_forward` returned. An index outside [0, V), which
            another shard of the vocabulary holds, takes part in sum(g P) alone.
        lse_gradient: of the log-sum-exp, statistics[2], in its type; or None.
        logits, scale, softcap, mask, bias, renormalize: as in `softmax_topk_forward`.
        statistics: what it returned. Only its first two numbers matter.
        of_bias: the gradient of z, which a bias has before it is summed over what was broadcast.
        dtype: of the result.

    Returns:
        [..., V], contiguous.
    """
    given = BackwardArguments(
        *(gradient, probabilities, indices, lse_gradient, logits, statistics),
        *(scale, softcap, mask, bias, renormalize, of_bias, dtype),
    )
    compute = accumulation_dtype(logits.dtype)
    g, q = _weighted(gradient, probabilities, compute)
    d = (g * q).sum(-1, keepdim=True)
    h = None if lse_gradient is None else lse_gradient.unsqueeze(-1)
    columns = logits.shape[-1]
    if renormalize:
        dz = _scatter(torch.where(q == 0, 0, q * (g - d)), indices, columns)
        if h is not None:
            p = _probabilities(given)
            dz = dz + torch.where(p == 0, 0, p * h)
    else:
        p = _probabilities(given)
        dz = _scatter(g, indices, columns) + ((0 if h is None else h) - d)
        dz = torch.where(p == 0, 0, p * dz)
    if not of_bias:
        dz = dz * slope_of_scores(logits, given)
    return dz.to(dtype).contiguous()


class DoubleGradients(NamedTuple):
    """The gradients of tensors that `softmax_topk_backward` takes; that of lse is a row's."""

    gradient: Tensor
    probabilities: Tensor
    lse_gradient: Tensor | None
    lse: Tensor
    z: Tensor


def softmax_topk_double_backward(cotangent: Tensor, given: Any) -> DoubleGradients:
    """Gradients of `softmax_topk_backward` of z, itself differentiable as often as wanted.

    With v the cotangent of dz, D = sum(g P), and e = sum(v p) over V:

        dg_k = p v - P_k e at i_k,  dP_k = -g_k e,  dh = e,  dz_j = v_j dz_j,  dlse = -sum(v dz)

    and, renormalised, with f = sum over k of v P at i_k:

        dg_k = P_k (v - f) at i_k,  dP_k = v (g_k - D) - g_k f,  dh = e,  dz_j = v_j p_j h

    Args:
        cotangent: of the gradient of z.
        given: a record of what `softmax_topk_backward` was given.

    Returns:
        Gradients in the accumulation type, in which z is that of scale * logits + bias.
    """
    compute, indices = accumulation_dtype(given.logits.dtype), given.indices
    g, q = _weighted(given.gradient, given.probabilities, compute)
    d = (g * q).sum(-1, keepdim=True)
    h = 0 if given.lse_gradient is None else given.lse_gradient.unsqueeze(-1)
    p = _probabilities(given)
    v = cotangent.to(compute)
    if not given.renormalize:
        v = torch.where(p == 0, 0, v)
    e = (torch.where(p == 0, 0, v) * p).sum(-1, keepdim=True)
    if given.renormalize:
        at = torch.where(q == 0, 0, _gather(v, indices))
        f = (at * q).sum(-1, keepdim=True)
        d_gradient = q * (at - f)
        d_probabilities = at * (g - d) - g * f
        d_z = torch.where(p == 0, 0, v * p * h)
    else:
        d_gradient = torch.where(q == 0, 0, _gather(v * p, indices) - q * e)
        d_probabilities = -g * e
        at_columns = _scatter(g, indices, given.logits.shape[-1])
        d_z = torch.where(p == 0, 0, v * p * (at_columns + (h - d)))
    d_probabilities = torch.where(q == 0, 0, d_probabilities)
    d_lse_gradient = None if given.lse_gradient is None else e.squeeze(-1)
    return DoubleGradients(d_gradient, d_probabilities, d_lse_gradient, -d_z.sum(-1), d_z)


def select(values: Tensor, k: int) -> Tensor:
    """Indices int64 [..., k] of the K largest along the last dimension, float32 or float64.

    Larger first, lower index first among equals; NaN before +inf, and -0 equal to 0.
    """
    if values.device.type != "cpu" or values.shape[-1] <= _LONGEST_BY_KEYS or is_traced():
        return _select_by_keys(values, k)
    return _select_by_topk(values.detach(), k)


# On a CPU torch.topk of long rows takes less time for numbers than for keys, of short rows more.
_LONGEST_BY_KEYS = 1024


def _select_by_keys(values: Tensor, k: int) -> Tensor:
    """`select` by integers without equals: the bits, ordered like the numbers, then the column."""
    values = torch.where(values.isnan(), torch.nan, values)  # of one sign
    values += 0.0  # -0 becomes 0
    if values.dtype == torch.float64:
        return values.sort(stable=True, dim=-1, descending=True).indices[..., :k].contiguous()
    bits = values.view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    columns = values.shape[-1]
    keys = ordered.long().bitwise_left_shift_(32)
    keys += torch.arange(columns - 1, -1, -1, device=values.device)
    return keys.topk(k).indices


def _select_by_topk(values: Tensor, k: int) -> Tensor:
    """`select` by torch.topk, which leaves open which of equals come: these are put in order."""
    candidates = min(k + 16, values.shape[-1])  # the equals of entry K are among them, mostly
    top, indices = values.topk(candidates, -1)
    equal = top[..., 1 : k + 1] == top[..., :k][..., : candidates - 1]
    if not (equal | top[..., 1 : k + 1].isnan()).any():  # NaN come first
        return indices[..., :k].contiguous()
    indices, order = indices.sort(-1)
    order = top.gather(-1, order).sort(stable=True, dim=-1, descending=True).indices
    indices = indices.gather(-1, order)[..., :k].contiguous()
    if k < candidates < values.shape[-1]:
        kth, last = top[..., k - 1], top[..., -1]
        may_continue = (kth == last) | last.isnan()
        if may_continue.any():
            indices[may_continue] = _select_by_keys(values[may_continue], k)
    return indices


def rounded(number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as `dtype` has it, in float64: its product with a float32 is exact there."""
    return torch.full((), number, dtype=dtype, device=device).double()


def comparable(given: Any) -> tuple[Tensor, float]:
    """y [..., V], ordered as z is, and a factor from 0 on: z = factor * y."""
    logits, scale, mask, bias = given.logits, given.scale, given.mask, given.bias
    compute = accumulation_dtype(logits.dtype)
    factor = 1.0
    if not is_linear(given):
        y = torch.tanh(logits.double() * (scale / given.softcap)) * given.softcap
        y = (y if bias is None else y + bias).to(compute)
    elif bias is not None:
        # One rounding, as in a fused multiply-add: float64 holds the product.
        y = (logits.double() * rounded(scale, compute, logits.device) + bias).to(compute)
    elif scale == 0:
        y = logits.to(compute) * scale
    else:
        y = logits.to(compute)
        y, factor = (y, scale) if scale > 0 else (-y, -scale)
    return y if mask is None else y.masked_fill(mask, -torch.inf), factor


def _probabilities(given: Any) -> Tensor:
    """exp(z - max z - log sum), [..., V], in the accumulation type; differentiable."""
    logits, statistics, mask = given.logits, given.statistics, given.mask
    compute = accumulation_dtype(logits.dtype)
    y, factor = comparable(given)
    if mask is not None or given.bias is not None:  # else the row is NaN
        statistics = statistics.masked_fill(statistics[0] == -torch.inf, 0)
    maximum, log_sum, lse = statistics.double().unsqueeze(-1)
    z = (y.double() - maximum.detach()) * rounded(factor, compute, logits.device)
    # Autograd sees the log-sum-exp alone.
    p = (z - log_sum.detach() - (lse - lse.detach())).to(compute).exp()
    return p if mask is None else p.masked_fill(mask, 0)  # in a row of NaN, too


def _weighted(
    gradient: Tensor, probabilities: Tensor, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradient and probabilities in the accumulation type; the first is 0 where the second is."""
    q = probabilities.to(compute)
    return torch.where(q == 0, 0, gradient.to(compute)), q


def _scatter(values: Tensor, indices: Tensor, columns: int) -> Tensor:
    """[..., K] to [..., columns], 0 elsewhere; values with indices outside vanish."""
    inside = (indices >= 0) & (indices < columns)
    where = torch.where(inside, indices, columns)
    zeros = values.new_zeros(*values.shape[:-1], columns + 1)
    return zeros.scatter(-1, where, values)[..., :columns]


def _gather(values: Tensor, indices: Tensor) -> Tensor:
    """[..., columns] to [..., K], 0 for indices outside."""
    columns = values.shape[-1]
    inside = (indices >= 0) & (indices < columns)
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.gather(-1, torch.where(inside, indices, columns))


ForwardArguments = arguments_of(softmax_topk_forward)
BackwardArguments = arguments_of(softmax_topk_backward)
