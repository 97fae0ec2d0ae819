"""Which HTTP stack and JSON codec for a node's proxy? Measured for docs/adr/0002; not part of `make bench`.

    pip install aiohttp starlette uvicorn httptools uvloop httpx orjson msgspec   # in its own environment
    python bench/http_stack.py

Each proxy does a node's work on one call: read and decode the request, ask the upstream for token ids, decode its
answer, take the ids out, encode and answer the rest. What counts is the CPU time of the proxy process per call: a node
is one event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

CONCURRENCY = 16
CODECS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "stdlib": (json.loads, lambda value: json.dumps(value).encode()),
    "msgspec": (msgspec.json.decode, msgspec.json.encode),
}


def _bodies(num_prompt_ids: int, num_sampled: int) -> tuple[bytes, bytes]:
    """A chat request of that many tokens (4 characters each), and an engine's answer with its ids and log-probs."""
    messages = [{"role": "user", "content": "word" * num_prompt_ids}]
    request = {"model": "m", "messages": messages, "max_tokens": num_sampled}
    one_logprob = {"token": "word", "logprob": -0.123456789, "bytes": None, "top_logprobs": []}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "prompt_token_ids": [1000 + index % 30000 for index in range(num_prompt_ids)],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * num_sampled},
                "finish_reason": "stop",
                "token_ids": [1000 + index for index in range(num_sampled)],
                "logprobs": {"content": [one_logprob] * num_sampled},
            }
        ],
        "usage": {"prompt_tokens": num_prompt_ids, "completion_tokens": num_sampled},
    }
    return msgspec.json.encode(request), msgspec.json.encode(answer)


SIZES = {"small": (300, 50), "55k ids": (55_000, 500)}


def _outgoing(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "return_token_ids": True, "logprobs": True}


def _stripped(answer: dict[str, Any]) -> dict[str, Any]:
    answer.pop("prompt_token_ids")
    for choice in answer["choices"]:
        choice.pop("token_ids")
        choice.pop("logprobs")
    return answer


def _aiohttp_proxy(port: int, upstream: str, codec: str) -> None:
    decode, encode = CODECS[codec]
    session: list[aiohttp.ClientSession] = []

    async def call(request: web.Request) -> web.Response:
        if not session:
            session.append(aiohttp.ClientSession())
        body = encode(_outgoing(decode(await request.read())))
        async with session[0].post(upstream + request.path, data=body) as response:
            answer = decode(await response.read())
        return web.Response(body=encode(_stripped(answer)), content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{size}", call)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


def _starlette_proxy(port: int, upstream: str, codec: str, client_kind: str) -> None:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    decode, encode = CODECS[codec]
    clients: list[Any] = []

    async def ask(url: str, body: bytes) -> bytes:
        if not clients:
            limits = httpx.Limits(max_connections=200)
            clients.append(httpx.AsyncClient(limits=limits) if client_kind == "httpx" else aiohttp.ClientSession())
        if client_kind == "httpx":
            return (await clients[0].post(url, content=body, timeout=60)).content
        async with clients[0].post(url, data=body) as response:
            return await response.read()

    async def call(request: Request) -> Response:
        body = encode(_outgoing(decode(await request.body())))
        answer = decode(await ask(upstream + request.url.path, body))
        return Response(encode(_stripped(answer)), media_type="application/json")

    app = Starlette(routes=[Route("/{size}", call, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def _upstream(port: int) -> None:
    answers = {f"/{name.split()[0]}": _bodies(*size)[1] for name, size in SIZES.items()}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answers[request.path], content_type="application/json")

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{size}", answer)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


PROXIES: dict[str, Callable[[int, str], None]] = {
    "aiohttp + msgspec": lambda port, url: _aiohttp_proxy(port, url, "msgspec"),
    "aiohttp + orjson": lambda port, url: _aiohttp_proxy(port, url, "orjson"),
    "aiohttp + stdlib json": lambda port, url: _aiohttp_proxy(port, url, "stdlib"),
    "starlette, uvicorn, aiohttp client, msgspec": lambda port, url: _starlette_proxy(port, url, "msgspec", "aiohttp"),
    "starlette, uvicorn, httpx client, msgspec": lambda port, url: _starlette_proxy(port, url, "msgspec", "httpx"),
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _start(*arguments: str, port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, __file__, *arguments, str(port)])
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{arguments} does not listen")


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _load(url: str, body: bytes, num_calls: int) -> float:
    """Calls per second at CONCURRENCY."""
    left = iter(range(num_calls))
    async with aiohttp.ClientSession() as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(url, data=body) as response:
                    await response.read()

        started = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        return num_calls / (time.monotonic() - started)


def _measure(name: str, upstream_port: int) -> None:
    port = _free_port()
    proxy = _start("proxy", name, f"http://127.0.0.1:{upstream_port}", port=port)
    try:
        for size, numbers in SIZES.items():
            body, _ = _bodies(*numbers)
            url = f"http://127.0.0.1:{port}/{size.split()[0]}"
            num_calls = 1500 if size == "small" else 150
            asyncio.run(_load(url, body, num_calls // 10))
            before = _cpu_s(proxy.pid)
            rate = asyncio.run(_load(url, body, num_calls))
            cpu_ms = (_cpu_s(proxy.pid) - before) / num_calls * 1e3
            print(f"| {name} | {size} | {cpu_ms:.2f} | {rate:.0f} |", flush=True)
    finally:
        proxy.kill()
        proxy.wait()


def _measure_codecs() -> None:
    print("\n| JSON | decode a 55k-id answer, ms | encode it, ms |\n|---|---|---|")
    _, answer = _bodies(*SIZES["55k ids"])
    for name, (decode, encode) in CODECS.items():
        value = decode(answer)
        times: list[float] = []
        for work in (lambda d=decode: d(answer), lambda e=encode, v=value: e(v)):
            best = min(_timed(work) for _ in range(30))
            times.append(best * 1e3)
        print(f"| {name} | {times[0]:.2f} | {times[1]:.2f} |")


def _timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    import orjson

    CODECS["orjson"] = (orjson.loads, orjson.dumps)
    match sys.argv[1:]:
        case ["upstream", port]:
            _upstream(int(port))
        case ["proxy", name, upstream, port]:
            PROXIES[name](int(port), upstream)
        case _:
            upstream_port = _free_port()
            upstream = _start("upstream", port=upstream_port)
            try:
                print("| proxy | body | CPU ms a call | calls/s |\n|---|---|---|---|")
                for name in PROXIES:
                    _measure(name, upstream_port)
            finally:
                upstream.kill()
                upstream.wait()
            _measure_codecs()


if __name__ == "__main__":
    main()
