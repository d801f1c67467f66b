"""Why a call would not run fused."""

from typing import Any, cast

import torch

from megasoftmax import checks
from megasoftmax.dispatch import Reason, Reasons
from megasoftmax.functions.attention import (
    attention,
    attention_reasons,
    attention_varlen,
    varlen_reasons,
)
from megasoftmax.functions.sdpa import scaled_dot_product_attention, sdpa_reasons
from megasoftmax.functions.softmax import softmax, softmax_reasons
from megasoftmax.functions.topk import sample, sample_reasons, softmax_topk, topk_reasons


def why_not_fused(function: Any, *args: Any, **kwargs: Any) -> Reasons:
    """Why `function(*args, **kwargs)` would not run fused.

    Args:
        function: `megasoftmax.softmax`, `megasoftmax.softmax_topk`, `megasoftmax.sample`,
            `megasoftmax.attention`, `megasoftmax.attention_varlen`,
            `megasoftmax.scaled_dot_product_attention`, or a module of this package.
        args, kwargs: what it would be called with; `fused` makes no difference.

    Returns:
        Every reason, not only the first; empty when the call would run fused. A tuple with an
        attribute `runs`: "fused", or "SDPA" where torch's scaled_dot_product_attention computes a
        call of `attention` that does not run fused, or "reference", which is plain torch. Its
        attribute `against_sdpa` has the reasons against "SDPA". Its attribute `copies` names the
        tensors of `attention` that are copied because their leading dimensions do not merge.

    Raises:
        TypeError, ValueError: as the call would.
    """
    if function is softmax:
        return _without_sdpa("softmax", softmax_reasons(*args, **kwargs))
    if function is softmax_topk:
        return _without_sdpa("softmax_topk", topk_reasons(*args, **kwargs))
    if function is sample:
        return _without_sdpa("sample", sample_reasons(*args, **kwargs))
    if function is attention:
        return attention_reasons(*args, **kwargs)
    if function is attention_varlen:
        return varlen_reasons(*args, **kwargs)
    if function is scaled_dot_product_attention:
        return sdpa_reasons(*args, **kwargs)
    if hasattr(function, "why_not_fused"):
        found = function.why_not_fused(*args, **kwargs)
        is_complete = isinstance(found, Reasons)
        return found if is_complete else _without_sdpa(type(function).__name__, found)
    raise TypeError(
        "function: expected megasoftmax.softmax, megasoftmax.softmax_topk, megasoftmax.sample, "
        "megasoftmax.attention, megasoftmax.attention_varlen, "
        "megasoftmax.scaled_dot_product_attention or a module of "
        f"megasoftmax, got {checks.kind(function)}"
    )


def _without_sdpa(function: str, reasons: tuple[Reason, ...]) -> Reasons:
    if torch.compiler.is_compiling():  # which traces no class of tuples
        return cast(Reasons, reasons)
    return Reasons(reasons, (Reason("function", function, "attention"),))
