"""The CSV files of benchmarks/results as tables and pictures need them: case by case."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS = "megasoftmax"
DENSE = "megasoftmax, dense bias"
DETERMINISTIC_UNFILLED = "megasoftmax deterministic, unfilled"
WITHOUT_ATTENTION = "without attention"
NOT_PEERS = (OURS, DENSE, DETERMINISTIC_UNFILLED, WITHOUT_ATTENTION, "megasoftmax_softmax", "copy")

Row = dict[str, str]
Case = dict[str, Row]  # by implementation
Key = TypeVar("Key")


def read(name: str | Path) -> list[Row]:
    """The rows of a CSV file of results, or of one with an absolute path; empty when missing."""
    path = RESULTS / name
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Case]:
    """{key of the row: case}, in the order of the file."""
    cases: dict[Key, Case] = defaultdict(dict)
    for row in rows:
        cases[key(row)][row["implementation"]] = row
    return cases


def by_case(rows: list[Row], direction: str) -> dict[tuple[str, str], Case]:
    """softmax.csv: {(shape, variant): case} of one pass."""
    of_pass = (row for row in rows if row["pass"] == direction)
    return by(of_pass, lambda row: (row["shape"], row["variant"]))


def by_timing(rows: list[Row], fields: tuple[str, ...]) -> dict[tuple[str, ...], Case]:
    """rows.csv and topk.csv: {values of the fields: case}, timed in a CUDA graph where possible."""
    cases: dict[tuple[str, ...], dict[str, Case]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = tuple(row[name] for name in fields)
        cases[key][row["timing"]][row["implementation"]] = row
    return {key: found.get("graph") or found["call"] for key, found in cases.items()}


def by_attention(rows: list[Row], direction: str) -> dict[str, Case]:
    """attention.csv: {case: case}, timed in one pass, without what refuses the case."""
    asked = {"kind": "time", "pass": direction, "note": ""}
    return by_model(row for row in rows if asked.items() <= row.items())


def by_model(rows: Iterable[Row]) -> dict[str, Case]:
    """training.csv, generation.csv and decoding.csv: {case: case}."""
    return by(rows, lambda row: row["case"])


def of_last_commit(rows: list[Row]) -> list[Row]:
    """Those of each device that were measured last."""
    last = {row["device"]: row["commit"] for row in rows}
    return [row for row in rows if row["commit"] == last[row["device"]]]


def fastest_peer(case: Case, figure: str) -> Row | None:
    """The peer that takes the least time; None where there is no peer."""
    peers = [row for name, row in case.items() if name not in NOT_PEERS and row[figure]]
    return min(peers, key=lambda row: float(row[figure]), default=None)
