"""Train a small stack of triangle attention to complete the distances of chains of points.

    python examples/triangle_attention.py                        # half a minute on 2 CPU cores
    python examples/triangle_attention.py --length 64 --device cuda

Some distances of a chain in space are given, and the model finds the others. As in AlphaFold 3,
pair (i, j) looks at the pairs (i, k) with a bias of the pair (j, k), which all i share and which
learns; the second half of a layer does the same for columns. One model writes the scores with
einsum, and one calls `megasoftmax.attention`, from the same weights on the same batches. The
example prints what each keeps in memory for the backward pass, and the time of a step. A CPU has no
kernels of megasoftmax: there it computes scores again in the backward pass, and takes longer.
A token of the output is a pair. Should the losses differ, or the biases not learn the same, the
exit code is 1.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Annotated

import torch
import training
import typer
from rich.table import Table
from torch import Tensor, nn
from training import console

import megasoftmax

LOSS_TOLERANCE = 1e-3  # how far two losses of one step may be apart; on a CPU it was 1e-6
UNKNOWN, PADDING = -1.0, -2.0  # in place of a distance
GIVEN_SHARE = 0.3  # of the distances
POINTS = 96  # the fewest of a chain for which memory is compared

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def by_einsum(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor) -> Tensor:
    """Triangle attention as most code has it: writes scores [batch, rows, heads, n, n]."""
    scores = torch.einsum("brhqd,brhkd->brhqk", query, key) * query.shape[-1] ** -0.5
    scores = scores + bias - 1e9 * excluded
    return torch.einsum("brhqk,brhkd->brhqd", scores.softmax(-1), value)


def by_megasoftmax(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, excluded: Tensor
) -> Tensor:
    """The same without them. The bias [batch, 1, heads, n, n] broadcasts to all rows."""
    return megasoftmax.attention(query, key, value, bias=bias, mask=excluded)


class TriangleAttention(nn.Module):
    """AlphaFold 3's, of the rows of a pair representation [batch, n, n, width]."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.bias_of_pairs = nn.Linear(width, heads, bias=False)
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, pairs: Tensor, excluded: Tensor) -> Tensor:
        pairs = self.norm(pairs)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in self.project(pairs).chunk(3, -1)
        )
        bias = self.bias_of_pairs(pairs).movedim(-1, 1).unsqueeze(1)
        found = self.attend(query, key, value, bias, excluded)
        return self.output(found.transpose(-2, -3).flatten(-2) * self.gate(pairs).sigmoid())


class PairStack(nn.Module):
    """Distances of all pairs from some."""

    def __init__(self, layers: int, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.rows, self.columns = (
            nn.ModuleList(TriangleAttention(width, heads, attend) for _ in range(layers))
            for _ in range(2)
        )
        self.transitions = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.ReLU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )
        self.distance = nn.Linear(width, 1)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def forward(self, given: Tensor, labels: Tensor, use_cache: bool = False) -> SimpleNamespace:
        """The mean squared error of the distances that are labels.

        Args:
            given: [batch, n, n], distances, UNKNOWN or PADDING.
            labels: [batch, n, n], distances or PADDING.
            use_cache: what the trainer passes to every model.
        """
        place = torch.arange(given.shape[-1], device=given.device)
        apart = (place[:, None] - place).abs().clamp(max=4).expand_as(given) / 4
        known = (given >= 0).float()
        pairs = self.embed(torch.stack([known, given * known, apart], -1))
        is_padding = (given == PADDING).all(-1)
        excluded = is_padding[:, None, None, None]  # as keys of every row, head and query
        for rows, columns, transition in zip(
            self.rows, self.columns, self.transitions, strict=True
        ):
            pairs = pairs + rows(pairs, excluded)
            pairs = pairs + columns(pairs.transpose(1, 2), excluded).transpose(1, 2)
            pairs = pairs + transition(pairs)
        error = (self.distance(pairs).squeeze(-1) - labels).square()
        is_label = (labels != PADDING).float()
        return SimpleNamespace(loss=(error * is_label).sum() / is_label.sum())


def chains(
    steps: int, batch: int, length: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random walks in space, the second of each batch half as long: given distances, and all."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        walk = torch.randn(batch, length, 3, generator=generator).cumsum(1) / length**0.5
        distances = torch.cdist(walk, walk)
        is_given = torch.rand(batch, length, length, generator=generator) < GIVEN_SHARE
        given = distances.where(is_given | is_given.mT, UNKNOWN)
        for tensor in (given, distances):
            tensor[1::2, length // 2 :] = PADDING
            tensor[1::2, :, length // 2 :] = PADDING
        yield given.to(device), distances.to(device)


def kept_bytes(model: PairStack, batch: tuple[Tensor, Tensor]) -> int:
    """What autograd keeps between the passes, without the weights."""
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(batch[0], labels=batch[1]).loss
    del loss
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    return sum(size for address, size in kept.items() if address not in weights)


def main(
    steps: training.Steps = 60,
    batch: Annotated[int, typer.Option(min=1, help="chains per step")] = 4,
    length: Annotated[int, typer.Option(min=2, help="points of a chain")] = 24,
    layers: training.Layers = 2,
    width: training.Width = 32,
    heads: training.Heads = 4,
    seed: int = 0,
    lr: training.LearningRate = 2e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a small stack of triangle attention, by einsum and by megasoftmax."""
    training.check_heads(width, heads)
    place = training.device_named(device)
    trainers = []
    for name, attend in (("einsum", by_einsum), ("megasoftmax", by_megasoftmax)):
        torch.manual_seed(seed)
        model = PairStack(layers, width, heads, attend).to(place)
        trainers.append(training.Trainer(name, model, lr))

    points = max(length, POINTS)
    (large,) = chains(1, 1, points, seed, place)
    kept = [kept_bytes(trainer.model, large) / 2**20 for trainer in trainers]
    batches = chains(steps, batch, length, seed, place)
    same = training.compare(trainers, batches, steps, "bias_of_pairs", LOSS_TOLERANCE)

    table = Table("", *(trainer.name for trainer in trainers))
    sizes = (f"{size:.0f}" for size in kept)
    table.add_row(f"MiB kept for the backward pass of {points} points", *sizes)
    times = (1e3 * statistics.median(trainer.seconds) for trainer in trainers)
    table.add_row("ms of a step", *(f"{milliseconds:.1f}" for milliseconds in times))
    console.print(table)
    training.end(same, "the biases learn alike", "THE BIASES LEARN DIFFERENTLY")


if __name__ == "__main__":
    training.run(main)
