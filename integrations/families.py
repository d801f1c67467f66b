"""The attention interface for families of transformers that have none: Bloom, Falcon, MPT, and
GPT-J before transformers 5.24; those of `vision` and `deberta`; and subclasses of others, which
pass less to it: Swin of `vision`, and `conformers`.

Their layers compute attention themselves, whatever implementation is asked for. The subclasses here
pass query, key, value and a bias to the function that was asked for, if it is megasoftmax's. In
everything else, and for every other implementation, they do what the family's class does. ALiBi
stays one number per key. `by_name` and `patching.patch_model` put them into models.

Falcon with ALiBi adds it twice in "eager"; here it is added once, as in "sdpa", its default.

To add a family, write the subclass, with `OrFamily` if its forward is replaced as a whole. Add it
to FAMILIES, and the tiny model to tests/models.py, which tests it. Not possible where attention is
not softmax(scale * query . key + bias) value, as with the blocks of a band of Longformer and
BigBird.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon import modeling_falcon
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock

from megasoftmax.integrations.conformers import CONFORMERS
from megasoftmax.integrations.deberta import DISENTANGLED
from megasoftmax.integrations.subclasses import OrFamily, asked_function
from megasoftmax.integrations.vision import VISION


class MegasoftmaxBloomAttention(OrFamily, BloomAttention):
    """Bloom's, with ALiBi as a bias [batch, heads, 1, keys]."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if reason := why_not_replaced(self):
            raise ValueError(f"BloomAttention: {reason}")
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout.p,
            scaling=self.inv_norm_factor,
            position_bias=alibi.view(len(query), self.num_heads, 1, -1),
            output_attentions=output_attentions,
        )
        output = self.dense(output.flatten(2))
        output = torch.nn.functional.dropout(output, self.hidden_dropout, self.training)
        return residual + output, probabilities


class MegasoftmaxFalconAttention(OrFamily, FalconAttention):
    """Falcon's, whose mask holds the ALiBi already."""

    def attend(
        self,
        function: Callable[..., Any],
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        heads = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (tensor.transpose(1, 2) for tensor in heads)
        if alibi is None:
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0 if alibi is None else self.attention_dropout.p,
            scaling=self.inv_norm_factor,
            output_attentions=output_attentions,
        )
        return self.dense(output.flatten(2)), probabilities


class MegasoftmaxGPTJAttention(GPTJAttention):
    """GPT-J's, with scores in float32 where they are written."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        layer_past: Any = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        asked = _Asked(attention_mask, output_attentions)
        return super().forward(hidden_states, layer_past, asked, position_ids, **kwargs)

    def _attn(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: "_Asked"
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        function = asked_function(self.config)
        if function is None:
            return super()._attn(query, key, value, attention_mask.mask)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            attention_mask.mask,
            dropout=self.attn_dropout.p,
            scaling=1 / self.scale_attn,
            output_attentions=attention_mask.probabilities,
            upcast_scores=True,
        )
        return output.transpose(1, 2), probabilities


class MegasoftmaxMptBlock(MptBlock):
    """MPT's, which tells its attention whether probabilities are asked for."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        asked = _Asked(attention_mask, output_attentions)
        return super().forward(hidden_states, position_bias, asked, layer_past, **kwargs)


class MegasoftmaxMptAttention(MptAttention):
    """MPT's, with ALiBi as a bias [heads, 1, keys]."""

    config: PreTrainedConfig

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # A block that is not patched passes the mask alone, which may be a tuple as well.
        is_asked = isinstance(attention_mask, _Asked)
        mask, probabilities_asked = attention_mask if is_asked else (attention_mask, False)
        function = asked_function(self.config)
        if function is None:
            return super().forward(hidden_states, position_bias, past_key_values, mask, **kwargs)
        projected = self.Wqkv(hidden_states)
        if self.clip_qkv:
            projected = projected.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)
            for part in projected.chunk(3, dim=2)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, probabilities = function(
            self,
            query,
            key,
            value,
            mask,
            dropout=self.attn_dropout_p,
            scaling=self.softmax_scale,
            position_bias=position_bias[None, :, :, -key.shape[2] :],
            output_attentions=probabilities_asked,
        )
        return self.out_proj(output.flatten(2)), probabilities


FAMILIES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    BloomAttention: MegasoftmaxBloomAttention,
    FalconAttention: MegasoftmaxFalconAttention,
    MptAttention: MegasoftmaxMptAttention,
    MptBlock: MegasoftmaxMptBlock,
    **({GPTJAttention: MegasoftmaxGPTJAttention} if hasattr(GPTJAttention, "_attn") else {}),
    **CONFORMERS,
    **DISENTANGLED,
    **VISION,
}
"""A class of transformers -> the subclass that takes its place."""


def why_not_replaced(layer: torch.nn.Module) -> str | None:
    """Why a layer of one of the FAMILIES cannot take the subclass; None: it can."""
    if "forward" in vars(layer):
        return "its forward was replaced"
    if isinstance(layer, BloomAttention) and layer.pretraining_tp > 1 and layer.slow_but_exact:
        return "slow_but_exact splits its projection into pretraining_tp parts"
    if getattr(layer, "head_logits_proj", None) is not None:
        return "talking_head mixes the scores of heads"
    return None


class _Asked(NamedTuple):
    """A mask together with a flag that methods of the family would not pass on."""

    mask: Any
    probabilities: bool
