"""Cases of bench_training.py that are no language models: speech, images, pairs of residues.

All have random weights and inputs, no dropout, and no padding. A case whose package is missing is
left out.

* wav2vec2-conformer large: CTC on 15.005 s of noise at 16 kHz, 750 frames. One convolution with the
  window and the stride of the seven of its feature extractor (400 and 320 samples) takes their
  place: they would take most of the step, alike in every implementation. "without attention"
  returns the projected values. What other implementations hold at the peak beyond it is the memory
  of their attention, from the projections to the output: scores, positions, what is saved for
  backward.
* Swin-B of timm, on images of 224 x 224; a "token" is an image. "eager" is timm as it is, "sdpa"
  its fused attention, which it has off by default.
* OpenFold-3's triangle attention around the starting node, with layer norm, gate and projections,
  on a pair representation of which a tenth is masked. "eager" is its own code in torch.
  "cuEquivariance", "Triton" and "LMA" are implementations that it has behind flags. The gradient of
  the output is given, the pairs get theirs, and the "loss" is the norm of the output.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import peers
import torch
from measured import OURS, WITHOUT_ATTENTION
from torch import Tensor, nn
from training_cases import Case
from transformers import Wav2Vec2ConformerForCTC
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerSelfAttention,
)

WINDOW, STRIDE = 400, 320  # samples of a frame, and from one to the next
NO_DROPOUT = (
    *("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout"),
    *("final_dropout", "conformer_conv_dropout", "layerdrop"),
)
SPEECH = {
    "vocab_size": 32,
    "intermediate_size": 4096,
    "hidden_act": "swish",
    "position_embeddings_type": "relative",
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
    "feat_extract_norm": "layer",
    "conv_bias": True,
    "conv_dim": (512,),
    "conv_kernel": (WINDOW,),
    "conv_stride": (STRIDE,),
    **dict.fromkeys(NO_DROPOUT, 0.0),
}
FLAGS = {
    "eager": {},
    "LMA": {"use_lma": True},
    "Triton": {"use_triton_triangle_kernels": True},
    peers.CUEQUIVARIANCE: {"use_cueq_triangle_kernels": True},
    OURS: {},
}
ON_GPU = ("Triton", peers.CUEQUIVARIANCE)


class Speech(Case):
    """A model of transformers on samples of sound; `length` are its frames."""

    def build(self) -> nn.Module:
        """With small residual branches, as GPT-2 begins.

        Layers end with a norm. With the weights of transformers, 24 of them amplify the rounding of
        bfloat16 to 0.3 of the gradients, in every implementation.
        """
        model = super().build()
        for name, weight in model.named_parameters():
            if name.endswith(
                ("output_dense.weight", "linear_out.weight", "pointwise_conv2.weight")
            ):
                weight.data *= (4 * self.layers) ** -0.5
        return model

    def inputs(self) -> dict[str, Tensor]:
        samples = (self.length - 1) * STRIDE + WINDOW
        sound = torch.randn(self.batch, samples, dtype=torch.bfloat16)
        labels = torch.randint(1, SPEECH["vocab_size"], (self.batch, self.length // 10))
        return {"input_values": sound, "labels": labels}

    @contextmanager
    def using(self, model: nn.Module, implementation: str) -> Iterator[None]:
        without = implementation == WITHOUT_ATTENTION
        with ExitStack() as stack:
            stack.enter_context(super().using(model, "eager" if without else implementation))
            for layer in model.modules() if without else ():
                if isinstance(layer, Wav2Vec2ConformerSelfAttention):
                    layer.forward = _projected_values(layer)
                    stack.callback(delattr, layer, "forward")
            yield


def _projected_values(layer: nn.Module) -> Any:
    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return layer.linear_out(layer.linear_v(hidden_states)), None

    return forward


class Images(Case):
    """A model of timm, by its name. `width` and `heads` are those of its first stage."""

    def tiny(self) -> "Images":
        sizes = {"img_size": 56, "depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)}
        changes = {"layers": 4, "width": 32, "heads": 2, "batch": 2, "sizes": sizes}
        return replace(self, name=f"tiny {self.name}", **changes)

    def build(self) -> nn.Module:
        timm = importlib.import_module("timm")
        model = timm.create_model(self.model, drop_path_rate=0.0, **self.sizes)
        return model.to(torch.bfloat16).train()

    def inputs(self) -> dict[str, Tensor]:
        side = self.sizes.get("img_size", 224)
        images = torch.randn(self.batch, 3, side, side, dtype=torch.bfloat16)
        return {"images": images, "labels": torch.randint(1000, (self.batch,))}

    @contextmanager
    def using(self, model: nn.Module, implementation: str) -> Iterator[None]:
        adapter = importlib.import_module("megasoftmax.integrations.timm")
        for layer in model.modules():
            if hasattr(layer, "fused_attn"):
                layer.fused_attn = implementation == "sdpa"
        with adapter.patch_model(model) if implementation == OURS else nullcontext():
            yield

    def backward(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        logits = model(inputs["images"]).float()
        loss = nn.functional.cross_entropy(logits, inputs["labels"])
        loss.backward()
        return loss.detach()


class Triangle(Case):
    """OpenFold-3's triangle attention; `length` are the tokens of a row of pairs."""

    def build(self) -> nn.Module:
        layers = importlib.import_module("openfold3.core.model.layers.triangular_attention")
        block = layers.TriangleAttention(self.width, self.width // self.heads, self.heads)
        for weight in block.parameters():
            if weight.dim() == 2:  # its last projection begins with zeros, which would hide errors
                nn.init.normal_(weight, std=self.width**-0.5)
        return block.to(torch.bfloat16).train()

    def inputs(self) -> dict[str, Tensor]:
        shape = (self.batch, self.length, self.length)
        pairs, gradient = torch.randn(2, *shape, self.width, dtype=torch.bfloat16)
        keep = (torch.rand(shape) < 0.9).to(torch.bfloat16)
        return {"pairs": pairs.requires_grad_(), "mask": keep, "gradient": gradient}

    @contextmanager
    def using(self, model: nn.Module, implementation: str) -> Iterator[None]:
        adapter = importlib.import_module("megasoftmax.integrations.folding")
        model.flags = FLAGS[implementation]
        with adapter.patch_model(model) if implementation == OURS else nullcontext():
            yield

    def backward(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        output = model(inputs["pairs"], mask=inputs["mask"], **model.flags)
        inputs["pairs"].grad = None
        output.backward(inputs["gradient"])
        return torch.linalg.vector_norm(output.detach(), dtype=torch.float32)


def cases() -> list[Case]:
    triangle = [name for name in FLAGS if name not in ON_GPU or torch.cuda.is_available()]
    triangle = tuple(peers.only_there(dict.fromkeys(triangle)))
    found = {
        "transformers": Speech(
            *("wav2vec2-conformer large, 750 frames", Wav2Vec2ConformerForCTC),
            *(24, 1024, 16, 16, 750),
            sizes=SPEECH,
            implementations=("eager", OURS, WITHOUT_ATTENTION),
        ),
        peers.TIMM: Images(
            *("Swin-B, timm, 224 x 224", "swin_base_patch4_window7_224", 24, 128, 4, 64, 1),
            implementations=("eager", "sdpa", OURS),
        ),
        peers.OPENFOLD: Triangle(
            *("triangle attention, OpenFold-3, 384 tokens", None, 1, 128, 4, 1, 384),
            implementations=triangle,
        ),
    }
    return list(peers.only_there(found).values())
