"""Train a small T5 to fill holes in Python source; its relative bias learns as with "eager".

    python examples/finetune_t5.py                               # a minute on 2 CPU cores
    python examples/finetune_t5.py --checkpoint my-byt5-small    # a folder; not downloaded

T5 adds a bias to its scores, learnt per head and bucket of distances, which most fused attention
cannot differentiate. Here one model trains with transformers' "eager" attention and one with
"megasoftmax", from the same weights on the same batches. Should the gradients of the bias differ on
the first batch, or the losses later, the exit code is 1.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import training
import typer
from training import console
from transformers import T5Config, T5ForConditionalGeneration

from megasoftmax.integrations.transformers import register

# Byte b is token b + 3, as in ByT5, after padding, end and unknown; then come marks for holes.
FIRST_BYTE, HOLE, VOCABULARY = 3, 259, 384

# How far two losses of one step may be apart. Training amplifies rounding: two trainings with
# "eager" whose first weights differ by a rounding of float32 were up to ROUNDING_GROWS_TO apart
# within 100 steps, from 5e-7 in step 10 on, and "eager" and "megasoftmax" 0.027.
ROUNDING_GROWS_TO = 0.034
LOSS_TOLERANCE = 0.1


def build_model(
    attention: str, checkpoint: Path | None, layers: int, width: int, heads: int, seed: int
) -> T5ForConditionalGeneration:
    """The model of a folder, or a new one, without dropout. The seed decides the weights."""
    options = {"attn_implementation": attention, "dropout_rate": 0.0}
    if checkpoint is not None:
        return T5ForConditionalGeneration.from_pretrained(checkpoint, dtype="float32", **options)
    torch.manual_seed(seed)
    sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_heads": heads}
    sizes |= {"num_layers": layers, "vocab_size": VOCABULARY, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **options))


def with_holes(batches: Iterator[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Text without the second of its four quarters, and that quarter, which is to be guessed."""
    for ids in batches:
        before, hidden, *after = (ids + FIRST_BYTE).chunk(4, -1)
        yield (
            torch.cat([before, torch.full_like(ids[:, :1], HOLE), *after], -1),
            hidden.contiguous(),
        )


def biases_of(model: T5ForConditionalGeneration) -> torch.Tensor:
    """A copy of the tables of encoder and decoder: [2, buckets, heads]."""
    stacks = (model.encoder, model.decoder)
    layers = [stack.block[0].layer[0].SelfAttention for stack in stacks]
    return torch.stack([layer.relative_attention_bias.weight.detach().clone() for layer in layers])


def main(
    checkpoint: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="folder of a ByT5 or T5")
    ] = None,
    steps: training.Steps = 100,
    batch: training.Batch = 8,
    length: Annotated[int, typer.Option(min=4, help="bytes per sequence")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="of a new model")] = 3,
    width: training.Width = 128,
    heads: training.Heads = 4,
    seed: int = 0,
    lr: training.LearningRate = 1e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small T5 to fill holes in Python source, with megasoftmax and without it."""
    if checkpoint is None:
        training.check_heads(width, heads)
    register()
    place = training.device_named(device)
    trainers = []
    for name in ("eager", "megasoftmax"):
        model = build_model(name, checkpoint, layers, width, heads, seed)
        trainers.append(training.Trainer(name, model.to(place), lr))

    before = [biases_of(trainer.model) for trainer in trainers]
    batches = with_holes(training.pieces(steps, batch, length, seed, place))
    same = training.compare(trainers, batches, steps, "relative_attention_bias", LOSS_TOLERANCE)
    console.print(
        "Training amplifies rounding: two trainings with eager whose first weights differ by a "
        f"rounding of float32 came up to {ROUNDING_GROWS_TO} apart in 100 steps. The gradients of "
        "the first batch, above, show faults that this hides."
    )
    for trainer, bias in zip(trainers, before, strict=True):
        way = (biases_of(trainer.model) - bias).abs().amax((1, 2))
        console.print(f"{trainer.name}: the bias moved by {way[0]:.3f} and {way[1]:.3f}")
        same &= bool(way.min() > 0)
    training.end(same, "the biases learn alike", "THE BIASES LEARN DIFFERENTLY")


if __name__ == "__main__":
    training.run(main)
