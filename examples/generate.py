"""Train a small Llama on Python source and let it write on, with tokens drawn by sample.

    python examples/generate.py                                  # about a minute on 2 CPU cores
    python examples/generate.py --k 5 --temperature 0.5 --samples 1

The default samples twice from the same seed, through `megasoftmax.sample` and through torch.topk,
torch.softmax and sums. The swap changes nothing: should the texts differ, the exit code is 1.
Model, text and training are those of train_gpt.py.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
import time
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
import training
import typer
from rich.panel import Panel
from rich.text import Text
from train_gpt import Settings, build_model
from training import console
from transformers import PreTrainedModel

import megasoftmax
from megasoftmax.integrations.transformers import register
from megasoftmax.reference.topk import uniform


class Options(NamedTuple):
    """How tokens are drawn."""

    k: int
    top_p: float
    temperature: float


# Logits [samples, vocabulary], options and a seed -> a token of each sample.
Sampler = Callable[[torch.Tensor, Options, torch.Tensor], torch.Tensor]


def draw_fused(logits: torch.Tensor, options: Options, seed: torch.Tensor) -> torch.Tensor:
    """One call, which reads the logits once and writes nothing as long as the vocabulary."""
    k, top_p, temperature = options
    return megasoftmax.sample(logits, k, scale=1 / temperature, top_k=k, top_p=top_p, seed=seed)


def draw_torch(logits: torch.Tensor, options: Options, seed: torch.Tensor) -> torch.Tensor:
    """What it replaces, drawn by the same numbers."""
    k, top_p, temperature = options
    top, tokens = torch.topk(logits / temperature, k)
    probabilities = torch.softmax(top, -1)
    before = probabilities.cumsum(-1) - probabilities
    through = probabilities.masked_fill(before >= top_p, 0).cumsum(-1)
    numbers = uniform(seed, len(logits)).unsqueeze(-1)
    choice = (through <= numbers * through[:, -1:]).sum(-1, keepdim=True)
    return tokens.gather(-1, choice).squeeze(-1)


SAMPLERS: dict[str, Sampler] = {"megasoftmax": draw_fused, "torch": draw_torch}


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompt: bytes,
    sampler: Sampler,
    options: Options,
    samples: int,
    count: int,
    seed: int,
) -> list[bytes]:
    """The prompt and `count` bytes more, so many times. The seed decides which."""
    device = model.device
    seeds = torch.tensor([seed], device=device)
    ids = torch.tensor(list(prompt), device=device).repeat(samples, 1)
    for _ in range(count):
        context = ids[:, -model.config.max_position_embeddings :]
        logits = model(context, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, sampler(logits, options, seeds).unsqueeze(-1)], -1)
        seeds += 1
    return [bytes(sample) for sample in ids.tolist()]


def printable(text: bytes) -> str:
    """What a terminal can show; a model that has learnt little writes anything."""
    characters = text.decode(errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else "·" for each in characters)


def report_path(logits: torch.Tensor, options: Options) -> None:
    """Say whether the sampling of these logits runs fused, and why not."""
    k, top_p, temperature = options
    reasons = megasoftmax.why_not_fused(
        megasoftmax.sample, logits, k, scale=1 / temperature, top_k=k, top_p=top_p
    )
    path = "reference path, because " + "; ".join(map(str, reasons)) if reasons else "fused kernels"
    console.print(f"sample runs its {path}", soft_wrap=True)


def main(
    sampler: Annotated[Literal["megasoftmax", "torch", "compare"], typer.Option()] = "compare",
    prompt: Annotated[str, typer.Option(help="what the samples begin with")] = "def ",
    k: Annotated[int, typer.Option(min=1, max=256, help="bytes to choose from")] = 10,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="of their probability")] = 0.95,
    temperature: Annotated[float, typer.Option(min=0.01)] = 0.8,
    samples: Annotated[int, typer.Option(min=1)] = 3,
    count: Annotated[int, typer.Option(min=1, help="bytes per sample")] = 240,
    steps: Annotated[int, typer.Option(min=2, help="of training")] = 800,
    batch: training.Batch = 8,
    length: training.Length = 128,
    layers: training.Layers = 3,
    width: training.Width = 128,
    heads: training.Heads = 4,
    seed: int = 0,
    lr: training.LearningRate = 3e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small Llama on Python source and let it write on, with tokens drawn by sample."""
    training.check_heads(width, heads, is_rotary=True)
    if not prompt:
        raise typer.BadParameter("expected at least one character", param_hint="--prompt")
    register()
    settings = Settings(
        "llama", "fp32", batch, length, layers, width, heads, seed, training.device_named(device)
    )
    trainer = training.Trainer("megasoftmax", build_model(settings, "megasoftmax"), lr)
    batches = training.pieces(steps, batch, length, seed, settings.device)
    training.train([trainer], ((ids, ids) for ids in batches), steps)

    model = trainer.model.eval()
    options = Options(k, top_p, temperature)
    report_path(torch.empty(samples, model.config.vocab_size, device=settings.device), options)
    texts = {}
    for name in SAMPLERS if sampler == "compare" else [sampler]:
        start = time.perf_counter()
        texts[name] = generate(
            model, prompt.encode(), SAMPLERS[name], options, samples, count, seed
        )
        speed = samples * count / (time.perf_counter() - start)
        console.print(f"{name}: {speed:,.0f} bytes/s, the model included")
    for text in next(iter(texts.values())):
        console.print(Panel(Text(printable(text))))
    if sampler == "compare":
        same = texts["megasoftmax"] == texts["torch"]
        training.end(same, "the samples are equal", "THE SAMPLES DIFFER")


if __name__ == "__main__":
    training.run(main)
