"""Tables and the verdict of ``python -m megasoftmax``."""

import platform
from importlib import metadata

import torch
from rich import box
from rich.table import Table

import megasoftmax
from megasoftmax import host
from megasoftmax.build import extension, library
from megasoftmax.explain import (
    PACK_BYTES,
    AttentionExplanation,
    Explanation,
    Gpu,
    TopkExplanation,
)
from megasoftmax.limits import RowRegime


def verdict() -> str:
    """Whether calls run fused on this machine's first GPU, and why not; builds nothing."""
    status = library.status()
    if not torch.cuda.is_available():
        return (
            "Works fused here: no, torch sees no CUDA GPU. Attention runs torch's own where that "
            "computes the same. All other calls run in plain torch."
        )
    if not status.available:
        hint = "`python -m megasoftmax build` compiles the kernels now."
        return f"Works fused here: not yet, no compiled kernels: {status.reason}. {hint}"
    rows = torch.empty(1, 1, 16, 64, dtype=torch.bfloat16, device="cuda")
    reasons = {
        "softmax": megasoftmax.why_not_fused(megasoftmax.softmax, rows),
        "softmax_topk": megasoftmax.why_not_fused(megasoftmax.softmax_topk, rows, 4),
        "attention": megasoftmax.why_not_fused(megasoftmax.attention, rows, rows, rows),
    }
    fused = [name for name, against in reasons.items() if not against]
    text = f"Works fused here: {'yes, ' + ', '.join(fused) if fused else 'no'}."
    for name, against in reasons.items():
        if against:
            text += f" {name} runs in plain torch: {'; '.join(map(str, against))}."
    return text


def call_table(found: Explanation) -> Table:
    """How the softmax runs."""
    direction = "backward" if found.backward else "forward"
    segments = (
        f"up to {found.segments:,} per row, warp tiles in each: {found.warp_tiles_per_segment}"
    )
    if found.threads is None:
        blocks, shared = "of as many rows as fit a tile", "a tile per block"
    else:
        blocks = "as many as run at a time" if found.blocks is None else f"{found.blocks:,}"
        blocks += f", of {found.threads} threads"
        shared = f"{found.shared_bytes:,} bytes per block"
    return _rows(
        ("regime", f"{found.regime.name}, row {found.index} of the {direction} table"),
        ("why", "\n".join(found.reasons)),
        ("thresholds", found.thresholds),
        ("rows", f"{found.rows:,} of {found.columns:,} {found.dtype}".replace("torch.", "")),
        ("kind of rows", found.kind),
        ("visible columns", f"up to {found.visible_columns:,} per row"),
        ("vectors", f"up to {found.vectors:,} per row, of 16 bytes"),
        ("segments", segments if found.segments else "none"),
        ("blocks per row", f"{found.blocks_per_row:,}"),
        ("blocks", blocks),
        ("shared memory", shared),
        *_costs(found),
    )


def _costs(found: Explanation | TopkExplanation) -> tuple[tuple[str, str], ...]:
    return (
        ("workspace", f"{found.workspace_bytes:,} bytes"),
        ("reads", f"{found.bytes_read:,} bytes at least"),
        ("writes", f"{found.bytes_written:,} bytes"),
        *_time(found.microseconds(), found.gpu),
    )


def _time(microseconds: float, gpu: Gpu) -> tuple[tuple[str, str], ...]:
    measured = "yes" if gpu.is_measured else "no: the kernels were not timed on such a GPU"
    return (
        ("expected time", f"{microseconds:.1f} µs on {gpu.name}"),
        ("bandwidth", f"{gpu.bytes_per_second / 1e12:.2f} TB/s, {gpu.bandwidth_source}"),
        ("measured", measured),
    )


def attention_table(found: AttentionExplanation) -> Table:
    """How attention runs."""
    gpu = found.gpu
    rate = f"{found.share:.0%} of {gpu.flops_per_second / 1e12:,.0f} TFLOP/s, {gpu.flops_source}"
    shared = None if found.shared_bytes is None else f"{found.shared_bytes:,} bytes per block"
    of_tile = f"{found.tile_queries} x {found.tile_keys}, queries x keys"
    if found.kernel == "decode":
        of_tile += ", a warp each"
    return _rows(
        ("kernel", f"{found.kernel}, {'Hopper' if found.hopper else 'portable'}"),
        ("why", found.why),
        ("tiles", f"{of_tile}, for head dimensions up to {found.tile_head_dim}"),
        ("parts of the keys", f"{found.splits:,}"),
        ("blocks per tile of keys", f"{found.slices}" if found.backward else None),
        ("blocks", f"{found.blocks:,}, of {found.threads} threads"),
        ("shared memory", shared),
        ("workspace", f"{found.workspace_bytes:,} bytes"),
        ("visible pairs", f"{found.pairs:,}"),
        ("reads", f"{found.bytes_read:,} bytes at least"),
        ("writes", f"{found.bytes_written:,} bytes at least"),
        ("products", f"{found.flops / 1e9:,.1f} GFLOP"),
        ("rate of products", rate),
        *_time(found.microseconds(), gpu),
    )


def topk_table(found: TopkExplanation) -> Table:
    """How softmax_topk runs."""
    direction = "backward" if found.backward else "forward"
    return _rows(
        ("regime", f"{found.regime}, {direction}"),
        ("why", found.why),
        ("rows", f"{found.rows:,} of {found.columns:,} {found.dtype}".replace("torch.", "")),
        ("k", f"{found.k}"),
        ("vectors", f"up to {found.vectors:,} per row, of 16 bytes"),
        ("rows per block", f"{found.rows_per_block:,}"),
        ("blocks per row", f"{found.blocks_per_row:,}"),
        ("blocks", f"{found.blocks:,}, of {found.threads} threads"),
        ("shared memory", f"{found.shared_bytes:,} bytes per block"),
        *_costs(found),
    )


def _rows(*rows: tuple[str, str | None]) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in rows:
        if value is not None:
            table.add_row(name, value)
    return table


def skipped_table(found: Explanation) -> Table:
    table = Table(title="Skipped", title_justify="left", box=box.SIMPLE)
    table.add_column("row", justify="right")
    table.add_column("regime")
    table.add_column("why")
    for regime in found.skipped:
        table.add_row(str(regime.index), regime.name, regime.why)
    return table


def versions() -> Table:
    try:
        installed = metadata.version("megasoftmax")
    except metadata.PackageNotFoundError:
        installed = "not installed"
    status = library.status()
    nvcc = extension.find_nvcc()
    table = Table(show_header=False, box=None)
    table.add_row("megasoftmax", f"{installed}, {extension.PACKAGE}")
    table.add_row("python", platform.python_version())
    table.add_row("torch", str(torch.__version__))
    table.add_row("CUDA of torch", torch.version.cuda or "none")
    table.add_row("nvcc", f"{nvcc.version[0]}.{nvcc.version[1]}, {nvcc.path}" if nvcc else "none")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        table.add_row(f"GPU {index}", f"{name}, compute capability {major}.{minor}")
    table.add_row("kernels", str(status.path) if status.available else f"none: {status.reason}")
    table.add_row("calls in C++", host.status())
    return table


def regimes_table(direction: str, regimes: tuple[RowRegime, ...]) -> Table:
    table = Table(title=f"{direction}, row regimes", title_justify="left", box=None)
    table.add_column("regime", no_wrap=True)
    table.add_column("waits in", no_wrap=True)
    table.add_column("rows", min_width=8)
    for heading in ("bytes\nup to", "rows\nfrom", "blocks\n/row", "threads\n× rows", "blocks\n/SM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for regime in regimes:
        table.add_row(
            regime.name,
            regime.storage,
            ", ".join(regime.serves),
            "any" if regime.max_vectors is None else f"{regime.max_vectors * PACK_BYTES:,}",
            f"{regime.min_rows:,}",
            "all" if regime.blocks_per_row is None else str(regime.blocks_per_row),
            *(() if regime.storage == "tile" else _shape(regime)),
        )
    return table


def _shape(regime: RowRegime) -> tuple[str, str]:
    return f"{regime.threads_per_row} × {regime.rows_per_block}", str(regime.blocks_per_sm)
