"""The first part shows the service as it is and follows it; a task shows its samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, expect

from gangline.domain.errors import Failure
from gangline.domain.node_views import CacheView
from gangline.domain.placement import Offer
from gangline.domain.views import PULLING
from gangline.server.run import serving
from gangline.wire.client.server import ServerClient
from support.page.browser import Visit, signed_in
from support.service.running import FakeNode, any_plugin, beat, request

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_which_failures_share_a_cause(visit: Visit) -> None:
    row = visit.page.get_by_role("row").filter(has_text="no such model")
    await expect(row.first).to_contain_text("harness")
    await expect(row.first.get_by_role("cell").nth(2)).to_have_text("2")


async def test_how_do_the_samples_differ(visit: Visit) -> None:
    await visit.open("tasks/task-1")
    samples = visit.page.get_by_role("table").first.get_by_role("row")
    await expect(samples).to_have_count(4)
    await expect(samples.nth(2)).to_contain_text("0.667")
    aligned = visit.page.get_by_role("table", name="Samples side by side")
    columns = aligned.get_by_role("columnheader")
    await expect(columns.nth(1)).to_contain_text("reward 1, advantage 0.667")
    first, second = (aligned.get_by_role("row").nth(1).get_by_role("cell").nth(index) for index in range(2))
    await expect(first).to_contain_text("Sampled in call 4")
    await expect(first.locator("pre")).to_have_text(" one test fails.", use_inner_text=True)
    await expect(second.locator("pre")).to_have_text(" all tests pass.", use_inner_text=True)
    await aligned.get_by_role("link", name="call 4").nth(1).press("Enter")
    await expect(visit.page.locator("#call-4")).to_have_attribute("aria-current", "true")


async def test_what_happens_is_seen_without_loading_again(visit: Visit, control: ServerClient) -> None:
    await control.submit(request("later", num_samples=1))
    row = visit.page.get_by_role("row").filter(has=visit.page.get_by_role("link", name="later", exact=True))
    await expect(row).to_contain_text("queued")
    await FakeNode(control).finish(await FakeNode(control).lease())
    await expect(row).to_contain_text("ended")
    await expect(row).not_to_contain_text("open")


async def test_why_a_session_does_not_start_is_said(browser: Browser, tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token="token", check_task=any_plugin) as server,
        ServerClient(server.url, "token") as control,
        signed_in(browser, control) as visit,
    ):
        offer = Offer(runtimes=("docker",), pulls=("docker",))
        await control.heartbeat(msgspec.structs.replace(beat([]), offer=offer))
        await control.submit(request("pulled", num_samples=1, runtime={"backend": "docker", "image": "debian:12"}))
        await control.submit(request("nowhere", num_samples=1, runtime={"backend": "podman"}))
        starting = msgspec.structs.replace(beat(await FakeNode(control).lease(), stage="init"), offer=offer)
        metrics = {f"{PULLING}docker.io/library/debian:12": 1.0}
        await control.heartbeat(msgspec.structs.replace(starting, metrics=metrics))
        waiting = visit.page.get_by_role("region", name="Waiting for long").get_by_role("row")
        await expect(waiting.filter(has_text="pulled.0")).to_contain_text("waiting for image debian:12, pulled by n1")
        await expect(waiting.filter(has_text="nowhere.0")).to_contain_text("lacks runtime `podman`")


async def test_the_sessions_in_an_engines_cache_are_said(browser: Browser, tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token="token", check_task=any_plugin) as server,
        ServerClient(server.url, "token") as control,
        signed_in(browser, control) as visit,
    ):
        cache = CacheView(num_tokens=12_000, usable=1.0, num_held_tokens=9_000, num_places=3, hit_rate=0.81)
        known, without = ({"url": f"http://e{n}:8000", "state": "healthy", "engine": "vllm"} for n in range(2))
        backends = ({**known, "cache": msgspec.to_builtins(cache)}, {**without, "cache": None})
        await control.heartbeat(msgspec.structs.replace(beat([]), backends=backends))
        engines = visit.page.get_by_role("region", name="Nodes and engines").get_by_role("cell").last.locator("div")
        told = "vllm · http://e0:8000 · healthy · cache: 9000 of 12000 tokens held by 3 sessions, 81 % of prompts in it"
        await expect(engines.first).to_have_text(told)
        await expect(engines.last).to_have_text("vllm · http://e1:8000 · healthy")


async def test_several_pages_share_one_stream(browser: Browser, control: ServerClient) -> None:
    async with signed_in(browser, control) as visit:
        others = [await visit.page.context.new_page() for _ in range(8)]
        for page in others:  # more than the six connections that a browser opens to one server
            await page.goto(control.url)
            await expect(page.get_by_role("heading", name="Now")).to_be_visible()
        await control.submit(request("shared", num_samples=1))
        for page in others:
            await expect(page.get_by_role("link", name="shared", exact=True)).to_be_visible()
        await FakeNode(control).finish(await FakeNode(control).lease())


async def test_a_read_only_page_reads(browser: Browser, control: ServerClient) -> None:
    before = msgspec.structs.asdict(await control.task("task-1"))
    async with signed_in(browser, control, read_only=True) as visit:
        await visit.open("sessions/task-1.1")
        await expect(visit.page.locator("#call-0")).to_be_visible()
    assert msgspec.structs.asdict(await control.task("task-1")) == before


READ_STATE = """async () => {
  const [status, tasks, sessions] = await Promise.all(
    ["status", "tasks?limit=300", "sessions?limit=300"].map(async (name) => (await fetch(`/v1/${name}`)).json()));
  return { status, tasks: tasks.tasks, isCut: tasks.next !== null, sessions: sessions.sessions };
}"""
APPLY = """async ([state, events]) => {
  const main = document.querySelector("script[type=module]").src;
  const { afterEvent } = await import(new URL("./after_event.js", main).href);
  return events.reduce(afterEvent, state);
}"""
SHOWN = {
    "tasks": ("task_id", "status", "num_samples", "num_open", "outcomes", "mean_reward", "run", "harness"),
    "sessions": ("session_id", "state", "stage", "outcome", "reward", "attempt", "node_id", "failure"),
}


def shown(state: dict[str, Any]) -> dict[str, list[list[Any]]]:
    return {part: [[row[name] for name in names] for row in state[part]] for part, names in SHOWN.items()}


async def test_events_change_what_was_read_to_what_is_read_later(visit: Visit, control: ServerClient) -> None:
    """A page reads a busy service's state every few seconds, and applies events meanwhile."""
    node = FakeNode(control)
    await control.submit(request("live", num_samples=4))
    before = await visit.page.evaluate(READ_STATE)
    leases = await node.lease()
    await node.beat(leases)
    failure = Failure(boundary="node", code="lost", message="the node lost it", retryable=True)
    await node.finish([leases[0]])
    await node.finish([leases[1]], outcome="infra_error", failure=failure, reward=None)
    await control.release("n1", session_id=leases[2].session_id, fence=leases[2].fence)
    middle = await visit.page.evaluate(READ_STATE)
    await control.cancel("live")
    await control.submit(request("live-2", num_samples=1))
    after = await visit.page.evaluate(READ_STATE)
    await control.cancel("live-2")  # other tests lease what is queued
    since = list[Any]()
    async for event in control.events(after=0):
        if event.at > before["status"]["at"]:
            since.append(msgspec.to_builtins(event))
        if event.task_id == "live-2":
            break
    for state in (before, middle):  # what was read already may be told again
        assert shown(await visit.page.evaluate(APPLY, [state, since])) == shown(after)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (150.4, "150"),
        (100.02, "100"),
        (0.5, "0.5"),
        (0.6667, "0.667"),
        (0.1 + 0.2, "0.3"),
        (12345.67, "12300"),
        (1500, "1,500"),
        (1e-7, "1e-7"),
        (-2.46e-10, "-2.46e-10"),
    ],
)
async def test_numbers_keep_their_zeros(visit: Visit, value: float, text: str) -> None:
    shown_as = """async (value) => {
      const main = document.querySelector("script[type=module]").src;
      return (await import(new URL("./scales.js", main).href)).number(value);
    }"""
    assert await visit.page.evaluate(shown_as, value) == text
