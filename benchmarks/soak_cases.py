"""What soak.py draws: a class for each family, whose `draw` says how each dimension is drawn.

`compare` makes the tensors of a configuration, calls the public function and returns how far each
result is from the float64 oracle in tests/, in units of the error that the oracle allows.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias, TileMask
from megasoftmax.limits import kernel_limits

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import oracle
import oracle_attention
import oracle_topk
from inputs import KERNELS, attention_kernels

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
INF, NAN = torch.inf, torch.nan
Shape = tuple[int, ...]
Deviations = dict[str, oracle.Deviation]

EDGES = sorted(
    {1, 2, 3, 5, 1000, 3000, 20000}
    | {2**power + step for power in range(3, 18) for step in (-1, 0, 1)}
)
LIMITS = kernel_limits()
MAX_HEAD_DIM, MAX_K = LIMITS.attention["kMaxHeadDim"], LIMITS.topk["kMaxK"]
MAX_FLOAT_HEAD_DIM = LIMITS.attention["kMaxFloatHeadDim"]
VECTORS = sorted(
    {each.max_vectors for each in LIMITS.forward + LIMITS.backward if each.max_vectors}
)
MAGNITUDES = (1.0, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6)
LARGE = 16  # times the usual size


class NotFusedError(Exception):
    """The kernels do not take this configuration; says why."""


# Draws


def chance(random: Random, odds: float) -> bool:
    return random.random() < odds


def draw_most(random: Random, usual: int) -> int:
    """How many scores a configuration may have: small ones are frequent, large ones rare."""
    if chance(random, 0.02):
        return LARGE * usual
    return int(2 ** random.uniform(4, math.log2(usual)))


def draw_size(random: Random, most: int) -> int:
    """From 1 on; edges are frequent."""
    if chance(random, 0.25):
        return int(max(most, 1) ** random.random())
    return random.choice([edge for edge in EDGES if edge <= max(most, 1)])


def draw_columns(random: Random, most: int, dtype: torch.dtype) -> int:
    """The length of a row: edges of sizes, or of the tables in limits.h, or as long as may be."""
    pack = 16 // dtype.itemsize
    kind = random.choices(("size", "table", "long"), (60, 35, 5))[0]
    edges = [vectors * pack for vectors in VECTORS if vectors * pack <= most]
    if kind == "table" and edges:
        return random.choice(edges) + random.choice((1 - pack, -1, 0, 1))
    return most if kind == "long" else draw_size(random, min(most, 1100))


def draw_broadcast(random: Random, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`: sizes of 1, and leading dimensions that are missing."""
    kept = [size if chance(random, 0.7) else 1 for size in shape]
    missing = random.randrange(len(shape) + 1) if chance(random, 0.3) else 0
    return tuple(kept[missing:])


def draw_divisor(random: Random, size: int) -> int:
    return random.choice([part for part in range(1, size + 1) if size % part == 0])


def draw_window(random: Random, keys: int) -> tuple[int, int] | None:
    """(left, right), often narrow."""
    if not chance(random, 0.25):
        return None
    sides = [0, 1, random.randrange(8), random.randrange(keys), random.randrange(2 * keys)]
    return random.choice([-1, *sides]), random.choice([-1, *sides])


# Tensors


class Data:
    """Random tensors: the same for the same seed on the same kind of device."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, shape: Shape) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def coin(self, shape: Shape, odds: float) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device) < odds


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`; what is finite stays finite."""
    values, limit = values.double(), torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


class Drawn(SimpleNamespace):
    """What was drawn, by name; says what is not None, False or `usual`."""

    family = ""
    nothing = "none"
    usual: ClassVar[dict[str, Any]] = {}

    def __init__(self, **drawn: Any) -> None:
        super().__init__(**(self.usual | drawn))

    def __str__(self) -> str:
        found = []
        for name, value in vars(self).items():
            if (
                value is None
                or value is False
                or (name in self.usual and value == self.usual[name])
            ):
                continue
            name = name.replace("_", " ")
            words = str(value).removeprefix("torch.")
            found.append(name if value is True else f"{name} {words}")
        text = ", ".join(found) or self.nothing
        return f"{self.family}: {text}" if self.family else f"({text})"


class Layout(Drawn):
    """How a tensor lies in its storage, which ends where the tensor ends.

    order: of the dimensions in memory. step: between elements of the last of them. padding:
    elements behind each of its rows, NaN. offset: elements before the first. expanded: the
    dimension of stride 0.
    """

    nothing = "contiguous"
    usual: ClassVar[dict[str, Any]] = {
        "order": "as it is",
        "step": 1,
        "padding": 0,
        "offset": 0,
        "expanded": None,
    }

    @classmethod
    def draw(cls, random: Random, rank: int = 4) -> "Layout":
        if chance(random, 0.4) or rank == 0:
            return cls()
        orders = ("keys and queries swapped", "queries and heads swapped", "reversed")
        return cls(
            order=random.choice(orders) if chance(random, 0.4) else "as it is",
            step=2 if chance(random, 0.1) else 1,
            padding=random.choice((0, 0, 0, 1, 3, 8)),
            offset=random.choice((0, 0, 1, 2, 3, 4, 7, 8)),
            expanded=random.randrange(rank) if chance(random, 0.15) else None,
        )

    def place(self, values: Tensor) -> Tensor:
        """The values, laid out so. Of the expanded dimension only the first is used."""
        if self == Layout() or values.numel() == 0:
            return values
        dims = list(range(values.dim()))
        if self.order == "keys and queries swapped":
            dims[-2:] = dims[-2:][::-1]
        elif self.order == "queries and heads swapped":
            dims[-3:-1] = dims[-3:-1][::-1]
        elif self.order == "reversed":
            dims.reverse()
        strides, stride = [0] * len(dims), self.step
        for dim in reversed(dims):
            if dim == self.expanded:
                continue
            strides[dim] = stride
            stride = stride * values.shape[dim] + (self.padding if dim == dims[-1] else 0)
        ends = [(size - 1) * step for size, step in zip(values.shape, strides, strict=True)]
        filling: Any = NAN
        if not values.is_floating_point():
            filling = True if values.dtype == torch.bool else -1
        storage = values.new_full((self.offset + sum(ends) + 1,), filling)
        placed = storage.as_strided(values.shape, strides, self.offset)
        if self.expanded is None:
            placed.copy_(values)
        else:
            placed.narrow(self.expanded, 0, 1).copy_(values.narrow(self.expanded, 0, 1))
        return placed


class Mask(Drawn):
    """odds: of an entry to be excluded. empty_rows: some rows are excluded as a whole."""

    @classmethod
    def draw(cls, random: Random, shape: Shape) -> "Mask | None":
        if not chance(random, 0.4):
            return None
        kept = draw_broadcast(random, shape)
        return cls(
            shape=kept,
            odds=random.choice((0.0, 0.1, 0.3, 0.3, 0.9, 1.0)),
            empty_rows=chance(random, 0.3),
            layout=Layout.draw(random, len(kept)),
        )

    def make(self, data: Data) -> Tensor:
        mask = data.coin(self.shape, self.odds)
        if self.empty_rows and self.shape:
            mask |= data.coin((*self.shape[:-1], 1), 0.2)
        return self.layout.place(mask)


KINDS_OF_RANGES = ("any", "any", "documents", "padding", "prefix", "few keys", "nothing in places")


class Ranges(Drawn):
    """Of queries, or of what they share; the shape is without the keys."""

    @classmethod
    def draw(cls, random: Random, shape: Shape) -> "Ranges | None":
        """For scores of a shape."""
        if not chance(random, 0.35):
            return None
        kept = draw_broadcast(random, shape[:-1]) if len(shape) > 1 else ()
        has_first, has_end = random.choice(
            ((True, True), (True, True), (True, False), (False, True))
        )
        return cls(
            shape=kept,
            keys=shape[-1],
            kind=random.choice(KINDS_OF_RANGES),
            has_first=has_first,
            has_end=has_end,
            dtype=random.choice((torch.int32, torch.int32, torch.int64)),
            first_layout=Layout.draw(random, len(kept)),
            end_layout=Layout.draw(random, len(kept)),
        )

    def make(self, data: Data) -> oracle.Visible:
        """Some reach beyond the keys."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(
                self.shape, generator=data.generator, device=data.device
            )

        first = uniform(-0.3, 1.1) * self.keys
        end = first + uniform(-0.1, 1.2) * self.keys
        if self.kind == "few keys":
            end = first + uniform(0, 20)
        elif self.kind == "padding":
            first, end = uniform(0, 0.6) * self.keys, uniform(0.5, 1) * self.keys
        elif self.kind == "nothing in places":
            end = torch.where(data.coin(self.shape, 0.5), first, end)
        elif self.kind in ("documents", "prefix"):
            # Along the queries, if they have ranges of their own.
            length = self.shape[-1] if self.shape else 1
            position = torch.arange(length, device=data.device) * self.keys / max(length, 1)
            step = max(self.keys // 4, 1)
            first = (position // step * step).expand(self.shape or (1,)).reshape(self.shape)
            end = first + step if self.kind == "documents" else first + 1
            first = first if self.kind == "documents" else torch.zeros_like(first)
        made = [
            layout.place(bound.floor().to(self.dtype)) if is_given else None
            for layout, bound, is_given in (
                (self.first_layout, first, self.has_first),
                (self.end_layout, end, self.has_end),
            )
        ]
        return made[0], made[1]


def made(drawn: Mask | Ranges | None, data: Data) -> Any:
    """A tensor or a pair of them; None where none was drawn."""
    return None if drawn is None else drawn.make(data)


BIASES = ("normal", "normal", "levels", "offset", "slope", "lowest in places", "-inf in places")


class Bias(Drawn):
    """held: a type which also holds its values, float32 for any. relative: a RelativeBias."""

    @classmethod
    def draw(
        cls,
        random: Random,
        shape: Shape,
        dtype: torch.dtype,
        kinds: tuple[str, ...],
        gradient: bool,
        relative: bool = False,
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
            relative=relative,
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


def unless_fused(
    function: Callable[..., Any], fused: bool | None, *args: Any, **given: Any
) -> None:
    """Raises NotFusedError where a call that must run fused cannot."""
    reasons = megasoftmax.why_not_fused(function, *args, **given) if fused else ()
    if reasons:
        raise NotFusedError("; ".join(map(str, reasons)))


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


class Scores(Drawn):
    """Rows along the last dimension.

    planted: what stands in all excluded entries. visible: in about two visible entries.
    """

    @classmethod
    def draw(cls, random: Random, usual: int, kinds: tuple[str, ...]) -> "Scores":
        dtype, most = random.choice((HALF, BFLOAT, FLOAT)), draw_most(random, usual)
        columns = draw_columns(random, min(int(most ** random.uniform(0.3, 1)), usual), dtype)
        leading: list[int] = []
        for _ in range(random.choices(range(6), (4, 16, 20, 40, 12, 8))[0]):
            rows = most // (columns * math.prod(leading))
            leading.insert(random.randrange(len(leading) + 1), draw_size(random, min(rows, 300)))
        layout = Layout.draw(random, len(leading) + 1)
        may_plant = layout.expanded is None
        return cls(
            shape=(*leading, columns),
            dtype=dtype,
            kind=random.choice(kinds),
            layout=layout,
            planted=random.choice((NAN, INF, -INF, 1e4))
            if may_plant and chance(random, 0.3)
            else None,
            visible=random.choice((NAN, INF)) if may_plant and chance(random, 0.07) else None,
        )

    def make(
        self,
        data: Data,
        bias: Bias | None,
        mask: Tensor | None,
        causal: bool,
        window: Any,
        visible: oracle.Visible | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Scores, bias, and what is excluded."""
        scores = make_scores(data, self.kind, self.shape, self.dtype)
        values = None if bias is None else bias.values(data)
        excluded = oracle.excluded_entries(scores, mask, causal, window, visible)
        if self.planted is not None:
            scores = scores.masked_fill(excluded, self.planted)
            if values is not None:
                values = values.masked_fill(nowhere_seen(excluded, values.shape), self.planted)
        if self.visible is not None:
            scores = scores.masked_fill(spots(data, self.shape) & ~excluded, self.visible)
        laid = None if bias is None or values is None else bias.lay(values)
        return self.layout.place(scores), laid, excluded


def draw_scale(random: Random, scores: Scores) -> float:
    """No scale at which a gradient overflows float16, or z float32, or rounding z costs above 1."""
    usual = (1.0, 1.0, 80**-0.5, 0.125, -0.7, -1e-3, random.uniform(-1, 1))
    if scores.kind == "lowest":
        return random.choice(usual)
    others = (*usual, 1e-30, 3.0, 12.5, random.uniform(-9, 9))
    may_be_huge = scores.dtype != HALF and scores.kind != "offset"
    return random.choice((*others, 1e4, -1e4) if may_be_huge else others)


def draw_row_bias(random: Random, scores: Scores) -> Bias | None:
    """Kernels sum its gradient over rows, not along them."""
    if not chance(random, 0.4):
        return None
    shape = draw_broadcast(random, scores.shape)
    is_whole = len(shape) > 0 and shape[-1] == scores.shape[-1]
    gradient = chance(random, 0.8 if is_whole else 0.05)
    kinds = tuple(kind for kind in BIASES if scores.kind != "lowest" or "lowest" not in kind)
    return Bias.draw(random, shape, scores.dtype, kinds, gradient)


# The families


class Softmax(Drawn):
    family = "softmax"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Softmax":
        scores = Scores.draw(random, usual, SCORES)
        rank = len(scores.shape)
        dim = -random.randint(1, rank) if chance(random, 0.15) else -1
        alone = dim != -1 and chance(random, 0.7)  # for the kernels of columns
        counts = dim == -1 and rank > 1  # queries and keys
        bias = None if alone else draw_row_bias(random, scores)
        # Its backward pass needs a log-sum-exp of which float32 leaves something.
        is_huge = scores.kind == "lowest" or (bias is not None and "lowest" in bias.kind)
        may_drop = dim == -1 and not is_huge and chance(random, 0.3)
        return cls(
            scores=scores,
            dim=dim,
            out=random.choice((None, None, HALF, BFLOAT, FLOAT)),
            scale=draw_scale(random, scores),
            mask=None if alone else Mask.draw(random, scores.shape),
            bias=bias,
            causal=counts and chance(random, 0.25),
            window=draw_window(random, scores.shape[-1]) if counts else None,
            ranges=Ranges.draw(random, scores.shape) if dim == -1 else None,
            sink=None if alone else Sink.draw(random, counts and rank > 2),
            dropout=random.choice((0.1, 0.5, 0.999, 1.0)) if may_drop else 0.0,
            incoming=Incoming.draw(random, rank),
        )

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        shape, rank, dim = self.scores.shape, len(self.scores.shape), self.dim
        mask = made(self.mask, data)
        visible = made(self.ranges, data)
        limits = (self.causal, self.window, visible)
        scores, bias, excluded = self.scores.make(data, self.bias, mask, *limits)
        incoming = self.incoming.make(data, shape, self.out or scores.dtype, shape[:-1])
        if self.scores.planted is not None and self.incoming.layout.expanded is None:
            incoming["g"] = incoming["g"].masked_fill(excluded, self.scores.planted)
        arguments: dict[str, Any] = {"scale": self.scale, "mask": mask, "bias": bias}
        arguments |= {"dtype": self.out, "causal": self.causal, "window": self.window}
        arguments["visible"] = visible
        if self.sink is not None:
            arguments["sink"] = self.sink.make(data, shape[-3] if rank > 2 else 1)

        if self.dropout > 0:
            seed = torch.tensor([math.prod(shape)], device=scores.device)
            kept = megasoftmax.reference.dropout.kept_of_scores(seed, self.dropout, scores)
            arguments |= {"dropout": self.dropout, "seed": seed}
            incoming["kept"] = kept

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


LOGITS = (
    *("two values", "ascending", "descending", "zeros of both signs"),
    *SCORES,
)


class Topk(Drawn):
    family = "softmax_topk"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Topk":
        # The oracle sorts on the CPU.
        logits = Scores.draw(random, usual // 4, LOGITS)
        most = min(logits.shape[-1], MAX_K)
        edges = [k for k in (0, 1, 2, 8, 16, 17, 32, 33, 64, MAX_K - 1, MAX_K) if k <= most]
        return cls(
            logits=logits,
            k=random.choice((*edges, random.randint(1, most), most)),
            out=random.choice((None, None, HALF, BFLOAT, FLOAT)),
            scale=draw_scale(random, logits),
            mask=Mask.draw(random, logits.shape),
            bias=draw_row_bias(random, logits),
            renormalize=chance(random, 0.4),
            incoming=Incoming.draw(random, len(logits.shape)),
        )

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        mask = made(self.mask, data)
        logits, bias, _ = self.logits.make(data, self.bias, mask, False, None)
        rows = self.logits.shape[:-1]
        incoming = self.incoming.make(data, (*rows, self.k), self.out or logits.dtype, rows)
        arguments: dict[str, Any] = {"scale": self.scale, "mask": mask, "bias": bias}
        arguments |= {"renormalize": self.renormalize, "dtype": self.out}
        unless_fused(megasoftmax.softmax_topk, fused, logits, self.k, **arguments)
        function = functools.partial(megasoftmax.softmax_topk, fused=fused)
        return oracle_topk.compare(function, logits, self.k, **arguments, **incoming)[1]


HEAD_DIMS = (1, 5, 8, 16, 20, 32, 33, 40, 64, 64, 72, 96, 128, 128, 160, 192, 255, MAX_HEAD_DIM)


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """torch's deterministic mode; warnings about the oracle's own products are not shown."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(wanted, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


class Attention(Drawn):
    """tiles: the mask is a TileMask, if "note"; or one of such blocks, if "64" and more.

    planted: in the bias of excluded pairs. visible: in about two visible entries of the bias.
    kernels: of KERNELS in tests/inputs.py.
    """

    family = "attention"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Attention":
        most = draw_most(random, usual)
        few = random.choices(("neither", "queries", "keys"), (75, 20, 5))[0]
        key_heads = random.choice((1, 1, 2, 3, 5))
        heads = key_heads * random.choice((1, 1, 2, 3, 4, 8))
        batch = random.choice((1, 1, 2, 3, 4, 6))
        pairs = max(most // (batch * heads), 16)
        longest = max(pairs // 64, 64)  # keys and values are tensors too
        head_dim = random.choice(HEAD_DIMS)
        if few == "queries":  # as in decoding
            queries = random.randint(1, 16)
            keys = draw_size(random, min(pairs, longest))
        elif few == "keys":  # sums over many queries
            batch, key_heads, heads = 1, 1, random.choice((1, 2, 3))
            keys, head_dim = 16, 160
            queries = min(max(most, usual // 2) // (heads * keys), 20000)
        else:
            keys = draw_size(random, min(int(pairs ** random.uniform(0.3, 1)), longest))
            queries = draw_size(random, min(pairs // keys, 3000))
        dtype, head_dims = random.choice((HALF, BFLOAT, FLOAT)), HEAD_DIMS
        if dtype == FLOAT and usual > USUAL["cpu"]:  # kernels take fewer than the reference
            head_dims = tuple(dim for dim in HEAD_DIMS if dim <= MAX_FLOAT_HEAD_DIM)
            head_dim = min(head_dim, head_dims[-1])
        shape = (batch, heads, queries, keys)
        tiles = random.choice((None, None, None, "note", "64", "128", "192"))
        scales = (None, None, 1.0, 0.3, 1e-3, 7.0, random.uniform(0.01, 2))
        bias = cls._draw_bias(random, shape, dtype)
        return cls(
            batch=batch,
            heads=heads,
            key_heads=key_heads,
            queries=queries,
            keys=keys,
            head_dim=head_dim,
            value_dim=head_dim if chance(random, 0.5) else random.choice(head_dims),
            dtype=dtype,
            query_layout=Layout.draw(random, 3),  # all columns alike would be rounded alike
            key_layout=Layout.draw(random, 3),
            value_layout=Layout.draw(random, 3),
            scale=random.choice(scales if dtype == HALF else (*scales, 1e-30, 1e4)),
            mask=cls._draw_mask(random, shape, tiles),
            tiles=tiles,
            bias=bias,
            causal=chance(random, 0.3),
            window=draw_window(random, keys),
            ranges=Ranges.draw(random, shape),
            sink=Sink.draw(random, per_head=True),
            planted=random.choice((NAN, INF, -INF)) if bias and chance(random, 0.3) else None,
            visible=random.choice((NAN, INF)) if bias and chance(random, 0.05) else None,
            deterministic=chance(random, 0.3),
            incoming=Incoming.draw(random, 4),
            kernels=random.choice(KERNELS),
        )

    @staticmethod
    def _draw_mask(random: Random, shape: Shape, tiles: str | None) -> Mask | None:
        if tiles is None or tiles == "note":
            return Mask.draw(random, shape)
        blocks = tuple(math.ceil(length / int(tiles)) for length in shape[2:])
        mask = Mask.draw(random, (*shape[:2], *blocks))
        if mask is None:
            return None
        leading = mask.shape[: max(len(mask.shape) - 2, 0)]
        kept = (*leading, *blocks)
        return Mask(**vars(mask) | {"shape": kept, "layout": Layout.draw(random, len(kept))})

    @staticmethod
    def _draw_bias(random: Random, shape: Shape, dtype: torch.dtype) -> Bias | None:
        """Dense, broadcast, shared by groups of batches and heads, or a table of distances."""
        kind = random.choices(("none", "dense", "relative"), (30, 50, 20))[0]
        if kind == "none":
            return None
        batch, heads, queries, keys = shape
        gradient = chance(random, 0.8)
        groups = (draw_divisor(random, batch), draw_divisor(random, heads))
        leading = random.choice(((batch, heads), (1, heads), (1, 1), groups))
        whole: Shape = (*leading, queries + keys - 1)
        if kind == "dense":
            whole = (*leading, random.choice((queries, queries, 1)), random.choice((keys, keys, 1)))
        may_lack_batch = whole[0] == 1 and whole[1] in (1, heads)  # groups have all dimensions
        missing = 1 if may_lack_batch and chance(random, 0.5) else 0
        return Bias.draw(
            random, whole[missing:], dtype, BIASES, gradient, relative=kind == "relative"
        )

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        of_keys = (self.batch, self.key_heads, self.keys)
        of_queries = (self.batch, self.heads, self.queries)
        query, key, value = (
            layout.place(data.normal(sizes).to(self.dtype))
            for layout, sizes in (
                (self.query_layout, (*of_queries, self.head_dim)),
                (self.key_layout, (*of_keys, self.head_dim)),
                (self.value_layout, (*of_keys, self.value_dim)),
            )
        )
        pairs = (*of_queries, self.keys)
        mask = made(self.mask, data)
        tile_mask = None
        if mask is not None and self.tiles is not None:
            is_plain = self.tiles == "note"
            tile_mask = TileMask(mask) if is_plain else TileMask.from_blocks(mask, int(self.tiles))
            mask = oracle_attention.mask_of_pairs(tile_mask, self.queries, self.keys)
        visible = made(self.ranges, data)
        arguments: dict[str, Any] = {
            "mask": mask if tile_mask is None else tile_mask,
            "scale": self.scale,
            "visible": visible,
        }
        arguments |= {"causal": self.causal, "window": self.window}
        if self.bias is not None:
            bias = self._bias(data, self.bias, pairs, mask, visible)
            arguments["bias"] = RelativeBias(bias) if self.bias.relative else bias
        if self.sink is not None:
            arguments["sink"] = self.sink.make(data, self.heads)
        incoming = self.incoming.make(data, (*of_queries, self.value_dim), self.dtype, of_queries)
        unless_fused(megasoftmax.attention, fused, query, key, value, **arguments)
        function = functools.partial(megasoftmax.attention, fused=fused)
        with determinism(self.deterministic), attention_kernels(self.kernels):
            return oracle_attention.compare(function, query, key, value, **arguments, **incoming)[1]

    def _bias(
        self,
        data: Data,
        bias: Bias,
        pairs: Shape,
        mask: Tensor | None,
        visible: oracle.Visible | None,
    ) -> Tensor:
        values = bias.values(data)
        in_groups = any(
            size not in (1, whole)
            for size, whole in zip(values.shape[::-1], pairs[::-1], strict=False)
        )
        if not bias.relative and not in_groups and bias.layout.expanded is None:
            z = torch.empty(pairs, device=data.device)
            excluded = oracle.excluded_entries(z, mask, self.causal, self.window, visible)
            unseen = nowhere_seen(excluded, values.shape)
            if self.planted is not None:
                values = values.masked_fill(unseen, self.planted)
            if self.visible is not None:
                values = values.masked_fill(spots(data, values.shape) & ~unseen, self.visible)
        return bias.lay(values)


Case = Softmax | Topk | Attention
FAMILIES: dict[str, type[Case]] = {"softmax": Softmax, "softmax_topk": Topk, "attention": Attention}
USUAL = {"cuda": 2**17, "cpu": 2**13}  # scores: few configurations have more
