"""The public functions."""

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from megasoftmax import dispatch, ops, ops_topk, reference, reference_topk, vocabulary
from megasoftmax.dispatch import Reason as Reason

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPE_NAMES = "float16, bfloat16, float32 or float64"

Window = tuple[int, int]


@overload
def softmax(
    scores: Tensor,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    dim: int = ...,
    fused: bool | None = ...,
) -> Tensor: ...


@overload
def softmax(
    scores: Tensor,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    dim: int = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


def softmax(
    scores: Tensor,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    sink: Tensor | float | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    dim: int = -1,
    fused: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax of attention scores, fused on NVIDIA GPUs.

        z = scale * scores + bias
        p = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  m = max(z, sink)

    computed in float32 (float64 for float64 scores), whatever the types of the tensors. Exact: the
    same rules hold on GPU and CPU, fused or not. What follows calls a row what sums to 1: the last
    dimension of the scores, unless `dim` says otherwise.

    * An excluded entry (by mask, causal or window: their union) has probability exactly 0 and
      gradient exactly 0, whatever scores, bias and incoming gradient hold there.
    * A row with nothing left has probabilities 0, gradients 0 and a log-sum-exp of -inf where
      mask, bias, causal or window is given, and with a sink a log-sum-exp of the sink. The plain
      softmax of a row of -inf is NaN.
    * A NaN or +inf that is not excluded makes NaN of all that is not excluded in its row.

    Differentiable with respect to scores, bias and sink, twice too; incoming gradients are not
    modified. The same call gives the same bits on the same device, gradients included.

    Args:
        scores: [..., heads, queries, keys], float16, bfloat16, float32 or float64; any rank from 1
            on, any strides.
        scale: factor of the scores, finite; never rounded to their type.
        mask: bool, True = excluded, broadcastable to scores, any strides; not materialised.
        bias: floating, broadcastable to scores, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        causal: exclude keys after the query: query i sees key j where j <= i + keys - queries.
        window: (left, right), each from -1 on: query i sees key j where
            i + keys - queries - left <= j <= i + keys - queries + right; -1 = no limit on that
            side. A window of W tokens that ends at the query is (W - 1, 0).
        sink: a logit that joins the denominator but has no column: floating [heads], or one
            element, or a number. 0 gives the off-by-one softmax.
        dtype: of the probabilities; by default that of the scores.
        return_lse: also return the log-sum-exp.
        dim: over which the probabilities sum to 1; from -rank to rank - 1. Where it is not the
            last, keys are not what it counts: neither causal nor window may be given, and a sink
            is one for all. Without mask, bias and sink, scores and incoming gradients that are not
            contiguous are copied; with one of them, the probabilities are.
        fused: None runs fused where it can, True raises where it cannot (see `why_not_fused`),
            False runs plain torch.

    Returns:
        The probabilities, contiguous, of the shape of scores. With return_lse also the natural
        log of the denominator, sink included, [..., heads, queries], or the shape of scores
        without `dim`, float32 (float64 for float64 scores).

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.

    Source:
        Online normalisation: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Sinks: Xiao et al., https://arxiv.org/abs/2309.17453; off-by-one: Miller, "Attention is off
        by one", https://www.evanmiller.org/attention-is-off-by-one.html.
    """
    _check(scores, scale, mask, bias, causal, window, sink, dtype, dim, fused)
    if dim in (-1, scores.dim() - 1):
        probabilities, lse = _softmax_over_last(
            scores, scale, mask, bias, causal, window, sink, dtype, return_lse, fused
        )
    else:
        probabilities, lse = _softmax_over_earlier(
            scores, scale, mask, bias, sink, dtype, return_lse, dim % scores.dim(), fused
        )
    return (probabilities, lse) if return_lse else probabilities


@overload
def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    renormalize: bool = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    group: "ProcessGroup | None" = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    renormalize: bool = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    group: "ProcessGroup | None" = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    group: "ProcessGroup | None" = None,
    fused: bool | None = None,
) -> tuple[Tensor, ...]:
    """The K largest probabilities of a softmax, without writing the others.

        z = scale * logits + bias
        p = exp(z - max z) / sum exp(z - max z),  its K largest entries along the last dimension

    computed in float32 (float64 for float64 logits), whatever the types of the tensors. The same
    rules hold on GPU and CPU, fused or not.

    * What is selected is decided by the logits (by z where a bias is given), not by rounded
      probabilities: larger first, and the lower index first among equals. NaN comes before +inf,
      and -0 equals 0.
    * An excluded entry ranks as -inf and has probability exactly 0 and gradient exactly 0, whatever
      logits, bias and incoming gradient hold there. Where fewer than K entries are left, excluded
      ones follow, by index.
    * A row with nothing left has probabilities 0, gradients 0 and a log-sum-exp of -inf where mask
      or bias is given; a plain row of -inf has NaN. Its indices are 0 to K - 1.
    * A NaN or +inf that is not excluded makes NaN of all probabilities that are not excluded.
    * A probability of exactly 0 takes its entry out of the backward pass.

    Differentiable with respect to logits and bias, twice too; incoming gradients are not modified.
    Gradients use the returned probabilities where they are summed over K, and float32 ones
    elsewhere. The same call gives the same bits on the same device, gradients included.

    Vocabulary-parallel, with `group`: every rank gives its shard of the logits, of mask and of bias
    along the last dimension, in the order of the ranks; shards may have any lengths, also none.
    Every rank gets the same bits, with indices into the whole vocabulary. One all-gather moves
    2 + 2K numbers per row. In the backward pass, which does not communicate, the gradients of
    the results are taken to be the same on every rank, as Megatron-LM does, and each rank gets that
    of its shard; differentiable once. All ranks must give the same rows and options, and a mask
    or bias all or none.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64; any rank from 1 on, any strides.
        k: from 0 to V; kernels serve up to 256. With `group` V is not known on the host: what K
            exceeds it by gets probability 0 and index V.
        scale: factor of the logits, finite; never rounded to their type. 1 / temperature.
        mask: bool, True = excluded, broadcastable to logits, any strides; not materialised.
        bias: floating, broadcastable to logits, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        renormalize: the probabilities sum to 1 over the K entries; the log-sum-exp is over all V
            all the same.
        dtype: of the probabilities; by default that of the logits.
        return_lse: also return the log-sum-exp.
        group: the process group over whose ranks V is sharded.
        fused: None runs fused where it can, True raises where it cannot (see `why_not_fused`),
            False runs plain torch, which takes memory for rows of V.

    Returns:
        Probabilities [..., K], largest first, and their indices, int64 [..., K], both contiguous.
        With return_lse also the natural log of the denominator over V, [...], float32 (float64 for
        float64 logits).

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.

    Source:
        Online softmax fused with top-k: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Vocabulary-parallel logits: Shoeybi et al., https://arxiv.org/abs/1909.08053.
    """
    _check_topk(logits, k, scale, mask, bias, renormalize, dtype, group, fused)
    halves = reference_topk.HALVES
    against = dispatch.reasons_against_fused_topk
    if _is_fused(fused, against, logits, k, scale, mask, bias, dtype):
        halves = ops_topk.HALVES
        bias, _ = _as_kernels_take_it(logits, bias, None)
    out = logits.dtype if dtype is None else dtype
    if group is not None:
        probabilities, indices, statistics = vocabulary.softmax_topk(
            halves, group, logits, k, scale, mask, bias, renormalize, out
        )
    else:
        needs_gradient = torch.is_grad_enabled() and (
            logits.requires_grad or (bias is not None and bias.requires_grad)
        )
        probabilities, indices, statistics = reference_topk.call(
            halves, needs_gradient, logits, k, scale, mask, bias, renormalize, out, False
        )
    return (probabilities, indices, statistics[2]) if return_lse else (probabilities, indices)


def why_not_fused(function: Any, *args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    """Why `function(*args, **kwargs)` would not run fused.

    Args:
        function: `megasoftmax.softmax`, `megasoftmax.softmax_topk`, or a module of this package.
        args, kwargs: what it would be called with; `fused` makes no difference.

    Returns:
        Every reason, not only the first; empty when the call would run fused.

    Raises:
        TypeError, ValueError: as the call would.
    """
    if function is softmax:
        return _softmax_reasons(*args, **kwargs)
    if function is softmax_topk:
        return _topk_reasons(*args, **kwargs)
    if hasattr(function, "why_not_fused"):
        return function.why_not_fused(*args, **kwargs)
    raise TypeError(
        "function: expected megasoftmax.softmax, megasoftmax.softmax_topk or a module of "
        f"megasoftmax, got {function!r}"
    )


def _softmax_over_last(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    dtype: torch.dtype | None,
    return_lse: bool,
    fused: bool | None,
) -> tuple[Tensor, Tensor]:
    halves = reference.HALVES
    against = dispatch.reasons_against_fused_softmax
    if _is_fused(fused, against, scores, scale, mask, bias, causal, window, dtype):
        halves = ops.HALVES
        bias, sink = _as_kernels_take_it(scores, bias, sink)

    left, right = (-1, -1) if window is None else window
    sink_tensor, sink_value = (sink, None) if isinstance(sink, Tensor) else (None, sink)
    needs_gradient = torch.is_grad_enabled() and (
        scores.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink_tensor is not None and sink_tensor.requires_grad)
    )
    return reference.call(
        halves,
        needs_gradient,
        scores,
        scale,
        mask,
        bias,
        causal,
        left,
        right,
        sink_tensor,
        sink_value,
        scores.dtype if dtype is None else dtype,
        return_lse or (sink_tensor is not None and needs_gradient),
    )


def _softmax_over_earlier(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | float | None,
    dtype: torch.dtype | None,
    return_lse: bool,
    dim: int,
    fused: bool | None,
) -> tuple[Tensor, Tensor]:
    """Over a dimension, counted from 0, before the last."""
    against = dispatch.reasons_against_fused_columns
    if _has_columns_alone(scores, mask, bias, sink, dim) and _is_fused(
        fused, against, scores, scale, dtype
    ):
        return _softmax_of_columns(scores, scale, dtype, return_lse, dim)
    probabilities, lse = _softmax_over_last(
        scores.movedim(dim, -1),
        scale,
        reference.moved_to_last(mask, dim, scores.dim()),
        reference.moved_to_last(bias, dim, scores.dim()),
        False,
        None,
        sink,
        dtype,
        return_lse,
        fused,
    )
    return probabilities.movedim(-1, dim).contiguous(), lse


def _has_columns_alone(
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | float | None,
    dim: int,
) -> bool:
    """Whether there is nothing but scores, and something follows `dim`: else columns are rows."""
    if mask is not None or bias is not None or sink is not None:
        return False
    return any(size != 1 for size in scores.shape[dim + 1 :])


def _softmax_of_columns(
    scores: Tensor, scale: float, dtype: torch.dtype | None, return_lse: bool, dim: int
) -> tuple[Tensor, Tensor]:
    """Fused, where `_has_columns_alone`."""
    before, after = scores.shape[:dim], scores.shape[dim + 1 :]
    probabilities, lse = reference.call(
        ops.COLUMN_HALVES,
        torch.is_grad_enabled() and scores.requires_grad,
        scores.reshape(math.prod(before), scores.shape[dim], math.prod(after)),
        scale,
        None,
        None,
        False,
        -1,
        -1,
        None,
        None,
        scores.dtype if dtype is None else dtype,
        return_lse,
    )
    return probabilities.view(scores.shape), lse.view(before + after) if return_lse else lse


def _is_fused(
    fused: bool | None,
    reasons_against: Callable[..., tuple[Reason, ...]],
    scores: Tensor,
    *args: Any,
) -> bool:
    """Whether a call runs fused; raises where it must and cannot."""
    if fused is False or (fused is None and not scores.is_cuda):
        return False
    reasons = reasons_against(scores, *args)
    if reasons and fused:
        raise ValueError("fused: cannot be True here. " + "; ".join(map(str, reasons)))
    return not reasons


_SIGNATURE = inspect.signature(softmax)


def _softmax_reasons(*args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    del given["return_lse"]  # anything that is true or false, with kernels for both
    _check(**given)
    sink, dim, _ = (given.pop(name) for name in ("sink", "dim", "fused"))
    scores, mask, bias = given["scores"], given["mask"], given["bias"]
    rank = scores.dim()
    if _has_columns_alone(scores, mask, bias, sink, dim % rank):
        return dispatch.reasons_against_fused_columns(scores, given["scale"], given["dtype"])
    given["scores"] = scores.movedim(dim, -1)
    given["mask"] = reference.moved_to_last(mask, dim, rank)
    given["bias"] = reference.moved_to_last(bias, dim, rank)
    return dispatch.reasons_against_fused_softmax(**given)


_TOPK_SIGNATURE = inspect.signature(softmax_topk)


def _topk_reasons(*args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    bound = _TOPK_SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    del given["return_lse"]
    _check_topk(**given)
    del given["renormalize"], given["group"], given["fused"]
    return dispatch.reasons_against_fused_topk(**given)


def _as_kernels_take_it(
    scores: Tensor, bias: Tensor | None, sink: Tensor | float | None
) -> tuple[Tensor | None, Tensor | float | None]:
    """The bias in the type of the scores or float32, the sink in one that kernels know."""
    if bias is not None and bias.dtype != scores.dtype:
        bias = bias.float()
    if isinstance(sink, Tensor) and sink.dtype == torch.float64:
        sink = sink.float()
    return bias, sink


# Checks of arguments, cheap: nothing is read, nothing is launched


def _check(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    sink: Tensor | float | None,
    dtype: torch.dtype | None,
    dim: int,
    fused: bool | None,
) -> None:
    _check_scores("scores", scores, scale, mask, bias)
    if causal is not False:
        if causal is not True:
            raise TypeError(f"causal: expected a bool, got {_kind(causal)}")
        _check_has_queries("causal", scores)
    if window is not None:
        _check_window(window)
        _check_has_queries("window", scores)
    if sink is not None:
        _check_sink(sink, scores)
    if not isinstance(dim, int) or dim != -1:
        _check_dim(dim, scores, causal, window, sink)
    _check_choices(dtype, fused)


def _check_topk(
    logits: Tensor,
    k: int,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    renormalize: bool,
    dtype: torch.dtype | None,
    group: "ProcessGroup | None",
    fused: bool | None,
) -> None:
    _check_scores("logits", logits, scale, mask, bias)
    columns = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an integer from 0 to {columns}, got {_kind(k)}")
    if k < 0 or (k > columns and group is None):
        raise ValueError(f"k: expected an integer from 0 to {columns}, got {k}")
    if group is not None:
        _check_group(group)
    if not isinstance(renormalize, bool):
        raise TypeError(f"renormalize: expected a bool, got {_kind(renormalize)}")
    _check_choices(dtype, fused)


def _check_scores(
    name: str, scores: Tensor, scale: float, mask: Tensor | None, bias: Tensor | None
) -> None:
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {_kind(scores)}")
    if scores.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected {_DTYPE_NAMES}, got {scores.dtype}")
    if scores.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got a tensor without dimensions")
    if not isinstance(scale, (float, int)):
        raise TypeError(f"scale: expected a number, got {_kind(scale)}")
    if not -torch.inf < scale < torch.inf:
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask: expected a bool tensor, True = excluded, got {_kind(mask)}")
        _check_companion("mask", mask, name, scores)
    if bias is not None:
        if not isinstance(bias, Tensor) or bias.dtype not in _DTYPES:
            raise TypeError(f"bias: expected a tensor of {_DTYPE_NAMES}, got {_kind(bias)}")
        _check_companion("bias", bias, name, scores)


def _check_group(group: "ProcessGroup") -> None:
    is_one = torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
    if not is_one:
        raise TypeError(f"group: expected None or a process group, got {_kind(group)}")


def _check_choices(dtype: torch.dtype | None, fused: bool | None) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(f"dtype: expected {_DTYPE_NAMES}, got {dtype!r}")
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"fused: expected None or a bool, got {_kind(fused)}")


def _check_companion(name: str, tensor: Tensor, name_of_scores: str, scores: Tensor) -> None:
    """Same device, and broadcastable to the scores."""
    if tensor.device != scores.device:
        raise ValueError(
            f"{name}: expected device {scores.device}, as {name_of_scores}, got {tensor.device}"
        )
    shape, target = tensor.shape, scores.shape
    if shape != target and not _broadcasts(shape, target):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(target)}, got {tuple(shape)}"
        )


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    for size, wanted in zip(
        reversed(shape), reversed(target), strict=False
    ):  # all() takes twice as long
        if size not in (1, wanted):
            return False
    return True


def _check_has_queries(name: str, scores: Tensor) -> None:
    if scores.dim() < 2:
        raise ValueError(
            f"{name}: expected scores [..., queries, keys], got shape {tuple(scores.shape)}"
        )


def _check_window(window: Window) -> None:
    expected = "window: expected (left, right), two integers from -1 on"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{expected}, got {_kind(window)}")
    if len(window) != 2:
        raise ValueError(f"{expected}, got {window}")
    for limit in window:
        if not isinstance(limit, int):
            raise TypeError(f"{expected}, got {window}")
        if limit < -1:
            raise ValueError(f"{expected}, got {window}")


def _check_sink(sink: Tensor | float, scores: Tensor) -> None:
    if not isinstance(sink, Tensor):
        if not isinstance(sink, (float, int)):
            raise TypeError(f"sink: expected a tensor or a number, got {_kind(sink)}")
        return
    if sink.dtype not in _DTYPES:
        raise TypeError(f"sink: expected a tensor of {_DTYPE_NAMES}, got {sink.dtype}")
    if sink.device != scores.device:
        raise ValueError(f"sink: expected device {scores.device}, as scores, got {sink.device}")
    if sink.numel() == 1:
        return
    if scores.dim() < 3 or sink.dim() != 1 or sink.shape[0] != scores.shape[-3]:
        heads = f" or [{scores.shape[-3]}], one per head," if scores.dim() > 2 else ""
        raise ValueError(f"sink: expected one element{heads} got shape {tuple(sink.shape)}")


def _check_dim(
    dim: int, scores: Tensor, causal: bool, window: Window | None, sink: Tensor | float | None
) -> None:
    rank = scores.dim()
    expected = f"dim: expected an integer from {-rank} to {rank - 1}"
    if not isinstance(dim, int):
        raise TypeError(f"{expected}, got {_kind(dim)}")
    if not -rank <= dim < rank:
        raise ValueError(f"{expected}, got {dim}")
    if dim % rank == rank - 1:
        return
    for name, is_given in (("causal", causal), ("window", window is not None)):
        if is_given:
            raise ValueError(f"{name}: expected only over the last dimension, got dim {dim}")
    if isinstance(sink, Tensor) and sink.numel() != 1:
        raise ValueError(
            f"sink: expected one element, or dim -1, got shape {tuple(sink.shape)} and dim {dim}"
        )


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
