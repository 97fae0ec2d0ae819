"""One session with a NeMo Gym resources server: seeded with a dataset row, used through its tools, then verified.

The session is identified by the server's cookie. Tools are the functions of the row, each a route, or the tools of
`/mcp` if the server offers it. `finish` is for the grader: it posts the row, with the calls and the agent's answer as
a response of the Responses API, to `/verify`, and returns that reward. Needs no package.

Source: NeMo Gym's wheel 0.7.0, `nemo_gym/base_resources_server.py`, `nemo_gym/mcp_auto_exposure.py`,
`responses_api_agents/simple_agent/app.py`.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from .protocol import Refused, Result, Tool
from .server import Answer, Http, read, start

_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_ANSWER = {"type": "object", "properties": {"answer": {"type": "string"}}}
_FINISH = "finish"
_MCP = {"Accept": "application/json, text/event-stream"}


class ResourcesSession:
    """Starts the server if a command is configured, and seeds a session."""

    def __init__(self, config: dict[str, Any]) -> None:
        if config["command"]:
            start(config["command"])
        self._http = Http(config["url"], config["start_seconds"])
        self._row: dict[str, Any] = config["row"]
        self._params: dict[str, Any] = self._row["responses_create_params"]
        self._items: list[dict[str, Any]] = []
        """Calls and their outputs, as items of a response."""
        self._is_verified = False
        seeded = self._http.ask_first("/seed_session", self._row)
        self._mcp: dict[str, Any] | None = seeded.get("mcp")
        self.instructions = _input_text(self._params.get("input", ""))
        self.tools = (*self._offered(), Tool(_FINISH, "Verify the answer.", _ANSWER, self._finish))

    def _offered(self) -> list[Tool]:
        offered: list[dict[str, Any]] = self._asked("list")["tools"] if self._mcp else self._params.get("tools") or []
        tools: list[Tool] = []
        for one in offered:
            if not self._mcp and one["type"] != "function":
                continue
            if one["name"] == _FINISH:
                raise ValueError(f"a tool of the server is named `{_FINISH}`, which is the grader's")
            schema = one.get("inputSchema" if self._mcp else "parameters") or _NOTHING
            tools.append(Tool(one["name"], one.get("description") or "", schema, partial(self._use, one["name"])))
        return tools

    def _use(self, name: str, arguments: dict[str, Any]) -> Result:
        """Raises: Refused with the server's error, which NeMo Gym also shows to the model."""
        if self._is_verified:
            raise Refused("The episode is over.")
        answer = self._called(name, arguments)
        call_id = f"call_{len(self._items) // 2}"
        call = {"call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
        self._items.append({"type": "function_call", "id": f"fc_{call_id}", "status": "completed", **call})
        self._items.append({"type": "function_call_output", "call_id": call_id, "output": answer.text})
        if answer.status >= 400:
            raise Refused(answer.text)
        return Result(answer.text)

    def _called(self, name: str, arguments: dict[str, Any]) -> Answer:
        if self._mcp is None:
            return self._http.ask(f"/{name}", arguments)
        result = self._asked("call", name=name, arguments=arguments)
        text = "\n".join(part["text"] for part in result["content"] if part["type"] == "text")
        return Answer(400 if result.get("isError") else 200, text)

    def _asked(self, what: str, **params: Any) -> dict[str, Any]:
        """The result of `tools/list` or `tools/call`. Raises: RuntimeError."""
        assert self._mcp is not None
        path = self._mcp["url_path"]
        message = {"jsonrpc": "2.0", "id": 1, "method": f"tools/{what}", "params": params}
        answer = read(path, self._http.ask(path, message, {**_MCP, **self._mcp["headers"]}))
        if "error" in answer:
            raise RuntimeError(f"tools/{what} of {path} failed: {answer['error']}")
        return answer["result"]

    def _finish(self, arguments: dict[str, Any]) -> Result:
        self._is_verified = True
        none: list[Any] = []
        text = {"type": "output_text", "text": str(arguments.get("answer") or ""), "annotations": none}
        message = {"type": "message", "id": "msg_answer", "role": "assistant", "status": "completed", "content": [text]}
        response: dict[str, Any] = {
            "id": "resp_session",
            "object": "response",
            "created_at": int(time.time()),
            "model": self._params.get("model") or "policy",
            "output": [*self._items, message],
            "parallel_tool_calls": self._params.get("parallel_tool_calls", True),
            "tool_choice": self._params.get("tool_choice", "auto"),
            "tools": self._params.get("tools") or [],
        }
        verdict = read("/verify", self._http.ask("/verify", {**self._row, "response": response}))
        if verdict.get("mask_sample"):
            why = verdict.get("failure_reason") or verdict.get("failure_kind") or "it did not say why"
            raise RuntimeError(f"the server gave no valid reward: {why}")
        reported = {key: verdict[key] for key in ("reward", "reward_components") if key in verdict}
        return Result(json.dumps(reported), float(verdict["reward"]), done=True)


def _input_text(given: str | list[dict[str, Any]]) -> str:
    """The texts of a row's messages."""
    if isinstance(given, str):
        return given
    contents = [item.get("content") or "" for item in given]
    parts = [[{"text": content}] if isinstance(content, str) else content for content in contents]
    return "\n\n".join(part["text"] for content in parts for part in content if part.get("text"))


begin = ResourcesSession
