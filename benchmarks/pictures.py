"""The pictures of docs/, from benchmarks/results: every implementation that was measured.

`PICTURES` has them by name. Git has the one of README.md. The others are drawn with the site.

What refused a case, or was left out of it, has no mark there. Axes end beyond the largest figure.
The pictures are SVG without a background; text and axes take a colour that the theme of the page
makes legible.
"""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from measured import OURS, Case, Row, by, by_attention, by_case, by_model, by_timing, read
from tables import headline_cases, speedup

# Legible on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY, RED = (
    *("#2f87cc", "#e08e45", "#3f9f48", "#9a6cc4", "#9a9a9a", "#d9534a"),
)
INK = "#010203"  # stands for the colour of text; no other colour of a picture is the same
STYLE = """<style type="text/css">
*{stroke-linejoin: round; stroke-linecap: butt}
svg{color: #222222}
@media (prefers-color-scheme: dark){svg{color: #dddddd}}
</style>"""
plt.rcParams |= {
    f"{name}color": INK
    for name in ("text.", "axes.edge", "axes.label", "axes.title", "xtick.", "ytick.")
}
plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams |= {"axes.facecolor": "none", "savefig.facecolor": "none", "svg.hashsalt": "docs"}
# An implementation -> its colour and the shape of its mark, in the order of legends.
MARKS = {
    OURS: (BLUE, "o"),
    "megasoftmax_softmax": ("#7fb3d5", "o"),
    "megasoftmax, dense bias": ("#7fb3d5", "o"),
    "liger": (GREEN, "D"),
    "quack": (RED, "X"),
    "torch.compile": (ORANGE, "s"),
    "torch.softmax": (PURPLE, "^"),
    "softmax, topk": (PURPLE, "^"),
    "topk, logsumexp": (GREEN, "v"),
    "SDPA flash": (PURPLE, "^"),
    "SDPA cuDNN": (GREEN, "D"),
    "SDPA mem-efficient": (GREY, "v"),
    "FlexAttention": (ORANGE, "s"),
    "FlashAttention-4": (RED, "X"),
    "FlashInfer": (RED, "X"),
    "megasoftmax deterministic": ("#7fb3d5", "o"),
    "cuEquivariance": (GREEN, "D"),
    "trifast": (PURPLE, "^"),
    "Triton": (ORANGE, "s"),
    "LMA": (RED, "X"),
    "sdpa": (GREEN, "D"),
    "sdpa flash": (PURPLE, "^"),
    "eager": (GREY, "P"),
}
# Where a regime keeps a row between the pass that sums and the pass that writes -> colour.
KEPT = {
    "tile": ("shared memory, many rows in a tile", PURPLE),
    "contiguous": ("registers", GREEN),
    "lanes": ("registers", GREEN),
    "shared": ("shared memory, of a block", BLUE),
    "cluster": ("shared memory, of a cluster", ORANGE),
    "persistent": ("shared memory, of a cluster", ORANGE),
    "whole": ("shared memory, of the whole GPU", RED),
    "reread": ("rings of a block or a cluster", GREY),
}
OUTLIER = 110  # % of the copy, from which a point of a CUDA graph says how long its copy took


DIRECTIONS = ("forward", "backward")
Points = Mapping[str, list[tuple[float, float]]]  # by implementation
PICTURES: dict[str, Callable[[], str]] = {}
"""Name of a file of docs/ -> what makes it."""


def picture(name: str, file: str, title: str = "", margins: tuple[float, ...] = ()) -> Callable:
    """What a function draws of the rows of a file of results.

    Args:
        title: above all panels.
        margins: left, bottom, right, top, and between panels. Implementations stand below.
    """

    def register(draw: Callable[[list[Row]], plt.Figure]) -> None:
        def svg() -> str:
            rows = read(file)
            figure = draw(rows)
            if title:
                figure.suptitle(f"{title}, {origin(rows)}")
            if margins:
                figure.subplots_adjust(*margins)
                add_legend(figure, {row["implementation"] for row in rows})
            return in_colours_of_the_page(figure)

        PICTURES[name] = svg

    return register


@picture("headline.svg", "")
def draw_headline(rows: list[Row]) -> plt.Figure:
    """The speedups of the summary. Labels stand above the bars, so that it fits on a phone."""
    speedups = {label: speedup(*case) for label, case in headline_cases().items()}
    figure, axis = plt.subplots(figsize=(4.8, 5.8))
    for place, (label, value) in enumerate(speedups.items()):
        color = BLUE if value >= 1 else ORANGE
        axis.barh(place, value - 1, left=1, color=color, height=0.4)
        near = {"textcoords": "offset points", "va": "center", "color": INK}
        right = (max(value, 1), place)
        axis.annotate(f"{value:.2f}×", right, xytext=(4, 0), **near)
        axis.annotate(label, (0, place), xytext=(0, 13), xycoords=("axes fraction", "data"), **near)
    axis.axvline(1, color=INK, linewidth=0.8, alpha=0.5)
    axis.set_xscale("log")
    axis.set_xlim(0.4, 2 * max(speedups.values()))
    axis.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5×", "1×", "2×", "4×", "8×", "16×"])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks([])
    axis.set_ylim(len(speedups) - 0.5, -0.8)
    axis.set_xlabel("speed beside the fastest peer")
    axis.spines["left"].set_visible(False)
    figure.tight_layout()
    return figure


@picture(
    "speedup.svg", "softmax.csv", "Softmax of attention, bfloat16", (0.18, 0.12, 0.98, 0.91, 0.05)
)
def draw_softmax(rows: list[Row]) -> plt.Figure:
    """Per cent of the copy, for the cases of transformers."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 8), sharey=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        cases = by_case(rows, direction)
        labels = {" ".join((times(shape), name)): case for (shape, name), case in cases.items()}
        label = "% of copy bandwidth (fewest bytes / time)"
        draw_marks(axis, labels, "percent_of_copy", direction, label)
        axis.axvline(100, color=INK, linewidth=0.8)
    return figure


@picture(
    "rows.svg", "rows.csv", "Plain softmax of rows, all types", (0.06, 0.12, 0.98, 0.91, 0.05, 0.3)
)
def draw_rows(rows: list[Row]) -> plt.Figure:
    """Per cent of the copy, for plain rows by their length."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 9), sharex="row", sharey=True)
    cases = by_timing(rows, ("shape", "dim", "dtype", "pass"))
    shown = [row for case in cases.values() for row in case.values() if row["dim"] == "-1"]
    sizes = {"call": "64 MiB and more", "graph": "less than 64 MiB, CUDA graph"}
    for line, (timing, size) in zip(panels, sizes.items(), strict=True):
        for axis, direction in zip(line, DIRECTIONS, strict=True):
            here = [row for row in shown if (row["timing"], row["pass"]) == (timing, direction)]
            draw_lengths(axis, here, "columns", "percent_of_copy", markersize=5, alpha=0.8)
            axis.set_title(f"{direction}, {size}")
        line[0].set_ylabel("% of copy bandwidth")
    panels[0, 0].set_ylim(0, 1.05 * largest(shown, "percent_of_copy"))
    return figure


@picture("topk.svg", "topk.csv", "softmax_topk", (0.2, 0.14, 0.98, 0.9, 0.6))
def draw_topk(rows: list[Row]) -> plt.Figure:
    """Microseconds of softmax_topk and its peers, on a logarithmic axis."""
    fields = ("rows", "columns", "dtype", "k", "data", "pass")
    cases = by_timing([row for row in rows if row["data"] == "normal"], fields)
    figure, axes = plt.subplots(1, 2, figsize=(12, 7.5))
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        labels = {
            f"{count}×{columns} {dtype}, K = {k}": case
            for (count, columns, dtype, k, _, found), case in cases.items()
            if found == direction
        }
        draw_microseconds(axis, labels, direction)
        axis.xaxis.set_minor_formatter(NullFormatter())
    return figure


@picture(
    "bias.svg",
    "bias.csv",
    "Attention with a bias that rows share, bfloat16",
    (0.12, 0.14, 0.98, 0.9, 0.05),
)
def draw_shared_biases(rows: list[Row]) -> plt.Figure:
    """Microseconds of both passes, on a logarithmic axis."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 7), sharey=True)
    for axis, direction in zip(axes, ("forward", "forward+backward"), strict=True):
        cases = by_model(row for row in rows if row["pass"] == direction)
        draw_microseconds(axis, cases, direction)
    return figure


@picture("attention.svg", "attention.csv")
def draw_attention(rows: list[Row]) -> plt.Figure:
    """TFLOP/s of each case, forward and forward+backward; below, steps of decoding."""
    trained, steps = ([row for row in rows if row["decode"] == each] for each in "01")
    batches = list(dict.fromkeys(row["batch"] for row in steps))
    figure = plt.figure(figsize=(14, 14))
    upper, lower = figure.subfigures(2, 1, height_ratios=[9.5, 4.5])
    axes = upper.subplots(1, 2)
    for axis, direction in zip(axes, ("forward", "forward+backward"), strict=True):
        cases = by_attention(trained, direction)
        labels = {times(name): case for name, case in cases.items()}
        draw_marks(axis, labels, "tflops", direction, "TFLOP/s")
    upper.suptitle(f"Attention, {origin(rows)}")
    upper.subplots_adjust(0.19, 0.08, 0.98, 0.92, 0.65)
    panels = lower.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axis, batch in zip(panels, batches, strict=True):
        found = by_attention([row for row in steps if row["batch"] == batch], "forward")
        here = [row for case in found.values() for row in case.values()]
        draw_lengths(axis, here, "keys", "percent_of_read", line="-")
        axis.set_title(f"one step of decoding, batch {batch}")
    panels[0].set_ylabel("% of one read of keys and values")
    panels[0].set_ylim(0, 1.05 * largest(steps, "percent_of_read"))
    lower.subplots_adjust(left=0.07, right=0.98, wspace=0.08, bottom=0.26, top=0.92)
    add_legend(lower, {row["implementation"] for row in trained})
    return figure


@picture("roofline.svg", "attention.csv")
def draw_roofline(rows: list[Row]) -> plt.Figure:
    """TFLOP/s over the products that a byte allows, if each tensor is read or written once."""
    ceilings = {row["implementation"]: row for row in rows if row["kind"] == "ceiling"}
    of_read = ceilings["read"]
    fastest_read = float(of_read["bytes"]) / float(of_read["microseconds"]) / 1e6  # TB/s
    fastest_product = float(ceilings["matrix product"]["tflops"])
    cases = by_attention([row for row in rows if row["decode"] == "0"], "forward")
    figure, axis = plt.subplots(figsize=(11, 6.5))
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases.values():
        row = next(iter(case.values()))
        operations = float(row["tflops"]) * float(row["microseconds"]) * 1e6
        for name, found in case.items():
            points[name].append((operations / fewest_bytes(row), float(found["tflops"])))
    draw_points(axis, points, markersize=6, alpha=0.9)
    intensities = [intensity for found in points.values() for intensity, _ in found]
    ends = [0.8 * min(intensities), 1.25 * max(intensities)]
    ridge = fastest_product / fastest_read
    corners = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    roof = [min(fastest_read * each, fastest_product) for each in corners]
    axis.plot(corners, roof, color=INK, linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("FLOP per byte")
    axis.set_ylabel("TFLOP/s")
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_title(
        f"Attention forward under {fastest_read:.1f} TB/s and {fastest_product:.0f} TFLOP/s, "
        f"both measured, {origin(rows)}"
    )
    figure.subplots_adjust(left=0.08, right=0.97, bottom=0.2, top=0.92)
    add_legend(figure, set(points))
    return figure


def fewest_bytes(row: Row) -> int:
    """Of queries, keys, values, output and bias, in 16 bits."""
    batch, heads, key_heads = (int(row[name]) for name in ("batch", "heads", "key_heads"))
    queries, keys, dim = (int(row[name]) for name in ("queries", "keys", "head_dim"))
    entries = 2 * batch * dim * (heads * queries + key_heads * keys)
    biases = {
        "": 0,
        "softcap": 0,
        "1,h": heads * queries * keys,
        "b,h": batch * heads * queries * keys,
        "table": heads * (queries + keys - 1),
    }
    return 2 * (entries + biases[row["bias"]])


@picture("training.svg", "training.csv", margins=(0.3, 0.32, 0.97, 0.88))
def draw_training(rows: list[Row]) -> plt.Figure:
    """Tokens per second of each model."""
    cases = by_model([row for row in rows if row["tokens_per_second"]])
    figure, axis = plt.subplots(figsize=(11, 0.5 * len(cases) + 1.8))
    title = f"Training in bfloat16, {origin(rows)}"
    draw_marks(axis, cases, "tokens_per_second", title, "tokens/s")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure


@picture("tuning.svg", "tune.csv")
def draw_tuning(rows: list[Row]) -> plt.Figure:
    """Per cent of the copy over the length of rows: a line for each regime of limits.h.

    Circles are the regimes that are chosen, vertical lines their longest rows. Few rows are those
    of CUDA graphs: their calls with a flushed cache are in the file alone.
    """
    panels: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["timing"] == "cold":
            continue
        few = "1 row" if row["rows"] == "1" else f"{row['rows']} rows"
        panel = f"{few}, CUDA graph" if row["timing"] == "graph" else f"{row['kind']} rows, 64 MiB"
        panels[panel][row["direction"]].append(row)
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(13, 3.4 * len(panels)), sharey=True, squeeze=False
    )
    for line, (panel, directions) in zip(axes, panels.items(), strict=True):
        for axis, direction in zip(line, DIRECTIONS, strict=True):
            axis.set_title(f"{direction}, {panel}")
            draw_regimes(axis, directions[direction])
    axes[0, 0].set_ylim(0, 1.1 * largest(rows, "percent_of_copy"))
    handles = [plt.Line2D([], [], color=color) for color in dict(KEPT.values()).values()]
    handles.append(plt.Line2D([], [], linestyle="", marker="o", color="none", markeredgecolor=INK))
    labels = [*dict(KEPT.values()), "the regime that is chosen"]
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.suptitle(f"Row regimes, {rows[0]['dtype']}, {origin(rows)}")
    inch = 1 / figure.get_figheight()
    figure.tight_layout(rect=(0, 0.7 * inch, 1, 1 - inch / 3))
    return figure


def draw_regimes(axis: plt.Axes, rows: list[Row]) -> None:
    """One panel: a direction, and one number of rows."""
    lengths = [int(row["columns"]) for row in rows]
    chosen = [row for row in rows if row["chosen"] == "True"]
    for border in {int(row["longest"]) for row in chosen if row["longest"]}:
        if min(lengths) <= border <= max(lengths):
            axis.axvline(border, color=GREY, linewidth=0.8, linestyle=":")
    lines = points_by("regime", rows, "columns", "percent_of_copy")
    for regime, points in lines.items():
        axis.plot(*zip(*points, strict=True), color=color_of(regime), linewidth=1, alpha=0.45)
    coloured = [row | {"color": color_of(row["regime"])} for row in chosen]
    for color, points in points_by("color", coloured, "columns", "percent_of_copy").items():
        axis.plot(*zip(*points, strict=True), "o", color=color, markeredgecolor=INK, markersize=5)
    for row in chosen:
        columns, percent = int(row["columns"]), float(row["percent_of_copy"])
        if percent > OUTLIER and row["timing"] == "graph":
            # Fewest bytes over those of the copy; rows in a graph are unmasked.
            share = 1.5 if row["direction"] == "backward" else 1
            copy = float(row["microseconds"]) * percent / 100 / share
            label = f"{columns:,} columns: the copy took {copy:.1f} µs"
            place = {"textcoords": "offset points", "xytext": (-6, -2), "ha": "right"}
            axis.annotate(label, (columns, percent), fontsize=8, **place)
    axis.axhline(100, color=INK, linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("columns")
    axis.set_ylabel("% of copy")


def color_of(regime: str) -> str:
    """The colour of where a regime keeps its rows."""
    return KEPT[regime.partition("_")[0]][1]


@picture("host.svg", "host.csv")
def draw_host(rows: list[Row]) -> plt.Figure:
    """Ours over torch's time on the host, from one measured commit to the next."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure, axes = plt.subplots(
        1, len(devices), figsize=(6.5 * len(devices), 5), sharey=True, squeeze=False
    )
    colors, lines = (BLUE, ORANGE, GREEN, PURPLE, RED), ("-", "--", ":", "-.")
    for axis, device in zip(axes[0], devices, strict=True):
        found = [row for row in rows if row["device"] == device]
        timed = by(found, lambda row: (row["case"], row["pass"], row["commit"]))
        cases, passes, commits = (list(dict.fromkeys(each)) for each in zip(*timed, strict=True))
        for (case, color), (which, line) in product(
            zip(cases, colors, strict=True), zip(passes, lines, strict=False)
        ):
            points = []
            for place, commit in enumerate(commits):
                pair = timed.get((case, which, commit), {})
                if len(pair) == 2:
                    ours, torchs = (float(pair[name]["microseconds"]) for name in (OURS, "torch"))
                    points.append((place, ours / torchs))
            axis.plot(*zip(*points, strict=True), f"o{line}", color=color)
        axis.axhline(1, color=INK, linewidth=0.8)
        axis.set_xticks(range(len(commits)), commits)
        axis.set_xlim(-0.5, len(commits) - 0.5)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_title(device)
        handles = [plt.Line2D([], [], color=color) for color in colors[: len(cases)]]
        handles += [plt.Line2D([], [], color=GREY, linestyle=line) for line in lines[: len(passes)]]
        axis.legend(handles, [*cases, *passes], frameon=False, fontsize=8)
    axes[0, 0].set_ylabel(f"{OURS} / torch")
    figure.tight_layout()
    return figure


def draw_points(axis: plt.Axes, points: Points, line: str = "", **style: Any) -> None:
    """The points of each implementation; ours come last."""
    for name, (color, shape) in reversed(MARKS.items()):
        if points.get(name):
            axis.plot(*zip(*points[name], strict=True), f"{shape}{line}", color=color, **style)


def points_by(field: str, rows: Iterable[Row], length: str, figure: str) -> Points:
    """{value of the field: a figure of its rows over a length}."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        points[row[field]].append((int(row[length]), float(row[figure])))
    return points


def draw_lengths(
    axis: plt.Axes, rows: Iterable[Row], length: str, figure: str, **style: Any
) -> None:
    """A figure of each row, in per cent, over a length."""
    draw_points(axis, points_by("implementation", rows, length, figure), **style)
    axis.axhline(100, color=INK, linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xlabel(length)


def draw_marks(
    axis: plt.Axes, cases: Mapping[str, Case], figure: str, title: str, label: str
) -> None:
    """A line for each case, with a mark at the figure of each implementation."""
    for name in reversed(MARKS):
        points = [
            (float(case[name][figure]), place)
            for place, case in enumerate(cases.values())
            if name in case and case[name][figure]
        ]
        size = 5 if name == OURS else 7  # ours is drawn last, and hides no other
        draw_points(axis, {name: points}, markersize=size, alpha=0.9)
    axis.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.set_xlim(left=0)
    axis.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_title(title)
    axis.set_xlabel(label)


def draw_microseconds(axis: plt.Axes, cases: Mapping[str, Case], title: str) -> None:
    """Draws marks on a logarithmic axis of microseconds."""
    draw_marks(axis, cases, "microseconds", title, "µs, less is better")
    axis.set_xlim(auto=True)
    axis.set_xscale("log")
    axis.autoscale(axis="x")


def add_legend(figure: plt.Figure, names: set[str]) -> None:
    """The marks of the implementations, below the panels."""
    shown = {name: mark for name, mark in MARKS.items() if name in names}
    handles = [
        plt.Line2D([], [], linestyle="", marker=shape, color=color)
        for color, shape in shown.values()
    ]
    figure.legend(handles, list(shown), loc="lower center", ncols=len(shown), frameon=False)


def largest(rows: list[Row], figure: str) -> float:
    """The largest figure, which an axis must reach."""
    return max(float(row[figure]) for row in rows if row[figure])


def times(shape: str) -> str:
    """A shape with × between its numbers."""
    return re.sub(r"(?<=\d)x(?=\d)", "×", shape)


def origin(rows: list[Row]) -> str:
    """Where and with what the rows were measured."""
    return f"{' and '.join(dict.fromkeys(row['gpu'] for row in rows))}, torch {rows[0]['torch']}"


def in_colours_of_the_page(figure: plt.Figure) -> str:
    """A picture as SVG, to a tenth of a point."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    picture = re.sub("<style.*?</style>", STYLE, text.getvalue(), flags=re.DOTALL)
    picture = re.sub(r"(\d\d\.\d)\d+", r"\1", picture)  # not scales and opacities, below 10
    lines = [line.rstrip() for line in picture.replace(INK, "currentColor").splitlines()]
    return "\n".join(lines) + "\n"
