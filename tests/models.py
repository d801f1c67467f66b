"""Tiny models of every family of transformers that is tested, and batches for them.

`MODELS[name](**options)` builds one in training mode, from the seed 0, without dropout, as "eager"
unless `attn_implementation` says otherwise. Weights have a large deviation, so that attention
decides the result. To test another family, add it here.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    DebertaConfig,
    DebertaForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    SwinConfig,
    SwinForImageClassification,
    Swinv2Config,
    Swinv2ForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gptj.modeling_gptj import GPTJAttention

VOCABULARY, BATCH, LENGTH, WINDOW = 97, 3, 12, 5
PADDINGS = ("none", "right", "left", "middle")

_TOKENS = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_UNTIED = {"tie_word_embeddings": False}  # else a token is often the best one after itself
_GPT = _TOKENS | {
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_LLAMA = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_BERT = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_OPT = (
    _TOKENS
    | _UNTIED
    | {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "init_std": 0.2,
        "dropout": 0.0,
    }
)
_T5 = _TOKENS | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2],
    "num_heads": [2],
    "window_size": 4,
    "initializer_range": 0.2,
    "drop_path_rate": 0.0,
    "num_labels": 7,
}
_DEBERTA = _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_BLOOM = _TOKENS | _UNTIED | {"hidden_size": 32, "n_layer": 2, "n_head": 4}
_BLOOM |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_FALCON = _TOKENS | _UNTIED | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_FALCON |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_MPT = _TOKENS | _UNTIED | {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}


def _builder(
    model_class: type[PreTrainedModel], config_class: type[PreTrainedConfig], sizes: dict[str, Any]
) -> Callable[..., PreTrainedModel]:
    def build(**options: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        arguments = {"attn_implementation": "eager"} | copy.deepcopy(sizes) | options
        return model_class(config_class(**arguments)).train()

    return build


MODELS = {
    "gpt2": _builder(GPT2LMHeadModel, GPT2Config, _GPT),
    "gpt2 by layer": _builder(
        GPT2LMHeadModel, GPT2Config, _GPT | {"scale_attn_by_inverse_layer_idx": True}
    ),
    "llama": _builder(LlamaForCausalLM, LlamaConfig, _LLAMA),
    "mixtral": _builder(MixtralForCausalLM, MixtralConfig, _LLAMA | {"num_local_experts": 4}),
    "mistral": _builder(MistralForCausalLM, MistralConfig, _LLAMA | {"sliding_window": WINDOW}),
    "gemma2": _builder(
        Gemma2ForCausalLM,
        Gemma2Config,
        _LLAMA
        | _UNTIED
        | {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": _builder(
        GptOssForCausalLM,
        GptOssConfig,
        _LLAMA | {"sliding_window": WINDOW, "num_local_experts": 4},
    ),
    "t5": _builder(T5ForConditionalGeneration, T5Config, _T5),
    "bert": _builder(BertForMaskedLM, BertConfig, _BERT),
    "opt": _builder(OPTForCausalLM, OPTConfig, _OPT),
    "swin": _builder(SwinForImageClassification, SwinConfig, _SWIN),
    "swinv2": _builder(Swinv2ForImageClassification, Swinv2Config, _SWIN),
    # Without transformers' attention interface:
    "bloom": _builder(BloomForCausalLM, BloomConfig, _BLOOM),
    "falcon": _builder(FalconForCausalLM, FalconConfig, _FALCON),
    "falcon, groups": _builder(
        FalconForCausalLM,
        FalconConfig,
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    # "eager" adds ALiBi twice.
    "falcon, alibi": _builder(
        FalconForCausalLM,
        FalconConfig,
        _FALCON
        | {
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "attn_implementation": "sdpa",
        },
    ),
    "gptj": _builder(GPTJForCausalLM, GPTJConfig, _GPT | {"rotary_dim": 4}),
    "mpt": _builder(MptForCausalLM, MptConfig, _MPT),
    # With distances beyond the table, and with fewer buckets than distances.
    "deberta": _builder(
        DebertaForMaskedLM, DebertaConfig, _DEBERTA | {"max_relative_positions": 7}
    ),
    "deberta_v2": _builder(
        DebertaV2ForMaskedLM,
        DebertaV2Config,
        _DEBERTA | {"position_buckets": 6, "share_att_key": True},
    ),
}
"""Name of a family -> what builds a model of it."""

# GPT-J has it from transformers 5.24 on.
GPTJ_HAS_INTERFACE = not hasattr(GPTJAttention, "_attn")
WITHOUT_INTERFACE = (
    *("bloom", "falcon", "falcon, groups", "falcon, alibi", "mpt", "deberta", "deberta_v2"),
    *(() if GPTJ_HAS_INTERFACE else ("gptj",)),
)
MIXTURES = ("mixtral", "gpt_oss")
IMAGES = ("swin", "swinv2")
DECODERS = tuple(
    name for name in MODELS if name not in ("bert", "deberta", "deberta_v2", "t5", *IMAGES)
)


def build_batch(
    padding: str = "none", device: str = "cpu", name: str = "llama"
) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels; the label of a token after padding is dropped too.

    That label is predicted at a padded position, where implementations differ by design. Images
    and their classes for IMAGES, which have no padding.
    """
    generator = torch.Generator().manual_seed(1)
    if name in IMAGES:
        images = torch.randn(BATCH, 3, 16, 16, generator=generator)
        labels = torch.arange(BATCH)
        return {"pixel_values": images.to(device), "labels": labels.to(device)}
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    keep = torch.ones_like(ids)
    if padding == "right":
        keep[1, -4:], keep[2, -7:] = 0, 0
    elif padding == "left":
        keep[1, :4], keep[2, :7] = 0, 0
    elif padding == "middle":
        keep[1, 3:6] = 0
    predicted_by_padding = torch.roll(keep, 1, dims=1) == 0
    labels = ids.masked_fill((keep == 0) | predicted_by_padding, -100)
    batch = {"input_ids": ids, "labels": labels}
    if padding != "none":
        batch["attention_mask"] = keep
    return {name: tensor.to(device) for name, tensor in batch.items()}
