"""Relative positions of speech encoders: transformers' conformers, and NeMo's layer."""

import copy
import importlib
import math
import sys
import types
import weakref
from contextlib import nullcontext

import pytest
import torch
from inputs import record_calls

pytest.importorskip("transformers")
from transformers import ParakeetForCTC, Wav2Vec2BertModel, Wav2Vec2ConformerModel
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TSpeechEncoder

from megasoftmax import ShiftedBias
from megasoftmax.integrations import conformers
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.names import NAMES
from megasoftmax.integrations.patching import patch_model
from megasoftmax.integrations.relative_shift import recomputed

BATCH, FRAMES, BINS, HEADS, SIZE = 3, 13, 16, 4, 8
WIDTH = HEADS * SIZE


# Encoders of transformers


_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_SIZES |= {"intermediate_size": 48}
_RELATIVE = {"conv_depthwise_kernel_size": 3, "position_embeddings_type": "relative"}
_CONVOLUTIONS = {"conv_dim": (WIDTH,), "conv_stride": (5,), "conv_kernel": (10,)}
_CONVOLUTIONS |= {"num_feat_extract_layers": 1, "num_conv_pos_embeddings": 16}
_CONVOLUTIONS |= {"num_conv_pos_embedding_groups": 2}
_SEAMLESS = {"hidden_size": WIDTH, "speech_encoder_layers": 2, "adaptor_kernel_size": 3}
_SEAMLESS |= {"speech_encoder_attention_heads": HEADS, "adaptor_stride": 2}
_SEAMLESS |= {"speech_encoder_intermediate_size": 48, "feature_projection_input_dim": BINS}
_PARAKEET = _SIZES | {"num_key_value_heads": HEADS, "num_mel_bins": BINS, "layerdrop": 0.0}
_PARAKEET |= {"subsampling_conv_channels": 8, "activation_dropout": 0.0}
_PARAKEET |= dict.fromkeys(("dropout", "dropout_positions", "attention_dropout"), 0.0)
ENCODERS = {
    "wav2vec2_conformer": (Wav2Vec2ConformerModel, _SIZES | _RELATIVE | _CONVOLUTIONS),
    "wav2vec2_bert": (
        Wav2Vec2BertModel,
        _SIZES | _RELATIVE | {"feature_projection_input_dim": BINS},
    ),
    "seamless_m4t": (SeamlessM4TSpeechEncoder, _SEAMLESS | _RELATIVE),
    "parakeet": (
        ParakeetForCTC,
        {"encoder_config": _PARAKEET, "vocab_size": 17, "pad_token_id": 0},
    ),
}


def build_encoder(name, **others):
    """Without dropout, with large weights."""
    torch.manual_seed(0)
    model_class, sizes = ENCODERS[name]
    config = model_class.config_class(**copy.deepcopy(sizes | others))
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            setattr(config, name, 0.0)
    model = model_class(config).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def build_sound(name, padded):
    generator = torch.Generator().manual_seed(1)
    if name == "wav2vec2_conformer":
        batch = {"input_values": torch.randn(BATCH, 5 * (FRAMES + 1), generator=generator)}
    else:
        frames = 8 * FRAMES if name == "parakeet" else FRAMES
        batch = {"input_features": torch.randn(BATCH, frames, BINS, generator=generator)}
    if padded:
        keep = torch.ones(next(iter(batch.values())).shape[:2], dtype=torch.long)
        keep[1, -keep.shape[1] // 3 :] = 0
        batch["attention_mask"] = keep
    return batch


def run(model, batch):
    """Results of a step of what is visible: the first example, and the beginning of the second."""
    model.zero_grad()
    output = model(**batch)[0]
    output = torch.cat([output[0], output[1, : output.shape[1] // 2], output[2]])
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output, gradients


@pytest.fixture
def calls(monkeypatch):
    """The tensors and options of calls of attention; a CPU takes the way of a GPU."""
    monkeypatch.setattr(integration, "takes_attention", lambda *given: True)
    return record_calls(monkeypatch, "attention")


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_trains_as_eager(name, padded, implementation, calls):
    eager = build_encoder(name)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    patch_model(ours, implementation=implementation)
    batch = build_sound(name, padded)
    (expected, gradients), (actual, our_gradients) = run(eager, batch), run(ours, batch)
    if expected.isnan().any():
        assert actual.isfinite().all()
        pytest.skip('"eager" of Parakeet in transformers 5.17 makes NaN of padding')
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * scale)
    for parameter, gradient in gradients.items():
        largest = 0 if gradient is None else gradient.abs().max().item()
        torch.testing.assert_close(
            our_gradients[parameter], gradient, rtol=1e-3, atol=1e-4 * (largest + scale)
        )
    assert all(
        gradient.any() for parameter, gradient in gradients.items() if "linear_pos" in parameter
    )
    if implementation == NAMES[0]:
        biases = [options["bias"] for _, options in calls if options["bias"] is not None]
        assert len(biases) == 2
        for bias in biases:
            assert isinstance(bias, ShiftedBias)
            assert bias.table.requires_grad
            frames, distances = bias.table.shape[-2:]
            # A row of scores has 2 * frames - 1 distances, and zeros up to a multiple of 8.
            assert distances == -(-(2 * frames - 1) // 8) * 8


@pytest.mark.parametrize("name", ["wav2vec2_conformer", "parakeet"])
def test_biases_are_made_again_in_the_backward_pass(name, calls, monkeypatch):
    """Other hooks of saved tensors, as of checkpointing, and torch.func keep them."""
    made = record_calls(monkeypatch, "position_scores", conformers)
    model, batch = build_encoder(name), build_sound(name, False)
    patch_model(model)
    _, gradients = run(model, batch)
    assert len(made) == 4  # of two layers
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        _, kept = run(model, batch)
    assert len(made) == 6
    for parameter, gradient in gradients.items():
        assert (gradient is None) == (kept[parameter] is None)
        assert gradient is None or torch.equal(gradient, kept[parameter])
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)[0]
    output.float().sum().backward()
    assert len(made) == 10
    del made[:4]
    parameters = dict(model.eval().named_parameters())  # transforms change no running means

    def loss(parameters):
        return torch.func.functional_call(model, parameters, kwargs=batch)[0].square().sum()

    found = torch.func.grad(loss)(parameters)
    assert len(made) == 8
    wanted = torch.autograd.grad(loss(parameters), [*parameters.values()], allow_unused=True)
    largest = max(other.abs().max().item() for other in wanted if other is not None)
    for gradient, other in zip(found.values(), wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("masking", ["none", "float", "bool", "more keys, causal"])
@pytest.mark.parametrize("output_attentions", [False, True])
def test_shifted_scores_beside_masks(masking, output_attentions):
    """Where keys are left out, or a mask is added, as where neither is."""
    keys = 7 if "more keys" in masking else 5
    layer = torch.nn.Module().eval()
    layer.is_causal = "causal" in masking
    query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, keys, 8)
    table = torch.randn(2, 3, 5, keys + 6)
    keep = torch.rand(2, 1, 5, keys) < 0.7
    mask = {"float": torch.where(keep, 0.0, -9.0), "bool": keep}.get(masking)
    found, expected = (
        integration.attention_forward(
            layer, query, key, key, mask, position_bias=bias, output_attentions=output_attentions
        )
        for bias in (ShiftedBias(table), ShiftedBias(table).dense(5, keys))
    )
    torch.testing.assert_close(found, expected)


def test_what_is_recomputed_is_not_kept():
    factor = torch.randn(3, 4, requires_grad=True)
    made = factor * 3
    storage = weakref.ref(made.untyped_storage())
    with recomputed(made, lambda: factor.detach() * 3):
        product = made * made
    del made
    assert storage() is None
    product.sum().backward()
    torch.testing.assert_close(factor.grad, 18 * factor.detach())


def test_other_positions_are_left_to_the_family(calls):
    eager = build_encoder("wav2vec2_bert", position_embeddings_type="relative_key")
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    patch_model(ours)
    batch = build_sound("wav2vec2_bert", True)
    torch.testing.assert_close(run(ours, batch)[0], run(eager, batch)[0], rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


def test_every_conformer_is_replaced():
    for original, ours in conformers.CONFORMERS.items():
        assert issubclass(ours, original)


# NeMo, by a stand-in with its interface


class RelPositionMultiHeadAttention(torch.nn.Module):
    """The interface of NeMo's layer, computed by explicit indices."""

    def __init__(
        self,
        n_head,
        n_feat,
        dropout_rate,
        pos_bias_u,
        pos_bias_v,
        max_cache_len=0,
        use_bias=True,
        use_pytorch_sdpa=False,
        use_pytorch_sdpa_backends=None,
    ):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        self.dropout_rate, self.cache_drop_size = dropout_rate, 0
        for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
            setattr(self, name, torch.nn.Linear(n_feat, n_feat, bias=use_bias))
        self.linear_pos = torch.nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = torch.nn.Parameter(torch.randn(self.h, self.d_k))
        self.pos_bias_v = torch.nn.Parameter(torch.randn(self.h, self.d_k))

    def update_cache(self, key, value, query, cache):
        if cache is None:
            return key, value, query, None
        key = value = torch.cat([cache, key], dim=1)
        kept = query.shape[1] - self.cache_drop_size
        return key, value, query, torch.cat([cache[:, kept:], query[:, :kept]], dim=1)

    def forward_qkv(self, query, key, value):
        projected = self.linear_q(query), self.linear_k(key), self.linear_v(value)
        return tuple(each.unflatten(2, (self.h, self.d_k)).transpose(1, 2) for each in projected)

    def forward(self, query, key, value, mask, pos_emb, cache=None):
        key, value, query, cache = self.update_cache(key, value, query, cache)
        query, key, value = self.forward_qkv(query, key, value)
        positions = self.linear_pos(pos_emb).unflatten(2, (self.h, self.d_k)).transpose(1, 2)
        by_distance = (query + self.pos_bias_v[:, None]) @ positions.mT
        queries, keys = query.shape[2], key.shape[2]
        index = torch.arange(keys) - torch.arange(queries)[:, None] + queries - 1
        moved = by_distance.gather(3, index.expand(len(by_distance), self.h, -1, -1))
        scores = ((query + self.pos_bias_u[:, None]) @ key.mT + moved) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None], -10000.0)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(mask[:, None], 0.0)
        weights = torch.nn.functional.dropout(weights, self.dropout_rate, self.training)
        output = self.linear_out((weights @ value).transpose(1, 2).flatten(2))
        return output if cache is None else (output, cache)


@pytest.fixture
def nemo(monkeypatch):
    """The adapter, with stand-ins of the two modules that it imports."""
    path = "nemo.collections.asr.parts.submodules.multi_head_attention"
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "nemo.utils", types.ModuleType("nemo.utils"))
    sys.modules[path].RelPositionMultiHeadAttention = RelPositionMultiHeadAttention
    sys.modules["nemo.utils"].avoid_float16_autocast_context = nullcontext
    name = "megasoftmax.integrations.nemo"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def build_nemo(dropout=0.0):
    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {"attention": RelPositionMultiHeadAttention(HEADS, WIDTH, dropout, None, None)}
    ).train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("cached", [0, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_nemo_layer_computes_the_same(nemo, masked, cached, dropout):
    own = build_nemo(dropout)
    ours = copy.deepcopy(own)
    patched = nemo.patch_model(ours)
    keys = FRAMES + cached
    sound = torch.randn(BATCH, FRAMES, WIDTH)
    positions = torch.randn(1, 2 * keys - 1, WIDTH)
    cache = torch.randn(BATCH, cached, WIDTH) if cached else None
    mask = torch.zeros(BATCH, FRAMES, keys, dtype=torch.bool)
    mask[1, :, -3:] = True
    mask[1, -3:] = True  # of a padded query nothing is visible
    results, caches = [], []
    for model in (own, ours):
        torch.manual_seed(4)
        result = model["attention"](sound, sound, sound, mask if masked else None, positions, cache)
        output = result[0] if cached else result
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
        (output * weights).sum().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
        caches.append(result[1] if cached else torch.empty(0))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(*caches)
    patched.unpatch()
    assert type(ours["attention"]) is RelPositionMultiHeadAttention


def test_report_of_patched_layers(nemo, monkeypatch):
    class Limited(RelPositionMultiHeadAttention):
        pass

    model = build_nemo()
    model["limited"] = Limited(HEADS, WIDTH, 0.0, None, None)
    model["traced"] = RelPositionMultiHeadAttention(HEADS, WIDTH, 0.0, None, None)
    model["traced"].forward = model["traced"].forward
    with nemo.patch_model(model) as patched:
        report = patched.report
        assert report["attention"].runs == "SDPA"
        assert "device: expected a CUDA device" in report["attention"].why
        assert report["limited"] == (
            "unchanged",
            "its class Limited is a subclass of one that would be replaced",
        )
        assert report["traced"] == ("unchanged", "its forward was replaced")
        assert patched.names == ("__class__",)
        assert repr(patched).count("\n") == 2
    assert patched.report["attention"] == ("unchanged", "not patched")
    monkeypatch.setenv("MEGASOFTMAX_DISABLE", "1")
    patched = nemo.patch_model(model)
    assert patched.names == ()
    assert patched.report["attention"] == ("unchanged", "MEGASOFTMAX_DISABLE=1")


def test_model_without_such_layers_is_an_error(nemo):
    with pytest.raises(ValueError, match=r"expected layers of .*RelPositionMulti.*; got Linear"):
        nemo.patch_model(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model: expected a module, got str"):
        nemo.patch_model("nemo")


def test_patched_layers_are_left_to_whoever_patched_them(nemo):
    model = build_nemo()
    with nemo.patch_model(model):
        inner = nemo.patch_model(model)
        assert inner.names == ()
        inner.unpatch()
        assert isinstance(model["attention"], tuple(nemo.LAYERS.values()))
