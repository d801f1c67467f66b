"""`visible`, megasoftmax.ranges, attention_varlen and TileMask, against masks and plain loops."""

import functools
import itertools
import math

import op_checks
import oracle
import oracle_attention
import pytest
import torch
from inputs import (
    attention_on,
    bits_equal,
    coin,
    deterministic,
    drawn,
    dtypes_on,
    normal,
    on_all_kernels,
    tensors,
)
from op_families import dtype_of_attention
from torch._dynamo.testing import CompileCounterWithBackend

import megasoftmax
from megasoftmax import RelativeBias, ShiftedBias, TileMask, biases, ranges
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.limits import kernel_limits

INF, NAN = torch.inf, torch.nan


def check_attention(query, key, value, **arguments):
    function = attention_on(query.device.type, query.dtype)
    return oracle_attention.check(function, query, key, value, **arguments)


def check_softmax(scores, **arguments):
    # Leading dimensions of a range of fewer dimensions do not merge.
    fused = True if scores.is_cuda and scores.dim() < 5 else None
    return oracle.check(functools.partial(megasoftmax.softmax, fused=fused), scores, **arguments)


# Ranges of all kinds, for [batch, heads, queries] and a number of keys


def integers(low, high, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator)


def random(b, h, m, n):
    """Some are empty, or end before they begin, and some reach beyond the keys."""
    first = integers(-n // 2 - 1, n + 1, (b, h, m), seed=1)
    return first, first + integers(-2, n + 2, (b, h, m), seed=2)


def narrow(b, h, m, n):
    """A few keys for each query, anywhere."""
    first = integers(0, max(n - 1, 0), (1, h, m), seed=3)
    return first, first + integers(0, 5, (1, h, m), seed=4)


def lengths_of_documents(tokens):
    """Some are empty, and one token is left over."""
    found = []
    for length in itertools.cycle((1, 0, 30, 64, 3, 129)):
        if sum(found) + length >= tokens:
            return found
        found.append(length)
    return found


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def packed(b, h, m, n):
    first, end = ranges.packed(offsets(lengths_of_documents(n)), n)
    where = torch.arange(m) * n // max(m, 1)
    return first[..., where], end[..., where]


def padded(b, h, m, n):
    """Left and right."""
    return ranges.padding(torch.stack([torch.arange(n) >= n // 3, torch.arange(n) <= n // 2])[:b])


KINDS = {
    "random": random,
    "narrow": narrow,
    "packed": packed,
    "padded": padded,
    # Steps of 64 tokens, as in block-wise decoding.
    "block-causal": lambda b, h, m, n: (None, (torch.arange(m) // 64 + 1) * 64),
    "first alone": lambda b, h, m, n: (random(b, 1, m, n)[0], None),
    "one end": lambda b, h, m, n: (None, torch.tensor(n // 2)),
    "int32 of heads": lambda b, h, m, n: tuple(
        each.int().expand(b, h, m) for each in random(1, h, 1, n)
    ),
    "transposed": lambda b, h, m, n: tuple(each.mT for each in random(b, m, h, n)),
    "nothing": lambda b, h, m, n: (torch.full((b, 1, 1), n), torch.tensor(0)),
    "all": lambda b, h, m, n: (torch.tensor(-(2**62)), torch.tensor(2**62)),
    "behind all keys": lambda b, h, m, n: (torch.full((b, 1, 1), 2**31 - 1).int(), None),
    "ends": lambda b, h, m, n: (
        torch.where(torch.arange(m) % 100 < 50, 0, n - 9),  # tiles between them are left out
        torch.where(torch.arange(m) % 100 < 50, 9, n),
    ),
    "largest": lambda b, h, m, n: (
        torch.tensor(-(2**31), dtype=torch.int32),
        torch.tensor(2**31 - 1, dtype=torch.int32),
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def on(device, visible):
    """With the same strides."""
    first, end = (None if each is None else each.to(device) for each in visible)
    return first, end


def mask_of(visible, keys):
    first, end = visible
    key = torch.arange(keys, device=(end if first is None else first).device)
    excluded = torch.zeros(1, dtype=torch.bool, device=key.device)
    if first is not None:
        excluded = excluded | (key < first[..., None])
    if end is not None:
        excluded = excluded | (key >= end[..., None])
    return excluded


# attention

EDGES = [(1, 200), (2, 1000), (16, 63), (17, 1), (63, 64), (64, 65), (65, 127), (129, 257)]
LARGE = [(127, 1000), (200, 200), (257, 129), (1000, 1000), (1, 5000), (1000, 17)]
LARGE += [(130, 4300), (4300, 130)]  # more than the 32 tiles that a word of a note has bits for


@on_all_kernels
@kinds
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_attention_at_edges_of_tiles(kind, dim, device):
    """All gradients but those of a bias."""
    on_cpu = EDGES[dim // 64 :: 4]
    for lengths in (*EDGES, *LARGE) if device == "cuda" else on_cpu:
        for dtype in dtypes_on(device)[-1:] if device == "cpu" else dtypes_on(device):
            q, k, v = tensors(device, dtype, lengths=lengths, dims=dim)
            visible = on(device, KINDS[kind](2, 4, *lengths))
            check_attention(q, k, v, visible=visible, what=f"{lengths}")


BIASES = {
    "none": None,
    "dense": lambda m, n: (2, 4, m, n),
    "shared": lambda m, n: (1, 4, m, n),
    "of batches": lambda m, n: (2, 1, m, n),
    "keys": lambda m, n: (2, 1, 1, n),
    "queries": lambda m, n: (1, 4, m, 1),
    "number": lambda m, n: (),
    "relative": lambda m, n: (4, m + n - 1),
    "relative of batches": lambda m, n: (2, 4, m + n - 1),
}
BESIDE = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (9, 2)},
    "window and causal": {"window": (20, -1), "causal": True},
    "mask": {"mask": True},
    "sink": {"sink": True},
    "all": {"mask": True, "sink": True, "causal": True, "window": (40, -1)},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("bias", BIASES)
def test_attention_beside_others(bias, beside, device):
    cases = (("random", (70, 133)), ("narrow", (3, 33)), ("packed", (130, 130)))
    for number, (kind, lengths) in enumerate(cases):
        given = dict(BESIDE[beside])
        # On a GPU 16 bits, whose biases have more kernels.
        dtype = torch.float16 if device == "cuda" else torch.float32
        q, k, v = tensors(device, dtype, lengths=lengths)
        if given.pop("mask", False):
            given["mask"] = coin(2, 1, *lengths, device=device)
        if given.pop("sink", False):
            given["sink"] = normal(4, device=device, seed=6).requires_grad_()
        if (shape := BIASES[bias]) is not None:
            table = normal(*shape(*lengths), device=device, dtype=dtype, seed=4).requires_grad_()
            given["bias"] = RelativeBias(table) if "relative" in bias else table
        first, end = on(device, KINDS[kind](2, 4, *lengths))
        ways = [(first, end), (first, None), (None, end)]
        # Plain torch makes a mask of any of them: each kind has one.
        for visible in ways if device == "cuda" else ways[number : number + 1]:
            check_attention(q, k, v, visible=visible, scale=0.3, **given, what=kind)


@kinds
def test_attention_is_that_of_the_mask(kind):
    """Bit for bit, in plain torch."""
    lengths = (70, 90)
    given = [each.requires_grad_() for each in tensors("cpu", lengths=lengths)]
    sink = normal(4, device="cpu").requires_grad_()
    visible = KINDS[kind](2, 4, *lengths)
    found = []
    for limits in ({"visible": visible}, {"mask": mask_of(visible, lengths[1])}):
        output, lse = megasoftmax.attention(*given, **limits, sink=sink, return_lse=True)
        loss = output.sin().sum() + lse.sin().sum()
        found.append((output, lse, *torch.autograd.grad(loss, (*given, sink))))
    for one, other in zip(*found, strict=True):
        assert bits_equal(one, other)


def test_attention_in_blocks(monkeypatch):
    """The reference cuts ranges, and blocks of a mask, along batches, heads and queries."""
    lengths = (150, 130)
    given = [each.requires_grad_() for each in tensors("cpu", lengths=lengths)]
    blocks = coin(2, 4, 3, 3, device="cpu")
    cases = [{"visible": make(2, 4, *lengths)} for make in KINDS.values()]
    cases += [{"mask": TileMask.from_blocks(blocks[:b, :h], 64)} for b in (1, 2) for h in (1, 4)]
    for limits in cases:
        found = []
        for size in (2**22, 130 * 4 * 150, 130 * 2 * 40, 130 * 7):
            monkeypatch.setattr("megasoftmax.reference.attention.BLOCK", size)
            output = megasoftmax.attention(*given, **limits)
            found.append((output, *torch.autograd.grad(output.sin().sum(), given)))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("bias", ["none", "shared", "dense"])
@pytest.mark.parametrize("kind", ["random", "packed", "ends"])
def test_attention_in_order(kind, bias):
    lengths = (200, 300)
    q, k, v = tensors("cuda", torch.bfloat16, lengths=lengths, dims=64)
    given = {}
    if (shape := BIASES[bias]) is not None:
        table = normal(*shape(*lengths), device="cuda", dtype=torch.bfloat16, seed=4)
        given["bias"] = table.requires_grad_()
    visible = on("cuda", KINDS[kind](2, 4, *lengths))
    with deterministic():
        check_attention(q, k, v, visible=visible, **given, what=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("kind", ["random", "packed", "ends", "nothing", "apart", "mask"])
def test_blocks_take_several_tiles(kind, has_table, dim):
    """More tiles of queries than multiprocessors, some of which see nothing."""
    lengths = (1100, 900)
    heads = 32
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (
        torch.randn(2, heads, length, dim, generator=generator).cuda().bfloat16().requires_grad_()
        for length in (lengths[0], lengths[1], lengths[1])
    )
    given = {}
    if kind == "apart":  # neighbouring tiles see keys that lie far from each other
        first = torch.arange(lengths[0]) // 64 * 389 % 800
        visible = (first[None, None], first[None, None] + 70)
    elif kind == "mask":  # of some tiles all is excluded, of others nothing
        tiles = coin(2, 1, 18, 15, device="cuda").repeat_interleave(64, 2).repeat_interleave(64, 3)
        given["mask"] = tiles[:, :, : lengths[0], : lengths[1]].clone()
        given["mask"][:, :, 300:600] |= coin(2, 1, 300, lengths[1], device="cuda")
        visible = (None, torch.arange(100, 100 + lengths[0]))
    else:
        visible = KINDS[kind](2, heads, *lengths)
    if has_table:
        table = normal(1, heads, sum(lengths) - 1, device="cuda", dtype=torch.bfloat16, seed=4)
        given["bias"] = RelativeBias(table)
    check_attention(q, k, v, visible=on("cuda", visible), causal=True, **given, what=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("keys", [48, 200])
@pytest.mark.parametrize("kind", ["nothing", "mask", "dropout"])
def test_blocks_take_many_tiles_of_few_keys(kind, keys, dims):
    """What is copied and assigned for a tile follows soon on that of the tile before."""
    q, k, v = (
        torch.randn(2, 32, length, dim, device="cuda", dtype=torch.bfloat16)
        for length, dim in ((4096, dims[0]), (keys, dims[0]), (keys, dims[1]))
    )
    given = {}
    if kind == "dropout":
        given = {"dropout": 0.2, "seed": torch.tensor([3], device="cuda")}
    elif kind == "nothing":
        given["visible"] = (None, torch.zeros(4096, dtype=torch.int32, device="cuda"))
    elif kind == "mask":
        given["mask"] = torch.ones(4096, keys, dtype=torch.bool, device="cuda")
        given["mask"][::1024] = False
    found = [megasoftmax.attention(q, k, v, **given, fused=True) for _ in range(20)]
    some = (each[:1, :2].float() for each in (q, k, v))
    wanted = megasoftmax.attention(*some, **given, fused=False)
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0][:1, :2].float(), wanted, atol=0.02, rtol=0.02)


def test_nothing_is_a_row_of_zeros(device):
    dtype = dtypes_on(device)[-1]
    q, k, v = (each.requires_grad_() for each in tensors(device, dtype, lengths=(40, 70)))
    for visible in (KINDS["nothing"](2, 4, 40, 70), (torch.tensor(9), torch.tensor(3))):
        options = {"visible": on(device, visible), "return_lse": True}
        output, lse = attention_on(device, dtype)(q, k, v, **options)
        assert (output == 0).all()
        assert (lse == -INF).all()
        for gradient in torch.autograd.grad(output.sum() + lse.exp().sum(), (q, k, v)):
            assert (gradient == 0).all()


def test_none_and_none_limit_nothing(device):
    """As no `visible`: a plain row of -inf is NaN."""
    scores = torch.full((3, 5), -INF, device=device)
    assert megasoftmax.softmax(scores, visible=(None, None)).isnan().all()
    end = torch.full((3,), 5, device=device)
    assert (megasoftmax.softmax(scores, visible=(None, end)) == 0).all()


# softmax

SHAPES = [(7,), (5, 33), (3, 4, 65), (2, 3, 5, 130), (2, 2, 3, 4, 17), (4, 0), (2, 3, 0)]
COLUMNS = [1, 8, 9, 31, 64, 257, 1000, 1024, 2049, 4097, 12289, 40001]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("beside", BESIDE)
def test_softmax(shape, beside, device):
    rows, keys = shape[:-1], shape[-1]
    given = dict(BESIDE[beside])
    if len(shape) < 2:
        given.pop("causal", None), given.pop("window", None)
    if given.pop("mask", False):
        given["mask"] = coin(*shape, device=device)
    if given.pop("sink", False):
        sinks = shape[-3] if len(shape) > 2 else 1
        given["sink"] = normal(sinks, device=device, seed=6).requires_grad_()
    for broadcast in range(len(rows) + 1):
        kept = rows[broadcast:]
        first = integers(-2, keys + 1, kept, seed=1)
        visible = on(device, (first, first + integers(-1, keys + 1, kept, seed=2)))
        for dtype in (torch.float32, torch.float16):
            scores = normal(*shape, device=device, dtype=dtype)
            bias = normal(*shape, device=device, dtype=dtype, seed=3).requires_grad_()
            check_softmax(scores, visible=visible, scale=-0.7, **given)
            check_softmax(scores, visible=visible, bias=bias, **given)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("kind", ["random", "narrow", "packed", "first alone", "nothing"])
def test_softmax_of_any_length(kind, columns, device):
    for queries in (3, 300) if device == "cuda" else (3,):
        visible = on(device, KINDS[kind](2, 2, queries, columns))
        for dtype in (torch.float32, torch.bfloat16):
            scores = normal(2, 2, queries, columns, device=device, dtype=dtype)
            check_softmax(scores, visible=visible, what=f"{queries} queries")


@pytest.mark.parametrize("columns", [65, 4097, pytest.param(40001, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(1, 2, 1), ()], ids=str)
def test_softmax_sums_the_gradient_of_a_bias(shape, columns, device):
    """Over rows of which each sees another range."""
    visible = on(device, KINDS["random"](2, 2, 9, columns))
    scores = normal(2, 2, 9, columns, device=device)
    bias = normal(*shape, columns, device=device, seed=3).requires_grad_()
    check_softmax(scores, visible=visible, bias=bias)


def test_softmax_needs_nothing_outside(device):
    """NaN and inf there change nothing, nor do they among incoming gradients."""
    scores = normal(2, 3, 40, 1000, device=device)
    visible = on(device, random(2, 3, 40, 1000))
    outside = mask_of(visible, 1000)
    g = normal(2, 3, 40, 1000, device=device, seed=1)
    found = []
    for planted in (0.0, NAN, INF, -INF):
        leaf = scores.masked_fill(outside, planted).requires_grad_()
        p, lse = megasoftmax.softmax(leaf, visible=visible, return_lse=True)
        (gradient,) = torch.autograd.grad(p, leaf, g.masked_fill(outside, planted))
        assert (p[outside] == 0).all()
        assert (gradient[outside] == 0).all()
        found.append((p, lse, gradient))
    for one, others in zip(found[0], zip(*found[1:], strict=True), strict=True):
        assert all(bits_equal(one, other) for other in others)


def test_softmax_backward(device):
    visible = on(device, random(2, 3, 40, 100))
    scores = normal(2, 3, 40, 100, device=device).requires_grad_()
    g = normal(2, 3, 40, 100, device=device, seed=1)
    p = megasoftmax.softmax(scores, visible=visible, causal=True, scale=0.3)
    (expected,) = torch.autograd.grad(p, scores, g)
    backward = softmax_backward
    for given in ({}, {"visible": visible}, {"visible": visible, "causal": True}):
        torch.testing.assert_close(backward(g, p.detach(), scale=0.3, **given), expected)


def test_second_derivatives_of_attention():
    """test_ops.py has those of softmax."""
    given = tensors("cpu", torch.float64, batch=1, heads=(2, 1), lengths=(4, 5), dims=(3, 2))
    leaves = [each.requires_grad_() for each in given]
    attention = functools.partial(megasoftmax.attention, visible=random(1, 2, 4, 5))
    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, leaves, fast_mode=True)


def test_forward_mode():
    visible = random(1, 2, 4, 5)
    scores = normal(1, 2, 4, 5, device="cpu", dtype=torch.float64)
    given = tensors("cpu", torch.float64, batch=1, heads=(2, 1), lengths=(4, 5), dims=(3, 2))
    for function, inputs in ((megasoftmax.softmax, (scores,)), (megasoftmax.attention, given)):
        function = functools.partial(function, visible=visible)
        forward = torch.func.jacfwd(function)(*inputs)
        torch.testing.assert_close(forward, torch.func.jacrev(function)(*inputs))


# Transforms, compiled code and export, in plain torch and through the ops


@pytest.fixture
def functions(through_ops):
    """softmax, attention and attention_varlen."""
    public = (megasoftmax.softmax, megasoftmax.attention, megasoftmax.attention_varlen)
    return tuple(functools.partial(each, fused=through_ops) for each in public)


def close_on(device):
    """assert_close(found, wanted); kernels have halves."""
    tolerance = {} if device == "cpu" else {"rtol": 0.02, "atol": 0.02}
    return functools.partial(torch.testing.assert_close, **tolerance)


@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)], ids=str)
def test_vmap(functions, device, batched):
    """Of ranges that each example has, or all share; and gradients of each example."""
    softmax, attention, _ = functions
    dtype = dtype_of_attention(device)
    scores = normal(3, 2, 4, 5, 13, device=device, dtype=dtype)
    given = [torch.stack([each, -each, 2 * each]) for each in tensors(device, dtype)]
    visible = [
        torch.stack([each, each.flip(0), each.flip(1)], 1) if is_batched else each
        for each, is_batched in zip(on(device, random(2, 4, 5, 13)), batched, strict=True)
    ]
    dims = [1 if is_batched else None for is_batched in batched]

    def of_scores(scores, first, end):
        return softmax(scores[0], visible=(first[0], end[0]), causal=True)

    def of_query(query, key, value, first, end):
        return attention(query, key, value, visible=(first, end), window=(9, 3))

    def gradient(function):
        return torch.func.grad(lambda *inputs: function(*inputs).float().sin().sum())

    for function, inputs in ((of_scores, [scores]), (of_query, given)):
        for each in (function, gradient(function)):
            all_dims = [*[0] * len(inputs), *dims]
            op_checks.check_vmap(each, [*inputs, *visible], all_dims, close_on(device))


def test_vmap_of_a_tile_mask(functions, device):
    _, attention, _ = functions
    query, key, value = tensors(device, dtype_of_attention(device), lengths=(70, 130))
    queries = torch.stack([query, -query])
    masks = coin(2, 2, 1, 2, 3, device=device)

    def shared(query):
        return attention(query, key, value, mask=TileMask.from_blocks(masks[0], 64))

    def own(query, blocks):
        return attention(query, key, value, mask=TileMask.from_blocks(blocks, 64))

    op_checks.check_vmap(shared, [queries], [0], close_on(device))
    op_checks.check_vmap(own, [queries, masks], [0, 0], close_on(device))


def test_compiled(functions, device):
    softmax, attention, varlen = functions
    dtype = dtype_of_attention(device)
    scores = normal(2, 4, 70, 90, device=device, dtype=dtype)
    given = tensors(device, dtype, lengths=(70, 90))
    documents = tensors(device, dtype, batch=1, lengths=70)
    first, end = on(device, random(2, 4, 70, 90))
    cu_seqlens = torch.tensor([0, 20, 20, 60], device=device)
    plain, blocks = coin(1, 4, 70, 90, device=device), coin(1, 4, 2, 2, device=device)
    masks = TileMask(plain), TileMask.from_blocks(blocks, 64)

    def of_scores(scores):
        return softmax(scores, visible=(first, end), causal=True)

    def of_query(*given):
        return attention(*given, visible=ranges.lengths(end[:, 0, 0].abs()), mask=plain)

    def of_masks(*given):
        return sum(attention(*given, mask=mask) for mask in masks)

    def of_documents(*given):
        query, key, value = (each[0].transpose(0, 1) for each in given)
        packed = attention(*given, visible=ranges.packed(cu_seqlens, 70), causal=True)
        own = varlen(query, key, value, cu_seqlens, causal=True, window=(30, 0))
        return packed[0].transpose(0, 1) + own

    calls = {of_scores: [scores], of_query: given, of_masks: given, of_documents: documents}
    for function, inputs in calls.items():
        torch.compiler.reset()
        leaves = [each.detach().requires_grad_() for each in inputs]
        gradients_of = op_checks.gradients_of
        op_checks.check_compiled(function, gradients_of, leaves, False, close_on(device))


def test_builders_compile_once_for_all_lengths(device):
    def function(keep, ids, cu_seqlens):
        tokens = ids.shape[1]
        return [
            *ranges.packed(cu_seqlens, tokens),
            *ranges.segments(ids),
            *ranges.padding(keep),
            *ranges.chunks(4, tokens, device=ids.device),
            ranges.prefix(ids[:, 0], tokens)[1],
            ranges.lengths(ids[:, 0])[1],
        ]

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 12, 33):
        keep = torch.arange(tokens, device=device) < torch.tensor([[3], [5]], device=device)
        ids = torch.arange(2 * tokens, device=device).view(2, -1) // 5
        inputs = keep, ids, torch.tensor([0, 3, tokens - 1], device=device)
        torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=0, atol=0)
    assert counter.frame_count == 1


# The builders, against a loop over all pairs


def check_built(visible, shape, expected, keys, device):
    """The bounds have that shape, and each query of each batch sees the expected ones of the keys.

    A bound may be the same for all batches, or for all queries.
    """
    for bound in visible:
        if bound is not None:
            assert (bound.dtype, bound.device.type) == (torch.int32, device)
            assert bound.shape == shape
    sizes = (len(expected), 1, len(expected[0]), keys)
    excluded = mask_of(visible, keys).cpu().expand(sizes)[:, 0].tolist()
    found = [[{j for j in range(keys) if not row[j]} for row in rows] for rows in excluded]
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [0], [5], 3 * [1], [0, 3, 0, 0, 4, 0], [2, 7, 1]], ids=str)
def test_packed(lengths, dtype, device):
    for surplus in (0, 2):
        tokens = sum(lengths) + surplus
        found = ranges.packed(offsets(lengths).to(device, dtype), tokens)
        documents = [d for d, length in enumerate(lengths) for _ in range(length)]
        expected = [
            {j for j, other in enumerate(documents) if i < len(documents) and other == documents[i]}
            for i in range(tokens)
        ]
        check_built(found, (1, 1, tokens), [expected], tokens, device)


@pytest.mark.parametrize(
    "ids",
    [[[7, 7, 3, 3, 3]], [[1], [2]], [[0, 0, 0, 0], [1, 2, 2, 1], [3, 3, 1, 0]], [[], []]],
    ids=str,
)
def test_segments(ids, device):
    tensor = torch.tensor(ids, dtype=torch.int64).to(device)
    batch, tokens = tensor.shape
    expected = [
        [
            {j for j in range(tokens) if len(set(row[min(i, j) : max(i, j) + 1])) == 1}
            for i in range(tokens)
        ]
        for row in ids
    ]
    check_built(ranges.segments(tensor), (batch, 1, tokens), expected, tokens, device)


def test_lengths(device):
    for n in (torch.tensor([3, 0, 9, -1]), torch.tensor([2], dtype=torch.int32)):
        expected = [[{j for j in range(6) if j < length}] * 2 for length in n.tolist()]
        check_built(ranges.lengths(n.to(device)), (len(n), 1, 1), expected, 6, device)
    _, end = ranges.lengths(torch.tensor([2**40, -(2**40)], device=device))
    assert end.flatten().tolist() == [2**31 - 1, -(2**31)]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8], ids=str)
def test_padding(dtype, device):
    keep = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]])
    expected = [[{j for j in range(4) if row[j]}] for row in keep.tolist()]
    check_built(ranges.padding(keep.to(device, dtype)), (5, 1, 1), expected, 4, device)


def test_padding_refuses_a_gap_of_which_it_knows():
    keep = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 0, 1, 0]])
    with pytest.raises(ValueError, match=r"keep: expected one run .* row 1; pass mask="):
        ranges.padding(keep)
    first, end = torch.vmap(ranges.padding)(keep[:, None])  # of one of many, nothing is read
    assert (first[1].item(), end[1].item()) == (1, 4)


@pytest.mark.parametrize(("size", "tokens"), [(1, 3), (2, 5), (3, 3), (9, 4), (4, 0), (2**40, 3)])
def test_chunks(size, tokens, device):
    found = ranges.chunks(size, tokens, device=device)
    expected = [{j for j in range(tokens) if i // size == j // size} for i in range(tokens)]
    check_built(found, (1, 1, tokens), [expected], tokens, device)
    assert all((each <= tokens).all() for each in found)


def test_prefix(device):
    n = torch.tensor([0, 3, 9])
    seen = ((max(length, i + 1) for i in range(5)) for length in n.tolist())
    expected = [[{*range(min(end, 5))} for end in ends] for ends in seen]
    check_built(ranges.prefix(n.to(device), 5), (3, 1, 5), expected, 5, device)


@pytest.mark.gpu
def test_builders_do_not_ask_the_device():
    """Nor do the calls that take what they return."""
    ids = torch.arange(64, device="cuda").view(2, 32) // 5
    keep, n = ids > 2, torch.tensor([3, 9], device="cuda")
    cu_seqlens = torch.tensor([0, 20, 32], device="cuda", dtype=torch.int32)
    query = normal(2, 4, 32, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    tokens = query[0].transpose(0, 1)

    def call():
        made = (
            ranges.packed(cu_seqlens, 32),
            ranges.segments(ids),
            ranges.lengths(n),
            ranges.padding(keep),
            ranges.chunks(8, 32, device="cuda"),
            ranges.prefix(n, 32),
        )
        for visible in made:
            megasoftmax.attention(query, query, query, visible=visible).sum().backward()
        output = megasoftmax.attention_varlen(tokens, tokens, tokens, cu_seqlens, causal=True)
        output.sum().backward()

    call()
    torch.cuda.synchronize()
    with op_checks.without_synchronisation():
        call()


@pytest.mark.gpu
def test_offsets_that_decrease_stay_inside_the_tensors():
    given = [normal(50, 2, 64, device="cuda", dtype=torch.bfloat16, seed=i) for i in range(3)]
    for offsets_of in ([0, 40, 10, 50], [7, 90, 300], [-5, 3, 50]):
        cu_seqlens = torch.tensor(offsets_of, device="cuda")
        output = megasoftmax.attention_varlen(*given, cu_seqlens, fused=True)
        torch.cuda.synchronize()
        assert output.isfinite().all()


# attention_varlen

DOCUMENTS = {
    "one": ([9], None),
    "several": ([3, 1, 0, 12, 5], None),
    "nothing": ([], None),
    "more keys": ([3, 1, 4], [5, 1, 9]),
    "fewer keys": ([5, 4, 2, 3], [2, 4, 0, 3]),
    "longer than tiles": ([70, 130, 1], None),
    "long, more keys": ([70, 17, 3], [130, 200, 64]),
}


def by_loop(query, key, value, lengths, table=None, **options):
    """`attention` of each document; zeros and -inf for what follows them."""
    outputs, lses = [], []
    of_queries, of_keys = ([0, *itertools.accumulate(each)] for each in lengths)
    for i, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        if queries == 0:
            continue
        parts = (
            query[of_queries[i] : of_queries[i + 1]],
            key[of_keys[i] : of_keys[i + 1]],
            value[of_keys[i] : of_keys[i + 1]],
        )
        if table is not None:
            middle = table.shape[-1] // 2
            own = table[..., middle - queries + 1 : middle + keys]
            options["bias"] = RelativeBias(own)
        output, lse = megasoftmax.attention(
            *(part.transpose(0, 1)[None] for part in parts), **options, return_lse=True
        )
        outputs.append(output[0].transpose(0, 1))
        lses.append(lse[0])
    surplus = query.shape[0] - sum(lengths[0])
    # Each input has a gradient.
    nothing = sum(0 * each.sum() for each in (query, key, value))
    outputs.append(nothing.expand(surplus, query.shape[1], value.shape[2]))
    sink = options.get("sink")
    rest = query.new_full((query.shape[1], 1), -INF) if sink is None else sink[:, None]
    return torch.cat(outputs), torch.cat([*lses, rest.expand(-1, surplus).double()], 1)


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (3, 1)},
        {"causal": True, "window": (5, 2**62), "sink": True},
        {"scale": 0.2, "window": (-1, 0)},
    ],
    ids=str,
)
def test_varlen(documents, options, device):
    of_queries, of_keys = DOCUMENTS[documents]
    given = dict(options)
    cu_seqlens_q = offsets(of_queries).to(device)
    cu_seqlens_k = None if of_keys is None else offsets(of_keys).to(device).long()
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tokens, key_tokens = sum(of_queries) + 2, sum(of_queries if of_keys is None else of_keys) + 2
    shapes = ((tokens, 4, 16), (key_tokens, 2, 16), (key_tokens, 2, 8))
    inputs = drawn(*shapes, device=device, dtype=dtype)
    if given.pop("sink", False):
        given["sink"] = normal(4, device=device, dtype=torch.float32, seed=9).requires_grad_()
        inputs.append(given["sink"])
    call = (*inputs[:3], cu_seqlens_q, cu_seqlens_k)
    options = given | {"return_lse": True, "fused": True if device == "cuda" else None}
    output, lse = megasoftmax.attention_varlen(*call, **options)
    assert output.is_contiguous()
    assert output.shape == (tokens, 4, 8)
    lengths = (of_queries, of_queries if of_keys is None else of_keys)
    expected = by_loop(*inputs[:3], lengths, **given)
    close_on(device)((output, lse), expected, check_dtype=False)
    losses = (
        one.double().sin().sum() + other.nan_to_num(neginf=0).double().sin().sum()
        for one, other in ((output, lse), expected)
    )
    found = [torch.autograd.grad(loss, inputs, allow_unused=True) for loss in losses]
    for actual, wanted in zip(*found, strict=True):
        wanted = torch.zeros_like(actual) if wanted is None else wanted
        close_on(device)(actual, wanted)


def test_why_varlen_is_not_fused(device):
    given = [normal(7, 2, dim, device=device, dtype=torch.float16) for dim in (512, 512, 64)]
    cu_seqlens = torch.tensor([0, 3, 7], device=device)
    varlen = megasoftmax.attention_varlen
    reasons = megasoftmax.why_not_fused(varlen, *given, cu_seqlens, causal=True, sink=0.5)
    assert "head dimension of query and key" in [each.constraint for each in reasons]
    with pytest.raises(ValueError, match=r"fused: cannot be True here\. .*head dimension of query"):
        varlen(*given, cu_seqlens, fused=True)


@pytest.mark.parametrize("lengths", [[5, 0, 7, 2], []], ids=str)
@pytest.mark.parametrize("columns", [1, 9, 2 * 14 - 1, 2 * 14 - 1 + 6])
def test_varlen_with_a_relative_bias(columns, lengths, device):
    """A table of fewer distances than there are has 0 for the others."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tokens = sum(lengths)
    given = [normal(tokens, 4, 16, device=device, dtype=dtype, seed=i) for i in range(3)]
    table = normal(4, columns, device=device, dtype=dtype, seed=5).requires_grad_()
    given_with_offsets = (*given, offsets(lengths).to(device))
    bias = RelativeBias(table)
    output = megasoftmax.attention_varlen(*given_with_offsets, bias=bias, causal=True)
    assert output.shape == (tokens, 4, 16)
    if not lengths:
        return
    whole = torch.nn.functional.pad(table, (20 - columns // 2, 20 - columns // 2))
    expected, _ = by_loop(*given, (lengths, lengths), whole, causal=True)
    close_on(device)(output, expected)
    found = [torch.autograd.grad(each.sin().sum(), table)[0] for each in (output, expected)]
    close_on(device)(*found)


def test_varlen_with_alibi():
    query = normal(12, 4, 8, device="cpu")
    slopes = biases.alibi_slopes(4)
    found = megasoftmax.attention_varlen(
        query, query, query, offsets([7, 5]), bias=biases.alibi_bias(slopes, 7, 7), causal=True
    )
    for part, start, length in ((found[:7], 0, 7), (found[7:], 7, 5)):
        own = query[start : start + length].transpose(0, 1)[None]
        bias = biases.alibi_bias(slopes, length, length)
        expected = megasoftmax.attention(own, own, own, bias=bias, causal=True)
        torch.testing.assert_close(part, expected[0].transpose(0, 1))


# TileMask

MASKS = {
    "plain": lambda m, n, d: TileMask(coin(2, 4, m, n, device=d)),
    "plain of keys": lambda m, n, d: TileMask(coin(2, 1, 1, n, device=d)),
    "plain of keys of heads": lambda m, n, d: TileMask(coin(2, 4, 1, n, device=d)),
    "plain of queries": lambda m, n, d: TileMask(coin(m, 1, device=d)),
    "nothing excluded": lambda m, n, d: TileMask(coin(1, 1, m, n, device=d, odds=0.0)),
    "all excluded": lambda m, n, d: TileMask(coin(m, n, device=d, odds=1.0)),
    "tiles of a plain one": lambda m, n, d: TileMask(
        TileMask.from_blocks(blocks_for(m, n, 64, d, 0.7), 64).to_mask(m, n)
    ),
    "blocks of 64": lambda m, n, d: TileMask.from_blocks(blocks_for(m, n, 64, d), 64),
    "blocks of 128": lambda m, n, d: TileMask.from_blocks(blocks_for(m, n, 128, d), 128),
    "blocks of 192": lambda m, n, d: TileMask.from_blocks(blocks_for(m, n, 192, d)[:1], 192),
    "blocks for all": lambda m, n, d: TileMask.from_blocks(blocks_for(m, n, 64, d)[0, 0], 64),
    "sparse blocks": lambda m, n, d: TileMask.from_blocks(blocks_for(m, n, 64, d, 0.9), 64),
}


def blocks_for(queries, keys, size, device, odds=0.4):
    return coin(2, 4, math.ceil(queries / size), math.ceil(keys / size), device=device, odds=odds)


@on_all_kernels
@pytest.mark.parametrize("kind", MASKS)
def test_tile_mask(kind, device):
    on_cpu = [(1, 200), (17, 65), (64, 64), (130, 200)]
    for lengths in (*EDGES, *LARGE) if device == "cuda" else on_cpu:
        mask = MASKS[kind](*lengths, device)
        dtype = dtypes_on(device)[-1]
        q, k, v = tensors(device, dtype, lengths=lengths, dims=64)
        for limits in ({}, {"causal": True}, {"visible": on(device, random(2, 4, *lengths))}):
            check_attention(q, k, v, mask=mask, **limits, what=f"{lengths}")


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_tile_mask_of_any_head_dimension(dim, device):
    for lengths in ((65, 129), (200, 257)):
        for kind in ("blocks of 64", "blocks of 128", "plain"):
            q, k, v = tensors(device, dtypes_on(device)[-1], lengths=lengths, dims=dim)
            bias = normal(1, 4, *lengths, device=device, dtype=q.dtype, seed=4).requires_grad_()
            check_attention(q, k, v, mask=MASKS[kind](*lengths, device), bias=bias, what=kind)


@pytest.mark.parametrize("kind", MASKS)
def test_to_mask(kind, device):
    for lengths in ((1, 1), (63, 65), (64, 128), (200, 400)):
        mask = MASKS[kind](*lengths, device)
        expected = oracle_attention.mask_of_pairs(mask, *lengths)
        assert torch.equal(mask.to_mask(*lengths), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MASKS)
def test_tile_mask_is_the_plain_mask(kind):
    """The same bits, from the first call and from those that have the note."""
    q, k, v = tensors("cuda", torch.bfloat16, lengths=(200, 400), dims=64)
    mask = MASKS[kind](200, 400, "cuda")
    attention = functools.partial(megasoftmax.attention, q, k, v, fused=True, return_lse=True)
    expected = attention(mask=mask.to_mask(200, 400))
    for _ in range(2):
        for actual, wanted in zip(attention(mask=mask), expected, strict=True):
            assert bits_equal(actual, wanted)
    assert list(mask._notes) == [(200, 400)]


@pytest.mark.gpu
def test_bytes_of_a_mask():
    """What is not 0 excludes, not 1 alone."""
    q, k, v = tensors("cuda", torch.bfloat16, lengths=(200, 400), dims=64)
    numbers = 64 * torch.randint(4, (2, 1, 200, 400), device="cuda", dtype=torch.uint8)
    attention = functools.partial(megasoftmax.attention, q, k, v, fused=True)
    assert torch.equal(attention(mask=numbers.view(torch.bool)), attention(mask=numbers != 0))


@pytest.mark.gpu
def test_notes_serve_later_gradients():
    """Those made in inference mode too; and few queries need none."""
    mask = MASKS["blocks of 64"](130, 200, "cuda")
    q, k, v = tensors("cuda", torch.bfloat16, lengths=(130, 200), dims=64)
    with torch.inference_mode():
        megasoftmax.attention(q[:, :, :16], k, v, mask=TileMask(coin(16, 200, device="cuda")))
        megasoftmax.attention(q, k, v, mask=mask)
    check_attention(q, k, v, mask=mask)
    assert len(mask._notes) == 1
    few = kernel_limits().attention["kMaxDecodeQueries"]
    megasoftmax.attention(q[:, :, :few], k, v, mask=TileMask.from_blocks(mask.tensor[:, :, :1], 64))


def test_note_is_made_once_for_each_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mask, calls = TileMask(coin(2, 1, 1, 40, device="cpu")[0]), []

    def tile_note(tensor, block, queries, keys):
        calls.append((tensor.dim(), block, queries, keys))
        return torch.zeros(1)

    for queries in (20, 20, 30):
        note = mask.note(queries, 40, tile_note)
        assert note is mask.note(queries, 40, tile_note)
    assert calls == [(4, 1, 20, 40), (4, 1, 30, 40)]
    untouched = torch.vmap(lambda x: (mask.note(50, 40, tile_note), x)[1])
    assert torch.equal(untouched(torch.ones(2)), torch.ones(2))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("shape", "block", "queries", "keys", "words"),
    [
        ((1, 1, 70, 130), 1, 70, 130, 2 * 2 * 1 + 3 * 1 + 1 + 70 * 4 * 2 + 3 * 2 * 128),
        ((2, 1, 1, 130), 1, 70, 130, 2 * 2 * 1 + 3 * 1 + 1 + 4 * 2),
        ((2, 4, 2, 3), 64, 70, 130, 2 * 2 * 1 + 3 * 1 + 1),
        ((1, 4, 17, 33), 128, 2049, 4160, 2 * 33 * 3 + 65 * 2),
    ],
)
def test_shape_of_a_note(shape, block, queries, keys, words, device):
    mask = coin(*shape, device=device)
    note = torch.ops.megasoftmax.tile_note(mask, block, queries, keys)
    assert (note.shape, note.dtype) == ((*shape[:2], words), torch.int32)
    torch.library.opcheck(
        torch.ops.megasoftmax.tile_note.default,
        (mask, block, queries, keys),
        test_utils=("test_schema", "test_faketensor"),
    )


# The module


def test_module(device):
    layer = megasoftmax.FusedAttention(4, causal=True, sink=True, alibi_slopes=torch.ones(4))
    layer = layer.to(device)
    given = tensors(device, dtypes_on(device)[-1], lengths=(70, 130))
    visible, blocks = on(device, random(2, 4, 70, 130)), blocks_for(70, 130, 64, device)
    mask = TileMask.from_blocks(blocks, 64)
    plain = mask.to_mask(70, 130) | mask_of(visible, 130)
    found = layer(*given, mask=mask, visible=visible)
    assert layer.why_not_fused(*given, mask=mask, visible=visible) == layer.why_not_fused(*given)
    close_on(device)(found, layer(*given, mask=plain))


# Reasons and errors


def of_softmax(**arguments):
    return lambda: megasoftmax.softmax(torch.zeros(2, 4, 5, 6), **arguments)


def of_attention(lengths=(5, 6), **arguments):
    return lambda: megasoftmax.attention(*tensors("cpu", lengths=lengths), **arguments)


def blocks_of(*shape, device="cpu"):
    return TileMask.from_blocks(torch.zeros(shape, dtype=torch.bool, device=device), 64)


def of_varlen(*offsets_of, query=(7, 2, 8), key=(7, 2, 8), value=(7, 2, 8), **arguments):
    def call():
        given = (normal(*shape, device="cpu") for shape in (query, key, value))
        return megasoftmax.attention_varlen(*given, *offsets_of, **arguments)

    return call


FIVE = torch.ones(5, dtype=torch.int32)
OF_FOUR, BITS = FIVE.expand(1, 2, 4, 5), FIVE.bool()
CU = torch.tensor([0, 3, 7])
TABLE, ROWS = torch.zeros(2, 13), torch.zeros(4, 5)
LONG, BLOCKS = (70, 130), "mask: expected blocks of 64 "
REFUSED = [
    *(
        case
        for call in (of_softmax, of_attention)
        for case in (
            (call(visible=FIVE), TypeError, r"visible: expected None or \(first, end\), got a te"),
            (call(visible=(FIVE,)), ValueError, r"visible: expected .* got 1 elements"),
            (call(visible=(0, None)), TypeError, r"visible\[0\]: expected None or a tensor .* int"),
            (call(visible=(FIVE, FIVE.float())), TypeError, r"visible\[1\]: .* torch.float32"),
            (call(visible=(BITS, None)), TypeError, r"visible\[0\]: .* int32 or int64, got"),
            (call(visible=(None, FIVE[:3])), ValueError, r"visible\[1\]: .* broadcasts to \(2, 4"),
            (call(visible=(FIVE.view(5, 1), None)), ValueError, r"visible\[0\]: .*, got \(5, 1\)"),
            (call(visible=(OF_FOUR, None)), ValueError, r"visible\[0\]: .* got \(1, 2, 4, 5\)"),
            (call(visible=(FIVE.to("meta"), None)), ValueError, r"visible\[0\]: expected device"),
        )
    ),
    (of_softmax(visible=(None, FIVE), dim=1), ValueError, "visible: expected only over the last"),
    (lambda: megasoftmax.softmax(torch.zeros(3), visible=(FIVE, None)), ValueError, "visible"),
    (lambda: softmax_backward(*2 * [ROWS], visible=(FIVE, None)), ValueError, r"visible\[0\]"),
    (lambda: TileMask(FIVE), TypeError, "mask: expected a bool tensor, True = excluded, got a t"),
    (lambda: TileMask.from_blocks(BITS, 64), ValueError, r"blocks: expected \[\.\.\., query"),
    (lambda: TileMask.from_blocks([True], 64), TypeError, "blocks: expected a bool tensor, .* li"),
    (lambda: TileMask.from_blocks(BITS[None], 96), ValueError, "size: expected a multip"),
    (lambda: TileMask.from_blocks(BITS[None], 0), ValueError, "size: .*from 64 on, got 0"),
    (lambda: TileMask.from_blocks(BITS[None], 64.0), TypeError, "size: .* got float"),
    (of_softmax(mask=TileMask(BITS)), TypeError, "mask: expected a bool tensor, .* TileM"),
    (of_attention(mask=TileMask(BITS)), ValueError, r"mask: expected a shape that broadca"),
    (
        of_attention(LONG, mask=blocks_of(1, 3)),
        ValueError,
        rf"{BLOCKS}that broadcast to \(2, 4, 2, 3\), .* got \(1, 3\)",
    ),
    (of_attention(LONG, mask=blocks_of(3, 2, 3)), ValueError, rf"{BLOCKS}.* got \(3, 2, 3\)"),
    (of_attention(mask=blocks_of(1, 1, device="meta")), ValueError, "mask: expected device cpu"),
    (of_varlen(CU.float()), TypeError, "cu_seqlens_q: expected a tensor of int32 or int64, got a"),
    (of_varlen([0, 7]), TypeError, "cu_seqlens_q: .* got list"),
    (of_varlen(CU[None]), ValueError, r"cu_seqlens_q: expected \[documents \+ 1\], got .*\(1, 3\)"),
    (of_varlen(CU[:0]), ValueError, "cu_seqlens_q: expected"),
    (of_varlen(CU[1:]), ValueError, r"cu_seqlens_q: .* begin at 0, .* got \[3, 7\]"),
    (of_varlen(CU[[0, 2, 1]]), ValueError, r"cu_seqlens_q: .* do not decrease .*\[0, 7, 3\]"),
    (of_varlen(CU + CU), ValueError, r"cu_seqlens_q: .* end at 7 at most, got \[0, 6, 14\]"),
    (of_varlen(CU, CU[:2]), ValueError, "cu_seqlens_k: expected 3 entries, as cu_seqlens_q, got 2"),
    (of_varlen(CU, CU + 1), ValueError, "cu_seqlens_k: expected offsets that begin at 0"),
    (of_varlen(CU.to("meta")), ValueError, "cu_seqlens_q: expected device cpu"),
    (of_varlen(CU, query=(1, 7, 2, 8)), ValueError, r"query: expected \[tokens, heads, dim\]"),
    (
        of_varlen(CU, key=(7, 2)),
        ValueError,
        r"key: expected \[tokens, key_heads, dim\], got shape \(7, 2\)",
    ),
    (of_varlen(CU, key=(7, 2, 9)), ValueError, "key: expected shape"),
    (of_varlen(CU, window=(-2, 0)), ValueError, "window"),
    (of_varlen(CU, causal=1), TypeError, "causal: expected a bool, got int"),
    (of_varlen(CU, bias=TABLE), TypeError, "bias: expected None or a RelativeBias, got a tensor"),
    (
        of_varlen(CU, bias=ShiftedBias(TABLE)),
        TypeError,
        "bias: expected None or a RelativeBias with one table for all queries, got ShiftedBias",
    ),
    (
        of_varlen(CU, CU.clone(), bias=RelativeBias(TABLE)),
        ValueError,
        "bias: expected one cu_seqlens for queries and keys, .* got two tensors",
    ),
    (
        of_varlen(CU, bias=RelativeBias(TABLE), key=(9, 2, 8), value=(9, 2, 8)),
        ValueError,
        "bias: expected as many keys as queries, 7, got 9",
    ),
    (of_varlen(CU, bias=RelativeBias(TABLE[:, 1:])), ValueError, r"bias.table: .* 2 \* length"),
    (lambda: ranges.packed(CU, 6), ValueError, "cu_seqlens: .* end at 6 at most"),
    (lambda: ranges.packed(CU, -1), ValueError, "tokens: expected an integer from 0 on, got -1"),
    (lambda: ranges.packed(CU, 7.0), TypeError, "tokens: expected an integer from 0 on, got float"),
    (lambda: ranges.segments(CU[0]), ValueError, r"ids: expected \[..., tokens\], got shape \(\)"),
    (lambda: ranges.segments(TABLE), TypeError, "ids: expected a tensor of integers or bool, .*"),
    (lambda: ranges.lengths(CU.bool()), TypeError, "n: expected a tensor of int32 or int64"),
    (lambda: ranges.padding([1, 1]), TypeError, "keep: expected a tensor of integers or bool"),
    (lambda: ranges.padding(CU[0]), ValueError, r"keep: expected \[..., keys\], got shape \(\)"),
    (lambda: ranges.chunks(0, 5), ValueError, "size: expected an integer from 1 on, got 0"),
    (lambda: ranges.chunks(True, 5), TypeError, "size: expected an integer from 1 on, got bool"),
    (lambda: ranges.prefix(TABLE[0], 5), TypeError, "n: expected a tensor of int32 or int64"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))]
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
