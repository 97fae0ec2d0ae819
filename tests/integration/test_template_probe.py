"""What a probe says of tokenizers and templates: five real families, and engines over their wires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from jinja2 import TemplateError

from gangline.domain.errors import EngineUnavailable, InvalidRequest
from gangline.domain.node_views import TemplateFacts
from gangline.models.engine_server.app import serving
from gangline.models.engines.sglang.engine import SglangEngine
from gangline.models.engines.templates.probe import probe_template
from gangline.models.engines.vllm.engine import VllmEngine
from gangline.models.language.tokenizer import HfChatTokenizer
from gangline.serving.scripted.server import scripted_server
from support.engines import tokenizers
from support.engines.families import FAMILIES, FamilyEngine, Turn, families, family
from support.engines.sglang_engine import FakeSglang, sglang_server
from support.training.agent_loop import agent

# appends tool turns, appends user turns, keeps thinking
APPENDS = {
    "qwen3": (True, True, False),
    "llama31": (True, True, False),
    "gpt_oss": (True, True, False),
    "glm": (True, True, False),
    "smollm2": (True, True, False),
}


# renders tools, renders the results of their calls
RENDERS = {
    "qwen3": (True, True),
    "llama31": (True, True),
    "gpt_oss": (True, True),
    "glm": (True, True),
    "smollm2": (False, True),
}


def _engine(name: str, tokenizer: Any = None) -> FamilyEngine:
    found = family(name)
    if tokenizer is None:
        return FamilyEngine(found, [Turn()])
    return FamilyEngine(type(found)(found.name, lambda: tokenizer, found.write), [Turn()])


@families
async def test_a_template_shows_whether_it_appends_and_keeps_thinking(name: str) -> None:
    facts = await probe_template(_engine(name))
    assert (facts.appends_tool_turns, facts.appends_user_turns, facts.keeps_thinking) == APPENDS[name]


@families
async def test_a_template_shows_whether_it_renders_tools_and_their_results(name: str) -> None:
    facts = await probe_template(_engine(name))
    assert (facts.renders_tools, facts.renders_tool_results) == RENDERS[name]


NOTES_TOOLS = "{% if tools %}You have tools.{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_RESULTS = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}"
REFUSES = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [(NOTES_TOOLS, (False, True)), (NO_RESULTS, (True, False)), (REFUSES, (None, None))],
    ids=["notes that there are tools", "leaves results out", "refuses tools"],
)
async def test_another_template_is_judged_by_what_is_in_the_prompt(
    template: str, expected: tuple[bool | None, bool | None]
) -> None:
    facts = await probe_template(_engine("qwen3", _with_template(tokenizers.qwen3(), template)))
    assert (facts.renders_tools, facts.renders_tool_results) == expected


async def test_families_have_digests_of_their_own_and_the_same_ones_every_time() -> None:
    facts = [await probe_template(_engine(name)) for name in FAMILIES]
    again = [await probe_template(_engine(name)) for name in FAMILIES]
    assert facts == again
    assert len({one.template_digest for one in facts}) == len(facts)
    by_name = dict(zip(FAMILIES, facts, strict=True))
    del by_name["glm"]  # has Qwen3's words
    assert len({one.tokenizer_digest for one in by_name.values()}) == len(by_name)


async def test_the_tokenizers_digest_knows_nothing_of_the_template_nor_the_templates_of_the_tokenizer() -> None:
    qwen3, smollm2 = tokenizers.qwen3(), tokenizers.smollm2()
    swapped = _with_template(qwen3, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    also = _with_template(smollm2, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    plain = await probe_template(_engine("qwen3"))
    a, b = await probe_template(_engine("qwen3", swapped)), await probe_template(_engine("smollm2", also))
    assert a.template_digest == b.template_digest != plain.template_digest
    assert a.tokenizer_digest != b.tokenizer_digest


@pytest.mark.parametrize("date", ["2026-11-21", "21 Nov 2026", "November 21, 2026"])
async def test_a_date_that_a_template_writes_does_not_count(date: str) -> None:
    template = "Today is DATE. {% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    other = {"2026-11-21": "2027-01-02", "21 Nov 2026": "2 Jan 2027", "November 21, 2026": "January 2, 2027"}[date]
    digests = {
        (await probe_template(_engine("qwen3", _with_template(tokenizers.qwen3(), text)))).template_digest
        for text in (template.replace("DATE", date), template.replace("DATE", other))
    }
    assert len(digests) == 1


def _with_template(tokenizer: HfChatTokenizer, template: str) -> Any:
    """The same words under another template."""

    @dataclass
    class Other:
        eos_ids: frozenset[int]

        def encode(self, text: str) -> list[int]:
            return tokenizer.encode(text)

        def decode(self, ids: Any) -> str:
            return tokenizer.decode(ids)

        def is_special(self, token_id: int) -> bool:
            return tokenizer.is_special(token_id)

        def render(self, messages: Any, **arguments: Any) -> list[int]:
            own: Any = tokenizer
            tools = arguments.get("tools")
            try:
                text = own._tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
            except TemplateError as error:
                raise InvalidRequest(str(error)) from error
            return tokenizer.encode(text)

    return Other(tokenizer.eos_ids)


async def test_two_wires_over_one_tokenizer_say_the_same_of_it() -> None:
    async with scripted_server({}) as url, sglang_server(FakeSglang()) as other_url:
        vllm, sglang = VllmEngine(url), SglangEngine(other_url)
        try:
            one, other = (await vllm.probe()).template, (await sglang.probe()).template
        finally:
            await vllm.close()
            await sglang.close()
    assert one.tokenizer_digest == other.tokenizer_digest != ""
    assert one.template_digest != ""
    assert one.appends_user_turns is True


async def test_an_engine_without_a_route_that_renders_says_nothing() -> None:
    async with serving(web.Application()) as url:
        engine = VllmEngine(url, model="m")
        try:
            assert await probe_template(engine) == TemplateFacts()
        finally:
            await engine.close()


async def test_an_engine_that_is_down_is_no_engine_without_a_template() -> None:
    async with serving(web.Application()) as url:
        pass
    engine = VllmEngine(url, model="m")
    try:
        with pytest.raises(EngineUnavailable):
            await probe_template(engine)
    finally:
        await engine.close()


async def test_every_certificate_has_both_digests() -> None:
    facts = await probe_template(_engine("qwen3"))
    async with agent("qwen3", [Turn(text="Hello.")], template=facts) as one:
        for completion in await one.run(2, then="And now?"):
            certificate = completion.certificate
            assert certificate.tokenizer_digest == facts.tokenizer_digest != ""
            assert certificate.template_digest == facts.template_digest != ""
