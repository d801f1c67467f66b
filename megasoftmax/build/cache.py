"""Libraries that are compiled once, by one process at a time, into torch's extension cache.

An entry is a folder with a library, its seal, a lock, and the log of the compilers. The seal has
the size and the SHA-256 of the library. A library without a matching seal is compiled again, since
one that is cut off, or has zeros where a disk was full, would crash the process that loads it.
"""

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

from megasoftmax.build import extension
from megasoftmax.build.extension import BuildError


def folder() -> Path:
    """Of all entries: TORCH_EXTENSIONS_DIR, or torch_extensions in the user's cache.

    Raises:
        BuildError: the user has no home.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch_extensions")
    try:
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default).expanduser()
    except RuntimeError as error:
        raise BuildError(f"the cache of builds: {error}. {_REMEDY}") from error


def find(name: str, key: str) -> Path | None:
    """The library of an entry, if it is there and whole.

    Raises:
        BuildError: others could have written it, or it cannot be read.
    """
    library = _library(name, key)
    with _named_errors(library):
        if not library.exists():
            return None
        _check_owner(library.parent, library)
        return library if is_whole(library) else None


def keep(name: str, key: str, compile_into: Callable[[Path], Path]) -> Path:
    """The library of an entry, compiled by `compile_into(an empty folder)` if there is none.

    Raises:
        BuildError: what `compile_into` raises; or others could have written the entry, or it cannot
            be written.
    """
    found = find(name, key)  # without the lock, which a cache that is read-only has no room for
    if found is not None:
        return found
    library = _library(name, key)
    entry = library.parent
    with _named_errors(library):
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.mkdir(mode=0o700, exist_ok=True)
        _check_owner(entry)
        with extension.locked(entry / "lock"):
            found = find(name, key)
            if found is None:
                for left in entry.iterdir():  # by builds that were killed
                    if left.is_dir():
                        rmtree(left, ignore_errors=True)
                # A new folder each time: torch would wait in that of a build that was killed.
                with tempfile.TemporaryDirectory(dir=entry) as objects:
                    move(compile_into(Path(objects)), library)
    return library


def move(built: Path, library: Path) -> None:
    """Puts a library in its place and seals it, so that a crash leaves nothing that looks whole."""
    built.chmod(0o700)
    seal = built.with_name("seal")
    seal.write_text(seal_of(built))
    for path in (built, seal):
        extension.sync(path)
    library.unlink(missing_ok=True)
    seal.replace(_seal(library))
    built.replace(library)


_whole: dict[tuple[str, int, int], bool] = {}


def is_whole(library: Path) -> bool:
    """Whether the seal of a library matches; reads the library once in a process."""
    found = library.stat()
    key = (str(library), found.st_mtime_ns, found.st_size)
    if key not in _whole:
        seal = _seal(library)
        _whole[key] = seal.exists() and seal.read_text() == seal_of(library)
    return _whole[key]


def _library(name: str, key: str) -> Path:
    return folder() / f"{name}-{key[:16]}" / extension.LIBRARY_NAME


def _seal(library: Path) -> Path:
    return library.with_name("seal")


def seal_of(library: Path) -> str:
    """What tells a library from others; reads it."""
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return f"{library.stat().st_size} {digest.hexdigest()}\n"


_REMEDY = "Set TORCH_EXTENSIONS_DIR to a folder of your own"


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Errors of the file system become a BuildError that says what to do."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            what = "a file stands where a folder is expected"
        raise BuildError(
            f"the cache of builds: {what}: {error.filename or path}. {_REMEDY}"
        ) from error


def _check_owner(*paths: Path) -> None:
    """Refuses a cache that others could write: a library runs with all rights of its user."""
    user = os.geteuid()
    for path in paths:
        found = path.lstat()
        mode = stat.S_IMODE(found.st_mode)
        remedy = f"Remove it, or set TORCH_EXTENSIONS_DIR to a folder of your own: {path}"
        if found.st_uid not in (user, 0):
            raise BuildError(
                "the cache of builds: expected files of this user or of root, got an owner with "
                f"the id {found.st_uid}, not {user}. {remedy}"
            )
        if mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
            actual = "a link" if stat.S_ISLNK(found.st_mode) else f"mode {mode:04o}"
            raise BuildError(
                f"the cache of builds: expected files that only their owner can write, got "
                f"{actual}. {remedy}"
            )
