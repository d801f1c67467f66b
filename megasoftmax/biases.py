"""Biases of attention that are not tensors of logits."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias that depends on the distance between query and key alone.

    With m queries and n keys, entry (i, j) of the bias is table[..., j - i + m - 1]: the table goes
    from the distance of the last query to the first key to that of the first query to the last key.
    No [m, n] tensor is ever made of it. The gradient goes to the table.

    Args:
        table: floating, [heads, m + n - 1] or [batch, heads, m + n - 1]. Numbers of heads and
            batches are 1 or divide those of the query, whose neighbours then share an entry.
    """

    table: Tensor
