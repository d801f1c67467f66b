"""Skips what this machine cannot run, with the reason."""

import pytest
import torch

from megasoftmax import _build, _extension

MISSING = {
    "gpu": None if torch.cuda.is_available() else "torch sees no CUDA GPU",
    "nvcc": None if _build.find_nvcc() else "no nvcc runs here",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason in MISSING.items():
        if reason is not None and item.get_closest_marker(marker) is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _operators() -> None:
    """Operators that are called by their names need the compiled part loaded beforehand."""
    if torch.cuda.is_available():
        _extension.load()
