"""The kinds of rows. Separate, so that the command's options load quickly."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """A kind of rows; also the name of its folder and dataset configuration."""

    messages = "messages"
    tokens = "tokens"
    preferences = "preferences"
    verdicts = "verdicts"
    atif = "atif"
