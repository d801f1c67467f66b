"""The public functions."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax import arguments, autograd, checks, dispatch, host, ops, ranges
from megasoftmax.arguments import Ranges, Window
from megasoftmax.autograd.function import Implementation
from megasoftmax.biases import RelativeBias
from megasoftmax.dispatch import Reason, Reasons
from megasoftmax.distributed import context_parallel, sharding, vocabulary
from megasoftmax.limits import kernel_limits
from megasoftmax.masks import TileMask
from megasoftmax.tracing import in_jit_trace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def softmax(
    scores: Tensor,
    *,
    scale: float = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
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
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    dim: int = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def softmax(
    scores: Tensor,
    *unnamed: Never,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    dim: int = -1,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax of attention scores, fused on NVIDIA GPUs.

        z = scale * scores + bias
        p = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  m = max(z, sink)

    computed in float32 (float64 for float64 scores), whatever the types of the tensors. Exact: the
    same rules hold on GPU and CPU, fused or not. Below, a row is the slice that sums to 1: along
    the last dimension, unless `dim` says otherwise.

    * An excluded entry (by mask, causal, window or visible: their union) has probability exactly 0
      and gradient exactly 0, whatever scores, bias and incoming gradient hold there.
    * A row with nothing left has probabilities 0, gradients 0 and a log-sum-exp of -inf where
      mask, bias, causal, window or visible is given, and with a sink a log-sum-exp of the sink. The
      plain softmax of a row of -inf is NaN.
    * A NaN or +inf that is not excluded makes every entry of its row that is not excluded NaN.

    Differentiable with respect to scores, bias and sink, twice too; incoming gradients are not
    modified. The same call gives the same bits on the same device, gradients included. Forward mode
    (torch.func.jvp) is supported, but not over reverse mode (torch.func.hessian).

    DTensors stay split along the dimensions before queries and keys, see
    `megasoftmax.distributed.sharding`. Under torch.vmap each example drops what it would drop
    alone.

    Args:
        scores: [..., heads, queries, keys], float16, bfloat16, float32 or float64; any rank from 1
            on, any strides.
        scale: factor of the scores, finite; never rounded to their type. A number, a numpy scalar
            or a tensor without dimensions on a CPU.
        mask: bool, True = excluded, broadcastable to scores, any strides; not materialised.
        bias: floating, broadcastable to scores, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        causal: exclude keys after the query: query i sees key j where j <= i + keys - queries.
        window: (left, right), each from -1 on: query i sees key j where
            i + keys - queries - left <= j <= i + keys - queries + right; -1 = no limit on that
            side. A window of W tokens that ends at the query is (W - 1, 0).
        visible: (first, end): a query sees keys first <= j < end. Each is None, no limit, or int32
            (int64 is converted), broadcastable to [..., heads, queries], any strides; see
            `megasoftmax.ranges`. What lies outside of [0, keys] is cut, and a range with
            end <= first is empty. Kernels do not compute what is not visible.
        sink: a logit that joins the denominator but has no column: floating [heads], or one
            element, or a number. 0 gives the off-by-one softmax. A sink of -inf is the same as no
            sink, and has gradient 0.
        dropout: from 0 to 1, the probability that an entry becomes 0. What is kept is divided by
            the probability to be kept. 15 bits decide an entry, so both are exact for the nearest
            multiple of 2^-15. The log-sum-exp is the one without dropout. For the backward pass
            scores and log-sum-exp are kept in place of the probabilities, and no mask.
        seed: int64, one element, on the device of the scores. It and the place of an entry,
            (batch * heads + head, query, key), decide whether the entry is dropped: fused or not,
            forward and backward, and in `attention` too. None: torch's generator draws one on that
            device. Without dropout it has no effect.
        dtype: of the probabilities; by default what torch.softmax would return: the type of the
            scores, but float32 for 16-bit scores under torch.autocast on a GPU.
        return_lse: also return the log-sum-exp.
        dim: over which the probabilities sum to 1; from -rank to rank - 1. If it is not the last,
            causal, window, visible and dropout may not be given, because they count queries and
            keys, and a sink is one for all rows. Without mask, bias and sink, scores and incoming
            gradients that are not contiguous are copied; with one of them, the probabilities are.
        fused: None runs fused where it can, True raises where it cannot (see `why_not_fused`),
            False runs plain torch.

    Returns:
        The probabilities, contiguous, of the shape of scores. With return_lse also the natural
        log of the denominator, sink included, [..., heads, queries], or the shape of scores
        without `dim`, float32 (float64 for float64 scores).

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.
        NotImplementedError: a forward-mode derivative of a gradient.

    Source:
        Online normalisation: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Sinks: Xiao et al., https://arxiv.org/abs/2309.17453; off-by-one: Miller, "Attention is off
        by one", https://www.evanmiller.org/attention-is-off-by-one.html.
    """
    if unnamed or others:
        raise checks.misnamed("softmax", 1, unnamed, others)
    if is_compiling := torch.compiler.is_compiling():
        if (
            (bias is None and window is None and visible is None and sink is None)
            and type(dropout) in (int, float)
            and dropout == 0
            and seed is None
            and return_lse is False
            and dim == -1
            and (fused is None or fused is True)
        ):
            traced = _traced_softmax(scores, mask, scale, causal, dtype)
            if traced is not None:
                return traced
    elif host.calls is not None:
        served = host.calls.softmax(
            scores,
            scale,
            mask,
            bias,
            causal,
            window,
            visible,
            sink,
            dropout,
            seed,
            dtype,
            return_lse,
            dim,
            fused,
        )
        if served is not None:
            return cast(Tensor, served)
    scale = arguments.as_number("scale", scale)
    if type(dim) is not int:
        dim = checks.as_integer(dim)
    if window is not None:
        window = arguments.checked_window("window", window)
    arguments.check_softmax(
        *(scores, scale, mask, bias, causal, window, sink, dtype, dim, fused, visible, dropout),
        *(seed, return_lse),
    )
    is_last = dim in (-1, scores.dim() - 1)
    if (  # the shortest way for the most frequent call on a CPU
        mask is None
        and bias is None
        and window is None
        and visible is None
        and sink is None
        and not (causal or dropout or return_lse or fused)
        and is_last
        and not is_compiling
        and dispatch.is_plain_on_cpu(scores)
        and scale == 1
        and (dtype is None or dtype == scores.dtype)
    ):
        return autograd.torch_softmax.softmax(scores)
    if is_last:
        probabilities, lse = _softmax_over_last(
            *(scores, scale, mask, bias, causal, window, visible, sink, dropout, seed),
            *(dtype, return_lse, fused),
        )
    else:
        probabilities, lse = _softmax_over_earlier(
            scores, scale, mask, bias, sink, dtype, return_lse, dim % scores.dim(), fused
        )
    return (probabilities, lse) if return_lse else probabilities


def softmax_backward(
    gradient: Tensor,
    probabilities: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    visible: Ranges | None = None,
) -> Tensor:
    """The gradient of the scores of `softmax`, for code with an autograd function of its own.

    It needs no mask: what was excluded has probability 0, and gets gradient 0. Not differentiable.

    Args:
        gradient: of the probabilities, in their shape, type and on their device, any strides. It
            is not modified.
        probabilities: what `softmax` returned, in the type of the scores.
        scale: what `softmax` was given.
        causal: what `softmax` was given, or False; kernels then do without what it excludes.
        visible: the same, or None.

    Returns:
        The gradient, contiguous, in the shape and type of the probabilities.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
    """
    scale = arguments.as_number("scale", scale)
    try:
        arguments.check_softmax(
            probabilities, scale, None, None, causal, None, None, None, -1, None, visible
        )
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"scores": "probabilities"}) from None
    arguments.check_gradient(gradient, probabilities)
    first, end = _bounds(visible, probabilities.shape[-1])
    reasons_against = dispatch.reasons_against_fused_softmax
    is_fused = _is_fused(
        None, reasons_against, probabilities, scale, None, None, causal, None, None, (first, end)
    )
    implementation = ops.softmax.IMPLEMENTATION if is_fused else autograd.softmax.REFERENCE
    d_scores, _, _ = implementation.backward(
        gradient.detach() if gradient.dim() <= 4 else gradient.detach().contiguous(),
        probabilities.detach(),
        None,
        None,
        scale,
        None,
        causal,
        -1,
        -1,
        first,
        end,
        None,
        None,
        probabilities.dtype,
        False,
        False,
    )
    return d_scores


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


@checks.takes_options_by_name
def softmax_topk(
    logits: Tensor,
    k: int,
    *unnamed: Never,
    scale: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    group: "ProcessGroup | None" = None,
    fused: bool | None = None,
    **others: Never,
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
    elsewhere. The same call gives the same bits on the same device, gradients included. In forward
    mode (torch.func.jvp) calls run in plain torch.

    DTensors stay split along all dimensions but the last, see `megasoftmax.distributed.sharding`.

    Vocabulary-parallel, with `group`: every rank gives its shard of the logits, of mask and of bias
    along the last dimension, in the order of the ranks; shards may have any lengths, also none.
    Every rank gets the same bits, with indices into the whole vocabulary. One all-gather moves
    2 + 2K numbers per row. In the backward pass, which does not communicate, the gradients of
    the results are taken to be the same on every rank, as Megatron-LM does, and each rank gets that
    of its shard; differentiable once. All ranks must give the same rows and options, and a mask
    or bias all or none.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64; any rank from 1 on, any strides.
        k: from 0 to V; kernels serve up to 256. With `group` V is not known on the host: if k
            exceeds V, the further results have probability 0 and index V.
        scale: factor of the logits, finite; never rounded to their type. 1 / temperature.
        mask: bool, True = excluded, broadcastable to logits, any strides; not materialised.
        bias: floating, broadcastable to logits, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        renormalize: the probabilities sum to 1 over the K entries; the log-sum-exp is over all V
            all the same.
        dtype: of the probabilities; by default what torch.softmax would return: the type of the
            logits, but float32 for 16-bit logits under torch.autocast on a GPU. (torch.topk keeps
            the type that it is given under autocast.)
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
        NotImplementedError: a forward-mode derivative, or a second one, with `group`.

    Source:
        Online softmax fused with top-k: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Vocabulary-parallel logits: Shoeybi et al., https://arxiv.org/abs/1909.08053.
    """
    if unnamed or others:
        raise checks.misnamed("softmax_topk", 2, unnamed, others)
    if not torch.compiler.is_compiling() and host.calls is not None:
        served = host.calls.softmax_topk(
            logits, k, scale, mask, bias, renormalize, dtype, return_lse, group, fused
        )
        if served is not None:
            return cast(tuple[Tensor, ...], served)
    scale = arguments.as_number("scale", scale)
    k = checks.as_integer(k)
    arguments.check_topk(logits, k, scale, mask, bias, renormalize, dtype, return_lse, group, fused)
    implementation = autograd.topk.REFERENCE
    reasons_against = dispatch.reasons_against_fused_topk
    if _is_fused(fused, reasons_against, logits, k, scale, mask, bias, dtype):
        implementation = ops.topk.IMPLEMENTATION
        bias, _ = _as_kernels_take_it(logits, bias, None)
    elif _runs_as_op("logits", logits):
        implementation = ops.topk.IMPLEMENTATION
    out = _dtype_of_probabilities(logits, dtype)
    if group is not None:
        probabilities, indices, statistics = vocabulary.softmax_topk(
            implementation, group, logits, k, scale, mask, bias, renormalize, out
        )
    else:
        needs_gradient = torch.is_grad_enabled() and (
            logits.requires_grad or (bias is not None and bias.requires_grad)
        )
        probabilities, indices, statistics = _call(
            autograd.topk.call,
            implementation,
            needs_gradient,
            logits,
            k,
            scale,
            mask,
            bias,
            renormalize,
            out,
            False,
        )
    return (probabilities, indices, statistics[2]) if return_lse else (probabilities, indices)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | RelativeBias | None = ...,
    mask: Tensor | TileMask | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    fused: bool | None = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | RelativeBias | None = ...,
    mask: Tensor | TileMask | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    visible: Ranges | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[True],
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *unnamed: Never,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | TileMask | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with any bias, fused on NVIDIA GPUs: no tensor of queries x keys is made.

        z = scale * query . key + bias
        P = exp(z - m) / (sum exp(z - m) + exp(sink - m)),  m = max(z, sink)
        output = P value

    with z and P in float32 (float64 for float64 queries), whatever the types of the tensors;
    kernels, and torch's own attention on a CPU, round P and gradients of z to the type of the query
    where matrix products take them.
    The same rules hold on GPU and CPU, fused or not.

    * An excluded pair (by mask, causal, window or visible: their union) has P exactly 0, and a
      gradient of z exactly 0, whatever query, key, bias and incoming gradient make of it. The same
      holds for a pair whose bias is -inf, in a row without NaN.
    * A query with nothing left has output 0, gradients 0 and a log-sum-exp of -inf where mask,
      bias, causal, window or visible is given or where there are no keys, and with a sink a
      log-sum-exp of the sink. A plain row of -inf is NaN.
    * A NaN or +inf among the z of a query that is not excluded makes NaN of its output.
    * Products with P and with gradients of z are plain matrix products: NaN or inf in a value can
      reach the output of queries that do not see it, as 0 * NaN.
    * Kernels round what they multiply in float32 to TF32 where torch.backends.cuda.matmul allows
      it. Else products are as precise as float32, made of three, and an infinite query, key, value
      or incoming gradient may make NaN. The backward pass takes what the forward pass took.

    Differentiable with respect to query, key, value, bias and a sink that is a tensor. Incoming
    gradients are not modified. A second derivative takes `fused=False`, and is refused otherwise.
    In forward mode (torch.func.jvp) calls run in plain torch; DTensors are refused.
    Outputs have the same bits from run to run on the same device. So have gradients on a CPU, and
    everywhere under torch.use_deterministic_algorithms.

    DTensors stay split along batches and heads, see `megasoftmax.distributed.sharding`;
    differentiable once. Under torch.vmap each example drops what it would drop alone.

    Under torch.autocast query, key and value are cast to its type, as for torch's
    scaled_dot_product_attention; float64 stays. Gradients come in the types of what was given. Bias
    and sink keep their types, where torch would cast the bias too.

    Args:
        query: [batch, heads, queries, head_dim], float16, bfloat16, float32 or float64, any
            strides. Kernels take all but float64. In 16 bits they take head dimensions up to 256,
            and in float32 up to 128. For inference in 16 bits on compute capability 9.0 and 10.x
            they take up to 576, and 512 of values (see `why_not_fused`).
            Of query, key and value they copy what does not consist of dense rows that begin at
            multiples of 16 bytes.
        key: [batch, key_heads, keys, head_dim], of the same dtype. key_heads divides heads: query
            head i reads key head i // (heads / key_heads).
        value: [batch, key_heads, keys, value_dim], of the same dtype.
        bias: added to the scaled products. Either floating, broadcastable to [batch, heads,
            queries, keys], any strides. Or a `RelativeBias`. A bias with all four dimensions may
            also have a batch and heads that divide those of the query: example i then reads entry
            i // (batch / bias_batch). Broadcast dimensions are not materialised; kernels copy a
            bias whose rows are not as those of query. Its gradient, in its own type, is summed in
            float32 over what was broadcast.
        mask: bool, True = excluded, broadcastable to [batch, heads, queries, keys], any strides;
            not materialised. Or a `TileMask`: one that several calls share, or of blocks.
        scale: factor of the products, finite, as in `softmax`; by default head_dim ** -0.5. Never
            rounded to their type. Kernels take those above 0 up to 1e4.
        causal: exclude keys after the query: query i sees key j where j <= i + keys - queries.
        window: (left, right), as in `softmax`. A window of W tokens that ends at the query is
            (W - 1, 0).
        visible: (first, end), as in `softmax`: a query sees keys first <= j < end. Broadcastable to
            [batch, heads, queries]. Kernels skip tiles of keys that no query of a block sees.
        sink: a logit that joins the denominator but has no key, as in `softmax`: floating [heads],
            or one element, or a number.
        dropout: as in `softmax`, of the entries of P where they weigh the values.
        seed: as in `softmax`. The same seed drops the same entries in both.
        return_lse: also return the log-sum-exp.
        fused: None runs fused where it can, and else, on a CPU, takes torch's own
            scaled_dot_product_attention where that computes the same: see `why_not_fused` and its
            `runs`. True raises where the call cannot run fused. False runs plain torch, a block of
            batches, heads and queries after the other.

    Returns:
        The output [batch, heads, queries, value_dim], in the dtype of the query. In memory it lies
        as [batch, queries, heads, value_dim], so that output.transpose(1, 2).flatten(2) is a view.
        With return_lse also the natural log of the denominator, sink included, [batch, heads,
        queries], float32 (float64 for float64 queries), differentiable too.

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.
        NotImplementedError: a second derivative of a call that ran fused, or a forward-mode
            derivative of DTensors.

    Source:
        Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135; Dao, FlashAttention-2,
        https://arxiv.org/abs/2307.08691. Heads that share keys: Ainslie et al.,
        https://arxiv.org/abs/2305.13245. Sinks: see `softmax`.
    """
    if unnamed or others:
        raise checks.misnamed("attention", 3, unnamed, others)
    if is_compiling := torch.compiler.is_compiling():
        if seed is None and return_lse is False and (fused is None or fused is True):
            limits = bias, mask, window, visible, sink
            traced = _traced_attention(query, key, value, scale, causal, dropout, *limits)
            if traced is not None:
                return traced
    elif host.calls is not None:
        served = host.calls.attention(
            query,
            key,
            value,
            bias,
            mask,
            scale,
            causal,
            window,
            visible,
            sink,
            dropout,
            seed,
            return_lse,
            fused,
        )
        if served is not None:
            return cast(Tensor, served)
    if (  # the shortest way for the most frequent call on a CPU
        not is_compiling
        and bias is None
        and mask is None
        and window is None
        and visible is None
        and sink is None
        and seed is None
        and fused is None
        and type(causal) is bool
        and type(dropout) is float
        and return_lse is False
        and not dropout
        and dispatch.is_plain_self_attention(query, key, value)
        and (scale is None or (type(scale) is float and 0 < scale <= arguments.LARGEST_FLOAT32))
    ):
        factor = query.shape[3] ** -0.5 if scale is None else scale
        output = autograd.sdpa.attention(query, key, value, None, causal, factor)
        if output is not None:
            return output
        fused = False  # the reference computes
    query, key, value = as_autocast(query, key, value)
    scale, window = _checked_attention(
        *(query, key, value, bias, mask, scale, causal, window, sink, fused, visible, dropout),
        *(seed, return_lse),
    )
    if fused is None and query.is_cpu:
        output = _attention_by_sdpa(
            *(query, key, value, bias, mask, scale, causal, window, visible),
            *(sink, dropout, return_lse),
        )
        if output is not None:
            return output
    implementation = _attention_implementation(query, key, value, scale, dropout, fused)
    bias_tensor, sink = _operands(implementation, query, bias, sink)
    first, end = _bounds(visible, key.shape[2])
    mask_tensor, note, block = _mask_operands(implementation, query, key, mask, visible)
    left, right = (-1, -1) if window is None else window
    sink_tensor, sink_value = _tensor_and_number(sink)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (query, key, value, bias_tensor, sink_tensor)
    )
    output, statistics = _call(
        autograd.attention.call,
        implementation,
        needs_gradient,
        query,
        key,
        value,
        bias_tensor,
        mask_tensor,
        scale,
        causal,
        left,
        right,
        sink_tensor,
        sink_value,
        isinstance(bias, RelativeBias),
        _with_rank(first, 3),
        _with_rank(end, 3),
        note,
        block,
        dropout,
        _seed(dropout, seed, query),
        dispatch.takes_tf32(query.dtype),
    )
    return (output, statistics[2]) if return_lse else output


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    bias: RelativeBias | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    fused: bool | None = ...,
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    bias: RelativeBias | None = ...,
    scale: float | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    sink: Tensor | float | None = ...,
    dropout: float = ...,
    seed: Tensor | None = ...,
    return_lse: Literal[True],
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@checks.takes_options_by_name
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    bias: RelativeBias | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within each of several documents that lie one after the other, without padding.

        cu_seqlens = torch.tensor([0, 3, 10], device="cuda")  # documents of 3 and 7 tokens
        output = attention_varlen(query, key, value, cu_seqlens, causal=True)

    It is `attention` over one batch, with the documents, causality and the window in `visible`:
    everything that is said there holds here. Nothing is read by the host.

    Args:
        query: [tokens, heads, head_dim], of the types of `attention`, any strides.
        key: [key_tokens, key_heads, head_dim], of the same dtype; key_heads divides heads.
        value: [key_tokens, key_heads, value_dim], of the same dtype.
        cu_seqlens_q: int32 or int64 [documents + 1], where the queries of each document begin, and
            where those of the last end: from 0 on, not decreasing, up to tokens. That is checked
            on a CPU. On a GPU, which keys a query sees is unspecified where it does not hold, but
            nothing outside of the tensors is read. Queries after the last document see nothing.
        cu_seqlens_k: the same of the keys; by default cu_seqlens_q.
        bias: a `RelativeBias` by distance, without cu_seqlens_k or with the same tensor: its table
            has 2 * length - 1 entries, [heads, ...] or [1, heads, ...], for distances from
            1 - length to length - 1. Distances beyond them have bias 0. `t5_bias` and
            `alibi_bias` of `length` queries and keys make such tables.
        scale: factor of the products; by default head_dim ** -0.5.
        causal: exclude keys after the query. The last query of a document stands at its last key.
        window: (left, right), as in `attention`, within each document.
        sink: as in `attention`.
        dropout, seed: as in `attention`, of one batch: entries are counted in all tokens.
        return_lse: also return the log-sum-exp.
        fused: as in `attention`.

    Returns:
        The output [tokens, heads, value_dim], contiguous, in the dtype of the query. With
        return_lse also the log-sum-exp [heads, tokens], float32 (float64 for float64 queries).

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`.
    """
    if others:
        raise checks.misnamed("attention_varlen", 5, (), others)
    tensors, limits = _as_one_batch(
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, causal, window
    )
    limits |= {"scale": scale, "sink": sink, "dropout": dropout, "seed": seed, "fused": fused}
    if return_lse is False:
        return attention(*tensors, **limits).squeeze(0).transpose(0, 1)
    output, lse = attention(*tensors, **limits, return_lse=return_lse)
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`attention` with the arguments and conventions of torch's function of this name.

        from megasoftmax import scaled_dot_product_attention
        output = scaled_dot_product_attention(query, key, value, attn_mask=keep)

    It returns what torch.nn.functional.scaled_dot_product_attention returns, up to rounding, and
    gradients too. What differs:

    * `attn_mask` gets its gradient whatever runs, and may have any floating type.
    * A query for which attn_mask leaves no key has output 0 and gradients 0.
    * Dropout draws a seed from torch's generator, so the same generator drops other entries.
    * The output lies in memory as [..., queries, heads, value_dim]: a `view` that merges heads and
      queries needs `reshape`.
    * Everything else that is said of `attention` holds: when it runs fused, derivatives, autocast.

    Args:
        query: [..., heads, queries, head_dim] or [queries, head_dim], float16, bfloat16, float32 or
            float64. The dimensions before heads are any number of batch dimensions.
        key: [..., heads, keys, head_dim], of the same dtype.
        value: [..., heads, keys, value_dim], of the same dtype. Batch dimensions and heads of all
            three broadcast, without a copy up to 4 dimensions.
        attn_mask: broadcastable to [..., heads, queries, keys]. bool: True = keep. Floating: added
            to the scaled scores.
        dropout_p: from 0 to 1, as `dropout` of `attention`; 0 in evaluation.
        is_causal: query i sees key j where j <= i, counted from the first query and the first key.
            In `attention` the last query stands at the last key. Not beside attn_mask.
        scale: factor of the products; by default head_dim ** -0.5.
        enable_gqa: the heads of key and value may be fewer, and divide those of the query: query
            head i reads key head i // (heads / key_heads). Key and value have as many.

    Returns:
        [..., heads, queries, value_dim], in the dtype of the query.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
        NotImplementedError: as `attention`.

    Source:
        torch.nn.functional.scaled_dot_product_attention in the documentation of torch.
    """
    arguments.check_dropout(dropout_p, "dropout_p")
    tensors, limits, shape = _from_torch(query, key, value, attn_mask, is_causal, enable_gqa)
    return attention(*tensors, **limits, scale=scale, dropout=dropout_p).view(shape)


def why_not_fused(function: Any, *args: Any, **kwargs: Any) -> Reasons:
    """Why `function(*args, **kwargs)` would not run fused.

    Args:
        function: `megasoftmax.softmax`, `megasoftmax.softmax_topk`, `megasoftmax.attention`,
            `megasoftmax.attention_varlen`, `megasoftmax.scaled_dot_product_attention`, or a module
            of this package.
        args, kwargs: what it would be called with; `fused` makes no difference.

    Returns:
        Every reason, not only the first; empty when the call would run fused. A tuple with an
        attribute `runs`: "fused", or "SDPA" where torch's scaled_dot_product_attention computes a
        call of `attention` that does not run fused, or "reference", which is plain torch. Its
        attribute `against_sdpa` has the reasons against "SDPA".

    Raises:
        TypeError, ValueError: as the call would.
    """
    if function is softmax:
        return _without_sdpa("softmax", _softmax_reasons(*args, **kwargs))
    if function is softmax_topk:
        return _without_sdpa("softmax_topk", _topk_reasons(*args, **kwargs))
    if function is attention:
        return _attention_reasons(*args, **kwargs)
    if function is attention_varlen:
        return _varlen_reasons(*args, **kwargs)
    if function is scaled_dot_product_attention:
        return _sdpa_reasons(*args, **kwargs)
    if hasattr(function, "why_not_fused"):
        found = function.why_not_fused(*args, **kwargs)
        is_complete = isinstance(found, Reasons)
        return found if is_complete else _without_sdpa(type(function).__name__, found)
    raise TypeError(
        "function: expected megasoftmax.softmax, megasoftmax.softmax_topk, megasoftmax.attention, "
        "megasoftmax.attention_varlen, megasoftmax.scaled_dot_product_attention or a module of "
        f"megasoftmax, got {checks.kind(function)}"
    )


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: "ProcessGroup",
    order: Literal["contiguous", "zigzag"] = "contiguous",
    lengths: Sequence[int] | None = None,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a sequence that is split among the ranks of a group: context parallelism.

        group = mesh.get_group("context")
        query, key, value = (
            megasoftmax.zigzag_chunk(each, group.size(), 2)[group.rank()] for each in whole
        )
        output, lse = megasoftmax.ring_attention(
            query, key, value, group=group, order="zigzag", causal=True
        )

    What `attention` would compute for this rank's queries if it had the keys of all ranks, in the
    order of the sequence. Keys and values go round in a ring while blocks are computed, forward and
    backward; beside its own, a rank holds those of two ranks at a time. What is kept for the
    backward pass is of this rank, and three numbers for each query, head and part that it sees.

    With causality and the order "contiguous" the last rank computes 2 * ranks - 1 times as much as
    the first, and all wait for it. With "zigzag" each rank has an early and a late part of the
    sequence, and all compute the same. Blocks that causality excludes are computed in neither.

    Differentiable once, in reverse mode. The gradients of query, key and value are whole. That of a
    sink or bias is what this rank's queries contribute: where ranks share one, as with any
    parameter of a model whose batch is sharded, their gradients are to be added up.

    All ranks must call it, with the same options and kinds of arguments, forward and backward.
    Compiled code leaves its graph for the call. torch.autocast acts as on `attention`.

    Args:
        query: [batch, heads, queries, head_dim] of this rank, as in `attention`.
        key: [batch, key_heads, keys, head_dim] of this rank, of the same dtype.
        value: [batch, key_heads, keys, value_dim], of the same dtype.
        group: the ranks. Every backend of torch.distributed that can send and receive serves.
        order: "contiguous": rank r holds part r of the sequence, as torch.chunk cuts it. "zigzag":
            the sequence has 2 * ranks equal parts, and rank r holds parts r and 2 * ranks - 1 - r,
            one after the other, as `zigzag_chunk` cuts it; `zigzag_cat` joins outputs. Each rank
            then has as many queries as keys, an even number.
        lengths: the number of keys of each rank, from 0 on; by default that of this rank. It must
            be given if ranks differ, which is not checked. With "zigzag" all must be equal.
        bias: floating, broadcastable to this rank's queries, in their order, and the keys of all
            ranks, in the order of the sequence: [batch, heads, queries, sum(lengths)], as in
            `attention`. Or a `RelativeBias` with the table of the whole sequence,
            2 * sum(lengths) - 1 entries.
        mask: bool, True = excluded, broadcastable to the same.
        scale: factor of the products; by default head_dim ** -0.5.
        causal: exclude keys after the query.
        window: (left, right), as in `attention`.
        visible: (first, end) of this rank's queries, [batch, heads, queries], as in `attention`,
            counted in the whole sequence.
        sink: a logit that joins the denominator, once: floating [heads], or one element, or a
            number.
        dropout: as in `attention`.
        seed: as in `attention`; ranks may have the same or others. The queries of rank r and the
            keys of rank k drop what `attention` of these alone drops with the seed
            seed + r * ranks + k, where seed is that of rank r. With "zigzag" the 2 * ranks parts
            of the sequence take the place of ranks.
        fused: of each block, as in `attention`.

    Returns:
        The output of this rank's queries, [batch, heads, queries, value_dim], in the dtype of the
        query, in memory [batch, queries, heads, value_dim]; and the log-sum-exp over the keys of
        all ranks, sink included, [batch, heads, queries], float32 (float64 for float64 queries),
        differentiable too.

    Raises:
        TypeError, ValueError: an argument is not as above; causality, a window, a `RelativeBias` or
            "zigzag" is given, for which query i is the token of key i, but not as many queries as
            keys; or `fused` is True and a block cannot run fused.
        NotImplementedError: a backward pass with create_graph=True, or a forward-mode derivative.

    Source:
        Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889. "zigzag": the context
        parallelism of The Llama 3 Herd of Models, section 3.3, https://arxiv.org/abs/2407.21783.
    """
    arguments.check_group(group)
    query, key, value = as_autocast(query, key, value)
    scale = arguments.as_number("scale", scale)
    window = arguments.checked_window("window", window)
    every = arguments.check_ring(
        *(query, key, value, group, lengths, bias, mask, scale, causal, window, sink, fused),
        *(visible, dropout, seed, order),
    )
    scale = _attention_scale(query, scale)
    implementation = _attention_implementation(query, key, value, scale, dropout, fused)
    bias_tensor, sink = _operands(implementation, query, bias, sink)
    left, right = (-1, -1) if window is None else window
    sink_tensor, sink_value = _tensor_and_number(sink)
    first, end = _bounds(visible, sum(every))
    return context_parallel.attention(
        implementation,
        context_parallel.Ring(group, every, order == "zigzag"),
        *(query, key, value, bias_tensor, _with_rank(mask, 4)),
        *(_with_rank(first, 3), _with_rank(end, 3), sink_tensor, _seed(dropout, seed, query)),
        context_parallel.Options(
            *(scale, left, 0 if causal else right, sink_value, isinstance(bias, RelativeBias)),
            *(dropout, dispatch.takes_tf32(query.dtype)),
        ),
    )


def _checked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | RelativeBias | None,
    mask: Tensor | TileMask | None,
    scale: float | None,
    causal: bool,
    window: Window | None,
    *others: Any,
) -> tuple[float, Window | None]:
    """The scale and the window as implementations take them, once all arguments are checked."""
    scale = arguments.as_number("scale", scale)
    if window is not None:
        window = arguments.checked_window("window", window)
    given = query, key, value, bias, mask, scale, causal, window
    arguments.check_attention(*given, *others)
    return _attention_scale(query, scale), window


def _traced_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, dtype: torch.dtype | None
) -> Tensor | None:
    """`softmax` of these alone in compiled code, as one op; None where that is not certain.

    What torch.compile reads while it traces it guards at each call of what it compiled. The way
    that checks and decides everything has 280 guards, and this one 75. The level of
    forward mode is read in place, because a function that asks for it would add 5 guards.
    """
    if (
        type(scores) is Tensor
        and not scores.requires_grad
        and dispatch.runs_fused_traced(scores.device, scores.dtype, dtype)
        and forward_ad._current_level < 0
        and (causal is False or causal is True)
        and 1 + causal <= scores.dim() <= 4
        and 0 < scores.numel() < 2**30  # far below the limits of all sizes
        and type(scale) is float
        and 1e-30 < scale < 1e30  # far within theirs
        and (mask is None or _masks(mask, scores))
    ):
        return ops.softmax.forward_alone(scores, scale, mask, causal, dtype or scores.dtype)
    return None


def _masks(mask: Tensor, scores: Tensor) -> bool:
    """Whether it is certainly a mask of these scores, without many guards."""
    if not (
        type(mask) is Tensor
        and mask.dtype == torch.bool
        and mask.device == scores.device
        and mask.dim() <= scores.dim()
    ):
        return False
    for dim in range(-mask.dim(), 0):
        if mask.size(dim) != 1 and mask.size(dim) != scores.size(dim):
            return False
    return True


def _traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    dropout: float,
    *others: Any,
) -> Tensor | None:
    """The same for `attention` without dropout, and without the others. It has 310 guards."""
    for other in others:
        if other is not None:
            return None
    if not (
        type(dropout) in (int, float)
        and dropout == 0
        and forward_ad._current_level < 0
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and not (query.requires_grad or key.requires_grad or value.requires_grad)
        and query.dim() == key.dim() == value.dim() == 4
        and query.device == key.device == value.device
        and query.dtype == key.dtype == value.dtype
        and (causal is False or causal is True)
    ):
        return None
    most = dispatch.head_dim_traced(query.device, query.dtype)
    if (
        key.size(0) == value.size(0) == query.size(0)
        and key.size(1) == value.size(1)
        and key.size(2) == value.size(2)
        and key.size(3) == query.size(3) <= most
        and value.size(3) <= most
        and 0 < query.numel() < 2**30
        and 0 < key.numel() < 2**30
        and value.numel() > 0
        and query.size(1) % key.size(1) == 0
        and (scale is None or (type(scale) is float and 1e-30 < scale < 1))
    ):
        factor = query.size(3) ** -0.5 if scale is None else scale
        return ops.attention.forward_alone(query, key, value, factor, causal)
    return None


def _softmax_over_last(
    scores: Tensor,
    scale: float,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window | None,
    visible: Ranges | None,
    sink: Tensor | float | None,
    dropout: float,
    seed: Tensor | None,
    dtype: torch.dtype | None,
    return_lse: bool,
    fused: bool | None,
) -> tuple[Tensor, Tensor]:
    function = autograd.dropout if dropout > 0 else autograd.softmax
    kernels = ops.softmax.WITH_DROPOUT if dropout > 0 else ops.softmax.IMPLEMENTATION
    implementation = function.REFERENCE
    reasons_against = dispatch.reasons_against_fused_softmax
    first, end = _bounds(visible, scores.shape[-1])
    if _is_fused(
        *(fused, reasons_against, scores, scale, mask, bias, causal, window, dtype), (first, end)
    ):
        implementation = kernels
        bias, sink = _as_kernels_take_it(scores, bias, sink)
    elif _runs_as_op("scores", scores):
        implementation = kernels

    left, right = (-1, -1) if window is None else window
    sink_tensor, sink_value = _tensor_and_number(sink)
    needs_gradient = torch.is_grad_enabled() and (
        scores.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink_tensor is not None and sink_tensor.requires_grad)
    )
    return _call(
        function.call,
        implementation,
        needs_gradient,
        scores,
        scale,
        mask,
        bias,
        causal,
        left,
        right,
        first,
        end,
        sink_tensor,
        sink_value,
        _dtype_of_probabilities(scores, dtype),
        return_lse or (needs_gradient and (sink_tensor is not None or dropout > 0)),
        dropout,
        _seed(dropout, seed, scores),
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
    reasons_against = dispatch.reasons_against_fused_columns
    if _has_columns_alone(scores, mask, bias, sink, dim) and _is_fused(
        fused, reasons_against, scores, scale, dtype
    ):
        return _softmax_of_columns(scores, scale, dtype, return_lse, dim)
    probabilities, lse = _softmax_over_last(
        scores.movedim(dim, -1),
        scale,
        _moved_to_last(mask, dim, scores.dim()),
        _moved_to_last(bias, dim, scores.dim()),
        False,
        None,
        None,
        sink,
        0.0,
        None,
        dtype,
        return_lse,
        fused,
    )
    return probabilities.movedim(-1, dim).contiguous(), lse


def _moved_to_last(tensor: Tensor | None, dim: int, rank: int) -> Tensor | None:
    """A view of what broadcasts to `rank` dimensions, with `dim` of them last."""
    if tensor is None:
        return None
    return tensor[(None,) * (rank - tensor.dim())].movedim(dim, -1)


def _has_columns_alone(
    scores: Tensor, mask: Tensor | None, bias: Tensor | None, sink: Tensor | float | None, dim: int
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
    probabilities, lse = _call(
        autograd.softmax.call,
        ops.columns.IMPLEMENTATION,
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
        None,
        None,
        _dtype_of_probabilities(scores, dtype),
        return_lse,
        0.0,
        None,
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
    can_be = len(reasons) == 0  # torch.compile cannot trace `not reasons`
    if fused and not can_be:
        raise ValueError("fused: cannot be True here. " + "; ".join(map(str, reasons)))
    if can_be:
        host.admit(scores)
    return can_be


def _runs_as_op(name: str, scores: Tensor) -> bool:
    """Whether a call that does not run fused is one op all the same: DTensors, and torch.jit.trace.

    Raises:
        ValueError: of a DTensor on a GPU.
    """
    if sharding.prepare(scores):
        arguments.check_shards(name, scores)
        return True
    return in_jit_trace()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast gives a tensor for matrix products; None where it leaves it alone."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(tensor, Tensor):
        return None
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which refuses "meta"
        return None
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def as_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the types that torch's scaled_dot_product_attention gives them under autocast."""
    if not torch._C._is_any_autocast_enabled():
        return query, key, value
    return _as_autocast(query), _as_autocast(key), _as_autocast(value)


def _as_autocast(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor)
    return tensor if dtype is None else tensor.to(dtype)


def _dtype_of_probabilities(scores: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The type asked for, or else that of torch.softmax: float32 under autocast on a GPU."""
    if dtype is not None:
        return dtype
    if scores.is_cuda and autocast_dtype(scores) is not None:
        return torch.float32
    return scores.dtype


def _call(through_autograd: Callable[..., Any], implementation: Any, *args: Any) -> Any:
    """`through_autograd(implementation, needs_gradient, *arguments of forward)`.

    Compiled, an autograd function gets gradients without placements: DTensors go to ops, which have
    autograd of their own.
    """
    if sharding.prepare(args[1]) and torch.compiler.is_compiling():
        return implementation.forward(*args[1:])
    return through_autograd(implementation, *args)


def _bound(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by their names, defaults too. An error names the function."""
    by_position = sum(
        each.kind is each.POSITIONAL_OR_KEYWORD for each in signature.parameters.values()
    )
    others = {each: value for each, value in kwargs.items() if each not in signature.parameters}
    if others or len(args) > by_position:
        raise checks.misnamed(name, by_position, args[by_position:], others)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}(): {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _without_sdpa(function: str, reasons: tuple[Reason, ...]) -> Reasons:
    if torch.compiler.is_compiling():  # which traces no class of tuples
        return cast(Reasons, reasons)
    return Reasons(reasons, (Reason("function", function, "attention"),))


_SIGNATURE = inspect.signature(softmax)


def _softmax_reasons(*args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    given = _bound("softmax", _SIGNATURE, args, kwargs)
    given["scale"] = arguments.as_number("scale", given["scale"])
    given["dim"] = checks.as_integer(given["dim"])
    given["window"] = arguments.checked_window("window", given["window"])
    arguments.check_softmax(**given)
    unneeded = "fused", "dropout", "seed", "return_lse"
    sink, dim, *_ = (given.pop(name) for name in ("sink", "dim", *unneeded))
    scores, mask, bias = given["scores"], given["mask"], given["bias"]
    rank = scores.dim()
    if _has_columns_alone(scores, mask, bias, sink, dim % rank):
        return dispatch.reasons_against_fused_columns(scores, given["scale"], given["dtype"])
    given["scores"] = scores.movedim(dim, -1)
    given["mask"] = _moved_to_last(mask, dim, rank)
    given["bias"] = _moved_to_last(bias, dim, rank)
    return dispatch.reasons_against_fused_softmax(**given)


_TOPK_SIGNATURE = inspect.signature(softmax_topk)


def _topk_reasons(*args: Any, **kwargs: Any) -> tuple[Reason, ...]:
    given = _bound("softmax_topk", _TOPK_SIGNATURE, args, kwargs)
    given["scale"] = arguments.as_number("scale", given["scale"])
    given["k"] = checks.as_integer(given["k"])
    arguments.check_topk(**given)
    for name in ("renormalize", "return_lse", "group", "fused"):
        del given[name]
    return dispatch.reasons_against_fused_topk(**given)


def _attention_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *unnamed: Any,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | TileMask | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    fused: bool | None = None,
    **others: Any,
) -> Reasons:
    """Binds no signature, which would cost as much as all else: models ask in each call."""
    if unnamed or others:
        raise checks.misnamed("attention", 3, unnamed, others)
    query, key, value = as_autocast(query, key, value)
    scale, window = _checked_attention(
        *(query, key, value, bias, mask, scale, causal, window, sink, fused, visible, dropout),
        *(seed, return_lse),
    )
    reasons = dispatch.reasons_against_fused_attention(query, key, value, scale, dropout)
    if torch.compiler.is_compiling():  # which traces no class of tuples
        return cast(Reasons, reasons)
    against_sdpa = reasons_against_sdpa(
        *(query, key, value, bias, mask, scale, causal, window, visible, sink, dropout, return_lse)
    )
    return Reasons(reasons, against_sdpa)


_attention_reasons.__qualname__ = "attention"  # in the error of a call with other arguments

_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def served_attention(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], dropout: float
) -> Tensor | None:
    """`attention` where the C++ part has this call, so that it runs fused; else None.

    For adapters, which would ask and call, and go on with [batch, queries, heads, value_dim], which
    this returns, contiguous. `options` has bias, mask, scale, causal, window, visible and sink:
    merging it with defaults would take longer than to name them.
    """
    if torch.compiler.is_compiling():
        given = dict(options)
        of_all = given.pop("scale"), given.pop("causal"), dropout
        traced = _traced_attention(query, key, value, *of_all, *given.values())
        return None if traced is None else traced.transpose(1, 2)
    if host.calls is None:
        return None
    served: Tensor | None = host.calls.attention_transposed(
        query,
        key,
        value,
        options["bias"],
        options["mask"],
        options["scale"],
        options["causal"],
        options["window"],
        options["visible"],
        options["sink"],
        dropout,
        None,
        False,
        None,
    )
    return served


def serves_attention(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the C++ part has this call of `attention`, so that it is right and runs fused.

    A quick yes. Without it `why_not_fused` tells.
    """
    if torch.compiler.is_compiling() or host.calls is None:
        return False
    is_served: bool = host.calls.serves_attention(query, key, value, *(_OPTIONS | options).values())
    return is_served


def _varlen_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    bias: RelativeBias | None = None,
    causal: bool = False,
    window: Window | None = None,
    **options: Any,
) -> Reasons:
    (query, key, value), limits = _as_one_batch(
        query, key, value, cu_seqlens_q, cu_seqlens_k, bias, causal, window
    )
    return _attention_reasons(query, key, value, **limits, **options)


def _as_one_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    bias: RelativeBias | None,
    causal: bool,
    window: Window | None,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """From what `attention_varlen` takes: query, key and value of `attention`, and its limits."""
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    arguments.check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, bias)
    checks.check_flag("causal", causal)
    window = arguments.checked_window("window", window)
    tokens = query.shape[0]
    if bias is not None:
        surplus = tokens - (bias.table.shape[-1] + 1) // 2
        table = bias.table[..., :0]
        if tokens > 0:
            table = torch.nn.functional.pad(bias.table, (surplus, surplus))
        bias = RelativeBias(table)
    visible = ranges.of_documents(cu_seqlens_q, cu_seqlens_k, tokens, causal, window)
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return (query, key, value), {"bias": bias, "visible": visible}


def _sdpa_reasons(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Reasons:
    arguments.check_dropout(dropout_p, "dropout_p")
    tensors, limits, _ = _from_torch(query, key, value, attn_mask, is_causal, enable_gqa)
    return _attention_reasons(*tensors, **limits, scale=scale, dropout=dropout_p)


def _from_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], tuple[int, ...]]:
    """Query, key and value of `attention`, its limits, and the shape of torch's result."""
    batch, heads, key_heads = arguments.check_sdpa(
        query, key, value, attn_mask, is_causal, enable_gqa
    )
    queries, keys = query.shape[-2], key.shape[-2]
    rank = max(query.dim(), key.dim(), value.dim())
    shape = (*batch, heads, queries, value.shape[-1])[-rank:]
    limits: dict[str, Any] = {"causal": is_causal}
    if is_causal and keys > queries:  # no query sees the keys after the last of them
        key, value = key[..., :queries, :], value[..., :queries, :]
    elif is_causal and keys < queries:  # j <= i where the last query stands at the last key
        limits = {"window": (-1, queries - keys)}
    if attn_mask is not None:
        mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if len(batch) > 1:
            mask = mask.expand(*batch, -1, -1, -1).flatten(0, -4)
        if mask.dtype == torch.bool:
            limits["mask"] = ~_without_repeats(mask)
        else:
            limits["bias"] = mask
    query = query.expand(*batch, heads, -1, -1).flatten(0, -4)
    key, value = (each.expand(*batch, key_heads, -1, -1).flatten(0, -4) for each in (key, value))
    return (query, key, value), limits, shape


def _without_repeats(tensor: Tensor) -> Tensor:
    """A view that has size 1 where strides are 0."""
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _attention_implementation(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, fused: bool | None
) -> Implementation:
    """Who computes; raises where it must be kernels and cannot be."""
    given = query, key, value, scale, dropout
    if _is_fused(fused, dispatch.reasons_against_fused_attention, *given):
        return ops.attention.IMPLEMENTATION
    compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    # Compiled, an op would drop tangents.
    if (compiled and forward_ad._current_level < 0) or sharding.prepare(query) or in_jit_trace():
        return ops.attention.IN_BLOCKS
    return autograd.attention.REFERENCE


def reasons_against_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | RelativeBias | None = None,
    mask: Tensor | TileMask | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    visible: Ranges | None = None,
    sink: Tensor | float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    **others: Any,
) -> tuple[Reason, ...]:
    """Why torch's scaled_dot_product_attention does not compute an `attention` that is not fused.

    Takes what `attention` takes, after autocast; the others make no difference. Checks nothing. Off
    a CPU the device is the only reason.
    """
    device = dispatch.sdpa_device(query)
    if device is not None:
        return (device,)
    table = bias.table if isinstance(bias, RelativeBias) else bias
    added = []
    if bias is not None:
        added.append(bias.table.shape[:-1] if isinstance(bias, RelativeBias) else bias.shape[:-2])
    if mask is not None:
        added.append((mask.tensor if isinstance(mask, TileMask) else mask).shape[:-2])
    if visible is not None:
        added += [bound.shape[:-1] for bound in visible if bound is not None]
    if window is not None or _needs_mask(causal, query, key):
        added.append(torch.Size())
    return dispatch.reasons_against_sdpa(
        query, key, value, table, added, scale, sink, dropout, return_lse
    )


def _needs_mask(causal: bool, query: Tensor, key: Tensor) -> bool:
    """Whether SDPA needs a mask for causality: it aligns top-left, and one query sees all keys."""
    return causal and query.shape[2] not in (1, key.shape[2])


def _attention_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | RelativeBias | None,
    mask: Tensor | TileMask | None,
    scale: float,
    causal: bool,
    window: Window | None,
    visible: Ranges | None,
    sink: Tensor | float | None,
    dropout: float,
    return_lse: bool,
) -> Tensor | None:
    """The output by torch's own attention; None where that does not compute the same."""
    if reasons_against_sdpa(
        *(query, key, value, bias, mask, scale, causal, window, visible, sink, dropout, return_lse)
    ):
        return None
    queries, keys = query.shape[2], key.shape[2]
    needs_mask = _needs_mask(causal, query, key)
    if bias is None and mask is None and window is None and visible is None and not needs_mask:
        added = None
    else:
        added = autograd.sdpa.added_to_scores(
            query,
            key,
            bias.dense(queries, keys) if isinstance(bias, RelativeBias) else bias,
            mask.to_mask(queries, keys) if isinstance(mask, TileMask) else mask,
            needs_mask,
            (-1, -1) if window is None else window,
            *_bounds(visible, keys),
        )
    return autograd.sdpa.attention(query, key, value, added, causal and queries == keys, scale)


def _attention_scale(query: Tensor, scale: float | None) -> float:
    return max(query.shape[-1], 1) ** -0.5 if scale is None else scale


def _operands(
    implementation: Implementation,
    query: Tensor,
    bias: Tensor | RelativeBias | None,
    sink: Tensor | float | None,
) -> tuple[Tensor | None, Tensor | float | None]:
    """Bias and sink as the implementation takes them; of a RelativeBias its table."""
    rank = 4
    if isinstance(bias, RelativeBias):
        bias, rank = bias.table, 3
    if implementation is ops.attention.IMPLEMENTATION:
        bias, sink = _as_kernels_take_it(query, bias, sink)
    return _with_rank(bias, rank), sink


def new_seed(device: torch.device) -> Tensor:
    """A seed of dropout, int64 [1], drawn there by torch's generator."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)


def _seed(dropout: float, seed: Tensor | None, scores: Tensor) -> Tensor | None:
    """As ops take it: None without dropout."""
    if dropout == 0:
        return None
    if seed is None:
        seed = new_seed(scores.device)
    return sharding.seed_of_shards(seed, scores) if sharding.prepare(scores) else seed


def _tensor_and_number(sink: Tensor | float | None) -> tuple[Tensor | None, float | None]:
    """A sink as ops take it; one of the two is None."""
    if sink is None or isinstance(sink, Tensor):
        return sink, None
    return None, float(sink)


def _bounds(visible: Ranges | None, keys: int) -> Ranges:
    """Both in int32."""
    if visible is None:
        return None, None
    first, end = visible
    return _as_int32(first, keys), _as_int32(end, keys)


def _as_int32(bound: Tensor | None, keys: int) -> Tensor | None:
    if bound is None or bound.dtype == torch.int32:
        return bound
    return bound.clamp(0, keys).to(torch.int32)


def _mask_operands(
    implementation: Implementation,
    query: Tensor,
    key: Tensor,
    mask: Tensor | TileMask | None,
    visible: Ranges | None,
) -> tuple[Tensor | None, Tensor | None, int]:
    """The mask, its note and its block as the implementation takes them."""
    if not isinstance(mask, TileMask):
        return _with_rank(mask, 4), None, 1
    queries, keys = query.shape[2], key.shape[2]
    if implementation is not ops.attention.IMPLEMENTATION:
        return _with_rank(mask.tensor, 4), None, mask.block
    if queries <= kernel_limits().attention["kMaxDecodeQueries"]:  # no tiles, so no blocks
        return _with_rank(mask.to_mask(queries, keys), 4), None, 1
    if visible is not None or not query.is_cuda or hasattr(query, "device_mesh"):
        note = None
    else:
        note = mask.note(queries, keys, ops.attention.tile_note)
    return _with_rank(mask.tensor, 4), note, mask.block


def _with_rank(tensor: Tensor | None, rank: int) -> Tensor | None:
    """A view with leading dimensions of size 1."""
    return None if tensor is None else tensor[(None,) * (rank - tensor.dim())]


def _as_kernels_take_it(
    scores: Tensor, bias: Tensor | None, sink: Tensor | float | None
) -> tuple[Tensor | None, Tensor | float | None]:
    """The bias in the type of the scores or float32, the sink in one that kernels know.

    A bias of no dimension gets one.
    """
    if bias is not None and bias.dim() == 0:
        bias = bias[None]
    if bias is not None and bias.dtype != scores.dtype:
        bias = bias.float()
    if isinstance(sink, Tensor) and sink.dtype == torch.float64:
        sink = sink.float()
    return bias, sink
