"""A task in Polar's words becomes one of ours, and a session of ours one for a gateway of Polar's; pure.

Source: Polar, A.3, 3.2.1 (MCP servers), 3.3.2 (one deadline for the whole session), 3.5 (evaluators). Where its
published code has more fields than the paper, those that have a meaning here are understood, and others are refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from gangline.domain.errors import InvalidRequest
from gangline.domain.session import Lease
from gangline.domain.task import LimitsSpec, TaskRequest
from gangline.evaluators.swe_bench_rows import TEST_TIMEOUT_S

__all__ = ["needs_of_ours", "session_for_gateway", "task_from_polar"]

_NETWORKS = {"host": "full", "bridge": "full", None: "proxy"}
_BACKENDS = ("docker", "apptainer")
_OURS = ("allow_no_model_call", "allow_unrendered_tools")
"""Fields of `agent` that only our nodes act on: a task that sets one is not given to a gateway."""
_HARNESSES = ("shell", "claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "pi")
_BUILDERS = ("per_request", "prefix_merging")
_GATEWAY_EVALUATORS = ("session_completed", "test_on_output", "swe_bench")
"""The evaluators that the paper names (3.2, 3.5)."""
_EVALUATORS = {"swebench_harness": "swe_bench"}
_HTTP_TRANSPORTS = ("http", "streamable-http", "streamable_http")
_GRADING_MARGIN_S = 60.0
"""Seconds of an evaluation beside the tests' own time."""
_RUNTIME_FIELDS = ("backend", "image", "network", "workdir", "env", "prepare")
_EVALUATOR_FIELDS = ("strategy", "refresh_runtime", "config")
_MEBIBYTE = 1024**2


def task_from_polar(payload: Any) -> TaskRequest:
    """A task as in A.3. Raises: InvalidRequest, pydantic.ValidationError; both name the unsupported field."""
    if not isinstance(payload, dict):
        return TaskRequest.model_validate(payload)
    task = _given(cast("dict[str, Any]", payload))
    _share_deadline(task)
    if isinstance(capture := task.setdefault("capture", {}), dict):
        task["capture"] = {"token_texts": True} | cast("dict[str, Any]", capture)  # A.4 prints them
    if isinstance(runtime := task.get("runtime"), dict):
        task["runtime"] = _runtime(cast("dict[str, Any]", runtime), task.get("timeout_seconds"))
    if isinstance(agent := task.get("agent"), dict):
        task["agent"] = _agent(cast("dict[str, Any]", agent))
    if isinstance(builder := task.get("builder"), dict):
        task["builder"] = _flat(cast("dict[str, Any]", builder))
    if isinstance(evaluator := task.get("evaluator"), dict):
        task["evaluator"] = _evaluator(cast("dict[str, Any]", evaluator))
        if task["evaluator"].get("strategy") == "swe_bench":
            task.setdefault("evaluation_timeout_seconds", TEST_TIMEOUT_S + _GRADING_MARGIN_S)
    if "callback_url" in task:
        task["callback_form"] = "polar"
    return TaskRequest.model_validate(task)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _share_deadline(task: dict[str, Any]) -> None:
    """Polar's budget is of the whole session: INIT must not end before it."""
    budget = task.get("timeout_seconds")
    if budget is not None:
        task.setdefault("init_timeout_seconds", budget)


def _runtime(given: Mapping[str, Any], budget: Any) -> dict[str, Any]:
    """The paper's networks are Docker's; the harness must reach the model whichever it is."""
    runtime = _given(given)
    limits = {"cpus": runtime.pop("cpus", None)}
    if isinstance(memory_mb := runtime.pop("memory_mb", None), int | float):
        limits["memory_bytes"] = int(memory_mb * _MEBIBYTE)
    named = _given(limits)
    if named and isinstance(runtime.get("limits", {}), dict):
        runtime["limits"] = named | runtime.get("limits", {})
    network = runtime.get("network")
    if network is None or isinstance(network, str):
        runtime["network"] = _NETWORKS.get(network, network)
    if runtime.pop("allow_internet", True) is False:
        runtime["network"] = "proxy"
    if budget is not None and isinstance(prepare := runtime.get("prepare"), list):
        runtime["prepare"] = [_action(action, budget) for action in cast("list[Any]", prepare)]
    return runtime


def _action(given: Any, budget: Any) -> Any:
    if not isinstance(given, dict):
        return given
    action = cast("dict[str, Any]", given)
    return {"timeout_seconds": budget} | action if action.get("type") == "exec" else action


def _agent(given: Mapping[str, Any]) -> dict[str, Any]:
    agent = _given(given)
    if isinstance(servers := agent.get("mcp_servers"), list):
        named = [_mcp_server(index, server) for index, server in enumerate(cast("list[Any]", servers))]
        agent["mcp_servers"] = dict(named)
        if len(agent["mcp_servers"]) < len(named):
            raise InvalidRequest("agent.mcp_servers: two servers have the same name.")
    return agent


def _mcp_server(index: int, given: Any) -> tuple[str, Any]:
    """A server of a list carries its own name; a command is a program with its arguments beside it.

    Raises: InvalidRequest.
    """
    where = f"agent.mcp_servers.{index}"
    if not isinstance(given, dict) or not isinstance(cast("dict[str, Any]", given).get("name"), str):
        raise InvalidRequest(f"{where}: must be an object with a `name`.")
    server = _given(cast("dict[str, Any]", given))
    name = server.pop("name")
    transport = server.pop("transport", server.pop("type", None))
    if transport not in (None, "stdio", *_HTTP_TRANSPORTS):
        raise InvalidRequest(f"{where}: transport must be stdio or http (streamable HTTP), got {transport!r:.40}.")
    if isinstance(command := server.get("command"), str):
        server["command"] = [command, *server.pop("args", ())]
    return name, server


def _flat(builder: Mapping[str, Any]) -> dict[str, Any]:
    """A builder's settings stand beside its strategy here, under `config` there."""
    fields = dict(builder)
    config = fields.pop("config", None)
    return fields | (cast("dict[str, Any]", config) if isinstance(config, dict) else {})


def _evaluator(given: Mapping[str, Any]) -> dict[str, Any]:
    evaluator = _given(given)
    strategy = evaluator.get("strategy")
    if isinstance(strategy, str):
        evaluator["strategy"] = _EVALUATORS.get(strategy, strategy)
    return evaluator


def needs_of_ours(task: TaskRequest) -> tuple[str, ...]:
    """Fields of a task by which only a node of ours can run it; empty where a gateway of Polar's can.

    A gateway does not report its capabilities. So it is given only tasks that the paper's fields can express: those
    that are unchanged when converted to them and back.
    """
    names = {
        "runtime.backend": (task.runtime.backend, _BACKENDS),
        "agent.harness": (task.agent.harness, _HARNESSES),
        "builder.strategy": (task.builder.strategy, _BUILDERS),
        "evaluator.strategy": (task.evaluator.strategy, _GATEWAY_EVALUATORS),
    }
    if task.evaluator.strategy == "swe_bench" and "instance" not in task.evaluator.config:
        return ("evaluator.config",)
    if ours := tuple(field for field, (name, known) in names.items() if name not in known):
        return ours
    fields = task.model_dump(mode="json")
    again = task_from_polar(_words(fields)).model_dump(mode="json")
    for spec in (fields, again):
        spec["capture"].pop("token_texts")  # A.4 has them always
    # Limits that Gangline itself enforces on a session's calls are sent along but mean nothing there.
    names_of_limits = ("max_turns", "max_sampled_tokens", "max_repeated_actions")
    limits = [f"agent.{name}" for name in names_of_limits if fields["agent"][name] is not None]
    parts = ("runtime", "agent", "capture", "builder", "evaluator")
    return (*limits, *(name for part in parts for name in _differences(part, fields[part], again[part])))


def _differences(where: str, one: Any, other: Any) -> list[str]:
    """Names of the fields in which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        fields, others = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        pairs = {name: (fields.get(name), others.get(name)) for name in (*fields, *others)}
        return [found for name, pair in pairs.items() for found in _differences(f"{where}.{name}", *pair)]
    return [] if one == other else [where]


def session_for_gateway(lease: Lease, callback_url: str) -> dict[str, Any]:
    """The fields that a gateway needs to run a session, by 3.1: ids, budget, specifications, evaluator, callback."""
    ids = {"session_id": lease.session_id, "task_id": lease.task_id, "sample_index": lease.sample_index}
    return ids | _words(lease.task) | {"callback_url": callback_url}


def _words(task: Mapping[str, Any]) -> dict[str, Any]:
    """A `TaskRequest`, as JSON data, with the field names of A.3, for one session of it."""
    runtime = _set({name: task["runtime"].get(name) for name in _RUNTIME_FIELDS})
    limits, usual = task["runtime"].get("limits", {}), LimitsSpec()
    if (cpus := limits.get("cpus", usual.cpus)) != usual.cpus:
        runtime["cpus"] = cpus
    if (memory := limits.get("memory_bytes", usual.memory_bytes)) != usual.memory_bytes and memory is not None:
        runtime["memory_mb"] = memory / _MEBIBYTE
    network = runtime.pop("network", "proxy")
    agent = _set({name: value for name, value in task["agent"].items() if name not in _OURS})
    if servers := agent.pop("mcp_servers", None):
        agent["mcp_servers"] = [{"name": name, **_set(server)} for name, server in servers.items()]
    builder = dict(task.get("builder", {}))
    evaluator = {name: task.get("evaluator", {}).get(name) for name in _EVALUATOR_FIELDS}
    if evaluator.get("strategy") == "swe_bench" and "instance" in (evaluator["config"] or {}):
        evaluator["strategy"] = "swebench_harness"
    strategy = builder.pop("strategy", "prefix_merging")
    return {
        "instruction": task["instruction"],
        "timeout_seconds": task.get("timeout_seconds"),
        "runtime": runtime | ({"network": "host"} if network == "full" else {}),
        "agent": agent,
        "builder": {"strategy": strategy} | ({"config": builder} if builder else {}),
        "evaluator": _given(evaluator),
        "metadata": task.get("metadata", {}),
    }


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without empty ones."""
    return {name: value for name, value in fields.items() if value not in (None, [], {}, ())}
