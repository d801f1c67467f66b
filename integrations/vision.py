"""Vision models of transformers whose attention has a bias that learns, one for all windows.

Swin, Swin V2, Swin2SR, DonutSwin, MaskFormer's Swin and CLAP's audio encoder attend in windows: see
`windows` for what they compute, and for what becomes of their masks of -100. Swin calls the
attention interface with the sum of bias and mask, which this avoids; the others have no interface.
Data2VecVision attends to all tokens, as BEiT does, which needs no subclass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.clap.modeling_clap import ClapAudioSelfAttention
from transformers.models.data2vec.modeling_data2vec_vision import (
    Data2VecVisionSdpaSelfAttention,
    Data2VecVisionSelfAttention,
)
from transformers.models.donut.modeling_donut_swin import DonutSwinSelfAttention
from transformers.models.maskformer.modeling_maskformer_swin import MaskFormerSwinSelfAttention
from transformers.models.swin.modeling_swin import SwinAttention
from transformers.models.swin2sr.modeling_swin2sr import Swin2SRSelfAttention
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from megasoftmax.integrations.subclasses import OrFamily, in_heads
from megasoftmax.integrations.windows import (
    bias_of_table,
    continuous_bias,
    cosine,
    in_windows,
    visible_in_windows,
)

_Function = Callable[..., Any]
_Result = tuple[Tensor, Tensor | None]


class MegasoftmaxSwinAttention(OrFamily, SwinAttention):
    """Swin's."""

    def attend(
        self,
        function: _Function,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> _Result:
        projections = self.q_proj, self.k_proj, self.v_proj
        output, probabilities = _attend(
            function,
            self,
            [in_heads(project(hidden_states), self.head_dim) for project in projections],
            self.relative_position_bias()[0],
            attention_mask,
            dropout=self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output), probabilities


class _Windows(OrFamily):
    """Layers that have the names of an earlier Swin."""

    def attend(
        self,
        function: _Function,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor | None, ...]:
        layer: Any = self
        query, key, value = (
            in_heads(linear(hidden_states), layer.attention_head_size)
            for linear in (layer.query, layer.key, layer.value)
        )
        query, key, scaling, bias = self._scaled(query, key)
        output, probabilities = _attend(
            function,
            self,
            (query, key, value),
            bias,
            attention_mask,
            dropout=layer.dropout.p,
            scaling=scaling,
            output_attentions=bool(output_attentions),
        )
        return (output, probabilities) if output_attentions else (output,)

    def _scaled(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float, Tensor]:
        """Query, key, the scale of their products, and the bias [heads, tokens, tokens]."""
        layer: Any = self
        bias = bias_of_table(layer.relative_position_bias_table, layer.relative_position_index)
        return query, key, layer.attention_head_size**-0.5, bias


class _CosineWindows(_Windows):
    """Those of Swin V2: the cosine of query and key, times a scale that learns."""

    def _scaled(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float, Tensor]:
        layer: Any = self
        table = layer.continuous_position_bias_mlp(layer.relative_coords_table)
        bias = continuous_bias(table, layer.relative_position_index)
        return *cosine(query, key, layer.logit_scale), 1.0, bias


class MegasoftmaxSwinv2Attention(_CosineWindows, Swinv2SelfAttention):
    """That of Swin V2."""


class MegasoftmaxSwin2SRAttention(_CosineWindows, Swin2SRSelfAttention):
    """That of Swin2SR."""


class MegasoftmaxDonutSwinAttention(_Windows, DonutSwinSelfAttention):
    """DonutSwin's."""


class MegasoftmaxMaskFormerSwinAttention(_Windows, MaskFormerSwinSelfAttention):
    """MaskFormer's Swin's."""


class MegasoftmaxClapAudioAttention(_Windows, ClapAudioSelfAttention):
    """That of CLAP's audio encoder, a Swin of spectrograms."""


class _AllTokens(OrFamily):
    """Data2VecVision's, one for every implementation."""

    def attend(
        self,
        function: _Function,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: Any = None,
    ) -> tuple[Tensor | None, ...]:
        layer: Any = self
        query, key, value = (
            in_heads(linear(hidden_states), layer.attention_head_size)
            for linear in (layer.query, layer.key, layer.value)
        )
        bias = relative_position_bias
        if layer.has_relative_position_bias:
            window = tuple(size // layer.config.patch_size for size in resolution)
            own = layer.relative_position_bias(
                window, interpolate_pos_encoding, dim_size=hidden_states.shape[1]
            )
            bias = own if bias is None else own + bias
        output, probabilities = function(
            self,
            query,
            key,
            value,
            None,
            dropout=layer.dropout.p,
            scaling=layer.attention_head_size**-0.5,
            is_causal=False,
            position_bias=bias,
            output_attentions=output_attentions,
        )
        return (output.flatten(2), probabilities) if output_attentions else (output.flatten(2),)


class MegasoftmaxData2VecVisionAttention(_AllTokens, Data2VecVisionSelfAttention):
    """Made for "eager" and for megasoftmax."""


class MegasoftmaxData2VecVisionSdpaAttention(_AllTokens, Data2VecVisionSdpaSelfAttention):
    """Made for "sdpa", which `patch_model` meets."""


def _attend(
    function: _Function,
    layer: Any,
    tensors: Sequence[Tensor],
    bias: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> _Result:
    """The output [batch * windows, tokens, channels], and probabilities.

    Args:
        function, layer, options: of the attention interface.
        tensors: query, key and value [batch * windows, heads, tokens, head_dim].
        bias: [heads, tokens, tokens].
        mask: 0 and -100, [windows, tokens, tokens]; None: windows are not shifted.
    """
    keep = None
    if mask is not None:
        keep = visible_in_windows(mask)
        tensors = [in_windows(tensor, mask) for tensor in tensors]
    output, probabilities = function(
        layer, *tensors, keep, position_bias=bias, is_causal=False, **options
    )
    if mask is not None:
        output = output.flatten(0, 1)
        probabilities = None if probabilities is None else probabilities.flatten(0, 1)
    return output.flatten(2), probabilities


VISION: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    SwinAttention: MegasoftmaxSwinAttention,
    Swinv2SelfAttention: MegasoftmaxSwinv2Attention,
    Swin2SRSelfAttention: MegasoftmaxSwin2SRAttention,
    DonutSwinSelfAttention: MegasoftmaxDonutSwinAttention,
    MaskFormerSwinSelfAttention: MegasoftmaxMaskFormerSwinAttention,
    ClapAudioSelfAttention: MegasoftmaxClapAudioAttention,
    Data2VecVisionSelfAttention: MegasoftmaxData2VecVisionAttention,
    Data2VecVisionSdpaSelfAttention: MegasoftmaxData2VecVisionSdpaAttention,
}
