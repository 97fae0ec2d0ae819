"""Sessions go to nodes that can run them; those that no node can run say why and wait."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gangline.domain.errors import RuntimeFailed
from gangline.domain.image_names import MAX_IMAGES, packed
from gangline.domain.placement import Offer
from gangline.domain.task import TaskRequest
from gangline.domain.views import PULLING
from gangline.node.health.offers import Offers
from gangline.sandbox.bubblewrap.runtime import BubblewrapRuntime
from gangline.sandbox.containers.runtime import DockerRuntime
from gangline.settings.machine import Settings
from gangline.store.sql.tasks import TaskStore
from support.service.older_stores import make_older
from support.service.running import NODE_URL, beat, request

HERE = Offer(runtimes=("process", "sandbox"), missing={"docker": "docker is not installed"})
BOTH = Offer(runtimes=("docker", "process", "sandbox"))


@pytest.fixture
def store(any_database: str):
    with TaskStore(any_database, lease_s=30.0) as opened:
        yield opened


def of(name: str, backend: str, **changes: object) -> TaskRequest:
    return request(name, num_samples=2, runtime={"backend": backend}, **changes)


def offers(store: TaskStore, offer: Offer | None, node_id: str = "n1", *, draining: bool = False) -> None:
    told = msgspec.structs.replace(beat([], node_id=node_id), offer=offer, draining=draining)
    store.heartbeat(told)


def leased(store: TaskStore, node_id: str, count: int = 9) -> list[str]:
    return [lease.task_id for lease in store.lease(node_id, NODE_URL, count)]


def test_a_node_passes_over_what_it_cannot_run_and_another_takes_it(store: TaskStore) -> None:
    offers(store, HERE)
    (first, second) = store.submit([of("d", "docker"), of("s", "sandbox")])
    assert first.unplaced is not None
    assert "node n1 lacks runtime `docker`: docker is not installed" in first.unplaced
    assert second.unplaced is None
    assert [session.unplaced for session in store.task("d").sessions] == [first.unplaced] * 2
    assert store.session("s.0").unplaced is None
    assert store.status().unplaced == {first.unplaced: 2}
    assert leased(store, "n1") == ["s", "s"]
    assert leased(store, "n1") == []
    offers(store, BOTH, "n2")
    assert store.status().unplaced == {}
    assert store.session("d.0").unplaced is None
    assert leased(store, "n2") == ["d", "d"]


def test_nodes_are_asked_for_by_what_is_queued_or_held_except_by_nodes_that_drain(store: TaskStore) -> None:
    def demand() -> int:
        return store.status().demand

    assert demand() == 0
    store.submit([of("d", "docker"), of("s", "sandbox")])
    assert demand() == 4, "no node has come yet"
    offers(store, HERE)
    assert demand() == 3, "the two that no node can run keep one that says why"
    assert leased(store, "n1") == ["s", "s"]
    assert demand() == 3
    offers(store, HERE, draining=True)
    offers(store, HERE, "n2")
    assert demand() == 1
    offers(store, BOTH, "n2")
    assert demand() == 2
    assert leased(store, "n2") == ["d", "d"]
    assert demand() == 2


def test_labels_place_a_session_whichever_of_its_runtimes_asks_for_them(store: TaskStore) -> None:
    plain = msgspec.structs.replace(HERE, labels=("x86_64",))
    offers(store, plain)
    grader = {
        "strategy": "script",
        "refresh_runtime": True,
        "runtime": {"backend": "sandbox", "node_labels": ["gpu", "aarch64"]},
    }
    (first, second, third) = store.submit(
        [
            request("x", runtime={"backend": "sandbox", "node_labels": ["x86_64"]}, num_samples=1),
            request("g", runtime={"backend": "sandbox", "node_labels": ["gpu"]}, num_samples=1),
            of("a", "sandbox", evaluator=grader),
        ]
    )
    assert first.unplaced is None
    assert second.unplaced == "no node can run it; node n1 lacks label `gpu`"
    assert third.unplaced == "no node can run it; node n1 lacks label `aarch64`; label `gpu`"
    assert leased(store, "n1") == ["x"]
    offers(store, msgspec.structs.replace(HERE, labels=("x86_64", "gpu")), "n2")
    assert leased(store, "n2") == ["g"]
    assert store.status().unplaced == {"no node can run it; node n2 lacks label `aarch64`": 2}


def test_a_session_goes_to_a_node_that_has_its_images(store: TaskStore) -> None:
    images = {"sandbox": {"/images": packed(["a"])}, "docker": {"": packed(["debian:12"])}}
    offers(store, msgspec.structs.replace(BOTH, images=images))
    grader = {"strategy": "script", "refresh_runtime": True, "runtime": {"backend": "sandbox", "image": "/images/c"}}
    asked = {
        "here": {"backend": "sandbox", "image": "/images/a"},
        "away": {"backend": "sandbox", "image": "/images/b"},
        "elsewhere": {"backend": "sandbox", "image": "/other/b"},
        "named": {"backend": "docker", "image": "docker.io/library/debian:12"},
        "unnamed": {"backend": "docker", "image": "debian"},
    }
    answers = store.submit(
        [
            *(request(name, runtime=runtime, num_samples=1) for name, runtime in asked.items()),
            of("graded", "sandbox", evaluator=grader),
        ]
    )
    lacks = "no node can run it; node n1 lacks image"
    assert [answer.unplaced for answer in answers] == [
        None,
        f"{lacks} `/images/b` for runtime `sandbox`",
        None,
        None,
        f"{lacks} `debian` for runtime `docker`",
        f"{lacks} `/images/c` for runtime `sandbox`",
    ]
    assert leased(store, "n1") == ["here", "elsewhere", "named"]
    images["sandbox"]["/images"] = packed(["b", "c"])
    offers(store, msgspec.structs.replace(BOTH, images=images), "n2")
    assert sorted(leased(store, "n2")) == ["away", "graded", "graded"]


def of_image(name: str, image: str, *, num_samples: int = 1, **changes: object) -> TaskRequest:
    return request(name, runtime={"backend": "docker", "image": image}, num_samples=num_samples, **changes)


def test_a_node_that_pulls_is_given_sessions_whose_images_it_lacks_unless_their_pull_failed(store: TaskStore) -> None:
    pulls = msgspec.structs.replace(BOTH, images={"docker": {"": ""}}, pulls=("docker",))
    offers(store, pulls)
    (first, second) = store.submit([of_image("a", "debian:12"), of_image("b", "nobody/has:this")])
    assert (first.unplaced, second.unplaced) == (None, None)
    failed = {"docker": {"docker.io/nobody/has:this": "could not be pulled: manifest unknown"}}
    for images in ({"docker": {"": ""}}, {}):  # also where the node does not know what it has
        offers(store, msgspec.structs.replace(pulls, images=images, not_pulled=failed))
        assert store.session("b.0").unplaced == (
            "no node can run it; node n1 lacks image `nobody/has:this` for runtime `docker`: could not be pulled: "
            "manifest unknown"
        )
    assert leased(store, "n1") == ["a"]
    offers(store, pulls, "n2")
    assert leased(store, "n2") == ["b"]


PULLS = msgspec.structs.replace(BOTH, images={"docker": {"": ""}}, pulls=("docker",))


def with_images(*names: str) -> Offer:
    return msgspec.structs.replace(PULLS, images={"docker": {"": packed(names)}})


def test_a_session_is_left_to_a_node_that_has_its_image(store: TaskStore) -> None:
    offers(store, with_images("swe:1"))
    offers(store, PULLS, "n2")
    store.submit([of_image("a", "swe:1"), of_image("b", "swe:2"), of_image("c", "swe:1")])
    assert leased(store, "n2", 1) == ["b"], "nobody has its image, so its place in the queue decides"
    assert leased(store, "n1", 1) == ["a"]
    assert leased(store, "n2", 1) == ["c"], "there is nothing else to do"


def test_a_session_is_left_to_a_node_that_pulls_its_image_already(store: TaskStore) -> None:
    for node_id in ("n1", "n2"):
        offers(store, PULLS, node_id)
    store.submit([of_image("a", "swe:1", num_samples=4), of_image("b", "swe:2", num_samples=4)])
    assert leased(store, "n1", 2) == ["a", "a"]
    assert leased(store, "n2", 2) == ["b", "b"]
    assert leased(store, "n1", 2) == ["a", "a"]
    assert leased(store, "n1", 1) == ["b"], "it has room, and nothing waits for its image"
    assert leased(store, "n2", 2) == ["b"]


@pytest.mark.parametrize("absent", ["full", "draining", "failed", "unsuited", "broken", "low"])
def test_no_session_waits_for_a_node_that_has_its_image_and_cannot_take_it(store: TaskStore, absent: str) -> None:
    offer = with_images("swe:1")
    if absent == "failed":
        failed = {"docker": {"docker.io/library/swe:1": "could not be pulled"}}
        offer = msgspec.structs.replace(PULLS, not_pulled=failed)
    if absent == "unsuited":
        offer = msgspec.structs.replace(offer, networks=("none",))
    metrics = {"broken": {"breaker_open_engine": 1.0}, "low": {"disk_low_bytes": 1.0}}.get(absent, {})
    told = msgspec.structs.replace(beat([]), offer=offer, draining=absent == "draining", metrics=metrics)
    store.heartbeat(msgspec.structs.replace(told, capacity=0 if absent == "full" else 8))
    offers(store, PULLS, "n2")
    store.submit([of_image("a", "swe:1"), of_image("b", "swe:2")])
    assert leased(store, "n2", 1) == ["a"]


def test_a_lease_looks_for_images_at_the_head_of_the_queue_alone(
    store: TaskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many images the tasks that wait have: comparing them all cost seconds."""
    asked = set[str]()

    def has_images(body: str, _offer: str | None) -> bool:
        asked.add(body)
        return False

    monkeypatch.setattr("gangline.store.sql.placing._has_images", has_images)
    for node_id in ("n1", "n2"):
        offers(store, PULLS, node_id)
    store.submit([of_image(f"t{number}", f"swe:{number}") for number in range(200)])
    assert leased(store, "n1", 2) == ["t0", "t1"]
    assert 2 <= len(asked) <= 64


def test_a_session_of_a_higher_priority_is_not_passed_over_for_its_image(store: TaskStore) -> None:
    offers(store, with_images("swe:1"))
    offers(store, PULLS, "n2")
    store.submit(
        [of_image("low", "swe:2"), of_image("high", "swe:1", priority=5), of_image("too", "swe:3", priority=5)]
    )
    assert leased(store, "n2", 1) == ["too"]
    assert leased(store, "n2", 2) == ["high", "low"]


def test_a_session_says_which_image_it_waits_for(store: TaskStore) -> None:
    offers(store, msgspec.structs.replace(BOTH, pulls=("docker",)))
    store.submit([of_image("a", "debian:12", num_samples=2), of_image("b", "alpine:3")])
    leases = store.lease("n1", NODE_URL, 9)
    told = msgspec.structs.replace(beat(leases, stage="init"), metrics={f"{PULLING}docker.io/library/debian:12": 2.0})
    store.heartbeat(told)
    waits = "waiting for image debian:12, pulled by n1 (waiting: 2)"
    assert [session.waits_for for session in store.task("a").sessions] == [waits] * 2
    assert (store.session("a.1").waits_for, store.session("b.0").waits_for) == (waits, None)
    store.heartbeat(msgspec.structs.replace(told, sessions=beat(leases, stage="run").sessions))
    assert store.session("a.0").waits_for is None, "its sandbox has started"


def test_a_node_that_lacks_the_runtime_is_not_said_to_lack_its_image(store: TaskStore) -> None:
    offers(store, HERE)
    (answer,) = store.submit([request("d", runtime={"backend": "docker", "image": "x"})])
    assert answer.unplaced == "no node can run it; node n1 lacks runtime `docker`: docker is not installed"


def test_a_store_of_version_5_takes_images_with_long_names(any_database: str) -> None:
    with TaskStore(any_database) as store, store.database.writing() as conn:
        if conn.dialect.name == "postgresql":
            conn.exec_driver_sql("ALTER TABLE needs ALTER COLUMN body TYPE VARCHAR(512)")
        make_older(conn, 5)
    longest, too_long = (f"/images/{'x' * length}" for length in (992, 993))
    with TaskStore(any_database) as store:
        offers(store, msgspec.structs.replace(HERE, images={"sandbox": {"/images": ""}}))
        first, second = store.submit(
            [
                request(name, runtime={"backend": "sandbox", "image": image})
                for name, image in (("long", longest), ("too-long", too_long))
            ]
        )
    assert first.unplaced is not None
    assert longest in first.unplaced
    assert second.unplaced is None, "it is not placed by"


async def test_a_node_tells_the_images_of_its_folders_as_they_come_and_go(tmp_path: Path) -> None:
    folder, cache = tmp_path / "images", tmp_path / "cache"
    settings = Settings(image_folders=(folder,), cache_dir=cache)
    told = Offers(["sandbox"], lambda _: BubblewrapRuntime(settings))
    pulled = {} if BubblewrapRuntime(settings).image_store is None else {"": ""}
    assert told.offer.images == {}, "a start looks for programs only"
    await told.look_at_images()
    assert told.offer.images == {"sandbox": {str(folder): "", str(cache / "images"): "", **pulled}}
    (folder / "swe").mkdir(parents=True)
    await told.look_at_images()
    assert told.offer.images["sandbox"][str(folder)] == packed(["swe"])
    for number in range(MAX_IMAGES):
        (folder / str(number)).touch()
    await told.look_at_images()
    assert told.offer.images == {"sandbox": {str(cache / "images"): "", **pulled}}, "too many to tell"


async def test_a_node_tells_the_images_of_an_engine_while_it_answers(tmp_path: Path) -> None:
    engine = tmp_path / "docker"
    engine.write_text(f"#!/bin/sh\nprintf 'debian\\t12\\t<none>\\tsha256:{'ab' * 32}\\n'\n")
    engine.chmod(0o755)
    told = Offers(["docker"], lambda _: DockerRuntime(Settings(docker=(str(engine),))))
    await told.look_at_images()
    assert told.offer.images == {"docker": {"": packed(["debian:12", "ab" * 6])}}
    engine.write_text("#!/bin/sh\necho 'the daemon is gone' >&2; exit 1\n")
    with pytest.raises(RuntimeFailed, match="the daemon is gone"):
        await DockerRuntime(Settings(docker=(str(engine),))).images()
    await told.look_at_images()
    assert told.offer.images == {}


def gpu_tasks(*numbers: int, backend: str = "docker") -> list[TaskRequest]:
    """One session each, `g0` and on; 0: none of a GPU."""
    return [
        request(f"g{at}", num_samples=1, runtime={"backend": backend, "image": "x", "gpus": number})
        for at, number in enumerate(numbers)
    ]


def test_a_session_goes_to_a_node_that_has_as_many_gpus_free(store: TaskStore) -> None:
    offers(store, msgspec.structs.replace(BOTH, gpus={"docker": 2}))
    store.submit(gpu_tasks(1, 2, 1, 0))
    taken = store.lease("n1", NODE_URL, 9)
    assert [lease.task_id for lease in taken] == ["g0", "g3"], (
        "what needs none goes ahead; one GPU is free for g1's two"
    )
    assert leased(store, "n1") == []
    store.release("n1", taken[1].session_id, taken[1].fence)
    assert leased(store, "n1") == ["g3"], "it freed no GPU"
    store.release("n1", taken[0].session_id, taken[0].fence)
    assert leased(store, "n1") == ["g0"], "it was given back, and it is the first again"
    offers(store, msgspec.structs.replace(BOTH, gpus={"docker": 2, "podman": 2}), "n2")
    assert leased(store, "n2") == ["g1"]
    assert leased(store, "n1") == ["g2"]


def test_a_node_without_gpus_passes_over_sessions_that_need_them_and_says_so(store: TaskStore) -> None:
    offers(store, msgspec.structs.replace(BOTH, gpus={"docker": 0}))
    answers = store.submit(
        [*gpu_tasks(2, 0), *(one.model_copy(update={"task_id": "s"}) for one in gpu_tasks(1, backend="sandbox"))]
    )
    lacks = "no node can run it; node n1 lacks GPUs:"
    assert [answer.unplaced for answer in answers] == [
        f"{lacks} 2 are asked for, and it has 0 for runtime `docker`: its operator names them in GANGLINE_GPUS",
        None,
        f"{lacks} runtime `sandbox` gives none; docker and podman do",
    ]
    assert leased(store, "n1") == ["g1"]
    offers(store, msgspec.structs.replace(BOTH, gpus={"docker": 1}))
    assert leased(store, "n1") == []
    assert store.session("g0.0").unplaced is not None


def test_a_graders_gpus_are_those_of_its_session(store: TaskStore) -> None:
    offers(store, msgspec.structs.replace(BOTH, gpus={"docker": 2}))
    grader = {"strategy": "script", "refresh_runtime": True, "runtime": {"backend": "docker", "image": "x", "gpus": 2}}
    (task,) = gpu_tasks(1)
    store.submit(
        [
            task.model_copy(
                update={
                    "task_id": name,
                    "evaluator": TaskRequest.model_validate({**task.model_dump(), "evaluator": grader}).evaluator,
                }
            )
            for name in ("a", "b")
        ]
    )
    assert leased(store, "n1") == ["a"]


async def test_a_node_tells_the_gpus_that_its_operator_named(tmp_path: Path) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    settings = Settings(docker=(str(engine),), gpus=("nvidia.com/gpu=0", "nvidia.com/gpu=1"))
    made = {"docker": lambda: DockerRuntime(settings), "sandbox": lambda: BubblewrapRuntime(settings)}
    assert Offers(["docker", "sandbox"], lambda name: made[name]()).offer.gpus == {"docker": 2}
    with pytest.raises(ValueError, match="named twice"):
        Settings(gpus=("a", "a"))


def test_a_graders_own_runtime_and_those_of_environments_are_needed_too(store: TaskStore) -> None:
    offers(store, HERE)
    grader = {"strategy": "script", "refresh_runtime": True, "runtime": {"backend": "docker"}}
    game = {"game": {"kind": "mcp", "runtime": {"backend": "docker"}}}
    answers = store.submit([of("g", "sandbox", evaluator=grader), of("e", "sandbox", environments=game)])
    assert [answer.unplaced is not None for answer in answers] == [True, True]
    assert leased(store, "n1") == []


def test_what_changed_in_an_offer_wakes_waiting_nodes_and_the_same_offer_does_not(store: TaskStore) -> None:
    for offer in (HERE, HERE, BOTH, BOTH):
        offers(store, offer)
    assert [event.kind for event in store.events() if event.kind == "node.offer"] == ["node.offer"]


def test_a_node_that_does_not_say_what_it_can_run_is_given_everything(store: TaskStore) -> None:
    offers(store, None)
    (answer,) = store.submit([of("d", "docker")])
    assert answer.unplaced is None
    assert leased(store, "n1") == ["d", "d"]


def test_draining_and_silent_nodes_count_for_nothing(store: TaskStore) -> None:
    offers(store, HERE)
    offers(store, BOTH, "n2", draining=True)
    (answer,) = store.submit([of("d", "docker")])
    assert answer.unplaced is not None
    assert "n1" in answer.unplaced


def test_priorities_hold_among_what_a_node_can_run(store: TaskStore) -> None:
    offers(store, HERE)
    store.submit([of("low", "sandbox"), of("d", "docker", priority=9), of("high", "process", priority=5)])
    assert leased(store, "n1", 3) == ["high", "high", "low"]


def test_a_store_of_version_3_is_opened_and_its_sessions_run_anywhere(tmp_path: Path) -> None:
    target = tmp_path / "gangline.db"
    with TaskStore(target) as store:
        store.submit([of("d", "docker")])
        with store.database.writing() as conn:
            make_older(conn, 3)
            conn.exec_driver_sql("DROP INDEX sessions_in_queue")
            conn.exec_driver_sql("ALTER TABLE sessions DROP COLUMN needs")
            conn.exec_driver_sql("ALTER TABLE nodes DROP COLUMN offer")
            conn.exec_driver_sql("DROP TABLE needs")
            conn.exec_driver_sql("DROP INDEX tasks_by_fork")
            conn.exec_driver_sql("ALTER TABLE tasks DROP COLUMN fork_of")
            old = "CREATE INDEX sessions_in_queue ON sessions (priority DESC, turn, position) WHERE state = 'queued'"
            conn.exec_driver_sql(f"{old} AND ready_at IS NULL")
    with TaskStore(target) as store:
        offers(store, HERE)
        (answer,) = store.submit([of("new", "docker")])
        assert answer.unplaced is not None
        assert leased(store, "n1") == ["d", "d"]
