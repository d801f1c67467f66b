"""The core attention of Megatron-core's layers."""

import functools
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch import Tensor

import megasoftmax
from megasoftmax import checks
from megasoftmax.autocast import as_autocast
from megasoftmax.functions.calls import new_seed
from megasoftmax.integrations.megatron.packing import attend_one_by_one, documents_of, one_batch
from megasoftmax.integrations.products import between_products, runs_fused, takes_attention
from megasoftmax.options import AttentionOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Fields of a config that change results and are not computed here, and the value they must have.
_UNSUPPORTED = {"qk_clip": False, "log_max_attention_logit": False, "batch_invariant_mode": False}


class MegasoftmaxCoreAttention(MegatronModule):
    """Attention between the projections of a layer, as the core attention of a ModuleSpec.

    Positions are counted from the end: the last query stands at the last key, for causality and
    window alike.

    Args:
        config: of the model. Read are kv_channels, num_attention_heads, attention_dropout,
            window_size with window_attn_skip_freq, softmax_type, apply_query_key_layer_scaling,
            sequence_parallel and context_parallel_size.
        layer_number: from 1 on.
        attn_mask_type: types with "causal" in their name are causal; a mask holds with every type.
        attention_type: "self" or "cross"; makes no difference.
        attention_dropout: None for that of the config.
        softmax_scale: factor of the scores; None for head_dim ** -0.5.
        cp_comm_type: with context parallelism None or "p2p": keys and values go round in a ring.
        pg_collection: process groups. `tp` is used, and `cp` with context parallelism; None for
            those of parallel_state.
        k_channels: head_dim of queries and keys; None for config.kv_channels.
        v_channels: head_dim of values; makes no difference.

    Raises:
        ValueError: the config asks for what is not computed here: the largest logit (qk_clip,
            log_max_attention_logit), batch-invariant kernels; or with context parallelism
            cp_comm_type is another one, or pg_collection lacks `cp`.
    """

    softmax_offset: Tensor | None

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
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group = pg_collection.tp
        self.cp_group = _group_of_ring(config, cp_comm_type, pg_collection)
        self.attn_mask_type = attn_mask_type
        head_dim = config.kv_channels if k_channels is None else k_channels
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        # Of configurations that have it, such as NeMo's of Gemma 2.
        self.softcap = getattr(config, "attn_logit_softcapping", None)
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
        elif config.softmax_type == "off-by-one":
            # No part of checkpoints, as in Megatron, but a buffer, which its inference reads.
            self.register_buffer("softmax_offset", self._empty_offset().zero_(), persistent=False)
        elif config.softmax_type == "vanilla":
            self.softmax_offset = None
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

        With context parallelism the tokens are this rank's, as Megatron cuts them: parts r and
        2 * ranks - 1 - r of 2 * ranks. A mask or bias has this rank's queries and the keys of the
        whole sequence.

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
                Fused the lengths stay on the device; elsewhere the host reads them. Neither a
                mask nor a bias may be given, and there must be no context parallelism.

        Returns:
            [queries, batch, heads * head_dim of values]; packed [tokens, heads * head_dim].

        Raises:
            TypeError, ValueError: an argument is not as above; names the argument.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        is_causal = "causal" in mask_type.name
        if packed_seq_params is not None:
            if self.cp_group is not None:
                raise ValueError(
                    "packed_seq_params: expected None with config.context_parallel_size above 1, "
                    "got one: Megatron cuts each document into parts of its own, and "
                    "ring_attention has no such order"
                )
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

    def why_not_fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | megasoftmax.RelativeBias | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> megasoftmax.Reasons:
        """Why `forward` of the same arguments would not run fused; empty: it would.

        With context parallelism: the block of this rank's own keys, without mask and bias.

        Raises:
            TypeError, ValueError: an argument does not fit; names it as `megasoftmax.attention`.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        options = self._settings("causal" in mask_type.name)
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            if self.cp_group is None:
                options |= {"mask": attention_mask, "bias": attention_bias}
        else:
            query, key, value = (one_batch(tensor) for tensor in (query, key, value))
        query, key, value = as_autocast(query, key, value)
        return megasoftmax.why_not_fused(megasoftmax.attention, query, key, value, **options)

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

    def _empty_offset(self) -> Tensor:
        """[heads of this rank], where Megatron initialises weights."""
        config = self.config
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        return torch.empty(
            divide(config.num_attention_heads, get_pg_size(self.tp_group)),
            dtype=config.params_dtype,
            device="cpu" if on_cpu else torch.cuda.current_device(),
        )

    def _new_offset(self) -> torch.nn.Parameter:
        """The learnable offset, initialised as Megatron initialises weights."""
        config, heads = self.config, self.config.num_attention_heads
        offset = torch.nn.Parameter(self._empty_offset())
        on_cpu = offset.is_cpu
        set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization and on_cpu:
            of_all_ranks = torch.empty(heads, dtype=torch.float32, device="cpu")
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
        options = self._options(is_causal, query.device) | {"mask": mask, "bias": bias}
        if self.cp_group is not None:
            output, _ = megasoftmax.ring_attention(
                query, key, value, group=self.cp_group, order="zigzag", **options
            )
            return output
        if takes_attention(query, key, value, AttentionOptions(**options)):
            if mask is not None:
                # Forward and backward share its block mask; layers have no pass to share.
                options["mask"] = megasoftmax.TileMask(mask)
            return megasoftmax.attention(query, key, value, **options)
        if isinstance(bias, megasoftmax.RelativeBias):
            options["bias"] = bias.dense(query.shape[2], key.shape[2])
        options["scale"] = self.score_divisor
        output, _ = between_products(
            query,
            key,
            value,
            self._multiply,
            lambda scores: megasoftmax.softmax(scores, **options, dtype=scores.dtype),
        )
        return output

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, is_causal: bool
    ) -> Tensor:
        """[tokens, heads * head_dim] of tensors [tokens, heads, head_dim]."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            checks.check_rank(name, tensor, 3, "[tokens, heads, dim] beside packed_seq_params")
        query, key, value = as_autocast(query, key, value)
        queries, keys = len(query), len(key)
        batch = one_batch(query), one_batch(key), one_batch(value)
        kept = AttentionOptions(
            scale=self.softmax_scale, softcap=self.softcap, dropout=self._dropout
        )
        if runs_fused(*batch, kept):
            documents = documents_of(packed, queries, keys, query.device)
            options = self._options(is_causal, query.device)
            return megasoftmax.attention_varlen(query, key, value, *documents, **options).flatten(1)
        documents = documents_of(packed, queries, keys, "cpu")
        attend = functools.partial(self._attend, mask=None, bias=None, is_causal=is_causal)
        return attend_one_by_one(attend, query, key, value, *documents)

    def _settings(self, is_causal: bool) -> dict[str, Any]:
        """The options of every call of attention, without a seed."""
        return {
            "scale": self.softmax_scale,
            "softcap": self.softcap,
            "causal": is_causal,
            "window": self.window_size,
            "sink": self.softmax_offset,
            "dropout": self._dropout,
        }

    def _options(self, is_causal: bool, device: torch.device) -> dict[str, Any]:
        """The settings; a new seed where attention drops."""
        options = self._settings(is_causal)
        if options["dropout"] > 0:
            options["seed"] = self._new_seed(device)
        return options

    @property
    def _dropout(self) -> float:
        return self.attention_dropout.p if self.training else 0.0

    def _multiply(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores, scaled except for the factor that the softmax applies."""
        scale = self.softmax_scale / self.score_divisor
        shape = query.shape[:2]
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
        return scores.unflatten(0, shape)

    def _new_seed(self, device: torch.device) -> Tensor:
        """A seed by a generator that differs by rank, because ranks have different heads.

        That is one of the GPU, and under sequence parallelism the whole layer uses it already.
        """
        if device.type == "cuda" and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                return new_seed(device)
        return new_seed(device)


def _group_of_ring(
    config: TransformerConfig, cp_comm_type: str | None, groups: ProcessGroupCollection
) -> "ProcessGroup | None":
    """The ranks that share a sequence; None without context parallelism."""
    ranks = config.context_parallel_size
    if ranks == 1:
        return None
    if cp_comm_type not in (None, "p2p"):
        raise ValueError(
            "cp_comm_type: expected None or 'p2p' with MegasoftmaxCoreAttention, "
            f"got {cp_comm_type!r}"
        )
    group = getattr(groups, "cp", None)
    if get_pg_size(group) != ranks:
        raise ValueError(
            f"pg_collection.cp: expected a group of config.context_parallel_size {ranks} ranks, "
            f"got {get_pg_size(group)}"
        )
    return group
