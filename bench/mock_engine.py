"""An engine that costs as little as Python allows: what a benchmark of the proxy puts behind every proxy.

    python bench/mock_engine.py NUM_PROMPT NUM_SAMPLED PORT [EVENTS_PER_S [RENDERS]]

It speaks the part of vLLM's routes that a proxy needs (chat, streamed or not, `/tokenize`, `/v1/models`, `/version`) on
a bare asyncio protocol. Reply bodies are encoded once. Exact prompt ids in `kv_transfer_params` are echoed as the bytes
that came, unparsed. EVENTS_PER_S paces each stream, one token an event, and a whole answer takes as long; without it
all comes at once. With RENDERS (1) a prompt without ids is what `/tokenize` renders, whatever NUM_PROMPT is: else the
node would see stitched prompts that the template does not write, and not send them.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import zlib
from typing import Any

STOP_ID, PROMPT_ID = 2, 3
MAX_CONTEXT = 1_000_000
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_IDS_KEY = b'"prompt_token_ids":['


class Replies:
    """Everything that is sent, as bytes."""

    def __init__(self, num_prompt: int, num_sampled: int) -> None:
        self.prompt_ids = ",".join(str(1000 + index * 7 % 90_000) for index in range(num_prompt)).encode()
        sampled = [1000 + index * 13 % 90_000 for index in range(num_sampled - 1)] + [STOP_ID]
        entries = [
            _logprob(f" w{index % 1000}", -0.001 * (index % 4000) - 0.0123456789) for index in range(num_sampled)
        ]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled}
        usage["total_tokens"] = num_prompt + num_sampled
        head: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "mock", "object": "chat.completion"}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(entry["token"] for entry in entries)},
            "logprobs": {"content": entries},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": sampled,
        }
        whole = json.dumps(head | {"choices": [choice], "usage": usage, "prompt_token_ids": None})
        self.before_ids, self.after_ids = (part.encode() for part in whole.rsplit("null", 1))
        head["object"] = "chat.completion.chunk"
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        opening = json.dumps(head | {"choices": [first], "prompt_token_ids": None})
        self.stream_before_ids, self.stream_after_ids = (part.encode() for part in opening.rsplit("null", 1))
        self.events = [
            _event(head | {"choices": [_piece(entry, token, last=index == num_sampled - 1)]})
            for index, (entry, token) in enumerate(zip(entries, sampled, strict=True))
        ]
        self.ending = _event(head | {"choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def whole(self, ids: bytes) -> bytes:
        return b"".join((self.before_ids, b"[", ids, b"]", self.after_ids))

    def opening(self, ids: bytes) -> bytes:
        return b"".join((b"data: ", self.stream_before_ids, b"[", ids, b"]", self.stream_after_ids, b"\n\n"))


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}


def _piece(entry: dict[str, Any], token: int, *, last: bool) -> dict[str, Any]:
    return {
        "index": 0,
        "delta": {"content": entry["token"]},
        "logprobs": {"content": [entry]},
        "finish_reason": "stop" if last else None,
        "token_ids": [token],
    }


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """Keep-alive HTTP/1.1 with Content-Length bodies; one request at a time."""

    def __init__(self, replies: Replies, events_per_s: float, *, renders: bool) -> None:
        self._replies = replies
        self._events_per_s = events_per_s
        self._renders = renders
        self._received = bytearray()
        self._needed = 0
        self._streaming: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._streaming is not None:
            self._streaming.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < self._needed or (end := self._received.find(b"\r\n\r\n")) < 0:
            return
        head = bytes(self._received[:end])
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"),
            0,
        )
        self._needed = end + 4 + length
        if len(self._received) >= self._needed:
            body = bytes(self._received[end + 4 : self._needed])
            del self._received[: self._needed]
            self._needed = 0
            self._answer(head.split(b" ", 2)[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        match path:
            case "/v1/chat/completions":
                self._chat(body)
            case "/tokenize":
                # No engine lists more ids than its context has.
                self._json({"tokens": render(json.loads(body)["messages"])[:MAX_CONTEXT]})
            case "/v1/models":
                card = {"id": "mock", "object": "model", "max_model_len": MAX_CONTEXT}
                self._json({"object": "list", "data": [card]})
            case _:
                self._json({"version": "0.33.0", "status": "ok"})

    def _chat(self, body: bytes) -> None:
        start = body.rfind(_IDS_KEY) if body.endswith(b"]}}") else -1  # they are the last field
        ids = self._prompt_ids(body) if start < 0 else body[start + len(_IDS_KEY) : body.index(b"]", start)]
        end = len(body) if start < 0 else start
        fields = body[:400] + body[max(0, end - 400) : end]  # never the messages: they may be long
        if b'"stream":true' not in fields and b'"stream": true' not in fields:
            self._whole(self._replies.whole(ids), _MAX_TOKENS.search(fields))
        elif self._events_per_s > 0:
            self._streaming = asyncio.create_task(self._paced(ids))
        else:
            self._begin_stream()
            self._chunk(self._replies.opening(ids) + b"".join(self._replies.events) + self._replies.ending)
            self._transport.write(b"0\r\n\r\n")

    def _prompt_ids(self, body: bytes) -> bytes:
        if not self._renders:
            return self._replies.prompt_ids
        return ",".join(map(str, render(json.loads(body)["messages"]))).encode()

    def _whole(self, answer: bytes, most: re.Match[bytes] | None) -> None:
        """most: tokens that were asked for; a probe asks for few."""
        if self._events_per_s == 0:
            self._send(answer)
            return
        num_tokens = len(self._replies.events)
        after_s = (num_tokens if most is None else min(num_tokens, int(most[1]))) / self._events_per_s
        asyncio.get_running_loop().call_later(after_s, self._send, answer)

    async def _paced(self, ids: bytes) -> None:
        """A token at each step, and all streams step together, as an engine's batch does."""
        loop = asyncio.get_running_loop()
        self._begin_stream()
        self._chunk(self._replies.opening(ids))
        step = int(loop.time() * self._events_per_s)
        for event in self._replies.events:
            step += 1
            due_at = step / self._events_per_s
            if (wait_s := due_at - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._chunk(event)
        self._chunk(self._replies.ending)
        self._transport.write(b"0\r\n\r\n")

    def _begin_stream(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def _chunk(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, fields: dict[str, Any]) -> None:
        self._send(json.dumps(fields).encode())

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)


def render(messages: list[dict[str, Any]]) -> list[int]:
    """A template that appends: role, words, stop id for each message; then the generation prompt, which is how an
    assistant's message begins."""
    ids: list[int] = []
    for message in messages:
        ids.append(PROMPT_ID if message["role"] == "assistant" else 10 + zlib.crc32(message["role"].encode()) % 80)
        ids += [1000 + zlib.crc32(word.encode()) % 90_000 for word in str(message.get("content") or "").split()]
        ids.append(STOP_ID)
    return [*ids, PROMPT_ID]


async def main(num_prompt: int, num_sampled: int, port: int, events_per_s: float = 0.0, renders: int = 0) -> None:
    replies = Replies(num_prompt, num_sampled)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(replies, events_per_s, renders=renders == 1), "127.0.0.1", port, backlog=1024
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*(int(value) for value in sys.argv[1:])))
