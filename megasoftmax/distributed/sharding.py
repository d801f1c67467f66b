"""How the ops run on the shards of DTensors: split along batches and heads, never along keys.

    mesh = init_device_mesh("cuda", (2,))
    query, key, value = (distribute_tensor(each, mesh, [Shard(1)]) for each in (query, key, value))
    output = megasoftmax.attention(query, key, value, causal=True)  # [Shard(1)]; nothing was sent

Of several leading dimensions only the first stays split. What batches or heads share is replicated,
and its gradient is Partial: a sum over devices that is still to be made. Other placements are
changed into these, as DTensor does it for torch's operators. With dropout they are not, and a call
whose shards cannot be computed alone is refused: each shard drops by a seed of its own. The public
functions register the rules when the first DTensor arrives; who calls torch.ops.megasoftmax.* by
name calls `register` beforehand.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasoftmax import reference
from megasoftmax.ops.registration import NAMESPACE

# A placement: the dimension that is split among devices, or one of these. Not torch's classes:
# importing torch.distributed.tensor takes a second, and most programs never do.
_REPLICATED, _PARTIAL = "replicated", "partial"
_Placement = int | str | None  # None for what is no tensor

# A way to run an op: the placements of its results, and of its arguments.
_Split = tuple[Iterable[_Placement], Iterable[_Placement]]


def prepare(tensor: Tensor) -> bool:
    """Whether it is a DTensor; if so, the rules are registered."""
    if not hasattr(tensor, "device_mesh"):
        return False
    register()
    return True


def seed_of_shards(seed: Tensor, scores: Any) -> Tensor:
    """A seed for each shard of scores, or of a query, which drop other entries than each other.

    Shards on devices that have the same part get the same one. It claims to be replicated.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = scores.device_mesh
    number = 0
    for of_mesh, placement in enumerate(scores.placements):
        if placement.is_shard():
            number = number * mesh.size(of_mesh) + mesh.get_local_rank(of_mesh)
    return DTensor.from_local(seed + number, mesh, [Replicate()] * mesh.ndim, run_check=False)


def register() -> None:
    """Tells DTensor, once, how each op is split."""
    if _registered:
        return
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    others = {_REPLICATED: Replicate(), _PARTIAL: Partial(), None: None}

    def placements(described: Iterable[_Placement]) -> list[Any]:
        return [Shard(each) if isinstance(each, int) else others[each] for each in described]

    def placements_of(op: Any, splits: Callable[..., Iterator[_Split]], *args: Any) -> list[Any]:
        replicated = [_REPLICATED] * len(op._schema.returns), [_REPLICATED] * len(args)
        return [
            (
                placements(results),
                placements(
                    each if hasattr(arg, "placements") else None
                    for each, arg in zip(arguments, args, strict=True)
                ),
            )
            # Where several of them send nothing, DTensor takes the first.
            for results, arguments in _allowed((replicated, *splits(*args)), op, args)
        ]

    for name, splits in _SPLITS.items():
        op = getattr(getattr(torch.ops, NAMESPACE), name).default
        register_sharding(op)(partial(placements_of, op, splits))
        _registered.append(name)


_registered: list[str] = []
register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as library.load


def _allowed(splits: tuple[_Split, ...], op: Any, args: tuple[Any, ...]) -> list[_Split]:
    """With dropout, only as the first result of the forward, or what it is of, is split.

    Shards have seeds of their own, and what each drops depends on what it holds.
    """
    names = [each.name for each in op._schema.arguments]
    given = dict(zip(names, args, strict=True))
    if not given.get("dropout"):
        return list(splits)
    name = next(each for each in ("output", "scores", "query") if each in given)
    placed = {each.dim if each.is_shard() else _REPLICATED for each in given[name].placements}
    where = names.index(name)
    found = [each for each in splits if tuple(each[1])[where] in placed]
    if not found:
        raise ValueError(
            f"{name}: expected a DTensor whose shards can be computed alone, with dropout, got "
            f"placements {given[name].placements}"
        )
    return found


def _softmax_forward(*args: Any) -> Iterator[_Split]:
    given = reference.softmax.ForwardArguments(*args)
    for dim in range(given.scores.ndim - 2):
        of_lse = dim if given.return_lse else _REPLICATED
        yield (dim, of_lse), type(given)(scores=dim, **_beside_rows(given, given.scores, dim))


def _beside_rows(given: Any, rows: Any, dim: int) -> dict[str, _Placement]:
    """Of what a softmax has beside its rows, where these are split."""
    beside = _beside(given, rows, dim, reference.softmax.BESIDE_SCORES)
    return beside | ({"seed": _REPLICATED} if "seed" in given._fields else {})


def _beside(given: Any, rows: Any, dim: int, lacking: dict[str, int]) -> dict[str, _Placement]:
    """Of tensors that broadcast to the rows, and lack so many of the last dimensions."""
    return {
        name: _of_broadcast(getattr(given, name), rows, dim, missing)
        for name, missing in lacking.items()
        if name in given._fields
    }


def _softmax_backward(record: Any, rows_name: str, *args: Any) -> Iterator[_Split]:
    """Of both backward passes: what is named, gradients and log-sum-exp are split alike."""
    given = record(*args)
    rows = getattr(given, rows_name)
    for dim in range(rows.ndim - 2):
        beside = _beside_rows(given, rows, dim)
        alike = dict.fromkeys((rows_name, "gradient", "lse_gradient", "lse"), dim)
        of_bias = _of_gradient(beside["bias"]) if given.bias_gradient else _REPLICATED
        of_sink = dim if given.sink_gradient else _REPLICATED
        yield (dim, of_bias, of_sink), type(given)(**alike, **beside)


def _columns_forward(scores: Any, scale: Any, dtype: Any, return_lse: Any) -> Iterator[_Split]:
    for dim, of_lse in ((0, 0), (2, 1)):
        yield (dim, of_lse if return_lse else _REPLICATED), (dim, None, None, None)


def _columns_backward(*args: Any) -> Iterator[_Split]:
    for dim, of_lse in ((0, 0), (2, 1)):
        yield (dim,), (dim, dim, of_lse, None, None)


def _topk_forward(*args: Any) -> Iterator[_Split]:
    given = reference.topk.ForwardArguments(*args)
    for dim in range(given.logits.ndim - 1):
        yield (dim, dim, dim + 1), type(given)(logits=dim, **_beside_logits(given, dim))


def _beside_logits(given: Any, dim: int) -> dict[str, _Placement]:
    """Of what top-k has beside its logits, where these are split."""
    return _beside(given, given.logits, dim, reference.topk.BESIDE_LOGITS)


def _topk_backward(*args: Any) -> Iterator[_Split]:
    given = reference.topk.BackwardArguments(*args)
    names = ("gradient", "probabilities", "indices", "lse_gradient", "logits")
    for dim in range(given.logits.ndim - 1):
        alike = dict.fromkeys(names, dim)
        yield (dim,), type(given)(**alike, statistics=dim + 1, **_beside_logits(given, dim))


def _attention_forward(*args: Any) -> Iterator[_Split]:
    given = reference.attention.ForwardArguments(*args)
    for dim in _splittable(given):
        yield (dim, dim + 1), type(given)(query=dim, **_beside_queries(given, dim))


_BESIDE_QUERIES = reference.softmax.tensors_of(reference.attention.attention_forward)[1:]


def _beside_queries(given: Any, dim: int) -> dict[str, _Placement]:
    """Of what attention has beside its queries, where these are split."""
    found = {name: _of_shared(getattr(given, name), dim) for name in _BESIDE_QUERIES}
    return found | ({"mask": _REPLICATED} if _repeats(given, dim) else {})


def _repeats(given: Any, dim: int) -> bool:
    """Whether a mask has fewer batches than the query, and begins again after its last."""
    mask = given.mask
    return dim == 0 and mask is not None and mask.shape[0] not in (1, given.query.shape[0])


def _attention_backward(*args: Any) -> Iterator[_Split]:
    given = reference.attention.BackwardArguments(*args)
    for dim in _splittable(given):
        beside = _beside_queries(given, dim)
        alike = dict.fromkeys(("query", "d_output", "d_lse", "output"), dim)
        of_key, of_value = _of_gradient(beside["key"]), _of_gradient(beside["value"])
        of_bias = _of_gradient(beside["bias"]) if given.bias_gradient else _REPLICATED
        of_sink = dim if given.sink_gradient else _REPLICATED
        results = dim, of_key, of_value, of_bias, of_sink
        yield results, type(given)(**alike, statistics=dim + 1, **beside)


def _of_broadcast(tensor: Any, scores: Any, dim: int, missing: int) -> _Placement:
    """Of what broadcasts to the scores, but for their last dimensions, where they are split."""
    if tensor is None:
        return None
    own = dim - (scores.ndim - missing - tensor.ndim)
    return own if own >= 0 and tensor.shape[own] != 1 else _REPLICATED


def _of_shared(tensor: Any, dim: int) -> _Placement:
    """Of what attention has with as many batches or heads as the query, fewer, or 1."""
    if tensor is None:
        return None
    own = _batches_and_heads(tensor)[dim]
    return _REPLICATED if own is None or tensor.shape[own] == 1 else own


def _batches_and_heads(tensor: Any) -> tuple[int | None, int | None]:
    """The dimensions of a tensor of attention that are batches and heads, if it has them."""
    if tensor.ndim > 2:
        return 0, 1
    return None, 0 if tensor.ndim == 1 else None


def _of_gradient(placement: _Placement) -> _Placement:
    return _PARTIAL if placement == _REPLICATED else placement


def _splittable(given: Any) -> Iterator[int]:
    """Of batches, 0, and heads, 1, those along which attention can be split.

    Neighbours that share an entry, of keys or of a bias, must stay together: the entries have to be
    divided evenly. Where all have their own, or all the same, the parts may differ by anything.
    Each part begins with the first entry of a mask that repeats.
    """
    for dim in (0, 1):
        entries = {
            tensor.shape[dim] for tensor in (given.key, given.bias) if tensor is not None
        } - {1, given.query.shape[dim]}
        if _repeats(given, dim):
            entries.add(given.query.shape[0] // given.mask.shape[0])
        parts = _parts(given, dim) if entries else 1
        if parts is not None and all(count % parts == 0 for count in entries):
            yield dim


def _parts(given: Any, dim: int) -> int | None:
    """Into how many parts batches or heads are split already.

    None where the arguments do not agree about it: DTensor then takes what sends the least.
    """
    tensors = {
        name: tensor for name, tensor in given._asdict().items() if hasattr(tensor, "placements")
    }
    count = 1
    for of_mesh, size in enumerate(given.query.mesh.shape):
        found = set()
        for name, tensor in tensors.items():
            placement = tensor.placements[of_mesh]
            where = (1, 2) if name == "statistics" else _batches_and_heads(tensor)
            if placement.is_shard() and placement.dim in where:
                found.add(where.index(placement.dim))
            elif not placement.is_replicate():
                return None
        if len(found) > 1:
            return None
        if found == {dim}:
            count *= size
    return count


_SPLITS: dict[str, Callable[..., Iterator[_Split]]] = {
    "softmax_forward": _softmax_forward,
    "softmax_backward": partial(
        _softmax_backward, reference.softmax.BackwardArguments, "probabilities"
    ),
    "softmax_dropout_backward": partial(
        _softmax_backward, reference.softmax.DropoutBackwardArguments, "scores"
    ),
    "softmax_columns_forward": _columns_forward,
    "softmax_columns_backward": _columns_backward,
    "softmax_topk_forward": _topk_forward,
    "softmax_topk_backward": _topk_backward,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "attention_in_blocks_forward": _attention_forward,
    "attention_in_blocks_backward": _attention_backward,
}
