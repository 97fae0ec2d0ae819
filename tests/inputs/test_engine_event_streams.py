"""Event streams as servers and proxies write them: line ends, comments, empty events, in reads of any size."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import Message, ModelCall, SamplingParams, Text
from gangline.domain.errors import EngineMalformed, EngineUnavailable
from gangline.models.engines.contract import EngineReply, EngineRequest, ReplyAccumulator
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.wire.http.event_stream import SseEvents
from support.node.loopback import serving

ONE, TWO = b'{"a": "\xf0\x9f\x98\x80"}', b'{"b": 2}'


def read(stream: bytes, cuts: tuple[int, ...] = ()) -> list[bytes]:
    events, found = SseEvents(), list[bytes]()
    places = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        found += events.feed(stream[start:end])
    return found + events.finish()


STREAMS = {
    "plain": b"data: %b\n\ndata: %b\n\n",
    "no space": b"data:%b\n\ndata:%b\n\n",
    "comments": b": OPENROUTER PROCESSING\n\ndata: %b\n\n: keep-alive\n\n:\n\ndata: %b\n\n",
    "a comment in an event": b": ping\ndata: %b\n\n:\ndata: %b\n: more\n\n",
    "an event without data": b"event: ping\n\ndata: %b\n\nevent: ping\n\ndata: %b\n\n",
    "empty data": b"data:\n\ndata: %b\n\ndata: \n\ndata: %b\n\n",
    "data without a colon": b"data\n\ndata: %b\n\ndata\n\ndata: %b\n\n",
    "null": b"data: null\n\ndata: %b\n\ndata:null\n\ndata: %b\n\n",
    "ids and retries": b"id: 1\n\nretry: 3000\n\nid: 2\nevent: chunk\ndata: %b\n\nid\nretry\ndata: %b\n\n",
    "fields that nobody knows": b"data-x: 1\ndatax: {}\ndata: %b\n\n data: {}\n\nDATA: {}\n\ndata: %b\n\n",
    "blank lines": b"\n\n\ndata: %b\n\n\n\n\ndata: %b\n\n\n",
    "carriage returns": b"data: %b\r\rdata: %b\r\r",
    "both": b"data: %b\r\n\r\ndata: %b\r\n\r\n",
    "mixed": b"event: a\r\ndata: %b\r\n\n: x\r\r\n\rdata: %b\n\r\n",
    "a byte order mark": b"\xef\xbb\xbfdata: %b\n\ndata: %b\n\n",
    "data over several lines": b'data: %b\n\ndata: {"b":\ndata\ndata: 2}\n\n',
    "no blank line at the end": b"data: %b\n\ndata: %b\n",
    "no line end at the end": b"data: %b\n\ndata: %b",
}


@pytest.mark.parametrize("name", STREAMS)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_the_data_of_a_stream_are_the_same_in_reads_of_any_size(name: str, cuts: list[int]) -> None:
    stream = STREAMS[name].replace(b"%b", ONE, 1).replace(b"%b", TWO, 1)
    for found in (read(stream), read(stream, tuple(cuts)), read(stream, tuple(range(len(stream))))):
        assert [msgspec.json.decode(data) for data in found] == [json.loads(ONE), json.loads(TWO)]


_LINES = st.sampled_from(
    [b"", b":", b": c", b"data", b"data:", b"data: 1", b"data:[2]", b"event: e", b"id: 3", b"retry: 4", b"x"]
)


@given(
    st.lists(st.tuples(_LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=20),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_any_stream_is_read_as_the_standard_says(
    lines: list[tuple[bytes, bytes]], cuts: list[int], with_mark: bool
) -> None:
    written = b"".join(line + end for line, end in lines)
    # A line that ends in CR before an empty line that ends in LF is one line that ends in CR LF.
    plain = written.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    expected, data = list[bytes](), list[bytes]()
    for line in [*plain, b"", b""]:
        if line[:5] == b"data:":
            data.append(line[5:])  # JSON does not mind the space
        elif not line:
            if joined := b"\n".join(data).strip():
                expected.append(joined)
            data = []
    assert read(b"\xef\xbb\xbf" * with_mark + written, tuple(cuts)) == expected


# -- a whole stream, from a server ------------------------------------------------------------------------------------

CALL = ModelCall(
    dialect="d", model="m", messages=(Message("user", (Text("hi"),)),), sampling=SamplingParams(max_tokens=9)
)


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


FIRST = chunk(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[1, 2])
WORD = chunk(choices=[{"index": 0, "delta": {"content": "y\u00e9s"}, "token_ids": [3]}])
LAST = chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = chunk(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 1})
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def engine(
    stream: bytes, piece: Callable[[bytes], list[bytes]] = lambda whole: [whole]
) -> AsyncGenerator[VllmEngine]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in piece(stream):
            await response.write(part)
        return response

    async with serving(answer) as url:
        client = VllmEngine(url, model="m")
        try:
            yield client
        finally:
            await client.close()


async def streamed(stream: bytes, **how: Callable[[bytes], list[bytes]]) -> EngineReply:
    folded = ReplyAccumulator()
    async with engine(stream, **how) as client:
        async for delta in client.stream(EngineRequest(call=CALL)):
            folded.feed(delta)
    return folded.reply()


def bytewise(whole: bytes) -> list[bytes]:
    return [whole[at : at + 1] for at in range(len(whole))]


@pytest.mark.parametrize(
    "stream",
    [
        FIRST + WORD + LAST + USAGE + DONE,
        FIRST + b"data:\n\n" + WORD + b": ping\n\nevent: ping\n\n" + LAST + USAGE + DONE,
        FIRST + WORD + LAST + b"data: null\n\n" + USAGE + b"data: [DONE]",
        (b"\xef\xbb\xbf" + FIRST + WORD + LAST + USAGE + DONE).replace(b"\n", b"\r\n"),
        FIRST + WORD + LAST + chunk(choices=[]) + USAGE + b"data: [DONE] \n\n",
        FIRST + WORD + LAST + USAGE + DONE + b"data: {after}\n\n",
        FIRST + chunk(choices=[], usage=None) + WORD + LAST + USAGE + DONE,
    ],
)
async def test_an_engines_stream_is_whole_whatever_is_between_its_events(stream: bytes) -> None:
    for reply in (await streamed(stream), await streamed(stream, piece=bytewise)):
        (choice,) = reply.choices
        assert (choice.message.parts, choice.finish_reason) == ((Text("y\u00e9s"),), "stop")
        assert (reply.prompt_ids is not None, reply.usage is not None) == (True, True)


@pytest.mark.parametrize(
    ("stream", "error", "why"),
    [
        (FIRST + WORD + LAST + USAGE, EngineUnavailable, "before it was done"),
        (FIRST + WORD + b"data: {\n\n" + DONE, EngineMalformed, "no chat reply"),
        (FIRST + WORD + b"data: OK\n\n" + DONE, EngineMalformed, "no chat reply"),
        (FIRST + chunk(error={"message": "out of pages"}) + DONE, EngineUnavailable, "out of pages"),
        (FIRST + b"event: error\n" + chunk(error="out of pages") + DONE, EngineUnavailable, "out of pages"),
        (FIRST + chunk(object="error", message="out of pages", code=400) + DONE, EngineUnavailable, "out of pages"),
        (b"", EngineUnavailable, "before it was done"),
    ],
)
async def test_a_stream_that_breaks_is_the_engines_fault_and_never_a_reply(
    stream: bytes, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await streamed(stream)
