"""Command options for an evaluator that replaces the tasks' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.domain.task import EvaluatorSpec

EvaluatorOption = Annotated[
    str | None,
    typer.Option(
        "--evaluator",
        metavar="NAME|JSON|@FILE",
        help="What grades: an evaluator's name, or a task's `evaluator` as JSON. Default: each task's own.",
        show_default=False,
    ),
]


def given_evaluator(text: str) -> EvaluatorSpec:
    """A strategy, JSON, or a file of JSON. Raises: InvalidRequest, UnknownPlugin."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--evaluator: cannot read {text[1:]}: {error}") from error
    if not text.lstrip().startswith("{"):
        return checked_evaluator({"strategy": text.strip()}, "--evaluator")
    try:
        return checked_evaluator(json.loads(text), "--evaluator")
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"--evaluator is not valid JSON: {error}") from error


def evaluator_fields(text: str) -> dict[str, Any]:
    """`given_evaluator` as the fields of a task. Raises: InvalidRequest, UnknownPlugin."""
    return given_evaluator(text).model_dump(mode="json", exclude_unset=True)


def checked_evaluator(fields: Any, where: str) -> EvaluatorSpec:
    """Raises: InvalidRequest, UnknownPlugin."""
    from pydantic import ValidationError

    from gangline.domain.task import EvaluatorSpec
    from gangline.settings.plugins import check_evaluator, explain

    try:
        spec = EvaluatorSpec.model_validate(cast("dict[str, Any]", fields))
    except ValidationError as error:
        raise InvalidRequest(f"{where}: {explain(error, EvaluatorSpec)}") from error
    check_evaluator(spec)
    return spec
