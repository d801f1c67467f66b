"""megasoftmax as an attention implementation of Hugging Face transformers.

    from megasoftmax.integrations.transformers import register
    register()                                                        # once per process

    model = GPT2LMHeadModel.from_pretrained("gpt2", attn_implementation="megasoftmax")
    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="megasoftmax"))
    model.set_attn_implementation("megasoftmax")                      # a model that exists already

`patching.patch_model` switches a model that exists, with its routers, and back; `by_name` says what
a model gets that asks for a name; `families` has the classes that never ask for an attention
implementation, as Bloom's; `trainer` a callback for Trainer.

"megasoftmax" is `megasoftmax.attention`, which writes neither scores nor probabilities. It gives
way to matmul, `megasoftmax.softmax`, dropout, matmul where
* attention would not run fused, as with float64 on a GPU, nor on a CPU by torch's
  scaled_dot_product_attention, as with dropout,
* probabilities are asked for (`output_attentions=True`),
* GPT-2 wants its scores in float32 (`reorder_and_upcast_attn`), or
* query, key and value are of different types and autocast is off.
`why_not_attention` tells which. "megasoftmax_softmax" always takes these two products.

Attention that runs fused drops inside its kernels, with a seed that torch's generator draws. The
products with a softmax use torch's dropout, which drops other entries at the same seed of the
generator.

Both apply scaling, causality, padding and biases themselves: no scaled copy of the scores is made,
and no [batch, 1, queries, keys] mask for causal, windowed, chunked, packed or bidirectional
attention, padded or not, with any cache. `mask_functions` recognises these.
Keys and values shared by a group of heads are not repeated. T5's relative bias (`position_bias`),
or a float `attention_mask` as Swin's, gets its gradient. Under torch.compile, and for masks that
are not recognised, the mask is the one that transformers builds for its "sdpa" implementation.
Kernels make a block mask of it once per forward pass, which says which tiles they may skip.

What differs from "eager":
* A query without a visible key (a padded position of a left-padded batch) gets zeros and no
  gradient, where "eager" gives uniform weights. Other positions never see it, but a loss can: with
  left padding, give the first real token the label -100 too, for a padded position predicts it.
  Where the embedding of padding is zero too, gradients of Gemma 3n are NaN, as with "sdpa".
* An argument that changes the result and is not supported (a paged cache, sinks per token, indices
  of sparse attention as in DeepSeek V3.2) raises ValueError; none is ignored.
* transformers refuses `config.output_attentions = True` for all but "eager". Ask in the call,
  `model(..., output_attentions=True)`; as with "eager", the result is after dropout. Training GPT-2
  with it, under activation checkpointing that is not reentrant, needs "megasoftmax_softmax".

Packed sequences are recognised by `position_ids`, and only without a cache (`use_cache=False`).
This holds for every implementation.

A model whose layers compute attention themselves raises ValueError when it is made or set to a
name; docs/families.md lists them. The layers of `families` are served. A model that promises no
implementation but "eager" gets the mask of "eager", by the name "megasoftmax_eager_mask" in its
configuration.

With MEGASOFTMAX_DISABLE=1 in the environment, `register` lets both names compute what "eager" does,
by the function in the model's own file. They do not compute what "sdpa" does, because that refuses
or ignores softcap and sinks.
"""

import inspect
from typing import Any, NamedTuple, Self

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

try:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        sdpa_mask,
    )
    from transformers.utils.output_capturing import _active_collector
except ImportError as error:
    raise ImportError(
        f"transformers: expected 5.17 or later, got {transformers.__version__}; "
        "pip install 'megasoftmax[transformers]'"
    ) from error

import megasoftmax
from megasoftmax.autocast import as_autocast
from megasoftmax.biases import ShiftedBias
from megasoftmax.functions.attention import served_attention
from megasoftmax.integrations.by_name import watch
from megasoftmax.integrations.mask_functions import Rule, rule_of
from megasoftmax.integrations.names import NAME, SOFTMAX_NAME, is_disabled, with_eager_mask
from megasoftmax.integrations.products import takes_attention, through_softmax
from megasoftmax.integrations.sharing import can_share, made_once, with_tiles
from megasoftmax.options import AttentionOptions, Ranges, Window
from megasoftmax.tracing import is_traced

# Models that compute with their mask and so need a tensor, but do not ask for one: with packed
# sequences, or, for Doge in transformers 5.17, at all.
_COMPUTE_WITH_MASKS = ("doge", "dots3_note_text", "mistral_large4_text")

# Models that add a bias of their own to the mask, and so need that of "eager".
_ADD_TO_MASKS = ("beit",)

_READ_AS_TENSOR = (
    "this model reads its mask itself and expects a tensor; use attn_implementation="
    f"{with_eager_mask(NAME)!r}, which gives it the mask of 'eager'"
)


class _Padding(NamedTuple):
    excluded: torch.Tensor | None
    """Padding: bool [batch, 1, 1, keys], True = excluded. None: no padding."""
    causal: bool
    """Bottom-right aligned: the last query sees every key that is not padding."""
    keys: int
    """How many keys it is made for."""
    window: Window | None = None
    """The window of `megasoftmax.attention`."""
    visible: Ranges | None = None
    """The ranges of `megasoftmax.attention`, int32 [batch or 1, 1, queries]."""


class PaddingMask(_Padding):
    """A mask without a [batch, 1, queries, keys] tensor.

    A named tuple, because whatever moves or casts nested tensors knows tuples. A layer that
    computes with it as with a tensor gets an error that says what to do.
    """

    def to(self, *arguments: Any) -> Self:
        """Itself: MPT casts its mask to bool."""
        return self

    def contiguous(self) -> Self:
        """Itself: `generate` asks for it, and takes a mask of 4 dimensions for a complete one."""
        return self

    ndim = 4

    @property
    def is_open(self) -> bool:
        """Whether every query sees every key, however many there are."""
        limits = self.excluded, self.window, self.visible
        return not self.causal and all(limit is None for limit in limits)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int | slice):
            return super().__getitem__(index)
        raise TypeError(f"attention_mask[...]: {_READ_AS_TENSOR}")

    def _compute(self, other: Any) -> Any:
        raise TypeError(f"arithmetic with attention_mask: {_READ_AS_TENSOR}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"attention_mask.{name}: {_READ_AS_TENSOR}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"attention_mask in {function.__name__}: {_READ_AS_TENSOR}")


def register() -> None:
    """Make the names known to transformers; calling it twice is harmless.

    From then on a model that is made with one of them, or set to it, is served or refused as a
    whole, see `by_name`. Reads MEGASOFTMAX_DISABLE, as said above.

    Source: AttentionInterface in the documentation of transformers.
    """
    disabled = is_disabled()
    mask = eager_mask if disabled else make_mask
    for name, function in ((NAME, attention_forward), (SOFTMAX_NAME, softmax_attention_forward)):
        for full_name, its_mask in ((name, mask), (with_eager_mask(name), eager_mask)):
            AttentionInterface.register(full_name, _eager_forward if disabled else function)
            AttentionMaskInterface.register(full_name, its_mask)
    watch()


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: PaddingMask | torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PaddingMask | torch.Tensor | None:
    """Makes what attention gets as `attention_mask`; transformers calls this once per forward pass.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: positions of the first query and the first key. A static cache, which
            has unused keys at its end, gives q_offset as a tensor.
        mask_function: (batch, head, query, key) -> visible; see `mask_functions`.
        attention_mask: padding, bool [batch, tokens], True = keep; or None; or what was returned.
        allow_is_causal_skip, allow_is_bidirectional_skip: False if the caller needs a tensor, and
            always for packed sequences.
        use_vmap: whether the mask function holds one of the user's own.
        device: of the mask.
        kwargs: passed on to `sdpa_mask`.

    Returns:
        A PaddingMask for what `mask_functions` recognises. Else what `sdpa_mask` returns:
        bool [batch, 1, q_length, kv_length], True = keep, or None for upper-left causal. BEiT
        adds its bias to the mask, and gets what `eager_mask` returns, float.
    """
    if isinstance(attention_mask, PaddingMask):  # made before, by `generate`
        return attention_mask
    static = isinstance(q_offset, torch.Tensor)
    aligned = not static and bool(q_offset - kv_offset == kv_length - q_length)
    rule = None if use_vmap else _rule_of(mask_function, aligned)
    allowed: bool = False
    model_type = getattr(kwargs.get("config"), "model_type", None)
    if model_type in _COMPUTE_WITH_MASKS:
        allow_is_causal_skip = allow_is_bidirectional_skip = False
    elif rule is not None and rule.sequence is not None:
        allowed = aligned and q_length == kv_length == rule.sequence.shape[1]
    elif rule is not None:
        allowed = allow_is_causal_skip if rule.right == 0 else allow_is_bidirectional_skip
    if rule is not None and allowed and model_type not in _ADD_TO_MASKS:
        excluded = None
        if attention_mask is not None:
            keep = attention_mask[:, kv_offset:]
            keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))  # longer: cropped
            excluded = None if _is_all_true(keep) else ~keep[:, None, None, :]
        visible = rule.visible(q_length, kv_length, q_offset, kv_offset, aligned, device)
        if not aligned:
            return PaddingMask(excluded, False, kv_length, None, visible)
        return PaddingMask(excluded, rule.right == 0, kv_length, rule.window, visible)
    make_tensor = eager_mask if model_type in _ADD_TO_MASKS else sdpa_mask
    return make_tensor(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap,
        device=device,
        **kwargs,
    )


def _is_all_true(keep: torch.Tensor) -> bool:
    """Whether there is no padding. False on a GPU, where asking would wait for it."""
    return keep.is_cpu and not is_traced() and bool(keep.all())


def _rule_of(mask_function: Any, aligned: bool) -> Rule | None:
    """The mask as a Rule, without a tensor; None: it needs one. torch.compile reads no closures."""
    if not torch.compiler.is_compiling():
        return rule_of(mask_function)
    if mask_function is causal_mask_function and aligned:
        return Rule(right=0)
    return Rule() if mask_function is bidirectional_mask_function else None


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PaddingMask | torch.Tensor | None,
    dropout: float = 0.0,
    fused: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as transformers calls it, without writing probabilities where none are needed.

    Args:
        module: the layer. `training` switches dropout on; `is_causal` and GPT-2's
            `reorder_and_upcast_attn` are honoured.
        query: [batch, heads, queries, head_dim], any strides; or, of windows of an image,
            [batch, windows, heads, queries, head_dim].
        key, value: [batch, key_heads, keys, head_dim]; heads is a multiple of key_heads.
        attention_mask: from `make_mask`; or None; or the whole mask as a tensor of 4 dimensions,
            which broadcasts to the scores: bool, True = keep, or float, added to the scores.
        dropout: the probability to drop a probability, from 0 to 1.
        fused: False: `megasoftmax.attention` in plain torch where it could compute this layer.
            None: its kernels where they run.
        kwargs: those of `_read`, `output_attentions`, `upcast_scores`, and whatever else models
            pass; see Raises.

    Returns:
        [..., queries, heads, head_dim], contiguous; None, or the probabilities after dropout,
        [..., heads, queries, keys]. Both in the type of value, or of autocast.

    Raises:
        ValueError: indices, block_indices, cache or sinks is not None; softcap is negative or not
            finite; a mask tensor is not 4-d, or a mask is for another number of keys; dropout is
            not from 0 to 1 where it counts.
    """
    dropout = dropout if module.training else 0.0
    key, value, options = _read(module, query, key, value, attention_mask, dropout, **kwargs)
    if not _against_attention(module, kwargs):
        served = served_attention(query, key, value, options) if fused is None else None
        if served is not None:
            return served, None
        tensors = as_autocast(query, key, value)
        if fused is False or takes_attention(*tensors, options):
            given = options._asdict()
            given["fused"] = fused
            output = megasoftmax.attention(*tensors, **given)
            return output.transpose(-3, -2).contiguous(), None
    upcast = _reorders_and_upcasts(module) or kwargs.get("upcast_scores", False)
    output, probabilities = through_softmax(query, key, value, options, upcast)
    return output.transpose(-3, -2).contiguous(), probabilities


def softmax_attention_forward(
    *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention_forward` that always returns the probabilities, in the type of value."""
    return attention_forward(*args, **(kwargs | {"output_attentions": True}))


def why_not_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PaddingMask | torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> megasoftmax.Reasons:
    """Why `attention_forward` of the same arguments does not run fused attention.

    Returns:
        Every reason; empty where it does. An attribute `runs` says what computes: "fused"; "SDPA",
        where `megasoftmax.attention` takes torch's scaled_dot_product_attention; or "reference",
        for matmul and softmax. `against_sdpa` has the reasons against "SDPA".

    Raises:
        ValueError: as `attention_forward` would.
    """
    dropout = dropout if module.training else 0.0
    key, value, options = _read(module, query, key, value, attention_mask, dropout, **kwargs)
    reasons = tuple(megasoftmax.Reason(*each) for each in _against_attention(module, kwargs))
    tensors = as_autocast(query, key, value)
    dtypes = [str(tensor.dtype) for tensor in tensors]
    if len(set(dtypes)) > 1:
        actual = ", ".join(dtypes)
        reasons += (megasoftmax.Reason("dtype", actual, "one for query, key and value"),)
        return megasoftmax.Reasons(reasons, reasons)
    found = megasoftmax.why_not_fused(megasoftmax.attention, *tensors, **options._asdict())
    return megasoftmax.Reasons((*reasons, *found), (*reasons, *found.against_sdpa))


def _eager_forward(
    module: torch.nn.Module, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What "eager" computes, by the function that the module itself has as its default."""
    _refuse(module, indices=kwargs.get("indices"), block_indices=kwargs.get("block_indices"))
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names
    eager = next((name for name in names if name.endswith("eager_attention_forward")), None)
    if eager is None:
        raise ValueError(
            "MEGASOFTMAX_DISABLE: expected a layer with an eager_attention_forward, got "
            f"{type(module).__name__}; use 'sdpa' for this model"
        )
    return forward.__globals__[eager](module, *args, **kwargs)


_eager_forward.is_eager = True  # type: ignore[attr-defined]


def _refuse(module: torch.nn.Module, **given: Any) -> None:
    """Raise where one of these arguments is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}: not supported by attention implementation {NAME!r}, expected None, "
                f"got {type(value).__name__} from {type(module).__name__}; "
                "use 'eager' for this model"
            )


def _read(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PaddingMask | torch.Tensor | None,
    dropout: float,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | ShiftedBias | None = None,
    s_aux: torch.Tensor | None = None,
    indices: Any = None,
    block_indices: Any = None,
    cache: Any = None,
    sinks: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, AttentionOptions]:
    """The keys and values in use, and the options that attention and softmax have in common.

    Args:
        module, query, key, value, attention_mask: as in `attention_forward`.
        dropout: the probability to drop a probability, where it counts.
        scaling: factor of the scores, head_dim ** -0.5 by default.
        softcap: scaled scores become softcap * tanh(scores / softcap), before masks and biases.
        is_causal: overrides `module.is_causal`. Both count only when there is no mask.
        sliding_window: the tokens that a causal query sees, itself included; else the largest
            |query - key|. Counts only when there is no mask, which else holds the window already.
        position_bias: float, broadcastable to [..., heads, queries, keys], added to the scaled
            scores; or a `ShiftedBias`. Gets a gradient.
        s_aux: [heads], a logit that joins the denominator. Gets a gradient.
        indices, block_indices, cache, sinks: None, else refused: they change the result and are not
            computed here. Models with sparse attention give the keys as indices to all
            implementations but "eager" and "sdpa", which get them in the mask.
        kwargs: whatever else models pass, which changes nothing.
    """
    if not (indices is None and block_indices is None and cache is None and sinks is None):
        _refuse(module, indices=indices, block_indices=block_indices, cache=cache, sinks=sinks)
    queries = query.size(-2)  # reading a shape takes longer
    causal, window, visible = False, None, None
    excluded: Any = None
    bias = None if position_bias is None else _with_dense_rows(position_bias)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and 1 < queries < key.size(-2):  # filling a static cache: its end is unused
            bias = None if bias is None else _of_pairs(bias, query, key)[..., :queries]
            key, value = key[..., :queries, :], value[..., :queries, :]
    elif isinstance(attention_mask, PaddingMask):
        excluded, causal, made_for, window, visible = attention_mask
        if made_for != key.size(-2) and not attention_mask.is_open:
            if not causal or made_for > key.size(-2):
                raise ValueError(
                    f"attention_mask: expected one for {key.size(-2)} keys, got one for {made_for}"
                )
            # Before transformers 5.18 the cache of a window also returns the keys that it keeps
            # for taking drafted tokens back. The last key of the mask is that of the last query,
            # so the mask is for the newest keys.
            bias = None if bias is None else _of_pairs(bias, query, key)[..., -made_for:]
            key, value = key[..., -made_for:, :], value[..., -made_for:, :]
    elif attention_mask.ndim != 4 or attention_mask.size(-1) not in (1, key.size(-2)):
        raise ValueError(
            f"attention_mask: expected 4 dimensions, the last 1 or {key.size(-2)}, got shape "
            f"{tuple(attention_mask.shape)}"
        )
    elif attention_mask.dtype == torch.bool:
        excluded = with_tiles(attention_mask, torch.logical_not)
    else:
        bias = attention_mask if bias is None else _of_pairs(bias, query, key) + attention_mask

    if sliding_window is not None and attention_mask is None:
        window = (sliding_window - 1, 0) if causal else (sliding_window, sliding_window)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    options = AttentionOptions(
        bias, excluded, scale, softcap, causal, window, visible, s_aux, dropout
    )
    return key, value, options


def _against_attention(
    module: torch.nn.Module, kwargs: dict[str, Any]
) -> list[tuple[str, str, str]]:
    """What fused attention does not do: constraint, actual and limit of Reasons."""
    reasons = []
    if _reorders_and_upcasts(module):
        reasons.append(("reorder_and_upcast_attn", "True", "False"))
    if _is_asked_for_probabilities(kwargs):
        reasons.append(("output_attentions", "True", "False"))
    return reasons


def _reorders_and_upcasts(module: torch.nn.Module) -> bool:
    """GPT-2's option to compute scores in float32, whatever the type of query and key."""
    return vars(module).get("reorder_and_upcast_attn", False)  # getattr is slow


def _of_pairs(bias: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    return bias.dense(query.size(-2), key.size(-2)) if isinstance(bias, ShiftedBias) else bias


def _with_dense_rows(bias: Any) -> Any:
    """The bias with contiguous keys, copied once for all layers that share it.

    T5's has heads last in memory. Without this copy each layer would copy, forward and backward.
    """
    if isinstance(bias, ShiftedBias):
        return bias
    if bias.stride(-1) == 1 or 0 in bias.stride() or not can_share(bias):
        return bias
    return made_once(bias, "dense", torch.Tensor.contiguous)


def _is_asked_for_probabilities(kwargs: dict[str, Any]) -> bool:
    """Whether an argument asks for probabilities, or hooks will collect them, as for GPT-2."""
    if kwargs.get("output_attentions"):
        return True
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False  # nothing collects here, and a context variable would break the graph
    collected = _active_collector.get()
    return collected is not None and any("attentions" in name for name in collected)
