"""Train a small GPT-2 or Llama on Python source, with megasoftmax and without it.

    python examples/train_gpt.py                                 # both, in a minute on a CPU
    python examples/train_gpt.py --model llama --attention megasoftmax --dtype bf16

The default trains one model with transformers' "eager" attention and one with "megasoftmax", from
the same weights on the same batches, in turns. If the swap changes nothing, the two loss curves lie
on each other; if they part by more than a tolerance, the exit code is 1. The text is the standard
library of this Python, read as bytes, so that nothing is downloaded.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import training
import typer
from matplotlib.figure import Figure
from training import console
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import megasoftmax
from megasoftmax.integrations.transformers import register

# How far two losses of one step may be apart. The two runs round differently and training amplifies
# that: the default settings came to 1e-6 in fp32 and 4e-3 in bf16 on a CPU, twice the learning rate
# to 3e-3 and 4e-2.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


@dataclass
class Settings:
    """What two runs have in common when they are compared."""

    model: str
    dtype: str
    batch: int
    length: int
    layers: int
    width: int
    heads: int
    seed: int
    device: torch.device


def build_model(settings: Settings, attention: str) -> PreTrainedModel:
    """A model over the 256 bytes, without dropout. The seed decides the weights."""
    torch.manual_seed(settings.seed)
    sizes = {
        "vocab_size": 256,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "max_position_embeddings": settings.length,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": attention,
    }
    if settings.model == "gpt2":
        no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout)).to(settings.device)
    sizes["num_key_value_heads"] = settings.heads // 2 if settings.heads % 2 == 0 else None
    sizes["intermediate_size"] = 3 * settings.width
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(settings.device)


def report_path(settings: Settings) -> None:
    """Say what computes attention with these settings, and why it is not fused attention."""
    shape = (settings.batch, settings.heads, settings.length)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    head_dim = settings.width // settings.heads
    query = torch.empty(*shape, head_dim, dtype=dtype, device=settings.device)
    scores = query.new_empty(*shape, settings.length)
    against = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query, causal=True)
    if against.runs == "fused":
        path = "its fused attention"
    elif against.runs == "SDPA":
        path = "torch's scaled_dot_product_attention"
    else:
        against_softmax = megasoftmax.why_not_fused(megasoftmax.softmax, scores, causal=True)
        softmax = "plain torch's" if against_softmax else "its fused"
        path = f"two matrix products and {softmax} softmax"
    because = f", because {'; '.join(map(str, against))}" if against else ""
    console.print(f"megasoftmax runs {path}{because}", soft_wrap=True)


def save_plot(eager: training.Trainer, ours: training.Trainer, file: Path) -> None:
    """The two loss curves, and below them their difference."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    curves.plot(eager.losses, label="eager", linewidth=3, alpha=0.5)
    curves.plot(ours.losses, label="megasoftmax", linewidth=1)
    curves.set_ylabel("loss")
    curves.legend()
    difference.plot([a - b for a, b in zip(ours.losses, eager.losses, strict=True)])
    difference.set(xlabel="step", ylabel="megasoftmax - eager")
    figure.savefig(file, dpi=150)
    console.print(f"plot: {file}")


def main(
    model: Annotated[Literal["gpt2", "llama"], typer.Option()] = "gpt2",
    attention: Annotated[
        Literal["eager", "sdpa", "megasoftmax", "compare"], typer.Option()
    ] = "compare",
    dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="bf16: autocast, weights in fp32")
    ] = "fp32",
    steps: training.Steps = 120,
    batch: training.Batch = 8,
    length: training.Length = 128,
    layers: training.Layers = 4,
    width: training.Width = 128,
    heads: training.Heads = 4,
    seed: int = 0,
    lr: training.LearningRate = 5e-4,
    device: training.Device = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(help="where compare saves its plot, by default outputs/train_gpt.png"),
    ] = None,
    config: training.Config = None,
) -> None:
    """Train a small GPT-2 or Llama on Python source, with megasoftmax and without it."""
    training.check_heads(width, heads, is_rotary=model == "llama")
    if attention == "compare":
        if plot is None:
            plot = Path("outputs", "train_gpt.png")
            plot.parent.mkdir(exist_ok=True)
        training.check_file(plot, "--plot")
    register()
    settings = Settings(
        model, dtype, batch, length, layers, width, heads, seed, training.device_named(device)
    )
    if attention in ("megasoftmax", "compare"):
        report_path(settings)
    names = ["eager", "megasoftmax"] if attention == "compare" else [attention]
    trainers = [training.Trainer(name, build_model(settings, name), lr, dtype) for name in names]
    batches = training.pieces(steps, batch, length, seed, settings.device)
    training.train(trainers, ((ids, ids) for ids in batches), steps)
    if attention == "compare":
        save_plot(*trainers, plot)
        raise typer.Exit(0 if training.curves_agree(*trainers, TOLERANCE[dtype]) else 1)


if __name__ == "__main__":
    training.run(main)
