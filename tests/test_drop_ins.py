"""The functions that stand in for torch's scaled_dot_product_attention and for flash-attn's."""

import inspect

import op_checks
import oracle
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from inputs import (
    HALVES,
    attention_as_defined,
    bits_equal,
    by_error,
    coin,
    deterministic,
    drawn,
    normal,
    record_calls,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import megasoftmax
from megasoftmax import autograd, scaled_dot_product_attention
from megasoftmax.functions.calls import new_seed
from megasoftmax.integrations import flash_attn

DOUBLE = torch.float64


def gradients(output, inputs, lse=None):
    """Of a weighted sum of the output, and of what is finite of a log-sum-exp."""
    loss = (output * normal(*output.shape, device=output.device.type, seed=9).to(output)).sum()
    if lse is not None:
        weights = normal(*lse.shape, device=lse.device.type, seed=8).to(lse)
        loss = loss + (lse * weights)[lse.isfinite()].sum()
    return list(torch.autograd.grad(loss, inputs))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


# torch's scaled_dot_product_attention

SHAPES = {  # query, key, value without their dimension; the function's other arguments
    "as many queries as keys": ((2, 4, 5), (2, 4, 5), (2, 4, 5), {}),
    "fewer queries": ((2, 4, 3), (2, 4, 7), (2, 4, 7), {}),
    "more queries": ((2, 4, 7), (2, 4, 3), (2, 4, 3), {}),
    "one query": ((2, 4, 1), (2, 4, 7), (2, 4, 7), {}),
    "[tokens, dim]": ((3,), (5,), (5,), {}),
    "[heads, tokens, dim]": ((4, 5), (4, 3), (4, 3), {}),
    "5 dimensions": ((2, 3, 4, 5), (2, 3, 4, 7), (2, 3, 4, 7), {}),
    "6 dimensions": ((2, 1, 3, 4, 5), (2, 2, 3, 1, 7), (1, 2, 1, 4, 7), {}),
    "one batch of keys": ((2, 4, 3), (1, 4, 5), (1, 4, 5), {}),
    "one batch of queries": ((1, 4, 3), (2, 4, 5), (2, 4, 5), {}),
    "one head of keys": ((2, 4, 3), (2, 1, 5), (2, 1, 5), {}),
    "one head of keys, more of values": ((2, 4, 3), (2, 1, 5), (2, 4, 5), {}),
    "one head of queries": ((2, 1, 3), (2, 4, 5), (2, 4, 5), {}),
    "other ranks": ((2, 4, 3), (4, 5), (5,), {}),
    "grouped heads": ((2, 4, 3), (2, 2, 5), (2, 2, 5), {"enable_gqa": True}),
    "grouped heads, one batch of keys": ((2, 4, 3), (1, 2, 5), (1, 2, 5), {"enable_gqa": True}),
    "grouped heads of 3 dimensions": ((4, 3), (2, 5), (2, 5), {"enable_gqa": True}),
    "a scale": ((2, 4, 3), (2, 4, 5), (2, 4, 5), {"scale": 0.3}),
}


def mask_shapes(case):
    """Of masks: whole, of one batch and head, of keys alone with all other dimensions."""
    query, key, value, _ = SHAPES[case]
    grouped = SHAPES[case][3].get("enable_gqa", False)
    leading = (
        (*torch.broadcast_shapes(query[:-2], key[:-2]), query[-2])
        if grouped
        else torch.broadcast_shapes(query[:-1], key[:-1], value[:-1])
    )
    whole = (*leading, query[-1], key[-1])
    return [whole, whole[-2:], (1,) * (len(whole) - 1) + whole[-1:], (*leading, 1, 1)]


def sdpa_inputs(case, device, dtype=DOUBLE):
    *shapes, options = SHAPES[case]
    sizes = ((*shape, dim) for shape, dim in zip(shapes, (8, 8, 6), strict=True))
    return drawn(*sizes, device=device, dtype=dtype), options


def check_sdpa(tensors, leaves, **options):
    found = []
    for function in (scaled_dot_product_attention, torch_sdpa):
        output = function(*tensors, **options)
        found.append([output, *gradients(output, leaves)])
    assert_close(*found)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SHAPES)
def test_sdpa_without_mask(case, is_causal, device):
    tensors, options = sdpa_inputs(case, device)
    check_sdpa(tensors, tensors, is_causal=is_causal, **options)


@pytest.mark.parametrize("case", SHAPES)
def test_sdpa_with_masks(case, device):
    """With a query for which nothing is left, where the mask has queries."""
    tensors, options = sdpa_inputs(case, device)
    for shape in mask_shapes(case):
        keep = coin(*shape, device=device, odds=0.6)
        keep[..., 0, :] = False
        check_sdpa(tensors, tensors, attn_mask=keep, **options)
        added = normal(*shape, device=device, seed=4).to(DOUBLE)
        added[..., 0, 0] = -torch.inf
        added.requires_grad_()
        check_sdpa(tensors, [*tensors, added], attn_mask=added, **options)


def test_a_query_without_keys_is_0(device):
    tensors, _ = sdpa_inputs("fewer queries", device)
    keep = torch.tensor([[True] * 7, [False] * 7, [True] * 7], device=device)
    for mask in (keep, keep.double().log()):
        output = scaled_dot_product_attention(*tensors, attn_mask=mask)
        assert (output[:, :, 1] == 0).all()
        assert (output[:, :, [0, 2]] != 0).all()
        of_query, *_ = torch.autograd.grad(output.sum(), tensors)
        assert (of_query[:, :, 1] == 0).all()


def test_an_expanded_mask_is_inverted_unexpanded(monkeypatch):
    calls = record_calls(monkeypatch, "attention", megasoftmax.functions.sdpa)
    tensors, _ = sdpa_inputs("fewer queries", "cpu")
    keep = coin(2, 1, 1, 7, device="cpu", odds=0.6).expand(2, 4, 3, 7)
    check_sdpa(tensors, tensors, attn_mask=keep)
    ((_, options),) = calls
    assert options["mask"].shape == (2, 1, 1, 7)


@st.composite
def sdpa_calls(draw):
    """Sizes, which of the dimensions before tokens each tensor has as 1 or not at all, a mask."""
    leading = draw(st.lists(st.integers(1, 3), max_size=3))
    queries, keys = draw(st.integers(1, 6)), draw(st.integers(1, 6))

    def broadcasting(sizes):
        kept = [1 if draw(st.booleans()) else size for size in sizes]
        return kept[draw(st.integers(0, len(kept))) :]

    tensors = [[*broadcasting(leading), tokens] for tokens in (queries, keys, keys)]
    mask = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    return (
        tensors,
        mask,
        [*broadcasting(leading), *draw(st.sampled_from([(queries, keys), (1, 1)]))],
    )


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(call=sdpa_calls())
def test_any_call_of_sdpa(call):
    shapes, mask, mask_shape = call
    tensors = [
        normal(*shape, 4, device="cpu", seed=seed).double().requires_grad_()
        for seed, shape in enumerate(shapes)
    ]
    options = {"is_causal": mask == "causal"}
    # torch adds the mask to scores in place, so it has no more than queries and keys have.
    of_scores = torch.broadcast_shapes(*(shape[:-1] for shape in shapes[:2]))
    assume(len(mask_shape) <= len(of_scores) + 2)
    assume(torch.broadcast_shapes(mask_shape[:-2], of_scores) == of_scores)
    if mask == "bool":
        options["attn_mask"] = coin(*mask_shape, device="cpu", odds=0.6)
    if mask == "float":
        options["attn_mask"] = normal(*mask_shape, device="cpu", seed=5).double()
    check_sdpa(tensors, tensors, **options)


def test_sdpa_has_the_signature_of_torch():
    """torch's own is not to be inspected; its first six arguments have places, the others none.

    A softcap is ours.
    """
    kinds = [
        (each.name, each.kind)
        for each in inspect.signature(scaled_dot_product_attention).parameters.values()
    ]
    places, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert kinds == [
        *[(name, places) for name in ("query", "key", "value", "attn_mask", "dropout_p")],
        ("is_causal", places),
        ("scale", keyword),
        ("enable_gqa", keyword),
        ("softcap", keyword),
    ]
    tensors, _ = sdpa_inputs("fewer queries", "cpu")
    assert_close(
        scaled_dot_product_attention(*tensors, None, 0.0, True),
        torch_sdpa(*tensors, None, 0.0, True),
    )


def test_sdpa_drops_as_attention(device):
    (query, key, value), _ = sdpa_inputs("fewer queries", device)
    torch.manual_seed(7)
    seed = new_seed(query.device)
    expected = megasoftmax.attention(query, key, value, dropout=0.4, seed=seed)
    torch.manual_seed(7)
    assert bits_equal(scaled_dot_product_attention(query, key, value, None, 0.4), expected)


@pytest.mark.parametrize("name", ["sdpa", "flash_attn"])
def test_compiled(name, device):
    tensors, _ = sdpa_inputs("fewer queries", device, torch.float32)
    keep = coin(2, 1, 1, 7, device=device, odds=0.6).expand(2, 4, 3, 7)
    slopes = torch.tensor([0.5, 0.25, 1.0, 0.1], device=device)

    def sdpa(*tensors):
        masked = scaled_dot_product_attention(*tensors, attn_mask=keep)
        return masked + scaled_dot_product_attention(*tensors, is_causal=True)

    def flash(*tensors):
        q, k, v = (each.transpose(1, 2) for each in tensors)
        output = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
        return output + flash_attn.flash_attn_func(q, k, v, softcap=0.8, window_size=(3, 0))

    function = sdpa if name == "sdpa" else flash
    op_checks.check_compiled(function, op_checks.gradients_of, tensors, dynamic=False)


def test_sdpa_under_vmap(device):
    (query, key, value), _ = sdpa_inputs("fewer queries", device)
    keep = coin(2, 1, 7, device=device, odds=0.6).expand(2, 3, 7)
    mapped = torch.vmap(
        lambda q, k, v, m: scaled_dot_product_attention(q, k, v, attn_mask=m), randomness="error"
    )(query, key, value, keep)
    assert_close(mapped, torch_sdpa(query, key, value, attn_mask=keep[:, None]))


def test_why_sdpa_does_not_run_fused(device):
    tensors, options = sdpa_inputs("other ranks", device)
    ours = megasoftmax.why_not_fused(scaled_dot_product_attention, *tensors, **options)
    whole, _ = sdpa_inputs("fewer queries", device)
    assert ours == megasoftmax.why_not_fused(megasoftmax.attention, *whole)
    assert "dtype" in [reason.constraint for reason in ours]


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_cpu_takes_torchs_attention(has_mask, monkeypatch):
    calls = record_calls(monkeypatch, "attention", autograd.sdpa)
    query, key, value = (normal(1, 7, 4, 8, device="cpu", seed=i) for i in range(3))
    heads_first = [each.transpose(1, 2) for each in (query, key, value)]
    mask = coin(7, 7, device="cpu") if has_mask else None
    scaled_dot_product_attention(*heads_first, mask)
    flash_attn.flash_attn_func(query, key, value, causal=has_mask)
    is_plain = [added is None and not causal for (*_, added, causal, _), _ in calls]
    assert is_plain == [not has_mask] * 2
    lengths = torch.tensor([0, 3, 7])
    flash_attn.flash_attn_varlen_func(query[0], key[0], value[0], lengths, lengths, 4, 4)
    assert len(calls) == 3
    flash_attn.flash_attn_func(query, key, value, return_attn_probs=True)
    assert len(calls) == 3


# flash-attn, against its formula in float64


def check_flash(result, expected, leaves, exact=None, assert_close=assert_close):
    """Output and log-sum-exp, and gradients, of which the expected ones may have other leaves."""
    output, lse, probabilities = result
    assert probabilities is None
    assert_close(output, expected[0])
    assert_close(lse, expected[1])
    wanted = gradients(expected[0], exact or leaves, expected[1])
    op_checks.assert_all_close(gradients(output, leaves, lse), wanted, assert_close)


def formula(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None
):
    """Output [batch, queries, heads, dim] and log-sum-exp [batch, heads, queries]."""
    queries, keys = q.shape[1], k.shape[1]
    ahead = torch.arange(keys, device=q.device) - torch.arange(queries, device=q.device)[:, None]
    options = {
        "scale": softmax_scale,
        "softcap": softcap or None,
        "excluded": oracle.excluded_entries(ahead, None, causal, window_size),
    }
    if alibi_slopes is not None:
        options["bias"] = -alibi_slopes[..., None, None] * (ahead - (keys - queries)).abs()
    output, lse = attention_as_defined(*(each.transpose(1, 2) for each in (q, k, v)), **options)
    return output.transpose(1, 2), lse


def flash_inputs(device, queries=5, keys=9, dtype=DOUBLE, dim=8):
    shapes = ((2, queries, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim))
    return drawn(*shapes, device=device, dtype=dtype)


FLASH = {
    "plain": dict,
    "scale": lambda: {"softmax_scale": 0.7},
    "causal": lambda: {"causal": True},
    "window": lambda: {"window_size": (2, 1)},
    "window of the left": lambda: {"window_size": (3, -1)},
    "window of the right": lambda: {"window_size": (-1, 0)},
    "causal, window": lambda: {"causal": True, "window_size": (2, 4)},
    "slopes": lambda: {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.1], dtype=DOUBLE)},
    "slopes of batches": lambda: {
        "alibi_slopes": normal(2, 4, device="cpu", seed=5).double().abs(),
        "causal": True,
    },
    "softcap": lambda: {"softcap": 0.8},
    "softcap and all": lambda: {
        "softcap": 0.8,
        "softmax_scale": 0.7,
        "causal": True,
        "window_size": (3, 2),
        "alibi_slopes": normal(2, 4, device="cpu", seed=5).double().abs(),
    },
}


def on(device, case):
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in FLASH[case]().items()
    }


@pytest.mark.parametrize("lengths", [(5, 9), (6, 6), (7, 3), (1, 9)])
@pytest.mark.parametrize("case", FLASH)
def test_flash_attn_func(case, lengths, device):
    """More queries than keys: the first see nothing where it is causal."""
    tensors, options = flash_inputs(device, *lengths), on(device, case)
    leaves = list(tensors)
    if "alibi_slopes" in options:
        leaves.append(options["alibi_slopes"].requires_grad_())
    result = flash_attn.flash_attn_func(*tensors, **options, return_attn_probs=True)
    assert result[0].is_contiguous()
    check_flash(result, formula(*tensors, **options), leaves)
    alone = flash_attn.flash_attn_func(*tensors, **options)
    assert alone.is_contiguous()
    assert_close(alone, result[0])


def test_types_of_softcap():
    q, k, v = flash_inputs("cpu", dtype=torch.bfloat16)
    output, lse, _ = flash_attn.flash_attn_func(q, k, v, softcap=0.8, return_attn_probs=True)
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = formula(q.double(), k.double(), v.double(), softcap=0.8)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)


DOCUMENTS = [(3, 5), (0, 2), (6, 4), (1, 1), (2, 0), (4, 4)]  # queries and keys of each


def packed_inputs(device, documents, dtype=DOUBLE):
    """Tensors, offsets, and the longest lengths."""
    lengths = torch.tensor(documents).T
    (queries, keys), longest = lengths.sum(1).tolist(), lengths.amax(1).tolist()
    shapes = ((queries, 4, 8), (keys, 2, 8), (keys, 2, 8))
    tensors = drawn(*shapes, device=device, dtype=dtype)
    pad = torch.nn.functional.pad
    offsets = pad(lengths.cumsum(1), (1, 0)).int().to(device)
    return tensors, list(offsets), longest


def by_document(q, k, v, documents, **options):
    queries, keys = zip(*documents, strict=True)
    found = [
        formula(*(each[None] for each in document), **options)
        for document in zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    ]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs, 1)[0], torch.cat(lses, 2)[0]


VARLEN = [case for case in FLASH if "slopes" not in case and case != "softcap and all"]


@pytest.mark.parametrize("case", VARLEN)
def test_flash_attn_varlen_func(case, device):
    tensors, offsets, longest = packed_inputs(device, DOCUMENTS)
    options = FLASH[case]()
    result = flash_attn.flash_attn_varlen_func(
        *tensors, *offsets, *longest, **options, return_attn_probs=True
    )
    assert result[1].shape == (4, len(result[0]))
    check_flash(result, by_document(*tensors, DOCUMENTS, **options), tensors)
    alone = flash_attn.flash_attn_varlen_func(*tensors, *offsets, *longest, **options)
    assert_close(alone, result[0])


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_packed_sequences(causal, device):
    documents = [(3, 3), (0, 0), (6, 6), (1, 1)]
    tensors, (offsets, _), (longest, _) = packed_inputs(device, documents)
    options = {**on(device, "slopes"), "causal": causal}
    result = flash_attn.flash_attn_varlen_func(
        *tensors, offsets, offsets, longest, longest, **options, return_attn_probs=True
    )
    check_flash(result, by_document(*tensors, documents, **options), tensors)


def test_packed_tensors(device):
    """The options by their places, too."""
    q, k, v = flash_inputs(device, 6, 6)
    options = (0.0, 0.7, True, (2, 0), 0.0, None, False)
    expected = flash_attn.flash_attn_func(q, k, v, *options)
    kv = torch.stack([k, v], 2)
    assert bits_equal(flash_attn.flash_attn_kvpacked_func(q, kv, *options), expected)
    k, v = (each.repeat_interleave(2, 2) for each in (k, v))
    qkv = torch.stack([q, k, v], 2)
    whole = flash_attn.flash_attn_func(q, k, v, *options)
    assert bits_equal(flash_attn.flash_attn_qkvpacked_func(qkv, *options), whole)
    assert_close(whole, expected)

    offsets = torch.tensor([0, 2, 6, 12], device=device, dtype=torch.int32)
    q, k, v, kv, qkv = (each.flatten(0, 1) for each in (q, k, v, kv, qkv))
    lengths = (offsets, offsets, 6, 6)
    named = {"return_attn_probs": True}
    found = [
        flash_attn.flash_attn_varlen_func(q, k, v, *lengths, *options, **named),
        flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 6, *options, **named),
        flash_attn.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], *lengths, *options, **named),
    ]
    for output, lse, _ in found[1:]:
        assert bits_equal(output, found[0][0])
        assert bits_equal(lse, found[0][1])
    # kv keeps the grouped heads.
    grouped = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *lengths, *options)
    assert_close(grouped, found[0][0])


def test_flash_attn_drops_as_attention(device):
    q, k, v = flash_inputs(device)
    torch.manual_seed(7)
    seed = new_seed(q.device)
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    expected = megasoftmax.attention(query, key, value, dropout=0.1, seed=seed)
    torch.manual_seed(7)
    output = flash_attn.flash_attn_func(q, k, v, 0.1)
    assert bits_equal(output, expected.transpose(1, 2))
    wanted = gradients(expected.transpose(1, 2), [q, k, v])
    assert all(map(bits_equal, gradients(output, [q, k, v]), wanted))
    assert not torch.equal(output, flash_attn.flash_attn_func(q, k, v, 0.0))
    torch.manual_seed(7)  # so do scores that are capped so far away that they are not
    assert_close(flash_attn.flash_attn_func(q, k, v, 0.1, softcap=1e6), output)

    tensors, offsets, longest = packed_inputs(device, DOCUMENTS)
    expected = megasoftmax.attention_varlen(*tensors, *offsets, dropout=0.1, seed=seed)
    torch.manual_seed(7)
    output = flash_attn.flash_attn_varlen_func(*tensors, *offsets, *longest, 0.1)
    assert bits_equal(output, expected)


def test_deterministic(device):
    q, k, v = flash_inputs(device)
    with pytest.raises(ValueError, match=r"^deterministic: .*use_deterministic_algorithms\(True\)"):
        flash_attn.flash_attn_func(q, k, v, deterministic=True)
    with deterministic():
        found = flash_attn.flash_attn_func(q, k, v, deterministic=True)
    assert torch.equal(found, flash_attn.flash_attn_func(q, k, v))


def test_flash_attn_has_the_arguments_of_flash_attn():
    common = [
        *("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
        *("deterministic", "return_attn_probs"),
    ]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    dense, varlen = (
        list(inspect.signature(function).parameters)
        for function in (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
    )
    assert dense == ["q", "k", "v", *common]
    assert varlen == ["q", "k", "v", *lengths, *common, "block_table"]


# Wrong use

TOKENS = torch.zeros(2, 5, 4, 8)  # of flash-attn: [batch, tokens, heads, dim]
OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)


def sdpa(*shapes, **options):
    return lambda: scaled_dot_product_attention(*map(torch.zeros, shapes), **options)


def flash(**options):
    return lambda: flash_attn.flash_attn_func(TOKENS, TOKENS, TOKENS, **options)


def varlen(k=OFFSETS, **options):
    tensors = (TOKENS[0],) * 3
    return lambda: flash_attn.flash_attn_varlen_func(*tensors, OFFSETS, k, 3, 3, **options)


SAME = ((2, 4, 5, 8),) * 3
WRONG = {
    ValueError: [
        (sdpa((8,), (5, 8), (5, 8)), r"query: expected .*got shape \(8,\)"),
        (sdpa((2, 3, 5, 8), *((4, 3, 5, 8),) * 2), r"batch dimensions .*\(2,\), \(4,"),
        (
            sdpa((2, 4, 5, 8), *((2, 2, 5, 8),) * 2),
            r"heads \(or enable_gqa=True, if query heads share keys\) .*\(4,\), \(2,",
        ),
        (sdpa((2, 4, 5, 8), *((2, 3, 5, 8),) * 2, enable_gqa=True), "divide 4.*got 3"),
        (
            sdpa((2, 4, 5, 8), (2, 4, 5, 8), (2, 2, 5, 8), enable_gqa=True),
            r"heads of key and value .*\(4,\), \(2,",
        ),
        (sdpa((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 6, 8), is_causal=True), "value: .*7, got 6"),
        (sdpa((2, 4, 5, 8), *((2, 4, 5, 6),) * 2), r"key: expected shape .*8\]"),
        (sdpa(*SAME, attn_mask=torch.ones(5, 4)), r"attn_mask: .*got \(5, 4\)"),
        (sdpa(*SAME, attn_mask=torch.ones(3, 1, 5, 5)), "attn_mask: .*broadcasts to"),
        (sdpa(*SAME, attn_mask=torch.ones(5, 5), is_causal=True), "is_causal: .*attn_mask"),
        (sdpa(*SAME, dropout_p=1.5), "dropout_p: .*got 1.5"),
        (
            lambda: flash_attn.flash_attn_func(TOKENS[0], TOKENS, TOKENS),
            r"q: expected \[batch, tokens, heads, dim\]",
        ),
        (
            lambda: flash_attn.flash_attn_func(TOKENS, TOKENS[:1], TOKENS, softcap=1.0),
            r"k: expected shape \[2, tokens, key_heads, 8\], as q",
        ),
        (flash(dropout_p=-0.1), "dropout_p: .*got -0.1"),
        (flash(window_size=(1,)), "window_size: expected"),
        (flash(window_size=(-2, 0)), "window_size: expected"),
        (flash(softcap=-1.0), "softcap: .*got -1.0"),
        (flash(alibi_slopes=torch.ones(1)), r"alibi_slopes: .*\(4,\) or \(2, 4\), got \(1,"),
        (varlen(softcap=-1.0), "softcap: .*got -1.0"),
        (varlen(block_table=OFFSETS), "block_table: expected None"),
        (varlen(OFFSETS.clone(), alibi_slopes=torch.ones(4)), "alibi_slopes: .*two tensors"),
        (varlen(alibi_slopes=torch.ones(2, 4)), r"alibi_slopes: .*\(4,\), got \(2, 4\)"),
        (
            lambda: flash_attn.flash_attn_varlen_func(*(TOKENS,) * 3, OFFSETS, OFFSETS, 3, 3),
            r"q: expected \[tokens, heads, dim\]",
        ),
        (
            lambda: flash_attn.flash_attn_qkvpacked_func(torch.zeros(2, 5, 2, 4, 8)),
            r"qkv: expected \[batch, tokens, 3, heads, dim\], got shape \(2, 5, 2, 4, 8\)",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_kvpacked_func(
                TOKENS[0], TOKENS, OFFSETS, OFFSETS, 3, 3
            ),
            r"kv: expected \[tokens, 2, heads, dim\]",
        ),
    ],
    TypeError: [
        (sdpa(*SAME, attn_mask=torch.ones(5, 5).int()), "attn_mask: .*True = keep.*int32"),
        (sdpa(*SAME, attn_mask=[[True]]), "attn_mask: .*got list"),
        (sdpa(*SAME, is_causal=1), "is_causal: expected a bool, got int"),
        (sdpa(*SAME, enable_gqa=None), "enable_gqa: expected a bool, got NoneType"),
        (sdpa(*SAME, scale="1"), "scale: expected a number, got str"),
        (lambda: scaled_dot_product_attention(*(TOKENS.int(),) * 3), "query: .*int32"),
        (flash(causal=1), "causal: expected a bool"),
        (flash(softcap="1"), "softcap: .*got str"),
        (flash(alibi_slopes=0.5), "alibi_slopes: .*got float"),
    ],
}


@by_error(WRONG)
def test_wrong_use(error, call, message):
    with pytest.raises(error, match=message):
        call()


# In half precision, on kernels


def assert_near(actual, expected):
    """Relative to the largest entry: gradients are sums of terms that were rounded."""
    tolerance = 5e-3 if actual.dtype == torch.float16 else 3e-2
    largest = expected.detach().abs().max().item()
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance * max(largest, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(150, 150), (70, 200), (200, 70)])
def test_sdpa_on_kernels(lengths, is_causal, dtype):
    shapes = [(2, 4, lengths[0], 64), (1, 2, lengths[1], 64), (1, 2, lengths[1], 64)]
    tensors = drawn(*shapes, device="cuda", dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    keep = coin(2, 1, 1, lengths[1], device="cuda", odds=0.8)
    masks = [None] if is_causal else [None, keep, normal(4, *lengths, device="cuda", dtype=dtype)]
    for mask in masks:
        options = {"is_causal": is_causal, "enable_gqa": True}
        reasons = megasoftmax.why_not_fused(
            scaled_dot_product_attention, *tensors, attn_mask=mask, **options
        )
        assert reasons == ()
        output = scaled_dot_product_attention(*tensors, attn_mask=mask, **options)
        mask = mask.double() if mask is not None and mask.is_floating_point() else mask
        expected = torch_sdpa(*exact, attn_mask=mask, **options)
        assert_near(output, expected)
        found = gradients(output, tensors)
        op_checks.assert_all_close(found, gradients(expected, exact), assert_near)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", FLASH)
def test_flash_attn_func_on_kernels(case, dtype):
    tensors, options = flash_inputs("cuda", 150, 200, dtype, dim=64), on("cuda", case)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    result = flash_attn.flash_attn_func(*tensors, **options, return_attn_probs=True)
    check_flash(result, formula(*exact, **options), tensors, exact, assert_near)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", [*VARLEN, "slopes"])
def test_flash_attn_varlen_func_on_kernels(case, dtype):
    documents = [(70, 70), (0, 0), (130, 130), (3, 3)]
    tensors, (offsets, _), (longest, _) = packed_inputs("cuda", documents, dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    options = on("cuda", case)
    result = flash_attn.flash_attn_varlen_func(
        *tensors, offsets, offsets, longest, longest, **options, return_attn_probs=True
    )
    expected = by_document(*exact, documents, **options)
    check_flash(result, expected, tensors, exact, assert_near)
