"""Hooks from somebody's own distribution, as the guide shows them: installed, named in an experiment, and at work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangline.domain.errors import GanglineError, UnknownPlugin
from gangline.settings import plugins
from gangline.train.run.hooks import HookSettings, load_hooks
from support.training.samples import group, session, trace

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"

# What `gangline train run` does with an experiment, as far as a service is not needed.
USER = """
import json, sys
from collections import Counter
from pathlib import Path

from gangline.settings import plugins
from gangline.train.commands.run import _masks, selection_of
from gangline.train.learning.algorithms import algorithm
from gangline.train.learning.mask_settings import Phase
from gangline.train.learning.samples import make_samples
from gangline.train.run.experiment import read_experiment
from support.training.samples import session, trace
from gangline.train.collecting.groups import Group

experiment, left_out = read_experiment(Path(sys.argv[1])), Counter()
two, three = trace(turns=((10, 2),) * 2), trace(turns=((10, 2),) * 3)
found = Group("task-1", (session("s0", 1.0, two), session("s1", 1.0, three), session("s2", 0.0)))
selected = selection_of("run", experiment).select(found, left_out)
samples = make_samples(selected, algorithm("grpo"), _masks(experiment, Path()).mask(selected, Phase(0, 0)))
json.dump({
    "rewards": [one.reward for one in selected.sessions],
    "left_out": left_out,
    "weights": [one.weights.tolist() for one in samples],
    "from": plugins.version("hook", "two_turns_at_least"),
}, sys.stdout)
"""


def blocks(kind: str) -> list[str]:
    """Code of the guide's section on hooks."""
    section = GUIDE.read_text().split("## Hooks", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's distribution as an installer leaves it: its module, and its metadata."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "my_hooks-1.0.dist-info"
    info.mkdir()
    (folder / "my_hooks.py").write_text(blocks("python")[0])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-hooks\nVersion: 1.0\n")
    points = re.findall(r'^(\w+) = "(my_hooks:\w+)"$', blocks("toml")[0], re.MULTILINE)
    assert len(points) == 3
    (info / "entry_points.txt").write_text("\n".join(["[gangline.hooks]", *(f"{k} = {v}" for k, v in points), ""]))
    return folder


def use(site: Path, folder: Path, hooks: str) -> subprocess.CompletedProcess[str]:
    experiment = folder / "experiment.yaml"
    experiment.write_text(f"name: mine\nmodel: smollm2\ndata: {{tasks: tasks.jsonl}}\n{hooks}")
    path = os.pathsep.join([str(site), str(Path(__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", USER, experiment],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
        check=False,
    )


def test_the_guides_hooks_are_found_by_their_entry_points_and_do_their_work(installed: Path, tmp_path: Path) -> None:
    done = use(installed, tmp_path, blocks("yaml")[0])
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["left_out"] == {"too few turns": 1}
    assert shown["rewards"] == pytest.approx([0.98, 0.97])
    last = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert shown["weights"] == [last, [0.0] * 4 + last]
    assert shown["from"] == "my-hooks 1.0"


def test_a_name_that_there_is_not_is_told_the_known_ones(installed: Path, tmp_path: Path) -> None:
    done = use(installed, tmp_path, "hooks: {filter: two_turns_at_lest}")
    assert done.returncode != 0
    for known in ("two_turns_at_least", "fewer_turns", "last_turn"):
        assert known in done.stderr


def test_a_dotted_path_is_no_name() -> None:
    with pytest.raises(UnknownPlugin):
        load_hooks(HookSettings(reward="os:getcwd"))


@pytest.mark.parametrize(
    ("place", "hook", "subject", "says"),
    [
        ("reward", lambda _: "much", session("s0", 1.0), r"hooks.reward: hook 'mine' failed on s0: TypeError"),
        ("reward", lambda one: one.nothing, session("s0", 1.0), "AttributeError"),
        ("prepare", lambda _: None, group(1.0, 0.0), "must return a Group, and returned NoneType"),
        ("filter", lambda _: True, session("s0", 1.0), "a reason or None, and returned bool"),
        ("admit", lambda one: one.sessions, group(1.0, 0.0), "must return a Group, and returned tuple"),
        ("mask", lambda _: [1.0], trace(), "must return 3 weights"),
        ("mask", lambda one: np.full(len(one.response_ids), -1), trace(), "at least 0"),
    ],
)
def test_a_hook_that_fails_or_returns_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, hook: Callable[[Any], Any], subject: Any, says: str
) -> None:
    monkeypatch.setattr(plugins, "load", lambda _kind, _name: hook)
    loaded = load_hooks(HookSettings.model_validate({place: "mine"}))
    with pytest.raises(GanglineError, match=says):
        getattr(loaded, place)(subject)
