"""Runs every kernel of the compiled part under compute-sanitizer; needs a GPU.

    python tests/sanitize.py                                    # all tools, all cases
    python tests/sanitize.py --tool racecheck --family attention
    python tests/sanitize.py --tool memcheck --case "NAME"      # what a finding prints

sanitize_cases.py says what runs: for memcheck all sizes, for the other tools a few. A first pass
without compute-sanitizer tells by torch's profiler which kernels ran, to be compared with those
that cuobjdump lists. Cases are split over processes,
each of which runs its share under one tool, without torch's caching allocator, so that a tensor's
memory ends where the tensor ends. The exit status is 1 after a finding, a process that failed, or
a kernel that never ran.
"""

import argparse
import ctypes
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sanitize_cases import Case, cases
from torch.profiler import ProfilerActivity, profile

from megasoftmax.build import extension, library

ROOT = Path(__file__).absolute().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "sanitizer.csv"
sys.path.append(str(ROOT / "benchmarks"))
import measure  # noqa: E402

FAMILIES = ("softmax", "columns", "topk", "attention")
# In place of a tool, of all sizes and of those of brief runs.
COVERAGE, BRIEF_COVERAGE = "coverage", "brief coverage"
# Tools that take all sizes. Others are slow, and look for what does not depend on edges.
THOROUGH = ("memcheck", COVERAGE)
OUR_KERNELS = ("--kernel-name", "kns=megasoftmax")
# initcheck must see what torch's kernels write, so it checks all of them.
TOOLS = {
    "memcheck": (
        *OUR_KERNELS,
        *("--leak-check", "no", "--report-api-errors", "no"),
        *("--destroy-on-device-error", "kernel"),  # later cases run all the same
    ),
    "racecheck": (*OUR_KERNELS, "--racecheck-report", "analysis", "--racecheck-num-workers", "1"),
    "initcheck": (),
    "synccheck": OUR_KERNELS,
}
FOUND = 86  # the exit status of compute-sanitizer after a finding
FIRST_PORT, PORTS = 49152, 16  # of a process of compute-sanitizer
NEVER_LAUNCHED = ("probe", "hopper_code_kernel")  # the driver is asked about them


# Kernels


def demangled(symbol):
    """By libstdc++, which torch's profiler uses too."""
    standard = ctypes.CDLL("libstdc++.so.6")
    demangle = standard.__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(symbol.encode(), None, None, ctypes.byref(status))
    if status.value != 0:
        return symbol
    name = ctypes.string_at(text).decode()
    standard.free(ctypes.c_void_p(text))
    return name


def kernel_name(text):
    """A kernel in one spelling: template arguments without namespaces, casts and parameters."""
    name = demangled(text) if text.startswith("_Z") else text
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = name.replace("(bool)1", "true").replace("(bool)0", "false")
    name = re.sub(r"\([\w:]+\)(?=-?\d)", "", name)
    name = re.sub(r"\(.*", "", name).replace("megasoftmax::", "")
    return re.sub(r"\s*([<>,])\s*", r"\1", name)


def family_of(kernel):
    """Tiny rows of the softmax have kernels by another name."""
    return kernel.split("_")[0].replace("flat", "softmax")


def kernels_of_binary(binary):
    """Takes cuobjdump under a second: it reads symbols alone."""
    command = [find_tool("cuobjdump"), "--dump-elf-symbols", binary]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return kernels_in(listed)


def kernels_in(symbols):
    """The kernels that cuobjdump lists; a symbol of every architecture and file counts once."""
    found = {kernel_name(name) for name in re.findall(r"STO_ENTRY\s+(\S+)", symbols)}
    return found.difference(NEVER_LAUNCHED)


def loaded():
    """The compiled part, loaded, and built before if need be."""
    status = library.load()
    if status.path is None:
        raise SystemExit(f"there are no kernels: {status.reason}")
    return status.path


def find_tool(name):
    """A program of the CUDA toolkit."""
    nvcc = extension.find_nvcc()
    folders = [os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    folders += [str(nvcc.path.parent)] if nvcc else []
    path = shutil.which(name, path=os.pathsep.join(folders))
    if path is None:
        raise SystemExit(f"{name} is not on the PATH, nor in /usr/local/cuda/bin")
    return path


# What a process prints


@dataclass
class Finding:
    """What compute-sanitizer reports, as it prints it."""

    case: str
    lines: list[str]

    @property
    def kernel(self):
        """The outermost function of this library that it names."""
        found = re.findall(r"(megasoftmax::.*?)\+0x", "\n".join(self.lines))
        return kernel_name(found[-1]) if found else None

    @property
    def is_ours(self):
        """Whether it may be a fault of this library: initcheck looks at torch's kernels too."""
        text = "\n".join(self.lines)
        return "megasoftmax" in text or re.search(r"\b(at|c10|cub|thrust)::", text) is None


@dataclass
class Output:
    """What a process printed."""

    cases: list[str] = field(default_factory=list)  # that began
    errors: list[str] = field(default_factory=list)  # cases that raised, and what
    finished: bool = False
    kernels: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    counted: int | None = None  # findings, by the tool's own summary


# Lines of compute-sanitizer that report nothing.
REMARKS = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application returned an error",
)


def parse(text):
    """Lines of the worker, and reports of compute-sanitizer between them."""
    output = Output()
    for line in text.splitlines():
        mark, _, rest = line.partition(": ")
        if mark == "case":
            output.cases.append(rest)
        elif mark == "error":
            output.errors.append(rest)
        elif mark == "kernel":
            output.kernels.add(kernel_name(rest))
        elif line == "finished":
            output.finished = True
        elif line.startswith("========= "):
            report = line.removeprefix("========= ")
            if summary := re.match(r"ERROR SUMMARY: (\d+) errors?$", report):
                output.counted = int(summary[1])
            elif summary := re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warn", report):
                output.counted = int(summary[1]) + int(summary[2])
            elif report.startswith(" ") and output.findings:
                output.findings[-1].lines.append(report.strip())
            elif report and not report.startswith((" ", *REMARKS)):
                case = output.cases[-1] if output.cases else ""
                output.findings.append(Finding(case, [report]))
    return output


# Processes


@dataclass(frozen=True)
class Job:
    """A share of the cases under one tool."""

    tool: str
    number: int
    cases: tuple[Case, ...]


@dataclass
class Done:
    """A job, and what came of it."""

    job: Job
    output: Output
    failure: str | None
    seconds: float


def jobs_for(tool, chosen, count):
    """Shares of about the same duration: cases of a kind are spread."""
    if tool == "synccheck":  # aborts where clusters have more blocks than all GPUs support
        chosen = [case for case in chosen if not case.has_large_clusters]
    shuffled = random.Random(0).sample(chosen, len(chosen))
    shares = (tuple(shuffled[start::count]) for start in range(count))
    return [Job(tool, number, share) for number, share in enumerate(shares) if share]


def run_job(job, port, seconds):
    """Waits for a process of a job, and ends it when it takes longer."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "cases")
        names.write_text("\n".join(case.name for case in job.cases))
        worker = [sys.executable, __file__, "--worker", str(names)]
        if job.tool not in THOROUGH:
            worker.append("--brief")
        if job.tool in (COVERAGE, BRIEF_COVERAGE):
            command = [*worker, "--profile"]
        else:
            command = [
                *(find_tool("compute-sanitizer"), "--tool", job.tool, *TOOLS[job.tool]),
                *("--error-exitcode", str(FOUND), "--print-limit", "1000"),
                *("--show-backtrace", "device", "--force-blocking-launches"),
                *("--target-processes", "application-only", "--launch-timeout", "300"),
                *("--port", str(port), "--max-connections", str(PORTS), *worker),
            ]
        log = Path(folder, "log")
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
                status = process.wait()
        text = log.read_text(errors="replace")
    output = parse(text)
    return Done(job, output, why_failed(job, output, status, text), time.perf_counter() - start)


def why_failed(job, output, status, text):
    """Of a process that did not do its job, whatever it found until then."""
    if status not in (0, FOUND):
        problem = f"ended with status {status}"
    elif output.errors:
        shown = "; ".join(output.errors[:3])
        return f"{job.tool}, process {job.number}: {len(output.errors)} cases raised: {shown}"
    elif not output.finished or len(output.cases) != len(job.cases):
        problem = f"began {len(output.cases)} of {len(job.cases)} cases and did not finish"
    elif job.tool in TOOLS and output.counted is None:
        problem = "ended without a summary"
    elif output.counted and output.counted > len(output.findings):
        problem = f"counted {output.counted} findings and printed {len(output.findings)}"
    else:
        return None
    last = output.cases[-1] if output.cases else "none"
    tail = "\n".join(f"    {line}" for line in text.splitlines()[-15:])
    return f"{job.tool}, process {job.number}: {problem}; last case: {last}\n{tail}"


def run_all(jobs, processes, seconds):
    """As many at a time as there are to be processes."""
    with ThreadPoolExecutor(processes) as pool:
        pending = [
            pool.submit(run_job, job, FIRST_PORT + PORTS * number, seconds)
            for number, job in enumerate(jobs)
        ]
        done = [future.result() for future in pending]
    for tool in dict.fromkeys(job.tool for job in jobs):
        slowest = max(each.seconds for each in done if each.job.tool == tool)
        print(f"{tool}: the slowest of its processes took {slowest:.0f} s", flush=True)
    return done


def work(names, device, profiled, is_brief):
    """What a process runs: marks of cases on stdout, between which the tool prints."""
    by_name = {case.name: case for case in cases()}
    if device == "cuda":
        loaded()

    def run_cases():
        for name in names.read_text().splitlines():
            print(f"case: {name}", flush=True)
            try:
                by_name[name].run(device, is_brief)
                if device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:  # others may still find something
                message = str(error).splitlines()[:1]
                print(f"error: {name}: {type(error).__name__}: {''.join(message)}", flush=True)

    if profiled and device == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run_cases()
        for name in sorted({event.name for event in profiler.events()}):
            if "megasoftmax" in name:
                print(f"kernel: {name}")
    else:
        run_cases()
    print("finished", flush=True)


# Reports


def report_failures(done):
    """Prints findings, kernel by kernel, and failures; how many there are."""
    found = {}
    failures, others = [], 0
    for each in done:
        for finding in each.output.findings:
            if finding.is_ours:
                found.setdefault((each.job.tool, finding.kernel), []).append(finding)
            others += not finding.is_ours
        if each.failure:
            failures.append(each.failure)
    for (tool, kernel), findings in found.items():
        cases = len({finding.case for finding in findings})
        print(f"\n{tool}: {kernel or 'unknown kernel'}: {len(findings)} findings in {cases} cases")
        print("\n".join(f"    {line}" for line in findings[0].lines[:8]))
        print(f"  python tests/sanitize.py --tool {tool} --case {shlex.quote(findings[0].case)}")
    for failure in failures:
        print(f"\n{failure}")
    if others:
        print(f"\n{others} findings in kernels of torch, which do not count")
    return sum(map(len, found.values())) + len(failures)


def table(done, tools, ran, binary):
    """A line for each tool and family."""
    for tool, family in itertools.product(tools, FAMILIES):
        mine = [each.output for each in done if each.job.tool == tool]
        cases = sum(name.split()[0] == family for output in mine for name in output.cases)
        findings = [each for output in mine for each in output.findings if each.is_ours]
        kernels = {name for name in binary if family_of(name) == family}
        if cases:
            yield {
                "tool": tool,
                "family": family,
                "cases": cases,
                "kernels_run": len(ran[tool] & kernels),
                "kernels": len(kernels),
                "findings": sum(each.case.split()[:1] == [family] for each in findings),
            }


def check(arguments):
    """Coverage, then the tools."""
    families, tools = arguments.family or FAMILIES, arguments.tool or list(TOOLS)
    chosen = [case for case in cases() if arguments.case in (None, case.name)]
    chosen = [case for case in chosen if case.name.split()[0] in families]
    count = min(arguments.jobs, len(chosen))
    jobs = [job for tool in tools for job in jobs_for(tool, chosen, count)]
    if not jobs:
        raise SystemExit(f"{', '.join(tools)}: there is no case {arguments.case!r}")
    if arguments.case:
        return 1 if report_failures(run_all(jobs, count, arguments.seconds)) else 0
    binary = {name for name in kernels_of_binary(loaded()) if family_of(name) in families}
    done, ran = [], {}
    for coverage in (COVERAGE, BRIEF_COVERAGE):
        covered = [tool for tool in tools if (tool in THOROUGH) == (coverage in THOROUGH)]
        if covered:
            profiled = run_all(jobs_for(coverage, chosen, count), count, arguments.seconds)
            kernels = {name for each in profiled for name in each.output.kernels}
            ran |= dict.fromkeys(covered, kernels)
            done += profiled
    done += run_all(jobs, count, arguments.seconds)
    failures = report_failures(done)
    missed = sorted({name for kernels in ran.values() for name in binary - kernels})
    print("".join(f"\nnever ran: {name}" for name in missed))
    with measure.results(arguments.out, measure.provenance(arguments.commit)) as write:
        for line in table(done, tools, ran, binary):
            write(line)
            print(*line.values(), sep="  ")
    return 1 if failures or missed else 0


def main():
    as_it_stands = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_stands)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default: all")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="likewise")
    parser.add_argument("--case", help="the name of a single case")
    parser.add_argument("--jobs", type=int, default=16, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=900, help="the most of a process")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default="", help="for a copy without git")
    parser.add_argument("--list", action="store_true", help="print the names of all cases")
    parser.add_argument("--worker", type=Path, help="a file of names of cases to run here")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of --worker")
    parser.add_argument("--profile", action="store_true", help="of --worker: print its kernels")
    parser.add_argument("--brief", action="store_true", help="of --worker: fewer sizes")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(case.name for case in cases()))
        return 0
    if arguments.worker:
        work(arguments.worker, arguments.device, arguments.profile, arguments.brief)
        return 0
    return check(arguments)


if __name__ == "__main__":
    sys.exit(main())
