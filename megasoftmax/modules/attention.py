"""Attention with what a layer learns beside its projections."""

from typing import Any

import torch
from torch import Tensor

from megasoftmax import biases, checks
from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.dispatch import Reasons
from megasoftmax.functions.attention import attention
from megasoftmax.functions.why_not_fused import why_not_fused
from megasoftmax.masks import TileMask
from megasoftmax.options import (
    Ranges,
    Window,
    as_number,
    check_attention_bias,
    check_heads,
    check_probability,
    check_scale,
    check_softcap,
    checked_window,
)


class FusedAttention(torch.nn.Module):
    """`megasoftmax.attention` with what a layer learns beside its projections.

    It takes projected queries, keys and values and returns what the output projection takes:

        output = attention(query, key, value).transpose(-3, -2).flatten(-2)  # a view: [b, m, h dv]

    It runs fused where that function does. Positions are counted from the end:
    the last query stands at the last key, for causality, window and the biases alike, so
    that decoding with a cache needs no argument.

    Args:
        heads: of the query.
        scale: factor of the scores; None for head_dim ** -0.5.
        softcap: bounds the scaled scores, as in `megasoftmax.attention`; None or 0 for none.
        causal: exclude keys after the query.
        window: (left, right), -1 = no limit on that side: left tokens before a query, and right
            tokens after it, besides its own. None for no window.
        sink: learn a logit per head that joins the denominator: parameter `sink` [heads], 0 at
            first, which is the off-by-one softmax.
        relative_buckets: learn the relative bias of T5 over that many buckets of distances:
            parameter `relative_bias` [relative_buckets, heads], 0 at first; it takes the weight of
            T5's `relative_attention_bias`. Unless causal, half of the buckets are for later keys.
        max_distance: from here on, all distances share the last bucket.
        alibi_slopes: [heads], see `megasoftmax.biases.alibi_slopes`: subtract slope * distance. A
            Parameter is learnt, another tensor is a buffer. Not beside relative_buckets.
        dropout: in training, the probability that a key counts for nothing in the sum of values of
            a query, as in `megasoftmax.attention`. torch's generator decides.
        device, dtype: of the parameters `sink` and `relative_bias`; by default torch's.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
    """

    sink: torch.nn.Parameter | None
    relative_bias: torch.nn.Parameter | None
    alibi_slopes: Tensor | None

    def __init__(
        self,
        heads: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        causal: bool = False,
        window: Window | None = None,
        sink: bool = False,
        relative_buckets: int | None = None,
        max_distance: int = 128,
        alibi_slopes: Tensor | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = checks.checked_integer("heads", heads, 1)
        checks.check_flag("causal", causal)
        checks.check_flag("sink", sink)
        if relative_buckets is not None:
            least = 2 if causal else 4
            relative_buckets = checks.checked_integer("relative_buckets", relative_buckets, least)
        if alibi_slopes is not None:
            checks.check_floating("alibi_slopes", alibi_slopes)
            checks.check_rank("alibi_slopes", alibi_slopes, 1, f"[{heads}]")
            if len(alibi_slopes) != heads:
                raise ValueError(f"alibi_slopes: expected [{heads}], got [{len(alibi_slopes)}]")
            if relative_buckets is not None:
                raise ValueError("relative_buckets, alibi_slopes: expected at most one, got both")
        dropout = as_number("dropout", dropout)
        check_probability("dropout", dropout)
        scale = as_number("scale", scale)
        if scale is not None:
            check_scale("scale", scale, torch.float64)
        softcap = as_number("softcap", softcap)
        check_softcap("softcap", softcap, torch.float64)
        device = checks.checked_device(device)
        checks.check_dtype(dtype)
        self.heads = heads
        self.scale = scale
        self.softcap = softcap
        self.causal = causal
        self.window = checked_window("window", window)
        self.max_distance = checks.checked_integer("max_distance", max_distance, 1)
        self.dropout = dropout
        self.sink = self.relative_bias = None
        if sink:
            self.sink = torch.nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        if relative_buckets is not None:
            weight = torch.empty(relative_buckets, heads, device=device, dtype=dtype)
            self.relative_bias = torch.nn.Parameter(weight)
        if isinstance(alibi_slopes, torch.nn.Parameter):
            self.alibi_slopes = alibi_slopes
        else:
            self.register_buffer("alibi_slopes", alibi_slopes)
        self.reset_parameters()
        self._own_bias(1, 1)  # refuses a max_distance that is too small for the buckets

    def reset_parameters(self) -> None:
        """Set what is learnt to 0, but for slopes."""
        for parameter in (self.sink, self.relative_bias):
            if parameter is not None:
                torch.nn.init.zeros_(parameter)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | RelativeBias | None = None,
        mask: Tensor | TileMask | None = None,
        visible: Ranges | None = None,
    ) -> Tensor:
        """Attention of heads that come before the tokens: [..., heads, tokens, head_dim].

        Args:
            query: [..., heads, m, d], float16, bfloat16, float32 or float64; any strides.
            key, value: [..., key_heads, n, d] and [..., key_heads, n, dv], of the same type and
                leading dimensions; key_heads divides heads.
            bias: added to the scaled scores, see `megasoftmax.attention`; differentiable. Where
                the module has a bias of its own the sum of the two is written: [heads, m, n]
                values, unless this one is a RelativeBias too, and no ShiftedBias.
            mask: bool, True = excluded, broadcastable to [..., heads, m, n]; or a `TileMask`.
            visible: (first, end), the range of keys that each query sees, broadcastable to
                [..., heads, m], as in `megasoftmax.attention`.

        Returns:
            [..., heads, m, dv] of the type of query; in memory [..., m, heads, dv].

        Raises:
            TypeError, ValueError: an argument is not as above; names the argument.
        """
        options = self._options(query, key, value, bias, mask, visible)
        return attention(query, key, value, **options)

    def why_not_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | RelativeBias | None = None,
        mask: Tensor | TileMask | None = None,
        visible: Ranges | None = None,
    ) -> Reasons:
        """Why `forward` of the same arguments would not run fused; empty: it would.

        Raises:
            TypeError, ValueError: as `forward` would.
        """
        options = self._options(query, key, value, bias, mask, visible)
        return why_not_fused(attention, query, key, value, **options)

    def extra_repr(self) -> str:
        options = {
            "scale": self.scale,
            "softcap": self.softcap or None,
            "causal": self.causal or None,
            "window": self.window,
            "sink": None if self.sink is None else True,
            "relative_buckets": None if self.relative_bias is None else len(self.relative_bias),
            "max_distance": None if self.relative_bias is None else self.max_distance,
            "alibi": None if self.alibi_slopes is None else True,
            "dropout": self.dropout or None,
        }
        shown = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ", ".join([str(self.heads), *shown])

    def _options(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | RelativeBias | None,
        mask: Tensor | TileMask | None,
        visible: Ranges | None,
    ) -> dict[str, Any]:
        """The keyword arguments of `megasoftmax.attention`."""
        checks.check_floating("query", query)
        if query.dim() < 3 or query.shape[-3] != self.heads:
            raise ValueError(
                f"query: expected [..., {self.heads}, queries, head_dim], "
                f"got shape {tuple(query.shape)}"
            )
        *_, keys = check_heads(query, key, value)
        return {
            "bias": self._sum_of_biases(query, keys, bias),
            "mask": mask,
            "scale": self.scale,
            "softcap": self.softcap,
            "causal": self.causal,
            "window": self.window,
            "visible": visible,
            "sink": self.sink,
            "dropout": self.dropout if self.training else 0.0,
        }

    def _own_bias(self, queries: int, keys: int) -> RelativeBias | None:
        if self.relative_bias is not None:
            return biases.t5_bias(
                self.relative_bias,
                queries,
                keys,
                bidirectional=not self.causal,
                max_distance=self.max_distance,
            )
        if self.alibi_slopes is not None:
            return biases.alibi_bias(self.alibi_slopes, queries, keys)
        return None

    def _sum_of_biases(
        self, query: Tensor, keys: int, bias: Tensor | RelativeBias | None
    ) -> Tensor | RelativeBias | None:
        queries = query.shape[-2]
        own = self._own_bias(queries, keys)
        if own is None or bias is None:
            return bias if own is None else own
        check_attention_bias(bias, query, (*query.shape[:-1], keys))
        if isinstance(bias, ShiftedBias):
            bias = bias.dense(queries, keys)
        if isinstance(bias, RelativeBias):
            return RelativeBias(own.table + bias.table)
        return own.dense(queries, keys) + bias
