"""megasoftmax.softmax against the oracle: every rule of the semantics, every edge of limits.h."""

import functools
import gc
import itertools

import oracle
import pytest
import torch
from inputs import DTYPES, DTYPES_OF_KERNELS, HALVES, bits_equal, coin, fused_on, normal

import megasoftmax
from megasoftmax.explain import explain
from megasoftmax.limits import kernel_limits

SHAPE = (2, 3, 5, 37)
INF, NAN = torch.inf, torch.nan

gpu = pytest.mark.gpu
softmax_on = functools.partial(fused_on, megasoftmax.softmax)


def check(scores, **arguments):
    return oracle.check(softmax_on(scores.device.type), scores, **arguments)


def results_of(scores, g, h=None, *, learns_bias=False, **arguments):
    """Probabilities, log-sum-exp, and the gradients of the scores and of the bias."""
    leaves = [scores.detach().requires_grad_()]
    if learns_bias:
        leaves.append(arguments["bias"].requires_grad_())
    p, lse = softmax_on(scores.device.type)(leaves[0], return_lse=True, **arguments)
    incoming = (p, g) if h is None else ((p, lse), (g, h))
    return [p.detach(), lse.detach(), *torch.autograd.grad(incoming[0], leaves, incoming[1])]


def check_parts(run, whole, parts, dim=0):
    """Calls of slices of the rows have the bits that rows have in a call of all, which returns."""
    results = run(whole)
    for part in parts:
        for of_all, of_part in zip(results, run(part), strict=True):
            of_all = of_all[(*dim * [slice(None)], part)]
            assert bits_equal(of_all, of_part), f"{part}"
    return results


def of_columns(*both, on_gpu):
    """Lengths of rows for tests that take `columns` and `device`; long ones are for the kernels."""
    on_cuda = [pytest.param(columns, "cuda", marks=gpu) for columns in (*both, *on_gpu)]
    cases = [*((columns, "cpu") for columns in both), *on_cuda]
    return pytest.mark.parametrize(("columns", "device"), cases, indirect=["device"])


# Variants, each of which every row regime must meet


def _bias(*shape, like, seed=3):
    values = normal(*shape, device=like.device.type, dtype=like.dtype, seed=seed)
    return values.requires_grad_()


def _sink(like):
    return normal(like.shape[1], device=like.device.type, seed=4).requires_grad_()


def _mask(*shape, like):
    return coin(*shape, device=like.device.type)


def _window(like):
    return {"window": (like.shape[-1] // 3, 1)}


VARIANTS = {
    "plain": lambda x, b, h, q, k: {},
    "mask per batch": lambda x, b, h, q, k: {"mask": _mask(b, 1, q, k, like=x)},
    "mask per head and key": lambda x, b, h, q, k: {"mask": _mask(1, h, 1, k, like=x)},
    "bias per head": lambda x, b, h, q, k: {"bias": _bias(1, h, q, k, like=x)},
    "bias per batch and key": lambda x, b, h, q, k: {
        "bias": _bias(b, 1, 1, k, like=x.float()),
        "lse_gradient": False,
    },
    "full bias": lambda x, b, h, q, k: {"bias": _bias(b, h, q, k, like=x)},
    "causal": lambda x, b, h, q, k: {"causal": True, "scale": -1.5},
    "window": lambda x, b, h, q, k: _window(x),
    "sink": lambda x, b, h, q, k: {"sink": _sink(x), "lse_gradient": False},
    "causal, sink, other dtype": lambda x, b, h, q, k: {
        "causal": True,
        "sink": _sink(x),
        "dtype": torch.bfloat16 if x.dtype == torch.float32 else torch.float32,
    },
    "mask, causal bias": lambda x, b, h, q, k: {
        "mask": _mask(b, 1, 1, k, like=x),
        "bias": _bias(1, h, q, k, like=x),
        "causal": True,
    },
    "everything": lambda x, b, h, q, k: {
        "mask": _mask(b, 1, q, k, like=x),
        "bias": _bias(h, 1, k, like=x),
        "causal": True,
        "sink": _sink(x),
        "scale": 80**-0.5,
        **_window(x),
    },
}


def dropped(scores, dropout=0.3):
    """Dropout, as `check` takes it."""
    seed = torch.tensor([scores.numel()], device=scores.device)
    kept = megasoftmax.reference.dropout.kept_of_scores(seed, dropout, scores)
    return {"dropout": dropout, "seed": seed, "kept": kept}


def check_variant(variant, shape, dtype, device, drops=False):
    scores = normal(*shape, device=device, dtype=dtype)
    arguments = {"scale": 0.7} | VARIANTS[variant](scores, *shape)
    if drops:
        arguments |= dropped(scores)
    check(scores, **arguments, what=f"({variant}, {shape}, {dtype}, dropout: {drops})")


# Rows of the semantics table


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [*itertools.product((1, 2, 3, 7, 8, 9, 17, 33), DTYPES), (37, torch.float64)],
)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("drops", [False, True])
def test_short_rows(variant, columns, dtype, device, drops):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("kernels take no float64")
    check_variant(variant, (2, 3, 5, columns), dtype, device, drops)


BROADCAST = [(), (37,), (1,), (5, 37), (5, 1), (3, 5, 37), (3, 1, 1), (2, 1, 1, 37), (2, 1, 5, 1)]
BROADCAST += [(1, 3, 5, 37), (2, 3, 5, 37)]
WINDOWS = [None, (0, 0), (0, -1), (-1, 0), (3, 0), (0, 3), (4, 2), (-1, -1), (1000, 1000)]


@pytest.mark.parametrize("shape", BROADCAST)
def test_mask_and_bias_broadcast(shape, device):
    scores = normal(*SHAPE, device=device)
    mask = coin(*shape, device=device) if shape else torch.tensor(False, device=device)
    check(scores, mask=mask)
    bias = normal(*shape, device=device, seed=2)
    check(scores, bias=bias)
    check(scores, bias=bias, mask=mask)
    if device == "cpu" or shape[-1:] == SHAPE[-1:]:
        check(scores, bias=bias.requires_grad_(), mask=coin(*SHAPE, device=device))


@pytest.mark.parametrize(
    ("dtype", "options", "bias"),
    [
        # Kernels do not sum along rows.
        *(
            (dtype, options, shape)
            for dtype in (torch.float16, torch.float32)
            for options in ({}, {"sink": 0.0})
            for shape in ((), (1,), (5, 1), (3, 1, 1), (2, 1, 5, 1))
        ),
        (torch.float16, {"dtype": torch.bfloat16, "causal": True}, None),
        (torch.bfloat16, {"dtype": torch.float16, "causal": True}, None),
        (torch.float32, {"scale": 0.0}, None),
    ],
)
def test_what_kernels_do_not_take(dtype, options, bias, device):
    for columns in (37, 7, 1):
        shape = (*SHAPE[:-1], columns)
        scores = normal(*shape, device=device, dtype=dtype)
        given = dict(options)
        if bias is None:
            given["mask"] = coin(*shape, device=device)
        else:
            given["bias"] = normal(*bias, device=device, dtype=dtype, seed=2).requires_grad_()
        oracle.check(megasoftmax.softmax, scores, **given)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("dtype", "out"), DTYPES_OF_KERNELS)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_types(dtype, out, bias_dtype, drops, device):
    scores = normal(2, 3, 18, 77, device=device, dtype=dtype)
    options = dropped(scores) if drops else {}
    check(scores, dtype=out, causal=True, **options)
    bias = normal(3, 1, 77, device=device, dtype=bias_dtype, seed=2).requires_grad_()
    mask = coin(2, 1, 18, 77, device=device)
    check(scores, dtype=out, bias=bias, **options)
    check(scores, dtype=out, bias=bias, mask=mask, **options)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(9, 9), (1, 9), (5, 37), (37, 5), (67, 67), (12, 1)])
def test_causal_and_window(sizes, causal, window, device):
    scores = normal(2, 2, *sizes, device=device)
    check(scores, causal=causal, window=window)
    if window in (None, (4, 2)):
        check(scores.half(), causal=causal, window=window, mask=coin(2, 1, *sizes, device=device))
        check(scores.half(), causal=causal, window=window, sink=0.5)
    p = softmax_on(device)(scores, causal=True)
    queries, keys = sizes
    upper = torch.ones(sizes, dtype=torch.bool, device=device).triu(keys - queries + 1)
    assert (p[..., upper] == 0).all()
    assert (p[..., ~upper] > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e4])
def test_excluded_is_zero_whatever_stands_there(value, dtype, device):
    mask = coin(2, 1, 5, 37, device=device)
    excluded = mask.expand(SHAPE)
    clean = normal(*SHAPE, device=device, dtype=dtype)
    bias = normal(*SHAPE, device=device, dtype=dtype, seed=2)
    dirty_scores, dirty_bias = clean.masked_fill(excluded, value), bias.masked_fill(excluded, value)
    g = normal(*SHAPE, device=device, dtype=dtype, seed=3).masked_fill(excluded, value)
    dirty_bias.requires_grad_()
    for arguments in ({}, {"causal": True}, {"window": (20, 20)}, {"sink": 1.0}):
        results = check(dirty_scores, mask=mask, bias=dirty_bias, g=g, **arguments)
        assert all(result.isfinite().all() for result in results)
        p = softmax_on(device)(clean, mask=mask, bias=bias, **arguments)
        assert bits_equal(results[0], p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_what_a_window_excludes_is_used(dtype, device):
    scores = normal(2, 2, 33, 65, device=device, dtype=dtype)
    outside = oracle.excluded_entries(scores, None, True, (7, -1))
    g = normal(2, 2, 33, 65, device=device, dtype=dtype, seed=3).masked_fill(outside, INF)
    results = check(scores.masked_fill(outside, NAN), g=g, causal=True, window=(7, -1))
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window"])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_row_with_nothing_left(how, dtype, sink, device):
    scores = normal(2, 3, 9, 4, device=device, dtype=dtype)
    rows = torch.zeros(2, 3, 9, dtype=torch.bool, device=device)
    arguments = {}
    if how == "mask":
        rows[:, 1], rows[0, 0, 3] = True, True
        arguments = {"mask": rows[..., None].expand(scores.shape)}
    elif how == "bias":
        rows[:, :, 2:4] = True
        values = torch.zeros(9, 4, device=device, dtype=dtype)
        values[2:4] = -INF
        arguments = {"bias": values.requires_grad_()}
    else:
        rows[:, :, :5] = True
        arguments = {"causal": True} if how == "causal" else {"window": (2, 0)}
    p, lse, d_scores, *_ = check(scores, sink=sink, **arguments)
    assert (p[rows] == 0).all()
    assert (d_scores[rows] == 0).all()
    assert (lse[rows] == (-INF if sink is None else sink)).all()
    assert (p[~rows].sum(-1) > 0.1).all()


def test_plain_row_of_minus_infinity_is_nan(device):
    scores = normal(4, 37, device=device)
    scores[1] = -INF
    p = softmax_on(device)(scores)
    assert p[1].isnan().all()
    assert p[[0, 2, 3]].isfinite().all()
    check(scores)
    scores[2, 1:] = -INF
    p, *_ = check(scores)
    assert p[2, 0] == 1


def test_row_of_minus_infinity_in_scores_with_a_rule_is_zero(device):
    scores = normal(1, 1, 5, 9, device=device)
    scores[..., 3, :] = -INF
    nothing = torch.zeros(9, dtype=torch.bool, device=device)
    for arguments in ({"mask": nothing}, {"causal": True}, {"sink": 0.0}, {"window": (8, 8)}):
        p, *_ = check(scores, **arguments)
        assert (p[..., 3, :] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["scores", "bias"])
@pytest.mark.parametrize("columns", [9, 64, 1003])
def test_visible_nan_or_infinity_makes_the_visible_row_nan(where, value, dtype, columns, device):
    shape = (1, 2, 7, columns)
    scores = normal(*shape, device=device, dtype=dtype)
    bias = normal(*shape, device=device, dtype=dtype, seed=2)
    mask = coin(*shape, device=device)
    mask[..., 0], mask[..., columns // 2] = True, False
    {"scores": scores, "bias": bias}[where][0, 1, 3, columns // 2] = value
    for arguments in ({}, {"mask": mask}, {"mask": mask, "sink": 0.0}, {"window": (columns, 4)}):
        p, lse, d_scores, _ = check(scores, bias=bias.requires_grad_(), **arguments)
        limits = (arguments.get("mask"), False, arguments.get("window"))
        excluded = oracle.excluded_entries(scores, *limits)
        for result in (p, d_scores):
            assert (result[excluded] == 0).all()
            assert result[0, 1, 3][~excluded[0, 1, 3]].isnan().all()
            assert result[0, 0].isfinite().all()
        assert lse[0, 1, 3].isnan()
        assert lse.isnan().sum() == 1


def test_infinite_gradient_where_the_probability_is_zero(device):
    scores = normal(2, 3, 37, device=device)
    scores[..., 5] = -INF
    g = normal(2, 3, 37, device=device, seed=2)
    g[..., 5] = INF
    *_, d_scores = check(scores, g=g)
    assert d_scores.isfinite().all()
    assert (d_scores[..., 5] == 0).all()


def test_nan_gradient_of_a_visible_entry_spreads(device):
    g = normal(2, 3, 37, device=device, seed=2)
    g[1, 2, 7] = NAN
    *_, d_scores = check(normal(2, 3, 37, device=device), g=g)
    assert d_scores[1, 2].isnan().all()
    assert d_scores.isnan().sum() == 37


@pytest.mark.parametrize("dtype", DTYPES)
def test_lowest_scores_and_biases_are_uniform(dtype, device):
    softmax, lowest = softmax_on(device), torch.finfo(dtype).min
    flat = torch.full((3, 4, 16), lowest, dtype=dtype, device=device)
    assert (softmax(flat) == 1 / 16).all()
    assert (softmax(flat, mask=torch.zeros_like(flat, dtype=torch.bool)) == 1 / 16).all()
    assert (softmax(torch.zeros_like(flat), bias=flat) == 1 / 16).all()
    for columns in (16, 700):
        scores = normal(3, 4, columns, device=device).mul(2).round().to(dtype)
        bias = torch.zeros_like(scores).masked_fill_(coin(3, 4, columns, device=device), lowest)
        bias[1] = lowest
        p = softmax(scores, bias=bias)
        oracle.assert_matches(p, (scores.float() + bias.float()).double().softmax(-1), dtype)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("columns", [9, 37, 5000])
def test_offset_of_all_scores(offset, scale, columns, device):
    scores = normal(4, columns, device=device) + offset
    check(scores, scale=scale)
    check(scores, scale=scale, mask=coin(4, columns, device=device))


@pytest.mark.parametrize("scale", [-1.0, -0.37, 80**-0.5, 3, 1e-3, 12.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(scale, dtype, device):
    scores = normal(*SHAPE, device=device, dtype=dtype)
    check(scores, scale=scale)
    bias = normal(3, 1, 37, device=device, dtype=dtype, seed=2).requires_grad_()
    check(scores, scale=scale, causal=True, mask=coin(*SHAPE, device=device), bias=bias)


@pytest.mark.parametrize("huge", [3e38, -3e38])
@pytest.mark.parametrize("columns", [4, 64, 3000, 40000])
def test_scale_of_huge_scores_does_not_overflow(huge, columns, device):
    scores = torch.full((3, columns), -abs(huge), device=device, dtype=torch.bfloat16)
    scores[:, 1] = scores[:, columns - 1] = huge
    p = softmax_on(device)(scores, scale=3.0)
    oracle.assert_matches(p, (scores.double() * 3).softmax(-1), torch.bfloat16)


# Sinks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink_dtype", [*DTYPES, torch.float64])
def test_sink_per_head(dtype, sink_dtype, device):
    sink = torch.tensor([0.3, -2.0, 4.0], device=device, dtype=sink_dtype).requires_grad_()
    scores = normal(*SHAPE, device=device, dtype=dtype)
    check(scores, sink=sink)
    check(scores, sink=sink, lse_gradient=False)
    check(scores, sink=sink, causal=True, mask=coin(2, 1, 1, 37, device=device))
    check(scores[0], sink=sink, window=(1, 0))


@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 20.0, 1e4, -1e4, -INF])
@pytest.mark.parametrize("shape", [None, (), (1,), (3,), (1, 1, 1)])
def test_value_of_sink(value, shape, device):
    sink = value if shape is None else torch.full(shape, value, device=device).requires_grad_()
    scores = normal(*SHAPE, device=device)
    check(scores, sink=sink)
    mask = coin(*SHAPE, device=device)
    mask[1, 2] = True
    check(scores, sink=sink, mask=mask)


@pytest.mark.parametrize("value", [NAN, INF])
def test_sink_of_nan_or_infinity_makes_its_rows_nan(value, device):
    sink = torch.tensor([0.0, value, 1.0], device=device).requires_grad_()
    scores, mask = normal(*SHAPE, device=device), coin(*SHAPE, device=device)
    p, lse, d_scores, d_sink = check(scores, sink=sink, mask=mask)
    assert lse[:, 1].isnan().all()
    for result in (p, lse, d_scores, d_sink[None]):
        assert result[:, [0, 2]].isfinite().all()


def test_sink_with_strides(device):
    wide = normal(3, 4, device=device, seed=4)
    check(normal(*SHAPE, device=device), sink=wide[:, 1].requires_grad_())
    check(normal(*SHAPE, device=device), sink=wide[:1, 1].expand(3).requires_grad_())


# Log-sum-exp and incoming gradients


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_lse_alone(dtype, device):
    scores = normal(*SHAPE, device=device, dtype=dtype).requires_grad_()
    sink = torch.tensor([0.3, -2.0, 4.0], device=device).requires_grad_()
    mask = coin(*SHAPE, device=device)
    _, lse = softmax_on(device)(scores, mask=mask, sink=sink, return_lse=True)
    h = oracle.random_like(lse, 1)
    d_scores, d_sink = torch.autograd.grad(lse, (scores, sink), h)
    forward = oracle.softmax(scores, mask=mask, sink=sink)
    wanted = oracle.gradients(forward, torch.zeros_like(scores), h, sink=sink, dtype=dtype)
    for actual, gradient in ((d_scores, wanted.scores), (d_sink, wanted.sink)):
        assert gradient is not None
        limits = {"magnitude": gradient.magnitude, "zero": gradient.zero}
        oracle.assert_matches(actual, gradient.value, dtype, **limits)


def test_lse_of_large_scores(device):
    scores = torch.tensor([[1e30, 1e30], [-1e30, -1e30], [88.0, 89.0]], device=device)
    _, lse = softmax_on(device)(scores, return_lse=True)
    torch.testing.assert_close(lse, scores.double().logsumexp(-1).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 64, 129, 1000])
def test_incoming_gradients_of_any_strides(dtype, columns, device):
    """Neither they nor the scores are modified."""
    shape = (2, 3, 5, columns)
    scores = normal(*shape, device=device, dtype=dtype)
    bias = normal(1, 3, 5, columns, device=device, dtype=dtype, seed=2).requires_grad_()
    incoming = [
        normal(2, 3, columns, 5, device=device, dtype=dtype).transpose(-1, -2),
        normal(2, 5, 3, columns, device=device, dtype=dtype).transpose(1, 2),
        normal(2, 3, 5, columns + 3, device=device, dtype=dtype)[..., 3:],
        normal(2, 3, 5, 2 * columns, device=device, dtype=dtype)[..., ::2],
        torch.ones((), device=device, dtype=dtype).expand(shape),
        normal(2, 3, 5, 1, device=device, dtype=dtype).expand(shape),
        normal(columns, device=device, dtype=dtype).expand(shape),
    ]
    h = normal(5, 3, 2, device=device, seed=5).permute(2, 1, 0)
    for g in incoming:
        tensors = (scores, g, h)
        kept = [each.clone() for each in tensors]
        check(scores, g=g, h=h)
        check(scores, g=g, h=torch.ones((), device=device).expand(shape[:-1]), causal=True)
        check(scores, g=g, h=h, sink=0.5, window=(3, 3))
        check(scores, g=g, bias=bias, mask=coin(2, 1, 5, columns, device=device))
        assert all(map(bits_equal, tensors, kept))


def test_incoming_gradient_whose_leading_dimensions_do_not_merge(device):
    scores = normal(2, 3, 4, 5, 37, device=device)
    bias = normal(5, 37, device=device, seed=2).requires_grad_()
    for dims in ((1, 0, 2, 3, 4), (0, 2, 1, 3, 4), (2, 1, 0, 4, 3)):
        sizes = [scores.shape[dim] for dim in dims]
        g = normal(*sizes, device=device, seed=3).permute(dims)
        check(scores, g=g, causal=True)
        check(scores, g=g, bias=bias)


# Layouts


def _layouts(columns, device, dtype):
    def make(*shape):
        return normal(*shape, device=device, dtype=dtype)

    yield "keys and queries swapped", make(2, 3, columns, 5).transpose(-1, -2)
    yield "heads and queries swapped", make(2, 5, 3, columns).transpose(1, 2)
    yield "batch inside", make(3, 5, columns, 2).permute(3, 0, 1, 2)
    yield "middle of wider rows", make(2, 3, 5, columns + 11)[..., 3 : columns + 3]
    yield "every second column", make(2, 3, 5, 2 * columns)[..., ::2]
    yield "every second query", make(2, 3, 10, columns)[:, :, 1::2]
    yield "odd offset", make(30 * columns + 1)[1:].view(2, 3, 5, columns)
    yield "expanded batches", make(1, 3, 5, columns).expand(2, -1, -1, -1)
    yield "expanded queries", make(2, 3, 1, columns).expand(-1, -1, 5, -1)
    yield "expanded columns", make(2, 3, 5, 1).expand(-1, -1, -1, columns)
    odd = make(5 * columns).as_strided((1, 1, 5, columns), (7, 3, columns, 1))
    yield "odd strides of dimensions of size 1", odd
    yield "one column with any stride", make(60).as_strided((2, 3, 5, 1), (30, 10, 2, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@of_columns(1, 8, 13, 129, on_gpu=(5000, 40001))
def test_layouts_of_scores(columns, dtype, device):
    for what, scores in _layouts(columns, device, dtype):
        heads, keys = scores.shape[1], scores.shape[-1]
        sink = torch.linspace(-1, 1, heads, device=device).requires_grad_()
        check(scores, what=what)
        check(scores, what=what, mask=coin(keys, device=device), causal=True, sink=sink)
        check(scores, what=what, causal=True, **dropped(scores))


@pytest.mark.parametrize("dtype", DTYPES)
@of_columns(8, 13, 129, on_gpu=(5000,))
def test_layouts_of_mask_and_bias(columns, dtype, device):
    scores = normal(2, 3, 5, columns, device=device, dtype=dtype)
    for what, bias in _layouts(columns, device, dtype):
        if bias.shape[-1] == columns:
            mask = bias > 0.5
            # Comparing keeps strides, but not stride 0 and not gaps: those are made here.
            gaps = torch.zeros(2, 3, 5, 2 * columns + 1, dtype=torch.bool, device=device)
            spread = gaps[..., 1::2].copy_(mask.expand_as(scores))
            check(scores, what=what, mask=mask)
            check(scores, what=what, mask=spread, bias=bias)
            check(scores, what=what, bias=bias.detach().requires_grad_(), causal=True)
            check(scores, what=what, bias=bias.detach().float().requires_grad_(), mask=mask)
            check(scores, what=what, mask=spread, **dropped(scores))
            trained = bias.detach().requires_grad_()
            check(scores, what=what, bias=trained, mask=mask, **dropped(scores))
    one = coin(1, 1, 1, columns, device=device)
    for mask in (one.expand(scores.shape), one[..., :1].expand(scores.shape)):
        check(scores, mask=mask)
        check(scores, mask=mask, bias=mask.to(dtype), window=(columns // 2, 0))
    offset = coin(2 * columns + 1, device=device)[1:].view(2, 1, 1, columns)
    check(scores, mask=offset)


@pytest.mark.parametrize(
    "shape",
    [(37,), (1,), (5, 37), (3, 5, 37), (2, 2, 3, 5, 37), (2, 1, 2, 3, 5, 37), (1, 1, 1, 1, 1, 1)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks(shape, dtype, device):
    scores = normal(*shape, device=device, dtype=dtype)
    check(scores)
    check(scores, mask=coin(*shape, device=device), sink=0.5)
    check(scores, bias=normal(shape[-1], device=device, seed=2).requires_grad_())
    if len(shape) > 1:
        check(scores, causal=True)
    if len(shape) > 2:
        sink = torch.linspace(-1, 1, shape[-3], device=device).requires_grad_()
        check(scores, sink=sink, bias=normal(*shape[-3:], device=device).requires_grad_())


EMPTY = [(0,), (4, 0), (0, 7), (0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0), (0, 0)]


@pytest.mark.parametrize("shape", [*EMPTY, (2, 0, 3, 5, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(shape, dtype, device):
    scores = normal(*shape, device=device, dtype=dtype)
    check(scores)
    check(scores, mask=coin(*shape, device=device))
    check(scores, bias=normal(shape[-1], device=device, dtype=dtype).requires_grad_())
    check(scores, sink=torch.ones(1, device=device).requires_grad_())
    if len(shape) > 1:
        check(scores, causal=True, window=(3, 0), sink=0.5)
    if len(shape) > 3:
        bias = normal(1, 1, *shape[-2:], device=device, dtype=dtype)
        check(scores, bias=bias.requires_grad_(), sink=torch.ones(shape[-3], device=device))


@gpu
def test_leading_dimensions_that_do_not_merge_take_the_plain_path():
    scores = normal(2, 3, 4, 5, 37, device="cuda").transpose(0, 1)
    (reason,) = megasoftmax.why_not_fused(megasoftmax.softmax, scores)
    assert reason.constraint == "leading dimensions of scores"
    with pytest.raises(ValueError, match="leading dimensions of scores"):
        megasoftmax.softmax(scores, fused=True)
    oracle.check(megasoftmax.softmax, scores, causal=True)
    whole = normal(3, 2, 4, 5, 37, device="cuda")
    mask = coin(2, 3, 4, 5, 37, device="cuda").transpose(0, 1)
    with pytest.raises(ValueError, match="leading dimensions of mask"):
        megasoftmax.softmax(whole, mask=mask, fused=True)
    oracle.check(megasoftmax.softmax, whole, mask=mask)
    # Its copy in float32 has no strides of 0.
    bias = normal(1, 1, 4, 5, 37, device="cuda", dtype=torch.bfloat16).expand(3, 1, 4, 5, 37)
    with pytest.raises(ValueError, match="leading dimensions of bias"):
        megasoftmax.softmax(whole, bias=bias, fused=True)
    oracle.check(megasoftmax.softmax, whole, bias=bias)
    # Merged they are neither one nor all.
    bias = normal(1, 1, 1, 1, 37, device="cuda").expand(1, 2, 1, 1, 37).requires_grad_()
    with pytest.raises(ValueError, match="leading dimensions of a bias that needs a gradient"):
        megasoftmax.softmax(whole, bias=bias, fused=True)
    oracle.check(megasoftmax.softmax, whole, bias=bias)


@gpu
@pytest.mark.parametrize("shape", [(2, 66001, 1, 5), (66001, 2, 1, 5), (1, 1, 66001, 5)])
@pytest.mark.parametrize("dtype", HALVES)
def test_more_rows_than_a_grid_has_blocks(shape, dtype):
    device = "cuda"
    batch, heads, queries, keys = shape
    scores = normal(*shape, device=device, dtype=dtype)
    sink = normal(heads, device=device, seed=4).requires_grad_()
    check(scores, mask=coin(batch, 1, queries, keys, device=device), sink=sink)
    check(scores, window=(2, 0), bias=normal(1, heads, 1, keys, device=device, dtype=dtype))
    bias = normal(batch, 1, queries, keys, device=device).requires_grad_()
    check(scores, bias=bias, causal=True)


# Every edge of the tables in limits.h


LIMITS = kernel_limits()
LONG_EDGE = 5000  # vectors: from here on, rows are too long for all variants


def _edges(kind=None):
    """The lengths up to which regimes serve rows, all rows or those of a kind, in vectors."""
    regimes = [r for r in LIMITS.forward + LIMITS.backward if kind is None or kind in r.serves]
    return sorted({regime.max_vectors for regime in regimes if regime.max_vectors is not None})


# (vectors, whether dropout)
EDGES = [(edge, False) for edge in _edges()] + [(edge, True) for edge in _edges("dropped")]


def _edges_of_rows():
    """(rows, vectors) where the number of rows decides: the shortest rows that a regime serves."""
    found = set()
    for backward, regimes in ((False, LIMITS.forward), (True, LIMITS.backward)):
        for index, regime in enumerate(regimes):
            if not 0 < regime.min_rows <= LIMITS.max_index:
                continue
            for vectors in (1, *(edge + 1 for edge in _edges())):
                call = explain(regime.min_rows, 4 * vectors, torch.float32, backward=backward)
                if call.index == index:
                    found.add((regime.min_rows, vectors))
                    break
    return sorted(found)


def _pack(dtype):
    return 16 // dtype.itemsize


def _straddled(columns, dtype):
    """How many columns before an edge that of ragged rows comes."""
    is_long = columns >= LIMITS.constants["kAlignedVectors"] * _pack(dtype)
    return _pack(dtype) * (LIMITS.constants["kLineVectors"] if is_long else 1)


@gpu
@pytest.mark.parametrize(("vectors", "drops"), [e for e in EDGES if e[0] <= LONG_EDGE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_regimes(vectors, drops, dtype):
    """Rows that fill a regime, and one column less and more.

    A ragged row may need one vector or line more, so its edge comes earlier.
    """
    full = vectors * _pack(dtype)
    less = _pack(dtype) if drops else _straddled(full, dtype)
    queries = 19 if vectors <= (128 if drops else 80) else 5
    variants = list(VARIANTS)
    turn = DTYPES.index(dtype)
    for columns in (full - less + 1, full - less + 2, full - 1, full, full + 1):
        for _ in range(5):  # 25 turns for 12 variants: each meets either side of the edge
            variant = variants[turn % len(variants)]
            check_variant(variant, (2, 3, queries, columns), dtype, "cuda", drops)
            turn += 1


@gpu
@pytest.mark.parametrize(("vectors", "drops"), [e for e in EDGES if e[0] > LONG_EDGE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_edges_of_regimes_of_long_rows(vectors, drops, dtype):
    """Edges beyond which rows are too long for many rows and all variants."""
    full = vectors * _pack(dtype)
    less = _pack(dtype) if drops else _straddled(full, dtype)
    for columns in (full - less + 2, full, full + 1):
        for variant in ("plain", "full bias", "everything"):
            check_variant(variant, (1, 2, 2, columns), dtype, "cuda", drops)


@gpu
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("rows", "vectors"), _edges_of_rows())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_edges_of_regimes_in_rows(rows, vectors, dtype, drops):
    """Another row more, and all of them are served differently."""
    for count in (rows - 1, rows):
        scores = normal(count, vectors * _pack(dtype), device="cuda", dtype=dtype)
        check(scores, **(dropped(scores) if drops else {}))
        if not drops:
            check(scores, softcap=1.5)


# What rows that a softcap alone bends may have besides.
BESIDE_A_SOFTCAP = (
    {},
    {"causal": True},
    {"scale": -0.7},
    {"window": (40, 3)},
    {"sink": 0.5},
    {"scale": 2.0, "window": (-1, 2)},
)


@gpu
@pytest.mark.parametrize("vectors", _edges())
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_regimes_with_a_softcap(vectors, dtype):
    """Such rows have the regimes of rows without it, and kernels of their own.

    Scores stay below half of the softcap, reach it in some vectors, or exceed it almost everywhere.
    """
    full = vectors * _pack(dtype)
    less = _straddled(full, dtype)
    shape = (2, 3, 19) if vectors <= 80 else (1, 2, 5) if vectors <= LONG_EDGE else (1, 1, 2)
    turn = DTYPES.index(dtype)
    for columns in (full - less + 1, full - less + 2, full - 1, full, full + 1):
        for size, softcap in ((1.0, 50.0), (1.0, 5.0), (9.0, 1.5)):
            beside = BESIDE_A_SOFTCAP[turn % len(BESIDE_A_SOFTCAP)]
            scores = size * normal(*shape, columns, device="cuda", dtype=dtype)
            check(scores, softcap=softcap, **beside, what=f"{columns} columns")
            turn += 1


@gpu
@pytest.mark.parametrize("columns", [2, 7, 64, 200, 1000, 2048, 2053, 9000, 40_000, 128_256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_with_a_softcap(columns, dtype):
    """Infinite scores count as the softcap, also at the bounds of rows, and NaN stays NaN."""
    scores = normal(2, 3, 4, columns, device="cuda", dtype=dtype)
    last = columns - 1
    scores[0, 0, 1] = -INF
    scores[0, 0, 2] = INF
    scores[0, 1, 0, 0], scores[0, 1, 1, last], scores[0, 1, 2, columns // 2] = -INF, INF, -INF
    scores[0, 2, 3, columns // 3] = NAN
    scores[1, 0, 0, : columns // 2] = -INF
    scores[1, 1] = 3e4
    scores[1, 2, 1, last] = torch.finfo(dtype).max
    for beside in BESIDE_A_SOFTCAP:
        for softcap in (1.5, 30.0):
            check(scores, softcap=softcap, **beside)
            check(scores[..., 1:], softcap=softcap, **beside)
    first = torch.randint(0, columns, (3, 4), device="cuda").int()
    check(scores, softcap=2.0, visible=(first, None))
    for softcap in (1e4, 0.01):  # a small part of the softcap, or many times as much
        check(scores, softcap=softcap, causal=True)


@gpu
@pytest.mark.parametrize("columns", [64, 1000, 4096, 50_257])
@pytest.mark.parametrize("dtype", HALVES)
def test_halves_in_float32_with_a_softcap(columns, dtype):
    for size in (1.0, 6.0):
        scores = size * normal(2, 3, 5, columns, device="cuda", dtype=dtype)
        check(scores, softcap=4.0, dtype=torch.float32)


# Dropout: as above, in the regimes that serve it


@gpu
@pytest.mark.parametrize("vectors", _edges("dropped"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_drop_the_entries_of_the_reference(vectors, dtype):
    full, pack = vectors * _pack(dtype), _pack(dtype)
    queries = 35 if vectors <= 5000 else 2
    for columns in (full - pack + 1, full - pack + 2, full - 1, full, full + 1):
        scores = torch.zeros(2, 2, queries, columns, device="cuda", dtype=dtype)
        for limits in ({}, {"causal": True}, {"window": (columns // 3, 1)}):
            options = dropped(scores) | limits
            kept = options.pop("kept")
            p = megasoftmax.softmax(scores, **options, dtype=torch.float32, fused=True)
            plain = megasoftmax.softmax(scores, **limits, dtype=torch.float32, fused=True)
            assert torch.equal(p != 0, kept & (plain != 0)), (columns, limits)


@pytest.mark.parametrize("dropout", [0.5, 1.0, 2.0**-18])
@pytest.mark.parametrize("dtype", DTYPES)
@of_columns(37, 1024, on_gpu=(9000,))
def test_special_values_with_dropout(dropout, dtype, columns, device):
    """Of scores and of incoming gradients; also where nothing and where all is dropped."""
    scores = normal(2, 3, 18, columns, device=device, dtype=dtype)
    options = dropped(scores, dropout)
    g = oracle.random_like(scores, 1).masked_fill(~options["kept"], NAN)
    check(scores, g=g, **options)
    scores[0, 0, 3, 5], scores[0, 1, 4, 6], scores[1, 0, 5] = NAN, INF, -INF
    check(scores, **options)
    mask = coin(2, 3, 18, columns, device=device)
    mask[0, 0, 3, 5] = mask[1, 1, 2] = True
    planted = scores.masked_fill(mask, NAN)
    sink = torch.tensor([0.5, 2.0, -INF], device=device).requires_grad_()
    check(planted, mask=mask, g=g.masked_fill(mask, INF), **options)
    check(planted, mask=mask, sink=sink, g=g.masked_fill(mask, INF), **options)
    bias = normal(3, 18, columns, device=device, dtype=dtype, seed=2).requires_grad_()
    check(planted, mask=mask, bias=bias, scale=-0.7, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@of_columns(41, 1024, on_gpu=(9001,))
def test_ranges_with_dropout(dtype, columns, device):
    scores = normal(2, 3, 18, columns, device=device, dtype=dtype)
    first = torch.arange(18, device=device, dtype=torch.int32) * (columns // 40)
    end = first + torch.arange(3, device=device, dtype=torch.int32)[:, None] * (columns // 3)
    bias = normal(3, 1, columns, device=device, dtype=dtype, seed=2).requires_grad_()
    for visible in ((first, None), (None, end), (first, end)):
        check(scores, visible=visible, **dropped(scores))
        check(scores, visible=visible, bias=bias, **dropped(scores))


@gpu
@pytest.mark.parametrize("columns", [33333, 65536, 131075])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_beyond_the_tables(variant, dtype, columns):
    check_variant(variant, (2, 2, 2, columns), dtype, "cuda")


@gpu
@pytest.mark.parametrize("vectors", [edge for edge in _edges() if edge <= 1032])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_of_regimes_in_a_window(vectors, dtype):
    """What a window leaves of a row decides its regime: "windowed" is at most half of it."""
    pack = _pack(dtype)
    # The most columns that never touch one more vector, counted from the beginning of their line.
    edge = max(vectors - LIMITS.constants["kLineVectors"], 1) * pack + 1
    lengths = (max(3 * vectors, 1100) * pack + 3, (vectors + vectors // 2 + 9) * pack)
    for keys, visible in itertools.product(lengths, (edge - 1, edge, edge + 1, edge + pack)):
        scores = normal(1, 2, 5, keys, device="cuda", dtype=dtype)
        left = max(visible - 3, 0)
        check(scores, window=(left, 2), what=f"{visible} visible")
        check(scores, window=(visible - 1, 0), causal=True, sink=0.5, what=f"{visible} visible")
        mask = coin(1, 1, 5, keys, device="cuda")
        bias = normal(1, 2, 5, keys, device="cuda", dtype=dtype, seed=2).requires_grad_()
        check(scores, window=(left, 2), mask=mask, bias=bias, what=f"{visible} visible")
        check(scores[..., 3:], window=(left, 2), mask=mask[..., 3:], what=f"{visible} visible")
        check(scores, window=(left, 2), what=f"{visible} visible", **dropped(scores))
        check(scores, window=(left, 2), softcap=1.5, what=f"{visible} visible")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "left", "right"), [(500, 31, 0), (301, 7, 3), (130, 3, 0)])
def test_few_visible_keys_of_ragged_rows(length, left, right, dtype):
    """Several vectors of a thread may end before column 0, in the row before."""
    keys = length + (-length % _pack(dtype) == 0)
    scores = normal(1, 4, length, keys, device="cuda", dtype=dtype)
    check(scores, window=(left, right))
    check(scores, window=(left, right), sink=0.5)


@gpu
@pytest.mark.parametrize("sizes", [(2100, 2100), (1300, 2500), (2500, 1300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_causal_and_windowed(sizes, dtype):
    scores = normal(1, 2, *sizes, device="cuda", dtype=dtype)
    check(scores, causal=True)
    sink = torch.tensor([0.5, -0.5], device="cuda").requires_grad_()
    for window in ((0, 0), (17, 40), (300, 0), (0, 300), (511, 512), (-1, 100), (100, -1)):
        check(scores, window=window, sink=sink, what=f"window {window}")
    bias = normal(1, 2, *sizes, device="cuda", dtype=dtype, seed=2).requires_grad_()
    check(scores, window=(300, 20), mask=coin(1, 1, *sizes, device="cuda"), bias=bias)


@gpu
@pytest.mark.parametrize("keys", [4500, 4503])
@pytest.mark.parametrize("left", [100, 2400])
@pytest.mark.parametrize(("dtype", "result"), DTYPES_OF_KERNELS)
def test_zeros_beside_a_window(dtype, result, left, keys):
    """On both sides more than one bulk copy writes, where memory held NaN. A wide window leaves
    rows of several segments, which end at other columns than the window."""
    scores = normal(1, 1, keys, keys, device="cuda", dtype=dtype).requires_grad_()
    distance = torch.arange(keys, device="cuda") - torch.arange(keys, device="cuda")[:, None]
    outside = (distance < -left) | (distance > 20)

    def use_memory(dtype):
        torch.full_like(scores, torch.nan, dtype=dtype)

    use_memory(result)
    p = megasoftmax.softmax(scores, window=(left, 20), dtype=result, fused=True)
    g = normal(1, 1, keys, keys, device="cuda", dtype=result, seed=1)
    use_memory(dtype)
    (found,) = torch.autograd.grad(p, scores, g)
    for tensor in (p, found):
        assert (tensor[0, 0][outside] == 0).all()
        assert (tensor[0, 0][~outside] != 0).any(), "nothing was computed"
    assert torch.allclose(p.float().sum(-1), torch.ones(keys, device="cuda"), atol=2e-2)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries", [2900, 3001])
def test_mask_and_bias_that_heads_share(dtype, queries):
    """More than 2 ** 23 of them, which changes the order of rows."""
    scores = normal(2, 3, queries, 3000, device="cuda", dtype=dtype)
    check(scores, mask=coin(2, 1, queries, 3000, device="cuda"), causal=True)
    bias = normal(queries, 3000, device="cuda", dtype=dtype, seed=2).requires_grad_()
    check(scores, bias=bias)


@gpu
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        *((8, 4, 64, 300), (64, 2, 3, 1000), (16, 1, 200, 65), (2, 2, 9, 9000)),
        *((16, 3, 33, columns) for columns in (64, 520, 2000, 9001)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_a_bias_that_many_rows_share(shape, dtype, drops):
    """It is summed in parts."""
    batch, heads, queries, keys = shape
    scores = normal(*shape, device="cuda", dtype=dtype)
    options = dropped(scores) if drops else {}
    shapes = [(keys,), (heads, 1, keys), (1, heads, queries, keys), (queries, keys)]
    for sizes in (*shapes, (batch, 1, 1, keys), (batch, 1, queries, keys)):
        bias = normal(*sizes, device="cuda", dtype=dtype, seed=2).requires_grad_()
        check(scores, bias=bias, what=f"bias {sizes}", **options)
        check(scores, bias=bias, what=f"bias {sizes}", causal=True, window=(40, 0), **options)


# Memory, reproducibility


@gpu
def test_more_than_2_to_the_31_elements():
    shape, dtype = (3, 2, 20000, 20000), torch.bfloat16
    scores = torch.empty(shape, device="cuda", dtype=dtype).normal_().requires_grad_()
    p, lse = megasoftmax.softmax(scores, causal=True, return_lse=True, fused=True)
    g = torch.empty(shape, device="cuda", dtype=dtype).normal_()
    (d_scores,) = torch.autograd.grad(p, scores, g)
    rows = [(b, h, i) for b, h in ((0, 0), (1, 1), (2, 0), (2, 1)) for i in (0, 1, 9999, 19999)]
    for b, h, i in rows:
        row = (b, h, slice(i, i + 1))
        mask = torch.arange(20000, device="cuda")[None] > i
        results = p[row], lse[row], g[row], d_scores[row]
        oracle.assert_row(scores[row], *results, f"{b, h, i}", mask=mask)
    for b in range(3):
        for h in range(2):
            assert (p[b, h].sum(-1, dtype=torch.float32) - 1).abs().max() < 0.02
            for result in (p, d_scores):
                assert result[b, h, :10000, 10000:].count_nonzero() == 0


@gpu
@pytest.mark.parametrize("case", ["plain", "columns", "mask", "bias", "causal", "sink and window"])
def test_memory(case):
    shape = (2, 4, 1024, 2048)
    scores = normal(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
    g = oracle.random_like(scores, 1)
    arguments = {
        "plain": {},
        "columns": {"dim": 2},
        "mask": {"mask": coin(2, 1, 1024, 2048, device="cuda").expand(shape)},
        "bias": {"bias": normal(2048, device="cuda", dtype=torch.bfloat16).expand(shape)},
        "causal": {"causal": True},
        "sink and window": {"sink": torch.zeros(4, device="cuda"), "window": (100, 5)},
    }[case]

    def run():
        p = megasoftmax.softmax(scores, scale=0.5, fused=True, **arguments)
        torch.autograd.grad(p, scores, g)
        # `grad` may return before autograd's thread has let go of the graph. That thread does so
        # before it takes another one.
        torch.autograd.grad(small.clone(), small)

    small = torch.zeros((), device="cuda", requires_grad=True)
    run()
    gc.collect()  # what other tests have left
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    output = scores.numel() * scores.element_size()
    peak = torch.cuda.max_memory_allocated() - before
    slack = 2**18
    assert 2 * output - slack <= peak <= 2 * output + slack, f"{peak / output:.3f} outputs"
    assert torch.cuda.memory_allocated() - before < slack


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drops", [False, True])
@of_columns(13, 64, 1000, 1024, on_gpu=(9001, 40000))
@pytest.mark.parametrize("bias_shape", ["1h1k", "1hqk", "b11k", "k"])
@pytest.mark.parametrize("sinks", [1, 3])
def test_the_same_call_gives_the_same_bits(dtype, drops, columns, bias_shape, sinks, device):
    batch, queries = (16, 33) if device == "cuda" else (2, 5)
    sizes = {"1": 1, "b": batch, "h": 3, "q": queries, "k": columns}
    scores = normal(batch, 3, queries, columns, device=device, dtype=dtype)
    bias = normal(*(sizes[s] for s in bias_shape), device=device, dtype=dtype, seed=2)
    options = {"bias": bias.requires_grad_(), "causal": True, "scale": 0.7}
    options["sink"] = normal(sinks, device=device, seed=3).requires_grad_()
    options["mask"] = coin(batch, 1, queries, columns, device=device)
    options |= dropped(scores) if drops else {}
    first, *others = (check(scores, **options) for _ in range(3))
    assert all(bits_equal(a, b) for again in others for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@of_columns(13, 64, 1000, 1001, 6000, on_gpu=(40000,))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sink", [None, 0.5])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    dtype, columns, masked, causal, sink, device
):
    scores = normal(6, 3, 4, columns, device=device, dtype=dtype)
    mask = coin(6, 1, 4, columns, device=device) if masked else None
    g = oracle.random_like(scores, 1)

    def run(batches):
        rows = None if mask is None else mask[batches]
        options = {"scale": 0.7, "mask": rows, "causal": causal, "sink": sink}
        return results_of(scores[batches], g[batches], **options)

    parts = [slice(0, 1), slice(0, 2), slice(0, 5)]
    if columns % 8 == 0:  # else where rows start in memory depends on the slice
        parts += [slice(3, 4), slice(2, 6)]
    check_parts(run, slice(None), parts)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("variant", "columns"),
    [
        *(("plain", 2**power) for power in range(12, 21)),
        *(("plain", columns) for columns in (1536, 3072, 20000, 20001, 50257)),
        *((variant, 20000) for variant in ("mask", "bias", "gradient of bias", "causal", "sink")),
        *(("softcap", columns) for columns in (512, 3072, 4096, 20000, 20001, 50257, 2**18)),
        *(("dropout", columns) for columns in (512, 1024, 4096, 20001, 50257, 2**18)),
    ],
)
def test_bits_of_long_rows_do_not_depend_on_the_number_of_rows(variant, columns, dtype):
    """Alone and among others, rows lie differently over blocks, clusters and the GPU."""
    shape = (300, 1, 2 if variant == "causal" else 1, columns)
    scores = normal(*shape, device="cuda", dtype=dtype)
    g = normal(*shape, device="cuda", dtype=dtype, seed=1)
    of_rows = {}  # arguments that are cut with the rows
    if variant == "mask":
        of_rows["mask"] = coin(*shape, device="cuda")
    elif variant.endswith("bias"):
        of_rows["bias"] = normal(*shape, device="cuda", dtype=dtype, seed=2)
    h = oracle.random_like(scores[..., 0].float(), 3)
    seed = torch.tensor([5], device="cuda")

    def run(batches):
        arguments = {name: tensor[batches].clone() for name, tensor in of_rows.items()}
        arguments |= {"scale": 0.7, "causal": variant == "causal", "seed": seed}
        arguments["sink"] = 0.5 if variant == "sink" else None
        arguments["softcap"] = 4.0 if variant == "softcap" else None
        arguments["dropout"] = 0.3 if variant == "dropout" else 0.0
        learns = variant == "gradient of bias"
        rows = (scores[batches].clone(), g[batches], h[batches])
        return results_of(*rows, learns_bias=learns, **arguments)

    check_parts(run, slice(300), [slice(1), slice(8), slice(64)])


@gpu
@pytest.mark.parametrize(
    ("rows", "columns", "few"),
    [
        *((70, 600_000, 3), (40, 1_000_003, 16), (33, 2**21, 32), (5, 2**23 + 1, 2)),
        (3, 20_000_000, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_very_long_rows_have_the_bits_of_few_in_every_turn(rows, columns, few, dtype):
    """Shared memory keeps some of them at a time, and of the longest ones a part."""
    scores = normal(rows, columns, device="cuda", dtype=dtype)
    g = normal(rows, columns, device="cuda", dtype=dtype, seed=1)

    def run(part):
        return results_of(scores[part].clone(), g[part], scale=0.7)

    # Where rows begin in memory must not depend on the slice.
    ends = [few, rows] if columns % 8 == 0 else [few]
    many = check_parts(run, slice(0, rows), [slice(end - few, end) for end in ends])
    row = rows - 1  # of the last turn
    x, y = scores[row].double() * 0.7, g[row].double()
    returned = many[0][row].double()
    dx = 0.7 * returned * (y - (returned * y).sum())
    for got, exact in ((returned, x.softmax(-1)), (many[2][row].double(), dx)):
        assert (got - exact).norm() <= oracle.TOLERANCE[dtype] * exact.norm()
    torch.testing.assert_close(many[1][row].double(), x.logsumexp(-1), rtol=1e-6, atol=1e-6)


@gpu
@pytest.mark.parametrize("columns", [300_001, 1_500_000])
@pytest.mark.parametrize("masked", [False, True])
def test_very_long_rows_of_ragged_lengths_have_persistent_blocks(columns, masked):
    """Some blocks and warps have nothing of a row, and some rows show nothing."""
    rows, dtype = 40, torch.float16
    scores = normal(1, 1, rows, columns, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(0)
    end = torch.randint(columns, (1, 1, rows), device="cuda", generator=generator)
    end[..., 3] = 0
    end[..., 7:11] = 1000
    end[..., 20] = columns
    mask = coin(1, 1, 1, columns, device="cuda") if masked else None
    check(scores, visible=(end // 3, end), mask=mask)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vectors", [328, 384, 400])
def test_many_masked_rows_have_the_bits_of_few(vectors, dtype):
    """Many have a warp each, few a block."""
    scores = normal(2100, vectors * _pack(dtype), device="cuda", dtype=dtype)
    mask = coin(*scores.shape, device="cuda")
    many, *_ = check(scores, mask=mask)
    few = megasoftmax.softmax(scores[:100].clone(), mask=mask[:100].clone(), fused=True)
    assert torch.equal(many[:100], few)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [33, 60, 127])
def test_tiles_of_many_tiny_rows(columns, dtype):
    """A tile of many rows has more than its block takes at a time."""
    check(normal(200_000, columns, device="cuda", dtype=dtype))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "columns", [*(2**n for n in (11, 13, 14, 16, 17)), 3072, 6001, 20003, 32000, 32767]
)
def test_contiguous_rows_have_the_bits_of_parts_of_longer_rows(dtype, columns):
    """They have kernels of their own, which cut long rows as others do."""
    wide = normal(5, columns + 64, device="cuda", dtype=dtype)
    wide[0, columns // 3] = NAN
    wide[1] = -INF
    wide[2, : columns // 2] = -INF
    wide[3, columns - 1] = INF
    part = wide[:, :columns]
    for rows in (2, 5):  # a single row would be kContiguous in either tensor
        for call in ({}, {"scale": -0.3, "dtype": torch.float32}, {"softcap": 1.5}):
            results = [
                megasoftmax.softmax(scores, return_lse=True, fused=True, **call)
                for scores in (part[-rows:].clone(), part[-rows:])
            ]
            for plain, other in zip(*results, strict=True):
                assert torch.equal(plain.nan_to_num(-1.0), other.nan_to_num(-1.0))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [128, 1024, 1031, 3072, 20000])
def test_limits_that_exclude_nothing_leave_empty_rows_0(columns, dtype):
    """Kernels of contiguous rows take them."""
    scores = normal(2, 8, 1, columns, device="cuda", dtype=dtype)
    scores[0, ::3] = -INF
    for limits in ({"causal": True}, {"window": (columns, -1)}):
        probabilities = check(scores, **limits)[0]
        assert (probabilities[0, ::3] == 0).all()


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [9, 2101])
@pytest.mark.parametrize(
    "columns", [24, 40, 56, 64, 72, 120, 136, 264, 513, 521, 1023, 1024, 1031, 2047, 2055]
)
def test_contiguous_rows(columns, rows, dtype):
    """Whole vectors and, at both ends of ragged rows, single elements: some rows need these."""
    for scale in (0.7, -0.7):
        scores = normal(rows, columns, device="cuda", dtype=dtype)
        scores[0, 0] = scores[1, -1] = scores[2, :9] = scores[3, -9:] = 30 / scale
        scores[4, 1:] = scores[5, :-1] = -INF / scale
        scores[6] = -INF / scale
        scores[7, 0] = scores[8, -1] = NAN
        g = oracle.random_like(scores, 1)
        g[4, -1] = INF  # the probability is 0
        check(scores, g=g, scale=scale)


@gpu
@pytest.mark.parametrize("variant", ["plain", "ragged", "ranges", "mask"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_that_blocks_take_in_turn(variant, dtype):
    """Backward, blocks copy the next row while they sum one: it must not disturb rows of other
    lengths. Forward, the clusters of this length have a row each."""
    rows, columns = 900, 7500 * _pack(dtype) - (3 if variant == "ragged" else 0)
    scores = normal(1, 1, rows, columns, device="cuda", dtype=dtype)
    g = oracle.random_like(scores, 1)
    generator = torch.Generator("cuda").manual_seed(2)
    options = {"generator": generator, "device": "cuda"}
    first, length = (torch.randint(columns, (1, 1, rows), **options) for _ in range(2))

    def run(some):
        arguments = {}
        if variant == "ranges":
            arguments["visible"] = (first[..., some], (first + length)[..., some])
        elif variant == "mask":
            arguments["mask"] = g[:, :, some] > 0.5
        return results_of(scores[:, :, some].clone(), g[:, :, some], **arguments)

    # As many run at a time. Rows that begin in the same place of a line have the same bits.
    parts = [slice(start, start + 64) for start in range(0, rows, 64)]
    check_parts(run, slice(rows), parts, dim=2)


@gpu
@pytest.mark.parametrize("columns", [300_000, 2_000_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_row_that_begins_with_nothing(columns, dtype):
    """Units, blocks and rounds of copies in which every score is -inf add nothing."""
    scores = normal(2, columns, device="cuda", dtype=dtype)
    scores[0, : columns * 3 // 4] = -torch.inf
    scores[1, : columns - 1] = -torch.inf
    check(scores)
    p = softmax_on("cuda")(scores)
    assert p[1, -1] == 1
    assert not p[1, :-1].any()


@gpu
def test_a_row_behind_two_to_the_31_elements_has_the_bits_of_one_alone():
    rows, columns = 2**16 + 3, 2**15 + 8
    scores = torch.zeros(rows, columns, device="cuda", dtype=torch.float16)
    last = normal(1, columns, device="cuda", dtype=torch.float16)
    scores[-1] = last[0]
    softmax = softmax_on("cuda")
    p = softmax(scores)
    assert bits_equal(p[-1:], softmax(last))
    torch.testing.assert_close(p[0], torch.full_like(p[0], 1 / columns), rtol=1e-3, atol=1e-7)
