"""Names of other libraries that are bound to something of megasoftmax, until that is undone."""

from typing import Any, Self


class Replaced:
    """Names that one call has bound to something else, until `undo`; a context manager."""

    def __init__(self, bindings: list[tuple[dict[str, Any], str, Any]]) -> None:
        """Bind (namespace, name, object); those that are bound so already are left to whoever did.

        A namespace is a dictionary: `vars(module)`, `sys.modules`.
        """
        self._replaced = []
        for namespace, name, ours in bindings:
            original = namespace.get(name)
            if original is not ours:
                namespace[name] = ours
                self._replaced.append((namespace, name, ours, original))

    @property
    def names(self) -> tuple[str, ...]:
        """What was replaced."""
        return tuple(name for _, name, _, _ in self._replaced)

    def undo(self) -> None:
        """Bind what was there before, but where something else is bound since; harmless twice."""
        for namespace, name, ours, original in self._replaced:
            if namespace.get(name) is not ours:
                continue
            if original is None:
                del namespace[name]
            else:
                namespace[name] = original
        self._replaced = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
