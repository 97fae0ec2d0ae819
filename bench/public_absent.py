"""Stand-ins for packages that reasoning-gym and TextArena import, and that this bench's tasks never use.

A session starts its environment anew, and plotting, algebra and language packages take most of that start. Their place
is taken by empty modules, by a `.pth` file of `public_bench.py`; nothing of the tasks' own packages is changed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LEFT_OUT = {"matplotlib", "mpl_toolkits", "nltk", "sympy"}


class Absent(ModuleType):
    """A module, or a name in one."""

    def __init__(self, name: str = "absent", *_: Any) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name)

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__


class Finder:
    """Of the modules that are left out."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, Finder, is_package=True) if name.partition(".")[0] in LEFT_OUT else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    @staticmethod
    def exec_module(_: ModuleType) -> None: ...


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
