"""A small agent that answers a question, or plays a game of TextArena, with a few worked examples before its own task.

It speaks to whatever `OPENAI_BASE_URL` points at, with nothing but the standard library; a move is a call of the tool
`step` of the task's environment. SHOTS is a JSON list of messages.

usage: public_agent.py answer|play SHOTS INSTRUCTION MODEL
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any

TEMPERATURE = 0.7
MAX_ANSWER, MAX_MOVE = 14, 6
MAX_MOVES = 12
VALUE = re.compile(r"The current value is [0-9.]+\.")


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def ask(messages: list[dict[str, str]], model: str, max_tokens: int) -> str:
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": TEMPERATURE}
    return post("/v1/chat/completions", body)["choices"][0]["message"]["content"] or ""


def move(number: int, action: str) -> str:
    """What the game says to the move."""
    params = {"name": "step", "arguments": {"action": action}}
    done = post("/mcp/game", {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
    return "\n".join(block["text"] for block in done["result"]["content"])


def play(messages: list[dict[str, str]], instruction: str, model: str) -> None:
    """The model sees the newest value alone, as its examples do."""
    said = instruction
    for number in range(MAX_MOVES):
        shown = VALUE.findall(said)
        reply = ask([*messages, {"role": "user", "content": shown[-1] if shown else said}], model, MAX_MOVE)
        said = move(number, reply)
        if "The episode is over" in said:
            return


def main() -> None:
    what, shots, instruction, model = sys.argv[1:5]
    messages: list[dict[str, str]] = json.loads(shots)
    if what == "play":
        play(messages, instruction, model)
    else:
        print(ask([*messages, {"role": "user", "content": instruction}], model, MAX_ANSWER))


if __name__ == "__main__":
    main()
