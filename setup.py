"""Compiles the CUDA part as MEGASOFTMAX_BUILD = auto | cuda | none says; see pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def _load_build_module() -> ModuleType:
    """megasoftmax/_build.py alone: importing the package would need torch."""
    path = Path(__file__).parent / "megasoftmax" / "_build.py"
    spec = importlib.util.spec_from_file_location("megasoftmax_build", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_build = _load_build_module()


class BuildLibrary(build_ext):
    """Hands the extension to the project's own driver, which needs no list of sources."""

    def build_extension(self, ext: Extension) -> None:
        nvcc, torch = _build.check_tools(_build.find_nvcc(), _build.find_torch())
        names = _build.architectures(nvcc.version, os.environ.get("TORCH_CUDA_ARCH_LIST"))
        print(f"megasoftmax: compiling for {' '.join(names)} with {nvcc.path}", flush=True)
        library = Path(self.get_ext_fullpath(ext.name))
        _build.build(library, Path(self.build_temp), nvcc, torch, names, report=print)


def _extensions() -> list[Extension]:
    mode = os.environ.get("MEGASOFTMAX_BUILD", "auto")
    try:
        reason = _build.why_not_compile(mode, _build.find_nvcc(), _build.find_torch())
    except _build.BuildError as error:
        sys.exit(f"megasoftmax: {error}")
    if reason is None:
        return [Extension("megasoftmax._C", sources=[], py_limited_api=True)]
    print(f"megasoftmax: pure-Python installation, nothing is compiled: {reason}", flush=True)
    return []


setup(
    ext_modules=_extensions(),
    cmdclass={"build_ext": BuildLibrary},
    # One library serves every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
