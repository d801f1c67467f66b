"""cuEquivariance's triangle attention: its definition, and the packages that call it."""

import inspect
import sys
from types import ModuleType

import pair_layers
import pytest
import torch
from inputs import coin, normal
from torch import Tensor

from megasoftmax.integrations import cuequivariance, installing
from megasoftmax.integrations.cuequivariance import install, triangle_attention

BATCH, ROWS, HEADS, QUERIES, KEYS, DIM = 2, 3, 2, 5, 7, 4
LENGTHS = torch.tensor([[0, 1, 7], [5, 9, 3]], dtype=torch.int32)[..., None, None, None]


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(BATCH, ROWS, HEADS, QUERIES, DIM), *[(BATCH, ROWS, HEADS, KEYS, DIM)] * 2]
    made = [normal(*shape, device="cpu", seed=i) for i, shape in enumerate(shapes)]
    made.append(normal(BATCH, 1, HEADS, QUERIES, KEYS, device="cpu", seed=4))
    return [each.to(dtype).requires_grad_() for each in made]


def valid(case: str) -> Tensor | None:
    """[B, N, 1, 1, K], True = valid; the first row of the first batch has no key."""
    if case == "none":
        return None
    if case == "lengths":
        return torch.arange(KEYS) < LENGTHS
    keep = coin(BATCH, ROWS, 1, 1, KEYS, device="cpu", odds=0.6)
    keep[0, 0] = False
    return keep


def defined(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keep: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and largest logit, from the definition."""
    logits = torch.einsum("bnhqd,bnhkd->bnhqk", q, k) * scale + bias
    if keep is None:
        keep = torch.ones(KEYS, dtype=torch.bool)
    has_key = keep.expand(logits.shape).any(-1)
    logits = logits.masked_fill(~keep & has_key[..., None], -torch.inf)
    output = torch.einsum("bnhqk,bnhkd->bnhqd", logits.softmax(-1), v)
    output = torch.where(has_key[..., None], output, 0)
    return output, torch.where(has_key, logits.logsumexp(-1), 0), logits.amax(-1) * has_key


@pytest.mark.parametrize("case", ["none", "mask", "lengths"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_the_definition(case, scale):
    q, k, v, bias = given = tensors()
    keep = valid(case)
    options = {"kv_lengths": LENGTHS} if case == "lengths" else {"mask": keep}
    output, lse, largest = triangle_attention(*given, scale=scale, return_aux=True, **options)
    expected = defined(q, k, v, bias, keep, DIM**-0.5 if scale is None else scale)
    torch.testing.assert_close((output, lse, largest), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(triangle_attention(*given, scale=scale, **options), output)
    assert output.transpose(2, 3).is_contiguous()
    assert not largest.requires_grad
    weights = normal(*output.shape, device="cpu", seed=9).double()
    found = torch.autograd.grad((output * weights).sum() + lse.sin().sum(), given)
    wanted = torch.autograd.grad((expected[0] * weights).sum() + expected[1].sin().sum(), given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["none", "mask", "lengths"])
def test_tensors_without_a_batch(case):
    """A batch of 1 may lack its dimension. The output has it, which Protenix takes off by [0]."""
    given = [each[1:] for each in tensors()]
    keep = valid(case)
    options = {"mask": None if keep is None else keep[1:]}
    if case == "lengths":
        options = {"kv_lengths": LENGTHS[1:]}
    wanted = triangle_attention(*given, return_aux=True, **options)
    lacking = {name: None if each is None else each[0] for name, each in options.items()}
    found = triangle_attention(*(each[0] for each in given), return_aux=True, **lacking)
    assert wanted[0].shape == (1, ROWS, HEADS, QUERIES, DIM)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_types():
    """The bias keeps its type in half precision, and a mask need not be bool."""
    q, k, v, _ = tensors(torch.bfloat16)
    bias = tensors(torch.float32)[3]
    keep = valid("mask")
    output, lse, largest = triangle_attention(q, k, v, bias, keep.float(), return_aux=True)
    assert (output.dtype, lse.dtype, largest.dtype) == (torch.bfloat16, *[torch.float32] * 2)
    output.sum().backward()
    assert (q.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32)
    wanted = defined(*(each.double() for each in (q, k, v, bias)), keep, DIM**-0.5)[0]
    torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=2e-2)


def test_largest_logits_under_autocast():
    """In float32, of what attention multiplies."""
    given = [each.detach() for each in tensors(torch.float32)]
    with torch.autocast("cpu", torch.bfloat16):
        _, lse, found = triangle_attention(*given, return_aux=True)
    rounded = [each.bfloat16() for each in given[:3]]
    wanted = triangle_attention(*rounded, given[3], return_aux=True)
    assert torch.equal(lse, wanted[1])
    assert torch.equal(found, wanted[2])


def test_largest_logits_are_found_some_rows_at_a_time(monkeypatch):
    given = tensors()
    wanted = triangle_attention(*given, mask=valid("mask"), return_aux=True)[2]
    monkeypatch.setattr(cuequivariance, "_LOGITS", 1)
    assert torch.equal(triangle_attention(*given, mask=valid("mask"), return_aux=True)[2], wanted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(2, 3, 4)}, ValueError, "q: expected 5 dimensions, or 4 for a batch"),
        ({"bias": torch.zeros(3, 2, 5, 7)}, ValueError, "bias: expected 5 dimensions, or 4 for a"),
        ({"q": None}, TypeError, "q: expected a tensor, got NoneType"),
        ({"k": torch.zeros(2, 3, 2, 7, 5)}, TypeError, "k: expected a tensor of torch.float64"),
        (
            {"bias": torch.zeros(2, 2, 2, 5, 7, dtype=torch.float64)},
            ValueError,
            "bias: expected a shape that broadcasts to",
        ),
        ({"mask": torch.ones(2, 3, 1, 1, 6)}, ValueError, "mask: expected a shape that broadcasts"),
        ({"mask": valid("mask"), "kv_lengths": LENGTHS}, ValueError, "kv_lengths: expected None"),
        ({"kv_lengths": LENGTHS.float()}, TypeError, "kv_lengths: expected None or a tensor of"),
        ({"return_aux": 1}, TypeError, "return_aux: expected a bool, got int"),
        ({"scale": "1"}, TypeError, "scale: expected a number, got str"),
    ],
)
def test_errors_name_the_argument(change, error, message):
    given = dict(zip(("q", "k", "v", "bias"), tensors(), strict=True))
    with pytest.raises(error) as raised:
        triangle_attention(**(given | change))
    assert str(raised.value).startswith(message)


def test_signature():
    names = ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths"]
    parameters = inspect.signature(triangle_attention).parameters
    assert list(parameters) == names
    assert [parameters[name].default for name in names[4:]] == [None, None, False, None]
    assert parameters["kv_lengths"].kind is inspect.Parameter.KEYWORD_ONLY


# Installed in place of cuEquivariance's. Modules stand in for it and for the three packages that
# call it, each with the imports and the call of the package.

_CALLERS = {
    "boltz": """
def attend(q, k, v, bias, mask):
    from cuequivariance_torch.primitives.triangle import triangle_attention
    return triangle_attention(q, k, v, bias, mask=mask.bool(), scale=1.0)
""",
    "protenix": """
def attend(q, k, v, bias, mask):
    from cuequivariance_torch.primitives.triangle import triangle_attention
    q, k, v, bias, mask = (each[0] for each in (q, k, v, bias, mask))
    return triangle_attention(q, k, v, bias.float(), mask=(mask == 1).bool(), scale=1.0)[0][None]
""",
    "openfold3": """
import importlib.util
if importlib.util.find_spec("cuequivariance_torch") is None:
    raise ImportError("OpenFold-3 goes without")
from cuequivariance_ops_torch.triangle_attention import CUEQ_TRIATTN_FALLBACK_THRESHOLD
from cuequivariance_torch import triangle_multiplicative_update
from cuequivariance_torch.primitives.triangle import triangle_attention

def attend(q, k, v, bias, mask):
    assert q.shape[-2] > CUEQ_TRIATTN_FALLBACK_THRESHOLD
    return triangle_attention(q, k, v, bias=bias, mask=mask, scale=1.0)
""",
    "ops": """
def attend(q, k, v, bias, mask):
    import cuequivariance_ops_torch
    return cuequivariance_ops_torch.triangle_attention(q, k, v, bias, mask, 1.0)
""",
}
_PACKAGES = ("cuequivariance_torch", "cuequivariance_ops_torch")


@pytest.fixture
def no_package(monkeypatch):
    """cuEquivariance is not installed."""
    pair_layers.without_packages(monkeypatch, *_PACKAGES)


@pytest.fixture
def package(no_package, monkeypatch):
    """A package of cuEquivariance's modules, whose function is `original`."""

    def original(*given, **options):
        raise AssertionError("cuEquivariance's own function was called")

    for name, content in cuequivariance._STAND_INS.items():
        has_function = name in cuequivariance._MODULES
        function = {"triangle_attention": original} if has_function else {}
        monkeypatch.setitem(sys.modules, name, installing._module(name, {**content, **function}))
    return original


def caller(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return pair_layers.caller(f"caller_{name}", _CALLERS[name], monkeypatch)


def assert_attends(module: ModuleType) -> None:
    given = [each[:1].float() for each in tensors()]
    keep = valid("mask")[:1]
    found = module.attend(*given, keep)
    wanted = triangle_attention(*given, mask=keep, scale=1.0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", _CALLERS)
def test_install_reaches_callers(name, package, monkeypatch):
    before = caller(name, monkeypatch)
    with install():
        assert_attends(before)
        assert_attends(caller(name, monkeypatch))
    with pytest.raises(AssertionError, match="own function"):
        assert_attends(before)


@pytest.mark.parametrize("name", _CALLERS)
def test_install_without_the_packages(name, no_package, monkeypatch):
    with install():
        assert_attends(caller(name, monkeypatch))
    assert not any(module.partition(".")[0] in _PACKAGES for module in sys.modules)


def test_what_is_not_here_says_so(no_package):
    with install():
        from cuequivariance_torch.primitives.triangle import triangle_multiplicative_update

        with pytest.raises(ImportError, match="which is not installed"):
            triangle_multiplicative_update(torch.zeros(1))
        with pytest.raises(ImportError, match="attention_pair_bias"):
            from cuequivariance_torch import attention_pair_bias  # noqa: F401


def test_installing_twice(package):
    first, second = install(), install()
    assert len(first.names) == 4
    assert second.names == ()
    assert set(second.report.values()) == set(first.report.values())
    second.uninstall()
    torch_part = sys.modules["cuequivariance_torch"]
    assert torch_part.triangle_attention is triangle_attention
    first.uninstall()
    first.uninstall()
    assert torch_part.triangle_attention is package


def test_uninstall_leaves_what_was_bound_since(package):
    torch_part = sys.modules["cuequivariance_torch"]
    installed = install()
    torch_part.triangle_attention = abs
    installed.uninstall()
    assert torch_part.triangle_attention is abs
    assert sys.modules["cuequivariance_torch.primitives.triangle"].triangle_attention is package


def test_report(package, monkeypatch):
    caller("openfold3", monkeypatch)
    installed = install()
    assert installed.report["caller_openfold3.triangle_attention"].runs == "attention"
    assert "cuequivariance_torch.triangle_attention" in repr(installed)
    installed.uninstall()
    assert {str(each) for each in installed.report.values()} == {"unchanged: uninstalled"}


def test_a_package_that_cannot_be_imported_stays(package, monkeypatch):
    """As cuequivariance_ops_torch beside a torch without CUDA."""

    def import_module(name):
        if name.startswith("cuequivariance_ops_torch"):
            raise ImportError("libtorch_cuda.so: cannot open shared object file")
        return sys.modules[name]

    monkeypatch.setattr(installing.importlib, "import_module", import_module)
    with install() as installed:
        assert sys.modules["cuequivariance_ops_torch"].triangle_attention is package
        assert installed.report["cuequivariance_torch.triangle_attention"].runs == "attention"
        why = installed.report["cuequivariance_ops_torch"].why
        assert why == "ImportError: libtorch_cuda.so: cannot open shared object file"


# The package itself, where it is installed.


def test_signature_of_the_package():
    package = pytest.importorskip("cuequivariance_torch")
    wanted = inspect.signature(package.triangle_attention)
    found = inspect.signature(triangle_attention)
    assert list(found.parameters) == list(wanted.parameters)
    for name, parameter in found.parameters.items():
        assert parameter.kind is wanted.parameters[name].kind
        assert parameter.default == wanted.parameters[name].default


def test_install_in_the_package():
    package = pytest.importorskip("cuequivariance_torch")
    original = package.triangle_attention
    with install() as installed:
        assert package.triangle_attention is triangle_attention
        assert package.primitives.triangle.triangle_attention is triangle_attention
        assert "cuequivariance_torch.triangle_attention" in installed.report
    assert package.triangle_attention is original


@pytest.mark.parametrize("case", ["none", "mask", "lengths"])
def test_equals_the_package(case):
    """cuEquivariance's own plain torch, which it takes for few tokens; needs its CUDA part."""
    pytest.importorskip(
        "cuequivariance_ops_torch", reason="cuEquivariance's ops need CUDA", exc_type=ImportError
    )
    from cuequivariance_ops_torch.triangle_attention import _triangle_attention_torch as theirs

    given = tensors(torch.float32)
    keep = valid(case)
    if case == "mask":
        keep[0, 0] = True  # the mean of the values there
    lengths = LENGTHS.clamp_max(KEYS)[..., 0, 0, 0] if case == "lengths" else None
    wanted = theirs(*given, keep, return_aux=True, actual_s_kv=lengths)
    options = {"kv_lengths": LENGTHS} if case == "lengths" else {"mask": keep}
    found = triangle_attention(*given, return_aux=True, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = normal(*found[0].shape, device="cpu", seed=9)
    gradients = [torch.autograd.grad((each[0] * weights).sum(), given) for each in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
