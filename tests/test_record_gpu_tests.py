"""The script that records runs of the tests counts them and names the files that fail."""

import csv
import subprocess
import sys
from pathlib import Path

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
    earlier = "gpu,torch,commit,date,passed,failed,skipped,failures,note\n,,ab,,1,,,,\n"
    (tmp_path / "runs.csv").write_text(earlier)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert (tmp_path / "runs.csv").read_text().startswith(earlier)
    with (tmp_path / "runs.csv").open(newline="") as file:
        _, row = csv.DictReader(file)
    assert (row["passed"], row["failed"], row["skipped"]) == ("3", "2", "1")
    assert row["failures"] == "2 of test_numbers.py"
    assert (row["commit"], row["torch"], row["note"]) == ("abc", torch.__version__, "none")
