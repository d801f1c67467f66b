"""Dropout in `megasoftmax.regression`: means over seeds, where two sides drop other entries.

Each side computes the loss and the gradients of one batch, from equal weights, once per seed. A
two-sample test compares the means of the loss, of the whole gradient's norm, and for each
parameter of its gradient's norm and of its gradient along the one without dropout. The means may
differ by

    t sqrt((variance + variance of the other side) / seeds)

plus what the two sides differ by without dropout, plus the floor of rounding. t is the quantile of
Student's distribution with seeds - 1 degrees of freedom, the fewest that a test of two means with
unequal variances can have. All tests together have the stated confidence: Bonferroni's correction
divides the remaining probability among them.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megasoftmax.regression.models import Batch
from megasoftmax.regression.training import Trainee, gradient_scales, relative

FEWEST_SEEDS = 16
"""The fewest seeds of each side; with fewer, `quantile` is too small."""
CONFIDENCE = 0.999
"""The probability that a correct implementation passes all tests of a model."""
LOSS, NORM, GRADIENT = "loss over seeds", "gradient norm over seeds", "gradient over seeds"
QUANTITIES = (LOSS, NORM, GRADIENT)

Quantity = tuple[str, str | None]
"""One of QUANTITIES, and a parameter; None: of the whole model."""


class Difference(NamedTuple):
    """Of the means of baseline and candidate, relative to the baseline without dropout."""

    quantity: str
    parameter: str | None
    standard_error: float
    difference: float
    allowed: float


def compare_over_seeds(
    batch: Batch, baseline: Trainee, candidate: Trainee, seeds: int, floor: float
) -> list[Difference]:
    """The differences of the means, over as many seeds for each side.

    Args:
        batch: on the device of both.
        baseline, candidate: with equal weights, which stay as they are, and no gradients.
        seeds: of each side, at least FEWEST_SEEDS. The sides share none.
        floor: relative difference that is always allowed.

    Raises:
        RegressionError: those of `Trainee.differentiate`.
    """
    pair = baseline, candidate
    baseline.differentiate(0, batch)
    direction = _gradients(baseline)
    scales = gradient_scales(baseline.parameters)
    baseline.optimizer.zero_grad()

    def measure(trainee: Trainee, seed: int | None) -> dict[Quantity, float]:
        loss = trainee.differentiate(0, batch, seed)
        found = _measured(loss, _gradients(trainee), direction)
        trainee.optimizer.zero_grad()
        return found

    plain = [measure(trainee, None) for trainee in pair]
    samples: list[list[dict[Quantity, float]]] = [[], []]
    for index in range(seeds):
        for side, trainee in enumerate(pair):
            samples[side].append(measure(trainee, 2 * index + side))

    t = quantile((1 - CONFIDENCE) / len(plain[0]), seeds - 1)
    found = []
    for quantity in plain[0]:
        name, parameter = quantity
        scale = plain[0][quantity] if parameter is None else scales[parameter]
        first, second = ([each[quantity] for each in side] for side in samples)
        error = math.sqrt((_variance(first) + _variance(second)) / seeds)
        difference = statistics.fmean(first) - statistics.fmean(second)
        rounding = relative(plain[0][quantity] - plain[1][quantity], scale)
        error, difference = relative(error, scale), relative(difference, scale)
        found.append(Difference(name, parameter, error, difference, t * error + rounding + floor))
    return found


def _gradients(trainee: Trainee) -> dict[str, torch.Tensor]:
    """The gradients in float64; a missing gradient is zero."""
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double()
        for name, p in trainee.parameters.items()
    }


def _measured(
    loss: float, gradients: dict[str, torch.Tensor], direction: dict[str, torch.Tensor]
) -> dict[Quantity, float]:
    """The numbers whose means are compared. Those of a parameter are root mean squares."""
    numbers = []
    for name, gradient in gradients.items():
        along = direction[name] / direction[name].norm().clamp_min(torch.finfo(torch.float64).tiny)
        numbers += [gradient.norm(), (gradient * along).sum()]
    pairs = torch.stack(numbers).view(-1, 2)
    found: dict[Quantity, float] = {(LOSS, None): loss, (NORM, None): pairs[:, 0].norm().item()}
    for (name, gradient), (norm, product) in zip(gradients.items(), pairs.tolist(), strict=True):
        root = math.sqrt(gradient.numel())
        found |= {(NORM, name): norm / root, (GRADIENT, name): product / root}
    return found


def _variance(sample: Sequence[float]) -> float:
    """NaN where a number is not finite, which `statistics` may refuse."""
    return statistics.variance(sample) if all(map(math.isfinite, sample)) else math.nan


def quantile(tail: float, degrees: int) -> float:
    """Of Student's t: |t| exceeds it with the probability `tail`. From 15 degrees on, within 1%.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = statistics.NormalDist().inv_cdf(1 - tail / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
