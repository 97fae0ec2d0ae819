"""Sessions to look at: an agent that works with tools, in words that are its tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import msgspec
import numpy as np

from gangline.domain.completion import Certificate, Completion, CompletionTree, Lineage, VersionSpan
from gangline.domain.contracts import Reward
from gangline.domain.conversation import Message, Part, Text, Thinking, ToolCall, ToolDefinition, ToolResult
from gangline.domain.session import HarnessExit, SessionResult, StageTiming
from gangline.domain.tokens import TokenIds, common_prefix_len, token_ids
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.rewards import apply_reward

__all__ = ["Talk", "long_session", "working_session"]

_TOOLS = (ToolDefinition("shell", "Run a command.", {"type": "object"}),)
_UNLIKELY = -6.5


@dataclass
class Talk:
    """Calls of one session, each with words as tokens; equal words have equal ids, in other sessions too."""

    session_id: str = "task-1.0"
    model: str = "words"
    calls: list[Completion] = field(default_factory=list)
    _contexts: dict[str, TokenIds] = field(default_factory=dict)
    _at: float = 1_700_000_000.0

    def ids(self, text: str) -> TokenIds:
        """Words with the space before them, and line breaks."""
        words = re.findall(r"\n| ?[^ \n]+| ", text)
        return token_ids(crc32(word.encode()) >> 2 for word in words)

    def call(
        self,
        new: Sequence[Message],
        reply: Sequence[Part],
        *,
        prompt: str,
        sampled: str,
        after: Completion | None = None,
        diverged_at: int | None = None,
        version: int = 1,
        unlikely: str = "",
        branch: str = "key",
        lineage: Lineage = Lineage(),  # noqa: B008 - frozen
    ) -> Completion:
        """Add a call. diverged_at: the index of its parent's context at which its prompt differs. unlikely: a word of
        the reply with a log-prob of -6.5."""
        context = token_ids() if after is None else self._contexts[after.completion_id]
        shared = len(context) if diverged_at is None else diverged_at
        ids, suffix = self.ids(sampled), self.ids(prompt)
        logprobs = np.asarray([-0.02 - 0.3 * (int(one) % 7 == 0) for one in ids], np.float32)
        if unlikely:
            logprobs[ids.tolist().index(self.ids(unlikely)[0])] = _UNLIKELY
        number = len(self.calls)
        completion = Completion(
            completion_id=f"c{number:06d}",
            session_id=self.session_id,
            attempt=1,
            status="complete",
            parent_id=None if after is None else after.completion_id,
            branch_key=branch,
            dialect="openai_chat",
            model=self.model,
            prompt_shared=shared,
            prompt_suffix_ids=suffix,
            sampled_ids=ids,
            logprobs=logprobs,
            sampled_texts=tuple(re.findall(r"\n| ?[^ \n]+| ", sampled)),
            messages_shared=0 if after is None else after.messages_shared + len(after.new_messages) + 1,
            new_messages=tuple(new),
            response=Message("assistant", tuple(reply)),
            tools=_TOOLS if after is None else (),
            certificate=Certificate(
                prompt_source="engine" if after is None or diverged_at is not None else "stitched",
                context="first" if after is None else "exact" if diverged_at is None else "diverged",
                logprobs="processed",
                finish_reason="tool_calls" if any(isinstance(part, ToolCall) for part in reply) else "stop",
                first_divergence=diverged_at,
                cause=None if diverged_at is None else "bpe_merge",
                version_spans=(VersionSpan(version, 0, len(ids)),),
            ),
            lineage=lineage,
            started_at=self._at,
            finished_at=self._at + 0.8,
        )
        self._at += 1.5
        self.calls.append(completion)
        self._contexts[completion.completion_id] = np.concatenate([context[:shared], suffix, ids])
        if after is not None and diverged_at is not None:
            assert common_prefix_len(self._contexts[completion.completion_id], context) >= diverged_at
        return completion

    def result(self, reward: float | None, **changes: object) -> SessionResult:
        task_id = self.session_id.rpartition(".")[0]
        builder = PrefixMergingBuilder(PrefixMergingConfig())
        tree = CompletionTree(self.calls)
        built = builder.build(tree, session_id=self.session_id, task_id=task_id)
        result = SessionResult(
            session_id=self.session_id,
            task_id=task_id,
            node_id="node-1",
            attempt=1,
            fence=1,
            outcome="completed",
            reward=reward,
            trajectory=built if reward is None else apply_reward(built, Reward(reward=reward)),
            completions=tuple(self.calls),
            timings=(
                StageTiming("init", 0.0, 0.4),
                StageTiming("run", 0.5, 12.0),
                StageTiming("postrun", 12.0, 13.0),
            ),
            harness_exit=HarnessExit(exit_code=0),
        )
        return msgspec.structs.replace(result, **changes)


def working_session(session_id: str = "task-1.0", *, reward: float = 0.0) -> SessionResult:
    """Reads a file, runs the tests, asks a sub-agent, diverges once, and is wrong (or right, with a reward of 1)."""
    talk = Talk(session_id)
    shell = ToolCall("call-1", "shell", '{"command": "cat add.py"}')
    first = talk.call(
        (Message("system", (Text("You fix programs."),)), Message("user", (Text("Make the tests pass."),))),
        (Thinking("The file comes first."), shell),
        prompt="<system> You fix programs. <user> Make the tests pass. <assistant>",
        sampled=" The file comes first. cat add.py",
        unlikely=" cat",
    )
    listing = "def add(a, b):\n    return a - b\n"
    second = talk.call(
        (Message("tool", (ToolResult("call-1", (Text(listing),)),)),),
        (
            Text("The sign is wrong. A helper looks at the tests."),
            ToolCall("call-2", "task", '{"prompt": "Say which test of this program fails, and why."}'),
        ),
        prompt=f"<tool> {listing}<assistant>",
        sampled=" The sign is wrong. A helper looks at the tests. task",
        after=first,
        unlikely=" sign",
    )
    talk.call(
        (Message("user", (Text("Say which test of this program fails, and why."),)),),
        (Text("test_add fails, because add subtracts."),),
        prompt="<user> Say which test of this program fails, and why. <assistant>",
        sampled=" test_add fails, because add subtracts.",
        branch="helper",
    )
    third = talk.call(
        (Message("tool", (ToolResult("call-2", (Text("test_add fails, because add subtracts."),)),)),),
        (ToolCall("call-3", "shell", '{"command": "sed -i s/-/+/ add.py && pytest -q"}'),),
        prompt="<tool> test_add fails, because add subtracts. <assistant>",
        sampled=" sed -i s/-/+/ add.py && pytest -q",
        after=second,
        version=2,
    )
    talk.call(
        (Message("tool", (ToolResult("call-3", (Text("1 failed: test_add_negative"),), is_error=reward == 0),)),),
        (Text("Done: one test fails." if reward == 0 else "Done: all tests pass."),),
        prompt="<tool> 1 failed: test_add_negative <assistant>",
        sampled=" Done: one test fails." if reward == 0 else " Done: all tests pass.",
        after=third,
        diverged_at=len(talk.ids("<system> You fix programs. <user> Make the tests pass.")),
        version=2,
    )
    details = {"passed": ["test_add"], "failed": [] if reward else ["test_add_negative"], "exit_code": int(reward == 0)}
    files = {
        "harness.stdout": b"agent 1.0\nall done\n",
        "evaluator/tests.log": b"test_add_negative FAILED: add(-1, 1) is -2, not 0\n" if reward == 0 else b"2 passed\n",
    }
    return talk.result(reward, reward_details=details, artifacts=files)


def long_session(num_turns: int, tokens_per_turn: int, session_id: str = "long-1.0") -> SessionResult:
    """Turns of equal length, one chain; a fifth of the tokens is sampled."""
    talk = Talk(session_id)
    words = [f" word{number}" for number in range(997)]
    num_sampled = tokens_per_turn // 5
    before = None
    for turn in range(num_turns):
        read = "".join(words[(turn * 31 + index) % 997] for index in range(tokens_per_turn - num_sampled))
        said = "".join(words[(turn * 17 + index * 3) % 997] for index in range(num_sampled))
        call_id = f"call-{turn}"
        news = (
            Message("user", (Text(read),))
            if before is None
            else Message("tool", (ToolResult(f"call-{turn - 1}", (Text(read),)),))
        )
        reply = (Text(said), ToolCall(call_id, "shell", f'{{"command": "step {turn}"}}'))
        before = talk.call((news,), reply, prompt=read, sampled=said, after=before)
    return talk.result(1.0)
