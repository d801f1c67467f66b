"""Random tensors, and what else the tests of both families share."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias, TileMask, dispatch, host
from megasoftmax.build import library
from megasoftmax.limits import kernel_limits

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float32]
# The last arguments of softmax_topk_forward: no scale of rows, no limits, a softmax that chooses.
PLAIN_TOPK = (None, 0, None, 1.0, None, 0.0, None, False, None)
# Of scores and of the probabilities that kernels make of them.
DTYPES_OF_KERNELS = [
    (dtype, out)
    for dtype in DTYPES
    for out in DTYPES
    if dtype == out or torch.float32 in (dtype, out)
]


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def drawn(
    *shapes: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Random leaves, each with a seed of its own."""
    made = (normal(*shape, device=device, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    return [each.requires_grad_() for each in made]


def coin(*shape: int, device: str, odds: float = 0.3, seed: int = 1) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device) < odds


def bits_equal(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(integer), b.contiguous().view(integer)
    )


def fused_on(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """A function of megasoftmax that must run fused on a GPU."""
    return functools.partial(function, fused=True if device == "cuda" else None)


# Attention

# Of a GPU for which the library has kernels of its own; those for every GPU; and those with the
# tiles of compute capability 8.6, whose blocks have 99 KB of shared memory.
KERNELS = ("own", "portable", "small")

# For tests that take `device`: on a GPU all kinds of kernels run.
on_all_kernels = pytest.mark.parametrize(
    "device",
    ["cpu", *(pytest.param(f"cuda {kind}", marks=pytest.mark.gpu) for kind in KERNELS)],
    indirect=True,
)


def attention_as_defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    excluded: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, by the formula: 0 and -inf where nothing is left.

    Args:
        excluded: bool; `oracle.excluded_entries` has that of causality and windows.
        sink: [heads] or [1].
    """
    query, key, value = (each.double() for each in (query, key, value))
    shared = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(shared, -3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    columns = [scores]
    if sink is not None:
        columns.append(sink.double().reshape(-1, 1, 1).expand(*scores.shape[:-1], 1))
    lse = torch.cat(columns, -1).logsumexp(-1)
    probabilities = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return probabilities @ value, lse


@contextmanager
def attention_kernels(kind: str) -> Iterator[None]:
    """Which of KERNELS serve the calls inside, in all threads; "own" is as outside."""
    if kind == "own" or not torch.cuda.is_available():
        yield
    elif kind == "small":
        with gpu_like("8.6"):
            yield
    else:
        _binary().megasoftmax_use_portable_attention(1)
        try:
            yield
        finally:
            _binary().megasoftmax_use_portable_attention(0)


_acted = ["0.0"]


@contextmanager
def gpu_like(capability: str) -> Iterator[None]:
    """Kernels of all families are chosen as on such a GPU, in all threads, if this one runs them.

    Args:
        capability: of kGpus in common/limits.h, such as "8.6".
    """
    _act_as(capability)
    _acted.append(capability)
    try:
        yield
    finally:
        _acted.pop()
        _act_as(_acted[-1])


def acted_capability() -> tuple[int, int] | None:
    """Of the GPU whose kernels are taken; None: of this one."""
    major, minor = map(int, _acted[-1].split("."))
    return (major, minor) if major else None


def _act_as(capability: str) -> None:
    major, minor = map(int, capability.split("."))
    assert _binary().megasoftmax_act_as(major, minor), f"kGpus has no {capability}"
    # What was found out of the GPU before, such as whether it has attention.
    dispatch._capabilities.clear()
    while host._admitted:
        device = host._admitted.pop()
        if host.calls is not None:
            host.calls.admit(device, False, False)


def why_no_attention() -> str | None:
    """Why attention cannot run fused on the GPU that is acted, or None."""
    if not torch.cuda.is_available() or not library.load().available:
        return None
    found = dispatch._compute_capability(
        torch.empty(0, device="cuda"), dispatch._first_with_attention()
    )
    return None if found is None else str(found)


def _binary() -> ctypes.CDLL:
    path = library.load().path
    assert path is not None, "there are no kernels"
    return ctypes.CDLL(str(path))


def attention_on(device: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Attention that must run fused on a GPU, in all types and head dimensions of kernels."""
    most = None if dtype in HALVES else kernel_limits().attention["kMaxFloatHeadDim"]

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        widest = max(query.shape[-1], value.shape[-1])
        is_taken = dtype in dispatch.DTYPES and (most is None or widest <= most)
        fused = True if device == "cuda" and is_taken else None
        return megasoftmax.attention(query, key, value, **options, fused=fused)

    return attention


def by_entry(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """A call with leading dimensions [entries, examples of each], if its bias has fewer batches.

    Args:
        query, key, value: [batch, heads, ...].
        options: of attention. A bias of all dimensions may have a batch that divides this one:
            example i reads entry i // (batch / bias batch).
    """
    bias = options.get("bias")
    table = bias.table if isinstance(bias, RelativeBias) else bias
    rank = bias.trailing + 1 if isinstance(bias, RelativeBias) else 4
    if table is None or table.dim() < rank or table.shape[0] in (1, len(query)):
        return (query, key, value), options
    sizes = (table.shape[0], len(query) // table.shape[0])

    def split(tensor: Tensor | None, rank: int = 4) -> Any:
        if tensor is None or tensor.dim() < rank:
            return tensor
        return tensor.unsqueeze(0) if tensor.shape[0] == 1 else tensor.unflatten(0, sizes)

    mask, first_and_end = options.get("mask"), options.get("visible")
    if isinstance(mask, TileMask):
        tensor = split(mask.tensor)
        mask = TileMask(tensor) if mask.block == 1 else TileMask.from_blocks(tensor, mask.block)
    shared = table.unsqueeze(1)
    options = options | {
        "bias": type(bias)(shared) if isinstance(bias, RelativeBias) else shared,
        "mask": mask if isinstance(mask, TileMask) else split(mask),
        "visible": first_and_end and tuple(split(bound, 3) for bound in first_and_end),
    }
    return (split(query), split(key), split(value)), options


def record_calls(
    monkeypatch: Any, function: str, owner: Any = megasoftmax
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The (tensors, options) of every call of that function of a module, which still works."""
    calls, original = [], getattr(owner, function)

    def recording(*tensors: Any, **options: Any) -> Any:
        calls.append((tensors, options))
        return original(*tensors, **options)

    recording.why_not_fused = functools.partial(megasoftmax.why_not_fused, original)
    monkeypatch.setattr(owner, function, recording)
    return calls


@contextmanager
def deterministic(wanted: bool = True, warn_only: bool = False) -> Iterator[None]:
    """A block in which torch.use_deterministic_algorithms is on, or off."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """A block of which the list has what autograd keeps for the backward pass."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        yield kept


def command(*arguments: str, code: int = 0, **options: Any) -> Any:
    """The result of the command `megasoftmax`, which must exit with that code."""
    from typer.testing import CliRunner  # of an extra, as what the command needs

    from megasoftmax import __main__

    result = CliRunner().invoke(__main__.app, arguments, **options)
    assert result.exit_code == code, result.output
    return result


def dtypes_on(device: str) -> list[torch.dtype]:
    return [torch.float32, *HALVES] if device == "cuda" else [torch.float32, torch.bfloat16]


def by_error(wrong: dict[type[Exception], list[tuple[Any, str]]], name: str = "call") -> Any:
    """Parametrises a test by the error, by what is wrong, which has that name, and the message."""
    cases = [(error, *case) for error, of_error in wrong.items() for case in of_error]
    return pytest.mark.parametrize(("error", name, "message"), cases)


def gpu_with_all_kernels(test: Any) -> Any:
    """Marks a test of a GPU that all kinds of kernels must pass."""
    return pytest.mark.gpu(pytest.mark.usefixtures("kernels")(test))


def tensors(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    batch: int | tuple[int, ...] = 2,
    heads: int | tuple[int, int] = (4, 2),
    lengths: int | tuple[int, int] = (5, 13),
    dims: int | tuple[int, int] = 8,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value. One number stands for two, such as `dims` for those of all three.

    Args:
        batch: one dimension, or several.
    """
    sizes = (each if isinstance(each, tuple) else (each, each) for each in (heads, lengths, dims))
    (all_heads, key_heads), (queries, keys), (dim, value_dim) = sizes
    leading = batch if isinstance(batch, tuple) else (batch,)
    return (
        normal(*leading, all_heads, queries, dim, device=device, dtype=dtype, seed=1),
        normal(*leading, key_heads, keys, dim, device=device, dtype=dtype, seed=2),
        normal(*leading, key_heads, keys, value_dim, device=device, dtype=dtype, seed=3),
    )
