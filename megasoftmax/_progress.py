"""How far a command is: a bar in a terminal, and a line now and then where there is none."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINES = 10  # without a terminal


class Steps:
    """Counts steps of a long command; a context manager.

    Args:
        console: where it is told.
        total: how many steps there will be.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._start = time.monotonic()
        self._told = 0
        columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(
            *columns,
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def reach(self, step: int, description: str) -> None:
        """`step` steps are done; `description` says what came of the last one."""
        self._bar.update(self._task, completed=step, description=description)
        if self._console.is_terminal or step * LINES // self._total <= self._told:
            return
        self._told = step * LINES // self._total
        seconds = time.monotonic() - self._start
        left = seconds / step * (self._total - step)
        self._console.print(
            f"{step} of {self._total}, {seconds:.0f} s, about {left:.0f} s left: {description}",
            soft_wrap=True,
            highlight=False,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
