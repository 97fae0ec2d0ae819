"""What a node offers, without a sandbox."""

from __future__ import annotations

import platform

from gangline.domain.errors import RuntimeUnavailable
from gangline.gateway.health.offers import Offers


class Machine:
    """Runtimes by name: `absent` lacks its program, `broken` finds that out when it is tried."""

    def __init__(self) -> None:
        self.broken = {"broken"}
        self.absent = {"absent"}
        self.checked: list[str] = []

    def make(self, name: str) -> _Runtime:
        return _Runtime(self, name)


class _Runtime:
    def __init__(self, machine: Machine, name: str) -> None:
        self._machine = machine
        self.name = name

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
