"""Draws the README's picture and fills its tables from benchmarks/results: never by hand.

python benchmarks/plot.py            # rewrites docs/speedup.png and the marked parts of README.md
python benchmarks/plot.py --check    # fails when README.md does not match the results
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
import typer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speedup.png"
OURS = "megasoftmax"
SHOWN = {OURS: "#1b6ca8", "torch.compile": "#e08e45", "eager": "#b9b9b9"}

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a CSV file in benchmarks/results; empty when it is missing."""
    path = RESULTS / name
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_case(rows: list[Row], direction: str) -> dict[tuple[str, str], dict[str, Row]]:
    """{(shape, variant): {implementation: row}} of one pass, in the order of the file."""
    cases: dict[tuple[str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["pass"] == direction:
            cases[row["shape"], row["variant"]][row["implementation"]] = row
    return cases


def draw(rows: list[Row]) -> None:
    """Forward and backward, per cent of the copy bandwidth, for each case of the table."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 8), sharey=True)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        cases = by_case(rows, direction)
        labels = [f"{shape.replace('x', '×')}  {variant}" for shape, variant in cases]
        height = 0.8 / len(SHOWN)
        for i, (name, color) in enumerate(SHOWN.items()):
            values = [
                float(implementations[name]["percent_of_copy"]) if name in implementations else 0.0
                for implementations in cases.values()
            ]
            places = [j + (i - 1) * height for j in range(len(labels))]
            axis.barh(places, values, height, color=color, label=name)
        axis.axvline(100, color="black", linewidth=0.8)
        axis.set_title(direction)
        axis.set_xlabel("% of copy bandwidth (fewest bytes / time)")
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper right", ncols=3, frameon=False)
    gpu, torch = rows[0]["gpu"], rows[0]["torch"]
    figure.suptitle(f"Attention softmax, bf16, {gpu}, torch {torch}")
    figure.tight_layout()
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def table(rows: list[Row]) -> str:
    """A Markdown table: microseconds and per cent of copy, ours beside the best peer."""
    lines = [
        "| scores, bf16 | variant | pass | µs | % of copy | best peer | µs | speedup |",
        "|---|---|---|--:|--:|---|--:|--:|",
    ]
    for direction in ("forward", "backward", "forward+backward"):
        for (shape, variant), implementations in by_case(rows, direction).items():
            ours = implementations[OURS]
            peers = [row for name, row in implementations.items() if name not in (OURS, "copy")]
            cells = [f"[{shape.replace('x', ',')}]", variant, direction]
            cells += [ours["microseconds"], ours["percent_of_copy"]]
            if peers:
                best = min(peers, key=lambda row: float(row["microseconds"]))
                speedup = float(best["microseconds"]) / float(ours["microseconds"])
                cells += [best["implementation"], best["microseconds"], f"{speedup:.2f}×"]
            else:
                cells += ["", "", ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", origin(rows[0], "bench_softmax.py")])


def summary(rows: list[Row]) -> str:
    """The cases that the front page shows: one line per shape, forward and backward."""
    forward, backward = by_case(rows, "forward"), by_case(rows, "backward")
    lines = [
        "| scores, bf16 | variant | forward µs (% of copy) | backward µs (% of copy) "
        "| eager forward µs | compiled forward µs |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case, implementations in forward.items():
        cells = [f"[{case[0].replace('x', ',')}]", case[1]]
        for row in (implementations[OURS], backward[case][OURS]):
            cells.append(f"{float(row['microseconds']):.0f} ({float(row['percent_of_copy']):.0f})")
        for name in ("eager", "torch.compile"):
            row = implementations.get(name)
            cells.append(f"{float(row['microseconds']):.0f}" if row else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reference_table(rows: list[Row]) -> str:
    """The reference path on a CPU beside the eager code that it replaces."""
    lines = ["| case | eager ms | reference ms | ratio |", "|---|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row['case']} | {row['eager_ms']} | {row['reference_ms']} | {row['ratio']} |"
        )
    return "\n".join(lines)


def rows_table(rows: list[Row]) -> str:
    """Plain softmax of rows, ours beside every peer; small cases as in a CUDA graph."""
    peers = ["torch.softmax", "torch.compile", "liger", "quack"]
    cases: dict[tuple[str, ...], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = (row["shape"], row["dim"], row["dtype"], row["pass"])
        cases[key][row["timing"]][row["implementation"]] = row
    lines = [
        f"| scores | pass | timing | copy µs | {OURS} µs | % of copy | {' µs | '.join(peers)} µs |",
        "|---|---|---|" + "--:|" * (3 + len(peers)),
    ]
    for (shape, dim, dtype, direction), timings in cases.items():
        timing = "graph" if "graph" in timings else "call"
        found = timings[timing]
        scores = f"[{shape.replace('x', ',')}] {dtype}" + ("" if dim == "-1" else f", dim {dim}")
        cells = [scores, direction, timing, found["copy"]["microseconds"]]
        cells += [found[OURS]["microseconds"], found[OURS]["percent_of_copy"]]
        cells += [found[name]["microseconds"] if name in found else "" for name in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", origin(rows[0], "bench_rows.py")])


def origin(row: Row, script: str) -> str:
    """Where, with what and when a table was measured."""
    return (
        f"{row['gpu']}, torch {row['torch']}, commit {row['commit']}, {row['date']}; "
        f"`python benchmarks/{script}`."
    )


def fill(text: str, marker: str, content: str) -> str:
    """Replaces what stands between `<!-- marker -->` and `<!-- /marker -->`."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def main(check: bool = False) -> None:
    """Fills README.md and docs/numbers.md from the results, or checks that they match."""
    softmax, reference, plain = read("softmax.csv"), read("reference_cpu.csv"), read("rows.csv")
    parts = {
        ROOT / "README.md": {"summary": summary(softmax), "reference": reference_table(reference)},
        ROOT / "docs" / "numbers.md": {"softmax": table(softmax)},
    }
    if plain:
        parts[ROOT / "docs" / "numbers.md"]["rows"] = rows_table(plain)
    for path, markers in parts.items():
        old = path.read_text()
        new = old
        for marker, content in markers.items():
            new = fill(new, marker, content)
        if check and new != old:
            sys.exit(f"{path.name} does not match benchmarks/results: run benchmarks/plot.py")
        path.write_text(new)
    if not check:
        draw(softmax)


if __name__ == "__main__":
    typer.run(main)
