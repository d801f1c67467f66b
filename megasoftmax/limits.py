"""The limits of the kernels, read once from the headers in csrc that fix them."""

import re
from dataclasses import dataclass, fields
from typing import Any

from megasoftmax.build.extension import CSRC


@dataclass(frozen=True)
class RowRegime:
    """A threshold and its shape in limits.h: which rows a kernel takes, and how.

    A vector is 16 bytes.
    """

    name: str
    storage: str  # where the row waits between the two passes: Storage in limits.h, in lower case
    threads_per_row: int
    rows_per_block: int
    vectors_per_thread: int
    blocks_per_sm: int
    is_persistent: bool  # a block takes one row after the other
    blocks_per_row: int | None  # None: all blocks that the GPU runs at a time share the rows
    max_vectors: int | None  # None: any length
    min_rows: int  # fewer rows take a later regime
    serves: tuple[str, ...]  # names of Rows in limits.h, such as "unmasked" or "any"


@dataclass(frozen=True)
class GpuLimits:
    """What GPUs of a compute capability have: a row of kGpus in common/limits.h."""

    major: int
    minor: int
    shared_bytes: int  # of a block, at most
    shared_bytes_per_sm: int
    max_cluster: int  # blocks of a cluster; 1: there are no clusters


@dataclass(frozen=True)
class Limits:
    """The row regimes of the softmax, shortest rows first, and what else the headers fix."""

    forward: tuple[RowRegime, ...]
    backward: tuple[RowRegime, ...]
    max_index: int  # the most rows or columns
    kinds: dict[str, tuple[str, ...]]  # a name of Rows -> the kinds of rows that it stands for
    constants: dict[str, int]  # of the softmax, by their names in the headers
    topk: dict[str, int]  # constants, by their names
    attention: dict[str, int]
    gpus: tuple[GpuLimits, ...]  # by compute capability


_limits: Limits | None = None


def kernel_limits() -> Limits:
    """The limits of the kernels in csrc. The first call reads the headers."""
    global _limits
    if _limits is None:
        _limits = read_limits(
            (CSRC / "softmax" / "limits.h").read_text(),
            topk=(CSRC / "topk" / "limits.h").read_text(),
            attention=(CSRC / "attention" / "limits.h").read_text(),
            common=(CSRC / "common" / "limits.h").read_text(),
        )
    return _limits


# torch.compile calls it while tracing and keeps the answer, as it does with `library.load`.
kernel_limits._dynamo_marked_constant = True  # type: ignore[attr-defined]


def read_limits(header: str, *, topk: str = "", attention: str = "", common: str = "") -> Limits:
    """The tables and constants in the text of softmax/limits.h and of the other limits.h.

    Raises:
        ValueError: the text is not laid out as expected; nothing is guessed.
    """
    names = [field.name for field in fields(RowRegime)]
    of_threshold = ["name", *names[-3:]]
    for struct, expected in (("RowShape", names[:-3]), ("RowThreshold", of_threshold)):
        found = re.search(rf"struct {struct} \{{(.*?)\n\}};", header, re.DOTALL)
        members = re.findall(r"^\s*[\w:]+ (\w+);", found[1] if found else "", re.MULTILINE)
        if members != expected:
            raise ValueError(f"limits.h: the members of {struct} are {members}, not {expected}")
    return Limits(
        _read_regimes(header, "Forward"),
        _read_regimes(header, "Backward"),
        _read_max_index(header),
        _read_kinds(header),
        _read_constants(header),
        _read_constants(topk),
        _read_constants(attention),
        _read_gpus(common),
    )


def _read_constants(text: str) -> dict[str, int]:
    found = re.findall(r"\b(k[A-Z]\w*) = (\d+)(?: \* (\d+))?[,;]", text)
    return {name: int(value) * int(factor or 1) for name, value, factor in found}


def _read_gpus(text: str) -> tuple[GpuLimits, ...]:
    table = re.search(r"Gpu kGpus\[\] = \{\n(.*?)\n\};", text, re.DOTALL)
    rows = re.findall(r"^\s*\{([\d, ]+)\},", table[1] if table else "", re.MULTILINE)
    if text and not rows:
        raise ValueError("limits.h: no table kGpus")
    return tuple(GpuLimits(*map(int, row.split(","))) for row in rows)


def _read_kinds(header: str) -> dict[str, tuple[str, ...]]:
    rows = re.search(r"enum Rows : unsigned \{\n(.*?)\n\};", header, re.DOTALL)
    if rows is None:
        raise ValueError("limits.h: no enum Rows")
    kinds: dict[str, tuple[str, ...]] = {}
    for name, value in re.findall(r"^\s*(k\w+) = ([^,]+),", rows[1], re.MULTILINE):
        if value.isdigit() and int(value) != 1 << len(kinds):
            raise ValueError(f"limits.h: {name} is {value}, expected the bits of Rows in order")
        parts = [] if value.isdigit() else _names_of_rows(value)  # combinations come after parts
        own = tuple(kind for part in parts for kind in kinds[part])
        kinds[_words(name)] = own or (_words(name),)
    return kinds


def _names_of_rows(text: str) -> tuple[str, ...]:
    return tuple(_words(name) for name in text.split(" | "))


def _words(name: str) -> str:
    """kBiasGradient -> "bias gradient", kAnyRows -> "any"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("k")).lower()
    return words.removesuffix(" rows")


def _read_max_index(header: str) -> int:
    margin = re.search(r"int64_t kMaxIndex = INT32_MAX - (\d+);", header)
    if margin is None:
        raise ValueError("limits.h: no kMaxIndex of the form INT32_MAX - <number>")
    return 2**31 - 1 - int(margin[1])


def _read_regimes(header: str, direction: str) -> tuple[RowRegime, ...]:
    """Each threshold with the shape of its name."""
    shapes = {row[0]: row for row in _read_table(header, f"RowShape k{direction}Shapes")}
    regimes = []
    for row in _read_table(header, f"RowThreshold k{direction}Thresholds"):
        try:
            name, storage, threads, rows, vectors, blocks, persistent, blocks_per_row = shapes[
                row[0]
            ]
            _, max_vectors, min_rows, serves = row
            regimes.append(
                RowRegime(
                    name=_read_cell(name, r'"(\w+)"'),
                    storage=_read_cell(storage, r"Storage::k(\w+)").lower(),
                    threads_per_row=_number(threads),
                    rows_per_block=_number(rows),
                    vectors_per_thread=_number(vectors),
                    blocks_per_sm=_number(blocks),
                    is_persistent=_read_cell(persistent, "(true|false)") == "true",
                    blocks_per_row=_number(blocks_per_row) or None,
                    max_vectors=_number(max_vectors),
                    min_rows=_number(min_rows),
                    serves=_names_of_rows(_read_cell(serves, r"(k\w+(?: \| k\w+)*)")),
                )
            )
        except (KeyError, ValueError) as error:
            raise ValueError(f"limits.h: cannot read the row {', '.join(row)}: {error}") from None
    return tuple(regimes)


def _read_table(header: str, name: str) -> list[list[str]]:
    """The cells of its rows."""
    table = re.search(rf"{name}\[\] = \{{\n(.*?)\n\}};", header, re.DOTALL)
    if table is None:
        raise ValueError(f"limits.h: no table {name}")
    lines = [line.split("//")[0].strip() for line in table[1].splitlines()]
    rows = [re.sub(r"\s+", " ", line) for line in lines if line]
    return [row.removeprefix("{").removesuffix("},").split(", ") for row in rows]


def _read_cell(cell: str, pattern: str) -> str:
    found = re.fullmatch(pattern, cell)
    if found is None:
        raise ValueError(f"{cell!r} is not of the form {pattern}")
    return found[1]


def _number(cell: str) -> Any:
    """None: kUnlimited."""
    named = {"kUnlimited": None, "kWholeGpu": 0}
    return named[cell] if cell in named else int(_read_cell(cell, r"(\d+)"))
