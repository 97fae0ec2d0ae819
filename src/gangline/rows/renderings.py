"""Counts how many stitched prompts equal the template's rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from gangline.domain.completion import PromptSource

_NAMES = {True: "as_rendered", False: "not_as_rendered", None: "not_compared"}


class _Prompt(Protocol):
    @property
    def prompt_source(self) -> PromptSource: ...

    @property
    def as_rendered(self) -> bool | None: ...


def count_renderings(prompts: Iterable[_Prompt]) -> dict[str, int]:
    """Returns name -> number of stitched prompts."""
    return dict(Counter(_NAMES[prompt.as_rendered] for prompt in prompts if prompt.prompt_source == "stitched"))
