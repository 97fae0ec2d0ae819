"""What a node offers, without a sandbox."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gangline.domain.errors import PullFailed, PullPostponed, RuntimeUnavailable, UnknownPlugin
from gangline.domain.placement import Allowed, Offer, nearest, needs_of
from gangline.domain.sandbox import Runtime, RuntimeStart, Sandbox
from gangline.domain.task import TaskRequest
from gangline.node.health.offers import Offers
from gangline.sandbox.images.supply import ImageSupply
from gangline.settings.node import NodeSettings
from support.image_store import ScriptedStore
from support.node.attempt import lease_of


class Machine:
    """Runtimes by name: `absent` lacks its program, `broken` finds that out when it is tried."""

    def __init__(self) -> None:
        self.broken = {"broken"}
        self.absent = {"absent"}
        self.checked: list[str] = []

    def make(self, name: str) -> _Runtime:
        return _Runtime(self, name)


class _Runtime(Runtime):
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name  # type: ignore[misc]  # each its own

    async def start(self, start: RuntimeStart) -> Sandbox:
        raise NotImplementedError

    async def reap(self, owner: str, root: Path, keep: frozenset[str] = frozenset()) -> int:
        raise NotImplementedError

    def missing(self) -> str | None:
        return "not installed" if self.name in self._machine.absent else None

    async def check(self) -> None:
        self._machine.checked.append(self.name)
        if self.name in self._machine.broken | self._machine.absent:
            raise RuntimeUnavailable(f"{self.name} does not start")


def offers(machine: Machine) -> Offers:
    return Offers(["sound", "broken", "absent"], machine.make)  # type: ignore[arg-type]


async def test_a_start_looks_at_programs_only_and_a_doubted_runtime_is_withdrawn() -> None:
    machine = Machine()
    found = offers(machine)
    assert (found.offer.runtimes, machine.checked) == (("sound", "broken"), [])
    assert found.offer.missing == {"absent": "not installed"}
    assert not await found.doubt(["sound"])
    assert await found.doubt(["sound", "broken"])
    assert found.offer.runtimes == ("sound",)
    assert found.offer.missing["broken"] == "broken does not start"


def test_a_node_has_its_architecture_and_its_operators_labels() -> None:
    machine = Machine()
    found = Offers(["sound"], machine.make, labels=["gpu", "gpu"])  # type: ignore[arg-type]
    assert found.offer.labels == (platform.machine(), "gpu")


async def test_sessions_that_fail_together_cost_one_check() -> None:
    machine = Machine()
    found = offers(machine)
    for _ in range(9):
        assert not await found.doubt(["sound"])
    assert machine.checked == ["sound"]


async def test_a_runtime_is_offered_again_when_its_check_passes() -> None:
    machine = Machine()
    found = offers(machine)
    await found.doubt(["broken"])
    await found.look_again()
    assert found.offer.runtimes == ("sound",)
    machine.broken.clear()
    machine.absent.clear()
    await found.look_again()
    assert set(found.offer.runtimes) == {"sound", "broken", "absent"}


async def test_a_runtime_that_the_operator_refuses_is_never_offered() -> None:
    machine = Machine()
    allowed = Allowed(runtimes=frozenset({"sound"}), networks=frozenset({"none", "proxy"}))
    found = Offers(["sound", "process"], machine.make, allowed=allowed)  # type: ignore[arg-type]
    await found.look_again()
    assert found.offer.runtimes == ("sound",)
    assert "operator allows only `sound` (`--runtimes`)" in found.offer.missing["process"]
    assert found.offer.networks == ("none", "proxy")


@pytest.mark.parametrize(
    ("runtime", "missing"),
    [
        ({"backend": "sandbox", "network": "proxy"}, None),
        ({"backend": "sandbox", "network": "full"}, "network `full`, which its operator refuses"),
        ({"backend": "process"}, "runtime `process`: the node's operator allows only `sandbox`"),
    ],
)
def test_a_session_goes_where_the_operator_allows_what_it_needs(runtime: dict[str, Any], missing: str | None) -> None:
    allowed = Allowed(runtimes=frozenset({"sandbox"}), networks=frozenset({"none", "proxy"}))
    offer = Offers(["sandbox", "process"], Machine().make, allowed=allowed).offer  # type: ignore[arg-type]
    task = {"instruction": "x", "agent": {"harness": "shell", "settings": {"command": "true"}}}
    why = nearest(needs_of(TaskRequest.model_validate({**task, "runtime": runtime})), [("n1", offer)])
    assert why is None if missing is None else missing in str(why)
    grader = {"strategy": "session_completed", "refresh_runtime": True, "runtime": runtime}
    sound = {"backend": "sandbox"}
    why = nearest(
        needs_of(TaskRequest.model_validate({**task, "runtime": sound, "evaluator": grader})), [("n1", offer)]
    )
    assert why is None if missing is None else missing in str(why)


def test_runtimes_and_networks_are_given_with_commas_or_one_by_one() -> None:
    settings = NodeSettings(runtimes=("sandbox,docker", "podman"), networks=("none, proxy",))
    assert settings.allowed() == Allowed(
        runtimes=frozenset({"sandbox", "docker", "podman"}), networks=frozenset({"none", "proxy"})
    )
    assert NodeSettings().allowed() == Allowed()
    with pytest.raises(ValidationError, match="unknown network policy 'host'; known: none, proxy, full, list"):
        NodeSettings(networks=("host",))
    with pytest.raises(UnknownPlugin, match="sandbox"):
        NodeSettings(runtimes=("sandbx",)).allowed()


def a_runtime(**parts: Any) -> Any:
    return type("Odd", (_Runtime,), parts)(Machine(), "odd")


@pytest.mark.parametrize(
    "error", [RuntimeError("odd"), KeyError("odd"), SystemExit(3), AttributeError("odd")], ids=repr
)
@pytest.mark.parametrize("part", ["missing", "num_gpus", "images", "check"])
async def test_a_runtime_whose_code_fails_is_left_out_alone(part: str, error: BaseException) -> None:
    def fails(*_: Any) -> Any:
        raise error

    async def fails_later(*_: Any) -> Any:
        raise error

    code: Any = {"missing": fails, "num_gpus": property(fails), "images": fails_later, "check": fails_later}[part]
    odd = a_runtime(**{part: code})
    found = Offers(["sound", "odd"], lambda name: odd if name == "odd" else Machine().make(name))  # type: ignore[arg-type]
    await found.look_at_images()
    await found.look_again()
    await found.doubt(["odd"])
    assert found.offer.runtimes == (("sound", "odd") if part == "images" else ("sound",))
    assert found.offer.images == {}, "what cannot be listed is not known"


@pytest.mark.parametrize(("part", "answer"), [("missing", False), ("missing", OSError("no")), ("num_gpus", "2")])
def test_a_runtime_that_answers_what_no_server_can_read_is_left_out(part: str, answer: Any) -> None:
    def missing(_self: Any) -> Any:
        return answer

    odd = a_runtime(**{part: missing if part == "missing" else answer})
    found = Offers(["odd"], lambda _: odd)
    assert found.offer.runtimes == ()
    assert "ValidationError" in found.offer.missing["odd"]


async def test_gpus_are_offered_by_a_runtime_that_became_usable() -> None:
    told = ["not installed"]

    def missing(_self: Any) -> str | None:
        return told.pop() if told else None

    async def check(_self: Any) -> None: ...

    odd = a_runtime(missing=missing, check=check, num_gpus=2)
    found = Offers(["odd"], lambda _: odd)
    assert found.offer.gpus == {}
    await found.look_again()
    assert found.offer.gpus == {"odd": 2}


async def test_sessions_go_back_unharmed_while_an_image_cannot_be_pulled_now() -> None:
    found = offers(Machine())
    for error, goes_back in ((PullPostponed("connection refused"), True), (PullFailed("manifest unknown"), False)):
        assert await found.are_why(error.failure(), lease_of()) is goes_back


@pytest.mark.parametrize(("policy", "pulls"), [("if_missing", ("odd",)), ("always", ("odd",)), ("never", ())])
def test_a_node_says_which_runtimes_it_pulls_images_for(policy: Any, pulls: tuple[str, ...]) -> None:
    odd = a_runtime(image_store=ScriptedStore())
    known = {"odd": odd, "sound": Machine().make("sound")}
    found = Offers(["sound", "odd"], known.__getitem__, images=ImageSupply(policy=policy))
    assert found.offer.pulls == pulls


@pytest.mark.parametrize("image", ["localhost/env:1", "sha256:" + "a" * 64, "gangline/env:abc"])
def test_an_image_of_no_registry_is_lacking_where_it_is_not(image: str) -> None:
    offer = Offer(runtimes=("docker",), pulls=("docker",), images={"docker": {"": ""}})
    task = TaskRequest.model_validate(
        {"instruction": "x", "agent": {"harness": "shell"}, "runtime": {"backend": "docker", "image": image}}
    )
    assert offer.lacks(needs_of(task)) == [f"image `{image}` for runtime `docker`"]


def test_images_of_services_are_needed_too() -> None:
    runtime = {"backend": "docker", "services": {"db": {"image": "postgres:17"}}}
    task = TaskRequest.model_validate({"instruction": "x", "agent": {"harness": "shell"}, "runtime": runtime})
    assert needs_of(task).images == (("docker", "postgres:17"),)
