"""Importing this ends an example that lacks a package with the name of the extra that has it."""

import sys
from types import TracebackType

from megasoftmax._extras import missing_extra


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    hint = missing_extra(error) if isinstance(error, ModuleNotFoundError) else None
    if hint is None:
        sys.__excepthook__(kind, error, traceback)
    else:
        print(f"{sys.argv[0]}: {hint}", file=sys.stderr)


sys.excepthook = _report
