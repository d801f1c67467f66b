"""Every class of transformers that a rule can build small, with megasoftmax against "eager".

    python benchmarks/sweep_families.py                          # writes results/families.csv
    python benchmarks/sweep_families.py --only LlamaForCausalLM  # prints, writes nothing
    python benchmarks/sweep_families.py --only LlamaForCausalLM --update  # and writes its row

Each class is tried by the name "megasoftmax" and by `patch_model` with "megasoftmax_softmax": a
training step without padding, with padding on the right and on the left, then greedy generation
where the class has it. Logits of visible tokens and all gradients are compared. A CPU takes the way
of a GPU. small_models.py builds the classes; docs/families.md is filled from the CSV file.

The exit status is 1 if a class computes something else than "eager", does not call megasoftmax
although it says so, or raises an error that does not name the model or layer and what to do.
"""

import copy
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from unittest.mock import patch

import measure
import torch
import transformers
import typer
from measured import RESULTS, read
from plot import fill_pages
from rich.console import Console
from rich.progress import track
from small_models import CLASSES, LEFT_OUT, PADDED, build, call, make_batch, seed
from transformers import PreTrainedModel

import megasoftmax
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.names import NAME, SOFTMAX_NAME, asked_name
from megasoftmax.integrations.patching import patch_model
from megasoftmax.integrations.serving import Layer, is_attention, layers_of, why_not_served

FILE = "families.csv"
FAULTS = ("differs", "silent", "unclear error")
TOLERANCE = 1e-5  # relative, in the Euclidean norm
NEW_TOKENS = 4
KINDS = {"image": "vision", "image and text": "vision", "audio": "speech", "protein": "protein"}
"""Of the tasks that are not text."""


@dataclass
class Outcome:
    """What became of a class in one of the two ways."""

    verdict: str
    """works, works in part, own attention, refused, no attention, not built, or one of FAULTS."""
    why: str = ""
    layers: int = 0
    served: int = 0
    logits_error: float = 0.0
    gradient_error: float = 0.0
    generation: str = ""
    uses: frozenset[str] = frozenset()


@dataclass
class Calls:
    """Calls of megasoftmax, and of the attention layers of a model."""

    ours: int = 0
    uses: set[str] = field(default_factory=set)
    """What the calls have: learned bias, sink, softcap, windows."""
    layers: Counter[str] = field(default_factory=Counter)


@contextmanager
def counting(calls: Calls) -> Iterator[None]:
    """Counts calls of megasoftmax, and lets a CPU run attention fused."""

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            calls.ours += 1
            calls.uses |= used(tensors[0], options)
            return function(*tensors, **options)

        return call

    ours = {name: counted(getattr(megasoftmax, name)) for name in ("attention", "softmax")}
    with (
        patch.multiple(megasoftmax, **ours),
        patch.object(integration, "takes_attention", lambda *given: True),
    ):
        yield


def used(tensor: torch.Tensor, options: dict[str, Any]) -> set[str]:
    """What a call of attention or softmax has; a first tensor of 5 dimensions has windows."""
    bias, sink = options.get("bias"), options.get("sink")
    limits = options.get("window"), options.get("visible")
    found = {
        "learned bias": bias is not None and getattr(bias, "table", bias).requires_grad,
        "sink": isinstance(sink, torch.Tensor),
        "softcap": options.get("softcap") is not None,
        "windows": tensor.dim() == 5 or any(limit is not None for limit in limits),
    }
    return {name for name, is_used in found.items() if is_used}


def step(model: PreTrainedModel, padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of visible tokens, and all gradients of a weighted sum of them, as vectors."""
    batch = make_batch(model, padding)
    seed()
    model.zero_grad(set_to_none=True)
    result = call(model, batch)
    names = ("logits", "logits_per_image", "last_hidden_state")
    output = next(result[name] for name in names if result.get(name) is not None)
    if "attention_mask" in batch and output.shape[:2] == batch["attention_mask"].shape:
        output = output[batch["attention_mask"].bool()]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    (output * weights).sum().backward()
    gradients = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()
    ]
    return output.detach().flatten(), torch.cat(gradients)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in the Euclidean norm; infinite if other entries are finite."""
    finite = expected.isfinite()
    if not finite.equal(actual.isfinite()):
        return float("inf")
    expected = expected[finite]
    return ((actual[finite] - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def generate(model: PreTrainedModel) -> list[list[int]] | None:
    """Greedy tokens after prompts with padding on the left; None: the class generates nothing."""
    if not model.can_generate() or CLASSES[type(model).__name__] not in ("causal", "seq2seq"):
        return None
    batch = make_batch(model, "left")
    batch.pop("decoder_input_ids", None)
    seed()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 0
    tokens = model.eval().generate(**batch, **options)
    model.train()
    return tokens.tolist()


class Expected:
    """What a class computes with "eager"."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        paddings = ("none", "right", "left") if CLASSES[name] in PADDED else ("none",)
        self.steps = {padding: step(self.model, padding) for padding in paddings}
        try:
            self.tokens = generate(self.model)
        except Exception:  # of classes whose generation wants more than tokens
            self.tokens = None


def try_class(name: str) -> tuple[Outcome, Outcome]:
    """What becomes of a class by its name and by `patch_model`."""
    if name in LEFT_OUT:
        outcome = Outcome("not built", LEFT_OUT[name])
        return outcome, outcome
    try:
        expected = Expected(name)
    except Exception as problem:
        outcome = Outcome("not built", short(problem))
        return outcome, outcome

    def by_name() -> PreTrainedModel:
        model = build(name, NAME)
        model.load_state_dict(expected.model.state_dict())
        return model

    def by_patch_model() -> PreTrainedModel:
        model = copy.deepcopy(expected.model)
        patch_model(model, implementation=SOFTMAX_NAME)
        return model

    return compare(by_name, expected), compare(by_patch_model, expected)


def compare(make: Callable[[], PreTrainedModel], expected: Expected) -> Outcome:
    """Makes the model, runs what `expected` ran, and judges it."""
    calls = Calls()
    try:
        with counting(calls):
            model = make()
            layers = [layer for layer in layers_of(model) if is_attention(layer.module)]
            for layer in layers:
                layer.module.register_forward_hook(
                    lambda *given, name=layer.name: calls.layers.update([name])
                )
            errors = []
            for padding, (output, gradients) in expected.steps.items():
                calls.ours, calls.layers = 0, Counter()
                ours = step(model, padding)
                errors.append((error(ours[0], output), error(ours[1], gradients)))
            ran = [layer for layer in layers if calls.layers[layer.name]]
            outcome = judged(ran, calls, served_of(layers))
            same = expected.tokens is None or generate(model) == expected.tokens
    except Exception as problem:
        return refusal(problem, expected.model)
    outcome.uses = frozenset(calls.uses)
    outcome.logits_error, outcome.gradient_error = (
        max(column) for column in zip(*errors, strict=True)
    )
    outcome.generation = "" if expected.tokens is None else "same" if same else "differs"
    if max(outcome.logits_error, outcome.gradient_error) > TOLERANCE or not same:
        outcome.verdict = "differs"
    return outcome


def served_of(layers: list[Layer]) -> set[str]:
    """Names of the layers that are to call megasoftmax."""
    why_not = why_not_served(layers)
    return {
        layer.name
        for layer in layers
        if layer.name not in why_not and asked_name(layer.config._attn_implementation)
    }


def judged(ran: list[Layer], calls: Calls, served: set[str]) -> Outcome:
    """The verdict on what was called, before results are compared."""
    served_and_ran = [layer for layer in ran if layer.name in served]
    outcome = Outcome("works", layers=len(ran), served=len(served_and_ran))
    left = [layer for layer in ran if layer.name not in served]
    says_ours = any(asked_name(layer.config._attn_implementation) for layer in left)
    if calls.ours < len(served_and_ran) or (says_ours and not calls.ours):
        outcome.verdict = "silent"
    elif not ran:
        outcome.verdict = "works" if calls.ours else "no attention"
    elif left:
        outcome.verdict = "works in part" if served_and_ran else "own attention"
        outcome.why = ", ".join(sorted({type(layer.module).__name__ for layer in left}))
    return outcome


def refusal(problem: Exception, model: PreTrainedModel) -> Outcome:
    """Whether an error names the model or a layer, and what to do."""
    text = str(problem)
    names = {type(module).__name__ for module in model.modules()}
    is_clear = isinstance(problem, ValueError) and any(name in text for name in names)
    is_clear = is_clear and ("use 'eager'" in text or "strict=False" in text)
    why = [line for line in text.splitlines() if line][-1 if "strict=False" in text else 0]
    return Outcome("refused" if is_clear else "unclear error", why.strip() or short(problem))


def short(problem: Exception) -> str:
    """The type and the beginning of the message, in one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}"[:160].strip()


def as_row(name: str, by_name: Outcome, by_patch_model: Outcome) -> dict[str, Any]:
    """A row of the CSV file, but for where it comes from."""
    worse = max(by_name, by_patch_model, key=lambda one: one.gradient_error)
    return {
        "class": name,
        "task": CLASSES[name],
        "kind": "protein" if name.startswith("Esm") else KINDS.get(CLASSES[name], "text"),
        "uses": "; ".join(sorted(by_name.uses | by_patch_model.uses)),
        "by_name": by_name.verdict,
        "by_patch_model": by_patch_model.verdict,
        "layers": by_patch_model.layers or by_name.layers,
        "served": by_patch_model.served or by_name.served,
        "logits_error": f"{max(by_name.logits_error, by_patch_model.logits_error):.1e}",
        "gradient_error": f"{worse.gradient_error:.1e}",
        "generation": by_name.generation,
        "why": by_name.why,
    }


def sweep(names: list[str], console: Console) -> list[dict[str, Any]]:
    """The rows of these classes; faults are printed as they come."""
    rows = []
    for name in track(names, "classes", console=console, disable=not console.is_terminal):
        row = as_row(name, *try_class(name))
        rows.append(row)
        if {row["by_name"], row["by_patch_model"]} & set(FAULTS):
            console.print(f"[red]{name}[/red]: {row}", highlight=False)
    return rows


def main(
    only: Annotated[list[str] | None, typer.Option(help="A class; can be repeated.")] = None,
    update: Annotated[bool, typer.Option(help="Write the rows of these classes.")] = False,
) -> None:
    """Tries every class, or those that are named."""
    console = Console(soft_wrap=True)
    if unknown := set(only or []) - CLASSES.keys():
        raise typer.BadParameter(f"only: expected classes of the sweep, got {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    integration.register()
    rows = sweep(only or list(CLASSES), console)
    for row in rows if only else []:
        console.print(row)
    counts = Counter((row["by_name"], row["by_patch_model"]) for row in rows)
    for (by_name, by_patch_model), count in counts.most_common():
        console.print(f"{count:4} by name: {by_name}; by patch_model: {by_patch_model}")
    if any(verdict in FAULTS for pair in counts for verdict in pair):
        sys.exit(1)
    if update or not only:
        write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Into results/families.csv, where rows of other classes stay, and docs/families.md."""
    common = {"transformers": transformers.__version__} | measure.provenance()
    del common["gpu"]
    found: dict[str, dict[str, Any]] = {row["class"]: row for row in read(FILE)}
    found |= {row["class"]: common | row for row in rows}
    fields = dict.fromkeys(field for row in found.values() for field in row)
    with measure.results(RESULTS / FILE, {}, fields) as write_row:
        for name in CLASSES:
            if name in found:
                write_row(found[name])
    fill_pages()


if __name__ == "__main__":
    typer.run(main)
