"""Types and values under torch.autocast, beside what torch's own functions do there."""

import functools

import pytest
import torch
from inputs import bits_equal, normal
from torch import Tensor

import megasoftmax
from megasoftmax import AttnMaskType, FusedScaleMaskSoftmax, RelativeBias
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.limits import kernel_limits

CASTS = [torch.bfloat16, torch.float16]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPE = (2, 3, 4, 8)

sdpa = torch.nn.functional.scaled_dot_product_attention


def states(device, *dtypes):
    return [
        normal(*SHAPE, device=device, dtype=dtype, seed=seed).requires_grad_()
        for seed, dtype in enumerate(dtypes)
    ]


def assert_close(actual, expected, device):
    """Kernels add up gradients of 16 bits in no fixed order."""
    tolerance = {} if device == "cpu" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(actual, expected, **tolerance)


def outputs_and_gradients(function, *inputs):
    output, lse = function(*inputs)
    loss = output.double().square().sum() + lse.double().sin().sum()
    return output, lse, *torch.autograd.grad(loss, inputs)


# Attention


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize(
    "dtypes",
    [
        *((dtype,) * 3 for dtype in DTYPES),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.bfloat16),
    ],
)
def test_attention_takes_the_type_of_sdpa(dtypes, cast, device):
    """As a call does with tensors that were cast before; gradients have the types of the inputs."""
    inputs = states(device, *dtypes)
    with torch.autocast(device, cast):
        expected = sdpa(*inputs)
    assert expected.dtype == (dtypes[0] if dtypes[0] == torch.float64 else cast)

    def attention(*inputs):
        return megasoftmax.attention(*inputs, causal=True, return_lse=True)

    def cast_before(*inputs):
        return attention(*(each.to(expected.dtype) for each in inputs))

    wanted = outputs_and_gradients(cast_before, *inputs)
    with torch.autocast(device, cast):
        output, lse = attention(*inputs)
        found = outputs_and_gradients(attention, *inputs)
    assert output.dtype == expected.dtype
    assert lse.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    for one, other, dtype in zip(found, wanted, [output.dtype, lse.dtype, *dtypes], strict=True):
        assert one.dtype == dtype
        if device == "cpu":
            assert one.equal(other)
        assert_close(one, other, device)


@pytest.mark.parametrize("make", [lambda bias: bias, lambda bias: RelativeBias(bias[0, :, 0])])
def test_bias_and_sink_keep_their_types(make, device):
    query, key, value = states(device, *[torch.float32] * 3)
    length = SHAPE[2] * 2 - 1
    bias = 1e3 + normal(1, SHAPE[1], 1, length, device=device).requires_grad_()
    sink = 1e3 + normal(SHAPE[1], device=device).requires_grad_()

    def function(bias, sink):
        bias = make(bias)
        if isinstance(bias, Tensor):
            bias = bias[..., : SHAPE[2]]
        return megasoftmax.attention(*tensors, bias=bias, sink=sink, return_lse=True)

    tensors = [each.bfloat16() for each in (query, key, value)]
    wanted = outputs_and_gradients(function, bias, sink)
    tensors = [query, key, value]
    with torch.autocast(device, torch.bfloat16):
        found = outputs_and_gradients(function, bias, sink)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, device)


def test_float64_beside_others_is_refused_as_by_sdpa(device):
    query, key, value = states(device, torch.float64, torch.float32, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            sdpa(query, key, value)
        with pytest.raises(TypeError, match=r"key: expected .*float64, as query, got .*bfloat16"):
            megasoftmax.attention(query, key, value)
        with pytest.raises(TypeError, match="query: expected a tensor"):
            megasoftmax.attention(None, key, value)


def test_autocast_of_another_device_changes_nothing():
    inputs = states("cpu", *[torch.float32] * 3)
    with torch.autocast("cuda" if torch.cuda.is_available() else "mps", torch.bfloat16):
        assert megasoftmax.attention(*inputs).dtype == torch.float32
    on_meta = [each.to("meta") for each in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(*on_meta).dtype == torch.float32
        assert megasoftmax.attention(*on_meta).dtype == torch.float32


def test_why_not_fused_answers_for_what_autocast_makes(device, as_if_fused):
    """Kernels take no such head dimensions in float32, but in the 16 bits that autocast makes."""
    most = kernel_limits().attention["kMaxFloatHeadDim"]
    query = normal(2, 3, 4, most + 1, device=device)
    ask = functools.partial(megasoftmax.why_not_fused, megasoftmax.attention, query, query, query)
    assert [reason.actual for reason in ask()] == [str(most + 1)] * 2
    with torch.autocast(device, torch.bfloat16):
        assert ask() == ()
    double = query.double()
    ask = functools.partial(megasoftmax.why_not_fused, megasoftmax.attention, *[double] * 3)
    for enabled in (False, True):  # float64 stays
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            assert "dtype" in [reason.constraint for reason in ask()]


@pytest.mark.parametrize("inside", [False, True])
def test_compile(inside, device):
    """With autocast around the compiled code, or in it."""
    torch.compiler.reset()
    inputs = states(device, *[torch.float32] * 3)
    half = normal(*SHAPE, device=device, dtype=torch.bfloat16)
    module = scale_mask_softmax(torch.bfloat16)

    def function(*inputs):
        output, lse = megasoftmax.attention(*inputs, return_lse=True)
        return output, lse, megasoftmax.softmax(half), module(inputs[0], None)

    def with_autocast(*inputs):
        with torch.autocast(device, torch.bfloat16):
            return function(*inputs)

    expected = with_autocast(*inputs)
    assert expected[0].dtype == torch.bfloat16
    called = with_autocast if inside else function
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, torch.bfloat16, enabled=not inside):
        actual = compiled(*inputs)
    assert_close(actual, expected, device)
    found, wanted = (
        torch.autograd.grad(each[0].float().square().sum(), inputs) for each in (actual, expected)
    )
    assert_close(found, wanted, device)
    if not inside:  # without autocast it is another graph
        assert compiled(*inputs)[0].dtype == torch.float32


# Softmax, and softmax + top-k


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax_has_the_type_of_torch(dim, dtype, cast, device):
    scores = normal(*SHAPE, device=device, dtype=dtype).requires_grad_()
    with torch.autocast(device, cast):
        expected = torch.softmax(scores, dim)
        actual = megasoftmax.softmax(scores, dim=dim)
        explicit = megasoftmax.softmax(scores, dim=dim, dtype=torch.bfloat16)
    assert actual.dtype == expected.dtype
    assert explicit.dtype == torch.bfloat16
    assert bits_equal(actual, megasoftmax.softmax(scores, dim=dim, dtype=expected.dtype))
    (gradient,) = torch.autograd.grad(actual.square().sum(), scores)
    (wanted,) = torch.autograd.grad(expected.square().sum(), scores)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_topk_has_the_type_of_torch(dtype, cast, device):
    logits = normal(*SHAPE, device=device, dtype=dtype)
    with torch.autocast(device, cast):
        expected, _ = torch.softmax(logits, -1).topk(2)
        actual, indices = megasoftmax.softmax_topk(logits, 2)
    again, wanted = megasoftmax.softmax_topk(logits, 2, dtype=expected.dtype)
    assert bits_equal(actual, again)
    assert indices.equal(wanted)


# Modules


def scale_mask_softmax(cast, **options):
    """As apex's tests make it."""
    given = {
        "input_in_fp16": cast == torch.float16,
        "input_in_bf16": cast == torch.bfloat16,
        "attn_mask_type": AttnMaskType.padding,
        "scaled_masked_softmax_fusion": True,
        "mask_func": lambda scores, mask: scores.masked_fill(mask, -10000.0),
        "softmax_in_fp32": False,
        "scale": None,
    }
    return FusedScaleMaskSoftmax(**(given | options))


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_type", [torch.bool, torch.uint8])
@pytest.mark.parametrize("softmax_in_fp32", [False, True])
def test_scale_mask_softmax_has_the_type_of_autocast(
    softmax_in_fp32, mask_type, dtype, cast, device
):
    """A mask that is not bool runs in plain torch, with the same types."""
    scores = normal(*SHAPE, device=device, dtype=dtype).requires_grad_()
    mask = (normal(*SHAPE, device=device) > 0).to(mask_type)
    mask[..., 0] = 0
    softmax = scale_mask_softmax(cast, softmax_in_fp32=softmax_in_fp32)
    softmax.mask_func = lambda scores, mask: scores.masked_fill(mask.bool(), -torch.inf)
    with torch.autocast(device, cast):
        actual = softmax(scores, mask)
    is_double = dtype == torch.float64
    if not softmax_in_fp32 or not is_double:
        assert actual.dtype == (dtype if is_double else cast)
    expected = scores.double().masked_fill(mask.bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(actual, expected.to(actual.dtype))
    (gradient,) = torch.autograd.grad(actual.float().square().sum(), scores)
    assert gradient.dtype == dtype


def test_scale_mask_softmax_without_fusion_has_the_type_of_torch(device):
    scores = normal(*SHAPE, device=device, dtype=torch.bfloat16)
    softmax = scale_mask_softmax(torch.bfloat16, scaled_masked_softmax_fusion=False)
    with torch.autocast(device, torch.bfloat16):
        assert softmax(scores, None).dtype == torch.softmax(scores, -1).dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_functions_of_megatron_keep_the_type(dtype, device):
    scores = normal(*SHAPE, device=device, dtype=dtype)
    with torch.autocast(device, torch.bfloat16):
        for probabilities in (
            megasoftmax.ScaledSoftmax.apply(scores, 1.0),
            megasoftmax.ScaledMaskedSoftmax.apply(scores, None, 1.0),
            megasoftmax.ScaledUpperTriangMaskedSoftmax.apply(scores[0], 1.0),
            softmax_backward(scores, scores),
        ):
            assert probabilities.dtype == dtype
