"""reasoning-gym judges its own tasks: a right answer and none earn the same in a session as by its scorer. Where that
raises an error, the session has no reward.

Every third of its datasets; all with GANGLINE_EVERY_DATASET=1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.compared import same
from support.node.environments import directly, need_python, played, using

STRIDE = 1 if os.environ.get("GANGLINE_EVERY_DATASET") else 3
NOTHING = "no idea"
JUDGED = """
import reasoning_gym
from reasoning_gym.factory import DATASETS
def score(text):
    try:
        return float(dataset.score_answer(text, entry))
    except ValueError:  # some scorers read numbers
        return None
result = {}
for name in list(DATASETS)[1 :: given["stride"]]:  # the first is made of others, which a caller names
    dataset = reasoning_gym.create_dataset(name, seed=given["seed"], size=1)
    entry = dataset[0]
    result[name] = {text: score(text) for text in (str(entry["answer"]), given["nothing"])}
"""


@pytest.mark.timeout(1800)
async def test_answers_earn_what_each_dataset_gives(tmp_path: Path) -> None:
    python = need_python("GANGLINE_GYMS", "gyms", "reasoning_gym")
    judged: dict[str, dict[str, float | None]] = directly(python, JUDGED, stride=STRIDE, seed=11, nothing=NOTHING)
    theirs: dict[tuple[str, str], float | None] = {}
    ours: dict[tuple[str, str], Any] = {}
    for name, scores in judged.items():
        environment = {"kind": "reasoning_gym", "config": {"dataset": name, "seed": 11}}
        for number, (text, score) in enumerate(scores.items()):
            said = text if text == NOTHING else f"<answer>{text}</answer>"
            result = await played(tmp_path / f"{name}-{number}", environment, using([], said), python=python)
            theirs[name, text] = score
            as_expected = result.outcome == ("infra_error" if score is None else "completed")
            ours[name, text] = result.reward if as_expected else result.failure
    same("reasoning-gym", theirs, ours)
    assert len(judged) >= 35
