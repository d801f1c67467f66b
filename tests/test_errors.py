"""Bad input: TypeError or ValueError that names the argument, what was expected and what came."""

import functools
import math
import re

import numpy
import pytest
import torch

import megasoftmax
from megasoftmax import autograd

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = (2, 3, 4, 5)


def floats(*shape):
    return torch.zeros(shape)


def bools(*shape):
    return torch.zeros(shape, dtype=torch.bool)


VALID = {
    "softmax": {"scores": floats(*SHAPE)},
    "softmax_topk": {"logits": floats(*SHAPE), "k": 2},
    "attention": {
        "query": floats(2, 4, 3, 8),
        "key": floats(2, 2, 5, 8),
        "value": floats(2, 2, 5, 6),
    },
}

# name: (arguments, exception, argument named, expected, actual)
SHARED_CASES = {
    "scale is a tensor": (
        {"scale": torch.tensor([0.5])},
        TypeError,
        "scale",
        "a number",
        "torch.float32",
    ),
    "scale is NaN": ({"scale": math.nan}, ValueError, "scale", "a finite number", "nan"),
    "mask is additive": (
        {"mask": floats(5)},
        TypeError,
        "mask",
        "a bool tensor, True = excluded (in scaled_dot_product_attention True = keep)",
        "torch.float32; pass a mask that is added to the scores as bias=",
    ),
    "bias is a number": ({"bias": 1.0}, TypeError, "bias", "a tensor", "float"),
    "fused is a string": ({"fused": "yes"}, TypeError, "fused", "None or a bool", "str"),
}
SOFTMAX_CASES = {
    "scores are a list": (
        {"scores": [[0.0]]},
        TypeError,
        "scores",
        "a tensor",
        "list",
    ),
    "scores are integers": (
        {"scores": torch.zeros(SHAPE, dtype=torch.int64)},
        TypeError,
        "scores",
        "float16, bfloat16, float32 or float64",
        "torch.int64",
    ),
    "scores are complex": (
        {"scores": torch.zeros(SHAPE, dtype=torch.complex64)},
        TypeError,
        "scores",
        "float16, bfloat16, float32 or float64",
        "torch.complex64",
    ),
    "scores without dimensions": (
        {"scores": torch.tensor(1.0)},
        ValueError,
        "scores",
        "at least 1 dimension",
        "without dimensions",
    ),
    "scale elsewhere": (
        {"scale": torch.zeros((), device="meta")},
        TypeError,
        "scale",
        "a number",
        "a tensor on meta; reading it would wait for the device",
    ),
    "scale that learns": (
        {"scale": torch.tensor(0.5, requires_grad=True)},
        TypeError,
        "scale",
        "a number, which gets no gradient",
        "a tensor that requires one",
    ),
    "scale is None": ({"scale": None}, TypeError, "scale", "a number", "NoneType"),
    "scale is infinite": ({"scale": -math.inf}, ValueError, "scale", "a finite number", "-inf"),
    "mask of bytes": (
        {"mask": torch.zeros(SHAPE, dtype=torch.uint8)},
        TypeError,
        "mask",
        "a bool tensor, True = excluded",
        "torch.uint8",
    ),
    "mask is a list": ({"mask": [True]}, TypeError, "mask", "a bool tensor", "list"),
    "mask of other keys": (
        {"mask": bools(2, 1, 4, 6)},
        ValueError,
        "mask",
        "(2, 3, 4, 5)",
        "(2, 1, 4, 6)",
    ),
    "mask of two heads for three": (
        {"mask": bools(2, 2, 4, 5)},
        ValueError,
        "mask",
        "(2, 3, 4, 5)",
        "(2, 2, 4, 5)",
    ),
    "mask of too many dimensions": (
        {"mask": bools(1, 2, 3, 4, 5)},
        ValueError,
        "mask",
        "(2, 3, 4, 5)",
        "(1, 2, 3, 4, 5)",
    ),
    "mask elsewhere": (
        {"mask": torch.zeros(SHAPE, dtype=torch.bool, device="meta")},
        ValueError,
        "mask",
        "device cpu, as scores",
        "meta",
    ),
    "bias of integers": (
        {"bias": torch.zeros(5, dtype=torch.int32)},
        TypeError,
        "bias",
        "a tensor of float16, bfloat16, float32 or float64",
        "torch.int32",
    ),
    "bias of other queries": (
        {"bias": floats(3, 5, 5)},
        ValueError,
        "bias",
        "(2, 3, 4, 5)",
        "(3, 5, 5)",
    ),
    "bias elsewhere": (
        {"bias": torch.zeros(5, device="meta")},
        ValueError,
        "bias",
        "device cpu, as scores",
        "meta",
    ),
    "causal is a number": ({"causal": 1}, TypeError, "causal", "a bool", "int"),
    "causal is a tensor": ({"causal": bools(1)}, TypeError, "causal", "a bool", "torch.bool"),
    "causal without queries": (
        {"scores": floats(5), "causal": True},
        ValueError,
        "causal",
        "[..., queries, keys]",
        "(5,)",
    ),
    "window without queries": (
        {"scores": floats(5), "window": (1, 1)},
        ValueError,
        "window",
        "[..., queries, keys]",
        "(5,)",
    ),
    "window is a number": ({"window": 3}, TypeError, "window", "(left, right)", "int"),
    "window of three": (
        {"window": (1, 2, 3)},
        ValueError,
        "window",
        "(left, right)",
        "(1, 2, 3)",
    ),
    "window of fractions": (
        {"window": (1.5, 2)},
        TypeError,
        "window",
        "two integers from -1 on",
        "(1.5, 2)",
    ),
    "window below -1": (
        {"window": (0, -2)},
        ValueError,
        "window",
        "two integers from -1 on",
        "(0, -2)",
    ),
    "sink is a string": ({"sink": "0"}, TypeError, "sink", "a tensor or a number", "str"),
    "sink of integers": (
        {"sink": torch.zeros(3, dtype=torch.int64)},
        TypeError,
        "sink",
        "a tensor of float16, bfloat16, float32 or float64",
        "torch.int64",
    ),
    "sink of four for three heads": (
        {"sink": floats(4)},
        ValueError,
        "sink",
        "one element or [3], one per head",
        "(4,)",
    ),
    "sink with dimensions": (
        {"sink": floats(1, 3, 1, 1)},
        ValueError,
        "sink",
        "one element or [3], one per head",
        "(1, 3, 1, 1)",
    ),
    "sink per head without heads": (
        {"scores": floats(4, 5), "sink": floats(4)},
        ValueError,
        "sink",
        "one element",
        "(4,)",
    ),
    "sink without elements": ({"sink": floats(0)}, ValueError, "sink", "one element", "(0,)"),
    "sink elsewhere": (
        {"sink": torch.zeros(3, device="meta")},
        ValueError,
        "sink",
        "device cpu, as scores",
        "meta",
    ),
    "dtype of integers": (
        {"dtype": torch.int8},
        TypeError,
        "dtype",
        "float16, bfloat16, float32 or float64",
        "torch.int8",
    ),
    "dtype is a string": (
        {"dtype": "float16"},
        TypeError,
        "dtype",
        "float16, bfloat16",
        "'float16'",
    ),
}


TOPK_CASES = {
    "logits are a list": ({"logits": [[0.0]]}, TypeError, "logits", "a tensor", "list"),
    "logits are integers": (
        {"logits": torch.zeros(SHAPE, dtype=torch.int64)},
        TypeError,
        "logits",
        "float16, bfloat16, float32 or float64",
        "torch.int64",
    ),
    "logits without dimensions": (
        {"logits": torch.tensor(1.0)},
        ValueError,
        "logits",
        "at least 1 dimension",
        "without dimensions",
    ),
    "k is a fraction": ({"k": 2.0}, TypeError, "k", "an integer from 0 to 5", "float"),
    "k is a bool": ({"k": True}, TypeError, "k", "an integer from 0 to 5", "bool"),
    "k is a tensor": ({"k": torch.tensor(2)}, TypeError, "k", "an integer", "torch.int64"),
    "k is None": ({"k": None}, TypeError, "k", "an integer from 0 to 5", "NoneType"),
    "k is negative": ({"k": -1}, ValueError, "k", "an integer from 0 to 5", "-1"),
    "k above V": ({"k": 6}, ValueError, "k", "an integer from 0 to 5", "6"),
    "mask of other columns": (
        {"mask": bools(4, 6)},
        ValueError,
        "mask",
        "(2, 3, 4, 5)",
        "(4, 6)",
    ),
    "mask elsewhere": (
        {"mask": torch.zeros(SHAPE, dtype=torch.bool, device="meta")},
        ValueError,
        "mask",
        "device cpu, as logits",
        "meta",
    ),
    "bias of other rows": (
        {"bias": floats(3, 5, 5)},
        ValueError,
        "bias",
        "(2, 3, 4, 5)",
        "(3, 5, 5)",
    ),
    "renormalize is a number": ({"renormalize": 1}, TypeError, "renormalize", "a bool", "int"),
    "dtype of integers": (
        {"dtype": torch.int8},
        TypeError,
        "dtype",
        "float16, bfloat16, float32 or float64",
        "torch.int8",
    ),
}


ATTENTION_CASES = {
    "query is a list": ({"query": [[0.0]]}, TypeError, "query", "a tensor", "list"),
    "query of integers": (
        {"query": torch.zeros(2, 4, 3, 8, dtype=torch.int64)},
        TypeError,
        "query",
        "float16, bfloat16, float32 or float64",
        "torch.int64",
    ),
    "query without batch": (
        {"query": floats(4, 3, 8)},
        ValueError,
        "query",
        "[batch, heads, queries, head_dim]",
        "(4, 3, 8)",
    ),
    "key is None": ({"key": None}, TypeError, "key", "a tensor of torch.float32", "NoneType"),
    "key of another type": (
        {"key": floats(2, 2, 5, 8).half()},
        TypeError,
        "key",
        "torch.float32, as query",
        "torch.float16",
    ),
    "key of another batch": (
        {"key": floats(3, 2, 5, 8)},
        ValueError,
        "key",
        "[2, key_heads, keys, 8]",
        "(3, 2, 5, 8)",
    ),
    "key of another head_dim": (
        {"key": floats(2, 2, 5, 6)},
        ValueError,
        "key",
        "[2, key_heads, keys, 8]",
        "(2, 2, 5, 6)",
    ),
    "key of three dimensions": (
        {"key": floats(2, 5, 8)},
        ValueError,
        "key",
        "[2, key_heads, keys, 8]",
        "(2, 5, 8)",
    ),
    "key elsewhere": (
        {"key": torch.zeros(2, 2, 5, 8, device="meta")},
        ValueError,
        "key",
        "device cpu, as query",
        "meta",
    ),
    "key heads that do not divide": (
        {"key": floats(2, 3, 5, 8), "value": floats(2, 3, 5, 6)},
        ValueError,
        "key",
        "heads that divide 4",
        "3",
    ),
    "no key heads": (
        {"key": floats(2, 0, 5, 8), "value": floats(2, 0, 5, 6)},
        ValueError,
        "key",
        "heads that divide 4",
        "0",
    ),
    "value of another type": (
        {"value": floats(2, 2, 5, 6).double()},
        TypeError,
        "value",
        "torch.float32, as query",
        "torch.float64",
    ),
    "value of other keys": (
        {"value": floats(2, 2, 4, 6)},
        ValueError,
        "value",
        "[2, 2, 5, value_dim]",
        "(2, 2, 4, 6)",
    ),
    "value of other heads": (
        {"value": floats(2, 4, 5, 6)},
        ValueError,
        "value",
        "[2, 2, 5, value_dim]",
        "(2, 4, 5, 6)",
    ),
    "mask of key heads": (
        {"mask": bools(2, 2, 3, 5)},
        ValueError,
        "mask",
        "(2, 4, 3, 5)",
        "(2, 2, 3, 5)",
    ),
    "mask of a tokenizer": (
        {"mask": bools(2, 5).long()},
        TypeError,
        "mask",
        "a bool tensor",
        "torch.int64; pass a tokenizer's attention_mask as visible=megasoftmax.ranges.padding(",
    ),
    "mask of batches and keys": (
        {"mask": bools(2, 5)},
        ValueError,
        "mask",
        "broadcasts to (2, 4, 3, 5)",
        "(2, 5); pass one of [batch, keys] as mask[:, None, None, :]",
    ),
    "mask of other keys": (
        {"mask": bools(2, 1, 1, 6)},
        ValueError,
        "mask",
        "(2, 4, 3, 5)",
        "(2, 1, 1, 6)",
    ),
    "bias of bools": ({"bias": bools(3, 5)}, TypeError, "bias", "float16", "torch.bool"),
    "bias of other queries": (
        {"bias": floats(4, 5, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 3, 5)",
        "(4, 5, 5)",
    ),
    "bias of some queries": (
        {"query": floats(2, 4, 6, 8), "bias": floats(4, 3, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 6, 5)",
        "(4, 3, 5)",
    ),
    "bias heads that do not divide": (
        {"bias": floats(2, 3, 3, 5)},
        ValueError,
        "bias",
        "or 4 dimensions of which the first two divide 2 and 4",
        "(2, 3, 3, 5)",
    ),
    "bias of two heads for four": (
        {"bias": floats(2, 3, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 3, 5)",
        "(2, 3, 5); pass it as (1, 2, 3, 5) if neighbouring heads share an entry",
    ),
    "bias of more batches": (
        {"bias": floats(4, 4, 3, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 3, 5)",
        "(4, 4, 3, 5)",
    ),
    "bias without heads": (
        {"bias": floats(2, 0, 3, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 3, 5)",
        "(2, 0, 3, 5)",
    ),
    "bias of five dimensions": (
        {"bias": floats(1, 2, 4, 3, 5)},
        ValueError,
        "bias",
        "broadcasts to (2, 4, 3, 5)",
        "(1, 2, 4, 3, 5)",
    ),
    "bias elsewhere": (
        {"bias": torch.zeros(3, 5, device="meta")},
        ValueError,
        "bias",
        "device cpu, as query",
        "meta",
    ),
    "table that is too short": (
        {"bias": megasoftmax.RelativeBias(floats(4, 5))},
        ValueError,
        "bias.table",
        "[heads, 7] or [batch, heads, 7]",
        "(4, 5)",
    ),
    "table of one distance": (
        {"bias": megasoftmax.RelativeBias(floats(4, 1))},
        ValueError,
        "bias.table",
        "[heads, 7] or [batch, heads, 7]",
        "(4, 1)",
    ),
    "table of three heads": (
        {"bias": megasoftmax.RelativeBias(floats(3, 7))},
        ValueError,
        "bias.table",
        "(2, 4, 7)",
        "(3, 7)",
    ),
    "table of two heads for four": (
        {"bias": megasoftmax.RelativeBias(floats(2, 7))},
        ValueError,
        "bias.table",
        "(2, 4, 7)",
        "(2, 7); pass it as (1, 2, 7) if neighbouring heads share an entry",
    ),
    "causal is a number": ({"causal": 1}, TypeError, "causal", "a bool", "int"),
    "window of three": ({"window": (1, 2, 3)}, ValueError, "window", "(left, right)", "(1, 2, 3)"),
    "window below -1": (
        {"window": (0, -2)},
        ValueError,
        "window",
        "two integers from -1 on",
        "(0, -2)",
    ),
    "sink of key heads": (
        {"sink": floats(2)},
        ValueError,
        "sink",
        "one element or [4], one per head",
        "(2,)",
    ),
    "sink elsewhere": (
        {"sink": torch.zeros(4, device="meta")},
        ValueError,
        "sink",
        "device cpu, as query",
        "meta",
    ),
}


CASES = [
    (function, case, expectation)
    for function, cases in (
        ("softmax", SOFTMAX_CASES),
        ("softmax_topk", TOPK_CASES),
        ("attention", ATTENTION_CASES),
    )
    for case, expectation in (SHARED_CASES | cases).items()
]


@pytest.mark.parametrize(
    ("function", "expectation"),
    [(function, expectation) for function, _, expectation in CASES],
    ids=[f"{function}: {case}" for function, case, _ in CASES],
)
def test_message_names_argument_expected_and_actual(function, expectation, monkeypatch):
    """Nothing is computed before."""

    def forbidden(*arguments):
        raise AssertionError("something ran")

    for module in (autograd.softmax, autograd.topk, autograd.attention):
        monkeypatch.setattr(module, "call", forbidden)
    monkeypatch.setattr(autograd.torch_softmax, "softmax", forbidden)
    monkeypatch.setattr(autograd.sdpa, "attention", forbidden)
    arguments, error, name, expected, actual = expectation
    pattern = f"^{re.escape(name)}: .*{re.escape(expected)}.*got .*{re.escape(actual)}"
    called = getattr(megasoftmax, function)
    with pytest.raises(error, match=pattern):
        called(**(VALID[function] | arguments))
    with pytest.raises(error, match=pattern):
        megasoftmax.why_not_fused(called, **(VALID[function] | arguments))


@pytest.mark.parametrize("function", VALID)
def test_options_are_named(function):
    with pytest.raises(TypeError, match="positional"):
        getattr(megasoftmax, function)(*VALID[function].values(), 0.5)


@pytest.mark.parametrize(
    ("table", "error", "actual"),
    [
        ([1, 2], TypeError, "list"),
        (torch.zeros(4, 7, dtype=torch.int64), TypeError, "torch.int64"),
        (floats(7), ValueError, "(7,)"),
        (floats(1, 2, 4, 7), ValueError, "(1, 2, 4, 7)"),
    ],
)
def test_relative_bias_checks_its_table_when_made(table, error, actual):
    expected = re.escape("[heads, m + n - 1] or [batch, heads, m + n - 1], got ")
    with pytest.raises(error, match=rf"^table: expected .*{expected}.*{re.escape(actual)}"):
        megasoftmax.RelativeBias(table)


@pytest.mark.parametrize(
    "scale", [numpy.float32(0.5), numpy.int64(2), torch.tensor(0.5), torch.tensor(2)]
)
def test_scale_that_is_read_without_waiting(scale):
    scores = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    number = float(scale)
    query = key = value = scores
    for function, tensors in (
        (megasoftmax.softmax, (scores,)),
        (functools.partial(megasoftmax.softmax_topk, k=2), (scores,)),
        (megasoftmax.attention, (query, key, value)),
    ):
        found = function(*tensors, scale=scale)
        torch.testing.assert_close(found, function(*tensors, scale=number), rtol=0, atol=0)
    assert megasoftmax.FusedAttention(3, scale=scale).scale == number
    for function, tensors in (
        (megasoftmax.softmax, (scores,)),
        (megasoftmax.attention, (query, key, value)),
    ):
        found = megasoftmax.why_not_fused(function, *tensors, scale=scale)
        assert found == megasoftmax.why_not_fused(function, *tensors, scale=number)


@pytest.mark.gpu
def test_scale_on_a_gpu_is_refused():
    with pytest.raises(TypeError, match=r"^scale: expected a number, got a tensor on cuda:0"):
        megasoftmax.softmax(floats(*SHAPE).cuda(), scale=torch.tensor(0.5, device="cuda"))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (megasoftmax.softmax, ()),
        (megasoftmax.softmax_topk, (floats(*SHAPE),)),
        (megasoftmax.attention, (floats(*SHAPE), floats(*SHAPE))),
    ],
)
def test_why_not_fused_names_the_function_that_was_asked_about(function, arguments):
    name = function.__name__
    with pytest.raises(TypeError, match=rf"^{name}\(\)"):
        megasoftmax.why_not_fused(function, *arguments)
    with pytest.raises(TypeError, match=rf"^{name}\(\).*'width'"):
        megasoftmax.why_not_fused(function, *arguments, floats(*SHAPE), width=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["key", "value", "bias", "mask", "sink"])
def test_attention_of_two_devices(name):
    arguments = {each: tensor.cuda() for each, tensor in VALID["attention"].items()}
    others = {"bias": floats(3, 5), "mask": bools(3, 5), "sink": floats(4)}
    arguments[name] = (others | VALID["attention"])[name]
    with pytest.raises(ValueError, match=f"^{name}: .*device cuda:0, as query, got cpu"):
        megasoftmax.attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mask": bools(*SHAPE)}, "mask"),
        ({"bias": floats(*SHAPE)}, "bias"),
        ({"sink": floats(3)}, "sink"),
    ],
)
def test_tensors_of_two_devices(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}: .*device cuda:0, as scores, got cpu"):
        megasoftmax.softmax(floats(*SHAPE).cuda(), **arguments)


def test_fused_on_a_cpu_says_every_reason():
    with pytest.raises(ValueError, match=r"^fused: cannot be True here") as error:
        megasoftmax.softmax(floats(*SHAPE).double(), scale=0, fused=True)
    for reason in ("device: expected a CUDA device, got cpu", "torch.float64", "scale"):
        assert reason in str(error.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 2},
        {"scale": -0.0},
        {"mask": bools()},
        {"mask": bools(1, 1, 1, 1)},
        {"bias": floats()},
        {"window": [1, 2]},
        {"window": (-1, -1)},
        {"window": (10**6, 10**6)},
        {"sink": 1},
        {"sink": -math.inf},
        {"sink": floats()},
        {"sink": floats(1, 1)},
        {"sink": floats(3)},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_unusual_but_right(arguments, device):
    scores = torch.randn(SHAPE, device=device)
    arguments = {
        name: value.to(device) if torch.is_tensor(value) else value
        for name, value in arguments.items()
    }
    probabilities = megasoftmax.softmax(scores, **arguments)
    scale = arguments.get("scale", 1)
    z = torch.cat([scores * scale, torch.full((2, 3, 4, 1), -math.inf, device=device)], -1)
    if "sink" in arguments:
        z[..., -1] = float(torch.as_tensor(arguments["sink"]).flatten()[0])
    queries, keys = torch.arange(4)[:, None] + 1, torch.arange(5)
    if arguments.get("window") == [1, 2]:
        z[..., :-1][..., (keys < queries - 1) | (keys > queries + 2)] = -math.inf
    expected = z.softmax(-1)[..., :-1].to(probabilities.dtype)
    torch.testing.assert_close(probabilities, expected)
