"""Tokens that a model generates, per attention implementation; writes results/generation.csv.

Greedy tokens of one sequence after a prompt, by `generate` of transformers, in bfloat16 with random
weights. What counts is the time from one token to the next: that of the prompt and the first
token is left out. "compiled, static cache" is `cache_implementation="static"`, for which
transformers compiles the decoding step with mode="reduce-overhead" on a GPU.

python benchmarks/bench_generation.py                                      # one GPU
python benchmarks/bench_generation.py --device cpu   # a tiny model
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import measure
import torch
import transformers
import typer
from bench_training import prepared
from torch import Tensor
from training_cases import Case as Model
from training_cases import cases as models
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from megasoftmax.integrations.transformers import NAME

IMPLEMENTATIONS = ("sdpa", NAME)


@dataclass(frozen=True)
class Case(measure.Case):
    """Llama 1B, or some of its layers: compiling all would take minutes."""

    written = ("case", "layers", "prompt", "tokens")

    layers: int
    prompt: int
    static: bool = False
    tokens: int = 0

    def tiny(self) -> "Case":
        """Its name stays; `build` makes a tiny model."""
        return self

    def build(self, quick: bool) -> PreTrainedModel:
        (llama,) = (each for each in models() if each.name == "Llama 1B, 2048 tokens")
        model: Model = llama.tiny() if quick else replace(llama, layers=self.layers)
        return model.build().eval()

    def __str__(self) -> str:
        layers = "" if self.layers == 16 else f", {self.layers} layers"
        cache = ", compiled, static cache" if self.static else ""
        return f"Llama 1B{layers}, prompt of {self.prompt}{cache}"


CASES = [Case(16, 1024), Case(16, 16_384), Case(4, 1024, static=True)]


class Clock(BaseStreamer):
    """Notes when `generate` has the prompt, and when the host has each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def seconds_per_token(
    model: PreTrainedModel, prompt: Tensor, tokens: int, options: dict[str, Any]
) -> float:
    """Between the first token of a call and its last."""
    clock = Clock()
    given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "streamer": clock}
    model.generate(prompt, **options, **given)
    _, first, *_, last = clock.times
    return (last - first) / (tokens - 1)


def run_case(run: measure.Run, case: Case) -> Iterator[measure.Row]:
    """Tokens per second of each implementation, which take turns."""
    torch.compiler.reset()
    length = 24 if run.is_small else case.prompt
    options: dict[str, Any] = {"do_sample": False, "use_cache": True}
    if case.static:
        options["cache_implementation"] = "static"
    calls: dict[str, measure.Function] = {}
    with run.on_device():
        prompt = torch.randint(1000, (1, length))
        # One model each, so that none is compiled for both.
        for name in filter(run.wants, IMPLEMENTATIONS):
            model = case.build(run.is_small)
            model.set_attn_implementation(name)
            calls[name] = partial(seconds_per_token, model, prompt, case.tokens, options)
    times = measure.interleaved(calls, run.turns, lambda call: call(), choose=min)
    for name, seconds in times.items():
        yield {"implementation": name, "tokens_per_second": f"{1 / seconds:.1f}"}


@measure.benchmark("generation.csv", rounds=5)
def main(
    run: measure.Run, tokens: Annotated[int, typer.Option(help="That each call generates.")] = 64
) -> None:
    """Times the tokens that a model generates."""
    place = prepared(run)
    common = measure.provenance(run.commit, place) | {"transformers": transformers.__version__}
    cases = [replace(case, tokens=tokens) for case in CASES]
    run.cases(cases, partial(run_case, run), common=common)


if __name__ == "__main__":
    typer.run(main)
