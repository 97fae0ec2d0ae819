"""`kill -9` of a node between any two steps of a call: nothing answered is lost, nothing half is kept, all continues.

A real node (proxy, sessions, journal on disk) dies at a point that chance chooses, starts again, and is asked on by
clients that know only what they were answered. GANGLINE_CRASH_SEED repeats a run, GANGLINE_CRASH_POINTS
makes it longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from gangline.domain.completion import Completion, CompletionTree
from gangline.domain.conversation import message_text
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack
from gangline.models.engine_server.app import serving
from gangline.models.engine_server.sampler import SampledToken, SampleRequest
from gangline.serving.scripted.script import Script
from gangline.serving.scripted.server import ScriptedSampler, create_scripted_app
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.store.journal.log import AttemptKey, Journal

NUM_POINTS = int(os.environ.get("GANGLINE_CRASH_POINTS", "100"))
SEED = int(os.environ.get("GANGLINE_CRASH_SEED", "0")) or random.SystemRandom().randrange(1, 1_000_000)
LIVES_OF_A_SESSION = 25
NODE = Path(__file__).parents[1] / "support" / "chaos" / "crash_node.py"

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCRIPT = {
    "rules": [
        {"pattern": "look", "text": "I look.", "tool_calls": [{"name": "look", "arguments": {"at": "it"}}]},
        {"pattern": "slow", "text": "one two three four", "token_delay_s": 0.002, "split": "chars"},
    ],
    "default": {"text": "As you wish; the file is written.", "split": "chars"},
}


class RecordingSampler(ScriptedSampler):
    """Remembers every prompt: what the engine saw is the truth."""

    def __init__(self) -> None:
        super().__init__(Script.model_validate(SCRIPT), TinyTokenizer())
        self.prompts: set[bytes] = set()

    async def sample(self, request: SampleRequest) -> AsyncGenerator[SampledToken, None]:
        self.prompts.add(np.array(request.prompt_ids, dtype=np.int32).tobytes())
        async for token in super().sample(request):
            yield token


class Node:
    """The lives of one node."""

    def __init__(self, folder: Path, process: asyncio.subprocess.Process) -> None:
        self.folder = folder
        self._process = process
        self.pid = 0
        self.url = ""
        self.num_steps = 0
        """Of the last life."""
        self._died: asyncio.Task[int] | None = None

    @classmethod
    async def prepare(cls, folder: Path, engine_url: str) -> Node:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(NODE), str(folder), engine_url, stdin=pipe, stdout=pipe
        )
        return cls(folder, process)

    async def _told(self) -> list[str]:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            words = (await self._process.stdout.readline()).decode().split()
        assert words, "the node's process has ended"
        return words

    async def start(self, plan: dict[str, Any]) -> bool:
        """Whether it came to be ready before it died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(plan).encode() + b"\n")
        words = await self._told()
        if words[0] == "dead":
            self._note(words)
            return False
        self.pid, self.url = int(words[1]), words[2]
        self._died = asyncio.create_task(self._death())
        return True

    async def _death(self) -> int:
        return self._note(await self._told())

    def _note(self, words: list[str]) -> int:
        self.num_steps = int(words[2])
        return int(words[1])

    async def dead(self) -> int:
        assert self._died is not None
        return await self._died

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def close(self) -> None:
        if self._died is not None and not self._died.done():
            self.signal(9)
            await self._died
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def journal_of(self, session_id: str) -> CompletionTree:
        """What is in the journal of a node that is dead."""
        copy = self.folder.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder / "nodes" / "n1" / "journal", copy)
        journal = await asyncio.to_thread(Journal.open, copy)
        completions = await journal.read(AttemptKey(session_id, 0))
        await journal.close()
        return CompletionTree(completions)


@dataclass
class Turn:
    """One call, asked until it was answered. `reply_id` is what the client was told."""

    mark: str
    num_choices: int
    parent: str | None
    reply_id: str = ""
    texts: list[str] = field(default_factory=list)


class Client:
    """One conversation, as a client knows it. It tries a call again with the same idempotency key, as SDKs do."""

    def __init__(self, session_id: str, chance: random.Random) -> None:
        self.session_id = session_id
        self.key = ""
        self.turns: list[Turn] = []
        self.asked: Turn | None = None
        """The call that no whole answer came to yet."""
        self._chance = chance
        self._messages: list[dict[str, Any]] = []
        self._body: dict[str, Any] = {}
        self._has_tools = chance.random() < 0.5
        self._num_asked = 0

    async def converse(self, http: aiohttp.ClientSession, url: str) -> None:
        """Call after call, until the node is gone."""
        while True:
            if self.asked is None:
                self._next_call()
            try:
                await self._ask(http, url)
            except aiohttp.ClientError:
                return

    def _next_call(self) -> None:
        self._num_asked += 1
        mark = f"{self.session_id}-{self._num_asked}"
        wish = self._chance.choice(["look", "slow", "write"] if self._has_tools else ["slow", "write"])
        last = self._messages[-1] if self._messages else {}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"seen {mark}"}
            for call in last.get("tool_calls") or ()
        ]
        self._messages += [*results, {"role": "user", "content": f"{wish} {mark}"}]
        num_choices = self._chance.choice([1, 1, 2, 3])
        self._body = {
            "model": "scripted",
            "messages": list(self._messages),
            "n": num_choices,
            "stream": self._chance.random() < 0.5,
        } | ({"tools": [LOOK]} if self._has_tools else {})
        self.asked = Turn(mark, num_choices, self.turns[-1].reply_id if self.turns else None)

    async def _ask(self, http: aiohttp.ClientSession, url: str) -> None:
        assert self.asked is not None
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": self.asked.mark}
        path = f"{url}/s/{self.session_id}/v1/chat/completions"
        async with http.post(path, json=self._body, headers=headers) as response:
            answer = await response.read()
            assert response.status == 200, answer
        reply_id, messages = _streamed(answer) if self._body["stream"] else _whole(answer)
        if not messages:
            raise aiohttp.ClientPayloadError("the stream ended early")
        turn, self.asked = self.asked, None
        turn.reply_id = reply_id.removeprefix("chatcmpl-")
        turn.texts = [message["content"] or "" for message in messages]
        assert len(messages) == turn.num_choices
        self.turns.append(turn)
        self._messages.append(self._chance.choice(messages))


def _whole(answer: bytes) -> tuple[str, list[dict[str, Any]]]:
    body = json.loads(answer)
    return body["id"], [
        {key: value for key, value in choice["message"].items() if key in ("role", "content", "tool_calls")}
        for choice in body["choices"]
    ]


def _streamed(answer: bytes) -> tuple[str, list[dict[str, Any]]]:
    """No messages: not told to the end."""
    events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return "", []
    messages: dict[int, dict[str, Any]] = {}
    reply_id = ""
    for event in map(json.loads, events[:-1]):
        reply_id = event["id"]
        for choice in event["choices"]:
            message = messages.setdefault(choice["index"], {"role": "assistant", "content": ""})
            message["content"] += choice["delta"].get("content") or ""
            for piece in choice["delta"].get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append({"id": piece["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    calls[piece["index"]]["function"][name] += piece["function"].get(name) or ""
    return reply_id, [messages[index] for index in sorted(messages)]


def check(client: Client, tree: CompletionTree, prompts: set[bytes]) -> None:
    """The journal of one session against what its client was answered."""
    replies: dict[str, list[Completion]] = {}
    for completion in tree:
        assert completion.status == "complete"
        replies.setdefault(completion.metadata["reply_id"], []).append(completion)
        assert tree.prompt_ids(completion).tobytes() in prompts, "the engine never saw this prompt"
    turns = [*client.turns, *([client.asked] if client.asked else [])]
    asked = {turn.mark: turn for turn in turns}
    parents: dict[str, str | None] = {}
    for reply_id, choices in replies.items():
        turn = asked.pop(message_text(choices[0].new_messages[-1]).split()[-1], None)
        assert turn is not None, "a call is recorded twice, or was never made"
        assert turn.reply_id in ("", reply_id)
        parents[reply_id] = turn.parent
        assert [choice.choice_index for choice in choices] == list(range(turn.num_choices)), "half a call"
        for choice, text in zip(choices, turn.texts, strict=False):
            assert message_text(choice.response) == text
    assert set(asked) <= {client.asked.mark if client.asked else ""}, "an answered call is lost"
    for reply_id, choices in replies.items():
        for choice in choices:
            parent = None if choice.parent_id is None else tree[choice.parent_id].metadata["reply_id"]
            assert parent == parents[reply_id], "the conversation does not continue from its last answer"
            certificate = choice.certificate
            wanted = ("engine", "first") if parent is None else ("stitched", "exact")
            assert (certificate.prompt_source, certificate.context) == wanted, certificate


class Crashes:
    def __init__(self, node: Node, sampler: RecordingSampler, chance: random.Random) -> None:
        self.node = node
        self.sampler = sampler
        self.chance = chance
        self.clients: list[Client] = []
        self.num_kinds: dict[str, int] = {}
        self._num_steps = {"step": 12_000, "commit": 120, "restart": 600}
        """Up to which one a life may come: two or three calls of each client."""
        self.num_unheard = 0
        """Calls that were recorded whole, and whose answer died on its way."""
        self._num_sessions = 0

    def plan(self) -> dict[str, Any]:
        kind = self.chance.choices(["step", "commit", "restart", "torn", "time"], [40, 25, 10, 15, 10])[0]
        if kind == "time":
            return {"kind": "none"}
        if kind == "torn":
            return {"kind": kind, "at": self.chance.randrange(6), "part": self.chance.random()}
        return {"kind": kind, "at": self.chance.randrange(self._num_steps[kind])}

    async def calm_life(self) -> None:
        """Sessions end, others begin; nobody dies of it."""
        assert await self.node.start({"kind": "none"})
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as http:
            for client in self.clients:
                tree = await self._finalized(http, client.session_id)
                check(client, tree, self.sampler.prompts)
            self.clients = []
            for _ in range(3):
                self._num_sessions += 1
                client = Client(f"s{self._num_sessions}", self.chance)
                body = {"session_id": client.session_id}
                async with http.post(f"{self.node.url}/v1/sessions", json=body) as response:
                    client.key = (await response.json())["api_key"]
                self.clients.append(client)
        self.node.signal(15)
        assert await self.node.dead() == 0

    async def _finalized(self, http: aiohttp.ClientSession, session_id: str) -> CompletionTree:
        path = f"{self.node.url}/v1/sessions/{session_id}/finalize?completions=1"
        async with http.post(path, headers={"Accept": "application/msgpack"}) as response:
            body = await response.read()
            assert response.status == 200, body
        return CompletionTree(decode_msgpack(body, SessionResult).completions)

    async def life_and_death(self) -> None:
        plan = self.plan()
        is_ready = await self.node.start(plan)
        if is_ready:
            if plan["kind"] == "none":
                asyncio.get_running_loop().call_later(self.chance.random() * 0.4, self.node.signal, 9)
            async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
                for client in self.clients:
                    group.create_task(client.converse(http, self.node.url))
            assert await self.node.dead() == -9
        self.num_kinds[plan["kind"]] = self.num_kinds.get(plan["kind"], 0) + 1
        for client in self.clients:
            tree = await self.node.journal_of(client.session_id)
            check(client, tree, self.sampler.prompts)
            self.num_unheard += len({call.metadata["reply_id"] for call in tree}) > len(client.turns)


@pytest.mark.timeout(900)
async def test_a_node_killed_between_any_two_steps_of_a_call_keeps_every_answer_and_goes_on(tmp_path: Path) -> None:
    print(f"GANGLINE_CRASH_SEED={SEED}")
    sampler = RecordingSampler()
    async with serving(create_scripted_app(sampler)) as engine_url:
        node = await Node.prepare(tmp_path / "data", engine_url)
        crashes = Crashes(node, sampler, random.Random(SEED))
        try:
            for number in range(NUM_POINTS):
                if number % LIVES_OF_A_SESSION == 0:
                    await crashes.calm_life()
                await crashes.life_and_death()
            await crashes.calm_life()
        finally:
            await node.close()
    print(crashes.num_kinds, crashes.num_unheard)
    assert NUM_POINTS < 100 or crashes.num_unheard, "no retry met an answer that its client had not heard"
