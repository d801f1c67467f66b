"""Which row regime serves a call of the fused softmax, and why: needs neither a GPU nor kernels.

It follows csrc/kernels/softmax/plan.h step by step, with the tables and constants of the headers.
"""

from dataclasses import dataclass

import torch

from megasoftmax.limits import RowRegime, kernel_limits

Window = tuple[int, int]

PACK_BYTES = 16
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MEASURED_SHARE = 0.88  # of a GPU's nominal bandwidth that a copy reaches
LAUNCH_MICROSECONDS = 2.0  # of a small kernel among others in a CUDA graph, roughly


@dataclass(frozen=True)
class Gpu:
    """What regimes and expected times depend on, besides the call."""

    name: str
    multiprocessors: int
    max_cluster: int  # blocks of a cluster; 1: there are no clusters
    bytes_per_second: float  # of a copy, read and written
    bandwidth_source: str


H200 = Gpu("NVIDIA H200", 132, 16, 4.27e12, "measured copy bandwidth of an H200")


def current_gpu() -> Gpu:
    """The current GPU; an H200 where torch sees none.

    Where torch does not tell its memory's clock and width, the bandwidth is that of an H200 too.
    """
    if not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    max_cluster = 16 if properties.major in (9, 10) else 8 if properties.major > 8 else 1
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    nominal = 2 * 1e3 * kilohertz * bits / 8  # two transfers per clock
    if nominal:
        bandwidth, source = MEASURED_SHARE * nominal, f"{MEASURED_SHARE:.0%} of its nominal one"
    else:
        bandwidth, source = H200.bytes_per_second, H200.bandwidth_source
    return Gpu(properties.name, properties.multi_processor_count, max_cluster, bandwidth, source)


@dataclass(frozen=True)
class Skipped:
    """A row of the table before the one that serves a call."""

    index: int
    name: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """How the kernels serve a call. A chunk is 16 bytes."""

    rows: int
    columns: int
    dtype: torch.dtype
    backward: bool
    kind: str  # of the rows: one of Rows in limits.h, such as "plain" or "bias gradient"
    visible_columns: int  # of the widest row
    chunks: int  # the most that a row can need

    index: int  # of the regime in `Limits.forward` or `Limits.backward`
    regime: RowRegime
    reasons: tuple[str, ...]
    skipped: tuple[Skipped, ...]

    blocks_per_row: int
    units: int  # of the widest row; 0 for rows without units
    batches_per_unit: int  # likewise
    threads: int | None  # of a block; None for tiles, whose launcher sizes blocks and grid
    blocks: int | None  # of the grid; None also where as many as run at a time take rows in turn
    shared_bytes: int | None  # of a block, besides what kernels declare themselves; as `threads`
    workspace_bytes: int

    bytes_read: int  # fewest: what a row sees is read once
    bytes_written: int

    def microseconds(self, bytes_per_second: float) -> float:
        """The time that the fewest bytes take at such a bandwidth, with the launch."""
        moved = self.bytes_read + self.bytes_written
        return 1e6 * moved / bytes_per_second + LAUNCH_MICROSECONDS


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
    backward: bool = False,
    multiprocessors: int = H200.multiprocessors,
    max_cluster: int = H200.max_cluster,
) -> Explanation:
    """Explains a call without a bias, on contiguous tensors of `dtype`, in and out.

    On a GPU whose blocks have at least kMaxSharedBytes of shared memory.

    Args:
        rows: batches * heads * queries.
        columns: keys.
        dtype: float16, bfloat16 or float32.
        queries: of each head; by default all rows are queries of one head.
        causal, window: as in `megasoftmax.softmax`.
        masked: with a mask, counted as large as the scores. The backward pass does without it.
        bias_gradient: the backward pass computes the gradient of a bias that no rows share.
        backward: explains the backward pass.
        multiprocessors, max_cluster: of the GPU; see `Gpu`.

    Raises:
        ValueError: an argument is no such number or dtype, or the kernels do not serve the call.
    """
    queries = rows if queries is None else queries
    limits = _window(causal, window)
    _check(rows, columns, dtype, queries, limits, bias_gradient, backward)
    limits = _without_idle_limits(limits, queries, columns)
    visible_columns = _visible_columns(limits, queries, columns)
    pack_elements = PACK_BYTES // dtype.itemsize
    if bias_gradient:
        kind, chunks = "bias gradient", _divide_up(columns, pack_elements)
    else:
        chunks = _max_visible_chunks(columns, visible_columns, pack_elements)
        all_chunks = _max_visible_chunks(columns, columns, pack_elements)
        is_even = columns % pack_elements == 0
        kind = _kind(columns, is_even, all_chunks, chunks, masked and not backward, limits)

    table = kernel_limits().backward if backward else kernel_limits().forward
    index, skipped = _choose(table, chunks, rows, kind, max_cluster)
    regime = table[index]
    constants = kernel_limits().constants
    blocks_per_row, units, batches_per_unit, workspace_bytes = 1, 0, 0, 0
    threads: int | None = regime.threads_per_row * regime.rows_per_block
    shared_bytes: int | None = 0
    if regime.storage == "tile":
        threads = shared_bytes = None
    elif regime.storage != "registers":
        batches_per_unit = _unit_batches(chunks)
        units = _divide_up(chunks, constants["kChunksPerBatch"] * batches_per_unit)
        blocks_per_row = regime.blocks_per_row or min(
            max(multiprocessors * constants["kBlocksPerSm"] // rows, 1),
            _divide_up(units, regime.threads_per_row // 32),
        )
        if regime.blocks_per_row is None and blocks_per_row > 1:
            workspace_bytes = rows * units * constants["kResultBytes"]
        chunk_bytes = 2 * PACK_BYTES if backward else PACK_BYTES
        shared_bytes = _shared_bytes(regime, units, blocks_per_row, chunk_bytes)
    blocks = None
    if threads is not None and not regime.takes_turns:
        # Rows of all heads form one dimension where no window and no bias tells heads apart.
        queries_of_grid = queries if _is_limited(limits) or bias_gradient else rows
        owners = rows // queries_of_grid * _divide_up(queries_of_grid, regime.rows_per_block)
        blocks = owners * blocks_per_row

    visible = rows // queries * _visible_entries(limits, queries, columns)
    outputs = 2 if bias_gradient else 1
    read = 2 * dtype.itemsize if backward else dtype.itemsize + masked
    return Explanation(
        rows=rows,
        columns=columns,
        dtype=dtype,
        backward=backward,
        kind=kind,
        visible_columns=visible_columns,
        chunks=chunks,
        index=index,
        regime=regime,
        reasons=_reasons(regime, chunks, rows, kind, blocks_per_row),
        skipped=skipped,
        blocks_per_row=blocks_per_row,
        units=units,
        batches_per_unit=batches_per_unit,
        threads=threads,
        blocks=blocks,
        shared_bytes=shared_bytes,
        workspace_bytes=workspace_bytes,
        bytes_read=visible * read,
        bytes_written=rows * columns * dtype.itemsize * outputs,
    )


def _check(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    queries: int,
    limits: Window,
    bias_gradient: bool,
    backward: bool,
) -> None:
    for name, value in (("rows", rows), ("columns", columns), ("queries", queries)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    if rows % queries != 0:
        raise ValueError(f"queries: expected a divisor of the {rows} rows, got {queries}")
    if min(limits) < -1:
        raise ValueError(f"window: expected sides of -1 (no limit) or more, got {limits}")
    if bias_gradient and not backward:
        raise ValueError("bias_gradient: only the backward pass computes it")
    is_limited = _is_limited(limits)
    reach = 2 * columns + queries if is_limited else columns
    if max(rows // queries, queries, reach) > kernel_limits().max_index:
        raise ValueError(
            f"rows and columns: the kernels take at most {kernel_limits().max_index:,} of them"
        )


# plan.h, layout.h and limits.h, function by function


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)


def _window(causal: bool, window: Window | None) -> Window:
    left, right = window or (-1, -1)
    return left, 0 if causal else right


def _is_limited(limits: Window) -> bool:
    return max(limits) >= 0


def _without_idle_limits(limits: Window, queries: int, columns: int) -> Window:
    left, right = limits
    return -1 if left >= columns - 1 else left, -1 if right >= queries - 1 else right


def _visible_columns(limits: Window, queries: int, columns: int) -> int:
    """Those that the widest row sees, without idle limits."""
    left, right = limits
    if left < 0:
        return columns
    return min(columns, left + (queries if right < 0 else right + 1))


def _max_visible_chunks(columns: int, visible_columns: int, pack_elements: int) -> int:
    straddling = 2 * (pack_elements - 1)
    is_whole = columns % pack_elements == 0
    whole = (columns if is_whole else columns + straddling) // pack_elements
    visible = (visible_columns + straddling) // pack_elements
    return min(visible, whole) if visible_columns < columns else whole


def _kind(
    columns: int, is_even: bool, all_chunks: int, chunks: int, masked: bool, limits: Window
) -> str:
    constants = kernel_limits().constants
    if all_chunks >= constants["kLongRow"] and chunks <= constants["kNarrowRow"]:
        return "narrow"
    if masked:
        return "masked"
    if _is_limited(limits):
        return "limited"
    if columns <= (constants["kTinyColumns"] - 1 if is_even else constants["kTinyUnevenColumns"]):
        return "tiny"
    return "plain" if is_even else "uneven"


def _choose(
    table: tuple[RowRegime, ...], chunks: int, rows: int, kind: str, max_cluster: int
) -> tuple[int, tuple[Skipped, ...]]:
    """The first row of the table that serves such rows, and those before it."""
    skipped: list[Skipped] = []
    for index, regime in enumerate(table[:-1]):
        obstacles = _obstacles(regime, chunks, rows, kind, max_cluster)
        if not obstacles:
            return index, tuple(skipped)
        skipped.append(Skipped(index, regime.name, "; ".join(obstacles)))
    return len(table) - 1, tuple(skipped)


def _obstacles(regime: RowRegime, chunks: int, rows: int, kind: str, max_cluster: int) -> list[str]:
    """Why a regime does not serve such rows; empty when it does."""
    found = []
    if not any(kind in kernel_limits().kinds[name] for name in regime.serves):
        found.append(f"is not for {kind} rows")
    if regime.max_chunks is not None and chunks > regime.max_chunks:
        found.append(f"takes at most {regime.max_chunks:,} chunks")
    if rows < regime.min_rows:
        found.append(f"wants at least {regime.min_rows:,} rows")
    if regime.blocks_per_row is not None and regime.blocks_per_row > max_cluster:
        found.append(
            f"wants clusters of {regime.blocks_per_row} blocks, more than the GPU's {max_cluster}"
        )
    return found


def _reasons(
    regime: RowRegime, chunks: int, rows: int, kind: str, blocks_per_row: int
) -> tuple[str, ...]:
    """Why a regime serves such rows."""
    longest = "any length" if regime.max_chunks is None else f"at most {regime.max_chunks:,} chunks"
    blocks = "one block" if blocks_per_row == 1 else f"{blocks_per_row} blocks"
    found = [
        f"serves {kind} rows",
        f"takes rows of {longest}: these need up to {chunks:,}",
    ]
    if regime.min_rows > 0:
        keep = "keeps" if blocks_per_row == 1 else "keep"
        found.append(
            f"wants at least {regime.min_rows:,} rows, so that {blocks} each {keep} the GPU busy: "
            f"there are {rows:,}"
        )
    elif regime.blocks_per_row is None:
        found.append(f"all rows share the blocks that the GPU runs at a time: {blocks} each")
    elif blocks_per_row > 1:
        found.append(f"few rows keep the GPU busy with {blocks} each")
    return tuple(found)


def _unit_batches(chunks: int) -> int:
    constants = kernel_limits().constants
    batches = constants["kUnitBatches"]
    while batches * constants["kChunksPerBatch"] * constants["kMaxUnits"] < chunks:
        batches *= 2
    return batches


def _shared_bytes(regime: RowRegime, units: int, blocks_per_row: int, chunk_bytes: int) -> int:
    constants = kernel_limits().constants
    batch_bytes = constants["kChunksPerBatch"] * chunk_bytes
    if regime.storage == "reread":
        kept_batches = regime.threads_per_row // 32 * constants["kRingBytes"] // batch_bytes
    else:
        kept_batches = _divide_up(units, blocks_per_row) * constants["kUnitBatches"]
    return kept_batches * batch_bytes + 2 * units * constants["kResultBytes"]


# Bytes


def _visible_entries(limits: Window, queries: int, columns: int) -> int:
    """How many scores of a head are visible, over all its queries."""
    left, right = limits
    offset = columns - queries
    ends = queries * columns
    if right >= 0:
        ends = _sum_of_clamped(offset + right + 1, queries, columns)
    begins = _sum_of_clamped(offset - left, queries, columns) if left >= 0 else 0
    return ends - begins


def _sum_of_clamped(first: int, count: int, most: int) -> int:
    """The sum of `count` integers from `first` on, each clamped to 0 ... `most`."""

    def sum_below(end: int) -> int:  # from 0 on
        rising = max(min(end, most), 0)
        return rising * (rising - 1) // 2 + max(end - rising, 0) * most

    return sum_below(first + count) - sum_below(first)
