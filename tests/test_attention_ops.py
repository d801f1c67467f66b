"""attention: autograd, torch.compile, export, vmap, checkpoints, streams and CUDA graphs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import op_checks
import pytest
import torch
from einops import repeat
from torch import Tensor
from torch._inductor import config as inductor_config

import megasoftmax
from megasoftmax import RelativeBias, autograd, dispatch, ops, reference
from megasoftmax.build import library

TORCH_2_11 = torch.__version__.startswith("2.11.")
BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 4, 2, 5, 7, 8, 6

attention_forward = torch.ops.megasoftmax.attention_forward.default
attention_backward = torch.ops.megasoftmax.attention_backward.default


@pytest.fixture
def attention(through_ops, monkeypatch):
    """The public function, in plain torch and through the ops, float32 on a CPU included."""
    if through_ops:
        reasons_against = dispatch.reasons_against_fused_attention
        monkeypatch.setattr(
            dispatch,
            "reasons_against_fused_attention",
            lambda query, *rest: reasons_against(query, *rest) if query.is_cuda else (),
        )
    return functools.partial(megasoftmax.attention, fused=through_ops)


def dtype_on(device):
    """Of kernels the type with the least precision; test_attention.py has the others."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def assert_close_on(device):
    """assert_close(found, wanted) with the tolerance of the type of `dtype_on`."""
    tolerance = {} if device == "cpu" else {"rtol": 0.02, "atol": 0.02}
    return functools.partial(torch.testing.assert_close, **tolerance)


def make_inputs(device="cpu", dtype=None):
    """Query, key, value, bias, table and sink, which require gradients, and a mask."""
    dtype = dtype_on(device) if dtype is None else dtype
    shapes = [
        (BATCH, HEADS, QUERIES, DIM),
        (BATCH, KEY_HEADS, KEYS, DIM),
        (BATCH, KEY_HEADS, KEYS, VALUE_DIM),
        (1, HEADS, QUERIES, KEYS),
        (HEADS, QUERIES + KEYS - 1),
        (HEADS,),
    ]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    mask = torch.rand(BATCH, 1, 1, KEYS, device=device) < 0.4
    mask[0] = True
    return *inputs, mask


def full_call(attention, mask):
    """attention with everything, as a function of what has gradients."""

    def function(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, table: Tensor, sink: Tensor
    ) -> tuple[Tensor, ...]:
        one = attention(
            query, key, value, bias=bias, mask=mask, scale=0.3, sink=sink, return_lse=True
        )
        relative = RelativeBias(table)
        other = attention(query, key, value, bias=relative, causal=True, return_lse=True)
        return *one, *other

    return function


def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([each.float().sin().mul(each.float()).sum() for each in outputs]).sum()


def gradients_of(function: Callable[..., Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    outputs = function(*inputs)
    gradients = torch.autograd.grad(loss_of(outputs), inputs)
    return *(each.detach() for each in outputs), *gradients


# The ops themselves

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "mask": {"mask": (BATCH, HEADS, QUERIES, KEYS)},
    "mask of keys": {"mask": (BATCH, 1, 1, KEYS)},
    "bias": {"bias": (BATCH, HEADS, QUERIES, KEYS)},
    "shared bias": {"bias": (1, 2, QUERIES, 1), "mask": (1, 1, QUERIES, KEYS)},
    "bias of keys": {"bias": (2, 1, 1, KEYS), "causal": True},
    "relative": {"bias": (1, HEADS, QUERIES + KEYS - 1), "relative": True},
    "relative in groups": {"bias": (2, 2, QUERIES + KEYS - 1), "relative": True, "causal": True},
    "sink": {"sink": (HEADS,)},
    "one sink": {"sink": (1,), "bias": (1, 1, 1, 1)},
    "sink as a number": {"sink_value": 0.5},
    "visible": {"visible": ((BATCH, 1, QUERIES), (1, HEADS, 1))},
    "end": {"visible": (None, (1, 1, QUERIES)), "bias": (1, HEADS, QUERIES, KEYS), "causal": True},
    "blocks": {"mask": (BATCH, 1, 1, 1), "block": 64},
    "dropout": {"dropout": 0.4, "bias": (1, HEADS, QUERIES, KEYS), "sink": (HEADS,)},
    "[b, s, h, d]": {"is_transposed": True, "bias": (1, 1, QUERIES, KEYS)},
}


def forward_arguments(device, dtype=None, **case):
    dtype = dtype_on(device) if dtype is None else dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def states(heads: int, length: int, dim: int) -> Tensor:
        if case.get("is_transposed"):
            return random(BATCH, length, heads, dim).transpose(1, 2).requires_grad_()
        return random(BATCH, heads, length, dim).requires_grad_()

    left, right = case.get("window", (-1, -1))
    dim, value_dim = case.get("dims", (DIM, VALUE_DIM))
    return (
        states(HEADS, QUERIES, dim),
        states(KEY_HEADS, KEYS, dim),
        states(KEY_HEADS, KEYS, value_dim),
        random(*case["bias"]).requires_grad_() if "bias" in case else None,
        torch.rand(case["mask"], device=device) < 0.3 if "mask" in case else None,
        0.4,
        case.get("causal", False),
        left,
        right,
        random(*case["sink"]).requires_grad_() if "sink" in case else None,
        case.get("sink_value"),
        case.get("relative", False),
        *bounds(device, *case.get("visible", (None, None))),
        None,
        case.get("block", 1),
        case.get("dropout", 0.0),
        torch.tensor([5], device=device) if "dropout" in case else None,
        False,
    )


def bounds(device, first, end):
    """Ranges of these shapes, some empty, and some that reach beyond the keys."""
    return (
        None if first is None else torch.randint(-2, KEYS, first, device=device).int(),
        None if end is None else torch.randint(0, KEYS + 3, end, device=device).int(),
    )


def detached(arguments):
    return tuple(each.detach() if isinstance(each, Tensor) else each for each in arguments)


def backward_arguments(device, lse=True, asked=True, **case):
    given = detached(forward_arguments(device, **case))
    output, statistics = attention_forward(*given)
    return (
        torch.randn_like(output),
        torch.randn_like(statistics[2]) if lse else None,
        *given[:3],
        output,
        statistics,
        *given[3:],
        asked and "bias" in case,
        asked and "sink" in case,
        True,
    )


# Between them they have every tensor that the op takes.
TRACED = (
    "plain",
    "shared bias",
    "relative in groups",
    "sink",
    "visible",
    "blocks",
    "dropout",
    "[b, s, h, d]",
)


@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_forward(case, device):
    arguments = forward_arguments(device, **CASES[case])
    op_checks.check_op(attention_forward, arguments, is_traced=case in TRACED)


@pytest.mark.parametrize("case", ["shared bias", "relative in groups", "sink", "[b, s, h, d]"])
def test_opcheck_of_the_reference(case, device):
    """Which compiled code calls on every device."""
    in_blocks = torch.ops.megasoftmax.attention_in_blocks_forward.default
    torch.library.opcheck(in_blocks, forward_arguments(device, torch.float32, **CASES[case]))
    in_blocks = torch.ops.megasoftmax.attention_in_blocks_backward.default
    arguments = backward_arguments("cpu", **CASES[case])
    arguments = [each.to(device) if isinstance(each, Tensor) else each for each in arguments]
    torch.library.opcheck(in_blocks, tuple(arguments))


@pytest.mark.parametrize(
    ("case", "lse"), [*((case, True) for case in CASES), (next(iter(CASES)), False)]
)
def test_opcheck_of_backward(case, lse, device):
    arguments = backward_arguments(device, lse=lse, **CASES[case])
    op_checks.check_op(attention_backward, arguments, is_traced=case in TRACED)


@pytest.mark.parametrize("case", ["bias", "relative", "sink"])
def test_opcheck_of_what_is_not_asked_for(case, device):
    arguments = backward_arguments(device, asked=False, **CASES[case])
    torch.library.opcheck(attention_backward, arguments)
    assert [each.shape for each in attention_backward(*arguments)[3:]] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_opcheck_of_other_types(dtype):
    arguments = forward_arguments("cpu", dtype, **CASES["shared bias"])
    op_checks.check_op(attention_forward, arguments, is_traced=False)


def test_gradients_lie_as_their_tensors(device):
    for case in ("plain", "[b, s, h, d]"):
        arguments = backward_arguments(device, **CASES[case])
        for gradient, tensor in zip(attention_backward(*arguments), arguments[2:5], strict=False):
            assert gradient.stride() == tensor.stride()


def test_gradients_of_misaligned_tensors_lie_as_declared(device):
    arguments = list(backward_arguments(device, **CASES["[b, s, h, d]"]))
    for i in (2, 3, 4):
        rows = arguments[i].transpose(1, 2)
        moved = torch.nn.functional.pad(rows.flatten(), (1, 0))[1:]
        arguments[i] = moved.view(rows.shape).transpose(1, 2)
    for gradient, tensor in zip(attention_backward(*arguments), arguments[2:5], strict=False):
        assert gradient.stride() == torch.empty_like(tensor).stride()


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_forward(case):
    """Of the statistics the log-sum-exp alone has a gradient."""
    torch.manual_seed(0)
    given = forward_arguments("cpu", torch.float64, dims=(3, 2), **CASES[case])
    where = [i for i, each in enumerate(given) if isinstance(each, Tensor) and each.requires_grad]

    def function(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        arguments = list(given)
        for i, each in zip(where, inputs, strict=True):
            arguments[i] = each
        output, statistics = attention_forward(*arguments)
        return output, statistics[2].masked_fill(statistics[2] == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, [given[i] for i in where], fast_mode=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_ops_agree_between_cpu_and_gpu(case):
    assert library.load().available
    torch.manual_seed(0)
    arguments = forward_arguments("cpu", torch.bfloat16, **CASES[case])

    def op(*arguments: Any) -> tuple[Tensor, Tensor]:
        output, statistics = attention_forward(*arguments)
        return output, statistics.masked_fill(~statistics[2].isfinite(), 0)

    def loss(results: tuple[Tensor, Tensor]) -> Tensor:
        output, statistics = results
        weights = torch.linspace(-1, 1, VALUE_DIM, device=output.device)
        return (output.float() * weights).sum() + statistics[2].sum()

    for cpu, gpu in op_checks.on_cpu_and_gpu(op, loss, arguments):
        assert cpu.stride() == gpu.stride()
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=0.02, atol=0.02)


# The public function


def test_gradients_in_float64():
    """The fused path takes no float64; its op is checked above."""
    torch.manual_seed(0)
    *inputs, mask = make_inputs(dtype=torch.float64)
    mask[0, ..., :3] = False
    inputs = [
        each[:, :, :3, :3].detach().requires_grad_() if each.dim() == 4 else each for each in inputs
    ]  # fewer queries, keys and dimensions
    inputs[2] = inputs[2][..., :2].detach().requires_grad_()
    inputs[4] = inputs[4][..., :5].detach().requires_grad_()
    function = full_call(megasoftmax.attention, mask[..., :3])
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def plain_attention(query, key, value, bias):
    shared = HEADS // KEY_HEADS
    key, value = (repeat(t, "b hk n x -> b (hk shared) n x", shared=shared) for t in (key, value))
    return (query @ key.mT * DIM**-0.5 + bias).softmax(-1) @ value


@pytest.mark.parametrize("block", [2**22, 30])
def test_derivatives_of_any_order(block, monkeypatch, device):
    monkeypatch.setattr(reference.attention, "BLOCK", block)
    query, key, value, bias, *_ = make_inputs(device, torch.float64)
    inputs = (query, key, value, bias)
    found = []
    for output in (
        megasoftmax.attention(query, key, value, bias=bias, fused=False),
        plain_attention(*inputs),
    ):
        derivatives = [output]
        for _ in range(3):
            loss = sum(each.sin().sum() for each in derivatives)
            derivatives = torch.autograd.grad(loss, inputs, create_graph=True)
        found.append(derivatives)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("through_ops", ["fused"], indirect=True)
def test_second_derivative_is_refused(attention, device):
    query, key, value, bias, *_ = make_inputs(device)
    output = attention(query, key, value, bias=bias)
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    message = "expected to be differentiated once, got a second derivative; fused=False"
    with pytest.raises(NotImplementedError, match=message):
        first.sum().backward()

    def loss(query: Tensor) -> Tensor:
        return attention(query, key.detach(), value.detach()).square().sum()

    with pytest.raises(NotImplementedError, match=message):
        torch.func.jacrev(torch.func.grad(loss))(query.detach())


@pytest.mark.parametrize("through_ops", ["fused"], indirect=True)
def test_second_derivative_of_the_op_is_refused(through_ops):
    arguments = forward_arguments("cpu")
    output, _ = attention_forward(*arguments)
    (first,) = torch.autograd.grad(output.square().sum(), arguments[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="expected to be differentiated once"):
        first.sum().backward()


@pytest.mark.parametrize("changed", ["query", "key", "value", "bias", "output"])
def test_in_place_change_is_noticed(attention, changed):
    query, key, value, bias, *_ = make_inputs()
    output = attention(query, key, value, bias=bias)
    named = {"query": query, "key": key, "value": value, "bias": bias, "output": output}
    with torch.no_grad():
        named[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_nothing_is_recorded_without_need(attention):
    *inputs, mask = make_inputs()
    with torch.no_grad():
        outputs = full_call(attention, mask)(*inputs)
    assert not any(each.requires_grad for each in outputs)
    outputs = full_call(attention, mask)(*(each.detach() for each in inputs))
    assert not any(each.requires_grad for each in outputs)
    for i in range(len(inputs)):
        some = [each if i == j else each.detach() for j, each in enumerate(inputs)]
        assert any(each.requires_grad for each in full_call(attention, mask)(*some))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.float64])
def test_types_of_bias_and_sink(attention, device, bias_dtype):
    *inputs, mask = make_inputs(device, torch.bfloat16)
    inputs[3:] = (each.detach().to(bias_dtype).requires_grad_() for each in inputs[3:])
    actual = gradients_of(full_call(attention, mask), *inputs)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    expected = gradients_of(full_call(megasoftmax.attention, mask), *exact)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0.03, atol=0.03)
    for found, each in zip(actual[4:], inputs, strict=True):
        assert found.dtype == each.dtype


# Compilation and export


@op_checks.static_and_dynamic
def test_compile(attention, device, dynamic):
    *inputs, mask = make_inputs(device)
    function = full_call(attention, mask)
    # See docs/limits.md.
    changed = {"triton.coalesce_tiling_analysis": False} if TORCH_2_11 else {}
    with inductor_config.patch(changed):
        op_checks.check_compiled(function, gradients_of, inputs, dynamic, assert_close_on(device))


def test_compiled_in_blocks(monkeypatch):
    """On a CPU: what is compiled knows no device, and torch 2.11 takes minutes for it."""
    monkeypatch.setattr(reference.attention, "BLOCK", 40)
    torch.manual_seed(0)
    torch.compiler.reset()
    *inputs, mask = make_inputs()
    function = full_call(functools.partial(megasoftmax.attention, fused=False), mask)
    op_checks.check_compiled(function, gradients_of, inputs, dynamic=True)


def test_compiled_once_for_all_lengths(attention, device):
    def call(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, table: Tensor, sink: Tensor
    ) -> tuple[Tensor, ...]:
        mask = bias > 1
        output, lse = attention(
            query, key, value, bias=bias, mask=mask, causal=True, sink=sink, return_lse=True
        )
        return output + attention(query, key, value, bias=RelativeBias(table), window=(3, -1)), lse

    def draw(batch: int, queries: int, keys: int) -> list[Tensor]:
        shapes = [
            (batch, HEADS, queries, DIM),
            (batch, KEY_HEADS, keys, DIM),
            (batch, KEY_HEADS, keys, VALUE_DIM),
            (1, HEADS, queries, keys),
            (HEADS, queries + keys - 1),
            (HEADS,),
        ]
        dtype = dtype_on(device)
        return [torch.randn(s, device=device, dtype=dtype).requires_grad_() for s in shapes]

    op_checks.check_compiled_once(call, draw, assert_close_on(device))


class Attention(torch.nn.Module):
    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return self.attention(query, key, value, mask=mask, causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export(attention, device, strict):
    query, key, value, *_, mask = (each.detach() for each in make_inputs(device))
    inputs = (query, key, value, mask)
    batch = torch.export.Dim("batch", min=2, max=64)
    module = Attention(attention)
    program = torch.export.export(
        module,
        inputs,
        dynamic_shapes={
            "query": {0: batch},
            "key": {0: batch},
            "value": {0: batch},
            "mask": {0: batch},
        },
        strict=strict,
    )
    more = [torch.cat([each, each, each]) for each in inputs]
    assert_close_on(device)(program.module()(*more), module(*more))


@pytest.mark.parametrize("through_ops", ["fused"], indirect=True)
def test_export_contains_the_op(attention):
    query, key, value, *_, mask = (each.detach() for each in make_inputs())
    program = torch.export.export(Attention(attention), (query, key, value, mask))
    assert attention_forward in [node.target for node in program.graph.nodes]


# Transforms

NAMES = ("query", "key", "value", "bias", "table", "sink", "mask")


@pytest.mark.parametrize(
    "batched", ["query", "key", "value", "bias", "table", "sink", "mask", "all"]
)
def test_vmap(attention, device, batched):
    inputs, dims = [], []
    for position, (name, each) in enumerate(zip(NAMES, make_inputs(device), strict=True)):
        is_batched = batched in (name, "all")
        dim = position % (each.dim() + 1) if is_batched else None
        each = each.detach()
        if dim is not None:
            each = torch.stack([each, each.flip(0), ~each if name == "mask" else -each], dim)
        inputs.append(each)
        dims.append(dim)

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return full_call(attention, inputs[-1])(*inputs[:-1])

    def gradient(*inputs: Tensor) -> tuple[Tensor, ...]:
        def loss(*leaves: Tensor) -> Tensor:
            outputs = function(*leaves, inputs[-1])
            return loss_of(tuple(each.nan_to_num(neginf=0) for each in outputs))

        return torch.func.grad(loss, argnums=tuple(range(6)))(*inputs[:-1])

    for each in (function, gradient):
        op_checks.check_vmap(each, inputs, dims, assert_close_on(device))


@pytest.mark.parametrize("case", CASES)
def test_vmap_of_the_plain_ops(case, device):
    query, *rest = detached(forward_arguments(device, **CASES[case]))
    queries = torch.stack([query, -query, 2 * query])
    op_checks.check_vmap(
        lambda x: attention_forward(x, *rest), [queries], [0], assert_close_on(device)
    )


def test_second_derivatives_by_transforms():
    query, key, value, bias, *_ = (each.detach() for each in make_inputs(dtype=torch.float64))
    query, bias = query[:1, :, :2], bias[:, :, :2]

    def loss(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda query: function(query, key[:1], value[:1], bias=bias).square().sum()

    second = torch.func.jacrev(torch.func.jacrev(loss(megasoftmax.attention)))(query)
    expected = torch.autograd.functional.hessian(loss(plain_attention), query)
    torch.testing.assert_close(second, expected)


# Training


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(attention, through_ops, device, reentrant):
    *inputs, mask = make_inputs(device)
    with deterministic(through_ops):  # for the reference cuBLAS would ask for a setting
        op_checks.check_checkpoint(full_call(attention, mask), loss_of, inputs, reentrant)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast_changes_nothing_but_types(attention, device, cast, backward_too):
    query, key, value, *_ = make_inputs(device)
    expected = attention(*(each.to(cast) for each in (query, key, value)), causal=True)
    wanted = torch.autograd.grad(expected.float().square().sum(), (query, key, value))
    with torch.autocast(device, dtype=cast):
        actual = attention(query, key, value, causal=True)
    with torch.autocast(device, dtype=cast, enabled=backward_too):
        found = torch.autograd.grad(actual.float().square().sum(), (query, key, value))
    assert actual.equal(expected)
    op_checks.assert_all_close(found, wanted, assert_close_on(device))


# CUDA


def random_halves(*shapes, **options):
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, **options) for s in shapes]


@pytest.mark.gpu
def test_side_stream():
    query, key, value = random_halves(*[(2, 8, 512, 64)] * 3)

    def function(query: Tensor) -> Tensor:
        return megasoftmax.attention(query, key, value, fused=True)

    assert torch.equal(op_checks.on_late_input(function, query), function(query))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(300, 300), (1, 600), (1, 5000)])
def test_cuda_graph(lengths):
    m, n = lengths
    inputs = random_halves(
        (2, 8, m, 64), (2, 2, n, 64), (2, 2, n, 64), (1, 8, 1, n), requires_grad=True
    )

    def step() -> tuple[Tensor, ...]:
        output, lse = megasoftmax.attention(
            *inputs[:3], bias=inputs[3], causal=True, sink=0.5, return_lse=True, fused=True
        )
        loss = output.float().square().sum() + lse.sum()
        return output, lse, *torch.autograd.grad(loss, inputs)

    with deterministic(True):
        op_checks.check_cuda_graph(step, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_never_synchronises(fused):
    *inputs, mask = make_inputs("cuda")
    function = full_call(functools.partial(megasoftmax.attention, fused=fused), mask)
    function(*inputs)
    with op_checks.without_synchronisation():
        outputs = function(*inputs)
        torch.autograd.grad(outputs, inputs, outputs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_other_device_is_current():
    *inputs, mask = make_inputs("cuda:1")
    function = full_call(megasoftmax.attention, mask)
    run = functools.partial(gradients_of, function, *inputs)
    op_checks.check_other_device(run, assert_close_on("cuda:1"))


@pytest.mark.gpu
def test_fused_makes_no_tensor_of_queries_and_keys():
    length = 8192
    inputs = random_halves(*[(1, 4, length, 64)] * 3, requires_grad=True)
    table = torch.randn(4, 2 * length - 1, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = megasoftmax.attention(*inputs, bias=RelativeBias(table), causal=True, fused=True)
    torch.autograd.grad(output.float().sum(), [*inputs, table])
    assert torch.cuda.max_memory_allocated() - before < length * length


def test_fused_path_calls_the_ops():
    arguments = forward_arguments("cpu", **CASES["shared bias"])
    with torch.no_grad():
        for found, wanted in zip(
            ops.attention.IMPLEMENTATION.forward(*arguments),
            autograd.attention.REFERENCE.forward(*arguments),
            strict=True,
        ):
            assert found.equal(wanted)
            assert found.stride() == wanted.stride()
