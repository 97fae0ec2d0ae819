"""A session whose node is lost goes on at another one from the records that the server has, or begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.completion import Completion
from gangline.domain.errors import LeaseLost, ServerUnavailable
from gangline.domain.session import KeptTurns, Lease, SessionResult, Turns
from gangline.domain.tokens import decode_msgpack, encode_msgpack
from gangline.domain.views import TurnsReceipt
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.reuse.turns import Listener, TurnSender
from gangline.rows.audit import audit
from gangline.rows.forks.calls import REPLAYED, RESUME_FILE, RESUMED
from gangline.server.run import Storage, serving, turn_store
from gangline.store.journal.entries import Appended, AttemptKey
from gangline.store.journal.object_turns import ObjectTurns
from gangline.store.journal.turns import TurnStore
from gangline.wire.client.server import ServerClient
from support.node.attempt import lease_of, node_parts
from support.service.running import NODE_URL, any_plugin, request
from support.store.completions import completion

RULES: list[dict[str, Any]] = [
    {"turn": 0, "pattern": "^say hi$", "text": "First I look.", "tool_calls": [{"run": "echo one; date +%s%N > when"}]},
    {"turn": 1, "tool_calls": [{"run": "echo two"}]},
    {"turn": 2, "text": "all done", "delay_s": 0.6},
]
AGENT = {"harness": "native", "settings": {"tools": ["shell"]}}


class Kept:
    """The server's part of it, as a node sees it."""

    def __init__(self, *completions: Completion) -> None:
        self.kept = KeptTurns(fence=1, completions=completions)
        self.sent: list[Turns] = []
        self.is_down = False
        self.num_refused = 0
        self.lost: tuple[str, ...] = ()
        self.num_begun_anew = 0

    async def post_turns(self, node_id: str, turns: Sequence[Turns]) -> TurnsReceipt:
        if self.is_down:
            self.num_refused += 1
            raise ServerUnavailable("down")
        self.sent += turns
        return TurnsReceipt(lost=self.lost)

    async def kept_turns(self, session_id: str, fence: int) -> KeptTurns:
        assert fence > self.kept.fence
        return self.kept

    async def begin_anew(self, node_id: str, *, session_id: str, fence: int) -> None:
        self.num_begun_anew += 1

    @property
    def records(self) -> list[Completion]:
        calls = [decode_msgpack(bytes(one), Appended) for turns in self.sent for one in turns.calls]
        return [one for call in calls for one in call.whole()]

    @property
    def num_records(self) -> int:
        return sum(len(turns.calls) for turns in self.sent)


def entry(one: Completion) -> bytes:
    return encode_msgpack(Appended.of([one]))


def keep(sender: TurnSender, one: Completion) -> None:
    sender.kept([one], entry(one))


async def lived(
    folder: Path, server: Kept, rules: list[dict[str, Any]], parent: SessionResult | None = None, **lease: int
) -> SessionResult:
    """parent: of a fork behind its second call."""
    task: dict[str, Any] = {"agent": AGENT, "capture": {"durable": "turn"}}
    if parent is not None:
        task["fork"] = {"session_id": parent.session_id, "attempt": parent.attempt, "turn": 2}
    lease_now = msgspec.structs.replace(lease_of("s", **task), **lease)

    async def recorded(_session_id: str, _attempt: int) -> SessionResult:
        assert parent is not None
        return parent

    async with node_parts(folder, script={"rules": rules}) as parts, asyncio.timeout(60):
        sender = TurnSender("n", server, parts.journal.on_kept)
        sending = asyncio.create_task(sender.run())
        try:
            return await Attempt(lease_now, msgspec.structs.replace(parts, turns=sender, recorded=recorded)).live()
        finally:
            sending.cancel()


@pytest.mark.parametrize("turn", [1, 2, 3])
async def test_calls_that_the_server_has_are_answered_from_there_and_are_the_sessions_own(
    tmp_path: Path, turn: int
) -> None:
    lost = await lived(tmp_path / "lost", Kept(), RULES)
    assert len(lost.completions) == 3
    others = [{"pattern": ".", "text": "from here on otherwise"}]
    result = await lived(tmp_path / "next", Kept(*lost.completions[:turn]), others, attempt=2, fence=2)
    assert (result.outcome, result.failure) == ("completed", None)
    own = [one for one in result.completions if RESUMED in one.metadata]
    assert [one.metadata[RESUMED] for one in own] == [one.completion_id for one in lost.completions[:turn]]
    assert [one.sampled_ids.tolist() for one in own] == [one.sampled_ids.tolist() for one in lost.completions[:turn]]
    assert [one.logprobs.tolist() for one in own] == [one.logprobs.tolist() for one in lost.completions[:turn]]
    assert result.trajectory is not None
    assert audit(result.trajectory, result.completions).ok
    (trace,) = result.trajectory.traces
    assert int(trace.loss_mask.sum()) == sum(len(one.sampled_ids) for one in result.completions)
    lineage = msgspec.json.decode(result.artifacts[RESUME_FILE])
    assert (lineage["session_id"], lineage["attempt"], lineage["num_replayed"]) == ("s", 1, turn)


async def test_a_fork_begins_anew_at_its_parent_also_where_that_went_on_for_a_lost_node(tmp_path: Path) -> None:
    lost = await lived(tmp_path / "lost", Kept(), RULES)
    parent = await lived(tmp_path / "next", Kept(*lost.completions[:2]), RULES, attempt=2, fence=2)
    assert sum(RESUMED in one.metadata for one in parent.completions) == 2
    server = Kept(*lost.completions[:1])
    fork = await lived(tmp_path / "fork", server, RULES, parent, attempt=2, fence=2)
    assert (fork.outcome, fork.failure) == ("completed", None)
    assert [one.metadata.get(REPLAYED) for one in fork.completions] == [
        *(one.completion_id for one in parent.completions[:2]),
        None,
    ]
    assert not any(RESUMED in one.metadata for one in fork.completions)
    assert server.num_records == 0


async def test_another_node_that_is_lost_later_has_sent_what_it_repeated(tmp_path: Path) -> None:
    lost = await lived(tmp_path / "lost", Kept(), RULES)
    second = Kept(*lost.completions[:2])
    result = await lived(tmp_path / "second", second, RULES, attempt=2, fence=2)
    sent = second.records
    # The third may be sent as well, where the agent takes its time to end.
    assert [one.completion_id for one in sent[:2]] == [one.completion_id for one in result.completions[:2]]
    assert {turns.fence for turns in second.sent} == {2}


async def test_an_agent_that_asks_otherwise_is_ended_and_nothing_is_sampled_in_the_place_of_a_record(
    tmp_path: Path,
) -> None:
    rules = [{"turn": 0, "tool_calls": [{"run": "date +%s%N"}]}, {"turn": 1, "tool_calls": [{"run": "echo two"}]}]
    lost = await lived(tmp_path / "lost", Kept(), [*rules, {"text": "all done"}])
    result = await lived(tmp_path / "next", Kept(*lost.completions[:2]), rules, attempt=2, fence=2)
    assert result.outcome == "infra_error"
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("resume_diverged", True)
    assert len(result.completions) == 1


async def test_records_wait_for_a_server_that_is_down_and_are_sent_in_order() -> None:
    server = Kept()
    sender, key = TurnSender("n", server), AttemptKey("s-1", 1)
    server.is_down = True
    sender.follow(key, 5)
    sending = asyncio.create_task(sender.run())
    records = [completion(number) for number in range(1, 7)]
    for one in records[:3]:
        keep(sender, one)
    async with asyncio.timeout(20):
        while server.num_refused == 0:
            await asyncio.sleep(0.01)
    assert not server.sent
    server.is_down = False
    for one in records[3:]:
        keep(sender, one)
    async with asyncio.timeout(20):
        while server.num_records < 6:
            await asyncio.sleep(0.01)
    assert [one.completion_id for one in server.records] == [one.completion_id for one in records]
    assert [turns.first for turns in server.sent] == [0]
    server.lost = ("s-1",)
    keep(sender, completion(7))
    async with asyncio.timeout(20):
        while server.num_records < 7:
            await asyncio.sleep(0.01)
    keep(sender, completion(8))
    sender.follow(AttemptKey("s-2", 1), 5)
    keep(sender, completion(1, session="s-2"))
    async with asyncio.timeout(20):
        while server.records[-1].session_id != "s-2":
            await asyncio.sleep(0.01)
    assert server.num_records == 8, "its lease is another's"
    sending.cancel()


async def test_the_journal_is_heard_only_while_an_attempt_is_followed() -> None:
    journal: list[Listener] = []
    sender = TurnSender("n", Kept(), journal)
    one, other = AttemptKey("s-1", 1), AttemptKey("s-2", 1)
    for key in (one, other):
        sender.follow(key, 5)
        assert journal == [sender.kept]
    sender.leave(one)
    assert journal == [sender.kept]
    for _ in range(2):
        sender.leave(other)
        assert not journal


async def test_a_request_carries_no_more_than_its_limit_unless_one_record_does(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [completion(number, size=size) for number, size in enumerate((3, 3, 400, 3, 3, 3, 3, 3))]
    small = len(entry(records[0]))
    monkeypatch.setattr("gangline.node.sessions.reuse.turns._MAX_BYTES", 3 * small + 10)
    server = Kept()
    sender = TurnSender("n", server)
    for name in ("s-1", "s-2"):
        sender.follow(AttemptKey(name, 1), 5)
        for one in records:
            keep(sender, msgspec.structs.replace(one, session_id=name))
    sending = asyncio.create_task(sender.run())
    async with asyncio.timeout(20):
        while server.num_records < 16:
            await asyncio.sleep(0.01)
    sending.cancel()
    for name in ("s-1", "s-2"):
        mine = [turns for turns in server.sent if turns.session_id == name]
        assert [turns.first for turns in mine] == [0, *accumulate(len(turns.calls) for turns in mine[:-1])]
        assert all(len(turns.calls) <= 3 for turns in mine)
    assert [one.completion_id for one in server.records if one.session_id == "s-1"] == [
        one.completion_id for one in records
    ]


async def leased(client: ServerClient, node_id: str) -> Lease:
    (lease,) = await client.lease(node_id, url=NODE_URL, max_sessions=1, wait_s=10)
    return lease


def turns(lease: Lease, *numbers: int) -> Turns:
    made = (completion(number, session=lease.session_id) for number in numbers)
    calls = tuple(msgspec.Raw(entry(one)) for one in made)
    return Turns(session_id=lease.session_id, fence=lease.fence, first=numbers[0], calls=calls)


async def test_the_server_keeps_what_the_holder_of_a_lease_sends_until_the_session_has_a_result(
    tmp_path: Path,
) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin, retry_base_s=0.01) as running,
        ServerClient(running.url, None) as client,
    ):
        await client.submit(request("t", num_samples=1, capture={"durable": "turn"}, max_attempts=5))
        first = await leased(client, "n1")
        assert (await client.post_turns("n1", [turns(first, 0, 1)])).lost == ()
        assert (await client.post_turns("n2", [turns(first, 2)])).lost == (first.session_id,)
        await client.release("n1", session_id=first.session_id, fence=first.fence)
        assert (await client.post_turns("n1", [turns(first, 2)])).lost == (first.session_id,)
        second = await leased(client, "n2")
        kept = await client.kept_turns(second.session_id, second.fence)
        assert (kept.fence, len(kept.completions)) == (first.fence, 2)
        with pytest.raises(LeaseLost):
            await client.begin_anew("n1", session_id=first.session_id, fence=first.fence)
        await client.begin_anew("n2", session_id=second.session_id, fence=second.fence)
        assert await client.kept_turns(second.session_id, second.fence) == KeptTurns()
        await client.post_turns("n2", [turns(second, 0)])
        failed = {"boundary": "runtime", "code": "runtime_failed", "message": "it broke", "retryable": True}
        for code, num_kept in (("node_restarted", 1), ("runtime_failed", 0)):
            await client.post_result(
                msgspec.convert(
                    {
                        **{name: getattr(second, name) for name in ("session_id", "task_id", "attempt", "fence")},
                        "node_id": "n2",
                        "outcome": "infra_error",
                        "failure": failed | {"code": code},
                    },
                    SessionResult,
                )
            )
            second = await leased(client, "n2")
            assert len((await client.kept_turns(second.session_id, second.fence)).completions) == num_kept
        await client.post_turns("n2", [turns(second, 0)])
        await client.cancel("t")
        async with asyncio.timeout(20):
            while list((tmp_path / "server" / "turns").iterdir()):
                await asyncio.sleep(0.01)


async def test_records_that_come_while_their_session_ends_are_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, append, folder = asyncio.get_running_loop(), TurnStore.append, tmp_path / "server" / "turns"

    async def end(client: ServerClient) -> None:
        await client.cancel("t")
        async with asyncio.timeout(20):
            while list(folder.iterdir()):
                await asyncio.sleep(0.01)

    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        await client.submit(request("t", num_samples=1, capture={"durable": "turn"}))
        lease = await leased(client, "n1")
        await client.post_turns("n1", [turns(lease, 0)])

        def append_late(store: TurnStore, sent: Turns) -> None:
            asyncio.run_coroutine_threadsafe(end(client), loop).result()
            append(store, sent)

        monkeypatch.setattr(TurnStore, "append", append_late)
        await client.post_turns("n1", [turns(lease, 1)])
        assert list(folder.iterdir()) == []


async def test_a_server_that_was_started_again_forgets_the_records_of_sessions_that_end_then(tmp_path: Path) -> None:
    folder = tmp_path / "server" / "turns"
    for is_first in (True, False):
        async with (
            serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
            ServerClient(running.url, None) as client,
        ):
            if is_first:
                await client.submit(request("t", num_samples=1, capture={"durable": "turn"}))
                lease = await leased(client, "n1")
                await client.post_turns("n1", [turns(lease, 0)])
            assert list(folder.iterdir())
            if not is_first:
                await client.cancel("t")
                async with asyncio.timeout(20):
                    while list(folder.iterdir()):
                        await asyncio.sleep(0.01)


async def test_what_a_crash_left_of_sessions_that_have_ended_is_forgotten_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "server" / "turns" / "long-gone"
    folder.mkdir(parents=True)
    async with serving(data_dir=tmp_path, control_token=None, check_task=any_plugin):
        assert not folder.exists()


def test_records_are_where_all_servers_find_them(tmp_path: Path) -> None:
    in_a_bucket, here = Storage(results_url=f"memory://{tmp_path}"), Storage()
    assert isinstance(turn_store(in_a_bucket, tmp_path, is_shared=True), ObjectTurns)
    assert isinstance(turn_store(in_a_bucket, tmp_path, is_shared=False), TurnStore)
    assert isinstance(turn_store(Storage(results_url=str(tmp_path)), tmp_path, is_shared=True), TurnStore)
    assert isinstance(turn_store(here, tmp_path, is_shared=True), TurnStore)
