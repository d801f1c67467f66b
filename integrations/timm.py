"""megasoftmax in models of timm: Swin, Swin V2 and BEiT.

    from megasoftmax.integrations.timm import patch_model

    model = timm.create_model("swin_tiny_patch4_window7_224")
    patched = patch_model(model)        # until patched.unpatch()
    with patch_model(model):            # or until the end of the block
        model(images)

The bias by distance goes to attention as [heads, tokens, tokens] and gets its gradient, and masks
of shifted windows as bool, see `windows`. Blocks move an image into windows and back by one copy
each, where timm rolls, pads and cuts. timm's own fused attention, which Swin has only if it is
asked for, expands both to [batch * windows, heads, tokens, tokens]. timm's parameters, state
dictionaries and `set_input_size` stay as they are.
"""

from typing import Any

import torch
from torch import Tensor

try:
    from timm.models import beit, swin_transformer, swin_transformer_v2
except ImportError as error:
    raise ImportError("timm: expected 1.0.31 or later; pip install timm") from error

from megasoftmax.integrations.layers import Classes, model_patcher
from megasoftmax.integrations.products import attend_packed, unpacked
from megasoftmax.integrations.windows import (
    attend_in_windows,
    attend_packed_in_windows,
    bias_of_table,
    continuous_bias,
    cosine,
    into_windows,
    out_of_windows,
)
from megasoftmax.options import AttentionOptions


class MegasoftmaxWindowAttention(swin_transformer.WindowAttention):
    """Swin's."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        output = attend_packed_in_windows(
            _in_heads(self.qkv(x), self.num_heads),
            bias_of_table(self.relative_position_bias_table, self.relative_position_index),
            mask,
            scale=self.scale,
            dropout=_dropout(self),
        )
        return self.proj_drop(self.proj(output))


class MegasoftmaxWindowAttentionV2(swin_transformer_v2.WindowAttention):
    """That of Swin V2."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = unpacked(_in_heads(_projected(self, x), self.num_heads))
        query, key = cosine(query, key, self.logit_scale)
        output = attend_in_windows(
            query,
            key,
            value,
            continuous_bias(self.cpb_mlp(self.relative_coords_table), self.relative_position_index),
            mask,
            scale=1.0,
            dropout=_dropout(self),
        )
        return self.proj_drop(self.proj(output))


class MegasoftmaxBeitAttention(beit.Attention):
    """BEiT's, with a bias of its own, one shared by layers, both or none."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = bias_of_table(self.relative_position_bias_table, self.relative_position_index)
            bias = own if bias is None else own + bias
        options = AttentionOptions(bias=bias, scale=self.scale, dropout=_dropout(self))
        output = attend_packed(_in_heads(_projected(self, x), self.num_heads), options)
        return self.proj_drop(self.proj(output.flatten(2)))


class _Block:
    """What the blocks of both versions of Swin do around attention."""

    def _attn(self: Any, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        window, shift = self.window_size, self.shift_size
        if height % window[0] or width % window[1]:
            padded: Tensor = super()._attn(x)  # type: ignore[misc]
            return padded
        mask = self.get_attn_mask(x) if self.dynamic_mask else self.attn_mask
        windows = self.attn(into_windows(x, window, shift), mask=mask)
        return out_of_windows(windows, x.shape, window, shift)


class MegasoftmaxSwinTransformerBlock(_Block, swin_transformer.SwinTransformerBlock):
    """Swin's."""


class MegasoftmaxSwinTransformerV2Block(_Block, swin_transformer_v2.SwinTransformerV2Block):
    """That of Swin V2."""


LAYERS: Classes = {
    swin_transformer.WindowAttention: MegasoftmaxWindowAttention,
    swin_transformer_v2.WindowAttention: MegasoftmaxWindowAttentionV2,
    beit.Attention: MegasoftmaxBeitAttention,
}
BLOCKS: Classes = {
    swin_transformer.SwinTransformerBlock: MegasoftmaxSwinTransformerBlock,
    swin_transformer_v2.SwinTransformerV2Block: MegasoftmaxSwinTransformerV2Block,
}
patch_model = model_patcher(
    LAYERS, lambda layer: layer.qkv.out_features // 3 // layer.num_heads, around=BLOCKS
)
"""See `layers.model_patcher`: lets the layers of `LAYERS` in a model run megasoftmax."""


def _projected(layer: Any, x: Tensor) -> Tensor:
    """Queries, keys and values, [batch, tokens, 3 * channels], as timm adds their bias."""
    if layer.q_bias is None:
        return layer.qkv(x)
    bias = torch.cat((layer.q_bias, layer.k_bias, layer.v_bias))
    if layer.qkv_bias_separate:
        return layer.qkv(x) + bias
    return torch.nn.functional.linear(x, layer.qkv.weight, bias)


def _in_heads(projected: Tensor, heads: int) -> Tensor:
    """Query, key and value, a view [batch, tokens, 3, heads, head_dim]."""
    return projected.unflatten(2, (3, heads, -1))


def _dropout(layer: Any) -> float:
    return layer.attn_drop.p if layer.training else 0.0
