"""Parts of calls that a model was not shown, because its chat template does not render them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangline.domain.completion import Completion, CompletionTree

if TYPE_CHECKING:
    from gangline.domain.task import AgentSpec

TOOLS = "tools (the template does not render them)"
TOOL_RESULTS = "tool results (the template does not render them)"
"""Names in a record's `dropped`."""
UNSHOWN_GUIDE = "docs/guides/engines.md#models-whose-template-does-not-render-tools"


def unshown(tree: CompletionTree, call: Completion) -> tuple[str, ...]:
    """Returns the parts as text; empty if the model was shown everything."""
    found: list[str] = []
    if TOOLS in call.dropped:
        names = [tool.name for tool in tree.tools(call)]
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        found.append(f"its {len(names)} tool{'' if len(names) == 1 else 's'} ({shown})")
    if TOOL_RESULTS in call.dropped:
        found.append("the results of its tools")
    return tuple(found)


def unshown_lines(completions: Iterable[Completion]) -> Iterator[str]:
    """Yields a line for a session's hidden tools and one for their results, with the number of calls and the guide."""
    tree = CompletionTree(completions)
    for name in (TOOLS, TOOL_RESULTS):
        calls = [call for call in tree if name in call.dropped]
        if calls:
            what = unshown(tree, calls[0])[-1 if name == TOOL_RESULTS else 0]
            where = f"in {len(calls)} of {len(tree)} calls"
            yield f"the model was not shown {what} {where}; its chat template does not render them: {UNSHOWN_GUIDE}"


def why_hidden(backends: Sequence[Mapping[str, Any]], agent: AgentSpec) -> str | None:
    """Returns a sentence for an agent with hidden tools; None if an engine shows them, may do so, or there is no
    engine.

    backends: as nodes report them.
    """
    policy = [backend for backend in backends if backend.get("role") is None]
    if not policy or any((one.get("template") or {}).get("renders_tools") is not False for one in policy):
        return None
    consequence = "the model will not see them" if agent.allow_unrendered_tools else "its sessions will be refused"
    return (
        f"the chat template of {policy[0].get('model')} does not render tools, and harness {agent.harness} has some: "
        f"{consequence}. See {UNSHOWN_GUIDE}"
    )
