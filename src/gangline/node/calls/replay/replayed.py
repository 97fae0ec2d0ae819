"""A call that is answered from a record: its records are repeated, and its answer is the recorded one.

In a fork its tokens are context: they are trained on once, in the parent. In a session that continues after a lost node
they belong to the session itself.
"""

from __future__ import annotations

import msgspec

from gangline.domain.completion import Certificate, Completion
from gangline.domain.conversation import ModelCall
from gangline.domain.reply import Reply, ReplyDelta, whole_delta
from gangline.node.calls.chat_call import RETRY_KEY, CallInFlight, shown_again
from gangline.node.calls.flight import Flight, Progress
from gangline.node.calls.replay.answered import recorded_reply
from gangline.node.capture.parts import CallParts
from gangline.node.replay.replay import Replay
from gangline.rows.forks.calls import RESUMED, RecordedCall
from gangline.settings.evidence import evidence_kinds

REPLAYED_TOKENS = "replayed: sampled in the session that this one is a fork of"
"""Why a replayed call's tokens are not trained on."""


def replayed_call(
    call: ModelCall, recorded: RecordedCall, replay: Replay, parts: CallParts, *, retry_key: str | None = None
) -> CallInFlight:
    """`retry_key`: see `call_in_flight`."""
    progress = Progress[ReplyDelta](parts.clock())
    progress.record_key = str(recorded.first.metadata["reply_id"])
    sampler = _Repeater(call, recorded, replay, parts, progress, retry_key)
    return Flight(sampler, progress, parts, shown_again)


class _Repeater:
    """See `Sampler`. Never aborted, since everything is sampled already."""

    is_committing = True

    def __init__(
        self,
        call: ModelCall,
        recorded: RecordedCall,
        replay: Replay,
        parts: CallParts,
        progress: Progress[ReplyDelta],
        retry_key: str | None,
    ) -> None:
        self._call = call
        self._recorded = recorded
        self._replay = replay
        self._parts = parts
        self._progress = progress
        self._retry_key = retry_key

    async def answer(self) -> Reply:
        parts, tree = self._parts, self._replay.parent
        place = parts.index.place(self._call)
        drafts = [self._draft(choice) for choice in self._recorded.choices]
        committed = await parts.ledger.commit(drafts, place.digest)
        for choice, own in zip(self._recorded.choices, committed, strict=True):
            self._replay.own_ids[choice.completion_id] = own.completion_id
        self._progress.num_prompt_tokens = num = tree.num_prompt_ids(self._recorded.first)
        reply = recorded_reply(
            self._recorded.choices, num, model=self._call.model, created_at=self._progress.created_at
        )
        if self._call.stream:
            for choice in reply.choices:
                self._progress.show(whole_delta(choice.index, choice.message, ()))
        return reply

    async def record_aborted(self, message: str) -> None:
        """Does nothing: its record exists, or never will."""

    def _draft(self, choice: Completion) -> Completion:
        """Returns the parent's record as one of this session, without a parent if its own was not replayed here."""
        ledger, tree = self._parts.ledger, self._replay.parent
        parent_id = self._replay.own_ids.get(choice.parent_id or "")
        draft = choice
        if parent_id is None and choice.parent_id is not None:
            alone = ((kind.name, kind.alone(tree, choice)) for kind in evidence_kinds())
            choice = choice.with_evidence({name: held for name, held in alone if held is not None})
            draft = msgspec.structs.replace(
                choice,
                prompt_shared=0,
                prompt_suffix_ids=tree.prompt_ids(choice),
                messages_shared=0,
                new_messages=tree.messages(choice),
                tools=tree.tools(choice),
                certificate=msgspec.structs.replace(choice.certificate, context="first", first_divergence=None),
            )
        metadata = {name: value for name, value in choice.metadata.items() if name not in (RETRY_KEY, RESUMED)}
        if self._retry_key is not None:
            metadata[RETRY_KEY] = self._retry_key
        return msgspec.structs.replace(
            draft,
            session_id=ledger.session_id,
            attempt=ledger.attempt,
            parent_id=parent_id,
            certificate=self._certificate(draft),
            started_at=self._progress.created_at,
            finished_at=self._parts.clock(),
            metadata=metadata | {self._replay.mark: choice.completion_id},
        )

    def _certificate(self, draft: Completion) -> Certificate:
        """Records of a lost node are in no other row, so they are trained on here."""
        if self._replay.resumed:
            return draft.certificate
        return msgspec.structs.replace(draft.certificate, untrainable=REPLAYED_TOKENS)
