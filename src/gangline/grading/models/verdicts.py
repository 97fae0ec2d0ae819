"""A judge's verdict: the requested format, and parsing of the scores in an answer.

For a single work the answer is `{"reason": ..., "score": ...}`. For several parts it is an object of such objects,
keyed by part number from "1". An answer is not usable if it lacks the score of a part, or contains a part that was not
shown.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, cast

import msgspec

from gangline.grading.answers import without_thoughts

_REASON_CHARS = 2_000
_MOST_OBJECTS = 64
"""Object beginnings tried in an answer, in addition to one per part."""


class Verdict(msgspec.Struct, frozen=True):
    """By part, in order; a single entry for a single work."""

    scores: tuple[float, ...]
    reasons: tuple[str, ...]
    cached: bool = False


class Form(NamedTuple):
    """The format of an answer."""

    lowest: float
    highest: float
    num_parts: int | None
    """None for a single work."""

    @property
    def words(self) -> str:
        """Instructions for the judge."""
        one = f'{{"reason": "<two sentences>", "score": <a number from {self.lowest:g} to {self.highest:g}>}}'
        return one if self.num_parts is None else f'{{"1": {one}, "2": ...}}, with every part by its number'

    @property
    def schema(self) -> dict[str, Any]:
        """The schema for the engine's `response_format`."""
        score = {"type": "number", "minimum": self.lowest, "maximum": self.highest}
        one = _object({"reason": {"type": "string"}, "score": score})
        schema = one if self.num_parts is None else _object(dict.fromkeys(self._numbers, one))
        return {"name": "verdict", "schema": schema, "strict": True}

    def read(self, answer: Any) -> Verdict:
        """answer: from a chat API. Raises: ValueError if it contains no usable verdict."""
        try:
            found = self._last_object(without_thoughts(answer["choices"][0]["message"]["content"]))
            parts = [found] if self.num_parts is None else [found[number] for number in self._numbers]
            scores = [part["score"] for part in parts]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__} {error} in {json.dumps(answer)[:300]}") from None
        for score in scores:
            is_number = isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)
            if not is_number or not self.lowest <= score <= self.highest:
                raise ValueError(f"the score {score!r} is not a number from {self.lowest:g} to {self.highest:g}")
        return Verdict(tuple(map(float, scores)), tuple(str(part.get("reason", ""))[:_REASON_CHARS] for part in parts))

    @property
    def _numbers(self) -> list[str]:
        return [str(number) for number in range(1, (self.num_parts or 0) + 1)]

    def _last_object(self, text: str) -> dict[str, Any]:
        """The last JSON object of this format in a text. Raises: KeyError if there is none."""
        decoder = json.JSONDecoder()
        for found in reversed(list(re.finditer(r"\{", text))[-_MOST_OBJECTS - (self.num_parts or 0) :]):
            try:
                value, _ = decoder.raw_decode(text, found.start())
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict) and self._fits(fields := cast("dict[str, Any]", value)):
                return fields
        raise KeyError("score" if self.num_parts is None else f"an object with just the parts 1 to {self.num_parts}")

    def _fits(self, fields: dict[str, Any]) -> bool:
        if self.num_parts is None:
            return "score" in fields
        return {name for name in fields if name.isdecimal()} == set(self._numbers)


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
