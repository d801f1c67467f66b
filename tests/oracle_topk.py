"""What megasoftmax.softmax_topk must compute, in float64 and without any of its code.

Everything is on the CPU, where a stable sort is one. The gradients start from the oracle's own
probabilities; the K that the call returns are rounded to the type in which it returns them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
from torch import Tensor


@dataclass(frozen=True)
class Expected:
    dense: oracle.Forward  # over all V
    z: Tensor  # float64, what is excluded included
    indices: Tensor
    probabilities: Tensor  # float64, of the selected
    noise: Tensor  # their relative errors, as of oracle.Forward


def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    renormalize: bool = False,
    found: Tensor | None = None,
) -> Expected:
    """What a call must return.

    Args:
        found: probabilities of a call. They tell on which side of a limit an entry is that lies as
            close to it as rounding.
    """
    logits, mask, bias = (None if t is None else t.detach().cpu() for t in (logits, mask, bias))
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    factor = of_logits(scale, computed)
    dense = oracle.softmax(logits, scale=factor, softcap=softcap, mask=mask, bias=bias)
    z = logits.double() * factor
    rank = logits.double() * (-1 if not isinstance(scale, Tensor) and scale < 0 else 1)
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    if bias is not None or softcap:
        z = z if bias is None else z + bias.double()
        rank = z.to(computed).double()
    elif not isinstance(scale, Tensor) and scale == 0:
        rank = z
    rank = rank.masked_fill(dense.excluded, -torch.inf)
    indices = rank.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    p, noise = (each.gather(-1, indices) for each in (dense.probabilities, dense.noise))
    if any(limit is not None for limit in (top_k, top_p, min_p)):
        p = limited(p, top_k, top_p, min_p, found)
        if renormalize:
            p = p / p.sum(-1, keepdim=True).masked_fill(p.sum(-1, keepdim=True) == 0, 1)
            noise = noise.amax(-1, keepdim=True).expand(p.shape) if k else noise
    elif renormalize:
        selected = z.gather(-1, indices)
        p = oracle.softmax(
            selected,
            mask=None if mask is None else dense.excluded.gather(-1, indices),
            bias=None if bias is None else torch.zeros_like(selected),
        ).probabilities
        # Of the whole row, where a weighted sum of errors may be smaller: here its largest.
        noise = noise.amax(-1, keepdim=True).expand(p.shape) if k else noise
    return Expected(dense, z, indices, p, noise)


def of_logits(scale: float | Tensor, computed: torch.dtype) -> Any:
    """As float64, of each row [..., 1] or of all; rounded to the type in which z is computed."""
    if isinstance(scale, Tensor):
        return scale.detach().cpu().to(computed).double().unsqueeze(-1)
    return torch.tensor(scale, dtype=computed).double()


def limited(p: Tensor, top_k: Any, top_p: Any, min_p: Any, found: Tensor | None) -> Tensor:
    """The probabilities [..., K] within the limits, 0 beyond them, row by row.

    Raises:
        AssertionError: rounding decides about an entry, and nothing was found.
    """

    def of_rows(limit: Any, none: float) -> list[float]:
        limit = none if limit is None else limit
        limit = limit.detach().cpu() if isinstance(limit, Tensor) else torch.tensor(limit)
        return limit.expand(p.shape[:-1]).reshape(-1).tolist()

    rows = p.reshape(-1, p.shape[-1]).clone()
    limits = of_rows(top_k, 0), of_rows(top_p, 1.0), of_rows(min_p, 0.0)
    found = found if found is None else found.detach().cpu().reshape(rows.shape)
    for number_of_row, (count, nucleus, part) in enumerate(zip(*limits, strict=True)):
        row = rows[number_of_row]
        numbers = row.tolist()
        if not numbers or numbers[0] != numbers[0] or numbers[0] == 0:
            continue
        has_top_k = 1 <= count <= len(numbers)
        whole = sum(numbers[: int(count)]) if has_top_k else 1.0
        before = 0.0
        for i, number in enumerate(numbers):
            is_kept = not has_top_k or i < count
            if i > 0 and is_kept:
                ends = (before, nucleus * whole), (number, part * numbers[0])
                is_kept = (before < nucleus * whole or nucleus >= 1) and number >= part * numbers[0]
                is_close = number > 0 and any(
                    limit not in (0.0, whole) and abs(at - limit) <= 1e-5 * limit
                    for at, limit in ends
                )
                if is_close:
                    assert found is not None, "rounding decides about an entry"
                    is_kept = found[number_of_row, i].item() != 0
            if not is_kept:
                row[i:] = 0.0
                break
            before += number
    return rows.view(p.shape)


def gradient_of_z(
    expected: Expected,
    g: Tensor,
    h: Tensor | None,
    *,
    renormalize: bool = False,
    dtype: torch.dtype = torch.float64,
) -> oracle.Gradient:
    """From the gradients g of the K probabilities, returned in `dtype`, and h of the lse."""
    p, selected = expected.dense.probabilities, expected.probabilities.to(dtype).double()
    g = torch.where(selected == 0, 0.0, g.double())
    has_lse_gradient = h is not None
    h = torch.zeros_like(expected.dense.lse) if h is None else h.double()
    d = (g * selected).sum(-1, keepdim=True)
    p_size = oracle.enlarged(p, expected.dense.noise, dtype)
    selected_size = oracle.enlarged(selected, expected.noise, dtype)
    least_d_size = (g * selected).abs().sum(-1, keepdim=True)
    d_size = (g * selected_size).abs().sum(-1, keepdim=True)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros_like(p).scatter(-1, expected.indices, values)

    h = h.unsqueeze(-1)
    step = oracle.smallest_step(dtype) / oracle.TOLERANCE[dtype]
    if renormalize:
        dz = spread(torch.where(selected == 0, 0.0, selected * (g - d)))
        of_selected = torch.maximum(
            (selected_size + step) * (g.abs() + least_d_size),
            (selected + step) * (g.abs() + d_size),
        )
        size = spread(of_selected)
        if has_lse_gradient:  # else nothing reaches what is not selected, in a NaN row neither
            dz = dz + torch.where(p == 0, 0.0, p * h)
            size = size + (p_size + step) * h.abs()
    else:
        dz = torch.where(p == 0, 0.0, p * (spread(g) + h - d))
        incoming = spread(g.abs()) + h.abs()
        size = torch.maximum(
            (p_size + step) * (incoming + least_d_size), (p + step) * (incoming + d_size)
        )
    excluded = expected.dense.excluded
    return oracle.Gradient(dz, torch.where(excluded, 0.0, size), excluded)


def compare(
    function: Callable[..., Any],
    logits: Tensor,
    k: int,
    *,
    dtype: torch.dtype | None = None,
    g: Tensor | None = None,
    h: Tensor | None = None,
    lse_gradient: bool = True,
    **arguments: Any,
) -> tuple[tuple[Tensor, ...], dict[str, oracle.Deviation]]:
    """Forward and backward of `function` beside the oracle.

    Args:
        g, h: gradients of probabilities and lse; by default random, h only with `lse_gradient`.
        arguments: of softmax_topk. A bias that requires a gradient gets one.

    Returns:
        Probabilities, indices, lse, and the gradients of logits and bias that there are; and how
        far each of them, by name, is from the oracle.
    """
    out = dtype or logits.dtype
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    renormalize, scale = arguments.get("renormalize", False), arguments.get("scale", 1.0)
    scale = of_logits(scale, computed) if isinstance(scale, Tensor) else scale
    inputs = {"logits": logits.detach().requires_grad_()}
    bias = arguments.get("bias")
    if bias is not None and bias.requires_grad:
        inputs["bias"] = arguments["bias"] = bias.detach().requires_grad_()
    p, indices, lse = function(inputs["logits"], k, **arguments, dtype=dtype, return_lse=True)
    assert p.dtype == out
    assert indices.dtype == torch.int64
    assert lse.dtype == computed
    assert p.is_contiguous()
    assert indices.is_contiguous()
    assert lse.is_contiguous()
    assert not indices.requires_grad

    expected = softmax_topk(logits, k, **arguments, found=p)
    assert indices.shape == expected.indices.shape
    if arguments.get("softcap"):
        expected = _in_order_of(indices.cpu(), expected, computed)
    wide = oracle.coarser(out, computed)
    deviations = {
        "indices": _deviation_of_indices(indices.cpu(), expected.indices),
        "probabilities": oracle.deviation(
            p.detach().cpu(),
            expected.probabilities,
            wide,
            magnitude=oracle.enlarged(expected.probabilities, expected.noise, wide),
        ),
        "lse": oracle.deviation(
            lse.detach().cpu(),
            expected.dense.lse,
            computed,
            magnitude=oracle.size_of_lse(expected.dense, computed),
            zero=torch.zeros_like(expected.dense.lse, dtype=torch.bool),
        ),
    }

    g = oracle.random_like(p, 1) if g is None else g
    h = oracle.random_like(lse, 2) if h is None and lse_gradient else h
    outputs, incoming = ((p,), (g,)) if h is None else ((p, lse), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    dz = gradient_of_z(
        expected, g.cpu(), None if h is None else h.cpu(), renormalize=renormalize, dtype=out
    )
    wanted = {"logits": oracle.of_scores(expected.dense, dz, scale, out)}
    if bias is not None:
        wanted["bias"] = oracle.summed(dz, bias.shape)
    for (name, tensor), actual in zip(inputs.items(), found, strict=True):
        assert actual is not None, f"no gradient of {name}"
        assert actual.dtype == tensor.dtype
        deviations[f"gradient of {name}"] = oracle.deviation(
            actual.cpu(),
            wanted[name].value,
            oracle.coarser(out, computed, tensor.dtype),
            magnitude=wanted[name].magnitude,
            zero=wanted[name].zero,
            slack=2.0,
        )
    return (p.detach(), indices, lse.detach(), *found), deviations


check = oracle.checking(compare)


def _in_order_of(actual: Tensor, expected: Expected, computed: torch.dtype) -> Expected:
    """With these indices where they are others, and z is the same up to rounding the softcap."""
    if actual.numel() == 0 or actual.sort(-1).values.diff().eq(0).any():
        return expected
    z = expected.z.masked_fill(expected.dense.excluded, -torch.inf)
    found, wanted = z.gather(-1, actual), z.gather(-1, expected.indices)
    error = oracle.CAPPED * torch.finfo(computed).eps
    are_close = torch.isclose(found, wanted, rtol=2 * error, atol=0, equal_nan=True)
    # Their probabilities are the same up to this error, too.
    return replace(
        expected,
        indices=torch.where(are_close.all(-1, keepdim=True), actual, expected.indices),
    )


def _deviation_of_indices(actual: Tensor, expected: Tensor) -> oracle.Deviation:
    wrong = (actual != expected).nonzero()
    if len(wrong) == 0:
        return oracle.Deviation(0.0, "as expected")
    first = tuple(wrong[0].tolist())
    return oracle.Deviation(
        torch.inf,
        f"{len(wrong)} of {actual.numel()} are wrong, the first at {list(first)}: "
        f"{actual[first]}, expected {expected[first]}",
    )
