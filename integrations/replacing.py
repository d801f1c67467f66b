"""Binds names of other libraries, or attributes of a model, to megasoftmax, and undoes it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple, Self

_ABSENT = object()


class Served(NamedTuple):
    """What a part of a model or a library runs."""

    runs: str
    """"attention", "SDPA", "reference" (attention in plain torch), "softmax", "router" or
    "unchanged"."""
    why: str = ""

    @classmethod
    def by(cls, reasons: Any, otherwise: str) -> Self:
        """By `why_not_fused` of attention; `otherwise` runs where neither kernels nor SDPA do."""
        if not reasons:
            return cls("attention")
        runs = "SDPA" if reasons.runs == "SDPA" else otherwise
        return cls(runs, "; ".join(map(str, reasons)))

    def __str__(self) -> str:
        return f"{self.runs}: {self.why}" if self.why else self.runs


class Reports(ABC):
    """What says by names what runs."""

    @property
    @abstractmethod
    def report(self) -> dict[str, Served]: ...

    def __repr__(self) -> str:
        """The report, a line for neighbours that are served alike."""
        lines = []
        for served, group in groupby(self.report.items(), key=lambda item: item[1]):
            names = [name for name, _ in group]
            first_and_last = " ... ".join(dict.fromkeys([names[0], names[-1]]))
            lines.append(f"{first_and_last} ({len(names)}): {served}")
        return "\n".join(lines)


class Change(NamedTuple):
    """What a name is bound to."""

    owner: Any
    """A dictionary, such as `sys.modules`, or any other object, whose attribute the name is."""
    name: str
    ours: Any
    where: str = ""
    """What errors call the owner; by default its class."""

    @property
    def bound(self) -> Any:
        """What the owner itself has under the name at present."""
        if self.name == "__class__":
            return type(self.owner)
        names = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return names.get(self.name, _ABSENT)

    def bind(self, value: Any) -> None:
        is_dict = isinstance(self.owner, dict)
        if value is _ABSENT:
            self.owner.pop(self.name) if is_dict else delattr(self.owner, self.name)
        elif is_dict:
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Replaced:
    """Names that one call has bound to something else, until `undo`; a context manager."""

    def __init__(self, changes: Iterable[Change]) -> None:
        """Make the changes; names that are bound to ours already are left to whoever bound them."""
        self._replaced: list[tuple[Change, Any]] = []
        for change in changes:
            original = change.bound
            if original != change.ours:
                change.bind(change.ours)
                self._replaced.append((change, original))

    @property
    def names(self) -> tuple[str, ...]:
        """What was replaced."""
        return tuple(change.name for change, _ in self._replaced)

    def undo(self) -> None:
        """Restore what was bound before, unless something else was bound since; harmless twice."""
        for change, original in reversed(self._replaced):
            if change.bound == change.ours:
                change.bind(original)
        self._replaced = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class Patched(Replaced):
    """Changes of parts of a model, which must not have been changed again when they are undone."""

    def unpatch(self) -> None:
        """Restore what was; calling it twice is harmless.

        Raises:
            RuntimeError: something was changed since, by another patch or by offloading for
                example, which has to be undone first; nothing was restored.
        """
        for change, _ in self._replaced:
            if change.bound != change.ours:
                where = change.where or type(change.owner).__name__
                raise RuntimeError(
                    f"unpatch: expected {where} with the {change.name} that was set, "
                    f"{change.ours!r}, got {change.bound!r}; undo first what was done after"
                )
        self.undo()

    def __exit__(self, *exception: object) -> None:
        self.unpatch()


class PatchedParts(Reports, Patched):
    """Parts of a model that one call has changed, and why others stay as they are."""

    def __init__(self, model: Any, changes: list[Change], why_not: dict[str, str]) -> None:
        super().__init__(changes)
        self._model = model
        self._why_not = why_not
