"""FusedAttention against the plain formula in float64, and in training against plain torch."""

import copy

import oracle
import pytest
import torch
from einops import rearrange
from inputs import attention_as_defined, coin, drawn, normal

import megasoftmax
from megasoftmax import FusedAttention, biases

BATCH, HEADS, KEY_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 8, 6
SHAPES = [(7, 7), (1, 9), (3, 11)]
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (2, 0)},
    "sink": {"sink": True},
    "t5": {"relative_buckets": 8, "max_distance": 6},
    "t5 causal": {"relative_buckets": 8, "max_distance": 6, "causal": True, "sink": True},
    "alibi": {"alibi_slopes": biases.alibi_slopes(HEADS)},
    "alibi learnt": {"alibi_slopes": torch.nn.Parameter(biases.alibi_slopes(HEADS))},
}
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def build(options, device="cpu", dtype=torch.float32):
    """With learnt parameters that are not 0."""
    torch.manual_seed(0)
    attention = FusedAttention(HEADS, **copy.deepcopy(options)).to(device, dtype)
    for parameter in (attention.sink, attention.relative_bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return attention


def make_inputs(queries, keys, device="cpu", dtype=torch.float32):
    shapes = (
        (BATCH, HEADS, queries, HEAD_DIM),
        (BATCH, KEY_HEADS, keys, HEAD_DIM),
        (BATCH, KEY_HEADS, keys, VALUE_DIM),
    )
    return drawn(*shapes, device=device, dtype=dtype)


def t5_buckets(relative, buckets, max_distance, causal):
    modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    return modeling_t5.T5Attention._relative_position_bucket(
        relative, bidirectional=not causal, num_buckets=buckets, max_distance=max_distance
    )


def plain(attention, query, key, value, bias=None, mask=None):
    """The formula in float64, with a bias [..., heads, queries, keys] of all that is added."""
    queries, keys = query.shape[2], key.shape[2]
    own = torch.arange(keys - queries, keys, device=query.device)[:, None]
    relative = torch.arange(keys, device=query.device) - own
    added = torch.zeros(()) if bias is None else bias.double()
    if attention.relative_bias is not None:
        weight, max_distance = attention.relative_bias.double(), attention.max_distance
        buckets = t5_buckets(relative, len(weight), max_distance, attention.causal)
        added = added + rearrange(weight[buckets], "m n heads -> heads m n")
    if attention.alibi_slopes is not None:
        added = added - attention.alibi_slopes.double()[:, None, None] * relative.abs()
    excluded = oracle.excluded_entries(relative, None, attention.causal, attention.window)
    if mask is not None:
        excluded = excluded | mask
    options = {"scale": attention.scale, "bias": added, "excluded": excluded}
    return attention_as_defined(query, key, value, **options, sink=attention.sink)[0]


def assert_same(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


# Values and gradients


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_formula_and_gradients(shape, options, dtype, device):
    attention = build(options, device, dtype)
    inputs = make_inputs(*shape, device, dtype)
    queries, keys = shape
    bias = normal(1, HEADS, queries, keys, device=device, dtype=dtype, seed=4).requires_grad_()
    mask = coin(BATCH, 1, 1, keys, device=device)
    mask[..., ::2] = False  # something is left of every window
    learnt = [*inputs, *attention.parameters()]
    for arguments, more in (((), []), ((bias, mask), [bias])):
        actual = attention(*inputs, *arguments)
        assert actual.shape == (BATCH, HEADS, queries, VALUE_DIM)
        assert actual.dtype == dtype
        assert actual.transpose(1, 2).is_contiguous()
        expected = plain(attention, *inputs, *arguments)
        assert_same(actual, expected, dtype)
        gradient = normal(*actual.shape, device=device, seed=5).to(dtype)
        gradients = torch.autograd.grad(actual, learnt + more, gradient)
        expected = torch.autograd.grad(expected, learnt + more, gradient.double())
        for mine, theirs in zip(gradients, expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert_same(mine / (1 + theirs.abs().max()), theirs / (1 + theirs.abs().max()), dtype)


@pytest.mark.parametrize("kind", [biases.RelativeBias, biases.ShiftedBias])
@pytest.mark.parametrize("options", [OPTIONS["t5"], OPTIONS["alibi"], {}], ids=str)
def test_relative_bias_of_the_call(options, kind, device):
    """Two tables by distance stay a table; alone, either is the bias."""
    attention = build(options, device)
    inputs = make_inputs(3, 11, device)
    shape = (HEADS, 13) if kind is biases.RelativeBias else (HEADS, 3, 13)
    table = normal(*shape, device=device).requires_grad_()
    bias = kind(table)
    actual = attention(*inputs, bias)
    expected = plain(attention, *inputs, bias.dense(3, 11))
    assert_same(actual, expected, torch.float32)
    gradients = (torch.autograd.grad(output.square().sum(), table) for output in (actual, expected))
    assert_same(*map(torch.cat, gradients), torch.float32)


@pytest.mark.parametrize("options", [OPTIONS["t5"], {}], ids=str)
def test_bias_of_triangle_attention(options, device):
    """A pair bias: one per structure, shared by the rows; the mask hides keys of each row."""
    rows = 3
    attention = build(options, device)
    query, key, value = make_inputs(5, 5, device)
    of_rows = [torch.stack([tensor * (i + 1) for i in range(rows)], 1) for tensor in (query, key)]
    value = value.unsqueeze(1).expand(-1, rows, -1, -1, -1)
    pair = normal(BATCH, HEADS, 5, 5, device=device)
    mask = coin(BATCH, rows, 1, 1, 5, device=device)
    found = attention(*of_rows, value, pair.unsqueeze(1), mask)
    for row in range(rows):
        of_row = [tensor[:, row] for tensor in (*of_rows, value)]
        expected = plain(attention, *of_row, pair, mask[:, row])
        assert_same(found[:, row], expected, torch.float32)


# As a module


def test_parameters_and_buffers():
    attention = FusedAttention(HEADS, sink=True, relative_buckets=8)
    shapes = {name: tuple(tensor.shape) for name, tensor in attention.state_dict().items()}
    assert shapes == {"sink": (HEADS,), "relative_bias": (8, HEADS)}
    assert not any(parameter.any() for parameter in attention.parameters())
    assert not list(FusedAttention(HEADS).state_dict())
    fixed = FusedAttention(HEADS, alibi_slopes=biases.alibi_slopes(HEADS))
    assert list(fixed.state_dict()) == ["alibi_slopes"]
    assert not list(fixed.parameters())
    slopes = torch.nn.Parameter(biases.alibi_slopes(HEADS))
    assert next(FusedAttention(HEADS, alibi_slopes=slopes).parameters()) is slopes


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_dict_and_copies(options):
    attention = build(options)
    inputs = make_inputs(7, 7)
    expected = attention(*inputs)
    loaded = FusedAttention(HEADS, **copy.deepcopy(options))
    loaded.load_state_dict(attention.state_dict())
    assert torch.equal(loaded(*inputs), expected)
    copied = copy.deepcopy(attention)
    assert torch.equal(copied(*inputs), expected)
    own = {parameter.data_ptr() for parameter in attention.parameters()}
    assert not own & {parameter.data_ptr() for parameter in copied.parameters()}


def test_takes_the_weight_of_t5():
    modeling_t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = modeling_t5.T5Config(num_heads=HEADS, relative_attention_num_buckets=8)
    layer = modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention = FusedAttention(HEADS, scale=1.0, relative_buckets=8)
    attention.load_state_dict({"relative_bias": layer.relative_attention_bias.weight})
    inputs = make_inputs(7, 7)
    expected = FusedAttention(HEADS, scale=1.0)(*inputs, layer.compute_bias(7, 7))
    assert_same(attention(*inputs), expected, torch.float32)


def test_repr():
    attention = FusedAttention(HEADS, causal=True, window=(3, 0), sink=True, relative_buckets=8)
    assert repr(attention) == (
        "FusedAttention(4, causal=True, window=(3, 0), sink=True, relative_buckets=8, "
        "max_distance=128)"
    )
    alibi = FusedAttention(HEADS, scale=0.5, alibi_slopes=biases.alibi_slopes(HEADS))
    assert repr(alibi) == "FusedAttention(4, scale=0.5, alibi=True)"


def test_says_why_not_fused():
    attention, inputs = build(OPTIONS["t5"]), make_inputs(7, 7)
    for reasons in (
        attention.why_not_fused(*inputs, mask=torch.zeros(7, 7, dtype=torch.bool)),
        megasoftmax.why_not_fused(attention, *inputs),
    ):
        assert "device" in [reason.constraint for reason in reasons]


@pytest.mark.gpu
def test_runs_fused_on_a_gpu():
    for options in OPTIONS.values():
        attention = build(options, "cuda", torch.bfloat16)
        assert attention.why_not_fused(*make_inputs(7, 7, "cuda", torch.bfloat16)) == ()


def test_compiles_whole():
    attention = build(OPTIONS["t5 causal"])
    compiled = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    for shape in SHAPES:
        inputs = make_inputs(*shape)
        assert_same(compiled(*inputs), attention(*inputs), torch.float32)


# Wrong use


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads: .*from 1 on, got 0"),
        ({"window": (-2, 0)}, ValueError, r"window: .* got \(-2, 0\)"),
        ({"window": 4}, TypeError, "window: .* got int"),
        ({"relative_buckets": 3}, ValueError, "relative_buckets: .*from 4 on, got 3"),
        ({"relative_buckets": 8, "max_distance": 2}, ValueError, "max_distance: .* got 2"),
        ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes: .* got float"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes: expected \[4\], got \[3\]"),
        (
            {"alibi_slopes": torch.ones(4), "relative_buckets": 8},
            ValueError,
            "relative_buckets, alibi_slopes: .* got both",
        ),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        FusedAttention(**({"heads": HEADS} | options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"query": torch.zeros(2, 3, 7, 8)},
            ValueError,
            r"query: expected .\.\.\., 4, .*2, 3, 7, 8",
        ),
        ({"query": torch.zeros(7, 8)}, ValueError, r"query: expected .\.\.\., 4, .*\(7, 8\)"),
        ({"key": [1.0]}, TypeError, "key: expected a tensor of torch.float32, as query, got list"),
        ({"bias": torch.zeros(2, 7, 7)}, ValueError, r"bias: expected .*, got \(2, 7, 7\)"),
        ({"mask": torch.zeros(7, 7)}, TypeError, "mask: expected a bool tensor"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    attention = build(OPTIONS["t5"])
    query, key, value = make_inputs(7, 7)
    arguments = {"query": query, "key": key, "value": value} | change
    for call in (attention, attention.why_not_fused):
        with pytest.raises(error, match=message):
            call(**arguments)


# In training


@pytest.mark.parametrize("autocast", [False, True])
def test_training_follows_the_parameters(autocast, device):
    """Losses and parameters of 10 steps of the module and of the formula."""
    inputs = [each.to(device) for each in make_inputs(7, 7)]  # the same draws on all devices
    target = normal(BATCH, HEADS, 7, VALUE_DIM, device="cpu", seed=6).to(device)
    results = []
    for call in (FusedAttention.__call__, plain):
        attention = build(OPTIONS["t5 causal"]).to(device)
        optimizer = torch.optim.AdamW(attention.parameters(), lr=0.3, eps=1e-5)
        losses = []
        for _ in range(10):
            with torch.autocast(device, torch.bfloat16, enabled=autocast and call is not plain):
                output = call(attention, *inputs)
            loss = (output - target).double().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((losses, attention.state_dict()))
    (losses, parameters), (expected, expected_parameters) = results
    assert expected[-1] < expected[0] - 0.03
    rtol, atol = (5e-2, 2e-2) if autocast else (1e-3, 1e-4)
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=atol)
    if not autocast:
        torch.testing.assert_close(parameters, expected_parameters, rtol=1e-2, atol=1e-3)
