"""Tokens that a model generates, per attention implementation; writes results/generation.csv.

Greedy tokens of one sequence after a prompt, by `generate` of transformers, in bfloat16 with random
weights. What counts is the time from one token to the next: that of the prompt and the first
token is left out. "compiled, static cache" is `cache_implementation="static"`, for which
transformers compiles the decoding step with mode="reduce-overhead" on a GPU.

python benchmarks/bench_generation.py                                      # one GPU
python benchmarks/bench_generation.py --device cpu --quick --out new.csv   # a tiny model
"""

import platform
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import measure
import torch
import transformers
import typer
from bench_training import check_fused
from torch import Tensor
from training_cases import Case as Model
from training_cases import cases as models
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from megasoftmax.integrations.transformers import NAME, register

RESULTS = Path(__file__).parent / "results" / "generation.csv"
IMPLEMENTATIONS = ("sdpa", NAME)
BAR = 1.1  # of sdpa's tokens per second, not compiled


@dataclass(frozen=True)
class Case:
    """Llama 1B, or some of its layers: compiling all would take minutes."""

    layers: int
    prompt: int
    static: bool = False

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


def run_case(
    case: Case, device: str, tokens: int, rounds: int, quick: bool
) -> dict[str, dict[str, str]]:
    """The figures of each implementation, which take turns."""
    torch.manual_seed(0)
    torch.compiler.reset()
    length = 24 if quick else case.prompt
    options: dict[str, Any] = {"do_sample": False, "use_cache": True}
    if case.static:
        options["cache_implementation"] = "static"
    calls: dict[str, measure.Function] = {}
    with torch.device(device):
        prompt = torch.randint(1000, (1, length))
        for name in IMPLEMENTATIONS:  # one model each, so that none is compiled for both
            model = case.build(quick)
            model.set_attn_implementation(name)
            calls[name] = partial(seconds_per_token, model, prompt, tokens, options)
    times = measure.interleaved(calls, rounds, lambda call: call(), warm_up=1, choose=min)
    return {name: {"tokens_per_second": f"{1 / time:.1f}"} for name, time in times.items()}


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    tokens: Annotated[int, typer.Option(help="That each call generates.")] = 64,
    rounds: measure.Rounds = 5,
    quick: Annotated[bool, typer.Option(help="A tiny model, for one round.")] = False,
    only: Annotated[str, typer.Option(help="Cases whose name has it.")] = "",
    out: measure.Out = RESULTS,
    commit: measure.Commit = "",
) -> None:
    """Runs the cases."""
    if device == "cuda":
        check_fused()
    register()
    place = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    common = measure.provenance(commit, place) | {"transformers": transformers.__version__}
    with measure.results(out, common) as write:
        for case in (case for case in CASES if only in str(case)):
            rows = run_case(case, device, tokens, 1 if quick else rounds, quick)
            sizes = {"layers": case.layers, "prompt": case.prompt, "tokens": tokens}
            for name, row in rows.items():
                write({"case": str(case), **sizes, "implementation": name, **row})
                print(case, name, row["tokens_per_second"], sep=", ")
            ours, sdpa = (float(rows[name]["tokens_per_second"]) for name in (NAME, "sdpa"))
            bar = "" if case.static else f", bar {BAR}x"
            print(f"{case}: {NAME} over sdpa {ours / sdpa:.2f}x{bar}", flush=True)


if __name__ == "__main__":
    typer.run(main)
