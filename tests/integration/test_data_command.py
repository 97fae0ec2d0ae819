"""`gangline data` on a data folder with real results and a real database, judged by `datasets` and TRL."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from gangline.domain.conversation import ToolCall
from gangline.domain.errors import Failure, GanglineError, InvalidRequest, NotFound
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.store.sql.tasks import TaskStore
from gangline.tasks.commands.datasets import data as data_command
from support.engines.conversations import Talk, said, user
from support.requirements import need_module
from support.store.recorded import TOOLS, session, session_of, task, write_data

NUM_REPOS, NUM_TASKS = 3, 12

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def reward_of(number: int, sample: int) -> float | None:
    """Of four samples two are good; the tasks of the last repository are never solved, and one sample has no reward."""
    if number % NUM_REPOS == 2:
        return None if sample == 3 else 0.0
    return float(sample % 2 == 0)


def recorded() -> tuple[list[TaskRequest], list[SessionResult]]:
    tasks = [
        task(f"swe-{number:02d}", instance_id=f"repo{number % NUM_REPOS}__{number}", repo=f"repo{number % NUM_REPOS}")
        for number in range(NUM_TASKS)
    ]
    sessions: list[SessionResult] = []
    for number, one in enumerate(tasks):
        for sample in range(4):
            reward = reward_of(number, sample)
            changes: dict[str, Any] = {} if reward is not None else {"outcome": "infra_error"}
            word = "the same" if sample in (0, 2) else None
            text = f"Solve {number}."
            assert one.task_id is not None
            sessions.append(session(one.task_id, sample, reward, instruction=text, word=word, **changes))
    return tasks, sessions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tasks, sessions = recorded()
    write_data(folder, tasks, sessions)
    return folder


def call(data: Path, *arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    data_command.register(app)
    ran = CliRunner().invoke(app, [*map(str, arguments), "--data", str(data)], env={"COLUMNS": "160"})
    if isinstance(ran.exception, GanglineError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran


def made(data: Path, out: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(call(data, *arguments, "--out", out, "--json").stdout)["dataset"]


def loaded(folder: Path, name: str | None = None) -> Any:
    need_module("datasets", "pip install datasets")
    from datasets import load_dataset

    return load_dataset(str(folder), name, cache_dir=str(folder.parent / "cache"))


def test_the_folder_loads_as_messages_and_tools(data: Path, tmp_path: Path) -> None:
    call(data, "--out", tmp_path / "set", "--keep-duplicates")
    splits = loaded(tmp_path / "set")
    rows = [*splits["train"], *splits["test"]]
    assert len(rows) == 2 * 8
    row = min(rows, key=lambda one: one["session_id"])
    assert [one["role"] for one in row["messages"]] == [
        *("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
    ]
    (first,) = row["messages"][2]["tool_calls"]
    assert first["function"] == {"name": "run", "arguments": {"command": "the same 0"}}
    assert row["messages"][2]["reasoning_content"] == "Think of 0."
    assert row["messages"][3]["tool_call_id"] == first["id"]
    assert row["messages"][-1]["content"] == "Done."
    assert row["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "run",
                "description": "Run it.",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        }
    ]
    assert (row["task_id"], row["session_id"], row["instance_id"]) == ("swe-00", "swe-00.0", "repo0__0")
    assert row["metadata"] == {"instance_id": "repo0__0", "repo": "repo0"}
    assert (row["outcome"], row["reward"], row["attempt"]) == ("completed", 1.0, 1)


def test_every_repository_is_in_both_splits_and_no_problem_is(data: Path, tmp_path: Path) -> None:
    call(data, "--out", tmp_path / "set", "--keep-duplicates")
    splits = loaded(tmp_path / "set")
    for split in ("train", "test"):
        assert {row["metadata"]["repo"] for row in splits[split]} == {"repo0", "repo1"}
    problems = [{row["instance_id"] for row in splits[split]} for split in ("train", "test")]
    assert not problems[0] & problems[1]
    assert len(problems[1]) == 2


def test_the_table_and_the_reasons_say_what_became_of_each_session(data: Path, tmp_path: Path) -> None:
    document = made(data, tmp_path / "set")
    assert [
        (one["name"], one["num_instances"], one["num_attempts"], one["num_accepted"]) for one in document["strata"]
    ] == [
        ("repo0", 4, 16, 8),
        ("repo1", 4, 16, 8),
        ("repo2", 4, 16, 0),
    ]
    assert document["reasons"] == {"rejected: reward": 24, "left out: duplicate": 12, "left out: not graded": 4}
    assert sum(one["num_rows"] for one in document["files"]) == 8
    card = (tmp_path / "set" / "README.md").read_text()
    assert "| repo0 | 4 | 16 | 8 | 50.0% |" in card
    assert "| Total | 12 | 48 | 16 | 33.3% |" in card
    assert document["provenance"]["tasks_digest"] in card
    assert document["provenance"]["harnesses"] == {"shell": 48}


def test_the_same_sessions_give_the_same_files(data: Path, tmp_path: Path) -> None:
    first, second = (made(data, tmp_path / name, "--name", "x") for name in ("a", "b"))
    assert first == second
    assert made(data, tmp_path / "a", "--name", "x", "--seed", 1)["files"] != first["files"]


@pytest.mark.parametrize(
    ("arguments", "num_rows"),
    [
        (["swe-00", "swe-01"], 2),
        (["swe-0?", "swe-00"], 7),
        (["swe-00.0"], 1),
        (["--where", "repo=repo0"], 4),
        (["--keep-duplicates", "--per-task", "1"], 8),
        (["--min-reward", "0"], 44 - 12),
        (["--keep-duplicates", "--min-reward", "0"], 44),
        (["--max-turns", "3"], 8),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_chosen(arguments: list[str], num_rows: int, data: Path, tmp_path: Path) -> None:
    assert sum(one["num_rows"] for one in made(data, tmp_path / "set", *arguments)["files"]) == num_rows


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nothing-*"], NotFound),
        (["nothing"], NotFound),
        (["--max-turns", "2"], NotFound),
        (["--resolved"], NotFound),
        (["--outcome", "good"], InvalidRequest),
        (["--where", "repo"], InvalidRequest),
        (["--push", "me/it", "--no-dry-run"], InvalidRequest),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_said(arguments: list[str], error: type[GanglineError], data: Path, tmp_path: Path) -> None:
    with pytest.raises(error):
        call(data, *arguments, "--out", tmp_path / "set")
    call(data, "--out", tmp_path / "set")  # the folder is of use all the same


@pytest.mark.parametrize(
    ("name", "refusal"),
    [("mine.txt", "not empty"), ("messages/mine.txt", "not empty"), ("provenance.json", "holds no dataset")],
)
def test_a_folder_of_something_else_is_left_alone(data: Path, tmp_path: Path, name: str, refusal: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(InvalidRequest, match=refusal):
        call(data, "--out", tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_an_earlier_dataset_stays_where_there_is_no_new_one(data: Path, tmp_path: Path) -> None:
    call(data, "--out", tmp_path / "set")
    before = {path: path.read_bytes() for path in (tmp_path / "set").rglob("*") if path.is_file()}
    with pytest.raises(NotFound):
        call(data, "--max-turns", "2", "--out", tmp_path / "set")
    assert {path: path.read_bytes() for path in (tmp_path / "set").rglob("*") if path.is_file()} == before
    (tmp_path / "set" / ".new" / "tokens").mkdir(parents=True)  # as a killed run leaves it
    call(data, "--out", tmp_path / "set")
    assert not (tmp_path / "set" / "tokens").exists()


def test_several_kinds_are_configurations_of_one_dataset(data: Path, tmp_path: Path) -> None:
    kinds = ("tokens", "preferences", "verdicts", "atif")
    call(data, "--out", tmp_path / "set", *(part for kind in kinds for part in ("--kind", kind)))
    tokens = loaded(tmp_path / "set")["train"]
    assert tokens.column_names[:4] == ["input_ids", "assistant_masks", "logprobs", "versions"]
    row = tokens[0]
    assert sum(row["assistant_masks"]) == 3
    sampled = [logprob for logprob, mask in zip(row["logprobs"], row["assistant_masks"], strict=True) if mask]
    assert sampled == [-1.0] * 3
    pairs = [row for split in loaded(tmp_path / "set", "preferences").values() for row in split]
    assert len(pairs) == 8
    pair = min(pairs, key=lambda one: one["session_id"])
    assert [one["role"] for one in pair["prompt"]] == ["system", "user"]
    assert pair["chosen"][0]["content"] == "the same 0 of it."
    assert pair["rejected"][0]["content"] == "swe-00 1 0 of it."
    assert (pair["session_id"], pair["rejected_session_id"]) == ("swe-00.0", "swe-00.1")
    verdicts = [row for split in loaded(tmp_path / "set", "verdicts").values() for row in split]
    assert Counter((row["accepted"], row["why"]) for row in verdicts) == {(True, ""): 8, (False, "reward"): 24}
    assert not [row for row in verdicts if row["messages"][-1]["role"] != "assistant"]
    document = loaded(tmp_path / "set", "atif")["train"][0]["trajectory"]
    assert (document["schema_version"], document["agent"]["name"]) == ("ATIF-v1.8", "shell")


def test_an_earlier_datasets_files_do_not_stay(data: Path, tmp_path: Path) -> None:
    call(data, "--out", tmp_path / "set", "--kind", "tokens")
    call(data, "--out", tmp_path / "set")
    names = sorted(path.relative_to(tmp_path / "set").as_posix() for path in (tmp_path / "set").rglob("*.*"))
    assert names == ["README.md", "messages/test.parquet", "messages/train.parquet", "provenance.json"]


def test_annotations_choose_the_sessions_of_a_dataset(tmp_path: Path) -> None:
    data = tmp_path / "data"
    tasks, sessions = recorded()
    write_data(data, tasks, sessions)
    with TaskStore(data / "server" / "gangline.db") as store:
        for session_id, verdict, dataset in (
            ("swe-00.0", None, "liked"),  # of reward 1
            ("swe-00.1", "good", "liked"),  # of reward 0
            ("swe-01.0", "bad", "liked"),  # of reward 1
            ("swe-01.1", "bad", "liked"),
            ("swe-01.1", "good", "liked"),  # a second thought
            ("swe-01.1", None, "liked"),
            ("swe-02.0", None, "liked"),  # of reward 0
            ("swe-02.3", "good", "liked"),  # of no reward
            ("swe-03.0", "good", "other"),
        ):
            store.annotate(session_id, {"verdict": verdict, "note": "", "dataset": dataset, "by": "me"})
        store.submit([task("open")])
        store.annotate("open.0", {"verdict": "good", "note": "", "dataset": "liked", "by": "me"})  # it has not ended
    dataset = made(data, tmp_path / "set", "--annotated", "liked", "--test-share", 0)
    assert dataset["reasons"] == {"rejected: annotated as bad": 1, "rejected: reward": 1, "left out: not graded": 1}
    assert sum(one["num_accepted"] for one in dataset["strata"]) == 3
    assert dataset["provenance"]["selection"]["annotated"] == "liked"
    with pytest.raises(NotFound, match="no annotation"):
        made(data, tmp_path / "none", "--annotated", "nobody")
    with pytest.raises(InvalidRequest, match="not both"):
        made(data, tmp_path / "none", "swe-00", "--annotated", "liked")


def test_cheats_and_unresolved_patches_are_rejected(tmp_path: Path) -> None:
    spoiled = Failure(boundary="harness", code="grading_spoiled", message="no", retryable=False)
    sessions = [
        session("t", 0, 1.0, reward_details={"resolved": True}),
        session("t", 1, 1.0, reward_details={"resolved": True, "not_applied": ["conftest.py"]}),
        session("t", 2, 1.0, reward_details={"parts": {"tests": {"resolved": False}}}),
        session("t", 3, 1.0, failure=spoiled),
    ]
    write_data(tmp_path, [task("t")], sessions)
    document = made(tmp_path, tmp_path / "set", "--resolved")
    assert document["reasons"] == {"rejected: cheat": 2, "rejected: not resolved": 1}
    assert made(tmp_path, tmp_path / "set", "--keep-cheats")["files"][0]["num_rows"] == 4


def test_arguments_that_are_no_json_are_kept(tmp_path: Path) -> None:
    talk = Talk()
    talk.turn((user("Go."),), said("", ToolCall("call_0", "run", '{"command": "ls')), tools=TOOLS)
    write_data(tmp_path, [task("t")], [session_of(talk.tree, "t", 0, 1.0)])
    call(tmp_path, "--out", tmp_path / "set")
    (called,) = loaded(tmp_path / "set")["train"][0]["messages"][-1]["tool_calls"]
    assert called["function"]["arguments"] == '{"command": "ls'


def test_a_push_says_first_what_it_would_publish(data: Path, tmp_path: Path) -> None:
    ran = call(data, "--out", tmp_path / "set", "--push", "me/it")
    assert "Would publish to me/it: README.md" in ran.stderr


def test_problems_without_a_name_are_the_same_where_they_say_the_same(tmp_path: Path) -> None:
    """Two runs of one file of tasks: a problem in both splits would be a leak."""
    tasks = [task_saying(f"run{run}-{number}", f"Solve {number}.") for run in range(2) for number in range(6)]
    sessions = [session(str(one.task_id), 0, 1.0, instruction=one.instruction) for one in tasks]
    write_data(tmp_path, tasks, sessions)
    call(tmp_path, "--out", tmp_path / "set", "--test-share", "0.5")
    splits = loaded(tmp_path / "set")
    assert [sorted(Counter(row["messages"][1]["content"] for row in splits[split]).values()) for split in splits] == [
        [2, 2, 2],
        [2, 2, 2],
    ]


def task_saying(task_id: str, instruction: str) -> TaskRequest:
    return task(task_id).model_copy(update={"instruction": instruction})
