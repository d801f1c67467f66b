"""The off-by-one softmax."""

import math
import numbers

import torch
from torch import Tensor

from megasoftmax import checks
from megasoftmax.dispatch import Reason
from megasoftmax.functions.softmax import softmax
from megasoftmax.functions.why_not_fused import why_not_fused

_NAMES = {"scores": "x", "sink": "denominator_offset"}


class SoftmaxOne(torch.nn.Module):
    """Softmax with a further term in the denominator: the off-by-one softmax by default.

        p = exp(x) / (sum exp(x) + offset),  or + exp(offset) where the offset is a tensor

    Args:
        dim: over which the probabilities and what is missing sum to 1; None for the last.
        denominator_offset: a number, not negative, is the term itself. A tensor, [heads] or one
            element, holds its logarithm, as in Megatron-core, and is differentiable; heads are the
            third dimension from the end, and `dim` one of the last two.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.

    Source:
        Miller, "Attention is off by one", https://www.evanmiller.org/attention-is-off-by-one.html.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        if dim is not None:
            dim = checks.checked_integer("dim", dim, -(2**63))
        if isinstance(denominator_offset, Tensor):
            checks.check_floating("denominator_offset", denominator_offset)
        else:
            if not isinstance(denominator_offset, numbers.Real):
                kind = checks.kind(denominator_offset)
                raise TypeError(f"denominator_offset: expected a tensor or a number, got {kind}")
            if not 0 <= denominator_offset < math.inf:
                raise ValueError(
                    f"denominator_offset: expected a finite number from 0 on, "
                    f"got {denominator_offset}"
                )
        self.dim = dim
        self.denominator_offset = denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities of the shape of x, in the type that torch.softmax would return."""
        scores, sink = self._scores_and_sink(x)
        dim = -1 if self.dim is None else self.dim
        try:
            return softmax(scores, sink=sink).movedim(-1, dim)
        except (TypeError, ValueError) as error:
            raise checks.renamed(error, _NAMES) from None

    def why_not_fused(self, x: Tensor) -> tuple[Reason, ...]:
        """Why `forward` of the same argument would not run fused; empty: it would.

        Raises:
            TypeError, ValueError: as `forward` would.
        """
        scores, sink = self._scores_and_sink(x)
        try:
            return why_not_fused(softmax, scores, sink=sink)
        except (TypeError, ValueError) as error:
            raise checks.renamed(error, _NAMES) from None

    def extra_repr(self) -> str:
        offset = self.denominator_offset
        shown = tuple(offset.shape) if isinstance(offset, Tensor) else offset
        return f"dim={self.dim}, denominator_offset={shown}"

    def _scores_and_sink(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """x with `dim` last, and the logit."""
        checks.check_floating("x", x)
        rank = x.dim()
        dim = -1 if self.dim is None else self.dim
        if not -rank <= dim < rank:
            raise ValueError(f"dim: expected from {-rank} to {rank - 1}, got {dim}")
        moved = x.movedim(dim, -1)
        offset = self.denominator_offset
        if not isinstance(offset, Tensor):
            return moved, math.log(offset) if offset > 0 else -math.inf
        if offset.numel() != 1:
            heads = x.shape[-3] if rank > 2 else 1
            if dim % rank < rank - 2 or offset.numel() != heads:
                raise ValueError(
                    f"denominator_offset: expected one element, or [{heads}] and dim one of the "
                    f"last two, got shape {tuple(offset.shape)} and dim {dim}"
                )
        return moved, offset.reshape(-1)
