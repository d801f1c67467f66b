"""Says which extra of the package to install where an import fails."""

# A top-level module -> the extra of pyproject.toml that brings it.
EXTRAS = {
    "accelerate": "test",
    "matplotlib": "examples",
    "megatron": "megatron",
    "rich": "examples",
    "transformers": "transformers",
    "triton": "megatron",  # megatron-core imports it from 0.18 on, and does not require it
    "typer": "examples",
    "yaml": "examples",
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install for the module that was not found; None where no extra has it."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    return f"{error.name} is not installed: pip install 'megasoftmax[{EXTRAS[module]}]'"
