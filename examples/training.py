"""What the examples share: text, training in turns, the comparison of two runs, and options."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
import yaml
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging

from megasoftmax import _progress
from megasoftmax.regression.models import read_text

WARM_UP_STEPS = 20  # in which the learning rate rises to its value
TABLE_ROWS = 10
GRADIENT_TOLERANCE = 1e-4  # the defaults came to 1e-6 on a CPU

console = Console()


def pieces(
    steps: int, batch: int, length: int, seed: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Random pieces of the text, int64 [batch, length], so many times. The seed decides which."""
    text = read_text()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        begins = torch.randint(len(text) - length, (batch, 1), generator=generator)
        yield text[begins + torch.arange(length)].to(device, torch.long)


def device_named(name: str) -> torch.device:
    """As --device says; auto: the GPU where there is one.

    A CPU computes with one thread, unless OMP_NUM_THREADS says otherwise. The matrices here are
    small, and where other work runs, threads wait for each other: two threads of two busy cores
    took five times as long as one.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return device


def check_heads(width: int, heads: int, *, is_rotary: bool = False) -> None:
    """Refuses a width that heads cannot share; rotary positions need pairs in each head."""
    if width % heads != 0:
        raise typer.BadParameter(
            f"expected a divisor of --width {width}, got {heads}", param_hint="--heads"
        )
    if is_rotary and width // heads % 2 != 0:
        raise typer.BadParameter(
            f"expected an even --width / --heads, got {width} / {heads}", param_hint="--heads"
        )


def check_file(file: Path, option: str) -> None:
    """Refuses a file that could not be written in the end."""
    if not file.parent.is_dir():
        raise typer.BadParameter(f"no folder {file.parent}", param_hint=option)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise typer.BadParameter(f"cannot write {file}", param_hint=option)


def run(main: Callable[..., None]) -> None:
    """Run an example from the command line; wrong options are one line, without a traceback."""
    logging.set_verbosity_error()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    app()


class Trainer:
    """A model in training; `losses`, `seconds` and `memory` [bytes] have an entry per step."""

    def __init__(
        self, name: str, model: PreTrainedModel, learning_rate: float, dtype: str = "fp32"
    ) -> None:
        self.name = name
        self.model = model.train()
        self.is_autocast = dtype == "bf16"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.memory: list[int] = []
        self.tokens = 0  # of one step, without padding

    def step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **inputs: torch.Tensor | int
    ) -> None:
        """Train on a batch; its memory is the peak above what was allocated before.

        Args:
            input_ids, labels: of the batch.
            inputs: what else the model takes.
        """
        device = self.model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.is_autocast):
            loss = self.model(input_ids, labels=labels, use_cache=False, **inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)
        if device.type == "cuda":
            self.memory.append(torch.cuda.max_memory_allocated(device) - before)
        self.tokens = int(inputs.get("attention_mask", torch.ones_like(input_ids)).sum())

    @property
    def speed(self) -> float:
        """Tokens per second of the median step."""
        return self.tokens / statistics.median(self.seconds)


def train(
    trainers: list[Trainer], batches: Iterable[tuple[torch.Tensor, torch.Tensor]], steps: int
) -> None:
    """Take turns on so many batches, (input_ids, labels)."""
    with _progress.Steps(console, steps) as told:
        for step, batch in enumerate(batches, 1):
            for trainer in trainers:
                trainer.step(*batch)
            states = (f"{t.name} {t.losses[-1]:.3f} {t.speed:,.0f}/s" for t in trainers)
            told.reach(step, ", ".join(states))
    for trainer in trainers:
        report_run(trainer)


def report_run(run: Trainer) -> None:
    """Print the outcome of one run."""
    memory = f"{statistics.median(run.memory) / 2**20:,.0f} MiB" if run.memory else "n/a on CPU"
    loss = f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}"
    console.print(f"{run.name}: loss {loss}, {run.speed:,.0f} tokens/s, memory {memory}")


def compare(
    trainers: list[Trainer],
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    part: str,
    tolerance: float,
) -> bool:
    """Train both; whether `gradients_agree` on the first batch, and `curves_agree` on all."""
    first = next(batches)
    same = gradients_agree(*trainers, first, part)
    train(trainers, itertools.chain([first], batches), steps)
    return curves_agree(*trainers, tolerance) and same


def end(same: bool, agree: str, differ: str) -> NoReturn:
    """Print the verdict; the exit code is 1 for a difference."""
    console.print(agree if same else differ)
    raise typer.Exit(0 if same else 1)


def curves_agree(first: Trainer, second: Trainer, tolerance: float) -> bool:
    """Print both curves side by side, and whether no two losses of a step are further apart."""
    differences = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)]
    table = Table("step", first.name, second.name, "difference")
    last = len(differences) - 1
    for step in sorted({*range(0, last, max(last // TABLE_ROWS, 1)), last}):
        values = first.losses[step], second.losses[step]
        table.add_row(str(step), *(f"{loss:.5f}" for loss in values), f"{differences[step]:.1e}")
    console.print(table)
    console.print(f"tokens/s: {second.name} / {first.name} = {second.speed / first.speed:.2f}")
    largest = torch.tensor(differences).max().item()  # NaN where one of them is
    same = largest <= tolerance
    console.print(
        f"largest difference {largest:.1e}, tolerance {tolerance:.1e}: "
        f"{'the curves agree' if same else 'THE CURVES DIFFER'}"
    )
    return same


def gradients_agree(
    first: Trainer, second: Trainer, batch: tuple[torch.Tensor, torch.Tensor], part: str
) -> bool:
    """Print the gradients that a batch gives parameters with `part` in their names, side by side.

    Whether none is zero, or further off than GRADIENT_TOLERANCE of the parameter's largest.
    """
    input_ids, labels = batch
    found = []
    for trainer in (first, second):
        parameters = [p for name, p in trainer.model.named_parameters() if part in name]
        loss = trainer.model(input_ids, labels=labels, use_cache=False).loss
        found.append(
            torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        )
    names = [name for name, _ in first.model.named_parameters() if part in name]
    table = Table("first gradient of", first.name, second.name, "difference")
    same = bool(names)
    for name, *pair in zip(names, *found, strict=True):
        largest, other, difference = (
            gradient.abs().max().item() for gradient in (*pair, pair[1] - pair[0])
        )
        table.add_row(name, f"{largest:.5f}", f"{other:.5f}", f"{difference:.1e}")
        same &= largest > 0 and difference <= GRADIENT_TOLERANCE * largest
    console.print(table)
    console.print("the first gradients " + ("agree" if same else "DIFFER"))
    return same


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    if file is None:
        return None
    try:
        text = file.read_text()
        values, root = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise typer.BadParameter(f"{file}:{mark.line + 1}: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: expected text in YAML: {error}") from error
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise typer.BadParameter(f"{file}: expected a mapping of options to values, got {kind}")
    known = {parameter.name for parameter in context.command.params} - {"config", "help"}
    for key, _ in root.value:
        if key.value not in known:
            raise typer.BadParameter(
                f"{file}:{key.start_mark.line + 1}: expected options among "
                f"{', '.join(sorted(known))}, got {key.value}"
            )
    context.default_map = values
    return file


def _checked_device(name: str) -> str:
    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise typer.BadParameter(f"{name!r} cannot be used: {reason}") from error
    return name


Steps = Annotated[int, typer.Option(min=2)]
Batch = Annotated[int, typer.Option(min=1, help="sequences per step")]
Length = Annotated[int, typer.Option(min=2, help="bytes per sequence")]
Layers = Annotated[int, typer.Option(min=1)]
Width = Annotated[int, typer.Option(min=1, help="a multiple of --heads")]
Heads = Annotated[int, typer.Option(min=1)]
LearningRate = Annotated[float, typer.Option(help="learning rate of AdamW")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_read_config,
        is_eager=True,
        exists=True,
        dir_okay=False,
        help="YAML with other defaults of these options",
    ),
]
Device = Annotated[
    str, typer.Option(callback=_checked_device, help="cpu, cuda, cuda:1, ...; auto: cuda if any")
]
