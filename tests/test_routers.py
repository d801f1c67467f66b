"""Routers of transformers through softmax_topk: results, gradients and training are the model's."""

import copy
import importlib
import pkgutil
import re
from types import SimpleNamespace

import pytest
import torch
import transformers.models
from inputs import record_calls
from models import tiny
from small_models import build

import megasoftmax
from megasoftmax.integrations import routers
from megasoftmax.integrations.patching import patch_model
from megasoftmax.integrations.routers import patch_routers

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"max_position_embeddings": 64, "num_experts_per_tok": 3}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
MODELS = {
    "mixtral": lambda: tiny("MixtralForCausalLM", **SIZES, num_local_experts=6),
    "qwen3_moe": lambda: _qwen3_moe(norm_topk_prob=False),
    "qwen3_moe, normalised": lambda: _qwen3_moe(norm_topk_prob=True),
    "gpt_oss": lambda: tiny("GptOssForCausalLM", **SIZES, num_local_experts=6),
}


def _qwen3_moe(**options):
    sizes = {"num_experts": 6, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return tiny("Qwen3MoeForCausalLM", **SIZES, **sizes, **options)


@pytest.fixture(params=MODELS)
def model(request, device):
    torch.manual_seed(0)
    built = MODELS[request.param]().to(device)
    for name, parameter in built.named_parameters():
        if ".router." in name or ".gate." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return built


@pytest.fixture
def ids(device):
    return torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch, "softmax_topk")


def classes():
    """The classes of transformers that have a rule."""
    found = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = transformers.models.__path__[0]
        try:
            with open(f"{folder}/{package.name}/modeling_{package.name}.py") as file:
                names = re.findall(r"^class (\w+Router)\(", file.read(), re.MULTILINE)
        except FileNotFoundError:
            continue
        for name in set(names) & set(routers._RULES):
            module = f"transformers.models.{package.name}.modeling_{package.name}"
            found[name] = getattr(importlib.import_module(module), name)
    return dict(sorted(found.items()))


CLASSES = classes()
OF_DEEPSEEK = [name for name in CLASSES if routers._RULES[name].of_deepseek]


def test_rules_are_for_classes_that_exist():
    """Should a release of transformers rename one, its rule is of no use."""
    assert {"MixtralTopKRouter", "Qwen3MoeTopKRouter", "GptOssTopKRouter"} <= set(CLASSES)


def router_of(name, *, normalised=True, **more):
    """4 of 16 experts, for tokens of 24 numbers."""
    experts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16)
    sizes = {"num_experts_per_tok": 4, "hidden_size": 24, "norm_topk_prob": normalised}
    return CLASSES[name](SimpleNamespace(**experts, **sizes, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", sorted(CLASSES.keys() - set(OF_DEEPSEEK)))
def test_every_rule_is_that_of_its_class(name, normalised, dtype, device):
    router = router_of(name, normalised=normalised).to(device, dtype)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(40, 24, device=device, dtype=dtype, requires_grad=True)
    inputs = [hidden, *router.parameters()]
    weights = torch.randn(40, 4, device=device)
    with torch.no_grad():  # of equal logits torch.topk takes any first
        best = router(hidden)[0].sort(descending=True).values[:, :5]
        weights[(best[:, 1:] == best[:, :-1]).any(1)] = 0
    results = []
    for patched in (False, True):
        if patched:
            patch_routers(router)
        logits, scores, experts = router(hidden)
        loss = (scores.float() * weights).sum() + logits.float().tanh().sum()
        results.append((logits, scores, experts, *torch.autograd.grad(loss, inputs)))
    (_, own, experts, *_), (_, ours, our_experts, *_) = results
    assert ours.dtype == own.dtype
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(results[1][3:], results[0][3:], **close)
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(ours, own)
    # In bfloat16 logits can be equal, and torch.topk takes either.
    differ = experts != our_experts
    assert not differ.any() or dtype == torch.bfloat16
    assert torch.equal(logits.gather(1, experts), logits.gather(1, our_experts))


def router_of_deepseek(name, *, groups=1, taken=1, **options):
    options |= {"n_group": groups, "topk_group": taken, "routed_scaling_factor": 2.5}
    router = router_of(name, **options)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.3)
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", OF_DEEPSEEK)
def test_routers_of_deepseek(name, normalised, dtype, device):
    router = router_of_deepseek(name, normalised=normalised).to(device)
    router.weight.data = router.weight.data.to(dtype)
    router.e_score_correction_bias.requires_grad_()  # some models have it as a parameter
    hidden = torch.randn(40, 24, device=device, dtype=dtype, requires_grad=True)
    weights = torch.randn(16, device=device)
    results = []
    for patched in (False, True):
        if patched:
            assert patch_routers(router).names == ("",)
        logits, scores, experts = router(hidden)
        loss = (scores * weights[experts]).sum() + logits.tanh().sum()
        gradients = torch.autograd.grad(loss, [hidden, router.weight])
        dense = torch.zeros_like(logits).scatter(1, experts, scores)
        results.append((logits, dense, scores.sum(-1), *gradients))
    close = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(results[1], results[0], **close)


def test_routers_that_limit_experts_to_groups_are_left():
    router = router_of_deepseek("DeepseekV3TopkRouter", groups=4, taken=2)
    with pytest.raises(ValueError, match="expected a router among"):
        patch_routers(router)
    why = routers.routers_left(router)
    assert why == {"": "DeepseekV3TopkRouter chooses among the experts of 2 of 4 groups"}
    assert patch_routers(router_of_deepseek("DeepseekV3TopkRouter", groups=4, taken=4)).names


def loss_of(model, ids):
    return model(ids, labels=ids, output_router_logits=True, use_cache=False)


def test_logits_loss_and_gradients(model, ids, calls):
    expected = loss_of(model, ids)
    expected.loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    assert not calls
    model.zero_grad()
    with patch_routers(model) as patched:
        assert len(patched.names) == 2
        actual = loss_of(model, ids)
        actual.loss.backward()
    assert len(calls) == 2
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
    torch.testing.assert_close(actual.router_logits, expected.router_logits)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert any(gradients[name].abs().max() > 1e-4 for name in gradients if "experts" not in name)


def test_faults_are_noticed(model, ids, monkeypatch):
    """What the comparisons above are worth: other scores give other losses."""
    expected = loss_of(model, ids).loss
    softmax_topk = megasoftmax.softmax_topk

    def faulty(logits, k, *, renormalize, dtype):
        return softmax_topk(logits, k, renormalize=not renormalize, dtype=dtype)

    monkeypatch.setattr(megasoftmax, "softmax_topk", faulty)
    with patch_routers(model), pytest.raises(AssertionError):
        torch.testing.assert_close(loss_of(model, ids).loss, expected)


def test_unpatch(model, ids, calls):
    before = set(model.state_dict())
    patched = patch_routers(model)
    assert set(model.state_dict()) == before
    model(ids)
    assert len(calls) == 2
    patched.unpatch()
    patched.unpatch()
    assert patched.names == ()
    model(ids)
    assert len(calls) == 2
    left = {name for module in model.modules() for name in module.__dict__}
    assert not left & {"forward", "megasoftmax_rule"}


def test_unpatched_after_an_error(model):
    def fail():
        with patch_routers(model):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fail()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_copy_of_a_patched_model(model, ids, calls):
    """A copy routes by its own weights."""
    patch_routers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".router." in name or ".gate." in name:
                parameter.neg_()
    assert not torch.allclose(other(ids).logits, model(ids).logits)
    assert len(calls) == 4


def test_compiled(model, ids):
    _, router = next(
        (name, module) for name, module in model.named_modules() if routers._rule_of(module)
    )
    hidden = torch.randn(5, 32, device=ids.device)
    expected = router(hidden)
    with patch_routers(router):
        compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(hidden), expected)


def test_model_without_routers():
    sizes = {name: value for name, value in SIZES.items() if name != "num_experts_per_tok"}
    with pytest.raises(
        ValueError, match=r"^model: expected a router among .*, got LlamaForCausalLM without one"
    ):
        patch_routers(tiny("LlamaForCausalLM", **sizes))
    with pytest.raises(TypeError, match=r"^model: expected a module, got str"):
        patch_routers("mixtral")


def test_forward_that_was_replaced(model):
    """By a kernel of the hub, say: whoever did that is not pushed aside."""
    *_, last = (module for module in model.modules() if routers._rule_of(module))
    own = last.forward
    last.forward = lambda hidden: own(hidden)
    with pytest.raises(ValueError, match=r"^model: expected .* with the forward of its class"):
        patch_routers(model)
    assert sum("forward" in module.__dict__ for module in model.modules()) == 1


def test_other_forward_of_a_subclass():
    class Mine(CLASSES["MixtralTopKRouter"]):
        def forward(self, hidden_states):
            return hidden_states

    class Inherited(CLASSES["MixtralTopKRouter"]):
        pass

    config = SimpleNamespace(num_experts_per_tok=2, num_local_experts=4, hidden_size=8)
    with pytest.raises(ValueError, match=r"^model: expected a router"):
        patch_routers(Mine(config))
    assert patch_routers(Inherited(config)).names == ("",)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("LongcatFlashForCausalLM", "LongcatFlashTopkRouter chooses experts with a bias"),
        ("JambaForCausalLM", "JambaTopKRouter has another rule"),
    ],
)
def test_report_lists_routers_that_are_left(name, why):
    patched = patch_model(build(name))
    routers = {layer: served for layer, served in patched.report.items() if "Router" in str(served)}
    assert routers
    for served in routers.values():
        assert served.runs == "unchanged"
        assert served.why.startswith(why)
    assert why in str(patched)
