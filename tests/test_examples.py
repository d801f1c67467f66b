"""The examples print finite numbers, notice a difference, and run from the command line."""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import logging

from megasoftmax import reference_topk
from megasoftmax.integrations import transformers as integration

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps=6", "--batch=2", "--length=32", "--layers=1", "--width=16", "--heads=2"]
SAMPLE = ["--count=60", "--samples=2", "--k=7", *TINY]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in this process, which has all imports already: (exit code, its output)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "80")
    verbosity = logging.get_verbosity()

    def run_example(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return ended.value.code, "".join(capsys.readouterr())

    yield run_example
    monkeypatch.undo()
    integration.register()  # where a fault was
    logging.set_verbosity(verbosity)


@pytest.mark.parametrize(("name", "options"), [("train_gpt.py", TINY), ("generate.py", SAMPLE)])
def test_example_runs_from_the_command_line(name, options, tmp_path):
    command = [sys.executable, EXAMPLES / name, *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "megasoftmax: " in result.stdout


def losses_of(output):
    """The rows (eager, megasoftmax, difference) of the table that a comparison prints."""
    rows = re.findall(r"│ +\d+ +│ (\S+) +│ (\S+) +│ (\S+) +│", output)
    return [tuple(map(float, row)) for row in rows]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_train_gpt_compares(model, device, run, tmp_path):
    code, output = run("train_gpt.py", "--model", model, "--device", device, *TINY)
    assert code == 0, output
    rows = losses_of(output)
    assert len(rows) == 6
    assert all(math.isfinite(number) for row in rows for number in row)
    assert all(abs(eager - ours) < 1e-3 for eager, ours, _ in rows)
    assert 5 < rows[0][0] < 6  # log 256 = 5.5
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    assert "megasoftmax runs its" in output
    assert ("reference path" in output) == (device == "cpu")


def test_train_gpt_notices_a_difference(run, monkeypatch):
    """Attention that is never causal."""
    original = integration.attention_forward

    def faulty_forward(module, query, key, value, mask, **options):
        return original(module, query, key, value, mask._replace(causal=False), **options)

    monkeypatch.setattr(integration, "attention_forward", faulty_forward)
    code, output = run("train_gpt.py", "--device", "cpu", *TINY)
    assert code == 1, output
    assert "THE CURVES DIFFER" in output
    assert max(difference for *_, difference in losses_of(output)) > 1e-3


def test_train_gpt_alone_in_bfloat16(device, run):
    arguments = ["--attention", "megasoftmax", "--dtype", "bf16", "--device", device, *TINY]
    code, output = run("train_gpt.py", *arguments)
    assert code == 0, output
    first, last = re.search(r"megasoftmax: loss (\S+) to (\S+),", output).groups()
    assert math.isfinite(float(first))
    assert math.isfinite(float(last))


def test_generate_compares(device, run):
    code, output = run("generate.py", "--prompt", "class ", "--device", device, *SAMPLE)
    assert code == 0, output
    assert output.count("│ class ") == 2
    assert "the samples are equal" in output
    assert "softmax_topk runs its" in output
    assert ("reference path" in output) == (device == "cpu")
    first, last = re.search(r"loss (\S+) to (\S+)\n", output).groups()
    assert 5 < float(first) < 6
    assert math.isfinite(float(last))


def test_generate_notices_a_difference(run, monkeypatch):
    """A softmax_topk that ignores its scale."""
    call = reference_topk.call

    def faulty_call(halves, needs_gradient, logits, k, scale, *others):
        return call(halves, needs_gradient, logits, k, 1.0, *others)

    monkeypatch.setattr(reference_topk, "call", faulty_call)
    code, output = run("generate.py", "--temperature=0.3", "--device=cpu", *SAMPLE)
    assert code == 1, output
    assert "THE SAMPLES DIFFER" in output


def test_generate_depends_on_seed_and_k(run):
    found = []
    for change in ("--seed=0", "--seed=1", "--k=2"):
        code, output = run("generate.py", "--device=cpu", *SAMPLE, change)
        assert code == 0, output
        found.append(re.findall(r"^│.*│$", output, re.MULTILINE))
    assert found[0]
    assert found[0] != found[1]
    assert found[0] != found[2]
