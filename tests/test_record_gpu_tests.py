"""The script that records runs of the tests counts them and names the files that fail."""

import csv
import subprocess
import sys
from pathlib import Path

import record_gpu_tests
import torch

SCRIPT = Path(__file__).with_name("record_gpu_tests.py")
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(5))
def test_numbers(number):
    if number == 3:
        pytest.skip()
    assert number != 4

def test_fixture(missing):
    pass
"""


def test_counts_are_appended(tmp_path):
    (tmp_path / "test_numbers.py").write_text(TESTS)
    command = [sys.executable, SCRIPT, "--commit=abc", "--out=runs.csv", "--note=none"]
    command += ["-q", "-p", "no:cacheprovider", "test_numbers.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    runs = tmp_path / "runs.csv"
    with runs.open(newline="") as file:
        (first,) = csv.DictReader(file)
    record_gpu_tests.append(runs, first)
    with runs.open(newline="") as file:
        assert [*csv.DictReader(file)] == [first, first]
    assert (first["passed"], first["failed"], first["skipped"]) == ("3", "2", "1")
    assert first["failures"] == "2 of test_numbers.py"
    assert (first["commit"], first["torch"], first["note"]) == ("abc", torch.__version__, "none")
