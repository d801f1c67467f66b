"""megasoftmax in Megatron-core: as the core attention of a layer, or in place of its softmax.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megasoftmax.integrations.megatron import MegasoftmaxCoreAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = MegasoftmaxCoreAttention

`MegasoftmaxCoreAttention` has the constructor and the forward of `DotProductAttention`. What that
class, of Megatron-core 0.16, refuses:
* `attention_bias`. Here it is added to the scaled scores and gets its gradient; a
  `megasoftmax.RelativeBias` is taken too.
* `packed_seq_params`. Here each sequence attends to itself, through `attention_varlen` where that
  runs fused, and one after the other elsewhere.
* Values of another dimension than keys (multi-latent attention), and a CPU.

What that class does differently:
* It writes scores and probabilities, [batch, heads, queries, keys]. Here nothing of that size
  exists where attention runs fused.
* `config.window_size` replaces the mask and causality, a side of -1 hides a query's own key, and
  fused there is no window. Here all hold together, and -1 removes the limit of a side.
* A mask replaces causality, and fused it is the other way round. Here both hold; so pass None for a
  mask of causality alone, which would be read in vain. A call's `attn_mask_type` is honoured.
* A masked score becomes -10000, although visible scores may be below that, and a query that sees no
  key gets uniform weights. Here masked keys have weight 0, and such a query gets zeros and no
  gradient.
* The learnable offset of `config.softmax_type` starts alike on every tensor-parallel rank, and
  gradient norms count that of the first. Here it is sharded over heads, as weights are.

Kernels make a block mask of a mask, which says which tiles they may skip, once for the forward and
backward pass of a layer. Attention runs fused, dropout too, where
`megasoftmax.why_not_fused(core_attention, ...)` is empty. Elsewhere it is matmul,
`megasoftmax.softmax` and matmul. The seed of dropout is drawn from Megatron's tensor-parallel
generator. `config.masked_softmax_fusion` is about FusedScaleMaskSoftmax and makes no difference.

With context parallelism keys and values go round in a ring, `megasoftmax.ring_attention`, as with
cp_comm_type "p2p". Other types and packed sequences beside it are refused.

    from megasoftmax.integrations.megatron import apply_megasoftmax_to_megatron

    applied = apply_megasoftmax_to_megatron()  # until applied.undo(), or as a context manager

keeps the layers of Megatron and replaces what they call: `FusedScaleMaskSoftmax`, and the softmax
and top-k of routers. Call it before the model is built. A Megatron that is to stay as it is takes
our kernels from `megasoftmax.integrations.megatron_extensions`.
"""

from megasoftmax._extras import missing_extra

try:
    from megasoftmax.integrations.megatron.core_attention import MegasoftmaxCoreAttention
    from megasoftmax.integrations.megatron.patches import apply_megasoftmax_to_megatron
except ModuleNotFoundError as error:
    if (hint := missing_extra(error)) is None:
        raise
    raise ModuleNotFoundError(hint, name=error.name) from error

__all__ = ["MegasoftmaxCoreAttention", "apply_megasoftmax_to_megatron"]
