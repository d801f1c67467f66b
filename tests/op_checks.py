"""What is asked of every op and its public function: GPUs, compilation, transforms, checkpoints.

A function takes tensors and returns a tuple of them.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from inputs import bits_equal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

Results = tuple[Tensor, ...]
Function = Callable[..., Any]


def assert_equal(found, wanted):
    assert found.equal(wanted)


def assert_all_equal(found, wanted):
    assert_all_close(found, wanted, assert_equal)


def assert_all_close(found, wanted, assert_close=torch.testing.assert_close):
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other)


# The ops themselves


def check_op(op, arguments, *, is_traced):
    """opcheck, on a CPU with symbolic sizes only if `is_traced`: that takes 95% of its time.

    Other cases of the op have its rule of autograd and its sizes traced, and have their own
    schema and fake result checked.
    """
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if is_traced or arguments[0].is_cuda:
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments, test_utils=tests)


# Arguments


def in_need(arguments):
    """The arguments that require a gradient."""
    return [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]


def on_cpu_and_gpu(op, loss_of, arguments):
    """Each result and each gradient of the loss by the op for CPUs, and by that for GPUs."""
    on_gpu = [
        each.detach().cuda().requires_grad_(each.requires_grad)
        if isinstance(each, Tensor)
        else each
        for each in arguments
    ]
    found = []
    for given in (arguments, on_gpu):
        results = op(*given)
        found.append((*results, *torch.autograd.grad(loss_of(results), in_need(given))))
    return zip(*found, strict=True)


def select(inputs, dims, i):
    """Example i of inputs that have their examples at `dims`, None where all share the tensor."""
    return [
        each if dim is None else each.select(dim, i) for each, dim in zip(inputs, dims, strict=True)
    ]


def loss_of(outputs):
    """A number to which every entry of every float contributes, but rows without a visible one."""
    floats = [each.float() for each in outputs if each.is_floating_point()]
    finite = [each.masked_fill(each == -torch.inf, 0) for each in floats]
    return torch.stack([each.sin().mul(each).sum() for each in finite]).sum()


def gradients_of(function, *inputs):
    outputs = function(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    gradients = torch.autograd.grad(loss_of(outputs), in_need(inputs))
    return *(each.detach() for each in outputs), *gradients


# Compilation

# For tests that take `dynamic`. On a CPU sizes that change are left to `check_compiled_once`.
static_and_dynamic = pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.gpu)]
)


def check_compiled(function, results, inputs, dynamic, assert_close=torch.testing.assert_close):
    """`results(function, *inputs)`, gradients among them, are those of the compiled function."""
    backend = "inductor" if inputs[0].is_cuda else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)
    expected = results(function, *inputs)
    assert_all_close(results(compiled, *inputs), expected, assert_close)


def check_compiled_once(function, draw, assert_close=torch.testing.assert_close):
    """One graph serves all sizes: `draw(batch, rows, columns)` gives inputs of theirs."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    compilations = set()
    # A size that equals another one in the first call is taken as the same one.
    for sizes in ((5, 7, 9), (6, 9, 12), (7, 10, 13)):
        inputs = draw(*sizes)
        found = [gradients_of(each, *inputs) for each in (compiled, function)]
        assert_all_close(*found, assert_close)
        compilations.add(backend.frame_count)
    assert len(compilations) == 1


# Transforms


def check_vmap(function, inputs, dims, assert_close=torch.testing.assert_close):
    """All examples at once give what each gives alone: a tensor, or a tuple of them."""
    found = torch.vmap(function, in_dims=tuple(dims))(*inputs)
    count = next(each.shape[dim] for each, dim in zip(inputs, dims, strict=True) if dim is not None)
    expected = [function(*select(inputs, dims, i)) for i in range(count)]
    if isinstance(found, Tensor):
        found, expected = (found,), [(each,) for each in expected]
    for actual, *wanted in zip(found, *expected, strict=True):
        assert_close(actual, torch.stack(wanted))


def check_gradients_per_example(loss, inputs, dims, assert_close=torch.testing.assert_close):
    """vmap of grad gives each example its gradient of every float, shared or not."""
    floats = tuple(i for i, each in enumerate(inputs) if each.is_floating_point())
    gradient = torch.func.grad(loss, argnums=floats)
    found = torch.vmap(gradient, in_dims=tuple(dims))(*inputs)
    for i in range(len(found[0])):
        example = [each.detach().clone() for each in select(inputs, dims, i)]
        leaves = [example[j].requires_grad_() for j in floats]
        expected = torch.autograd.grad(loss(*example), leaves)
        assert_all_close([each[i] for each in found], expected, assert_close)


# Export


class Called(torch.nn.Module):
    """A module of a function, for torch.export."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


# Training


def check_checkpoint(function, inputs, reentrant):
    """Gradients through a checkpoint are the same to the last bit."""

    def again(*tensors):
        return checkpoint(function, *tensors, use_reentrant=reentrant)

    found = []
    for each in (again, function):
        for tensor in inputs:
            tensor.grad = None
        loss_of(each(*inputs)).backward()  # reentrant checkpoints refuse autograd.grad
        found.append([tensor.grad for tensor in in_need(inputs)])
    assert all(map(bits_equal, *found))


def check_autocast_changes_nothing(run, device, cast):
    expected = run()
    with torch.autocast(device, dtype=cast):
        actual = run()
    assert_all_equal(actual, expected)


# GPUs


def on_late_input(function, value):
    """function(value) on a side stream, where the value arrives late.

    Work on another stream comes too early, and reads zeros.
    """
    late = torch.zeros_like(value)
    function(late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(value)
        results = function(late)
    stream.synchronize()
    return results


def capture(step):
    """A graph of the step, which ran once before, and the results that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


def check_cuda_graph(step, inputs):
    """Replays with other inputs. What a launch leaves behind must suit the next."""
    graph, captured = capture(step)
    for _ in range(2):
        with torch.no_grad():
            for each in inputs:
                each.copy_(torch.randn_like(each))
        graph.replay()
        assert_all_equal(captured, step())


@contextmanager
def without_synchronisation():
    """A block in which an operation that waits for the GPU raises."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def check_other_device(run, assert_close=assert_equal):
    """What runs on cuda:1 gives the same while cuda:0 is current, and stays there."""
    actual = run()
    with torch.cuda.device(1):
        expected = run()
    assert all(each.device == torch.device("cuda:1") for each in actual)
    assert_all_close(actual, expected, assert_close)
