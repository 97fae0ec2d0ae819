"""Which forms of messages real templates take, as a probe finds it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from gangline.domain.errors import EngineRefused, EngineUnavailable
from gangline.domain.node_views import TemplateFacts
from gangline.models.engines.templates.probe import probe_template
from support.engines.templates import MISTRAL, TemplateEngine
from support.engines.tokenizers import template_text

FRONT_ONLY = {"takes_system_alone", "takes_several_system", "takes_late_system", "takes_system_after_results"}
DROPS_LATE = FRONT_ONLY - {"takes_system_alone"}

NOT_TAKEN: dict[str, set[str]] = {
    "qwen3": set(),
    "qwen3_5_nothink": FRONT_ONLY,
    "qwen3_6": FRONT_ONLY,
    "qwen3_8": FRONT_ONLY,
    "qwen3_vl": DROPS_LATE,
    "glm4moe": set(),
    "nemotron_3_nano": set(),
    "llama3_1": {"takes_parallel_calls"},
    "gptoss": DROPS_LATE | {"takes_results_without_calls", "takes_text_and_thinking_with_calls"},
    "gemma4": {"takes_results_without_calls"},
    "gemma": {
        "takes_system",
        "takes_system_alone",
        "takes_several_system",
        "takes_late_system",
        "takes_neighbours",
        "takes_reply_first",
    },
    # It joins all system messages, and puts them first.
    "deepseekv3": {"takes_late_system"},
    "cohere": {"takes_several_system", "takes_late_system", "takes_neighbours", "takes_reply_first"},
}


def not_taken(facts: TemplateFacts) -> set[str]:
    return {
        name for name, value in msgspec.structs.asdict(facts).items() if name.startswith("takes_") and value is False
    }


@pytest.mark.parametrize("name", NOT_TAKEN)
async def test_a_probe_shows_which_messages_a_template_does_not_take(name: str) -> None:
    assert not_taken(await probe_template(TemplateEngine(template_text(name)))) == NOT_TAKEN[name]


async def test_mistrals_ids_are_nine_characters_and_stand_in_the_prompt() -> None:
    facts = await probe_template(TemplateEngine(MISTRAL))
    assert (facts.call_ids, facts.prints_call_ids) == ("nine", True)
    assert not_taken(facts) == {
        "takes_several_system",
        "takes_late_system",
        "takes_neighbours",
        "takes_reply_first",
        "takes_user_after_results",
        "takes_calls_without_results",
        "takes_system_after_results",
        "takes_system_alone",
    }


@pytest.mark.parametrize(("name", "form", "prints"), [("qwen3", "any", False), ("gemma", None, None)])
async def test_other_ids_are_free_and_where_no_call_is_taken_unknown(name: str, form: str | None, prints: bool) -> None:
    facts = await probe_template(TemplateEngine(template_text(name)))
    assert (facts.call_ids, facts.prints_call_ids) == (form, prints)


@pytest.mark.parametrize(("name", "shown"), [("qwen3", True), ("qwen2_5", False), ("gptoss", True)])
async def test_thinking_before_a_call_is_shown_by_some(name: str, shown: bool) -> None:
    assert (await probe_template(TemplateEngine(template_text(name)))).renders_current_thinking is shown


async def test_a_template_that_shows_no_results_says_nothing_about_what_follows_them() -> None:
    """Else a user's text would be put into a result, which nobody sees."""
    template = "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    facts = await probe_template(TemplateEngine(template))
    assert facts.renders_tool_results is False
    assert facts.takes_user_after_results is None


async def test_a_template_that_renders_nothing_without_tools_is_asked_with_one() -> None:
    template = "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    refusing = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + template
    assert (await probe_template(TemplateEngine(refusing))).takes_late_system is True


async def test_forms_whose_prompt_cannot_be_read_are_unknown_where_they_are_accepted() -> None:
    class NoReading(TemplateEngine):
        async def detokenize(self, ids: Sequence[int]) -> str:
            raise EngineRefused("no such route", status=404)

    facts = await probe_template(NoReading(template_text("qwen3_5_nothink")))
    assert (facts.takes_system, facts.takes_several_system, facts.takes_neighbours) == (None, False, None)


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_is_busy_is_not_a_template_that_refuses(status: int) -> None:
    class Busy(TemplateEngine):
        async def detokenize(self, ids: Sequence[int]) -> str:
            raise EngineUnavailable("busy", status=status)

    with pytest.raises(EngineUnavailable):
        await probe_template(Busy(template_text("qwen3")))


async def test_a_probe_asks_for_each_conversation_once() -> None:
    engine = TemplateEngine(template_text("qwen3"))
    await probe_template(engine)
    assert engine.num_asked <= 130
