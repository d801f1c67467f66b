"""Autograd, torch.compile, export, vmap, checkpoints, autocast, streams and CUDA graphs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import op_checks
import processes
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import megasoftmax
from megasoftmax import autograd, dispatch, ops
from megasoftmax.build import library
from megasoftmax.ops import registration

BATCH, HEADS, QUERIES, KEYS = 2, 3, 2, 4
SHAPE = (BATCH, HEADS, QUERIES, KEYS)

softmax_forward = torch.ops.megasoftmax.softmax_forward.default
softmax_backward = torch.ops.megasoftmax.softmax_backward.default
softmax_dropout_backward = torch.ops.megasoftmax.softmax_dropout_backward.default


@pytest.fixture
def softmax(through_ops):
    """The public function, in plain torch and through the ops."""

    def call(scores, **arguments):
        return megasoftmax.softmax(scores, **arguments, fused=through_ops)

    return call


def make_inputs(device="cpu", dtype=torch.float32):
    """Scores, bias and sink, which require gradients, and a mask with rows that are full."""
    scores = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(HEADS, 1, KEYS, device=device, dtype=dtype, requires_grad=True)
    sink = torch.randn(HEADS, device=device, dtype=dtype, requires_grad=True)
    mask = torch.rand(BATCH, 1, QUERIES, KEYS, device=device) < 0.4
    mask[0, 0, 1] = True
    return scores, bias, sink, mask


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    probabilities, lse = outputs
    loss = (probabilities.float() * WEIGHTS.to(probabilities.device)).sum()
    return loss + lse.masked_fill(lse == -torch.inf, 0).square().sum()


def gradients_of(function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    outputs = function(*inputs)
    gradients = torch.autograd.grad(loss_of(outputs), inputs)
    return *(each.detach() for each in outputs), *gradients


WEIGHTS = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


# The ops themselves

FORWARD_CASES = {
    "plain": {},
    "scaled": {"scale": -0.3, "return_lse": True},
    "mask": {"mask": (BATCH, 1, QUERIES, KEYS)},
    "causal window": {"causal": True, "left": 2},
    "bias": {"bias": (1, HEADS, QUERIES, KEYS)},
    "broadcast bias": {"bias": (QUERIES, KEYS), "mask": (1, HEADS, 1, KEYS), "right": 1},
    "sink": {"sink": (HEADS,), "return_lse": True},
    "one sink": {"sink": (1,), "bias": (KEYS,), "return_lse": True},
    "sink value": {"sink_value": 0.5, "mask": (KEYS,), "return_lse": True},
    "visible": {"visible": ((BATCH, 1, QUERIES), (QUERIES,)), "mask": (BATCH, 1, QUERIES, KEYS)},
    "end": {"visible": (None, (HEADS, 1)), "sink": (HEADS,), "return_lse": True, "causal": True},
    "float16": {"out": torch.float16, "bias": (HEADS, 1, KEYS), "return_lse": True},
    "dropout": {"dropout": 0.4, "sink": (HEADS,), "bias": (HEADS, 1, KEYS), "return_lse": True},
}


def forward_arguments(device, dtype=torch.float32, shape=SHAPE, **case):
    def floats(name):
        size = case.get(name)
        return torch.randn(size, device=device, dtype=dtype, requires_grad=True) if size else None

    mask = torch.rand(case["mask"], device=device) < 0.4 if "mask" in case else None
    return (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True),
        case.get("scale", 1.0),
        mask,
        floats("bias"),
        case.get("causal", False),
        case.get("left", -1),
        case.get("right", -1),
        *bounds(device, *case.get("visible", (None, None))),
        floats("sink"),
        case.get("sink_value"),
        case.get("out", dtype),
        case.get("return_lse", False),
        case.get("dropout", 0.0),
        torch.tensor([5], device=device) if "dropout" in case else None,
    )


def bounds(device, first, end):
    """Ranges of these shapes, some empty, and some that reach beyond the keys."""
    return (
        None if first is None else torch.randint(-2, KEYS, first, device=device).int(),
        None if end is None else torch.randint(0, KEYS + 3, end, device=device).int(),
    )


def backward_arguments(
    device, dtype=torch.float32, bias=None, sink=None, lse=True, visible=(None, None)
):
    def rows():
        return torch.randn(SHAPE[:-1], device=device, dtype=dtype, requires_grad=True)

    probabilities = torch.rand(SHAPE, device=device, dtype=dtype).add_(0.1).requires_grad_()
    gradient = torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=True)
    return (
        gradient,
        probabilities,
        rows() if lse else None,
        rows() if lse else None,
        -0.7,
        None if bias is None else torch.empty(bias, device=device, dtype=dtype),
        False,
        -1,
        -1,
        *bounds(device, *visible),
        None if sink is None else torch.randn(sink, device=device, dtype=dtype, requires_grad=True),
        None,
        dtype,
        bias is not None,
        sink is not None,
    )


BACKWARD_CASES = {
    "plain": {"lse": False},
    "lse": {},
    "bias": {"bias": (HEADS, 1, KEYS)},
    "sink": {"sink": (HEADS,)},
    "bias and one sink": {"bias": SHAPE, "sink": (1,)},
    "visible": {"visible": ((QUERIES,), (BATCH, HEADS, QUERIES)), "bias": SHAPE, "sink": (HEADS,)},
}


# Between them they have every tensor that the op takes.
TRACED_CASES = ("plain", "broadcast bias", "one sink", "sink value", "visible", "dropout")


@pytest.mark.parametrize("case", FORWARD_CASES)
def test_opcheck_of_forward(case, device):
    arguments = forward_arguments(device, **FORWARD_CASES[case])
    op_checks.check_op(softmax_forward, arguments, is_traced=case in TRACED_CASES)


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (2, 1, HEADS, QUERIES, KEYS), (3, 0)])
def test_opcheck_of_other_ranks(shape, device):
    arguments = forward_arguments(device, shape=shape, return_lse=True)
    torch.library.opcheck(softmax_forward, arguments)


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_opcheck_of_backward(case, device):
    arguments = backward_arguments(device, **BACKWARD_CASES[case])
    is_traced = case in ("plain", "bias and one sink", "visible")
    op_checks.check_op(softmax_backward, arguments, is_traced=is_traced)


@pytest.mark.parametrize("has_all", [False, True])
def test_opcheck_and_gradients_of_dropout_backward(has_all, device):
    torch.manual_seed(0)

    def arguments(dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

        mask = torch.rand(BATCH, 1, QUERIES, KEYS, device=device) < 0.4
        return (
            *(floats(*SHAPE), floats(*SHAPE), floats(*SHAPE[:-1]) if has_all else None),
            *(floats(*SHAPE[:-1]), 0.7, mask if has_all else None),
            *(floats(HEADS, 1, KEYS) if has_all else None, has_all, -1, -1, None, None),
            *(floats(HEADS) if has_all else None, None, dtype, has_all, has_all),
            *(0.4, torch.tensor([5], device=device)),
        )

    torch.library.opcheck(softmax_dropout_backward, arguments(torch.float32, device))
    if device == "cpu":
        given = arguments(torch.float64, device)
        assert torch.autograd.gradcheck(softmax_dropout_backward, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(softmax_dropout_backward, given, fast_mode=True)


@pytest.mark.parametrize("case", [case for case in FORWARD_CASES if case != "float16"])
def test_gradients_of_forward(case):
    torch.manual_seed(0)
    arguments = forward_arguments("cpu", torch.float64, **FORWARD_CASES[case])
    assert torch.autograd.gradcheck(softmax_forward, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(softmax_forward, arguments, fast_mode=True)


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_gradients_of_backward(case):
    torch.manual_seed(0)
    arguments = backward_arguments("cpu", torch.float64, **BACKWARD_CASES[case])
    assert torch.autograd.gradcheck(softmax_backward, arguments, fast_mode=True)
    assert torch.autograd.gradgradcheck(softmax_backward, arguments, fast_mode=True)


def test_sink_gradient_of_the_op_needs_lse():
    arguments = forward_arguments("cpu", sink=(HEADS,), return_lse=False)
    with pytest.raises(ValueError, match="return_lse"):
        softmax_forward(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in FORWARD_CASES if case != "dropout"])
def test_ops_agree_between_cpu_and_gpu(case):  # no kernels drop
    assert library.load().available
    torch.manual_seed(0)
    arguments = forward_arguments("cpu", **FORWARD_CASES[case])

    def loss(results: tuple[Tensor, Tensor]) -> Tensor:
        probabilities, lse = results
        return (probabilities.float() * WEIGHTS.to(probabilities.device)).sum() + lse.sum()

    for cpu, gpu in op_checks.on_cpu_and_gpu(softmax_forward, loss, arguments):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-3, atol=1e-5)


# The public function


def full_call(softmax, mask):
    """softmax with everything, as a function of scores, bias and sink."""

    def function(scores: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return softmax(
            scores,
            scale=-0.7,
            mask=mask,
            bias=bias,
            causal=True,
            window=(3, -1),
            sink=sink,
            return_lse=True,
        )

    return function


def test_gradients_in_float64():
    """The fused path takes no float64; its op is checked above."""
    torch.manual_seed(0)
    *inputs, mask = make_inputs(dtype=torch.float64)
    assert torch.autograd.gradcheck(full_call(megasoftmax.softmax, mask), inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        full_call(megasoftmax.softmax, mask), inputs, fast_mode=True
    )


@pytest.mark.parametrize("used", ["probabilities", "lse"])
def test_gradient_of_one_output(softmax, used):
    scores, *_ = make_inputs()
    index = ("probabilities", "lse").index(used)
    exact = scores.detach().double().requires_grad_()
    expected = (exact.softmax(-1), exact.logsumexp(-1))[index].square().sum()
    actual = softmax(scores, return_lse=True)[index].square().sum()
    (wanted,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(torch.autograd.grad(actual, scores)[0], wanted.float())


def test_double_backward(softmax, device):
    """Against the second derivatives that torch's own softmax gives."""
    scores, _, _, mask = make_inputs(device)
    mask[0, 0, 1] = False
    mask[..., 0] = False
    found = []
    for probabilities in (
        softmax(scores, scale=0.5, mask=mask),
        (scores * 0.5).masked_fill(mask, -torch.inf).softmax(-1),
    ):
        (first,) = torch.autograd.grad(probabilities.square().sum(), scores, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), scores)[0])
    torch.testing.assert_close(*found)


def test_in_place_change_of_the_result_is_noticed(softmax):
    scores, *_ = make_inputs()
    probabilities = softmax(scores)
    probabilities.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()


def test_bias_may_change_before_the_backward(softmax):
    scores, bias, *_ = make_inputs()
    found = []
    for change in (False, True):
        probabilities = softmax(scores, bias=bias)
        if change:
            with torch.no_grad():
                bias.zero_()
        found.append(torch.autograd.grad((probabilities**2).sum(), (scores, bias)))
    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])


def test_nothing_is_recorded_without_need(softmax):
    scores, bias, sink, mask = make_inputs()
    with torch.no_grad():
        probabilities, lse = full_call(softmax, mask)(scores, bias, sink)
    assert not probabilities.requires_grad
    assert not lse.requires_grad
    assert not softmax(scores.detach(), bias=bias.detach(), sink=sink.detach()).requires_grad
    assert softmax(scores.detach(), sink=sink).requires_grad
    assert softmax(scores.detach(), bias=bias).requires_grad


# Compilation and export


@op_checks.static_and_dynamic
def test_compile(softmax, device, dynamic):
    *inputs, mask = make_inputs(device)
    op_checks.check_compiled(full_call(softmax, mask), gradients_of, inputs, dynamic)


def test_compiled_once_for_all_lengths(softmax, device):
    def function(scores: Tensor, mask: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        options = {"scale": 0.5, "causal": True, "window": (4, 0), "return_lse": True}
        return softmax(scores, mask=mask, bias=bias, sink=sink, **options)

    def draw(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        scores = torch.randn(batch, HEADS, queries, keys, device=device, requires_grad=True)
        bias = torch.randn(1, HEADS, queries, keys, device=device, requires_grad=True)
        sink = torch.randn(HEADS, device=device, requires_grad=True)
        return scores, torch.rand(batch, 1, 1, keys, device=device) < 0.4, bias, sink

    op_checks.check_compiled_once(function, draw)


@pytest.mark.parametrize("strict", [False, True])
def test_export(softmax, device, strict):
    class Attention(torch.nn.Module):
        def forward(self, scores: Tensor, mask: Tensor) -> Tensor:
            return softmax(scores, scale=0.5, mask=mask, causal=True)

    scores, _, _, mask = make_inputs(device)
    scores = scores.detach()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        Attention(), (scores, mask), dynamic_shapes=({0: batch}, {0: batch}), strict=strict
    )
    more, more_mask = torch.cat([scores, scores + 1, scores]), torch.cat([mask, mask, mask])
    actual = program.module()(more, more_mask)
    torch.testing.assert_close(actual, Attention()(more, more_mask))


def test_export_contains_the_op(monkeypatch):
    monkeypatch.setattr(dispatch, "reasons_against_fused_softmax", lambda *arguments: ())

    class Attention(torch.nn.Module):
        def forward(self, scores: Tensor) -> Tensor:
            return megasoftmax.softmax(scores, causal=True, fused=True)

    program = torch.export.export(Attention(), (torch.randn(SHAPE),))
    assert softmax_forward in [node.target for node in program.graph.nodes]


COMPILED = {
    "softmax": (megasoftmax.softmax, 1),
    "columns": (partial(megasoftmax.softmax, dim=-2), 1),
    "dropout": (partial(megasoftmax.softmax, dropout=0.25), 1),
    "topk": (lambda logits: megasoftmax.softmax_topk(logits, 2, fused=True)[0], 1),
    "attention": (megasoftmax.attention, 3),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_calls_ops_without_rules_of_autograd(case, monkeypatch):
    """Else each call would go through Python twice more."""
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    function, count = COMPILED[case]
    found = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = function if case == "topk" else partial(function, fused=True)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(count)]
    weights = torch.randn(compiled(*inputs).shape)

    def gradients(way: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return torch.autograd.grad(way(*inputs), inputs, weights)

    op_checks.assert_all_equal(gradients(compiled), gradients(call))
    names = [each.name() for each in found if getattr(each, "namespace", "") == "megasoftmax"]
    assert len(set(names)) == 2, names  # forward and backward
    assert all(name.endswith("_below_autograd") for name in names), names


def let_compiled_code_run_ops_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if kernels ran there, for head dimensions up to 8."""
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "_head_dim_of_kernels", lambda device: 8)


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, list[str], int]:
    """The result of a compiled call, the names of its ops, and the number of guards."""
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes = [node.target for node in graph.graph.nodes]
        names.extend(each.name() for each in nodes if hasattr(each, "_schema"))
        return graph

    def call(*inputs: Tensor) -> Tensor:
        return function(*inputs, fused=True)

    torch.compiler.reset()
    result = torch.compile(call, fullgraph=True, dynamic=False, backend=keep)(*inputs)
    (entry,) = _debug_get_cache_entry_list(call)
    return result, names, str(entry.guard_manager).count("+- ")


MODULE, UNFUSED = (
    megasoftmax.FusedScaleMaskSoftmax(
        *(False, True, "padding", fusion, lambda x, mask: x.masked_fill(mask, -torch.inf)),
        *(True, 0.5),
    )
    for fusion in (True, False)
)
TRACED = {
    "softmax": (megasoftmax.softmax, [SHAPE]),
    "row": (megasoftmax.softmax, [(5,)]),
    "causal softmax": (partial(megasoftmax.softmax, causal=True, scale=0.5), [SHAPE]),
    "mask": (lambda x, **o: megasoftmax.softmax(x, mask=x[:, :1] > 0, **o), [SHAPE]),
    "mask of keys": (lambda x, **o: megasoftmax.softmax(x, mask=x[0, 0, 0] > 0, **o), [SHAPE]),
    "module": (
        lambda x, fused: (UNFUSED if fused is False else MODULE)(x, x[:1, :, :1] > 1.5),
        [SHAPE],
    ),
    "another type": (partial(megasoftmax.softmax, dtype=torch.float32), [SHAPE]),
    "attention": (megasoftmax.attention, [(2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 7)]),
    "causal attention": (partial(megasoftmax.attention, causal=True, scale=0.3), [SHAPE] * 3),
}


@pytest.mark.parametrize("case", TRACED)
def test_compiled_calls_of_plain_tensors_are_one_op_with_few_guards(case, device, monkeypatch):
    """Guards cost the host at each call: all that is read in tracing is compared then."""
    if device == "cpu":
        let_compiled_code_run_ops_on_cpus(monkeypatch)
    function, shapes = TRACED[case]
    inputs = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    result, names, guards = traced(function, *inputs)
    op = "softmax_forward.alone" if "attention" not in case else "attention_forward_below_autograd"
    assert names == [f"megasoftmax::{op}"]
    assert guards < 175
    expected = function(*inputs, fused=False)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


halves = partial(torch.ones, dtype=torch.bfloat16)
NOT_PLAIN = {
    "gradient": (megasoftmax.softmax, [torch.ones(2, 3, requires_grad=True)]),
    "integer as scale": (partial(megasoftmax.softmax, scale=1), [torch.ones(2, 3)]),
    "scale below 0": (partial(megasoftmax.softmax, scale=-1.0), [torch.ones(2, 3)]),
    "no rows": (megasoftmax.softmax, [torch.ones(0, 3)]),
    "five dimensions": (megasoftmax.softmax, [torch.ones(2, 1, 1, 1, 3)]),
    "parameter": (megasoftmax.softmax, [torch.nn.Parameter(torch.ones(2, 3), False)]),
    "sink": (partial(megasoftmax.softmax, sink=0.0), [torch.ones(2, 3)]),
    "other half": (
        lambda x, **o: megasoftmax.softmax(x.half(), dtype=torch.bfloat16),
        [torch.ones(2, 3)],
    ),
    "seed": (
        lambda x, **o: megasoftmax.softmax(x, seed=x.new_ones((), dtype=torch.int64), **o),
        [torch.ones(2, 3)],
    ),
    "vmap": (
        lambda x, **o: torch.func.vmap(partial(megasoftmax.softmax, **o))(x),
        [torch.ones(4, 2, 3)],
    ),
    "float32 heads": (megasoftmax.attention, [torch.ones(1, 1, 2, 4)] * 3),
    "log-sum-exp": (
        lambda x, **o: megasoftmax.softmax(x, return_lse=True, **o)[0],
        [torch.ones(2, 3)],
    ),
    "wide heads": (megasoftmax.attention, [halves(1, 1, 2, 9)] * 3),
    "gradient of keys": (
        megasoftmax.attention,
        [halves(*SHAPE), halves(*SHAPE, requires_grad=True), halves(*SHAPE)],
    ),
    "no keys": (megasoftmax.attention, [halves(1, 1, n, 4) for n in (2, 0, 0)]),
    "scale of 2": (partial(megasoftmax.attention, scale=2.0), [halves(*SHAPE)] * 3),
    "range": (
        lambda q, **o: megasoftmax.attention(
            q, q, q, visible=(None, q.new_ones(QUERIES, dtype=torch.int32)), **o
        ),
        [halves(*SHAPE)],
    ),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_other_compiled_calls_go_the_long_way(case, monkeypatch):
    let_compiled_code_run_ops_on_cpus(monkeypatch)
    function, inputs = NOT_PLAIN[case]
    result, _, guards = traced(function, *inputs)
    assert guards > 150
    torch.testing.assert_close(result, function(*inputs, fused=False), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("misfit", "message"),
    [
        ({"causal": 1}, "causal"),
        ({"key": torch.ones(1, 2, 2, 4)}, "key"),
        ({"value": torch.ones(1, 1, 3, 4)}, "value"),
        ({"key": torch.ones(1, 1, 2, 4, dtype=torch.float64)}, "key"),
    ],
)
def test_misfits_are_refused_when_compiled(misfit, message, monkeypatch):
    let_compiled_code_run_ops_on_cpus(monkeypatch)
    given = dict.fromkeys(("query", "key", "value"), torch.ones(1, 1, 2, 4)) | misfit
    with pytest.raises(Exception, match=message):
        traced(lambda query, **options: megasoftmax.attention(**(given | options)), given["query"])


@pytest.mark.gpu
def test_kernels_compute_ops_without_rules_of_autograd():
    assert library.load().available
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for op, other in registration._below_autograd.items():
        assert has_kernel(op.name(), "CUDA") == has_kernel(other.name(), "CUDA"), op.name()
        assert has_kernel(op.name(), "CUDA") != ("in_blocks" in op.name())


# Transforms


def test_compiled_transforms_call_ops_with_rules(monkeypatch):
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    found = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(
        torch.vmap(partial(megasoftmax.softmax, fused=True)), fullgraph=True, backend=keep
    )
    scores = torch.randn(SHAPE)
    torch.testing.assert_close(compiled(scores), scores.softmax(-1))
    assert softmax_forward in found


@pytest.mark.parametrize("batched", ["scores", "mask", "bias", "sink", "all"])
def test_vmap(softmax, device, batched):
    shapes = {
        "scores": (HEADS, QUERIES, KEYS),
        "mask": (QUERIES, KEYS),
        "bias": (1, KEYS),
        "sink": (HEADS,),
    }

    def function(scores: Tensor, mask: Tensor, bias: Tensor, sink: Tensor) -> Any:
        return softmax(
            scores, scale=0.5, mask=mask, bias=bias, causal=True, sink=sink, return_lse=True
        )

    op_checks.check_vmap(function, *op_checks.draw_examples(shapes, batched, device))


def test_vmap_of_the_plain_op(device):
    scores = torch.randn(4, QUERIES, KEYS, device=device)

    def op(example: Tensor) -> Tensor:
        options = (True, -1, -1, None, None, None, None, torch.float32, False, 0.0, None)
        return softmax_forward(example, 1.0, None, None, *options)[0]

    torch.testing.assert_close(torch.vmap(op)(scores), torch.stack([op(one) for one in scores]))


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


@pytest.mark.parametrize("batched", ["scores", "sink", "all"])
def test_gradients_per_example(softmax, device, batched):
    """vmap of grad: bias and sink get a gradient for each example, shared or not."""
    scores, bias, sink = (
        torch.randn(4, HEADS, QUERIES, KEYS, device=device),
        torch.randn(HEADS, 1, KEYS, device=device),
        torch.randn(HEADS, device=device),
    )
    dims = (0, None, None)
    if batched != "scores":
        sink, dims = torch.randn(4, HEADS, device=device), (0, None, 0)
    if batched == "all":
        bias, dims = torch.randn(HEADS, 1, 4, KEYS, device=device), (0, 2, 0)

    def loss(scores: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        probabilities, lse = softmax(scores, bias=bias, causal=True, sink=sink, return_lse=True)
        return probabilities.square().sum() + lse.sin().sum()

    op_checks.check_gradients_per_example(loss, (scores, bias, sink), dims)


def test_second_derivatives_by_transforms(softmax, device):
    row = torch.randn(KEYS, device=device)

    def loss(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda scores: function(scores).square().sum()

    second = torch.func.jacrev(torch.func.jacrev(loss(softmax)))(row)
    expected = torch.autograd.functional.hessian(loss(lambda scores: scores.softmax(-1)), row)
    torch.testing.assert_close(second, expected)


# Training


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(softmax, device, reentrant):
    *inputs, mask = make_inputs(device)
    op_checks.check_checkpoint(full_call(softmax, mask), loss_of, inputs, reentrant)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(softmax, device, cast):
    *inputs, mask = make_inputs(device)
    function = full_call(softmax, mask)
    op_checks.check_autocast_changes_nothing(lambda: gradients_of(function, *inputs), device, cast)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mixed_types(softmax, device, bias_dtype, sink_dtype):
    scores, bias, sink, mask = make_inputs(device)
    scores = scores.detach().bfloat16().requires_grad_()
    bias = bias.detach().to(bias_dtype).requires_grad_()
    sink = sink.detach().to(sink_dtype).requires_grad_()
    inputs = (scores, bias, sink)
    actual = gradients_of(full_call(softmax, mask), *inputs)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = gradients_of(full_call(megasoftmax.softmax, mask), *exact)
    for found, each, wanted in zip(actual[2:], inputs, expected[2:], strict=True):
        assert found.dtype == each.dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0.02, atol=0.02)


# CUDA


@pytest.mark.gpu
def test_side_stream():
    scores = torch.randn(64, 1024, device="cuda")
    actual = op_checks.on_late_input(lambda x: megasoftmax.softmax(x, fused=True), scores)
    torch.testing.assert_close(actual, scores.softmax(-1))


@pytest.mark.gpu
def test_cuda_graph():
    *inputs, mask = make_inputs("cuda")
    function = full_call(lambda *a, **k: megasoftmax.softmax(*a, **k, fused=True), mask)
    weights = WEIGHTS.cuda()

    def step() -> tuple[Tensor, ...]:
        probabilities, lse = function(*inputs)
        loss = (probabilities * weights).sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        return probabilities, *torch.autograd.grad(loss, inputs)

    op_checks.check_cuda_graph(step, inputs[:1])


@pytest.mark.gpu
def test_never_synchronises():
    *inputs, mask = make_inputs("cuda")
    function = full_call(megasoftmax.softmax, mask)
    function(*inputs)
    with op_checks.without_synchronisation():
        probabilities, lse = function(*inputs)
        torch.autograd.grad((probabilities, lse), inputs, (probabilities, lse))
        megasoftmax.softmax(inputs[0], mask=mask, sink=0.0, fused=False)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_other_device_is_current():
    *inputs, mask = make_inputs("cuda:1")
    function = full_call(megasoftmax.softmax, mask)
    op_checks.check_other_device(lambda: gradients_of(function, *inputs))


def test_fused_path_calls_the_ops():
    arguments = forward_arguments("cpu", **FORWARD_CASES["sink value"])
    with torch.no_grad():
        op_checks.assert_all_equal(
            ops.softmax.IMPLEMENTATION.forward(*arguments),
            autograd.softmax.REFERENCE.forward(*arguments),
        )
