"""Tokens of transformers' `generate`, drawn by megasoftmax.sample.

    from megasoftmax.integrations.generation import Sampler

    sampler = Sampler(temperature=0.7, top_k=50, top_p=0.9)
    model.generate(**inputs, do_sample=False, logits_processor=[sampler])

`generate` without do_sample takes the token with the largest score. The sampler is a logits
processor that draws a token of each row and gives all others a score of -inf, so that this is the
one. The distribution is that of do_sample=True with the same options: temperature, then top_k, then
top_p, then min_p. It differs for equals of the K-th logit: transformers keeps all of them, and
the sampler exactly K tokens. One launch draws in place of sorts, sums and softmaxes over the
vocabulary. What `generate` expects of a logits processor, a tensor of scores, is written besides; a
loop of one's own that calls megasoftmax.sample, as in examples/generate.py, writes none.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

import megasoftmax
from megasoftmax import checks
from megasoftmax.options import as_number


class Sampler(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Draws a token of each row. Other logits processors come before it in the list."""

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        min_p: float | None = None,
        most: int = 256,
        seed: int | None = None,
    ) -> None:
        """Take the options of `generate`.

        Args:
            temperature: above 0.
            top_k: how many tokens are drawn from at most. 0 and None are no limit.
            top_p: from 0 to 1, of the probability of the top_k tokens, or of all without top_k.
            min_p: from 0 to 1, of the largest probability.
            most: without top_k, how many tokens are drawn from at most. A nucleus of more is cut.
                The kernels take up to 256.
            seed: of the first step; each further step takes the next number. None: torch's
                generator draws one for each step.

        Raises:
            TypeError, ValueError: temperature or top_k is not as above. `megasoftmax.sample` checks
                the others.
        """
        temperature = as_number("temperature", temperature)
        if isinstance(temperature, bool) or not isinstance(temperature, (float, int)):
            found = checks.kind(temperature)
            raise TypeError(f"temperature: expected a number above 0, got {found}")
        if not temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        top_k = checks.checked_integer("top_k", 0 if top_k is None else top_k, least=0) or None
        self.options: dict[str, Any] = {
            "scale": 1 / temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
        }
        self.most, self.seed = most if top_k is None else top_k, seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, vocabulary], 0 for the token of each row and -inf for the others."""
        seed = None
        if self.seed is not None:
            seed = torch.full((1,), self.seed, dtype=torch.int64, device=scores.device)
            self.seed += 1
        k = min(self.most, scores.shape[-1])
        tokens = megasoftmax.sample(scores, k, seed=seed, **self.options)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(-1, tokens.unsqueeze(-1), 0.0)
