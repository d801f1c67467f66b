"""A cache of builds that fails says so and mends itself: each test plants a fault."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inputs import command
from torch.utils import cpp_extension

import megasoftmax
from megasoftmax.build import cache, extension, library
from megasoftmax.build.extension import BuildError, Nvcc
from megasoftmax.build.library import Status

NVCC = Nvcc(Path("nvcc"), (13, 0))
CONTENT = b"a library" * 100


@pytest.fixture
def builds(nothing_loaded, monkeypatch):
    """An empty cache, a GPU as far as Python knows, and a list of what was compiled."""
    made = []

    def build(folder, *others):
        made.append(folder)
        (folder / "made.so").write_bytes(CONTENT)
        return folder / "made.so"

    monkeypatch.setattr(extension, "build", build)
    monkeypatch.setattr(extension, "find_missing", lambda: None)
    monkeypatch.setattr(library, "_compile", lambda name, sources, folder, **flags: build(folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    return made


def build_library():
    return library.build_into_cache(NVCC, ("8.0",))


def test_cache_is_private_and_used_again(builds):
    built = build_library()
    assert build_library() == built
    assert len(builds) == 1
    assert library.status() == Status(True, built)
    assert stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(built.stat().st_mode) == 0o700
    assert {path.name for path in built.parent.iterdir()} == {"lock", "seal", built.name}


@pytest.mark.parametrize("keep", [build_library, library.host], ids=["kernels", "host"])
@pytest.mark.parametrize(
    "fault",
    [
        lambda path: path.write_bytes(CONTENT[:50]),
        lambda path: path.write_bytes(CONTENT[:50] + bytes(20) + CONTENT[70:]),
        lambda path: path.with_name("seal").unlink(),
        lambda path: path.with_name("seal").write_text(""),
    ],
    ids=["cut off", "zeros", "no seal", "empty seal"],
)
def test_library_that_is_not_whole_is_compiled_again(builds, keep, fault):
    built = keep()
    fault(built)
    if keep is build_library:
        assert not library.status().available
    else:
        assert not library.host_is_built()
    assert keep() == built
    assert len(builds) == 2
    assert built.read_bytes() == CONTENT


def test_crash_while_a_library_is_moved_leaves_none(builds, monkeypatch):
    built = build_library()
    built.with_name("seal").unlink()  # so that it is compiled again
    moved, replace = [], Path.replace

    def replace_once(path, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_once)
    with pytest.raises(KeyboardInterrupt):
        build_library()
    monkeypatch.setattr(Path, "replace", replace)
    assert moved == [built.with_name("seal")]
    assert not library.status().available
    assert build_library().read_bytes() == CONTENT


@pytest.mark.parametrize("keep", [build_library, library.host], ids=["kernels", "host"])
def test_read_only_cache_is_used(builds, monkeypatch, keep):
    built = keep()
    monkeypatch.setattr(extension, "locked", lambda path: pytest.fail("wrote a lock"))
    assert keep() == built


def assert_no_cache(problem):
    """Both builds fail by the problem and name a way out; questions are answered all the same."""
    for keep in (build_library, library.host):
        with pytest.raises(BuildError, match=f"{problem}.*Set TORCH_EXTENSIONS_DIR"):
            keep()
    assert not library.host_is_built()
    assert megasoftmax.why_not_fused(megasoftmax.softmax, torch.ones(2, 2)).runs == "reference"


def test_cache_that_is_a_file(builds, tmp_path):
    (tmp_path / "cache").write_text("")
    assert_no_cache("a file stands where a folder is expected: ")
    with pytest.warns(RuntimeWarning, match="a file stands"):
        assert not library.load().available


def test_no_home(builds, monkeypatch):
    def expanduser(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", expanduser)
    assert_no_cache("home directory")
    assert "home directory" in library.status().reason


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_file_system_that_refuses(builds, monkeypatch, number):
    def refuse(**others):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(BuildError, match=f"{os.strerror(number)}.*Set TORCH_EXTENSIONS_DIR"):
        build_library()


def test_cache_that_cannot_be_read(builds, monkeypatch):
    cached, real = build_library().parents[1], Path.stat

    def refuse(path, **others):
        if path.is_relative_to(cached):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **others)

    monkeypatch.setattr(Path, "stat", refuse)
    assert_no_cache("Permission denied: ")
    assert "Permission denied" in library.status().reason


@pytest.mark.parametrize("name", ["TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"])
def test_empty_variables_count_as_unset(monkeypatch, name):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    expected = cache.folder()
    assert expected.is_absolute()
    monkeypatch.setenv(name, "")
    assert cache.folder() == expected


def test_folders_of_killed_builds_are_removed(builds):
    built = build_library()
    (built.parent / "left").mkdir()
    (built.parent / "left" / "object.o").touch()
    built.unlink()
    build_library()
    assert not (built.parent / "left").exists()


@pytest.mark.parametrize(
    ("is_built", "value", "starts"), [(False, "1", 1), (True, "1", 0), (False, "0", 0)]
)
def test_host_is_compiled_beside_the_kernels(builds, monkeypatch, is_built, value, starts):
    started = []

    def start(command, **options):
        started.append(command[-1])
        return SimpleNamespace(terminate=lambda: None, poll=lambda: 0)

    monkeypatch.setattr(library, "_host_process", None)
    own = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(library, "subprocess", own)
    monkeypatch.setattr(library, "host_is_built", lambda: is_built)
    monkeypatch.setenv("MEGASOFTMAX_HOST", value)
    build_library()
    build_library()  # is there: nothing is compiled
    call = "from megasoftmax.build import library; library.host()"
    assert started == [call] * starts


def test_some_kernels_are_built_ahead_and_found_without_a_compiler(builds, monkeypatch):
    monkeypatch.setattr(extension, "check_tools", lambda: NVCC)
    monkeypatch.setattr(extension, "toolchain", lambda nvcc: contextlib.nullcontext())
    monkeypatch.setattr(library, "_compile_host", lambda folder: extension.build(folder))
    only = ["--only", "softmax_float16", "--only", "topk_float32"]
    found = command("build", *only, "--arch", "8.0")
    for name in ("operators", "softmax_float16", "topk_float32"):
        assert f"compiling {name}, once" in found.output
    count = len(builds)
    monkeypatch.setattr(extension, "check_tools", None)
    assert library.status().path.parent.name.startswith("megasoftmax-operators-")
    kernels = library._find_or_build("softmax_float16")
    assert kernels.parent.name.startswith("megasoftmax-softmax_float16-")
    assert library.find_whole() is None
    assert len(builds) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "attention"], r"expected one of attention_bfloat16, .*got attention"),
        (
            ["--only", "topk_float16", "--out", "folder"],
            "expected --only without --package and --out",
        ),
    ],
)
def test_kernels_that_cannot_be_built_alone_are_refused(arguments, message):
    found = command("build", *arguments, code=2, env={"COLUMNS": "400"})
    assert re.search(message, found.output, re.DOTALL), found.output


@pytest.fixture
def packed(builds, monkeypatch, tmp_path):
    """A wheel's archive with a host part for the CPU build of torch 2.13.0; nothing is built."""
    archive = tmp_path / "hosts.tar.xz"
    monkeypatch.setattr(library, "_HOSTS", archive)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    built = library.build_host_into(tmp_path / "hosts")
    assert built.name.startswith(f"torch-2.13.0-{sysconfig.get_config_var('SOABI')}-")
    assert [*built.parent.iterdir()] == [built]
    with tarfile.open(archive, "w:xz") as file:
        file.add(built, built.name)
    monkeypatch.setenv("MEGASOFTMAX_JIT", "0")
    monkeypatch.delenv("MEGASOFTMAX_HOST")
    monkeypatch.setattr(megasoftmax.host, "calls", None)
    monkeypatch.setattr(megasoftmax.host, "_why_not", None)
    return archive


def test_host_of_a_wheel_is_unpacked_into_the_cache(packed, builds, monkeypatch):
    """By builds of the same release of torch, with CUDA or without, and by no other."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert (library.host_is_built(), library.host_is_packed()) == (False, True)
    assert "unpacked from the wheel" in megasoftmax.host.status()
    unpacked = library.host()
    assert unpacked.is_relative_to(cache.folder())
    assert megasoftmax.host.status() == "built"
    assert unpacked.read_bytes() == CONTENT
    assert library.host() == unpacked
    unpacked.write_bytes(CONTENT[:50])  # which is unpacked again
    assert library.host().read_bytes() == CONTENT
    assert len(builds) == 1
    for version in ("2.13.1", "2.13.0a0+git1"):
        monkeypatch.setattr(torch, "__version__", version)
        assert not library.host_is_built()
        assert not library.host_is_packed()
        with pytest.raises(BuildError, match="MEGASOFTMAX_JIT=0 forbids building"):
            library.host()


def flip(path, where):
    """Flips a bit at this fraction of a file."""
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "fault",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        *(lambda path, where=where: flip(path, where) for where in (0, 0.4, 0.6, 1)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.unlink(),
    ],
    ids=["empty", "cut off", "start", "middle", "later", "end", "unreadable", "none"],
)
def test_damaged_archive_of_host_parts_counts_as_none(packed, fault):
    """A folder in its place cannot be read even by root, who ignores modes of files."""
    fault(packed)
    assert not library.host_is_packed()
    assert megasoftmax.host.status() == "none: it is built when the first call runs fused"
    megasoftmax.host._load()
    assert "MEGASOFTMAX_JIT=0 forbids building" in megasoftmax.host.status()


USE_PACKED = """
import sys
from pathlib import Path
import torch
from megasoftmax.build import library
torch.__version__ = "2.13.0+cpu"
library._HOSTS = Path(sys.argv[1])
found = library.host()
print(found, found.stat().st_size, oct(found.parent.stat().st_mode & 0o777))
"""


def test_host_of_a_wheel_needs_no_cache(packed, tmp_path):
    """It is unpacked into a private folder, which is gone after the process."""
    (tmp_path / "cache").write_text("")  # a file, where not even root can write a folder
    (tmp_path / "temporary").mkdir()
    line = [sys.executable, "-c", USE_PACKED, packed]
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    environment["PYTHONPATH"] = str(extension.PACKAGE.parent)
    found = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    path, size, mode = found.stdout.split()
    assert Path(path).is_relative_to(tmp_path / "temporary")
    assert (int(size), mode) == (len(CONTENT), "0o700")
    assert not [*(tmp_path / "temporary").rglob("*.so")]


def test_missing_ninja_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "find_missing", lambda: "ninja")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    message = r"ninja is not installed, .*\(pip install ninja 'setuptools>=77'\)"
    with pytest.raises(BuildError, match=message):
        library.host()
    assert not [*tmp_path.rglob("*.so")]


# Who else could write the cache


def test_cache_that_others_can_write_is_refused(builds):
    built = build_library()

    def check(path, mode):
        kept = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        message = f"only their owner can write, got mode {mode:04o}"
        assert message in library.status().reason
        assert str(path) in library.status().reason
        with pytest.raises(BuildError, match=message):
            build_library()
        path.chmod(kept)

    for mode in (0o770, 0o707):
        check(built, mode)
        check(built.parent, mode)
    built.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="only their owner can write"):
        assert not library.load().available


def test_cache_that_is_a_link_is_refused(builds):
    built = build_library()
    built.symlink_to(built.rename(built.with_name("elsewhere.so")))
    assert "got a link" in library.status().reason


@pytest.mark.parametrize(("owner", "is_refused"), [(0, False), (None, False), (12345, True)])
def test_cache_of_another_user_is_refused(builds, monkeypatch, owner, is_refused):
    """One of root is not: images of containers bring such."""
    build_library()
    user = os.geteuid() + 1 if owner == 0 else os.geteuid()
    real = Path.lstat

    def lstat(path):
        found = real(path)
        uid = found.st_uid if owner is None else owner
        return SimpleNamespace(st_uid=uid, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert library.status().available != is_refused
    if is_refused:
        assert f"the id 12345, not {user}" in library.status().reason


# Processes and compilers


@pytest.mark.parametrize("given", ["abc", "1.5", "0", "-2"])
def test_jobs_that_are_no_number_are_named(monkeypatch, given):
    monkeypatch.setenv("MAX_JOBS", given)
    with (
        pytest.raises(BuildError, match=f"MAX_JOBS: expected a whole number .*, got '{given}'"),
        extension.programs(),
    ):
        pass


@pytest.mark.parametrize(("given", "jobs"), [("", len(os.sched_getaffinity(0))), (" 3 ", 3)])
def test_jobs(monkeypatch, given, jobs):
    monkeypatch.setenv("MAX_JOBS", given)
    assert extension.jobs() == jobs


def in_a_fork(function):
    """The exit code of a fork that runs it: 0 if it returns True."""
    child = os.fork()
    if child == 0:
        os._exit(0 if function() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_lock_ends_though_a_fork_has_the_file(tmp_path):
    path = tmp_path / "lock"
    read, write = os.pipe()
    with extension.locked(path):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # lives until the test is done
            os._exit(0)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(read)
    os.close(write)
    os.waitpid(child, 0)


@pytest.mark.parametrize("module", [library, megasoftmax.host], ids=["library", "host"])
def test_fork_while_a_thread_loads(module):
    name = "_lock" if module is library else "_loading"
    with getattr(module, name):
        assert in_a_fork(lambda: getattr(module, name).acquire(blocking=False)) == 0


def test_who_waits_says_for_what(monkeypatch, tmp_path, capsys):
    asked = []

    def flock(file, operation):
        asked.append(operation)
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    with extension.locked(tmp_path / "lock"):
        pass
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX, fcntl.LOCK_UN]
    assert f"waiting for another process, which compiles into {tmp_path}" in capsys.readouterr().err


RUN = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from megasoftmax.build import extension
with extension.programs(), extension.ninja(Path(sys.argv[1], "log")):
    cpp_extension._run_ninja_build(sys.argv[1], False, "")
"""


def write_rule(folder, command):
    """What ninja makes with it is the file `made`."""
    (folder / "build.ninja").write_text(f"rule r\n  command = {command}\nbuild made: r\n")


def test_compilers_end_with_the_process_that_started_them(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\nexec 9>pipe\necho begun >&9\nsleep 1000\n")
    script.chmod(0o700)
    write_rule(tmp_path, script)
    builder = subprocess.Popen([sys.executable, "-c", RUN, tmp_path])
    with (tmp_path / "pipe").open() as pipe:  # open for writing as long as a compiler lives
        assert pipe.readline() == "begun\n"
        builder.kill()
        builder.wait()
        assert pipe.read() == ""


def test_error_of_a_compiler_names_the_log(tmp_path):
    write_rule(tmp_path, "echo it is wrong; false")
    log = tmp_path / "log"
    log.write_text("FAILED: an earlier one\n")
    with (
        pytest.raises(
            BuildError, match=rf"(?s)^FAILED:.*it is wrong.*The whole log: {log}$"
        ) as found,
        extension.programs(),
        extension.ninja(log),
    ):
        cpp_extension._run_ninja_build(str(tmp_path), False, "")
    assert "earlier" not in str(found.value)


@pytest.mark.parametrize("name", ["a$b", "a:b"])
def test_path_that_ninja_does_not_read_is_named(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    with (
        pytest.raises(BuildError, match="expected a path without"),
        extension.ninja(tmp_path / "log"),
    ):
        cpp_extension._run_ninja_build(str(folder), False, "")
