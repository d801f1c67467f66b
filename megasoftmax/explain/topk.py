"""Which regime serves a call of softmax_topk.

csrc/topk/explain_topk.cpp answers from plan.h and limits.h.
"""

from dataclasses import dataclass

import torch

from megasoftmax.explain.common import Moved, ask, check_call, check_index
from megasoftmax.explain.gpu import H200, Gpu, device_of
from megasoftmax.limits import kernel_limits

_STATISTICS_BYTES = 3 * 4  # of a row
_INDEX_BYTES = 8


@dataclass(frozen=True)
class TopkExplanation(Moved):
    """How the kernels serve a call. A vector is 16 bytes."""

    rows: int
    columns: int
    k: int
    dtype: torch.dtype
    backward: bool
    regime: str  # of the table in limits.h; "tile" or "router" for short rows in shared memory
    why: str
    vectors: int  # the most that a row can need
    threads: int  # of a block
    rows_per_block: int
    blocks_per_row: int
    blocks: int
    shared_bytes: int  # of a block, beside what kernels declare themselves
    workspace_bytes: int

    gpu: Gpu
    bytes_read: int  # fewest: each logit once
    bytes_written: int


def explain_topk(
    rows: int,
    columns: int,
    k: int,
    dtype: torch.dtype,
    *,
    masked: bool = False,
    softcap: bool = False,
    limits: bool = False,
    router: bool = False,
    backward: bool = False,
    gpu: Gpu | str = H200,
    multiprocessors: int | None = None,
    max_cluster: int | None = None,
    shared_bytes: int | None = None,
) -> TopkExplanation:
    """Explains a call of `megasoftmax.softmax_topk` on contiguous logits, without a bias.

    Args:
        rows, columns: of the logits.
        k: how many are kept of a row.
        dtype: float16, bfloat16 or float32, of logits and probabilities.
        masked: with a bool mask, counted as large as the logits.
        softcap: with a softcap.
        limits: with a scale of each row, or with top_k, top_p or min_p, as `sample` has them.
        router: with score="sigmoid" or a selection bias of the columns.
        backward: explains the backward pass.
        gpu: a `Gpu`, or a name for `gpu_named`, such as "L4".
        multiprocessors, max_cluster, shared_bytes: in place of the GPU's own.

    Raises:
        ValueError: an argument is no such number or dtype, or the kernels do not serve the call.
        BuildError: there is no compiled part and no C++ compiler.
    """
    check_call({"rows": rows, "columns": columns, "k": k}, dtype)
    most = min(columns, kernel_limits().topk["kMaxK"])
    if k > most:
        raise ValueError(f"k: expected at most {most}, got {k}")
    check_index(max(rows, columns))
    if router:
        options = {"masked": masked, "softcap": softcap, "limits": limits}
        _check_router(columns, k, dtype, options)
    device = device_of(
        gpu, multiprocessors=multiprocessors, max_cluster=max_cluster, shared_bytes=shared_bytes
    )
    answer = ask(
        "megasoftmax_topk_plan",
        device,
        rows=rows,
        columns=columns,
        k=k,
        element_bytes=dtype.itemsize,
        is_masked=masked,
        has_softcap=softcap,
        has_limits=limits,
        is_of_router=router,
        is_backward=backward,
    )
    (regime,) = answer.pop("regime")
    plan = {name: int(value) for name, (value,) in answer.items()}  # fields of TopkExplanation
    logits = rows * columns * dtype.itemsize
    results = rows * (k * (dtype.itemsize + _INDEX_BYTES) + _STATISTICS_BYTES)
    read = logits + (rows * columns if masked else 0)
    read += results + rows * k * dtype.itemsize if backward else 0  # and the gradient of the k
    return TopkExplanation(
        rows=rows,
        columns=columns,
        k=k,
        dtype=dtype,
        backward=backward,
        regime=regime,
        why=_why(regime, plan, rows),
        **plan,
        gpu=device,
        bytes_read=read,
        bytes_written=logits if backward else results,
    )


def _why(regime: str, plan: dict[str, int], rows: int) -> str:
    vectors = f"rows of up to {plan['vectors']:,} vectors"
    rows_per_block, blocks_per_row = plan["rows_per_block"], plan["blocks_per_row"]
    if regime == "router":
        return "rows whose entries are chosen by other numbers share tiles of shared memory"
    if regime == "tile":
        return f"{vectors}, contiguous and without a mask, share tiles of shared memory"
    if rows_per_block > 1:
        return f"{vectors}: {rows_per_block} share a block"
    blocks = "one block" if blocks_per_row == 1 else f"{blocks_per_row} blocks"
    return f"{vectors}; {rows:,} rows keep the GPU busy with {blocks} each"


def _check_router(columns: int, k: int, dtype: torch.dtype, options: dict[str, bool]) -> None:
    limits = kernel_limits().topk
    for name, count, most in (
        ("k", k, limits["kTileMaxK"]),
        ("columns", columns, limits["kRouterMaxColumns"]),
    ):
        if count > most:
            raise ValueError(f"{name}: expected at most {most} with router, got {count}")
    row_bytes = columns * dtype.itemsize
    if row_bytes % 16:
        raise ValueError(
            f"columns: expected rows of a multiple of 16 bytes with router, got {row_bytes} bytes"
        )
    for name, is_given in options.items():
        if is_given:
            raise ValueError(f"{name}: expected False with router, got True")
