"""The options of each operation: their names and defaults, and what each of them may be.

A record is made once a call is known not to take a shorter way, with plain numbers (`as_number`,
`as_integer`, `checked_window`). All that is below the public functions passes it on. Checks are
cheap: nothing is read and nothing is launched. An error names the option, what was expected and
what came.
"""

import numbers
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar, cast

import torch
from torch import Tensor

from megasoftmax.biases import RelativeBias, ShiftedBias
from megasoftmax.checks import (
    as_integer,
    broadcasts,
    check_device,
    check_dtype,
    check_flag,
    check_floating,
    check_layout,
    check_least_rank,
    checked_integer,
    hint_at_sharing,
    is_batched,
    is_integer,
    kind,
    misnamed,
)
from megasoftmax.masks import TileMask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_INTEGERS = (torch.int32, torch.int64)
_INT32_MAX = torch.iinfo(torch.int32).max
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
LARGEST_FLOAT32 = _LARGEST[torch.float32]

Window = tuple[int, int]
Ranges = tuple[Tensor | None, Tensor | None]


class SoftmaxOptions(NamedTuple):
    """What `megasoftmax.softmax` takes beside scores."""

    scale: float = 1.0
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    window: Window | None = None
    visible: Ranges | None = None
    sink: Tensor | float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    dtype: torch.dtype | None = None
    return_lse: bool = False
    dim: int = -1
    fused: bool | None = None

    def check(self, scores: Tensor) -> None:
        _check_scores("scores", scores, self)
        if self.causal is not False:
            check_flag("causal", self.causal)
            _check_has_queries("causal", scores)
        if self.window is not None:
            _check_has_queries("window", scores)
        if self.sink is not None:
            _check_sink(self.sink, "scores", scores)
        if self.visible is not None:
            _check_visible(self.visible, "scores", scores, scores.shape[:-1])
        check_probability("dropout", self.dropout)
        if self.seed is not None:
            check_seed(self.seed, "scores", scores)
        if type(self.dim) is not int or self.dim != -1:
            self._check_dim(scores.dim())
        _check_choices(self.dtype, self.return_lse, self.fused)

    def _check_dim(self, rank: int) -> None:
        dim = self.dim
        expected = f"dim: expected an integer from {-rank} to {rank - 1}"
        if not is_integer(dim):
            raise TypeError(f"{expected}, got {kind(dim)}")
        if not -rank <= dim < rank:
            raise ValueError(f"{expected}, got {dim}")
        if dim % rank == rank - 1:
            return
        for name, is_given in (
            ("causal", self.causal),
            ("window", self.window is not None),
            ("visible", self.visible is not None),
            ("dropout", self.dropout > 0),
        ):
            if is_given:
                raise ValueError(f"{name}: expected only over the last dimension, got dim {dim}")
        sink = self.sink
        if isinstance(sink, Tensor) and sink.numel() != 1:
            raise ValueError(
                f"sink: expected one element, or dim -1, got shape {tuple(sink.shape)} "
                f"and dim {dim}"
            )


class TopkOptions(NamedTuple):
    """What `megasoftmax.softmax_topk` takes beside logits and k."""

    scale: float | Tensor = 1.0
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: Tensor | None = None
    top_k: int | Tensor | None = None
    top_p: float | Tensor | None = None
    min_p: float | Tensor | None = None
    renormalize: bool = False
    dtype: torch.dtype | None = None
    return_lse: bool = False
    group: "ProcessGroup | None" = None
    fused: bool | None = None

    def check(self, logits: Tensor, k: int, least: int = 0) -> None:
        """Of a call for at least that k."""
        _check_scores("logits", logits, self.with_one_scale())
        if isinstance(self.scale, Tensor):
            _check_of_rows("scale", self.scale, logits)
        columns, group = logits.shape[-1], self.group
        if not is_integer(k):
            raise TypeError(f"k: expected an integer from {least} to {columns}, got {kind(k)}")
        if k < least or (k > columns and group is None):
            raise ValueError(f"k: expected an integer from {least} to {columns}, got {k}")
        if group is not None:
            check_group(group)
            if hasattr(logits, "device_mesh"):
                raise ValueError("group: expected None for a DTensor, got a group")
        self._check_limits(logits)
        check_flag("renormalize", self.renormalize)
        _check_choices(self.dtype, self.return_lse, self.fused)
        if not isinstance(self.score, str) or self.score not in ("softmax", "sigmoid"):
            found = repr(self.score) if isinstance(self.score, str) else kind(self.score)
            raise ValueError(f"score: expected 'softmax' or 'sigmoid', got {found}")
        if self.score == "sigmoid" or self.selection_bias is not None:
            self._check_choice(logits)

    def with_one_scale(self) -> "TopkOptions":
        """Themselves, with 1 in place of a scale for each row."""
        return self._replace(scale=1.0) if isinstance(self.scale, Tensor) else self

    def has_limits(self) -> bool:
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    def _check_limits(self, logits: Tensor) -> None:
        if isinstance(self.top_k, Tensor):
            _check_of_rows("top_k", self.top_k, logits, is_integer=True)
        elif self.top_k is not None:
            checked_integer("top_k", self.top_k, least=1)
        for name in ("top_p", "min_p"):
            limit = getattr(self, name)
            if isinstance(limit, Tensor):
                _check_of_rows(name, limit, logits)
            elif limit is not None:
                check_probability(name, limit)

    def _check_choice(self, logits: Tensor) -> None:
        """Of scores that are not probabilities, or do not choose the entries alone."""
        bias = self.selection_bias
        if bias is not None:
            check_floating("selection_bias", bias)
            check_companion("selection_bias", bias, "logits", logits, logits.shape)
            _check_no_gradient("selection_bias", bias)
        with_what = "score 'sigmoid'" if bias is None else "a selection_bias"
        for name in _LIMITS:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: expected None with {with_what}, got a limit")
        if self.group is not None:
            raise ValueError(f"group: expected None with {with_what}, got a group")
        if self.return_lse and self.score == "sigmoid":
            raise ValueError("return_lse: expected False with score 'sigmoid', got True")


_LIMITS = ("top_k", "top_p", "min_p")


class AttentionOptions(NamedTuple):
    """What `megasoftmax.attention` takes beside query, key and value."""

    bias: Tensor | RelativeBias | None = None
    mask: Tensor | TileMask | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = False
    window: Window | None = None
    visible: Ranges | None = None
    sink: Tensor | float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    return_lse: bool = False
    fused: bool | None = None

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        shape = check_heads(query, key, value)
        mask = self.mask
        if self.scale is not None:
            check_scale("scale", self.scale, query.dtype)
        scale = 1.0 if self.scale is None else self.scale  # the default is at most 1
        check_softcap("softcap", self.softcap, query.dtype, scale)
        if isinstance(mask, TileMask):
            _check_tile_mask(mask, query, shape)
        elif mask is not None:
            check_mask(mask, "query", query, shape)
        if self.bias is not None:
            check_attention_bias(self.bias, query, shape)
        if self.visible is not None:
            _check_visible(self.visible, "query", query, shape[:-1])
        check_flag("causal", self.causal)
        if self.sink is not None:
            _check_sink(self.sink, "query", query)
        check_flag("return_lse", self.return_lse)
        if self.fused is not None:
            _check_fused(self.fused)
        check_probability("dropout", self.dropout)
        if self.seed is not None:
            check_seed(self.seed, "query", query)

    def beyond_sdpa(self) -> list[tuple[str, str, str]]:
        """What torch's own attention does not do: each option, what it is, what it may be."""
        found = []
        if self.softcap:
            found.append(("softcap", str(self.softcap), "None"))
        if self.sink is not None:
            found.append(("sink", "one", "None"))
        if self.dropout != 0:
            found.append(("dropout", str(self.dropout), "0"))
        if self.return_lse:
            found.append(("return_lse", "True", "False"))
        return found

    def of_softmax(self) -> dict[str, Any]:
        """Those that `softmax` takes by these names, but no TileMask and no RelativeBias."""
        return {name: getattr(self, name) for name in _OF_BOTH}


_OF_BOTH = [name for name in AttentionOptions._fields if name in SoftmaxOptions._fields]


# Options for type checkers: all but return_lse and return_probabilities.


class _KeywordsOfPairs(TypedDict, total=False):
    softcap: float | None
    causal: bool
    window: Window | None
    sink: Tensor | float | None
    dropout: float
    seed: Tensor | None
    fused: bool | None


class SoftmaxKeywords(_KeywordsOfPairs, total=False):
    scale: float
    mask: Tensor | None
    bias: Tensor | None
    visible: Ranges | None
    dtype: torch.dtype | None
    dim: int


class VarlenKeywords(_KeywordsOfPairs, total=False):
    bias: RelativeBias | None
    scale: float | None


class AttentionKeywords(_KeywordsOfPairs, total=False):
    bias: Tensor | RelativeBias | None
    mask: Tensor | TileMask | None
    scale: float | None
    visible: Ranges | None


class _KeywordsOfRows(TypedDict, total=False):
    scale: float | Tensor
    mask: Tensor | None
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    fused: bool | None


class SampleKeywords(_KeywordsOfRows, total=False):
    seed: Tensor | None


class TopkKeywords(_KeywordsOfRows, total=False):
    softcap: float | None
    bias: Tensor | None
    score: Literal["softmax", "sigmoid"]
    selection_bias: Tensor | None
    renormalize: bool
    dtype: torch.dtype | None
    group: "ProcessGroup | None"


def sink_operands(
    sink: Tensor | float | None, of_kernels: bool
) -> tuple[Tensor | None, float | None]:
    """A sink as ops take it, of which one is None; kernels know no float64."""
    if not isinstance(sink, Tensor):
        return None, None if sink is None else float(sink)
    return (sink.float() if of_kernels and sink.dtype == torch.float64 else sink), None


Options = TypeVar("Options", SoftmaxOptions, TopkOptions, AttentionOptions)


def read_options(
    record: type[Options],
    function: str,
    tensors: int,
    unnamed: tuple[Any, ...],
    given: dict[str, Any],
) -> Options:
    """The record of options that a call gave by name; raises where it gave others.

    Args:
        record: the class.
        function: its name, for the error.
        tensors: how many arguments the function takes by position.
        unnamed: what it was given by position besides.
        given: what it was given by name.
    """
    if unnamed:
        raise misnamed(function, tensors, unnamed, {})
    for name in given:
        if name not in record._fields:
            raise misnamed(function, tensors, (), {name: given[name]})
        if record is TopkOptions and name in ("scale", *_LIMITS):
            given[name] = as_rows(name, given[name])
        elif name in _READ:
            given[name] = _READ[name](name, given[name])
    return record(**given)


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Query, key and value of attention. Returns the shape of the scores."""
    check_floating("query", query)
    check_least_rank("query", query, 3, "[..., heads, queries, head_dim]")
    *leading, heads, queries, head_dim = query.shape
    _check_of_keys("key", key, query, (*leading, None, None, head_dim))
    key_heads, keys = key.shape[-3:-1]
    _check_of_keys("value", value, query, (*leading, key_heads, keys, None))
    if heads != key_heads and (key_heads == 0 or heads % key_heads != 0):
        raise ValueError(
            f"key: expected heads that divide {heads}, those of query, got {key_heads}"
        )
    return (*leading, heads, queries, keys)


def check_group(group: "ProcessGroup") -> None:
    is_one = torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)
    if not is_one:
        raise TypeError(f"group: expected a process group, got {kind(group)}")


def as_number(name: str, value: Any) -> Any:
    """The Python number of a numpy scalar, or of a tensor without dimensions on a CPU.

    Python numbers, and what is no number, are returned as they are.

    Raises:
        TypeError: a tensor that cannot be read without waiting for a device, or that needs a
            gradient, which a number does not get.
    """
    if value is None or isinstance(value, float):  # the next takes as long as all checks
        return value
    if isinstance(value, int):  # a larger one than torch's is refused, or that of a float
        return value if abs(value) < 2**63 or abs(value) > _LARGEST[torch.float64] else float(value)
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(
                f"{name}: expected a number within float64, got {kind(value)}"
            ) from None
    if not isinstance(value, Tensor) or value.dim() != 0 or value.is_complex():
        return value
    check_layout(name, value)
    if value.requires_grad:
        raise TypeError(
            f"{name}: expected a number, which gets no gradient, got a tensor that requires one; "
            "multiply the query or the scores by it"
        )
    if value.device.type != "cpu":
        raise TypeError(
            f"{name}: expected a number, got a tensor on {value.device}; reading it would wait for "
            "the device: keep it on the CPU"
        )
    if torch.compiler.is_compiling():  # checks depend on the value, which is not known
        raise TypeError(
            f"{name}: expected a number in a compiled graph, got a tensor; "
            f"pass {name}.item() from outside"
        )
    return value.item()


def as_rows(name: str, value: Any) -> Any:
    """A tensor with an entry for each row, or what `as_number` makes of a number; an int for top_k.

    A tensor without dimensions is one for all rows on a GPU, which nobody waits for, and under vmap
    if examples have their own.
    """
    if not isinstance(value, Tensor):
        return as_integer(value) if name == "top_k" else as_number(name, value)
    is_number = value.dim() == 0 and value.is_cpu and not is_batched(value)
    return as_number(name, value) if is_number else value


def checked_window(name: str, window: Window | None) -> Window | None:
    """The window as two ints; -1 for a limit beyond those of int32, which limits nothing."""
    if window is None:
        return None
    expected = f"{name}: expected None or (left, right), two integers from -1 on"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"{expected}, got {kind(window)}")
    if len(window) != 2:
        raise ValueError(f"{expected}, got {window}")
    left, right = as_integer(window[0]), as_integer(window[1])
    for limit in (left, right):
        if not is_integer(limit):
            raise TypeError(f"{expected}, got {window}")
        if limit < -1:
            raise ValueError(f"{expected}, got {window}")
    return (-1 if left >= _INT32_MAX else left), (-1 if right >= _INT32_MAX else right)


def check_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    """A finite number of the type that scores of `dtype` are computed in."""
    if isinstance(scale, bool) or not isinstance(scale, (float, int)):
        raise TypeError(f"{name}: expected a number, got {kind(scale)}")
    if not -LARGEST_FLOAT32 <= scale <= LARGEST_FLOAT32:
        if not -torch.inf < scale < torch.inf:
            raise ValueError(f"{name}: expected a finite number, got {scale}")
        _check_range(name, scale, dtype)


def check_softcap(name: str, softcap: float | None, dtype: torch.dtype, scale: float = 0.0) -> None:
    """None, or a finite number from 0 on; 0 is none. Twice scale / softcap must be finite, too."""
    if softcap is None:
        return
    check_scale(name, softcap, dtype)
    if softcap < 0:
        raise ValueError(f"{name}: expected None or a number from 0 on, got {softcap}")
    largest = _LARGEST[torch.promote_types(dtype, torch.float32)] / 2
    if softcap > 0 and abs(scale) / largest > softcap:
        least = f"{abs(scale) / largest:.5g}"
        raise ValueError(f"{name}: expected at least {least} with scale {scale}, got {softcap}")


def _check_range(name: str, number: float, dtype: torch.dtype) -> None:
    """Whether a finite number is one in the type that scores of `dtype` are computed in."""
    computed = torch.promote_types(dtype, torch.float32)
    if abs(number) > _LARGEST[computed]:
        largest = f"{_LARGEST[computed]:.5g}"
        raise ValueError(
            f"{name}: expected a number within the range of {computed}, up to {largest}, in which "
            f"{dtype} is computed, got {number}"
        )


def check_probability(name: str, probability: float) -> None:
    """Of a number that `as_number` returned."""
    if isinstance(probability, bool) or not isinstance(probability, (float, int)):
        raise TypeError(f"{name}: expected a number from 0 to 1, got {kind(probability)}")
    if not 0 <= probability <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {probability}")


def check_seed(seed: Tensor, name_of_scores: str, scores: Tensor) -> None:
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        hint = ""
        if type(as_integer(seed)) is int:
            hint = f"; pass torch.tensor([{seed}], device={str(scores.device)!r})"
        raise TypeError(f"seed: expected None or a tensor of int64, got {kind(seed)}{hint}")
    check_layout("seed", seed)
    if seed.numel() != 1:
        raise ValueError(f"seed: expected one element, got shape {tuple(seed.shape)}")
    check_device("seed", seed, name_of_scores, scores)


def _check_choices(dtype: torch.dtype | None, return_lse: bool, fused: bool | None) -> None:
    check_dtype(dtype)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if fused is not None:
        _check_fused(fused)


def _check_fused(fused: bool) -> None:
    if not isinstance(fused, bool):
        raise TypeError(f"fused: expected None or a bool, got {kind(fused)}")


def _check_sink(sink: Tensor | float, name_of_scores: str, scores: Tensor) -> None:
    if not isinstance(sink, Tensor):
        if isinstance(sink, bool) or not isinstance(sink, numbers.Real):
            raise TypeError(f"sink: expected a tensor or a number, got {kind(sink)}")
        if abs(sink) > LARGEST_FLOAT32 and abs(sink) != torch.inf:
            _check_range("sink", sink, scores.dtype)
        return
    check_floating("sink", sink)
    check_device("sink", sink, name_of_scores, scores)
    if sink.numel() == 1:
        return
    if scores.dim() < 3 or sink.dim() != 1 or sink.shape[0] != scores.shape[-3]:
        heads = f" or [{scores.shape[-3]}], one per head," if scores.dim() > 2 else ""
        raise ValueError(f"sink: expected one element{heads} got shape {tuple(sink.shape)}")


def _check_visible(
    visible: Ranges, name_of_scores: str, scores: Tensor, shape: tuple[int, ...]
) -> None:
    expected = "visible: expected None or (first, end)"
    if not isinstance(visible, (tuple, list)):
        raise TypeError(f"{expected}, got {kind(visible)}")
    if len(visible) != 2:
        raise ValueError(f"{expected}, got {len(visible)} elements")
    for name, bound in zip(("visible[0]", "visible[1]"), visible, strict=True):
        if bound is None:
            continue
        if not isinstance(bound, Tensor) or bound.dtype not in _INTEGERS:
            raise TypeError(
                f"{name}: expected None or a tensor of int32 or int64, got {kind(bound)}"
            )
        check_layout(name, bound)
        check_companion(name, bound, name_of_scores, scores, shape)


def check_mask(mask: Any, name_of_scores: str, scores: Tensor, target: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        hint = ""
        if isinstance(mask, Tensor) and mask.is_floating_point():
            hint = "; pass a mask that is added to the scores as bias="
        elif isinstance(mask, Tensor):
            hint = (
                "; pass a tokenizer's attention_mask as "
                "visible=megasoftmax.ranges.padding(attention_mask)"
            )
        raise TypeError(
            "mask: expected a bool tensor, True = excluded (in scaled_dot_product_attention "
            f"True = keep), got {kind(mask)}{hint}"
        )
    check_layout("mask", mask)
    check_companion("mask", mask, name_of_scores, scores, target)


def _check_of_rows(name: str, rows: Tensor, logits: Tensor, is_integer: bool = False) -> None:
    """A tensor that broadcasts to the rows of logits, without a gradient."""
    if is_integer and rows.dtype not in _INTEGERS:
        raise TypeError(
            f"{name}: expected a number or a tensor of int32 or int64, got {kind(rows)}"
        )
    if is_integer:
        check_layout(name, rows)
    else:
        check_floating(name, rows)
    check_companion(name, rows, "logits", logits, logits.shape[:-1])
    _check_no_gradient(name, rows)


def _check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"{name}: expected a tensor without a gradient, got one that requires it")


def _check_tile_mask(mask: TileMask, query: Tensor, shape: tuple[int, ...]) -> None:
    if mask.block == 1:
        check_companion("mask", mask.tensor, "query", query, shape)
        return
    check_device("mask", mask.tensor, "query", query)
    blocks = tuple(-(-size // mask.block) for size in shape[-2:])
    found, target = mask.tensor.shape, (*shape[:-2], *blocks)
    if found[-2:] != blocks or not broadcasts(found, target):
        raise ValueError(
            f"mask: expected blocks of {mask.block} that broadcast to {target}, none missing in "
            f"the last two, got {tuple(found)}{hint_at_sharing('mask', found, target)}"
        )


def check_attention_bias(
    bias: Tensor | RelativeBias, query: Tensor, shape: tuple[int, ...]
) -> None:
    if not isinstance(bias, RelativeBias):
        check_floating("bias", bias)
        check_companion("bias", bias, "query", query, shape)
        return
    table = bias.table
    check_floating("bias.table", table)
    check_device("bias.table", table, "query", query)
    distances, columns = max(shape[-2] + shape[-1] - 1, 0), table.shape[-1]
    if isinstance(bias, ShiftedBias):
        target = (*shape[:-1], columns)
        fits = columns >= distances and table.shape[-2] == shape[-2]
    else:
        target = (*shape[:-2], distances)
        fits = columns == distances
    if not fits or not broadcasts(table.shape, target):  # tracers would note what is named here
        rows = f"{shape[-2]}, at least " if isinstance(bias, ShiftedBias) else ""
        raise ValueError(
            f"bias.table: expected [..., heads, {rows}{distances}] that broadcasts to {target}, "
            f"got {tuple(table.shape)}"
            f"{hint_at_sharing('bias.table', table.shape, target, bias.trailing - 1)}"
        )


def check_companion(
    name: str, tensor: Tensor, name_of_scores: str, scores: Tensor, target: tuple[int, ...]
) -> None:
    """Same device, and broadcastable to the target."""
    check_device(name, tensor, name_of_scores, scores)
    shape = tensor.shape
    # Of other lengths they are not compared: tracers would note that open sizes differ.
    if (len(shape) != len(target) or shape != target) and not broadcasts(shape, target):
        hint = ""
        if len(target) == 4 and tuple(shape) == (target[0], target[3]):
            hint = f"; pass one of [batch, keys] as {name}[:, None, None, :]"
        elif name_of_scores == "query":
            hint = hint_at_sharing(name, shape, target)
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(target)}, got {tuple(shape)}{hint}"
        )


def _check_scores(name: str, scores: Tensor, options: SoftmaxOptions | TopkOptions) -> None:
    mask, bias = options.mask, options.bias
    check_floating(name, scores)
    if scores.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got a tensor without dimensions")
    scale = cast(float, options.scale)
    check_scale("scale", scale, scores.dtype)
    check_softcap("softcap", options.softcap, scores.dtype, scale)
    if mask is not None:
        check_mask(mask, name, scores, scores.shape)
    if bias is not None:
        check_floating("bias", bias)
        check_companion("bias", bias, name, scores, scores.shape)


def _check_of_keys(name: str, tensor: Tensor, query: Tensor, shape: tuple[int | None, ...]) -> None:
    """A tensor like the query, with the sizes that are not None."""
    if not isinstance(tensor, Tensor) or tensor.dtype != query.dtype:
        raise TypeError(f"{name}: expected a tensor of {query.dtype}, as query, got {kind(tensor)}")
    check_layout(name, tensor)
    check_device(name, tensor, "query", query)
    fits = tensor.dim() == len(shape)
    if fits:
        for size, wanted in zip(tensor.shape, shape, strict=True):  # all() takes twice as long
            fits = fits and (wanted is None or size == wanted)
    if not fits:
        names = (*("",) * (len(shape) - 3), "key_heads", "keys", "value_dim")
        expected = ", ".join(
            name if wanted is None else str(wanted)
            for name, wanted in zip(names, shape, strict=True)
        )
        raise ValueError(f"{name}: expected shape [{expected}], got {tuple(tensor.shape)}")


def _check_has_queries(name: str, scores: Tensor) -> None:
    if scores.dim() < 2:
        raise ValueError(
            f"{name}: expected scores [..., queries, keys], got shape {tuple(scores.shape)}"
        )


_READ = {
    "scale": as_number,
    "softcap": as_number,
    "dropout": as_number,
    "window": checked_window,
    "dim": lambda name, value: as_integer(value),
}
