"""megasoftmax tune: which numbers of rows it chooses, keeps and loads, and that no bit changes."""

import functools
import itertools
import json
from random import Random

import pytest
import torch
from inputs import bits_equal, command, normal

import megasoftmax
from megasoftmax import tune
from megasoftmax.build import cache, library, tuned
from megasoftmax.build.tuned import Tuned
from megasoftmax.explain import GPU_NAMES, H200, common, current_gpu, explain, gpu_named
from megasoftmax.limits import kernel_limits
from megasoftmax.tune import NEVER, Case, Timing, fewest_rows

LIMITS = kernel_limits()
L4 = gpu_named("L4")


@pytest.fixture
def plans():
    """The library of the plans, without what a test applied."""
    yield common.plans()
    tuned.apply(common.plans(), None)


def table(gpu: str, number) -> Tuned:
    """A table with `number(regime)` where limits.h has a number of rows above 0."""
    rows = [
        tuple(number(each) if each.min_rows else 0 for each in regimes)
        for regimes in (LIMITS.forward, LIMITS.backward)
    ]
    return Tuned(gpu, "2026-01-02", *rows)


@pytest.mark.parametrize(
    ("built_in", "timings", "found"),
    [
        (100, [], 100),
        # The regime is faster from 50 rows on.
        (100, [(25, 9, 5), (50, 5, 9), (100, 5, 9), (200, 5, 9)], 50),
        (100, [(25, 9, 5), (50, 9, 5), (100, 9, 5), (200, 5, 9)], 200),
        (100, [(25, 5, 9), (50, 5, 9), (100, 5, 9)], 25),
        # It is never faster, which says nothing of more rows.
        (100, [(25, 9, 5), (50, 9, 5), (100, 9, 5)], 200),
        (2**30, [(2**30, 9, 5), (2**30 + 5, 9, 5)], NEVER),
        # One of three calls gains 5%, which is less than 2% of all.
        (100, [(50, 5.7, 6), (100, 5, 9), (200, 5, 9)], 100),
        (100, [(50, 5.6, 6), (100, 5, 9), (200, 5, 9)], 50),
        # The fastest number decides, whatever a single call says; the order does not matter.
        (100, [(200, 5, 6), (25, 5, 9), (100, 5, 9), (50, 6, 5.9)], 25),
        (70, [(50, 5, 5), (100, 5, 5)], 70),
    ],
)
def test_number_of_rows_is_the_fastest(built_in, timings, found):
    assert fewest_rows(built_in, [Timing(*each) for each in timings]) == found


@pytest.mark.parametrize("name", GPU_NAMES)
def test_every_gpu_gets_a_table_that_plans_take(plans, name):
    gpu, cases, told = gpu_named(name), [], []

    def measure(case, tables):
        """Takes regimes to be faster from 150 rows on; plans read limits.h outside."""
        cases.append(case)
        assert len(tables) == 2
        return [1.0, 1.3 if case.rows >= 150 else 0.8]

    found = tune.tune(plans, gpu, measure, lambda *step: told.append(step))
    assert tuned.of_gpu(gpu.name) is None
    tuned.apply(plans, found)
    assert tuned.of_gpu(gpu.name) == found
    assert told[-1][0] == len(told) == tune.thresholds()
    assert found.gpu == gpu.name
    assert tune.changes(found)
    assert all(" rows on, not " in str(change) for change in tune.changes(found))
    assert {case.backward for case in cases} == {False, True}
    assert all(case.rows * case.columns * 2 <= tune.MOST_BYTES for case in cases)
    for change in tune.changes(found):
        assert change.regime.min_rows / 4.1 <= change.min_rows <= 8 * change.regime.min_rows


def test_regimes_that_are_compared_differ(plans):
    """Both tables of a call lead to another kernel, the first to one with the number of rows."""
    checked = 0

    def measure(case, tables):
        nonlocal checked
        names = []
        for each in tables:
            tuned.apply(plans, each)
            found = explain(
                *(case.rows, case.columns, tune.DTYPE),
                masked=case.kind == "masked",
                backward=case.backward,
                gpu=H200,
            )
            names.append(found.regime.name)
            assert found.thresholds.startswith("tuned on NVIDIA H200")
        assert names[0] != names[1]
        checked += 1
        return [1.0, 1.0]

    found = tune.tune(plans, H200, measure)
    assert checked > 200
    assert not tune.changes(found)


def test_explain_reads_the_table_of_its_gpu_alone(plans):
    call = (100, 4096, torch.float16)
    before, other = explain(*call, gpu=L4), explain(*call, gpu="A10")
    tuned.apply(plans, table(L4.name, lambda regime: 3 * regime.min_rows))
    found = explain(*call, gpu=L4)
    assert (before.thresholds, other.thresholds) == ("built in", "built in")
    assert found.thresholds == "tuned on NVIDIA L4, 2026-01-02"
    assert explain(*call, gpu="A10") == other
    printed = command("explain", "100x4096", "--gpu", "L4").stdout
    assert "tuned on NVIDIA L4, 2026-01-02" in printed
    # 800 vectors: limits.h gives shared_64 from 1000 rows on, and shared_128 from 500 on.
    more = (1500, 6400, torch.float16)
    names = [explain(*more, masked=True, gpu=gpu).regime.name for gpu in ("A10", L4)]
    assert names == ["shared_64", "shared_128"]
    skipped = {each.name: each.why for each in explain(*more, masked=True, gpu=L4).skipped}
    assert skipped["shared_64"] == "wants at least 3,000 rows"


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[:-1],
        lambda rows: (*rows, 0),
        lambda rows: tuple(0 for _ in rows),  # rows that others share would take all
        lambda rows: tuple(each + 1 for each in rows),  # registers would depend on the rows
        lambda rows: tuple(-each for each in rows),
    ],
    ids=["short", "long", "none", "all", "negative"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_table_that_may_change_bits_is_refused(plans, direction, change):
    good = table(L4.name, lambda regime: regime.min_rows)
    tuned.apply(plans, good)
    rows = {name: getattr(good, name) for name in ("forward", "backward")}
    rows[direction] = change(rows[direction])
    with pytest.raises(ValueError, match=f"{direction}: expected a number of rows for each"):
        tuned.apply(plans, Tuned(L4.name, "", **rows))
    assert tuned.of_gpu(L4.name) is None
    assert explain(100, 4096, torch.float16, gpu=L4).thresholds == "built in"


def test_regimes_with_an_order_of_their_own_stay(plans):
    """Whatever numbers come: rows in registers or a tile, and ragged ones that one block adds."""
    random = Random(0)

    def own_order(found):
        is_ragged_block = found.kind == "contiguous ragged" and found.blocks_per_row == 1
        has_segments = is_ragged_block and found.vectors > 128  # else one, which all add alike
        if found.regime.storage in ("registers", "tile"):
            return found.regime.name
        return "contiguous ragged" if has_segments else None

    for _ in range(40):
        numbers = table("any", lambda _: random.choice([1, 2, 30, 700, 5000, NEVER]))
        for name, options in itertools.product(
            ("L4", "H200", "T4"),
            (
                {},
                {"causal": True},
                {"masked": True},
                {"dropout": True},
                {"backward": True},
                {"backward": True, "bias_gradient": True},
                {"backward": True, "dropout": True},
            ),
        ):
            rows, columns = random.choice([1, 40, 999, 5000]), random.randrange(1, 70_000)
            columns = random.choice([columns, 8 * columns // 8, columns // 60 + 1])
            call = (rows, columns, random.choice([torch.float16, torch.float32]))
            tuned.apply(plans, None)
            before = explain(*call, **options, gpu=name)
            tuned.apply(plans, Tuned(gpu_named(name).name, "", numbers.forward, numbers.backward))
            after = explain(*call, **options, gpu=name)
            assert after.thresholds != "built in"
            assert own_order(before) == own_order(after), (call, options, name)


# Files


@pytest.fixture
def compiled(plans, tmp_path, monkeypatch):
    """A file that stands for the compiled part, on a machine with one L4."""
    monkeypatch.setattr(tuned, "gpu_name", lambda: L4.name)
    monkeypatch.delenv("MEGASOFTMAX_TUNED", raising=False)
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(b"kernels")
    return path


GOOD = table(L4.name, lambda regime: 2 * regime.min_rows)


def write(path, found=GOOD):
    with tuned.writing(path, L4.name) as save:
        return save(found)


def test_file_is_loaded_by_later_processes(plans, compiled):
    file = write(compiled)
    assert [each.name for each in file.parent.iterdir() if "tuned" in each.name] == [
        "tuned-NVIDIA-L4.json"
    ]
    tuned.load(plans, compiled)
    assert tuned.of_gpu(L4.name) == GOOD


@pytest.mark.parametrize(
    ("name", "variable"), [("NVIDIA A10", "1"), (None, "1"), (L4.name, "0")], ids=str
)
def test_file_that_is_not_loaded(plans, compiled, monkeypatch, name, variable, recwarn):
    """That of another GPU, and any with MEGASOFTMAX_TUNED=0."""
    write(compiled)
    monkeypatch.setattr(tuned, "gpu_name", lambda: name)
    monkeypatch.setenv("MEGASOFTMAX_TUNED", variable)
    tuned.load(plans, compiled)
    assert tuned.of_gpu(L4.name) is None
    assert not recwarn.list


def with_value(name, value):
    def change(text):
        return json.dumps(json.loads(text) | {name: value})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "Expecting value"),
        (lambda text: text[:-20], ""),
        (lambda text: "[]", "expected library, gpu, date, forward, backward"),
        (lambda text: "\udcff", "codec"),  # written as a byte that is no UTF-8
        (with_value("more", 1), "expected library, gpu"),
        (with_value("date", 1), "expected library, gpu"),
        (with_value("forward", [1.5]), "expected integers from 0"),
        (with_value("forward", [2**40]), "expected integers from 0"),
        (with_value("backward", ["1"]), "expected integers from 0"),
        (with_value("backward", [1]), "backward: expected a number of rows"),
        (with_value("library", "7 0"), "it was measured with another library"),
    ],
)
def test_broken_file_is_named_and_ignored(plans, compiled, change, message):
    file = write(compiled)
    file.write_text(change(file.read_text()), "utf-8", "surrogateescape")
    with pytest.warns(RuntimeWarning, match="is ignored, and thresholds are") as warned:
        tuned.load(plans, compiled)
    assert str(file) in str(warned[0].message)
    assert message in str(warned[0].message)
    assert tuned.of_gpu(L4.name) is None


def test_library_of_other_sources_keeps_its_thresholds(compiled):
    write(compiled)
    with pytest.warns(RuntimeWarning, match="megasoftmax_set_min_rows"):
        tuned.load(object(), compiled)


def test_loading_the_library_loads_the_file(plans, compiled, monkeypatch):
    write(compiled)
    monkeypatch.setattr(library, "_loaded", None)
    monkeypatch.setattr(library, "find_whole", lambda: compiled)
    monkeypatch.setattr(library.torch.ops, "load_library", lambda path: None)

    class Compiled:
        megasoftmax_register = staticmethod(lambda name: None)
        megasoftmax_set_kernel_finder = staticmethod(lambda finder: None)
        megasoftmax_set_min_rows = plans.megasoftmax_set_min_rows

    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: Compiled)
    assert library.load().available
    assert tuned.of_gpu(L4.name) == GOOD


def test_seal_is_that_of_the_cache(compiled):
    assert json.loads(write(compiled).read_text())["library"] == cache.seal_of(compiled)


# The command


run = functools.partial(command, "tune")


@pytest.fixture
def fake_gpu(plans, compiled, monkeypatch):
    monkeypatch.setattr(tune, "_compiled", lambda: (plans, compiled, L4.name))
    monkeypatch.setattr(tune, "current_gpu", lambda: L4)
    monkeypatch.setattr(tune, "_on_gpu", lambda compiled: lambda case, tables: [1.0, 0.5])
    return tuned.file_of(compiled, L4.name)


def test_command_measures_keeps_and_removes(fake_gpu):
    measured = run()
    count = tune.thresholds()
    assert f"{count} of {count}, " in measured.stdout
    assert "forward shared_32 up to 400 vectors: from " in measured.stdout
    assert f"of {count} thresholds changed on NVIDIA L4: {fake_gpu}" in measured.stdout
    assert tuned.of_gpu(L4.name) is not None
    assert fake_gpu.exists()
    assert run("--remove").stdout == f"Removed {fake_gpu}\n"
    assert tuned.of_gpu(L4.name) is None
    assert not fake_gpu.exists()
    assert run("--remove").stdout == "There was no file to remove\n"


def test_interrupted_command_leaves_nothing(fake_gpu, monkeypatch):
    def fail(case, tables):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tune, "_on_gpu", lambda compiled: fail)
    run(code=1)
    assert not [each for each in fake_gpu.parent.iterdir() if "tuned" in each.name]
    assert tuned.of_gpu(L4.name) is None


def test_command_tries_to_write_first(fake_gpu, monkeypatch, tmp_path):
    missing = tmp_path / "nowhere" / "_C.abi3.so"
    monkeypatch.setattr(tune, "_compiled", lambda: (None, missing, L4.name))
    assert "nowhere" in run(code=1).output


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_command_without_a_gpu():
    for options in ((), ("--remove",)):
        found = run(*options, code=1)
        assert found.output == "Error: torch sees no CUDA GPU to measure on\n"


def test_gpus_of_several_kinds_have_no_table(monkeypatch):
    names = ["NVIDIA L4", "NVIDIA A10"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    assert tuned.gpu_name() is None
    assert "GPUs of several kinds" in run(code=1).output
    names.pop()
    assert tuned.gpu_name() == "NVIDIA L4"


# On a GPU


CALLS = [
    *itertools.product((3, 100, 700, 3000), (1024, 3200, 6001, 12288, 50257), ({}, {"mask": True})),
    *itertools.product((3, 100), (131_072, 200_001), ({},)),
    *itertools.product((128, 2048), (2048,), ({"causal": True}, {"dropout": 0.1})),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replaced_table_changes_regimes_and_no_bit(plans, dtype):
    assert library.load().available
    gpu = current_gpu()
    tables = [table(gpu.name, lambda _, number=number: number) for number in (1, NEVER)]
    differ = 0
    for rows, columns, options in CALLS:
        scores = normal(rows, columns, device="cuda", dtype=dtype).requires_grad_()
        gradient = normal(rows, columns, device="cuda", dtype=dtype, seed=1)
        given = dict(options)
        if "mask" in given:
            given["mask"] = normal(columns, device="cuda") > 1
        if "dropout" in given:
            given["seed"] = torch.tensor([5], device="cuda")
        found, regimes = [], set()
        for each in (None, *tables):
            tuned.apply(plans, each)
            p, lse = megasoftmax.softmax(scores, return_lse=True, fused=True, **given)
            found.append((p.detach(), lse.detach(), *torch.autograd.grad(p, scores, gradient)))
            named = {"masked": "mask" in given, "dropout": "dropout" in given}
            named["causal"] = "causal" in given
            regimes.add(explain(rows, columns, dtype, gpu=gpu, **named).regime.name)
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                assert bits_equal(one, two), (rows, columns, options)
        differ += len(regimes) > 1
    assert differ > 5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["contiguous", "masked", "ragged"])
@pytest.mark.parametrize("backward", [False, True])
def test_calls_are_timed_under_each_table(plans, kind, backward):
    assert library.load().available
    tables = [table(current_gpu().name, lambda _, number=number: number) for number in (1, NEVER)]
    case = Case(backward, kind, 300, 8192 - (kind == "ragged"))
    found = tune._on_gpu(plans)(case, tables)
    assert len(found) == 2
    assert min(found) > 0
