"""Turns an engine's answer into the stored record: aligned, checked, with its certificate. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from gangline.domain.completion import (
    Certificate,
    Completion,
    Constraint,
    Context,
    DivergenceCause,
    LogprobKind,
    ParseStatus,
    PromptSource,
)
from gangline.domain.conversation import Message, ModelCall, Part, Text, Thinking, ToolCall, ToolResult
from gangline.domain.evidence.contract import EvidenceKind, Tokens
from gangline.domain.node_views import TemplateFacts
from gangline.domain.tokens import Logprobs, TokenIds, logprobs, token_ids
from gangline.domain.unshown import TOOL_RESULTS, TOOLS
from gangline.models.engines.contract import EngineCapabilities, EngineChoice
from gangline.models.engines.fields import has_documents, media_in
from gangline.models.engines.templates.fitting import unmet_wishes
from gangline.models.language.parsing.marks import lost_calls
from gangline.models.language.parsing.values import is_object
from gangline.node.capture.placing import Place

ENGINE_CALL_IDS = "engine_call_ids"
"""Name in a record's metadata: own tool-call id -> id from the engine or the model."""

_NO_ID = re.compile(r"(call_\d+)?")
"""Placeholder of our parsers for a call whose text shows no id; the same ones recur in every reply."""

_NO_LOGPROB = -9999.0
"""vLLM's value for minus infinity."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt that one call was conditioned on, compared with its parent's context."""

    source: PromptSource
    context: Context
    parent_id: str | None
    shared: int
    """Number of leading ids in common with the parent's context."""
    suffix_ids: TokenIds
    first_divergence: int | None = None
    cause: DivergenceCause | None = None
    fallback: str | None = None
    as_rendered: bool | None = None
    unlike_rendering: str | None = None


def tool_call_id(record_key: str, choice_index: int, call_index: int) -> str:
    """Returns the id that the harness sees and echoes; it identifies one record."""
    return f"call_{record_key}{choice_index:02x}{call_index:02x}"


def with_own_call_ids(message: Message, record_key: str, choice_index: int) -> Message:
    parts: list[Part] = []
    num_calls = 0
    for part in message.parts:
        if isinstance(part, ToolCall):
            parts.append(ToolCall(tool_call_id(record_key, choice_index, num_calls), part.name, part.arguments))
            num_calls += 1
        else:
            parts.append(part)
    return Message(message.role, tuple(parts), message.name)


def engine_call_ids(message: Message, own: Message) -> dict[str, str]:
    """Returns own id -> the id from the engine or the sampled text, without placeholders."""
    pairs = zip(_calls(own), _calls(message), strict=True)
    return {ours.call_id: theirs.call_id for ours, theirs in pairs if not _NO_ID.fullmatch(theirs.call_id)}


def _calls(message: Message) -> list[ToolCall]:
    return [part for part in message.parts if isinstance(part, ToolCall)]


def completion_of(
    call: ModelCall,
    place: Place,
    prompt: Prompt,
    choice: EngineChoice,
    capabilities: EngineCapabilities,
    *,
    session_id: str,
    attempt: int,
    started_at: float,
    finished_at: float,
    aborted: str | None = None,
    metadata: dict[str, Any] | None = None,
    with_texts: bool = False,
    kinds: Sequence[EvidenceKind] = (),
    before: Certificate | None = None,
    engine_role: str | None = None,
) -> Completion:
    """Returns the record of one choice, without its id. `choice.message` has its final tool-call ids.

    with_texts: keep the texts of the sampled ids, if there is one for each.
    kinds: the evidence to keep. before: the parent's certificate.
    aborted: why the call was cut off; None for a call that was answered in full.
    engine_role: see `Certificate`.
    """
    ids = token_ids() if choice.sampled_ids is None else choice.sampled_ids
    follows = prompt.parent_id is not None
    requested = {} if call.model == capabilities.model else {"requested_model": call.model}
    completion = Completion(
        completion_id="",
        session_id=session_id,
        attempt=attempt,
        status="complete" if aborted is None else "aborted",
        parent_id=prompt.parent_id,
        branch_key=place.branch_key,
        dialect=call.dialect,
        model=capabilities.model,
        choice_index=choice.index,
        prompt_shared=prompt.shared,
        prompt_suffix_ids=prompt.suffix_ids,
        sampled_ids=ids,
        logprobs=_aligned(choice.logprobs, len(ids)),
        sampled_texts=_texts(choice, len(ids)) if with_texts else (),
        messages_shared=place.num_shared if follows else 0,
        new_messages=place.new_messages if follows else call.messages,
        response=choice.message,
        tools=() if follows else call.tools,
        certificate=_certificate(call, prompt, choice, capabilities, aborted, engine_role, kinds),
        lineage=place.lineage,
        started_at=started_at,
        finished_at=finished_at,
        dropped=(*call.dropped, *unmet_wishes(call), *_unrendered(call, capabilities.template)),
        metadata=(metadata or {}) | requested,
    )
    if not kinds:
        return completion
    tokens = Tokens(ids, prompt.shared, prompt.shared + len(prompt.suffix_ids), capabilities.num_ids, before)
    return completion.with_evidence({kind.name: kind.keep(choice.evidence.get(kind.name), tokens) for kind in kinds})


def _unrendered(call: ModelCall, template: TemplateFacts) -> list[str]:
    """Returns the parts of a call that the template does not show to the model."""
    dropped: list[str] = []
    if call.tools and template.renders_tools is False:
        dropped.append(TOOLS)
    if template.renders_tool_results is False and any(
        isinstance(part, ToolResult) for message in call.messages for part in message.parts
    ):
        dropped.append(TOOL_RESULTS)
    return dropped


def _certificate(
    call: ModelCall,
    prompt: Prompt,
    choice: EngineChoice,
    capabilities: EngineCapabilities,
    aborted: str | None,
    engine_role: str | None,
    kinds: Sequence[EvidenceKind],
) -> Certificate:
    cut_off = f"aborted: {aborted}" if aborted is not None else None
    return Certificate(
        prompt_source=prompt.source,
        context=prompt.context,
        logprobs=_logprob_kind(choice, capabilities, kinds),
        finish_reason="abort" if aborted is not None else choice.finish_reason or "abort",
        parse=parse_status(call, choice),
        first_divergence=prompt.first_divergence,
        cause=prompt.cause,
        fallback=prompt.fallback,
        as_rendered=prompt.as_rendered,
        unlike_rendering=prompt.unlike_rendering,
        untrainable=(
            cut_off or _unseen(call, choice) or _untrainable(choice) or _outside(choice, prompt, capabilities.num_ids)
        ),
        stop_reason=choice.stop_reason,
        sampling=call.sampling,
        constraint=_constraint(call),
        version_spans=choice.version_spans,
        engine=capabilities.engine,
        engine_version=capabilities.version,
        tokenizer_digest=capabilities.template.tokenizer_digest,
        template_digest=capabilities.template.template_digest,
        engine_role=engine_role,
        images=choice.images,
    )


def _logprob_kind(choice: EngineChoice, capabilities: EngineCapabilities, kinds: Sequence[EvidenceKind]) -> LogprobKind:
    if choice.logprobs is None:
        return "missing"
    found = capabilities.logprob_kind
    for kind in kinds:
        found = kind.logprob_kind(found) if kind.name in choice.evidence else found
    return found


def _unseen(call: ModelCall, choice: EngineChoice) -> str | None:
    """Returns which of `MEDIA` the prompt contains without evidence for its ids."""
    media = media_in(call.messages)
    if media != "images" or choice.images is None or choice.images.refused is not None:
        return media
    if choice.sampled_ids is not None and (choice.sampled_ids == choice.images.placeholder_id).any():
        return "images"  # a placeholder that was sampled has no pixels
    return "documents" if has_documents(call.messages) else None


def _constraint(call: ModelCall) -> Constraint | None:
    if call.tools and call.tool_choice is not None and call.tool_choice.mode in ("required", "named"):
        return "tool_choice"
    constrains = call.response_format is not None and call.response_format.get("type") != "text"
    return "response_format" if constrains else None


def _untrainable(choice: EngineChoice) -> str | None:
    ids, values = choice.sampled_ids, choice.logprobs
    if ids is None:
        return "the engine reports no token ids"
    if len(ids) == 0:
        return "no sampled ids"
    if values is None:
        return "no log-probs"
    if len(values) != len(ids):
        return f"{len(values)} log-probs for {len(ids)} sampled ids"
    low, high = values.min(), values.max()  # NaN where any is
    if low > _NO_LOGPROB and high <= 1e-3:
        return None
    if not np.isfinite(values).all():
        return f"log-prob of sampled token {int(np.argmin(np.isfinite(values)))} is not finite"
    if (values <= _NO_LOGPROB).any():
        return f"log-prob of sampled token {int(np.argmax(values <= _NO_LOGPROB))} is {_NO_LOGPROB}"
    if (values > 1e-3).any():
        return f"log-prob of sampled token {int(np.argmax(values > 1e-3))} is positive"
    return None


def _outside(choice: EngineChoice, prompt: Prompt, num_ids: int | None) -> str | None:
    """Returns why ids are outside the vocabulary, for which a trainer would look up another token's row or none. The
    shared prefix was checked when it was new."""
    assert choice.sampled_ids is not None
    for kind, ids in (("sampled", choice.sampled_ids), ("prompt", prompt.suffix_ids)):
        if len(ids) and (ids.min() < 0 or (num_ids is not None and ids.max() >= num_ids)):
            wrong = (ids < 0) if num_ids is None else (ids < 0) | (ids >= num_ids)
            at = int(np.argmax(wrong))
            return f"{kind} token {at} is {int(ids[at])}, which is outside of the vocabulary"
    return None


def _texts(choice: EngineChoice, length: int) -> tuple[str, ...]:
    texts = tuple(entry.token for entry in choice.token_logprobs)
    return texts if len(texts) == length else ()


def _aligned(values: Logprobs | None, length: int) -> Logprobs:
    """[length]; NaN where a log-prob is missing, which only records marked untrainable have."""
    if values is not None and len(values) == length:
        return values
    aligned = np.full(length, np.nan, dtype=np.float32)
    if values is not None:
        kept = min(length, len(values))
        aligned[:kept] = values[:kept]
    return logprobs(aligned)


def parse_status(call: ModelCall, choice: EngineChoice) -> ParseStatus:
    """Whether all tool calls of the reply were parsed: as our parser reports, else by the traces that an engine's own
    parser leaves."""
    if choice.parse is not None:
        return choice.parse
    parts = choice.message.parts
    calls = [part for part in parts if isinstance(part, ToolCall)]
    text = "\n".join(part.text for part in parts if isinstance(part, Text))
    thinking = "\n".join(part.text for part in parts if isinstance(part, Thinking))
    names = {tool.name for tool in call.tools}
    lost = bool(call.tools) and lost_calls(text, thinking, num_calls=len(calls), names=names)
    if lost and not calls:
        return "failed"
    return "partial" if lost or not all(is_object(part.arguments or "{}") for part in calls) else "ok"
