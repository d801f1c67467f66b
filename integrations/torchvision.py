"""megasoftmax in models of torchvision: Swin and Swin V2.

    from megasoftmax.integrations.torchvision import patch_model

    model = torchvision.models.swin_t()
    patched = patch_model(model)        # until patched.unpatch()
    with patch_model(model):            # or until the end of the block
        model(images)

The layers call `torchvision.models.swin_transformer.shifted_window_attention`, which makes the mask
of shifted windows anew and adds it to the scores. Here the bias goes to attention as
[heads, tokens, tokens], and the mask as bool, see `windows`.
"""

import torch
from torch import Tensor

try:
    from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2
except ImportError as error:
    raise ImportError(
        "torchvision: expected one with models.swin_transformer; pip install torchvision"
    ) from error

from megasoftmax.integrations.layers import Classes, model_patcher
from megasoftmax.integrations.products import unpacked
from megasoftmax.integrations.windows import (
    attend_in_windows,
    attend_packed_in_windows,
    cosine,
    cut,
    into_windows,
    out_of_windows,
)


class _Shifted:
    """What both versions do around attention."""

    def forward(self: "ShiftedWindowAttention", x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        (rows, columns), heads = self.window_size, self.num_heads
        if height % rows or width % columns:
            x = torch.nn.functional.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
        padded = x.shape
        _, padded_height, padded_width, channels = padded
        # A window as large as the image is not shifted.
        shift = (
            self.shift_size[0] if rows < padded_height else 0,
            self.shift_size[1] if columns < padded_width else 0,
        )
        mask = None
        if any(shift):
            mask = _across_shift(padded_height, padded_width, (rows, columns), shift, x.device)
        windows = into_windows(x, (rows, columns), shift)
        qkv = torch.nn.functional.linear(windows, self.qkv.weight, self._bias_of_qkv())
        packed = qkv.unflatten(2, (3, heads, -1))
        dropout = self.attention_dropout if self.training else 0.0
        options = self.get_relative_position_bias()[0], mask
        if isinstance(self, ShiftedWindowAttentionV2):
            query, key, value = unpacked(packed)
            query, key = cosine(query, key, self.logit_scale)
            output = attend_in_windows(query, key, value, *options, 1.0, dropout)
        else:
            scale = (channels // heads) ** -0.5
            output = attend_packed_in_windows(packed, *options, scale, dropout)
        output = torch.nn.functional.dropout(self.proj(output), self.dropout, self.training)
        output = out_of_windows(output, padded, (rows, columns), shift)
        return output[:, :height, :width].contiguous()

    def _bias_of_qkv(self: "ShiftedWindowAttention") -> Tensor | None:
        return self.qkv.bias


class MegasoftmaxShiftedWindowAttention(_Shifted, ShiftedWindowAttention):
    """Swin's."""


class MegasoftmaxShiftedWindowAttentionV2(_Shifted, ShiftedWindowAttentionV2):
    """That of Swin V2, whose keys have no bias."""

    def _bias_of_qkv(self) -> Tensor | None:
        if self.qkv.bias is None:
            return None
        of_query, of_key, of_value = self.qkv.bias.chunk(3)
        return torch.cat((of_query, torch.zeros_like(of_key), of_value))


LAYERS: Classes = {
    ShiftedWindowAttention: MegasoftmaxShiftedWindowAttention,
    ShiftedWindowAttentionV2: MegasoftmaxShiftedWindowAttentionV2,
}
patch_model = model_patcher(LAYERS, lambda layer: layer.qkv.out_features // 3 // layer.num_heads)
"""See `layers.model_patcher`: lets the layers of `LAYERS` in a model run megasoftmax."""


def _across_shift(
    height: int, width: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device
) -> Tensor:
    """Pairs that only the shift brought into one window, bool [windows, tokens, tokens]."""
    regions = []
    for size, length, moved in zip((height, width), window, shift, strict=True):
        position = torch.arange(size, device=device)
        regions.append((position >= size - length).int() + (position >= size - moved))
    region = regions[0][:, None] * 3 + regions[1]
    region = cut(region[None, :, :, None], window)[:, :, 0]
    return region[:, :, None] != region[:, None, :]
