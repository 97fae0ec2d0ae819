"""No class outgrows 250 lines or 15 attributes, and no function 60 lines, without a reason.

A reason is a sentence of its docstring that begins with "Long because".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gangline

ROOT = Path(gangline.__file__).parent
MAX_CLASS_LINES, MAX_ATTRIBUTES, MAX_FUNCTION_LINES = 250, 15, 60
REASON = "Long because "

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def attributes(found: ast.ClassDef) -> set[str]:
    """Names that a class's methods set on `self`."""
    return {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def is_large(found: Definition) -> bool:
    assert found.end_lineno is not None
    num_lines = found.end_lineno - found.lineno + 1
    if isinstance(found, ast.ClassDef):
        return num_lines > MAX_CLASS_LINES or len(attributes(found)) > MAX_ATTRIBUTES
    return num_lines > MAX_FUNCTION_LINES


def large(source: str) -> Iterator[str]:
    """Names of classes and functions that are too large and give no reason."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Definition) and is_large(node) and REASON not in (ast.get_docstring(node) or ""):
            yield node.name


def test_classes_and_functions_are_small_or_say_why_not() -> None:
    found = {
        f"{path.relative_to(ROOT)} {name}" for path in sorted(ROOT.rglob("*.py")) for name in large(path.read_text())
    }
    assert not found, f"split these, or begin a sentence of their docstring with {REASON.strip()!r}"


def test_what_is_too_large_is_found_and_a_reason_is_heard() -> None:
    lines = "\n".join("    a = 1" for _ in range(MAX_FUNCTION_LINES))
    names = "\n".join(f"        self.a{number} = 1" for number in range(MAX_ATTRIBUTES + 1))
    assert list(large(f"def f():\n{lines}")) == ["f"]
    assert list(large(f'def f():\n    """Long because it lists."""\n{lines}')) == []
    assert list(large(f"class C:\n    def __init__(self):\n{names}")) == ["C"]
    assert list(large("class C:\n    def __init__(self):\n        self.a, self.b = 1, 2")) == []
