"""A server of one tool over the Model Context Protocol, on its standard streams. Tests give it to agent programs."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {"name": "mush", "description": "Say mush.", "inputSchema": {"type": "object", "properties": {}}}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            told = {"name": "sled", "version": "1"}
            return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": told}}
        case "tools/list":
            return {"result": {"tools": [TOOL]}}
        case "tools/call":
            return {"result": {"content": [{"type": "text", "text": "the dogs run"}]}}
        case _:
            return {"error": {"code": -32601, "message": "unknown method"}}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer(asked)}), flush=True)


if __name__ == "__main__":
    main()
