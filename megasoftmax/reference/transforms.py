"""What of torch the reference does without where a call is compiled or vmapped."""

import torch
from torch import Tensor


def is_of_many_gradients(tensor: Tensor) -> bool:
    """Whether it stands for many: autograd vmaps a backward pass so with is_grads_batched."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(tensor)


def refuses_out(tensor: Tensor) -> bool:
    """Whether no op on it may have an output argument.

    torch 2.11 loses what goes to one in compiled code, and the vmap of autograd has none.
    """
    return torch.compiler.is_compiling() or is_of_many_gradients(tensor)
