"""What megasoftmax.attention must compute, in float64, with every tensor written out.

In half precision the measure of an error is that of torch's own attention on the same data, given
bias, mask and sink as one additive mask of the same dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
from torch import Tensor

from megasoftmax import RelativeBias, ShiftedBias, TileMask

HALVES = (torch.float16, torch.bfloat16)
RATIO = 1.5  # of the error that torch's attention makes
ELEMENTWISE = 4
ROUNDING = 0.5  # of eps, where torch's attention makes next to no error
# Hopper's backward of wide heads passes P between warps as a float16 times 4096.
WIDE, LEAST_PASSED = 128, 2.0**-37


@dataclass(frozen=True)
class Result:
    value: Tensor  # float64
    noise: Tensor  # what independent errors of 1 in each of its terms would add up to
    zero: Tensor  # bool: exactly 0 whatever the arguments hold


@dataclass(frozen=True)
class Forward:
    dense: oracle.Forward  # P, lse and what is excluded, over all pairs
    key: Tensor  # float64, a head for each of the query's
    value: Tensor
    rounding: Tensor  # what rounding P to the type of the query is relative to
    weight_noise: Tensor  # the same of all errors of P, those of z in the computation's type too
    output: Result
    lse: Result
    product_noise: Tensor  # what rounding scaled products is relative to


def bias_of_pairs(bias: Tensor | RelativeBias | None, shape: torch.Size) -> Tensor | None:
    """[..., h, m, n], float64; differentiable."""
    if bias is None:
        return None
    if isinstance(bias, RelativeBias):
        device = bias.table.device
        queries = torch.arange(shape[-2], device=device)[:, None]
        places = torch.arange(shape[-1], device=device) - queries + shape[-2] - 1
        at = (queries, places) if isinstance(bias, ShiftedBias) else (places,)
        entries = bias.table.double()[(..., *at)]
    else:
        entries = bias.double()
    return entries.expand(shape)


def mask_of_pairs(mask: TileMask, queries: int, keys: int) -> Tensor:
    """[..., queries, keys] or what broadcasts to it."""
    if mask.block == 1:
        return mask.tensor
    query, key = torch.arange(queries)[:, None], torch.arange(keys)
    return mask.tensor[..., query // mask.block, key // mask.block]


def reduced(
    gradient: Tensor, bias: Tensor | RelativeBias, of_entries: Callable[[Tensor], Tensor]
) -> Tensor:
    """What is left of [..., h, m, n] where pairs that share an entry of the bias are added up."""
    table = bias.table if isinstance(bias, RelativeBias) else bias
    leaf = torch.zeros(table.shape, dtype=torch.float64, device=table.device, requires_grad=True)
    like = replace(bias, table=leaf) if isinstance(bias, RelativeBias) else leaf
    entries = bias_of_pairs(like, gradient.shape)
    assert entries is not None
    return torch.autograd.grad(entries, leaf, of_entries(gradient))[0]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | TileMask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    visible: oracle.Visible | None = None,
    sink: Tensor | float | None = None,
) -> Forward:
    q, k, v = (each.detach().double() for each in (query, key, value))
    shared = query.shape[-3] // key.shape[-3]
    k, v = (each.repeat_interleave(shared, -3) for each in (k, v))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = q @ k.mT
    bias = bias_of_pairs(bias, scores.shape)
    if isinstance(mask, TileMask):
        mask = mask_of_pairs(mask, *scores.shape[-2:])
    limits: dict[str, Any] = {"causal": causal, "window": window, "visible": visible}
    limits |= {"softcap": softcap, "sink": sink}
    dense = oracle.softmax(scores, scale=factor, mask=mask, bias=bias, **limits)
    p = dense.probabilities
    # Of logits in the type of the computation, which is float32 for halves.
    sizes = (q.square() @ k.square().mT).sqrt()
    # Tensor cores cut off what they add up, where others round.
    if query.dtype in HALVES or (query.is_cuda and query.dtype == torch.float32):
        sizes = 2 * (sizes + scores.abs())
    noise_of_z = 1 + abs(factor) * sizes
    if softcap:
        assert dense.slope is not None
        capped = softcap * torch.tanh(factor * scores / softcap).abs()
        noise_of_z = 1 + abs(factor) * sizes * dense.slope + oracle.CAPPED * capped
    if bias is not None:
        noise_of_z = noise_of_z + bias.abs()
    noise_of_z = noise_of_z.masked_fill(dense.excluded | (p == 0), 0)
    z_noise = noise_of_z + (p * noise_of_z).sum(-1, keepdim=True)
    # P is from 0 to 1, and so is its error.
    eps = torch.finfo(query.dtype).eps
    noise_of_p = (p * z_noise * (_eps_of_z(query.dtype) / eps)).clamp_max(1 / eps)
    rounding = _size(p, query.dtype) if query.dtype in HALVES else noise_of_p
    weight_noise = torch.maximum(rounding, noise_of_p)
    if query.is_cuda and query.dtype == torch.float32:
        weight_noise = torch.maximum(weight_noise, _size(p, query.dtype))  # the smallest are 0
    weight_noise = torch.where(p == 0, 0.0, weight_noise)
    output = p @ v
    own = _size(output, query.dtype)
    noise = (weight_noise.square() @ v.square() + own.square()).sqrt()
    nothing = (p == 0).all(-1)
    zero = nothing.unsqueeze(-1).expand(output.shape) & v.isfinite().all()
    lse_noise = dense.lse.abs() + 1 + (p * noise_of_z).sum(-1)
    of_output = Result(output, noise, zero)
    of_lse = Result(dense.lse, lse_noise, torch.zeros_like(nothing))
    product_noise = abs(factor) * sizes
    return Forward(dense, k, v, rounding, weight_noise, of_output, of_lse, product_noise)


def _eps_of_z(dtype: torch.dtype) -> float:
    """Of logits for queries of `dtype`."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _size(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding them to `dtype` is relative to: the smallest numbers have a fixed step.

    GPUs take the smallest of float32 for 0.
    """
    step = oracle.smallest_step(dtype)
    if dtype != torch.float64:
        step = max(step, torch.finfo(torch.float32).tiny)
    step /= torch.finfo(dtype).eps
    return torch.where(values == 0, 0.0, (values.square() + step**2).sqrt())


def gradients(
    expected: Forward,
    query: Tensor,
    key: Tensor,
    g: Tensor,
    h: Tensor | None,
    *,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
) -> dict[str, Result]:
    """From the gradients g of the output and h of the log-sum-exp.

    Rounding errors count twice: as independent errors, and as the actual errors of the exact
    values, because rows that are alike err alike. The output has two actual errors: kernels round P
    before the product with the values, and plain torch does not.
    """
    p, k, v = expected.dense.probabilities, expected.key, expected.value
    weight_noise = expected.weight_noise
    q, g = query.detach().double(), g.double()
    of_lse = torch.zeros_like(expected.dense.lse) if h is None else h.double()
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    eps = torch.finfo(query.dtype).eps

    is_beside_torch = h is None and not softcap  # see `deviation`
    allowed = ROUNDING * eps if is_beside_torch else oracle.TOLERANCE[query.dtype]

    def rounded(exact: Tensor) -> Tensor:
        return exact.to(query.dtype).double()

    def lost(exact: Tensor, inexact: Tensor) -> Tensor:
        """In units of what is allowed."""
        if query.dtype not in HALVES:
            return torch.zeros_like(exact)
        return torch.where(inexact.isfinite(), inexact - exact, 0.0) / allowed

    output = expected.output.value
    dp = g @ v.mT
    d = (g * output).sum(-1, keepdim=True) - of_lse.unsqueeze(-1)
    d_squares = (expected.rounding * dp).square().sum(-1, keepdim=True)
    d_squares = d_squares + (g * _size(output, query.dtype)).square().sum(-1, keepdim=True)
    of_z = ((weight_noise - expected.rounding) * dp.abs()).sum(-1, keepdim=True)
    d_noise = d_squares.sqrt() + of_z + of_lse.abs().unsqueeze(-1)
    lost_of_d = tuple(
        (g * lost(output, rounded(weights @ v))).sum(-1, keepdim=True)
        for weights in (rounded(p), p)
    )
    dz = torch.where(p == 0, 0.0, p * (dp - d))
    if query.dtype in HALVES:
        passed = weight_noise
        if query.is_cuda and max(q.shape[-1], v.shape[-1]) > WIDE:
            passed = passed.clamp_min(LEAST_PASSED / eps)
        of_weights = torch.where(p == 0, 0.0, passed * (dp - d))
        dz_squares = of_weights.square() + (p * d_noise).square()
        noise = (_size(dz, query.dtype).square() + dz_squares).sqrt()
    else:
        of_dp = (g.square() @ v.square().mT).sqrt()
        noise = weight_noise * (of_dp + dp.abs() + d.abs() + d_noise)
    noise = torch.where(p == 0, 0.0, noise)
    of_logits, noise_of_logits = dz, noise  # of a bias
    if softcap:
        slope, slope_noise = expected.dense.slope, expected.dense.slope_noise
        assert slope is not None
        assert slope_noise is not None
        unit = _eps_of_z(query.dtype) / eps
        # Products of queries and keys, which slopes depend on, are rounded too.
        of_slope = unit * (slope_noise + 2 * slope * expected.product_noise / softcap)
        if query.dtype in HALVES:  # kept in float16
            of_slope = of_slope + slope * torch.finfo(torch.float16).eps / eps
        noise = (noise * slope).hypot(dz * of_slope)
        dz = dz * slope

    def by_key_head(of_head: Tensor) -> Tensor:
        heads_at = query.dim() - 3
        return of_head.unflatten(heads_at, (key.shape[-3], -1)).sum(heads_at + 1)

    def product(value: Tensor, squares: Tensor, unseen: Tensor) -> Result:
        return Result(value, (squares + value.square()).sqrt(), unseen.expand(value.shape))

    empty = (p == 0).all(-1).unsqueeze(-1)
    unseen = by_key_head((p != 0).any(-2).double()).unsqueeze(-1) == 0

    def of_heads(of_head: Tensor, squares: Tensor, unseen: Tensor) -> Result:
        """What heads that share keys and values add up, in the type of the logits."""
        unit = _eps_of_z(query.dtype) / eps
        parts = by_key_head(squares + (unit * of_head).square())
        return product(by_key_head(of_head), parts, unseen)

    shares = p if not softcap else p * expected.dense.slope
    lost_of_dz = (lost(dz, rounded(dz)), *(shares * each for each in lost_of_d))
    lost_of_logits = (lost(of_logits, rounded(of_logits)), *(p * each for each in lost_of_d))
    flushed = (torch.finfo(torch.float32).tiny / eps) ** 2  # sums, before the factor
    of_query = noise.square() @ k.square() + flushed
    of_key = noise.square().mT @ q.square() + flushed
    for each in lost_of_dz:
        of_query = of_query + (each @ k).square()
        of_key = of_key + (each.mT @ q).square()
    # Weights that GPUs take for 0 are all lost in one direction.
    lost_weights = torch.finfo(torch.float32).tiny / eps * (p != 0).to(p.dtype).mT @ g.abs()
    of_value = weight_noise.square().mT @ g.square() + (lost(p, rounded(p)).mT @ g).square()
    of_value = of_value + lost_weights.square()
    found = {
        "query": product(factor * dz @ k, factor**2 * of_query, empty),
        "key": of_heads(factor * dz.mT @ q, factor**2 * of_key, unseen),
        "value": of_heads(p.mT @ g, of_value, unseen & g.isfinite().all()),
    }
    if bias is not None:
        value = reduced(of_logits, bias, lambda x: x)
        squares = reduced(noise_of_logits, bias, torch.square)
        for of_dz in lost_of_logits:
            squares = squares + reduced(of_dz, bias, lambda x: x).square()
        if not isinstance(bias, RelativeBias) and bias.shape[-1:] in ((), (1,)):
            # The error of D is the same in a whole row: what shares an entry adds it up.
            shared = torch.zeros_like(noise)
            weights = p.sum(-1, keepdim=True)
            of_row = weights * d_noise
            if sink is not None:
                # Kernels take h less the gradient of the sink, both in float32.
                of_row = torch.maximum(weights, 1 - weights) * d_noise
                lse = expected.dense.lse.unsqueeze(-1)
                sizes = of_lse.unsqueeze(-1).abs() + (1 + lse.abs()) * d.abs()
                unit = min(torch.finfo(torch.float32).eps / eps, 1.0)
                of_row = of_row + unit * torch.where(lse.isfinite(), sizes, 0.0)
            shared[..., :1] = of_row[..., : shared.shape[-1]]
            squares = squares + reduced(shared, bias, torch.square)
        seen = reduced((p != 0).double(), bias, lambda x: x)
        found["bias"] = product(value, squares, seen == 0)
    if isinstance(sink, Tensor):
        logit = oracle.sink_per_row(sink, p)
        share = torch.exp(logit - expected.dense.lse).masked_fill(logit == -torch.inf, 0)
        d, d_noise = d.squeeze(-1), d_noise.squeeze(-1)
        share_noise = share * (_eps_of_z(query.dtype) / eps * expected.lse.noise).clamp(1, 1 / eps)
        squares = oracle.sum_per_sink((share_noise * d.abs() + share * d_noise).square(), sink)
        for each in lost_of_d:
            squares = squares + oracle.sum_per_sink(share * each.squeeze(-1), sink).square()
        value = oracle.sum_per_sink(-share * d, sink)
        nothing = torch.zeros_like(sink, dtype=torch.bool)
        found["sink"] = product(value, squares, nothing)
    return found


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    *,
    bias: Tensor | RelativeBias | None = None,
    scale: float | None = None,
    sink: Tensor | float | None = None,
    excluded: Tensor,
) -> dict[str, Tensor]:
    """Output and gradients of torch's attention, in the dtype of the query.

    A sink is a key and a value of zeros, with the sink for a bias. Where the dtype of the query
    does not hold bias or sink, whose rounding would be another problem, torch computes in float32.
    """
    z = torch.zeros(excluded.shape, dtype=torch.float64, device=query.device)
    if bias is not None:
        entries = bias_of_pairs(bias, excluded.shape)
        assert entries is not None
        z = entries.detach()
    z = z.masked_fill(excluded, -torch.inf)
    padding = (0, 0)
    if sink is not None:
        logit = torch.as_tensor(sink, dtype=torch.float64, device=query.device).detach()
        logit = logit.reshape(-1, 1, 1).expand(*z.shape[:-1], 1)
        z, padding = torch.cat([z, logit], -1), (0, 0, 0, 1)
    is_held = ((z.to(query.dtype) == z) | z.isnan()).all()
    dtype = query.dtype if is_held else torch.float32
    z = z.to(dtype).requires_grad_()
    # Not as they lie: torch's kernels refuse some strides, and fail at others.
    q, k, v, g = (
        each.detach().clone(memory_format=torch.contiguous_format).to(dtype)
        for each in (query, key, value, g)
    )
    for each in (q, k, v):
        each.requires_grad_()
    shared = query.shape[-3] // key.shape[-3]
    repeated = (each.repeat_interleave(shared, -3) for each in (k, v))
    padded = (torch.nn.functional.pad(each, padding) for each in repeated)
    one_batch = (each.reshape(-1, *each.shape[-3:]) for each in (q, *padded, z))
    output = torch.nn.functional.scaled_dot_product_attention(*one_batch, scale=scale)
    output = output.reshape(g.shape)
    d_query, d_key, d_value, dz = torch.autograd.grad(output, (q, k, v, z), g)
    found = {"output": output.detach(), "query": d_query, "key": d_key, "value": d_value}
    found = {name: each.to(query.dtype) for name, each in found.items()}
    keys = excluded.shape[-1]
    dz = dz.double().masked_fill(torch.isnan(dz), 0)
    if bias is not None:
        found["bias"] = reduced(dz[..., :keys], bias, lambda x: x)
    if isinstance(sink, Tensor):
        found["sink"] = oracle.sum_per_sink(dz[..., keys], sink)
    return found


def deviation(
    actual: Tensor, expected: Result, dtype: torch.dtype, of_torch: Tensor | None = None
) -> oracle.Deviation:
    """How far `actual` is from `expected`, in units of the allowed error.

    Args:
        dtype: the type whose error is allowed.
        of_torch: what torch's attention finds. Then RATIO times its error is allowed, or what
            computing z in float32 and rounding P, dz and the output once to `dtype` costs.
    """
    if message := oracle.wrong_kind(actual, expected.value, expected.zero):
        return oracle.Deviation(torch.inf, message)
    if actual.numel() == 0:
        return oracle.Deviation(0.0, "no elements")
    wanted = expected.value

    def error_of(found: Tensor) -> Tensor:
        return torch.where(wanted.isfinite() & found.isfinite(), (found - wanted).abs(), 0.0)

    values = actual.double()
    error = torch.where(wanted.isfinite(), (values - wanted).abs(), 0.0)
    noise = torch.where(wanted.isfinite() & expected.noise.isfinite(), expected.noise, 0.0)
    step = oracle.smallest_step(actual.dtype)
    if of_torch is None:
        tolerance = oracle.TOLERANCE[dtype]
        limit, limits = tolerance * noise.norm(), ELEMENTWISE * tolerance * noise
    else:
        eps = torch.finfo(dtype).eps
        error_of_torch = error_of(of_torch.double())
        rounding = ROUNDING * (2 if error.numel() == 1 else 1)  # of one number torch's may be small
        limit = torch.maximum(RATIO * error_of_torch.norm(), rounding * eps * noise.norm())
        limits = ELEMENTWISE * torch.maximum(error_of_torch.max(), eps * noise)
    limit = limit + step * error.numel() ** 0.5
    return oracle.largest_ratio(error, limit, limits + step, wanted)


def compare(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor | None = None,
    h: Tensor | None = None,
    lse_gradient: bool | None = None,
    **arguments: Any,
) -> tuple[dict[str, Tensor], dict[str, oracle.Deviation]]:
    """Forward and backward of `function` beside the oracle.

    Args:
        g, h: gradients of output and lse; by default random, h with `lse_gradient`, which is True
            except in half precision: torch has none, so that gradients are held to a tolerance.
        arguments: of attention. A bias, table or sink that requires a gradient gets one.

    Returns:
        Output, lse, and the gradients that there are, by name; and how far each is from the
        oracle.
    """
    is_half = query.dtype in HALVES
    computed = torch.float64 if query.dtype == torch.float64 else torch.float32
    inputs = {"query": query, "key": key, "value": value}
    inputs = {name: each.detach().requires_grad_() for name, each in inputs.items()}
    call = dict(arguments)
    bias, sink = arguments.get("bias"), arguments.get("sink")
    table = bias.table if isinstance(bias, RelativeBias) else bias
    if table is not None and table.requires_grad:
        leaf = inputs["bias"] = table.detach().requires_grad_()
        call["bias"] = replace(bias, table=leaf) if isinstance(bias, RelativeBias) else leaf
    if isinstance(sink, Tensor) and sink.requires_grad:
        inputs["sink"] = call["sink"] = sink.detach().requires_grad_()
    states = (inputs[name] for name in ("query", "key", "value"))
    output, lse = function(*states, **call, return_lse=True)
    assert output.dtype == query.dtype
    assert lse.dtype == computed
    assert output.transpose(-3, -2).is_contiguous()
    assert lse.is_contiguous()

    expected = attention(query, key, value, **arguments)
    g = oracle.random_like(output, 1) if g is None else g
    lse_gradient = not is_half if lse_gradient is None else lse_gradient
    h = oracle.random_like(lse, 2) if h is None and lse_gradient else h
    options = {name: arguments.get(name) for name in ("bias", "scale", "sink")}
    softcap = arguments.get("softcap")
    of_torch: dict[str, Tensor] = {}
    if is_half and not softcap:  # torch has none
        excluded = expected.dense.excluded
        of_torch = torch_attention(query, key, value, g, **options, excluded=excluded)
        if h is not None:
            of_torch = {"output": of_torch["output"]}
    deviations = {
        "output": deviation(output.detach(), expected.output, query.dtype, of_torch.get("output")),
        "lse": deviation(lse.detach(), expected.lse, computed),
    }

    outputs, incoming = ((output,), (g,)) if h is None else ((output, lse), (g, h))
    found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    wanted = gradients(expected, query, key, g, h, **options, softcap=softcap)
    for (name, tensor), actual in zip(inputs.items(), found, strict=True):
        assert actual is not None, f"no gradient of {name}"
        assert actual.dtype == tensor.dtype
        dtype = oracle.coarser(query.dtype, tensor.dtype)
        found_by_torch = of_torch.get(name)
        deviations[f"gradient of {name}"] = deviation(actual, wanted[name], dtype, found_by_torch)
    results = {"output": output.detach(), "lse": lse.detach()}
    return results | dict(zip(inputs, found, strict=True)), deviations


check = oracle.checking(compare)
