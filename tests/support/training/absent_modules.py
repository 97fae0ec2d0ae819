"""Stand-ins for packages that a trainer imports and that nothing of what is tested here calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

__all__ = ["importable"]


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def has(self, name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in self._names)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if self.has(name):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def importable(checkout: Path | str, *absent: str, bare: Sequence[str] = ()) -> Iterator[None]:
    """Within it the packages of a checkout can be imported, although the packages `absent` are not installed.

    bare: packages of the checkout whose `__init__`, which would import too much, is not run.
    """
    root = str(Path(checkout).absolute())
    finder = _Absent(absent)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, root)
    for name in bare:
        package = ModuleType(name)
        package.__path__ = [str(Path(root, *name.split(".")))]
        sys.modules[name] = package
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(root)
        found = [name for name, module in sys.modules.items() if name in bare or _is_of(module, root)]
        # Nothing else: a module such as `datasets`, imported anew, registers its types a second time and fails.
        for name in [*found, *(name for name, module in sys.modules.items() if _loader(module) is finder)]:
            sys.modules.pop(name, None)


def _loader(module: object) -> object:
    return getattr(getattr(module, "__spec__", None), "loader", None)


def _is_of(module: object, root: str) -> bool:
    """Whether it was loaded from that folder. A package without `__init__` has no file, only places."""
    file, places = getattr(module, "__file__", None), getattr(module, "__path__", ())
    # A namespace's own iterator asks for its parent, which may be gone.
    found = [file] if isinstance(file, str) else getattr(places, "_path", places)
    return any(str(one).startswith(f"{root}/") for one in found)
