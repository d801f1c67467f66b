"""Whether entries are in order, and drawn by their numbers, up to rounding."""

import torch
from torch import Tensor


def in_order(indices: Tensor, numbers: Tensor, errors: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the indices [..., K] of each row can be those of its largest numbers, in order.

    A number may be anything within its error, rounded to `dtype`. Larger ones come first, the lower
    index among equals, and NaN before +inf. Entries with equal numbers and errors are equals.

    Args:
        numbers, errors: float64 [..., V].
    """
    k, columns = indices.shape[-1], numbers.shape[-1]
    if k == 0:
        return indices.new_ones(indices.shape[:-1], dtype=torch.bool)
    at = indices.clamp(0, columns - 1)
    places = torch.arange(columns, device=at.device)
    place_in_row = torch.full_like(numbers, k, dtype=torch.int64)
    place_in_row = place_in_row.scatter(-1, at, places[:k].expand_as(at))
    # Each entry is where it says, so none is there twice.
    is_right = ((at == indices) & (place_in_row.gather(-1, at) == places[:k])).all(-1)

    errors = torch.where(errors.isfinite(), errors, 0)
    least, most = (_ordered((numbers + each).to(dtype)) for each in (-errors, errors))
    found = most.gather(-1, at)  # the largest number that an entry may have behind those before it
    for i in range(1, k):
        bound = found[..., i - 1] - (at[..., i] < at[..., i - 1]).long()
        found[..., i] = torch.minimum(found[..., i], bound)
    is_right &= (found >= least.gather(-1, at)).all(-1)
    bound = found[..., -1:] - (places < at[..., -1:]).long()
    is_right &= ((place_in_row < k) | (least <= bound)).all(-1)

    exact = _ordered(numbers)
    for i in range(k):
        here = at[..., i : i + 1]
        is_equal = (exact == exact.gather(-1, here)) & (errors == errors.gather(-1, here))
        is_right &= ~(is_equal & (places < here) & (place_in_row > i)).any(-1)
    return is_right


def _ordered(numbers: Tensor) -> Tensor:
    """Integers ordered like the numbers, NaN last. The next number below is less by one."""
    numbers = torch.where(numbers.isnan(), torch.nan, numbers) + 0.0  # of one sign; -0 becomes 0
    is_wide = numbers.dtype == torch.float64
    bits = numbers.view(torch.int64 if is_wide else torch.int32).long()
    return torch.where(bits < 0, bits ^ (2 ** (63 if is_wide else 31) - 1), bits)


def distances_of_drawn(drawn: Tensor, p: Tensor, indices: Tensor, numbers: Tensor) -> Tensor:
    """How far the number of each row is from those by which its index is drawn.

    Infinite where the index has no probability. A row without probabilities has its first index.

    Args:
        drawn, numbers: of the rows [...].
        p, indices: of the K entries [..., K], in order.
    """
    p = p.double()
    through = p.cumsum(-1) / p.sum(-1, keepdim=True)
    is_drawn = (indices == drawn.unsqueeze(-1)) & (p > 0)
    at = is_drawn.int().argmax(-1, keepdim=True)
    end = through.gather(-1, at).squeeze(-1)
    begin = torch.where(at.squeeze(-1) == 0, 0, through.gather(-1, (at - 1).clamp(0)).squeeze(-1))
    distance = torch.maximum(begin - numbers, numbers - end).clamp(0)
    distance = distance.masked_fill(~is_drawn.any(-1), torch.inf)
    of_empty = torch.where(drawn == indices[..., 0], 0.0, torch.inf)
    return torch.where(p.sum(-1) > 0, distance, of_empty)
