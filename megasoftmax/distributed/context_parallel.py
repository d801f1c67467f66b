"""Attention over a sequence that is split: each rank of a process group has one part, or two.

Queries stay where they are; keys and values go round in a ring, from each rank to the next. What
the queries of one part make of the keys of another, a block, is an output and statistics; these are
merged one after the other. The backward pass takes the merged ones for each block, sends keys and
values round once more, and their gradients after them, to which every rank adds its share. Beside
its own, a rank has the keys of two ranks at a time.

Where there is much to compute, the heads of keys are cut into pieces, which go round one after the
other: a rank then holds less at a time. It takes its own keys of a piece first, while others come.
Backward it takes those of the last of several pieces last, while gradients of its keys come home.

In zigzag order a rank has an early part a and a late part b of the sequence. Where nothing but
causality tells which pairs see each other, each rank is one block with each other rank: causal with
itself; all queries with part a of an earlier rank; the queries of b with all keys of a later one.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megasoftmax import ops, reference
from megasoftmax.autograd.function import Implementation, is_in_forward_mode
from megasoftmax.autograd.softmax import gradients_beside, wanted_beside
from megasoftmax.distributed.zigzag import parts_of_rank
from megasoftmax.reference.attention import ForwardArguments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

MOST_PIECES = 8
# The fewest operations of a block of a piece: a millisecond of a GPU. Below, the host decides.
FEWEST_OPERATIONS = 6e11


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


def _of_all(found: tuple[Tensor, Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """Room for output and statistics of all heads, from those of some."""
    output, statistics = found
    return (
        _new_output(query, output.shape[-1], output.dtype),
        statistics.new_empty((3, *query.shape[:-1])),
    )


def _new_output(query: Tensor, value_dim: int, dtype: torch.dtype) -> Tensor:
    """In memory [b, m, h, dv]. No view, which autograd would forbid to change in place."""
    batches, heads, queries, _ = query.shape
    strides = (queries * heads * value_dim, value_dim, heads * value_dim, 1)
    return query.new_empty_strided((batches, heads, queries, value_dim), strides, dtype=dtype)


def _pieces(ring: Ring, given: ForwardArguments) -> list[slice]:
    """The heads of keys that go round together; the same on all ranks.

    With dropout all do: what is dropped depends on the number of a head.
    """
    batches, heads, _, dim = given.query.shape
    key_heads, ranks = given.key.shape[1], len(ring.lengths)
    tokens = sum(ring.lengths) / ranks  # of a rank, which all know
    seen = tokens
    if min(given.window_left, given.window_right) >= 0:
        seen = min(tokens, given.window_left + given.window_right + 1)
    operations = 2 * tokens * seen * batches * heads * (dim + given.value.shape[-1])
    pieces = MOST_PIECES if ranks > 1 and given.dropout == 0 else 1
    while pieces > 1 and (key_heads % pieces or operations < pieces * FEWEST_OPERATIONS):
        pieces -= 1
    size = key_heads // pieces
    return [slice(i * size, (i + 1) * size) for i in range(pieces)]


class _Heads(NamedTuple):
    """The heads of queries that read a piece of the heads of keys."""

    of_keys: slice
    sharing: int  # heads of queries for each

    @property
    def of_queries(self) -> slice:
        return slice(self.of_keys.start * self.sharing, self.of_keys.stop * self.sharing)

    def of(self, tensor: Tensor | None) -> Any:
        """Of a tensor [b, h, ...] or [b, 1, ...]."""
        if tensor is None or tensor.shape[1] == 1:
            return tensor
        return tensor[:, self.of_queries]

    def of_arguments(self, given: ForwardArguments) -> ForwardArguments:
        if self.of_keys == slice(0, given.key.shape[1]):
            return given
        return reference.softmax.of_heads(given, self.of_queries)._replace(
            query=given.query[:, self.of_queries],
            key=given.key[:, self.of_keys],
            value=given.value[:, self.of_keys],
            **{name: self.of(getattr(given, name)) for name in ("bias", "mask", "first", "end")},
        )


def _all_heads(ring: Ring, given: ForwardArguments) -> list[_Heads]:
    sharing = given.query.shape[1] // max(given.key.shape[1], 1)
    return [_Heads(piece, sharing) for piece in _pieces(ring, given)]


_TENSORS = reference.softmax.tensors_of(reference.attention.attention_forward)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *operands, implementation, ring = args
        given = ForwardArguments(*operands)
        compute = reference.softmax.accumulation_dtype(given.query.dtype)
        every = _all_heads(ring, given)
        parts = [heads.of_arguments(given) for heads in every]
        last = (ring.rank + 1) % len(ring.lengths)
        for piece, owner, held in _tour(ring, parts):
            part, heads = parts[piece], every[piece].of_queries
            if owner == ring.rank:
                merged = _Merged(part, compute, implementation)
            for block in _blocks(ring, owner, given):
                rows, _ = block.of_tokens
                merged.add(rows, *implementation.forward(*block.of_operands(part, held)))
            if owner == last:
                found = merged.finish()
                if piece == 0:
                    output, statistics = found if len(parts) == 1 else _of_all(found, given.query)
                if len(parts) > 1:
                    output[:, heads], statistics[:, :, heads] = found
        ctx.set_materialize_grads(False)
        tensors = {name: getattr(given, name) for name in _TENSORS}
        ctx.save_for_backward(*tensors.values(), output, statistics)
        ctx.given = given._replace(**dict.fromkeys(tensors)), implementation, ring
        return output, statistics[2].clone()

    @staticmethod
    def backward(
        ctx: Any, d_output: Tensor | None, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "ring_attention: expected to be differentiated once, got create_graph=True"
            )
        given, implementation, ring = ctx.given
        *tensors, output, statistics = ctx.saved_tensors
        given = given._replace(**dict(zip(_TENSORS, tensors, strict=True)))
        needs = ForwardArguments(*ctx.needs_input_grad[: len(given)])
        wants_bias, wants_rows = wanted = wanted_beside(given, needs)
        compute = statistics.dtype
        if d_output is None:
            d_output = output.new_zeros(()).expand(output.shape)
        d_bias = torch.zeros_like(given.bias, dtype=compute) if wants_bias else None
        every = _all_heads(ring, given)
        parts = [heads.of_arguments(given) for heads in every]
        gradients = [_Gradient(each, compute, len(parts)) for each in given[:3]]
        d_query = [gradients[0].shares(heads.of_queries) for heads in every]
        own = [[each.shares(heads.of_keys) for each in gradients[1:]] for heads in every]

        def add_shares(piece: int, owner: int, held: list[Tensor], of_keys: list[_Shares]) -> None:
            """Of the gradients of the keys and values of a rank, and of what is of this rank."""
            heads, part = every[piece], parts[piece]
            for block in _blocks(ring, owner, given):
                rows, columns = block.of_tokens
                place = (..., heads.of_queries, rows)
                of_rows = (*place, slice(None))
                shares = _backward_of_block(
                    implementation,
                    d_output[of_rows],
                    None if d_lse is None else d_lse[place].contiguous(),
                    block.of_operands(part, held),
                    output[of_rows],
                    statistics[place].contiguous(),
                    wants_bias,
                )
                d_query[piece].add(rows, shares[0])
                if d_bias is not None:
                    of_pairs = block.of_pairs(heads.of(d_bias), given.relative)
                    of_pairs.add_(shares[3])
                for each, share in zip(of_keys, shares[1:3], strict=True):
                    each.add(columns, share)

        ranks, has_one_block = len(ring.lengths), not ring.zigzag or _joins_parts(ring, given)
        coming: _Exchange | None = None

        def finish(piece: int) -> None:
            if coming is not None:
                _add_to(own[piece], coming.wait())
            for each in (d_query[piece], *own[piece]):
                each.finish()

        before = 0
        for piece, owner, held in _tour(ring, parts, own_last=len(parts) > 1):
            if owner == ring.rank:
                add_shares(piece, owner, held, own[piece])
                continue
            if piece != before:
                finish(before)
                coming, before = None, piece
            sums = [_Shares(each, compute) for each in held]
            add_shares(piece, owner, held, sums)
            if coming is not None:
                _add_to(sums, coming.wait())
            # A share that is alone so far goes to the next rank as it is.
            is_rounded = has_one_block and owner == (ring.rank - 1) % ranks
            contents = [each.rounded() if is_rounded else each.exact() for each in sums]
            coming = _Exchange(ring, contents, owner, len(parts) == 1)
            del contents
        finish(before)
        d_rows = None
        if wants_rows:
            d = (d_output.to(compute) * output.to(compute)).sum(-1)
            d = d if d_lse is None else d - d_lse
            d_rows = reference.softmax.gradient_beside(given, statistics[2], d)
        if d_bias is not None:
            d_bias = d_bias.to(given.bias.dtype)
        beside = gradients_beside(given, wanted, d_bias, d_rows)
        names = ("query", "key", "value")
        of_tokens = {name: each.whole for name, each in zip(names, gradients, strict=True)}
        return *ForwardArguments(**of_tokens, **beside), None, None


def _backward_of_block(
    implementation: Implementation,
    d_output: Tensor,
    d_lse: Tensor | None,
    given: ForwardArguments,
    output: Tensor,
    statistics: Tensor,
    wants_bias: bool,
) -> tuple[Tensor, ...]:
    """What `attention_backward` returns for a block, from output and statistics of all keys.

    Most kernels read these alone, and compute the block's part of all weights. What else they take
    from a row holds for whole rows: for few keys no output is read, and the gradient of a
    bias with an entry for each query is that of the log-sum-exp. Such a block, and any in plain
    torch, is computed anew, and gets the gradients of its own output and log-sum-exp: w dO and
    w (h + sum(dO (O of the block - O))), with w = exp(lse of the block - lse).
    """
    query, keys, bias = given.query, given.key.shape[2], given.bias
    has_kernels = query.is_cuda and implementation is ops.attention.IMPLEMENTATION
    is_of_queries = bias is not None and bias.shape[-1] == 1
    if (
        not has_kernels
        or keys <= ops.attention.most_keys_without_output()
        or (wants_bias and is_of_queries)
    ):
        of_block, found = implementation.forward(*given)
        nothing = found[2] == -torch.inf
        weights = torch.exp(found[2] - statistics[2]).masked_fill(nothing, 0)
        exact = d_output.to(weights.dtype)
        of_lse = (exact * (of_block.to(exact.dtype) - output.to(exact.dtype))).sum(-1)
        d_lse = weights * (of_lse if d_lse is None else d_lse + of_lse)
        d_lse.masked_fill_(nothing, 0)
        d_output = (weights.unsqueeze(-1) * exact).to(query.dtype)
        output, statistics = of_block, found
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    gradients: tuple[Tensor, ...] = implementation.backward(
        *(d_output, d_lse, *given[:3], output, statistics, *given[3:]),
        *(wants_bias, False, is_deterministic),
    )
    return gradients


class _Gradient:
    """The gradient of a tensor, which pieces of heads make."""

    def __init__(self, like: Tensor, dtype: torch.dtype, pieces: int) -> None:
        self._like, self._dtype = like, dtype
        self._whole = torch.empty_like(like) if pieces > 1 else None
        self._shares: list[_Shares] = []

    def shares(self, heads: slice) -> "_Shares":
        """What adds up the gradient of some heads."""
        into = None if self._whole is None else self._whole[:, heads]
        self._shares.append(_Shares(self._like[:, heads], self._dtype, into))
        return self._shares[-1]

    @property
    def whole(self) -> Tensor:
        """Once all have finished."""
        return self._shares[0].rounded() if self._whole is None else self._whole


class _Shares:
    """The sum of shares of a gradient, [..., rows, dim], each of some rows, rounded once.

    Args:
        like: the tensor whose gradient it is.
        dtype: of sums; that of shares is the tensor's. Two shares are added without such a sum.
        into: `finish` copies the sum there and frees it; None: it stays here.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, into: Tensor | None = None) -> None:
        self._like, self._dtype, self._into = like, dtype, into
        self._sum: Tensor | None = None
        self._second: tuple[slice, Tensor] | None = None  # not added yet

    def add(self, rows: slice, share: Tensor) -> None:
        if self._sum is None:
            is_whole = share.shape == self._like.shape
            self._sum = share if is_whole else torch.zeros_like(self._like)
            if not is_whole:
                self._sum[:, :, rows] = share
        elif self._second is None and self._sum.dtype != self._dtype:
            self._second = rows, share
        else:
            self.exact()[:, :, rows] += share

    def exact(self) -> Tensor:
        """In the type of sums."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self._dtype)
        self._sum = self._sum.to(self._dtype)
        self._add_second()
        return self._sum

    def rounded(self) -> Tensor:
        """In the type of the tensor."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        self._add_second()  # computed in float32
        return self._sum.to(self._like.dtype)

    def _add_second(self) -> None:
        if self._second is not None:
            assert self._sum is not None
            rows, share = self._second
            self._sum[:, :, rows] += share
            self._second = None

    def finish(self) -> None:
        """Nothing is added any more."""
        if self._into is not None:
            self._into.copy_(self.rounded())
            self._sum = None


# A function, so that no name of a loop keeps a tensor of an earlier rank.
def _add_to(sums: list[_Shares], others: list[Tensor]) -> None:
    for each, other in zip(sums, others, strict=True):
        each.add(slice(None), other)


class _Merged:
    """Output and statistics of the blocks so far, of the heads of a piece.

    Changed in place: `merge_attention`, which is differentiable, makes a dozen tensors of the size
    of the output. Two blocks, all that two ranks have, are merged without a sum in another type.
    """

    def __init__(
        self, given: ForwardArguments, dtype: torch.dtype, implementation: Implementation
    ) -> None:
        self._given, self._dtype = given, dtype  # of sums
        has_kernels = implementation is ops.attention.IMPLEMENTATION
        self._merge_into = ops.attention.merge if has_kernels else reference.attention.merge
        # Sums, or what the first block of all queries has.
        self._found: tuple[Tensor, Tensor] | None = None
        self._second: tuple[slice, Tensor, Tensor] | None = None  # not merged yet

    def add(self, rows: slice, output: Tensor, statistics: Tensor) -> None:
        """What attention of these queries over other keys returned."""
        if self._found is None and output.shape[2] == self._given.query.shape[2]:
            self._found = output, statistics
        elif self._second is None and self._found and self._found[0].dtype != self._dtype:
            self._second = rows, output, statistics
        else:
            self._to_sum()
            self._merge(rows, output, statistics)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Of all blocks, and of what joins them; the output in the type of the query."""
        query = self._given.query
        logit = reference.softmax.logit_beside(self._given, self._dtype, query.device)
        if self._found is None or logit is not None:
            self._to_sum()
        if self._second is not None:
            self._merge(*self._second)
        assert self._found is not None
        output, statistics = self._found
        if logit is not None:
            largest, log_sum, _ = statistics
            total = torch.logaddexp(log_sum, logit - largest)
            base = total.masked_fill(total == -torch.inf, 0)
            output.mul_(torch.exp(log_sum - base).unsqueeze(-1))
            statistics = torch.stack((largest, total, largest + total))
        return output.to(query.dtype), statistics

    def _to_sum(self) -> None:
        if self._found is None:
            value_dim = self._given.value.shape[-1]
            output = _new_output(self._given.query, value_dim, self._dtype).zero_()
            statistics = output.new_full((3, *output.shape[:-1]), -torch.inf)
            statistics[0] = 0
            self._found = output, statistics
        self._found = self._found[0].to(self._dtype), self._found[1]
        if self._second is not None:
            self._merge(*self._second)
            self._second = None

    def _merge(self, rows: slice, output: Tensor, statistics: Tensor) -> None:
        assert self._found is not None
        into = self._found[0][:, :, rows], self._found[1][..., rows]
        self._merge_into(*into, output, statistics)


def _tour(
    ring: Ring, parts: list[ForwardArguments], *, own_last: bool = False
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """The keys and values of each rank, piece after piece; the next are on their way meanwhile.

    Args:
        parts: the arguments of each piece.
        own_last: its own keys of the last piece come last; all others come first in their piece.

    Yields:
        The number of the piece, the rank, and keys and values. The latter are one list for all
        other ranks, which changes: who names what is in it keeps that of a third rank.
    """
    ranks = len(ring.lengths)
    own, *others = ((ring.rank - step) % ranks for step in range(ranks))
    pieces = [[part.key, part.value] for part in parts]
    as_one = len(pieces) == 1
    coming = _Exchange(ring, pieces[0], own, as_one) if others else None
    held: list[Tensor] = []
    for piece, of_piece in enumerate(pieces):
        is_last = own_last and piece + 1 == len(pieces)
        if not is_last:
            yield piece, own, of_piece
        for owner in others:
            assert coming is not None
            held[:] = coming.wait()
            coming = None
            if owner != others[-1]:
                coming = _Exchange(ring, [*held], owner, as_one)
            elif piece + 1 < len(pieces):
                coming = _Exchange(ring, pieces[piece + 1], own, as_one)
            yield piece, owner, held
        if is_last:
            yield piece, own, of_piece


class _Exchange:
    """Tensors of some rank's keys, [b, hk, n, ...], on their way from each rank to the next.

    One collective for each tensor takes the host a third of the time of a batch of sends and
    receives.

    Args:
        sent: of one dtype; not to be changed before `wait` returns.
        owner: the rank of whose keys they are.
        as_one: whether they are copied to one, which takes the host half of the time.
    """

    def __init__(self, ring: Ring, sent: list[Tensor], owner: int, as_one: bool) -> None:
        ranks, rank = len(ring.lengths), ring.rank
        length = ring.lengths[(owner - 1) % ranks]
        shapes = [(*each.shape[:2], length, each.shape[3]) for each in sent]
        if as_one:
            sizes = [math.prod(shape) for shape in shapes]
            rooms = [sent[0].new_empty(sum(sizes))]
            sent = [torch.cat([each.reshape(-1) for each in sent])]
            parts: Sequence[Tensor] = rooms[0].split(sizes)
        else:
            parts = rooms = [sent[0].new_empty(shape) for shape in shapes]
            sent = [each.contiguous() for each in sent]
        self.received = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._sent = sent  # kept until it has been sent
        self._works: list[Work] = []
        for each, coming in zip(sent, rooms, strict=True):
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
