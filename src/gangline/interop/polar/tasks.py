"""Converts a task in Polar's fields to ours; pure. The reverse of `sessions`.

Source: Polar, A.3, 3.2.1 (MCP servers), 3.3.2 (one deadline for the whole session), 3.5 (evaluators); its published
`TaskRequest`, whose defaults also apply here. Its fields that are not in the paper are accepted if they have a meaning
here, and otherwise refused by name.

Polar's bridge and templates write sampling and template arguments into harness settings. In Polar only some harnesses
use them. Here they apply to every harness, and replace the values that it sends.

Source: the `_apply_eval_runtime_overrides` of the published bridge for slime; skill2env's template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.domain.task import TaskRequest
from gangline.grading.swe_bench import SweBenchConfig
from gangline.grading.swe_bench_rows import TEST_TIMEOUT_S
from gangline.grading.untrusted.test_logs import STATUS_WORDS, name_in_status_lines
from gangline.interop.polar.agents import agent_from_polar
from gangline.interop.polar.runtimes import given_fields, runtime_from_polar

SEED_BASE = "eval_sampling_seed_base"
"""Key in a task's metadata: seed of the first session; the others count up from it."""

_USUAL_TIMEOUT_S = 600.0
_AGENT_TIMEOUT = "agent_timeout"
"""Key in a task's metadata: seconds for RUN alone, within the session's budget."""
_TESTS_ON_OUTPUT = ("test_command", "expected_output_json")
"""Settings of Polar's `test_on_output`, which runs a command on the agent's patch; ours compares the agent's output."""
_TESTS_ON_OUTPUT_S = 1200.0
_GRADING_MARGIN_S = 60.0
"""Seconds of an evaluation in addition to the tests' own timeout."""


def task_from_polar(payload: Any) -> TaskRequest:
    """Converts a task as in A.3. Raises: InvalidRequest, pydantic.ValidationError; both name the unsupported field."""
    if not isinstance(payload, dict):
        return TaskRequest.model_validate(payload)
    usual: dict[str, Any] = {"timeout_seconds": _USUAL_TIMEOUT_S, "builder": {"strategy": "per_request"}}
    task = usual | given_fields(cast("dict[str, Any]", payload))
    budget = task["timeout_seconds"]
    graded = task.get("evaluator")
    evaluator = _evaluator(cast("dict[str, Any]", graded)) if isinstance(graded, dict) else {}
    _set_limits(task)
    _set_capture(task)
    if isinstance(runtime := task.get("runtime"), dict):
        is_clean = evaluator.get("refresh_runtime") is True
        task["runtime"] = ours = runtime_from_polar(cast("dict[str, Any]", runtime), budget, is_clean=is_clean)
        if (steps := ours.pop("eval_prepare", None)) is not None:
            evaluator.setdefault("runtime", ours | {"prepare": steps})
    if isinstance(agent := task.get("agent"), dict):
        task["agent"] = agent_from_polar(cast("dict[str, Any]", agent))
        _set_sampling(task)
    if isinstance(builder := task.get("builder"), dict):
        task["builder"] = _flat(cast("dict[str, Any]", builder))
    if evaluator:
        task["evaluator"] = evaluator
        if evaluator.get("strategy") == "swe_bench" and isinstance(config := evaluator.get("config", {}), dict):
            tests_s = cast("dict[str, Any]", config).get("timeout_seconds", TEST_TIMEOUT_S)
            if isinstance(tests_s, int | float):
                task.setdefault("evaluation_timeout_seconds", tests_s + _GRADING_MARGIN_S)
    if "callback_url" in task:
        task["callback_form"] = "polar"
    return TaskRequest.model_validate(task)


def protected_by_default() -> tuple[str, ...]:
    """Patterns of the files that the evaluator always excludes from a patch."""
    return SweBenchConfig.model_fields["protected"].default


def _set_limits(task: dict[str, Any]) -> None:
    """Priority and budgets. Polar's budget is for the whole session: INIT must not end before it.

    Raises: InvalidRequest.
    """
    if (priority := task.pop("dispatch_priority", None)) is not None:
        task.setdefault("priority", priority)
    if (enough := task.pop("early_stop_min_usable_sessions", None)) is not None:
        many = task.get("num_samples", 1)
        if not (isinstance(enough, int) and enough >= 1) or (isinstance(many, int) and enough > many):
            raise InvalidRequest("early_stop_min_usable_sessions: must be from 1 to num_samples.")
        task["enough_sessions"] = enough
    budget = task["timeout_seconds"]
    task.setdefault("init_timeout_seconds", budget)
    own = _metadata(task).get(_AGENT_TIMEOUT)
    if own is None:
        return
    if isinstance(own, bool) or not isinstance(own, int | float) or not (math.isfinite(own) and own > 0):
        raise InvalidRequest("metadata.agent_timeout: must be a positive number of seconds.")
    if isinstance(budget, int | float):
        task["timeout_seconds"] = min(budget, own)


def _set_capture(task: dict[str, Any]) -> None:
    """Raises: InvalidRequest."""
    usual: dict[str, Any] = {"token_texts": True}  # A.4 contains them
    if (base := _metadata(task).get(SEED_BASE)) is not None:
        if isinstance(base, bool) or not isinstance(base, int) or base < 0:
            raise InvalidRequest(f"metadata.{SEED_BASE}: must be a whole number from 0.")
        usual["seed"] = base
    if isinstance(capture := task.setdefault("capture", {}), dict):
        task["capture"] = usual | cast("dict[str, Any]", capture)


def _set_sampling(task: dict[str, Any]) -> None:
    """Raises: InvalidRequest."""
    if not isinstance(settings := task["agent"].get("settings"), dict):
        return
    task["agent"]["settings"], taken = taken_from_settings(cast("dict[str, Any]", settings))
    if isinstance(capture := task["capture"], dict):
        task["capture"] = taken | cast("dict[str, Any]", capture)


def _metadata(task: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = task.get("metadata")
    return cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}


def _flat(builder: Mapping[str, Any]) -> dict[str, Any]:
    """The builder's fields with its `config` merged in, as the settings are at top level here."""
    fields = dict(builder)
    config = fields.pop("config", None)
    return fields | (cast("dict[str, Any]", config) if isinstance(config, dict) else {})


def _evaluator(given: Mapping[str, Any]) -> dict[str, Any]:
    evaluator = given_fields(given)
    if evaluator.get("env") == {}:
        del evaluator["env"]
    strategy, config = evaluator.get("strategy"), evaluator.get("config", {})
    if not isinstance(config, dict):
        return evaluator
    if strategy == "swebench_harness":
        return evaluator | {"strategy": "swe_bench", "config": _swe_bench(cast("dict[str, Any]", config))}
    if strategy == "test_on_output" and any(name in config for name in _TESTS_ON_OUTPUT):
        settings = _with_statuses(cast("dict[str, Any]", config))
        return evaluator | {"strategy": "swe_bench", "config": _swe_bench(settings)}
    return evaluator


def _with_statuses(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts settings of Polar's `test_on_output` to its `swebench_harness`'s, with the statuses that tests must
    have.

    Raises: InvalidRequest.
    """
    config = {"log_parser": "status_lines", "test_timeout": _TESTS_ON_OUTPUT_S, **given_fields(given)}
    expected = config.pop("expected_output_json", None)
    if isinstance(expected, str):
        with suppress(json.JSONDecodeError, RecursionError):
            expected = json.loads(expected)
    statuses = cast("dict[str, Any]", expected) if isinstance(expected, dict) else {}
    if not statuses or not set(map(str, statuses.values())) <= STATUS_WORDS.keys():
        raise InvalidRequest(
            "evaluator.config.expected_output_json: must be an object, or its JSON, with a status for each test: "
            f"{', '.join(STATUS_WORDS)}."
        )
    named = {name_in_status_lines(name): STATUS_WORDS[status] for name, status in statuses.items()}
    return config | {"expected_statuses": named}


def _swe_bench(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts settings of `swebench_harness` to our evaluator's."""
    config = {"repo_dir": "/testbed", **given_fields(given)}
    config.pop("apply_timeout", None)  # the evaluation has a single budget, which includes this
    if "test_timeout" in config:
        config["timeout_seconds"] = config.pop("test_timeout")
    if isinstance(patterns := config.get("exclude_patterns"), list):
        del config["exclude_patterns"]
        if patterns:
            config["protected"] = [*protected_by_default(), *cast("list[Any]", patterns)]
    if isinstance(row := config.get("instance"), str):
        with suppress(json.JSONDecodeError, RecursionError):  # the evaluator refuses it by name
            config["instance"] = json.loads(row)
    return config


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
