"""What softmax_topk and sample must compute, in float64 and without any of their code.

Everything is on the CPU, where a stable sort is one. The gradients start from the oracle's own
probabilities; the K that the call returns are rounded to the type in which it returns them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from torch import Tensor

from megasoftmax.check.choices import distances_of_drawn, in_order


@dataclass(frozen=True)
class Expected:
    dense: oracle.Forward  # over all V
    z: Tensor  # float64, what is excluded included
    indices: Tensor
    probabilities: Tensor  # float64, of the selected
    noise: Tensor  # their relative errors, as of oracle.Forward
    # Of sigmoids: 1 less that of the selected, and its relative error.
    rest: Tensor | None = None
    rest_noise: Tensor | None = None


def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    score: str = "softmax",
    selection_bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    renormalize: bool = False,
    found: tuple[Tensor, Tensor] | None = None,
) -> Expected:
    """What a call must return.

    Args:
        found: probabilities and indices of a call. They tell on which side of a limit an entry is
            that lies as close to it as rounding, and in which order entries are that differ by the
            rounding of a softcap, or of a score beside a selection bias.
    """
    logits, mask, bias = (None if t is None else t.detach().cpu() for t in (logits, mask, bias))
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    eps = torch.finfo(computed).eps
    factor = of_logits(scale, computed)
    dense = oracle.softmax(logits, scale=factor, softcap=softcap, mask=mask, bias=bias)
    z = logits.double() * factor
    rank = logits.double() * (-1 if not isinstance(scale, Tensor) and scale < 0 else 1)
    terms, errors = z.abs(), None  # of z and rank
    if softcap:
        z = softcap * torch.tanh(z / softcap)
        terms = oracle.CAPPED * z.abs()
        errors = eps * terms
    if bias is not None or softcap:
        z, terms = (z, terms) if bias is None else (z + bias.double(), terms + bias.double().abs())
        rank = z if softcap else z.to(computed).double()
    elif not isinstance(scale, Tensor) and scale == 0:
        rank = z
    sigmoid, rest = (torch.sigmoid(each).masked_fill(dense.excluded, 0) for each in (z, -z))
    if selection_bias is not None:
        scores, noise = dense.probabilities, dense.noise
        if score == "sigmoid":
            scores, noise = sigmoid, eps * rest * terms
        rank = (scores + selection_bias.cpu()).masked_fill(z == -torch.inf, -torch.inf)
        errors = scores * (noise + oracle.CAPPED * eps) + torch.finfo(computed).tiny
    rank = rank.masked_fill(dense.excluded, -torch.inf)
    ordered = rank if errors is None else rank.to(computed)
    indices = ordered.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    if found is not None and errors is not None and found[1].shape == indices.shape:
        others = found[1].cpu()
        if not torch.equal(others, indices):
            is_right = in_order(others, rank, errors, computed)
            indices = torch.where(is_right.unsqueeze(-1), others, indices)
    excluded = dense.excluded.gather(-1, indices)
    if score == "sigmoid":
        return _of_sigmoids(dense, z, indices, sigmoid, eps * terms, renormalize)
    p, noise = (each.gather(-1, indices) for each in (dense.probabilities, dense.noise))
    if any(limit is not None for limit in (top_k, top_p, min_p)):
        p = limited(p, noise, top_k, top_p, min_p, None if found is None else found[0])
        if renormalize:
            p = p / p.sum(-1, keepdim=True).masked_fill(p.sum(-1, keepdim=True) == 0, 1)
            p = p.masked_fill(excluded, 0)
            noise = noise.amax(-1, keepdim=True).expand(p.shape) if k else noise
    elif renormalize:
        selected = z.gather(-1, indices)
        beside = {} if mask is None else {"mask": excluded}
        beside |= {} if bias is None else {"bias": torch.zeros_like(selected)}
        p = oracle.softmax(selected, **beside).probabilities
        p = p.masked_fill(dense.lse.isnan().unsqueeze(-1) & ~excluded, torch.nan)
        # Of the whole row, where a weighted sum of errors may be smaller: here its largest.
        noise = noise.amax(-1, keepdim=True).expand(p.shape) if k else noise
    return Expected(dense, z, indices, p, noise)


def _of_sigmoids(
    dense: oracle.Forward,
    z: Tensor,
    indices: Tensor,
    sigmoid: Tensor,
    errors: Tensor,
    renormalize: bool,
) -> Expected:
    """Errors are those of z."""
    z, p, errors = (each.gather(-1, indices) for each in (z, sigmoid, errors.nan_to_num(0, 0)))
    rest = torch.sigmoid(-z)

    def lost(s: Tensor) -> Tensor:
        """What is smaller than the normal numbers of float32 may be 0."""
        return (torch.finfo(torch.float32).tiny / s.masked_fill(s == 0, 1)).clamp(max=1)

    noise, rest_noise = rest * errors + lost(p), p * errors + lost(rest)
    if renormalize:
        total = p.sum(-1, keepdim=True)
        excluded = dense.excluded.gather(-1, indices)
        p = (p / total.masked_fill(total == 0, 1)).masked_fill(excluded, 0)
        noise = noise + (p * noise).sum(-1, keepdim=True)
    return Expected(dense, z, indices, p, noise, rest, rest_noise)


def of_logits(scale: float | Tensor, computed: torch.dtype) -> Any:
    """As float64, of each row [..., 1] or of all; rounded to the type in which z is computed."""
    if isinstance(scale, Tensor):
        return scale.detach().cpu().to(computed).double().unsqueeze(-1)
    return torch.tensor(scale, dtype=computed).double()


def limited(
    p: Tensor, noise: Tensor, top_k: Any, top_p: Any, min_p: Any, found: Tensor | None
) -> Tensor:
    """The probabilities [..., K] within the limits, 0 beyond them, row by row.

    Args:
        noise: their relative errors.

    Raises:
        AssertionError: rounding decides about an entry, and nothing was found.
    """

    def of_rows(limit: Any, none: float) -> list[float]:
        limit = none if limit is None else limit
        limit = limit.detach().cpu() if isinstance(limit, Tensor) else torch.tensor(limit)
        return limit.expand(p.shape[:-1]).reshape(-1).tolist()

    if p.numel() == 0:
        return p
    rows = p.reshape(-1, p.shape[-1]).clone()
    limits = of_rows(top_k, 0), of_rows(top_p, 1.0), of_rows(min_p, 0.0)
    errors = noise.reshape(rows.shape).amax(-1).tolist()
    found = found if found is None else found.detach().cpu().reshape(rows.shape)
    for number_of_row, (count, nucleus, part) in enumerate(zip(*limits, strict=True)):
        row = rows[number_of_row]
        numbers = row.tolist()
        if not numbers or numbers[0] != numbers[0] or numbers[0] == 0:
            continue
        has_top_k = 1 <= count <= len(numbers)
        error = 1e-5 + errors[number_of_row]
        whole = sum(numbers[: int(count)]) if has_top_k else 1.0
        before = 0.0
        for i, number in enumerate(numbers):
            is_kept = not has_top_k or i < count
            if i > 0 and is_kept:
                ends = (before, nucleus * whole), (number, part * numbers[0])
                is_kept = (before < nucleus * whole or nucleus >= 1) and number >= part * numbers[0]
                is_close = number > 0 and any(
                    limit not in (0.0, whole) and abs(at - limit) <= error * limit
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
    if renormalize or expected.rest is not None:
        if not renormalize:
            d, least_d_size, d_size = (torch.zeros_like(d) for _ in range(3))
        of_k = torch.where(selected == 0, 0.0, selected * (g - d))
        of_selected = torch.maximum(
            (selected_size + step) * (g.abs() + least_d_size),
            (selected + step) * (g.abs() + d_size),
        )
        if expected.rest is not None and expected.rest_noise is not None:
            of_k = torch.where(selected == 0, 0.0, of_k * expected.rest)
            of_selected = of_selected * oracle.enlarged(expected.rest, expected.rest_noise, dtype)
        dz, size = spread(of_k), spread(of_selected)
        if has_lse_gradient:  # else nothing reaches what is not selected, in a NaN row neither
            dz = dz + torch.where(p == 0, 0.0, p * h)
            size = size + (p_size + step) * h.abs()
    else:
        dz = torch.where(p == 0, 0.0, p * (spread(g) + h - d))
        incoming = spread(g.abs()) + h.abs()
        of_p = (p_size + step) * (incoming + least_d_size)
        size = torch.maximum(of_p, (p + step) * (incoming + d_size))
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
        Probabilities, indices, lse but of sigmoids, and the gradients of logits and bias that
        there are; and how far each of them, by name, is from the oracle.
    """
    out = dtype or logits.dtype
    computed = torch.float64 if logits.dtype == torch.float64 else torch.float32
    renormalize, scale = arguments.get("renormalize", False), arguments.get("scale", 1.0)
    scale = of_logits(scale, computed) if isinstance(scale, Tensor) else scale
    inputs = {"logits": logits.detach().requires_grad_()}
    bias = arguments.get("bias")
    if bias is not None and bias.requires_grad:
        inputs["bias"] = arguments["bias"] = bias.detach().requires_grad_()
    has_lse = arguments.get("score", "softmax") == "softmax"
    p, indices, *lses = function(inputs["logits"], k, **arguments, dtype=dtype, return_lse=has_lse)
    assert p.dtype == out
    assert indices.dtype == torch.int64
    assert p.is_contiguous()
    assert indices.is_contiguous()
    assert not indices.requires_grad

    expected = softmax_topk(logits, k, **arguments, found=(p, indices))
    assert indices.shape == expected.indices.shape
    wide, wanted_p = oracle.coarser(out, computed), expected.probabilities
    size = oracle.enlarged(wanted_p, expected.noise, wide)
    deviations = {
        "indices": _deviation_of_indices(indices.cpu(), expected.indices),
        "probabilities": oracle.deviation(p.detach().cpu(), wanted_p, wide, magnitude=size),
    }
    for lse in lses:
        assert lse.dtype == computed
        assert lse.is_contiguous()
        deviations["lse"] = oracle.deviation_of_lse(lse.detach().cpu(), expected.dense, computed)

    g = oracle.random_like(p, 1) if g is None else g
    if h is None and lse_gradient and has_lse:
        h = oracle.random_like(lses[0], 2)
    h = h if has_lse else None
    outputs, incoming = ((p,), (g,)) if h is None else ((p, lses[0]), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    h = None if h is None else h.cpu()
    dz = gradient_of_z(expected, g.cpu(), h, renormalize=renormalize, dtype=out)
    wanted = {"logits": oracle.of_scores(expected.dense, dz, scale, out)}
    if bias is not None:
        wanted["bias"] = oracle.summed(dz, bias.shape)
    deviations |= oracle.deviations_of_gradients(inputs, found, wanted, out, computed)
    return (p.detach(), indices, *(lse.detach() for lse in lses), *found), deviations


check = oracle.checking(compare)


def compare_drawn(
    found: tuple[Tensor, Tensor, Tensor],
    numbers: Tensor,
    logits: Tensor,
    k: int,
    **arguments: Any,
) -> dict[str, oracle.Deviation]:
    """How far each result of `sample` is from the oracle.

    Args:
        found: indices, and probabilities and indices of the K entries.
        numbers: by which the rows draw.
        arguments: of sample.
    """
    drawn, p, indices = (each.cpu() for each in found)
    expected = softmax_topk(logits, k, **arguments, renormalize=True, found=(p, indices))
    wanted = expected.probabilities
    distances = distances_of_drawn(drawn, wanted, expected.indices, numbers.cpu())
    errors = oracle.TOLERANCE[p.dtype] + (wanted * expected.noise).nan_to_num(0.0).sum(-1)
    ratios = distances / errors
    worst = ratios.max().item() if ratios.numel() else 0.0
    message = f"{distances.max().item() if worst else 0:.3g} from the numbers that draw an index"
    return {
        "indices to draw from": _deviation_of_indices(indices, expected.indices),
        "probabilities to draw from": oracle.deviation(
            p, wanted, p.dtype, magnitude=oracle.enlarged(wanted, expected.noise, p.dtype)
        ),
        "drawn indices": oracle.Deviation(worst, message),
    }


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
