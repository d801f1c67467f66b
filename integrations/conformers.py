"""Speech encoders of transformers with the relative positions of Transformer-XL.

Wav2Vec2-Conformer, Wav2Vec2-BERT and SeamlessM4T with `position_embeddings_type="relative"`, and
Parakeet (FastConformer). All of them call the attention interface, so that these subclasses only
save memory and time: scores of positions are a `ShiftedBias`, where the family copies them three
times. Parakeet writes its mask into that bias; here the mask stays bool.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention
from transformers.models.seamless_m4t.modeling_seamless_m4t import SeamlessM4TConformerSelfAttention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerSelfAttention,
)

from megasoftmax.biases import ShiftedBias
from megasoftmax.integrations.relative_shift import may_recompute, position_scores, recomputed
from megasoftmax.integrations.subclasses import OrFamily, asked_function, in_heads

_Result = tuple[torch.Tensor, torch.Tensor | None]


class _Conformer:
    """Other kinds of positions are left to the family, which calls the interface itself."""

    config: PreTrainedConfig

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        relative_position_embeddings: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> _Result:
        layer: Any = self
        function = asked_function(self.config)
        if (
            function is None
            or layer.position_embeddings_type != "relative"
            or relative_position_embeddings is None
        ):
            return super().forward(  # type: ignore[misc]
                hidden_states, attention_mask, relative_position_embeddings, **kwargs
            )
        query, key, value = (
            in_heads(linear(hidden_states), layer.head_size)
            for linear in (layer.linear_q, layer.linear_k, layer.linear_v)
        )
        positions = in_heads(layer.linear_pos(relative_position_embeddings), layer.head_size)
        scaled = (query + layer.pos_bias_v[:, None]) * layer.scaling
        scores = position_scores(scaled, positions)
        with _saved_as_factors(scores, scaled, positions):
            output, probabilities = function(
                self,
                query + layer.pos_bias_u[:, None],
                key,
                value,
                attention_mask,
                dropout=layer.dropout.p,
                scaling=layer.scaling,
                position_bias=ShiftedBias(scores),
                **kwargs,
            )
        return layer.linear_out(output.flatten(2)), probabilities


class _FastConformer(OrFamily):
    """Its mask is bool, [batch, 1, queries, keys], True = keep."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> _Result:
        layer: Any = self
        query, key, value = (
            in_heads(linear(hidden_states), layer.head_dim)
            for linear in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        positions = in_heads(layer.relative_k_proj(position_embeddings), layer.head_dim)
        scaled = (query + layer.bias_v[:, None]) * layer.scaling
        scores = position_scores(scaled, positions)
        with _saved_as_factors(scores, scaled, positions):
            output, probabilities = function(
                self,
                query + layer.bias_u[:, None],
                key,
                value,
                attention_mask,
                dropout=layer.attention_dropout,
                scaling=layer.scaling,
                position_bias=ShiftedBias(scores),
                **kwargs,
            )
        return layer.o_proj(output.flatten(2)), probabilities


def _saved_as_factors(
    scores: torch.Tensor, scaled: torch.Tensor, positions: torch.Tensor
) -> AbstractContextManager[None]:
    """Saves the factors of scores for the backward pass, which are small, and not the scores.

    They have twice the size of all probabilities. One more product makes them again, without
    autocast.
    """
    if not scores.requires_grad or not may_recompute():
        return nullcontext()
    scaled, positions = (each.detach().to(scores.dtype) for each in (scaled, positions))
    return recomputed(scores, lambda: position_scores(scaled, positions))


class MegasoftmaxWav2Vec2ConformerSelfAttention(_Conformer, Wav2Vec2ConformerSelfAttention):
    """Wav2Vec2-Conformer's."""


class MegasoftmaxWav2Vec2BertSelfAttention(_Conformer, Wav2Vec2BertSelfAttention):
    """Wav2Vec2-BERT's."""


class MegasoftmaxSeamlessM4TConformerSelfAttention(_Conformer, SeamlessM4TConformerSelfAttention):
    """That of SeamlessM4T's speech encoder."""


class MegasoftmaxParakeetEncoderAttention(_FastConformer, ParakeetEncoderAttention):
    """Parakeet's."""


CONFORMERS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    Wav2Vec2ConformerSelfAttention: MegasoftmaxWav2Vec2ConformerSelfAttention,
    Wav2Vec2BertSelfAttention: MegasoftmaxWav2Vec2BertSelfAttention,
    ParakeetEncoderAttention: MegasoftmaxParakeetEncoderAttention,
    SeamlessM4TConformerSelfAttention: MegasoftmaxSeamlessM4TConformerSelfAttention,
}
