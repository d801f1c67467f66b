"""Train a small Llama on documents of very different lengths, padded and packed.

    python examples/train_packed.py                              # half a minute on a CPU
    python examples/train_packed.py --device cuda                # a larger model, in bf16

Padding makes all documents of a batch as long as the longest one. Packing puts them one after the
other in a single row, with position_ids that begin again at 0 in each document; attention sees
only the document, and no mask of tokens x tokens is made. Both models begin with the same weights
and get the same documents, so their losses per token are equal. If two losses of a step differ by
more than a tolerance, the exit code is 1.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
import training
import typer
from torch.nn.utils.rnn import pad_sequence
from train_gpt import TOLERANCE, Settings, build_model, report_path
from training import console
from transformers import DataCollatorWithFlattening, PreTrainedModel

from megasoftmax.integrations.transformers import register

# By the type of the device.
DEFAULTS = {
    "cpu": {"dtype": "fp32", "batch": 8, "length": 256, "layers": 4, "width": 128, "heads": 4},
    "cuda": {"dtype": "bf16", "batch": 16, "length": 2048, "layers": 8, "width": 1024, "heads": 16},
}
RATIO = 32  # of the longest document to the shortest

Documents = list[torch.Tensor]  # int64 [tokens] each


class DocumentTrainer(training.Trainer):
    """Trains on documents, as `collate` makes a batch of them."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        learning_rate: float,
        dtype: str,
        collate: Callable[[Documents], dict[str, Any]],
    ) -> None:
        super().__init__(name, model, learning_rate, dtype)
        self.collate = collate

    def step(self, documents: Documents) -> None:
        """Collating and copying to the device are not timed."""
        batch = self.collate(documents)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                batch[name] = value.to(self.model.device)
        super().step(**batch)


def pad(documents: Documents) -> dict[str, torch.Tensor]:
    """A row for each document; the label -100 is ignored by the loss."""
    return {
        "input_ids": pad_sequence(documents, batch_first=True),
        "labels": pad_sequence(documents, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(list(map(torch.ones_like, documents)), batch_first=True),
    }


def pack(documents: Documents) -> dict[str, Any]:
    """A row for all documents: position_ids begin again, cu_seq_lens_q says where.

    The first token of a document has the label -100: the last one of another must not predict it.
    """
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return collate([{"input_ids": document} for document in documents])


def lengths_of(batch: int, longest: int) -> list[int]:
    """Tokens of the documents of every step, evenly spread on a logarithmic scale."""
    shortest = max(longest / RATIO, 2)
    ratios = torch.linspace(0, 1, batch)
    return [round(shortest * (longest / shortest) ** ratio) for ratio in ratios.tolist()]


def batches(steps: int, lengths: list[int], seed: int) -> Iterator[tuple[Documents]]:
    """Random documents of Python source."""
    for rows in training.pieces(steps, len(lengths), max(lengths), seed, torch.device("cpu")):
        yield ([row[:length] for row, length in zip(rows, lengths, strict=True)],)


def main(
    dtype: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(help="bf16: autocast, weights in fp32; by default on a GPU"),
    ] = None,
    steps: training.Steps = 60,
    batch: Annotated[
        int | None, typer.Option(min=2, help="documents per step; by default 8, on a GPU 16")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="bytes of the longest document; by default 256, on a GPU 2048"),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="by default 4, on a GPU 8")] = None,
    width: Annotated[
        int | None,
        typer.Option(min=1, help="a multiple of --heads; by default 128, on a GPU 1024"),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="by default 4, on a GPU 16")] = None,
    seed: int = 0,
    lr: training.LearningRate = 5e-4,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small Llama on documents of very different lengths, padded and packed."""
    place = training.device_named(device)
    options = {"dtype": dtype, "batch": batch, "length": length}
    options |= {"layers": layers, "width": width, "heads": heads}
    given = {name: value for name, value in options.items() if value is not None}
    defaults = DEFAULTS["cpu" if place.type == "cpu" else "cuda"]
    settings = Settings("llama", **(defaults | given), seed=seed, device=place)
    training.check_heads(settings.width, settings.heads, is_rotary=True)
    register()

    lengths = lengths_of(settings.batch, settings.length)
    rows = settings.batch * settings.length
    console.print(
        f"{settings.batch} documents of {lengths[0]} to {lengths[-1]} bytes: "
        f"{sum(lengths):,} tokens packed, {rows:,} padded"
    )
    report_path(settings)
    trainers = [
        DocumentTrainer(name, build_model(settings, "megasoftmax"), lr, settings.dtype, collate)
        for name, collate in (("padded", pad), ("packed", pack))
    ]
    training.train(trainers, batches(steps, lengths, seed), steps)
    raise typer.Exit(0 if training.curves_agree(*trainers, TOLERANCE[settings.dtype]) else 1)


if __name__ == "__main__":
    training.run(main)
