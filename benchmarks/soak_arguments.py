"""The family "arguments" of soak.py: calls of all public functions with right and wrong arguments.

A call is right if it returns, or raises a TypeError or ValueError that begins with one of its
arguments, and leaves its tensors as they were. `why_not_fused` must raise the same error, and on a
CPU what it says runs must be what ran. Values are those of no oracle: other families check them.
"""

import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy
import torch
from soak_cases import BFLOAT, FLOAT, HALF, Data, Deviations, Drawn, chance, oracle
from torch import Tensor

import megasoftmax
from megasoftmax import autograd, biases, ranges
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.integrations import flash_attn

Make = Callable[["Call"], Any]


@dataclass(frozen=True)
class Sizes(Drawn):
    """Numbers of a call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def draw(cls, random: Random) -> "Sizes":
        heads = random.choice((1, 2, 4, 4, 0))
        head_dims = (4, 8, 8, 0)
        dim = random.choice(head_dims)
        return cls(
            batch=random.choice((1, 2, 2, 0)),
            heads=heads,
            key_heads=random.choice(
                [n for n in (1, 2, 4, 0) if (heads % n == 0 if n else not heads)]
            ),
            queries=random.choice((1, 3, 5, 5, 0)),
            keys=random.choice((5, 5, 6, 1, 0)),
            dim=dim,
            value_dim=dim if chance(random, 0.7) else random.choice(head_dims),
            dtype=random.choice((FLOAT, FLOAT, HALF, BFLOAT, torch.float64)),
        )


class Call:
    """What the values of a call are made of."""

    def __init__(self, sizes: Sizes, data: Data, random: Random) -> None:
        self.sizes, self.data, self.random = sizes, data, random

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = self.data.normal(shape).to(dtype or self.sizes.dtype)
        return values.requires_grad_(chance(self.random, 0.2))

    def bools(self, *shape: int) -> Tensor:
        return self.data.coin(shape, 0.3)

    def integers(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return (3 * self.data.normal(shape)).to(dtype)

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        sizes = self.sizes
        return sizes.batch, sizes.heads, sizes.queries, sizes.keys

    def broadcast(self, *shape: int) -> tuple[int, ...]:
        """The shape itself, or one that broadcasts or has a divisor of batches or heads."""
        found = [1 if chance(self.random, 0.3) else size for size in shape]
        for dim in range(len(shape[:2])):
            if shape[dim] % 2 == 0 and chance(self.random, 0.1):
                found[dim] = shape[dim] // 2
        return tuple(found[self.random.randrange(len(shape)) if chance(self.random, 0.2) else 0 :])


# Values of arguments. The right ones come first; `ODD` are for any argument.

FLAG: list[Make] = [lambda call: True, lambda call: False]
SCALE: list[Make] = [
    lambda call: 0.5,
    lambda call: 2,
    lambda call: -1.0,
    lambda call: numpy.float32(0.5),
    lambda call: torch.tensor(0.25),
    lambda call: 1e39,
]
WINDOW: list[Make] = [
    lambda call: (2, 0),
    lambda call: [-1, 3],
    lambda call: (numpy.int64(1), 2**63),
    lambda call: (sys_max, 10**30),
]
sys_max = 2**63 - 1
SINK: list[Make] = [
    lambda call: 0.0,
    lambda call: -math.inf,
    lambda call: call.normal(call.sizes.heads),
    lambda call: call.normal(1, dtype=FLOAT),
    lambda call: numpy.int64(1),
    lambda call: -1e39,
]
DROPOUT: list[Make] = [lambda call: 0.0, lambda call: 0.5, lambda call: 1]
SEED: list[Make] = [lambda call: torch.tensor([3], device=call.data.device), lambda call: 42]
DTYPE: list[Make] = [lambda call: FLOAT, lambda call: HALF, lambda call: torch.float64]
FUSED: list[Make] = [lambda call: None, lambda call: False, lambda call: True]
MASK: list[Make] = [lambda call: call.bools(*call.broadcast(*call.pairs))]
ATTENTION_MASK: list[Make] = [
    *MASK,
    lambda call: megasoftmax.TileMask(call.bools(*call.broadcast(*call.pairs))),
    lambda call: megasoftmax.TileMask.from_blocks(
        call.bools(*call.broadcast(*call.pairs[:2]), *(-(-size // 64) for size in call.pairs[2:])),
        64,
    ),
]
BIAS: list[Make] = [
    lambda call: call.normal(*call.broadcast(*call.pairs)),
    lambda call: call.normal(*call.pairs, dtype=FLOAT),
]
TABLE: list[Make] = [
    lambda call: megasoftmax.RelativeBias(
        call.normal(call.sizes.heads, max(call.sizes.queries + call.sizes.keys - 1, 0))
    )
]
LSE: list[Make] = [lambda call: call.normal(*call.pairs[:3], dtype=FLOAT)]
VISIBLE: list[Make] = [
    lambda call: (
        call.integers(*call.broadcast(*call.pairs[:3])),
        call.integers(*call.broadcast(*call.pairs[:3]), dtype=torch.int64),
    ),
    lambda call: [None, call.integers(call.sizes.batch, 1, 1)],
]
SCORES: list[Make] = [lambda call: call.normal(*call.pairs)]
BUCKETS: list[Make] = [lambda call: 8, lambda call: numpy.int16(4), lambda call: 3]
COUNT: list[Make] = [lambda call: call.random.randrange(7), lambda call: numpy.int32(3)]
DIM: list[Make] = [lambda call: call.random.randrange(-5, 5), lambda call: numpy.int64(-1)]
DEVICE: list[Make] = [lambda call: call.data.device, lambda call: torch.device("meta")]
OFFSETS: list[Make] = [
    lambda call: torch.tensor([0, call.sizes.queries], device=call.data.device),
    lambda call: torch.tensor([0, 0], device=call.data.device, dtype=torch.int32),
    lambda call: torch.tensor([0, 2, 1], device=call.data.device),
]
QUERY: list[Make] = [lambda call: call.normal(*call.pairs[:3], call.sizes.dim)]
KEY: list[Make] = [lambda call: call.normal(*_of_keys(call), call.sizes.dim)]
VALUE: list[Make] = [lambda call: call.normal(*_of_keys(call), call.sizes.value_dim)]


def _of_keys(call: Call) -> tuple[int, int, int]:
    return call.sizes.batch, call.sizes.key_heads, call.sizes.keys


def _transposed(make: Make) -> Make:
    """Tokens before heads."""
    return lambda call: make(call).transpose(1, 2)


def _packed(make: Make) -> Make:
    """[tokens, heads, dim], of the first of the batch and as many keys as queries."""

    def made(call: Call) -> Tensor:
        tensor = make(call)
        tokens = call.sizes.queries
        return call.normal(tokens, tensor.shape[1], tensor.shape[3])

    return made


def _side_by_side(make: Make, parts: int) -> Make:
    return lambda call: torch.stack([make(call) for _ in range(parts)], -3)


def _one_process() -> Any:
    """A group of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        return None
    if not distributed.is_initialized():
        with tempfile.NamedTemporaryFile(delete=False) as file:
            store = distributed.FileStore(file.name, 1)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return distributed.group.WORLD


GROUP: list[Make] = [lambda call: _one_process()]


@dataclass(frozen=True)
class Function:
    """What is called, with the values of its arguments."""

    call: Callable[..., Any]
    needed: dict[str, list[Make]]
    options: dict[str, list[Make]]
    reasons: Callable[..., Any] | None = None  # `why_not_fused` of the same arguments

    @property
    def arguments(self) -> dict[str, list[Make]]:
        return self.needed | self.options


def _asked(name: str) -> Callable[..., Any]:
    """Looked up when it is called, so that tests may replace it."""
    return lambda **given: megasoftmax.why_not_fused(getattr(megasoftmax, name), **given)


def _named(name: str) -> Callable[..., Any]:
    return lambda **given: getattr(megasoftmax, name)(**given)


def _module(make: Callable[[], torch.nn.Module], name: str = "forward") -> Callable[..., Any]:
    return lambda **given: getattr(make(), name)(**given)


OF_ROWS = {"scale": SCALE, "mask": MASK, "fused": FUSED, "dtype": DTYPE, "return_lse": FLAG}
OF_PAIRS = {"scale": SCALE, "causal": FLAG, "window": WINDOW, "sink": SINK, "fused": FUSED}
OF_PAIRS |= {"dropout": DROPOUT, "seed": SEED}
QKV = {"query": QUERY, "key": KEY, "value": VALUE}
PACKED = {name: [_packed(make) for make in makes] for name, makes in QKV.items()}
TOKENS_FIRST = {
    name: [_transposed(make) for make in makes]
    for name, makes in (("q", QUERY), ("k", KEY), ("v", VALUE))
}
OF_FLASH = {
    "dropout_p": DROPOUT,
    "softmax_scale": SCALE,
    "causal": FLAG,
    "window_size": WINDOW,
    "softcap": [lambda call: 0.0, lambda call: 10.0],
    "alibi_slopes": [lambda call: call.normal(call.sizes.heads, dtype=FLOAT)],
    "deterministic": [lambda call: False, lambda call: True],
    "return_attn_probs": FLAG,
}
LENGTHS = {"max_seqlen_q": COUNT, "max_seqlen_k": COUNT}
FLASH_PACKED = {
    name: [_packed(make)] for name, make in zip("qkv", (QUERY[0], KEY[0], VALUE[0]), strict=True)
}
KV, QKV_OF_HEADS = (
    [_side_by_side(_transposed(KEY[0]), 2)],
    [_side_by_side(_transposed(QUERY[0]), 3)],
)
LIMITS = {"mask": ATTENTION_MASK, "visible": VISIBLE, "bias": [*BIAS, *TABLE]}
OF_MEGATRON = {
    "input_in_fp16": FLAG,
    "input_in_bf16": FLAG,
    "attn_mask_type": [lambda call: megasoftmax.AttnMaskType.causal, lambda call: "no_mask"],
    "scaled_masked_softmax_fusion": FLAG,
    "mask_func": [lambda call: _fill, lambda call: None],
    "softmax_in_fp32": FLAG,
    "scale": [lambda call: None, *SCALE],
}


class OfMaskError(ValueError):
    """From the user's `mask_func`, of which the module knows nothing."""


def _fill(scores: Tensor, mask: Tensor) -> Tensor:
    """Of a mask of any type."""
    try:
        return scores.masked_fill(mask.bool(), -10000.0)
    except RuntimeError as error:
        raise OfMaskError(f"mask: {error}") from None


def _megatron(fusion: bool) -> torch.nn.Module:
    return megasoftmax.FusedScaleMaskSoftmax(False, False, "causal", fusion, _fill, True, 0.5)


FUSED_ATTENTIONS: dict[str, dict[str, Any]] = {
    "FusedAttention": {"causal": True},
    "FusedAttention with T5": {"relative_buckets": 8},
}


def _fused_attention(given: dict[str, Any], options: dict[str, Any]) -> megasoftmax.FusedAttention:
    """Where the call is, which its first argument tells unless that is odd."""
    query = given["query"]
    on_gpu = isinstance(query, Tensor) and query.is_cuda
    return megasoftmax.FusedAttention(4, **options, device="cuda" if on_gpu else "cpu")


MEGATRONS = {"input": SCORES, "mask": [lambda call: None, *MASK]}

FUNCTIONS = {
    "softmax": Function(
        _named("softmax"),
        {"scores": SCORES},
        OF_ROWS | OF_PAIRS | {"bias": BIAS, "visible": VISIBLE, "dim": DIM},
        _asked("softmax"),
    ),
    "softmax_topk": Function(
        _named("softmax_topk"),
        {"logits": SCORES, "k": COUNT},
        OF_ROWS | {"bias": BIAS, "renormalize": FLAG, "group": [lambda call: None]},
        _asked("softmax_topk"),
    ),
    "softmax_backward": Function(
        softmax_backward,
        {"gradient": SCORES, "probabilities": SCORES},
        {"scale": SCALE, "causal": FLAG, "visible": VISIBLE},
    ),
    "attention": Function(
        _named("attention"), QKV, OF_PAIRS | LIMITS | {"return_lse": FLAG}, _asked("attention")
    ),
    "attention_varlen": Function(
        _named("attention_varlen"),
        PACKED | {"cu_seqlens_q": OFFSETS},
        OF_PAIRS | {"cu_seqlens_k": OFFSETS, "bias": TABLE, "return_lse": FLAG},
        _asked("attention_varlen"),
    ),
    "scaled_dot_product_attention": Function(
        _named("scaled_dot_product_attention"),
        QKV,
        {
            "attn_mask": [*MASK, *BIAS],
            "dropout_p": DROPOUT,
            "is_causal": FLAG,
            "scale": SCALE,
            "enable_gqa": FLAG,
        },
        _asked("scaled_dot_product_attention"),
    ),
    "ring_attention": Function(
        _named("ring_attention"),
        QKV | {"group": GROUP},
        OF_PAIRS
        | LIMITS
        | {
            "mask": MASK,
            "order": [lambda call: "contiguous", lambda call: "zigzag"],
            "lengths": [lambda call: (call.sizes.keys,), lambda call: [numpy.int64(5)]],
        },
    ),
    "RelativeBias": Function(
        megasoftmax.RelativeBias, {"table": [lambda call: call.normal(2, 9)]}, {}
    ),
    "dense": Function(
        lambda table, **given: megasoftmax.RelativeBias(table).dense(**given),
        {"table": [lambda call: call.normal(2, 7)], "queries": COUNT, "keys": COUNT},
        {},
    ),
    "t5_bias": Function(
        biases.t5_bias,
        {
            "weight": [lambda call: call.normal(8, call.sizes.heads)],
            "queries": COUNT,
            "keys": COUNT,
            "bidirectional": FLAG,
        },
        {"max_distance": [lambda call: 16, lambda call: numpy.int64(9)], "offset": COUNT},
    ),
    "alibi_bias": Function(
        biases.alibi_bias,
        {"slopes": [lambda call: call.normal(call.sizes.heads)], "queries": COUNT, "keys": COUNT},
        {"offset": COUNT},
    ),
    "alibi_slopes": Function(biases.alibi_slopes, {"heads": COUNT}, {"device": DEVICE}),
    "ranges.packed": Function(ranges.packed, {"cu_seqlens": OFFSETS, "tokens": COUNT}, {}),
    "ranges.segments": Function(
        ranges.segments, {"ids": [lambda call: call.integers(2, call.sizes.keys)]}, {}
    ),
    "ranges.lengths": Function(ranges.lengths, {"n": [lambda call: call.integers(2)]}, {}),
    "ranges.padding": Function(
        ranges.padding, {"keep": [lambda call: call.bools(2, call.sizes.keys)]}, {}
    ),
    "ranges.chunks": Function(ranges.chunks, {"size": COUNT, "tokens": COUNT}, {"device": DEVICE}),
    "ranges.prefix": Function(
        ranges.prefix, {"n": [lambda call: call.integers(2)], "tokens": COUNT}, {}
    ),
    "TileMask": Function(megasoftmax.TileMask, {"mask": MASK}, {}),
    "TileMask.from_blocks": Function(
        megasoftmax.TileMask.from_blocks,
        {"blocks": MASK, "size": [lambda call: 64, lambda call: numpy.int64(128)]},
        {},
    ),
    "zigzag_chunk": Function(
        megasoftmax.zigzag_chunk, {"tensor": SCORES, "ranks": COUNT, "dim": DIM}, {}
    ),
    "zigzag_cat": Function(
        megasoftmax.zigzag_cat,
        {"tensors": [lambda call: [call.normal(4, 2), call.normal(4, 2)]], "dim": DIM},
        {},
    ),
    "merge_attention": Function(
        megasoftmax.merge_attention,
        {
            "outputs": [lambda call: [call.normal(*call.pairs) for _ in range(2)]],
            "lses": [lambda call: [call.normal(*call.pairs[:3], dtype=FLOAT) for _ in range(2)]],
        },
        {},
    ),
    "FusedAttention()": Function(
        megasoftmax.FusedAttention,
        {"heads": COUNT},
        {
            "scale": SCALE,
            "causal": FLAG,
            "window": WINDOW,
            "sink": FLAG,
            "relative_buckets": BUCKETS,
            "max_distance": [lambda call: 16, *COUNT],
            "alibi_slopes": [lambda call: call.normal(call.sizes.heads)],
            "dropout": DROPOUT,
        },
    ),
    **{
        name: Function(
            lambda options=options, **given: _fused_attention(given, options)(**given),
            QKV,
            LIMITS,
            lambda options=options, **given: _fused_attention(given, options).why_not_fused(
                **given
            ),
        )
        for name, options in FUSED_ATTENTIONS.items()
    },
    "FusedScaleMaskSoftmax()": Function(
        megasoftmax.FusedScaleMaskSoftmax, OF_MEGATRON, {"window_size": WINDOW}
    ),
    **{
        f"FusedScaleMaskSoftmax, fusion {fusion}": Function(
            lambda fusion=fusion, **given: _megatron(fusion)(**given),
            MEGATRONS,
            {"softmax_offset": SINK[2:4]},
            lambda fusion=fusion, **given: _megatron(fusion).why_not_fused(**given),
        )
        for fusion in (True, False)
    },
    "ScaledMaskedSoftmax": Function(
        lambda **given: megasoftmax.ScaledMaskedSoftmax.apply(**given),
        {"inputs": SCORES, "mask": MASK, "scale": SCALE},
        {},
    ),
    "ScaledSoftmax": Function(
        lambda **given: megasoftmax.ScaledSoftmax.apply(**given),
        {"inputs": SCORES, "scale": SCALE},
        {},
    ),
    "ScaledUpperTriangMaskedSoftmax": Function(
        lambda **given: megasoftmax.ScaledUpperTriangMaskedSoftmax.apply(**given),
        {"inputs": [lambda call: call.normal(*call.pairs[1:])], "scale": SCALE},
        {},
    ),
    "SoftmaxOne": Function(
        lambda x, **given: megasoftmax.SoftmaxOne(**given)(x),
        {"x": SCORES},
        {"dim": DIM, "denominator_offset": SINK},
        lambda x, **given: megasoftmax.why_not_fused(megasoftmax.SoftmaxOne(**given), x),
    ),
    "flash_attn_func": Function(flash_attn.flash_attn_func, TOKENS_FIRST, OF_FLASH),
    "flash_attn_varlen_func": Function(
        flash_attn.flash_attn_varlen_func,
        FLASH_PACKED | {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS} | LENGTHS,
        OF_FLASH | {"block_table": [lambda call: None]},
    ),
    "flash_attn_qkvpacked_func": Function(
        flash_attn.flash_attn_qkvpacked_func, {"qkv": QKV_OF_HEADS}, OF_FLASH
    ),
    "flash_attn_kvpacked_func": Function(
        flash_attn.flash_attn_kvpacked_func, {"q": TOKENS_FIRST["q"], "kv": KV}, OF_FLASH
    ),
    "flash_attn_varlen_qkvpacked_func": Function(
        flash_attn.flash_attn_varlen_qkvpacked_func,
        {
            "qkv": [_side_by_side(_packed(QUERY[0]), 3)],
            "cu_seqlens": OFFSETS,
            "max_seqlen": COUNT,
        },
        OF_FLASH,
    ),
    "flash_attn_varlen_kvpacked_func": Function(
        flash_attn.flash_attn_varlen_kvpacked_func,
        {
            "q": FLASH_PACKED["q"],
            "kv": [_side_by_side(_packed(KEY[0]), 2)],
            "cu_seqlens_q": OFFSETS,
            "cu_seqlens_k": OFFSETS,
        }
        | LENGTHS,
        OF_FLASH,
    ),
}


# Mutations


ODD: dict[str, Make] = {
    "None": lambda call: None,
    "True": lambda call: True,
    "1": lambda call: 1,
    "-1": lambda call: -1,
    "0.5": lambda call: 0.5,
    "NaN": lambda call: math.nan,
    "infinity": lambda call: math.inf,
    "2^31 - 1": lambda call: 2**31 - 1,
    "2^63": lambda call: 2**63,
    "10^400": lambda call: 10**400,
    "1e39": lambda call: 1e39,
    "a string": lambda call: "zzz",
    "bytes": lambda call: b"zzz",
    "a complex number": lambda call: 1j,
    "a list": lambda call: [1.0],
    "no elements": lambda call: (),
    "a pair": lambda call: (1, 2),
    "a pair of None": lambda call: (None, None),
    "a triple": lambda call: (1, 2, 3),
    "a pair of strings": lambda call: ("a", "b"),
    "a dict": lambda call: {},
    "an object": lambda call: object(),
    "a class": lambda call: int,
    "numpy.int64": lambda call: numpy.int64(2),
    "numpy.uint64": lambda call: numpy.uint64(2**64 - 1),
    "numpy.bool": lambda call: numpy.bool_(True),
    "numpy.float32": lambda call: numpy.float32(0.5),
    "an array": lambda call: numpy.zeros(3, dtype=numpy.float32),
    "a dtype": lambda call: torch.int64,
    "no dimensions": lambda call: call.data.normal(()),
    "one element": lambda call: call.data.normal((1,)),
    "two elements": lambda call: call.data.normal((2,)),
    "bools": lambda call: call.bools(5),
    "integers": lambda call: call.integers(2, 5),
    "complex": lambda call: call.data.normal((2,)).to(torch.complex64),
    "six dimensions": lambda call: call.data.normal((1,) * 6),
    "a TileMask": lambda call: megasoftmax.TileMask(call.bools(5)),
    "a RelativeBias": lambda call: megasoftmax.RelativeBias(call.data.normal((2, 9))),
}


def _resized(tensor: Tensor, call: Call) -> Tensor:
    """With another size of a dimension."""
    if tensor.dim() == 0:
        return tensor[None]
    dim = call.random.randrange(tensor.dim())
    size = tensor.shape[dim]
    return (
        torch.cat([tensor, tensor], dim)
        if chance(call.random, 0.5)
        else tensor.narrow(dim, 0, max(size - 1, 0))
    )


MUTATIONS: dict[str, Callable[[Tensor, Call], Any]] = {
    "resized": _resized,
    "of one dimension less": lambda tensor, call: tensor.sum(0) if tensor.dim() else tensor,
    "of one dimension more": lambda tensor, call: tensor[None],
    "transposed": lambda tensor, call: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "flattened": lambda tensor, call: tensor.flatten(),
    "detached": lambda tensor, call: tensor.detach(),
    "float64": lambda tensor, call: tensor.double(),
    "float16": lambda tensor, call: tensor.half(),
    "int64": lambda tensor, call: tensor.long(),
    "bool": lambda tensor, call: tensor != 0,
    "complex": lambda tensor, call: tensor.to(torch.complex64),
    "float8": lambda tensor, call: tensor.to(torch.float8_e5m2),
    "sparse": lambda tensor, call: tensor.detach().to_sparse(),
    "sparse rows": lambda tensor, call: tensor.detach().flatten(1).to_sparse_csr(),
    "mkldnn": lambda tensor, call: tensor.detach().float().to_mkldnn(),
    "nested": lambda tensor, call: torch.nested.nested_tensor([*tensor.detach()]),
    "jagged": lambda tensor, call: torch.nested.nested_tensor(
        [*tensor.detach()], layout=torch.jagged
    ),
    "elsewhere": lambda tensor, call: tensor.to("meta"),
    "a list": lambda tensor, call: tensor.tolist(),
    "an array": lambda tensor, call: tensor.detach().float().cpu().numpy(),
    "a Parameter": lambda tensor, call: torch.nn.Parameter(tensor.detach()),
    "not a number": lambda tensor, call: torch.full_like(tensor.detach(), math.nan),
}


@dataclass(frozen=True)
class Arguments(Drawn):
    family = "arguments"

    function: str
    sizes: Sizes
    given: tuple[tuple[str, int | str], ...]
    """Arguments, each with the place of its value in the table, or what is odd about it."""
    seed: int

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Arguments":
        name = random.choice(list(FUNCTIONS))
        function = FUNCTIONS[name]
        options = [*function.options]
        names = [*function.needed, *random.sample(options, min(random.randrange(5), len(options)))]
        odd = random.sample(names, min(random.choice((0, 1, 1, 2)), len(names)))
        given = tuple(
            (each, _draw_value(random, function.arguments[each], each in odd)) for each in names
        )
        return cls(name, Sizes.draw(random), given, random.randrange(2**31))

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        function = FUNCTIONS[self.function]
        call = Call(self.sizes, data, Random(self.seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = {
                name: _made(function.arguments[name], value, call) for name, value in self.given
            }
            _check_call(function, arguments)
        return {"call": oracle.Deviation(0.0, "")}


def _draw_value(random: Random, makes: list[Make], is_odd: bool) -> int | str:
    if is_odd:
        largest = (
            {"2^31 - 1"} if makes in (COUNT, BUCKETS) else set()
        )  # so many tokens take all memory
        return random.choice(
            [*[each for each in ODD if each not in largest], *MUTATIONS, *MUTATIONS]
        )
    return random.randrange(len(makes))


def _made(makes: list[Make], value: int | str, call: Call) -> Any:
    if isinstance(value, int):
        return makes[value](call)
    if value in ODD and (value not in MUTATIONS or chance(call.random, 0.5)):
        return ODD[value](call)
    right = makes[0](call)
    with suppress(Exception):  # what torch itself cannot make of it
        return _mutated(right, MUTATIONS[value], call)
    return right


def _mutated(right: Any, mutate: Callable[[Tensor, Call], Any], call: Call) -> Any:
    if isinstance(right, (tuple, list)):
        return type(right)(_mutated(each, mutate, call) for each in right)
    return mutate(right, call) if isinstance(right, Tensor) else right


# Checks


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, megasoftmax.TileMask):
        yield value.tensor
    elif isinstance(value, megasoftmax.RelativeBias):
        yield value.table
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _bits(tensor: Tensor) -> Any:
    """What a call must leave as it is."""
    state = tensor.dtype, tensor.requires_grad, tensor._version, tensor.layout, tensor.grad
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return state
    values = tensor.detach().cpu()
    if tensor.dtype in (BFLOAT, torch.float8_e5m2):  # which numpy does not have
        values = values.float()
    return *state, tensor.shape, tensor.stride(), values.numpy().tobytes()


@contextmanager
def _noting_sdpa() -> Iterator[list[bool]]:
    """For each time that torch's own attention was tried: whether it computed the call."""
    found: list[bool] = []
    attend = autograd.sdpa.attention

    def noted(*args: Any, **given: Any) -> Tensor | None:
        output = attend(*args, **given)
        found.append(output is not None)
        return output

    autograd.sdpa.attention = noted
    try:
        yield found
    finally:
        autograd.sdpa.attention = attend


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except Exception as error:
        return error


def _check_call(function: Function, arguments: dict[str, Any]) -> None:
    before = [_bits(tensor) for tensor in _tensors([*arguments.values()])]
    with _noting_sdpa() as by_sdpa:
        found = _outcome(function.call, arguments)
    if isinstance(found, Exception):
        _check_error(found, function.arguments)
    after = [_bits(tensor) for tensor in _tensors([*arguments.values()])]
    assert before == after, "a tensor has changed"
    if function.reasons is not None:
        _check_reasons(function, arguments, found, by_sdpa)


def _check_error(error: Exception, names: dict[str, Any]) -> None:
    if isinstance(error, torch.AcceleratorError) and "device" in names:
        return  # torch's own, for a GPU that is not there
    named = "|".join(map(re.escape, names))
    is_named = re.match(rf"({named})(\.table|\[\d\])?(, ({named}))*: ", str(error)) is not None
    if not isinstance(error, (TypeError, ValueError)) or not is_named:
        raise error


def _check_reasons(
    function: Function, arguments: dict[str, Any], found: Any, by_sdpa: list[bool]
) -> None:
    assert function.reasons is not None
    reasons = _outcome(function.reasons, arguments)
    if isinstance(found, ValueError) and str(found).startswith("fused: cannot be True"):
        assert isinstance(reasons, tuple), reasons
        missing = [reason for reason in reasons if str(reason) not in str(found)]
        assert len(reasons) > 0, f"why_not_fused has no reason, the call {found}"
        assert not missing, f"why_not_fused has {missing}, the call {found}"
        return
    if isinstance(found, OfMaskError):
        return
    same = type(found) is type(reasons) and str(found) == str(reasons)
    if isinstance(found, Exception) or isinstance(reasons, Exception):
        assert same, f"the call: {found!r:.300}, why_not_fused: {reasons!r:.300}"
        return
    runs = getattr(reasons, "runs", None)
    if runs is None or arguments.get("fused") is False:
        return
    if runs == "SDPA":  # and the reference, where the rules for NaN differ
        assert by_sdpa, "why_not_fused says SDPA, which was not asked"
    else:
        assert not any(by_sdpa), f"why_not_fused says {runs}, SDPA computed the call"
