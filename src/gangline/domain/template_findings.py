"""Plain-text findings about a chat template, for every place that shows them: `features` describes it, `lacks`
its limitations with a remedy, `lacks_of_tasks` the settings of tasks without effect. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gangline.domain.node_views import TemplateFacts
from gangline.domain.task import TaskRequest

TEMPLATES_GUIDE = "docs/guides/templates.md"
_PHRASES: dict[str, tuple[str, str]] = {
    "keeps_thinking": ("keeps thinking", "drops thinking"),
    "renders_current_thinking": ("", "does not render thinking before a call"),
    "renders_tools": ("renders tools", "does not render tools"),
    "reads_tools": ("its tool calls are read here", "its tool calls cannot be read here"),
    "renders_tool_results": ("", "does not render tool results"),
    "tool_turns_as_rendered": ("", "stitched tool turns differ from its own rendering"),
    "user_turns_as_rendered": ("", "stitched user turns differ from its own rendering"),
    "takes_late_system": ("takes late system messages", "takes no late system messages"),
    "takes_several_system": ("", "takes one system message"),
    "takes_system": ("", "takes no system message"),
    "takes_system_alone": ("", "wants a user's message"),
    "takes_system_after_results": ("", "takes no system message behind tool results"),
    "takes_neighbours": ("", "wants user and assistant to alternate"),
    "takes_reply_first": ("", "wants a user's message first"),
    "takes_empty_replies": ("", "takes no empty replies"),
    "takes_user_after_results": ("", "takes no user's message behind tool results"),
    "takes_parallel_calls": ("", "takes one call a turn"),
    "takes_results_without_calls": ("", "takes no results without their calls"),
    "takes_calls_without_results": ("", "takes no calls without their results"),
    "takes_text_and_thinking_with_calls": ("", "takes no text and thinking with a call"),
    "prints_call_ids": ("prints ids of calls", ""),
    "reports_ends": ("", "the engine leaves ends of turns out of its ids"),
}
"""Field -> text if true, text if false; empty: no text."""


def features(facts: TemplateFacts) -> list[str]:
    """Returns a short phrase for each known fact worth showing."""
    appended = [name for name in ("tool", "user") if getattr(facts, f"appends_{name}_turns")]
    found = [f"appends {' and '.join(appended)} turns" if appended else ""]
    for name, (is_true, is_false) in _PHRASES.items():
        value = getattr(facts, name)
        found.append("" if value is None else is_true if value else is_false)
    if facts.call_ids == "nine":
        found.append("wants nine-character ids of calls")
    if facts.thinking_on is not None:
        found.append(f"thinking is switched by {', '.join(facts.thinking_on)}" if facts.thinking_on else "no switch")
    for name, words in (facts.efforts or {}).items():
        found.append(f"takes {name} {', '.join(words)}")
    if facts.renders_tools is None:
        found.append("unknown whether it renders tools")
    if facts.refuses_some_tools:
        found.append(f"refuses some tools: {facts.refuses_some_tools}")
    if facts.refuses:
        found.append(f"refuses every conversation: {facts.refuses}")
    return [one for one in found if one]


def lacks(facts: TemplateFacts) -> list[str]:
    """Returns limitations that affect runs, one sentence each with a remedy."""
    found: list[str] = []
    other = "Serve the model with another template (--chat-template of vLLM and SGLang)"
    if facts.refuses:
        return [f"the chat template cannot be served, it refuses a single user's message: {facts.refuses}. {other}."]
    if facts.refuses_tools:
        found.append(
            f"the chat template refuses a plain conversation with a tool call: {facts.refuses_tools}. {other}, or "
            "choose a harness that works without tools."
        )
    if facts.refuses_some_tools and not facts.refuses_tools:
        found.append(f"the chat template refuses tools that clients offer: {facts.refuses_some_tools}. {other}.")
    if facts.renders_tools is False:
        found.append(f"the chat template does not render tools: agents that depend on tools do not start. {other}.")
    elif facts.reads_tools is False:
        found.append(
            "the chat template renders tools, but its format of tool calls is not known here, so calls would stay "
            "text: agents that depend on tools do not start. Name the format in the engine's option `parsers`, or use "
            "a chat route of vLLM or SGLang, which read calls themselves."
        )
    if facts.keeps_thinking is False and facts.renders_current_thinking is not False:  # one that never has any
        found.append(_of_stripped_thinking(facts))
    if facts.reports_ends is False:
        found.append(
            "the engine leaves the end of turn out of its token ids, so rows lack it, and a model that is trained on "
            "them does not learn to end its turns. Have the engine report every id that it samples."
        )
    return found


def _of_stripped_thinking(facts: TemplateFacts) -> str:
    keeper = facts.keeps_thinking_with
    choice = f"capture.template_kwargs {json.dumps(keeper)} keeps it; " if keeper else ""
    return (
        "the chat template drops thinking before the last user's message, so each user's turn begins a new row: "
        f'{choice}capture.thinking "retain" keeps one row, in a prompt that deployment would not see.'
    )


def lacks_of_tasks(facts: Sequence[TemplateFacts], tasks: Iterable[TaskRequest]) -> list[str]:
    """Returns a sentence for each argument that tasks choose and none of these templates takes."""
    known = [fact for fact in facts if fact.thinking_on is not None]
    if not known or len(known) < len(facts):
        return []
    taken = {name for one in known for name in (*(one.thinking_on or {}), *(one.efforts or {}))}
    chosen: dict[str, Any] = {name: value for task in tasks for name, value in task.capture.template_kwargs.items()}
    about = {"enable_thinking", "thinking", "reasoning", "thinking_mode", "thinking_option"}
    about |= {"reasoning_effort", "thinking_effort", "reasoning_strength"}
    own = f"it takes {', '.join(sorted(taken))}" if taken else "it takes none of this kind"
    return [
        f"capture.template_kwargs {name} changes nothing in the model's chat template: {own}. See {TEMPLATES_GUIDE}"
        for name in sorted(chosen.keys() & about - taken)
    ]
