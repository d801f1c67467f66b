"""What stands beside a tensor in memory has no influence on results, and is not written.

Every tensor that an operator is given lies in a larger buffer between canaries, or at its end. A
canary is NaN, True in a mask, an absurd index. Results must have the bits of the same call whose
canaries are zeros, since tensors that lie otherwise may take another kernel; and every buffer must
have the bits that it had before.
"""

from typing import Any

import pytest
import torch
from inputs import DTYPES, PLAIN_TOPK, coin, normal
from torch import Tensor

OPS = torch.ops.megasoftmax
LENGTHS = (1, 7, 8, 9, 33, 257, 2049)
BATCHES, HEADS, QUERIES = 2, 2, 3
CANARIES = 64  # elements before and behind a tensor
CANARY = {torch.bool: True, torch.int32: 2**30, torch.int64: 2**62}  # of other types: NaN

# Elements before the first one, from a multiple of 16 bytes on, between rows, and behind the last.
LAYOUTS = {
    "aligned": (0, 0, CANARIES),
    "misaligned": (1, 0, CANARIES),
    "aligned rows": (0, 8, CANARIES),
    "odd rows": (1, 3, CANARIES),
    "end of storage": (0, 0, 0),
}
CONTIGUOUS = ("aligned", "misaligned", "end of storage")


def place(values, layout, has_canaries):
    """The same values in a buffer, and the buffer."""
    start, gap, behind = LAYOUTS[layout]
    columns = values.shape[-1]
    pitch = columns + gap
    filler = CANARY.get(values.dtype, torch.nan) if has_canaries else 0
    size = CANARIES + start + values.numel() // columns * pitch + behind
    buffer = torch.full((size,), filler, dtype=values.dtype, device=values.device)
    steps = values.contiguous().stride()[:-1]
    strides = [*(step // columns * pitch for step in steps), 1]
    placed = buffer.as_strided(values.shape, strides, CANARIES + start)
    return placed.copy_(values), buffer


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def results(call, layout, has_canaries):
    """What the operator returns; none of its arguments, nor what is beside them, may change."""
    operator, arguments = call
    given, buffers = [], []
    for argument in arguments:
        if isinstance(argument, Tensor):
            argument, buffer = place(argument, layout, has_canaries)
            buffers.append(buffer)
        given.append(argument)
    before = [buffer.clone() for buffer in buffers]
    returned = operator(*given)
    for buffer, unchanged in zip(buffers, before, strict=True):
        assert torch.equal(bits(buffer), bits(unchanged))
    return [returned] if isinstance(returned, Tensor) else list(returned)


def check(call, layouts=tuple(LAYOUTS), what=""):
    """Plain torch, on a CPU, knows no alignment: the last two layouts do."""
    first, *_ = call[1]
    for layout in layouts if first.is_cuda else layouts[-2:]:
        poisoned = results(call, layout, has_canaries=True)
        # At the end of the storage, what is read in another way is the same.
        clean = results(call, "aligned" if layout == "end of storage" else layout, False)
        for number, pair in enumerate(zip(poisoned, clean, strict=True)):
            message = f"result {number} of {what}, {layout}"
            assert torch.equal(*map(bits, pair)), message


def lengths_on(device):
    """Plain torch, on a CPU, is the same for all."""
    return LENGTHS if device == "cuda" else (1, 8, 9)


# Shapes of a mask or bias for scores of that shape

SHAPES = {
    "full": lambda shape: shape,
    "keys": lambda shape: (shape[0], *(1 for _ in shape[1:-1]), shape[-1]),
    "rows": lambda shape: (*(1 for _ in shape[:-2]), shape[-2], 1),
}
# What a call has beside its scores: shapes of a mask and a bias, and whether a bias is float32.
COMPANIONS = {
    "nothing": (None, None, False),
    "mask": ("full", None, False),
    "mask of keys": ("keys", None, False),
    "mask of rows": ("rows", None, False),
    "bias": (None, "full", False),
    "bias of keys": (None, "keys", True),
    "bias of rows": (None, "rows", False),
    "mask and bias": ("keys", "full", True),
}

gpu = pytest.mark.gpu
companions = pytest.mark.parametrize("beside", COMPANIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def mask_and_bias(beside, shape, dtype, device):
    of_mask, of_bias, is_float = COMPANIONS[beside]
    mask = coin(*SHAPES[of_mask](shape), device=device) if of_mask else None
    bias_dtype = torch.float32 if is_float else dtype
    bias = normal(*SHAPES[of_bias](shape), device=device, dtype=bias_dtype) if of_bias else None
    return mask, bias


def bounds(keys, device, queries=QUERIES):
    """Ranges, some of them empty, and some that reach beyond the keys."""
    generator = torch.Generator().manual_seed(2)
    shape = (BATCHES, 1, queries)
    first = torch.randint(-2, keys + 2, shape, generator=generator)
    length = torch.randint(-2, keys + 2, shape, generator=generator)
    return first.int().to(device), (first + length).int().to(device)


# Rows and columns


@companions
@dtypes
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 2)], ids=str)
@pytest.mark.parametrize("op", ["forward", "backward", "dropout_backward"])
def test_softmax(op, beside, dtype, window, device):
    for length in lengths_on(device):
        shape = (BATCHES, HEADS, QUERIES, length)
        mask, bias = mask_and_bias(beside, shape, dtype, device)
        scores, gradient = (normal(*shape, device=device, dtype=dtype, seed=i) for i in (0, 1))
        lse, of_lse = (normal(*shape[:-1], device=device, seed=seed) for seed in (2, 3))
        visible = bounds(length, device) if beside == "mask" else (None, None)
        limits = (False, *window, *visible, normal(HEADS, device=device), None, dtype)
        drop = (0.3, torch.tensor([length], device=device))
        softcap = 2.0 if length % 3 == 0 else 0.0
        has_gradient = bias is not None and bias.shape[-1] == length
        arguments: tuple[Any, ...]
        if op == "forward":
            drop = drop if length % 2 else (0.0, None)
            arguments = (scores, -0.7, softcap, mask, bias, *limits, True, *drop)
        elif op == "backward":
            probabilities = scores.float().softmax(-1).to(dtype)
            bias = bias if has_gradient else None
            given = (gradient, probabilities, of_lse, lse, 0.7, bias)
            arguments = (*given, *limits, has_gradient, True)
        else:
            given = (gradient, scores, of_lse, lse, -0.7, softcap, mask, bias)
            arguments = (*given, *limits, has_gradient, True, *drop)
        check((getattr(OPS, f"softmax_{op}"), arguments), what=f"{length} keys")


@dtypes
@pytest.mark.parametrize("inner", [3, 6, 16])
def test_softmax_of_columns(inner, dtype, device):
    for length in lengths_on(device):
        shape = (BATCHES, length, inner)
        scores = normal(*shape, device=device, dtype=dtype)
        forward = (OPS.softmax_columns_forward, (scores, -0.7, dtype, True))
        gradient = normal(*shape, device=device, dtype=dtype, seed=1)
        of_lse = normal(BATCHES, inner, device=device)
        probabilities = scores.softmax(1)
        arguments = (gradient, probabilities, of_lse, 0.7, dtype)
        backward = (OPS.softmax_columns_backward, arguments)
        for call in (forward, backward):
            check(call, CONTIGUOUS, f"{length} rows")


# Softmax and top-k


@companions
@dtypes
@pytest.mark.parametrize("k", [1, 8, 200])
def test_topk(beside, dtype, k, device):
    for length in lengths_on(device):
        shape = (BATCHES, QUERIES, length)
        logits = normal(*shape, device=device, dtype=dtype)
        mask, bias = mask_and_bias(beside, shape, dtype, device)
        options = (0.7, 2.0 if length % 3 == 0 else 0.0, mask, bias, True)
        arguments = (logits, min(k, length), *options, dtype, False, *PLAIN_TOPK)
        check((OPS.softmax_topk_forward, arguments), what=f"forward of {length} logits")

        probabilities, indices, statistics = OPS.softmax_topk_forward(*arguments)
        gradient = normal(*probabilities.shape, device=device, dtype=dtype, seed=1)
        of_lse = normal(*shape[:-1], device=device, seed=2)
        selected = (gradient, probabilities, indices, of_lse, logits, statistics)
        backward = (OPS.softmax_topk_backward, (*selected, *options, False, dtype, None, False))
        check(backward, what=f"backward of {length} logits")


# Attention

ATTENTION_BIASES = {
    "dense": lambda queries, keys: (BATCHES, HEADS, queries, keys),
    "shared": lambda queries, keys: (1, HEADS, queries, keys),
    "keys": lambda queries, keys: (BATCHES, 1, 1, keys),
    "queries": lambda queries, keys: (1, HEADS, queries, 1),
    "relative": lambda queries, keys: (1, HEADS, queries + keys - 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, *(pytest.param(dim, marks=gpu) for dim in (64, 80, 256))])
@pytest.mark.parametrize("is_float", [False, True], ids=["same", "float32"])
@pytest.mark.parametrize("of_bias", [None, *ATTENTION_BIASES])
def test_attention(of_bias, is_float, dim, dtype, device):
    """Few queries take kernels of their own; the keys of 2049 are split."""
    if dtype == torch.float32 and dim > 128:
        pytest.skip("no kernels")
    for number, keys in enumerate(lengths_on(device)):
        for queries in (1, 33):
            query = normal(BATCHES, HEADS, queries, dim, device=device, dtype=dtype)
            key, value, gradient = (
                normal(BATCHES, heads, length, dim, device=device, dtype=dtype, seed=seed)
                for seed, (heads, length) in enumerate(((1, keys), (1, keys), (HEADS, queries)), 1)
            )
            bias = mask = None
            if of_bias is not None:
                shape = ATTENTION_BIASES[of_bias](queries, keys)
                bias_dtype = torch.float32 if is_float else dtype
                bias = normal(*shape, device=device, dtype=bias_dtype)
            if number % 2:
                mask = coin(BATCHES, 1, 1 if number % 3 else queries, keys, device=device)
            sink = normal(HEADS, device=device)
            window = (-1, 0) if number % 3 == 1 else (-1, -1)
            visible = bounds(keys, device, queries) if number % 4 == 2 else (None, None)
            softcap = 2.0 if number % 5 == 4 else 0.0
            drop = (0.0, None)
            if number % 4 in (1, 2):
                drop = (0.3, torch.tensor([number], device=device))
            options = (bias, mask, 0.3, softcap, False, *window, sink, None, of_bias == "relative")
            options = (*options, *visible, None, 1, *drop, number % 2 == 0)
            what = f"{queries} queries of {keys} keys"
            check((OPS.attention_forward, (query, key, value, *options)), what=what)

            output, statistics = OPS.attention_forward(query, key, value, *options)
            of_lse = normal(*query.shape[:-1], device=device, seed=4)
            # Within one tile of keys sums have one order in any case.
            deterministic = keys > 32
            saved = (gradient, of_lse, query, key, value, output, statistics)
            asked = (bias is not None, True, deterministic)
            check((OPS.attention_backward, (*saved, *options, *asked)), what=f"gradients: {what}")
