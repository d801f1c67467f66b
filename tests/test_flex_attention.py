"""The guide's table for users of FlexAttention: each row against torch's eager form."""

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from inputs import normal, tensors
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    create_block_mask,
    create_mask,
    flex_attention,
)

import megasoftmax
from megasoftmax import TileMask, ranges
from megasoftmax.biases import RelativeBias, ShiftedBias, alibi_bias
from megasoftmax.integrations.flash_attn import flash_attn_func

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "learned-biases.md"
BATCH, HEADS, TOKENS, DIM = 2, 4, 7, 8

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
BIAS = normal(BATCH, HEADS, TOKENS, TOKENS, device="cpu", seed=4).double()
TABLE = normal(HEADS, 2 * TOKENS - 1, device="cpu", seed=5).double()
POSITIONS = normal(BATCH, HEADS, TOKENS, 2 * TOKENS - 1, device="cpu", seed=6).double()
FACTORS = torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
WINDOW = 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [5, 2, 2, 2, 2, 9, 9]])
SCATTERED = torch.tensor([[0, 1, 0, 1, 1, 0, 1], [5, 5, 2, 2, 5, 2, 5]])
LENGTHS = torch.tensor([3, 6])
CHUNK = 3
BLOCKS = torch.tensor([[True, False], [True, True]])


def causal(b, h, q, kv):
    return q >= kv


def in_window(b, h, q, kv):
    return (q - kv).abs() <= WINDOW


# The first cell of a row -> a score_mod, a mask_mod, and the arguments of megasoftmax.attention.
ROWS = {
    "a bias entry by entry": (
        lambda score, b, h, q, kv: score + BIAS[b, h, q, kv],
        None,
        {"bias": BIAS},
    ),
    "a bias by distance": (
        lambda score, b, h, q, kv: score + TABLE[h, kv - q + TOKENS - 1],
        None,
        {"bias": RelativeBias(TABLE)},
    ),
    "scores of positions, as Transformer-XL has them": (
        lambda score, b, h, q, kv: score + POSITIONS[b, h, q, kv - q + TOKENS - 1],
        None,
        {"bias": ShiftedBias(POSITIONS)},
    ),
    "ALiBi": (
        lambda score, b, h, q, kv: score + SLOPES[h] * (kv - q),
        causal,
        {"bias": alibi_bias(SLOPES, TOKENS, TOKENS), "causal": True},
    ),
    "causal": (None, causal, {"causal": True}),
    "sliding window": (
        None,
        lambda b, h, q, kv: (q >= kv) & (q - kv <= WINDOW),
        {"window": (WINDOW, 0)},
    ),
    "window on both sides": (None, in_window, {"window": (WINDOW, WINDOW)}),
    "documents, one after the other": (
        None,
        lambda b, h, q, kv: (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q >= kv),
        {"visible": ranges.segments(DOCUMENTS), "causal": True},
    ),
    "documents in any order": (
        None,
        lambda b, h, q, kv: SCATTERED[b, q] == SCATTERED[b, kv],
        {"mask": (SCATTERED[:, :, None] != SCATTERED[:, None])[:, None]},
    ),
    "prefix": (
        None,
        lambda b, h, q, kv: (kv < LENGTHS[b]) | (q >= kv),
        {"visible": ranges.prefix(LENGTHS, TOKENS)},
    ),
    "padding": (None, lambda b, h, q, kv: kv < LENGTHS[b], {"visible": ranges.lengths(LENGTHS)}),
    "chunks": (
        None,
        lambda b, h, q, kv: q // CHUNK == kv // CHUNK,
        {"visible": ranges.chunks(CHUNK, TOKENS)},
    ),
    "any other mask": (
        None,
        lambda b, h, q, kv: (q * kv + h) % 3 < 2,
        {
            "mask": ~create_mask(
                lambda b, h, q, kv: (q * kv + h) % 3 < 2, 1, HEADS, TOKENS, TOKENS, "cpu"
            )
        },
    ),
    "a window and a bias": (
        lambda score, b, h, q, kv: score + BIAS[b, h, q, kv],
        in_window,
        {"bias": BIAS, "window": (WINDOW, WINDOW)},
    ),
}


states = partial(tensors, "cpu", torch.float64, batch=BATCH, heads=HEADS, lengths=TOKENS, dims=DIM)


def flex(query: Tensor, key: Tensor, value: Tensor, score_mod, mask_mod, **options):
    """Output and log-sum-exp of the unfused form."""
    block_mask = None
    if mask_mod is not None:
        sizes = (BATCH, HEADS, query.shape[2], key.shape[2])
        block_mask = create_block_mask(mask_mod, *sizes, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        output, aux = flex_attention(
            *(query, key, value, score_mod, block_mask),
            **options,
            return_aux=AuxRequest(lse=True),
        )
    return output, aux.lse


def assert_close(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    score_mod, mask_mod, options = ROWS[name]
    given = states()
    wanted = flex(*given, score_mod, mask_mod)
    assert_close(megasoftmax.attention(*given, **options, return_lse=True), wanted)


def test_a_factor_for_each_head():
    query, key, value = states()
    wanted = flex(query, key, value, lambda score, b, h, q, kv: score * FACTORS[h], None)
    query = query * FACTORS[:, None, None]
    assert_close(megasoftmax.attention(query, key, value, return_lse=True), wanted)


def test_blocks():
    """64 queries and keys to a block, as `TileMask.from_blocks` takes them."""
    given = states(lengths=128)
    wanted = flex(*given, None, lambda b, h, q, kv: BLOCKS[q // 64, kv // 64])
    mask = TileMask.from_blocks(~BLOCKS, 64)
    assert_close(megasoftmax.attention(*given, mask=mask, return_lse=True), wanted)


def test_softcap():
    query, key, value = states()
    wanted = flex(query, key, value, lambda score, b, h, q, kv: 2 * torch.tanh(score / 2), None)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    output, lse, _ = flash_attn_func(q, k, v, softcap=2.0, return_attn_probs=True)
    assert_close((output.transpose(1, 2), lse), wanted)


def test_heads_that_share_keys_and_a_scale():
    given = states(heads=(HEADS, 2))
    wanted = flex(*given, None, None, enable_gqa=True, scale=0.3)
    assert_close(megasoftmax.attention(*given, scale=0.3, return_lse=True), wanted)


def test_the_guide_has_a_tested_line_for_each_row():
    table = GUIDE.read_text().split("## From FlexAttention")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|`]+?) \| .* \|$", table, re.MULTILINE)
    others = {"a factor for each head", "blocks", "softcap", "fewer heads of keys", "scale"}
    assert set(rows) == ROWS.keys() | others | {"log-sum-exp", "anything else"}
