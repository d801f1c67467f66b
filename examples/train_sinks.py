"""Train a small gpt-oss on Python source: sinks, sliding windows and a mixture of experts.

    python examples/train_sinks.py                               # a minute on 2 CPU cores
    python examples/train_sinks.py --window 8 --experts 8

Each head of gpt-oss learns a sink, a logit that joins the denominator of its softmax and lets the
head attend to nothing; every other layer sees a window only. One model trains with transformers'
"eager" attention and one with "megasoftmax", from the same weights on the same batches. Should the
losses differ, or the sinks not learn the same, the exit code is 1.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
from typing import Annotated

import torch
import training
import typer
from rich.table import Table
from training import console
from transformers import GptOssConfig, GptOssForCausalLM

from megasoftmax.integrations.transformers import register

# How far two losses of one step may be apart: training amplifies rounding, which may give a byte
# other experts.
LOSS_TOLERANCE = 0.1


def sinks_of(model: GptOssForCausalLM) -> torch.Tensor:
    """A copy of all sinks, [layers, heads]."""
    return torch.stack([layer.self_attn.sinks.detach().clone() for layer in model.model.layers])


def main(
    steps: training.Steps = 100,
    batch: training.Batch = 8,
    length: training.Length = 128,
    layers: training.Layers = 4,
    width: training.Width = 64,
    heads: Annotated[int, typer.Option(min=2, help="even: two share their keys")] = 4,
    window: Annotated[int, typer.Option(min=1, help="bytes that every other layer sees")] = 16,
    experts: Annotated[int, typer.Option(min=2, help="of which two take a byte")] = 4,
    seed: int = 0,
    lr: training.LearningRate = 1e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small gpt-oss on Python source, with megasoftmax and without it."""
    training.check_heads(width, heads, is_rotary=True)
    if heads % 2 != 0:
        raise typer.BadParameter(f"expected an even number, got {heads}", param_hint="--heads")
    register()
    place = training.device_named(device)
    sizes = {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width // heads,
        "sliding_window": window,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": length,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": None,
        "eos_token_id": None,
    }
    trainers = []
    for name in ("eager", "megasoftmax"):
        torch.manual_seed(seed)
        model = GptOssForCausalLM(GptOssConfig(**sizes, attn_implementation=name))
        trainers.append(training.Trainer(name, model.to(place), lr))

    before = sinks_of(model)
    batches = ((ids, ids) for ids in training.pieces(steps, batch, length, seed, place))
    same = training.compare(trainers, batches, steps, "sinks", LOSS_TOLERANCE)

    wanted, after = (sinks_of(trainer.model) for trainer in trainers)
    table = Table("layer", "sees", "sinks before", "after, eager", "after, megasoftmax")
    for layer, kind in enumerate(model.config.layer_types):
        table.add_row(
            str(layer),
            f"{window} bytes" if kind == "sliding_attention" else "all",
            *(
                " ".join(f"{sink:+.2f}" for sink in sinks[layer])
                for sinks in (before, wanted, after)
            ),
        )
    console.print(table)
    same &= bool((after != before).all())
    training.end(same, "the sinks learn alike", "THE SINKS LEARN DIFFERENTLY")


if __name__ == "__main__":
    training.run(main)
