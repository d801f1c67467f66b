"""A source distribution and the wheel that it builds are complete, and nothing is a link."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
from processes import write_compilers

import megasoftmax
from megasoftmax.build import extension

ROOT = Path(__file__).resolve().parents[1]
BUILD = """
import sys
from setuptools import build_meta
kind, folder, *settings = sys.argv[1:]
getattr(build_meta, f"build_{kind}")(folder, dict(each.split("=") for each in settings))
"""
IGNORED = shutil.ignore_patterns(
    "__pycache__", "*.so", "*.egg-info", ".git", ".*_cache", ".hypothesis", ".nox", ".venv"
)
# Folders without code of the package that a source distribution has as they are.
SURROUNDINGS = ("benchmarks", "docs", "examples", "tests")
# Folders of the root that are in the package when it is installed.
MAPPED = ("csrc", "integrations")


def ignored(folder, names):
    """What git ignores; the folder `build` of the package is not the one at the root."""
    outputs = {"build", "dist", "site"} if Path(folder) == ROOT else set()
    return IGNORED(folder, names) | (outputs & set(names))


def run_build(kind, source, folder, *settings, **environment):
    """What it printed, without empty lines."""
    line = [sys.executable, "-c", BUILD, kind, folder, *settings]
    result = subprocess.run(line, cwd=source, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = [line for line in (result.stdout + result.stderr).splitlines() if line]
    return [line for line in found if "byte-compiling is disabled" not in line]


def build(kind, source, folder, *settings):
    """The one archive of this kind that the folder then holds, without kernels."""
    without = {"MEGASOFTMAX_BUILD": "none", "PATH": "/usr/bin:/bin"}
    found = run_build(kind, source, folder, *settings, **without)
    if kind != "editable":  # which says how it will be performed
        assert found == [
            "megasoftmax: pure-Python installation, nothing is compiled: MEGASOFTMAX_BUILD=none"
        ]
    (archive,) = folder.iterdir()
    return archive


def copy_of_checkout(factory):
    source = factory.mktemp("source") / "tree"  # anew in each set-up of a worker
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    return source


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(sdist, wheel); the wheel is built from the sdist, as `python -m build` does."""
    unpacked, *folders = (tmp_path_factory.mktemp(name) for name in ("unpacked", "sdist", "wheel"))
    source = copy_of_checkout(tmp_path_factory)
    sdist = build("sdist", source, folders[0])
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (top,) = unpacked.iterdir()
    return sdist, build("wheel", top, folders[1])


@pytest.fixture(scope="module")
def contents(archives):
    """{name: text} of the files of each archive, without the folder that a sdist begins with."""
    sdist, wheel = archives
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if not member.isdir()]
        assert all(member.isfile() for member in members)  # no link
        ours = {
            member.name.partition("/")[2]: archive.extractfile(member).read() for member in members
        }
    with zipfile.ZipFile(wheel) as archive:
        return ours, {name: archive.read(name) for name in archive.namelist()}


def sources(folder):
    """{path: content} of what a folder has."""
    return {
        str(file.relative_to(ROOT)): file.read_bytes()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def metadata(contents):
    """Of the wheel, with the readme as its payload."""
    _, wheel = contents
    (text,) = (text for name, text in wheel.items() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(text.decode())


@pytest.mark.parametrize("folder", ["megasoftmax", *MAPPED, *SURROUNDINGS])
def test_nothing_is_a_link(folder):
    """A checkout on Windows makes a text file of each symbolic link."""
    assert not [path for path in (ROOT / folder).rglob("*") if path.is_symlink()]


@pytest.mark.parametrize("folder", MAPPED)
def test_folders_of_the_package_are_whole_in_both(contents, folder):
    expected = sources(folder)
    assert len(expected) > 5
    for files, top in zip(contents, ("", "megasoftmax/"), strict=True):
        folder_of_archive = f"{top}{folder}/"
        found = {
            name.removeprefix(top): text
            for name, text in files.items()
            if name.startswith(folder_of_archive)
        }
        assert found == expected


def test_every_module_is_in_both(contents):
    package = ROOT / "megasoftmax"
    expected = {str(file.relative_to(ROOT)) for file in package.rglob("*.py")}
    expected.add("megasoftmax/py.typed")
    for files in contents:
        assert expected <= files.keys()


@pytest.mark.parametrize("folder", SURROUNDINGS)
def test_surroundings_are_in_the_source_distribution_alone(contents, folder):
    """All but pictures that plot.py has drawn, which git ignores too."""
    sdist, wheel = contents
    expected = sources(folder)
    pictures = {name for name in expected if name.endswith(".svg")} - {"docs/headline.svg"}
    expected = {name: text for name, text in expected.items() if name not in pictures}
    assert len(expected) > 8
    assert {name: sdist[name] for name in sdist if name.startswith(f"{folder}/")} == expected
    assert not [name for name in wheel if name.startswith(f"{folder}/")]


def test_metadata_and_readme_of_the_package(metadata):
    """A package index has no files beside the readme: no link, and no picture, may name one."""
    assert metadata["Author"] == "The megasoftmax authors"
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert "Install (docs/install.md) has the extras" in text
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))
    assert "<img" not in text
    assert "badge" not in text
    assert "all figures" not in text  # the line that introduces the picture
    assert "(#" not in text
    assert metadata["Project-URL"] is None  # nobody said where the repository is


def test_licence_and_version(contents, metadata):
    sdist, wheel = contents
    assert metadata["Version"] == megasoftmax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert sdist.keys() >= {"LICENSE", "NOTICE", "CITATION.cff", "README.md", "CHANGELOG.md"}
    assert sum(name.endswith(("licenses/LICENSE", "licenses/NOTICE")) for name in wheel) == 2


def test_only_builds_need_what_compiles(metadata):
    found = metadata.get_all("Requires-Dist")
    assert [each for each in found if "extra" not in each] == ["einops>=0.8", "torch>=2.11"]
    assert {'ninja; extra == "build"', 'setuptools>=77; extra == "build"'} <= {*found}


def test_wheel_with_kernels(tmp_path, tmp_path_factory):
    """It has the library and all host parts; a build prints few lines. Compilers are scripts."""
    source = copy_of_checkout(tmp_path_factory)
    (source / "build" / "hosts").mkdir(parents=True)
    for name in ("one.so", "two.so"):
        (source / "build" / "hosts" / name).write_text(name)
    environment = os.environ | write_compilers(tmp_path / "cuda")
    environment |= {"MEGASOFTMAX_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0a"}
    environment |= {"MEGASOFTMAX_LABEL": "sm90", "MEGASOFTMAX_URL": "https://host/megasoftmax/"}
    printed = run_build("wheel", source, tmp_path / "dist", **environment)
    assert len(printed) < extension.PROGRESS_LINES + 5
    (path,) = (tmp_path / "dist").iterdir()
    label = f"{megasoftmax.__version__}+sm90-cp311-abi3-linux_"
    assert path.name.startswith(f"megasoftmax-{label}")
    with zipfile.ZipFile(path) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
        packed = archive.extract("megasoftmax/hosts/hosts.tar.xz", tmp_path)
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        urls = Parser().parsestr(archive.read(metadata).decode()).get_all("Project-URL")
    assert "Issues, https://host/megasoftmax/issues" in urls
    assert found == {"megasoftmax/_C.abi3.so": b"made\n"}
    with tarfile.open(packed) as hosts:
        assert hosts.getnames() == ["one.so", "two.so"]
        assert hosts.extractfile("two.so").read() == b"two.so"
        found = {(each.uid, each.gid, each.uname, each.gname, each.mtime) for each in hosts}
        assert found == {(0, 0, "", "", 0)}  # nothing of the user who builds, and no time

    pure = build("wheel", source, tmp_path_factory.mktemp("pure"))
    run_build("sdist", source, tmp_path / "sdist", **environment)
    (sdist,) = (tmp_path / "sdist").iterdir()
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive, tarfile.open(sdist) as other:
        assert not [name for name in archive.namelist() + other.getnames() if name.endswith(".so")]


USE = """
import site, sys
site.addsitedir(sys.argv[1])
import megasoftmax.integrations.flash_attn
from megasoftmax.limits import kernel_limits
from megasoftmax.regression import models
assert kernel_limits().forward
print(megasoftmax.__file__, megasoftmax.integrations.__file__, sep="\\n")
"""


@pytest.mark.parametrize("mode", [None, "lenient", "strict", "compat"])
def test_checkouts_run_as_they_are_and_installed_as_editable(tmp_path_factory, mode):
    """None: without an installation, from the folder of the checkout."""
    source = copy_of_checkout(tmp_path_factory)
    others, installed = map(tmp_path_factory.mktemp, ("others", "installed"))
    for entry in Path(torch.__file__).parents[1].iterdir():  # without an installed megasoftmax
        if "megasoftmax" not in entry.name:
            (others / entry.name).symlink_to(entry)
    if mode is not None:
        wheel = build("editable", source, tmp_path_factory.mktemp("wheel"), f"editable_mode={mode}")
        zipfile.ZipFile(wheel).extractall(installed)
    result = subprocess.run(
        [sys.executable, "-S", "-c", USE, installed],
        cwd=source if mode is None else installed.parent,
        env={"PYTHONPATH": str(others), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    package, integrations = map(Path, result.stdout.split())
    assert package.is_relative_to(source)
    assert integrations.is_relative_to(source)
