"""The modules against the formulas that they stand for, in float64 and plain torch."""

import enum
import math
import pickle

import oracle
import pytest
import torch

import megasoftmax
from megasoftmax import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)

BATCH, HEADS = 2, 3
HALVES = {torch.float16: "input_in_fp16", torch.bfloat16: "input_in_bf16"}
# Half a unit in the last place of a probability near 1, and as much for what was summed.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6, torch.float64: 1e-12}
CAUSAL_TYPES = (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.padding_causal)
SHAPES = ((7, 7), (1, 9), (3, 11), (5, 2))  # queries, keys; the last has rows with nothing left


def forbidden(scores, mask):
    raise AssertionError("mask_func was called")


def fill(scores, mask):
    return scores.masked_fill(mask, -10000.0)


class Recorded:
    """A mask function that keeps the masks that it was given."""

    def __init__(self, function=fill):
        self.function, self.masks = function, []

    def __call__(self, scores, mask):
        self.masks.append(mask)
        return self.function(scores, mask)


def module(mask_type=AttnMaskType.padding, *, dtype=torch.float32, **options):
    """Fused, with a softmax in float32, and a mask_func that is not to be called."""
    given = {"scaled_masked_softmax_fusion": options.pop("fusion", True)}
    given |= {"softmax_in_fp32": options.pop("in_fp32", True)}
    given |= {"window_size": options.pop("window", None)}
    given |= {"mask_func": forbidden, "scale": None, "attn_mask_type": mask_type}
    halves = {"input_in_fp16": dtype == torch.float16, "input_in_bf16": dtype == torch.bfloat16}
    return FusedScaleMaskSoftmax(**halves, **(given | options))


def make_scores(queries, keys, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(BATCH, HEADS, queries, keys, generator=generator) * 3
    return scores.to(device, dtype)


def make_mask(queries, keys, device="cpu"):
    """[batch, 1, queries, keys]; the last key of a row and the first always stay."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(BATCH, 1, queries, keys, generator=generator) < 0.4
    mask[..., 0] = mask[..., -1] = False
    return mask.to(device)


def excluded_entries(queries, keys, causal=False, window=None):
    return oracle.excluded_entries(torch.empty(queries, keys), None, causal, window)


def expected(scores, excluded=None, offset=None, scale=1.0):
    """By concatenation of the offset, in float64, on the CPU; 0 where nothing is left."""
    z = scores.double().cpu() * scale
    if excluded is not None:
        z = z.masked_fill(excluded.cpu(), -math.inf)
    if offset is not None:
        column = offset.double().cpu().reshape(1, -1, 1, 1).expand(*z.shape[:-1], 1)
        return torch.softmax(torch.cat([z, column], -1), -1)[..., :-1]
    return torch.softmax(z, -1).nan_to_num(0)


def assert_near(actual, wanted, dtype=None):
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


# The fused semantics


WINDOWS = ((2, 0), (0, 0), (2, 1), (-1, 0), (2, -1), (-1, 1), (-1, -1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("mask_type", "window"),
    [
        *((mask_type, None) for mask_type in AttnMaskType),
        *((AttnMaskType.causal, window) for window in WINDOWS),
        *((AttnMaskType.padding, window) for window in WINDOWS),
    ],
)
@pytest.mark.parametrize("of_mask", [None, (BATCH, 1), (1, 1), (BATCH, HEADS), ()])
def test_mask_causality_and_window_all_hold(shape, mask_type, window, of_mask, device):
    scores = make_scores(*shape, device=device)
    excluded = excluded_entries(*shape, mask_type in CAUSAL_TYPES, window)
    mask = None
    if of_mask is not None:
        mask = make_mask(*shape, device=device)[:1, 0] if of_mask == () else make_mask(*shape)
        mask = mask[0] if of_mask == () else mask[: of_mask[0]].expand(*of_mask, *shape)
        mask = mask.to(device)
        excluded = excluded | mask.cpu()
    actual = module(mask_type, window=window)(scores, mask)
    assert_near(actual, expected(scores, excluded))
    assert not actual.cpu()[excluded.expand(actual.shape)].any()


@pytest.mark.parametrize("scale", [None, 4, 0.37])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale_and_dtype(scale, dtype, device):
    scores = make_scores(6, 6, dtype, device)
    actual = module(AttnMaskType.causal, dtype=dtype, scale=scale)(scores, None)
    assert actual.dtype == dtype
    assert_near(actual, expected(scores, excluded_entries(6, 6, True), scale=scale or 1))


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize(
    ("flags", "given", "in_fp32", "result"),
    [
        (torch.float16, torch.float16, True, torch.float16),
        (torch.bfloat16, torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, False, torch.bfloat16),
        (torch.float32, torch.float32, True, torch.float32),
        (torch.float32, torch.float32, False, torch.float32),
        (torch.float32, torch.bfloat16, True, torch.bfloat16),  # the flags say float32
        (torch.float16, torch.float32, True, torch.float16),  # the flags say float16
        (torch.float16, torch.float32, False, torch.float32),
    ],
)
def test_dtype_of_the_result(fusion, flags, given, in_fp32, result, device):
    scores = make_scores(4, 5, given, device)
    actual = module(dtype=flags, in_fp32=in_fp32, fusion=fusion)(scores, None)
    assert actual.dtype == result
    assert_near(actual, expected(scores), torch.bfloat16)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_offset_and_its_gradient(fusion, dtype, window, device):
    scores = make_scores(6, 6, dtype, device).requires_grad_()
    offset = torch.tensor([-1.0, 0.0, 2.5]).to(device, dtype).requires_grad_()
    gradient = make_scores(6, 6, dtype, device, seed=2)
    softmax = module(AttnMaskType.causal, dtype=dtype, fusion=fusion, mask_func=fill, window=window)
    actual = softmax(scores, None, offset)
    actual.backward(gradient)

    z, logit = (t.detach().double().cpu().requires_grad_() for t in (scores, offset))
    wanted = expected(z, excluded_entries(6, 6, True, window), logit)
    wanted.backward(gradient.double().cpu())
    assert actual.dtype == dtype
    assert_near(actual.detach(), wanted.detach())
    assert offset.grad.dtype == dtype
    # Gradients are made of probabilities that were rounded, and the offset's of 36 of them.
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5}[dtype]
    for mine, theirs in ((scores.grad, z.grad), (offset.grad, logit.grad)):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=tolerance, atol=tolerance)


def test_offset_of_a_row_with_nothing_left(device):
    mask = torch.ones(BATCH, 1, 4, 5, dtype=torch.bool, device=device)
    offset = torch.zeros(HEADS, device=device, requires_grad=True)
    probabilities = module()(make_scores(4, 5, device=device), mask, offset)
    probabilities.sum().backward()
    assert not probabilities.any()
    assert not offset.grad.any()


def test_gradients_through_mask_and_scale(device):
    scores = make_scores(5, 8, device=device).requires_grad_()
    mask = make_mask(5, 8, device=device)
    gradient = make_scores(5, 8, device=device, seed=2)
    module(AttnMaskType.causal, scale=0.5)(scores, mask).backward(gradient)
    z = scores.detach().double().cpu().requires_grad_()
    excluded = mask.cpu() | excluded_entries(5, 8, True)
    expected(z, excluded, scale=0.5).backward(gradient.double().cpu())
    assert_near(scores.grad, z.grad)


# Fusion off, or not possible: through mask_func


def unfused(scores, mask, offset, scale, dtype):
    """What the class of that name in Megatron-core computes without fusion, from its mask."""
    z = scores.float() if dtype in HALVES else scores
    z = z if scale is None else z * scale
    z = z if mask is None else fill(z, mask)
    if offset is None:
        return torch.softmax(z, -1).to(dtype)
    column = offset.reshape(1, -1, 1, 1).expand(*z.shape[:-1], 1)
    return torch.softmax(torch.cat([z, column], -1), -1)[..., :-1].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("with_offset", [False, True])
@pytest.mark.parametrize(
    ("mask_type", "with_mask", "window", "passed"),
    [
        (AttnMaskType.padding, False, None, None),
        (AttnMaskType.padding, True, None, "mask"),
        (AttnMaskType.causal, False, None, "causal"),
        (AttnMaskType.causal, True, None, "mask"),
        (AttnMaskType.causal, False, (2, 0), (2, 0)),
        (AttnMaskType.causal, True, (2, 0), (2, 0)),
        (AttnMaskType.padding, True, (1, 2), (1, 2)),
        (AttnMaskType.padding, False, (1, -1), (1, -1)),
        (AttnMaskType.causal, False, (1, -1), (1, 0)),  # nobody sees the future
    ],
)
def test_without_fusion(mask_type, with_mask, window, passed, with_offset, scale, dtype, device):
    scores = make_scores(6, 6, dtype, device)
    mask = make_mask(6, 6, device) if with_mask else None
    offset = torch.tensor([-1.0, 0.0, 2.5], device=device) if with_offset else None
    if passed == "causal":
        passed_mask = excluded_entries(6, 6, causal=True).to(device)
    elif isinstance(passed, tuple):
        passed_mask = excluded_entries(6, 6, window=passed).to(device)
    else:
        passed_mask = mask
    recorded = Recorded()
    softmax = module(
        mask_type, dtype=dtype, fusion=False, mask_func=recorded, scale=scale, window=window
    )
    actual = softmax(scores, mask, offset)

    assert len(recorded.masks) == (passed is not None)
    assert all(torch.equal(one, passed_mask) for one in recorded.masks)
    wanted = unfused(scores, passed_mask, offset, scale, dtype)
    torch.testing.assert_close(actual, wanted, rtol=TOLERANCE[dtype], atol=1e-7)
    if offset is None:
        assert torch.equal(actual, wanted)


def test_without_fusion_an_excluded_row_is_what_mask_func_makes_of_it():
    mask = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    scores = make_scores(3, 4)
    actual = module(fusion=False, mask_func=lambda z, m: torch.where(m, -1e4, z))(scores, mask)
    assert_near(actual, torch.full(scores.shape, 0.25, dtype=torch.float64))
    assert not module()(scores, mask).any()


def test_without_fusion_half_scores_stay_half_where_asked():
    seen = []

    def look(scores, mask):
        seen.append(scores.dtype)
        return fill(scores, mask)

    mask = make_mask(4, 5)
    for in_fp32 in (False, True):
        softmax = module(dtype=torch.bfloat16, fusion=False, mask_func=look, in_fp32=in_fp32)
        softmax(make_scores(4, 5, torch.bfloat16), mask)
    assert seen == [torch.bfloat16, torch.float32]


def test_without_fusion_single_query_has_no_causal_mask():
    scores = make_scores(1, 9)
    softmax = module(AttnMaskType.causal, fusion=False)
    assert torch.equal(softmax(scores, None), torch.softmax(scores, -1))


@pytest.mark.parametrize("window", [None, (2, 0), (-1, 0), (2, -1), (-1, -1)])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.padding])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_mask_that_is_not_bool_goes_to_mask_func_and_limits_hold(window, mask_type, shape):
    scores, mask = make_scores(*shape), make_mask(*shape)
    excluded = mask | excluded_entries(*shape, mask_type is AttnMaskType.causal, window)
    assert not excluded.all(-1).any()

    def either(z, m):
        return fill(z, m) if m.dtype == torch.bool else z + m

    recorded = Recorded(either)
    additive = torch.zeros(mask.shape).masked_fill(mask, -10000.0)
    softmax = module(mask_type, mask_func=recorded, window=window)
    assert_near(softmax(scores, additive), expected(scores, excluded))
    assert recorded.masks[0] is additive
    assert constraints(softmax.why_not_fused(scores, additive))[0] == "dtype of mask"


def test_mask_func_is_asked_for_only_where_it_is_needed():
    scores, mask = make_scores(4, 4), make_mask(4, 4)
    module(mask_func=None)(scores, mask)
    module(mask_func=None, fusion=False)(scores, None)
    with pytest.raises(ValueError, match="mask_func"):
        module(mask_func=None, fusion=False)(scores, mask)


# Whether a call runs fused


def constraints(reasons):
    assert all(isinstance(reason, megasoftmax.Reason) for reason in reasons)
    return [reason.constraint for reason in reasons]


def test_reasons_on_a_cpu():
    softmax, scores = module(), make_scores(4, 5)
    assert "device" in constraints(softmax.why_not_fused(scores, None))
    assert softmax.why_not_fused(scores, None) == megasoftmax.why_not_fused(
        megasoftmax.softmax, scores
    )
    assert softmax.why_not_fused(scores, None) == megasoftmax.why_not_fused(softmax, scores, None)


def test_all_reasons_are_given():
    scores, mask = make_scores(4, 5, torch.float64), make_mask(4, 5).to(torch.uint8)
    found = constraints(module(fusion=False).why_not_fused(scores, mask))
    assert found[:3] == ["scaled_masked_softmax_fusion", "dtype of mask", "device"]
    assert "dtype of scores" in found


def test_reasons_raise_as_the_call_would():
    for call in (module(), module().why_not_fused):
        with pytest.raises(ValueError, match="input: expected"):
            call(torch.zeros(3, 4), None)
        with pytest.raises(ValueError, match="softmax_offset: expected"):
            call(make_scores(4, 5), None, torch.zeros(HEADS + 1))
        with pytest.raises(ValueError, match="mask: expected"):
            call(make_scores(4, 5), torch.zeros(5, 5, dtype=torch.bool))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kernel_is_available_on_a_gpu(dtype):
    for queries, keys in ((8, 8), (3, 7), (1, 1), (5, 8193)):
        softmax = module(AttnMaskType.causal, dtype=dtype, window=(4, 0))
        mask = torch.zeros(1, 1, queries, keys, dtype=torch.bool, device="cuda")
        scores = make_scores(queries, keys, dtype, "cuda")
        offset = torch.zeros(HEADS, device="cuda")
        sizes = (BATCH, HEADS, queries, keys)
        found = [softmax.is_kernel_available(m, *sizes) for m in (None, mask, mask.byte())]
        assert found == [True, True, False]
        assert softmax.why_not_fused(scores, mask, offset) == ()
    softmax.scaled_masked_softmax_fusion = False
    assert softmax.is_kernel_available(None, BATCH, HEADS, 8, 8) is False
    assert constraints(softmax.why_not_fused(scores, None)) == ["scaled_masked_softmax_fusion"]


def test_what_megatron_asks_of_a_kernel_on_a_cpu():
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    assert module(dtype=torch.bfloat16).is_kernel_available(mask, 2, 4, 8, 8) is False
    assert FusedScaleMaskSoftmax.get_batch_per_block(7, 9, 3, 5) == 1


@pytest.mark.gpu
def test_fused_equals_plain_torch_on_a_gpu():
    scores = make_scores(33, 65, torch.bfloat16, "cuda")
    mask, offset = make_mask(33, 65, "cuda"), torch.randn(HEADS, device="cuda")
    softmax = module(AttnMaskType.causal, dtype=torch.bfloat16, window=(9, 0))
    assert softmax.why_not_fused(scores, mask, offset) == ()
    on_cpu = softmax(scores.cpu(), mask.cpu(), offset.cpu())
    torch.testing.assert_close(softmax(scores, mask, offset).cpu(), on_cpu, rtol=8e-3, atol=1e-6)


# The constructor


def test_mask_types_of_megatron():
    names = ("padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right")
    assert [(each.value, each.name) for each in AttnMaskType] == [*enumerate(names, 1)]


def test_mask_type_is_taken_by_name_and_kept():
    stranger = enum.Enum("AttnMaskType", {"causal": 77, "padding": 2})
    scores = make_scores(5, 5)
    causal = module(AttnMaskType.causal)(scores, None)
    for given in (stranger.causal, "causal"):
        softmax = module(given)
        assert softmax.attn_mask_type is given
        assert torch.equal(softmax(scores, None), causal)
    assert torch.equal(module(stranger.padding)(scores, None), module()(scores, None))


def test_attributes_are_megatrons_and_may_change():
    softmax = module(AttnMaskType.padding, dtype=torch.bfloat16, scale=2.0, window=[3, 0])
    shown = {name: value for name, value in vars(softmax).items() if name[0] != "_"}
    assert shown.pop("training")
    wanted = {"input_in_fp16": False, "input_in_bf16": True, "input_in_float16": True}
    wanted |= {"attn_mask_type": AttnMaskType.padding, "scaled_masked_softmax_fusion": True}
    wanted |= {"mask_func": forbidden, "softmax_in_fp32": True, "scale": 2.0}
    wanted |= {"softcap": None}
    assert shown == wanted | {"window_size": (3, 0)}
    scores = make_scores(5, 5, torch.bfloat16)
    softmax.attn_mask_type, softmax.window_size = AttnMaskType.causal, None
    wanted = module(AttnMaskType.causal, dtype=torch.bfloat16, scale=2.0)(scores, None)
    assert torch.equal(softmax(scores, None), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(softmax))(scores, None), wanted)
    assert softmax.state_dict() == {}


def test_arguments_by_position():
    softmax = FusedScaleMaskSoftmax(True, False, AttnMaskType.causal, True, None, True, 0.5, (2, 0))
    scores = make_scores(5, 5, torch.float16)
    excluded = excluded_entries(5, 5, True, (2, 0))
    assert_near(softmax(scores, None), expected(scores, excluded, scale=0.5))


ARGUMENTS = {"input_in_fp16": True, "input_in_bf16": False, "attn_mask_type": AttnMaskType.causal}
ARGUMENTS |= {"scaled_masked_softmax_fusion": True, "mask_func": fill, "softmax_in_fp32": True}
ARGUMENTS |= {"scale": None}


def made(**change):
    return lambda: FusedScaleMaskSoftmax(**(ARGUMENTS | change))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (made(input_in_bf16=True), ValueError, "input_in_fp16, input_in_bf16: .* got both"),
        (made(scale=2.0, softmax_in_fp32=False), ValueError, "softmax_in_fp32: .*scale 2.0"),
        (made(scale="2"), TypeError, "scale: .* got str"),
        (made(attn_mask_type="triangle"), ValueError, "attn_mask_type: .* padding, causal"),
        (made(attn_mask_type=2), TypeError, "attn_mask_type: .* got int"),
        (made(window_size=(-2, 0)), ValueError, r"window_size: .* got \(-2, 0\)"),
        (made(window_size=(1, 2, 3)), ValueError, "window_size"),
        (made(window_size=(1.5, 0)), TypeError, "window_size"),
        (made(window_size=4), TypeError, "window_size: .* got int"),
        (
            lambda: ScaledUpperTriangMaskedSoftmax.apply(make_scores(4, 4), 1.0),
            *(ValueError, r"inputs: expected .batch . heads, queries, keys"),
        ),
        (
            lambda: ScaledMaskedSoftmax.apply(torch.zeros(3, 4, 4), None, 1.0),
            *(ValueError, r"inputs: expected .batch, heads, queries, keys"),
        ),
        (
            lambda: ScaledMaskedSoftmax.apply(make_scores(4, 4), torch.zeros(4, 4), 1.0),
            *(TypeError, "mask: expected a bool tensor"),
        ),
        *(
            (lambda bad=bad: SoftmaxOne(None, bad), ValueError, "denominator_offset")
            for bad in (-1.0, math.inf, math.nan)
        ),
        (lambda: SoftmaxOne(None, "1"), TypeError, "denominator_offset: .* got str"),
        *(
            (lambda c=call: c(make_scores(4, 5)), ValueError, "denominator_offset")
            for dim, heads in ((-1, HEADS + 1), (1, HEADS), (0, HEADS))
            for softmax in (SoftmaxOne(dim, torch.zeros(heads)),)
            for call in (softmax, softmax.why_not_fused)
        ),
        (
            lambda: SoftmaxOne(4)(make_scores(4, 5)),
            *(ValueError, "dim: expected from -4 to 3, got 4"),
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# The classes with apply


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_apply(shape, dtype, device):
    scores, mask = make_scores(*shape, dtype, device), make_mask(*shape, device)
    flat = scores.flatten(0, 1)
    later = excluded_entries(*shape, causal=True)
    for actual, wanted in (
        (ScaledSoftmax.apply(scores, 0.3), expected(scores, scale=0.3)),
        (ScaledSoftmax.apply(flat, 0.3), expected(flat, scale=0.3)),
        (ScaledMaskedSoftmax.apply(scores, None, 0.3), expected(scores, scale=0.3)),
        (ScaledMaskedSoftmax.apply(scores, mask, 0.3), expected(scores, mask, scale=0.3)),
        (ScaledUpperTriangMaskedSoftmax.apply(flat, 0.3), expected(flat, later, scale=0.3)),
    ):
        assert actual.dtype == dtype
        assert_near(actual, wanted)


def test_apply_gradients_and_gradient_given_is_kept(device):
    scores, mask = make_scores(6, 6, device=device), make_mask(6, 6, device)
    gradient = make_scores(6, 6, device=device, seed=2)
    later = excluded_entries(6, 6, causal=True)
    for call, excluded in (
        (lambda z: ScaledSoftmax.apply(z, 0.3), None),
        (lambda z: ScaledMaskedSoftmax.apply(z, mask, 0.3), mask),
        (
            lambda z: ScaledUpperTriangMaskedSoftmax.apply(z.flatten(0, 1), 0.3).view_as(z),
            later,
        ),
    ):
        z, reference = scores.clone().requires_grad_(), scores.double().cpu().requires_grad_()
        given = gradient.clone()
        call(z).backward(given)
        expected(reference, excluded, scale=0.3).backward(gradient.double().cpu())
        assert_near(z.grad, reference.grad)
        assert torch.equal(given, gradient)


# SoftmaxOne


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_softmax_one_with_logits_per_head(dtype, device):
    scores = make_scores(4, 5, dtype, device)
    offset = torch.tensor([-1.0, 0.0, 2.5], dtype=dtype, device=device)
    actual = SoftmaxOne(-1, offset)(scores)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    assert_near(actual, expected(scores, offset=offset))
    across = SoftmaxOne(2, offset)(scores)
    assert_near(across, expected(scores.mT, offset=offset).mT)


@pytest.mark.parametrize("number", [0, 0.25, 3])
@pytest.mark.parametrize("dim", [None, -1, 0, 1, 2])
def test_softmax_one_with_a_number(number, dim, device):
    scores = make_scores(4, 5, device=device)[0]
    powers = scores.double().cpu().exp()
    softmax = SoftmaxOne(dim, number)
    wanted = powers / (number + powers.sum(-1 if dim is None else dim, keepdim=True))
    assert_near(softmax(scores), wanted)
    assert "device" in constraints(megasoftmax.why_not_fused(softmax, scores)) or device == "cuda"


def test_softmax_one_is_off_by_one_by_default():
    actual = SoftmaxOne()(torch.zeros(3))
    assert_near(actual, torch.full((3,), 0.25, dtype=torch.float64))
    scores = make_scores(4, 5)
    assert_near(SoftmaxOne()(scores), expected(scores, offset=torch.zeros(1)))
    assert_near(SoftmaxOne(1, torch.zeros(1))(scores), SoftmaxOne(1)(scores).double())


def test_softmax_one_learns(device):
    scores = make_scores(4, 5, device=device).requires_grad_()
    softmax = SoftmaxOne(-1, torch.nn.Parameter(torch.tensor([-1.0, 0.0, 2.5]))).to(device)
    assert list(softmax.state_dict()) == ["denominator_offset"]
    gradient = make_scores(4, 5, device=device, seed=2)
    softmax(scores).backward(gradient)
    offset = softmax.denominator_offset
    z, logit = (t.detach().double().cpu().requires_grad_() for t in (scores, offset))
    expected(z, offset=logit).backward(gradient.double().cpu())
    for mine, theirs in ((scores.grad, z.grad), (offset.grad, logit.grad)):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=1e-5, atol=1e-6)


# Around them


def test_public_names():
    assert megasoftmax.__all__ == sorted(megasoftmax.__all__)
    assert all(hasattr(megasoftmax, name) for name in megasoftmax.__all__)


@pytest.mark.parametrize("fusion", [True, False])
def test_compiles_whole(fusion):
    softmax = module(AttnMaskType.causal, fusion=fusion, mask_func=fill, scale=2.0, window=(2, 0))
    scores, offset = make_scores(5, 5), torch.zeros(HEADS)
    compiled = torch.compile(softmax, fullgraph=True, backend="eager")
    assert_near(compiled(scores, None, offset), softmax(scores, None, offset).double())
