"""patch_model, the configuration and the Trainer callback."""

import contextlib
import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from models import (
    BATCH,
    GPTJ_HAS_INTERFACE,
    IMAGES,
    LENGTH,
    MIXTURES,
    MODELS,
    PADDINGS,
    VOCABULARY,
    WITHOUT_INTERFACE,
    build_batch,
    tiny,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import megasoftmax
from megasoftmax.integrations import families, serving, subclasses
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.patching import Served, configure, patch_model
from megasoftmax.integrations.trainer import MegasoftmaxCallback
from megasoftmax.limits import kernel_limits

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "intermediate_size": 48}
REFUSED = {
    "xlnet": lambda: tiny(
        "XLNetLMHeadModel", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48
    ),
    "mpnet": lambda: tiny("MPNetModel", **SIZES),
    "longformer": lambda: tiny("LongformerModel", **SIZES, attention_window=4),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Names of the functions of megasoftmax that were called; a CPU takes the way of a GPU."""
    counted = []

    def count(name, function):
        def counting(*tensors, **options):
            counted.append(name)
            return function(*tensors, **options)

        counting.why_not_fused = functools.partial(megasoftmax.why_not_fused, function)
        monkeypatch.setattr(megasoftmax, name, counting)

    for name in ("attention", "softmax", "softmax_topk"):
        count(name, getattr(megasoftmax, name))
    monkeypatch.setattr(integration, "takes_attention", lambda *given: True)
    return counted


@pytest.fixture
def disabled(register, monkeypatch):
    monkeypatch.setenv("MEGASOFTMAX_DISABLE", "1")
    register()


def state(model):
    """Everything of the modules and their configurations that could be patched."""
    modules = {
        name: (type(module), {key: id(value) for key, value in vars(module).items()})
        for name, module in model.named_modules()
    }
    return modules, implementations(model), [copy.deepcopy(c.to_dict()) for c in configs(model)]


@contextlib.contextmanager
def unchanged(model):
    """A block after which the state of the model is what it was before."""
    before = state(model)
    yield
    assert state(model) == before


def configs(model):
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def implementations(model):
    return [config._attn_implementation for config in configs(model)]


def run(model, name="llama", padding="left"):
    """Results of a training step: logits of visible positions, loss, gradients."""
    torch.manual_seed(0)
    batch = build_batch(padding, name=name)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    real = batch.get("attention_mask", torch.ones_like(batch["labels"])).bool()
    return [output.logits[real], output.loss, *(p.grad for p in model.parameters())]


# Patching a model


@pytest.mark.parametrize("implementation", ["megasoftmax", "megasoftmax_softmax"])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_patched_as_a_whole_and_restored(name, implementation, calls):
    model = MODELS[name]()
    expected, before = run(model, name), state(model)
    assert not calls
    with patch_model(model, implementation=implementation) as patched:
        assert set(implementations(model)) == {implementation}
        torch.testing.assert_close(run(model, name), expected, rtol=1e-5, atol=1e-5)
        layers = 6 if name == "t5" else 2
        softmax = implementation == "megasoftmax_softmax"
        assert calls.count("softmax" if softmax else "attention") == layers
        assert calls.count("softmax_topk") == (2 if name in MIXTURES else 0)
        assert len(calls) == len(patched.report)
        calls.clear()
    assert state(model) == before
    actual = run(model, name)
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    patched.unpatch()
    assert state(model) == before


def test_a_module_around_models_is_patched():
    pair = torch.nn.ModuleDict({"one": MODELS["bloom"](), "other": MODELS["llama"]()})
    patched = patch_model(pair)
    assert len(patched.report) == 4
    assert set(implementations(pair)) == {"megasoftmax"}


def test_second_patch_owns_nothing():
    model = MODELS["mixtral"]()
    with unchanged(model):
        first, second = patch_model(model), patch_model(model)
        assert first.report == second.report
        second.unpatch()
        assert first.report["model.layers.0.self_attn"].runs == "SDPA"
        assert first.report["model.layers.0.mlp.gate"] == Served("router")
        first.unpatch()
    with unchanged(model):
        first, second = patch_model(model), patch_model(model)
        first.unpatch()
        second.unpatch()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_nested_patches_are_undone_from_within(name, calls):
    model = MODELS[name]()
    with unchanged(model):
        outer = patch_model(model)
        with unchanged(model), patch_model(model, implementation="megasoftmax_softmax"):
            run(model)
            assert calls == ["softmax"] * 2
            with pytest.raises(RuntimeError, match="undo first what was done after"):
                outer.unpatch()
        outer.unpatch()


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_copy_of_a_patched_model_computes_the_same(name, calls):
    model = MODELS[name]()
    patched = patch_model(model)
    twin = copy.deepcopy(model)
    expected = run(model, name)
    patched.unpatch()
    calls.clear()
    torch.testing.assert_close(run(twin, name), expected, rtol=0, atol=0)
    assert calls == ["attention"] * 2


# The report


def test_report_says_what_runs_and_why(monkeypatch):
    model = MODELS["gemma2"](attention_dropout=0.1).eval()
    patched = patch_model(model)
    served = patched.report["model.layers.0.self_attn"]
    assert served.runs == "softmax"
    assert "device: expected a CUDA device, got cpu" in str(served)
    monkeypatch.setattr(
        megasoftmax, "why_not_fused", lambda *given, **options: megasoftmax.Reasons((), ())
    )
    assert patched.report["model.layers.0.self_attn"].runs == "attention"
    assert "dropout" not in str(patch_model(model.train()))
    patched.unpatch()
    assert str(patched) == (
        "model.layers.0.self_attn ... model.layers.1.self_attn (2): unchanged: runs 'eager'"
    )


def test_report_knows_of_sinks():
    report = patch_model(MODELS["gpt_oss"]()).report
    assert report["model.layers.0.self_attn"].runs == "softmax"


def test_report_of_fused_attention(monkeypatch):
    seen, fused = [], megasoftmax.Reasons((), ())
    monkeypatch.setattr(
        megasoftmax, "why_not_fused", lambda f, query, *rest, **options: seen.append(query) or fused
    )
    model = MODELS["gpt2"](attn_pdrop=0.1).bfloat16().eval()
    patched = patch_model(model)
    assert patched.report["transformer.h.1.attn"] == Served("attention")
    assert (seen[0].dtype, seen[0].shape[-1]) == (torch.bfloat16, 8)
    model.train()
    assert patched.report["transformer.h.1.attn"] == Served("attention")
    softmax = patch_model(MODELS["bert"](), implementation="megasoftmax_softmax").report
    assert set(softmax.values()) == {Served("softmax", "megasoftmax_softmax was asked for")}


@pytest.mark.gpu
def test_report_on_a_gpu():
    model = MODELS["llama"]().to("cuda", torch.bfloat16)
    assert set(patch_model(model).report.values()) == {Served("attention")}
    assert set(patch_model(model.float()).report.values()) == {Served("attention")}


# What cannot be served


@pytest.mark.parametrize("name", REFUSED)
def test_refused_family_is_named_with_the_reason(name):
    model = REFUSED[name]().eval()
    ids = build_batch()["input_ids"]
    expected = model(ids)[0]
    with (
        unchanged(model),
        pytest.raises(ValueError, match="without the attention interface") as caught,
    ):
        patch_model(model)
    with unchanged(model):
        patched = patch_model(model, strict=False)
    assert torch.equal(model(ids)[0], expected)
    assert {served.runs for served in patched.report.values()} == {"unchanged"}
    assert len(patched.report) == 2
    for layer in patched.report:
        assert f"{layer}: computes attention itself" in str(caught.value)
        assert "without the attention interface" in patched.report[layer].why


def test_layers_beside_one_without_the_interface_are_served():
    """The pooling head of SigLIP is torch's own, whatever attention the others run."""
    images = SIZES | {"image_size": 8, "patch_size": 4}
    model = tiny("SiglipModel", text_config=SIZES, vision_config=images)
    with unchanged(model), patch_model(model) as patched:
        assert len(patched.report) == 5
        for name, served in patched.report.items():
            runs = ("unchanged", serving.NO_INTERFACE) if "head" in name else ("SDPA", served.why)
            assert served == runs
        assert set(implementations(model)) == {"megasoftmax"}


def test_model_that_is_refused_does_not_hold_back_another():
    pair = torch.nn.ModuleDict({"one": REFUSED["mpnet"](), "other": MODELS["llama"]()})
    message = r"ModuleDict; strict=False .* \(2\):"
    with unchanged(pair), pytest.raises(ValueError, match=message) as caught:
        patch_model(pair)
    assert "other" not in str(caught.value)
    patched = patch_model(pair, strict=False)
    runs = {name: served.runs for name, served in patched.report.items()}
    assert set(runs.values()) == {"unchanged", "SDPA"}
    assert all((runs[name] == "SDPA") == name.startswith("other") for name in runs)
    assert pair["one"].config._attn_implementation != "megasoftmax"


def test_replaced_forward_is_refused():
    """As offloading does it: the class that is swapped would not be asked."""
    for name, layer in (("bloom", "transformer.h.1.self_attention"), ("mixtral", "mlp.gate")):
        model = MODELS[name]()
        module = next(m for n, m in model.named_modules() if n.endswith(layer))
        module.forward = lambda *given, **options: None
        with unchanged(model), pytest.raises(ValueError, match=r"forward.* replaced"):
            patch_model(model)
        report = patch_model(model, strict=False).report
        assert any("replaced" in served.why for served in report.values())


def test_subclass_of_a_family_is_refused():
    """As sharding makes it of a block: its attention alone would not get the mask that it reads."""
    model = MODELS["mpt"]()
    block = model.transformer.blocks[1]
    block.__class__ = type("ShardedMptBlock", (type(block),), {})
    message = r"blocks\.1: its class ShardedMptBlock is a subclass"
    with unchanged(model), pytest.raises(ValueError, match=message):
        patch_model(model)


@pytest.mark.parametrize("implementation", ["eager", "megasoftmax"])
def test_attention_of_mpt_in_a_block_that_is_not_patched(implementation):
    """A mask of megasoftmax is a tuple, and not to be taken for that of a patched block."""
    integration.register()
    own = MODELS["mpt"]()
    model = MODELS["mpt"](attn_implementation=implementation)
    for block in model.transformer.blocks:
        block.__class__ = type(own.transformer.blocks[0])
    for padding in PADDINGS[:2]:
        actual, expected = run(model, "mpt", padding), run(own, "mpt", padding)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_router_that_was_replaced_since_keeps_the_patch():
    model = MODELS["mixtral"]()
    patched = patch_model(model)
    gate = model.model.layers[0].mlp.gate
    ours, gate.forward = gate.forward, lambda hidden: None
    message = r"^unpatch: expected model\.layers\.0\.mlp\.gate"
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        patched.unpatch()
    gate.forward = ours
    patched.unpatch()
    assert model.config._attn_implementation == "eager"


def test_bloom_with_a_split_projection_is_refused():
    options = {"pretraining_tp": 2, "slow_but_exact": True}
    with pytest.raises(ValueError, match="slow_but_exact"):
        patch_model(MODELS["bloom"](**options))
    with pytest.raises(ValueError, match="slow_but_exact"):
        MODELS["bloom"](**options, attn_implementation="megasoftmax")


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (None, {}, TypeError, "model: expected a module, got NoneType"),
        (torch.nn.Linear(1, 1), {}, ValueError, "a PreTrainedModel .*call megasoftmax.attention"),
        (torch.nn.Linear(1, 1), {"implementation": "sdpa"}, ValueError, "implementation: .*'sdpa'"),
    ],
)
def test_wrong_arguments(model, options, error, message):
    with pytest.raises(error, match=message):
        patch_model(model, **options)


# Families without the interface


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_families_know_the_interface_by_name(name, calls, tmp_path):
    integration.register()
    own = MODELS[name]()
    expected = run(own, name)
    own.save_pretrained(tmp_path)
    loaded = type(own).from_pretrained(tmp_path, attn_implementation="megasoftmax")
    built = MODELS[name](attn_implementation="megasoftmax_softmax")
    other = MODELS[name]()
    for model, function in ((loaded.train(), "attention"), (built, "softmax")):
        torch.testing.assert_close(run(model, name), expected, rtol=1e-5, atol=1e-5)
        assert calls == [function] * 2
        calls.clear()
    actual = run(other, name)
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_probabilities_of_families_without_the_interface(name, calls):
    own = MODELS[name](attn_implementation="sdpa" if "alibi" in name else "eager").eval()
    ours = copy.deepcopy(own)
    patch_model(ours)
    batch = build_batch("right")
    real = batch["attention_mask"].bool()
    asked = [model(**batch, output_attentions=True) for model in (ours, own)]
    assert calls == ["softmax"] * 2
    for actual, expected in zip(asked[0].attentions, asked[1].attentions, strict=True):
        assert actual.shape == (BATCH, actual.shape[1], LENGTH, LENGTH)
        if "alibi" not in name:  # what "sdpa" returns is of "eager", with ALiBi added twice
            rows, wanted = (a.transpose(1, 2)[real] for a in (actual, expected))
            torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("bloom", {"attention_dropout": 0.3, "hidden_dropout": 0.2}),
        ("gptj", {"attn_pdrop": 0.3}),
        ("falcon", {"attention_dropout": 0.3, "hidden_dropout": 0.2}),  # not of probabilities
        ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.7}}),
    ],
)
def test_options_of_families_without_the_interface(name, option, calls, monkeypatch):
    """Torch's dropout with equal seeds, and what else the layer reads."""
    taken = "attention" if name in ("mpt", "falcon") else "softmax"
    monkeypatch.setattr(integration, "takes_attention", lambda *given: taken == "attention")
    own = MODELS[name](**option)
    expected = run(own)
    assert (expected[1] - run(MODELS[name]())[1]).abs() > 1e-3
    patch_model(own)
    torch.testing.assert_close(run(own), expected, rtol=1e-5, atol=1e-5)
    assert calls == [taken] * 2


@pytest.mark.skipif(GPTJ_HAS_INTERFACE, reason="GPT-J has the attention interface")
def test_gptj_has_its_scores_in_float32(monkeypatch):
    """Scores near 300 in bfloat16 are off by one: without it the weights would differ."""
    monkeypatch.setattr(integration, "takes_attention", lambda *given: False)
    model = MODELS["gptj"]().bfloat16().eval()
    layer = model.transformer.h[0].attn
    torch.manual_seed(3)
    tensors = (torch.randn(3, 2, 4, 9, 8) * 10).bfloat16()
    expected, _ = layer._attn(*tensors)
    patch_model(model)
    mask = integration.PaddingMask(None, causal=False, keys=9)
    actual, _ = layer._attn(*tensors, families._Asked(mask, False))
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


# The configuration


def test_flags_survive_and_are_honoured(tmp_path, calls):
    model = MODELS["mixtral"]()
    assert set(run_patched(model, calls)) == {"attention", "softmax_topk"}
    configure(model.config, attention=False)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.megasoftmax == {"softmax": True, "attention": False, "router": True}
    assert AutoConfig.from_pretrained(tmp_path).megasoftmax == loaded.config.megasoftmax
    assert set(run_patched(loaded, calls)) == {"softmax", "softmax_topk"}
    loaded.config.megasoftmax = {"router": False}
    assert set(run_patched(loaded, calls)) == {"attention"}
    configure(loaded.config, softmax=False, attention=False, router=False)
    with unchanged(loaded):
        patched = patch_model(loaded)
    assert {str(s) for s in patched.report.values()} == {"unchanged: config.megasoftmax says so"}


def run_patched(model, calls):
    with patch_model(model):
        run(model)
    called = list(calls)
    calls.clear()
    return called


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sofmax": True}, "'sofmax': True"),
        ({"router": 1}, "'router': 1"),
        ([True], "got list"),
        ({"softmax": False}, "attention False where softmax is False"),
    ],
)
def test_wrong_flags(flags, message):
    model = MODELS["llama"]()
    model.config.megasoftmax = flags
    message = r"config\.megasoftmax: expected .*" + message
    with unchanged(model), pytest.raises(ValueError, match=message):
        patch_model(model)
    with pytest.raises(ValueError, match="got 'router': None"):
        configure(model.config, router=None)


# MEGASOFTMAX_DISABLE


@pytest.mark.parametrize("name", [name for name in MODELS if name != "falcon, alibi"])
def test_disabled_names_compute_what_eager_does(name, disabled, calls):
    """Bit by bit: softcap, sinks, windows and biases are the family's own code."""
    ours = MODELS[name](attn_implementation="megasoftmax")
    for padding in PADDINGS[:1] if name in IMAGES else PADDINGS[::2]:
        actual, expected = run(ours, name, padding), run(MODELS[name](), name, padding)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not calls


def test_disabled_name_refuses_what_it_cannot_hand_on(disabled):
    query = torch.randn(1, 4, 3, 8)
    layer = MODELS["llama"]().model.layers[0].self_attn
    function = ALL_ATTENTION_FUNCTIONS["megasoftmax"]
    with pytest.raises(ValueError, match=r"^indices: not supported"):
        function(layer, query, query, query, None, scaling=1.0, indices=torch.ones(()))
    with pytest.raises(ValueError, match=r"eager_attention_forward, got Linear"):
        function(torch.nn.Linear(1, 1), query, query, query, None, scaling=1.0)


def test_disabled_patch_changes_nothing(disabled):
    model = MODELS["mixtral"]()
    with unchanged(model):
        patched = patch_model(model)
    assert {str(s) for s in patched.report.values()} == {"unchanged: MEGASOFTMAX_DISABLE=1"}
    assert len(patched.report) == 4


def test_wrong_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("MEGASOFTMAX_DISABLE", "yes")
    with pytest.raises(ValueError, match="MEGASOFTMAX_DISABLE: expected 0 or 1, got 'yes'"):
        integration.register()


# Trainer


def test_callback_patches_while_training(capsys, calls):
    model = MODELS["bloom"]()
    before = state(model)
    callback = MegasoftmaxCallback(implementation="megasoftmax_softmax")
    state_of_trainer = SimpleNamespace(is_world_process_zero=True)
    in_float32 = SimpleNamespace(bf16=False, fp16=False, device=torch.device("cpu"))
    for _ in range(2):
        callback.on_train_begin(in_float32, state_of_trainer, None, model=model, optimizer=None)
        callback.on_train_begin(in_float32, state_of_trainer, None, model=model)  # it had failed
        run(model)
        assert calls == ["softmax"] * 2
        callback.on_train_end(None, state_of_trainer, None, model=model)
        assert state(model) == before
        calls.clear()
    printed = capsys.readouterr().out
    assert printed.count("megasoftmax:\n") == 1
    assert "transformer.h.1.self_attention (2): softmax" in printed
    with pytest.raises(ValueError, match="without the attention interface"):
        callback.on_train_begin(in_float32, state_of_trainer, None, model=REFUSED["xlnet"]())


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"fp16": True}], ids=str)
def test_callback_reports_the_types_of_autocast(options, capsys):
    arguments = SimpleNamespace(**{"bf16": False, "fp16": False, **options})
    arguments.device = torch.device("cpu")
    callback = MegasoftmaxCallback()
    is_first = SimpleNamespace(is_world_process_zero=True)
    model = MODELS["llama"]()
    for layer in model.model.layers:  # more than kernels take in float32
        layer.self_attn.head_dim = kernel_limits().attention["kMaxFloatHeadDim"] + 1
    callback.on_train_begin(arguments, is_first, None, model=model)
    printed = capsys.readouterr().out
    assert "self_attn (2): SDPA: device" in printed
    assert ("head dimension of value in float32" in printed) == (not options)


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


@pytest.mark.parametrize("fails", [False, True])
def test_trainer_gives_the_model_back(fails, tmp_path, capsys, calls):
    model = MODELS["bloom"]()
    before = [type(module) for module in model.modules()], implementations(model)
    ids = torch.arange(LENGTH)
    arguments = TrainingArguments(
        tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
    trainer.add_callback(MegasoftmaxCallback())
    if fails:
        trainer.add_callback(Fails())
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        trainer.train()
    assert calls
    assert ([type(module) for module in model.modules()], implementations(model)) == before
    printed = capsys.readouterr().out
    assert "self_attention (2): " in printed[printed.index("megasoftmax:\n") :]


class Int8Weight(torch.Tensor):
    """As those of quantisation: it has the type that products return, and few operators."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0])
        raise NotImplementedError(str(function))


def test_report_of_quantised_weights():
    model = MODELS["llama"]()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight = torch.nn.Parameter(Int8Weight(layer.weight), requires_grad=False)
    assert "self_attn (2): SDPA: device: expected a CUDA device" in str(patch_model(model))


# By the name of the package


def test_names_at_top_level_are_imported_when_asked(forks):
    assert megasoftmax.register is integration.register
    assert megasoftmax.patch_model is patch_model
    assert set(dir(megasoftmax)) == {"register", "patch_model", *megasoftmax.__all__}
    with pytest.raises(AttributeError, match="'megasoftmax' has no attribute 'pach_model'"):
        megasoftmax.pach_model  # noqa: B018
    code = """if True:
        import sys, megasoftmax
        assert "transformers" not in sys.modules
        sys.modules["transformers"] = None  # importing it fails
        try:
            megasoftmax.patch_model
        except ModuleNotFoundError as error:
            print(error)
    """
    result = forks.run(code)
    expected = "megasoftmax.patch_model needs transformers: pip install 'megasoftmax[transformers]'"
    assert result.stdout.strip() == expected, result.stderr


# Would the comparisons above notice?


def test_bloom_without_its_subclass_is_caught(monkeypatch):
    """Its configuration alone does not do: the layer does not know the mask."""
    monkeypatch.setattr(subclasses, "asked_function", lambda config: None)
    model = MODELS["bloom"]()
    patch_model(model)
    with pytest.raises(TypeError, match="reads its mask itself"):
        run(model)
