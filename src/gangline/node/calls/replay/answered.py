"""Calls that the node answered before its restart, read from their records, for retries.

A client whose answer was cut off when the node ended asks again under the same idempotency key, and gets the reply from
the journal. Calls that asked for log-probs are excluded: the texts of their tokens are not stored.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import Usage
from gangline.domain.reply import Reply, ReplyChoice, ReplyDelta, whole_delta
from gangline.node.calls.chat_call import RETRY_KEY
from gangline.rows.forks.calls import USAGE


class AnsweredCall:
    """Behaves like a `Flight` that was answered."""

    def __init__(self, choices: Sequence[Completion], num_prompt_tokens: int) -> None:
        """`choices`: the records of all choices of one call; at least one."""
        first = choices[0]
        self.record_key = str(first.metadata["reply_id"])
        self.created_at = first.started_at
        self.num_prompt_tokens = num_prompt_tokens
        self.num_replays = 0
        self.ended_already, self.failed = True, False
        self._choices = choices

    async def reply(self) -> Reply:
        first = self._choices[0]
        model = str(first.metadata.get("requested_model", first.model))
        return recorded_reply(self._choices, self.num_prompt_tokens, model=model, created_at=self.created_at)

    async def news(self, idle_s: float) -> AsyncGenerator[Sequence[ReplyDelta], None]:
        """Yields everything at once."""
        yield [whole_delta(choice.choice_index, choice.response, ()) for choice in self._choices]

    def replayed(self) -> None:
        self.num_replays += 1

    def compact(self) -> None:
        """Does nothing: it is compact already."""

    def abort(self, message: str) -> None:
        """Does nothing: it has ended."""


def recorded_reply(choices: Sequence[Completion], num_prompt_tokens: int, *, model: str, created_at: float) -> Reply:
    """Rebuild the reply to one call from the records of all its choices, with the usage that the client was sent.

    created_at: Unix time, seconds.
    """
    first = choices[0]
    usage = first.metadata.get(USAGE)
    counted = Usage(
        num_prompt_tokens=num_prompt_tokens, num_sampled_tokens=sum(len(choice.sampled_ids) for choice in choices)
    )
    return Reply(
        reply_id=str(first.metadata["reply_id"]),
        model=model,
        created_at=int(created_at),
        choices=tuple(
            ReplyChoice(
                index=choice.choice_index,
                message=choice.response,
                finish_reason=choice.certificate.finish_reason,
                stop_reason=choice.certificate.stop_reason,
                parse=choice.certificate.parse,
            )
            for choice in choices
        ),
        usage=counted if usage is None else msgspec.convert(usage, Usage),
    )


def answered_calls(tree: CompletionTree, since: float, most: int) -> dict[str, AnsweredCall]:
    """Returns retry key -> call for the `most` latest calls that were answered after `since` (Unix time, seconds)."""
    by_reply: dict[tuple[str, str], list[Completion]] = {}
    for completion in tree:
        retry_key = completion.metadata.get(RETRY_KEY)
        if isinstance(retry_key, str) and completion.status == "complete" and completion.finished_at >= since:
            by_reply.setdefault((retry_key, str(completion.metadata["reply_id"])), []).append(completion)
    latest = list(by_reply.items())[-most:]
    return {key: AnsweredCall(choices, tree.num_prompt_ids(choices[0])) for (key, _), choices in latest}
