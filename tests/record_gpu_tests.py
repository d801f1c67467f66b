"""Runs the tests and appends their counts to benchmarks/results/gpu_tests.csv.

    python tests/record_gpu_tests.py                        # all tests, on a machine with a GPU
    python tests/record_gpu_tests.py --commit 7303be7 -n 8  # the rest goes to pytest

The exit code is that of pytest.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import measure  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.csv"
FIELDS = ["passed", "failed", "skipped", "failures", "note"]


class Recorder:
    """A plugin of pytest that counts what tests end with, and names failures at once."""

    def __init__(self):
        self.counts = Counter(passed=0, failed=0, skipped=0)
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.fail(report.nodeid)
        elif report.skipped:
            self.counts["skipped"] += not hasattr(report, "wasxfail")
        else:
            self.counts["passed"] += report.when == "call"

    def pytest_collectreport(self, report):
        if report.failed:
            self.fail(report.nodeid)

    def fail(self, name: str):
        print(f"\nFAILED {name}", flush=True)
        self.counts["failed"] += 1
        self.failed.append(name)

    @property
    def failures(self) -> str:
        files = Counter(name.partition("::")[0] for name in self.failed)
        return "; ".join(f"{count} of {file}" for file, count in files.items())


def main():
    parser = argparse.ArgumentParser(description="Run the tests and record their counts.")
    parser.add_argument("--commit", default="", help="of a copy without git")
    parser.add_argument("--note", default="", help="such as the cause of a failure")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options, arguments = parser.parse_known_args()
    recorder = Recorder()
    # Its pool of processes may keep a worker of pytest-xdist from ending for minutes.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    code: int | pytest.ExitCode = pytest.ExitCode.INTERRUPTED
    try:
        code = pytest.main(arguments, plugins=[recorder])
    finally:
        if recorder.counts.total():
            common = measure.provenance(options.commit)
            with measure.results(options.out, common, FIELDS, resume=True) as write:
                ending = "interrupted" if code == pytest.ExitCode.INTERRUPTED else ""
                note = "; ".join(filter(None, (options.note, ending)))
                write({**recorder.counts, "failures": recorder.failures, "note": note})
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
