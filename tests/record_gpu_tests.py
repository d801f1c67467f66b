"""Runs the tests and appends their counts to benchmarks/results/gpu_tests.csv.

    python tests/record_gpu_tests.py                        # all tests, on a machine with a GPU
    python tests/record_gpu_tests.py --commit 7303be7 -n 8  # the rest goes to pytest

The exit code is that of pytest.
"""

import argparse
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
    """A plugin of pytest that counts what a run ends with."""

    def __init__(self):
        self.counts: dict[str, int] = {}
        self.failures = ""

    def pytest_terminal_summary(self, terminalreporter):
        stats = terminalreporter.stats
        failed = [*stats.get("failed", []), *stats.get("error", [])]
        files = Counter(report.nodeid.partition("::")[0] for report in failed)
        self.failures = "; ".join(f"{count} of {file}" for file, count in files.items())
        self.counts = {name: len(stats.get(name, [])) for name in ("passed", "skipped")}
        self.counts["failed"] = len(failed)


def main():
    parser = argparse.ArgumentParser(description="Run the tests and record their counts.")
    parser.add_argument("--commit", default="", help="of a copy without git")
    parser.add_argument("--note", default="", help="such as the cause of a failure")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options, arguments = parser.parse_known_args()
    recorder = Recorder()
    code = pytest.main(arguments, plugins=[recorder])
    if not recorder.counts:
        return int(code)
    common = measure.provenance(options.commit)
    with measure.results(options.out, common, FIELDS, resume=True) as write:
        write(recorder.counts | {"failures": recorder.failures, "note": options.note})
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
