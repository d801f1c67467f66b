"""The examples run from the command line, print finite numbers and notice a difference."""

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from megasoftmax.integrations.transformers import register

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps=6", "--batch=2", "--length=32", "--layers=1", "--width=16", "--heads=2"]

# Runs an example after a fault was planted; the arguments follow.
RUN = """
import pathlib, runpy, sys
{fault}
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAULTY_ATTENTION = """
from megasoftmax.integrations import transformers as integration

attention_forward = integration.attention_forward

def faulty_forward(module, query, key, value, mask, **options):
    {change}
    return attention_forward(module, query, key, value, mask, **options)

integration.attention_forward = faulty_forward
"""
NEVER_CAUSAL = FAULTY_ATTENTION.format(change="mask = mask._replace(causal=False)")
NO_SINK = FAULTY_ATTENTION.format(change='options.pop("s_aux")')
OTHER_BIAS = FAULTY_ATTENTION.format(
    change='options["position_bias"] = 1.01 * options["position_bias"]'
)
NO_SUM = """
import megasoftmax

softmax_topk = megasoftmax.softmax_topk

def faulty_topk(*arguments, **options):
    return softmax_topk(*arguments, **options | {"renormalize": False})

megasoftmax.softmax_topk = faulty_topk
"""
# Ignores the scale.
OTHER_SAMPLES = """
from megasoftmax import reference_topk

call = reference_topk.call

def faulty_call(halves, needs_gradient, logits, k, scale, *others):
    return call(halves, needs_gradient, logits, k, 1.0, *others)

reference_topk.call = faulty_call
"""


def run_python(*arguments, folder):
    """Run this Python in `folder`; return (exit code, what it printed)."""
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return result.returncode, result.stdout + result.stderr


def losses_of(output):
    """The rows (eager, megasoftmax, difference) of the table that a comparison prints."""
    rows = re.findall(r"^│ +\d+ +│ (\S+) +│ (\S+) +│ (\S+) +│$", output, re.MULTILINE)
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
        "-c",
        RUN.format(fault=NEVER_CAUSAL),
        EXAMPLES / "train_gpt.py",
        "--device",
        "cpu",
        *TINY,
        folder=tmp_path,
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
    first, last = re.search(r"megasoftmax: loss (\S+) to (\S+),", output).groups()
    assert 5 < float(first) < 6
    assert math.isfinite(float(last))


def test_generate_notices_a_difference(tmp_path):
    code, output = run_python(
        "-c",
        RUN.format(fault=OTHER_SAMPLES),
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


COMPARISONS = {
    "finetune_t5.py": ("megasoftmax", OTHER_BIAS, "the biases learn alike"),
    "train_sinks.py": ("megasoftmax", NO_SINK, "the sinks learn alike"),
    "train_router.py": ("softmax_topk", NO_SUM, "the routers agree"),
}


@pytest.mark.parametrize("example", COMPARISONS)
def test_comparison_agrees(example, device, tmp_path):
    name, _, verdict = COMPARISONS[example]
    code, output = run_python(EXAMPLES / example, "--device", device, *TINY, folder=tmp_path)
    assert code == 0, output
    assert "the first gradients agree" in output
    assert f"tokens/s: {name} /" in output
    rows = losses_of(output)
    assert len(rows) == 6
    assert all(math.isfinite(number) for row in rows for number in row)
    assert all(abs(first - second) < 1e-3 for first, second, _ in rows)
    assert verdict in output


@pytest.mark.parametrize("example", COMPARISONS)
def test_comparison_notices_a_fault(example, tmp_path):
    _, fault, verdict = COMPARISONS[example]
    code, output = run_python(
        "-c",
        RUN.format(fault=fault),
        EXAMPLES / example,
        "--device=cpu",
        *TINY,
        folder=tmp_path,
    )
    assert code == 1, output
    assert "the first gradients DIFFER" in output
    assert verdict not in output


def test_finetune_t5_takes_a_checkpoint(monkeypatch, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    monkeypatch.syspath_prepend(EXAMPLES)
    from finetune_t5 import build_model

    register()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1}
    saved = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=384, dropout_rate=0.5))
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    model = build_model("megasoftmax", tmp_path, layers=3, width=32, heads=4, seed=0)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], p.float()) for name, p in saved.named_parameters())
    assert all(p.dtype == torch.float32 for p in parameters.values())
    assert model.decoder.config._attn_implementation == "megasoftmax"
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_config_sets_defaults_and_the_command_line_wins(tmp_path):
    config = EXAMPLES / "configs" / "train_llama.yaml"
    arguments = ["--config", config, "--device=cpu", *TINY]
    code, output = run_python(EXAMPLES / "train_gpt.py", *arguments, folder=tmp_path)
    assert code == 0, output
    assert "tolerance 5.0e-02" in output  # of bf16, as the file says
    assert len(losses_of(output)) == 6  # as TINY says, not the file


@pytest.fixture
def command(monkeypatch):
    """A command with --config, which prints what it was given."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from training import Config

    app = typer.Typer(add_completion=False)

    @app.command()
    def main(steps: int = 1, name: str = "none", file: Path = Path("."), config: Config = None):
        print(steps, name, file)

    return lambda *arguments: CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize(
    ("text", "arguments", "printed"),
    [
        ("steps: 3\nfile: a/b", [], "3 none a/b"),
        ("steps: 3\nname: some", ["--steps=4"], "4 some ."),
    ],
)
def test_config_is_read(command, tmp_path, text, arguments, printed):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    result = command("--config", file, *arguments)
    assert (result.exit_code, result.output.strip()) == (0, printed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "expected options among file, name, steps, got stepz"),
        ("config: x", "got config"),
        ("- steps", "expected a mapping of options to values, got list"),
        ("", "got NoneType"),
        ("steps: many", "Invalid value for '--steps'"),
    ],
)
def test_config_is_refused(command, tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    result = command("--config", file)
    assert result.exit_code == 2
    assert message in re.sub(r"[│\s]+", " ", result.output)


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
