"""Exact, fused attention softmax, and the attention around it."""

import importlib
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

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
from megasoftmax import ranges as ranges
from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.dispatch import Reason, Reasons
from megasoftmax.distributed.zigzag import zigzag_cat, zigzag_chunk
from megasoftmax.functions.attention import attention, attention_varlen
from megasoftmax.functions.ring import merge_attention, ring_attention
from megasoftmax.functions.sdpa import scaled_dot_product_attention
from megasoftmax.functions.softmax import softmax
from megasoftmax.functions.topk import sample, softmax_topk
from megasoftmax.functions.why_not_fused import why_not_fused
from megasoftmax.masks import TileMask
from megasoftmax.modules import (
    AttnMaskType,
    FusedAttention,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

# An installation has megasoftmax.integrations inside of the package, a checkout beside it.
_root = _Path(__file__).absolute().parents[1]
if (_root / "setup.py").is_file() and (_root / "integrations" / "__init__.py").is_file():
    __path__.append(str(_root))

__version__ = "0.1.0"

__all__ = [
    "AttnMaskType",
    "FusedAttention",
    "FusedScaleMaskSoftmax",
    "Reason",
    "Reasons",
    "RelativeBias",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
    "ShiftedBias",
    "SoftmaxOne",
    "TileMask",
    "__version__",
    "attention",
    "attention_varlen",
    "merge_attention",
    "ranges",
    "ring_attention",
    "sample",
    "scaled_dot_product_attention",
    "softmax",
    "softmax_topk",
    "why_not_fused",
    "zigzag_cat",
    "zigzag_chunk",
]

_IMPORTED_WHEN_ASKED = {"register": "transformers", "patch_model": "patching"}

if TYPE_CHECKING:  # where a name that is misspelt is an error
    from megasoftmax.integrations.patching import patch_model as patch_model
    from megasoftmax.integrations.transformers import register as register
else:

    def __getattr__(name: str) -> Any:
        if name not in _IMPORTED_WHEN_ASKED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = f"{__name__}.integrations.{_IMPORTED_WHEN_ASKED[name]}"
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "transformers":
                raise
            raise ModuleNotFoundError(
                f"megasoftmax.{name} needs transformers: pip install 'megasoftmax[transformers]'",
                name=error.name,
            ) from error


def __dir__() -> list[str]:
    return sorted([*__all__, *_IMPORTED_WHEN_ASKED])
