"""A request of the Responses API, as the beginning of a task; pure.

An agent is told one instruction. So the request's texts become one, in order, and a conversation that an assistant has
already taken part in is refused, as is everything else that would be lost.

Source: OpenAI's API reference, `POST /v1/responses`; NeMo Gym 0.7.0, `responses_api_agents/remote_agent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gangline.domain.conversation import ModelCall, Text, ThinkingWish, message_text
from gangline.domain.errors import InvalidRequest
from gangline.wire.dialects.responses.request import RESPONSES_FIELDS, parse_responses_count

__all__ = ["read_task"]


def read_task(body: bytes, template: Mapping[str, Any]) -> dict[str, Any]:
    """The template with the request's instruction behind its own, and the request's sampling parameters.

    template: a task's body. Raises: InvalidRequest.
    """
    call = parse_responses_count(body)  # the one that may lack a model: the agent's is the task's
    _refuse_what_is_lost(call)
    told = [message_text(message) for message in call.messages]
    if not any(told):
        raise InvalidRequest("input: there is no text to tell the agent.")
    capture: dict[str, Any] = dict(template.get("capture") or {})
    asked = {name: value for name, value in msgspec.structs.asdict(call.sampling).items() if value not in (None, ())}
    if "seed" in asked:
        capture["seed"] = asked.pop("seed")  # each model call draws by a seed of its own, made from this one
    if asked:
        rules = {name: {"override": value} for name, value in asked.items()}
        capture["sampling"] = {**(capture.get("sampling") or {}), **rules}
    instruction = "\n\n".join(text for text in [template.get("instruction"), *told] if text)
    return {**template, "capture": capture, "instruction": instruction, "num_samples": 1}


def _refuse_what_is_lost(call: ModelCall) -> None:
    """Raises: InvalidRequest."""
    lost = [name for name in call.dropped if name not in RESPONSES_FIELDS.dropped and not name.startswith("include")]
    lost += [] if call.thinking == ThinkingWish() else ["reasoning.effort"]
    said = [part for message in call.messages for part in message.parts]
    reasons = {
        "tools: the agent has tools of its own, and cannot call those of a request": call.tools,
        "previous_response_id: each request begins a session of its own": call.previous_reply_id,
        "stream: an agent's run is answered whole": call.stream,
        "text: an agent says what it says; ask for a format in words": call.response_format,
        "stop: an agent ends by itself; its model's replies have their own end": call.sampling.stop,
        "input: a session begins with what the user and the system say, not with an assistant's words or results": [
            one for one in call.messages if one.role in ("assistant", "tool")
        ],
        "input: an agent can be told text alone; put files into the task's `prepare`": [
            part for part in said if not isinstance(part, Text)
        ],
        f"{', '.join(lost)[:300]}: nothing of an agent corresponds to this": lost,
    }
    if why := next((why for why, value in reasons.items() if value), None):
        raise InvalidRequest(f"{why}.")
