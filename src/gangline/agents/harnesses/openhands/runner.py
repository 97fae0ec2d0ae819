# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Runs one OpenHands conversation. The adapter starts it inside the runtime, with the Python that has the SDK.

The order comes on stdin (see `adapter.py`), the key from the environment. The last line on stdout is the evidence: how
and why the conversation ended. The agent's actions are in the events, which the SDK stores under the session's HOME.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openhands.sdk import LLM, Conversation
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.tools.preset.default import get_default_agent


def main() -> int:
    order: dict[str, Any] = json.load(sys.stdin)
    error = ""

    def note(event: object) -> None:
        nonlocal error
        if isinstance(event, ConversationErrorEvent):
            error = f"{event.code}: {event.detail}"

    llm = LLM(**order["llm"], api_key=os.environ["GANGLINE_API_KEY"])
    agent = get_default_agent(llm, cli_mode=True)
    if not order["condenser"]:
        agent = agent.model_copy(update={"condenser": None})
    conversation = Conversation(
        agent=agent,
        workspace=os.getcwd(),
        persistence_dir=order["events"],
        delete_on_close=False,
        callbacks=[note],
        visualizer=None,
        max_iteration_per_run=order["max_iterations"],
    )
    try:
        conversation.send_message(order["instruction"])
        conversation.run()
    except Exception as failed:
        error = error or f"{type(failed).__name__}: {failed}"
    status = conversation.state.execution_status.value
    conversation.close()
    print(json.dumps({"type": "gangline.end", "status": status, "error": error}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
