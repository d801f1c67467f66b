"""megasoftmax in speech encoders of NeMo: Conformer and FastConformer.

    from megasoftmax.integrations.nemo import patch_model

    model = nemo.collections.asr.models.EncDecCTCModelBPE.from_pretrained(...)
    patched = patch_model(model)        # until patched.unpatch()
    with patch_model(model.encoder):    # or until the end of the block
        ...

`RelPositionMultiHeadAttention` with full context runs megasoftmax, whatever its `use_pytorch_sdpa`
says. Scores of relative positions are a bias that learns, a `ShiftedBias`, and the
mask stays bool, where NeMo writes -10000 into the bias. Masked rows are zero in both.
`RelPositionMultiHeadAttentionLongformer`, for limited context, is left as it is.

NeMo lets attention run in bfloat16 or float32 where autocast asks for float16, and so does this.
Tested with an own stand-in of the interface of nemo_toolkit 3.0, not with NeMo itself.
"""

import math
from typing import Any

import torch
from torch import Tensor

try:
    from nemo.collections.asr.parts.submodules.multi_head_attention import (
        RelPositionMultiHeadAttention,
    )
    from nemo.utils import avoid_float16_autocast_context
except ImportError as error:
    raise ImportError(
        "nemo: expected nemo_toolkit[asr]; pip install 'nemo_toolkit[asr]'"
    ) from error

from megasoftmax.biases import ShiftedBias
from megasoftmax.integrations.layers import Classes, model_patcher
from megasoftmax.integrations.products import attend
from megasoftmax.integrations.relative_shift import position_scores
from megasoftmax.options import AttentionOptions


class MegasoftmaxRelPositionMultiHeadAttention(RelPositionMultiHeadAttention):
    """Of the same arguments and results."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        pos_emb: Tensor,
        cache: Tensor | None = None,
    ) -> Any:
        key, value, query, cache = self.update_cache(key=key, value=value, query=query, cache=cache)
        if torch.is_autocast_enabled():
            query, key, value = query.float(), key.float(), value.float()
        with avoid_float16_autocast_context():
            query, key, value = self.forward_qkv(query, key, value)
            positions = self.linear_pos(pos_emb).unflatten(2, (self.h, self.d_k)).transpose(1, 2)
            scale = 1 / math.sqrt(self.d_k)
            of_positions = (query + self.pos_bias_v[:, None]) * scale
            options = AttentionOptions(
                bias=ShiftedBias(position_scores(of_positions, positions)),
                mask=None if mask is None else mask[:, None],
                scale=scale,
                dropout=self.dropout_rate if self.training else 0.0,
            )
            output = attend(query + self.pos_bias_u[:, None], key, value, options)
            output = self.linear_out(output.flatten(2))
        return output if cache is None else (output, cache)


LAYERS: Classes = {RelPositionMultiHeadAttention: MegasoftmaxRelPositionMultiHeadAttention}
patch_model = model_patcher(LAYERS, lambda layer: layer.d_k)
"""See `layers.model_patcher`: lets the layers of `LAYERS` in a model run megasoftmax."""
