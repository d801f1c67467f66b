"""The ops of softmax + top-k, torch.ops.megasoftmax.softmax_topk_*, as `ops` has the others.

Arguments and results are explained in `reference_topk`, whose functions compute without kernels.
"""

from typing import Any

import torch
from torch import Tensor

from megasoftmax import ops, reference, reference_topk

_library = torch.library.Library(__package__, "FRAGMENT")
_library.define(
    "softmax_topk_forward(Tensor logits, int k, float scale, Tensor? mask, Tensor? bias, "
    "bool renormalize, ScalarType dtype, bool candidates) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "softmax_topk_backward(Tensor gradient, Tensor probabilities, Tensor indices, "
    "Tensor? lse_gradient, Tensor logits, Tensor statistics, float scale, Tensor? mask, "
    "Tensor? bias, bool renormalize, float factor, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_ops = getattr(torch.ops, __package__)
_forward = _ops.softmax_topk_forward.default
_backward = _ops.softmax_topk_backward.default


def softmax_topk_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The op without its autograd."""
    return ops.below_autograd(_forward, *args)


def softmax_topk_backward(*args: Any) -> Tensor:
    """The op without its autograd."""
    return ops.below_autograd(_backward, *args)


HALVES = reference_topk.Halves(softmax_topk_forward, softmax_topk_backward)


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = reference_topk.ForwardSlots(*args)
    logits = given.logits
    shape = (*logits.shape[:-1], given.k)
    return (
        logits.new_empty(shape, dtype=given.dtype),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty((3, *logits.shape[:-1]), dtype=reference.accumulation_dtype(logits.dtype)),
    )


def _fake_backward(*args: Any) -> Tensor:
    given = reference_topk.BackwardSlots(*args)
    return given.logits.new_empty(given.logits.shape, dtype=given.dtype)


def _gradients(ctx: Any, gradient: Tensor | None, _: None, statistics: Tensor | None) -> Any:
    return reference_topk.gradients(ctx, _backward, gradient, statistics)


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    reference_topk.save_for_double_gradients(ctx, inputs)


def _batch_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return reference_topk.batch_forward(_forward, info, in_dims, *args)


def _batch_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return reference_topk.batch_backward(_backward, info, in_dims, *args)


ops.implement(_library, _forward, reference_topk.softmax_topk_forward)
torch.library.register_fake(_forward, _fake_forward, lib=_library)
torch.library.register_vmap(_forward, _batch_forward, lib=_library)
torch.library.register_autograd(
    _forward, _gradients, setup_context=reference_topk.save_for_gradients, lib=_library
)

ops.implement(_library, _backward, reference_topk.softmax_topk_backward)
torch.library.register_fake(_backward, _fake_backward, lib=_library)
torch.library.register_vmap(_backward, _batch_backward, lib=_library)
torch.library.register_autograd(
    _backward, reference_topk.double_gradients, setup_context=_save_again, lib=_library
)
