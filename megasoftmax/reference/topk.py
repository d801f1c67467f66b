"""Softmax + top-k in plain torch: the specification, and the fallback of the ops of that name.

    z = scale * logits + bias,  p = exp(z - max z) / sum exp(z - max z),  the K largest of p
        with a softcap:  z = softcap * tanh(scale * logits / softcap) + bias

or the K largest of sigmoid(z). A selection bias is added where the K are chosen.

`softmax_topk_forward` and `softmax_topk_backward` have the signatures of the ops and are pure,
without autograd. `autograd.topk` makes one differentiable function of any such pair.

What is selected follows from comparisons alone. Without a bias raw logits are compared (negated for
a negative scale), because products with the scale could round to the same number. With a bias z is
compared, as a fused multiply-add rounds it. GPU and CPU cannot differ in this arithmetic. With a
softcap z is compared too. There they can differ in the last bits of tanh. With a selection bias the
sum of it and the score is compared, and the last bits of the score can differ.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax.reference.dropout import halves_of, philox
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
    row_scale: Tensor | None,
    top_k: int,
    row_top_k: Tensor | None,
    top_p: float,
    row_top_p: Tensor | None,
    min_p: float,
    row_min_p: Tensor | None,
    sigmoid: bool,
    selection_bias: Tensor | None,
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
        row_scale: floating, broadcastable to the rows, in place of `scale`; or None. A row has NaN
            unless its scale is from SCALES[0] to SCALES[1].
        top_k, top_p, min_p: `Limits`, of all rows: 0, 1 and 0 for none.
        row_top_k, row_top_p, row_min_p: the same, broadcastable to the rows, in their place.
        sigmoid: the scores are sigmoid(z) in place of probabilities.
        selection_bias: floating, broadcastable to logits, added to the scores where they are
            chosen; or None. Limits take no notice of it.

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
        bias is given, else NaN. With `sigmoid` all three are 0.
    """
    compute = accumulation_dtype(logits.dtype)
    given = ForwardArguments(
        *(logits, k, scale, softcap, mask, bias, renormalize, dtype, candidates, row_scale)
    )
    y, factor = comparable(given)
    rank = y
    if selection_bias is not None:
        scores = torch.sigmoid(y * factor) if sigmoid else _softmax(y, factor)
        rank = (scores + selection_bias).to(compute).masked_fill(y == -torch.inf, -torch.inf)
    indices = select(rank, k)
    selected = y.gather(-1, indices)
    if sigmoid:
        values = _visible(torch.sigmoid(selected * factor), mask, indices)
        if renormalize:
            total = values.sum(-1, keepdim=True)
            values = _visible(values / total.masked_fill(total == 0, 1), mask, indices)
        return values.to(dtype).contiguous(), indices, y.new_zeros((3, *y.shape[:-1]))
    if k > 0 and selection_bias is None:
        largest = selected[..., 0]
    else:
        largest = y.amax(-1) if y.shape[-1] > 0 else y.new_full(y.shape[:-1], -torch.inf)
    empty = largest == -torch.inf

    below = y - largest.unsqueeze(-1)
    is_one = not isinstance(factor, Tensor) and factor == 1
    total = (below if is_one else below * factor).exp_().sum(-1)
    log_total = total.double().log()
    lse = largest.double() * of_rows(rounded(factor, compute, logits.device)) + log_total
    statistics = torch.stack([largest, log_total, lse])
    statistics = statistics.masked_fill(empty, -torch.inf)
    is_nan = largest.isnan() | (largest == torch.inf)
    if row_scale is not None:
        is_nan = is_nan | of_rows(scale_of(given)).isnan()
    statistics = statistics.masked_fill(is_nan, torch.nan)

    if candidates:
        values = selected * factor
    else:
        limits = Limits.of(top_k, row_top_k, top_p, row_top_p, min_p, row_min_p)
        first = largest
        if renormalize and selection_bias is not None and k > 0:  # which may choose small ones
            first = torch.where(is_nan, torch.nan, selected.amax(-1))
        values = torch.exp((selected - first.unsqueeze(-1)) * factor)
        values = limits.applied(values, total)
        values = values / (values.sum(-1) if renormalize else total).unsqueeze(-1)
        if mask is not None or bias is not None:
            values = values.masked_fill(empty.unsqueeze(-1), 0)
        values = _visible(values, mask, indices)
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
    row_scale: Tensor | None,
    sigmoid: bool,
) -> Tensor:
    """The gradient of the logits, or of z, from those of probabilities g and log-sum-exp h.

    With P the K probabilities, i their indices and p_j = exp(z_j - max - log sum) those of all V:

        dz_j = p_j (h - sum(g P)) + sum over k with j = i_k of g_k p_j

    and, renormalised:

        dz_j = p_j h              + sum over k with j = i_k of P_k (g_k - sum(g P))

    and with s_j = sigmoid(z_j), where sum(g P) is 0 unless renormalised:

        dz_j = sum over k with j = i_k of P_k (g_k - sum(g P)) (1 - s_j)

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
        row_scale, sigmoid: as in `softmax_topk_forward`.

    Returns:
        [..., V], contiguous.
    """
    given = BackwardArguments(
        *(gradient, probabilities, indices, lse_gradient, logits, statistics),
        *(scale, softcap, mask, bias, renormalize, of_bias, dtype, row_scale, sigmoid),
    )
    compute = accumulation_dtype(logits.dtype)
    g, q = _weighted(gradient, probabilities, compute)
    d = (g * q).sum(-1, keepdim=True)
    h = None if lse_gradient is None else lse_gradient.unsqueeze(-1)
    columns = logits.shape[-1]
    if sigmoid:
        _, rest = _sigmoids(given)
        found = q * (g - d if renormalize else g) * rest
        dz = _scatter(torch.where(q == 0, 0, found), indices, columns)
    elif renormalize:
        dz = _scatter(torch.where(q == 0, 0, q * (g - d)), indices, columns)
        if h is not None:
            p = _probabilities(given)
            dz = dz + torch.where(p == 0, 0, p * h)
    else:
        p = _probabilities(given)
        dz = _scatter(g, indices, columns) + ((0 if h is None else h) - d)
        dz = torch.where(p == 0, 0, p * dz)
    if not of_bias:
        dz = dz * slope_of_scores(logits, given._replace(scale=scale_of(given)))
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

    With s_j = sigmoid(z_j), v (1 - s) takes the place of v, D and f are 0 unless renormalised, and
    dz_j = -v_j s_j (1 - s_j) P_k (g_k - D) where j = i_k.

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
    v = cotangent.to(compute)
    columns = given.logits.shape[-1]
    if given.sigmoid:
        s, rest = _sigmoids(given)
        at = torch.where(q == 0, 0, _gather(v, indices) * rest)
        f = (at * q).sum(-1, keepdim=True) if given.renormalize else 0
        of_selected = g - d if given.renormalize else g
        d_gradient = q * (at - f)
        d_probabilities = torch.where(q == 0, 0, at * of_selected - g * f)
        d_z = _scatter(-at * s * q * of_selected, indices, columns)
        d_lse_gradient = (
            None if given.lse_gradient is None else torch.zeros_like(given.lse_gradient)
        )
        d_lse = d_z.new_zeros(d_z.shape[:-1])
        return DoubleGradients(d_gradient, d_probabilities, d_lse_gradient, d_lse, d_z)
    p = _probabilities(given)
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
        d_z = torch.where(p == 0, 0, v * p * (_scatter(g, indices, columns) + (h - d)))
    d_probabilities = torch.where(q == 0, 0, d_probabilities)
    d_lse_gradient = None if given.lse_gradient is None else e.squeeze(-1)
    return DoubleGradients(d_gradient, d_probabilities, d_lse_gradient, -d_z.sum(-1), d_z)


def select(values: Tensor, k: int) -> Tensor:
    """Indices int64 [..., k] of the K largest along the last dimension, float32 or float64.

    Larger first, lower index first among equals; NaN before +inf, and -0 equal to 0.
    """
    if values.device.type != "cpu" or is_traced():
        return _select_by_keys(values, k)
    return select_on_cpu(values.detach(), k)


# On a CPU torch.sort of so few numbers takes less time than torch.topk and the search for equals.
# 16-bit numbers have many equals: in rows up to that length keys take less than their repair.
_MOST_SORTED = 256
_LONGEST_BY_KEYS = 1024
_SPARE = 16  # entries that torch.topk is asked for beyond K where equals are likely


def select_on_cpu(values: Tensor, k: int) -> Tensor:
    """`select` of a plain tensor on a CPU, of 16 bits too, where nobody traces."""
    if values.numel() <= _MOST_SORTED:
        indices = values.sort(stable=True, dim=-1, descending=True).indices
        return torch.narrow_copy(indices, -1, 0, k)
    if values.dtype.itemsize > 2:
        return _select_by_topk(values, k, 1)
    if values.shape[-1] <= _LONGEST_BY_KEYS:
        return _select_by_keys(values, k)
    return _select_by_topk(values, k, _SPARE // 2)


def _select_by_keys(values: Tensor, k: int) -> Tensor:
    """`select` by integers without equals: the bits, ordered like the numbers, then the column."""
    values = values + 0.0  # -0 becomes 0, and a NaN of 16 bits may become one with other bits
    values = torch.where(values.isnan(), torch.nan, values)  # of one sign
    # vmap of torch before 2.13 does not see a tensor as integers.
    if values.dtype == torch.float64 or torch._C._are_functorch_transforms_active():
        return values.sort(stable=True, dim=-1, descending=True).indices[..., :k].contiguous()
    columns = values.shape[-1]
    bits, of_bits, of_keys = 32, torch.int32, torch.int64
    if values.dtype.itemsize == 2 and columns <= 2**16:
        bits, of_bits, of_keys = 16, torch.int16, torch.int32
    elif values.dtype.itemsize == 2:
        values = values.float()
    number = values.view(of_bits)
    ordered = (number >> (bits - 1)).bitwise_and_(2 ** (bits - 1) - 1).bitwise_xor_(number)
    keys = ordered.to(of_keys).bitwise_left_shift_(bits)
    keys += torch.arange(columns - 1, -1, -1, device=values.device, dtype=of_keys)
    return keys.topk(k).indices


def _select_by_topk(values: Tensor, k: int, spare: int) -> Tensor:
    """`select` by torch.topk, which leaves open which of equals come: these are put in order.

    Args:
        values, k: as in `select`.
        spare: candidates beyond K, at least 1. Rows whose entry K may have equals beyond these take
            more candidates, and then keys.
    """
    candidates = min(k + spare, values.shape[-1])
    top, indices = values.topk(candidates, -1)
    steps = (top if candidates <= k + 1 else top.narrow(-1, 0, k + 1)).diff()
    # A NaN, or infinity minus infinity, is not below 0: such rows count as if they had equals.
    if steps.numel() == 0 or steps.amax().item() < 0:
        return torch.narrow_copy(indices, -1, 0, k)
    has_equals = ~(steps < 0).all(-1)
    top, found = top[has_equals], indices[has_equals]
    found, order = found.sort(-1)
    order = top.gather(-1, order).sort(stable=True, dim=-1, descending=True).indices
    found = found.gather(-1, order)[..., :k]
    if candidates < values.shape[-1]:
        kth, last = top[..., k - 1], top[..., -1]
        may_continue = (kth == last) | last.isnan()
        if may_continue.any():
            rows = values[has_equals][may_continue]
            by_keys = spare >= _SPARE
            found[may_continue] = (
                _select_by_keys(rows, k) if by_keys else _select_by_topk(rows, k, _SPARE)
            )
    indices = torch.narrow_copy(indices, -1, 0, k)
    indices[has_equals] = found
    return indices


def rounded(number: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as `dtype` has it, in float64: its product with a float32 is exact there."""
    if isinstance(number, Tensor):
        return number.to(dtype).double()
    return torch.full((), number, dtype=dtype, device=device).double()


# Scales of rows, positive float32 that kernels take: they multiply them by log2(e).
SCALES = torch.finfo(torch.float32).tiny, 0.69 * torch.finfo(torch.float32).max


def scale_of(given: Any) -> Any:
    """The scale of all rows, or [..., 1] of each, NaN where it is none."""
    if given.row_scale is None:
        return given.scale
    of_rows = given.row_scale.detach().unsqueeze(-1)
    of_rows = of_rows.to(torch.promote_types(of_rows.dtype, torch.float32))
    return torch.where((of_rows >= SCALES[0]) & (of_rows <= SCALES[1]), of_rows, torch.nan)


def of_rows(factor: float | Tensor) -> Any:
    """A factor for tensors of rows, from one for logits."""
    return factor.squeeze(-1) if isinstance(factor, Tensor) and factor.dim() > 0 else factor


def comparable(given: Any) -> tuple[Tensor, float | Tensor]:
    """y [..., V], ordered as z is, and a factor from 0 on, or [..., 1]: z = factor * y."""
    logits, scale, mask, bias = given.logits, scale_of(given), given.mask, given.bias
    compute = accumulation_dtype(logits.dtype)
    factor: float | Tensor = 1.0
    if not is_linear(given):
        y = torch.tanh(logits.double() * (scale / given.softcap)) * given.softcap
        y = (y if bias is None else y + bias).to(compute)
    elif bias is not None:
        # One rounding, as in a fused multiply-add: float64 holds the product.
        y = (logits.double() * rounded(scale, compute, logits.device) + bias).to(compute)
    elif isinstance(scale, Tensor):
        y, factor = logits.to(compute), scale.to(compute)
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


def _softmax(y: Tensor, factor: float | Tensor) -> Tensor:
    """The probabilities over all of V, of z = factor * y."""
    if y.shape[-1] == 0:
        return y
    weights = ((y - y.amax(-1, keepdim=True)) * factor).exp_()
    return weights / weights.sum(-1, keepdim=True)


def _sigmoids(given: Any) -> tuple[Tensor, Tensor]:
    """sigmoid(z) of the K entries, and 1 less it, in the accumulation type; differentiable."""
    y, factor = comparable(given)
    z = y.gather(-1, given.indices) * factor
    return torch.sigmoid(z), torch.sigmoid(-z)


def _visible(values: Tensor, mask: Tensor | None, indices: Tensor) -> Tensor:
    """Values of the K entries, 0 where the mask excludes them."""
    if mask is None:
        return values
    columns = mask.shape[-1] if mask.dim() > 0 else 1
    excluded = mask.expand(*indices.shape[:-1], columns)
    return values.masked_fill(excluded if columns == 1 else excluded.gather(-1, indices), 0)


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


class Limits(NamedTuple):
    """Which of the K entries of a row keep their probability, in the order of the K.

    Each is a number, a tensor of the rows, [..., 1], or None.

    top_k: the first so many, where it is from 1 to K. Then top_p counts in the sum of these;
        otherwise in that of the whole row.
    top_p: those before which the probabilities sum to less than it. From 1 on: all.
    min_p: those with at least this part of the largest probability.

    The first entry stays. Rows of NaN stay as they are.
    """

    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None

    @classmethod
    def of(
        cls,
        top_k: int,
        row_top_k: Tensor | None,
        top_p: float,
        row_top_p: Tensor | None,
        min_p: float,
        row_min_p: Tensor | None,
    ) -> "Limits":
        """From what ops take."""

        def chosen(number: float, none: float, rows: Tensor | None) -> Any:
            if rows is not None:
                return rows.detach().unsqueeze(-1)
            return None if number == none else number

        return cls(
            chosen(top_k, 0, row_top_k), chosen(top_p, 1, row_top_p), chosen(min_p, 0, row_min_p)
        )

    def applied(self, weights: Tensor, total: Tensor) -> Tensor:
        """The weights exp(z - max z) of the K, [..., K], 0 where they are dropped.

        Args:
            weights: largest first.
            total: the sum over the whole row, [...].
        """
        k = weights.shape[-1]
        if k == 0 or all(limit is None for limit in self):
            return weights
        total = total.unsqueeze(-1)

        def of_rows(limit: Any, dtype: torch.dtype) -> Tensor:
            if isinstance(limit, Tensor):
                return limit.to(dtype)
            return torch.full((), limit, device=weights.device, dtype=dtype)

        places = torch.arange(k, device=weights.device)
        kept = torch.ones_like(weights, dtype=torch.bool)
        if self.top_k is not None:
            top_k = of_rows(
                min(self.top_k, k + 1) if type(self.top_k) is int else self.top_k, torch.int64
            )
            is_given = (top_k >= 1) & (top_k <= k)
            kept = (places < top_k) | ~is_given
            first = torch.where(kept, weights, 0).sum(-1, keepdim=True)
            whole = torch.where(is_given, first, total)
        else:
            whole = total
        if self.top_p is not None:
            top_p = of_rows(self.top_p, weights.dtype)
            before = torch.cat([torch.zeros_like(total), weights[..., :-1]], -1).cumsum(-1)
            kept = kept & ((before < top_p * whole) | (top_p >= 1))
        if self.min_p is not None:
            min_p = of_rows(self.min_p, weights.dtype)
            kept = kept & (weights >= min_p)
        kept = kept.int().cummin(-1).values > 0
        is_regular = (total > 0) & (total < torch.inf)
        return torch.where(kept | (places == 0) | ~is_regular, weights, 0)


def softmax_topk_sample(
    logits: Tensor,
    k: int,
    scale: float,
    row_scale: Tensor | None,
    mask: Tensor | None,
    top_k: int,
    row_top_k: Tensor | None,
    top_p: float,
    row_top_p: Tensor | None,
    min_p: float,
    row_min_p: Tensor | None,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """An index of each row, drawn from the renormalised probabilities of `softmax_topk_forward`.

    Args:
        k: from 1 to V.
        seed: int64, one element. Row r, counted over all leading dimensions, draws by the number
            `uniform(seed, ...)[r]`.
        logits, scale, row_scale, mask: as in `softmax_topk_forward`, and limits too.

    Returns:
        Indices int64 [...], and the K probabilities [..., K], float32 (float64 for float64
        logits), and their indices [..., K]. The first entry whose probabilities up to it sum to
        more than the number is drawn. Rows of NaN, and rows without a visible entry, give their
        first index.
    """
    probabilities, indices, _ = softmax_topk_forward(
        *(logits, k, scale, 0.0, mask, None, True, accumulation_dtype(logits.dtype), False),
        *(row_scale, top_k, row_top_k, top_p, row_top_p, min_p, row_min_p, False, None),
    )
    numbers = uniform(seed, logits.shape[:-1].numel()).view(*logits.shape[:-1], 1)
    through = probabilities.cumsum(-1)
    kept = (probabilities > 0).sum(-1, keepdim=True)
    drawn = (through <= numbers * through[..., -1:]).sum(-1, keepdim=True)
    drawn = torch.minimum(drawn, (kept - 1).clamp(min=0))
    return indices.gather(-1, drawn).squeeze(-1), probabilities, indices


_PLACE = 64  # the last word of the counter: those of dropout are below it


def uniform(seed: Tensor, rows: int) -> Tensor:
    """Numbers of rows, multiples of 2^-24 from 0 to 1 exclusively, float32 [rows].

    Number r is made of the high 24 bits of the first word of Philox 4x32 with 7 rounds, of the key
    (low, high 32 bits of the seed) and the counter (low, high 32 bits of r, 0, 64).
    """
    counters = torch.arange(rows, device=seed.device)
    nothing = torch.zeros_like(counters)
    words = philox(
        *halves_of(seed), counters & 0xFFFFFFFF, counters >> 32, nothing, nothing + _PLACE
    )
    return (words[0] >> 8).float() * 2.0**-24


ForwardArguments = arguments_of(softmax_topk_forward)
BackwardArguments = arguments_of(softmax_topk_backward)
SampleArguments = arguments_of(softmax_topk_sample)

_WHERE_NOT_GIVEN = ForwardArguments(
    scale=1.0,
    softcap=0.0,
    renormalize=False,
    candidates=False,
    sigmoid=False,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
)


def without_options(logits: Tensor, k: int) -> Any:
    """Arguments of `softmax_topk_forward`, for probabilities in the type of the logits."""
    return _WHERE_NOT_GIVEN._replace(logits=logits, k=k, dtype=logits.dtype)


# Tensors that broadcast to the logits, and how many of the last dimensions they lack.
BESIDE_LOGITS = {
    **dict.fromkeys(("mask", "bias", "selection_bias"), 0),
    **dict.fromkeys(("row_scale", "row_top_k", "row_top_p", "row_min_p"), 1),
}
