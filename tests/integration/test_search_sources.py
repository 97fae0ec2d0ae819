"""Search sources: documents on disk, providers that answer as documented, pages, and who may use which."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gangline.agents.tools.calls import observe
from gangline.agents.tools.contract import Observation, ToolContext, ToolFailed
from gangline.agents.tools.search import web as web_module
from gangline.agents.tools.search.local import Index, LocalProvider, index_file
from gangline.agents.tools.search.provider import Hit
from gangline.agents.tools.search.web import WebProvider
from gangline.domain.errors import ToolUnavailable
from gangline.domain.search_source import SearchSource
from gangline.settings import plugins
from gangline.settings.node import NodeSettings
from support.node.loopback import Handler, serving

KEY = "key-of-the-provider"


async def no_server() -> Any:
    raise AssertionError("a search needs no sandbox")


def context_of(sources: Mapping[str, SearchSource], network: Any = "none") -> ToolContext:
    return ToolContext(
        runtime=None,  # pyright: ignore[reportArgumentType] - a search needs none
        env={},
        action_server=no_server,
        command_timeout_s=1,
        max_output_bytes=2000,
        network=network,
        search_sources=sources,
    )


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchSource:
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "whales.md").write_text("# Whales\n\nThe blue whale is the largest animal. It eats krill.\n")
    (folder / "deep" / "long.txt").write_text("Tides\n" + "the moon pulls the sea. " * 500)
    records = [{"id": "q1", "title": "Paris", "text": "Capital of France."}, {"text": "Rome is in Italy."}]
    (folder / "places.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "secret.txt").write_text("the secret of the node")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    return SearchSource(kind="local", path=str(folder))


async def asked(name: str, context: ToolContext, config: dict[str, Any], **arguments: Any) -> Observation:
    tool = plugins.make_tool(name, config)
    try:
        await tool.open(context)
        return await observe(tool, arguments, context)
    finally:
        await tool.close()


async def test_documents_on_disk_are_found_and_read_without_a_network(corpus: SearchSource) -> None:
    context = context_of({"web": corpus})
    seen = await asked("web_search", context, {}, query="What do whales eat?")
    assert seen.content.startswith("1. Whales\nwhales.md\n")
    assert "It eats krill" in seen.content
    page = await asked("fetch_page", context, {}, address="whales.md")
    assert page.content == "Whales\n\n# Whales\n\nThe blue whale is the largest animal. It eats krill.\n"
    assert (await asked("fetch_page", context, {}, address="q1")).content == "Paris\n\nCapital of France."
    assert "2. " not in (await asked("web_search", context, {"max_results": 1}, query="the capital")).content
    assert "places.jsonl#2" in (await asked("web_search", context, {}, query="italy")).content
    assert (await asked("web_search", context, {}, query="zebra")).content.startswith("[nothing was found")
    for nothing in ("../secret.txt", "/etc/passwd", "link.txt", "\ud800"):
        assert (await asked("fetch_page", context, {}, address=nothing)).is_error
    assert "[nothing" in (await asked("web_search", context, {}, query="secret")).content


async def test_a_long_document_is_read_in_pieces(corpus: SearchSource) -> None:
    context = context_of({"web": corpus})
    whole = (Path(corpus.path or "") / "deep" / "long.txt").read_text()
    read, offset = "", 0
    while True:
        seen = (await asked("fetch_page", context, {}, address="deep/long.txt", offset=offset)).content
        assert len(seen) <= context.max_output_bytes
        text, _, note = seen.removeprefix("Tides\n\n").partition("\n[characters ")
        read += text
        if not note:
            break
        offset = len(read)
        assert f"give offset {offset} for more" in note
    assert read == whole
    assert (await asked("fetch_page", context, {}, address="q1", offset=99)).is_error


async def test_a_changed_corpus_is_indexed_again(corpus: SearchSource, tmp_path: Path) -> None:
    first = index_file(corpus, tmp_path / "indexes")
    assert index_file(corpus, tmp_path / "indexes") == first
    (Path(corpus.path or "") / "new.md").write_text("zebras have stripes")
    second = index_file(corpus, tmp_path / "indexes")
    assert second != first
    index = Index(second)
    assert [hit.address for hit in index.search("zebra", 5)] == ["new.md"]
    index.close()


BUILD = """
import sys
from pathlib import Path
from gangline.domain.search_source import SearchSource
from gangline.agents.tools.search.local import index_file
print(index_file(SearchSource(kind="local", path=sys.argv[1]), Path(sys.argv[2])).name)
"""


async def test_several_processes_share_one_index(corpus: SearchSource, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(corpus.path), str(tmp_path / "indexes")]
    pipe = asyncio.subprocess.PIPE
    builders = [await asyncio.create_subprocess_exec(*command, stdout=pipe) for _ in range(3)]
    names = {(await builder.communicate())[0] for builder in builders}
    assert len(names) == 1
    assert [path.suffix for path in sorted((tmp_path / "indexes").iterdir())] == [".lock", ".sqlite"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", "{", "a.jsonl: "),
        ("a.json", '{"body": "x"}', "has no text in its column 'text'"),
        ("a.png", "", "no doc"),
    ],
)
async def test_a_corpus_that_cannot_be_read_fails_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, why: str
) -> None:
    monkeypatch.setenv("GANGLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_text(content)
    source = SearchSource(kind="local", path=str(tmp_path / "corpus"))
    with pytest.raises(ToolUnavailable, match=why):
        await asked("web_search", context_of({"web": source}), {}, query="x")


async def test_a_dataset_of_named_columns_is_searched(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "wiki.parquet"
    parquet.write_table(pyarrow.table({"docid": [1, 1], "name": ["A", "B"], "body": ["red fox", "grey wolf"]}), path)
    source = SearchSource(kind="local", path=str(path), text_column="body", title_column="name", id_column="docid")
    provider = await LocalProvider.open(source, tmp_path / "indexes")
    assert await provider.search("wolf", 5) == [Hit("B", "1#2", "grey wolf")]
    assert (await provider.page("1")).text == "red fox"
    await provider.close()


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("laws")
    (folder / "a.txt").write_text("near and or not title text found")
    index = Index(index_file(SearchSource(kind="local", path=str(folder / "a.txt")), folder / "indexes"))
    yield index
    index.close()


@given(
    st.text(st.characters() | st.sampled_from('"*^:()-+{}_\0'), max_size=60)
    | st.sampled_from(["NEAR(a b)", "a AND", '"'])
)
def test_any_text_is_a_query(index: Index, query: str) -> None:
    index.search(query, 3)
    index.page(query)
    assert [hit.address for hit in index.search(f"found {query}", 3)] == ["a.txt"]


async def tavily(request: web.Request) -> web.Response:
    """POST /search. Source: docs.tavily.com, Tavily Search."""
    if (request.method, request.path) != ("POST", "/search"):
        return web.json_response({"detail": "Not Found"}, status=404)
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return web.json_response({"detail": {"error": "Unauthorized: missing or invalid API key."}}, status=401)
    body = await request.json()
    if not body["query"] or not 0 <= body["max_results"] <= 20 or body["search_depth"] not in ("basic", "advanced"):
        return web.json_response({"detail": {"error": "Invalid request"}}, status=400)
    result = {"title": "T", "url": "https://a.example/", "content": f"about {body['query']}", "score": 0.9}
    return web.json_response({"query": body["query"], "images": [], "results": [result], "response_time": "1.67"})


async def brave(request: web.Request) -> web.Response:
    """GET /web/search. Source: api-dashboard.search.brave.com, Web search."""
    if (request.method, request.path) != ("GET", "/web/search"):
        return web.json_response({"type": "ErrorResponse"}, status=404)
    if request.headers.get("X-Subscription-Token") != KEY:
        return web.json_response({"type": "ErrorResponse", "error": {"status": 401}}, status=401)
    query = request.query["q"]
    if not 1 <= len(query) <= 400 or not 1 <= int(request.query["count"]) <= 20:
        return web.json_response({"type": "ErrorResponse", "error": {"status": 422}}, status=422)
    if query == "nothing":
        return web.json_response({"type": "search", "query": {"original": query}})
    result = {"title": "T", "url": "https://a.example/", "description": f"about {query}", "family_friendly": True}
    return web.json_response({"type": "search", "web": {"type": "search", "results": [result]}})


async def searxng(request: web.Request) -> web.Response:
    """GET /search. Source: docs.searxng.org, Search API."""
    if request.path != "/search" or request.query["format"] != "json":
        return web.Response(status=403)
    if not request.query.get("q"):
        return web.Response(status=400)
    result = {"title": "T", "url": "https://a.example/", "content": f"about {request.query['q']}", "engine": "x"}
    return web.json_response(
        {"query": request.query["q"], "results": [result], "answers": [], "unresponsive_engines": []}
    )


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TAVILY_API_KEY", "BRAVE_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("WRONG_KEY", "wrong")
    monkeypatch.setattr(web_module, "_FIRST_PAUSE_S", 0.01)


KINDS = [("tavily", tavily), ("brave", brave), ("searxng", searxng)]


@pytest.mark.parametrize(("kind", "handler"), KINDS)
@pytest.mark.usefixtures("key")
async def test_a_provider_is_asked_as_it_documents(kind: Any, handler: Handler) -> None:
    async with serving(handler) as url:
        source = SearchSource(kind=kind, url=url)
        provider = WebProvider(source)
        assert await provider.search("blue  whales?", 50) == [Hit("T", "https://a.example/", "about blue whales?")]
        for wrong in ("", " \n", "x" * 3000):
            with pytest.raises(ToolFailed, match="a query has 1 to"):
                await provider.search(wrong, 5)
        with pytest.raises(ToolFailed, match="pages cannot be read here"):
            await provider.page("https://a.example/")
        await provider.close()
        seen = await asked("web_search", context_of({"web": source}, "full"), {}, query="x")
        assert seen.content == "1. T\nhttps://a.example/\nabout x"


@pytest.mark.usefixtures("key")
async def test_brave_without_web_results_found_nothing() -> None:
    async with serving(brave) as url:
        provider = WebProvider(SearchSource(kind="brave", url=url))
        assert await provider.search("nothing", 5) == []
        await provider.close()


@pytest.mark.parametrize("kind", ["tavily", "brave"])
@pytest.mark.usefixtures("key")
async def test_a_wrong_or_missing_key_is_the_operators_mistake(kind: Any) -> None:
    async with serving(dict(KINDS)[kind]) as url:
        provider = WebProvider(SearchSource(kind=kind, url=url, key_env="WRONG_KEY"))
        with pytest.raises(ToolUnavailable, match="status 401"):
            await provider.search("x", 5)
        await provider.close()
    for name in ("NO_SUCH_KEY", "GANGLINE_TOKEN"):
        source = SearchSource(kind=kind, key_env=name)
        with pytest.raises(ToolUnavailable, match=f"the environment variable '{name}'"):
            await asked("web_search", context_of({"web": source}, "full"), {}, query="x")


@pytest.mark.usefixtures("key")
async def test_a_busy_provider_is_asked_again() -> None:
    waits = [{"Retry-After": "0"}, {"X-RateLimit-Reset": "0, 1419704"}, {}]

    async def busy(request: web.Request) -> web.Response:
        return web.json_response({}, status=429, headers=waits.pop()) if waits else await brave(request)

    async with serving(busy) as url:
        provider = WebProvider(SearchSource(kind="brave", url=url))
        assert len(await provider.search("x", 5)) == 1
        await provider.close()


async def _nonsense(request: web.Request) -> web.Response:
    return web.Response(text="<html>")


async def _other_form(request: web.Request) -> web.Response:
    return web.json_response({"results": "none"})


async def _huge(request: web.Request) -> web.Response:
    return web.Response(body=b" " * (5 << 20))


async def _slow(request: web.Request) -> web.Response:
    await asyncio.sleep(1)
    return web.json_response({})


async def _elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/")


@pytest.mark.parametrize(
    ("handler", "why"),
    [
        (_nonsense, "failed 4 times; the last time: its answer is not JSON: <html>"),
        (_other_form, "answered in an unknown form"),
        (_huge, "answered more than 4194304 bytes"),
        (_slow, "failed 4 times; the last time: it gave no answer in time"),
        (_elsewhere, "refused the request with status 302"),
    ],
)
@pytest.mark.usefixtures("key")
async def test_an_unusable_answer_is_never_the_models_mistake(handler: Handler, why: str) -> None:
    async with serving(handler) as url:
        provider = WebProvider(SearchSource(kind="tavily", url=url), timeout_s=0.2 if handler is _slow else 30)
        with pytest.raises(ToolUnavailable, match=why):
            await provider.search("x", 5)
        await provider.close()


@pytest.mark.parametrize("network", ["none", "proxy", "list"])
@pytest.mark.usefixtures("key")
async def test_a_task_without_a_network_gets_no_way_out_unless_the_operator_says_so(network: str) -> None:
    async with serving(tavily) as url:
        source = SearchSource(kind="tavily", url=url)
        with pytest.raises(ToolUnavailable, match=f"the task's network is `{network}`"):
            await asked("web_search", context_of({"web": source}, network), {}, query="x")
        source = SearchSource(kind="tavily", url=url, for_offline_tasks=True)
        assert not (await asked("web_search", context_of({"web": source}, network), {}, query="x")).is_error


async def test_a_source_that_the_operator_has_not_named_is_refused() -> None:
    with pytest.raises(ToolUnavailable, match="no search source 'other'; known: web"):
        await asked(
            "web_search", context_of({"web": SearchSource(kind="tavily")}, "full"), {"source": "other"}, query="x"
        )


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"a": {"kind": "local"}}, "a: a local source needs a path"),
        ({"a": {"kind": "searxng"}}, "a: searxng needs the url"),
        ({"a": {"kind": "tavily", "key": "secret"}}, "a: .*unknown field `key`"),
        ({"a": {"kind": "brave", "url": "file:///etc"}}, "a: url must begin"),
        ({"a": {"kind": "google"}}, "a: .*google"),
    ],
)
def test_a_mistake_in_the_nodes_search_sources_is_named(sources: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NodeSettings(search_sources=sources)
