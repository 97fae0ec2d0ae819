"""A template that fails at some forms of tools is known for it before any session."""

from __future__ import annotations

import pytest

from gangline.models.engines.templates.probe import probe_template
from support.engines.templates import TemplateEngine
from support.engines.tokenizers import template_text

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        ("{{ tools | tojson }}", ""),
        ("{% for t in tools or [] %}{{ t.function.parameters.properties | length }}{% endfor %}", "parameters"),
        ("{% for t in tools or [] %}{{ 'd: ' + t.function.description }}{% endfor %}", "description"),
        (
            "{% for t in tools or [] %}{% for p in (t.function.parameters or {}).properties.values() %}"
            "{{ 'type: ' + p.type }}{% endfor %}{% endfor %}",
            "",
        ),
    ],
)
async def test_a_template_that_fails_at_some_tools_is_known_for_it(tools: str, why: str) -> None:
    facts = await probe_template(TemplateEngine(tools + TURNS))
    assert facts.refuses_tools == ""
    if "type" in tools:
        assert facts.refuses_some_tools
    else:
        assert why in facts.refuses_some_tools
        assert bool(facts.refuses_some_tools) == bool(why)


async def test_a_tool_without_a_description_is_too_little_for_gpt_oss() -> None:
    facts = await probe_template(TemplateEngine(template_text("gptoss")))
    assert "description" in facts.refuses_some_tools


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "glm4moe", "nemotron_3_nano"])
async def test_templates_of_this_year_take_all_tools(name: str) -> None:
    assert (await probe_template(TemplateEngine(template_text(name)))).refuses_some_tools == ""
