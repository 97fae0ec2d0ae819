"""Options of `gangline node` that `gangline up` hands on to its node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from gangline.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from gangline.domain.task import SamplingPolicy
    from gangline.gateway.calls.limits import CallLimits

__all__ = [
    "AdoptGraceOption",
    "AffinityOption",
    "CallLimitsOption",
    "CaptureOption",
    "EngineKeyOption",
    "EngineKindOption",
    "EngineOptionsOption",
    "SamplingOption",
    "read_call_limits",
    "read_capture",
    "read_engine_options",
    "read_policy",
]

AdoptGraceOption = Annotated[
    float,
    typer.Option(
        "--adopt-grace",
        min=0,
        help="Seconds that running agents outlive a node that was killed, for it to go on with them; 0: not at all.",
    ),
]
CaptureOption = Annotated[
    str,
    typer.Option("--capture", help="ids; or text, for engines that report no token ids: nothing can be trained."),
]
CallLimitsOption = Annotated[
    str | None,
    typer.Option(
        "--call-limits",
        help='Limits of one model call, as JSON: {"max_body_bytes": 8388608, "max_messages": 4096}.',
        show_default=False,
    ),
]
AffinityOption = Annotated[
    int,
    typer.Option(
        "--affinity-slack",
        min=0,
        help="Sessions of one task share an engine while it has fewer than so many more than the least loaded.",
    ),
]
EngineKeyOption = Annotated[
    str | None,
    typer.Option(
        "--engine-key-env",
        help="Name of the environment variable with the key that the engine asks for.",
        show_default=False,
    ),
]
EngineKindOption = Annotated[
    str, typer.Option("--engine-kind", help="Engine plug-in that speaks to it; auto asks the engine.")
]
EngineOptionsOption = Annotated[
    str | None,
    typer.Option(
        "--engine-options",
        help='Options of the engine plug-in, as JSON: {"parsers": {"thinking": "qwen3", "tools": "hermes"}}.',
        show_default=False,
    ),
]
SamplingOption = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        help='Policy over the harness\'s sampling parameters, as JSON: {"temperature": {"override": 1}}.',
        show_default=False,
    ),
]


def read_call_limits(text: str | None) -> CallLimits:
    """Raises: InvalidRequest."""
    from gangline.gateway.calls.limits import read_limits

    return read_limits(text)


def read_capture(text: str) -> Literal["ids", "text"]:
    """Raises: InvalidRequest."""
    if text == "ids" or text == "text":
        return text
    raise InvalidRequest(f"--capture must be ids or text, got {text!r}.")


def read_engine_options(text: str | None, name: str = "--engine-options") -> dict[str, Any]:
    """Raises: InvalidRequest."""
    try:
        options: object = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequest(f"{name} is not JSON: {error}") from error
    if not isinstance(options, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {text}.")
    return cast("dict[str, Any]", options)


def read_policy(text: str | None) -> SamplingPolicy | None:
    """Raises: InvalidRequest."""
    if text is None:
        return None
    from pydantic import ValidationError

    from gangline.domain.task import SamplingPolicy
    from gangline.plugins import explain

    try:
        return SamplingPolicy.model_validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(f"--sampling: {explain(error)}") from error
