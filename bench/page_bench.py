"""The page in headless Chromium: how soon it shows a long session and a new token, how it scrolls, what it costs.

The session has a million tokens in 500 turns; the index of Find has 10,000 sessions; 20 pages are open alongside the
load.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from playwright.async_api import Browser, Page, async_playwright
from service_bench import Served, served

from gangline.domain.conversation import Message, Text, ToolResult
from gangline.server.run import database_path, results_path
from gangline.store.results.files import ResultStore
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.append(str(Path(__file__).parents[1] / "docs"))
from build_site import write_tour

from support.page.running import stepped_session
from support.page.sessions import Talk, long_session
from support.service.running import FakeNode, request

Figures = dict[str, dict[str, Any]]

AGENT = {"harness": "shell", "settings": {"command": "true"}}
SIZE = {"width": 1280, "height": 800}
TURNS, TOKENS_PER_TURN = 500, 2000
LOADS = 3
OPENED_STRIPS = 10
SCROLLED_FRAMES = 400
STEPS = 8
NUM_FOUND, NUM_SEARCHES = 10_000, 200
PAGES, LOAD_SESSIONS, LOAD_ROUNDS = 20, 200, 9

_FIRST_PAINT = """window.paintedAt = new Promise((done) => {
  const look = () => {
    if (document.querySelector("article .part") === null) requestAnimationFrame(look);
    else requestAnimationFrame(() => done(performance.now()));
  };
  requestAnimationFrame(look);
});"""
_SCROLL = """(numFrames) => new Promise((done) => {
  const scroller = document.querySelector(".scroller");
  const works = [];
  const channel = new MessageChannel();
  let began = 0;
  channel.port1.onmessage = () => {
    works.push(performance.now() - began);
    if (works.length < numFrames) requestAnimationFrame(frame);
    else done(works);
  };
  const frame = () => {
    began = performance.now();
    scroller.scrollTop += 120;
    requestAnimationFrame(() => {});
    channel.port2.postMessage(0);  // comes when the frame was drawn
  };
  requestAnimationFrame(frame);
})"""
_TOKENS_OF = """(call) => new Promise((done) => {
  const look = () => {
    const line = document.querySelector(`#call-${call} .token-line`)?.textContent ?? "";
    if (line.includes("sampled")) requestAnimationFrame(() => done(Date.now()));
    else requestAnimationFrame(look);
  };
  look();
})"""


async def long_one(browser: Browser, folder: Path) -> Figures:
    """A million tokens: first paint, frames, and what a first visit loads."""
    async with served("server", folder) as server, ServerClient(server.url, None) as client:
        await client.submit(request("long", num_samples=1, agent=AGENT))
        (lease,) = await FakeNode(client).lease()
        result = await asyncio.to_thread(long_session, TURNS, TOKENS_PER_TURN, lease.session_id)
        await client.post_result(msgspec.structs.replace(result, node_id="n1", fence=lease.fence))
        paints, first_load_kb, works = [], 0.0, []
        for _ in range(LOADS + 1):
            page = await (await browser.new_context(viewport=SIZE)).new_page()  # pyright: ignore[reportArgumentType]
            await page.add_init_script(_FIRST_PAINT)
            await page.goto(f"{server.url}/#/sessions/long.0")
            paints.append(await page.evaluate("window.paintedAt"))
            first_load_kb = await _loaded_kb(page)
            if not works:
                works = await _scrolled(page)
            await page.context.close()
    warm = statistics.median(paints[1:])
    p95 = statistics.quantiles(works, n=20)[-1]
    return {
        "page.first_paint_ms": _figure(
            warm, "ms", f"messages of a session of a million tokens in {TURNS} turns, median of {LOADS} loads without "
            f"a browser cache; the first request, for which the server reads the result, took {paints[0]:.0f} ms"
        ),
        "page.frame_p95_ms": _figure(
            p95, "ms", f"work of a frame, from its begin until it is drawn, while scrolling by 120 px over "
            f"{OPENED_STRIPS} open strips; the longest took {max(works):.0f} ms"
        ),
        "page.first_load_kb": _figure(first_load_kb, "kB", "scripts, style and data of that session, as they travel"),
    }  # fmt: skip


async def tour(browser: Browser, folder: Path) -> Figures:
    """The recorded session of the documentation, as one file from the disk."""
    file = folder / "tour" / "index.html"
    await asyncio.to_thread(write_tour, file)
    paints: list[float] = []
    for _ in range(LOADS):
        page = await (await browser.new_context(viewport=SIZE)).new_page()  # pyright: ignore[reportArgumentType]
        await page.add_init_script(_FIRST_PAINT)
        await page.goto(file.as_uri())
        paints.append(await page.evaluate("window.paintedAt"))
        await page.context.close()
    note = f"messages of the documentation's recorded session, {file.stat().st_size >> 10} KiB; median of {LOADS} loads"
    return {"page.tour_ms": _figure(statistics.median(paints), "ms", note)}


async def _loaded_kb(page: Page) -> float:
    entries = "[...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]"
    return await page.evaluate(f"{entries}.reduce((sum, entry) => sum + entry.transferSize, 0)") / 1000


async def _scrolled(page: Page) -> list[float]:
    for _ in range(OPENED_STRIPS):
        await page.keyboard.press("t")
        await page.locator("article[aria-current] .token-line").filter(has_text="context").wait_for()
        await page.locator("article[aria-current]").focus()
        await page.keyboard.press("j")
    await page.evaluate("document.querySelector('.scroller').scrollTop = 0")
    return await page.evaluate(_SCROLL, SCROLLED_FRAMES)


async def new_tokens(browser: Browser, folder: Path) -> Figures:
    """From a call's end on the node until its tokens are drawn, on a page that follows the session."""
    delays: list[float] = []
    async with served("server", folder) as server, ServerClient(server.url, None) as client:
        for number in range(STEPS // 2):
            async with stepped_session(client, None, folder / f"agent{number}", f"live{number}") as session:
                page = await (await browser.new_context(viewport=SIZE)).new_page()  # pyright: ignore[reportArgumentType]
                await page.goto(f"{server.url}/#/tasks/live{number}")
                await page.get_by_role("link", name=session.session_id, exact=True).first.click(timeout=30_000)
                await page.evaluate(_TOKENS_OF, 0)
                shown_ms = page.evaluate(_TOKENS_OF, 1)
                session.step()
                at_ms = await shown_ms
                session.step()
                call = (await session.result()).completions[1]
                delays.append(at_ms - 1000 * call.finished_at)
                await page.context.close()
    note = f"median of {len(delays)} calls, from the engine's last token until the strip is drawn; the longest took "
    return {"page.token_to_pixel_ms": _figure(statistics.median(delays), "ms", f"{note}{max(delays):.0f} ms")}


async def searches(folder: Path) -> Figures:
    """Words of all frequencies, over HTTP, once all sessions are in the index."""
    chance = random.Random(0)
    words = [f"{chance.choice('bdfgklmnprst')}{chance.choice('aeiou')}{number:x}" for number in range(20_000)]
    await asyncio.to_thread(_store_many, folder, words, chance)
    async with served("server", folder) as server, ServerClient(server.url, None) as client:
        started = time.perf_counter()
        while True:
            answer = msgspec.json.decode(await client.request("GET", "/v1/find"))
            if (answer["num_indexed"], answer["num_waiting"]) == (NUM_FOUND, 0):
                break
            await asyncio.sleep(0.2)
        indexed_s = time.perf_counter() - started
        times: list[float] = []
        for number in range(NUM_SEARCHES):
            wanted = " ".join(_common(words, chance) for _ in range(1 + number % 2))
            params = {"words": wanted} | ({"max_reward": "0"} if number % 3 == 0 else {})
            started = time.perf_counter()
            await client.request("GET", "/v1/find", params=params)
            times.append(1000 * (time.perf_counter() - started))
    note = (
        f"{NUM_SEARCHES} searches for one or two words over {NUM_FOUND:,} sessions of 4 calls, over HTTP; median "
        f"{statistics.median(times):.0f} ms, the longest {max(times):.0f} ms; the index was made in {indexed_s:.0f} s"
    )
    return {"page.find_p95_ms": _figure(statistics.quantiles(times, n=20)[-1], "ms", note)}


def _common(words: list[str], chance: random.Random) -> str:
    """Some words are in most sessions, most in a few."""
    return words[min(int(chance.paretovariate(0.6)) - 1, len(words) - 1)]


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _store_many(folder: Path, words: list[str], chance: random.Random) -> None:
    """As the server stores them, without its syncs."""
    path = database_path(folder)
    path.parent.mkdir(parents=True)
    results = ResultStore(results_path(folder), write=_write)
    results.prepare()
    with TaskStore(path) as store:
        for number in range(NUM_FOUND // 100):
            store.submit([request(f"t{number}", num_samples=100, agent=AGENT)])
            for lease in store.lease("n1", "http://node.test", 100):
                talk = Talk(lease.session_id)
                before = None
                for _ in range(4):
                    read = " ".join(_common(words, chance) for _ in range(60))
                    said = " ".join(_common(words, chance) for _ in range(20))
                    news = (Message("tool", (ToolResult("c", (Text(read),)),)),)
                    before = talk.call(news, (Text(said),), prompt=" p", sampled=" s", after=before)
                result = talk.result(float(chance.random() < 0.5))
                result = msgspec.structs.replace(result, node_id="n1", fence=lease.fence)
                store.report(result, results.stage(result).keep)


async def cost(browser: Browser, folder: Path) -> Figures:
    """The server's processor time for one session's life, with 20 pages of one browser in view and without."""
    async with served("server", folder) as server, ServerClient(server.url, None) as client:
        await _load(client, server, "warm-up")
        alone, beside = [], []
        for number in range(LOAD_ROUNDS):
            alone.append(await _load(client, server, f"alone{number}"))
            context = await browser.new_context(viewport=SIZE)  # pyright: ignore[reportArgumentType]
            for _ in range(PAGES):
                await (await context.new_page()).goto(server.url)
            await asyncio.sleep(2)
            beside.append(await _load(client, server, f"beside{number}"))
            await context.close()
    value = statistics.median(beside) / statistics.median(alone)
    note = (
        f"the server's processor time for a session's life with {PAGES} pages in view over that without "
        f"({statistics.median(alone):.2f} ms), {LOAD_SESSIONS} sessions at 50 a second, median of {LOAD_ROUNDS} rounds"
    )
    return {"page.service_cost_ratio": _figure(value, "", note)}


async def _load(client: ServerClient, server: Served, name: str) -> float:
    """Milliseconds of the server's processor time for each session."""
    node = FakeNode(client)
    before = server.cpu_s()
    for batch in range(LOAD_SESSIONS // 10):
        next_at = time.perf_counter() + 0.2
        await client.submit(request(f"{name}-{batch}", num_samples=10, agent=AGENT))
        leases = await node.lease(10)
        await node.beat(leases)
        await node.finish(leases)
        await asyncio.sleep(max(0.0, next_at - time.perf_counter()))
    return 1000 * (server.cpu_s() - before) / LOAD_SESSIONS


def _figure(value: float, unit: str, note: str) -> dict[str, Any]:
    return {"value": round(value, 3), "unit": unit, "note": note}


async def measure() -> Figures:
    path = shutil.which("chromium")
    assert path is not None, "Chromium is missing: apt-get install chromium"
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as folder:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=path)
            parts: list[Callable[[], Awaitable[Figures]]] = [
                lambda: tour(browser, Path(folder)),
                lambda: new_tokens(browser, Path(folder) / "live"),
                lambda: long_one(browser, Path(folder) / "long"),
                lambda: cost(browser, Path(folder) / "cost"),
                lambda: searches(Path(folder) / "find"),
            ]
            for part in parts:
                found = await part()
                print(found, file=sys.stderr, flush=True)
                figures |= found
            await browser.close()
    return figures


def run() -> Figures:
    """Figure name -> {value, unit, note}. Takes about four minutes."""
    return asyncio.run(measure())


if __name__ == "__main__":
    run()
