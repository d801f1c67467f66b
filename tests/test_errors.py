"""Bad input: TypeError or ValueError that names the argument, what was expected and what came."""

import functools
import math
import re
from fractions import Fraction

import numpy
import pytest
import torch

import megasoftmax
from megasoftmax import RelativeBias, ShiftedBias, autograd

SHAPE = (2, 3, 4, 5)
FLOATS = "float16, bfloat16, float32 or float64"


def floats(*shape):
    return torch.zeros(shape)


def bools(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


VALID = {
    "softmax": {"scores": floats(*SHAPE)},
    "softmax_topk": {"logits": floats(*SHAPE), "k": 2},
    "attention": {
        "query": floats(2, 4, 3, 8),
        "key": floats(2, 2, 5, 8),
        "value": floats(2, 2, 5, 6),
    },
}

# (arguments, of which the last one is named, exception, expected, actual)
SHARED_CASES = [
    ({"scale": math.nan}, ValueError, "a finite number", "nan"),
    (
        {"mask": floats(5)},
        TypeError,
        "a bool tensor, True = excluded (in scaled_dot_product_attention True = keep)",
        "torch.float32; pass a mask that is added to the scores as bias=",
    ),
    ({"bias": 1.0}, TypeError, "a tensor", "float"),
    ({"fused": "yes"}, TypeError, "None or a bool", "str"),
]
SOFTMAX_CASES = [
    ({"scale": torch.tensor([0.5])}, TypeError, "a number", "torch.float32"),
    ({"scores": [[0.0]]}, TypeError, "a tensor", "list"),
    ({"scores": integers(*SHAPE)}, TypeError, FLOATS, "torch.int64"),
    ({"scores": torch.zeros(SHAPE, dtype=torch.complex64)}, TypeError, FLOATS, "torch.complex64"),
    ({"scores": torch.tensor(1.0)}, ValueError, "at least 1 dimension", "without dimensions"),
    (
        {"scale": floats().to("meta")},
        TypeError,
        "a number",
        "a tensor on meta; reading it would wait for the device",
    ),
    (
        {"scale": torch.tensor(0.5, requires_grad=True)},
        TypeError,
        "a number, which gets no gradient",
        "a tensor that requires one",
    ),
    ({"scale": None}, TypeError, "a number", "NoneType"),
    ({"scale": True}, TypeError, "a number", "bool"),
    ({"scale": Fraction(10**400, 3)}, ValueError, "a number within float64", "Fraction"),
    ({"sink": True}, TypeError, "a tensor or a number", "bool"),
    ({"causal": numpy.True_}, TypeError, "a bool", "numpy.bool"),
    ({"scale": -math.inf}, ValueError, "a finite number", "-inf"),
    ({"mask": integers(*SHAPE)}, TypeError, "a bool tensor, True = excluded", "torch.int64"),
    ({"mask": [True]}, TypeError, "a bool tensor", "list"),
    ({"mask": bools(2, 1, 4, 6)}, ValueError, str(SHAPE), "(2, 1, 4, 6)"),
    ({"mask": bools(2, 2, 4, 5)}, ValueError, str(SHAPE), "(2, 2, 4, 5)"),
    ({"mask": bools(1, 2, 3, 4, 5)}, ValueError, str(SHAPE), "(1, 2, 3, 4, 5)"),
    ({"mask": bools(*SHAPE).to("meta")}, ValueError, "device cpu, as scores", "meta"),
    ({"bias": integers(5)}, TypeError, f"a tensor of {FLOATS}", "torch.int64"),
    ({"bias": floats(3, 5, 5)}, ValueError, str(SHAPE), "(3, 5, 5)"),
    ({"bias": floats(5).to("meta")}, ValueError, "device cpu, as scores", "meta"),
    ({"causal": 1}, TypeError, "a bool", "int"),
    ({"causal": bools(1)}, TypeError, "a bool", "torch.bool"),
    ({"scores": floats(5), "causal": True}, ValueError, "[..., queries, keys]", "(5,)"),
    ({"scores": floats(5), "window": (1, 1)}, ValueError, "[..., queries, keys]", "(5,)"),
    ({"window": 3}, TypeError, "(left, right)", "int"),
    ({"window": (1, 2, 3)}, ValueError, "(left, right)", "(1, 2, 3)"),
    ({"window": (1.5, 2)}, TypeError, "two integers from -1 on", "(1.5, 2)"),
    ({"window": (0, -2)}, ValueError, "two integers from -1 on", "(0, -2)"),
    ({"sink": "0"}, TypeError, "a tensor or a number", "str"),
    ({"sink": integers(3)}, TypeError, f"a tensor of {FLOATS}", "torch.int64"),
    ({"sink": floats(4)}, ValueError, "one element or [3], one per head", "(4,)"),
    ({"sink": floats(1, 3, 1, 1)}, ValueError, "one element or [3], one per head", "(1, 3, 1, 1)"),
    ({"scores": floats(4, 5), "sink": floats(4)}, ValueError, "one element", "(4,)"),
    ({"sink": floats(0)}, ValueError, "one element", "(0,)"),
    ({"sink": floats(3).to("meta")}, ValueError, "device cpu, as scores", "meta"),
    ({"dtype": torch.int8}, TypeError, FLOATS, "torch.int8"),
    ({"dtype": "float16"}, TypeError, "float16, bfloat16", "'float16'"),
]


TOPK_CASES = [
    ({"logits": [[0.0]]}, TypeError, "a tensor", "list"),
    ({"logits": integers(*SHAPE)}, TypeError, FLOATS, "torch.int64"),
    ({"logits": torch.tensor(1.0)}, ValueError, "at least 1 dimension", "without dimensions"),
    ({"k": 2.0}, TypeError, "an integer from 0 to 5", "float"),
    ({"k": True}, TypeError, "an integer from 0 to 5", "bool"),
    ({"k": torch.tensor(2)}, TypeError, "an integer", "torch.int64"),
    ({"k": None}, TypeError, "an integer from 0 to 5", "NoneType"),
    ({"k": -1}, ValueError, "an integer from 0 to 5", "-1"),
    ({"k": 6}, ValueError, "an integer from 0 to 5", "6"),
    ({"mask": bools(4, 6)}, ValueError, str(SHAPE), "(4, 6)"),
    ({"mask": bools(*SHAPE).to("meta")}, ValueError, "device cpu, as logits", "meta"),
    ({"bias": floats(3, 5, 5)}, ValueError, str(SHAPE), "(3, 5, 5)"),
    ({"renormalize": 1}, TypeError, "a bool", "int"),
    ({"scale": integers(4)}, TypeError, FLOATS, "torch.int64"),
    ({"scale": floats(3, 5)}, ValueError, "(2, 3, 4)", "(3, 5)"),
    ({"scale": floats(4).to("meta")}, ValueError, "device cpu, as logits", "meta"),
    ({"scale": floats(4).requires_grad_()}, TypeError, "without a gradient", "that requires it"),
    ({"top_k": 2.0}, TypeError, "an integer from 1 on", "float"),
    ({"top_k": 0}, ValueError, "an integer from 1 on", "0"),
    ({"top_k": floats(4)}, TypeError, "int32 or int64", "torch.float32"),
    ({"top_k": integers(5)}, ValueError, "(2, 3, 4)", "(5,)"),
    ({"top_p": "0.9"}, TypeError, "a number from 0 to 1", "str"),
    ({"top_p": 1.5}, ValueError, "a number from 0 to 1", "1.5"),
    ({"min_p": True}, TypeError, "a number from 0 to 1", "bool"),
    ({"min_p": floats(4, 1, 1)}, ValueError, "(2, 3, 4)", "(4, 1, 1)"),
    ({"score": "tanh"}, ValueError, "'softmax' or 'sigmoid'", "'tanh'"),
    ({"selection_bias": integers(5)}, TypeError, FLOATS, "torch.int64"),
    ({"selection_bias": floats(6)}, ValueError, str(SHAPE), "(6,)"),
    ({"score": "sigmoid", "top_p": 0.9}, ValueError, "None with score 'sigmoid'", "a limit"),
    ({"selection_bias": floats(5), "top_k": 2}, ValueError, "None with a selection_bias", "limit"),
    ({"score": "sigmoid", "return_lse": True}, ValueError, "False with score 'sigmoid'", "True"),
    ({"dtype": torch.int8}, TypeError, FLOATS, "torch.int8"),
]


DIVISOR, TABLE = "heads that divide 4", "[..., heads, 7] that broadcasts to (2, 4, 7)"
SHARING = "heads share entries only by broadcasting"
ATTENTION_CASES = [
    ({"scale": torch.tensor([0.5])}, TypeError, "a number", "torch.float32"),
    ({"query": [[0.0]]}, TypeError, "a tensor", "list"),
    ({"query": integers(2, 4, 3, 8)}, TypeError, FLOATS, "torch.int64"),
    ({"query": floats(3, 8)}, ValueError, "[..., heads, queries, head_dim]", "(3, 8)"),
    ({"key": None}, TypeError, "a tensor of torch.float32", "NoneType"),
    ({"key": floats(2, 2, 5, 8).half()}, TypeError, "torch.float32, as query", "torch.float16"),
    ({"key": floats(3, 2, 5, 8)}, ValueError, "[2, key_heads, keys, 8]", "(3, 2, 5, 8)"),
    ({"key": floats(2, 2, 5, 6)}, ValueError, "[2, key_heads, keys, 8]", "(2, 2, 5, 6)"),
    ({"key": floats(2, 5, 8)}, ValueError, "[2, key_heads, keys, 8]", "(2, 5, 8)"),
    ({"key": floats(2, 2, 5, 8).to("meta")}, ValueError, "device cpu, as query", "meta"),
    ({"value": floats(2, 3, 5, 6), "key": floats(2, 3, 5, 8)}, ValueError, DIVISOR, "3"),
    ({"value": floats(2, 0, 5, 6), "key": floats(2, 0, 5, 8)}, ValueError, DIVISOR, "0"),
    ({"value": floats(2, 2, 5, 6).double()}, TypeError, "torch.float32, as query", "torch.float64"),
    ({"value": floats(2, 2, 4, 6)}, ValueError, "[2, 2, 5, value_dim]", "(2, 2, 4, 6)"),
    ({"value": floats(2, 4, 5, 6)}, ValueError, "[2, 2, 5, value_dim]", "(2, 4, 5, 6)"),
    ({"mask": bools(2, 2, 3, 5)}, ValueError, "(2, 4, 3, 5)", "(2, 2, 3, 5)"),
    (
        {"mask": bools(2, 5).long()},
        TypeError,
        "a bool tensor",
        "torch.int64; pass a tokenizer's attention_mask as visible=megasoftmax.ranges.padding(",
    ),
    (
        {"mask": bools(2, 5)},
        ValueError,
        "broadcasts to (2, 4, 3, 5)",
        "(2, 5); pass one of [batch, keys] as mask[:, None, None, :]",
    ),
    ({"mask": bools(2, 1, 1, 6)}, ValueError, "(2, 4, 3, 5)", "(2, 1, 1, 6)"),
    ({"bias": bools(3, 5)}, TypeError, "float16", "torch.bool"),
    ({"bias": floats(4, 5, 5)}, ValueError, "broadcasts to (2, 4, 3, 5)", "(4, 5, 5)"),
    (
        {"query": floats(2, 4, 6, 8), "bias": floats(4, 3, 5)},
        ValueError,
        "(2, 4, 6, 5)",
        "(4, 3, 5)",
    ),
    ({"bias": floats(2, 3, 3, 5)}, ValueError, "broadcasts to (2, 4, 3, 5)", "(2, 3, 3, 5)"),
    (
        {"bias": floats(2, 3, 5)},
        ValueError,
        "broadcasts to (2, 4, 3, 5)",
        f"(2, 3, 5); {SHARING}: if number i reads entry i // 2, pass "
        "query.unflatten(1, (2, 2)) and bias.unsqueeze(1), if it reads entry i % 2, pass "
        "query.unflatten(1, (2, 2)), and key and value likewise",
    ),
    ({"bias": floats(4, 4, 3, 5)}, ValueError, "broadcasts to (2, 4, 3, 5)", "(4, 4, 3, 5)"),
    ({"bias": floats(2, 0, 3, 5)}, ValueError, "broadcasts to (2, 4, 3, 5)", "(2, 0, 3, 5)"),
    ({"bias": floats(1, 2, 4, 3, 5)}, ValueError, "broadcasts to (2, 4, 3, 5)", "(1, 2, 4, 3, 5)"),
    ({"bias": floats(3, 5).to("meta")}, ValueError, "device cpu, as query", "meta"),
    ({"bias": RelativeBias(floats(4, 5))}, ValueError, TABLE, "(4, 5)"),
    ({"bias": RelativeBias(floats(4, 1))}, ValueError, TABLE, "(4, 1)"),
    ({"bias": RelativeBias(floats(3, 7))}, ValueError, "(2, 4, 7)", "(3, 7)"),
    (
        {"bias": ShiftedBias(floats(4, 3, 6))},
        ValueError,
        "[..., heads, 3, at least 7] that broadcasts to (2, 4, 3, 6)",
        "(4, 3, 6)",
    ),
    ({"bias": ShiftedBias(floats(4, 2, 7))}, ValueError, "(2, 4, 3, 7)", "(4, 2, 7)"),
    ({"bias": ShiftedBias(floats(2, 3, 7))}, ValueError, "(2, 4, 3, 7)", f"(2, 3, 7); {SHARING}"),
    ({"bias": RelativeBias(floats(2, 7))}, ValueError, "(2, 4, 7)", f"(2, 7); {SHARING}"),
    ({"causal": 1}, TypeError, "a bool", "int"),
    ({"window": (1, 2, 3)}, ValueError, "(left, right)", "(1, 2, 3)"),
    ({"window": (0, -2)}, ValueError, "two integers from -1 on", "(0, -2)"),
    ({"sink": floats(2)}, ValueError, "one element or [4], one per head", "(2,)"),
    ({"sink": floats(4).to("meta")}, ValueError, "device cpu, as query", "meta"),
]


OWN_CASES = {"softmax": SOFTMAX_CASES, "softmax_topk": TOPK_CASES, "attention": ATTENTION_CASES}
CASES = [
    (function, *case) for function, cases in OWN_CASES.items() for case in SHARED_CASES + cases
]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "expected", "actual"),
    CASES,
    ids=[f"{function}: {[*given][-1]} of {actual}" for function, given, *_, actual in CASES],
)
def test_message_names_argument_expected_and_actual(
    function, arguments, error, expected, actual, monkeypatch
):
    """Nothing is computed before."""

    def forbidden(*arguments):
        raise AssertionError("something ran")

    for module in (autograd.softmax, autograd.topk, autograd.attention):
        monkeypatch.setattr(module, "call", forbidden)
    monkeypatch.setattr(autograd.torch_softmax, "softmax", forbidden)
    monkeypatch.setattr(autograd.sdpa, "attention", forbidden)
    (*_, name) = arguments
    if isinstance(arguments[name], RelativeBias):
        name += ".table"
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
    ("table", "error", "expected", "actual"),
    [
        ([1, 2], TypeError, f"a tensor of {FLOATS}", "list"),
        (torch.zeros(4, 7, dtype=torch.int64), TypeError, f"a tensor of {FLOATS}", "torch.int64"),
        (floats(7), ValueError, "[..., heads, m + n - 1]", "(7,)"),
    ],
)
def test_relative_bias_checks_its_table_when_made(table, error, expected, actual):
    pattern = rf"^table: expected {re.escape(expected)}, got .*{re.escape(actual)}"
    with pytest.raises(error, match=pattern):
        RelativeBias(table)


@pytest.mark.parametrize(
    "scale", [numpy.float32(0.5), numpy.int64(2), torch.tensor(0.5), torch.tensor(2)]
)
def test_scale_that_is_read_without_waiting(scale):
    scores = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    number = float(scale)
    calls = ((megasoftmax.softmax, [scores]), (megasoftmax.attention, [scores] * 3))
    for function, tensors in (*calls, (functools.partial(megasoftmax.softmax_topk, k=2), [scores])):
        found = function(*tensors, scale=scale)
        torch.testing.assert_close(found, function(*tensors, scale=number), rtol=0, atol=0)
    assert megasoftmax.FusedAttention(3, scale=scale).scale == number
    for function, tensors in calls:
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
@pytest.mark.parametrize(
    ("function", "name"),
    [
        *(("softmax", name) for name in ("bias", "mask", "sink")),
        *(("attention", name) for name in ("key", "value", "bias", "mask", "sink")),
    ],
)
def test_tensors_of_two_devices(function, name):
    valid = VALID[function]
    arguments = {each: tensor.cuda() for each, tensor in valid.items()}
    others = {"bias": floats(5), "mask": bools(5), "sink": floats(1)}
    first = next(iter(valid))
    with pytest.raises(ValueError, match=f"^{name}: .*device cuda:0, as {first}, got cpu"):
        getattr(megasoftmax, function)(**(arguments | {name: (others | valid)[name]}))


def test_fused_on_a_cpu_says_every_reason():
    with pytest.raises(ValueError, match=r"^fused: cannot be True here") as error:
        megasoftmax.softmax(floats(*SHAPE).double(), scale=0, fused=True)
    for reason in ("device: expected a CUDA device, got cpu", "torch.float64", "scale"):
        assert reason in str(error.value)


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
