"""Who may import whom."""

import ast
import inspect
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import megasoftmax
from megasoftmax import options
from megasoftmax.reference import attention, softmax

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megasoftmax"
CSRC = ROOT / "csrc"
BINDINGS = CSRC / "bindings"
INTEGRATIONS = ROOT / "integrations"
PYTHON_FILES = sorted([*PACKAGE.rglob("*.py"), *INTEGRATIONS.rglob("*.py")])


def _names(text):
    return set(text.split())


# A family of kernels -> the families that it may include beside itself.
FAMILIES = {
    "common": set(),
    "softmax": {"common"},
    "topk": {"softmax", "common"},
    "attention": {"common"},
}

# A layer, a file or a folder of the package -> the layers that it may import. "megasoftmax" is the
# public face, megasoftmax/__init__.py.
LAYERS = {
    "build": set(),
    "limits": {"build"},
    "tracing": set(),
    "_extras": set(),
    "_progress": set(),
    "_tables": {"build", "explain", "host", "limits", "megasoftmax"},
    "_export_kernels": {"build"},
    "explain": {"build", "limits", "options"},
    "dispatch": {"build", "limits", "options", "reference", "tracing"},
    "checks": {"tracing"},
    "biases": {"checks", "reference"},
    "masks": {"checks", "limits", "reference", "tracing"},
    "options": {"biases", "checks", "masks"},
    "arguments": {"biases", "checks", "options"},
    "ranges": {"arguments", "checks"},
    "reference": {"tracing"},
    "autograd": {"reference", "tracing"},
    # The reference is every op's CPU implementation.
    "ops": {"build", "autograd", "limits", "reference", "tracing"},
    "distributed": {"autograd", "checks", "ops", "reference"},
    "host": {"autograd", "biases", "build", "dispatch", "ops"},
    "autocast": set(),
    "functions": _names(
        "arguments autocast autograd biases checks distributed dispatch host limits masks ops "
        "options ranges reference tracing"
    ),
    "layers": {"functions"},
    "hub": {"checks", "functions", "options", "ranges"},
    "modules": _names("arguments autocast biases checks dispatch functions host masks options"),
    "megasoftmax": _names("biases dispatch distributed functions layers masks modules ranges"),
    "integrations": _names(
        "_extras arguments autocast biases checks functions megasoftmax modules options tracing"
    ),
    "check": {"build", "host", "limits", "megasoftmax", "reference"},
    "tune": {"build", "explain", "functions", "limits", "megasoftmax"},
    "regression": {"integrations", "megasoftmax"},
    "__main__": _names(
        "_export_kernels _extras _progress _tables build check explain limits megasoftmax "
        "regression tune"
    ),
}

# Layers that run once per call, where an import would cost time and hide an arrow.
HOT = _names(
    "arguments autocast autograd biases checks distributed dispatch functions host layers masks "
    "modules ops options ranges reference tracing"
)


def _module(path):
    """The dotted name of a file, as it is imported."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"megasoftmax.{name}" if path.is_relative_to(INTEGRATIONS) else name


MODULES = {_module(path): path for path in PYTHON_FILES}


def _layer(module):
    return module.removeprefix("megasoftmax.").split(".")[0]


def _imports(path):
    """Absolute dotted names of the modules that a file imports, at any depth of nesting.

    Without those for type checkers alone.
    """
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: _export_kernels makes them relative"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def _own(module):
    """The other modules of the package that a module imports."""
    return {name for name in _imports(MODULES[module]) if name in MODULES} - {module}


def _in_layers(layers):
    return [module for module in MODULES if _layer(module) in layers]


@pytest.mark.parametrize("module", MODULES)
def test_python_imports_follow_the_arrows(module):
    assert _layer(module) in LAYERS, f"{module} has no place among the layers"
    assert {_layer(name) for name in _own(module)} - {_layer(module)} <= LAYERS[_layer(module)]
    surroundings = {"benchmarks", "conftest", "examples", "tests"}
    assert not surroundings & {name.split(".")[0] for name in _imports(MODULES[module])}


def test_arrows_have_no_circle():
    """Neither those of layers nor those of modules."""
    for arrows in (LAYERS, {module: _own(module) for module in MODULES}):
        list(TopologicalSorter(arrows).static_order())


@pytest.mark.parametrize("module", _in_layers({"reference"}))
def test_reference_imports_torch_and_einops_only(module):
    strangers = {
        name.split(".")[0] for name in _imports(MODULES[module]) - _own(module)
    } - sys.stdlib_module_names
    assert strangers <= {"einops", "torch"}


@pytest.mark.parametrize(
    # sharding imports when the first DTensor arrives.
    "module",
    [name for name in _in_layers(HOT) if name != "megasoftmax.distributed.sharding"],
)
def test_hot_functions_do_not_import(module):
    tree = ast.parse(MODULES[module].read_text())
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


def _included(path):
    """The files that a file of csrc includes in quotes."""
    names = re.findall(r'^\s*#\s*include\s*"(.+?)"', path.read_text(), re.MULTILINE)
    return [(path.parent / name).resolve() for name in names]


@pytest.mark.parametrize(
    "path",
    sorted(path for name in FAMILIES for path in (CSRC / name).rglob("*") if path.is_file()),
    ids=lambda path: str(path.relative_to(CSRC)),
)
def test_kernel_includes_follow_the_arrows(path):
    stranger = r'^\s*#\s*include\s*[<"](torch/|ATen/|c10/|pybind11/|Python\.h)'
    assert not re.search(stranger, path.read_text(), re.MULTILINE)
    family = path.relative_to(CSRC).parts[0]
    for target in _included(path):
        assert target.is_relative_to(CSRC), f"{target} lies outside of csrc"
        assert target.relative_to(CSRC).parts[0] in {family} | FAMILIES[family], target


@pytest.mark.parametrize("path", sorted(BINDINGS.iterdir()), ids=lambda path: path.name)
def test_bindings_include_the_entry_points_of_kernels_only(path):
    for target in _included(path):
        assert target.parent == BINDINGS or (
            target.relative_to(CSRC).parts[0] in FAMILIES and target.suffix == ".h"
        ), target


# How many files of the package, its adapters and csrc may name an option: a new one touches about
# as many.
FILES_WITH = {"sink": 20, "softcap": 56, "return_lse": 18, "renormalize": 16}


@pytest.mark.parametrize("option", FILES_WITH)
def test_options_are_named_in_few_files(option):
    sources = [*PYTHON_FILES, *(path for path in CSRC.rglob("*") if path.is_file())]
    files = [path for path in sources if re.search(rf"\b{option}\b", path.read_text())]
    assert len(files) <= FILES_WITH[option], files


@pytest.mark.parametrize(
    ("function", "record"),
    [
        (megasoftmax.softmax, options.SoftmaxOptions),
        (megasoftmax.softmax_topk, options.TopkOptions),
        (megasoftmax.attention, options.AttentionOptions),
    ],
)
def test_records_have_the_options_of_their_functions(function, record):
    parameters = inspect.signature(function).parameters.values()
    given = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert list(given.items()) == list(record._field_defaults.items())
    assert tuple(given) == record._fields


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (megasoftmax.softmax, options.SoftmaxKeywords),
        (megasoftmax.softmax_topk, options.TopkKeywords),
        (megasoftmax.sample, options.SampleKeywords),
        (megasoftmax.attention, options.AttentionKeywords),
        (megasoftmax.attention_varlen, options.VarlenKeywords),
    ],
)
def test_type_checkers_are_told_the_options_of_functions(function, keywords):
    parameters = inspect.signature(function).parameters.values()
    given = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    wanted = keywords.__annotations__
    (decides,) = given.keys() - wanted  # what the call returns
    wanted = {name: getattr(each, "__forward_arg__", each) for name, each in wanted.items()}
    assert given == wanted | {decides: bool}


def test_backward_functions_go_on_with_the_arguments_of_the_forward():
    """Autograd and rings hand them on as slices."""
    given, backward = attention.ForwardArguments._fields, attention.BackwardArguments._fields
    assert backward[2:-3] == (*given[:3], "output", "statistics", *given[3:])
    given, backward = softmax.ForwardArguments._fields, softmax.DropoutBackwardArguments._fields
    assert backward[4:14] == given[1:11]
