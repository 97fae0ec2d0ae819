"""The example that trains a small policy on the preset `math`: sessions look to it as it was taught."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from gangline.domain.session import SessionResult
from gangline.models.language.tokenizer import load_tokenizer
from gangline.node.sessions.attempt import Attempt
from gangline.serving.scripted.server import scripted_server
from gangline.tasks.presets.preset import find_preset
from gangline.train.run.experiment import digest_of, read_experiment
from support.node.attempt import lease_of, node_parts
from support.requirements import need_module

EXAMPLE = Path(__file__).parents[2] / "examples" / "math_preset"


def example(name: str) -> dict[str, Any]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        return runpy.run_path(str(EXAMPLE / f"{name}.py"))
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("rows", None)


async def lived(folder: Path, model: Path, row: dict[str, Any], code: str, answer: str) -> SessionResult:
    """A session of the preset on a model that calls `python` and boxes an answer, with the tokenizer of `model`."""
    preset = find_preset("math")
    assert preset is not None
    task = preset.task(row, {"runtime": {"backend": "process"}})
    call = {"name": "python", "arguments": {"code": code}}
    rules = [{"pattern": r"\$\?$", "tool_calls": [call]}, {"pattern": r"\[done\]$", "text": f"\\boxed{{{answer}}}"}]
    script = {"rules": rules, "context_length": 8192, "default": {"text": "?"}}
    async with (
        scripted_server(script, load_tokenizer(model)) as url,
        node_parts(folder, engine_url=url) as parts,
    ):
        return await Attempt(lease_of(**task), parts).live()


async def test_a_session_of_the_preset_is_rendered_as_the_policy_was_taught(tmp_path: Path) -> None:
    """From the row to the reward: the policy knows each token, and the whole head of the prompt is one of them."""
    need_module("math_verify", "pip install 'gangline[math]'")
    policy = example("policy")
    row = next(iter(example("rows")["rows"](1)))
    expression = row["problem"].removeprefix("What is $").removesuffix("$?")
    policy["write_policy"](tmp_path / "policy", stages=((1.0, 1, 1e-3),))
    form = policy["Form"]()
    result = await lived(tmp_path, tmp_path / "policy", row, expression, row["answer"])
    assert (result.outcome, result.reward) == ("completed", 1.0), result.failure
    call = {"name": "python", "arguments": f'{{"code": "{expression}"}}'}
    turns = [
        {"role": "user", "content": row["problem"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": f"{row['answer']}\n[done]"},
        {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"},
    ]
    taught, learned = policy["example"](form, turns)
    assert result.trajectory is not None
    (trace,) = result.trajectory.traces
    assert [*trace.prompt_ids, *trace.response_ids] == taught
    assert [*[0] * len(trace.prompt_ids), *trace.loss_mask] == learned
    assert len(taught) < 60


def test_the_control_differs_in_nothing_but_its_rewards() -> None:
    experiment, control = (read_experiment(EXAMPLE / f"{name}.yaml") for name in ("experiment", "shuffled"))
    assert (experiment.control, control.control) == ("none", "shuffled_rewards")
    assert digest_of(control.model_copy(update={"control": "none", "name": experiment.name})) == digest_of(experiment)


def test_rows_are_different_problems_and_the_same_again() -> None:
    rows = example("rows")["rows"]
    made = list(rows(320))
    assert made == list(rows(320))
    assert len({row["problem"] for row in made}) == 320
