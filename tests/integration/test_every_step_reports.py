"""Whatever fails between the lease of a session and its report, the server hears of the attempt, and with its cause."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

import gangline
from gangline.domain.errors import Failure, GanglineError, InvalidRequest, LeaseLost, LimitExceeded, ServerUnavailable
from gangline.domain.session import Heartbeat, HeartbeatReply, Lease, SessionResult
from gangline.domain.tokens import decode_msgpack
from gangline.domain.views import ResultReceipt
from gangline.node.health.breaker import Breaker
from gangline.node.health.offers import Offers
from gangline.node.sessions.leases.delivery import Delivery
from gangline.node.sessions.leases.hooks import Hooks
from gangline.node.sessions.leases.rollout_server import HeartbeatTaker
from gangline.node.sessions.pipeline import Pipeline
from support.node.attempt import lease_of, node_parts

SOURCE = str(Path(gangline.__file__).parent)
AGENT = """curl -sf -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" \
  -d '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}' "$OPENAI_BASE_URL/chat/completions"
"""
TASK: dict[str, Any] = {
    "task_id": "t1",
    "agent": {"harness": "shell", "settings": {"command": AGENT}},
    "evaluator": {"strategy": "script", "config": {"command": "echo 0.5 > reward.txt"}},
    "max_attempts": 3,
}
GIVE_UP_S = 30
Step = tuple[str, str]
"""(module, function)"""
LAST_RESORT = [
    ("node/sessions/pipeline.py", "Pipeline._live"),
    ("node/sessions/leases/delivery.py", "Delivery.deliver"),
]
"""Steps whose failure nobody can report: they have done nothing yet, and the steps around them have no other way."""


class Listener:
    """A server that leases what it is given, and keeps what it hears of each session."""

    def __init__(self, refuse: Callable[[SessionResult], None] = lambda _: None) -> None:
        self.waiting: asyncio.Queue[Lease] = asyncio.Queue()
        self.heard: dict[str, asyncio.Future[SessionResult | str]] = {}
        self.beats: list[dict[str, Any]] = []
        self.deaf_to = dict[str, int]()
        """session id -> how many of the heartbeats that name it get no answer."""
        self._refuse = refuse

    async def lease(self, *_: Any, **__: Any) -> list[Lease]:
        return [await self.waiting.get()]

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        for name in beat.sessions:
            if self.deaf_to.get(name, 0) > 0:
                self.deaf_to[name] -= 1
                raise ServerUnavailable("the server does not answer.")
        self.beats.append(beat.sessions)
        return HeartbeatReply(renewed=tuple(beat.sessions), lost=(), lease_s=30.0)

    @asynccontextmanager
    async def twin(self, *, timeout_s: float) -> AsyncGenerator[HeartbeatTaker]:
        yield self

    async def release(self, node_id: str, *, session_id: str, fence: int, has_run: bool = False) -> None:
        self.heard[session_id].set_result(f"released, has_run={has_run}")

    async def post_result(self, result: SessionResult, data: bytes | None = None) -> ResultReceipt:
        assert data is not None
        found = decode_msgpack(data, SessionResult)
        self._refuse(found)
        self.heard[found.session_id].set_result(found)
        return ResultReceipt(accepted=True, state="ended")

    async def loses(self, session_id: str) -> None:
        """Lease a session of which its node can report nothing: it is named in a heartbeat, and its lease runs out."""
        self.heard[session_id] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait(lease_of(session_id, **TASK))
        async with asyncio.timeout(GIVE_UP_S):
            while not any(session_id in beat for beat in self.beats):
                await asyncio.sleep(0.02)
        assert not self.heard[session_id].done()

    async def report_of(self, session_id: str, **task: Any) -> SessionResult:
        """The report of a session that it leases now."""
        self.heard[session_id] = asyncio.get_running_loop().create_future()
        self.waiting.put_nowait(lease_of(session_id, **TASK | task))
        async with asyncio.timeout(GIVE_UP_S):
            heard = await self.heard[session_id]
        assert isinstance(heard, SessionResult), heard
        assert (heard.attempt, heard.fence) == (1, 1)
        return heard


@asynccontextmanager
async def listening_node(
    folder: Path, server: Listener, offers: Offers | None = None, **of_node: Any
) -> AsyncGenerator[Pipeline]:
    async with node_parts(folder) as parts:
        parts = msgspec.structs.replace(parts, **of_node)
        delivery = Delivery(folder / "outgoing", server, parts.journal, Hooks(["true"]))
        options: dict[str, Any] = {"breaker": Breaker(0), "offers": offers or Offers([]), "heartbeat_s": 0.1}
        pipeline = Pipeline(parts, server, delivery, url="http://node.test", **options)
        running = asyncio.create_task(pipeline.run())
        try:
            yield pipeline
        finally:
            running.cancel()
            await asyncio.wait({running})
            await pipeline.close()


class Steps:
    """Functions of ours that the tasks of sessions enter; each session may have one that fails when it is entered."""

    def __init__(self) -> None:
        self.entered: dict[Step, None] = {}
        self.failing: dict[str, tuple[Step, BaseException]] = {}
        """session id -> its step, until that has failed."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._look)
        try:
            yield
        finally:
            sys.settrace(before)

    def _look(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE) or "<" in code.co_qualname:
            return
        if (session_id := _session_of_task()) is None:
            return
        step = (code.co_filename.removeprefix(f"{SOURCE}/"), code.co_qualname)
        self.entered[step] = None
        if session_id in self.failing and self.failing[session_id][0] == step:
            asyncio.get_running_loop().call_soon(sys.settrace, self._look)  # an error ends the trace
            raise self.failing.pop(session_id)[1]


def _session_of_task() -> str | None:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    name = "" if task is None else task.get_name()
    return name.split(" ")[0].removeprefix("session.") if name.startswith("session.") else None


ERRORS = (
    RuntimeError,
    MemoryError,
    RecursionError,
    asyncio.CancelledError,
    SystemExit,
    UnicodeError,
    ExceptionGroup,
)


def planted(number: int) -> BaseException:
    kind = ERRORS[number % len(ERRORS)]
    return ExceptionGroup("planted", [ValueError()]) if kind is ExceptionGroup else kind("planted")


def is_right(result: SessionResult) -> bool:
    """What failed alongside the work takes nothing away; else it is our fault, and named."""
    if result.outcome == "completed":
        return result.reward == 0.5
    told = result.failure
    return result.outcome == "infra_error" and result.reward is None and told is not None and "planted" in told.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::RuntimeWarning")
def test_a_session_is_reported_whichever_step_fails(tmp_path: Path) -> None:
    wrong = asyncio.run(_reported_wrongly(tmp_path))
    # A step that fails leaves coroutines and sockets to nobody, some as long as its event loop is there. A node that
    # was settled in this process before put them out of the collector's sight.
    with warnings.catch_warnings(action="ignore"):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    assert wrong == {}


async def _reported_wrongly(tmp_path: Path) -> dict[Step, Any]:
    server, steps = Listener(), Steps()
    async with listening_node(tmp_path, server):
        await server.report_of("warm")
        with steps.watched():
            assert is_right(await server.report_of("whole"))
            found = [step for step in steps.entered if step[0].startswith("node/sessions/")]
            assert len(found) > 60
            wrong: dict[Step, Any] = {}
            for number, step in enumerate(found):
                session_id = f"s{number}"
                if step in LAST_RESORT:
                    steps.failing[session_id] = (step, RuntimeError("planted"))
                    await server.loses(session_id)
                    continue
                steps.failing[session_id] = (step, planted(number))
                result = await server.report_of(session_id)
                if not is_right(result) or session_id in steps.failing:
                    wrong[step] = (result.outcome, result.failure)
    return wrong


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LimitExceeded("a result has at most 5 bytes"), "at most 5 bytes"),
        (InvalidRequest("the result is of another task"), "of another task"),
        (GanglineError("the server broke"), "the server broke"),
    ],
)
async def test_a_session_whose_result_the_server_does_not_take_ends_with_that_cause(
    tmp_path: Path, error: GanglineError, says: str
) -> None:
    def refuse(result: SessionResult) -> None:
        if result.outcome == "completed":
            raise error

    server = Listener(refuse)
    async with listening_node(tmp_path, server):
        result = await server.report_of("s1")
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("result_not_delivered", False)
    assert says in result.failure.message
    assert "ended as completed" in result.failure.message
    kept = decode_msgpack((tmp_path / "outgoing" / "refused" / "s1.1.msgpack").read_bytes(), SessionResult)
    assert (kept.outcome, kept.reward) == ("completed", 0.5)


async def test_what_could_not_be_delivered_is_kept_when_the_report_of_that_is_refused_too(tmp_path: Path) -> None:
    """It has the same name as the report that takes its place, which holds nothing."""

    def refuse(result: SessionResult) -> None:
        if result.outcome == "completed":
            raise LimitExceeded("a result has at most 5 bytes")
        server.heard["s1"].set_result(result)
        raise LeaseLost("it was cancelled meanwhile")

    server = Listener(refuse)
    async with listening_node(tmp_path, server) as pipeline:
        await server.report_of("s1")
        while pipeline.status().num_ended == 0:
            await asyncio.sleep(0.02)
    kept = decode_msgpack((tmp_path / "outgoing" / "refused" / "s1.1.msgpack").read_bytes(), SessionResult)
    assert (kept.outcome, kept.reward) == ("completed", 0.5)
    assert [path.name for path in (tmp_path / "outgoing").iterdir()] == ["refused"]


class Doubting(Offers):
    """Another node may run what failed here."""

    async def are_why(self, failure: Failure, lease: Lease) -> bool:
        return True


async def test_a_session_that_would_end_by_being_given_back_is_reported(tmp_path: Path) -> None:
    """Else its cause would be that it was given back, and its calls would be lost."""
    server = Listener()
    broken = {"evaluator": {"strategy": "script", "config": {"command": "false"}}}
    async with listening_node(tmp_path, server, offers=Doubting([])):
        result = await server.report_of("s1", **broken, max_attempts=1)
        server.heard["s2"] = asyncio.get_running_loop().create_future()
        server.waiting.put_nowait(lease_of("s2", **TASK | broken))
        assert await server.heard["s2"] == "released, has_run=True"
    assert result.failure is not None
    assert (result.outcome, result.failure.boundary, len(result.completions)) == ("infra_error", "evaluator", 1)


async def test_a_session_goes_on_when_the_operators_own_code_fails(tmp_path: Path) -> None:
    server = Listener()

    def fails(_result: SessionResult) -> None:
        raise ValueError("the operator's")

    async with listening_node(tmp_path, server, on_result=fails):
        result = await server.report_of("s1")
    assert (result.outcome, result.reward) == ("completed", 0.5)


async def test_a_lost_session_is_named_until_the_server_hears_of_it(tmp_path: Path) -> None:
    server, steps = Listener(), Steps()
    server.deaf_to = {"s1": 3}
    async with listening_node(tmp_path, server):
        with steps.watched():
            steps.failing["s1"] = (LAST_RESORT[0], RuntimeError("planted"))
            await server.loses("s1")
            heard = len(server.beats)
            async with asyncio.timeout(GIVE_UP_S):
                while len(server.beats) < heard + 3:
                    await asyncio.sleep(0.02)
    assert server.deaf_to == {"s1": 0}
    assert sum("s1" in beat for beat in server.beats) == 1
