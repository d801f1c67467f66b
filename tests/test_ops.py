"""What holds for every op and its public function: autograd, compilation, transforms, CUDA."""

from functools import partial
from itertools import product

import op_checks
import pytest
import torch
from einops import repeat
from inputs import deterministic
from op_checks import gradients_of, loss_of
from op_families import FAMILIES, SHAPE, Draw, dropout_backward_arguments, dtype_of_attention
from torch import Tensor
from torch._inductor import config as inductor_config

import megasoftmax
from megasoftmax import RelativeBias, autograd, ops, reference
from megasoftmax.build import library

TORCH_2_11 = torch.__version__.startswith("2.11.")
INF = torch.inf
NAMES = [*FAMILIES]
NAMES_OF_OPS = [name for name in FAMILIES if name != "renormalised"]

softmax_dropout_backward = torch.ops.megasoftmax.softmax_dropout_backward.default
attention_forward = torch.ops.megasoftmax.attention_forward.default
attention_backward = torch.ops.megasoftmax.attention_backward.default
topk_forward = torch.ops.megasoftmax.softmax_topk_forward.default


def of_ops(field):
    """Each op with each of its cases."""
    return [(name, case) for name in NAMES_OF_OPS for case in getattr(FAMILIES[name], field)]


def draw_on(device, name):
    return Draw(device, dtype_of_attention(device) if name == "attention" else torch.float32)


def assert_close_on(device, name):
    """assert_close(found, wanted) with the tolerance of the type of `draw_on`."""
    is_rough = device.startswith("cuda") and name == "attention"
    tolerance = {"rtol": 0.02, "atol": 0.02} if is_rough else {}
    return partial(torch.testing.assert_close, **tolerance)


fused_only = pytest.mark.parametrize("through_ops", ["fused"], indirect=True)


# The ops themselves


@pytest.mark.parametrize(("name", "case"), of_ops("cases"))
def test_opcheck_of_forward(name, case, device):
    family = FAMILIES[name]
    arguments = family.arguments(draw_on(device, name), **family.cases[case])
    op_checks.check_op(family.forward, arguments, is_traced=case in family.traced)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("softmax", shape) for shape in ((4,), (2, 4), (2, 1, 3, 2, 4), (3, 0))),
        *(("topk", shape) for shape in ((5,), (2, 5), (2, 1, 3, 4, 5), (3, 5))),
    ],
)
@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_opcheck_of_other_ranks(name, shape, out, device):
    arguments = FAMILIES[name].arguments(Draw(device), shape, dtype=out, return_lse=True)
    op_checks.check_op(FAMILIES[name].forward, arguments, is_traced=out == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_opcheck_of_other_types(dtype):
    family = FAMILIES["attention"]
    arguments = family.arguments(Draw(dtype=dtype), **family.cases["shared bias"])
    op_checks.check_op(attention_forward, arguments, is_traced=False)


@pytest.mark.parametrize(("name", "case"), of_ops("backward_cases"))
def test_opcheck_of_backward(name, case, device):
    family = FAMILIES[name]
    arguments = family.backward_arguments(draw_on(device, name), **family.backward_cases[case])
    op_checks.check_op(family.backward, arguments, is_traced=case in family.traced)
    if "asked" in family.backward_cases[case]:
        assert [each.shape for each in family.backward(*arguments)[3:]] == [(0,), (0,)]


@pytest.mark.parametrize("case", ["shared bias", "relative in groups", "sink", "[b, s, h, d]"])
def test_opcheck_of_attention_in_blocks(case, device):
    """Compiled code calls it on every device."""
    family = FAMILIES["attention"]
    in_blocks = torch.ops.megasoftmax.attention_in_blocks_forward.default
    torch.library.opcheck(in_blocks, family.arguments(Draw(device), **family.cases[case]))
    arguments = [
        each.to(device) if isinstance(each, Tensor) else each
        for each in family.backward_arguments(Draw(), **family.cases[case])
    ]
    in_blocks = torch.ops.megasoftmax.attention_in_blocks_backward.default
    torch.library.opcheck(in_blocks, tuple(arguments))


@pytest.mark.parametrize("value_dim", [8, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_exact", [False, True])
def test_merge_of_attention(value_dim, dtype, is_exact, device):
    """Of every second query, which sees both parts of the keys, one of them or none."""
    draw = partial(torch.randn, device=device, dtype=torch.float64)
    query, key, value = 40 * draw(2, 3, 9, 8), draw(2, 3, 12, 8), draw(2, 3, 12, value_dim)
    mask = torch.zeros(9, 12, dtype=torch.bool, device=device)
    mask[0] = mask[2, :7] = mask[4, 7:] = True

    def over(keys):
        """Output and statistics of some keys, in float64."""
        scores = (query @ key[:, :, keys].mT).masked_fill(mask[:, keys], -INF)
        largest = scores.amax(-1).masked_fill(mask[:, keys].all(-1), 0)
        weights = (scores - largest.unsqueeze(-1)).exp()
        total = weights.sum(-1)
        output = (weights @ value[:, :, keys]) / total.clamp(min=1e-300).unsqueeze(-1)
        return output, torch.stack((largest, total.log(), largest + total.log()))

    parts = slice(7), slice(7, None), slice(None)
    (output, statistics), others, wanted = map(over, parts)
    output, statistics = output.float() if is_exact else output.to(dtype), statistics.float()
    before = output.clone(), statistics.clone()
    torch.ops.megasoftmax.attention_merge(
        output[:, :, ::2],
        statistics[..., ::2],
        others[0].to(dtype)[:, :, ::2],
        others[1].float()[..., ::2],
    )
    assert torch.equal(output[:, :, 1::2], before[0][:, :, 1::2])
    assert torch.equal(statistics[..., 1::2], before[1][..., 1::2])
    error = 1e-5 if dtype == torch.float32 else 0.02
    tolerance = {"rtol": error, "atol": error}
    torch.testing.assert_close(output[:, :, ::2].double(), wanted[0][:, :, ::2], **tolerance)
    found = statistics[..., ::2].double()
    torch.testing.assert_close(found, wanted[1][..., ::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [{}, {"softcap": 0.5}, {"softcap": 0.5, "dropout": 0.0}])
@pytest.mark.parametrize("has_all", [False, True])
def test_opcheck_of_dropout_backward(has_all, softcap, device):
    arguments = dropout_backward_arguments(Draw(device), has_all, **softcap)
    torch.library.opcheck(softmax_dropout_backward, arguments)


def test_opcheck_of_candidates(device):
    family = FAMILIES["topk"]
    logits, *rest = family.arguments(Draw(device), mask=(2, 3, 7), candidates=True)
    torch.library.opcheck(topk_forward, (logits.detach(), *rest))
    values, *_ = topk_forward(logits, *rest)
    with pytest.raises(NotImplementedError, match=r"^candidates: expected False .* got True"):
        values.sum().backward()


@pytest.mark.parametrize("case", ["plain", "[b, s, h, d]", "misaligned"])
def test_gradients_lie_as_their_tensors(case, device):
    family = FAMILIES["attention"]
    options = {"is_transposed": case != "plain", "bias": (1, 1, 5, 7)}
    arguments = [*family.backward_arguments(draw_on(device, "attention"), **options)]
    if case == "misaligned":
        for i in (2, 3, 4):
            rows = arguments[i].transpose(1, 2)
            moved = torch.nn.functional.pad(rows.flatten(), (1, 0))[1:]
            arguments[i] = moved.view(rows.shape).transpose(1, 2)
    for gradient, tensor in zip(attention_backward(*arguments), arguments[2:5], strict=False):
        assert gradient.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("head_dim", [32, 20])
def test_packed_gradients(head_dim, device):
    """Those of three tensors, in one. Where its rows are not aligned, kernels write copies."""
    draw = draw_on(device, "attention")
    packed = draw.floats((6, 49, 3, 2, head_dim)).detach()
    query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
    bias, mask = draw.floats((1, 2, 49, 49)).detach(), draw.mask((3, 1, 49, 49))
    options = (bias, mask, 0.3, 0.0, False, -1, -1, None, None, False, None, None, None, 1, 0.0)
    options = (*options, None, False)
    output, statistics = attention_forward(query, key, value, *options)
    arguments = torch.randn_like(output), None, query, key, value, output, statistics, *options
    arguments = (*arguments, True, False, True)
    *expected, d_bias, _ = attention_backward(*arguments)
    found, found_bias, _ = ops.attention.backward_packed(*arguments)
    assert found.is_contiguous()
    assert found.shape == packed.shape
    parts = found.permute(2, 0, 3, 1, 4).unbind(0)
    torch.testing.assert_close([*parts, found_bias], [*expected, d_bias], rtol=0, atol=0)
    torch.library.opcheck(ops.attention.backward_packed, arguments)


def with_derivatives(family, op, given):
    """The op as a function of what requires gradients.

    Of statistics the log-sum-exp alone has a gradient.
    """
    where = [i for i, each in enumerate(given) if isinstance(each, Tensor) and each.requires_grad]

    def function(*inputs):
        arguments = [*given]
        for i, each in zip(where, inputs, strict=True):
            arguments[i] = each
        results = op(*arguments)
        if op is family.forward and op in (topk_forward, attention_forward):
            return results[0], results[-1][2].masked_fill(results[-1][2] == -INF, 0)
        return results

    return function


@pytest.mark.parametrize(
    ("name", "direction", "case"),
    [
        *((name, "forward", case) for name, case in of_ops("cases") if case != "float16"),
        *(
            (name, "backward", case)
            for name, case in of_ops("backward_cases")
            if name in ("softmax", "columns")
        ),
        *(("softmax", "dropout backward", has_all) for has_all in (False, True)),
    ],
)
def test_derivatives_of_the_ops(name, direction, case):
    family, draw = FAMILIES[name], Draw(dtype=torch.float64)
    if direction == "forward":
        options = {"dims": (3, 2)} if name == "attention" else {}
        op, given = family.forward, family.arguments(draw, **options, **family.cases[case])
    elif direction == "backward":
        op, given = family.backward, family.backward_arguments(draw, **family.backward_cases[case])
    else:
        op, given = softmax_dropout_backward, dropout_backward_arguments(draw, case)
    function, inputs = with_derivatives(family, op, given), op_checks.in_need(given)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    if family.is_smooth:
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("renormalize", [False, True])
def test_third_derivatives_of_topk(renormalize):
    options = {"shape": (2, 5), "bias": (2, 1), "mask": (5,), "renormalize": renormalize}
    given = FAMILIES["topk"].arguments(Draw(dtype=torch.float64), **options)
    inputs = op_checks.in_need(given)
    function = with_derivatives(FAMILIES["topk"], topk_forward, given)

    def gradient(*inputs):
        p, lse = function(*inputs)
        loss = (p * p * p).sum() + lse.square().sum()
        return torch.autograd.grad(loss, inputs, create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, inputs, fast_mode=True)


def test_sink_gradient_of_the_op_needs_lse():
    family = FAMILIES["softmax"]
    with pytest.raises(ValueError, match="return_lse"):
        family.forward(*family.arguments(Draw(), sink=(3,), return_lse=False))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), of_ops("cases"))
def test_ops_agree_between_cpu_and_gpu(name, case):
    if (name, case) in (("softmax", "dropout"), ("topk", "k 0")):
        pytest.skip("no kernels drop in this op, and none select nothing")
    assert library.load().available
    family = FAMILIES[name]
    is_attention = name == "attention"
    draw = Draw(dtype=torch.bfloat16 if is_attention else torch.float32)
    given = family.arguments(draw, **family.cases[case])
    close = {"rtol": 0.02, "atol": 0.02} if is_attention else {"rtol": 1e-3, "atol": 1e-5}
    if name == "topk":
        close["rtol"] = 1e-4
    if (name, case) == ("columns", "float16"):  # the gradient is made of rounded probabilities
        close = {"rtol": 2e-3, "atol": 1e-3}

    def op(*arguments):
        output, *others = family.forward(*arguments)
        if is_attention:
            (statistics,) = others
            others = [statistics.masked_fill(~statistics[2].isfinite(), 0)]
        return output, *others

    def loss(results):
        output, *_, lse = results
        weights = torch.linspace(-1, 1, output.numel(), device=output.device)
        lse = lse if name in ("softmax", "columns") else lse[2]
        return (output.float() * weights.view(output.shape)).sum() + lse.sum()

    for cpu, gpu in op_checks.on_cpu_and_gpu(op, loss, given):
        assert not is_attention or cpu.stride() == gpu.stride()
        torch.testing.assert_close(gpu.cpu(), cpu, **close)


CASE_OF_CALL = {"softmax": "sink value", "columns": "lse", "topk": "broadcast bias"}
CASE_OF_CALL["attention"] = "shared bias"


@pytest.mark.parametrize("name", CASE_OF_CALL)
def test_fused_path_calls_the_ops(name):
    family = FAMILIES[name]
    arguments = family.arguments(Draw(), **family.cases[CASE_OF_CALL[name]])
    with torch.no_grad():
        if name == "columns":
            scores, scale, dtype, lse = arguments
            scores, record = scores.transpose(0, 2), reference.softmax.ForwardArguments
            arguments = record(scores, scale, dtype=dtype, return_lse=lse)
            expected = family.forward(scores, scale, dtype, lse)
        else:
            expected = getattr(autograd, name).REFERENCE.forward(*arguments)
        found = getattr(ops, name).IMPLEMENTATION.forward(*arguments)
    op_checks.assert_all_equal(found, expected)
    assert found[0].stride() == expected[0].stride()


# The public function


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_float64(name):
    """The fused path takes no float64. Its op is checked above."""
    family, draw = FAMILIES[name], Draw(dtype=torch.float64)
    *inputs, mask = family.draw(draw, 2, 3, 4) if name == "attention" else family.draw(draw)
    if mask.dtype != torch.bool:
        inputs, mask = [*inputs, mask], None
    else:  # a log-sum-exp of -inf has no numerical derivative
        mask.view(2, -1)[0, : mask.shape[-1] - 1] = False
        mask[0, ..., 0] = False

    def function(*inputs):
        results = family.call(*inputs, *([] if mask is None else [mask]))
        return [each.masked_fill(each == -INF, 0) for each in results if each.is_floating_point()]

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_output(used, through_ops):
    scores = torch.randn(SHAPE, requires_grad=True)
    exact = scores.detach().double().requires_grad_()
    expected = (exact.softmax(-1), exact.logsumexp(-1))[used].square().sum()
    actual = megasoftmax.softmax(scores, return_lse=True, fused=through_ops)[used].square().sum()
    (wanted,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(torch.autograd.grad(actual, scores)[0], wanted.float())


def of_topk(renormalize):
    def dense(x):
        z = 0.5 * x
        indices = z.topk(3).indices
        if renormalize:
            return z.gather(-1, indices).softmax(-1)
        return z.softmax(-1).gather(-1, indices)

    def ours(x, **options):
        return megasoftmax.softmax_topk(x, 3, scale=0.5, renormalize=renormalize, **options)[0]

    return ours, dense


def is_hidden(x):
    return torch.arange(x.numel(), device=x.device).view(x.shape) % 3 == 1


def softmax_and_lse(x, **options):
    p, lse = megasoftmax.softmax(x, scale=0.5, return_lse=True, **options)
    return torch.cat([p, lse.sin().unsqueeze(options.get("dim", -1))], options.get("dim", -1))


def dense_softmax_and_lse(x, dim):
    return torch.cat([(x / 2).softmax(dim), (x / 2).logsumexp(dim, True).sin()], dim)


# With the formula that torch derives.
DENSE = {
    "softmax": (softmax_and_lse, partial(dense_softmax_and_lse, dim=-1)),
    "mask": (
        lambda x, **o: megasoftmax.softmax(x, scale=0.5, mask=is_hidden(x), **o),
        lambda x: (x / 2).masked_fill(is_hidden(x), -INF).softmax(-1),
    ),
    "columns": (partial(softmax_and_lse, dim=0), partial(dense_softmax_and_lse, dim=0)),
    "topk": of_topk(renormalize=False),
    "renormalised": of_topk(renormalize=True),
}


@pytest.mark.parametrize("case", DENSE)
def test_second_derivatives(case, through_ops, device):
    """By autograd and by transforms."""
    functions = (partial(DENSE[case][0], fused=through_ops), DENSE[case][1])
    ours, dense = (lambda x, f=f: f(x).square().sum() for f in functions)
    x = torch.randn(3, 5, device=device, requires_grad=True)
    found = []
    for loss in (ours, dense):
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*found)
    hessian = torch.func.jacrev(torch.func.jacrev(ours))(x.detach())
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(dense, x))


def plain_attention(query, key, value, bias):
    key, value = (repeat(t, "b hk n x -> b (hk shared) n x", shared=2) for t in (key, value))
    return (query @ key.mT * query.shape[-1] ** -0.5 + bias).softmax(-1) @ value


@pytest.mark.parametrize("block", [2**22, 30])
def test_derivatives_of_attention_of_any_order(block, monkeypatch, device):
    monkeypatch.setattr(reference.attention, "BLOCK", block)
    inputs = FAMILIES["attention"].draw(Draw(device, torch.float64))[:4]
    *given, bias = inputs
    found = []
    for output in (megasoftmax.attention(*given, bias=bias, fused=False), plain_attention(*inputs)):
        derivatives = [output]
        for _ in range(3):
            loss = sum(each.sin().sum() for each in derivatives)
            derivatives = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append(derivatives)
    op_checks.assert_all_close(*found)


def test_second_derivatives_of_attention_by_transforms():
    draw = Draw(dtype=torch.float64)
    query, key, value, bias, *_ = (e.detach() for e in FAMILIES["attention"].draw(draw, 1, 2, 7))

    def loss(function):
        return lambda query: function(query, key, value, bias=bias).square().sum()

    second = torch.func.jacrev(torch.func.jacrev(loss(megasoftmax.attention)))(query)
    expected = torch.autograd.functional.hessian(loss(plain_attention), query)
    torch.testing.assert_close(second, expected)


@fused_only
def test_second_derivative_of_attention_is_refused(through_ops, device):
    query, key, value, bias, *_ = FAMILIES["attention"].draw(draw_on(device, "attention"))
    message = "expected to be differentiated once, got a second derivative; fused=False"
    arguments = FAMILIES["attention"].arguments(draw_on(device, "attention"))
    for of, output in (
        (query, megasoftmax.attention(query, key, value, bias=bias, fused=True)),
        (arguments[0], attention_forward(*arguments)[0]),
    ):
        (first,) = torch.autograd.grad(output.square().sum(), of, create_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            first.sum().backward()

    def loss(query):
        inputs = (query, key.detach(), value.detach())
        return megasoftmax.attention(*inputs, fused=True).square().sum()

    with pytest.raises(NotImplementedError, match=message):
        torch.func.jacrev(torch.func.grad(loss))(query.detach())


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *(("softmax", "output"), ("columns", "output")),
        *(("topk", changed) for changed in ("output", "logits", "bias")),
        *(("attention", changed) for changed in ("output", "query", "key", "value", "bias")),
    ],
)
def test_in_place_change_is_noticed(name, changed, through_ops, device):
    if name == "columns" and not through_ops:
        pytest.skip("the result is a copy of what the gradient needs")
    family = FAMILIES[name]
    inputs = family.draw(draw_on(device, name))
    output, *_ = family.call(*inputs, fused=through_ops)
    with torch.no_grad():
        (dict(zip(family.names, inputs, strict=True)) | {"output": output})[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_bias_of_softmax_may_change_before_the_backward(through_ops):
    scores, bias, *_ = FAMILIES["softmax"].draw(Draw())
    found = []
    for change in (False, True):
        probabilities = megasoftmax.softmax(scores, bias=bias, fused=through_ops)
        if change:
            with torch.no_grad():
                bias.zero_()
        found.append(torch.autograd.grad((probabilities**2).sum(), (scores, bias)))
    op_checks.assert_all_equal(*found)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_recorded_without_need(name, through_ops):
    family = FAMILIES[name]
    inputs = family.draw(Draw())

    def which_need(*inputs):
        results = family.call(*inputs, fused=through_ops)
        assert not any(each.requires_grad for each in results if not each.is_floating_point())
        return [each.requires_grad for each in results]

    with torch.no_grad():
        assert not any(which_need(*inputs))
    assert not any(which_need(*(each.detach() for each in inputs)))
    for i, one in enumerate(inputs):
        some = [one if i == j else each.detach() for j, each in enumerate(inputs)]
        assert any(which_need(*some)) == one.requires_grad


def test_gradient_of_the_bias_of_topk_alone(through_ops):
    family = FAMILIES["topk"]
    logits, bias, mask = family.draw(Draw())
    found = [
        torch.autograd.grad(loss_of(family.call(each, bias, mask, fused=through_ops)), bias)
        for each in (logits, logits.detach())
    ]
    op_checks.assert_all_equal(*found)


@pytest.mark.parametrize(
    ("name", "last", "other"),
    [
        *(
            ("softmax", *types)
            for types in product(
                (torch.float32, torch.bfloat16, torch.float64),
                (torch.float32, torch.float16, torch.float64),
            )
        ),
        *(
            (name, dtype, dtype)
            for name in ("topk", "renormalised", "attention")
            for dtype in (torch.float32, torch.float16, torch.float64)
        ),
    ],
)
def test_mixed_types(name, last, other, through_ops, device):
    """Scores, or queries, keys and values, in bfloat16, beside the last tensor and others."""
    family = FAMILIES[name]
    *inputs, mask = family.draw(Draw(device))
    states = 3 if name == "attention" else 1
    types = [torch.bfloat16] * states + [other] * (len(inputs) - states - 1) + [last]
    pairs = zip(inputs, types, strict=True)
    inputs = [each.detach().to(dtype).requires_grad_() for each, dtype in pairs]
    actual = gradients_of(partial(family.call, fused=through_ops), *inputs, mask)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = gradients_of(family.call, *exact, mask)
    for found, wanted in zip(actual, expected, strict=True):
        close = {"rtol": family.close, "atol": family.close}
        torch.testing.assert_close(found.double(), wanted.double(), **close)
    assert [each.dtype for each in actual[-len(inputs) :]] == types


# Compilation and export


@pytest.mark.parametrize("name", NAMES)
@op_checks.static_and_dynamic
def test_compile(name, through_ops, device, dynamic):
    function = partial(FAMILIES[name].call, fused=through_ops)
    inputs = FAMILIES[name].draw(draw_on(device, name))
    # See docs/limits.md.
    is_slow = TORCH_2_11 and name == "attention"
    with inductor_config.patch({"triton.coalesce_tiling_analysis": False} if is_slow else {}):
        close = assert_close_on(device, name)
        op_checks.check_compiled(function, gradients_of, inputs, dynamic, close)


def test_attention_is_compiled_in_blocks(monkeypatch):
    """On a CPU: what is compiled knows no device, and torch 2.11 takes minutes for it."""
    monkeypatch.setattr(reference.attention, "BLOCK", 40)
    torch.compiler.reset()
    function = partial(FAMILIES["attention"].call, fused=False)
    inputs = FAMILIES["attention"].draw(Draw())
    op_checks.check_compiled(function, gradients_of, inputs, dynamic=True)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_once_for_all_lengths(name, through_ops, device):
    draw = partial(FAMILIES[name].draw, draw_on(device, name))
    function = partial(FAMILIES[name].call, fused=through_ops)
    op_checks.check_compiled_once(function, draw, assert_close_on(device, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strict", [False, True])
def test_export(name, through_ops, device, strict):
    family = FAMILIES[name]
    inputs = tuple(each.detach() for each in family.draw(draw_on(device, name), 5))
    module = op_checks.Called(partial(family.call, fused=through_ops))
    batch = torch.export.Dim("batch", min=4, max=64)
    has_batch = [each.dim() > 2 and each.shape[0] == 5 for each in inputs]
    sizes = (tuple({0: batch} if each else None for each in has_batch),)
    program = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=strict)
    targets = [node.target for node in program.graph.nodes]
    assert (family.forward in targets) == through_ops
    more = [
        torch.cat([each, each.flip(-1), each]) if grows else each
        for each, grows in zip(inputs, has_batch, strict=True)
    ]
    found, expected = program.module()(*more), module(*more)
    op_checks.assert_all_close(found, expected, assert_close_on(device, name))


# Transforms


@pytest.mark.parametrize(
    ("name", "batched"),
    [(name, batched) for name in NAMES for batched in (*FAMILIES[name].names, "all")],
)
def test_vmap(name, batched, through_ops, device):
    """Results and gradients of each example. Tensors that examples share have gradients too."""
    family = FAMILIES[name]
    function = partial(family.call, fused=through_ops)
    inputs, dims = [], []
    given = family.draw(draw_on(device, name))
    for position, (what, each) in enumerate(zip(family.names, given, strict=True), 2):
        dim = position % (each.dim() + 1) if batched in (what, "all") else None
        each = each.detach()
        if dim is not None:
            each = torch.stack([each, each.flip(0), ~each if what == "mask" else -each], dim)
        inputs.append(each)
        dims.append(dim)
    close = assert_close_on(device, name)
    op_checks.check_vmap(function, inputs, dims, close)
    op_checks.check_gradients_per_example(lambda *x: loss_of(function(*x)), inputs, dims, close)


@pytest.mark.parametrize(
    ("name", "case"),
    [("softmax", "causal window"), ("columns", "lse"), ("topk", "plain")]
    + [("attention", case) for case in FAMILIES["attention"].cases],
)
def test_vmap_of_the_plain_ops(name, case, device):
    family = FAMILIES[name]
    first, *rest = (
        each.detach() if isinstance(each, Tensor) else each
        for each in family.arguments(draw_on(device, name), **family.cases[case])
    )
    examples = torch.stack([first, -first, 2 * first], 2)
    close = assert_close_on(device, name)
    op_checks.check_vmap(lambda x: family.forward(x.contiguous(), *rest), [examples], [2], close)


@pytest.mark.parametrize("batched", [False, True])
def test_vmap_of_a_mask_that_repeats(batched, device):
    """Its batches divide those of the query."""
    family = FAMILIES["attention"]
    query, key, value, bias, mask, *rest = (
        each.detach() if isinstance(each, Tensor) else each
        for each in family.arguments(draw_on(device, "attention"), **family.cases["mask"])
    )
    query, key, value = (torch.cat([each, each.flip(0)]) for each in (query, key, value))

    def forward(query, mask):
        return family.forward(query, key, value, bias, mask, *rest)

    close = assert_close_on(device, "attention")
    repeated = forward(query, mask.repeat(2, 1, 1, 1))
    op_checks.assert_all_close(forward(query, mask), repeated, close)
    examples, masks = torch.stack([query, -query, 2 * query]), [mask, mask.flip(0), mask.flip(2)]
    given = [examples, torch.stack(masks) if batched else mask]
    op_checks.check_vmap(forward, given, [0, 0 if batched else None], close)


def test_vmap_of_the_backward_op_of_columns(device):
    _, *rest = FAMILIES["columns"].backward_arguments(Draw(device))
    gradient, op = torch.randn(2, 5, 3, 4, device=device), FAMILIES["columns"].backward
    op_checks.check_vmap(lambda g: op(g.contiguous(), *rest), [gradient], [3])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: megasoftmax.softmax(x),
        lambda x: megasoftmax.softmax(x, scale=2.0, causal=True, sink=0.5),
        lambda x: megasoftmax.softmax(x, dim=1),
        lambda x: megasoftmax.softmax(x, dropout=0.5, seed=torch.tensor([3], device=x.device)),
        lambda x: megasoftmax.softmax_topk(x, 2)[0],
        lambda x: megasoftmax.attention(x, x, x),
        lambda x: megasoftmax.attention(x, x, x, causal=True, sink=0.5),
    ],
    ids=["softmax", "options", "columns", "dropout", "topk", "attention", "attention with options"],
)
def test_many_gradients_at_a_time(function, device):
    """Autograd vmaps the backward pass by a vmap of its own, which is not that of torch.func."""
    x = torch.randn(1, 2, 3, 4, device=device)
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(function, x, vectorize=True), jacobian(function, x))


# Training


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(name, through_ops, device, reentrant):
    function = partial(FAMILIES[name].call, fused=through_ops)
    inputs = FAMILIES[name].draw(draw_on(device, name))
    # For attention in plain torch cuBLAS would ask for a setting.
    with deterministic(through_ops and name == "attention"):
        op_checks.check_checkpoint(function, inputs, reentrant)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "attention"])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(name, through_ops, device, cast):
    function = partial(FAMILIES[name].call, fused=through_ops)
    inputs = FAMILIES[name].draw(Draw(device))
    op_checks.check_autocast_changes_nothing(lambda: gradients_of(function, *inputs), device, cast)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast_changes_nothing_but_types_of_attention(through_ops, device, cast, backward_too):
    inputs = FAMILIES["attention"].draw(draw_on(device, "attention"))[:3]
    attention = partial(megasoftmax.attention, causal=True, fused=through_ops)
    expected = attention(*(each.to(cast) for each in inputs))
    wanted = torch.autograd.grad(expected.float().square().sum(), inputs)
    with torch.autocast(device, dtype=cast):
        actual = attention(*inputs)
    with torch.autocast(device, dtype=cast, enabled=backward_too):
        found = torch.autograd.grad(actual.float().square().sum(), inputs)
    assert actual.equal(expected)
    op_checks.assert_all_close(found, wanted, assert_close_on(device, "attention"))


# CUDA


def floats(*shapes, dtype=torch.float32):
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


halves = partial(floats, dtype=torch.bfloat16)


@pytest.mark.gpu
def test_side_stream():
    _, key, value = halves(*[(2, 8, 512, 64)] * 3)
    for shape, function in (
        ((64, 1024), lambda x: [megasoftmax.softmax(x, fused=True)]),
        ((64, 1024), lambda x: [megasoftmax.softmax(x, dim=0, fused=True)]),
        ((64, 4096), lambda x: megasoftmax.softmax_topk(x, 8, fused=True)),
        (key.shape, lambda x: [megasoftmax.attention(x.bfloat16(), key, value, fused=True)]),
    ):
        x = torch.randn(shape, device="cuda")
        op_checks.assert_all_equal(op_checks.on_late_input(function, x), function(x))


def of_attention(*inputs):
    options = {"causal": True, "sink": 0.5, "return_lse": True, "fused": True}
    return megasoftmax.attention(*inputs[:3], bias=inputs[3], **options)


def of_a_vocabulary(logits):
    return megasoftmax.softmax_topk(logits, 20, return_lse=True, fused=True)


def of_family(name, *draw):
    family = FAMILIES[name]
    return partial(family.call, fused=True), partial(family.draw, *draw)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "draw"),
    [
        *(of_family(name, Draw("cuda")) for name in ("softmax", "topk", "renormalised")),
        *(
            of_family("softmax", Draw("cuda", torch.bfloat16), 2, 16, columns)
            for columns in (37, 1000, 9001, 40000)
        ),
        (lambda x: (megasoftmax.softmax(x, dim=1, fused=True),), lambda: halves((4, 300, 200))),
        *((of_a_vocabulary, partial(floats, (rows, 40000))) for rows in (2, 400)),
        *(
            (of_attention, partial(halves, (2, 8, m, 64), *2 * [(2, 2, n, 64)], (1, 8, 1, n)))
            for m, n in ((300, 300), (1, 600), (1, 5000))
        ),
    ],
)
def test_cuda_graph(function, draw):
    inputs = draw()
    with deterministic(function is of_attention):
        step = partial(gradients_of, function, *inputs)
        op_checks.check_cuda_graph(step, op_checks.in_need(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fused", [False, True])
def test_never_synchronises(name, fused):
    function = partial(FAMILIES[name].call, fused=fused)
    inputs = FAMILIES[name].draw(draw_on("cuda", name))
    function(*inputs)
    with op_checks.without_synchronisation():
        outputs = [each for each in function(*inputs) if each.is_floating_point()]
        torch.autograd.grad(outputs, op_checks.in_need(inputs), outputs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_other_device_is_current(name):
    inputs = FAMILIES[name].draw(draw_on("cuda:1", name))
    run = partial(gradients_of, FAMILIES[name].call, *inputs)
    exact = op_checks.assert_equal
    close = assert_close_on("cuda:1", name) if name == "attention" else exact
    op_checks.check_other_device(run, close)


@pytest.mark.gpu
def test_fused_attention_makes_no_tensor_of_queries_and_keys():
    length = 8192
    inputs = halves(*[(1, 4, length, 64)] * 3)
    table = torch.randn(4, 2 * length - 1, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = megasoftmax.attention(*inputs, bias=RelativeBias(table), causal=True, fused=True)
    torch.autograd.grad(output.float().sum(), [*inputs, table])
    assert torch.cuda.max_memory_allocated() - before < length * length


def test_heads_of_a_bias_are_one_or_all(device):
    """Examples may share an entry by division, heads share by broadcasting alone."""
    arguments = FAMILIES["attention"].arguments(draw_on(device, "attention"), bias=(1, 2, 5, 7))
    with pytest.raises(RuntimeError, match=r"heads of bias must be 1 or|size of tensor a \(2\)"):
        attention_forward(*arguments)
