"""Validation errors for people: the field, the problem, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gangline.domain.errors import CallerError, InvalidRequest, UnknownPlugin

_MOST_SHOWN = 20


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Returns one line per error, `field: problem`, with a suggestion if a name is nearly right.

    model: the validated model.
    """
    return [_line(item, model) for item in error.errors()]


def _line(item: ErrorDetails, model: type[BaseModel]) -> str:
    place, given, hint = item["loc"], item["input"], ""
    if item["type"] == "extra_forbidden":
        hint = _nearest(str(place[-1]), _fields_at(place[:-1], model))
    elif item["type"] == "literal_error" and isinstance(given, str):
        hint = _nearest(given, re.findall(r"'([^']+)'", str(item.get("ctx", {}).get("expected", ""))))
    return f"{'.'.join(map(str, place)) or 'body'}: {item['msg']}{hint}"


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=1)
    return f". Did you mean {found[0]!r}?" if found else ""


def _fields_at(place: Sequence[int | str], model: type[BaseModel]) -> list[str]:
    """Returns field names of the models at a place. Steps that are not a field (an index, a tag) are skipped."""
    models = [model]
    for step in place:
        kinds = [one.model_fields[str(step)].annotation for one in models if str(step) in one.model_fields]
        models = [found for kind in kinds for found in _models_in(kind)] or models
    return [name for one in models for name in one.model_fields]


def _models_in(kind: Any) -> Iterator[type[BaseModel]]:
    """Yields the models in an annotation such as `dict[str, A] | B | None`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in get_args(kind):
        yield from _models_in(argument)


class Problems:
    """Collects all problems of one file, to report them together."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._found: list[CallerError] = []

    def add(self, lines: Iterable[str]) -> None:
        self._found += [InvalidRequest(f"{self._where}: {line}.") for line in lines]

    @contextmanager
    def collected(self) -> Generator[None]:
        """Collect the error that ends the block."""
        try:
            yield
        except (InvalidRequest, UnknownPlugin) as error:
            self._found.append(error)

    def require_none(self) -> None:
        """Raises: the only problem, or InvalidRequest with all of them, one per line."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            prefix = f"{self._where}: "
            lines = [f"\n  {error.message.removeprefix(prefix)}" for error in self._found[:_MOST_SHOWN]]
            more = len(self._found) - len(lines)
            last = f"\n  and {more} more" if more else ""
            raise InvalidRequest(f"{self._where} has {len(self._found)} problems:{''.join(lines)}{last}")
