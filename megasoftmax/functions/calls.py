"""What calls of all operations share: who computes, and the operands as ops take them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megasoftmax import arguments, host
from megasoftmax.autocast import autocast_dtype
from megasoftmax.dispatch import Reason
from megasoftmax.distributed import sharding
from megasoftmax.options import Ranges
from megasoftmax.tracing import in_jit_trace


class Call:
    """A call of an operation: tensors, the first of which says where it runs, and valid options."""

    __slots__ = ("options", "tensor")

    options: Any
    tensor: Tensor

    def reasons(self) -> tuple[Reason, ...]:
        """All the reasons why it cannot run fused; empty: it can."""
        raise NotImplementedError

    def runs_fused(self) -> bool:
        """Whether it runs fused; raises where it must and cannot."""
        fused = self.options.fused
        if fused is False or (fused is None and not self.tensor.is_cuda):
            return False
        reasons = self.reasons()
        can_be = len(reasons) == 0  # torch.compile cannot trace `not reasons`
        if fused and not can_be:
            raise ValueError("fused: cannot be True here. " + "; ".join(map(str, reasons)))
        if can_be:
            host.admit(self.tensor)
        return can_be


def runs_as_op(name: str, scores: Tensor) -> bool:
    """Whether a call that does not run fused is one op all the same: DTensors, and torch.jit.trace.

    Raises:
        ValueError: of a DTensor on a GPU.
    """
    if sharding.prepare(scores):
        arguments.check_shards(name, scores)
        return True
    return in_jit_trace()


def call_op(through_autograd: Callable[..., Any], implementation: Any, *args: Any) -> Any:
    """`through_autograd(implementation, needs_gradient, *arguments of forward)`.

    Compiled, an autograd function gets gradients without placements: DTensors go to ops, which have
    autograd of their own.
    """
    if sharding.prepare(args[1]) and torch.compiler.is_compiling():
        return implementation.forward(*args[1:])
    return through_autograd(implementation, *args)


def dtype_of_probabilities(scores: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type asked for, or else that of torch.softmax: float32 under autocast on a GPU."""
    if dtype is not None:
        return dtype
    if scores.is_cuda and autocast_dtype(scores) is not None:
        return torch.float32
    return scores.dtype


def new_seed(device: torch.device) -> Tensor:
    """A seed of dropout, int64 [1], drawn there by torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)


def seed_of_call(seed: Tensor | None, scores: Tensor) -> Tensor:
    """The seed that was given, or a new one; of DTensors one for each shard."""
    if seed is None:
        seed = new_seed(scores.device)
    return sharding.seed_of_shards(seed, scores) if sharding.prepare(scores) else seed


def int32_bounds(visible: Ranges, keys: int) -> Ranges:
    """Both in int32."""
    first, end = visible
    return _as_int32(first, keys), _as_int32(end, keys)


def _as_int32(bound: Tensor | None, keys: int) -> Tensor | None:
    if bound is None or bound.dtype == torch.int32:
        return bound
    return bound.clamp(0, keys).to(torch.int32)


def with_rank(tensor: Tensor | None, rank: int) -> Tensor | None:
    """A view with leading dimensions of size 1."""
    return None if tensor is None else tensor[(None,) * (rank - tensor.dim())]


def cast_for_kernels(bias: Tensor | None, scores: Tensor) -> Tensor | None:
    """The bias in the type of the scores or float32. One of no dimension gets one."""
    if bias is None:
        return None
    if bias.dim() == 0:
        bias = bias[None]
    return bias if bias.dtype == scores.dtype else bias.float()
