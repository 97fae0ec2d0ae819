"""Nodes on Ray, as seen from the process that wants them; Ray's actors are played."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from gangline.domain.errors import NodeError
from gangline.interop.ray import nodes as module
from gangline.interop.ray.ray import Needs
from gangline.interop.ray.sizes import Fixed


class Actor:
    """Ready at once; takes as many turns of the loop to clean up as its number says."""

    cleaned: ClassVar[list[int]] = []
    failing: int | None = None

    def __init__(self, _work: object, node: module.RayNode, _needs: Needs) -> None:
        self.index = node.index
        self.was_ready = True

    async def run(self) -> None:
        if self.index == self.failing:
            raise NodeError("it fails before any is ready")
        await asyncio.Event().wait()

    async def ready(self) -> str:
        if self.failing:
            await asyncio.Event().wait()
        return f"http://node-{self.index}"

    async def end(self, _wait_s: float) -> None:
        for _ in range(10 * self.index):
            await asyncio.sleep(0)
        self.cleaned.append(self.index)


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> type[Actor]:
    monkeypatch.setattr(Actor, "cleaned", [])
    monkeypatch.setattr(module, "_Actor", Actor)
    monkeypatch.setattr(module, "is_member", lambda: True)
    return Actor


def nodes(ready: asyncio.Event) -> Any:
    work: Any = None
    return module.RayNodes(work, size=Fixed(3), needs=Needs(), stop_wait_s=1, on_ready=ready.set)


async def test_every_node_cleans_up_to_its_end_however_soon_another_has(actor: type[Actor]) -> None:
    ready = asyncio.Event()
    keeping = asyncio.create_task(nodes(ready).keep())
    await ready.wait()
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert actor.cleaned == [1, 2, 3]


async def test_a_failure_before_any_is_ready_is_told_when_all_have_cleaned_up(
    actor: type[Actor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "failing", 1)
    with pytest.raises(NodeError, match="before any is ready"):
        await nodes(asyncio.Event()).keep()
    assert sorted(actor.cleaned) == [1, 2, 3]
