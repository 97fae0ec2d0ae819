"""The threat model names every attack, and only tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hostile.http_attacks import ATTACKS
from support.hostility import attacks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text()
NAMED = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", PAGE)
LISTED = re.findall(r"`(\w+)`", "\n".join(line for line in PAGE.splitlines() if line.startswith("Attacks: ")))


def test_every_attack_is_in_the_threat_model_and_every_attack_there_exists() -> None:
    exist = [attack.name for attack in attacks(isolated=True)] + [attack.name for attack in ATTACKS]
    assert sorted(LISTED) == sorted(exist)


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_test_that_the_threat_model_names_exists(file: str, test: str) -> None:
    source = (ROOT / file).read_text()
    assert f"def {test}(" in source if test else "def test_" in source
