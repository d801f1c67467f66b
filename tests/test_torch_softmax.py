"""softmax of scores alone on a CPU by torch's own: which calls, what they give."""

import pytest
import torch
from inputs import DTYPES, bits_equal, normal, record_calls
from torch import Tensor
from torch.autograd import forward_ad

import megasoftmax
from megasoftmax import autograd

INF, NAN = torch.inf, torch.nan
SHAPE = (2, 3, 5, 7)


@pytest.fixture
def by_torch(monkeypatch):
    """An entry for each call that torch's softmax was given."""
    return record_calls(monkeypatch, "softmax", autograd.torch_softmax)


def scores_of(dtype=torch.float32):
    return normal(*SHAPE, device="cpu", dtype=dtype)


def by_reference(scores, **options):
    """The same softmax, which torch's does not compute."""
    return megasoftmax.softmax(scores, mask=torch.zeros(1, dtype=torch.bool), **options)


# Which way runs


@pytest.mark.parametrize(
    "options",
    [{}, {"fused": False}, {"dim": 3}, {"scale": 1}, {"dtype": torch.float32}, {"seed": None}],
    ids=str,
)
def test_scores_alone(options, by_torch):
    for scores in (scores_of(), torch.nn.Parameter(scores_of())):
        p = megasoftmax.softmax(scores, **options)
        assert bits_equal(p, torch.softmax(scores, -1))
        assert p.requires_grad == scores.requires_grad
    assert len(by_torch) == 2


OPTIONS = {"scale": 0.5, "mask": torch.zeros(7, dtype=torch.bool), "bias": torch.zeros(7)}
OPTIONS |= {"causal": True, "window": (1, 1), "visible": (None, None), "sink": 0.0, "dropout": 0.5}
OPTIONS |= {"dtype": torch.bfloat16, "return_lse": True, "dim": 1}


@pytest.mark.parametrize("option", OPTIONS)
def test_other_options(option, by_torch):
    megasoftmax.softmax(scores_of(), **{option: OPTIONS[option]})
    assert not by_torch


def test_fused_cannot_be_true(by_torch):
    with pytest.raises(ValueError, match=r"fused: cannot be True here"):
        megasoftmax.softmax(scores_of(), fused=True)
    assert not by_torch


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "dual level", "compile", "subclass"])
def test_transforms(transform, by_torch):
    def apply(function):
        scores = scores_of()
        if transform == "grad":
            return torch.func.grad(lambda scores: function(scores).square().sum())(scores)
        if transform == "vmap":
            return torch.vmap(function)(scores)
        if transform == "jvp":
            return torch.func.jvp(function, (scores,), (torch.ones_like(scores),))
        if transform == "dual level":
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(
                    function(forward_ad.make_dual(scores, torch.sin(scores)))
                )
        if transform == "compile":
            return torch.compile(function, fullgraph=True, backend="eager")(scores)
        return function(scores.as_subclass(type("Sub", (Tensor,), {}))).as_subclass(Tensor)

    expected = apply(lambda scores: torch.softmax(scores, -1))
    torch.testing.assert_close(apply(megasoftmax.softmax), expected)
    assert not by_torch


# What it gives


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("layout", ["dense", "transposed", "expanded"])
def test_layouts(dtype, layout, by_torch):
    """Of scores and of incoming gradients."""
    scores, gradient = scores_of(dtype), normal(*SHAPE, device="cpu", dtype=dtype, seed=2)
    if layout == "transposed":
        scores, gradient = (each.mT.contiguous().mT for each in (scores, gradient))
    elif layout == "expanded":
        scores, gradient = (each[:1, :, :1].expand(SHAPE) for each in (scores, gradient))
    kept = gradient.clone()
    found = []
    for function in (megasoftmax.softmax, by_reference):
        leaf = scores.detach().requires_grad_()
        p = function(leaf)
        assert p.is_contiguous()
        found.append((p, *torch.autograd.grad(p, leaf, gradient)))
    assert len(by_torch) == 1
    assert bits_equal(gradient, kept)
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["at 0", "elsewhere"])
def test_gradient_that_is_not_finite_where_probabilities_are_0(where, value, dtype, by_torch):
    scores = scores_of(dtype)
    scores[0, 0, :, 2], scores[1, 1, 3, 4] = -INF, -1e4
    gradient = normal(*SHAPE, device="cpu", dtype=dtype, seed=2)
    gradient[0, 0, 1, 2 if where == "at 0" else 3] = value
    gradient[1, 1, 3, 4 if where == "at 0" else 5] = value
    found = []
    for function in (megasoftmax.softmax, by_reference):
        leaf = scores.clone().requires_grad_()
        found += torch.autograd.grad(function(leaf), leaf, gradient)
    assert len(by_torch) == 1
    torch.testing.assert_close(*found, equal_nan=True)
    assert (found[0][0, 0, :, 2] == 0).all()
    assert found[0][1, 1, 3, 4] == 0
    assert found[0].isfinite().logical_not().sum() == (0 if where == "at 0" else 12)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_scores_that_are_not_finite(dtype, value):
    scores = scores_of(dtype)
    scores[0, 0, 1], scores[1, 2, 3, 4] = value, value
    found = []
    for function in (megasoftmax.softmax, lambda scores: torch.softmax(scores.double(), -1)):
        leaf = scores.clone().requires_grad_()
        p = function(leaf)
        found.append((p.to(dtype), *torch.autograd.grad(p.square().sum(), leaf)))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), expected.isnan())
        assert torch.equal(ours == 0, expected == 0)
    assert found[0][0][0, 0, 1].isnan().all()


def test_derivatives(by_torch):
    scores = scores_of(torch.float64)[0, 0].requires_grad_()
    assert torch.autograd.gradcheck(megasoftmax.softmax, scores)
    assert torch.autograd.gradgradcheck(megasoftmax.softmax, scores)
    assert len(by_torch) > 2


def test_forward_mode_over_reverse_mode_is_refused():
    scores = scores_of().requires_grad_()
    p = megasoftmax.softmax(scores)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="differentiated in reverse mode"),
    ):
        torch.autograd.grad(p, scores, forward_ad.make_dual(torch.ones(SHAPE), torch.ones(SHAPE)))


def test_result_may_be_changed_in_place():
    scores = scores_of().requires_grad_()
    p = megasoftmax.softmax(scores)
    p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        p.sum().backward()


# Its K largest


def topk_by_reference(logits, k):
    return megasoftmax.softmax_topk(logits, k, mask=torch.zeros(1, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (4, 9), (2, 3, 300), (3, 2000)])
@pytest.mark.parametrize("of_gradient", [None, NAN, INF])
def test_gradient_of_the_largest(shape, dtype, of_gradient):
    """Equal logits, a probability of 0 among the K, and gradients that are not finite there."""
    logits = normal(*shape, device="cpu", dtype=dtype)
    logits[..., 2] = logits[..., 5]
    logits.select(-1, 3).fill_(-INF)
    k = shape[-1] if shape[-1] < 10 else 6
    gradient = normal(*shape[:-1], k, device="cpu", dtype=dtype, seed=1)
    if of_gradient is not None:
        gradient[..., -1] = of_gradient
    found = []
    for function in (megasoftmax.softmax_topk, topk_by_reference):
        leaf = logits.clone().requires_grad_()
        values, indices = function(leaf, k)
        assert not indices.requires_grad
        d_logits = torch.autograd.grad(values, leaf, gradient, retain_graph=True)
        again = torch.autograd.grad(values, leaf, gradient)
        assert bits_equal(d_logits[0].nan_to_num(), again[0].nan_to_num())
        found.append((values, indices, *d_logits))
    torch.testing.assert_close(*found, equal_nan=True)


def test_largest_of_16_bits_take_the_reference():
    """It has float32 probabilities for the backward pass."""
    found = []
    for function in (megasoftmax.softmax_topk, topk_by_reference):
        logits = normal(4, 64, device="cpu", dtype=torch.bfloat16).requires_grad_()
        values, _ = function(logits, 5)
        found += torch.autograd.grad(values.square().sum(), logits)
    assert bits_equal(*found)


def test_derivatives_of_the_largest():
    logits = normal(3, 9, device="cpu", dtype=torch.float64).requires_grad_()

    def values(logits):
        return megasoftmax.softmax_topk(logits, 4)[0]

    assert torch.autograd.gradcheck(values, logits)
    assert torch.autograd.gradgradcheck(values, logits)
    assert torch.autograd.gradcheck(values, logits, check_batched_grad=True)
    p, indices = megasoftmax.softmax_topk(logits, 4)
    gradients = normal(5, 3, 4, device="cpu", dtype=torch.float64, seed=3)
    (found,) = torch.autograd.grad(p, logits, gradients, retain_graph=True, is_grads_batched=True)
    for ours, gradient in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, torch.autograd.grad(p, logits, gradient, True)[0])
    indices.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        p.sum().backward()
