"""What subclasses have in common that take the place of attention layers of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasoftmax.integrations.names import asked_name


class OrFamily:
    """Calls `attend` if megasoftmax was asked for, else the forward of the family.

    Comes before the class of the family among the bases of a layer.
    """

    config: PreTrainedConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        function = asked_function(self.config)
        if function is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.attend(function, *args, **kwargs)  # type: ignore[attr-defined]


def asked_function(config: PreTrainedConfig) -> Callable[..., Any] | None:
    """The attention function that the configuration asks for, where it is one of megasoftmax."""
    name = config._attn_implementation
    function = None if asked_name(name) is None else ALL_ATTENTION_FUNCTIONS.get(name)
    return None if getattr(function, "is_eager", False) else function


def in_heads(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[batch, tokens, heads * head_dim] as [batch, heads, tokens, head_dim], a view."""
    return projected.unflatten(-1, (-1, head_dim)).transpose(1, 2)
