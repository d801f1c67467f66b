"""Training regressions: the true implementations pass, planted faults fail and are named."""

import functools
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from faults import plant_options
from inputs import command

pytest.importorskip("transformers")
from models import tiny
from transformers import AttentionInterface, AttentionMaskInterface, GPT2LMHeadModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import megasoftmax
from megasoftmax import regression
from megasoftmax.integrations import transformers as integration
from megasoftmax.regression import comparison, pairs
from megasoftmax.regression import dropout as regression_dropout
from megasoftmax.regression import models as regression_models
from megasoftmax.regression import training as regression_training
from megasoftmax.regression.report import to_json

FAMILIES = list(regression_models.NAMES)
QUICK = {"steps": 3, "checks": 3, "batch": 3, "length": 32}
EQUAL_WEIGHTS = ("loss from equal weights", "gradient")


def run(model, device="cpu", **settings):
    return regression.run(model, device=device, **(QUICK | settings))


def run_true(family, **settings):
    """Of an implementation that may refuse gemma2's softcap."""
    try:
        return run(family, **settings)
    except regression_models.RegressionError as error:
        if family == "gemma2" and "softcap" in str(error):
            pytest.skip("softcap is refused")
        raise


# The true implementations


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_passes(family, dtype, device, monkeypatch):
    # In TF32, to which cuDNN would round convolutions of float32, rounding hides other errors.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    report = run_true(family, dtype=dtype, device=device)
    assert report.passed, "\n".join(map(str, report.failures))
    assert {check.quantity for check in report.checks} == {*EQUAL_WEIGHTS, "loss", "parameters"}
    gradients = [check for check in report.checks if check.quantity == "gradient"]
    model = regression_models.model_builder(family)("eager")
    parameters = {name for name, _ in model.named_parameters()}
    assert {check.parameter for check in gradients} == parameters
    assert len(gradients) == 3 * len(parameters)
    epsilon = regression_training.PRECISIONS[dtype].epsilon
    assert 0.01 * epsilon < report.worst("gradient").baseline < 200 * epsilon  # it does round
    assert bool(report.kernels) == (device == "cuda")


@pytest.mark.parametrize("candidate", ["sdpa", "megasoftmax_softmax", regression_models.UNFUSED])
def test_pairs_by_other_implementations(candidate):
    report = run("pair", candidate=candidate)
    assert report.passed, report.failures[0]


@pytest.mark.parametrize(("factor", "has_mask"), [(0.0, True), (1.001, True), (1.0, False)])
def test_a_fault_in_the_bias_or_the_mask_of_pairs_is_found(factor, has_mask, monkeypatch):
    def faulty(query, key, value, bias, excluded):
        return pairs.fused(query, key, value, factor * bias, excluded if has_mask else None)

    monkeypatch.setitem(regression_models._ATTENTION_OF_PAIRS, "megasoftmax", faulty)
    report = run("pair")
    assert not report.passed
    named = any("biases" in (failure.parameter or "") for failure in report.failures)
    assert named or not has_mask


def test_pairs_by_an_unknown_implementation():
    with pytest.raises(regression.RegressionError, match="expected one of eager, sdpa"):
        run("pair", baseline="flash")


@pytest.mark.parametrize(
    ("candidate", "dtype"),
    [("megasoftmax_softmax", "fp32"), ("sdpa", "bf16"), ("megasoftmax", "pure-bf16")],
)
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_other_implementations_and_types_pass(family, candidate, dtype, device):
    report = run(family, candidate=candidate, dtype=dtype, device=device)
    assert report.passed, report.failures[0]


def test_kernels_are_counted(through_ops, monkeypatch):
    plant_options(monkeypatch, "softmax", fused=through_ops)
    report = run("bert", candidate=integration.SOFTMAX_NAME)
    assert report.passed, report.failures[0]
    layers = {"megasoftmax::softmax_forward": 2, "megasoftmax::softmax_backward": 2}
    assert report.kernels == (layers if through_ops else {})


def test_attention_on_a_cpu_passes(monkeypatch):
    """The way that a GPU takes, which does not write probabilities."""
    monkeypatch.setattr(integration, "takes_attention", lambda *rest: True)
    for dtype in ("fp32", "bf16"):
        report = run("bert", dtype=dtype)
        assert report.passed, report.failures[0]


# Planted faults. What the tolerances of bf16 find, those of fp32 find too.


def without_padding(**sizes):
    return integration.make_mask(**(sizes | {"attention_mask": None}))


def narrow_window(module, query, key, value, mask, sliding_window=None, **options):
    if sliding_window is not None:
        assert mask.window == (sliding_window - 1, 0)
        mask = mask._replace(window=(sliding_window - 2, 0))
    return integration.attention_forward(
        module, query, key, value, mask, sliding_window=sliding_window, **options
    )


def detached(argument):
    def forward(*tensors, **options):
        if options.get(argument) is not None:
            options[argument] = options[argument].detach()
        return integration.attention_forward(*tensors, **options)

    return forward


def rounded_scale(*tensors, scaling, **options):
    scaling = torch.tensor(scaling).bfloat16().item()
    return integration.attention_forward(*tensors, scaling=scaling, **options)


def swapped_heads(*tensors, **options):
    output, probabilities = integration.attention_forward(*tensors, **options)
    return output.flip(2), probabilities


def no_numbers(*tensors, **options):
    output, probabilities = integration.attention_forward(*tensors, **options)
    return output * torch.nan, probabilities


def register_faulty(forward=integration.attention_forward, make_mask=integration.make_mask):
    AttentionInterface.register("faulty", forward)
    AttentionMaskInterface.register("faulty", make_mask)


def run_faulty(
    model, forward=integration.attention_forward, make_mask=integration.make_mask, **settings
):
    register_faulty(forward, make_mask)
    return run(model, candidate="faulty", **settings)


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    register_faulty()


def test_each_model_trains_freely():
    """As in a loop of its own: neither the other two nor the comparison leave a trace."""
    report = run_faulty("llama", swapped_heads, learning_rate=0.01)
    assert report.repeated == [0, 1, 2]
    for name, training in (("eager", report.baseline), ("faulty", report.candidate)):
        torch.manual_seed(0)
        model = regression_models.model_builder("llama")(name).train()
        batches = regression_models.make_batches(model, QUICK["batch"], QUICK["length"], seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for batch in regression_models.take(batches, 3):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert training.losses == pytest.approx(losses, rel=1e-6)
    assert abs(report.candidate.losses[2] - report.baseline.losses[2]) > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "t5", "bert", "opt"])
def test_dropped_padding_is_caught(family, device):
    report = run_faulty(family, make_mask=without_padding, dtype="bf16", device=device)
    failed = [failure for failure in report.failures if failure.quantity == "gradient"]
    assert {failure.step for failure in failed} == {0}  # the padded one
    assert report.repeated == [0]


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_window_off_by_one_is_caught(family, device):
    report = run_faulty(family, narrow_window, dtype="bf16", device=device)
    assert report.failures[0].quantity == "gradient"
    assert any(".self_attn." in (failure.parameter or "") for failure in report.failures)


@pytest.mark.parametrize(
    ("family", "argument", "parameter"),
    [("gpt_oss", "s_aux", "sinks"), ("t5", "position_bias", "relative_attention_bias.weight")],
)
def test_missing_gradient_is_caught_and_named(family, argument, parameter, device):
    report = run_faulty(family, detached(argument), dtype="bf16", device=device)
    failed = [failure for failure in report.failures if failure.quantity in EQUAL_WEIGHTS]
    assert {failure.step for failure in failed} == {0, 1, 2}
    assert len({failure.parameter for failure in failed}) == 2  # of layers, or encoder and decoder
    for failure in failed:
        assert failure.parameter.endswith(f".{parameter}")
        assert 0.2 < failure.candidate < 1.01
        layer, _, name = failure.parameter.rpartition(".")
        assert f"step {failure.step}, layer {layer}, parameter {name}" in str(failure)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_oss", "swin"])
def test_rounded_scale_is_caught_in_fp32(family, device):
    report = run_faulty(family, rounded_scale, device=device)
    assert {failure.step for failure in report.failures} == {0, 1, 2}
    assert 1e-4 < report.failures[0].candidate < 1e-2


def test_swapped_heads_are_caught_in_bf16(device):
    assert not run_faulty("mixtral", swapped_heads, dtype="bf16", device=device).passed


def test_what_is_no_number_is_caught(device):
    report = run_faulty("gpt2", no_numbers, device=device)
    assert {failure.quantity for failure in report.failures} == {
        check.quantity for check in report.checks
    }

    def refuse(constant):
        raise AssertionError(constant)

    models = json.loads(to_json({"gpt2": report}), parse_constant=refuse)["models"]
    assert models["gpt2"]["candidate"]["losses"][0] == "nan"


# Dropout


def dropping_gpt2(resid_pdrop=0.0):
    """One layer, whose attention drops."""
    sizes = regression_models.TINY["gpt2"][1] | {"num_hidden_layers": 1}
    rates = {"attn_pdrop": 0.3, "resid_pdrop": resid_pdrop, "embd_pdrop": 0.0}
    return tiny("GPT2LMHeadModel", **sizes, **rates)


DROPPING = {"model": lambda: dropping_gpt2(), "dropout": True, "steps": 1, "checks": 1, "seeds": 32}


def with_dropout_of(forward, change=lambda dropout: dropout, factor=lambda dropout: 1.0):
    def faulty(*tensors, dropout=0.0, **options):
        output, probabilities = forward(*tensors, dropout=change(dropout), **options)
        return output * factor(dropout), probabilities

    return faulty


DROPOUT_FAULTS = {
    "no dropout": {"change": lambda dropout: 0.0},
    "twice the rate": {"change": lambda dropout: 2 * dropout},
    "no divisor": {"factor": lambda dropout: 1 - dropout},
}
unfused = functools.partial(integration.attention_forward, fused=False)


def test_same_entries_are_dropped_by_eager_and_softmax(device):
    settings = DROPPING | {"model": lambda: dropping_gpt2(resid_pdrop=0.1), "steps": 2}
    report = run(candidate="megasoftmax_softmax", device=device, **settings)
    assert report.passed, report.failures[0]
    assert report.dropout == "the same entries dropped"
    without = run(candidate="sdpa", device=device, **(settings | {"dropout": False}))
    assert without.dropout is None
    assert report.baseline.losses != without.baseline.losses


def test_same_entries_are_dropped_fused_and_unfused(device, monkeypatch):
    settings = DROPPING | {"model": lambda: dropping_gpt2(resid_pdrop=0.1)}
    if device == "cpu":  # as on a GPU, in plain torch
        monkeypatch.setattr(integration, "takes_attention", lambda *rest: True)
    report = run(baseline=regression_models.UNFUSED, device=device, dtype="bf16", **settings)
    assert report.passed, report.failures[0]
    assert report.dropout == "the same entries dropped"
    assert report.kernels_tested == (device == "cuda")


@pytest.mark.parametrize("fault", [*DROPOUT_FAULTS, "one entry of the seed"])
def test_dropout_fault_is_caught_where_entries_are_the_same(fault):
    def next_seed(query, *rest, seed=None, **options):
        seed = torch.randint(2**62, (1,)) + 1
        return attention(query, *rest, seed=seed, **options)

    attention = megasoftmax.attention
    if fault in DROPOUT_FAULTS:
        forward = with_dropout_of(unfused, **DROPOUT_FAULTS[fault])
    else:

        def forward(*tensors, **options):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(megasoftmax, "attention", next_seed)
                return unfused(*tensors, **options)

    report = run_faulty(forward=forward, baseline=regression_models.UNFUSED, **DROPPING)
    assert not report.passed
    if fault != "no dropout":  # which draws no seed
        assert report.dropout == "the same entries dropped"
        assert report.failures[0].quantity == "gradient"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_honest_swap_passes_over_seeds(dtype, device):
    candidate = "megasoftmax" if device == "cuda" and dtype == "bf16" else "sdpa"
    report = run(candidate=candidate, dtype=dtype, device=device, **DROPPING)
    assert report.passed, report.failures[0]
    assert report.dropout == "means compared over 32 seeds at 99.9% confidence"
    found = {check.quantity for check in report.checks}
    assert found == {*EQUAL_WEIGHTS, "loss", "parameters", *regression_dropout.QUANTITIES}
    parameters = len([*dropping_gpt2().named_parameters()])
    over_seeds = [c for c in report.checks if c.quantity in regression_dropout.QUANTITIES]
    assert len(over_seeds) == 2 + 2 * parameters
    assert report.worst("gradient over seeds").baseline > 1e-4  # it does drop


@pytest.mark.parametrize("fault", DROPOUT_FAULTS)
def test_dropout_fault_is_caught_over_seeds(fault, device):
    forward = with_dropout_of(ALL_ATTENTION_FUNCTIONS["sdpa"], **DROPOUT_FAULTS[fault])
    report = run_faulty(forward=forward, make_mask=sdpa_mask, device=device, **DROPPING)
    assert not report.passed
    assert {failure.quantity for failure in report.failures} <= {*regression_dropout.QUANTITIES}
    assert "standard error" in str(report.failures[0])


def test_model_without_dropout_says_so():
    report = run("llama", dropout=True, steps=1, checks=1)
    assert report.passed
    assert report.dropout == "none in this model"


@pytest.mark.parametrize(
    ("draws", "how"),
    [
        (([], [], []), comparison.NOTHING_DROPPED),
        (([("seed", 1)],) * 3, comparison.SAME_ENTRIES),
        (([("seed", 1)], [("dropout", 8)], [("seed", 1)]), comparison.OTHER_ENTRIES),
        (([("seed", 1)], [], [("seed", 1)]), comparison.OTHER_ENTRIES),
        (([("seed", 1)], [("seed", 1)], [("dropout", 8)]), comparison.OTHER_ENTRIES),
    ],
)
def test_what_is_drawn_decides_how_dropout_is_compared(draws, how):
    """The reference counts: far from both sides, it would allow anything."""
    trainees = [
        SimpleNamespace(
            draws=drawn,
            differentiate=lambda *arguments, **options: None,
            optimizer=SimpleNamespace(zero_grad=lambda: None),
        )
        for drawn in draws
    ]
    assert comparison._how_dropped(trainees, {}) == how


@pytest.mark.parametrize(
    ("tail", "degrees", "expected"),
    [(0.01, 15, 2.947), (0.001, 15, 4.073), (0.001, 30, 3.646), (0.05, 60, 2.000)],
)
def test_quantiles_are_those_of_tables(tail, degrees, expected):
    assert regression_dropout.quantile(tail, degrees) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_is_the_same_in_every_type(dtype):
    with regression_training._SameDropout() as mode:
        torch.manual_seed(0)
        dropped = torch.nn.functional.dropout(torch.ones(1000, dtype=dtype), 0.25)
    torch.manual_seed(0)
    keep = torch.rand(1000) >= 0.25
    torch.testing.assert_close(dropped, (keep.double() / 0.75).to(dtype))
    assert mode.draws == [("dropout", 1000)]


def test_generator_of_the_caller_is_left_alone():
    def batches(batch, length, seed):
        model = dropping_gpt2()
        for given in regression_models.make_batches(model, batch, length, seed):
            states.append(torch.random.get_rng_state())
            yield given

    states = []
    run(data=batches, candidate="megasoftmax", **(DROPPING | {"steps": 2}))
    assert torch.equal(*states[:2])


# How distances are measured and judged


class Perceptron(torch.nn.Module):
    """Two layers; what differs between implementations is `fault`, and when is `spoilt`."""

    def __init__(self, fault=None, weights=None):
        super().__init__()
        self.fault = fault
        self.first = torch.nn.Linear(4, 256)
        self.second = torch.nn.Linear(256, 4)
        self.dropout = torch.nn.Dropout(0.5)
        self.dtypes = set()
        if weights is not None:
            torch.nn.init.zeros_(self.first.bias)
            self.first.weight.data[0] = weights

    def forward(self, inputs, targets, spoilt=None):
        hidden = self.first(inputs)
        if self.fault == "offset":
            hidden = hidden + 1e-7
        hidden = self.second(self.dropout(hidden.relu()))
        self.dtypes.add(hidden.to(torch.float32).softmax(-1, dtype=torch.float32).dtype)
        self.dtypes.add(hidden.float().dtype)
        loss = (hidden - targets).square().mean()
        if self.fault == "spoilt" and spoilt is not None and spoilt.any():
            loss = 1.5 * loss
        if self.fault == "frozen":
            loss = loss.detach() + 0 * self.first(inputs).sum()
        return SimpleNamespace(loss=loss)


def random_batches(batch, length, seed, spoilt=()):
    generator = torch.Generator().manual_seed(seed)
    for step in range(64):
        inputs, targets = torch.randn(2, batch, 4, generator=generator)
        yield {
            "inputs": inputs.round(),
            "targets": targets,
            "spoilt": torch.tensor([step in spoilt]),
        }


def factory(fault, **settings):
    return lambda name: Perceptron(fault if name == "other" else None, **settings)


def test_module_of_ones_own(device):
    same = run(factory(None), candidate="other", data=random_batches, device=device)
    assert same.passed
    assert same.items == "samples"
    assert same.items_per_step == QUICK["batch"]
    frozen = run(factory("frozen"), candidate="other", data=random_batches, device=device)
    gradients = [failure for failure in frozen.failures if failure.quantity == "gradient"]
    assert {failure.layer for failure in gradients} == {"first", "second"}  # zeros and None


def test_rectifier_at_the_border_is_no_failure():
    """A unit whose input is exactly 0, or 1e-7 with the other implementation."""
    weights = torch.tensor([1.0, -1.0, 0.0, 0.0])

    def batches(batch, length, seed):
        for given in random_batches(batch, length, seed):
            given["inputs"][:, :2] = 1 + given["inputs"][:, :1].abs()
            yield given

    model = factory("offset", weights=weights)
    report = run(model, candidate="other", data=batches, steps=1)
    assert report.passed, report.failures[0]
    assert report.repeated == [0]


def test_fault_between_the_chosen_steps_is_caught():
    def batches(batch, length, seed):
        return random_batches(batch, length, seed, spoilt={5})

    report = run(factory("spoilt"), candidate="other", data=batches, steps=9, checks=3)
    assert {failure.quantity for failure in report.failures} == {"loss"}
    assert {check.step for check in report.checks if check.quantity == "gradient"} == {0, 1, 8}
    assert report.failures[0].step == 5


def test_reference_computes_in_float64_throughout():
    built = []

    def build(name):
        built.append(Perceptron())
        return built[-1]

    run(build, data=random_batches)
    assert [model.dtypes for model in built] == [{torch.float32}] * 2 + [{torch.float64}]
    assert all(model.dropout.p == 0 for model in built)


def test_a_model_has_its_own_weights_again_after_an_error():
    precision = regression_training.PRECISIONS["fp32"]
    trainee = regression_training.Trainee(
        "candidate", "x", torch.nn.Linear(2, 3), precision, "cpu", 1
    )
    own = {name: each.detach().clone() for name, each in trainee.parameters.items()}
    with pytest.raises(RuntimeError), trainee.lent({n: each + 1 for n, each in own.items()}):
        raise RuntimeError
    assert all(torch.equal(each, own[name]) for name, each in trainee.parameters.items())


def test_gradients_are_measured_against_what_is_around():
    sizes = {
        "blocks.0.query.weight": (3.0, 3.0),  # its layer's largest is its own
        "blocks.0.query.bias": (2.0, 3.0),
        "blocks.0.key.weight": (0.4, 0.75),  # a quarter of the query's
        "blocks.0.key.bias": (1e-9, 0.5),  # a quarter of the query's bias; 0.4 stands in its layer
        "blocks.1.key.bias": (1e-9, 1e-3 * math.sqrt(13.16 / 5)),  # nothing around but the model
    }
    parameters = {name: torch.nn.Parameter(torch.zeros(4)) for name in sizes}
    for parameter, (size, _) in zip(parameters.values(), sizes.values(), strict=True):
        parameter.grad = torch.full((4,), -size)
    expected = {name: scale for name, (_, scale) in sizes.items()}
    assert regression_training.gradient_scales(parameters) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("steps", "checks", "chosen"),
    [
        *((32, 5, {0, 1, 11, 21, 31}), (3, 3, {0, 1, 2}), (1, 5, {0}), (2, 5, {0, 1})),
        *((9, 1, {0}), (9, 2, {0, 1})),
    ],
)
def test_chosen_steps(steps, checks, chosen):
    assert comparison._chosen_steps(steps, checks) == chosen


# Data


def test_batches_have_every_kind_of_padding():
    model = regression_models.model_builder("gpt2")("eager")
    batches = [*regression_models.take(regression_models.make_batches(model, 3, 16, seed=1), 4)]
    assert ["attention_mask" in batch for batch in batches] == [True, False, False, True]
    for batch in (batches[0], batches[3]):
        keep, labels = batch["attention_mask"].bool(), batch["labels"]
        assert 8 <= keep[:2].sum(1).min() <= keep[:2].sum(1).max() <= 12
        assert not keep[0, 0]
        assert keep[0, -1]
        assert keep[1, 0]
        assert not keep[1, -1]
        assert keep[2].all()
        assert (labels[~keep] == -100).all()
        begin = keep[0].int().argmax()
        assert labels[0, begin] == -100
        assert labels[0, begin + 1] == batch["input_ids"][0, begin + 1]
    text = bytes(batches[1]["input_ids"][0].tolist())
    assert text in bytes(regression_models.read_text().tolist())


def test_masked_labels_are_what_was_masked():
    model = regression_models.model_builder("bert")("eager")
    batch = next(regression_models.make_batches(model, 3, 16, seed=1))
    ids, labels, keep = batch["input_ids"], batch["labels"], batch["attention_mask"].bool()
    assert (ids[labels != -100] == regression_models.MASK).all()
    assert (labels[~keep] == -100).all()
    assert (labels[labels != -100] > 1).all()
    assert ((labels != -100).sum(1) > 0).all()


# Models


def test_checkpoint_folder(tmp_path):
    torch.manual_seed(7)
    model = tiny("GPT2LMHeadModel", **regression_models.TINY["gpt2"][1])
    model.save_pretrained(tmp_path)
    expected = run(lambda: GPT2LMHeadModel.from_pretrained(tmp_path), steps=1)
    with_weights = run(str(tmp_path), steps=1)
    assert with_weights.passed
    assert with_weights.baseline.losses == expected.baseline.losses
    (tmp_path / "model.safetensors").unlink()
    random = run(str(tmp_path), steps=1)
    assert random.passed
    assert random.baseline.losses == run("gpt2", steps=1).baseline.losses


def bert():
    return tiny("BertForMaskedLM", **regression_models.TINY["bert"][1])


def test_factory_is_imported(monkeypatch, tmp_path):
    (tmp_path / "some_models.py").write_text("from test_regression import bert, random_batches")
    monkeypatch.syspath_prepend(tmp_path)
    imported = run("some_models:bert", steps=1)
    assert imported.baseline.losses == run("bert", steps=1).baseline.losses


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("gpt3", {}, "model: expected one of gpt2, .*got 'gpt3'"),
        ("no_such_module:factory", {}, "model: expected package.module:name"),
        ("json:no_such_name", {}, "no_such_name"),
        ("json:__name__", {}, "expected a callable"),
        (lambda: torch.nn.Linear(2, 2), {}, "take the name .*Linear"),
        (lambda name: "bert", {}, "expected an nn.Module .*, got a str$"),
        (
            lambda: tiny("MPNetForMaskedLM", num_hidden_layers=1, vocab_size=256),
            {},
            "MPNetForMaskedLM refuses 'megasoftmax': .*computes attention itself",
        ),
        (
            lambda name: torch.nn.Linear(2, 2 + len(name)),
            {"data": random_batches},
            "same parameters",
        ),
        ("gpt2", {"candidate": "no_such"}, "GPT2LMHeadModel refuses 'no_such'"),
        ("gpt2", {"dtype": "fp16"}, "dtype: expected one of fp32, bf16, pure-bf16"),
        ("gpt2", {"device": "toaster"}, "device: 'toaster'"),
        ("gpt2", {"seeds": 15}, "seeds: expected at least 16, got 15"),
        ("gpt2", {"steps": 0}, "steps: expected at least 1, got 0"),
        ("gpt2", {"length": 1000}, "length: expected at most 512"),
        ("gpt2", {"data": "json:no_such_name"}, "data: expected package.module:name"),
        ("gpt2", {"data": lambda batch, length, seed: []}, "data: expected 3 batches, got 0"),
        ("gpt2", {"data": lambda batch, length, seed: [3] * 3}, "data: expected mappings"),
        ("gpt2", {"data": random_batches}, "reference 'eager': step 0 raised ValueError"),
        ("gpt2", {"learning_rate": 1e30}, "baseline 'eager': expected a finite"),
    ],
)
def test_wrong_use_is_explained(model, settings, message):
    with pytest.raises(regression_models.RegressionError, match=message):
        run(model, **settings)


def test_folder_without_a_configuration(tmp_path):
    with pytest.raises(regression_models.RegressionError, match=r"config\.json"):
        run(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(regression_models.RegressionError, match="NoSuchModel"):
        run(str(tmp_path))


@pytest.mark.parametrize("baseline", [math.inf, math.nan])
@pytest.mark.parametrize("candidate", [0.5, math.inf, math.nan])
def test_nothing_passes_where_the_baseline_is_not_finite(baseline, candidate):
    """A reference of 0 makes any distance from it infinite."""
    check = regression.Check("loss", 0, None, baseline, candidate, 8 * baseline)
    assert not check.passed
    assert check.excess == math.inf


# The command


@pytest.fixture
def invoke(device, tmp_path):
    """Run the command, which must exit with the code; its output, JSON and HTML."""

    def invoke(*arguments, code=0):
        quick = [f"--{name}={value}" for name, value in QUICK.items()]
        files = [f"--json={tmp_path / 'report.json'}", f"--html={tmp_path / 'report.html'}"]
        options = [f"--device={device}", *quick, *files, *arguments]
        result = command("regress", *options, code=code)
        assert result.exception is None or isinstance(result.exception, SystemExit), result
        contents = (tmp_path / "report.json").read_text(), (tmp_path / "report.html").read_text()
        return result.output, json.loads(contents[0]), contents[1]

    return invoke


def test_command_passes(invoke, device):
    output, found, page = invoke("--model=gpt2", "--model=swin", "--dtype=bf16")
    assert output.count("same") >= 10
    untested = 2 if device == "cpu" else 0
    assert output.count("same, kernels not tested") == untested
    assert page.count("kernels not tested") == untested
    assert ("Kernels not tested: gpt2, swin" in output) == (device == "cpu")
    tables = [line for line in output.splitlines() if line.startswith(("  ", " ─"))]
    assert len(tables) > 15
    assert max(map(len, tables)) <= 80
    assert "…" not in output
    assert "\ngradient, worst of all parameters: transformer." in output
    assert found["models"]["gpt2"]["kernels_tested"] == (device == "cuda")
    assert "All models" in output
    assert found["passed"] is True
    assert list(found["models"]) == ["gpt2", "swin"]
    report = found["models"]["gpt2"]
    assert report["failures"] == []
    assert report["settings"]["dtype"] == "bf16"
    assert len(report["reference"]["losses"]) == 3
    assert report["costs"]["candidate"]["tokens_per_second"] > 0
    assert (report["costs"]["candidate"]["peak_mebibytes"] is None) == (device == "cpu")
    assert page.count("<svg") == 2
    assert "<!-- transformer.h.0.ln_1.weight -->" in page  # a name, drawn as lines
    losses = re.findall(
        r'<path d="M[^"]*" clip-path="[^"]*" style="fill: none; (stroke[^"]*)"', page
    )
    widths = {float(re.search(r"stroke-width: ([\d.]+)", style)[1]) for style in losses}
    assert {5.0, 3.0, 1.5} <= widths  # three curves, of which each is seen
    assert 'class="failed"' not in page
    assert not re.search(r"(src|href)=\"(?!#)|@import|<script|url\((?!#)", page)


def test_command_fails_with_what_is_wrong(invoke):
    register_faulty(detached("s_aux"))
    output, found, page = invoke("--model=gpt_oss", "--candidate=faulty", code=1)
    assert "DIFFERS" in output
    named = r"gradient, step \d, layer model\.layers\.\d\.self_attn, parameter sinks: 1\.00e\+00"
    assert re.search(f"REGRESSION {named}", output)
    assert found["passed"] is False
    assert len(found["models"]["gpt_oss"]["failures"]) >= 6
    assert re.search(f"<li>{named}", page)


def test_command_compares_dropout(invoke):
    output, found, page = invoke("--model=bert", "--candidate=sdpa", "--dropout", "--seeds=16")
    text = "dropout: means compared over 16 seeds at 99.9% confidence"
    assert text in " ".join(output.split())
    assert text in page
    assert found["models"]["bert"]["dropout"] == text.removeprefix("dropout: ")
    quantities = {check["quantity"] for check in found["models"]["bert"]["checks"]}
    assert quantities >= {*regression_dropout.QUANTITIES}


def test_command_explains_wrong_use(invoke):
    output, found, page = invoke("--model=gpt2", "--model=<gpt3>", code=2)
    assert "Error: model: expected one of gpt2" in output
    assert "no result" in output
    assert found["passed"] is False
    assert found["models"]["gpt2"]["passed"] is True
    assert "\N{FACTORY}" not in output  # :factory: is an emoji of rich
    assert "'<gpt3>'" in found["models"]["<gpt3>"]["error"]
    assert "<h2>&lt;gpt3&gt;</h2>" in page
    invoke("--dtype=int8", code=2)
    invoke("--all", "--steps=0", code=2)


def test_command_survives_a_broken_factory(invoke, monkeypatch, tmp_path):
    (tmp_path / "own_models.py").write_text(
        "from test_regression import bert as factory\n"
        "def broken(name): raise OSError('disk on fire')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    output, found, _ = invoke("--model=own_models:broken", "--model=own_models:factory", code=2)
    assert "Traceback" in output
    assert "disk on fire" in output
    assert "own_models:factory: same" in output  # :factory: is an emoji of rich
    assert found["models"]["own_models:broken"] == {"error": "OSError: disk on fire"}
    assert found["models"]["own_models:factory"]["passed"] is True
    invoke(f"--json={tmp_path / 'no_folder' / 'report.json'}", code=2)


def test_command_runs_all_families(invoke, monkeypatch):
    asked = []

    def run(name, **settings):
        asked.append((name, settings))
        raise regression_models.RegressionError("not today")

    monkeypatch.setattr(regression, "run", run)
    invoke("--all", "--lr=0.5", "--baseline=sdpa", "--seed=3", code=2)
    assert [name for name, _ in asked] == FAMILIES
    settings = asked[0][1]
    assert (settings["learning_rate"], settings["baseline"], settings["seed"]) == (0.5, "sdpa", 3)


def test_package_imports_neither_transformers_nor_this(forks):
    code = (
        "import sys, megasoftmax, megasoftmax.__main__; "
        "print([m for m in sys.modules if m.startswith(('transformers', 'matplotlib')) "
        "or 'regression' in m])"
    )
    result = forks.run(code)
    assert result.stdout.strip() == "[]", result.stderr
