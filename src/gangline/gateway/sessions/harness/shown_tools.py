"""Whether a harness that depends on tools has a model that is shown them, found before its agent starts."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.contracts import Harness, depends_on_tools
from gangline.domain.errors import ToolsNotRendered
from gangline.domain.node_views import BackendView
from gangline.domain.task import TaskRequest

__all__ = ["check_tools_are_shown"]


def check_tools_are_shown(harness: Harness, task: TaskRequest, backends: Sequence[BackendView]) -> None:
    """Refuse an agent that depends on tools where no engine's template renders them.

    An engine of which that is unknown is taken at its word, and so is a node that has no engine yet.
    Raises: ToolsNotRendered.
    """
    agent = task.agent
    if not depends_on_tools(harness, task) or agent.allow_unrendered_tools or not backends:
        return
    if all(backend.template.renders_tools is False for backend in backends):
        raise ToolsNotRendered(
            f"the chat template of {backends[0].model} does not render tools, and the harness {agent.harness} depends "
            "on them: the model would not know what it can do. Serve a model whose template renders tools (vLLM and "
            "SGLang take another one with --chat-template), choose a harness that works without tools, or set "
            "agent.allow_unrendered_tools."
        )
