"""An experiment's file: what it can say, and how a mistake is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gangline.domain.errors import InvalidRequest
from gangline.train.learning.mask_settings import ProgressiveMask
from gangline.train.run.experiment import Experiment, digest_of, read_experiment, resolved_settings


def read(folder: Path, **changes: Any) -> Experiment:
    document: dict[str, Any] = {"name": "tiny", "model": "smollm2", "data": {"tasks": "tasks.jsonl"}}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(document | changes))
    return read_experiment(path)


def test_masks_degenerates_and_credit_by_turns_are_settings(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        mask={"kind": "progressive", "max_turns": 5, "until": 3},
        degenerates={"loop_turns": 30, "max_tokens": 50_000, "identical_rewards": True},
        algorithm={"overrides": {"turn_credit.weight": 0.5}},
    )
    assert found.mask == ProgressiveMask(kind="progressive", max_turns=5, unit="epochs", until=3)
    shown = resolved_settings(found)
    assert shown["mask"] == {"kind": "progressive", "max_turns": 5, "unit": "epochs", "until": 3}
    assert shown["degenerates"] == {
        "loop_turns": 30,
        "loop_repetition": 0.5,
        "max_tokens": 50_000,
        "drop_unparsed": False,
        "identical_rewards": True,
    }
    assert shown["algorithm"]["settings"]["turn_credit"] == {"weight": 0.5, "returns": None}
    assert digest_of(found) != digest_of(read(tmp_path))


SAMPLERS: list[dict[str, Any]] = [
    {"kind": "difficulty_pool"},
    {"kind": "difficulty_pool", "pools": {"all": {"threshold": 1, "weight": 1}}},
    {"kind": "stages", "stages": [{"shares": {"easy": 1, 2: 0.5, True: 1}, "until": 0.8}, {"shares": {"hard": 1}}]},
]


def test_a_sampler_is_a_part_of_what_an_experiment_is(tmp_path: Path) -> None:
    found = [read(tmp_path, data={"tasks": "tasks.jsonl", "sampler": one}) for one in SAMPLERS]
    assert resolved_settings(found[0])["data"]["sampler"]["pools"]["hard"] == {"threshold": 0.25, "weight": 0.2}
    assert len({digest_of(one) for one in (*found, read(tmp_path))}) == 4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"coalitions": {"players": ["lead", "coder"]}}, "coalitions share out a group's advantages"),
        ({"degenerates": {"identical_rewards": True}}, "predicts wrong values"),
        ({"algorithm": {"name": "ppo", "overrides": {"critic.trunk": -1}}}, "critic.trunk"),
    ],
    ids=str,
)
def test_a_critic_beside_what_is_of_groups_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read(tmp_path, **({"algorithm": {"name": "ppo"}} | changes))


@pytest.mark.parametrize(
    ("coalitions", "most"),
    [
        ({"players": ["lead", "coder"]}, 8 * 2 * 4),
        ({"players": list("abcd"), "samples": 1}, 8 * 14),
        ({"players": list("abcd"), "method": "two_level", "manager": "a"}, 8 * 14 * 4),
        ({"players": list("abcdef"), "method": "monte_carlo", "permutations": 3, "samples": 2}, 8 * 20 * 2),
        ({"players": list("abc"), "method": "monte_carlo", "permutations": 99}, 8 * 6 * 4),
    ],
    ids=str,
)
def test_the_sessions_of_coalitions_are_said_beforehand(tmp_path: Path, coalitions: dict[str, Any], most: int) -> None:
    found = read(tmp_path, coalitions=coalitions)
    assert resolved_settings(found)["coalitions"]["most_sessions_per_step"] == most
    assert digest_of(found) != digest_of(read(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mask": {"kind": "actions"}}, "'full', 'action_only', 'progressive', 'outcome_weighted', 'turn_selective'"),
        ({"mask": {"kind": "progressive", "until": 3}}, "mask.progressive.max_turns: Field required"),
        ({"mask": {"kind": "progressive", "until": 1, "max_turns": 2}}, "mask.progressive.until: Input should be gre"),
        ({"mask": {"kind": "progressive", "unit": "days"}}, "mask.progressive.unit: Input should be 'steps' or 'epo"),
        ({"mask": {"kind": "turn_selective"}}, "mask.turn_selective.threshold: Field required"),
        ({"mask": {"kind": "outcome_weighted", "low": 2, "high": 1}}, "mask.outcome_weighted: Value error, low is ab"),
        ({"mask": {"kind": "action_only", "begin": []}}, "mask.action_only.begin"),
        ({"mask": {"kind": "full", "threshold": 1}}, "mask.full.threshold: Extra inputs"),
        ({"degenerates": {"loop_turns": 0}}, "degenerates.loop_turns: Input should be greater"),
        ({"degenerates": {"length": 5}}, "degenerates.length: Extra inputs"),
        ({"algorithm": {"overrides": {"turn_credit.weight": -1}}}, "turn_credit.weight: Input should be greater"),
        ({"coalitions": {"players": ["a"]}}, "coalitions.players: Tuple should have at least 2 items"),
        ({"coalitions": {"players": ["a", "b c"]}}, "coalitions.players.1: String should match pattern"),
        ({"coalitions": {"players": ["a", "a"]}}, "a player is named twice"),
        (
            {"coalitions": {"players": list("abcde")}},
            "all 30 coalitions of 5 players, and is for at most 4: choose",
        ),
        ({"coalitions": {"players": ["a", "b"], "method": "two_level"}}, "method two_level needs `manager`"),
        ({"coalitions": {"players": ["a", "b"], "manager": "a"}}, "no other method has one"),
        (
            {"coalitions": {"players": ["a", "b"], "method": "two_level", "manager": "c"}},
            "the manager c is none of the players",
        ),
        (
            {"coalitions": {"players": ["a", "b"]}, "algorithm": {"overrides": {"compare": "roles"}}},
            "with compare `roles` each role has its own reward",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_named_by_its_field_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, **changes)
    assert says in str(caught.value)


TEACHER = {"url": "http://gpu:8000"}
JUDGE = {"url": "http://gpu:8000", "rubric": "right?"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"algorithm": {"name": "distill"}}, "needs an engine: `teacher:"),
        ({"teacher": TEACHER}, "the teacher has nothing to do"),
        ({"teacher": {"url": "gpu:8000"}}, "teacher.url: String should match pattern"),
        (
            {"teacher": TEACHER, "algorithm": {"name": "distill"}, "degenerates": {"identical_rewards": True}},
            "a teacher judges their tokens too",
        ),
        (
            {"teacher": TEACHER, "algorithm": {"name": "dapo", "overrides": {"loss.distillation": {}}}},
            "dynamic_sampling leaves out groups of one reward",
        ),
        (
            {"teacher": TEACHER, "algorithm": {"name": "gmpo", "overrides": {"loss.distillation": {}}}},
            "a teacher judges single tokens",
        ),
        ({"group_judge": JUDGE | {"rounds": 3}}, "group_judge.rounds: Input should be a multiple of 2"),
        ({"group_judge": JUDGE, "data": {"tasks": "tasks.jsonl", "num_samples": 1}}, "set data.num_samples to 2"),
        ({"group_judge": JUDGE, "algorithm": {"name": "remax"}}, "leave out coalitions and remax"),
        ({"group_judge": JUDGE, "coalitions": {"players": ["a", "b"]}}, "leave out coalitions and remax"),
    ],
    ids=str,
)
def test_teachers_and_judges_of_groups_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tmp_path, **changes)
    assert problem in str(caught.value)


def test_where_a_teacher_and_a_judge_answer_is_no_part_of_an_experiment_and_who_they_are_is(tmp_path: Path) -> None:
    def found(**changes: Any) -> str:
        both = {"teacher": TEACHER, "group_judge": JUDGE, "algorithm": {"name": "distill"}} | changes
        return digest_of(read(tmp_path, **both))

    other = "http://other:1"
    assert found() == found(teacher={"url": other}) == found(group_judge=JUDGE | {"url": other})
    changed = (found(teacher=TEACHER | {"model": "m"}), found(group_judge=JUDGE | {"rubric": "short?"}))
    assert len({found(), *changed}) == 3


def test_a_service_of_its_own_takes_what_up_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_NODE__RUN_SLOTS", "5")
    monkeypatch.setenv("GANGLINE_NODE__READY_SLOTS", "7")
    policy = {"temperature": {"override": 1.0}}
    found = read(tmp_path, service={"server": {"port": 8801}, "node": {"run_slots": 3, "sampling": policy}})
    settings = found.service.resolved(found.model, tmp_path / "data")
    assert (settings.server.port, settings.node.run_slots, settings.node.ready_slots) == (8801, 3, 7)
    assert settings.node.sampling == policy
    assert settings.node.engines == ("embedded:smollm2",)
    assert settings.machine.data_dir == tmp_path / "data"
    assert resolved_settings(found)["service"]["node"]["ready_slots"] == 7
    assert digest_of(found) == digest_of(read(tmp_path)), "another service is not another experiment"


def test_another_engine_may_be_named_for_the_service(tmp_path: Path) -> None:
    found = read(tmp_path, service={"node": {"engines": ["http://127.0.0.1:9"]}})
    assert found.service.resolved(found.model).node.engines == ("http://127.0.0.1:9",)


@pytest.mark.parametrize(
    ("service", "problem"),
    [
        ({"node": {"run_slotz": 3}}, "service.node.run_slotz"),
        ({"node": {"sampling": {"temperatur": {"override": 1}}}}, "service.node.sampling"),
        ({"server": {"port": 70_000}}, "service.server.port"),
        (
            {"url": "http://127.0.0.1:8700", "node": {"run_slots": 3}},
            "node.run_slots: of a service that the run starts",
        ),
    ],
    ids=str,
)
def test_a_wrong_setting_of_the_service_is_named(tmp_path: Path, service: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        read(tmp_path, service=service)
    assert problem in str(found.value)
