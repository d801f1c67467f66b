"""Train a small GPT-2 or Llama on Python source, with megasoftmax and without it.

    python examples/train_gpt.py                                 # both, and how far they part
    python examples/train_gpt.py --model llama --attention megasoftmax --dtype bf16

The default trains one model with transformers' "eager" attention and one with "megasoftmax", from
the same weights on the same batches, in turns. If the swap changes nothing, the two loss curves lie
on each other; if they part by more than a tolerance, the exit code is 1. The text is the standard
library of this Python, read as bytes, so that nothing is downloaded.
"""

import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import megasoftmax
from megasoftmax.integrations.transformers import register

TEXT_BYTES = 2_000_000
WARM_UP_STEPS = 20  # in which the learning rate rises to its value
TABLE_ROWS = 10

# How far two losses of one step may be apart. The two runs round differently and training amplifies
# that: the default settings came to 1e-6 in fp32 and 4e-3 in bf16 on a CPU, twice the learning rate
# to 3e-3 and 4e-2.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}

console = Console()


@dataclass
class Settings:
    """What two runs have in common when they are compared."""

    model: str
    dtype: str
    steps: int
    batch: int
    length: int
    layers: int
    width: int
    heads: int
    seed: int
    learning_rate: float
    device: torch.device


def read_text() -> torch.Tensor:
    """The modules of the standard library, one after the other: uint8 [at most TEXT_BYTES]."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


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
        return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))
    sizes["num_key_value_heads"] = settings.heads // 2 if settings.heads % 2 == 0 else None
    sizes["intermediate_size"] = 3 * settings.width
    return LlamaForCausalLM(LlamaConfig(**sizes))


class Trainer:
    """A model in training; `losses`, `seconds` and `memory` [bytes] have an entry per step."""

    def __init__(self, settings: Settings, attention: str) -> None:
        self.name = attention
        self.settings = settings
        self.model = build_model(settings, attention).to(settings.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.memory: list[int] = []

    def step(self, ids: torch.Tensor) -> None:
        """Train on ids [batch, length]; its memory is the peak above what was allocated before."""
        device = self.settings.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16"):
            loss = self.model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            self.memory.append(torch.cuda.max_memory_allocated(device) - before)

    @property
    def speed(self) -> float:
        """Tokens per second of the median step."""
        return self.settings.batch * self.settings.length / statistics.median(self.seconds)


def train(settings: Settings, trainers: list[Trainer]) -> None:
    """Take turns on random pieces of the text. The seed decides the pieces."""
    text = read_text()
    generator = torch.Generator().manual_seed(settings.seed)
    columns = [BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=settings.steps)
        for _ in range(settings.steps):
            begins = torch.randint(
                len(text) - settings.length, (settings.batch, 1), generator=generator
            )
            ids = text[begins + torch.arange(settings.length)].to(settings.device, torch.long)
            for trainer in trainers:
                trainer.step(ids)
            states = (f"{t.name} {t.losses[-1]:.3f} {t.speed:,.0f}/s" for t in trainers)
            progress.update(task, advance=1, description=", ".join(states))


def report_path(settings: Settings) -> None:
    """Say whether attention of these settings runs fused, or its softmax at least, and why not."""

    def reasons(function: Callable, *tensors: torch.Tensor) -> str:
        return "; ".join(map(str, megasoftmax.why_not_fused(function, *tensors, causal=True)))

    shape = (settings.batch, settings.heads, settings.length)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    head_dim = settings.width // settings.heads
    query = torch.empty(*shape, head_dim, dtype=dtype, device=settings.device)
    against_attention = reasons(megasoftmax.attention, query, query, query)
    against_softmax = reasons(megasoftmax.softmax, query.new_empty(*shape, settings.length))
    if not against_attention:
        path = "fused attention"
    elif not against_softmax:
        path = f"fused softmax; not its fused attention, because {against_attention}"
    else:
        path = f"reference path, because {against_softmax}"
    console.print(f"megasoftmax runs its {path}", soft_wrap=True)


def report_run(run: Trainer) -> None:
    """Print the outcome of one run."""
    memory = f"{statistics.median(run.memory) / 2**20:,.0f} MiB" if run.memory else "n/a on CPU"
    loss = f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}"
    console.print(f"{run.name}: loss {loss}, {run.speed:,.0f} tokens/s, memory {memory}")


def report_difference(eager: Trainer, ours: Trainer) -> float:
    """Print both curves side by side; return the largest difference of two losses of one step."""
    differences = [abs(a - b) for a, b in zip(eager.losses, ours.losses, strict=True)]
    table = Table("step", "eager", "megasoftmax", "difference")
    last = len(differences) - 1
    for step in sorted({*range(0, last, max(last // TABLE_ROWS, 1)), last}):
        values = f"{eager.losses[step]:.5f}", f"{ours.losses[step]:.5f}", f"{differences[step]:.1e}"
        table.add_row(str(step), *values)
    console.print(table)
    console.print(f"tokens/s: megasoftmax / eager = {ours.speed / eager.speed:.2f}")
    return max(differences)


def save_plot(eager: Trainer, ours: Trainer, file: Path) -> None:
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
    steps: Annotated[int, typer.Option(min=2)] = 150,
    batch: Annotated[int, typer.Option(min=1, help="sequences per step")] = 16,
    length: Annotated[int, typer.Option(min=2, help="bytes per sequence")] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    width: Annotated[int, typer.Option(min=1, help="a multiple of --heads")] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    seed: int = 0,
    lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 5e-4,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: cuda if any")] = "auto",
    plot: Annotated[Path, typer.Option(help="where compare saves its plot")] = Path(
        "train_gpt.png"
    ),
) -> None:
    """Train a small GPT-2 or Llama on Python source, with megasoftmax and without it."""
    register()
    logging.set_verbosity_error()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        model, dtype, steps, batch, length, layers, width, heads, seed, lr, torch.device(device)
    )
    if attention in ("megasoftmax", "compare"):
        report_path(settings)
    names = ["eager", "megasoftmax"] if attention == "compare" else [attention]
    trainers = [Trainer(settings, name) for name in names]
    train(settings, trainers)
    for trainer in trainers:
        report_run(trainer)
    if attention != "compare":
        return

    eager, ours = trainers
    largest = report_difference(eager, ours)
    save_plot(eager, ours, plot)
    same = largest <= TOLERANCE[dtype]
    console.print(
        f"largest difference {largest:.1e}, tolerance {TOLERANCE[dtype]:.1e}: "
        f"{'the curves agree' if same else 'THE CURVES DIFFER'}"
    )
    raise typer.Exit(0 if same else 1)


if __name__ == "__main__":
    typer.run(main)
