"""Sampling and template arguments that Polar's bridge and templates write into harness settings; pure.

In Polar only some harnesses use them. Here they apply to every harness, and replace the values that it sends.

Source: the `_apply_eval_runtime_overrides` of the published bridge for slime; skill2env's template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest

_FIELD = "model_kwargs"
_TEMPLATE = "chat_template_kwargs"
_RULES = ("temperature", "top_p", "top_k", "max_tokens", "presence_penalty", "frequency_penalty")
_WITHOUT_EFFECT = ("skip_special_tokens", "no_stop_trim", "drop_params")
"""Settings that change a reply's text but not its ids, or the parameters that a client library sends."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
}
"""Parameter -> values that have no effect."""
_INSTEAD = {
    "stop": "a task cannot set stop strings, a reply ends with the model's end of turn. Leave it out; strings that the "
    "agent's program sends by itself are passed on.",
    "stop_token_ids": "a task cannot set them, the engine stops at those of the served model. Leave it out, and add "
    "yours to `eos_token_id` in the model's generation_config.json.",
}


def taken_from_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings without these arguments, and the equivalent fields of `capture`. Raises: InvalidRequest."""
    settings = dict(given)
    wanted = settings.pop(_FIELD, None)
    if not isinstance(wanted, dict):
        return dict(given), {}
    wanted = cast("dict[str, Any]", wanted)
    further = wanted.get("extra_body")
    wanted = {name: value for name, value in wanted.items() if name != "extra_body"}
    if isinstance(further, dict):
        wanted |= cast("dict[str, Any]", further)
    if wanted.get("top_k") in (0, -1):  # as in engines: no limit
        del wanted["top_k"]
    arguments = wanted.pop(_TEMPLATE, None)
    for name, value in wanted.items():
        if value is not None and name not in (*_RULES, *_WITHOUT_EFFECT) and value not in _NEUTRAL.get(name, ()):
            why = _INSTEAD.get(name, "is not supported; leave it out.")
            raise InvalidRequest(f"agent.settings.{_FIELD}.{name}: {why}")
    rules = {name: {"override": wanted[name]} for name in _RULES if wanted.get(name) is not None}
    capture = {"sampling": rules, "template_kwargs": arguments}
    return settings, {name: value for name, value in capture.items() if value}
