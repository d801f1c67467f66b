"""DeBERTa of transformers, v1 and v2, and SEW-D, which has its attention.

Scores are sums of content-to-content, content-to-position and position-to-content. The last two are
gathers from products with the embeddings of distances. The family's own method makes them, one
gather each; here they are a bias of attention, which learns.

Scores are masked before the softmax, where the family writes the lowest number of their type.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2
from transformers.models.sew_d import modeling_sew_d as sew_d

from megasoftmax.integrations.sharing import made_once
from megasoftmax.integrations.subclasses import OrFamily

_Result = tuple[torch.Tensor, torch.Tensor | None]


class MegasoftmaxDebertaAttention(OrFamily, v1.DisentangledSelfAttention):
    """That of v1, which scales queries before all products."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.config = config

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
    ) -> _Result:
        if query_states is not None:
            raise ValueError(
                "query_states: not supported by megasoftmax, expected None for "
                f"{type(self).__name__}; use 'eager' for this model"
            )
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        parts = 1 + len(self.pos_att_type)
        query = query + self.transpose_for_scores(self.q_bias[None, None, :])
        query = query * (query.shape[-1] * parts) ** -0.5
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        bias = None
        if self.relative_attention and rel_embeddings is not None and relative_pos is not None:
            embeddings = self.pos_dropout(rel_embeddings)
            bias = self.disentangled_att_bias(query, key, relative_pos, embeddings, parts)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            made_once(attention_mask, "bool", torch.Tensor.bool),
            dropout=self.dropout.p,
            scaling=1.0,
            position_bias=bias,
            output_attentions=output_attentions,
        )
        return output.flatten(2), probabilities


class _OfTwo(OrFamily):
    """That of v2, and of SEW-D."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        rel_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> _Result:
        layer: Any = self
        heads = layer.num_attention_heads
        asking = hidden_states if query_states is None else query_states
        query, key, value = (  # [batch * heads, tokens, head_dim]
            layer.transpose_for_scores(projected, heads)
            for projected in (
                layer.query_proj(asking),
                layer.key_proj(hidden_states),
                layer.value_proj(hidden_states),
            )
        )
        parts = 1 + sum(kind in layer.pos_att_type for kind in ("c2p", "p2c"))
        bias = None
        if layer.relative_attention:
            bias = layer.disentangled_attention_bias(
                query, key, relative_pos, layer.pos_dropout(rel_embeddings), parts
            )
        in_batches = (-1, heads)
        output, probabilities = function(
            self,
            query.unflatten(0, in_batches),
            key.unflatten(0, in_batches),
            value.unflatten(0, in_batches),
            made_once(attention_mask, "bool", torch.Tensor.bool),
            dropout=_probability(layer.dropout),
            scaling=(query.shape[-1] * parts) ** -0.5,
            position_bias=bias.unflatten(0, in_batches) if isinstance(bias, torch.Tensor) else None,
            output_attentions=output_attentions,
            **kwargs,
        )
        return output.flatten(2), probabilities


class MegasoftmaxDebertaV2Attention(_OfTwo, v2.DisentangledSelfAttention):
    """That of v2."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.config = config


class MegasoftmaxSEWDAttention(_OfTwo, sew_d.DisentangledSelfAttention):
    """That of SEW-D."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.config = config


def _probability(dropout: Any) -> float:
    """Of torch's dropout, or of SEW-D's own."""
    return dropout.p if isinstance(dropout, torch.nn.Dropout) else dropout.drop_prob


DISENTANGLED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    v1.DisentangledSelfAttention: MegasoftmaxDebertaAttention,
    v2.DisentangledSelfAttention: MegasoftmaxDebertaV2Attention,
    sew_d.DisentangledSelfAttention: MegasoftmaxSEWDAttention,
}
