"""Where calls meet: parts of a GPU, streams and graphs at once, two GPUs, errors, foreign memory.

The calls are those whose blocks wait for each other, over the whole GPU or in clusters, and those
whose launches begin while the one before runs.
"""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from inputs import bits_equal, coin, drawn, normal, tensors
from torch import Tensor

import megasoftmax
from megasoftmax import ranges

pytestmark = pytest.mark.gpu

Results = tuple[Tensor, ...]


def rows_of_millions(device):
    return _softmax(normal(4, 1 << 23, device=device, dtype=torch.float16), -1)


def rows_of_clusters(device):
    return _softmax(normal(40, 100_000, device=device, dtype=torch.bfloat16), -1)


def columns_of_clusters(device):
    return _softmax(normal(1, 70_000, 40, device=device, dtype=torch.bfloat16), 1)


def _softmax(scores, dim):
    def call():
        p = megasoftmax.softmax(scores, dim=dim, fused=True)
        return p, *torch.autograd.grad(p, scores, gradient)

    gradient = scores.clone()
    scores.requires_grad_()
    return call


def topk_of_a_vocabulary(device):
    def call():
        values, indices = megasoftmax.softmax_topk(logits, 10, fused=True)
        return values, indices, *torch.autograd.grad(values, logits, torch.ones_like(values))

    logits = normal(1, 151_936, device=device).requires_grad_()
    return call


def decoding(device):
    q, k, v = (
        normal(1, heads, length, 64, device=device, dtype=torch.bfloat16, seed=seed)
        for seed, (heads, length) in enumerate(((4, 1), (2, 9000), (2, 9000)))
    )
    return lambda: megasoftmax.attention(q, k, v, return_lse=True, fused=True)


def attention_of_documents(device):
    """Of which each launch counts the tiles that its blocks take."""
    q, k, v = tensors(device, torch.bfloat16, heads=32, lengths=2048, dims=128)
    offsets = torch.tensor([0, 100, 700, 1500, 2048], device=device)
    options = {"visible": ranges.packed(offsets, 2048), "causal": True, "fused": True}
    return lambda: (megasoftmax.attention(q, k, v, **options),)


def gradients_beside_a_shared_bias(device):
    """One block has the keys of a head, and so all of its dQ. Otherwise its bits would vary."""
    return _gradients(device, (12, 4), (500, 100), 64)


def gradients_of_whole_heads_beside_a_shared_bias(device):
    return _gradients(device, (48, 16), (384, 384), 24)


def _gradients(device, leading, lengths, dim):
    def call():
        output = megasoftmax.attention(q, k, v, bias=bias, fused=True)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    shapes = [(*leading, length, dim) for length in (*lengths, lengths[1])]
    shapes.append((1, leading[1], *lengths))
    leaves = q, k, v, bias = drawn(*shapes, device=device, dtype=torch.bfloat16)
    return call


CALLS = [
    attention_of_documents,
    gradients_beside_a_shared_bias,
    gradients_of_whole_heads_beside_a_shared_bias,
    rows_of_millions,
    rows_of_clusters,
    columns_of_clusters,
    topk_of_a_vocabulary,
    decoding,
]
of_every_call = pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)


def assert_close(found, expected):
    """Fewer blocks may add up a row in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert bits_equal(a.detach(), b.detach())


@contextmanager
def part_of_the_gpu(multiprocessors):
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not green_contexts.SUPPORTED:
        pytest.skip("this build of torch has no green contexts")
    context = green_contexts.GreenContext.create(num_sms=multiprocessors, device_id=0)
    context.set_context()
    done = torch.cuda.Event()
    try:
        yield
        done.record()
    finally:
        context.pop_context()
    done.synchronize()


@of_every_call
@pytest.mark.parametrize("multiprocessors", [8, 32])
def test_in_a_part_of_the_gpu(multiprocessors, make):
    call = make("cuda")
    expected = call()
    torch.cuda.synchronize()
    # Threads of autograd would stay in the context of the whole GPU, and not wait for this one.
    with part_of_the_gpu(multiprocessors), torch.autograd.set_multithreading_enabled(False):
        found = call()
    if make is decoding:
        # Weights are rounded to bfloat16 relative to the largest of their part of the keys.
        (found_output, *found_others), (output, *others) = found, expected
        largest = output.float().abs().max().item()
        torch.testing.assert_close(found_output, output, rtol=1e-2, atol=2**-9 * largest)
        assert_close(tuple(found_others), tuple(others))
    else:
        assert_close(found, expected)
    assert_same(call(), expected)  # the whole GPU is there again


@of_every_call
def test_on_two_streams_at_once(make):
    call = make("cuda")
    expected = call()
    torch.cuda.synchronize()
    runs = [[], []]

    def run(results):
        with torch.cuda.stream(torch.cuda.Stream()):
            results += [call() for _ in range(5)]
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=run, args=(results,)) for results in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in runs:
        assert len(results) == 5
        for found in results:
            assert_same(found, expected)


def test_in_a_thread_without_a_context():
    """A new thread has none as long as torch has memory at hand; the driver then makes no maps."""
    q, k, v = tensors("cuda", torch.bfloat16, batch=1, heads=2, lengths=300, dims=64)

    def call():
        return megasoftmax.attention(q, k, v, return_lse=True, fused=True)

    expected, found = call(), list[Results]()
    call()  # torch keeps the memory of these results
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    assert len(found) == 1
    assert_same(found[0], expected)


@of_every_call
def test_in_two_graphs_at_once(make):
    call = make("cuda")
    torch.cuda.synchronize()
    # Not on the default stream, which autograd would wait for while a graph is captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = call()
        torch.cuda.current_stream().synchronize()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(call())
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found in captured:
        assert_same(found, expected)


@of_every_call
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_gpu_that_is_not_current(make):
    assert torch.cuda.current_device() == 0
    expected, found = make("cuda:0")(), make("cuda:1")()
    assert all(result.device == torch.device("cuda:1") for result in found)
    assert torch.cuda.current_device() == 0
    assert_same(tuple(result.cpu() for result in found), tuple(each.cpu() for each in expected))


FREED = """
import torch, megasoftmax
tensor = torch.ones({shape}, device="cuda", dtype=torch.float16)
tensor.untyped_storage().resize_(0)
try:
    {call}
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("shape", "call", "op"),
    [
        ((4, 1000), "megasoftmax.softmax(tensor, fused=True)", "softmax_forward"),
        ((4, 1000), "megasoftmax.softmax_topk(tensor, 2, fused=True)", "softmax_topk_forward"),
        ((1, 1, 64, 64), "megasoftmax.attention(*3 * [tensor], fused=True)", "attention_forward"),
    ],
)
def test_an_error_names_the_op(shape, call, op):
    """Memory that was freed: where launches are waited for, the call that reads it says so."""
    # MPS would report the fault to all processes that it serves, so this one goes without.
    alone = {"CUDA_MPS_PIPE_DIRECTORY": os.devnull, "CUDA_LAUNCH_BLOCKING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FREED.format(shape=shape, call=call)],
        env=os.environ | alone,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{op}: "), done.stdout + done.stderr


def test_no_room_for_a_result_is_an_error_that_says_so():
    scores = torch.zeros(1, device="cuda", dtype=torch.float16).expand(1 << 16, 1 << 22)
    with pytest.raises(RuntimeError, match="could not allocate a tensor of 274877906944 elements"):
        megasoftmax.softmax(scores, fused=True)
    assert megasoftmax.softmax(scores[:2, :2], fused=True).tolist() == [[0.5, 0.5]] * 2


class Foreign:
    """Memory of another library: the elements of a contiguous tensor but its first."""

    def __init__(self, owner, shape):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": {torch.float16: "<f2", torch.bool: "|b1"}[owner.dtype],
            "data": (owner.data_ptr() + owner.element_size(), False),
            "version": 3,
        }


@pytest.mark.parametrize("columns", [7, 8, 257, 5000])
def test_storage_of_another_library_that_begins_anywhere(columns):
    shape, count = (12, columns), 12 * columns + 1
    owners = (
        normal(count, device="cuda", dtype=torch.float16),
        normal(count, device="cuda", dtype=torch.float16, seed=1),
        coin(count, device="cuda"),
    )
    theirs = [torch.as_tensor(Foreign(owner, shape), device="cuda") for owner in owners]
    ours = [owner[1:].view(shape).clone() for owner in owners]
    assert all(tensor.storage_offset() == 0 for tensor in theirs)
    assert all(tensor.data_ptr() % 16 == tensor.element_size() for tensor in theirs)

    def results(scores, gradient, mask):
        found = []
        scores = scores.detach().requires_grad_()
        for arguments in ({}, {"mask": mask}, {"bias": gradient}):
            p = megasoftmax.softmax(scores, fused=True, **arguments)
            values, indices = megasoftmax.softmax_topk(scores, 3, fused=True, **arguments)
            found += [p, values, indices, *torch.autograd.grad(p, scores, gradient)]
        return found

    assert_same(results(*theirs), results(*ours))
