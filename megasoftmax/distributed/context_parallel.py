"""Attention over a sequence that is split: each rank of a process group has one part, or two.

Queries stay where they are; keys and values go round in a ring, from each rank to the next. What
the queries of one part make of the keys of another, a block, is an output and a log-sum-exp; these
are merged one after the other. The backward pass sends keys and values round once more, and their
gradients after them, to which every rank adds its share. There a rank takes its own keys last,
while the gradients of its keys are on their way home. Beside its own, a rank has the keys of two
ranks at a time.

With w = exp(lse of the block - lse) a block's own weights P are w times too large, and what its
backward pass takes, sum(dO O) - h for gradients dO and h of output and log-sum-exp, is linear in
these. So a block is given w dO, w h and the merged output, and returns its share of the gradients.

In zigzag order a rank has an early part a and a late part b of the sequence. Where nothing but
causality tells which pairs see each other, each rank is one block with each other rank: causal with
itself; all queries with part a of an earlier rank; the queries of b with all keys of a later one.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax import reference
from megasoftmax.autograd.function import Implementation, is_in_forward_mode
from megasoftmax.autograd.softmax import gradients_beside, wanted_beside
from megasoftmax.distributed.zigzag import parts_of_rank
from megasoftmax.reference.attention import ForwardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work


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

        What joins the denominator does so when all blocks are merged. A row whose logits are all
        -inf is 0: other blocks may have others of it.
        """
        rows, columns = self.of_tokens
        key, value = (each[:, :, columns] for each in keys)
        return reference.softmax.without_sink(given)._replace(
            query=given.query[:, :, rows],
            key=key,
            value=value,
            bias=self.of_pairs(given.bias, given.relative),
            mask=self.of_pairs(given.mask, False),
            window_left=self.window_left,
            window_right=self.window_right,
            first=self.of_queries(given.first),
            end=self.of_queries(given.end),
            seed=None if given.seed is None else given.seed + self.number,
        )


def _with_results(given: ForwardArguments, output: Tensor, statistics: Tensor) -> tuple[Any, ...]:
    """The arguments of `attention_backward` from the query on, but for what is asked for.

    A function, so that its caller holds no keys of one rank while those of the next arrive.
    """
    return *given[:3], output, statistics, *given[3:]


def _joins_parts(ring: Ring, given: ForwardArguments) -> bool:
    """Whether the two parts of a rank in zigzag order are computed as one."""
    of_pairs = given.bias, given.mask, given.first, given.end
    is_plain = given.dropout == 0 and all(each is None for each in of_pairs)
    return ring.zigzag and is_plain and given.window_left < 0 and given.window_right <= 0


def _blocks(ring: Ring, owner: int, given: ForwardArguments) -> list[_Block]:
    """Of the queries of this rank and the keys of another, all in which some see each other."""
    if _joins_parts(ring, given):
        return [_joined_block(ring, owner, given)]
    blocks = [
        _block(ring, of_queries, of_keys, given)
        for of_queries in ring.parts(ring.rank, given.query.shape[2])
        for of_keys in ring.parts(owner, ring.lengths[owner])
    ]
    return [block for block in blocks if block is not None]


def _joined_block(ring: Ring, owner: int, given: ForwardArguments) -> _Block:
    """Of both parts of this rank and both of another, as the beginning of this file says."""
    queries = given.query.shape[2]
    half, is_causal = queries // 2, given.window_right == 0
    is_earlier, is_later = is_causal and owner < ring.rank, is_causal and owner > ring.rank
    return _Block(
        first_query=half if is_later else 0,
        queries=half if is_later else queries,
        first_key=0,
        keys=half if is_earlier else queries,
        window_left=-1,
        window_right=0 if is_causal and owner == ring.rank else -1,
        # Of pairs there is nothing.
        key_position=0,
        first_entry=0,
        number=0,
    )


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


_TENSORS = reference.softmax.tensors_of(reference.attention.attention_forward)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *operands, implementation, ring = args
        given = ForwardArguments(*operands)
        query = given.query
        compute = reference.softmax.accumulation_dtype(query.dtype)
        merged = _Merged(query, given.value.shape[-1], compute)
        statistics = []  # of the blocks
        for owner, held in _round(ring, given.key, given.value):
            for block in _blocks(ring, owner, given):
                rows, _ = block.of_tokens
                of_block, found = implementation.forward(*block.of_operands(given, held))
                statistics.append(found)
                merged.add(rows, of_block, found[2])
        output, lse = merged.with_logit(
            reference.softmax.logit_beside(given, compute, query.device)
        )
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
        wants_bias, wants_rows = wanted = wanted_beside(given, needs)
        query, key, value, compute = given.query, given.key, given.value, lse.dtype
        if d_output is None:
            d_output = output.new_zeros(()).expand(output.shape)
        d_query = _Shares(query, compute)
        d_bias = torch.zeros_like(given.bias, dtype=compute) if wants_bias else None
        found = iter(statistics)

        def shares_of(owner: int, held: list[Tensor]) -> list[_Shares]:
            """Of the gradients of the keys and values of a rank; others are added up."""
            of_keys = [_Shares(each, compute) for each in held]
            for block, of_block in zip(_blocks(ring, owner, given), of_rank[owner], strict=True):
                rows, columns = block.of_tokens
                weights = torch.exp(of_block[2] - lse[:, :, rows])
                weights = weights.masked_fill(of_block[2] == -torch.inf, 0)
                d_output_of_rows = d_output[:, :, rows]
                weighted = torch.empty_like(d_output_of_rows, dtype=query.dtype)  # rounded once
                torch.mul(weights.unsqueeze(-1), d_output_of_rows, out=weighted)
                shares = implementation.backward(
                    weighted,
                    None if d_lse is None else weights * d_lse[:, :, rows],
                    *_with_results(block.of_operands(given, held), output[:, :, rows], of_block),
                    wants_bias,
                    False,
                    torch.are_deterministic_algorithms_enabled(),
                )
                d_query.add(rows, shares[0])
                if d_bias is not None:
                    block.of_pairs(d_bias, given.relative).add_(shares[3])
                for each, share in zip(of_keys, shares[1:3], strict=True):
                    each.add(columns, share)
            return of_keys

        of_rank = {
            owner: [next(found) for _ in _blocks(ring, owner, given)] for owner in _owners(ring)
        }
        # A share that is alone so far goes to the next rank as it is.
        ranks, has_one_block = len(ring.lengths), not ring.zigzag or _joins_parts(ring, given)
        coming = None
        for owner, held in _round(ring, key, value, own_last=True):
            sums = shares_of(owner, held)
            if coming is not None:
                _add_to(sums, coming.wait())
            if owner != ring.rank:
                is_rounded = has_one_block and owner == (ring.rank - 1) % ranks
                coming = _Exchange(ring, _contents(sums, is_rounded), owner)
        d_key, d_value = (each.rounded() for each in sums)
        d_rows = None
        if wants_rows:
            d = (d_output.to(compute) * output.to(compute)).sum(-1)
            d = d if d_lse is None else d - d_lse
            d_rows = reference.softmax.gradient_beside(given, lse, d)
        if d_bias is not None:
            d_bias = d_bias.to(given.bias.dtype)
        beside = gradients_beside(given, wanted, d_bias, d_rows)
        gradients = ForwardArguments(query=d_query.rounded(), key=d_key, value=d_value, **beside)
        return *gradients, None, None


class _Shares:
    """The sum of shares of a gradient, [..., rows, dim], each of some rows, rounded once.

    Args:
        like: the tensor whose gradient it is.
        dtype: of sums; that of shares is the tensor's. Two shares are added without such a sum.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._sum: Tensor | None = None
        self._second: tuple[slice, Tensor] | None = None  # not added yet

    def add(self, rows: slice, share: Tensor) -> None:
        if self._sum is None and share.shape == self._like.shape:
            self._sum = share
        elif self._sum is not None and self._second is None and self._sum.dtype != self._dtype:
            self._second = rows, share
        else:
            self.exact()[:, :, rows] += share

    def exact(self) -> Tensor:
        """In the type of sums."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._dtype)
        self._sum = self._sum.to(self._dtype)
        if self._second is not None:
            rows, share = self._second
            self._sum[:, :, rows] += share
            self._second = None
        return self._sum

    def rounded(self) -> Tensor:
        """In the type of the tensor."""
        if self._second is not None:
            assert self._sum is not None
            rows, share = self._second
            self._sum[:, :, rows] += share  # computed in float32
            self._second = None
        if self._sum is None:
            return torch.zeros_like(self._like)
        return self._sum.to(self._like.dtype)


# Functions, so that no name of a loop keeps a tensor of an earlier rank.
def _add_to(sums: list[_Shares], others: list[Tensor]) -> None:
    for each, other in zip(sums, others, strict=True):
        each.add(slice(None), other)


def _contents(sums: list[_Shares], is_rounded: bool) -> list[Tensor]:
    return [(each.rounded() if is_rounded else each.exact()).contiguous() for each in sums]


class _Merged:
    """Output and log-sum-exp of the blocks so far.

    Changed in place: `merge_attention`, which is differentiable, makes a dozen tensors of the size
    of the output. Two blocks, all that two ranks have, are merged without a sum in another type.
    """

    def __init__(self, query: Tensor, value_dim: int, dtype: torch.dtype) -> None:
        batches, heads, queries, _ = query.shape
        self._query, self._shape = query, (batches, queries, heads, value_dim)
        self._dtype = dtype  # of sums
        self._output: Tensor | None = None  # a sum, or what the first block of all queries has
        self._lse: Tensor | None = None
        self._second: tuple[slice, Tensor, Tensor] | None = None  # not merged yet

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """What attention of these queries over other keys returned."""
        if self._output is None and lse.shape == self._query.shape[:-1]:
            self._output, self._lse = output, lse.clone()  # it is kept for the backward pass
        elif self._second is None and self._output is not None and not self._has_sum():
            self._second = rows, output, lse
        else:
            self._to_sum()
            self._merge(rows, output, lse)

    def with_logit(self, logit: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of all blocks, and of a logit that joins the denominator; the output as the query."""
        if self._output is None or logit is not None:
            self._to_sum()
        if self._second is not None:
            self._merge(*self._second)
        assert self._output is not None
        assert self._lse is not None
        if logit is not None:
            self._lse, kept, _ = _weights(self._lse, logit.expand(self._lse.shape))
            self._output.mul_(kept)
        return self._output.to(self._query.dtype), self._lse

    def _has_sum(self) -> bool:
        return self._output is not None and self._output.dtype == self._dtype

    def _to_sum(self) -> None:
        if self._output is None:
            output = self._query.new_zeros(self._shape, dtype=self._dtype)
            self._output = output.transpose(1, 2)
            self._lse = output.new_full(self._query.shape[:-1], -torch.inf)
        self._output = self._output.to(self._dtype)
        if self._second is not None:
            self._merge(*self._second)
            self._second = None

    def _merge(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        assert self._output is not None
        assert self._lse is not None
        total, kept, share = _weights(self._lse[:, :, rows], lse)
        self._lse[:, :, rows] = total
        merged = self._output[:, :, rows]
        torch.addcmul(merged * kept, output, share, out=merged)


def _weights(lse: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp of both, and what the output of each counts: 0 where both are -inf."""
    total = torch.logaddexp(lse, other)
    base = total.masked_fill(total == -torch.inf, 0)
    kept, share = (torch.exp(each - base).unsqueeze(-1) for each in (lse, other))
    return total, kept, share


def _owners(ring: Ring) -> Iterator[int]:
    """The ranks whose keys come by, its own first."""
    ranks = len(ring.lengths)
    return ((ring.rank - step) % ranks for step in range(ranks))


def _round(
    ring: Ring, key: Tensor, value: Tensor, *, own_last: bool = False
) -> Iterator[tuple[int, list[Tensor]]]:
    """The keys and values of each rank, its own first or last; the next are on their way meanwhile.

    It is one list that changes: who names what is in it keeps that of a third rank.
    """
    own, *others = _owners(ring)
    held = [key.contiguous(), value.contiguous()]
    coming = _Exchange(ring, [*held], own) if others else None
    if own_last:
        kept = [*held]
    else:
        yield own, held
    for i, owner in enumerate(others):
        assert coming is not None
        held[:] = coming.wait()
        coming = _Exchange(ring, [*held], owner) if i + 1 < len(others) else None
        yield owner, held
    if own_last:
        yield own, kept


class _Exchange:
    """Tensors of some rank's keys, [b, hk, n, ...], on their way from each rank to the next.

    One collective for each tensor takes the host a third of the time of a batch of sends and
    receives.

    Args:
        sent: contiguous; not to be changed before `wait` returns.
        owner: the rank of whose keys they are.
    """

    def __init__(self, ring: Ring, sent: list[Tensor], owner: int) -> None:
        ranks, rank = len(ring.lengths), ring.rank
        length = ring.lengths[(owner - 1) % ranks]
        self.received = [each.new_empty((*each.shape[:2], length, each.shape[3])) for each in sent]
        self._sent = sent  # kept until it has been sent
        self._works: list[Work] = []
        for each, coming in zip(sent, self.received, strict=True):
            to, by = [0] * ranks, [0] * ranks
            to[(rank + 1) % ranks], by[(rank - 1) % ranks] = each.numel(), coming.numel()
            flat = coming.view(-1), each.view(-1)
            work = torch.distributed.all_to_all_single(
                *flat, by, to, group=ring.group, async_op=True
            )
            self._works.append(work)

    def wait(self) -> list[Tensor]:
        """What this rank received. On a GPU the stream waits, and not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self.received
