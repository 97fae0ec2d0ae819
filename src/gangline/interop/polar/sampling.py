"""Sampling and template arguments, which Polar's bridge and templates write into the settings of harnesses; pure.

There only some harnesses act on them. Here they hold for each, in the place of what the harness sends.

Source: the `_apply_eval_runtime_overrides` of the published bridge for slime; skill2env's template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest

__all__ = ["taken_from_settings"]

_FIELD = "model_kwargs"
_TEMPLATE = "chat_template_kwargs"
_RULES = ("temperature", "top_p", "top_k", "max_tokens", "presence_penalty", "frequency_penalty")
_WITHOUT_EFFECT = ("skip_special_tokens", "no_stop_trim", "drop_params")
"""Change the text of a reply and none of its ids, or which parameters a client library leaves out."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
}
"""Parameter -> the values at which it changes nothing."""
_INSTEAD = {
    "stop": "a task cannot set stop strings, a reply ends with the model's end of turn. Leave it out; strings that the "
    "agent's program sends by itself are passed on.",
    "stop_token_ids": "a task cannot set them, the engine stops at those of the served model. Leave it out, and add "
    "yours to `eos_token_id` in the model's generation_config.json.",
}


def taken_from_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An agent's settings without these, and the fields of `capture` that say the same. Raises: InvalidRequest."""
    settings = dict(given)
    wanted = settings.pop(_FIELD, None)
    if not isinstance(wanted, dict):
        return dict(given), {}
    wanted = cast("dict[str, Any]", wanted)
    further = wanted.get("extra_body")
    wanted = {name: value for name, value in wanted.items() if name != "extra_body"}
    if isinstance(further, dict):
        wanted |= cast("dict[str, Any]", further)
    if wanted.get("top_k") in (0, -1):  # as of engines: no limit
        del wanted["top_k"]
    arguments = wanted.pop(_TEMPLATE, None)
    for name, value in wanted.items():
        if value is not None and name not in (*_RULES, *_WITHOUT_EFFECT) and value not in _NEUTRAL.get(name, ()):
            why = _INSTEAD.get(name, "is not supported; leave it out.")
            raise InvalidRequest(f"agent.settings.{_FIELD}.{name}: {why}")
    rules = {name: {"override": wanted[name]} for name in _RULES if wanted.get(name) is not None}
    capture = {"sampling": rules, "template_kwargs": arguments}
    return settings, {name: value for name, value in capture.items() if value}
