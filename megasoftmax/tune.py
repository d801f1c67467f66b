"""From how many rows on each regime of the softmax is chosen, measured on this machine's GPU.

A threshold of limits.h with a number of rows above 0 sends launches of fewer rows to a later
regime. All regimes that such a number chooses between give the same bits. So it is a matter of
time alone, and depends on the multiprocessors and memory of a GPU. This module compares both
regimes at a quarter to four times the number of limits.h, last thresholds first, because they
decide what an earlier one is compared with.
"""

import ctypes
import datetime
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import megasoftmax
from megasoftmax.build import library, tuned
from megasoftmax.build.tuned import Tuned
from megasoftmax.explain import PACK_BYTES, Gpu, current_gpu, explain
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.limits import RowRegime, kernel_limits

Kind = Literal["contiguous", "masked", "ragged"]

DTYPE = torch.bfloat16
NEVER = 2**31 - 1  # rows that no launch has
STEPS = 4  # to either side of the number of limits.h, each a factor of sqrt(2)
MOST_BYTES = 2**28  # of the scores of a call
LEAST_GAIN = 0.02  # of the time of all measured calls; below it the number of limits.h stays
CALLS, ROUNDS = 10, 9  # in a CUDA graph; of both graphs
MASKED = 0.25  # of the entries


@dataclass(frozen=True)
class Case:
    """A call that is timed; ragged rows have a length that is no multiple of a vector."""

    backward: bool
    kind: Kind
    rows: int
    columns: int


@dataclass(frozen=True)
class Timing:
    """Microseconds of a regime, and of the one that launches of fewer rows take."""

    rows: int
    regime: float
    later: float


@dataclass(frozen=True)
class Change:
    """A threshold whose number of rows is another one than in limits.h."""

    backward: bool
    regime: RowRegime
    min_rows: int

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        return (
            f"{direction} {self.regime.name} up to {self.regime.max_vectors:,} vectors: from "
            f"{self.min_rows:,} rows on, not {self.regime.min_rows:,}"
        )


# Microseconds of a call, where plans read each of these.
Measure = Callable[[Case, Sequence[Tuned]], list[float]]
Progress = Callable[[int, str], None]


def tune(
    compiled: ctypes.CDLL,
    gpu: Gpu,
    measure: Measure,
    progress: Progress = lambda done, description: None,
) -> Tuned:
    """The numbers of rows that are fastest. Plans read limits.h before and afterwards.

    Args:
        compiled: the library whose plans are asked.
        gpu: whose plans.
        measure: times a call.
        progress: called after each threshold with how many are done, and with the last one.
    """
    limits = kernel_limits()
    tables = {False: limits.forward, True: limits.backward}
    rows = {backward: [each.min_rows for each in table] for backward, table in tables.items()}
    todo = _todo(tables)

    def with_rows(backward: bool, others: dict[int, int]) -> Tuned:
        found = {key: [*numbers] for key, numbers in rows.items()}
        for index, number in others.items():
            found[backward][index] = number
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Tuned(gpu.name, today, tuple(found[False]), tuple(found[True]))

    try:
        for done, (backward, index) in enumerate(todo, 1):
            regime = tables[backward][index]
            earlier = {i: NEVER for other, i in todo if other == backward and i < index}
            both = [with_rows(backward, {**earlier, index: each}) for each in (1, NEVER)]
            timings = [
                Timing(case.rows, *measure(case, both))
                for case in _cases(compiled, gpu, backward, index, both)
            ]
            rows[backward][index] = fewest_rows(regime.min_rows, timings)
            progress(done, regime.name)
    finally:
        tuned.apply(compiled, None)
    return with_rows(False, {})


def thresholds() -> int:
    """How many are measured."""
    limits = kernel_limits()
    return len(_todo({False: limits.forward, True: limits.backward}))


def _todo(tables: dict[bool, tuple[RowRegime, ...]]) -> list[tuple[bool, int]]:
    """Whether backward, and which regime of its table; last ones first."""
    return [
        (backward, index)
        for backward, table in tables.items()
        for index, regime in reversed([*enumerate(table)])
        if regime.min_rows > 0
    ]


def fewest_rows(built_in: int, timings: Sequence[Timing]) -> int:
    """The number of rows from which on a regime is taken, so that all calls take the least time.

    Each call counts alike, however long it takes. Beyond what was measured nothing is concluded: a
    regime that is never the faster one is taken from twice the most rows on.

    Args:
        built_in: the number of limits.h, which stays unless another one gains LEAST_GAIN.
        timings: of a few numbers of rows; none: nothing was measured.
    """
    if not timings:
        return built_in

    def cost(least: int) -> float:
        return sum(math.log(each.regime if each.rows >= least else each.later) for each in timings)

    counts = sorted(each.rows for each in timings)
    best = min([*counts, min(2 * counts[-1], NEVER)], key=cost)
    gain = 1 - math.exp((cost(best) - cost(built_in)) / len(timings))
    return best if gain >= LEAST_GAIN else built_in


def changes(found: Tuned) -> list[Change]:
    """What differs from limits.h."""
    limits = kernel_limits()
    return [
        Change(backward, regime, rows)
        for backward, table, all_rows in (
            (False, limits.forward, found.forward),
            (True, limits.backward, found.backward),
        )
        for regime, rows in zip(table, all_rows, strict=True)
        if rows != regime.min_rows
    ]


def _cases(
    compiled: ctypes.CDLL, gpu: Gpu, backward: bool, index: int, both: Sequence[Tuned]
) -> list[Case]:
    """Calls of the first kind whose plans take the regime by the first table, and not by the other.

    Their rows are the longest of the regime. None: no call of these kinds does.
    """
    limits = kernel_limits()
    table = limits.backward if backward else limits.forward
    regime = table[index]
    assert regime.max_vectors is not None
    counts = {round(regime.min_rows * 2 ** (step / 2)) for step in range(-STEPS, STEPS + 1)}
    elements = PACK_BYTES // DTYPE.itemsize
    line = limits.constants["kLineVectors"] * elements  # where ragged rows may begin later
    lengths: dict[Kind, int] = {"contiguous": regime.max_vectors * elements}
    if not backward:
        lengths["masked"] = lengths["contiguous"]
    lengths["ragged"] = lengths["contiguous"] - line - 1
    for kind, columns in lengths.items():
        cases = [
            Case(backward, kind, rows, columns)
            for rows in sorted(counts)
            if rows > 0 and rows * columns * DTYPE.itemsize <= MOST_BYTES
        ]
        of_first = [_index(compiled, gpu, case, both[0]) for case in cases]
        of_other = [_index(compiled, gpu, case, both[1]) for case in cases]
        found = [
            case
            for case, first, other in zip(cases, of_first, of_other, strict=True)
            if first == index and table[other].name != regime.name
        ]
        if found:
            return found
    return []


def _index(compiled: ctypes.CDLL, gpu: Gpu, case: Case, table: Tuned) -> int:
    """Of the regime that a call takes by that table."""
    tuned.apply(compiled, table)
    return explain(
        *(case.rows, case.columns, DTYPE),
        masked=case.kind == "masked",
        backward=case.backward,
        gpu=gpu,
    ).index


def tune_this_gpu(progress: Progress) -> tuple[Tuned, Path]:
    """Measures on this machine's GPU, and keeps what it found for later processes.

    Returns:
        What was found, and the file that has it.

    Raises:
        RuntimeError: there are no kernels to measure, or GPUs of several kinds.
        OSError: the file cannot be written; that is tried before anything is measured.
    """
    compiled, path, gpu = _compiled()
    with tuned.writing(path, gpu) as write:
        found = tune(compiled, current_gpu(), _on_gpu(compiled), progress)
        file = write(found)
    tuned.apply(compiled, found)
    return found, file


def remove() -> Path | None:
    """Removes the file of this machine's GPU; returns it, or None if there was none.

    Raises:
        RuntimeError: as `tune_this_gpu`.
        OSError: it cannot be removed.
    """
    compiled, path, gpu = _compiled()
    file = tuned.file_of(path, gpu)
    was_there = file.exists()
    file.unlink(missing_ok=True)
    tuned.apply(compiled, None)
    return file if was_there else None


def _compiled() -> tuple[ctypes.CDLL, Path, str]:
    """The compiled part, its file, and the name of the GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA GPU to measure on")
    gpu = tuned.gpu_name()
    if gpu is None:
        raise RuntimeError(
            "this machine has GPUs of several kinds; name those of one kind in CUDA_VISIBLE_DEVICES"
        )
    status = library.load()
    if status.path is None:
        raise RuntimeError(f"no kernels to measure: {status.reason}")
    return ctypes.CDLL(str(status.path)), status.path, gpu


def _on_gpu(compiled: ctypes.CDLL) -> Measure:
    """Times a call in CUDA graphs that were captured with each table, in turns."""

    def microseconds(case: Case, tables: Sequence[Tuned]) -> list[float]:
        call = _call(case)
        graphs = []
        for table in tables:
            tuned.apply(compiled, table)
            call()  # loads its kernel
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(CALLS):
                    call()
            graphs.append(graph)
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(ROUNDS):
            for graph, found in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                graph.replay()  # others were in the caches
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(1e3 * start.elapsed_time(end) / CALLS)
        graphs.clear()
        torch.cuda.empty_cache()  # their memory serves no other graph
        return [statistics.median(found) for found in times]

    return microseconds


def _call(case: Case) -> Callable[[], object]:
    scores = torch.randn(case.rows, case.columns, dtype=DTYPE, device="cuda")
    if case.backward:
        probabilities = megasoftmax.softmax(scores, fused=True)
        return lambda: softmax_backward(scores, probabilities)
    mask = None
    if case.kind == "masked":
        mask = torch.rand(case.columns, dtype=torch.float32, device="cuda") < MASKED
    return lambda: megasoftmax.softmax(scores, mask=mask, fused=True)
