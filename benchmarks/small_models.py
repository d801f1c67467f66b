"""Small models of every class of transformers that a rule can build, and batches for them.

`CLASSES` names the classes by task. `build(name)` makes one from its default configuration with
all sizes replaced; `_OWN` has the settings of those for which this is not enough.
"""

import copy
import inspect
import random
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY, BATCH, LENGTH = 97, 2, 12
_SAMPLES, _FRAMES = 4000, 64

_MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image and text": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}


# Of no mapping that is tried, with attention that those have not.
_MORE = {"EsmFold2Model": "protein", "ParakeetForCTC": "audio", "Swin2SRModel": "image"}


def _classes() -> dict[str, str]:
    found: dict[str, str] = {}
    for task, mapping in _MAPPINGS.items():
        for names in mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, task)
    return found | {name: task for name, task in _MORE.items() if hasattr(transformers, name)}


CLASSES = _classes()
"""Name of a class -> its task."""

TEXT = ("causal", "masked", "seq2seq")
PADDED = (*TEXT, "protein")
"""Tasks with tokens that can be padding."""

# Whatever configurations call their sizes. Each takes those that it has.
_LAYERS = 2
_CALLED: dict[Any, str] = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim emb_dim n_embed "
    "encoder_hidden_size decoder_hidden_size word_embed_proj_dim projection_dim lru_width "
    "attention_hidden_size classifier_proj_size input_embedding_size image_size "
    "audio_hidden_size feature_projection_input_dim",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "moe_intermediate_size d_inner dim_feedforward mlp_dim shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size shared_intermediate_size expert_dim intermediate_size_mlp",
    _LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers "
    "num_encoder_layers num_decoder_layers encoder_num_layers decoder_num_layers "
    "num_key_value_heads num_kv_heads multi_query_group_num encoder_num_key_value_heads "
    "decoder_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_k moe_topk "
    "top_k_experts type_vocab_size eos_token_id attn_layer_period",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "encoder_num_attention_heads decoder_num_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts patch_size rotary_dim mamba_n_heads mamba_num_heads "
    "mamba_dt_rank time_step_rank linear_num_value_heads",
    8: "head_dim d_kv d_head attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim "
    "global_head_dim attention_head_size relative_attention_num_buckets mamba_d_state "
    "ssm_state_size state_size linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank o_lora_rank lora_rank num_mel_bins mamba_d_head mamba_head_dim",
    64: "max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length "
    "max_source_positions max_target_positions max_length",
    1: "n_group topk_group n_shared_experts num_shared_experts bos_token_id sep_token_id "
    "cls_token_id first_k_dense_replace mamba_n_groups n_groups attn_layer_offset",
    0: "pad_token_id decoder_start_token_id num_kv_shared_layers num_nextn_predict_layers "
    "mtp_num_hidden_layers",
    5: "sliding_window",
    12: "relative_attention_max_distance",
    VOCABULARY: "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size "
    "decoder_vocab_size",
    0.2: "initializer_range init_std",
    None: "forced_bos_token_id forced_eos_token_id",
}
_SIZES = {name: size for size, names in _CALLED.items() for name in names.split()}
_SIZES["tie_word_embeddings"] = False  # else a token is often the best one after itself
_SWIN = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "patch_size": 2}
_POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_ATOMS = {"hidden_size": 64, "output_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_LATENT = {"num_key_value_heads": 4}  # keys are not shared by groups
_WITH_LATENTS = """
AXK1ForCausalLM AXK2ForCausalLM BailingHybridForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
DeepseekV32ForCausalLM Dots3NoteForCausalLM EsmcForMaskedLM Glm4MoeLiteForCausalLM
GlmMoeDsaForCausalLM LongcatFlashForCausalLM MiniCPM3ForCausalLM YoutuForCausalLM
"""
_ZAMBA = {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64}
_ZAMBA["attention_head_dim"] = 16
_OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_WITH_LATENTS.split(), _LATENT),
    "BigBirdPegasusForCausalLM": {"attention_type": "original_full"},
    "BigBirdPegasusForConditionalGeneration": {"attention_type": "original_full"},
    "LongformerForMaskedLM": {"attention_window": 4},
    # Not a pad token whose embedding is zero: with padding on the left its gradients would be NaN
    # for every implementation but "eager".
    "Gemma3nForCausalLM": {"pad_token_id": None},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False},
    "ReformerForMaskedLM": {"axial_pos_embds": False},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "LukeForMaskedLM": {"entity_vocab_size": 5, "entity_emb_size": 32},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 32},
    "KimiLinearForCausalLM": _LATENT | {"num_hidden_layers": 2, "num_experts": 4},
    "PerceiverForMaskedLM": {"num_latents": 4, "d_latents": 32, "num_self_attends_per_block": 2},
    "RoCBertForCausalLM": {"pronunciation_vocab_size": 5, "shape_vocab_size": 5},
    "RoCBertForMaskedLM": {"pronunciation_vocab_size": 5, "shape_vocab_size": 5},
    "DonutSwinForImageClassification": _SWIN,
    "SwinForImageClassification": _SWIN,
    "Swinv2ForImageClassification": _SWIN,
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "MPNetForMaskedLM": {"relative_attention_num_buckets": 32},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "ZambaForCausalLM": _ZAMBA,
    "Zamba2ForCausalLM": _ZAMBA | {"mamba_ngroups": 1},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "WhisperForAudioClassification": {"max_source_positions": _FRAMES // 2},
    "Wav2Vec2BertForSequenceClassification": {"feature_projection_input_dim": 16},
    "PvtForImageClassification": {"image_size": 64},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "NeoMMEForMaskedLM": {"head_dim": 16},
    "SegformerForImageClassification": {"num_attention_heads": [1, 2, 4, 8]},
    "BeitForImageClassification": {"use_relative_position_bias": True},
    "Data2VecVisionForImageClassification": {"use_relative_position_bias": True},
    "DebertaForMaskedLM": _POSITIONS | {"max_relative_positions": 7},
    "DebertaV2ForMaskedLM": _POSITIONS | {"position_buckets": 6},
    "Swin2SRModel": _SWIN | {"image_size": 16, "patch_size": 1},
    "EsmFold2Model": {
        "single_inputs_size": 99,
        "atom_encoder": _ATOMS,
        "structure_head": {
            "diffusion_module": {
                "hidden_size": 32,
                "fourier_dim": 16,
                "num_hidden_layers": _LAYERS,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "pair_intermediate_size": 48,
                "atom_encoder": _ATOMS,
            }
        },
        "msa_encoder": {"enabled": False},
        "esmc_config": {
            "model_type": "esmc",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
        "folding_trunk_num_hidden_layers": 1,
        "pairwise_hidden_size": 16,
    },
}
# Built, but too slow or too large for a sweep, or not to be built without other packages.
LEFT_OUT = {
    "BltForCausalLM": "the tables of its hashes have 96 million parameters",
    "VibeVoiceAsrForConditionalGeneration": "its tokenizer's encoder has 687 million parameters",
    "PerceiverForImageClassificationLearned": "its position embeddings have 270 million parameters",
    "AlignModel": "its EfficientNet has 62 million parameters",
    "EfficientNetForImageClassification": "no attention, and 63 million parameters",
}


def seed() -> None:
    """Every generator that models draw from."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _settings(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    default = config_class()
    given = default.to_dict() | {
        alias: getattr(default, alias, None)
        for alias, name in default.attribute_map.items()
        if name not in _SIZES
    }
    found: dict[str, Any] = {}
    for name, value in given.items():
        if any(part in name for part in ("drop", "jitter")) and isinstance(value, float):
            found[name] = 0.0
        elif name in _SIZES and not isinstance(value, list | tuple | dict):
            found[name] = _SIZES[name]
    if "layer_types" not in default.attribute_map and (layer_types := given.get("layer_types")):
        kinds = list(dict.fromkeys(layer_types))
        found["layer_types"] = kinds = kinds if len(kinds) > 1 else kinds * _LAYERS
        layers = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        found[layers] = len(kinds)
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            found[name] = _settings(type(part))
            if "model_type" in part.to_dict():
                found[name]["model_type"] = part.model_type
    return found


def build(name: str, implementation: str = "eager") -> PreTrainedModel:
    """The class on its small configuration, in training mode, from the same seed always."""
    model_class = getattr(transformers, name)
    config_class = model_class.config_class
    config = config_class(**(_settings(config_class) | copy.deepcopy(_OWN.get(name, {}))))
    config._attn_implementation = implementation
    seed()
    model = model_class(config).train()
    if CLASSES[name] == "protein":  # no setting makes its weights large
        for parameter in model.structure_head.token_transformer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_batch(model: PreTrainedModel, padding: str = "none") -> dict[str, torch.Tensor]:
    """Random tokens, pixels or sound for the task of a model's class.

    Args:
        padding: "none", "right" or "left", of tokens; the second sequence is shorter.
    """
    task, config = CLASSES[type(model).__name__], model.config
    generator = torch.Generator().manual_seed(1)

    def draw_tokens(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)

    batch: dict[str, torch.Tensor] = {}
    keep = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if padding != "none":
        keep[1, slice(-5, None) if padding == "right" else slice(5)] = 0
    if task == "protein":
        width, pair_width = config.structure_head.diffusion_module.hidden_size, (LENGTH, 16)
        for part, shape in (("hidden", (width,)), ("single", (width,)), ("pairs", pair_width)):
            batch[part] = torch.randn(BATCH, LENGTH, *shape, generator=generator)
        return batch | {"attention_mask": keep.bool()}
    if task in TEXT or task == "image and text":
        if padding != "none":
            batch["attention_mask"] = keep
        batch["input_ids"] = draw_tokens(LENGTH).masked_fill(
            keep == 0, getattr(config, "pad_token_id", 0) or 0
        )
    if task == "seq2seq" and config.is_encoder_decoder:
        batch["decoder_input_ids"] = draw_tokens(LENGTH - 5)
    if task in ("image", "image and text"):
        sizes = getattr(config, "vision_config", config)
        size = getattr(sizes, "image_size", 32)
        shape = tuple(size) if isinstance(size, list | tuple) else (size, size)
        batch["pixel_values"] = torch.randn(BATCH, 3, *shape, generator=generator)
    if task == "audio":
        if "input_features" in inspect.signature(model.forward).parameters:
            encoder = getattr(config, "encoder_config", config)
            bins = getattr(encoder, "num_mel_bins", 16)
            features = torch.randn(BATCH, bins, _FRAMES, generator=generator)
            is_channel_last = encoder is not config or hasattr(
                config, "feature_projection_input_dim"
            )
            batch["input_features"] = features.mT if is_channel_last else features
        else:
            is_spectrogram = hasattr(config, "frequency_stride")
            shape = (config.max_length, config.num_mel_bins) if is_spectrogram else (_SAMPLES,)
            batch["input_values"] = torch.randn(BATCH, *shape, generator=generator)
    return batch


def call(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> Any:
    """The model's results; of ESMFold2 the transformer with a bias of pairs in its denoiser."""
    if CLASSES[type(model).__name__] != "protein":
        return model(**batch)
    transformer = model.structure_head.token_transformer
    biases = transformer.compute_pair_biases(batch["pairs"], batch["attention_mask"])
    return {"last_hidden_state": transformer(batch["hidden"], batch["single"], biases)}
