"""Small repositories with a fault, an issue that describes it, and tests that the agent does not see.

A row has SWE-Gym's columns, and `files` instead of an image: the repository is created from them in the sandbox. Its
tests run under `unittest`, which every Python has. The faults are in `swe_faults.toml`.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gangline.tasks.presets.samples.sample import Sample, take_turns

_HIDDEN = "tests/test_hidden.py"
_SETUP = '''"""Hidden tests."""

import unittest

from {package}.{module} import {names}


class HiddenTest(unittest.TestCase):
'''
_README = "# {package}\n\n{purpose}\n\nRun the tests with `python3 -m unittest`.\n"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault in a module with a single purpose."""

    module: str
    purpose: str
    names: str
    """Imported by the tests."""
    source: str
    """The module without the fault."""
    repair: str
    """The part of `source` that the fault replaces."""
    fault: str
    wrong: str
    """A repair that looks right but leaves a test failing."""
    issue: str
    """`PACKAGE` stands for the package's name."""
    fails: dict[str, str]
    """Name -> statement of a test that fails before the repair."""
    passes: dict[str, str]


@cache
def _faults() -> list[Fault]:
    text = Path(__file__).with_name("swe_faults.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, list[Fault]])["faults"]


def swe_samples(number: int, seed: int) -> list[Sample]:
    return take_turns([_Kind(fault) for fault in _faults()], number, seed)


@dataclass(frozen=True)
class _Kind:
    fault: Fault

    def __call__(self, rng: random.Random) -> Sample:
        fault = self.fault
        package = f"{rng.choice(_FIRST)}{rng.choice(_SECOND)}"
        path = f"{package}/{fault.module}.py"
        broken = fault.source.replace(fault.repair, fault.fault)
        wrong = fault.source.replace(fault.repair, fault.wrong)
        tests = {**fault.fails, **fault.passes}
        hidden = _SETUP.format(package=package, module=fault.module, names=fault.names)
        hidden += "\n".join(
            f'    def test_{name}(self):\n        """{_shown(name)}"""\n        {line}\n'
            for name, line in tests.items()
        )
        repair = _patch(path, broken, fault.source)
        row: dict[str, Any] = {
            "instance_id": f"gangline__{package}-{rng.randint(1000, 9999)}",
            "repo": f"gangline/{package}",
            "version": "0.1",
            "created_at": "2020-01-01T00:00:00Z",
            "hints_text": "",
            "problem_statement": fault.issue.replace("PACKAGE", package),
            "files": {
                "README.md": _README.format(package=package, purpose=fault.purpose),
                f"{package}/__init__.py": f'"""{fault.purpose}"""\n',
                path: broken,
                "tests/__init__.py": "",
            },
            "patch": repair,
            "test_patch": _patch(_HIDDEN, "", hidden),
            "test_cmd": "python3 -m unittest -v tests.test_hidden",
            "log_parser": "unittest",
            "FAIL_TO_PASS": [*map(_shown, fault.fails)],
            "PASS_TO_PASS": [*map(_shown, fault.passes)],
        }
        return Sample(row, repair, _patch(path, broken, wrong))


def _shown(name: str) -> str:
    """A test as reported by `unittest`: by its docstring, because its reported name differs between Python versions."""
    return name.replace("_", " ")


def _patch(path: str, before: str, after: str) -> str:
    old = f"a/{path}" if before else "/dev/null"
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, f"b/{path}")
    return "".join(lines)


_FIRST = ("red", "old", "low", "far", "dry", "raw")
_SECOND = ("sled", "harbor", "ledger", "kettle", "lantern", "paddle", "gravel")
