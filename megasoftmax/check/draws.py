"""What random configurations are made of: sizes, layouts, masks, ranges and values.

Edges of sizes, and of the tables in limits.h, are drawn often. The same seed draws the same.
"""

import math
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

import megasoftmax
from megasoftmax.limits import kernel_limits

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
INF, NAN = torch.inf, torch.nan
Shape = tuple[int, ...]

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
# Of routers that run fused: their K and columns.
MAX_ROUTER_K, MAX_EXPERTS = LIMITS.topk["kTileMaxK"], LIMITS.topk["kRouterMaxColumns"]
LARGE = 16  # times the usual size
HEAD_DIMS = (1, 5, 8, 16, 20, 32, 33, 40, 64, 64, 72, 96, 128, 128, 160, 192, 255, MAX_HEAD_DIM)


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


def draw_experts(random: Random, most: int, dtype: torch.dtype) -> int:
    """The length of a row of a router that runs fused."""
    pack = 16 // dtype.itemsize
    return pack * draw_size(random, min(most, MAX_EXPERTS) // pack)


def draw_rows(
    random: Random, usual: int, length: Callable[..., int] = draw_columns
) -> tuple[Shape, torch.dtype]:
    """The shape of scores, whose last dimension is a row of such a length, and their type."""
    dtype, most = random.choice((HALF, BFLOAT, FLOAT)), draw_most(random, usual)
    columns = length(random, min(int(most ** random.uniform(0.3, 1)), usual), dtype)
    leading: list[int] = []
    for _ in range(random.choices(range(6), (4, 16, 20, 40, 12, 8))[0]):
        rows = min(most // (columns * math.prod(leading)), random.choice((300, 300, most)))
        leading.insert(random.randrange(len(leading) + 1), draw_size(random, rows))
    return (*leading, columns), dtype


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
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def uniform(self, shape: Shape) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.device)

    def coin(self, shape: Shape, odds: float) -> Tensor:
        return self.uniform(shape) < odds


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
            if value is None or value is False or value == self.usual.get(name):
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
        if not chance(random, 0.45):
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


class OfRows(Drawn):
    """A number of each row, uniform from low to high, truncated for integer types."""

    @classmethod
    def draw(cls, random: Random, rows: Shape, low: float, high: float, *dtypes: Any) -> "OfRows":
        kept = draw_broadcast(random, rows)
        return cls(
            shape=kept,
            low=low,
            high=high,
            dtype=random.choice(dtypes or (FLOAT, FLOAT, HALF, BFLOAT)),
            layout=Layout.draw(random, len(kept)),
        )

    def make(self, data: Data) -> Tensor:
        values = self.low + (self.high - self.low) * data.uniform(self.shape)
        return self.layout.place(values.to(self.dtype))


ROW_LIMITS = "top_k", "top_p", "min_p"


def draw_limits(random: Random, rows: Shape, k: int) -> dict[str, Any]:
    """top_k, top_p and min_p, each None, a number or one of each row. Some limit nothing."""
    if chance(random, 0.4):
        return dict.fromkeys(ROW_LIMITS)
    whole = (torch.int32, torch.int64)
    # On a CPU a tensor without dimensions is a number, which has to be from 1 on.
    of_rows = OfRows.draw(random, rows, 0, k + 3, *whole)
    of_rows.low = 0 if of_rows.shape else 1
    limits = {
        "top_k": (random.randint(1, k + 2), of_rows),
        "top_p": (
            random.choice((0.0, 0.5, 0.999, 1.0, random.random())),
            OfRows.draw(random, rows, 0.05, 1.0),
        ),
        "min_p": (
            random.choice((0.0, 0.01, 1.0, random.random())),
            OfRows.draw(random, rows, 0.0, 0.3),
        ),
    }
    return {name: random.choice((None, *kinds)) for name, kinds in limits.items()}


class SelectionBias(Drawn):
    """What is added to scores where they are chosen."""

    @classmethod
    def draw(cls, random: Random, shape: Shape) -> "SelectionBias":
        """For logits of a shape. Kernels take one bias for all rows."""
        kept = shape[-1:] if chance(random, 0.9) else draw_broadcast(random, shape)
        return cls(
            shape=kept,
            kind=random.choice(("normal", "levels", "levels", "-inf in places")),
            magnitude=random.choice((1e-8, 1e-3, 0.3, 0.3, 1.0, 1e4)),
            dtype=random.choice((FLOAT, FLOAT, BFLOAT, HALF)),
            layout=Layout.draw(random, len(kept)),
        )

    def make(self, data: Data) -> Tensor:
        x = data.normal(self.shape)
        if self.kind == "levels":  # many equals
            x = x.round().clamp(-1, 1)
        elif self.kind == "-inf in places":
            x = x.masked_fill(data.coin(self.shape, 0.3), -INF)
        return self.layout.place(rounded(self.magnitude * x, self.dtype))


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

    def make(self, data: Data) -> tuple[Tensor | None, Tensor | None]:
        """Some reach beyond the keys."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * data.uniform(self.shape)

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
        first, end = (bound.floor().to(self.dtype) for bound in (first, end))
        return (
            self.first_layout.place(first) if self.has_first else None,
            self.end_layout.place(end) if self.has_end else None,
        )


def made(drawn: Any, data: Data) -> Any:
    """A tensor or a pair of them; a number or None as it is."""
    return drawn.make(data) if isinstance(drawn, Drawn) else drawn


def unless_fused(
    function: Callable[..., Any], fused: bool | None, *args: Any, **given: Any
) -> None:
    """Raises NotFusedError where a call that must run fused cannot."""
    reasons = megasoftmax.why_not_fused(function, *args, **given) if fused else ()
    if reasons:
        raise NotFusedError("; ".join(map(str, reasons)))
