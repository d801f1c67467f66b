"""Compiles the CUDA part as MEGASOFTMAX_BUILD = auto | cuda | none says; see docs/install.md."""

import importlib.util
import os
import re
import sys
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import setuptools
from setuptools import setup


def _check_setuptools() -> None:
    """pip does not check it under --no-build-isolation. setuptools then fails obscurely."""
    text = Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8")
    (requirement,) = tomllib.loads(text)["build-system"]["requires"]
    oldest = requirement.removeprefix("setuptools>=")
    if int(setuptools.__version__.split(".")[0]) < int(oldest):
        found = f"setuptools {setuptools.__version__} is older than {oldest}"
        sys.exit(f"megasoftmax: {found} (pip install --upgrade setuptools)")


def _load_build_module() -> ModuleType:
    """megasoftmax/build/extension.py alone: importing the package would need torch."""
    path = Path(__file__).parent / "megasoftmax" / "build" / "extension.py"
    spec = importlib.util.spec_from_file_location("megasoftmax_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _compiled_part() -> dict[str, Any]:
    build = _load_build_module()
    try:
        reason = build.why_not_compile(os.environ.get("MEGASOFTMAX_BUILD", "auto"))
        if reason is not None:
            print(f"megasoftmax: pure-Python installation, nothing is compiled: {reason}")
            return {}
        nvcc = build.check_tools()
        names = build.architectures(nvcc.version, os.environ.get("TORCH_CUDA_ARCH_LIST"))
        arguments = build.setup_arguments("megasoftmax._C", nvcc, names)
    except build.BuildError as error:
        sys.exit(f"megasoftmax: {error}")
    for extension in arguments["ext_modules"]:
        extension.sources = [os.path.relpath(path) for path in extension.sources]  # for the sdist
    return arguments


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the user and the time of the build, so that the same files give the same archive."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def _packages(is_compiled: bool) -> list[str]:
    """All packages. A wheel with kernels also has what `nox -s hosts` compiled of csrc/host."""
    integrations = setuptools.find_packages(include=["integrations*"])
    names = [*setuptools.find_packages(include=["megasoftmax*"]), "megasoftmax.csrc"]
    names += [f"megasoftmax.{name}" for name in integrations]
    hosts = sorted(Path(__file__).parent.glob("build/hosts/*.so"))
    if hosts and is_compiled and "bdist_wheel" in sys.argv:
        with tarfile.open(hosts[0].with_name("hosts.tar.xz"), "w:xz") as archive:
            for host in hosts:
                archive.add(host, host.name, filter=_anonymous)
        names.append("megasoftmax.hosts")
    return names


def _label() -> str:
    """MEGASOFTMAX_LABEL as a local version, such as +sm90 of a wheel for one architecture."""
    label = os.environ.get("MEGASOFTMAX_LABEL", "")
    if re.fullmatch(r"([a-z0-9]+(\.[a-z0-9]+)*)?", label) is None:
        sys.exit(f"megasoftmax: MEGASOFTMAX_LABEL: expected a local version, got {label!r}")
    return label and f"+{label}"


def _readme() -> str:
    """README.md for a package index, which has no file beside it: no pictures, names for links.

    A line that ends in a colon introduces the picture below it, and goes with it.
    """
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"^(?:.*:\n\n)?\[?!\[[^]]*\]\((?!https?:).*\)\n\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)", r"\1 (\2)", text)
    return f"{text}\nThe source distribution has the files that this page names.\n"


def _urls() -> dict[str, str]:
    """Links of the metadata, where MEGASOFTMAX_URL says which repository this is."""
    url = os.environ.get("MEGASOFTMAX_URL", "").rstrip("/")
    pages = {"Source": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
    pages["Changelog"] = "/blob/main/CHANGELOG.md"
    return {name: url + path for name, path in pages.items()} if url else {}


_check_setuptools()
compiled_part = _compiled_part()
setup(
    **compiled_part,
    packages=_packages(bool(compiled_part)),
    project_urls=_urls(),
    long_description=_readme(),
    long_description_content_type="text/markdown",
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},  # one library serves every Python from 3.11 on
        "egg_info": {"tag_build": _label()},
        "global": {"verbose": "0"},  # warnings, but not a line for each file
    },
)
