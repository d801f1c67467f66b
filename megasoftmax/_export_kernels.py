"""Writes the package as a folder that Hugging Face's `kernels` loads, and its hub serves.

`kernels` gives each build a module name of its own. So the imports of the copy are made relative;
its ops bear that name too (see `ops`), and live beside those of an installed megasoftmax.
"""

import hashlib
import json
import platform
import re
import shutil
from pathlib import Path

from megasoftmax.build.extension import CSRC, LIBRARY_NAME, MIN_TORCH, PACKAGE

_OWN_IMPORT = re.compile(r"^( *)from megasoftmax(?:\.([\w.]+))? import ", re.MULTILINE)
_LEFT_OUT = (
    *("__main__.py", "_export_kernels.py", "_extras.py", "_progress.py", "_tables.py"),
    *("check", "integrations", "regression"),
)


def export_kernels(
    folder: Path, library: Path | None = None, cuda: int | None = None, *, force: bool = False
) -> list[Path]:
    """Write `folder`/build with a variant for any torch, and one for the compiled part.

    Without a compiled part the package is plain torch; where it finds a GPU and nvcc it builds
    that part on first use, from the sources that lie in it.

    Args:
        folder: created if need be.
        library: the compiled part.
        cuda: the major version of the CUDA toolkit that built it.
        force: replace variants that an earlier call wrote.

    Returns:
        The folders of the variants, named as `kernels` expects: torch-universal, and
        torch-stable-abi211-cu130-x86_64-linux or its like, which serves this torch and later ones.

    Raises:
        FileExistsError: a variant is there already, and `force` is False or no export of
            megasoftmax wrote it. Nothing was written.
        ValueError: there is a library and no `cuda`.

    Source: "Kernel requirements" in the documentation of kernels.
    """
    if library is not None and cuda is None:
        raise ValueError(f"cuda: expected the major version of CUDA that built {library}, got none")
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
    _write(universal, "cpu")
    if library is not None:
        _write(compiled, "cuda", library)
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


def _write(variant: Path, backend: str, library: Path | None = None) -> None:
    variant.mkdir(parents=True)
    for source in PACKAGE.rglob("*.py"):
        module = source.relative_to(PACKAGE)
        if module.parts[0] not in _LEFT_OUT:
            (variant / module).parent.mkdir(exist_ok=True)
            (variant / module).write_text(_with_relative_imports(source))
    shutil.copytree(CSRC, variant / "csrc")
    if library is not None:
        shutil.copy(library, variant / LIBRARY_NAME)
    digest = hashlib.sha256()
    for file in sorted(variant.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(variant)}\0".encode() + file.read_bytes())
    metadata = {
        "name": "megasoftmax",
        "id": f"_megasoftmax_{backend}_{digest.hexdigest()[:16]}",  # the name of the module
        "version": 0,
        "license": "Apache-2.0",
        "python-depends": ["einops"],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
