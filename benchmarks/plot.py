"""Draws the pictures and fills the tables from benchmarks/results: never by hand.

python benchmarks/plot.py            # rewrites docs/*.svg and the marked parts of the pages
python benchmarks/plot.py --check    # fails when a page does not match the results
"""

import sys
from collections.abc import Callable

import pictures
import tables
import typer
from measured import ROOT, Row, read

NAMED_ALIKE = ("softmax", "rows", "topk", "attention", "bias", "ranges", "dropout", "training")
NAMED_ALIKE += ("generation", "host", "install")
# A marker of docs/numbers.md -> the CSV file that it names, and the script that wrote it.
ORIGINS = {
    **{name: (f"{name}.csv", f"bench_{name}.py") for name in NAMED_ALIKE},
    "tuning": ("tune.csv", "tune_softmax.py"),
    "few queries": ("decoding.csv", "bench_decoding.py"),
    "first use": ("first_use.csv", "bench_install.py"),
    "reference": ("reference_cpu.csv", "bench_reference.py"),
}
TESTED = ("date", "commit", "gpu", "torch", "passed", "failed", "skipped")
PLACE = ("case", "implementation")
# A marker of docs/numbers.md -> a file, and the table of its rows.
TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "attention table": ("attention.csv", tables.attention_table),
    "decode table": ("attention.csv", tables.decode_table),
    "few queries table": ("decoding.csv", tables.few_queries_table),
    "training table": ("training.csv", tables.training_table),
    "generation table": ("generation.csv", tables.generation_table),
    "reference table": (
        "reference_cpu.csv",
        lambda rows: tables.plain_table(
            rows, "case", "peer", "peer_ms", "ours_ms", "ratio", words=2
        ),
    ),
    "bias table": ("bias.csv", lambda rows: tables.passes_table(rows, *PLACE)),
    "ranges table": ("ranges.csv", lambda rows: tables.passes_table(rows, *PLACE)),
    "dropout table": ("dropout.csv", lambda rows: tables.passes_table(rows, *PLACE, "dropout")),
    "host table": ("host.csv", tables.host_table),
    "install table": ("install.csv", lambda rows: tables.plain_table(rows, "step", "seconds")),
    "first use table": (
        "first_use.csv",
        lambda rows: tables.plain_table(rows, "step", "cores", "seconds"),
    ),
    # The last runs of the tests on GPUs.
    "gpu tests": ("gpu_tests.csv", lambda rows: tables.plain_table(rows[-3:], *TESTED, words=4)),
}


def fill(text: str, marker: str, content: str) -> str:
    """Replaces what stands between `<!-- marker -->` and `<!-- /marker -->`."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def fill_pages(check: bool = False) -> None:
    """Fills the marked parts of the pages from the results, or checks that they match."""
    numbers = {marker: draw(read(name)) for marker, (name, draw) in TABLES.items()}
    numbers |= {marker: tables.origin(*source) for marker, source in ORIGINS.items()}
    headline = {"headline": tables.headline()}
    pages = {
        ROOT / "README.md": headline,
        ROOT / "docs" / "numbers.md": numbers | headline,
        ROOT / "docs" / "families.md": tables.families_tables(read("families.csv")),
    }
    for path, markers in pages.items():
        old = path.read_text()
        new = old
        for marker, content in markers.items():
            new = fill(new, marker, content)
        if check and new != old:
            sys.exit(f"{path.name} does not match benchmarks/results: run benchmarks/plot.py")
        path.write_text(new)


def main(check: bool = False) -> None:
    """Fills the pages and draws the pictures, or checks that the pages match."""
    fill_pages(check)
    if not check:
        for name, svg in pictures.PICTURES.items():
            (ROOT / "docs" / name).write_text(svg())


if __name__ == "__main__":
    typer.run(main)
