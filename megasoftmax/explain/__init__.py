"""Which kernels serve a call, over which grid, what they move, and what that should take.

Needs no GPU. The plans are those of csrc itself: the compiled part answers, or the explain*.cpp
files compiled alone where there is none.
"""

from megasoftmax.explain.attention import AttentionExplanation, explain_attention
from megasoftmax.explain.common import DTYPES, Window
from megasoftmax.explain.gpu import (
    GPU_NAMES,
    H200,
    LAUNCH_MICROSECONDS,
    Gpu,
    current_gpu,
    gpu_named,
)
from megasoftmax.explain.softmax import PACK_BYTES, Explanation, explain
from megasoftmax.explain.topk import TopkExplanation, explain_topk

__all__ = [
    "DTYPES",
    "GPU_NAMES",
    "H200",
    "LAUNCH_MICROSECONDS",
    "PACK_BYTES",
    "AttentionExplanation",
    "Explanation",
    "Gpu",
    "TopkExplanation",
    "Window",
    "current_gpu",
    "explain",
    "explain_attention",
    "explain_topk",
    "gpu_named",
]
