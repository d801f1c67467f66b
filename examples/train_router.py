"""Train a small mixture of experts on Python source, its routers patched and as they are.

    python examples/train_router.py                              # a minute on 2 CPU cores
    python examples/train_router.py --model qwen3_moe --experts 16 --k 4

A router takes a softmax over all experts, keeps the K largest and divides by their sum.
`patch_routers` makes that one `megasoftmax.softmax_topk`. Two models train from the same weights on
the same batches. Should the experts that they choose on the first batch differ, or the losses
later, the exit code is 1.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
from typing import Annotated, Literal

import torch
import training
import typer
from rich.table import Table
from training import console
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megasoftmax.integrations.routers import patch_routers

# How far two losses of one step may be apart: training amplifies rounding, which may give a byte
# other experts.
LOSS_TOLERANCE = 0.1


def build_model(
    model: str, length: int, layers: int, width: int, heads: int, experts: int, k: int, seed: int
) -> PreTrainedModel:
    """The seed decides the weights."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 256,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "max_position_embeddings": length,
        "num_experts_per_tok": k,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model == "mixtral":
        sizes |= {"num_local_experts": experts, "intermediate_size": width}
        return MixtralForCausalLM(MixtralConfig(**sizes))
    sizes |= {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


@torch.no_grad()
def chosen_experts(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Whom the routers give the tokens, best first: [layers, tokens, k]."""
    choices: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda *call: choices.append(call[-1][2]))
        for layer in model.model.layers
    ]
    model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(choices)


def main(
    model: Annotated[Literal["mixtral", "qwen3_moe"], typer.Option()] = "mixtral",
    steps: training.Steps = 100,
    batch: training.Batch = 8,
    length: training.Length = 128,
    layers: training.Layers = 3,
    width: training.Width = 64,
    heads: training.Heads = 4,
    experts: Annotated[int, typer.Option(min=1)] = 8,
    k: Annotated[int, typer.Option(min=1, help="experts that take a byte")] = 2,
    seed: int = 0,
    lr: training.LearningRate = 1e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small Mixtral or Qwen-MoE on Python source, its routers patched and as they are."""
    training.check_heads(width, heads, is_rotary=True)
    if k > experts:
        raise typer.BadParameter(f"expected at most --experts {experts}, got {k}", param_hint="--k")
    place = training.device_named(device)
    stock, ours = (
        build_model(model, length, layers, width, heads, experts, k, seed).to(place)
        for _ in range(2)
    )
    patched = patch_routers(ours)
    console.print(f"patched: {', '.join(patched.names)}")

    trainers = [training.Trainer("stock", stock, lr), training.Trainer("softmax_topk", ours, lr)]
    first = next(training.pieces(1, batch, length, seed, place))
    same = torch.equal(chosen_experts(stock, first), chosen_experts(ours, first))
    console.print("the first choices are " + ("equal" if same else "DIFFERENT"))
    batches = ((ids, ids) for ids in training.pieces(steps, batch, length, seed, place))
    same &= training.compare(trainers, batches, steps, ".gate.weight", LOSS_TOLERANCE)

    table = Table("layer", *map(str, range(experts)), title="shares of the experts")
    for layer, choices in enumerate(chosen_experts(ours, first)):
        shares = torch.bincount(choices.flatten(), minlength=experts) / choices.numel()
        table.add_row(str(layer), *(f"{share:.0%}" for share in shares))
    console.print(table)
    training.end(same, "the routers agree", "THE ROUTERS DIFFER")


if __name__ == "__main__":
    training.run(main)
