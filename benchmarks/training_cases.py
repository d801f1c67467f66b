"""The cases of bench_training.py: models of transformers with random weights.

Models have no dropout, except in cases that are named after it: these keep their default of 0.1.

Every vocabulary is cut to VOCABULARY tokens. The float32 logits of the real ones (128256 tokens of
Llama, 201088 of gpt-oss) would need more memory than the model, and their products take up to a
fifth of a step, alike in every implementation. gpt-oss has few layers, and as many experts as a
token takes of the real 128: a layer computes what the real one does, and rounding cannot send a
token to other experts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import measure
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    DebertaV2ForMaskedLM,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from megasoftmax.integrations.transformers import NAME, SOFTMAX_NAME

VOCABULARY = 16384
FLASH = "sdpa flash"  # as "sdpa" with no other backend: what runs on mma.sync, as we do
ALL = ("eager", "sdpa", SOFTMAX_NAME, NAME)
WITHOUT_BIAS = ("eager", "sdpa", FLASH, SOFTMAX_NAME, NAME)
PEERS = ("eager", "sdpa", NAME)


@dataclass(frozen=True)
class Case(measure.Case):
    """A training step: forward, backward, AdamW.

    name: the model, with what differs from the published one.
    model: its class, or its name; `sizes` are further arguments of its configuration.
    length: tokens of an example; those of the encoder where the decoder has `targets`.
    checkpointed: layers are computed once more in the backward pass, in every implementation.
    drops: the model has dropout.
    documents: of equal lengths in each example, told by position ids.
    compiled: by torch.compile, in every implementation.
    """

    written = (*("case", "layers", "width", "heads", "batch", "length", "targets", "checkpointed"),)

    name: str
    model: Any
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    targets: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)
    checkpointed: bool = False
    drops: bool = False
    documents: int = 1
    compiled: bool = False
    implementations: tuple[str, ...] = ALL

    @property
    def tokens(self) -> int:
        """Of one step, those of encoder and decoder."""
        return self.batch * (self.length + self.targets)

    def tiny(self) -> "Case":
        """This case with sizes that a CPU computes in no time; windows still exclude keys.

        Not compiled: that takes long whatever the sizes are.
        """
        small = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8}
        small |= {"intermediate_size": 96, "d_ff": 96, "position_buckets": 8}
        changes = {"layers": 2, "width": 64, "heads": 4, "batch": 2, "length": 40}
        changes["sizes"] = {name: small.get(name, value) for name, value in self.sizes.items()}
        targets = 24 if self.targets else 0
        return replace(self, name=f"tiny {self.name}", targets=targets, compiled=False, **changes)

    def build(self) -> nn.Module:
        """In bfloat16 and training mode, on the current default device."""
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            **self.sizes,
        }
        config = self.model.config_class(**sizes)
        model = self.model._from_config(config, dtype=torch.bfloat16)
        if self.checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def inputs(self) -> dict[str, Any]:
        """Random tokens and labels, and the positions of documents, on the default device."""
        tokens = torch.randint(VOCABULARY, (self.batch, self.length))
        labels = torch.randint(VOCABULARY, (self.batch, self.targets)) if self.targets else tokens
        found = {"input_ids": tokens, "labels": labels, "use_cache": False}
        if self.documents > 1:
            positions = torch.arange(self.length // self.documents).repeat(self.documents)
            found["position_ids"] = positions.expand(self.batch, -1)
        return found

    @contextmanager
    def using(self, model: nn.Module, implementation: str) -> Iterator[None]:
        """Lets the model compute attention so.

        Raises RuntimeError when a part of the model keeps another implementation.
        """
        asked = "sdpa" if implementation == FLASH else implementation
        for name, module in model.named_modules():
            if isinstance(module, PreTrainedModel):
                module.set_attn_implementation(asked)
                found = module.config._attn_implementation
                if found != asked:
                    raise RuntimeError(f"{name or 'the model'}: expected {asked}, got {found}")
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if implementation == FLASH else nullcontext():
            yield

    def backward(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """The loss, once the parameters have their gradients."""
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


def cases() -> list[Case]:
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    groups = {"num_key_value_heads": 8, "head_dim": 64}
    sizes = {**groups, "intermediate_size": 8192, **no_tokens}
    llama_1b = Case(
        *("Llama 1B, 2048 tokens", LlamaForCausalLM, 16, 2048, 32, 4, 2048),
        implementations=WITHOUT_BIAS,
        sizes=sizes,
    )
    gpt2 = Case(
        *("GPT-2 medium, 1024 tokens", GPT2LMHeadModel, 24, 1024, 16, 8, 1024),
        implementations=WITHOUT_BIAS,
        sizes={**no_dropout, **no_tokens},
    )
    sizes = {"head_dim": 64, "d_ff": 2816, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    t5 = Case(
        *("T5 large v1.1, 1024 + 512 tokens", T5ForConditionalGeneration, 24, 1024, 16, 16, 1024),
        targets=512,
        sizes={**sizes, "decoder_start_token_id": 0},
    )
    large = {**groups, "head_dim": 128, "intermediate_size": 14336, **no_tokens}
    mistral = Case(
        *("Mistral, 4 layers, 8192 tokens, window 1024", MistralForCausalLM, 4, 4096, 32, 1, 8192),
        implementations=PEERS,
        sizes={**large, "sliding_window": 1024},
    )
    sizes = {**groups, "intermediate_size": 2880, "sliding_window": 128}
    gpt_oss = Case(
        *("gpt-oss, 4 layers, 4 experts, 4096 tokens", GptOssForCausalLM, 4, 2880, 64, 2, 4096),
        implementations=("eager", SOFTMAX_NAME, NAME),
        sizes={**sizes, "num_local_experts": 4, "num_experts_per_tok": 4, **no_tokens},
    )

    sizes = {"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216}
    gemma = Case(
        *("Gemma 2, 4 layers, 8192 tokens", Gemma2ForCausalLM, 4, 2304, 8, 1, 8192),
        implementations=("eager", NAME),  # it has no "sdpa", which knows no softcap
        sizes={**sizes, "sliding_window": 4096, **no_tokens},
    )

    sizes = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    sizes |= {"share_att_key": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    no_dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    deberta = Case(
        *("DeBERTa V3 base, 512 tokens", DebertaV2ForMaskedLM, 12, 768, 12, 16, 512),
        implementations=("eager", NAME),  # transformers has no "sdpa" for it
        sizes={**sizes, **no_dropout, "type_vocab_size": 0},
    )

    def dropping(case: Case, **sizes: Any) -> Case:
        name = f"{case.name}, dropout"
        return replace(case, name=name, drops=True, implementations=PEERS, sizes=sizes)

    name = "GPT-2 medium, 4 layers, 1024 tokens, compiled"
    compiled = replace(gpt2, name=name, layers=4, compiled=True)
    # The host takes longer than the GPU.
    tiny = {"layers": 12, "width": 256, "heads": 4, "batch": 1, "length": 128}
    name = "Llama 1B, 8192 tokens, layers checkpointed"
    checkpointed = replace(llama_1b, name=name, batch=1, length=8192, checkpointed=True)
    name = "Llama, 4 layers, 8 documents of 1024 tokens"
    documents = replace(mistral, name=name, model=LlamaForCausalLM, documents=8, sizes=large)
    name = "Mistral, 4 layers, 32768 tokens, window 1024"
    return [
        gpt2,
        dropping(gpt2, **no_tokens),
        replace(compiled, implementations=("sdpa", NAME)),
        replace(
            gpt2, name="GPT-2, 12 layers of width 256, 128 tokens", implementations=PEERS, **tiny
        ),
        llama_1b,
        checkpointed,
        t5,
        dropping(t5, **(t5.sizes | {"dropout_rate": 0.1})),
        mistral,
        documents,
        replace(mistral, name=name, length=32768, implementations=("sdpa", NAME)),
        gemma,
        deberta,
        gpt_oss,
        replace(gpt_oss, name="gpt-oss, 4 layers, 4 experts, 8192 tokens", batch=1, length=8192),
    ]
