"""softmax over a dimension that is not the last, against the oracle; the ops of columns."""

import functools

import op_checks
import oracle
import pytest
import torch
from inputs import DTYPES, DTYPES_OF_KERNELS, normal

import megasoftmax
from megasoftmax import dispatch, why_not_fused

INF, NAN = torch.inf, torch.nan

gpu = pytest.mark.gpu


class Path:
    """A device, and how softmax runs there."""

    def __init__(self, device, fused):
        self.device, self.fused = device, fused
        self.normal = functools.partial(normal, device=device)

    def softmax(self, scores, **arguments):
        return megasoftmax.softmax(scores, **({"fused": self.fused} | arguments))

    def coin(self, *shape, seed=1):
        return self.normal(*shape, seed=seed) < -0.5

    def check(self, scores, dim, **arguments):
        """Against the oracle, which is given a view with `dim` last; so are the results."""
        rank = scores.dim()
        shapes = {}
        for name in ("mask", "bias"):
            if arguments.get(name) is not None:
                tensor = arguments[name]
                shapes[name] = tensor.shape
                arguments[name] = tensor[(None,) * (rank - tensor.dim())].movedim(dim, -1)

        def function(moved, **given):
            for name, shape in shapes.items():
                given[name] = given[name].movedim(-1, dim).reshape(shape)
            original = moved.movedim(-1, dim)
            p, lse = self.softmax(original, dim=dim, **given)
            assert p.shape == original.shape
            assert p.is_contiguous()
            assert lse.is_contiguous()
            return p.movedim(dim, -1).contiguous(), lse

        what = f"({tuple(scores.shape)}, dim {dim}, {scores.dtype})"
        return oracle.check(function, scores.movedim(dim, -1), what=what, **arguments)


@pytest.fixture(params=["reference", "operators", pytest.param("cuda", marks=gpu)])
def path(request, monkeypatch):
    """In plain torch, through the CPU implementations of the ops, and in the kernels."""
    torch.compiler.reset()
    if request.param == "operators":
        for name in ("_device", "_compiled_part"):
            monkeypatch.setattr(dispatch, name, lambda scores: None)
        monkeypatch.setattr(dispatch, "_dtype", lambda name, dtype: None)
    device = "cuda" if request.param == "cuda" else "cpu"
    return Path(device, fused=request.param != "reference")


# Every dimension


OF_KERNELS = [*DTYPES_OF_KERNELS, *((dtype, None) for dtype in DTYPES)]
SHAPES = [(37,), (5, 37), (37, 5), (8, 8), (3, 17, 9), (1, 33, 1), (4, 1, 6), (2, 64, 16)]
SHAPES += [(2, 3, 5, 7), (1, 1, 9, 13), (3, 1, 31, 1), (2, 1, 2, 1, 9)]
LARGE = [(1, 20011, 3), (2, 5000, 40), (1, 100003, 1000), (3, 1024, 1024), (70001, 3, 5)]
LARGE += [(2, 9, 70001), (70001, 2, 2), (1, 2, 5_000_011)]


@pytest.mark.parametrize(
    ("shape", "dims", "dtypes", "options"),
    [
        *(
            (shape, range(-len(shape), len(shape)), [(dtype, None)], {"scale": 0.7})
            for shape in SHAPES
            for dtype in (*DTYPES, torch.float64)
        ),
        *(
            ((3, length, inner), (1,), [(dtype, None) for dtype in DTYPES], {"scale": -1.5})
            for length in (1, 2, 3, 16, 33, 130, 257)
            for inner in (2, 7, 8, 9, 31, 32, 33, 65, 129, 257)
        ),
        ((2, 19, 6), (1,), OF_KERNELS, {}),
        ((2, 19, 6), (0,), OF_KERNELS, {"lse_gradient": False}),
        *(
            ((2, 19, 6), (1,), [(torch.float32, None)], {"scale": scale})
            for scale in (-1.0, -0.37, 80**-0.5, 3, 12.5)
        ),
    ],
)
def test_data(path, shape, dims, dtypes, options):
    for dtype, out in dtypes:
        if path.device == "cuda" and dtype == torch.float64:
            path.fused = False
        scores = path.normal(*shape, dtype=dtype)
        for dim in dims:
            path.check(scores, dim, dtype=out, **options)


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e6])
def test_offset_of_all_scores(path, offset):
    path.check(path.normal(2, 137, 9) + offset, 1, scale=0.125)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LARGE)
def test_large_sizes(shape, dtype):
    path = Path("cuda", True)
    path.check(path.normal(*shape, dtype=dtype), 1)


@gpu
def test_more_than_2_to_the_31_elements():
    shape, dtype = (2, 40000, 30000), torch.bfloat16
    scores = torch.empty(shape, device="cuda", dtype=dtype).normal_().requires_grad_()
    p, lse = megasoftmax.softmax(scores, dim=1, return_lse=True, fused=True)
    g = torch.empty(shape, device="cuda", dtype=dtype).normal_()
    (d_scores,) = torch.autograd.grad(p, scores, g)
    for at in ((0, 0), (0, 29999), (1, 0), (1, 12345), (1, 29999)):
        column = (at[0], slice(None), at[1])
        results = p[column], lse[at], g[column], d_scores[column]
        oracle.assert_row(scores[column], *results, f"{at}")


# The rules


@pytest.mark.parametrize("huge", [3e38, -3e38])
@pytest.mark.parametrize("length", [4, 64, 3000])
def test_scale_of_huge_scores_does_not_overflow(path, huge, length):
    scores = torch.full((2, length, 3), -abs(huge), device=path.device, dtype=torch.bfloat16)
    scores[:, 1] = scores[:, length - 1] = huge
    p = path.softmax(scores, scale=3.0, dim=1)
    oracle.assert_matches(p, (scores.double() * 3).softmax(1), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("length", [9, 64, 1003])
def test_nan_or_infinity_makes_its_column_nan(path, value, dtype, length):
    scores = path.normal(3, length, 10, dtype=dtype)
    scores[1, length // 2, 3] = value
    p, lse, d_scores = path.check(scores, 1)
    for result in (p, d_scores):  # with the length last
        assert result[1, 3].isnan().all()
        assert result.isnan().sum() == length
    assert lse[1, 3].isnan()
    assert lse.isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [9, 64, 1003])
def test_minus_infinity(path, dtype, length):
    scores = path.normal(3, length, 10, dtype=dtype)
    scores[0, :, 3] = -INF
    scores[1, 1:, 4] = -INF
    scores[2, :5] = -INF
    scores[2, -1, 7] = -INF
    g = path.normal(3, 10, length, dtype=dtype, seed=2)
    g[2, :, :5] = INF  # where the probability is 0
    p, _, d_scores = path.check(scores, 1, g=g)
    assert p[0, 3].isnan().all()
    assert d_scores.isnan().sum() == p.isnan().sum() == length
    assert p[1, 4, 0] == 1
    assert (p[2, :, :5] == 0).all()
    assert (d_scores[2, :, :5] == 0).all()


def test_nan_gradient_of_an_entry_spreads(path):
    g = path.normal(3, 10, 37, seed=2)
    g[1, 2, 7] = NAN
    *_, d_scores = path.check(path.normal(3, 37, 10), 1, g=g)
    assert d_scores[1, 2].isnan().all()
    assert d_scores.isnan().sum() == 37


@pytest.mark.parametrize("dtype", DTYPES)
def test_lowest_scores_are_uniform(path, dtype):
    flat = torch.full((3, 16, 4), torch.finfo(dtype).min, dtype=dtype, device=path.device)
    assert (path.softmax(flat, dim=1) == 1 / 16).all()


# Mask, bias and sink


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("shape", [(4, 9, 6), (9, 6), (6,), (4, 1, 1), (1, 9, 1), (1, 1)])
def test_mask_and_bias(path, shape, dim, dtype):
    scores = path.normal(4, 9, 6, dtype=dtype)
    mask = path.coin(*shape)
    bias = path.normal(*shape, dtype=dtype, seed=2)
    path.check(scores, dim, mask=mask)
    path.check(scores, dim, bias=bias, scale=-0.5)
    path.check(scores, dim, bias=bias, mask=path.coin(4, 9, 6), sink=0.5)
    aligned = (1,) * (3 - len(shape)) + shape
    if not path.fused or aligned[dim] == scores.shape[dim]:
        path.check(scores, dim, bias=bias.requires_grad_(), mask=mask)


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [None, (), (1,), (1, 1, 1)])
def test_sink(path, shape, dim):
    sink = 0.3
    if shape is not None:
        sink = torch.full(shape, 0.3, device=path.device).requires_grad_()
    path.check(path.normal(2, 5, 4, 7), dim, sink=sink)
    path.check(path.normal(2, 5, 4, 7), dim, sink=sink, lse_gradient=False)


@pytest.mark.parametrize("dim", [0, 1])
def test_column_with_nothing_left_is_zero(path, dim):
    mask = torch.zeros(6, 6, dtype=torch.bool, device=path.device)
    mask.select(1 - dim, 2).fill_(True)
    p, lse, d_scores = path.check(path.normal(6, 6), dim, mask=mask)
    for result in (p, d_scores):
        assert (result[2] == 0).all()
    assert lse[2] == -INF


def test_dim_before_ones_is_a_view(path):
    """Such columns are rows, causality apart."""
    scores = path.normal(3, 37, 1, 1)
    rows = path.softmax(scores[..., 0, 0])
    assert path.softmax(scores, dim=1).equal(rows[..., None, None])
    path.check(scores, 1, mask=path.coin(37, 1, 1), sink=0.5)


# Strides, and what is given


def test_strides_of_scores(path):
    wide = path.normal(4, 40, 12)
    views = [wide[1:3], wide[:, 3:], wide[:, ::2], wide[..., 1:], wide[..., ::3]]
    views += [wide.transpose(0, 1), wide.transpose(1, 2), wide.permute(2, 0, 1)]
    views += [wide[:, :1].expand(-1, 7, -1), wide[:1].expand(3, -1, -1)]
    for scores in (*views, wide[..., :1].expand(-1, -1, 5), wide.view(-1)[1:1201].view(3, 40, 10)):
        for dim in range(3):
            path.check(scores, dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_of_gradients(path, dtype):
    scores = path.normal(3, 20, 10, dtype=dtype).requires_grad_()
    p, lse = path.softmax(scores, dim=1, return_lse=True)
    whole, h = path.normal(3, 20, 10, dtype=dtype, seed=2), path.normal(3, 10, seed=3)
    (expected,) = torch.autograd.grad((p, lse), scores, (whole, h), retain_graph=True)
    for g in (
        whole.mT.contiguous().mT,
        whole.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.stack([whole, whole], -1)[..., 1],
    ):
        kept = g.clone(), h.clone()
        strided_h = torch.stack([h, h], -1)[..., 0]
        (found,) = torch.autograd.grad((p, lse), scores, (g, strided_h), retain_graph=True)
        assert found.equal(expected)
        assert found.is_contiguous() or not path.fused
        assert g.equal(kept[0])
        assert strided_h.equal(kept[1])
    one = torch.ones((), device=path.device, dtype=dtype).expand(3, 20, 10)
    (found,) = torch.autograd.grad(p, scores, one, retain_graph=True)
    assert found.abs().max() < 0.01
    (of_lse,) = torch.autograd.grad(lse, scores, torch.ones_like(h))
    torch.testing.assert_close(of_lse, p.detach(), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    "shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (0, 4), (4, 0), (2, 0, 3, 4)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(path, shape, dtype):
    scores = path.normal(*shape, dtype=dtype)
    for dim in range(len(shape)):
        path.check(scores, dim)
        path.check(scores, dim, mask=path.coin(*shape))
        path.check(scores, dim, sink=torch.ones(1, device=path.device).requires_grad_())
        path.check(scores, dim, bias=path.normal(*shape, dtype=dtype).requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_call_gives_the_same_bits(path, dtype):
    scores = path.normal(5, 130, 70, dtype=dtype).requires_grad_()
    g = oracle.random_like(scores, 1)

    def run(part):
        p, lse = path.softmax(scores[part], dim=1, return_lse=True)
        return p, lse, torch.autograd.grad(p, scores, g[part])[0][part]

    first = run(slice(None))
    for part in (slice(None), slice(0, 1), slice(0, 3)):
        for a, b in zip(first, run(part), strict=True):
            assert a[part].equal(b)


def test_compiled_beside_a_mask(path):
    """All dimensions are moved there. test_ops.py compiles the op of columns."""

    def function(scores):
        return path.softmax(scores, scale=0.5, mask=scores[:, :, :1] > 1, dim=0, return_lse=True)

    def draw(*sizes):
        return [path.normal(*sizes, 4).requires_grad_()]

    op_checks.check_compiled_once(function, draw)


# What runs fused


@gpu
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "megasoftmax::softmax_columns_forward"),
        ({"sink": 0.5}, "megasoftmax::softmax_forward"),
        ({"scale": 0.0}, None),
        ({"fused": False}, None),
    ],
)
def test_which_op_runs(arguments, name):
    scores = torch.randn(3, 40, 50, device="cuda")
    with torch.profiler.profile() as profile:
        actual = megasoftmax.softmax(scores, dim=1, **arguments)
    found = {event.key for event in profile.key_averages() if event.key.startswith("megasoftmax::")}
    assert found == ({name} if name else set())
    expected = megasoftmax.softmax(scores.cpu(), dim=1, **arguments)
    torch.testing.assert_close(actual.cpu(), expected)


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": None}, TypeError, r"dim: expected an integer from -3 to 2, got NoneType"),
        ({"dim": 1.0}, TypeError, r"dim: expected an integer from -3 to 2, got float"),
        ({"dim": torch.tensor(1)}, TypeError, r"dim: expected an integer.*got a tensor"),
        ({"dim": (0,)}, TypeError, r"dim: expected an integer.*got tuple"),
        ({"dim": 3}, ValueError, r"dim: expected an integer from -3 to 2, got 3"),
        ({"dim": -4}, ValueError, r"dim: expected an integer from -3 to 2, got -4"),
        ({"dim": 0, "causal": True}, ValueError, r"causal: expected only over the last.*got dim 0"),
        ({"dim": -2, "window": (1, 0)}, ValueError, r"window: expected only over.*got dim -2"),
        (
            {"dim": 1, "sink": torch.zeros(2)},
            ValueError,
            r"sink: expected one element, or dim -1, got shape \(2,\) and dim 1",
        ),
        ({"dim": 0, "mask": torch.zeros(2, 4, 3).bool()}, ValueError, r"mask: .*\(2, 3, 4\)"),
    ],
)
def test_errors(arguments, error, message):
    scores = torch.zeros(2, 3, 4)
    with pytest.raises(error, match="^" + message):
        megasoftmax.softmax(scores, **arguments)
    with pytest.raises(error, match="^" + message):
        why_not_fused(megasoftmax.softmax, scores, **arguments)


@pytest.mark.parametrize("dim", [-1, 2])
def test_last_dimension_by_either_name(dim):
    scores, sink = torch.randn(2, 3, 4), torch.randn(2)
    actual = megasoftmax.softmax(scores, dim=dim, causal=True, window=(2, 1), sink=sink)
    assert actual.equal(megasoftmax.softmax(scores, causal=True, window=(2, 1), sink=sink))
