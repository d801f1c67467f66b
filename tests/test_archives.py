"""A source distribution and the wheel that it builds are complete, and hold files, not links."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import megasoftmax

ROOT = Path(__file__).resolve().parents[1]
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
FILES = ("*.py", "*.md", "pyproject.toml", "MANIFEST.in", "LICENSE", "NOTICE", "CITATION.cff")
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


def build(kind, source, folder):
    """The one archive of this kind that the folder then holds."""
    line = [sys.executable, "-c", BUILD, f"build_{kind}", folder]
    environment = {"MEGASOFTMAX_BUILD": "none", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(line, cwd=source, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "would be ignored" not in result.stderr
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(sdist, wheel); the wheel is built from the sdist, as `python -m build` does."""
    source, unpacked, *folders = (
        tmp_path_factory.mktemp(name) for name in ("source", "unpacked", "sdist", "wheel")
    )
    for pattern in FILES:
        for file in ROOT.glob(pattern):
            shutil.copy(file, source)
    for name in ("csrc", "integrations", "megasoftmax"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=IGNORED)
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


def sources(folder, pattern):
    """{path inside the package: text} of what the repository has in a folder."""
    package = Path("megasoftmax") / folder
    return {
        str(package / file.relative_to(ROOT / folder)): file.read_bytes()
        for file in (ROOT / folder).rglob(pattern)
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.mark.parametrize("folder", ["csrc", "integrations"])
def test_linked_folders_are_files_in_both(contents, folder):
    expected = sources(folder, "*")
    assert len(expected) > 5
    for files in contents:
        found = {name: files[name] for name in files if name.startswith(f"megasoftmax/{folder}/")}
        assert found == expected


def test_every_module_is_in_both(contents):
    package = ROOT / "megasoftmax"
    expected = {str(file.relative_to(ROOT)) for file in package.rglob("*.py")}
    expected |= {"megasoftmax/py.typed", "megasoftmax/integrations/__init__.py"}
    for files in contents:
        assert expected <= files.keys()
        assert not [name for name in files if name.startswith("tests/")]


def test_licence_and_version(contents):
    sdist, wheel = contents
    (metadata,) = (text for name, text in wheel.items() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(metadata.decode())
    assert fields["Version"] == megasoftmax.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert sdist.keys() >= {"LICENSE", "NOTICE", "CITATION.cff", "README.md", "CHANGELOG.md"}
    assert sum(name.endswith(("licenses/LICENSE", "licenses/NOTICE")) for name in wheel) == 2
