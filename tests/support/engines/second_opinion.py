"""A small engine that keeps its own log, and the comparison of rows with that log.

It speaks vLLM's chat wire and has its own tokenizer, template, parser and sampler. It imports nothing of Gangline and
nothing of the other engines here, so an error in them cannot hide in it too. It samples ids that its tokenizer would
not choose, thinks, ends some turns early, and drops thinking from earlier turns when it renders.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web

__all__ = ["LoggedCall", "Row", "SecondOpinion", "disagreements", "serving"]

_TURN, _END, _THINK, _THOUGHT, _CALL, _CALLED = range(256, 262)
_SPECIAL = {
    _TURN: "<|turn|>",
    _END: "<|end|>",
    _THINK: "<think>",
    _THOUGHT: "</think>",
    _CALL: "<call>",
    _CALLED: "</call>",
}
_PIECES = [
    "th",
    "he",
    "in",
    "ing",
    "fish",
    "fishing",
    " a",
    " the",
    "er",
    "ab",
    "\n\n",
    "  ",
    '{"',
    '": ',
    '"}',
    "é",
    "日本",
]
_PIECE_IDS = {piece.encode(): 262 + number for number, piece in enumerate(_PIECES)}
_BYTES = {number: piece for piece, number in _PIECE_IDS.items()}
_TEXTS = (
    "the fishing line",
    "a  b\n\n1",
    "café 日本 ing",
    "say <|end|> there",
    "then </think> rather",
    "x",
    " trailing \n\n",
)
_ARGUMENTS = ('{"of": "the door"}', '{"of":"a"}', '{ "of" : "caf\\u00e9" }', '{"of": "<|end|>"}')


class LoggedCall(NamedTuple):
    context_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


class Row(NamedTuple):
    """`ids`, `mask` and `logprobs` have one value for each token, those of the prompt included."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]


def disagreements(rows: Sequence[Row], log: Sequence[LoggedCall]) -> list[str]:
    """Every run of mask 1 is one logged call, whole, in exactly its context; every logged call is one run."""
    found: list[str] = []
    unused = dict(enumerate(log))
    for number, row in enumerate(rows):
        for start, end in _runs(row.mask):
            run = LoggedCall(row.ids[:start], row.ids[start:end], row.logprobs[start:end])
            match = next((key for key, call in unused.items() if _is_same(call, run)), None)
            if match is None:
                found.append(f"row {number}: tokens {start} to {end} are not logged call that is left")
            else:
                del unused[match]
    return found + [f"call {key} is in no row" for key in unused]


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [at for at in range(len(mask) + 1) if (at < len(mask) and mask[at]) != (at > 0 and mask[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _is_same(call: LoggedCall, run: LoggedCall) -> bool:
    return call[:2] == run[:2] and [_single(x) for x in call.logprobs] == [_single(x) for x in run.logprobs]


def _single(value: float) -> float:
    """As rows store it: in 32 bits."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass
class SecondOpinion:
    """takes_prompt_ids: else it ignores the ids that it is sent, as older engines do.

    `odd_prompts` are ids that it was sent and would not have written itself: a logged context, its sample, the end of
    the turn if the sample has none, then the new messages in its template.
    """

    chance: random.Random
    takes_prompt_ids: bool
    log: list[LoggedCall] = field(default_factory=list[LoggedCall])
    odd_prompts: list[list[int]] = field(default_factory=list[list[int]])

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "second", "max_model_len": 100_000}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        tools: list[dict[str, Any]] = body.get("tools") or []
        opens = body.get("add_generation_prompt", True)
        return web.json_response({"tokens": _rendered(body["messages"], tools, opens)})

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": _text((await request.json())["tokens"])})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        tools: list[dict[str, Any]] = body.get("tools") or []
        transfer: dict[str, Any] = body.get("kv_transfer_params") or {}
        sent: list[int] | None = transfer.get("prompt_token_ids")
        context = sent if sent and self.takes_prompt_ids else _rendered(body["messages"], tools, opens=True)
        if sent and self.takes_prompt_ids and sent not in self._continuations(body["messages"]):
            self.odd_prompts.append(sent)
        sampled, finish = self._sample(bool(tools))
        logprobs = [-self.chance.expovariate(2.0) for _ in sampled]
        self.log.append(LoggedCall(list(context), sampled, logprobs))
        message = _message(sampled, len(self.log))
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "tool_calls" if finish == "stop" and message.get("tool_calls") else finish,
            "token_ids": sampled,
            "logprobs": {"content": [{"token": "", "logprob": value, "top_logprobs": []} for value in logprobs]},
        }
        usage = {"prompt_tokens": len(context), "completion_tokens": len(sampled)}
        reply: dict[str, Any] = {"id": "r", "model": "second", "prompt_token_ids": context, "usage": usage}
        if not body.get("stream"):
            return web.json_response(reply | {"choices": [choice | {"message": message}]})
        calls = [call | {"index": number} for number, call in enumerate(message.pop("tool_calls", []))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(reply | {"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    def _continuations(self, messages: Sequence[dict[str, Any]]) -> list[list[int]]:
        """The exact prompts of a call that continues after any logged one."""
        last = max(
            at for at, message in enumerate([{"role": "assistant"}, *messages]) if message["role"] == "assistant"
        )
        new = [*_encoded("\n"), *_rendered(messages[last:], (), opens=True)]
        return [
            [*context, *sampled, *(() if sampled[-1] == _END else (_END,)), *new] for context, sampled, _ in self.log
        ]

    def _sample(self, has_tools: bool) -> tuple[list[int], str]:
        ids: list[int] = []
        if self.chance.random() < 0.6:
            ids += [_THINK, *self._pieces(self.chance.choice(_TEXTS)), _THOUGHT]
        if has_tools and self.chance.random() < 0.5:
            call = f'{{"name": "shot", "arguments": {self.chance.choice(_ARGUMENTS)}}}'
            ids += [_CALL, *self._pieces(call), _CALLED, _END]
        else:
            ids += [*self._pieces(self.chance.choice(_TEXTS)), _END]
        if self.chance.random() < 0.2:
            return ids[: self.chance.randint(1, len(ids) - 1)], "length"
        return ids, "stop"

    def _pieces(self, text: str) -> list[int]:
        """Any of the ways to write it, the tokenizer's own or another."""
        data, ids = text.encode(), list[int]()
        while data:
            piece = self.chance.choice([data[:1], *(piece for piece in _PIECE_IDS if data.startswith(piece))])
            ids.append(_PIECE_IDS.get(piece, piece[0]))
            data = data[len(piece) :]
        return ids


def _encoded(text: str) -> list[int]:
    """The tokenizer's own way: the longest piece first."""
    data, ids = text.encode(), list[int]()
    while data:
        piece = max((piece for piece in _PIECE_IDS if data.startswith(piece)), key=len, default=data[:1])
        ids.append(_PIECE_IDS.get(piece, piece[0]))
        data = data[len(piece) :]
    return ids


def _text(ids: Sequence[int]) -> str:
    parts = [_SPECIAL[one].encode() if one in _SPECIAL else _BYTES.get(one) or bytes([one]) for one in ids]
    return b"".join(parts).decode(errors="replace")


def _rendered(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], opens: bool) -> list[int]:
    ids = [_TURN, *_encoded("tools\n" + json.dumps(tools)), _END] if tools else []
    last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for at, message in enumerate(messages):
        ids += [_TURN, *_encoded(message["role"] + "\n")]
        thinking = message.get("reasoning") or message.get("reasoning_content")
        if thinking and at > last_user:
            ids += [_THINK, *_encoded(thinking), _THOUGHT]
        ids += _encoded(_content(message))
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            ids += [_CALL, *_encoded(json.dumps({"name": call["function"]["name"], "arguments": arguments})), _CALLED]
        ids += [_END, *_encoded("\n")]
    return ids + ([_TURN, *_encoded("assistant\n")] if opens else [])


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _message(ids: Sequence[int], number: int) -> dict[str, Any]:
    """The turn as vLLM's parsers give it: thinking, text, calls; a call that was cut off is text."""
    rest = [one for one in ids if one != _END]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if rest and rest[0] == _THINK:
        end = rest.index(_THOUGHT) if _THOUGHT in rest else len(rest)
        message["reasoning"], rest = _text(rest[1:end]), rest[end + 1 :]
    if rest and rest[0] == _CALL and rest[-1] == _CALLED:
        call = _text(rest[1:-1])
        arguments = call.removeprefix('{"name": "shot", "arguments": ').removesuffix("}")
        function = {"name": "shot", "arguments": arguments}
        message["tool_calls"] = [{"id": f"call{number:05}", "type": "function", "function": function}]
    elif rest:
        message["content"] = _text(rest)
    return message


@asynccontextmanager
async def serving(engine: SecondOpinion) -> AsyncGenerator[str, None]:
    """Its URL on loopback."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/tokenize", engine.tokenize)
    app.router.add_post("/detokenize", engine.detokenize)
    app.router.add_post("/v1/chat/completions", engine.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
