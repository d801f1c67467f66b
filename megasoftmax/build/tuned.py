"""The fewest rows of each regime of the softmax, as they were measured on this machine's GPU.

`megasoftmax tune` measures them. A file beside the compiled part keeps them, one for each kind of
GPU. They take the place of `min_rows` in limits.h, for the whole process. The compiled part takes
no others than those that leave every bit of the results as it is.
"""

import ctypes
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megasoftmax.build import cache


@dataclass(frozen=True)
class Tuned:
    """The fewest rows of each regime, in the order of the tables of limits.h."""

    gpu: str  # its name
    date: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]


_current: Tuned | None = None


def of_gpu(name: str) -> Tuned | None:
    """What was measured on GPUs of that name, if plans read it; None: plans read limits.h."""
    return _current if _current is not None and _current.gpu == name else None


def apply(compiled: ctypes.CDLL, tuned: Tuned | None) -> None:
    """Lets plans read what was measured; None: limits.h.

    Raises:
        ValueError: the compiled part does not take it, and plans read limits.h.
    """
    global _current
    function = compiled.megasoftmax_set_min_rows
    _current = None
    for is_backward in (0, 1):
        function(is_backward, None, 0)
    if tuned is None:
        return
    for is_backward, rows in enumerate((tuned.forward, tuned.backward)):
        if not function(is_backward, (ctypes.c_int * len(rows))(*rows), len(rows)):
            apply(compiled, None)
            direction = ("forward", "backward")[is_backward]
            raise ValueError(
                f"{direction}: expected a number of rows for each regime of limits.h, 0 where that "
                "has 0 and more elsewhere"
            )
    _current = tuned


def load(compiled: ctypes.CDLL, library: Path) -> None:
    """Lets plans read the file of this machine's GPU, if there is one and it belongs to `library`.

    A file that does not is a warning. MEGASOFTMAX_TUNED=0: no file is read. If there is one, CUDA
    is initialised, which tells the GPU.
    """
    if os.environ.get("MEGASOFTMAX_TUNED") == "0" or not any(library.parent.glob("tuned-*.json")):
        return
    path = None
    try:
        name = gpu_name()
        path = None if name is None else file_of(library, name)
        if path is not None and path.exists():
            apply(compiled, _read(path, library))
    except (OSError, ValueError, AttributeError, RuntimeError) as error:
        warnings.warn(
            f"{path or 'What was measured'} is ignored, and thresholds are those that are built "
            f"in: {error}. "
            "`megasoftmax tune` measures them again, and `megasoftmax tune --remove` removes it.",
            RuntimeWarning,
            stacklevel=3,
        )


def gpu_name() -> str | None:
    """Of this machine's GPUs; None without one, or if they are of several kinds."""
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return names.pop() if len(names) == 1 else None


def file_of(library: Path, gpu: str) -> Path:
    return library.with_name(f"tuned-{re.sub(r'[^A-Za-z0-9]+', '-', gpu)}.json")


@contextmanager
def writing(library: Path, gpu: str) -> Iterator[Callable[[Tuned], Path]]:
    """A function that writes the file, which later processes load.

    Raises:
        OSError: it cannot be written.
    """
    path = file_of(library, gpu)
    unfinished = path.with_suffix(".unfinished")

    def write(tuned: Tuned) -> Path:
        text = json.dumps({"library": cache.seal_of(library), **asdict(tuned)}, indent=1)
        unfinished.write_text(text + "\n")
        return unfinished.replace(path)

    unfinished.touch()
    try:
        yield write
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, library: Path) -> Tuned:
    """
    Raises:
        ValueError: it has another form, or belongs to another library.
    """
    found = json.loads(path.read_text())
    expected = {"library": str, "gpu": str, "date": str, "forward": list, "backward": list}
    if not isinstance(found, dict) or {name: type(found[name]) for name in found} != expected:
        raise ValueError(f"expected {', '.join(expected)}")
    rows = *found["forward"], *found["backward"]
    if not all(type(each) is int and 0 <= each < 2**31 for each in rows):
        raise ValueError("forward, backward: expected integers from 0 to 2147483647")
    if found["library"] != cache.seal_of(library):
        raise ValueError(f"it was measured with another library than {library}")
    return Tuned(found["gpu"], found["date"], tuple(found["forward"]), tuple(found["backward"]))
