"""The CUDA extensions that Megatron's fused softmax imports by name, as megasoftmax kernels.

    from megasoftmax.integrations.megatron_extensions import install_extension_modules

    installed = install_extension_modules()  # until installed.undo(), or as a context manager

`FusedScaleMaskSoftmax` of an unmodified Megatron fuses where it can import the extensions that apex
brings: scaled_upper_triang_masked_softmax_cuda, scaled_masked_softmax_cuda and scaled_softmax_cuda.
With these modules it can, without apex. Its conditions stay the same: half precision, 17 to 4096
keys, sizes that are multiples of 4, no learnable offset. It also still forgets a window when it
fuses. `megasoftmax.integrations.megatron` does more. This file imports nothing of Megatron, so
forks can use it.

Unlike apex's extensions, they do not overwrite incoming gradients, and they take any number of rows
and keys.
"""

import sys
from types import ModuleType
from typing import Any

from torch import Tensor

from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.integrations.replacing import Change, Replaced
from megasoftmax.modules import (
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
)


def install_extension_modules() -> Replaced:
    """Put the three modules into `sys.modules`, in front of any that could be imported.

    Returns:
        What takes those out again that this call has put in.
    """
    return Replaced([Change(sys.modules, name, module) for name, module in MODULES.items()])


# Megatron passes the scale as a tensor of one element, on the CPU.


def _forward(inputs: Tensor, scale: Tensor | float) -> Tensor:
    """Probabilities of scores [..., queries, keys]."""
    return ScaledSoftmax.apply(inputs, float(scale))


def _masked_forward(inputs: Tensor, mask: Tensor, scale: Tensor | float) -> Tensor:
    """Probabilities of scores [batch, heads, queries, keys].

    The mask broadcasts, bool or uint8, 1 = excluded.
    """
    return ScaledMaskedSoftmax.apply(inputs, mask.bool(), float(scale))


def _causal_forward(inputs: Tensor, scale: Tensor | float) -> Tensor:
    """Probabilities of scores [batch * heads, queries, keys], with causality."""
    return ScaledUpperTriangMaskedSoftmax.apply(inputs, float(scale))


def _backward(output_grads: Tensor, softmax_results: Tensor, scale: Tensor | float) -> Tensor:
    """The gradient of the scores, in a tensor of its own."""
    return softmax_backward(output_grads, softmax_results, scale=float(scale))


def _causal_backward(
    output_grads: Tensor, softmax_results: Tensor, scale: Tensor | float
) -> Tensor:
    """The gradient of the scores, without reading keys after a query."""
    return softmax_backward(output_grads, softmax_results, scale=float(scale), causal=True)


def _module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name, f"{name} by megasoftmax.")
    vars(module).update(functions)
    return module


MODULES = {
    module.__name__: module
    for module in (
        _module(
            "scaled_upper_triang_masked_softmax_cuda",
            forward=_causal_forward,
            backward=_causal_backward,
        ),
        _module(
            "scaled_masked_softmax_cuda",
            forward=_masked_forward,
            backward=_backward,
            get_batch_per_block=FusedScaleMaskSoftmax.get_batch_per_block,
        ),
        _module("scaled_softmax_cuda", forward=_forward, backward=_backward),
    )
}
