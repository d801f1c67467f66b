"""The bias makers against the formulas that they stand for, entry by entry."""

import math

import pytest
import torch
from inputs import by_error, normal

from megasoftmax import biases

HEADS = 3
SHAPES = [(7, 7), (1, 9), (3, 11), (5, 2), (1, 1), (300, 300)]
SPECIAL_SHAPES = [(0, 0), (0, 4), (4, 0)]


def by_loop(table, queries, keys):
    """Entry (i, j) is table[..., j - i + queries - 1], as the definition reads."""
    rows = [
        torch.stack([table[..., j - i + queries - 1] for j in range(keys)], -1)
        for i in range(queries)
    ]
    return torch.stack(rows, -2)


# The dense form


@pytest.mark.parametrize("shape", [(7, 7), (1, 9), (3, 11), (5, 2), (1, 1)])
@pytest.mark.parametrize("leading", [(HEADS,), (1,), (2, HEADS)])
def test_dense_and_its_gradient(shape, leading, device):
    table = normal(*leading, sum(shape) - 1, device=device).requires_grad_()
    expected_table = table.detach().clone().requires_grad_()
    actual = biases.RelativeBias(table).dense(*shape)
    expected = by_loop(expected_table, *shape)
    assert torch.equal(actual, expected)
    gradient = normal(*actual.shape, device=device, seed=1)
    actual.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(table.grad, expected_table.grad)


@pytest.mark.parametrize("shape", SPECIAL_SHAPES)
def test_dense_without_queries_or_keys(shape):
    table = torch.zeros(HEADS, max(sum(shape) - 1, 0))
    assert biases.RelativeBias(table).dense(*shape).shape == (HEADS, *shape)


@pytest.mark.parametrize("shape", [*SHAPES[:-1], *SPECIAL_SHAPES])
@pytest.mark.parametrize("more", [0, 3])
def test_dense_of_a_table_for_each_query_is_a_view(shape, more, device):
    queries, keys = shape
    columns = max(queries + keys - 1, 0) + more
    table = normal(2, HEADS, queries, columns, device=device)
    actual = biases.ShiftedBias(table).dense(*shape)
    rows = torch.arange(queries, device=device)[:, None]
    places = torch.arange(keys, device=device) - rows + queries - 1
    assert torch.equal(actual, table[:, :, rows, places])
    if actual.numel() > 0:
        assert actual.data_ptr() - table.data_ptr() == table.element_size() * (queries - 1)


@pytest.mark.parametrize("shape", [(5, 5, 9), (1, 1, 1), (1, 4, 7), (3, 7, 13), (4, 4, 12)])
def test_derivatives_of_a_table_for_each_query(shape):
    queries, keys, columns = shape
    table = torch.randn(2, queries, columns, dtype=torch.float64, requires_grad=True)

    def dense(table):
        return biases.ShiftedBias(table).dense(queries, keys)

    assert torch.autograd.gradcheck(dense, (table,), check_batched_grad=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(dense, (table,))
    of_each = torch.func.vmap(torch.func.grad(lambda table: (dense(table) ** 2).sum()))(table)
    (of_all,) = torch.autograd.grad((dense(table) ** 2).sum(), table)
    torch.testing.assert_close(of_each, of_all)


@pytest.mark.parametrize("shape", [(7, 10), (6, 12)])
def test_dense_of_another_table_for_each_query_is_refused(shape):
    expected = r"table: expected \[..., 7, at least 11\] for 7 queries and 5 keys, got shape"
    with pytest.raises(ValueError, match=expected):
        biases.ShiftedBias(torch.zeros(3, *shape)).dense(7, 5)


def test_dense_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match=r"table: .*7 queries and 5 keys, got shape \(3, 12\)"):
        biases.RelativeBias(torch.zeros(3, 12)).dense(7, 5)


# T5


@pytest.mark.parametrize("shape", [*SHAPES, (40, 300)])
@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 20), (9, 50)])
def test_t5_bias_is_that_of_transformers(shape, is_decoder, buckets, max_distance, device):
    modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = modeling_t5.T5Config(
        num_heads=HEADS,
        d_model=12,
        d_kv=4,
        is_decoder=is_decoder,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=max_distance,
    )
    layer = modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    theirs = layer.to(device).relative_attention_bias.weight
    ours = theirs.detach().clone().requires_grad_()
    queries, keys = shape
    options = {"bidirectional": not is_decoder, "max_distance": max_distance}
    actual = biases.t5_bias(ours, queries, keys, **options).dense(queries, keys)
    expected = layer.compute_bias(queries, keys, past_seen_tokens=keys - queries)[0]
    assert torch.equal(actual, expected)
    gradient = normal(*actual.shape, device=device, seed=1).round()  # sums of integers are exact
    actual.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(ours.grad, theirs.grad)

    from_the_first_key = biases.t5_bias(ours, queries, keys, **options, offset=0)
    expected = layer.compute_bias(queries, keys)[0]
    assert torch.equal(from_the_first_key.dense(queries, keys), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tables_are_small(dtype, device):
    weight = normal(32, HEADS, device=device, dtype=dtype)
    table = biases.t5_bias(weight, 40, 1000, bidirectional=True).table
    assert table.shape == (HEADS, 1039)
    assert table.dtype == dtype
    assert table.is_contiguous()
    table = biases.alibi_bias(weight[0], 40, 1000).table
    assert table.shape == (HEADS, 1039)
    assert table.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("shape", SPECIAL_SHAPES)
def test_tables_without_queries_or_keys(shape):
    columns = max(sum(shape) - 1, 0)
    table = biases.t5_bias(torch.zeros(32, HEADS), *shape, bidirectional=True).table
    assert table.shape == (HEADS, columns)
    assert biases.alibi_bias(torch.zeros(HEADS), *shape).table.shape == (HEADS, columns)


# ALiBi


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 20, 31])
def test_slopes_are_those_of_bloom(heads, device):
    modeling_bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    keep = torch.ones(1, 2, device=device, dtype=torch.long)
    expected = modeling_bloom.build_alibi_tensor(keep, heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(biases.alibi_slopes(heads, device), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(7, 7), (1, 9), (3, 11)])
def test_alibi_bias_is_that_of_bloom_where_causal(shape, device):
    """Bloom's bias differs by a number per query, which softmax does not see."""
    modeling_bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    queries, keys = shape
    slopes = biases.alibi_slopes(HEADS, device)
    keep = torch.ones(1, keys, device=device, dtype=torch.long)
    theirs = modeling_bloom.build_alibi_tensor(keep, HEADS, torch.float32)
    scores = normal(HEADS, queries, keys, device=device)
    later = torch.ones(queries, keys, device=device).triu(keys - queries + 1).bool()
    actual, expected = (
        (scores + bias).masked_fill(later, -math.inf).softmax(-1)
        for bias in (biases.alibi_bias(slopes, queries, keys).dense(queries, keys), theirs)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 7), (3, 11), (5, 2)])
@pytest.mark.parametrize("offset", [None, 0, 2])
@pytest.mark.parametrize("leading", [(HEADS,), (2, HEADS)])
def test_alibi_bias_and_its_gradient(leading, shape, offset, device):
    queries, keys = shape
    slopes = normal(*leading, device=device).requires_grad_()
    expected_slopes = slopes.detach().clone().requires_grad_()
    first = keys - queries if offset is None else offset
    distance = torch.tensor(
        [[abs(j - i - first) for j in range(keys)] for i in range(queries)], device=device
    )
    actual = biases.alibi_bias(slopes, queries, keys, offset=offset).dense(queries, keys)
    expected = -expected_slopes[..., None, None] * distance
    assert torch.equal(actual, expected)
    gradient = normal(*actual.shape, device=device, seed=1)
    actual.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(slopes.grad, expected_slopes.grad)


# Wrong use


def t5_bias(weight, bidirectional=False, **options):
    return lambda: biases.t5_bias(weight, 3, 3, bidirectional=bidirectional, **options)


WRONG = {
    ValueError: [
        (t5_bias(torch.zeros(3, 2), bidirectional=True), "weight: .*4 buckets, got 3"),
        (t5_bias(torch.zeros(1, 2)), "weight: .*2 buckets, got 1"),
        (t5_bias(torch.zeros(32)), r"weight: .*buckets, heads.* \(32,\)"),
        (t5_bias(torch.zeros(32, 2), max_distance=16), "max_distance: .*16"),
        (lambda: biases.alibi_bias(torch.zeros(()), 3, 3), r"slopes: .*\[..., heads\].*\(\)"),
        (lambda: biases.alibi_slopes(0), "heads: .*from 1 on, got 0"),
    ],
    TypeError: [
        (t5_bias(torch.zeros(4, 2, dtype=torch.int64)), "weight: .*torch.int64"),
        (t5_bias([[1.0]]), "weight: .*got list"),
        (lambda: biases.alibi_bias(0.5, 3, 3), "slopes: .*got float"),
    ],
}


@by_error(WRONG)
def test_bad_arguments_are_named(error, call, message):
    with pytest.raises(error, match=message):
        call()


def test_compiles_whole():
    weight = normal(32, HEADS, device="cpu")

    @torch.compile(fullgraph=True, backend="eager", dynamic=True)
    def compiled(weight, x):
        m, n = x.shape
        table = biases.t5_bias(weight, m, n, bidirectional=True).table
        return table + biases.alibi_bias(weight[0], m, n).table

    for shape in ((3, 5), (6, 4)):
        expected = biases.t5_bias(weight, *shape, bidirectional=True).table
        expected = expected + biases.alibi_bias(weight[0], *shape).table
        assert torch.equal(compiled(weight, torch.empty(shape)), expected)
