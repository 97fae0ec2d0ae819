"""Converts Gymnasium spaces: action schemas to JSON, actions from JSON, observations to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from .protocol import Refused


def schema_of(space: Any) -> dict[str, Any]:
    """JSON schema of a space's elements."""
    kind = type(space).__name__
    if kind == "Discrete":
        start = int(space.start)
        return {"type": "integer", "minimum": start, "maximum": start + int(space.n) - 1}
    if kind == "Text":
        return {"type": "string", "minLength": int(space.min_length), "maxLength": int(space.max_length)}
    if kind == "Dict":
        properties = {key: schema_of(part) for key, part in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    if kind == "Tuple":
        num = len(space.spaces)
        return {"type": "array", "prefixItems": [schema_of(part) for part in space.spaces], "minItems": num}
    schema: dict[str, Any] = {"description": str(space)}
    if getattr(space, "shape", None) is None:
        return schema
    item: dict[str, Any] = {"type": "number" if getattr(space, "dtype", None) is None else _number(space.dtype)}
    for size in reversed(space.shape):
        item = {"type": "array", "items": item, "minItems": int(size), "maxItems": int(size)}
    return {**item, **schema}


def _number(dtype: Any) -> str:
    return "integer" if dtype.kind in "iub" else "number"


def action_of(space: Any, value: Any) -> Any:
    """An element of the space. Raises: Refused if `value` is not in it."""
    try:
        action = _element(space, value)
        fits = space.contains(action)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise Refused(f"{json.dumps(value)} is not an action of {space}: {error}") from error
    if not fits:
        raise Refused(f"{json.dumps(value)} is not an action of {space}")
    return action


def _element(space: Any, value: Any) -> Any:
    kind = type(space).__name__
    if kind == "Discrete":
        if isinstance(value, str):
            value = int(value)
        if isinstance(value, bool) or value != int(value):
            raise ValueError("not a whole number")
        return space.dtype.type(int(value))
    if kind == "Text":
        return str(value)
    if kind == "Dict":
        return {key: _element(part, value[key]) for key, part in space.spaces.items()}
    if kind == "Tuple":
        if len(value) != len(space.spaces):
            raise ValueError(f"{len(space.spaces)} parts are needed")
        return tuple(_element(part, one) for part, one in zip(space.spaces, value, strict=True))
    return space.from_jsonable([value])[0]


def text_of(observation: Any) -> str:
    """An observation for the model: strings unchanged, anything else as JSON."""
    return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in cast("Sequence[Any]", value)]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
