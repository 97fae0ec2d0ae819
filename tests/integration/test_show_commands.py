"""`show`, `audit` and `export` on a data folder with real result files, and on a tiny real model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from gangline.cli.results import agent_logs, audit, export, show
from gangline.cli.results.records import Records, ServerRecords, find_results, open_records
from gangline.domain.completion import CompletionTree
from gangline.domain.errors import GanglineError, InvalidRequest, NotFound, UnknownPlugin
from gangline.domain.session import SessionResult
from gangline.domain.tokens import encode_msgpack
from gangline.rows.builders.prefix_merging import PrefixMergingBuilder, PrefixMergingConfig
from gangline.rows.builders.tree import TreeBuilder
from gangline.rows.rows import read_jsonl, rows_of
from gangline.rows.shared_prefixes import with_whole_prompts
from gangline.server.run import serving
from gangline.serving.embedded.scoring import score_logprobs
from gangline.store.results.files import ResultStore
from gangline.wire.client.server import ServerClient
from support.engines.models import reference_model, write_tiny_model
from support.requirements import need_module
from support.service.running import FakeNode, any_plugin, request
from support.store.recorded import session, task, write_data
from support.strategies import session_result

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    save(tmp_path, session_result(session_id="task-1.2"), session_result(session_id="task-1.10"))
    return tmp_path


def save(data: Path, *results: SessionResult) -> None:
    store = ResultStore(data / "server" / "results")
    store.prepare()
    for result in results:
        store.save(result)


def call(data: Path, *arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    for module in (show, agent_logs, audit, export):
        module.register(app)
    result = CliRunner().invoke(app, [*arguments, "--data", str(data)], env={"COLUMNS": "160"})
    if isinstance(result.exception, GanglineError):
        raise result.exception
    return result


def test_a_task_is_shown_in_the_order_of_its_samples(data: Path) -> None:
    lines = call(data, "show", "task-1").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["task-1.2", "task-1.10"]


def test_a_session_is_shown_with_its_tokens(data: Path) -> None:
    shown = call(data, "show", "task-1.2", "--tokens", "--trace", "0").stdout
    assert "┃10 11 2 7 1 ┃12 2" in shown
    assert "trace 1" not in shown


def test_the_last_attempt_is_the_one_that_counts(data: Path) -> None:
    save(data, session_result(session_id="task-1.2", attempt=2, reward=1.0))
    assert json.loads(call(data, "show", "task-1.2", "--json").stdout)["attempt"] == 2


def test_a_picture_is_drawn_on_demand(data: Path, tmp_path: Path) -> None:
    call(data, "show", "task-1.2", "--picture", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["show", "nothing"], NotFound),
        (["show", "../etc"], InvalidRequest),
        (["show", "*"], InvalidRequest),
        (["show", "task-1.2", "--trace", "9"], NotFound),
        (["show", "task-1", "--tokens"], InvalidRequest),
        (["show", "task-1.2", "--tokens", "--tokenizer", "/no/such/folder"], NotFound),
        (["audit", "task-1", "--model", "/no/such/folder"], NotFound),
    ],
)
def test_what_is_not_there_is_said(arguments: list[str], error: type[GanglineError], data: Path) -> None:
    with pytest.raises(error):
        call(data, *arguments)


def test_rows_are_exported_for_all_sessions_of_a_task(data: Path, tmp_path: Path) -> None:
    answer = json.loads(call(data, "export", "task-1", "--format", "jsonl", "--out", str(tmp_path), "--json").stdout)
    assert (answer["num_rows"], answer["num_sessions"]) == (8, 2)
    rows = list(read_jsonl(Path(answer["path"])))
    expected = rows_of(session_result(session_id="task-1.2")) + rows_of(session_result(session_id="task-1.10"))
    assert list(map(encode_msgpack, rows)) == list(map(encode_msgpack, expected))


def test_what_a_crash_left_unfinished_is_no_task(data: Path, tmp_path: Path) -> None:
    (data / "server" / "results" / ".incoming" / "half").write_bytes(b"")
    answer = json.loads(call(data, "export", "*", "--format", "jsonl", "--out", str(tmp_path), "--json").stdout)
    assert answer["num_sessions"] == 2


@pytest.mark.parametrize("row_format", ["parquet", "msgpack"])
def test_rows_are_exported_in_every_format(row_format: str, data: Path, tmp_path: Path) -> None:
    call(data, "export", "task-1", "--format", row_format, "--out", str(tmp_path / "rows"))
    assert (tmp_path / "rows" / f"task-1.{row_format}").stat().st_size > 0


def test_sessions_are_exported_as_documents_for_harbor(data: Path, tmp_path: Path) -> None:
    need_module("harbor", "make .venv/.dev")
    from harbor.utils.trajectory_validator import TrajectoryValidator

    arguments = ["--format", "atif", "--out", str(tmp_path), "--agent", "my-agent", "--json"]
    answer = json.loads(call(data, "export", "task-1", *arguments).stdout)
    assert (answer["num_documents"], answer["num_sessions"]) == (2, 2)
    files = sorted(Path(answer["path"]).iterdir())
    assert [file.name for file in files] == ["task-1.10.json", "task-1.2.json"]
    for file in files:
        validator = TrajectoryValidator()
        assert validator.validate(file), validator.get_errors()
        assert json.loads(file.read_text())["agent"]["name"] == "my-agent"


@pytest.mark.parametrize("whole", [False, True])
def test_rows_of_a_tree_are_exported_shared_or_whole(whole: bool, tmp_path: Path) -> None:
    result = session_result()
    built = TreeBuilder().build(CompletionTree(result.completions), session_id="session-1", task_id="task-1")
    save(tmp_path, msgspec.structs.replace(result, trajectory=built))
    options = ["--whole-prompts"] if whole else []
    call(tmp_path, "export", "task-1", "--format", "jsonl", "--out", str(tmp_path), *options)
    rows = list(read_jsonl(tmp_path / "task-1.jsonl"))
    assert [row.shared_prefix is None for row in rows] == [True, whole, whole, whole]
    assert [row.prompt_ids.tolist() for row in with_whole_prompts(rows)] == [
        row.prompt_ids.tolist() for row in rows_of(result)
    ]
    assert json.loads(call(tmp_path, "audit", "task-1", "--json").stdout)["ok"]
    assert json.loads(call(tmp_path, "audit", "task-*", "--json").stdout)["ok"]


def test_exact_rows_pass_the_audit(data: Path) -> None:
    answer = call(data, "audit", "task-1", "--json")
    document = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert document["ok"]
    assert document["report"]["num_sessions"] == 2
    assert document["report"]["classes"]["exact_stitched"] == {"turns": 4, "tokens": 10}


def corrupted() -> SessionResult:
    result = session_result(session_id="task-1.3")
    assert result.trajectory is not None
    first, *rest = result.trajectory.traces
    forged = msgspec.structs.replace(first, response_ids=first.response_ids[::-1].copy())
    trajectory = msgspec.structs.replace(result.trajectory, traces=(forged, *rest))
    return msgspec.structs.replace(result, trajectory=trajectory)


def test_a_violation_is_told_and_is_exit_code_1(data: Path) -> None:
    save(data, corrupted())
    answer = call(data, "audit", "task-1")
    assert answer.exit_code == 1
    assert "session-1.t0, c0000: the ids are not the sampled ones" in answer.stdout


def test_nothing_to_audit_is_not_a_pass(tmp_path: Path) -> None:
    save(tmp_path, session_result(trajectory=None))
    with pytest.raises(NotFound, match="nothing to audit"):
        call(tmp_path, "audit", "task-1")


def test_sessions_without_rows_are_nothing_to_audit(tmp_path: Path) -> None:
    built = PrefixMergingBuilder(PrefixMergingConfig()).build(CompletionTree(()), session_id="s", task_id="task-1")
    save(tmp_path, session_result(trajectory=built, completions=()))
    with pytest.raises(NotFound, match="1 sessions have no rows"):
        call(tmp_path, "audit", "task-1")


def test_rows_without_a_trainable_token_prove_nothing(tmp_path: Path) -> None:
    result = session_result()
    assert result.trajectory is not None
    aborted = (result.trajectory.traces[3],)
    built = msgspec.structs.replace(result.trajectory, traces=aborted)
    save(tmp_path, msgspec.structs.replace(result, trajectory=built))
    answer = call(tmp_path, "audit", "task-1")
    assert answer.exit_code == 1
    assert "nothing was proved" in answer.stdout
    assert "✓" not in answer.stdout


def test_an_agents_output_and_files_are_printed_without_their_control_characters(tmp_path: Path) -> None:
    kept = {"harness.stdout": b"\x1b[2Jbegin\n\tindented\n", "harness.stderr": b"", "patch.diff": b"+\x00\n"}
    save(tmp_path, session_result(artifacts=kept))
    answer = call(tmp_path, "logs", "session-1")
    assert answer.stdout.splitlines() == ["stdout", "?[2Jbegin", "    indented", "stderr  (nothing)"]
    assert "patch.diff" in answer.stderr
    assert call(tmp_path, "logs", "session-1", "patch.diff").stdout_bytes == kept["patch.diff"]
    assert (
        json.loads(call(tmp_path, "logs", "session-1", "--json").stdout)["harness.stdout"]
        == "\x1b[2Jbegin\n\tindented\n"
    )
    with pytest.raises(NotFound, match=r"patch\.diff"):
        call(tmp_path, "logs", "session-1", "other")
    with pytest.raises(InvalidRequest, match="session-1"):
        call(tmp_path, "logs", "task-1")


def recorded_by(folder: Path, **how: str) -> SessionResult:
    """`session_result` as if the model in `folder` had sampled it: log-probs under each call's own prompt."""
    model = reference_model(folder)
    result = session_result(session_id="task-1.2", **how)
    before = CompletionTree(result.completions)
    scored = [
        msgspec.structs.replace(
            completion,
            logprobs=score_logprobs(model, before.context_ids(completion).tolist(), 0.7)[
                -len(completion.sampled_ids) :
            ].numpy(),
        )
        for completion in result.completions
    ]
    builder = PrefixMergingBuilder(PrefixMergingConfig.model_validate(how))
    built = builder.build(CompletionTree(scored), session_id="task-1.2", task_id="task-1")
    return msgspec.structs.replace(result, completions=tuple(scored), trajectory=built)


def test_recomputed_logprobs_of_exact_rows_agree_and_of_spliced_rows_need_not(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    result = recorded_by(folder, on_divergence="splice")
    save(tmp_path, result)
    document = json.loads(call(tmp_path, "audit", "task-1", "--model", str(folder), "--json").stdout)
    assert document["ok"]
    assert document["logprobs"]["first"]["max"] < 1e-4
    assert document["logprobs"]["exact_stitched"]["max"] < 1e-4
    assert document["logprobs"]["spliced"]["mean"] > 1e-2


def test_recomputed_logprobs_of_a_tree_agree(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    result = recorded_by(folder)
    built = TreeBuilder().build(CompletionTree(result.completions), session_id="task-1.2", task_id="task-1")
    save(tmp_path, msgspec.structs.replace(result, trajectory=built))
    document = json.loads(call(tmp_path, "audit", "task-1", "--model", str(folder), "--json").stdout)
    assert document["ok"]
    assert document["logprobs"]["split"]["max"] < 1e-4
    assert "4 prompt ids, after 14 ids of task-1.2.t0" in call(tmp_path, "show", "task-1.2").stdout


def test_the_wrong_model_fails_the_audit(tmp_path: Path) -> None:
    save(tmp_path, recorded_by(write_tiny_model(tmp_path / "model")))
    other = write_tiny_model(tmp_path / "other", seed=1)
    answer = call(tmp_path, "audit", "task-1", "--model", str(other))
    assert answer.exit_code == 1
    assert "is this the model, and the version, that sampled them?" in " ".join(answer.stdout.split())


async def test_results_are_read_from_a_server_that_is_not_on_this_machine(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url) as client,
    ):
        await client.submit(request("task-1", num_samples=2))
        records = open_records(None, running.url)
        assert isinstance(records, ServerRecords)
        with pytest.raises(NotFound, match="has not ended yet"):
            await asyncio.to_thread(records.session, "task-1.0")
        node = FakeNode(client)
        await node.finish(await node.lease())
        assert [result.session_id for result in await found(records, "task-1")] == ["task-1.0", "task-1.1"]
        assert [result.reward for result in await found(records, "task-1.1")] == [1.0]
        with pytest.raises(NotFound, match="no result of a task or session 'task-9'"):
            await found(records, "task-9")


async def found(records: Records, name: str) -> list[SessionResult]:
    return await asyncio.to_thread(lambda: list(find_results(records, name)))


@pytest.fixture
def several(tmp_path: Path) -> Path:
    tasks = [task("swe-1", repo="a"), task("swe-2", repo="b"), task("other", repo="a")]
    sessions = [session(str(one.task_id), number, float(number)) for one in tasks for number in range(2)]
    write_data(tmp_path, tasks, sessions)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sessions"),
    [
        (["swe-*"], ["swe-1.0", "swe-1.1", "swe-2.0", "swe-2.1"]),
        (["swe-2", "swe-*", "other.1"], ["swe-2.0", "swe-2.1", "swe-1.0", "swe-1.1", "other.1"]),
        (["*", "--where", "repo=a"], ["other.0", "other.1", "swe-1.0", "swe-1.1"]),
        (["*", "--min-reward", "1"], ["other.1", "swe-1.1", "swe-2.1"]),
        (["*", "--outcome", "agent_timeout"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_many_tasks_are_exported_at_once(
    arguments: list[str], sessions: list[str], several: Path, tmp_path: Path
) -> None:
    call(several, "export", *arguments, "--format", "jsonl", "--out", str(tmp_path))
    assert [row.session_id for row in read_jsonl(tmp_path / "rows.jsonl")] == sessions


def test_a_pattern_without_a_task_is_an_error(several: Path) -> None:
    with pytest.raises(NotFound, match="no-"):
        call(several, "export", "no-*", "--format", "jsonl")


@pytest.mark.parametrize("builder", ["per_request", '{"strategy": "per_request", "strict": true}'])
def test_rows_are_built_anew_with_the_rewards_they_had(builder: str, several: Path, tmp_path: Path) -> None:
    call(several, "export", "swe-1", "--format", "jsonl", "--out", str(tmp_path), "--builder", builder)
    rows = list(read_jsonl(tmp_path / "swe-1.jsonl"))
    assert [(row.session_id, row.builder, row.reward) for row in rows] == [
        *[("swe-1.0", "per_request", 0.0)] * 3,
        *[("swe-1.1", "per_request", 1.0)] * 3,
    ]


@pytest.mark.parametrize("builder", ["per_reqest", "{", '{"strategy": "tree", "colour": 1}'])
def test_a_builder_that_is_none_is_refused(builder: str, several: Path) -> None:
    with pytest.raises((InvalidRequest, UnknownPlugin)):
        call(several, "export", "swe-1", "--builder", builder)


def test_conversations_are_exported_as_openai_messages(several: Path, tmp_path: Path) -> None:
    answer = call(several, "export", "swe-*", "--format", "messages", "--out", str(tmp_path), "--json")
    assert json.loads(answer.stdout)["num_conversations"] == 4
    lines = [json.loads(line) for line in (tmp_path / "rows.messages.jsonl").read_text().splitlines()]
    assert [line["session_id"] for line in lines] == ["swe-1.0", "swe-1.1", "swe-2.0", "swe-2.1"]
    *_, result, last = lines[1]["messages"]
    assert result == {"role": "tool", "content": "output 1", "tool_call_id": "call_1"}
    assert last == {"role": "assistant", "content": "Done."}
    assert (lines[1]["reward"], lines[1]["tools"][0]["function"]["name"]) == (1.0, "run")


def test_why_a_session_has_no_reward_is_text(tmp_path: Path) -> None:
    found = {"why": "tests fail", "output": "E  assert 1 == 2\nFAILED a\x1b[2J"}
    details = {"parts": {"tests": found}, "failing": ["a", "b"]}
    save(tmp_path, session_result(reward_details=details, artifacts={"grade.txt": b"1 of 2\n"}))
    shown = call(tmp_path, "show", "session-1").stdout
    grading = shown[shown.index("grading") : shown.index("trace 0")]
    assert [line.rstrip() for line in grading.splitlines()] == [
        "grading",
        "  parts.tests.why: tests fail",
        "  parts.tests.output:",
        "    E  assert 1 == 2",
        "    FAILED a?[2J",
        "  failing:",
        "    a",
        "    b",
        "kept files, by `gangline logs session-1 FILE`: grade.txt",
        "",
    ]
    document = json.loads(call(tmp_path, "show", "session-1", "--json").stdout)
    assert document["artifacts"] == {"grade.txt": "1 of 2\n"}
    assert document["reward_details"] == details
