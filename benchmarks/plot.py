"""Draws the pictures and fills the tables from benchmarks/results: never by hand.

python benchmarks/plot.py            # rewrites docs/*.png and the marked parts of README.md
python benchmarks/plot.py --check    # fails when README.md does not match the results
"""

import csv
import re
import sys
from collections import defaultdict
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
import typer

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speedup.png"
TUNING = ROOT / "docs" / "tuning.png"
ATTENTION = ROOT / "docs" / "attention.png"
TRAINING = ROOT / "docs" / "training.png"
OURS = "megasoftmax"
COLORS = [*plt.colormaps["tab20"].colors, *plt.colormaps["Dark2"].colors]
SHOWN = {OURS: "#1b6ca8", "torch.compile": "#e08e45", "eager": "#b9b9b9"}
DENSE = "megasoftmax, dense bias"
ATTENTION_PEERS = {
    "SDPA flash": "#b9b9b9",
    "SDPA cuDNN": "#6aa84f",
    "SDPA mem-efficient": "#8e7cc3",
    "FlexAttention": "#e08e45",
}
TRAINED = {
    OURS: SHOWN[OURS],
    "megasoftmax_softmax": "#7fb3d5",
    "sdpa": ATTENTION_PEERS["SDPA cuDNN"],
    "sdpa flash": ATTENTION_PEERS["SDPA mem-efficient"],
    "eager": SHOWN["eager"],
}

Row = dict[str, str]
Color = tuple[float, float, float]


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
    gpu, torch = rows[0]["gpu"], rows[0]["torch"]
    figure.suptitle(f"Attention softmax, bf16, {gpu}, torch {torch}")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.legend(handles, names, loc="lower center", ncols=3, frameon=False)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def draw_tuning(rows: list[Row]) -> None:
    """Per cent of the copy over the length of rows: a line for each regime of limits.h.

    Circles are the regimes that are chosen, vertical lines their longest rows.
    """
    panels: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        few = "1 row" if row["rows"] == "1" else f"{row['rows']} rows"
        panel = "tensor of 64 MiB" if row["timing"] == "call" else f"{few}, CUDA graph"
        panels[panel][row["direction"]].append(row)
    colors = dict(zip(dict.fromkeys(row["regime"] for row in rows), cycle(COLORS), strict=False))
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(13, 4 * len(panels)), sharey=True, squeeze=False
    )
    for line, (panel, directions) in zip(axes, panels.items(), strict=True):
        for axis, direction in zip(line, ("forward", "backward"), strict=True):
            axis.set_title(f"{direction}, {panel}")
            draw_regimes(axis, directions[direction], colors)
    handles = [plt.Line2D([], [], color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="lower center", ncols=8, frameon=False)
    gpu, torch, dtype = rows[0]["gpu"], rows[0]["torch"], rows[0]["dtype"]
    figure.suptitle(f"Row regimes, plain softmax, {dtype}, {gpu}, torch {torch}")
    axes[0, 0].set_ylim(0, 1.05 * max(float(row["percent_of_copy"]) for row in rows))
    inch = 1 / figure.get_figheight()
    figure.tight_layout(rect=(0, inch, 1, 1 - inch / 3))
    figure.savefig(TUNING, dpi=80)
    plt.close(figure)


def draw_regimes(axis: plt.Axes, rows: list[Row], colors: dict[str, Color]) -> None:
    """One panel: a direction, and so many rows."""
    lengths = [int(row["columns"]) for row in rows]
    chosen = [row for row in rows if row["chosen"] == "True"]
    for border in {int(row["longest"]) for row in chosen if row["longest"]}:
        if min(lengths) <= border <= max(lengths):
            axis.axvline(border, color="#999999", linewidth=0.8, linestyle=":")
    for name, color in colors.items():
        points = [
            (int(row["columns"]), float(row["percent_of_copy"]))
            for row in rows
            if row["regime"] == name
        ]
        if points:
            axis.plot(*zip(*points, strict=True), color=color, linewidth=1.2)
    for row in chosen:
        place = int(row["columns"]), float(row["percent_of_copy"])
        axis.plot(*place, "o", color=colors[row["regime"]], markeredgecolor="black", markersize=5)
    axis.axhline(100, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("columns")
    axis.set_ylabel("% of copy")
    axis.spines[["top", "right"]].set_visible(False)


def draw_attention(rows: list[Row]) -> None:
    """TFLOP/s of each case, forward and forward+backward; below, steps of decoding."""
    colors = {OURS: SHOWN[OURS], **ATTENTION_PEERS}
    trained = [row for row in rows if row["decode"] == "0"]
    panels = {name: by_attention(trained, "time", name) for name in ("forward", "forward+backward")}
    steps = [row for row in rows if row["decode"] == "1"]
    batches = list(dict.fromkeys(row["batch"] for row in steps))
    longest = max(len(cases) for cases in panels.values())
    bars = 0.42 * longest + 1.5  # inches
    heights = [bars, 4.0] if batches else [bars]
    figure = plt.figure(figsize=(14, sum(heights)))
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    upper, *lower = parts[:, 0]
    for axis, (direction, cases) in zip(upper.subplots(1, 2), panels.items(), strict=True):
        draw_bars(axis, cases, colors, "tflops")
        axis.set_title(direction)
        axis.set_xlabel("TFLOP/s")
    upper.suptitle(f"Attention, {rows[0]['gpu']}, torch {rows[0]['torch']}")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    upper.legend(handles, list(colors), loc="lower center", ncols=len(colors), frameon=False)
    upper.subplots_adjust(left=0.2, right=0.98, wspace=0.75, bottom=1.1 / bars, top=1 - 0.8 / bars)
    for part in lower:
        axes = part.subplots(1, len(batches), sharey=True, squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=True):
            found = by_attention([row for row in steps if row["batch"] == batch], "time", "forward")
            draw_steps(axis, found, colors)
            axis.set_title(f"one step of decoding, batch {batch}")
        part.subplots_adjust(left=0.07, right=0.98, wspace=0.15, bottom=0.16, top=0.88)
    figure.savefig(ATTENTION, dpi=80)
    plt.close(figure)


def draw_steps(
    axis: plt.Axes, cases: dict[str, dict[str, Row]], colors: dict[str, str | Color]
) -> None:
    """Per cent of a read over the number of keys, a line for each implementation."""
    for name, color in colors.items():
        found = [implementations.get(name) for implementations in cases.values()]
        points = [(int(row["keys"]), float(row["percent_of_read"])) for row in found if row]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=color)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 105)
    axis.set_xlabel("keys")
    axis.set_ylabel("% of one read of keys and values")
    axis.spines[["top", "right"]].set_visible(False)


def draw_bars(
    axis: plt.Axes, cases: dict[str, dict[str, Row]], colors: dict[str, str | Color], figure: str
) -> None:
    """A group of bars for each case: a figure of its implementations."""
    height = 0.8 / len(colors)
    for i, (name, color) in enumerate(colors.items()):
        values = [float(found[name][figure]) if name in found else 0.0 for found in cases.values()]
        places = [j + (i - len(colors) / 2) * height for j in range(len(cases))]
        axis.barh(places, values, height, color=color, align="edge")
    labels = [re.sub(r"(?<=\d)x(?=\d)", "×", case) for case in cases]
    axis.set_yticks(range(len(cases)), labels, fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.spines[["top", "right"]].set_visible(False)


def draw_training(rows: list[Row]) -> None:
    """Tokens per second of each model."""
    cases = by_model([row for row in rows if row["tokens_per_second"]])
    figure, axis = plt.subplots(figsize=(11, 0.8 * len(cases) + 1.8))
    draw_bars(axis, cases, TRAINED, "tokens_per_second")
    axis.set_xlabel("tokens/s")
    axis.legend(list(TRAINED), frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.set_title(f"Training in bfloat16, {rows[0]['gpu']}, torch {rows[0]['torch']}")
    figure.tight_layout()
    figure.savefig(TRAINING, dpi=80)
    plt.close(figure)


def table(rows: list[Row]) -> str:
    """A Markdown table: microseconds and per cent of copy, ours beside the best peer."""
    lines = [
        "| scores, bf16 | variant | pass | µs | % of copy | best peer | µs | speedup |",
        "|---|---|---|--:|--:|---|--:|--:|",
    ]
    for direction in ("forward", "backward", "forward+backward"):
        for (shape, variant), implementations in by_case(rows, direction).items():
            ours = implementations[OURS]
            cells = [f"[{shape.replace('x', ',')}]", variant, direction]
            cells += [ours["microseconds"], ours["percent_of_copy"], *best_peer(implementations)]
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


def topk_table(rows: list[Row]) -> str:
    """softmax_topk, beside the fastest peer; small cases as in a CUDA graph."""
    cases: dict[tuple[str, ...], dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        key = tuple(row[name] for name in ("rows", "columns", "dtype", "k", "data", "pass"))
        cases[key][row["timing"]][row["implementation"]] = row
    lines = [
        f"| logits | K | data | pass | timing | {OURS} µs | % of copy | best peer | µs | speedup |",
        "|---|--:|---|---|---|--:|--:|---|--:|--:|",
    ]
    for (count, columns, dtype, k, data, direction), timings in cases.items():
        timing = "graph" if "graph" in timings else "call"
        found = timings[timing]
        ours = found[OURS]
        cells = [f"[{count},{columns}] {dtype}", k, data, direction, timing]
        cells += [ours["microseconds"], ours["percent_of_copy"]]
        lines.append("| " + " | ".join(cells + best_peer(found)) + " |")
    return "\n".join([*lines, "", origin(rows[0], "bench_topk.py")])


def by_attention(rows: list[Row], kind: str, direction: str) -> dict[str, dict[str, Row]]:
    """{case: {implementation: row}} of one kind and pass, without what refuses the case."""
    cases: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["kind"] == kind and row["pass"] == direction and not row["note"]:
            cases[row["case"]][row["implementation"]] = row
    return cases


def attention_case(row: Row) -> list[str]:
    """Cells: the shape, the mask, and what is added to the scores."""
    heads = row["heads"]
    if row["key_heads"] != heads:
        heads += f" ({row['key_heads']})"
    added = [f"bias [{row['bias']}]" if row["bias"] else "", "sink" if row["sink"] == "1" else ""]
    added.append("its gradient" if row["gradient"] == "1" else "")
    shape = ", ".join([row["batch"], heads, row["keys"], row["head_dim"]])
    shape += "" if row["dtype"] == "bfloat16" else f" {row['dtype']}"
    return [shape, row["masking"], ", ".join(word for word in added if word)]


def cells_of(found: dict[str, Row], figure: str) -> list[str]:
    """A figure of each peer; blank where it refuses the case or was left out of it."""
    return [found[name][figure] if name in found else "" for name in ATTENTION_PEERS]


def attention_table(rows: list[Row]) -> str:
    """TFLOP/s of attention in training, ours beside every peer."""
    lines = [
        f"| b, h, s, d | mask | added | pass | {OURS} µs | {OURS} | {' | '.join(ATTENTION_PEERS)} "
        "| over the best |",
        "|---|---|---|---|" + "--:|" * (3 + len(ATTENTION_PEERS)),
    ]
    for direction in ("forward", "forward+backward"):
        for found in by_attention(rows, "time", direction).values():
            any_row = next(iter(found.values()))
            if any_row["decode"] == "1":
                continue
            for name in (OURS, DENSE):
                if name not in found:
                    continue
                peers = {key: row for key, row in found.items() if key not in (OURS, DENSE)}
                shape, mask, added = attention_case(any_row)
                added += ", dense" if name == DENSE else ""
                cells = [shape, mask, added, direction]
                cells += [found[name][figure] for figure in ("microseconds", "tflops")]
                cells += [*cells_of(found, "tflops"), best_peer({OURS: found[name], **peers})[2]]
                lines.append("| " + " | ".join(cells) + " |")
    ceilings = {row["implementation"]: row for row in rows if row["kind"] == "ceiling"}
    limit = ceilings["matrix product"]["tflops"]
    return "\n".join(
        [
            *("![TFLOP/s of attention, beside its peers](attention.png)", "", *lines, ""),
            f"torch's product of two 8192 × 8192 matrices in the same run: {limit} TFLOP/s. "
            + origin(rows[0], "bench_attention.py"),
        ]
    )


def attention_summary(rows: list[Row]) -> str:
    """TFLOP/s of forward and backward together, where the bias has a gradient."""
    lines = [
        f"| b, h, s, d | mask | bias | {OURS} | {' | '.join(ATTENTION_PEERS)} |",
        "|---|---|---|" + "--:|" * (1 + len(ATTENTION_PEERS)),
    ]
    for found in by_attention(rows, "time", "forward+backward").values():
        ours = found[OURS]
        if ours["gradient"] == "1":
            shape, mask, _ = attention_case(ours)
            cells = [shape, mask, f"[{ours['bias']}]", ours["tflops"], *cells_of(found, "tflops")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def decode_table(rows: list[Row]) -> str:
    """Steps of decoding: microseconds, and per cent of one read of keys and values."""
    steps = by_attention([row for row in rows if row["decode"] == "1"], "time", "forward")
    names = [
        name for name in (OURS, *ATTENTION_PEERS) if any(name in step for step in steps.values())
    ]
    lines = ["| b | keys | " + " | ".join(names) + " |", "|--:|" + "--:|" * (1 + len(names))]
    for found in steps.values():
        any_row = next(iter(found.values()))
        cells = [
            f"{found[name]['microseconds']} ({found[name]['percent_of_read']})"
            if name in found
            else ""
            for name in names
        ]
        lines.append("| " + " | ".join([any_row["batch"], any_row["keys"], *cells]) + " |")
    return "\n".join(lines)


def figure_table(found: dict[str, dict[str, Row]], figure: str) -> str:
    """One figure of the cases of training, ours beside every peer."""
    lines = [
        f"| b, h, s, d | mask | added | {OURS} | {' | '.join(ATTENTION_PEERS)} |",
        "|---|---|---|" + "--:|" * (1 + len(ATTENTION_PEERS)),
    ]
    for implementations in found.values():
        ours = implementations.get(OURS)
        if ours and ours["decode"] == "0":
            cells = [*attention_case(ours), ours[figure], *cells_of(implementations, figure)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def by_model(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """{case: {attention implementation: row}} of training."""
    cases: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        cases[row["case"]][row["implementation"]] = row
    return cases


def training_table(rows: list[Row]) -> str:
    """A step of training per model and attention implementation."""
    lines = [
        "| model | batch | attention | tokens/s | ms | peak GiB | × eager | |",
        "|---|--:|---|--:|--:|--:|--:|---|",
    ]
    for case, found in by_model(rows).items():
        eager = found["eager"]["tokens_per_second"]
        for name, row in found.items():
            speed, peak = row["tokens_per_second"], row["peak_memory_bytes"]
            gain = f"{float(speed) / float(eager):.2f}" if speed and eager else ""
            memory = f"{float(peak) / 2**30:.1f}" if peak else ""
            cells = [case, row["batch"], name, speed, row["step_ms"], memory, gain, row["note"]]
            lines.append("| " + " | ".join(cells) + " |")
    row = rows[0]
    return "\n".join(
        [
            *("![Tokens per second, per attention implementation](training.png)", "", *lines, ""),
            f"transformers {row['transformers']}, {origin(row, 'bench_training.py')}",
        ]
    )


def best_peer(implementations: dict[str, Row]) -> list[str]:
    """Its name, its time and how much longer that is than ours; blanks where there is none."""
    peers = [row for name, row in implementations.items() if name not in (OURS, "copy")]
    if not peers:
        return ["", "", ""]
    best = min(peers, key=lambda row: float(row["microseconds"]))
    speedup = float(best["microseconds"]) / float(implementations[OURS]["microseconds"])
    return [best["implementation"], best["microseconds"], f"{speedup:.2f}×"]


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
    if topk := read("topk.csv"):
        parts[ROOT / "docs" / "numbers.md"]["topk"] = topk_table(topk)
    if attention := read("attention.csv"):
        parts[ROOT / "README.md"]["attention"] = attention_summary(attention)
        errors = by_attention(attention, "error", "forward")
        memory = by_attention(attention, "memory", "forward+backward")
        parts[ROOT / "docs" / "numbers.md"] |= {
            "attention": attention_table(attention),
            "decode": decode_table(attention),
            "attention error": figure_table(errors, "error_rms"),
            "attention memory": figure_table(memory, "peak_mib"),
        }
    if training := read("training.csv"):
        parts[ROOT / "docs" / "numbers.md"]["training"] = training_table(training)
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
        if tuning := read("tune.csv"):
            draw_tuning(tuning)
        if attention:
            draw_attention(attention)
        if training:
            draw_training(training)


if __name__ == "__main__":
    typer.run(main)
