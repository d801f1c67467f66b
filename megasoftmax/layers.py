"""Layers for Hugging Face's `kernels`, which gives their forward to modules of a model.

    mapping = {"SoftmaxTopKRouter": {"cuda": LocalLayerRepository(folder, layer_name=...)}}
    with use_kernel_mapping(mapping):
        kernelize(model, mode=Mode.TRAINING)

A layer has no state of its own: `self` is the module of the model. See `export-kernels` in
`python -m megasoftmax` for the folder.
"""

import torch
from torch import Tensor

from megasoftmax.functions.softmax import softmax
from megasoftmax.functions.topk import softmax_topk


class Softmax(torch.nn.Module):
    """For `torch.nn.Softmax`: `megasoftmax.softmax` over its `dim`."""

    has_backward = True
    can_torch_compile = True

    dim: int

    def forward(self, input: Tensor) -> Tensor:
        """Probabilities in the shape and type of `input`, which is as in `megasoftmax.softmax`."""
        return softmax(input, dim=self.dim)


class SoftmaxTopKRouter(torch.nn.Module):
    """For routers that transformers marks with this name: linear, softmax, top-k, renormalise.

    Of the module it reads `weight` [experts, width], `bias` [experts] if there is one, `top_k`,
    `hidden_dim`, and `norm_topk_prob`, taken as true where there is none. Scores have the type of
    the logits.
    """

    has_backward = True
    can_torch_compile = True

    weight: Tensor
    hidden_dim: int
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, experts], scores and experts [tokens, top_k] of [..., width].

        Raises:
            ValueError: the module corrects its scores with a bias, as Laguna's, whose scores are
                those of a sigmoid: not this router, though marked with its name.
        """
        if hasattr(self, "e_score_correction_bias"):
            raise ValueError(
                "SoftmaxTopKRouter: expected a router that takes the softmax of its logits, got "
                f"{type(self).__name__} with e_score_correction_bias"
            )
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(hidden_states, self.weight, getattr(self, "bias", None))
        scores, experts = softmax_topk(
            logits, self.top_k, renormalize=getattr(self, "norm_topk_prob", True)
        )
        return logits, scores, experts
