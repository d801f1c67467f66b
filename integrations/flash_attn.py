"""The functions of flash-attn 2, computed by megasoftmax.

    from megasoftmax.integrations.flash_attn import flash_attn_func  # in place of flash_attn

Names, order of arguments, defaults and layouts are those of flash-attn 2.6 and later: tokens come
before heads. Causality and windows are aligned to the last query and the last key, as in flash-attn
from 2.1 on. flash-attn itself is not needed.

What differs from flash-attn:

* Any device and type that `megasoftmax.attention` takes, a CPU, float32 and float64 included. It
  runs fused where that function does.
* `return_attn_probs=True` returns (out, softmax_lse, None): no probabilities. softmax_lse has a
  gradient, and is -inf for a query that sees no key, where flash-attn has +inf.
* `alibi_slopes` get a gradient. No tensor of queries x keys is made of them.
  Packed sequences take slopes [heads], and need one cu_seqlens for queries and keys.
* `deterministic=True` needs torch.use_deterministic_algorithms(True), which decides here, and
  raises without it.
* `dropout_p` draws a seed from torch's generator; the same generator drops other entries than in
  flash-attn.
* `max_seqlen_q` and `max_seqlen_k` make no difference. `block_table` is refused.
* `flash_attn_with_kvcache` and `bert_padding` are not here; importing them says what to use.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691, and the docstrings of flash-attn.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import checks
from megasoftmax.biases import RelativeBias, alibi_bias
from megasoftmax.options import Window, as_number, check_probability, checked_window

_NAMES = {  # of arguments of megasoftmax.attention
    "query": "q",
    "key": "k",
    "value": "v",
    "scale": "softmax_scale",
    "window": "window_size",
    "dropout": "dropout_p",
    "bias.table": "alibi_slopes",
    "bias": "alibi_slopes",
}
_NAMES_OF_KV = {"k": "kv", "v": "kv"}
_ELSEWHERE = {
    "flash_attn_with_kvcache": "write the new keys and values into the cache, and call "
    "megasoftmax.attention with visible=megasoftmax.ranges.lengths(number of valid keys)",
    "bert_padding": "pass padded tensors to megasoftmax.attention with "
    "visible=megasoftmax.ranges.padding(attention_mask)",
}

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of tensors with tokens before heads.

    Args:
        q: [batch, queries, heads, head_dim], of the types of `megasoftmax.attention`, any strides.
        k: [batch, keys, key_heads, head_dim], of the same dtype; key_heads divides heads.
        v: [batch, keys, key_heads, value_dim], of the same dtype.
        dropout_p: from 0 to 1; 0 in evaluation.
        softmax_scale: factor of the products; by default head_dim ** -0.5.
        causal: exclude keys after the query. The last query stands at the last key.
        window_size: (left, right): query i sees key j where
            i + keys - queries - left <= j <= i + keys - queries + right; -1 = no limit on that
            side.
        softcap: above 0, scores become softcap * tanh(scores / softcap) before a bias joins them.
        alibi_slopes: floating, [heads] or [batch, heads]: adds -slope * |i + keys - queries - j|.
        deterministic: the same gradients in every run, see above.
        return_attn_probs: also return the log-sum-exp.

    Returns:
        The output [batch, queries, heads, value_dim], contiguous, in the dtype of q. With
        return_attn_probs a tuple of it, softmax_lse [batch, heads, queries], float32 (float64 for
        float64), and None.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
        NotImplementedError: as `megasoftmax.attention`.
    """
    _check_shapes(q, k, v, "[batch, tokens, heads, dim]")
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    )
    batch, queries, heads, _ = q.shape
    options["bias"] = _alibi(alibi_slopes, ((heads,), (batch, heads)), queries, k.shape[1])
    tensors = (each.transpose(1, 2) for each in (q, k, v))
    found = checks.called(_NAMES, megasoftmax.attention, *tensors, **options)
    if not return_attn_probs:
        return found.transpose(1, 2)
    output, lse = found
    return output.transpose(1, 2), lse, None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Result:
    """Attention within each of several sequences that lie one after the other, without padding.

    Args:
        q: [tokens, heads, head_dim], of the types of `megasoftmax.attention`, any strides.
        k: [key_tokens, key_heads, head_dim], of the same dtype; key_heads divides heads.
        v: [key_tokens, key_heads, value_dim], of the same dtype.
        cu_seqlens_q: int32 or int64 [sequences + 1], where the queries of each sequence begin, and
            where those of the last end. See `megasoftmax.attention_varlen`.
        cu_seqlens_k: likewise for the keys.
        max_seqlen_q, max_seqlen_k: of any value.
        dropout_p, softmax_scale, deterministic: as in `flash_attn_func`.
        causal, window_size: as in `flash_attn_func`, within each sequence.
        softcap: as in `flash_attn_func`.
        alibi_slopes: floating, [heads], as in `flash_attn_func`, within each sequence. Needs the
            same tensor as cu_seqlens_q and as cu_seqlens_k.
        return_attn_probs: also return the log-sum-exp.
        block_table: None.

    Returns:
        The output [tokens, heads, value_dim], contiguous, in the dtype of q. With return_attn_probs
        a tuple of it, softmax_lse [heads, tokens], float32 (float64 for float64), and None.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
        NotImplementedError: as `megasoftmax.attention`.
    """
    _check_shapes(q, k, v, "[tokens, heads, dim]")
    options = _options(
        *(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    )
    if block_table is not None:
        raise ValueError(
            "block_table: expected None, since paged keys are not supported, "
            f"got {type(block_table).__name__}"
        )
    tokens, heads, _ = q.shape
    if alibi_slopes is not None and cu_seqlens_k is not cu_seqlens_q:
        raise ValueError(
            "alibi_slopes: expected None, or the same tensor as cu_seqlens_q and as cu_seqlens_k, "
            "got two tensors"
        )
    options["bias"] = _alibi(alibi_slopes, ((heads,),), tokens, tokens)
    given = q, k, v, cu_seqlens_q, cu_seqlens_k
    found = checks.called(_NAMES, megasoftmax.attention_varlen, *given, **options)
    return (*found, None) if return_attn_probs else found


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Result:
    """`flash_attn_func` of one tensor, [batch, tokens, 3, heads, head_dim].

    The options are those of `flash_attn_func` from dropout_p on, in the same order.
    """
    q, k, v = _unpacked("qkv", qkv, "batch, tokens", 3)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """`flash_attn_func` with keys and values in one tensor, [batch, keys, 2, key_heads, head_dim].

    The options are those of `flash_attn_func` from dropout_p on, in the same order.
    """
    k, v = _unpacked("kv", kv, "batch, tokens", 2)
    return checks.called(_NAMES_OF_KV, flash_attn_func, q, k, v, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Result:
    """`flash_attn_varlen_func` of one tensor, [tokens, 3, heads, head_dim].

    cu_seqlens and max_seqlen are those of queries and keys. The options are those of
    `flash_attn_varlen_func` from dropout_p on, in the same order.
    """
    q, k, v = _unpacked("qkv", qkv, "tokens", 3)
    given = q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    names = {"cu_seqlens_q": "cu_seqlens"}
    return checks.called(names, flash_attn_varlen_func, *given, *options, **named)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Result:
    """`flash_attn_varlen_func` with keys and values in one tensor.

    kv is [key_tokens, 2, key_heads, head_dim]. The options are those of `flash_attn_varlen_func`
    from cu_seqlens_q on, in the same order.
    """
    k, v = _unpacked("kv", kv, "tokens", 2)
    return checks.called(_NAMES_OF_KV, flash_attn_varlen_func, q, k, v, *options, **named)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """What attention, of packed sequences or not, takes."""
    dropout_p = as_number("dropout_p", dropout_p)
    check_probability("dropout_p", dropout_p)
    checks.check_flag("deterministic", deterministic)
    checks.check_flag("return_attn_probs", return_attn_probs)
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic: expected torch.use_deterministic_algorithms(True) beside True"
        )
    return {
        "scale": as_number("softmax_scale", softmax_scale),
        "softcap": softcap,
        "causal": causal,
        "window": checked_window("window_size", window_size),
        "dropout": dropout_p,
        "return_lse": return_attn_probs,
    }


def _alibi(
    slopes: Tensor | None, shapes: tuple[tuple[int, ...], ...], queries: int, keys: int
) -> RelativeBias | None:
    if slopes is None:
        return None
    checks.check_floating("alibi_slopes", slopes)
    if tuple(slopes.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(
            f"alibi_slopes: expected a tensor of shape {expected}, got {tuple(slopes.shape)}"
        )
    return alibi_bias(slopes, queries, keys)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, expected: str) -> None:
    """Tensors of the expected dimensions, [..., tokens, heads, dim]."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_rank(name, tensor, expected.count(",") + 1, expected)
    leading = q.shape[:-3]
    heads, head_dim = q.shape[-2:]
    if k.shape[:-3] != leading or k.shape[-1] != head_dim:
        expected = ", ".join(map(str, (*leading, "tokens", "key_heads", head_dim)))
        raise ValueError(f"k: expected shape [{expected}], as q, got {tuple(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        expected = ", ".join(map(str, (*k.shape[:-1], "dim")))
        raise ValueError(f"v: expected shape [{expected}], as k, got {tuple(v.shape)}")
    key_heads = k.shape[-2]
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise ValueError(f"k: expected heads that divide {heads}, those of q, got {key_heads}")


def _unpacked(name: str, packed: Tensor, leading: str, parts: int) -> tuple[Tensor, ...]:
    """Views of the parts, along the dimension before heads."""
    expected = f"[{leading}, {parts}, heads, dim]"
    checks.check_floating(name, packed)
    checks.check_rank(name, packed, leading.count(",") + 4, expected)
    if packed.shape[-3] != parts:
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(packed.shape)}")
    return packed.unbind(-3)


if not TYPE_CHECKING:  # a name that is misspelt is an error of mypy

    def __getattr__(name: str) -> Any:
        if name in _ELSEWHERE:
            raise AttributeError(f"{__name__} has no {name}: {_ELSEWHERE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
