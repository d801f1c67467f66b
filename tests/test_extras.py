"""Where a package is missing, commands and examples name the extra that has it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megasoftmax._extras import EXTRAS, missing_extra

ROOT = Path(__file__).resolve().parents[1]
# Runs what follows the name of a package, as if the package were not installed.
WITHOUT = """
import runpy, sys

_, missing, *sys.argv = sys.argv

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
if sys.argv[0].endswith(".py"):
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    runpy.run_module(sys.argv[0], run_name="__main__")
"""


def run_without(package, *command):
    """The exit code and the errors of a module or a file that does not find the package."""
    line = [sys.executable, "-c", WITHOUT, package, *map(str, command)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("typer", ["megasoftmax"], "examples"),
        ("rich", ["megasoftmax", "explain", "8x8"], "examples"),
        ("transformers", ["megasoftmax", "regress"], "transformers"),
        ("matplotlib", ["megasoftmax", "regress"], "examples"),
        ("typer", [ROOT / "examples" / "train_gpt.py"], "examples"),
        ("transformers", [ROOT / "examples" / "generate.py"], "transformers"),
        ("megatron", [ROOT / "examples" / "train_megatron_gpt.py"], "megatron"),
    ],
)
def test_missing_package_is_named_with_its_extra(package, command, extra):
    code, errors = run_without(package, *command)
    assert code > 0
    expected = f"{package} is not installed: pip install 'megasoftmax[{extra}]'"
    assert expected in errors
    assert "Traceback" not in errors


def test_missing_torch_says_how_to_get_it():
    code, errors = run_without("torch", "megasoftmax")
    assert code > 0
    assert "megasoftmax needs torch >= 2.11: `pip install torch`" in errors


def test_unknown_module_has_no_extra():
    assert missing_extra(ModuleNotFoundError(name="elsewhere")) is None
    assert missing_extra(ModuleNotFoundError("without a name")) is None


def test_extras_have_what_the_table_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"megatron": "megatron-core", "yaml": "pyyaml"}
    for module, extra in EXTRAS.items():
        required = project["optional-dependencies"][extra]
        found = {re.split(r"[^\w-]", requirement)[0] for requirement in required}
        assert names.get(module, module) in found


def test_import_needs_torch_and_einops_alone():
    command = "import sys, megasoftmax; print(*{name.partition('.')[0] for name in sys.modules})"
    line = [sys.executable, "-c", command]
    found = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert not set(found.split()) & (
        EXTRAS.keys() | {"hypothesis", "kernels", "ninja", "pytest", "setuptools"}
    )
