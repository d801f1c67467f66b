"""What megasoftmax.softmax_topk must compute, in float64 and without any of its code.

Everything is on the CPU, where a stable sort is one. The gradients start from the oracle's own
probabilities; the K that the call returns are rounded to the type in which it returns them.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    renormalize: bool = False,
) -> Expected:
    logits, mask, bias = (None if t is None else t.detach().cpu() for t in (logits, mask, bias))
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    dense = oracle.softmax(logits, scale=scale, mask=mask, bias=bias)
    factor = torch.tensor(scale, dtype=computed).double()
    z = logits.double() * factor
    rank = logits.double() * (-1 if scale < 0 else 1)
    if bias is not None:
        z = z + bias.double()
        rank = z.to(computed).double()
    elif scale == 0:
        rank = z
    rank = rank.masked_fill(dense.excluded, -torch.inf)
    indices = rank.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    p = dense.probabilities.gather(-1, indices)
    if renormalize:
        selected = z.gather(-1, indices)
        p = oracle.softmax(
            selected,
            mask=None if mask is None else dense.excluded.gather(-1, indices),
            bias=None if bias is None else torch.zeros_like(selected),
        ).probabilities
    return Expected(dense, z, indices, p)


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
    h = torch.zeros_like(expected.dense.lse) if h is None else h.double()
    d = (g * selected).sum(-1, keepdim=True)
    d_size = (g * selected).abs().sum(-1, keepdim=True)

    def spread(values: Tensor) -> Tensor:
        return torch.zeros_like(p).scatter(-1, expected.indices, values)

    h = h.unsqueeze(-1)
    step = oracle.smallest_step(dtype) / oracle.TOLERANCE[dtype]
    if renormalize:
        of_selected = torch.where(selected == 0, 0.0, selected * (g - d))
        dz = spread(of_selected) + torch.where(p == 0, 0.0, p * h)
        size = spread((selected.abs() + step) * (g.abs() + d_size)) + (p + step) * h.abs()
    else:
        dz = torch.where(p == 0, 0.0, p * (spread(g) + h - d))
        size = (p + step) * (spread(g.abs()) + h.abs() + d_size)
    excluded = expected.dense.excluded
    return oracle.Gradient(dz, torch.where(excluded, 0.0, size), excluded)


def check(
    function: Callable[..., Any],
    logits: Tensor,
    k: int,
    *,
    dtype: torch.dtype | None = None,
    g: Tensor | None = None,
    h: Tensor | None = None,
    lse_gradient: bool = True,
    what: str = "",
    **arguments: Any,
) -> tuple[Tensor, ...]:
    """Forward and backward of `function` against the oracle.

    Args:
        g, h: gradients of probabilities and lse; by default random, h only with `lse_gradient`.
        arguments: of softmax_topk. A bias that requires a gradient gets one.

    Returns:
        Probabilities, indices, lse, and the gradients of logits and bias that there are.
    """
    out = dtype or logits.dtype
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    renormalize, scale = arguments.get("renormalize", False), arguments.get("scale", 1.0)
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

    expected = softmax_topk(logits, k, **arguments)
    assert indices.shape == expected.indices.shape
    wrong = (indices.cpu() != expected.indices).nonzero()
    assert wrong.numel() == 0, (
        f"indices {what}: {len(wrong)} of {indices.numel()} are wrong, the first at "
        f"{wrong[0].tolist()}: {indices[tuple(wrong[0])]}, "
        f"expected {expected.indices[tuple(wrong[0])]}"
    )
    oracle.assert_matches(
        p.detach().cpu(),
        expected.probabilities,
        oracle.coarser(out, computed),
        what=f"probabilities {what}",
    )
    oracle.assert_matches(
        lse.detach().cpu(),
        expected.dense.lse,
        computed,
        magnitude=expected.dense.lse.abs() + 1,
        zero=torch.zeros_like(expected.dense.lse, dtype=torch.bool),
        what=f"lse {what}",
    )

    g = oracle.random_like(p, 1) if g is None else g
    h = oracle.random_like(lse, 2) if h is None and lse_gradient else h
    outputs, incoming = ((p,), (g,)) if h is None else ((p, lse), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    dz = gradient_of_z(
        expected, g.cpu(), None if h is None else h.cpu(), renormalize=renormalize, dtype=out
    )
    wanted = {"logits": oracle.Gradient(scale * dz.value, abs(scale) * dz.magnitude, dz.zero)}
    if bias is not None:
        # Terms of either sign: their errors add up as squares do.
        size = dz.magnitude.square().sum_to_size(bias.shape).sqrt()
        seen = (~dz.zero).double().sum_to_size(bias.shape)
        wanted["bias"] = oracle.Gradient(dz.value.sum_to_size(bias.shape), size, seen == 0)
    for (name, tensor), actual in zip(inputs.items(), found, strict=True):
        assert actual is not None, f"no gradient of {name} {what}"
        assert actual.dtype == tensor.dtype
        oracle.assert_matches(
            actual.cpu(),
            wanted[name].value,
            oracle.coarser(out, computed, tensor.dtype),
            magnitude=wanted[name].magnitude,
            zero=wanted[name].zero,
            slack=2.0,
            what=f"gradient of {name} {what}",
        )
    return p.detach(), indices, lse.detach(), *found
