"""Exact, fused attention softmax, and the attention around it."""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    raise ImportError(
        "megasoftmax needs torch >= 2.11: `pip install torch`, or choose the build for your CUDA "
        "version, or for CPUs alone, on https://pytorch.org/get-started/locally"
    ) from error

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 11):
    raise ImportError(f"megasoftmax needs torch >= 2.11, found {_torch.__version__}")

from megasoftmax import layers as layers
from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reason
from megasoftmax.distributed.context_parallel import merge_attention
from megasoftmax.functional import (
    attention,
    ring_attention,
    softmax,
    softmax_topk,
    why_not_fused,
)
from megasoftmax.modules import (
    AttnMaskType,
    FusedAttention,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

__version__ = "0.1.0"

__all__ = [
    "AttnMaskType",
    "FusedAttention",
    "FusedScaleMaskSoftmax",
    "Reason",
    "RelativeBias",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
    "__version__",
    "attention",
    "merge_attention",
    "ring_attention",
    "softmax",
    "softmax_topk",
    "why_not_fused",
]
