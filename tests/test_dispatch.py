"""Which calls run fused, and the reasons of those that do not."""

import dataclasses
import functools
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch

import megasoftmax
from megasoftmax import Reason, dispatch, why_not_fused
from megasoftmax.build import library
from megasoftmax.build.extension import CSRC
from megasoftmax.limits import kernel_limits, read_limits
from megasoftmax.options import AttentionOptions

SHAPE = (2, 3, 4, 5)
LIMITS = kernel_limits()
MAX_K = LIMITS.topk["kMaxK"]
MAX_HEAD_DIM, MAX_POSITIONS = LIMITS.attention["kMaxHeadDim"], LIMITS.attention["kMaxPositions"]
MAX_FLOAT_HEAD_DIM = LIMITS.attention["kMaxFloatHeadDim"]


def names(*args, function=megasoftmax.softmax, **kwargs):
    return [reason.constraint for reason in why_not_fused(function, *args, **kwargs)]


topk_names = functools.partial(names, function=megasoftmax.softmax_topk)
attention_names = functools.partial(names, function=megasoftmax.attention)


def attention_tensors(heads=4, queries=3, keys=5, dims=(8, 8), batch=2, **options):
    return (
        torch.empty(batch, heads, queries, dims[0], **options),
        torch.empty(batch, heads, keys, dims[0], **options),
        torch.empty(batch, heads, keys, dims[1], **options),
    )


def test_reason_reads_as_a_sentence():
    reason = Reason("rows", "3", "at most 2")
    assert str(reason) == "rows: expected at most 2, got 3"
    with pytest.raises(dataclasses.FrozenInstanceError):
        reason.actual = "1"


def test_reasons_on_a_cpu(monkeypatch):
    nothing = library.Status(False, reason="nobody built it")
    monkeypatch.setattr(library, "status", lambda: nothing)
    monkeypatch.setattr(library, "load", lambda: pytest.fail("no GPU asked for it"))
    assert why_not_fused(megasoftmax.softmax, torch.zeros(SHAPE)) == (
        Reason("device", "cpu", "a CUDA device"),
        Reason("compiled part", "none: nobody built it", "one"),
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            lambda: names(
                torch.zeros(2, 2, *SHAPE, dtype=torch.float64).transpose(0, 2),
                scale=0.0,
                bias=torch.zeros(3, 1, 1, requires_grad=True),
                dtype=torch.float64,
            ),
            "dtype of scores; dtype; scale; leading dimensions of scores; "
            "keys of a bias that needs a gradient",
        ),
        (
            lambda: topk_names(
                torch.zeros(2, 2, 3, 4, 300, dtype=torch.float64).transpose(0, 1),
                *(257,),
                scale=0.0,
                dtype=torch.float64,
            ),
            "dtype of logits; dtype; scale; k; leading dimensions of logits",
        ),
        (
            lambda: attention_names(
                *attention_tensors(dims=(257, 300), dtype=torch.float64), scale=-1.0
            ),
            "dtype; head dimension of query and key; head dimension of value; scale",
        ),
    ],
    ids=["softmax", "softmax_topk", "attention"],
)
def test_all_reasons_come_in_order(found, expected, monkeypatch):
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    assert found() == ["device", "compiled part", *expected.split("; ")]


@pytest.fixture
def capabilities(monkeypatch):
    """Pretends that a GPU has one compute capability and its kernels, if any, are for another."""
    asked = []

    def pretend(of_gpu, of_kernels=None):
        monkeypatch.setattr(dispatch, "_capabilities", {})
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index=0: asked.append(index) or of_gpu
        )
        monkeypatch.setattr(library, "capability", lambda index: of_kernels)
        return asked

    return pretend


GPU_TENSOR = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=1))


@pytest.mark.parametrize(
    ("of_gpu", "of_kernels", "against_softmax", "against_attention"),
    [
        ((7, 0), None, "7.0", "7.0"),
        ((7, 5), (7, 5), None, "7.5"),
        ((7, 5), None, None, "7.5"),
        ((8, 0), (8, 0), None, None),
        ((9, 0), None, None, None),
        ((9, 0), (7, 5), None, "9.0 with kernels for 7.5"),
        ((10, 3), (10, 3), None, None),
    ],
)
def test_compute_capability(capabilities, of_gpu, of_kernels, against_softmax, against_attention):
    capabilities(of_gpu, of_kernels)

    def reason(actual, least):
        return None if actual is None else Reason("compute capability", actual, f"at least {least}")

    found = dispatch._of_any_tensor(GPU_TENSOR)
    assert found[2] == reason(against_softmax, "7.5")
    query = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    on_gpu = SimpleNamespace(
        is_cuda=True, device=GPU_TENSOR.device, dtype=query.dtype, shape=query.shape
    )
    found = dispatch.reasons_against_fused_attention(on_gpu, query, query, 1.0, AttentionOptions())
    of_capability = [reason for reason in found if reason.constraint == "compute capability"]
    assert of_capability == [reason(against_attention, "8.0")] * (against_attention is not None)
    assert dispatch.has_attention(GPU_TENSOR) == (against_attention is None)


def test_compiled_code_asks_the_driver_once(capabilities):
    asked = capabilities((9, 0))

    @torch.compile(fullgraph=True, backend="eager")
    def function(x):
        return x + (dispatch._too_old_capability(1, (8, 0)) is None)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [function(torch.zeros(())).item() for _ in range(2)] == [1, 1]
    assert asked == [1]


def test_gpu_without_compiled_part(monkeypatch):
    nothing = library.Status(False, reason="no nvcc")
    monkeypatch.setattr(library, "load", lambda: nothing)
    reason = dispatch._compiled_part(SimpleNamespace(is_cuda=True))
    assert reason == Reason("compiled part", "none: no nvcc", "one")


RANK_6 = (2, 1, 7, 3, 4, 5)
MAX = LIMITS.max_index
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)
SHAPES = ((5,), (4, 5), (3, 4, 5), SHAPE, (2, *SHAPE), (0, 3, 4, 5))
OF_SCORES, OF_BIAS = "leading dimensions of scores", "leading dimensions of bias"
WIDTHS = ("head dimension of query and key", "head dimension of value")


def zeros(*shape, dtype=FLOAT, grad=False):
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def without_memory(*shape):
    return torch.empty(shape, device="meta")


# Leading dimensions: a view that merges all but the last 3, for scores, mask and bias.
SOFTMAX = [
    *(
        ((scores, options), [])
        for shape in SHAPES
        for scores in (zeros(*shape, dtype=dtype) for dtype in DTYPES)
        for options in (
            {"scale": -1, "dtype": FLOAT, "return_lse": True, "sink": 0.0},
            {"mask": scores.bool(), "bias": scores.double().requires_grad_()},
        )
    ),
    ((zeros(2, 3, dtype=HALF), {"dtype": BFLOAT}), ["dtype"]),
    ((zeros(2, 3, dtype=BFLOAT), {"dtype": HALF}), ["dtype"]),
    ((zeros(2, 3), {"dtype": BFLOAT}), []),
    *(
        ((zeros(*RANK_6), {"mask": zeros(*shape).bool()}), [])
        for shape in ((2, 1, 7, 1, 1, 5), (1, 1, 1, 3, 4, 5), (3, 4, 5), (5,))
    ),
    *(
        ((zeros(*RANK_6), {"mask": zeros(*shape).bool()}), ["leading dimensions of mask"])
        for shape in ((1, 1, 7, 1, 1, 5), (7, 1, 1, 5), (2, 1, 1, 1, 1, 5))
    ),
    ((zeros(*RANK_6), {"bias": zeros(2, 1, 1, 1, 1, 5).expand(2, 1, 7, 1, 1, 5)}), [OF_BIAS]),
    ((zeros(*RANK_6), {"bias": zeros(1, 1, 1, 1, 1, 5).expand(2, 1, 7, 1, 1, 5)}), []),
    ((zeros(*RANK_6), {"bias": zeros(7, 1, 2, 3, 4, 5).transpose(0, 2)}), [OF_BIAS]),
    ((zeros(*RANK_6), {"bias": zeros(2, 1, 14, 3, 4, 5)[:, :, ::2]}), []),
    *(
        ((zeros(6, 7, 3, 4, 5, dtype=dtype), {"bias": bias}), expected)
        for dtype in (FLOAT, BFLOAT)
        for bias, expected in (
            (zeros(1, 1, 3, 4, 5).expand(6, 1, 3, 4, 5), []),
            (zeros(6, 1, 3, 4, 5).expand(6, 7, 3, 4, 5), [OF_BIAS]),
            # Its copy in float32 has no strides of 0.
            (zeros(1, 1, 3, 4, 5, dtype=HALF).expand(6, 1, 3, 4, 5), [OF_BIAS]),
        )
    ),
    ((zeros(*RANK_6), {}), []),
    ((zeros(2, 1, 7, 5, 4, 3).transpose(-1, -3), {}), []),
    ((zeros(7, 1, 2, 3, 4, 5).transpose(0, 2), {}), [OF_SCORES]),
    ((zeros(2, 7, 3, 4, 5).transpose(0, 1), {}), [OF_SCORES]),
    ((zeros(2, 3, 4, 5).transpose(0, 1), {}), []),
    ((zeros(1, 3, 4, 5).expand(2, 7, 3, 4, 5), {}), []),
    ((without_memory(2, MAX), {}), []),
    ((without_memory(2, MAX + 1), {}), ["columns"]),
    ((without_memory(4, (MAX - 4) // 2), {"causal": True}), []),
    ((without_memory(4, (MAX - 4) // 2 + 1), {"causal": True}), ["columns"]),
    ((without_memory(4, (MAX - 4) // 2 + 1), {"window": (1, 1)}), ["columns"]),
    ((without_memory(MAX, 1), {}), []),
    ((without_memory(MAX + 1, 1), {}), ["rows"]),
    ((without_memory(MAX, 1, 1), {}), []),
    ((without_memory(2, MAX // 2, 1, 1), {}), []),
    ((without_memory(2, MAX // 2 + 1, 1, 1), {}), ["rows"]),
    ((zeros(*SHAPE), {"bias": zeros(grad=True)}), ["keys of a bias that needs a gradient"]),
    ((zeros(*SHAPE), {"bias": zeros(3, 4, 1)}), []),
    ((zeros(2, 3, 4, 1), {"bias": zeros(3, 4, 1, grad=True)}), []),
    *(((zeros(2, 3, 4, 5, 6), {"dim": dim, "return_lse": True}), []) for dim in range(-5, 4)),
    ((zeros(2, 3, 4, 5, 6).permute(3, 1, 4, 0, 2), {"dim": 1}), []),  # it is copied
    ((zeros(2, 3, 4, 5, 6), {"dim": 1, "mask": zeros(6).bool()}), [OF_SCORES]),
    ((zeros(3, 4, 5, 6), {"dim": 1, "mask": zeros(6).bool()}), []),
    (
        (zeros(2, 3, 4).double(), {"dim": 0, "scale": 0.0, "dtype": torch.float64}),
        ["dtype of scores", "dtype", "scale"],
    ),
    ((zeros(3, 4, 5, 6), {"dim": 0, "bias": zeros(3, 1, 5, 6, grad=True)}), []),
    (
        (zeros(3, 4, 5, 6), {"dim": 1, "bias": zeros(3, 1, 5, 6, grad=True)}),
        ["keys of a bias that needs a gradient"],
    ),
    # Kernels see ranges as [batches, heads, queries]: what precedes the heads has one stride.
    *(
        ((zeros(2, 3, 4, 5, 6), {"visible": visible}), expected)
        for shape, is_merging in (
            *((shape, True) for shape in ((5,), (4, 1), (1, 1, 4, 5), (2, 3, 4, 5), (2, 3, 1, 1))),
            *((shape, False) for shape in ((3, 4, 5), (2, 1, 4, 5))),
        )
        for index, visible in enumerate(
            ((zeros(*shape).int(), None), (zeros(*shape).long(), None), (None, zeros(*shape).int()))
        )
        for expected in ([] if is_merging else [f"leading dimensions of visible[{index // 2}]"],)
    ),
]
TOPK = [
    *(
        ((logits, k, options), [])
        for shape in SHAPES
        for logits in (zeros(*shape, dtype=dtype) for dtype in DTYPES)
        for k, options in (
            (5, {"scale": -1, "renormalize": True, "return_lse": True}),
            # The gradient of a bias is summed outside of the kernels.
            (1, {"mask": logits.bool(), "bias": zeros(grad=True), "dtype": FLOAT}),
        )
    ),
    *(((zeros(2, 1000), k, {}), ["k"] * (k > MAX_K)) for k in (0, 1, MAX_K, MAX_K + 1)),
    ((zeros(2, 3), 2, {"dtype": HALF}), []),
    ((zeros(2, 3, dtype=BFLOAT), 2, {"dtype": HALF}), ["dtype"]),
    ((without_memory(2, MAX), 1, {}), []),
    ((without_memory(2, MAX + 1), 1, {}), ["columns"]),
    ((without_memory(MAX, 1), 1, {}), []),
    ((without_memory(MAX + 1, 1), 1, {}), ["rows"]),
    ((zeros(*RANK_6), 2, {"mask": zeros(2, 1, 7, 1, 1, 5).bool()}), []),
    ((zeros(*RANK_6), 2, {"bias": zeros(7, 1, 1, 5)}), [OF_BIAS]),
]
ATTENTION = [
    *(
        ((*attention_tensors(dims=dims, dtype=dtype), options), [])
        for dtype in DTYPES
        for most in (MAX_FLOAT_HEAD_DIM if dtype == FLOAT else MAX_HEAD_DIM,)
        for dims in ((8, 8), (5, 3), (most, most), (1, most))
        for of_bias in (dtype, FLOAT, torch.float64)
        for options in (
            {"causal": True, "window": (1, 1), "sink": 0.0},
            {"bias": zeros(4, 3, 1, dtype=of_bias, grad=True), "mask": zeros(2, 1, 1, 5).bool()},
            {"bias": megasoftmax.RelativeBias(zeros(1, 7, dtype=of_bias, grad=True))},
        )
    ),
    ((*(each.mT.contiguous().mT for each in attention_tensors()), {}), []),
    ((*attention_tensors(dtype=torch.float64), {}), ["dtype"]),
    *(
        ((*attention_tensors(dtype=HALF), {"scale": scale}), [])
        for scale in (None, 1, 1e4, 2.0**-126)
    ),
    *(
        ((*attention_tensors(dtype=HALF), {"scale": scale}), ["scale"])
        for scale in (1.1e4, 2.0**-127, 0.0, -0.5)
    ),
    *(
        ((*attention_tensors(dims=(a + past[0], b + past[1]), dtype=dtype), {}), expected)
        for dtype, (a, b), suffix in (
            (HALF, (MAX_HEAD_DIM,) * 2, ""),
            (FLOAT, (MAX_FLOAT_HEAD_DIM,) * 2, " in float32"),
        )
        for past, expected in (
            ((0, 0), []),
            ((1, 0), [WIDTHS[0] + suffix]),
            ((0, 1), [WIDTHS[1] + suffix]),
        )
    ),
    *(
        ((*attention_tensors(**sizes, dtype=HALF, device="meta"), {}), expected)
        for sizes, expected in (
            ({"queries": 1, "keys": MAX_POSITIONS - 1}, []),
            ({"queries": 1, "keys": MAX_POSITIONS}, ["queries + keys"]),
            ({"queries": MAX_POSITIONS - 1, "keys": 1}, []),
            ({"batch": 2**30 - 1, "heads": 2}, []),
            ({"batch": 2**30, "heads": 2}, ["batches x heads"]),
        )
    ),
]


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (function, *case)
        for function, cases in (
            (megasoftmax.softmax, SOFTMAX),
            (megasoftmax.softmax_topk, TOPK),
            (megasoftmax.attention, ATTENTION),
        )
        for case in cases
    ],
)
def test_reasons(as_if_fused, function, arguments, expected):
    *args, options = arguments
    assert names(*args, function=function, **options) == expected


def test_reasons_say_what_was_expected(as_if_fused):
    scores, bias = zeros(*SHAPE), zeros(3, 4, 1, grad=True)
    softmax, topk = megasoftmax.softmax, megasoftmax.softmax_topk
    expected = Reason("keys of a bias that needs a gradient", "1", "5")
    assert why_not_fused(softmax, scores, bias=bias) == (expected,)
    with torch.no_grad():
        assert why_not_fused(softmax, scores, bias=bias) == ()
    expected = Reason("dtype", "torch.bfloat16", "torch.float16, as of the scores, or float32")
    assert why_not_fused(softmax, scores.half(), dtype=BFLOAT) == (expected,)
    expected = Reason("k", str(MAX_K + 1), f"at most {MAX_K}")
    assert why_not_fused(topk, zeros(2, 1000), MAX_K + 1) == (expected,)
    found = why_not_fused(megasoftmax.attention, *attention_tensors(dtype=torch.float64))
    assert found == (Reason("dtype", "torch.float64", "float16, bfloat16 or float32"),)


def test_sizes_are_limited_as_the_header_says():
    header = (CSRC / "softmax/limits.h").read_text()
    assert f"kMaxIndex = INT32_MAX - {2**31 - 1 - MAX};" in header
    with pytest.raises(ValueError, match="no kMaxIndex"):
        read_limits(header.replace("kMaxIndex = INT32_MAX - ", "kMaxIndex = 1 << "))


def test_wide_heads_are_for_inference(as_if_fused):
    """Gradients and dropout have no kernel of these head dimensions."""
    wide = tuple(LIMITS.attention[name] for name in ("kMaxWideHeadDim", "kMaxWideValueDim"))
    tensors = attention_tensors(dims=wide, dtype=torch.float16)
    both = ["head dimension of query and key", "head dimension of value"]
    assert attention_names(*tensors) == both
    with torch.no_grad():
        assert attention_names(*tensors) == []
        assert attention_names(*attention_tensors(dims=(8, wide[1]), dtype=torch.float16)) == []
        assert attention_names(*tensors, dropout=0.5) == both
    more = attention_tensors(dims=(wide[0] + 1, wide[1] + 1), dtype=torch.float16)
    for enabled in (False, True):  # torch.no_grad would not help
        with torch.set_grad_enabled(enabled):
            reasons = why_not_fused(megasoftmax.attention, *more)
        assert [reason.limit for reason in reasons] == [f"at most {most}" for most in wide]


@pytest.mark.parametrize(
    ("of_gpu", "of_kernels", "is_served"),
    [
        ((8, 6), (8, 6), False),
        ((9, 0), (9, 0), True),
        ((9, 0), (8, 6), False),
        ((9, 0), None, True),
        ((10, 3), (10, 3), True),
        ((12, 0), (12, 0), False),
    ],
)
def test_wide_heads_are_for_some_gpus(capabilities, of_gpu, of_kernels, is_served):
    """That their kernels are missing is said before what a call could change."""
    capabilities(of_gpu, of_kernels)
    device = SimpleNamespace(index=1)
    query = SimpleNamespace(
        is_cuda=True, device=device, dtype=torch.float16, shape=(1, 1, 1, MAX_HEAD_DIM + 1)
    )
    value = torch.zeros(1, 1, 1, 8)
    for enabled, dropout in itertools.product((False, True), (0.0, 0.5)):
        with torch.set_grad_enabled(enabled):
            found = [each for each in dispatch._head_dims(query, value, dropout) if each]
        if is_served and not enabled and not dropout:
            assert found == []
            continue
        (reason,) = found
        assert ("but on compute capability 9.x and 10.x" in reason.limit) == (not is_served)


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_torch_decides_over_tf32(setting):
    """And torch.compile notices when the setting changes."""
    before = torch.get_float32_matmul_precision()
    compiled = torch.compile(
        lambda x: x + 1 if dispatch.takes_tf32(x.dtype) else x - 1, backend="eager", fullgraph=True
    )
    try:
        for each in ("highest", setting, "highest"):
            torch.set_float32_matmul_precision(each)
            expected = each == "high"
            assert dispatch.takes_tf32(torch.float32) == expected
            assert not dispatch.takes_tf32(torch.bfloat16)
            assert compiled(torch.zeros(1)).item() == (1 if expected else -1)
    finally:
        torch.set_float32_matmul_precision(before)


# What the public functions make of it


@pytest.mark.parametrize(
    ("call", "reasons"),
    [
        (
            lambda: megasoftmax.softmax(zeros(*SHAPE), scale=0.0, dtype=torch.float64, fused=True),
            [
                "scale: expected a normal float32, not 0, below 2.3e38, got 0.0",
                "dtype: expected float16, bfloat16 or float32, got torch.float64",
            ],
        ),
        *(
            (
                lambda o=o: megasoftmax.softmax(zeros(3, 4), dim=0, scale=0.0, fused=True, **o),
                ["scale"],
            )
            for o in ({}, {"sink": 0.5})
        ),
        (
            lambda: megasoftmax.softmax_topk(zeros(2, 300).double(), 300, fused=True),
            [
                "dtype of logits: expected float16, bfloat16 or float32",
                "k: expected at most 256, got 300",
            ],
        ),
        (
            lambda: megasoftmax.attention(
                *attention_tensors(dims=(512, 8), dtype=torch.float64), fused=True
            ),
            [
                "dtype: expected float16, bfloat16 or float32, got torch.float64",
                "head dimension of query and key: expected at most 256",
            ],
        ),
    ],
    ids=["softmax", "columns", "columns, sink", "softmax_topk", "attention"],
)
def test_fused_lists_the_reasons(as_if_fused, call, reasons):
    with pytest.raises(ValueError, match="fused: cannot be True here") as error:
        call()
    assert all(reason in str(error.value) for reason in reasons)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "arguments", "options", "is_fused"),
    [
        *(("softmax", (dtype,), {"causal": True}, True) for dtype in DTYPES),
        *(
            ("softmax", (FLOAT,), {"causal": True} | options, False)
            for options in ({"scale": 0.0}, {"dtype": torch.float64}, {"fused": False})
        ),
        *(
            ("softmax_topk", (FLOAT, k), options, is_fused)
            for k, options, is_fused in (
                (5, {}, True),
                (256, {"renormalize": True}, True),
                (257, {}, False),
                (0, {}, True),
                (5, {"scale": 0.0}, False),
                (5, {"fused": False}, False),
            )
        ),
        *(
            ("attention", (BFLOAT,), options, is_fused)
            for options, is_fused in (
                ({}, True),
                ({"causal": True, "sink": 0.5}, True),
                ({"scale": -1.0}, False),
                ({"fused": False}, False),
            )
        ),
    ],
    ids=str,
)
def test_which_calls_a_gpu_runs_fused(name, arguments, options, is_fused):
    dtype, *k = arguments
    shapes = [SHAPE[:-1] + (1000,) * (name == "softmax_topk") + (5,) * (name == "softmax")]
    if name == "attention":
        shapes = [each.shape for each in attention_tensors()]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    function = getattr(megasoftmax, name)
    with torch.profiler.profile() as profile:
        result = function(*tensors, *k, **options)
        (result[0] if name == "softmax_topk" else result).sum().backward()
    found = [event.key for event in profile.key_averages()]
    for direction in ("forward", "backward"):
        assert (f"megasoftmax::{name}_{direction}" in found) == is_fused
    if name == "softmax":
        asked = {key: value for key, value in options.items() if key != "fused"}
        assert is_fused == (why_not_fused(function, *tensors, **asked) == ()) or "fused" in options
        expected = function(*(each.cpu() for each in tensors), **options | {"fused": False})
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-2, atol=1e-2)


def test_why_not_fused_of_something_else():
    with pytest.raises(TypeError, match=r"^function: expected megasoftmax\.softmax.*got"):
        why_not_fused(torch.softmax, torch.zeros(SHAPE))


def test_cpu_call_asks_nothing(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: pytest.fail("asked for the compiled part"))
    monkeypatch.setattr(library, "status", lambda: pytest.fail("asked for the compiled part"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megasoftmax.softmax(torch.zeros(SHAPE))
        megasoftmax.attention(*[torch.zeros(SHAPE)] * 3)
