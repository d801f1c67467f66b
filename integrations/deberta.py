"""DeBERTa of transformers, v1 and v2, and SEW-D, which has the attention of v2.

Scores are sums of content-to-content, content-to-position and position-to-content. The last two are
products with the embeddings of distances, which are fewer than the pairs of tokens. One gather each
makes a bias of them, which learns. Where the family divides what it gathered, here queries and
embeddings are scaled. All layers share the indices of the gathers.

Source:
    He et al., https://arxiv.org/abs/2006.03654, equation 4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2
from transformers.models.sew_d import modeling_sew_d as sew_d

from megasoftmax.integrations.sharing import made_once
from megasoftmax.integrations.subclasses import OrFamily, in_heads

_Result = tuple[Tensor, Tensor | None]


class MegasoftmaxDebertaAttention(OrFamily, v1.DisentangledSelfAttention):
    """That of v1."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> _Result:
        if query_states is not None:
            raise ValueError(
                "query_states: not supported by megasoftmax, expected None for "
                f"{type(self).__name__}; use 'eager' for this model"
            )
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)
        query = query + self.transpose_for_scores(self.q_bias[None, None, :])
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        size, kinds = query.shape[3], self.pos_att_type
        scale = (size * (1 + len(kinds))) ** -0.5
        bias = None
        if self.relative_attention and rel_embeddings is not None and relative_pos is not None:
            most = self.max_relative_positions
            span = min(max(query.shape[2], key.shape[2]), most)
            embeddings = self.pos_dropout(rel_embeddings)[None, most - span : most + span]
            bias = _bias(
                query,
                key,
                in_heads(self.pos_proj(embeddings), size) if "c2p" in kinds else None,
                in_heads(self.pos_q_proj(embeddings), size) if "p2c" in kinds else None,
                relative_pos,
                scale,
            )
        output, probabilities = function(
            self,
            query,
            key,
            value,
            made_once(attention_mask, "bool", Tensor.bool),
            dropout=self.dropout.p,
            scaling=scale,
            position_bias=bias,
            output_attentions=output_attentions,
        )
        return output.flatten(2), probabilities


class _OfTwo(OrFamily):
    """That of v2 and of SEW-D."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
        **kwargs: Any,
    ) -> _Result:
        layer: Any = self
        size = layer.attention_head_size
        asking = hidden_states if query_states is None else query_states
        query = in_heads(layer.query_proj(asking), size)
        key = in_heads(layer.key_proj(hidden_states), size)
        value = in_heads(layer.value_proj(hidden_states), size)
        kinds = [kind for kind in ("c2p", "p2c") if kind in layer.pos_att_type]
        scale = (size * (1 + len(kinds))) ** -0.5
        bias = None
        if layer.relative_attention and relative_pos is not None and rel_embeddings is not None:
            embeddings = layer.pos_dropout(rel_embeddings)[None, : 2 * layer.pos_ebd_size]
            shares = layer.share_att_key
            position_keys = position_queries = None
            if "c2p" in kinds:
                projection = layer.key_proj if shares else layer.pos_key_proj
                position_keys = in_heads(projection(embeddings), size)
            if "p2c" in kinds:
                projection = layer.query_proj if shares else layer.pos_query_proj
                position_queries = in_heads(projection(embeddings), size)
            bias = _bias(query, key, position_keys, position_queries, relative_pos, scale)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            made_once(attention_mask, "bool", Tensor.bool),
            dropout=_probability(layer.dropout),
            scaling=scale,
            position_bias=bias,
            output_attentions=output_attentions,
            **kwargs,
        )
        return output.flatten(2), probabilities


class MegasoftmaxDebertaV2Attention(_OfTwo, v2.DisentangledSelfAttention):
    """That of v2."""


class MegasoftmaxSEWDAttention(_OfTwo, sew_d.DisentangledSelfAttention):
    """That of SEW-D."""


def _probability(dropout: Any) -> float:
    """Of torch's dropout, or of SEW-D's own."""
    return dropout.p if isinstance(dropout, torch.nn.Dropout) else dropout.drop_prob


def _bias(
    query: Tensor,
    key: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    relative: Tensor,
    scale: float,
) -> Tensor | None:
    """Content-to-position plus position-to-content, [batch, heads, queries, keys], scaled.

    Args:
        query, key: [batch, heads, tokens, head_dim], equally many tokens, not scaled.
        position_keys, position_queries: of each distance, [1, heads, 2 * span, head_dim].
        relative: query - key or its bucket, integers [1, tokens, tokens], clamped to the span.
        scale: of the scores.
    """
    terms = []
    if position_keys is not None:
        terms.append(_gathered(query, position_keys * scale, relative, 1))
    if position_queries is not None:
        # With queries and keys in each other's place.
        terms.append(_gathered(key, position_queries * scale, relative, -1).transpose(2, 3))
    return sum(terms[1:], terms[0]) if terms else None


def _gathered(content: Tensor, positions: Tensor, relative: Tensor, sign: int) -> Tensor:
    """Scores of tokens and distances, at the distance of each pair of tokens."""
    span = positions.shape[2] // 2

    def make_index(relative: Tensor) -> Tensor:
        distance = relative.long().view(-1, 1, *relative.shape[-2:])
        return (sign * distance + span).clamp(0, 2 * span - 1)

    index = made_once(relative, f"distances {sign * span}", make_index)
    scores = torch.matmul(content, positions.transpose(2, 3))
    return scores.gather(3, index.expand(*scores.shape[:2], -1, -1))


DISENTANGLED: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    v1.DisentangledSelfAttention: MegasoftmaxDebertaAttention,
    v2.DisentangledSelfAttention: MegasoftmaxDebertaV2Attention,
    sew_d.DisentangledSelfAttention: MegasoftmaxSEWDAttention,
}
