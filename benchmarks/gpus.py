"""The table of docs/gpus.md: what each GPU that explain knows would run."""

import torch
from tables import table

from megasoftmax.explain import GPU_NAMES, Gpu, explain, explain_attention, explain_topk, gpu_named


def gpus_table() -> str:
    """In Markdown, a row for each GPU."""
    return table(
        ("GPU", "memory", "softmax", "softmax_topk", "attention", "timed"),
        (_gpu_row(gpu_named(name)) for name in GPU_NAMES),
        words=6,
    )


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    softmax = explain(8192, 50_257, torch.bfloat16, gpu=gpu)
    topk = explain_topk(8192, 50_257, 10, torch.bfloat16, gpu=gpu)
    try:
        attention = explain_attention(4, 16, 4096, 128, causal=True, gpu=gpu)
    except ValueError:  # of a GPU without kernels
        attends = "plain torch"
    else:
        kernels = "Hopper" if attention.hopper else "portable"
        tile = f"{attention.tile_queries} × {attention.tile_keys}"
        attends = f"{kernels}, {tile}; {_milliseconds(attention.microseconds())}"
    clusters = f", clusters of {gpu.max_cluster}" if gpu.max_cluster > 1 else ""
    return (
        gpu.name.removeprefix("NVIDIA "),
        f"{gpu.bytes_per_second / 1e12:.2f} TB/s; {gpu.shared_bytes // 1024} KB a block{clusters}",
        f"`{softmax.regime.name}`; {_milliseconds(softmax.microseconds())}",
        f"`{topk.regime}`; {_milliseconds(topk.microseconds())}",
        attends,
        "yes" if gpu.is_measured else "no",
    )


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f} ms"
