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

def run_without(missing, *command):
    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    sys.argv = [*command]
    if command[0].endswith(".py"):
        sys.path.insert(0, command[0].rpartition("/")[0])
        runpy.run_path(command[0], run_name="__main__")
    else:
        runpy.run_module(command[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("typer", ["megasoftmax"], "examples"),
        ("rich", ["megasoftmax", "explain", "8x8"], "examples"),
        ("transformers", ["megasoftmax", "regress"], "transformers"),
        ("matplotlib", ["megasoftmax", "regress"], "examples"),
        ("typer", [f"{ROOT}/examples/train_gpt.py"], "examples"),
        ("transformers", [f"{ROOT}/examples/generate.py"], "transformers"),
        ("megatron", [f"{ROOT}/examples/train_megatron_gpt.py"], "megatron"),
    ],
)
def test_missing_package_is_named_with_its_extra(package, command, extra, forks, tmp_path):
    done = forks.run(f"{WITHOUT}\nrun_without({package!r}, *{command!r})", cwd=tmp_path)
    assert done.returncode > 0
    assert f"{package} is not installed: pip install 'megasoftmax[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_megatron_lacks_is_named_by_the_import(forks, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("import triton")
    (core.parent / "__init__.py").touch()
    command = f"sys.path.insert(0, {str(tmp_path)!r})\n"
    command += "run_without('triton', 'megasoftmax.integrations.megatron')"
    last = forks.run(WITHOUT + command).stderr.splitlines()[-1]
    assert last.endswith("Error: triton is not installed: pip install 'megasoftmax[megatron]'")


def test_missing_torch_says_how_to_get_it():
    line = [sys.executable, "-c", WITHOUT + "run_without('torch', 'megasoftmax')"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode > 0
    assert "megasoftmax needs torch >= 2.11: `pip install torch`" in done.stderr


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


def test_import_needs_torch_and_einops_alone(forks):
    command = "import sys, megasoftmax; print(*{name.partition('.')[0] for name in sys.modules})"
    found = forks.run(command, cwd=ROOT).stdout.split()
    assert "einops" in found
    others = EXTRAS.keys() | {"hypothesis", "kernels", "ninja", "pytest", "setuptools"}
    assert not set(found) & (others - {"triton"})  # torch imports it, where it is
