"""Sessions of one node that wait for images: what goes ahead, what they run with, what is told of a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gangline.domain.errors import ImageMissing
from gangline.domain.sandbox import ExecResult, Runtime, RuntimeStart
from gangline.domain.session import Grading, GradingRequest
from gangline.domain.task import RuntimeSpec
from gangline.node.health.offers import Offers
from gangline.node.sessions.adoption import AttemptNote
from gangline.node.sessions.attempt import Attempt
from gangline.node.sessions.parts import NodeParts
from gangline.node.sessions.replay.regrading import regrade
from gangline.node.sessions.stages import PoolSizes
from gangline.sandbox.images.pulling import Pulls
from gangline.sandbox.images.supply import ImageSupply
from gangline.settings import plugins
from gangline.store.journal.entries import AttemptOpened
from integration.test_every_step_reports import Listener, listening_node
from support.image_store import ScriptedStore, held
from support.node.attempt import lease_of, node_parts
from support.node.folder_runtime import FolderRuntime
from support.service.running import any_plugin

SIZES = PoolSizes(init_workers=1, ready_slots=2, run_slots=3, prewarm_workers=1, postrun_workers=1)
NAME = "docker.io/library/swe:1"


class Engine(Runtime):
    """Starts folders in place of containers; `gone` images turn out to be missing once."""

    name = "engine"
    has_services = True

    def __init__(self, folder: Path, store: ScriptedStore) -> None:
        self.folder = folder
        self.store = store
        self.started: list[RuntimeStart] = []
        self.here_first: set[str] = set()
        """Images that were here when the first sandbox started."""
        self.gone = 0

    @property
    def image_store(self) -> ScriptedStore:
        return self.store

    def services_of(self, runtime_id: str, spec: RuntimeSpec) -> Any:
        return None

    async def start(self, start: RuntimeStart) -> FolderRuntime:
        if self.gone:
            self.gone -= 1
            self.store.images.clear()
            raise ImageMissing("no such image")
        if not self.started:
            self.here_first = set(self.store.images)
        self.started.append(start)
        return FolderRuntime(self.folder / start.runtime_id)

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        return 0


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(tmp_path / "sandboxes", ScriptedStore())

    def make(_name: str) -> Engine:
        return made

    monkeypatch.setattr(plugins, "make_runtime", make)
    return made


def with_images(parts: NodeParts, policy: Any = "if_missing") -> NodeParts:
    async def pause(seconds: float) -> None:
        await asyncio.sleep(0)

    return msgspec.structs.replace(parts, images=ImageSupply(Pulls(pause=pause), policy))


def begun(parts: NodeParts, name: str, image: str | None = "swe:1") -> tuple[Attempt, asyncio.Task[Any]]:
    attempt = Attempt(lease_of(name, runtime={"backend": "engine", "image": image}), parts)
    return attempt, asyncio.create_task(attempt.live(), name=f"session.{name}")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_session_that_waits_for_its_image_holds_up_no_other(tmp_path: Path, engine: Engine) -> None:
    engine.store.may_end = may_end = asyncio.Event()
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        waiting = [begun(parts, f"w{number}") for number in range(3)]
        await until(lambda: parts.images.now().waiting == {NAME: 3})
        assert [(attempt.stage, attempt.waits_for_image) for attempt, _ in waiting] == [("init", True)] * 3
        _, other = begun(parts, "other", None)
        assert (await other).outcome == "completed"
        may_end.set()
        results = [await life for _, life in waiting]
    assert [result.outcome for result in results] == ["completed"] * 3
    assert engine.store.pulled == [NAME]
    assert {result.images["swe:1"] for result in results} == {held(NAME).digest}
    assert [start.spec.image for start in engine.started if start.spec.image] == [held(NAME).image_id] * 3


async def test_a_cancelled_session_leaves_the_pull_to_the_others(tmp_path: Path, engine: Engine) -> None:
    engine.store.may_end = may_end = asyncio.Event()
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        (_, first), (_, second) = begun(parts, "a"), begun(parts, "b")
        await until(lambda: parts.images.now().waiting == {NAME: 2})
        first.cancel()
        await asyncio.wait({first})
        assert engine.store.num_now == 1
        may_end.set()
        assert (await second).outcome == "completed"
        engine.store.may_end = asyncio.Event()
        _, last = begun(parts, "c", "other:1")
        await until(lambda: engine.store.num_now == 1)
        last.cancel()
        await asyncio.wait({last})
        await until(lambda: engine.store.num_now == 0)


async def test_images_of_graders_and_services_are_there_before_the_agent_starts(tmp_path: Path, engine: Engine) -> None:
    grader = {
        "strategy": "script",
        "refresh_runtime": True,
        "runtime": {"backend": "engine", "image": "grader:1"},
        "config": {"command": "echo 1 > reward.txt", "reward_file": "reward.txt"},
    }
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        runtime = {"backend": "engine", "image": "swe:1", "services": {"db": {"image": "postgres:16"}}}
        result = await Attempt(lease_of("s", runtime=runtime, evaluator=grader), parts).live()
    assert (result.outcome, result.reward) == ("completed", 1.0)
    assert sorted(result.images) == ["grader:1", "postgres:16", "swe:1"]
    assert len(engine.store.pulled) == 3
    agent, other = engine.started
    assert agent.spec.services["db"].image == held("docker.io/library/postgres:16").image_id
    assert other.spec.image == held("docker.io/library/grader:1").image_id


def graded_in(image: str, **more: Any) -> dict[str, Any]:
    config = {"command": "echo 1 > reward.txt", "reward_file": "reward.txt"}
    runtime = {"backend": "engine", "image": image}
    return {"strategy": "script", "refresh_runtime": True, "runtime": runtime, "config": config, **more}


async def test_images_of_later_steps_are_there_before_the_agent_starts(tmp_path: Path, engine: Engine) -> None:
    steps = [{"name": f"s{n}", "instruction": "x", "evaluator": graded_in(f"grader:{n}")} for n in (1, 2)]
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        lease = lease_of("s", runtime={"backend": "engine", "image": "swe:1"}, steps=steps)
        result = await Attempt(lease, with_images(plain)).live()
    assert (result.outcome, result.reward) == ("completed", 1.0)
    names = [f"docker.io/library/{name}" for name in ("grader:1", "grader:2", "swe:1")]
    assert sorted(engine.here_first) == names
    assert sorted(result.images) == ["grader:1", "grader:2", "swe:1"]


class KeptFolder(FolderRuntime):
    """The agent's sandbox of a session from before the node's restart."""

    note = None
    spent_s = 1.0

    async def annotate(self, note: bytes | None) -> None: ...


async def rejoined(_sandbox: Any) -> ExecResult:
    return ExecResult(exit_code=0, stdout=b"", stderr=b"")


@pytest.mark.parametrize("is_refused", [False, True], ids=["pulled", "refused"])
async def test_a_session_from_before_the_restart_holds_its_images_again(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.setattr("gangline.node.sessions.harness.run.rejoin", rejoined)
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        engine.store.words = ["manifest unknown"] if is_refused else []
        engine.store.may_end = may_end = asyncio.Event()
        lease = lease_of("s", runtime={"backend": "engine", "image": "swe:1"})
        await parts.journal.open_attempt(AttemptOpened("s", 1, lease.task_id, lease.fence))
        note = AttemptNote(lease=lease, key_digest=b"", timings=(), entered_at=time.time())
        kept: Any = KeptFolder(tmp_path / "kept")
        attempt = await Attempt.adopted(note, kept, parts)
        prepared = await attempt.prepare()
        assert prepared.sandbox is kept, "it waits for no image"
        await until(lambda: engine.store.pulled == [NAME])
        may_end.set()
        await until(lambda: engine.store.ended if is_refused else parts.images.digests("s.1"))
        result = await attempt.live()
        assert result.outcome == "completed", "what it needs an image for fails then, and only then"
        assert parts.images.digests("s.1") == {}, "it holds none any more"


async def test_a_regrading_waits_for_its_image_without_a_place_among_the_graders(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.node.sessions.replay.regrading.check_task", any_plugin)
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        lease = lease_of("s", runtime={"backend": "engine"}, evaluator={"keep_files": True})
        result = await Attempt(lease, parts).live()

        def again(image: str) -> asyncio.Task[Grading]:
            task = lease.task | {"evaluator": graded_in(image)}
            return asyncio.create_task(regrade(GradingRequest(task=task, result=result), parts))

        await parts.images.bring("before", [RuntimeSpec(backend="engine", image="here:1")])
        engine.store.may_end = may_end = asyncio.Event()
        waiting = again("swe:1")
        await until(lambda: engine.store.num_now == 1)
        other = again("here:1")
        await asyncio.wait({other}, timeout=30)
        may_end.set()
        assert other.done(), "the only place among the graders was taken"
        assert other.result().reward == 1.0
        assert (await waiting).reward == 1.0
        engine.store.words = ["manifest unknown"]
        refused = await again("swe:2")
    assert (refused.outcome, refused.reward) == ("infra_error", None)
    assert refused.failure is not None
    assert refused.failure.code == "pull_failed"


async def test_a_failed_pull_is_the_infrastructures_in_the_registrys_words(tmp_path: Path, engine: Engine) -> None:
    engine.store.words = ["manifest unknown: manifest unknown"]
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        result = await begun(with_images(plain), "s")[1]
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert (result.failure.boundary, result.failure.code, result.failure.retryable) == ("runtime", "pull_failed", True)
    assert "'swe:1' could not be pulled: manifest unknown" in result.failure.message
    assert engine.started == []


async def test_an_image_that_somebody_removed_meanwhile_is_pulled_again(tmp_path: Path, engine: Engine) -> None:
    engine.gone = 1
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        parts = with_images(plain)
        assert (await begun(parts, "s")[1]).outcome == "completed"
        assert engine.store.pulled == [NAME] * 2
        engine.gone = 2
        result = await begun(parts, "t")[1]
    assert result.failure is not None
    assert (result.failure.code, result.failure.retryable) == ("runtime_failed", True)


async def test_a_node_that_never_pulls_hands_the_name_on(tmp_path: Path, engine: Engine) -> None:
    async with node_parts(tmp_path, sizes=SIZES) as plain:
        result = await begun(with_images(plain, "never"), "s")[1]
    assert (result.outcome, result.images) == ("completed", {})
    assert [start.spec.image for start in engine.started] == ["swe:1"]
    assert engine.store.pulled == []


@pytest.mark.parametrize("is_told", [True, False], ids=["the server knows", "the server cannot know"])
async def test_a_session_that_would_come_back_at_once_rests_before_it_is_given_back(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Such as one of a node whose offer names no images: it does not lack this one."""
    rests, sleep = list[float](), asyncio.sleep

    async def noted(seconds: float, result: Any = None) -> Any:
        rests.append(seconds)
        return await sleep(0 if seconds == 1234.5 else seconds, result)

    monkeypatch.setattr("gangline.node.sessions.pipeline._POSTPONED_S", 1234.5)
    engine.store.words = ["connection refused"] * 6
    server = Listener()
    async with node_parts(tmp_path / "plain") as plain:
        supply = with_images(plain).images
    monkeypatch.setattr(asyncio, "sleep", noted)
    offers = Offers(["engine"], plugins.make_runtime, images=supply if is_told else None)
    async with listening_node(tmp_path, server, offers, images=supply):
        heard = server.heard["a"] = asyncio.get_running_loop().create_future()
        server.waiting.put_nowait(lease_of("a", runtime={"backend": "engine", "image": "swe:1"}))
        async with asyncio.timeout(30):
            assert await heard == "released, has_run=False"
    assert (1234.5 in rests) == (not is_told)


async def test_a_session_goes_back_unharmed_while_its_registry_is_away_and_ends_if_there_is_no_such_image(
    tmp_path: Path, engine: Engine
) -> None:
    async def pause(seconds: float) -> None:
        await asyncio.sleep(0)

    engine.store.words = ["connection refused"] * 6 + ["manifest unknown"]
    server, supply = Listener(), ImageSupply(Pulls(pause=pause))
    async with listening_node(tmp_path, server, Offers(["engine"], images=supply), images=supply):
        for name in ("a", "b"):  # the second hears what the first one's pull ended with
            heard = server.heard[name] = asyncio.get_running_loop().create_future()
            server.waiting.put_nowait(lease_of(name, runtime={"backend": "engine", "image": "swe:1"}, max_attempts=1))
            async with asyncio.timeout(30):
                assert await heard == "released, has_run=False"
        assert len(engine.store.pulled) == 6
        result = await server.report_of("c", runtime={"backend": "engine", "image": "swe:2"})
    assert result.failure is not None
    assert (result.outcome, result.failure.code) == ("infra_error", "pull_failed")
