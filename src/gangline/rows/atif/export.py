"""Sessions as ATIF documents, for Harbor and related tools: the conversation, call by call, with exact token ids.

The document is the session's main conversation. Every other conversation (sub-agents, side calls, branches, further
choices, aborted calls) is an entry of its `subagent_trajectories`; the part shared with its parent conversation is
marked `is_copied_context`. Every model call is exactly one step. Unlike a row, a conversation continues after a turn
whose context is not exact: the certificate in the step's metrics reports that.

The parts of a message become ATIF content: a text, or a list of texts and images.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import mimetypes
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import (
    Document,
    Image,
    Message,
    Part,
    Text,
    Thinking,
    ToolCall,
    ToolDefinition,
    ToolResult,
)
from gangline.domain.session import SessionResult
from gangline.domain.tokens import TokenIds, encode_json
from gangline.machine.durable import replacing
from gangline.rows.atif.document import (
    AtifAgent,
    AtifContent,
    AtifImage,
    AtifMetrics,
    AtifObservation,
    AtifPart,
    AtifReference,
    AtifResult,
    AtifStep,
    AtifToolCall,
    AtifTotals,
    AtifTrajectory,
)
from gangline.rows.chains import find_chains, goes_on_from, new_messages_since
from gangline.rows.lineage import assign_roles

SCHEMA_VERSION = "ATIF-v1.8"

Images = dict[str, bytes]
"""Path relative to the document -> the image's bytes."""

_SUFFIXES = {"image/jpeg": "jpg", "image/png": "png", "image/gif": "gif", "image/webp": "webp"}


def content_of(parts: Iterable[Part], images: Images) -> AtifContent:
    """Returns ATIF content for a message; a single text becomes a string. Inline images are added to `images`. Parts
    that ATIF cannot represent are named in a text."""
    content = [found for part in parts if (found := _part(part, images)) is not None]
    if not content:
        return ""
    only = content[0].text if len(content) == 1 else None
    return content if only is None else only


def _part(part: Part, images: Images) -> AtifPart | None:
    match part:
        case Text(text):
            return AtifPart(type="text", text=text)
        case Image(url):
            source = _image(url, images)
            return _named("image", url, None) if source is None else AtifPart(type="image", source=source)
        case Document(url, name):
            return _named("document", url, name)
        case _:
            return None


def _named(kind: str, url: str, name: str | None) -> AtifPart:
    """Returns a text in place of a part that ATIF cannot represent."""
    where = url.partition(",")[0] if url.startswith("data:") else url
    return AtifPart(type="text", text=f"[{kind}: {name or where}]")


def _image(url: str, images: Images) -> AtifImage | None:
    """Returns None when ATIF does not know its media type, or its bytes cannot be decoded."""
    if not url.startswith("data:"):
        guessed, _ = mimetypes.guess_type(url.partition("?")[0])
        return AtifImage(media_type=guessed, path=url) if guessed in _SUFFIXES else None
    head, _, data = url.removeprefix("data:").partition(",")
    media_type, _, encoding = head.partition(";")
    if media_type not in _SUFFIXES or encoding != "base64":
        return None
    try:
        image = base64.b64decode(data, validate=True)
    except binascii.Error:
        return None
    path = f"images/{hashlib.sha256(image).hexdigest()[:32]}.{_SUFFIXES[media_type]}"
    images[path] = image
    return AtifImage(media_type=media_type, path=path)


def write_atif(results: Iterable[SessionResult], folder: Path, *, agent_of: Callable[[str], str | None]) -> int:
    """Write one `SESSION.json` in `folder` for each session that called a model, and `images/` for their images.

    agent_of: returns the name of a task's agent program, by task id; results do not contain it. Returns the number of
    documents. Keeps one document at a time in memory.
    """
    num = 0
    for result in results:
        images: Images = {}
        document = atif_of(result, images, agent=agent_of(result.task_id) or "unknown")
        if document is None:
            continue
        for path, data in images.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(folder / path) as aside:
                aside.write_bytes(data)
        (folder / f"{result.session_id}.json").parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{result.session_id}.json") as aside:
            aside.write_bytes(encode_json(document))
        num += 1
    return num


def atif_of(result: SessionResult, images: Images, *, agent: str = "unknown") -> AtifTrajectory | None:
    """Returns None when the session called no model. Images that were sent inline are added to `images`, by path."""
    if not result.completions:
        return None
    tree = CompletionTree(result.completions)
    prompts, roles = _prompts(tree), assign_roles(tree)
    conversations = _conversations(tree)
    main = max(conversations, key=lambda one: (roles[one[0].completion_id].role == "main", _num_sampled(one)))
    name_of = {
        turn.completion_id: _name(result, conversation) for conversation in conversations for turn in conversation
    }
    steps_of = {_name(result, turns): _Steps(turns[0].model, images) for turns in conversations}
    documents: dict[str, AtifTrajectory] = {}
    delegated: list[tuple[str, str]] = []
    for turns in conversations:
        name, first = _name(result, turns), turns[0]
        lineage = roles[first.completion_id].lineage
        extra: dict[str, Any] = {"role": roles[first.completion_id].role, "relation": lineage.relation}
        if (origin_id := first.parent_id or lineage.origin_id) is not None:
            extra |= {"origin_trajectory": name_of[origin_id], "origin_completion": origin_id}
            if lineage.relation == "spawned":
                delegated.append((origin_id, name))
        steps = _say(tree, turns, prompts, steps_of[name])
        documents[name] = _document(turns, steps, prompts, name=name, agent=agent, extra=extra)
    for origin_id, name in delegated:
        steps_of[name_of[origin_id]].delegate(origin_id, name)
    whole = documents.pop(_name(result, main))
    return msgspec.structs.replace(
        whole, extra=whole.extra | _of_session(result), subagent_trajectories=list(documents.values()) or None
    )


def _name(result: SessionResult, turns: Sequence[Completion]) -> str:
    return f"{result.session_id}.{turns[0].completion_id}"


def _prompts(tree: CompletionTree) -> dict[str, TokenIds]:
    """Returns completion id -> its whole prompt, without copies: the turns of a chain share one array."""
    return {
        completion.completion_id: chain.context_ids[: CompletionTree.num_prompt_ids(completion)]
        for chain in find_chains(tree, merge=True)
        for completion in chain.completions
    }


def _of_session(result: SessionResult) -> dict[str, Any]:
    return {
        "task_id": result.task_id,
        "attempt": result.attempt,
        "outcome": result.outcome,
        "reward": result.reward,
        "reward_details": result.reward_details,
    }


def _num_sampled(turns: Sequence[Completion]) -> int:
    return sum(len(turn.sampled_ids) for turn in turns)


def _conversations(tree: CompletionTree) -> list[list[Completion]]:
    """Returns conversations with every completion in exactly one. Of several calls that continue a reply, the one with
    the most later calls stays in the reply's conversation."""
    num_after = dict.fromkeys((completion.completion_id for completion in tree), 1)
    heirs: dict[str, Completion] = {}
    for completion in reversed(list(tree)):
        if (parent_id := completion.parent_id) is not None and _continues(completion, tree[parent_id]):
            num_after[parent_id] += num_after[completion.completion_id]
            heir = heirs.get(parent_id, completion)
            if num_after[completion.completion_id] >= num_after[heir.completion_id]:
                heirs[parent_id] = completion
    conversation_of: dict[str, list[Completion]] = {}
    conversations: list[list[Completion]] = []
    for completion in tree:
        parent_id = completion.parent_id or ""
        if heirs.get(parent_id) is completion:
            turns = conversation_of[parent_id]
        else:
            turns: list[Completion] = []
            conversations.append(turns)
        turns.append(completion)
        conversation_of[completion.completion_id] = turns
    return conversations


def _continues(completion: Completion, parent: Completion) -> bool:
    return completion.status == parent.status == "complete" and goes_on_from(parent, completion)


def _say(
    tree: CompletionTree, turns: Sequence[Completion], prompts: dict[str, TokenIds], steps: _Steps
) -> list[AtifStep]:
    first = turns[0]
    request = tree.messages(first)
    steps.hear(request[: first.messages_shared], copied=True)
    steps.hear(request[first.messages_shared :])
    steps.speak(first, prompts[first.completion_id])
    for before, turn in pairwise(turns):
        steps.hear(new_messages_since(before, turn))
        steps.speak(turn, prompts[turn.completion_id])
    return steps.steps


def _document(
    turns: Sequence[Completion],
    steps: list[AtifStep],
    prompts: dict[str, TokenIds],
    *,
    name: str,
    agent: str,
    extra: dict[str, Any],
) -> AtifTrajectory:
    first = turns[0]
    return AtifTrajectory(
        schema_version=SCHEMA_VERSION,
        session_id=first.session_id,
        trajectory_id=name,
        agent=AtifAgent(
            name=agent,
            version="unknown",
            model_name=first.model,
            tool_definitions=[_tool(tool) for tool in first.tools] or None,
        ),
        steps=steps,
        final_metrics=AtifTotals(
            total_prompt_tokens=sum(len(prompts[turn.completion_id]) for turn in turns),
            total_completion_tokens=_num_sampled(turns),
            total_steps=len(steps),
        ),
        extra=extra,
    )


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


class _Steps:
    """The steps of one conversation, in order."""

    def __init__(self, model: str, images: Images) -> None:
        self.steps: list[AtifStep] = []
        self._model = model
        self._images = images
        self._asked: dict[str, AtifStep] = {}
        """tool call id -> the step that made it."""
        self._calls: dict[str, AtifStep] = {}
        """completion id -> its step."""

    def hear(self, messages: Iterable[Message], *, copied: bool = False) -> None:
        """Add a request's messages. An assistant message among them was not sampled here, so it always counts as copied
        context."""
        for message in messages:
            if message.role == "assistant":
                self._append(self._said(message), copied=True)
                continue
            rest = tuple(part for part in message.parts if not isinstance(part, ToolResult))
            for part in message.parts:
                if isinstance(part, ToolResult):
                    self._observe(part, copied)
            if rest or not message.parts:
                source = "user" if message.role in ("user", "tool") else "system"
                self._append(AtifStep(step_id=0, source=source, message=content_of(rest, self._images)), copied=copied)

    def speak(self, completion: Completion, prompt_ids: TokenIds) -> None:
        """Add a model call."""
        step = self._said(completion.response)
        step.timestamp = datetime.fromtimestamp(completion.finished_at, UTC).isoformat()
        step.model_name = None if completion.model == self._model else completion.model
        step.metrics = _metrics(completion, prompt_ids)
        step.llm_call_count = 1
        self._append(step)
        self._calls[completion.completion_id] = step

    def delegate(self, completion_id: str, trajectory_id: str) -> None:
        """Reference another conversation, which a tool call of that completion began, next to the tools' results."""
        step = self._calls[completion_id]
        calls = step.tool_calls or []
        found = AtifResult(
            source_call_id=calls[0].tool_call_id if len(calls) == 1 else None,
            subagent_trajectory_ref=[AtifReference(trajectory_id=trajectory_id)],
        )
        _observe(step, found)

    def _append(self, step: AtifStep, *, copied: bool = False) -> None:
        step.step_id = len(self.steps) + 1
        step.is_copied_context = True if copied else None
        self.steps.append(step)
        for call in step.tool_calls or ():
            self._asked[call.tool_call_id] = step

    def _said(self, message: Message) -> AtifStep:
        thinking = "".join(part.text for part in message.parts if isinstance(part, Thinking))
        calls = [_tool_call(part) for part in message.parts if isinstance(part, ToolCall)]
        rest: tuple[Part, ...] = tuple(part for part in message.parts if not isinstance(part, Thinking | ToolCall))
        texts = [part.text for part in rest if isinstance(part, Text)]
        return AtifStep(
            step_id=0,
            source="agent",
            message="".join(texts) if len(texts) == len(rest) else content_of(rest, self._images),
            reasoning_content=thinking or None,
            tool_calls=calls or None,
        )

    def _observe(self, result: ToolResult, copied: bool) -> None:
        """Add a result to the step that asked for it, or as a new step of the environment if there is no such step."""
        content = content_of(result.content, self._images)
        extra = {"is_error": True} if result.is_error else None
        step = self._asked.get(result.call_id)
        if step is None:
            extra = (extra or {}) | {"call_id": result.call_id}
            step = AtifStep(step_id=0, source="system", message="")
            self._append(step, copied=copied)
            found = AtifResult(content=content, extra=extra)
        else:
            found = AtifResult(source_call_id=result.call_id, content=content, extra=extra)
        _observe(step, found)


def _observe(step: AtifStep, found: AtifResult) -> None:
    before = [] if step.observation is None else step.observation.results
    step.observation = AtifObservation(results=[*before, found])


def _tool_call(call: ToolCall) -> AtifToolCall:
    """Arguments that are not a JSON object (free text, invalid JSON) are kept unchanged, under `input`."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        arguments = {"input": call.arguments}
    return AtifToolCall(tool_call_id=call.call_id, function_name=call.name, arguments=arguments)


def _metrics(completion: Completion, prompt_ids: TokenIds) -> AtifMetrics:
    usable = len(completion.logprobs) == len(completion.sampled_ids) and bool(np.isfinite(completion.logprobs).all())
    return AtifMetrics(
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(completion.sampled_ids),
        prompt_token_ids=prompt_ids,
        completion_token_ids=completion.sampled_ids,
        logprobs=completion.logprobs if usable else None,
        extra={
            "completion_id": completion.completion_id,
            "status": completion.status,
            "trainable": completion.trainable,
            "certificate": msgspec.to_builtins(completion.certificate),
        },
    )
