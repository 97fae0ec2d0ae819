"""Conversations with pictures, as the SDK of each provider sends them; and generated ones."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import anthropic
import openai
from google import genai
from google.genai import types
from PIL import Image as Pillow

__all__ = ["DIALECTS", "Picture", "Step", "Talk", "generated", "picture", "transparent"]


class Picture(NamedTuple):
    media_type: str
    data: bytes

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


class Step(NamedTuple):
    """What the user says, or what the tool answers where the model called it; then the reply that the engine gives."""

    text: str
    pictures: tuple[Picture, ...]
    reply: str


def picture(chance: random.Random) -> Picture:
    size = chance.randrange(8, 120), chance.randrange(8, 120)
    colours = [tuple(chance.randrange(256) for _ in range(3)) for _ in range(2)]
    image = Pillow.new("RGB", size, colours[0])
    image.paste(colours[1], (0, 0, size[0] // 2, size[1]))
    kind, media_type = chance.choice((("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")))
    out = io.BytesIO()
    image.save(out, kind)
    return Picture(media_type, out.getvalue())


def transparent() -> Picture:
    out = io.BytesIO()
    Pillow.new("RGBA", (30, 30), (10, 200, 30, 99)).save(out, "PNG")
    return Picture("image/png", out.getvalue())


_CALL = '<tool_call>\n{"name": "shot", "arguments": {"of": "the door"}}\n</tool_call>'
_SAID = (
    "A red dog on a hill.",
    "It is blue, and rather small.",
    "Two shapes; one is darker.",
    "I see a door.",
)


def generated(chance: random.Random) -> list[Step]:
    """Two to four steps; at least one picture."""
    steps: list[Step] = []
    num_steps = chance.randrange(2, 5)
    for number in range(num_steps):
        num_pictures = chance.choice((0, 1, 1, 2)) if number or num_steps > 2 else 1
        reply = _CALL if number + 1 < num_steps and chance.random() < 0.5 else chance.choice(_SAID)
        text = chance.choice(("What is it?", "Look again.", "And this?", "Compare them, please."))
        steps.append(Step(text, tuple(picture(chance) for _ in range(num_pictures)), reply))
    if not any(step.pictures for step in steps):
        steps[-1] = steps[-1]._replace(pictures=(picture(chance),))
    return steps


class Talk(Protocol):
    """One client; every step is one call."""

    def __init__(self, url: str, session_id: str, key: str) -> None: ...

    async def step(self, text: str, pictures: Sequence[Picture]) -> None:
        """Answer the tool where the last reply called it, else say it as the user."""
        ...

    async def close(self) -> None: ...


_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"of": {"type": "string"}}}


class ChatTalk:
    def __init__(self, url: str, session_id: str, key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/s/{session_id}/v1", api_key=key, max_retries=0)
        self._messages: list[Any] = []
        self._tools: list[Any] = [{"type": "function", "function": {"name": "shot", "parameters": _PARAMETERS}}]

    async def step(self, text: str, pictures: Sequence[Picture]) -> None:
        content = [{"type": "text", "text": text}]
        content += [{"type": "image_url", "image_url": {"url": one.url}} for one in pictures]
        calls = self._messages[-1].get("tool_calls") if self._messages else None
        said: Any = {"role": "user", "content": content}
        if calls:
            said = {"role": "tool", "tool_call_id": calls[0]["id"], "content": content}
        self._messages.append(said)
        reply = await self._client.chat.completions.create(
            model="tiny", messages=self._messages, tools=self._tools, max_tokens=100
        )
        self._messages.append(reply.choices[0].message.model_dump(exclude_none=True))

    async def close(self) -> None:
        await self._client.close()


class ResponsesTalk:
    def __init__(self, url: str, session_id: str, key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/s/{session_id}/v1", api_key=key, max_retries=0)
        self._items: list[Any] = []
        self._tools: list[Any] = [{"type": "function", "name": "shot", "parameters": _PARAMETERS, "strict": False}]

    async def step(self, text: str, pictures: Sequence[Picture]) -> None:
        content: list[Any] = [{"type": "input_text", "text": text}]
        content += [{"type": "input_image", "image_url": one.url, "detail": "auto"} for one in pictures]
        last: dict[str, Any] = self._items[-1] if self._items else {}
        if last.get("type") == "function_call":
            self._items.append({"type": "function_call_output", "call_id": last["call_id"], "output": content})
        else:
            self._items.append({"role": "user", "content": content})
        reply = await self._client.responses.create(
            model="tiny", input=self._items, tools=self._tools, max_output_tokens=100
        )
        self._items += [item.model_dump(exclude_none=True) for item in reply.output]

    async def close(self) -> None:
        await self._client.close()


class AnthropicTalk:
    def __init__(self, url: str, session_id: str, key: str) -> None:
        self._client = anthropic.AsyncAnthropic(base_url=f"{url}/s/{session_id}", api_key=key, max_retries=0)
        self._messages: list[Any] = []
        self._tools: list[Any] = [{"name": "shot", "input_schema": _PARAMETERS}]

    async def step(self, text: str, pictures: Sequence[Picture]) -> None:
        content: list[Any] = [{"type": "text", "text": text}]
        for one in pictures:
            data = base64.b64encode(one.data).decode()
            source = {"type": "base64", "media_type": one.media_type, "data": data}
            content.append({"type": "image", "source": source})
        used = [block["id"] for block in (self._messages[-1]["content"] if self._messages else ()) if "input" in block]
        if used:
            content = [{"type": "tool_result", "tool_use_id": used[0], "content": content}]
        self._messages.append({"role": "user", "content": content})
        reply = await self._client.messages.create(
            model="tiny", messages=self._messages, tools=self._tools, max_tokens=100
        )
        blocks = [block.model_dump(exclude_none=True) for block in reply.content]
        self._messages.append({"role": "assistant", "content": blocks})

    async def close(self) -> None:
        await self._client.close()


class GoogleTalk:
    def __init__(self, url: str, session_id: str, key: str) -> None:
        options = types.HttpOptions(base_url=f"{url}/s/{session_id}")
        self._client = genai.Client(api_key=key, http_options=options)
        self._aio = self._client.aio
        self._contents: list[Any] = []
        self._tools = {"function_declarations": [{"name": "shot", "parameters_json_schema": _PARAMETERS}]}

    async def step(self, text: str, pictures: Sequence[Picture]) -> None:
        call = next((part.function_call for part in self._parts_of_last() if part.function_call), None)
        if call is None:
            parts = [types.Part.from_text(text=text)]
            parts += [types.Part.from_bytes(data=one.data, mime_type=one.media_type) for one in pictures]
        else:
            shown = [types.FunctionResponsePart.from_bytes(data=one.data, mime_type=one.media_type) for one in pictures]
            answer = types.FunctionResponse(id=call.id, name=call.name, response={"output": text}, parts=shown)
            parts = [types.Part(function_response=answer)]
        self._contents.append(types.Content(role="user", parts=parts))
        config: Any = {"tools": [self._tools], "max_output_tokens": 100}
        reply = await self._aio.models.generate_content(model="tiny", contents=self._contents, config=config)
        self._contents.append(reply.candidates[0].content)  # pyright: ignore[reportOptionalSubscript]

    def _parts_of_last(self) -> list[Any]:
        return (self._contents[-1].parts or []) if self._contents else []

    async def close(self) -> None:
        await self._aio.aclose()
        self._client.close()


DIALECTS: dict[str, type[Talk]] = {
    "chat": ChatTalk,
    "responses": ResponsesTalk,
    "anthropic": AnthropicTalk,
    "google": GoogleTalk,
}
