"""Which row regime serves a call of the fused softmax, and why. Needs no GPU.

The plan is that of csrc/softmax/plan.h itself: csrc/softmax/explain_softmax.cpp answers,
in the compiled part, or compiled alone where there is none.
"""

import functools
from dataclasses import dataclass, replace

import torch

from megasoftmax.build import tuned
from megasoftmax.explain.common import (
    Moved,
    ask,
    check_call,
    check_index,
    plans,
    visible_entries,
    window_of,
)
from megasoftmax.explain.gpu import H200, Gpu, device_of
from megasoftmax.limits import RowRegime, kernel_limits
from megasoftmax.options import Window

PACK_BYTES = 16


@dataclass(frozen=True)
class Skipped:
    """A row of the table before the one that serves a call."""

    index: int
    name: str
    why: str


@dataclass(frozen=True)
class Explanation(Moved):
    """How the kernels serve a call. A vector is 16 bytes."""

    rows: int
    columns: int
    dtype: torch.dtype
    backward: bool
    kind: str  # of the rows: one of Rows in limits.h, such as "unmasked" or "bias gradient"
    visible_columns: int  # of the widest row
    vectors: int  # the most that a row can need

    index: int  # of the regime in `Limits.forward` or `Limits.backward`
    regime: RowRegime
    reasons: tuple[str, ...]
    skipped: tuple[Skipped, ...]
    thresholds: str  # where their numbers of rows are from

    blocks_per_row: int
    rows_at_a_time: int | None  # over the whole GPU; None for rows that do not lie over all of it
    segments: int  # of the widest row; 0 for rows without segments
    warp_tiles_per_segment: int  # 0 for rows without segments
    threads: int | None  # of a block; None for tiles, whose launcher sizes blocks and grid
    blocks: int | None  # of the grid; None also where as many as run at a time take rows in turn
    shared_bytes: int | None  # of a block, beside what kernels declare themselves; as `threads`
    workspace_bytes: int

    gpu: Gpu
    bytes_read: int  # fewest: what a row sees is read once
    bytes_written: int
    launches: int  # 2 for gradients of a bias and of scores with a softcap, one for each


def explain(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    queries: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    masked: bool = False,
    bias_gradient: bool = False,
    dropout: bool = False,
    softcap: bool = False,
    backward: bool = False,
    gpu: Gpu | str = H200,
    multiprocessors: int | None = None,
    max_cluster: int | None = None,
    shared_bytes: int | None = None,
) -> Explanation:
    """Explains a call without a bias, on contiguous tensors of `dtype`, in and out.

    Args:
        rows: batches * heads * queries.
        columns: keys.
        dtype: float16, bfloat16 or float32.
        queries: of each head; by default all rows are queries of one head.
        causal, window: as in `megasoftmax.softmax`.
        masked: with a mask, counted as large as the scores. The backward pass does without it,
            except with dropout or a softcap.
        bias_gradient: the backward pass computes the gradient of a bias that no rows share.
        dropout: entries are dropped. The backward pass then reads the scores in place of the
            probabilities.
        softcap: scores are capped, by at most 5000 times the scale. The backward pass reads them
            likewise.
        backward: explains the backward pass.
        gpu: a `Gpu`, or a name for `gpu_named`, such as "L4".
        multiprocessors, max_cluster, shared_bytes: in place of the GPU's own.

    Raises:
        ValueError: an argument is no such number or dtype, or the kernels do not serve the call.
    """
    queries = rows if queries is None else queries
    limits = window_of(causal, window)
    check_call({"rows": rows, "columns": columns, "queries": queries}, dtype, limits)
    if rows % queries != 0:
        raise ValueError(f"queries: expected a divisor of the {rows} rows, got {queries}")
    if bias_gradient and not backward:
        raise ValueError("bias_gradient: only the backward pass computes it")
    reach = 2 * columns + queries if max(limits) >= 0 else columns
    check_index(max(rows // queries, queries, reach))
    table = kernel_limits().backward if backward else kernel_limits().forward
    device = device_of(
        gpu, multiprocessors=multiprocessors, max_cluster=max_cluster, shared_bytes=shared_bytes
    )
    plans()  # which reads what was measured
    measured = tuned.of_gpu(device.name)
    if measured is not None:
        all_rows = measured.backward if backward else measured.forward
        table = tuple(
            replace(each, min_rows=rows) for each, rows in zip(table, all_rows, strict=True)
        )
    answer = ask(
        "megasoftmax_softmax_plan",
        device,
        rows=rows,
        columns=columns,
        queries=queries,
        left=limits[0],
        right=limits[1],
        element_bytes=dtype.itemsize,
        is_masked=masked,
        is_backward=backward,
        has_bias_gradient=bias_gradient,
        has_dropout=dropout,
        has_softcap=softcap,
        is_tuned=measured is not None,
    )
    obstacles = [int(bits) for bits in answer.pop("obstacles", ())]
    plan = {name: int(value) for name, (value,) in answer.items()}
    regime, kind, is_tile = table[plan["regime"]], _kinds()[plan["kind"]], plan["threads"] == 0

    visible = rows // queries * visible_entries(limits, queries, columns)
    launches = 2 if bias_gradient and softcap else 1
    outputs = launches + bias_gradient  # both launches write a gradient of the scores
    reads_scores = dropout or softcap or not backward
    read = (2 if backward else 1) * dtype.itemsize + (masked and reads_scores)
    if reads_scores and bias_gradient:
        read += dtype.itemsize  # the bias
    return Explanation(
        rows=rows,
        columns=columns,
        dtype=dtype,
        backward=backward,
        kind=kind,
        visible_columns=plan["visible_columns"],
        vectors=plan["vectors"],
        index=plan["regime"],
        regime=regime,
        reasons=_reasons(regime, plan, rows, kind, launches),
        skipped=tuple(
            Skipped(i, each.name, "; ".join(_in_words(bits, each, kind, device)))
            for i, (each, bits) in enumerate(zip(table, obstacles, strict=False))
        ),
        thresholds="built in" if measured is None else f"tuned on {measured.gpu}, {measured.date}",
        blocks_per_row=plan["blocks_per_row"],
        rows_at_a_time=plan["rows_at_a_time"] or None,
        segments=plan["segments"],
        warp_tiles_per_segment=plan["warp_tiles_per_segment"],
        threads=None if is_tile else plan["threads"],
        blocks=plan["blocks"] or None,
        shared_bytes=None if is_tile else plan["shared_bytes"],
        workspace_bytes=plan["workspace_bytes"],
        gpu=device,
        bytes_read=visible * read * launches,
        bytes_written=rows * columns * dtype.itemsize * outputs,
        launches=launches,
    )


@functools.cache
def _kinds() -> dict[int, str]:
    """The kinds of rows by their bits, which stand in order in limits.h."""
    single = [kind for kind, parts in kernel_limits().kinds.items() if parts == (kind,)]
    return {1 << position: kind for position, kind in enumerate(single)}


def _in_words(obstacles: int, regime: RowRegime, kind: str, device: Gpu) -> list[str]:
    """Why a regime does not serve such rows: bits of Obstacle in regimes.h."""
    why = []
    if obstacles & 1:
        why.append(f"is not for {kind} rows")
    if obstacles & 2:
        why.append(f"takes at most {regime.max_vectors or 0:,} vectors")
    if obstacles & 4:
        why.append(f"wants at least {regime.min_rows:,} rows")
    if obstacles & 8:
        blocks = f"clusters of {regime.blocks_per_row} blocks"
        why.append(f"wants {blocks}, the GPU has {device.max_cluster}")
    if obstacles & 16:
        why.append(f"wants more than {device.shared_bytes:,} bytes of shared memory")
    return why


def _reasons(
    regime: RowRegime, plan: dict[str, int], rows: int, kind: str, launches: int
) -> tuple[str, ...]:
    """Why a regime serves such rows."""
    vectors, blocks_per_row, at_a_time = (
        plan[name] for name in ("vectors", "blocks_per_row", "rows_at_a_time")
    )
    longest = (
        "any length" if regime.max_vectors is None else f"at most {regime.max_vectors:,} vectors"
    )
    blocks = "one block" if blocks_per_row == 1 else f"{blocks_per_row} blocks"
    found = [f"serves {kind} rows", f"takes rows of {longest}: these need up to {vectors:,}"]
    if regime.blocks_per_row is None:
        found.append(
            f"shares out the GPU: {blocks} take a row together, and {at_a_time:,} of "
            f"{rows:,} rows are in its shared memory at a time, whole or in part"
        )
    elif regime.min_rows > 0:
        keep = "keeps" if blocks_per_row == 1 else "keep"
        found.append(
            f"wants at least {regime.min_rows:,} rows, so that {blocks} each {keep} the GPU busy: "
            f"there are {rows:,}"
        )
    elif blocks_per_row > 1:
        found.append(f"few rows keep the GPU busy with {blocks} each")
    if launches > 1:
        found.append("makes the gradient of the bias; another launch makes that of the scores")
    return tuple(found)
