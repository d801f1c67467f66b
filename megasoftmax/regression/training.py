"""Models in training for `megasoftmax.regression`, in their own precision or a higher one."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from megasoftmax.regression.models import Batch, RegressionError


class Precision(NamedTuple):
    """What a `dtype` of the command means."""

    weights: torch.dtype
    autocast: torch.dtype | None
    reference: torch.dtype
    """The type of the reference's weights; the reference has no autocast."""
    meaning: str

    @property
    def epsilon(self) -> float:
        return torch.finfo(self.autocast or self.weights).eps


PRECISIONS = {
    "fp32": Precision(torch.float32, None, torch.float64, "weights in fp32"),
    "bf16": Precision(
        torch.float32, torch.bfloat16, torch.float32, "autocast to bf16, weights in fp32"
    ),
    "pure-bf16": Precision(torch.bfloat16, None, torch.float32, "weights in bf16, no autocast"),
}

SHARE_OF_BLOCK = 0.25
SHARE_OF_MODEL = 1e-3
"""Shares of the largest gradient of that name in the block, and of the whole model's gradient; see
`regression.comparison`."""


@dataclass
class Training:
    """What one of the three models did; a number per step in each list."""

    implementation: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    """Above what was allocated before the step; empty where there is no GPU."""


class Trainee:
    """A model, its AdamW, and how it computes.

    Args:
        role: "baseline", "candidate" or "reference"; the last one computes in higher precision.
        implementation: of attention.
        model: with weights of any type; its dropout is switched off until a seed is given.
        precision: of baseline and candidate.
        device: where it trains.
        learning_rate: of AdamW.
    """

    def __init__(
        self,
        role: str,
        implementation: str,
        model: torch.nn.Module,
        precision: Precision,
        device: str,
        learning_rate: float,
    ) -> None:
        is_reference = role == "reference"
        self.name = f"{role} {implementation!r}"
        self.may_diverge = role == "candidate"
        self.record = Training(implementation)
        self.device = torch.device(device)
        self.autocast = None if is_reference else precision.autocast
        self.given_dtype = precision.weights
        self.dtype = precision.reference if is_reference else precision.weights
        self.model = model.to(self.device, self.given_dtype).to(self.dtype).train()
        self.dropout = _dropout_of(model)
        self.draws: list[Draw] = []
        """What the latest `differentiate` with a seed drew."""
        self._set_dropout(on=False)
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=learning_rate)
        self.kernels: Counter[str] = Counter()
        """Operators of megasoftmax that the latest `compare` called."""
        if (
            self.dtype == torch.float64
            and isinstance(model, PreTrainedModel)
            and model._can_set_experts_implementation()
        ):
            model.set_experts_implementation("eager")  # torch's grouped_mm has no float64

    def start_from(self, other: "Trainee") -> None:
        """Take over all parameters and buffers.

        Raises:
            RegressionError: the two models have different ones.
        """
        try:
            self.model.load_state_dict(other.model.state_dict())
        except RuntimeError as error:
            raise RegressionError(
                f"model: expected the same parameters for the {self.name} as for the {other.name}: "
                f"{error}"
            ) from error

    def step(self, step: int, batch: Batch, seed: int | None = None) -> None:
        """Train on a batch, and record what it costs; `seed` as in `differentiate`."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        start = time.perf_counter()
        loss = self.differentiate(step, batch, seed)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize(self.device)
            self.record.peak_bytes.append(torch.cuda.max_memory_allocated(self.device) - before)
        self.record.seconds.append(time.perf_counter() - start)
        self.record.losses.append(loss)

    def differentiate(self, step: int, batch: Batch, seed: int | None = None) -> float:
        """Add the loss's gradients to those of the parameters; return the loss.

        `seed` decides what dropout drops; None: dropout is switched off.

        Raises:
            RegressionError: the model raised something; the loss is no number, and this is not
                the candidate.
        """
        batch = {
            name: t.to(self.given_dtype).to(self.dtype) if t.is_floating_point() else t
            for name, t in batch.items()
        }
        try:
            dropping = nullcontext() if seed is None else self._dropping(seed)
            with dropping, _Doubled() if self.dtype == torch.float64 else nullcontext():
                with torch.autocast(
                    self.device.type, self.autocast, enabled=self.autocast is not None
                ):
                    loss = self.model(**batch).loss
                loss.backward()
        except Exception as error:
            raise RegressionError(
                f"{self.name}: step {step} raised {type(error).__name__}: {error}"
            ) from error
        value = loss.item()
        if not math.isfinite(value) and not self.may_diverge:
            raise RegressionError(
                f"{self.name}: expected a finite loss, got {value} at step {step}; "
                "a lower learning rate may help"
            )
        return value

    @contextmanager
    def _dropping(self, seed: int) -> Iterator[None]:
        """Dropout until the block ends; then the generator has its old state again."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), _SameDropout() as dropout:
            torch.manual_seed(seed)
            self._set_dropout(on=True)
            try:
                yield
            finally:
                self._set_dropout(on=False)
                self.draws = dropout.draws

    def _set_dropout(self, *, on: bool) -> None:
        for module, name, rate in self.dropout:
            setattr(module, name, rate if on and not _drops_layers(module, name) else 0.0)

    @contextmanager
    def lent(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Have other weights until the block ends, and no gradients afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._set(weights)
        try:
            yield
        finally:
            self._set(own)
            self.optimizer.zero_grad()

    @torch.no_grad()
    def _set(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def _dropout_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, float]]:
    """Modules, names of their attributes, and the probabilities to drop that these hold."""
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and ("drop" in name or (name == "p" and isinstance(module, _DropoutNd)))
    ]


def _drops_layers(module: torch.nn.Module, name: str) -> bool:
    """Whether the probability is that of a whole layer or path, drawn in the type of the model."""
    return "layerdrop" in name or type(module).__name__.endswith("DropPath")


Draw = tuple[str, int]
"""A function that draws random numbers, and how many."""


class _SameDropout(TorchFunctionMode):
    """Makes a seed drop the same entries in every precision; `draws` tells what was drawn.

    torch's dropout takes other random numbers for other types. Here they are float32 always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.dropout:
            return self._dropout(*args, **kwargs)
        result = function(*args, **kwargs)
        if function is torch.nn.functional.scaled_dot_product_attention:
            if _dropout_of_sdpa(*args, **kwargs) > 0:
                self.draws.append(("attention", args[0].shape.numel()))
        elif function is torch.randint:
            self.draws.append(("seed", result.numel()))
        return result

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return input
        self.draws.append(("dropout", input.numel()))
        keep = torch.rand(input.shape, dtype=torch.float32, device=input.device) >= p
        return torch.where(keep, input, 0) * (1 / (1 - p) if p < 1 else 0.0)


def _dropout_of_sdpa(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any
) -> float:
    return dropout_p


class _Doubled(TorchFunctionMode):
    """Computes in float64 what asks for float32 by name, as norms and softmax in models do."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


class _KernelCounter(TorchDispatchMode):
    """Counts the operators of megasoftmax that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "megasoftmax":
            self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


class Distance(NamedTuple):
    """Distances of baseline and candidate from the reference, at equal weights."""

    parameter: str | None
    """The parameter whose gradient was compared; None: the loss was."""
    baseline: float
    candidate: float


def compare(
    step: int,
    batch: Batch,
    weights: Mapping[str, torch.Tensor],
    baseline: Trainee,
    candidate: Trainee,
    reference: Trainee,
    seed: int | None = None,
) -> list[Distance]:
    """Losses and gradients of the three with these weights, as relative distances.

    Not more than two models have gradients at a time. A loss is relative to the reference's, and
    a gradient to the scale that `megasoftmax.regression` describes. `seed` as in `differentiate`.

    Raises:
        RegressionError: those of `differentiate`; a gradient of baseline or reference is no number.
    """
    losses, gradients = [], []
    with reference.lent(weights):
        truth = reference.differentiate(step, batch, seed)
        scales = gradient_scales(reference.parameters)
        for trainee in (baseline, candidate):
            with trainee.lent(weights), _KernelCounter() as counter:
                loss = trainee.differentiate(step, batch, seed)
                losses.append(relative(loss - truth, truth))
                gradients.append(_differences(trainee.parameters, reference.parameters))
            trainee.kernels = counter.counts
    for name, scale in scales.items():
        if not math.isfinite(scale + gradients[0][name]):
            raise RegressionError(
                f"{baseline.name} or {reference.name}: expected a finite gradient of {name} at "
                f"step {step}; a lower learning rate may help"
            )
    return [
        Distance(None, *losses),
        *(Distance(name, *(relative(g[name], s) for g in gradients)) for name, s in scales.items()),
    ]


def relative(distance: float, scale: float) -> float:
    """The ratio without a sign; 0 where the distance is 0, even for a scale of 0."""
    if distance == 0:
        return 0.0
    return abs(distance / scale) if scale else math.inf


def gradient_scales(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, float]:
    """What the gradient of each parameter is measured against, from gradients of the reference."""
    squares = _mean_squares({name: p.grad for name, p in parameters.items()})
    elements = sum(p.numel() for p in parameters.values())
    whole = sum(squares[name] * p.numel() for name, p in parameters.items()) / elements
    layers: dict[str, float] = defaultdict(float)
    blocks: dict[tuple[str, str], float] = defaultdict(float)
    for name, square in squares.items():
        layers[_layer(name)] = max(layers[_layer(name)], square)
        blocks[_block(name)] = max(blocks[_block(name)], square)
    least = SHARE_OF_MODEL**2 * whole
    return {
        name: math.sqrt(max(layers[_layer(name)], SHARE_OF_BLOCK**2 * blocks[_block(name)], least))
        for name in squares
    }


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _block(parameter: str) -> tuple[str, str]:
    """The name up to its last number, "" without one; and the parameter's name in its layer."""
    numbered = re.match(r"(.*\.\d+)\.", parameter)
    return numbered[1] if numbered else "", parameter.rpartition(".")[2]


def _differences(
    parameters: Mapping[str, torch.nn.Parameter], reference: Mapping[str, torch.nn.Parameter]
) -> dict[str, float]:
    """Root mean square of each gradient's difference; a missing gradient is zero."""
    differences: dict[str, torch.Tensor | None] = {}
    for name, parameter in parameters.items():
        actual, expected = parameter.grad, reference[name].grad
        if actual is None or expected is None:
            differences[name] = expected if actual is None else actual
        else:
            differences[name] = actual.double() - expected
    return {name: math.sqrt(square) for name, square in _mean_squares(differences).items()}


def _mean_squares(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """The mean square of each tensor, 0 for None. Waits for the device once."""
    device = next((t.device for t in tensors.values() if t is not None), None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    means = [zero if t is None else t.double().square().mean() for t in tensors.values()]
    return dict(zip(tensors, torch.stack(means).tolist(), strict=True))


@torch.no_grad()
def travelled(trainee: Trainee, reference: Trainee, start: Mapping[str, torch.Tensor]) -> float:
    """Distance of all parameters from the reference's, relative to its distance from the start."""
    away = far = 0.0
    for name, truth in reference.parameters.items():
        away += (trainee.parameters[name].double() - truth).square().sum().item()
        far += (start[name].to(truth) - truth).square().sum().item()
    return relative(math.sqrt(away), math.sqrt(far))
