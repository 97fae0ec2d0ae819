"""The plug-in `generate_renderers`: a raw generate route, with the `renderers` library for prompts and replies.

For model families whose template or format is not supported here. The library parses whole replies from their ids, so a
stream delivers a reply at its end. Only `chat_template_kwargs` known to the family's renderer are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError
from renderers import RendererConfig, create_renderer  # pyright: ignore[reportUnknownVariableType]
from transformers import PreTrainedTokenizerFast

from gangline.domain.completion import ParseStatus
from gangline.domain.conversation import ModelCall
from gangline.domain.errors import EngineRefused, InvalidRequest
from gangline.domain.reply import ReplyDelta, ToolCallDelta
from gangline.domain.tokens import TokenIds
from gangline.models.engines.generate.engine import GenerateEngine, RouteName
from gangline.models.engines.generate.text import LocalText, Read, ReplyReader
from gangline.models.engines.http import EngineHttp
from gangline.models.language.models import resolve_tokenizer
from gangline.models.language.text import IncrementalText, StopStrings
from gangline.models.language.tokenizer import HfChatTokenizer
from gangline.models.language.tools import tool_fields

_CONFIG: TypeAdapter[Any] = TypeAdapter(RendererConfig)


def renderers_engine(
    url: str,
    *,
    tokenizer: str = "",
    renderer: str | Mapping[str, Any] = "",
    route: RouteName = "auto",
    model: str | None = None,
    max_context: int | None = None,
    api_key: str | None = None,
    timeout_s: float = 1800.0,
) -> GenerateEngine:
    """
    tokenizer: folder with `tokenizer.json`, or a Hugging Face name that is cached locally.
    renderer: name of a renderer (`qwen3`, `llama-3`, `glm-4.5`, ...), or its whole configuration, including `name`.

    Raises: InvalidRequest, NotFound.
    """
    config = {"name": renderer} if isinstance(renderer, str) else dict(renderer)
    if not tokenizer or not config.get("name"):
        raise InvalidRequest("an engine of ids that `renderers` speaks for needs `tokenizer` and `renderer`.")
    if config["name"] == "custom":
        # It would import any module that a request names.
        raise InvalidRequest("a custom renderer needs an engine plug-in of your own, made of `RenderersText`.")
    folder = resolve_tokenizer(tokenizer)
    loader: Any = PreTrainedTokenizerFast
    core = loader.from_pretrained(str(folder), local_files_only=True)
    text = RenderersText(core, config)
    http = EngineHttp(url, timeout_s=timeout_s, api_key=api_key)
    return GenerateEngine(http, text, route=route, model=model, max_context=max_context)


class RenderersText(LocalText):
    """Implements `TextSide`."""

    reads_calls: bool | None = None

    def __init__(self, core: Any, config: Mapping[str, Any]) -> None:
        """
        core: transformers' tokenizer.
        config: of the renderer, including `name`.

        Raises: InvalidRequest.
        """
        super().__init__(HfChatTokenizer(core))
        self._core = core
        self._config = dict(config)
        self._made: dict[bytes, Any] = {}
        """Template arguments -> their renderer."""
        try:
            self._plain = self._renderer(None)
        except EngineRefused as refused:
            raise InvalidRequest(refused.message) from refused
        self.stop_ids: tuple[int, ...] = tuple(self._plain.get_stop_token_ids())

    def _renderer(self, template_kwargs: dict[str, Any] | None) -> Any:
        key = msgspec.json.encode(template_kwargs or {}, order="sorted")
        if key not in self._made:
            try:
                config = _CONFIG.validate_python(self._config | (template_kwargs or {}))
                self._made[key] = create_renderer(self._core, config)
            except Exception as error:  # it may raise any error of its families, including failed downloads
                why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
                name = self._config.get("name")
                raise EngineRefused(f"renderers cannot make {name!r} with {key.decode()}: {why}", status=400) from error
        return self._made[key]

    def _ids(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> Sequence[int]:
        renderer = self._renderer(template_kwargs)
        try:
            return renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # renderers refuse conversations with any kind of error
            raise EngineRefused(f"the model's renderer refuses these messages: {error}", status=400) from error

    async def reader(self, call: ModelCall, prompt_ids: TokenIds, choice_index: int) -> ReplyReader:
        return _WholeReader(self, self._renderer(call.template_kwargs), call, prompt_ids, choice_index)


class _WholeReader:
    """Looks for stop strings as ids arrive, and parses once all have arrived."""

    def __init__(
        self, side: RenderersText, renderer: Any, call: ModelCall, prompt_ids: TokenIds, choice_index: int
    ) -> None:
        self._renderer = renderer
        self._call = call
        self._prompt_ids: list[int] = prompt_ids.tolist()
        self._choice_index = choice_index
        self._text = IncrementalText(side.tokenizer)
        self._stops = StopStrings(call.sampling.stop)
        self._ids: list[int] = []

    async def feed(self, ids: Sequence[int], finish_reason: str | None) -> Read:
        for position, token_id in enumerate(ids):
            self._ids.append(token_id)
            stop = self._stops.feed(self._text.feed(token_id))[1] if self._call.sampling.stop else None
            if stop is not None:
                return self._parsed("stop", position + 1, stop)
        if finish_reason is None:
            return Read(shown=ReplyDelta(choice_index=self._choice_index), num_kept=len(ids))
        return self._parsed(finish_reason, len(ids), None)

    def _parsed(self, reason: str, num_kept: int, stop: str | None) -> Read:
        tools = [tool_fields(tool) for tool in self._call.tools] or None
        parsed = self._renderer.parse_response(self._ids, tools=tools, prompt_ids=self._prompt_ids)
        good, broken = _calls(parsed.tool_calls)
        content = parsed.content or ""
        if stop is not None and not good:
            content = content[: content.rfind(stop)] if stop in content else content
        # Unparsed calls go into the text, without their tags, which the library does not return.
        content += "".join(attempt.raw for attempt in broken if attempt.raw not in content)
        status: ParseStatus = "ok" if not broken else "partial" if good else "failed"
        return Read(
            shown=ReplyDelta(
                choice_index=self._choice_index,
                thinking=parsed.reasoning_content or "",
                text=content,
                tool_calls=tuple(
                    ToolCallDelta(i, arguments, f"call_{i}", name) for i, (name, arguments) in enumerate(good)
                ),
            ),
            num_kept=num_kept,
            finish_reason="tool_calls" if good and reason == "stop" else reason,
            stop_reason=stop,
            parse=status,
        )


def _calls(attempts: Sequence[Any]) -> tuple[list[tuple[str, str]], list[Any]]:
    """Splits attempts into calls, as (name, arguments as JSON), and the rest."""
    good: list[tuple[str, str]] = []
    broken: list[Any] = []
    for attempt in attempts:
        arguments: object = attempt.arguments
        if attempt.name and isinstance(arguments, dict) and str(attempt.status) in ("ok", "unknown_tool"):
            good.append((attempt.name, msgspec.json.encode(arguments).decode()))
        else:
            broken.append(attempt)
    return good, broken
