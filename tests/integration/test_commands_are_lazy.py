"""Commands over a task hold one session at a time: a group of long sessions is larger than memory."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from gangline.cli.main import build_app
from gangline.cli.results import records
from gangline.cli.results.records import FileRecords
from gangline.domain.session import SessionResult
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from support.strategies import session_result

NUM_SESSIONS = 12


class Counted:
    """Results as they come from disk, and how many of them were ever alive at once."""

    def __init__(self) -> None:
        self.num_taken = self.most_alive = 0
        self._data = encode_msgpack(session_result())

    def find(self, *_: Any) -> Iterator[SessionResult]:
        for number in range(NUM_SESSIONS):
            self.num_taken += 1
            changed: SessionResult = msgspec.structs.replace(
                decode_msgpack(self._data, SessionResult), session_id=f"task-1.{number}", task_id="task-1"
            )
            # `isinstance` would ask lazy modules of other packages for their class, and import what they stand for.
            alive = [one for one in gc.get_objects() if type(one) is SessionResult]
            self.most_alive = max(self.most_alive, len(alive))
            del alive
            yield changed


@pytest.mark.parametrize(
    "command",
    [("show",), ("show", "--json"), ("audit",), ("audit", "--json"), ("export", "--format", "msgpack")],
    ids=" ".join,
)
def test_a_command_over_a_task_holds_one_session_at_a_time(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(records, "open_records", lambda *_: FileRecords(tmp_path / "server" / "results"))
    monkeypatch.setattr(records, "find_results", counted.find)
    monkeypatch.setattr(records, "find_results_of", counted.find)
    before = sum(type(one) is SessionResult for one in gc.get_objects())
    done = CliRunner().invoke(build_app(), [command[0], "task-1", *command[1:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert counted.num_taken == NUM_SESSIONS
    assert counted.most_alive - before <= 3  # one in the making, one on its way, and the first, which is told apart
    if command == ("show", "--json"):
        assert [one["session_id"] for one in json.loads(done.output)] == [f"task-1.{n}" for n in range(NUM_SESSIONS)]


def test_a_task_is_no_session_to_show_tokens_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr(records, "open_records", lambda *_: FileRecords(tmp_path / "server" / "results"))
    monkeypatch.setattr(records, "find_results", counted.find)
    monkeypatch.setattr(records, "find_results_of", counted.find)
    done = CliRunner().invoke(build_app(), ["show", "task-1", "--tokens"])
    assert "task-1.0, task-1.1, task-1.2, task-1.3, ..." in str(done.exception)
