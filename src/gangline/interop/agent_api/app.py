"""`POST /v1/responses`: runs one session and returns its response.

Laws
- Each request is a session, submitted to the service like any other, and answered when it has ended.
- A client that disconnects ends its session: only that client could have received the answer.
- All errors have OpenAI's form, including errors of the HTTP layer.

An agent receives a single instruction. The request's texts are therefore joined in order. A conversation that already
contains assistant messages is refused, as is any other field that would be lost.

Source: OpenAI's API reference, `POST /v1/responses`; NeMo Gym 0.7.0, `responses_api_agents/remote_agent`.

A response has the exact tokens of its session's replies. It contains one trace, because NeMo Gym and NeMo RL turn the
items of a response into one row. If the main conversation was split into several traces, it is the last one, which has
the final answer. `usage` counts the tokens of all calls, so that omitted tokens can be detected.

An item carries tokens if it is the last of a reply that is trainable as a whole; other replies are context.

Source: NeMo Gym 0.7.0, `nemo_gym/openai_utils.py` (`TokenIDLogProbMixin`); its `remote_agent`, which would execute a
call without an output, and asks again if the last item is not an assistant message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    ModelCall,
    Text,
    ThinkingWish,
    ToolResult,
    message_text,
)
from gangline.domain.errors import GanglineError, HarnessError, InvalidRequest, NotFound, ServerUnavailable, TooMany
from gangline.domain.ids import new_id
from gangline.domain.session import SessionResult
from gangline.domain.trajectory import Trace, Trajectory, TurnSpan
from gangline.grading.transcript import last_answer
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.wire.client.server import ServerClient
from gangline.wire.dialects.responses.errors import responses_error
from gangline.wire.dialects.responses.history import message_items
from gangline.wire.dialects.responses.request import RESPONSES_FIELDS, parse_responses_count
from gangline.wire.http.keys import require_key
from gangline.wire.http.listening import read_body
from gangline.wire.http.same_origin import JSON, OwnNames, require_json

log = logging.getLogger("gangline.wire.http")

_MAX_BODY_BYTES = 16 << 20


def read_task(body: bytes, template: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template with the request's instruction appended to its own, and the request's sampling parameters.

    template: a task's body. Raises: InvalidRequest.
    """
    call = parse_responses_count(body)  # the body may lack a model: the task's is used
    _refuse_what_is_lost(call)
    texts = [message_text(message) for message in call.messages]
    if not any(texts):
        raise InvalidRequest("input: there is no text to tell the agent.")
    capture: dict[str, Any] = dict(template.get("capture") or {})
    asked = {name: value for name, value in msgspec.structs.asdict(call.sampling).items() if value not in (None, ())}
    if "seed" in asked:
        capture["seed"] = asked.pop("seed")  # each model call uses a seed derived from this one
    if asked:
        rules = {name: {"override": value} for name, value in asked.items()}
        capture["sampling"] = {**(capture.get("sampling") or {}), **rules}
    instruction = "\n\n".join(text for text in [template.get("instruction"), *texts] if text)
    return {**template, "capture": capture, "instruction": instruction, "num_samples": 1}


def _refuse_what_is_lost(call: ModelCall) -> None:
    """Raises: InvalidRequest."""
    lost = [name for name in call.dropped if name not in RESPONSES_FIELDS.dropped and not name.startswith("include")]
    lost += [] if call.thinking == ThinkingWish() else ["reasoning.effort"]
    parts = [part for message in call.messages for part in message.parts]
    reasons = {
        "tools: the agent has its own tools, and cannot call those of a request": call.tools,
        "previous_response_id: each request begins its own session": call.previous_reply_id,
        "stream: an agent's run is answered whole": call.stream,
        "text: an agent says what it says; ask for a format in words": call.response_format,
        "stop: an agent ends by itself; its model's replies have their own end": call.sampling.stop,
        "input: a session begins with what the user and the system say, not with an assistant's words or results": [
            one for one in call.messages if one.role in ("assistant", "tool")
        ],
        "input: an agent can be told text alone; put files into the task's `prepare`": [
            part for part in parts if not isinstance(part, Text)
        ],
        f"{', '.join(lost)[:300]}: nothing of an agent corresponds to this": lost,
    }
    if why := next((why for why, value in reasons.items() if value), None):
        raise InvalidRequest(f"{why}.")


def create_app(
    client: ServerClient,
    template: Mapping[str, Any],
    *,
    names: OwnNames,
    key: str | None = None,
    max_sessions: int = 64,
) -> web.Application:
    """client: for the service that runs the sessions; it is not closed.
    template: a task's body; the request's instruction is appended to its own.
    names: host names of this server. key: the bearer token that every client must send; None: no authentication.
    max_sessions: concurrent sessions; further requests are refused with 429.
    """
    app = web.Application(middlewares=[_in_openai_s_form])
    door = _Door(client, template, names, key, max_sessions)
    app.add_routes(door.routes())
    app.on_shutdown.append(door.close)
    return app


@web.middleware
async def _in_openai_s_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such route or method
        return _error(NotFound(f"{request.method} {request.path[:200]}: {error.reason}. There is POST /v1/responses."))
    except GanglineError as error:
        return _error(error)
    except Exception:
        log.exception("request.crashed method=%s path=%.200s", request.method, request.path)
        return _error(GanglineError("internal error; see the log of this service."))


def shaped_error(_method: str, _path: str, error: GanglineError) -> web.Response:
    """The error response for a request that reached no handler."""
    return _error(error)


def _error(error: GanglineError) -> web.Response:
    answer = responses_error(error)
    return web.Response(status=answer.status, body=answer.body, headers=answer.headers, content_type=JSON)


class _Door:
    def __init__(
        self, client: ServerClient, template: Mapping[str, Any], names: OwnNames, key: str | None, max_sessions: int
    ) -> None:
        self._client, self._template, self._names, self._key = client, template, names, key
        self._max_sessions = max_sessions
        self._running: set[asyncio.Task[SessionResult]] = set()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/health", self.health), web.post("/v1/responses", self.respond)]

    async def health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._running)})

    async def respond(self, request: web.Request) -> web.Response:
        self._names.check(request)
        require_key(request, self._key)
        require_json(request, JSON)
        task = await asyncio.to_thread(read_task, await read_body(request, _MAX_BODY_BYTES), self._template)
        if len(self._running) >= self._max_sessions:
            raise TooMany(f"{self._max_sessions} sessions run already: try again, or start with more --sessions.")
        return web.Response(body=await self._ran(task), content_type=JSON)

    async def _ran(self, task: Mapping[str, Any]) -> bytes:
        """Raises: errors of the service; HarnessError if there is no run to return; ServerUnavailable when the app
        shuts down.
        """
        running = asyncio.create_task(self._session(task))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise ServerUnavailable("this service is stopping.") from None
            running.cancel()
            await asyncio.wait({running})
            raise
        return await asyncio.to_thread(lambda: msgspec.json.encode(response_of(result, time.time())))

    async def _session(self, task: Mapping[str, Any]) -> SessionResult:
        """Submits the task and waits for its result. Cancelling this also ends the session."""
        task_id = new_id("call")
        try:
            await self._client.submit({**task, "task_id": task_id})
            await self._client.wait(task_id)
            (result,) = await self._client.result(task_id)
        except asyncio.CancelledError:
            with suppress(GanglineError):  # it was never submitted, or the service is gone
                await self._client.cancel(task_id)
            raise
        return result

    async def close(self, _app: web.Application) -> None:
        """Cancel running sessions and wait for them to end."""
        running = tuple(self._running)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


_NOT_RUN = "The agent ended before this call had a result."


def response_of(result: SessionResult, created_at: float) -> dict[str, Any]:
    """created_at: Unix time.

    Raises: HarnessError if there is no run to return: it was cancelled, or its machine or engine failed.
    """
    trajectory = result.trajectory
    outcome = result.run_outcome or result.outcome  # the caller grades the run itself
    if trajectory is None or not trajectory.traces or outcome in ("cancelled", "infra_error"):
        why = outcome if result.failure is None else f"{outcome}: {result.failure.message}"
        raise HarnessError(f"session {result.session_id} has no run to answer with ({why}).")
    trace = _chosen(tuple(with_whole_prompts(trajectory.traces)))
    items = _items(trace, trajectory)
    is_whole = outcome == "completed"
    return {
        "id": f"resp_{result.session_id}",
        "object": "response",
        "created_at": created_at,
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "model": trace.spans[-1].model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(trajectory, trace),
        "metadata": _about(result, items),
    }


def _chosen(traces: Sequence[Trace]) -> Trace:
    """The last main trace with trainable tokens: a run may end with a call that was cut off."""
    main = [trace for trace in traces if trace.role == "main"] or traces
    return next((one for one in reversed(main) if one.loss_mask.any()), main[-1])


def _about(result: SessionResult, items: Sequence[dict[str, Any]]) -> dict[str, str]:
    metadata = {"session_id": result.session_id, "outcome": result.run_outcome or result.outcome}
    if result.reward is not None:
        metadata["reward"] = repr(result.reward)
    return metadata | {"replies_with_tokens": str(sum("generation_token_ids" in item for item in items))}


def _items(trace: Trace, trajectory: Trajectory) -> list[dict[str, Any]]:
    """Items from the model's first reply on. Every call has an output, and the last item is an assistant message."""
    replies = sum(message.role == "assistant" for message in trace.response_messages)
    # Assistant messages written by the client cannot be distinguished here, and images have no token ids.
    has_tokens = replies == len(trace.spans) and not any(
        map(_media, (*trace.prompt_messages, *trace.response_messages))
    )
    spans = iter(trace.spans)
    items: list[dict[str, Any]] = []
    for message in trace.response_messages:
        if message.role != "assistant":
            items += _answered(message)
            continue
        items += _unanswered(items)
        new_items = message_items(_without_media(message), f"{trace.trace_id}_{len(items)}")
        if has_tokens and new_items:
            new_items[-1] |= _tokens(trace, next(spans))
        elif has_tokens:
            next(spans)
        items += new_items
    items += _unanswered(items)
    if not items or items[-1].get("role") != "assistant":
        last = Message("assistant", (Text(last_answer(trajectory) or ""),))
        items += message_items(last, f"{trace.trace_id}_last")
    return items


def _tokens(trace: Trace, span: TurnSpan) -> dict[str, Any]:
    """Token fields of a reply; empty if any part of it is not trainable."""
    if not trace.loss_mask[span.start : span.end].all():
        return {}
    response = trace.response_ids[span.start : span.end]
    return {
        "prompt_token_ids": [*trace.prompt_ids.tolist(), *trace.response_ids[: span.start].tolist()],
        "generation_token_ids": response.tolist(),
        "generation_log_probs": trace.response_logprobs[span.start : span.end].tolist(),
    }


def _answered(message: Message) -> list[dict[str, Any]]:
    """Items for the messages that the agent program added between two replies."""
    return [
        item if "type" in item else {"type": "message", "status": "completed", **item}
        for item in message_items(_without_media(message))
    ]


def _unanswered(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Placeholder outputs for calls without one."""
    answered = {item["call_id"] for item in items if item.get("type") == "function_call_output"}
    calls = [item["call_id"] for item in items if item.get("type") == "function_call"]
    return [
        {"type": "function_call_output", "call_id": fromkey, "output": _NOT_RUN}
        for fromkey in dict.fromkeys(calls)
        if fromkey not in answered
    ]


def _media(message: Message) -> bool:
    return any(
        isinstance(one, Image | Document)
        for part in message.parts
        for one in (part.content if isinstance(part, ToolResult) else (part,))
    )


def _without_media(message: Message) -> Message:
    """The message with each image or document replaced by a word in brackets."""
    if not _media(message):
        return message
    parts = (
        msgspec.structs.replace(part, content=tuple(map(_worded, part.content)))
        if isinstance(part, ToolResult)
        else _worded(part)
        for part in message.parts
    )
    return msgspec.structs.replace(message, parts=tuple(parts))


def _worded(part: Any) -> Any:
    return Text(f"[{type(part).__name__.lower()}]") if isinstance(part, Image | Document) else part


def _usage(trajectory: Trajectory, trace: Trace) -> dict[str, Any]:
    """Sampled tokens of all calls, and prompt tokens of the calls in the response."""
    sampled = {span.completion_id: span.end - span.start for one in trajectory.traces for span in one.spans}
    read = sum(len(trace.prompt_ids) + span.start for span in trace.spans)
    num_sampled = sum(sampled.values())
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + num_sampled,
    }
