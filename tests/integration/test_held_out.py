"""What measures is never trained on: sessions of held-out tasks, on every road from a record to a trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from gangline.cli.results import export as export_command
from gangline.cli.results.export_options import RowFormat
from gangline.domain.errors import GanglineError, InvalidGroup, InvalidRequest, NotFound
from gangline.domain.session import SessionResult
from gangline.domain.task import TaskRequest
from gangline.node.sessions.attempt import Attempt
from gangline.server.run import serving
from gangline.store.sql.tasks import TaskStore
from gangline.tasks.commands.datasets import data as data_command
from gangline.tasks.datasets.kinds import Kind
from gangline.tasks.evals.run import EvaluationRun, EvaluationSpec
from gangline.train.collecting.collector import PlainCollector, ReplenishingCollector
from gangline.train.collecting.groups import Group, judge_group
from gangline.train.run.evaluation import Evaluation, require_disjoint
from gangline.train.trainers.contract import rows_of
from gangline.wire.client.server import ServerClient
from support.node.attempt import lease_of, node_parts
from support.requirements import need_module
from support.service.running import FakeNode, any_plugin
from support.store.recorded import session, task, write_data
from support.training.samples import session as sampled
from support.training.service import FakeService

TEMPLATES = Path(__file__).parents[2] / "src" / "gangline" / "cli" / "starting" / "templates"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GANGLINE_SERVER", "GANGLINE_DATA", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A task to train on, one that a run measured, and one that a person marked; each with good and bad sessions."""
    tasks = [task("agent-1", repo="a"), task("agent-evaluation-1", repo="a"), task("agent-mine", repo="a")]
    marked = [tasks[0], *(one.model_copy(update={"held_out": True}) for one in tasks[1:])]
    sessions = [
        session(str(one.task_id), number, float(number % 2), held_out=one.held_out)
        for one in marked
        for number in range(4)
    ]
    write_data(tmp_path / "data", marked, sessions)
    return tmp_path / "data"


def call(data: Path, *arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    for module in (data_command, export_command):
        module.register(app)
    ran = CliRunner().invoke(app, [*map(str, arguments), "--data", str(data)], env={"COLUMNS": "200"})
    if isinstance(ran.exception, GanglineError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran


def texts_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            yield json.dumps(pq.read_table(path).to_pylist(), default=str)  # pyright: ignore[reportUnknownMemberType]
        elif path.is_file() and path.name not in ("README.md", "provenance.json"):
            yield path.read_bytes().decode(errors="replace")


NAMES = [(), ("*",), ("agent-*",), ("agent-1", "agent-evaluation-1", "agent-mine.1")]


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
@pytest.mark.parametrize("kind", Kind)
def test_no_kind_of_a_dataset_has_them_however_they_are_named(
    kind: Kind, names: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    shown = call(data, "data", *names, "--kind", kind, "--test-share", 0, "--out", tmp_path / "set").stdout
    text = "\n".join(texts_in(tmp_path / "set"))
    assert "agent-1.1" in text
    assert "agent-evaluation" not in text
    assert "agent-mine" not in text
    num = 5 if "agent-mine.1" in names else 8
    assert f"{num} left out: held out; --held-out include" in shown
    card = (tmp_path / "set" / "README.md").read_text()
    assert f"| left out: held out | {num} |" in card
    assert '"held_out":false' in card
    assert "| a | 1 | 4 | 2 | 50.0% |" in card, "they do not count as attempts that were not accepted"


@pytest.mark.parametrize("names", NAMES[1:], ids=" ".join)
@pytest.mark.parametrize("row_format", RowFormat)
def test_no_form_of_an_export_has_them_however_they_are_named(
    row_format: RowFormat, names: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    options = ("--format", row_format, "--name", "x", "--out", tmp_path / "rows")
    shown = call(data, "export", *names, *options).stdout
    text = "\n".join(texts_in(tmp_path / "rows"))
    assert "agent-1.1" in text
    assert "agent-evaluation" not in text
    assert "agent-mine" not in text
    num = 5 if "agent-mine.1" in names else 8
    assert f"of 4 sessions; {num} left out: held out; --held-out include" in shown
    assert json.loads(call(data, "export", *names, *options, "--json").stdout)["num_held_out"] == num


def test_they_are_there_when_they_are_asked_for(data: Path, tmp_path: Path) -> None:
    include = ("--held-out", "include")
    shown = call(data, "data", *include, "--out", tmp_path / "set").stdout
    call(data, "export", "*", *include, "--format", "jsonl", "--out", tmp_path / "rows")
    for folder in ("set", "rows"):
        assert "agent-evaluation-1.1" in "\n".join(texts_in(tmp_path / folder))
    assert "held out" not in shown


def test_where_there_is_nothing_else_no_file_is_written_and_the_way_is_shown(data: Path, tmp_path: Path) -> None:
    for command in (("data", "agent-mine"), ("export", "agent-mine", "agent-evaluation-1.0")):
        with pytest.raises(NotFound, match="--held-out include"):
            call(data, *command, "--out", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_other_filters_are_counted_first(data: Path, tmp_path: Path) -> None:
    options = ("--min-reward", 1, "--format", "jsonl", "--out", tmp_path / "rows")
    assert "; 4 left out: held out" in call(data, "export", "*", *options).stdout


def test_an_annotation_does_not_bring_them_in(data: Path, tmp_path: Path) -> None:
    with TaskStore(data / "server" / "gangline.db") as store:
        for session_id in ("agent-1.0", "agent-mine.0"):
            store.annotate(session_id, {"call": None, "verdict": "good", "note": "", "dataset": "liked", "by": "me"})
    shown = call(data, "data", "--annotated", "liked", "--test-share", 0, "--out", tmp_path / "set").stdout
    assert "1 left out: held out" in shown
    assert "agent-mine" not in "\n".join(texts_in(tmp_path / "set"))


def test_the_mark_stays_with_the_session_where_the_tasks_are_in_another_database(data: Path, tmp_path: Path) -> None:
    (data / "server" / "gangline.db").unlink()
    call(data, "export", "*", "--format", "jsonl", "--out", tmp_path / "rows")
    assert "agent-evaluation" not in "\n".join(texts_in(tmp_path / "rows"))


class Keeping(FakeService):
    def __init__(self, **rewards: tuple[float | None, ...]) -> None:
        super().__init__(**rewards)
        self.bodies: list[dict[str, Any]] = []

    async def submit(self, task: Any) -> Any:
        self.bodies.append(dict(task))
        return await super().submit(task)


async def test_what_a_run_measures_on_is_marked() -> None:
    service = Keeping(**{"run-evaluation-000000-v000000-0000": (1.0, 0.0)})
    await Evaluation("run", [{"instruction": "add"}], service, num_samples=2, retry_s=0).measure(0, 0, 0.0)
    assert [body["held_out"] for body in service.bodies] == [True]


async def test_what_an_evaluation_runs_is_marked(tmp_path: Path) -> None:
    spec = EvaluationSpec(name="e", tasks=({"instruction": "add"},), names=("t0",), num_samples=2)
    service = Keeping(**{f"e-{spec.digest}-000000": (1.0, 0.0)})
    await EvaluationRun(service, spec, tmp_path, retry_s=0).run()
    assert [body["held_out"] for body in service.bodies] == [True]


@pytest.mark.parametrize("template", ["base", "math", "swe", "claude-code"])
def test_held_out_tasks_of_a_new_folder_are_marked(template: str, tmp_path: Path) -> None:
    for source in ("base", template):
        for path in (TEMPLATES / source).glob("*.py"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    subprocess.run([sys.executable, "tasks.py", "3", "2"], cwd=tmp_path, check=True)
    for name, marks in (("tasks.jsonl", [False] * 3), ("held_out.jsonl", [True] * 2)):
        tasks = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [one["held_out"] for one in tasks] == marks


@pytest.mark.parametrize("as_request", [False, True])
@pytest.mark.parametrize("collector", [PlainCollector, ReplenishingCollector])
async def test_no_collector_takes_one(collector: Any, as_request: bool) -> None:
    """Own trainer, TRL, slime, miles, NeMo RL, prime-rl and SkyRL have their groups from them."""
    body = {"task_id": "t1", "instruction": "add", "agent": {"harness": "shell"}, "held_out": True}
    given = TaskRequest.model_validate(body) if as_request else body
    service = FakeService()
    options: dict[str, Any] = {} if collector is PlainCollector else {"num_in_flight": 1}
    async with collector(service, iter([given]), **options) as collecting:
        with pytest.raises(InvalidRequest, match="t1 is held out"):
            await collecting.collect(1)
    assert service.submitted == []


def test_what_verl_validates_on_is_marked_and_it_trains_on_no_marked_task() -> None:
    need_module("tensordict", "make .venv/.dev")
    from gangline.train.trainers.own_engine import Sampling
    from gangline.train.trainers.verl.prompts import Prompt, TaskMaker
    from gangline.train.trainers.verl.settings import GanglineSettings

    tasks, sampling = (
        TaskMaker(GanglineSettings(url="http://127.0.0.1:1")),
        Sampling(temperature=1, top_p=1, top_k=0, max_tokens=9),
    )

    def prompt(partition: Any, **fields: Any) -> Prompt:
        columns = {"gangline_task": json.dumps({"instruction": "add", **fields})}
        return Prompt(uid="u", partition=partition, global_steps=1, num_samples=2, columns=columns)

    for partition in ("train", "val"):
        assert tasks.task(prompt(partition), "u", 2, sampling)["held_out"] is (partition == "val")
    assert tasks.task(prompt("val", held_out=True), "u", 2, sampling)["held_out"] is True
    with pytest.raises(InvalidRequest, match="u is held out"):
        tasks.task(prompt("train", held_out=True), "u", 2, sampling)


def test_no_group_of_them_reaches_a_trainer() -> None:
    """However it was collected."""
    held = [msgspec.structs.replace(sampled(f"t1.{number}", float(number)), held_out=True) for number in range(2)]
    with pytest.raises(InvalidGroup, match="it measures"):
        judge_group("t1", held, 2)
    with pytest.raises(InvalidGroup, match="it measures"):
        rows_of(Group("t1", tuple(held)), 2)


def test_a_run_refuses_to_train_on_them() -> None:
    tasks = [{"instruction": "add", "agent": {"harness": "shell"}, "held_out": held} for held in (False, True)]
    with pytest.raises(InvalidRequest, match="task 2 of those to train on is held out"):
        require_disjoint(tasks, [])


@pytest.mark.parametrize("held_out", [False, True])
async def test_a_node_marks_the_result(tmp_path: Path, held_out: bool) -> None:
    async with node_parts(tmp_path) as parts:
        result = await Attempt(lease_of(held_out=held_out), parts).live()
    assert (result.outcome, result.held_out) == ("completed", held_out)


@pytest.fixture
def parent() -> SessionResult:
    return session("t", 0, 1.0, held_out=True)


async def test_a_fork_is_like_its_parent(
    parent: SessionResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.server.routes.forks.why_not_forkable", Mock(return_value=None))
    async with (
        serving(data_dir=tmp_path, control_token="secret", check_task=any_plugin) as running,
        ServerClient(running.url, "secret") as client,
    ):
        agent = {"harness": "shell", "settings": {"command": "true"}}
        await client.submit({"task_id": "t", "instruction": "Fix it.", "agent": agent, "held_out": True})
        node = FakeNode(client)
        (lease,) = await node.lease()
        await client.post_result(msgspec.structs.replace(parent, fence=lease.fence, node_id=node.node_id))
        forked = await client.fork("t.0", turn=1)
        assert (await client.task(forked.task_id)).request["held_out"] is True
