"""What a call says to the chat template: the task's arguments over the client's, and the client's wish for thinking in
the words that the template takes.

The client's own arguments of the template stand before its wish, and the task's before both. A wish that the template
has no words for stays in the call, and the record names it among what was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gangline.domain.conversation import EFFORTS, ModelCall, ThinkingWish
from gangline.domain.node_views import TemplateFacts

__all__ = ["in_template_words", "unmet_wishes", "with_task_arguments"]

_ABOUT_THINKING = frozenset({"enable_thinking", "thinking", "reasoning", "thinking_mode", "thinking_option"})
_ABOUT_EFFORT = frozenset({"reasoning_effort", "thinking_effort", "reasoning_strength", "low_effort", "medium_effort"})


def with_task_arguments(call: ModelCall, arguments: Mapping[str, Any]) -> ModelCall:
    """The call with a task's arguments of the template; `template_wished` is what of the client's they replaced."""
    if not arguments:
        return call
    own, wish = call.template_kwargs, call.thinking
    replaced = {name: own[name] for name in arguments if name in own and own[name] != arguments[name]}
    kept = ThinkingWish(
        is_on=None if _ABOUT_THINKING & arguments.keys() else wish.is_on,
        effort=None if _ABOUT_EFFORT & arguments.keys() else wish.effort,
    )
    if kept != wish:
        replaced["thinking_wish"] = msgspec.to_builtins(wish)
    return msgspec.structs.replace(call, template_kwargs={**own, **arguments}, thinking=kept, template_wished=replaced)


def in_template_words(call: ModelCall, template: TemplateFacts) -> ModelCall:
    """The call with its wish for thinking as arguments of this template; `thinking` is what it has no words for."""
    wish, own = call.thinking, call.template_kwargs
    if wish == ThinkingWish():
        return call
    if _ABOUT_THINKING & own.keys():
        wish = msgspec.structs.replace(wish, is_on=None)
    if _ABOUT_EFFORT & own.keys():
        wish = msgspec.structs.replace(wish, effort=None)
    switch = None if wish.is_on is None else _switch(wish.is_on, template)
    effort = None if wish.effort is None else _effort(wish.effort, template)
    unmet = ThinkingWish(is_on=wish.is_on if switch is None else None, effort=wish.effort if effort is None else None)
    arguments = {**(switch or {}), **(effort or {}), **own}
    return msgspec.structs.replace(call, template_kwargs=arguments, thinking=unmet)


def _switch(is_on: bool, template: TemplateFacts) -> dict[str, Any] | None:
    """None where the template has none. Of an unknown one the usual word may turn thinking off."""
    found = template.thinking_on if is_on else template.thinking_off
    if found is None:
        return None if is_on else {"enable_thinking": False}
    return found or None


def _effort(word: str, template: TemplateFacts) -> dict[str, Any] | None:
    """The nearest word that the template takes, of two that are as near the stronger one."""
    for name, words in (template.efforts or {}).items():
        if word in words or word not in EFFORTS:
            return {name: word} if word in words else None
        at = EFFORTS.index(word)
        return {name: min(words, key=lambda one: (abs(EFFORTS.index(one) - at), -EFFORTS.index(one)))}
    return None


def unmet_wishes(call: ModelCall) -> list[str]:
    """Names in a record's `dropped`."""
    wish = call.thinking
    found = [] if wish.is_on is None else [f"thinking {'on' if wish.is_on else 'off'} (the template cannot switch it)"]
    return found if wish.effort is None else [*found, f"effort {wish.effort} (the template does not take it)"]
