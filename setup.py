"""Compiles the CUDA part as MEGASOFTMAX_BUILD = auto | cuda | none says; see docs/install.md."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup


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
    except build.BuildError as error:
        sys.exit(f"megasoftmax: {error}")
    arguments = build.setup_arguments("megasoftmax._C", nvcc, names)
    for extension in arguments["ext_modules"]:
        extension.sources = [os.path.relpath(path) for path in extension.sources]  # for the sdist
    return arguments


setup(
    **_compiled_part(),
    # One library serves every Python from 3.11 on.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
