"""Leading dimensions of attention, and what broadcasts over them, against the oracle."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import op_checks
import oracle_attention
import pytest
import torch
from inputs import attention_on, coin, normal, tensors
from torch import Tensor

import megasoftmax
from megasoftmax import (
    FusedAttention,
    RelativeBias,
    ShiftedBias,
    TileMask,
    attention,
    ranges,
    why_not_fused,
)

HEADS, DIM = 4, 8  # of `tensors`
LEADING = [(), (3,), (2, 3), (1, 3), (3, 1), (2, 1, 3), (2, 2, 2)]


def all_sizes(leading: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What broadcasts to the leading dimensions, with fewer of them too."""
    sizes = itertools.product(*[sorted({1, size}) for size in leading])
    starts = range(len(leading) + 1)
    return [each[i:] for each in sizes for i in starts if each[:i] == (1,) * i]


def type_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float64


@pytest.mark.parametrize(
    ("leading", "sizes"),
    [(leading, sizes) for leading in LEADING for sizes in all_sizes(leading)],
    ids=str,
)
def test_broadcasting(leading: tuple[int, ...], sizes: tuple[int, ...], device: str) -> None:
    """Each operand of each shape, with every gradient."""
    dtype, (m, n) = type_on(device), (130, 197) if device == "cuda" else (5, 7)
    given = tensors(device, dtype, batch=leading, lengths=(m, n))
    function = attention_on(device, dtype)
    check = functools.partial(oracle_attention.check, function, *given)
    of = functools.partial(normal, device=device, dtype=dtype, seed=4)
    excludes = functools.partial(coin, device=device, odds=0.3)
    sink = normal(HEADS, device=device, dtype=dtype, seed=5).requires_grad_()
    check(bias=of(*sizes, HEADS, m, n).requires_grad_(), sink=sink, what="bias")
    check(bias=of(*sizes, 1, 1, n).requires_grad_(), causal=True, what="bias of keys")
    check(bias=RelativeBias(of(*sizes, HEADS, m + n - 1).requires_grad_()), what="table")
    check(bias=ShiftedBias(of(*sizes, HEADS, m, m + n + 1).requires_grad_()), what="shifted")
    check(mask=excludes(*sizes, 1, m, n), window=(3, -1), what="mask")
    check(mask=excludes(*sizes, HEADS, 1, n), sink=sink, what="mask of keys")
    check(mask=TileMask(excludes(*sizes, 1, m, n)), what="TileMask")
    blocks = excludes(*sizes, 1, -(-m // 64), -(-n // 64))
    check(mask=TileMask.from_blocks(blocks, 64), sink=0.5, what="blocks")
    end = torch.randint(n + 1, (*sizes, 1, m), device=device)
    check(visible=(None, end), what="end")
    beside = {"bias": of(HEADS, m, n).requires_grad_(), "mask": excludes(*sizes, 1, 1, n)}
    check(visible=(end - 3, end.int()), **beside, what="all")


@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries(queries: int, device: str) -> None:
    """Kernels of few queries read the mask itself."""
    dtype, leading = type_on(device), (2, 3)
    given = tensors(device, dtype, batch=leading, lengths=(queries, 70))
    for sizes in all_sizes(leading):
        mask = coin(*sizes, 1, 1, 70, device=device, odds=0.3)
        bias = normal(*sizes, HEADS, queries, 70, device=device, dtype=dtype).requires_grad_()
        for limits in ({"mask": mask}, {"mask": TileMask(mask)}, {"bias": bias}):
            oracle_attention.check(attention_on(device, dtype), *given, **limits, what=f"{sizes}")


def test_layout_of_results(device: str) -> None:
    """The projection that follows needs no copy, and the output may be changed in place."""
    for leading in LEADING:
        query, key, value = tensors(device, type_on(device), batch=leading, lengths=(5, 7))
        output, lse = attention(query.requires_grad_(), key, value, return_lse=True)
        assert output.shape == (*leading, HEADS, 5, DIM)
        assert output.transpose(-3, -2).is_contiguous()
        assert lse.shape == (*leading, HEADS, 5)
        output.mul_(2)


def test_triangle_attention(device: str) -> None:
    """Rows share the bias of their structure, and each hides keys of its own."""
    b, rows, m = 2, 3, 9
    query, key, value = tensors(device, type_on(device), batch=(b, rows), lengths=m)
    bias = normal(b, 1, HEADS, m, m, device=device, dtype=query.dtype).requires_grad_()
    mask = coin(b, rows, 1, 1, m, device=device)
    found = attention(query, key, value, bias=bias, mask=mask)
    assert why_not_fused(attention, query, key, value, bias=bias, mask=mask).copies == ()
    given = ([each[:, i] for each in (query, key, value, mask)] for i in range(rows))
    of_rows = [attention(*three, bias=bias[:, 0], mask=own) for *three, own in given]
    torch.testing.assert_close(found, torch.stack(of_rows, 1))


def test_shifted_windows(device: str) -> None:
    """Windows have masks of their own, the same in each image; all share a bias."""
    images, windows, m = 3, 4, 9
    query, key, value = tensors(device, type_on(device), batch=(images, windows), lengths=m)
    bias = normal(HEADS, m, m, device=device, dtype=query.dtype)
    mask = coin(windows, 1, m, m, device=device)
    found = attention(query, key, value, bias=bias, mask=mask)
    for i in range(windows):
        of_window = query[:, i], key[:, i], value[:, i]
        torch.testing.assert_close(found[:, i], attention(*of_window, bias=bias, mask=mask[i]))


def apart(tensor: Tensor) -> Tensor:
    """The first two dimensions exchanged in memory, so that they do not merge."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


COPIES: dict[str, tuple[Callable[[Tensor], dict[str, Any]], list[str]]] = {
    "nothing": (lambda q: {}, []),
    "query": (lambda q: {"query": apart(q)}, ["query"]),
    "expanded key": (lambda q: {"key": q[:, :1].expand_as(q)}, ["key"]),
    "key of one for all": (lambda q: {"key": q[:1, :1].expand_as(q)}, []),
    "bias": (lambda q: {"bias": q.new_zeros(2, 3, 4, 5, 5)}, []),
    "bias of the outer": (lambda q: {"bias": q.new_zeros(2, 1, 4, 5, 5)}, []),
    "bias of the inner": (lambda q: {"bias": q.new_zeros(3, 4, 5, 5)}, ["bias"]),
    "bias of heads": (lambda q: {"bias": q.new_zeros(4, 5, 5)}, []),
    "bias apart": (lambda q: {"bias": apart(q.new_zeros(2, 3, 4, 5, 5))}, ["bias"]),
    "table": (lambda q: {"bias": RelativeBias(q.new_zeros(1, 3, 4, 9))}, ["bias.table"]),
    "mask of the inner": (lambda q: {"mask": q.new_zeros(3, 1, 1, 5).bool()}, []),
    "mask of the outer": (lambda q: {"mask": q.new_zeros(2, 1, 1, 1, 5).bool()}, ["mask"]),
    "mask of all": (lambda q: {"mask": q.new_zeros(2, 3, 1, 1, 5).bool()}, []),
    "TileMask": (lambda q: {"mask": TileMask(q.new_zeros(3, 1, 5, 5).bool())}, []),
    "ranges": (lambda q: {"visible": (None, q.new_zeros(3, 1, 5).int())}, ["visible[1]"]),
    "one of all": (lambda q: {"mask": q.new_zeros(1, 1, 1, 1, 5).bool()}, []),
}


@pytest.mark.parametrize("case", COPIES)
def test_copies_are_told(case: str) -> None:
    query = torch.zeros(2, 3, 4, 5, 8)
    make, names = COPIES[case]
    call = {"query": query, "key": query, "value": query} | make(query)
    found = why_not_fused(attention, **call)
    expected = [f"leading dimensions of {name}" for name in names]
    assert [each.constraint for each in found.copies] == expected
    query = torch.zeros(6, 4, 5, 8)
    assert why_not_fused(attention, query, query, query).copies == ()


def test_merging_makes_no_copy() -> None:
    """Where `copies` is empty, operands are views of what was given."""
    from megasoftmax.functions import leading
    from megasoftmax.options import AttentionOptions

    for case, (make, names) in COPIES.items():
        query = torch.zeros(2, 3, 4, 5, 8)
        call = {"query": query, "key": query, "value": query} | make(query)
        given = tuple(call.pop(name) for name in ("query", "key", "value"))
        *merged, options = leading.merged(*given, AttentionOptions(**call))
        states = zip(given, merged, strict=True)
        pairs = dict(zip(("query", "key", "value"), states, strict=True))
        operands = (leading._operands(each) for each in (AttentionOptions(**call), options))
        for (name, one, *_), (_, other, *_) in zip(*operands, strict=True):
            pairs[name] = one, other
        places = {
            name: {each.untyped_storage().data_ptr() for each in pair}
            for name, pair in pairs.items()
        }
        assert [name for name, found in places.items() if len(found) > 1] == names, case


def test_a_tile_mask_keeps_what_it_merges() -> None:
    mask = TileMask(torch.rand(3, 1, 5, 5) < 0.5)
    query = torch.randn(2, 3, 4, 5, 8)
    found = attention(query, query, query, mask=mask)
    (kept,) = mask._merged.values()
    assert attention(query, query, query, mask=mask).equal(found)
    assert [*mask._merged.values()] == [kept]
    four = torch.randn(4, 3, 4, 5, 8)
    attention(four, four, four, mask=mask)
    assert len(mask._merged) == 2


def test_a_tile_mask_of_inference_serves_training() -> None:
    mask = TileMask(torch.rand(3, 1, 5, 5) < 0.5)
    query = torch.randn(2, 3, 4, 5, 8)
    with torch.inference_mode():
        expected = attention(query, query, query, mask=mask, fused=False)
    leaf = query.clone().requires_grad_()
    found = attention(leaf, query, query, mask=mask, fused=False)
    assert found.equal(expected)
    found.sum().backward()
    assert leaf.grad is not None


OUTER = "if number i reads entry i // 2, pass query.unflatten(0, (3, 2)) and "
INNER = ".unsqueeze(1), if it reads entry i % 3, pass query.unflatten(0, (2, 3)), "
BLOCKS = torch.zeros(3, 1, 1, 1, dtype=torch.bool)
# Options, and how the error calls what examples share.
SHARING: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": torch.zeros(3, 4, 5, 5)}, "bias"),
    "mask": ({"mask": torch.zeros(3, 1, 5, 5).bool()}, "mask"),
    "TileMask": ({"mask": TileMask.from_blocks(BLOCKS, 64)}, "mask"),
    "table": ({"bias": RelativeBias(torch.zeros(3, 4, 9))}, "bias.table"),
    "ranges": ({"visible": (None, torch.zeros(3, 1, 5).int())}, "visible[1]"),
}


@pytest.mark.parametrize("name", SHARING)
def test_sharing_by_division_is_refused(name: str) -> None:
    """The error says both reshapes, and each does what it says."""
    options, shared = SHARING[name]
    query = torch.randn(6, 4, 5, 8)
    for function in (attention, functools.partial(why_not_fused, attention), FusedAttention(4)):
        with pytest.raises(ValueError, match=r"^(bias|mask|visible)") as error:
            function(query, query, query, **options)
        assert f"{OUTER}{shared}{INNER}and key and value likewise" in str(error.value)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_the_error_says_is_right(dim: int) -> None:
    """Of examples, and of heads."""
    query = torch.randn(6, 6, 5, 8)
    bias = torch.randn(6, 6, 5, 5).narrow(dim, 0, 3)
    with pytest.raises(ValueError, match="bias: expected") as error:
        attention(query, query, query, bias=bias)
    _, outer, inner = str(error.value).split(", pass ")
    for text, expand in (
        (outer, lambda: bias.repeat_interleave(2, dim)),
        (inner, lambda: torch.cat([bias, bias], dim)),
    ):
        reshaped, _, shared = text.split(", if it")[0].split(", and key")[0].partition(" and ")
        q = eval(reshaped, {"query": query})
        entries = eval(shared or "bias", {"bias": bias})
        found = attention(q, q, q, bias=entries).flatten(dim, dim + 1)
        expected = attention(query, query, query, bias=expand())
        torch.testing.assert_close(found, expected)


def test_shapes_that_do_not_fit() -> None:
    query = torch.zeros(2, 3, 4, 5, 8)
    for name, tensor in (("key", query[:, :1]), ("key", query[0]), ("value", query[:1])):
        given = {"query": query, "key": query, "value": query} | {name: tensor}
        with pytest.raises(ValueError, match=rf"^{name}: expected shape \[2, 3, "):
            attention(**given)
    with pytest.raises(ValueError, match=r"^query: expected \[\.\.\., heads, queries, head_dim\]"):
        attention(*[query[0, 0, 0]] * 3)
    for name, operand in (
        ("bias", torch.zeros(3, 1, 4, 5, 5)),
        ("mask", torch.zeros(2, 1, 5, 5).bool()),
        ("mask", torch.zeros(1, 2, 3, 4, 5, 5).bool()),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: expected a shape that broadcasts to"):
            attention(query, query, query, **{name: operand})


def test_dropout_is_that_of_softmax() -> None:
    """Heads are counted over all leading dimensions."""
    query, key, value = tensors("cpu", torch.float64, batch=(2, 3), lengths=(5, 7))
    key, value = (each.repeat_interleave(2, -3) for each in (key, value))
    seed = torch.tensor([3])
    weights = megasoftmax.softmax(query @ key.mT, scale=DIM**-0.5, dropout=0.4, seed=seed)
    found = attention(query, key, value, dropout=0.4, seed=seed)
    torch.testing.assert_close(found, weights @ value)


def test_vmap_compile_and_export() -> None:
    query, key, value = tensors("cpu", batch=(2, 3), lengths=(5, 7))
    bias = normal(2, 1, HEADS, 5, 7, device="cpu")
    mask = coin(3, 1, 1, 7, device="cpu", odds=0.3)

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attention(query, key, value, bias=bias, mask=mask)

    expected = call(query, key, value, bias)
    torch.testing.assert_close(torch.vmap(call)(query, key, value, bias[:, 0]), expected)

    def of_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return attention(query, key, value, bias=bias[:, 0], mask=mask)

    of_rows = torch.vmap(of_row, (1, 1, 1, 0), 1)
    torch.testing.assert_close(of_rows(query, key, value, mask), expected)
    masks = coin(2, 3, 1, 1, 7, device="cpu", odds=0.3)
    images = [normal(2, *each.shape, device="cpu") for each in (query, key, value)]
    of_images = torch.vmap(lambda q, k, v, of_rows: attention(q, k, v, mask=of_rows))
    each = [attention(*three, mask=of_rows) for *three, of_rows in zip(*images, masks, strict=True)]
    torch.testing.assert_close(of_images(*images, masks), torch.stack(each))
    torch.testing.assert_close(of_images(*images, masks[1].expand(2, -1, 1, 1, -1))[1], each[1])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value, bias), expected)
    batch = torch.export.Dim("batch", min=2, max=99)
    given = (query, key, value, bias)
    sizes = (({0: batch},) * 4,)
    program = torch.export.export(op_checks.Called(call), given, dynamic_shapes=sizes)
    four = [torch.cat([each, each]) for each in given]
    torch.testing.assert_close(program.module()(*four), torch.cat([expected, expected]))


def test_gradcheck() -> None:
    bias = normal(2, HEADS, 3, 4, device="cpu", dtype=torch.float64)
    given = (*tensors("cpu", torch.float64, batch=(2, 2), lengths=(3, 4)), bias)
    inputs = tuple(each.requires_grad_() for each in given)
    call = functools.partial(attention, return_lse=True)
    assert torch.autograd.gradcheck(lambda q, k, v, b: call(q, k, v, bias=b), inputs)


def test_ranges_of_more_dimensions(device: str) -> None:
    keep = torch.ones(2, 3, 7, dtype=torch.bool, device=device)
    keep[0, 1, 4:] = False
    keep[1, 2, :2] = False
    given = tensors(device, type_on(device), batch=(2, 3), lengths=7)
    lengths = keep.sum(-1)
    behind = torch.arange(7, device=device) >= lengths[..., None, None, None]
    for visible, mask in (
        (ranges.padding(keep), ~keep[:, :, None, None]),
        (ranges.lengths(lengths), behind),
    ):
        found = attention(*given, visible=visible, fused=False)
        torch.testing.assert_close(found, attention(*given, mask=mask, fused=False))
