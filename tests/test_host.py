"""The C++ part of the host: what it serves has the bits, and the gradients, of the way in Python.

Here ops serve CPU tensors, which they compute by the reference.
"""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import deterministic, saved_tensors
from test_errors import CASES, VALID
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import megasoftmax
from megasoftmax import dispatch, host
from megasoftmax.build import library
from megasoftmax.functions.attention import served_attention, served_packed_attention
from megasoftmax.integrations.products import runs_fused, unpacked
from megasoftmax.ops.registration import NAMESPACE
from megasoftmax.options import AttentionOptions

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module():
    host._load()
    assert host.status() == "built"
    return host.calls


@pytest.fixture
def served(module, monkeypatch):
    """Lets C++ have calls on a CPU too; for each call whether it was served."""
    found = []

    class Noting:
        def __getattr__(self, name):
            def call(*args):
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
def in_python(monkeypatch):
    """Calls a function through the same ops, without C++."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            processes.let_ops_serve_cpus(patch.setattr)
            patch.setattr(host, "calls", None)
            return function(*args)

    return call


def normal(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def bools(*shape):
    return torch.rand(shape) < 0.3


def ints(*shape, most=5):
    return torch.randint(0, most + 1, shape, dtype=torch.int32)


def of_rows():
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


def of_topk():
    return {
        "plain": {"k": 3},
        "none": {"k": 0},
        "all": {"k": 5, "return_lse": True, "scale": 0.5, "dtype": torch.float16},
        "mask and bias": {"k": 2, "mask": bools(4, 5), "bias": normal(5, grad=False)},
        "renormalized": {"k": 2, "renormalize": True},
        "limits": {"k": 4, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "renormalize": True},
        "of rows": {
            "k": 4,
            "scale": torch.rand(3, 4) + 0.5,
            "top_k": ints(2, 1, 4),
            "top_p": torch.rand(4),
            "min_p": torch.rand(3, 1),
            "mask": bools(5),
        },
    }


def of_attention():
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
        "table": {"bias": megasoftmax.RelativeBias(normal(4, 12))},
        "table of batches": {"bias": megasoftmax.RelativeBias(normal(4, 1, 12))},
        "table of queries": {"bias": megasoftmax.ShiftedBias(normal(4, 6, 14))},
        "sink": {"sink": normal(4), "return_lse": True},
        "number as sink": {"sink": 0.5},
        "dropout": {"dropout": 0.25, "seed": seed},
        "dropout from the generator": {"dropout": 0.25},
        "seed without dropout": {"seed": seed},
    }


def forward(name, options, wants=None):
    """The results, what has a gradient by its name, and a loss. `wants`: those names, if not all.

    As a side effect the options' tensors require those gradients.
    """
    torch.manual_seed(1)
    given = states() if name == "attention" else [normal(2, 3, 4, 5)]
    names = {"softmax": ["scores"], "softmax_topk": ["logits"]}.get(name, ["query", "key", "value"])
    bias = options.get("bias")
    extra = {"bias": getattr(bias, "table", bias), "sink": options.get("sink")}
    leaves = dict(zip(names, given, strict=True)) | {
        key: each for key, each in extra.items() if isinstance(each, Tensor) and each.requires_grad
    }
    if wants is not None:
        leaves = {key: each.requires_grad_(key in wants) for key, each in leaves.items()}
        leaves = {key: leaves[key] for key in wants}
    results = getattr(megasoftmax, name)(*given, **options)
    results = [results] if isinstance(results, Tensor) else list(results)
    loss = sum(
        (each.float() * torch.randn(each.shape)).nan_to_num(neginf=0).sum()
        for each in results
        if each.requires_grad
    )
    assert isinstance(loss, Tensor)
    return results, leaves, loss


def call(name, options, wants=None):
    """The results that may have gradients, and those gradients, twice differentiated if softmax."""
    results, named, loss = forward(name, options, wants)
    leaves = list(named.values())
    found = list(torch.autograd.grad(loss, leaves, create_graph=name != "attention"))
    if name == "softmax" and any(each.requires_grad for each in found):
        once = sum((each.double() ** 2).sum() for each in found)
        found += torch.autograd.grad(once, leaves, allow_unused=True)
    return results, [each for each in found if each is not None]


def states(dtype=torch.bfloat16):
    """Query, key and value."""
    return [normal(4, heads, rows, 8, dtype=dtype) for heads, rows in SIZES]


def assert_same_gradients(found, expected, leaves, **options):
    losses = (each.float().sin().sum() for each in (found, expected))
    gradients, wanted = (torch.autograd.grad(loss, leaves, **options) for loss in losses)
    for one, other in zip(gradients, wanted, strict=True):
        assert one.equal(other)
    return gradients


SIZES = ((4, 6), (2, 7), (2, 7))
MAKE = {"softmax": of_rows, "softmax_topk": of_topk, "attention": of_attention}
ALL = [(name, case) for name, make in MAKE.items() for case in make()]
all_cases = pytest.mark.parametrize(("name", "case"), ALL, ids=[*map(": ".join, ALL)])


@all_cases
def test_same_bits_as_through_python(name, case, served, in_python):
    options = MAKE[name]()[case]
    found = call(name, options)
    assert served == [True]
    expected = in_python(call, name, options | {"fused": True})
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "wants"),
    [
        *(("softmax", wants) for wants in ("scores", "bias", "sink")),
        *(("attention", wants) for wants in ("query", "key", "value", "bias", "sink")),
    ],
)
def test_gradient_of_one_argument(name, wants, served, in_python):
    shape = (3, 4, 5) if name == "softmax" else (4, 6, 7)
    options = {"bias": normal(*shape), "sink": normal(shape[0])}
    found = call(name, options, [wants])
    assert served == [True]
    expected = in_python(call, name, options | {"fused": True}, [wants])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class BackwardOps(torch.utils._python_dispatch.TorchDispatchMode):
    """What backward ops are given."""

    def __init__(self):
        super().__init__()
        self.given: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith(f"{NAMESPACE}::") and "backward" in function.name():
            self.given.append(args)
        return function(*args, **(kwargs or {}))


def given_to_backward(name, options):
    _, leaves, loss = forward(name, options)
    with BackwardOps() as ops:
        torch.autograd.grad(loss, list(leaves.values()))
    (given,) = ops.given
    # The values of the bias of a softmax mean nothing.
    return [
        (each.shape, each.dtype) if name == "softmax" and i == 5 and each is not None else each
        for i, each in enumerate(given)
    ]


@all_cases
def test_backward_ops_are_given_the_same(name, case, served, in_python):
    """Of limits that only save the kernels work, the gradients tell nothing."""
    options = MAKE[name]()[case]
    found = given_to_backward(name, options)
    assert served == [True]
    expected = in_python(given_to_backward, name, options | {"fused": True})
    for actual, wanted in zip(found, expected, strict=True):
        assert type(actual) is type(wanted)
        if isinstance(actual, Tensor):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            assert actual == wanted


@pytest.mark.parametrize("case", of_attention())
def test_adapters_ask_it_first(case, served):
    assert runs_fused(*states(), AttentionOptions(**of_attention()[case]))
    assert served == [True]


def test_transformers_adapter_calls_it_without_asking(served):
    adapter = pytest.importorskip("megasoftmax.integrations.transformers")
    layer = torch.nn.Module()
    for options in ({}, {"sliding_window": 2}, {"s_aux": normal(4)}):
        tensors = [normal(4, heads, 6, 8, dtype=torch.bfloat16) for heads, _ in SIZES]
        output, probabilities = adapter.attention_forward(layer, *tensors, None, **options)
        assert served == [True]
        assert (probabilities, output.is_contiguous()) == (None, True)
        window = (1, 0) if "sliding_window" in options else None
        sink = options.get("s_aux")
        expected = megasoftmax.attention(*tensors, causal=True, window=window, sink=sink)
        assert output.equal(expected.transpose(1, 2))
        served.clear()


@pytest.mark.parametrize(
    "case",
    [
        name
        for name, options in of_attention().items()
        if not {"dropout", "seed", "return_lse"} & options.keys()
    ],
)
def test_layers_get_attention_as_they_go_on_with_it(case, served, in_python):
    """[batch, queries, heads, dim]: the same bits, gradients too, and no view."""
    options = of_attention()[case]
    torch.manual_seed(1)
    leaves = states()
    weights = normal(4, 6, 4, 8, grad=False)
    output = served_attention(*leaves, AttentionOptions(**options))
    assert served == [True]
    assert output is not None
    assert (output.is_contiguous(), output._is_view()) == (True, False)
    expected = in_python(lambda: megasoftmax.attention(*leaves, **options, fused=True))
    assert output.equal(expected.transpose(1, 2))
    grads = [
        torch.autograd.grad((each.float() * weights).sum(), leaves)
        for each in (output, expected.transpose(1, 2))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_what_layers_get_may_be_changed_in_place(served):
    leaf = normal(1, 2, 3, 8, dtype=torch.bfloat16)
    output = served_attention(*[leaf] * 3, AttentionOptions(scale=1, causal=True))
    assert output is not None
    output.mul_(2)  # it is kept for the backward pass, which notices
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_module_of_megatron_calls_it_with_what_was_set_last(served):
    module = megasoftmax.FusedScaleMaskSoftmax(
        *(False, False, "padding", True, lambda scores, mask: scores.masked_fill(mask, -1e4)),
        *(True, 0.5),
    )
    scores, mask = normal(2, 3, 4, 5), bools(2, 1, 4, 5)

    def check(given=None, **options):
        served.clear()
        found = module(scores, given)
        assert served == [True]
        expected = megasoftmax.softmax(scores, mask=given, **options, fused=False)
        torch.testing.assert_close(found, expected, check_dtype=True)

    check(mask, scale=0.5)
    module.scale = None
    check(mask)
    module.attn_mask_type = "causal"
    check(causal=True)
    module.window_size = (1, 0)
    check(mask, causal=True, window=(1, 0))
    module.input_in_bf16 = True
    check(causal=True, window=(1, 0), dtype=torch.bfloat16)
    module.scaled_masked_softmax_fusion = False
    served.clear()
    module(scores, None)
    assert served == [False]


def test_methods_of_subclasses_of_the_module_are_called(served):
    class Halved(megasoftmax.FusedScaleMaskSoftmax):
        def forward_fused_softmax(self, *tensors):
            return super().forward_fused_softmax(*tensors) / 2

    module = Halved(False, False, "padding", True, None, True, None)
    scores = normal(2, 3, 4, 5)
    for _ in range(2):
        expected = torch.softmax(scores, -1) / 2
        torch.testing.assert_close(module(scores, None), expected)


def test_module_of_megatron_leaves_the_rest_to_python(served):
    module = megasoftmax.FusedScaleMaskSoftmax(False, True, "padding", True, None, True, None)
    with pytest.raises(ValueError, match="input"):
        module(normal(3, 4, 5), None)
    with pytest.raises(TypeError, match="input"):
        module([1.0], None)
    assert served == [False] * 2
    served.clear()
    with torch.autocast("cpu", dtype=torch.float16):
        assert module(normal(2, 3, 4, 5), None).dtype == torch.float16
    assert copy.deepcopy(module)(normal(2, 3, 4, 5), None).dtype == torch.bfloat16


@pytest.mark.parametrize("name", MAKE)
def test_without_gradients(name, served):
    with torch.no_grad():
        scores = normal(4, 4, 6, 8, dtype=torch.float16)
        tensors = states(torch.float16) if name == "attention" else [scores]
        options = {"k": 2} if name == "softmax_topk" else {}
        results = [getattr(megasoftmax, name)(*tensors, **options, fused=f) for f in (None, False)]
    assert served == [True, False]
    assert not any(each.requires_grad for each in torch.utils._pytree.tree_leaves(results[0]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def as_sixteen_bits(value):
    is_float = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.bfloat16() if is_float else value


@pytest.mark.parametrize(("name", "arguments"), [case[:2] for case in CASES])
def test_bad_input_is_declined(name, arguments, served):
    """So that the message is the one of Python."""
    given = VALID[name] | arguments
    if name == "attention":  # of the types that are served
        given = {key: as_sixteen_bits(value) for key, value in given.items()}
    try:
        getattr(megasoftmax, name)(**given)
    except (TypeError, ValueError):
        assert served in ([], [False])
    else:
        assert name == "attention"  # what was wrong was a type that is now that of the query


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 10**400), ("sink", 10**400), ("window", (-(2**64), 0))]
)
def test_integers_beyond_the_numbers_of_cpp_are_declined(name, value, served):
    with pytest.raises(ValueError, match=f"{name}: expected "):
        megasoftmax.softmax(torch.randn(2, 3), **{name: value})
    assert served == [False]


NUMBERS = st.sampled_from([0, 1, -1, 0.5, 1.0, True, None, 3e38, float("nan"), "1"])
WINDOWS = st.sampled_from([None, (1, 0), (0, -1), [1, 1], (1,), (1, -2), (1.0, 0), (True, 0), 3])
SHAPES = st.sampled_from([(), (5,), (4, 5), (3, 1, 1), (1, 3, 4, 5), (2, 2, 4, 5), (6,), (2, 4)])
DTYPES = [torch.float32, torch.float16, torch.float64, torch.bool, torch.int32, torch.int64]


def ones(shape, dtype, grad):
    return torch.ones(shape).to(dtype).requires_grad_(grad and dtype.is_floating_point)


TENSORS = st.none() | st.builds(ones, SHAPES, st.sampled_from(DTYPES), st.booleans())
SEEDS = [torch.tensor(3), torch.tensor([3.0]), torch.ones(2).long()]
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
    "seed": st.none() | st.sampled_from(SEEDS),
}
OF_SOFTMAX = {
    "dtype": st.sampled_from([None, torch.bfloat16, torch.float64, torch.int32]),
    "dim": st.sampled_from([-1, 3, 2, -4, 4, 1.0, True]),
}
OF_TOPK = {
    "k": st.sampled_from([0, 2, 5, 6, -1, True, 2.0]),
    "score": st.sampled_from(["softmax", "sigmoid", "none", 1]),
    "selection_bias": st.none() | TENSORS,
    "top_k": st.sampled_from([None, 1, 3, 9, 0, True, 1.0, 2**70]) | TENSORS,
    "top_p": NUMBERS | TENSORS,
    "min_p": NUMBERS | TENSORS,
}
OPTIONS = {"softmax": SHARED | OF_SCORES | OF_SOFTMAX, "softmax_topk": SHARED | OF_TOPK}
OPTIONS["attention"] = SHARED | OF_SCORES


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_served_is_valid(name, served, in_python):
    """Of any arguments: those that Python refuses are not served, and others have its results."""
    count = {True: 0, False: 0}

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
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


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: megasoftmax.softmax_topk(SCORES, 2, bias=normal(5)), [False]),
        (lambda: runs_fused(*[normal(4, 4, 6, 8)] * 3, AttentionOptions(causal=True)), [False]),
        # Another dispatch mode than those of the tests below.
        (lambda: make_fx(lambda x: megasoftmax.softmax(x), pre_dispatch=True)(SCORES), [False]),
        (lambda: torch.compile(megasoftmax.softmax, fullgraph=True, backend="eager")(SCORES), []),
    ],
    ids=["gradient of a bias of top-k", "adapter", "trace before autograd", "compiled"],
)
def test_other_calls_are_left_to_python(call, expected, served):
    torch.compiler.reset()
    call()
    assert served == expected


def test_transforms_of_functions_are_declined(served):
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


class Other(Tensor):
    pass


SCORES = torch.randn(2, 3, 4, 5)
NEGATED = torch.randn(2, 3, 4, 5, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    ("scores", "options", "is_served"),
    [
        (torch.nn.Parameter(SCORES), {}, True),
        (SCORES.bfloat16(), {"dtype": torch.float32}, True),
        (SCORES, {"dtype": torch.float16}, True),
        (SCORES.bfloat16(), {"dtype": torch.float16}, False),
        (SCORES.double(), {"dtype": torch.float32}, False),
        (SCORES.as_subclass(Other), {}, False),
        (SCORES.to("meta"), {}, False),
        (SCORES[..., :0], {}, False),
        (SCORES.transpose(0, 1).expand(2, 3, 2, 4, 5), {}, False),
        (NEGATED, {}, False),
        (SCORES, {"bias": NEGATED}, False),
        (SCORES, {"scale": torch.tensor(2.0)}, False),
        (SCORES, {"bias": torch.tensor(1.0)}, False),
        (SCORES, {"bias": normal()}, False),
        (SCORES, {"bias": normal(4, 1)}, False),  # nothing sums its gradient along a row
        (SCORES, {"window": [1, 0]}, False),
        (SCORES, {"visible": (torch.zeros(4, dtype=torch.int64), None)}, False),
        (SCORES, {"sink": torch.zeros(3, dtype=torch.float64)}, False),
        (SCORES, {"dropout": 0.5, "seed": torch.tensor([1])}, False),
        (SCORES, {"dtype": torch.float64}, False),
        (SCORES, {"dim": 1}, False),
    ],
)
def test_which_scores_and_options_are_served(scores, options, is_served, served):
    found = megasoftmax.softmax(scores, **options)
    assert served == [is_served]
    if not scores.is_meta:
        expected = megasoftmax.softmax(scores, **options, fused=False)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def of_leading() -> dict[str, tuple[dict[str, Any], bool]]:
    """{name: options, whether they are served}, of queries [2, 3, 4, 6, 8] and keys of 7 rows."""
    return {
        "plain": ({"return_lse": True}, True),
        "bias": ({"bias": normal(2, 3, 4, 6, 7)}, True),
        "bias of the outer": ({"bias": normal(2, 1, 4, 6, 7)}, True),
        "bias of the inner": ({"bias": normal(3, 4, 6, 7)}, False),
        "bias of heads": ({"bias": normal(4, 1, 7)}, True),
        "bias of all": ({"bias": normal(1, 1, 1, 6, 7)}, True),
        "table": ({"bias": megasoftmax.RelativeBias(normal(2, 1, 4, 12))}, True),
        "table of queries": ({"bias": megasoftmax.ShiftedBias(normal(2, 1, 4, 6, 12))}, True),
        "mask": ({"mask": bools(2, 3, 1, 6, 7)}, True),
        "mask of the inner": ({"mask": bools(3, 1, 6, 7)}, True),
        "mask of the outer": ({"mask": bools(2, 1, 1, 1, 7)}, False),
        "mask of pairs": ({"mask": bools(6, 7)}, True),
        "mask apart": ({"mask": bools(3, 2, 1, 1, 7).transpose(0, 1)}, False),
        "visible": ({"visible": (ints(2, 3, 1, 6, most=2), ints(1, 6, most=7))}, True),
        "visible of the inner": ({"visible": (None, ints(3, 1, 1, most=7))}, False),
        "dropout": ({"dropout": 0.25, "seed": torch.tensor([7])}, True),
    }


@pytest.mark.parametrize("name", of_leading())
def test_leading_dimensions(name, served, in_python):
    options, is_served = of_leading()[name]
    shapes = ((4, 6), (2, 7), (2, 7))
    given = [normal(2, 3, heads, rows, 8, dtype=torch.bfloat16) for heads, rows in shapes]
    bias = options.get("bias")
    leaves = given if bias is None else [*given, getattr(bias, "table", bias)]

    def run() -> list[Tensor]:
        # Where Python has the call, on a CPU torch's own attention may compute it.
        results = megasoftmax.attention(*given, **options, fused=is_served or None)
        results = [results] if isinstance(results, Tensor) else list(results)
        loss = sum(each.float().sin().sum() for each in results)
        assert isinstance(loss, Tensor)
        return [*results, *torch.autograd.grad(loss, leaves)]

    found = run()
    assert served == [is_served]
    expected = in_python(run)
    assert found[0].shape == (2, 3, 4, 6, 8)
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        tolerance = 0 if is_served else 0.02
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("windows", [1, 2, 3, 6, 4])
def test_masks_of_windows(windows: int, served: list[bool]) -> None:
    """Their batches divide those of the query, where that is asked for alone."""
    leaves = [normal(6, 4, 5, 8, dtype=torch.bfloat16) for _ in range(3)]
    options = AttentionOptions(bias=normal(4, 5, 5), mask=bools(windows, 1, 5, 5))
    found = served_attention(*leaves, options, repeats_mask=True)
    assert served == [6 % windows == 0]
    if found is None:
        return
    apart = [leaf.unflatten(0, (-1, windows)) for leaf in leaves]
    expected = megasoftmax.attention(*apart, **options._replace(fused=True)._asdict())
    assert found.equal(expected.flatten(0, 1).transpose(1, 2))
    leaves.append(options.bias)
    assert_same_gradients(found, expected, leaves)
    served.clear()
    assert (served_attention(*leaves[:3], options) is None) == (windows not in (1, 6))


def packed_attention(name: str) -> tuple[list[Tensor], AttentionOptions]:
    """[packed, what else has a gradient], and options, of 6 examples of 5 tokens."""
    packed = normal(6, 5, 3, 4, 8, dtype=torch.bfloat16)
    bias, sink = normal(4, 5, 5), normal(4)
    options: dict[str, Any] = {
        "plain": {},
        "bias": {"bias": bias},
        "windows": {"bias": bias, "mask": bools(3, 1, 5, 5)},
        "sink": {"bias": bias, "sink": sink, "causal": True},
        "dropout": {"dropout": 0.25, "seed": torch.tensor([7])},
    }[name]
    learned = [options[each] for each in ("bias", "sink") if each in options]
    return [packed, *learned], AttentionOptions(**options)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", ["plain", "bias", "windows", "sink", "dropout"])
def test_packed_query_key_and_value(name: str, twice: bool, served: list[bool]) -> None:
    """Bits of three tensors, also where the backward pass goes through Python."""
    leaves, options = packed_attention(name)
    found = served_packed_attention(leaves[0], options, repeats_mask=True)
    expected = served_attention(*unpacked(leaves[0]), options, repeats_mask=True)
    assert served == [True, True]
    assert found.equal(expected)
    assert (found.is_contiguous(), found._is_view()) == (True, False)
    gradients = assert_same_gradients(found, expected, leaves, create_graph=twice)
    assert gradients[0].is_contiguous()


def test_packed_gradient_is_that_of_the_op(served, monkeypatch):
    """No copy is made of it."""
    leaves, options = packed_attention("windows")
    found = served_packed_attention(leaves[0], options, repeats_mask=True)
    returned = []
    stack = torch.stack

    def noting(*args: Any) -> Tensor:
        returned.append(stack(*args))
        return returned[-1]

    monkeypatch.setattr(torch, "stack", noting)
    (gradient,) = torch.autograd.grad(found, leaves[:1], torch.randn_like(found))
    assert [each.data_ptr() for each in returned] == [gradient.data_ptr()]
    assert served == [True]


def test_packed_gradients_of_one_argument(served: list[bool]) -> None:
    leaves, options = packed_attention("bias")
    for leaf in leaves:
        found = served_packed_attention(leaves[0], options)
        (gradient,) = torch.autograd.grad(found.float().sum(), leaf)
        others = [each for each in leaves if each is not leaf]
        for each in others:
            each.requires_grad_(False)
        found = served_packed_attention(leaves[0], options)
        assert torch.autograd.grad(found.float().sum(), leaf)[0].equal(gradient)
        for each in others:
            each.requires_grad_(True)
    with torch.no_grad():
        without = served_packed_attention(leaves[0], options)
    assert without.equal(found.detach())
    assert all(served)


def test_many_packed_gradients_at_a_time(served: list[bool]) -> None:
    leaves, options = packed_attention("windows")
    found = served_packed_attention(leaves[0], options, repeats_mask=True)
    weights = torch.randn(2, *found.shape, dtype=found.dtype)
    together = torch.autograd.grad(found, leaves, weights, retain_graph=True, is_grads_batched=True)
    for i, each in enumerate(weights):
        alone = torch.autograd.grad(found, leaves, each, retain_graph=True)
        torch.testing.assert_close([one[i] for one in together], [*alone])


@pytest.mark.parametrize("shape", [(6, 5, 2, 4, 8), (6, 5, 4, 8), (2, 6, 5, 3, 4, 8)])
def test_packed_tensors_of_other_shapes(shape: tuple[int, ...], served: list[bool]) -> None:
    packed = torch.randn(shape, dtype=torch.bfloat16)
    assert served_packed_attention(packed, AttentionOptions()) is None
    with pytest.raises(TypeError, match="key: expected a tensor"):
        megasoftmax.attention(torch.randn(6, 5, 3, 4, 8), None, None)  # type: ignore[call-overload]
    assert not any(served)


@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_leading_dimensions_that_do_not_merge(tensor: int, served: list[bool]) -> None:
    """Python copies them, and words the error of what does not fit."""
    given = [torch.randn(2, 3, 2, 5, 8, dtype=torch.bfloat16) for _ in range(3)]
    given[tensor] = given[tensor].transpose(0, 1).contiguous().transpose(0, 1)
    found = megasoftmax.attention(*given)
    expected = megasoftmax.attention(*(each.contiguous() for each in given))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    given[tensor] = given[tensor][0]
    with pytest.raises(ValueError, match=f"{('key', 'key', 'value')[tensor]}: expected shape"):
        megasoftmax.attention(*given)
    assert served == [False, True, False]


def test_one_example_without_a_batch(served: list[bool]) -> None:
    query = torch.randn(4, 6, 8, dtype=torch.bfloat16)
    found = megasoftmax.attention(query, query, query, causal=True)
    assert found.equal(megasoftmax.attention(*[query[None]] * 3, causal=True)[0])
    assert served == [True, True]


SIXTEEN_BITS = functools.partial(torch.zeros, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "misfit",
    [
        {"key": torch.zeros(4, 2, 7, 8, dtype=torch.float16)},
        {"value": torch.zeros(4, 2, 7, 8, dtype=torch.float16)},
        {"key": SIXTEEN_BITS(1, 2, 7, 8)},
        {"value": SIXTEEN_BITS(1, 2, 7, 8)},
        {"value": SIXTEEN_BITS(4, 1, 7, 8)},
        {"value": SIXTEEN_BITS(4, 2, 6, 8)},
        {"key": SIXTEEN_BITS(4, 2, 7, 16)},
        {"key": SIXTEEN_BITS(4, 3, 7, 8), "value": SIXTEEN_BITS(4, 3, 7, 8)},
        {"bias": SIXTEEN_BITS(3, 1, 1, 1)},
        {"bias": SIXTEEN_BITS(1, 3, 1, 1)},
        {"bias": SIXTEEN_BITS(2, 4, 6, 7)},
        {"bias": SIXTEEN_BITS(4, 2, 6, 7)},
        {"bias": megasoftmax.RelativeBias(torch.zeros(2, 4, 12))},
        {"bias": megasoftmax.RelativeBias(torch.zeros(4, 1))},
        {"bias": megasoftmax.ShiftedBias(torch.zeros(4, 6, 11))},
        {"bias": megasoftmax.ShiftedBias(torch.zeros(4, 1, 12))},
        {"sink": torch.zeros(6)},
        {"visible": (torch.zeros(1, 1, 7, dtype=torch.int32), None)},
        {"seed": torch.zeros(1, dtype=torch.int32)},
        {"seed": torch.zeros(2, dtype=torch.int64)},
        {"dropout": -0.1},
    ],
    ids=lambda misfit: " and ".join(misfit),
)
def test_misfits_of_attention_are_declined(misfit, served):
    given = dict.fromkeys(("key", "value"), SIXTEEN_BITS(4, 2, 7, 8)) | misfit
    with pytest.raises((TypeError, ValueError)):
        megasoftmax.attention(SIXTEEN_BITS(4, 4, 6, 8), **given)
    assert served == [False]


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ({"scale": 1e4}, {"scale": 1.0001e4}),
        ({"scale": 1e-30}, {"scale": 0.0}),
        ({"dropout": 31744 / 32768}, {"dropout": 31745 / 32768}),
        ({"dim": 256}, {"dim": 257}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_limits_of_attention(inside, outside, served):
    for options in (inside, outside):
        tensor = SIXTEEN_BITS(1, 1, 2, options.pop("dim", 8))
        megasoftmax.attention(tensor, tensor, tensor, **options)
    assert served == [True, False]


@pytest.mark.parametrize("name", [name for name in of_topk() if name in ("limits", "of rows")])
@pytest.mark.parametrize("return_probabilities", [False, True])
def test_sample(return_probabilities, name, served, in_python):
    options = {key: each for key, each in of_topk()[name].items() if key != "renormalize"}
    logits, seed = torch.randn(2, 3, 4, 5), torch.tensor([7])
    options |= {"seed": seed, "return_probabilities": return_probabilities}
    found = megasoftmax.sample(logits, **options)
    assert served == [True]
    expected = in_python(lambda: megasoftmax.sample(logits, **options, fused=False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    served.clear()
    megasoftmax.sample(logits, 3)  # Python draws a seed
    assert served == []
    for wrong in ({"k": 0}, {"k": 6}, {"seed": 7}, {"top_p": 2.0}, {"scale": None}):
        with pytest.raises((TypeError, ValueError)):
            megasoftmax.sample(logits, **(options | wrong))
    assert not any(served)


def test_limits_of_topk(served):
    for k in (256, 257):
        megasoftmax.softmax_topk(torch.randn(1, 300), k)
    with pytest.raises(TypeError, match="group"):
        megasoftmax.softmax_topk(torch.randn(1, 300), 2, group="world")
    assert served == [True, False, False]


def test_devices_are_admitted(module, served):
    tensor = SIXTEEN_BITS(1, 1, 2, 8)
    for admission in ((True, True), (True, False), (False, False)):
        module.admit(CPU, *admission)
        megasoftmax.softmax(tensor)
        megasoftmax.softmax_topk(tensor, 1)
        megasoftmax.attention(tensor, tensor, tensor)
    assert served == [True] * 3 + [True, True, False] + [False] * 3


def test_compiled_code_outlasts_loading(module, monkeypatch):
    """It is not compiled again when the first call outside of it has run fused."""
    torch.compiler.reset()
    scores = torch.randn(1, 2, 3, 4)

    def all_functions(scores):
        return (
            megasoftmax.softmax(scores),
            megasoftmax.softmax_topk(scores, 2),
            megasoftmax.attention(scores, scores, scores),
        )

    compiled = torch.compile(all_functions, fullgraph=True, backend="eager")
    monkeypatch.setattr(host, "calls", None)
    compiled(scores)
    monkeypatch.setattr(host, "calls", module)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(scores)


def test_traced_modules_have_the_op(served):
    scores = torch.randn(2, 3)
    traced = torch.jit.trace(lambda x: megasoftmax.softmax(x), scores)
    assert served[0] is False  # others are checks without a trace
    torch.testing.assert_close(traced(2 * scores), (2 * scores).softmax(-1))


def test_dispatch_modes_see_the_op(served):
    scores = normal(2, 3)
    with BackwardOps():
        megasoftmax.softmax(scores)
    assert served == [False]
    probabilities = megasoftmax.softmax(scores)
    with BackwardOps() as ops:
        probabilities[:, 0].sum().backward()
    assert len(ops.given) == 1


def test_function_modes_see_the_seed(served):
    """A regression of training steps tells by it what two models drop."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    query = normal(1, 2, 4, 8, dtype=torch.bfloat16).detach()
    with Mode():
        megasoftmax.attention(query, query, query, dropout=0.5)
    assert served == [False]
    assert torch.randint in seen


def test_autocast(served):
    query = torch.randn(1, 2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        megasoftmax.attention(query, query, query)
        other = query.half()
        assert megasoftmax.attention(other, other, other).dtype == torch.bfloat16
        half = query.bfloat16()
        output = megasoftmax.attention(half, half, half)
        assert megasoftmax.softmax(half).dtype == torch.bfloat16  # float32 on a GPU alone
    assert served == [False, False, True, True]
    assert output.equal(megasoftmax.attention(half, half, half, fused=False))


# Autograd


def test_attention_refuses_a_second_derivative(served):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)
    output = megasoftmax.attention(query, query, query)
    (gradient,) = torch.autograd.grad(output.float().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="fused attention: expected"):
        torch.autograd.grad(gradient.float().sum(), query)
    assert served == [True]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, served):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)

    def layer(query):
        return megasoftmax.attention(query, query, query, dropout=0.5)

    found = []
    for function in (layer, lambda q: checkpoint(layer, q, use_reentrant=reentrant)):
        torch.manual_seed(3)
        output = function(query)
        output.float().square().sum().backward()
        found.append((output, query.grad))
        query.grad = None
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert served in ([True] * 2, [True] * 3)  # the second computation may stop early


def test_saved_tensors_pass_hooks(served):
    scores = normal(2, 3)
    with saved_tensors() as kept:
        probabilities = megasoftmax.softmax(scores)
    assert [each.shape for each in kept] == [probabilities.shape]
    assert served == [True]


def test_many_gradients_at_a_time(served):
    """Autograd vmaps the backward pass then."""
    scores = normal(2, 3)
    rows = torch.autograd.functional.jacobian(megasoftmax.softmax, scores, vectorize=True)
    expected = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), scores)
    assert served == [True]
    torch.testing.assert_close(rows, expected)


def test_gradients_of_one_of_several_results(served):
    """The bias may change before the backward pass."""
    scores, sink, bias = normal(2, 3, 4, 5), normal(3), normal(5)
    options = {"sink": sink, "bias": bias, "return_lse": True}
    results = [megasoftmax.softmax(scores, **options, fused=fused) for fused in (None, False)]
    with torch.no_grad():
        bias.add_(1)
    for one, wanted in zip(*results, strict=True):
        weights = torch.randn_like(one)
        found = [
            torch.autograd.grad(each, (scores, sink, bias), weights, retain_graph=True)
            for each in (one, wanted)
        ]
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "case"),
    [("softmax", "all"), ("softmax_topk", "all"), ("attention", "sink"), ("attention", "table")],
)
def test_compiled_autograd(name, case, served):
    """It reads what a node has saved."""
    options = MAKE[name]()[case]
    _, leaves, loss = forward(name, options)
    expected = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert served == [True]
    for leaf, wanted in zip(leaves.values(), expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, rtol=0, atol=0, equal_nan=True)


def test_deterministic_algorithms(served):
    query = normal(1, 2, 4, 8, dtype=torch.bfloat16)
    with deterministic():
        output = megasoftmax.attention(query, query, query)
        with BackwardOps() as ops:
            output.float().sum().backward()
    assert [given[-1] for given in ops.given] == [True]


def test_outputs_may_be_changed_in_place(served):
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
def unloaded(monkeypatch):
    monkeypatch.setattr(host, "calls", None)
    monkeypatch.setattr(host, "_why_not", None)


@pytest.mark.usefixtures("unloaded")
def test_it_can_be_switched_off(monkeypatch):
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
def test_why_it_is_not_there(variable, value, reason, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert host.status() == "none: it is built when the first call runs fused"
    monkeypatch.setenv(variable, value)
    host._load()
    assert host.calls is None
    assert reason in host.status()


@pytest.mark.usefixtures("unloaded")
def test_gpus_are_admitted_once(monkeypatch):
    admitted = []

    def load():
        assert host._loading.locked()  # by one thread at a time
        assert host.calls is None
        calls = SimpleNamespace(admit=lambda *given: admitted.append(given))
        monkeypatch.setattr(host, "calls", calls)

    monkeypatch.setattr(host, "_load", load)
    monkeypatch.setattr(host, "_admitted", set())
    monkeypatch.setattr(dispatch, "has_attention", lambda scores: scores.device.index == 1)
    gpus = [torch.device("cuda", index) for index in (0, 1)]
    is_coming = True
    monkeypatch.setattr(library, "host_is_coming", lambda: is_coming)
    for device in (gpus[0], *gpus, *gpus, CPU):
        host.admit(SimpleNamespace(device=device, is_cuda=device.type == "cuda"))
        assert is_coming == (not admitted)
        is_coming = False
    assert admitted == [(gpus[0], True, False), (gpus[1], True, True)]


@pytest.mark.usefixtures("module")
def test_it_is_built_once(monkeypatch):
    monkeypatch.setattr(library, "_compile", lambda *args, **flags: pytest.fail("compiled again"))
    assert library.host() == library.host()
