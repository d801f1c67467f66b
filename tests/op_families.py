"""Every op and its public function, and random arguments for both: what tests/test_ops.py asks.

Tensors are drawn in the order of the arguments. Those that have gradients require them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias, reference
from megasoftmax.reference.softmax import plain

BATCH, HEADS, QUERIES, KEYS, K = 2, 3, 2, 4, 3
SHAPE, OF_BATCHES = (BATCH, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS)
OF_ALL = {"softcap": 0.5, "dropout": 0.4}
OF_SINKS = {"sink": (HEADS,), "return_lse": True}
KEY_HEADS, DIM, VALUE_DIM = 2, 8, 6  # of attention, which has 2 * KEY_HEADS query heads
NO_RANGE = (None, None)

ops = torch.ops.megasoftmax


class Draw(NamedTuple):
    """Random tensors on a device. A tensor of no shape is None."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def floats(self, shape: Sequence[int] | None) -> Tensor | None:
        if shape is None:
            return None
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=True)

    def parts(self, shape: Sequence[int] | None) -> Tensor | None:
        """Float32 from 0.2 to 1, without a gradient."""
        return None if shape is None else 0.2 + 0.8 * torch.rand(shape, device=self.device)

    def counts(self, shape: Sequence[int] | None) -> Tensor | None:
        """Int32 from 0 to 4."""
        return None if shape is None else torch.randint(5, shape, device=self.device).int()

    def mask(self, shape: Sequence[int] | None) -> Tensor | None:
        return None if shape is None else torch.rand(shape, device=self.device) < 0.4

    def seed(self, dropout: float) -> Tensor | None:
        return torch.tensor([5], device=self.device) if dropout else None

    def bounds(self, name: str, keys: int, shape: Sequence[int] | None) -> Tensor | None:
        """Of ranges, first or end: some are empty, and some reach beyond the keys."""
        lowest, above = {"first": (-2, keys), "end": (0, keys + 3)}[name]
        if shape is None:
            return None
        return torch.randint(lowest, above, shape, device=self.device).int()

    def arguments(self, record: Any, keys: int, **case: Any) -> Any:
        """Of an op, in its record: a case has options, and shapes in the place of tensors."""
        visible = dict(zip(("first", "end"), case.get("visible", NO_RANGE), strict=True))
        case = {"dtype": self.dtype, "seed": self.seed(case.get("dropout", 0.0))} | visible | case
        for name in record._fields:
            if name in visible:
                case[name] = self.bounds(name, keys, case[name])
            elif name in _DRAWN and name in case:
                case[name] = _DRAWN[name](self, case[name])
        return plain(record, **{name: case[name] for name in record._fields if name in case})


_DRAWN = {
    **dict.fromkeys(("scores", "logits", "bias", "sink"), Draw.floats),
    **dict.fromkeys(("row_scale", "row_top_p", "row_min_p", "selection_bias"), Draw.parts),
    "mask": Draw.mask,
    "row_top_k": Draw.counts,
}


class Family(NamedTuple):
    """An op and its public function.

    Args:
        arguments: of the forward op for a case.
        traced: cases that between them have every tensor that the op takes.
        is_smooth: whether the forward op has a second derivative.
        names: of what `draw` gives: tensors of the call for (batch, rows, columns).
        call: the public function with everything, as a function of those tensors and `fused`.
        close: tolerances of 16-bit results.
    """

    forward: Any
    backward: Any
    cases: dict[str, dict[str, Any]]
    arguments: Callable[..., tuple[Any, ...]]
    backward_cases: dict[str, dict[str, Any]]
    backward_arguments: Callable[..., tuple[Any, ...]]
    traced: tuple[str, ...]
    is_smooth: bool
    names: tuple[str, ...]
    draw: Callable[..., tuple[Tensor, ...]]
    call: Callable[..., tuple[Tensor, ...]]
    close: float = 0.02


# Softmax


def softmax_arguments(draw: Draw, shape: tuple[int, ...] = SHAPE, **case: Any) -> tuple[Any, ...]:
    return draw.arguments(reference.softmax.ForwardArguments, KEYS, scores=shape, **case)


def softmax_backward_arguments(draw: Draw, lse: bool = True, **case: Any) -> tuple[Any, ...]:
    bias, sink = case.get("bias"), case.get("sink")
    gradient, probabilities = draw.floats(SHAPE), torch.rand(SHAPE, device=draw.device)
    return (
        gradient,
        probabilities.to(draw.dtype).add_(0.1).requires_grad_(),
        *(draw.floats(SHAPE[:-1] if lse else None) for _ in range(2)),
        -0.7,
        None if bias is None else torch.empty(bias, device=draw.device, dtype=draw.dtype),
        *(False, -1, -1),
        *map(draw.bounds, ("first", "end"), (KEYS, KEYS), case.get("visible", NO_RANGE)),
        draw.floats(sink),
        *(None, draw.dtype, bias is not None, sink is not None),
    )


def dropout_backward_arguments(
    draw: Draw, has_all: bool, softcap: float = 0.0, dropout: float = 0.4
) -> tuple[Any, ...]:
    rows = SHAPE[:-1]
    return (
        *(draw.floats(SHAPE), draw.floats(SHAPE), draw.floats(rows if has_all else None)),
        *(draw.floats(rows), 0.7, softcap, draw.mask(OF_BATCHES if has_all else None)),
        *(draw.floats((HEADS, 1, KEYS) if has_all else None), has_all, -1, -1, None, None),
        *(draw.floats((HEADS,) if has_all else None), None, draw.dtype, has_all, has_all),
        *(dropout, draw.seed(dropout)),
    )


def draw_softmax(
    draw: Draw, batch: int = BATCH, rows: int = QUERIES, columns: int = KEYS
) -> tuple[Tensor, ...]:
    """The mask excludes a whole row."""
    shapes = ((batch, HEADS, rows, columns), (HEADS, 1, columns), (HEADS,))
    mask = draw.mask((batch, 1, rows, columns))
    mask[0, 0, 1] = True
    return *map(draw.floats, shapes), mask


def softmax(scores: Tensor, bias: Tensor, sink: Tensor, mask: Tensor, **options: Any) -> Any:
    options |= {"mask": mask, "bias": bias, "sink": sink, "return_lse": True}
    return megasoftmax.softmax(scores, scale=-0.7, causal=True, window=(1, -1), **options)


# Softmax of columns


def columns_arguments(draw: Draw, shape: tuple[int, ...] = (2, 5, 3), **case: Any) -> Any:
    return draw.floats(shape), -0.7, case.get("dtype", draw.dtype), case.get("return_lse", False)


def columns_backward_arguments(draw: Draw, lse: bool = True) -> tuple[Any, ...]:
    of_softmax = (torch.rand(2, 5, 3, device=draw.device).to(draw.dtype) + 0.1 for _ in range(2))
    rows = draw.floats((2, 3) if lse else None)
    return *(each.requires_grad_() for each in of_softmax), rows, -0.7, draw.dtype


def draw_columns(draw: Draw, batch: int = 2, rows: int = 3, columns: int = 5) -> tuple[Tensor, ...]:
    return (draw.floats((batch, rows, columns, 4)),)


def columns(scores: Tensor, **options: Any) -> Any:
    """Over each dimension but the last."""
    options |= {"scale": 0.5, "return_lse": True}
    each = (megasoftmax.softmax(scores, dim=dim, **options) for dim in range(3))
    return tuple(result for results in each for result in results)


# Softmax + top-k


def topk_arguments(draw: Draw, shape: tuple[int, ...] = (2, 3, 7), **case: Any) -> tuple[Any, ...]:
    usual = {"k": K, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    usual |= dict.fromkeys(("renormalize", "candidates", "sigmoid"), False)
    return draw.arguments(reference.topk.ForwardArguments, 0, logits=shape, **usual | case)


def topk_backward_arguments(draw: Draw, lse: bool = True, **case: Any) -> tuple[Any, ...]:
    logits, *others = topk_arguments(draw, **case)
    k, scale, softcap, mask, bias, renormalize, _, _, row_scale, *_, sigmoid, _ = others
    rows = logits.shape[:-1]
    p, indices, statistics = ops.softmax_topk_forward.default(logits.detach(), *others)
    return (
        draw.floats((*rows, k)),
        p.detach().requires_grad_(),
        indices,
        draw.floats(rows if lse else None),
        logits,
        statistics.detach().requires_grad_(),
        *(scale, softcap, mask, bias, renormalize, case.get("of_bias", False), draw.dtype),
        *(row_scale, sigmoid),
    )


def draw_topk(draw: Draw, batch: int = 2, rows: int = 3, columns: int = 7) -> tuple[Tensor, ...]:
    mask = draw.mask((batch, 1, columns))
    mask[0] = True
    return draw.floats((batch, rows, columns)), draw.floats((rows, 1)), mask


def topk(logits: Tensor, bias: Tensor, mask: Tensor, **options: Any) -> Any:
    options |= {"mask": mask, "bias": bias, "return_lse": True}
    return megasoftmax.softmax_topk(logits, K, scale=-0.7, **options)


# Attention


def dtype_of_attention(device: str) -> torch.dtype:
    """Of kernels the type with the least precision; test_attention.py has the others."""
    return torch.float32 if device.startswith("cpu") else torch.bfloat16


def attention_arguments(draw: Draw, **case: Any) -> tuple[Any, ...]:
    def states(heads: int, length: int, dim: int) -> Tensor:
        if case.get("is_transposed"):
            tensor = draw.floats((BATCH, length, heads, dim)).detach().transpose(1, 2)
            return tensor.requires_grad_()
        return draw.floats((BATCH, heads, length, dim))

    dim, value_dim = case.get("dims", (DIM, VALUE_DIM))
    sizes = {"query": (2 * KEY_HEADS, 5, dim)}
    sizes |= {"key": (KEY_HEADS, 7, dim), "value": (KEY_HEADS, 7, value_dim)}
    case |= {name: states(*each) for name, each in sizes.items()}
    return draw.arguments(reference.attention.ForwardArguments, 7, scale=0.4, **case)


def attention_backward_arguments(
    draw: Draw, lse: bool = True, asked: bool = True, **case: Any
) -> tuple[Any, ...]:
    given = attention_arguments(draw, **case)
    given = [each.detach() if isinstance(each, Tensor) else each for each in given]
    output, statistics = ops.attention_forward.default(*given)
    return (
        torch.randn_like(output),
        torch.randn_like(statistics[2]) if lse else None,
        *given[:3],
        output,
        statistics,
        *given[3:],
        *(asked and "bias" in case, asked and "sink" in case, True),
    )


def draw_attention(
    draw: Draw, batch: int = BATCH, rows: int = 5, columns: int = 7
) -> tuple[Tensor, ...]:
    heads = 2 * KEY_HEADS
    shapes = [(batch, heads, rows, DIM)]
    shapes += [(batch, KEY_HEADS, columns, dim) for dim in (DIM, VALUE_DIM)]
    shapes += [(1, heads, rows, columns), (heads, rows + columns - 1), (heads,)]
    mask = draw.mask((batch, 1, 1, columns))
    mask[0] = True
    return *map(draw.floats, shapes), mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    table: Tensor,
    sink: Tensor,
    mask: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    call = partial(megasoftmax.attention, query, key, value, return_lse=True, **options)
    with_table = {"bias": RelativeBias(table), "causal": True, "window": (3, -1)}
    return *call(bias=bias, mask=mask, scale=0.3, sink=sink), *call(**with_table)


ATTENTION_CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_left": 2, "window_right": 1},
    "mask": {"mask": (BATCH, 4, 5, 7)},
    "mask of keys": {"mask": (BATCH, 1, 1, 7)},
    "bias": {"bias": (BATCH, 4, 5, 7)},
    "shared bias": {"bias": (1, 4, 5, 1), "mask": (1, 1, 5, 7)},
    "bias of keys": {"bias": (2, 1, 1, 7), "causal": True},
    "relative": {"bias": (1, 4, 11), "relative": True},
    "relative in groups": {"bias": (2, 1, 11), "relative": True, "causal": True},
    "shifted": {"bias": (2, 1, 5, 13), "relative": True, "causal": True},
    "sink": {"sink": (4,)},
    "one sink": {"sink": (1,), "bias": (1, 1, 1, 1)},
    "sink as a number": {"sink_value": 0.5},
    "visible": {"visible": ((BATCH, 1, 5), (1, 4, 1))},
    "end": {"visible": (None, (1, 1, 5)), "bias": (1, 4, 5, 7), "causal": True},
    "blocks": {"mask": (BATCH, 1, 1, 1), "block": 64},
    "dropout": {"dropout": 0.4, "bias": (1, 4, 5, 7), "sink": (4,)},
    "softcap": {"softcap": 0.5, "causal": True},
    "softcap and all": OF_ALL | {"bias": (1, 4, 5, 7), "mask": (BATCH, 1, 1, 7), "sink": (4,)},
    "[b, s, h, d]": {"is_transposed": True, "bias": (1, 1, 5, 7)},
}
LIMITS_OF_ROWS = {"row_top_k": (2, 1), "row_top_p": (3,), "row_min_p": (2, 3)}
LIMITS_OF_ROWS["row_scale"] = (2, 3)
SELECTION_BIAS = {"shape": (2, 3, 8), "selection_bias": (8,)}
TOPK_CASES = {
    "plain": {},
    "scaled": {"scale": -0.3},
    "mask": {"mask": (2, 3, 7)},
    "bias": {"bias": (2, 3, 7)},
    "broadcast bias": {"bias": (7,), "mask": (3, 1)},
    "bias per row": {"bias": (3, 1), "scale": 2.0},
    "softcap": {"softcap": 0.5, "scale": -0.7},
    "softcap and bias": {"softcap": 0.5, "bias": (2, 3, 7), "mask": (7,), "of_bias": True},
    "renormalised": {"renormalize": True, "mask": (7,)},
    "renormalised, bias": {"renormalize": True, "bias": (2, 1, 1)},
    "scale of rows": {"row_scale": (3,), "mask": (2, 3, 7)},
    "limits": {"top_k": 3, "top_p": 0.8, "min_p": 0.1, "k": 5},
    "limits of rows": LIMITS_OF_ROWS | {"k": 6, "renormalize": True, "mask": (7,)},
    "sigmoid": {"sigmoid": True, "shape": (2, 3, 8), "scale": -0.7},
    "sigmoid, selection bias": SELECTION_BIAS | {"sigmoid": True, "renormalize": True},
    "selection bias": SELECTION_BIAS,
    "k 0": {"k": 0, "bias": ()},
    "k 1": {"k": 1},
    "all": {"k": 7},
    "all, renormalised": {"k": 7, "renormalize": True},
}
TOPK = Family(
    forward=ops.softmax_topk_forward.default,
    backward=ops.softmax_topk_backward.default,
    cases=TOPK_CASES,
    arguments=topk_arguments,
    backward_cases=TOPK_CASES | {"no lse": {"lse": False}},
    backward_arguments=topk_backward_arguments,
    traced=(
        *("plain", "broadcast bias", "renormalised, bias", "k 0", "softcap"),
        *("limits of rows", "selection bias"),
    ),
    is_smooth=True,
    names=("logits", "bias", "mask"),
    draw=draw_topk,
    call=topk,
)
FAMILIES = {
    "softmax": Family(
        forward=ops.softmax_forward.default,
        backward=ops.softmax_backward.default,
        cases={
            "plain": {},
            "scaled": {"scale": -0.3, "return_lse": True},
            "mask": {"mask": OF_BATCHES},
            "causal window": {"causal": True, "window_left": 2},
            "bias": {"bias": (1, HEADS, QUERIES, KEYS)},
            "broadcast bias": {"bias": SHAPE[2:], "mask": (1, HEADS, 1, KEYS), "window_right": 1},
            "sink": OF_SINKS,
            "one sink": {"sink": (1,), "bias": (KEYS,), "return_lse": True},
            "sink value": {"sink_value": 0.5, "mask": (KEYS,), "return_lse": True},
            "visible": {"visible": (OF_BATCHES[:3], (QUERIES,)), "mask": OF_BATCHES},
            "end": OF_SINKS | {"visible": (None, (HEADS, 1)), "causal": True},
            "float16": {"dtype": torch.float16, "bias": (HEADS, 1, KEYS), "return_lse": True},
            "softcap": {"softcap": 0.5, "scale": -0.7, "return_lse": True},
            "softcap and all": OF_ALL
            | {"mask": OF_BATCHES, "bias": (HEADS, 1, KEYS), "return_lse": True},
            "dropout": OF_SINKS | {"dropout": 0.4, "bias": (HEADS, 1, KEYS)},
        },
        arguments=softmax_arguments,
        backward_cases={
            "plain": {"lse": False},
            "lse": {},
            "bias": {"bias": (HEADS, 1, KEYS)},
            "sink": {"sink": (HEADS,)},
            "bias and one sink": {"bias": SHAPE, "sink": (1,)},
            "visible": {"visible": ((QUERIES,), SHAPE[:3]), "bias": SHAPE, "sink": (HEADS,)},
        },
        backward_arguments=softmax_backward_arguments,
        traced=(
            *("plain", "broadcast bias", "one sink", "sink value", "visible", "dropout"),
            *("bias and one sink", "softcap"),
        ),
        is_smooth=True,
        names=("scores", "bias", "sink", "mask"),
        draw=draw_softmax,
        call=softmax,
    ),
    "columns": Family(
        forward=ops.softmax_columns_forward.default,
        backward=ops.softmax_columns_backward.default,
        cases={
            "plain": {},
            "lse": {"return_lse": True},
            "float16": {"dtype": torch.float16, "return_lse": True},
            "nothing": {"shape": (2, 0, 3)},
            "one column": {"shape": (2, 5, 1), "return_lse": True},
        },
        arguments=columns_arguments,
        backward_cases={"plain": {"lse": False}, "lse": {}},
        backward_arguments=columns_backward_arguments,
        traced=("plain", "lse"),
        is_smooth=True,
        names=("scores",),
        draw=draw_columns,
        call=columns,
    ),
    "topk": TOPK,
    "renormalised": TOPK._replace(call=partial(topk, renormalize=True)),
    "attention": Family(
        forward=ops.attention_forward.default,
        backward=ops.attention_backward.default,
        cases=ATTENTION_CASES,
        arguments=attention_arguments,
        backward_cases=ATTENTION_CASES
        | {
            "no lse": {"lse": False},
            "bias not asked for": {"bias": (BATCH, 4, 5, 7), "asked": False},
            "table not asked for": {"bias": (1, 4, 11), "relative": True, "asked": False},
            "sink not asked for": {"sink": (4,), "asked": False},
        },
        backward_arguments=attention_backward_arguments,
        traced=(
            *("plain", "shared bias", "relative in groups", "shifted", "sink", "visible"),
            *("blocks", "dropout", "softcap"),
            *("[b, s, h, d]", "bias not asked for", "table not asked for", "sink not asked for"),
        ),
        is_smooth=False,
        names=("query", "key", "value", "bias", "table", "sink", "mask"),
        draw=draw_attention,
        call=attention,
        close=0.03,
    ),
}
