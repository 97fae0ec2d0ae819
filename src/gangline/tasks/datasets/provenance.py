"""The provenance of a dataset: digests and versions of everything that produced its sessions, collected per session."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import msgspec

from gangline import __version__
from gangline.domain.task import task_digest
from gangline.tasks.datasets.selection import Recorded, Selection

_MOST_VALUES = 20
"""Maximum distinct values of one name; further ones are counted as `others`."""

_COUNTED = ("harnesses", "agents", "evaluators", "engines", "models", "tokenizers", "templates", "policy_versions")


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Each name -> value -> number of sessions with it."""

    gangline: str
    num_tasks: int
    num_sessions: int
    tasks_digest: str
    """SHA-256 over the tasks' ids and content digests, in survey order."""
    selection: dict[str, Any]
    """All given settings, and the defaults."""
    selection_digest: str
    harnesses: dict[str, int]
    agents: dict[str, int]
    """Digests of the agent's complete setting: harness, model name, settings, tools, skills."""
    evaluators: dict[str, int]
    """Strategy and digest of its setting."""
    engines: dict[str, int]
    models: dict[str, int]
    tokenizers: dict[str, int]
    templates: dict[str, int]
    policy_versions: dict[str, int]


class Gathering:
    """Collects provenance in memory that does not depend on the number of sessions."""

    def __init__(self, selection: Selection, settings: dict[str, Any]) -> None:
        """settings: further ones that affect the rows, such as the split's."""
        self._selection = {**msgspec.to_builtins(selection), **settings}
        self._tasks = hashlib.sha256()
        self._num_tasks = self._num_sessions = 0
        self._last_task: str | None = None
        self._agent = self._evaluator = self._harness = "unknown"
        self._found: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED}

    def add(self, recorded: Recorded) -> None:
        """Sessions of a task must be added consecutively."""
        result = recorded.result
        if result.task_id != self._last_task:
            self._begin_task(recorded)
        self._num_sessions += 1
        completions = result.completions
        held = [completion.certificate for completion in completions]
        self._count("harnesses", {self._harness})
        self._count("agents", {self._agent})
        self._count("evaluators", {self._evaluator})
        self._count("engines", {f"{one.engine} {one.engine_version}".strip() for one in held})
        self._count("models", {completion.model for completion in completions})
        self._count("tokenizers", {one.tokenizer_digest for one in held})
        self._count("templates", {one.template_digest for one in held})
        self._count("policy_versions", {str(span.version) for one in held for span in one.version_spans})

    def _begin_task(self, recorded: Recorded) -> None:
        self._last_task, task = recorded.result.task_id, recorded.task
        self._num_tasks += 1
        self._tasks.update(f"{self._last_task} {'' if task is None else task_digest(task)}\n".encode())
        if task is None:
            self._harness = self._agent = self._evaluator = "unknown"
            return
        self._harness = task.agent.harness
        self._agent = _short_digest(task.agent.model_dump_json(exclude_defaults=True))
        self._evaluator = f"{task.evaluator.strategy} {_short_digest(task.evaluator.model_dump_json())}"

    def _count(self, name: str, values: set[str]) -> None:
        counter = self._found[name]
        for value in values - {""}:
            counter[value if value in counter or len(counter) < _MOST_VALUES else "others"] += 1

    def done(self) -> Provenance:
        found = {name: dict(sorted(counter.items())) for name, counter in self._found.items()}
        return Provenance(
            gangline=__version__,
            num_tasks=self._num_tasks,
            num_sessions=self._num_sessions,
            tasks_digest=self._tasks.hexdigest(),
            selection=self._selection,
            selection_digest=_short_digest(msgspec.json.encode(self._selection, order="deterministic").decode()),
            **found,
        )


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
