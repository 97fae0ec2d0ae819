"""What `gangline doctor` finds of leftovers, and that the commands it names remove them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from gangline.cli.machine import checks_leftovers
from gangline.cli.machine.checks_leftovers import check_leftovers
from gangline.node.identity import owner_of
from gangline.settings.machine import Settings
from gangline.store.journal.log import Journal


def settings(data: Path, **told: str) -> Settings:
    return Settings.from_environ({"GANGLINE_DATA": str(data), "GANGLINE_PODMAN": "/none", **told})


def remove(advice: str) -> None:
    for command in advice.split("; "):
        subprocess.run(command, shell=True, check=True)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "nodes" / "n 1"
    (folder / "runtimes").mkdir(parents=True)
    return folder


def found(node: Path, **told: str) -> tuple[str, str]:
    check = check_leftovers(settings(node.parents[1], GANGLINE_DOCKER="/none", **told))
    return check.found, check.advice


def test_a_folder_that_has_never_run_has_no_leftovers(tmp_path: Path) -> None:
    assert check_leftovers(settings(tmp_path)).state == "ok"


async def test_folders_of_a_node_that_does_not_run_are_orphans_and_of_one_that_runs_what_it_says(node: Path) -> None:
    (node / "runtimes" / "t.0.1.agent").mkdir()
    journal = Journal.open(node / "journal")
    assert await asyncio.to_thread(found, node) == ("none", ""), "it runs, and no service says that it has orphans"
    await journal.close()
    told, advice = await asyncio.to_thread(found, node)
    assert "sandboxes' folders of no session (node n 1)" in told
    assert "t.0.1.agent" in told
    remove(advice)
    assert await asyncio.to_thread(found, node) == ("none", "")


def test_refused_results_and_old_logs_are_named_with_their_sizes(node: Path) -> None:
    refused = node / "outgoing" / "refused"
    refused.mkdir(parents=True)
    (refused / "t.0").write_bytes(b"x" * 2048)
    logs = node.parents[1] / "logs"
    logs.mkdir()
    (logs / "node.log").touch()
    (logs / "node-2.log.1").touch()
    os.utime(logs / "node-2.log.1", (time.time() - 40 * 86_400,) * 2)
    told, advice = found(node)
    assert "1 results that the server refused (2 KiB" in told
    remove(advice)
    assert [path.name for path in logs.iterdir()] == ["node.log"]
    assert found(node) == ("none", "")


def test_groups_and_containers_of_no_sandbox_are_named(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, groups = owner_of(node), tmp_path / "cgroup"
    (groups / f"gangline@{owner}@abc").mkdir(parents=True)
    (groups / "gangline@other@abc").mkdir()
    owned = checks_leftovers.owned_groups
    monkeypatch.setattr(checks_leftovers, "owned_groups", lambda owner: owned(owner, groups))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    engine, calls = tmp_path / "engine", tmp_path / "calls"
    engine.write_text(f'#!/bin/sh\necho "$*" >>{calls}\necho gangline-old.0.1.agent gangline-t.0.1.agent\n')
    engine.chmod(0o755)
    (node / "runtimes" / "t.0.1.agent").mkdir()
    check = check_leftovers(settings(node.parents[1], GANGLINE_DOCKER=str(engine)))
    assert f"control groups of no sandbox: {groups}/gangline@{owner}@abc" in check.found
    assert "gangline-old.0.1.agent" in check.found
    assert "gangline-t.0.1.agent" not in check.found
    remove(check.advice)
    assert f"label=gangline.owner={owner}" in calls.read_text()
    assert "rm --force gangline-old.0.1.agent" in calls.read_text()
    assert [path.name for path in groups.iterdir()] == ["gangline@other@abc"]
