"""Files are written whole and made durable in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import gangline

_SOURCE = Path(gangline.__file__).parent
_OWN = {"fsync", "fdatasync", "flock"}
_ALLOWED = {
    "machine/durable.py": {"fsync", "flock"},
    "store/journal/entries.py": {"fsync", "fdatasync"},  # the journal appends to files, and cuts off what was torn
    "sandbox/images/unpacked.py": {"flock"},  # folders that stay while they are used
    "sandbox/shared/users.py": {"flock"},  # a file that is removed while it is locked
}


def _syncing_calls(file: Path) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    return {call.attr for call in calls if isinstance(call, ast.Attribute)} & _OWN


def test_only_durable_syncs_and_locks_files() -> None:
    found = {str(file.relative_to(_SOURCE)): _syncing_calls(file) for file in _SOURCE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == _ALLOWED
