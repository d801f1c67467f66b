"""DeepSpeed's attention with two biases: against its definition, and installed in its place."""

import sys
from types import ModuleType

import pair_layers
import pytest
import torch
from inputs import coin, drawn, normal
from torch import Tensor

from megasoftmax.integrations import evoformer, float_masks, installing
from megasoftmax.integrations.evoformer import DS4Sci_EvoformerAttention, install
from megasoftmax.integrations.float_masks import bias_and_mask

BATCH, ROWS, TOKENS, HEADS, DIM = 2, 3, 6, 2, 4
KEEP = coin(BATCH, ROWS, 1, 1, TOKENS, device="cpu", odds=0.7)
KEEP[..., 0] = True
MASK = 1e9 * (KEEP.double() - 1)  # as OpenFold-3 and Protenix make it
SOFT = normal(BATCH, ROWS, 1, 1, TOKENS, device="cpu", seed=5).double() + MASK


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Q, K, V and the bias of a batch."""
    shapes = [(BATCH, ROWS, TOKENS, HEADS, DIM)] * 3 + [(BATCH, 1, HEADS, TOKENS, TOKENS)]
    return drawn(*shapes, device="cpu", dtype=dtype)


def defined(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
    logits = torch.einsum("bnqhd,bnkhd->bnhqk", query, key) * DIM**-0.5
    for bias in biases:
        logits = logits + bias
    return torch.einsum("bnhqk,bnkhd->bnqhd", logits.softmax(-1), value)


def assert_equal(found: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    """Outputs, and gradients of a weighted sum."""
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = normal(*wanted.shape, device="cpu", seed=9).double()
    gradients = (torch.autograd.grad((each * weights).sum(), given) for each in (found, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first_is_mask", [None, True, False])
def test_a_mask_and_a_bias(first_is_mask):
    q, k, v, bias = given = tensors()
    found = DS4Sci_EvoformerAttention(q, k, v, [MASK, bias], first_is_mask=first_is_mask)
    assert found.is_contiguous()
    assert_equal(found, defined(q, k, v, MASK, bias), given)
    excluded = DS4Sci_EvoformerAttention(q, k, v, [~KEEP, bias])
    assert_equal(excluded, defined(q, k, v, MASK, bias), given)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_first_bias_that_is_no_mask_is_added(needs_gradient):
    q, k, v, bias = given = tensors()
    soft = SOFT.clone().requires_grad_(needs_gradient)
    found = DS4Sci_EvoformerAttention(q, k, v, [soft, bias])
    assert_equal(found, defined(q, k, v, soft, bias), [*given, soft] if needs_gradient else given)


BIAS = tensors()[3]


@pytest.mark.parametrize(
    "biases",
    [[], [None], [None, None], [MASK], [MASK, None], [None, BIAS]],
    ids=["nothing", "None", "None twice", "mask", "mask and None", "None and bias"],
)
def test_fewer_biases(biases):
    q, k, v, _ = tensors()
    given = list(biases)
    found = DS4Sci_EvoformerAttention(q, k, v, given)
    learned = [each for each in biases if each is BIAS]
    wanted = defined(q, k, v, *(each for each in biases if each is not None))
    assert_equal(found, wanted, [q, k, v, *learned])
    assert len(given) == len(biases)  # DeepSpeed appends to it


def test_a_query_without_a_key_gets_zeros():
    """In every way: as a mask, in a sum and with a gradient."""
    q, k, v, bias = tensors()
    nothing = MASK.clone()
    nothing[0, 1] = -1e9
    soft = nothing + SOFT
    for first in (nothing, soft, soft.clone().requires_grad_(), nothing == -1e9):
        output = DS4Sci_EvoformerAttention(q, k, v, [first, bias])
        assert not output[0, 1].any()
        assert output.isfinite().all()
        gradients = torch.autograd.grad(output.sum(), [q, k, v, bias])
        assert not gradients[0][0, 1].any()
        assert all(each.isfinite().all() for each in gradients)


def test_types():
    q, k, v, bias = tensors(torch.bfloat16)
    output = DS4Sci_EvoformerAttention(q, k, v, [MASK.bfloat16(), bias])
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert bias.grad.dtype == torch.bfloat16
    wanted = defined(*(each.double() for each in (q, k, v)), MASK, bias.double())
    torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=2e-2)


# Which biases become a mask.


def test_a_mask_is_not_added():
    bias = tensors()[3]
    for first in (MASK, MASK.float(), MASK.half(), torch.zeros(2)):
        found, mask = bias_and_mask([first, bias])
        assert found is bias
        assert torch.equal(mask, first < -1)
    for first in (SOFT, MASK - 1, MASK.clone().requires_grad_(), MASK + torch.nan):
        found, mask = bias_and_mask([first, bias])
        assert mask is None
        assert found.shape == (BATCH, ROWS, HEADS, TOKENS, TOKENS)
    with torch.no_grad():
        assert bias_and_mask([MASK.clone().requires_grad_(), bias])[1] is not None
    assert bias_and_mask([MASK])[0].shape == MASK.shape
    assert bias_and_mask([]) == (None, None)


@pytest.mark.parametrize("value", [-1.0, float_masks.EXCLUDED + 1, torch.nan, torch.inf])
def test_what_is_no_mask_is_refused(value):
    first = MASK.clone()
    first[0, 0, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"biases\[0\]: expected a mask"):
        bias_and_mask([first], first_is_mask=True)


def test_no_value_is_read_while_traced():
    """The decision would become part of the program."""

    def attend(q, k, v, first, bias):
        return DS4Sci_EvoformerAttention(q, k, v, [first, bias])

    given = [each.detach() for each in tensors()]
    q, k, v, bias = given
    traced = torch.fx.experimental.proxy_tensor.make_fx(attend)(q, k, v, MASK, bias)
    for first in (MASK, SOFT):
        torch.testing.assert_close(traced(q, k, v, first, bias), defined(q, k, v, first, bias))


def test_a_device_asserts_where_values_are_not_read(monkeypatch):
    """As on a GPU: the check is an operator, and nothing is read."""
    monkeypatch.setattr(float_masks, "is_traced", lambda: True)
    bias = tensors()[3]
    assert bias_and_mask([MASK, bias], first_is_mask=True)[0] is bias
    assert bias_and_mask([MASK, bias])[1] is None
    with pytest.raises(RuntimeError, match="expected a mask; pass first_is_mask=False"):
        bias_and_mask([SOFT, bias], first_is_mask=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"biases": [MASK, MASK, MASK]}, ValueError, "biases: expected at most 2, got 3"),
        ({"Q": torch.zeros(3, 4)}, ValueError, "Q: expected [*, L, H, D], got shape (3, 4)"),
        ({"K": torch.zeros(3, 4, 5).int()}, TypeError, "K: expected"),
        ({"V": torch.zeros(2, 3, 6, 2, 4)}, TypeError, "V: expected a tensor of torch.float64"),
        ({"biases": [None, MASK[..., :4]]}, ValueError, "biases[1]: expected a shape that"),
        ({"biases": [MASK, MASK == 0]}, TypeError, "biases[1]: expected"),
        ({"biases": [[0.0]]}, TypeError, "biases[0]: expected"),
        ({"biases": [~KEEP[..., :4]]}, ValueError, "biases[0]: expected"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    q, k, v, _ = tensors()
    with pytest.raises(error) as raised:
        DS4Sci_EvoformerAttention(**({"Q": q, "K": k, "V": v, "biases": []} | change))
    assert str(raised.value).startswith(message)


# Installed in place of DeepSpeed's.

PROTENIX = """
def attend(q, k, v, biases):
    from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention
    return DS4Sci_EvoformerAttention(q, k, v, biases)
"""
OPENFOLD = """
from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

def attend(q, k, v, biases):
    return DS4Sci_EvoformerAttention(q, k, v, biases)
"""


@pytest.fixture
def no_deepspeed(monkeypatch):
    pair_layers.without_packages(monkeypatch, "deepspeed")


def caller(source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return pair_layers.caller("caller_of_deepspeed", source, monkeypatch)


def assert_attends(module: ModuleType) -> None:
    q, k, v, bias = given = tensors()
    assert_equal(module.attend(q, k, v, [MASK, bias]), defined(q, k, v, MASK, bias), given)


@pytest.mark.parametrize("source", [PROTENIX, OPENFOLD])
def test_install_without_deepspeed(source, no_deepspeed, monkeypatch):
    with install():
        assert_attends(caller(source, monkeypatch))
        assert "deepspeed" not in sys.modules  # OpenFold-3 and others look for it
    assert not any(name.partition(".")[0] == "deepspeed" for name in sys.modules)


@pytest.mark.parametrize("source", [PROTENIX, OPENFOLD])
def test_install_in_deepspeed(source, no_deepspeed, monkeypatch):
    def original(*given):
        raise AssertionError("DeepSpeed's own function was called")

    for name in evoformer._STAND_INS:
        function = {"DS4Sci_EvoformerAttention": original}
        monkeypatch.setitem(sys.modules, name, installing._module(name, function))
    before = caller(source, monkeypatch)
    with install() as installed:
        assert_attends(before)
        assert install().names == ()
        assert {each.runs for each in installed.report.values()} == {"attention"}
    with pytest.raises(AssertionError, match="own function"):
        assert_attends(before)


def test_install_says_whether_the_first_is_a_mask(no_deepspeed, monkeypatch):
    q, k, v, bias = given = tensors()
    with install():
        attend = caller(PROTENIX, monkeypatch).attend
        with pytest.raises(ValueError, match=r"biases\[0\]: expected a mask"):
            attend(q, k, v, [SOFT, bias])
        with install(first_is_mask=None):
            assert_equal(attend(q, k, v, [SOFT, bias]), defined(q, k, v, SOFT, bias), given)
        with pytest.raises(ValueError, match=r"biases\[0\]: expected a mask"):
            attend(q, k, v, [SOFT, bias])


def test_install_in_the_package():
    package = pytest.importorskip("deepspeed.ops.deepspeed4science", exc_type=ImportError)
    original = package.DS4Sci_EvoformerAttention
    with install():
        assert_attends(package_caller(package))
    assert package.DS4Sci_EvoformerAttention is original


def package_caller(package: ModuleType) -> ModuleType:
    caller = ModuleType("caller")
    caller.attend = lambda *given: package.DS4Sci_EvoformerAttention(*given)
    return caller
