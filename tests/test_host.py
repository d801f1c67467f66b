"""The C++ part of the host: what it serves has the bits, and the gradients, of the way in Python.

Here ops serve CPU tensors, which they compute by the reference.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_errors import CASES, VALID
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import megasoftmax
from megasoftmax import host
from megasoftmax.build import library
from megasoftmax.integrations.products import runs_fused
from megasoftmax.ops.registration import NAMESPACE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module() -> Any:
    host._load()
    assert host.status() == "built"
    return host.calls


@pytest.fixture
def served(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Lets C++ have calls on a CPU too; for each call whether it was served."""
    found: list[bool] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                result = getattr(module, name)(*args)
                found.append(result is not None and result is not False)
                return result

            return call

    monkeypatch.setattr(host, "calls", Noting())
    module.admit(CPU, True, True)
    torch.manual_seed(0)
    yield found
    module.admit(CPU, False, False)


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function through the same ops, without C++."""

    def call(function: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patch:
            processes.let_ops_serve_cpus(patch.setattr)
            patch.setattr(host, "calls", None)
            return function(*args)

    return call


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def bools(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.3


def ints(*shape: int, most: int = 5) -> Tensor:
    return torch.randint(0, most + 1, shape, dtype=torch.int32)


def of_rows() -> dict[str, dict[str, Any]]:
    """{name: options} of softmax over [2, 3, 4, 5]."""
    return {
        "plain": {},
        "scale": {"scale": -2},
        "mask": {"mask": bools(2, 1, 4, 5)},
        "mask of keys": {"mask": bools(5)},
        "causal": {"causal": True, "return_lse": True},
        "window": {"window": (1, 0)},
        "visible": {"visible": (None, ints(2, 1, 4))},
        "both bounds": {"visible": (ints(4, most=2), ints(1))},
        "bias": {"bias": normal(3, 1, 5)},
        "bias of another type": {"bias": normal(2, 1, 4, 5, dtype=torch.float64)},
        "constant bias of keys": {"bias": normal(4, 1, grad=False)},
        "sink": {"sink": normal(3)},
        "sink and lse": {"sink": normal(1), "return_lse": True},
        "number as sink": {"sink": 0},
        "dtype": {"dtype": torch.bfloat16, "dim": 3},
        "all": {
            "scale": 0.3,
            "mask": bools(4, 5),
            "bias": normal(3, 4, 5),
            "window": (2, 1),
            "visible": (ints(4, most=1), None),
            "sink": normal(3),
            "return_lse": True,
        },
    }


def of_topk() -> dict[str, dict[str, Any]]:
    return {
        "plain": {"k": 3},
        "none": {"k": 0},
        "all": {"k": 5, "return_lse": True, "scale": 0.5, "dtype": torch.float16},
        "mask and bias": {"k": 2, "mask": bools(4, 5), "bias": normal(5, grad=False)},
        "renormalized": {"k": 2, "renormalize": True},
    }


def of_attention() -> dict[str, dict[str, Any]]:
    """{name: options} of queries [4, 4, 6, 8] and keys [4, 2, 7, 8]."""
    seed = torch.tensor([7])
    return {
        "plain": {},
        "scale": {"scale": 0.5, "return_lse": True},
        "causal": {"causal": True},
        "window": {"window": (2, 0), "causal": True},
        "mask": {"mask": bools(4, 1, 6, 7)},
        "mask of keys": {"mask": bools(7)},
        "visible": {"visible": (ints(6, most=2), ints(4, 1, 1, most=7))},
        "bias": {"bias": normal(4, 6, 7, dtype=torch.bfloat16)},
        "bias of another type": {"bias": normal(1, 1, 7, dtype=torch.float64)},
        "bias in groups": {"bias": normal(2, 2, 6, 7)},
        "table": {"bias": megasoftmax.RelativeBias(normal(4, 12))},
        "table in groups": {"bias": megasoftmax.RelativeBias(normal(2, 1, 12))},
        "sink": {"sink": normal(4), "return_lse": True},
        "number as sink": {"sink": 0.5},
        "dropout": {"dropout": 0.25, "seed": seed},
        "dropout from the generator": {"dropout": 0.25},
        "seed without dropout": {"seed": seed},
    }


def call(name: str, options: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The results that may have gradients, and those gradients, twice differentiated if softmax."""
    torch.manual_seed(1)
    if name == "attention":
        tensors = [normal(4, heads, rows, 8, dtype=torch.bfloat16) for heads, rows in SIZES]
    else:
        tensors = [normal(2, 3, 4, 5)]
    function = getattr(megasoftmax, name)
    results = function(*tensors, **options)
    results = [results] if isinstance(results, Tensor) else list(results)
    extra = [options.get("bias"), options.get("sink")]
    extra = [each.table if hasattr(each, "table") else each for each in extra]
    leaves = tensors + [each for each in extra if isinstance(each, Tensor) and each.requires_grad]
    loss = sum(
        (each.float() * torch.randn(each.shape)).nan_to_num(neginf=0).sum()
        for each in results
        if each.requires_grad
    )
    found = list(torch.autograd.grad(loss, leaves, create_graph=name != "attention"))
    if name == "softmax":
        once = sum((each.double() ** 2).sum() for each in found)
        found += torch.autograd.grad(once, leaves, allow_unused=True)
    return results, [each for each in found if each is not None]


SIZES = ((4, 6), (2, 7), (2, 7))
ALL = [
    *(("softmax", name) for name in of_rows()),
    *(("softmax_topk", name) for name in of_topk()),
    *(("attention", name) for name in of_attention()),
]
MAKE = {"softmax": of_rows, "softmax_topk": of_topk, "attention": of_attention}


@pytest.mark.parametrize(("name", "case"), ALL, ids=[f"{name}: {case}" for name, case in ALL])
def test_same_bits_as_through_python(
    name: str, case: str, served: list[bool], in_python: Callable[..., Any]
):
    options = MAKE[name]()[case]
    found = call(name, options)
    assert served == [True]
    expected = in_python(call, name, options | {"fused": True})
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", of_attention())
def test_adapters_ask_it_first(case: str, served: list[bool]):
    tensors = [normal(4, heads, rows, 8, dtype=torch.bfloat16) for heads, rows in SIZES]
    assert runs_fused(*tensors, of_attention()[case])
    assert served == [True]


def test_adapters_ask_python_then(served: list[bool]):
    query = normal(4, 4, 6, 8)
    assert not runs_fused(query, query, query, {"causal": True})
    assert served == [False]


@pytest.mark.parametrize("name", MAKE)
def test_without_gradients(name: str, served: list[bool]):
    with torch.no_grad():
        tensors = [normal(4, heads, rows, 8, dtype=torch.float16) for heads, rows in SIZES]
        options = {"k": 2} if name == "softmax_topk" else {}
        tensors = tensors if name == "attention" else tensors[:1]
        results = [getattr(megasoftmax, name)(*tensors, **options, fused=f) for f in (None, False)]
    assert served == [True, False]
    for actual, wanted in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True):
        assert not actual.requires_grad
        assert actual.equal(wanted)


def as_sixteen_bits(value: Any) -> Any:
    is_float = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16() if is_float else value


@pytest.mark.parametrize(
    ("name", "case", "expectation"), CASES, ids=[f"{name}: {case}" for name, case, _ in CASES]
)
def test_bad_input_is_declined(name: str, case: str, expectation: Any, served: list[bool]):
    """So that the message is the one of Python."""
    given = VALID[name] | expectation[0]
    if name == "attention":  # of the types that are served
        given = {key: as_sixteen_bits(value) for key, value in given.items()}
    try:
        getattr(megasoftmax, name)(**given)
    except (TypeError, ValueError):
        assert served in ([], [False])
    else:
        assert name == "attention"  # what was wrong was a type that is now that of the query


NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1.0, True, None, 3e38, float("nan"), "1"])
WINDOWS = st.sampled_from([None, (1, 0), (0, -1), [1, 1], (1,), (1, -2), (1.0, 0), (True, 0), 3])
SHAPES = st.sampled_from([(), (5,), (4, 5), (3, 1, 1), (1, 3, 4, 5), (2, 2, 4, 5), (6,), (2, 4)])
DTYPES = st.sampled_from(
    [torch.float32, torch.float16, torch.float64, torch.bool, torch.int32, torch.int64]
)
TENSORS = st.none() | st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), SHAPES, DTYPES)
SHARED = {
    "mask": TENSORS,
    "bias": TENSORS,
    "scale": NUMBERS,
    "fused": st.sampled_from([None, None, False, 1]),
    "return_lse": st.sampled_from([True, False, 1]),
}
OF_SCORES = {
    "causal": st.sampled_from([True, False, 1, None]),
    "window": WINDOWS,
    "visible": st.none() | st.tuples(TENSORS, TENSORS),
    "sink": TENSORS | NUMBERS,
    "dropout": st.sampled_from([0.0, 0, 0.1, 1.0, False, 2.0]),
    "seed": st.none()
    | st.sampled_from([torch.tensor(3), torch.tensor([3.0]), torch.ones(2).long()]),
}
OPTIONS = {
    "softmax": SHARED
    | OF_SCORES
    | {
        "dtype": st.sampled_from([None, torch.bfloat16, torch.float64, torch.int32]),
        "dim": st.sampled_from([-1, 3, 2, -4, 4, 1.0, True]),
    },
    "softmax_topk": SHARED | {"k": st.sampled_from([0, 2, 5, 6, -1, True, 2.0])},
    "attention": SHARED | OF_SCORES,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_served_is_valid(name: str, served: list[bool], in_python: Callable[..., Any]):
    """Of any arguments: those that Python refuses are not served, and others have its results."""
    count = {True: 0, False: 0}

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: Any) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(OPTIONS[name])), max_size=3, unique=True))
        options = {each: data.draw(OPTIONS[name][each]) for each in names}
        if name == "softmax_topk":
            options.setdefault("k", 2)
        rank = data.draw(st.sampled_from([4, 4, 4, 1, 5]))
        shapes = [(2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6)]
        tensors = [torch.randn(shape).bfloat16() for shape in shapes]
        if name != "attention":
            tensors = [torch.randn((2, 1, 3, 4, 5)[-rank:])]
        run = functools.partial(getattr(megasoftmax, name), *tensors)
        served.clear()
        torch.manual_seed(0)
        try:
            found = run(**options)
        except (TypeError, ValueError):
            assert served in ([], [False])
            return
        count[served[0]] += 1
        if served[0]:
            torch.manual_seed(0)
            expected = in_python(lambda: run(**(options | {"fused": True})))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)

    check()
    assert min(count.values()) > 20


# What another way must take


def test_transforms_of_functions_are_declined(served: list[bool]):
    scores = torch.randn(3, 2, 4, 5)
    softmax = megasoftmax.softmax
    expected = softmax(scores, fused=False)
    torch.testing.assert_close(torch.func.vmap(softmax)(scores), expected)
    tangent = torch.func.jvp(softmax, (scores,), (torch.ones_like(scores),))[1]
    torch.testing.assert_close(tangent, torch.zeros_like(scores), atol=1e-6, rtol=0)
    torch.func.grad(lambda x: softmax(x)[..., 0].sum())(scores)
    with torch.autograd.forward_ad.dual_level():
        softmax(scores)
    assert served
    assert not any(served)


def test_subclasses_and_other_devices_are_declined(served: list[bool]):
    class Other(Tensor):
        pass

    scores = torch.randn(2, 3)
    megasoftmax.softmax(scores.as_subclass(Other))
    megasoftmax.softmax(scores.to("meta"))
    megasoftmax.softmax(torch.randn(2, 0))
    megasoftmax.softmax(torch.randn(2, 3, 4, 5).transpose(0, 1).expand(2, 3, 2, 4, 5))
    assert served == [False] * 4


def test_parameters_are_served(served: list[bool]):
    megasoftmax.softmax(torch.nn.Parameter(torch.randn(2, 3)))
    assert served == [True]


def test_compiled_code_does_without(served: list[bool]):
    torch.compiler.reset()
    scores = torch.randn(2, 3)
    compiled = torch.compile(megasoftmax.softmax, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(scores), scores.softmax(-1))
    assert served == []


def test_traced_modules_have_the_op(served: list[bool]):
    scores = torch.randn(2, 3)
    traced = torch.jit.trace(lambda x: megasoftmax.softmax(x), scores)
    assert served[0] is False  # others are checks without a trace
    torch.testing.assert_close(traced(2 * scores), (2 * scores).softmax(-1))


def test_dispatch_modes_see_the_op(served: list[bool]):
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    scores = normal(2, 3)
    with Mode():
        megasoftmax.softmax(scores, fused=None)
    assert served == [False]
    probabilities = megasoftmax.softmax(scores)
    with Mode():
        probabilities[:, 0].sum().backward()
    assert f"{NAMESPACE}::softmax_backward" in seen


def test_autocast(served: list[bool]):
    query = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        megasoftmax.attention(query, query, query)
        half = query.bfloat16()
        output = megasoftmax.attention(half, half, half)
        assert megasoftmax.softmax(half).dtype == torch.bfloat16  # float32 on a GPU alone
    assert served == [False, True, True]
    assert output.equal(megasoftmax.attention(half, half, half, fused=False))


# Autograd


def test_attention_refuses_a_second_derivative(served: list[bool]):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)
    output = megasoftmax.attention(query, query, query)
    (gradient,) = torch.autograd.grad(output.float().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="fused attention: expected"):
        torch.autograd.grad(gradient.float().sum(), query)
    assert served == [True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool, served: list[bool]):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)

    def layer(query: Tensor) -> Tensor:
        return megasoftmax.attention(query, query, query, dropout=0.5)

    found = []
    for function in (layer, lambda q: checkpoint(layer, q, use_reentrant=reentrant)):
        torch.manual_seed(3)
        output = function(query)
        output.float().square().sum().backward()
        found.append((output, query.grad))
        query.grad = None
    for plain, again in zip(*found, strict=True):
        assert plain.equal(again)
    assert all(served)


def test_saved_tensors_pass_hooks(served: list[bool]):
    scores, packed = normal(2, 3), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        probabilities = megasoftmax.softmax(scores)
    assert [each.shape for each in packed] == [probabilities.shape]
    assert served == [True]


def test_many_gradients_at_a_time(served: list[bool]):
    """Autograd vmaps the backward pass then."""
    scores = normal(2, 3)
    rows = torch.autograd.functional.jacobian(megasoftmax.softmax, scores, vectorize=True)
    expected = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), scores)
    assert served == [True]
    torch.testing.assert_close(rows, expected)


def test_gradients_of_one_of_several_results(served: list[bool]):
    scores, sink = normal(2, 3, 4, 5), normal(3)
    probabilities, lse = megasoftmax.softmax(scores, sink=sink, return_lse=True)
    expected = megasoftmax.softmax(scores, sink=sink, return_lse=True, fused=False)
    for one, wanted in zip((probabilities, lse), expected, strict=True):
        weights = torch.randn_like(one)
        found = [
            torch.autograd.grad(each, (scores, sink), weights, retain_graph=True)
            for each in (one, wanted)
        ]
        for actual, expected_one in zip(*found, strict=True):
            assert actual.equal(expected_one)


def test_bias_may_change_before_the_backward(served: list[bool]):
    scores, bias = normal(2, 3), normal(3)
    loss = (megasoftmax.softmax(scores, bias=bias) ** 2).sum()
    with torch.no_grad():
        bias.add_(1)
    loss.backward()
    assert served == [True]


def test_outputs_may_be_changed_in_place(served: list[bool]):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        megasoftmax.attention(query, query, query).mul_(2)
    probabilities = megasoftmax.softmax(normal(2, 3))
    probabilities.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()
    assert served == [True, True]


# Where it is not there


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "calls", None)
    monkeypatch.setattr(host, "_why_not", None)


@pytest.mark.usefixtures("unloaded")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGASOFTMAX_HOST", "0")
    host._load()
    assert (host.calls, host.status()) == (None, "none: MEGASOFTMAX_HOST=0")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("MEGASOFTMAX_JIT", "0", "MEGASOFTMAX_JIT=0 forbids building"),
        ("CXX", "/nowhere/c++", "/nowhere/c++"),
    ],
)
def test_why_it_is_not_there(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert host.status() == "none: it is built when the first call runs fused"
    monkeypatch.setenv(variable, value)
    host._load()
    assert host.calls is None
    assert reason in host.status()


@pytest.mark.usefixtures("module")
def test_it_is_built_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "_compile", lambda *args, **flags: pytest.fail("compiled again"))
    assert library.host() == library.host()
