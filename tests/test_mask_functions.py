"""Masks of transformers as ranges: what they let a query see is what `sdpa_mask` says."""

import random
from types import SimpleNamespace

import oracle
import pytest
import torch

pytest.importorskip("transformers")
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from megasoftmax.integrations.transformers import PaddingMask, make_mask

BATCH = 3


def allowed(mask, queries, keys):
    """bool [BATCH, 1, queries, keys], True = keep, of what attention would get."""
    assert mask.excluded is None or mask.excluded.shape == (BATCH, 1, 1, keys)
    for limit in mask.visible or ():
        assert limit is None or limit.dtype == torch.int32
    pairs = torch.empty(BATCH, 1, queries, keys)
    return ~oracle.excluded_entries(pairs, mask.excluded, mask.causal, mask.window, mask.visible)


def packed_positions(draw, tokens):
    """Positions, and which sequence a token is of."""
    positions, sequences = [], []
    for _ in range(BATCH):
        begins = torch.tensor([draw.random() < 0.3 for _ in range(tokens)])
        begins[0] = False
        sequence = begins.cumsum(0)
        own = sequence[:, None] == sequence
        positions.append((own & torch.ones(tokens, tokens).tril(-1).bool()).sum(1))
        sequences.append(sequence)
    return torch.stack(positions), torch.stack(sequences)


def packed(function, draw, tokens):
    positions, sequences = packed_positions(draw, tokens)
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(function, positions, sequences)
    return and_masks(function, packed_sequence_mask_function(sequences))  # transformers 5.17


def chunked(draw, left_padding):
    return chunked_causal_mask_function(draw.randint(1, 6), left_padding)


NO_PADDING = torch.zeros(BATCH, dtype=torch.int64)
KINDS = {
    "causal": lambda draw, left: causal_mask_function,
    "bidirectional": lambda draw, left: bidirectional_mask_function,
    "window": lambda draw, left: sliding_window_causal_mask_function(draw.randint(1, 9)),
    "window, both sides": lambda draw, left: sliding_window_bidirectional_mask_function(
        draw.randint(0, 5)
    ),
    "window, no causality": lambda draw, left: sliding_window_overlay(draw.randint(1, 9)),
    "chunks": chunked,
    "two windows in chunks": lambda draw, left: and_masks(
        sliding_window_causal_mask_function(draw.randint(1, 9)),
        sliding_window_bidirectional_mask_function(draw.randint(0, 5)),
        chunked_overlay(draw.randint(1, 6), left),
    ),
}
PACKED = {
    "causal": lambda draw: causal_mask_function,
    "window": lambda draw: sliding_window_causal_mask_function(draw.randint(1, 5)),
    "chunks": lambda draw: chunked(draw, NO_PADDING),
}


def padding(draw, kind, tokens):
    """keep, bool [BATCH, tokens], or None; how many are missing on the left."""
    if kind == "none":
        return None, NO_PADDING
    missing = torch.tensor([draw.randint(0, tokens // 2) for _ in range(BATCH)])
    keep = torch.arange(tokens) >= missing[:, None]
    return (keep, missing) if kind == "left" else (keep.flip(1), NO_PADDING)


@pytest.mark.parametrize("given", ["none", "left", "right"])
@pytest.mark.parametrize("offset", ["none", "cache", "static", "sliding", "any"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranges_are_those_of_the_mask(kind, offset, given):
    draw = random.Random(f"{kind} {offset} {given}")
    for _ in range(12):
        queries, seen = draw.randint(1, 12), draw.randint(0, 12)
        unused = draw.randint(0, 5)
        keys, q_offset, kv_offset = {
            "none": (queries, 0, 0),
            "cache": (queries + seen, seen, 0),
            "static": (queries + seen + unused, torch.tensor([seen]), 0),
            "sliding": (queries + seen // 2, seen, seen - seen // 2),
            "any": (draw.randint(1, 24), seen, draw.randint(0, 12)),
        }[offset]
        tokens = max(1, kv_offset + keys - (unused if given != "none" else 0))
        keep, left_padding = padding(draw, given, tokens)
        sizes = {
            "batch_size": BATCH,
            "q_length": queries,
            "kv_length": keys,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": KINDS[kind](draw, left_padding),
            "attention_mask": keep,
        }
        mask = make_mask(**sizes, allow_is_bidirectional_skip=True)
        assert isinstance(mask, PaddingMask)
        expected = sdpa_mask(**sizes, allow_is_causal_skip=False)
        assert torch.equal(allowed(mask, queries, keys), expected)


@pytest.mark.parametrize("kind", PACKED)
def test_packed_sequences(kind):
    draw = random.Random(kind)
    for _ in range(20):
        tokens = draw.randint(1, 24)
        function = packed(PACKED[kind](draw), draw, tokens)
        sizes = {"batch_size": BATCH, "q_length": tokens, "kv_length": tokens}
        sizes |= {"mask_function": function, "allow_is_causal_skip": False}
        mask = make_mask(**sizes)
        assert mask.excluded is None
        assert torch.equal(allowed(mask, tokens, tokens), sdpa_mask(**sizes))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("kind", [*KINDS, *(f"packed {kind}" for kind in PACKED)])
def test_no_tensor_of_queries_times_keys_is_made(kind):
    draw, tokens = random.Random(0), 64
    if kind in KINDS:
        function, offsets = KINDS[kind](draw, NO_PADDING), (0, torch.tensor([0]))
    else:  # transformers packs without a cache
        function = packed(PACKED[kind.removeprefix("packed ")](draw), draw, tokens)
        offsets = (0,)
    for offset in offsets:
        with Largest() as largest:
            make_mask(
                BATCH,
                tokens,
                tokens,
                q_offset=offset,
                mask_function=function,
                attention_mask=torch.ones(BATCH, tokens, dtype=torch.bool),
                allow_is_bidirectional_skip=True,
            )
        assert 0 < largest.elements <= BATCH * tokens


def own(batch, head, query, key):
    return key + 1 <= query + 1


UNKNOWN = {
    "the user's": (own, {}),
    "the user's among others": (and_masks(causal_mask_function, own), {}),
    "a union": (or_masks(causal_mask_function, sliding_window_overlay(2)), {}),
    "blocks": (masking_utils.blockwise_overlay(torch.zeros(BATCH, 5, dtype=torch.int64)), {}),
    "an empty window": (sliding_window_causal_mask_function(0), {}),
    "two kinds of chunks": (
        and_masks(chunked(random.Random(0), NO_PADDING), chunked_overlay(2, NO_PADDING)),
        {},
    ),
    "asked for as a tensor": (causal_mask_function, {}),
    "without an end, asked for as a tensor": (bidirectional_mask_function, {}),
    "with vmap": (packed_sequence_mask_function(torch.zeros(BATCH, 5)), {"use_vmap": True}),
    "packed, of a model that computes with masks": (
        packed(causal_mask_function, random.Random(0), 5),
        {"config": SimpleNamespace(model_type="doge")},
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_is_not_served_as_ranges_is_a_tensor(kind):
    function, options = UNKNOWN[kind]
    given = {"batch_size": BATCH, "q_length": 5, "kv_length": 5, "mask_function": function}
    given |= {"allow_is_causal_skip": False} | options
    mask = make_mask(**given)
    assert isinstance(mask, torch.Tensor)
    assert torch.equal(mask, sdpa_mask(**given))
