"""The examples print finite numbers, notice a difference, and run from the command line."""

import functools
import importlib.util
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from faults import plant_options
from transformers.utils import logging
from typer.testing import CliRunner

from megasoftmax.integrations import transformers as integration

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = ["--steps=6", "--batch=2", "--length=32", "--layers=1", "--width=16", "--heads=2"]
SAMPLE = ["--count=60", "--samples=2", "--k=7", *TINY]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in this process, which has all imports already: the output.

    It must exit with the code. A message in its place is printed, and the code is then 1.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("COLUMNS", "80")
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()

    def run_example(name, *arguments, code=0):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        found, output = ended.value.code, "".join(capsys.readouterr())
        if isinstance(found, str):
            found, output = 1, output + found
        assert found == code, output
        return output

    yield run_example
    monkeypatch.undo()
    integration.register()  # where a fault was
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def run_alone(folder, *arguments):
    """What a Python process of its own prints."""
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_runs_from_the_command_line(tmp_path):
    """In a process of its own, which finds the modules beside the example. Others run below."""
    assert "megasoftmax: " in run_alone(tmp_path, EXAMPLES / "train_gpt.py", *TINY)


def test_cells_of_the_notebook_run():
    """One after the other, as they stand. It is stored without results."""
    names = {}
    for cell in json.loads((EXAMPLES / "first_steps.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), names)
    assert names["difference"] < (1e-6 if names["device"] == "cpu" else 1e-3)
    assert names["apart"] < (1e-5 if names["device"] == "cpu" else 1e-2)
    assert names["bias"].grad.abs().max() > 0
    assert names["found"].regime.name


def losses_of(output):
    """The rows (eager, megasoftmax, difference) of the table that a comparison prints."""
    found = re.findall(r"^│ +\d+ +│ (\S+) +│ (\S+) +│ (\S+) +│$", output, re.MULTILINE)
    rows = [tuple(map(float, row)) for row in found]
    assert len(rows) == 6  # the steps of TINY
    assert all(math.isfinite(number) for row in rows for number in row)
    return rows


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_train_gpt_compares(model, device, run, tmp_path):
    output = run("train_gpt.py", "--model", model, "--device", device, *TINY)
    rows = losses_of(output)
    assert all(abs(eager - ours) < 1e-3 for eager, ours, _ in rows)
    assert 5 < rows[0][0] < 6  # log 256 = 5.5
    assert [*tmp_path.iterdir()] == [tmp_path / "outputs"]
    assert (tmp_path / "outputs" / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    path = "torch's scaled_dot_product_attention, because" if device == "cpu" else ""
    assert f"megasoftmax runs {path}" in output
    assert ("fused" in output) == (device == "cuda")
    told = re.findall(r"^(\d) of 6, \d+ s, about \d+ s left: eager .*/s$", output, re.MULTILINE)
    assert told == list("123456")  # without a terminal


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("train_gpt.py", "--heads=3", "--heads: expected a divisor of --width 16, got 3"),
        ("train_gpt.py", "--device=toaster", "'--device': 'toaster' cannot be used"),
        pytest.param(
            *("train_gpt.py", "--device=cuda", "'--device': 'cuda' cannot be used"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("train_gpt.py", "--plot=nowhere/a.png", "--plot: no folder nowhere"),
        ("train_gpt.py", "--plot=.", "--plot: cannot write ."),
        ("train_gpt.py", "--heads=many", "'--heads'"),
        ("generate.py", "--heads=16", "--heads: expected an even --width / --heads, got 16 / 16"),
        ("generate.py", "--prompt=", "--prompt: expected at least one character"),
        ("finetune_t5.py", "--heads=3", "--heads: expected a divisor"),
        ("train_sinks.py", "--width=15 --heads=3", "--heads: expected an even"),
        ("train_router.py", "--k=9", "--k: expected at most --experts 8, got 9"),
        ("train_packed.py", "--heads=3", "--heads: expected a divisor of --width 16, got 3"),
        ("triangle_attention.py", "--heads=3", "--heads: expected a divisor of --width 16, got 3"),
    ],
)
def test_wrong_options_are_refused_before_training(run, name, option, message):
    output = run(name, "--device=cpu", *TINY, *option.split(), code=2)
    assert message in output
    assert "Traceback" not in output
    assert "│" not in output
    assert "megasoftmax runs" not in output


@pytest.mark.parametrize(("variable", "expected"), [(None, 1), ("3", 2)])
def test_a_cpu_computes_with_one_thread_unless_told(variable, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        runpy.run_path(str(EXAMPLES / "training.py"))["device_named"]("cpu")
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("loss", [1.5, math.nan])
def test_last_losses_that_differ_are_noticed(loss):
    agree = runpy.run_path(str(EXAMPLES / "training.py"))["curves_agree"]
    first, second = (
        SimpleNamespace(name="a", losses=[2.0, last], speed=1.0) for last in (1.0, loss)
    )
    assert not agree(first, second, 0.1)
    assert agree(first, first, 0.1)


def test_generate_compares(device, run):
    output = run("generate.py", "--prompt", "class ", "--device", device, *SAMPLE)
    assert output.count("│ class ") == 2
    assert "the samples are equal" in output
    assert "sample runs its" in output
    assert ("reference path" in output) == (device == "cpu")
    first, last = re.search(r"megasoftmax: loss (\S+) to (\S+),", output).groups()
    assert 5 < float(first) < 6
    assert math.isfinite(float(last))


COMPARISONS = {
    "finetune_t5.py": ("megasoftmax", "the biases learn alike"),
    "train_sinks.py": ("megasoftmax", "the sinks learn alike"),
    "train_router.py": ("softmax_topk", "the routers agree"),
    "triangle_attention.py": ("megasoftmax", "the biases learn alike"),
}


@pytest.mark.parametrize("example", COMPARISONS)
def test_comparison_agrees(example, device, run):
    name, verdict = COMPARISONS[example]
    output = run(example, "--device", device, *TINY)
    assert "the first gradients agree" in output
    assert f"tokens/s: {name} /" in output
    assert all(abs(first - second) < 1e-3 for first, second, _ in losses_of(output))
    assert verdict in output


def of_mask(**change):
    return lambda mask, options: (mask._replace(**change), options)


def of_option(name, factor):
    return lambda mask, options: (mask, options | {name: factor and factor * options[name]})


# What mask and options of the attention function become, or a function and its options; further
# arguments of the example, and its verdict.
FAULTS = {
    "train_gpt.py": (of_mask(causal=False), [], "THE CURVES DIFFER"),
    "train_packed.py": (
        *(of_mask(visible=None), ["--steps=30", "--batch=5", "--lr=0.01"]),
        "THE CURVES DIFFER",
    ),
    "generate.py": (
        *(("sample", {"scale": 1.0}), ["--temperature=0.3", *SAMPLE]),
        "THE SAMPLES DIFFER",
    ),
    "finetune_t5.py": (of_option("position_bias", 1.01), [], "the first gradients DIFFER"),
    "train_sinks.py": (of_option("s_aux", None), [], "the first gradients DIFFER"),
    "train_router.py": (
        *(("softmax_topk", {"renormalize": False}), []),
        "the first gradients DIFFER",
    ),
    "triangle_attention.py": (("attention", {"bias": None}), [], "the first gradients DIFFER"),
}


def test_triangle_attention_keeps_no_scores(run):
    output = run("triangle_attention.py", "--device=cpu", *TINY, "--heads=8")
    einsum, ours = re.search(r"of 96 points +│ (\d+) +│ (\d+) +│", output).groups()
    assert int(ours) < int(einsum) / 2


@pytest.mark.parametrize("example", FAULTS)
def test_fault_is_noticed(example, run, monkeypatch):
    fault, arguments, verdict = FAULTS[example]
    if callable(fault):
        original = integration.attention_forward

        def faulty(module, query, key, value, mask, **options):
            mask, options = fault(mask, options)
            return original(module, query, key, value, mask, **options)

        monkeypatch.setattr(integration, "attention_forward", faulty)
    else:
        function, changed = fault
        plant_options(monkeypatch, function, **changed)
    output = run(example, "--device=cpu", *TINY, *arguments, code=1)
    assert verdict in output
    assert example not in COMPARISONS or COMPARISONS[example][1] not in output


def test_train_packed_compares(device, run):
    """On a GPU in bf16, through fused attention."""
    output = run("train_packed.py", "--device", device, *TINY, "--batch=5")
    assert "5 documents of 2 to 32 bytes: 62 tokens packed, 160 padded" in output
    assert "tokens/s: packed / padded" in output
    rows = losses_of(output)
    assert all(5 < padded < 6 for padded, _, _ in rows)  # log 256 = 5.5
    tolerance = 1e-3 if device == "cpu" else 5e-2
    assert all(abs(padded - packed) < tolerance for padded, packed, _ in rows)


def test_finetune_t5_takes_a_checkpoint(monkeypatch, tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    monkeypatch.syspath_prepend(EXAMPLES)
    from finetune_t5 import build_model

    integration.register()
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1}
    saved = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=384, dropout_rate=0.5))
    saved.to(torch.bfloat16).save_pretrained(tmp_path)
    model = build_model("megasoftmax", tmp_path, layers=3, width=32, heads=4, seed=0)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], p.float()) for name, p in saved.named_parameters())
    assert all(p.dtype == torch.float32 for p in parameters.values())
    assert model.decoder.config._attn_implementation == "megasoftmax"
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_config_sets_defaults_and_the_command_line_wins(run):
    config = EXAMPLES / "configs" / "train_llama.yaml"
    output = run("train_gpt.py", "--config", config, "--device=cpu", *TINY)
    assert "tolerance 5.0e-02" in output  # of bf16, as the file says
    assert len(losses_of(output)) == 6  # as TINY says, not the file


@pytest.fixture
def command(monkeypatch):
    """A command with --config, which prints what it was given."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from training import Config

    app = typer.Typer(add_completion=False, rich_markup_mode=None)

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
        ("steps: 3\nname: [1", "config.yaml:2: expected ',' or ']'"),
        ("steps: 3\n\nnom: x", "config.yaml:3: expected options among"),
        ("name: \x00", "expected text in YAML"),
    ],
)
def test_config_is_refused(command, tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    result = command("--config", file)
    assert result.exit_code == 2
    assert message in re.sub(r"[│\s]+", " ", result.output)
    assert "Traceback" not in result.output


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_train_megatron_gpt_learns(device, tmp_path):
    change = ["--steps=60", "--batch=8", "--lr=0.01", "--window=8", "--layers=2"]
    example = EXAMPLES / "train_megatron_gpt.py"
    output = run_alone(tmp_path, example, "--device", device, *TINY, *change)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)\n", output)]
    assert len(losses) == 10
    first, last = map(float, re.search(r"\nloss (\S+) to (\S+),", output).groups())
    assert 5 < first < 6  # log 256 = 5.5
    assert last < 4
    assert f"through {'the softmax, because' if device == 'cpu' else 'fused attention'}" in output


def test_train_ring_compares(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run_alone(tmp_path, *launcher, EXAMPLES / "train_ring.py")
    pairs = re.findall(r"step \d+: loss (\S+), over 2 ranks (\S+)\n", output)
    assert len(pairs) == 10
    assert all(abs(float(whole) - float(split)) < 1e-4 for whole, split in pairs)
    assert 5 < float(pairs[0][0]) < 6.5  # log 256 = 5.5
    assert float(pairs[-1][0]) < float(pairs[0][0])
    assert "the losses agree" in output


def test_fault_of_a_ring_is_noticed(run, monkeypatch):
    """Of one process, whose ring is not causal."""
    message = "run it with torchrun --standalone --nproc-per-node 2"
    assert message in run("train_ring.py", code=1)
    begin = torch.distributed.init_process_group
    alone = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "init_process_group", functools.partial(begin, **alone))
    plant_options(monkeypatch, "ring_attention", causal=False)
    assert "the losses DIFFER" in run("train_ring.py", code=1)
