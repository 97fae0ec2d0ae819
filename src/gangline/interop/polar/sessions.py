"""Converts one of our sessions to a session for a Polar gateway; pure. The reverse of `tasks`.

Source: Polar, 3.1 (contents of a session); its published `SessionDispatchRequest`, whose names it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.session import Lease
from gangline.domain.task import LimitsSpec, TaskRequest
from gangline.interop.polar.agents import agent_for_gateway
from gangline.interop.polar.runtimes import MEBIBYTE, SESSION_FOLDER
from gangline.interop.polar.tasks import SEED_BASE, protected_by_default, task_from_polar

_BACKENDS = ("docker", "apptainer")
_HARNESSES = ("shell", "claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "pi")
_BUILDERS = ("per_request", "prefix_merging")
_EVALUATORS = ("session_completed", "swe_bench")
"""Evaluators with the same meaning in Polar. `test_on_output` differs: there it runs tests."""
_LIMITS = ("max_turns", "max_sampled_tokens", "max_repeated_actions")
"""Limits that Gangline itself enforces on a session's calls."""
_RUNTIME_FIELDS = ("backend", "image", "workdir", "env", "prepare")
_EVALUATOR_FIELDS = ("strategy", "refresh_runtime", "config")
_HARNESS_CONFIG = ("instance", "repo_dir", "patch_command", "test_timeout", "exclude_patterns")
_MAX_PRIORITY = 100


def needs_of_ours(task: TaskRequest) -> tuple[str, ...]:
    """Fields of a task that only our nodes support; empty if a Polar gateway can run the task.

    A gateway does not report its capabilities. It is therefore given only tasks that stay the same when converted to
    Polar's fields and back.
    """
    names = {
        "runtime.backend": (task.runtime.backend, _BACKENDS),
        "agent.harness": (task.agent.harness, _HARNESSES),
        "builder.strategy": (task.builder.strategy, _BUILDERS),
        "evaluator.strategy": (task.evaluator.strategy, _EVALUATORS),
    }
    if ours := tuple(field for field, (name, known) in names.items() if name not in known):
        return ours
    if task.evaluator.strategy == "swe_bench" and "instance" not in task.evaluator.config:
        return ("evaluator.config",)
    fields = task.model_dump(mode="json")
    words = _words(fields)
    again = task_from_polar(words).model_dump(mode="json")
    for spec in (fields, again):
        spec["capture"].pop("token_texts")  # A.4 always contains them
        spec["runtime"]["folders"] = [path for path in spec["runtime"]["folders"] if path != SESSION_FOLDER]
    limits = [f"agent.{name}" for name in _LIMITS if fields["agent"][name] is not None]
    steps = [step["type"] for step in fields["runtime"]["prepare"]]
    writes = ["runtime.prepare"] if set(steps) - {"exec"} else []
    if task.agent.harness == "shell" and "custom_shell" not in words["agent"]:
        return ("agent.settings",)
    config: dict[str, Any] = words["evaluator"].get("config", {})
    known = _HARNESS_CONFIG if task.evaluator.strategy == "swe_bench" else ()
    settings = [f"evaluator.config.{name}" for name in config if name not in known]
    parts = ("runtime", "agent", "capture", "builder", "evaluator")
    differences = [name for part in parts for name in _differences(part, fields[part], again[part])]
    return tuple(dict.fromkeys((*limits, *writes, *settings, *differences)))


def _differences(where: str, one: Any, other: Any) -> list[str]:
    """Names of the fields in which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        fields, others = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        pairs = {name: (fields.get(name), others.get(name)) for name in (*fields, *others)}
        return [found for name, pair in pairs.items() for found in _differences(f"{where}.{name}", *pair)]
    return [] if one == other else [where]


def session_for_gateway(lease: Lease, callback_url: str) -> dict[str, Any]:
    """The fields that a gateway needs to run a session, by 3.1: ids, budget, specifications, evaluator, callback."""
    task = lease.task
    ids = {"session_id": lease.session_id, "task_id": lease.task_id, "sample_index": lease.sample_index}
    words = _words(task)
    if (base := words["metadata"].get(SEED_BASE)) is not None:
        seed = base + lease.sample_index
        words["agent"] = words["agent"] | {"settings": words["agent"].get("settings", {}) | {"sampling_seed": seed}}
        words["metadata"] = words["metadata"] | {"eval_sampling_seed": seed}
    return ids | words | {"remaining_timeout_seconds": _budget_s(task), "callback_url": callback_url}


def _budget_s(task: Mapping[str, Any]) -> float:
    """Seconds for the whole session, starting with INIT. RUN may have fewer (see `task_from_polar`)."""
    usual = TaskRequest.model_fields
    return max(task.get(name, usual[name].default) for name in ("timeout_seconds", "init_timeout_seconds"))


def _words(task: Mapping[str, Any]) -> dict[str, Any]:
    """A `TaskRequest`, as JSON data, in Polar's fields, for one session of it."""
    builder = task.get("builder", {})
    return {
        "instruction": task["instruction"],
        "timeout_seconds": task.get("timeout_seconds"),
        "dispatch_priority": min(max(task.get("priority", 0), 0), _MAX_PRIORITY),
        "runtime": _runtime(task["runtime"]),
        "agent": agent_for_gateway(task["agent"]),
        "builder": {"strategy": builder.get("strategy", "prefix_merging")},
        "evaluator": _evaluator(task.get("evaluator", {})),
        "metadata": task.get("metadata", {}),
    }


def _runtime(given: Mapping[str, Any]) -> dict[str, Any]:
    """Polar has whole numbers only: other values are omitted, and so differ when converted back."""
    runtime = _set({name: given.get(name) for name in _RUNTIME_FIELDS})
    limits, usual = given.get("limits", {}), LimitsSpec()
    if (cpus := limits.get("cpus", usual.cpus)) != usual.cpus and float(cpus or 0.5).is_integer():
        runtime["cpus"] = int(cpus)
    for ours, theirs in (("memory_bytes", "memory_mb"), ("disk_bytes", "storage_mb")):
        number = limits.get(ours, getattr(usual, ours))
        if number is not None and number != getattr(usual, ours) and number % MEBIBYTE == 0:
            runtime[theirs] = number // MEBIBYTE
    if given.get("network") == "full":  # there, no internet means no model
        runtime["network"] = "host"
    return runtime


def _evaluator(given: Mapping[str, Any]) -> dict[str, Any]:
    evaluator = {name: given[name] for name in _EVALUATOR_FIELDS if given.get(name) is not None}
    config: dict[str, Any] = evaluator.get("config", {})
    if evaluator.get("strategy") == "swe_bench" and "instance" in config:
        evaluator["strategy"] = "swebench_harness"
        evaluator["config"] = _swe_bench(config)
    return evaluator


def _swe_bench(given: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(given)
    if "timeout_seconds" in config:
        config["test_timeout"] = config.pop("timeout_seconds")
    usual = protected_by_default()
    patterns = tuple(config.get("protected", ()))
    if patterns and patterns[: len(usual)] == usual:
        del config["protected"]
        config["exclude_patterns"] = list(patterns[len(usual) :])
    return config


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without empty ones."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, ())}
