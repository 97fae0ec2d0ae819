"""Tasks as people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.cli.tasks.files import parse_tasks, read_tasks, validated
from gangline.cli.tasks.overrides import Overrides
from gangline.domain.errors import InvalidRequest, UnknownPlugin
from gangline.tasks.commands.evals.evaluate import _spec  # pyright: ignore[reportPrivateUsage]

TASK = {"instruction": "go", "agent": {"harness": "shell", "settings": {"command": "true"}}}


def test_json_of_one_task_and_of_many() -> None:
    assert parse_tasks('{"instruction": "a"}', "x") == [{"instruction": "a"}]
    assert parse_tasks('[{"instruction": "a"}, {"instruction": "b"}]', "x") == [
        {"instruction": "a"},
        {"instruction": "b"},
    ]


def test_toml_of_one_task_and_of_many() -> None:
    assert parse_tasks('instruction = "a"\n[agent]\nharness = "shell"', "x.toml") == [
        {"instruction": "a", "agent": {"harness": "shell"}}
    ]
    assert parse_tasks('[[task]]\ninstruction = "a"\n[[task]]\ninstruction = "b"', "x.toml") == [
        {"instruction": "a"},
        {"instruction": "b"},
    ]


@pytest.mark.parametrize("text", ["{", "a b c", "[]", "[1]", ""])
def test_what_holds_no_task_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tasks\.json"):
        validated(parse_tasks(text, "tasks.json")[0], "tasks.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere\.json"):
        read_tasks(str(tmp_path / "nowhere.json"))


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="num_sample: Extra inputs"):
        validated({**TASK, "num_sample": 3}, "x")


def test_an_unknown_harness_brings_the_nearest_one() -> None:
    with pytest.raises(UnknownPlugin, match="Did you mean 'shell'"):
        validated({**TASK, "agent": {"harness": "shel"}}, "x")


def test_a_right_task_is_taken() -> None:
    assert validated(TASK, "x").agent.harness == "shell"


def test_an_object_a_line_is_many_tasks() -> None:
    assert parse_tasks('{"instruction": "a"}\n\n{"instruction": "b"}\n', "x") == [
        {"instruction": "a"},
        {"instruction": "b"},
    ]


SETTINGS: dict[str, dict[str, Any]] = {"native": {"system_prompt": "Be brief."}, "shell": {"command": "true"}}


@pytest.mark.parametrize(
    ("own", "options", "harness", "settings"),
    [
        ("native", ["--harness", "pi"], "pi", {}),
        ("native", ["--harness", "native"], "native", SETTINGS["native"]),
        ("native", ["--command", "false"], "shell", {"command": "false"}),
        ("native", ["--harness", "shell", "--command", "false"], "shell", {"command": "false"}),
        ("shell", ["--command", "false"], "shell", {"command": "false"}),
        ("shell", ["--harness", "native"], "native", {}),
        (None, ["--harness", "pi"], "pi", {}),
        ("native", [], "native", SETTINGS["native"]),
    ],
)
def test_settings_of_another_harness_are_dropped(
    tmp_path: Path, own: str | None, options: list[str], harness: str, settings: dict[str, Any]
) -> None:
    """By `submit` and by `eval` alike: they are another program's."""
    agent = {} if own is None else {"agent": {"harness": own, "settings": SETTINGS[own], "grace_seconds": 1}}
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"instruction": "go", **agent}))
    done = CliRunner().invoke(build_app(), ["submit", str(path), *options, "--dry-run"])
    (task,) = json.loads(done.stdout)
    assert (task["agent"]["harness"], task["agent"].get("settings", {})) == (harness, settings)
    assert task["agent"].get("grace_seconds") == (None if own is None else 1)
    if "--command" not in options:
        spec = _spec(str(path), read_tasks(str(path)), 1, tuple(options[1:]), None, None)
        assert spec.tasks[0]["agent"].get("settings", {}) == settings


@pytest.mark.parametrize(
    ("field", "option"),
    [
        *(("agent", {"harness": "shell"}), ("agent", {"command": "true"}), ("agent", {"allow_no_model_call": True})),
        *(("agent.settings", {"command": "true"}), ("runtime", {"runtime": "sandbox"})),
    ],
)
@pytest.mark.parametrize("value", ["pi", ["pi"], 3])
def test_a_field_that_is_no_table_is_named_where_an_option_goes_into_it(
    field: str, option: dict[str, Any], value: object
) -> None:
    body = {"agent": {"harness": "shell", "settings": value}} if field == "agent.settings" else {field: value}
    given: Any = {field.name: None for field in msgspec.structs.fields(Overrides)} | option
    with pytest.raises(InvalidRequest, match=f"^{field} must be a table of fields"):
        Overrides(**given).applied_to(body)
