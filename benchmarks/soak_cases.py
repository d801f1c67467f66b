"""What soak.py adds to the families of `megasoftmax check`: other options and values, and oracles.

`draw` says how each dimension is drawn. `compare` makes the tensors of a configuration, calls the
public function and returns how far each result is from the float64 oracle in tests/, in units of
the error that the oracle allows.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import TileMask
from megasoftmax.check import cases
from megasoftmax.check.draws import (
    BFLOAT,
    FLOAT,
    HALF,
    INF,
    NAN,
    Data,
    Drawn,
    Layout,
    OfRows,
    Shape,
    chance,
    draw_broadcast,
    draw_divisor,
    made,
    rounded,
    unless_fused,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import oracle
import oracle_attention
import oracle_topk
from inputs import KERNELS, attention_kernels, by_entry, deterministic

Deviations = dict[str, oracle.Deviation]
MAGNITUDES = (1.0, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
BIASES = ("normal", "normal", "levels", "offset", "slope", "lowest in places", "-inf in places")


class Bias(Drawn):
    """held: a type which also holds its values, float32 for any."""

    @classmethod
    def draw(
        cls,
        random: Random,
        shape: Shape,
        dtype: torch.dtype,
        kinds: tuple[str, ...],
        gradient: bool,
    ) -> "Bias":
        """For scores of `dtype`."""
        own = random.choice((dtype, FLOAT)) if dtype != FLOAT else random.choice((FLOAT, BFLOAT))
        return cls(
            shape=shape,
            dtype=own,
            kind=random.choice(kinds),
            magnitude=random.choice(MAGNITUDES),
            held=own if own != FLOAT or dtype == FLOAT else random.choice((dtype, FLOAT)),
            gradient=gradient,
            layout=Layout.draw(random, len(shape)),
        )

    def values(self, data: Data) -> Tensor:
        """In the type of the bias, not yet laid out."""
        x = data.normal(self.shape)
        if self.kind == "levels":  # many equals among the largest
            x = self.magnitude * x.round().clamp(-1, 1)
        elif self.kind == "offset":  # differences that its float32 hardly resolves
            x = self.magnitude + x
        elif self.kind == "slope":
            length = self.shape[-1] if self.shape else 1
            x = x - self.magnitude * torch.linspace(1, 0, length, device=x.device)
        elif self.kind == "lowest in places":
            lowest = torch.finfo(self.held if self.held != FLOAT else self.dtype).min
            x = (self.magnitude * x).masked_fill(data.coin(self.shape, 0.4), lowest)
        elif self.kind == "-inf in places":
            x = (self.magnitude * x).masked_fill(data.coin(self.shape, 0.4), -INF)
        else:
            x = self.magnitude * x
        return rounded(rounded(x, self.held), self.dtype)

    def lay(self, values: Tensor) -> Tensor:
        return self.layout.place(values).requires_grad_(self.gradient)


class Sink(Drawn):
    """kind: a number, one element, per head. value: that number; else elements are times it."""

    @classmethod
    def draw(cls, random: Random, per_head: bool) -> "Sink | None":
        if not chance(random, 0.3):
            return None
        kind = random.choice(("number", "one", "per head" if per_head else "one"))
        numbers = (0.0, 0.5, -3.0, 20.0, 1e4, -1e4, -INF)
        value = random.choice(numbers if kind == "number" else (1.0, 10.0))
        return cls(kind=kind, value=value, dtype=random.choice((HALF, BFLOAT, FLOAT)))

    def make(self, data: Data, heads: int) -> Tensor | float:
        if self.kind == "number":
            return self.value
        values = self.value * data.normal((heads if self.kind == "per head" else 1,))
        return values.to(self.dtype).requires_grad_()


class Incoming(Drawn):
    """The gradients of the results.

    ones: that of the probabilities or the output is 1, of stride 0. lse: the log-sum-exp has one.
    """

    @classmethod
    def draw(cls, random: Random, rank: int) -> "Incoming":
        return cls(
            ones=chance(random, 0.05),
            layout=Layout.draw(random, rank),
            lse=chance(random, 0.5),
            lse_layout=Layout.draw(random, rank - 1),
        )

    def make(
        self, data: Data, shape: Shape, dtype: torch.dtype, lse_shape: Shape
    ) -> dict[str, Any]:
        if self.ones:
            g = torch.ones((), dtype=dtype, device=data.device).expand(shape)
        else:
            g = self.layout.place(data.normal(shape).to(dtype))
        h = self.lse_layout.place(data.normal(lse_shape)) if self.lse else None
        return {"g": g, "h": h, "lse_gradient": self.lse}


def spots(data: Data, shape: Shape) -> Tensor:
    """Bool: about two entries."""
    return data.coin(shape, 2 / max(math.prod(shape), 1))


def nowhere_seen(excluded: Tensor, shape: Shape) -> Tensor:
    """Bool: entries of what broadcasts from `shape` that excluded pairs alone use."""
    return (~excluded).float().sum_to_size(shape) == 0


# Scores and logits: what softmax and top-k share

SCORES = ("normal", "normal", "wide", "offset", "ties", "constant", "-inf in places", "lowest")


def make_scores(data: Data, kind: str, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Scores of one of the kinds, not yet laid out."""
    x = data.normal(shape)
    if kind == "wide":
        x = 20 * x
    elif kind == "offset":
        x = x + 1e4
    elif kind == "ties":
        x = (2 * x).round() / 2
    elif kind == "two values":
        x = (x > 0.5).float()
    elif kind == "constant":
        x = torch.ones_like(x)
    elif kind in ("ascending", "descending"):
        x = torch.linspace(-3, 3, shape[-1], device=x.device).expand(shape)
        x = x if kind == "ascending" else -x
    elif kind == "zeros of both signs":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "-inf in places":
        x = x.masked_fill(data.coin(shape, 0.4), -INF)
    elif kind == "lowest":
        x = x.masked_fill(data.coin(shape, 0.4), torch.finfo(dtype).min)
    return rounded(x, dtype)


class _Rows(Drawn):
    """Scores with values of all kinds, and a bias.

    planted: what stands in all excluded entries. visible: in about two visible entries.
    """

    kinds = SCORES

    @classmethod
    def draw(cls, random: Random, usual: int) -> Any:
        case = super().draw(random, usual)
        case.kind = random.choice(cls.kinds)
        may_plant = case.layout.expanded is None
        case.planted = case.visible = None
        if may_plant and chance(random, 0.3):
            case.planted = random.choice((NAN, INF, -INF, 1e4))
        if may_plant and chance(random, 0.07):
            case.visible = random.choice((NAN, INF))
        case.out = random.choice((None, None, HALF, BFLOAT, FLOAT))
        if not isinstance(case.scale, OfRows):
            case.scale = draw_scale(random, case)
        case.softcap = draw_softcap(random)
        case.bias = draw_row_bias(random, case)
        case.incoming = Incoming.draw(random, len(case.shape))
        return case

    def make(
        self,
        data: Data,
        mask: Tensor | None,
        causal: bool = False,
        window: Any = None,
        visible: oracle.Visible | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scores, bias, and what is excluded."""
        scores = make_scores(data, self.kind, self.shape, self.dtype)
        bias = None if self.bias is None else self.bias.values(data)
        excluded = oracle.excluded_entries(scores, mask, causal, window, visible)
        if self.planted is not None:
            scores = scores.masked_fill(excluded, self.planted)
            if bias is not None:
                bias = bias.masked_fill(nowhere_seen(excluded, bias.shape), self.planted)
        if self.visible is not None:
            scores = scores.masked_fill(spots(data, self.shape) & ~excluded, self.visible)
        laid = None if bias is None else self.bias.lay(bias)
        return self.layout.place(scores), laid, excluded


def draw_scale(random: Random, scores: _Rows) -> float:
    """No scale at which a gradient overflows float16, or z float32, or rounding z costs above 1."""
    usual = (1.0, 1.0, 80**-0.5, 0.125, -0.7, -1e-3, random.uniform(-1, 1))
    if scores.kind == "lowest":
        return random.choice(usual)
    others = (*usual, 1e-30, 3.0, 12.5, random.uniform(-9, 9))
    may_be_huge = scores.dtype != HALF and scores.kind != "offset"
    return random.choice((*others, 1e4, -1e4) if may_be_huge else others)


def draw_softcap(random: Random) -> float | None:
    return random.choice((1.5, 50.0, random.uniform(0.1, 100))) if chance(random, 0.2) else None


def draw_row_bias(random: Random, scores: _Rows) -> Bias | None:
    """Kernels sum its gradient over rows, not along them."""
    if not chance(random, 0.4):
        return None
    shape = draw_broadcast(random, scores.shape)
    is_whole = len(shape) > 0 and shape[-1] == scores.shape[-1]
    gradient = chance(random, 0.8 if is_whole else 0.05)
    kinds = tuple(kind for kind in BIASES if scores.kind != "lowest" or "lowest" not in kind)
    return Bias.draw(random, shape, scores.dtype, kinds, gradient)


# The families


class Softmax(_Rows, cases.Softmax):
    @classmethod
    def draw(cls, random: Random, usual: int) -> "Softmax":
        case = super().draw(random, usual)
        rank = len(case.shape)
        case.dim = -random.randint(1, rank) if chance(random, 0.15) else -1
        case.sink = Sink.draw(random, per_head=case.dim == -1 and rank > 2)
        if case.dim != -1:
            case.causal, case.window, case.ranges = False, None, None
            if chance(random, 0.7):  # for the kernels of columns
                case.mask = case.bias = case.sink = None
        # Its backward pass needs a log-sum-exp of which float32 leaves something.
        is_huge = case.kind == "lowest" or (case.bias is not None and "lowest" in case.bias.kind)
        if is_huge:
            case.softcap = None
        may_drop = case.dim == -1 and not is_huge and chance(random, 0.3)
        case.dropout = random.choice((0.1, 0.5, 0.999, 1.0)) if may_drop else 0.0
        return case

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        shape, rank, dim = self.shape, len(self.shape), self.dim
        given, drops = cases.excluding(self, data), self.drops(data)
        scores, bias, excluded = self.make(data, **given)
        incoming = self.incoming.make(data, shape, self.out or scores.dtype, shape[:-1])
        if self.planted is not None and self.incoming.layout.expanded is None:
            incoming["g"] = incoming["g"].masked_fill(excluded, self.planted)
        arguments = given | drops | {"scale": self.scale, "bias": bias, "dtype": self.out}
        arguments["softcap"] = self.softcap
        if self.sink is not None:
            arguments["sink"] = self.sink.make(data, shape[-3] if rank > 2 else 1)
        if drops:
            kept_of = megasoftmax.reference.dropout.kept_of_scores
            incoming["kept"] = kept_of(drops["seed"], self.dropout, scores)

        def moved(tensor: Tensor | None) -> Tensor | None:
            """From rows along the last dimension to rows along `dim`."""
            return (
                None if tensor is None else tensor[(None,) * (rank - tensor.dim())].movedim(-1, dim)
            )

        def call(function: Callable[..., Any], scores: Tensor, **given: Any) -> Any:
            if dim == -1:
                return function(scores, **given)
            given |= {"mask": moved(given["mask"]), "bias": moved(given["bias"]), "dim": dim}
            return function(moved(scores), **given)

        def softmax(scores: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
            p, lse = call(megasoftmax.softmax, scores, fused=fused, **given)
            assert p.is_contiguous()
            return p.movedim(dim, -1).contiguous(), lse

        call(functools.partial(unless_fused, megasoftmax.softmax, fused), scores, **arguments)
        return oracle.compare(softmax, scores, **arguments, **incoming)[1]


LOGITS = (*("two values", "ascending", "descending", "zeros of both signs"), *SCORES)


class Topk(_Rows, cases.Topk):
    kinds = LOGITS

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Topk":
        case = super().draw(random, usual // 4)  # the oracle sorts on the CPU
        has_row_scale = isinstance(case.scale, OfRows)
        if has_row_scale and case.kind == "lowest":
            case.scale.low, case.scale.high = 0.3, 1.0  # z is finite
        if (has_row_scale or case.is_router()) and chance(random, 0.9):  # kernels take neither
            case.softcap = case.bias = None
        return case

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        options = self.options(data)
        logits, bias, _ = self.make(data, options["mask"])
        rows = self.shape[:-1]
        incoming = self.incoming.make(data, (*rows, self.k), self.out or logits.dtype, rows)
        arguments = options | {"bias": bias, "softcap": self.softcap, "score": self.score}
        arguments["selection_bias"] = made(self.selection_bias, data)
        arguments |= {"renormalize": self.renormalize, "dtype": self.out}
        unless_fused(megasoftmax.softmax_topk, fused, logits, self.k, **arguments)
        function = functools.partial(megasoftmax.softmax_topk, fused=fused)
        found = oracle_topk.compare(function, logits, self.k, **arguments, **incoming)[1]
        if drawn := self.drawn(data, fused, logits, options):
            found |= oracle_topk.compare_drawn(*drawn, logits, self.k, **options)
        return found


class Attention(cases.Attention):
    """tiles: the mask is a TileMask, if "note"; or one of such blocks, if "64" and more.

    planted: in the bias of excluded pairs. visible: in about two visible entries of the bias.
    kernels: of KERNELS in tests/inputs.py.
    """

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Attention":
        case = super().draw(random, usual)
        batch, _, queries, keys = case.shape
        case.tiles = random.choice((None, None, None, "note", "64", "128", "192"))
        if case.mask is not None and case.tiles not in (None, "note"):
            blocks = (math.ceil(length / int(case.tiles)) for length in (queries, keys))
            case.mask.shape = (*case.mask.shape[:-2], *blocks)
            case.mask.layout = Layout.draw(random, len(case.mask.shape))
        scales = (None, None, 1.0, 0.3, 1e-3, 7.0, random.uniform(0.01, 2))
        case.scale = random.choice(scales if case.dtype == HALF else (*scales, 1e-30, 1e4))
        case.softcap = draw_softcap(random)
        case.planted = case.visible = None
        if case.bias is not None:
            shape, is_whole = case.bias, len(case.bias) == 4 - (case.relative and not case.shifted)
            if is_whole and chance(random, 0.3):  # shared by groups of batches
                shape = (draw_divisor(random, batch), *shape[1:])
            gradient = chance(random, 0.8)
            case.bias = Bias.draw(random, shape, case.dtype, BIASES, gradient)
            if chance(random, 0.3):
                case.planted = random.choice((NAN, INF, -INF))
            if chance(random, 0.05):
                case.visible = random.choice((NAN, INF))
        case.sink = Sink.draw(random, per_head=True)
        case.deterministic = chance(random, 0.3)
        case.incoming = Incoming.draw(random, 4)
        case.kernels = random.choice(KERNELS)
        return case

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        of_queries, (queries, keys) = self.shape[:3], self.shape[2:]
        query, key, value = self.tensors(data)
        given = cases.excluding(self, data)
        mask = given["mask"]
        arguments = given | {"scale": self.scale, "softcap": self.softcap}
        if mask is not None and self.tiles is not None:
            is_plain = self.tiles == "note"
            tile_mask = TileMask(mask) if is_plain else TileMask.from_blocks(mask, int(self.tiles))
            arguments["mask"] = tile_mask
            given["mask"] = oracle_attention.mask_of_pairs(tile_mask, queries, keys)
        if self.bias is not None:
            bias = self._bias(data, given)
            arguments["bias"] = self.as_bias(bias)
        if self.sink is not None:
            arguments["sink"] = self.sink.make(data, self.shape[1])
        incoming = self.incoming.make(data, (*of_queries, self.value_dim), self.dtype, of_queries)
        (query, key, value), arguments = by_entry(query, key, value, arguments)
        if query.dim() != 4:
            incoming |= {
                name: each.unflatten(0, query.shape[:-3])
                for name, each in incoming.items()
                if isinstance(each, Tensor)
            }
        unless_fused(megasoftmax.attention, fused, query, key, value, **arguments)
        function = functools.partial(megasoftmax.attention, fused=fused)
        # Warnings are about products of the oracle.
        with (
            warnings.catch_warnings(),
            deterministic(self.deterministic, warn_only=True),
            attention_kernels(self.kernels),
        ):
            warnings.simplefilter("ignore")
            return oracle_attention.compare(function, query, key, value, **arguments, **incoming)[1]

    def _bias(self, data: Data, excluding: dict[str, Any]) -> Tensor:
        values = self.bias.values(data)
        in_groups = any(
            size not in (1, whole)
            for size, whole in zip(values.shape[::-1], self.shape[::-1], strict=False)
        )
        if not self.relative and not in_groups and self.bias.layout.expanded is None:
            z = torch.empty(self.shape, device=data.device)
            unseen = nowhere_seen(oracle.excluded_entries(z, **excluding), values.shape)
            if self.planted is not None:
                values = values.masked_fill(unseen, self.planted)
            if self.visible is not None:
                values = values.masked_fill(spots(data, values.shape) & ~unseen, self.visible)
        return self.bias.lay(values)


FAMILIES: dict[str, Any] = {each.family: each for each in (Softmax, Topk, Attention)}
