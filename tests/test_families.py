"""Models that ask for megasoftmax by name, and a small part of the sweep over all classes."""

import csv
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sweep_families
import torch
from models import MODELS, WITHOUT_INTERFACE, build_batch, tiny
from small_models import build
from transformers import AutoModelForMaskedLM, PreTrainedModel

from megasoftmax.integrations import by_name
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.patching import patch_model

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48}
IN_PART, NO_ATTENTION = "works in part", "no attention"
VERDICTS = {
    "LlamaForCausalLM": "works",
    "Gemma3ForCausalLM": "works",
    "T5ForConditionalGeneration": "works",
    "SwinForImageClassification": "works",
    "Swinv2ForImageClassification": "works",
    "DebertaV2ForMaskedLM": "works",
    "Wav2Vec2ConformerForSequenceClassification": "works",
    "FalconForCausalLM": "works",  # chooses the class of its attention by the name
    "DeepseekV4ForCausalLM": "works",  # extends the mask in its layers
    "DogeForCausalLM": "works",  # computes with its mask
    "BigBirdPegasusForConditionalGeneration": IN_PART,  # its encoder adds the mask itself
    "GotOcr2ForConditionalGeneration": "works",  # a part of it, for images, is never served
    "GitForCausalLM": "own attention",  # but for images, of which the call has none
    "SiglipModel": IN_PART,
    "MiniMaxForCausalLM": IN_PART,
    "LongT5ForConditionalGeneration": IN_PART,
    "LongformerForMaskedLM": "refused",
    "MPNetForMaskedLM": "refused",
    "XLNetLMHeadModel": "refused",
    "GPTNeoForCausalLM": "refused",
    "HYV4ForCausalLM": "refused",  # sparse attention
    "MambaForCausalLM": NO_ATTENTION,
}


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def implementations(model):
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return {part.config._attn_implementation for part in parts}


def build_mpnet(**options):
    return tiny("MPNetForMaskedLM", **SIZES, **options)


# The sweep


@pytest.mark.parametrize("name", VERDICTS)
def test_a_class_of_every_kind(name):
    """Both ways: the outcome is judged by what ran, and against "eager"."""
    outcomes = sweep_families.try_class(name)
    assert [outcome.verdict for outcome in outcomes] == [VERDICTS[name]] * 2, outcomes
    for outcome in outcomes:
        assert (outcome.served > 0) == (VERDICTS[name] in ("works", IN_PART))
        assert outcome.generation in ("", "same")


def test_sweep_notices_a_lost_mask(register, monkeypatch):
    monkeypatch.setattr(integration, "make_mask", lambda **sizes: None)
    register()
    verdicts = {outcome.verdict for outcome in sweep_families.try_class("LlamaForCausalLM")}
    assert verdicts == {"differs"}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("FlaubertWithLMHeadModel", "silent"),
        ("LongformerForMaskedLM", "differs"),
        ("XGLMForCausalLM", "unclear error"),
    ],
)
def test_sweep_notices_models_that_are_not_looked_at(name, verdict, monkeypatch):
    """Without `by_name` this is what they do."""
    monkeypatch.setattr(by_name, "_is_part", lambda model: True)
    outcome, patched = sweep_families.try_class(name)
    assert (outcome.verdict, patched.verdict) == (verdict, "refused")


def test_sweep_knows_an_unclear_error():
    model = build("LlamaForCausalLM")
    for problem in (
        KeyError("megasoftmax"),
        ValueError("use 'eager'"),
        TypeError("LlamaModel: use 'eager'"),
        ValueError("LlamaModel: not supported"),
    ):
        assert sweep_families.refusal(problem, model).verdict == "unclear error"
    clear = sweep_families.refusal(ValueError("LlamaModel: no; use 'eager'"), model)
    assert clear.verdict == "refused"


def test_rows_of_other_classes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the new rows have a column that they lack."""
    path = tmp_path / "families.csv"
    path.write_text("class,task\nMambaForCausalLM,causal\nSiglipModel,images\n")
    monkeypatch.setattr(sweep_families, "FILE", path)
    monkeypatch.setattr(sweep_families, "fill_pages", lambda: None)
    sweep_families.write([{"class": "SiglipModel", "task": "images", "of_today": "yes"}])
    with path.open(newline="") as file:
        found = {row["class"]: row["of_today"] for row in csv.DictReader(file)}
    assert found == {"MambaForCausalLM": "", "SiglipModel": "yes"}


def test_results_of_the_sweep_have_no_fault():
    with (ROOT / "benchmarks" / "results" / sweep_families.FILE).open(newline="") as file:
        rows = list(csv.DictReader(file))
    verdicts = {row[way] for row in rows for way in ("by_name", "by_patch_model")}
    assert not verdicts & set(sweep_families.FAULTS)
    works = [row for row in rows if row["by_name"] in ("works", IN_PART)]
    assert len(works) > 200
    uses = {row["class"]: row["uses"] for row in works}
    assert uses["EsmFold2Model"] == uses["T5ForConditionalGeneration"] == "learned bias"
    assert uses["BeitForImageClassification"] == "learned bias"
    assert uses["Swinv2ForImageClassification"] == "learned bias; windows"
    assert (uses["Gemma2ForCausalLM"], uses["GptOssForCausalLM"]) == (
        "softcap; windows",
        "sink; windows",
    )
    page = (ROOT / "docs" / "families.md").read_text()
    assert page.count("| class | kind | attention has |") == 2  # what families.js looks for
    assert all(row["by_patch_model"] == row["by_name"] for row in works)
    swept = {row["class"]: row["by_name"] for row in rows}
    assert {name: swept[name] for name in VERDICTS} == VERDICTS


# By name


@pytest.mark.parametrize("implementation", ["megasoftmax", "megasoftmax_softmax"])
def test_refusal_names_model_reason_and_remedy(implementation):
    message = (
        rf"MPNetForMaskedLM can run, got '{implementation}'; its layer .*attention\.attn "
        r"\(MPNetSelfAttention\) computes attention itself.*; use 'eager'"
    )
    with pytest.raises(ValueError, match=message):
        build_mpnet(attn_implementation=implementation)
    model = build_mpnet()
    own = implementations(model)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(implementation)
    assert implementations(model) == own


def test_checkpoint_is_refused_too(tmp_path):
    build_mpnet().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="MPNetForMaskedLM can run, got 'megasoftmax'"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="megasoftmax")
    AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", [*WITHOUT_INTERFACE, "t5", "llama"])
def test_models_are_set_as_a_whole(name):
    model = MODELS[name]()
    expected = model(**build_batch("left")).logits
    model.set_attn_implementation("megasoftmax")
    assert implementations(model) == {"megasoftmax"}
    assert {served.runs for served in patch_model(model).report.values()} == {"SDPA"}
    real = build_batch("left")["attention_mask"].bool()
    actual = model(**build_batch("left")).logits
    if "alibi" not in name:  # see tests/models.py
        torch.testing.assert_close(actual[real], expected[real], rtol=1e-5, atol=1e-5)
    for eager in ("eager", {"": "eager"}):
        model.set_attn_implementation("megasoftmax")
        model.set_attn_implementation(eager)
        assert implementations(model) == {"eager"}


def test_a_part_can_be_set_by_a_dictionary():
    images = SIZES | {"image_size": 8, "patch_size": 4}
    model = tiny("SiglipModel", text_config=SIZES, vision_config=images)
    model.set_attn_implementation("eager")
    model.set_attn_implementation({"text_config": "megasoftmax"})
    assert model.config.text_config._attn_implementation == "megasoftmax"
    assert model.config.vision_config._attn_implementation == "eager"


def test_warning_says_which_layers_stay(caplog):
    by_name._warn.cache_clear()
    caplog.set_level(logging.WARNING, by_name.__name__)
    for _ in range(2):
        build("GotOcr2ForConditionalGeneration", "megasoftmax")
    (message,) = caplog.messages
    assert "GotOcr2ForConditionalGeneration: 2 of 4 attention layers run megasoftmax" in message
    assert "layers.0.attn (GotOcr2VisionAttention) computes attention itself" in message


def test_parts_that_are_not_served_are_eager():
    model = build("GotOcr2ForConditionalGeneration", "megasoftmax")
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "megasoftmax"
    part = type(model.model.vision_tower)
    with pytest.raises(ValueError, match=f"{part.__name__} can run, got 'megasoftmax'"):
        part._from_config(model.config.vision_config, attn_implementation="megasoftmax")


def test_models_that_know_only_eager_get_its_mask():
    model = build("DeepseekV4ForCausalLM", "megasoftmax_softmax")
    assert implementations(model) == {"megasoftmax_softmax_eager_mask"}
    report = patch_model(model).report
    assert {served.runs for name, served in report.items() if "attn" in name} == {"softmax"}


def test_disabled_names_refuse_nothing(register, monkeypatch):
    monkeypatch.setenv("MEGASOFTMAX_DISABLE", "1")
    register()
    for name in ("MPNetForMaskedLM", "GPTNeoForCausalLM"):
        model, eager = build(name, "megasoftmax"), build(name)
        batch = sweep_families.make_batch(eager, "left")
        assert torch.equal(model(**batch).logits, eager(**batch).logits)


def test_methods_are_extended_once():
    before = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation
    integration.register()
    assert (PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation) == before


def test_old_version_of_transformers_is_named(tmp_path):
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text(
        '__version__ = "4.57.3"\nAttentionInterface = AttentionMaskInterface = None\n'
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import megasoftmax.integrations.transformers"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "ImportError: transformers: expected 5.17 or later, got 4.57.3; pip" in result.stderr
