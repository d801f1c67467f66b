"""Which calls run fused, and the reasons of those that do not."""

import dataclasses
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

SHAPE = (2, 3, 4, 5)
LIMITS = kernel_limits()
MAX_K = LIMITS.topk["kMaxK"]
MAX_HEAD_DIM, MAX_POSITIONS = LIMITS.attention["kMaxHeadDim"], LIMITS.attention["kMaxPositions"]
MAX_FLOAT_HEAD_DIM = LIMITS.attention["kMaxFloatHeadDim"]


@pytest.fixture
def as_if_fused(monkeypatch):
    """Of the constraints only those that are about a GPU hold on any machine."""
    for name in ("_device", "_compiled_part", "_compute_capability"):
        monkeypatch.setattr(dispatch, name, lambda *given: None)


def names(*args, **kwargs):
    return [reason.constraint for reason in why_not_fused(megasoftmax.softmax, *args, **kwargs)]


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


def test_all_reasons_come_in_order(monkeypatch):
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    scores = torch.zeros(2, 2, *SHAPE, dtype=torch.float64).transpose(0, 2)
    bias = torch.zeros(3, 1, 1, requires_grad=True)
    found = names(scores, scale=0.0, bias=bias, dtype=torch.float64)
    assert found == [
        "device",
        "compiled part",
        "dtype of scores",
        "dtype",
        "scale",
        "leading dimensions of scores",
        "keys of a bias that needs a gradient",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), SHAPE, (2, *SHAPE), (0, 3, 4, 5)])
def test_no_reason(as_if_fused, dtype, shape):
    scores = torch.zeros(shape, dtype=dtype)
    assert names(scores, scale=-1, dtype=torch.float32, return_lse=True, sink=0.0) == []
    assert names(scores, mask=scores.bool(), bias=scores.double().requires_grad_()) == []


@pytest.mark.parametrize(
    ("dtype", "out"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_half_of_the_other_type(as_if_fused, dtype, out):
    scores = torch.zeros(2, 3, dtype=dtype)
    expected = f"{dtype}, as of the scores, or float32"
    found = why_not_fused(megasoftmax.softmax, scores, dtype=out)
    assert found == (Reason("dtype", str(out), expected),)
    assert names(scores.float(), dtype=out) == topk_names(scores.float(), 2, dtype=out) == []
    assert topk_names(scores, 2, dtype=out) == ["dtype"]


@pytest.fixture
def capabilities(monkeypatch):
    """Pretends that a GPU has one compute capability and its kernels, if any, are for another."""
    asked = []

    def pretend(of_gpu, of_kernels=None):
        monkeypatch.setattr(dispatch, "_capabilities", {})
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda index: asked.append(index) or of_gpu
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
    found = dispatch.reasons_against_fused_attention(on_gpu, query, query, 1.0, 0.0)
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


# Leading dimensions: a view that merges all but the last 3, for scores, mask and bias

RANK_6 = (2, 1, 7, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "tensor", "is_fused"),
    [
        ("mask", torch.zeros(2, 1, 7, 1, 1, 5), True),
        ("mask", torch.zeros(1, 1, 1, 3, 4, 5), True),
        ("mask", torch.zeros(3, 4, 5), True),
        ("mask", torch.zeros(5), True),
        ("mask", torch.zeros(1, 1, 7, 1, 1, 5), False),
        ("mask", torch.zeros(7, 1, 1, 5), False),
        ("mask", torch.zeros(2, 1, 1, 1, 1, 5), False),
        ("bias", torch.zeros(2, 1, 1, 1, 1, 5).expand(2, 1, 7, 1, 1, 5), False),
        ("bias", torch.zeros(1, 1, 1, 1, 1, 5).expand(2, 1, 7, 1, 1, 5), True),
        ("bias", torch.zeros(7, 1, 2, 3, 4, 5).transpose(0, 2), False),
        ("bias", torch.zeros(2, 1, 14, 3, 4, 5)[:, :, ::2], True),
    ],
)
def test_leading_dimensions(as_if_fused, name, tensor, is_fused):
    if name == "mask":
        tensor = tensor.bool()
    found = names(torch.zeros(RANK_6), **{name: tensor})
    assert found == ([] if is_fused else [f"leading dimensions of {name}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_dimensions_of_a_bias_that_is_converted(as_if_fused, dtype):
    scores = torch.zeros(6, 7, *SHAPE[1:], dtype=dtype)
    against = ["leading dimensions of bias"]
    assert names(scores, bias=torch.zeros(1, 1, *SHAPE[1:]).expand(6, 1, *SHAPE[1:])) == []
    assert names(scores, bias=torch.zeros(6, 1, *SHAPE[1:]).expand(6, 7, *SHAPE[1:])) == against
    # Its copy in float32 has no strides of 0.
    halves = torch.zeros(1, 1, *SHAPE[1:], dtype=torch.float16).expand(6, 1, *SHAPE[1:])
    assert names(scores, bias=halves) == against


@pytest.mark.parametrize(
    ("scores", "is_fused"),
    [
        (torch.zeros(RANK_6), True),
        (torch.zeros(2, 1, 7, 5, 4, 3).transpose(-1, -3), True),
        (torch.zeros(7, 1, 2, 3, 4, 5).transpose(0, 2), False),
        (torch.zeros(2, 7, 3, 4, 5).transpose(0, 1), False),
        (torch.zeros(2, 3, 4, 5).transpose(0, 1), True),
        (torch.zeros(1, 3, 4, 5).expand(2, 7, 3, 4, 5), True),
    ],
)
def test_leading_dimensions_of_scores(as_if_fused, scores, is_fused):
    assert names(scores) == ([] if is_fused else ["leading dimensions of scores"])


# Sizes, on tensors without memory

MAX = LIMITS.max_index


@pytest.mark.parametrize(
    ("shape", "arguments", "expected"),
    [
        ((2, MAX), {}, []),
        ((2, MAX + 1), {}, ["columns"]),
        ((4, (MAX - 4) // 2), {"causal": True}, []),
        ((4, (MAX - 4) // 2 + 1), {"causal": True}, ["columns"]),
        ((4, (MAX - 4) // 2 + 1), {"window": (1, 1)}, ["columns"]),
        ((MAX, 1), {}, []),
        ((MAX + 1, 1), {}, ["rows"]),
        ((MAX, 1, 1), {}, []),
        ((2, MAX // 2, 1, 1), {}, []),
        ((2, MAX // 2 + 1, 1, 1), {}, ["rows"]),
    ],
)
def test_sizes(as_if_fused, shape, arguments, expected):
    assert names(torch.empty(shape, device="meta"), **arguments) == expected


def test_sizes_are_limited_as_the_header_says():
    header = (CSRC / "softmax/limits.h").read_text()
    assert f"kMaxIndex = INT32_MAX - {2**31 - 1 - MAX};" in header
    with pytest.raises(ValueError, match="no kMaxIndex"):
        read_limits(header.replace("kMaxIndex = INT32_MAX - ", "kMaxIndex = 1 << "))


def test_gradient_of_a_bias_that_is_broadcast_over_keys(as_if_fused):
    scores, bias = torch.zeros(SHAPE), torch.zeros(3, 4, 1, requires_grad=True)
    expected = Reason("keys of a bias that needs a gradient", "1", "5")
    assert why_not_fused(megasoftmax.softmax, scores, bias=bias) == (expected,)
    assert names(scores, bias=torch.zeros((), requires_grad=True)) == [expected.constraint]
    assert names(scores, bias=bias.detach()) == []
    assert names(scores[..., :1], bias=bias) == []
    with torch.no_grad():
        assert names(scores, bias=bias) == []


# Softmax + top-k


def topk_names(*args, **kwargs):
    found = why_not_fused(megasoftmax.softmax_topk, *args, **kwargs)
    return [reason.constraint for reason in found]


def test_all_reasons_of_topk_come_in_order(monkeypatch):
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    logits = torch.zeros(2, 2, 3, 4, 300, dtype=torch.float64).transpose(0, 1)
    assert topk_names(logits, 257, scale=0.0, dtype=torch.float64) == [
        "device",
        "compiled part",
        "dtype of logits",
        "dtype",
        "scale",
        "k",
        "leading dimensions of logits",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 5), SHAPE, (2, *SHAPE), (0, 3, 4, 5)])
def test_no_reason_against_topk(as_if_fused, dtype, shape):
    logits = torch.zeros(shape, dtype=dtype)
    bias = torch.zeros((), requires_grad=True)  # its gradient is summed outside of the kernels
    assert topk_names(logits, 5, scale=-1, renormalize=True, return_lse=True) == []
    assert topk_names(logits, 1, mask=logits.bool(), bias=bias, dtype=torch.float32) == []


@pytest.mark.parametrize("k", [0, 1, MAX_K, MAX_K + 1])
def test_k_of_kernels(as_if_fused, k):
    found = why_not_fused(megasoftmax.softmax_topk, torch.zeros(2, 1000), k)
    expected = (Reason("k", str(k), f"at most {MAX_K}"),)
    assert found == (() if k <= MAX_K else expected)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, MAX), []), ((2, MAX + 1), ["columns"]), ((MAX, 1), []), ((MAX + 1, 1), ["rows"])],
)
def test_sizes_for_topk(as_if_fused, shape, expected):
    assert topk_names(torch.empty(shape, device="meta"), 1) == expected


def test_leading_dimensions_for_topk(as_if_fused):
    logits = torch.zeros(RANK_6)
    assert topk_names(logits, 2, mask=torch.zeros(2, 1, 7, 1, 1, 5, dtype=torch.bool)) == []
    assert topk_names(logits, 2, bias=torch.zeros(7, 1, 1, 5)) == ["leading dimensions of bias"]


def test_fused_topk_lists_the_reasons(as_if_fused):
    with pytest.raises(ValueError, match="fused: cannot be True here") as error:
        megasoftmax.softmax_topk(torch.zeros(2, 300).double(), 300, fused=True)
    assert "dtype of logits: expected float16, bfloat16 or float32" in str(error.value)
    assert "k: expected at most 256, got 300" in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("k", "arguments", "is_fused"),
    [
        (5, {}, True),
        (256, {"renormalize": True}, True),
        (257, {}, False),
        (0, {}, True),
        (5, {"scale": 0.0}, False),
        (5, {"fused": False}, False),
    ],
    ids=str,
)
def test_gpu_runs_topk_fused(k, arguments, is_fused):
    logits = torch.randn(3, 1000, device="cuda", requires_grad=True)
    with torch.profiler.profile() as profile:
        p, _ = megasoftmax.softmax_topk(logits, k, **arguments)
        p.sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert ("megasoftmax::softmax_topk_forward" in names) == is_fused
    assert ("megasoftmax::softmax_topk_backward" in names) == is_fused


# Attention


def attention_tensors(heads=4, queries=3, keys=5, dims=(8, 8), batch=2, **options):
    return (
        torch.empty(batch, heads, queries, dims[0], **options),
        torch.empty(batch, heads, keys, dims[0], **options),
        torch.empty(batch, heads, keys, dims[1], **options),
    )


def attention_names(*args, **kwargs):
    found = why_not_fused(megasoftmax.attention, *args, **kwargs)
    return [reason.constraint for reason in found]


def test_all_reasons_of_attention_come_in_order(monkeypatch):
    monkeypatch.setattr(library, "status", lambda: library.Status(False, reason="none"))
    tensors = attention_tensors(dims=(257, 300), dtype=torch.float64)
    assert attention_names(*tensors, scale=-1.0) == [
        "device",
        "compiled part",
        "dtype",
        "head dimension of query and key",
        "head dimension of value",
        "scale",
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(8, 8), (5, 3), (None, None), (1, None)])
def test_no_reason_against_attention(as_if_fused, dtype, dims):
    most = MAX_FLOAT_HEAD_DIM if dtype == torch.float32 else MAX_HEAD_DIM
    dims = tuple(most if each is None else each for each in dims)
    query, key, value = attention_tensors(dims=dims, dtype=dtype)
    assert attention_names(query, key, value, causal=True, window=(1, 1), sink=0.0) == []
    for options in ({"dtype": dtype}, {"dtype": torch.float32}, {"dtype": torch.float64}):
        bias = torch.zeros(4, 3, 1, **options, requires_grad=True)
        table = megasoftmax.RelativeBias(torch.zeros(1, 7, **options, requires_grad=True))
        mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
        assert attention_names(query, key, value, bias=bias, mask=mask, return_lse=True) == []
        assert attention_names(query, key, value, bias=table) == []
    apart = (each.mT.contiguous().mT for each in (query, key, value))
    assert attention_names(*apart) == []


def test_dtypes_of_attention(as_if_fused):
    found = why_not_fused(megasoftmax.attention, *attention_tensors(dtype=torch.float64))
    assert found == (Reason("dtype", "torch.float64", "float16, bfloat16 or float32"),)


@pytest.mark.parametrize(
    ("scale", "is_fused"),
    [
        (None, True),
        (1, True),
        (1e4, True),
        (1.1e4, False),
        (2.0**-126, True),
        (2.0**-127, False),
        (0.0, False),
        (-0.5, False),
    ],
)
def test_scale_of_attention(as_if_fused, scale, is_fused):
    found = attention_names(*attention_tensors(dtype=torch.float16), scale=scale)
    assert found == ([] if is_fused else ["scale"])


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((MAX_HEAD_DIM, MAX_HEAD_DIM), []),
        ((MAX_HEAD_DIM + 1, 8), ["head dimension of query and key"]),
        ((8, MAX_HEAD_DIM + 1), ["head dimension of value"]),
    ],
)
def test_head_dims(as_if_fused, dims, expected):
    assert attention_names(*attention_tensors(dims=dims, dtype=torch.float16)) == expected


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


@pytest.mark.parametrize("past", [(0, 0), (1, 0), (0, 1)])
def test_head_dims_of_float32(as_if_fused, past):
    dims = tuple(MAX_FLOAT_HEAD_DIM + each for each in past)
    names = ("head dimension of query and key in float32", "head dimension of value in float32")
    expected = [name for name, by in zip(names, past, strict=True) if by > 0]
    assert attention_names(*attention_tensors(dims=dims, dtype=torch.float32)) == expected


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


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"queries": 1, "keys": MAX_POSITIONS - 1}, []),
        ({"queries": 1, "keys": MAX_POSITIONS}, ["queries + keys"]),
        ({"queries": MAX_POSITIONS - 1, "keys": 1}, []),
        ({"batch": 2**30 - 1, "heads": 2}, []),
        ({"batch": 2**30, "heads": 2}, ["batches x heads"]),
    ],
)
def test_sizes_for_attention(as_if_fused, sizes, expected):
    tensors = attention_tensors(**sizes, dtype=torch.float16, device="meta")
    assert attention_names(*tensors) == expected


def test_fused_attention_lists_the_reasons(as_if_fused):
    with pytest.raises(ValueError, match="fused: cannot be True here") as error:
        megasoftmax.attention(*attention_tensors(dims=(512, 8), dtype=torch.float64), fused=True)
    assert "dtype: expected float16, bfloat16 or float32, got torch.float64" in str(error.value)
    assert "head dimension of query and key: expected at most 256" in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arguments", "is_fused"),
    [
        ({}, True),
        ({"causal": True, "sink": 0.5}, True),
        ({"scale": -1.0}, False),
        ({"fused": False}, False),
    ],
    ids=str,
)
def test_gpu_runs_attention_fused(arguments, is_fused):
    tensors = [
        torch.randn_like(each).requires_grad_()
        for each in attention_tensors(dtype=torch.bfloat16, device="cuda")
    ]
    with torch.profiler.profile() as profile:
        megasoftmax.attention(*tensors, **arguments).sum().backward()
    names = [event.key for event in profile.key_averages()]
    assert ("megasoftmax::attention_forward" in names) == is_fused
    assert ("megasoftmax::attention_backward" in names) == is_fused


# What the public functions make of it


def test_fused_lists_the_reasons(as_if_fused):
    with pytest.raises(ValueError, match="fused: cannot be True here") as error:
        megasoftmax.softmax(torch.zeros(SHAPE), scale=0.0, dtype=torch.float64, fused=True)
    assert "scale: expected a normal float32, not 0, below 2.3e38, got 0.0" in str(error.value)
    assert "dtype: expected float16, bfloat16 or float32, got torch.float64" in str(error.value)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gpu_runs_fused(dtype):
    scores = torch.randn(SHAPE, device="cuda", dtype=dtype)
    assert why_not_fused(megasoftmax.softmax, scores, causal=True) == ()
    with torch.profiler.profile() as profile:
        megasoftmax.softmax(scores, causal=True)
    assert "megasoftmax::softmax_forward" in [event.key for event in profile.key_averages()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "arguments",
    [{"scale": 0.0}, {"dtype": torch.float64}, {"fused": False}],
    ids=str,
)
def test_gpu_falls_back(arguments):
    scores = torch.randn(SHAPE, device="cuda")
    with torch.profiler.profile() as profile:
        actual = megasoftmax.softmax(scores, causal=True, **arguments)
    assert "megasoftmax::softmax_forward" not in [event.key for event in profile.key_averages()]
    expected = megasoftmax.softmax(scores.cpu(), causal=True, **arguments)
    torch.testing.assert_close(actual.cpu(), expected)
