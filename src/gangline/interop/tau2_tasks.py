"""Imports tau2-bench tasks, `tau2:DOMAIN` or `tau2:DOMAIN@SPLIT`: each is an environment of kind `tau2`.

They are listed by tau2's own loaders, in a Python with tau2-bench.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from gangline.domain.errors import InvalidRequest
from gangline.machine.reading.imported import Candidate, Choices, Imported, ProgramSource, listed

_PREFIX = "tau2:"
_TALK_S = 3600.0
_CALL_S = 300.0
"""Seconds for one message to the user: its model's calls, and the judge's."""

_LISTING = """
import json, os, sys
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LOGURU_LEVEL": "ERROR"}
out, sys.stdout = sys.stdout, sys.stderr
domain, _, split = sys.argv[1].partition("@")
try:
    from tau2.registry import registry
except ImportError as error:
    sys.exit(f"{sys.executable} has no tau2-bench ({error}); the package `tau2` of PyPI is another one")
if domain not in registry.get_domains():
    sys.exit(f"there is no domain {domain!r}; there are: {', '.join(registry.get_domains())}")
splits = (registry.get_task_splits_loader(domain) or dict)()
if split and split not in splits:
    sys.exit(f"the domain has no split {split!r}; it has: {', '.join(splits) or 'none'}")
tasks = registry.get_tasks_loader(domain)(*([split] if split else []))
json.dump({"domain": domain, "tasks": [one.model_dump(mode="json") for one in tasks]}, out)
"""


class _Listed(msgspec.Struct, frozen=True):
    domain: str
    tasks: list[dict[str, Any]]


def read_tau2_tasks(source: str, choices: Choices) -> list[tuple[str, dict[str, Any]]]:
    """Domain and document of each task of `DOMAIN` or `DOMAIN@SPLIT`. Raises: InvalidRequest."""
    command = [f"{_python(choices)}/bin/python3", "-c", _LISTING, source]
    found = listed(command, _Listed, f"{_PREFIX}{source}: tau2-bench could not list its tasks")
    return [(found.domain, task) for task in found.tasks]


def _python(choices: Choices) -> Path:
    """The environment with tau2-bench. Raises: InvalidRequest."""
    if choices.python is None:
        raise InvalidRequest(
            "tasks of tau2-bench are listed and played by tau2-bench itself: make an environment with it (see the "
            "guide on environments) and name it: --python /opt/tau2."
        )
    return Path(choices.python).absolute()


def read_tau2_task(domain: str, task: dict[str, Any], choices: Choices) -> Imported:
    """Raises: InvalidRequest."""
    beside: dict[str, Any] = {"python": str(_python(choices)), "network": "proxy"}
    environment: dict[str, Any] = {
        "kind": "tau2",
        "config": {"domain": domain, "task": task["id"]},
        "runtime": beside,
        "start_timeout_seconds": _CALL_S,
        "call_timeout_seconds": _CALL_S,
    }
    runtime: dict[str, Any] = {"backend": choices.runtime or "sandbox", "network": choices.network or "proxy"}
    body: dict[str, Any] = {
        "instruction": "Serve the user.",
        "runtime": {**runtime, **({} if choices.image is None else {"image": choices.image})},
        "environments": {"tau2": environment},
        "evaluator": {"strategy": "environment"},
        "init_timeout_seconds": 2 * _CALL_S,
        "timeout_seconds": _TALK_S,
        "metadata": {"source": "tau2-bench", "task": task["id"], "instance": task},
    }
    return Imported(name=f"{domain}-{task['id']}", body=body)


def _candidates(source: str, choices: Choices, limit: int | None) -> Generator[Candidate]:
    for domain, task in read_tau2_tasks(source, choices):
        yield Candidate(f"{domain}-{task['id']}", task, partial(read_tau2_task, domain, task, choices))


SOURCE = ProgramSource(_PREFIX, _candidates)
