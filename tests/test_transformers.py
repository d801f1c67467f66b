"""attn_implementation="megasoftmax" against "eager": same weights, same batch, same results.

The models are tiny and have random weights with a large deviation, so that attention decides the
result; `test_planted_fault_is_caught` shows that the comparisons see what they are meant to see.
"""

import copy
import math

import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import megasoftmax
from megasoftmax.integrations import transformers as integration

VOCABULARY, BATCH, LENGTH = 97, 3, 12
LLAMA_LIKE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GPT2_SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2_SIZES),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA_LIKE),
    "mistral": (MistralForCausalLM, MistralConfig, LLAMA_LIKE | {"sliding_window": 5}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        LLAMA_LIKE | {"sliding_window": 5, "num_local_experts": 4},
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, LLAMA_LIKE),
}
PADDINGS = ("none", "right", "left", "middle")


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


@pytest.fixture(params=["gpt2", "llama"])
def family(request):
    return request.param


def build_pair(family, device="cpu", dtype=torch.float32, **config):
    """(ours, eager): two copies of one model in training mode."""
    model_class, config_class, sizes = FAMILIES[family]
    torch.manual_seed(0)
    eager = model_class(config_class(**(sizes | config), attn_implementation="eager"))
    eager = eager.to(device, dtype).train()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("megasoftmax")
    return ours, eager


def build_batch(padding="none", device="cpu"):
    """Token ids, mask and labels; the label of a token after padding is dropped too.

    That label is predicted at a padded position, where the two implementations differ by design.
    """
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    if padding == "right":
        keep[1, -4:], keep[2, -7:] = 0, 0
    elif padding == "left":
        keep[1, :4], keep[2, :7] = 0, 0
    elif padding == "middle":
        keep[1, 3:6] = 0
    predicted_by_padding = torch.roll(keep, 1, dims=1) == 0
    labels = ids.masked_fill((keep == 0) | predicted_by_padding, -100)
    batch = {"input_ids": ids, "labels": labels}
    if padding != "none":
        batch["attention_mask"] = keep
    return {name: tensor.to(device) for name, tensor in batch.items()}


def assert_same_step(ours, eager, batch, rtol=1e-5, atol=1e-5, **arguments):
    """Logits of the real tokens, loss and the gradient of every parameter."""
    results = {}
    for name, model in (("ours", ours), ("eager", eager)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        output = model(**batch, **arguments)
        output.loss.backward()
        results[name] = output
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    expected, actual = results["eager"].logits[real], results["ours"].logits[real]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(results["ours"].loss, results["eager"].loss, rtol=rtol, atol=atol)
    gradients, expected_gradients = (
        {name: parameter.grad for name, parameter in model.named_parameters()}
        for model in (ours, eager)
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=rtol, atol=atol)


def record_softmax_calls(monkeypatch):
    """The (scores, options) of every call of megasoftmax.softmax, which still works."""
    calls, softmax = [], megasoftmax.softmax

    def recording(scores, **options):
        calls.append((scores, options))
        return softmax(scores, **options)

    monkeypatch.setattr(megasoftmax, "softmax", recording)
    return calls


# Training


@pytest.mark.parametrize("padding", PADDINGS)
def test_training_step(family, padding, device):
    ours, eager = build_pair(family, device)
    assert_same_step(ours, eager, build_batch(padding, device))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("other_family", ["mistral", "gpt_oss"])
def test_training_step_with_windows_and_sinks(other_family, padding):
    ours, eager = build_pair(other_family)
    assert_same_step(ours, eager, build_batch(padding))


def test_packed_sequences(family):
    ours, eager = build_pair(family)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, -1)
    batch = build_batch() | {"position_ids": positions}
    assert_same_step(ours, eager, batch, use_cache=False)
    without = ours(**build_batch(), use_cache=False).logits
    packed = ours(**batch, use_cache=False).logits
    assert (packed - without).abs().max() > 0.1


def test_bidirectional_llama():
    ours, eager = build_pair("llama", is_causal=False)
    for padding in PADDINGS:
        assert_same_step(ours, eager, build_batch(padding))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize(
    "option", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "scale_attn_weights"]
)
def test_gpt2_options(option, padding):
    ours, eager = build_pair("gpt2", **{option: option != "scale_attn_weights"})
    assert_same_step(ours, eager, build_batch(padding))


@pytest.mark.parametrize("autocast", [False, True])
def test_gpt2_upcast_keeps_float32_scores(autocast):
    """Scores near 300 in bfloat16 are off by one: without the upcast the weights would differ."""
    ours, _ = build_pair("gpt2", dtype=torch.bfloat16, reorder_and_upcast_attn=True)
    layer = ours.transformer.h[0].attn.eval()
    torch.manual_seed(3)
    query, key, value = (torch.randn(3, 2, 4, 9, 8) * 10).bfloat16()
    expected, _ = layer._upcast_and_reordered_attn(query, key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual, _ = integration.attention_forward(
            layer, query, key, value, None, scaling=layer.scaling, is_causal=False
        )
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("padding", ["none", "right"])
def test_gpt2_cross_attention(padding):
    ours, eager = build_pair("gpt2", add_cross_attention=True)
    torch.manual_seed(4)
    encoded = torch.randn(BATCH, 7, 32)
    keep = torch.ones(BATCH, 7, dtype=torch.long)
    keep[1, 4:] = 0
    memory = {"encoder_hidden_states": encoded}
    memory |= {"encoder_attention_mask": keep} if padding == "right" else {}
    assert_same_step(ours, eager, build_batch(padding), **memory)


def test_dropout_with_equal_seeds(family, device):
    option = "attn_pdrop" if family == "gpt2" else "attention_dropout"
    ours, eager = build_pair(family, device, **{option: 0.5})
    batch = build_batch("left", device)
    assert_same_step(ours, eager, batch)
    dropped, kept = ours(**batch).logits, ours.eval()(**batch).logits
    assert (dropped - kept).abs().max() > 0.1
    torch.testing.assert_close(kept, ours(**batch).logits, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(family, reentrant):
    ours, eager = build_pair(family)
    for model in (ours, eager):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(ours, eager, build_batch("left"), use_cache=False)


def test_several_steps(family, device):
    """Losses and parameters over 32 steps of AdamW; tolerances of Liger's convergence tests.

    Its epsilon keeps the biases of keys, whose true gradient is 0, from following rounding noise.
    """
    models = build_pair(family, device)
    losses = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        losses.append([])
        for step in range(32):
            loss = model(**build_batch(PADDINGS[step % 4], device)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0] - 0.5
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-5, atol=1e-8)
    parameters, expected = (dict(model.named_parameters()) for model in models)
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=5e-3)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_accurate_as_eager(family, autocast, device):
    exact = build_pair(family, device)[1]
    pair = build_pair(family, device, torch.float32 if autocast else torch.bfloat16)
    batch = build_batch("left", device)
    real = batch["attention_mask"].bool()
    expected = exact(**batch).logits[real]
    errors = []
    for model in pair:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            output = model(**batch)
        output.loss.backward()
        assert output.logits.dtype == torch.bfloat16
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        errors.append((output.logits[real].float() - expected).abs().mean().item())
    assert errors[0] <= 1.25 * errors[1]
    assert errors[0] < 0.02 * expected.abs().max()


def test_compiles_without_graph_breaks(family):
    ours, eager = build_pair(family)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    for padding in ("none", "left"):
        batch = build_batch(padding)
        del batch["labels"]  # the loss function of transformers logs, which breaks the graph
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        actual = compiled(**batch, use_cache=False).logits[real]
        expected = eager(**batch, use_cache=False).logits[real]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# Generation


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(family, cache, padding, device):
    ours, eager = build_pair(family, device)
    batch = build_batch(padding, device)
    del batch["labels"]
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    actual = ours.eval().generate(**batch, **options)
    expected = eager.eval().generate(**batch, **options)
    assert actual.sequences.equal(expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert len(expected.sequences[0, LENGTH:].unique()) > 4


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("other_family", ["mistral", "gpt_oss"])
def test_generate_past_the_window(other_family, padding):
    ours, eager = build_pair(other_family)
    batch = build_batch(padding)
    del batch["labels"]
    for cache in ("dynamic", "static"):
        options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
        actual, expected = (m.eval().generate(**batch, **options) for m in (ours, eager))
        assert actual.equal(expected)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("static", [False, True])
def test_prefill_in_two_parts(family, static, padding):
    """The second part has more keys than queries, and with a static cache unused keys as well."""
    pair = build_pair(family)
    batch = build_batch(padding)
    ids, keep = batch["input_ids"], batch.get("attention_mask")
    logits = []
    for model in pair:
        cache = StaticCache(model.config, max_cache_len=LENGTH + 5) if static else None
        for part in (slice(0, 7), slice(7, LENGTH)):
            seen = None if keep is None else keep[:, : part.stop]
            output = model.eval()(ids[:, part], attention_mask=seen, past_key_values=cache)
            cache = output.past_key_values
        logits.append(output.logits)
    real = torch.ones(BATCH, LENGTH - 7, dtype=torch.bool) if keep is None else keep[:, 7:].bool()
    torch.testing.assert_close(logits[0][real], logits[1][real], rtol=1e-5, atol=1e-5)


# What the softmax is asked for


def test_padded_causal_training_needs_no_square_mask(family, monkeypatch):
    calls = record_softmax_calls(monkeypatch)
    ours, _ = build_pair(family)
    ours(**build_batch("left"))
    assert len(calls) == 2
    for scores, options in calls:
        assert scores.shape == (BATCH, 4, LENGTH, LENGTH)
        assert options["mask"].shape == (BATCH, 1, 1, LENGTH)
        assert options["causal"] is True
        assert options["scale"] == pytest.approx(8**-0.5)
        assert options["bias"] is None
        assert options["window"] is None


@pytest.mark.parametrize(
    ("queries", "keys", "query_offset", "key_offset", "tokens"),
    [
        (6, 6, 0, 0, 6),
        (2, 6, 4, 0, 6),
        (1, 6, 5, 0, 6),
        (2, 6, 9, 5, 11),  # a cache that forgets its first tokens
        (2, 6, 4, 0, 4),  # a mask that is too short: what is missing is excluded
        (2, 6, 4, 0, 9),
        (2, 9, 4, 0, 6),  # upper-left: more keys than the last query may see
    ],
)
def test_mask_is_that_of_sdpa(queries, keys, query_offset, key_offset, tokens):
    keep = torch.rand(2, tokens, generator=torch.Generator().manual_seed(6)) > 0.3
    sizes = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": query_offset,
        "kv_offset": key_offset,
        "attention_mask": keep,
    }
    expected = sdpa_mask(**sizes, allow_is_causal_skip=False)
    needs_tensor = integration.make_mask(**sizes, allow_is_causal_skip=False)
    assert needs_tensor.equal(expected)
    mask = integration.make_mask(**sizes)
    if keys == 9:
        assert mask.equal(expected)
        return
    assert mask.excluded.shape == (2, 1, 1, keys)
    assert mask.causal
    below_diagonal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert (~mask.excluded & below_diagonal).equal(expected)


def test_prefill_of_a_static_cache_skips_the_unused_keys(family, monkeypatch):
    calls = record_softmax_calls(monkeypatch)
    ours, _ = build_pair(family)
    cache = StaticCache(ours.config, max_cache_len=LENGTH + 5)
    ours(build_batch()["input_ids"], past_key_values=cache)
    for scores, options in calls:
        assert scores.shape == (BATCH, 4, LENGTH, LENGTH)
        assert options["mask"] is None
        assert options["causal"] is True


@pytest.mark.parametrize("causal", [True, False])
def test_window_without_a_mask(causal):
    torch.manual_seed(5)
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    module = torch.nn.Module().eval()
    output, probabilities = integration.attention_forward(
        module, query, key, value, None, dropout=0.5, is_causal=causal, sliding_window=3
    )
    distance = torch.arange(9)[:, None] - torch.arange(9)
    visible = (distance >= 0) & (distance < 3) if causal else distance.abs() <= 3
    scores = (query @ key.transpose(-1, -2) / math.sqrt(8)).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(probabilities, scores.softmax(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output, (scores.softmax(-1) @ value).transpose(1, 2))
    assert output.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_of_the_user(family, dtype):
    """A 4-d tensor is the whole mask: True = keep, or added to the scores."""
    ours, eager = build_pair(family)
    batch = build_batch()
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[:, 3] = False
    visible[3, 3] = True
    visible = visible.expand(BATCH, 1, -1, -1)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    mask = visible if dtype == torch.bool else added
    actual = ours(**batch, attention_mask=mask).logits
    expected = eager(**batch, attention_mask=added).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_output_attentions(family):
    ours, eager = build_pair(family)
    batch = build_batch("left")
    actual = ours.eval()(**batch, output_attentions=True).attentions
    expected = eager.eval()(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    assert len(actual) == len(expected) == 2
    for layer_actual, layer_expected in zip(actual, expected, strict=True):
        rows, rows_expected = layer_actual.transpose(1, 2), layer_expected.transpose(1, 2)
        torch.testing.assert_close(rows[real], rows_expected[real], rtol=1e-5, atol=1e-6)
        assert rows[~real].count_nonzero() == 0  # queries without a visible key


# Wrong use


@pytest.mark.parametrize("argument", ["softcap", "position_bias", "cache", "sinks"])
def test_unsupported_argument_is_named(argument):
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=argument):
        integration.attention_forward(
            torch.nn.Module(), query, query, query, None, **{argument: torch.ones(())}
        )


def test_softcap_of_a_model_is_refused():
    ours, _ = build_pair("gemma2")
    with pytest.raises(ValueError, match="softcap"):
        ours(**build_batch())


def test_mask_with_two_dimensions_is_refused():
    query = torch.randn(3, 2, 3, 4)
    with pytest.raises(ValueError, match=r"attention_mask.*\(3, 3\)"):
        integration.attention_forward(
            torch.nn.Module(), query, query, query, torch.ones(3, 3, dtype=torch.bool)
        )


def test_class_without_attention_interface_does_not_lose_its_mask():
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    model = BloomForCausalLM(config)
    model.set_attn_implementation("megasoftmax")  # warns
    assert model.config._attn_implementation == "eager"
    config._attn_implementation = "megasoftmax"
    with pytest.raises(TypeError, match="PaddingMask"):
        BloomForCausalLM(config)(**build_batch())


def test_register_twice():
    integration.register()
    before = list(ALL_ATTENTION_FUNCTIONS)
    integration.register()
    assert list(ALL_ATTENTION_FUNCTIONS) == before
    assert ALL_ATTENTION_FUNCTIONS["megasoftmax"] is integration.attention_forward


# Would the comparisons above notice?


@pytest.mark.parametrize(
    ("fault", "affected", "padding"),
    [
        ({"mask": None}, "gpt2", "left"),
        ({"mask": None}, "llama", "middle"),
        ({"mask": None}, "mistral", "none"),
        ({"causal": False}, "gpt2", "none"),
        ({"causal": False}, "llama", "right"),
        ({"scale": 1.0}, "llama", "none"),
        ({"sink": None}, "gpt_oss", "none"),
    ],
)
def test_planted_fault_is_caught(fault, affected, padding, monkeypatch):
    ours, eager = build_pair(affected)
    softmax = megasoftmax.softmax
    monkeypatch.setattr(megasoftmax, "softmax", lambda s, **given: softmax(s, **(given | fault)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(ours, eager, build_batch(padding))


def test_lost_mask_function_is_caught(family, monkeypatch):
    """The classic mistake: no mask reaches the attention function, and causality hides it."""
    monkeypatch.setattr(integration, "make_mask", lambda **sizes: None)
    integration.register()
    try:
        ours, eager = build_pair(family)
        assert_same_step(ours, eager, build_batch("none"))
        with pytest.raises(AssertionError, match="not close"):
            assert_same_step(ours, eager, build_batch("left"))
    finally:
        monkeypatch.undo()
        integration.register()
