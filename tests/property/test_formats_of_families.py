"""Calls of model families: what a template of the family writes is read back as it was, however it is cut.

Templates are TRL's, llama.cpp's where they lie in `.venv/chat-templates`, and, for families that neither has, a few
lines of our own that write calls as the family's template does. `make test-templates` generates 200 calls for each,
`make test` 40.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gangline.models.language.parsing.detect import detect_parsers
from gangline.models.language.parsing.events import CallEvent, TextEvent
from gangline.models.language.parsing.families import SECTIONS
from gangline.models.language.parsing.parser import Parsers, ReplyParser, ToolFormat

# A busy machine is not a failure.
patient = settings(
    deadline=None,
    max_examples=int(os.environ.get("GANGLINE_CALLS", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
LLAMA_CPP = Path(__file__).parents[2] / ".venv" / "chat-templates"

_INVOKES = (
    'OPEN{% for c in calls %}\n<MARKinvoke name="{{ c.name }}">{% for k, v in c.arguments.items() %}\n'
    '<MARKparameter name="{{ k }}"KIND>{{ v if v is string else v | tojson }}</MARKparameter>{% endfor %}\n'
    "</MARKinvoke>{% endfor %}\nCLOSE"
)
_M3 = (
    '{%- set ns = "]<]minimax[>[" -%}{%- macro xml(v) -%}{%- if v is mapping -%}{% for k, w in v.items() if w is not '
    "none %}{{ ns }}<{{ k }}>{{ xml(w) }}{{ ns }}</{{ k }}>{% endfor %}{%- elif v is iterable and v is not string -%}"
    "{% for w in v %}{{ ns }}<item>{{ xml(w) }}{{ ns }}</item>{% endfor %}{%- elif v is boolean -%}{{ v | tojson }}"
    "{%- elif v is not none -%}{{ v }}{%- endif -%}{%- endmacro -%}{{ ns }}<tool_call>\n{% for c in calls %}{{ ns }}"
    '<invoke name="{{ c.name }}">{{ xml(c.arguments) }}{{ ns }}</invoke>\n{% endfor %}{{ ns }}</tool_call>'
)
_NAMED = '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
_EACH = "{% for c in calls %}"
_LIST = "[{% for c in calls %}" + _NAMED + "{{ ', ' if not loop.last }}{% endfor %}]"
OWN: dict[ToolFormat, str] = {
    "apertus": (
        '<|tools_prefix|>[{% for c in calls %}{"{{ c.name }}": {{ c.arguments | tojson }}}{{ ", " if not loop.last }}'
        "{% endfor %}]<|tools_suffix|>"
    ),
    "cohere": (
        '<|START_ACTION|>[\n{% for c in calls %}    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
        '"parameters": {{ c.arguments | tojson }}}{{ "," if not loop.last }}\n{% endfor %}]<|END_ACTION|>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | "
        "tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v4": (
        _INVOKES.replace("MARK", "｜DSML｜")
        .replace("KIND", " string=\"{{ 'true' if v is string else 'false' }}\"")
        .replace("OPEN", "<｜DSML｜tool_calls>")
        .replace("CLOSE", "</｜DSML｜tool_calls>")
    ),
    "functionary": _EACH + "<function={{ c.name }}>{{ c.arguments | tojson }}</function>{% endfor %}",
    "gigachat": "{% for c in calls[:1] %}<|function_call|>" + _NAMED + "{% endfor %}",
    "hunyuan": (
        "<tool_calls:opensource>\n{% for c in calls %}<tool_call:opensource>{{ c.name }}<tool_sep:opensource>\n{% for "
        "k, v in c.arguments.items() %}<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>"
        "{{ v if v is string else v | tojson }}</arg_value:opensource>\n{% endfor %}</tool_call:opensource>\n"
        "{% endfor %}</tool_calls:opensource>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|>{% for c in calls %}<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>'
        '{% for k, v in c.arguments.items() %}<|open|>argument key="{{ k }}" type="{{ "string" if v is string else '
        '"object" }}"<|sep|>{{ v if v is string else v | tojson }}<|close|>argument<|sep|>{% endfor %}'
        "<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>"
    ),
    "minicpm": (
        '{% for c in calls %}<function name="{{ c.name }}">{% for k, v in c.arguments.items() %}<param name="{{ k }}">'
        "{% if v is string and ('<' in v or '&' in v or '\n' in v) %}<![CDATA[{{ v }}]]>{% else %}{{ v }}{% endif %}"
        "</param>{% endfor %}</function>\n{% endfor %}"
    ),
    "minimax_m1": "<tool_calls>\n{% for c in calls %}" + _NAMED + "\n{% endfor %}</tool_calls>",
    "minimax_m2": (
        _INVOKES.replace("MARK", "")
        .replace("KIND", "")
        .replace("OPEN", "<minimax:tool_call>")
        .replace("CLOSE", "</minimax:tool_call>")
    ),
    "minimax_m3": _M3,
    "mistral": (
        "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[CALL_ID]abcdefgh{{ loop.index0 }}[ARGS]{{ c.arguments | tojson }}"
        "{% endfor %}"
    ),
    "nemotron_v2": f"<TOOLCALL>{_LIST}</TOOLCALL>",
    "seed_oss": (
        "{% for c in calls %}<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
        "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}"
    ),
    "solar": (
        "<|tool_calls|>{% for c in calls %}<|tool_call:begin|>abcdefgh{{ loop.index0 }}<|tool_call:name|>{{ c.name }}"
        "<|tool_call:args|>{{ c.arguments | tojson }}<|tool_call:end|>{% endfor %}<|calls|>"
    ),
}
TEMPLATES: dict[str, ToolFormat] = {
    "trl/deepseekv3": "deepseek_v3",
    "trl/gemma4": "gemma4",
    "trl/gemma4_v2": "gemma4",
    "trl/gemma4_v3": "gemma4",
    "trl/gemma4_v4": "gemma4",
    "trl/gemma4_v5": "gemma4",
    "trl/lfm2_2_5": "lfm2_raw",
    "trl/lfm2_2_5_vl": "lfm2",
    "trl/lfm2_v2": "lfm2",
    "trl/muse_glimmer": "muse",
    "llama.cpp/Apertus-8B-Instruct": "apertus",
    "llama.cpp/Apriel-1.6-15b-Thinker-fixed": "minimax_m1",
    "llama.cpp/ByteDance-Seed-OSS": "seed_oss",
    "llama.cpp/Cohere2MoE": "cohere",
    "llama.cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "llama.cpp/GigaChat3-10B-A1.8B": "gigachat",
    "llama.cpp/GigaChat3.1-10B-A1.8B": "gigachat",
    "llama.cpp/Kimi-K3": "kimi_k3",
    "llama.cpp/LFM2.5-8B-A1B": "lfm2_raw",
    "llama.cpp/MiniMax-M1": "minimax_m1",
    "llama.cpp/MiniMax-M2": "minimax_m2",
    "llama.cpp/MiniMax-M3": "minimax_m3",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "llama.cpp/NVIDIA-Nemotron-Nano-v2": "nemotron_v2",
    "llama.cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "llama.cpp/deepseek-ai-DeepSeek-V3.1": "deepseek_v3",
    "llama.cpp/deepseek-ai-DeepSeek-V3.2": "deepseek_v4",
    "llama.cpp/deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "llama.cpp/deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek_v4",
    "llama.cpp/google-gemma-4-31B-it": "gemma4",
    "llama.cpp/google-gemma-4-31B-it-interleaved": "gemma4",
    "llama.cpp/meetkai-functionary-medium-v3.1": "functionary",
    "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "llama.cpp/moonshotai-Kimi-K2": "kimi_k2",
    "llama.cpp/openbmb-MiniCPM5-1B": "minicpm",
    "llama.cpp/tencent-Hy3": "hunyuan",
    "llama.cpp/unsloth-Apriel-1.5": "minimax_m1",
    "llama.cpp/unsloth-mistral-Devstral-Small-2507": "mistral",
    "llama.cpp/upstage-Solar-Open-100B": "solar",
}
OWN_PREFIX = "own/"
ALL: dict[str, ToolFormat] = {**{OWN_PREFIX + name: name for name in OWN}, **TEMPLATES}
WANTS_TEXT = frozenset({"trl/deepseekv3"})
"""Arguments as JSON text."""
UNESCAPED = frozenset({"llama.cpp/LFM2.5-8B-A1B"})
"""Quotes stay as they are in quoted texts, so that a text may look like its own end and a further argument."""
WRITES_ONE = frozenset({"llama.cpp/GigaChat3-10B-A1.8B", "llama.cpp/GigaChat3.1-10B-A1.8B", "own/gigachat"})


class Characters:
    """A tokenizer of characters, whose template is `text`."""

    eos_ids: frozenset[int] = frozenset()
    num_ids = 0x110000

    def __init__(self, text: str) -> None:
        core = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")))
        core.chat_template = text
        core.bos_token, core.eos_token = "<BOS>", "<EOS>"
        self._core: Any = core

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        options = {**(template_kwargs or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self.encode(self._core.apply_chat_template(list(messages), tokenize=False, **options))

    def is_special(self, token_id: int) -> bool:
        return False


@cache
def template(name: str) -> Characters:
    if name.startswith(OWN_PREFIX):
        written = OWN[ALL[name]]
        turns = (
            "{% for m in messages %}{% if m.tool_calls %}{% set calls = m.tool_calls | map(attribute='function') | list"
        )
        return Characters(turns + " %}" + written + "{% endif %}{% endfor %}")
    source, file = name.split("/", 1)
    found = importlib.util.find_spec("trl") if source == "trl" else None
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else LLAMA_CPP
    path = folder / f"{file}.jinja"
    if not path.is_file():
        pytest.skip(f"no {path.name}: pip install --no-deps trl==1.16.0, or `make test-templates` for llama.cpp's")
    return Characters(path.read_text(encoding="utf-8"))


Call = tuple[str, dict[str, Any]]


def told(name: str, calls: Sequence[Call]) -> str:
    """The assistant's turn with these calls, with what the template writes around it."""
    written = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(values) if name in WANTS_TEXT else values},
        }
        for index, (tool, values) in enumerate(calls)
    ]
    user = {"role": "user", "content": "q"}
    tokenizer = template(name)
    before = tokenizer.decode(tokenizer.render([user], tools=TOOLS, add_generation_prompt=False))
    turn = {"role": "assistant", "content": "", "tool_calls": written}
    whole = tokenizer.decode(tokenizer.render([user, turn], tools=TOOLS, add_generation_prompt=False))
    return whole.removeprefix(before)


SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "A text."},
            "line": {"type": "integer", "description": "A number."},
            "share": {"type": "number", "description": "A number."},
            "force": {"type": "boolean", "description": "Yes or no."},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Text or nothing."},
            "kind": {"enum": ["a", "b", "12"], "type": "string", "description": "One of them."},
            "names": {"type": "array", "items": {"type": "string"}, "description": "Texts."},
            "point": {"$ref": "#/$defs/point", "description": "A reference."},
        },
        "required": ["path"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "at": {"type": "string"},
                    "more": {"type": "array", "items": {"type": "integer"}},
                },
            }
        },
    },
    "mcp__tools-2.go": {"type": "object", "properties": {"at": {"type": "string", "description": "A text."}}},
}
TOOLS = [
    {"type": "function", "function": {"name": tool, "description": "A tool.", "parameters": schema}}
    for tool, schema in SCHEMAS.items()
]
TAME = [
    "a",
    "Zürich 日本",
    "12",
    "true",
    "null",
    "<b>",
    "</b>",
    "&amp;",
    '"',
    "'",
    "\n",
    " ",
    "{",
    "}",
    "[1]",
    ",",
    "x=1",
    "😀",
]


def texts(words: Sequence[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(words), max_size=6).map("".join)


def calls_of(words: Sequence[str], name: str) -> st.SearchStrategy[list[Call]]:
    text = texts(words)
    point = st.fixed_dictionaries(
        {"x": st.integers(-5, 5)}, optional={"at": text, "more": st.lists(st.integers(0, 3), min_size=1, max_size=2)}
    )
    look = st.fixed_dictionaries(
        {"path": text},
        optional={
            "line": st.integers(-(10**6), 10**6),
            "share": st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3)),
            "force": st.booleans(),
            "either": st.one_of(text.filter(lambda x: x.strip() not in ("null", "None")), st.none()),
            "kind": st.sampled_from(["a", "b", "12"]),
            "names": st.lists(text, min_size=1, max_size=3),
            "point": point,
        },
    ).map(lambda values: ("look", values))
    go = st.fixed_dictionaries({"at": text}).map(lambda values: ("mcp__tools-2.go", values))
    return st.lists(st.one_of(look, go), min_size=1, max_size=1 if name in WRITES_ONE else 3)


def tags(name: str) -> list[str]:
    """Words that the family's own format has."""
    section = SECTIONS[ALL[name]]
    inner = ["</invoke>", "</parameter>", '<parameter name="x">', "]]>", "</function>", "\\n", "\\", "```", '<|"|>']
    inner += ["]<]minimax[>[</at>", "<|close|>argument<|sep|>", "', at='", ")]", "</｜DSML｜parameter>", "item"]
    return [*section.opens, *section.starts, *section.closes, *inner]


cuts = st.lists(st.integers(0, 400), max_size=10)


def read(name: str, text: str, at: Sequence[int]) -> tuple[list[Call], str, str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in at), len(text)]
    parser = ReplyParser(Parsers(ALL[name]), schemas=SCHEMAS)
    events = [event for start, end in itertools.pairwise(borders) for event in parser.feed(text[start:end])]
    events += parser.finish()
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, CallEvent)]
    return calls, parser.status, "".join(event.text for event in events if isinstance(event, TextEvent))


def without_nulls(name: str, calls: Sequence[Call]) -> list[Call]:
    """MiniMax M3's template leaves them out."""
    if ALL[name] != "minimax_m3":
        return list(calls)
    return [(tool, {key: value for key, value in values.items() if value is not None}) for tool, values in calls]


@pytest.mark.parametrize("name", ALL)
@patient
@given(data=st.data(), at=cuts)
def test_calls_are_read_back_as_the_template_wrote_them(name: str, data: st.DataObject, at: list[int]) -> None:
    calls = data.draw(calls_of(TAME, name))
    assume(name not in UNESCAPED or not re.search(r"',\w+=", json.dumps(calls)))
    text = told(name, calls)
    found, status, _ = read(name, text, at)
    assert (found, status) == (without_nulls(name, calls), "ok"), text


@pytest.mark.parametrize("name", ALL)
@patient
@given(data=st.data(), at=cuts)
def test_a_call_that_is_read_wrongly_is_never_ok(name: str, data: st.DataObject, at: list[int]) -> None:
    """Values have the format's own tags in them. Where two calls are written alike, no reader can tell them apart.

    Nor where they differ in the white space between tags alone: models leave it out, so it is read as if it were there.
    """
    calls = data.draw(calls_of([*TAME, *tags(name)], name))
    text = told(name, calls)
    found, status, shown = read(name, text, at)
    assert (found, status, shown) == read(name, text, [])
    if status == "ok":
        assert found == without_nulls(name, calls) or closed_up(told(name, found)) == closed_up(text), text


def closed_up(text: str) -> str:
    return re.sub(r">\s+<", "><", text)


@pytest.mark.parametrize("name", ALL)
@patient
@given(data=st.data(), at=cuts)
def test_any_text_reads_alike_however_it_is_cut(name: str, data: st.DataObject, at: list[int]) -> None:
    calls = data.draw(calls_of(TAME, name))
    written = told(name, calls)
    words = [*tags(name), *SECTIONS[ALL[name]].frame, "x", "\n", written, written[: len(written) // 2], '{"name": "']
    text = data.draw(texts(words))
    whole = read(name, text, [])
    assert read(name, text, at) == whole
    assert read(name, text, range(len(text))) == whole


@pytest.mark.parametrize("name", ALL)
def test_the_format_is_found_by_the_template(name: str) -> None:
    assert detect_parsers(template(name)).tools == ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_no_other_format_reads_the_same_calls(name: str) -> None:
    text = told(name, [("look", {"path": "a\\n'b"})])
    for other in SECTIONS:
        parser = ReplyParser(Parsers.named({"tools": other}), schemas=SCHEMAS)
        found = [event for event in parser.feed(text) + parser.finish() if isinstance(event, CallEvent)]
        assert other == ALL[name] or all(json.loads(call.arguments) != {"path": "a\\n'b"} for call in found), other
