"""What is said to be durable survives a disk that forgets everything that was not synced."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from gangline.domain.errors import Unauthorized
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.machine.durable import append, make_folder, replacing, write_new, write_once, write_whole
from gangline.node.backends.engine import BackendSpec
from gangline.node.backends.member_file import MemberFile
from gangline.node.external.store import ExternalState, ExternalStore
from gangline.node.identity import node_identity
from gangline.node.sessions.leases.delivery import Delivery
from gangline.store.journal.log import AttemptKey, AttemptOpened, Journal
from gangline.store.results.files import ResultStore
from gangline.train.collecting.buffer import BufferState
from gangline.train.run.checkpoint import Checkpoints, TrainerState
from gangline.train.runs.log import RunLog, read_records
from gangline.train.trainers.callbacks import receiving
from gangline.wire.client.running import keep_token
from gangline.wire.client.server import ServerClient
from support.store.completions import completion
from support.store.power_cut import PowerCut
from support.training.fakes import step_record
from support.training.samples import session


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[PowerCut]:
    """The disk of `tmp_path / "data"`."""
    (tmp_path / "data").mkdir()
    cut = PowerCut(tmp_path / "data", monkeypatch)
    yield cut
    cut.close()


@pytest.fixture
def data(disk: PowerCut, tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def after(tmp_path: Path) -> Path:
    """Where the disk is laid out after the cut."""
    return tmp_path / "after"


def test_the_disk_forgets_what_was_not_synced(disk: PowerCut, data: Path, after: Path) -> None:
    (data / "never").write_bytes(b"data")
    (data / "folder").mkdir()
    write_new(data / "folder" / "unnamed", b"data")
    write_whole(data / "kept", b"data")
    (data / "kept").write_bytes(b"changed, unsynced")
    left = disk.leaves(after)
    assert sorted(path.name for path in left.iterdir()) == ["folder", "kept", "never"]
    assert ((left / "never").read_bytes(), (left / "kept").read_bytes()) == (b"", b"data")
    assert not list((left / "folder").iterdir())


def test_whole_files_survive_in_folders_that_were_made_for_them(disk: PowerCut, data: Path, after: Path) -> None:
    make_folder(data / "a" / "b", 0o700)
    write_whole(data / "a" / "b" / "whole", b"old")
    write_whole(data / "a" / "b" / "whole", b"new")
    assert write_once(data / "once", b"first")
    assert not write_once(data / "once", b"second")
    append(data / "lines", b"one\n")
    append(data / "lines", b"two\n")
    with replacing(data / "export") as unfinished:
        unfinished.write_bytes(b"rows")
    left = disk.leaves(after)
    found = {str(path.relative_to(left)): path.read_bytes() for path in left.rglob("*") if path.is_file()}
    assert found == {"a/b/whole": b"new", "once": b"first", "lines": b"one\ntwo\n", "export": b"rows"}


@pytest.mark.parametrize("existed", [False, True])
def test_a_file_that_cannot_be_written_stays_as_it_was(data: Path, existed: bool) -> None:
    if existed:
        (data / "file").write_bytes(b"old")
    with suppress(RuntimeError), replacing(data / "file") as unfinished:
        unfinished.write_bytes(b"half")
        raise RuntimeError
    assert [path.read_bytes() for path in data.iterdir()] == ([b"old"] if existed else [])


def test_an_accepted_result(disk: PowerCut, data: Path, after: Path) -> None:
    store = ResultStore(data / "results")
    store.prepare()
    kept = session("s0", 1.0)
    store.stage(kept).keep()
    store.stage(session("s1", 1.0))
    left = ResultStore(disk.leaves(after) / "results")
    assert left.read_bytes(kept.task_id, "s0", 1) == encode_msgpack(kept)
    assert left.attempts(kept.task_id, "s1") == [], "a staged result does not count"


async def test_completions_of_the_journal(disk: PowerCut, data: Path, after: Path) -> None:
    written = [completion(number) for number in range(3)]
    journal = Journal.open(data / "journal")
    await journal.open_attempt(AttemptOpened("s-1", 1, "t", 1))
    for one in written:
        await journal.append(one)
    disk.leaves(after)
    await journal.close()
    again = Journal.open(after / "journal")
    found = await again.read(AttemptKey("s-1", 1))
    assert [one.completion_id for one in found] == [one.completion_id for one in written]
    assert again.unclosed() == [AttemptOpened("s-1", 1, "t", 1)]
    await again.close()


async def test_sessions_of_callers_and_their_results(disk: PowerCut, data: Path, after: Path) -> None:
    store = ExternalStore(data / "external")
    state = ExternalState(session_id="s0", key_digest="0" * 64, request={}, model="m", created_at=1.0)
    await store.save(state)
    await store.save_result(session("s0", 1.0))
    left = ExternalStore(disk.leaves(after) / "external")
    assert left.load_all() == [state]
    assert (await left.load_result("s0")).reward == 1.0


async def test_a_result_that_the_server_did_not_take_yet(disk: PowerCut, data: Path, after: Path) -> None:
    class Refusing:
        async def post_result(self, *_args: Any) -> None:
            disk.leaves(after)
            raise Unauthorized("not with this key")

    client = cast(ServerClient, Refusing())
    journal = Journal.open(data / "journal")
    await Delivery(data / "results", client, journal).deliver(session("s0", 1.0))
    await journal.close()
    again = Journal.open(after / "journal")
    assert Delivery(after / "results", client, again).leftover() == [AttemptKey("s0", 1)]
    assert decode_msgpack((after / "results" / "s0.1.msgpack").read_bytes(), type(session("s0", 1.0))).reward == 1.0
    await again.close()


async def test_groups_that_a_trainer_was_called_back_with(disk: PowerCut, data: Path, after: Path) -> None:
    class Service:
        async def result(self, _task_id: str) -> list[Any]:
            return [session("s0", 1.0)]

    service = cast(ServerClient, Service())
    async with receiving(service, data / "inbox", key=None) as client, aiohttp.ClientSession() as http:
        async with http.post(client.url, json={"task_id": "t"}) as response:
            assert response.status == 204
        disk.leaves(after)
    assert (after / "inbox" / "t.msgpack").read_bytes() == encode_msgpack([session("s0", 1.0)])


def test_checkpoints_with_folders_in_them(disk: PowerCut, data: Path, after: Path) -> None:
    def save(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_bytes(b"weights")

    state = TrainerState(step=3, version=3, settled=frozenset(), buffer=BufferState({}), wall_s=1.0)
    Checkpoints(data / "run" / "checkpoints").save(state, save)
    found = Checkpoints(disk.leaves(after) / "run" / "checkpoints").latest()
    assert found is not None
    assert found[1] == state
    assert (found[0] / "adapter" / "weights").read_bytes() == b"weights"


def test_records_of_steps(disk: PowerCut, data: Path, after: Path) -> None:
    RunLog(data / "run").write(step_record())
    disk.leaves(after)
    assert read_records(after / "run" / "metrics.jsonl") == [step_record()]


async def test_what_a_node_and_a_service_are(disk: PowerCut, data: Path, after: Path) -> None:
    identity, token = node_identity(data), keep_token(data, None)
    named, members = [BackendSpec("http://one")], [BackendSpec("http://two")]
    await MemberFile(data / "engines.json", named).keep(members)
    left = disk.leaves(after)
    assert (node_identity(left), keep_token(left, None)) == (identity, token)
    assert MemberFile(left / "engines.json", named).changed() == members
