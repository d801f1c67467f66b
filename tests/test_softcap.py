"""Softcaps of softmax, top-k and attention: oracles, rules, derivatives, what passes them on.

Those of rings and of split vocabularies are cases of test_distributed.py and test_vocabulary.py.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import op_checks
import oracle
import oracle_attention
import oracle_topk
import pytest
import torch
from inputs import (
    DTYPES,
    attention_on,
    bits_equal,
    coin,
    deterministic,
    fused_on,
    gpu_with_all_kernels,
    normal,
    on_all_kernels,
    tensors,
)
from torch import Tensor

import megasoftmax
from megasoftmax import (
    FusedAttention,
    FusedScaleMaskSoftmax,
    RelativeBias,
    attention,
    softmax,
    softmax_topk,
    why_not_fused,
)
from megasoftmax.explain.attention import explain_attention
from megasoftmax.explain.softmax import explain
from megasoftmax.explain.topk import explain_topk

INF, NAN = math.inf, math.nan
# Most scores lie within the first. Many reach the second, where tanh is made in another way.
SOFTCAPS = [50.0, 1.5]


def _ends(most: int, shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randint(0, most + 1, shape, device=device).int()


# Rows

ROWS: dict[str, Callable[[tuple[int, ...], str, torch.dtype], dict[str, Any]]] = {
    "plain": lambda shape, device, dtype: {},
    "negative scale": lambda shape, device, dtype: {"scale": -0.7},
    "causal": lambda shape, device, dtype: {"causal": True},
    "window": lambda shape, device, dtype: {"window": (3, 1), "scale": 2.0},
    "mask": lambda shape, device, dtype: {"mask": coin(*shape, device=device)},
    "bias": lambda shape, device, dtype: {
        "bias": normal(*shape[1:], device=device, dtype=dtype, seed=3).requires_grad_()
    },
    "mask, float32 bias": lambda shape, device, dtype: {
        "mask": coin(shape[0], 1, 1, shape[3], device=device),
        "bias": normal(1, shape[1], 1, shape[3], device=device, seed=3).requires_grad_(),
    },
    "bias without a gradient": lambda shape, device, dtype: {
        "bias": normal(shape[2], 1, device=device, dtype=dtype, seed=3)
    },
    "sink": lambda shape, device, dtype: {
        "sink": normal(shape[1], device=device, seed=3).requires_grad_(),
        "visible": (None, _ends(shape[3] + 1, shape[:3], device)),
    },
    "sinks far off": lambda shape, device, dtype: {
        "sink": torch.tensor([120.0, 60.0, -120.0], device=device).requires_grad_(),
        "causal": True,
    },
    "sinks beyond any logit": lambda shape, device, dtype: {
        "sink": torch.tensor([2059233792.0, 3e38, -3e38], device=device).requires_grad_(),
    },
}


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROWS)
def test_softmax(case: str, dtype: torch.dtype, softcap: float, device: str) -> None:
    """One row in registers, in shared memory, in a cluster, ragged or not."""
    lengths = [1, 7, 40, 256, 1000, 1031]
    lengths += [2048, 4099, 9000, 40_000] if device == "cuda" else []
    for length in lengths:
        shape = (2, 3, 5, length)
        scores = normal(*shape, device=device, dtype=dtype) * 3
        given = ROWS[case](shape, device, dtype)
        function = fused_on(softmax, device)
        oracle.check(function, scores, softcap=softcap, **given, what=f"{length} columns")


@pytest.mark.parametrize("softcap", [0.005, 0.01, 64.0, 65.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_at_the_limits(dtype: torch.dtype, softcap: float, device: str) -> None:
    """Other kernels serve softcaps beside them. Many scores reach the softcap on either side."""
    function = fused_on(softmax, device)
    for length in (40, 1000, *((9000, 16_384) if device == "cuda" else ())):
        scores = normal(2, 3, 5, length, device=device, dtype=dtype) * softcap
        for given in ({}, {"causal": True, "scale": -2.0}):
            oracle.check(function, scores, softcap=softcap, **given, what=f"{length} columns")
            below = -scores.abs() - softcap
            oracle.check(function, below, softcap=softcap, **given, what=f"{length} below")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_halves_in_float32(dtype: torch.dtype, device: str) -> None:
    scores = normal(2, 3, 5, 264, device=device, dtype=dtype)
    oracle.check(fused_on(softmax, device), scores, softcap=2.0, dtype=torch.float32)
    columns = normal(2, 40, 6, device=device, dtype=dtype)
    p, lse = fused_on(softmax, device)(columns, softcap=2.0, dim=1, return_lse=True)
    expected = oracle.softmax(columns.mT, softcap=2.0)
    oracle.assert_matches(p.mT, expected.probabilities, dtype)
    oracle.assert_matches(lse, expected.lse, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_with_dropout(dtype: torch.dtype, device: str) -> None:
    seed = torch.tensor([5], device=device)
    kept_of = megasoftmax.reference.dropout.kept_of_scores
    for length in (40, 520, 2053):
        scores = normal(2, 3, 17, length, device=device, dtype=dtype)
        bias = normal(3, 17, length, device=device, dtype=dtype, seed=3).requires_grad_()
        for given in ({}, {"bias": bias}):
            options = given | {"softcap": 1.5, "dropout": 0.3, "seed": seed}
            kept = kept_of(seed, 0.3, scores)
            oracle.check(fused_on(softmax, device), scores, **options, kept=kept)


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [{}, {"renormalize": True}, {"scale": -0.7}], ids=str)
def test_topk(given: dict[str, Any], dtype: torch.dtype, softcap: float, device: str) -> None:
    """Short rows, which share a tile without a softcap; whole vocabularies on a GPU."""
    function = fused_on(softmax_topk, device)
    for length in (9, 64, 1000, *((50_257,) if device == "cuda" else ())):
        logits = normal(3, 5, length, device=device, dtype=dtype) * 3
        mask = coin(5, length, device=device)
        bias = normal(5, length, device=device, dtype=dtype, seed=3).requires_grad_()
        for beside in ({}, {"mask": mask}, {"bias": bias}, {"mask": mask, "bias": bias}):
            arguments = given | beside | {"softcap": softcap}
            oracle_topk.check(function, logits, min(8, length), **arguments, what=f"of {length}")


# Attention


# -2 stands for the number of queries, -1 for that of keys, 0 for that of their distances.
BIASES: dict[str, tuple[int, ...]] = {
    "dense": (2, 4, -2, -1),
    "shared": (1, 4, -2, -1),
    "of keys": (2, 1, 1, -1),
    "of queries": (1, 4, -2, 1),
    "table": (4, 0),
}


OPTIONS: dict[str, Callable[[int, int, str], dict[str, Any]]] = {
    "plain": lambda m, n, device: {},
    "causal": lambda m, n, device: {"causal": True},
    "window": lambda m, n, device: {"window": (20, 3)},
    "mask": lambda m, n, device: {"mask": coin(2, 1, m, n, device=device)},
    "mask of keys": lambda m, n, device: {"mask": coin(2, 1, 1, n, device=device)},
    "ranges": lambda m, n, device: {"visible": (None, _ends(n, (2, 1, m), device))},
    "sink": lambda m, n, device: {
        "sink": normal(4, device=device, seed=5).requires_grad_(),
        "causal": True,
    },
}


def states(m: int, n: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tensors(device, dtype, lengths=(m, n), dims=dim)


def dims_on(device: str, dtype: torch.dtype) -> list[int]:
    if device == "cpu":
        return [8]
    return [32, 64, 96, 128] if dtype == torch.float32 else [32, 64, 80, 128, 192, 256]


LENGTHS = {"cpu": [(5, 7), (1, 9), (9, 4)], "cuda": [(65, 130), (300, 200), (3, 400), (128, 128)]}


@on_all_kernels
@pytest.mark.parametrize("softcap", [*SOFTCAPS, 128.0])  # few reach a quarter of 128
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OPTIONS)
def test_attention(case: str, dtype: torch.dtype, softcap: float, device: str) -> None:
    function = attention_on(device, dtype)
    for dim in dims_on(device, dtype):
        for m, n in LENGTHS[device]:
            given = OPTIONS[case](m, n, device) | {"softcap": softcap, "scale": 0.5}
            given |= {"what": f"{m} x {n} x {dim}"}
            oracle_attention.check(function, *states(m, n, dim, device, dtype), **given)


@on_all_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("case", BIASES)
@pytest.mark.parametrize("in_order", [False, True])
def test_attention_with_a_bias(
    case: str, is_float: bool, dtype: torch.dtype, in_order: bool, device: str
) -> None:
    """Its gradient is that of logits, and that of queries and keys is another."""
    function = attention_on(device, dtype)
    of_bias = torch.float32 if is_float else dtype
    for dim, (m, n) in itertools.product(dims_on(device, dtype), LENGTHS[device]):
        sizes = [{-1: n, -2: m, 0: m + n - 1}.get(size, size) for size in BIASES[case]]
        bias: Any = normal(*sizes, device=device, dtype=of_bias, seed=4).requires_grad_()
        given = {"bias": RelativeBias(bias) if case == "table" else bias, "causal": n > m}
        given |= {"softcap": 2.0, "scale": 0.5, "what": f"{m} x {n} x {dim}"}
        with deterministic(in_order, warn_only=True):
            oracle_attention.check(function, *states(m, n, dim, device, dtype), **given)


@gpu_with_all_kernels
@pytest.mark.parametrize("softcap", [2.0, 50.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_drop_what_the_reference_drops(softcap: float, dtype: torch.dtype) -> None:
    seed = torch.tensor([3], device="cuda")
    for dim in dims_on("cuda", dtype):
        q, k, v = (each.requires_grad_() for each in states(65, 130, dim, "cuda", dtype))
        for bias in (None, normal(1, 4, 65, 130, device="cuda", dtype=dtype, seed=4)):
            options = {"softcap": softcap, "dropout": 0.3, "seed": seed, "bias": bias}
            call = functools.partial(attention, q, k, v, **options, return_lse=True)
            found = [call(fused=fused) for fused in (True, False)]
            grads = [torch.autograd.grad(output.sum(), (q, k, v)) for output, _ in found]
            tolerance = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}[dtype]
            for actual, wanted in zip((*found[0], *grads[0]), (*found[1], *grads[1]), strict=True):
                error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
                assert error < tolerance


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("m", [1, 33])
def test_wide_heads(m: int) -> None:
    if reasons := why_not_fused(attention, *[normal(1, 2, m, 576, device="cuda").half()] * 3):
        pytest.skip(str(reasons))
    query = normal(2, 4, m, 576, device="cuda", dtype=torch.bfloat16, seed=1)
    key = normal(2, 2, 70, 576, device="cuda", dtype=torch.bfloat16, seed=2)
    value = key[..., :512]
    bias = normal(1, 4, m, 70, device="cuda", dtype=torch.bfloat16, seed=4)
    for given in ({}, {"bias": bias}):
        options = given | {"softcap": 3.0}
        actual = attention(query, key, value, **options, fused=True)
        expected = oracle_attention.attention(query, key, value, **options).output.value
        torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_attention_is_softmax_between_products(softcap: float, device: str) -> None:
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v = states(5, 7, 8, device, dtype)
    bias = normal(4, 5, 7, device=device, dtype=dtype, seed=4)
    actual = attention(q, k, v, bias=bias, softcap=softcap, scale=0.7, causal=True)
    scores = q @ k.repeat_interleave(2, 1).mT
    p = softmax(scores, bias=bias, softcap=softcap, scale=0.7, causal=True)
    torch.testing.assert_close(actual, p @ v.repeat_interleave(2, 1))


# Rules


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_infinities_and_nan(dtype: torch.dtype, device: str) -> None:
    scores = torch.tensor(
        [[INF, 0.0, -INF, 1.0], [NAN, 0.0, 1.0, 2.0], [NAN, INF, 1.0, -INF]], device=device
    ).to(dtype)
    scores.requires_grad_()
    mask = torch.tensor([[False] * 4, [False] * 4, [True, False, False, False]], device=device)
    p = softmax(scores, softcap=2.0, mask=mask)
    (gradient,) = torch.autograd.grad(p[:, 1].sum(), scores)
    z = torch.tensor([[2.0, 0.0, -2.0, 2 * math.tanh(0.5)]], device=device, dtype=torch.float64)
    torch.testing.assert_close(p[:1].double(), z.softmax(-1), rtol=0.01, atol=0.001)
    assert p[1].isnan().all()
    assert p[2, 0] == 0
    assert not p[2].isnan().any()
    assert gradient[0, [0, 2]].tolist() == [0, 0]
    assert (gradient[0, [1, 3]] != 0).all()
    assert gradient[1].isnan().all()
    assert gradient[2, [0, 1, 3]].tolist() == [0, 0, 0]
    assert softmax_topk(scores, 4, softcap=2.0, mask=mask)[1][0].tolist() == [0, 3, 1, 2]


@on_all_kernels
def test_attention_of_scores_beyond_all_numbers(device: str) -> None:
    """Products around 1e36: their weights are those of the softcap, and their gradients 0."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = states(33, 70, 64, device, dtype)
    q, k = (q * 1e8).requires_grad_(), (k * 1e28).requires_grad_()
    output = attention(q, k, v, softcap=3.0, fused=device != "cpu")
    signs = (q.detach().double() @ k.detach().double().repeat_interleave(2, 1).mT).sign()
    expected = (3 * signs).softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
    d_query, d_key = torch.autograd.grad(output.sum(), (q, k))
    assert not d_query.any()
    assert not d_key.any()


@pytest.mark.parametrize("none", [None, 0, 0.0])
def test_0_is_none(none: float | None, device: str) -> None:
    scores = normal(2, 3, 40, device=device)
    assert bits_equal(softmax(scores, softcap=none), softmax(scores))
    assert bits_equal(softmax_topk(scores, 3, softcap=none)[0], softmax_topk(scores, 3)[0])
    given = states(5, 7, 8, device, torch.float32)
    assert bits_equal(attention(*given, softcap=none), attention(*given))


def test_large_softcap_changes_little(device: str) -> None:
    scores = normal(2, 3, 40, device=device)
    torch.testing.assert_close(softmax(scores, softcap=1e4), softmax(scores))


CALLS: dict[str, Callable[..., Any]] = {
    "softmax": lambda **given: softmax(torch.zeros(2, 3), **given),
    "softmax_topk": lambda **given: softmax_topk(torch.zeros(2, 3), 1, **given),
    "attention": lambda **given: attention(*[torch.zeros(1, 1, 2, 8)] * 3, **given),
    "FusedAttention": lambda **given: FusedAttention(2, **given),
    "FusedScaleMaskSoftmax": lambda **given: FusedScaleMaskSoftmax(
        *(False, True, "causal", True, None, True, 1.0), **given
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("softcap", "error", "message"),
    [
        (-1.0, ValueError, "softcap: expected None or a number from 0 on, got -1.0"),
        (NAN, ValueError, "softcap: expected a finite number, got nan"),
        (INF, ValueError, "softcap: expected a finite number, got inf"),
        ("1", TypeError, "softcap: expected a number, got str"),
        (True, TypeError, "softcap: expected a number, got bool"),
    ],
)
def test_errors(
    call: Callable[..., Any], softcap: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(softcap=softcap)


def test_twice_the_scale_over_the_softcap_is_finite(device: str) -> None:
    scores, query = torch.zeros(2, 3), torch.zeros(1, 1, 2, 8)
    calls = (
        lambda **given: softmax(scores, **given),
        lambda **given: softmax_topk(scores, 1, **given),
        lambda **given: attention(query, query, query, **given),
    )
    for call in calls:
        for given in ({"scale": 2e38, "softcap": 0.5}, {"softcap": 1e-40}):
            with pytest.raises(ValueError, match=r"^softcap: expected at least"):
                call(**given)
    for scale in (5e37, 1e38):
        assert softmax(scores.to(device), scale=scale, softcap=1.0).eq(1 / 3).all()


def test_reasons() -> None:
    def of(function: Callable[..., Any], *tensors: Any, **given: Any) -> list[str]:
        return [str(reason) for reason in why_not_fused(function, *tensors, **given)]

    query = torch.zeros(1, 1, 40, 64, dtype=torch.bfloat16)
    scores = torch.zeros(2, 40)
    assert not any("softcap" in each for each in of(attention, *[query] * 3, softcap=50.0))
    assert any("softcap: " in each for each in of(attention, *[query] * 3, softcap=2e4))
    assert any("softcap: " in each for each in of(softmax, scores, softcap=1e-39, scale=1e-3))
    assert any("softcap: " in each for each in of(softmax_topk, scores, 2, softcap=1.0, scale=0))
    assert any("softcap: " in each for each in of(softmax, scores, softcap=1.0, scale=1e38))
    assert "softcap" in str(why_not_fused(attention, *[query] * 3, softcap=50.0).against_sdpa)


# Derivatives, tracing, and what passes a softcap on


def test_second_derivatives() -> None:
    scores, bias, sink = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 1, 4), (3, 1, 4), (3,))
    )
    options = {"scale": -0.7, "softcap": 1.5, "return_lse": True}
    for given in ({}, {"dropout": 0.3, "seed": torch.tensor([3])}):

        def of_rows(s: Tensor, b: Tensor, k: Tensor, given: Any = given) -> Any:
            return softmax(s, bias=b, sink=k, **options, **given)

        assert torch.autograd.gradcheck(of_rows, (scores, bias, sink), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(of_rows, (scores, bias, sink))
    for renormalize in (False, True):

        def topk(s: Tensor, b: Tensor, renormalize: bool = renormalize) -> Any:
            return softmax_topk(s, 3, bias=b, renormalize=renormalize, **options)[::2]

        assert torch.autograd.gradcheck(topk, (scores, bias))
        assert torch.autograd.gradgradcheck(topk, (scores, bias))
    inputs = [each.requires_grad_() for each in states(3, 4, 8, "cpu", torch.float64)]
    of_pairs = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)

    def attend(*given: Tensor) -> Any:
        return attention(*given[:3], bias=given[3], softcap=1.5, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(attend, (*inputs, of_pairs))
    assert torch.autograd.gradgradcheck(attend, (*inputs, of_pairs))


def _functions(device: str) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    scores = normal(3, 2, 4, 40, device=device)
    qkv = [each.unsqueeze(0).repeat(3, 1, 1, 1, 1) for each in states(5, 7, 8, device, FLOAT)]
    return {
        "softmax": (lambda s: softmax(s, softcap=1.5, causal=True), (scores,)),
        "softmax_topk": (lambda s: softmax_topk(s, 3, softcap=1.5)[0], (scores,)),
        "attention": (lambda q, k, v: attention(q, k, v, softcap=1.5), tuple(qkv)),
    }


FLOAT = torch.float32


@pytest.mark.parametrize("name", ["softmax", "softmax_topk", "attention"])
def test_vmap(name: str, device: str) -> None:
    function, given = _functions(device)[name]

    every = tuple(range(len(given)))
    gradients = torch.func.grad(lambda *inputs: function(*inputs).square().sum(), every)
    op_checks.check_vmap(gradients, given, [0] * len(given))


@pytest.mark.parametrize("name", ["softmax", "softmax_topk", "attention"])
def test_compile_and_export(name: str, device: str) -> None:
    function, given = _functions(device)[name]
    leaves = tuple(each.requires_grad_() for each in given)
    expected = function(*leaves)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, expected)
    losses = (output.square().sum() for output in (compiled, expected))
    found, wanted = (torch.autograd.grad(loss, leaves) for loss in losses)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    plain = tuple(each.detach() for each in leaves)
    program = torch.export.export(op_checks.Called(function), plain)
    torch.testing.assert_close(program.module()(*plain), expected.detach())


def test_attention_varlen(device: str) -> None:
    q, k, v = (normal(9, heads, 8, device=device, seed=heads) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 3, 9], device=device)
    actual = megasoftmax.attention_varlen(q, k, v, offsets, causal=True, softcap=1.5)
    for begin, end in ((0, 3), (3, 9)):
        own = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        expected = attention(*own, causal=True, softcap=1.5)[0].transpose(0, 1)
        torch.testing.assert_close(actual[begin:end], expected)


def test_scaled_dot_product_attention(device: str) -> None:
    q, k, v = states(5, 7, 8, device, FLOAT)
    given = {"enable_gqa": True, "softcap": 1.5}
    actual = megasoftmax.scaled_dot_product_attention(q, k, v, **given)
    torch.testing.assert_close(actual, attention(q, k, v, softcap=1.5))


def test_modules(device: str) -> None:
    q, k, v = states(5, 7, 8, device, FLOAT)
    module = FusedAttention(4, softcap=1.5, causal=True)
    assert "softcap=1.5" in repr(module)
    torch.testing.assert_close(module(q, k, v), attention(q, k, v, softcap=1.5, causal=True))
    scores = normal(2, 3, 5, 7, device=device)
    for fusion in (True, False):
        options = (False, False, "causal", fusion, lambda s, m: s.masked_fill(m, -INF), True, 0.7)
        module = FusedScaleMaskSoftmax(*options, None, softcap=1.5)
        expected = softmax(scores, scale=0.7, softcap=1.5, causal=True)
        torch.testing.assert_close(module(scores, None), expected)
        assert "softcap=1.5" in repr(module)


def test_explain() -> None:
    """Hopper's kernels have it for three head dimensions and without a bias."""
    for dim, tile in ((32, 64), (64, 64), (96, 128), (128, 128), (192, 256), (256, 256)):
        for backward in (False, True):
            found = explain_attention(4, 16, 4096, dim, softcap=True, backward=backward)
            assert found.hopper
            assert (found.tile_head_dim, found.tile_value_dim) == (tile, tile)
    for options in ({"bias": True}, {"relative": True, "bias_gradient": True, "backward": True}):
        found = explain_attention(4, 16, 4096, 128, softcap=True, **options)
        assert not found.hopper
        assert "a softcap beside a bias" in found.why
    assert not explain_attention(2048, 8, 49, 32, softcap=True).several_heads
    masked = explain(64, 2048, torch.bfloat16, masked=True, softcap=True)
    assert masked.kind == "bias or ragged mask"
    one = explain(64, 2048, torch.bfloat16, softcap=True, backward=True)
    two = explain(64, 2048, torch.bfloat16, softcap=True, backward=True, bias_gradient=True)
    assert (one.kind, one.launches) == ("contiguous", 1)
    assert (two.kind, two.launches) == ("dropped bias gradient", 2)
    assert (one.bytes_written, two.bytes_written) == (2**18, 3 * 2**18)
    assert two.reasons[-1].endswith("another launch makes that of the scores")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"), [(64, 128_256), (4096, 4096), (2**20, 256), (4, 2**20)]
)
def test_rows_with_a_softcap_alone_have_the_regimes_of_others(
    rows: int, columns: int, backward: bool
) -> None:
    for options in ({}, {"causal": True, "queries": rows}):
        for dtype in DTYPES:
            found, plain = (
                explain(rows, columns, dtype, softcap=softcap, backward=backward, **options)
                for softcap in (True, False)
            )
            assert (found.kind, found.index) == (plain.kind, plain.index)
    assert explain(rows, 24, torch.bfloat16, softcap=True).regime.storage != "tile"


def test_topk_with_a_softcap_alone_has_the_regimes_of_others() -> None:
    for rows, columns in ((64, 128_256), (4096, 32_000), (1, 151_936)):
        call = (rows, columns, 50, torch.bfloat16)
        assert explain_topk(*call, softcap=True) == explain_topk(*call)
    assert explain_topk(2**20, 128, 8, torch.bfloat16, softcap=True).regime == "block_32"
