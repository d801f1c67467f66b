"""Random calls of all public functions, and the kinds of argument that were once let through."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import soak
import torch
from torch import Tensor

import megasoftmax
from megasoftmax import biases, ranges
from megasoftmax.integrations import flash_attn


@pytest.fixture(scope="module", autouse=True)
def end_of_rings() -> Iterator[None]:
    """Random calls of rings make a process group, which other tests must not find."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


FIRST, CALLS = 20_000_000, 3000


def failures(calls: int, device: str = "cpu") -> list[str]:
    outcomes = (soak.SUITE.attempt("arguments", FIRST + i, device) for i in range(calls))
    return [outcome.in_words() for outcome in outcomes if outcome.has_failed]


def test_random_calls(device: str) -> None:
    assert not failures(CALLS, device)


def with_error_of_torch(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    try:
        return function(*args, **given)
    except (TypeError, ValueError):
        raise RuntimeError("The size of tensor a must match") from None


def with_error_that_names_nothing(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    try:
        return function(*args, **given)
    except (TypeError, ValueError) as error:
        raise type(error)("bad input") from None


def with_change(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    found = function(*args, **given)
    mask = given.get("mask")
    if isinstance(mask, Tensor) and mask.numel() > 0:
        mask.logical_not_()
    return found


def without_check(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """As if a flag was only asked whether it is true."""
    return function(*args, **(given | {"return_lse": bool(given.get("return_lse"))}))


FAULTS = [with_error_of_torch, with_error_that_names_nothing, with_change, without_check]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = functools.partial(fault, megasoftmax.attention)
    monkeypatch.setattr(megasoftmax, "attention", faulty)
    monkeypatch.setattr(  # which knows the function, not its stand-in
        megasoftmax,
        "why_not_fused",
        lambda function, **given: _ASK(_ATTENTION if function is faulty else function, **given),
    )
    assert failures(CALLS)


_ASK, _ATTENTION = megasoftmax.why_not_fused, megasoftmax.attention


# Kinds of argument

Q = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
K = V = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
TENSORS = {
    "softmax": {"scores": Q},
    "softmax_topk": {"logits": Q, "k": 2},
    "attention": {"query": Q, "key": K, "value": V},
}
WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
t5_bias = functools.partial(biases.t5_bias, WEIGHT, bidirectional=True)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "sparse rows": lambda tensor: tensor.flatten(1).to_sparse_csr(),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda tensor: torch.nested.nested_tensor([*tensor]),
    "jagged": lambda tensor: torch.nested.nested_tensor([*tensor], layout=torch.jagged),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for function, given in TENSORS.items() for name in given if name != "k"],
)
def test_layout_is_refused(function: str, name: str, layout: str) -> None:
    given = TENSORS[function] | {name: LAYOUTS[layout](TENSORS[function][name])}  # type: ignore[operator]
    with pytest.raises(TypeError, match=rf"^{name}: expected a dense, strided tensor, got "):
        getattr(megasoftmax, function)(**given)


@pytest.mark.parametrize("value", [1, "True", torch.tensor(True), None])
@pytest.mark.parametrize("function", TENSORS)
def test_return_lse_is_a_bool(function: str, value: Any) -> None:
    with pytest.raises(TypeError, match=r"^return_lse: expected a bool, got "):
        getattr(megasoftmax, function)(**TENSORS[function], return_lse=value)


@pytest.mark.parametrize("number", [1e39, -(10**39), 10**400])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((function, "scale") for function in TENSORS),
        *((function, "sink") for function in ("softmax", "attention")),
    ],
)
def test_number_beyond_float32(function: str, name: str, number: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected a number within .* torch.float32"):
        getattr(megasoftmax, function)(**TENSORS[function], **{name: number})


def test_scale_beyond_float32_of_plain_self_attention() -> None:
    with pytest.raises(ValueError, match=r"^scale: expected a number within .* torch.float32"):
        megasoftmax.attention(Q, Q, Q, scale=1e39)  # which checks less, to be quick


def test_number_of_float64() -> None:
    found = megasoftmax.softmax(torch.tensor([1e-39, 0.0], dtype=torch.float64), scale=1e39)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0], dtype=torch.float64).softmax(0))


@pytest.mark.parametrize("limit", [2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400])
def test_window_without_a_limit(limit: int, device: str) -> None:
    query, key, value = (each.to(device) for each in (Q, K, V))
    calls = ((megasoftmax.softmax, [query]), (megasoftmax.attention, [query, key, value]))
    for window, equal in (((limit, 0), (-1, 0)), ((1, limit), (1, -1)), ((limit, limit), None)):
        for function, tensors in calls:
            found = function(*tensors, window=window)
            torch.testing.assert_close(found, function(*tensors, window=equal))
            reasons = megasoftmax.why_not_fused(function, *tensors, window=window)
            assert reasons == megasoftmax.why_not_fused(function, *tensors, window=equal)


@pytest.mark.parametrize("integer", [numpy.int64, numpy.int8, numpy.uint16])
def test_integers_of_numpy(integer: Callable[[int], Any]) -> None:
    assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    window = (integer(1), integer(2))
    assert_equal(megasoftmax.softmax(Q, window=window), megasoftmax.softmax(Q, window=(1, 2)))
    assert_equal(megasoftmax.softmax(Q, dim=integer(1)), megasoftmax.softmax(Q, dim=1))
    assert_equal(megasoftmax.softmax_topk(Q, integer(2)), megasoftmax.softmax_topk(Q, 2))
    found = megasoftmax.attention(Q, K, V, window=window)
    assert_equal(found, megasoftmax.attention(Q, K, V, window=(1, 2)))
    found = t5_bias(integer(3), integer(5), max_distance=integer(9))
    assert_equal(found.table, t5_bias(3, 5, max_distance=9).table)
    assert_equal(biases.alibi_slopes(integer(4)), biases.alibi_slopes(4))
    assert_equal(ranges.chunks(integer(2), integer(5)), ranges.chunks(2, 5))
    assert megasoftmax.FusedAttention(integer(4)).heads == 4


@pytest.mark.parametrize("number", [numpy.float32(0.5), numpy.float16(0.5), torch.tensor(0.5)])
def test_probabilities_of_dropout(number: Any) -> None:
    seed = torch.tensor([3])
    for function, tensors in ((megasoftmax.softmax, (Q,)), (megasoftmax.attention, (Q, K, V))):
        found = function(*tensors, dropout=number, seed=seed)
        assert found.equal(function(*tensors, dropout=0.5, seed=seed))
        assert megasoftmax.why_not_fused(function, *tensors, dropout=number)
    assert megasoftmax.FusedAttention(4, dropout=number).dropout == 0.5
    found = []
    for dropout in (number, 0.5):
        torch.manual_seed(0)
        sdpa = megasoftmax.scaled_dot_product_attention
        found.append(sdpa(Q, K, V, None, dropout, enable_gqa=True))
    assert found[0].equal(found[1])
    with pytest.raises(ValueError, match="dropout: expected a number from 0 to 1"):
        megasoftmax.attention(Q, K, V, dropout=number + 1)


@pytest.mark.parametrize("function", ["softmax", "attention"])
def test_tensor_as_scale_of_a_compiled_graph(function: str) -> None:
    """An error with a name, where one graph is asked for; else the call leaves the graph."""
    given = tuple(TENSORS[function].values())

    def call(scale: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(megasoftmax, function)(*given, scale=scale)
        return found

    scale = torch.tensor(0.3)
    torch.compiler.reset()
    with pytest.raises(Exception, match="scale: expected a number in a compiled graph"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(scale)
    torch.compiler.reset()
    found = torch.compile(call, backend="aot_eager")(scale)
    torch.testing.assert_close(found, call(scale))


def test_open_sizes_as_limits() -> None:
    """A window and K that come from a shape which torch.export leaves open."""

    class Module(torch.nn.Module):
        def forward(self, scores: torch.Tensor, left: torch.Tensor) -> Any:
            width = left.shape[0]
            windowed = megasoftmax.softmax(scores, window=(width, 0), fused=False)
            return windowed, *megasoftmax.softmax_topk(scores, width, fused=False)

    scores, left = torch.randn(2, 9, 9), torch.zeros(3)
    shapes = (None, {0: torch.export.Dim("left", min=2, max=8)})
    program = torch.export.export(Module(), (scores, left), dynamic_shapes=shapes, strict=False)
    for width in (3, 5):
        found = program.module()(scores, torch.zeros(width))
        torch.testing.assert_close(found, Module()(scores, torch.zeros(width)))


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("other", ["mask", "TileMask", "visible"])
def test_bias_of_rows_beside_limits_of_each(heads: int, other: str) -> None:
    """Torch's own attention has no bias that some examples share."""
    query, key = torch.randn(2, 2, 4, 3, 8), torch.randn(2, 2, 4, 5, 8)
    bias = torch.randn(2, 1, heads, 3, 5)
    coin = torch.rand(2, 2, 4, 3, 5) < 0.3
    limits: dict[str, Any] = {
        "mask": {"mask": coin},
        "TileMask": {"mask": megasoftmax.TileMask(coin)},
        "visible": {"visible": (None, torch.randint(1, 5, (2, 2, 4, 3)))},
    }[other]
    found = megasoftmax.attention(query, key, key, bias=bias, **limits)
    whole = bias.expand(2, 2, 4, 3, 5)
    expected = megasoftmax.attention(query, key, key, bias=whole, **limits, fused=False)
    torch.testing.assert_close(found, expected)
    runs = megasoftmax.why_not_fused(megasoftmax.attention, query, key, key, bias=bias, **limits)
    assert runs.runs == "reference"


# Words


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("attn_mask", r"mask=.*bias=.*scaled_dot_product_attention"),
        ("is_causal", "causal="),
        ("dropout_p", "dropout="),
        ("temperature", "scale=1 / temperature"),
    ],
)
@pytest.mark.parametrize("function", TENSORS)
def test_other_name_of_an_option(function: str, name: str, meant: str) -> None:
    called = getattr(megasoftmax, function)
    pattern = rf"^{function}\(\) got an unexpected keyword argument '{name}'; use {meant}"
    for call in (called, functools.partial(megasoftmax.why_not_fused, called)):
        with pytest.raises(TypeError, match=pattern):
            call(**TENSORS[function], **{name: None})


def test_dim_by_position() -> None:
    with pytest.raises(TypeError, match=r"takes 1 positional .* by name, such as dim=-1"):
        megasoftmax.softmax(Q, -1)  # type: ignore[call-overload]


def test_seed_of_an_integer() -> None:
    expected = "seed: expected None or a tensor of int64, got int; pass torch.tensor([42]"
    with pytest.raises(TypeError, match=re.escape(expected)):
        megasoftmax.attention(Q, K, V, dropout=0.1, seed=42)  # type: ignore[call-overload]


def test_why_not_fused_without_a_function() -> None:
    with pytest.raises(TypeError, match=r"^function: .*, got a tensor of torch.float32$"):
        megasoftmax.why_not_fused(Q, K, V)


@pytest.mark.parametrize("name", ["flash_attn_with_kvcache", "bert_padding"])
def test_what_flash_attn_has_and_we_do_not(name: str) -> None:
    """Libraries ask by hasattr. The error says what to write instead."""
    with pytest.raises(AttributeError, match=rf"has no {name}: .*megasoftmax\.attention"):
        getattr(flash_attn, name)
    with pytest.raises(ImportError, match=name):
        exec(f"from megasoftmax.integrations.flash_attn import {name}")
    for other in (name, "flash_attn_funk"):
        assert not hasattr(flash_attn, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t5_bias(3, 5, max_distance=math.nan), "max_distance: .*got float"),
        (lambda: megasoftmax.RelativeBias(torch.zeros(4, 7)).dense("x", 2), "queries: .*got str"),
        (lambda: ranges.chunks(2, 5, device="zzz"), "device: .*got 'zzz'"),
        (lambda: megasoftmax.SoftmaxOne()([1.0]), "x: expected a tensor of .*got list"),
        (lambda: megasoftmax.FusedAttention("4"), "heads: .*got str"),
        (lambda: megasoftmax.FusedAttention(4, causal=1), "causal: expected a bool, got int"),
        (
            lambda: megasoftmax.FusedScaleMaskSoftmax(1, False, "causal", True, None, True, None),
            "input_in_fp16: expected a bool, got int",
        ),
        (
            lambda: flash_attn.flash_attn_func(*(Q[:, :0].transpose(1, 2),) * 3, softcap="1"),
            "softcap: expected a number, got str",
        ),
    ],
)
def test_type_that_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        call()


def test_flash_attn_of_no_heads_and_no_tokens() -> None:
    no_heads, no_tokens = torch.zeros(2, 5, 0, 8), torch.zeros(2, 0, 4, 8)
    assert flash_attn.flash_attn_func(*(no_heads,) * 3, softcap=1.0).shape == no_heads.shape
    found = flash_attn.flash_attn_func(*(no_tokens,) * 3, alibi_slopes=biases.alibi_slopes(4))
    assert found.shape == no_tokens.shape
