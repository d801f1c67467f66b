"""Whether training with another attention implementation is the same training.

    report = run("gpt2", candidate="megasoftmax", baseline="eager", dtype="bf16", steps=32)
    for failure in report.failures:
        print(failure)

Three models train side by side on the same batches, from the same weights, each with an AdamW of
its own, without dropout unless it is asked for: the *baseline*, the *candidate*, and the
*reference*, which is the baseline in a higher precision: float32 for bfloat16, float64 for float32,
also where the model itself asks for float32. The reference is taken as the truth, and the
baseline's distance from it as the rounding that the user has accepted. The candidate may be no
further away than that times a factor, plus a floor:

* **From equal weights**, at a few steps spread over the training. The baseline's weights of that
  moment, which a higher precision holds exactly, are lent to the other two, so that only this step
  differs. The loss and the gradient of every parameter are compared. This is strict (`FACTOR`,
  `FLOOR`), and finds faults.
* **Running free**, at every step the loss, and at the end the parameters, all together. Training
  amplifies rounding by a random amount, so this is loose (`FREE_FACTOR`, `FREE_LOSS`,
  `FREE_PARAMETERS`). It finds what goes wrong in other steps.

A gradient's distance is the root mean square of its difference, relative to the largest of three
numbers: the largest gradient in the same layer, a quarter of the largest gradient of a parameter of
that name in the surrounding block, such as a layer of a transformer, and a thousandth of the
gradient of the whole model. Rounding errors grow with the numbers that are added. So where the true
gradient is zero, as for the bias of a key projection, or tiny, as for queries and keys while
attention is uniform, the gradients beside it are the measure. For parameters of few elements a
single distance is random. So the candidate is compared with the baseline's largest distance among
the chosen steps and similar layers, whose names differ in numbers only.

A rectifier or a router of experts may decide by the last bit of a number, and then a step is far
off without a fault. A step that is too far off is therefore repeated from other weights close by,
and a distance counts only if it is too large each time. `Report.repeated` names such steps. In
bfloat16 this happens all the time, in the baseline too, and the allowed distance includes it.

With `dropout=True` the model keeps its dropout. The same seed is set before each step of all
models, so that dropout of hidden states drops the same entries in each. What dropout of attention
drops depends on the implementation:

* All three draw the same random numbers. Then the same entries are dropped, and everything above is
  done with dropout. "eager" and "megasoftmax_softmax" both use torch's dropout of probabilities.
  "megasoftmax" on a GPU and the baseline "megasoftmax_unfused" both draw seeds for
  `megasoftmax.attention`, which the second one computes in plain torch.
* They draw other numbers, as "eager" or "sdpa" and fused "megasoftmax" do. Then everything above is
  done without dropout, and `regression.dropout` compares means over seeds, from the initial
  weights and the first batch. A fault in dropout that moves no mean by more than chance does is
  not found. More seeds find smaller ones.

Layers and paths that are dropped as a whole are never dropped here.

In bfloat16 a fault within its rounding is not found, such as a scale that was rounded to bfloat16.
In float32 it is found.
"""

import math
import platform
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

import megasoftmax
from megasoftmax.regression.dropout import CONFIDENCE, FEWEST_SEEDS, compare_over_seeds
from megasoftmax.regression.dropout import QUANTITIES as OVER_SEEDS
from megasoftmax.regression.models import (
    Batch,
    RegressionError,
    import_object,
    make_batches,
    model_builder,
    take,
)
from megasoftmax.regression.training import (
    PRECISIONS,
    Distance,
    Trainee,
    Training,
    compare,
    relative,
    travelled,
)

FACTOR = 3.0
"""The allowed multiple of the baseline's distance, from equal weights. Attention that does not
write probabilities, torch's too, takes a sum of its backward pass from the rounded output. In half
precision, gradients of queries and keys of tiny models were up to 3.3 times as far off as those of
"eager"."""
FLOOR = 4.0
"""Always allowed from equal weights, in units of the last place of 1 in `dtype`."""
FREE_FACTOR = 8.0
"""The allowed multiple of the baseline's distance, running free."""
FREE_LOSS = 0.01
"""Always allowed for the loss, running free, relative to the reference's loss."""
FREE_PARAMETERS = 0.1
"""Always allowed for the parameters, relative to how far the reference's have moved."""

NOTHING_DROPPED = "none in this model"
SAME_ENTRIES = "the same entries dropped"
OTHER_ENTRIES = "means compared"

REPETITIONS = 3
"""How often a step that is too far off is repeated, at most."""
NEARBY = 0.01
"""How far the weights are changed for a repetition, relative to each weight."""


@dataclass(frozen=True)
class Settings:
    """What a run was asked for: the arguments of `run`."""

    model: str
    data: str
    baseline: str
    candidate: str
    dtype: str
    device: str
    seed: int
    steps: int
    batch: int
    length: int
    learning_rate: float
    checks: int
    dropout: bool
    seeds: int


@dataclass(frozen=True)
class Check:
    """One comparison, of relative distances from the reference, or of means over seeds."""

    quantity: str
    """ "loss from equal weights", "gradient", "loss" (running free) or "parameters" (at the end);
    or one of `regression.dropout.QUANTITIES`"""
    step: int
    parameter: str | None
    baseline: float
    """The baseline's largest distance, which sets `allowed`; over seeds, the standard error."""
    candidate: float
    """Over seeds, how far the candidate's mean is from the baseline's."""
    allowed: float

    @property
    def passed(self) -> bool:
        return self.candidate <= self.allowed < math.inf  # False for NaN

    @property
    def excess(self) -> float:
        """The candidate's distance in units of the allowed one; infinite if one is not finite."""
        is_finite = math.isfinite(self.candidate) and math.isfinite(self.allowed)
        return self.candidate / self.allowed if is_finite else math.inf

    @property
    def layer(self) -> str | None:
        return None if self.parameter is None else self.parameter.rpartition(".")[0]

    def __str__(self) -> str:
        where = f"step {self.step}"
        if self.parameter is not None:
            name = self.parameter.rpartition(".")[2]
            where += f", layer {self.layer or 'of the model itself'}, parameter {name}"
        if self.quantity in OVER_SEEDS:
            return (
                f"{self.quantity}, {where}: mean {self.candidate:.2e} off the baseline's, "
                f"allowed {self.allowed:.2e}, standard error {self.baseline:.2e}"
            )
        return (
            f"{self.quantity}, {where}: {self.candidate:.2e} off the reference, "
            f"allowed {self.allowed:.2e}, baseline {self.baseline:.2e}"
        )


@dataclass(frozen=True)
class Report:
    """The outcome of `run`."""

    settings: Settings
    environment: dict[str, str]
    items: str
    """What speed counts: "tokens" or "samples"."""
    items_per_step: float
    baseline: Training
    candidate: Training
    reference: Training
    kernels: dict[str, int]
    """Operators of megasoftmax that a step of the candidate calls; empty: torch alone."""
    repeated: list[int]
    """Steps that were compared from other weights as well."""
    dropout: str | None
    """How dropout was compared; None: it was switched off."""
    checks: list[Check]

    @property
    def failures(self) -> list[Check]:
        """The checks that did not pass, the worst one first."""
        failed = [check for check in self.checks if not check.passed]
        return sorted(failed, key=lambda check: check.excess, reverse=True)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def kernels_tested(self) -> bool:
        """Whether kernels of megasoftmax ran; on a CPU, or unfused, torch alone was tested."""
        return bool(self.kernels)

    def worst(self, quantity: str) -> Check:
        """The check of this quantity that came closest to failing, or failed most."""
        alike = (check for check in self.checks if check.quantity == quantity)
        return max(alike, key=lambda check: check.excess)

    def speed(self, training: Training) -> float:
        """Items per second of the median step."""
        return self.items_per_step / statistics.median(training.seconds)

    def peak_mebibytes(self, training: Training) -> float | None:
        """Of the median step; None where there is no GPU."""
        return statistics.median(training.peak_bytes) / 2**20 if training.peak_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON has it; numbers that are not finite become strings."""
        costs = {
            name: {
                f"{self.items}_per_second": self.speed(training),
                "peak_mebibytes": self.peak_mebibytes(training),
            }
            for name, training in (("baseline", self.baseline), ("candidate", self.candidate))
        }
        found = {
            "passed": self.passed,
            "kernels_tested": self.kernels_tested,
            "failures": [str(failure) for failure in self.failures],
            "costs": costs,
            **asdict(self),
        }
        return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def run(
    model: str | Callable[..., torch.nn.Module] = "gpt2",
    *,
    data: str | Callable[..., Iterable[Batch]] | None = None,
    baseline: str = "eager",
    candidate: str = "megasoftmax",
    dtype: str = "fp32",
    device: str = "auto",
    seed: int = 0,
    steps: int = 32,
    batch: int = 6,
    length: int = 64,
    learning_rate: float = 1e-3,
    checks: int = 5,
    dropout: bool = False,
    seeds: int = 64,
    progress: Callable[[int], None] = lambda step: None,
) -> Report:
    """Train the baseline, the candidate and the reference side by side, and compare.

    Args:
        model: a tiny one by name (`regression.models.NAMES`); a folder with a config.json and, if
            its weights are wanted, a checkpoint; "package.module:factory" or the factory itself,
            which returns a PreTrainedModel, or takes the name of the attention implementation and
            returns any module whose forward(**batch) returns something with a scalar `loss`.
        data: None for the standard library's own sources (`regression.models.make_batches`);
            "package.module:batches" or a callable, called as (batch, length, seed), that returns an
            iterable of batches: mappings of names to tensors.
        baseline, candidate: attention implementations known to transformers, or to the factory.
        dtype: "fp32"; "bf16", as most people train: autocast, weights in float32; "pure-bf16".
        device: "cpu", "cuda", "cuda:1", ...; "auto" is cuda where there is one.
        seed: decides initial weights and data.
        steps: of training.
        batch, length: sequences of a batch, and tokens of a sequence.
        learning_rate: of AdamW, constant.
        checks: at how many steps gradients are compared: the first, the second, the last, and
            others between them. Each costs a further forward and backward pass of all three.
        dropout: keep the model's dropout, and compare it too; else it is switched off.
        seeds: of each side, at least 16, where baseline and candidate drop other entries. Each
            costs a forward and backward pass. Four times as many find faults of half the size.
        progress: called after each step with its number.

    Returns:
        The report. Its `failures` is empty if the candidate trains as the baseline does.

    Raises:
        RegressionError: wrong arguments; a model that cannot be built, switched or run; losses or
            gradients of baseline or reference that are not finite.

    All three models and their moments stay on the device; while gradients are compared, up to
    three more copies of the weights, and no more than two models' gradients.
    """
    device = _device(device)
    settings = Settings(
        _name(model),
        "sources of the standard library" if data is None else _name(data),
        *(baseline, candidate, dtype, device, seed, steps, batch, length, learning_rate),
        *(checks, dropout, seeds),
    )
    _check(settings)
    precision = PRECISIONS[dtype]
    build = model_builder(model)
    trainees = []
    for role, name in (("baseline", baseline), ("candidate", candidate), ("reference", baseline)):
        torch.manual_seed(seed)
        trainees.append(Trainee(role, name, build(name), precision, device, learning_rate))
    first, second, truth = trainees
    second.start_from(first)
    truth.start_from(first)
    start = {name: p.detach().to("cpu", copy=True) for name, p in first.parameters.items()}
    if data is None:
        batches: Iterable[Batch] = make_batches(first.model, batch, length, seed)
    else:
        source = import_object(data, "data") if isinstance(data, str) else data
        batches = source(batch, length, seed)

    comparison = _Comparison(precision.epsilon)
    chosen = _chosen_steps(steps, checks)
    counts = []
    how_dropped: str | None = None
    over_seeds: list[Check] = []
    for step, given in enumerate(take(batches, steps)):
        moved = {name: tensor.to(device) for name, tensor in given.items()}
        counts.append(_count(moved))
        if step == 0 and dropout:
            how_dropped = _how_dropped(trainees, moved)
            if how_dropped == OTHER_ENTRIES:
                found = compare_over_seeds(moved, first, second, seeds, comparison.floor)
                over_seeds = [Check(each.quantity, step, *each[1:]) for each in found]
                how_dropped = f"{OTHER_ENTRIES} over {seeds} seeds at {CONFIDENCE:.1%} confidence"
        dropout_seed = step if how_dropped == SAME_ENTRIES else None
        if step in chosen:
            comparison.add(step, moved, trainees, dropout_seed)
        for trainee in trainees:
            trainee.step(step, moved, dropout_seed)
        progress(step)

    ends = travelled(first, truth, start), travelled(second, truth, start)
    return Report(
        settings,
        _environment(device),
        counts[0][0],
        statistics.mean(count for _, count in counts),
        first.record,
        second.record,
        truth.record,
        dict(second.kernels),
        comparison.repeated,
        how_dropped,
        [
            *comparison.judge(),
            *_judge_losses(first.record, second.record, truth.record),
            _judge_freely("parameters", steps - 1, *ends, floor=FREE_PARAMETERS),
            *over_seeds,
        ],
    )


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RegressionError(f"device: {device!r} cannot be used: {error}") from error
    return device


def _name(given: str | Callable) -> str:
    return given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))


def _check(settings: Settings) -> None:
    if settings.dtype not in PRECISIONS:
        expected = ", ".join(PRECISIONS)
        raise RegressionError(f"dtype: expected one of {expected}, got {settings.dtype!r}")
    fewest = {"steps": 1, "batch": 1, "length": 4, "checks": 1, "seeds": FEWEST_SEEDS}
    for name, least in fewest.items():
        actual = getattr(settings, name)
        if actual < least:
            raise RegressionError(f"{name}: expected at least {least}, got {actual}")


def _environment(device: str) -> dict[str, str]:
    cuda = torch.device(device).type == "cuda"
    return {
        "megasoftmax": megasoftmax.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else f"{device}, {platform.machine()}",
    }


def _how_dropped(trainees: list[Trainee], batch: Batch) -> str:
    """NOTHING_DROPPED, SAME_ENTRIES or OTHER_ENTRIES: by what a step draws."""
    for trainee in trainees:
        trainee.differentiate(0, batch, seed=0)
        trainee.optimizer.zero_grad()
    draws = [trainee.draws for trainee in trainees]
    if not any(draws):
        return NOTHING_DROPPED
    return SAME_ENTRIES if all(each == draws[0] for each in draws) else OTHER_ENTRIES


def _chosen_steps(steps: int, checks: int) -> set[int]:
    """The first, the second, the last and others between them; at most `checks`."""
    last = steps - 1
    between = [1 + round(i * (last - 1) / max(checks - 2, 1)) for i in range(checks - 1)]
    return {min(step, last) for step in [0, *between]}


def _count(batch: Batch) -> tuple[str, int]:
    """What a batch consists of, tokens or samples, and how many."""
    if "input_ids" in batch:
        return "tokens", batch["input_ids"].numel()
    return "samples", len(next(iter(batch.values())))


class _Comparison:
    """Compares the chosen steps, from equal weights."""

    def __init__(self, epsilon: float) -> None:
        self.floor = FLOOR * epsilon
        self.repeated: list[int] = []
        self._measured: list[tuple[int, Distance]] = []
        self._largest: dict[str | None, float] = defaultdict(float)  # of the baseline, by kind

    def add(self, step: int, batch: Batch, trainees: list[Trainee], seed: int | None) -> None:
        """Measure a step; repeat it from weights close to the baseline's while it is too far off.

        `seed` of dropout; None: switched off.
        """
        baseline, candidate, reference = trainees
        weights = {name: p.detach().clone() for name, p in baseline.parameters.items()}
        generator = torch.Generator(baseline.device).manual_seed(step)

        def measure() -> list[Distance]:
            distances = compare(step, batch, weights, baseline, candidate, reference, seed)
            for found in distances:
                kind = _kind(found.parameter)
                self._largest[kind] = max(self._largest[kind], found.baseline)
            return distances

        closest = measure()
        for _ in range(REPETITIONS):
            if all(found.candidate <= self._allowed(found.parameter) for found in closest):
                break
            for weight in weights.values():
                noise = torch.randn(
                    weight.shape, generator=generator, dtype=torch.float32, device=weight.device
                )
                weight.mul_(1 + NEARBY * noise)
            pairs = zip(closest, measure(), strict=True)
            closest = [min(pair, key=lambda found: found.candidate) for pair in pairs]
            self.repeated = sorted({*self.repeated, step})
        self._measured += [(step, found) for found in closest]

    def judge(self) -> Iterator[Check]:
        """A check for each measured distance, by the baseline's largest of its kind."""
        for step, (parameter, _, candidate) in self._measured:
            quantity = "loss from equal weights" if parameter is None else "gradient"
            largest, allowed = self._largest[_kind(parameter)], self._allowed(parameter)
            yield Check(quantity, step, parameter, largest, candidate, allowed)

    def _allowed(self, parameter: str | None) -> float:
        return FACTOR * self._largest[_kind(parameter)] + self.floor


def _kind(parameter: str | None) -> str | None:
    """The parameter's name without numbers, which similar layers share."""
    return None if parameter is None else re.sub(r"\d+", "*", parameter)


def _judge_losses(baseline: Training, candidate: Training, reference: Training) -> Iterator[Check]:
    """Compare the candidate with the baseline's largest distance up to the same step."""
    largest = 0.0
    curves = zip(baseline.losses, candidate.losses, reference.losses, strict=True)
    for step, (of_baseline, of_candidate, truth) in enumerate(curves):
        largest = max(largest, relative(of_baseline - truth, truth))
        distance = relative(of_candidate - truth, truth)
        yield _judge_freely("loss", step, largest, distance, floor=FREE_LOSS)


def _judge_freely(
    quantity: str, step: int, baseline: float, candidate: float, floor: float
) -> Check:
    return Check(quantity, step, None, baseline, candidate, FREE_FACTOR * baseline + floor)
