"""Nothing that a call computed answers for a later one: masks refilled, graphs, traces, inference.

Whoever owns a mask or a bias may change it between two passes of a model in ways that leave no
trace in its version.
"""

import io

import op_checks
import pytest
import torch
from inputs import normal
from models import BATCH, LENGTH, MODELS, build_batch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import megasoftmax
from megasoftmax import TileMask
from megasoftmax.biases import alibi_bias
from megasoftmax.integrations import flash_attn, sharing
from megasoftmax.integrations.names import NAMES
from megasoftmax.integrations.transformers import attention_forward, register


@pytest.fixture(autouse=True)
def registered():
    register()


class Model(nn.Module):
    """Of transformers, with logits alone."""

    def __init__(self, implementation, device, family="llama"):
        super().__init__()
        self.model = MODELS[family](attn_implementation=implementation).eval().to(device)

    def forward(self, ids, mask=None):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def masks_and_ids(device, dtype=torch.bool):
    """Two masks of the user, [batch, 1, queries, keys], True = keep or added, and tokens."""
    first = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).tril()
    first = first.expand(BATCH, 1, -1, -1).clone()
    generator = torch.Generator().manual_seed(0)
    other = torch.rand(first.shape, generator=generator).to(device) > 0.5
    other |= torch.eye(LENGTH, dtype=torch.bool, device=device)
    if dtype != torch.bool:
        first, other = (
            torch.zeros(m.shape, dtype=dtype, device=device).masked_fill(~m, -torch.inf)
            for m in (first, other)
        )
    return first, other, build_batch("none", device)["input_ids"]


def by_numpy(mask, new):
    mask.detach().cpu().numpy()[...] = new.cpu().numpy()  # shares memory on a CPU alone
    if mask.is_cuda:
        mask.data.copy_(new)


REFILLS = {
    "data": lambda mask, new: mask.data.copy_(new),
    "numpy": by_numpy,
    "in place": lambda mask, new: mask.copy_(new),
    "dlpack": lambda mask, new: torch.from_dlpack(mask.view(torch.uint8)).copy_(new),
}


@pytest.mark.parametrize("refill", REFILLS)
@pytest.mark.parametrize("implementation", NAMES)
def test_a_refilled_mask_is_seen(implementation, refill, device):
    mask, other, ids = masks_and_ids(device)
    model = Model(implementation, device)
    with torch.no_grad():
        before, wanted = model(ids, mask), model(ids, other)
        REFILLS[refill](mask, other)
        assert mask.equal(other)
        after = model(ids, mask)
    assert not torch.allclose(before, wanted, atol=1e-2)
    torch.testing.assert_close(after, wanted, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", NAMES)
def test_replays_see_a_refilled_mask(implementation):
    mask, other, ids = masks_and_ids("cuda")
    model = Model(implementation, "cuda").half()
    with torch.no_grad():
        graph, logits = op_checks.capture(lambda: model(ids, mask))
        wanted = model(ids, other)
        mask.copy_(other)
        graph.replay()
    torch.testing.assert_close(logits, wanted, rtol=0, atol=0)


@pytest.mark.gpu
def test_replays_see_what_a_tile_mask_holds():
    """Its note was made before the graph was captured."""
    query, key, value = (normal(1, 2, 200, 64, device="cuda", seed=i).bfloat16() for i in range(3))
    excluded = torch.ones(200, 200, dtype=torch.bool, device="cuda").triu(1)
    shared = megasoftmax.TileMask(excluded)
    other = excluded.T.contiguous()
    graph, output = op_checks.capture(lambda: megasoftmax.attention(query, key, value, mask=shared))
    wanted = megasoftmax.attention(query, key, value, mask=other)
    excluded.copy_(other)
    graph.replay()
    torch.testing.assert_close(output, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bool", "float", "position bias"])
def test_inference_mode_before_training(kind, device):
    if kind == "position bias":
        layer = nn.Module()
        bias = normal(1, LENGTH, LENGTH, 4, device=device).permute(0, 3, 1, 2)  # as T5's lies
        query = normal(2, 4, LENGTH, 64, device=device).requires_grad_()

        def step():
            return attention_forward(layer, query, query, query, None, position_bias=bias)[0].sum()

        parameters = [query]
    else:
        dtype = torch.bool if kind == "bool" else torch.float32
        mask, _, ids = masks_and_ids(device, dtype)
        model = Model(NAMES[0], device)
        parameters = list(model.parameters())

        def step():
            return model(ids, mask).square().sum()

    def evaluate_then_train():
        with torch.inference_mode():
            step()
        return torch.autograd.grad(step(), parameters)

    wanted = torch.autograd.grad(step(), parameters)
    torch.testing.assert_close(sharing.in_a_pass(evaluate_then_train), wanted)


def test_a_mask_that_was_used_is_saved_as_it_was(device):
    mask, _, ids = masks_and_ids(device)
    attributes = dict(vars(mask))
    sizes, file = [], io.BytesIO()
    for _ in range(2):
        file = io.BytesIO()
        torch.save(mask, file)
        sizes.append(file.tell())
        Model(NAMES[0], device)(ids, mask)
    file.seek(0)
    assert torch.load(file).equal(mask)
    assert (sizes[0], vars(mask)) == (sizes[1], attributes)


@pytest.mark.parametrize("implementation", NAMES)
def test_layers_share_within_a_pass_alone(implementation, monkeypatch):
    mask, _, ids = masks_and_ids("cpu")
    inverted = []

    def recording(tensor, excluded):
        def counted(mask):
            inverted.append(mask)
            return excluded(mask)

        return original(tensor, counted)

    original = sharing.with_tiles
    monkeypatch.setattr("megasoftmax.integrations.transformers.with_tiles", recording)
    model = Model(implementation, "cpu")
    assert model.model.config.num_hidden_layers > 1
    for passes in (1, 2):
        model(ids, mask)
        assert len(inverted) == passes
    model.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, mask)
    assert not sharing.can_share(mask)


def test_a_pass_keeps_few_masks_and_sees_changes():
    def share():
        mask = torch.zeros(2, 2, dtype=torch.bool)
        first = sharing.made_once(mask, "inverted", torch.logical_not)
        assert sharing.made_once(mask, "inverted", torch.logical_not) is first
        with torch.no_grad():
            assert sharing.made_once(mask, "inverted", torch.logical_not) is not first
        mask[0] = True
        assert sharing.made_once(mask, "inverted", torch.logical_not).equal(~mask)
        for _ in range(9):
            sharing.made_once(torch.zeros(2), "inverted", torch.logical_not)
        assert len(sharing._pass.made or {}) == sharing._MOST

    sharing.in_a_pass(share)


def test_layers_computed_again_after_the_pass_save_as_many_tensors():
    """Kernels keep a block mask beside a mask: so it must be a TileMask both times."""
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    within = sharing.in_a_pass(lambda: sharing.with_tiles(mask, torch.logical_not))
    assert type(within) is type(sharing.with_tiles(mask, torch.logical_not)) is TileMask


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_checkpoints_with_a_mask_of_the_user(family, use_reentrant, device):
    mask, _, ids = masks_and_ids(device)
    gradients = []
    for checkpoints in (False, True):
        model = MODELS[family](attn_implementation=NAMES[0]).train().to(device)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


# Tracing


@pytest.mark.parametrize("family", ["llama", "t5", "gemma2"])
def test_model_that_compiles_itself_is_one_graph(family):
    """Its pass begins before the compiled code does."""
    model, batch = (
        MODELS[family](attn_implementation=NAMES[0]).eval(),
        build_batch("left", name=family),
    )
    with torch.no_grad():
        wanted = model(**batch, use_cache=False).logits
        model.compile(backend="eager", fullgraph=True)
        found = model(**batch, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


TRACES = {
    "jit.trace": lambda model, *args: torch.jit.trace(model, args, check_trace=False),
    "make_fx real": lambda model, *args: make_fx(model)(*args),
    "make_fx fake": lambda model, *args: make_fx(
        model, tracing_mode="fake", _allow_non_fake_inputs=True
    )(*args),
    "make_fx symbolic": lambda model, *args: make_fx(
        model, tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(*args),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("implementation", NAMES)
def test_trace_after_a_pass(implementation, kind, grad, device):
    """A program that was traced with one mask takes another."""
    mask, other, ids = masks_and_ids(device)
    model = Model(implementation, device)
    with torch.set_grad_enabled(grad):
        model(ids, mask)
        wanted = model(ids, other)
        traced = TRACES[kind](model, ids, mask)
        torch.testing.assert_close(traced(ids, other), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("implementation", NAMES)
def test_trace_of_a_causal_model(implementation, padding, device):
    """Its sizes are tensors. What is traced can be saved, and has gradients."""
    batch = build_batch(padding, device)
    inputs = (batch["input_ids"], batch.get("attention_mask"))[: 1 + (padding != "none")]
    real = inputs[-1].bool() if padding != "none" else torch.ones_like(inputs[0]).bool()
    model = Model(implementation, device)
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, inputs, check_trace=False), file)
    file.seek(0)
    traced = torch.jit.load(file)
    actual, wanted = (each(*inputs)[real] for each in (traced, model))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    gradients = {name: each for name, each in traced.named_parameters() if each.requires_grad}
    found = torch.autograd.grad(actual.square().sum(), list(gradients.values()))
    parameters = dict(model.named_parameters())
    same = [parameters[name] for name in gradients]
    expected = torch.autograd.grad(wanted.square().sum(), same)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


MASK = normal(8, 8, device="cpu") > 0.7
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
CALLS = {
    "attention": lambda q, k, v: megasoftmax.attention(q, k, v),
    "causal": lambda q, k, v: megasoftmax.attention(q, k, v, causal=True),
    "window": lambda q, k, v: megasoftmax.attention(q, k, v, window=(2, 1)),
    "mask": lambda q, k, v: megasoftmax.attention(q, k, v, mask=MASK.to(q.device)),
    "drop-in": lambda q, k, v: megasoftmax.scaled_dot_product_attention(
        q, k, v, ~MASK.to(q.device)
    ),
    "varlen": lambda q, k, v: megasoftmax.attention_varlen(
        *(each[0].transpose(0, 1) for each in (q, k, v)), torch.tensor([0, 3, 8], device=q.device)
    ),
    "softmax": lambda q, k, v: megasoftmax.softmax(q @ k.mT, causal=True) @ v,
    "softmax alone": lambda q, k, v: megasoftmax.softmax(q @ k.mT) @ v,
    "softmax dim 1": lambda q, k, v: megasoftmax.softmax(q, dim=1),
    "topk": lambda q, k, v: megasoftmax.softmax_topk(q, 3, renormalize=True)[0],
    "bias by distance": lambda q, k, v: megasoftmax.attention(
        q, k, v, bias=alibi_bias(SLOPES.to(q.device), q.shape[2], k.shape[2])
    ),
    "chunks": lambda q, k, v: megasoftmax.attention(
        q, k, v, visible=megasoftmax.ranges.chunks(4, q.shape[2], device=q.device)
    ),
    "flash_attn": lambda q, k, v: flash_attn.flash_attn_func(
        *(each.transpose(1, 2) for each in (q, k, v)), alibi_slopes=SLOPES.to(q.device)
    ),
    "dropout": lambda q, k, v: megasoftmax.attention(
        q, k, v, dropout=0.5, seed=torch.ones(1, dtype=torch.int64, device=q.device)
    ),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("call", CALLS)
def test_traces_of_functions(call, kind, device):
    q, k, v = (normal(2, 4, 8, 16, device=device, seed=i) for i in range(3))
    traced = TRACES[kind](CALLS[call], q, k, v)
    torch.testing.assert_close(traced(k, v, q), CALLS[call](k, v, q), rtol=1e-4, atol=1e-4)


def test_export_after_a_pass(device):
    mask, other, ids = masks_and_ids(device)
    model = Model(NAMES[0], device)
    with torch.no_grad():
        model(ids, mask)
        exported = torch.export.export(model, (ids, mask), strict=False).module()
        torch.testing.assert_close(exported(ids, other), model(ids, other), rtol=1e-4, atol=1e-4)
