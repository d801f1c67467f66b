"""softmax_topk: autograd, torch.compile, export, vmap, checkpoints, streams and CUDA graphs."""

from collections.abc import Callable
from typing import Any

import op_checks
import pytest
import torch
from torch import Tensor

import megasoftmax
from megasoftmax import autograd, dispatch, ops
from megasoftmax.build import library

BATCH, ROWS, COLUMNS, K = 2, 3, 7, 3
SHAPE = (BATCH, ROWS, COLUMNS)

topk_forward = torch.ops.megasoftmax.softmax_topk_forward.default
topk_backward = torch.ops.megasoftmax.softmax_topk_backward.default


@pytest.fixture
def topk(through_ops):
    """The public function, in plain torch and through the ops."""

    def call(logits, k=K, **arguments):
        return megasoftmax.softmax_topk(logits, k, **arguments, fused=through_ops)

    return call


def make_inputs(device="cpu", dtype=torch.float32):
    """Logits and bias, which require gradients, and a mask with a row that is full."""
    logits = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(ROWS, 1, device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(BATCH, 1, COLUMNS, device=device) < 0.4
    mask[0] = True
    return logits, bias, mask


def full_call(topk, mask, renormalize=False):
    """softmax_topk with everything, as a function of logits and bias."""

    def function(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return topk(
            logits, K, scale=-0.7, mask=mask, bias=bias, renormalize=renormalize, return_lse=True
        )

    return function


WEIGHTS = torch.randn(BATCH, ROWS, K, generator=torch.Generator().manual_seed(1))


def loss_of(outputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    p, _, lse = outputs
    loss = (p.float() * WEIGHTS.to(p.device)).sum()
    return loss + lse.masked_fill(lse == -torch.inf, 0).square().sum()


def gradients_of(function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    p, indices, lse = function(*inputs)
    gradients = torch.autograd.grad(loss_of((p, indices, lse)), inputs)
    return p.detach(), indices, lse.detach(), *gradients


# The ops themselves

CASES = {
    "plain": {},
    "scaled": {"scale": -0.3},
    "mask": {"mask": SHAPE},
    "bias": {"bias": SHAPE},
    "broadcast bias": {"bias": (COLUMNS,), "mask": (ROWS, 1)},
    "bias per row": {"bias": (ROWS, 1), "scale": 2.0},
    "renormalised": {"renormalize": True, "mask": (COLUMNS,)},
    "renormalised, bias": {"renormalize": True, "bias": (BATCH, 1, 1)},
    "k 0": {"k": 0, "bias": ()},
    "k 1": {"k": 1},
    "all": {"k": COLUMNS},
    "all, renormalised": {"k": COLUMNS, "renormalize": True},
}


def forward_arguments(device, dtype=torch.float32, shape=SHAPE, **case):
    bias = case.get("bias")
    if bias is not None:
        bias = torch.randn(bias, device=device, dtype=dtype, requires_grad=True)
    return (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True),
        case.get("k", K),
        case.get("scale", 1.0),
        torch.rand(case["mask"], device=device) < 0.3 if "mask" in case else None,
        bias,
        case.get("renormalize", False),
        case.get("out", dtype),
        False,
    )


def backward_arguments(device, dtype=torch.float32, lse=True, **case):
    logits, k, scale, mask, bias, renormalize, out, _ = forward_arguments(device, dtype, **case)
    gradient = torch.randn(*SHAPE[:-1], k, device=device, dtype=out, requires_grad=True)
    p, indices, statistics = topk_forward(
        logits.detach(), k, scale, mask, bias, renormalize, out, False
    )
    lse_gradient = torch.randn(SHAPE[:-1], device=device, dtype=dtype, requires_grad=True)
    return (
        gradient,
        p.detach().requires_grad_(),
        indices,
        lse_gradient if lse else None,
        logits,
        statistics.detach().requires_grad_(),
        scale,
        mask,
        bias,
        renormalize,
        0.5,
        dtype,
    )


# Between them they have every tensor that the op takes.
TRACED = ("plain", "broadcast bias", "renormalised, bias", "k 0")


@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_forward(case, device):
    arguments = forward_arguments(device, **CASES[case])
    op_checks.check_op(topk_forward, arguments, is_traced=case in TRACED)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 1, 3, 4, 5), (3, 5)])
@pytest.mark.parametrize("out", [torch.float16, torch.float32])
def test_opcheck_of_other_ranks_and_types(shape, out, device):
    arguments = forward_arguments(device, shape=shape, out=out)
    op_checks.check_op(topk_forward, arguments, is_traced=out == torch.float32)


def test_opcheck_of_candidates(device):
    logits, *rest, _ = forward_arguments(device, mask=SHAPE)
    torch.library.opcheck(topk_forward, (logits.detach(), *rest, True))


@pytest.mark.parametrize(
    ("case", "lse"), [*((case, True) for case in CASES), (next(iter(CASES)), False)]
)
def test_opcheck_of_backward(case, lse, device):
    arguments = backward_arguments(device, lse=lse, **CASES[case])
    op_checks.check_op(topk_backward, arguments, is_traced=case in TRACED)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_forward(case):
    """Of the statistics the log-sum-exp alone has a gradient."""
    torch.manual_seed(0)
    logits, k, scale, mask, bias, *rest = forward_arguments("cpu", torch.float64, **CASES[case])

    def function(logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        p, _, statistics = topk_forward(logits, k, scale, mask, bias, *rest)
        return p, statistics[2].masked_fill(statistics[2] == -torch.inf, 0)

    inputs = (logits,) if bias is None else (logits, bias)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("renormalize", [False, True])
def test_third_derivatives(renormalize):
    torch.manual_seed(0)
    logits, k, scale, mask, bias, *rest = forward_arguments(
        "cpu", torch.float64, shape=(2, 5), bias=(2, 1), mask=(5,), renormalize=renormalize
    )

    def gradient(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        p, _, statistics = topk_forward(logits, k, scale, mask, bias, *rest)
        loss = (p * p * p).sum() + statistics[2].square().sum()
        return torch.autograd.grad(loss, (logits, bias), create_graph=True)

    assert torch.autograd.gradgradcheck(gradient, (logits, bias), fast_mode=True)


def test_candidates_have_no_gradient():
    logits, *rest, _ = forward_arguments("cpu")
    values, *_ = topk_forward(logits, *rest, True)
    with pytest.raises(NotImplementedError, match=r"^candidates: expected False .* got True"):
        values.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if case != "k 0"])
def test_ops_agree_between_cpu_and_gpu(case):
    assert library.load().available
    torch.manual_seed(0)
    arguments = forward_arguments("cpu", **CASES[case])

    def loss(results: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        p, _, statistics = results
        weights = torch.linspace(-1, 1, p.shape[-1], device=p.device)
        return (p.float() * weights).sum() + statistics[2].sum()

    for cpu, gpu in op_checks.on_cpu_and_gpu(topk_forward, loss, arguments):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)


# The public function


@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_in_float64(renormalize):
    """The fused path takes no float64; its op is checked above."""
    torch.manual_seed(0)
    *inputs, mask = make_inputs(dtype=torch.float64)
    mask[0] = False  # a log-sum-exp of -inf has no numerical derivative

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        p, _, lse = full_call(megasoftmax.softmax_topk, mask, renormalize)(*inputs)
        return p, lse

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("renormalize", [False, True])
def test_double_backward(topk, device, renormalize):
    """Against the second derivatives that torch's own softmax gives."""
    logits, _, mask = make_inputs(device)
    mask[..., 0], mask[0] = False, False
    p, indices = topk(logits, scale=0.5, mask=mask, renormalize=renormalize)
    z = (logits * 0.5).masked_fill(mask, -torch.inf)
    if renormalize:
        expected = z.gather(-1, indices).softmax(-1)
    else:
        expected = z.softmax(-1).gather(-1, indices)
    found = []
    for probabilities in (p, expected):
        (first,) = torch.autograd.grad(probabilities.square().sum(), logits, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), logits)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("changed", ["probabilities", "logits", "bias"])
def test_in_place_change_is_noticed(topk, changed):
    logits, bias, _ = make_inputs()
    probabilities, _ = topk(logits, bias=bias)
    with torch.no_grad():
        {"probabilities": probabilities, "logits": logits, "bias": bias}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()


def test_nothing_is_recorded_without_need(topk):
    logits, bias, mask = make_inputs()
    with torch.no_grad():
        p, _, lse = full_call(topk, mask)(logits, bias)
    assert not p.requires_grad
    assert not lse.requires_grad
    assert not topk(logits.detach(), bias=bias.detach())[0].requires_grad
    p, indices = topk(logits.detach(), bias=bias)
    assert p.requires_grad
    assert not indices.requires_grad


def test_gradient_of_bias_alone(topk):
    logits, bias, mask = make_inputs()
    (wanted,) = torch.autograd.grad(loss_of(full_call(topk, mask)(logits, bias)), bias)
    (found,) = torch.autograd.grad(loss_of(full_call(topk, mask)(logits.detach(), bias)), bias)
    assert found.equal(wanted)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.float64])
def test_mixed_types(topk, device, bias_dtype):
    logits, bias, mask = make_inputs(device)
    logits = logits.detach().bfloat16().requires_grad_()
    bias = bias.detach().to(bias_dtype).requires_grad_()
    actual = gradients_of(full_call(topk, mask), logits, bias)
    exact = [each.detach().double().requires_grad_() for each in (logits, bias)]
    expected = gradients_of(full_call(megasoftmax.softmax_topk, mask), *exact)
    for found, each, wanted in zip(actual[3:], (logits, bias), expected[3:], strict=True):
        assert found.dtype == each.dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)


# Compilation and export


@pytest.mark.parametrize("renormalize", [False, True])
@op_checks.static_and_dynamic
def test_compile(topk, device, dynamic, renormalize):
    *inputs, mask = make_inputs(device)
    function = full_call(topk, mask, renormalize)
    op_checks.check_compiled(function, gradients_of, inputs, dynamic)


def test_compiled_once_for_all_lengths(topk, device):
    def function(logits: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return topk(logits, 4, scale=0.5, mask=mask, bias=bias, renormalize=True, return_lse=True)

    def draw(batch: int, rows: int, columns: int) -> tuple[Tensor, ...]:
        logits = torch.randn(batch, rows, columns, device=device, requires_grad=True)
        bias = torch.randn(1, rows, columns, device=device, requires_grad=True)
        return logits, torch.rand(batch, 1, columns, device=device) < 0.4, bias

    op_checks.check_compiled_once(function, draw)


@pytest.mark.parametrize("strict", [False, True])
def test_export(topk, device, strict):
    class Router(torch.nn.Module):
        def forward(self, logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return topk(logits, mask=mask, renormalize=True)

    logits, _, mask = make_inputs(device)
    logits = logits.detach()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Router(), (logits, mask), dynamic_shapes=({0: batch}, {0: batch}), strict=strict
    )
    more, more_mask = torch.cat([logits, logits + 1, logits]), torch.cat([mask, mask, mask])
    torch.testing.assert_close(program.module()(more, more_mask), Router()(more, more_mask))


def test_export_contains_the_op(monkeypatch):
    monkeypatch.setattr(dispatch, "reasons_against_fused_topk", lambda *arguments: ())

    class Router(torch.nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
            return megasoftmax.softmax_topk(logits, K, fused=True)

    program = torch.export.export(Router(), (torch.randn(SHAPE),))
    assert topk_forward in [node.target for node in program.graph.nodes]


# Transforms


@pytest.mark.parametrize("batched", ["logits", "mask", "bias", "all"])
def test_vmap(topk, device, batched):
    shapes = {"logits": (2, ROWS, COLUMNS), "mask": (ROWS, COLUMNS), "bias": (1, COLUMNS)}

    def function(logits: Tensor, mask: Tensor, bias: Tensor) -> Any:
        return topk(logits, scale=0.5, mask=mask, bias=bias, return_lse=True)

    op_checks.check_vmap(function, *op_checks.draw_examples(shapes, batched, device))


def test_vmap_of_the_plain_ops(device):
    logits, *rest = forward_arguments(device)
    op_checks.check_vmap(lambda x: topk_forward(x, *rest), [logits.detach()], [0])


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("batched", ["logits", "bias", "all"])
def test_gradients_per_example(topk, device, batched, renormalize):
    """vmap of grad: the bias gets a gradient for each example, shared or not."""
    logits = torch.randn(4, 2, ROWS, COLUMNS, device=device)
    bias = torch.randn(ROWS, 4, COLUMNS, device=device)
    dims = {"logits": (0, None), "bias": (None, 1), "all": (0, 1)}[batched]
    if dims[0] is None:
        logits = logits[0]
    if dims[1] is None:
        bias = bias[:, 0]

    def loss(logits: Tensor, bias: Tensor) -> Tensor:
        p, _, lse = topk(logits, bias=bias, renormalize=renormalize, return_lse=True)
        return p.square().sum() + lse.sin().sum()

    op_checks.check_gradients_per_example(loss, (logits, bias), dims)


@pytest.mark.parametrize("renormalize", [False, True])
def test_second_derivatives_by_transforms(topk, device, renormalize):
    row = torch.randn(COLUMNS, device=device)
    indices = row.topk(K).indices

    def dense(x: Tensor) -> Tensor:
        return x[indices].softmax(-1) if renormalize else x.softmax(-1)[indices]

    def loss(x: Tensor) -> Tensor:
        return topk(x, renormalize=renormalize)[0].square().sum()

    second = torch.func.jacrev(torch.func.jacrev(loss))(row)
    expected = torch.autograd.functional.hessian(lambda x: dense(x).square().sum(), row)
    torch.testing.assert_close(second, expected)


# Training


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(topk, device, reentrant):
    *inputs, mask = make_inputs(device)
    op_checks.check_checkpoint(full_call(topk, mask), loss_of, inputs, reentrant)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(topk, device, cast):
    *inputs, mask = make_inputs(device)
    function = full_call(topk, mask)
    op_checks.check_autocast_changes_nothing(lambda: gradients_of(function, *inputs), device, cast)


# CUDA


@pytest.mark.gpu
def test_side_stream():
    logits = torch.randn(64, 4096, device="cuda")
    p, indices = op_checks.on_late_input(
        lambda x: megasoftmax.softmax_topk(x, 8, fused=True), logits
    )
    torch.testing.assert_close(p, logits.softmax(-1).gather(-1, indices))
    assert torch.equal(indices, logits.sort(-1, descending=True).indices[:, :8])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 400])
def test_cuda_graph(rows):
    logits = torch.randn(rows, 40000, device="cuda", requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        p, indices, lse = megasoftmax.softmax_topk(logits, 20, return_lse=True, fused=True)
        return p, indices, lse, *torch.autograd.grad(p.square().sum() + lse.sum(), logits)

    op_checks.check_cuda_graph(step, [logits])


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_never_synchronises(fused):
    *inputs, mask = make_inputs("cuda")
    function = full_call(lambda *a, **k: megasoftmax.softmax_topk(*a, **k, fused=fused), mask)
    function(*inputs)
    with op_checks.without_synchronisation():
        p, _, lse = function(*inputs)
        torch.autograd.grad((p, lse), inputs, (p, lse))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_other_device_is_current():
    *inputs, mask = make_inputs("cuda:1")
    function = full_call(megasoftmax.softmax_topk, mask)
    op_checks.check_other_device(lambda: gradients_of(function, *inputs))


def test_fused_path_calls_the_ops():
    arguments = forward_arguments("cpu", **CASES["broadcast bias"])
    with torch.no_grad():
        op_checks.assert_all_equal(
            ops.topk.IMPLEMENTATION.forward(*arguments),
            autograd.topk.REFERENCE.forward(*arguments),
        )
