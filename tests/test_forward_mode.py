"""Forward-mode derivatives: torch.func.jvp and dual tensors, against those in reverse mode."""

import functools

import pytest
import torch
from inputs import normal
from op_families import FAMILIES, Draw
from torch.autograd import forward_ad

import megasoftmax
from megasoftmax import dispatch

SHAPE = (2, 3, 4, 6)


CASES = {name: (family.call, family.draw) for name, family in FAMILIES.items()} | {
    "plain softmax": (
        lambda scores: (megasoftmax.softmax(scores, scale=0.3),),
        lambda draw: [draw.floats(SHAPE)],
    ),
    "one sink": (
        lambda scores, sink: (megasoftmax.softmax(scores, sink=sink),),
        lambda draw: [draw.floats(SHAPE), draw.floats((1,))],
    ),
}


def of(case, device="cpu"):
    """A function of tensors of float64, them and their tangents. A log-sum-exp of -inf is 0."""
    call, draw = CASES[case]
    given = [each.detach() for each in draw(Draw(device, torch.float64))]
    inputs = tuple(each for each in given if each.is_floating_point())

    def finite(*inputs):
        results = call(*inputs, *given[len(inputs) :])
        floats = (each for each in results if each.is_floating_point())
        return tuple(torch.where(each == -torch.inf, 0, each) for each in floats)

    return finite, inputs, tuple(map(torch.randn_like, inputs))


def reverse(function, inputs, tangents):
    """The tangents of the results: the gradient of the gradient by its cotangents."""
    _, found = torch.autograd.functional.jvp(function, inputs, tangents)
    return list(found)


@pytest.mark.parametrize("case", CASES)
def test_jvp(case, device):
    function, inputs, tangents = of(case, device)
    wanted = reverse(function, inputs, tangents)
    _, found = torch.func.jvp(function, inputs, tangents)
    torch.testing.assert_close(list(found), wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_tensors(case, requires_grad):
    function, inputs, tangents = of(case)
    wanted = reverse(function, inputs, tangents)
    leaves = [each.requires_grad_(requires_grad) for each in inputs]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, tangents, strict=True)]
        outputs = function(*duals)
        found = [forward_ad.unpack_dual(each).tangent for each in outputs]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("position", range(3))
def test_jvp_of_one_argument(case, position):
    function, inputs, tangents = of(case)
    if position >= len(inputs):
        return

    def of_one(one):
        return function(*inputs[:position], one, *inputs[position + 1 :])

    given = (inputs[position],), (tangents[position],)
    torch.testing.assert_close(list(torch.func.jvp(of_one, *given)[1]), reverse(of_one, *given))


@pytest.mark.parametrize("case", CASES)
def test_transforms(case):
    """vmap of jvp, jvp of vmap, and the gradient of a tangent."""
    function, inputs, tangents = of(case)

    def first(x):
        return function(x, *inputs[1:])[0]

    x, v = inputs[0], tangents[0]
    forward, backward = torch.func.jacfwd(first)(x), torch.func.jacrev(first)(x)
    torch.testing.assert_close(forward, backward)

    some = torch.stack([x, 2 * x, -x])
    _, found = torch.func.jvp(torch.vmap(first), (some,), (some.sin(),))
    wanted = [torch.func.jvp(first, (each,), (each.sin(),))[1] for each in some]
    torch.testing.assert_close(found, torch.stack(wanted))

    def tangent(x, jvp):
        return jvp(x).square().sum()

    found = torch.func.grad(tangent)(x, lambda x: torch.func.jvp(first, (x,), (v,))[1])
    wanted = torch.func.grad(tangent)(
        x, lambda x: (torch.func.jacrev(first)(x) * v).sum(tuple(range(-x.dim(), 0)))
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("case", ["topk", "renormalised", "attention"])
def test_forward_over_reverse(case):
    function, (x, *rest), _ = of(case)
    row = x.flatten()[:4]

    def of_row(row):
        changed = x.flatten().index_copy(0, torch.arange(4), row).view_as(x)
        return sum(each.sin().sum() for each in function(changed, *rest))

    wanted = torch.func.jacrev(torch.func.jacrev(of_row))(row)
    torch.testing.assert_close(torch.func.hessian(of_row)(row), wanted)


def test_forward_over_reverse_of_softmax_is_refused():
    scores = normal(3, 4, device="cpu", dtype=torch.float64)

    def loss(scores):
        return megasoftmax.softmax(scores).square().sum()

    with pytest.raises(NotImplementedError, match=r"^softmax: .*jacrev of jacrev is supported"):
        torch.func.hessian(loss)(scores)
    expected = torch.func.hessian(lambda scores: scores.softmax(-1).square().sum())(scores)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(scores), expected)


# Kernels


@pytest.fixture
def kernels(device, request):
    """On a CPU its ops."""
    if device == "cpu":
        request.getfixturevalue("as_if_fused")
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_runs_fused(dtype, kernels):
    scores, tangent = (normal(*SHAPE, device=kernels, dtype=dtype, seed=i) for i in (0, 1))
    assert megasoftmax.why_not_fused(megasoftmax.softmax, scores) == ()

    def function(scores, dim):
        return megasoftmax.softmax(scores, scale=0.3, dim=dim, fused=True)

    for dim in (-1, 1):
        _, found = torch.func.jvp(lambda x, dim=dim: function(x, dim), (scores,), (tangent,))
        exact = [each.double() for each in (scores, tangent)]
        _, wanted = torch.func.jvp(lambda x, dim=dim: (0.3 * x).softmax(dim), *zip(exact))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=1e-3)


def topk_of(logits, **options):
    return megasoftmax.softmax_topk(logits, 2, **options)[0]


def attention_of(query, **options):
    return megasoftmax.attention(query, query, query, **options)


@pytest.mark.parametrize("function", [topk_of, attention_of])
def test_others_give_way_to_plain_torch(function, kernels):
    inputs, tangent = (normal(*SHAPE, device=kernels, dtype=torch.bfloat16, seed=i) for i in (0, 1))
    asked = {topk_of: megasoftmax.softmax_topk, attention_of: megasoftmax.attention}[function]
    arguments = (inputs, 2) if function is topk_of else (inputs,) * 3

    def ask(_):
        reasons = megasoftmax.why_not_fused(asked, *arguments)
        assert [reason.constraint for reason in reasons] == ["forward-mode differentiation"]
        return inputs

    assert megasoftmax.why_not_fused(asked, *arguments) == ()
    torch.func.jvp(ask, (inputs,), (tangent,))
    _, found = torch.func.jvp(function, (inputs,), (tangent,))
    exact = [each.double() for each in (inputs, tangent)]
    _, wanted = torch.func.jvp(function, (exact[0],), (exact[1],))
    torch.testing.assert_close(found.double(), wanted, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match=r"fused: cannot be True here\. forward-mode diff"):
        torch.func.jvp(functools.partial(function, fused=True), (inputs,), (tangent,))


@pytest.mark.parametrize("function", [topk_of, attention_of])
def test_ops_refuse_forward_mode(function, kernels, monkeypatch):
    """As DTensors use them, and never drop a tangent."""
    monkeypatch.setattr(dispatch, "_forward_mode", lambda: None)
    inputs = normal(*SHAPE, device=kernels, dtype=torch.bfloat16)
    fused = functools.partial(function, fused=True)
    message = r"^(attention|softmax_topk): .*; plain torch has it, fused=False"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(fused, (inputs,), (inputs,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        fused(forward_ad.make_dual(inputs, inputs))
    # A gradient with a tangent, of a call without one
    leaf = inputs.clone().requires_grad_()
    output = fused(leaf)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(output, leaf, forward_ad.make_dual(output.detach(), output.detach()))


@pytest.fixture
def traced(kernels, monkeypatch):
    """The same for compiled code."""
    if kernels == "cpu":
        monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
        monkeypatch.setattr(dispatch, "_head_dim_of_kernels", lambda device: 8)
    torch.compiler.reset()
    return kernels


@pytest.mark.parametrize(
    "function",
    [
        lambda x: megasoftmax.softmax(x, scale=0.3),
        lambda x: megasoftmax.softmax(x, dim=1),
        lambda x: megasoftmax.softmax(x, return_lse=True)[0],
        lambda x: attention_of(x.bfloat16()).float(),
        lambda x: attention_of(x.bfloat16(), sink=0.5).float(),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_gives_way_to_plain_torch(backend, function, traced):
    """Also where it was compiled for calls without tangents."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    given, tangent = (normal(*SHAPE, device=traced, seed=i) for i in (0, 1))
    torch.testing.assert_close(compiled(given), function(given), rtol=0.02, atol=0.02)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(given, tangent))).tangent
    _, wanted = torch.func.jvp(function, (given,), (tangent,))
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
