"""A game that a very small model plays in sessions: move every letter of a word on, turn after turn.

    bge -> chf    + -> dag    + -> ebh

Eight letters; after the last comes the first. What is right follows from the first word, whatever was replied since.

    python bench/shift_game.py NODE_ID FOLDER SERVER_URL ENGINE_URL

is a node, the real one, whose agents play in its own process instead of a sandbox, and call the model over HTTP through
its proxy. It prints its URL when it is ready, and serves until SIGTERM.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from no_runtime import NoHandle, NoRuntime
from node_process import run_node

from gangline.agents.harnesses.native.model import ChatModel, Message
from gangline.domain.sandbox import ExecRequest, ExecResult, OutputSink, RuntimeStart, Sandbox
from gangline.settings import plugins
from gangline.settings.node import NodeSettings

__all__ = ["AGAIN", "HELD_OUT", "LETTERS", "NUM_TURNS", "TRAINED", "WORD_LENGTH", "right_replies", "task_of"]

LETTERS, WORD_LENGTH, NUM_TURNS = "abcdefgh", 3, 3
AGAIN = "+"
"""What the model is told after a reply."""
_WORDS = ["".join(letters) for letters in itertools.product(LETTERS, repeat=WORD_LENGTH)]
random.Random(0).shuffle(_WORDS)
HELD_OUT, TRAINED = _WORDS[:128], _WORDS[128:]
"""Words that are measured, and others."""
PLAY, GRADE, REWARD_FILE = "play", "grade", "reward.txt"
RUN_SLOTS = 32


def right_replies(word: str) -> list[str]:
    """One a turn."""
    return [
        "".join(LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)] for letter in word)
        for by in range(1, NUM_TURNS + 1)
    ]


def score(word: str, replies: Sequence[str]) -> float:
    """The share of letters that are right and in their places; letters too many count as wrong ones."""
    shares = [
        sum(said == wanted for said, wanted in zip(reply, right, strict=False)) / max(len(reply), WORD_LENGTH)
        for reply, right in zip(replies, right_replies(word), strict=True)
    ]
    return sum(shares) / NUM_TURNS


def task_of(word: str) -> dict[str, Any]:
    return {
        "instruction": word,
        "agent": {"harness": "shell", "settings": {"command": PLAY}},
        "evaluator": {"strategy": "script", "config": {"command": GRADE, "reward_file": REWARD_FILE}},
    }


async def play(model: ChatModel, word: str) -> float:
    """A session's reward."""
    messages: list[Message] = [{"role": "user", "content": word}]
    replies: list[str] = []
    for _ in range(NUM_TURNS):
        reply = await model.ask(messages)
        replies.append(reply.text)
        messages += [reply.message, {"role": "user", "content": AGAIN}]
    return score(word, replies)


class _Runtime(NoRuntime):
    async def start(self, start: RuntimeStart) -> Sandbox:
        return _Handle(start.runtime_id, f"http://127.0.0.1:{start.proxy_port}")


class _Handle(NoHandle):
    _reward = 0.0

    async def run(self, request: ExecRequest, on_output: OutputSink | None = None) -> ExecResult:
        env = request.env
        if request.command == PLAY:
            fields: Message = {"model": env["OPENAI_MODEL"], "max_tokens": WORD_LENGTH + 1}
            async with ChatModel(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], fields) as model:
                self._reward = await play(model, env["GANGLINE_INSTRUCTION"])
        return ExecResult(exit_code=0)

    async def download(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        return str(self._reward).encode() if Path(path).name == REWARD_FILE else await super().download(path)


if __name__ == "__main__":
    node_id, folder, server_url, engine_url = sys.argv[1:]
    plugins.make_runtime = lambda name: _Runtime()
    settings = NodeSettings(
        engines=(engine_url,),
        init_workers=RUN_SLOTS,
        ready_slots=RUN_SLOTS,
        run_slots=RUN_SLOTS,
        prewarm_workers=0,
        postrun_workers=RUN_SLOTS,
    )
    run_node(settings, node_id=node_id, folder=Path(folder), server_url=server_url)
