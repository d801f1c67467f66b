"""The comparison with the oracle notices planted faults, and the oracle agrees with autograd."""

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import oracle
import oracle_attention
import oracle_topk
import pytest
import torch
from torch import Tensor

import megasoftmax

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 23


def _case(dtype=torch.float32, **changes):
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


def _changed(function, **changes):
    """The function, with some arguments replaced by what a change makes of them."""
    names = tuple(inspect.signature(function).parameters)

    def faulty(*args, **arguments):
        arguments |= dict(zip(names, args, strict=False))
        changed = {name: change(arguments.get(name)) for name, change in changes.items()}
        return function(**(arguments | changed))

    return faulty


def _spoilt(function, spoil):
    """The function, with what a change makes of the arguments by name and of the results."""
    names = tuple(inspect.signature(function).parameters)

    def faulty(*args, **arguments):
        given = SimpleNamespace(**arguments, **dict(zip(names, args, strict=False)))
        return spoil(given, *function(*args, **arguments))

    return faulty


softmax, attention = megasoftmax.softmax, megasoftmax.attention
softmax_topk = megasoftmax.softmax_topk
_softmax_changed, _softmax_spoilt = partial(_changed, softmax), partial(_spoilt, softmax)
_topk_changed, _topk_spoilt = partial(_changed, softmax_topk), partial(_spoilt, softmax_topk)
_attention_changed, _attention_spoilt = partial(_changed, attention), partial(_spoilt, attention)


def _rounded(scale):
    return torch.tensor(scale).bfloat16().item()


def _only_in_gradient(values):
    """0, with the gradient of the values."""
    return values - values.detach()


def _at_excluded(tensor, mask):
    return _only_in_gradient((tensor * mask).sum(-1, keepdim=True) * 1e-30)


def _doubled_gradient(tensor):
    return tensor + _only_in_gradient(tensor)


def _top_left(function):
    """Causal masks that begin with the first key."""

    def faulty(*args, mask, **arguments):
        upper = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
        return function(*args, **(arguments | {"causal": False, "mask": mask | upper}))

    return faulty


def _lse_without_sink(function):
    def faulty(*args, sink, **arguments):
        result, _ = function(*args, sink=sink, **arguments)
        return result, function(*args, **arguments)[1] + 0 * sink.sum()

    return faulty


Fault = tuple[Callable[..., Any], Callable[..., dict[str, Any]]]  # the function and its arguments


def _of(case, faults):
    return {name: (faulty, case) for name, faulty in faults.items()}


def _of_options(function):
    """Faults of the options that softmax and attention share."""
    changed = partial(_changed, function)
    return {
        "drops the mask": changed(mask=lambda _: None),
        "drops the bias": changed(bias=lambda _: None),
        "forgets the sink": changed(sink=lambda _: None),
        "forgets causality": changed(causal=lambda _: False),
        "rounds the scale to bfloat16": changed(scale=_rounded),
        "window one too long": changed(window=lambda w: (w[0] + 1, w[1])),
        "window one too short": changed(window=lambda w: (w[0] - 1, w[1])),
        "causal aligned top-left": _top_left(function),
        "gradient of the bias doubled": changed(bias=_doubled_gradient),
        "lse without the sink": _lse_without_sink(function),
    }


def _case_with_nan(dtype=torch.float32):
    case = _case(dtype)
    scores = case["scores"].clone()
    scores[0, 1, 3, 12] = torch.nan
    mask = case["mask"].clone()
    mask[0, 0, 3, 12] = False
    return case | {"scores": scores, "mask": mask}


FAULTS = _of(
    _case,
    _of_options(softmax)
    | {
        "drops the scale": _softmax_changed(scale=lambda _: 1.0),
        "causality overwrites the window": _softmax_changed(window=lambda _: None),
        "no gradient of the sink": _softmax_changed(sink=Tensor.detach),
        "no gradient of the bias": _softmax_changed(bias=Tensor.detach),
        "the sink of head 0 for all": _softmax_changed(sink=lambda s: s[:1].expand(s.shape)),
        "excluded entry nearly 0": _softmax_spoilt(lambda a, p, lse: (p + a.mask * 1e-30, lse)),
        "gradient at an excluded entry": _softmax_spoilt(
            lambda a, p, lse: (p + _at_excluded(a.scores, a.mask), lse)
        ),
    },
) | _of(
    _case_with_nan,
    {
        "NaN swallowed": _softmax_changed(scores=lambda scores: scores.nan_to_num(0.0)),
        "NaN at excluded entries": _softmax_spoilt(
            lambda _, p, lse: (torch.where(p.isnan().any(-1, keepdim=True), torch.nan, p), lse)
        ),
    },
)


@pytest.mark.parametrize("error", [3e-5, -3e-5])
def test_relative_error_is_noticed(error):
    expected = oracle.softmax(_case()["scores"]).probabilities
    oracle.assert_matches(expected.float(), expected, torch.float32)
    with pytest.raises(AssertionError, match="norm"):
        oracle.assert_matches((expected * (1 + error)).float(), expected, torch.float32)
    one = expected.clone()
    one[1, 2, 3, 4] *= 1 + error
    with pytest.raises(AssertionError, match="element"):
        oracle.assert_matches(one.float(), expected, torch.float32)


def test_oracle_agrees_with_autograd():
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


def _topk_case(dtype=torch.float32, **changes):
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


def _topk_of_raw_logits(**changes):
    """Without a bias, which decides about the order; with equals."""
    case = _topk_case(**changes)
    return case | {"logits": (2 * case["logits"]).round() / 2, "bias": None, "mask": None}


def _topk_with_nan(dtype=torch.float32):
    case = _topk_of_raw_logits(dtype=dtype)
    case["logits"][0, 2, 7], case["logits"][0, 2, 3] = torch.nan, torch.inf
    return case


def _topk_close_together(dtype=torch.float32):
    case = _topk_of_raw_logits(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(BATCH, QUERIES, KEYS, generator=generator) * 1e-4
    return case | {"logits": logits.to(dtype)}


def _reselected(order):
    """Takes the entries at `order(logits, p, k)` of the whole softmax p."""

    def faulty(logits, k, *, dtype=None, **given):
        options = {name: given[name] for name in ("scale", "mask", "bias")}
        p, lse = softmax(logits, **options, dtype=dtype, return_lse=True)
        indices = order(logits.detach(), p.detach(), k).contiguous()
        return p.gather(-1, indices), indices, lse

    return faulty


def _by(values, k, flipped=False):
    values = values.flip(-1) if flipped else values
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return values.shape[-1] - 1 - order if flipped else order


def _one_too_low(logits, p, k):
    indices = _by(p, k + 1)
    return torch.cat([indices[..., : k - 1], indices[..., k:]], -1)


def _without_sum_over_k(given, p, indices, lse):
    """Of the gradient of p = exp(z - lse) that through the log-sum-exp is lost."""
    lost = torch.where(lse == -torch.inf, 0, lse).unsqueeze(-1) * p.detach()
    return p + _only_in_gradient(lost), indices, lse


def _topk_nearly_zero(given, p, indices, lse):
    excluded = given.mask.expand(given.logits.shape).gather(-1, indices)
    return p + excluded * 1e-30, indices, lse


_by_raw_logits = _reselected(lambda logits, p, k: _by(logits, k))
TOPK_FAULTS = (
    _of(
        _topk_case,
        {
            "drops the mask": _topk_changed(mask=lambda _: None),
            "drops the bias": _topk_changed(bias=lambda _: None),
            "drops the scale": _topk_changed(scale=lambda _: 1.0),
            "rounds the scale to bfloat16": _topk_changed(scale=_rounded),
            "renormalises unasked": _topk_changed(renormalize=lambda _: True),
            "ranks logits without their bias": _by_raw_logits,
            "lse over K": _topk_spoilt(
                lambda _, p, i, lse: (p, i, lse + p.float().sum(-1).clamp_min(1e-3).log())
            ),
            "gradient without the sum over K": _topk_spoilt(_without_sum_over_k),
            "no gradient of the lse": _topk_spoilt(
                lambda _, p, i, lse: (p, i, lse.detach() + 0 * p.sum())
            ),
            "no gradient of the bias": _topk_changed(bias=Tensor.detach),
            "gradient of the bias doubled": _topk_changed(bias=_doubled_gradient),
            "excluded entry nearly 0": _topk_spoilt(_topk_nearly_zero),
            "gradient at an excluded entry": _topk_spoilt(
                lambda a, p, i, lse: (p + _at_excluded(a.logits, a.mask), i, lse)
            ),
            "indices of 32 bits": _topk_spoilt(lambda _, p, i, lse: (p, i.int(), lse)),
        },
    )
    | _of(
        _topk_of_raw_logits,
        {
            "takes the last of equals": _reselected(lambda _, p, k: _by(p, k, flipped=True)),
            "orders by index": _reselected(lambda _, p, k: _by(p, k).sort(-1).values),
            "takes K + 1 for K": _reselected(_one_too_low),
        },
    )
    | {
        "forgets to renormalise": (
            _topk_changed(renormalize=lambda _: False),
            partial(_topk_case, renormalize=True),
        ),
        "ranks rounded probabilities": (
            _reselected(lambda _, p, k: _by(p.bfloat16().float(), k)),
            _topk_close_together,
        ),
        "ignores the sign of the scale": (_by_raw_logits, partial(_topk_of_raw_logits, scale=-0.6)),
        "NaN comes last": (
            _reselected(lambda x, _, k: _by(x.nan_to_num(-torch.inf, posinf=torch.inf), k)),
            _topk_with_nan,
        ),
    }
)


def test_a_right_reselection_passes():
    """What makes the faults above fail is their order, not how they are made."""
    right = _reselected(lambda logits, p, k: _by(logits, k))
    oracle_topk.check(right, **_topk_of_raw_logits())
    oracle_topk.check(right, **_topk_close_together())


# Attention


def _attention_case(dtype=torch.float32, **changes):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
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


def _relative_case(dtype=torch.float32):
    table = torch.randn(4, 27, generator=torch.Generator().manual_seed(1)).to(dtype)
    return _attention_case(dtype, bias=megasoftmax.RelativeBias(table.requires_grad_()))


def _table_changed(change):
    return _attention_changed(bias=lambda bias: megasoftmax.RelativeBias(change(bias.table)))


def _bias_of_the_last_of_a_group(bias):
    """Not reduced: of examples that share an entry only the second gives it a gradient."""
    return torch.cat([bias.detach(), bias], 1)


def _interleaved(tensor):
    """Head i takes entry i % count, not i // group."""
    return torch.cat([tensor, tensor], -3)


def _key_of_one_query_head(key):
    return torch.stack([key.detach(), key], -3).flatten(-4, -3)


def _without_gradient(tensor):
    return tensor.detach() + 0 * tensor


def _causal_one_too_far(*args, window, **arguments):
    return attention(*args, **(arguments | {"causal": False, "window": (window[0], 1)}))


def _gradient_where_bias_is_excluded(given, output, lse):
    touched = given.bias[..., 0, -1].sum() * 1e-5  # excluded by causality in every group
    return output + _only_in_gradient(touched), lse


def _in_half_throughout(query, key, value, *, scale, **arguments):
    """Logits and probabilities rounded to the type of the query."""
    shared = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    p, lse = softmax((query @ key.mT) * scale, **arguments)
    return (p @ value).transpose(-3, -2).contiguous().transpose(-3, -2), lse


ATTENTION_FAULTS = _of(
    _attention_case,
    _of_options(attention)
    | {
        "takes the default scale": _attention_changed(scale=lambda _: None),
        "causal one too far": _causal_one_too_far,
        "key heads interleaved": _attention_changed(key=_interleaved, value=_interleaved),
        "biases of inner batches": _attention_changed(bias=lambda bias: bias.transpose(0, 1)),
        "biases of heads reversed": _attention_changed(bias=lambda bias: bias.flip(-3)),
        "gradient of a key not summed over its heads": _attention_changed(
            key=_key_of_one_query_head, value=lambda value: value.repeat_interleave(2, -3)
        ),
        "gradient of the bias not reduced": _attention_changed(bias=_bias_of_the_last_of_a_group),
        "no gradient of the bias": _attention_changed(bias=_without_gradient),
        "no gradient of the sink": _attention_changed(sink=_without_gradient),
        "no gradient of the lse": _attention_spoilt(lambda _, o, lse: (o, _without_gradient(lse))),
        "gradient at an excluded pair": _attention_spoilt(_gradient_where_bias_is_excluded),
        "logits rounded to bfloat16": _in_half_throughout,
    },
) | _of(
    _relative_case,
    {
        "drops the table": _attention_changed(bias=lambda _: None),
        "table one too late": _table_changed(lambda table: table.roll(1, -1)),
        "table reversed": _table_changed(lambda table: table.flip(-1)),
        "the table of head 0 for all": _table_changed(lambda table: table[:1]),
    },
)

# All of them


class Family(NamedTuple):
    function: Callable[..., Any]
    check: Callable[..., Any]
    faults: dict[str, Fault]
    in_half: set[str]  # faults that are noticed in half precision too
    only_in_half: frozenset[str] = frozenset()


_IN_HALF = {"drops the mask", "gradient of the bias doubled"}
FAMILIES = {
    "softmax": Family(
        *(softmax, oracle.check, FAULTS),
        {"drops the bias", "forgets the sink", "window one too long", "causal aligned top-left"}
        | {"no gradient of the sink", *_IN_HALF},
    ),
    "softmax_topk": Family(
        *(softmax_topk, oracle_topk.check, TOPK_FAULTS),
        {"renormalises unasked", "ranks logits without their bias", "no gradient of the lse"}
        | {"gradient without the sum over K", *_IN_HALF},
    ),
    "attention": Family(
        *(attention, oracle_attention.check, ATTENTION_FAULTS),
        set(ATTENTION_FAULTS) - {"rounds the scale to bfloat16", "no gradient of the lse"},
        frozenset({"logits rounded to bfloat16"}),
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
def test_fault_is_noticed(family, fault, dtype):
    """And the function itself passes with the same arguments."""
    faulty, case = family.faults[fault]
    family.check(family.function, **case(dtype=dtype))
    with pytest.raises(AssertionError):
        family.check(faulty, **case(dtype=dtype))


def test_oracle_of_attention_agrees_with_autograd():
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
    options = {name: case[name] for name in ("bias", "scale", "sink")}
    found = oracle_attention.gradients(expected, case["query"], case["key"], g, h, **options)
    wanted = torch.autograd.grad((output, lse), list(leaves.values()), (g, h))
    for name, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(found[name].value, gradient)
