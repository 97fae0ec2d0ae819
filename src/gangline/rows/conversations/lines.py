"""Main conversations as JSON lines in OpenAI's form, for trainers and services without Parquet support."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gangline.domain.session import SessionResult
from gangline.machine.durable import replacing
from gangline.models.engines.fields import media_in
from gangline.rows.conversations.chat import chat_messages, chat_tools
from gangline.rows.conversations.conversation import main_conversation


def write_messages(results: Iterable[SessionResult], path: Path) -> int:
    """Write `messages`, `tools`, ids, outcome and reward of each session as one line. Returns the number of lines.

    Sessions without an answered call and sessions with images are skipped. Message fields without a value are left out.
    """
    num = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside, aside.open("wb") as file:
        for result in results:
            talk = main_conversation(result.completions)
            if talk is None or not talk.num_prompt_messages or media_in(talk.messages) is not None:
                continue
            messages = chat_messages(talk.messages)
            line = {
                "messages": [{name: one for name, one in each.items() if one is not None} for each in messages],
                "tools": chat_tools(talk.tools),
                "task_id": result.task_id,
                "session_id": result.session_id,
                "completion_id": talk.last.completion_id,
                "outcome": result.outcome,
                "reward": result.reward,
            }
            file.write(msgspec.json.encode(line) + b"\n")
            num += 1
    return num
