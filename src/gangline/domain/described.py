"""Docstrings of a model's fields.

pydantic's `use_attribute_docstrings` parses the source of every class when it is defined, a tenth of the time until a
service is ready. Here a module is parsed when its descriptions are asked for: for help, OpenAPI or the docs.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from pydantic import BaseModel


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Field -> its docstring, for the fields that have one; none where the source is not installed."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__[: model.__mro__.index(BaseModel)]):
        found |= _of_classes(kind.__module__).get(kind.__name__, {})
    return found


@cache
def _of_classes(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring, for all classes of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: dict(_documented(node)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in pairwise(node.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)
            case _:
                pass
