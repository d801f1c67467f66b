"""Modules on top of the public functions."""

from megasoftmax.modules.attention import FusedAttention
from megasoftmax.modules.megatron import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

__all__ = [
    "AttnMaskType",
    "FusedAttention",
    "FusedScaleMaskSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "SoftmaxOne",
]
