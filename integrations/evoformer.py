"""DeepSpeed's `DS4Sci_EvoformerAttention`, computed by megasoftmax.

    from megasoftmax.integrations.evoformer import DS4Sci_EvoformerAttention

What differs from DeepSpeed 0.19:

* Any device and type that `megasoftmax.attention` takes, any number of tokens and any head
  dimension, where DeepSpeed has more than 16 tokens and up to 64.
* Both biases may have any shape that broadcasts to [*, H, L, S]. They may be of other types than
  the queries, and their gradients have these types.
* An entry of the first bias that is at most -30,000 excludes its pair. A query without a valid key
  has output 0 and gradients 0, where DeepSpeed's weights come from what rounding leaves.
* Where the first bias is nothing but such a mask, no sum of the two biases is made. On a CPU its
  values are read to know that. On a GPU reading would wait for it: pass a bool mask as the first
  bias, True = excluded, or `first_is_mask=True`. Otherwise the sum is made there, a tensor
  [*, H, L, S].
* Outputs have the same bits in every run, and under torch.use_deterministic_algorithms(True)
  gradients too.

Interface: https://www.deepspeed.ai/tutorials/ds4sci_evoformerattention.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import checks
from megasoftmax.integrations import installing
from megasoftmax.integrations.float_masks import bias_and_mask
from megasoftmax.options import check_companion

_NAMES = {"query": "Q", "key": "K", "value": "V"}


def DS4Sci_EvoformerAttention(  # noqa: N802  # DeepSpeed's name
    Q: Tensor,  # noqa: N803
    K: Tensor,  # noqa: N803
    V: Tensor,  # noqa: N803
    biases: Sequence[Tensor | None],
    *,
    first_is_mask: bool | None = None,
) -> Tensor:
    """Attention with a bias for each row and one that all rows of a batch share.

    Args:
        Q: [*, L, H, D], of the types of `megasoftmax.attention`, any strides. DeepSpeed's batch
            and rows, [B, N], are the leading dimensions.
        K, V: [*, S, H, D], of the same dtype.
        biases: at most two tensors that broadcast to [*, H, L, S], or None in place of one. The
            first is [B, N, 1, 1, S] in DeepSpeed, a mask that is added; or it is bool, True =
            excluded. The second is [B, 1, H, L, S]. Both get gradients where they ask for them.
        first_is_mask: True: the first bias has 0 and numbers of at most -30,000 only. Anything else
            in it is an error, which a GPU reports as a failed device assertion. False: it is added.
            None: found out on a CPU, added on a GPU. One that needs a gradient is added in any
            case.

    Returns:
        [*, L, H, D], contiguous, in the dtype of Q. The factor of the products is D ** -0.5.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
    """
    if len(biases) > 2:
        raise ValueError(f"biases: expected at most 2, got {len(biases)}")
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        checks.check_floating(name, tensor)
        if tensor.dim() < 3:
            raise ValueError(f"{name}: expected [*, L, H, D], got shape {tuple(tensor.shape)}")
    shape = (*Q.shape[:-3], Q.shape[-2], Q.shape[-3], K.shape[-3])
    for index, bias in enumerate(biases):
        if bias is None:
            continue
        name = f"biases[{index}]"
        if index > 0 or not isinstance(bias, Tensor) or bias.dtype != torch.bool:
            checks.check_floating(name, bias)
        check_companion(name, bias, "Q", Q, shape)
    bias, mask = bias_and_mask(biases, first_is_mask)
    query, key, value = (each.transpose(-2, -3) for each in (Q, K, V))
    given = {"bias": bias, "mask": mask}
    output = checks.called(_NAMES, megasoftmax.attention, query, key, value, **given)
    return output.transpose(-2, -3)


_STAND_INS: Mapping[str, Mapping[str, Any]] = {
    "deepspeed.ops.deepspeed4science": {},
    "deepspeed.ops.deepspeed4science.evoformer_attn": {},
}


def install(*, first_is_mask: bool | None = True) -> installing.Installed:
    """Let everybody who calls DeepSpeed's `DS4Sci_EvoformerAttention` call the one above.

    Those take it from `deepspeed.ops.deepspeed4science`, now or later, or have already imported
    it by that name. What was installed before stays and belongs to whoever installed it.

    Where DeepSpeed is not installed, `from deepspeed.ops.deepspeed4science import ...` works
    nevertheless. `deepspeed` itself remains missing, so that nobody takes it for installed.

    Args:
        first_is_mask: as above, for all calls. True by default, because OpenFold-3 and Protenix
            pass 1e9 * (mask - 1).

    Returns:
        What uninstalls it, by `uninstall()` or at the end of a `with` block. Its `report` says what
        each place runs.
    """
    return installing.install(
        "DS4Sci_EvoformerAttention", _with_setting(first_is_mask), list(_STAND_INS), _STAND_INS
    )


@cache  # one object for each setting, by which a second call knows what is installed
def _with_setting(first_is_mask: bool | None) -> Callable[..., Tensor]:
    return partial(DS4Sci_EvoformerAttention, first_is_mask=first_is_mask)
