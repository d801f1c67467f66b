"""Biases that are masks in fact, as the models of AlphaFold's kind pass them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megasoftmax.tracing import is_traced

EXCLUDED = -3e4
"""An entry of a first bias that is at most this excludes its pair. Masks have -1e9, -inf, or the
lowest float16, -65504. A softmax that adds them gives such a pair less than exp(-2e4) of the weight
of any other pair whose logit is at most 1e4 smaller, which is 0 in every type."""


def bias_and_mask(
    biases: Sequence[Tensor | None], first_is_mask: bool | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Biases that are added, as one bias and a mask for `megasoftmax.attention`.

    Entries of the first bias that are at most `EXCLUDED` exclude their pair. If it is 0 elsewhere
    and needs no gradient, it becomes a bool mask, and a second bias is taken as it is. Otherwise
    the biases are added, which makes a tensor of the shape that they have in common.

    Args:
        biases: floating, of shapes that broadcast; the first may be bool, True = excluded. None
            stands for a bias that is not given.
        first_is_mask: whether the first bias is a mask. None: its values are read, on a CPU;
            reading those on a GPU would wait for it, so there it is added. True: it is, and what
            is neither 0 nor at most `EXCLUDED` is an error; a GPU reports it as a failed device
            assertion, without waiting. False: it is added. One that needs a gradient is added in
            any case.

    Returns:
        The bias and the mask, True = excluded; None for one that is not needed.

    Raises:
        ValueError: the first bias is no mask, and `first_is_mask` is True.
    """
    first, *others = biases or [None]
    given = [bias for bias in others if bias is not None]
    mask = None
    if first is not None and first.dtype == torch.bool:
        mask = first
    elif first is not None:
        excluded = first <= EXCLUDED
        if _is_mask(first, excluded, first_is_mask, bool(given)):
            mask = excluded
        else:
            given.insert(0, first.masked_fill(excluded, -torch.inf))
    return functools.reduce(torch.add, given) if given else None, mask


def _is_mask(
    first: Tensor, excluded: Tensor, first_is_mask: bool | None, is_to_be_added: bool
) -> bool:
    if first_is_mask is False or (first.requires_grad and torch.is_grad_enabled()):
        return False
    if first_is_mask is None:
        is_read = is_to_be_added and first.is_cpu and not is_traced()
        return is_read and not _has_others(first, excluded)
    if first.is_cpu and not is_traced():
        if _has_others(first, excluded):
            raise ValueError(
                f"biases[0]: expected a mask, of 0 and of numbers up to {EXCLUDED:.0f}, got "
                "others; pass first_is_mask=False to add them"
            )
    else:
        torch._assert_async(
            (excluded | (first == 0)).all(), "biases[0]: expected a mask; pass first_is_mask=False"
        )
    return True


def _has_others(first: Tensor, excluded: Tensor) -> bool:
    return bool(first.masked_fill(excluded, 0).any())  # NaN counts as True
