"""The cases of bench_attention.py, their tensors, and what float64 says about them."""

from collections.abc import Callable
from dataclasses import dataclass

import measure
import torch
from torch import Tensor

DEVICE = "cuda"
MOST = 40e9  # bytes of the keys and values of a decoding step
CHECKED = 256  # queries that are compared with float64

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Attention of query [batch, heads, queries, head_dim], in bfloat16 unless said otherwise.

    bias: None; "1,h" or "b,h", dense for the batch or for each example; or "table", one value per
        head and distance between query and key.
    gradient: the bias gets one.
    window: of so many keys before the query's own; causal cases alone.
    decode: one step of inference: the forward alone, by the bytes of keys and values.
    flex: beside FlexAttention, which compiles for seconds.
    quick: part of a quick run.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    key_heads: int | None = None  # None: as many as heads
    causal: bool = False
    window: int | None = None
    bias: str | None = None
    gradient: bool = False
    sink: bool = False
    decode: bool = False
    flex: bool = True
    quick: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    @property
    def masking(self) -> str:
        if self.window is not None:
            return f"window {self.window}"
        return "causal" if self.causal else "full"

    @property
    def variant(self) -> str:
        """What is added to the scores."""
        words = [f"bias [{self.bias}]" if self.bias else "", "gradient" if self.gradient else ""]
        return " ".join(word for word in [*words, "sink" if self.sink else ""] if word) or "plain"

    @property
    def pairs(self) -> float:
        """Scores of a head that count: half of them under a causal mask, by convention."""
        if self.window is not None:
            return sum(min(i, self.window) + 1 for i in range(self.queries))
        return self.queries * self.keys / (2 if self.causal else 1)

    @property
    def flops(self) -> dict[str, float]:
        """By pass; the gradient of the bias is not counted."""
        forward = 4 * self.batch * self.heads * self.head_dim * self.pairs
        return {"forward": forward, "forward+backward": 3.5 * forward}

    @property
    def key_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.groups * self.keys * self.head_dim * self.dtype.itemsize

    def __str__(self) -> str:
        heads = str(self.heads) if self.groups == self.heads else f"{self.heads}/{self.groups}"
        length = str(self.keys) if self.queries == self.keys else f"{self.queries}x{self.keys}"
        name = f"{self.batch}x{heads}x{length}x{self.head_dim} {self.masking} {self.variant}"
        name += "" if self.dtype == torch.bfloat16 else f" {measure.dtype_name(self.dtype)}"
        return f"decode {name}" if self.decode else name


def square(batch: int, heads: int, length: int, head_dim: int, **rest) -> Case:
    return Case(batch, heads, length, length, head_dim, **rest)


def cases() -> list[Case]:
    """Every case, in an order in which the largest tensors come last."""
    shapes = [
        ((4, 16, 4096, 128), "1,h", False, True),
        ((4, 16, 4096, 128), "1,h", True, True),
        ((4, 16, 4096, 64), "1,h", False, False),
        ((2, 8, 4096, 128), "b,h", False, False),
        ((1, 16, 8192, 128), "1,h", True, False),
        ((8, 16, 1024, 64), "1,h", False, False),
        ((128, 4, 384, 32), "b,h", False, False),
    ]
    found = []
    for shape, bias, causal, quick in shapes:
        options = {"causal": causal, "quick": quick}
        found.append(square(*shape, flex=False, **options))
        found.append(square(*shape, bias=bias, **options))
        found.append(square(*shape, bias=bias, gradient=True, **options))
    # What float16 adds to the errors.
    found.append(square(4, 16, 4096, 128, flex=False, dtype=torch.float16))
    # Three products of TF32 for each, as SDPA's mem-efficient kernels make them.
    for head_dim in (64, 128):
        options = {"flex": False, "dtype": torch.float32}
        found.append(square(4, 16, 4096, head_dim, **options))
        found.append(square(4, 16, 4096, head_dim, causal=True, **options))
        found.append(square(4, 16, 4096, head_dim, bias="1,h", gradient=True, **options))
    found.append(square(1, 16, 8192, 128, causal=True, window=1023, quick=True))
    found.append(square(4, 16, 4096, 128, causal=True, sink=True))
    for gradient in (False, True):
        found.append(square(4, 16, 4096, 64, bias="table", gradient=gradient))
    found.append(square(2, 32, 4096, 128, key_heads=8, causal=True))
    found.append(square(2, 16, 4096, 256, causal=True))
    found.append(square(4, 16, 4096, 96, causal=True))
    quick_steps = [(8192, 8), (8192, 64), (131072, 1)]
    for keys in (8192, 32768, 65536, 131072):
        for batch in (1, 8, 64):
            quick = (keys, batch) in quick_steps
            flex = keys in (8192, 131072)
            step = Case(batch, 32, 1, keys, 128, 8, decode=True, flex=flex, quick=quick)
            if step.key_bytes <= MOST:
                found.append(step)
    return found


def visible(window: int | None) -> Visible:
    """Which keys a query sees under a causal mask, as FlexAttention's mask_mod."""
    if window is None:
        return lambda b, h, i, j: i >= j
    return lambda b, h, i, j: (i >= j) & (i - j <= window)


class Inputs:
    """The tensors of a case; what gets a gradient is a leaf that requires one.

    bias: dense, that of a table too. table: [heads, queries + keys - 1]. excluded: bool
    [queries, keys], True where a causal mask or a window excludes a key.
    """

    def __init__(self, case: Case):
        def normal(*shape: int, gradient: bool) -> Tensor:
            values = torch.randn(shape, device=DEVICE, dtype=case.dtype)
            return values.requires_grad_(gradient)

        training = not case.decode
        queries = (case.batch, case.heads, case.queries, case.head_dim)
        keys = (case.batch, case.groups, case.keys, case.head_dim)
        self.case = case
        self.query = normal(*queries, gradient=training)
        self.key = normal(*keys, gradient=training)
        self.value = normal(*keys, gradient=training)
        self.d_output = normal(*queries, gradient=False) if training else None
        self.sink = normal(case.heads, gradient=training) if case.sink else None
        self.bias: Tensor | None = None
        self.table: Tensor | None = None
        if case.bias == "table":
            columns = case.queries + case.keys - 1
            self.table = normal(case.heads, columns, gradient=case.gradient)
            i, j = self._places()
            dense = self.table.detach()[:, j - i + case.queries - 1].unsqueeze(0)
            self.bias = dense.requires_grad_(case.gradient)
        elif case.bias:
            batch = 1 if case.bias == "1,h" else case.batch
            shape = (batch, case.heads, case.queries, case.keys)
            self.bias = normal(*shape, gradient=case.gradient)
        self.excluded: Tensor | None = None
        if case.causal:
            i, j = self._places()
            self.excluded = ~visible(case.window)(i, i, i, j)

    def _places(self) -> tuple[Tensor, Tensor]:
        i = torch.arange(self.case.queries, device=DEVICE)
        return i[:, None], torch.arange(self.case.keys, device=DEVICE)[None]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient wherever the bias is dense."""
        optional = (self.bias, self.sink)
        leaves = (
            self.query,
            self.key,
            self.value,
            *(leaf for leaf in optional if leaf is not None),
        )
        return tuple(leaf for leaf in leaves if leaf.requires_grad)

    def checked(self, output: Tensor) -> Tensor:
        """Of an output, what `expected` has: some queries of the last head of the last example."""
        return output[-1, -1, :: max(1, self.case.queries // CHECKED)].detach().double()

    def expected(self) -> Tensor:
        """[checked queries, head_dim] in float64."""
        case = self.case
        step = max(1, case.queries // CHECKED)
        query = self.query[-1, -1, ::step].detach().double()
        key, value = (tensor[-1, -1].detach().double() for tensor in (self.key, self.value))
        scores = query @ key.T * case.head_dim**-0.5
        if self.bias is not None:
            scores += self.bias[-1, -1, ::step].detach().double()
        if self.excluded is not None:
            scores.masked_fill_(self.excluded[::step], -torch.inf)
        if self.sink is None:
            return scores.softmax(-1) @ value
        sink = self.sink[-1].detach().double().expand(len(scores), 1)
        return torch.cat([scores, sink], -1).softmax(-1)[:, :-1] @ value
