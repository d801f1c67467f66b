"""Models and data of `megasoftmax.regression`: tiny ones by name, a checkpoint's, a user's own."""

import importlib
import inspect
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto import modeling_auto

from megasoftmax.integrations.transformers import attention_forward, make_mask, register
from megasoftmax.regression import pairs

Batch = Mapping[str, torch.Tensor]
Build = Callable[[str], torch.nn.Module]
"""Makes a model that runs the attention implementation of a name."""

UNFUSED = "megasoftmax_unfused"
"""Attention of "megasoftmax" in plain torch, in every type; drops what the kernels drop."""

TEXT_BYTES = 2_000_000
BYTES = 256  # a byte is a token
IGNORED = -100  # a label without a loss
PAD, MASK = 0, 1  # bytes that do not occur in text
MASKED_SHARE = 0.15  # of the tokens of masked language models
WINDOW = 20

# Weights are large, so that attention decides the result. A head dimension of 48 has a scale that
# bfloat16 misses by 0.13%, and keys are shared by the heads of a group where a family has groups.
_DECODER = {
    "vocab_size": BYTES,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": PAD,
}
# Rounding that sends a token to other experts would hide what attention does to gradients.
_ALL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_NO_GROUPS = {
    name: size for name, size in _DECODER.items() if name not in ("num_key_value_heads", "head_dim")
}

_WINDOWED = _DECODER | {"sliding_window": WINDOW}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _NO_GROUPS | {"n_inner": 128}),
    "llama": ("LlamaForCausalLM", _DECODER),
    "mistral": ("MistralForCausalLM", _WINDOWED),
    "mixtral": ("MixtralForCausalLM", _DECODER | _ALL_EXPERTS | {"sliding_window": None}),
    "gemma2": ("Gemma2ForCausalLM", _WINDOWED | {"query_pre_attn_scalar": 48}),
    "gpt_oss": (
        "GptOssForCausalLM",
        _WINDOWED
        | _ALL_EXPERTS
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": BYTES,
            "d_model": 96,
            "d_kv": 48,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": PAD,
        },
    ),
    "bert": ("BertForMaskedLM", _NO_GROUPS),
    "opt": (
        "OPTForCausalLM",
        _NO_GROUPS | {"ffn_dim": 128, "word_embed_proj_dim": 96, "init_std": 0.1},
    ),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 48,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 10,
            "initializer_range": 0.1,
        },
    ),
    "wav2vec2_conformer": (
        "Wav2Vec2ConformerForSequenceClassification",
        {
            "hidden_size": 96,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "position_embeddings_type": "relative",
            "conv_dim": [32, 32],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "conv_depthwise_kernel_size": 7,
            "classifier_proj_size": 32,
            "vocab_size": BYTES,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "num_labels": 10,
            "initializer_range": 0.1,
        },
    ),
}
"""Name of a family -> its class in transformers and the settings of a tiny model of it."""

PAIR = "pair"
NAMES = (*TINY, PAIR)
"""The tiny models: families of transformers, and `regression.pairs`."""

_ATTENTION_OF_PAIRS: dict[str, pairs.Attend] = {
    "eager": pairs.eager,
    "sdpa": pairs.sdpa,
    "megasoftmax": pairs.fused,
    "megasoftmax_softmax": pairs.through_softmax,
    UNFUSED: partial(pairs.fused, fused=False),
}


class RegressionError(Exception):
    """The comparison cannot be made; the message says what was expected and what came."""


def model_builder(model: str | Callable[..., torch.nn.Module]) -> Build:
    """A function that builds the model of that name, folder or import path, or by that callable.

    Args:
        model: one of `NAMES`; a folder with a config.json and, if its weights are wanted,
            a checkpoint; "package.module:factory"; or the factory itself. A factory that takes an
            argument gets the name of the attention implementation; one that takes none returns a
            PreTrainedModel, which is switched.

    Raises:
        RegressionError: there is no such model; or, when the function is called, it cannot be
        switched.
    """
    register()
    AttentionInterface.register(UNFUSED, partial(attention_forward, fused=False))
    AttentionMaskInterface.register(UNFUSED, make_mask)
    if callable(model):
        factory = model
    elif model in TINY:
        class_name, settings = TINY[model]
        model_class = getattr(transformers, class_name)
        return lambda name: _switched(model_class(model_class.config_class(**settings)), name)
    elif model == PAIR:
        factory = _pair_transformer
    elif Path(model).is_dir():
        return _checkpoint_builder(Path(model))
    elif ":" in model:
        factory = import_object(model, "model")
    else:
        raise RegressionError(
            f"model: expected one of {', '.join(NAMES)}, a folder, or package.module:factory, "
            f"got {model!r}"
        )
    takes_name = bool(inspect.signature(factory).parameters)

    def build(name: str) -> torch.nn.Module:
        built = factory(name) if takes_name else factory()
        if isinstance(built, transformers.PreTrainedModel):
            return _switched(built, name)
        if not isinstance(built, torch.nn.Module):
            kind = type(built).__name__
            raise RegressionError(f"model: expected an nn.Module from {model}, got a {kind}")
        if not takes_name:
            raise RegressionError(
                f"model: expected {model} to take the name of the attention implementation, "
                f"because it returns a {type(built).__name__}, which is no PreTrainedModel"
            )
        return built

    return build


def _pair_transformer(name: str) -> torch.nn.Module:
    if name not in _ATTENTION_OF_PAIRS:
        expected = ", ".join(_ATTENTION_OF_PAIRS)
        raise RegressionError(
            f"attention implementation: expected one of {expected} for the model {PAIR!r}, "
            f"got {name!r}"
        )
    return pairs.PairTransformer(BYTES, _ATTENTION_OF_PAIRS[name])


def import_object(path: str, argument: str) -> Any:
    """What "package.module:name" names.

    Raises:
        RegressionError: it cannot be imported, or is not callable.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RegressionError(
            f"{argument}: expected package.module:name, got {path!r}: {error}"
        ) from error
    if not callable(found):
        raise RegressionError(f"{argument}: expected a callable, got {path} = {found!r}")
    return found


def _checkpoint_builder(folder: Path) -> Build:
    """Builds from a folder's config.json, with its weights where there are any."""
    try:
        (class_name,) = json.loads((folder / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RegressionError(
            f"model: expected a config.json with one of architectures in {folder}, "
            f"got {type(error).__name__}: {error}"
        ) from error
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise RegressionError(f"model: expected a class of transformers, got {class_name!r}")
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))

    def build(name: str) -> torch.nn.Module:
        if has_weights:
            model = model_class.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
            )
        else:
            model = model_class(model_class.config_class.from_pretrained(folder))
        return _switched(model, name)

    return build


def _switched(model: transformers.PreTrainedModel, name: str) -> transformers.PreTrainedModel:
    """The model, with that attention implementation in all of its parts."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            # Before transformers 5.20 a model skips T5's encoder and decoder.
            try:
                part.set_attn_implementation(name)
            except (ImportError, ValueError) as error:
                raise RegressionError(
                    f"attention implementation: {type(part).__name__} refuses {name!r}: {error}"
                ) from error
            actual = part.config._attn_implementation
            if actual != name:
                raise RegressionError(
                    f"attention implementation: expected {name!r} in {type(part).__name__}, "
                    f"got {actual!r}; it cannot be switched"
                )
    return model


def make_batches(model: torch.nn.Module, batch: int, length: int, seed: int) -> Iterator[Batch]:
    """Batches without end, of the standard library's own sources, byte by byte.

    The first and the last of four batches are padded: their first sequence on the left, the second
    on the right, the third not, and so on. With padding on the left the label of the first token is
    ignored, because it is predicted where nothing is visible.

    Args:
        model: its head decides what a batch has: labels for the next byte, for masked bytes, for
            the next piece of text, for images, whose pixels are bytes, or for sound, whose samples
            are. A module of the user's
            own gets `input_ids`, `attention_mask` and `labels` as a causal language model does.
        batch, length: sequences of a batch, and tokens of a sequence.
        seed: decides which pieces of the text.

    Raises:
        RegressionError: no data for this head; the sequences are longer than the model allows.
    """
    task = _task(model)
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise RegressionError(f"length: expected at most {limit} for this model, got {length}")
    text = read_text()
    generator = torch.Generator("cpu").manual_seed(seed)

    def pieces(count: int) -> torch.Tensor:
        begins = torch.randint(
            len(text) - count, (batch, 1), generator=generator, device=text.device
        )
        return text[begins + torch.arange(count, device=text.device)].long()

    for padded in itertools.cycle((True, False, False, True)):
        if task == "image":
            yield _images(pieces, config)
        elif task == "sound":
            yield _sounds(pieces, length, padded, config)
        else:
            text_of_batch = pieces(2 * length) % getattr(config, "vocab_size", BYTES)
            yield _sequences(task, text_of_batch, length, padded, generator)


def read_text() -> torch.Tensor:
    """The modules of the standard library, one after the other: uint8 [at most TEXT_BYTES]."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text[:TEXT_BYTES]), dtype=torch.uint8)


_HEADS = {
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sound": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}


def _task(model: torch.nn.Module) -> str:
    if isinstance(model, pairs.PairTransformer):
        return "masked"
    if not isinstance(model, transformers.PreTrainedModel):
        return "causal"
    class_name = type(model).__name__
    for task, classes in _HEADS.items():
        if any(class_name in ([c] if isinstance(c, str) else c) for c in classes.values()):
            return task
    raise RegressionError(
        f"data: expected a model with one of the heads {', '.join(_HEADS)}, got {class_name}; "
        "give batches of your own"
    )


def _sequences(
    task: str, text: torch.Tensor, length: int, padded: bool, generator: torch.Generator
) -> Batch:
    """A batch of language: `text` holds the sequences and what follows them."""
    ids, following = text[:, :length], text[:, length:]
    keep = torch.ones_like(ids)
    if padded:
        pads = torch.randint(
            length // 4, length // 2 + 1, (len(ids),), generator=generator, device=ids.device
        )
        for row, pad in enumerate(pads.tolist()):
            if row % 3 == 0:
                keep[row, :pad] = 0
            elif row % 3 == 1:
                keep[row, -pad:] = 0
    if task == "seq2seq":
        labels = following.masked_fill(keep.flip(1) == 0, IGNORED)
    elif task == "masked":
        drawn = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device=ids.device)
        masked = drawn < MASKED_SHARE
        masked[:, length // 2] = True  # at least one of a sequence, and never padding
        keep[:, length // 2] = 1
        labels = ids.masked_fill(~masked | (keep == 0), IGNORED)
        ids = ids.masked_fill(masked, MASK)
    else:
        predicted_by_padding = keep.roll(1, dims=1) == 0
        labels = ids.masked_fill((keep == 0) | predicted_by_padding, IGNORED)
    batch = {"input_ids": ids.masked_fill(keep == 0, PAD), "labels": labels}
    return batch | {"attention_mask": keep} if padded else batch


def _images(pieces: Callable[[int], torch.Tensor], config: Any) -> Batch:
    shape = (config.num_channels, config.image_size, config.image_size)
    count = shape[0] * shape[1] * shape[2]
    text = pieces(count + 1)
    pixels = text[:, :-1].view(-1, *shape) / 64 - 1
    return {"pixel_values": pixels, "labels": text[:, -1] % config.num_labels}


def _sounds(pieces: Callable[[int], torch.Tensor], length: int, padded: bool, config: Any) -> Batch:
    """Samples for `length` frames of a model with strided convolutions, and labels of sounds."""
    samples = config.inputs_to_logits_ratio * (length + 1)
    text = pieces(samples + 1)
    batch = {"input_values": text[:, :-1] / 64 - 1, "labels": text[:, -1] % config.num_labels}
    if not padded:
        return batch
    keep = torch.ones_like(text[:, :-1])
    keep[1::3, samples * 2 // 3 :] = 0
    return batch | {"input_values": batch["input_values"] * keep, "attention_mask": keep}


def take(batches: Iterable[Batch], steps: int) -> Iterator[Batch]:
    """The first `steps` batches.

    Raises:
        RegressionError: there are fewer, or one is no mapping.
    """
    iterator = iter(batches)
    for step in range(steps):
        batch = next(iterator, None)
        if batch is None:
            raise RegressionError(f"data: expected {steps} batches, got {step}")
        if not isinstance(batch, Mapping):
            raise RegressionError(f"data: expected mappings, got {type(batch).__name__}")
        yield batch
