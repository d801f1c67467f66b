"""megasoftmax check: calls that are right pass, faults of the kernels are found and reported."""

import functools
import itertools

import pytest
import torch
from faults import FAULTS, lost_query, other_scale, without
from inputs import command

import megasoftmax
from megasoftmax.build import library
from megasoftmax.check import SUITE, check
from megasoftmax.check.choices import distances_of_drawn, in_order

FIRST = 3000
# Faults of options that few calls have.
RARE = {"without_softcap", "without_top_k", "without_top_p", "without_min_p"}


@pytest.mark.parametrize("family", SUITE.families)
def test_calls_are_right(family):
    outcomes = [SUITE.attempt(family, seed, "cpu") for seed in range(FIRST, FIRST + 20)]
    failed = [outcome.in_words() for outcome in outcomes if outcome.has_failed]
    assert not failed
    assert 0.05 < max(outcome.ratio for outcome in outcomes) < 0.9, "bounds of another size"


# Faults of what is compared with the reference


def one_key(function, *tensors, **given):
    """One entry of the results is a little wrong."""
    output = function(*tensors, **given)
    return output + 0.1 * (torch.arange(output.numel()) == output.numel() // 2).view(output.shape)


def other_indices(function, *tensors, **given):
    p, indices = function(*tensors, **given)
    return p, indices.flip(-1)


def nan(function, *tensors, **given):
    return function(*tensors, **given) * float("nan")


@pytest.fixture
def plant(monkeypatch):
    """Puts a fault into all calls but those of the reference."""

    def planted(family, fault):
        real = getattr(megasoftmax, family)

        @functools.wraps(real)
        def call(*tensors, fused=None, **given):
            function = functools.partial(real, fused=fused)
            return (
                function(*tensors, **given)
                if fused is False
                else fault(function, *tensors, **given)
            )

        monkeypatch.setattr(megasoftmax, family, call)

    return planted


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        *((function, fault) for function, fault, _ in FAULTS),
        ("softmax", without("mask")),
        ("softmax_topk", other_scale),
        ("softmax_topk", other_indices),
        *(
            (function, fault)
            for function in ("softmax", "attention")
            for fault in (lost_query, one_key, nan)
        ),
    ],
)
def test_fault_is_found(plant, function, fault):
    plant(function, fault)
    family = "softmax_topk" if function == "sample" else function
    seeds = range(FIRST, FIRST + (80 if fault.__name__ in RARE else 20))
    outcomes = (SUITE.attempt(family, seed, "cpu") for seed in seeds)
    failed = (outcome for outcome in outcomes if outcome.has_failed)
    assert len(list(itertools.islice(failed, 2))) == 2


NAN, INF = float("nan"), float("inf")
CLOSE = [3, 1, 2, 2 + 1e-8]  # the last two are the same float32


@pytest.mark.parametrize(
    ("indices", "numbers", "error", "expected"),
    [
        ([], CLOSE, 0, True),
        ([0, 2, 3], CLOSE, 0, True),
        ([0, 3, 2], CLOSE, 0, False),
        ([0, 3], CLOSE, 0, False),  # a lower index is left out
        ([0, 2, 3], CLOSE, 3e-7, True),
        ([0, 3, 2], CLOSE, 3e-7, True),
        ([0, 3], CLOSE, 3e-7, True),
        ([0, 3, 2], [3, 1, 2, 2], 3e-7, False),  # equals
        ([0, 2, 1, 3], CLOSE, 3e-7, False),
        ([0, 2], [3, 1, 2, 2 + 1e-6], 3e-7, False),
        ([2, 1, 0], [1, 1 + 2e-7, 1 + 4e-7], 3e-7, True),
        ([0, 1, 2], [1, 1 + 2e-7, 1 + 4e-7], 3e-7, True),
        ([0, 2, 1], [1, 1 + 4e-7, 1 + 2e-6], 3e-7, False),
        ([0, 2, 2], CLOSE, 3e-7, False),  # twice
        ([0, 4, 2], CLOSE, 3e-7, False),
        ([0, 1], [1e4 + 1e-5, 1e4 + 2e-5], 1e-7, True),  # the same float32
        ([1, 0], [1e4 + 1e-5, 1e4 + 2e-5], 1e-7, False),
        ([1, 0, 2], [INF, NAN, 5], INF, True),
        ([0, 1, 2], [INF, NAN, 5], INF, False),
        ([0, 1], [-0.0, 0.0], 0, True),
        ([1, 0], [-0.0, 0.0], 0, False),
        ([1, 0], [-1 - 1e-8, -1.0], 3e-7, True),
        ([0, 1], [-INF, -INF], 0, True),
    ],
)
def test_order_is_right_up_to_rounding(indices, numbers, error, expected):
    found = torch.tensor([indices, indices], dtype=torch.int64)
    rows = torch.tensor([numbers, numbers], dtype=torch.float64)
    right = in_order(found, rows, torch.full_like(rows, error), torch.float32)
    assert right.tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("drawn", "number", "expected"),
    [(5, 0.49, 0), (5, 0.6, 0.1), (7, 0.5, 0), (7, 0.2, 0.3), (9, 0.99, INF), (6, 0.1, INF)],
)
def test_distance_of_what_is_drawn(drawn, number, expected):
    p, indices = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[5, 7, 9]])
    given = torch.tensor([drawn]), p, indices, torch.tensor([number])
    assert distances_of_drawn(*given).tolist() == pytest.approx([expected])
    for of_nothing in (0 * p, NAN * p):
        found = distances_of_drawn(given[0], of_nothing, *given[2:])
        assert found.tolist() == [0 if drawn == 5 else INF]


# The command


run = functools.partial(command, "check")


def test_command_without_a_gpu_says_so_and_checks_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = tmp_path / "report.txt"
    result = run("--seconds=1", f"--report={report}", "--family=softmax")
    assert result.output.startswith("torch sees no CUDA GPU: the paths of a CPU are checked")
    verdict, *rest = report.read_text().splitlines()
    assert verdict.startswith("right: ")
    assert verdict.endswith(" calls agree with the reference (CPU paths; no kernel ran)")
    assert verdict in result.output
    assert f"torch: {torch.__version__}, CUDA {torch.version.cuda or 'none'}" in rest
    assert any(line.startswith("softmax: configurations ") for line in rest)


def test_command_reports_wrong_results_and_how_to_see_them_again(plant, monkeypatch, tmp_path):
    report = tmp_path / "report.txt"
    options = "--device=cpu", f"--report={report}"
    plant("attention", other_scale)
    result = run("--seconds=1", "--family=attention", *options, code=1)
    text = report.read_text()
    assert text.startswith("WRONG: ")
    line = next(each for each in text.splitlines() if each.startswith("megasoftmax check"))
    seed = line.split("--seed ")[1].split()[0]
    assert line == f"megasoftmax check --family attention --seed {seed} --device cpu"
    assert line in result.output
    again = run("--family=attention", f"--seed={seed}", *options, code=1)
    assert again.output.count(line) == 1
    monkeypatch.undo()
    run("--family=attention", f"--seed={seed}", *options)


def test_command_without_a_result(monkeypatch, tmp_path):
    report = tmp_path / "report.txt"
    options = "--seconds=0", f"--report={report}"
    wrong = functools.partial(run, code=2)
    found = wrong("--device=cpu", *options).output
    assert "NO RESULT: no call of softmax, softmax_topk, attention ran" in found
    monkeypatch.setattr(library, "load", lambda: library.Status(False, reason="no nvcc"))
    found = wrong("--device=cuda", *options).output
    assert "Error: no kernels to check: no nvcc" in found
    report.unlink()
    wrong("--device=tpu", *options)
    assert not report.exists()
    missing = f"--report={tmp_path / 'no folder' / 'report.txt'}"
    assert "Error: report: " in wrong("--device=cpu", missing).output
    report.write_text("an earlier one")
    assert "family: expected one of softmax, " in wrong("--family=mean", *options).output
    found = wrong(*options, "--seconds=-3").output
    assert "seconds: expected a number from 0 on, got -3" in found
    assert report.read_text() == "an earlier one"


def test_another_process_runs_calls():
    report = check(1, families=["softmax"], device="cpu", processes=1)
    assert report.passed, str(report)


@pytest.mark.gpu
def test_kernels_are_right():
    report = check(30, device="cuda")
    assert report.passed, str(report)
