"""Scales of rows, limits of the K entries, and what is drawn from them."""

import functools

import numpy
import op_checks
import oracle
import oracle_topk
import pytest
import torch
from inputs import DTYPES, coin, fused_on, normal
from test_topk import check, topk_on
from torch import Tensor

import megasoftmax
from megasoftmax import ops
from megasoftmax.limits import kernel_limits
from megasoftmax.reference import topk as reference

INF, NAN = torch.inf, torch.nan
MAX_K = kernel_limits().topk["kMaxK"]
gpu = pytest.mark.gpu
sample_on = functools.partial(fused_on, megasoftmax.sample)


def parts(*shape, device, least=0.05, seed=3):
    generator = torch.Generator(device).manual_seed(seed)
    return least + (0.999 - least) * torch.rand(shape, generator=generator, device=device)


def counts(*shape, most, device, seed=4):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(most + 1, shape, generator=generator, device=device, dtype=torch.int32)


LIMITS = {
    "top_k": lambda rows, device: {"top_k": 3},
    "top_p": lambda rows, device: {"top_p": 0.7},
    "min_p": lambda rows, device: {"min_p": 0.2},
    "all": lambda rows, device: {"top_k": 9, "top_p": 0.83, "min_p": 0.07},
    "none": lambda rows, device: {"top_k": 400, "top_p": 1.0, "min_p": 0.0},
    "of rows": lambda rows, device: {
        "top_k": counts(*rows, most=12, device=device),
        "top_p": parts(*rows[-1:], device=device),
        "min_p": parts(*rows[:-1], 1, device=device, least=0.001, seed=7) / 9,
    },
}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
def test_limits(limits, renormalize, dtype, device):
    rows = (3, 4)
    for columns, k in ((9, 9), (37, 5), (300, 33), (1003, 100), (4099, 64)):
        logits = 2 * normal(*rows, columns, device=device, dtype=dtype)
        given = LIMITS[limits](rows, device) | {"renormalize": renormalize}
        check(logits, k, **given, what=f"({columns} columns, k {k})")
        check(logits, k, **given, scale=0.6, mask=coin(columns, device=device), what="with a mask")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("renormalize", [False, True])
def test_scale_of_rows(renormalize, dtype, device):
    for columns, k in ((8, 8), (37, 5), (256, 8), (1003, 40)):
        logits = normal(2, 3, columns, device=device, dtype=dtype)
        for shape in ((2, 3), (3,), (2, 1), (1,), ()):
            scale = 0.3 + 2 * parts(*shape, device=device)
            if shape == ():
                scale = scale.reshape(()) if device == "cuda" else scale.reshape(1, 1)
            check(logits, k, scale=scale, renormalize=renormalize, what=f"({columns}, {shape})")
        mask = coin(3, columns, device=device)
        check(logits, k, scale=0.3 + parts(3, device=device), mask=mask, renormalize=renormalize)


def test_rows_of_any_strides(device):
    """Kernels count rows, whatever dimensions there are."""
    logits = 2 * normal(2, 3, 2, 2, 5, 40, device=device)
    scale = 0.3 + parts(3, 1, 2, 5, device=device)
    top_k = counts(10, most=9, device=device)[::2]
    top_p = parts(5, 2, device=device).mT
    check(logits, 9, scale=scale, top_k=top_k, top_p=top_p, renormalize=True)
    flat = logits.flatten(0, -2)
    wide = parts(len(flat), 3, device=device)
    check(flat, 9, scale=wide[:, 1], top_p=wide[:, 2], min_p=wide[:1, 0].expand(len(flat)) / 9)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_long_rows(rows, dtype):
    """Every regime: blocks, clusters, the whole GPU."""
    for columns in (700, 8192, 32001, 128256, 300001):
        count = max(1, min(rows, 2_000_000 // columns))
        logits = 3 * normal(count, columns, device="cuda", dtype=dtype)
        given = {
            "scale": 0.7 + parts(count, device="cuda"),
            "top_k": counts(count, most=60, device="cuda"),
            "top_p": parts(count, device="cuda"),
        }
        for k in (1, 32, 33, 64, MAX_K):
            check(logits, k, **given, renormalize=k % 2 == 1, what=f"({count} x {columns}, k {k})")


def test_with_a_bias_or_a_softcap_rows_have_scales_too(device):
    """In plain torch."""
    logits, bias = normal(3, 4, 9, device=device), normal(9, device=device, seed=2)
    scale = 0.3 + parts(4, device=device)
    for options in ({"bias": bias.requires_grad_()}, {"softcap": 1.5}):
        function = functools.partial(megasoftmax.softmax_topk, fused=False)
        oracle_topk.check(function, logits, 5, scale=scale, **options)
        call = (megasoftmax.softmax_topk, logits, 5)
        reasons = megasoftmax.why_not_fused(*call, scale=scale, **options)
        assert any("scale with a bias or a softcap" in str(reason) for reason in reasons)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, 1e-40, 3e38])
def test_rows_without_a_scale_are_nan(value, device):
    logits = normal(3, 50, device=device).requires_grad_()
    scale = torch.tensor([1.0, value, 0.5], device=device)
    p, indices, lse = topk_on(device)(logits, 7, scale=scale, return_lse=True)
    assert p.isnan().all(-1).tolist() == [False, True, False]
    assert lse.isnan().tolist() == [False, True, False]
    assert torch.equal(indices, logits.sort(-1, descending=True).indices[:, :7])
    (gradient,) = torch.autograd.grad(p[[0, 2]].square().sum(), logits)
    assert gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_16_bits_are_not_rounded_again(dtype, softcap, device):
    """In plain torch too, where the softcap divides them."""
    logits, scale = normal(4, 9, device=device), torch.tensor([0.0, INF, 0.3, 1.7], device=device)
    call = functools.partial(megasoftmax.softmax_topk, logits, 9, softcap=softcap, return_lse=True)
    scale = scale.to(dtype)
    assert torch.equal(call(scale=scale)[2].isnan(), torch.arange(4, device=device) < 2)
    found, wanted = call(scale=scale), call(scale=scale.float())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_nan_and_empty_rows_have_no_limits(device):
    logits = normal(4, 50, device=device)
    logits[1, 3], logits[2] = NAN, -INF
    mask = torch.zeros(4, 50, dtype=torch.bool, device=device)
    mask[3] = True
    for renormalize in (False, True):
        limits = {"top_k": 2, "top_p": 0.5, "renormalize": renormalize}
        p, indices = topk_on(device)(logits, 6, mask=mask, **limits)
        assert p[1].isnan().all()
        assert (p[2:] == 0).all()
        assert (p[0, 2:] == 0).all()
        assert indices[1, 0] == 3


def test_top_k_says_whether_top_p_is_of_the_whole_row(device):
    """Transformers, vLLM and FlashInfer renormalise behind top_k."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device).log()
    sample = topk_on(device)
    # Of the whole row 0.4 is less than 0.55; of the first two it is 4/7, which is not.
    assert (sample(logits, 2, top_p=0.55)[0] > 0).sum() == 2
    assert (sample(logits, 2, top_k=2, top_p=0.55)[0] > 0).sum() == 1
    assert (sample(logits, 4, top_k=2, top_p=0.55)[0] > 0).sum() == 1
    # A number above K is no limit.
    for top_k, kept in ((2, 1), (3, 2)):
        of_rows = torch.tensor([top_k], device=device, dtype=torch.int32)
        for each in (top_k, of_rows):
            assert (sample(logits, 2, top_k=each, top_p=0.55)[0] > 0).sum() == kept
    p, _ = sample(logits, 3, top_p=0.0, renormalize=True)
    assert p.tolist() == [[1.0, 0.0, 0.0]]


def test_split_vocabulary(group_of_one):
    logits = 2 * normal(3, 4, 37, device="cpu").requires_grad_()
    mask = coin(37, device="cpu")
    given = LIMITS["of rows"]((3, 4), "cpu") | {"scale": 0.3 + parts(4, device="cpu"), "mask": mask}
    for renormalize in (False, True):
        options = given | {"renormalize": renormalize, "return_lse": True}
        found = megasoftmax.softmax_topk(logits, 9, **options, group=group_of_one)
        wanted = megasoftmax.softmax_topk(logits, 9, **options)
        torch.testing.assert_close(found, wanted)
        losses = (p.square().sum() + lse.sum() for p, _, lse in (found, wanted))
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits) for loss in losses))


def test_vmap(device):
    """Of what has an example's shape, and of what all share."""
    logits = normal(5, 4, 30, device=device)
    scale, top_p = 0.5 + parts(5, 4, device=device), parts(4, device=device)

    def call(logits, scale):
        return megasoftmax.softmax_topk(logits, 6, scale=scale, top_p=top_p, renormalize=True)

    op_checks.check_vmap(call, [logits, scale], [0, 0])


@pytest.mark.parametrize("name", ["scale", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("is_differentiated", [False, True])
def test_vmap_of_numbers(name, is_differentiated, device):
    """Tensors without dimensions: each example has its own."""
    logits = normal(5, 4, 30, device=device)
    numbers = counts(5, most=6, device=device) if name == "top_k" else parts(5, device=device)

    def call(logits, number):
        return megasoftmax.softmax_topk(logits, 6, **{name: number}, renormalize=True)[0]

    if is_differentiated:
        probabilities, call = call, torch.func.grad(lambda *given: probabilities(*given).var())
    found = torch.vmap(call)(logits, numbers)
    wanted = [call(*each) for each in zip(logits, numbers.unsqueeze(-1), strict=True)]
    torch.testing.assert_close(found, torch.stack(wanted))


# What is drawn


def test_numbers_of_rows(device):
    for seed in (0, 5, -1, 2**62 + 12345, -(2**63)):
        found = reference.uniform(torch.tensor([seed], device=device), 100)
        words = (oracle.philox((row, 0, 0, 64), seed) for row in range(100))
        assert found.tolist() == [(first >> 8) / 2**24 for first, *_ in words]


SAMPLED = {
    "plain": {},
    "scale": {"scale": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"scale": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize("columns", [64, 300])
def test_what_is_drawn_has_the_distribution(columns, options, device):
    """A chi-square test of 20,000 rows against the definition in float64."""
    rows, k = 20_000, 20
    row = 2 * normal(columns, device=device)
    given = SAMPLED[options]
    drawn = sample_on(device)(
        row.expand(rows, columns), k, **given, seed=torch.tensor([7], device=device)
    )
    expected = oracle_topk.softmax_topk(row, k, **given, renormalize=True)
    wanted = torch.zeros(columns, dtype=torch.float64)
    wanted[expected.indices] = expected.probabilities
    found = drawn.cpu().bincount(minlength=columns).double()
    assert (found[wanted == 0] == 0).all()
    seen = wanted > 0
    squares = ((found - rows * wanted).square() / (rows * wanted))[seen].sum().item()
    degrees = int(seen.sum()) - 1
    assert squares < degrees + 5 * (2 * degrees) ** 0.5 + 10, (squares, degrees)


def definition(p: Tensor, indices: Tensor, numbers: Tensor) -> Tensor:
    through = p.double().cumsum(-1)
    at = (through <= numbers.double().unsqueeze(-1) * through[..., -1:]).sum(-1, keepdim=True)
    return indices.gather(-1, at.clamp(max=p.shape[-1] - 1)).squeeze(-1)


SHAPES_AND_K = [((2, 3, 37), 9), ((150, 256), 8), ((5, 5003), 64), ((1, 50257), 200), ((9,), 9)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_sample(dtype, device):
    if dtype == torch.float64 and device == "cuda":
        pytest.skip("not for the kernels")
    for shape, k in SHAPES_AND_K:
        logits = 2 * normal(*shape, device=device, dtype=dtype)
        rows = shape[:-1]
        for of_rows in (False, True):
            given = {"scale": 0.9, "top_k": 7, "top_p": 0.9}
            if of_rows and rows:
                given = {
                    "scale": 0.5 + parts(*rows, device=device),
                    "top_k": counts(*rows, most=k + 2, device=device),
                    "top_p": parts(*rows, device=device),
                    "mask": coin(shape[-1], device=device),
                }
            seed = torch.tensor([11], device=device)
            sample, topk = sample_on(device), topk_on(device)
            drawn, p, indices = sample(logits, k, **given, seed=seed, return_probabilities=True)
            wanted, same = topk(logits, k, **given, renormalize=True, dtype=p.dtype)
            torch.testing.assert_close(p, wanted)
            assert torch.equal(indices, same)
            numbers = reference.uniform(seed, logits.shape[:-1].numel()).view(rows)
            others = drawn != definition(p, indices, numbers)
            assert others.sum() <= 1  # where rounding decides
            assert torch.equal(drawn, sample(logits, k, **given, seed=seed))
            assert drawn.shape == rows
            assert (p.gather(-1, (indices == drawn.unsqueeze(-1)).int().argmax(-1, True)) > 0).all()


@gpu
def test_the_same_is_drawn_on_both_devices():
    logits = 2 * normal(500, 2003, device="cpu")
    seed = torch.tensor([3])
    for options in SAMPLED.values():
        mine = megasoftmax.sample(logits, 40, **options, seed=seed)
        theirs = megasoftmax.sample(logits.cuda(), 40, **options, seed=seed.cuda(), fused=True)
        assert (mine == theirs.cpu()).float().mean() > 0.995  # but where rounding decides


def test_rows_without_a_distribution_give_their_first_index(device):
    logits = normal(3, 50, device=device)
    logits[0, 7], logits[1] = NAN, -INF
    seed = torch.tensor([3], device=device)
    drawn = sample_on(device)(logits, 4, seed=seed)
    assert drawn[:2].tolist() == [7, 0]
    mask = torch.ones(3, 50, dtype=torch.bool, device=device)
    mask[:, 9] = False
    assert sample_on(device)(logits[2:], 4, mask=mask[2:], seed=seed).tolist() == [9]


def test_greedy_rows_beside_others(device):
    logits = normal(64, 300, device=device)
    top_k = torch.tensor([1, 40], device=device).repeat(32)
    drawn = sample_on(device)(logits, 40, top_k=top_k)
    assert torch.equal(drawn[::2], logits[::2].argmax(-1))
    assert not torch.equal(drawn, logits.argmax(-1))


VMAPPED = {
    "logits": ("logits",),
    "seeds": ("logits", "seed"),
    "seeds alone": ("seed",),
    "options alone": ("mask", "scale", "top_k"),
    "all": ("logits", "mask", "scale", "seed", "top_k"),
}


@pytest.mark.parametrize("through", ["function", "op", "reference"])
@pytest.mark.parametrize("names", VMAPPED.values(), ids=VMAPPED)
def test_examples_of_vmap_draw_what_they_would_alone(names, through, device, capfd):
    """Their rows count from 0 on. Examples with one seed draw by the same numbers."""
    each = {
        "logits": normal(5, 6, 40, device=device),
        "mask": coin(5, 40, device=device),
        "scale": 0.5 + parts(5, 6, device=device),
        "seed": torch.arange(5, device=device).unsqueeze(-1),
        "top_k": counts(5, 6, most=9, device=device),
    }
    first = {name: value[0] for name, value in each.items()}

    def call(examples):
        given = first | examples
        if through == "function":
            return megasoftmax.sample(k=9, top_p=0.9, return_probabilities=True, **given)
        logits, mask, scale, seed, top_k = (given[name] for name in each)
        function = ops.topk.sample if through == "op" else reference.softmax_topk_sample
        return function(logits, 9, 1.0, scale, mask, 0, top_k, 0.9, None, 0.0, None, seed)

    examples = {name: each[name] for name in names}
    alone = [call({name: value[i] for name, value in examples.items()}) for i in range(5)]
    for found, wanted in zip(torch.vmap(call)(examples), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))
    assert "performance drop" not in capfd.readouterr().err


def test_sample_has_no_gradient_and_other_seeds_draw_others(device):
    logits = normal(200, 30, device=device).requires_grad_()
    first, second = (sample_on(device)(logits, 30) for _ in range(2))
    assert not first.requires_grad
    assert not torch.equal(first, second)


def test_sample_compiled(device):
    logits, seed = normal(5, 300, device=device), torch.tensor([3], device=device)
    sample = sample_on(device)

    def call(logits, seed):
        return sample(logits, 20, top_p=0.9, seed=seed)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, seed), call(logits, seed))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"k": 0}, ValueError, r"^k: expected an integer from 1 to 9, got 0"),
        ({"k": -1}, ValueError, r"^k: expected an integer from 1 to 9, got -1"),
        ({"k": 2.0}, TypeError, r"^k: expected an integer from 1 to 9, got float"),
        ({"temperature": 0.8}, TypeError, "use scale=1 / temperature"),
        ({"seed": 3}, TypeError, r"^seed: expected None or a tensor of int64"),
        ({"return_probabilities": 1}, TypeError, r"^return_probabilities: expected a bool"),
        ({"top_p": 2.0}, ValueError, r"^top_p: expected a number from 0 to 1, got 2.0"),
        ({"top_k": 0}, ValueError, r"^top_k: expected an integer from 1 on, got 0"),
        ({"top_k": 2**63}, ValueError, rf"^top_k: expected an integer up to .*, got {2**63}"),
        ({"top_k": 3.0}, TypeError, r"^top_k: expected an integer from 1 on, got float"),
        ({"top_k": True}, TypeError, r"^top_k: expected an integer from 1 on, got bool"),
        ({"bias": torch.zeros(9)}, TypeError, "unexpected keyword argument 'bias'"),
    ],
)
def test_errors_of_sample(given, error, message):
    asked = functools.partial(megasoftmax.why_not_fused, megasoftmax.sample)
    for function in (megasoftmax.sample, asked):
        with pytest.raises(error, match=message):
            function(torch.zeros(2, 9), **({"k": 3} | given))


@pytest.mark.parametrize("top_k", [numpy.int64(3), numpy.uint8(3), torch.tensor(3)])
def test_integers_of_numpy_and_tensors_as_top_k(top_k):
    logits, seed = normal(4, 40, device="cpu"), torch.tensor([3])
    for function, rest in ((megasoftmax.softmax_topk, {}), (megasoftmax.sample, {"seed": seed})):
        found, expected = (function(logits, 9, top_k=each, **rest) for each in (top_k, 3))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        reasons = [megasoftmax.why_not_fused(function, logits, 9, top_k=k) for k in (top_k, 3)]
        assert reasons[0] == reasons[1]


def test_why_sample_does_not_run_fused():
    reasons = megasoftmax.why_not_fused(megasoftmax.sample, torch.zeros(2, 999), 300, top_p=0.9)
    assert any(str(reason).startswith("k: expected at most") for reason in reasons)
