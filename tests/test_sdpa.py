"""attention on a CPU by torch's own scaled_dot_product_attention: which calls, what they give."""

import gc
import itertools
import random
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from inputs import bits_equal, coin, normal, saved_tensors, tensors
from torch import Tensor
from torch.autograd import forward_ad

import megasoftmax
from megasoftmax import RelativeBias, TileMask, autograd
from megasoftmax.functions import torch_sdpa
from megasoftmax.options import AttentionOptions

INF, NAN = torch.inf, torch.nan
OPTIONS = {
    "dtype": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    "heads": [(4, 4), (4, 2), (4, 1)],
    "lengths": [(1, 1), (1, 9), (7, 7), (5, 13), (13, 5), (70, 70)],
    "causal": [False, True],
    "window": [None, (2, 0), (-1, 1), (3, -1)],
    "mask": [None, "pairs", "keys", "per head", "tiles"],
    "bias": [None, "pairs", "keys", "one", "relative", "float32"],
    "learned": [False, True],
    "visible": [None, "first", "both"],
    "layout": ["plain", "tokens first", "dimension apart"],
    "scale": [None, 0.3, 4.0],
}


def _combinations(count):
    """Random ones, and every option alone beside the first of all others."""
    generator = random.Random(0)
    first = {name: values[0] for name, values in OPTIONS.items()} | {"lengths": (7, 7)}
    alone = [first | {name: value} for name, values in OPTIONS.items() for value in values]
    return alone + [
        {name: generator.choice(values) for name, values in OPTIONS.items()} for _ in range(count)
    ]


def _laid_out(tensor, layout):
    if layout == "tokens first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.mT.contiguous().mT if layout == "dimension apart" else tensor


def _arguments(choice):
    (m, n), heads, dtype = choice["lengths"], choice["heads"][0], choice["dtype"]
    shapes = {"pairs": (m, n), "keys": (2, 1, 1, n), "per head": (2, heads, m, n), "one": ()}
    arguments = {name: choice[name] for name in ("causal", "window", "scale")}
    if choice["mask"] == "tiles":
        blocks = coin(1, 1, -(-m // 64), -(-n // 64), device="cpu")
        arguments["mask"] = TileMask.from_blocks(blocks, 64)
    elif choice["mask"] is not None:
        arguments["mask"] = coin(*shapes[choice["mask"]], device="cpu")
    if choice["bias"] == "relative":
        table = normal(heads, m + n - 1, device="cpu", dtype=dtype, seed=4)
        arguments["bias"] = RelativeBias(table)
    elif choice["bias"] == "float32":
        arguments["bias"] = normal(1, heads, m, n, device="cpu", seed=4)
    elif choice["bias"] is not None:
        shape = shapes[choice["bias"]]
        arguments["bias"] = normal(*shape, device="cpu", dtype=dtype, seed=4)
    first = torch.arange(2)[:, None, None].expand(2, 1, m) - 1
    end = torch.full((m,), max(n - 2, 0), dtype=torch.int32)
    arguments["visible"] = {None: None, "first": (first, None), "both": (first, end)}[
        choice["visible"]
    ]
    return arguments


@pytest.fixture
def by_sdpa(monkeypatch):
    """Of each call that torch's attention was given: whether its result was taken."""
    taken = []

    def noting(attend):
        def noted(*args, **options):
            output = attend(*args, **options)
            taken.append(output is not None)
            return output

        return noted

    for name in ("attention", "attention_keeping_weights"):
        monkeypatch.setattr(autograd.sdpa, name, noting(getattr(autograd.sdpa, name)))
    return taken


def _both_passes(call, inputs, gradient):
    leaves = [each.detach().requires_grad_() for each in inputs]
    output = call(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def _both_ways(q, k, v, gradient, learned=None, **options):
    """Output and gradients by torch's attention, which those of the reference are close to."""

    def attend(q, k, v, *bias, fused):
        given = options | {"bias": bias[0]} if bias else options
        return megasoftmax.attention(q, k, v, **given, fused=fused)

    inputs = (q, k, v) if learned is None else (q, k, v, learned)
    found, expected = (
        _both_passes(partial(attend, fused=fused), inputs, gradient) for fused in (None, False)
    )
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)
    return found


def _relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("choice", _combinations(150), ids=lambda c: " ".join(map(str, c.values())))
def test_agrees_with_the_reference(choice, by_sdpa):
    plain = tensors(
        "cpu", choice["dtype"], heads=choice["heads"], lengths=choice["lengths"], dims=(16, 16)
    )
    q, k, v = inputs = tuple(_laid_out(each, choice["layout"]) for each in plain)
    arguments = _arguments(choice)
    found_reasons = megasoftmax.why_not_fused(megasoftmax.attention, q, k, v, **arguments)
    assert (found_reasons.runs, found_reasons.against_sdpa) == ("SDPA", ())
    gradient = normal(*q.shape, device="cpu", dtype=choice["dtype"], seed=5)
    bias = arguments.pop("bias", None)
    is_relative = isinstance(bias, RelativeBias)
    values = bias.table if is_relative else bias
    learned = () if values is None or not choice["learned"] else (values,)
    inputs = (*inputs, *learned)

    def call(fused):
        def attend(q, k, v, bias=values):
            bias = RelativeBias(bias.to(q.dtype)) if is_relative else bias
            return megasoftmax.attention(q, k, v, **arguments, bias=bias, fused=fused)

        return attend

    found = _both_passes(call(None), inputs, gradient)
    assert by_sdpa == [True]
    of_reference = _both_passes(call(False), inputs, gradient)
    doubles = tuple(each.double() for each in inputs)
    exact = _both_passes(call(False), doubles, gradient.double())
    # float64 has nothing more exact beside it, and differences of gradients lose digits.
    eps = 1e-13 if choice["dtype"] == torch.float64 else torch.finfo(choice["dtype"]).eps
    for ours, plainly, expected in zip(found, of_reference, exact, strict=True):
        assert ours.dtype == plainly.dtype
        size = float(expected.norm())
        if size < 1e-9:  # a gradient that is 0 but for rounding
            assert float(ours.double().norm()) <= 100 * eps * max(1, choice["scale"] or 1)
            continue
        error, of_plain = (_relative_error(each, expected) for each in (ours, plainly))
        assert error <= max(2 * of_plain, 16 * eps)
    rows = exact[0].abs().sum(-1) == 0
    assert torch.equal(found[0].abs().sum(-1) == 0, rows)
    assert found[0].transpose(1, 2).is_contiguous()


# Which way runs, and why


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale": 0.0}, "scale: expected above 0, got 0.0"),
        ({"scale": -0.5}, "scale: expected above 0, got -0.5"),
        ({"sink": 0.0}, "sink: expected None, got one"),
        ({"dropout": 0.5}, "dropout: expected 0, got 0.5"),
        ({"return_lse": True}, "return_lse: expected False, got True"),
    ],
)
def test_takes_the_reference(options, reason, by_sdpa):
    q, k, v = tensors("cpu")
    found = megasoftmax.why_not_fused(megasoftmax.attention, q, k, v, **options)
    assert [*map(str, found.against_sdpa)] == [reason]
    assert found.runs == "reference"
    assert found[0] == megasoftmax.Reason("device", "cpu", "a CUDA device")
    megasoftmax.attention(q, k, v, **options)
    assert by_sdpa == []


def test_only_the_device_counts_off_a_cpu():
    q, k, v = (each.to("meta") for each in tensors("cpu"))
    found = megasoftmax.why_not_fused(megasoftmax.attention, q, k, v, sink=0.0, scale=-1.0)
    assert [*map(str, found.against_sdpa)] == ["device: expected a CPU, got meta"]


def test_takes_the_reference_for_sizes():
    def against(*given, **options):
        reasons = megasoftmax.why_not_fused(megasoftmax.attention, *given, **options)
        return [*map(str, reasons.against_sdpa)]

    assert against(*tensors("cpu", dims=(8, 16))) == ["head dimension of value: expected 8, got 16"]
    assert against(*tensors("cpu", lengths=(5, 0))) == [
        "sizes of query and keys: expected at least 1, got (2, 4, 5, 8, 0)"
    ]
    rows = [each.unsqueeze(1).expand(-1, 3, -1, -1, -1) for each in tensors("cpu")]
    for bias in (torch.zeros(2, 1, 4, 5, 13), RelativeBias(torch.zeros(2, 1, 4, 17))):
        assert against(*rows, bias=bias) == ["batches of bias: expected 1, or 6, got 2"]
    assert against(*rows, bias=torch.zeros(2, 3, 4, 5, 13)) == []
    q = torch.zeros(1).expand(1, 2, 2**13, 8)
    mask = torch.zeros(1, dtype=torch.bool)
    assert against(q, q, q, causal=True) == []
    assert against(q, q, q, mask=mask.expand(1, 1, 2**13, 2**13)) == []
    assert against(q, q, q, mask=mask.expand(1, 2, 2**13, 2**13)) == [
        "entries that join the scores: expected at most 67108864, got 134217728"
    ]


class _CheckedError(Exception):
    """The arguments were checked one by one."""


@pytest.fixture
def checked(monkeypatch):
    def check(*given):
        raise _CheckedError

    monkeypatch.setattr(AttentionOptions, "check", check)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("dtype", OPTIONS["dtype"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": 0.3}, {"dropout": 0.0}])
def test_frequent_calls_are_not_checked_one_by_one(dtype, options, by_sdpa):
    q, k, v = tensors("cpu", dtype, heads=(2, 2), lengths=(7, 7))
    found = megasoftmax.attention(q, k, v, **options)
    assert by_sdpa == [True]
    is_causal, scale = options.get("causal", False), options.get("scale")
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale
    )
    torch.testing.assert_close(found, expected)


CHANGES = [
    lambda tensor: tensor[0],
    lambda tensor: tensor[:, :1],
    lambda tensor: tensor[:, :, 1:],
    lambda tensor: tensor[..., :4],
    lambda tensor: tensor.double(),
    lambda tensor: tensor.long(),
    lambda tensor: tensor.to("meta"),
    lambda tensor: tensor.as_subclass(type("Sub", (Tensor,), {})),
    lambda tensor: tensor.tolist(),
]


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(
    ("options", "which", "change", "context"),
    [
        *(
            (options, (), None, nullcontext)
            for options in (
                {"bias": torch.zeros(7)},
                {"mask": torch.zeros(7, dtype=torch.bool)},
                {"window": (1, 1)},
                {"visible": (None, None)},
                {"seed": torch.zeros(1)},
                {"return_lse": True},
                *({"fused": fused} for fused in (False, True)),
                *({"causal": causal} for causal in (1, None)),
                *({"dropout": dropout} for dropout in (0.5, -0.5, False, NAN)),
                *({"scale": scale} for scale in (0.0, -0.5, INF, NAN, "1")),
                {"sink": 0.0},
            )
        ),
        *(({}, (i,), change, nullcontext) for i in range(3) for change in CHANGES),
        ({}, range(3), lambda tensor: tensor[:, :, :0], nullcontext),
        ({}, range(3), lambda tensor: tensor[0], nullcontext),
        ({}, range(3), lambda tensor: tensor.long(), nullcontext),
        ({}, (), None, forward_ad.dual_level),
        ({}, (), None, lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
)
def test_other_calls_are_checked(options, which, change, context):
    given = [*tensors("cpu", heads=(2, 2), lengths=(7, 7))]
    for i in which:
        given[i] = change(given[i])
    with context(), pytest.raises(_CheckedError):
        megasoftmax.attention(*given, **options)


def test_documents_one_after_the_other(by_sdpa):
    q, k, v = (normal(10, 4, 8, device="cpu", seed=seed) for seed in range(3))
    offsets = torch.tensor([0, 3, 10])
    reasons = megasoftmax.why_not_fused(megasoftmax.attention_varlen, q, k, v, offsets, causal=True)
    assert reasons.runs == "SDPA"
    found, expected = (
        megasoftmax.attention_varlen(q, k, v, offsets, causal=True, fused=fused)
        for fused in (None, False)
    )
    torch.testing.assert_close(found, expected)
    assert found.is_contiguous()
    assert by_sdpa == [True]


def test_bias_without_its_gradient(by_sdpa):
    bias = torch.zeros(5, 13, requires_grad=True)
    with torch.no_grad():
        output = megasoftmax.attention(*tensors("cpu"), bias=bias)
    assert by_sdpa == [True]
    assert not output.requires_grad


@pytest.mark.parametrize("value", [NAN, INF])
def test_gradient_of_a_bias_beside_an_incoming_one_that_is_not_finite(value, by_sdpa):
    q, k, v = tensors("cpu", heads=(2, 2), lengths=(6, 6))
    bias = normal(2, 6, 6, device="cpu", seed=4)
    gradient = normal(*q.shape, device="cpu", seed=5)
    gradient[0, 0, 2, 0] = value
    found = _both_ways(q, k, v, gradient, learned=bias, causal=True)
    assert not found[4][0, 2, :3].isfinite().any()
    assert found[4][0, 2, 3:].eq(0).all()
    assert by_sdpa == [True]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_learned_bias_that_is_not_finite(value, by_sdpa):
    q, k, v = tensors("cpu", heads=(2, 2), lengths=(6, 6))
    bias = normal(2, 6, 6, device="cpu", seed=4)
    bias[1, 2] = value
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[2, 3:] = mask[:, 5] = True
    k[0, 0, 5, 0] = value
    gradient = normal(*q.shape, device="cpu", seed=5)
    found = _both_ways(q, k, v, gradient, learned=bias, mask=mask)
    assert found[4].masked_select(mask).eq(0).all()
    assert len(by_sdpa) == 1


def test_learned_table_keeps_no_pairs(by_sdpa):
    """Torch's attention gets [batch, heads, m, n] of bias and mask. The backward pass does not."""
    q, k, v = (each.requires_grad_() for each in tensors("cpu", heads=(2, 2), lengths=(70, 70)))
    table = normal(2, 139, device="cpu", seed=4).requires_grad_()
    mask = coin(2, 1, 1, 70, device="cpu")
    with saved_tensors() as kept:
        output = megasoftmax.attention(q, k, v, bias=RelativeBias(table), mask=mask)
    assert by_sdpa == [True]
    most = max(each.untyped_storage().nbytes() for each in kept)
    assert most == output.untyped_storage().nbytes() < 4 * 2 * 2 * 70 * 70
    output.sum().backward()
    assert table.grad.isfinite().all()


def test_row_of_a_learned_bias_that_is_minus_infinity(by_sdpa):
    """It excludes nothing: NaN of a query stays."""
    q, k, v = tensors("cpu")
    bias = normal(*q.shape[1:3], k.shape[2], device="cpu", seed=4)
    bias[:, 2] = -INF
    q[..., 2, :] = NAN
    found = _both_ways(q, k, v, normal(*q.shape, device="cpu", seed=5), learned=bias)
    assert found[0][..., 2, :].isnan().all()


def test_learned_bias_with_grouped_keys_keeps_them_once_and_sums_before_it_rounds():
    q = normal(1, 16, 32, 16, device="cpu", dtype=torch.bfloat16, seed=1)
    k, v = (normal(1, 1, 32, 16, device="cpu", dtype=torch.bfloat16, seed=i) for i in (2, 3))
    bias = normal(16, 32, 32, device="cpu", seed=4)
    gradient = normal(*q.shape, device="cpu", dtype=torch.bfloat16, seed=5)
    kept = []

    def call(q, k, v, bias):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            return megasoftmax.attention(q, k, v, bias=bias)

    found = _both_passes(call, (q, k, v, bias), gradient)
    assert sum(each.shape == k.shape for each in kept) == 2
    wide = [each.double() for each in (q, k, v, bias, gradient)]
    wanted = _both_passes(call, wide[:4], wide[4])
    for actual, exact in zip(found[2:4], wanted[2:4], strict=True):
        assert (actual - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("block", [1, 3 * 35, 2 * 4 * 35])  # one head, 3 of 4, two batches
@pytest.mark.parametrize("shared", [*itertools.product([1, 3], [1, 4])])
def test_blocks_of_a_learned_bias(block, shared, by_sdpa, monkeypatch):
    monkeypatch.setattr(autograd.sdpa, "_BLOCK", block)
    q, k, v = tensors("cpu", batch=3, lengths=(5, 7))
    bias = normal(*shared, 5, 7, device="cpu", seed=4)
    gradient = normal(*q.shape, device="cpu", seed=5)
    found, again = (_both_ways(q, k, v, gradient, learned=bias) for _ in range(2))
    assert all(itertools.starmap(bits_equal, zip(again, found, strict=True)))
    assert by_sdpa == [True, True]


@pytest.mark.parametrize("most", [4 * 5 * 13, 2 * 4 * 5 * 13])
def test_weights_beside_a_learned_bias_are_kept_up_to_a_limit(most, monkeypatch):
    monkeypatch.setattr(torch_sdpa, "MAX_KEPT", most)
    q, k, v = tensors("cpu")
    bias = normal(4, 5, 13, device="cpu", seed=4).requires_grad_()
    with saved_tensors() as kept:
        megasoftmax.attention(q, k, v, bias=bias)
    assert ((2, 4, 5, 13) in [each.shape for each in kept]) == (most == 2 * 4 * 5 * 13)


def test_learned_bias_under_autocast():
    q, k, v = tensors("cpu", torch.bfloat16)
    bias = normal(4, 5, 13, device="cpu", seed=4)
    given = (q, k, v, bias), normal(*q.shape, device="cpu", dtype=torch.bfloat16, seed=5)

    def call(q, k, v, bias):
        return megasoftmax.attention(q, k, v, bias=bias)

    expected = _both_passes(call, *given)
    with torch.autocast("cpu", torch.bfloat16):
        found = _both_passes(call, *given)
    assert all(itertools.starmap(bits_equal, zip(found, expected, strict=True)))


def test_output_and_graph_of_a_learned_bias_end_together(by_sdpa):
    q, k, v = tensors("cpu")
    bias = normal(5, 13, device="cpu", seed=4).requires_grad_()
    gc.disable()
    try:
        output = weakref.ref(megasoftmax.attention(q, k, v, bias=bias))
        assert output() is None
    finally:
        gc.enable()
    assert by_sdpa == [True]


def test_many_gradients_of_a_learned_bias(by_sdpa):
    given = [*tensors("cpu"), normal(5, 13, device="cpu", seed=4)]
    leaves = [each.requires_grad_() for each in given]
    output = megasoftmax.attention(*leaves[:3], bias=leaves[3])
    many = normal(3, *output.shape, device="cpu", seed=5)
    grad = partial(torch.autograd.grad, output, leaves, retain_graph=True)
    found = grad(many, is_grads_batched=True)
    expected = [torch.stack(each) for each in zip(*map(grad, many), strict=True)]
    torch.testing.assert_close([*found], expected)
    assert by_sdpa == [True]


@pytest.mark.parametrize("function", ["softmax", "softmax_topk"])
def test_other_functions_have_no_sdpa(function):
    options = {"k": 2} if function == "softmax_topk" else {}
    found = megasoftmax.why_not_fused(getattr(megasoftmax, function), torch.zeros(3, 4), **options)
    assert found.runs == "reference"
    assert [*map(str, found.against_sdpa)] == [f"function: expected attention, got {function}"]


def test_fused_decides(by_sdpa):
    q, k, v = tensors("cpu")
    megasoftmax.attention(q, k, v, fused=False)
    with pytest.raises(ValueError, match=r"fused: cannot be True here\. device: expected a CUDA"):
        megasoftmax.attention(q, k, v, fused=True)
    assert by_sdpa == []
    megasoftmax.attention(q, k, v)
    assert by_sdpa == [True]


# Where the rules differ the reference computes


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("by", ["mask", "causal", "window", "bias"])
def test_excluded_scores_that_are_not_finite(by, value, by_sdpa):
    q, k, v = tensors("cpu", heads=(2, 2), lengths=(6, 6))
    k[0, 0, 5, 0] = value
    excluded = torch.zeros(6, 6, dtype=torch.bool)
    excluded[:, 5] = True
    options = {
        "mask": {"mask": excluded},
        "causal": {"causal": True},
        "window": {"window": (1, 0)},
        "bias": {"mask": excluded, "bias": torch.where(excluded, -INF, 0.5)},
    }[by]
    found = _both_ways(q, k, v, normal(*q.shape, device="cpu", seed=5), **options)
    assert found[0][0, 0, :5].isfinite().all()
    assert len(by_sdpa) == 1


def test_plain_row_of_minus_infinity(by_sdpa):
    q, k, v = tensors("cpu", heads=(2, 2))
    q[0, 0, 1], k[0, 0] = INF, -k[0, 0].abs()
    output = megasoftmax.attention(q, k, v)
    assert by_sdpa == [False]
    assert output[0, 0, 1].isnan().all()
    assert output.isnan().sum() == 8
    assert (
        megasoftmax.attention(q, k, v, mask=torch.zeros(1, dtype=torch.bool))[0, 0, 1].eq(0).all()
    )


@pytest.mark.parametrize("dtype", OPTIONS["dtype"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [3, 40, 200, 800])
def test_scores_that_are_not_finite(dtype, value, causal, tokens):
    """Of one key, which causality excludes for the queries before it. Kernels cut lengths."""
    q, k, v = tensors("cpu", dtype, heads=(1, 1), lengths=(tokens, tokens), dims=(16, 16))
    q, k = q.abs() + 1, k.clone()
    k[0, 0, tokens // 2, 0] = value
    found, expected = (
        megasoftmax.attention(q, k, v, causal=causal, fused=fused) for fused in (None, False)
    )
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [NAN, INF])
def test_incoming_gradient_that_is_not_finite(value, by_sdpa):
    """What a query does not see gets none of it through the scores."""
    q, k, v = tensors("cpu", heads=(2, 2), lengths=(6, 6))
    gradient = normal(*q.shape, device="cpu", seed=5)
    gradient[0, 0, 2, 0] = value
    found = _both_ways(q, k, v, gradient, causal=True)
    assert found[2][0, 0, 3:].isfinite().all()
    assert by_sdpa == [True]


# Derivatives, transforms, bits


# What `is_plain_self_attention` refuses, and what it takes.
SIZES = [{"lengths": (3, 4)}, {"heads": (2, 2), "lengths": (3, 3)}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivative(sizes, masked):
    q, k, v = (each.requires_grad_() for each in tensors("cpu", torch.float64, **sizes))
    mask = coin(2, 1, *sizes["lengths"], device="cpu") if masked else None
    bias = normal(q.shape[1], *sizes["lengths"], device="cpu", dtype=torch.float64, seed=4)

    def call(q, k, v, bias=None):
        return megasoftmax.attention(q, k, v, bias=bias, mask=mask)

    for given in ((q, k, v), (q, k, v, bias.requires_grad_())):
        assert torch.autograd.gradcheck(call, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "compile"])
@pytest.mark.parametrize("sizes", SIZES)
def test_transforms(transform, sizes, by_sdpa):
    q, k, v = tensors("cpu", **sizes)

    def apply(fused):
        def function(query):
            return megasoftmax.attention(query, k, v, causal=True, fused=fused)

        if transform == "grad":
            return torch.func.grad(lambda query: function(query).square().sum())(q)
        if transform == "vmap":
            return torch.vmap(function)(torch.stack([q, 2 * q]))
        if transform == "jvp":
            return torch.func.jvp(function, (q,), (torch.ones_like(q),))
        return torch.compile(function, fullgraph=True, backend="eager")(q)

    torch.testing.assert_close(apply(None), apply(False))
    assert by_sdpa == []


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_same_bits_from_run_to_run(heads):
    q, k, v = tensors("cpu", heads=heads, lengths=(150, 150), dims=(16, 16))
    gradient = normal(*q.shape, device="cpu", seed=5)

    def run():
        return _both_passes(lambda *t: megasoftmax.attention(*t, causal=True), (q, k, v), gradient)

    first = run()
    for _ in range(4):
        assert all(itertools.starmap(bits_equal, zip(run(), first, strict=True)))


def test_output_may_be_changed_in_place():
    q, k, v = (each.requires_grad_() for each in tensors("cpu", heads=(4, 4), lengths=(5, 5)))
    for query in (q, _laid_out(q, "tokens first")):
        output = megasoftmax.attention(query, k, v)
        output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_autocast():
    q, k, v = tensors("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        output = megasoftmax.attention(q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, expected)
