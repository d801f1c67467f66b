"""The cases of bench_attention.py, their tensors, and what float64 says about them."""

from dataclasses import dataclass

import measure
import torch
from peers import Visible
from torch import Tensor

import megasoftmax

MOST = 40e9  # bytes of the keys and values of a decoding step
CHECKED = 256  # queries that are compared with float64
SOFTCAP = 50.0  # that of Gemma 2


@dataclass(frozen=True)
class Case(measure.Case):
    """Attention of query [batch, heads, queries, head_dim], in bfloat16 unless said otherwise.

    bias: None; "1,h" or "b,h", dense for the batch or for each example; "table", one value per
        head and distance between query and key; or "softcap", none, but scores capped at SOFTCAP.
    gradient: the bias gets one.
    window: of so many keys before the query's own; causal cases alone.
    decode: one step of inference: the forward alone, by the bytes of keys and values.
    flex: beside FlexAttention, which compiles for seconds.
    """

    written = (
        *("case", "batch", "heads", "key_heads", "queries", "keys", "head_dim", "dtype"),
        *("masking", "bias", "gradient", "sink", "decode"),
    )

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
        bias = self.bias if self.bias in (None, "softcap") else f"bias [{self.bias}]"
        words = [bias or "", "gradient" if self.gradient else ""]
        return " ".join(word for word in [*words, "sink" if self.sink else ""] if word) or "plain"

    @property
    def passes(self) -> tuple[str, ...]:
        """A gradient of the bias leaves the forward as it is."""
        if self.decode:
            return ("forward",)
        return (measure.BOTH,) if self.gradient else ("forward", measure.BOTH)

    @property
    def flops(self) -> dict[str, float]:
        """By pass; half of the scores of a causal mask count, and no gradient of the bias does."""
        pairs = self.queries * self.keys / (2 if self.causal else 1)
        if self.window is not None:
            pairs = sum(min(i, self.window) + 1 for i in range(self.queries))
        forward = 4 * self.batch * self.heads * self.head_dim * pairs
        return {"forward": forward, measure.BOTH: 3.5 * forward}

    @property
    def key_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.groups * self.keys * self.head_dim * self.dtype.itemsize

    @property
    def softcap(self) -> float | None:
        return SOFTCAP if self.bias == "softcap" else None

    def described(self) -> measure.Row:
        return super().described() | {"key_heads": self.groups, "bias": self.bias or ""}

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
    found = []
    for shape, bias, causal in (
        ((4, 16, 4096, 128), "1,h", False),
        ((4, 16, 4096, 128), "1,h", True),
        ((4, 16, 4096, 64), "1,h", False),
        ((2, 8, 4096, 128), "b,h", False),
        ((1, 16, 8192, 128), "1,h", True),
        ((8, 16, 1024, 64), "1,h", False),
        ((128, 4, 384, 32), "b,h", False),
    ):
        found.append(square(*shape, flex=False, causal=causal))
        found.append(square(*shape, bias=bias, causal=causal))
        found.append(square(*shape, bias=bias, gradient=True, causal=causal))
    # What float16 adds to the errors.
    found.append(square(4, 16, 4096, 128, flex=False, dtype=torch.float16))
    # Three products of TF32 for each, as SDPA's mem-efficient kernels make them.
    for head_dim in (64, 128):
        options = {"flex": False, "dtype": torch.float32}
        found.append(square(4, 16, 4096, head_dim, **options))
        found.append(square(4, 16, 4096, head_dim, causal=True, **options))
        found.append(square(4, 16, 4096, head_dim, bias="1,h", gradient=True, **options))
    found.append(square(1, 16, 8192, 128, causal=True, window=1023))
    found.append(square(4, 16, 4096, 128, causal=True, sink=True))
    found += [square(4, 16, 4096, 64, bias="table", gradient=each) for each in (False, True)]
    found.append(square(2, 32, 4096, 128, key_heads=8, causal=True))
    found.append(square(2, 16, 4096, 256, causal=True))
    found.append(square(4, 16, 4096, 96, causal=True))
    # Beside cases without a softcap, the first of Gemma 2's head dimension and heads.
    found.append(square(2, 8, 4096, 256, key_heads=4, causal=True))
    found.append(square(2, 8, 4096, 256, key_heads=4, causal=True, bias="softcap"))
    for bias in (None, "softcap"):
        found.append(square(2, 8, 8192, 256, key_heads=4, causal=True, window=4095, bias=bias))
    found.append(square(4, 16, 4096, 128, causal=True, bias="softcap"))
    found.append(square(4, 16, 4096, 64, causal=True, flex=False))
    found.append(square(4, 16, 4096, 64, causal=True, bias="softcap", flex=False))
    steps = [
        Case(batch, 32, 1, keys, 128, 8, decode=True, flex=keys in (8192, 131072))
        for keys in (8192, 32768, 65536, 131072)
        for batch in (1, 8, 64)
    ]
    return found + [step for step in steps if step.key_bytes <= MOST]


def visible(window: int | None) -> Visible:
    """Which keys a query sees under a causal mask, as FlexAttention's mask_mod."""
    if window is None:
        return lambda b, h, i, j: i >= j
    return lambda b, h, i, j: (i >= j) & (i - j <= window)


class Inputs:
    """The tensors of a case, on the default device; leaves are those that get a gradient.

    bias: dense, that of a table too. table: [heads, queries + keys - 1]. excluded: bool
    [queries, keys], True where a causal mask or a window excludes a key.
    """

    def __init__(self, case: Case):
        def normal(*shape: int, gradient: bool) -> Tensor:
            return torch.randn(shape, dtype=case.dtype).requires_grad_(gradient)

        training = not case.decode
        queries = (case.batch, case.heads, case.queries, case.head_dim)
        keys = (case.batch, case.groups, case.keys, case.head_dim)
        i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)[None]
        self.case = case
        self.query, self.key, self.value = (
            normal(*shape, gradient=training) for shape in (queries, keys, keys)
        )
        self.d_output = normal(*queries, gradient=False) if training else None
        self.sink = normal(case.heads, gradient=training) if case.sink else None
        self.bias: Tensor | None = None
        self.table: Tensor | None = None
        if case.bias == "table":
            columns = case.queries + case.keys - 1
            self.table = normal(case.heads, columns, gradient=case.gradient)
            dense = self.table.detach()[:, j - i + case.queries - 1].unsqueeze(0)
            self.bias = dense.requires_grad_(case.gradient)
        elif case.bias and case.softcap is None:
            shape = (1 if case.bias == "1,h" else case.batch, case.heads, case.queries, case.keys)
            self.bias = normal(*shape, gradient=case.gradient)
        self.excluded = ~visible(case.window)(i, i, i, j) if case.causal else None

    def leaves(self, bias: Tensor | None) -> tuple[Tensor, ...]:
        """What gets a gradient where this bias is read: the dense one, or the table."""
        found = (self.query, self.key, self.value, bias, self.sink)
        return tuple(leaf for leaf in found if leaf is not None and leaf.requires_grad)

    def checked(self, output: Tensor) -> Tensor:
        """Of an output, what `expected` has: some queries of the last head of the last example."""
        return output[-1, -1, :: max(1, self.case.queries // CHECKED)].detach().double()

    def expected(self) -> Tensor:
        """[checked queries, head_dim] in float64."""
        step = max(1, self.case.queries // CHECKED)
        query = self.query[-1:, -1:, ::step].detach().double()
        key, value = (each[-1:, -1:].detach().double() for each in (self.key, self.value))
        bias = None if self.bias is None else self.bias[-1:, -1:, ::step].detach().double()
        mask = None if self.excluded is None else self.excluded[::step]
        sink = None if self.sink is None else self.sink[-1:].detach()
        found = megasoftmax.attention(
            *(query, key, value),
            bias=bias,
            softcap=self.case.softcap,
            mask=mask,
            sink=sink,
            fused=False,
        )
        return found[0, 0]
