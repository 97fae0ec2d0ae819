"""Anthropic Messages: the structure of a request body. Unlisted fields are ignored if they are only hints
(`cache_control`, citations), and named in `ModelCall.dropped` if they would change the reply.

Source: Anthropic API reference, messages; types of the Python SDK 2.12.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class Base64Source(msgspec.Struct, tag="base64"):
    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag="url"):
    url: str


class FileSource(msgspec.Struct, tag="file"):
    file_id: str


class PlainTextSource(msgspec.Struct, tag="text"):
    data: str


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ImageBlock(msgspec.Struct, tag="image"):
    source: Base64Source | UrlSource | FileSource


class ContentSource(msgspec.Struct, tag="content"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(msgspec.Struct, tag="document"):
    source: Base64Source | UrlSource | FileSource | PlainTextSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(msgspec.Struct, tag="tool_reference"):
    tool_name: str


Readable = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
"""Content that a user or a tool can show to the model."""


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking"):
    data: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: Name
    name: Name
    input: msgspec.Raw
    """A JSON object, as the client wrote it."""


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    tool_use_id: Name
    content: str | list[Readable | ToolReferenceBlock] | None = None
    is_error: bool | None = None


class ToolParam(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    mcp_server_name: str | None = None


class NamedTool(msgspec.Struct, tag="tool_reference"):
    name: str


class DefinedTool(msgspec.Struct, tag="tool_definition"):
    definition: ToolParam


class McpTool(msgspec.Struct, tag="mcp_tool_reference"):
    pass


class McpToolset(msgspec.Struct, tag="mcp_toolset_reference"):
    pass


class ToolAdditionBlock(msgspec.Struct, tag="tool_addition"):
    """In a system message: adds the tool from here on."""

    tool: NamedTool | DefinedTool | McpTool | McpToolset


class ToolRemovalBlock(msgspec.Struct, tag="tool_removal"):
    tool: NamedTool | McpTool | McpToolset


Spoken = Readable | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageParam(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Spoken | ToolAdditionBlock | ToolRemovalBlock] | None = None
    """None only for a system message that changes nothing but `output_config`."""
    output_config: Any = None
    clear_at: str | None = None


class ToolChoiceParam(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class FormatParam(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfigParam(msgspec.Struct):
    format: FormatParam | None = None
    effort: str | None = None


class ThreadCreate(msgspec.Struct, tag="create"):
    """Allows continuing the conversation from this reply, by the reply's id."""


class ThreadContinue(msgspec.Struct, tag="continue"):
    previous_message_id: Name


class KeptTurns(msgspec.Struct):
    """Turns that keep their thinking; the provider's default is the last one."""

    type: Literal["all", "thinking_turns"] = "thinking_turns"
    value: Count = 1


class ContextEdit(msgspec.Struct):
    type: Name
    keep: Any = None


class ContextManagement(msgspec.Struct):
    edits: list[ContextEdit] | None = None


class Body(msgspec.Struct):
    model: Name
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfigParam | None = None
    output_format: FormatParam | None = None
    """Beta name of `output_config.format`."""
    thread: ThreadCreate | ThreadContinue | None = None
    cache_control: Any = None
    context_management: ContextManagement | None = None
