"""Whether a harness that depends on tools has a model that is shown them, found before its agent starts."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.contracts import Harness, depends_on_tools
from gangline.domain.errors import EngineIncapable, ToolsNotRendered
from gangline.domain.node_views import BackendView, TemplateFacts
from gangline.domain.task import TaskRequest
from gangline.domain.template_told import lacks

__all__ = ["check_tools_are_shown"]


def check_tools_are_shown(harness: Harness, task: TaskRequest, backends: Sequence[BackendView]) -> None:
    """Refuse an agent where no engine's template renders any conversation, and one that depends on tools where none
    renders them, or where their calls cannot be read.

    An engine of which that is unknown is taken at its word, and so is a node that has no engine yet.
    Raises: EngineIncapable, ToolsNotRendered.
    """
    agent = task.agent
    templates = [backend.template for backend in backends]
    if templates and all(one.refuses for one in templates):
        raise EngineIncapable(f"{backends[0].model}: {lacks(templates[0])[0]}")
    if not depends_on_tools(harness, task) or agent.allow_unrendered_tools or not backends:
        return
    why = next((why for why in map(_why_no_tools, templates) if why is not None), None)
    if why is not None and all(_why_no_tools(one) is not None for one in templates):
        raise ToolsNotRendered(
            f"the chat template of {backends[0].model} {why}, and the harness {agent.harness} depends "
            "on tools: the model would not know what it can do. Serve a model whose template renders tools (vLLM and "
            "SGLang take another one with --chat-template), choose a harness that works without tools, or set "
            "agent.allow_unrendered_tools."
        )


def _why_no_tools(template: TemplateFacts) -> str | None:
    if template.renders_tools is False:
        return "does not render tools"
    if template.refuses_tools:
        return f"refuses a conversation with a tool call ({template.refuses_tools})"
    return "writes tool calls in a format that is not known here" if template.reads_tools is False else None
