"""Train a small model with its sequences split over the ranks, beside one process that has all.

    torchrun --standalone --nproc-per-node 2 examples/train_ring.py    # seconds on a CPU

The number of ranks is a power of 2, up to 32.

Rank r has parts r and 2 * ranks - 1 - r of each sequence, with which causal attention gives all
ranks the same work. Keys and values go round in a ring. Gradients are averaged over the ranks. Both
models begin with the same weights and get the same text, so their losses are equal. If two losses
of a step differ by more than a tolerance, the exit code is 1.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megasoftmax

STEPS, BATCH, LENGTH, WIDTH, HEADS = 10, 4, 64, 64, 4
TOLERANCE = 1e-4


class Model(nn.Module):
    """A layer of attention over bytes.

    Args:
        group: the ranks that share each sequence; None: this process has whole ones.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.project, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, tokens, 256]."""
        hidden = self.tokens(tokens) + self.positions(positions)
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.project(hidden).chunk(3, -1)
        )
        if self.group is None:
            output = megasoftmax.attention(query, key, value, causal=True)
        else:
            output, _ = megasoftmax.ring_attention(
                query, key, value, group=self.group, order="zigzag", causal=True
            )
        return self.head(hidden + self.output(output.transpose(1, 2).flatten(2)))


def train(group: dist.ProcessGroup | None) -> list[float]:
    """The loss of each step, over whole sequences."""
    text = torch.tensor([*Path(__file__).read_bytes()])
    generator = torch.Generator().manual_seed(0)
    model = Model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        begins = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        pieces = text[begins + torch.arange(LENGTH + 1)]
        # Labels are shifted before they are cut: the next token may be on another rank.
        batch = [pieces[:, :-1], pieces[:, 1:], torch.arange(LENGTH).expand(BATCH, LENGTH)]
        if group is not None:
            batch = [
                megasoftmax.zigzag_chunk(each, group.size(), 1)[group.rank()] for each in batch
            ]
        tokens, labels, positions = batch
        logits = model(tokens, positions)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            for each in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(each, group=group)
                each /= group.size()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(f"run it with torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    split, whole = train(group), train(None)
    difference = (torch.tensor(split) - torch.tensor(whole)).abs().max().item()
    if group.rank() == 0:
        for step, (first, second) in enumerate(zip(whole, split, strict=True), 1):
            print(f"step {step}: loss {first:.5f}, over {group.size()} ranks {second:.5f}")
        verdict = "agree" if difference <= TOLERANCE else "DIFFER"
        print(f"largest difference {difference:.1e}: the losses {verdict}")
    dist.destroy_process_group()
    sys.exit(0 if difference <= TOLERANCE else 1)


if __name__ == "__main__":
    main()
