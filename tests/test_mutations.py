"""The comparison with the oracle notices planted faults, and the oracle agrees with autograd."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import oracle
import oracle_attention
import oracle_topk
import pytest
import torch
from torch import Tensor

import megasoftmax

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 23


def _case(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, QUERIES, KEYS)
    scores = 3 * torch.randn(shape, generator=generator)
    mask = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.3
    bias = torch.randn(1, HEADS, QUERIES, KEYS, generator=generator)
    sink = torch.randn(HEADS, generator=generator)
    case = {
        "scores": scores.to(dtype),
        "scale": 80**-0.5,
        "mask": mask,
        "bias": bias.to(dtype).requires_grad_(),
        "causal": True,
        "window": (9, 2),
        "sink": sink.requires_grad_(),
    }
    return case | changes


def _changed(function: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, with some arguments replaced by what a change makes of them."""
    names = tuple(inspect.signature(function).parameters)

    def faulty(*args: Any, **arguments: Any) -> Any:
        arguments |= dict(zip(names, args, strict=False))
        changed = {name: change(arguments.get(name)) for name, change in changes.items()}
        return function(**(arguments | changed))

    return faulty


def _softmax_changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    return _changed(megasoftmax.softmax, **changes)


def _rounded(scale: float) -> float:
    return torch.tensor(scale).bfloat16().item()


def _doubled_gradient(tensor: Tensor) -> Tensor:
    return 2 * tensor - tensor.detach()


def _top_left_causal(scores: Tensor, mask: Tensor, **arguments: Any) -> Any:
    upper = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return megasoftmax.softmax(scores, **(arguments | {"causal": False, "mask": mask | upper}))


def _nearly_zero(scores: Tensor, **arguments: Any) -> Any:
    p, lse = megasoftmax.softmax(scores, **arguments)
    return p + arguments["mask"] * 1e-30, lse


def _gradient_at_excluded(scores: Tensor, **arguments: Any) -> Any:
    p, lse = megasoftmax.softmax(scores, **arguments)
    touched = (scores * arguments["mask"]).sum(-1, keepdim=True) * 1e-30
    return p + touched - touched.detach(), lse


def _sink_missing_from_lse(scores: Tensor, sink: Tensor, **arguments: Any) -> Any:
    p, _ = megasoftmax.softmax(scores, sink=sink, **arguments)
    return p, megasoftmax.softmax(scores, **arguments)[1] + 0 * sink.sum()


def _nan_everywhere(scores: Tensor, **arguments: Any) -> Any:
    p, lse = megasoftmax.softmax(scores, **arguments)
    return torch.where(p.isnan().any(-1, keepdim=True), torch.nan, p), lse


def _case_with_nan(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = _case(dtype)
    scores = case["scores"].clone()
    scores[0, 1, 3, 12] = torch.nan
    mask = case["mask"].clone()
    mask[0, 0, 3, 12] = False
    return case | {"scores": scores, "mask": mask}


FAULTS = {
    "drops the mask": (_softmax_changed(mask=lambda _: None), _case),
    "drops the bias": (_softmax_changed(bias=lambda _: None), _case),
    "drops the scale": (_softmax_changed(scale=lambda _: 1.0), _case),
    "forgets the sink": (_softmax_changed(sink=lambda _: None), _case),
    "forgets causality": (_softmax_changed(causal=lambda _: False), _case),
    "rounds the scale to bfloat16": (_softmax_changed(scale=_rounded), _case),
    "window one too long": (_softmax_changed(window=lambda w: (w[0] + 1, w[1])), _case),
    "window one too short": (_softmax_changed(window=lambda w: (w[0] - 1, w[1])), _case),
    "causal aligned top-left": (_top_left_causal, _case),
    "causality overwrites the window": (_softmax_changed(window=lambda _: None), _case),
    "no gradient of the sink": (_softmax_changed(sink=torch.Tensor.detach), _case),
    "no gradient of the bias": (_softmax_changed(bias=torch.Tensor.detach), _case),
    "gradient of the bias doubled": (_softmax_changed(bias=_doubled_gradient), _case),
    "the sink of head 0 for all": (
        _softmax_changed(sink=lambda sink: sink[:1].expand(sink.shape)),
        _case,
    ),
    "excluded entry nearly 0": (_nearly_zero, _case),
    "gradient at an excluded entry": (_gradient_at_excluded, _case),
    "lse without the sink": (_sink_missing_from_lse, _case),
    "NaN swallowed": (
        _softmax_changed(scores=lambda scores: scores.nan_to_num(0.0)),
        _case_with_nan,
    ),
    "NaN at excluded entries": (_nan_everywhere, _case_with_nan),
}


@pytest.mark.parametrize("error", [3e-5, -3e-5])
def test_relative_error_is_noticed(error: float) -> None:
    expected = oracle.softmax(_case()["scores"]).probabilities
    oracle.assert_matches(expected.float(), expected, torch.float32)
    with pytest.raises(AssertionError, match="norm"):
        oracle.assert_matches((expected * (1 + error)).float(), expected, torch.float32)
    one = expected.clone()
    one[1, 2, 3, 4] *= 1 + error
    with pytest.raises(AssertionError, match="element"):
        oracle.assert_matches(one.float(), expected, torch.float32)


def test_oracle_agrees_with_autograd() -> None:
    case = _case(torch.float64)
    scores = case["scores"].requires_grad_()
    bias, sink = case["bias"], case["sink"].detach().double().requires_grad_()
    excluded = case["mask"].expand(scores.shape).clone()
    for i in range(QUERIES):
        for j in range(KEYS):
            query = i + KEYS - QUERIES
            if not query - 9 <= j <= query:
                excluded[..., i, j] = True
    z = (scores * case["scale"] + bias).masked_fill(excluded, -torch.inf)
    column = sink[:, None, None].expand(BATCH, HEADS, QUERIES, 1)
    padded = torch.cat([z, column], -1)
    p, lse = padded.softmax(-1)[..., :-1], padded.logsumexp(-1)

    arguments = {name: value for name, value in case.items() if name != "scores"}
    forward = oracle.softmax(scores, **(arguments | {"sink": sink}))
    torch.testing.assert_close(forward.probabilities, p.detach())
    torch.testing.assert_close(forward.lse, lse.detach())
    assert torch.equal(forward.excluded, excluded)

    g, h = oracle.random_like(p, 5), oracle.random_like(lse, 6)
    wanted = torch.autograd.grad((p, lse), (scores, bias, sink), (g, h))
    found = oracle.gradients(forward, g, h, scale=case["scale"], bias=bias, sink=sink)
    for gradient, other in zip((found.scores, found.bias, found.sink), wanted, strict=True):
        torch.testing.assert_close(gradient.value, other)


# Softmax + top-k


def _topk_case(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, QUERIES, KEYS)
    mask = torch.rand(BATCH, 1, KEYS, generator=generator) < 0.3
    mask[1, 0, 4:] = True  # fewer than K are left
    case = {
        "logits": (3 * torch.randn(shape, generator=generator)).to(dtype),
        "k": 6,
        "scale": 80**-0.5,
        "mask": mask,
        "bias": torch.randn(1, QUERIES, KEYS, generator=generator).to(dtype).requires_grad_(),
    }
    return case | changes


def _topk_of_raw_logits(**changes: Any) -> dict[str, Any]:
    """Without a bias, which decides about the order; with equals."""
    case = _topk_case(**changes)
    return case | {"logits": (2 * case["logits"]).round() / 2, "bias": None, "mask": None}


def _topk_of_negative_scale(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return _topk_of_raw_logits(dtype=dtype, scale=-0.6)


def _topk_renormalised(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return _topk_case(dtype, renormalize=True)


def _topk_with_nan(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = _topk_of_raw_logits(dtype=dtype)
    case["logits"][0, 2, 7], case["logits"][0, 2, 3] = torch.nan, torch.inf
    return case


def _topk_close_together(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    case = _topk_of_raw_logits(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(BATCH, QUERIES, KEYS, generator=generator) * 1e-4
    return case | {"logits": logits.to(dtype)}


def _reselected(order: Callable[..., Tensor]) -> Callable[..., Any]:
    """Takes the entries at `order(logits, p, k)` of the whole softmax p."""

    def faulty(logits: Tensor, k: int, *, dtype: torch.dtype | None = None, **given: Any) -> Any:
        p, lse = megasoftmax.softmax(
            logits,
            scale=given["scale"],
            mask=given["mask"],
            bias=given["bias"],
            dtype=dtype,
            return_lse=True,
        )
        indices = order(logits.detach(), p.detach(), k).contiguous()
        return p.gather(-1, indices), indices, lse

    return faulty


def _by(values: Tensor, k: int, flipped: bool = False) -> Tensor:
    values = values.flip(-1) if flipped else values
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.shape[-1] - 1 - order if flipped else order


def _rounded_probabilities(logits: Tensor, p: Tensor, k: int) -> Tensor:
    return _by(p.bfloat16().float(), k)


def _last_of_equals(logits: Tensor, p: Tensor, k: int) -> Tensor:
    return _by(p, k, flipped=True)


def _by_raw_logits(logits: Tensor, p: Tensor, k: int) -> Tensor:
    return _by(logits, k)


def _nan_last(logits: Tensor, p: Tensor, k: int) -> Tensor:
    return _by(logits.nan_to_num(-torch.inf, posinf=torch.inf), k)


def _unsorted(logits: Tensor, p: Tensor, k: int) -> Tensor:
    return _by(p, k).sort(-1).values


def _one_too_low(logits: Tensor, p: Tensor, k: int) -> Tensor:
    indices = _by(p, k + 1)
    return torch.cat([indices[..., : k - 1], indices[..., k:]], -1)


def _lse_over_k(logits: Tensor, k: int, **arguments: Any) -> Any:
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    return p, indices, lse + p.float().sum(-1).clamp_min(1e-3).log()


def _without_sum_over_k(logits: Tensor, k: int, **arguments: Any) -> Any:
    """Of the gradient of p = exp(z - lse) that through the log-sum-exp is lost."""
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    lost = torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1) * p.detach()
    return p + lost - lost.detach(), indices, lse


def _detached_lse(logits: Tensor, k: int, **arguments: Any) -> Any:
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    return p, indices, lse.detach() + 0 * p.sum()


def _topk_changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    return _changed(megasoftmax.softmax_topk, **changes)


def _topk_nearly_zero(logits: Tensor, k: int, **arguments: Any) -> Any:
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    excluded = arguments["mask"].expand(logits.shape).gather(-1, indices)
    return p + excluded * 1e-30, indices, lse


def _topk_gradient_at_excluded(logits: Tensor, k: int, **arguments: Any) -> Any:
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    touched = (logits * arguments["mask"]).sum(-1, keepdim=True) * 1e-30
    return p + touched - touched.detach(), indices, lse


def _narrow_indices(logits: Tensor, k: int, **arguments: Any) -> Any:
    p, indices, lse = megasoftmax.softmax_topk(logits, k, **arguments)
    return p, indices.int(), lse


TOPK_FAULTS = {
    "drops the mask": (_topk_changed(mask=lambda _: None), _topk_case),
    "drops the bias": (_topk_changed(bias=lambda _: None), _topk_case),
    "drops the scale": (_topk_changed(scale=lambda _: 1.0), _topk_case),
    "rounds the scale to bfloat16": (_topk_changed(scale=_rounded), _topk_case),
    "forgets to renormalise": (_topk_changed(renormalize=lambda _: False), _topk_renormalised),
    "renormalises unasked": (_topk_changed(renormalize=lambda _: True), _topk_case),
    "ranks rounded probabilities": (_reselected(_rounded_probabilities), _topk_close_together),
    "takes the last of equals": (_reselected(_last_of_equals), _topk_of_raw_logits),
    "ignores the sign of the scale": (_reselected(_by_raw_logits), _topk_of_negative_scale),
    "ranks logits without their bias": (_reselected(_by_raw_logits), _topk_case),
    "NaN comes last": (_reselected(_nan_last), _topk_with_nan),
    "orders by index": (_reselected(_unsorted), _topk_of_raw_logits),
    "takes K + 1 for K": (_reselected(_one_too_low), _topk_of_raw_logits),
    "lse over K": (_lse_over_k, _topk_case),
    "gradient without the sum over K": (_without_sum_over_k, _topk_case),
    "no gradient of the lse": (_detached_lse, _topk_case),
    "no gradient of the bias": (_topk_changed(bias=torch.Tensor.detach), _topk_case),
    "gradient of the bias doubled": (_topk_changed(bias=_doubled_gradient), _topk_case),
    "excluded entry nearly 0": (_topk_nearly_zero, _topk_case),
    "gradient at an excluded entry": (_topk_gradient_at_excluded, _topk_case),
    "indices of 32 bits": (_narrow_indices, _topk_case),
}


def test_a_right_reselection_passes() -> None:
    """What makes the faults above fail is their order, not how they are made."""
    right = _reselected(lambda logits, p, k: _by(logits, k))
    oracle_topk.check(right, **_topk_of_raw_logits())
    oracle_topk.check(right, **_topk_close_together())


# Attention


def _attention_case(dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    case = {
        "query": random(2, 2, 4, 5, 8).to(dtype),
        "key": random(2, 2, 2, 23, 8).to(dtype),
        "value": random(2, 2, 2, 23, 6).to(dtype),
        "scale": 0.3,
        "mask": torch.rand(2, 2, 1, 5, 23, generator=generator) < 0.3,
        "bias": random(2, 1, 4, 5, 23).to(dtype).requires_grad_(),
        "causal": True,
        "window": (16, 2),
        "sink": random(4).to(dtype).requires_grad_(),
    }
    return case | changes


def _relative_case(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    table = torch.randn(4, 27, generator=torch.Generator().manual_seed(1)).to(dtype)
    return _attention_case(dtype, bias=megasoftmax.RelativeBias(table.requires_grad_()))


def _attention_changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    return _changed(megasoftmax.attention, **changes)


def _bias_of_the_last_of_a_group(bias: Tensor) -> Tensor:
    """Not reduced: of examples that share an entry only the second gives it a gradient."""
    return torch.cat([bias.detach(), bias], 1)


def _bias_of_the_inner(bias: Tensor) -> Tensor:
    """Example i takes entry i % count, not i // group."""
    return bias.transpose(0, 1)


def _heads_reversed(bias: Tensor) -> Tensor:
    return bias.flip(-3)


def _interleaved(tensor: Tensor) -> Tensor:
    """Head i takes entry i % count, not i // group."""
    return torch.cat([tensor, tensor], -3)


def _key_of_one_query_head(key: Tensor) -> Tensor:
    return torch.stack([key.detach(), key], -3).flatten(-4, -3)


def _shifted_table(bias: megasoftmax.RelativeBias) -> megasoftmax.RelativeBias:
    return megasoftmax.RelativeBias(bias.table.roll(1, -1))


def _reversed_table(bias: megasoftmax.RelativeBias) -> megasoftmax.RelativeBias:
    return megasoftmax.RelativeBias(bias.table.flip(-1))


def _table_of_the_first_head(bias: megasoftmax.RelativeBias) -> megasoftmax.RelativeBias:
    return megasoftmax.RelativeBias(bias.table[:1])


def _attention_aligned_top_left(*args: Tensor, mask: Tensor, **arguments: Any) -> Any:
    upper = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    return megasoftmax.attention(*args, **(arguments | {"causal": False, "mask": mask | upper}))


def _causal_one_too_far(*args: Tensor, window: tuple[int, int], **arguments: Any) -> Any:
    return megasoftmax.attention(*args, **(arguments | {"causal": False, "window": (window[0], 1)}))


def _attention_lse_without_sink(*args: Tensor, sink: Tensor, **arguments: Any) -> Any:
    output, _ = megasoftmax.attention(*args, sink=sink, **arguments)
    return output, megasoftmax.attention(*args, **arguments)[1] + 0 * sink.sum()


def _attention_lse_detached(*args: Tensor, **arguments: Any) -> Any:
    output, lse = megasoftmax.attention(*args, **arguments)
    return output, lse.detach() + 0 * lse


def _gradient_where_bias_is_excluded(*args: Tensor, bias: Tensor, **arguments: Any) -> Any:
    output, lse = megasoftmax.attention(*args, bias=bias, **arguments)
    touched = bias[..., 0, -1].sum() * 1e-5  # excluded by causality in every group
    return output + touched - touched.detach(), lse


def _in_half_throughout(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, **arguments: Any
) -> Any:
    """Logits and probabilities rounded to the type of the query."""
    shared = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    p, lse = megasoftmax.softmax((query @ key.mT) * scale, **arguments)
    return (p @ value).transpose(-3, -2).contiguous().transpose(-3, -2), lse


ATTENTION_FAULTS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "drops the mask": (_attention_changed(mask=lambda _: None), _attention_case),
    "drops the bias": (_attention_changed(bias=lambda _: None), _attention_case),
    "drops the table": (_attention_changed(bias=lambda _: None), _relative_case),
    "forgets the sink": (_attention_changed(sink=lambda _: None), _attention_case),
    "takes the default scale": (_attention_changed(scale=lambda _: None), _attention_case),
    "rounds the scale to bfloat16": (_attention_changed(scale=_rounded), _attention_case),
    "forgets causality": (_attention_changed(causal=lambda _: False), _attention_case),
    "causal one too far": (_causal_one_too_far, _attention_case),
    "causal aligned top-left": (_attention_aligned_top_left, _attention_case),
    "window one too long": (
        _attention_changed(window=lambda window: (window[0] + 1, window[1])),
        _attention_case,
    ),
    "window one too short": (
        _attention_changed(window=lambda window: (window[0] - 1, window[1])),
        _attention_case,
    ),
    "key heads interleaved": (
        _attention_changed(key=_interleaved, value=_interleaved),
        _attention_case,
    ),
    "biases of batches interleaved": (_attention_changed(bias=_bias_of_the_inner), _attention_case),
    "biases of heads reversed": (_attention_changed(bias=_heads_reversed), _attention_case),
    "gradient of a key not summed over its heads": (
        _attention_changed(
            key=_key_of_one_query_head, value=lambda value: value.repeat_interleave(2, -3)
        ),
        _attention_case,
    ),
    "gradient of the bias not reduced": (
        _attention_changed(bias=_bias_of_the_last_of_a_group),
        _attention_case,
    ),
    "gradient of the bias doubled": (_attention_changed(bias=_doubled_gradient), _attention_case),
    "no gradient of the bias": (
        _attention_changed(bias=lambda bias: bias.detach() + 0 * bias),
        _attention_case,
    ),
    "no gradient of the sink": (
        _attention_changed(sink=lambda sink: sink.detach() + 0 * sink),
        _attention_case,
    ),
    "no gradient of the lse": (_attention_lse_detached, _attention_case),
    "lse without the sink": (_attention_lse_without_sink, _attention_case),
    "gradient at an excluded pair": (_gradient_where_bias_is_excluded, _attention_case),
    "table one too late": (_attention_changed(bias=_shifted_table), _relative_case),
    "table reversed": (_attention_changed(bias=_reversed_table), _relative_case),
    "the table of head 0 for all": (
        _attention_changed(bias=_table_of_the_first_head),
        _relative_case,
    ),
    "logits rounded to bfloat16": (_in_half_throughout, _attention_case),
}

# All of them


class Family(NamedTuple):
    function: Callable[..., Any]
    check: Callable[..., Any]
    faults: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]]
    in_half: set[str]  # faults that are noticed in half precision too
    only_in_half: set[str]


FAMILIES = {
    "softmax": Family(
        megasoftmax.softmax,
        oracle.check,
        FAULTS,
        in_half={
            "drops the mask",
            "drops the bias",
            "forgets the sink",
            "window one too long",
            "causal aligned top-left",
            "no gradient of the sink",
            "gradient of the bias doubled",
        },
        only_in_half=set(),
    ),
    "softmax_topk": Family(
        megasoftmax.softmax_topk,
        oracle_topk.check,
        TOPK_FAULTS,
        in_half={
            "drops the mask",
            "renormalises unasked",
            "ranks logits without their bias",
            "gradient without the sum over K",
            "no gradient of the lse",
            "gradient of the bias doubled",
        },
        only_in_half=set(),
    ),
    "attention": Family(
        megasoftmax.attention,
        oracle_attention.check,
        ATTENTION_FAULTS,
        in_half=set(ATTENTION_FAULTS) - {"rounds the scale to bfloat16", "no gradient of the lse"},
        only_in_half={"logits rounded to bfloat16"},
    ),
}
CHECKS = [
    pytest.param(family, fault, dtype, id=f"{name}: {fault}, {dtype}")
    for name, family in FAMILIES.items()
    for fault in family.faults
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if fault in family.in_half or dtype == torch.float32
    if fault not in family.only_in_half or dtype != torch.float32
]


@pytest.mark.parametrize(("family", "fault", "dtype"), CHECKS)
def test_fault_is_noticed(family: Family, fault: str, dtype: torch.dtype) -> None:
    """And the function itself passes with the same arguments."""
    faulty, case = family.faults[fault]
    family.check(family.function, **case(dtype=dtype))
    with pytest.raises(AssertionError):
        family.check(faulty, **case(dtype=dtype))


def test_oracle_of_attention_agrees_with_autograd() -> None:
    case = _attention_case(torch.float64)
    leaves = {
        name: case[name].detach().requires_grad_()
        for name in ("query", "key", "value", "bias", "sink")
    }
    q, k, v, bias, sink = leaves.values()
    k, v = (each.repeat_interleave(2, -3) for each in (k, v))
    z = case["scale"] * q @ k.mT + bias
    expected = oracle_attention.attention(**case)
    z = z.masked_fill(expected.dense.excluded, -torch.inf)
    z = torch.cat([z, sink[:, None, None].expand(2, 2, 4, 5, 1)], -1)
    output, lse = z.softmax(-1)[..., :-1] @ v, z.logsumexp(-1)
    torch.testing.assert_close(output, expected.output.value)
    torch.testing.assert_close(lse, expected.lse.value)
    g, h = oracle.random_like(output, 1), oracle.random_like(lse, 2)
    found = oracle_attention.gradients(
        expected,
        case["query"],
        case["key"],
        g,
        h,
        bias=case["bias"],
        scale=case["scale"],
        sink=case["sink"],
    )
    wanted = torch.autograd.grad((output, lse), list(leaves.values()), (g, h))
    for name, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(found[name].value, gradient)
