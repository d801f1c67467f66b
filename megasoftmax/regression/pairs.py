"""A small pair transformer: triangle attention, and attention with a bias of pairs that learns."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import megasoftmax

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]

WIDTH, PAIR_WIDTH, HEADS, HEAD_DIM, LAYERS = 96, 32, 2, 48, 1
FARTHEST = 8  # tokens; distances from here on share an embedding
# Weights are large, so that attention decides the result.
DEVIATION = 0.1


def eager(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor | None
) -> Tensor:
    """As most of these models have it: scores and probabilities in the type of the products."""
    scores = query @ key.mT * HEAD_DIM**-0.5 + bias
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return scores.softmax(-1, dtype=bias.dtype).to(value.dtype) @ value


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor | None
) -> Tensor:
    """torch's scaled_dot_product_attention, with the sum of bias and mask as a tensor."""
    added = bias if excluded is None else bias.masked_fill(excluded, -torch.inf)
    return nn.functional.scaled_dot_product_attention(query, key, value, added)


def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    excluded: Tensor | None,
    fused: bool | None = None,
) -> Tensor:
    return megasoftmax.attention(query, key, value, bias=bias, mask=excluded, fused=fused)


def through_softmax(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor | None
) -> Tensor:
    """The fused softmax between two products."""
    probabilities = megasoftmax.softmax(
        query @ key.mT, scale=HEAD_DIM**-0.5, bias=bias, mask=excluded, dtype=value.dtype
    )
    return probabilities @ value


class _Attention(nn.Module):
    """Of tokens of `width` numbers, with a bias from the pair representation."""

    def __init__(self, width: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * HEADS * HEAD_DIM, bias=False)
        self.gate = nn.Linear(width, HEADS * HEAD_DIM)
        self.output = nn.Linear(HEADS * HEAD_DIM, width)

    def forward(self, tokens: Tensor, bias: Tensor, excluded: Tensor | None) -> Tensor:
        """tokens [..., n, width], bias and excluded as `attend` takes them."""
        tokens = self.norm(tokens)
        query, key, value = (
            part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)
            for part in self.project(tokens).chunk(3, -1)
        )
        found = self.attend(query, key, value, bias, excluded)
        return self.output(found.transpose(-2, -3).flatten(-2) * self.gate(tokens).sigmoid())


class _Layer(nn.Module):
    """Triangle attention of rows and of columns, and attention of tokens with a pair bias."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.rows, self.columns = (_Attention(PAIR_WIDTH, attend) for _ in range(2))
        self.tokens = _Attention(WIDTH, attend)
        self.norm = nn.LayerNorm(PAIR_WIDTH, bias=False)  # attention ignores a shift of all biases
        self.biases = nn.Linear(PAIR_WIDTH, 3 * HEADS, bias=False)
        self.transition = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, WIDTH)
        )

    def forward(
        self, tokens: Tensor, pairs: Tensor, excluded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """tokens [batch, n, WIDTH], pairs [batch, n, n, PAIR_WIDTH], excluded [batch, n]."""
        biases = self.biases(self.norm(pairs)).movedim(-1, 1).chunk(3, 1)
        of_rows = None if excluded is None else excluded[:, None, None, None]
        of_tokens = None if excluded is None else excluded[:, None, None]
        pairs = pairs + self.rows(pairs, biases[0].unsqueeze(1), of_rows)
        columns = self.columns(pairs.transpose(1, 2), biases[1].unsqueeze(1), of_rows)
        pairs = pairs + columns.transpose(1, 2)
        tokens = tokens + self.tokens(tokens, biases[2], of_tokens)
        return tokens + self.transition(tokens), pairs


class PairTransformer(nn.Module):
    """Predicts masked tokens.

    Args:
        vocabulary: of tokens.
        attend: attention of query, key and value [..., HEADS, n, HEAD_DIM], with a bias and a
            mask, True = excluded, that broadcast to [..., HEADS, n, n].
    """

    def __init__(self, vocabulary: int, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.left, self.right = (nn.Linear(WIDTH, PAIR_WIDTH) for _ in range(2))
        self.distances = nn.Embedding(2 * FARTHEST + 1, PAIR_WIDTH)
        self.layers = nn.ModuleList(_Layer(attend) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=DEVIATION)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        """The loss of labels [batch, n]; -100 has none."""
        tokens = self.embed(input_ids)
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        distance = (place - place[:, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST
        pairs = self.left(tokens)[:, :, None] + self.right(tokens)[:, None]
        pairs = pairs + self.distances(distance)
        excluded = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            tokens, pairs = layer(tokens, pairs, excluded)
        logits = self.head(self.norm(tokens))
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
