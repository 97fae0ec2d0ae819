"""Runs an Inspect scorer on a session: the conversation becomes a `TaskState`, and the `Score` a reward.

The scorer is created from its name and parameters, as `inspect score` does with a log. No model is available: a scorer
that uses one fails, and the session has no reward.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .commands import CommandSandbox
from .conversation import chat_messages, said
from .solution import SolutionSandbox

_WORDS = ("c", "i", "p", "n", "yes", "no", "true", "false")
"""Texts that stand for numbers."""


def main(folder: str) -> None:
    """Score the session whose transcript the environment names, and write `reward.json` to the working folder.

    folder: contains `config.json`, and the task's modules in `task/`.
    """
    place = Path(folder).resolve()
    config = json.loads((place / "config.json").read_text())
    session = json.loads(Path(os.environ["GANGLINE_TRAJECTORY"]).read_text())
    reward_file = Path("reward.json").resolve()
    messages, answer = said(session)
    sandbox = SolutionSandbox() if config["sandbox"] else None
    found = asyncio.run(scored(config, messages, answer, place / "task", sandbox))
    reward_file.write_text(json.dumps(found))


async def scored(
    config: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    answer: str,
    folder: Path | None = None,
    sandbox: CommandSandbox | None = None,
) -> dict[str, Any]:
    """`reward`, and the score's own fields.

    config: `scorer` with `name`, `params` and `module`, and the `sample`.
    messages: in OpenAI's form. If empty, the answer follows the sample's input.
    folder: of the scorer's module, if it has one.
    Raises: ValueError if the score is not a number; errors of the scorer.
    """
    state, target = _state(config["sample"], messages, answer)
    _begin(state, sandbox)
    score: Any = await _scorer(config["scorer"], folder)(state, target)
    if score is None:
        raise ValueError("the scorer gave no score")
    own = {"value": score.value, "answer": score.answer, "explanation": score.explanation}
    return {"reward": _number(score.value), **{name: value for name, value in own.items() if value is not None}}


def _scorer(scorer: Mapping[str, Any], folder: Path | None) -> Any:
    if folder is not None and scorer["module"] is not None:
        sys.path.insert(0, str(folder))  # for other modules in its folder
        import_module("inspect_ai._util.module").load_module(folder / scorer["module"])
    return import_module("inspect_ai.scorer._scorer").scorer_create(scorer["name"], **scorer["params"])


def _state(sample: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], answer: str) -> tuple[Any, Any]:
    model: Any = import_module("inspect_ai.model")
    target = import_module("inspect_ai.scorer").Target(sample["target"])
    conversation = messages or [{"role": "user", "content": sample["input"]}, {"role": "assistant", "content": answer}]
    state = import_module("inspect_ai.solver").TaskState(
        model=model.ModelName("gangline/session"),
        sample_id=sample["id"],
        epoch=1,
        input=sample["input"],
        messages=chat_messages(conversation),
        target=target,
        output=model.ModelOutput.from_content("gangline/session", answer),
        completed=True,
        metadata=dict(sample["metadata"]),
    )
    return state, target


def _begin(state: Any, sandbox: CommandSandbox | None) -> None:
    """Set the context variables that Inspect keeps for a sample."""
    model: Any = import_module("inspect_ai.model._model")
    model.init_active_model(model.get_model("none/none"), import_module("inspect_ai.model").GenerateConfig())
    import_module("inspect_ai.solver._task_state").set_sample_state(state)
    if sandbox is not None:
        context: Any = import_module("inspect_ai.util._sandbox.context")
        context.sandbox_environments_context_var.set({"default": sandbox})
        context.sandbox_with_environments_context_var.set({})
        context.sandbox_default_context_var.set("default")


def _number(value: Any) -> float:
    """The number that Inspect's metrics would use. Raises: ValueError if they would substitute 0."""
    if isinstance(value, str) and (value.lower() in _WORDS or _is_number(value)):
        value = import_module("inspect_ai.scorer").value_to_float()(value)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the score {value!r} is not a number")
    return float(value)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
