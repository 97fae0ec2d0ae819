"""Sampling of an evaluation, which Polar's bridge writes into the settings of every harness; pure.

There only one harness acts on them. Here they are a policy that holds for each: it replaces what the harness sends.

Source: the `_apply_eval_runtime_overrides` of the published bridge for slime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest

__all__ = ["taken_from_settings"]

_FIELD = "model_kwargs"
_RULES = ("temperature", "top_p", "top_k", "max_tokens")
_OF_TEXT = ("skip_special_tokens", "no_stop_trim")
"""Change the text of a reply and none of its ids."""


def taken_from_settings(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An agent's settings without their sampling, and its rules for `capture.sampling`. Raises: InvalidRequest."""
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
    for name, value in wanted.items():
        if value is not None and name not in (*_RULES, *_OF_TEXT):
            raise InvalidRequest(f"agent.settings.{_FIELD}.{name}: is not supported; leave it out.")
    return settings, {name: {"override": wanted[name]} for name in _RULES if wanted.get(name) is not None}
