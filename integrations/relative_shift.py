"""The shift of Transformer-XL, by which scores of distances become scores of keys."""

from torch import Tensor


def relative_shift(scores: Tensor, keys: int) -> Tensor:
    """Scores of keys from scores of distances, as a view: score (i, j) is (i, j - i + queries - 1).

    Padding and reshaping, as models do it, copies the scores twice. Here rows of a view begin one
    element earlier each, because they are one element shorter than those of `scores`.

    Args:
        scores: [..., queries, distances], contiguous. The first distance is that of the last query
            to the first key.
        keys: at most distances - queries + 1.

    Returns:
        [..., queries, keys], a view with rows of distances - 1 elements.

    Source:
        Dai et al., https://arxiv.org/abs/1901.02860, appendix B.
    """
    queries, distances = scores.shape[-2:]
    if queries == 1:
        return scores[..., :keys]
    rows = scores.flatten(-2)[..., queries - 1 : -1].unflatten(-1, (queries, distances - 1))
    return rows[..., :keys]
