"""What the layers of a model make of a tensor that they share, made once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megasoftmax


def made_once(tensor: Tensor, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns, kept on the tensor under that name while the key is the same.

    It must not refer to the tensor itself, which would then stay until Python looks for cycles.
    """
    attribute = f"_megasoftmax_{name}"
    found = getattr(tensor, attribute, None)
    if found is None or found[0] != key:
        found = key, make()
        setattr(tensor, attribute, found)
    return found[1]


def with_tiles(mask: Tensor, excluded: Callable[[Tensor], Tensor]) -> Tensor | megasoftmax.TileMask:
    """A mask as attention takes it, with one note of its tiles for all layers that share it.

    Args:
        mask: bool, as the layers get it.
        excluded: makes another tensor of it, True = excluded.

    Returns:
        A TileMask; under torch.compile and for inference tensors, which have no version, a tensor.
    """
    if torch.compiler.is_compiling() or mask.is_inference():
        return excluded(mask)
    return made_once(mask, "tiles", mask._version, lambda: megasoftmax.TileMask(excluded(mask)))
