"""Attention of the windows of an image, with one bias for all windows: Swin and its relatives.

Their layers have queries [batch * windows, heads, tokens, head_dim], a bias [heads, tokens, tokens]
that learns and, where windows are shifted, a mask [windows, tokens, tokens] of 0 and -100. Adding
up bias and mask would make [batch * windows, heads, tokens, tokens]. Here the query is a view
[batch, windows, ...], the mask is bool, [windows, 1, tokens, tokens], and both broadcast.

A score with -100 is excluded here, while the models give it exp(-100) = 4e-44 of the weight that
it would have. In float32 no result differs as long as no excluded score is more than 75 above the
largest visible score of its query, in windows of up to 24 x 24 tokens: 576 exp(75 - 100) is 8e-9,
and float32 rounds at 6e-8. Every token sees itself, so that no row is excluded as a whole. Where
an excluded score is larger than that, the models attend across the border of the shift, and
megasoftmax does not. The scores of Swin V2 are at most twice its logit scale plus 16 apart. With a
logit scale below 29 the results are the same for certain; models begin with 10, and clamp at 100.

Around attention the models roll an image and cut it into windows, by up to three copies, and back
by two. Here each way is one copy, `into_windows` and `out_of_windows`. Shifted windows copy whole
tokens by an index. The index and its inverse have 16 bytes for each token.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax.autocast import as_autocast, one_as_autocast
from megasoftmax.functions.attention import served_attention, served_packed_attention
from megasoftmax.integrations.products import attend, unpacked
from megasoftmax.options import AttentionOptions
from megasoftmax.tracing import PLAIN, may_keep

_LARGEST_LOGIT_SCALE = math.log(100)
_KEPT = 64  # pairs of indices: a Swin has three for each size of a batch
_LARGEST_EMBEDDED = 55  # tokens: the gradient of more than 3072 embeddings sorts them


Size = tuple[int, int]
"""Rows and columns."""


def into_windows(image: Tensor, window: Size, shift: Size) -> Tensor:
    """[batch * windows, tokens, channels] from [batch, height, width, channels].

    Args:
        image: any strides. Its height and width are multiples of those of the window.
        window: its rows and columns.
        shift: how far the windows begin from the image's upper left corner, as rows and columns.
            What goes beyond the lower right corner goes on at the upper left one.
    """
    indices = _indices(image, image.shape[:3], window, shift)
    if indices is None:
        return cut(_rolled(image, (-shift[0], -shift[1])), window)
    moved: Tensor = _Moved.apply(image, *indices)
    return moved.view(-1, window[0] * window[1], image.shape[-1])


def out_of_windows(tokens: Tensor, image: torch.Size, window: Size, shift: Size) -> Tensor:
    """What `into_windows` did, undone: an image [batch, height, width, channels].

    Args:
        tokens: [batch * windows, tokens, channels].
        image: the size of the image; channels are those of the tokens.
        window, shift: as given to `into_windows`.
    """
    batch, height, width = image[:3]
    indices = _indices(tokens, image[:3], window, shift)
    if indices is None:
        grid = height // window[0], width // window[1]
        tokens = tokens.unflatten(1, window).unflatten(0, (batch, *grid)).transpose(2, 3)
        return _rolled(tokens.reshape(batch, height, width, -1), shift)
    order, inverse = indices
    moved: Tensor = _Moved.apply(tokens, inverse, order)
    return moved.view(batch, height, width, tokens.shape[-1])


class _Moved(torch.autograd.Function):
    """The tokens of a tensor [..., channels] in another order, as [tokens, channels].

    The gradient is moved back. That of torch's indexing would add up what has the same index.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        # They have no gradient. Hooks of saved tensors, such as save_on_cpu, would copy them.
        ctx.order, ctx.inverse = order, inverse
        ctx.shape = tensor.shape
        return tensor.reshape(-1, tensor.shape[-1]).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Moved.apply(gradient, ctx.inverse, ctx.order).view(ctx.shape), None, None


def _indices(
    tensor: Tensor, image: torch.Size, window: Size, shift: Size
) -> tuple[Tensor, Tensor] | None:
    """The token at each place of the windows, and its inverse.

    None where windows are not shifted: `cut` is one copy, too. None where calls are traced,
    transformed or captured by a CUDA graph. Torch's own ops run there.
    """
    device = tensor.device
    is_plain = type(tensor) in PLAIN and forward_ad._current_level < 0 and may_keep(device)
    if not (any(shift) and is_plain):
        return None
    # Another stream could read an index that is not written yet.
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else 0
    return _kept_indices(image, tuple(window), tuple(shift), device, stream)


@lru_cache(maxsize=_KEPT)
def _kept_indices(
    image: torch.Size, window: Size, shift: Size, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a training may use them later
        tokens = torch.arange(image.numel(), device=device).view(*image, 1)
        order = cut(_rolled(tokens, (-shift[0], -shift[1])), window).flatten()
        places = torch.arange(order.numel(), device=device)
        return order, torch.empty_like(order).scatter_(0, order, places)


def _rolled(image: Tensor, shift: Size) -> Tensor:
    return torch.roll(image, shift, (1, 2)) if any(shift) else image


def cut(image: Tensor, window: Size) -> Tensor:
    """`into_windows` without a shift, by torch's own copy."""
    batch, height, width, channels = image.shape
    rows, columns = window
    image = image.view(batch, height // rows, rows, width // columns, columns, channels)
    return image.transpose(2, 3).reshape(-1, rows * columns, channels)


def in_windows(tensor: Tensor, mask: Tensor) -> Tensor:
    """[batch * windows, ...] as [batch, windows, ...], a view; windows are those of the mask."""
    return tensor.unflatten(0, (-1, mask.shape[0]))


def visible_in_windows(mask: Tensor) -> Tensor:
    """What a mask of 0 and -100, [windows, tokens, tokens], lets see: bool [windows, 1, ...]."""
    return (mask == 0)[:, None]


def attend_in_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attention of a layer without an attention interface, [batch * windows, tokens, channels].

    Args:
        query, key, value: [batch * windows, heads, tokens, head_dim].
        bias: [heads, tokens, tokens].
        mask: bool, True = excluded, or 0 and -100, [windows, tokens, tokens]; None: windows are not
            shifted.
        scale, dropout: as in `megasoftmax.attention`.
    """
    return _attend(query, key, value, mask, _options(bias, mask, scale, dropout))


def attend_packed_in_windows(
    packed: Tensor, bias: Tensor, mask: Tensor | None, scale: float, dropout: float
) -> Tensor:
    """`attend_in_windows` of query, key and value in one tensor.

    Args:
        packed: [batch * windows, tokens, 3, heads, head_dim].
        bias, mask, scale, dropout: as there.
    """
    options = _options(bias, mask, scale, dropout)
    output = served_packed_attention(one_as_autocast(packed), options, repeats_mask=True)
    if output is None:
        return _attend(*unpacked(packed), mask, options)
    return output.flatten(-2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    output = served_attention(*as_autocast(query, key, value), options, repeats_mask=True)
    if output is None:
        if mask is not None:
            query, key, value = (in_windows(tensor, mask) for tensor in (query, key, value))
        output = attend(query, key, value, options)
        output = output if mask is None else output.flatten(0, 1)
    return output.flatten(-2)


def _options(bias: Tensor, mask: Tensor | None, scale: float, dropout: float) -> AttentionOptions:
    excluded = None
    if mask is not None:
        excluded = (mask if mask.dtype == torch.bool else mask != 0)[:, None]
    return AttentionOptions(bias=bias, mask=excluded, scale=scale, dropout=dropout)


def bias_of_table(table: Tensor, index: Tensor) -> Tensor:
    """A bias [heads, tokens, tokens] from a table [distances, heads] and integers [tokens, tokens].

    The index may be flat. The gradient of an embedding is one kernel for small windows, where that
    of indexing is a dozen. It is summed in the type of its table, so that this is float32.
    """
    tokens = math.isqrt(index.numel())
    index = index.view(tokens, tokens)
    if tokens > _LARGEST_EMBEDDED:
        return table[index].permute(2, 0, 1).contiguous()
    entries = torch.nn.functional.embedding(
        index, table.to(torch.promote_types(table.dtype, torch.float32))
    )
    return entries.permute(2, 0, 1).to(table.dtype, memory_format=torch.contiguous_format)


def continuous_bias(table: Tensor, index: Tensor) -> Tensor:
    """The bias of Swin V2, likewise, from what its network makes of distances, [..., heads]."""
    return 16 * torch.sigmoid(bias_of_table(table.flatten(0, -2), index))


def cosine(query: Tensor, key: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key whose products are the scores of Swin V2, without another scale.

    Args:
        query, key: [..., heads, tokens, head_dim].
        logit_scale: natural logarithms [heads, 1, 1], clamped as the models do.

    Source:
        Liu et al., https://arxiv.org/abs/2111.09883, section 3.3.
    """
    scale = logit_scale.clamp(max=_LARGEST_LOGIT_SCALE).exp()
    query, key = (torch.nn.functional.normalize(tensor, dim=-1) for tensor in (query, key))
    return query * scale, key
