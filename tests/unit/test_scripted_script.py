"""Which reply a script gives, which tool it picks, which ids it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import InvalidRequest
from gangline.serving.scripted.script import (
    CallTool,
    FileContent,
    ReadFile,
    Reply,
    Rule,
    RunCommand,
    Script,
    WriteFile,
    load_script,
)
from gangline.serving.scripted.tiny_tokenizer import TinyTokenizer
from gangline.serving.scripted.tokens import ReplyEncoder, scripted_logprob
from gangline.serving.scripted.tools import choose_tool

STRING: dict[str, Any] = {"type": "string"}


def tool(name: str, required: list[str] | None = None, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required or list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def turns(*roles: str, text: str = "") -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role in roles]


BASH = tool("bash", command=STRING)


def test_the_first_matching_rule_answers_and_else_the_default() -> None:
    script = Script(
        rules=(Rule(turn=1, text="one"), Rule(pattern="b.d", text="two"), Rule(turn=1, pattern="b.d", text="no")),
        default=Reply(text="none"),
    )
    assert script.reply_to(turns("user", "assistant", "user"), None).text == "one"
    assert script.reply_to(turns("user", text="bad"), None).text == "two"
    assert script.reply_to(turns("user", "assistant", text="bad"), None).text == "one"
    assert script.reply_to(turns("user"), None).text == "none"


def test_a_pattern_looks_at_the_last_message_or_at_all() -> None:
    messages = [*turns("user", text="secret"), {"role": "user", "content": [{"type": "text", "text": "plain"}]}]
    assert not Rule(pattern="secret").matches(messages, None)
    assert Rule(pattern="secret", where="any").matches(messages, None)
    assert Rule(pattern="plain").matches(messages, None)


def test_a_rule_that_needs_a_tool_is_not_for_calls_without_tools() -> None:
    rule = Rule(turn=0, tool_calls=(RunCommand(run="ls"),))
    assert rule.matches(turns("user"), [BASH])
    assert not rule.matches(turns("user"), [])


def test_scripts_load_from_json_and_toml(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rules": [{"turn": 0, "tool_calls": [{"run": "ls"}, {"read": "f"}]}]}')
    (tmp_path / "a.toml").write_text('[[rules]]\nturn = 0\ntool_calls = [{run = "ls"}, {read = "f"}]\n')
    expected = Script(rules=(Rule(turn=0, tool_calls=(RunCommand(run="ls"), ReadFile(read="f"))),))
    assert load_script(tmp_path / "a.json") == load_script(tmp_path / "a.toml") == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"rules": [{"trun": 0}]}', "rules.0.trun"),
        ('{"rules": [{"pattern": "("}]}', "not a regular expression"),
        ('{"default": {"faults": {"status": 200}}}', "default.faults.status"),
        ("{", "not a script"),
    ],
)
def test_a_wrong_script_is_refused_by_field(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        load_script(path)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_script(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("offered", "name", "arguments"),
    [
        (BASH, "bash", {"command": "ls"}),
        (tool("exec_command", cmd=STRING), "exec_command", {"cmd": "ls"}),
        (tool("shell", command={"type": "array", "items": STRING}), "shell", {"command": ["bash", "-lc", "ls"]}),
        (tool("sh", command={"anyOf": [{"type": "array"}, STRING]}), "sh", {"command": "ls"}),
        (tool("sh", script={"type": ["string", "null"]}), "sh", {"script": "ls"}),
        (
            tool("run", command=STRING, why=STRING, background={"type": "boolean"}, timeout={"type": "integer"}),
            "run",
            {"command": "ls", "why": "scripted", "background": False, "timeout": 1},
        ),
    ],
)
def test_a_command_goes_to_the_tool_that_takes_one(
    offered: dict[str, Any], name: str, arguments: dict[str, Any]
) -> None:
    others = [tool("search", query=STRING), tool("editor", command={**STRING, "enum": ["view"]}, path=STRING)]
    assert choose_tool(RunCommand(run="ls"), [*others, offered]) == CallTool(name=name, arguments=arguments)


def test_files_go_to_file_tools_and_else_to_the_shell() -> None:
    write = WriteFile(write=FileContent(path="d/it's", content="a\nb"))
    read = ReadFile(read="d/it's")
    tools = [BASH, tool("edit", path=STRING, old=STRING), tool("write_file", file_path=STRING, content=STRING)]
    assert choose_tool(write, tools) == CallTool(
        name="write_file", arguments={"file_path": "d/it's", "content": "a\nb"}
    )
    assert choose_tool(read, [*tools, tool("Read", path=STRING)]).arguments == {"path": "d/it's"}
    assert choose_tool(read, tools).arguments == {"command": "cat -- 'd/it'\"'\"'s'"}
    by_shell = choose_tool(write, [BASH]).arguments["command"]
    assert by_shell == "mkdir -p -- d && printf %s 'a\nb' > 'd/it'\"'\"'s'"


def test_a_tool_for_many_actions_gets_the_right_one() -> None:
    actions = {**STRING, "enum": ["view", "create", "str_replace"]}
    editor = tool("editor", ["command", "path"], command=actions, path=STRING, file_text=STRING)
    write = WriteFile(write=FileContent(path="f", content="x"))
    assert choose_tool(write, [editor]).arguments == {"command": "create", "path": "f", "file_text": "x"}
    assert choose_tool(ReadFile(read="f"), [editor]).arguments == {"command": "view", "path": "f"}


def test_when_no_tool_fits_the_offered_ones_are_named() -> None:
    with pytest.raises(InvalidRequest, match="offered: search"):
        choose_tool(RunCommand(run="ls"), [tool("search", query=STRING)])


@pytest.mark.parametrize("split", [None, "chars", "bytes"])
def test_a_split_reply_says_the_same_in_other_ids(split: Any) -> None:
    tokenizer = TinyTokenizer()
    encoder = ReplyEncoder(tokenizer)
    call = CallTool(name="bash", arguments={"command": "echo é"})
    whole = encoder.encode(Reply(text="hello world 日本", thinking="the file"), [call], [])
    ids = encoder.encode(Reply(text="hello world 日本", thinking="the file", split=split), [call], [])
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    assert (ids == whole) == (split is None)
    assert ids[-1] == encoder.end_of_turn_id
    assert tokenizer.encode("<tool_call>")[0] in ids


def test_thinking_fits_the_prompt() -> None:
    tokenizer = TinyTokenizer()
    encoder = ReplyEncoder(tokenizer)
    reply = Reply(text="a", thinking="b")

    def written(prompt: str) -> str:
        return tokenizer.decode(encoder.encode(reply, [], tokenizer.encode(prompt))[:-1])

    assert written("assistant\n") == "<think>\nb\n</think>\n\na"
    assert written("assistant\n<think>\n") == "b\n</think>\n\na"
    assert written("assistant\n<think>\n\n</think>\n\n") == "a"


def test_a_reply_cut_for_length_does_not_end_its_turn() -> None:
    encoder = ReplyEncoder(TinyTokenizer())
    assert encoder.end_of_turn_id not in encoder.encode(Reply(text="a", finish="length"), [], [])


def test_log_probs_are_negative_finite_and_differ_by_place() -> None:
    assert scripted_logprob(0, 5) == scripted_logprob(0, 5)
    assert all(-4 < scripted_logprob(position, 5) < 0 for position in range(1000))
    assert len({scripted_logprob(position, 5) for position in range(100)}) > 50


def test_the_scripts_in_the_guide_are_scripts() -> None:
    guide = Path(__file__).parents[2] / "docs/guides/scripted-engine.md"
    blocks = re.findall(r"```json\n(.*?)```", guide.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert Script.model_validate_json(block).rules
