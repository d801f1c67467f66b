"""softmax_topk of logits whose last dimension is sharded over the ranks of a process group.

Each rank selects K candidates of its shard; all of them, with the shard's maximum and log of the
sum, go to every rank in one all-gather of 2 + 2K numbers per row, of the size of the accumulation
type; every rank merges them alike. The length of a shard travels with them, so that nothing is
read on the host. The backward pass needs no communication.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax import autograd, reference
from megasoftmax.autograd.function import Implementation, is_in_forward_mode
from megasoftmax.reference.topk import ForwardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# For the bits of numbers of an accumulation type
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}

# Limits are of whole rows, not of shards.
_NO_LIMITS = {
    "top_k": 0,
    "row_top_k": None,
    "top_p": 1.0,
    "row_top_p": None,
    "min_p": 0.0,
    "row_min_p": None,
}


def softmax_topk(
    implementation: Implementation, group: "ProcessGroup", given: ForwardArguments
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [..., K], indices [..., K] and statistics [3, ...], the same on every rank.

    Differentiable once. All ranks must call it, with the same rows, options and kinds of arguments.

    Args:
        implementation: who computes what is local.
        group: its ranks hold the shards in the order of their numbers.
        given: the arguments of `reference.topk.softmax_topk_forward`, of this rank's shard. What k
            exceeds the vocabulary by gets probability 0 and index V.
    """
    if is_in_forward_mode():
        raise NotImplementedError("group: expected None for a forward-mode derivative, got a group")
    return _ShardedTopk.apply(*given, implementation, group)


class _Candidates(NamedTuple):
    """Of all shards, [rows, shards * K], in the order of their indices."""

    y: Tensor  # what is compared: z = factor * y
    indices: Tensor  # in the whole vocabulary
    excluded: Tensor


class _ShardedTopk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        *operands, implementation, group = args
        given = ForwardArguments(*operands)
        logits, k, mask, bias = given.logits, given.k, given.mask, given.bias
        rows = logits.shape[:-1]
        mine, factor, statistics = _select(implementation, given)
        gathered = _gather(mine, statistics, logits.shape[-1], k, group)
        candidates, statistics, offsets = _unpack(gathered, k, statistics.dtype, factor)

        best = reference.topk.select(candidates.y, k)
        y, indices, excluded = (part.gather(-1, best) for part in candidates)
        maximum, log_sum, _ = statistics.double().unsqueeze(-1)
        weights = (y.double() - maximum) * reference.topk.rounded(factor, y.dtype, y.device)
        of_rows: list[Any] = [
            each.expand(rows).reshape(-1) if isinstance(each, Tensor) else each
            for each in (getattr(given, name) for name in _NO_LIMITS)
        ]
        kept = reference.topk.Limits.of(*of_rows).applied(weights.exp(), log_sum.squeeze(-1).exp())
        if given.renormalize:
            p = kept / kept.sum(-1, keepdim=True)
        else:
            p = (weights - log_sum).exp().masked_fill(kept == 0, 0)
        if mask is not None or bias is not None:
            p = p.masked_fill(maximum == -torch.inf, 0)
        p = p.masked_fill(excluded, 0).to(given.dtype).reshape(*rows, k)
        indices, statistics = indices.reshape(p.shape), statistics.reshape(3, *rows)

        local = indices - offsets[torch.distributed.get_rank(group)]
        autograd.topk.save_for_gradients(ctx, given, (p, local, statistics))
        ctx.implementation = implementation
        ctx.mark_non_differentiable(indices)
        return p, indices, statistics

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, _: None, statistics_gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = autograd.topk.gradients(
                ctx.implementation, ctx, gradient, None, statistics_gradient
            )
        if torch.is_grad_enabled():
            _, _, _, logits, _, bias, _ = ctx.saved_tensors
            sources = gradient, statistics_gradient, logits, bias
            d_logits, d_bias = _Final.apply(found.logits, found.bias, *sources)
            found = found._replace(logits=d_logits, bias=d_bias)
        return *found, None, None


class _Final(torch.autograd.Function):
    """Gradients that refuse to be differentiated with respect to what they come from.

    `once_differentiable` of torch would let torch.autograd.grad overlook them.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else each.view_as(each) for each in tensors[:2])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> None:
        raise NotImplementedError("group: expected None for a second derivative, got a group")


def _select(
    implementation: Implementation, given: ForwardArguments
) -> tuple[_Candidates, float | Tensor, Tensor]:
    """At most K candidates of this shard with local indices, the factor of y, statistics.

    The factor is a number, or [rows, 1].
    """
    logits, mask = given.logits, given.mask
    compute = reference.softmax.accumulation_dtype(logits.dtype)
    k = min(given.k, logits.shape[-1])
    of_shard = given._replace(k=k, renormalize=False, dtype=compute, candidates=True, **_NO_LIMITS)
    y, indices, statistics = implementation.forward(*of_shard)
    excluded = torch.zeros_like(indices, dtype=torch.bool)
    if mask is not None:
        excluded = mask.expand(logits.shape).gather(-1, indices)
    factor: float | Tensor = 1.0
    rows = statistics[0].numel()
    if given.bias is None and reference.softmax.is_linear(given):
        # Before the scale can round two of them to one.
        selected = given._replace(logits=logits.gather(-1, indices), mask=excluded)
        y, factor = reference.topk.comparable(selected)
        if isinstance(factor, Tensor):
            factor = factor.expand(*logits.shape[:-1], 1).reshape(rows, 1)
    candidates = (part.reshape(rows, k) for part in (y, indices, excluded))
    return _Candidates(*candidates), factor, statistics


def _gather(
    mine: _Candidates, statistics: Tensor, columns: int, k: int, group: "ProcessGroup"
) -> Tensor:
    """[shards, 1 + rows * (2 + 2K)] integers; an index is inverted where the entry is excluded."""
    integer = _INTEGERS[statistics.dtype]
    missing = (0, k - mine.y.shape[-1])
    y = torch.nn.functional.pad(mine.y, missing, value=-torch.inf)
    codes = torch.where(mine.excluded, ~mine.indices, mine.indices).to(integer)
    numbers = torch.cat(
        [
            torch.full((1,), columns, dtype=integer, device=y.device),
            statistics[:2].reshape(-1).view(integer),
            y.reshape(-1).view(integer),
            torch.nn.functional.pad(codes, missing).reshape(-1),
        ]
    )
    shards = torch.distributed.get_world_size(group)
    gathered = numbers.new_empty(shards * len(numbers))
    distributed = torch.distributed
    is_new = hasattr(distributed, "all_gather_single")  # since torch 2.13
    gather = distributed.all_gather_single if is_new else distributed.all_gather_into_tensor
    gather(gathered, numbers, group=group)
    return gathered.view(shards, -1)


def _unpack(
    gathered: Tensor, k: int, compute: torch.dtype, factor: float | Tensor
) -> tuple[_Candidates, Tensor, Tensor]:
    """All candidates, the statistics [3, rows] of whole rows, and where each shard begins."""
    shards = len(gathered)
    rows = (gathered.shape[1] - 1) // (2 + 2 * k)
    sizes, numbers, y, codes = gathered.split([1, 2 * rows, rows * k, rows * k], 1)
    sizes = sizes.long()
    offsets = sizes.cumsum(0) - sizes

    maxima, log_sums = numbers.contiguous().view(compute).double().view(shards, 2, rows).unbind(1)
    maximum = maxima.amax(0)
    to_z = reference.topk.of_rows(reference.topk.rounded(factor, compute, maxima.device))
    log_sum = ((maxima - maximum) * to_z + log_sums).exp().sum(0).log()
    statistics = torch.stack([maximum, log_sum, maximum * to_z + log_sum])
    statistics = statistics.masked_fill(maximum == -torch.inf, -torch.inf).to(compute)

    codes = codes.long().view(shards, rows, k)
    # A shard shorter than K has nothing in its last places, which come after all that there is.
    missing = torch.arange(k, device=sizes.device) >= sizes.unsqueeze(-1)
    inside = offsets.unsqueeze(-1) + torch.where(codes < 0, ~codes, codes)
    indices = torch.where(missing, sizes.sum(), inside)
    parts = (y.contiguous().view(compute).view(codes.shape), indices, (codes < 0) | missing)
    flat = [part.movedim(0, 1).reshape(rows, shards * k) for part in parts]
    order = flat[1].argsort(stable=True, dim=-1)
    candidates = _Candidates(*(part.gather(-1, order) for part in flat))
    return candidates, statistics, offsets.squeeze(-1)
