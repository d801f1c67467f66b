"""Attention, of batches and of documents that lie one after the other."""

from contextlib import nullcontext
from typing import Any, Literal, Never, Unpack, cast, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax import arguments, autograd, checks, dispatch, host, ops, ranges
from megasoftmax.autocast import as_autocast
from megasoftmax.autograd.function import Implementation
from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.dispatch import Reason, Reasons
from megasoftmax.distributed import sharding
from megasoftmax.functions import leading
from megasoftmax.functions.calls import (
    Call,
    call_op,
    cast_for_kernels,
    int32_bounds,
    seed_of_call,
    with_rank,
)
from megasoftmax.functions.torch_sdpa import (
    attention_by_sdpa,
    keeps_weights,
    reasons_against_sdpa,
)
from megasoftmax.limits import kernel_limits
from megasoftmax.masks import TileMask
from megasoftmax.options import (
    LARGEST_FLOAT32,
    AttentionKeywords,
    AttentionOptions,
    Ranges,
    VarlenKeywords,
    Window,
    as_number,
    checked_window,
    read_options,
    sink_operands,
)
from megasoftmax.tracing import in_jit_trace, is_exporting


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionKeywords],
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionKeywords],
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
    softcap: float | None = None,
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
            with a softcap:  z = softcap * tanh(scale * query . key / softcap) + bias
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

    Query, key and value have the same leading dimensions, one or more or none. mask, bias and
    visible broadcast to the scores [..., heads, queries, keys] as torch broadcasts. What they share
    is not copied, but for biases that are constant along one leading dimension and vary along a
    later one, masks that vary along one and are constant along a later one, and ranges in both
    cases: see `why_not_fused` and its `copies`.

    DTensors stay split along batches and heads, see `megasoftmax.distributed.sharding`;
    differentiable once. Under torch.vmap each example drops what it would drop alone.

    Under torch.autocast query, key and value are cast to its type, as for torch's
    scaled_dot_product_attention; float64 stays. Gradients come in the types of what was given. Bias
    and sink keep their types, where torch would cast the bias too.

    Args:
        query: [..., heads, queries, head_dim], float16, bfloat16, float32 or float64, any
            strides. Kernels take all but float64. In 16 bits they take head dimensions up to 256,
            and in float32 up to 128. For inference in 16 bits on compute capability 9.0 and 10.x
            they take up to 576, and 512 of values (see `why_not_fused`).
            Of query, key and value they copy what does not consist of dense rows that begin at
            multiples of 16 bytes.
        key: [..., key_heads, keys, head_dim], of the same dtype. key_heads divides heads: query
            head i reads key head i // (heads / key_heads).
        value: [..., key_heads, keys, value_dim], of the same dtype.
        bias: added to the scaled products. Either floating, broadcastable to [..., heads, queries,
            keys], any strides. Or a `RelativeBias` or `ShiftedBias`. Some kernels copy a bias whose
            rows are not as those of query. Its gradient, in its own type, is summed in float32 over
            what was broadcast.
        mask: bool, True = excluded, broadcastable to [..., heads, queries, keys], any strides. Or a
            `TileMask`: one that several calls share, or of blocks.
        scale: factor of the products, finite, as in `softmax`; by default head_dim ** -0.5. Never
            rounded to their type. Kernels take those above 0 up to 1e4.
        softcap: a number from 0 on; None or 0 for none. It bounds the scaled products, as in
            `softmax`. Kernels take those up to 1e4.
        causal: exclude keys after the query: query i sees key j where j <= i + keys - queries.
        window: (left, right), as in `softmax`. A window of W tokens that ends at the query is
            (W - 1, 0).
        visible: (first, end), as in `softmax`: a query sees keys first <= j < end. Broadcastable to
            [..., heads, queries]. Kernels skip tiles of keys that no query of a block sees.
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
        The output [..., heads, queries, value_dim], in the dtype of the query. In memory it lies as
        [..., queries, heads, value_dim], so that output.transpose(-3, -2).flatten(-2) is a view.
        With return_lse also the natural log of the denominator, sink included, [..., heads,
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
            limits = bias, mask, window, visible, sink, softcap
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
            softcap,
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
        and softcap is None
        and seed is None
        and fused is None
        and type(causal) is bool
        and type(dropout) is float
        and return_lse is False
        and not dropout
        and dispatch.is_plain_self_attention(query, key, value)
        and (scale is None or (type(scale) is float and 0 < scale <= LARGEST_FLOAT32))
    ):
        factor = query.shape[3] ** -0.5 if scale is None else scale
        output = autograd.sdpa.attention(query, key, value, None, causal, factor)
        if output is not None:
            return output
        fused = False  # the reference computes
    query, key, value = as_autocast(query, key, value)
    if window is not None:
        window = checked_window("window", window)
    scale, dropout = as_number("scale", scale), as_number("dropout", dropout)
    softcap = as_number("softcap", softcap)
    options = AttentionOptions(
        bias, mask, scale, softcap, causal, window, visible, sink, dropout, seed, return_lse, fused
    )
    options.check(query, key, value)
    output, lse = AttentionCall(query, key, value, options).run()
    return (output, cast(Tensor, lse)) if return_lse else output


def _traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    causal: bool,
    dropout: float,
    *others: Any,
) -> Tensor | None:
    """`attention` in compiled code as one op, as `softmax` has it; None where one of the others is.

    It has 104 guards. The way that checks and decides everything has 340.
    """
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


class AttentionCall(Call):
    """A call of `attention`, after autocast."""

    __slots__ = ("key", "scale", "value")

    options: AttentionOptions

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> None:
        scale = options.scale
        self.tensor = query
        self.key = key
        self.value = value
        self.scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
        self.options = options

    def reasons(self) -> tuple[Reason, ...]:
        return dispatch.reasons_against_fused_attention(
            self.tensor, self.key, self.value, self.scale, self.options
        )

    def why_not_fused(self) -> Reasons:
        """The reasons, and those against torch's own attention."""
        reasons = self.reasons()
        if torch.compiler.is_compiling():  # which traces no class of tuples
            return cast(Reasons, reasons)
        call = self.tensor, self.key, self.value, self.options
        return Reasons(reasons, reasons_against_sdpa(*call), leading.copies(*call))

    def run(self) -> tuple[Tensor, Tensor | None]:
        """Output and log-sum-exp, which is None where it is not asked for."""
        query, key, value, options = self.tensor, self.key, self.value, self.options
        if isinstance(options.bias, ShiftedBias) and query.is_cpu and not self.runs_fused():
            dense = options.bias.dense(query.shape[-2], key.shape[-2])
            return AttentionCall(query, key, value, options._replace(bias=dense)).run()
        if query.dim() != 4:
            result, lse = AttentionCall(*leading.merged(query, key, value, options)).run()
            lse = None if lse is None else leading.unmerged(lse, query)
            return leading.unmerged(result, query), lse
        output = None
        if options.fused is None and query.is_cpu:
            learns = self._learns_bias()
            keeps = learns and keeps_weights(query, key, options.bias)
            with torch.no_grad() if learns and not keeps else nullcontext():
                output = attention_by_sdpa(query, key, value, self.scale, options, keeps)
            if output is not None and (keeps or not learns):
                return output, None
        if output is None:
            implementation = self.implementation()
        else:  # torch's attention has no gradient of a bias
            implementation = autograd.attention.reference_after(output)
        operands = self.operands(implementation, key.shape[2])
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad
            for each in (query, key, value, operands[0], options.sink)
        )
        output, statistics = call_op(
            autograd.attention.call, implementation, needs_gradient, query, key, value, *operands
        )
        return output, statistics[2] if options.return_lse else None

    def _learns_bias(self) -> bool:
        bias = self.options.bias
        table = bias.table if isinstance(bias, RelativeBias) else bias
        return table is not None and table.requires_grad and torch.is_grad_enabled()

    def implementation(self) -> Implementation:
        """Who computes; raises where it must be kernels and cannot be."""
        if self.runs_fused():
            return ops.attention.IMPLEMENTATION
        compiled = torch.compiler.is_compiling() and not is_exporting()
        # Compiled, an op would drop tangents.
        if (
            (compiled and forward_ad._current_level < 0)
            or sharding.prepare(self.tensor)
            or in_jit_trace()
        ):
            return ops.attention.IN_BLOCKS
        return autograd.attention.REFERENCE

    def operands(self, implementation: Implementation, keys: int) -> tuple[Any, ...]:
        """The arguments of `attention_forward` after the value, of a merged call.

        Args:
            implementation: who computes.
            keys: how many there are of all ranks.
        """
        query, options = self.tensor, self.options
        bias = options.bias
        of_kernels = implementation is ops.attention.IMPLEMENTATION
        is_relative = isinstance(bias, RelativeBias)
        table = bias.table if isinstance(bias, RelativeBias) else bias
        if of_kernels:
            table = cast_for_kernels(table, query)
        mask, note, block = self._mask(implementation)
        left, right = (-1, -1) if options.window is None else options.window
        first = end = sink_tensor = sink_value = None
        if options.visible is not None:
            first, end = int32_bounds(options.visible, keys)
        if options.sink is not None:
            sink_tensor, sink_value = sink_operands(options.sink, of_kernels)
        rank = bias.trailing + 1 if isinstance(bias, RelativeBias) else 4
        table, first, end = (
            with_rank(table, rank),
            with_rank(first, 3),
            with_rank(end, 3),
        )
        seed = None if options.dropout == 0 else seed_of_call(options.seed, query)
        return (
            *(table, mask, self.scale, options.softcap or 0.0, options.causal, left, right),
            *(sink_tensor, sink_value, is_relative, first, end, note, block, options.dropout),
            *(seed, dispatch.takes_tf32(query.dtype)),
        )

    def _mask(self, implementation: Implementation) -> tuple[Tensor | None, Tensor | None, int]:
        """The mask, its note and its block."""
        query, mask = self.tensor, self.options.mask
        if not isinstance(mask, TileMask):
            return with_rank(mask, 4), None, 1
        queries, keys = query.shape[2], self.key.shape[2]
        if implementation is not ops.attention.IMPLEMENTATION:
            return with_rank(mask.tensor, 4), None, mask.block
        if queries <= kernel_limits().attention["kMaxDecodeQueries"]:  # no tiles, so no blocks
            return with_rank(mask.to_mask(queries, keys), 4), None, 1
        if self.options.visible is not None or not query.is_cuda or hasattr(query, "device_mesh"):
            note = None
        else:
            note = mask.note(queries, keys, ops.attention.tile_note)
        return with_rank(mask.tensor, 4), note, mask.block


def attention_reasons(
    query: Tensor, key: Tensor, value: Tensor, *unnamed: Any, **given: Any
) -> Reasons:
    options = read_options(AttentionOptions, "attention", 3, unnamed, given)
    query, key, value = as_autocast(query, key, value)
    options.check(query, key, value)
    return AttentionCall(query, key, value, options).why_not_fused()


attention_reasons.__qualname__ = "attention"  # in the error of a call with other arguments


def served_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    repeats_mask: bool = False,
) -> Tensor | None:
    """`attention` where the C++ part has this call, so that it runs fused; else None.

    For adapters, which would ask and call, and go on with [batch, queries, heads, value_dim], which
    this returns, contiguous. Of a seed, `return_lse` and `fused` the options have the defaults.
    With `repeats_mask` the batches of a mask need only divide those of the query, and example i
    reads entry i modulo their number.
    """
    if torch.compiler.is_compiling():
        of_all = options.scale, options.causal, options.dropout
        pairs = options.bias, options.mask, options.window, options.visible
        limits = *pairs, options.sink, options.softcap
        traced = _traced_attention(query, key, value, *of_all, *limits)
        return None if traced is None else traced.transpose(1, 2)
    if host.calls is None:
        return None
    call = host.calls.attention_of_windows if repeats_mask else host.calls.attention_transposed
    served: Tensor | None = call(query, key, value, *options)
    return served


def served_packed_attention(
    packed: Tensor, options: AttentionOptions, repeats_mask: bool = False
) -> Tensor | None:
    """`served_attention` of query, key and value in one tensor [batch, tokens, 3, heads, head_dim].

    Its gradient is one tensor too, which kernels write. Autograd would make it of three by two
    copies. None in compiled code: the compiler sees the copies and may fuse them.
    """
    if torch.compiler.is_compiling() or host.calls is None:
        return None
    call = host.calls.attention_of_windows if repeats_mask else host.calls.attention_transposed
    served: Tensor | None = call(packed, None, None, *options)
    return served


def serves_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether the C++ part has this call of `attention`, so that it is right and runs fused.

    A quick yes. Without it `why_not_fused` tells.
    """
    if torch.compiler.is_compiling() or host.calls is None:
        return False
    is_served: bool = host.calls.serves_attention(query, key, value, *options)
    return is_served


# Documents that lie one after the other


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenKeywords],
) -> Tensor: ...


@overload
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenKeywords],
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
    softcap: float | None = None,
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
        softcap: as in `attention`.
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
    given = query, key, value, cu_seqlens_q, cu_seqlens_k, bias, causal, window
    tensors, limits = _as_one_batch(*given)
    limits |= {"scale": scale, "softcap": softcap, "sink": sink}
    limits |= {"dropout": dropout, "seed": seed, "fused": fused}
    if return_lse is False:
        return attention(*tensors, **limits).squeeze(0).transpose(0, 1)
    output, lse = attention(*tensors, **limits, return_lse=return_lse)
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0)


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
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    arguments.check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, bias)
    checks.check_flag("causal", causal)
    window = checked_window("window", window)
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


def varlen_reasons(
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
    return attention_reasons(query, key, value, **limits, **options)
