"""Whether calls of torch are only recorded, or seen by others, so that values are out of bounds."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)  # no subclass of a tensor that has code of its own


def is_traced() -> bool:
    """Whether a compiler, torch.jit.trace, a transform of torch.func or a dispatch mode sees calls.

    Then no value is read on the host, and nothing that was computed is kept for a later call: a
    traced program would hold it as a constant.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or in_jit_trace()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def is_exporting() -> bool:
    """Whether torch.export runs. Code that torch 2.11 compiles takes torch's own for true."""
    return torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as library.load


def may_keep(device: torch.device) -> bool:
    """Whether a result on a device may serve later calls; a CUDA graph would lack what made it."""
    if is_traced():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def in_jit_trace() -> bool:
    """Whether torch.jit.trace records calls: of ops, because what it traces saves no other code."""
    return torch._C._get_tracing_state() is not None


def is_of_many_gradients(tensor: Tensor) -> bool:
    """Whether it stands for many: autograd vmaps a backward pass so with is_grads_batched."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(tensor)


def may_overwrite(*tensors: Tensor | None) -> bool:
    """Whether what is computed from tensors may be changed in place.

    That is on a CPU, where autograd records nothing, in reverse or forward mode, and no transform
    or tracer sees the changes.
    """
    if is_traced() or forward_ad._current_level >= 0:
        return False
    is_recording = torch.is_grad_enabled()
    return all(
        tensor is None
        or (
            type(tensor) in PLAIN
            and tensor.is_cpu
            and not (is_recording and tensor.requires_grad)
            and not is_of_many_gradients(tensor)
        )
        for tensor in tensors
    )


def refuses_out(tensor: Tensor) -> bool:
    """Whether no op on it may have an output argument.

    torch 2.11 loses what goes to one in compiled code, the vmap of autograd has none, and a traced
    program may be differentiated.
    """
    return is_traced() or is_of_many_gradients(tensor)
