"""The kinds of rows; of nothing else, so that the command's options load quickly."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Kind"]


class Kind(StrEnum):
    """A kind of rows: also the name of its folder and of its configuration of the dataset."""

    messages = "messages"
    tokens = "tokens"
    preferences = "preferences"
    verdicts = "verdicts"
    atif = "atif"
