"""The ops of softmax + top-k, torch.ops.megasoftmax.softmax_topk_*."""

from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd.function import Implementation
from megasoftmax.autograd.topk import BACKWARD, FORWARD
from megasoftmax.ops.registration import (
    below_autograd,
    define,
    define_differentiable,
    fake,
    implement,
    run_one_by_one,
    schema_of,
    trace,
)
from megasoftmax.reference.softmax import accumulation_dtype
from megasoftmax.reference.topk import (
    BackwardArguments,
    ForwardArguments,
    SampleArguments,
    softmax_topk_backward,
    softmax_topk_forward,
    softmax_topk_sample,
)

_forward = define_differentiable(schema_of(softmax_topk_forward, "(Tensor, Tensor, Tensor)"))
_backward = define_differentiable(schema_of(softmax_topk_backward, "Tensor"))

sample = define(schema_of(softmax_topk_sample, "(Tensor, Tensor, Tensor)"))

# Below autograd.
IMPLEMENTATION = Implementation(below_autograd(_forward), below_autograd(_backward))


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = ForwardArguments(*args)
    logits = given.logits
    shape = (*logits.shape[:-1], given.k)
    return (
        logits.new_empty(shape, dtype=given.dtype),
        logits.new_empty(shape, dtype=torch.int64),
        logits.new_empty((3, *logits.shape[:-1]), dtype=accumulation_dtype(logits.dtype)),
    )


def _fake_backward(*args: Any) -> Tensor:
    given = BackwardArguments(*args)
    return given.logits.new_empty(given.logits.shape, dtype=given.dtype)


_traced = Implementation(_forward, _backward)
implement(_forward, softmax_topk_forward)
trace(_forward, _fake_forward, FORWARD, _traced)
implement(_backward, softmax_topk_backward)
trace(_backward, _fake_backward, BACKWARD, _traced)


def _fake_sample(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = SampleArguments(*args)
    logits = given.logits
    rows, dtype = logits.shape[:-1], accumulation_dtype(logits.dtype)
    return (
        logits.new_empty(rows, dtype=torch.int64),
        logits.new_empty((*rows, given.k), dtype=dtype),
        logits.new_empty((*rows, given.k), dtype=torch.int64),
    )


implement(sample, softmax_topk_sample)
fake(sample, _fake_sample)
run_one_by_one(sample)  # each counts its rows from 0 on
