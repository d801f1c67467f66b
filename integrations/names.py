"""The names by which transformers knows megasoftmax, and the switch of the environment."""

import os

NAME = "megasoftmax"
SOFTMAX_NAME = "megasoftmax_softmax"
NAMES = (NAME, SOFTMAX_NAME)
_WITH_EAGER_MASK = "_eager_mask"


def with_eager_mask(name: str) -> str:
    """The name of this implementation for models that only know the masks of "eager"."""
    return name + _WITH_EAGER_MASK


def asked_name(implementation: str | None) -> str | None:
    """The one of NAMES that an implementation is, with whatever mask; None: another."""
    name = (implementation or "").removesuffix(_WITH_EAGER_MASK)
    return name if name in NAMES else None


def is_disabled() -> bool:
    """Whether the environment says MEGASOFTMAX_DISABLE=1.

    Raises:
        ValueError: it has another value than 0, 1 or none.
    """
    value = os.environ.get("MEGASOFTMAX_DISABLE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"MEGASOFTMAX_DISABLE: expected 0 or 1, got {value!r}")
    return value == "1"
