"""Entries that are chosen by a sigmoid, or by scores and a selection bias, as routers do."""

import functools

import op_checks
import processes
import pytest
import torch
from inputs import DTYPES, coin, fused_on, normal

import megasoftmax
from megasoftmax import ops
from megasoftmax.limits import kernel_limits
from megasoftmax.reference.topk import ForwardArguments

INF, NAN = torch.inf, torch.nan
LIMITS = kernel_limits().topk
MAX_K, MAX_COLUMNS = LIMITS["kTileMaxK"], LIMITS["kRouterMaxColumns"]
# Columns and K.
SIZES = ((8, 2), (16, 16), (64, 6), (72, 8), (160, 6), (256, 8), (384, 9), (1024, 16))
gpu = pytest.mark.gpu

SCORES = [("sigmoid", True), ("sigmoid", False), ("softmax", True)]
scored = pytest.mark.parametrize(("score", "has_bias"), SCORES)
topk_on = functools.partial(fused_on, megasoftmax.softmax_topk)


def check(function, logits, k, *, score, selection_bias=None, scale=1.0, renormalize=False, **rest):
    """Indices, probabilities and gradient beside the definition in float64."""
    leaf = logits.detach().requires_grad_()
    p, indices = function(
        leaf,
        k,
        score=score,
        selection_bias=selection_bias,
        scale=scale,
        renormalize=renormalize,
        **rest,
    )
    wide = logits.detach().cpu().double().requires_grad_()
    z = wide * torch.tensor(scale).double()
    if rest.get("mask") is not None:
        z = z.masked_fill(rest["mask"].cpu(), -INF)
    s = z.sigmoid() if score == "sigmoid" else z.softmax(-1)
    rank = z if score == "sigmoid" else s
    if selection_bias is not None:
        rank = (s + selection_bias.cpu().double()).masked_fill(z == -INF, -INF)
    rank = rank.detach()
    top = rank.sort(dim=-1, descending=True, stable=True)
    near = top.values[..., 1 : k + 1] > top.values[..., : min(k, rank.shape[-1] - 1)] - 3e-6
    is_clear = ~near.any(-1) if selection_bias is not None else torch.ones(near.shape[:-1]).bool()
    assert is_clear.double().mean() > 0.4
    assert torch.equal(indices.cpu()[is_clear], top.indices[..., :k][is_clear])
    chosen = rank.gather(-1, indices.cpu())
    torch.testing.assert_close(chosen, top.values[..., :k], rtol=1e-5, atol=1e-5)
    wanted = s.gather(-1, indices.cpu())
    if renormalize:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    close = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[p.dtype]
    torch.testing.assert_close(p.cpu().double(), wanted, rtol=close, atol=1e-7)
    g = normal(*p.shape, device="cpu", seed=3).to(p.dtype)
    (found,) = torch.autograd.grad(p, leaf, g.to(p.device))
    (gradient,) = torch.autograd.grad(wanted, wide, g.double())
    torch.testing.assert_close(
        found.cpu().double(), gradient, rtol=2 * close, atol=close * g.abs().max().item() / 4
    )
    return p, indices


@scored
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_choice(score, has_bias, renormalize, dtype, device):
    for columns, k in SIZES:
        logits = normal(3, 37, columns, device=device, dtype=dtype)
        bias = normal(columns, device=device, seed=2) / 4 if has_bias else None
        for scale in (1.0, -0.6):
            check(
                *(topk_on(device), logits, k),
                score=score,
                selection_bias=bias,
                scale=scale,
                renormalize=renormalize,
            )


@gpu
@scored
@pytest.mark.parametrize("k", [1, 2, 7, 8, 9, MAX_K])
def test_numbers_of_rows(score, has_bias, k):
    """Full tiles and parts of one, of rows of one lane and of all lanes."""
    for columns in (16, 32, 40, 64, 128, 264, 512, MAX_COLUMNS):
        for rows in (15, 16, 17, 128, 1000):
            logits = normal(rows, columns, device="cuda", dtype=torch.bfloat16)
            bias = normal(columns, device="cuda", seed=2) if has_bias else None
            check(topk_on("cuda"), logits, k, score=score, selection_bias=bias)


@scored
def test_special_logits(score, has_bias, device):
    logits = normal(6, 64, device=device)
    logits[0, 3], logits[1, 5], logits[2, 7], logits[3] = NAN, INF, -INF, -INF
    logits[4, 8:] = -INF
    bias = torch.zeros(64, device=device) if has_bias else None
    if has_bias:
        bias[7] = 100.0
    p, indices = topk_on(device)(logits, 8, score=score, selection_bias=bias)
    expected, same = megasoftmax.softmax_topk(
        logits.cpu(), 8, score=score, selection_bias=None if bias is None else bias.cpu()
    )
    torch.testing.assert_close(p.cpu(), expected, equal_nan=True)
    clear = [1, 2, 3, 4] if score == "sigmoid" else [2, 3, 4]
    assert torch.equal(indices.cpu()[clear], same[clear])
    assert (indices[2] != 7).all()  # -inf comes last, whatever is added
    assert p[3].isnan().all() == (score == "softmax")
    if score == "sigmoid":
        assert p[0].isnan().tolist() == (indices[0] == 3).tolist()
        assert p[1, (indices[1] == 5).nonzero()].item() == 1
        shares, _ = topk_on(device)(logits, 8, score=score, selection_bias=bias, renormalize=True)
        assert shares.isnan().all(-1).tolist() == [True, *[False] * 5]


@pytest.mark.parametrize("columns", [64, 256])
def test_infinite_logits_are_chosen_by_their_score(columns, device):
    logits, bias = normal(33, columns, device=device), normal(columns, device=device, seed=2) / 8
    logits[:, :6] = INF
    bias[:6] = -9.0
    p, indices = topk_on(device)(logits, 8, score="sigmoid", selection_bias=bias)
    scores = logits.sigmoid()
    assert torch.equal(indices, (scores + bias).topk(8).indices)
    torch.testing.assert_close(p, scores.gather(-1, indices))


@pytest.mark.parametrize("largest", [1e-4, 1.0, 1e4, 1e6])
@pytest.mark.parametrize("columns", [40, 128, 256, MAX_COLUMNS])
def test_choice_beside_large_and_small_biases(columns, largest, device):
    """Candidates are found by numbers of float16, which are coarse or infinite beside such ones."""
    logits = normal(65, columns, device=device)
    bias = largest * normal(columns, device=device, seed=2)
    for score in ("sigmoid", "softmax"):
        _, indices = topk_on(device)(logits, 8, score=score, selection_bias=bias)
        scores = logits.double().sigmoid() if score == "sigmoid" else logits.double().softmax(-1)
        by = scores + bias
        step = torch.finfo(torch.float32).eps * (1 + by.abs().amax(-1, keepdim=True))
        assert (by.gather(-1, indices) >= by.topk(8).values - 4 * step).all()


def test_selection_bias_is_not_returned(device):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]], device=device)
    bias = torch.tensor([2.0, 0.0, 0.0, 0.0], device=device)
    p, indices = topk_on(device)(logits, 2, score="sigmoid", selection_bias=bias)
    assert indices.tolist() == [[0, 3]]
    torch.testing.assert_close(p, logits.gather(-1, indices).sigmoid())
    p, indices = topk_on(device)(logits, 2, selection_bias=bias, renormalize=True)
    assert indices.tolist() == [[0, 3]]
    torch.testing.assert_close(p, logits.gather(-1, indices).softmax(-1))


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
def test_vmap(dims, device, monkeypatch):
    """Kernels get one bias for all rows, also of examples that have their own."""
    if device == "cpu":
        processes.let_ops_serve_cpus(monkeypatch.setattr)
    implementation, seen = ops.topk.IMPLEMENTATION, []

    def forward(*args):
        seen.append(ForwardArguments(*args).selection_bias.shape)
        return implementation.forward(*args)

    monkeypatch.setattr(ops.topk, "IMPLEMENTATION", implementation._replace(forward=forward))
    logits, bias = normal(5, 4, 64, device=device), normal(5, 64, device=device, seed=2)

    def call(logits, bias):
        options = {"score": "sigmoid", "selection_bias": bias, "renormalize": True}
        return megasoftmax.softmax_topk(logits, 6, fused=True, **options)

    given = [each if dim == 0 else each[0] for each, dim in zip((logits, bias), dims, strict=True)]
    op_checks.check_vmap(call, given, dims)
    assert set(seen) == {(64,)}


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_rows_of_nan_are_nan_whatever_is_chosen(value, renormalize, device):
    logits = normal(2, 64, device=device)
    logits[0, 40] = value
    bias = torch.zeros(64, device=device)
    p, indices = topk_on(device)(logits, 8, selection_bias=bias, renormalize=renormalize)
    assert (indices[0] != 40).all()
    assert p.isnan().all(-1).tolist() == [True, False]


def test_selection_bias_gets_no_gradient(device):
    """It may be a parameter where none is recorded."""
    logits = normal(5, 64, device=device)
    bias = torch.nn.Parameter(normal(64, device=device, seed=2))
    with pytest.raises(TypeError, match=r"^selection_bias: expected a tensor without a gradient"):
        topk_on(device)(logits, 6, selection_bias=bias)
    with torch.no_grad():
        found = topk_on(device)(logits, 6, selection_bias=bias)
    wanted = topk_on(device)(logits, 6, selection_bias=bias.detach())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_with_other_options_in_plain_torch(device):
    logits = normal(40, 12, device=device)
    bias = normal(40, 12, device=device, seed=2) / 4
    mask = coin(12, device=device)
    function = functools.partial(megasoftmax.softmax_topk, fused=False)
    for score, _ in SCORES:
        check(function, logits, 4, score=score, selection_bias=bias, mask=mask)


@pytest.mark.parametrize(
    ("shape", "k", "options", "expected"),
    [
        ((4, 64), MAX_K + 1, {}, f"k with score 'sigmoid': expected at most {MAX_K}"),
        ((4, MAX_COLUMNS + 8), 4, {}, "columns with score 'sigmoid'"),
        ((4, 63), 4, {}, "bytes of a row with score 'sigmoid': expected a multiple of 16"),
        ((4, 64), 4, {"mask": torch.zeros(64).bool(), "softcap": 2.0}, "got mask, softcap"),
        ((4, 64), 4, {"scale": torch.ones(4)}, "got a scale of each row"),
        ((4, 64), 4, {"selection_bias": torch.zeros(4, 64)}, "selection_bias: expected [64]"),
        ((4, 64), 4, {"selection_bias": torch.zeros(64)}, None),
        ((4, 64), 4, {}, None),
    ],
)
def test_why_not_fused(shape, k, options, expected):
    reasons = megasoftmax.why_not_fused(
        megasoftmax.softmax_topk, torch.zeros(shape), k, score="sigmoid", **options
    )
    of_choice = [
        str(each) for each in reasons if each.constraint not in ("device", "compiled part")
    ]
    if expected is None:
        assert of_choice == []
    else:
        assert any(expected in each for each in of_choice), of_choice


@gpu
@scored
def test_logits_that_lie_anyhow(score, has_bias):
    """They are copied first."""
    function = topk_on("cuda")
    bias = normal(64, device="cuda", seed=2) if has_bias else None
    for logits in (
        normal(64, 50, device="cuda").mT,
        normal(50, 65, device="cuda")[:, 1:],
        normal(50 * 64 + 1, device="cuda")[1:].view(50, 64),
        normal(5, 10, 64, device="cuda").transpose(0, 1),
    ):
        check(function, logits, 6, score=score, selection_bias=bias)


@pytest.mark.parametrize(
    "options",
    [
        {"score": torch.zeros(3)},
        {"score": "sigmoid", "return_lse": torch.zeros(3)},
        {"selection_bias": torch.zeros(5), "renormalize": torch.zeros(3)},
        {"score": "sigmoid", "dtype": torch.zeros(3)},
    ],
    ids=lambda options: [*options][-1],
)
def test_tensors_in_place_of_words_and_flags(options):
    name = [*options][-1]
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: expected"):
        megasoftmax.softmax_topk(torch.zeros(2, 5), 2, **options)


def test_choice_among_no_entries(device):
    p, indices = topk_on(device)(
        torch.zeros(3, 0, device=device), 0, selection_bias=torch.zeros(0, device=device)
    )
    assert p.shape == indices.shape == (3, 0)
