"""megasoftmax in Megatron-core: as the core attention of a layer, or in place of its softmax.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megasoftmax.integrations.megatron import MegasoftmaxCoreAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = MegasoftmaxCoreAttention

`MegasoftmaxCoreAttention` has the constructor and the forward of `DotProductAttention`. What that
class, of Megatron-core 0.16, refuses:
* `attention_bias`. Here it is added to the scaled scores and gets its gradient; a
  `megasoftmax.RelativeBias` is taken too.
* `packed_seq_params`. Here each sequence attends to itself.
* Values of another dimension than keys (multi-latent attention), and a CPU.

What it does otherwise:
* It writes scores and probabilities, [batch, heads, queries, keys]. Here nothing of that size
  exists where attention runs fused.
* `config.window_size` replaces the mask and causality, a side of -1 hides a query's own key, and
  fused there is no window. Here all hold together, and -1 lifts the limit of a side.
* A mask replaces causality, and fused it is the other way round. Here both hold; so pass None for a
  mask that says nothing but causality, which would be read. A call's `attn_mask_type` is honoured.
* A masked score becomes -10000, which others may fall short of, and a query that sees no key gets
  uniform weights. Here what is masked has weight 0, and such a query gets zeros and no gradient.
* The learnable offset of `config.softmax_type` starts alike on every tensor-parallel rank, and
  gradient norms count that of the first. Here it is sharded over heads, as weights are.

Attention runs fused where `megasoftmax.why_not_fused(megasoftmax.attention, ...)` is empty and no
probability is dropped. Elsewhere it is matmul, `megasoftmax.softmax`, dropout and matmul; dropout
draws from Megatron's tensor-parallel generator. `config.masked_softmax_fusion` is about
FusedScaleMaskSoftmax and makes no difference. Context parallelism is refused.

    from megasoftmax.integrations.megatron import apply_megasoftmax_to_megatron

    applied = apply_megasoftmax_to_megatron()  # until applied.undo(), or as a context manager

keeps the layers of Megatron and replaces what they call: `FusedScaleMaskSoftmax`, and the softmax
and top-k of routers. Call it before the model is built. A Megatron that is to stay as it is takes
our kernels from `megasoftmax.integrations.megatron_extensions`.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from megatron.core.fusions import fused_softmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch import Tensor

import megasoftmax
from megasoftmax.functional import as_autocast
from megasoftmax.integrations.products import between_products, runs_fused
from megasoftmax.integrations.replacing import Replaced

# Of a config, what would change results and is not computed here, and the value it must have.
_UNSUPPORTED = {
    "context_parallel_size": 1,
    "qk_clip": False,
    "log_max_attention_logit": False,
    "batch_invariant_mode": False,
}


class MegasoftmaxCoreAttention(MegatronModule):
    """Attention between the projections of a layer, as the core attention of a ModuleSpec.

    Positions are counted from the end: the last query stands at the last key, for causality and
    window alike.

    Args:
        config: of the model. Read are kv_channels, num_attention_heads, attention_dropout,
            window_size with window_attn_skip_freq, softmax_type, apply_query_key_layer_scaling and
            sequence_parallel.
        layer_number: from 1 on.
        attn_mask_type: types with "causal" in their name are causal; a mask holds with every type.
        attention_type: "self" or "cross"; makes no difference.
        attention_dropout: None for that of the config.
        softmax_scale: factor of the scores; None for head_dim ** -0.5.
        cp_comm_type: of context parallelism, unused.
        pg_collection: process groups, of which `tp` is used; None for those of parallel_state.
        k_channels: head_dim of queries and keys; None for config.kv_channels.
        v_channels: head_dim of values; makes no difference.

    Raises:
        ValueError: the config asks for what is not computed here: context parallelism, the largest
            logit (qk_clip, log_max_attention_logit), batch-invariant kernels.
    """

    softmax_offset: Tensor | float | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        for name, expected in _UNSUPPORTED.items():
            actual = getattr(config, name, expected)
            if actual != expected:
                raise ValueError(
                    f"config.{name}: expected {expected} with MegasoftmaxCoreAttention, "
                    f"got {actual}"
                )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        self.attn_mask_type = attn_mask_type
        head_dim = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        # Scores that are written are divided by it, for float16, and the softmax multiplies by it.
        self.score_divisor = max(layer_number, 1) if config.apply_query_key_layer_scaling else 1
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window_size = config.window_size if has_window else None
        self.attention_dropout = torch.nn.Dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        if config.softmax_type == "learnable":
            self.softmax_offset = self._new_offset()
        elif config.softmax_type in ("vanilla", "off-by-one"):
            self.softmax_offset = None if config.softmax_type == "vanilla" else 0.0
        else:
            raise ValueError(
                "config.softmax_type: expected 'vanilla', 'off-by-one' or 'learnable', "
                f"got {config.softmax_type!r}"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | megasoftmax.RelativeBias | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's heads.

        Args:
            query: [queries, batch, heads, head_dim], floating, any strides.
            key, value: [keys, batch, key_heads, head_dim], of the same type; key_heads divides
                heads. Values may have another head_dim.
            attention_mask: bool, True = excluded, broadcastable to [batch, heads, queries, keys].
            attn_mask_type: None for that of the constructor.
            attention_bias: floating, broadcastable to [batch, heads, queries, keys], or a
                RelativeBias of these heads; added to the scaled scores. Differentiable.
            packed_seq_params: of format "thd". Query, key and value then lack the batch dimension,
                [tokens, heads, head_dim], and the result has zeros for tokens of no sequence.
                The lengths are read on the host. Neither a mask nor a bias may be given.

        Returns:
            [queries, batch, heads * head_dim of values]; packed [tokens, heads * head_dim].

        Raises:
            TypeError, ValueError: an argument is not as above; names the argument.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        is_causal = "causal" in mask_type.name
        if packed_seq_params is not None:
            for name, given in (
                ("attention_mask", attention_mask),
                ("attention_bias", attention_bias),
            ):
                if given is not None:
                    raise ValueError(f"{name}: expected None beside packed_seq_params, got one")
            return self._attend_packed(query, key, value, packed_seq_params, is_causal)
        is_mask = isinstance(attention_mask, Tensor) and attention_mask.dtype == torch.bool
        if attention_mask is not None and not is_mask:
            kind = getattr(attention_mask, "dtype", type(attention_mask).__name__)
            raise TypeError(
                f"attention_mask: expected a bool tensor, True = excluded, or None, got {kind}"
            )
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = self._attend(query, key, value, attention_mask, attention_bias, is_causal)
        return output.permute(2, 0, 1, 3).flatten(2).contiguous()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict[str, Any]:
        """The learnable offset, sharded over heads; empty without one."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _new_offset(self) -> torch.nn.Parameter:
        """[heads of this rank], initialised as Megatron initialises weights."""
        config, heads = self.config, self.config.num_attention_heads
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        offset = torch.nn.Parameter(
            torch.empty(
                divide(heads, get_pg_size(self.tp_group)),
                dtype=config.params_dtype,
                device="cpu" if on_cpu else torch.cuda.current_device(),
            )
        )
        set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization and on_cpu:
            of_all_ranks = torch.empty(heads)
            config.init_method(of_all_ranks)
            own = of_all_ranks.chunk(get_pg_size(self.tp_group))[get_pg_rank(self.tp_group)]
            offset.data.copy_(own)
        elif config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                config.init_method(offset)
        return offset

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | megasoftmax.RelativeBias | None,
        is_causal: bool,
    ) -> Tensor:
        """[batch, heads, queries, head_dim] of tensors with heads before tokens."""
        query, key, value = as_autocast(query, key, value)
        options: dict[str, Any] = {
            "scale": self.softmax_scale,
            "mask": mask,
            "bias": bias,
            "causal": is_causal,
            "window": self.window_size,
            "sink": self.softmax_offset,
        }
        if not self._is_dropping() and runs_fused(query, key, value, options):
            return megasoftmax.attention(query, key, value, **options)
        if isinstance(bias, megasoftmax.RelativeBias):
            options["bias"] = bias.dense(query.shape[2], key.shape[2])
        options["scale"] = self.score_divisor
        output, _ = between_products(
            query,
            key,
            value,
            self._multiply,
            lambda scores: self._drop(megasoftmax.softmax(scores, **options, dtype=scores.dtype)),
        )
        return output

    def _multiply(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores, scaled but for what the softmax multiplies by."""
        scale = self.softmax_scale / self.score_divisor
        shape = query.shape[:2]
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
        return scores.unflatten(0, shape)

    def _drop(self, probabilities: Tensor) -> Tensor:
        """Ranks have other heads, and drop other entries: from a generator that differs by rank.

        That is one of the GPU, and under sequence parallelism the whole layer uses it already.
        """
        needs_fork = probabilities.is_cuda and not self.config.sequence_parallel
        if self._is_dropping() and needs_fork:
            with get_cuda_rng_tracker().fork():
                return self.attention_dropout(probabilities)
        return self.attention_dropout(probabilities)

    def _is_dropping(self) -> bool:
        return self.training and self.attention_dropout.p > 0

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, is_causal: bool
    ) -> Tensor:
        """[tokens, heads * head_dim], from a padded batch for each power of two of lengths."""
        buckets = defaultdict(list)
        for spans in _packed_spans(packed, len(query), len(key)):
            buckets[tuple((end - begin).bit_length() for begin, end in spans)].append(spans)

        results: list[Tensor] = []
        source = torch.zeros(len(query), dtype=torch.long)  # of each token, among all results
        found = 1
        for members in buckets.values():
            of_query, of_key = zip(*members, strict=True)
            query_tokens, is_no_query = _aligned(of_query)
            key_tokens, is_no_key = _aligned(of_key)
            output = self._attend(
                _taken(query, query_tokens),
                _taken(key, key_tokens),
                _taken(value, key_tokens),
                is_no_key[:, None, None].to(query.device) if is_no_key.any() else None,
                None,
                is_causal,
            )
            results.append(output.transpose(1, 2).flatten(2).flatten(0, 1))
            places = torch.arange(found, found + query_tokens.numel()).view_as(query_tokens)
            source[query_tokens[~is_no_query]] = places[~is_no_query]
            found += query_tokens.numel()
        like = results[0] if results else query  # autocast may give another type
        zeros = like.new_zeros(1, query.shape[1] * value.shape[2])
        return torch.cat([zeros, *results]).index_select(0, source.to(query.device))


def apply_megasoftmax_to_megatron(*, softmax: bool = True, router: bool = True) -> Replaced:
    """Let the layers of Megatron-core call megasoftmax, until that is undone.

    Models that are built already keep the softmax that they have; routers change at once. What was
    applied before stays as it is and belongs to whoever applied it.

    Args:
        softmax: `megasoftmax.FusedScaleMaskSoftmax` for Megatron's class in `DotProductAttention`
            and in `megatron.core.fusions.fused_softmax`. Where `config.masked_softmax_fusion` is
            False, which is its default, it computes what Megatron's computes, in plain torch.
        router: `topk_routing_with_score_function` through `megasoftmax.softmax_topk`, where the
            score function is a softmax, before top-k or after, and experts are not chosen by
            groups, an own bias, a replay or TransformerEngine: those, and float64, remain
            Megatron's. Of equal logits the first is chosen, where Megatron's leaves it open; and
            where half-precision probabilities are equal after rounding, the logits decide.

    Returns:
        What undoes what this call has done.
    """
    bindings: list[tuple[dict[str, Any], str, Any]] = []
    if softmax:
        name, ours = "FusedScaleMaskSoftmax", megasoftmax.FusedScaleMaskSoftmax
        bindings += [
            (vars(module), name, ours) for module in (dot_product_attention, fused_softmax)
        ]
    if router:
        name = "topk_routing_with_score_function"
        for module in (moe_utils, moe_router):
            bindings.append((vars(module), name, _through_softmax_topk(getattr(module, name))))
    return Replaced(bindings)


# The arguments of the routing function that softmax_topk computes.
_ROUTED = ("logits", "topk", "use_pre_softmax", "scaling_factor", "score_function")


def _through_softmax_topk(original: Callable[..., Any]) -> Callable[..., Any]:
    """The routing function, which calls the original where another option than those is given."""
    if hasattr(original, "is_megasoftmax"):
        return original
    signature = inspect.signature(original)

    @functools.wraps(original)
    def routing(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        is_plain = all(
            value is signature.parameters[name].default
            for name, value in given.items()
            if name not in _ROUTED
        )
        logits = given["logits"]
        if not is_plain or given["score_function"] != "softmax" or logits.dtype == torch.float64:
            return original(*args, **kwargs)
        scores, experts = megasoftmax.softmax_topk(
            logits,
            given["topk"],
            renormalize=not given["use_pre_softmax"],
            dtype=logits.dtype,
        )
        if given["scaling_factor"]:
            scores = scores * given["scaling_factor"]
        probabilities = torch.zeros_like(logits).scatter(1, experts, scores)
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        return probabilities, routing_map

    routing.is_megasoftmax = True  # type: ignore[attr-defined]
    return routing


# Packed sequences, as spans of tokens: (begin, end)


def _packed_spans(
    packed: PackedSeqParams, queries: int, keys: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Those of queries and of keys, sequence by sequence."""
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params: expected qkv_format 'thd', got {packed.qkv_format!r}")
    if packed.local_cp_size not in (None, 1) or get_pg_size(packed.cp_group) > 1:
        raise ValueError("packed_seq_params: expected no context parallelism, got a group of ranks")
    of_queries = _spans("q", packed.cu_seqlens_q, packed.cu_seqlens_q_padded, queries)
    of_keys = _spans("kv", packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded, keys)
    if len(of_queries) != len(of_keys):
        raise ValueError(
            f"packed_seq_params: expected as many sequences of keys as of queries, "
            f"{len(of_queries)}, got {len(of_keys)}"
        )
    return list(zip(of_queries, of_keys, strict=True))


def _spans(
    name: str, cumulative: Tensor | None, padded: Tensor | None, tokens: int
) -> list[tuple[int, int]]:
    """Of each sequence; where they are padded, they begin at what the padded lengths add up to."""
    if cumulative is None:
        raise ValueError(f"packed_seq_params: expected cu_seqlens_{name}, got None")
    sums = cumulative.tolist()
    begins = sums if padded is None else padded.tolist()
    spans = [
        (begin, begin + end - start)
        for begin, (start, end) in zip(begins, pairwise(sums), strict=False)
    ]
    if any(not 0 <= begin <= end <= tokens for begin, end in spans):
        raise ValueError(
            f"packed_seq_params: expected cu_seqlens_{name} that ascend from 0 to at most "
            f"{tokens}, got sequences {spans}"
        )
    return spans


def _aligned(spans: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
    """Tokens of a padded batch whose rows end with their sequences, so that positions do too.

    Returns:
        int64 [sequences, longest], the token of each place, and bool, True = there is none and the
        sequence's first one stands in.
    """
    begins, ends = torch.tensor(spans).unsqueeze(-1).unbind(1)
    tokens = ends - torch.arange(int((ends - begins).max()), 0, -1)
    return torch.maximum(tokens, begins), tokens < begins


def _taken(tensor: Tensor, tokens: Tensor) -> Tensor:
    """[sequences, heads, longest, head_dim] of a tensor [tokens, heads, head_dim]."""
    rows = tensor.index_select(0, tokens.flatten().to(tensor.device))
    return rows.unflatten(0, tokens.shape).transpose(1, 2)
