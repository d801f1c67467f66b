"""megasoftmax.softmax_topk against the oracle: every rule of the semantics, every edge of K."""

import ctypes
import functools
import math
from random import Random

import oracle
import oracle_topk
import pytest
import torch
from inputs import (
    DTYPES,
    DTYPES_OF_KERNELS,
    PLAIN_TOPK,
    acted_capability,
    bits_equal,
    coin,
    fused_on,
    normal,
)
from sanitize_cases import table_of

import megasoftmax
from megasoftmax.build import library
from megasoftmax.limits import kernel_limits
from megasoftmax.reference import topk as reference_topk

SHAPE = (2, 3, 5, 37)
INF, NAN = torch.inf, torch.nan
MAX_K = kernel_limits().topk["kMaxK"]
K_EDGES = [1, 2, 8, 16, 32, 33, 64, MAX_K - 1, MAX_K]

gpu = pytest.mark.gpu
topk_forward = torch.ops.megasoftmax.softmax_topk_forward.default
topk_backward = torch.ops.megasoftmax.softmax_topk_backward.default
topk_on = functools.partial(fused_on, megasoftmax.softmax_topk)


def check(logits, k, **arguments):
    function = topk_on(logits.device.type)
    if logits.dtype == torch.float64:  # not for the kernels
        function = megasoftmax.softmax_topk
    return oracle_topk.check(function, logits, k, **arguments)


# Data: random, and what a selection may stumble over


def _ramp(x):
    return torch.linspace(-3, 3, x.shape[-1], device=x.device).expand(x.shape).contiguous()


def _with(value, odds):
    return lambda x: x.masked_fill(coin(*x.shape, device=x.device.type, odds=odds, seed=5), value)


def _high_at_the_end(x):
    x = x.clone()
    x[..., -(x.shape[-1] // 3 + 1) :] += 8
    return x


DATA = {
    "random": lambda x: x,
    "ties": lambda x: (2 * x).round() / 2,
    "two values": lambda x: (x > 0.5).float(),
    "constant": torch.ones_like,
    "ascending": _ramp,
    "descending": lambda x: -_ramp(x),
    "ascending ties": lambda x: (4 * _ramp(x)).round() / 4,
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "high at the end": _high_at_the_end,
    "one visible": lambda x: torch.where(x == x.amax(-1, keepdim=True), x, -INF),
    "few visible": _with(-INF, 0.9),
    "some -inf": _with(-INF, 0.3),
    "some NaN": _with(NAN, 0.02),
    "some +inf": _with(INF, 0.02),
    "NaN and infinities": lambda x: _with(NAN, 0.3)(_with(INF, 0.3)(_with(-INF, 0.3)(x))),
    "all -inf": lambda x: torch.full_like(x, -INF),
    "all NaN": lambda x: torch.full_like(x, NAN),
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("data", DATA)
def test_data(data, dtype, device):
    for columns in (1, 3, 8, 37, 300, 1003):
        logits = DATA[data](normal(2, 4, columns, device=device)).to(dtype)
        for k in sorted({1, min(5, columns), min(33, columns), min(columns, MAX_K)}):
            check(logits, k, what=f"({columns} columns, k {k})")
            check(logits, k, scale=-0.6, renormalize=True, what=f"({columns}, k {k}, renormalised)")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", K_EDGES)
def test_edges_of_k(k, dtype, device):
    """Random rows and rows of few values, as long as K, a little longer, and longer."""
    for columns in (k, k + 1, 2 * k + 3, 8 * k + 5, 1024, 4099):
        if columns < k:
            continue
        logits = normal(3, columns, device=device, dtype=dtype)
        check(logits, k, what=f"({columns} columns)")
        check((2 * logits).round(), k, what=f"({columns} columns, ties)", lse_gradient=False)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", K_EDGES)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_long_rows(rows, k, dtype):
    for columns in (8192, 32000, 50257, 128256, 131072, 151936, 300001):
        count = min(rows, 1_000_000 // columns)
        logits = 2 * normal(count, columns, device="cuda", dtype=dtype)
        check(logits, k, what=f"({count} x {columns})")
        check(logits.sort(-1).values, k, what=f"({count} x {columns}, ascending)")
        check(logits.round(), k, what=f"({count} x {columns}, ties)", renormalize=True)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("rows", [3, 300])
def test_rows_that_fill_units_wherever_they_begin(rows, offset, dtype):
    for columns in (512, 1024, 2048, 4096, 8192, 16384, 131072):
        count = min(rows, 2_000_000 // columns)
        logits = normal(count, columns + 5, device="cuda", dtype=dtype)
        logits[:, offset + columns - 1] = 9  # the last of them
        check(logits[:, offset : offset + columns], 3, what=f"({count} x {columns})")


@gpu
@pytest.mark.parametrize("k", range(1, 17))
def test_tiles_of_few_rows(k):
    for columns in (8, 72, 520, 1032, 2048):
        if k <= columns:
            check(normal(37, columns, device="cuda", dtype=torch.bfloat16), k, what=f"{columns}")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", DATA)
def test_tiles_of_any_data(data, dtype):
    """Lists of every length, full and not, of rows of one lane and several, ragged and not."""
    for columns in (16, 24, 32, 64, 72, 128, 256, 520):
        logits = DATA[data](normal(150, columns, device="cuda")).to(dtype)
        for k in (1, 2, 3, 4, 6, 8, 11, 16):
            check(logits, k, what=f"({columns} columns, k {k})", lse_gradient=False)
        check(logits, 6, scale=-0.6, renormalize=True, what=f"({columns}, renormalised)")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2, 4, 6, 8, 16])
def test_tiles_of_different_rows(k, dtype):
    """Rows with more candidates than there is room for lie beside rows with few, and with NaN."""
    logits = normal(200, 64, device="cuda")
    logits[::3] = logits[::3].round()
    logits[::7] = 1
    logits[5::64, 9:] = -INF
    check(logits.to(dtype), k)
    logits[100, 63] = NAN
    check(logits.to(dtype), k)


@gpu
def test_gradient_in_a_row_with_nan_reads_no_mask_beside_it():
    logits = normal(4, 1001, device="cuda", dtype=torch.bfloat16)
    logits[1, 7] = NAN
    mask = coin(1001, 4, device="cuda").mT
    check(logits, 3, mask=mask)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 10, 100, 200])
@pytest.mark.parametrize("columns", [700, 70001])  # of the short ones most blocks see nothing
def test_every_regime_selects_the_same(columns, k, dtype):
    binary = ctypes.CDLL(str(library.load().path))
    logits = normal(5, columns, device="cuda", dtype=dtype)
    logits[1] = logits[1].round()
    logits[2, 1::7] = NAN
    logits[3] = -INF
    # Of few threads many groups have one large logit each: more groups than wait at a time.
    column = torch.arange(columns, device="cuda")
    is_large = (column % 8192 < 320) & (column % 8 == 0)
    logits[4, is_large] = -(9 + column[is_large] // 8192).to(dtype)  # the scale turns the signs
    given = (logits, k, -0.5, 0.0, None, None, False, dtype, False, *PLAIN_TOPK)
    wanted, indices, _ = topk_forward(*given)
    major, _ = acted_capability() or torch.cuda.get_device_capability()
    for regime, (name, *_) in enumerate(table_of("topk/limits.h", "kTopkRegimes")):
        if name.startswith("cluster") and major < 9:
            continue
        binary.megasoftmax_force_topk_regime(regime)
        try:
            found, where, _ = topk_forward(*given)
        finally:
            binary.megasoftmax_force_topk_regime(-1)
        assert torch.equal(where, indices), name
        torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("columns", [32001, 128256])
def test_a_vocabulary(columns, device):
    logits = normal(2, columns, device=device, dtype=torch.bfloat16)
    check(logits, 50, scale=1.25)
    check(logits, 50, mask=coin(columns, device=device, odds=0.9), renormalize=True)


@gpu
@pytest.mark.parametrize("columns", [2, 8, 61, 128, 1024])
def test_many_rows(columns):
    for rows in (1000, 70001):
        logits = normal(rows, columns, device="cuda", dtype=torch.bfloat16)
        check(logits, min(columns, 8), what=f"({rows} x {columns})")


@gpu
@pytest.mark.parametrize("columns", range(1, 70))
def test_every_short_length(columns):
    logits = normal(7, columns, device="cuda", dtype=torch.float16)
    for k in sorted({1, columns // 2 + 1, columns}):
        check(logits, k)


# Order


NANS = torch.tensor([0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)


@pytest.mark.parametrize(
    ("logits", "options", "indices"),
    [
        # Of equal rank in order of index.
        ([1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 1.0], {}, [1, 2, 4, 3, 5, 0, 6]),
        ([1.0, 3.0, 3.0, 2.0, 3.0, 2.0, 1.0], {"scale": -2.0}, [0, 6, 3, 5, 1, 2, 4]),
        # NaN of either sign and payload before infinity.
        ([1.0, INF, NAN, -INF, INF, -NAN, 5.0], {}, [2, 5, 1, 4, 6, 0, 3]),
        ([1.0, INF, NAN, -INF, INF, -NAN, 5.0], {"scale": -1.0}, [2, 5, 3, 0, 6, 1, 4]),
        ([INF, *NANS.view(torch.float32), 3.0], {}, [1, 2, 3, 4, 5, 0, 6]),
        # Visible -inf and what is excluded are equals.
        ([-INF, 5.0, -INF, 1.0, -INF, 7.0], {"mask": [1, 4, 5]}, [3, 0, 1, 2, 4, 5]),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_order(logits, options, indices, dtype, device):
    row = torch.tensor([logits], device=device).to(dtype)
    if "mask" in options:
        mask = torch.zeros(len(logits), dtype=torch.bool, device=device)
        mask[options["mask"]] = True
        options = {"mask": mask}
    _, found, *_ = check(row, len(logits), **options)
    assert found.tolist() == [indices]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_zeros_of_both_signs_are_equal(dtype, device):
    logits = torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0], device=device, dtype=dtype)
    for scale in (1.0, -1.0):
        _, indices = megasoftmax.softmax_topk(logits, 5, scale=scale)
        assert indices.tolist() == ([0, 1, 3, 4, 2] if scale > 0 else [2, 0, 1, 3, 4])


def test_scale_makes_no_ties(device):
    """Neighbours just below 2: three in four products with 1.1 round to the same float."""
    steps = torch.arange(64, device=device, dtype=torch.float32)
    logits = 2 - (steps + 1) * 2.0**-23
    assert (logits.flip(0) * 1.1).unique().numel() < 64
    _, indices = topk_on(device)(logits.flip(0), 64, scale=1.1)
    assert torch.equal(indices, torch.arange(63, -1, -1, device=device))
    _, indices = topk_on(device)(logits, 64, scale=-1.1)
    assert torch.equal(indices, torch.arange(63, -1, -1, device=device))


def test_logits_that_differ_less_than_probabilities_can(device):
    """In bfloat16 all of these have the same probability."""
    logits = normal(4, 256, device=device) * 1e-4
    p, indices, *_ = check(logits, 40, dtype=torch.bfloat16)
    assert (p == p[0, 0]).all()
    assert torch.equal(logits.gather(-1, indices), logits.sort(-1, descending=True).values[:, :40])


def test_probabilities_that_underflow_are_ordered_by_logits(device):
    logits = torch.linspace(-2000, 0, 500, device=device).repeat(2, 1)
    p, indices, *_ = check(logits, 256, scale=2.0)
    assert (p[:, -1] == 0).all()
    assert torch.equal(indices[0], torch.arange(499, 243, -1, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_decides_the_order(dtype, device):
    logits = normal(*SHAPE, device=device, dtype=dtype)
    for shape in (SHAPE, (1, 3, 1, 37), (37,), (5, 37), (2, 1, 5, 37), (3, 5, 1), (1,), ()):
        bias = normal(*shape, device=device, dtype=dtype, seed=2)
        for scale in (1.0, -0.7):
            check(logits, 7, scale=scale, bias=bias.requires_grad_(), what=f"(bias {shape})")
        check(logits, 7, scale=80**-0.5, bias=bias, renormalize=True)


def test_bias_is_added_with_one_rounding(device):
    """As a fused multiply-add does: rounding the product too would change the order."""
    logits, bias = (1 + 1e-3 * normal(4, 5000, device=device, seed=seed) for seed in (1, 2))
    _, indices, *_ = check(logits, 200, scale=0.7, bias=bias)
    twice = logits * 0.7 + bias
    order = twice.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :200]
    assert not torch.equal(order, indices.cpu())


def test_bias_of_zeros_changes_nothing_but_empty_rows(device):
    logits = normal(*SHAPE, device=device).round()
    logits[0, 1, 2] = -INF
    zeros = torch.zeros(37, device=device)
    p, indices = topk_on(device)(logits, 7, bias=zeros)
    plain, same = topk_on(device)(logits, 7)
    assert torch.equal(indices, same)
    assert (p[0, 1, 2] == 0).all()
    assert plain[0, 1, 2].isnan().all()
    plain[0, 1, 2] = 0
    torch.testing.assert_close(p, plain)


# Masks and rows in which something is missing


@pytest.mark.parametrize("shape", [(), (37,), (5, 37), (3, 5, 1), (2, 1, 1, 37), (1, 3, 5, 37)])
def test_mask_broadcasts(shape, device):
    logits = normal(*SHAPE, device=device)
    mask = coin(*shape, device=device) if shape else torch.tensor(False, device=device)
    bias = normal(3, 1, 37, device=device, seed=2).requires_grad_()
    check(logits, 9, mask=mask)
    check(logits, 9, mask=mask, bias=bias, scale=-2.0)
    check(logits, 9, mask=mask, bias=bias, renormalize=True)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e4])
def test_excluded_is_zero_whatever_stands_there(value, dtype, renormalize, device):
    """Also where it is selected, because fewer than K are left."""
    mask = coin(2, 1, 5, 37, device=device, odds=0.9)
    excluded = mask.expand(SHAPE)
    clean = normal(*SHAPE, device=device, dtype=dtype)
    bias = normal(*SHAPE, device=device, dtype=dtype, seed=2)
    dirty, dirty_bias = clean.masked_fill(excluded, value), bias.masked_fill(excluded, value)
    k = 12
    g = normal(*SHAPE[:-1], k, device=device, dtype=dtype, seed=3)
    arguments = {"mask": mask, "renormalize": renormalize}
    for extra, dirty_extra in (({}, {}), ({"bias": bias}, {"bias": dirty_bias.requires_grad_()})):
        expected, indices = topk_on(device)(clean, k, **arguments, **extra)
        at_excluded = excluded.gather(-1, indices)
        assert at_excluded.any()
        dirty_g = g.masked_fill(at_excluded, value)
        p, found, *rest = check(dirty, k, g=dirty_g, **arguments, **dirty_extra)
        assert torch.equal(found, indices)
        assert bits_equal(p, expected)
        assert (p[at_excluded] == 0).all()
        assert all(gradient.isfinite().all() for gradient in rest[1:])


@pytest.mark.parametrize("left", [0, 1, 5, 6, 7])
def test_fewer_than_k_left(left, device):
    """What is left comes first; what is excluded follows, by index."""
    logits = normal(4, 37, device=device)
    mask = torch.ones(4, 37, dtype=torch.bool, device=device)
    visible = torch.tensor([30, 2, 19, 7, 25, 11, 36], device=device)[:left]
    mask[:, visible] = False
    p, indices, lse, *_ = check(logits, 6, mask=mask)
    shown = min(left, 6)
    assert set(indices[0, :shown].tolist()) <= set(visible.tolist())
    rest = [i for i in range(37) if i not in visible.tolist()]
    assert indices[0, shown:].tolist() == rest[: 6 - shown]
    assert (p[:, shown:] == 0).all()
    assert (lse == -INF).all() == (left == 0)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("how", ["plain", "mask", "bias", "scores with a mask"])
def test_row_with_nothing_left(how, renormalize, device):
    logits = normal(3, 9, device=device)
    arguments = {"renormalize": renormalize}
    if how in ("plain", "scores with a mask"):
        logits[1] = -INF
    if how == "bias":
        arguments["bias"] = torch.zeros(3, 9, device=device)
        arguments["bias"][1] = -INF
        arguments["bias"].requires_grad_()
    if how in ("mask", "scores with a mask"):
        arguments["mask"] = torch.zeros(3, 9, dtype=torch.bool, device=device)
        arguments["mask"][1] = how == "mask"
    p, indices, lse, d_logits, *_ = check(logits, 4, **arguments)
    assert indices[1].tolist() == [0, 1, 2, 3]
    assert lse[1] == -INF
    if how == "plain":
        assert p[1].isnan().all()
    else:
        assert (p[1] == 0).all()
        assert (d_logits[1] == 0).all()


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["logits", "bias"])
def test_visible_nan_or_infinity(where, value, renormalize, device):
    logits, bias = normal(3, 37, device=device), normal(3, 37, device=device, seed=2)
    {"logits": logits, "bias": bias}[where][1, 20] = value
    mask = coin(3, 37, device=device, odds=0.9)
    mask[1, 20] = False
    arguments = {"bias": bias.requires_grad_(), "renormalize": renormalize}
    p, indices, lse, *_ = check(logits, 9, **arguments)
    assert indices[1, 0] == 20
    assert p[1].isnan().all()
    p, indices, lse, d_logits, _ = check(logits, 9, mask=mask, **arguments)
    excluded = mask[1].gather(-1, indices[1])
    assert excluded.any()
    assert (p[1][excluded] == 0).all()
    assert p[1][~excluded].isnan().all()
    assert lse.isnan().tolist() == [False, True, False]
    assert (d_logits[1][mask[1]] == 0).all()


# Scale, types, shapes


@pytest.mark.parametrize("scale", [-1.0, -0.37, 80**-0.5, 3, 1e-3, 12.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(scale, dtype, device):
    logits = normal(*SHAPE, device=device, dtype=dtype)
    check(logits, 6, scale=scale)
    check(logits, 6, scale=scale, renormalize=True, mask=coin(*SHAPE, device=device))


def test_scale_of_zero_takes_the_first(device):
    logits = normal(*SHAPE, device=device)
    mask = coin(*SHAPE, device=device)
    _, indices, *_ = oracle_topk.check(megasoftmax.softmax_topk, logits, 4, scale=0.0)
    assert (indices == torch.arange(4, device=device)).all()
    oracle_topk.check(megasoftmax.softmax_topk, logits, 4, scale=0.0, mask=mask)


@pytest.mark.parametrize("huge", [3e38, -3e38])
def test_scale_of_huge_logits_does_not_overflow(huge, device):
    logits = torch.full((3, 700), -abs(huge), device=device, dtype=torch.bfloat16)
    logits[:, 1] = logits[:, 600] = huge
    expected = (logits.double() * 3).softmax(-1)
    p, indices = topk_on(device)(logits, 3, scale=3.0)
    assert indices[0].tolist() == ([1, 600, 0] if huge > 0 else [0, 1, 2])
    oracle.assert_matches(p, expected.gather(-1, indices), torch.bfloat16)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
@pytest.mark.parametrize("scale", [1.0, 0.125, 0.7, -0.7])
def test_offset_of_all_logits(offset, scale, device):
    """Gradients too: what is kept of a row must not be the log-sum-exp alone, nor a rounded max."""
    for columns in (9, 1003):
        logits = normal(4, columns, device=device) + offset
        check(logits, 5, scale=scale)
        check(logits, 5, scale=scale, mask=coin(4, columns, device=device), lse_gradient=False)


@pytest.mark.parametrize(("dtype", "out"), DTYPES_OF_KERNELS)
@pytest.mark.parametrize("bias_dtype", DTYPES)
def test_types(dtype, out, bias_dtype, device):
    logits = normal(*SHAPE, device=device, dtype=dtype)
    check(logits, 9, dtype=out)
    check(logits, 9, dtype=out, renormalize=True, mask=coin(*SHAPE, device=device))
    bias = normal(1, *SHAPE[1:], device=device, dtype=bias_dtype, seed=2).requires_grad_()
    check(logits, 5, dtype=out, bias=bias)
    check(logits[0, 0, 0], 4, dtype=out, renormalize=True)
    check(logits[None], 4, dtype=out, renormalize=True)


STRIDES = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "rows apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "odd offset": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "every third": lambda x: x.repeat_interleave(3, -1)[..., ::3],
    "heads and rows swapped": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one row for all": lambda x: x[..., :1, :].expand(x.shape),
    "one column for all": lambda x: x[..., :1].expand(x.shape),
    "batch 0 for all": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides(strides, dtype, device):
    change = STRIDES[strides]
    for columns in (37, 1030):
        shape = (*SHAPE[:-1], columns)
        logits = change(normal(*shape, device=device, dtype=dtype))
        bias = change(normal(*shape, device=device, dtype=dtype, seed=2))
        mask = change(coin(*shape, device=device))
        g = change(normal(*SHAPE[:-1], 8, device=device, dtype=dtype, seed=3))
        check(logits, 8, g=g)
        check(logits, 8, g=g, mask=mask, bias=bias, renormalize=True)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_no_k(dtype, renormalize, device):
    logits = normal(*SHAPE, device=device, dtype=dtype)
    p, indices, _, d_logits = check(logits, 0, renormalize=renormalize)
    assert p.shape == indices.shape == (2, 3, 5, 0)
    assert (d_logits != 0).all()
    check(logits, 0, mask=coin(*SHAPE, device=device), bias=logits.clone().requires_grad_())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 3, 4)])
def test_nothing_at_all(shape, device):
    logits = torch.zeros(shape, device=device)
    for k in sorted({0, min(2, shape[-1])}):
        p, indices, lse, d_logits = check(logits, k)
        assert p.shape == indices.shape == (*shape[:-1], k)
        assert (lse == -INF).all()
        assert d_logits.shape == shape


@pytest.mark.parametrize("columns", [1, 5, 37])
def test_all_of_a_row(columns, device):
    """K = V: the whole softmax, sorted; renormalising changes nothing."""
    logits = normal(6, columns, device=device)
    p, indices, *_ = check(logits, columns)
    again = torch.zeros_like(logits).scatter(-1, indices, p)
    torch.testing.assert_close(again, logits.softmax(-1))
    renormalised, *_ = check(logits, columns, renormalize=True)
    torch.testing.assert_close(renormalised, p)


def test_more_than_kernels_take_falls_back(device):
    logits = normal(3, 700, device=device)
    oracle_topk.check(megasoftmax.softmax_topk, logits, MAX_K + 1)
    oracle_topk.check(megasoftmax.softmax_topk, logits, 700, renormalize=True)


# Gradients


def test_infinite_gradient_where_the_probability_is_zero(device):
    logits = normal(2, 3, 37, device=device)
    logits[..., 5:] = -INF
    for renormalize in (False, True):
        g = normal(2, 3, 9, device=device, seed=2)
        g[..., 5:] = torch.tensor([INF, -INF, NAN, INF], device=device)
        *_, d_logits = check(logits, 9, g=g, renormalize=renormalize)
        assert d_logits.isfinite().all()
        assert (d_logits[..., 5:] == 0).all()


def test_nan_gradient_of_a_selected_entry_spreads(device):
    g = normal(2, 3, 9, device=device, seed=2)
    g[1, 2, 7] = NAN
    *_, d_logits = check(normal(2, 3, 37, device=device), 9, g=g)
    assert d_logits[1, 2].isnan().all()
    assert d_logits.isnan().sum() == 37
    options = {"g": g, "renormalize": True, "lse_gradient": False}
    _, indices, _, d_logits = check(normal(2, 3, 37, device=device), 9, **options)
    assert d_logits[1, 2][indices[1, 2]].isnan().all()
    assert d_logits.isnan().sum() == 9


def test_nothing_is_modified(device):
    logits = normal(*SHAPE, device=device).requires_grad_()
    bias = normal(*SHAPE, device=device, seed=2).requires_grad_()
    mask = coin(*SHAPE, device=device)
    g, h = normal(*SHAPE[:-1], 7, device=device, seed=3), normal(*SHAPE[:-1], device=device, seed=4)
    tensors = (logits, bias, mask, g, h)
    before = [tensor.detach().clone() for tensor in tensors]
    topk = functools.partial(topk_on(device), logits, 7, bias=bias, mask=mask, return_lse=True)
    for renormalize in (False, True):
        p, _, lse = topk(renormalize=renormalize)
        torch.autograd.grad((p, lse), (logits, bias), (g, h))
        torch.testing.assert_close(tensors, before, rtol=0, atol=0)


def test_same_bits_every_time(device):
    logits = normal(16, 5003, device=device, dtype=torch.bfloat16).round().requires_grad_()
    found = []
    for _ in range(3):
        p, indices, lse = topk_on(device)(logits, 40, scale=0.3, return_lse=True)
        (d_logits,) = torch.autograd.grad((p, lse), logits, (p.detach(), lse.detach()))
        found.append((p, indices, lse, d_logits))
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert bits_equal(a, b)


# The operators by themselves


def forward_op(logits, k, *, candidates=False, **given):
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    options = (given.get("scale", 1.0), 0.0, given.get("mask"), given.get("bias"))
    rest = (given.get("renormalize", False), given.get("dtype", dtype), candidates)
    return topk_forward(logits, k, *options, *rest, *PLAIN_TOPK)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("scale", [1.0, -0.7])
def test_candidates_are_z(dtype, scale, device):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("the operator takes float64 on CPUs only")
    logits = normal(*SHAPE, device=device, dtype=dtype)
    bias = normal(*SHAPE, device=device, dtype=dtype, seed=2)
    mask = coin(*SHAPE, device=device, odds=0.9)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    for arguments in ({}, {"bias": bias}, {"mask": mask}, {"mask": mask, "bias": bias}):
        z, indices, statistics = forward_op(logits, 9, candidates=True, scale=scale, **arguments)
        expected = oracle_topk.softmax_topk(logits, 9, scale=scale, **arguments)
        assert torch.equal(indices.cpu(), expected.indices)
        wanted = expected.z.masked_fill(expected.dense.excluded, -INF).gather(-1, expected.indices)
        torch.testing.assert_close(z.cpu(), wanted.to(computed), rtol=3e-7, atol=1e-7)
        _, _, same = forward_op(logits, 9, scale=scale, **arguments)
        assert bits_equal(statistics, same)


@pytest.mark.parametrize("scale", [1.0, 0.7, -0.7])
@pytest.mark.parametrize("offset", [0.0, 1e4, -3e5])
def test_statistics(scale, offset, device):
    """The first number is a logit, unrounded, and the second relative to it."""
    logits = normal(4, 1003, device=device) + offset
    _, _, statistics = forward_op(logits, 3, scale=scale)
    assert statistics.shape == (3, 4)
    assert statistics.dtype == torch.float32
    maximum, log_sum, lse = statistics.double()
    z = logits.double() * torch.tensor(scale, device=device).double()
    assert bits_equal(maximum.float(), (logits if scale > 0 else -logits).amax(-1))
    p = (z - z.amax(-1, keepdim=True) - log_sum.unsqueeze(-1)).exp()
    torch.testing.assert_close(p.sum(-1), torch.ones_like(lse), rtol=3e-6, atol=0)
    torch.testing.assert_close(lse, z.logsumexp(-1), rtol=3e-7, atol=1e-6)


def test_statistics_of_special_rows(device):
    logits = normal(5, 9, device=device)
    logits[0], logits[1, 3], logits[2, 4], logits[3, 1:] = -INF, NAN, INF, -INF
    mask = torch.zeros(5, 9, dtype=torch.bool, device=device)
    mask[4] = True
    for k in (1, 9):
        _, _, statistics = forward_op(logits, k, mask=mask)
        assert (statistics[:, [0, 4]] == -INF).all()
        assert statistics[:, [1, 2]].isnan().all()
        assert statistics[:, 3].tolist() == [logits[3, 0], 0, logits[3, 0]]


@pytest.mark.parametrize("renormalize", [False, True])
def test_backward_of_a_shard(renormalize, device):
    """Indices outside count in the sum over K, and are not written."""
    logits, k = normal(5, 60, device=device), 9
    bias, mask = normal(5, 60, device=device, seed=2), coin(5, 60, device=device)
    g, h = normal(5, k, device=device, seed=3), normal(5, device=device, seed=4)
    for lse_gradient in (None, h):
        given = {"bias": bias, "mask": mask, "scale": 0.7, "renormalize": renormalize}
        p, indices, statistics = forward_op(logits, k, **given)

        def backward(begin, end, p=p, i=indices, s=statistics, h=lse_gradient):
            part = slice(begin, end)
            tensors = (g, p, i - begin, h, logits[:, part], s)
            limits = (mask[:, part], bias[:, part], renormalize)
            return topk_backward(*tensors, 0.7, 0.0, *limits, False, torch.float32, None, False)

        whole = backward(0, 60)
        parts = torch.cat([backward(0, 13), backward(13, 14), backward(14, 60)], -1)
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-7)


def test_oracle_agrees_with_autograd():
    """Against torch's own derivatives of a dense formula."""
    logits = normal(*SHAPE, device="cpu").double().requires_grad_()
    bias = normal(*SHAPE, device="cpu", seed=2).double()
    mask = coin(*SHAPE, device="cpu")
    z = (logits * 0.7 + bias).masked_fill(mask, -INF)
    indices = z.sort(dim=-1, descending=True, stable=True).indices[..., :6]
    for renormalize in (False, True):
        p = (z.gather(-1, indices) if renormalize else z).softmax(-1)
        p = p if renormalize else p.gather(-1, indices)
        lse = z.logsumexp(-1)
        g, h = oracle.random_like(p, 5), oracle.random_like(lse, 6)
        (wanted,) = torch.autograd.grad((p, lse), logits, (g, h), retain_graph=True)
        options = {"scale": 0.7, "mask": mask, "bias": bias, "renormalize": renormalize}
        expected = oracle_topk.softmax_topk(logits, 6, **options)
        assert torch.equal(expected.indices, indices)
        torch.testing.assert_close(expected.probabilities, p.detach())
        torch.testing.assert_close(expected.dense.lse, lse.detach())
        found = oracle_topk.gradient_of_z(expected, g, h, renormalize=renormalize)
        torch.testing.assert_close(0.7 * found.value, wanted)


@pytest.mark.parametrize("most_sorted", [0, 256])
@pytest.mark.parametrize("longest_by_keys", [0, 1024])
def test_selection_on_a_cpu_is_that_of_a_stable_sort(
    longest_by_keys: int, most_sorted: int, monkeypatch
) -> None:
    """torch.topk takes any of equals, also at the end of the K; these are put in order."""
    monkeypatch.setattr(reference_topk, "_LONGEST_BY_KEYS", longest_by_keys)
    monkeypatch.setattr(reference_topk, "_MOST_SORTED", most_sorted)
    random = Random(0)
    for _ in range(2000):
        shape = random.choice([(7,), (3, 9), (2, 3, 17), (5, 64), (0, 4), (3, 1), (2, 300)])
        dtype = random.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        values = torch.randint(-2, random.choice([0, 3, 50, 2000]), shape).to(dtype)
        if random.random() < 0.5:
            planted = random.choice([math.nan, math.inf, -math.inf, -0.0])
            values = values.masked_fill(torch.rand(shape) < 0.3, planted)
            values = values.copysign(torch.randn(shape))  # a NaN has a sign, too
        k = random.randint(0, shape[-1])
        ordered = values.sort(stable=True, dim=-1, descending=True).indices[..., :k]
        assert reference_topk.select_on_cpu(values, k).equal(ordered)
        if dtype.itemsize > 2:
            assert reference_topk.select(values, k).equal(ordered)


def test_equals_beyond_16_bits_of_columns() -> None:
    """Keys of 16-bit numbers hold a column in 16 bits; longer rows take keys of 64."""
    values = torch.zeros(2, 2**16 + 3, dtype=torch.bfloat16)
    values[0, -1] = values[1, 2**16] = 1
    expected = torch.tensor([[2**16 + 2, 0, 1], [2**16, 0, 1]])
    assert reference_topk.select_on_cpu(values, 3).equal(expected)
    assert megasoftmax.softmax_topk(values, 3)[1].equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 8), (5, 64), (3, 300), (2, 2000), (9,)])
def test_short_way_computes_what_the_record_does(shape, dtype) -> None:
    """Options that change nothing take a call the longer way."""
    logits = torch.randn(shape).to(dtype)
    logits[..., 3] = logits[..., 1]
    for planted in (None, math.inf, -math.inf, math.nan):
        if planted is not None:
            logits[..., 5] = planted
        for k in (1, 4, shape[-1]):
            values, indices = megasoftmax.softmax_topk(logits, k)
            expected, order = megasoftmax.softmax_topk(logits, k, fused=False)
            assert indices.equal(order)
            assert values.dtype == expected.dtype == dtype
            torch.testing.assert_close(values, expected, equal_nan=True)
            assert all(each.is_contiguous() for each in (values, indices))


def test_short_way_keeps_the_type_under_autocast() -> None:
    logits = torch.randn(4, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu"):
        values, _ = megasoftmax.softmax_topk(logits, 4)
    assert values.dtype == torch.bfloat16
