"""The ops of attention, torch.ops.megasoftmax.attention_*.

Arguments and results are explained in `reference.attention`, whose functions compute without
kernels. Of the results of an op the strides are known too: those of a contiguous output
[b, m, h, dv], those that torch.empty_like gives the gradients of query, key and value, and those
of `_new_bias_gradient`.

torch.ops.megasoftmax.attention_in_blocks_* are the reference on any device. Compiled code calls
them: traced, the loops over blocks would be unrolled, which takes a compiler minutes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax.autograd import attention
from megasoftmax.autograd.function import Implementation, Rules, is_differentiated
from megasoftmax.limits import kernel_limits
from megasoftmax.ops.registration import (
    below_autograd,
    define,
    define_differentiable,
    fake,
    implement,
    implement_everywhere,
    schema_of,
    trace,
    without_rules,
)
from megasoftmax.reference.attention import (
    BackwardArguments,
    ForwardArguments,
    attention_backward,
    attention_forward,
)
from megasoftmax.reference.attention import merge as merge_in_torch
from megasoftmax.reference.softmax import accumulation_dtype


def _call_backward(call: Callable[..., Any], *args: Any) -> Any:
    """What `below_autograd` returns; where it is to be differentiated, one that refuses."""
    if is_differentiated() and not torch.compiler.is_compiling():
        return _BackwardFunction.apply(call, *args)
    return call(*args)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "fused attention: expected to be differentiated once, got a second derivative; "
        "fused=False can be differentiated as often as wanted"
    )


def _refuse_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(attention.IN_FORWARD_MODE)


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


class _BackwardFunction(torch.autograd.Function):
    """What autograd makes of an op, for transforms of functions too, which ops do not support."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Callable[..., Any], *args: Any) -> Any:
        return call(*args)

    setup_context = staticmethod(_save_nothing)
    backward = staticmethod(_refuse)
    jvp = staticmethod(_refuse_forward_mode)


def _backward_in_its_layout(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = BackwardArguments(*args)
    d_query, d_key, d_value, d_bias, d_sink = attention_backward(*args)
    return (
        torch.empty_like(given.query).copy_(d_query),
        torch.empty_like(given.key).copy_(d_key),
        torch.empty_like(given.value).copy_(d_value),
        _new_bias_gradient(given).copy_(d_bias) if given.bias_gradient else d_bias,
        d_sink.contiguous(),
    )


def _packed(backward: Callable[..., Any], *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *gradients, d_bias, d_sink = backward(*args)
    return torch.stack([each.transpose(1, 2) for each in gradients], 2), d_bias, d_sink


def _new_bias_gradient(given: BackwardArguments) -> Tensor:
    """Of an entry for each pair, rows begin at multiples of 16 bytes, as kernels write them.

    Of a table for each query, in its layout, if the rows of a head lie together there.
    """
    bias, keys = given.bias, given.key.shape[2]
    assert bias is not None
    if given.relative and bias.dim() == 4:
        has_rows = bias.stride(3) == 1 and bias.stride(2) > 0
        rows = torch.empty_like(bias if has_rows else bias.contiguous())
        is_close = rows.stride(3) == 1 and rows.stride(2) == rows.shape[3]
        return rows if is_close else bias.new_empty(bias.shape)
    if given.relative or bias.shape[2:] != (given.query.shape[2], keys):
        return bias.new_empty(bias.shape)
    return bias.new_empty((*bias.shape[:-1], -(-keys // 8) * 8))[..., :keys]


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    given = ForwardArguments(*args)
    query = given.query
    batches, heads, queries, _ = query.shape
    output = query.new_empty((batches, queries, heads, given.value.shape[-1]))
    statistics_dtype = accumulation_dtype(query.dtype)
    return (
        output.transpose(1, 2),
        query.new_empty((3, batches, heads, queries), dtype=statistics_dtype),
    )


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = BackwardArguments(*args)
    query = given.query
    nothing = query.new_empty(0, dtype=accumulation_dtype(query.dtype))
    return (
        torch.empty_like(query),
        torch.empty_like(given.key),
        torch.empty_like(given.value),
        _new_bias_gradient(given) if given.bias_gradient else nothing,
        nothing.new_empty(query.shape[:-1]) if given.sink_gradient else nothing.new_empty(0),
    )


def _fake_backward_packed(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    d_query, _, _, d_bias, d_sink = _fake_backward(*args)
    batches, heads, tokens, head_dim = d_query.shape
    return d_query.new_empty((batches, tokens, 3, heads, head_dim)), d_bias, d_sink


_BACKWARD = Rules(BackwardArguments._fields, _save_nothing, _refuse, attention.batch_backward)


def _defined(name: str, *, has_kernels: bool) -> tuple[Implementation, Any]:
    """Defines a pair of ops, which the reference computes where there are no kernels.

    Returns them below autograd, and that of the forward without rules.
    """
    forward = define_differentiable(
        schema_of(attention_forward, "(Tensor output, Tensor statistics)", f"{name}_forward")
    )
    gradients = "(Tensor d_query, Tensor d_key, Tensor d_value, Tensor d_bias, Tensor d_sink)"
    backward = define_differentiable(schema_of(attention_backward, gradients, f"{name}_backward"))
    traced = Implementation(forward, backward)
    compute = implement if has_kernels else implement_everywhere
    compute(forward, attention_forward)
    trace(forward, _fake_forward, attention.FORWARD, traced)
    compute(backward, _backward_in_its_layout)
    trace(backward, _fake_backward, _BACKWARD, traced)
    implementation = Implementation(
        below_autograd(forward), partial(_call_backward, below_autograd(backward))
    )
    return implementation, without_rules(forward)


IMPLEMENTATION, _forward_without_rules = _defined("attention", has_kernels=True)
IN_BLOCKS, _ = _defined("attention_in_blocks", has_kernels=False)


# The backward pass of query, key and value of one shape, whose gradients are one contiguous tensor
# [b, m, 3, h, d]. The C++ part of the host calls it, where autograd records nothing.
backward_packed = define(
    schema_of(
        attention_backward,
        "(Tensor d_packed, Tensor d_bias, Tensor d_sink)",
        "attention_backward_packed",
    )
)
implement(backward_packed, partial(_packed, _backward_in_its_layout))
fake(backward_packed, _fake_backward_packed)
PACKED = Implementation(IMPLEMENTATION.forward, partial(_packed, IMPLEMENTATION.backward))


def forward_alone(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """The output of these alone, in compiled code that needs no gradient."""
    options = scale, 0.0, causal, -1, -1, None, None, False, None, None, None, 1, 0.0, None, False
    output: Tensor = _forward_without_rules(query, key, value, None, None, *options)[0]
    return output


def _tile_note(mask: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """Without kernels, which alone read a note."""
    return _fake_tile_note(mask, block, queries, keys).zero_()


def _fake_tile_note(mask: Tensor, block: int, queries: int, keys: int) -> Tensor:
    tile = kernel_limits().attention["kMaskTile"]
    of_queries, of_keys = -(-queries // tile), -(-keys // tile)
    words = 2 * of_queries * -(-of_keys // 32) + of_keys * -(-of_queries // 32)
    words = -(-words // 4) * 4  # the bits of pairs begin at a multiple of 16 bytes
    if block == 1:
        is_shared = mask.shape[2] == 1  # by all queries
        words += (1 if is_shared else queries) * 4 * -(-of_keys // 2)
        words += 0 if is_shared else of_keys * of_queries * 2 * tile  # the same bits, by key
    return mask.new_empty((*mask.shape[:2], words), dtype=torch.int32)


# What kernels note of a mask, an argument of the ops above, and of `block`: which tiles of 64
# queries and 64 keys are excluded, throughout or in part, and the bits of the latter.
tile_note = define("tile_note(Tensor mask, int block, int queries, int keys) -> Tensor")
implement(tile_note, _tile_note)
fake(tile_note, _fake_tile_note)


def most_keys_without_output() -> int:
    """Up to so many keys the backward pass may take sum(dO O) from weights, and not from O."""
    return kernel_limits().attention["kMostKeysWithoutOutput"]


# Changes an output and statistics to those over the keys of two parts.
merge = define(
    "attention_merge(Tensor(a!) output, Tensor(b!) statistics, Tensor other_output, "
    "Tensor other_statistics) -> ()"
)
implement(merge, merge_in_torch)
fake(merge, lambda *args: None)
