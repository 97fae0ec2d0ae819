"""NeMo Gym: exposes a session's model calls as its token capture, for builders and trainers that read it.

    async with NodeClient(url, control_token) as node:
        await finalize_rollout_token_capture(result, SessionTokens(node))

A rollout is a session that the agent's owner opened on a node under the rollout's id. Our proxy is the capture, so
there is no `TokenSink`: a call is in the node's journal before the last byte of its answer. Freezing a rollout
finalizes its session, which ends calls in flight and refuses later ones.

Laws
- A rollout is incomplete if one of the policy's calls was cut off or may not be trained on: NeMo Gym masks the whole
  rollout.
- A call whose prompt does not continue its parent's exact tokens has no proven parent, so NeMo Gym masks it too.
- Nothing is dropped early: the node keeps a finalized session for its time to live.

Source: NeMo Gym's wheel 0.7.0, `nemo_gym/token_id_capture/` (`protocols.py`, `records.py`, `lineage.py`). Its package
is imported when a source is created.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from gangline.domain.completion import EMPTY_GENERATION, Completion, CompletionTree
from gangline.wire.client.sessions import CallerSessions
from gangline.wire.dialects.responses.history import message_items


class SessionTokens:
    """A `TokenSource` over the sessions of one node, or of all nodes of a server.

    client: already entered, and closed by its owner. Raises: ImportError without the package `nemo_gym`.
    """

    def __init__(self, client: CallerSessions) -> None:
        self._client = client
        self._snapshot: Any = import_module("nemo_gym.token_id_capture.protocols").TokenCaptureSnapshot

    async def freeze(self, rollout_id: str) -> Any:
        """A `TokenCaptureSnapshot`, the same for every call. Raises: NotFound, Conflict if the session was aborted,
        InvalidRequest if a call has content that NeMo Gym's records cannot represent.
        """
        result = await self._client.finalize(rollout_id, completions=True)
        entries = token_entries(result.completions)
        digest = hashlib.sha256("".join(entry.model_dump_json() for entry in entries).encode())
        return self._snapshot(
            rollout_id=rollout_id,
            entries=tuple(entries),
            incomplete=any(not policy_call.trainable for policy_call in _policy_calls(result.completions)),
            snapshot_id=digest.hexdigest(),
            version=1,
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Whether this is the rollout's snapshot. The node keeps the session in any case. Raises: as `freeze`."""
        frozen = await self.freeze(rollout_id)
        return bool((frozen.snapshot_id, frozen.version) == (snapshot_id, version))

    async def close(self) -> None:
        """Does nothing: the client belongs to the caller."""


def token_entries(completions: Iterable[Completion]) -> list[Any]:
    """A `TokenEntry` for each complete call of the policy, in commit order, with NeMo Gym's own digests.

    completions: all completions of one session. Raises: ImportError without the package `nemo_gym`, InvalidRequest for
    content that its records cannot represent.
    """
    records, lineage = (import_module(f"nemo_gym.token_id_capture.{name}") for name in ("records", "lineage"))
    tree = CompletionTree(completions)
    entries: list[Any] = []
    for policy_call in _policy_calls(tree):
        if policy_call.status != "complete":
            continue
        output = message_items(policy_call.response, policy_call.completion_id)
        entry = records.TokenEntry(
            rollout_id=policy_call.session_id,
            model_call_id=policy_call.completion_id,
            model=policy_call.model,
            prompt_token_ids=tree.prompt_ids(policy_call).tolist(),
            generation_token_ids=policy_call.sampled_ids.tolist(),
            generation_log_probs=policy_call.logprobs.tolist(),
            output_items=output,
            token_item_index=len(output) - 1 if output else None,
            created_at=policy_call.started_at,
        )
        lineage.stamp_continuation(
            entry, [item for message in tree.messages(policy_call) for item in message_items(message)]
        )
        is_exact = policy_call.certificate.context == "exact"
        status = "root" if policy_call.parent_id is None else "resolved" if is_exact else "unresolved"
        entry.parent_resolution_reason = policy_call.certificate.cause or ""
        entries.append(
            records.stamp_lineage(
                entry,
                policy_call.parent_id if is_exact else None,
                parent_resolution=records.ParentResolutionStatus(status),
            )
        )
    return entries


def _policy_calls(completions: Iterable[Completion]) -> list[Completion]:
    """Calls answered by the policy, without empty replies that were retried and never delivered."""
    return [
        completion
        for completion in completions
        if completion.certificate.engine_role is None and completion.metadata.get(EMPTY_GENERATION) != "retried"
    ]
