"""`gangline up` over a PostgreSQL and a results folder of its own, and what it says of those that it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

from gangline.store.sql.reader import TaskReader
from support.service.cli_process import UpProcess, gangline
from support.store.postgres import Cluster


def test_a_service_over_postgresql_keeps_its_tasks_there_and_its_results_where_it_is_told(
    tmp_path: Path, postgres: Cluster
):
    url = postgres.new_database()
    options = ("--database", url, "--results", tmp_path / "results", "--keep-days", "7", "--keep-gb", "0.5")
    agent = {"harness": "shell", "settings": {"command": "true"}, "allow_no_model_call": True}
    task = {"task_id": "t", "instruction": "greet", "runtime": {"backend": "process"}, "agent": agent}
    (tmp_path / "task.json").write_text(json.dumps(task))
    service = UpProcess(tmp_path, *options)
    try:
        live = service.ready()
        environment = {"GANGLINE_SERVER": live["server_url"], "GANGLINE_TOKEN": live["control_token"]}
        done = gangline("submit", tmp_path / "task.json", "--wait", "--json", env=environment)
        assert done.returncode == 0, done.stderr
    finally:
        service.close()
    with TaskReader(url) as reader:
        assert reader.task("t").outcomes == {"completed": 1}
    assert (tmp_path / "results" / "t" / "t.0" / "attempt-1.msgpack").is_file()
    assert not (service.data / "server" / "gangline.db").exists()


def test_a_database_that_cannot_be_used_is_refused_in_words(tmp_path: Path):
    for target, told in (("mysql://me@host/db", "postgresql://"), ("folder/file.db", "--data")):
        refused = gangline("server", "--data", tmp_path, "--database", target, "--json")
        assert refused.returncode != 0
        assert told in refused.stdout + refused.stderr
