"""The tables of README.md, docs/numbers.md and docs/families.md, from benchmarks/results."""

import re
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

from measured import (
    OURS,
    WITHOUT_ATTENTION,
    Case,
    Row,
    by,
    by_attention,
    by_case,
    by_model,
    by_timing,
    fastest_peer,
    of_last_commit,
    read,
)

ATTENTION_PEERS = ("SDPA flash", "SDPA cuDNN", "SDPA mem-efficient", "FlexAttention")
TRAINED = (OURS, "megasoftmax_softmax", "sdpa", "sdpa flash", "cuEquivariance", "Triton", "LMA")
TRAINED += ("eager",)


def table(head: Sequence[str], rows: Iterable[Iterable[str]], *, words: int = 1) -> str:
    """In Markdown. The first columns have words, and the others numbers, which end alike."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * words + "--:|" * (len(head) - words))
    return "\n".join(lines)


def headline() -> str:
    """A few cases of each family beside the fastest peer that was measured."""
    rows = (compared(label, *case) for label, case in headline_cases().items())
    return table(("case", OURS, "fastest peer", "speedup"), rows)


def headline_cases() -> dict[str, tuple[Case, str]]:
    """{label: (case, the figure that is compared)}."""
    forward, backward = (by_case(read("softmax.csv"), name) for name in ("forward", "backward"))
    rows = by_timing(read("rows.csv"), ("shape", "dim", "dtype", "pass"))
    topk = by_timing(read("topk.csv"), ("rows", "columns", "dtype", "k", "data", "pass"))
    attention = read("attention.csv")
    both = by_attention(attention, "forward+backward")
    steps = by_attention(attention, "forward")
    models = by_model(read("training.csv"))
    shape = "8x32x2048x2048"
    cases = {
        "softmax, causal, forward": forward[shape, "causal"],
        "softmax, causal, backward": backward[shape, "causal"],
        "softmax, scale only, forward": forward[shape, "scaled"],
        "softmax of 8192 rows of 50,257, forward": rows["8192x50257", "-1", "float16", "forward"],
        "softmax of 128 rows of 1024, forward": rows["128x1024", "-1", "float16", "forward"],
        "softmax + top-10 of 8192 rows of 50,257, forward": topk[
            "8192", "50257", "bfloat16", "10", "normal", "forward"
        ],
        "attention without a bias": both["4x16x4096x128 full plain"],
        "attention, causal, a bias that learns": both["4x16x4096x128 causal bias [1,h] gradient"],
        "attention, a relative bias that learns": both["4x16x4096x64 full bias [table] gradient"],
        "decoding, 8 sequences of 131,072 keys": steps["decode 8x32/8x1x131072x128 full plain"],
    }
    trained = {
        f"training step, {name.partition(',')[0]} with dropout": (case, "step_ms")
        for name, case in models.items()
        if name.startswith(("GPT-2", "T5")) and name.endswith("dropout")
    }
    return {label: (case, "microseconds") for label, case in cases.items()} | trained


def speedup(case: Case, figure: str) -> float:
    """How many times as fast as the fastest peer."""
    return float(fastest_peer(case, figure)[figure]) / float(case[OURS][figure])


def compared(label: str, case: Case, figure: str) -> tuple[str, ...]:
    """A row of the summary: our time, that of the fastest peer, and their ratio."""
    ours, peer = case[OURS], fastest_peer(case, figure)
    unit = "ms" if figure == "step_ms" else "µs"
    return (
        label,
        f"{short(ours[figure])} {unit}",
        f"{peer['implementation']} {short(peer[figure])} {unit}",
        f"{speedup(case, figure):.2f}×",
    )


def short(number: str) -> str:
    """Three digits, or all before the point."""
    value = float(number)
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plain_table(rows: list[Row], *fields: str, words: int = 1) -> str:
    """Some fields of all rows."""
    cells = ([row[name] for name in fields] for row in rows)
    return table([name.replace("_", " ") for name in fields], cells, words=words)


def peers_table(
    cases: Iterable[Case],
    head: Sequence[str],
    place: Callable[[Row], list[str]],
    peers: Sequence[str],
    cell: Callable[[Row], str],
    *,
    words: int = 0,
    end: Callable[[Case], str] | None = None,
) -> str:
    """A line for each case: its place, under `head`, a cell of each peer, and its speedup."""
    lines = []
    for case in cases:
        line = place(next(iter(case.values())))
        line += [cell(case[name]) if name in case else "" for name in peers]
        lines.append([*line, end(case)] if end else line)
    return table([*head, *peers, *(["speedup"] if end else [])], lines, words=words)


def attention_table(rows: list[Row]) -> str:
    """TFLOP/s of forward and backward together, where the bias has a gradient."""
    cases = by_attention(rows, "forward+backward").values()

    def place(row: Row) -> list[str]:
        shape = ", ".join(row[name] for name in ("batch", "heads", "keys", "head_dim"))
        return [shape, row["masking"], f"[{row['bias']}]"]

    return peers_table(
        [case for case in cases if case[OURS]["gradient"] == "1"],
        ("b, h, s, d", "mask", "bias"),
        place,
        (OURS, *ATTENTION_PEERS),
        lambda row: row["tflops"],
        words=3,
    )


def decode_table(rows: list[Row]) -> str:
    """Steps of decoding: microseconds, and per cent of one read of keys and values."""
    steps = by_attention([row for row in rows if row["decode"] == "1"], "forward").values()
    return peers_table(
        steps,
        ("b", "keys"),
        lambda row: [row["batch"], row["keys"]],
        [name for name in (OURS, *ATTENTION_PEERS) if any(name in step for step in steps)],
        lambda row: f"{row['microseconds']} ({row['percent_of_read']})",
    )


def few_queries_table(rows: list[Row]) -> str:
    """Microseconds, in brackets per cent of a copy, and our speed over the fastest backend's."""
    cases = by_model(row for row in rows if row["microseconds"]).values()

    def place(row: Row) -> list[str]:
        heads = f"{row['heads']}/{int(row['heads']) // int(row['group'])}"
        window = row["window"] if row["window"] != "0" else ""
        return [row["batch"], heads, row["queries"], row["keys"], row["head_dim"], window]

    def end(case: Case) -> str:
        of_best = case[OURS]["of_best"] if OURS in case else ""
        return f"{float(of_best):.2f}×" if of_best else ""

    return peers_table(
        cases,
        ("batch", "heads", "queries", "keys", "head dim", "window"),
        place,
        [OURS, *(name for name in ATTENTION_PEERS if any(name in case for case in cases))],
        lambda row: f"{short(row['microseconds'])} ({row['percent_of_copy']})",
        end=end,
    )


def training_table(rows: list[Row]) -> str:
    """Tokens per second and peak GiB per model and implementation, or why there are none.

    Also the GiB of attention, for a model that was measured without it too.
    """
    cases, head = by_model(rows), ("model", "batch")

    def trained(row: Row) -> str:
        if row["note"]:
            return row["note"]
        if not row["peak_memory_bytes"]:
            return row["tokens_per_second"]
        gibibytes = [float(row["peak_memory_bytes"]) / 2**30]
        if without := cases[row["case"]].get(WITHOUT_ATTENTION):
            gibibytes.append(gibibytes[0] - float(without["peak_memory_bytes"]) / 2**30)
        return f"{row['tokens_per_second']} ({', '.join(f'{each:.1f}' for each in gibibytes)})"

    place = itemgetter("case", "batch")
    peers = [name for name in TRAINED if any(name in case for case in cases.values())]
    return peers_table(cases.values(), head, lambda row: [*place(row)], peers, trained, words=1)


def generation_table(rows: list[Row]) -> str:
    """Tokens per second that each model generates, ours and sdpa's, and their ratio."""
    lines = []
    for name, case in by_model(rows).items():
        ours, sdpa = (float(case[each]["tokens_per_second"]) for each in (OURS, "sdpa"))
        lines.append([name, f"{ours:.0f}", f"{sdpa:.0f}", f"{ours / sdpa:.2f}"])
    return table(("model", OURS, "sdpa", "ratio"), lines)


def passes_table(rows: list[Row], *by: str) -> str:
    """Both passes of each case, in microseconds, in the order of the file."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (each for each in rows if each["microseconds"]):
        found.setdefault(tuple(row[name] for name in by), {})[row["pass"]] = row["microseconds"]
    passes = ("forward", "forward+backward")
    head = [*(name.replace("implementation", "as") for name in by), *(f"{p}, µs" for p in passes)]
    lines = (
        [*place, *(short(times[p]) if p in times else "" for p in passes)]
        for place, times in found.items()
        if passes[0] in times
    )
    return table(head, lines, words=len(by))


def host_table(rows: list[Row]) -> str:
    """Microseconds of the host for each call, ours and torch's, and their ratio."""
    cases = by(of_last_commit(rows), lambda row: (row["device"], row["case"], row["pass"]))
    lines = []
    for place, case in cases.items():
        ours, torchs = (case[name]["microseconds"] for name in (OURS, "torch"))
        lines.append([*place, short(ours), short(torchs), f"{float(ours) / float(torchs):.1f}"])
    return table(("device", "case", "pass", f"{OURS}, µs", "torch, µs", "ratio"), lines, words=3)


def origin(name: str, script: str) -> str:
    """With what and when a CSV file was measured, and a link to it."""
    rows = read(name)
    if not rows:
        return f"Not measured yet: `python benchmarks/{script}` writes {name}."
    row = rows[-1]
    commits = list(dict.fromkeys(each["commit"] for each in rows))
    devices: dict[str, dict[str, None]] = {}  # of each release of torch
    for each in rows:
        device = each.get("gpu") or each["device"]
        devices.setdefault(each["torch"], {})["no GPU" if device == "none" else device] = None
    measured_on = "; ".join(
        f"{' and '.join(names)}, torch {torch}" for torch, names in devices.items()
    )
    with_transformers = f", transformers {row['transformers']}" if "transformers" in row else ""
    return (
        f"Every case: [{name}](../benchmarks/results/{name}), from `python benchmarks/{script}`. "
        f"{measured_on}{with_transformers}, "
        f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}, {row['date']}."
    )


# The parts of docs/families.md, and what its classes do.
PARTS = {
    "works": "work by the name and through `patch_model`",
    "in part": "work, beside layers that run their own attention",
    "own": "run their own attention in every layer that the call reaches",
    "patch_model": "work through `patch_model` alone",
    "refused": "are refused with the reason",
    "none": "have no attention",
    "not built": "were not built small",
}


def families_tables(rows: list[Row]) -> dict[str, str]:
    """The marked parts of docs/families.md: where it comes from, counts, and a table each."""
    parts = {part: [row for row in rows if family_part(row) == part] for part in PARTS}
    same = [row for marker in ("works", "in part", "own") for row in parts[marker]]
    worst = max(float(row["logits_error"]) for row in same)
    commits = dict.fromkeys(row["commit"] for row in rows)

    def first_cells(row: Row) -> tuple[str, ...]:
        return f"`{row['class']}`", row["kind"], row["uses"]

    head = ("class", "kind", "attention has", "layers that run megasoftmax", "the others")
    found = {
        "sweep": "transformers {transformers}, torch {torch}, commit".format(**rows[0])
        + f"{'s' if len(commits) > 1 else ''} {', '.join(commits)}, {rows[0]['date']}: "
        f"{len(rows)} classes. The largest error of logits is {worst:.0e}, relative to all "
        "logits of the class.",
        "works": table(head[:3], map(first_cells, parts["works"]), words=3),
        "own": ", ".join(f"`{row['class']}` (`{row['why']}`)" for row in parts["own"]) or "None.",
        "none": ", ".join(f"`{row['class']}`" for row in parts["none"]),
    }
    lines = (
        (*first_cells(row), f"{row['served']} of {row['layers']}", f"`{row['why']}`")
        for row in parts["in part"]
    )
    found["in part"] = table(head, lines, words=5)
    for marker in ("patch_model", "refused", "not built"):
        lines = ((f"`{row['class']}`", short_reason(row["why"])) for row in parts[marker])
        found[marker] = table(("class", "why"), lines, words=2) if parts[marker] else "None."
    counts = (f"| {len(parts[marker])} | {words} |" for marker, words in PARTS.items())
    return found | {"counts": "\n".join(["| classes | |", "|--:|---|", *counts])}


def family_part(row: Row) -> str:
    """The part of docs/families.md that a class belongs to."""
    by_name, by_patch_model = row["by_name"], row["by_patch_model"]
    if by_name == "refused":
        return "refused" if by_patch_model == "refused" else "patch_model"
    parts = {"works in part": "in part", "own attention": "own", "no attention": "none"}
    return parts.get(by_name, by_name)


def short_reason(why: str) -> str:
    """The layer and what it does, where an error of megasoftmax says more; else all of it."""
    if found := re.search(r"\((\w+)\) (computes attention itself)", why):
        return f"`{found[1]}` {found[2]}"
    if found := re.search(r"^(\w+): not supported .* from (\w+);", why):
        return f"`{found[2]}` gives `{found[1]}`"
    return why
