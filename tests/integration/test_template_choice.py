"""A task's choice of thinking, and clients' words for it, as they reach real templates over an engine's wire."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest

from gangline.domain.node_views import TemplateFacts
from gangline.domain.placement import Allowed
from gangline.domain.task import TaskRequest
from gangline.interop.polar.sessions import needs_of_ours
from gangline.interop.polar.tasks import task_from_polar
from gangline.models.engines.templates.choices import probe_choices
from gangline.models.engines.templates.renderings import Renderings
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.node.sessions.attempt import Attempt
from gangline.serving.scripted.server import scripted_server
from support.engines import tokenizers
from support.node.attempt import lease_of, node_parts
from support.node.proxy import Proxied, proxied

SCRIPT: dict[str, Any] = {"default": {"text": "Well."}}
QWEN_OFF = "<think>\n\n</think>"

FACTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "thinking_on": {"enable_thinking": True},
        "thinking_off": {"enable_thinking": False},
        "efforts": {},
        "keeps_thinking_with": {},
        "refuses_tools": "",
    },
    "smollm2": {"thinking_on": {}, "thinking_off": {}, "efforts": {}, "keeps_thinking_with": {}, "refuses_tools": ""},
    "gpt_oss": {
        "thinking_on": {},
        "thinking_off": {},
        "efforts": {"reasoning_effort": ("low", "medium", "high")},
        "keeps_thinking_with": {},
        "refuses_tools": "",
    },
}


def tokenizer_of(name: str) -> Any:
    return getattr(tokenizers, name)()


@pytest.mark.parametrize("name", list(FACTS))
async def test_a_template_shows_what_it_takes(name: str) -> None:
    async with scripted_server(SCRIPT, tokenizer_of(name)) as url:
        engine = VllmEngine(url)
        try:
            assert await probe_choices(engine, Renderings(engine), TemplateFacts()) == FACTS[name]
            template = (await engine.probe()).template
            assert template.thinking_on == FACTS[name]["thinking_on"]
        finally:
            await engine.close()


def prompt_of(running: Proxied, name: str, at: int = -1) -> str:
    completion = running.journal.completions[at]
    return tokenizer_of(name).decode(running.session.tree.prompt_ids(completion).tolist())


async def chat(running: Proxied, **fields: Any) -> Any:
    async with running.client() as client:
        messages: Any = [{"role": "user", "content": "x"}]
        return await client.chat.completions.create(model="m", messages=messages, extra_body=fields)


async def anthropic_call(running: Proxied, **fields: Any) -> Any:
    base = running.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=running.session.key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        return await client.messages.create(model="m", max_tokens=8, messages=messages, extra_body=fields)


QWEN_WORDS: list[tuple[Callable[..., Any], dict[str, Any], bool]] = [
    (chat, {}, False),
    (chat, {"reasoning_effort": "high"}, False),
    (chat, {"enable_thinking": False}, True),
    (chat, {"reasoning_effort": "none"}, True),
    (anthropic_call, {}, False),
    (anthropic_call, {"thinking": {"type": "adaptive"}}, False),
    (anthropic_call, {"thinking": {"type": "disabled"}}, True),
]


@pytest.mark.parametrize(("ask", "said", "is_off"), QWEN_WORDS)
async def test_a_clients_words_reach_the_template_that_has_them(
    ask: Callable[..., Any], said: dict[str, Any], is_off: bool
) -> None:
    async with proxied(SCRIPT, tokenizer_of("qwen3")) as running:
        await ask(running, **said)
        assert (QWEN_OFF in prompt_of(running, "qwen3")) is is_off
        metadata = running.journal.completions[0].metadata
        assert ("template_kwargs" in metadata) is bool(said)  # nothing said: nothing sent


async def test_an_effort_reaches_a_template_that_takes_it_and_a_switch_that_it_lacks_is_recorded() -> None:
    async with proxied(SCRIPT, tokenizer_of("gpt_oss")) as running:
        await chat(running, reasoning_effort="xhigh")
        await anthropic_call(running, thinking={"type": "disabled"})
        assert "Reasoning: high" in prompt_of(running, "gpt_oss", 0)
        assert "Reasoning: medium" in prompt_of(running, "gpt_oss", 1)
        first, second = running.journal.completions
        assert first.metadata["template_kwargs"] == {"reasoning_effort": "high"}
        assert "thinking on (the template cannot switch it)" in first.dropped
        assert "thinking off (the template cannot switch it)" in second.dropped


@pytest.mark.parametrize("tier", ["auto", "observe"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tasks_arguments_go_with_every_call_on_every_route(tier: Any, stream: bool) -> None:
    arguments = {"enable_thinking": False}
    async with (
        proxied(SCRIPT, tokenizer_of("qwen3"), tier=tier, template_kwargs=arguments) as running,
        running.client() as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for _ in range(2):
            options: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
            answer: Any = await client.chat.completions.create(model="m", messages=messages, stream=stream, **options)
            if stream:
                async for _piece in answer:
                    pass
            messages += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "y"}]
        first, second = running.journal.completions
        for at, completion in enumerate((first, second)):
            assert prompt_of(running, "qwen3", at).rstrip().endswith("</think>")
            assert completion.metadata["template_kwargs"] == arguments
            assert completion.metadata["template_kwargs_wished"] == {"enable_thinking": True}
        assert first.branch_key == second.branch_key


async def test_counting_tokens_counts_the_prompt_that_would_be_sent() -> None:
    counts: list[int] = []
    for arguments in ({}, {"enable_thinking": False}):
        async with proxied(SCRIPT, tokenizer_of("qwen3"), template_kwargs=arguments) as running:
            base = running.base_url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=base, api_key=running.session.key) as client:
                told = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
                counts.append(told.input_tokens)
            await anthropic_call(running)
            completion = running.journal.completions[0]
            assert len(running.session.tree.prompt_ids(completion)) == counts[-1]
    assert counts[1] > counts[0]


async def test_a_session_whose_arguments_the_operator_refuses_does_not_run(tmp_path: Path) -> None:
    async with node_parts(tmp_path / "node") as parts:
        refusing = msgspec.structs.replace(parts, allowed=Allowed(template_kwargs=frozenset({"thinking"})))
        result = await Attempt(lease_of(capture={"template_kwargs": {"enable_thinking": False}}), refusing).live()
    assert (result.outcome, result.reward) == ("infra_error", None)
    assert result.failure is not None
    assert "`enable_thinking` is refused" in result.failure.message
    assert not result.failure.retryable


@pytest.mark.parametrize("where", ["model_kwargs", "extra_body"])
def test_polars_templates_choose_thinking_in_an_agents_settings(where: str) -> None:
    """`agent.settings.model_kwargs.chat_template_kwargs`, as skill2env's published template sends it."""
    arguments = {"chat_template_kwargs": {"enable_thinking": False}}
    kwargs = {"temperature": 0.0, **(arguments if where == "model_kwargs" else {"extra_body": arguments})}
    agent = {"harness": "pi", "settings": {"model_kwargs": kwargs}}
    runtime = {"backend": "docker", "image": "x"}
    task = task_from_polar({"task_id": "t", "instruction": "x", "agent": agent, "runtime": runtime})
    assert isinstance(task, TaskRequest)
    assert task.capture.template_kwargs == {"enable_thinking": False}
    assert task.capture.sampling is not None
    assert task.agent.settings == {}
    assert any(name.startswith("capture") for name in needs_of_ours(task)), needs_of_ours(task)
