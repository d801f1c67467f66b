"""Both our names as attn_implementation against "eager": same weights, same batch, same results.

The models are tiny and have random weights with a large deviation, so that attention decides the
result; `test_planted_fault_is_caught` shows that the comparisons see what they are meant to see.
"""

import copy
import functools
import inspect
import math

import inputs
import pytest
import torch

pytest.importorskip("transformers")
from models import (
    BATCH,
    DECODERS,
    IMAGES,
    LENGTH,
    MIXTURES,
    MODELS,
    PADDINGS,
    WINDOW,
    WITHOUT_INTERFACE,
    build_batch,
)
from transformers import (
    Cache,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    cache_utils,
    masking_utils,
)
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import megasoftmax
from megasoftmax.functions.calls import new_seed
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.patching import patch_model
from megasoftmax.integrations.sharing import in_a_pass
from megasoftmax.reference import dropout

TAKES_ATTENTION = integration.takes_attention
# Parameters of biases and sinks: of encoder and decoder, of two layers, or of one table.
BIASES = {"t5": 2, "swin": 2, "gpt_oss": 2, "swinv2": 6, "deberta": 1, "deberta_v2": 1}
WITHOUT_STATIC_CACHE = ("mpt", "falcon, alibi")  # in transformers


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


@pytest.fixture(autouse=True)
def attention_on_a_cpu(monkeypatch):
    """A CPU is to take the same way as a GPU that can run attention fused."""
    monkeypatch.setattr(
        integration,
        "takes_attention",
        lambda query, *rest: not query.is_cuda or TAKES_ATTENTION(query, *rest),
    )


@pytest.fixture(params=["gpt2", "llama"])
def family(request):
    return request.param


@pytest.fixture(params=[integration.NAME, integration.SOFTMAX_NAME])
def implementation(request):
    return request.param


def build_pair(implementation, family, device="cpu", dtype=torch.float32, **config):
    """(ours, its own): two copies of one model in training mode; its own is "eager" in general."""
    eager = MODELS[family](**config).to(device, dtype)
    ours = copy.deepcopy(eager)
    if family in (*WITHOUT_INTERFACE, *MIXTURES, "t5"):  # see test_patching for what these need
        patch_model(ours, implementation=implementation)
    else:
        ours.set_attn_implementation(implementation)
    return ours, eager


def assert_same_step(ours, eager, batch, rtol=1e-5, atol=1e-5, **arguments):
    """Logits of the real tokens, loss and the gradient of every parameter."""
    results = {}
    for name, model in (("ours", ours), ("eager", eager)):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(2)
        output = model(**batch, **arguments)
        output.loss.backward()
        results[name] = output
    real = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
    expected, actual = results["eager"].logits[real], results["ours"].logits[real]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(results["ours"].loss, results["eager"].loss, rtol=rtol, atol=atol)
    gradients, expected_gradients = (
        {name: parameter.grad for name, parameter in model.named_parameters()}
        for model in (ours, eager)
    )
    torch.testing.assert_close(gradients, expected_gradients, rtol=rtol, atol=atol)


def record_calls(monkeypatch, function):
    monkeypatch.setattr(integration, "served_attention", lambda *given: None)  # it passes by them
    return inputs.record_calls(monkeypatch, function)


def attend(implementation, *given, layer=None, **options):
    """Output and probabilities of an attention function."""
    function = ALL_ATTENTION_FUNCTIONS[implementation]
    return function(torch.nn.Module() if layer is None else layer, *given, **options)


def queries_and_keys(tensors):
    """Of the arguments of attention, or of softmax."""
    if len(tensors) == 1:
        return tuple(tensors[0].shape[-2:])
    query, key, _ = tensors
    return query.shape[2], key.shape[2]


# Training


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("member", MODELS)
def test_training_step(implementation, member, padding, device):
    """Windows, sinks, softcaps, relative biases, experts: whatever the family has."""
    if member in IMAGES and padding != "none":
        pytest.skip("images have no padding")
    ours, eager = build_pair(implementation, member, device)
    assert_same_step(ours, eager, build_batch(padding, device, member))
    biases = [parameter for name, parameter in ours.named_parameters() if is_bias_of_scores(name)]
    assert all(bias.grad.any() for bias in biases)
    assert len(biases) == BIASES.get(member, 0)


def is_bias_of_scores(name):
    kinds = ("relative_attention_bias", "relative_position_bias", "sinks", "rel_embeddings.weight")
    kinds += ("continuous_position_bias",)
    return any(kind in name for kind in kinds)


@pytest.mark.parametrize("packer", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "gptj"])
def test_packed_sequences(implementation, packer):
    ours, eager = build_pair(implementation, packer)
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, -1)
    batch = build_batch() | {"position_ids": positions}
    assert_same_step(ours, eager, batch, use_cache=False)
    without = ours(**build_batch(), use_cache=False).logits
    packed = ours(**batch, use_cache=False).logits
    assert (packed - without).abs().max() > 0.1


@pytest.mark.parametrize("autocast", [False, True])
def test_gpt2_upcast_keeps_float32_scores(implementation, autocast):
    """Scores near 300 in bfloat16 are off by one: without the upcast the weights would differ."""
    ours, _ = build_pair(implementation, "gpt2", dtype=torch.bfloat16, reorder_and_upcast_attn=True)
    layer = ours.transformer.h[0].attn.eval()
    torch.manual_seed(3)
    query, key, value = (torch.randn(3, 2, 4, 9, 8) * 10).bfloat16()
    expected, _ = layer._upcast_and_reordered_attn(query, key, value)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        options = {"layer": layer, "scaling": layer.scaling, "is_causal": False}
        actual, _ = attend(implementation, query, key, value, None, **options)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("member", "option"),
    [
        ("llama", {"is_causal": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"add_cross_attention": True}),
    ],
    ids=str,
)
def test_options_of_models(implementation, member, option, padding):
    ours, eager = build_pair(implementation, member, **option)
    memory = {}
    if "add_cross_attention" in option:
        torch.manual_seed(4)
        memory["encoder_hidden_states"] = torch.randn(BATCH, 7, 32)
        keep = torch.ones(BATCH, 7, dtype=torch.long)
        keep[1, 4:] = 0
        memory |= {"encoder_attention_mask": keep} if padding == "right" else {}
    assert_same_step(ours, eager, build_batch(padding), **memory)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("member", "option"),
    [
        ("gpt2", "attn_pdrop"),
        ("llama", "attention_dropout"),
        ("bert", "attention_probs_dropout_prob"),
        ("t5", "dropout_rate"),
        ("bloom", "attention_dropout"),
        ("gptj", "attn_pdrop"),
    ],
)
def test_dropout_inside_attention(member, option, checkpointing, monkeypatch):
    """As "eager" that drops what the seeds say which attention draws."""
    ours, eager = build_pair("megasoftmax", member, **{option: 0.5})
    if checkpointing:
        for model in (ours, eager):
            model.gradient_checkpointing_enable({"use_reentrant": False})
    original = torch.nn.functional.dropout

    def dropping(given, p=0.5, training=True, inplace=False):
        if given.dim() != 4 or not training or p == 0:
            return original(given, p, training, inplace)
        keep = dropout.kept_of_scores(new_seed(given.device), p, given)
        return dropout.dropped(given, keep, p)

    calls = record_calls(monkeypatch, "attention")
    monkeypatch.setattr(torch.nn.functional, "dropout", dropping)
    assert_same_step(ours, eager, build_batch("right", name=member))
    assert {options["dropout"] for _, options in calls} == {0.5}
    calls.clear()
    ours.eval()(**build_batch("right", name=member))
    assert {options["dropout"] for _, options in calls} == {0.0}


def test_dropout_with_equal_seeds(family, device):
    """Where probabilities are written, torch drops them."""
    option = "attn_pdrop" if family == "gpt2" else "attention_dropout"
    ours, eager = build_pair(integration.SOFTMAX_NAME, family, device, **{option: 0.5})
    batch = build_batch("left", device)
    assert_same_step(ours, eager, batch)
    dropped, kept = ours(**batch).logits, ours.eval()(**batch).logits
    assert (dropped - kept).abs().max() > 0.1
    torch.testing.assert_close(kept, ours(**batch).logits, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("member", MODELS)
def test_activation_checkpointing(implementation, member, reentrant):
    ours, eager = build_pair(implementation, member)
    for model in (ours, eager):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(ours, eager, build_batch("left", name=member))


LEARNING = ("gpt2", "llama", "t5")


def train(model, member, device, autocast, steps):
    """Losses of some steps and the parameters after them, by their names."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for step in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(**build_batch(PADDINGS[step % 4], device, member)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize(
    ("member", "autocast"),
    [*((name, False) for name in LEARNING), *((name, True) for name in MODELS)],
)
def test_several_steps(implementation, member, autocast, device):
    """Losses and parameters over steps of AdamW; tolerances of Liger's convergence tests.

    AdamW's epsilon keeps the biases of keys, whose true gradient is 0, from following rounding
    noise; that of bfloat16 is too large for it, and turns few units of T5's dense layers on or off:
    1%. In float32 `test_training_step` compares the gradients of other models, for each padding.
    """
    if autocast and member == "deberta":
        pytest.skip('"eager" fills scores in bfloat16 with the lowest number of float32')
    is_long = member in LEARNING  # others see every padding once
    models = build_pair(implementation, member, device)
    before = {name: parameter.clone() for name, parameter in models[0].named_parameters()}
    steps = 50 if is_long else 4
    results = [train(model, member, device, autocast, steps) for model in models]
    losses = [each for each, _ in results]
    assert not is_long or losses[1][-1] < losses[1][0] - 0.5
    rtol, atol = (5e-2, 1e-2) if autocast else (2e-5, 1e-8)
    torch.testing.assert_close(losses[0], losses[1], rtol=rtol, atol=atol)
    parameters, expected = (dict(each) for _, each in results)
    rtol, atol = (1e-2, 1e-2) if autocast else (1e-5, 5e-3)
    for name in [name for name in expected if autocast and name.endswith("c_attn.bias")]:
        del parameters[name], expected[name]
    for name, value in expected.items():
        far = ~torch.isclose(parameters[name], value, rtol=rtol, atol=atol)
        assert far.float().mean() <= (0.01 if autocast and member == "t5" else 0), name
    moved = {name: (each - before[name]).abs().max() for name, each in parameters.items()}
    assert max(moved.values()) > 3e-3
    if member == "t5":
        biases = [name for name in before if "relative_attention_bias" in name]
        assert len(biases) == 2
        assert all(moved[name] > 2 * atol for name in biases)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_accurate_as_eager(implementation, family, autocast, device):
    exact = build_pair(implementation, family, device)[1]
    pair = build_pair(implementation, family, device, torch.float32 if autocast else torch.bfloat16)
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


@pytest.mark.parametrize(
    ("implementation", "member", "layers"),
    [
        (integration.NAME, "gpt2", {"n_layer": 1}),
        (integration.NAME, "llama", {"num_hidden_layers": 1}),
        (integration.NAME, "gemma2", {}),  # two kinds of layers
        (integration.NAME, "bloom", {"n_layer": 1}),
        (integration.NAME, "gpt_oss", {"num_hidden_layers": 1}),
        (integration.SOFTMAX_NAME, "gpt2", {"n_layer": 1}),
    ],
)
def test_compiles_without_graph_breaks(implementation, member, layers):
    """One layer of a kind: each is traced by itself, and takes long."""
    ours, eager = build_pair(implementation, member, **layers)
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
@pytest.mark.parametrize("member", ["gpt2", "llama", "t5"])
def test_generate(implementation, member, cache, padding, device):
    ours, eager = build_pair(implementation, member, device)
    batch = build_batch(padding, device)
    del batch["labels"]
    # T5's most probable token is the last one again, for its embedding is.
    options = {"max_new_tokens": 16, "do_sample": member == "t5", "top_k": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    generated = []
    for model in (ours, eager):
        torch.manual_seed(7)
        generated.append(model.eval().generate(**batch, **options))
    actual, expected = generated
    assert actual.sequences.equal(expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert len(expected.sequences[0, 0 if member == "t5" else LENGTH :].unique()) > 4


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("member", [name for name in DECODERS if name not in ("gpt2", "llama")])
def test_generates_the_same_tokens(implementation, member, padding):
    """Past the window, where there is one."""
    ours, eager = build_pair(implementation, member)
    batch = build_batch(padding)
    del batch["labels"]
    for cache in ("dynamic", "static"):
        if cache == "static" and member in WITHOUT_STATIC_CACHE:
            continue
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
        options |= {"disable_compile": True}
        actual, expected = (m.eval().generate(**batch, **options) for m in (ours, eager))
        assert actual.equal(expected)
        assert len(expected[:, LENGTH:].unique()) > 4


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("static", [False, True])
def test_prefill_in_two_parts(implementation, family, static, padding):
    """The second part has more keys than queries, and with a static cache unused keys as well."""
    pair = build_pair(implementation, family)
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


# Kinds of caches, past the window


class _Unrounded(cache_utils.QuantizedLayer):
    """A quantized cache without its rounding."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "whole": lambda config: DynamicCache(),  # without a window
    "static": lambda config: StaticCache(config=config, max_cache_len=48),
    "quantized": lambda config: Cache(
        layers=[_Unrounded(residual_length=4) for _ in range(config.num_hidden_layers)]
    ),
    "offloaded": lambda config: DynamicCache(config=config, offloading=True),
    "static, offloaded": lambda config: StaticCache(
        config=config, max_cache_len=48, offloading=True, offload_only_non_sliding=False
    ),
}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "assistant": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}
WINDOWED = ("llama", "mistral", "gemma2")


OFFLOADING = inspect.getsource(cache_utils.Cache.update)


def takes_back(cache, way):
    """Whether transformers takes drafted tokens, or beams, back from that cache, and reads it
    before it is written again.
    """
    if "offloaded" in cache and "prefetch_stream.wait_stream" not in OFFLOADING:  # as in 5.17
        return False
    if way in ("assistant", "prompt lookup"):
        return cache in ("dynamic", "whole", "offloaded")
    reorders = hasattr(cache_utils.QuantizedLayer, "_apply_pending_reorder")  # not in 5.17
    return way != "beams" or cache != "quantized" or reorders


@pytest.fixture
def unread_padding(monkeypatch):
    """As on a GPU, where whether there is padding is not read: every mask excludes keys."""
    monkeypatch.setattr(integration, "_is_all_true", lambda keep: False)


@functools.cache
def tokens_of_eager(member, way, row, device):
    """Without a cache, and without drafts."""
    options = WAYS["beams"] if way == "beams" else {}
    eager = MODELS[member]().eval().to(device)
    return eager.generate(**prompt(row, device), **options, **GENERATES, use_cache=False)


def prompt(row, device):
    """Padded on the left; row: alone, for drafts take a batch of 1."""
    batch = build_batch("left", device)
    del batch["labels"]
    return batch if row is None else {name: part[row : row + 1] for name, part in batch.items()}


GENERATES = {"max_new_tokens": 12, "do_sample": False, "disable_compile": True}


@pytest.mark.usefixtures("unread_padding")
@pytest.mark.parametrize("member", WINDOWED)
@pytest.mark.parametrize(
    ("cache", "way"),
    [
        pytest.param(cache, way, marks=[pytest.mark.gpu] if "offloaded" in cache else [])
        for cache in CACHES
        for way in WAYS
        if takes_back(cache, way)
    ],
)
def test_tokens_of_every_cache(member, cache, way):
    device = "cuda" if "offloaded" in cache else "cpu"
    ours = MODELS[member]().eval().to(device)
    ours.set_attn_implementation(integration.NAME)
    options = WAYS[way] | GENERATES
    if way == "assistant":  # drafts some tokens that are taken, and some that are not
        options["assistant_model"] = helper = copy.deepcopy(ours)
        helper.generation_config.num_assistant_tokens = 4
        helper.generation_config.assistant_confidence_threshold = 0.0
        head = copy.deepcopy(helper.get_output_embeddings())
        noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.05
        head.weight.data += noise.to(device)
        helper.set_output_embeddings(head)
    for row in range(BATCH) if way in ("assistant", "prompt lookup") else (None,):
        expected = tokens_of_eager(member, way, row, device)
        made = CACHES[cache](ours.config)
        actual = ours.generate(**prompt(row, device), **options, past_key_values=made)
        assert actual.equal(expected)
        assert len(expected[:, LENGTH:].unique()) > 2


@pytest.mark.usefixtures("unread_padding")
@pytest.mark.parametrize("member", WINDOWED)
@pytest.mark.parametrize("cache", [cache for cache in CACHES if "offloaded" not in cache])
def test_prefix_of_every_cache(member, cache):
    """Prefix tuning: keys and values that were never tokens, more than the window has."""
    torch.manual_seed(8)
    prefix = torch.randn(2, 2, BATCH, 2, WINDOW + 3, 8)  # layer, key or value, then of those
    logits = []
    for name, kind in ((integration.NAME, cache), ("eager", "whole")):
        model = MODELS[member]().eval()
        model.set_attn_implementation(name)
        made, batch = CACHES[kind](model.config), prompt(None, "cpu")
        for layer, (key, value) in enumerate(prefix):
            made.update(key, value, layer)
        ids, keep = batch["input_ids"], batch["attention_mask"]
        keep = torch.nn.functional.pad(keep, (WINDOW + 3, 0), value=1)
        for _ in range(WINDOW + 2):
            with torch.no_grad():
                output = model(ids, attention_mask=keep, past_key_values=made)
            logits.append(output.logits[:, -1])
            ids = logits[-1].argmax(-1, keepdim=True)
            keep = torch.nn.functional.pad(keep, (0, 1), value=1)
    actual, expected = torch.stack(logits).chunk(2)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(expected.argmax(-1).unique()) > 4


@pytest.mark.parametrize("cache", ["dynamic", "whole"])
@pytest.mark.parametrize("member", WINDOWED)
def test_gradient_of_a_prefix(implementation, member, cache):
    torch.manual_seed(8)
    prefix = torch.randn(2, 2, BATCH, 2, WINDOW + 3, 8, requires_grad=True)
    gradients = []
    for model in build_pair(implementation, member):
        made, batch = CACHES[cache](model.config), build_batch("left")
        for layer, (key, value) in enumerate(prefix):
            made.update(key, value, layer)
        keep = torch.nn.functional.pad(batch.pop("attention_mask"), (WINDOW + 3, 0), value=1)
        model(**batch, attention_mask=keep, past_key_values=made).loss.backward()
        gradients.append(prefix.grad)
        prefix.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert gradients[1].abs().max() > 1e-4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "overlay",
    [
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_overlay(5),
        masking_utils.chunked_overlay(5, torch.zeros(2, dtype=torch.long)),
    ],
    ids=["causal", "window", "chunks"],
)
def test_mask_for_fewer_keys_is_for_the_newest(implementation, overlay, padded):
    """Before transformers 5.18 a cache returned keys that its mask does not have."""
    function = masking_utils.and_masks(masking_utils.causal_mask_function, overlay)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[1, 6] = not padded
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 7, "q_offset": 8, "kv_offset": 4}
    given = sizes | {"mask_function": function, "attention_mask": keep}
    torch.manual_seed(9)
    query, key, value = (torch.randn(2, 4, n, 8) for n in (3, 9, 9))
    bias = torch.randn(1, 4, 3, 9)
    mask = integration.make_mask(**given)
    assert isinstance(mask, integration.PaddingMask)
    actual, _ = attend(implementation, query, key, value, mask, position_bias=bias)
    added = bias[..., -7:].masked_fill(~sdpa_mask(**given, allow_is_causal_skip=False), -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key[:, :, -7:], value[:, :, -7:], added
    )
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["longer", "bidirectional", "static", "bool", "float"])
def test_mask_for_other_keys_is_refused(implementation, kind):
    """Where nothing says which keys it is for."""
    both = masking_utils.bidirectional_mask_function
    mask = {
        "longer": lambda: integration.make_mask(1, 3, 9),
        "bidirectional": lambda: integration.make_mask(
            *(1, 3, 5),
            mask_function=both,
            attention_mask=torch.arange(5)[None] > 0,
            allow_is_bidirectional_skip=True,
        ),
        "static": lambda: integration.make_mask(1, 3, 5, q_offset=torch.tensor(1)),
        "bool": lambda: torch.ones(1, 1, 3, 5, dtype=torch.bool),
        "float": lambda: torch.zeros(1, 1, 3, 5),
    }[kind]()
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 7, 8)
    with pytest.raises(ValueError, match=r"attention_mask: expected .*7.*, got .*[59]"):
        attend(implementation, query, key, key, mask)


def test_mask_that_excludes_nothing_is_for_any_keys(implementation):
    """A decoder that is made as an encoder keeps a cache, and its mask is for the new tokens."""
    both = masking_utils.bidirectional_mask_function
    mask = integration.make_mask(1, 3, 3, mask_function=both, allow_is_bidirectional_skip=True)
    assert isinstance(mask, integration.PaddingMask)
    query, key, value = (torch.randn(1, 4, n, 8) for n in (3, 7, 7))
    actual, _ = attend(implementation, query, key, value, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(actual, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


# What attention and softmax are asked for


FUNCTIONS = {"megasoftmax": "attention", "megasoftmax_softmax": "softmax"}


def test_padded_causal_training_needs_no_square_mask(implementation, family, monkeypatch):
    calls = record_calls(monkeypatch, FUNCTIONS[implementation])
    ours, _ = build_pair(implementation, family)
    ours(**build_batch("left"))
    assert len(calls) == 2
    for tensors, options in calls:
        assert queries_and_keys(tensors) == (LENGTH, LENGTH)
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
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": query_offset}
    sizes |= {"kv_offset": key_offset, "attention_mask": keep}
    expected = sdpa_mask(**sizes, allow_is_causal_skip=False)
    needs_tensor = integration.make_mask(**sizes, allow_is_causal_skip=False)
    assert needs_tensor.equal(expected)
    mask = integration.make_mask(**sizes)
    assert mask.excluded.shape == (2, 1, 1, keys)
    if keys == 9:
        assert not mask.causal
        assert mask.visible[0] is None
        below_diagonal = torch.arange(keys) < mask.visible[1][..., None]
    else:
        assert mask.causal
        assert mask.visible is None
        below_diagonal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    assert (~mask.excluded & below_diagonal).equal(expected)


@pytest.mark.parametrize("case", ["plain", "asked", "hooked", "dropout", "upcast"])
def test_probabilities_are_written_only_where_needed(family, case, monkeypatch):
    config = {}
    if case == "dropout":
        config = {"attn_pdrop" if family == "gpt2" else "attention_dropout": 0.1}
    if case == "upcast":
        config = {"reorder_and_upcast_attn": True}
        family = "gpt2"
    ours, _ = build_pair("megasoftmax", family, **config)
    if case == "hooked":  # hooks that an earlier call has left behind collect nothing
        ours(**build_batch(), output_attentions=True)
    attention_calls = record_calls(monkeypatch, "attention")
    softmax_calls = record_calls(monkeypatch, "softmax")
    asked = {"output_attentions": True} if case == "asked" else {}
    assert ("attentions" in ours(**build_batch(), **asked)) == (case == "asked")
    written = 2 if case in ("asked", "upcast") else 0
    assert (len(attention_calls), len(softmax_calls)) == (2 - written, written)


def test_keys_of_a_group_are_not_repeated(monkeypatch):
    calls = record_calls(monkeypatch, "attention")
    ours, _ = build_pair("megasoftmax", "llama")
    ours(**build_batch())
    for (query, key, value), _ in calls:
        assert (query.shape[1], key.shape[1], value.shape[1]) == (4, 2, 2)


def test_autocast_gives_attention_one_type(family, monkeypatch):
    """Rotary positions make float32 of queries and keys, beside values of bfloat16."""
    calls = record_calls(monkeypatch, "attention")
    ours, _ = build_pair("megasoftmax", family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours(**build_batch())
    assert len(calls) == 2
    for tensors, _ in calls:
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}


def test_what_torch_does_not_compute_takes_the_softmax(device, monkeypatch):
    """On a GPU what is not of one type that kernels take; on a CPU what is not of one type."""
    monkeypatch.setattr(integration, "takes_attention", TAKES_ATTENTION)
    given = torch.randn(3, 2, 4, 9, 8, device=device)
    for dtypes, takes_attention in (
        ((torch.bfloat16,) * 3, True),
        ((torch.float32,) * 3, True),
        ((torch.float64,) * 3, device == "cpu"),
        ((torch.bfloat16, torch.bfloat16, torch.float32), False),
    ):
        tensors = [tensor.to(dtype) for tensor, dtype in zip(given, dtypes, strict=True)]
        output, probabilities = integration.attention_forward(torch.nn.Module(), *tensors, None)
        assert output.dtype == dtypes[2]
        assert (probabilities is None) == takes_attention


def test_prefill_of_a_static_cache_sees_no_unused_keys(implementation, family, monkeypatch):
    calls = record_calls(monkeypatch, FUNCTIONS[implementation])
    ours, _ = build_pair(implementation, family)
    cache = StaticCache(ours.config, max_cache_len=LENGTH + 5)
    ours(build_batch()["input_ids"], past_key_values=cache)
    assert len(calls) == 2
    for tensors, options in calls:
        assert queries_and_keys(tensors) == (LENGTH, LENGTH + 5)
        assert options["mask"] is None
        first, end = options["visible"]
        assert first is None
        assert end.flatten().tolist() == list(range(1, LENGTH + 1))


def test_unused_keys_without_a_mask_are_cut_off(implementation, monkeypatch):
    calls = record_calls(monkeypatch, FUNCTIONS[implementation])
    query, key = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 12, 8)
    attend(implementation, query, key, key, None, is_causal=True)
    ((tensors, options),) = calls
    assert queries_and_keys(tensors) == (9, 9)
    assert options["causal"] is True


def test_windows_and_packed_sequences_need_no_square_mask(implementation, monkeypatch):
    calls = record_calls(monkeypatch, FUNCTIONS[implementation])
    ours, _ = build_pair(implementation, "mistral")
    ours(**build_batch("left"))
    positions = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(BATCH, -1)
    ours(**build_batch(), position_ids=positions, use_cache=False)
    window = (ours.config.sliding_window - 1, 0)
    assert {(options["causal"], options["window"]) for _, options in calls} == {(True, window)}
    for _, options in calls[:2]:
        assert options["mask"].shape == (BATCH, 1, 1, LENGTH)
        assert options["visible"] is None
    for _, options in calls[2:]:
        assert options["mask"] is None
        first, end = options["visible"]
        assert first[0, 0].tolist() == [0] * 5 + [5] * (LENGTH - 5)
        assert end[0, 0].tolist() == [5] * 5 + [LENGTH] * (LENGTH - 5)


@pytest.mark.parametrize("packer", ["llama", "mistral"])
def test_padding_free_training(implementation, packer):
    """What the collator gives to flash attention beside the positions changes nothing."""
    ours, eager = build_pair(implementation, packer)
    ids = build_batch()["input_ids"]
    documents = [
        {"input_ids": row[:length].tolist()} for row, length in zip(ids, (5, 9, 3), strict=True)
    ]
    collator = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True)
    batch = dict(collator(documents))
    assert "cu_seq_lens_q" in batch
    assert_same_step(ours, eager, batch, use_cache=False)
    alone = [ours(torch.tensor([d["input_ids"]]), use_cache=False).logits for d in documents]
    together = ours(**batch, use_cache=False).logits
    torch.testing.assert_close(together, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_window_without_a_mask(implementation, causal):
    torch.manual_seed(5)
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    visible = (distance >= 0) & (distance < 3) if causal else distance.abs() <= 3
    scores = (query @ key.transpose(-1, -2) / math.sqrt(8)).masked_fill(~visible, -torch.inf)
    options = {"dropout": 0.5, "is_causal": causal, "sliding_window": 3}
    output, probabilities = attend(
        *(implementation, query, key, value, None), layer=torch.nn.Module().eval(), **options
    )
    torch.testing.assert_close(output, (scores.softmax(-1) @ value).transpose(1, 2))
    assert output.is_contiguous()
    assert (probabilities is None) == (implementation == "megasoftmax")
    if probabilities is not None:
        torch.testing.assert_close(probabilities, scores.softmax(-1), rtol=1e-5, atol=1e-6)


def test_window_beside_a_mask_is_that_of_the_mask(implementation):
    """OLMoE passes the window of its configuration on, and a mask that has none."""
    torch.manual_seed(5)
    query, key, value = torch.randn(3, 2, 4, 9, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    for mask in (integration.make_mask(2, 9, 9), torch.ones(9, 9).tril().bool().expand(2, 1, 9, 9)):
        output, _ = attend(implementation, query, key, value, mask, sliding_window=3)
        torch.testing.assert_close(output, expected.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_softcap_and_its_gradients(implementation, dtype):
    """In float32 even for halves: scores of 40 under a cap of 50 are off by 0.1 in bfloat16."""
    torch.manual_seed(5)
    tensors = [(torch.randn(2, 4, 9, 8) * 3).to(dtype).requires_grad_() for _ in range(3)]
    keep = torch.rand(2, 1, 9, 9) > 0.3
    output, _ = attend(implementation, *tensors, keep, scaling=0.7, softcap=50.0)
    actual = torch.autograd.grad(output.double().square().sum(), tensors)

    query, key, value = (tensor.double() for tensor in tensors)
    scores = query @ key.transpose(-1, -2)
    if dtype == torch.bfloat16 and implementation != "megasoftmax":  # as the product rounds them
        scores = scores + (scores.to(dtype) - scores).detach()
    scores = 50 * torch.tanh(0.7 * scores / 50)
    expected = (scores.masked_fill(~keep, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    tolerance = 1e-9 if dtype == torch.float64 else 0.03
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    expected = torch.autograd.grad(expected.square().sum(), tensors)
    for found, wanted in zip(actual, expected, strict=True):
        error = (found.double() - wanted.double()).norm() / wanted.double().norm()
        assert error < tolerance


def test_why_not_attention_names_every_reason(monkeypatch):
    tensors = torch.randn(3, 1, 2, 3, 4)
    module = torch.nn.Module()
    module.reorder_and_upcast_attn = True
    options = {"softcap": 50.0, "dropout": 0.1, "output_attentions": True}
    reasons = integration.why_not_attention(module, *tensors, **options)
    assert [reason.constraint for reason in reasons[:2]] == [
        "reorder_and_upcast_attn",
        "output_attentions",
    ]
    on_a_cpu = megasoftmax.why_not_fused(megasoftmax.attention, *tensors)
    assert reasons[2:] == on_a_cpu
    assert "softcap: expected None, got 50.0" in map(str, reasons.against_sdpa)
    assert integration.why_not_attention(torch.nn.Module(), *tensors) == on_a_cpu
    module = torch.nn.Module()
    assert integration.why_not_attention(module, *tensors, dropout=0.1).runs == "reference"
    assert "dropout" in str(integration.why_not_attention(module, *tensors, dropout=0.99))
    assert integration.why_not_attention(module.eval(), *tensors, dropout=0.99).runs == "SDPA"
    query, key, value = tensors
    (reason,) = integration.why_not_attention(torch.nn.Module(), query, key, value.double())
    assert reason.constraint == "dtype"


def test_layers_share_one_copy_of_a_bias(implementation, monkeypatch):
    """Of T5's, whose heads lie side by side; a later change, or a gradient, makes another."""
    ours, _ = build_pair(implementation, "t5")
    calls = record_calls(monkeypatch, FUNCTIONS[implementation])
    ours(**build_batch("none")).loss.backward()
    given = [options["bias"] for _, options in calls if options["bias"] is not None]
    assert all(bias.stride(-1) == 1 for bias in given)
    learnt = [bias for bias in given if bias.requires_grad]
    assert len(learnt) > len({id(bias) for bias in learnt}) == 2  # of encoder and decoder

    def in_layers():
        with torch.no_grad():
            without = integration._with_dense_rows(bias)
        copy_of_bias = integration._with_dense_rows(bias)
        assert (copy_of_bias.requires_grad, without.requires_grad) == (True, False)
        assert integration._with_dense_rows(bias) is copy_of_bias
        with torch.no_grad():
            bias.add_(1)
        assert torch.equal(integration._with_dense_rows(bias), bias)
        expanded = bias.expand(4, -1, -1, -1)
        assert integration._with_dense_rows(expanded) is expanded

    bias = torch.randn(1, 3, 5, 2).movedim(3, 1).requires_grad_()
    in_a_pass(in_layers)
    assert integration._with_dense_rows(bias) is bias  # no pass: no other layer would share it


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "float"])
def test_position_bias_and_its_gradient(implementation, mask):
    """The bias joins what the mask excludes or adds; unused keys of a cache are cut off it too."""
    torch.manual_seed(5)
    unused = 4 if mask == "none" else 0
    query, key, value = (torch.randn(2, 4, n, 8) for n in (9, 9 + unused, 9 + unused))
    bias = torch.randn(1, 4, 9, 9 + unused, requires_grad=True)
    keep = torch.rand(2, 1, 9, 9) > 0.3
    keep[..., 0] = True
    excluded = ~keep[:, :, :1] if mask == "padding" else ~keep
    added = torch.randn(2, 1, 9, 9)
    padding = integration.PaddingMask(excluded, causal=False, keys=9)
    given = {"none": None, "padding": padding, "bool": keep, "float": added}[mask]
    options = {"position_bias": bias, "scaling": 0.5}
    output, _ = attend(implementation, query, key, value, given, **options)
    actual = torch.autograd.grad(output.square().sum(), bias)[0]

    scores = (query @ key.transpose(-1, -2) * 0.5 + bias)[..., :9]
    if mask == "none":
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    elif mask == "float":
        scores = scores + added
    else:
        scores = scores.masked_fill(excluded, -torch.inf)
    expected = (scores.softmax(-1) @ value[:, :, :9]).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(expected.square().sum(), bias)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_of_the_user(implementation, family, dtype):
    """A 4-d tensor is the whole mask: True = keep, or added to the scores."""
    ours, eager = build_pair(implementation, family)
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


@pytest.mark.parametrize("member", ["gpt2", "llama", "t5"])
def test_output_attentions(implementation, member):
    ours, eager = build_pair(implementation, member)
    batch = build_batch("right" if member == "t5" else "left")
    actual, expected = (m.eval()(**batch, output_attentions=True) for m in (ours, eager))
    if member == "t5":
        for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
            assert len(expected[name]) == 2
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6)
        return
    real = batch["attention_mask"].bool()
    assert len(actual.attentions) == len(expected.attentions) == 2
    for layer_actual, wanted in zip(actual.attentions, expected.attentions, strict=True):
        rows, rows_expected = layer_actual.transpose(1, 2), wanted.transpose(1, 2)
        torch.testing.assert_close(rows[real], rows_expected[real], rtol=1e-5, atol=1e-6)
        assert rows[~real].count_nonzero() == 0  # queries without a visible key


# Wrong use


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        *(
            (None, {name: torch.ones(())}, name)
            for name in ("cache", "sinks", "indices", "block_indices")
        ),
        *(
            (None, {"softcap": cap}, f"softcap: expected .* got {cap}")
            for cap in (-1.0, math.nan, math.inf)
        ),
        (torch.ones(3, 3, dtype=torch.bool), {}, r"attention_mask.*\(3, 3\)"),
    ],
)
def test_wrong_use_is_named(mask, options, message):
    query = torch.randn(3, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        integration.attention_forward(torch.nn.Module(), query, query, query, mask, **options)


def test_mask_that_a_layer_reads_itself_says_what_to_do(implementation):
    model = MODELS["bloom"]()
    model.config._attn_implementation = implementation  # past the constructor and the setter
    message = r"this model reads its mask itself .*'megasoftmax_eager_mask'"
    with pytest.raises(TypeError, match=message):
        model(**build_batch())
    mask, scores = integration.make_mask(2, 9, 9), torch.ones(9)
    for read in (
        lambda: scores + mask,
        lambda: 1.0 - mask,
        lambda: mask * scores,
        lambda: scores.masked_fill(mask, 0.0),
        lambda: mask[:, :, -3:],
        lambda: mask.shape,
    ):
        with pytest.raises((TypeError, AttributeError), match=message):
            read()
    assert (mask[0], mask[1]) == (None, True)
    model.config._attn_implementation = integration.with_eager_mask(implementation)
    expected = MODELS["bloom"]()(**build_batch("left")).logits
    assert torch.equal(model(**build_batch("left")).logits, expected)


def test_register_twice():
    integration.register()
    before = list(ALL_ATTENTION_FUNCTIONS)
    integration.register()
    assert list(ALL_ATTENTION_FUNCTIONS) == before
    assert ALL_ATTENTION_FUNCTIONS["megasoftmax"] is integration.attention_forward
    assert ALL_ATTENTION_FUNCTIONS["megasoftmax_softmax"] is integration.softmax_attention_forward


# Would the comparisons above notice?


@pytest.mark.parametrize(
    ("fault", "affected", "padding"),
    [
        ({"mask": None}, "gpt2", "left"),
        ({"mask": None}, "llama", "middle"),
        ({"window": None}, "mistral", "none"),
        ({"causal": False}, "gpt2", "none"),
        ({"causal": False}, "llama", "right"),
        ({"scale": 1.0}, "llama", "none"),
        ({"sink": None}, "gpt_oss", "none"),
        ({"bias": None}, "t5", "none"),
        ({"bias": None}, "t5", "left"),
        ({"bias": None}, "bloom", "none"),
        ({"bias": None}, "mpt", "right"),
        ({"bias": None}, "falcon, alibi", "none"),
        ({"mask": None}, "falcon", "left"),
        ({"scale": 1.0}, "gptj", "none"),
    ],
)
def test_planted_fault_is_caught(implementation, fault, affected, padding, monkeypatch):
    ours, eager = build_pair(implementation, affected)
    function = FUNCTIONS[implementation]
    original = getattr(megasoftmax, function)
    monkeypatch.setattr(megasoftmax, function, lambda *t, **given: original(*t, **(given | fault)))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(ours, eager, build_batch(padding))


@pytest.mark.parametrize(
    "fault",
    [lambda cap: None, lambda cap: 2 * cap, lambda cap: cap + 0.01],
    ids=["dropped", "doubled", "other"],
)
def test_wrong_softcap_is_caught(implementation, fault, monkeypatch):
    original = integration._read

    def read(*given, softcap=None, **options):
        return original(*given, softcap=fault(softcap), **options)

    monkeypatch.setattr(integration, "_read", read)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(*build_pair(implementation, "gemma2"), build_batch())


def test_lost_mask_function_is_caught(implementation, family, register, monkeypatch):
    """The classic mistake: no mask reaches the attention function, and causality hides it."""
    monkeypatch.setattr(integration, "make_mask", lambda **sizes: None)
    register()
    ours, eager = build_pair(implementation, family)
    assert_same_step(ours, eager, build_batch("none"))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(ours, eager, build_batch("left"))
