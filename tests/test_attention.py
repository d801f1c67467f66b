"""megasoftmax.attention against the oracle: every rule of the semantics, every pair of features."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import oracle_attention
import pytest
import torch
from inputs import (
    DTYPES,
    HALVES,
    acted_capability,
    attention_kernels,
    attention_on,
    bits_equal,
    by_entry,
    coin,
    deterministic,
    dtypes_on,
    gpu_with_all_kernels,
    normal,
    on_all_kernels,
    record_calls,
    tensors,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import megasoftmax
from megasoftmax import RelativeBias, ShiftedBias, attention, reference
from megasoftmax.explain import explain_attention

INF, NAN = torch.inf, torch.nan

gpu = pytest.mark.gpu
attention_forward = torch.ops.megasoftmax.attention_forward.default
MASKINGS = ("none", "causal", "keys", "pairs", "window", "ranges", "dropout")
of_maskings = pytest.mark.parametrize("masking", MASKINGS)


def check(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """A bias may have a batch that divides that of the query, see `inputs.by_entry`."""
    function = attention_on(query.device.type, query.dtype)
    given, arguments = by_entry(query, key, value, arguments)
    return oracle_attention.check(function, *given, **arguments)


def in_types(device: str, **sizes: Any) -> Iterator[tuple[torch.dtype, Tensor, Tensor, Tensor]]:
    """Each type with query, key and value."""
    for dtype in dtypes_on(device):
        yield dtype, *tensors(device, dtype, **sizes)


def closeness(dtype: torch.dtype) -> dict[str, float]:
    """Kernels may add up gradients in another order each time."""
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    return {"rtol": tolerance, "atol": tolerance}


def assert_same_gradients(
    output: Tensor, leaves: Any, runs: int, what: str = ""
) -> tuple[Tensor, ...]:
    """Of random gradients of the output, with the same bits in each of the backward passes."""
    gradient = normal(*output.shape, device=output.device.type, dtype=output.dtype, seed=5)
    found, *others = (
        torch.autograd.grad(output, leaves, gradient, retain_graph=True) for _ in range(runs)
    )
    for each in others:
        assert all(map(bits_equal, found, each)), what
    return found


# Pairs of features: each kind of one meets each kind of every other


def _lowest(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    """The lowest number that both the bias and the query have, here and there."""
    lowest = torch.finfo(torch.bfloat16 if dtype == torch.float32 else dtype).min
    return normal(*shape, device=device, dtype=dtype, seed=4).masked_fill(
        coin(*shape, device=device, odds=0.4, seed=5), lowest
    )


def _with_infinities(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    excluded = coin(*shape, device=device, odds=0.4, seed=5)
    return normal(*shape, device=device, dtype=dtype, seed=4).masked_fill(excluded, -INF)


def _expanded(dim: int) -> Callable[..., Tensor]:
    return lambda shape, device, dtype: (
        normal(*shape, device=device, dtype=dtype, seed=4).narrow(dim, 0, 1).expand(shape)
    )


def _transposed(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    b, h, m, n = shape
    return normal(n, m, h, b, device=device, dtype=dtype, seed=4).permute(3, 2, 1, 0)


def _of_shape(choose: Callable[[int, int, int, int], tuple[int, ...]]) -> Callable[..., Tensor]:
    return lambda shape, device, dtype: normal(*choose(*shape), device=device, dtype=dtype, seed=4)


def _lying(layout: str, *, float32: bool = False) -> Callable[..., Tensor]:
    """In float32 with values of the dtype, so that torch's attention in it has the same bias."""

    def make(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
        values = normal(*shape, device=device, dtype=dtype, seed=4)
        return _laid_out(values.float() if float32 else values, layout)

    return make


BIASES: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "all": _of_shape(lambda b, h, m, n: (b, h, m, n)),
    "per head": _of_shape(lambda b, h, m, n: (h, m, n)),
    "per batch": _of_shape(lambda b, h, m, n: (b, 1, m, n)),
    "pairs": _of_shape(lambda b, h, m, n: (m, n)),
    "keys": _of_shape(lambda b, h, m, n: (b, 1, 1, n)),
    "keys of heads": _of_shape(lambda b, h, m, n: (1, h, 1, n)),
    "rows": _of_shape(lambda b, h, m, n: (1, h, m, 1)),
    "one per head": _of_shape(lambda b, h, m, n: (h, 1, 1)),
    "number": _of_shape(lambda b, h, m, n: ()),
    "expanded batch": _expanded(0),
    "expanded heads": _expanded(1),
    "expanded queries": _expanded(2),
    "expanded keys": _expanded(3),
    "groups of batches": _of_shape(lambda b, h, m, n: (b // 2, h, m, n)),
    "groups of batches, heads": _of_shape(lambda b, h, m, n: (b // 2, 1, 1, n)),
    "transposed": _transposed,
    "-inf": _with_infinities,
    "lowest": _lowest,
    "offset": _lying("offset"),
    "wider rows": _lying("wider rows"),
    "heads last": _lying("heads last"),
    "float32": _lying("plain", float32=True),
    "float32 offset": _lying("offset", float32=True),
    "float32 wider rows": _lying("wider rows", float32=True),
    "float32 heads last": _lying("heads last", float32=True),
    "float32 expanded batch": _lying("expanded batch", float32=True),
    "keys, -inf": lambda shape, *of: _with_infinities((*shape[:2], 1, shape[3]), *of),
    "keys, lowest": lambda shape, *of: _lowest((1, shape[1], 1, shape[3]), *of),
    "rows, -inf": lambda shape, *of: _with_infinities((*shape[:3], 1), *of),
    "shifted": _of_shape(lambda b, h, m, n: (b, h, m, m + n - 1)),
    "shifted, wider": _of_shape(lambda b, h, m, n: (1, h, m, m + n + 6)),
    "shifted, heads first": lambda shape, *of: _laid_out(
        _transposed((*shape[:3], sum(shape[2:]) - 1), *of), "last dimension apart"
    ),
    "shifted, one of all queries": lambda shape, device, dtype: normal(
        1, shape[1], 1, sum(shape[2:]) - 1, device=device, dtype=dtype, seed=4
    ).expand(*shape[:3], -1),
    "relative": _of_shape(lambda b, h, m, n: (1, m + n - 1)),
    "relative per head": _of_shape(lambda b, h, m, n: (h, m + n - 1)),
    "relative per batch": _of_shape(lambda b, h, m, n: (b, h, m + n - 1)),
    "relative in groups": _of_shape(lambda b, h, m, n: (b // 2, h, m + n - 1)),
}

MASKS: dict[str, Callable[[int, int, int, int], tuple[int, ...]] | None] = {
    "none": None,
    "all": lambda b, h, m, n: (b, h, m, n),
    "pairs": lambda b, h, m, n: (m, n),
    "keys": lambda b, h, m, n: (b, 1, 1, n),
    "rows": lambda b, h, m, n: (b, 1, m, 1),
    "heads": lambda b, h, m, n: (h, 1, 1),
    "per head": lambda b, h, m, n: (1, h, m, n),
}

LAYOUTS = (
    "plain",
    "[b, s, h, d]",
    "packed",
    "last dimension apart",
    "offset",
    "expanded batch",
    "heads last",
    "wider rows",
)

FEATURES: dict[str, tuple[Any, ...]] = {
    "bias": tuple(BIASES),
    "mask": tuple(MASKS),
    "causal": (False, True),
    "window": (None, (2, 1), (5, -1), (-1, 0), (0, 3)),
    "sink": (None, "per head", "one", "number", "float32"),
    "scale": (None, 0.3, 1.0),
    "heads": ((2, 2), (4, 2), (6, 1)),
    "batch": (2, 4),
    "layout": LAYOUTS,
}

ON_CPU: dict[str, tuple[Any, ...]] = {
    "lengths": ((1, 1), (1, 9), (7, 7), (13, 5), (5, 13), (17, 33)),
    "dims": ((8, 8), (16, 24), (5, 3)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}

ON_GPU: dict[str, tuple[Any, ...]] = {
    "lengths": (
        *((1, 1), (2, 2), (63, 64), (64, 63), (65, 65), (127, 129), (128, 128), (129, 127)),
        *((200, 257), (257, 200), (1, 1000), (1000, 1000)),
    ),
    "dims": ((64, 64), (128, 128), (40, 40), (96, 64), (192, 128), (256, 256), (20, 36), (5, 3)),
    "dtype": tuple(DTYPES),
}


def _pairs(row: dict[int, int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(sorted(row.items()), 2))


def pairwise(features: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Combinations in which every two kinds of two features meet, few of them."""
    names = list(features)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(features[names[a]]))
        for j in range(len(features[names[b]]))
    }
    combinations = []
    while missing:
        row = dict(min(missing))
        for feature, name in enumerate(names):
            if feature not in row:
                count = len(features[name])
                # Equals take turns, so that not all rows begin with the first.
                turns = [(kind + len(combinations)) % count for kind in range(count)]
                new = [len(_pairs(row | {feature: kind}) & missing) for kind in turns]
                row[feature] = turns[new.index(max(new))]
        missing -= _pairs(row)
        combinations.append({name: features[name][row[i]] for i, name in enumerate(names)})
    return combinations


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    b, h, length, d = tensor.shape
    if layout == "[b, s, h, d]":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":  # a slice of [b, s, 3, h, d], as a projection to all three gives
        packed = normal(b, length, 3, h, d, device=tensor.device.type, dtype=tensor.dtype, seed=9)
        packed[:, :, 1] = tensor.transpose(1, 2)
        return packed[:, :, 1].transpose(1, 2)
    if layout == "last dimension apart":
        return tensor.mT.contiguous().mT
    if layout == "offset":  # no address is aligned
        flat = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return flat.copy_(tensor)
    if layout == "expanded batch":
        return tensor[:1].expand(tensor.shape)
    if layout == "heads last":  # as T5 has its bias
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "wider rows":  # aligned, and what lies behind a row is none of its entries
        wide = tensor.new_full((b, h, length, d // 8 * 8 + 8), NAN)
        wide[..., :d] = tensor
        return wide[..., :d]
    assert layout == "plain"
    return tensor


def _check_combination(device: str, combination: dict[str, Any]) -> None:
    dtype, (queries, keys) = combination["dtype"], combination["lengths"]
    sizes = {name: combination[name] for name in ("batch", "heads", "lengths", "dims")}
    given = tensors(device, dtype, **sizes)
    q, k, v = (_laid_out(each, combination["layout"]) for each in given)
    heads = q.shape[1]
    shape = (combination["batch"], heads, queries, keys)
    arguments: dict[str, Any] = {name: combination[name] for name in ("causal", "window", "scale")}
    make = BIASES[combination["bias"]]
    if make is not None:
        bias = make(shape, device, dtype).requires_grad_()
        made_of = {"relative": RelativeBias, "shifted": ShiftedBias}
        kind = next((each for each in made_of if combination["bias"].startswith(each)), None)
        arguments["bias"] = made_of[kind](bias) if kind else bias
    of = MASKS[combination["mask"]]
    if of is not None:
        arguments["mask"] = coin(*of(*shape), device=device)
    sinks = {
        None: None,
        "per head": normal(heads, device=device, dtype=dtype, seed=6).requires_grad_(),
        "one": normal(1, 1, device=device, dtype=dtype, seed=6).requires_grad_(),
        "number": 0.25,
        "float32": normal(heads, device=device, dtype=dtype, seed=6).float().requires_grad_(),
    }
    arguments["sink"] = sinks[combination["sink"]]
    check(q, k, v, **arguments)


def _name(combination: dict[str, Any]) -> str:
    return "; ".join(str(kind).removeprefix("torch.") for kind in combination.values())


@pytest.mark.parametrize("combination", pairwise(FEATURES | ON_CPU), ids=_name)
def test_pairs_of_features(combination: dict[str, Any]) -> None:
    _check_combination("cpu", combination)


@gpu_with_all_kernels
@pytest.mark.parametrize("combination", pairwise(FEATURES | ON_GPU), ids=_name)
def test_pairs_of_features_on_gpu(combination: dict[str, Any]) -> None:
    _check_combination("cuda", combination)


def test_pairs_are_complete() -> None:
    features = FEATURES | ON_CPU
    combinations = pairwise(features)
    for a, b in itertools.combinations(features, 2):
        met = {(row[a], row[b]) for row in combinations}
        assert met == set(itertools.product(features[a], features[b]))


# Sizes


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200, 257, 1000])
@pytest.mark.parametrize(
    "dims",
    [
        *((d, d) for d in (16, 24, 40, 64, 80, 96, 128, 160, 192, 256)),
        *((192, 128), (64, 256), (128, 72), (72, 16)),
    ],
)
def test_sizes(dims: tuple[int, int], length: int, dtype: torch.dtype) -> None:
    q, k, v = tensors("cuda", dtype, lengths=length, dims=dims)
    check(q, k, v, causal=True)
    bias = normal(1, 4, length, length, device="cuda", dtype=dtype, seed=4).requires_grad_()
    check(q, k, v, bias=bias, what="with bias")


@gpu_with_all_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *((torch.bfloat16, (d, d)) for d in (24, 40, 64, 80, 96, 128, 192, 256)),
        *((torch.bfloat16, dims) for dims in ((192, 128), (136, 72))),
        *((torch.float32, (d, d)) for d in (32, 64, 128)),
    ],
)
@pytest.mark.parametrize("lengths", [(192, 192), (300, 170), (64, 448), (448, 64), (130, 900)])
def test_masks_over_any_number_of_tiles(
    lengths: tuple[int, int], dtype: torch.dtype, dims: tuple[int, int], causal: bool
) -> None:
    """Kernels take half of a tile of 64 by 64 at a time, or up to two, and skip unseen ones."""
    queries, keys = lengths
    q, k, v = tensors("cuda", dtype, lengths=lengths, dims=dims)
    mask = coin(2, 1, queries, keys, device="cuda")
    check(q, k, v, mask=mask, causal=causal, what="coins")
    of_keys = coin(2, 1, 1, keys, device="cuda")
    of_keys[..., 128:192] = True
    check(q, k, v, mask=of_keys, causal=causal, what="keys")
    rows, columns = torch.arange(queries, device="cuda"), torch.arange(keys, device="cuda")
    for unseen in (0, 1):  # every second tile of both, which leaves out the last or the first
        tiles = (rows[:, None] // 64 % 2 == unseen) | (columns // 64 % 2 == unseen)
        check(q, k, v, mask=tiles, causal=causal, what=f"tiles {unseen}")
        check(q, k, v, mask=mask | tiles, causal=causal, what=f"coins in tiles {unseen}")


# A launch makes a block mask of the mask in large calls: it would take longer than a small call.
MASKS_OF_KEYS = [
    *itertools.product(
        [(192, 384), (300, 170), (130, 900), (77, 128), (65, 512), (65, 513)],
        [(32, 32), (40, 24), (64, 64), (96, 96), (128, 128), (256, 256)],
        [torch.bfloat16, torch.float16],
        ["none", "shared", "own", "relative"],
    ),
    *itertools.product([(1300, 1400)], [(64, 64), (128, 128)], [torch.bfloat16], ["none", "own"]),
]


@gpu_with_all_kernels
@pytest.mark.parametrize(("lengths", "dims", "dtype", "bias"), MASKS_OF_KEYS)
def test_masks_of_keys(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, bias: str
) -> None:
    """They have kernels of their own on Hopper. In large calls of more than 512 keys, these leave
    out tiles before and behind all visible keys."""
    queries, keys = lengths
    q, k, v = tensors("cuda", dtype, batch=3, heads=(4, 2), lengths=lengths, dims=dims)
    given: dict[str, Any] = {}
    if bias == "relative":
        table = normal(1, 4, queries + keys - 1, device="cuda", dtype=dtype, seed=4)
        given["bias"] = RelativeBias(table.requires_grad_())
    elif bias != "none":
        batch = 1 if bias == "shared" else 3
        entries = normal(batch, 4, *lengths, device="cuda", dtype=dtype, seed=4)
        given["bias"] = entries.requires_grad_()
    columns = torch.arange(keys, device="cuda")
    some = coin(3, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    some = (255 * some.byte()).view(torch.bool)  # any byte but 0 excludes
    ends = torch.tensor([keys // 3, keys, 0], device="cuda").reshape(3, 1, 1, 1)
    cases: dict[str, dict[str, Any]] = {
        "some": {"mask": some, "sink": 0.5},
        "padding behind": {"mask": columns >= ends},  # of one batch all
        "padding before": {"mask": columns < ends, "causal": True},
        "of heads": {"mask": coin(3, 4, 1, keys, device="cuda", seed=8), "window": (70, 30)},
    }
    for what, options in cases.items():
        check(q, k, v, **given, **options, what=what)


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 48, 64, 96, 128])
@pytest.mark.parametrize("logit", [-100.0, -60.0, -3.0, 0.0, 60.0])
@pytest.mark.parametrize("keys", [300, 600])
def test_masks_of_keys_beside_any_logits(
    keys: int, logit: float, dim: int, dtype: torch.dtype
) -> None:
    """A row of one key has a sum far below 1, or above. Excluded keys may be infinite."""
    q, k, v = tensors("cuda", dtype, batch=1, lengths=(200, keys), dims=dim)
    with torch.no_grad():
        q[..., :1], k[..., :1] = 8, logit * dim**0.5 / 8
    mask = coin(1, 1, 1, keys, device="cuda", odds=0.9)
    check(q, k, v, mask=mask, what="some")
    with torch.no_grad():
        infinite = k.masked_fill(mask.mT, INF)
        found, expected = (attention(q, each, v, mask=mask, fused=True) for each in (infinite, k))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    with torch.no_grad():  # one key is left, with sums on both sides of 1
        k[:, :, 7, :1] = 0
    check(q, k, v, mask=torch.arange(keys, device="cuda") != 7, what="all but one")


@gpu_with_all_kernels
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("takes_turns", [False, True])
def test_masked_keys_add_nothing(
    takes_turns: bool, dim: int, dtype: torch.dtype, in_order: bool
) -> None:
    """Not to queries that are no number and see no key, nor where D is large."""
    batch = 3000 // dim if takes_turns else 2  # a sum for each tile of keys would take 18 MB
    q, k, v = tensors("cuda", dtype, batch=batch, lengths=200, dims=dim)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    columns = torch.arange(200, device="cuda")
    with torch.no_grad():
        q[:, :, :5], v[:], k[:, :, 150] = torch.nan, 30, 0
    for visible in (columns >= 5, columns == 150, columns < 0):
        with deterministic(in_order):
            output = attention(*leaves, mask=~visible, causal=True, fused=True)
            gradients = torch.autograd.grad(output, leaves, torch.full_like(output, 40))
        assert gradients[0].isfinite().all()
        assert not gradients[0][:, :, :5].any()


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [(136, 136), (192, 192), (200, 256), (256, 256)])
@pytest.mark.parametrize("lengths", [(17, 1), (65, 63), (64, 128), (300, 170), (1000, 130)])
def test_wide_heads(lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Warpgroups of the backward pass take different steps at a time, one up to 16 steps here."""
    queries, keys = lengths
    q, k, v = tensors("cuda", dtype, heads=(6, 2), lengths=lengths, dims=dims)
    first = torch.arange(queries, device="cuda", dtype=torch.int32).reshape(1, 1, -1) // 3
    mask = coin(2, 1, queries, keys, device="cuda")
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "window": {"window": (70, 3)},
        "ranges": {"visible": (first, first + 40), "sink": 0.5},
        "half a range": {"visible": (first, None), "causal": True},
        "mask and range": {"visible": (None, first + 90), "mask": mask},
    }
    for what, options in cases.items():
        check(q, k, v, **options, what=what)


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [48, 64, 96, 128])
@pytest.mark.parametrize("heads", [(8, 2), (7, 1)])
@pytest.mark.parametrize("lengths", [(500, 300), (290, 410)])
def test_turns_of_heads_that_share_keys(
    lengths: tuple[int, int], heads: tuple[int, int], dim: int
) -> None:
    """So many blocks that those with the first keys begin first, but beside a mask of pairs."""
    shape: dict[str, Any] = {"batch": 64 // heads[1], "heads": heads, "lengths": lengths}
    q, k, v = tensors("cuda", torch.bfloat16, **shape, dims=dim)
    batch, keys = len(q), lengths[1]
    cases: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (150, 20)},
        "softcap": {"causal": True, "softcap": 5.0},
        "keys": {"causal": True, "mask": coin(batch, 1, 1, keys, device="cuda")},
        "pairs": {"causal": True, "mask": coin(batch, 1, *lengths, device="cuda")},
    }
    leaves = [each.requires_grad_() for each in (q, k, v)]
    for what, options in cases.items():
        with deterministic(True):
            check(q, k, v, **options, what=what)
            output = attention(*leaves, **options, fused=True)
            assert_same_gradients(output, leaves, 2, what)


@gpu_with_all_kernels
@pytest.mark.parametrize(
    ("shape", "bias", "causal", "names"),
    [
        # Blocks sum gradients of their own keys and values in order.
        *(
            ({"heads": (8, 4), "lengths": (1500, 900), "dims": dim}, None, causal, "kv")
            for dim in (192, 256)
            for causal in (False, True)
        ),
        # One block has all keys of a row, and the gradient of the bias a launch of its own.
        *(
            ({"batch": 500, "heads": 3, "lengths": (m, n), "dims": 32}, (1, 3, m, n), False, "qkvb")
            for m, n in ((49, 49), (64, 64), (33, 60))
        ),
        *(({"lengths": (1000, 900), "dims": dim}, (4, 1899), True, "b") for dim in (64, 128)),
    ],
)
def test_gradients_have_the_same_bits_in_any_mode(
    shape: dict[str, Any], bias: tuple[int, ...] | None, causal: bool, names: str, kernels: str
) -> None:
    """Also without torch.use_deterministic_algorithms. Other bits would come from a race."""
    if kernels != "own" and names != "b":
        pytest.skip("only this GPU's own kernels promise it")
    leaves = dict(zip("qkv", tensors("cuda", torch.bfloat16, **shape), strict=True))
    given: Any = None
    if bias is not None:
        dtype = torch.float32 if len(bias) == 2 else torch.bfloat16
        leaves["b"] = given = normal(*bias, device="cuda", dtype=dtype, seed=4)
    for each in leaves.values():
        each.requires_grad_()
    given = RelativeBias(given) if len(bias or ()) == 2 else given
    tensors_given = [leaves[name] for name in "qkv"]
    output = attention_on("cuda", torch.bfloat16)(*tensors_given, bias=given, causal=causal)
    for found in assert_same_gradients(output, [leaves[name] for name in names], 10):
        assert found.abs().max() > 0


@gpu_with_all_kernels
@pytest.mark.parametrize("kind", ["16 bits", "float32", "of keys", "of queries", "shared", "table"])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 100), (torch.bfloat16, 256), *((torch.float32, d) for d in (32, 60, 100))],
)
@pytest.mark.parametrize("lengths", [(200, 330), (129, 97), (32, 33)])
def test_gradients_of_biases_by_each_tile(
    lengths: tuple[int, int], dtype: torch.dtype, dim: int, in_order: bool, kind: str
) -> None:
    """Wide heads have tiles of their own where blocks are small. Masks leave tiles out."""
    queries, keys = lengths
    q, k, v = tensors("cuda", dtype, lengths=lengths, dims=dim)
    shapes = {"of keys": (2, 4, 1, keys), "of queries": (2, 4, queries, 1)}
    shapes |= {"shared": (1, 4, *lengths), "table": (4, queries + keys - 1)}
    shape = shapes.get(kind, (2, 4, *lengths))
    of_bias = torch.float32 if kind == "float32" else torch.bfloat16
    entries = normal(*shape, device="cuda", dtype=of_bias, seed=4).requires_grad_()
    bias = RelativeBias(entries) if kind == "table" else entries
    mask = coin(2, 1, queries, keys, device="cuda")
    mask[..., 64:128] = True
    with deterministic(in_order, warn_only=True):
        check(q, k, v, bias=bias, what="bias")
        check(q, k, v, bias=bias, mask=mask, causal=True, what="masked")


@gpu
@pytest.mark.parametrize("kind", ["of keys", "of queries", "shifted"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(
    ("dim", "lengths"),
    [
        *((dim, (200, 330)) for dim in (32, 48, 64, 96, 128, 192, 256)),
        *((64, lengths) for lengths in ((129, 97), (130, 257), (65, 1), (1, 65), (2, 700))),
    ],
)
def test_biases_of_fewer_entries_than_pairs(
    dim: int, lengths: tuple[int, int], heads: tuple[int, int], kind: str
) -> None:
    """Also numbers too large for the parts of a product, infinite ones, and beside a mask."""
    queries, keys = lengths
    for dtype in HALVES:
        q, k, v = tensors("cuda", dtype, heads=heads, lengths=lengths, dims=dim)
        shape = {
            "of keys": (1, 4, 1, keys),  # for one query it is dense, and batches share it
            "of queries": (1, 4, queries, 1),
            "shifted": (2, 4, queries, queries + keys + 4),
        }[kind]
        entries = normal(*shape, device="cuda", dtype=dtype, seed=4)
        mask = coin(2, 1, 1, keys, device="cuda")
        for large in (None, -INF, -6e4, 2e4):
            given = entries.detach()
            if large is not None:
                given = given.masked_fill(coin(*shape, device="cuda", seed=5), large)
            given.requires_grad_(large is None)
            bias = ShiftedBias(given) if kind == "shifted" else given
            check(q, k, v, bias=bias, what=f"{large}")
            check(q, k, v, bias=bias, causal=True, mask=mask, what=f"{large}, masked")


# Of batches, heads, queries and keys that share entries of a bias: windows, and rows of pairs.
SHARING: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "batches": lambda b, h, m, n: (1, h, m, n),
    "all": lambda b, h, m, n: (1, 1, m, n),
    "heads": lambda b, h, m, n: (b, 1, m, n),
    "groups": lambda b, h, m, n: (b // 3, h, m, n),
}


@gpu_with_all_kernels
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        *((torch.bfloat16, dims) for dims in ((16, 16), (24, 48), (48, 48), (64, 40), (32, 256))),
        *((torch.float16, dims) for dims in ((32, 32), (64, 64), (72, 72))),
        *((torch.float32, dims) for dims in ((24, 24), (64, 64), (40, 128))),
    ],
)
@pytest.mark.parametrize(
    "lengths", [(49, 49), (64, 64), (197, 197), (130, 20), (40, 300), (190, 380)]
)
def test_gradients_of_shared_biases_in_order(
    lengths: tuple[int, int], dtype: torch.dtype, dims: tuple[int, int], sharing: str
) -> None:
    """Blocks take what shares a tile in turn, cut into parts."""
    queries, keys = lengths
    q, k, v = tensors("cuda", dtype, batch=6, heads=(4, 2), lengths=lengths, dims=dims)
    given = SHARING[sharing](6, 4, queries, keys)
    bias = normal(*given, device="cuda", dtype=dtype, seed=4).requires_grad_()
    of_keys = coin(6, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    of_keys[1] = True  # a batch sees nothing
    first = torch.randint(-9, keys, (6, 4, queries), device="cuda", dtype=torch.int32)
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "float32 bias": {"bias": bias.detach().float().requires_grad_(), "sink": 0.5},
        "keys": {"mask": of_keys},
        "keys and window": {"mask": of_keys, "window": (70, 3)},
        "pairs": {"mask": coin(6, 1, queries, keys, device="cuda"), "causal": True},
        "ranges": {"visible": (first, first + 40)},
    }
    with deterministic(True, warn_only=True):
        for what, options in cases.items():
            check(q, k, v, **{"bias": bias} | options, what=what)


@gpu_with_all_kernels
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [48, 64, 128])
@pytest.mark.parametrize("keys", [331, 336])  # rows of a bias begin anywhere, or at 16 bytes
@pytest.mark.parametrize("is_shared", [False, True])
def test_masks_of_keys_beside_biases(
    is_shared: bool, keys: int, dim: int, dtype: torch.dtype, in_order: bool
) -> None:
    """In deterministic mode blocks take turns at dQ. In every second batch keys 128 to 255 are
    masked, so a block has none."""
    batch = 3000 // dim  # a sum of dQ for each tile of keys would take 28 MB
    q, k, v = tensors("cuda", dtype, batch=batch, lengths=(200, keys), dims=dim)
    shape = (1 if is_shared else batch, 4, 200, keys)
    bias = normal(*shape, device="cuda", dtype=dtype, seed=4).requires_grad_()
    mask = coin(batch, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    mask[::2, ..., 128:256] = True
    mask[1] = True  # a batch sees nothing
    with deterministic(in_order, warn_only=True):
        check(q, k, v, bias=bias, what="bias")
        check(q, k, v, bias=bias, mask=mask, what="masked")
        check(q, k, v, bias=bias, mask=mask, causal=True, what="masked and causal")


@gpu
@pytest.mark.parametrize("sharing", ["batches", "all", "heads", "groups"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(32, 32), (24, 16), (8, 40), (64, 64)])
@pytest.mark.parametrize(
    "lengths", [(49, 49), (64, 64), (17, 1), (36, 60), (64, 9), (100, 81), (144, 144), (20, 130)]
)
def test_small_heads_that_share_a_bias(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, sharing: str
) -> None:
    """A block keeps the bias of a head, and takes several heads that share it."""
    queries, keys = lengths
    batch, heads = 60, 20  # without a bias, 1024 heads are the fewest
    q, k, v = tensors("cuda", dtype, batch=batch, heads=heads, lengths=lengths, dims=dims)
    shapes = {"batches": (1, heads), "all": (1, 1), "heads": (batch, 1), "groups": (6, heads)}
    shape = (*shapes[sharing], queries, keys)
    bias = normal(*shape, device="cuda", dtype=dtype, seed=4).requires_grad_()
    of_keys = coin(batch, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    of_keys[1] = True  # a batch sees nothing
    first = torch.randint(-9, keys, (batch, heads, queries), device="cuda", dtype=torch.int32)
    sink = normal(heads, device="cuda", seed=7).requires_grad_()
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "float32 bias": {"bias": bias.detach().float().requires_grad_(), "sink": sink},
        "bias of other strides": {"bias": bias.detach().mT.contiguous().mT.requires_grad_()},
        "frozen bias": {"bias": bias.detach()},
        "keys": {"mask": of_keys},
        "keys and window": {"mask": of_keys, "window": (20, 3), "sink": 0.5},
        "pairs": {"mask": coin(batch, 1, queries, keys, device="cuda"), "causal": True},
        "ranges": {"visible": (first, first + 30)},
        "no bias": {"bias": None},
        "no bias, keys": {"bias": None, "mask": of_keys, "sink": sink},
    }
    for what, options in cases.items():
        check(q, k, v, **{"bias": bias} | options, what=what)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(32, 32), (24, 16), (8, 32)])
@pytest.mark.parametrize(
    "lengths",
    [(200, 200), (384, 384), (130, 300), (60, 520), (333, 769), (400, 200), (64, 256), (63, 999)],
)
def test_gradients_of_whole_heads(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """A block takes several heads, each in one or more units of keys, if there are many heads."""
    queries, keys = lengths
    batch, heads = 66, 4
    q, k, v = tensors("cuda", dtype, batch=batch, heads=heads, lengths=lengths, dims=dims)
    bias = normal(1, heads, *lengths, device="cuda", dtype=dtype, seed=4).requires_grad_()
    of_keys = coin(batch, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    of_keys[1] = True  # a batch sees nothing
    padded = torch.arange(keys, device="cuda") >= torch.arange(batch, device="cuda")[:, None] * 5
    of_heads = coin(batch, heads, 1, keys, device="cuda", odds=0.9, seed=7)
    sink = normal(heads, device="cuda", seed=8).requires_grad_()
    cases: dict[str, dict[str, Any]] = {
        "all": {"bias": bias},
        "of other batches": {"bias": bias.detach().expand(3, -1, -1, -1).repeat_interleave(22, 0)},
        "frozen bias": {"bias": bias.detach(), "sink": sink},
        "keys": {"bias": bias, "mask": of_keys},
        "keys of heads": {"mask": of_heads},
        "padding": {"mask": padded[:, None, None], "sink": 0.5},
        "no bias": {},
        "bias of all heads": {"bias": bias.detach()[:, :1].requires_grad_()},
        "large logits": {"bias": bias, "scale": 20.0},
        "large logits without a bias": {"scale": 20.0, "sink": 300.0},
    }
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:  # H100 and H200
        sizes = {"keys": keys, "value_dim": dims[1], "backward": True}
        assert explain_attention(batch, heads, queries, dims[0], **sizes).several_heads
    for what, options in cases.items():
        check(q, k, v, **options, what=what)
    leaves = [each.detach().requires_grad_() for each in (q, k, v, bias)]
    leaves[1].data[of_keys[:, :, 0, :].expand(-1, heads, -1)] = torch.nan  # excluded keys

    def gradients() -> tuple[Tensor, ...]:
        output = attention(*leaves[:3], bias=leaves[3], mask=of_keys, fused=True)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    first = gradients()
    assert all(each.isfinite().all() for each in first)
    assert all(bits_equal(one, other) for one, other in zip(first, gradients(), strict=True))


def _padded(bias: Tensor, first: int) -> Tensor:
    """A view of rows of 16 more entries, from the one with this number on."""
    rows = torch.nn.functional.pad(bias, (first, 16 - first), value=torch.nan)
    return rows[..., first : first + bias.shape[-1]]


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "dims"),
    [
        *itertools.product(
            [
                *((200, 200), (250, 255), (384, 384), (140, 341), (150, 512), (300, 450)),
                *((150, 513), (250, 640), (130, 768), (140, 769), (200, 900), (250, 1023)),
                (130, 1024),
            ],
            [(32, 32), (24, 16), (8, 32)],
        ),
        *itertools.product(
            [(200, 200), (250, 255), (197, 256), (256, 230)], [(64, 64), (40, 64), (64, 48)]
        ),
    ],
)
def test_rows_that_share_a_bias(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Registers keep the bias of a block. Where logits are far from it, rows are computed anew."""
    queries, keys = lengths
    batch, heads = 128, 4
    q, k, v = tensors("cuda", dtype, batch=batch, heads=heads, lengths=lengths, dims=dims)
    bias = normal(1, heads, *lengths, device="cuda", dtype=dtype, seed=4)
    of_keys = coin(batch, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    of_keys[1] = True  # a batch sees nothing
    padded = torch.arange(keys, device="cuda") >= torch.arange(batch, device="cuda")[:, None] * 5
    far = bias + torch.linspace(-3000, 3000, queries, device="cuda", dtype=dtype)[:, None]
    rising = q * torch.linspace(0, 30, batch, device="cuda", dtype=dtype)[:, None, None, None]
    sink = normal(heads, device="cuda", seed=8)
    cases: dict[str, dict[str, Any]] = {
        "all": {"bias": bias.requires_grad_()},
        "of other batches": {"bias": bias.detach().expand(2, -1, -1, -1).repeat_interleave(64, 0)},
        "of two entries": {"bias": normal(2, heads, *lengths, device="cuda", dtype=dtype, seed=5)},
        "of all heads": {"bias": bias.detach()[:, :1]},
        "of rows that begin anywhere": {"bias": _padded(bias.detach(), 1)},
        "of rows further apart": {"bias": _padded(bias.detach(), 8)},
        "of infinities": {"bias": _with_infinities((1, heads, *lengths), "cuda", dtype)},
        "of the lowest": {"bias": _lowest((1, heads, *lengths), "cuda", dtype)},
        "far from 0": {"bias": far.detach()},
        "keys": {"bias": bias.detach(), "mask": of_keys},
        "keys of heads": {
            "bias": bias.detach(),
            "mask": coin(batch, heads, 1, keys, device="cuda", odds=0.9, seed=7),
        },
        "padding": {"bias": bias.detach(), "mask": padded[:, None, None], "sink": 0.5},
        "large logits": {"bias": bias.detach(), "scale": 20.0, "sink": sink},
        "large logits and keys": {"bias": bias.detach(), "scale": 20.0, "mask": of_keys},
    }
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:  # H100 and H200
        sizes = {"keys": keys, "value_dim": dims[1], "bias": True}
        assert explain_attention(batch, heads, queries, dims[0], **sizes).several_heads
    for what, options in cases.items():
        check(q, k, v, **options, what=what)
    check(rising, k, v, bias=bias.detach(), what="logits that rise from row to row")
    k[of_keys[:, :, 0, :].expand(-1, heads, -1)] = torch.nan  # excluded keys
    call = {"bias": bias.detach(), "mask": of_keys, "return_lse": True, "fused": True}
    first, again = (attention(q, k, v, **call) for _ in range(2))
    assert first[0].isfinite().all()
    assert all(bits_equal(one, other) for one, other in zip(first, again, strict=True))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_some_heads_are_cut_into_one_more_part(dtype: torch.dtype) -> None:
    batch, heads, queries, keys = 48, 16, 300, 250
    q, k, v = tensors("cuda", dtype, batch=batch, heads=heads, lengths=(queries, keys), dims=24)
    bias = normal(1, heads, queries, keys, device="cuda", dtype=dtype, seed=4)
    if torch.cuda.get_device_properties("cuda").multi_processor_count == 132:  # H100 and H200
        found = explain_attention(batch, heads, queries, 24, keys=keys, bias=True)
        assert found.blocks == 264  # of 3 tiles, for 8 heads in 5 parts and 8 in 6
    mask = coin(batch, 1, 1, keys, device="cuda", odds=0.3, seed=6)
    for options in ({}, {"mask": mask}):
        check(q, k, v, bias=bias, **options, what=str(list(options)))


@gpu
@pytest.mark.parametrize("tokens", [49, 100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_small_heads_do_not_share_what_is_no_number(tokens: int, has_bias: bool) -> None:
    """Nor what a head that sees nothing has: values that overflow, a gradient of the lse."""
    shape = {"batch": 60, "heads": 20, "lengths": tokens, "dims": 32}
    q, k, v = tensors("cuda", torch.bfloat16, **shape)
    v[1] = 3e38
    leaves = [q, k, v]
    if has_bias:
        leaves.append(normal(20, tokens, tokens, device="cuda", dtype=q.dtype, seed=4))
    for leaf in leaves:
        leaf.requires_grad_()
    bias = leaves[3] if has_bias else None
    mask = coin(60, 1, 1, tokens, device="cuda", odds=0.3, seed=6)
    mask[..., :1], mask[1] = False, True
    output, lse = attention(q, k, v, bias=bias, mask=mask, return_lse=True, fused=True)
    gradients = normal(*output.shape, device="cuda", dtype=output.dtype, seed=5)
    of_lse = torch.zeros_like(lse)
    expected = torch.autograd.grad((output, lse), leaves, (gradients, of_lse), retain_graph=True)
    of_lse[1] = torch.nan
    found = torch.autograd.grad((output, lse), leaves, (gradients, of_lse))
    assert all(bits_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(not gradient[1].any() for gradient in found[:3])


@gpu
@of_maskings
@pytest.mark.parametrize("bias_of", ["nothing", "keys", "pairs", "pairs of each batch", "table"])
@pytest.mark.parametrize(
    ("batch", "lengths", "dim"),
    [
        (300, (49, 49), 32),
        (300, (64, 64), 24),
        (300, (100, 197), 32),
        (140, (200, 330), 32),  # more blocks than run at a time
        (70, (200, 336), 48),  # Hopper's
        (70, (300, 520), 64),
        (16, (600, 336), 32),  # a sum for each tile of keys, Hopper's, just below 16 MB
        (20, (600, 336), 32),  # blocks of a head that begin together
        (8, (900, 330), 64),  # and clusters of 8 of them
        (40, (130, 300), 128),
        (20, (300, 400), 96),
        (70, (100, 150), 256),
        (4, (600, 700), 200),  # wide blocks wait for many others
        (70, (65, 150), 200),
        (2, (1500, 2000), 80),  # blocks wait for many others
        *((2, (200, 330), dim) for dim in (48, 96, 256)),  # on Hopper, a sum for each tile of keys
        (2, (40, 1500), 32),  # a launch for gradients of queries
    ],
)
def test_all_gradients_have_the_same_bits_in_deterministic_mode(
    batch: int, lengths: tuple[int, int], dim: int, bias_of: str, masking: str
) -> None:
    """Another order of additions would make other bits."""
    queries, keys = lengths
    shape = {"batch": batch, "heads": (4, 2), "lengths": lengths, "dims": dim}
    q, k, v = tensors("cuda", torch.bfloat16, **shape)
    sizes = {"keys": (1, 4, 1, keys), "pairs of each batch": (batch, 4, *lengths)}
    sizes["table"] = (4, queries + keys - 1)
    size = sizes.get(bias_of, (1, 4, *lengths))
    entries = normal(*size, device="cuda", dtype=torch.bfloat16, seed=4)
    leaves = [each.requires_grad_() for each in (q, k, v, entries)]
    bias: Any = RelativeBias(entries) if bias_of == "table" else entries
    if bias_of == "nothing":
        leaves.pop()
        bias = None
    first = torch.randint(-9, keys, (batch, 4, queries), device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {
        "none": {},
        "causal": {"causal": True},
        "keys": {"mask": coin(batch, 1, 1, keys, device="cuda")},
        "pairs": {"mask": coin(batch, 1, *lengths, device="cuda", odds=0.98)},
        "window": {"window": (90, 20)},
        "ranges": {"visible": (first, first + 90)},
        "dropout": {"dropout": 0.3},
    }[masking]
    with deterministic(True, warn_only=True):
        torch.manual_seed(3)
        output = attention(q, k, v, bias=bias, fused=True, **options)
        in_order = assert_same_gradients(output, leaves, 6)
    gradient = normal(*output.shape, device="cuda", dtype=output.dtype, seed=5)
    in_any_order = torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    for found, other in zip(in_order, in_any_order, strict=True):
        scale = found.float().abs().max().item()
        torch.testing.assert_close(found, other, rtol=0.02, atol=0.02 * scale)


@gpu
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("keys", [1, 100, 9000])
def test_decoding_in_small_blocks(keys: int, queries: int, dim: int) -> None:
    """Blocks have half as many warps there."""
    with attention_kernels("small"):
        lengths = (queries, keys)
        q, k, v = tensors("cuda", torch.bfloat16, heads=(8, 2), lengths=lengths, dims=dim)
        check(q, k, v, causal=True)
        bias = normal(1, 8, queries, keys, device="cuda", dtype=torch.bfloat16, seed=4)
        check(q, k, v, bias=bias.requires_grad_(), what="bias")


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("keys", [17, 1000, 4000, 33000])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (16, 1)])
def test_decoding(heads: tuple[int, int], keys: int, queries: int, dtype: torch.dtype) -> None:
    for dims in ((128, 128), (64, 64)):
        q, k, v = tensors("cuda", dtype, batch=1, heads=heads, lengths=(queries, keys), dims=dims)
        check(q, k, v, causal=True, what=f"{dims}")
        bias = normal(1, heads[0], 1, keys, device="cuda", dtype=dtype, seed=4)
        mask = coin(1, 1, 1, keys, device="cuda")
        check(q, k, v, bias=bias.requires_grad_(), mask=mask, sink=0.5, what=f"{dims}, bias")
        check(q, k, v, causal=True, window=(300, 0), what=f"{dims}, window")


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [40, 64, 128, 200])
@pytest.mark.parametrize("lengths", [(17, 1500), (64, 4001), (100, 9000), (193, 2304)])
def test_blocks_share_the_keys_of_queries(
    lengths: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    """More queries than decoding has, but too few for a GPU."""
    queries, keys = lengths
    if dtype == torch.float32 and dim > 128:
        pytest.skip("not fused")
    assert explain_attention(1, 4, queries, dim, keys=keys, dtype=dtype).splits > 1
    q, k, v = tensors("cuda", dtype, batch=1, heads=(4, 2), lengths=lengths, dims=dim)
    check(q, k, v)
    check(q, k, v, causal=True, sink=0.5)
    check(q, k, v, window=(1100, 3), what="window")
    mask = coin(1, 4, queries, keys, device="cuda")
    mask[..., 256:1280] = True  # some splits see nothing
    mask[:, 1, 5] = True  # and a query
    check(q, k, v, mask=mask, what="mask")
    first = torch.randint(-9, keys, (1, 4, queries), device="cuda", dtype=torch.int32)
    check(q, k, v, visible=(first, first + 700), what="ranges")
    bias = normal(1, 4, queries, keys, device="cuda", dtype=dtype, seed=4).requires_grad_()
    check(q, k, v, bias=bias, causal=True, what="bias")
    check(q, k, v, bias=bias.detach().float().requires_grad_(), mask=mask, what="float32 bias")
    table = _table("16 bits", *lengths, dtype).requires_grad_()
    check(q, k, v, bias=RelativeBias(table), sink=0.5, what="table")
    large = bias.detach().masked_fill(mask, torch.finfo(dtype).min).requires_grad_()
    check(q, k, v, bias=large, what="large bias")


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 64, 128, 200])
@pytest.mark.parametrize(
    "lengths", [(1, 600), (1, 1030), (2, 1500), (5, 700), (16, 2111), (1, 9000)]
)
def test_decoding_adds_up_parts(lengths: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """In clusters, or blocks that wait for each other; some see nothing, or lack rows."""
    q, k, v = tensors("cuda", dtype, batch=2, heads=(6, 2), lengths=lengths, dims=dim)
    check(q, k, v)
    check(q, k, v, causal=True, sink=0.5)
    check(q, k, v, window=(300, 2), what="window")
    mask = coin(2, 6, *lengths, device="cuda")
    mask[..., :512] = True  # some splits see nothing
    mask[:, 1, 0] = True  # and a query
    check(q, k, v, mask=mask, what="mask")
    bias = normal(1, 6, *lengths, device="cuda", dtype=dtype, seed=4)
    check(q, k, v, bias=bias.requires_grad_(), mask=mask, what="bias")
    with torch.no_grad():
        found = [attention(q, k, v, fused=True) for _ in range(2)]
    assert bits_equal(*found)


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [8, 9, 17, 33, 64, 65])
@pytest.mark.parametrize("heads", [(2, 1), (6, 2), (5, 1), (8, 1)])
def test_heads_that_share_keys(heads: tuple[int, int], queries: int, dim: int) -> None:
    """On Hopper they share a block, a warpgroup each, up to 64 queries; some have none."""
    for batch, keys in ((40, 90), (2, 700), (1, 5000)):
        sizes: dict[str, Any] = {"batch": batch, "heads": heads, "lengths": (queries, keys)}
        q, k, v = tensors("cuda", torch.bfloat16, **sizes, dims=dim)
        check(q, k, v, what=f"{keys} keys")
        sink = normal(heads[0], device="cuda", seed=4).requires_grad_()
        check(q, k, v, window=(60, 0), sink=sink, what=f"{keys} keys, window")


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [(576, 512), (288, 40), (24, 320)])
@pytest.mark.parametrize("heads", [(128, 1), (6, 2)])
@pytest.mark.parametrize("lengths", [(1, 31), (1, 5000), (3, 700), (70, 200), (9, 0)])
def test_wide_heads_of_inference(
    lengths: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of latent attention: values may be the first columns of keys."""
    major, _ = acted_capability() or torch.cuda.get_device_capability()
    if major not in (9, 10):
        pytest.skip("its blocks need the shared memory of 9.0 and 10.x")
    queries, keys = lengths
    query, key, value = tensors("cuda", dtype, batch=2, heads=heads, lengths=lengths, dims=dims)
    mask = coin(2, heads[0], queries, keys, device="cuda")
    mask[:, 1, 0] = True  # a query sees nothing
    blocks = coin(1, 1, -(-queries // 64), -(-keys // 64), device="cuda")
    first = torch.randint(-9, keys + 9, (2, 1, queries), device="cuda", dtype=torch.int32)
    bias = normal(1, heads[0], queries, keys, device="cuda", dtype=dtype, seed=4)
    sink = normal(heads[0], device="cuda", seed=5)
    values = [value] if dims[0] < dims[1] else [value, key[..., : dims[1]]]
    for value, options in itertools.product(
        values,
        (
            {},
            {"causal": True, "sink": sink},
            {"window": (40, 3)},
            {"mask": mask},
            {"mask": megasoftmax.TileMask.from_blocks(blocks, 64)},
            {"visible": (first, first + 100)},
            {"bias": bias, "mask": mask, "sink": 0.5},
        ),
    ):
        with torch.no_grad():
            found, lse = attention(query, key, value, **options, return_lse=True, fused=True)
            wanted, wanted_lse = attention(
                *(tensor.float() for tensor in (query, key, value)),
                **(options | ({"bias": bias.float()} if "bias" in options else {})),
                return_lse=True,
                fused=False,
            )
        torch.testing.assert_close(found.float(), wanted, **closeness(dtype))
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


@gpu_with_all_kernels
def test_splits_drop_what_whole_rows_drop() -> None:
    """Of keys that are split, those that a call of many batches keeps whole."""
    q, k, v = tensors("cuda", torch.bfloat16, batch=1, heads=2, lengths=(40, 3000), dims=64)
    seed = torch.tensor([3], device="cuda")
    function = functools.partial(megasoftmax.attention, scale=0.5, dropout=0.4, seed=seed)
    split = function(q, k, v, fused=True)
    torch.testing.assert_close(split, function(q, k, v, fused=False), rtol=0.02, atol=0.02)


@gpu
@pytest.mark.parametrize("planted", [NAN, INF])
@pytest.mark.parametrize("queries", [1, 40])
def test_splits_keep_what_is_no_number(queries: int, planted: float) -> None:
    """In a row that sees it, wherever its split is; and in no other row."""
    q, k, v = tensors("cuda", torch.float16, batch=1, heads=2, lengths=(queries, 6000), dims=64)
    bias = torch.zeros(1, 2, queries, 6000, device="cuda", dtype=torch.float16)
    bias[:, 1, -1, 4321] = planted
    output, lse = attention(q, k, v, bias=bias, return_lse=True, fused=True)
    assert output[0, 1, -1].isnan().all()
    assert lse[0, 1, -1].isnan()
    output[0, 1, -1] = lse[0, 1, -1] = 0
    assert output.isfinite().all()
    assert lse.isfinite().all()


def _table(kind: str, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Of 4 heads, where heads do not share it."""
    entries = queries + keys - 1
    shape = {"one": (1, entries), "per batch": (2, 4, entries)}.get(kind, (4, entries))
    if kind == "float32":
        dtype = torch.float32
    if kind == "every third entry":
        return normal(4, 3 * entries, device="cuda", dtype=dtype, seed=4)[:, 1::3]
    if kind == "heads last":
        return normal(entries, 4, device="cuda", dtype=dtype, seed=4).T
    return normal(*shape, device="cuda", dtype=dtype, seed=4)


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims", [*((d, d) for d in (32, 40, 64, 72, 96, 128, 160, 256)), (192, 128)]
)
@pytest.mark.parametrize(
    "lengths", [(17, 1), (63, 65), (129, 127), (192, 128), (193, 391), (448, 64), (130, 900)]
)
def test_tables_over_any_number_of_tiles(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """At the ends of tiles of 64, 128 and 192 queries and of 64 and 128 keys."""
    q, k, v = tensors("cuda", dtype, lengths=lengths, dims=dims)
    limits: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (70, 3)})
    for kind in ("16 bits", "float32", "one", "per batch", "every third entry", "heads last"):
        bias = RelativeBias(_table(kind, *lengths, dtype).requires_grad_())
        for limit in limits if kind == "float32" else limits[:1]:
            check(q, k, v, bias=bias, **limit, what=f"{kind}, {limit}")
        if kind == "16 bits":
            mask = coin(2, 1, *lengths, device="cuda")
            check(q, k, v, bias=bias, mask=mask, sink=0.5, what=f"{kind}, mask")


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [(192, 128), (192, 64), (160, 128), (136, 96)])
@pytest.mark.parametrize("lengths", [(64, 64), (520, 520), (300, 777), (777, 300)])
def test_values_of_fewer_columns(
    lengths: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Tiles of which have room for more keys. Of dQ the last columns are made in turn."""
    for heads in ((4, 4), (6, 2)):
        q, k, v = tensors("cuda", dtype, heads=heads, lengths=lengths, dims=dims)
        for limits in ({}, {"causal": True}, {"window": (70, 3)}):
            check(q, k, v, **limits, what=f"{heads}, {limits}")
        mask = coin(2, 1, *lengths, device="cuda")
        check(q, k, v, causal=True, mask=mask, sink=0.5, what=f"{heads}, mask")


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [64, 128])
def test_tables_of_grouped_heads(dim: int) -> None:
    """A block of keys takes the queries of several heads in turn. Their tables differ.

    A mask leaves some tiles of queries out, and all of the second block of keys.
    """
    q, k, v = tensors("cuda", torch.bfloat16, heads=(6, 2), lengths=(300, 260), dims=dim, batch=4)
    tiles = coin(4, 1, 5, 5, device="cuda").repeat_interleave(64, 2).repeat_interleave(64, 3)
    tiles = tiles[..., :300, :260]
    tiles[..., 128:256] = True
    for shape in ((6, 559), (2, 6, 559), (2, 1, 559), (4, 6, 559)):
        bias = normal(*shape, device="cuda", dtype=torch.bfloat16, seed=4).requires_grad_()
        check(q, k, v, bias=RelativeBias(bias), causal=True, what=f"{shape}")
        check(q, k, v, bias=RelativeBias(bias), mask=tiles, sink=0.5, what=f"{shape}, mask")


@gpu_with_all_kernels
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [32, 48, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "bias", "lengths", "options"),
    [
        (4, (2, 2), (1, 2), (300, 328), {}),
        (2, (2, 1), (1, 2), (130, 264), {"causal": True}),
        (3, (2, 2), (3, 2), (200, 200), {"causal": True}),
        (2, (4, 2), (2, 4), (333, 256), {}),
        (4, (4, 2), (2, 1), (128, 136), {}),
        (2, (4, 4), (2, 1), (128, 128), {}),
        (4, (4, 4), (1, 4), (512, 512), {"window": (100, 0)}),
        (8, (3, 3), (2, 3), (257, 520), {}),
        (8, (2, 1), (1, 2), (400, 392), {"window": (100, 0)}),
        (4, (4, 2), (1, 4), (700, 264), {"window": (64, 64)}),
        (2, (2, 1), (1, 2), (100, 520), {"window": (50, 0)}),
        (4, (2, 2), (2, 2), (1100, 24), {"causal": True}),
        (4, (1, 1), (1, 1), (17, 1032), {"causal": True}),
        (6, (2, 2), (1, 2), (190, 136), {"causal": True}),
    ],
)
def test_dense_biases_of_batches_and_heads(
    batch: int,
    heads: tuple[int, int],
    bias: tuple[int, int],
    lengths: tuple[int, int],
    options: dict[str, Any],
    dim: int,
    dtype: torch.dtype,
) -> None:
    """16-bit biases that batches, or heads, or none share, with rows that tensor copies take."""
    q, k, v = tensors("cuda", dtype, heads=heads, lengths=lengths, dims=dim, batch=batch)
    values = normal(*bias, *lengths, device="cuda", dtype=dtype, seed=4).requires_grad_()
    check(q, k, v, bias=values, **options, what=f"{bias}")
    mask = coin(batch, 1, *lengths, device="cuda")
    mask[..., 64:128] = True
    check(q, k, v, bias=values, **options, mask=mask, what=f"{bias}, mask")


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [48, 64, 96, 128])
@pytest.mark.parametrize("lengths", [(500, 500), (200, 1100), (1300, 1300)])
def test_windows_without_a_right_end(lengths: tuple[int, int], dim: int) -> None:
    """On Hopper warpgroups take turns at tiles of keys, also at those that they pass."""
    q, k, v = tensors("cuda", torch.bfloat16, heads=2, lengths=lengths, dims=dim)
    check(q, k, v, window=(100, -1))


# Calls whose backward pass has row workers: a shape, and other arguments.
WITH_ROW_WORKERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": ({"batch": 10, "heads": 4, "lengths": (801, 777), "dims": 64}, {}),
    "grouped": ({"batch": 16, "heads": (8, 4), "lengths": 640, "dims": 128}, {"causal": True}),
    "window": ({"batch": 5, "heads": 4, "lengths": 2000, "dims": 128}, {"window": (500, 20)}),
    "softcap": ({"batch": 30, "heads": 4, "lengths": (450, 400), "dims": 128}, {"softcap": 5.0}),
    "narrow values": ({"batch": 12, "heads": 6, "lengths": (513, 600), "dims": (80, 72)}, {}),
    "narrow heads": ({"batch": 8, "heads": 4, "lengths": 1119, "dims": (40, 24)}, {"sink": 0.5}),
}


@gpu_with_all_kernels
@pytest.mark.parametrize("name", WITH_ROW_WORKERS)
@pytest.mark.parametrize("in_order", [False, True])
def test_row_workers(name: str, in_order: bool, kernels: str) -> None:
    """Gradients of keys and values have the bits of a call of two batches, without row workers."""
    shape, options = WITH_ROW_WORKERS[name]
    q, k, v = tensors("cuda", torch.bfloat16, **shape)
    batch, heads, queries, head_dim = q.shape
    key_heads, keys = k.shape[1:3]
    call = {name: options[name] for name in options.keys() & {"causal", "window"}}
    for size in (batch, 2):
        sizes = {"keys": keys, "key_heads": key_heads, "value_dim": v.shape[3]}
        found = explain_attention(
            size, heads, queries, head_dim, **sizes, **call, softcap="softcap" in options,
            backward=True, deterministic=in_order,
        )  # fmt: skip
        assert ("row work of other heads" in found.why) == (size == batch)
    mask, of_heads = (coin(batch, n, 1, keys, device="cuda") for n in (1, heads))
    mask[batch // 2] = of_heads[batch // 2] = True
    calls = {"": options, "mask": options | {"mask": mask}, "heads": options | {"mask": of_heads}}
    if not options:
        calls["bias of queries"] = {"bias": normal(batch, heads, queries, 1, device="cuda")}
    few, everything = slice(batch - 2, batch), (q, k, v)
    leaves = [each.requires_grad_() for each in everything]
    of_few = [each.detach()[few].requires_grad_() for each in everything]
    g = normal(batch, heads, queries, v.shape[3], device="cuda", dtype=q.dtype, seed=5)
    for what, given in calls.items():
        with deterministic(in_order):
            check(q, k, v, **given, what=what)
            output = attention_on("cuda", q.dtype)(*leaves, **given)
            if in_order:
                assert_same_gradients(output, leaves, 3, what)
                continue
            given_few = {n: x[few] if torch.is_tensor(x) else x for n, x in given.items()}
            output_of_few = attention_on("cuda", q.dtype)(*of_few, **given_few)
            expected = torch.autograd.grad(output_of_few, of_few, g[few])
            for _ in range(3):
                found = torch.autograd.grad(output, leaves, g, retain_graph=True)
                torch.testing.assert_close(found[0][few], expected[0], **closeness(q.dtype))
                if kernels == "own" and what != "heads":
                    assert bits_equal(found[1][few], expected[1]), what
                    assert bits_equal(found[2][few], expected[2]), what


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_biases_that_batches_share_have_the_same_bits_each_time(
    dim: int, batch: int, causal: bool
) -> None:
    """Also without torch.use_deterministic_algorithms: blocks of a cluster sum in order."""
    major, _ = acted_capability() or torch.cuda.get_device_capability()
    if major != 9:
        pytest.skip("clusters sum on Hopper alone")
    q, k, v = tensors("cuda", torch.bfloat16, heads=8, lengths=(1000, 904), dims=dim, batch=batch)
    bias = normal(1, 8, 1000, 904, device="cuda", dtype=q.dtype, seed=4).requires_grad_()
    output = attention_on("cuda", q.dtype)(q, k, v, bias=bias, causal=causal)
    (found,) = assert_same_gradients(output, [bias], 10)
    assert found.abs().max() > 0
    # It is the sum of the gradients of a bias that nothing shares, which are rounded alike.
    own = bias.detach().expand(batch, -1, -1, -1).contiguous().requires_grad_()
    output = attention_on("cuda", q.dtype)(q, k, v, bias=own, causal=causal)
    gradient = normal(*output.shape, device="cuda", dtype=output.dtype, seed=5)
    expected = torch.autograd.grad(output, own, gradient)[0].float().sum(0, keepdim=True)
    tiny = 1e-6 * expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=tiny)


@gpu
@pytest.mark.parametrize("heads", [4, 48])  # above 32, blocks take one tile, or several
@pytest.mark.parametrize("dim", [32, 48, 64])
def test_gradients_of_shared_biases_have_the_same_bits_each_time(dim: int, heads: int) -> None:
    """Also without torch.use_deterministic_algorithms, except with dropout; in parts or not."""
    major, _ = acted_capability() or torch.cuda.get_device_capability()
    if major != 9:
        pytest.skip("Hopper's launch alone serves these in any mode")
    batch, queries, keys = (70 if heads == 4 else 9), 380, 500
    lengths = queries, keys
    q, k, v = tensors("cuda", torch.bfloat16, heads=heads, lengths=lengths, dims=dim, batch=batch)
    shape = (1, heads, queries, keys)
    bias = normal(*shape, device="cuda", dtype=q.dtype, seed=4).requires_grad_()
    first = torch.randint(-9, keys, (batch, heads, queries), device="cuda", dtype=torch.int32)
    blocks = coin(batch, 1, 2, 4, device="cuda", odds=0.5, seed=6)  # of 190 queries, 125 keys
    pairs = blocks.repeat_interleave(190, 2).repeat_interleave(125, 3)
    of_keys = coin(batch, 1, 1, keys, device="cuda")
    tiles = coin(batch, 1, 6, 8, device="cuda", odds=0.4, seed=7)
    tiles[:, :, 2:4, 2:4] = True  # a tile of the launch, for all batches
    all_pairs = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :queries, :keys]
    cases: dict[str, dict[str, Any]] = {
        "all": {},
        "keys": {"mask": of_keys},
        "causal": {"causal": True},
        "window": {"window": (40, 3)},
        "keys and window": {"mask": of_keys, "window": (40, 3)},
        "pairs": {"mask": pairs | coin(batch, 1, queries, keys, device="cuda")},
        "ranges": {"visible": (first, first + 40), "causal": True},
        "tiles": {"mask": all_pairs},
        "tiles without bits": {"mask": megasoftmax.TileMask.from_blocks(tiles, 64)},
        "dropout": {"dropout": 0.2},
    }
    gradients: dict[str, Tensor] = {}
    for what, options in cases.items():
        output = attention_on("cuda", q.dtype)(q, k, v, bias=bias, **options)
        (found,) = assert_same_gradients(output, [bias], 1 if what == "dropout" else 5)
        with deterministic(True):
            if what not in ("tiles without bits", "dropout"):
                check(q, k, v, bias=bias, **options, what=what)
            (in_order,) = assert_same_gradients(output, [bias], 5)
        if what != "dropout":
            assert bits_equal(found, in_order), what
        most = found.abs().max().item()
        assert most > 0
        torch.testing.assert_close(found, in_order, rtol=0.02, atol=0.02 * most, msg=what)
        gradients[what] = found
    of_bits, of_tiles = gradients["tiles"], gradients["tiles without bits"]
    torch.testing.assert_close(of_tiles, of_bits, rtol=0.02, atol=0.02 * of_bits.abs().max().item())


@gpu_with_all_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_gradients_of_tables_are_infinite_at_distances_of_such_a_query_alone(
    dim: int, value: float
) -> None:
    """Hopper's kernels sum them by products with ones and zeros, and 0 * inf is no number."""
    q, k, v = tensors("cuda", torch.bfloat16, heads=1, lengths=300, dims=dim, batch=1)
    table = normal(1, 599, device="cuda", seed=4).requires_grad_()
    output = attention_on("cuda", q.dtype)(q, k, v, bias=RelativeBias(table), causal=True)
    gradient = normal(*output.shape, device="cuda", dtype=output.dtype, seed=5)
    gradient[0, 0, 101, 3] = value
    found = torch.autograd.grad(output, table, gradient)[0][0]
    distance = torch.arange(599, device="cuda") - 299
    assert ((distance <= 0) & (distance >= -101) == ~found.isfinite()).all()


@gpu
@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("dim", [32, 33, 128, 129, 256])
def test_kernels_are_those_that_were_asked_for(dim: int, has_table: bool, kernels: str) -> None:
    """By their names: else tests of all kinds could test one of them twice."""
    given = tensors("cuda", torch.bfloat16, lengths=70, dims=dim)
    inputs, bias = [each.requires_grad_() for each in given], None
    if has_table:
        inputs.append(normal(4, 139, device="cuda", seed=4).requires_grad_())
        bias = RelativeBias(inputs[-1])
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        output = attention_on("cuda", torch.bfloat16)(*inputs[:3], bias=bias)
        torch.autograd.grad(output, inputs, torch.randn_like(output))
        torch.cuda.synchronize()
    names = " ".join({event.name for event in profiler.events()})
    major, minor = acted_capability() or torch.cuda.get_device_capability()
    has_small_blocks = kernels == "small" or (major, minor) in ((8, 6), (8, 9), (12, 0))
    widest = {"forward": 256, "backward": 128 if has_table else 256}
    # Rows of the tables in limits.h: in large blocks, and in small ones.
    rows = {
        "forward": {32: (0, 0), 33: (1, 1), 128: (2, 2), 129: (3, 4), 256: (3, 4)},
        "backward": {32: (0, 0), 33: (1, 1), 128: (2, 3), 129: (4, 5), 256: (4, 5)},
    }
    for direction, of_dim in rows.items():
        is_hopper = major == 9 and kernels == "own" and 32 < dim <= widest[direction]
        kind = "wide_backward" if direction == "backward" and dim > 128 else direction
        assert (f"attention_hopper_{kind}_kernel" in names) == is_hopper
        found = re.findall(rf"attention_{direction}_kernel<[^>]*, (\d+)>", names)
        assert [int(row) for row in found] == ([] if is_hopper else [of_dim[dim][has_small_blocks]])


@pytest.mark.parametrize("block", [1, 7, 40, 130, 1000])
@pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 1)])
def test_blocks_of_the_reference(
    heads: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many logits exist at a time, and along whatever they are cut."""
    monkeypatch.setattr(reference.attention, "BLOCK", block)
    q, k, v = tensors("cpu", batch=4, heads=heads, lengths=(5, 7))
    shapes = [(4, 6, 5, 7), (2, 6, 5, 7), (1, 6, 5, 1), (2, 1, 1, 7), (1, 1, 5, 7), (2, 6, 1, 1)]
    tables = [(1, 11), (6, 11), (4, 6, 11), (2, 6, 11), (2, 1, 11)]
    sink = normal(6, device="cpu", seed=6).requires_grad_()
    limits = {"mask": coin(4, 1, 5, 7, device="cpu"), "causal": True, "window": (4, 1)}
    for shape in (*shapes, *tables):
        bias: Any = normal(*shape, device="cpu", seed=4).requires_grad_()
        bias = RelativeBias(bias) if shape in tables else bias
        check(q, k, v, bias=bias, sink=sink, **limits, what=f"(bias {shape})")


def test_blocks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.attention, "BLOCK", 1000)
    calls = record_calls(monkeypatch, "softmax", torch)
    q, k, v = tensors("cpu", batch=3, heads=(4, 2), lengths=90)
    bias = RelativeBias(normal(4, 179, device="cpu"))
    attention(q, k, v, bias=bias, causal=True, fused=False)
    sizes = [scores.numel() for (scores, _), _ in calls]
    assert max(sizes) <= 1000
    assert sum(sizes) == 3 * 4 * 90 * 90


def _with_row(value: float) -> Tensor:
    """A bias of random numbers, in which one row of a head is all `value`."""
    bias = normal(4, 5, 7, device="cpu", seed=4)
    bias[1, 2] = value
    return bias


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": -0.3},
        {"scale": 0.0},
        {"causal": True},
        {"window": (1, 0)},
        {"mask": coin(2, 1, 5, 7, device="cpu", odds=0.8)},
        {"mask": torch.ones(5, 1, dtype=torch.bool).triu(), "sink": -INF},
        *({"bias": _with_row(value)} for value in (0.0, -INF, INF, NAN)),
        *({"bias": _with_row(-INF), "sink": sink} for sink in (-INF, 0.5, 90.0, INF)),
        {"bias": normal(4, 11, device="cpu", seed=4), "causal": True},
        {"bias": _with_row(-INF).double(), "window": (2, 1)},
        {"bias": _with_row(-INF), "sink": torch.tensor([0.5, -INF, 9.0, INF])},
        {"bias": _with_row(NAN), "mask": coin(5, 7, device="cpu"), "dropout": 0.4},
        {"dropout": 0.4, "sink": 0.5},
    ],
)
@pytest.mark.parametrize("key", [1.0, INF, NAN])
@pytest.mark.parametrize("lengths", [(5, 7), (5, 0)])
def test_in_place_or_not(
    lengths: tuple[int, int], key: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference computes the same where it may change nothing in place."""
    queries, keys = lengths
    q, k, v = tensors("cpu", heads=(4, 2), lengths=lengths)
    k[0, :, 3:4, 0] = key
    names = ("bias", "sink")
    learned = {name: each for name in names if isinstance(each := options.get(name), Tensor)}
    if "bias" in learned:
        is_table = learned["bias"].dim() == 2
        learned["bias"] = learned["bias"][..., : queries + keys - 1 if is_table else keys]
    options = options | {"seed": torch.tensor([7])}
    if isinstance(options.get("mask"), Tensor):
        options["mask"] = options["mask"][..., :keys]

    def both_passes(may_overwrite: bool) -> list[Tensor]:
        if not may_overwrite:
            monkeypatch.setattr(reference.attention, "may_overwrite", lambda *tensors: False)
        leaves = [each.clone().requires_grad_() for each in (q, k, v, *learned.values())]
        given: dict[str, Any] = options | dict(zip(learned, leaves[3:], strict=True))
        if "bias" in learned and is_table:
            given["bias"] = RelativeBias(given["bias"])
        output, lse = attention(*leaves[:3], **given, return_lse=True, fused=False)
        incoming = [normal(*each.shape, device="cpu", seed=5) for each in (output, lse)]
        of_output = torch.autograd.grad(output, leaves, incoming[0], retain_graph=True)
        of_both = torch.autograd.grad((output, lse), leaves, incoming)
        return [output, lse, *of_output, *of_both]

    found, expected = both_passes(may_overwrite=True), both_passes(may_overwrite=False)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


# Rows with nothing left


@pytest.mark.parametrize("sink", [None, 0.5, "tensor"])
@pytest.mark.parametrize("by", ["mask", "bias", "mask of keys", "causal"])
def test_rows_with_nothing_left(by: str, sink: Any, device: str) -> None:
    for dtype in dtypes_on(device):
        lengths = (70, 67) if device == "cuda" else (9, 6)
        dims = (64, 64) if device == "cuda" else (8, 8)
        q, k, v = tensors(device, dtype, lengths=lengths, dims=dims)
        m, n = lengths
        arguments: dict[str, Any] = {}
        empty = torch.zeros(2, 4, m, dtype=torch.bool, device=device)
        if by == "mask":
            arguments["mask"] = coin(2, 1, m, n, device=device)
            arguments["mask"][0, :, 1:3] = True
            empty[0, :, 1:3] = True
        elif by == "mask of keys":
            arguments["mask"] = torch.zeros(2, 1, 1, n, dtype=torch.bool, device=device)
            arguments["mask"][1] = True
            empty[1] = True
        elif by == "bias":
            bias = normal(1, 4, m, n, device=device, dtype=dtype, seed=4)
            bias[:, 2, 4] = -INF
            arguments["bias"] = bias.requires_grad_()
            empty[:, 2, 4] = True
        else:
            arguments["causal"] = True
            empty[:, :, : m - n] = True
        logit = normal(4, device=device, dtype=dtype, seed=6).requires_grad_()
        arguments["sink"] = logit if sink == "tensor" else sink
        found = check(q, k, v, **arguments)
        assert (found["output"].movedim(-1, 0)[:, empty] == 0).all()
        assert (found["query"].movedim(-1, 0)[:, empty] == 0).all()
        if sink is None:
            assert (found["lse"][empty] == -INF).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(0, 8), (0, 1024), (1024, 0)])
def test_no_small_heads(batch: int, heads: int, has_bias: bool, device: str) -> None:
    inputs = [torch.ones(batch, heads, 49, 32, device=device, dtype=torch.bfloat16)] * 3
    leaf = torch.ones(49, 49, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = leaf if has_bias else None
    for each in inputs:
        each.requires_grad_()
    output = attention(*inputs, bias=bias, fused=True if device == "cuda" else None)
    assert output.shape == (batch, heads, 49, 32)
    output.sum().backward()
    assert leaf.grad is None or not leaf.grad.any()


@pytest.mark.parametrize(
    "shape",
    [
        *({"lengths": lengths} for lengths in ((0, 3), (3, 0), (0, 0), (1, 0), (0, 1))),
        *({"batch": 0}, {"heads": 0}, {"heads": (0, 2)}, {"dims": (0, 8)}, {"dims": (8, 0)}),
    ],
    ids=str,
)
def test_sizes_of_zero(shape: dict[str, Any], device: str) -> None:
    """No gradient reaches what no query meets."""
    m, n = shape.get("lengths", (5, 13))
    for dtype, q, k, v in in_types(device, **shape):
        h = q.shape[1]
        shapes: list[Any] = [None]
        if "lengths" in shape:
            shapes += [(2, 4, m, n), (4, 1, 1), (4, max(m + n - 1, 0))]
        elif "batch" in shape or h != k.shape[1] * 2:
            shapes += [(1, h, m, n), (1, h, 1, n), (1, h, m, 1), (1, h, m + n - 1)]
        for of_bias, sink in itertools.product(shapes, (None, 0.5)[: 1 + ("lengths" in shape)]):
            inputs = [each.detach().requires_grad_() for each in (q, k, v)]
            bias: Any = None
            if of_bias is not None:
                bias = normal(*of_bias, device=device, dtype=dtype).requires_grad_()
                inputs.append(bias)
                is_table = len(of_bias) == (2 if "lengths" in shape else 3)
                bias = RelativeBias(bias) if is_table else bias
            function = attention_on(device, dtype)
            output, lse = function(*inputs[:3], bias=bias, sink=sink, return_lse=True)
            assert output.shape == (*q.shape[:-1], v.shape[-1])
            if "lengths" in shape:
                assert (output == 0).all()
                assert torch.equal(lse, torch.full_like(lse, -INF if sink is None else sink))
            found = torch.autograd.grad(output.sum(), inputs)
            assert [each.shape for each in found] == [each.shape for each in inputs]
            if shape == {"dims": (0, 8)}:  # all logits are 0
                mean = v.float().mean(2, keepdim=True).repeat_interleave(2, 1)
                mean = mean.expand(output.shape)
                torch.testing.assert_close(output.float(), mean, rtol=0.01, atol=0.01)
                torch.testing.assert_close(lse, torch.full_like(lse, 13).log())
            else:
                assert not any(gradient.any() for gradient in found)


def test_sinks_of_either_infinity(device: str) -> None:
    for dtype, q, k, v in in_types(device):
        plain, plain_lse = attention_on(device, dtype)(q, k, v, return_lse=True)
        for sink in (-INF, torch.full((4,), -INF, device=device)):
            output, lse = attention_on(device, dtype)(q, k, v, sink=sink, return_lse=True)
            torch.testing.assert_close(output, plain)
            torch.testing.assert_close(lse, plain_lse)
        for sink in (INF, NAN):
            output, lse = attention_on(device, dtype)(q, k, v, sink=sink, return_lse=True)
            assert output.isnan().all()
            assert lse.isnan().all()


# NaN and infinities


def test_sinks_of_minus_infinity_have_no_gradient(device: str) -> None:
    """In rows of NaN too, whose other sinks have NaN."""
    for dtype, q, k, v in in_types(device):
        scores = normal(2, 4, 5, 7, device=device, dtype=dtype, seed=4)
        q[0, :, 2], scores[0, :, 2, 3] = NAN, NAN
        sink = torch.tensor([-INF, 0, 1, -INF], device=device).requires_grad_()
        of_attention = attention_on(device, dtype)(q, k, v, sink=sink)
        for output in (of_attention, megasoftmax.softmax(scores, sink=sink)):
            weights = torch.randn_like(output)
            (gradient,) = torch.autograd.grad((output * weights).sum(), sink)
            assert gradient[[0, 3]].eq(0).all()
            assert gradient[[1, 2]].isnan().all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("by", ["mask", "mask of keys", "causal", "window"])
def test_excluded_is_zero_whatever_stands_there(by: str, value: float, device: str) -> None:
    """What an excluded key and its bias hold reaches nothing but the gradient of that key.

    On a CPU this is a test of the reference. Torch's attention has other last bits, and the
    reference computes a call again whose excluded scores are NaN.
    """
    for dtype in dtypes_on(device):
        attention = attention_on(device, dtype)
        if device == "cpu":
            attention = functools.partial(megasoftmax.attention, fused=False)
        lengths = (66, 66) if device == "cuda" else (6, 6)
        dim = 64 if device == "cuda" and by == "mask of keys" else 8  # with a kernel of its own
        q, k, v = tensors(device, dtype, lengths=lengths, dims=dim)
        m, n = lengths
        bias = normal(2, 4, m, n, device=device, dtype=dtype, seed=4)
        dirty_k, dirty_bias = k.clone(), bias.clone()
        arguments: dict[str, Any] = {}
        if by in ("mask", "mask of keys"):
            mask = coin(2, 1, 1 if by == "mask of keys" else m, n, device=device)
            mask[..., 3] = True
            arguments["mask"] = mask
            dirty_k[:, :, 3] = value
            dirty_bias.masked_fill_(mask, value)
        elif by == "causal":
            arguments["causal"] = True
            dirty_bias.masked_fill_(torch.ones(m, n, device=device).triu(1).bool(), value)
        else:
            arguments["window"] = (1, 2)
            ones = torch.ones(m, n, device=device)
            dirty_bias.masked_fill_((ones.triu(3) + ones.tril(-2)).bool(), value)
        g = normal(2, 4, m, dim, device=device, dtype=dtype, seed=7)
        results = []
        for keys, biases in ((k, bias), (dirty_k, dirty_bias)):
            inputs = [each.detach().requires_grad_() for each in (q, keys, v, biases)]
            output = attention(*inputs[:3], bias=inputs[3], **arguments)
            found = torch.autograd.grad(output, inputs, g)
            results.append((output.detach(), found[1], found[2], found[3]))
            if "mask" in by:
                assert (found[1][:, :, 3] == 0).all()
        for clean, dirty in zip(*results, strict=True):
            assert torch.equal(clean, dirty)


@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("by", ["mask", "mask of keys", "visible"])
def test_excluded_is_zero_where_products_overflow(by: str, dim: int, device: str) -> None:
    """Those with an excluded key, and of its value with the gradient of the output."""
    lengths = (130, 66) if device == "cuda" else (6, 6)
    excluded = coin(2, 1, *lengths, device=device)
    excluded[..., 3:] = True
    arguments: dict[str, dict[str, Any]] = {
        "mask": {"mask": excluded},
        "mask of keys": {"mask": excluded[:, :, :1]},
        "visible": {"visible": (None, torch.full((1, 1, 1), 3, device=device))},
    }
    q, k, v = tensors(device, torch.bfloat16, lengths=lengths, dims=dim)
    g = 9 * normal(2, 4, lengths[0], dim, device=device, dtype=q.dtype, seed=7)
    large = [each.detach().clone() for each in (k, v)]
    for each in large:
        each[:, :, 3:] = 1e38
    results = []
    for keys, values in ((k, v), large):
        inputs = [each.detach().requires_grad_() for each in (q, keys, values)]
        output = attention_on(device, q.dtype)(*inputs, **arguments[by])
        results.append((output.detach(), *torch.autograd.grad(output, inputs, g)))
        assert all((each[:, :, 3:] == 0).all() for each in results[-1][2:])
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(clean, dirty, rtol=0.02, atol=0.02 * clean.abs().max().item())


@pytest.mark.parametrize("dim", [64, 96, 128, 192])
@pytest.mark.parametrize("limits", [{"causal": True}, {"window": (100, 0)}])
def test_later_values_do_not_reach_earlier_queries_where_products_overflow(
    limits: dict[str, Any], dim: int, device: str
) -> None:
    """The products of the gradient of an earlier query's output with later values."""
    length, early = (256, 64) if device == "cuda" else (12, 4)
    q, k, v = tensors(device, torch.bfloat16, lengths=length, dims=dim)
    g = 9 * normal(2, 4, length, dim, device=device, dtype=q.dtype, seed=7)
    large = v.detach().clone()
    large[:, :, early:] = 1e38
    results = []
    for values in (v, large):
        inputs = [each.detach().requires_grad_() for each in (q, k, values)]
        output = attention_on(device, q.dtype)(*inputs, **limits)
        (gradient,) = torch.autograd.grad(output, inputs[:1], g)
        results.append((output.detach()[:, :, :early], gradient[:, :, :early]))
    for clean, dirty in zip(*results, strict=True):
        torch.testing.assert_close(clean, dirty, rtol=0.02, atol=0.02 * clean.abs().max().item())


def test_visible_nan_or_infinity_makes_the_row_nan(device: str) -> None:
    for dtype, value in itertools.product(dtypes_on(device), (NAN, INF)):
        q, k, v = tensors(device, dtype)
        bias = torch.zeros(2, 4, 5, 13, device=device, dtype=dtype)
        bias[0, 1, 3, 7] = value
        found = check(q, k, v, bias=bias.requires_grad_())
        is_nan = found["output"].isnan().all(-1)
        assert is_nan[0, 1, 3]
        assert is_nan.sum() == 1
        assert found["lse"][0, 1, 3].isnan()
        check(q, k, v, bias=bias.requires_grad_(), causal=True, sink=0.5)


def test_plain_row_of_minus_infinity_is_nan(device: str) -> None:
    """As in torch; a bias, and all that may leave nothing, makes it 0."""
    for dtype in dtypes_on(device):
        if device == "cuda" and dtype == torch.float32:
            continue  # kernels make NaN of infinite queries
        q, k, v = tensors(device, dtype, lengths=(3, 5))
        q, k = q.abs(), -k.abs()
        q[0, 0, 1] = INF
        function = attention_on(device, dtype)
        output, lse = function(q, k, v, return_lse=True)
        assert output[0, 0, 1].isnan().all()
        assert lse[0, 0, 1] == -INF
        assert output.isnan().sum() == 8
        zeros = torch.zeros(1, device=device, dtype=dtype)
        for arguments in ({"bias": zeros}, {"causal": True}, {"sink": 0.0}, {"window": (9, 9)}):
            assert (function(q, k, v, **arguments)[0, 0, 1] == 0).all()


def test_nan_in_a_value_reaches_every_query(device: str) -> None:
    """The product with P is a plain one: 0 * NaN, as in every other library."""
    for dtype, q, k, v in in_types(device):
        v[0, 0, 4, 2] = NAN
        mask = torch.zeros(13, dtype=torch.bool, device=device)
        mask[4] = True
        output = attention_on(device, dtype)(q, k, v, mask=mask)
        assert output[0, :2, :, 2].isnan().all()
        assert output.isnan().sum() == 2 * 5


def test_row_of_lowest_biases_is_uniform(device: str) -> None:
    """finfo.min for a mask, as many a model has it: logits that all round to it."""
    for dtype, q, k, v in in_types(device):
        bias = torch.zeros(2, 1, 5, 13, device=device, dtype=dtype)
        bias[1, :, 2] = torch.finfo(dtype).min
        bias[0, :, 3, :9] = torch.finfo(dtype).min
        output = attention_on(device, dtype)(q, k, v, bias=bias)
        assert output.isfinite().all()
        if dtype != torch.float16:  # whose lowest is as near as logits may be
            mean = v[1].float().mean(1).repeat_interleave(2, 0)
            torch.testing.assert_close(output[1, :, 2].float(), mean, rtol=0.01, atol=0.01)
        seen = (each[:1, :, 9:].contiguous() for each in (k, v))
        expected = attention_on(device, dtype)(q[:1, :, 3:4], *seen)[0, :, 0]
        torch.testing.assert_close(output[0, :, 3], expected, **closeness(dtype))


@pytest.mark.parametrize("head_dim", [24, 96, 128])
@pytest.mark.parametrize("queries", [5, 40])
def test_gradients_of_rows_of_lowest_biases(queries: int, head_dim: int, device: str) -> None:
    """In float32, where scales are no power of 2: forward and backward begin with the same bits."""
    for dtype, q, k, v in in_types(device, lengths=(queries, 13), dims=(head_dim, 8)):
        inputs = [each.requires_grad_() for each in (q, k, v)]
        bias = torch.zeros(1, 1, queries, 13, device=device)
        bias[..., 1::2, :] = torch.finfo(torch.float32).min
        output = attention_on(device, dtype)(*inputs, bias=bias)
        mean = v.detach().float().mean(2, keepdim=True).repeat_interleave(2, 1)
        rows = output[:, :, 1::2].detach().float()
        torch.testing.assert_close(rows, mean.expand(rows.shape), rtol=0.01, atol=0.01)
        of_value = torch.autograd.grad(output[:, :, 1::2].sum(), inputs)[2]
        expected = torch.full_like(of_value, 2 * (queries // 2) / 13)
        torch.testing.assert_close(of_value, expected, rtol=0.01, atol=0.01)


# Numbers


@on_all_kernels
@pytest.mark.parametrize("offset", [30.0, 300.0, -1000.0])
def test_large_logits_with_an_offset(offset: float, device: str) -> None:
    """All logits of a row far from 0: the difference is what counts."""
    for dtype in dtypes_on(device):
        dims = (64, 64) if device == "cuda" else (8, 8)
        q, k, v = tensors(device, dtype, lengths=(33, 65), dims=dims)
        q[..., 0], k[..., 0] = offset / 8, 8
        check(q, k, v, scale=1.0)
        bias = normal(1, 4, 33, 65, device=device, dtype=dtype, seed=4).requires_grad_()
        check(q, k, v, scale=1.0, bias=bias, causal=True, sink=offset)


@pytest.mark.parametrize("magnitude", [1.0, 63.0, 65.0, 1e3, 6e4, 1e6])
@pytest.mark.parametrize("kind", ["dense", "float32", "of keys", "table", "float32 table"])
@pytest.mark.parametrize("queries", [3, 70])
def test_large_biases(queries: int, kind: str, magnitude: float, device: str) -> None:
    """Logits far from 0 that differ by little, and logits far from each other."""
    keys = 90 if device == "cuda" else 13
    for dtype in dtypes_on(device):
        of_bias = torch.float32 if "float32" in kind else dtype
        if magnitude > torch.finfo(of_bias).max:
            continue
        dims = (160, 64) if device == "cuda" else (8, 8)
        q, k, v = tensors(device, dtype, lengths=(queries, keys), dims=dims)
        shape = {"of keys": (1, 4, 1, keys), "table": (4, queries + keys - 1)}.get(
            kind.removeprefix("float32 "), (1, 4, queries, keys)
        )
        noise = normal(*shape, device=device, seed=4)
        for values in (noise - magnitude, magnitude * noise):
            entries = values.clamp(-6e4, 6e4) if of_bias == torch.float16 else values
            table = entries.to(of_bias).requires_grad_()
            bias = RelativeBias(table) if "table" in kind else table
            check(q, k, v, bias=bias, causal=True)


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("which", ["first half of 16", "second half of 16", "last one"])
def test_large_logits_of_some_rows(which: str, dim: int) -> None:
    """Of 16 rows a thread has two, 8 apart, and makes the weights of one after the other. The last
    row has no neighbour. From a factor of 1e4 on, one multiply-add does not make a weight."""
    q, k, v = tensors("cuda", torch.bfloat16, lengths=(201, 384), dims=dim)
    row = torch.arange(201, device="cuda")[:, None]
    is_large = row == 200 if which == "last one" else row // 8 % 2 == (which[0] == "s")
    bias = normal(1, 4, 201, 384, device="cuda", seed=4)
    bias = torch.where(is_large, 1e4 * bias, bias).to(q.dtype).requires_grad_()
    check(q, k, v, bias=bias, what="biases")
    for factor in (300, 1e4):
        check(torch.where(is_large, factor * q, q), k, v, what=f"queries, {factor}")


@gpu_with_all_kernels
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("rise", [4.0, 9.0, 11.0, 95.0, 300.0])
def test_logits_that_rise(rise: float, dim: int) -> None:
    """Weights of a tile are relative to logits of tiles before it, if they are not much larger."""
    rows, keys = torch.arange(200, device="cuda")[:, None], torch.arange(700, device="cuda")
    noise = normal(1, 4, 200, 700, device="cuda", seed=4)
    late = (rows // 8 % 2 == 0) & (keys >= 300)
    biases = {
        "in some rows": noise + rise * late,
        "with each tile": noise + rise * (keys // 128),
        "of one pair": noise + rise * (keys == 698),
        "from -inf": noise.masked_fill(keys < 150, -INF) + rise * late,
    }
    for dtype in HALVES:
        q, k, v = tensors("cuda", dtype, lengths=(200, 700), dims=dim)
        for value in (INF, NAN):
            bias = noise.masked_fill(late & (keys == 698), value)
            check(q, k, v, bias=bias.to(dtype), causal=True, what=f"to {value}")
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        for what, bias in biases.items():
            check(*inputs, bias=bias.to(dtype).requires_grad_(), what=what)
        q[..., 0], k[..., 0] = 8, rise * dim**0.5 / 8 * (keys >= 300)
        check(*(each.requires_grad_() for each in (q, k, v)), what="without a bias")


@gpu
@pytest.mark.parametrize("dim", [64, 160])
@pytest.mark.parametrize("queries", [4096, 20_000, 100_000])
def test_slopes_over_long_distances(queries: int, dim: int) -> None:
    """ALiBi down to logits of -30,000, from which the products of queries and keys must be told."""
    slopes = torch.tensor([0.3, 0.05], device="cuda")
    distances = torch.arange(1 - queries, 16, device="cuda").abs()
    bias = RelativeBias(-slopes[:, None] * distances)
    for dtype in HALVES:
        q, k, v = tensors("cuda", dtype, batch=1, heads=2, lengths=(queries, 16), dims=dim)
        check(q, k, v, bias=bias)


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_many_queries_of_few_keys(dtype: torch.dtype) -> None:
    check(*tensors("cuda", dtype, batch=1, heads=12, lengths=(100_000, 16), dims=256))


@gpu
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (40, 72)])
@pytest.mark.parametrize("lengths", [(40, 3000), (700, 700)])
@pytest.mark.parametrize("in_order", [False, True])
def test_products_of_float32(
    lengths: tuple[int, int], dims: tuple[int, int], in_order: bool
) -> None:
    """In TF32 where torch allows it, with the error of torch's own; else as precise as float32."""
    inputs = [each.requires_grad_() for each in tensors("cuda", lengths=lengths, dims=dims)]
    bias = normal(1, 4, *lengths, device="cuda", seed=4).requires_grad_()
    g = normal(2, 4, lengths[0], dims[1], device="cuda", seed=5)

    def results(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (*inputs, bias)]
        output = attention(*leaves[:3], bias=leaves[3], causal=True, fused=fused)
        return [output, *torch.autograd.grad(output, leaves, g.to(dtype))]

    exact = results(torch.float64, False)

    def errors(fused: bool) -> list[float]:
        pairs = zip(results(torch.float32, fused), exact, strict=True)
        return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]

    before = torch.get_float32_matmul_precision()
    try:
        with deterministic(in_order, warn_only=True):
            torch.set_float32_matmul_precision("high")
            in_tf32, of_torch = errors(True), errors(False)
            torch.set_float32_matmul_precision("highest")
            in_float32, of_torch_in_float32 = errors(True), errors(False)
    finally:
        torch.set_float32_matmul_precision(before)
    for found, others in zip(in_tf32, of_torch, strict=True):
        assert found < 2 * others + 1e-4
        assert found > 3e-5
    for found, others in zip(in_float32, of_torch_in_float32, strict=True):
        assert found < 2.5 * others


@gpu
def test_backward_takes_the_products_of_forward() -> None:
    """Else large logits would have other weights in the backward pass."""
    given = tensors("cuda", lengths=(64, 200), dims=64, heads=4)
    q, k, v = (each.requires_grad_() for each in given)
    g = normal(2, 4, 64, 64, device="cuda", seed=5)
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for later in ("high", "highest"):
            torch.set_float32_matmul_precision("high")
            output = attention(q, k, v, scale=100.0, fused=True)
            torch.set_float32_matmul_precision(later)
            found.append(torch.autograd.grad(output, v, g)[0])
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(*found)


def test_keys_that_are_one(device: str) -> None:
    """empty_like puts the columns of such a tensor elsewhere than last."""
    for dtype, q, k, v in in_types(device, batch=1, heads=1, dims=16):
        one = normal(16, device=device, dtype=dtype)
        keys = one.as_strided(k.shape, (1, 1, 0, 1))
        check(q, keys, v)
        check(q, k, keys)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-30, 7, 1e4])
def test_scales(scale: float, device: str) -> None:
    for dtype, q, k, v in in_types(device):
        function = functools.partial(megasoftmax.attention, fused=None)
        bias = normal(4, 5, 13, device=device, dtype=dtype, seed=4).requires_grad_()
        oracle_attention.check(function, q, k, v, scale=scale)
        oracle_attention.check(function, q, k, v, scale=scale, bias=bias)


@pytest.mark.parametrize("lse_gradient", [False, True])
def test_gradient_of_lse(lse_gradient: bool, device: str) -> None:
    for dtype, q, k, v in in_types(device, lengths=(20, 70), dims=16):
        sink = normal(4, device=device, seed=6).requires_grad_()
        bias = normal(1, 4, 20, 70, device=device, dtype=dtype, seed=4).requires_grad_()
        check(q, k, v, sink=sink, bias=bias, lse_gradient=lse_gradient)
        table = RelativeBias(normal(4, 89, device=device, dtype=dtype, seed=4).requires_grad_())
        check(q, k, v, bias=table, causal=True, lse_gradient=lse_gradient)


def test_lse_alone_has_gradients(device: str) -> None:
    for dtype in dtypes_on(device):
        inputs = [each.requires_grad_() for each in tensors(device, dtype)]
        _, lse = attention_on(device, dtype)(*inputs, return_lse=True)
        d_query, d_key, d_value = torch.autograd.grad(lse.sum(), inputs)
        assert (d_value == 0).all()
        q, k, _ = (each.detach().float().requires_grad_() for each in inputs)
        z = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
        expected = torch.autograd.grad(z.logsumexp(-1).sum(), (q, k))
        for found, wanted in zip((d_query, d_key), expected, strict=True):
            torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sink"])
def test_gradient_of_one_alone(wanted: str, device: str) -> None:
    for dtype, q, k, v in in_types(device):
        given = {
            "query": q,
            "key": k,
            "value": v,
            "bias": normal(4, 5, 13, device=device, dtype=dtype, seed=4),
            "sink": normal(4, device=device, seed=6),
        }
        found = []
        for names in ((wanted,), tuple(given)):
            leaves = {name: given[name].detach().requires_grad_() for name in names}
            output = attention_on(device, dtype)(**(given | leaves))
            torch.manual_seed(0)
            g = torch.randn_like(output)
            found.append(torch.autograd.grad(output, leaves[wanted], g)[0])
        torch.testing.assert_close(*found, **closeness(dtype))


# Memory


def test_output_lies_as_projections_take_it(device: str) -> None:
    for dtype, layout in itertools.product(dtypes_on(device), LAYOUTS):
        q, k, v = (_laid_out(each, layout) for each in tensors(device, dtype))
        output = attention_on(device, dtype)(q, k, v)
        flat = output.transpose(1, 2).flatten(2)
        assert flat.data_ptr() == output.data_ptr()
        assert flat.shape == (2, 5, 32)


def test_tensors_without_memory() -> None:
    """Shapes alone, as models are planned with."""
    q, k, v = (each.to("meta").requires_grad_() for each in tensors("cpu", dims=(8, 16)))
    output, lse = attention(q, k, v, causal=True, return_lse=True)
    assert output.shape == (2, 4, 5, 16)
    assert output.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 4, 5)
    output.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_arguments_are_not_modified(device: str) -> None:
    for dtype, q, k, v in in_types(device):
        bias = normal(4, 5, 13, device=device, dtype=dtype, seed=4)
        mask, sink = coin(5, 13, device=device), normal(4, device=device)
        g = normal(2, 4, 5, 8, device=device, dtype=dtype, seed=7)
        everything = (q, k, v, bias, mask, sink, g)
        before = [each.clone() for each in everything]
        inputs = [each.detach().requires_grad_() for each in (q, k, v, bias, sink)]
        output = attention_on(device, dtype)(*inputs[:3], bias=inputs[3], mask=mask, sink=inputs[4])
        torch.autograd.grad(output, inputs, g)
        for now, then in zip(everything, before, strict=True):
            assert torch.equal(now, then)


def test_incoming_gradients_of_any_strides(device: str) -> None:
    for dtype, q, k, v in in_types(device, dims=(8, 16)):
        g = normal(2, 4, 5, 16, device=device, dtype=dtype, seed=7)
        expected = check(q, k, v, g=g)
        spread = normal(16, 5, 2, 8, device=device, dtype=dtype)[..., ::2].permute(2, 3, 1, 0)
        for other in (_laid_out(g, "[b, s, h, d]"), spread.copy_(g), _laid_out(g, "offset")):
            found = check(q, k, v, g=other)
            for name, each in found.items():
                torch.testing.assert_close(each, expected[name], **closeness(dtype))
        check(q, k, v, g=g[:, :, :, :1].expand(g.shape))
        check(q, k, v, g=g[:1, :1, :1, :1].expand(g.shape))


def test_heads_that_lie_together(device: str) -> None:
    """As of a projection "b n (d h)": to torch, tensors of channels last."""
    for dtype in dtypes_on(device):
        given = tensors(device, dtype, dims=(5, 3))
        apart = [each.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for each in given]
        expected, found = check(*given), check(*apart)
        for name, each in found.items():
            torch.testing.assert_close(each, expected[name], **closeness(dtype))


@pytest.mark.filterwarnings("ignore:.*determinis")  # the oracle's products, on a GPU
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("is_float32", [False, True])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_gradients_of_dense_biases(dim: int, is_float32: bool, in_order: bool, device: str) -> None:
    """Own and shared ones, of whole tiles and parts; rows of 16 bytes, of pairs, and odd ones."""
    if device == "cpu" and dim > 32:
        pytest.skip("the same code for all dimensions")
    with deterministic(in_order, warn_only=True):
        for keys, batch in itertools.product((136, 150, 131), (1, 2)):
            dtype = dtypes_on(device)[-1]
            q, k, v = tensors(device, dtype, lengths=(70, keys), dims=dim)
            bias = normal(batch, 4, 70, keys, device=device, dtype=dtype, seed=4)
            bias = bias.float() if is_float32 else bias
            check(q, k, v, bias=bias.requires_grad_())


# Dense biases whose rows begin anywhere


def _placed(values: Tensor, offset: int, pitch: int) -> Tensor:
    """The same values in rows so far apart; the storage ends with the last one."""
    batch, heads, rows, columns = values.shape
    storage = values.new_full((offset + (batch * heads * rows - 1) * pitch + columns,), NAN)
    strides = (heads * rows * pitch, rows * pitch, pitch, 1)
    return storage.as_strided(values.shape, strides, offset).copy_(values)


def _biases_anywhere(
    batch: int, heads: int, lengths: tuple[int, int]
) -> Iterator[tuple[str, Tensor]]:
    queries, keys = lengths

    def made(*shape: int) -> Tensor:
        return normal(*shape, device="cuda", dtype=torch.bfloat16, seed=4)

    values, pitch = made(batch, heads, *lengths), -(-keys // 8) * 8
    for offset in range(1, 8):
        yield f"offset {offset}", _placed(values, offset, pitch)
    for more in range(1, 8):
        yield f"rows {more} longer", _placed(values, more % 3, keys + more)
    yield "shift", ShiftedBias(made(batch, heads, queries, queries + keys - 1)).dense(*lengths)
    yield "slice", made(batch, heads, queries + 3, keys + 5)[:, :, 3:, 5:]
    yield "[queries, batch, heads, keys]", made(queries, batch, heads, keys).permute(1, 2, 0, 3)
    yield "one of all batches", made(1, heads, *lengths)
    yield "row of all queries", made(batch, heads, 1, keys).expand_as(values)
    yield "rows of all heads", made(batch, 1, *lengths).expand_as(values)
    yield "rows of all batches", made(1, heads, *lengths).expand_as(values)


@gpu
@of_maskings
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [
        *(((390, 381), dim) for dim in (32, 48, 64, 80, 128, 192, 256)),
        *(((200, keys), 64) for keys in (1, 63, 65, 127, 129, 375, 750, 1500)),
        *(((queries, 257), dim) for queries in (17, 71, 513) for dim in (64, 128)),
        ((50, 260), 64),
        ((130, 130), 96),
        ((200, 1500), 128),
    ],
)
def test_rows_of_a_bias_begin_anywhere(lengths: tuple[int, int], dim: int, masking: str) -> None:
    """With the results of rows that begin at multiples of 16 bytes, but for signs of zeros."""
    batch, heads = 2, 3
    (queries, keys), shape = lengths, (batch, heads, *lengths)
    inputs = tensors("cuda", torch.bfloat16, batch=batch, heads=3, lengths=lengths, dims=dim)
    # Where a row sees one key alone, gradients of scores are the rounding of its output.
    first = torch.randint(-9, max(keys - 30, 1), shape[:3], device="cuda", dtype=torch.int32)
    seed = torch.tensor([7], device="cuda")
    options: dict[str, Any] = {
        "none": {},
        "causal": {"causal": True},
        "keys": {"mask": coin(batch, 1, 1, keys, device="cuda")},
        "pairs": {"mask": coin(*shape, device="cuda", odds=0.7)},
        "window": {"window": (90, 20)},
        "ranges": {"visible": (first, first + 90)},
        "dropout": {"dropout": 0.3, "seed": seed},
    }[masking]
    gradient = normal(batch, heads, queries, dim, device="cuda", dtype=torch.bfloat16, seed=5)

    def run(bias: Tensor, is_learned: bool) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        leaves += [bias.detach().requires_grad_()] if is_learned else []
        bias = leaves[3] if is_learned else bias
        output, lse = attention(*leaves[:3], bias=bias, fused=True, return_lse=True, **options)
        of_query, *others = torch.autograd.grad(output, leaves, gradient)
        return [output.detach(), lse.detach(), *others, of_query]

    for name, bias in _biases_anywhere(batch, heads, lengths):
        aligned = _placed(bias, 0, -(-keys // 8) * 8)
        for is_learned in (True, False):
            found, expected = run(bias, is_learned), run(aligned, is_learned)
            # Portable kernels take rows that are shared, and for a mask of keys those that begin
            # anywhere have other kernels. Blocks add to gradients of queries in any order.
            is_other = 0 in bias.stride() or masking == "keys"
            alike = 0 if is_other else len(found) - 1
            for i in range(alike):
                assert torch.equal(found[i], expected[i]), (name, is_learned, i)
            # Both are as far from the exact result as one may be.
            close = {name: 2 * most for name, most in closeness(torch.bfloat16).items()}
            torch.testing.assert_close(found[alike:], expected[alike:], **close)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("lengths", [(5, 13), (257, 300), (3, 2000)])
def test_same_bits_from_run_to_run(lengths: tuple[int, int], in_order: bool, device: str) -> None:
    """Gradients on a GPU only where determinism is asked for."""
    if device == "cpu" and max(lengths) > 300:
        pytest.skip("the same code for all lengths")
    dtype = dtypes_on(device)[-1]
    q, k, v = tensors(device, dtype, batch=4, lengths=lengths, dims=64)
    m, n = lengths
    biases: tuple[Any, ...] = (
        None,
        normal(1, 4, m, n, device=device, dtype=dtype).requires_grad_(),
        normal(4, 1, 1, n, device=device, dtype=dtype).requires_grad_(),
        RelativeBias(normal(1, 1, m + n - 1, device=device, dtype=dtype).requires_grad_()),
    )
    sink = normal(4, device=device).requires_grad_()
    with deterministic(in_order):
        for bias in biases:
            table = bias.table if isinstance(bias, RelativeBias) else bias
            inputs = [each.detach().requires_grad_() for each in (q, k, v)]
            inputs += [sink] if table is None else [sink, table]
            runs = []
            # The second run leaves NaN in shared memory and in workspaces.
            for factor in (1, NAN, 1, 1):
                given = [(factor * each).detach().requires_grad_() for each in inputs[:3]]
                limits = {"bias": bias, "sink": sink, "causal": True}
                output, lse = attention_on(device, dtype)(*given, **limits, return_lse=True)
                found = [output.detach(), lse.detach()]
                if in_order or device == "cpu":
                    found += torch.autograd.grad(output.sum() + lse.sum(), [*given, *inputs[3:]])
                runs.append(found)
            for run in runs[2:]:
                for one, other in zip(runs[0], run, strict=True):
                    assert bits_equal(one, other)


def test_statistics(device: str) -> None:
    """The largest logit, the logarithm of the denominator relative to it, and the log-sum-exp."""
    for dtype, q, k, v in in_types(device):
        mask = coin(2, 1, 5, 13, device=device)[:, :, :, :]
        mask[0, :, 2] = True
        bias = normal(1, 4, 5, 13, device=device, dtype=dtype, seed=4)
        sink = normal(4, device=device, seed=6)
        for logit in (None, sink):
            options = (0.3, 0.0, False, -1, -1, logit, None, False, None, None, None, 1, 0.0, None)
            _, statistics = attention_forward(q, k, v, bias, mask, *options, False)
            given = {"bias": bias, "mask": mask, "scale": 0.3, "sink": logit}
            expected = oracle_attention.attention(q, k, v, **given)
            assert statistics.shape == (3, 2, 4, 5)
            assert statistics.dtype == torch.float32
            assert statistics.is_contiguous()
            z = 0.3 * q.double() @ k.double().repeat_interleave(2, 1).mT + bias.double()
            largest = z.masked_fill(mask, -INF).amax(-1)
            left = largest > -INF
            first, relative, lse = statistics.double().unbind()
            assert first.isfinite().all()
            torch.testing.assert_close(first[left], largest[left], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, expected.dense.lse, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(first + relative, lse, rtol=1e-5, atol=1e-5)
