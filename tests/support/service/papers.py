"""Listings of the papers, word for word, from `tests/data/papers`; what a test puts into one is named where it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "data" / "papers"


def listing(name: str) -> str:
    return (FOLDER / name).read_text()


def filled(name: str, values: Mapping[str, str]) -> Any:
    """A JSON listing with its placeholders, such as `{rollout_id}`, filled in; each must be there."""
    text = listing(name)
    for placeholder, value in values.items():
        assert placeholder in text, f"{name} has no {placeholder}"
        text = text.replace(placeholder, value)
    return json.loads(text)
