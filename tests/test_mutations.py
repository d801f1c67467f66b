"""The comparison with the oracle notices planted faults, and the oracle agrees with autograd."""

from collections.abc import Callable
from typing import Any

import oracle
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


def _without(name: str) -> Callable[..., Any]:
    def faulty(scores: Tensor, **arguments: Any) -> Any:
        arguments.pop(name)
        return megasoftmax.softmax(scores, **arguments)

    return faulty


def _with(change: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    def faulty(scores: Tensor, **arguments: Any) -> Any:
        arguments["scores"] = scores
        return megasoftmax.softmax(**(arguments | change(**arguments)))

    return faulty


def _rounded_scale(scale: float, **_: Any) -> dict[str, Any]:
    return {"scale": torch.tensor(scale).bfloat16().item()}


def _long_window(window: tuple[int, int], **_: Any) -> dict[str, Any]:
    return {"window": (window[0] + 1, window[1])}


def _short_window(window: tuple[int, int], **_: Any) -> dict[str, Any]:
    return {"window": (window[0] - 1, window[1])}


def _top_left_causal(scores: Tensor, mask: Tensor, **_: Any) -> dict[str, Any]:
    upper = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return {"causal": False, "mask": mask | upper}


def _causal_overwrites_window(**_: Any) -> dict[str, Any]:
    return {"window": None}


def _detached_sink(sink: Tensor, **_: Any) -> dict[str, Any]:
    return {"sink": sink.detach()}


def _detached_bias(bias: Tensor, **_: Any) -> dict[str, Any]:
    return {"bias": bias.detach()}


def _doubled_gradient_of_bias(bias: Tensor, **_: Any) -> dict[str, Any]:
    return {"bias": 2 * bias - bias.detach()}


def _first_sink_for_all(sink: Tensor, **_: Any) -> dict[str, Any]:
    return {"sink": sink[:1].expand(sink.shape)}


def _swallowed_nan(scores: Tensor, **_: Any) -> dict[str, Any]:
    return {"scores": scores.nan_to_num(0.0)}


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


def _case_with_nan() -> dict[str, Any]:
    case = _case()
    scores = case["scores"].clone()
    scores[0, 1, 3, 12] = torch.nan
    mask = case["mask"].clone()
    mask[0, 0, 3, 12] = False
    return case | {"scores": scores, "mask": mask}


FAULTS = {
    "drops the mask": (_without("mask"), _case),
    "drops the bias": (_without("bias"), _case),
    "drops the scale": (_without("scale"), _case),
    "forgets the sink": (_without("sink"), _case),
    "forgets causality": (_without("causal"), _case),
    "rounds the scale to bfloat16": (_with(_rounded_scale), _case),
    "window one too long": (_with(_long_window), _case),
    "window one too short": (_with(_short_window), _case),
    "causal aligned top-left": (_with(_top_left_causal), _case),
    "causality overwrites the window": (_with(_causal_overwrites_window), _case),
    "no gradient of the sink": (_with(_detached_sink), _case),
    "no gradient of the bias": (_with(_detached_bias), _case),
    "gradient of the bias doubled": (_with(_doubled_gradient_of_bias), _case),
    "the sink of head 0 for all": (_with(_first_sink_for_all), _case),
    "excluded entry nearly 0": (_nearly_zero, _case),
    "gradient at an excluded entry": (_gradient_at_excluded, _case),
    "lse without the sink": (_sink_missing_from_lse, _case),
    "NaN swallowed": (_with(_swallowed_nan), _case_with_nan),
    "NaN at excluded entries": (_nan_everywhere, _case_with_nan),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(fault: str) -> None:
    faulty, case = FAULTS[fault]
    oracle.check(megasoftmax.softmax, **case())
    with pytest.raises(AssertionError):
        oracle.check(faulty, **case())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "fault",
    [
        "drops the mask",
        "drops the bias",
        "forgets the sink",
        "window one too long",
        "causal aligned top-left",
        "no gradient of the sink",
        "gradient of the bias doubled",
    ],
)
def test_fault_is_noticed_in_half_precision(fault: str, dtype: torch.dtype) -> None:
    oracle.check(megasoftmax.softmax, **_case(dtype))
    with pytest.raises(AssertionError):
        oracle.check(FAULTS[fault][0], **_case(dtype))


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
