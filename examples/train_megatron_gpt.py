"""Train a Megatron-core GPT on Python source, with megasoftmax as its core attention.

    python examples/train_megatron_gpt.py                        # half a minute on a CPU core

The model has what Megatron's own attention leaves to TransformerEngine or runs unfused: a window in
every second layer, and for each head a learnable softmax offset. Two lines of `build_model` choose
megasoftmax. The text is that of the other examples.
"""

import extras  # noqa: F401  # says which extra has a package that is missing

# isort: split
import time
import warnings
from typing import Annotated

import torch
import training
import typer
from training import console

warnings.filterwarnings("ignore", module="megatron")  # says which packages could be installed
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import megasoftmax  # noqa: E402
from megasoftmax.integrations.megatron import MegasoftmaxCoreAttention  # noqa: E402

ROWS = 10  # of losses that are printed


def build_model(layers: int, width: int, heads: int, length: int, window: int) -> GPTModel:
    """A model over the 256 bytes, with weights in float32."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = MegasoftmaxCoreAttention
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_query_groups=heads // 2 if heads % 2 == 0 else heads,
        window_size=(window - 1, 0),
        window_attn_skip_freq=2,
        softmax_type="learnable",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    return GPTModel(config, spec, vocab_size=256, max_sequence_length=length)


def report_path(query: torch.Tensor) -> None:
    """Say whether attention of queries [batch, heads, length, head_dim] runs fused, or why not."""
    reasons = megasoftmax.why_not_fused(megasoftmax.attention, query, query, query, causal=True)
    path = "the softmax, because " + "; ".join(map(str, reasons)) if reasons else "fused attention"
    console.print(f"attention runs through {path}", soft_wrap=True)


def main(
    steps: training.Steps = 200,
    batch: training.Batch = 8,
    length: training.Length = 128,
    layers: training.Layers = 4,
    width: training.Width = 128,
    heads: training.Heads = 4,
    window: Annotated[int, typer.Option(min=1, help="bytes that a query sees, itself too")] = 32,
    seed: int = 0,
    lr: training.LearningRate = 1e-3,
    device: training.Device = "auto",
    config: training.Config = None,
) -> None:
    """Train a Megatron-core GPT on Python source, with megasoftmax as its core attention."""
    training.check_heads(width, heads)
    place = training.device_named(device)
    on_gpu = place.type == "cuda"
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    if on_gpu:
        if place.index is not None:
            torch.cuda.set_device(place)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    model = build_model(layers, width, heads, length, window).to(place)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    report_path(torch.empty(batch, heads, length, width // heads, dtype=dtype, device=place))

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    positions = torch.arange(length, device=place).expand(batch, -1)
    losses, start = [], time.perf_counter()
    for step, text in enumerate(training.pieces(steps, batch, length + 1, seed, place)):
        ids, labels = text[:, :-1], text[:, 1:]
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            loss = model(ids, positions, attention_mask=None, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % max(steps // ROWS, 1) == 0:
            console.print(f"step {step}: loss {losses[-1]:.3f}")
    speed = steps * batch * length / (time.perf_counter() - start)
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {speed:,.0f} bytes/s")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    training.run(main)
