"""A server that takes records of turns and throws them away: `python bench/turn_sink.py PORT`."""

from __future__ import annotations

import sys

from aiohttp import web


async def take(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"lost": []})


if __name__ == "__main__":
    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/v1/nodes/{node}/turns", take)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
