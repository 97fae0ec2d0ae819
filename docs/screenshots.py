"""Pictures of every part of the page, and the session of the tour, from a real run: `make screenshots`.

The demo runs first, unless `--data` names the folder of one that has ended. Its agent is exact throughout, so one of
its groups runs again with an agent that ends each reply with a line break when it sends it back, as some harnesses do,
and with prompts that the engine renders (`capture.tier: observe`): these drift. Two evaluations are made of the same
files, of the model before its training and after. docs/tour gets the result of the demo's best session.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from PIL import Image
from playwright.async_api import Page, async_playwright

from gangline.cli.service.bring_up import Plan, run_service
from gangline.domain.task import TaskRequest
from gangline.domain.views import SessionView
from gangline.server.run import database_path, results_path, serving
from gangline.server.web.outline import SessionOutline
from gangline.store.sql.reader import TaskReader
from gangline.wire.client.running import Running
from gangline.wire.client.server import ServerClient

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1280, "height": 800}
MAX_BYTES = 60_000
TOUR = Path(__file__).parent / "tour"
EXAMPLE = Path(__file__).parents[1] / "examples" / "read_file" / "tasks.py"
PAUSE_MS = 1500
"""For what a key asks the server for."""
DRIFTING = "drifting"
ENGINE = "embedded:smollm2"
ECHO, ECHO_WITH_BREAK = '"content": text}', '"content": text + "\\n"}'
"""How the demo's agent sends a reply back, and how it does here."""


class Picture(msgspec.Struct, frozen=True):
    """One part of the page, as it is after some keys."""

    name: str
    address: str
    shown: str
    """Selector of what has to be in view."""
    keys: Sequence[str] = ()


def run_demo(data: Path) -> None:
    command = [sys.executable, "-m", "gangline", "demo", "--data", str(data), "--samples", "6", "--steps", "3"]
    subprocess.run(command, check=True)


async def drift(data: Path) -> None:
    """Run the demo's first group again, so that it drifts."""
    with TaskReader(database_path(data)) as reader:
        first = min(task.task_id for task in reader.tasks(limit=1000).tasks)
        request = reader.request(first)
    document: dict[str, Any] = request.model_dump(mode="json") | {"task_id": DRIFTING}
    document["capture"]["tier"] = "observe"
    prepare: list[dict[str, str]] = document["runtime"]["prepare"]
    (agent,) = (step for step in prepare if step["path"] == "agent.py")
    assert ECHO in agent["content"]
    agent["content"] = agent["content"].replace(ECHO, ECHO_WITH_BREAK)
    again = TaskRequest.model_validate(document)

    async def body(live: Running) -> None:
        async with ServerClient(live.server_url, live.control_token) as client:
            await client.submit(again)
            await client.wait(DRIFTING)

    await run_service(Plan(data_dir=data, port=0, engine=ENGINE), body)


def evaluate(data: Path) -> None:
    """Evaluate the model before its training and after, on files that neither has seen."""
    wanted = [sys.executable, str(EXAMPLE), "--tasks", "6", "--samples", "1", "--seed", "7"]
    tasks = data / "evaluated.jsonl"
    tasks.write_bytes(subprocess.run(wanted, capture_output=True, check=True).stdout)
    (trained,) = data.glob("runs/*/model")
    for name, engine in (("before", ENGINE), ("after", f"embedded:{trained}")):
        command = [sys.executable, "-m", "gangline", "eval", str(tasks), "--name", name, "--samples", "4"]
        subprocess.run([*command, "--engine", engine, "--data", str(data)], check=True)


def record_tour(data: Path, session: SessionView) -> None:
    """Keep a session's result as the one of docs/tour."""
    shutil.rmtree(TOUR, ignore_errors=True)
    found = results_path(data) / session.task_id / session.session_id
    shutil.copytree(found, TOUR / "server" / "results" / session.task_id / session.session_id)


async def choose(client: ServerClient, data: Path) -> list[Picture]:
    """The pictures, of sessions that have something to show; the best session becomes that of the tour."""
    tasks = [await client.task(name) for name in await groups(client)]
    sessions = [one for task in tasks for one in task.sessions if one.reward is not None]
    outlines = {one.session_id: await outline(client, one) for one in sessions}
    diverged = next(
        (session_id, call.number)
        for session_id, found in outlines.items()
        for call in found.calls
        if call.certificate.context == "diverged"
    )
    ours = [one for one in sessions if one.task_id != DRIFTING]
    unlikely = min(ours, key=lambda one: outlines[one.session_id].calls[-1].lowest_logprob or 0.0)
    failed = min(ours, key=lambda one: (one.reward or 0.0, -len(outlines[one.session_id].calls)))
    best = max(ours, key=lambda one: (one.reward or 0.0, len(outlines[one.session_id].calls)))
    record_tour(data, best)
    (run, *_) = msgspec.json.decode(await client.request("GET", "/v1/runs"))["runs"]
    listed = msgspec.json.decode(await client.request("GET", "/v1/evaluations"))["evaluations"]
    evaluation = {one["name"]: one["evaluation_id"] for one in listed}
    return [
        Picture("now", "", "table"),
        Picture("task", f"tasks/{best.task_id}", ".aligned"),
        Picture("session", f"sessions/{unlikely.session_id}", "#call-0", ("j", "t", "u")),
        Picture("tokens", f"sessions/{best.session_id}", "#call-0", ("j", "t", "c")),
        Picture("evidence", f"sessions/{failed.session_id}", "#call-0", ("e",)),
        Picture("drift", f"sessions/{diverged[0]}?call={diverged[1]}", f"#call-{diverged[1]}", ("d",)),
        Picture("find", "find?words=cat&max_reward=0.5", "main mark"),
        Picture("runs", "runs", "table"),
        Picture("run", f"runs/{run['name']}", ".chart canvas"),
        Picture("evaluations", "evaluations", "table"),
        Picture("evaluation", f"evaluations/{evaluation['after']}", "table"),
        Picture("compare", f"evaluations/{evaluation['after']}?with={evaluation['before']}", "table"),
    ]


async def groups(client: ServerClient) -> list[str]:
    """The groups that are shown: those of the demo, without those of training and evaluations, and the drifting one."""
    listed = (await client.tasks(limit=1000)).tasks
    return [task.task_id for task in listed if re.fullmatch(rf"demo-[0-9a-f]+-\d+|{DRIFTING}", task.task_id)]


async def indexed(client: ServerClient) -> None:
    """Return once Find knows all sessions."""
    while True:
        found = msgspec.json.decode(await client.request("GET", "/v1/find"))
        if found["num_indexed"] and not found["num_waiting"]:
            return
        await asyncio.sleep(0.2)


async def outline(client: ServerClient, session: SessionView) -> SessionOutline:
    answer = await client.request("GET", f"/v1/sessions/{session.session_id}/outline")
    return msgspec.json.decode(answer, type=SessionOutline)


@asynccontextmanager
async def signed_in(client: ServerClient) -> AsyncGenerator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = await browser.new_page(viewport=SIZE, color_scheme="light")  # pyright: ignore[reportArgumentType]
        await page.goto(client.url + (await client.page_link(read_only=True)).path)
        await page.wait_for_selector("h1")
        yield page
        await browser.close()


async def take(page: Page, url: str, picture: Picture) -> None:
    await page.goto("about:blank")
    await page.goto(f"{url}/#/{picture.address}")
    shown = page.locator(picture.shown).first
    await shown.wait_for(timeout=120_000)
    await shown.scroll_into_view_if_needed()
    for key in picture.keys:
        await page.wait_for_timeout(PAUSE_MS)
        await page.keyboard.press(key)
    await page.wait_for_timeout(PAUSE_MS)
    data = small(await page.screenshot())
    assert len(data) < MAX_BYTES, f"{picture.name} has {len(data)} bytes"
    (IMAGES / f"page-{picture.name}.png").write_bytes(data)


def small(data: bytes) -> bytes:
    """The same picture in 96 colours, which suffice for a page of text."""
    made = io.BytesIO()
    Image.open(io.BytesIO(data)).convert("RGB").quantize(96).save(made, "PNG", optimize=True)
    return made.getvalue()


async def take_all(data: Path) -> None:
    with TaskReader(database_path(data)) as reader:
        has_drifted = any(task.task_id == DRIFTING for task in reader.tasks(limit=1000).tasks)
    if not has_drifted:
        await drift(data)
    if not (data / "evals").exists():
        await asyncio.to_thread(evaluate, data)
    token = secrets.token_hex(16)
    async with (
        serving(data_dir=data, control_token=token) as server,
        ServerClient(server.url, token) as client,
        signed_in(client) as page,
    ):
        await indexed(client)
        for picture in await choose(client, data):
            await take(page, client.url, picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="data folder of a demo that has ended")
    given: Path | None = parser.parse_args().data
    with tempfile.TemporaryDirectory() as made:
        data = given or Path(made)
        if given is None:
            run_demo(data)
        asyncio.run(take_all(data))


if __name__ == "__main__":
    main()
