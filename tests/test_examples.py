"""The examples run from the command line, print finite numbers and notice a difference."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps=6", "--batch=2", "--length=32", "--layers=1", "--width=16", "--heads=2"]

# Runs an example with attention that is never causal; the arguments follow.
RUN_WITH_FAULT = """
import runpy, sys
from megasoftmax.integrations import transformers as integration

attention_forward = integration.attention_forward

def faulty_forward(module, query, key, value, mask, **options):
    mask = mask._replace(causal=False)
    return attention_forward(module, query, key, value, mask, **options)

integration.attention_forward = faulty_forward
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_python(*arguments, folder):
    """Run this Python in `folder`; return (exit code, what it printed)."""
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout + result.stderr


def losses_of(output):
    """The rows (eager, megasoftmax, difference) of the table that a comparison prints."""
    rows = re.findall(r"│ +\d+ +│ (\S+) +│ (\S+) +│ (\S+) +│", output)
    return [tuple(map(float, row)) for row in rows]


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_train_gpt_compares(model, device, tmp_path):
    code, output = run_python(
        EXAMPLES / "train_gpt.py", "--model", model, "--device", device, *TINY, folder=tmp_path
    )
    assert code == 0, output
    rows = losses_of(output)
    assert len(rows) == 6
    assert all(math.isfinite(number) for row in rows for number in row)
    assert all(abs(eager - ours) < 1e-3 for eager, ours, _ in rows)
    assert 5 < rows[0][0] < 6  # log 256 = 5.5
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    assert "megasoftmax runs its" in output
    assert ("reference path" in output) == (device == "cpu")


def test_train_gpt_notices_a_difference(tmp_path):
    code, output = run_python(
        "-c", RUN_WITH_FAULT, EXAMPLES / "train_gpt.py", "--device", "cpu", *TINY, folder=tmp_path
    )
    assert code == 1, output
    assert "THE CURVES DIFFER" in output
    assert max(difference for *_, difference in losses_of(output)) > 1e-3


def test_train_gpt_alone_in_bfloat16(device, tmp_path):
    arguments = ["--attention", "megasoftmax", "--dtype", "bf16", "--device", device, *TINY]
    code, output = run_python(EXAMPLES / "train_gpt.py", *arguments, folder=tmp_path)
    assert code == 0, output
    first, last = re.search(r"megasoftmax: loss (\S+) to (\S+),", output).groups()
    assert math.isfinite(float(first))
    assert math.isfinite(float(last))


# Runs an example with a softmax_topk that ignores its scale; the arguments follow.
RUN_WITH_OTHER_SAMPLES = """
import pathlib, runpy, sys
from megasoftmax import reference_topk

call = reference_topk.call

def faulty_call(halves, needs_gradient, logits, k, scale, *others):
    return call(halves, needs_gradient, logits, k, 1.0, *others)

reference_topk.call = faulty_call
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SAMPLE = ["--count=60", "--samples=2", "--k=7", *TINY]


def test_generate_compares(device, tmp_path):
    code, output = run_python(
        EXAMPLES / "generate.py", "--prompt", "class ", "--device", device, *SAMPLE, folder=tmp_path
    )
    assert code == 0, output
    assert output.count("│ class ") == 2
    assert "the samples are equal" in output
    assert "softmax_topk runs its" in output
    assert ("reference path" in output) == (device == "cpu")
    first, last = re.search(r"loss (\S+) to (\S+)\n", output).groups()
    assert 5 < float(first) < 6
    assert math.isfinite(float(last))


def test_generate_notices_a_difference(tmp_path):
    code, output = run_python(
        "-c",
        RUN_WITH_OTHER_SAMPLES,
        EXAMPLES / "generate.py",
        "--temperature=0.3",
        "--device=cpu",
        *SAMPLE,
        folder=tmp_path,
    )
    assert code == 1, output
    assert "THE SAMPLES DIFFER" in output


def test_generate_depends_on_seed_and_k(tmp_path):
    found = []
    for change in ("--seed=0", "--seed=1", "--k=2"):
        code, output = run_python(
            EXAMPLES / "generate.py", "--device=cpu", *SAMPLE, change, folder=tmp_path
        )
        assert code == 0, output
        found.append(re.findall(r"^│.*│$", output, re.MULTILINE))
    assert found[0]
    assert found[0] != found[1]
    assert found[0] != found[2]


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_train_megatron_gpt_learns(device, tmp_path):
    change = ["--steps=60", "--batch=8", "--lr=0.01", "--window=8", "--layers=2"]
    code, output = run_python(
        EXAMPLES / "train_megatron_gpt.py", "--device", device, *TINY, *change, folder=tmp_path
    )
    assert code == 0, output
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)\n", output)]
    assert len(losses) == 10
    first, last = map(float, re.search(r"\nloss (\S+) to (\S+),", output).groups())
    assert 5 < first < 6  # log 256 = 5.5
    assert last < 4
    assert f"through {'the softmax, because' if device == 'cpu' else 'fused attention'}" in output
