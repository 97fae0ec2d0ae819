"""Reads and modifies evaluators for audits: the leaves of a task's evaluator, and their commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from gangline.grading.swe_bench import SweBenchConfig

ANSWERS = frozenset({"math", "test_on_output"})
"""Evaluators that read one text and run nothing."""
_LAST_MESSAGE = {"math": "last_message", "test_on_output": "stdout"}
"""Their default source."""
_REWARD_FILES = ("reward.json", "reward.txt")

Evaluator = dict[str, Any]


def leaves(evaluator: Mapping[str, Any]) -> Iterator[Evaluator]:
    """The evaluators that grade themselves, inside any that combine them."""
    inner = list(_inner(evaluator.get("config")))
    if not inner:
        yield dict(evaluator)
    for one in inner:
        yield from leaves(one)


def _inner(value: Any) -> Iterator[Evaluator]:
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _inner(one)
    elif isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if isinstance(fields.get("strategy"), str):
            yield fields
        else:
            for one in fields.values():
                yield from _inner(one)


def _changed(evaluator: Evaluator, change: Callable[[Evaluator], Evaluator]) -> Evaluator:
    """A copy with changed leaves."""
    if not list(_inner(evaluator.get("config"))):
        return change(evaluator)
    return {name: _changed_inside(value, change) if name == "config" else value for name, value in evaluator.items()}


def _changed_inside(value: Any, change: Callable[[Evaluator], Evaluator]) -> Any:
    if isinstance(value, list):
        return [_changed_inside(one, change) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if isinstance(fields.get("strategy"), str):
        return _changed(fields, change)
    return {name: _changed_inside(one, change) for name, one in fields.items()}


def answered_on_stdout(evaluator: Evaluator) -> Evaluator:
    """The evaluator, changed to read standard output if it reads the model's last message."""

    def change(leaf: Evaluator) -> Evaluator:
        strategy = str(leaf.get("strategy"))
        config = cast("dict[str, Any]", leaf.get("config") or {})
        if strategy not in ANSWERS or config.get("source", _LAST_MESSAGE[strategy]) != "last_message":
            return leaf
        return {**leaf, "config": {**config, "source": "stdout"}}

    return _changed(evaluator, change)


def with_command(evaluator: Evaluator, *, before: str, again: bool) -> Evaluator | None:
    """The evaluator with the shell code `before` run before its commands; None if it runs none.

    again: the command of evaluator `script` runs twice in a row, and the second run counts.
    """
    num = 0

    def change(leaf: Evaluator) -> Evaluator:
        nonlocal num
        config = cast("dict[str, Any]", leaf.get("config") or {})
        if leaf.get("strategy") == "script":
            num += 1
            return {**leaf, "config": {**config, "command": _script(config, before, again)}}
        if leaf.get("strategy") == "swe_bench":
            num += 1
            parsed = SweBenchConfig.model_validate(config)
            field = "test_command" if parsed.eval_script is None else "eval_script"
            return {**leaf, "config": {**config, field: f"{before}\n{getattr(parsed, field)}"}}
        return leaf

    changed = _changed(evaluator, change)
    return changed if num else None


def _script(config: Mapping[str, Any], before: str, again: bool) -> list[str]:
    given = config["command"]
    command = ["sh", "-c", given] if isinstance(given, str) else list(given)
    twice = '"$@" >/dev/null 2>&1; rm -f ' + " ".join(f"'{one}'" for one in _named(config)) + "\n" if again else ""
    return ["sh", "-c", f'{before}\n{twice}exec "$@"', "sh", *command]


def reward_files(evaluator: Mapping[str, Any]) -> list[str]:
    """Files from which evaluators of type `script` read rewards."""
    found = [path for leaf in leaves(evaluator) if leaf.get("strategy") == "script" for path in _named(_config(leaf))]
    return list(dict.fromkeys(found))


def _named(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("reward_file", _REWARD_FILES)
    return (named,) if isinstance(named, str) else tuple(named)


def hidden_files(evaluator: Mapping[str, Any]) -> dict[str, str]:
    """Path -> content of the hidden text files."""
    found: dict[str, str] = {}
    for leaf in leaves(evaluator):
        for path, given in cast("dict[str, Any]", _config(leaf).get("files") or {}).items():
            file: dict[str, Any] = {"content": given} if isinstance(given, str) else given
            if file.get("encoding", "utf-8") == "utf-8":
                found[path] = str(file["content"])
    return found


def clears(evaluator: Mapping[str, Any]) -> set[str]:
    """Folders that the grader empties; their files are not the agent's results."""
    return {str(path) for leaf in leaves(evaluator) for path in _config(leaf).get("clear") or ()}


def _config(leaf: Mapping[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", leaf.get("config") or {})
