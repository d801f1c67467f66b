"""What torch.compile makes of calls: which ops they become, and what guards they leave."""

from functools import partial

import op_checks
import processes
import pytest
import torch
from functorch.compile import make_boxed_func
from op_families import QUERIES, SHAPE
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import megasoftmax
from megasoftmax import dispatch
from megasoftmax.build import library
from megasoftmax.ops import registration

softmax_forward = torch.ops.megasoftmax.softmax_forward.default

COMPILED = {
    "softmax": (megasoftmax.softmax, 1),
    "columns": (partial(megasoftmax.softmax, dim=-2), 1),
    "dropout": (partial(megasoftmax.softmax, dropout=0.25), 1),
    "topk": (lambda logits: megasoftmax.softmax_topk(logits, 2, fused=True)[0], 1),
    "attention": (megasoftmax.attention, 3),
}


def keeping_ops(compiled=lambda graph: graph):
    """A list of the targets of nodes, and the compiler that adds those of a graph to it."""
    found = []

    def keep(graph, _):
        found.extend(node.target for node in graph.graph.nodes)
        return compiled(graph)

    return found, keep


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_calls_ops_without_rules_of_autograd(case, monkeypatch):
    """Else each call would go through Python twice more."""
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    function, count = COMPILED[case]
    found, keep = keeping_ops(lambda graph: make_boxed_func(graph.forward))
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    call = function if case == "topk" else partial(function, fused=True)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    inputs = [torch.randn(SHAPE, requires_grad=True) for _ in range(count)]
    weights = torch.randn(compiled(*inputs).shape)

    def gradients(way):
        torch.manual_seed(0)
        return torch.autograd.grad(way(*inputs), inputs, weights)

    op_checks.assert_all_equal(gradients(compiled), gradients(call))
    names = [each.name() for each in found if getattr(each, "namespace", "") == "megasoftmax"]
    assert len(set(names)) == 2, names  # forward and backward
    assert all(name.endswith("_below_autograd") for name in names), names


def let_compiled_code_run_ops_on_cpus(monkeypatch):
    """As if kernels ran there, for head dimensions up to 8."""
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    monkeypatch.setattr(dispatch, "_has_kernels", lambda device: True)
    monkeypatch.setattr(dispatch, "_head_dim_of_kernels", lambda device: 8)


def traced(function, *inputs):
    """The result of a compiled call, the names of its ops, and the number of guards."""
    found, keep = keeping_ops()

    def call(*inputs):
        return function(*inputs, fused=True)

    torch.compiler.reset()
    result = torch.compile(call, fullgraph=True, dynamic=False, backend=keep)(*inputs)
    (entry,) = _debug_get_cache_entry_list(call)
    names = [each.name() for each in found if hasattr(each, "_schema")]
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


def test_compiled_transforms_call_ops_with_rules(monkeypatch):
    processes.let_ops_serve_cpus(monkeypatch.setattr)
    found, keep = keeping_ops()
    compiled = torch.compile(
        torch.vmap(partial(megasoftmax.softmax, fused=True)), fullgraph=True, backend=keep
    )
    scores = torch.randn(SHAPE)
    torch.testing.assert_close(compiled(scores), scores.softmax(-1))
    assert softmax_forward in found
