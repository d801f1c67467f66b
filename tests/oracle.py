"""What megasoftmax.softmax must compute, in float64 and without any of its code.

The gradients start from the oracle's own probabilities, rounded to the type in which the call
returns them: that is what a backward pass has in hand. With dropout it has scores and lse in hand,
and what it makes of them is not rounded here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Norm-wise relative error; a single element may be four times as far off.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ELEMENTWISE = 4
# What a capped score may err by, in units of the eps of its computation.
CAPPED = 8


def smallest_step(dtype: torch.dtype) -> float:
    """What rounding to zero may cost: kernels flush subnormals of float32, and of bfloat16 too."""
    return 2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=TOLERANCE.__getitem__)


@dataclass(frozen=True)
class Deviation:
    """How far a result is from what it must be; right when the ratio is at most 1."""

    ratio: float  # of the error to the allowed error; inf for a wrong shape, zero, NaN or infinity
    message: str


@dataclass(frozen=True)
class Forward:
    probabilities: Tensor  # float64
    lse: Tensor  # float64
    excluded: Tensor  # bool, of the shape of the scores
    noise: Tensor  # relative error of each probability that rounding z to its type may cost
    sink_noise: Tensor  # the same of the sink's share, of each row
    lse_noise: Tensor  # the same of the lse, absolute
    kept: Tensor | None = None  # float64: what dropout multiplies probabilities by
    # Of a softcap: its part of the derivative of z, and what that may err by, in units of eps.
    slope: Tensor | None = None
    slope_noise: Tensor | None = None

    def dropped(self, values: Tensor) -> Tensor:
        """0 where dropped, even of NaN."""
        return values if self.kept is None else torch.where(self.kept == 0, 0.0, values * self.kept)


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


def size_of_lse(forward: Forward, dtype: torch.dtype) -> Tensor:
    return torch.maximum(forward.lse.abs() + 1, forward.lse_noise / TOLERANCE[dtype])


Visible = tuple[Tensor | None, Tensor | None]


def excluded_entries(
    scores: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: tuple[int, int] | None,
    visible: Visible | None = None,
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
    first, end = visible or (None, None)
    keys = torch.arange(scores.shape[-1], device=scores.device)
    if first is not None:
        excluded |= keys < first.unsqueeze(-1)
    if end is not None:
        excluded |= keys >= end.unsqueeze(-1)
    return excluded


def softmax(
    scores: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    visible: Visible | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    kept: Tensor | None = None,
) -> Forward:
    """Its probabilities are those without dropout. `kept` is bool, of the shape of the scores."""
    z = scores.detach().double() * scale
    terms = z.abs()  # what a rounding of z is relative to
    slopes: tuple[Tensor, ...] = ()
    if softcap:
        t = torch.tanh(z / softcap)
        z, slope = softcap * t, (1 - t * t).nan_to_num(0.0)
        # Rounding scale * scores / softcap counts too.
        size, of_argument = t.abs().nan_to_num(0.0), torch.atanh(t).abs().nan_to_num(0.0, 0.0)
        slopes = (slope, 2 * size * (CAPPED * size + slope * of_argument))
        terms = CAPPED * z.abs()
    if bias is not None:
        z = z + bias.detach().double()
        terms = terms + bias.detach().double().abs()
    excluded = excluded_entries(scores, mask, causal, window, visible)
    is_poison = (z.isnan() | (z == torch.inf)) & ~excluded
    is_nan = is_poison.any(-1)
    z = z.masked_fill(excluded | is_poison, -torch.inf)
    logit = sink_per_row(sink, z)
    largest = torch.cat([z, logit.unsqueeze(-1)], -1).amax(-1)
    if sink is not None:
        is_nan = is_nan | logit.isnan() | (logit == torch.inf)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    weights = torch.exp(z - largest.unsqueeze(-1))
    total = weights.sum(-1) + torch.exp(logit - largest)
    probabilities = weights / total.unsqueeze(-1)
    is_limited = causal or (window is not None and max(window) >= 0)
    is_limited |= visible is not None and any(each is not None for each in visible)
    if mask is not None or bias is not None or is_limited or sink is not None:
        probabilities = probabilities.masked_fill((total == 0).unsqueeze(-1), 0.0)
    probabilities = probabilities.masked_fill(is_nan.unsqueeze(-1), torch.nan)
    probabilities = probabilities.masked_fill(excluded, 0.0)
    lse = (largest + torch.log(total)).masked_fill(is_nan, torch.nan)
    if bias is None and not softcap:  # differences of scores are scaled
        terms = (z - largest.unsqueeze(-1)).abs()
    share = torch.exp(logit - largest) / total
    eps = torch.finfo(torch.float64 if scores.dtype == torch.float64 else torch.float32).eps
    noises = _noises(probabilities, eps * terms, share, eps * (largest.abs() + logit.abs()))
    if kept is None:
        return Forward(probabilities, lse, excluded, *noises, None, *slopes)
    divisor = 1 - round(dropout * 32768) / 32768
    factors = kept.double() / divisor if divisor > 0 else torch.zeros_like(probabilities)
    return Forward(probabilities, lse, excluded, *noises, factors, *slopes)


def enlarged(size: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """What the error of a result of `dtype` is relative to, where it also has the error `noise`."""
    return size * (noise / TOLERANCE[dtype]).clamp_min(1)


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
    p, noise = forward.probabilities, forward.noise
    if forward.kept is None and forward.slope is None:
        p = p.to(dtype).double()
    else:  # made again from the lse in float32
        size = torch.where(forward.lse.isfinite(), forward.lse.abs(), 0.0)
        noise = noise + torch.finfo(torch.float32).eps * size.unsqueeze(-1)
    g = torch.where(p == 0, 0.0, forward.dropped(g.double()))
    h = torch.zeros_like(forward.lse) if h is None else h.double()
    d = (g * p).sum(-1) - h
    step = smallest_step(dtype) / TOLERANCE[dtype]
    p_size = enlarged(p, noise, dtype)
    if forward.kept is not None or forward.slope is not None:  # rounded to `dtype`
        p_size = p_size + step
    d_size = (g * p_size).abs().sum(-1) + h.abs()
    dz = torch.where(p == 0, 0.0, p * (g - d.unsqueeze(-1)))
    least_d_size = ((g * p).abs().sum(-1) + h.abs()).unsqueeze(-1)
    dz_size = torch.maximum(  # either factor has an error, and they are not multiplied
        (p_size + step) * (g.abs() + least_d_size),
        (p + step) * (g.abs() + d_size.unsqueeze(-1)),
    )
    dz_size = torch.where(forward.excluded, 0.0, dz_size)

    scores = of_scores(forward, Gradient(dz, dz_size, forward.excluded), scale, dtype)
    of_bias = of_sink = None
    if bias is not None:
        of_bias = summed(Gradient(dz, dz_size, forward.excluded), bias.shape)
    if isinstance(sink, Tensor):
        logit = sink_per_row(sink, forward.probabilities)
        share = torch.where(logit == -torch.inf, 0.0, torch.exp(logit - forward.lse))
        value = sum_per_sink(-share * d, sink)
        # GPUs take the smallest numbers of float32 for 0: the share, and its product with D.
        tiny = 0.0 if dtype == torch.float64 else torch.finfo(torch.float32).tiny
        flushed = tiny / TOLERANCE[dtype] * (1 + d_size)
        squares = (enlarged(share * d_size, forward.sink_noise, dtype) + flushed).square()
        of_sink = Gradient(
            value,
            (sum_per_sink(squares, sink) + value.square()).sqrt(),
            torch.zeros(sink.shape, dtype=torch.bool, device=sink.device),
        )
    return Gradients(scores, of_bias, of_sink)


def of_scores(forward: Forward, of_z: Gradient, scale: float, dtype: torch.dtype) -> Gradient:
    """The gradient of the scores, computed in the type for `dtype`, from that of z."""
    value, size = of_z.value, of_z.magnitude
    if forward.slope is not None and forward.slope_noise is not None:
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        noise = forward.slope_noise * (eps / TOLERANCE[dtype])
        size = size * forward.slope + value.abs() * noise
        value = value * forward.slope
    return Gradient(scale * value, abs(scale) * size, of_z.zero)


def summed(gradient: Gradient, shape: torch.Size) -> Gradient:
    """The gradient of what was broadcast from `shape`.

    Terms have either sign: their errors add up as squares do. The sum is rounded once more.
    """
    value = gradient.value.sum_to_size(shape)
    squares = gradient.magnitude.square().sum_to_size(shape)
    seen = (~gradient.zero).double().sum_to_size(shape)
    return Gradient(value, (squares + value.square()).sqrt(), seen == 0)


def deviation(
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    *,
    magnitude: Tensor | None = None,
    zero: Tensor | None = None,
    slack: float = 1.0,
) -> Deviation:
    """How far `actual` is from `expected`, float64, in units of the error allowed for `dtype`.

    Args:
        magnitude: what errors are relative to; by default the expected values.
        zero: where nothing but 0 will do; by default where 0 is expected.
        slack: a factor on the tolerance.
    """
    zero = expected == 0 if zero is None else zero
    if message := wrong_kind(actual, expected, zero):
        return Deviation(torch.inf, message)
    size = (expected if magnitude is None else magnitude).abs()
    size = torch.where(expected.isfinite() & size.isfinite(), size, 0.0)
    error = torch.where(expected.isfinite(), (actual.double() - expected).abs(), 0.0)
    tolerance, step = slack * TOLERANCE[dtype], slack * smallest_step(actual.dtype)
    limit = tolerance * size.norm() + step * error.numel() ** 0.5
    return largest_ratio(error, limit, ELEMENTWISE * tolerance * size + step, expected)


def wrong_kind(actual: Tensor, expected: Tensor, zero: Tensor) -> str | None:
    """What no tolerance allows: another shape, and zeros, NaN or infinities in other places."""
    # Nothing is picked out by index: that is slow on a CPU, and waits for a GPU.
    if actual.shape != expected.shape:
        return f"{actual.shape}, expected {expected.shape}"
    if ((actual != 0) & zero).any():
        return "not exactly 0 where it must be"
    if not torch.equal(actual.isnan(), expected.isnan()):
        return "NaN in other places"
    if ((actual.double() != expected) & expected.isinf()).any():
        return "infinities"
    return None


def largest_ratio(error: Tensor, limit: Tensor, limits: Tensor, expected: Tensor) -> Deviation:
    """Of the norm of the error to `limit`, or of one element to its own of the `limits`."""
    if error.numel() == 0:
        return Deviation(0.0, "no elements")
    norm, ratios = error.norm(), error / limits
    worst = ratios.argmax()
    of_norm, of_element = (norm / limit).item(), ratios.reshape(-1)[worst].item()
    if of_norm >= of_element:
        return Deviation(of_norm, f"norm of the error {norm:.3g}, limit {limit:.3g}")
    return Deviation(
        of_element,
        f"error of an element {error.reshape(-1)[worst]:.3g}, "
        f"limit {limits.reshape(-1)[worst]:.3g}, expected {expected.reshape(-1)[worst]:.6g}",
    )


def assert_small(found: Deviation, what: str = "result") -> None:
    assert found.ratio <= 1, f"{what}: {found.message}"


def assert_matches(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, *, what: str = "result", **options: Any
) -> None:
    """`actual` is `expected` up to the error of `dtype`; options are those of `deviation`."""
    found = deviation(actual, expected, dtype, **options)
    assert_small(found, what)


def assert_row(
    scores: Tensor, p: Tensor, lse: Tensor, g: Tensor, d_scores: Tensor, what: str, **arguments: Any
) -> None:
    """What softmax made of a row, or of a column, of a tensor that is too large for the oracle."""
    forward = softmax(scores, **arguments)
    assert_matches(p, forward.probabilities, p.dtype, what=what)
    assert_matches(lse, forward.lse, torch.float32, what=what)
    wanted = gradients(forward, g, dtype=scores.dtype).scores
    options = {"magnitude": wanted.magnitude, "zero": wanted.zero, "slack": 2.0}
    assert_matches(d_scores, wanted.value, scores.dtype, what=what, **options)


def philox(counter: tuple[int, ...], seed: int) -> list[int]:
    """Four words of 32 bits: Philox 4x32 with 7 rounds, in Python's integers."""
    most = 2**32 - 1
    c, k = list(counter), [seed & most, (seed >> 32) & most]
    for _ in range(7):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k[0], right & most, (left >> 32) ^ c[3] ^ k[1], left & most]
        k = [(k[0] + 0x9E3779B9) & most, (k[1] + 0xBB67AE85) & most]
    return c


def random_like(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(tensor.device).manual_seed(seed)
    values = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return values.to(tensor.dtype)


def compare(
    function: Callable[..., Any],
    scores: Tensor,
    *,
    dtype: torch.dtype | None = None,
    g: Tensor | None = None,
    h: Tensor | None = None,
    lse_gradient: bool = True,
    **arguments: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Deviation]]:
    """Forward and backward of `function` beside the oracle.

    Args:
        g, h: gradients of probabilities and lse; by default random, h only with `lse_gradient`.
        arguments: of softmax. A bias or sink that requires a gradient gets one. With dropout also
            `kept`, which entries the seed keeps.

    Returns:
        Probabilities, lse, and the gradients of scores, bias and sink that there are; and how far
        each of them, by name, is from the oracle.
    """
    out = dtype or scores.dtype
    computed = torch.float64 if scores.dtype == torch.float64 else torch.float32
    call = dict(arguments)
    call.pop("kept", None)
    inputs = {"scores": scores.detach().requires_grad_()}
    for name in ("bias", "sink"):
        value = arguments.get(name)
        if isinstance(value, Tensor) and value.requires_grad:
            inputs[name] = call[name] = value.detach().requires_grad_()
    p, lse = function(inputs["scores"], **call, dtype=dtype, return_lse=True)
    assert p.dtype == out
    assert lse.dtype == computed
    assert p.is_contiguous()

    known = {name: value for name, value in arguments.items() if name != "seed"}
    expected = softmax(scores, **known)
    wide = coarser(out, computed)
    size = enlarged(expected.probabilities, expected.noise, wide)
    if expected.kept is not None:  # GPUs take the smallest numbers for 0 before the factor
        size = size + torch.finfo(torch.float32).tiny / TOLERANCE[wide]
    probabilities, size = expected.dropped(expected.probabilities), expected.dropped(size)
    deviations = {
        "probabilities": deviation(p, probabilities, wide, magnitude=size),
        "lse": deviation_of_lse(lse, expected, computed),
    }

    g = random_like(p, 1) if g is None else g
    h = random_like(lse, 2) if h is None and lse_gradient else h
    outputs, incoming = ((p,), (g,)) if h is None else ((p, lse), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    learned = {name: inputs.get(name) for name in ("bias", "sink")}
    scale = arguments.get("scale", 1.0)
    wanted = gradients(expected, g, h, scale=scale, **learned, dtype=out)
    deviations |= deviations_of_gradients(inputs, found, vars(wanted), out, computed)
    return (p.detach(), lse.detach(), *found), deviations


def deviation_of_lse(lse: Tensor, expected: Forward, computed: torch.dtype) -> Deviation:
    size, nowhere = size_of_lse(expected, computed), torch.zeros_like(expected.lse).bool()
    return deviation(lse, expected.lse, computed, magnitude=size, zero=nowhere)


def deviations_of_gradients(
    inputs: dict[str, Tensor],
    found: tuple[Tensor, ...],
    wanted: dict[str, Gradient],
    *dtypes: torch.dtype,
) -> dict[str, Deviation]:
    """Of the inputs by name. The coarsest of their own type and the `dtypes` has the error."""
    deviations = {}
    for (name, tensor), actual in zip(inputs.items(), found, strict=True):
        assert actual is not None, f"no gradient of {name}"
        assert actual.dtype == tensor.dtype
        limits = {"magnitude": wanted[name].magnitude, "zero": wanted[name].zero, "slack": 2.0}
        dtype = coarser(*dtypes, tensor.dtype)
        actual = actual.to(wanted[name].value.device)
        deviations[f"gradient of {name}"] = deviation(actual, wanted[name].value, dtype, **limits)
    return deviations


def checking(compare: Callable[..., Any]) -> Callable[..., Any]:
    """A `compare` of an oracle that returns the results alone, all of which must be right."""

    def check(function: Callable[..., Any], *given: Any, what: str = "", **arguments: Any) -> Any:
        results, deviations = compare(function, *given, **arguments)
        for name, found in deviations.items():
            assert_small(found, f"{name} {what}")
        return results

    return check


check = checking(compare)


def _noises(p: Tensor, of_z: Tensor, share: Tensor, of_sink: Tensor) -> tuple[Tensor, ...]:
    """Errors of probabilities, of the sink's share and of the lse, from those of z and sink."""
    of_z = torch.where(p.isfinite() & (p != 0) & of_z.isfinite(), of_z, 0.0)
    of_sink = torch.where(share.isfinite() & (share != 0) & of_sink.isfinite(), of_sink, 0.0)
    weighted = torch.where(p.isfinite(), p * of_z, 0.0).sum(-1)
    weighted = weighted + torch.where(of_sink != 0, share * of_sink, 0.0)
    return of_z + weighted.unsqueeze(-1), of_sink + weighted, weighted


def sink_per_row(sink: Tensor | float | None, scores: Tensor) -> Tensor:
    """[..., heads, queries]; -inf, which weighs nothing, without a sink."""
    if sink is None:
        sink = -torch.inf
    if isinstance(sink, Tensor):
        logit = sink.detach().double()
        logit = logit.reshape(()) if logit.numel() == 1 else logit[:, None]
    else:
        logit = torch.tensor(float(sink), dtype=torch.float64, device=scores.device)
    return logit.expand(scores.shape[:-1])


def sum_per_sink(rows: Tensor, sink: Tensor) -> Tensor:
    if sink.numel() == 1:
        return rows.sum().reshape(sink.shape)
    return rows.movedim(-2, 0).flatten(1).sum(1)
