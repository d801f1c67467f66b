"""Functions in place of those that another package exports, until they are uninstalled."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megasoftmax.integrations.replacing import Change, Replaced, Reports, Served


class Installed(Reports, Replaced):
    """What one call of an `install` has changed; a context manager."""

    def __init__(self, places: list[Change], missing: list[Change], why_not: dict[str, str]):
        """Bind the places, and the modules of packages that are not installed.

        Args:
            places: names in modules that exist, with the dotted name as `where`.
            missing: modules that exist nowhere, in `sys.modules`.
            why_not: dotted names of modules that cannot be changed, and the reasons.
        """
        super().__init__([*places, *missing])
        self._places = [*places, *missing]
        self._why_not = why_not

    @property
    def report(self) -> dict[str, Served]:
        """What every place runs at present, by its dotted name."""
        found = {
            place.where: Served("attention")
            if place.bound is place.ours
            else Served("unchanged", "uninstalled")
            for place in self._places
        }
        return found | {name: Served("unchanged", why) for name, why in self._why_not.items()}

    def uninstall(self) -> None:
        """Restore what was bound before; calling it twice is harmless.

        What something else has bound since stays. So do names in modules that were imported
        meanwhile and took the function with `from ... import`.
        """
        self.undo()


def install(
    name: str,
    ours: Callable[..., Any],
    modules: Iterable[str],
    stand_ins: Mapping[str, Mapping[str, Any]],
) -> Installed:
    """Bind a function wherever a package exports it, and wherever it was imported to by name.

    Args:
        name: of the function.
        ours: what takes its place.
        modules: dotted names of the modules that export it.
        stand_ins: for a package that is not installed, its modules and what each has besides the
            function; those of `modules` have the function.

    A module that is installed and cannot be imported stays as it is, and `report` has the error.
    """
    modules = list(modules)
    places: list[Change] = []
    missing: list[Change] = []
    why_not: dict[str, str] = {}
    for module_name in dict.fromkeys([*modules, *stand_ins]):
        if module_name not in sys.modules and not _is_installed(module_name.partition(".")[0]):
            has_function = {name: ours} if module_name in modules else {}
            module = _module(module_name, {**stand_ins[module_name], **has_function})
            missing.append(Change(sys.modules, module_name, module, module_name))
        elif module_name in modules:
            try:
                module = importlib.import_module(module_name)
            except Exception as error:  # whatever a broken installation raises
                why_not[module_name] = f"{type(error).__name__}: {error}"
            else:
                places.append(Change(module, name, ours, f"{module_name}.{name}"))
    _link(missing)
    originals = [place.bound for place in places if place.bound is not ours]
    for module_name, module in list(sys.modules.items()):
        held = vars(module).get(name) if isinstance(module, ModuleType) else None
        is_held = callable(held) and any(held is each for each in originals)
        if is_held and module_name not in modules:
            places.append(Change(module, name, ours, f"{module_name}.{name}"))
    return Installed(places, missing, why_not)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec, which somebody put there
        return True


def _module(name: str, content: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name, f"megasoftmax in place of {name}, which is not installed.")
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []  # so that `import` looks for modules below it among those loaded
    vars(module).update(content)
    return module


def _link(modules: list[Change]) -> None:
    """Make each module an attribute of the one above it, unless a function has its name."""
    by_name = {change.name: change.ours for change in modules}
    for name, module in by_name.items():
        above, _, last = name.rpartition(".")
        if above in by_name and not hasattr(by_name[above], last):
            setattr(by_name[above], last, module)
