"""What sanitize.py runs and reads: its cases on a CPU, and output of its programs as they print it.

The run itself needs a GPU: `python tests/sanitize.py`.
"""

from itertools import groupby

import pytest
import sanitize
import sanitize_cases
import torch

from megasoftmax.limits import kernel_limits

LIMITS = kernel_limits()
CASES = sanitize_cases.cases()
KERNEL = "softmax_forward_kernel<__half,BoolMask,AddedBias<float>,22>"
SIGNATURE = (
    "megasoftmax::softmax_forward_kernel<__half, megasoftmax::BoolMask, "
    "megasoftmax::AddedBias<float>, {}22>(megasoftmax::ForwardParams, megasoftmax::Schedule)"
)


def test_names_are_names_of_one_case_each():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == set(sanitize.FAMILIES)


@pytest.mark.parametrize("direction", sanitize_cases.DIRECTIONS)
def test_every_launch_of_a_regime_is_forced_or_chosen(direction):
    """Launches of those that the tables have for each kind of rows; tiles are chosen by size."""
    forced = set()
    for case in CASES:
        options = dict(case.options)
        if case.family == "softmax regime" and options["direction"] == direction:
            forced.add((options["kind"], options["regime"]))
    for kind in sanitize_cases.KINDS:
        for regime in sanitize_cases.table_for(direction):
            serves = any(kind in LIMITS.kinds[name] for name in regime.serves)
            if serves and (direction == "forward" or kind not in ("masked", "bias or ragged mask")):
                assert (kind, regime.name) in forced


def test_attention_without_a_bias_runs_on_all_kinds_of_kernels():
    of_halves = {32: "portable own", 64: "portable own", 96: "own"}
    of_halves |= dict.fromkeys((128, 256), "portable own small")
    of_floats = {32: "portable", 64: "portable small", 128: "portable small", 256: ""}
    mine = [dict(case.options) for case in CASES if case.family == "attention"]
    for dtype, kinds in (("fp16", of_halves), ("bf16", of_halves), ("fp32", of_floats)):
        for dim, kernels in kinds.items():
            call = {"dtype": dtype, "dim": dim, "bias": "none"}
            found = {each["kernels"] for each in mine if call.items() <= each.items()}
            assert found == {*kernels.split()}


@pytest.mark.parametrize(
    "case",
    [next(same) for _, same in groupby(CASES, lambda case: case.family)],
    ids=lambda case: case.family,
)
def test_a_case_of_each_kind_runs(case):
    case.run("cpu")


@pytest.mark.parametrize("layout", sanitize_cases.LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 9), (1, 1, 5), (2, 0, 4)])
def test_layouts_keep_values_and_end_with_their_storage(layout, shape):
    values = torch.randn(shape)
    found = sanitize_cases.lay_out(values, layout, "cpu")
    assert torch.equal(found, values[..., :1, :].expand(shape) if layout == "broadcast" else values)
    if found.numel() > 0:
        last = sum((size - 1) * step for size, step in zip(shape, found.stride(), strict=True))
        assert found.storage_offset() + last + 1 == found.untyped_storage().nbytes() // 4


SYMBOL = (
    "_ZN11megasoftmax22softmax_forward_kernelI6__halfNS_8BoolMaskENS_9AddedBiasIfEELi22EEEv"
    "NS_13ForwardParamsENS_8ScheduleE"
)
ROWS = "_ZN11megasoftmax21attention_rows_kernelI6__halfEEvNS_23AttentionBackwardParamsE"
PROBE = "_ZN11megasoftmax43_GLOBAL__N__8c393f0b_10_softmax_cu_cd0f5aae5probeEv"


@pytest.mark.parametrize(
    ("text", "name", "family"),
    [
        *((text, KERNEL, "softmax") for text in (SYMBOL, *map(SIGNATURE.format, ("", "(int)")))),
        (ROWS, "attention_rows_kernel<__half>", "attention"),
        (
            "void megasoftmax::topk_backward_kernel<float, megasoftmax::NoMask, (int)0, (bool)1>(",
            "topk_backward_kernel<float,NoMask,0,true>",
            "topk",
        ),
    ],
)
def test_names_and_families_of_kernels(text, name, family):
    assert sanitize.kernel_name(text) == name
    assert sanitize.family_of(name) == family


def test_kernels_are_read_from_symbols():
    """Of every architecture; what is never launched does not count."""
    of_one = f"""
Fatbin elf code:
================
arch = sm_90a

symbols:
STT_FUNC         STB_LOCAL  STO_ENTRY      {PROBE}
STT_OBJECT       STB_LOCAL  STV_DEFAULT    _ZN11megasoftmax5tableE
STT_FUNC         STB_GLOBAL STO_ENTRY      {ROWS}
"""
    symbols = of_one + of_one.replace("90a", "80")
    assert sanitize.kernels_in(symbols) == {"attention_rows_kernel<__half>"}


CLEAN = """\
========= COMPUTE-SANITIZER
case: topk tile dtype=fp16 k=1 vectors=1
finished
========= ERROR SUMMARY: 0 errors
"""
MEMCHECK = f"""\
========= COMPUTE-SANITIZER
case: softmax rows direction=forward
case: softmax rows direction=backward
========= Invalid __global__ read of size 2 bytes
=========     at megasoftmax::load_element<__half>(const __half *)+0x1f0 in vector.cuh:55
=========     by thread (1,0,0) in block (3,0,0)
=========     Access at 0x7f71b9e01360 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f71b9e00a00 of size 2400 bytes
=========     Device Frame: void {SIGNATURE.format("(int)")}+0x1f0 in forward.cuh:120
=========
========= Invalid __global__ write of size 16 bytes
=========     at void {SIGNATURE.format("(int)")}+0x4910 in forward.cuh:201
=========     by thread (2,0,0) in block (3,0,0)
=========
case: softmax tile direction=forward
finished
========= ERROR SUMMARY: 9 errors
========= ERROR SUMMARY: 7 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""  # noqa: E501
RACECHECK = f"""\
========= COMPUTE-SANITIZER
case: softmax rows direction=forward
========= Error: Race reported between Write access at void {SIGNATURE.format("(int)")}+0xa70
=========     and Read access at void {SIGNATURE.format("(int)")}+0xc0 [64 hazards]
=========
finished
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(("text", "counted", "printed"), [(MEMCHECK, 9, 2), (RACECHECK, 1, 1)])
def test_findings_name_their_case_and_kernel(text, counted, printed):
    output = sanitize.parse(text)
    assert (output.counted, len(output.findings), output.finished) == (counted, printed, True)
    for finding in output.findings:
        assert finding.is_ours
        assert finding.kernel == KERNEL
        assert finding.case == output.cases[printed - 1]


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        (CLEAN, 0, None),
        (RACECHECK, sanitize.FOUND, None),
        (CLEAN, 1, "ended with status 1"),
        (CLEAN.replace("finished\n", ""), 0, "did not finish"),
        (CLEAN.replace("ERROR SUMMARY", "NO SUMMARY"), 0, "without a summary"),
        (CLEAN.replace("finished", "error: NAME: ValueError: why\nfinished"), 0, "1 cases raised"),
        (MEMCHECK, sanitize.FOUND, "counted 9 findings and printed 2"),
    ],
)
def test_processes_that_failed(text, status, problem):
    output = sanitize.parse(text)
    job = sanitize.Job("memcheck", 0, tuple(CASES[: len(output.cases)]))
    found = sanitize.why_failed(job, output, status, text)
    assert (found is None) == (problem is None)
    assert problem is None or problem in found


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_jobs_have_all_cases_but_what_synccheck_cannot_run(tool):
    """Of large clusters it runs the kernels in smaller ones."""
    jobs = sanitize.jobs_for(tool, CASES, 7)
    kept = [case.name for job in jobs for case in job.cases]
    assert len(set(kept)) == len(kept)
    dropped = [case.name for case in CASES if case.name not in kept]
    assert bool(dropped) == (tool == "synccheck")
    topk = {row[0]: f"regime={i}" for i, row in enumerate(sanitize_cases.TOPK_REGIMES)}
    for name in dropped:
        for large, smaller in (
            ("=cluster_256x16", "=cluster_256x8"),
            ("=contiguous_cluster_16", "=contiguous_cluster_8"),
            ("=reread_512x16", "=whole_gpu_512"),
            ("=persistent_256x16", "=persistent_256x8"),
            ("=persistent_512x16", "=persistent_512x8"),
            (topk["cluster_16"], topk["cluster_8"]),
        ):
            name = name.replace(large, smaller)
        assert name in kept, name
