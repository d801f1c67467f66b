"""Attention in plain torch: the specification, and the fallback of the ops of that name.

    z = scale * q k + bias
        with a softcap:  z = softcap * tanh(scale * q k / softcap) + bias
    P = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  O = P v

over the keys, in float32, or float64 for float64 queries, and P exactly 0 for excluded keys.
`attention_forward` and `attention_backward` have the signatures of the ops and are pure, without
autograd. `autograd.attention` makes one differentiable function of any such pair.

P exists for one block of batches, heads and queries at a time; the backward pass computes it again.
Where autograd records what is computed, or a transform or tracer sees it, nothing is changed in
place. So autograd and vmap work on a block, and the backward function is differentiable itself, as
often as wanted. Elsewhere, on a CPU, one buffer holds z and then P, and another dP and then dz.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from megasoftmax.reference.dropout import drop_, dropped, kept
from megasoftmax.reference.softmax import (
    accumulation_dtype,
    arguments_of,
    clear_,
    exclude_,
    excluded_by_ranges,
    excluded_by_window,
    gradient_beside,
    largest_of_rows,
    logit_beside,
    union,
    upper_limits,
)
from megasoftmax.tracing import may_overwrite

# The most logits of a block, 16 MiB, if those of one query and the heads that share a key head fit.
# On a CPU 64 MiB took 1.7 times as long, because more memory is touched for the first time.
BLOCK = 2**22

# The most logits of a block for each thread of a CPU, 4 MiB, which a cache holds: with one thread,
# calls of 8 million logits take 0 to 15% less time than with BLOCK. Half of it took up to 8% more.
BLOCK_OF_THREAD = 2**20


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink: Tensor | None,
    sink_value: float | None,
    relative: bool,
    first: Tensor | None,
    end: Tensor | None,
    note: Tensor | None,
    block: int,
    dropout: float,
    seed: Tensor | None,
    tf32: bool,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of values for each query, and statistics of its weights.

    Args:
        query: floating, [b, h, m, d].
        key: [b, hk, n, d], of the same dtype; hk divides h, and query head i reads i // (h / hk).
        value: [b, hk, n, dv], of the same dtype.
        bias: floating, [bb, h or 1, m or 1, n or 1], added to the scaled products; or None. bb
            divides b: example i takes entry i // (b / bb).
        mask: bool, [bm, h or 1, m or 1, n or 1], True = excluded; or None. bm divides b: example i
            takes entry i % bm.
        scale: factor of the products of queries and keys.
        softcap: above 0, softcap * tanh(scale * product / softcap) takes the place of the scaled
            product; 0: none.
        causal, window_left, window_right, sink, sink_value: as in `softmax_forward` of softmax.py.
        relative: bias is [bb, h or 1, m + n - 1], and pair (i, j) takes entry j - i + m - 1. Or it
            is [bb, h or 1, m, at least m + n - 1], and pair (i, j) takes that entry of row i.
        first, end: int32 [b or 1, h or 1, m or 1], or None: query i sees keys first <= j < end.
            What lies outside of [0, n] is cut.
        note: the block mask that `megasoftmax::tile_note` made of the mask, or None. Only kernels
            use it.
        block: 1, or a multiple of 64: the mask then has an entry for each block x block pairs,
            [bm, h or 1, ceil(m / block), ceil(n / block)].
        dropout: the probability to drop an entry of P in the product with the values: a dropped
            entry counts as 0, a kept one as `dropout.factor` times P.
        seed: int64, one element, which decides what is dropped; may be None where dropout is 0.
        tf32: whether kernels round factors of float32 products to TF32. Torch has settings of its
            own for the products of the reference.

    Returns:
        Output [b, h, m, dv], in the dtype of the query; in memory [b, m, h, dv], contiguous.
        Statistics [3, b, h, m], float32 (float64 for float64 queries), contiguous: the largest z of
        the row, or from kernels a number near it; the logarithm of the denominator relative to
        that, sink included; and the log-sum-exp, the logarithm of the denominator.

        A row without a visible key has output 0 where mask, bias, causality, a window, first, end
        or a sink is given, and where there are no keys, else NaN; its statistics are 0 and twice
        the sink or -inf. A visible NaN or +inf makes NaN of its row.
    """
    given = ForwardArguments(
        *(query, key, value, bias, mask, scale, softcap, causal, window_left, window_right),
        *(sink, sink_value, relative, first, end, note, block, dropout, seed, tf32),
    )
    given = _with_pairs(given)
    compute = accumulation_dtype(query.dtype)
    in_place = may_overwrite(query, key, value, bias, sink)

    def forward(block: _Block) -> tuple[Tensor, Tensor]:
        scores = _scores(block, given, compute, in_place)
        p, statistics = _weights(block, scores, given, in_place)
        assert statistics is not None
        weights = _dropped(p, _kept(block, given), given, in_place)
        output = _times(weights, block.value.to(compute))
        return output, torch.stack(statistics, -1)

    with full_precision(query.device.type):
        output, statistics = _in_blocks(
            forward, _block(given), lambda block: (_EVERYWHERE, _EVERYWHERE)
        )
    # A copy, because autograd forbids changes in place of an output that is a view.
    output = output.transpose(1, 2).contiguous().transpose(1, 2).to(query.dtype, copy=True)
    return output, statistics.movedim(-1, 0).contiguous()


def attention_backward(
    d_output: Tensor,
    d_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink: Tensor | None,
    sink_value: float | None,
    relative: bool,
    first: Tensor | None,
    end: Tensor | None,
    note: Tensor | None,
    block: int,
    dropout: float,
    seed: Tensor | None,
    tf32: bool,
    bias_gradient: bool,
    sink_gradient: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients, from those of output dO and log-sum-exp h.

        D = sum(dO O) - h over the value's dimension,  dz = P (dO v - D),  ds = dz (1 - t^2),
        dq = scale ds k,  dk = scale ds q,  dv = P dO,  dbias = dz summed over what was broadcast,
        dsink = -exp(sink - lse) D

    where t = tanh(scale * q k / softcap), or 0 without a softcap.

    With dropout, the P of dv and the dO v of dz are dropped like the P of the output. Where P is
    exactly 0, dz is exactly 0, whatever dO and v hold.

    Args:
        d_output: of the output, with its shape and dtype, any strides.
        d_lse: of the log-sum-exp, statistics[2], with its shape and dtype; or None.
        output, statistics: what `attention_forward` returned. Only kernels use the statistics.
        bias_gradient, sink_gradient: whether these are asked for.
        deterministic: whether every run must give the same bits; the reference always does.
        The others: as in `attention_forward`.

    Returns:
        Gradients of query, key, value and bias, in their shapes and dtypes, any strides, and of the
        sink for each row, [b, h, m], float32 (float64 for float64 queries). (0,) for what is not
        asked for.
    """
    given = ForwardArguments(
        *(query, key, value, bias, mask, scale, softcap, causal, window_left, window_right),
        *(sink, sink_value, relative, first, end, note, block, dropout, seed, tf32),
    )
    given = _with_pairs(given)
    compute = accumulation_dtype(query.dtype)
    in_place = may_overwrite(query, key, value, bias, sink, output, d_output, d_lse)

    def backward(block: _Block) -> tuple[Tensor, ...]:
        scores = _scores(block, given, compute, in_place)
        slope = None
        if given.softcap > 0:  # 0 for a score of NaN
            slope = (1 - scores * scores).nan_to_num(0.0)
        p, statistics = _weights(block, scores, given, in_place, sink_gradient)
        assert block.d_output is not None
        assert block.output is not None
        g = block.d_output.to(compute)
        d = (g * block.output.to(compute)).sum(-1)
        if block.d_lse is not None:
            d = d - block.d_lse
        keep = _kept(block, given)
        dp = _dropped(_times(g, block.value.to(compute).mT), keep, given, in_place)
        dz = _gradient_of_logits(dp, d, p, in_place)
        d_bias, d_sink = d.new_empty(0), d.new_empty(0)
        if bias_gradient:
            assert block.bias is not None
            d_bias = _gradient_of_bias(dz, block.bias, block.diagonal)
        if slope is not None:
            # The gradient of a bias may be a view of dz.
            dz = dz.mul_(slope) if in_place and not bias_gradient else dz * slope
        d_query = _scaled(_times(dz, block.key.to(compute)), scale, in_place)
        d_key = _summed_times(dz, block.query.to(compute), block.key.shape[1])
        d_key = _scaled(d_key, scale, in_place)
        d_value = _summed_times(_dropped(p, keep, given, in_place), g, block.key.shape[1])
        if sink_gradient:
            assert statistics is not None
            d_sink = gradient_beside(given._replace(sink=block.sink), statistics[2], d)
        return d_query, d_key, d_value, d_bias, d_sink

    def cuts(block: _Block) -> tuple[tuple[int, ...], ...]:
        return (
            _EVERYWHERE,
            _BATCHES_AND_HEADS,
            _BATCHES_AND_HEADS,
            _cuts_of_bias(block.bias) if bias_gradient else (),
            _EVERYWHERE if sink_gradient else (),
        )

    whole = _block(given)._replace(output=output, d_output=d_output, d_lse=d_lse)
    with full_precision(query.device.type):
        d_query, d_key, d_value, d_bias, d_sink = _in_blocks(backward, whole, cuts)
    if bias_gradient:
        assert bias is not None
        d_bias = d_bias.to(bias.dtype)
        if given.bias is not bias:
            d_bias = _gradient_of_rows(d_bias, bias)
    return (d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_bias, d_sink)


def merge(
    output: Tensor, statistics: Tensor, other_output: Tensor, other_statistics: Tensor
) -> None:
    """Replaces output and statistics by those over the keys of both; nothing is differentiated.

    Args:
        output: [b, h, m, dv], in the dtype of the other output or that of the statistics.
        statistics: [3, b, h, m], as `attention_forward` returns them.
        other_output, other_statistics: of the same queries and other keys. Rows without a visible
            key have output 0.
    """
    largest, log_sum, _ = statistics
    other_largest, other_log_sum, _ = other_statistics
    is_empty, other_is_empty = log_sum == -torch.inf, other_log_sum == -torch.inf
    of_both = torch.maximum(largest, other_largest)
    of_both = torch.where(is_empty, other_largest, torch.where(other_is_empty, largest, of_both))
    log_sum, other_log_sum = (
        log_sum + (largest - of_both).masked_fill(is_empty, 0),
        other_log_sum + (other_largest - of_both).masked_fill(other_is_empty, 0),
    )
    total = torch.logaddexp(log_sum, other_log_sum)
    base = total.masked_fill(total == -torch.inf, 0)
    kept, share = (torch.exp(each - base).unsqueeze(-1) for each in (log_sum, other_log_sum))
    torch.addcmul(output * kept, other_output, share, out=output)
    statistics.copy_(torch.stack((of_both, total, of_both + total)))


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Without autocast, which would round what matrix products take."""
    # Not torch.amp.is_autocast_available, which torch 2.11 cannot trace.
    if device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


# Blocks: some batches, heads and queries, with all of their keys


class _Block(NamedTuple):
    """What the logits of some batches, heads and queries are made from, shaped as in the ops.

    Query i of the block stands at key i + diagonal. Its number among all queries is i +
    first_query; batches and heads are counted likewise.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    mask: Tensor | None
    sink: Tensor | None
    first: Tensor | None
    end: Tensor | None
    diagonal: int
    first_batch: int
    first_head: int
    first_query: int
    mask_block: int  # the mask has an entry for each mask_block x mask_block pairs
    output: Tensor | None = None
    d_output: Tensor | None = None
    d_lse: Tensor | None = None


# Dimensions along which results of blocks are concatenated; over the others they are summed.
_EVERYWHERE = (0, 1, 2)
_BATCHES_AND_HEADS = (0, 1)


def _cuts_of_bias(bias: Tensor | None) -> tuple[int, ...]:
    """The dimensions along which blocks cut a bias; of a table batches and heads alone."""
    if bias is None:
        return ()
    return tuple(dim for dim in range(bias.dim() - 1) if bias.shape[dim] != 1)


def _block(given: Any) -> _Block:
    """The block of all batches, heads and queries."""
    diagonal = given.key.shape[-2] - given.query.shape[-2]
    mask = None if given.mask is None else repeated(given.mask, given.query.shape[0])
    return _Block(
        *(given.query, given.key, given.value, given.bias, mask, given.sink),
        *(given.first, given.end, diagonal, 0, 0, 0, given.block),
    )


def repeated(mask: Tensor, batches: int) -> Tensor:
    """A mask of fewer batches than the query, with all of them or 1."""
    if mask.shape[0] in (1, batches):
        return mask
    return mask.repeat(batches // mask.shape[0], *(1,) * (mask.dim() - 1))


def _in_blocks(
    function: Callable[[_Block], Sequence[Tensor]],
    block: _Block,
    cuts: Callable[[_Block], Sequence[tuple[int, ...]]],
) -> Sequence[Tensor]:
    """function(block), from blocks of at most BLOCK logits, see `_cut`.

    Args:
        cuts: for each result, the dimensions along which results of parts are concatenated.
    """
    cut = _cut(block)
    if cut is None:
        return function(block)
    dim, blocks = cut
    return _joined((_in_blocks(function, part, cuts) for part in blocks), dim, cuts(block))


def _cut(block: _Block) -> tuple[int, list[_Block]] | None:
    """The dimension along which a block is cut, and its parts; None where it stays whole."""
    batches, heads, queries, _ = block.query.shape
    logits = batches * heads * queries * block.key.shape[-2]
    most = BLOCK
    if block.query.is_cpu and not torch.compiler.is_compiling():
        most = min(BLOCK, BLOCK_OF_THREAD * torch.get_num_threads())
    if logits <= most:
        return None
    entries = 1 if block.bias is None else block.bias.shape[0]
    units = (batches // entries if entries > 1 else 1, heads // block.key.shape[1], 1)
    for dim, (size, unit) in enumerate(zip(block.query.shape, units, strict=False)):
        if unit < size:
            step = unit * max(1, most // (logits // size * unit))
            starts = range(0, size, step)
            return dim, [_part(block, dim, i, min(step, size - i)) for i in starts]
    return None


def _part(block: _Block, dim: int, start: int, length: int) -> _Block:
    size = block.query.shape[dim]

    def part(tensor: Tensor | None, dim: int = dim) -> Any:
        """The part of a tensor with as many entries as the query there, a divisor of that, or 1."""
        if tensor is None or tensor.shape[dim] == 1:
            return tensor
        count = tensor.shape[dim]
        return tensor.narrow(dim, start * count // size, length * count // size)

    is_per_head = block.sink is not None and block.sink.numel() != 1
    return _Block(
        query=part(block.query),
        key=block.key if dim == 2 else part(block.key),
        value=block.value if dim == 2 else part(block.value),
        bias=part(block.bias) if dim in _cuts_of_bias(block.bias) else block.bias,
        mask=block.mask if dim == 2 and block.mask_block != 1 else part(block.mask),
        sink=part(block.sink, 0) if dim == 1 and is_per_head else block.sink,
        first=part(block.first),
        end=part(block.end),
        diagonal=block.diagonal + start if dim == 2 else block.diagonal,
        first_batch=block.first_batch + start if dim == 0 else block.first_batch,
        first_head=block.first_head + start if dim == 1 else block.first_head,
        first_query=block.first_query + start if dim == 2 else block.first_query,
        mask_block=block.mask_block,
        output=part(block.output),
        d_output=part(block.d_output),
        d_lse=part(block.d_lse),
    )


def _joined(
    parts: Iterable[Sequence[Tensor]], dim: int, cuts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Each result of the whole, from those of the blocks along a dimension."""
    found: list[list[Tensor]] = []
    for part in parts:
        if not found:
            found = [[result] for result in part]
            continue
        for results, result, dims in zip(found, part, cuts, strict=True):
            if dim in dims:
                results.append(result)
            else:
                results[0] = results[0] + result
    return [torch.cat(results, dim) if len(results) > 1 else results[0] for results in found]


# A block


def _weights(
    block: _Block, scores: Tensor, given: Any, in_place: bool, has_statistics: bool = True
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """P [b, h, m, n]; of each row, [b, h, m], the largest z, 0 where no key is visible; the
    logarithm of the denominator relative to it; and the log-sum-exp.

    scores: from `_scores`.
    in_place: P takes the place of the scores, and is not differentiable.
    has_statistics: False may leave out what is known of rows.
    """
    queries, keys = block.query.shape[2], block.key.shape[2]
    compute = scores.dtype
    z = _logits(block, scores, given, in_place)
    window = (given.causal, given.window_left, given.window_right)
    excluded = union(
        _mask_of_pairs(block),
        excluded_by_window(queries, keys, *window, z.device, block.diagonal),
        excluded_by_ranges(block.first, block.end, keys),
    )
    limits = None
    if excluded is not None and in_place:
        limits = upper_limits(excluded, compute)
        exclude_(z, limits)
    elif excluded is not None:
        z = z.masked_fill(excluded, -torch.inf)

    logit = logit_beside(given._replace(sink=block.sink), compute, z.device)
    largest = largest_of_rows(z.detach(), -torch.inf)
    empty = largest == -torch.inf
    highest = largest if logit is None else torch.maximum(largest, logit.detach())
    largest, highest = (each.masked_fill(each == -torch.inf, 0) for each in (largest, highest))
    can_be_empty = excluded is not None or block.bias is not None or logit is not None
    if in_place:
        p = torch.softmax(z, -1, out=z)
        if can_be_empty and empty.any().item():
            p.masked_fill_(empty.unsqueeze(-1), 0)
        if logit is None and not has_statistics:
            return _cleared(p, excluded, limits), None
        # The largest of these weights is 1 / sum exp(z - largest).
        of_keys = (torch.exp(largest - highest) / largest_of_rows(p, 1)).masked_fill_(empty, 0)
    else:
        p = torch.exp(z - highest.unsqueeze(-1))
        of_keys = p.sum(-1)
    total = of_keys if logit is None else of_keys + torch.exp(logit - highest)
    nothing = total == 0
    divisor = total
    if can_be_empty:
        divisor = total.masked_fill(nothing, 1)
    if not in_place:
        p = p / divisor.unsqueeze(-1)
    elif logit is not None:  # NaN makes an empty row NaN, too
        p.mul_((of_keys / divisor).unsqueeze(-1))
    log_total = divisor.log().masked_fill(nothing, -torch.inf)
    statistics = largest, log_total + (highest - largest), log_total + highest
    return _cleared(p, excluded, limits), statistics


def _cleared(p: Tensor, excluded: Tensor | None, limits: Tensor | None) -> Tensor:
    """P, 0 where excluded, in rows of NaN, too; in place where limits are given."""
    if limits is not None:
        clear_(p, keep=limits)
        return p
    return p if excluded is None else p.masked_fill(excluded, 0)


def _scores(block: _Block, given: Any, compute: torch.dtype, in_place: bool) -> Tensor:
    """Products [b, h, m, n] of queries and keys, of excluded ones too; with a softcap their t."""
    products = _times(block.query.to(compute), block.key.to(compute).mT)
    if given.softcap == 0:
        return products
    scores = _scaled(products, given.scale / given.softcap, in_place)
    return scores.tanh_() if in_place else scores.tanh()


def _logits(block: _Block, scores: Tensor, given: Any, in_place: bool) -> Tensor:
    """z of these scores."""
    factor = given.scale if given.softcap == 0 else given.softcap
    if block.bias is None or scores.numel() == 0:
        return _scaled(scores, factor, in_place)
    bias, by_entry = _bias_of_pairs(block).unsqueeze(1), _by_entry(scores, block.bias)
    out = by_entry if in_place else None
    return torch.add(bias, by_entry, alpha=factor, out=out).flatten(0, 1).to(scores.dtype)


def _gradient_of_logits(dp: Tensor, d: Tensor, p: Tensor, in_place: bool) -> Tensor:
    """dz = P (dP - D), exactly 0 where P is; in place of dP."""
    if not in_place:
        return torch.where(p == 0, 0, p * (dp - d.unsqueeze(-1)))
    dz = dp.sub_(d.unsqueeze(-1)).mul_(p)
    clear_(dz, keep=p)  # 0 times what is not finite
    return dz


def _kept(block: _Block, given: Any) -> Tensor | None:
    """Bool [b, h, m, n], True = not dropped; None without dropout."""
    if given.dropout == 0:
        return None
    batches, heads, queries, _ = block.query.shape
    batch = torch.arange(block.first_batch, block.first_batch + batches, device=given.seed.device)
    head = torch.arange(block.first_head, block.first_head + heads, device=given.seed.device)
    number = batch.unsqueeze(-1) * given.query.shape[1] + head
    keys = block.key.shape[2]
    return kept(given.seed, given.dropout, number, block.first_query, queries, keys)


def _dropped(weights: Tensor, keep: Tensor | None, given: Any, in_place: bool) -> Tensor:
    if keep is None:
        return weights
    return (drop_ if in_place else dropped)(weights, keep, given.dropout)


def _scaled(tensor: Tensor, scale: float, in_place: bool) -> Tensor:
    return tensor.mul_(scale) if in_place else scale * tensor


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """[b, h, m, x] times [b, hk, x, y], which h // hk heads share: [b, h, m, y]."""
    return (_by_key_head(rows, matrices.shape[1]) @ matrices).reshape(
        *rows.shape[:-1], matrices.shape[-1]
    )


def _summed_times(weights: Tensor, rows: Tensor, heads: int) -> Tensor:
    """[b, h, m, n] and [b, h, m, x], multiplied over all queries of a key head: [b, hk, n, x]."""
    return _by_key_head(weights, heads).mT @ _by_key_head(rows, heads)


def _by_key_head(rows: Tensor, heads: int) -> Tensor:
    """The query heads that share a key head become further queries of it."""
    if rows.shape[1] == heads:
        return rows
    # einops infers no size beside one of 0, such as that of no key heads.
    groups = rows.shape[1] // max(heads, 1)
    pattern = "b (heads groups) m x -> b heads (groups m) x"
    return rearrange(rows, pattern, heads=heads, groups=groups)


def _mask_of_pairs(block: _Block) -> Tensor | None:
    """[b or 1, h or 1, m or 1, n or 1]."""
    if block.mask is None or block.mask_block == 1:
        return block.mask
    queries, keys = block.query.shape[2], block.key.shape[2]
    first, skipped = divmod(block.first_query, block.mask_block)
    rows = block.mask.narrow(2, first, -(-(skipped + queries) // block.mask_block))
    whole = mask_of_blocks(rows, block.mask_block, skipped + queries, keys)
    return whole.narrow(2, skipped, queries)


def mask_of_blocks(blocks: Tensor, size: int, queries: int, keys: int) -> Tensor:
    """[..., queries, keys] of [..., ceil(queries / size), ceil(keys / size)]."""
    rows = blocks.repeat_interleave(size, -2)[..., :queries, :]
    return rows.repeat_interleave(size, -1)[..., :keys]


def _by_entry(logits: Tensor, bias: Tensor) -> Tensor:
    """Logits [bb, b / bb, h, m, n], by the entry of the bias that batches share."""
    entries = bias.shape[0]
    batches, *others = logits.shape
    # Not unflatten, which the vmap of autograd lacks.
    return logits.view(entries, batches // max(entries, 1), *others)


def _bias_of_pairs(block: _Block) -> Tensor:
    """The bias of this block, [bb, h or 1, m or 1, n or 1]; from a table's entries if it is one."""
    assert block.bias is not None
    if block.bias.dim() == 4:
        return block.bias
    queries, keys = block.query.shape[2], block.key.shape[2]
    length = queries + keys - 1
    entries = block.bias.narrow(-1, _first_entry(queries, keys, block.diagonal), length)
    # Repeated, and cut into rows that are one entry longer, so that each begins one entry later.
    repeated = repeat(entries, "bb bh length -> bb bh (times length)", times=queries + 1)
    cut = repeated[..., : queries * (length + 1)]
    rows = rearrange(cut, "bb bh (rows length) -> bb bh rows length", rows=queries)
    return rows[..., :keys].flip(-2)


def _with_pairs(given: Any) -> Any:
    """With the entries of pairs in place of a table for each query."""
    if not given.relative or given.bias is None or given.bias.dim() == 3:
        return given
    pairs = shifted_rows(given.bias.flatten(2), given.query.shape[2], given.key.shape[2])
    return given._replace(bias=pairs, relative=False)


def shifted_rows(flat: Tensor, queries: int, keys: int) -> Tensor:
    """Entries [..., queries, keys] of a table whose last two dimensions are one."""
    if queries == 0:
        return flat.view(*flat.shape[:-1], 0, keys)
    if queries == 1:
        return flat[..., None, :keys]
    rows = flat[..., queries - 1 : -1]
    return rows.view(*rows.shape[:-1], queries, rows.shape[-1] // queries)[..., :keys]


def _gradient_of_rows(of_pairs: Tensor, table: Tensor) -> Tensor:
    """The gradient of a table for each query from that of pairs: rows become one entry longer."""
    queries, keys = of_pairs.shape[2:]
    distances = table.shape[-1]
    rows = torch.nn.functional.pad(of_pairs, (0, distances - 1 - keys)) if queries > 1 else of_pairs
    flat = rows.flatten(2)
    before, missing = max(queries - 1, 0), queries * distances - flat.shape[-1]
    return torch.nn.functional.pad(flat, (before, missing - before)).view(table.shape)


def _first_entry(queries: int, keys: int, diagonal: int) -> int:
    """The entry of a table for the last query and the first key."""
    return keys - diagonal - queries


def _gradient_of_bias(dz: Tensor, bias: Tensor, diagonal: int) -> Tensor:
    """The gradient of the bias, in its shape, from that of z, [b, h, m, n]."""
    by_entry = _by_entry(dz, bias)
    summed = by_entry.squeeze(1) if by_entry.shape[1] == 1 else by_entry.sum(1)
    if bias.dim() == 4:
        return summed.sum_to_size(bias.shape)
    summed = summed.sum_to_size(*bias.shape[:2], *summed.shape[2:])
    queries, keys = dz.shape[2:]
    if dz.numel() == 0:
        return dz.new_zeros(bias.shape)
    # The reverse of `_bias_of_pairs`: zeros after the keys, then rows that are one entry shorter.
    length = queries + keys - 1
    padded = torch.nn.functional.pad(summed.flip(-2), (0, queries))
    cut = rearrange(padded, "bb bh m n -> bb bh (m n)")[..., : queries * length]
    diagonals = reduce(cut, "bb bh (rows length) -> bb bh length", "sum", rows=queries)
    first = _first_entry(queries, keys, diagonal)
    return torch.nn.functional.pad(diagonals, (first, bias.shape[-1] - first - length))


ForwardArguments = arguments_of(attention_forward)
BackwardArguments = arguments_of(attention_backward)
