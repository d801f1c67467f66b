"""Writes the package as a folder that Hugging Face's `kernels` loads, and its hub serves.

`kernels` gives each build a module name of its own. So the imports of the copy are made relative;
its ops bear that name too (see `ops`), and live beside those of an installed megasoftmax.

Sources: "Kernel requirements" and "Write kernels" in the documentation of kernels.
"""

import base64
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from megasoftmax.build.extension import (
    CSRC,
    CXX_FLAGS,
    LIBRARY_NAME,
    MIN_NVCC,
    MIN_TORCH,
    NVCC_FLAGS,
    PACKAGE,
)

# transformers asks for version 1 of a kernel that it does not know.
VERSION = 1
_OWN_IMPORT = re.compile(r"^( *)from megasoftmax(?:\.([\w.]+))? import ", re.MULTILINE)
_LEFT_OUT = (
    *("__main__.py", "_export_kernels.py", "_extras.py", "_progress.py", "_tables.py"),
    *("tune.py", "check", "integrations", "regression"),
)
# What attn_implementation="org/repo:flash_attn_forward" of transformers looks up in the kernel.
_ATTENTION = """
from .hub import attention_forward as attention_forward
from .hub import flash_attn_forward as flash_attn_forward
"""
# Earlier versions of kernels import a folder with the name of the kernel.
_EARLIER = """\
import importlib.util
import json
import sys
from pathlib import Path

_root = Path(__file__).absolute().parents[1]
_name = json.loads((_root / "metadata.json").read_text())["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _root / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({k: v for k, v in vars(sys.modules[_name]).items() if not k.startswith("__")})
"""


def export_kernels(
    folder: Path,
    library: Path | None = None,
    cuda: int | None = None,
    archs: Sequence[str] = (),
    *,
    force: bool = False,
) -> list[Path]:
    """Write `folder`/build with a variant for any torch, and one for the compiled part.

    Without a compiled part the package is plain torch; where it finds a GPU and nvcc it builds
    that part on first use, from the sources that lie in it. `folder` also gets build.toml, csrc
    and torch-ext, of which kernel-builder compiles variants.

    Args:
        folder: created if need be.
        library: the compiled part.
        cuda: the major version of the CUDA toolkit that built it.
        archs: the architectures that it was compiled for, such as "9.0a".
        force: replace variants that an earlier call wrote.

    Returns:
        The folders of the variants, named as `kernels` expects: torch-universal, and
        torch-stable-abi211-cu130-x86_64-linux or its like, which serves this torch and later ones.

    Raises:
        FileExistsError: a variant is there, without `force` or not by an earlier call.
        ValueError: a library, but no `cuda` or no `archs`.
    """
    if library is not None and cuda is None:
        raise ValueError(f"cuda: expected the major version of CUDA that built {library}, got none")
    if library is not None and not archs:
        raise ValueError(f"archs: expected the architectures that {library} has, got none")
    universal = folder / "build" / "torch-universal"
    abi = "".join(map(str, MIN_TORCH))
    system = f"{platform.machine()}-{platform.system().lower()}"
    # What any release of a major version built runs with all of them.
    compiled = folder / "build" / f"torch-stable-abi{abi}-cu{cuda}0-{system}"
    wanted = [universal] if library is None else [universal, compiled]
    for variant in filter(Path.exists, wanted):
        if not force:
            raise FileExistsError(f"{variant} is there already; --force replaces it")
        if not _is_ours(variant):
            raise FileExistsError(f"{variant}: expected an export of megasoftmax to replace")
    for variant in filter(Path.exists, wanted):
        shutil.rmtree(variant)
    _write(universal, {"type": "cpu"})
    if library is not None:
        _write(compiled, {"type": "cuda", "archs": [*archs]}, library)
    _write_project(folder)
    return wanted


def _is_ours(variant: Path) -> bool:
    try:
        return json.loads((variant / "metadata.json").read_text())["name"] == "megasoftmax"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _with_relative_imports(module: Path) -> str:
    root = "." * len(module.relative_to(PACKAGE).parts)
    return _OWN_IMPORT.sub(
        lambda found: f"{found[1]}from {root}{found[2] or ''} import ", module.read_text()
    )


def _write_python(folder: Path) -> None:
    folder.mkdir(parents=True)
    for source in PACKAGE.rglob("*.py"):
        module = source.relative_to(PACKAGE)
        if module.parts[0] not in _LEFT_OUT:
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / module).write_text(_with_relative_imports(source))
    with (folder / "__init__.py").open("a") as init:
        init.write(_ATTENTION)


def _write_project(folder: Path) -> None:
    """Sources and build.toml as kernel-builder takes them."""
    for part in ("torch-ext", "csrc"):
        shutil.rmtree(folder / part, ignore_errors=True)
    _write_python(folder / "torch-ext" / "megasoftmax")
    shutil.copytree(CSRC, folder / "csrc")
    (folder / "build.toml").write_text(_build_toml())


def _write(variant: Path, backend: dict[str, object], library: Path | None = None) -> None:
    _write_python(variant)
    (variant / "megasoftmax").mkdir()
    (variant / "megasoftmax" / "__init__.py").write_text(_EARLIER)
    shutil.copytree(CSRC, variant / "csrc")
    if library is not None:
        shutil.copy(library, variant / LIBRARY_NAME)
    content = hashlib.sha256()
    files = {}
    for file in sorted(variant.rglob("*")):
        if file.is_file():
            name, data = file.relative_to(variant).as_posix(), file.read_bytes()
            content.update(f"{name}\0".encode() + data)
            files[name] = base64.b64encode(hashlib.sha256(data).digest()).decode()
    metadata = {
        "name": "megasoftmax",
        "id": f"_megasoftmax_{backend['type']}_{content.hexdigest()[:16]}",  # the module's name
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _build_toml() -> str:
    """How kernel-builder compiles the sources, by torch's stable ABI.

    cpp_extension adds the last flag for nvcc by itself.
    """
    sources = sorted(path for path in CSRC.rglob("*") if path.is_file())
    sources = [path for path in sources if path.parent != CSRC / "host"]
    bindings = [path for path in sources if path.parent == CSRC / "bindings"]
    kernels = [path for path in sources if path.parent != CSRC / "bindings"]

    def listed(values: Sequence[object]) -> str:
        return "[\n" + "".join(f"  {json.dumps(str(value))},\n" for value in values) + "]"

    def files(paths: list[Path]) -> str:
        return listed([f"csrc/{path.relative_to(CSRC).as_posix()}" for path in paths])

    return f"""\
[general]
name = "megasoftmax"
version = {VERSION}
edition = 5
license = "Apache-2.0"
backends = ["cuda"]
python-depends = ["einops"]

[general.cuda]
minver = "{MIN_NVCC[0]}.{MIN_NVCC[1]}"

[torch]
src = {files(bindings)}

[torch.stable-abi]
cuda = "{MIN_TORCH[0]}.{MIN_TORCH[1]}"

[kernel.megasoftmax]
backend = "cuda"
depends = ["torch"]
cxx-flags = {listed(CXX_FLAGS)}
cuda-flags = {listed([*NVCC_FLAGS, "--expt-relaxed-constexpr"])}
src = {files(kernels)}
"""
