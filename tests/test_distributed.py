"""What runs on several processes, against one: DTensors, a sequence in a ring, sharded models.

The processes run once for each number of them, and leave what they found; the tests compare.
"""

import copy
import itertools
import math
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import processes
import pytest
import torch
import torch.distributed
from inputs import by_error, coin, deterministic, drawn, normal, record_calls, saved_tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import megasoftmax
from megasoftmax import RelativeBias, ShiftedBias, TileMask, ops
from megasoftmax.distributed import context_parallel

WORLDS = (2, 3)
INF = torch.inf


def double(*shape, seed):
    return normal(*shape, device="cpu", dtype=torch.float64, seed=seed)


def excluded(*shape):
    """With rows of which nothing is left."""
    mask = coin(*shape, device="cpu")
    mask[0] = True
    return mask


def dtype_on(device, needs_half):
    """In which cases of float64 run: that of the kernels, if there are any."""
    if not device.startswith("cuda"):
        return torch.float64
    return torch.bfloat16 if needs_half else torch.float32


def cast(given, dtype):
    """With tensors of float64 in another type."""

    def in_type(value):
        is_double = isinstance(value, Tensor) and value.dtype == torch.float64
        return value.to(dtype) if is_double else value

    return {name: in_type(value) for name, value in given.items()}


TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def check(what, actual, wanted, dtype):
    """Within what arithmetic in a type allows, of values around 1; in bfloat16, of the largest."""
    if not wanted.is_floating_point():
        assert torch.equal(actual, wanted), what
        return
    tolerance = TOLERANCES[dtype]
    largest = 1.0
    if dtype == torch.bfloat16 and wanted.isfinite().any():
        largest = max(largest, wanted[wanted.isfinite()].abs().max().item())
    torch.testing.assert_close(
        actual.double(),
        wanted.double(),
        rtol=tolerance,
        atol=tolerance * largest,
        msg=lambda message: f"{what}: {message}",
    )


def cotangent(result, seed):
    return normal(*result.shape, device="cpu", seed=seed).to(result.dtype)


# DTensors


@dataclass
class Split:
    """A call with DTensors.

    Args:
        call: of the tensors by name, to its results by name.
        tensors: what is floating gets a gradient.
        given: the dimension along which each tensor is sharded; what is not named is replicated.
        found: the same of results, and of gradients by the names of their tensors, with 2 ranks;
            PARTIAL for a sum that is still to be made.
        sends: whether anything need be sent.
    """

    call: Callable[..., dict[str, Tensor]]
    tensors: dict[str, Tensor]
    given: dict[str, int]
    found: dict[str, int | str | None]
    sends: bool = False
    compiles: bool = False


PARTIAL = "partial"


def softmax(scores, **arguments):
    p, lse = megasoftmax.softmax(scores, return_lse=True, **arguments)
    return {"p": p, "lse": lse}


def softmax_with_all(**tensors):
    return softmax(**tensors, scale=0.7, causal=True, window=(3, 0))


def gradients_of_softmax(**tensors):
    """That are differentiated once more."""
    inputs = [tensors[name] for name in ("scores", "bias", "sink")]
    p = softmax_with_all(**tensors)["p"]
    found = torch.autograd.grad(p.sin().sum(), inputs, create_graph=True)
    return dict(zip(("d_scores", "d_bias", "d_sink"), found, strict=True))


def softmax_over_one(scores):
    return softmax(scores, dim=1, scale=-0.7, fused=True if isinstance(scores, DTensor) else None)


def topk(logits, **arguments):
    p, indices, lse = megasoftmax.softmax_topk(
        logits, 3, scale=0.7, return_lse=True, renormalize=True, **arguments
    )
    return {"p": p, "indices": indices, "lse": lse}


def attention(query, key, value, table=None, **arguments):
    if table is not None:
        arguments["bias"] = RelativeBias(table)
    output, lse = megasoftmax.attention(
        query, key, value, scale=0.5, causal=True, return_lse=True, **arguments
    )
    return {"output": output, "lse": lse}


def attention_through_ops(query, **arguments):
    return attention(query, **arguments, fused=True if isinstance(query, DTensor) else None)


SCORES = {
    "scores": double(4, 6, 5, 7, seed=0),
    "mask": excluded(4, 1, 5, 7),
    "bias": double(6, 1, 7, seed=1),
    "sink": double(6, seed=2),
}
LOGITS = {"logits": double(4, 6, 9, seed=0), "mask": excluded(4, 1, 9), "bias": double(9, seed=1)}


def softmax_of_ranges(first, end, **tensors):
    return softmax(**tensors, visible=(first, end), causal=True)


def attention_of_ranges(first, end, blocks, **tensors):
    mask = TileMask.from_blocks(blocks, 64)
    return attention(**tensors, mask=mask, visible=(first, end))


def bounds(*shape, keys):
    """Ranges, one of them empty, and one that reaches beyond the keys."""
    length = 1 + torch.arange(math.prod(shape)).view(shape) % keys
    first = torch.arange(math.prod(shape)).view(shape) * 3 % keys - 1
    length.view(-1)[0], first.view(-1)[1] = 0, -4
    return {"first": first.int(), "end": (first + length).int()}


def of_attention(heads, key_heads, batches_of_bias, heads_of_bias):
    return {
        "query": double(4, heads, 5, 8, seed=0),
        "key": double(4, key_heads, 7, 8, seed=1),
        "value": double(4, key_heads, 7, 6, seed=2),
        "bias": double(batches_of_bias, heads_of_bias, 5, 7, seed=3),
        "mask": excluded(4, 1, 5, 7),
        "sink": double(heads, seed=4),
    }


def with_rows():
    """Of two leading dimensions: the second shares a bias. Worlds divide the first."""
    return {
        "query": double(6, 2, 4, 5, 8, seed=0),
        "key": double(6, 2, 2, 7, 8, seed=1),
        "value": double(6, 2, 2, 7, 6, seed=2),
        "bias": double(6, 1, 4, 5, 7, seed=3),
        "mask": excluded(6, 2, 1, 5, 7),
    }


def without_sink(*of):
    """As the ops take it: a sink of float64 would be rounded."""
    tensors = of_attention(*of)
    del tensors["sink"]
    return tensors


def with_ranges(*of):
    tensors = of_attention(*of) | bounds(4, 4, 5, keys=7)
    del tensors["mask"]
    return tensors | {"blocks": torch.tensor([False, True, False, False]).view(1, 4, 1, 1)}


def with_table(heads, key_heads):
    tensors = of_attention(heads, key_heads, 1, 1)
    del tensors["bias"], tensors["mask"]
    return tensors | {"table": double(heads, 11, seed=5)}


QKV = ("query", "key", "value")
OF_BATCHES = dict.fromkeys((*QKV, "mask"), 0)
OF_HEADS = dict.fromkeys(QKV, 1)
WHOLE = dict.fromkeys(("output", "lse", *QKV, "bias", "sink"))

SPLITS = {
    "softmax, batches": Split(
        *(softmax_with_all, SCORES, {"scores": 0, "mask": 0}),
        {"p": 0, "lse": 0, "scores": 0, "bias": PARTIAL, "sink": PARTIAL},
    ),
    "softmax, heads": Split(
        *(softmax_with_all, SCORES, {"scores": 1, "bias": 0, "sink": 0}),
        {"p": 1, "lse": 1, "scores": 1, "bias": 0, "sink": 0},
        compiles=True,
    ),
    "softmax, heads of what is replicated": Split(
        *(softmax_with_all, SCORES, {"scores": 1}),
        {"p": 1, "lse": 1, "scores": 1, "bias": 0, "sink": 0},
    ),
    "softmax, ranges of batches": Split(
        *(softmax_of_ranges, {"scores": SCORES["scores"]} | bounds(4, 1, 5, keys=7)),
        *({"scores": 0, "first": 0, "end": 0}, {"p": 0, "lse": 0, "scores": 0}),
        compiles=True,
    ),
    "softmax, ranges of heads": Split(
        softmax_of_ranges,
        {"scores": SCORES["scores"], "sink": SCORES["sink"]} | bounds(6, 5, keys=7),
        {"scores": 1, "first": 0, "end": 0, "sink": 0},
        {"p": 1, "lse": 1, "scores": 1, "sink": 0},
    ),
    "softmax, nothing": Split(
        softmax_with_all, SCORES, {}, dict.fromkeys(("p", "lse", "scores", "bias", "sink"))
    ),
    "softmax, keys": Split(
        *(softmax_with_all, SCORES, {"scores": 3}),
        dict.fromkeys(("p", "lse", "scores", "bias", "sink")),
        sends=True,
    ),
    "softmax, twice": Split(
        *(gradients_of_softmax, SCORES, {"scores": 1, "bias": 0, "sink": 0}),
        {"d_scores": 1, "d_bias": 0, "d_sink": 0, "scores": 1, "sink": 0},
    ),
    "columns, before": Split(
        softmax_over_one, {"scores": double(4, 5, 6, seed=0)}, {"scores": 0}, {"p": 0, "lse": 0}
    ),
    "columns, behind": Split(
        softmax_over_one, {"scores": double(4, 5, 6, seed=0)}, {"scores": 2}, {"p": 2, "lse": 1}
    ),
    "top-k, batches": Split(
        *(topk, LOGITS, {"logits": 0, "mask": 0}),
        {"p": 0, "indices": 0, "lse": 0, "logits": 0, "bias": PARTIAL},
        compiles=True,
    ),
    "top-k, rows": Split(topk, LOGITS, {"logits": 1}, {"p": 1, "lse": 1, "logits": 1}),
    "attention, batches": Split(
        *(attention, of_attention(4, 2, 1, 4), OF_BATCHES),
        {"output": 0, "lse": 0, "query": 0, "key": 0, "bias": PARTIAL, "sink": PARTIAL},
    ),
    "attention, ranges of batches": Split(
        *(attention_of_ranges, with_ranges(4, 2, 1, 4), dict.fromkeys((*QKV, "first", "end"), 0)),
        {"output": 0, "lse": 0, "query": 0, "key": 0, "bias": PARTIAL, "sink": PARTIAL},
    ),
    "attention, ranges of heads": Split(
        *(attention_of_ranges, with_ranges(4, 2, 1, 1)),
        OF_HEADS | dict.fromkeys(("first", "end", "blocks"), 1),
        {"output": 1, "lse": 1, "query": 1, "key": 1, "bias": PARTIAL, "sink": 0},
        compiles=True,
    ),
    "attention, rows that share a bias": Split(
        attention_through_ops,
        with_rows(),
        OF_BATCHES | {"bias": 0},
        {"output": 0, "lse": 0, "query": 0, "bias": 0},
    ),
    "attention, windows that repeat a mask": Split(
        attention_through_ops,
        with_rows() | {"mask": excluded(2, 1, 5, 7)},
        dict.fromkeys((*QKV, "bias"), 0),
        {"output": 0, "lse": 0, "query": 0, "bias": 0},
    ),
    "attention, rows of heads": Split(
        attention,
        with_rows(),
        dict.fromkeys((*QKV, "bias"), 2),
        {"output": 2, "lse": 2, "query": 2, "key": 2, "bias": 2},
        compiles=True,
    ),
    "attention, heads": Split(
        attention,
        of_attention(4, 2, 4, 4),
        OF_HEADS | {"bias": 1, "sink": 0},
        {"output": 1, "lse": 1, "query": 1, "key": 1, "value": 1, "bias": 1, "sink": 0},
        compiles=True,
    ),
    "attention, heads that share all": Split(
        *(attention_through_ops, without_sink(6, 1, 4, 1), {"query": 1}),
        {"output": 1, "query": 1, "key": PARTIAL, "value": PARTIAL, "bias": PARTIAL},
    ),
    "attention, tables of heads": Split(
        *(attention, with_table(4, 4), OF_HEADS | {"table": 0}),
        {"output": 1, "query": 1, "key": 1, "table": 0, "sink": 0},
    ),
    # 3 heads of keys are shared out as 2 and 1, and 12 of queries as 6 and 6.
    "attention, heads that cannot be split": Split(
        attention, of_attention(12, 3, 1, 1), OF_HEADS, WHOLE, sends=True
    ),
    "attention, queries": Split(
        attention, of_attention(4, 2, 4, 4), {"query": 2}, WHOLE, sends=True
    ),
}


def tensors_of(split, device):
    return cast(split.tensors, dtype_on(device, "query" in split.tensors))


def run_split(split, mesh, *, compiled=False):
    """Whole results and gradients, where they were, and how many messages that took."""

    def placement(dim):
        return [Replicate() if dim is None else Shard(dim)]

    def dimension(tensor):
        (found,) = tensor.placements
        return PARTIAL if found.is_partial() else None if found.is_replicate() else found.dim

    def on_mesh(tensor, placements):
        return distribute_tensor(tensor.to(mesh.device_type), mesh, placements)

    tensors = {
        name: on_mesh(tensor, placement(split.given.get(name)))
        for name, tensor in tensors_of(split, mesh.device_type).items()
    }
    inputs = {
        f"gradient of {name}": tensor.requires_grad_()
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }
    call = split.call
    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    forward, backward = CommDebugMode(), CommDebugMode()
    with nullcontext() if compiled else forward:  # dynamo goes through no modes
        results = call(**tensors)
    wanted = [result for result in results.values() if result.is_floating_point()]
    grads = [on_mesh(cotangent(r, i), r.placements) for i, r in enumerate(wanted)]
    with nullcontext() if compiled else backward:
        gradients = torch.autograd.grad(wanted, list(inputs.values()), grads)
    found = results | dict(zip(inputs, gradients, strict=True))
    return {
        "values": {name: tensor.detach().full_tensor().cpu() for name, tensor in found.items()},
        "placements": {name: dimension(tensor) for name, tensor in found.items()},
        "sent": forward.get_total_counts() + backward.get_total_counts(),
    }


def whole_split(split, device):
    """The same values from one process, in plain torch and float64."""
    tensors = {
        name: tensor.double().requires_grad_() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in tensors_of(split, device).items()
    }
    inputs = {f"gradient of {name}": t for name, t in tensors.items() if t.requires_grad}
    results = split.call(**tensors)
    wanted = [result for result in results.values() if result.is_floating_point()]
    grads = [cotangent(r, i) for i, r in enumerate(wanted)]
    gradients = torch.autograd.grad(wanted, list(inputs.values()), grads)
    return results | dict(zip(inputs, gradients, strict=True))


# A sequence over ranks


TOKENS = 11
LENGTHS = {
    1: [(11,)],
    2: [(6, 5), (11, 0)],
    3: [(4, 4, 3), (3, 0, 8), (0, 0, 5), (5, 0, 0), (0, 7, 0)],
}
ALIKE = {1: (11,), 2: (5, 5), 3: (4, 4, 4)}  # as `lengths` need not say
ZIGZAG = {1: (12,), 2: (8, 8), 3: (6, 6, 6)}


def of_ring(tokens, heads=(4, 2), dims=(8, 6)):
    return {
        "query": double(2, heads[0], tokens, dims[0], seed=0),
        "key": double(2, heads[1], tokens, dims[0], seed=1),
        "value": double(2, heads[1], tokens, dims[1], seed=2),
    }


RINGS = {
    "full": lambda n: of_ring(n),
    "causal": lambda n: of_ring(n) | {"causal": True},
    "window": lambda n: of_ring(n) | {"window": (2, 1)},
    "narrowest window": lambda n: of_ring(n) | {"window": (0, 0)},
    "window to the left": lambda n: of_ring(n) | {"window": (5, -1)},
    "window to the right": lambda n: of_ring(n) | {"window": (-1, 5)},
    "causal window": lambda n: of_ring(n) | {"causal": True, "window": (6, 3)},
    "sink": lambda n: of_ring(n) | {"causal": True, "sink": double(4, seed=3)},
    "sink of one": lambda n: of_ring(n) | {"sink": double(1, seed=3)},
    "number as a sink": lambda n: of_ring(n) | {"causal": True, "sink": 0.5, "scale": 1.0},
    "sink of -inf": lambda n: of_ring(n) | {"mask": nothing_left(n), "sink": -INF},
    "softcap": lambda n: of_ring(n) | {"causal": True, "softcap": 0.5, "sink": double(4, seed=3)},
    "softcap beside a bias": lambda n: (
        of_ring(n) | {"softcap": 0.5, "bias": double(1, 4, n, n, seed=3), "window": (4, 1)}
    ),
    "one head of keys": lambda n: of_ring(n, (3, 1)) | {"causal": True},
    "mask": lambda n: of_ring(n) | {"causal": True, "mask": nothing_left(n)},
    "mask of keys": lambda n: of_ring(n) | {"mask": coin(2, 1, 1, n, device="cpu")},
    "mask and sink": lambda n: of_ring(n) | {"mask": nothing_left(n), "sink": double(4, seed=3)},
    "bias": lambda n: of_ring(n) | {"causal": True, "bias": double(1, 4, n, n, seed=3)},
    "bias of keys": lambda n: of_ring(n) | {"bias": double(2, 1, 1, n, seed=3)},
    "bias of queries": lambda n: of_ring(n) | {"bias": double(1, 4, n, 1, seed=3)},
    "table": lambda n: of_ring(n) | {"table": double(4, 2 * n - 1, seed=3)},
    "table, window": lambda n: (
        of_ring(n) | {"table": double(2, 4, 2 * n - 1, seed=3), "window": (4, 1)}
    ),
    "ranges": lambda n: of_ring(n) | bounds(2, 4, n, keys=n),
    "ranges, causal": lambda n: of_ring(n) | {"causal": True} | bounds(1, 1, n, keys=n),
    "ranges, window, mask and sink": lambda n: (
        of_ring(n)
        | {"window": (4, 3), "mask": nothing_left(n), "sink": double(4, seed=3)}
        | bounds(2, 1, 1, keys=n)
    ),
    "packed documents": lambda n: of_ring(n) | {"causal": True} | documents(n),
    "end of each head": lambda n: of_ring(n) | {"end": bounds(4, 1, keys=n)["end"].long()},
    "ranges through the ops": lambda n: (
        cast(of_ring(n), torch.float32) | {"causal": True, "fused": True} | bounds(1, 4, n, keys=n)
    ),
    "two queries for a key": lambda n: (
        of_ring(n)
        | {"query": double(2, 4, 2 * n, 8, seed=0), "mask": coin(1, 4, 2 * n, n, device="cpu")}
    ),
    "float32 through the ops": lambda n: (
        cast(of_ring(n) | {"table": double(4, 2 * n - 1, seed=3)}, torch.float32)
        | {"causal": True, "fused": True}
    ),
    "bfloat16": lambda n: (
        cast(of_ring(n, dims=(8, 8)), torch.bfloat16)
        | {"causal": True, "sink": double(4, seed=3).float()}
    ),
    "overflow in float32": lambda n: overflowing(n, torch.float32),
    "overflow in bfloat16": lambda n: overflowing(n, torch.bfloat16),
}


def documents(tokens):
    """Three, one of them a token, and padding that sees nothing."""
    ends = torch.tensor([0, tokens // 2, tokens // 2 + 1, tokens - 1])
    return dict(zip(("first", "end"), megasoftmax.ranges.packed(ends, tokens), strict=True))


def overflowing(tokens, dtype):
    """All logits of the first half of the keys, which can be a whole block, are -inf in float32."""
    given = of_ring(tokens, dims=(8, 8))
    given["query"] = given["query"].abs() + 1
    given["key"][:, :, : (tokens + 1) // 2] = -3e38
    return cast(given, dtype)


def nothing_left(tokens):
    """For the third query; for others something."""
    mask = coin(2, 1, tokens, tokens, device="cpu")
    mask[:, :, 2] = True
    return mask


IN_PIECES = "zigzag, heads in pieces, statistics of all keys"


def cases_of_rings(world):
    cases = [(name, "contiguous", lengths) for name in RINGS for lengths in LENGTHS[world]]
    inferred = ("full", "causal", "table", "mask and sink", "two queries for a key")
    cases += [(name, "contiguous", ALIKE[world]) for name in inferred]
    names = [name for name in RINGS if name != "two queries for a key"]
    return cases + [
        (name, order, ZIGZAG[world]) for order in ("zigzag", IN_PIECES) for name in names
    ]


def run_ring(given, group, case, rank, device):
    """Results and gradients of one rank; without a group, of the whole sequence."""
    _, order, lengths = case
    if order == IN_PIECES:
        with (
            mock.patch.object(context_parallel, "FEWEST_OPERATIONS", 0),
            mock.patch.object(ops.attention, "most_keys_without_output", return_value=0),
        ):
            return run_ring(given, group, (case[0], "zigzag", lengths), rank, device)
    tokens, start, length = sum(lengths), sum(lengths[:rank]), lengths[rank]
    given = cast(given, dtype_on(device, True))
    queries = given["query"].shape[2]

    def part(tensor, dim):
        """Of what each token has one or several of."""
        if group is not None and order == "zigzag":
            return megasoftmax.zigzag_chunk(tensor, len(lengths), dim)[rank].to(device)
        each = tensor.shape[dim] // tokens
        return tensor.narrow(dim, each * start, each * length).to(device, copy=True)

    for name, tensor in given.items():
        if name in (*QKV, "mask", "bias") and tensor.shape[-2] != 1:
            given[name] = part(tensor, -2)
        elif name in ("first", "end") and tensor.shape[-1] != 1:
            given[name] = part(tensor, -1)
        elif isinstance(tensor, Tensor):
            given[name] = tensor.to(device, copy=True)
    inputs = {
        name: tensor.requires_grad_()
        for name, tensor in given.items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    if "table" in given:
        given["bias"] = RelativeBias(given.pop("table"))
    if "end" in given:
        given["visible"] = given.pop("first", None), given.pop("end")
    tensors = [given.pop(name) for name in QKV]
    if group is None:
        given.pop("fused", None)
    elif device != "cpu":
        given["fused"] = True if tensors[0].dtype == torch.bfloat16 else None
    if group is None:
        output, lse = megasoftmax.attention(*tensors, **given, return_lse=True)
    else:
        alike = len(set(lengths)) == 1
        output, lse = megasoftmax.ring_attention(
            *tensors, **given, group=group, order=order, lengths=None if alike else lengths
        )
    assert output.transpose(1, 2).is_contiguous()
    grads = [
        part(cotangent(torch.empty((*r.shape[:2], queries, *r.shape[3:]), dtype=r.dtype), i), 2)
        for i, r in enumerate((output, lse))
    ]
    gradients = torch.autograd.grad((output, lse), list(inputs.values()), grads)
    found = {"output": output, "lse": lse} | dict(zip(inputs, gradients, strict=True))
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def joined(name, order, parts, wanted):
    """What the ranks found, as one process has it."""
    join = torch.cat if order == "contiguous" else megasoftmax.zigzag_cat
    if name == "lse":
        return join(parts, 2)
    if name in ("output", *QKV) or (name == "bias" and wanted.shape[-2] != 1):
        return join(parts, -2)
    return sum(parts[1:], parts[0])


class _Work(TorchDispatchMode):
    """How many pairs of a query and a key the ops of attention are asked for."""

    def __init__(self):
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, function, types, args, kwargs=None):
        if function.namespace == "megasoftmax" and "merge" not in str(function):
            names = (argument.name for argument in function._schema.arguments)
            given = dict(zip(names, args, strict=False))
            queries, keys = (given[name].shape[2] for name in ("query", "key"))
            right = given["window_right"] if given["window_right"] >= 0 else queries
            ends = (i + keys - queries + right + 1 for i in range(queries))
            self.pairs += sum(min(end, keys) for end in ends)
        return function(*args, **(kwargs or {}))


TOKENS_AT_WORK = 8  # of each rank


def work(order, device, group):
    """Of one rank, in one pass, of a causal ring. Without kernels backward runs forward again."""
    tensors = [
        double(1, 1, TOKENS_AT_WORK, 8, seed=i).to(device, torch.bfloat16).requires_grad_()
        for i in range(3)
    ]
    with _Work() as counted:
        output, _ = megasoftmax.ring_attention(
            *tensors, group=group, order=order, causal=True, fused=True
        )
        output.sum().backward()
    return counted.pairs // (2 if device == "cuda" else 3)


def kept_for_backward(device, group):
    """Numbers, where each rank has 4 of the tokens of a sequence."""
    tensors = [double(1, 1, 4, 8, seed=i).to(device).requires_grad_() for i in range(3)]
    with saved_tensors() as kept:
        megasoftmax.ring_attention(*tensors, group=group)
    return sum(each.numel() for each in kept)


def compiled_ring(group):
    """Results and gradients of a function, by itself and compiled, and how many graphs it has."""

    def function(query, key, value):
        output, lse = megasoftmax.ring_attention(
            query.sin(), key, value, group=group, order="zigzag", causal=True
        )
        return output.sin(), lse

    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    found = []
    for call in (function, torch.compile(function, backend=counter)):
        tensors = [each.requires_grad_() for each in of_ring(4).values()]
        results = call(*tensors)
        gradients = torch.autograd.grad([each.sum() for each in results], tensors)
        found.append([each.detach() for each in (*results, *gradients)])
    return *found, counter.frame_count


def in_context_parallel(mesh, rank):
    """How far ring_attention is off, of what torch's context_parallel has cut."""
    whole = of_ring(12)
    wanted = megasoftmax.attention(*whole.values(), causal=True)
    parts = [each.clone() for each in whole.values()]
    with torch_context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3):
        output, _ = megasoftmax.ring_attention(
            *parts, group=mesh.get_group(), order="zigzag", causal=True
        )
    return (output - megasoftmax.zigzag_chunk(wanted, mesh.size(), 2)[rank]).abs().max().item()


def messages(device, group):
    """What is said where a call is refused."""
    query = double(1, 2, 4, 8, seed=0).to(device)
    fewer = query[:, :, :3]
    other = [3] * group.size()
    tensor = query.clone().requires_grad_()
    output, _ = megasoftmax.ring_attention(tensor, query, query, group=group)
    table, mask = RelativeBias(query.new_zeros(2, 7)), query[..., :4] > 0
    shifted = ShiftedBias(query.new_zeros(2, 4, 15))
    in_zigzag = partial(megasoftmax.ring_attention, group=group, order="zigzag")
    sharded = distribute_tensor(query, init_device_mesh(query.device.type, (group.size(),)))
    refused = [
        lambda: megasoftmax.ring_attention(fewer, query, query, group=group, causal=True),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, lengths=other),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, lengths=[4.0, 4]),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, bias=table),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, mask=mask),
        lambda: megasoftmax.ring_attention(query, query, query, group="ring"),
        lambda: megasoftmax.ring_attention(sharded, sharded, sharded, group=group),
        lambda: torch.autograd.grad(output.sum(), tensor, create_graph=True),
        lambda: megasoftmax.softmax_topk(sharded, 2, group=group),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, order="striped"),
        lambda: in_zigzag(fewer, fewer, fewer),
        lambda: in_zigzag(query, query, query, lengths=[4, 2] if group.rank() == 0 else [2, 4]),
        lambda: in_zigzag(fewer, query, query),
        lambda: megasoftmax.ring_attention(query, query, query, group=group, bias=shifted),
    ]
    said = []
    for call in refused:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
            call()
        said.append(str(error.value))
    return said


# Models of transformers

LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LLAMA |= {"max_position_embeddings": 64, "initializer_range": 0.2}
LLAMA |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
STEPS = 4


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="eager"))


def losses(model, tokens):
    """Of a few steps of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def batch():
    return torch.randint(1, 96, (4, 12), generator=torch.Generator().manual_seed(1))


def models(rank, world, device, folder):
    """Losses of a model whose parameters, or whose heads, are sharded over the ranks."""
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    from megasoftmax.integrations import transformers as integration

    integration.register()
    shapes = []
    tokens = batch().to(device)
    whole = llama().to(device)
    model = copy.deepcopy(whole)
    model.set_attn_implementation("megasoftmax")
    mesh = init_device_mesh(torch.device(device).type, (world,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    found = {"sharded parameters": losses(model, tokens[rank::world])}

    # Through attention itself, which on CPUs transformers is otherwise not given
    integration.takes_attention = lambda query, *_: shapes.append(tuple(query.shape)) or True
    if rank == 0:
        whole.save_pretrained(folder / "llama")
    torch.distributed.barrier()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        model = LlamaForCausalLM.from_pretrained(
            folder / "llama", tp_plan="auto", attn_implementation="megasoftmax"
        )
    except ValueError as error:
        if "accelerate" not in str(error):
            raise
        return found
    found["sharded heads"] = losses(model, tokens)
    found["queries"] = shapes[0]
    return found


# Attention of torchtitan 0.3: a copy of its interface


class ScaledDotProductAttention(torch.nn.Module):
    """Of [batch, tokens, heads, dim]."""

    class Config:
        pass

    def forward(self, q, k, v, *, attention_masks=None, enable_gqa=False, **others):
        tensors = (each.transpose(1, 2) for each in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=True, enable_gqa=enable_gqa
        ).transpose(1, 2)


def apply_cp_to_forward(module, mesh):
    original = module.forward

    def forward(*tensors, **options):
        tensors = [DTensor.from_local(each, mesh, [Shard(1)], run_check=False) for each in tensors]
        return original(*tensors, **options)

    module.forward = forward


def inner_attention():
    """The class of the guide."""
    guide = (Path(__file__).parents[1] / "docs" / "guides" / "distributed.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "class InnerAttention" in block)
    module = SimpleNamespace(ScaledDotProductAttention=ScaledDotProductAttention)
    names = {"__name__": "guide"}
    with mock.patch.dict(sys.modules, {"torchtitan.models.common.attention": module}):
        exec(code, names)
    return names["InnerAttention"]()


def titan_attention(inner_attention, mesh=None):
    """Output, and gradients of a sum; with a mesh, of this rank's part of the sequence."""
    tensors = [each.transpose(1, 2) for each in of_ring(12, dims=(8, 8)).values()]
    if mesh is not None:
        rank = mesh.get_local_rank()
        tensors = [megasoftmax.zigzag_chunk(each, mesh.size(), 1)[rank] for each in tensors]
    tensors = [each.requires_grad_() for each in tensors]
    output = inner_attention(*tensors, attention_masks=None, scale=None, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), tensors)]


# The processes


def worker(rank, world, device, folder):
    group = torch.distributed.group.WORLD
    mesh = init_device_mesh(torch.device(device).type, (world,))
    found = {
        "splits": {name: run_split(split, mesh) for name, split in SPLITS.items()},
        "rings": {
            case: run_ring(RINGS[case[0]](sum(case[2])), group, case, rank, device)
            for case in cases_of_rings(world)
        },
        "work": {order: work(order, device, group) for order in ("contiguous", "zigzag")},
        "kept": kept_for_backward(device, group),
        "messages": messages(device, group),
    }
    if device == "cpu":
        found["context_parallel"] = in_context_parallel(mesh, rank)
        inner = inner_attention()
        apply_cp_to_forward(inner, mesh)
        found["titan"] = titan_attention(inner, mesh)
        if world == 2:
            found["compiled ring"] = compiled_ring(group)
    if world == 2:
        found["compiled"] = {
            name: run_split(split, mesh, compiled=True)
            for name, split in SPLITS.items()
            if split.compiles
        }
        try:
            found["models"] = models(rank, world, device, folder)
        except ModuleNotFoundError:
            found["models"] = None
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return processes.spawned_once(worker, tmp_path_factory)


def check_split(name, found, device):
    split = SPLITS[name]
    dtype = dtype_on(device, "query" in split.tensors)
    wanted = whole_split(split, device)
    assert found["values"].keys() == wanted.keys()
    for what, value in wanted.items():
        check(f"{name}: {what}", found["values"][what], value, dtype)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SPLITS)
def test_dtensors(ranks, world, name):
    for found in ranks(world):
        check_split(name, found["splits"][name], "cpu")


@pytest.mark.parametrize("name", SPLITS)
def test_where_results_are(ranks, name):
    split = SPLITS[name]
    for rank in ranks(2):
        found = rank["splits"][name]
        actual = {what.removeprefix("gradient of "): p for what, p in found["placements"].items()}
        assert {what: actual[what] for what in split.found} == split.found
        assert (found["sent"] > 0) == split.sends


@pytest.mark.parametrize("name", [name for name, split in SPLITS.items() if split.compiles])
def test_compiled_dtensors(ranks, name):
    for found in ranks(2):
        check_split(name, found["compiled"][name], "cpu")


def check_ring(case, ranks, device):
    name, order, lengths = case
    tokens = sum(lengths)
    whole = cast(RINGS[name](tokens), dtype_on(device, True))
    doubled = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in whole.items()
    }
    wanted = run_ring(doubled, None, (name, order, (tokens,)), 0, "cpu")
    found = [rank["rings"][case] for rank in ranks]
    assert found[0].keys() == wanted.keys()
    for what, value in wanted.items():
        actual = joined(what, order, [each[what] for each in found], value)
        check(f"{name}: {what}", actual, value, whole["query"].dtype)


@pytest.mark.parametrize(
    "case",
    [case for world in WORLDS for case in cases_of_rings(world)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_ring(ranks, case):
    check_ring(case, ranks(len(case[2])), "cpu")


def check_work(ranks):
    """What causality leaves is computed once, and nothing else."""
    tokens = TOKENS_AT_WORK * len(ranks)
    in_zigzag = [rank["work"]["zigzag"] for rank in ranks]
    contiguous = [rank["work"]["contiguous"] for rank in ranks]
    assert sum(in_zigzag) == sum(contiguous) == tokens * (tokens + 1) // 2
    assert max(in_zigzag) == min(in_zigzag)
    assert max(contiguous) > len(ranks) * min(contiguous)


@pytest.mark.parametrize("world", WORLDS)
def test_zigzag_gives_all_ranks_the_same_work(ranks, world):
    check_work(ranks(world))


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_ring_keeps(ranks, world):
    """Of other ranks nothing; three numbers for each of the 4 queries."""
    for rank in ranks(world):
        assert rank["kept"] == 4 * (4 * 8) + 3 * 4


def test_messages(ranks):
    for number, rank in enumerate(ranks(2)):
        lengths = f"lengths: expected 2 integers from 0 on, 4 at {number}"
        queries = (
            "query: expected as many queries as keys, 4, with causal, window, a RelativeBias or "
            "order='zigzag'"
        )
        order = "order: expected as many keys on each rank, an even number, with 'zigzag'"
        assert [message.split(", got")[0] for message in rank["messages"]] == [
            queries,
            lengths,
            lengths,
            "bias.table: expected [..., heads, 15] that broadcasts to (1, 2, 15)",
            "mask: expected a shape that broadcasts to (1, 2, 4, 8)",
            "group: expected a process group",
            "query: expected the part of this rank, to_local()",
            "ring_attention: expected to be differentiated once",
            "group: expected None for a DTensor",
            "order: expected 'contiguous' or 'zigzag'",
            order,
            order,
            queries,
            "bias: expected a tensor or a RelativeBias with one table for all queries",
        ]


def test_compiled_code_leaves_its_graph_for_a_ring(ranks):
    for rank in ranks(2):
        eager, compiled, graphs = rank["compiled ring"]
        for pair in zip(compiled, eager, strict=True):
            torch.testing.assert_close(*pair)
        assert graphs == 2  # before the call and after it


@pytest.mark.parametrize("world", WORLDS)
def test_zigzag_is_the_order_of_torchs_context_parallel(ranks, world):
    assert all(rank["context_parallel"] < 1e-10 for rank in ranks(world))


@pytest.mark.parametrize("world", WORLDS)
def test_attention_of_torchtitan_in_a_ring(ranks, world):
    wanted = titan_attention(ScaledDotProductAttention())
    parts = zip(*(rank["titan"] for rank in ranks(world)), strict=True)
    found = [megasoftmax.zigzag_cat(each, 1) for each in parts]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(titan_attention(inner_attention()), wanted)


def test_torchtitans_masks_are_refused():
    with pytest.raises(ValueError, match="attention_masks: expected None"):
        inner_attention()(*torch.zeros(3, 1, 2, 1, 4), attention_masks=())


def lost_rank(rank, folder):
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=5),
    )
    tensors = [each.requires_grad_() for each in of_ring(4).values()]
    call = partial(megasoftmax.ring_attention, *tensors, group=torch.distributed.group.WORLD)
    output, _ = call()
    if rank == 1:
        os._exit(0)  # as if it were killed
    with pytest.raises(RuntimeError, match=r"gloo|Connection|[Tt]imed out"):
        output.sum().backward()
    with pytest.raises(RuntimeError, match=r"gloo|Connection|[Tt]imed out"):
        call()
    Path(folder, "done").touch()
    os._exit(0)  # the group cannot be destroyed in order


def test_a_lost_rank_ends_in_an_error_of_the_backend(tmp_path):
    processes.start(lost_rank, (str(tmp_path),), 2)
    assert (tmp_path / "done").exists()


@pytest.fixture(scope="module")
def of_models(ranks):
    pytest.importorskip("transformers")
    return [rank["models"] for rank in ranks(2)]


@pytest.fixture(scope="module")
def of_one_process():
    pytest.importorskip("transformers")
    return losses(llama(), batch())


def test_sharded_parameters(of_models, of_one_process):
    """Each rank has half of the batch: the mean of their losses is that of the batch."""
    found = [rank["sharded parameters"] for rank in of_models]
    mean = [sum(step) / 2 for step in zip(*found, strict=True)]
    assert mean == pytest.approx(of_one_process, rel=1e-5)


def test_sharded_heads(of_models, of_one_process):
    if any("sharded heads" not in rank for rank in of_models):
        pytest.skip("transformers asks for accelerate where it shards heads")
    for rank in of_models:
        assert rank["queries"] == (4, 2, 12, 8)  # 2 of 4 heads
        assert rank["sharded heads"] == pytest.approx(of_one_process, rel=1e-5)


# On one process


@pytest.fixture
def eight_ranks():
    """Of which there is one: what it sends is lost, and what it receives is noise."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    torch.distributed.destroy_process_group()


class _Exchange(context_parallel._Exchange):
    """Counts what was received, by all of its kind, and is still there."""

    received_by_all: ClassVar[list[weakref.ref[Tensor]]] = []
    counts: ClassVar[list[int]] = []

    def __init__(self, *args):
        super().__init__(*args)
        self.received_by_all.extend(map(weakref.ref, self.received))
        self.counts.append(sum(each() is not None for each in self.received_by_all))


def test_what_a_ring_holds(eight_ranks, monkeypatch):
    """Keys and values of two ranks, and in the backward pass gradients of two as well."""
    monkeypatch.setattr(context_parallel, "_Exchange", _Exchange)
    tensors = [double(1, 1, 4, 8, seed=i).requires_grad_() for i in range(3)]
    output, _ = megasoftmax.ring_attention(*tensors, group=torch.distributed.group.WORLD)
    assert max(_Exchange.counts) == 4
    output.sum().backward()
    assert max(_Exchange.counts) == 8


def test_only_heads_of_keys_travel(eight_ranks, monkeypatch):
    """Keys and values 7 times forward; backward they and their gradients."""
    calls = record_calls(monkeypatch, "all_to_all_single", torch.distributed)
    query, key, value = (each.requires_grad_() for each in of_ring(4, heads=(8, 2)).values())
    output, _ = megasoftmax.ring_attention(query, key, value, group=torch.distributed.group.WORLD)
    of_keys = key.numel() + value.numel()
    assert sum(sent.numel() for (_, sent, *_), _ in calls) == 7 * of_keys
    calls.clear()
    output.sum().backward()
    assert sum(sent.numel() for (_, sent, *_), _ in calls) == 2 * 7 * of_keys


@pytest.mark.parametrize(
    ("sizes", "heads", "of_query", "of_key", "of_output"),
    [
        ((2, 4), (8, 8), (0, 1), (0, 1), (0, 1)),
        ((2, 4), (8, 4), (0, 1), (0, 1), (0, 1)),
        ((2, 4), (8, 4), (0, 1), (0, None), (0, 1)),
        ((2, 4), (8, 1), (0, 1), (0, None), (0, 1)),
        ((2, 4), (8, 2), (0, 1), (0, 1), (0, None)),  # fewer heads of keys than devices
        ((4, 2), (12, 6), (1, 0), (1, 0), (None, 0)),  # 6 do not divide by 4
        ((4, 2), (12, 6), (0, 1), (0, 1), (0, 1)),
        ((4, 2), (16, 8), (1, 1), (1, 1), (1, 1)),
        ((4, 2), (16, 4), (1, 1), (1, 1), (None, None)),  # neither by 4 * 2
        ((4, 2), (16, 4), (1, None), (None, None), (1, None)),
        ((4, 2), (16, 4), (1, 0), (0, 1), (0, None)),  # no agreement about heads
        ((8,), (12, 12), (1,), (1,), (1,)),  # 2, 2, 2, 2, 2, 2, 0, 0
    ],
)
def test_heads_that_share_keys_stay_together(
    eight_ranks, sizes, heads, of_query, of_key, of_output
):
    mesh = init_device_mesh("cpu", sizes)

    def on_mesh(heads, dims):
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return distribute_tensor(torch.zeros(8, heads, 3, 4), mesh, placements)

    key = on_mesh(heads[1], of_key)
    output = megasoftmax.attention(on_mesh(heads[0], of_query), key, key)
    found = [None if each.is_replicate() else each.dim for each in output.placements]
    assert found == list(of_output)


@pytest.mark.parametrize("sizes", [(4, 9), (0, 13), (5, 5, 3)])
def test_merge(sizes):
    query, key, value = (double(2, 3, n, 4, seed=i) for i, n in enumerate((5, 13, 13)))
    mask = coin(2, 1, 5, 13, device="cpu")
    mask[:, :, 1], mask[:, :, 2, :4] = True, True  # nothing at all; nothing in the first part
    inputs = [each.requires_grad_() for each in (query, key, value)]

    def attention(start, size, **arguments):
        parts = (each.narrow(-2, start, size) for each in (key, value))
        part = mask.narrow(-1, start, size)
        return megasoftmax.attention(query, *parts, mask=part, return_lse=True, **arguments)

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    for sink in (None, 0.3):
        sinks = [sink, *[None] * (len(sizes) - 1)]
        parts = [
            attention(start, size, sink=each)
            for start, size, each in zip(starts, sizes, sinks, strict=True)
        ]
        merged = megasoftmax.merge_attention(*zip(*parts, strict=True))
        wanted = attention(0, 13, sink=sink)
        grads = [cotangent(each, i) for i, each in enumerate(wanted)]
        both = [
            (*results, *torch.autograd.grad(results, inputs, grads, retain_graph=True))
            for results in (merged, wanted)
        ]
        for what, *values in zip(("output", "lse", "query", "key", "value"), *both, strict=True):
            check(what, *values, torch.float64)


def test_merge_of_a_part_that_overflows():
    given = overflowing(12, torch.float32)
    inputs = [each.requires_grad_() for each in given.values()]
    query, *of_keys = inputs
    parts = [
        megasoftmax.attention(query, *part, sink=sink, return_lse=True)
        for part, sink in zip(
            zip(*(each.chunk(2, 2) for each in of_keys), strict=True), (-INF, None), strict=True
        )
    ]
    merged = megasoftmax.merge_attention(*zip(*parts, strict=True))
    wanted = megasoftmax.attention(*inputs, return_lse=True)
    assert parts[0][1].eq(-INF).all()
    grads = [cotangent(each, i) for i, each in enumerate(wanted)]
    for results in zip(merged, wanted, strict=True):
        check("output", *results, torch.float32)
    found = [torch.autograd.grad(each, inputs, grads) for each in (merged, wanted)]
    for gradients in zip(*found, strict=True):
        check("gradient", *gradients, torch.float32)


def test_merge_of_far_apart_and_of_nothing():
    outputs = [torch.full((1, 3, 2), number) for number in (1.0, 2.0, 3.0)]
    outputs[2][:, 1:] = torch.nan  # which counts for nothing
    lses = [
        torch.tensor([numbers]).requires_grad_()
        for numbers in ([1e4, -INF, -1e4], [0.0, -INF, -1e4], [1e4, -INF, -INF])
    ]
    output, lse = megasoftmax.merge_attention(outputs, lses)
    assert output[0, :, 0].tolist() == [2.0, 0.0, 1.5]
    torch.testing.assert_close(lse, torch.tensor([[1e4 + 0.6931, -INF, -1e4 + 0.6931]]))
    gradients = torch.autograd.grad((output.sum(), lse.sum()), lses)
    # The weight, times 1 and over two columns the distance of the own output from the merged one
    wanted = ([0.5 * (1 - 2), 0, 0.5 * (1 - 1)], [0, 0, 0.5 * (1 + 1)], [0.5 * (1 + 2), 0, 0])
    for gradient, numbers in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, torch.tensor([numbers], dtype=torch.float32))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_both_ends_of_a_ring_agree(world, monkeypatch):
    """Whatever is sent is received, in the same order: a rank and the next agree on each call."""
    calls = []

    def all_to_all(received, sent, by, to, *, group, async_op):
        assert (received.numel(), sent.numel()) == (sum(by), sum(to))
        calls.append((by, to))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch.distributed, "all_to_all_single", all_to_all)
    for lengths, own_last, pieces in itertools.product(
        itertools.product((0, 1, 5), repeat=world), (False, True), (1, 3)
    ):
        ranks = []
        for rank in range(world):
            calls.clear()
            group = SimpleNamespace(rank=lambda rank=rank: rank)
            ring = context_parallel.Ring(group, lengths, zigzag=False)
            keys = torch.zeros(2, 3, lengths[rank], 4)
            part = SimpleNamespace(key=keys, value=keys[..., :1])
            tour = context_parallel._tour(ring, [part] * pieces, own_last=own_last)
            found = [(piece, owner) for piece, owner, _ in tour]
            order = [(rank - step) % world for step in range(world)]
            orders = [order] * (pieces - 1) + [order[own_last:] + order[:own_last]]
            assert found == [(piece, owner) for piece in range(pieces) for owner in orders[piece]]
            ranks.append([*calls])
        for rank, calls_of_rank in enumerate(ranks):
            following = (rank + 1) % world
            others = {*range(world)} - {following}
            for (_, to), (by, _) in zip(calls_of_rank, ranks[following], strict=True):
                assert to[following] == by[rank]
                assert not any(to[other] for other in others)


def test_ring_of_one(group_of_one):
    for case in cases_of_rings(1):
        name, _, (tokens,) = case
        if "through the ops" not in name:
            found = run_ring(RINGS[name](tokens), group_of_one, case, 0, "cpu")
            check_ring(case, [{"rings": {case: found}}], "cpu")


def test_zigzag_order():
    """Ranks 0, 1 and 2 hold parts 0 and 5, 1 and 4, 2 and 3; a token has any number of entries."""
    ids = torch.arange(12)
    parts = megasoftmax.zigzag_chunk(ids, 3, 0)
    assert [part.tolist() for part in parts] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert torch.equal(megasoftmax.zigzag_cat(parts, -1), ids)
    hidden = double(2, 12, 5, seed=0).requires_grad_()
    joined = megasoftmax.zigzag_cat(megasoftmax.zigzag_chunk(hidden, 2, 1), 1)
    assert torch.equal(joined, hidden)
    (gradient,) = torch.autograd.grad(joined.sin().sum(), hidden)
    assert torch.equal(gradient, hidden.cos())
    nothing = megasoftmax.zigzag_chunk(ids[:0], 2, 0)
    assert [part.shape for part in (*nothing, megasoftmax.zigzag_cat(nothing, 0))] == [(0,)] * 3


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


IN_16_BITS = zeros(2, 3, dtype=torch.bfloat16)
chunk, cat, merge = megasoftmax.zigzag_chunk, megasoftmax.zigzag_cat, megasoftmax.merge_attention


WRONG = {
    ValueError: [
        (
            lambda x: chunk(x, 4, 1),
            "tensor: expected a multiple of 2 * ranks, 8, in dimension 1, got shape (2, 12); "
            "pad the sequence",
        ),
        (lambda x: chunk(x, 0, 1), "ranks: expected an integer from 1 on, got 0"),
        (lambda x: chunk(x, 2, 2), "dim: expected a dimension of tensor, (2, 12), got 2"),
        (lambda x: cat([x], -3), "dim: expected a dimension of tensors[0], (2, 12), got -3"),
        (lambda x: cat([], 0), "tensors: expected at least one, got none"),
        (
            lambda x: cat([x[:, 1:]], 1),
            "tensors[0]: expected an even size of dimension 1, got shape (2, 11)",
        ),
        (
            lambda x: cat([x, x[:, 2:]], 1),
            "tensors[1]: expected shape (2, 12), as tensors[0], got (2, 10)",
        ),
        (lambda x: merge([], []), "outputs: expected at least one, got none"),
        (lambda x: merge([x], []), "lses: expected at least one, got none"),
        (
            lambda x: merge([zeros(2, 3), zeros(3, 3)], [zeros(2), zeros(3)]),
            "outputs[1]: expected shape (2, 3), as outputs[0], got (3, 3)",
        ),
        (
            lambda x: merge([zeros(2, 3)], [zeros(3)]),
            "lses[0]: expected shape (2,), that of the outputs without the last dimension, "
            "got (3,)",
        ),
    ],
    TypeError: [
        (lambda x: chunk(x, 2.0, 1), "ranks: expected an integer from 1 on, got float"),
        (
            lambda x: merge([zeros(2, 3).long()], [zeros(2)]),
            "outputs[0]: expected float16, bfloat16, float32 or float64, got torch.int64",
        ),
        (
            lambda x: merge([zeros(2, 3), IN_16_BITS], [zeros(2), zeros(2)]),
            "outputs[1]: expected torch.float32, as outputs[0], got torch.bfloat16",
        ),
        (
            lambda x: merge([IN_16_BITS], [IN_16_BITS[:, 0]]),
            "lses[0]: expected float32 or float64, got torch.bfloat16",
        ),
        (
            lambda x: merge([zeros(2, 3), zeros(2, 3)], [zeros(2), zeros(2).double()]),
            "lses[1]: expected torch.float32, as lses[0], got torch.float64",
        ),
    ],
}


@by_error(WRONG)
def test_wrong_arguments(error, call, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(zeros(2, 12))


def test_ring_under_autocast(group_of_one):
    """As attention: mixed types become that of autocast, gradients have those of the inputs."""
    dtypes = (torch.float32, torch.float32, torch.bfloat16)
    inputs = [
        each.to(dtype).requires_grad_()
        for each, dtype in zip(of_ring(TOKENS).values(), dtypes, strict=True)
    ]
    with torch.autocast("cpu", torch.bfloat16):
        output, lse = megasoftmax.ring_attention(*inputs, group=group_of_one, causal=True)
        wanted = megasoftmax.attention(*inputs, causal=True)
    assert output.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(output, wanted)
    found = [torch.autograd.grad(each.float().square().sum(), inputs) for each in (output, wanted)]
    for gradient, other, dtype in zip(*found, dtypes, strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, other)


def test_forward_mode_of_rings_is_refused(group_of_one):
    query, key, value = of_ring(TOKENS).values()

    def function(query):
        return megasoftmax.ring_attention(query, key, value, group=group_of_one)[0]

    message = r"^ring_attention: .* megasoftmax\.attention has forward-mode derivatives"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(function, (query,), (query,))


class _Counted(TorchDispatchMode):
    """How often each op of megasoftmax runs."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args, kwargs=None):
        if function.namespace == "megasoftmax":
            self.calls[function.__name__.removesuffix(".default")] += 1
        return function(*args, **(kwargs or {}))


OPS = ("attention_forward", "softmax_forward", "softmax_topk_forward")


def layer(query, key, sink):
    """Through every family of ops."""
    output = megasoftmax.attention(query, key, key, causal=True, sink=sink, fused=True)
    p = megasoftmax.softmax(output, scale=2.0, sink=sink, fused=True)
    values, _ = megasoftmax.softmax_topk(p.sin(), 3, fused=True)
    return values.float().square().sum()


def gradients_of_layer(device, run):
    shapes = ((2, 4, 9, 16), (2, 2, 9, 16), (4,))
    tensors = drawn(*shapes, device=device, dtype=torch.bfloat16)
    run(layer, *tensors).backward()
    return [tensor.grad for tensor in tensors]


@pytest.fixture
def with_ops(monkeypatch, device):
    """fused=True runs through the ops; the same bits every time."""
    if device == "cpu":
        processes.let_ops_serve_cpus(monkeypatch.setattr)
    with deterministic():
        yield


@pytest.mark.parametrize(
    ("use_reentrant", "kept"),
    [(True, ()), (False, ()), *((False, kept) for kept in (OPS, OPS[:1], OPS[1:]))],
)
def test_checkpoint(device, with_ops, use_reentrant, kept):
    """What is kept is not computed again."""
    wanted = gradients_of_layer(device, lambda function, *tensors: function(*tensors))
    options = {"use_reentrant": use_reentrant}
    if kept:
        listed = [getattr(torch.ops.megasoftmax, name).default for name in kept]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, listed)
    with _Counted() as ops:
        found = gradients_of_layer(device, partial(checkpoint, **options))
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert {name: ops.calls[name] for name in OPS} == {n: 1 if n in kept else 2 for n in OPS}


# On several GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch has no NCCL")
@pytest.mark.parametrize("world", [2, 3])
def test_on_several_gpus(world, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    ranks = processes.spawn(worker, world, "cuda", tmp_path)
    for rank in ranks:
        for name in SPLITS:
            check_split(name, rank["splits"][name], "cuda")
    for case in cases_of_rings(world):
        check_ring(case, ranks, "cuda")
    check_work(ranks)
    if ranks[0].get("models") is not None:
        wanted = losses(llama().cuda(), batch().cuda())
        found = [rank["models"] for rank in ranks]
        parameters = [each["sharded parameters"] for each in found]
        mean = [sum(step) / 2 for step in zip(*parameters, strict=True)]
        assert mean == pytest.approx(wanted, rel=1e-3)
        for each in found:
            assert each.get("sharded heads", wanted) == pytest.approx(wanted, rel=1e-3)
