"""Biases of attention in the form in which kernels read the least memory.

* A bias that depends on key - query alone is a `RelativeBias`, a table of m + n - 1 values per
  head in place of m n: `t5_bias`, `alibi_bias`, or any table of your own.
* Scores of relative positions, as Transformer-XL makes them, are a `ShiftedBias`: a table for each
  query, in place of copies that shift them.
* One that depends on query and key is a tensor [..., heads, m, n]. Dimensions that broadcast are
  shared, not repeated: the pair bias of triangle attention, [structures, 1, heads, m, n], serves
  queries [structures, rows, heads, m, head_dim].
* One that depends on the key alone is a tensor [..., 1, n].
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from megasoftmax import checks
from megasoftmax.reference.attention import shifted_rows


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias that depends on the distance between query and key alone.

    With m queries and n keys, entry (i, j) of the bias is table[..., j - i + m - 1]: the table goes
    from the distance of the last query to the first key to that of the first query to the last key.
    Attention never makes an [m, n] tensor of it. The gradient goes to the table.

    Args:
        table: floating, [..., heads, m + n - 1]. All but the last dimension broadcast to [...,
            heads] of the query.

    Raises:
        TypeError: table is not a floating tensor.
        ValueError: table does not have at least 2 dimensions.
    """

    table: Tensor

    trailing: ClassVar[int] = 2
    """Dimensions of the table from the heads on."""
    _expected: ClassVar[str] = "[..., heads, m + n - 1]"

    def __post_init__(self) -> None:
        _check_tensor("table", self.table, 2, self._expected)

    def dense(self, queries: int, keys: int) -> Tensor:
        """Entry by entry, [..., queries, keys], in the type of the table; differentiable.

        Raises:
            TypeError, ValueError: queries or keys is no integer from 0 on, or the table does not
                have queries + keys - 1 columns.
        """
        queries = checks.checked_integer("queries", queries, 0)
        keys = checks.checked_integer("keys", keys, 0)
        columns = max(queries + keys - 1, 0)
        if self.table.shape[-1] != columns:
            raise ValueError(
                f"table: expected [..., {columns}] for {queries} queries and {keys} keys, "
                f"got shape {tuple(self.table.shape)}"
            )
        if queries == 0 or keys == 0:
            return self.table.new_empty(*self.table.shape[:-1], queries, keys)
        return self.table.unfold(-1, keys, 1).flip(-2)


@dataclass(frozen=True, eq=False)
class ShiftedBias(RelativeBias):
    """A relative bias with a table for each query: scores of queries and relative positions.

    With m queries and n keys, entry (i, j) of the bias is table[..., i, j - i + m - 1]. Models
    shift such scores by padding and reshaping, which copies them twice, and their gradient twice.
    Here rows of the bias begin one entry earlier each, and so do those of the gradient.

        scores = query @ positions.transpose(-2, -1)  # of m queries and m + n - 1 positions
        output = attention(query, key, value, bias=ShiftedBias(scores))

    Args:
        table: floating, [..., heads, m, at least m + n - 1]. Column c is of distance c - (m - 1)
            from query to key. Columns from m + n - 1 on are not read. All but the last two
            dimensions broadcast to [..., heads] of the query.

    Raises:
        TypeError: table is not a floating tensor.
        ValueError: table does not have at least 2 dimensions.

    Source:
        Dai et al., https://arxiv.org/abs/1901.02860, appendix B.
    """

    trailing: ClassVar[int] = 3
    _expected: ClassVar[str] = "[..., m, at least m + n - 1]"

    def dense(self, queries: int, keys: int) -> Tensor:
        """Entry by entry, [..., queries, keys]; differentiable. A view of a contiguous table.

        Raises:
            TypeError, ValueError: queries or keys is no integer from 0 on, or the table does not
                have that many rows and at least queries + keys - 1 columns.
        """
        queries = checks.checked_integer("queries", queries, 0)
        keys = checks.checked_integer("keys", keys, 0)
        rows, columns = self.table.shape[-2:]
        if rows != queries or columns < queries + keys - 1:
            raise ValueError(
                f"table: expected [..., {queries}, at least {max(queries + keys - 1, 0)}] for "
                f"{queries} queries and {keys} keys, got shape {tuple(self.table.shape)}"
            )
        shifted: Tensor = _Shift.apply(self.table, keys)
        return shifted


class _Shift(torch.autograd.Function):
    """Autograd would fill and copy two tensors of all distances, one for each slice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, keys: int) -> Tensor:
        return shifted_rows(table.flatten(-2), table.shape[-2], keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        table, ctx.keys = inputs
        ctx.distances = table.shape[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries = gradient.shape[-2]
        flat = gradient.new_zeros((*gradient.shape[:-2], queries * ctx.distances))
        shifted_rows(flat, queries, ctx.keys).copy_(gradient)
        return flat.view(*gradient.shape[:-1], ctx.distances), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return shifted_rows(tangent.flatten(-2), tangent.shape[-2], ctx.keys)


def t5_bias(
    weight: Tensor,
    queries: int,
    keys: int,
    *,
    bidirectional: bool,
    max_distance: int = 128,
    offset: int | None = None,
) -> RelativeBias:
    """The learnable relative bias of T5: a number per head and bucket of distances.

    Args:
        weight: [buckets, heads], floating, `relative_attention_bias.weight` of a T5 layer. Gets a
            gradient, deterministic.
        queries, keys: lengths, m and n.
        bidirectional: half of the buckets are for keys after the query; else those share a bucket
            with the query's own position, and causality is to exclude them.
        max_distance: from here on, all distances share the last bucket.
        offset: the position of the first query among the keys; by default keys - queries: the last
            query stands at the last key, as causality has it.

    Returns:
        A table [heads, queries + keys - 1] in the type of weight.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.

    Source:
        Raffel et al., https://arxiv.org/abs/1910.10683.
    """
    checks.check_floating("weight", weight)
    checks.check_rank("weight", weight, 2, "[buckets, heads]")
    checks.check_flag("bidirectional", bidirectional)
    max_distance = checks.checked_integer("max_distance", max_distance, 1)
    relative = _relative_positions(queries, keys, offset, weight.device)
    buckets = _t5_buckets(relative, weight.shape[0], bidirectional, max_distance)
    return RelativeBias(torch.nn.functional.embedding(buckets, weight).T.contiguous())


def alibi_bias(
    slopes: Tensor, queries: int, keys: int, *, offset: int | None = None
) -> RelativeBias:
    """Attention with linear biases: each head subtracts slope * distance.

    Keys after the query count by their distance too. Where causality excludes them, this is also
    what Bloom and MPT compute: they add slope * key position, which differs by a number per query.

    Args:
        slopes: [..., heads], floating; see `alibi_slopes`. Gets a gradient.
        queries, keys: lengths, m and n.
        offset: the position of the first query among the keys; by default keys - queries.

    Returns:
        A table [..., heads, queries + keys - 1], float32 (float64 for float64 slopes).

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.

    Source:
        Press et al., https://arxiv.org/abs/2108.12409.
    """
    _check_tensor("slopes", slopes, 1, "[..., heads]")
    distances = _relative_positions(queries, keys, offset, slopes.device).abs()
    dtype = torch.promote_types(slopes.dtype, torch.float32)
    return RelativeBias(slopes.to(dtype)[..., None] * -distances)


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of Press et al., float32 [heads]: 2 ** (-8 k / heads) for k from 1 on.

    Where heads is no power of 2: those of the next lower one, then every other one of the next.

    Raises:
        TypeError, ValueError: heads is no integer from 1 on, or device is none of torch's.
    """
    heads = checks.checked_integer("heads", heads, 1)
    device = checks.checked_device(device)
    lower = 2 ** math.floor(math.log2(heads))
    exponents = [8 * k / lower for k in range(1, lower + 1)]
    exponents += [4 * k / lower for k in range(1, 2 * (heads - lower), 2)]
    slopes = [2**-exponent for exponent in exponents]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _relative_positions(
    queries: int, keys: int, offset: int | None, device: torch.device
) -> Tensor:
    """Key - query of each entry of a table, int64 [queries + keys - 1]."""
    queries = checks.checked_integer("queries", queries, 0)
    keys = checks.checked_integer("keys", keys, 0)
    first = keys - queries if offset is None else checks.checked_integer("offset", offset)
    return torch.arange(max(queries + keys - 1, 0), device=device) - (queries - 1 + first)


def _t5_buckets(relative: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Half of the buckets of a side hold one distance each, the others grow with its logarithm."""
    per_side = buckets // 2 if bidirectional else buckets
    exact = per_side // 2
    if exact < 1:
        raise ValueError(
            f"weight: expected at least {4 if bidirectional else 2} buckets, got {buckets}"
        )
    if max_distance <= exact:
        raise ValueError(f"max_distance: expected more than {exact}, got {max_distance}")
    distance = relative.abs() if bidirectional else -relative.clamp(max=0)
    # The order of these operations decides, by rounding, in which bucket some distances fall
    ratio = distance.clamp(min=exact).float() / exact
    logarithm = torch.log(ratio) / math.log(max_distance / exact)
    beyond = (exact + (logarithm * (per_side - exact)).long()).clamp(max=per_side - 1)
    bucket = torch.where(distance < exact, distance, beyond)
    return bucket + per_side * (relative > 0) if bidirectional else bucket


def _check_tensor(name: str, tensor: Tensor, least: int, expected: str) -> None:
    checks.check_floating(name, tensor)
    checks.check_least_rank(name, tensor, least, expected)
