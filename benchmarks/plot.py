"""Draws the pictures and fills the tables from benchmarks/results: never by hand.

python benchmarks/plot.py            # rewrites docs/*.svg and the marked parts of the pages
python benchmarks/plot.py --check    # fails when a page does not match the results
"""

import sys

import pictures
import typer
from measured import ROOT, read
from tables import (
    attention_table,
    decode_table,
    families_tables,
    few_queries_table,
    generation_table,
    gpu_tests_table,
    headline,
    host_table,
    origin,
    passes_table,
    reference_table,
    training_table,
)

# A marker of docs/numbers.md -> the CSV file that it names, and the script that wrote it.
ORIGINS = {
    "softmax": ("softmax.csv", "bench_softmax.py"),
    "rows": ("rows.csv", "bench_rows.py"),
    "tuning": ("tune.csv", "tune_softmax.py"),
    "topk": ("topk.csv", "bench_topk.py"),
    "attention": ("attention.csv", "bench_attention.py"),
    "few queries": ("decoding.csv", "bench_decoding.py"),
    "bias": ("bias.csv", "bench_bias.py"),
    "ranges": ("ranges.csv", "bench_ranges.py"),
    "dropout": ("dropout.csv", "bench_dropout.py"),
    "training": ("training.csv", "bench_training.py"),
    "generation": ("generation.csv", "bench_generation.py"),
    "reference": ("reference_cpu.csv", "bench_reference.py"),
    "host": ("host.csv", "bench_host.py"),
}


def fill(text: str, marker: str, content: str) -> str:
    """Replaces what stands between `<!-- marker -->` and `<!-- /marker -->`."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def fill_pages(check: bool = False) -> None:
    """Fills the marked parts of the pages from the results, or checks that they match."""
    attention = read("attention.csv")
    numbers = {"headline": headline(), "attention table": attention_table(attention)}
    numbers |= {
        "decode table": decode_table(attention),
        "few queries table": few_queries_table(read("decoding.csv")),
        "training table": training_table(read("training.csv")),
        "generation table": generation_table(read("generation.csv")),
        "reference table": reference_table(read("reference_cpu.csv")),
        "bias table": passes_table(read("bias.csv"), ("case", "implementation")),
        "ranges table": passes_table(read("ranges.csv"), ("case", "implementation")),
        "dropout table": passes_table(read("dropout.csv"), ("case", "implementation", "dropout")),
        "host table": host_table(read("host.csv")),
        "gpu tests": gpu_tests_table(read("gpu_tests.csv")),
    }
    numbers |= {marker: origin(*source) for marker, source in ORIGINS.items()}
    pages = {
        ROOT / "README.md": {"headline": headline()},
        ROOT / "docs" / "numbers.md": numbers,
        ROOT / "docs" / "families.md": families_tables(read("families.csv")),
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
        pictures.draw_all()


if __name__ == "__main__":
    typer.run(main)
