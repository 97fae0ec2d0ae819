"""Calls a tool, with its errors as observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.agents.tools.bounding import head_and_tail
from gangline.agents.tools.contract import Observation, Tool, ToolContext, ToolFailed
from gangline.domain.errors import ActionServerFailed, CallerError


async def observe(tool: Tool, arguments: Mapping[str, Any], context: ToolContext) -> Observation:
    """Call a tool. Errors that the model can act on become observations; every observation is bounded.

    Raises: RuntimeFailed if the sandbox is gone; HarnessError, except for a failed action server.
    """
    try:
        seen = await tool.run(arguments, context)
    except ActionServerFailed as error:
        seen = Observation(
            content=f"error: {error.message}\nFiles are kept. The shell's state and the variables of Python are lost:"
            " the next call starts with new ones.",
            is_error=True,
        )
    except (ToolFailed, CallerError) as error:
        seen = Observation(content=f"error: {error}", is_error=True)
    bounded = head_and_tail(seen.content, context.max_output_bytes)
    return Observation(content=bounded, is_error=seen.is_error, answer=seen.answer)
