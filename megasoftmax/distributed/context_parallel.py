"""Attention over a sequence that is split: each rank of a process group has one part, or two.

Queries stay where they are; keys and values go round in a ring, from each rank to the next. What
the queries of one part make of the keys of another, a block, is an output and a log-sum-exp; these
are merged one after the other. The backward pass sends keys and values round once more, and their
gradients with them, to which every rank adds its share. Beside its own, a rank has the keys of two
ranks at a time.

With w = exp(lse of the block - lse) a block's own weights P are w times too large, and what its
backward pass takes, sum(dO O) - h for gradients dO and h of output and log-sum-exp, is linear in
these. So a block is given w dO, w h and the merged output, and returns its share of the gradients.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax import checks, reference
from megasoftmax.autograd.function import Implementation, is_in_forward_mode
from megasoftmax.distributed.zigzag import parts_of_rank
from megasoftmax.reference.attention import ForwardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


def merge_attention(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from that over parts of them.

        parts = [
            megasoftmax.attention(query, *part, return_lse=True)
            for part in zip(key.chunk(2, 2), value.chunk(2, 2))
        ]
        output, lse = megasoftmax.merge_attention(*zip(*parts))

    A part with nothing for a query, where its log-sum-exp is -inf, counts for nothing, whatever its
    output holds; a query for which no part has anything has output 0 and -inf again. If there is a
    sink, one part has it. Give the others a sink of -inf where all logits of a query can be -inf in
    a part, as when they overflow: by itself such a row is NaN, and so are its gradients.
    Plain torch, differentiable with respect to all.

    Args:
        outputs: of the parts, at least one, [..., queries, value_dim], floating, of one dtype
            and device.
        lses: their log-sum-exps, [..., queries], float32 or float64, of one dtype.

    Returns:
        The output in the dtype of the parts, added up in that of the log-sum-exps; and the
        log-sum-exp.

    Raises:
        TypeError: dtypes do not agree, or are others.
        ValueError: there are no parts, or shapes or devices do not agree.
    """
    _check_parts(outputs, lses)
    largest = reduce(torch.maximum, lses).detach()
    largest = largest.masked_fill(largest == -torch.inf, 0)
    weights = [torch.exp(lse - largest) for lse in lses]
    total = sum(weights[1:], weights[0])
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    shares = [
        # A clone and a product lie in memory as the output does.
        output.clone().masked_fill_((weight == 0).unsqueeze(-1), 0)  # may have been NaN
        * (weight / total).unsqueeze(-1)
        for weight, output in zip(weights, outputs, strict=True)
    ]
    lse = total.log().masked_fill(nothing, -torch.inf) + largest
    return sum(shares[1:], shares[0]).to(outputs[0].dtype), lse


def _check_parts(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    checks.check_tensors("outputs", outputs)
    checks.check_tensors("lses", lses)
    if len(outputs) != len(lses):
        raise ValueError(f"lses: expected one for each of {len(outputs)} outputs, got {len(lses)}")
    checks.check_device("lses[0]", lses[0], "outputs[0]", outputs[0])
    shape, dtype, lse_dtype = outputs[0].shape, outputs[0].dtype, lses[0].dtype
    for i, (output, lse) in enumerate(zip(outputs, lses, strict=True)):
        if dtype not in checks.FLOATING or output.dtype != dtype:
            expected = checks.FLOATING_NAMES if i == 0 else f"{dtype}, as outputs[0]"
            raise TypeError(f"outputs[{i}]: expected {expected}, got {output.dtype}")
        if lse.dtype not in (torch.float32, torch.float64) or lse.dtype != lse_dtype:
            expected = "float32 or float64" if i == 0 else f"{lse_dtype}, as lses[0]"
            raise TypeError(f"lses[{i}]: expected {expected}, got {lse.dtype}")
        if output.shape != shape:
            raise ValueError(
                f"outputs[{i}]: expected shape {tuple(shape)}, as outputs[0], "
                f"got {tuple(output.shape)}"
            )
        if lse.shape != shape[:-1]:
            raise ValueError(
                f"lses[{i}]: expected shape {tuple(shape[:-1])}, that of the outputs without the "
                f"last dimension, got {tuple(lse.shape)}"
            )


class _Part(NamedTuple):
    """Tokens of a rank, queries or keys, that follow each other in the sequence."""

    number: int  # among the parts of all ranks
    start: int  # the position of its first token in the sequence
    begin: int  # of its first token among those of the rank
    length: int


class Ring(NamedTuple):
    """Which tokens of the sequence each rank holds."""

    group: "ProcessGroup"
    lengths: tuple[int, ...]  # of the keys of each rank
    zigzag: bool  # a rank holds two parts, as `parts_of_rank` says; else one, in the order of ranks

    @property
    def rank(self) -> int:
        return self.group.rank()

    def parts(self, rank: int, tokens: int) -> list[_Part]:
        """Those of a rank, which has this number of queries or keys."""
        if not self.zigzag:
            return [_Part(rank, sum(self.lengths[:rank]), 0, tokens)]
        length = tokens // 2
        return [
            _Part(number, number * length, i * length, length)
            for i, number in enumerate(parts_of_rank(rank, len(self.lengths)))
        ]

    def number(self, of_queries: _Part, of_keys: _Part) -> int:
        """That of a block among all pairs of parts."""
        parts = len(self.lengths) * (2 if self.zigzag else 1)
        return of_queries.number * parts + of_keys.number


def attention(
    implementation: Implementation, ring: Ring, given: ForwardArguments
) -> tuple[Tensor, Tensor]:
    """Output [b, h, m, dv] and log-sum-exp [b, h, m] of this rank's queries and all keys.

    Differentiable once. All ranks must call it alike.

    Args:
        implementation: who computes a block.
        given: the arguments of `reference.attention.attention_forward`. Query, key and value are
            those of this rank; query i stands at key i. What joins them is for the keys of all
            ranks, and a table for all queries too. The seed is that of this rank: a block's own is
            as many more as its number among the pairs of parts, that of the queries first.
    """
    if is_in_forward_mode():
        raise NotImplementedError(
            "ring_attention: expected to be differentiated in reverse mode, got torch.func.jvp or "
            "a dual level; megasoftmax.attention has forward-mode derivatives"
        )
    total = sum(ring.lengths)
    # Nothing overflows when the first key of a block is subtracted.
    bounds = given.first, given.end
    first, end = (None if bound is None else bound.clamp(0, total) for bound in bounds)
    right = 0 if given.causal else given.window_right
    given = given._replace(first=first, end=end, causal=False, window_right=right)
    return _RingFunction.apply(*given, implementation, ring)


class _Block(NamedTuple):
    """The first queries of a part with the first keys of another: all that see each other.

    Where windows limit nothing, they are -1.
    """

    first_query: int  # among those of this rank
    queries: int
    first_key: int  # among those of the other rank
    keys: int
    window_left: int
    window_right: int
    key_position: int  # of the first key in the sequence
    first_entry: int  # in a table
    number: int  # among all pairs of parts

    @property
    def of_tokens(self) -> tuple[slice, slice]:
        """Its queries among those of this rank, its keys among those of the other."""
        return (
            slice(self.first_query, self.first_query + self.queries),
            slice(self.first_key, self.first_key + self.keys),
        )

    def of_pairs(self, tensor: Tensor | None, relative: bool) -> Any:
        """A view of the part of a mask, bias or table that belongs to the block."""
        if tensor is None:
            return None
        if relative:
            return tensor.narrow(-1, self.first_entry, self.queries + self.keys - 1)
        parts = ((-2, self.first_query, self.queries), (-1, self.key_position, self.keys))
        for dim, start, length in parts:
            tensor = tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, start, length)
        return tensor

    def of_queries(self, bound: Tensor | None) -> Tensor | None:
        """The part of `first` or `end` that belongs to the block, counted in its keys."""
        if bound is None:
            return None
        is_shared = bound.shape[-1] == 1
        part = bound if is_shared else bound.narrow(-1, self.first_query, self.queries)
        return part - self.key_position

    def of_operands(self, given: ForwardArguments, keys: Sequence[Tensor]) -> ForwardArguments:
        """The arguments of the block, from those of all blocks and the keys and values of a rank.

        The sink joins when all blocks are merged. One of -inf adds nothing, and makes 0 of a row
        whose logits are all -inf: other blocks may have others of it.
        """
        rows, columns = self.of_tokens
        key, value = (each[:, :, columns] for each in keys)
        return given._replace(
            query=given.query[:, :, rows],
            key=key,
            value=value,
            bias=self.of_pairs(given.bias, given.relative),
            mask=self.of_pairs(given.mask, False),
            window_left=self.window_left,
            window_right=self.window_right,
            sink=None,
            sink_value=-torch.inf,
            first=self.of_queries(given.first),
            end=self.of_queries(given.end),
            seed=None if given.seed is None else given.seed + self.number,
        )


def _with_results(given: ForwardArguments, output: Tensor, statistics: Tensor) -> tuple[Any, ...]:
    """The arguments of `attention_backward` from the query on, but for what is asked for.

    A function, so that its caller holds no keys of one rank while those of the next arrive.
    """
    return *given[:3], output, statistics, *given[3:]


def _blocks(ring: Ring, owner: int, given: ForwardArguments) -> list[_Block]:
    """Of the queries of this rank and the keys of another, all in which some see each other."""
    blocks = [
        _block(ring, of_queries, of_keys, given)
        for of_queries in ring.parts(ring.rank, given.query.shape[2])
        for of_keys in ring.parts(owner, ring.lengths[owner])
    ]
    return [block for block in blocks if block is not None]


def _block(ring: Ring, of_queries: _Part, of_keys: _Part, given: ForwardArguments) -> _Block | None:
    queries, keys = of_queries.length, of_keys.length
    diagonal = of_queries.start - of_keys.start  # query i stands at key i + diagonal
    left, right = given.window_left, given.window_right
    if right >= 0:
        keys = min(keys, queries + diagonal + right)
    if left >= 0:
        queries = min(queries, keys - diagonal + left)
    if keys <= 0 or queries <= 0:
        return None
    # Attention counts from the last query, which stands at the last key.
    surplus = diagonal - (keys - queries)
    left = -1 if left < 0 or left - surplus >= keys - 1 else left - surplus
    right = -1 if right < 0 or right + surplus >= queries - 1 else right + surplus
    return _Block(
        first_query=of_queries.begin,
        queries=queries,
        first_key=of_keys.begin,
        keys=keys,
        window_left=left,
        window_right=right,
        key_position=of_keys.start,
        first_entry=sum(ring.lengths) - diagonal - queries,
        number=ring.number(of_queries, of_keys),
    )


_DIFFERENTIABLE = ("query", "key", "value", "bias", "sink")
_TENSORS = (*_DIFFERENTIABLE, "mask", "first", "end", "seed")


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *operands, implementation, ring = args
        given = ForwardArguments(*operands)
        query, value = given.query, given.value
        batches, heads, queries, _ = query.shape
        compute = reference.softmax.accumulation_dtype(query.dtype)
        output = query.new_zeros((batches, queries, heads, value.shape[-1]), dtype=compute)
        output = output.transpose(1, 2)
        lse = query.new_full(query.shape[:-1], -torch.inf, dtype=compute)
        statistics = []  # of the blocks
        for owner, held in _round(ring, given.key, value):
            for block in _blocks(ring, owner, given):
                rows, _ = block.of_tokens
                of_block, found = implementation.forward(*block.of_operands(given, held))
                statistics.append(found)
                output[:, :, rows], lse[:, :, rows] = merge_attention(
                    (output[:, :, rows], of_block.to(compute)), (lse[:, :, rows], found[2])
                )
        logit = reference.softmax.sink_logit(given.sink, given.sink_value, compute, query.device)
        if logit is not None:
            nothing = output.new_zeros(()).expand(output.shape)
            output, lse = merge_attention((output, nothing), (lse, logit.expand(lse.shape)))
        output = output.to(query.dtype)
        ctx.set_materialize_grads(False)
        tensors = {name: getattr(given, name) for name in _TENSORS}
        ctx.save_for_backward(*tensors.values(), output, lse, *statistics)
        ctx.given = given._replace(**dict.fromkeys(tensors)), implementation, ring
        return output, lse

    @staticmethod
    def backward(
        ctx: Any, d_output: Tensor | None, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ring_attention: expected to be differentiated once, got create_graph=True"
            )
        given, implementation, ring = ctx.given
        tensors = ctx.saved_tensors[: len(_TENSORS)]
        output, lse, *statistics = ctx.saved_tensors[len(_TENSORS) :]
        given = given._replace(**dict(zip(_TENSORS, tensors, strict=True)))
        needs = ForwardArguments(*ctx.needs_input_grad[: len(given)])
        query, key, value, bias, sink = (getattr(given, name) for name in _DIFFERENTIABLE)
        compute = lse.dtype
        if d_output is None:
            d_output = output.new_zeros(()).expand(output.shape)
        wants_bias = bias is not None and needs.bias
        d_query = torch.zeros_like(query, dtype=compute)
        d_bias = torch.zeros_like(bias, dtype=compute) if wants_bias else None
        sums = [each.new_zeros(each.shape, dtype=compute) for each in (key, value)]
        found = iter(statistics)
        coming = None
        for owner, held in _round(ring, key, value):
            shares_of_keys = []  # added when the sums have arrived
            for block in _blocks(ring, owner, given):
                of_block = next(found)
                rows, columns = block.of_tokens
                weights = torch.exp(of_block[2] - lse[:, :, rows])
                weights = weights.masked_fill(of_block[2] == -torch.inf, 0)
                shares = implementation.backward(
                    (weights.unsqueeze(-1) * d_output[:, :, rows]).to(query.dtype),
                    None if d_lse is None else weights * d_lse[:, :, rows],
                    *_with_results(block.of_operands(given, held), output[:, :, rows], of_block),
                    wants_bias,
                    False,
                    torch.are_deterministic_algorithms_enabled(),
                )
                d_query[:, :, rows] += shares[0]
                if d_bias is not None:
                    block.of_pairs(d_bias, given.relative).add_(shares[3])
                shares_of_keys.append((columns, shares[1:3]))
            if coming is not None:
                sums = coming.wait()
            for columns, of_keys in shares_of_keys:
                for each, share in zip(sums, of_keys, strict=True):
                    each[:, :, columns] += share
            coming = _Exchange(ring, sums, owner)
        assert coming is not None
        d_key, d_value = coming.wait()
        d_sink = None
        if sink is not None and needs.sink:
            d = (d_output.to(compute) * output.to(compute)).sum(-1)
            d = d if d_lse is None else d - d_lse
            d_rows = reference.softmax.sink_gradient_of_rows(sink, given.sink_value, lse, d)
            d_sink = reference.softmax.sum_over_rows(d_rows, sink)
        gradients = ForwardArguments(
            query=d_query.to(query.dtype),
            key=d_key.to(key.dtype),
            value=d_value.to(value.dtype),
            bias=None if d_bias is None else d_bias.to(bias.dtype),
            sink=d_sink,
        )
        return *gradients, None, None


def _round(ring: Ring, key: Tensor, value: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """The keys and values of each rank, its own first; the next are on their way meanwhile.

    It is one list that changes: who names what is in it keeps that of a third rank.
    """
    ranks = len(ring.lengths)
    held = [key.contiguous(), value.contiguous()]
    for step in range(ranks):
        owner = (ring.rank - step) % ranks
        coming = _Exchange(ring, [*held], owner) if step + 1 < ranks else None
        yield owner, held
        if coming is not None:
            held[:] = coming.wait()


class _Exchange:
    """Tensors of some rank's keys, [b, hk, n, ...], on their way from each rank to the next.

    What is empty is neither sent nor received: both ends know all lengths. In each round every rank
    sends or receives something, unless no rank has keys: NCCL begins when all ranks of a group have
    called it.

    Args:
        sent: contiguous; not to be changed before `wait` returns.
        owner: the rank of whose keys they are.
    """

    def __init__(self, ring: Ring, sent: list[Tensor], owner: int) -> None:
        distributed = torch.distributed
        ranks = len(ring.lengths)
        length = ring.lengths[(owner - 1) % ranks]
        self.received = [each.new_empty((*each.shape[:2], length, each.shape[3])) for each in sent]
        self.works: list[Work] = []
        if ranks == 1:
            self.received = sent
            return
        ends = ((distributed.isend, sent, 1), (distributed.irecv, self.received, -1))
        operations = [
            distributed.P2POp(
                operation,
                tensor,
                distributed.get_global_rank(ring.group, (ring.rank + step) % ranks),
                ring.group,
            )
            for operation, tensors, step in ends
            for tensor in tensors
            if tensor.numel() > 0
        ]
        if operations:
            self.works = distributed.batch_isend_irecv(operations)
        self.sent = sent  # kept until it has been sent

    def wait(self) -> list[Tensor]:
        """What this rank received."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], []
        return self.received
