"""An agent that goes round in circles is stopped by the node, in every dialect, by the providers' own clients."""

from __future__ import annotations

from typing import Any

import pytest

from support.node.proxy import Proxied, proxied
from support.sdk.agents import AGENTS

pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

AGAIN: dict[str, Any] = {
    "default": {"thinking": "Hm.", "tool_calls": [{"name": "read_file", "arguments": {"path": "a.txt"}}]}
}


async def _until_refused(running: Proxied, dialect: str, outputs: list[str], *, stream: bool = False) -> int:
    """Model calls that were answered before one was refused."""
    kind, connect = AGENTS[dialect]
    async with connect(f"{running.url}/s/{running.session.session_id}", running.session.key) as client:
        agent = kind(client, stream=stream)
        agent.say("Which word is in a.txt?")
        for number, output in enumerate(outputs):
            try:
                turn = await agent.step(output)
            except Exception as error:  # each SDK has its own
                if "the same actions with the same results" not in str(error):
                    raise
                return number
            assert turn.calls == [("read_file", {"path": "a.txt"})]
    return len(outputs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", sorted(AGENTS))
async def test_the_call_after_the_last_allowed_repetition_is_refused(dialect: str, stream: bool) -> None:
    async with proxied(AGAIN, max_repeated_actions=3) as running:
        assert await _until_refused(running, dialect, ["no such file"] * 10, stream=stream) == 3
        assert running.session.limit == "agent_loop"
        assert running.session.limit_reached.is_set()
        assert [completion.status for completion in running.journal.completions] == ["complete"] * 3


@pytest.mark.parametrize("dialect", sorted(AGENTS))
async def test_a_cycle_counts_and_new_results_do_not(dialect: str) -> None:
    async with proxied(AGAIN, max_repeated_actions=3) as running:
        assert await _until_refused(running, dialect, ["on", "off"] * 10) == 6
    async with proxied(AGAIN, max_repeated_actions=2) as running:
        assert await _until_refused(running, dialect, [f"try {number}" for number in range(8)]) == 8
        assert running.session.limit is None


async def test_by_default_an_agent_may_repeat_itself() -> None:
    async with proxied(AGAIN) as running:
        assert await _until_refused(running, "openai_chat", ["no such file"] * 12) == 12


async def test_a_conversation_kept_by_the_node_is_read_whole() -> None:
    """`previous_response_id`: each call brings only the new result."""
    async with proxied(AGAIN, max_repeated_actions=3) as running, running.client() as client:
        tool: Any = {"type": "function", "name": "read_file", "parameters": {"type": "object"}, "strict": False}
        reply: Any = await client.responses.create(model="m", input="Read a.txt.", tools=[tool])
        for number in range(3):
            (called,) = [item for item in reply.output if item.type == "function_call"]
            result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "no such file"}
            going_on = {"model": "m", "input": [result], "previous_response_id": reply.id, "tools": [tool]}
            if number == 2:
                with pytest.raises(Exception, match="the same actions"):
                    await client.responses.create(**going_on)
            else:
                reply = await client.responses.create(**going_on)
        assert running.session.limit == "agent_loop"
