"""A training step of models of transformers and others, per attention implementation; writes
results/training.csv.

A step is forward, backward and fused AdamW, all in bfloat16, on random inputs. A case has one
model, which is switched from one implementation to the next; these take turns. Before the weights
change, each computes the loss and the gradients: what is further from the first implementation than
rounding explains is not timed, `note` says so, and the run fails in the end. Models with dropout
are compared without it, because implementations drop different entries, and timed with it. What
has too little memory is a row with a note too. So is any other error, and the run fails in the end.

python benchmarks/bench_training.py                         # one GPU, all cases: a few minutes
python benchmarks/bench_training.py --only "dropout|Mistral|documents" --rounds 3 --out new.csv
python benchmarks/bench_training.py --device cpu --quick    # tiny models, to try it
"""

import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import measure
import torch
import training_others
import transformers
import typer
from measured import WITHOUT_ATTENTION
from torch import Tensor
from training_cases import Case, cases

import megasoftmax
from megasoftmax.integrations.transformers import register

FIELDS = [
    *(*Case.written, "implementation", "tokens_per_second", "step_ms", "peak_memory_bytes"),
    *("loss", "gradient_difference", "note"),
]
LEARNING_RATE = 1e-6
# Relative to the first implementation. The loss of random weights hardly depends on a mask, and
# T5's is a bfloat16. A fault moves some gradient by 0.5 or more; rounding, in tries on a CPU, moved
# that of T5's table of biases, a sum over all pairs of tokens, by 0.2 and all others by 0.05.
LOSS_TOLERANCE = 0.02
GRADIENT_TOLERANCE = 0.4
WRONG = "wrong: "

Gradients = dict[str, Tensor | None]  # by the name of the parameter
Result = TypeVar("Result")
Row = dict[str, str]


class Training:
    """A model with its optimizer and one batch, whose attention is switched between steps."""

    def __init__(self, case: Case, device: str):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = case.build()
            self.inputs = case.inputs()
        self.case, self.device = case, device
        if case.compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)

    def gradients(self, implementation: str) -> tuple[float, Gradients]:
        """The loss, and the gradients of all but biases, without dropout.

        That of keys adds the same to all scores of a row: its gradient is rounding alone.
        """
        self.model.train(not self.case.drops)  # checkpointed layers need the training mode
        loss = self._backward(implementation).item()
        self.model.train()
        parameters = self.model.named_parameters()
        found = {name: p.grad for name, p in parameters if not name.endswith("bias")}
        self.optimizer.zero_grad()
        return loss, found

    def step(self, implementation: str) -> None:
        self._backward(implementation)
        self.optimizer.step()

    def peak_memory(self, implementation: str) -> str:
        """Of a step, in bytes, with all that a training run holds; not known on a CPU."""
        self.step(implementation)  # the first of all allocates the state of the optimizer
        if self.device == "cpu":
            return ""
        torch.cuda.reset_peak_memory_stats()
        self.step(implementation)
        return str(torch.cuda.max_memory_allocated())

    def _backward(self, implementation: str) -> Tensor:
        self.optimizer.zero_grad()
        with self.case.using(self.model, implementation):
            return self.case.backward(self.model, self.inputs)


def distance(actual: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest |actual - expected| / |expected| of a parameter, and its name."""
    found = []
    for name, gradient in expected.items():
        other = actual[name]
        if gradient is None or other is None:
            far = 0.0 if gradient is other else torch.inf
        else:
            far = ((other.float() - gradient.float()).norm() / gradient.float().norm()).item()
        found.append((far if far >= 0 else torch.inf, name))  # NaN is far too
    return max(found)


def attempt(function: Callable[[], Result], row: Row) -> Result | None:
    """What it returns; None, and a note in the row, when it fails."""
    try:
        return function()
    except torch.OutOfMemoryError:
        row["note"] = "out of memory"
    except Exception as error:
        row["note"] = WRONG + measure.reason(error, [])
    measure.release()  # outside of the handler, which holds the frames and their tensors
    return None


def compare(training: Training, rows: dict[str, Row]) -> None:
    """Writes the loss of each implementation, and how far its gradients are from the first's."""
    first: tuple[float, Gradients] | None = None
    for name, row in rows.items():
        if name == WITHOUT_ATTENTION:
            continue
        found = attempt(partial(training.gradients, name), row)
        if found is None:
            continue
        first = first or found
        (loss, gradients), (expected, expected_gradients) = found, first
        far, parameter = distance(gradients, expected_gradients)
        row |= {"loss": f"{loss:.5f}", "gradient_difference": f"{far:.4f}"}
        if not far <= GRADIENT_TOLERANCE:
            row["note"] = f"{WRONG}the gradient of {parameter} is off by {far:.3g}"
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            row["note"] = f"{WRONG}expected a loss of {expected:.5f}, got {loss:.5f}"


def run_case(run: measure.Run, case: Case) -> dict[str, Row]:
    """The figures of each implementation."""
    training = Training(case, run.device)
    rows: dict[str, Row] = {name: {} for name in case.implementations if run.wants(name)}
    compare(training, rows)
    for name, row in rows.items():
        if "note" not in row:
            row["peak_memory_bytes"] = attempt(partial(training.peak_memory, name), row) or ""
    steps: dict[str, measure.Function] = {
        name: partial(training.step, name) for name, row in rows.items() if "note" not in row
    }
    timer = run.timer(measure.LONG_START)
    for name, microseconds in measure.interleaved(steps, run.turns, timer).items():
        speed = case.tokens / microseconds * 1e6
        step = f"{microseconds / 1e3:.2f}"
        rows[name] |= {"step_ms": step, "tokens_per_second": f"{speed:.0f}"}
    return rows


def prepared(run: measure.Run) -> str:
    """Registers the implementations; the name of the device.

    Exits when this GPU runs the reference instead of what is to be measured.
    """
    register()
    if run.device == "cpu" or run.listed:
        return platform.machine()
    tensor = torch.empty(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    for function, inputs in (("softmax", [tensor]), ("attention", [tensor] * 3)):
        if reasons := megasoftmax.why_not_fused(getattr(megasoftmax, function), *inputs):
            sys.exit("\n".join([f"{function} would not run fused", *map(str, reasons)]))
    return torch.cuda.get_device_name()


@measure.benchmark("training.csv", rounds=7)
def main(run: measure.Run) -> None:
    """Times training steps."""
    place = {"gpu": prepared(run), "transformers": transformers.__version__}
    failures = []

    def rows_of(case: Case) -> Iterator[measure.Row]:
        for name, row in run_case(run, case).items():
            yield {"implementation": name, **row}
            if row.get("note", "").startswith(WRONG):
                failures.append(f"{case}: {name}: {row['note']}")

    chosen = [*cases(), *training_others.cases()]
    run.cases(chosen, rows_of, FIELDS, measure.provenance(run.commit) | place)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    typer.run(main)
