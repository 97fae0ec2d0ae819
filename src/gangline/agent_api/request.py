"""A request of the Responses API, as the beginning of a task; pure.

An agent is told one instruction. So the request's texts become one, in order, and a conversation that an assistant has
already taken part in is refused, as is everything else that would be lost.

Source: OpenAI's API reference, `POST /v1/responses`; NeMo Gym 0.7.0, `responses_api_agents/remote_agent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest

__all__ = ["read_task"]

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
_TEXT_PARTS = ("input_text", "text")
_WITHOUT_MEANING = {
    *("include", "max_tool_calls", "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    *("service_tier", "store", "stream_options", "tool_choice", "top_logprobs", "truncation", "user"),
}
"""Fields about a model's reply, or its delivery; the agent and its engine are the task's."""
_FOR_MODELS = {
    "tools": "the agent has tools of its own, and cannot call those of a request",
    "previous_response_id": "each request begins a session of its own",
    "conversation": "each request begins a session of its own",
    "stream": "an agent's run is answered whole",
    "background": "an agent's run is waited for",
    "text": "an agent says what it says: ask for a format in words",
    "reasoning": "an agent's model calls are its own: set this in the task",
    "prompt": "stored prompts are OpenAI's",
}
"""Field -> why a value other than none, false, an empty list or plain text is refused."""


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None


def read_task(body: bytes, template: Mapping[str, Any]) -> dict[str, Any]:
    """The template with the request's instruction behind its own, and the request's sampling parameters.

    template: a task's body. Raises: InvalidRequest.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        asked = msgspec.convert(fields, _Body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is no `POST /v1/responses` of OpenAI's: {error}.") from error
    _refuse_what_is_lost(fields)
    told = _texts(asked.input)
    if not any(told):
        raise InvalidRequest("input: there is no text to tell the agent.")
    said = [template.get("instruction") or "", asked.instructions or "", *told]
    instruction = "\n\n".join(text for text in said if text)
    capture: Mapping[str, Any] = template.get("capture") or {}
    sampling: dict[str, Any] = dict(capture.get("sampling") or {})
    for name, ours in _SAMPLING.items():
        if fields.get(name) is not None:
            sampling[ours] = {"override": fields[name]}
    changed = {"capture": {**capture, "sampling": sampling}} if sampling else {}
    return {**template, **changed, "instruction": instruction, "num_samples": 1}


def _refuse_what_is_lost(fields: Mapping[str, Any]) -> None:
    known = {"input", "instructions", *_SAMPLING, *_WITHOUT_MEANING, *_FOR_MODELS}
    for name, value in fields.items():
        if not value or (name == "text" and value == {"format": {"type": "text"}}):
            continue
        if name in _FOR_MODELS:
            raise InvalidRequest(f"{name}: {_FOR_MODELS[name]}.")
        if name not in known:
            raise InvalidRequest(f"{name[:100]}: this field is not known, so its meaning would be lost.")


def _texts(said: str | list[dict[str, Any]]) -> list[str]:
    return [said] if isinstance(said, str) else [_text(item, f"input[{at}]") for at, item in enumerate(said)]


def _text(item: Mapping[str, Any], where: str) -> str:
    if item.get("type", "message") != "message" or item.get("role") not in ("user", "system", "developer"):
        what = f"an item of type {item.get('type')!r}" if item.get("role") is None else f"role {item['role']!r}"
        raise InvalidRequest(f"{where}: a session begins with what the user and the system say, and this is {what}.")
    content: Any = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: content must be a text, or a list of parts.")
    texts: list[str] = []
    for part in content:  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):  # pyright: ignore
            raise InvalidRequest(
                f"{where}: an agent can be told text alone; put other files into the task's `prepare`."
            )
        texts.append(part["text"])  # pyright: ignore[reportUnknownArgumentType]
    return "\n".join(texts)
