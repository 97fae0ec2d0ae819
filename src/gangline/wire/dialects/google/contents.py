"""Google `contents` -> canonical messages.

Laws
- One turn of the model is one assistant message, even if it is echoed in several `model` contents or parts (the SDKs
  keep one per streamed chunk).
- Each `functionResponse` is a tool message; other parts of its content keep their position.
- A `thoughtSignature` on a text or a call belongs to the thought before it, or to an empty thought.

`thoughtSignature`: the opaque field of a part that clients echo. Ours identifies the record of the part.
"""

from __future__ import annotations

import base64
import binascii

from gangline.domain.conversation import Document, Image, Message, Part, Text, Thinking, ToolCall, ToolResult
from gangline.wire.dialects.google.fields import Fields, invalid
from gangline.wire.dialects.google.tools import ToolCalls

_DATA = ("text", "inlineData", "fileData", "functionCall", "functionResponse")
_HOSTED = ("executableCode", "codeExecutionResult", "toolCall", "toolResponse")
_DOCUMENTS = ("application/pdf", "application/json", "application/xml", "text/")
_FILES_API = "https://generativelanguage.googleapis.com/"


class ContentReader:
    """Call it with the contents in order, then read `messages`. Parts without meaning here are named in `dropped`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.dropped: list[str] = []
        self._calls = ToolCalls(self.dropped)

    def add_system(self, value: object, where: str) -> None:
        """Raises: InvalidRequest."""
        fields = Fields({"parts": [{"text": value}]} if isinstance(value, str) else value, where)
        fields.take("role")
        self._add_system(self._parts(fields), where)
        self.dropped += fields.left()

    def add(self, value: object, where: str) -> None:
        """Raises: InvalidRequest."""
        fields = Fields(value, where)
        match fields.text("role") or "user":
            case "user" | "function" | "tool":
                self._add_user(self._parts(fields), fields.at("parts"))
            case "model":
                self._add_model(self._parts(fields), is_empty=not fields.items("parts"))
            case "system":
                self._add_system(self._parts(fields), where)
            case _:
                raise invalid(fields.at("role"), "Please use a valid role: user, model.")
        self.dropped += fields.left()

    def _add_system(self, parts: list[Part], where: str) -> None:
        if not all(isinstance(part, Text) for part in parts):
            raise invalid(where, "A system instruction holds text parts only.")
        self.messages.append(Message("system", tuple(parts)))

    def _add_user(self, parts: list[Part], where: str) -> None:
        if not parts:
            raise invalid(where, "contents.parts must not be empty.")
        beside: list[Part] = []
        for part in parts:
            match part:
                case ToolResult():
                    self._close(beside)
                    self.messages.append(Message("tool", (part,)))
                case Thinking() | ToolCall():
                    raise invalid(where, "Thoughts and function calls come after the role model only.")
                case _:
                    beside.append(part)
        self._close(beside)

    def _close(self, parts: list[Part]) -> None:
        if parts:
            self.messages.append(Message("user", tuple(parts)))
            parts.clear()

    def _add_model(self, parts: list[Part], *, is_empty: bool) -> None:
        if not parts and not is_empty:
            return  # it contained no text of a model
        earlier = self.messages.pop().parts if self.messages and self.messages[-1].role == "assistant" else ()
        self.messages.append(Message("assistant", _joined((*earlier, *parts))))

    # -- parts ---------------------------------------------------------------------------------------------------

    def _parts(self, content: Fields) -> list[Part]:
        return [part for entry, where in content.items("parts") for part in self._part(Fields(entry, where))]

    def _part(self, fields: Fields) -> list[Part]:
        """The content of one part, preceded by an empty thought with its signature, if it has one."""
        given = [name for name in _DATA if fields.take(name) is not None]
        hosted = [name for name in _HOSTED if fields.take(name) is not None]
        if hosted:
            raise invalid(fields.at(hosted[0]), "Parts of hosted tools cannot be carried; leave them out.")
        if len(given) != 1:
            raise invalid(fields.at("data"), "Exactly one field of the oneof 'data' must be set.")
        is_thought, given_signature = fields.flag("thought"), fields.text("thoughtSignature")
        signature = normal_signature(given_signature)
        self.dropped += fields.left()
        if is_thought and given == ["text"]:
            if given_signature and signature is None:
                self.dropped.append(f"{fields.where}: a thought that the client made up")
                return []
            return [Thinking(fields.text("text") or "", signature)]
        part = self._data(given[0], fields)
        return [part] if signature is None else [Thinking("", signature), part]

    def _data(self, name: str, fields: Fields) -> Part:
        match name:
            case "text":
                return Text(fields.text(name) or "")
            case "functionCall":
                return self._calls.call(Fields(fields.take(name), fields.at(name)))
            case "functionResponse":
                response = Fields(fields.take(name), fields.at(name))
                media = [self._result_media(Fields(entry, where)) for entry, where in response.items("parts")]
                return self._calls.result(response, media)
            case _:
                return self._media(name, Fields(fields.take(name), fields.at(name)))

    def _result_media(self, fields: Fields) -> Image | Document:
        for name in ("inlineData", "fileData"):
            if fields.take(name) is not None:
                media = self._media(name, Fields(fields.take(name), fields.at(name)))
                self.dropped += fields.left()
                return media
        raise invalid(fields.at("data"), "A part of a function response holds inlineData or fileData.")

    def _media(self, name: str, fields: Fields) -> Image | Document:
        mime_type = (fields.text("mimeType") or "").lower()
        url = _data_url(fields, mime_type) if name == "inlineData" else _web_url(fields)
        display_name = fields.text("displayName")
        self.dropped += fields.left()
        if mime_type.startswith("image/"):
            return Image(url)
        if mime_type.startswith(_DOCUMENTS):
            return Document(url, display_name)
        raise invalid(fields.at("mimeType"), f"Unsupported MIME type: {mime_type!r}. Images and documents are carried.")


def _data_url(fields: Fields, mime_type: str) -> str:
    data = (fields.text("data") or "").translate(str.maketrans("-_", "+/"))
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(fields.at("data"), "Base64 decoding failed.") from None
    return f"data:{mime_type};base64,{data}"


def _web_url(fields: Fields) -> str:
    uri = fields.text("fileUri") or ""
    if not uri.startswith("https://") or uri.startswith(_FILES_API):
        raise invalid(fields.at("fileUri"), "Only https URLs are carried; send the file as inlineData.")
    return uri


def _joined(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """One turn: adjacent texts and adjacent thoughts are joined, and each signature is set on the thought before it."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match part:
            case Text(""):
                pass
            case Text(text) if isinstance(last, Text):
                joined[-1] = Text(last.text + text)
            case Thinking("", None):
                pass
            case Thinking("", signature):
                _sign(joined, signature or "")
            case Thinking(text, signature) if isinstance(last, Thinking) and _may_join(last.signature, signature):
                joined[-1] = Thinking(last.text + text, last.signature or signature)
            case _:
                joined.append(part)
    return tuple(joined)


def _may_join(one: str | None, other: str | None) -> bool:
    return one is None or other is None or one == other


def _sign(parts: list[Part], signature: str) -> None:
    for i in reversed(range(len(parts))):
        thought = parts[i]
        if isinstance(thought, Thinking):
            if thought.signature in (None, signature):
                parts[i] = Thinking(thought.text, signature)
                return
            break
    parts.append(Thinking("", signature))


# Sent by Gemini CLI and others if they have lost, or never had, a signature.
_SKIP = "skip_thought_signature_validator"
_MADE_BY_CLIENTS = frozenset({_SKIP, base64.b64encode(_SKIP.encode()).decode(), "context_engineering_is_the_way_to_go"})

_URL_SAFE = str.maketrans("-_", "+/")


def reply_signature(reply_id: str) -> str:
    return base64.b64encode(f"gangline:{reply_id}".encode()).decode()


def normal_signature(signature: str | None) -> str | None:
    """The signature as it was sent: the Python SDK echoes bytes in the URL-safe alphabet. None: not from a model."""
    if not signature or signature in _MADE_BY_CLIENTS:
        return None
    standard = signature.translate(_URL_SAFE)
    try:
        base64.b64decode(standard, validate=True)
    except (binascii.Error, ValueError):
        return signature
    return standard
