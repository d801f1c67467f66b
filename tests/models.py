"""Tiny models of every family of transformers that is tested, and batches for them.

`MODELS[name](**options)` builds one in training mode, from the seed 0, without dropout, as "eager"
unless `attn_implementation` says otherwise. Weights have a large deviation, so that attention
decides the result. To test another family, add it here.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.gptj.modeling_gptj import GPTJAttention

VOCABULARY, BATCH, LENGTH, WINDOW = 97, 3, 12, 5
PADDINGS = ("none", "right", "left", "middle")

_TOKENS = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "pad_token_id": 0}
_TOKENS |= {"bos_token_id": None, "eos_token_id": None}
_UNTIED = {"tie_word_embeddings": False}  # else a token is often the best one after itself
_GPT = _TOKENS | {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
_GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_HIDDEN = _TOKENS | _SIZES | {"max_position_embeddings": 64}
_LLAMA = _HIDDEN | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_BERT = _HIDDEN | {"intermediate_size": 48}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OPT = _HIDDEN | _UNTIED | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}
_OPT |= {"dropout": 0.0}
_T5 = _TOKENS | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
_SWIN |= {"window_size": 4, "initializer_range": 0.2, "drop_path_rate": 0.0, "num_labels": 7}
_DEBERTA = _BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_BLOOM = _TOKENS | _UNTIED | {"hidden_size": 32, "n_layer": 2, "n_head": 4}
_BLOOM |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_FALCON = _TOKENS | _UNTIED | _SIZES
_FALCON |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_MPT = _TOKENS | _UNTIED | {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 64}


def tiny(name: str, **sizes: Any) -> PreTrainedModel:
    """A model of that class of transformers, with the configuration of its class."""
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**sizes))


def _builder(name: str, sizes: dict[str, Any], **more: Any) -> Callable[..., PreTrainedModel]:
    def build(**options: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        arguments = {"attn_implementation": "eager"} | copy.deepcopy(sizes | more) | options
        return tiny(name, **arguments).train()

    return build


MODELS = {
    "gpt2": _builder("GPT2LMHeadModel", _GPT),
    "gpt2 by layer": _builder("GPT2LMHeadModel", _GPT, scale_attn_by_inverse_layer_idx=True),
    "llama": _builder("LlamaForCausalLM", _LLAMA),
    "mixtral": _builder("MixtralForCausalLM", _LLAMA, num_local_experts=4),
    "mistral": _builder("MistralForCausalLM", _LLAMA, sliding_window=WINDOW),
    "gemma2": _builder(
        "Gemma2ForCausalLM",
        _LLAMA | _UNTIED | {"layer_types": ["sliding_attention", "full_attention"]},
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=8,
    ),
    "gpt_oss": _builder("GptOssForCausalLM", _LLAMA, sliding_window=WINDOW, num_local_experts=4),
    "t5": _builder("T5ForConditionalGeneration", _T5),
    "bert": _builder("BertForMaskedLM", _BERT),
    "opt": _builder("OPTForCausalLM", _OPT),
    "swin": _builder("SwinForImageClassification", _SWIN),
    "swinv2": _builder("Swinv2ForImageClassification", _SWIN),
    # Without transformers' attention interface:
    "bloom": _builder("BloomForCausalLM", _BLOOM),
    "falcon": _builder("FalconForCausalLM", _FALCON),
    "falcon, groups": _builder(
        "FalconForCausalLM", _FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    # "eager" adds ALiBi twice.
    "falcon, alibi": _builder(
        "FalconForCausalLM",
        _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False},
        attn_implementation="sdpa",
    ),
    "gptj": _builder("GPTJForCausalLM", _GPT, rotary_dim=4),
    "mpt": _builder("MptForCausalLM", _MPT),
    # With distances beyond the table, and with fewer buckets than distances.
    "deberta": _builder("DebertaForMaskedLM", _DEBERTA, max_relative_positions=7),
    "deberta_v2": _builder(
        "DebertaV2ForMaskedLM", _DEBERTA, position_buckets=6, share_att_key=True
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
