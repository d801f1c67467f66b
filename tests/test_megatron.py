"""Megatron-core with megasoftmax against plain float64 attention and against Megatron itself."""

import contextlib
import functools
import gc
import math
import sys
import warnings
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import NamedTuple

import op_checks
import oracle
import processes
import pytest
import torch
from einops import einsum, rearrange, repeat
from inputs import attention_as_defined, deterministic, record_calls

pytest.importorskip("megatron", reason="needs megatron-core")  # without its own needs it fails
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what else could be installed
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import router as moe_router
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

import megasoftmax
from megasoftmax.functions.calls import new_seed
from megasoftmax.integrations.megatron import (
    MegasoftmaxCoreAttention,
    apply_megasoftmax_to_megatron,
    core_attention,
)
from megasoftmax.integrations.megatron.routers import ROUTED_WHERE
from megasoftmax.integrations.megatron_extensions import MODULES, install_extension_modules
from megasoftmax.integrations.replacing import Served
from megasoftmax.options import AttentionOptions
from megasoftmax.reference import dropout

pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, BATCH, LENGTH, HEADS, HEAD_DIM = 62, 2, 12, 4, 8


@pytest.fixture(scope="module", autouse=True)
def parallel():
    """One rank, which is all tensor-parallel ranks."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(params=["attention", "softmax"])
def path(request, monkeypatch):
    """The way through attention, on a CPU too, or that through the softmax."""
    functions = (
        (request.param, "attention_varlen") if request.param == "attention" else ("softmax",)
    )
    calls = [record_calls(monkeypatch, function) for function in functions]

    def decide(asked, query, *rest):
        return request.param == "attention" and (not query.is_cuda or asked(query, *rest))

    for name in ("takes_attention", "runs_fused"):
        asked = getattr(core_attention, name)
        monkeypatch.setattr(core_attention, name, functools.partial(decide, asked))
    yield request.param
    assert any(calls)


def make_config(**options):
    sizes = {"num_layers": 2, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS}
    plain = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "init_method_std": 0.3}
    return TransformerConfig(**(sizes | plain | {"use_cpu_initialization": True} | options))


def expected_attention(
    query, key, value, *, scale, causal=False, window=None, mask=None, bias=None, offset=None
):
    """Of [tokens, batch, heads, head_dim], in float64: [tokens, batch, ...]."""
    tensors = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
    pairs = query.new_empty(len(query), len(key))
    excluded = oracle.excluded_entries(pairs, None, causal, window)
    if mask is not None:
        excluded = excluded | mask
    options = {"scale": scale, "bias": bias, "excluded": excluded, "sink": offset}
    output, _ = attention_as_defined(*tensors, **options)
    return rearrange(output, "b h m x -> m b (h x)")


class PlainAttention(MegatronModule):
    """The core attention of what is expected."""

    def __init__(self, config, layer_number, attn_mask_type, softmax_scale=None, **others):
        super().__init__(config=config)
        frequency = config.window_attn_skip_freq
        has_window = config.window_size and (frequency is None or layer_number % frequency != 0)
        self.window = config.window_size if has_window else None
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, **others):
        output = expected_attention(
            query,
            key,
            value,
            scale=self.scale,
            causal=attn_mask_type == AttnMaskType.causal,
            window=self.window,
            mask=attention_mask,
            offset=self.softmax_offset,
        )
        return output.to(query.dtype)


# The module by itself


class Case(NamedTuple):
    config: dict = MappingProxyType({})
    mask_type: str = "causal"
    queries: int = 9
    keys: int = 9
    key_heads: int = HEADS
    value_dim: int = HEAD_DIM
    mask: tuple = None  # shape
    bias: tuple = None  # shape; 2 dimensions: of a table
    layer: int = 1
    options: dict = MappingProxyType({})
    window: tuple = None  # that of the config, where the layer has it


MASK = (BATCH, 1, 1, 9)
CASES = {
    "causal": Case(),
    "causal, fewer queries": Case(queries=5),
    "causal, one query": Case(queries=1),
    "causal and mask": Case(mask=MASK),
    "bottom right": Case(mask_type="causal_bottom_right", queries=4),
    "no mask": Case(mask_type="no_mask"),
    "padding": Case(mask_type="padding", mask=MASK),
    "padding without a mask": Case(mask_type="padding"),
    "padding and causal": Case(mask_type="padding_causal", mask=MASK),
    "arbitrary": Case(mask_type="arbitrary", mask=(BATCH, 1, 9, 9)),
    "arbitrary for each head": Case(mask_type="arbitrary", mask=(BATCH, HEADS, 9, 9)),
    "cross": Case(mask_type="padding", queries=6, mask=MASK),
    "grouped": Case(key_heads=2, mask=MASK),
    "one key head": Case(key_heads=1),
    "values of another dimension": Case(value_dim=5, options={"v_channels": 5}),
    "window": Case({"window_size": (3, 0)}, window=(3, 0)),
    "window and mask": Case({"window_size": (3, 0)}, mask=MASK, window=(3, 0)),
    "window of both sides": Case({"window_size": (3, 1)}, "no_mask", window=(3, 1)),
    "window without a limit left": Case({"window_size": (-1, 2)}, "no_mask", window=(-1, 2)),
    "window without a limit right": Case({"window_size": (2, -1)}, window=(2, -1)),
    "window, fewer queries": Case({"window_size": (2, 0)}, queries=4, window=(2, 0)),
    "window of other layers": Case({"window_size": (3, 0), "window_attn_skip_freq": 2}, layer=2),
    "window of every second layer": Case(
        {"window_size": (3, 0), "window_attn_skip_freq": 2}, layer=1, window=(3, 0)
    ),
    "window by a list of layers": Case(
        {"window_size": (3, 0), "window_attn_skip_freq": [0, 1]}, layer=2, window=(3, 0)
    ),
    "off by one": Case({"softmax_type": "off-by-one"}, mask=MASK),
    "learnable offset": Case({"softmax_type": "learnable"}, key_heads=2, mask=MASK),
    "bias": Case(bias=(1, HEADS, 9, 9)),
    "bias of batches": Case(mask_type="padding", mask=MASK, bias=(BATCH, HEADS, 9, 9)),
    "bias for all heads": Case(bias=(1, 1, 9, 9), key_heads=2),
    "relative bias": Case(bias=(HEADS, 17)),
    "relative bias, cross": Case(mask_type="no_mask", queries=6, bias=(HEADS, 14)),
    "scale": Case(options={"softmax_scale": 0.7}),
    "scale by channels": Case(options={"k_channels": 3}),
    "layer scaling": Case({"apply_query_key_layer_scaling": True}, layer=3, bias=(1, 1, 9, 9)),
}


def make_inputs(case, device, dtype):
    """Query, key, value; mask and bias."""
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, device=device).requires_grad_()

    tensors = (
        normal(case.queries, BATCH, HEADS, HEAD_DIM),
        normal(case.keys, BATCH, case.key_heads, HEAD_DIM),
        normal(case.keys, BATCH, case.key_heads, case.value_dim),
    )
    mask = bias = None
    if case.mask is not None:
        mask = torch.rand(case.mask, device=device) < 0.4
        mask[0, ..., 0] = True  # with causality, a query that sees nothing
    if case.bias is not None:
        bias = normal(*case.bias)
    return tensors, mask, bias


def build(case, device="cpu", dtype=torch.float64):
    config = make_config(num_query_groups=case.key_heads, **case.config)
    mask_type = AttnMaskType[case.mask_type]
    torch.manual_seed(3)
    core = MegasoftmaxCoreAttention(config, case.layer, mask_type, "self", **case.options)
    return core.to(device, dtype)


def assert_same(output, expected, wrt, tolerance):
    """Output and gradients."""
    torch.testing.assert_close(output.double(), expected, **tolerance)
    cotangent = torch.randn_like(output)
    gradients = torch.autograd.grad(output, wrt, cotangent)
    wanted = torch.autograd.grad(expected, wrt, cotangent.double())
    torch.testing.assert_close(gradients, wanted, **tolerance)


def expected_offset(core):
    if core.config.softmax_type == "off-by-one":
        return torch.zeros(HEADS)
    return dict(core.named_parameters()).get("softmax_offset")


@pytest.mark.parametrize("name", CASES)
def test_core_attention(name, path, device):
    case = CASES[name]
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if device == "cpu" else {"rtol": 3e-2, "atol": 3e-2}
    core = build(case, device, dtype)
    (query, key, value), mask, bias = make_inputs(case, device, dtype)
    wrt = [query, key, value, *core.parameters(), *([] if bias is None else [bias])]

    given = bias
    if bias is not None and bias.dim() == 2:
        given = megasoftmax.RelativeBias(bias)
        rows = [bias[:, case.queries - 1 - i :][:, : case.keys] for i in range(case.queries)]
        bias = torch.stack(rows, 1)
    output = core(query, key, value, mask, attention_bias=given)

    head_dim = case.options.get("k_channels", HEAD_DIM)
    expected = expected_attention(
        query,
        key,
        value,
        scale=case.options.get("softmax_scale", head_dim**-0.5),
        causal="causal" in case.mask_type,
        window=case.window,
        mask=mask,
        bias=bias,
        offset=expected_offset(core),
    )
    assert output.is_contiguous()
    assert_same(output, expected, wrt, tolerance)


@pytest.mark.parametrize("fault", ["scale", "mask", "bias", "causal", "window", "sink"])
def test_planted_fault_is_caught(fault, monkeypatch):
    """Of an implementation without that option, some case says so."""
    original = megasoftmax.softmax

    def faulty(scores, **options):
        del options[fault]
        return original(scores, **options)

    monkeypatch.setattr(megasoftmax, "softmax", faulty)
    cases = {
        "scale": "layer scaling",
        "mask": "causal and mask",
        "bias": "bias",
        "causal": "causal",
        "window": "window",
        "sink": "off by one",
    }
    monkeypatch.setattr(core_attention, "takes_attention", lambda *tensors: False)
    with pytest.raises(AssertionError, match="not close"):
        test_core_attention(cases[fault], "softmax", "cpu")


def test_mask_type_of_the_call_and_dropout_of_the_constructor_count():
    tensors, _, _ = make_inputs(Case(), "cpu", torch.float64)
    actual = build(Case())(*tensors, None, attn_mask_type=AttnMaskType.no_mask)
    torch.testing.assert_close(actual, expected_attention(*tensors, scale=HEAD_DIM**-0.5))
    case = Case({"attention_dropout": 0.3}, options={"attention_dropout": 0.0})
    plain = expected_attention(*tensors, scale=HEAD_DIM**-0.5, causal=True)
    torch.testing.assert_close(build(case)(*tensors, None), plain)


def test_layer_scaling_keeps_float16_scores_finite():
    case = Case({"apply_query_key_layer_scaling": True}, layer=4)
    query = torch.full((2, 1, HEADS, HEAD_DIM), 150.0, dtype=torch.float16)
    query[1] += 10  # scores of 63600 to 72400, and more than 65504 is inf
    value = torch.randn(2, 1, HEADS, HEAD_DIM).half()
    actual = build(case, dtype=torch.float16)(query, query, value, None)
    torch.testing.assert_close(actual, value.flatten(2))  # the last key has all the weight


# Dropout


def test_dropout(monkeypatch):
    monkeypatch.setattr(core_attention, "takes_attention", lambda *tensors: True)
    case = Case({"attention_dropout": 0.3}, mask=MASK, key_heads=2)
    core = build(case)
    tensors, mask, _ = make_inputs(case, "cpu", torch.float64)
    torch.manual_seed(5)
    output = core(*tensors, mask)
    torch.manual_seed(5)
    seed = new_seed(torch.device("cpu"))
    keep = dropout.kept_of_scores(seed, 0.3, torch.empty(BATCH, HEADS, 9, 9))
    factors = dropout.dropped(torch.ones(keep.shape, dtype=torch.float64), keep, 0.3)
    assert 0 < (factors == 0).sum() < factors.numel()

    query, key, value = tensors
    one_hot = torch.eye(9, dtype=torch.float64)[:, None, None].expand(9, BATCH, 2, 9)
    weights = expected_attention(query, key, one_hot, scale=HEAD_DIM**-0.5, causal=True, mask=mask)
    weights = rearrange(weights, "m b (h n) -> b h m n", h=HEADS) * factors
    values = repeat(value, "n b h x -> n b (h 2) x")
    expected = einsum(weights, values, "b h m n, n b h x -> m b h x")
    expected = rearrange(expected, "m b h x -> m b (h x)")
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), tensors)
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(gradients, wanted)

    plain = expected_attention(*tensors, scale=HEAD_DIM**-0.5, causal=True, mask=mask)
    torch.testing.assert_close(core.eval()(*tensors, mask), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_tracker(sequence_parallel):
    case = Case({"attention_dropout": 0.5})
    core = build(case, "cuda", torch.bfloat16)
    core.config.sequence_parallel = sequence_parallel
    tensors, _, _ = make_inputs(case, "cuda", torch.bfloat16)
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    before, default = states["model-parallel-rng"].clone(), torch.cuda.get_rng_state()
    output = core(*tensors, None)
    after = tensor_parallel.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    assert torch.equal(before, after) == sequence_parallel
    assert torch.equal(default, torch.cuda.get_rng_state()) != sequence_parallel
    assert not torch.equal(output, core.eval()(*tensors, None))


# Packed sequences


def packed(lengths, key_lengths=None, starts=None, key_starts=None):
    """Sequences one after the other, or at those starts."""

    def cumulative(sizes):
        return None if sizes is None else torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)

    def padded(begins):
        return None if begins is None else torch.tensor(begins, dtype=torch.int32)

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cumulative(lengths),
        cu_seqlens_kv=cumulative(key_lengths or lengths),
        cu_seqlens_q_padded=padded(starts),
        cu_seqlens_kv_padded=padded(key_starts or starts),
    )


PACKED = {
    "causal": ({}, "causal", {"lengths": [5, 1, 8, 3, 7]}),
    "equal lengths": ({}, "padding_causal", {"lengths": [6, 6, 6, 6]}),
    "one sequence": ({}, "causal", {"lengths": [24]}),
    "not causal": ({}, "padding", {"lengths": [5, 1, 8, 3, 7]}),
    "an empty one": ({}, "causal", {"lengths": [5, 0, 8, 3]}),
    "no sequence": ({}, "causal", {"lengths": []}),
    "window": ({"window_size": (2, 0)}, "causal", {"lengths": [5, 1, 8, 3, 7]}),
    "offset": ({"softmax_type": "learnable"}, "causal", {"lengths": [5, 1, 8, 3, 7]}),
    "cross": ({}, "padding", {"lengths": [5, 1, 8, 3], "key_lengths": [2, 9, 7, 0]}),
    "cross and causal": ({}, "causal", {"lengths": [5, 7, 4, 1], "key_lengths": [6, 4, 7, 9]}),
    "cross and window": (
        {"window_size": (1, 1)},
        "padding",
        {"lengths": [5, 7, 4], "key_lengths": [6, 4, 7]},
    ),
    "padded": ({}, "causal", {"lengths": [5, 1, 8], "starts": [0, 8, 12, 24]}),
    "padded, an empty one": (
        {"window_size": (2, 0)},
        "padding_causal",
        {"lengths": [5, 0, 8], "starts": [0, 8, 12, 24]},
    ),
    "padded keys": (
        {"softmax_type": "off-by-one"},
        "padding",
        {"lengths": [5, 7, 4], "key_lengths": [6, 4, 0], "key_starts": [0, 9, 14, 20]},
    ),
    "padded differently": (
        {},
        "causal",
        {
            "lengths": [5, 7, 4],
            "key_lengths": [6, 4, 7],
            "starts": [0, 5, 16, 20],
            "key_starts": [0, 10, 14, 30],
        },
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences(name, path, device, request):
    config, mask_type, layout = PACKED[name]
    tokens, key_tokens = 26, 30  # some belong to no sequence
    case = Case(config, mask_type, queries=tokens, keys=key_tokens, key_heads=2)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if device == "cpu" else {"rtol": 3e-2, "atol": 3e-2}
    core = build(case, device, dtype)
    tensors, _, _ = make_inputs(case, device, dtype)
    query, key, value = (tensor[:, 0] for tensor in tensors)
    wrt = [*tensors, *core.parameters()]
    if name == "no sequence":
        output = core(query, key, value, None, packed_seq_params=packed(**layout))
        assert torch.equal(output, torch.zeros_like(output))
        core(query, key, value, None, packed_seq_params=packed([3]))  # for `path`
        return
    output = core(query, key, value, None, packed_seq_params=packed(**layout))

    expected = torch.zeros(tokens, HEADS * HEAD_DIM, dtype=torch.float64, device=device)
    begin = key_begin = 0
    for i, length in enumerate(layout["lengths"]):
        key_length = layout.get("key_lengths", layout["lengths"])[i]
        if "starts" in layout:
            begin = key_begin = layout["starts"][i]
        if "key_starts" in layout:
            key_begin = layout["key_starts"][i]
        alone = expected_attention(
            query[begin : begin + length, None],
            key[key_begin : key_begin + key_length, None],
            value[key_begin : key_begin + key_length, None],
            scale=HEAD_DIM**-0.5,
            causal="causal" in mask_type,
            window=config.get("window_size"),
            offset=expected_offset(core),
        )
        place = torch.arange(begin, begin + length, device=device)
        expected = expected.index_copy(0, place, alone[:, 0])
        begin, key_begin = begin + length, key_begin + key_length
    assert_same(output, expected, wrt, tolerance)


def test_packed_sequences_on_a_cpu(monkeypatch):
    """One after the other, each by torch's own attention."""
    calls = record_calls(monkeypatch, "attention")
    core = build(Case(key_heads=2), dtype=torch.float64)
    query = torch.randn(12, HEADS, HEAD_DIM, dtype=torch.float64)
    key, value = torch.randn(2, 12, 2, HEAD_DIM, dtype=torch.float64)
    given = packed([5, 0, 4])
    output = core(query, key, value, None, packed_seq_params=given)
    assert len(calls) == 2
    expected = megasoftmax.attention_varlen(
        query, key, value, given.cu_seqlens_q, causal=True, fused=False
    )
    torch.testing.assert_close(output, expected.flatten(1))


def test_packed_sequences_that_drop_nearly_all_are_not_fused(monkeypatch):
    asked = []
    monkeypatch.setattr(core_attention, "runs_fused", lambda *given: asked.append(given[-1]))
    core = build(Case({"attention_dropout": 0.99}))
    tensor = torch.randn(6, HEADS, HEAD_DIM)
    for is_training in (True, False):
        core.train(is_training)(tensor, tensor, tensor, None, packed_seq_params=packed([6]))
    assert [options.dropout for options in asked] == [0.99, 0.0]


def test_packed_sequences_have_the_type_of_autocast(device):
    core = build(Case(), device)
    tensor = torch.randn(8, HEADS, HEAD_DIM, device=device)
    with torch.autocast(device, torch.bfloat16):
        output = core(tensor, tensor, tensor, None, packed_seq_params=packed([3, 4]))
    assert output.dtype == torch.bfloat16


def test_dropout_of_packed_sequences(path):
    """Fused it is that of attention_varlen; else each sequence has a seed of its own."""
    core = build(Case({"attention_dropout": 0.5}))
    one = torch.randn(6, HEADS, HEAD_DIM, dtype=torch.float64)
    tensor = torch.cat([one, one])
    torch.manual_seed(5)
    output = core(tensor, tensor, tensor, None, packed_seq_params=packed([6, 6]))
    torch.manual_seed(5)
    again = core(tensor, tensor, tensor, None, packed_seq_params=packed([6, 6]))
    assert torch.equal(output, again)
    first, second = output.chunk(2)
    assert not torch.equal(first, second)
    if path == "attention":
        torch.manual_seed(5)
        expected = megasoftmax.attention_varlen(
            *(tensor, tensor, tensor, packed([6, 6]).cu_seqlens_q),
            causal=True,
            dropout=0.5,
            seed=new_seed(torch.device("cpu")),
        )
        assert torch.equal(output, expected.flatten(1))
    first, second = core.eval()(
        tensor, tensor, tensor, None, packed_seq_params=packed([6, 6])
    ).chunk(2)
    torch.testing.assert_close(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "padded"])
def test_packed_sequences_stay_on_the_device(name):
    """Fused, nothing waits for the GPU, forward or backward."""
    config, mask_type, layout = PACKED[name]
    case = Case(config, mask_type, queries=26, keys=26, key_heads=2)
    core = build(case, "cuda", torch.bfloat16)
    tensors, _, _ = make_inputs(case, "cuda", torch.bfloat16)
    query, key, value = (tensor[:, 0] for tensor in tensors)
    given = packed(**layout)
    for field, tensor in vars(given).items():
        if isinstance(tensor, torch.Tensor):
            setattr(given, field, tensor.cuda())

    def step():
        output = core(query, key, value, None, packed_seq_params=given)
        return torch.autograd.grad(output, tensors, torch.ones_like(output))

    step()  # compiles and loads
    with op_checks.without_synchronisation():
        step()


# Padding

PADDED = [4, LENGTH]  # tokens of each sequence of the batch


def padding_mask(shape, side):
    """True = excluded: keys that are padding, or pairs of which one is, as BERT's are."""
    position = torch.arange(LENGTH) if side == "right" else LENGTH - 1 - torch.arange(LENGTH)
    keep = position < torch.tensor(PADDED)[:, None]
    if shape == "b11s":
        return keep, ~keep[:, None, None]
    return keep, ~(keep[:, None, :, None] & keep[:, None, None])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("causal", "packed"), ("windows in some layers", "packed")),
        *(
            ("grouped keys, window", (shape, side))
            for shape in ("b11s", "b1ss")
            for side in ("left", "right")
        ),
    ],
)
def test_sequences_in_a_model(model, layout, path):
    """Packed or padded, tokens have the logits that they have alone, and gradients add up."""
    ids, labels = make_batch()
    options = {"num_query_groups": 2, "window_size": (3, 0)}
    if layout == "packed":
        options = {"softmax_type": "learnable", "num_query_groups": 2} | MODELS[model]
        lengths = [6, 0, 1, 5]
        ids, labels = ids[:1, : sum(lengths)], labels[:1, : sum(lengths)]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        keep, mask = torch.ones_like(ids, dtype=torch.bool), None
        given = {"packed_seq_params": packed(lengths)}
        pieces = ids[0].split([length for length in lengths if length > 0])
    else:
        keep, mask = padding_mask(*layout)
        positions, given = (keep.cumsum(1) - 1).clamp(min=0), {}
        pieces = [one[kept] for one, kept in zip(ids, keep, strict=True)]
    model = gpt(MegasoftmaxCoreAttention, **options).double()
    logits = model(ids, positions, mask, **given)[keep][None]
    actual = gradients_of(model, logits, labels[keep])
    alone = torch.cat([model(p[None], torch.arange(len(p))[None], None) for p in pieces], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-9, atol=1e-9)
    wanted = gradients_of(model, alone, labels[keep])
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


def test_a_refilled_mask_is_seen(monkeypatch):
    """Layers keep nothing on it, which would not see a change that leaves no trace."""
    monkeypatch.setattr(core_attention, "takes_attention", lambda *tensors: True)
    calls = record_calls(monkeypatch, "attention")
    model = gpt(MegasoftmaxCoreAttention)
    ids, _ = make_batch()
    _, mask = padding_mask("b11s", "right")
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    with torch.no_grad():
        before = model(ids, positions, mask)
        mask.data[0, ..., 2] = True
        changed = model(ids, positions, mask)
        wanted = model(ids, positions, mask.clone())
    assert all(options["mask"].tensor is mask for _, options in calls[:-2])  # no copy
    assert not torch.allclose(before, changed)
    torch.testing.assert_close(changed, wanted, rtol=0, atol=0)


# Refusals


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"context_parallel_size": 2},
            r"pg_collection\.cp: expected a group of config\.context_parallel_size 2 ranks, got 1",
        ),
        ({"qk_clip": True}, r"config\.qk_clip: expected False .*got True"),
        ({"log_max_attention_logit": True}, r"config\.log_max_attention_logit: expected False"),
        ({"batch_invariant_mode": True}, r"config\.batch_invariant_mode: expected False"),
        ({"softmax_type": "odd"}, r"config\.softmax_type: expected 'vanilla', .* got 'odd'"),
    ],
)
def test_config_is_refused(option, message):
    config = make_config()
    vars(config).update(option)
    with pytest.raises(ValueError, match=message):
        MegasoftmaxCoreAttention(config, 1, AttnMaskType.causal, "self")


def test_other_context_parallelism_is_refused():
    config = make_config(context_parallel_size=2)
    for kind in ("a2a", "all_gather"):
        with pytest.raises(ValueError, match=rf"cp_comm_type: expected None or 'p2p' .*{kind!r}"):
            MegasoftmaxCoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=kind)


def test_why_not_fused():
    tensors, mask, bias = make_inputs(CASES["bias of batches"], "cpu", torch.float32)
    core = build(CASES["bias of batches"], dtype=torch.float32)
    core.attention_dropout.p = 0.99
    state = torch.get_rng_state()
    given = megasoftmax.why_not_fused(core, *tensors, mask, attention_bias=bias)
    flat = [tensor[:, 0] for tensor in tensors]
    in_sequences = megasoftmax.why_not_fused(core, *flat, None, packed_seq_params=packed([4, 5]))
    assert torch.equal(torch.get_rng_state(), state)
    assert given == in_sequences
    found = {reason.constraint for reason in given}
    assert {"device", "dropout"} <= found
    core.eval()
    with torch.autocast("cpu", torch.bfloat16):
        found = {reason.constraint for reason in core.why_not_fused(*tensors, mask)}
    assert "device" in found
    assert "dropout" not in found
    with pytest.raises(TypeError, match="mask: expected a bool tensor"):
        core.why_not_fused(*tensors, mask.float())


PACKED_45 = {
    "qkv_format": ("sbhd", "expected qkv_format 'thd', got 'sbhd'"),
    "local_cp_size": (2, "expected no context parallelism"),
    "cu_seqlens_q": (None, "expected cu_seqlens_q, got None"),
    "cu_seqlens_kv": (None, "expected cu_seqlens_kv, got None"),
    "cu_seqlens_kv ": ([0, 9], "as many sequences of keys as of queries, 2, got 1"),
    "cu_seqlens_kv_padded": (
        [0, 9],
        r"expected cu_seqlens_kv_padded of shape \(3,\), as cu_seqlens_kv, got \(2,\)",
    ),
    "cu_seqlens_q ": (
        [0, 4, 10],
        r"cu_seqlens_q: expected offsets that .* end at 9 at most, got \[0, 4, 10\]",
    ),
    "cu_seqlens_q  ": ([0, 5, 4], "cu_seqlens_q: .* do not decrease"),
    "cu_seqlens_kv_padded ": ([0, 3, 9], "cu_seqlens_kv: .* do not decrease"),
    "cu_seqlens_q   ": ([0.0, 4, 9], r"cu_seqlens_q: .* int32 or int64"),
}
ZEROS = torch.zeros(9, 9)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ("...", {"attention_mask": ZEROS}, r"attention_mask: expected a bool .*got torch\.float32"),
        ("...", {"attention_mask": (ZEROS, ZEROS)}, "attention_mask: expected a bool .*got tuple"),
        ("0.0", {"change": {}}, r"key: expected \[tokens, heads, dim\] beside packed_seq"),
        (
            *("000", {"change": {}, "attention_mask": ZEROS.bool()}),
            "attention_mask: expected None beside packed_seq_params",
        ),
        (
            *("000", {"change": {}, "attention_bias": ZEROS}),
            "attention_bias: expected None beside packed_seq_params",
        ),
        *(
            ("000", {"change": {name.strip(): value}}, f"packed_seq_params.*{message}")
            for name, (value, message) in PACKED_45.items()
        ),
    ],
)
def test_call_is_refused(shapes, options, message):
    """Query, key and value are cut out of a batch where the shape says 0."""
    tensors, _, _ = make_inputs(Case(), "cpu", torch.float64)
    tensors = [t[:, 0] if shape == "0" else t for t, shape in zip(tensors, shapes, strict=True)]
    given = {"attention_mask": None} | options
    if "change" in given:
        given["packed_seq_params"] = packed([4, 5])
        for name, value in given.pop("change").items():
            value = torch.tensor(value) if isinstance(value, list) else value
            setattr(given["packed_seq_params"], name, value)
    with pytest.raises((TypeError, ValueError), match=message):
        build(Case())(*tensors, **given)


# The offset


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_of_off_by_one_is_that_of_megatron(stock, dtype):
    """Zeros that no checkpoint has, and that go where the layer goes."""
    config = make_config(softmax_type="off-by-one", params_dtype=dtype)
    core = MegasoftmaxCoreAttention(config, 1, AttnMaskType.causal, "self")
    theirs = stock(softmax_type="off-by-one", params_dtype=dtype)
    torch.testing.assert_close(core.softmax_offset, theirs.softmax_offset.cpu(), rtol=0, atol=0)
    assert core.softmax_offset.reshape(1, -1, 1).shape == (1, HEADS, 1)
    assert dict(core.state_dict()) == dict(theirs.state_dict()) == {}
    assert core.sharded_state_dict() == {}
    assert list(core.parameters()) == []
    assert core.to("meta").softmax_offset.is_meta


def test_offset_starts_as_the_config_says():
    def offset(**options):
        torch.manual_seed(3)
        config = make_config(softmax_type="learnable", **options)
        return MegasoftmaxCoreAttention(config, 1, AttnMaskType.causal, "self").softmax_offset

    torch.manual_seed(3)
    expected = torch.empty(HEADS).normal_(std=0.3)
    assert torch.equal(offset(), expected)
    assert offset().tensor_model_parallel
    assert offset(params_dtype=torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(offset(init_method=torch.nn.init.ones_), torch.ones(HEADS))


def test_sharded_state_dict():
    model = gpt(MegasoftmaxCoreAttention, softmax_type="learnable")
    (name,) = (
        name for name, _ in model.named_parameters() if "layers.1" in name and "offset" in name
    )
    shard = model.sharded_state_dict()[name]
    assert shard.key == "decoder.layers.self_attention.core_attention.softmax_offset"
    assert shard.data is model.get_parameter(name)
    assert shard.global_shape == (2, HEADS)  # layers, heads
    assert shard.global_offset == (1, 0)
    plain = gpt(MegasoftmaxCoreAttention)
    assert not any("core_attention" in name for name in plain.sharded_state_dict())


# Whole models


def gpt(core_attention, device="cpu", **options):
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    torch.manual_seed(0)
    model = GPTModel(
        config=make_config(**options),
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )
    return model.to(device).train()


def make_batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gradients_by_name(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients_of(model, logits, labels):
    model.zero_grad()
    loss_of(logits, labels).backward()
    return gradients_by_name(model)


def train(model, mask=None, steps=4):
    """Losses, the first gradients, and the parameters in the end."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = torch.arange(LENGTH, device=device).expand(BATCH, -1)
    losses, first = [], None
    for step in range(steps):
        ids, labels = (tensor.to(device) for tensor in make_batch(step))
        loss = loss_of(model(ids, positions, mask).double(), labels)
        model.zero_grad()
        loss.backward()
        if first is None:
            first = {name: one.grad.double() for name, one in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, {name: one.detach() for name, one in model.named_parameters()}


MODELS = {
    "causal": {},
    "grouped keys, learnable offset": {"num_query_groups": 2, "softmax_type": "learnable"},
    "windows in some layers": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "layer scaling": {"apply_query_key_layer_scaling": True},
}


def build_pair(device="cpu", dtype=torch.float64, **options):
    ours = gpt(MegasoftmaxCoreAttention, device, **options).to(dtype)
    plain = gpt(PlainAttention, device, **options).to(dtype)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, masked, path):
    """float64: losses, all gradients, and parameters after some steps."""
    mask = None
    if masked:  # a document ends within each sequence, at another place
        document = torch.arange(LENGTH) >= torch.tensor([[4], [7]])
        mask = (document[:, None] != document[..., None])[:, None]
    ours, plain = build_pair(**MODELS[name])
    torch.testing.assert_close(train(ours, mask), train(plain, mask), rtol=1e-7, atol=1e-9)


def test_training_in_float32(path):
    ours, plain = build_pair(dtype=torch.float32, **MODELS["grouped keys, learnable offset"])
    expected = train(plain.double())
    actual = train(ours)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_training_fused(name, monkeypatch):
    calls = record_calls(monkeypatch, "attention")
    options = {"bf16": True, "params_dtype": torch.bfloat16} | MODELS[name]
    ours, plain = build_pair("cuda", torch.bfloat16, **options)
    tensors = torch.randn(3, 2, 4, 9, 8, device="cuda").bfloat16()
    assert core_attention.takes_attention(*tensors, AttentionOptions())
    losses, _, _ = train(ours)
    expected, _, _ = train(plain)
    assert len(calls) == 8
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_recomputed_dropout():
    """Selective recomputation draws the same dropout again."""
    options = {"attention_dropout": 0.4, "num_query_groups": 2}
    recompute = {"recompute_granularity": "selective"}
    found = []
    for model in (
        gpt(MegasoftmaxCoreAttention, "cuda", **options),
        gpt(MegasoftmaxCoreAttention, "cuda", **options, **recompute),
    ):
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        found.append(train(model, steps=2))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


# Two ranks, that share the heads or a sequence

SHARDED = {"num_query_groups": 2, "softmax_type": "learnable", "window_size": (4, 0)}


def one_step(model):
    """Of the model's own loss, which knows shards of the vocabulary."""
    ids, labels = make_batch()
    losses = model(ids, torch.arange(LENGTH).expand(BATCH, -1), None, labels=labels)
    losses.mean().backward()
    return {"losses": losses.detach()} | gradients_by_name(model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found that share the heads, and then a sequence."""
    return processes.spawn(run_rank, 2, "cpu", tmp_path_factory.mktemp("ranks"), ops_on_cpus=False)


def run_rank(rank, world, device, folder):
    found = {}
    for size, run in (
        ("tensor_model_parallel_size", with_some_heads),
        ("context_parallel_size", with_a_part),
    ):
        parallel_state.initialize_model_parallel(**{size: world})
        found[size] = run()
        parallel_state.destroy_model_parallel()
    return found


def with_some_heads():
    model = gpt(MegasoftmaxCoreAttention, tensor_model_parallel_size=2, **SHARDED)
    found = one_step(model)
    core = model.decoder.layers[1].self_attention.core_attention
    found["offset"] = core.softmax_offset.detach()
    shard = core.sharded_state_dict()["softmax_offset"]
    return found | {"shard": (shard.global_shape, shard.global_offset, shard.replica_id)}


def test_two_ranks_agree_with_one(ranks):
    ranks = [rank["tensor_model_parallel_size"] for rank in ranks]
    model = gpt(MegasoftmaxCoreAttention, **SHARDED)
    expected = one_step(model)
    core = model.decoder.layers[1].self_attention.core_attention
    assert [rank["shard"] for rank in ranks] == [
        ((HEADS,), (0,), (0, 0, 0)),
        ((HEADS,), (2,), (0, 0, 0)),
    ]
    assert torch.equal(torch.cat([rank["offset"] for rank in ranks]), core.softmax_offset)
    sharded = dict(model.named_parameters())
    for name, wanted in expected.items():
        both = [rank[name] for rank in ranks]
        dim = getattr(sharded.get(name), "partition_dim", None)
        torch.testing.assert_close(both[0] if dim is None else torch.cat(both, dim), wanted)


IN_A_RING = {
    "grouped, window": ({"num_query_groups": 2, "window_size": (4, 0)}, False),
    "offset, comm type": ({"softmax_type": "learnable", "cp_comm_type": "p2p"}, False),
    "mask": ({}, True),
}


def step_in_a_ring(model, masked, cut=lambda batch: batch):
    """Losses of each token, and the gradients of their sum."""
    ids, labels = make_batch()
    batch = {"ids": ids, "labels": labels, "positions": torch.arange(LENGTH).expand(BATCH, -1)}
    if masked:  # [batch, 1, queries, keys]
        keys = padding_mask("b11s", "right")[1]
        batch["attention_mask"] = keys.expand(-1, -1, LENGTH, -1).contiguous()
    batch = cut({name: tensor.contiguous() for name, tensor in batch.items()})
    mask = batch.get("attention_mask")
    losses = model(batch["ids"], batch["positions"], mask, labels=batch["labels"])
    losses.sum().backward()
    return {"losses": losses.detach()} | gradients_by_name(model)


def with_a_part():
    found = {}
    for name, (options, masked) in IN_A_RING.items():
        model = gpt(MegasoftmaxCoreAttention, context_parallel_size=2, **options).double()
        found[name] = step_in_a_ring(model, masked, get_batch_on_this_cp_rank)
    core = model.decoder.layers[0].self_attention.core_attention
    tensors, _, _ = make_inputs(Case(), "cpu", torch.float64)
    mask = torch.zeros(1, 1, 9, 18, dtype=torch.bool)  # keys of the whole sequence
    found["reasons"] = [each.constraint for each in core.why_not_fused(*tensors, mask)]
    with pytest.raises(ValueError, match=r"packed_seq_params: expected None .* document"):
        core(*(tensor[:, 0] for tensor in tensors), None, packed_seq_params=packed([4, 5]))
    return found


def test_ranks_that_share_a_sequence_agree_with_one(ranks):
    ranks = [rank["context_parallel_size"] for rank in ranks]
    for name, (options, masked) in IN_A_RING.items():
        expected = step_in_a_ring(gpt(MegasoftmaxCoreAttention, **options).double(), masked)
        for what, wanted in expected.items():
            both = [rank[name][what] for rank in ranks]
            actual = megasoftmax.zigzag_cat(both, 1) if what == "losses" else sum(both)
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9, msg=f"{name}: {what}")
    assert all("device" in rank["reasons"] for rank in ranks)


# Megatron's own layer, with our softmax


@pytest.fixture
def stock(monkeypatch):
    """Builds DotProductAttention, which here runs on a CPU as well."""
    if not torch.cuda.is_available():

        class Buffer:
            def get_tensor(self, shape, dtype, name):
                return torch.empty(shape, dtype=dtype)

        buffers = SimpleNamespace(get_global_memory_buffer=Buffer)
        trackers = SimpleNamespace(
            get_cuda_rng_tracker=lambda: SimpleNamespace(fork=contextlib.nullcontext)
        )
        monkeypatch.setattr(dot_product_attention, "parallel_state", buffers)
        monkeypatch.setattr(dot_product_attention, "tensor_parallel", trackers)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")

    def make(layer=1, mask_type="causal", **options):
        config = make_config(**options)
        return DotProductAttention(config, layer, AttnMaskType[mask_type], "self")

    return make


@pytest.fixture
def home():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("fusion", [False, True])
@pytest.mark.parametrize("name", ["causal", "padding", "arbitrary", "off by one", "layer scaling"])
def test_softmax_of_megatrons_layer(name, fusion, stock, home):
    case = CASES[name]._replace(bias=None)
    if case.mask_type == "causal":
        case = case._replace(mask=None)  # Megatron would let it take the place of causality
    tensors, mask, _ = make_inputs(case, home, torch.float32)
    options = case.config | {"masked_softmax_fusion": fusion}
    with apply_megasoftmax_to_megatron(router=False):
        layer = stock(case.layer, case.mask_type, **options)
    assert isinstance(layer.scale_mask_softmax, megasoftmax.FusedScaleMaskSoftmax)
    assert layer.scale_mask_softmax.scaled_masked_softmax_fusion == fusion
    if home == "cpu" and mask is None:
        mask = torch.ones(9, 9, dtype=torch.bool).triu(1)  # Megatron would make it on a GPU
    elif mask is not None:
        mask[..., 1] = False  # every query sees a key
    stock_layer = stock(case.layer, case.mask_type, **options)
    assert type(stock_layer.scale_mask_softmax) is fused_softmax.FusedScaleMaskSoftmax
    actual, expected = layer(*tensors, mask), stock_layer(*tensors, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(actual.square().sum(), tensors)
    wanted = torch.autograd.grad(expected.square().sum(), tensors)
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "padding", "window", "off by one", "layer scaling"])
def test_fused_softmax_of_megatrons_layer(name, stock):
    case = CASES[name]._replace(bias=None)
    tensors, mask, _ = make_inputs(case, "cuda", torch.bfloat16)
    with apply_megasoftmax_to_megatron():
        layer = stock(
            case.layer, case.mask_type, bf16=True, masked_softmax_fusion=True, **case.config
        )
    scores = torch.zeros(BATCH, HEADS, 9, 9, dtype=torch.bfloat16, device="cuda")
    assert not layer.scale_mask_softmax.why_not_fused(scores, mask)
    expected = expected_attention(
        *tensors,
        scale=HEAD_DIM**-0.5,
        causal="causal" in case.mask_type,
        window=case.window,
        mask=mask,
        offset=layer.softmax_offset,
    )
    torch.testing.assert_close(layer(*tensors, mask).double(), expected, rtol=3e-2, atol=3e-2)


def bound():
    return (
        dot_product_attention.FusedScaleMaskSoftmax,
        fused_softmax.FusedScaleMaskSoftmax,
        moe_router.topk_routing_with_score_function,
        moe_utils.topk_routing_with_score_function,
    )


def test_apply_and_undo():
    before = bound()
    applied = apply_megasoftmax_to_megatron()
    during = bound()
    assert all(issubclass(ours, megasoftmax.FusedScaleMaskSoftmax) for ours in during[:2])
    assert all(ours is not theirs for ours, theirs in zip(during, before, strict=True))
    assert len(applied.names) == 4

    again = apply_megasoftmax_to_megatron()
    assert again.names == ()
    assert bound() == during
    again.undo()
    assert bound() == during

    applied.undo()
    assert bound() == before
    applied.undo()
    assert bound() == before

    for options, changed in (({"softmax": False}, before[:2]), ({"router": False}, before[2:])):
        with apply_megasoftmax_to_megatron(**options):
            assert changed == (bound()[:2] if options == {"softmax": False} else bound()[2:])
            assert bound() != before
        assert bound() == before


def test_report_says_what_layers_run():
    gc.collect()  # layers of other tests
    applied = apply_megasoftmax_to_megatron()
    assert applied.report == {
        "FusedScaleMaskSoftmax": Served("softmax"),
        "topk_routing_with_score_function": Served("router", ROUTED_WHERE),
    }
    assert apply_megasoftmax_to_megatron(router=False).report == applied.report
    applied.undo()
    assert set(applied.report.values()) == {Served("unchanged", "undone")}
    with apply_megasoftmax_to_megatron(router=False) as applied:
        assert str(applied) == (
            "FusedScaleMaskSoftmax (1): softmax\n"
            "topk_routing_with_score_function (1): unchanged: router=False"
        )


def test_report_tells_when_layers_were_built(stock, home):
    gc.collect()  # layers of other tests
    before = stock(masked_softmax_fusion=True)
    with apply_megasoftmax_to_megatron() as applied:
        during = stock(masked_softmax_fusion=True)
        name = "FusedScaleMaskSoftmax of 1 of 2 layers, built before"
        assert applied.report["FusedScaleMaskSoftmax"] == Served("softmax")
        assert applied.report[name].runs == "unchanged"
        assert len(applied.report) == 3
    assert applied.report["FusedScaleMaskSoftmax"] == Served("unchanged", "undone")
    assert applied.report[name].runs == "softmax"
    assert len(applied.report) == 3
    for layer, runs in ((before, False), (during, True)):
        assert isinstance(layer.scale_mask_softmax, megasoftmax.FusedScaleMaskSoftmax) == runs
    with apply_megasoftmax_to_megatron(softmax=False) as applied:
        assert applied.report["FusedScaleMaskSoftmax"] == Served("unchanged", "softmax=False")
        assert applied.report[name].runs == "softmax"


def test_layer_without_fusion_is_warned_of_and_reported(stock):
    gc.collect()  # layers of other tests
    with apply_megasoftmax_to_megatron() as applied:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="apply_megasoftmax_to_megatron")
            fused = stock(masked_softmax_fusion=True)
        with pytest.warns(RuntimeWarning, match="TransformerConfig\\(masked_softmax_fusion=True"):
            unfused = stock(masked_softmax_fusion=False)
        assert fused is not unfused
        name = "FusedScaleMaskSoftmax of 1 of 2 layers"
        assert applied.report[name].runs == "unchanged"
        assert "masked_softmax_fusion is False" in applied.report[name].why
        assert f"{name} (1): unchanged: " in str(applied)


# Routers


def routing(logits, *arguments, **options):
    """Probabilities, map and the gradient of the logits."""
    logits = logits.clone().requires_grad_()
    probabilities, routing_map = moe_router.topk_routing_with_score_function(
        logits, *arguments, **options
    )
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).view_as(logits)
    (gradient,) = torch.autograd.grad((probabilities.float() * weights).sum(), logits)
    return probabilities, routing_map, gradient


def both_routings(monkeypatch, *arguments, calls=1, **options):
    """Ours, by that many calls of softmax_topk, and Megatron's."""
    recorded = record_calls(monkeypatch, "softmax_topk")
    expected = routing(*arguments, **options)
    assert not recorded
    with apply_megasoftmax_to_megatron():
        actual = routing(*arguments, **options)
    assert len(recorded) == calls
    return actual, expected


def distinct_logits(device, dtype):
    """No equals, in bfloat16 neither: which of them is chosen is open."""
    return torch.stack([torch.randperm(8) for _ in range(33)]).to(device, dtype) / 4


def tolerance_of(dtype):
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 1e-2)
    return {"rtol": rtol, "atol": atol}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_routing(k, pre_softmax, scaling, dtype, in_order, device, monkeypatch):
    options = {"use_pre_softmax": pre_softmax, "scaling_factor": scaling}
    with deterministic(in_order):
        logits = distinct_logits(device, dtype)
        actual, expected = both_routings(monkeypatch, logits, k, **options)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual, expected, **tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_routing_by_sigmoids(k, has_bias, scaling, dtype, device, monkeypatch):
    options = {"score_function": "sigmoid", "scaling_factor": scaling}
    if has_bias:
        options["expert_bias"] = torch.linspace(0, 1, 8, device=device)
    logits = distinct_logits(device, dtype)
    actual, expected = both_routings(monkeypatch, logits, k, **options)
    # Megatron rounds sigmoids of bfloat16 before it chooses by them.
    same = (actual[1] == expected[1]).all(-1)
    assert same.float().mean() > (0.8 if dtype == torch.bfloat16 else 0.99)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours[same], theirs[same], **tolerance_of(dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
        {"num_groups": 4, "group_topk": 2},
        {"expert_bias": torch.linspace(0, 1, 8)},
        {"router_replay": SimpleNamespace(get_replay_topk=lambda *args: torch.topk(-args[0], 2))},
        {"dtype": torch.float64},
    ],
    ids=lambda options: "-".join(options),
)
def test_other_routing_is_megatrons(options, monkeypatch):
    logits = torch.randn(33, 8, dtype=options.pop("dtype", torch.float32))
    actual, expected = both_routings(monkeypatch, logits, 2, calls=0, **options)
    op_checks.assert_all_equal(actual, expected)


def test_errors_of_routing_are_megatrons():
    with apply_megasoftmax_to_megatron():
        with pytest.raises(ValueError, match="Invalid score_function: odd"):
            routing(torch.randn(3, 8), 2, score_function="odd")
        with pytest.raises(ValueError, match="fused_topk_with_score_function is not available"):
            routing(torch.randn(3, 8), 2, fused=True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'odd'"):
            routing(torch.randn(3, 8), 2, odd=1)


def test_router_module(stock, home, monkeypatch):
    """Megatron's router, after its linear layer, which needs TransformerEngine."""
    config = make_config(num_moe_experts=8, moe_router_topk=2, moe_router_pre_softmax=True)
    router = moe_router.TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    logits = torch.randn(5, 3, 8, device=home, requires_grad=True)

    def step():
        probabilities, routing_map = router.routing(logits)
        loss = (probabilities * torch.arange(8, device=home)).square().sum()
        return probabilities, routing_map, torch.autograd.grad(loss, logits)

    calls = record_calls(monkeypatch, "softmax_topk")
    expected = step()
    with apply_megasoftmax_to_megatron():
        actual = step()
    assert [options["renormalize"] for _, options in calls] == [False]
    torch.testing.assert_close(actual, expected)


# Extensions by their names


def megatrons(name, scores, mask, scale):
    """What Megatron's autograd function of that extension makes of scores."""
    if name == "scaled_upper_triang_masked_softmax_cuda":
        return fused_softmax.ScaledUpperTriangMaskedSoftmax.apply(scores, scale)
    if name == "scaled_masked_softmax_cuda":
        return fused_softmax.ScaledMaskedSoftmax.apply(scores, mask, scale)
    return fused_softmax.ScaledSoftmax.apply(scores, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_extension_modules(name, dtype, device):
    causal, masked = "triang" in name, "_masked_softmax" in name and "triang" not in name
    shape = (6, 7, 7) if causal else (2, 3, 7, 11)
    scores = torch.randn(shape, device=device).to(dtype).requires_grad_()
    mask = None
    exact = scores.double() * 0.25
    if causal:
        exact = exact.masked_fill(torch.ones(7, 7, device=device).triu(1).bool(), -math.inf)
    elif masked:
        mask = torch.rand(2, 1, 7, 11, device=device) < 0.4
        mask[..., 5] = False
        exact = exact.masked_fill(mask, -math.inf)
    expected = exact.softmax(-1)
    gradient = torch.randn(shape, device=device).to(dtype)
    before = gradient.clone()
    with install_extension_modules():
        if masked:
            as_bytes = sys.modules[name].forward(scores.detach(), mask.byte(), 0.25)
        actual = megatrons(name, scores, mask, 0.25)
        actual.backward(gradient)
        # Megatron's own call may hand over gradients of any strides.
        strided = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        again = sys.modules[name].backward(strided, actual.detach(), torch.tensor(0.25))
    (wanted,) = torch.autograd.grad(expected, scores, gradient.double())
    torch.testing.assert_close(actual.double(), expected, **tolerance_of(dtype))
    torch.testing.assert_close(scores.grad, wanted, **tolerance_of(dtype))
    torch.testing.assert_close(again, scores.grad)
    assert torch.equal(gradient, before)
    assert torch.equal(strided, before)
    if masked:
        assert torch.equal(as_bytes, actual)


@pytest.mark.parametrize("mask_type", ["causal", "padding", "no_mask"])
def test_megatrons_softmax_finds_the_extensions(mask_type, device):
    """Where its conditions hold, the class of Megatron takes them; they were not there before."""
    given = (False, True, AttnMaskType[mask_type], True, None, True, 0.5)
    softmax = fused_softmax.FusedScaleMaskSoftmax(*given)
    scores = torch.randn(2, 4, 20, 20, device=device).bfloat16()
    mask = torch.rand(2, 1, 20, 20, device=device) < 0.4 if mask_type == "padding" else None
    if mask is not None:
        mask[0, :, 3] = True
    with pytest.raises(ModuleNotFoundError, match="scaled_masked_softmax_cuda"):
        softmax(scores, mask)
    with install_extension_modules():
        assert softmax.is_kernel_available(mask, 2, 4, 20, 20)
        actual = softmax(scores, mask)
    expected = megasoftmax.softmax(
        scores, scale=0.5, mask=mask, causal=mask_type == "causal", fused=False
    )
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)
    assert actual.dtype == torch.bfloat16


def test_extension_modules_are_put_back(monkeypatch):
    own = ModuleType("scaled_softmax_cuda")
    monkeypatch.setitem(sys.modules, "scaled_softmax_cuda", own)
    installed = install_extension_modules()
    assert set(installed.names) == set(MODULES)
    assert install_extension_modules().names == ()
    assert sys.modules["scaled_masked_softmax_cuda"].get_batch_per_block(7, 9, 3, 5) == 1
    installed.undo()
    assert sys.modules["scaled_softmax_cuda"] is own
    assert "scaled_masked_softmax_cuda" not in sys.modules


def test_softmax_backward_is_refused():
    probabilities = torch.rand(2, 3, 3)
    backward = MODULES["scaled_softmax_cuda"].backward
    with pytest.raises(TypeError, match=r"gradient: expected a tensor of torch\.float32, .*16"):
        backward(probabilities.half(), probabilities, 1.0)
    with pytest.raises(ValueError, match=r"gradient: expected shape \(2, 3, 3\).*got \(3, 3\)"):
        backward(probabilities[0], probabilities, 1.0)
    with pytest.raises(ValueError, match="scale: expected a finite number, got nan"):
        backward(probabilities, probabilities, math.nan)
