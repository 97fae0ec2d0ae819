"""Completions for tests."""

from __future__ import annotations

from gangline.domain.completion import Certificate, Completion
from gangline.domain.conversation import Message, Text
from gangline.domain.tokens import logprobs, token_ids

__all__ = ["completion"]


def completion(number: int, *, session: str = "s-1", size: int = 3) -> Completion:
    return Completion(
        completion_id=f"c{number:06d}",
        session_id=session,
        attempt=1,
        status="complete",
        parent_id=None,
        branch_key="k",
        dialect="chat",
        model="m",
        prompt_shared=0,
        prompt_suffix_ids=token_ids(range(size)),
        sampled_ids=token_ids([number, number + 1]),
        logprobs=logprobs([-0.5, -1.5]),
        messages_shared=0,
        new_messages=(Message("user", (Text("hi"),)),),
        response=Message("assistant", (Text("ho"),)),
        certificate=Certificate(prompt_source="engine", context="first", logprobs="processed", finish_reason="stop"),
        started_at=1.0,
        finished_at=2.0,
    )
