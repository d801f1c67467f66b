"""What megasoftmax.softmax must compute, in float64 and without any of its code.

The gradients start from the oracle's own probabilities, rounded to the type in which the call
returns them: that is what a backward pass has in hand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Norm-wise relative error; a single element may be four times as far off.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3,
}
ELEMENTWISE = 4


def smallest_step(dtype: torch.dtype) -> float:
    """What rounding to zero may cost: kernels flush subnormals of float32, and of bfloat16 too."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=TOLERANCE.__getitem__)


@dataclass(frozen=True)
class Forward:
    probabilities: Tensor  # float64
    lse: Tensor  # float64
    excluded: Tensor  # bool, of the shape of the scores


@dataclass(frozen=True)
class Gradient:
    value: Tensor  # float64
    magnitude: Tensor  # of the terms that it is the sum of: what its error is relative to
    zero: Tensor  # bool: exactly 0 whatever the arguments hold


@dataclass(frozen=True)
class Gradients:
    scores: Gradient
    bias: Gradient | None
    sink: Gradient | None


def excluded_entries(
    scores: Tensor, mask: Tensor | None, causal: bool, window: tuple[int, int] | None
) -> Tensor:
    excluded = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if mask is not None:
        excluded |= mask
    if causal or window is not None:
        queries, keys = scores.shape[-2:]
        query = torch.arange(queries, device=scores.device)[:, None] + keys - queries
        key = torch.arange(keys, device=scores.device)
        left, right = window or (-1, -1)
        if causal:
            excluded |= key > query
        if left != -1:
            excluded |= key < query - left
        if right != -1:
            excluded |= key > query + right
    return excluded


def softmax(
    scores: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sink: Tensor | float | None = None,
) -> Forward:
    z = scores.detach().double() * scale
    if bias is not None:
        z = z + bias.detach().double()
    excluded = excluded_entries(scores, mask, causal, window)
    is_poison = (z.isnan() | (z == torch.inf)) & ~excluded
    is_nan = is_poison.any(-1)
    z = z.masked_fill(excluded | is_poison, -torch.inf)
    logit = _sink_per_row(sink, z)
    largest = torch.cat([z, logit.unsqueeze(-1)], -1).amax(-1)
    if sink is not None:
        is_nan = is_nan | logit.isnan() | (logit == torch.inf)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    weights = torch.exp(z - largest.unsqueeze(-1))
    total = weights.sum(-1) + torch.exp(logit - largest)
    probabilities = weights / total.unsqueeze(-1)
    if mask is not None or bias is not None or causal or window is not None or sink is not None:
        probabilities = probabilities.masked_fill((total == 0).unsqueeze(-1), 0.0)
    probabilities = probabilities.masked_fill(is_nan.unsqueeze(-1), torch.nan)
    probabilities = probabilities.masked_fill(excluded, 0.0)
    lse = (largest + torch.log(total)).masked_fill(is_nan, torch.nan)
    return Forward(probabilities, lse, excluded)


def gradients(
    forward: Forward,
    g: Tensor,
    h: Tensor | None = None,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    sink: Tensor | float | None = None,
    dtype: torch.dtype = torch.float64,
) -> Gradients:
    """From the gradients g of the probabilities, returned in `dtype`, and h of the lse.

    dz = p (g - D) with D = sum(g p) - h; the share exp(sink - lse) of the sink takes -D of it.
    """
    p = forward.probabilities.to(dtype).double()
    g = torch.where(p == 0, 0.0, g.double())
    h = torch.zeros_like(forward.lse) if h is None else h.double()
    d = (g * p).sum(-1) - h
    d_size = (g * p).abs().sum(-1) + h.abs()
    dz = torch.where(p == 0, 0.0, p * (g - d.unsqueeze(-1)))
    p_size = p.abs() + smallest_step(dtype) / TOLERANCE[dtype]
    dz_size = p_size * (g.abs() + d_size.unsqueeze(-1))
    dz_size = torch.where(forward.excluded, 0.0, dz_size)

    scores = Gradient(scale * dz, abs(scale) * dz_size, forward.excluded)
    of_bias = of_sink = None
    if bias is not None:
        # Terms of either sign: their errors add up as squares do.
        size = dz_size.square().sum_to_size(bias.shape).sqrt()
        seen = (~forward.excluded).double().sum_to_size(bias.shape)
        of_bias = Gradient(dz.sum_to_size(bias.shape), size, seen == 0)
    if isinstance(sink, Tensor):
        logit = _sink_per_row(sink, forward.probabilities)
        share = torch.where(logit == -torch.inf, 0.0, torch.exp(logit - forward.lse))
        of_sink = Gradient(
            _sum_per_sink(-share * d, sink),
            _sum_per_sink((share * d_size).square(), sink).sqrt(),
            torch.zeros(sink.shape, dtype=torch.bool, device=sink.device),
        )
    return Gradients(scores, of_bias, of_sink)


def assert_matches(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    magnitude: Tensor | None = None,
    zero: Tensor | None = None,
    slack: float = 1.0,
    what: str = "result",
) -> None:
    """`actual` is `expected`, float64, up to the error of `dtype`.

    Args:
        magnitude: what errors are relative to; by default the expected values.
        zero: where nothing but 0 will do; by default where 0 is expected.
        slack: a factor on the tolerance.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, expected {expected.shape}"
    # Nothing is picked out by index: that is slow on a CPU, and waits for a GPU.
    zero = expected == 0 if zero is None else zero
    assert not ((actual != 0) & zero).any(), f"{what}: not exactly 0 where it must be"
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places"
    values = actual.double()
    assert not ((values != expected) & expected.isinf()).any(), f"{what}: infinities"
    if actual.numel() == 0:
        return

    size = (expected if magnitude is None else magnitude).abs()
    size = torch.where(expected.isfinite() & size.isfinite(), size, 0.0)
    error = torch.where(expected.isfinite(), (values - expected).abs(), 0.0)
    tolerance, step = slack * TOLERANCE[dtype], slack * smallest_step(actual.dtype)
    limit = tolerance * size.norm() + step * error.numel() ** 0.5
    assert error.norm() <= limit, f"{what}: norm of the error {error.norm():.3g}, limit {limit:.3g}"
    limits = ELEMENTWISE * tolerance * size + step
    if not (error <= limits).all():
        worst = (error - limits).argmax()
        raise AssertionError(
            f"{what}: error of an element {error.reshape(-1)[worst]:.3g}, "
            f"limit {limits.reshape(-1)[worst]:.3g}, expected {expected.reshape(-1)[worst]:.6g}"
        )


def random_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(seed)
    values = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return values.to(tensor.dtype)


def check(
    function: Callable[..., Any],
    scores: Tensor,
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
        arguments: of softmax. A bias or sink that requires a gradient gets one.

    Returns:
        Probabilities, lse, and the gradients of scores, bias and sink that there are.
    """
    out = dtype or scores.dtype
    computed = torch.float64 if scores.dtype == torch.float64 else torch.float32
    call = dict(arguments)
    inputs = {"scores": scores.detach().requires_grad_()}
    for name in ("bias", "sink"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            inputs[name] = call[name] = value.detach().requires_grad_()
    p, lse = function(inputs["scores"], **call, dtype=dtype, return_lse=True)
    assert p.dtype == out
    assert lse.dtype == computed
    assert p.is_contiguous()

    expected = softmax(scores, **arguments)
    assert_matches(p, expected.probabilities, coarser(out, computed), what=f"probabilities {what}")
    no_zeros = torch.zeros_like(expected.lse, dtype=torch.bool)
    assert_matches(
        lse,
        expected.lse,
        computed,
        magnitude=expected.lse.abs() + 1,
        zero=no_zeros,
        what=f"lse {what}",
    )

    g = random_like(p, 1) if g is None else g
    h = random_like(lse, 2) if h is None and lse_gradient else h
    outputs, incoming = ((p,), (g,)) if h is None else ((p, lse), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    wanted = gradients(
        expected,
        g,
        h,
        scale=arguments.get("scale", 1.0),
        bias=inputs.get("bias"),
        sink=inputs.get("sink"),
        dtype=out,
    )
    for (name, tensor), actual in zip(inputs.items(), found, strict=True):
        assert actual is not None, f"no gradient of {name} {what}"
        assert actual.dtype == tensor.dtype
        gradient = getattr(wanted, name)
        assert_matches(
            actual,
            gradient.value,
            coarser(out, computed, tensor.dtype),
            magnitude=gradient.magnitude,
            zero=gradient.zero,
            slack=2.0,
            what=f"gradient of {name} {what}",
        )
    return p.detach(), lse.detach(), *found


def _sink_per_row(sink: Tensor | float | None, scores: Tensor) -> Tensor:
    """[..., heads, queries]; -inf, which weighs nothing, without a sink."""
    if sink is None:
        sink = -torch.inf
    if isinstance(sink, Tensor):
        logit = sink.detach().double()
        logit = logit.reshape(()) if logit.numel() == 1 else logit[:, None]
    else:
        logit = torch.tensor(float(sink), dtype=torch.float64, device=scores.device)
    return logit.expand(scores.shape[:-1])


def _sum_per_sink(rows: Tensor, sink: Tensor) -> Tensor:
    if sink.numel() == 1:
        return rows.sum().reshape(sink.shape)
    return rows.movedim(-2, 0).flatten(1).sum(1)
