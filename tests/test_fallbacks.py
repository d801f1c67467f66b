"""Calls that kernels refuse, in code that torch.compile must take whole."""

import op_checks
import pytest
import torch

import megasoftmax
from megasoftmax import dispatch
from megasoftmax.functions.calls import Call
from megasoftmax.integrations.products import takes_attention
from megasoftmax.options import AttentionOptions


@pytest.fixture
def asks_for_reasons(device, monkeypatch):
    """On a CPU too calls with fused=None ask for reasons, which are not those about a GPU."""
    torch.compiler.reset()
    if device == "cuda":
        return
    for name in ("_device", "_compiled_part"):
        monkeypatch.setattr(dispatch, name, lambda tensor: None)

    def on_gpu(call):
        return len(call.reasons()) == 0

    monkeypatch.setattr(Call, "runs_fused", on_gpu)


def attention(query):
    return megasoftmax.attention(query, query.sin(), query.cos(), causal=True)


def softmax(scores):
    return megasoftmax.softmax(scores, causal=True, dtype=torch.float64)


def softmax_of_columns(scores):
    return megasoftmax.softmax(scores, dim=1, dtype=torch.float64)


def softmax_topk(logits):
    return megasoftmax.softmax_topk(logits.double(), 3)[0]


@pytest.mark.usefixtures("asks_for_reasons")
@pytest.mark.parametrize("function", [attention, softmax, softmax_of_columns, softmax_topk])
def test_compile_of_calls_that_fall_back(function, device):
    inputs = torch.randn(2, 3, 5, 8, device=device, requires_grad=True)
    op_checks.check_compiled(function, op_checks.gradients_of, [inputs], dynamic=False)


@pytest.mark.usefixtures("asks_for_reasons")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compiled_code_can_ask_why(dtype, device):
    """As adapters do, which take two products and a softmax where attention cannot run fused."""
    query = torch.randn(1, 2, 3, 8, device=device, dtype=dtype)

    @torch.compile(fullgraph=True, backend="eager")
    def function(query):
        reasons = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query)
        return query + len(reasons)

    expected = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query)
    if device == "cpu":
        assert [each.constraint for each in expected] == ["dtype"] * (dtype == torch.float64)
    assert function(query).equal(query + len(expected))


@pytest.mark.parametrize(
    ("function", "tensors", "others"),
    [
        (megasoftmax.softmax, 1, ()),
        (megasoftmax.softmax_topk, 1, (2,)),
        (megasoftmax.attention, 3, ()),
    ],
)
def test_compiled_code_can_ask_why_on_a_cpu(function, tensors, others):
    """Nothing is patched: it also looks for the compiled part."""
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def ask(given):
        return given + len(megasoftmax.why_not_fused(function, *[given] * tensors, *others))

    given = torch.randn(1, 2, 3, 8)
    reasons = megasoftmax.why_not_fused(function, *[given] * tensors, *others)
    assert len(reasons) > 0
    assert ask(given).equal(given + len(reasons))


@pytest.mark.gpu
def test_compiled_adapters_ask_why():
    query = torch.randn(1, 2, 3, 8, device="cuda", dtype=torch.float64)

    @torch.compile(fullgraph=True, backend="eager")
    def function(query):
        return query + takes_attention(query, query, query, AttentionOptions())

    torch.testing.assert_close(function(query), query)
