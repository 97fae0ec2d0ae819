"""Random valid completion trees, with what the engine really saw kept apart from the prefix-shared record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from gangline.domain.completion import Certificate, Completion, CompletionTree, VersionSpan
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, SamplingParams, Text, ToolDefinition
from gangline.domain.session import HarnessExit, SessionResult, StageTiming
from gangline.domain.tokens import common_prefix_len, logprobs, token_ids
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.rewards import apply_reward

END_OF_TURN = 2
TOOLS = (ToolDefinition(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}}),)
CAUSES = ("bpe_merge", "thinking_dropped", "whitespace", "history_edited", "unknown")

ids_lists = st.lists(st.integers(0, 9), max_size=5)
placeholders = st.sampled_from([[], [], [30], [30] * 12])
"""What an image expands to: many times the same id."""


@dataclass
class Sample:
    """A tree, and per completion id the full prompt and messages that went to the engine."""

    tree: CompletionTree = field(default_factory=CompletionTree)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, tuple[Message, ...]] = field(default_factory=dict)

    def context(self, completion_id: str) -> list[int]:
        return self.prompts[completion_id] + self.tree[completion_id].sampled_ids.tolist()

    def add(
        self,
        *,
        prompt: list[int],
        sampled: list[int],
        messages: tuple[Message, ...],
        parent_id: str | None = None,
        status: str = "complete",
        finish_reason: str = "stop",
        untrainable: str | None = None,
        cause: str = "unknown",
        prompt_source: str = "stitched",
        spans: tuple[VersionSpan, ...] | None = None,
        temperature: float | None = 0.7,
    ) -> Completion:
        """Commit one call as capture would: prefix-shared with its parent, certified by comparison."""
        index = len(self.tree)
        parent_context = [] if parent_id is None else self.context(parent_id)
        shared = common_prefix_len(token_ids(prompt), token_ids(parent_context))
        exact = parent_id is not None and shared == len(parent_context)
        known = () if parent_id is None else (*self.messages[parent_id], self.tree[parent_id].response)
        shared_messages = next(
            (i for i, pair in enumerate(zip(known, messages, strict=False)) if pair[0] != pair[1]), -1
        )
        if shared_messages < 0:
            shared_messages = min(len(known), len(messages))
        completion = Completion(
            completion_id=f"c{index:04d}",
            session_id="session-1",
            attempt=1,
            status=status,  # pyright: ignore[reportArgumentType]
            parent_id=parent_id,
            branch_key="key",
            dialect="chat",
            model="model",
            prompt_shared=shared,
            prompt_suffix_ids=token_ids(prompt[shared:]),
            sampled_ids=token_ids(sampled),
            logprobs=logprobs([-0.25 - 0.5 * i - index for i in range(len(sampled))]),
            messages_shared=shared_messages,
            new_messages=messages[shared_messages:],
            response=Message("assistant", (Text(f"reply {index}"),)),
            tools=TOOLS,
            certificate=Certificate(
                prompt_source="engine" if parent_id is None else prompt_source,  # pyright: ignore[reportArgumentType]
                context="first" if parent_id is None else "exact" if exact else "diverged",
                logprobs="processed",
                finish_reason=finish_reason,
                first_divergence=None if exact or parent_id is None else shared,
                cause=None if exact or parent_id is None else cause,  # pyright: ignore[reportArgumentType]
                untrainable=untrainable,
                sampling=SamplingParams(temperature=temperature),
                version_spans=spans if spans is not None else (VersionSpan(0, 0, len(sampled)),),
            ),
            started_at=float(index),
            finished_at=index + 0.5,
        )
        self.tree.add(completion)
        self.prompts[completion.completion_id] = prompt
        self.messages[completion.completion_id] = messages
        return completion


def user(text: str) -> Message:
    return Message("user", (Text(text),))


@st.composite
def completion_trees(draw: st.DrawFn, max_size: int = 10) -> Sample:
    """Roots, exact children, siblings, choices of one call, diverged children (mid-prompt or inside the sampled ids),
    aborted, truncated, untrainable and empty completions, runs of one placeholder id in a prompt (an image), several
    policy versions in a reply."""
    sample = Sample()
    for index in range(draw(st.integers(0, max_size))):
        _add_random(draw, sample, index)
    return sample


def _add_random(draw: st.DrawFn, sample: Sample, index: int) -> None:
    parents = [c.completion_id for c in sample.tree if c.status == "complete"]
    parent_id = draw(st.sampled_from([None, *parents, *parents[-1:] * 3]))
    news = user(f"message {draw(st.integers(0, 2))}")
    twin = draw(st.sampled_from([None, None, None, *sample.tree]))
    if twin is not None:
        parent_id, prompt, messages = (
            twin.parent_id,
            sample.prompts[twin.completion_id],
            sample.messages[twin.completion_id],
        )
    elif parent_id is None:
        prompt, messages = [1, *draw(ids_lists), *draw(placeholders)], (news,)
    else:
        prompt, messages = _child_prompt(draw, sample, parent_id, news)
    finish = draw(st.sampled_from(["stop", "stop", "tool_calls", "length"]))
    sampled = draw(ids_lists) + ([] if finish == "length" else [END_OF_TURN])
    status = draw(st.sampled_from(["complete"] * 5 + ["aborted"]))
    cut = draw(st.integers(0, len(sampled)))
    sample.add(
        prompt=prompt,
        sampled=sampled,
        messages=messages,
        parent_id=parent_id,
        status=status,
        finish_reason="abort" if status == "aborted" else finish,
        untrainable=draw(st.sampled_from([None] * 6 + ["log-probs were missing"])),
        cause=draw(st.sampled_from(CAUSES)),
        prompt_source=draw(st.sampled_from(["engine", "stitched", "rendered"])),
        spans=(VersionSpan(index, 0, cut), VersionSpan(index + 1, cut, len(sampled))),
    )


def _child_prompt(
    draw: st.DrawFn, sample: Sample, parent_id: str, news: Message
) -> tuple[list[int], tuple[Message, ...]]:
    """Exact: the parent's context and more. Diverged: one id of it changed, or its end cut off."""
    context = sample.context(parent_id)
    reply = sample.tree[parent_id].response
    messages = (*sample.messages[parent_id], reply, news)
    how = draw(st.sampled_from(["exact", "exact", "exact", "changed", "cut"]))
    at = draw(st.integers(0, len(context) - 1))
    if how == "changed":
        context[at] += 10
    elif how == "cut":
        context = [*context[:at], max(20, max(context) + 1)]  # not in the parent, so never exact by chance
        messages = (*sample.messages[parent_id], news)
    return context + draw(ids_lists) + draw(placeholders) + [1], messages


def session_sample() -> Sample:
    """A small session as agents make it: three exact turns, a sub-agent, a diverged turn, an aborted call."""
    sample = Sample()
    prompt = [1, 4, 5, 6]
    first = sample.add(prompt=prompt, sampled=[10, 11, 2], messages=(user("go"),), finish_reason="tool_calls")
    talk = (user("go"), first.response, user("output"))
    second = sample.add(
        prompt=[*sample.context("c0000"), 7, 1], sampled=[12, 2], messages=talk, parent_id=first.completion_id
    )
    sample.add(prompt=[1, 9], sampled=[13, 2], messages=(user("title"),))
    talk = (*talk, second.response, user("more"))
    exact = [*sample.context("c0001"), 7, 8, 1]
    third = sample.add(prompt=exact, sampled=[14, 15, 2], messages=talk, parent_id=second.completion_id)
    drifted = [*sample.prompts["c0003"], 90, 2, 7, 1]
    talk = (*talk, third.response, user("last"))
    sample.add(prompt=drifted, sampled=[16, 2], messages=talk, parent_id=third.completion_id, cause="bpe_merge")
    sample.add(
        prompt=drifted,
        sampled=[17],
        messages=talk,
        parent_id=third.completion_id,
        status="aborted",
        finish_reason="abort",
    )
    return sample


def session_result(on_divergence: str = "split", **changes: Any) -> SessionResult:
    """The result of `session_sample`, rewarded with 0.5."""
    sample = session_sample()
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate({"on_divergence": on_divergence}))
    built = builder.build(sample.tree, session_id="session-1", task_id="task-1")
    result = SessionResult(
        session_id="session-1",
        task_id="task-1",
        node_id="node-1",
        attempt=1,
        fence=1,
        outcome="completed",
        reward=0.5,
        trajectory=apply_reward(built, Reward(reward=0.5)),
        completions=tuple(sample.tree),
        timings=(StageTiming("init", 0.0, 0.25), StageTiming("run", 0.5, 3.0), StageTiming("postrun", 3.0, 3.5)),
        harness_exit=HarnessExit(exit_code=0),
    )
    return msgspec.structs.replace(result, **changes)
