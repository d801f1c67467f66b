"""Dropout: which entries, how many, and that everything drops the same ones."""

import itertools
import math
from functools import partial
from typing import Any

import op_checks
import oracle
import processes
import pytest
import torch
from inputs import by_error, coin, deterministic, drawn, gpu_with_all_kernels, normal, saved_tensors
from op_families import dtype_of_attention
from torch.utils.checkpoint import checkpoint

import megasoftmax
from megasoftmax import FusedAttention, RelativeBias, reference

attention, softmax = megasoftmax.attention, megasoftmax.softmax

PROBABILITIES = (0.001, 0.1, 0.25, 0.5, 0.9)


def seed_of(number, device):
    return torch.tensor([number], device=device)


# Read back


def shown_in_parts(tensor):
    """Zeros like a tensor [..., tokens, dim], with ones that show `dim` tokens, and how many."""
    tokens, dim = tensor.shape[-2:]
    for first in range(0, tokens, dim):
        part, shown = torch.zeros_like(tensor), min(dim, tokens - first)
        part[..., first : first + shown, :shown] = torch.eye(shown, device=tensor.device)
        yield part, shown


def kept_by_softmax(shape, dropout, seed, device):
    """Of equal probabilities."""
    p = softmax(torch.zeros(shape, device=device), dropout=dropout, seed=seed_of(seed, device))
    return p != 0


def kept_by_attention(shape, dropout, seed, device, dim=64):
    """Of equal weights, through values that each show one of `dim` keys."""
    batch, heads, queries, keys = shape
    dtype = dtype_of_attention(device)
    query = torch.zeros(batch, heads, queries, 16, device=device, dtype=dtype)
    key = torch.zeros(batch, heads, keys, 16, device=device, dtype=dtype)
    found = []
    for value, shown in shown_in_parts(key.new_empty(keys, dim)):
        value = value.expand(batch, heads, -1, -1)
        output = attention(query, key, value, dropout=dropout, seed=seed_of(seed, device))
        found.append(output[..., :shown] != 0)
    return torch.cat(found, -1)


def kept_of_equal_keys(queries, keys, dim, dropout, seed, **options):
    """The same on a GPU of 2 batches and 3 heads, by kernels that copy tensors: dense ones."""
    query = torch.zeros(2, 3, queries, dim, device="cuda", dtype=torch.bfloat16)
    key, found = query.new_zeros(2, 3, keys, dim), []
    for value, shown in shown_in_parts(key):
        given = {"dropout": dropout, "seed": seed_of(seed, "cuda"), "fused": True, **options}
        output = attention(query, key, value, **given)
        found.append(output[..., :shown] != 0)
    return torch.cat(found, -1)


def gradients_of_equal_keys(queries, keys, dim, dropout, seed, **options):
    """Of the same: what gradients of values show; gradients of scores if those of weights are 1.

    Gradients of outputs, and keys, each show one of `dim` queries, or keys.
    """

    def gradients(query, key, value, of_output):
        inputs = [x.requires_grad_() for x in (query, key, value)]
        given = {"dropout": dropout, "seed": seed_of(seed, "cuda"), "fused": True, **options}
        of_query, _, of_value = torch.autograd.grad(attention(*inputs, **given), inputs, of_output)
        return of_query, of_value

    query = torch.zeros(2, 3, queries, dim, device="cuda", dtype=torch.bfloat16)
    key = query.new_zeros(2, 3, keys, dim)
    kept, of_scores = [], []
    for of_output, shown in shown_in_parts(query):
        _, of_value = gradients(query.clone(), key.clone(), key.clone(), of_output)
        kept.append(of_value[..., :shown].mT != 0)
    for shows, shown in shown_in_parts(key):
        of_output = torch.zeros_like(query)
        of_output[..., 0] = 1
        of_query, _ = gradients(query.clone(), shows, torch.ones_like(key), of_output)
        of_scores.append(of_query[..., :shown].float() * dim**0.5)
    return torch.cat(kept, -2), torch.cat(of_scores, -1)


def is_kept(head, i, j, dropout, seed):
    words = oracle.philox((j // 32, i // 16, head, i % 8 * 8 + j % 8), seed)
    word = words[i // 8 % 2 * 2 + j // 8 % 4 // 2]
    bits = (word >> 16 if j // 8 % 2 else word) & 0x7FFF
    return bits >= round(dropout * 32768)


SEEDS = (0, 1, -1, 2**62 + 12345, -(2**63))


@pytest.mark.parametrize("kept", [kept_by_softmax, kept_by_attention])
@pytest.mark.parametrize("seed", SEEDS)
def test_entries_are_those_of_philox(kept, seed, device):
    shape = (2, 3, 21, 70)
    found = kept(shape, 0.3, seed, device)
    for b, h, i, j in itertools.product((0, 1), (0, 2), (0, 7, 8, 15, 16, 20), range(0, 70, 3)):
        assert found[b, h, i, j] == is_kept(b * 3 + h, i, j, 0.3, seed), (b, h, i, j)


# One row, tiles, blocks, clusters, rows that are read again; ends within a group of 16 and 32.
SOFTMAX_SHAPES = [(1,), (40,), (3, 33), (2, 5, 17, 100), (1, 2, 3, 2, 40), (2, 2, 30, 1024)]
SOFTMAX_SHAPES += [(1, 2, 3, 4099), (1, 1, 2, 20000), (1, 1, 2, 70001)]


@pytest.mark.parametrize("shape", SOFTMAX_SHAPES, ids=str)
def test_softmax_drops_the_entries_of_the_reference(shape, device):
    scores = torch.zeros(shape, device=device)
    wanted = reference.dropout.kept_of_scores(seed_of(9, device), 0.3, scores)
    assert torch.equal(kept_by_softmax(shape, 0.3, 9, device), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [40, 257, 512, 520, 1017, 1024, 1032, 2053])
@pytest.mark.parametrize("limits", ["nothing", "causal", "window", "endless window", "ranges"])
def test_rows_that_see_less_drop_the_same(limits, columns, dtype, device):
    """Kernels give two queries that lie 8 apart to one warp, and begin at a block of 32 columns."""
    numbers = torch.arange(2 * 3 * 43, device=device, dtype=torch.int32).view(2, 3, 43)
    first, end = numbers * 37 % columns, numbers * 91 % (columns + 1)
    options = {
        "nothing": {},
        "causal": {"causal": True},
        "window": {"window": (100, 0)},
        "endless window": {"window": (300, -1)},
        "ranges": {"visible": (first, end)},
    }[limits]
    # Heads of 43 queries, some of which have no neighbour 8 further, and of one.
    for queries in (43, 1):
        if queries == 1 and limits == "ranges":
            continue
        shape = (2, 3, queries, columns)
        scores, weights = (normal(*shape, device=device, dtype=dtype, seed=i) for i in range(2))
        scores.requires_grad_()
        found = []
        for fused in (None, False):
            given = {"dropout": 0.3, "seed": seed_of(5, device), "fused": fused}
            p, lse = softmax(scores, **options, **given, return_lse=True)
            gradient = torch.autograd.grad((p * weights).sum() + lse.sin().nansum(), scores)
            found.append((p, lse, *gradient))
        assert torch.equal(found[0][0] != 0, found[1][0] != 0)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("queries", [1, 16, 17, 65, 200])
@pytest.mark.parametrize("keys", [1, 31, 64, 300])
def test_attention_drops_what_softmax_drops(queries, keys, device):
    shape = (2, 3, queries, keys)
    found = kept_by_attention(shape, 0.3, 9, device)
    assert torch.equal(found, kept_by_softmax(shape, 0.3, 9, device))


def test_entries_do_not_depend_on_how_much_is_computed_at_a_time(monkeypatch):
    wanted = kept_by_softmax((2, 3, 50, 90), 0.4, 5, "cpu")
    for part in (1, 4000, 60000):
        monkeypatch.setattr(reference.dropout, "_PART", part)
        assert torch.equal(kept_by_softmax((2, 3, 50, 90), 0.4, 5, "cpu"), wanted)
    for block in (1, 1000, 9000):
        monkeypatch.setattr(reference.attention, "BLOCK", block)
        assert torch.equal(kept_by_attention((2, 3, 50, 90), 0.4, 5, "cpu"), wanted)


# How many


@pytest.mark.parametrize("dropout", PROBABILITIES)
@pytest.mark.parametrize("kept", [kept_by_softmax, kept_by_attention])
def test_rate(kept, dropout, device):
    found = kept((2, 4, 128, 128), dropout, 3, device)
    count = found.numel()
    deviation = math.sqrt(count * dropout * (1 - dropout))
    assert abs((~found).sum().item() - count * dropout) < 5 * deviation


def chi_square(first, second):
    """Of the four counts of pairs, against those of independent ones; 1 degree of freedom."""
    count, total = first.numel(), 0.0
    for a, b in itertools.product((True, False), repeat=2):
        expected = (first == a).sum().item() * (second == b).sum().item() / count
        total += (((first == a) & (second == b)).sum().item() - expected) ** 2 / expected
    return total


def assert_independent(kept):
    """Over heads, rows, columns and seeds, near and far; 25 is 5 sigma."""
    shape = (2, 4, 128, 128)
    found = kept(shape, 0.3, 3)
    pairs = {"batches": (found[:1], found[1:])}
    for dim, steps in ((1, (1, 2)), (2, (1, 2, 7, 8, 16, 32)), (3, (1, 2, 7, 8, 16, 32))):
        for step in steps:
            apart = (found.narrow(dim, start, shape[dim] - step) for start in (0, step))
            pairs[f"{step} along {dim}"] = tuple(apart)
    pairs["seeds"] = found, kept(shape, 0.3, 4)
    pairs["high seeds"] = found, kept(shape, 0.3, 3 + 2**32)
    for name, (first, second) in pairs.items():
        assert chi_square(first, second) < 25, name


def test_independence(device):
    assert_independent(lambda *args: kept_by_softmax(*args, device))


@pytest.mark.parametrize("dropout", [*PROBABILITIES, 0.3, 1e-4])
def test_what_is_kept_makes_up_for_what_is_dropped(dropout, device):
    """Of 15 bits, as many as keep an entry times what a kept one counts is all of them."""
    keeping = 32768 - round(dropout * 32768)
    p = softmax(torch.zeros(64, 64, device=device, dtype=torch.float32), dropout=dropout)
    found = (p[p != 0] * 64).double() * keeping
    torch.testing.assert_close(found, torch.full_like(found, 32768.0), rtol=3e-6, atol=0)


def test_expectation_over_seeds(device):
    scores = normal(2, 3, 40, device=device)
    p, count = softmax(scores).double(), 600
    draws = [softmax(scores, dropout=0.4, seed=seed_of(i, device)) for i in range(count)]
    deviation = p * math.sqrt(0.4 / 0.6 / count)
    assert ((torch.stack(draws).double().mean(0) - p).abs() < 5 * deviation).all()


def test_nothing_and_all(device):
    scores, seed = normal(2, 5, 40, device=device).requires_grad_(), seed_of(1, device)
    for dropout in (0.0, 2.0**-18):
        dropped = softmax(scores, dropout=dropout, seed=seed, fused=False)
        assert torch.equal(dropped, softmax(scores, fused=False))
    p, lse = softmax(scores, dropout=1.0, seed=seed, return_lse=True)
    assert torch.equal(p, torch.zeros_like(p))
    torch.testing.assert_close(lse, softmax(scores, return_lse=True)[1])
    (gradient,) = torch.autograd.grad(p.sum(), scores)
    assert torch.equal(gradient, torch.zeros_like(scores))


def test_what_is_dropped_of_a_row_of_nan_is_0(device):
    scores = torch.full((4, 64), torch.nan, device=device)
    p = softmax(scores, dropout=0.5, seed=seed_of(1, device))
    keep = kept_by_softmax((4, 64), 0.5, 1, device)
    assert (p[~keep] == 0).all()
    assert p[keep].isnan().all()


# Against the masked computation, with the mask read back


def expected_softmax(scores, keep, dropout, scale=1.0, bias=None, excluded=None, sink=None):
    z = scale * scores if bias is None else scale * scores + bias
    z = z if excluded is None else z.masked_fill(excluded, -torch.inf)
    if sink is not None:
        z = torch.cat([z, sink.view(-1, 1, 1).expand(*z.shape[:-1], 1)], -1)
    p = z.softmax(-1)[..., : scores.shape[-1]]
    divisor = 1 - round(dropout * 32768) / 32768
    return torch.where(keep, p / divisor, 0), z.logsumexp(-1)


def gradients(call, *tensors):
    result, lse = call(*tensors)
    weights = normal(*result.shape, device=result.device.type, seed=8).to(result.dtype)
    loss = (result * weights).sum() + lse.sin().sum()
    found = torch.autograd.grad(loss, tensors)
    return result.detach(), lse.detach(), *found


@pytest.fixture(params=[False, True])
def has_ops(request, device, monkeypatch):
    """Whether calls with fused=True run through the ops, on a CPU too and in every type."""
    if request.param and device == "cpu":
        processes.let_ops_serve_cpus(monkeypatch.setattr)
    return request.param


def check_softmax(call, device, dtype):
    """`call` is megasoftmax.softmax. Sinks of float64 may be taken as float32."""
    shape, seed = (2, 3, 40, 70), 11
    tensors = drawn(shape, (3, 1, 70), (3,), device=device, dtype=dtype)
    excluded = coin(2, 1, 40, 70, device=device)
    keep = kept_by_softmax(shape, 0.3, seed, device)
    options = {"scale": 0.7, "mask": excluded, "dropout": 0.3, "seed": seed_of(seed, device)}
    found = partial(call, **options, return_lse=True)
    actual = gradients(lambda x, bias, sink: found(x, bias=bias, sink=sink), *tensors)
    expected = partial(expected_softmax, keep=keep, dropout=0.3, scale=0.7, excluded=excluded)
    wanted = gradients(lambda x, bias, sink: expected(x, bias=bias, sink=sink), *tensors)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def check_attention(call, device, dtype):
    """`call` is megasoftmax.attention."""
    shape, seed = (2, 4, 40, 70), 11
    sizes = ((2, 4, 40, 16), (2, 2, 70, 16), (2, 2, 70, 16), (1, 4, 40, 70), (4,))
    tensors = drawn(*sizes, device=device, dtype=dtype)
    causal = torch.ones(40, 70, dtype=torch.bool, device=device).triu(31)
    keep = kept_by_softmax(shape, 0.3, seed, device)

    def expected(query, key, value, bias, sink):
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        p, lse = expected_softmax(query @ key.mT, keep, 0.3, 0.25, bias, causal, sink)
        return p @ value, lse

    options = {"causal": True, "dropout": 0.3, "seed": seed_of(seed, device), "return_lse": True}
    actual = gradients(lambda *x: call(*x[:3], bias=x[3], sink=x[4], **options), *tensors)
    wanted = gradients(expected, *(tensor.double() for tensor in tensors))
    tolerance = 1e-6 if dtype == torch.float64 else 4e-2
    for found, exact in zip(actual, wanted, strict=True):
        largest = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * largest)


def test_softmax_is_the_masked_one(has_ops, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    check_softmax(partial(softmax, fused=has_ops), device, dtype)


def test_attention_is_the_masked_one(has_ops, device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    check_attention(partial(attention, fused=has_ops), device, dtype)


def test_attention_that_drops_nearly_all_is_not_fused(device):
    query = torch.zeros(1, 1, 4, 8, device=device)
    for dropout, is_refused in ((31 / 32, False), (0.97, True), (1.0, True)):
        reasons = megasoftmax.why_not_fused(attention, query, query, query, dropout=dropout)
        assert ("dropout" in [reason.constraint for reason in reasons]) == is_refused


@gpu_with_all_kernels
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    "bias", [None, (1, 4, 380, 376), (2, 4, 380, 376), (2, 1, 380, 376), (4, 755)], ids=str
)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_kernels_drop_what_the_reference_drops(dim, bias, in_order):
    def results(fused, dropout, causal):
        query, key, value, *rest = inputs
        given = {"causal": causal, "dropout": dropout, "seed": seed_of(11, "cuda")}
        if rest:
            given["bias"] = RelativeBias(rest[0]) if rest[0].dim() == 2 else rest[0]
        output = attention(query, key, value, **given, fused=fused)
        # As large as without dropout: the sine of a large output changes with its rounding.
        loss = (output.float() * (1 - dropout)).sin().sum()
        return output, *torch.autograd.grad(loss, inputs)

    sizes = [(2, 4, 380, dim), (2, 2, 376, dim), (2, 2, 376, dim), *([bias] if bias else [])]
    inputs = drawn(*sizes, device="cuda", dtype=torch.bfloat16)
    is_table = bias is not None and len(bias) == 2
    tolerance = 0.05 if is_table else 0.02  # each of its entries has sums of bfloat16
    with deterministic(in_order):
        for case in ((0.3, False), (0.96, False), (0.3, True)):
            for found, wanted in zip(*(results(f, *case) for f in (True, False)), strict=True):
                difference = (found - wanted).float().abs().max()
                assert difference <= tolerance * wanted.float().abs().max()


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rise", [4.0, 11.0, 95.0])
def test_kernels_drop_where_logits_rise(rise, dim):
    """In some rows, with each tile of keys: weights are relative to logits before, or made anew."""
    sizes = [(1, 2, count, dim) for count in (200, 700, 700)]
    inputs = drawn(*sizes, device="cuda", dtype=torch.bfloat16)
    rows, keys = (torch.arange(count, device="cuda") for count in (200, 700))
    with torch.no_grad():
        inputs[0][..., 0] = 8 * (rows // 8 % 2)
        inputs[1][..., 0] = rise * dim**0.5 / 8 * (keys // 128)

    def results(fused):
        output = attention(*inputs, dropout=0.3, seed=seed_of(11, "cuda"), fused=fused)
        return output, *torch.autograd.grad(output.float().sin().sum(), inputs[2:])

    for found, wanted in zip(results(True), results(False), strict=True):
        difference = (found - wanted).float().abs().max()
        assert difference <= 0.02 * wanted.float().abs().max()


@gpu_with_all_kernels
@pytest.mark.parametrize(
    "given", ["nothing", "causal", "window", "ranges", "mask", "dense bias", "table", "splits"]
)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_kernels_drop_the_entries_of_the_reference(dim, given):
    """Tiles of keys that nobody or not everybody sees, several tiles of queries for a block."""
    queries, keys = {"causal": (1100, 1100), "splits": (65, 3000)}.get(given, (333, 520))
    i, j = (torch.arange(count, device="cuda") for count in (queries, keys))
    i = i[:, None]
    first = (i[:, 0] * 37 % keys).int().sort()[0]
    end = first + (i[:, 0] * 91 % 150).int()
    mask = (i + j) % 3 == 0
    mask[:, 128:400] = True
    mask[100:230] = True
    entries = torch.zeros(1, 3, queries, keys, device="cuda", dtype=torch.bfloat16)
    offset = i + keys - queries
    options: dict[str, Any]
    options, visible = {
        "causal": ({"causal": True}, j <= offset),
        "window": ({"window": (70, 5)}, (j >= offset - 70) & (j <= offset + 5)),
        "ranges": ({"visible": (first, end)}, (j >= first[:, None]) & (j < end[:, None])),
        "mask": ({"mask": mask}, ~mask),
        "dense bias": ({"bias": entries}, j >= 0),
        "table": ({"bias": RelativeBias(entries.new_zeros(3, queries + keys - 1))}, j >= 0),
    }.get(given, ({}, j >= 0))
    call = (queries, keys, dim, 0.3, 2**62 + 12345)
    found = kept_of_equal_keys(*call, **options)
    heads = torch.arange(6, device="cuda").view(2, 3)
    seed = seed_of(2**62 + 12345, "cuda")
    wanted = reference.dropout.kept(seed, 0.3, heads, 0, queries, keys) & visible
    assert torch.equal(found, wanted)
    # Backward: of weights, and of their gradients.
    found, of_scores = gradients_of_equal_keys(*call, **options)
    assert torch.equal(found, wanted)
    p = visible / (visible.expand(queries, keys).sum(-1, keepdim=True).clamp(min=1))
    of_p = wanted / (1 - round(0.3 * 32768) / 32768)
    difference = of_scores - p * (of_p - (p * of_p).sum(-1, keepdim=True))
    assert (difference.abs() <= 0.05 * p).all()


def test_attention_with_a_relative_bias_and_ranges(device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    query, key, value = (normal(2, 4, 40, 16, device=device, dtype=dtype, seed=i) for i in range(3))
    table = normal(4, 79, device=device, dtype=dtype, seed=4).requires_grad_()
    end = torch.arange(1, 41, device=device, dtype=torch.int32)
    options = {"visible": (None, end), "dropout": 0.3, "seed": seed_of(2, device)}
    output = attention(query, key, value, bias=RelativeBias(table), **options)
    dense = RelativeBias(table).dense(40, 40)
    scores = query.double() @ key.double().mT
    p = softmax(scores, scale=0.25, bias=dense.double(), **options, fused=False)
    wanted = p @ value.double()
    tolerance = 1e-12 if device == "cpu" else 4e-2
    torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)
    found, exact = (
        torch.autograd.grad(each.sin().sum(), table)[0].double() for each in (output, wanted)
    )
    largest = max(1.0, exact.abs().max().item())
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance * largest)


def test_second_derivatives():
    scores = normal(2, 5, 9, device="cpu", dtype=torch.float64).requires_grad_()
    bias = normal(5, 1, device="cpu", dtype=torch.float64, seed=1).requires_grad_()
    sink = normal(2, device="cpu", dtype=torch.float64, seed=2).requires_grad_()
    mask = coin(2, 5, 9, device="cpu")
    mask[0, 0] = True

    def call(scores, bias, sink):
        return softmax(scores, mask=mask, bias=bias, sink=sink, dropout=0.3, seed=seed_of(4, "cpu"))

    assert torch.autograd.gradcheck(call, (scores, bias, sink), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (scores, bias, sink), fast_mode=True)
    states = drawn(*[(1, 2, 4, 3)] * 3, device="cpu", dtype=torch.float64)

    def attend(*tensors):
        return attention(*tensors, dropout=0.3, seed=seed_of(4, "cpu"))

    assert torch.autograd.gradgradcheck(attend, states, fast_mode=True)


# Faults, which the tests above must notice


def test_a_mask_that_heads_share_is_noticed(monkeypatch):
    kept = reference.dropout.kept

    def shared(seed, dropout, heads, *sizes):
        return kept(seed, dropout, torch.zeros_like(heads), *sizes)

    monkeypatch.setattr(reference.dropout, "kept", shared)
    with pytest.raises(AssertionError, match=r"^(batches|1 along 1)"):
        test_independence("cpu")
    with pytest.raises(AssertionError):
        test_entries_are_those_of_philox(kept_by_softmax, 1, "cpu")


@pytest.mark.parametrize("check", [check_softmax, check_attention])
def test_another_divisor_is_noticed(check, monkeypatch):
    monkeypatch.setattr(reference.dropout, "factor", lambda dropout: 1 / (1 - dropout))
    with pytest.raises(AssertionError):
        check(softmax if check is check_softmax else attention, "cpu", torch.float64)


@pytest.mark.parametrize("check", [check_softmax, check_attention])
def test_another_mask_in_the_backward_pass_is_noticed(check, monkeypatch):
    kept, calls = reference.dropout.kept, itertools.count()

    def other(seed, *rest):
        return kept(seed + max(0, next(calls) - 1), *rest)  # the first reads the mask back

    for module in (reference.dropout, reference.attention):
        monkeypatch.setattr(module, "kept", other)
    with pytest.raises(AssertionError):
        check(softmax if check is check_softmax else attention, "cpu", torch.float64)


# What is kept


def test_no_mask_is_kept(device):
    scores = normal(2, 3, 40, 70, device=device).requires_grad_()
    with saved_tensors() as kept:
        softmax(scores, dropout=0.3)
    of_all = [each for each in kept if each.numel() >= scores.numel()]
    assert [each.data_ptr() for each in of_all] == [scores.data_ptr()]


# Random numbers


def both_functions(device):
    scores = normal(2, 4, 20, 30, device=device)
    states = [normal(2, 4, 20, 16, device=device, dtype=dtype_of_attention(device))] * 3
    return [lambda: softmax(scores, dropout=0.5), lambda: attention(*states, dropout=0.5)]


@pytest.mark.parametrize("number", [0, 1])
def test_without_a_seed_the_generator_decides(number, device):
    call = both_functions(device)[number]
    torch.manual_seed(3)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(call(), first)


def test_a_seed_leaves_the_generator_alone(device):
    scores = normal(5, 20, device=device)
    torch.manual_seed(3)
    wanted = torch.rand(4, device=device)
    torch.manual_seed(3)
    softmax(scores, dropout=0.5, seed=seed_of(1, device))
    softmax(scores, seed=seed_of(1, device))
    assert torch.equal(torch.rand(4, device=device), wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_drop_the_same_again(use_reentrant, device):
    query = normal(1, 2, 20, 16, device=device, dtype=dtype_of_attention(device)).requires_grad_()

    def layer(query):
        output = attention(query, query, query, dropout=0.5)
        return softmax(output, dropout=0.5).float().sin()

    with deterministic():
        torch.manual_seed(3)
        (wanted,) = torch.autograd.grad(layer(query).sum(), query)
        torch.manual_seed(3)
        query.grad = None
        checkpoint(layer, query, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(query.grad, wanted)


@pytest.mark.gpu
def test_each_replay_of_a_graph_drops_others():
    calls = both_functions("cuda")
    graph, found = op_checks.capture(lambda: [call() for call in calls])
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([each.clone() for each in found])
    assert (replays[0][0] == 0).any()  # of softmax; attention sums what is left
    for first, second in zip(*replays, strict=True):
        assert not torch.equal(first, second)


# torch.compile, torch.func


def test_compiled(device, through_ops):
    """Seeds are drawn by code of inductor. What it makes of plain torch the next test compares."""
    calls = both_functions(device)
    backend = "inductor" if through_ops or device == "cuda" else "aot_eager"
    compiled = torch.compile(lambda: [call() for call in calls], fullgraph=True, backend=backend)
    torch.manual_seed(3)
    first, second = compiled(), compiled()
    torch.manual_seed(3)
    again = compiled()
    for one, other, same in zip(first, second, again, strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(one, same)


def test_compiled_gradients():
    def call(scores, seed):
        return softmax(scores, dropout=0.3, seed=seed, causal=True, return_lse=True)

    scores, seed = normal(2, 9, 9, device="cpu").requires_grad_(), seed_of(5, "cpu")
    compiled = torch.compile(call, fullgraph=True)
    actual = gradients(lambda x: compiled(x, seed), scores)
    torch.testing.assert_close(actual, gradients(lambda x: call(x, seed), scores))


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_vmap_drop_what_they_would_alone(number, has_ops, device):
    inputs = normal(3, 2, 2, 20, 16, device=device, dtype=dtype_of_attention(device))
    seeds = torch.tensor([[1], [2], [3]], device=device)

    def call(x, seed):
        if number == 0:
            return softmax(x, dropout=0.5, seed=seed, fused=has_ops).float()
        return attention(x, x, x, dropout=0.5, seed=seed, fused=has_ops).float()

    def gradient(x, seed):
        return torch.func.grad(lambda x: call(x, seed).sin().sum())(x)

    for function in (call, gradient):
        op_checks.check_vmap(function, [inputs, seeds], [0, 0])
        op_checks.check_vmap(function, [inputs, seeds[0]], [0, None])


def test_forward_mode():
    scores, tangent = (normal(2, 5, 9, device="cpu", dtype=torch.float64, seed=i) for i in (0, 1))
    keep = kept_by_softmax((2, 5, 9), 0.3, 6, "cpu")

    def call(scores):
        return softmax(scores, dropout=0.3, seed=seed_of(6, "cpu"), return_lse=True)

    def expected(scores):
        return expected_softmax(scores, keep, 0.3)

    actual = torch.func.jvp(call, (scores,), (tangent,))
    torch.testing.assert_close(actual, torch.func.jvp(expected, (scores,), (tangent,)))


# The module


def test_module_drops_in_training_alone(device):
    query = normal(1, 4, 20, 16, device=device, dtype=dtype_of_attention(device))
    module = FusedAttention(4, causal=True, dropout=0.5)
    assert "dropout=0.5" in repr(module)
    torch.manual_seed(3)
    output = module(query, query, query)
    torch.manual_seed(3)
    assert torch.equal(output, attention(query, query, query, causal=True, dropout=0.5))
    plain = attention(query, query, query, causal=True)
    assert torch.equal(module.eval()(query, query, query), plain)


# Several processes


def of_rank(rank, world, device, folder):
    """What each process finds out about shards and rings, against calls of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.partition(":")[0], (world,))
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    states = [normal(2, 4, 24, 16, device=device, dtype=dtype, seed=i) for i in range(3)]
    seed, found = seed_of(7, device), {}
    for name, placement in (("heads", Shard(1)), ("batch", Shard(0)), ("whole", Replicate())):
        shards = [distribute_tensor(each, mesh, [placement]).requires_grad_() for each in states]
        local = [each.detach().to_local().clone().requires_grad_() for each in shards]
        own = seed + rank if placement.is_shard() else seed

        def call(query, key, value, seed):
            output = attention(query, key, value, causal=True, dropout=0.3, seed=seed)
            return softmax(output, dropout=0.3, seed=seed, return_lse=True)[0]

        result, alone = call(*shards, seed), call(*local, own)
        of_shards = torch.autograd.grad(result.sin().sum(), shards)
        of_local = torch.autograd.grad(alone.sin().sum(), local)
        pairs = [(result, alone), *zip(of_shards, of_local, strict=True)]
        found[name] = all(torch.allclose(one.to_local(), other) for one, other in pairs)
    by_queries = distribute_tensor(states[0], mesh, [Shard(2)])
    with pytest.raises(RuntimeError, match=r"scores: expected a DTensor whose shards can be comp"):
        softmax(by_queries, dropout=0.3)
    assert softmax(by_queries).shape == states[0].shape
    group = torch.distributed.group.WORLD
    tolerance = 1e-10 if device == "cpu" else 2e-2
    for order, held in (("contiguous", [rank]), ("zigzag", [rank, 2 * world - 1 - rank])):
        count = world * len(held)
        parts = [each.chunk(count, 2) for each in states]
        mine = [torch.cat([each[p] for p in held], 2).requires_grad_() for each in parts]
        options = {"causal": True, "dropout": 0.3, "seed": seed}
        output, lse = megasoftmax.ring_attention(*mine, group=group, order=order, **options)
        of_parts = []
        for p, queries in zip(held, mine[0].chunk(len(held), 2), strict=True):
            blocks = []
            for k in range(p + 1):
                options = {"causal": k == p, "dropout": 0.3, "seed": seed + p * count + k}
                block = (queries, parts[1][k], parts[2][k])
                blocks.append(attention(*block, **options, return_lse=True))
            of_parts.append(megasoftmax.merge_attention(*zip(*blocks, strict=True)))
        wanted = [torch.cat(each, 2) for each in zip(*of_parts, strict=True)]
        of_ring, exact = (
            torch.autograd.grad(each.sin().sum(), mine[0])[0] for each in (output, wanted[0])
        )
        pairs = {"output": (output, wanted[0]), "lse": (lse, wanted[1])}
        for what, pair in (pairs | {"gradient": (of_ring, exact)}).items():
            is_close = torch.allclose(*pair, rtol=tolerance, atol=tolerance)
            found[f"{what} of the {order} ring"] = is_close
    return found


def test_shards_and_rings(device, tmp_path):
    has_gpus = torch.cuda.device_count() > 1 and torch.distributed.is_nccl_available()
    if device == "cuda" and not has_gpus:
        pytest.skip("needs 2 GPUs and NCCL")
    for found in processes.spawn(of_rank, 2, device, tmp_path):
        assert all(found.values()), found


# Messages


ZEROS = partial(torch.zeros, dtype=torch.int64)
WRONG = {
    ValueError: [
        *(
            ({"dropout": x}, f"dropout: expected a number from 0 to 1, got {x}$")
            for x in (-0.1, 1.5, math.nan)
        ),
        ({"seed": ZEROS(2)}, r"seed: expected one element, got shape \(2,\)$"),
        ({"seed": ZEROS(1).to("meta")}, r"seed: expected device cpu, as (scores|query), got meta$"),
    ],
    TypeError: [
        ({"dropout": "0.1"}, "dropout: expected a number from 0 to 1, got str$"),
        ({"dropout": True}, "dropout: expected a number from 0 to 1, got bool$"),
        ({"seed": 5}, "seed: expected None or a tensor of int64, got int; pass torch.tensor"),
        (
            {"seed": torch.zeros(1, dtype=torch.int32)},
            r"seed: expected None or a tensor of int64, got a tensor of torch\.int32$",
        ),
    ],
}


@by_error(WRONG, "options")
def test_messages(error, options, message):
    x = torch.zeros(1, 2, 3, 4)
    for function, tensors in ((softmax, [x]), (attention, [x, x, x])):
        with pytest.raises(error, match=f"^{message}"):
            function(*tensors, **options)


def test_columns_are_not_dropped():
    with pytest.raises(ValueError, match=r"^dropout: expected only over the last dimension, got"):
        softmax(torch.zeros(2, 3, 4), dim=1, dropout=0.1)
    with pytest.raises(ValueError, match=r"^dropout: expected a number from 0 to 1, got 2$"):
        FusedAttention(2, dropout=2)


def test_dropout_is_no_reason_against_running_fused():
    x = torch.zeros(1, 2, 3, 4)
    options = {"dropout": 0.1, "seed": seed_of(1, "cpu")}
    for function, given in (
        (softmax, (x,)),
        (attention, (x, x, x)),
        (megasoftmax.attention_varlen, (x[0], x[0], x[0], torch.tensor([0, 2]))),
    ):
        reasons = megasoftmax.why_not_fused(function, *given)
        assert megasoftmax.why_not_fused(function, *given, **options) == reasons
    plain, dropping = FusedAttention(2), FusedAttention(2, dropout=0.1)
    assert megasoftmax.why_not_fused(dropping, x, x, x) == plain.why_not_fused(x, x, x)
    with pytest.raises(ValueError, match=r"^dropout: "):
        megasoftmax.why_not_fused(attention, x, x, x, dropout=2)
