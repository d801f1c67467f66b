"""The benchmark of generation on tiny models: what it writes."""

import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bench_generation
from tables import generation_table


def test_quick_run_measures_every_case(tmp_path):
    """Transformers compiles nothing on a CPU."""
    out = tmp_path / "generation.csv"
    bench_generation.main(device="cpu", tokens=3, quick=True, only="", out=out, commit="abc")
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [
        (str(case), name)
        for case in bench_generation.CASES
        for name in bench_generation.IMPLEMENTATIONS
    ]
    assert [(row["case"], row["implementation"]) for row in rows] == expected
    for row in rows:
        assert (row["commit"], row["torch"], row["tokens"]) == ("abc", torch.__version__, "3")
        assert float(row["tokens_per_second"]) > 0
    table = generation_table(rows)
    assert all(f"| {case} |" in table for case, _ in expected)


def test_time_of_the_prompt_is_left_out(monkeypatch):
    """20 s for a prompt and the first token, and 2 s for each further one."""
    now = [0.0]

    class Model:
        def generate(self, prompt, max_new_tokens, min_new_tokens, streamer):
            assert min_new_tokens == max_new_tokens
            streamer.put(prompt)
            now[0] += 18
            for _ in range(max_new_tokens):
                now[0] += 2
                streamer.put(torch.zeros(1))
            streamer.end()

    monkeypatch.setattr(bench_generation.time, "perf_counter", lambda: now[0])
    assert bench_generation.seconds_per_token(Model(), torch.zeros(1), 5, {}) == 2
