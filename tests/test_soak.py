"""The soak benchmark on a CPU: configurations are right, faults are found and can be reproduced."""

import contextlib
import csv
import functools
import re
from random import Random

import pytest
import soak
import torch
from faults import FAULTS, lost_query, other_scale, scales_of_one_row
from soak_cases import FAMILIES, Attention, Bias, Data, Incoming, Layout

import megasoftmax
from megasoftmax import check
from megasoftmax.check.cases import USUAL

FIRST = 1000


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 25))
@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_is_right(family, seed):
    outcome = soak.SUITE.attempt(family, seed, "cpu")
    assert not outcome.has_failed, outcome.in_words()
    assert outcome.ratio > 0 or outcome.result


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_fixes_configuration_and_data(family):
    first, second = (soak.SUITE.attempt(family, FIRST, "cpu") for _ in range(2))
    assert (first.words, first.ratio, first.result) == (second.words, second.ratio, second.result)
    assert first.words != soak.SUITE.attempt(family, FIRST + 1, "cpu").words


@pytest.mark.parametrize(
    "family",
    [*FAMILIES.values(), *check.SUITE.families.values()],
    ids=lambda family: f"{family.__module__}, {family.__name__}",
)
def test_every_dimension_is_drawn(family):
    """Each field has several values, and None among them where it may be absent."""
    for device in USUAL:
        cases = [family.draw(Random(i), USUAL[device]) for i in range(400)]
        for name in vars(cases[0]):
            kinds = {str(getattr(case, name)) for case in cases}
            assert len(kinds) > 1, name
        for name in {"mask", "bias", "window", "sink"} & set(vars(cases[0])):
            assert {getattr(case, name) is None for case in cases} == {False, True}


@pytest.mark.parametrize("order", ["as it is", "keys and queries swapped", "reversed"])
def test_storage_ends_where_the_tensor_ends(order):
    values = torch.arange(24.0).view(2, 3, 4)
    placed = Layout(order=order, step=2, padding=3, offset=5).place(values)
    assert torch.equal(placed, values)
    assert placed.storage_offset() == 5
    last = 5 + sum(
        (n - 1) * stride for n, stride in zip(placed.shape, placed.stride(), strict=True)
    )
    assert placed.untyped_storage().nbytes() == 4 * (last + 1)
    expanded = Layout(order=order, expanded=1).place(values)
    assert expanded.stride(1) == 0
    assert torch.equal(expanded, values[:, :1].expand(2, 3, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_run_writes_a_row(fails, tmp_path, capsys, monkeypatch):
    """A call that raises is a failure."""
    if fails:
        monkeypatch.setattr(megasoftmax, "softmax", lambda *tensors, **given: 1 / 0)
    out = tmp_path / "soak.csv"
    options = {"first": FIRST, "processes": 1, "out": out, "commit": "abc"}
    with pytest.raises(SystemExit, match="1") if fails else contextlib.nullcontext():
        soak.main(1.0, ["softmax"], "cpu", **options)
    assert ("ZeroDivisionError" in capsys.readouterr().out) == fails
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row)[4:] == soak.FIELDS
    assert (row["family"], row["failures"] != "0", row["commit"]) == ("softmax", fails, "abc")
    assert int(row["configurations"]) > 1
    assert fails or 0 < float(row["worst_ratio"]) <= 1
    assert int(row["seed"]) >= FIRST


EQUAL_QUERIES = Attention(
    shape=(1, 2, 128, 16),
    key_heads=1,
    head_dim=160,
    value_dim=160,
    dtype=torch.float16,
    query_layout=Layout(order="queries and heads swapped", padding=1, offset=4, expanded=2),
    key_layout=Layout(),
    value_layout=Layout(),
    scale=1.0,
    bias=Bias(
        shape=(2, 143),
        dtype=torch.float32,
        kind="levels",
        magnitude=1.0,
        held=torch.float16,
        gradient=True,
        layout=Layout(step=2, padding=1, offset=8),
    ),
    relative=True,
    incoming=Incoming(ones=True, layout=Layout(), lse=False),
    deterministic=False,
    kernels="own",
    **dict.fromkeys(("mask", "tiles", "window", "ranges", "sink", "planted", "visible", "softcap")),
    causal=False,
)
"""Queries that are all equal, whose outputs are rounded alike."""


# Faults


def with_lost_sum(function, *tensors, **given):
    """The gradient of a bias is that of its first user, times the number of them."""

    class Forget(torch.autograd.Function):
        @staticmethod
        def forward(ctx, bias, shape):
            ctx.shape = bias.shape
            return bias.expand(shape).clone()

        @staticmethod
        def backward(ctx, gradient):
            index = tuple(slice(0, size) for size in ctx.shape[-gradient.dim() :])
            return gradient[(0,) * (gradient.dim() - len(ctx.shape)) + index], None

    bias = given.get("bias")
    if isinstance(bias, torch.Tensor) and given.get("dim", -1) == -1:
        given["bias"] = Forget.apply(bias, tensors[0].shape)
    return function(*tensors, **given)


def with_rounded_gradients(function, *tensors, **given):
    """Half of the precision of 16 bits in the gradients of the keys."""
    query, key, value = tensors
    key = key.view_as(key)
    if key.requires_grad:
        key.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))
    return function(query, key, value, **given)


@pytest.mark.parametrize(
    ("function", "fault", "result"),
    [
        *FAULTS,
        ("softmax", with_lost_sum, "gradient of bias"),
        ("softmax_topk", with_lost_sum, "gradient of bias"),
        ("softmax_topk", scales_of_one_row, ""),
    ],
)
def test_fault_is_found_and_reproduced(function, fault, result, capsys, monkeypatch):
    family = "softmax_topk" if function == "sample" else function
    faulty = functools.partial(fault, getattr(megasoftmax, function))
    monkeypatch.setattr(megasoftmax, function, faulty)
    outcomes = soak.SUITE.in_this_process([family], "cpu", 60.0, FIRST)
    found = next(outcome for outcome in outcomes if outcome.has_failed and result in outcome.result)
    assert soak.soak([found], [family], "cpu")[family].failures == 1
    printed = capsys.readouterr().out
    pattern = (
        rf"^python benchmarks/soak.py --family {family} --seed (\d+) --device cpu  # {result}.*"
    )
    line = re.search(pattern, printed, re.MULTILINE)
    assert line is not None
    assert "ratio" in line[0]
    assert f"{family}: " in line[0]
    with pytest.raises(SystemExit, match="1"):
        soak.main(family=[family], seed=int(line[1]), device="cpu")
    assert capsys.readouterr().out == line[0] + "\n"
    monkeypatch.undo()
    soak.main(family=[family], seed=int(line[1]), device="cpu")
    assert "ratio" in capsys.readouterr().out


@pytest.mark.gpu
def test_soak_on_gpu(tmp_path):
    for family in FAMILIES:
        outcomes = [soak.SUITE.attempt(family, seed, "cuda") for seed in range(FIRST, FIRST + 50)]
        failed = [outcome.in_words() for outcome in outcomes if outcome.has_failed]
        assert not failed
        assert sum(not outcome.why_not_fused for outcome in outcomes) > 25


@pytest.mark.parametrize("fault", [None, other_scale, lost_query, with_rounded_gradients])
def test_equal_queries_err_alike(fault, monkeypatch):
    if fault is not None:
        faulty = functools.partial(fault, megasoftmax.attention)
        monkeypatch.setattr(megasoftmax, "attention", faulty)
    deviations = EQUAL_QUERIES.compare(Data(2010006827, "cpu"), None)
    worst = max(each.ratio for each in deviations.values())
    assert (worst > 1) == (fault is not None), deviations
    assert worst > 0.5, "the bound is too loose to find anything"
