"""The agent of the benchmark of routed experts: a conversation of many turns, through a provider's SDK.

python bench/moe_agent.py BASE_URL KEY NUM_TURNS NUM_FIRST NUM_NEW
"""

from __future__ import annotations

import sys
from typing import Any

import openai


def main(base_url: str, key: str, num_turns: int, num_first: int, num_new: int) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "word " * num_first}]
    for _ in range(num_turns):
        said = client.chat.completions.create(model="mock", messages=messages).choices[0].message.content
        messages += [
            {"role": "assistant", "content": said},
            {"role": "tool", "tool_call_id": "call_1", "content": "word " * num_new},
        ]


if __name__ == "__main__":
    main(*sys.argv[1:3], *(int(value) for value in sys.argv[3:]))  # type: ignore[arg-type]
