"""Benchmarks of tiny models: what they write, and that what is wrong is not timed."""

import csv
import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
import bench_bias
import bench_generation
import bench_reference
import bench_training
import training_cases
import training_others
from faults import plant_options
from measured import WITHOUT_ATTENTION
from tables import generation_table, training_table
from training_cases import cases

GRADIENTS = {"weight": torch.tensor([3.0, 4.0])}


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch):
    """What is tested lies before the logits, which take half of the time with all tokens."""
    monkeypatch.setattr(training_cases, "VOCABULARY", 512)


def run(out, only="", device="cpu", benchmark=bench_training, **options):
    """The rows that a quick run writes."""
    options |= {"out": out, "only": only, "device": device, "commit": "abc"}
    benchmark.main(rounds=1, quick=True, **options)
    return read(out)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_quick_run_measures_every_implementation(device, tmp_path):
    rows = run(tmp_path / "training.csv", device=device)
    every = [*cases(), *training_others.cases()]
    expected = [(case.tiny(), name) for case in every for name in case.implementations]
    assert sum(len(case.implementations) for case in cases()) == 48
    for row, (case, implementation) in zip(rows, expected, strict=True):
        assert (row["case"], row["implementation"]) == (case.name, implementation)
        assert (row["commit"], row["torch"], row["note"]) == ("abc", torch.__version__, "")
        tokens = int(row["batch"]) * (int(row["length"]) + int(row["targets"]))
        speed = tokens / float(row["step_ms"]) * 1e3
        assert float(row["tokens_per_second"]) == pytest.approx(speed, rel=1e-2, abs=1)
        assert bool(row["peak_memory_bytes"]) == (device == "cuda")
        if implementation == WITHOUT_ATTENTION:
            assert (row["loss"], row["gradient_difference"]) == ("", "")
            continue
        assert type(case) is not training_cases.Case or 6.0 < float(row["loss"]) < 7.2  # log 512
        assert float(row["gradient_difference"]) < 0.1
        is_first = implementation == case.implementations[0]
        assert not is_first or float(row["gradient_difference"]) == 0
    table = training_table(rows)
    shown = [row for row in rows if row["implementation"] != WITHOUT_ATTENTION]
    assert all(f"| {row['tokens_per_second']}" in table for row in shown)


def test_implementations_that_are_not_asked_for_do_not_run(tmp_path):
    rows = run(tmp_path / "training.csv", "GPT-2, 12", implementations="^sdpa$|^megasoftmax$")
    assert [row["implementation"] for row in rows] == ["sdpa", "megasoftmax"]
    options = {"benchmark": bench_bias, "implementations": "Mega|mega.*bias"}
    rows = run(tmp_path / "bias.csv", "swin-49", **options)
    assert {row["implementation"] for row in rows} == {"megasoftmax without bias"}
    with pytest.raises(TypeError, match="implementations"):  # it compares pairs of them
        inspect.signature(bench_reference.main).bind(implementations="eager")


def test_table_tells_memory_of_attention():
    """Of models that were measured without it too."""
    peaks = {"megasoftmax": 6, "eager": 10, WITHOUT_ATTENTION: 4}
    row = {"case": "a model", "batch": "2", "tokens_per_second": "7", "note": ""}
    rows = [
        {**row, "implementation": name, "peak_memory_bytes": str(peak * 2**30)}
        for name, peak in peaks.items()
    ]
    assert training_table(rows).endswith("| a model | 2 | 7 (6.0, 2.0) | 7 (10.0, 6.0) |")
    assert training_table(rows[:2]).endswith("| a model | 2 | 7 (6.0) | 7 (10.0) |")


def test_model_without_attention_gets_it_back():
    case = training_others.cases()[0].tiny()
    training = bench_training.Training(case, "cpu")
    before = training.gradients("eager")[0]
    with case.using(training.model, WITHOUT_ATTENTION):
        assert training.model(**training.inputs).loss.item() != pytest.approx(before)
    assert training.gradients("eager")[0] == before


@pytest.mark.parametrize(
    ("fault", "only", "parameter"),
    [
        ({"causal": False}, "GPT-2 .*tokens$", "weight"),
        ({"causal": False}, "8192 tokens, layers", "weight"),
        ({"scale": 1.0}, "Llama.* 2048", "[qk]_proj"),
        ({"bias": None}, "T5 .*tokens$", "relative_attention_bias"),
        ({"window": None}, "Mistral.* 8192", ""),
        ({"visible": None}, "documents", ""),
        ({"sink": None}, "gpt-oss", "sinks"),
        ({"bias": None}, "wav2vec2", "pos"),
        ({"window": None}, "gpt-oss", ""),
    ],
)
def test_wrong_implementation_is_named_and_not_timed(fault, only, parameter, tmp_path, monkeypatch):
    for name in ("softmax", "attention"):
        plant_options(monkeypatch, name, **fault)
    out = tmp_path / "training.csv"
    with pytest.raises(SystemExit, match=f"megasoftmax: wrong: the gradient of .*{parameter}"):
        run(out, only)
    for row in read(out):
        wrong = row["implementation"].startswith("megasoftmax")
        assert row["note"].startswith("wrong") == wrong
        assert bool(row["tokens_per_second"]) != wrong


@pytest.mark.parametrize(
    ("loss", "gradient", "note"),
    [
        (9.81, [3.0, 5.9], ""),
        (9.59, [3.0, 4.0], "wrong: expected a loss of 9.80000, got 9.59000"),
        (torch.nan, [3.0, 4.0], "wrong: expected a loss of 9.80000, got nan"),
        (9.80, [3.0, 6.1], "wrong: the gradient of weight is off by 0.42"),
        (9.80, [3.0, torch.nan], "wrong: the gradient of weight is off by inf"),
        (9.80, None, "wrong: the gradient of weight is off by inf"),
    ],
)
def test_comparison(loss, gradient, note):
    """With the first that has enough memory."""
    gradients = {"weight": None if gradient is None else torch.tensor(gradient)}
    results = {"sdpa": (9.8, GRADIENTS), "megasoftmax": (loss, gradients)}

    def compute(name):
        if name == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return results[name]

    rows = {name: {} for name in ("eager", "missing", *results)}
    bench_training.compare(SimpleNamespace(gradients=compute), rows)
    assert rows["eager"] == {"note": "out of memory"}
    assert rows["missing"] == {"note": "wrong: KeyError: 'missing'"}
    assert rows["sdpa"] == {"loss": "9.80000", "gradient_difference": "0.0000"}
    assert rows["megasoftmax"].get("note", "") == note


@pytest.mark.parametrize("case", [case for case in cases() if case.drops], ids=str)
def test_steps_drop_and_comparisons_do_not(case, monkeypatch):
    rates = []

    def dropout(tensor, p=0.5, training=True, inplace=False):
        rates.append(p if training else 0.0)
        return tensor

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    training = bench_training.Training(case.tiny(), "cpu")
    training.gradients("eager")
    assert set(rates) == {0.0}
    rates.clear()
    training.step("eager")
    assert set(rates) == {0.1}


def test_documents_have_positions_of_their_own():
    case = next(case for case in cases() if "documents" in case.name)
    positions = replace(case, length=16).inputs()["position_ids"]
    assert positions.tolist() == [[0, 1] * 8]
    assert case.batch * case.length == 8 * 1024


def test_quick_run_generates_in_every_case(tmp_path, monkeypatch):
    """Transformers compiles nothing on a CPU."""
    monkeypatch.undo()  # prompts have up to 1000 different tokens
    rows = run(tmp_path / "generation.csv", benchmark=bench_generation, tokens=3)
    pairs = itertools.product(bench_generation.CASES, bench_generation.IMPLEMENTATIONS)
    expected = [(str(case), name) for case, name in pairs]
    assert [(row["case"], row["implementation"]) for row in rows] == expected
    for row in rows:
        assert (row["commit"], row["torch"], row["tokens"]) == ("abc", torch.__version__, "3")
        assert float(row["tokens_per_second"]) > 0
    table = generation_table(rows)
    assert all(f"| {case} |" in table for case, _ in expected)


def test_time_of_the_prompt_is_left_out(monkeypatch):
    """20 s for a prompt and the first token, and 2 s for each further one."""
    now = [0.0]

    def generate(prompt, max_new_tokens, min_new_tokens, streamer):
        assert min_new_tokens == max_new_tokens
        streamer.put(prompt)
        now[0] += 18
        for _ in range(max_new_tokens):
            now[0] += 2
            streamer.put(torch.zeros(1))
        streamer.end()

    monkeypatch.setattr(bench_generation.time, "perf_counter", lambda: now[0])
    model = SimpleNamespace(generate=generate)
    assert bench_generation.seconds_per_token(model, torch.zeros(1), 5, {}) == 2
