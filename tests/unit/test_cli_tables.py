"""Every table of the command line, in terminals of three widths and in a pipe: ids, numbers and paths stay whole."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

import gangline
from gangline.cli.commands import COMMANDS, load_command
from gangline.cli.machine import config, doctor, harness, harness_check, image
from gangline.cli.machine.checks import Check
from gangline.cli.results import audit, drift, session_view
from gangline.cli.service import actions, backend, drain, gate, tokens
from gangline.cli.tasks import submit
from gangline.cli.terminal import views
from gangline.cli.terminal.output import console
from gangline.cli.terminal.tables import Column, FactTable, prose
from gangline.domain.errors import Failure
from gangline.domain.node_views import BackendView, GateState, NodeStatus
from gangline.domain.session import SessionResult
from gangline.domain.tenancy import TenantView, TokenView, UsageRow
from gangline.domain.views import ServiceStatus, SessionView, TaskSummary, TaskView
from gangline.domain.weight_updates import GateUpdate
from gangline.rows.drift import DriftReport
from gangline.sandbox.images.shelf import ImageRecord
from gangline.store.audit import Action
from gangline.tasks.commands import benchmarks, check_rows, preset, task_files
from gangline.tasks.commands.datasets import data
from gangline.tasks.commands.evals import evaluate, regrade
from gangline.tasks.commands.evals.view import comparison_table
from gangline.tasks.evals.comparison import compare_reports
from gangline.tasks.evals.records import SessionRecord
from gangline.tasks.evals.report import make_report
from gangline.train.commands import demo, dry_run, runs, train
from gangline.train.commands.view import reward_chart
from gangline.train.run.dry_run import SpreadReport
from gangline.train.runs.records import EvaluationRecord, StepRecord
from gangline.train.runs.store import Comparison, RunSummary
from support.cli_output import drawn

WIDTHS = (60, 80, 120)
ID = "my-agent-evaluation-3f2a9c81d04e-000012.run2.11"
PATH = "/work/data/gangline/evals/my-agent/very-long-folder/report.json"
URL = "http://node-17.cluster.example.org:38089"
NUMBER = 1234567890

Print = Callable[[pytest.MonkeyPatch], None]


def filled(kind: Any) -> Any:
    """A value of this type whose texts, numbers and lists are as long as they come."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return kind(**{field: _filled_field(field, hints[field]) for field in kind.__struct_fields__})
    if origin is Literal:
        return max(inner, key=len)
    if origin in (types.UnionType, typing.Union):
        return filled(inner[0])
    if origin is tuple and inner[-1] is not Ellipsis:
        return tuple(map(filled, inner))
    if origin in (tuple, list):
        return typing.cast("Any", origin)([filled(inner[0]), filled(inner[0])])
    if origin is dict:
        return {filled(inner[0]): filled(inner[1])}
    return {str: ID, int: NUMBER, float: 1234567.5, bool: True, Any: ID}[kind]


def _filled_field(name: str, kind: Any) -> Any:
    if name == "message":
        return f"the agent exited with 1; its log is {PATH}: no such file, look at {URL} for more of it"
    if name in ("request", "settings", "metadata", "backends", "artifacts", "reward_details"):
        return () if name == "backends" else {}
    if name == "url":
        return URL
    if name in ("folder", "image"):
        return PATH
    return 1764500000.0 if name in ("at", "ended_at", "built_at") else filled(kind)


def nodes(module: Any, command: Callable[[], None], answer: Any) -> Print:
    async def ask_nodes(*_: Any) -> dict[str, Any]:
        return {URL: answer, f"{URL}/2": answer}

    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "ask_nodes", ask_nodes)
        command()

    return run


def answered(command: Callable[[], None], answer: Any) -> Print:
    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokens, "_ask", lambda *_: answer)
        command()

    return run


def shown(make: Callable[[], Any]) -> Print:
    return lambda _: console().print(make())


def printed(function: Callable[..., None], *arguments: Any, **named: Any) -> Print:
    return lambda _: function(*arguments, **named)


def _images(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = types.SimpleNamespace(records=lambda: [filled(ImageRecord)])
    monkeypatch.setattr(image, "_builder", lambda: types.SimpleNamespace(shelf=shelf))
    image.list_()


def _config(_: pytest.MonkeyPatch) -> None:
    origin = types.SimpleNamespace(file=PATH)
    line = {"key": "node.engine_options", "value": {"tokenizer": PATH, "url": URL}, "where": f"$GANGLINE_{NUMBER}"}
    config._print(origin, [line, {**line, "value": ID, "where": None}])  # pyright: ignore[reportPrivateUsage, reportArgumentType]


def _tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {
        "task_id": ID,
        "instruction": "x",
        "agent": {"harness": "mini_swe_agent"},
        "runtime": {"backend": "apptainer", "image": PATH},
        "metadata": {"source": "princeton-nlp/SWE-bench_Verified"},
    }
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(task)))
    task_files.list_("-")


def _evaluation() -> Any:
    records = [
        SessionRecord(
            session_id=f"{ID}.{sample}", task=f"{ID} ({name})", sample=sample, outcome="agent_timeout", reward=reward,
            boundary="agent", code="time_is_up", turns=NUMBER, prompt_tokens=NUMBER, sampled_tokens=NUMBER,
            seconds=1234.5, metadata={"repo": ID},
        )
        for name in ("claude_code", "qwen_code")
        for sample, reward in enumerate((0.0, 0.125, None, 1.0))
    ]  # fmt: skip
    return make_report(ID, records, num_samples=4, ks=(1, 4), by=("repo",))


def _comparison() -> FactTable:
    first, second = (msgspec.structs.replace(_evaluation(), name=f"my-agent-{when}") for when in ("before", "after"))
    gains = {task: mean + change for (task, mean), change in zip(second.tasks.items(), (0.1, -0.1), strict=True)}
    return comparison_table(compare_reports(first, msgspec.structs.replace(second, tasks=gains)))


AUDIT: dict[str, Any] = {
    "report": dict.fromkeys(
        ("num_sessions", "num_traces", "num_completions", "num_sampled_tokens", "num_trained_tokens"), NUMBER
    )
    | {"classes": {"spliced_exact": {"turns": NUMBER, "tokens": NUMBER}}, "dropped": {"turns": 0, "tokens": 0}}
    | {"num_unshown": 0, "renderings": {}, "left_out": {}},
    "logprobs": {"spliced_exact": dict.fromkeys(("mean", "p50", "p99", "max"), 1.5e-7)},
    "not_comparable": {},
    "problems": [],
    "ok": True,
}
REGRADED = types.SimpleNamespace(
    refused={},
    regrades=[
        types.SimpleNamespace(
            session_id=ID,
            before=types.SimpleNamespace(outcome="agent_timeout", reward=None),
            verdict=types.SimpleNamespace(outcome="completed", reward=0.123456),
        )
    ],
)


def _dataset() -> Any:
    stratum = types.SimpleNamespace(name=ID, num_instances=NUMBER, num_attempts=NUMBER, num_accepted=NUMBER, rate=0.5)
    return types.SimpleNamespace(by="instance.repo", strata=[stratum], reasons={}, files=[])


def _rows_report() -> Any:
    from gangline.tasks.check_rows.check import Report

    return Report(counts={"logprobs_missing": NUMBER, "unreadable": NUMBER}, forms={"verifiers": NUMBER})


def _failed() -> SessionResult:
    ids: dict[str, Any] = {"session_id": ID, "task_id": ID, "node_id": ID, "attempt": 1, "fence": 1}
    return SessionResult(**ids, outcome="agent_error", failure=filled(Failure))


def _fields(kind: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(filled(kind), **changes)


ENDS = ("expires_at", "revoked_at", "grace_until")

PRINTED: dict[str, Print] = {
    "submit": lambda _: submit._show(filled(TaskView)),  # pyright: ignore[reportPrivateUsage]
    "status": shown(lambda: views.status_view(filled(ServiceStatus), [filled(TaskSummary)] * 2)),
    "list tasks": shown(lambda: views.groups_table([filled(TaskSummary)] * 2)),
    "list sessions": shown(lambda: views.sessions_table([filled(SessionView)] * 2)),
    "show": shown(lambda: session_view.task_view([_failed()] * 2)),
    "drain": nodes(drain, drain.drain, filled(NodeStatus)),
    "gate show": nodes(gate, gate.show, filled(GateState)),
    "gate updates": nodes(gate, gate.updates, [filled(GateUpdate)]),
    "backend list": nodes(backend, backend.show, [_fields(BackendView, backend_id="b17")]),
    "actions": shown(lambda: actions._table([filled(Action)])),  # pyright: ignore[reportPrivateUsage]
    "tokens list": answered(tokens.list_tokens, [_fields(TokenView, created_at=1764500000.0, **dict.fromkeys(ENDS))]),
    "tenants list": answered(tokens.list_tenants, [filled(TenantView)]),
    "usage": answered(tokens.usage, [filled(UsageRow)]),
    "drift": shown(lambda: drift._groups_table({ID: filled(DriftReport)}, "session")),  # pyright: ignore[reportPrivateUsage]
    "audit": printed(audit.print_audit, ID, AUDIT),
    "doctor": lambda _: doctor._print([_fields(Check, found=f"{PATH} is not there", advice=f"make {PATH}")]),  # pyright: ignore[reportPrivateUsage]
    "harness list": printed(harness.list_),
    "harness check": lambda _: harness._print([filled(harness_check.CheckReport)]),  # pyright: ignore[reportPrivateUsage]
    "image list": _images,
    "config show": _config,
    "tasks list": _tasks,
    "tasks names": printed(benchmarks.names),
    "preset list": printed(preset.list_),
    "check-rows": lambda _: check_rows._print(Path(PATH), _rows_report()),  # pyright: ignore[reportPrivateUsage]
    "regrade": lambda _: regrade._show(REGRADED, Path(PATH), as_json=False),  # type: ignore[arg-type] # pyright: ignore
    "eval": lambda _: evaluate._show(_evaluation(), as_json=False),  # pyright: ignore[reportPrivateUsage]
    "compare": shown(_comparison),
    "data": lambda _: data._show(_dataset(), Path(PATH), as_json=False),  # pyright: ignore[reportPrivateUsage]
    "demo": lambda _: demo._print_sessions(_fields(demo.Report, audit=AUDIT)),  # pyright: ignore[reportPrivateUsage]
    "train algorithms": printed(train.algorithms),
    "train dry-run": shown(lambda: dry_run.spread_view(filled(SpreadReport))),
    "train run": shown(lambda: reward_chart([filled(StepRecord)], [filled(EvaluationRecord)])),
    "runs list": shown(lambda: runs._list_table([filled(RunSummary)])),  # pyright: ignore[reportPrivateUsage]
    "runs compare": shown(lambda: runs._comparison_table(filled(Comparison))),  # pyright: ignore[reportPrivateUsage]
}
"""Command -> prints its table."""

NO_TABLE = {
    *("init", "up", "down", "cancel", "open", "logs", "export", "fork", "vet", "engine", "server", "node"),
    *("cluster", "serve", "serve-agent", "tasks show", "tasks from", "preset show", "preset tasks", "image build"),
    *("image prune", "image prefetch", "harness install", "harbor connect"),
    *("tokens create", "tokens rotate", "tokens revoke", "tenants set"),
}
"""Commands that print lines."""
SAME_TABLE = {
    **dict.fromkeys(("gate pause", "gate resume", "gate version"), "gate show"),
    **dict.fromkeys(("backend add", "backend remove", "backend clear"), "backend list"),
    "runs show": "train run",
    "train validate": "config show",
    "train memory": "config show",
}
"""Commands whose table is another's, or has two columns as another's."""
LIVE = {"watch"}
"""Drawn into the lines and columns that there are: `tests/unit/test_cli_watching.py`."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(run: Print, width: int | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """width: of a terminal; None is a pipe."""
    with monkeypatch.context() as patched:
        out = io.StringIO() if width is None else Terminal()
        patched.setattr(sys, "stdout", out)
        patched.setenv("COLUMNS", "80" if width is None else str(width))
        patched.setenv("TERM", "xterm")
        patched.setenv("NO_COLOR", "1")
        run(patched)
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


def leaves() -> Iterator[str]:
    for name in COMMANDS:
        command: Any = load_command(name)
        inner = getattr(command, "commands", None)
        yield from (f"{name} {one}" for one in inner) if inner else (name,)


def test_every_command_is_here() -> None:
    assert set(leaves()) == set(PRINTED) | NO_TABLE | set(SAME_TABLE) | LIVE


@pytest.mark.parametrize("command", PRINTED)
def test_no_id_number_or_path_of_a_commands_table_is_broken(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = set(text_of(PRINTED[command], None, monkeypatch).split())
    for width in WIDTHS:
        told = text_of(PRINTED[command], width, monkeypatch)
        told = re.sub(r"No room for [^:]*:(\s+\S+){9}", "", told)
        assert set(told.split()) <= whole, f"{width} columns:\n{told}"


@pytest.mark.parametrize("command", PRINTED)
def test_a_line_is_longer_than_the_terminal_only_for_one_word(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence outside tables is left to the terminal to wrap."""
    tables: list[str] = []
    draw = FactTable.__rich_console__

    def noted(self: FactTable, on: Console, options: Any) -> Any:
        for part in draw(self, on, options):
            tables.append(part.plain if isinstance(part, Text) else str(part))
            yield part

    monkeypatch.setattr(FactTable, "__rich_console__", noted)
    for width in WIDTHS:
        tables.clear()
        text_of(PRINTED[command], width, monkeypatch)
        assert tables
        for line in tables:
            assert len(line) <= width or max(map(len, line.split())) + 24 > width, line


def test_the_live_view_alone_draws_tables_of_another_kind() -> None:
    """So that a new command's table keeps the law, too."""
    root = Path(gangline.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "rich.table"
    }
    assert users == {"cli/tasks/watch_view.py"}


def test_the_least_needed_columns_go_first_and_are_named() -> None:
    table = FactTable("session", Column("node", 2), Column("state", 1), "reward#")
    table.add_row("a" * 20, "n" * 20, "s" * 20, "0.5")
    assert drawn(table, 80)[0].split() == ["session", "node", "state", "reward"]
    heading, _, *told = drawn(table, 60)
    assert heading.split() == ["session", "state", "reward"]
    assert " ".join(told).startswith("No room for node: ")


def test_rows_become_blocks_where_not_even_what_stays_has_room() -> None:
    table = FactTable("session", "path", prose("why"))
    table.add_row("s" * 30, "p" * 40, "one two three")
    assert drawn(table, 60) == [f"session  {'s' * 30}", f"path     {'p' * 40}", "why      one two three"]


def test_prose_wraps_between_words() -> None:
    table = FactTable("session", prose("why"))
    table.add_row("a.0", f"the file {PATH[:40]} is not there")
    assert drawn(table, 50)[1:] == ["a.0      the file", f"         {PATH[:40]}", "         is not there"]


def test_a_cause_of_many_sessions_is_told_once() -> None:
    one = filled(SessionView)
    sessions = [msgspec.structs.replace(one, session_id=f"task.{at}", unplaced=None, waits_for=None) for at in range(4)]
    out = Console(file=io.StringIO(), width=200, soft_wrap=True)
    out.print(views.sessions_table(sessions))
    told = typing.cast("io.StringIO", out.file).getvalue()
    assert told.count("the agent exited with 1") == 1
    assert "4 x" in told
    assert "task.0, task.1, task.2, ..." in told


def test_causes_that_differ_in_numbers_and_the_sessions_id_are_one() -> None:
    why = {f"t.{at}": f"agent: t.{at} ended after {at}.5 s, process {at + 7}" for at in range(3)}
    table = views.causes_view(why | {"t.9": "node: its disk is full"})[1]
    assert isinstance(table, FactTable)
    assert [line.split()[0] for line in drawn(table, 200)] == ["3", "1"]
