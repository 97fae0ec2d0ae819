"""The tool call formats of model families, as in their chat templates: their tags, and the readers of the text between.

Each is named after one model; others may share it, such as Apriel with MiniMax M1. `detect` finds a model's format from
its template.
"""

from __future__ import annotations

from gangline.models.language.parsing.json_calls import Headed, read_keyed, read_kimi, read_mistral, read_objects
from gangline.models.language.parsing.literal_calls import read_gemma4, read_lfm2, read_lfm2_raw
from gangline.models.language.parsing.pair_calls import Pairs, read_minimax_m3
from gangline.models.language.parsing.sections import BodyReader, Section


def _invokes(mark: str, kind: str = "") -> Pairs:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`, with `mark` in every tag."""
    return Pairs(
        rf'<{mark}invoke name="(?P<name>[^">]+)">',
        f"</{mark}invoke>",
        rf'<{mark}parameter name="(?P<key>[^">]+)"{kind}>',
        f"</{mark}parameter>",
    )


def _lfm2(read: BodyReader) -> Section:
    return Section(read, opens=("<|tool_call_start|>",), closes=("<|tool_call_end|>",))


SECTIONS: dict[str, Section] = {
    "apertus": Section(read_keyed, opens=("<|tools_prefix|>",), closes=("<|tools_suffix|>",)),
    "cohere": Section(
        read_objects,
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "deepseek_v3": Section(
        Headed(
            (
                r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```(?:json)?\s*",
                "\n```<｜tool▁call▁end｜>",
            ),
            (r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>\s*", "<｜tool▁call▁end｜>"),
        ),
        opens=("<｜tool▁calls▁begin｜>",),
        starts=("<｜tool▁call▁begin｜>",),
        closes=("<｜tool▁calls▁end｜>",),
    ),
    "deepseek_v4": Section(
        _invokes("｜DSML｜", r'(?: string="(?P<kind>true|false)")?'),
        opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        starts=("<｜DSML｜invoke ",),
        closes=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    "functionary": Section(
        Headed((r"<function=(?P<name>[^>\s]+)>\s*", "</function>")),
        starts=("<function=",),
    ),
    "gemma4": Section(read_gemma4, opens=("<|tool_call>",), closes=("<tool_call|>",)),
    "gigachat": Section(read_objects, opens=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n")),
    "hunyuan": Section(
        Pairs(
            r"<tool_call:opensource>(?P<name>[^<\s]+)\s*<tool_sep:opensource>",
            "</tool_call:opensource>",
            r"<arg_key:opensource>(?P<key>[^<]+)</arg_key:opensource>\s*<arg_value:opensource>",
            "</arg_value:opensource>",
        ),
        opens=("<tool_calls:opensource>",),
        starts=("<tool_call:opensource>",),
        closes=("</tool_calls:opensource>",),
    ),
    "kimi_k2": Section(
        read_kimi,
        opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        starts=("<|tool_call_begin|>",),
        closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    ),
    "kimi_k3": Section(
        Pairs(
            r'<\|open\|>call tool="(?P<name>[^"]+)"(?: index="\d+")?<\|sep\|>',
            "<|close|>call<|sep|>",
            r'<\|open\|>argument key="(?P<key>[^"]*)"(?: type="(?P<kind>\w+)")?<\|sep\|>',
            "<|close|>argument<|sep|>",
        ),
        opens=("<|open|>tools<|sep|>",),
        closes=("<|close|>tools<|sep|>",),
        frame=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "lfm2": _lfm2(read_lfm2),
    "lfm2_raw": _lfm2(read_lfm2_raw),
    "minicpm": Section(
        Pairs(r'<function name="(?P<name>[^">]+)">', "</function>", r'<param name="(?P<key>[^">]+)">', "</param>"),
        starts=("<function name=",),
    ),
    "minimax_m1": Section(read_objects, opens=("<tool_calls>",), closes=("</tool_calls>",)),
    "minimax_m2": Section(_invokes(""), opens=("<minimax:tool_call>",), closes=("</minimax:tool_call>",)),
    "minimax_m3": Section(read_minimax_m3, opens=("]<]minimax[>[<tool_call>",), closes=("]<]minimax[>[</tool_call>",)),
    "mistral": Section(read_mistral, starts=("[TOOL_CALLS]",)),
    "muse": Section(
        _invokes("atem:"),
        opens=("<atem:function_calls>",),
        closes=("</atem:function_calls>",),
        frame=(" to={name}<|message|>", " to=user<|message|>", "<|eom|>", "<|start|>assistant"),
    ),
    "nemotron_v2": Section(read_objects, opens=("<TOOLCALL>",), closes=("</TOOLCALL>",)),
    "seed_oss": Section(
        Pairs(r"<function=(?P<name>[^>\s]+)>", "</function>", r"<parameter=(?P<key>[^>]+)>", "</parameter>"),
        opens=("<seed:tool_call>",),
        closes=("</seed:tool_call>",),
    ),
    "solar": Section(
        Headed(
            (
                r"<\|tool_call:begin\|>(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>\s*",
                "<|tool_call:end|>",
            )
        ),
        opens=("<|tool_calls|>",),
        starts=("<|tool_call:begin|>",),
        closes=("<|calls|>",),
        frame=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
}
"""Name of a format -> its tags. Most tags are special tokens: the text must have been decoded with them."""
