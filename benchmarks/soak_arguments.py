"""The family "arguments" of soak.py: calls of all public functions with right and wrong arguments.

A call is right if it returns, or raises a TypeError or ValueError that begins with one of its
arguments, and leaves its tensors as they were. `why_not_fused` must raise the same error, and on a
CPU what it says runs must be what ran. Values are those of no oracle: other families check them.
"""

import inspect
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any
from unittest.mock import patch

import numpy
import torch
from soak_cases import BFLOAT, FLOAT, HALF, Data, Deviations, Drawn, chance, oracle
from torch import Tensor

import megasoftmax
from megasoftmax import autograd, biases, ranges
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.integrations import flash_attn

Make = Callable[["Call"], Any]


class Sizes(Drawn):
    """Numbers of a call."""

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


# Values of arguments by their kinds. The right ones come first; `ODD` are for any argument.


def _of(*values: Any) -> list[Make]:
    return [lambda call, value=value: value for value in values]


def _normal(*sizes: int, **given: Any) -> list[Make]:
    return [lambda call: call.normal(*sizes, **given)]


def _of_heads(call: Call) -> Tensor:
    return call.normal(call.sizes.heads)


def _of_keys(call: Call) -> tuple[int, int, int]:
    return call.sizes.batch, call.sizes.key_heads, call.sizes.keys


def _tokens_first(kind: str) -> Make:
    """Tokens before heads."""
    return lambda call: VALUES[kind][0](call).transpose(1, 2)


def _packed(kind: str) -> Make:
    """[tokens, heads, dim], of the first of the batch and as many keys as queries."""

    def make(call: Call) -> Tensor:
        tensor = VALUES[kind][0](call)
        return call.normal(call.sizes.queries, tensor.shape[1], tensor.shape[3])

    return make


def _side_by_side(make: Make, parts: int) -> list[Make]:
    return [lambda call: torch.stack([make(call) for _ in range(parts)], -3)]


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


class OfMaskError(ValueError):
    """From the user's `mask_func`, of which the module knows nothing."""


def _fill(scores: Tensor, mask: Tensor) -> Tensor:
    """Of a mask of any type."""
    try:
        return scores.masked_fill(mask.bool(), -10000.0)
    except RuntimeError as error:
        raise OfMaskError(f"mask: {error}") from None


SCALE = _of(0.5, 2, -1.0, numpy.float32(0.5), torch.tensor(0.25), 1e39)
COUNT: list[Make] = [lambda call: call.random.randrange(7), *_of(numpy.int32(3))]
MASK: list[Make] = [lambda call: call.bools(*call.broadcast(*call.pairs))]
BIAS: list[Make] = [
    lambda call: call.normal(*call.broadcast(*call.pairs)),
    lambda call: call.normal(*call.pairs, dtype=FLOAT),
]
TABLE: list[Make] = [
    lambda call: megasoftmax.RelativeBias(
        call.normal(call.sizes.heads, max(call.sizes.queries + call.sizes.keys - 1, 0))
    )
]
PART_OF_ROWS: list[Make] = [
    *_of(0.0, 0.9, 1),
    lambda call: call.data.normal(call.broadcast(*call.pairs[:3])).abs().clamp_max(1),
]
SINK: list[Make] = [
    *_of(0.0, -math.inf),
    _of_heads,
    *_normal(1, dtype=FLOAT),
    *_of(numpy.int64(1), -1e39),
]
VALUES: dict[str, list[Make]] = {
    "flag": _of(True, False),
    "unset or flag": _of(False, True),
    "none": _of(None),
    "scale": SCALE,
    "window": _of((2, 0), [-1, 3], (numpy.int64(1), 2**63), (2**63 - 1, 10**30)),
    "sink": SINK,
    "sink of heads": SINK[2:4],
    "dropout": _of(0.0, 0.5, 1),
    "seed": [lambda call: torch.tensor([3], device=call.data.device), *_of(42)],
    "dtype": _of(FLOAT, HALF, torch.float64),
    "fused": _of(None, False, True),
    "mask": MASK,
    "attention mask": [
        *MASK,
        lambda call: megasoftmax.TileMask(call.bools(*call.broadcast(*call.pairs))),
        lambda call: megasoftmax.TileMask.from_blocks(
            call.bools(
                *call.broadcast(*call.pairs[:2]), *(-(-size // 64) for size in call.pairs[2:])
            ),
            64,
        ),
    ],
    "bias": BIAS,
    "relative bias": TABLE,
    "any bias": [*BIAS, *TABLE],
    "attn_mask": [*MASK, *BIAS],
    "no mask or mask": [*_of(None), *MASK],
    "visible": [
        lambda call: (
            call.integers(*call.broadcast(*call.pairs[:3])),
            call.integers(*call.broadcast(*call.pairs[:3]), dtype=torch.int64),
        ),
        lambda call: [None, call.integers(call.sizes.batch, 1, 1)],
    ],
    "scores": [lambda call: call.normal(*call.pairs)],
    "scores of 3 dimensions": [lambda call: call.normal(*call.pairs[1:])],
    "relative_buckets": _of(8, numpy.int16(4), 3),
    "count": COUNT,
    "max_distance": _of(16, numpy.int64(9)),
    "distance or count": [*_of(16), *COUNT],
    "dim": [lambda call: call.random.randrange(-5, 5), *_of(numpy.int64(-1))],
    "device": [lambda call: call.data.device, *_of(torch.device("meta"))],
    "offsets": [
        lambda call: torch.tensor([0, call.sizes.queries], device=call.data.device),
        lambda call: torch.tensor([0, 0], device=call.data.device, dtype=torch.int32),
        lambda call: torch.tensor([0, 2, 1], device=call.data.device),
    ],
    "query": [lambda call: call.normal(*call.pairs[:3], call.sizes.dim)],
    "key": [lambda call: call.normal(*_of_keys(call), call.sizes.dim)],
    "value": [lambda call: call.normal(*_of_keys(call), call.sizes.value_dim)],
    **{f"packed {each}": [_packed(each)] for each in ("query", "key", "value")},
    **{f"tokens of {each}": [_tokens_first(each)] for each in ("query", "key", "value")},
    "kv": _side_by_side(_tokens_first("key"), 2),
    "qkv": _side_by_side(_tokens_first("query"), 3),
    "packed kv": _side_by_side(_packed("key"), 2),
    "packed qkv": _side_by_side(_packed("query"), 3),
    "group": [lambda call: _one_process()],
    "order": _of("contiguous", "zigzag"),
    "lengths": [lambda call: (call.sizes.keys,), *_of([numpy.int64(5)])],
    "table": _normal(2, 9),
    "narrow table": _normal(2, 7),
    "weight": [lambda call: call.normal(8, call.sizes.heads)],
    "slopes": [_of_heads],
    "float slopes": [lambda call: call.normal(call.sizes.heads, dtype=FLOAT)],
    "softcap": _of(0.0, 10.0),
    "ids": [lambda call: call.integers(2, call.sizes.keys)],
    "n": [lambda call: call.integers(2)],
    "keep": [lambda call: call.bools(2, call.sizes.keys)],
    "size of blocks": _of(64, numpy.int64(128)),
    "tensors": [lambda call: [call.normal(4, 2), call.normal(4, 2)]],
    "outputs": [lambda call: [call.normal(*call.pairs) for _ in range(2)]],
    "lses": [lambda call: [call.normal(*call.pairs[:3], dtype=FLOAT) for _ in range(2)]],
    "attn_mask_type": _of(megasoftmax.AttnMaskType.causal, "no_mask"),
    "mask_func": _of(_fill, None),
    "scale or none": [*_of(None), *SCALE],
    "scale of rows": [*SCALE, *PART_OF_ROWS[-1:]],
    "top_k": [*COUNT, lambda call: call.integers(*call.broadcast(*call.pairs[:3]))],
    "part of rows": PART_OF_ROWS,
    "score": _of("softmax", "sigmoid"),
    "selection_bias": [lambda call: call.data.normal((call.sizes.keys,))],
}


# The kind of an argument by its name, where they differ and a function says nothing else.
KINDS = {
    name: kind
    for kind, names in {
        "flag": "causal is_causal return_lse renormalize return_probabilities enable_gqa "
        "bidirectional return_attn_probs input_in_fp16 input_in_bf16 softmax_in_fp32 "
        "scaled_masked_softmax_fusion",
        "unset or flag": "deterministic",
        "none": "block_table",
        "count": "k heads queries keys offset tokens ranks size max_seqlen max_seqlen_q "
        "max_seqlen_k",
        "part of rows": "top_p min_p",
        "offsets": "cu_seqlens cu_seqlens_q cu_seqlens_k",
        "scores": "logits gradient probabilities input inputs x tensor",
        "mask": "blocks",
        "scale": "softmax_scale",
        "window": "window_size",
        "dropout": "dropout_p",
        "sink": "denominator_offset",
        "sink of heads": "softmax_offset",
        "float slopes": "alibi_slopes",
        "tokens of query": "q",
        "tokens of value": "v",
    }.items()
    for name in names.split()
}


class Function:
    """What is called, with the kinds of its arguments.

    Args:
        like: has the signature; by default `call`.
        needed: names of arguments; by default those of the signature without a default. Options are
            those with one.
        reasons: `why_not_fused` of the same arguments.
        kinds: of arguments of which KINDS has another one.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        like: Callable[..., Any] | None = None,
        needed: str = "",
        reasons: Callable[..., Any] | None = None,
        **kinds: str,
    ) -> None:
        self.call, self.reasons = call, reasons
        parameters = inspect.signature(like or call).parameters.values()
        self.options = [each.name for each in parameters if each.default is not each.empty]
        others = [each.name for each in parameters if each.default is each.empty]
        self.needed = needed.split() or others
        names = [*self.needed, *self.options]
        self.kinds = {name: kinds.get(name, KINDS.get(name, name)) for name in names}

    @property
    def arguments(self) -> dict[str, list[Make]]:
        return {name: VALUES[kind] for name, kind in self.kinds.items()}


def _public(name: str, **kinds: str) -> Function:
    """Looked up when it is called, so that tests may replace it."""
    return Function(
        lambda **given: getattr(megasoftmax, name)(**given),
        getattr(megasoftmax, name),
        reasons=lambda **given: megasoftmax.why_not_fused(getattr(megasoftmax, name), **given),
        **kinds,
    )


def _fused_attention(**options: Any) -> Function:
    def module(given: dict[str, Any]) -> megasoftmax.FusedAttention:
        """Where the call is, which its first argument tells unless that is odd."""
        query = given["query"]
        on_gpu = isinstance(query, Tensor) and query.is_cuda
        return megasoftmax.FusedAttention(4, **options, device="cuda" if on_gpu else "cpu")

    return Function(
        lambda **given: module(given)(**given),
        megasoftmax.FusedAttention.forward,
        "query key value",
        lambda **given: module(given).why_not_fused(**given),
        **OF_ATTENTION,
    )


def _megatron(fusion: bool) -> Function:
    def module() -> torch.nn.Module:
        return megasoftmax.FusedScaleMaskSoftmax(False, False, "causal", fusion, _fill, True, 0.5)

    return Function(
        lambda **given: module()(**given),
        megasoftmax.FusedScaleMaskSoftmax.forward,
        "input mask",
        lambda **given: module().why_not_fused(**given),
        mask="no mask or mask",
    )


OF_ATTENTION = {"mask": "attention mask", "bias": "any bias"}
PACKED = {name: f"packed {name}" for name in ("query", "key", "value")}
PACKED_IN_FLASH = {"q": "packed query", "k": "packed key", "v": "packed value"}
RANGES = ("packed", "segments", "lengths", "padding", "chunks", "prefix")
OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
flash = flash_attn.flash_attn_func

FUNCTIONS = {
    "softmax": _public("softmax"),
    "softmax_topk": _public("softmax_topk", scale="scale of rows", group="none"),
    "sample": _public("sample", scale="scale of rows"),
    "softmax_backward": Function(softmax_backward),
    "attention": _public("attention", **OF_ATTENTION),
    "attention_varlen": _public("attention_varlen", **PACKED, bias="relative bias"),
    "scaled_dot_product_attention": _public("scaled_dot_product_attention"),
    "ring_attention": Function(
        lambda **given: megasoftmax.ring_attention(**given),
        megasoftmax.ring_attention,
        bias="any bias",
    ),
    "RelativeBias": Function(megasoftmax.RelativeBias),
    "dense": Function(
        lambda table, queries, keys: megasoftmax.RelativeBias(table).dense(queries, keys),
        table="narrow table",
    ),
    "t5_bias": Function(biases.t5_bias),
    "alibi_bias": Function(biases.alibi_bias),
    "alibi_slopes": Function(biases.alibi_slopes),
    **{f"ranges.{name}": Function(getattr(ranges, name)) for name in RANGES},
    "TileMask": Function(megasoftmax.TileMask),
    "TileMask.from_blocks": Function(megasoftmax.TileMask.from_blocks, size="size of blocks"),
    "zigzag_chunk": Function(megasoftmax.zigzag_chunk),
    "zigzag_cat": Function(megasoftmax.zigzag_cat),
    "merge_attention": Function(megasoftmax.merge_attention),
    "FusedAttention()": Function(
        megasoftmax.FusedAttention,
        sink="flag",
        max_distance="distance or count",
        alibi_slopes="slopes",
    ),
    "FusedAttention": _fused_attention(causal=True),
    "FusedAttention with T5": _fused_attention(relative_buckets=8),
    "FusedScaleMaskSoftmax()": Function(megasoftmax.FusedScaleMaskSoftmax, scale="scale or none"),
    **{f"FusedScaleMaskSoftmax, fusion {fusion}": _megatron(fusion) for fusion in (True, False)},
    "ScaledMaskedSoftmax": Function(megasoftmax.ScaledMaskedSoftmax.apply),
    "ScaledSoftmax": Function(megasoftmax.ScaledSoftmax.apply),
    "ScaledUpperTriangMaskedSoftmax": Function(
        megasoftmax.ScaledUpperTriangMaskedSoftmax.apply, inputs="scores of 3 dimensions"
    ),
    "SoftmaxOne": Function(
        lambda x, **given: megasoftmax.SoftmaxOne(**given)(x),
        megasoftmax.SoftmaxOne,
        "x",
        lambda x, **given: megasoftmax.why_not_fused(megasoftmax.SoftmaxOne(**given), x),
    ),
    "flash_attn_func": Function(flash, k="tokens of key"),
    "flash_attn_varlen_func": Function(flash_attn.flash_attn_varlen_func, **PACKED_IN_FLASH),
    "flash_attn_qkvpacked_func": Function(flash_attn.flash_attn_qkvpacked_func, flash, "qkv"),
    "flash_attn_kvpacked_func": Function(flash_attn.flash_attn_kvpacked_func, flash, "q kv"),
    "flash_attn_varlen_qkvpacked_func": Function(
        flash_attn.flash_attn_varlen_qkvpacked_func,
        flash,
        "qkv cu_seqlens max_seqlen",
        qkv="packed qkv",
    ),
    "flash_attn_varlen_kvpacked_func": Function(
        flash_attn.flash_attn_varlen_kvpacked_func,
        flash,
        f"q kv {OFFSETS}",
        q="packed query",
        kv="packed kv",
    ),
}


# Mutations


ODD: dict[str, Make] = {
    **{
        name: _of(value)[0]
        for name, value in (
            *(("None", None), ("True", True), ("1", 1), ("-1", -1), ("0.5", 0.5)),
            *(("NaN", math.nan), ("infinity", math.inf), ("2^31 - 1", 2**31 - 1), ("2^63", 2**63)),
            *(("10^400", 10**400), ("1e39", 1e39), ("a string", "zzz"), ("bytes", b"zzz")),
            *(("a complex number", 1j), ("a list", [1.0]), ("no elements", ()), ("a pair", (1, 2))),
            *(("a pair of None", (None, None)), ("a triple", (1, 2, 3))),
            *(("a pair of strings", ("a", "b")), ("a dict", {}), ("an object", object())),
            *(("a class", int), ("numpy.int64", numpy.int64(2))),
            *(("numpy.uint64", numpy.uint64(2**64 - 1)), ("numpy.bool", numpy.bool_(True))),
            *(("numpy.float32", numpy.float32(0.5)), ("an array", numpy.zeros(3, numpy.float32))),
            ("a dtype", torch.int64),
        )
    },
    **{
        name: lambda call, shape=shape: call.data.normal(shape)
        for name, shape in (("no dimensions", ()), ("one element", (1,)), ("two elements", (2,)))
    },
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


class Arguments(Drawn):
    """given: arguments, each with the place of its value in the table, or what is odd about it."""

    family = "arguments"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Arguments":
        name = random.choice(list(FUNCTIONS))
        function = FUNCTIONS[name]
        options = function.options
        names = [*function.needed, *random.sample(options, min(random.randrange(5), len(options)))]
        odd = random.sample(names, min(random.choice((0, 1, 1, 2)), len(names)))
        given = tuple(
            (each, _draw_value(random, function.kinds[each], each in odd)) for each in names
        )
        sizes, seed = Sizes.draw(random), random.randrange(2**31)
        return cls(function=name, sizes=sizes, given=given, seed=seed)

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


def _draw_value(random: Random, kind: str, is_odd: bool) -> int | str:
    if not is_odd:
        return random.randrange(len(VALUES[kind]))
    # So many tokens take all memory.
    largest = {"2^31 - 1"} if kind in ("count", "relative_buckets") else set()
    return random.choice([*(each for each in ODD if each not in largest), *MUTATIONS, *MUTATIONS])


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
    """For each time that torch's own functions were tried: whether they computed the call."""
    found: list[bool] = []

    def noting(attend: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def noted(*args: Any, **given: Any) -> Tensor | None:
            output = attend(*args, **given)
            found.append(output is not None)
            return output

        return noted

    names = "attention", "attention_keeping_weights"
    noted = {name: noting(getattr(autograd.sdpa, name)) for name in names}
    with patch.multiple(autograd.sdpa, **noted):
        yield found


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
