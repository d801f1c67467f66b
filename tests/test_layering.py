"""Who may import whom, as DESIGN.md draws it."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "kernels"
BINDINGS = ROOT / "csrc" / "bindings"
PYTHON_FILES = sorted(
    [
        *ROOT.glob("megasoftmax/*.py"),
        *ROOT.glob("megasoftmax/build/*.py"),
        *ROOT.glob("integrations/*.py"),
    ]
)
FOLDERS = ("build", "integrations")

# A family of kernels -> the families that it may include beside itself.
FAMILIES = {
    "common": set(),
    "softmax": {"common"},
    "topk": {"softmax", "common"},
    "attention": {"common"},
}

# A module -> the modules of the package that it may import; "megasoftmax" is the public face.
MODULES = {
    "__init__": {"biases", "context_parallel", "functional", "layers", "modules", "dispatch"},
    "__main__": {
        "_export_kernels",
        "_extras",
        "build",
        "explain",
        "limits",
        "regression",
        "regression_models",
        "regression_report",
    },
    "_export_kernels": {"build"},
    "_extras": set(),
    "biases": set(),
    "build": set(),
    "explain": {"build", "limits"},
    "limits": set(),
    "reference": set(),
    "reference_attention": {"reference"},
    "reference_topk": {"reference"},
    "ops": {"build", "reference"},  # the reference is every operator's CPU implementation
    "ops_attention": {"ops", "reference", "reference_attention"},
    "ops_topk": {"ops", "reference", "reference_topk"},
    "vocabulary": {"reference", "reference_topk"},
    "context_parallel": {"reference", "reference_attention"},
    "sharding": {"reference", "reference_attention", "reference_topk"},
    "dispatch": {"build", "limits"},
    "functional": {
        "biases",
        "context_parallel",
        "dispatch",
        "ops",
        "ops_attention",
        "ops_topk",
        "reference",
        "reference_attention",
        "reference_topk",
        "sharding",
        "vocabulary",
    },
    "layers": {"functional"},
    "modules": {"biases", "functional"},
    "integrations": {"functional", "megasoftmax", "modules"},
    "regression": {"megasoftmax", "regression_models", "regression_training"},
    "regression_models": {"integrations"},
    "regression_report": {"regression", "regression_models", "regression_training"},
    "regression_training": {"regression_models"},
}

# Modules that run once per call, where an import would cost time and hide an arrow.
HOT = (
    "biases",
    "context_parallel",
    "dispatch",
    "functional",
    "layers",
    "modules",
    "ops",
    "ops_attention",
    "ops_topk",
    "reference",
    "reference_attention",
    "reference_topk",
    "vocabulary",
)


def _module(path: Path) -> str:
    return path.parent.name if path.parent.name in FOLDERS else path.stem


def _imports(path: Path) -> set[str]:
    """Absolute dotted names of what a file imports, at any depth of nesting."""
    package = ["megasoftmax", *[path.parent.name] * (path.parent.name in FOLDERS)]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            # `from megasoftmax import functional` imports a module, not a name.
            whole = origin in ("megasoftmax", "megasoftmax.integrations")
            found |= {f"{origin}.{alias.name}" for alias in node.names} if whole else {origin}
    return found


def _own(name: str) -> str | None:
    """The module of the package that an imported name belongs to; None for a stranger's."""
    first, *rest = name.split(".")
    if first != "megasoftmax":
        return None
    return rest[0] if rest and rest[0] in MODULES else "megasoftmax"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_follow_the_arrows(path):
    module = _module(path)
    assert module in MODULES, f"{path.name} has no place among the layers"
    own = {_own(name) for name in _imports(path)} - {None, module}
    assert own <= MODULES[module]


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_package_does_not_import_what_surrounds_it(path):
    first_names = {name.split(".")[0] for name in _imports(path)}
    assert not first_names & {"benchmarks", "conftest", "examples", "tests"}


@pytest.mark.parametrize("module", ["reference", "reference_attention", "reference_topk"])
def test_reference_imports_torch_only(module):
    names = {
        name
        for name in _imports(ROOT / "megasoftmax" / f"{module}.py")
        if name != "megasoftmax.reference"
    }
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("module", HOT)
def test_hot_functions_do_not_import(module):
    tree = ast.parse((ROOT / "megasoftmax" / f"{module}.py").read_text())
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    nested = {
        f"{function.name}, line {node.lineno}"
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not nested


@pytest.mark.parametrize(
    "path",
    sorted(path for path in KERNELS.rglob("*") if path.is_file()),
    ids=lambda path: str(path.relative_to(KERNELS)),
)
def test_kernel_includes_follow_the_arrows(path):
    text = path.read_text()
    strangers = [
        name
        for name in re.findall(r'^\s*#\s*include\s*[<"](.+?)[>"]', text, re.MULTILINE)
        if re.match(r"torch/|ATen/|c10/|pybind11/|Python\.h", name)
    ]
    assert not strangers
    family = path.relative_to(KERNELS).parts[0]
    for name in re.findall(r'^\s*#\s*include\s*"(.+?)"', text, re.MULTILINE):
        target = (path.parent / name).resolve()
        assert target.is_relative_to(KERNELS), f"{name} lies outside csrc/kernels"
        assert target.relative_to(KERNELS).parts[0] in {family} | FAMILIES[family], name


@pytest.mark.parametrize("path", sorted(BINDINGS.iterdir()), ids=lambda path: path.name)
def test_bindings_include_the_entry_points_of_kernels_only(path):
    for name in re.findall(r'^\s*#\s*include\s*"(.+?)"', path.read_text(), re.MULTILINE):
        target = (path.parent / name).resolve()
        assert target.parent == BINDINGS or (
            target.is_relative_to(KERNELS) and target.suffix == ".h"
        ), name
